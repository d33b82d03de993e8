// The conventional softmax in the frame of the fused kernels, to count against them: online maximum, subtraction, v_exp_f32, row
// sum and rescaling of O on the vector unit. Operands, tiles, schedule and PV are those of attention.h.
//
// The 2xpk16 conversion interleaves its two sources, so score tiles 2b and 2b + 1 hold the even and odd keys of a lane's 32: the
// caller permutes keys, not values. Q's exponents come reduced by nine and get it back.
#include "attention.h"

template <class R> struct Online {
  typedef Fragment<R::p> Probabilities;
  using Scale = ProbabilityScale<R::p>;
  v16f seed = splat(0.0f);
  float running = -3e38f, sum = 0.0f;

  LB_MEMBER static v16f splat(float x) { return Fused<R>::splat(x); }
  LB_MEMBER static float maximum(v16f a, v16f b, float m) { return Fused<R>::maximum(a, b, m); }
  LB_MEMBER static float over_halves(float x) { return Fused<R>::over_halves(x); }
  LB_MEMBER float log_sum(float total) const { return (running + isa::log2(total)) * 0.693147180559945309f; }

  /// The exponent field of the scale for a block whose largest probability is `peak`, not below the format's floor.
  LB_MEMBER static unsigned exponent(float peak) {
    constexpr unsigned bound = __builtin_bit_cast(unsigned, Ceil<R::p>::bound) & 0x7fffffu;
    return isa::field(isa::bits<unsigned>(__builtin_fmaxf(peak, 0x1p-110f)) + (0x7fffffu - bound), 23, 8);
  }
  LB_MEMBER static Probabilities convert(v16f even, v16f odd, float scale, Probabilities p) {
    if constexpr (BITS<R::p> == 6) {
      return isa::fp6_from_f32(even, odd, scale);
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        v16f x = i < 4 ? even : odd;
        v2s word = isa::bits<v2s>((unsigned)p[i]);
        word = isa::fp8_from_f32<0>(word, x[4 * (i % 4)], x[4 * (i % 4) + 1], scale);
        p[i] = isa::bits<unsigned>(isa::fp8_from_f32<1>(word, x[4 * (i % 4) + 2], x[4 * (i % 4) + 3], scale));
      }
      return p;
    }
  }
  template <class Rescale> LB_MEMBER unsigned operator()(v16f* s, Probabilities* p, Rescale rescale, long long) {
    float m0 = maximum(s[0], s[1], -3e38f), m1 = maximum(s[2], s[3], R::block_scales ? -3e38f : m0);
    float next = over_halves(__builtin_fmaxf(__builtin_fmaxf(m0, m1), running)), factor = isa::exp2(running - next);
    running = next;
#pragma unroll
    for (int t = 0; t < 4; t++) {
      s[t] += -next;
#pragma unroll
      for (int i = 0; i < 16; i++) s[t][i] = isa::exp2(s[t][i]);
    }
    v2f part = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 16; i += 2)
      part += (v2f{s[0][i], s[0][i + 1]} + v2f{s[1][i], s[1][i + 1]}) + (v2f{s[2][i], s[2][i + 1]} + v2f{s[3][i], s[3][i + 1]});
    sum = sum * factor + (part[0] + part[1]);
    if (!R::block_scales) m0 = m1 = over_halves(m1);
    unsigned e0 = exponent(isa::exp2(m0 - next)), e1 = R::block_scales ? exponent(isa::exp2(m1 - next)) : e0;
    p[0] = convert(s[0], s[1], isa::bits<float>((e0 << 23) - ((unsigned)Scale::LIFT << 23)), p[0]);
    p[1] = convert(s[2], s[3], isa::bits<float>((e1 << 23) - ((unsigned)Scale::LIFT << 23)), p[1]);
    rescale(factor);
    return (e0 - Scale::LIFT) << 8 | (e1 - Scale::LIFT) << 24;
  }
};

template <class R, class Memory> struct Conventional : Wave<R, Online<R>, Memory> {
  using Base = Wave<R, Online<R>, Memory>;
  LB_MEMBER Conventional(Memory& lds, unsigned lane) : Base(lds, lane) {}
  LB_MEMBER void load_query(const LB_GLOBAL u8* from) {
    Base::load_query(from);
    this->q_scales += 0x0909;
  }
  LB_MEMBER bool broken_query() const { return false; }
  LB_MEMBER void start(int) {}
  LB_MEMBER void probabilities(long long) {
    this->p_scales = this->softmax(this->s, this->p, [this](float factor) {
#pragma unroll
      for (int i = 0; i < 4; i++) this->o[i] *= factor;
    }, 0);
  }
  template <int SLOT> LB_MEMBER void outputs() {
    constexpr unsigned values = SLOT * Slots<R>::SLOT + Slots<R>::KEY;
    v2u scales = {};
    if constexpr (R::block_scales) scales = isa::load<v2u>(this->lds, values + CODES<R::v> + 8 * this->lane);
    this->template product<0>(values, scales), this->template product<1>(values, scales);
    this->template product<2>(values, scales), this->template product<3>(values, scales);
  }
  LB_MEMBER void pin_accumulators() {
#pragma unroll
    for (int i = 0; i < 4; i++) isa::pin(this->o[i]), isa::pin(this->s[i]);
    isa::pin(this->softmax.sum), isa::pin(this->softmax.running);
  }
  LB_MEMBER float row_sum() const {   // a lane summed its own keys
    v2u both = isa::swap_halves(isa::bits<unsigned>(this->softmax.sum), isa::bits<unsigned>(this->softmax.sum));
    return isa::bits<float>(both[0]) + isa::bits<float>(both[1]);
  }
};

#define CONVENTIONAL(name, R)                                                        \
  LB_KERNEL(name, ATTENTION_WAVES, 2, AttentionArgs) {                               \
    LB_LDS_BYTES(Slots<R>::BYTES);                                                   \
    attend<R, Conventional<R, decltype(lds_memory)>>(args, lds_memory);              \
  }
CONVENTIONAL(conventional_mxfp8, Mxfp8)
CONVENTIONAL(conventional_mxfp6, Mxfp6)
CONVENTIONAL(conventional_mxfp4, Mxfp4)
