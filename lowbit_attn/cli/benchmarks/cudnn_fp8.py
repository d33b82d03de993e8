"""cuDNN's FP8 attention, through the graph interface of nvidia-cudnn-frontend: one scale per tensor, output in E4M3."""

from typing import Any

import torch
from torch import Tensor

from lowbit_attn.cli.benchmarks.contenders import Bound, UnavailableError, importable
from lowbit_attn.cli.benchmarks.exact import Exact
from lowbit_attn.cli.benchmarks.workloads import Inputs

TOP = 448.0
"""Largest E4M3 value."""

P_SCALE = 256.0
"""P is at most 1."""


def bind(inputs: Inputs) -> Bound:
    """Build the graph and give it codes and scales calibrated on these very inputs, the best case for per-tensor scales."""
    cudnn = importable("cudnn", "nvidia-cudnn-frontend")
    workload, device = inputs.workload, inputs.query.device
    if workload.packed:
        raise UnavailableError("cuDNN FP8 is measured on batched inputs")
    if device.type != "cuda":
        raise UnavailableError(f"needs a GPU, this device is {device}")
    scales = [TOP / float(x.abs().max()) for x in (inputs.query, inputs.key, inputs.value)]
    q, k, v = ((x.float() * scale).to(torch.float8_e4m3fn) for x, scale in
               zip((inputs.query, inputs.key, inputs.value), scales, strict=True))
    output_scale = TOP / (1.25 * Exact(inputs).largest)  # the maximum is of sampled rows only: leave room above it
    output = torch.empty_like(q)
    statistics = torch.empty(*q.shape[:3], 1, device=device)
    run = _graph(cudnn, (q, k, v), output, statistics, workload.causal,
                 {"descale_q": 1 / scales[0], "descale_k": 1 / scales[1], "descale_v": 1 / scales[2],
                  "descale_s": 1 / P_SCALE, "scale_s": P_SCALE, "scale_o": output_scale})
    return Bound(run, lambda _: output.float() / output_scale, note="scales calibrated beforehand; output in E4M3")


def _graph(cudnn: Any, operands: tuple[Tensor, Tensor, Tensor], output: Tensor, statistics: Tensor, causal: bool,
           scales: dict[str, float]) -> Any:
    """An execution of the sdpa_fp8 graph on these tensors."""
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)

    def scalar(value: float) -> Tensor:
        return torch.full((1, 1, 1, 1), value, device=output.device)

    def tensor(name: str, like: Tensor, dtype: Any) -> Any:
        return graph.tensor(name=name, dim=list(like.shape), stride=list(like.stride()), data_type=dtype)

    given = {name: tensor(name, x, fp8) for name, x in zip("qkv", operands, strict=True)}
    factors = {name: scalar(value) for name, value in scales.items()}
    scale_tensors = {name: tensor(name, x, fp32) for name, x in factors.items()}
    out, stats, amax_s, amax_o = graph.sdpa_fp8(**given, **scale_tensors, generate_stats=True, use_causal_mask=causal,
                                                attn_scale=operands[0].shape[-1] ** -0.5)
    results = {out: (output, fp8), stats: (statistics, fp32), amax_s: (scalar(0.0), fp32), amax_o: (scalar(0.0), fp32)}
    for node, (x, dtype) in results.items():
        node.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride())).set_data_type(dtype)
    graph.validate()
    graph.build_operation_graph()
    try:
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
    except Exception as error:
        raise UnavailableError(f"cuDNN FP8 refuses this shape: {str(error).partition(chr(10))[0]}") from error
    graph.build_plans()
    workspace = torch.empty(graph.get_workspace_size(), device=output.device, dtype=torch.uint8)
    tensors = {given[name]: x for name, x in zip("qkv", operands, strict=True)}
    tensors |= {scale_tensors[name]: x for name, x in factors.items()} | {node: x for node, (x, _) in results.items()}

    def run() -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, workspace, handle=handle)

    return run
