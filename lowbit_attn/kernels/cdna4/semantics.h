// What the instructions mean: the one table that emulation follows. Host only.
//
// No CDNA4 device has confirmed any of it. Each entry says where the reading comes from and what changes if it is wrong, so that
// a device owner's report corrects one place. `lowbit-attn check --backend cdna4` is that report.
#pragma once
#include <math.h>

namespace semantics {

struct Format {
  int exponent_bits, mantissa_bits, bits;
  bool has_nan;
};
/// OCP MX v1.0 section 5.3, in the order of Element.
constexpr Format FORMATS[] = {{4, 3, 8, true}, {5, 2, 8, true}, {2, 3, 6, false}, {3, 2, 6, false}, {2, 1, 4, false}};

/// The value of a code. OCP MX v1.0 section 5.3.
inline float decode(int element, unsigned code) {
  const Format& f = FORMATS[element];
  unsigned exponent = code >> f.mantissa_bits & ((1u << f.exponent_bits) - 1), mantissa = code & ((1u << f.mantissa_bits) - 1);
  int bias = (1 << (f.exponent_bits - 1)) - 1;
  float sign = code >> (f.bits - 1) & 1 ? -1.0f : 1.0f;
  if (element == E4M3 && exponent == 15 && mantissa == 7) return NAN;
  if (element == E5M2 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? ldexpf(1.0f + ldexpf(mantissa, -f.mantissa_bits), exponent - bias)
                          : ldexpf(mantissa, 1 - bias - f.mantissa_bits));
}

/// Conversion to a code: nearest, ties to even, subnormals kept, magnitudes above the largest finite value become it.
/// NaN becomes the NaN code, or +0 where there is none. AMD's ISA text states the scale and not the rounding; truncation would
/// move O by 7.6 %, lost subnormals by 44 %.
inline unsigned encode(int element, float x) {
  const Format& f = FORMATS[element];
  unsigned largest = (1u << (f.bits - 1)) - 1 - (element == E4M3 ? 1 : element == E5M2 ? 4 : 0);
  if (isnan(x)) return f.has_nan ? 0x7f : 0;
  unsigned sign = signbit(x) ? 1u << (f.bits - 1) : 0;
  float magnitude = fabsf(x);
  if (magnitude >= decode(element, largest)) return sign | largest;
  int lowest = 2 - (1 << (f.exponent_bits - 1)), exponent;
  frexpf(magnitude, &exponent);
  exponent = magnitude == 0.0f || exponent - 1 < lowest ? lowest : exponent - 1;
  // In steps of the code's spacing; a carry into the next binade is the next code.
  unsigned steps = (unsigned)nearbyintf(ldexpf(magnitude, f.mantissa_bits - exponent));
  return sign | (((unsigned)(exponent - lowest) << f.mantissa_bits) + steps);
}

/// The exponent that a conversion takes from its scale operand; the mantissa is ignored. AMD ISA text; gem5 divides by 2^it.
inline int scale_exponent(float scale) { return (int)(__builtin_bit_cast(unsigned, scale) >> 23 & 255) - 127; }

/// v_cvt_scalef32_*: x over the scale's power of two, then the code.
inline unsigned convert(int element, float x, float scale) { return encode(element, ldexpf(x, -scale_exponent(scale))); }

/// v_cvt_pknorm_u16_f32: clamp to 0..1 (NaN to 0), times 65535 rounded to float32, then to the nearest integer, ties to even.
/// The product's own rounding is the reference's; without it 0.03 % of codes differ and O does not.
inline unsigned unorm16(float x) {
  float clamped = x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;
  return (unsigned)nearbyintf(clamped * 65535.0f);
}

/// Which k of the contraction element j of a lane's 32 holds, `rows` rows to the MFMA (32 or 16). Formats of 6 and 4 bits hold
/// consecutive k; those of 8 bits, in the 32x32x64 form, two runs of 16 that alternate between the lane halves.
inline int operand_k(int element, int rows, int lane, int j) {
  int part = lane / rows;
  return FORMATS[element].bits == 8 && rows == 32 ? 32 * (j / 16) + 16 * part + j % 16 : 32 * part + j;
}

/// The lane whose scale register holds the scale of (row, block of 32 k).
inline int scale_lane(int rows, int row, int block) { return row + rows * block; }

/// The row of D in register r of a lane; its column is lane % rows.
inline int result_row(int rows, int lane, int r) {
  return rows == 32 ? 8 * (r / 4) + 4 * (lane / 32) + r % 4 : 4 * (lane / 16) + r;
}

/// The byte of a scale register that op_sel takes. LLVM's documentation of the builtin.
inline int scale_byte(int scales, int select) { return scales >> 8 * select & 255; }

/// An E8M0 scale; 255 is NaN (OCP MX v1.0 section 5.4.1).
inline double power(int code) { return code == 255 ? (double)NAN : ldexp(1.0, code - 127); }

/// One block of 32 added to the accumulator: its sum is exact, scaled, then added with one rounding. A guess: the order inside an
/// MFMA is not documented. Sums of FP6 and FP4 products are exact in any order; for the rest it is worth the last bits.
inline float accumulate(float total, double block, double scale) { return total + (float)(block * scale); }

/// Elements of a 2xpk16 conversion: code 2i comes from the first source, 2i + 1 from the second. AMD's fpsan test says it was
/// seen on gfx950.
inline int interleaved(int source, int i) { return 2 * i + source; }

/// buffer_load ... lds: where a lane's data lands. Behind that of the lane before it, whatever the lane's own offset in the buffer;
/// LLVM, and public kernels that depend on it.
inline unsigned copy_place(unsigned base, unsigned bytes, int lane) { return base + bytes * lane; }

/// v_permlane32_swap of x and y: the upper half of x trades places with the lower half of y. Public kernels.
struct Source { bool from_y; int lane; };
inline Source swapped_x(int lane) { return lane < 32 ? Source{false, lane} : Source{true, lane - 32}; }
inline Source swapped_y(int lane) { return lane < 32 ? Source{false, lane + 32} : Source{true, lane}; }

}  // namespace semantics
