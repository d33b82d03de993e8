"""Kernels for AMD CDNA4 (gfx950) in HIP C++: Fused-Softmax attention in MXFP8, MXFP6 and MXFP4 (Fused-Softmax, algorithm 1)."""
