"""measure counts what quantization does and how far results are from exact attention."""

import pytest
import torch

from lowbit_attn.ops.measure import measure
from lowbit_attn.recipes import RECIPES, Recipe


def _inputs(tokens=48, heads=4, kv_heads=2, head_dim=32):
    return [torch.randn(tokens, count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]


def test_exact_formats_have_cosine_one_and_nothing_to_count():
    found = measure(*_inputs(), [0, 20, 20, 48], Recipe("exact", trains=True))
    assert found.saturated == found.flushed == {}
    assert found.cosine == pytest.approx(dict.fromkeys(("output", "grad_query", "grad_key", "grad_value"), 1.0), abs=1e-6)


def test_formats_with_fewer_bits_are_farther_from_exact():
    inputs = _inputs()
    wide, narrow = (measure(*inputs, [0, 48], recipe) for recipe in ("mxfp8", "nvfp4_fp8"))
    assert all(narrow.cosine[name] < wide.cosine[name] < 1 for name in ("output", "grad_query"))
    assert wide.cosine["output"] > 0.999


def test_flushed_elements_are_a_share_of_all():
    """Two blocks of keys whose sizes differ by more than E4M3 reaches inside one block of 32 keys."""
    query, key, value, grad = _inputs()
    value[1::2] *= 2.0**-30
    found = measure(query, key, value, grad, [0, 48], RECIPES["mxfp8"])
    assert found.flushed["v"] == 0.5
    assert found.flushed["q"] == found.saturated["v"] == 0


def test_documents_are_measured_apart():
    """Rows of another document, however large, change nothing that is measured of the first."""
    inputs = _inputs()
    louder = [x.clone() for x in inputs]
    for x in louder:
        x[20:] *= 1e4
    first, second = (measure(*(x[:20] for x in each), [0, 20], "mxfp8") for each in (inputs, louder))
    assert first == second
    assert measure(*inputs, [0, 20, 48], "mxfp8") != measure(*inputs, [0, 48], "mxfp8")


def test_no_documents_have_cosine_one():
    assert measure(*_inputs(), [0, 0], "mxfp8").cosine["output"] == 1.0
