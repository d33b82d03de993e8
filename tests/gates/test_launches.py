"""Catching launches: what Triton would compile is seen, nothing is compiled, and the driver of the machine comes back."""

import pytest

triton = pytest.importorskip("triton", reason="Triton runs on Linux only")

import launches  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import driver  # noqa: E402

from lowbit_attn.cli.benchmarks import ours, quantizers  # noqa: E402
from lowbit_attn.cli.benchmarks.workloads import PRESETS, Inputs, Preset  # noqa: E402
from lowbit_attn.recipes import resolve  # noqa: E402


@triton.jit
def add(x, y, count, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y + i, tl.load(x + i, mask=i < count), mask=i < count)


def test_a_launch_is_seen_with_its_types_alignments_and_options():
    x = torch.zeros(64, dtype=torch.bfloat16)
    [(function, signature, constants, attributes, options)] = launches.caught(
        lambda: add[(1,)](x, x[1:], 48, SIZE=64, num_warps=8))
    assert function is add
    assert signature == {"x": "*bf16", "y": "*bf16", "count": "i32", "SIZE": "constexpr"}
    assert constants == {(3,): 64}
    # x[1:] is not aligned to 16 bytes, 48 is divisible by 16
    assert {path for path, known in attributes.items() if known} == {(0,), (2,)}
    assert options["num_warps"] == 8


def test_arguments_that_do_not_fit_the_kernel_raise():
    with pytest.raises(TypeError, match="count"):
        launches.caught(lambda: add[(1,)](torch.zeros(4), torch.zeros(4), SIZE=64))


def test_the_machines_driver_comes_back():
    before = driver._active
    launches.caught(lambda: None)
    assert driver._active is before


@pytest.mark.parametrize("call", list(dict.fromkeys(launches.calls(everything=True))), ids=str)
def test_attention_launches_bind(call):
    names = {function.__name__ for function, *_ in launches.caught(call.launch)}
    if call.backward and call.deterministic:
        wanted = {"gradient_kernel", "key_gradients", "query_gradients"}
    elif call.backward:
        wanted = {"gradient_kernel", "_transpose_queries", "gradients", "finish_query"}
    elif resolve(call.recipe).qk.layout == "mx32":
        wanted = {"attention", "_quantize_qk", "_quantize_v", "_channel_maxima"}
    else:
        wanted = {"attention", "quantize_kernel"}
    assert wanted <= names


@pytest.mark.parametrize("recipe", launches.RECIPES)
def test_a_forward_that_saves_returns_as_many_tensors_as_the_operator_declares(recipe):
    from lowbit_attn.ops import hopper

    x = torch.zeros(1, 128, 2, 64, dtype=torch.bfloat16)
    found = []
    launches.caught(lambda: found.extend(hopper.forward(x, x, x, resolve(recipe), scale=None, is_causal=False, save=True)))
    assert [y.shape for y in found[2:]] == [(1, 128, 2, 64), (1, 2, 128)] * 3 + [(1, 2, 128)]


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_forward_that_saves_promotes_four_times_as_often(head_dim):
    def tiles(saves):
        (kernel, _, constants, *_), = (x for x in launches.caught(launches.Call("mxfp8", head_dim, saves=saves).launch)
                                       if x[0].__name__ == "attention")
        return constants[kernel.arg_names.index("PROMOTE"),]

    assert [tiles(saves) for saves in (False, True)] == [16, 4]


@pytest.mark.parametrize("workload", PRESETS[Preset.SMALL], ids=str)
def test_what_the_benchmark_times_alone_launches(workload):
    inputs = Inputs.draw(workload, torch.device("cpu"))
    for recipe in launches.RECIPES:
        def times_alone(recipe=recipe):
            bound = ours._kernel(inputs, recipe, "hopper")
            assert [x[0].__name__ for x in launches.caught(bound.run)] == ["attention"]
            quantize = quantizers._hopper(inputs, resolve(recipe), save=False)
            assert [x[0].__name__ for x in launches.caught(quantize)] == ["quantize_kernel"]

        launches.caught(times_alone)
