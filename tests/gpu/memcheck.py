"""Small calls of the Hopper kernels for compute-sanitizer, which reports reads and writes outside of allocations; `make memcheck`.

Odd lengths, documents, key lengths and head dims, each tensor an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING), so that
one element too far is outside of it.
"""

import time

import torch
from hopper_inputs import DOCUMENTS, inputs, packed, padded_keys

import lowbit_attn
from lowbit_attn.recipes import resolve

RECIPES = ("mxfp8", "mxfp8_fast", "nvfp4_fp8", "fused_mxfp6", "fused_mxfp8", "mxattention", "mxfp4_ocp")
SHAPES = [(2, 129, 127, 2, 1, 128), (1, 77, 300, 2, 1, 96), (2, 130, 150, 2, 1, 64), (1, 260, 300, 2, 1, 160)]


def each(recipe: str):
    """Calls of one recipe by name; each returns an output, with a graph where the recipe trains in these kernels."""
    causal, trains = resolve(recipe).causal, resolve(recipe).trains and resolve(recipe).saves_codes
    for shape in SHAPES:
        q, k, v = (x.requires_grad_(trains and shape[-1] <= 128) for x in inputs(*shape))
        for is_causal in {False, causal}:
            for deterministic in {False, q.requires_grad}:
                yield (f"{shape} causal={is_causal} deterministic={deterministic}", (q, k, v),
                       lambda q=q, k=k, v=v, is_causal=is_causal, deterministic=deterministic: lowbit_attn.attention(
                           q, k, v, recipe=recipe, is_causal=is_causal, causal_align="bottom_right" if is_causal else None,
                           enable_gqa=True, deterministic=deterministic))
    for deterministic in {False, trains}:
        q, k, v, lengths = padded_keys()
        q, k, v = (x.requires_grad_(trains) for x in (q, k, v))
        yield ("key_lengths", (q, k, v), lambda q=q, k=k, v=v, lengths=lengths, deterministic=deterministic: lowbit_attn.attention(
            q, k, v, recipe=recipe, key_lengths=lengths, enable_gqa=True, deterministic=deterministic))
        q, k, v, *bounds = packed(DOCUMENTS["mixed"], 4, 2, 128, tail=77)
        q, k, v = (x.requires_grad_(trains) for x in (q, k, v))
        yield ("packed", (q, k, v), lambda q=q, k=k, v=v, bounds=bounds, deterministic=deterministic: lowbit_attn.varlen_attention(
            q, k, v, *bounds, recipe=recipe, is_causal=causal, enable_gqa=True, deterministic=deterministic))


def main() -> None:
    start = time.monotonic()
    for recipe in RECIPES:
        assert lowbit_attn.explain(recipe, "cuda").backend == "hopper"
        for name, leaves, call in each(recipe):
            output = call()
            if output.requires_grad:
                torch.autograd.grad(output, leaves, output.detach())
            torch.cuda.synchronize()
            print(f"{recipe} {name}: {time.monotonic() - start:.1f} s", flush=True)
    print("complete")


if __name__ == "__main__":
    main()
