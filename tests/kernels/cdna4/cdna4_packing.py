"""Reads packed operands back into codes and scales by their places, which are written out here once more, in Python."""

import torch
from torch import Tensor

from lowbit_attn import formats

UNPACK = {8: lambda packed: packed, 6: formats.unpack6, 4: formats.unpack4}


def fragments(packed: Tensor, bits: int) -> Tensor:
    """[..., bits * 512] bytes of a pair's planes -> codes [..., 64 lanes, 2 fragments, 32]."""
    planes = packed.unflatten(-1, (bits // 2, 64, 16))
    return UNPACK[bits](planes.transpose(-3, -2).flatten(-2).unflatten(-1, (2, 4 * bits)))


def contraction(bits: int) -> Tensor:
    """k of element j of a lane half: [2, 32] of 64."""
    j, half = torch.arange(32), torch.arange(2)[:, None]
    return 32 * (j // 16) + 16 * half + j % 16 if bits == 8 else 32 * half + j


def query_codes(packed: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[H, groups, bytes] -> codes [H, 32 groups, 128] and stored scales [H, 32 groups, 4]."""
    codes = fragments(packed[..., :bits * 512], bits)
    scales = packed[..., bits * 512:].unflatten(-1, (64, 2))
    out = codes.new_empty((*codes.shape[:2], 32, 128))
    scale = codes.new_empty((*codes.shape[:2], 32, 4))
    k = contraction(bits)
    for half in range(2):
        lanes = slice(32 * half, 32 * half + 32)
        for step in range(2):
            out[..., 64 * step + k[half]] = codes[:, :, lanes, step]
            scale[..., 2 * step + half] = scales[:, :, lanes, step]
    return out.flatten(1, 2), scale.flatten(1, 2)


def key_of(tile: int, row: Tensor, wide: bool) -> Tensor:
    """The key in row `row` of score tile `tile`."""
    inner, half = 4 * (row // 8) + row % 4, row // 4 % 2
    return 64 * (tile // 2) + (32 * (tile % 2) + 16 * half if wide else 32 * half + 16 * (tile % 2)) + inner


def key_codes(packed: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[H, tiles, bytes] -> codes [H, 128 tiles, 128], scales [H, 128 tiles, 4]."""
    pairs = fragments(packed[..., :bits * 2048].unflatten(-1, (4, bits * 512)), bits)
    scales = packed[..., bits * 2048:bits * 2048 + 512].unflatten(-1, (64, 8))
    out = pairs.new_empty((*pairs.shape[:2], 128, 128))
    scale = pairs.new_empty((*pairs.shape[:2], 128, 4))
    k, row = contraction(bits), torch.arange(32)
    for tile in range(4):
        key = key_of(tile, row, bits == 8)
        for half in range(2):
            lanes = slice(32 * half, 32 * half + 32)
            for step in range(2):
                out[:, :, key[:, None], 64 * step + k[half]] = pairs[:, :, tile, lanes, step]
                scale[:, :, key, 2 * step + half] = scales[:, :, lanes, 2 * tile + step]
    return out.flatten(1, 2), scale.flatten(1, 2)


def value_codes(packed: Tensor, bits: int) -> tuple[Tensor, Tensor | None]:
    """[H, tiles, bytes] -> codes [H, 128 tiles, 128], scales [H, 4 tiles, 128] (None where the head has one)."""
    pairs = fragments(packed[..., :bits * 2048].unflatten(-1, (4, bits * 512)), bits)
    out = pairs.new_empty((*pairs.shape[:2], 128, 128))
    scales = packed[..., bits * 2048:bits * 2048 + 512].unflatten(-1, (64, 8)) if bits < 8 else None
    scale = pairs.new_empty((*pairs.shape[:2], 4, 128))
    k, channel = contraction(bits), torch.arange(32)
    for index in range(4):
        block, upper = index // 2, index % 2
        for half in range(2):
            lanes = slice(32 * half, 32 * half + 32)
            for second in range(2):
                part = 2 * upper + second
                out[:, :, 64 * block + k[half][:, None], 32 * part + channel] = pairs[:, :, index, lanes, second].transpose(-1, -2)
                if scales is not None:
                    scale[:, :, 2 * block + half, 32 * part + channel] = scales[:, :, lanes, 4 * block + part]
    return out.flatten(1, 2), None if scales is None else scale.flatten(1, 2)
