"""Forward-mode AD and torch.func: refused by name, never a tangent or a gradient that is silently zero."""

import pytest
import torch
from oracle import boundaries
from torch.autograd import forward_ad

from lowbit_attn import attention, varlen_attention

CU = boundaries(0, 15, 33)


def dense(query, key, value):
    return attention(query, key, value, backend="reference")


def packed(query, key, value):
    return varlen_attention(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), CU, CU, 33, 33,
                            backend="reference")


def tensors():
    return [torch.randn(1, 2, 33, 16) for _ in range(3)]


@pytest.mark.parametrize("call", [dense, packed])
class TestRefusals:
    @pytest.mark.parametrize("requires_grad", [False, True])
    @pytest.mark.parametrize("position", [0, 1, 2], ids=["query", "key", "value"])
    def test_a_dual_tensor(self, call, position, requires_grad):
        inputs = [x.requires_grad_(requires_grad) for x in tensors()]
        with forward_ad.dual_level():
            inputs[position] = forward_ad.make_dual(inputs[position], torch.randn_like(inputs[position]))
            with pytest.raises(NotImplementedError, match=r"(query|key|value): got a dual tensor, but .* no forward-mode"):
                call(*inputs)

    def test_no_grad_does_not_hide_a_tangent(self, call):
        inputs = tensors()
        with forward_ad.dual_level(), torch.no_grad():
            inputs[0] = forward_ad.make_dual(inputs[0], torch.randn_like(inputs[0]))
            with pytest.raises(NotImplementedError, match="query: got a dual tensor"):
                call(*inputs)

    @pytest.mark.parametrize("way", ["dual tensor", "torch.func.jvp"])
    def test_compilation_does_not_hide_a_tangent(self, call, way):
        inputs = tensors()

        def jvp(query):
            return torch.func.jvp(lambda x: call(x, *inputs[1:]), (query,), (query,))[1]

        torch._dynamo.reset()
        if way == "torch.func.jvp":
            with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="query: got a dual tensor"):
                torch.compile(jvp, backend="aot_eager", fullgraph=True)(inputs[0])
            return
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        compiled(*inputs)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(inputs[0], torch.randn_like(inputs[0]))
            with pytest.raises(NotImplementedError, match="query: got a dual tensor"):
                compiled(dual, *inputs[1:])

    def test_plain_tensors_inside_a_dual_level_run(self, call):
        inputs = tensors()
        expected = call(*inputs)
        with forward_ad.dual_level():
            assert torch.equal(call(*inputs), expected)

    @pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "vmap", "vmap of grad"])
    def test_torch_func(self, call, transform):
        inputs = tensors()

        def loss(query):
            return call(query, *inputs[1:]).sum()

        def run():
            func = torch.func
            match transform:
                case "vjp" | "jvp":
                    return (func.vjp(loss, inputs[0]) if transform == "vjp" else func.jvp(loss, (inputs[0],), (inputs[0],)))
                case "vmap":
                    return torch.vmap(lambda query: call(query, *inputs[1:]))(inputs[0][None].expand(3, -1, -1, -1, -1))
                case "vmap of grad":
                    return torch.vmap(func.grad(loss))(inputs[0][None].expand(3, -1, -1, -1, -1))
                case _:
                    return getattr(func, transform)(loss)(inputs[0])

        reason = r"lowbit_attn::\w+ has (no rules for torch\.func; accepted|no vmap rule: fold|no forward-mode AD; accepted)"
        with pytest.raises(NotImplementedError, match=reason):
            run()

    def test_functional_call_is_no_transform(self, call):
        class Module(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(()))

            def forward(self, *inputs):
                return call(inputs[0] * self.scale, *inputs[1:])

        inputs = tensors()
        scale = torch.tensor(2.0, requires_grad=True)
        torch.func.functional_call(Module(), {"scale": scale}, tuple(inputs)).sum().backward()
        assert scale.grad.isfinite()
        assert scale.grad != 0


def test_bf16_is_torch_sdpa_under_a_transform_too():
    q, k, v = tensors()
    actual = torch.func.grad(lambda x: attention(x, k, v, recipe="bf16").square().sum())(q)
    expected = torch.func.grad(lambda x: torch.nn.functional.scaled_dot_product_attention(x, k, v).square().sum())(q)
    torch.testing.assert_close(actual, expected)
