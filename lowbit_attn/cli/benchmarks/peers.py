"""Attention by others, in 16 bits or in low ones, on the same inputs."""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowbit_attn.cli.benchmarks import cudnn_fp8
from lowbit_attn.cli.benchmarks.contenders import Bound, Contender, Scope, UnavailableError, first, importable
from lowbit_attn.cli.benchmarks.workloads import Inputs


def sdpa(backend: SDPBackend | None) -> Any:
    """torch's scaled_dot_product_attention through one backend, or through the one that torch picks."""

    def bind(inputs: Inputs) -> Bound:
        workload, query = inputs.workload, inputs.query
        if workload.packed:
            raise UnavailableError("torch SDPA takes no packed documents")
        if backend is not None and query.device.type != "cuda":
            raise UnavailableError(f"needs a GPU, this device is {query.device}")
        grouped = workload.heads != workload.kv_heads

        def run() -> Tensor:
            with nullcontext() if backend is None else sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, inputs.key, inputs.value, is_causal=workload.causal,
                                                      enable_gqa=grouped)

        return Bound(run, first)

    return bind


def torch_varlen(inputs: Inputs) -> Bound:
    """torch.nn.attention.varlen.varlen_attn."""
    workload = inputs.workload
    if inputs.cu is None:
        raise UnavailableError("takes packed documents only")
    if inputs.query.device.type != "cuda":
        raise UnavailableError(f"needs a GPU, this device is {inputs.query.device}")
    varlen = importable("torch.nn.attention.varlen", "torch.nn.attention.varlen").varlen_attn
    parameters = inspect.signature(varlen).parameters
    options: dict[str, Any] = ({"window_size": (-1, 0 if workload.causal else -1)} if "window_size" in parameters
                               else {"is_causal": workload.causal})
    if workload.heads != workload.kv_heads:
        if "enable_gqa" not in parameters:
            raise UnavailableError(f"varlen_attn of torch {torch.__version__} has no grouped heads")
        options["enable_gqa"] = True
    arguments = (inputs.query, inputs.key, inputs.value, inputs.cu, inputs.cu, inputs.longest, inputs.longest)
    return Bound(lambda: varlen(*arguments, **options), first)


def flash_attention_4(inputs: Inputs) -> Bound:
    """flash_attn.cute: flash_attn_func, or flash_attn_varlen_func for packed documents."""
    interface = importable("flash_attn.cute", "flash-attn-4")
    if inputs.query.device.type != "cuda":
        raise UnavailableError(f"needs a GPU, this device is {inputs.query.device}")
    causal = inputs.workload.causal
    if inputs.cu is not None:
        packed = {"cu_seqlens_q": inputs.cu, "cu_seqlens_k": inputs.cu, "max_seqlen_q": inputs.longest,
                  "max_seqlen_k": inputs.longest, "causal": causal}
        return Bound(lambda: interface.flash_attn_varlen_func(inputs.query, inputs.key, inputs.value, **packed), first)
    q, k, v = (x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value))
    return Bound(lambda: interface.flash_attn_func(q, k, v, causal=causal), lambda result: first(result).transpose(1, 2))


def sage_attention(inputs: Inputs) -> Bound:
    """sageattention.sageattn, which quantizes inside the call."""
    attend = importable("sageattention", "sageattention").sageattn
    if inputs.workload.packed:
        raise UnavailableError("sageattn takes no packed documents")
    if inputs.query.device.type != "cuda":
        raise UnavailableError(f"needs a GPU, this device is {inputs.query.device}")
    q, k, v = inputs.query, inputs.key, inputs.value
    return Bound(lambda: attend(q, k, v, tensor_layout="HND", is_causal=inputs.workload.causal), first)


BF16_PEERS = (
    Contender("torch SDPA cuDNN bf16", Scope.CALL, sdpa(SDPBackend.CUDNN_ATTENTION), baseline=True),
    Contender("torch SDPA flash bf16", Scope.CALL, sdpa(SDPBackend.FLASH_ATTENTION), baseline=True),
    Contender("torch varlen bf16", Scope.CALL, torch_varlen, baseline=True),
    Contender("flash-attn-4 bf16", Scope.CALL, flash_attention_4, baseline=True),
)
"""Those that autograd can take back, all in 16 bits."""

PEERS = (
    *BF16_PEERS,
    Contender("cuDNN FP8", Scope.KERNEL, cudnn_fp8.bind, baseline=True),
    Contender("SageAttention", Scope.QUANTIZED, sage_attention, baseline=True),
)

CPU_PEERS = (Contender("torch SDPA bf16", Scope.CALL, sdpa(None), baseline=True),)
"""What a CPU has to compare with."""
