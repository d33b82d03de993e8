"""Why MXFP4's best scale boundary is 29/4: MXAttention's Universal Optimal Scaling, in exact fractions.

Sources: MXAttention section 4.1, theorem 1, appendices A-C (tables 5 and 6). No torch: this module is the proof behind the
rule "uos" of `scales`, checkable by hand.

A boundary q picks the scale 2^ceil(log2(M / q)) for a block maximum M, so the scaled maximum x lies in (q/2, q]. With the
E2M1 grid G and its nearest-value projection,

    E(x) = integral over [0, x] of (v - G(v))^2 dv          error accumulated below x, a piecewise cubic
    D(x) = E(x) / x^3                                       the same, normalized
    J(q) = integral over [q/2, q] of D(x) g(x) dx           expected error, g the density of the scaled maximum

A power-of-two scale makes g(q/2) = 2 g(q) whatever the data, hence J'(q) = g(q) Delta(q) / q^3 with
Delta(q) = E(q) - 8 E(q/2). Its sign does not depend on the data, and changes once, from minus to plus, at q = 29/4.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

GRID = tuple(Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12))
"""Magnitudes of E2M1."""

THRESHOLDS = tuple((a + b) / 2 for a, b in pairwise(GRID))
"""Where rounding moves from one grid value to the next; everything above the last one becomes 6."""


@dataclass(frozen=True)
class Piece:
    """A polynomial, coefficients in ascending powers, on the interval (start, stop]; `stop` None means unbounded."""

    start: Fraction
    stop: Fraction | None
    coefficients: tuple[Fraction, ...]

    def __call__(self, x: Fraction) -> Fraction:
        """The polynomial's value."""
        return sum((c * x**power for power, c in enumerate(self.coefficients)), Fraction(0))

    def holds(self, x: Fraction) -> bool:
        """Whether x lies in the interval (0 counts as part of the first one)."""
        return (self.start < x or x == self.start == 0) and (self.stop is None or x <= self.stop)


def projection(x: Fraction) -> Fraction:
    """The grid value nearest to x >= 0, saturating at 6; a tie takes the lower value (ties have no weight in E)."""
    return GRID[sum(x > threshold for threshold in THRESHOLDS)]


def _at(pieces: tuple[Piece, ...], x: Fraction) -> Fraction:
    if x < 0:
        raise ValueError(f"x: got {x}; accepted: a non-negative number")
    return next(piece for piece in pieces if piece.holds(x))(x)


def _error_pieces() -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    start, total = Fraction(0), Fraction(0)
    for value, stop in zip(GRID, (*THRESHOLDS, None), strict=True):
        # total + ((x - value)^3 - (start - value)^3) / 3, expanded.
        constant = total - (value**3 + (start - value) ** 3) / 3
        pieces.append(Piece(start, stop, (constant, value**2, -value, Fraction(1, 3))))
        if stop is not None:
            start, total = stop, pieces[-1](stop)
    return tuple(pieces)


ERROR_PIECES = _error_pieces()
"""E as cubics, one per rounding interval."""


def cumulative_error(x: Fraction) -> Fraction:
    """E(x), exactly (table 5)."""
    return _at(ERROR_PIECES, x)


def _difference_pieces() -> tuple[Piece, ...]:
    cuts = sorted({Fraction(0), *THRESHOLDS, *(2 * threshold for threshold in THRESHOLDS)})
    pieces: list[Piece] = []
    for start, stop in zip(cuts, (*cuts[1:], None), strict=True):
        inside = start + 1 if stop is None else (start + stop) / 2
        whole = next(piece for piece in ERROR_PIECES if piece.holds(inside)).coefficients
        half = next(piece for piece in ERROR_PIECES if piece.holds(inside / 2)).coefficients
        polynomial = tuple(a - 8 * b / 2**power for power, (a, b) in enumerate(zip(whole, half, strict=True)))
        merged = bool(pieces) and pieces[-1].coefficients == polynomial
        pieces.append(Piece(pieces.pop().start if merged else start, stop, polynomial))
    return tuple(pieces)


DIFFERENCE_PIECES = _difference_pieces()
"""Delta, the cubic terms cancelled; intervals with one polynomial are merged (table 6)."""


def boundary_difference(q: Fraction) -> Fraction:
    """Delta(q) = E(q) - 8 E(q/2), exactly: the sign of J'(q) for every density."""
    return _at(DIFFERENCE_PIECES, q)


def _rational_root(value: Fraction) -> Fraction | None:
    """The square root of a non-negative fraction if it is a fraction."""
    numerator, denominator = math.isqrt(value.numerator), math.isqrt(value.denominator)
    exact = numerator**2 == value.numerator and denominator**2 == value.denominator
    return Fraction(numerator, denominator) if exact else None


def _interior_roots(piece: Piece) -> list[Fraction]:
    """Zeros of a piece of Delta strictly inside its interval; ArithmeticError if one is irrational."""
    constant, linear, square = piece.coefficients[:3]
    if square == 0:
        candidates = [-constant / linear] if linear else []
    else:
        discriminant = linear**2 - 4 * square * constant
        if discriminant < 0:
            return []
        root = _rational_root(discriminant)
        if root is None:
            return _irrational_roots(piece)
        candidates = [(-linear - root) / (2 * square), (-linear + root) / (2 * square)]
    inside = [x for x in candidates if piece.start < x and (piece.stop is None or x < piece.stop)]
    return sorted(set(inside))


def _irrational_roots(piece: Piece) -> list[Fraction]:
    """An empty list where end values and vertex show that the piece has no zero inside."""
    vertex = -piece.coefficients[1] / (2 * piece.coefficients[2])
    stop = piece.start + 1 if piece.stop is None else piece.stop
    points = [piece.start, stop, *([vertex] if piece.start < vertex and (piece.stop is None or vertex < stop) else [])]
    if len({_sign(piece(x)) for x in points}) != 1 or piece.stop is None:
        raise ArithmeticError(f"Delta may have an irrational zero between {piece.start} and {piece.stop}")
    return []


def _sign(value: Fraction) -> int:
    return (value > 0) - (value < 0)


@dataclass(frozen=True)
class SignInterval:
    """Delta has this sign (-1, 0, 1) strictly between `start` and `stop` (None: infinity)."""

    start: Fraction
    stop: Fraction | None
    sign: int


def sign_table() -> tuple[SignInterval, ...]:
    """The sign of Delta over (0, infinity), neighbours of one sign merged."""
    intervals: list[SignInterval] = []
    for piece in DIFFERENCE_PIECES:
        cuts = [piece.start, *_interior_roots(piece)]
        for start, stop in zip(cuts, (*cuts[1:], piece.stop), strict=True):
            sign = _sign(piece(start + 1 if stop is None else (start + stop) / 2))
            first = start
            # A zero exactly on the joint keeps two intervals of one sign apart.
            if intervals and intervals[-1].sign == sign and (sign == 0 or boundary_difference(start) != 0):
                first = intervals.pop().start
            intervals.append(SignInterval(first, stop, sign))
    return tuple(intervals)


def minimiser() -> Fraction:
    """Where J stops falling and starts rising, for every density that is positive somewhere on each octave."""
    changes = [b.start for a, b in pairwise(sign_table()) if a.sign < 0 < b.sign]
    if len(changes) != 1:
        raise ArithmeticError(f"Delta changes from minus to plus at {changes}, not once")
    return changes[0]


def objective(q: Fraction) -> float:
    """J(q) for the log-uniform density g(x) = 1 / (x ln 2), integrated in closed form piece by piece."""
    if q <= 0:
        raise ValueError(f"q: got {q}; accepted: a positive number")
    total = 0.0
    for piece in ERROR_PIECES:
        low, high = max(piece.start, q / 2), q if piece.stop is None else min(piece.stop, q)
        if low < high:
            total += float(_antiderivative(piece, high) - _antiderivative(piece, low))
            total += float(piece.coefficients[3]) * math.log(high / low)
    return total / math.log(2)


def _antiderivative(piece: Piece, x: Fraction) -> Fraction:
    """The rational part of the integral of E(x) / x^4."""
    constant, linear, square, _ = piece.coefficients
    if x == 0:
        return Fraction(0)
    return -constant / (3 * x**3) - linear / (2 * x**2) - square / x
