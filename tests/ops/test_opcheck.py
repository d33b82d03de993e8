"""torch.library.opcheck on every operator: schema, autograd registration, fake tensors and dynamic AOT dispatch."""

import op_calls
import pytest
import torch
from op_calls import LAYOUTS, OPS
from oracle import boundaries

LAYOUTS_AND_DTYPES = [*((layout, torch.bfloat16) for layout in LAYOUTS), ("transposed", torch.float16), ("offset", torch.float32)]
DENSE_SHAPES = {
    "usual": {},
    "no batch": {"batch": 0},
    "no queries": {"queries": 0, "keys": 7},
    "no keys": {"queries": 7, "keys": 0},
    "nothing": {"queries": 0, "keys": 0},
    "one token": {"batch": 1, "queries": 1, "keys": 1},
    "two tiles": {"batch": 1, "queries": 130, "keys": 260, "channels": 60},
    "one head": {"heads": 1, "kv_heads": 1, "channels": 128},
    "no query heads": {"heads": 0, "kv_heads": 2},
}
VARLEN_SHAPES = {
    "usual": {},
    "no tokens": {"cu_q": (0,), "cu_k": (0,), "tail": 0},
    "no documents": {"cu_q": (0,), "cu_k": (0,), "tail": 5},
    "empty documents": {"cu_q": (0, 0, 0), "cu_k": (0, 0, 0), "tail": 0},
    "no keys": {"cu_q": (0, 5), "cu_k": (0, 0), "tail": 0},
    "one token": {"cu_q": (0, 1), "cu_k": (0, 1), "tail": 0},
    "late start": {"cu_q": (3, 20), "cu_k": (1, 40)},
}
OPTIONS = {
    "full": {"is_causal": False},
    "inference": {"save": False},
    "rotated 4-bit": {"recipe": "fused_mxfp4", "is_causal": False, "save": False},
    "saves inputs": {"recipe": "nvfp4_fp8"},
    "identity": {"recipe": "mxfp8:qk=identity"},
    "exact safety": {"recipe": "mxfp8:causal_safety=exact"},
}


def check(operator, arguments):
    torch.library.opcheck(operator, arguments)


def check_fake(operator, arguments):
    """Without the slow tracing, for grids whose axes only change what the fake must say."""
    torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_AND_DTYPES)
class TestLayoutsAndDtypes:
    def test_dense(self, layout, dtype):
        check(OPS.attention_forward, op_calls.dense(layout=layout, dtype=dtype, requires_grad=True))

    def test_varlen(self, layout, dtype):
        check(OPS.varlen_attention_forward, op_calls.varlen(layout=layout, dtype=dtype, requires_grad=True))


class TestShapes:
    @pytest.mark.parametrize("shape", DENSE_SHAPES)
    def test_dense(self, shape):
        check(OPS.attention_forward, op_calls.dense(**DENSE_SHAPES[shape], requires_grad=True))

    @pytest.mark.parametrize("shape", VARLEN_SHAPES)
    def test_varlen(self, shape):
        check(OPS.varlen_attention_forward, op_calls.varlen(**VARLEN_SHAPES[shape], requires_grad=True))


@pytest.mark.parametrize("options", OPTIONS)
class TestOptions:
    def test_dense(self, options):
        check(OPS.attention_forward, op_calls.dense(**OPTIONS[options]))

    def test_varlen(self, options):
        check(OPS.varlen_attention_forward, op_calls.varlen(**OPTIONS[options]))


@pytest.mark.parametrize("lengths", [(40, 0), (1, 39)])
def test_key_lengths(lengths):
    check(OPS.attention_forward, op_calls.dense(key_lengths=boundaries(*lengths), requires_grad=True))


class TestBackward:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_dense_grad_layouts(self, layout):
        check(OPS.attention_backward, op_calls.dense_backward(op_calls.dense(), grad_layout=layout))

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_varlen_grad_layouts(self, layout):
        check_fake(OPS.varlen_attention_backward, op_calls.varlen_backward(op_calls.varlen(), grad_layout=layout))

    @pytest.mark.parametrize("shape", DENSE_SHAPES)
    def test_dense_shapes(self, shape):
        check_fake(OPS.attention_backward, op_calls.dense_backward(op_calls.dense(**DENSE_SHAPES[shape]), grad_lse=False))

    @pytest.mark.parametrize("shape", VARLEN_SHAPES)
    def test_varlen_shapes(self, shape):
        check(OPS.varlen_attention_backward, op_calls.varlen_backward(op_calls.varlen(**VARLEN_SHAPES[shape]), grad_lse=False))

    @pytest.mark.parametrize("recipe", ["nvfp4_fp8", "nvfp4", "mxfp8:qk=identity"])
    def test_recipes(self, recipe):
        check(OPS.attention_backward, op_calls.dense_backward(op_calls.dense(recipe=recipe, dtype=torch.float32)))


class TestQuantize:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts(self, layout):
        check(OPS.quantize, [op_calls.laid_out((2, 33, 2, 48), torch.bfloat16, layout), "e4m3/token_block", False, True, 0.5])

    @pytest.mark.parametrize("shape", [(0, 5, 2, 32), (1, 0, 2, 32), (1, 5, 0, 32), (1, 1, 1, 1), (2, 40, 3, 60)])
    @pytest.mark.parametrize(("operand", "along_tokens"), [
        ("e4m3/mx32", True), ("e2m1/mx32/uos", False), ("e2m3/square32", False), ("e4m3/per_row", True), ("e4m3/per_tensor", False),
        ("e2m1/nvfp16", True),
    ])
    def test_shapes_and_formats(self, shape, along_tokens, operand):
        check_fake(OPS.quantize, [torch.randn(shape), operand, along_tokens, False, 1.0])
