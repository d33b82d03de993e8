"""What the portable kernels know of each GPU architecture: which block-scaled products it has, its conversions, its tiles.

A product is native where the matrix unit multiplies the codes and applies their scales itself (`tl.dot_scaled`); elsewhere the
same numbers are multiplied as bfloat16, which holds every code times its scale exactly. `tl.dot_scaled` would do that silently
too, on architectures without the instruction, so nothing here asks for it unless the architecture is listed with it; the gate
(tests/gates) looks for the instruction in what the compiler made. It takes no FP6 codes, so E2M3 is multiplied as bfloat16
everywhere.
"""

from dataclasses import dataclass

from lowbit_attn.recipes import Operand, Recipe

HEAD_DIMS = (64, 128, 256)
"""What the kernels are compiled for; other head_dims are padded with zero channels inside them."""

NATIVE_BACKWARD_HEAD_DIM = 128
"""The widest heads whose backward runs on block-scaled units."""

MX = frozenset({"e4m3/e8m0", "e2m1/e8m0"})
NVFP4 = frozenset({"e2m1/ue4m3"})


@dataclass(frozen=True)
class Config:
    """Compile-time choices: rows of a program, warps, pipeline stages, and in the backward the rows of the other side in a step."""

    rows: int
    warps: int
    stages: int
    step: int = 0


@dataclass(frozen=True)
class Target:
    """One architecture: `native` names the block-scaled operands of its matrix unit, as element/scale; `converts` tells whether
    it rounds fp32 to E4M3 in hardware, nearest even and saturating; `shared` is the shared memory of one program in bytes."""

    architecture: str
    native: frozenset[str]
    converts: bool
    shared: int

    def is_native(self, recipe: Recipe) -> bool:
        """Whether both products of the forward run on block-scaled units, which scale blocks of 32 keys of V and no single ones."""
        if recipe.v.layout == "per_row" and recipe.v_exponent != "running":
            return False
        return all(operand_kind(x) in self.native for x in (recipe.qk, recipe.p, recipe.v))

    def forward(self, recipe: Recipe, head_dim: int) -> Config:
        """The forward's choices for a kernel head_dim: those without register spills, or with the fewest, in the gate."""
        amd, native = self.architecture.startswith("gfx"), self.is_native(recipe)
        if native:
            return Config(64, 8, 1) if amd else Config(128, 8, 1 if head_dim == 256 or recipe.v_exponent == "running" else 2)
        if amd:  # four waves have 512 registers each
            return Config(64, 8, 1) if head_dim < 256 else Config(32, 4, 1)
        small = self.shared < 128 << 10
        if head_dim == 256:
            return Config(32 if small else 64, 8, 1)
        return Config(64, 8, 1 if small and head_dim == 128 else 2)

    def has_native_backward(self, recipe: Recipe, head_dim: int) -> bool:
        """Whether all products of the backward run on block-scaled units: along tokens these take one scale for 32 of them.

        At kernel head_dim 256 no block is wide enough for them beside two accumulators: those of 128 keys fill tensor memory.
        """
        by_block = all((x.element, x.layout) == ("e4m3", "token_block") for x in (recipe.qk, recipe.do))
        return recipe.saves_codes and by_block and "e4m3/e8m0" in self.native and head_dim <= NATIVE_BACKWARD_HEAD_DIM

    def backward(self, head_dim: int, native: bool) -> Config:
        """The backward's choices for a kernel head_dim; rows are those of queries, or of keys, that a program holds."""
        amd = self.architecture.startswith("gfx")
        if native:
            return Config(64, 4, 1, 64) if amd else Config(128, 8, 1, 64)
        small = amd or self.shared < 128 << 10
        rows = 32 if head_dim == 256 and small else 64
        return Config(rows, 4 if amd or head_dim < 128 else 8, 1, rows)


TARGETS: dict[str, Target] = {
    target.architecture: target
    for target in (
        Target("sm_80", frozenset(), False, 163 << 10),
        Target("sm_86", frozenset(), False, 99 << 10),
        Target("sm_89", frozenset(), True, 99 << 10),
        Target("sm_90", frozenset(), True, 227 << 10),
        Target("sm_100", MX | NVFP4, True, 227 << 10),
        Target("sm_103", MX | NVFP4, True, 227 << 10),
        Target("sm_120", frozenset(), True, 99 << 10),
        Target("gfx942", frozenset(), False, 64 << 10),
        Target("gfx950", MX, True, 160 << 10),
    )
}


def operand_kind(operand: Operand) -> str:
    """element/scale of an operand's format: what a matrix unit must know to multiply its codes."""
    return f"{operand.element}/{'ue4m3' if operand.layout.startswith('nvfp16') else 'e8m0'}"


def kernel_head_dim(head_dim: int) -> int:
    """The compiled head_dim that serves `head_dim`."""
    return next(d for d in HEAD_DIMS if d >= head_dim)
