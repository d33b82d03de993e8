"""SASS text as `nvdisasm -c` prints it: its instructions, and its loops.

Loops are natural loops of the control flow graph: ptxas moves cold blocks to the end of a function, so that a backward branch
by address says little.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

_LABEL = re.compile(r"^\s*(\.[\w.$]+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z]\w*)(?P<rest>[^;]*)")
_TARGET = re.compile(r"\.L_x_\d+")
_ENDS = {"EXIT", "RET", "JMP", "BRX", "JMX"}


@dataclass(frozen=True)
class Instruction:
    """One instruction: its opcode without modifiers, the labels it may jump to, whether the next one can follow it."""

    opcode: str
    targets: tuple[str, ...]
    falls_through: bool


@dataclass(frozen=True)
class Block:
    """A run of instructions that is entered at its start only."""

    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


def _parse(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    opcode, rest = match["opcode"], match["rest"]
    targets = tuple(_TARGET.findall(rest))
    operands = rest.split("`(")[0].split()
    conditional = bool(match["guard"]) or len(operands) > (rest[:1] == ".")
    return Instruction(opcode, targets, not ((opcode == "BRA" and not conditional) or (opcode in _ENDS and not match["guard"])))


class Program:
    """The instructions of a disassembled cubin, as a control flow graph."""

    def __init__(self, text: str):
        starts: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        for line in text.splitlines():
            if label := _LABEL.match(line):
                starts[label[1]] = len(self.instructions)
            elif instruction := _parse(line):
                self.instructions.append(instruction)
        self.blocks = self._cut(starts)

    def _cut(self, starts: dict[str, int]) -> list[Block]:
        count = len(self.instructions)
        after_jump = {i + 1 for i, x in enumerate(self.instructions) if x.targets or not x.falls_through}
        edges = sorted({0, count, *after_jump, *starts.values()})
        block_at = {start: number for number, start in enumerate(edges)}
        blocks = []
        for start, end in pairwise(edges):
            last = self.instructions[end - 1]
            following = [block_at[starts[target]] for target in last.targets if starts.get(target, count) < count]
            if last.falls_through and end < count:
                following.append(block_at[end])
            blocks.append(Block(tuple(self.instructions[start:end]), tuple(dict.fromkeys(following))))
        return blocks

    @property
    def opcodes(self) -> Counter[str]:
        """How often each opcode stands in the text."""
        return count_opcodes(self.instructions)

    @cached_property
    def _predecessors(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.blocks]
        for number, block in enumerate(self.blocks):
            for successor in block.successors:
                found[successor].append(number)
        return found

    def _dominators(self) -> list[set[int]]:
        """Per block, the blocks that every way to it passes; a block that nothing jumps to is an entry."""
        everything = set(range(len(self.blocks)))
        dominators = [set(everything) if self._predecessors[n] and n else {n} for n in range(len(self.blocks))]
        changed = True
        while changed:
            changed = False
            for number, predecessors in enumerate(self._predecessors):
                if number and predecessors:
                    passed = set.intersection(*(dominators[p] for p in predecessors)) | {number}
                    if passed != dominators[number]:
                        dominators[number], changed = passed, True
        return dominators

    def loops(self) -> list[frozenset[int]]:
        """The blocks of each loop, by header."""
        dominators, bodies = self._dominators(), {}
        for number, block in enumerate(self.blocks):
            for header in set(block.successors) & dominators[number]:
                body = bodies.setdefault(header, {header})
                waiting = [number]
                while waiting:
                    if (here := waiting.pop()) not in body:
                        body.add(here)
                        waiting += self._predecessors[here]
        return [frozenset(body) for body in bodies.values()]

    def main_loops(self, opcode: str) -> list[Counter[str]]:
        """Opcodes of each innermost loop that holds `opcode`, the largest first."""
        holding = [loop for loop in self.loops() if any(x.opcode == opcode for n in loop for x in self.blocks[n].instructions)]
        innermost = [loop for loop in holding if not any(other < loop for other in holding)]
        counts = [count_opcodes(x for n in loop for x in self.blocks[n].instructions) for loop in innermost]
        return sorted(counts, key=lambda count: count.total(), reverse=True)


def count_opcodes(instructions: Iterable[Instruction]) -> Counter[str]:
    """How often each opcode occurs, padding apart."""
    return Counter(x.opcode for x in instructions if x.opcode != "NOP")
