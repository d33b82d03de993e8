"""cuDNN's FP8 attention, through the graph interface of nvidia-cudnn-frontend: one scale per tensor, results in E4M3."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit_attn.cli.benchmarks.contenders import Bound, TrainingCall, UnavailableError, importable
from lowbit_attn.cli.benchmarks.exact import Exact
from lowbit_attn.cli.benchmarks.workloads import Inputs

TOP = 448.0
"""Largest E4M3 value."""

P_SCALE = 256.0
"""P is at most 1."""

FP8, FP32 = torch.float8_e4m3fn, torch.float32


@dataclass(frozen=True)
class _Forward:
    """One execution of the forward's graph and the tensors that it reads and fills; `descale_*` by operand."""

    cudnn: Any
    run: Callable[[], None]
    operands: tuple[Tensor, Tensor, Tensor]
    output: Tensor
    statistics: Tensor
    descales: Mapping[str, float]

    @property
    def options(self) -> dict[str, Any]:
        """What both passes are told alike."""
        return {"attn_scale": self.operands[0].shape[-1] ** -0.5}


def bind(inputs: Inputs) -> Bound:
    """Build the graph and give it codes and scales calibrated on these very inputs, the best case for per-tensor scales."""
    forward = _forward(inputs)
    return Bound(forward.run, lambda _: forward.output.float() * forward.descales["descale_o"],
                 note="scales calibrated beforehand; output in E4M3")


def bind_training(inputs: Inputs, grad: Tensor) -> TrainingCall:
    """The same for both passes, the gradients' scales calibrated by one backward on these inputs; gradients in E4M3."""
    forward = _forward(inputs)
    forward.run()
    grad_scale = TOP / float(grad.abs().max())
    codes = (grad.float() * grad_scale).to(FP8)
    gradients = tuple(torch.empty_like(x) for x in forward.operands)
    scalars = {name: _scalar(value, codes) for name, value in
               {**forward.descales, "descale_dO": 1 / grad_scale, "descale_s": 1 / P_SCALE, "scale_s": P_SCALE, "descale_dP": 1.0,
                "scale_dP": 1.0, "scale_dQ": 1.0, "scale_dK": 1.0, "scale_dV": 1.0}.items()}
    largest = {name: _scalar(0.0, codes) for name in ("dQ", "dK", "dV", "dP")}
    q, k, v = forward.operands
    backward = _execution(forward.cudnn, "sdpa_fp8_backward",
                          {"q": q, "k": k, "v": v, "o": forward.output, "dO": codes, "stats": forward.statistics}, scalars,
                          [*gradients, *largest.values()], use_causal_mask=inputs.workload.causal, **forward.options)
    backward()
    for name, x in largest.items():
        scalars[f"scale_{name}"].fill_(TOP / max(float(x), 1e-30))
    scalars["descale_dP"].copy_(scalars["scale_dP"].reciprocal())

    def whole() -> None:
        forward.run()
        backward()

    def read(_: Any) -> tuple[Tensor, ...]:
        return tuple(x.float() / scalars[f"scale_{name}"] for name, x in zip(("dQ", "dK", "dV"), gradients, strict=True))

    saved = sum(x.numel() * x.element_size() for x in (*forward.operands, forward.output, forward.statistics))
    return TrainingCall(backward, whole, read, saved,
                        note="operands, dO and scales prepared beforehand; output and gradients in E4M3")


def _forward(inputs: Inputs) -> _Forward:
    cudnn = importable("cudnn", "nvidia-cudnn-frontend")
    workload, device = inputs.workload, inputs.query.device
    if workload.packed:
        raise UnavailableError("cuDNN FP8 is measured on batched inputs")
    if device.type != "cuda":
        raise UnavailableError(f"needs a GPU, this device is {device}")
    tensors = tuple(x.detach() for x in (inputs.query, inputs.key, inputs.value))
    scales = [TOP / float(x.abs().max()) for x in tensors]
    q, k, v = ((x.float() * scale).to(FP8) for x, scale in zip(tensors, scales, strict=True))
    with torch.no_grad():
        output_scale = TOP / (1.25 * Exact(inputs).largest)  # the maximum is of sampled rows only: leave room above it
    output = torch.empty_like(q)
    statistics = torch.empty(*q.shape[:3], 1, device=device)
    descales = {"descale_q": 1 / scales[0], "descale_k": 1 / scales[1], "descale_v": 1 / scales[2]}
    scalars = {name: _scalar(value, q) for name, value in
               {**descales, "descale_s": 1 / P_SCALE, "scale_s": P_SCALE, "scale_o": output_scale}.items()}
    run = _execution(cudnn, "sdpa_fp8", {"q": q, "k": k, "v": v}, scalars,
                     [output, statistics, _scalar(0.0, q), _scalar(0.0, q)], generate_stats=True,
                     use_causal_mask=workload.causal, attn_scale=q.shape[-1] ** -0.5)
    return _Forward(cudnn, run, (q, k, v), output, statistics, descales | {"descale_o": 1 / output_scale})


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((1, 1, 1, 1), value, device=like.device)


def _execution(cudnn: Any, node: str, operands: Mapping[str, Tensor], scalars: Mapping[str, Tensor], results: Sequence[Tensor],
               **options: Any) -> Callable[[], None]:
    """An execution of a graph of one node on these tensors; `results` in the order in which the node returns them."""
    types = {FP8: cudnn.data_type.FP8_E4M3, FP32: cudnn.data_type.FLOAT}
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=types[FP8], intermediate_data_type=types[FP32], compute_data_type=types[FP32],
                          handle=handle)
    given = {name: (graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=types[x.dtype]), x)
             for name, x in {**operands, **scalars}.items()}
    returned = getattr(graph, node)(**{name: tensor for name, (tensor, _) in given.items()}, **options)
    for tensor, x in zip(returned, results, strict=True):
        tensor.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(types[x.dtype])
    graph.validate()
    graph.build_operation_graph()
    try:
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
    except Exception as error:
        raise UnavailableError(f"cuDNN FP8 refuses this shape: {str(error).partition(chr(10))[0]}") from error
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), device=results[0].device, dtype=torch.uint8)
    tensors = dict(given.values()) | dict(zip(returned, results, strict=True))

    def run() -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, workspace, handle=handle)

    return run
