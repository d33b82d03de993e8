"""One rank of a context-parallel run: `python parallel_worker.py RANK FOLDER SCHEME RECIPE PIPELINE`; leaves its latents there.

Two GPUs are used where there are two.
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from family_pipelines import FAMILIES
from tiny_pipelines import TEXT_DIM, run_wan, wan

from lowbit_attn.integrations.diffusers import patch, report

RANKS = 2


def build(name):
    pipe, run = (wan(experts=1), run_wan) if name == "wan" else (FAMILIES[name].make(), FAMILIES[name].run)
    if name == "minimax-h3":  # a packed sequence of even length, for two ranks
        run = functools.partial(run, prompt_embeds=torch.ones(1, 17, TEXT_DIM), text_token_tags=torch.ones(17, dtype=torch.long))
    with torch.no_grad():  # peaked attention: near uniform, a wrong merge of the ranks would not show
        for module in pipe.transformer.modules():
            if getattr(module, "norm_q", None) is not None:
                module.norm_q.weight.mul_(6)
    return pipe, run


def main(rank: int, folder: Path, scheme: str, recipe: str, name: str) -> None:
    torch.set_num_threads(1)
    on_gpus = torch.cuda.device_count() >= RANKS
    if on_gpus:
        torch.cuda.set_device(rank)
    else:
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    dist.init_process_group("nccl" if on_gpus else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank,
                            world_size=RANKS)
    pipe, run = build(name)
    if on_gpus:
        pipe.to(f"cuda:{rank}")
    config = {"ulysses": {"ulysses_degree": RANKS}, "ring": {"ring_degree": RANKS}}[scheme]
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(**config))
    latents = run(patch(pipe, recipe), steps=2)
    torch.save({"latents": latents.cpu(), "ran": report(pipe).counts()}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
