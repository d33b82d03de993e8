"""A fake result says of the real one: shape, dtype, stride, storage; on meta, in a fake mode, for every option."""

import op_calls
import pytest
import torch
from op_calls import LAYOUTS, OPS
from torch._subclasses.fake_tensor import FakeTensorMode

from lowbit_attn import RECIPES, attention

CASES = {
    "dense": (OPS.attention_forward, op_calls.dense),
    "varlen": (OPS.varlen_attention_forward, op_calls.varlen),
    "dense backward": (OPS.attention_backward, lambda **options: op_calls.dense_backward(op_calls.dense(**options))),
    "varlen backward": (OPS.varlen_attention_backward, lambda **options: op_calls.varlen_backward(op_calls.varlen(**options))),
}


def described(outputs):
    return [(tuple(x.shape), x.dtype, x.stride(), x.storage_offset()) for x in outputs]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_fp8"])
class TestFidelity:
    def test_meta(self, case, layout, recipe):
        operator, build = CASES[case]
        arguments = build(layout=layout, recipe=recipe)
        meta = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments]
        assert described(operator(*meta)) == described(operator(*arguments))

    def test_fake_mode(self, case, layout, recipe):
        operator, build = CASES[case]
        arguments = build(layout=layout, recipe=recipe)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
        assert described(fake) == described(operator(*arguments))

    def test_outputs_are_fresh_and_inputs_stay(self, case, layout, recipe):
        operator, build = CASES[case]
        arguments = build(layout=layout, recipe=recipe, dtype=torch.float32)
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        before = [x.clone() for x in tensors]
        outputs = operator(*arguments)
        owned = {x.untyped_storage().data_ptr() for x in outputs if x.numel()}
        assert owned.isdisjoint(x.untyped_storage().data_ptr() for x in tensors)
        assert len(owned) == sum(x.numel() > 0 for x in outputs)
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.trains])
def test_a_whole_training_step_runs_on_meta_tensors(recipe):
    query, key, value = (torch.randn(2, 4, 30, 16, device="meta", requires_grad=True) for _ in range(3))
    attention(query, key, value, recipe=recipe, backend="reference").sum().backward()
    assert query.grad.shape == query.shape
