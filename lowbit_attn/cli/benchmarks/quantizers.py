"""Quantization of Q, K and V beside a plain copy: bytes that must be read and written, over the time.

Counted are the elements: each is read once and each code written once, V's twice where it is saved for a backward. Scales, under
1 % of that, and the padding of workspaces are not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import lowbit_attn
from lowbit_attn.cli.benchmarks.record import Row
from lowbit_attn.cli.benchmarks.timing import interleaved
from lowbit_attn.cli.benchmarks.workloads import Inputs, Layout, Workload
from lowbit_attn.recipes import Recipe, resolve
from lowbit_attn.reference.operands import LOG2E

COPY = "copy"
"""The baseline: torch's copy of as many bytes as the operands have, half of them read and half written."""


def distinct(workloads: Sequence[Workload]) -> list[Workload]:
    """Workloads whose operands differ: masks and values mean nothing to a quantizer."""
    seen: dict[tuple, Workload] = {}
    for workload in workloads:
        if not workload.v_mean:
            shape = (workload.batch, workload.queries, workload.keys, workload.documents, workload.heads, workload.kv_heads,
                     workload.head_dim)
            seen.setdefault(shape, workload)
    return list(seen.values())


def measure(workload: Workload, recipes: Sequence[str], device: torch.device, rounds: int) -> list[Row]:
    """A row for the copy, then per recipe one for inference and, where it trains, one for training."""
    inputs = Inputs.draw(workload, device, Layout.BSHD)
    operands = [inputs.query, inputs.key, inputs.value]
    source = torch.empty(sum(map(_bytes, operands)), dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    runs: dict[tuple[str, str], Callable[[], Any]] = {(COPY, "one tensor"): lambda: target.copy_(source)}
    moved = {(COPY, "one tensor"): 2 * _bytes(source)}
    refused: dict[tuple[str, str], str] = {}
    for name in recipes:
        recipe = resolve(name)
        backend = lowbit_attn.explain(name, device).backend
        title = name if backend == "hopper" else f"{name} ({backend})"
        for save in (False, True) if backend == "hopper" and recipe.trains else (False,):
            key = (title, "training: V's codes both ways" if save else "inference" if backend == "hopper" else "Q, K and V in turn")
            try:
                runs[key] = _hopper(inputs, recipe, save) if backend == "hopper" else _by_operator(operands, recipe)
                runs[key]()
                moved[key] = sum(map(_bytes, operands)) + sum(x.numel() for x in operands) + save * inputs.value.numel()
            except Exception as error:  # a recipe that cannot be quantized here must not cost the others their figures
                refused[key] = f"failed: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                runs.pop(key, None)
    timings = interleaved(runs, device, rounds)
    rows = []
    for (contender, scope), timing in timings.items():
        rows.append(Row(workload.name, _shape(workload), contender, scope, timing.milliseconds,
                        moved[contender, scope] / timing.milliseconds / 1e6, "GB/s", None, timing.spread, timing.rounds,
                        timing.method, f"{moved[contender, scope] / 1e6:.1f} MB read and written", contender == COPY))
    rows += [Row(workload.name, _shape(workload), contender, scope, unit="GB/s", note=why)
             for (contender, scope), why in refused.items()]
    return rows


def _shape(workload: Workload) -> str:
    return str(workload).removesuffix(" causal").removesuffix(" full")


def _hopper(inputs: Inputs, recipe: Recipe, save: bool) -> Callable[[], Any]:
    """The kernels that quantize Q, K and V, on tables that are built beforehand."""
    from lowbit_attn.kernels.hopper.quantize import quantize_qkv
    from lowbit_attn.kernels.hopper.quantize_blocks import quantize_blocks
    from lowbit_attn.kernels.hopper.quantize_nvfp4 import quantize_nvfp4
    from lowbit_attn.kernels.tiling import dense_tiling, packed_tiling

    if inputs.cu is not None:
        operands = (inputs.query, inputs.key, inputs.value)
        tiling = packed_tiling(inputs.query, inputs.key.shape[0], inputs.cu, inputs.cu, align="none", block_rows=128)
    else:
        operands = (inputs.query.transpose(1, 2), inputs.key.transpose(1, 2), inputs.value.transpose(1, 2))
        tiling = dense_tiling(operands[0], operands[1].shape[1], align="none", key_lengths=None, block_rows=128)
    packed = inputs.cu is not None
    if recipe.qk.layout.startswith("nvfp16"):
        rotate = recipe.rotates(operands[0].shape[-1])
        return lambda: quantize_nvfp4(*operands, tiling, recipe, rotate=rotate, packed=packed)
    if recipe.qk.layout == "mx32":
        head_dim = operands[0].shape[-1]
        scale = head_dim**-0.5 * LOG2E if recipe.q_prescale else 1.0
        return lambda: quantize_blocks(*operands, tiling, recipe, scale=scale, rotate=recipe.rotates(head_dim), packed=packed)
    return lambda: quantize_qkv(*operands, tiling, recipe, save=save, packed=packed)


def _by_operator(operands: Sequence[Tensor], recipe: Recipe) -> Callable[[], Any]:
    """torch.ops.lowbit_attn.quantize on each operand; documents count as one sequence."""
    recipe = recipe.effective()
    native = [x.transpose(1, 2) if x.ndim == 4 else x[None] for x in operands]
    rotate = recipe.rotates(native[0].shape[-1])
    formats = [(str(recipe.qk), rotate), (str(recipe.qk), rotate), (str(recipe.v), False)]

    def run() -> list[Tensor]:
        return [part for x, (operand, rotated) in zip(native, formats, strict=True)
                for part in torch.ops.lowbit_attn.quantize(x, operand, False, rotated, 1.0)]

    return run


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
