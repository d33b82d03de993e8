"""What `lowbit-attn check` asks of a device: instructions, attention and speed of the CDNA4 kernels."""
