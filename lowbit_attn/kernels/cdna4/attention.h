// Fused-Softmax attention forward, algorithm 1 of the paper: 256 queries a workgroup, 128 keys a tile, head_dim up to 128.
// Equal to reference.forward of the fused recipes up to the order of float32 sums; operands as in layout.h.
//
// Eight waves of 32 queries in two halves, one phase apart: while one half's matrix phase M(j) = PV(j - 1), QK(j) fills the matrix
// cores, the other's vector phase S(j) does the softmax. K and V lie in two LDS slots each. The early half copies K(j + 1) from its
// M(j) on and waits for it after S(j); the late half copies V(j + 1) from its S(j) on and waits after M(j + 1): every copy has two
// phases. Barriers between phases keep the offset and publish the slots.
//
// Tiles come in pairs, so that slots are constants. The last pair is apart and masked: keys past the end contribute exactly zero,
// to P and to every maximum. With an odd number of tiles the last one is wholly masked.
#pragma once
#include "softmax.h"

struct AttentionArgs {
  const LB_GLOBAL u8 *query, *key, *value;         // packed, layout.h
  const LB_GLOBAL unsigned *broken, *peak;         // per key head: keys with NaN or Inf; bits of V's largest magnitude (MXFP8)
  const LB_GLOBAL int *query_starts, *key_starts;  // boundaries of packed sequences, or null
  const LB_GLOBAL int* lengths;                    // keys of each sequence that count, or null for all
  LB_GLOBAL u8* output;                            // [rows, query_heads, channels]
  LB_GLOBAL float* lse;
  long long lse_batch, lse_head;                   // strides
  int queries, keys;                               // of a sequence; with starts, of all of them
  int query_heads, kv_heads, query_tiles, key_tiles, channels, type;
};
enum { ATTENTION_WAVES = 8, HALF = ATTENTION_WAVES / 2, QUERY_TILE = ATTENTION_WAVES * ROWS };

template <int N> struct Int { static constexpr int value = N; };

/// The fragments of a pair.
template <Element E> struct Pair { Fragment<E> first, second; };
template <Element E> LB_INLINE Pair<E> split(const v4u* planes) {
  Pair<E> pair;
#pragma unroll
  for (int i = 0; i < BITS<E>; i++) {
    pair.first[i] = planes[i / 4][i % 4];
    pair.second[i] = planes[(i + BITS<E>) / 4][(i + BITS<E>) % 4];
  }
  return pair;
}

template <class R> struct Slots { enum { KEY = KEY_BYTES<R>, VALUE = R::value_tile, SLOT = KEY + VALUE, BYTES = 2 * SLOT }; };

/// A wave's 32 queries: their operands, scores, and what they accumulate.
template <class R, class Softmax, class Memory> struct Wave {
  using S = Slots<R>;
  static constexpr bool NARROW_SUM = BITS<R::p> != 8;   // the 16x16x128 form: lane halves of FP8 operands mix rows' scales there
  Memory& lds;
  unsigned lane;
  Pair<R::qk> q;
  int q_scales, v_scale;
  Softmax softmax;
  v16f s[4], o[4];
  v16f wide_sum;
  v4f sum;
  v4u ones;
  typename Softmax::Probabilities p[2];
  unsigned p_scales;

  LB_MEMBER Wave(Memory& memory, unsigned lane_of) : lds(memory), lane(lane_of) {
#pragma unroll
    for (int i = 0; i < 4; i++) o[i] = Softmax::splat(0.0f);
    p[0] = p[1] = typename Softmax::Probabilities{};
    // Rows 0-7 of the 16x16 sum take the lanes of queries 0-15 (blocks 0 and 2 of k), rows 8-15 those of queries 16-31.
    unsigned one = !NARROW_SUM || (lane % 16 < 8) == (lane / 16 % 2 == 0) ? 0x22222222u : 0u;
    ones = v4u{one, one, one, one};
    sum = v4f{0, 0, 0, 0}, wide_sum = Softmax::splat(0.0f);
  }
  LB_MEMBER void load_query(const LB_GLOBAL u8* from) {
    v4u planes[PLANES<R::qk>];
#pragma unroll
    for (int i = 0; i < PLANES<R::qk>; i++) planes[i] = *(const LB_GLOBAL v4u*)(from + i * PLANE + 16 * lane);
    q = split<R::qk>(planes);
    q_scales = *(const LB_GLOBAL unsigned short*)(from + PAIR<R::qk> + 2 * lane);
  }
  /// Whether the row holds NaN or Inf, a flag of its two lanes.
  LB_MEMBER bool broken_query() const {
    return Softmax::over_halves((q_scales & 255) == 255 || q_scales >> 8 == 255 ? 1.0f : 0.0f) > 0.0f;
  }

  template <Element E> LB_MEMBER Pair<E> pair(unsigned at, int index) const {
    v4u planes[PLANES<E>];
#pragma unroll
    for (int i = 0; i < PLANES<E>; i++) planes[i] = isa::load<v4u>(lds, at + index * PAIR<E> + i * PLANE + 16 * lane);
    return split<E>(planes);
  }
  template <int T> LB_MEMBER v16f score_tile(unsigned keys, v16f seed, v2u scales) const {
    Pair<R::qk> k = pair<R::qk>(keys, T);
    int scale = (int)scales[T / 2];
    v16f x = isa::mfma32<R::qk, R::qk, 2 * T % 4, 0>(operand<R::qk>(k.first), operand<R::qk>(q.first), seed, scale, q_scales);
    return isa::mfma32<R::qk, R::qk, (2 * T + 1) % 4, 1>(operand<R::qk>(k.second), operand<R::qk>(q.second), x, scale, q_scales);
  }
  template <int SLOT> LB_MEMBER void scores() { scores<SLOT>(softmax.seed); }
  template <int SLOT> LB_MEMBER void scores(v16f seed) {
    constexpr unsigned keys = SLOT * S::SLOT;
    v2u scales = isa::load<v2u>(lds, keys + CODES<R::qk> + 8 * lane);
    s[0] = score_tile<0>(keys, seed, scales), s[1] = score_tile<1>(keys, seed, scales);
    s[2] = score_tile<2>(keys, seed, scales), s[3] = score_tile<3>(keys, seed, scales);
  }
  /// Keys from `keys_left` on leave every maximum and P.
  LB_MEMBER void mask(int keys_left) {
#pragma unroll
    for (int t = 0; t < 4; t++) {
      int left = keys_left - first_key<R>(t, (int)lane / 32);
#pragma unroll
      for (int i = 0; i < 16; i++) s[t][i] = i < left ? s[t][i] : -3e38f;
    }
  }
  /// Freezes the maximum of the first tile.
  LB_MEMBER void start(int keys) {
    scores<0>(Softmax::splat(0.0f));
    mask(keys);
    softmax.freeze(__builtin_fmaxf(Softmax::maximum(s[0], s[1], -3e38f), Softmax::maximum(s[2], s[3], -3e38f)));
  }
  /// The sum of the row's P, of lane % 32.
  LB_MEMBER float row_sum() const {
    return NARROW_SUM ? isa::from_lane(sum[0], lane % 16 + 32 * (lane / 16 % 2)) : wide_sum[0];
  }
  LB_MEMBER float log_sum(float total) const { return softmax.log_sum(total); }
  /// The lane of this lane's row of O, seen from a lane that holds row sums: they lie 16 to a register row.
  LB_MEMBER unsigned sum_row() const { return lane % 16 + 16 * (lane / 32); }

  LB_MEMBER void probabilities(long long record) {
    p_scales = softmax(s, p, [this](float factor) {
#pragma unroll
      for (int i = 0; i < 4; i++) o[i] *= factor;
      if constexpr (NARROW_SUM) sum *= isa::from_lane(factor, sum_row());
      else wide_sum *= factor;
    }, record);
  }
  template <int F> LB_MEMBER void product(unsigned values, v2u scales) {   // 64 keys, 64 channels
    Pair<R::v> v = pair<R::v>(values, F);
    constexpr int D = 2 * (F % 2), BYTE = F / 2 ? 3 : 1;
    int scale = R::block_scales ? (int)scales[F / 2] : v_scale;
    constexpr int FIRST = R::block_scales ? D : 0, SECOND = R::block_scales ? D + 1 : 0;
    v8i weights = operand<R::p>(p[F / 2]);
    o[D] = isa::mfma32<R::v, R::p, FIRST, BYTE>(operand<R::v>(v.first), weights, o[D], scale, (int)p_scales);
    o[D + 1] = isa::mfma32<R::v, R::p, SECOND, BYTE>(operand<R::v>(v.second), weights, o[D + 1], scale, (int)p_scales);
  }
  template <int SLOT> LB_MEMBER void outputs() {
    constexpr unsigned values = SLOT * S::SLOT + S::KEY;
    v2u scales = {};
    if constexpr (R::block_scales) scales = isa::load<v2u>(lds, values + CODES<R::v> + 8 * lane);
    if constexpr (NARROW_SUM) {
      sum = isa::mfma16<E2M1, R::p, 0, 1>(operand<E2M1>(ones), operand<R::p>(p[0]), sum, 127, (int)p_scales);
      sum = isa::mfma16<E2M1, R::p, 0, 3>(operand<E2M1>(ones), operand<R::p>(p[1]), sum, 127, (int)p_scales);
    } else {
      wide_sum = isa::mfma32<E2M1, R::p, 0, 1>(operand<E2M1>(ones), operand<R::p>(p[0]), wide_sum, 127, (int)p_scales);
      wide_sum = isa::mfma32<E2M1, R::p, 0, 3>(operand<E2M1>(ones), operand<R::p>(p[1]), wide_sum, 127, (int)p_scales);
    }
    product<0>(values, scales), product<1>(values, scales), product<2>(values, scales), product<3>(values, scales);
  }
  LB_MEMBER void pin_probabilities() { isa::pin(p[0]), isa::pin(p[1]), isa::pin(p_scales); }
  LB_MEMBER void pin_accumulators() {
#pragma unroll
    for (int i = 0; i < 4; i++) isa::pin(o[i]), isa::pin(s[i]);
    if constexpr (NARROW_SUM) isa::pin(sum);
    else isa::pin(wide_sum);
  }
};

/// This half's share of a tile: codes by 16 bytes a lane, scales by 4.
template <Element E, bool WITH_SCALES, int BYTES, class Memory>
LB_INLINE void copy_tile(Memory& lds, isa::Buffer from, int tile, unsigned to, unsigned wave, unsigned lane) {
#pragma unroll
  for (int i = 0; i < CODES<E> / PLANE / HALF; i++)
    isa::copy16(lds, from, 16 * lane, tile * BYTES + (i * HALF + wave) * PLANE, to + (i * HALF + wave) * PLANE);
  if constexpr (WITH_SCALES)
    isa::copy4(lds, from, 4 * lane, tile * BYTES + CODES<E> + wave * 4 * WAVE, to + CODES<E> + wave * 4 * WAVE);
}

template <class R> LB_INLINE unsigned value_scale(const AttentionArgs& args, int kv_head) {
  return R::block_scales ? 127 : scale_code<typename R::VRule>((unsigned)isa::uniform((int)args.peak[kv_head]));
}

/// A row's channels from `channel` on, 4 of them, as far as there are `channels`; side by side where no row ends in between.
template <class T> LB_INLINE void put_output(LB_GLOBAL u8* row, int channel, int channels, v4f x) {
  typedef T Four __attribute__((ext_vector_type(4)));
  LB_GLOBAL T* to = (LB_GLOBAL T*)row + channel;
  if (channels % 4 == 0) {
    if (channel < channels) *(LB_GLOBAL Four*)to = __builtin_convertvector(x, Four);
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (channel + i < channels) to[i] = (T)x[i];
}

/// The kernel; W is `Wave`.
template <class R, class W, class Memory> LB_INLINE void attend(const AttentionArgs& args, Memory& lds) {
  using S = Slots<R>;
  unsigned lane = isa::lane(), wave = isa::wave(), late = wave / HALF, worker = wave % HALF;
  int tile_of = (int)isa::group() % args.query_tiles, head = (int)isa::group() / args.query_tiles % args.query_heads;
  int batch = (int)isa::group() / args.query_tiles / args.query_heads;
  int kv_head = batch * args.kv_heads + head / (args.query_heads / args.kv_heads);
  int first_row = batch * args.queries, rows = args.queries, keys = args.keys;
  if (args.query_starts) {
    first_row = clamped(args.query_starts[batch], args.queries);
    rows = clamped(args.query_starts[batch + 1], args.queries) - first_row;
    keys = clamped(args.key_starts[batch + 1], args.keys) - clamped(args.key_starts[batch], args.keys);
  }
  if (args.lengths) keys = clamped(args.lengths[batch], keys);
  keys = clamped(keys, args.key_tiles * TILE);   // a bound that does not hold must not lead past the packed keys
  if (tile_of * QUERY_TILE >= rows) return;
  int row = tile_of * QUERY_TILE + (int)(wave * ROWS + lane % 32);
  long long out_row = first_row + row;
  LB_GLOBAL u8* out = args.output + (out_row * args.query_heads + head) * args.channels * (args.type == FP32 ? 4 : 2);
  LB_GLOBAL float* lse = args.lse + (args.query_starts ? first_row : batch * args.lse_batch) + head * args.lse_head + row;
  int tiles = (keys + TILE - 1) / TILE, end = (tiles + 1) / 2 * 2;

  W w(lds, lane);
  bool bad = false;
  if (tiles > 0) {
    long long group_of = ((long long)(batch * args.query_heads + head) * args.query_tiles + tile_of) * ATTENTION_WAVES + wave;
    w.load_query(args.query + group_of * GROUP<R::qk>);
    w.v_scale = (int)value_scale<R>(args, kv_head);

    const LB_GLOBAL u8* all_keys = args.key + (long long)kv_head * args.key_tiles * S::KEY;
    const LB_GLOBAL u8* all_values = args.value + (long long)kv_head * args.key_tiles * S::VALUE;
    isa::Buffer key_buffer = isa::buffer(all_keys, tiles * S::KEY), value_buffer = isa::buffer(all_values, tiles * S::VALUE);
    // Past the last tile, the wholly masked one of an odd number, the last is copied again.
    auto within = [&](int j) { return j < tiles ? j : tiles - 1; };
    auto copy_keys = [&](int j, unsigned slot) {
      copy_tile<R::qk, true, S::KEY>(lds, key_buffer, within(j), slot * S::SLOT, worker, lane);
    };
    auto copy_values = [&](int j, unsigned slot) {
      copy_tile<R::v, R::block_scales, S::VALUE>(lds, value_buffer, within(j), slot * S::SLOT + S::KEY, worker, lane);
    };
    auto is_late = [&] { return isa::pin_scalar(late) != 0; };
    long long record = ((long long)isa::group() * ATTENTION_WAVES + wave) * end * WAVE + lane;

    if (is_late()) copy_values(0, 0);
    else copy_keys(0, 0);
    isa::wait_copies();
    isa::barrier();
    w.start(keys);

    // Vector phase S(j), then matrix phase M(j + 1). MASKED is the last pair: 1 its first tile, 2 its second.
    auto round = [&](int j, auto slot, auto masked) __attribute__((always_inline)) {
      constexpr int SLOT = decltype(slot)::value, MASKED = decltype(masked)::value;
      if constexpr (MASKED < 2) { if (is_late()) copy_values(j + 1, 1 - SLOT); }
      if constexpr (MASKED > 0) w.mask(keys - TILE * j);
      w.probabilities(record + (long long)j * WAVE);
      w.pin_probabilities();
      if (!is_late()) isa::wait_copies();
      isa::barrier();
      if constexpr (MASKED == 0) { if (!is_late()) copy_keys(j + 2, SLOT); }
      w.template outputs<SLOT>();
      isa::keep_order();   // or the reads of K are hoisted over PV, and spill
      if constexpr (MASKED < 2) w.template scores<1 - SLOT>();
      w.pin_accumulators();
      if (is_late()) isa::wait_copies();
      isa::barrier();
    };
    if (is_late()) isa::barrier();
    else copy_keys(1, 1);
    w.template scores<0>();
    isa::barrier();
    int j = 0;
#pragma clang loop unroll(disable)
    for (; j < end - 2; j += 2) {   // no exit between the two: it would copy and spill the accumulators
      round(j, Int<0>{}, Int<0>{});
      round(j + 1, Int<1>{}, Int<0>{});
    }
    round(j, Int<0>{}, Int<1>{});
    round(j + 1, Int<1>{}, Int<2>{});
    if (!is_late()) isa::barrier();
    // NaN or Inf in a row of Q, or in any key of the head, is every score's: maxima and conversions would lose it.
    bad = w.broken_query() || args.broken[kv_head] != 0;
  }

  float total = tiles > 0 ? w.row_sum() : 1.0f;
  unsigned nan = 0x7fc00000u;
  isa::pin(nan);   // a constant NaN would let the compiler, told that there are none, drop the choice
  total = isa::bits<float>(tiles > 0 && (bad || total == 0.0f) ? nan : isa::bits<unsigned>(total));
  float inverse = 1.0f / total;
  if (row >= rows) return;
#pragma unroll
  for (int t = 0; t < 4; t++)
#pragma unroll
    for (int a = 0; a < 4; a++) {
      int channel = 32 * t + 8 * a + 4 * (int)(lane / 32);
      v4f x = {w.o[t][4 * a] * inverse, w.o[t][4 * a + 1] * inverse, w.o[t][4 * a + 2] * inverse, w.o[t][4 * a + 3] * inverse};
      if (args.type == BF16) put_output<__bf16>(out, channel, args.channels, x);
      else if (args.type == FP16) put_output<_Float16>(out, channel, args.channels, x);
      else put_output<float>(out, channel, args.channels, x);
    }
  if (lane < 32) *lse = tiles > 0 ? w.log_sum(total) : -__builtin_inff();
}
