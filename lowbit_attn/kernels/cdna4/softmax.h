// Fused-Softmax for a wave's 32 queries and one key tile: frozen maximum, gate, Schraudolph's map, two-stage conversion.
//
// Scores come as affine coordinates a = C (X - m) + D, C = 2^-9, straight from the QK MFMA: C is in Q's exponents, beta = D - C m
// in the accumulator. What is left for the vector unit (Fused-Softmax 4.2) is a maximum, v_cvt_pknorm_u16 (stage A: the code is the
// BF16 pattern of 2^(X - m)) and one conversion to P's format (stage B). Equal to reference.softmax with maximum 'frozen' and
// exponential 'schraudolph_u16', except that a rollback shifts the scores it has: they carry the rounding of the larger sum.
#pragma once
#include "layout.h"

constexpr double SLOPE = 0x1p-9, OFFSET = SLOPE * (127.0 - 0.05798);
constexpr float AFFINE_OFFSET = (float)OFFSET, CAP = (float)(OFFSET + 32.0 * SLOPE);

/// From the pattern of a block's largest P, the code of its scale: 2^ceil(log2(P / top)), top the largest code of P's format, is
/// (pattern + carry >> 7) - LIFT. MFMAs take the sum as it is, which lifts O and the row sum alike by 2^LIFT.
template <Element E> struct ProbabilityScale;
template <> struct ProbabilityScale<E2M3> { enum { CARRY = 15, LIFT = 2 }; };    // 7.5: mantissas above 112 / 128 carry
template <> struct ProbabilityScale<E4M3> { enum { CARRY = 31, LIFT = 8 }; };    // 448: above 96 / 128

template <class R> struct Fused {
  using Scale = ProbabilityScale<R::p>;
  /// Patterns below this many are taken for it, so that scales stay normal numbers: P there is below 2^-(124 - LIFT).
  static constexpr float FLOOR = (Scale::LIFT + 1) * 128.0f / 65535.0f;
  typedef Fragment<R::p> Probabilities;   // of 32 keys

  float slope_maximum;    // C m
  v16f seed;              // beta in every register: the C operand of a tile's first MFMA

  LB_MEMBER static v16f splat(float x) {
    v16f all;
#pragma unroll
    for (int i = 0; i < 16; i++) all[i] = x;
    return all;
  }
  LB_MEMBER static float maximum(v16f a, v16f b, float m) {   // v_max3_f32
#pragma unroll
    for (int i = 0; i < 16; i++) m = __builtin_fmaxf(__builtin_fmaxf(a[i], b[i]), m);
    return m;
  }
  /// The maximum over the two lanes that share a query.
  LB_MEMBER static float over_halves(float x) {
    v2u both = isa::swap_halves(isa::bits<unsigned>(x), isa::bits<unsigned>(x));
    return __builtin_fmaxf(isa::bits<float>(both[0]), isa::bits<float>(both[1]));
  }

  /// The natural logarithm of the row's sum of exponentials.
  LB_MEMBER float log_sum(float total) const {
    return (slope_maximum * 512.0f + (isa::log2(total) - Scale::LIFT)) * 0.693147180559945309f;
  }

  /// Freezes the maximum of the first tile's scores, C X.
  LB_MEMBER void freeze(float slope_score) {
    slope_maximum = over_halves(slope_score);
    seed = splat(AFFINE_OFFSET - slope_maximum);
  }

  /// 2^-d for an integer d, zero from 127 on.
  LB_MEMBER static float power(float d) { return d < 127.0f ? isa::bits<float>((127u - (unsigned)d) << 23) : 0.0f; }

  /// Raises the maxima of rows whose peak passes the cap, and shifts their scores; the factor for what they accumulated.
  LB_MEMBER float roll_back(float peak, v16f* s) {
    peak = over_halves(peak);
    float doublings = peak > CAP ? __builtin_ceilf((peak - AFFINE_OFFSET) * 512.0f) : 0.0f, shift = doublings * (float)SLOPE;
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] -= shift;
    slope_maximum += shift;
    // beta only falls, so a minimum rebuilds it in place: a new splat would be copied in every tile.
    float beta = AFFINE_OFFSET - slope_maximum;
#pragma unroll
    for (int i = 0; i < 16; i++) seed[i] = __builtin_fminf(seed[i], beta);
    return power(doublings);
  }

  LB_MEMBER static void stage_a(v16f x, v16f y, v16u& codes) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      codes[i] = isa::pack_unorm16(x[2 * i], x[2 * i + 1]);
      codes[8 + i] = isa::pack_unorm16(y[2 * i], y[2 * i + 1]);
    }
  }
  /// Stage B: 32 BF16 patterns over the scale, in P's format. FP8 halves replace those of an old word.
  LB_MEMBER static Probabilities stage_b(v16u codes, float scale, Probabilities p) {
    if constexpr (BITS<R::p> == 6) {
      return isa::fp6_from_bf16(isa::bits<v32bf>(codes), scale);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        v2s word = isa::bits<v2s>((unsigned)p[i]);
        word = isa::fp8_from_bf16<0>(word, isa::bits<v2bf>((unsigned)codes[2 * i]), scale);
        word = isa::fp8_from_bf16<1>(word, isa::bits<v2bf>((unsigned)codes[2 * i + 1]), scale);
        p[i] = isa::bits<unsigned>(word);
      }
      return p;
    }
  }

  /// P of a tile: `p[b]` holds keys 64 b + what `first_key` says; byte 1 (b = 0) or 3 (b = 1) of the result is the scale that
  /// MFMAs take for it. `rescale(factor)` is called where a row rolled back. `s` holds the scores, and is spent.
  template <class Rescale> LB_MEMBER unsigned operator()(v16f* s, Probabilities* p, Rescale rescale, long long record) {
    float m0 = maximum(s[0], s[1], FLOOR), m1 = maximum(s[2], s[3], R::block_scales ? FLOOR : m0);
    if (__builtin_expect(isa::any((R::block_scales ? __builtin_fmaxf(m0, m1) : m1) > CAP), 0)) {
      isa::cold();
      rescale(roll_back(__builtin_fmaxf(m0, m1), s));
      m0 = maximum(s[0], s[1], FLOOR), m1 = maximum(s[2], s[3], R::block_scales ? FLOOR : m0);
    }
    if (!R::block_scales) m0 = m1 = over_halves(m1);
    unsigned scales = (isa::pack_unorm16(m0, m1) + Scale::CARRY * 0x10001u) << 1;
    unsigned e0 = isa::field(scales, 8, 8), e1 = R::block_scales ? isa::field(scales, 24, 8) : e0;
    if (R::block_scales) isa::pin(e0);   // a field and an add that shifts; seen through, they become three instructions
    v16u c0, c1;
    stage_a(s[0], s[1], c0), stage_a(s[2], s[3], c1);
    p[0] = stage_b(c0, isa::bits<float>((e0 << 23) - ((unsigned)Scale::LIFT << 23)), p[0]);
    p[1] = stage_b(c1, isa::bits<float>((e1 << 23) - ((unsigned)Scale::LIFT << 23)), p[1]);
    isa::observe(record, s[0], s[1], s[2], s[3], operand<R::p>(p[0]), operand<R::p>(p[1]), e0, e1, slope_maximum, seed[0]);
    return scales;
  }
};
