// Recipes, and where operands lie in memory: what the quantizers write is what the attention kernel reads.
//
// Operands are packed as MFMA fragments, 32 elements of a lane at a time; two fragments make a pair. The bytes of a lane's pair
// (64, 48 or 32) are cut into planes of 16 bytes, one KiB a plane: every copy and every read moves 16 bytes a lane, side by side.
//
//   Q    per 32 rows     one pair (channels 0-63, 64-127), then 2 scale bytes a lane
//   K    per 128 keys    a pair for each 32 keys in the order of `key_place`, then 8 scale bytes a lane (512 bytes, 512 of padding)
//   V    per 128 keys    a pair for each 64 keys and 64 channels, transposed: rows are channels, k runs along keys; scales like K's
//
// Scores are computed transposed, S^T = K Q^T. D leaves a lane one query and, over two MFMAs, 32 keys of 64. K's rows are
// permuted so that these 32 are what the lane must hold as P's operand of O^T = V^T P^T: P never moves between lanes, and
// maximum, scale and bias are a lane's own.
#pragma once
#include "isa.h"

/// Of inputs and outputs.
enum Type { BF16 = 0, FP16 = 1, FP32 = 2 };

enum { TILE = 128, CHANNELS = 128, ROWS = 32, PLANE = 16 * WAVE, SCALES = 1024 };

template <Element E> constexpr int BITS = E == E4M3 || E == E5M2 ? 8 : E == E2M1 ? 4 : 6;
template <Element E> constexpr int PLANES = BITS<E> / 2;
template <Element E> constexpr int PAIR = PLANES<E> * PLANE;
template <Element E> constexpr int CODES = 4 * PAIR<E>;
template <Element E> constexpr int GROUP = PAIR<E> + 2 * WAVE;   // 32 rows of Q

/// 32 elements of a lane, and as the operand that MFMA builtins take.
template <Element E> struct FragmentOf { typedef v8u type; };
template <> struct FragmentOf<E2M3> { typedef v6u type; };
template <> struct FragmentOf<E2M1> { typedef v4u type; };
template <Element E> using Fragment = typename FragmentOf<E>::type;
template <Element E> LB_INLINE v8i operand(Fragment<E> x) {
  v8i wide = {};
#pragma unroll
  for (int i = 0; i < BITS<E>; i++) wide[i] = (int)x[i];
  return wide;
}

/// Which power-of-two scale a block maximum M gets: 2^ceil(log2(M / bound)), bound the largest code or UOS's 7.25.
template <Element E> struct Ceil;
template <> struct Ceil<E4M3> { static constexpr float bound = 448.0f; };
template <> struct Ceil<E2M3> { static constexpr float bound = 7.5f; };
template <Element E> struct Uos { static constexpr float bound = 7.25f; };

/// Fused-Softmax table 3. V of MXFP8 has one scale a head, P one a row and key tile; otherwise blocks of 32.
struct Mxfp8 {
  static constexpr Element qk = E4M3, p = E4M3, v = E4M3;
  static constexpr bool block_scales = false;
  using QkRule = Ceil<E4M3>; using VRule = Ceil<E4M3>;
  static constexpr int value_tile = CODES<E4M3>;
};
struct Mxfp6 {
  static constexpr Element qk = E2M3, p = E2M3, v = E2M3;
  static constexpr bool block_scales = true;
  using QkRule = Ceil<E2M3>; using VRule = Ceil<E2M3>;
  static constexpr int value_tile = CODES<E2M3> + SCALES;
};
struct Mxfp4 {
  static constexpr Element qk = E2M1, p = E2M3, v = E2M1;
  static constexpr bool block_scales = true;
  using QkRule = Uos<E2M1>; using VRule = Uos<E2M1>;
  static constexpr int value_tile = CODES<E2M1> + SCALES;
};
template <class R> constexpr int KEY_BYTES = CODES<R::qk> + SCALES;

/// The score tile (of four) and the row in it that hold a key of a 128-key tile.
struct Place { int tile, row; };
template <class R> LB_INLINE Place key_place(int key) {
  constexpr bool wide = BITS<R::p> == 8;   // operands of 8 bits hold two runs of 16 keys a lane, narrower ones 32 in a row
  int half = key / (wide ? 16 : 32) % 2, part = key / (wide ? 32 : 16) % 2;
  return {2 * (key / 64) + part, 8 * (key % 16 / 4) + 4 * half + key % 4};
}
/// The first of the 16 consecutive keys whose scores a lane holds in registers 0 to 15 of a score tile.
template <class R> LB_INLINE int first_key(int tile, int half) {
  constexpr bool wide = BITS<R::p> == 8;
  return 64 * (tile / 2) + (wide ? 32 * (tile % 2) + 16 * half : 32 * half + 16 * (tile % 2));
}

/// x, the same in every lane, between 0 and most.
LB_INLINE int clamped(int x, int most) { return isa::uniform(x < 0 ? 0 : x > most ? most : x); }

/// The E8M0 code of the scale for a block whose largest magnitude has these bits (formats.scales, zero_exponent 0).
template <class Rule> LB_INLINE unsigned scale_code(unsigned maximum) {
  constexpr unsigned bound = __builtin_bit_cast(unsigned, Rule::bound);
  if (maximum >= 0x7f800000u) return 255;
  if (maximum == 0) return 127;
  int code = (int)((maximum + (0x7fffffu - (bound & 0x7fffffu))) >> 23) - (int)(bound >> 23) + 127;
  return code < 0 ? 0 : (unsigned)code;
}
/// 2^(127 - code): what brings a block to the range of its codes. Zero for the NaN scale.
LB_INLINE float inverse_scale(unsigned code) {
  return code == 255 ? 0.0f : code == 254 ? 0x1p-127f : isa::bits<float>((254u - code) << 23);
}
