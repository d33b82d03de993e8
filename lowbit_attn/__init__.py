"""Low-bit attention for PyTorch: train and generate video in MXFP8, MXFP6, MXFP4 and NVFP4/FP8 behind one API."""

from lowbit_attn.api import attention, explain, varlen_attention
from lowbit_attn.recipes import RECIPES, Operand, Recipe, recipe_names

__version__ = "0.1.0"
__all__ = ["RECIPES", "Operand", "Recipe", "attention", "explain", "recipe_names", "varlen_attention"]
