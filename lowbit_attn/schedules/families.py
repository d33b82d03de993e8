"""Model families: how many kinds of blocks a model has, and where the attention modules of a block are. Names only, no model.

A family's name is what a schedule's `model` key says.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["self", "cross", "joint"]
"""What an attention module attends to: its own tokens, other ones, or both at once (video and text in one sequence)."""

KINDS: tuple[Kind, ...] = ("self", "cross", "joint")


class Place(NamedTuple):
    """One attention module of a model: its name, the index of its block over all streams, the stream, and its kind."""

    name: str
    block: int
    stream: str
    kind: Kind


@dataclass(frozen=True)
class Stream:
    """Blocks of one kind.

    Attributes:
        name: what a rule's `stream` key says.
        blocks: the model's attribute that lists them.
        attention: attention modules of a block that schedules may change, with their kinds; others are left alone.
        published: number of blocks in the published model (the largest, if there are several); 0 if only variants have them.
    """

    name: str
    blocks: str
    attention: Mapping[str, Kind]
    published: int


_WAN: Mapping[str, Kind] = {"attn1": "self", "attn2": "cross"}

FAMILIES: dict[str, tuple[Stream, ...]] = {
    "wan": (Stream("main", "blocks", _WAN, 40), Stream("vace", "vace_blocks", _WAN, 0)),
    "hunyuan_video": (Stream("dual", "transformer_blocks", {"attn": "joint"}, 20),
                      Stream("single", "single_transformer_blocks", {"attn": "joint"}, 40)),
    "hunyuan_video15": (Stream("dual", "transformer_blocks", {"attn": "joint"}, 54),),
    "minimax_h3": (Stream("main", "transformer_blocks", {"attn": "joint"}, 50),),
    "cogvideox": (Stream("main", "transformer_blocks", {"attn1": "joint"}, 42),),
    "ltx": (Stream("main", "transformer_blocks", {"attn1": "self"}, 28),),
    "ltx2": (Stream("main", "transformer_blocks", {"attn1": "self"}, 48),),
    "flux": (Stream("dual", "transformer_blocks", {"attn": "joint"}, 19),
             Stream("single", "single_transformer_blocks", {"attn": "joint"}, 38)),
}
"""The streams of each family, in the order in which block indices run on."""

STREAMS = tuple(dict.fromkeys(stream.name for streams in FAMILIES.values() for stream in streams))
"""Every stream name there is."""


def published_blocks(family: str) -> dict[str, int]:
    """Number of blocks of the published model by stream."""
    return {stream.name: stream.published for stream in FAMILIES[family] if stream.published}


def places(family: str, blocks: Mapping[str, int]) -> Iterator[Place]:
    """The attention modules of a model of `family` with so many blocks in each stream."""
    start = 0
    for stream in FAMILIES[family]:
        for index in range(blocks.get(stream.name, 0)):
            for attribute, kind in stream.attention.items():
                yield Place(f"{stream.blocks}.{index}.{attribute}", start + index, stream.name, kind)
        start += blocks.get(stream.name, 0)


def anonymous_places(streams: Mapping[str, int]) -> Iterator[Place]:
    """Modules of a model of which nothing is known but its numbers of blocks; each block has self- and cross-attention."""
    start = 0
    for stream, count in streams.items():
        for block in range(start, start + count):
            yield Place("", block, stream, "self")
            yield Place("", block, stream, "cross")
        start += count
