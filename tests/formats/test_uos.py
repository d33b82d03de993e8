"""The exact analysis behind the scale boundary 29/4, in fractions: MXAttention theorem 1 and tables 5 and 6."""

import math
from fractions import Fraction as F

import pytest
import torch

from lowbit_attn.formats import E2M1, decode, shared_exponent, uos

# Table 6: the interval's ends and Delta on it as 1/denominator of a quadratic a q^2 + b q + c.
TABLE_6 = [
    (F(0), F(1, 4), (0, 0, 0), 1),
    (F(1, 4), F(1, 2), (-16, 8, -1), 32),
    (F(1, 2), F(3, 4), (16, -24, 7), 32),
    (F(3, 4), F(5, 4), (0, 0, -1), 16),
    (F(5, 4), F(3, 2), (-16, 40, -27), 32),
    (F(3, 2), F(7, 4), (16, -56, 45), 32),
    (F(7, 4), F(7), (0, 0, -1), 8),
    (F(7), F(10), (16, -224, 783), 8),
    (F(10), None, (48, -864, 3983), 8),
]


def test_grid_is_what_the_codes_decode_to():
    assert [float(x) for x in uos.GRID] == decode(torch.arange(8, dtype=torch.uint8), E2M1).tolist()


@pytest.mark.parametrize(("x", "expected"), [("1/4", "1/192"), ("3/4", "1/64"), ("5/4", "5/192"), ("7/4", "7/192"), ("5/2", "1/12"),
                                             ("7/2", "1/6"), ("5", "13/24"), ("6", "7/8")])
def test_cumulative_error_of_table_5(x, expected):
    assert uos.cumulative_error(F(x)) == F(expected)


@pytest.mark.parametrize("x", [F(1, 10), F(9, 10), F(3), F(29, 8), F(13, 2), F(12)])
def test_cumulative_error_is_the_integral_of_the_squared_distance(x):
    steps = 4000
    midpoints = [x * (2 * i + 1) / (2 * steps) for i in range(steps)]
    integral = sum(float(v - uos.projection(v)) ** 2 for v in midpoints) * float(x) / steps
    # The midpoint rule's error: the second derivative 2 times h^2 / 24 times x, and a jump of at most 0.25 h at seven thresholds.
    assert float(uos.cumulative_error(x)) == pytest.approx(integral, abs=float(x) / steps * 2)


@pytest.mark.parametrize("x", [F(0), F(1, 4), F(26, 10), F(5), F(7), F(100)])
def test_projection_is_the_nearest_grid_value(x):
    assert abs(x - uos.projection(x)) == min(abs(x - value) for value in uos.GRID)


def test_difference_has_the_pieces_of_table_6():
    expected = [(start, stop, tuple(F(c, denominator) for c in (c0, c1, c2)))
                for start, stop, (c2, c1, c0), denominator in TABLE_6]
    assert [(p.start, p.stop, p.coefficients[:3]) for p in uos.DIFFERENCE_PIECES] == expected


def test_difference_has_no_cubic_term():
    assert {piece.coefficients[3] for piece in uos.DIFFERENCE_PIECES} == {0}


@pytest.mark.parametrize("q", [F(n, 16) for n in range(1, 200, 7)])
def test_difference_follows_from_the_error(q):
    assert uos.boundary_difference(q) == uos.cumulative_error(q) - 8 * uos.cumulative_error(q / 2)


def test_sign_table():
    intervals = [(i.start, i.stop, i.sign) for i in uos.sign_table()]
    assert intervals == [(F(0), F(1, 4), 0), (F(1, 4), F(29, 4), -1), (F(29, 4), None, 1)]


def test_minimiser_is_29_quarters():
    assert uos.minimiser() == F(29, 4)


def test_difference_is_zero_at_the_minimiser():
    assert uos.boundary_difference(F(29, 4)) == 0


def test_the_other_root_lies_outside_its_interval():
    # 27/4 solves the quadratic of (7, 10], where it does not apply.
    assert uos.boundary_difference(F(27, 4)) == F(-1, 8)


@pytest.mark.parametrize("step", [F(1, 1000), F(1, 4), F(1), F(5)])
def test_objective_rises_on_both_sides_of_the_minimiser(step):
    best = uos.objective(F(29, 4))
    assert uos.objective(F(29, 4) + step) > best
    assert uos.objective(F(29, 4) - step) > best


@pytest.mark.parametrize("q", [F(1), F(6), F(7), F(29, 4), F(8), F(12)])
def test_slope_of_the_objective_is_the_difference(q):
    # J'(q) = g(q) Delta(q) / q^3 with g(q) = 1 / (q ln 2); the central difference is off by h^2 J''' / 6.
    step = F(1, 10000)
    slope = (uos.objective(q + step) - uos.objective(q - step)) / float(2 * step)
    assert slope == pytest.approx(float(uos.boundary_difference(q) / q**4) / math.log(2), abs=1e-7)


def test_objective_is_constant_below_a_quarter():
    # Everything rounds to zero: D = 1/3, whatever q.
    assert uos.objective(F(1, 4)) == pytest.approx(1 / 3, abs=1e-12)
    assert uos.objective(F(1, 7)) == pytest.approx(1 / 3, abs=1e-12)


@pytest.mark.parametrize("function", [uos.cumulative_error, uos.boundary_difference])
def test_negative_arguments_are_refused(function):
    with pytest.raises(ValueError, match="got -1; accepted: a non-negative number"):
        function(F(-1))


def test_the_scale_rule_uses_the_minimiser():
    # Exactly at 29/4 times a power of two the exponent still is the lower one; the next float32 takes the higher.
    boundary = float(uos.minimiser())
    maxima = torch.tensor([boundary, boundary * 2.0**-9, boundary * 2.0**9])
    exponents = torch.tensor([0, -9, 9])
    assert torch.equal(shared_exponent(maxima, "uos", E2M1), exponents.int())
    above = torch.nextafter(maxima, torch.tensor(torch.inf))
    assert torch.equal(shared_exponent(above, "uos", E2M1), (exponents + 1).int())
