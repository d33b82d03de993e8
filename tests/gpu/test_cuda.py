"""On a GPU the operators give the CPU's numbers, respect devices, and enter compile; run where one is present."""

import pytest
import torch

import lowbit_attn
from lowbit_attn.ops import LowbitFallbackWarning, dispatch
from lowbit_attn.recipes import RECIPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

TRAINING = [name for name, recipe in RECIPES.items() if recipe.trains]


def inputs(*shape, seed=0, dtype=torch.bfloat16, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for _ in range(3)]


def relative(a, b):
    return ((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm()).item()


# Scores differ by float32 summation order, about 1e-6; that flips a share of the codes of P near rounding boundaries, which
# moves O by about 3e-4 for E4M3 and proportionally to the code spacing (four times that) for E2M1.
BOUND = 2e-3


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_equals_the_cpu_within_code_flips(recipe):
    q, k, v = inputs(2, 4, 300, 128, dtype=torch.float32)
    on_gpu, lse = lowbit_attn.attention(q, k, v, recipe=recipe, return_lse=True, backend="reference")
    on_cpu, cpu_lse = lowbit_attn.attention(q.cpu(), k.cpu(), v.cpu(), recipe=recipe, return_lse=True, backend="reference")
    assert relative(on_gpu, on_cpu) < BOUND
    assert (lse.cpu() - cpu_lse).abs().max() < 2e-3


@pytest.mark.parametrize("recipe", TRAINING)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_equal_the_cpu_within_code_flips(recipe, is_causal):
    seed = torch.tensor(7) if RECIPES[recipe].ds_stochastic else None
    grads = []
    for device in ("cuda", "cpu"):
        x = [t.requires_grad_() for t in inputs(1, 4, 260, 64, dtype=torch.float32, device=device)]
        output = lowbit_attn.attention(*x, recipe=recipe, is_causal=is_causal, seed=None if seed is None else seed.to(device),
                                       backend="reference")
        grads.append(torch.autograd.grad(output.square().sum() + output.sum(), x))
    for on_gpu, on_cpu in zip(*grads, strict=True):
        assert relative(on_gpu, on_cpu) < 10 * BOUND  # dS and stochastic noise amplify a flipped code of P or Q


def test_packed_documents_equal_the_cpu():
    cu = torch.tensor([0, 15, 15, 256, 300], dtype=torch.int32)
    q, k, v = inputs(310, 4, 64, dtype=torch.float32)
    on_gpu = lowbit_attn.varlen_attention(q, k, v, cu.cuda(), cu.cuda(), 300, 300, is_causal=True, backend="reference")
    on_cpu = lowbit_attn.varlen_attention(q.cpu(), k.cpu(), v.cpu(), cu, cu, 300, 300, is_causal=True, backend="reference")
    assert relative(on_gpu, on_cpu) < BOUND
    assert not on_gpu[300:].any()


def test_compiled_equals_eager():
    q, k, v = inputs(2, 4, 256, 64)

    def call(q, k, v):
        return lowbit_attn.attention(q, k, v, is_causal=True, backend="reference")

    torch.testing.assert_close(torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v), rtol=0, atol=0)


def test_a_recipe_without_a_kernel_warns_by_name():
    q, k, v = inputs(1, 2, 40, 64)
    dispatch._warn_once.cache_clear()
    with pytest.warns(LowbitFallbackWarning, match=r"nvfp4 on cuda .* runs the PyTorch reference"):
        lowbit_attn.attention(q, k, v, recipe="nvfp4")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_leave_the_current_one_alone():
    q, k, v = (x.to("cuda:1") for x in inputs(1, 2, 200, 64))
    output = lowbit_attn.attention(q, k, v, backend="reference")
    assert output.device == q.device
    assert torch.cuda.current_device() == 0
