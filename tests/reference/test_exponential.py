"""Bit-level exponentials: the patterns and their order, the affine coordinate and its gate, Mitchell's and FLAMIA's variants.

Sources: Fused-Softmax sections 4.1-4.3, appendices B and C (tables 8 and 9); FLAMIA section 3.7, appendix C.
"""

import math
from dataclasses import replace

import pytest
import torch

from lowbit_attn.cli.measurements import proxies
from lowbit_attn.formats import E2M1, E2M3, block_layout, encode, quantize, shared_exponent
from lowbit_attn.recipes import RECIPES
from lowbit_attn.reference import exponential

CAP = 32.0
CAP_CODE = round((exponential.AFFINE_OFFSET + CAP * exponential.AFFINE_SLOPE) * 65535)
ALL_CODES = torch.arange(1 << 16, dtype=torch.int32)


def as_fp16(codes):
    """What a 16-bit float maximum reads."""
    return codes.to(torch.int16).view(torch.float16)


def as_bf16(codes):
    return codes.to(torch.int16).view(torch.bfloat16)


def codes_of(x):
    """Stage A's unsigned codes of scores x doublings above the reference."""
    zero = torch.zeros((), dtype=torch.float64)
    value = exponential.schraudolph_u16(exponential.affine(x.double(), zero))
    return (value.view(torch.int32) >> 16) & 0xFFFF


class TestProxies:
    @pytest.mark.parametrize("proxy", proxies.PROXIES)
    def test_errors_of_table_8(self, proxy):
        assert proxies.errors(proxy, 1 << 18) == pytest.approx(proxies.PUBLISHED[proxy], abs=proxies.TOLERANCE)

    def test_epsilon_minimizes_the_rms_error_of_the_ramp(self, monkeypatch):
        def rms(epsilon):
            monkeypatch.setattr(exponential, "EPSILON", epsilon)
            return proxies.errors("continuous ramp", 1 << 14)[2]

        best = exponential.EPSILON
        assert rms(best) < min(rms(best - 1e-3), rms(best + 1e-3))

    @pytest.mark.parametrize("mantissa_bits", [3, 7, 10])
    def test_rounding_the_pattern_is_bounded_by_half_a_step(self, mantissa_bits):
        x = -(torch.arange(1 << 14, dtype=torch.float64) + 0.5) / (1 << 14)
        name = {3: "U8 / E4M3", 7: "U16 / BF16", 10: "U16 / FP16"}[mantissa_bits]
        ratio = proxies.proxy_value(x, name) / proxies.proxy_value(x, "continuous ramp")
        assert (ratio - 1).abs().max() <= 2.0 ** -(mantissa_bits + 1) + 1e-12

    @pytest.mark.parametrize(("function", "lowest", "highest"), [
        (exponential.schraudolph_u32, -125.0, 127.0), (exponential.schraudolph_u8, -5.9, 8.7)])
    def test_proxies_follow_2_to_the_x_over_their_reach(self, function, lowest, highest):
        x = torch.linspace(lowest, highest, 4097)
        assert (function(x).double() / torch.exp2(x.double()) - 1).abs().max() <= 0.081

    def test_u8_saturates_below_its_nan(self):
        assert exponential.schraudolph_u8(torch.tensor([8.9, 20.0, 1000.0])).tolist() == [448.0] * 3

    def test_u8_reaches_seven_doublings_down(self):
        assert exponential.schraudolph_u8(torch.tensor([-6.8, -7.1, -100.0, -torch.inf])).tolist() == [2.0**-9, 0.0, 0.0, 0.0]


class TestAffineCoordinate:
    def test_one_doubling_is_128_codes(self):
        steps = codes_of(torch.arange(-100, 33)).diff()
        # 65535 / 65536 of 128: a code is lost every 512 doublings, which rounding may show once here.
        assert set(steps.tolist()) <= {127, 128}
        assert steps.float().mean() >= 128 * 65535 / 65536 - 0.01

    def test_the_reference_maximum_only_shifts_it(self):
        x = torch.linspace(-20, 20, 801, dtype=torch.float64)
        m = torch.tensor(7.0, dtype=torch.float64)
        assert torch.allclose(exponential.affine(x + m, m), exponential.affine(x, torch.zeros_like(m)), rtol=0, atol=1e-15)

    def test_raising_the_reference_by_an_integer_shifts_the_pattern_by_whole_doublings(self):
        x = torch.linspace(0.0, 30.0, 999)
        lower, higher = (codes_of(x - m) for m in (0.0, 5.0))
        # 5 * 128 * 65535 / 65536, rounded on both sides.
        assert (lower - higher - 5 * 128).abs().max() <= 1

    def test_the_value_at_the_reference_is_near_one(self):
        # 2^-epsilon linearized and the 65535th part: 1 - 0.058 ... as the pattern 127 - epsilon reads.
        assert codes_of(torch.zeros(1)).item() == round((127 - exponential.EPSILON) * 128 * 65535 / 65536)

    @pytest.mark.parametrize("x", [-128.0, -1000.0, -math.inf])
    def test_below_reach_is_zero(self, x):
        assert codes_of(torch.tensor([x])).item() == 0


class TestGate:
    """The gate compares affine coordinates with D + 32 C."""

    @pytest.mark.parametrize(("rise", "fires"), [(31.99, False), (32.01, True), (129.0, True), (377.5, True), (1e4, True)])
    def test_fires_above_32_doublings(self, rise, fires):
        coordinate = exponential.affine(torch.tensor(rise), torch.tensor(0.0))
        assert bool(coordinate > exponential.AFFINE_OFFSET + CAP * exponential.AFFINE_SLOPE) == fires

    def test_code_and_coordinate_agree_away_from_half_a_code(self):
        x = torch.linspace(0.0, 64.0, 6401, dtype=torch.float64)
        coordinate = exponential.affine(x, torch.zeros((), dtype=torch.float64))
        by_coordinate = coordinate > exponential.AFFINE_OFFSET + CAP * exponential.AFFINE_SLOPE
        assert torch.equal((codes_of(x) > CAP_CODE)[(x - CAP).abs() > 1 / 128], by_coordinate[(x - CAP).abs() > 1 / 128])

    def test_fused_recipes_gate_there(self):
        assert {RECIPES[f"fused_mxfp{n}"].max_threshold for n in (8, 6, 4)} == {CAP}

    def test_coordinates_saturate_385_doublings_up(self):
        assert codes_of(torch.tensor([384.9])).item() < 0xFFFF
        assert codes_of(torch.tensor([385.1, 1e6])).tolist() == [0xFFFF, 0xFFFF]


class TestCodeOrder:
    """Table 9: a 16-bit float maximum over BF16 patterns misreads one band of four."""

    BANDS = [(0x0000, 0x7BFF), (0x7C00, 0x7FFF), (0x8000, 0xFC00), (0xFC01, 0xFFFF)]

    @staticmethod
    def maximum3(peak, neighbour):
        """NaN propagates, else the larger fp16 value: what the instruction returns, as a code."""
        a, b = as_fp16(peak), as_fp16(neighbour)
        return torch.where(a.isnan() | b.isnan(), 0x7E00, torch.where(a > b, peak, neighbour))

    def test_conversion_is_monotone_so_unsigned_order_is_score_order(self):
        codes = codes_of(torch.linspace(-130.0, 390.0, 100_001, dtype=torch.float64))
        assert (codes.diff() >= 0).all()
        assert (codes[0], codes[-1]) == (0, 0xFFFF)

    def test_below_the_sign_bit_fp16_orders_codes_as_bf16_does(self):
        positive = ALL_CODES[:0x7C00]
        assert (as_fp16(positive).double().diff() > 0).all()
        assert (as_bf16(positive).double().diff() > 0).all()

    @pytest.mark.parametrize(("band", "kind"), list(enumerate(["finite", "inf or nan", "negative", "nan"])))
    def test_bands_read_as_the_table_says(self, band, kind):
        first, last = self.BANDS[band]
        read = as_fp16(ALL_CODES[first:last + 1]).double()
        holds = {"finite": read.isfinite() & ~torch.signbit(read), "inf or nan": (read == math.inf) | read.isnan(),
                 "negative": torch.signbit(read) & ~read.isnan(), "nan": read.isnan()}
        assert holds[kind].all()

    def test_bands_cover_every_code_once(self):
        assert [a for a, _ in self.BANDS] == [0, *(b + 1 for _, b in self.BANDS[:-1])]
        assert self.BANDS[-1][1] == 0xFFFF

    @pytest.mark.parametrize(("code", "offset"), [(0x7BFF, 120), (0x7C00, 121), (0x7FFF, 128), (0x8000, 129), (0xFC00, 377),
                                                  (0xFC01, 377), (0xFFFF, 384)])
    def test_band_edges_in_doublings_above_the_reference(self, code, offset):
        assert (code >> 7) - 127 == offset

    def test_a_float_maximum_misses_the_gate_in_the_third_band_only(self):
        neighbour = torch.full_like(ALL_CODES, CAP_CODE - 1)
        fires = self.maximum3(ALL_CODES, neighbour) > CAP_CODE
        misread = (ALL_CODES > CAP_CODE) & ~fires
        first, last = self.BANDS[2]
        assert torch.equal(misread, (first <= ALL_CODES) & (last >= ALL_CODES))

    def test_the_unsigned_maximum_always_fires(self):
        neighbour = torch.full_like(ALL_CODES, CAP_CODE - 1)
        assert torch.equal(torch.maximum(ALL_CODES, neighbour) > CAP_CODE, ALL_CODES > CAP_CODE)

    def test_a_block_mate_between_cap_and_the_sign_bit_saves_the_gate(self):
        third = ALL_CODES[0x8000:0xFC01]
        assert (self.maximum3(third, torch.full_like(third, CAP_CODE + 1)) > CAP_CODE).all()

    def test_what_is_dropped_is_a_small_negative_weight_and_never_a_nan(self):
        # Read as BF16 the band is finite, its magnitude at most 2^(377 - 256 + 1) below overflow, as the text promises.
        dropped = as_bf16(ALL_CODES[0x8000:0xFC01]).double()
        assert dropped.isfinite().all()
        assert torch.signbit(dropped).all()

    def test_guaranteed_doublings_of_the_float_maximum(self):
        assert (0x8000 >> 7) - 127 - int(CAP) == 97


class TestStageB:
    """The block maxima of the codes already are the exponents of P's scales."""

    def test_scale_exponent_from_the_largest_code(self):
        codes = codes_of(torch.linspace(-60.0, 32.0, 20_001, dtype=torch.float64)).unique()
        # E2M3 reaches 7.5 = 1.875 * 2^2, and 1.875 is mantissa 112 of 128: a larger mantissa takes the next exponent.
        from_code = (codes >> 7) - 127 - 2 + ((codes & 127) > 112).int()
        from_value = shared_exponent(as_bf16(codes).float(), "ceil", E2M3)
        assert torch.equal(from_code, from_value)

    def test_no_element_of_a_block_saturates(self):
        p = as_bf16(codes_of(-4 * torch.rand(64, 32, dtype=torch.float64))).float()
        quantized = quantize(p, E2M3, block_layout("mx32"))
        top = (p / torch.exp2(quantized.scales.float() - 127)).amax(-1)
        assert (top <= 7.5).all()
        assert (top > 3.75).all()

    def test_the_bf16_pattern_is_16_times_finer_than_its_destination(self):
        assert 2.0 ** -(E2M3.mantissa_bits + 1) / 2.0 ** -(7 + 1) == 16


class TestMitchell:
    DELTA = math.log2(1.25) - 0.25

    def in_window(self, window, points=20_001):
        return torch.linspace(-window + 1, 127 - window, points, dtype=torch.float64).float()

    @pytest.mark.parametrize("window", [100, 116, 124])
    def test_equals_the_piecewise_linear_formula(self, window):
        x = self.in_window(window)
        fixed = torch.round((x.double() - self.DELTA) * 2.0**16) * 2.0**-16
        expected = torch.exp2(fixed.floor()) * (1 + fixed - fixed.floor())
        assert torch.equal(exponential.mitchell(x, window).double(), expected)

    @pytest.mark.parametrize("window", [100, 116, 124])
    def test_error_stays_between_what_the_offset_and_the_ramp_make(self, window):
        # At integers the offset alone is left, 2^-delta = -4.9 % (the text says 4.7 %); the ramp adds up to 6.15 % to it.
        x = self.in_window(window)
        ratio = exponential.mitchell(x, window).double() / torch.exp2(x.double())
        assert ratio.min() >= 2.0**-self.DELTA - 2e-5
        assert ratio.max() <= 2.0**-self.DELTA * 1.0615 + 2e-5

    @pytest.mark.parametrize("x", [-124.2, -200.0, -1e4, -1e30])
    def test_clamps_below_its_window(self, x):
        assert exponential.mitchell(torch.tensor([x]), 124).item() == 2.0**-124

    def test_masked_keys_are_zero(self):
        assert exponential.mitchell(torch.tensor([-torch.inf]), 124).item() == 0

    def test_above_its_window_the_value_is_corrupt(self):
        # x - delta = 4 is where the window of L = 124 ends.
        good, bad = exponential.mitchell(torch.tensor([3.9 + self.DELTA, 4.3 + self.DELTA]), 124).tolist()
        assert good == pytest.approx(2**3.9, rel=0.062)
        assert bad != pytest.approx(2 ** 4.3, rel=0.062)

    def test_a_recipe_whose_lazy_maximum_leaves_the_window_is_refused(self):
        with pytest.raises(ValueError, match="leaves that window"):
            replace(RECIPES["nvfp4"], exponential="mitchell", exp_window=124, trains=False, ds_stochastic=False)
        replace(RECIPES["nvfp4"], exponential="mitchell", exp_window=116, trains=False, ds_stochastic=False)

    @staticmethod
    def code_agreement(group):
        """Share of equal E2M1 codes on rows of normal scores; scales per group of keys from the group's maximum score."""
        scores = torch.randn(512, 4096) * math.log2(math.e)
        relative = scores - scores.amax(-1, keepdim=True)
        peak = relative.unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)
        unit = relative - shared_exponent(torch.exp2(peak), "ceil", E2M1)
        return (encode(torch.exp2(unit), E2M1) == encode(exponential.mitchell(unit, 116), E2M1)).float().mean().item()

    @pytest.mark.parametrize(("group", "share"), [(16, 0.975), (32, 0.975), (4096, 0.98)])
    def test_reproduces_the_codes_of_the_exact_exponential(self, group, share):
        # 98.7 % on the paper's inputs.
        assert self.code_agreement(group) >= share


class TestMixedSchraudolph:
    X = torch.linspace(-30.0, 0.0, 16 * 8192 + 1, dtype=torch.float64)[:-1].float()

    def ratio(self):
        """Of the approximated elements; x permuted so that each position of the pattern meets every fraction."""
        x = self.X.view(16, -1).T.reshape(-1)
        value = exponential.mixed_schraudolph(x)
        approximated = torch.arange(len(x)) // 2 % 8 < 5
        return (value.double() / torch.exp2(x.double()))[approximated]

    def test_ratio_stays_between_the_published_bounds(self):
        # -3.9 % to +2.0 % for the ramp; rounding the pattern to 7 bits adds at most 2^-8 on either side.
        assert self.ratio().min() >= (1 - 0.039) * (1 - 2.0**-8) - 5e-4
        assert self.ratio().max() <= (1 + 0.020) * (1 + 2.0**-8)

    def test_ratio_averages_one(self):
        # The ramp (1 + f) 2^-f averages 1.04069 over a doubling, times 2^-sigma: 1.0002, sigma having three digits.
        assert self.ratio().mean().item() == pytest.approx(1.0, abs=5e-4)

    def test_five_of_every_eight_pairs_are_approximated(self):
        x = torch.full((64,), -0.5)
        approximated = exponential.mixed_schraudolph(x) != torch.exp2(x)
        assert torch.equal(approximated, (torch.arange(64) // 2 % 8) < 5)

    def test_far_below_its_16_bit_field_it_is_zero_and_does_not_wrap(self):
        assert exponential.mixed_schraudolph(torch.full((16,), -400.0)).tolist() == [0.0] * 16
