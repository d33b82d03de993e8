"""What every operator of this package registers the same way: autocast, and named refusals of vmap and double backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

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
