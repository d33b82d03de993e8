"""The ablation of Fused-Softmax's tricks as far as a CPU goes: variants are traced, compiled once for all lengths, and softmax."""

import json
import math
from unittest.mock import patch

import pytest

pytest.importorskip("triton", reason="Triton runs on Linux only")

import compile_kernels
import fused_ablation
import gluon_on_cpu
import launches
import torch
from fused_ablation import VARIANTS, Point
from gluon_on_cpu import Value
from gluon_packed import halves, packed_instructions, words
from triton._C.libtriton import ir
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from lowbit_attn.kernels.hopper import block_attention, blocks, fused, inline
from lowbit_attn.kernels.hopper.grids import GRIDS


def launched(name, sequence=256, heads=2, recipe="fused_mxfp6"):
    """The variant, and the attention kernel that its run launches."""
    built = fused_ablation.build([name], recipe)[name]
    inputs = fused_ablation.inputs(sequence, heads, torch.device("cpu"))
    found = launches.caught(lambda: built.run(built.prepare(*inputs)))
    [launch] = [x for x in found if x[0].__name__ == "attention"]
    return built, launch


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_traced_with_its_own_functions_and_configuration(name):
    built, (function, signature, constants, attributes, options) = launched(name)
    config = built.variant.config
    given = {function.arg_names[path[0]]: value for path, value in constants.items()}
    assert (given["WARPGROUPS"], given["REGISTERS"], given["STAGES"]) == (config.warpgroups, config.registers, config.stages)
    assert given["FROZEN"] == name.startswith("FRU")
    assert given["EXACT_SUM"] == ("R" not in name)
    assert (function is fused.attention) == (not built.variant.replaced)
    backend = make_backend(launches.TARGET)
    parsed = backend.parse_options(options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = GluonASTSource(function, signature, constants, attributes).make_ir(
        launches.TARGET, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)
    module = str(made)
    for device_function in built.variant.replaced.values():
        assert f"fused_ablation.{device_function.__name__}__" in module
    assert block_attention.fused is fused


def test_a_measurement_launches_every_variant_and_writes_its_points(tmp_path):
    points = []
    variants = fused_ablation.build(list(VARIANTS), "fused_mxfp4")
    found = launches.caught(lambda: points.extend(fused_ablation.measure(variants, 256, 2, torch.device("cpu"))))
    assert len({id(x[0]) for x in found if x[0].__name__ == "attention"}) == 1 + sum(bool(x.replaced) for x in VARIANTS.values())
    assert [point.variant for point in points] == list(VARIANTS)
    fused_ablation.write(tmp_path / "results" / "points.json", "none", "fused_mxfp4", variants, points)
    written = json.loads((tmp_path / "results" / "points.json").read_text(encoding="utf-8"))
    assert len(written["points"]) == len(VARIANTS)
    assert written["variants"]["FRU"]["warpgroups"] == 3
    assert set(written["check_cost_percent"]) == {"256"}
    assert "roll-back check" in fused_ablation.table(points, list(VARIANTS))


@pytest.mark.parametrize("name", ["U", "FRU"])
def test_no_length_compiles_again(name):
    _, (_, *short) = launched(name, 1024, heads=6)
    _, (_, *long) = launched(name, 8192, heads=3)
    assert short == long


def softmax(function, scores, values, unit, online):
    """Output and log-sum-exp of one warpgroup's rows by a function that takes the place of `fused.online` (or `fused.frozen`): by
    float32 sums, and by sums of rounded weights."""
    grid = GRIDS["e2m3", "ceil"]
    numbers = ("e2m3", grid.bump, block_attention._pair(grid.magic), grid.lowest)
    slope = Value(torch.full((64, 4), unit))
    level, offset = Value(torch.zeros(64)), Value(torch.zeros(64, 4))
    pair = rest = Value(torch.zeros(64, 4, dtype=torch.int32))
    output, exact, quantized = torch.zeros(64, values.shape[-1]), torch.zeros(64), torch.zeros(64)
    for tile in range(scores.shape[1] // 128):
        keys = slice(128 * tile, 128 * tile + 128)
        packed = words(scores[:, keys].reshape(64, 4, 16, 2).transpose(1, 2))  # a lane holds a block of 32 keys
        if online:
            patterns, level, factor, sums = function(packed, slope, level, tile == 0, False, *numbers)
            exact = (exact * factor.data if tile else 0) + sums.data.sum(-1)
        else:
            patterns, offset, pair, rest, factor = function(packed, slope, offset, pair, rest, tile == 0, *numbers)
            factor = Value(factor.data[:, 0])
        weights = 256 * halves(patterns).float().transpose(1, 2).reshape(64, 128)
        output = (output * factor.data[:, None] if tile else 0) + weights @ values[keys]
        quantized = (quantized * factor.data if tile else 0) + weights.sum(-1)
    base = level.data if online else (blocks.SEED - offset.data[:, 0]) / 8 + 8 - blocks.SEED_LOG2
    results = {False: (output / quantized[:, None], base - 8 + quantized.log2())}
    return results | ({True: (output / exact[:, None] / 256, base + exact.log2())} if online else {})


@pytest.mark.parametrize("climb", [1.0, 4.0], ids=["level", "climbing"])
@pytest.mark.parametrize("name", ["exact_frozen", "u16_online", "u16_frozen", "unchecked", "frozen"])
def test_the_functions_of_the_variants_and_the_kernels_own_are_softmax(name, climb):
    if name == "unchecked" and climb > 1:
        pytest.skip("rises nowhere: that is what it leaves out")
    scores = torch.randn(64, 512) * 1.44
    scores[:, 256:] *= climb
    values = torch.randn(512, 32)
    unit = 2.0**-6 * (1 if name == "exact_frozen" else 8)  # scores in doublings, or 8 codes each
    with packed_instructions(), gluon_on_cpu.on_cpu(fused_ablation, blocks, inline):
        function = blocks.frozen if name == "frozen" else getattr(fused_ablation, name)
        results = softmax(function, scores * 64, values, unit, name not in ("unchecked", "frozen"))
    weights = (scores * math.log(2)).softmax(-1)
    for output, log2_sum in results.values():
        assert (output - weights @ values).norm() < 0.05 * (weights @ values).norm()
        # Where scores climb one key has nearly all of a row: its rounding and Schraudolph's error do not average out.
        torch.testing.assert_close(log2_sum, (scores * math.log(2)).logsumexp(-1) / math.log(2), rtol=0,
                                   atol=0.03 if climb == 1 else 0.15)


@pytest.mark.full
def test_kernels_compile_side_by_side_and_are_kept():
    variants = fused_ablation.build(["F", "FRU"], "fused_mxfp6")
    inputs = fused_ablation.inputs(256, 2, torch.device("cpu"))
    prepared = {}
    launches.caught(lambda: prepared.update((name, built.prepare(*inputs)) for name, built in variants.items()))

    def compile_and_launch():
        with patch.object(JITFunction, "_do_compile", compiles):
            fused_ablation.compile_all(variants, prepared)
        for name, built in variants.items():
            with patch.object(built.module, "attention", fused_ablation.Compiling(built.module.attention)):
                built.run(prepared[name])  # one that was not kept would be caught

    compiles = JITFunction._do_compile
    try:
        assert launches.caught(compile_and_launch) == []
    finally:
        variants["FRU"].module.attention.device_caches.clear()  # the package's own kernel: other tests compile it again


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("recipe", fused_ablation.RECIPES)
def test_a_variant_compiles(name, recipe):
    built, launch = launched(name, recipe=recipe)
    compiled = compile_kernels.compile_variant((name, *launch))
    assert compiled.error is None
    assert not compiled.warnings
    sums = not launch[2].get((launch[0].arg_names.index("EXACT_SUM"),))
    assert compiled.matrix == {compile_kernels.FP8: built.variant.config.warpgroups * (36 if sums else 24)}


def test_functions_that_the_kernel_does_not_have_are_refused():
    with pytest.raises(AttributeError, match="offline"):
        fused_ablation.rebuilt("broken", {"offline": fused_ablation.exact_frozen})


def test_programs_are_equally_full_where_heads_are_fewer():
    for sequence in (65536, 131072):
        two, three = (fused_ablation.fill_of(sequence, fused_ablation.heads_of(sequence), rows, 132) for rows in (128, 192))
        assert two == pytest.approx(three, abs=0.005)
        assert two > 0.95


def test_the_table_compares_with_the_conventional_softmax_and_prices_the_check():
    names = ["conventional", "FRU", "FRU_unchecked"]
    points = [Point(sequence, 24, name, milliseconds, 0.0, 1.0, 4.0 / milliseconds, 1.0, error, "graph replays")
              for sequence, error in ((1024, 6.25), (131072, None))
              for name, milliseconds in zip(names, (4.0, 2.04, 2.0), strict=True)]
    lines = fused_ablation.table(points, names).splitlines()
    speedups = lines[lines.index("times as fast as conventional") + 1:]
    assert speedups[0].split() == ["1k", "128k"]
    assert speedups[2].split() == ["FRU", "1.961", "1.961"]
    assert lines[-1].split() == ["+2.00", "+2.00"]
    assert ["FRU", "6.25", "-"] in [line.split() for line in lines]
    assert fused_ablation.check_cost(points) == pytest.approx({1024: 2.0, 131072: 2.0})
