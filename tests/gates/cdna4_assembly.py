"""Reads gfx950 assembly as clang writes it: what a kernel's metadata says, and the instructions of its steady-state loop."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

COLD = "lb_cold"
"""The comment by which kernels mark blocks outside the steady state: the rollback."""

WIDE_CONVERSIONS = ("v_cvt_scalef32_pk32", "v_cvt_scalef32_2xpk16")
TRANSCENDENTAL = ("v_exp_f32", "v_rcp_f32", "v_log_f32")
METADATA = ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count", "group_segment_fixed_size", "private_segment_fixed_size",
            "kernarg_segment_size")

CLOCKS = {"v_mfma_scale_f32_32x32x64_f8f6f4": 32, "v_mfma_scale_f32_16x16x128_f8f6f4": 16}
"""Clocks of an MFMA of 6- or 4-bit operands at the paper's 16384 operations a clock and CU; one with an 8-bit operand takes twice
as long (table 1)."""
WAVES_PER_SIMD = 2
VALU_CLOCKS = 4
"""A wave instruction holds its SIMD for 4 clocks (128 elements a clock and CU); v_exp_f32 for 8 (32 elements)."""
WIDE_ISSUES = 16
"""Issues of a conversion of 32 elements, at the paper's two elements of a packed instruction; its real rate is unknown."""


@dataclass(frozen=True)
class Instruction:
    """`opcode` without its encoding suffix, and the operands as text."""

    opcode: str
    operands: str

    @property
    def kind(self) -> str:
        if self.opcode.startswith(("v_mfma", "v_smfmac")):
            return "mfma"
        if self.opcode.startswith("scratch_"):
            return "scratch"
        if self.opcode.startswith("ds_"):
            return "lds"
        if self.opcode.startswith(("buffer_", "global_", "flat_")):
            return "memory"
        return "valu" if self.opcode.startswith("v_") else "scalar"

    def formats(self) -> tuple[int, int]:
        """cbsz and blgp of a scaled MFMA: the formats of A and B; 0 where they are not written."""
        fields = dict(re.findall(r"(cbsz|blgp):(\d)", self.operands))
        return int(fields.get("cbsz", 0)), int(fields.get("blgp", 0))

    @property
    def clocks(self) -> int:
        """Matrix clocks of one wave's MFMA."""
        return CLOCKS[self.opcode] * (2 if min(self.formats()) < 2 else 1)


def _instruction(line: str) -> Instruction:
    opcode, _, operands = line.split(";", maxsplit=1)[0].strip().partition(" ")
    return Instruction(re.sub(r"_(e32|e64|dpp|sdwa)$", "", opcode), operands)


@dataclass(frozen=True)
class Block:
    """A basic block; `loop` names the header of the loop it belongs to, if any."""

    name: str
    instructions: list[Instruction]
    loop: str | None
    cold: bool


@dataclass(frozen=True)
class Kernel:
    """One kernel of an assembly file."""

    name: str
    blocks: list[Block]
    metadata: dict[str, int]

    @cached_property
    def instructions(self) -> list[Instruction]:
        return [instruction for block in self.blocks for instruction in block.instructions]

    @cached_property
    def steady(self) -> list[Instruction]:
        """The loop with the most MFMAs, without what only cold blocks reach."""
        members = Counter()
        for block in self.blocks:
            if block.loop:
                members[block.loop] += sum(x.kind == "mfma" for x in block.instructions)
        header = members.most_common(1)[0][0]
        order = {block.name: i for i, block in enumerate(self.blocks)}
        seen: set[str] = set()
        waiting = [header]
        while waiting:
            name = waiting.pop()
            block = self.blocks[order[name]]
            if name in seen or block.cold or block.loop != header:
                continue
            seen.add(name)
            waiting += [target for x in block.instructions if x.opcode.startswith(("s_cbranch", "s_branch"))
                        if (target := x.operands.strip()) in order]
            ends = bool(block.instructions) and block.instructions[-1].opcode in ("s_branch", "s_endpgm")
            if not ends and order[name] + 1 < len(self.blocks):
                waiting.append(self.blocks[order[name] + 1].name)
        return [x for block in self.blocks if block.name in seen for x in block.instructions]


@dataclass(frozen=True)
class Cost:
    """The steady-state loop of one wave, per key tile of 128: 64 scores a lane. Clocks are of a CU whose SIMDs hold two waves."""

    valu: float
    wide: float
    transcendental: float
    matrix_clocks: float
    scratch: float

    @property
    def per_score(self) -> float:
        return self.valu / 64

    @property
    def valu_clocks(self) -> float:
        """Section 3's model, each 32-wide conversion costed at WIDE_ISSUES issues."""
        issues = self.valu + self.transcendental + (WIDE_ISSUES - 1) * self.wide
        return WAVES_PER_SIMD * VALU_CLOCKS * issues


def cost(kernel: Kernel, tiles: int = 2) -> Cost:
    """Counts the loop, whose body holds `tiles` key tiles."""
    loop = kernel.steady
    kinds = Counter(x.kind for x in loop)
    return Cost(valu=kinds["valu"] / tiles, wide=sum(x.opcode.startswith(WIDE_CONVERSIONS) for x in loop) / tiles,
                transcendental=sum(x.opcode.startswith(TRANSCENDENTAL) for x in loop) / tiles,
                matrix_clocks=WAVES_PER_SIMD * sum(x.clocks for x in loop if x.kind == "mfma") / tiles,
                scratch=kinds["scratch"] / tiles)


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of an assembly file by name."""
    metadata = _metadata(text)
    kernels, blocks, current = {}, [], None
    for line in text.splitlines():
        if (label := re.match(r"(\w+):", line)) and label[1] in metadata:
            blocks, current = [Block("entry", [], None, False)], label[1]
        elif current is None:
            continue
        elif line.startswith(".Lfunc_end"):
            kernels[current] = Kernel(current, blocks, metadata[current])
            current = None
        elif label := re.match(r"(\.LBB\d+_\d+):|; %bb\.\d+:", line):
            blocks.append(Block(label[1] or f"fallthrough {len(blocks)}", [], None, False))
            _annotate(blocks, line)
        elif line.lstrip().startswith(";"):
            _annotate(blocks, line)
        elif line.startswith("\t") and line[1] not in ".;":
            blocks[-1].instructions.append(_instruction(line))
    return kernels


def _annotate(blocks: list[Block], line: str) -> None:
    block, loop, cold = blocks[-1], blocks[-1].loop, blocks[-1].cold or COLD in line
    if "Loop Header: Depth=1" in line:
        loop = block.name
    elif inside := re.search(r"in Loop: Header=BB(\d+_\d+)", line):
        loop = f".LBB{inside[1]}"
    blocks[-1] = Block(block.name, block.instructions, loop, cold)


def _metadata(text: str) -> dict[str, dict[str, int]]:
    found = {}
    for entry in re.split(r"\n  - ", text[text.find("amdhsa.kernels"):]):
        if name := re.search(r"\.name: +(\w+)", entry):
            found[name[1]] = {key: int(value[1]) for key in METADATA if (value := re.search(rf"\.{key}: +(\d+)", entry))}
    return found
