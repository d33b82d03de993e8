"""Attention in plain Triton for every GPU: block-scaled matrix units where the chip has them, dequantized dots elsewhere."""
