"""Llama 3 with MXFP8 attention in torchtitan 0.3.x, as config functions to copy. From the folder that holds this file:

    torchrun --nproc_per_node 8 -m torchtitan.train --module torchtitan_v03_llama3 --config llama3_8b_mxfp8

`llama3_debug_mxfp8` needs no download, and no GPU with `python -m lowbit_attn.integrations.torchtitan.launch` in the place of
torchtitan.train. To turn low-bit attention on in a config function of your own, wrap what it returns in `enable`. Without a
config function, torchtitan's command line does the same: see the top of lowbit_attn/integrations/torchtitan/v03.py.
"""

from torchtitan.config import CompileConfig
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer

from lowbit_attn.integrations.torchtitan import enable
from lowbit_attn.integrations.torchtitan.models_v03 import llama3_bytes_small, llama3_config, llama3_spec


def llama3_debug_mxfp8() -> Trainer.Config:
    """A small byte-level Llama on the standard library's sources."""
    return llama3_bytes_small()


def llama3_1b_mxfp8() -> Trainer.Config:
    """The setting of FLAMIA's pretraining (section 4.6): a 1B Llama 3, contexts of 2k tokens, 100B tokens, eight GPUs.

    Widths are Llama 3.2 1B's with FLAMIA's head_dim of 128; the paper's optimizer settings are not public, so those here are
    torchtitan's usual ones. The paper trains on FineWeb-Edu, which torchtitan does not know by name.
    """
    spec = llama3_spec("1B", dim=2048, n_layers=16, n_heads=16, n_kv_heads=8, vocab_size=128256, multiple_of=1024,
                       ffn_dim_multiplier=1.5, attn_backend="flex")
    config = llama3_config(spec, lr=6e-4, seq_len=2048, local_batch_size=16, steps=380000, warmup_steps=1000, dataset="c4",
                           hf_assets_path="./assets/hf/Llama-3.2-1B", log_freq=10, compile=CompileConfig(enable=True))
    config.metrics.enable_tensorboard = True
    return enable(config, recipe="mxfp8", probe_every=500)


def llama3_8b_mxfp8() -> Trainer.Config:
    """torchtitan's own 8B, with a first and a last layer in bf16."""
    config = llama3_8b()
    config.compile = CompileConfig(enable=True)
    return enable(config, recipe="mxfp8", layers=[{"blocks": {"first": 1}, "recipe": "bf16"},
                                                  {"blocks": {"last": 1}, "recipe": "bf16"}])
