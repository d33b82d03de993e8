"""Inputs that the tests of the Hopper kernels share."""

import torch

SHAPES = [  # batch, queries, keys, heads, kv heads, head_dim
    (1, 1, 1, 1, 1, 128), (1, 128, 128, 1, 1, 128), (2, 129, 127, 2, 1, 128), (1, 192, 384, 3, 3, 128), (2, 300, 333, 4, 2, 128),
    (1, 1000, 1000, 8, 1, 128), (2, 500, 700, 4, 4, 64), (1, 77, 300, 2, 1, 96), (1, 300, 300, 2, 2, 40), (1, 260, 300, 2, 1, 160),
    (2, 300, 400, 4, 2, 256)]

DOCUMENTS = {"mixed": [300, 0, 1, 700, 33, 128, 129], "many": [17 + 13 * (n % 37) for n in range(120)], "one": [640],
             "ones": [1] * 40}


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def inputs(batch, queries, keys, heads, kv_heads, head_dim, dtype=torch.bfloat16):
    return (normal(batch, heads, queries, head_dim, seed=1, dtype=dtype), normal(batch, kv_heads, keys, head_dim, seed=2,
                                                                                 dtype=dtype),
            normal(batch, kv_heads, keys, head_dim, seed=3, dtype=dtype))


def padded_keys():
    """Query, key and value of five batch items, and how many keys each has: none of what lies past them may show."""
    q, k, v = inputs(5, 300, 333, 4, 2, 128)
    lengths = torch.tensor([333, 0, 1, 128, 129], dtype=torch.int32, device="cuda")
    for n, length in enumerate(lengths.tolist()):
        k[n, :, length:], v[n, :, length:] = torch.nan, torch.inf
    return q, k, v, lengths


def adversarial():
    q, k, v = inputs(1, 1100, 1100, 2, 2, 128)
    ramp = torch.linspace(0, 40, 1100, device="cuda")[:, None]
    loud = k.clone()
    loud[:, :, 1000] = 40 * q[:, :, 700]
    blocks = torch.exp2(torch.randint(-30, 12, (1100, 1), device="cuda", generator=torch.Generator("cuda").manual_seed(4)).float())
    quiet, outlier, zero = v.clone(), v.clone(), torch.zeros_like(q)
    quiet[:, :, 64:96], quiet[:, :, 300:700] = 0, quiet[:, :, 300:700] * 2.0**-12
    outlier[:, :, 500, 3] = 1e4
    return {"sharp": (8 * q, 4 * k, v), "climbing": (q, (k * ramp).to(k.dtype), v), "falling": (q, (k * ramp.flip(0)).to(k.dtype),
                                                                                                v),
            "late spike": (q, loud, v), "wild values": (q, k, (v * blocks).to(v.dtype)), "quiet values": (q, k, quiet),
            "outlier": (q, k, outlier), "zeros": (zero, zero, zero), "tiny": (q * 1e-20, k * 1e-20, v * 1e-30),
            "mean": (q, k, v + 2)}


def climbing():
    """Inputs that try a maximum which is raised rarely, or never after the first tile."""
    q, k, v = inputs(1, 1100, 1100, 2, 2, 128)
    tile = torch.arange(1100, device="cuda")[:, None] // 128
    high, low, stairs = k.clone(), 20 * k, (k * tile * 4).to(k.dtype)
    high[:, :, :128] *= 20
    low[:, :, :128] *= 2.0**-11
    return {"first tile far above": (q, high, v), "first tile far below": (q, low, v), "staircase": (q, stairs, v)}


def packed(lengths, heads, kv_heads, head_dim, tail, keys=None):
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    cu_k = cu if keys is None else torch.tensor([0, *torch.tensor(keys).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    tokens, kv_tokens = sum(lengths) + tail, sum(keys or lengths) + tail
    return (normal(tokens, heads, head_dim, seed=1), normal(kv_tokens, kv_heads, head_dim, seed=2),
            normal(kv_tokens, kv_heads, head_dim, seed=3), cu, cu_k, max(lengths), max(keys or lengths))
