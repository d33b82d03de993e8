"""What autograd may and may not do with the operators."""

import op_calls
import pytest
import torch
from op_calls import LAYOUTS, OPS
from oracle import boundaries

from lowbit_attn import RECIPES, attention, varlen_attention


def tensors(tokens=40, requires_grad=True, dtype=torch.float32):
    return [torch.randn(2, heads, tokens, 16).to(dtype).requires_grad_(requires_grad) for heads in (4, 2, 2)]


def dense(query, key, value, **options):
    return attention(query, key, value, enable_gqa=True, backend="reference", **options)


def packed(query, key, value, **options):
    cu_seq = boundaries(0, 15, 15, 33)
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attention(*rows, cu_seq, cu_seq, 40, 40, enable_gqa=True, backend="reference", **options)


@pytest.mark.parametrize("call", [dense, packed])
class TestGradients:
    @pytest.mark.parametrize("wanted", [0, 1, 2], ids=["query", "key", "value"])
    def test_one_input_alone_gets_the_same_gradient(self, call, wanted):
        inputs = tensors()
        grad = torch.randn_like(call(*inputs))
        expected = torch.autograd.grad(call(*inputs), inputs, grad)
        alone = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
        call(*alone).backward(grad)
        assert torch.equal(alone[wanted].grad, expected[wanted])
        assert all(x.grad is None for i, x in enumerate(alone) if i != wanted)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_grad_output_of_any_layout(self, call, layout):
        inputs = tensors()
        output = call(*inputs)
        grad = op_calls.laid_out(tuple(output.shape), output.dtype, layout)
        actual = torch.autograd.grad(output, inputs, grad, retain_graph=True)
        expected = torch.autograd.grad(output, inputs, grad.contiguous())
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))

    def test_a_summed_output_has_a_grad_of_stride_zero(self, call):
        inputs = tensors()
        output = call(*inputs)
        actual = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        expected = torch.autograd.grad(output, inputs, torch.ones_like(output))
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))

    def test_lse_alone_and_output_alone_sum_to_both(self, call):
        inputs = tensors()
        output, lse = call(*inputs, return_lse=True)
        lse = torch.where(lse == -torch.inf, 0.0, lse)
        from_output = torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        from_lse = torch.autograd.grad(lse.sum(), inputs, retain_graph=True)
        both = torch.autograd.grad(output.sum() + lse.sum(), inputs)
        assert (from_lse[2] == 0).all()
        assert torch.equal(from_output[2], both[2])
        # dS is rounded once for the sum and twice for the parts: E4M3's half step, 1/16, of each.
        for a, b, c in zip(from_output[:2], from_lse[:2], both[:2], strict=True):
            assert (a + b - c).norm() <= 0.2 * c.norm()

    def test_saved_tensors_are_not_aliased_by_later_edits_of_the_inputs(self, call):
        for recipe in ("mxfp8", "mxfp8:qk=identity", "nvfp4_fp8"):
            inputs = tensors()
            twin = [x.detach().clone().requires_grad_() for x in inputs]
            outputs = [call(*inputs, recipe=recipe), call(*twin, recipe=recipe)]
            with torch.no_grad():
                for x in twin:
                    x.zero_()
            for output in outputs:
                output.sum().backward()
            assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, twin, strict=True))

    def test_gradients_accumulate_over_calls(self, call):
        inputs = tensors()
        call(*inputs).sum().backward()
        once = [x.grad.clone() for x in inputs]
        call(*inputs).sum().backward()
        assert all(torch.equal(x.grad, 2 * g) for x, g in zip(inputs, once, strict=True))

    def test_gradients_have_the_inputs_dtype(self, call):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            inputs = tensors(dtype=dtype)
            call(*inputs).sum().backward()
            assert all(x.grad.dtype == dtype for x in inputs)

    def test_double_backward_is_refused_by_name(self, call):
        inputs = tensors()
        grads = torch.autograd.grad(call(*inputs).square().sum(), inputs, create_graph=True)
        with pytest.raises(NotImplementedError, match=r"lowbit_attn::.*attention_backward.*no double backward"):
            grads[0].sum().backward()

    @pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if not recipe.trains])
    def test_inference_recipes_refuse_grad_in_the_forward(self, call, recipe):
        with pytest.raises(ValueError, match=r"recipe: got .*inference only.*accepted"):
            call(*tensors(), recipe=recipe)
        with torch.no_grad():
            call(*tensors(), recipe=recipe)
        call(*tensors(requires_grad=False), recipe=recipe)

    def test_inference_options_refuse_grad_in_the_forward(self, call):
        with pytest.raises(ValueError, match="inference only"):
            call(*tensors(), recipe="mxfp8:exponential=schraudolph_u32")

    def test_inference_mode(self, call):
        inputs = tensors()
        with torch.inference_mode():
            output = call(*inputs)
            assert output.is_inference()
            assert torch.equal(output, call(*inputs, recipe="mxfp8"))
        assert torch.equal(output, call(*inputs).detach())


class TestDirectCalls:
    """The operators called without the API, as a framework's policies see them."""

    @pytest.mark.parametrize(("operator", "arguments"), [(OPS.attention_forward, op_calls.dense),
                                                         (OPS.varlen_attention_forward, op_calls.varlen)])
    def test_grad_without_saving_is_refused(self, operator, arguments):
        with pytest.raises(ValueError, match="save: got False"):
            operator(*arguments(save=False, requires_grad=True))
        with torch.no_grad():
            operator(*arguments(save=False, requires_grad=True))

    @pytest.mark.parametrize(("operator", "arguments"), [(OPS.attention_forward, op_calls.dense),
                                                         (OPS.varlen_attention_forward, op_calls.varlen)])
    def test_inference_recipes_are_refused_with_grad_and_under_a_causal_mask(self, operator, arguments):
        with pytest.raises(ValueError, match="inference only"):
            operator(*arguments(recipe="fused_mxfp4", is_causal=False, requires_grad=True))
        with pytest.raises(ValueError, match="is_causal"):
            operator(*arguments(recipe="fused_mxfp4", is_causal=True, save=False))

    @pytest.mark.parametrize(("operator", "arguments"), [(OPS.attention_forward, op_calls.dense),
                                                         (OPS.varlen_attention_forward, op_calls.varlen)])
    def test_vmap_is_refused_by_name(self, operator, arguments):
        query, *rest = arguments()
        with pytest.raises(NotImplementedError, match=r"lowbit_attn::.*attention_forward has no vmap rule"):
            torch.vmap(lambda x: operator(x, *rest))(query[None].expand(3, *query.shape))

    def test_codes_and_scales_carry_no_gradient(self):
        outputs = OPS.attention_forward(*op_calls.dense(requires_grad=True))
        assert [x.requires_grad for x in outputs] == [True, True, *[False] * 7]
