// One kernel for each instruction of isa.h: what `lowbit-attn check --backend cdna4` asks a device, and tests the emulator.
#include "isa.h"

struct ProbeArgs {
  const LB_GLOBAL u8* in;
  LB_GLOBAL u8* out;
  float scale;
  int option;
};
template <class T> LB_INLINE T in(const ProbeArgs& args, long long i) { return ((const LB_GLOBAL T*)args.in)[i]; }
template <class T> LB_INLINE void put(const ProbeArgs& args, long long i, T x) { ((LB_GLOBAL T*)args.out)[i] = x; }
/// The 32 numbers of this lane start here.
LB_INLINE long long mine() { return isa::group() * 64ll + isa::lane(); }

// Operands by lane: a, b (8 words each), c (16), the scales (2). D (16) by lane.
struct Multiply { v8i a, b; v16f c; int scale_a, scale_b, pad[14]; };

template <Element A, Element B> LB_INLINE v16f any_mfma32(int select, const Multiply& m) {
  switch (select) {
    case 0: return isa::mfma32<A, B, 0, 0>(m.a, m.b, m.c, m.scale_a, m.scale_b);
    case 1: return isa::mfma32<A, B, 1, 3>(m.a, m.b, m.c, m.scale_a, m.scale_b);
    default: return isa::mfma32<A, B, 2, 1>(m.a, m.b, m.c, m.scale_a, m.scale_b);
  }
}
template <Element A> LB_INLINE v16f with_b(int b, int select, const Multiply& m) {
  switch (b) {
    case 0: return any_mfma32<A, E4M3>(select, m);
    case 1: return any_mfma32<A, E5M2>(select, m);
    case 2: return any_mfma32<A, E2M3>(select, m);
    case 3: return any_mfma32<A, E3M2>(select, m);
    default: return any_mfma32<A, E2M1>(select, m);
  }
}
LB_KERNEL(probe_mfma32, 1, 1, ProbeArgs) {
  Multiply m = in<Multiply>(args, isa::lane());
  int a = args.option % 8, b = args.option / 8 % 8, select = args.option / 64;
  v16f d;
  switch (a) {
    case 0: d = with_b<E4M3>(b, select, m); break;
    case 1: d = with_b<E5M2>(b, select, m); break;
    case 2: d = with_b<E2M3>(b, select, m); break;
    case 3: d = with_b<E3M2>(b, select, m); break;
    default: d = with_b<E2M1>(b, select, m);
  }
  put(args, isa::lane(), d);
}
LB_KERNEL(probe_mfma16, 1, 1, ProbeArgs) {
  Multiply m = in<Multiply>(args, isa::lane());
  v4f c = {m.c[0], m.c[1], m.c[2], m.c[3]};
  v4f d = args.option == 0 ? isa::mfma16<E2M1, E2M3, 0, 1>(m.a, m.b, c, m.scale_a, m.scale_b)
                           : isa::mfma16<E2M3, E2M1, 2, 3>(m.a, m.b, c, m.scale_a, m.scale_b);
  for (int i = 0; i < 4; i++) put(args, 16 * isa::lane() + i, (float)d[i]);
}

// Conversions: 32 numbers a lane, `scale` the scale.
LB_KERNEL(probe_fp6_from_f32, 1, 1, ProbeArgs) {
  long long i = mine();
  v16f even, odd;
  for (int j = 0; j < 16; j++) even[j] = in<float>(args, 32 * i + 2 * j), odd[j] = in<float>(args, 32 * i + 2 * j + 1);
  v6u six = isa::fp6_from_f32(even, odd, args.scale);
  for (int j = 0; j < 6; j++) put(args, 6 * i + j, (unsigned)six[j]);
}
LB_KERNEL(probe_fp6_from_bf16, 1, 1, ProbeArgs) {
  long long i = mine();
  v6u six = isa::fp6_from_bf16(in<v32bf>(args, i), args.scale);
  for (int j = 0; j < 6; j++) put(args, 6 * i + j, (unsigned)six[j]);
}
LB_KERNEL(probe_fp8_from_f32, 1, 1, ProbeArgs) {
  long long i = mine();
  for (int j = 0; j < 8; j++) {
    v2s word = {0x5a5a, 0x5a5a};
    word = isa::fp8_from_f32<1>(word, in<float>(args, 32 * i + 4 * j + 2), in<float>(args, 32 * i + 4 * j + 3), args.scale);
    word = isa::fp8_from_f32<0>(word, in<float>(args, 32 * i + 4 * j), in<float>(args, 32 * i + 4 * j + 1), args.scale);
    put(args, 8 * i + j, word);
  }
}
LB_KERNEL(probe_fp8_from_bf16, 1, 1, ProbeArgs) {
  long long i = mine();
  for (int j = 0; j < 8; j++) {
    v2s word = {0x5a5a, 0x5a5a};
    word = isa::fp8_from_bf16<0>(word, in<v2bf>(args, 16 * i + 2 * j), args.scale);
    word = isa::fp8_from_bf16<1>(word, in<v2bf>(args, 16 * i + 2 * j + 1), args.scale);
    put(args, 8 * i + j, word);
  }
}
LB_KERNEL(probe_fp4_from_f32, 1, 1, ProbeArgs) {
  long long i = mine();
  for (int j = 0; j < 4; j++) {
    float x[8];
    for (int k = 0; k < 8; k++) x[k] = in<float>(args, 32 * i + 8 * j + k);
    unsigned word = 0x5a5a5a5a;
    word = isa::fp4_from_f32<3>(word, x[6], x[7], args.scale), word = isa::fp4_from_f32<0>(word, x[0], x[1], args.scale);
    word = isa::fp4_from_f32<1>(word, x[2], x[3], args.scale), word = isa::fp4_from_f32<2>(word, x[4], x[5], args.scale);
    put(args, 4 * i + j, word);
  }
}
LB_KERNEL(probe_unorm16, 1, 1, ProbeArgs) {
  long long i = mine();
  put(args, i, isa::pack_unorm16(in<float>(args, 2 * i), in<float>(args, 2 * i + 1)));
}
/// 1 KiB by 16 bytes a lane and 256 by 4, each lane from a place of its own; then every lane reads where its own should lie.
LB_KERNEL(probe_copy, 1, 1, ProbeArgs) {
  LB_LDS_BYTES(1280);
  isa::Buffer from = isa::buffer(args.in, 1280);
  unsigned lane = isa::lane(), other = (lane * 7 + 5) % 64;
  isa::copy16(lds_memory, from, 16 * other, 0, 0);
  isa::copy4(lds_memory, from, 4 * other, 1024, 1024);
  isa::wait_copies();
  isa::barrier();
  put(args, lane, isa::load<v4u>(lds_memory, 16 * lane));
  put(args, 256 + lane, isa::load<unsigned>(lds_memory, 1024 + 4 * lane));
}
LB_KERNEL(probe_lanes, 2, 1, ProbeArgs) {
  unsigned t = isa::thread();
  v2u swapped = isa::swap_halves(100 + t, 200 + t);
  float moved = isa::from_lane((float)t, (isa::lane() * 5 + 3) % 64);
  bool found = isa::any(isa::wave() == 1 && isa::lane() == 17), missing = isa::any(isa::lane() == 64);
  put(args, t, v4u{swapped[0], swapped[1], (unsigned)moved, found + 2u * missing});
}
