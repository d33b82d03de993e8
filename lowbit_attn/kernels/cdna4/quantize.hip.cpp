// Q, K and V to packed MX operands, one pass each (V of MXFP8: its maximum first).
//
// query_*, key_*   Hadamard rotation, d^-1/2, prescale, MX blocks of 32 channels. Equal to formats.hadamard and
//                  formats.quantize(layout mx32) bit for bit; Q's exponents are stored less nine, the affine map's slope.
// value_*          MX blocks of 32 keys (axis -2), or one scale a head for MXFP8, from value_peak. Equal to formats.quantize.
//
// Inputs are [rows, heads, channels] by strides, one or more sequences of rows. Rows past a sequence's end count as zero, before
// any scale. Packed operands: layout.h.
#include "layout.h"

/// Sequence b covers rows `starts[b]` to `starts[b + 1]`, or `rows` from b * batch_stride if there are no starts; `lengths[b]` of
/// them, if given. Strides count elements.
struct QuantizeArgs {
  const LB_GLOBAL u8* input;
  LB_GLOBAL u8* packed;
  LB_GLOBAL unsigned* found;     // key: not 0 where a head's keys hold NaN or Inf. value: bits of a head's largest magnitude
  const LB_GLOBAL int* starts;
  const LB_GLOBAL int* lengths;
  long long batch_stride, row_stride, head_stride, channel_stride;
  int rows, heads, channels, type;
  int blocks;                    // workgroups a head
  float prescale;
};

struct Sequence {
  const LB_GLOBAL u8* base;
  long long row_stride, channel_stride;
  int rows, channels, type;

  LB_MEMBER float at(int row, int channel) const {
    if (row >= rows || channel >= channels) return 0.0f;
    long long i = row * row_stride + channel * channel_stride;
    if (type == BF16) return isa::bits<float>((unsigned)((const LB_GLOBAL unsigned short*)base)[i] << 16);
    if (type == FP16) return (float)((const LB_GLOBAL _Float16*)base)[i];
    return ((const LB_GLOBAL float*)base)[i];
  }
  /// 32 channels of a row; whole blocks of 16-bit numbers side by side as 16-byte loads.
  LB_MEMBER void row_of(int row, int channel, float* x) const {
    const LB_GLOBAL u8* from = base + 2 * (row * row_stride + channel);
    if (type != FP32 && channel_stride == 1 && row < rows && channel + 32 <= channels && ((unsigned long long)from & 15) == 0) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v4u four = ((const LB_GLOBAL v4u*)from)[i];
#pragma unroll
        for (int j = 0; j < 8; j++) {
          unsigned half = four[j / 2] >> 16 * (j % 2) & 0xffff;
          x[8 * i + j] = type == BF16 ? isa::bits<float>(half << 16) : (float)isa::bits<_Float16>((unsigned short)half);
        }
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < 32; j++) x[j] = at(row, channel + j);
  }
};
LB_INLINE Sequence sequence(const QuantizeArgs& args, int batch, int head) {
  int first = 0, rows = args.rows;
  if (args.starts) {   // bounds clamped into the packed rows, like the reference's
    first = clamped(args.starts[batch], args.rows);
    rows = clamped(args.starts[batch + 1], args.rows) - first;
  }
  if (args.lengths && args.lengths[batch] < rows) rows = args.lengths[batch];
  long long offset = first * args.row_stride + batch * args.batch_stride + head * args.head_stride;
  return {args.input + offset * (args.type == FP32 ? 4 : 2), args.row_stride, args.channel_stride, rows, args.channels, args.type};
}

LB_INLINE unsigned largest(const float* x) {   // as bits, which keep NaN and Inf on top
  unsigned m = 0;
#pragma unroll
  for (int j = 0; j < 32; j++) {
    unsigned bits = isa::bits<unsigned>(x[j]) & 0x7fffffffu;
    m = bits > m ? bits : m;
  }
  return m;
}

/// 32 elements, already divided by their scale, as the words of a fragment.
template <Element E> LB_INLINE void encode(const float* x, unsigned* words) {
  if constexpr (BITS<E> == 8) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      v2s word = {0, 0};
      word = isa::fp8_from_f32<0>(word, x[4 * i], x[4 * i + 1], 1.0f);
      word = isa::fp8_from_f32<1>(word, x[4 * i + 2], x[4 * i + 3], 1.0f);
      words[i] = isa::bits<unsigned>(word);
    }
  } else if constexpr (BITS<E> == 6) {
    v16f even, odd;
#pragma unroll
    for (int i = 0; i < 16; i++) even[i] = x[2 * i], odd[i] = x[2 * i + 1];
    v6u six = isa::fp6_from_f32(even, odd, 1.0f);
#pragma unroll
    for (int i = 0; i < 6; i++) words[i] = six[i];
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      unsigned word = 0;
      word = isa::fp4_from_f32<0>(word, x[8 * i], x[8 * i + 1], 1.0f);
      word = isa::fp4_from_f32<1>(word, x[8 * i + 2], x[8 * i + 3], 1.0f);
      word = isa::fp4_from_f32<2>(word, x[8 * i + 4], x[8 * i + 5], 1.0f);
      word = isa::fp4_from_f32<3>(word, x[8 * i + 6], x[8 * i + 7], 1.0f);
      words[i] = word;
    }
  }
}

LB_INLINE void put16(LB_GLOBAL u8* to, const unsigned* w) { *(LB_GLOBAL v4u*)to = v4u{w[0], w[1], w[2], w[3]}; }
LB_INLINE void put8(LB_GLOBAL u8* to, const unsigned* w) { *(LB_GLOBAL v2u*)to = v2u{w[0], w[1]}; }
/// A lane's fragment into the first or second place of its pair.
template <Element E> LB_INLINE void put_fragment(LB_GLOBAL u8* pair, int lane, int second, const unsigned* w) {
  LB_GLOBAL u8* at = pair + 16 * lane;
  if constexpr (BITS<E> == 8) {
    put16(at + 2 * second * PLANE, w), put16(at + (2 * second + 1) * PLANE, w + 4);
  } else if constexpr (BITS<E> == 4) {
    put16(at + second * PLANE, w);
  } else if (second) {
    put8(at + PLANE + 8, w), put16(at + 2 * PLANE, w + 2);
  } else {
    put16(at, w), put8(at + PLANE, w + 4);
  }
}

/// Walsh-Hadamard butterflies over the channels, each thread with 32 of them, neighbours with the next 32. Channels that are no
/// power of two are rotated in the blocks of their binary digits: i and i + stride are in one block if i ^ channels >= 2 stride.
LB_INLINE void rotate(float* x, int block, int channels) {
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
#pragma unroll
    for (int i = 0; i < 32; i++) {
      if (i & stride || ((32 * block + i) ^ channels) < 2 * stride) continue;
      float a = x[i], b = x[i + stride];
      x[i] = a + b, x[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    bool apart = (32 * (block & ~step) ^ channels) < 64 * step, upper = block & step;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      float other = isa::from_lane(x[i], isa::lane() ^ step);
      float sum = upper ? other - x[i] : x[i] + other;
      x[i] = apart ? x[i] : sum;
    }
  }
#pragma unroll
  for (int i = 0; i < 32; i++) {
    int rest = (32 * block + i) ^ channels;   // its top bit is the size of the channel's block
    int log2 = 31 - __builtin_clz(rest | 1);
    float factor = log2 & 1 ? 0.70710678118654752440f : 1.0f;
    x[i] *= factor * isa::bits<float>((unsigned)(127 - log2 / 2) << 23);
  }
}

enum { QUANTIZE_WAVES = 4, QUANTIZE_ROWS = QUANTIZE_WAVES * WAVE / 4 };

template <class R, bool QUERY> LB_INLINE void quantize_channels(const QuantizeArgs& args) {
  constexpr Element E = R::qk;
  int head_index = isa::group() / args.blocks, batch = head_index / args.heads;
  int row = isa::group() % args.blocks * QUANTIZE_ROWS + isa::thread() / 4, block = isa::thread() % 4;
  Sequence from = sequence(args, batch, head_index % args.heads);
  float x[32];
  from.row_of(row, 32 * block, x);
  rotate(x, block, args.channels);
  if (QUERY) {
#pragma unroll
    for (int i = 0; i < 32; i++) x[i] *= args.prescale;
  }
  unsigned code = scale_code<typename R::QkRule>(largest(x));
  float factor = inverse_scale(code);
  if (QUERY && code < 9) factor = 0.0f;   // below 2^-118: no score sees it, and its exponent less nine would wrap
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] *= factor;
  unsigned words[8];
  encode<E>(x, words);
  if (QUERY && code != 255) code = code < 9 ? 0 : code - 9;
  if (!QUERY && code == 255) isa::raise(args.found + head_index, 1);

  int step = block / 2, half = block % 2, in_tile = QUERY ? row % ROWS : row % TILE;
  Place place = QUERY ? Place{0, in_tile} : key_place<R>(in_tile);
  constexpr long long bytes = QUERY ? GROUP<E> : KEY_BYTES<R>;
  long long blocks_of = (long long)args.blocks * QUANTIZE_ROWS / (QUERY ? ROWS : TILE);
  LB_GLOBAL u8* to = args.packed + (head_index * blocks_of + row / (QUERY ? ROWS : TILE)) * bytes;
  LB_GLOBAL u8* pair = to + place.tile * PAIR<E>;
  if constexpr (BITS<E> == 8) {   // a block's halves lie in both lane halves
    put16(pair + (2 * step + half) * PLANE + 16 * place.row, words);
    put16(pair + (2 * step + half) * PLANE + 16 * (place.row + 32), words + 4);
  } else {
    put_fragment<E>(pair, place.row + 32 * half, step, words);
  }
  LB_GLOBAL u8* scales = to + (QUERY ? PAIR<E> : CODES<E>);
  scales[(place.row + 32 * half) * (QUERY ? 2 : 8) + 2 * place.tile + step] = (u8)code;
}

enum { VALUE_WAVES = 8 };

/// One workgroup a tile; a thread has 32 keys of one channel.
template <class R> LB_INLINE void quantize_keys(const QuantizeArgs& args) {
  constexpr Element E = R::v;
  int head_index = isa::group() / args.blocks, tile = isa::group() % args.blocks;
  Sequence from = sequence(args, head_index / args.heads, head_index % args.heads);
  int channel = isa::thread() % CHANNELS, block = isa::thread() / CHANNELS, pair_of = block / 2, half = block % 2;
  float x[32];
#pragma unroll
  for (int j = 0; j < 32; j++) {
    int key = 64 * pair_of + (BITS<E> == 8 ? 32 * (j / 16) + 16 * half + j % 16 : 32 * half + j);
    x[j] = from.at(TILE * tile + key, channel);
  }
  unsigned code = scale_code<typename R::VRule>(R::block_scales ? largest(x) : args.found[head_index]);
  float factor = inverse_scale(code);
#pragma unroll
  for (int j = 0; j < 32; j++) x[j] *= factor;
  unsigned words[8];
  encode<E>(x, words);
  LB_GLOBAL u8* to = args.packed + ((long long)head_index * args.blocks + tile) * R::value_tile;
  int lane = channel % 32 + 32 * half, part = channel / 32;
  put_fragment<E>(to + (2 * pair_of + part / 2) * PAIR<E>, lane, part % 2, words);
  if (R::block_scales) to[CODES<E> + 8 * lane + 4 * pair_of + part] = (u8)code;
}

LB_KERNEL(query_mxfp8, QUANTIZE_WAVES, 4, QuantizeArgs) { quantize_channels<Mxfp8, true>(args); }
LB_KERNEL(query_mxfp6, QUANTIZE_WAVES, 4, QuantizeArgs) { quantize_channels<Mxfp6, true>(args); }
LB_KERNEL(query_mxfp4, QUANTIZE_WAVES, 4, QuantizeArgs) { quantize_channels<Mxfp4, true>(args); }
LB_KERNEL(key_mxfp8, QUANTIZE_WAVES, 4, QuantizeArgs) { quantize_channels<Mxfp8, false>(args); }
LB_KERNEL(key_mxfp6, QUANTIZE_WAVES, 4, QuantizeArgs) { quantize_channels<Mxfp6, false>(args); }
LB_KERNEL(key_mxfp4, QUANTIZE_WAVES, 4, QuantizeArgs) { quantize_channels<Mxfp4, false>(args); }
LB_KERNEL(value_mxfp8, VALUE_WAVES, 4, QuantizeArgs) { quantize_keys<Mxfp8>(args); }
LB_KERNEL(value_mxfp6, VALUE_WAVES, 4, QuantizeArgs) { quantize_keys<Mxfp6>(args); }
LB_KERNEL(value_mxfp4, VALUE_WAVES, 4, QuantizeArgs) { quantize_keys<Mxfp4>(args); }

/// The largest magnitude of a head's V; one workgroup a tile.
LB_KERNEL(value_peak, VALUE_WAVES, 4, QuantizeArgs) {
  int head_index = isa::group() / args.blocks, tile = isa::group() % args.blocks;
  Sequence from = sequence(args, head_index / args.heads, head_index % args.heads);
  int channel = isa::thread() % CHANNELS, block = isa::thread() / CHANNELS;
  float x[32];
#pragma unroll
  for (int j = 0; j < 32; j++) x[j] = from.at(TILE * tile + 32 * block + j, channel);
  unsigned m = largest(x);
#pragma unroll
  for (int step = 1; step < WAVE; step *= 2) {
    unsigned other = isa::bits<unsigned>(isa::from_lane(isa::bits<float>(m), isa::lane() ^ step));
    m = other > m ? other : m;
  }
  if (isa::lane() == 0) isa::raise(args.found + head_index, m);
}
