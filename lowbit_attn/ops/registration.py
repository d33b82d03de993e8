"""What every operator of this package registers the same way: autocast, and named refusals of what has no rule.

Reverse-mode autograd is the only differentiation: forward mode, torch.func, vmap and double backward are refused.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl
from torch._library.custom_ops import CustomOpDef
from torch.autograd import forward_ad

NAMESPACE = "lowbit_attn"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_autocast(op: CustomOpDef) -> None:
    """Under autocast, floating tensors come in the autocast dtype, as they do to torch SDPA."""
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl(op._qualname.split("::")[1], _autocast_kernel(op, device_type, key), key)


def _autocast_kernel(op: CustomOpDef, device_type: str, key: str) -> Callable:
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        with torch._C._ExcludeDispatchKeyGuard(keyset):
            return op._opoverload(*(cast(x) for x in args), **{name: cast(x) for name, x in kwargs.items()})

    return kernel


def refuse_forward_mode_and_func(op: CustomOpDef) -> None:
    """Named errors where torch would drop a tangent without a word (eager, compiled or traced), or speak of setup_context."""
    autograd, names = make_autograd_impl(op._opoverload, op), [argument.name for argument in op._opoverload._schema.arguments]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        for name, x in zip(names, args, strict=False):
            if forward_ad._current_level >= 0 and isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(f"{name}: got a dual tensor, but {op._qualname} has no forward-mode AD; accepted: plain "
                                          "tensors (torch.autograd.grad differentiates in reverse mode)")
        if torch._C._are_functorch_transforms_active() and torch._C._any_requires_grad(*args):
            raise NotImplementedError(f"{op._qualname} has no rules for torch.func; accepted: backward() or torch.autograd.grad on "
                                      "plain tensors")
        return autograd(keyset, *args, **kwargs)

    for key in ("AutogradCPU", "AutogradCUDA", "AutogradMeta"):
        _library.impl(op._qualname.split("::")[1], kernel, key, with_keyset=True)


def refuse_vmap(op: CustomOpDef) -> None:
    """A named error instead of a per-sample loop."""

    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(f"{op._qualname} has no vmap rule: fold the mapped axis into the batch axis")

    torch.library.register_vmap(op, rule)


def refuse_double_backward(op: CustomOpDef) -> None:
    """A named error when a gradient is differentiated again."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{op._qualname} is not differentiable: lowbit_attn has no double backward")

    op.register_autograd(backward)
