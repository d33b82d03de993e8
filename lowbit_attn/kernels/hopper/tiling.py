"""The tiling that every family of kernels shares, under the name that the Hopper kernels knew it by."""

from lowbit_attn.kernels.tiling import TILE, Tiling, dense_tiling, packed_tiling

__all__ = ["TILE", "Tiling", "dense_tiling", "packed_tiling"]
