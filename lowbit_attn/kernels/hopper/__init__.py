"""Kernels for Hopper (sm_90a): quantizers and FP8 attention on TMA, mbarriers and wgmma, written in Gluon."""
