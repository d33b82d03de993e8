"""Does a later token move an earlier row? Random changes of one token, and the largest change they cause before it.

Source: FLAMIA sections 3.2 and 4.5, table 5. Under a causal mask, rows of O and dQ before the changed token may not move at
all. dK and dV of an earlier key sum over later queries, so they depend on later tokens by right; the probe takes that right
away by giving the changed token and all after it a zero dO. What still moves dK or dV of an earlier key then came through a
shared scale. A change of dO itself leaves nothing to ask of dK and dV.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit_attn.recipes import Operand, Recipe
from lowbit_attn.reference import Visibility, backward, forward, varlen_backward, varlen_forward

BLOCK = 32
OPERANDS = ("q", "k", "v", "dO")
OUTPUTS = ("O", "dQ", "dK", "dV")
POSITIONS = ("same block", "earlier blocks")
LARGEST_FACTOR = 12
"""A changed token is drawn anew and raised by up to this many doublings."""

_BATCH = 25


@dataclass(frozen=True)
class Probes:
    """`count` changes per operand of sequences of `seq` tokens; packed ones lie end to end in documents of other lengths too."""

    seq: int = 160
    count: int = 200
    seed: int = 0
    channels: int = 64
    heads: int = 1
    packed: bool = False

    def __post_init__(self) -> None:
        if self.seq < 2 * BLOCK:
            raise ValueError(f"seq: got {self.seq}; accepted: at least {2 * BLOCK}, so that a token has an earlier block")


@dataclass(frozen=True)
class Leak:
    """Largest relative change of any earlier row, by (operand, position, output); keys without meaning are absent."""

    largest: dict[tuple[str, str, str], float]

    def worst(self, outputs: tuple[str, ...] = OUTPUTS, positions: tuple[str, ...] = POSITIONS,
              operands: tuple[str, ...] = OPERANDS) -> float:
        """The largest change among these."""
        return max((change for (operand, position, output), change in self.largest.items()
                    if output in outputs and position in positions and operand in operands), default=0.0)


def leaking_control(recipe: Recipe) -> Recipe:
    """The same recipe with per-tensor floor scales on every operand, which leak.

    Such a recipe is refused for causal training, so this one is declared non-causal; the reference applies whatever mask it is
    given.
    """
    shared = Operand("e4m3", "per_tensor", "floor")
    return replace(recipe, causal=False, causal_safety="default", qk=shared, v=shared, do=shared, ds=shared, qk_grad=None,
                   diagonal=None, v_exponent="operand", ds_stochastic=False, q_top=0.0, k_top=0.0, score_accumulator="fp32",
                   exponential="exact", p=Operand("e4m3", "fixed"), p_log2_scale=0.0, maximum="online", max_threshold=0.0)


def probe(recipe: Recipe, probes: Probes) -> Leak:
    """Run all the changes. Operands that a recipe without a backward never reads (dO) are left out."""
    largest: dict[tuple[str, str, str], float] = {}
    for number, operand in enumerate(OPERANDS if recipe.trains else OPERANDS[:3]):
        generator = torch.Generator().manual_seed(probes.seed * len(OPERANDS) + number)
        for start in range(0, probes.count, _BATCH):
            batch = _Batch(operand, min(_BATCH, probes.count - start), probes, generator)
            for position, output, change in batch.changes(recipe):
                key = (operand, position, output)
                largest[key] = max(largest.get(key, 0.0), change)
    return Leak(largest)


class _Batch:
    """Independent sequences, each with one token of one operand changed; [N, H, S, D], the valid part `lengths[n]` long."""

    def __init__(self, operand: str, size: int, probes: Probes, generator: torch.Generator) -> None:
        shape = (size, probes.heads, probes.seq, probes.channels)
        self.operand, self.packed = operand, probes.packed
        self.before = {name: torch.randn(shape, generator=generator) for name in OPERANDS}
        # Few different lengths, so that documents still run in batches; odd ones put starts off every boundary.
        choices = torch.tensor([probes.seq, probes.seq - 27, BLOCK + 5] if probes.packed else [probes.seq])
        self.lengths = choices[torch.randint(len(choices), (size,), generator=generator)]
        self.positions = 1 + (torch.rand(size, generator=generator) * (self.lengths - 1)).long()
        if operand != "dO":
            after = torch.arange(probes.seq) >= self.positions[:, None]
            self.before["dO"] = self.before["dO"].masked_fill(after[:, None, :, None], 0.0)
        factor = torch.exp2(torch.rand(size, 1, 1, generator=generator) * LARGEST_FACTOR)
        fresh = torch.randn(size, probes.heads, probes.channels, generator=generator) * factor
        changed = self.before[operand].clone()
        changed[torch.arange(size), :, self.positions] = fresh
        self.after = {**self.before, operand: changed}

    def changes(self, recipe: Recipe) -> Iterator[tuple[str, str, float]]:
        """(position, output, largest relative change of an earlier row)."""
        old, new = (self._run(recipe, tensors) for tensors in (self.before, self.after))
        row = torch.arange(self.before["q"].shape[2])
        earlier = row < self.positions[:, None]
        own_block = row // BLOCK == (self.positions // BLOCK)[:, None]
        where = {"same block": earlier & own_block, "earlier blocks": earlier & ~own_block}
        for output in old:
            if self.operand == "dO" and output != "dQ":
                continue
            change = _relative_change(old[output], new[output]).amax(1)
            for position, rows in where.items():
                yield position, output, float(change[rows].max()) if rows.any() else 0.0

    def _run(self, recipe: Recipe, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.packed:
            return self._run_packed(recipe, tensors)
        q, k, v, grad = (tensors[name] for name in OPERANDS)
        seen = Visibility.create(q.shape[0], q.shape[2], k.shape[2], is_causal=True)
        result = forward(q, k, v, recipe, seen, save=recipe.trains)
        if result.saved is None:
            return {"O": result.output}
        grads = backward(grad, None, result.saved, result.output, result.lse, recipe, seen, seed=torch.tensor(1))
        return dict(zip(OUTPUTS, (result.output, grads.query, grads.key, grads.value), strict=True))

    def _run_packed(self, recipe: Recipe, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        valid = torch.arange(tensors["q"].shape[2]) < self.lengths[:, None]
        q, k, v, grad = (tensors[name].transpose(1, 2)[valid] for name in OPERANDS)
        cu = torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0)).int()
        result = varlen_forward(q, k, v, cu, cu, recipe, is_causal=True, save=recipe.trains)
        outputs = [result.output]
        if result.saved is not None:
            grads = varlen_backward(grad, None, result.saved, result.output, result.lse, cu, cu, recipe, is_causal=True,
                                    seed=torch.tensor(1))
            outputs += [grads.query, grads.key, grads.value]
        return {name: self._unpacked(x, valid) for name, x in zip(OUTPUTS, outputs, strict=False)}

    @staticmethod
    def _unpacked(packed: Tensor, valid: Tensor) -> Tensor:
        padded = packed.new_zeros((*valid.shape, *packed.shape[1:]))
        padded[valid] = packed
        return padded.transpose(1, 2)


def _relative_change(old: Tensor, new: Tensor) -> Tensor:
    """Largest change of a row's elements over its largest element, [N, H, S]; infinite where a row of zeros moves."""
    difference, size = (new - old).abs().amax(-1), old.abs().amax(-1)
    # NaN counts as the largest change there is.
    change = torch.where(difference == 0, 0.0, difference / size)
    return torch.nan_to_num(change, nan=torch.inf, posinf=torch.inf)


def broken_promises(recipe: Recipe, leak: Leak) -> list[str]:
    """What the recipe promised for O and dQ and did not keep; a recipe that refuses causal masks promises nothing."""
    if not recipe.causal:
        return []
    positions = POSITIONS if recipe.causal_safety == "exact" else ("earlier blocks",)
    return [f"{output} of rows in the {position} moved by {worst:.2e} when a later token of {operand} changed"
            for operand in OPERANDS for position in positions for output in ("O", "dQ")
            if (worst := leak.worst((output,), (position,), (operand,))) > 0]


def silent_operands(recipe: Recipe, control: Leak) -> list[str]:
    """Operands whose change moved nothing in the leaking control: the probe would not see a leak either."""
    return [operand for operand in (OPERANDS if recipe.trains else OPERANDS[:3])
            if control.worst(("O", "dQ"), operands=(operand,)) == 0]
