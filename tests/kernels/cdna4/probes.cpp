// One kernel for each instruction of isa.h and for each fault that the emulator reports, for tests of the emulator itself.
#include "isa.h"

struct ProbeArgs {
  const LB_GLOBAL u8* in;
  LB_GLOBAL u8* out;
  const LB_GLOBAL u8* more;
  int count, option;
};
template <class T> const T& in(const ProbeArgs& args, long long i) { return ((const T*)args.in)[i]; }
template <class T> T& out(const ProbeArgs& args, long long i) { return ((T*)args.out)[i]; }

// Operands by lane: a, b (8 words each), c (16), the scales (2). D (16) by lane.
struct Multiply { v8i a, b; v16f c; int scale_a, scale_b, pad[14]; };

template <Element A, Element B> v16f any_mfma32(int select, const Multiply& m) {
  switch (select) {
    case 0: return isa::mfma32<A, B, 0, 0>(m.a, m.b, m.c, m.scale_a, m.scale_b);
    case 1: return isa::mfma32<A, B, 1, 3>(m.a, m.b, m.c, m.scale_a, m.scale_b);
    default: return isa::mfma32<A, B, 2, 1>(m.a, m.b, m.c, m.scale_a, m.scale_b);
  }
}
template <Element A> v16f with_b(int b, int select, const Multiply& m) {
  switch (b) {
    case 0: return any_mfma32<A, E4M3>(select, m);
    case 1: return any_mfma32<A, E5M2>(select, m);
    case 2: return any_mfma32<A, E2M3>(select, m);
    case 3: return any_mfma32<A, E3M2>(select, m);
    default: return any_mfma32<A, E2M1>(select, m);
  }
}
LB_KERNEL(probe_mfma32, 1, 1, ProbeArgs) {
  const Multiply& m = in<Multiply>(args, isa::lane());
  int a = args.option % 8, b = args.option / 8 % 8, select = args.option / 64;
  out<v16f>(args, isa::lane()) = a == 0 ? with_b<E4M3>(b, select, m) : a == 1 ? with_b<E5M2>(b, select, m) : a == 2 ? with_b<E2M3>(b, select, m)
      : a == 3 ? with_b<E3M2>(b, select, m) : with_b<E2M1>(b, select, m);
}
LB_KERNEL(probe_mfma16, 1, 1, ProbeArgs) {
  const Multiply& m = in<Multiply>(args, isa::lane());
  v4f c = {m.c[0], m.c[1], m.c[2], m.c[3]};
  v4f d = args.option == 0 ? isa::mfma16<E2M1, E2M3, 0, 1>(m.a, m.b, c, m.scale_a, m.scale_b)
                           : isa::mfma16<E2M3, E2M1, 2, 3>(m.a, m.b, c, m.scale_a, m.scale_b);
  for (int i = 0; i < 4; i++) out<v16f>(args, isa::lane())[i] = d[i];
}

// `more` holds one scale; `count` groups of 64 x 32 numbers.
LB_KERNEL(probe_fp6_from_f32, 1, 1, ProbeArgs) {
  long long i = isa::group() * 64ll + isa::lane();
  v16f even, odd;
  for (int j = 0; j < 16; j++) even[j] = in<float>(args, 32 * i + 2 * j), odd[j] = in<float>(args, 32 * i + 2 * j + 1);
  v6u six = isa::fp6_from_f32(even, odd, *(const float*)args.more);
  for (int j = 0; j < 6; j++) out<unsigned>(args, 6 * i + j) = six[j];
}
LB_KERNEL(probe_fp6_from_bf16, 1, 1, ProbeArgs) {
  long long i = isa::group() * 64ll + isa::lane();
  v6u six = isa::fp6_from_bf16(in<v32bf>(args, i), *(const float*)args.more);
  for (int j = 0; j < 6; j++) out<unsigned>(args, 6 * i + j) = six[j];
}
LB_KERNEL(probe_fp8_from_f32, 1, 1, ProbeArgs) {
  long long i = isa::group() * 64ll + isa::lane();
  for (int j = 0; j < 8; j++) {
    v2s word = {0x5a5a, 0x5a5a};
    word = isa::fp8_from_f32<1>(word, in<float>(args, 32 * i + 4 * j + 2), in<float>(args, 32 * i + 4 * j + 3), *(const float*)args.more);
    word = isa::fp8_from_f32<0>(word, in<float>(args, 32 * i + 4 * j), in<float>(args, 32 * i + 4 * j + 1), *(const float*)args.more);
    out<v2s>(args, 8 * i + j) = word;
  }
}
LB_KERNEL(probe_fp8_from_bf16, 1, 1, ProbeArgs) {
  long long i = isa::group() * 64ll + isa::lane();
  for (int j = 0; j < 8; j++) {
    v2s word = {0x5a5a, 0x5a5a};
    word = isa::fp8_from_bf16<0>(word, in<v2bf>(args, 16 * i + 2 * j), *(const float*)args.more);
    word = isa::fp8_from_bf16<1>(word, in<v2bf>(args, 16 * i + 2 * j + 1), *(const float*)args.more);
    out<v2s>(args, 8 * i + j) = word;
  }
}
LB_KERNEL(probe_fp4_from_f32, 1, 1, ProbeArgs) {
  long long i = isa::group() * 64ll + isa::lane();
  const float* x = &in<float>(args, 32 * i);
  float scale = *(const float*)args.more;
  for (int j = 0; j < 4; j++, x += 8) {
    unsigned word = 0x5a5a5a5a;
    word = isa::fp4_from_f32<3>(word, x[6], x[7], scale), word = isa::fp4_from_f32<0>(word, x[0], x[1], scale);
    word = isa::fp4_from_f32<1>(word, x[2], x[3], scale), word = isa::fp4_from_f32<2>(word, x[4], x[5], scale);
    out<unsigned>(args, 4 * i + j) = word;
  }
}
LB_KERNEL(probe_unorm16, 1, 1, ProbeArgs) {
  long long i = isa::group() * 64ll + isa::lane();
  out<unsigned>(args, i) = isa::pack_unorm16(in<float>(args, 2 * i), in<float>(args, 2 * i + 1));
}
LB_KERNEL(probe_lanes, 2, 1, ProbeArgs) {
  unsigned t = isa::thread();
  v2u swapped = isa::swap_halves(100 + t, 200 + t);
  float moved = isa::from_lane((float)t, (isa::lane() * 5 + 3) % 64);
  bool found = isa::any(isa::wave() == 1 && isa::lane() == 17), missing = isa::any(isa::lane() == 64);
  out<v4u>(args, t) = v4u{swapped[0], swapped[1], (unsigned)moved, found + 2u * missing};
}

/// Two waves and 4 KiB. Wave 0 copies 1 KiB to offset 0; `option` says what goes wrong, 0 for nothing.
LB_KERNEL(probe_lds, 2, 1, ProbeArgs) {
  LB_LDS_BYTES(4096);
  isa::Buffer from = isa::buffer(args.in, 4096);
  unsigned lane = isa::lane(), wave = isa::wave();
  int wrong = args.option;
  if (wave == 0) isa::copy16(lds_memory, from, 16 * lane, wrong == 1 ? 3200 : 0, wrong == 2 ? 3088 : 0);
  if (wave == 0 && wrong != 3) isa::wait_copies();
  if (wrong != 4) isa::barrier();
  v4u x = isa::load<v4u>(lds_memory, (wrong == 5 ? 2048 : wrong == 6 ? 4096 - 512 : 0) + 16 * lane);
  if (wrong == 7 && wave == 0) isa::copy16(lds_memory, from, 16 * lane, 0, 0);   // wave 1 may still read
  if (wrong == 8 && wave == 1) isa::barrier();
  if (wrong == 9) isa::copy4(lds_memory, from, 4 * lane, 0, 2048);   // both waves write
  if (wrong == 10 && lane < 32) isa::any(true);
  if (wrong == 11) lane < 32 ? (void)isa::any(true) : (void)isa::swap_halves(lane, lane);
  isa::wait_copies();
  out<v4u>(args, isa::thread()) = x;
}
