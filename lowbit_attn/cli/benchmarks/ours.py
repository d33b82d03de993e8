"""This package's attention: the public call, quantization included, and where a kernel has one, the attention kernel alone."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

import lowbit_attn
from lowbit_attn.cli.benchmarks import by_autograd
from lowbit_attn.cli.benchmarks.contenders import Bound, Contender, Scope, Trainer, TrainingCall, UnavailableError, first
from lowbit_attn.cli.benchmarks.workloads import Inputs
from lowbit_attn.kernels.portable.support import backward_refusal
from lowbit_attn.ops import describe, hopper
from lowbit_attn.ops.dispatch import BACKENDS
from lowbit_attn.recipes import UNQUANTIZED, resolve

REFERENCE_SCORES = float(1 << 24)
"""The reference is timed up to this many query-key pairs; beyond, its time says nothing and takes minutes."""


def contenders(recipe: str, device: torch.device) -> list[Contender]:
    """One recipe on the backend that `attention` picks for the device, then on the portable kernels, where those are others."""
    chosen = lowbit_attn.explain(recipe, device).backend
    found = _on(recipe, chosen)
    return [*found, *_on(recipe, "triton")] if _has_portable_beside(recipe, chosen, device) else found


def _has_portable_beside(recipe: str, chosen: str, device: torch.device) -> bool:
    """Whether the portable kernels compute the recipe too where a faster backend was chosen."""
    if recipe == UNQUANTIZED or chosen in ("triton", "reference"):
        return False
    return BACKENDS["triton"].problem(resolve(recipe), describe(device), wide_heads=False) is None


def _on(recipe: str, backend: str) -> list[Contender]:
    """One recipe on one backend: the kernel alone, if there is one, and the whole call."""
    name = recipe if backend == "hopper" else f"{recipe} ({backend})"
    whole = Contender(name, Scope.CALL if recipe == UNQUANTIZED else Scope.QUANTIZED,
                      lambda inputs: _whole_call(inputs, recipe, backend))
    if recipe == UNQUANTIZED:
        return [whole]
    return [Contender(name, Scope.KERNEL, lambda inputs: _kernel(inputs, recipe, backend)), whole]


def trainers(recipe: str, device: torch.device) -> list[Trainer]:
    """One recipe as `attention` trains with it, then with deterministic=True (`bf16` has no such argument), then on the portable
    kernels, where those are others and have its backward; they are always deterministic."""
    backend = lowbit_attn.explain(recipe, device).backend
    whole = _on(recipe, backend)[-1]
    if recipe == UNQUANTIZED:
        return [by_autograd.trainer(whole)]
    repeatable = Contender(f"{whole.name} deterministic", Scope.QUANTIZED,
                           lambda inputs: _whole_call(inputs, recipe, backend, deterministic=True))
    found = [by_autograd.trainer(whole), by_autograd.trainer(repeatable)]
    if backend == "hopper":
        found.append(Trainer(f"{recipe} kernels", lambda inputs, grad: _backward_kernels(inputs, grad, recipe),
                             scopes=(Scope.BACKWARD,)))
    # Without a backward of their own the reference would follow, which is not timed at such sizes.
    if _has_portable_beside(recipe, backend, device) and not backward_refusal(resolve(recipe), describe(device).architecture):
        found.append(by_autograd.trainer(_on(recipe, "triton")[-1]))
    return found


def _refuse(inputs: Inputs, recipe: str, backend: str) -> None:
    if recipe == UNQUANTIZED:
        return
    if inputs.workload.causal and not resolve(recipe).causal:
        raise UnavailableError(f"{recipe} is refused under a causal mask")
    if inputs.query.requires_grad and (refusal := resolve(recipe).training_refusal):
        raise UnavailableError(f"{recipe} does not train: {refusal}")
    if backend == "reference" and inputs.workload.scores > REFERENCE_SCORES:
        reasons = "; ".join(f"not {name!r}: {why}" for name, why in lowbit_attn.explain(recipe, inputs.query.device).passed_over)
        raise UnavailableError(f"only the reference runs it here, which is not timed at this size ({reasons})")


def _whole_call(inputs: Inputs, recipe: str, backend: str, deterministic: bool = False) -> Bound:
    """`attention` or `varlen_attention` as a user calls it; inputs that require grad get a graph."""
    _refuse(inputs, recipe, backend)
    workload, chosen = inputs.workload, None if recipe == UNQUANTIZED else backend
    grouped = workload.heads != workload.kv_heads

    def dense() -> Any:
        return lowbit_attn.attention(inputs.query, inputs.key, inputs.value, recipe=recipe, is_causal=workload.causal,
                                     enable_gqa=grouped, backend=chosen, deterministic=deterministic)

    def packed() -> Any:
        assert inputs.cu is not None
        return lowbit_attn.varlen_attention(inputs.query, inputs.key, inputs.value, inputs.cu, inputs.cu, inputs.longest,
                                            inputs.longest, recipe=recipe, is_causal=workload.causal, enable_gqa=grouped,
                                            backend=chosen, deterministic=deterministic)

    return Bound(packed if workload.packed else dense, first)


def _backward_kernels(inputs: Inputs, grad: Tensor, recipe: str) -> TrainingCall:
    """The backward's kernels on operands that are quantized, transposed and tiled beforehand."""
    from lowbit_attn.kernels.hopper import backward as kernels

    _refuse(inputs, recipe, "hopper")
    parsed, packed = resolve(recipe), inputs.cu is not None
    if refusal := hopper.backward_refusal(parsed, grad.shape[-1]):
        raise UnavailableError(refusal)
    options: dict[str, Any] = {"is_causal": inputs.workload.causal, "scale": None,
                               "cu_seq": None if inputs.cu is None else (inputs.cu, inputs.cu)}
    q, k, v, do = (x.detach() if packed else x.detach().transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value, grad))
    output, lse, *saved = hopper.forward(q, k, v, parsed, save=True, **options)
    prepared = kernels.prepare(do, None, output, lse, kernels.Saved(*saved), parsed, **options)

    def gradients(result: Any) -> tuple[Tensor, ...]:
        return tuple(result) if packed else tuple(x.transpose(1, 2) for x in result)

    def run() -> tuple[Tensor, ...]:
        prepared.made.grad_query.zero_()  # what quantizing dO does otherwise
        return kernels.run(prepared)

    return TrainingCall(run, run, gradients, sum(x.numel() * x.element_size() for x in (output, lse, *saved)))


def _kernel(inputs: Inputs, recipe: str, backend: str) -> Bound:
    """The attention kernel on operands that are quantized and tiled beforehand."""
    if backend not in ("hopper", "triton"):
        raise UnavailableError(f"backend {backend!r} has no kernel to time apart from quantization")
    _refuse(inputs, recipe, backend)
    causal, parsed = inputs.workload.causal, resolve(recipe)
    kernel = hopper.host(parsed) if backend == "hopper" else import_module("lowbit_attn.kernels.portable.attention")
    if inputs.cu is not None:
        prepared = kernel.prepare(inputs.query, inputs.key, inputs.value, parsed, is_causal=causal, cu_seq=(inputs.cu, inputs.cu))
        return Bound(lambda: kernel.run(prepared), first)
    q, k, v = (x.transpose(1, 2) for x in (inputs.query, inputs.key, inputs.value))
    prepared = kernel.prepare(q, k, v, parsed, is_causal=causal)

    def output(result: Any) -> Tensor:
        return first(result).transpose(1, 2)

    return Bound(lambda: kernel.run(prepared), output)
