"""Llama 3 of any size for torchtitan 0.3.x, and the small byte-level one that runs anywhere.

    python -m lowbit_attn.integrations.torchtitan.launch --module lowbit_attn.integrations.torchtitan.models_v03
        --config llama3_bytes_small
"""

from dataclasses import replace
from typing import Any

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, compute_ffn_hidden_dim
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
    model_registry,
)
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from lowbit_attn.integrations.torchtitan import documents
from lowbit_attn.integrations.torchtitan.documents import TRAINING, ByteTokenizer
from lowbit_attn.integrations.torchtitan.v03 import enable


def llama3_spec(flavor: str, *, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, vocab_size: int, multiple_of: int = 256,
                ffn_dim_multiplier: float | None = None, attn_backend: str = "varlen") -> ModelSpec:
    """A torchtitan Llama 3 of a size that its registry does not name; head_dim is dim / n_heads."""
    rope = ComplexRoPE.Config(dim=dim // n_heads, max_seq_len=131072, theta=500000, scaling="llama")
    model = Llama3Model.Config(
        dim=dim, vocab_size=vocab_size, norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=dim, param_init=_EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab_size, param_init=_output_linear_init(dim)),
        layers=_build_llama3_layers(
            n_layers=n_layers, dim=dim, n_heads=n_heads, n_kv_heads=n_kv_heads, rope=rope, attn_backend=attn_backend,
            hidden_dim=compute_ffn_hidden_dim(dim, multiple_of=multiple_of, ffn_dim_multiplier=ffn_dim_multiplier)))
    return replace(model_registry("debugmodel"), flavor=flavor, model=model)


def llama3_config(spec: ModelSpec, *, lr: float, seq_len: int, local_batch_size: int, steps: int, warmup_steps: int,
                  dataset: str, hf_assets_path: str = ".", log_freq: int = 1, **others: Any) -> Trainer.Config:
    """A trainer config around a model; `others` are fields of Trainer.Config."""
    return Trainer.Config(
        model_spec=spec, hf_assets_path=hf_assets_path, optimizer=default_adamw(lr=lr),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=warmup_steps),
        training=TrainingConfig(local_batch_size=local_batch_size, seq_len=seq_len, steps=steps),
        dataloader=HuggingFaceTextDataLoader.Config(dataset=dataset), metrics=MetricsProcessor.Config(log_freq=log_freq),
        activation_checkpoint=SelectiveAC.Config(), **others)


def llama3_bytes_small() -> Trainer.Config:
    """The byte-level model of the demo in MXFP8 attention, on the standard library's sources; head_dim 64."""
    return _bytes("small", dim=256, n_layers=4, n_heads=4, n_kv_heads=2)


def llama3_bytes_tiny() -> Trainer.Config:
    """The same at the size of the tests."""
    return _bytes("tiny", dim=128, n_layers=2, n_heads=2, n_kv_heads=1)


def _bytes(flavor: str, **size: Any) -> Trainer.Config:
    documents.register()
    spec = llama3_spec(flavor, vocab_size=ByteTokenizer.vocab_size, multiple_of=64, **size)
    config = llama3_config(replace(spec, name="llama3_bytes", state_dict_adapter=None), lr=1e-3, seq_len=512, local_batch_size=2,
                           steps=10, warmup_steps=2, dataset=TRAINING, tokenizer=ByteTokenizer.Config())
    return enable(config, recipe="mxfp8")


__all__ = ["llama3_bytes_small", "llama3_bytes_tiny", "llama3_config", "llama3_spec"]
