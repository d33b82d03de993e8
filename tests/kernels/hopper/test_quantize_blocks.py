"""Blocks of 32 on Hopper, as far as a CPU can show: V's kernels in Triton's interpreter, scale rules, P's grids, what is served."""

import pytest
import torch
from interpreted import only_interpreted, run_interpreted, starts_interpreter

from lowbit_attn import formats
from lowbit_attn.kernels.hopper.grids import GRIDS
from lowbit_attn.recipes import Operand, resolve
from lowbit_attn.reference.operands import round_operand

pytest.importorskip("triton", reason="Triton runs on Linux only")

RULES = [("e4m3", "ceil"), ("e2m3", "ceil"), ("e2m1", "uos"), ("e2m1", "floor"), ("e2m1", "oas"), ("e2m1", "ceil")]


@pytest.mark.parametrize(("element", "rule"), RULES)
def test_bounds_as_bits_give_the_exponents_of_formats(element, rule):
    from lowbit_attn.kernels.hopper.quantize_blocks import _bounds
    (exponent, fraction), numbers = _bounds(Operand(element, "mx32", rule))
    around = [m * 2.0**e for e in range(-100, 100, 7) for top in (6.0, 7.0, 7.25, 7.5, 8.0, 448.0)
              for m in (top, top * (1 + 2.0**-23), top * (1 - 2.0**-23))]
    maxima = torch.tensor(around)
    size, power = torch.frexp(maxima)
    bits = (size * 2**24).long() - 2**23
    fmt = formats.element_format(element)
    assert torch.equal((power - exponent + (bits > fraction)).int(), formats.shared_exponent(maxima, rule, fmt))
    assert numbers == (fmt.mantissa_bits, fmt.min_exponent, fmt.max_value)


@pytest.mark.parametrize("kind", GRIDS, ids="-".join)
def test_one_addition_in_float16_rounds_to_the_grid(kind):
    # What inline.round_patterns does, every float16 operation rounded once; tests/gpu holds the instructions to the same.
    element, grid = formats.element_format(kind[0]), GRIDS[kind]
    half = lambda x: x.half().double()  # noqa: E731
    for largest in range(4 << 10, 15 << 10, 136):
        field = max((largest + grid.bump >> 10) - 1, grid.lowest)
        threshold = torch.tensor(field << 10).to(torch.int16).view(torch.float16).double()
        p = torch.arange(0, largest + 1, 8).to(torch.int16).view(torch.float16).double()
        magic = half(threshold * grid.magic)
        clamped = p.clamp_max(3 * threshold) if kind[0] == "e2m1" else p
        u = torch.minimum(half(clamped / 2 + threshold), clamped)
        u = half(half(u + magic) - magic)
        got = torch.maximum(half(2 * u - 2 * threshold), u)
        top = torch.tensor(largest).to(torch.int16).view(torch.float16).float()
        scale = formats.scales.pow2(formats.shared_exponent(top, kind[1], element), torch.float64)
        assert torch.equal(got, formats.round_to_element(p / scale, element) * scale), largest


@starts_interpreter
def test_values_equal_the_references_numbers():
    run_interpreted(__file__, "TestInterpreted")


@only_interpreted
class TestInterpreted:
    KEYS = (170, 0, 33)
    VALID = (160, 0, 33)

    def run(self, v, operand):
        """v_t and v_scale of documents of KEYS keys, VALID of which exist, and how many numbers were not exact."""
        import triton_interpreter  # noqa: F401

        from lowbit_attn.kernels.hopper.quantize_blocks import SHIFTS, _bounds, _channel_maxima, _quantize_v
        tiles = [-(-keys // 128) for keys in self.KEYS]
        documents = torch.tensor([[0, 0, sum(self.KEYS[:n]), keys, self.VALID[n], 0, sum(tiles[:n]), 0]
                                  for n, keys in enumerate(self.KEYS)], dtype=torch.int32)
        k_tiles = torch.tensor([n for n, count in enumerate(tiles) for _ in range(count)] + [-1], dtype=torch.int32)
        (_, heads, dim), count = v.shape, len(k_tiles)
        maxima = torch.zeros(len(documents), heads, dim, dtype=torch.int32)
        v_t = torch.full((heads, dim, 128 * count), 0xA5, dtype=torch.uint8)
        v_scale, inexact = torch.zeros(len(documents), heads, dim), torch.zeros(3, dtype=torch.int32)
        whole, strides = operand.layout == "per_tensor", (0, *v.stride())
        (top, fraction), (mantissa, smallest, largest) = _bounds(operand)
        _channel_maxima[(count, heads)](v, maxima, documents, k_tiles, *strides, heads, D=dim, WHOLE=whole)
        _quantize_v[(count, heads)](v, maxima, v_t, v_scale, inexact, documents, k_tiles, *strides, heads, count, D=dim,
                                    WHOLE=whole, TOP=top, FRACTION=fraction, MANTISSA=mantissa, MIN_EXPONENT=smallest,
                                    LARGEST=largest, SHIFT=SHIFTS[operand.element][2], COUNT=True)
        return v_t, v_scale, inexact, tiles

    def numbers(self, v, operand):
        """What the kernel's operands stand for, document by document, and what the reference rounds to."""
        v_t, v_scale, inexact, tiles = self.run(v, operand)
        key = torch.arange(128)
        place = 16 * (key >> 2 & 7) + 4 * (key >> 5) + 2 * (key & 1) + (key >> 1 & 1)
        values = v_t.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 128))[..., place].flatten(-2)
        for n, keys in enumerate(self.KEYS):
            first, start = 128 * sum(tiles[:n]), sum(self.KEYS[:n])
            got = (values[..., first:first + keys] * v_scale[n, ..., None]).permute(0, 2, 1)
            exists = (torch.arange(keys) < self.VALID[n])[:, None, None]
            wanted = round_operand(torch.where(exists, v[start:start + keys], 0).transpose(0, 1), operand, axis=-2)
            if keys:
                yield got, wanted, int(inexact[2])

    def values(self):
        v = torch.randn(sum(self.KEYS) + 5, 2, 64, generator=torch.Generator().manual_seed(0))
        v[160:170] = torch.nan  # stored keys that do not exist
        return v

    @pytest.mark.parametrize(("element", "rule"), RULES)
    def test_blocks_of_keys(self, element, rule):
        for got, wanted, inexact in self.numbers(self.values(), Operand(element, "mx32", rule)):
            if element == "e4m3":
                assert (got - wanted).abs().max() <= wanted.abs().max() * 2.0**-17
            else:
                assert torch.equal(got, wanted)
                assert inexact == 0

    def test_one_scale_for_a_head(self):
        for got, wanted, inexact in self.numbers(self.values(), Operand("e4m3", "per_tensor")):
            assert torch.equal(got, wanted)
            assert inexact == 0

    def test_a_block_far_below_its_channels_largest_is_counted(self):
        v = self.values()
        v[:32, 0, 3] *= 2.0**-14
        pairs = list(self.numbers(v, Operand("e2m3", "mx32")))
        different = sum(int((got != wanted).sum()) for got, wanted, _ in pairs)
        assert 0 < different <= 32
        assert pairs[0][2] == different

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("layout", ["mx32", "per_tensor"])
    def test_a_broken_value_breaks_its_block(self, layout, value):
        v = self.values()
        v[40, 1, 7] = value
        for got, wanted, _ in self.numbers(v, Operand("e4m3", layout)):
            assert torch.equal(got.isnan(), wanted.isnan())


@pytest.mark.parametrize(("recipe", "named"), [
    ("fused_mxfp6:maximum=online,max_threshold=0", "exponential, maximum, row_sum"), ("mxattention:p=e2m1/per_row", "p: got"),
    ("mxattention:v=e2m1/nvfp16", "v: got"), ("mxattention:trains=true", "causal or trains")])
def test_what_is_not_served_is_named(recipe, named):
    from lowbit_attn.kernels.hopper.grids import refusal
    assert named in (refusal(resolve(recipe)) or "")


@pytest.mark.parametrize("options", [{"is_causal": True}, {"save": True}])
def test_masks_and_codes_to_save_are_refused(options):
    from lowbit_attn.kernels.hopper.block_attention import prepare
    x = torch.zeros(1, 8, 1, 64)
    with pytest.raises(ValueError, match="accepted: False"):
        prepare(x, x, x, resolve("fused_mxfp6"), **options)
