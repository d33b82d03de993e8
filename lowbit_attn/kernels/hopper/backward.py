"""Host side of the Hopper backward: dQ, dK and dV from what the forward saved. One path for dense and packed inputs.

By default one kernel computes all three, and adds up dQ in global memory in no fixed order: dK and dV repeat bit for bit, dQ but
for its last bits. `deterministic` takes two kernels, neither with atomics, where every gradient is one program's sum in one order.
Dense inputs are [B, S, H, D], packed ones [T, H, D]. Nothing here waits for the device.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowbit_attn.kernels.hopper import one_pass
from lowbit_attn.kernels.hopper.attention import descriptor, head_group, processors, shared_layout
from lowbit_attn.kernels.hopper.finish_query import finished_query
from lowbit_attn.kernels.hopper.gradient_records import P_GRAD_LOG2, VECTOR, GradientRecords, gradient_records
from lowbit_attn.kernels.hopper.key_gradients import key_gradients
from lowbit_attn.kernels.hopper.one_pass_records import OnePassRecords, one_pass_records
from lowbit_attn.kernels.hopper.quantize_gradient import Gradient, quantize_gradient, transposed_queries
from lowbit_attn.kernels.hopper.query_gradients import query_gradients
from lowbit_attn.kernels.tiling import Tiling, lse_layout, tiling_of
from lowbit_attn.recipes import Recipe

HEAD_DIMS = (64, 128)
"""What the kernels are compiled for; smaller head_dims are padded with zero channels."""

ROWS, BLOCK = 64, 128
"""Rows of a warpgroup, and of a program."""

STREAM_BUDGET = 56 << 20
"""Bytes that the one pass keeps in flight, about L2: its programs pass over the same heads at about the same time."""

FEW_ENTRIES = 8
"""Entries of a program that are few."""


@dataclass(frozen=True)
class Config:
    """Compile-time choices per head_dim: ring stages, tiles per promotion, registers of a consumer thread."""

    stages: int
    promote: int
    registers: int


KEYS = {64: Config(4, 32, 240), 128: Config(3, 32, 240)}
QUERIES = {64: Config(4, 16, 240), 128: Config(2, 16, 240)}
ONE_PASS = {64: Config(4, 32, 224), 128: Config(3, 32, 224)}


@dataclass(frozen=True)
class Saved:
    """What the forward saved (`ops.saved`): E4M3 codes as uint8 in the operands' shapes, E8M0 codes [B, H, S] or [H, T], the last
    of which bound the queries' probabilities."""

    q_codes: Tensor
    q_scales: Tensor
    k_codes: Tensor
    k_scales: Tensor
    v_codes: Tensor
    v_scales: Tensor
    row_top: Tensor


def refusal(recipe: Recipe, head_dim: int) -> str | None:
    """Why these kernels cannot take a recipe that the forward runs, or None if they can."""
    effective = recipe.effective()
    if head_dim > HEAD_DIMS[-1]:
        return f"its kernels take head_dims up to {HEAD_DIMS[-1]}, got {head_dim}"
    grads = (effective.do, effective.ds.element, effective.ds.layout, effective.p_grad.element, effective.p_grad.layout,
             effective.p_grad_log2_scale)
    if grads != (effective.v, "e4m3", "square32", "e4m3", "fixed", float(P_GRAD_LOG2)) or effective.ds_stochastic:
        return f"its kernels take do=e4m3/token_block, ds=e4m3/square32, p_grad=e4m3/fixed x 2^8; {recipe.canonical} has others"
    return None


@dataclass(frozen=True)
class Prepared:
    """Operands and tables of one call, padded to `dim` channels; `head_dim` is the caller's."""

    tiling: Tiling
    saved: Saved
    made: Gradient
    records: GradientRecords | OnePassRecords
    lse: Tensor
    dtype: torch.dtype
    head_dim: int
    packed: bool
    scale: float
    rotate: bool

    @property
    def dim(self) -> int:
        """Channels that the kernels see."""
        return self.saved.q_codes.shape[-1]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.saved.q_codes.shape[-2]

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.saved.k_codes.shape[-2]

    def _streamed(self) -> int:
        """Key/value heads that the one pass works on side by side: as many as L2 holds for what its programs stream, codes of Q and
        dO, their transposes and float16 dQ. All where each program gets a few entries only: a long one of a later group would come
        last."""
        if self.tiling.k_tiles.numel() * self.kv_heads < FEW_ENTRIES * processors(self.lse.device):
            return self.kv_heads
        group = head_group(self.heads, self.kv_heads, 6 * self.saved.q_codes.numel() // self.kv_heads, STREAM_BUDGET)
        return group * self.kv_heads // self.heads

    def _group(self, heads: int) -> int:
        """Heads of one kind that run side by side, as many as L2 holds K and V codes for."""
        group = head_group(self.heads, self.kv_heads, 2 * self.saved.k_codes.numel() // self.kv_heads)
        return max(1, group * heads // self.heads)

    def _constants(self, config: Config) -> dict[str, Any]:
        return {"D": self.dim, "STAGES": config.stages, "PROMOTE": config.promote, "ROTATE": self.rotate,
                "REGISTERS": config.registers, "num_warps": 4}

    def gradients(self, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Launch what computes all three."""
        with torch.cuda.device(grad_query.device):
            if isinstance(self.records, OnePassRecords):
                self._one_pass(self.records, grad_key, grad_value)
                finished_query(self.made.grad_query, self.records.exponent, grad_query, self.tiling, scale=self.scale,
                               rotate=self.rotate)
            else:
                self._key_gradients(self.records, grad_key, grad_value)
                self._query_gradients(grad_query)

    def _one_pass(self, records: OnePassRecords, grad_key: Tensor, grad_value: Tensor) -> None:
        """Launch dK, dV and the sums of dQ."""
        q, k, v = self.saved.q_codes, self.saved.k_codes, self.saved.v_codes
        _, *strides = lse_layout(k, self.packed)
        programs = min(processors(k.device), self.tiling.k_tiles.numel() * self.kv_heads)
        partial = self.made.grad_query
        one_pass.gradients[(programs,)](
            self._rows(q, ROWS), self._rows(self.made.do_codes, ROWS), self._columns(self.made.q_t, ROWS),
            self._columns(self.made.do_t, ROWS), vector_descriptor(records.vectors), self._rows(k, ROWS), self._rows(v, ROWS),
            self._columns(self.made.k_t, ROWS), TensorDescriptor.from_tensor(partial, [ROWS, ROWS], shared_layout(128, 16)),
            grad_key, grad_value, self.saved.k_scales, self.saved.v_scales, self.made.k_top, records.reference_v,
            records.reference_k, records.work, records.count, self._masters(programs), self.kv_heads, self.heads // self.kv_heads,
            *strides, 2 * self.tiling.q_tiles.numel(), self.tiling.k_tiles.numel(), self.scale, self._streamed(),
            P_LOG2=P_GRAD_LOG2, **self._constants(ONE_PASS[self.dim]))

    def _masters(self, programs: int) -> Tensor:
        """Float32 sums of dK and dV of each program's two warpgroups."""
        return torch.empty(programs * 4 * ROWS * self.dim, dtype=torch.float32, device=self.lse.device)

    def _key_gradients(self, records: GradientRecords, grad_key: Tensor, grad_value: Tensor) -> None:
        """Launch dK and dV."""
        q, k, v = self.saved.q_codes, self.saved.k_codes, self.saved.v_codes
        _, *strides = lse_layout(k, self.packed)
        programs = min(processors(k.device), self.tiling.k_tiles.numel() * self.kv_heads)
        key_gradients[(programs,)](
            self._rows(q, ROWS), self._rows(self.made.do_codes, ROWS), self._columns(self.made.q_t, ROWS),
            self._columns(self.made.do_t, ROWS), vector_descriptor(records.vectors), self._rows(k, ROWS), self._rows(v, ROWS),
            grad_key, grad_value, self.saved.k_scales, self.saved.v_scales, records.vectors, records.reference, records.lifts,
            records.work, records.count, self._masters(programs), self.kv_heads, self.heads // self.kv_heads, *strides,
            2 * self.tiling.q_tiles.numel(), self.scale, self._group(self.kv_heads), P_LOG2=P_GRAD_LOG2,
            **self._constants(KEYS[self.dim]))

    def _query_gradients(self, grad_query: Tensor) -> None:
        """Launch dQ."""
        q, k, v = self.saved.q_codes, self.saved.k_codes, self.saved.v_codes
        strides = [stride for x in (q, k) for stride in lse_layout(x, self.packed)[1:]]
        programs = min(processors(q.device), self.tiling.work.shape[0] * self.heads)
        query_gradients[(programs,)](
            self._rows(q, ROWS), self._rows(self.made.do_codes, ROWS), self._rows(k, BLOCK), self._rows(v, BLOCK),
            self._columns(self.made.k_t, BLOCK), grad_query, self.saved.q_scales, self.made.do_group, self.lse, self.made.delta,
            self.saved.k_scales, self.saved.v_scales, self.tiling.documents, self.tiling.work, self.tiling.count, self.heads,
            self.heads // self.kv_heads, *strides, self.tiling.q_tiles.numel(), self.scale * math.log2(math.e), self.scale,
            self._group(self.heads), **self._constants(QUERIES[self.dim]))

    def _rows(self, codes: Tensor, rows: int) -> Any:
        """Blocks of tokens of one head."""
        return descriptor(codes.view(-1, codes.shape[-2] * self.dim), rows, self.dim)

    def _columns(self, codes: Tensor, columns: int) -> Any:
        """Blocks of transposed codes."""
        return descriptor(codes.view(-1, codes.shape[-1]), self.dim, columns)


def vector_descriptor(vectors: Tensor) -> Any:
    """Records of query tiles, one of them at a time."""
    return TensorDescriptor.from_tensor(vectors.view(-1), [VECTOR], shared_layout(0, 32, 1))


def prepare(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, saved: Saved, recipe: Recipe, *,
            scale: float | None = None, is_causal: bool = False, bottom_right: bool = False, key_lengths: Tensor | None = None,
            cu_seq: tuple[Tensor, Tensor] | None = None, deterministic: bool = False) -> Prepared:
    """Tile, quantize dO and transpose what the kernels contract over tokens; arguments as in `backward`."""
    recipe = recipe.effective()
    head_dim, packed = grad_output.shape[-1], cu_seq is not None
    scale = head_dim**-0.5 if scale is None else scale
    keys, kv_heads = saved.k_codes.shape[-3:-1]
    dim = next(d for d in HEAD_DIMS if d >= head_dim)
    codes = [saved.q_codes, saved.k_codes, saved.v_codes]
    if dim != head_dim:
        grad_output, output, *codes = (torch.nn.functional.pad(x, (0, dim - head_dim)) for x in (grad_output, output, *codes))
    q_codes, k_codes, v_codes = (x.contiguous() for x in codes)
    saved = replace(saved, q_codes=q_codes, k_codes=k_codes, v_codes=v_codes)
    output, lse = output.contiguous(), lse.contiguous()
    _, *q_sides = lse_layout(output, packed)
    _, *k_sides = lse_layout(k_codes, packed)
    tiling = tiling_of(output, keys, BLOCK, is_causal=is_causal, bottom_right=bottom_right, key_lengths=key_lengths, cu_seq=cu_seq)
    made = quantize_gradient(grad_output, output, None if grad_lse is None else grad_lse.float().contiguous(),
                             (q_codes, k_codes, v_codes), (saved.k_scales, saved.v_scales), tiling,
                             q_sides=(q_sides[0], q_sides[1]), k_sides=(k_sides[0], k_sides[1]), packed=packed,
                             one_pass=not deterministic)
    options: dict[str, Any] = {"kv_heads": kv_heads, "factor": scale * math.log2(math.e), "head_stride": q_sides[0],
                               "document_extra": q_sides[1]}
    records: GradientRecords | OnePassRecords
    if deterministic:
        records = gradient_records(tiling, saved.q_scales, made.do_group, lse, made.delta, **options)
    else:
        records = one_pass_records(tiling, saved.q_scales, saved.row_top, made, lse, has_lse=grad_lse is not None, **options)
        made = replace(made, q_t=transposed_queries(q_codes, records.q_shift, tiling))
    return Prepared(tiling, saved, made, records, lse, grad_output.dtype, head_dim, packed, scale,
                    recipe.rotates(head_dim) and dim == head_dim)


def run(prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous. Once per `prepare`: the one-pass kernel adds to dQ."""
    saved = prepared.saved
    query, key, value = (torch.empty_like(x, dtype=prepared.dtype) for x in (saved.q_codes, saved.k_codes, saved.v_codes))
    prepared.gradients(query, key, value)
    if prepared.dim == prepared.head_dim:
        return query, key, value
    query, key, value = (x[..., :prepared.head_dim].contiguous() for x in (query, key, value))
    return query, key, value


def backward(grad_output: Tensor, grad_lse: Tensor | None, output: Tensor, lse: Tensor, saved: Saved, recipe: Recipe, *,
             scale: float | None = None, is_causal: bool = False, bottom_right: bool = False, key_lengths: Tensor | None = None,
             cu_seq: tuple[Tensor, Tensor] | None = None, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, contiguous, in grad_output's dtype; `output` and `lse` as the forward returned them."""
    if 0 in (output.numel(), saved.k_codes.numel()):
        query, key, value = (grad_output.new_zeros(x.shape) for x in (saved.q_codes, saved.k_codes, saved.v_codes))
        return query, key, value
    return run(prepare(grad_output, grad_lse, output, lse, saved, recipe, scale=scale, is_causal=is_causal,
                       bottom_right=bottom_right, key_lengths=key_lengths, cu_seq=cu_seq, deterministic=deterministic))
