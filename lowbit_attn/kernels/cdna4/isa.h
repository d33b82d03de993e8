// The instructions that the kernels use, one source for two targets.
//
// On gfx950 every function is a thin wrapper over a builtin. On the host `emulator.h` gives the same functions, computed from
// `semantics.h`: 64 lanes to a wave, several waves to a workgroup, LDS that is checked. What an instruction is taken to mean
// stands in `semantics.h` alone.
#pragma once

typedef unsigned char u8;
typedef float v2f __attribute__((ext_vector_type(2)));
typedef float v4f __attribute__((ext_vector_type(4)));
typedef float v16f __attribute__((ext_vector_type(16)));
typedef int v8i __attribute__((ext_vector_type(8)));
typedef short v2s __attribute__((ext_vector_type(2)));
typedef unsigned v2u __attribute__((ext_vector_type(2)));
typedef unsigned v4u __attribute__((ext_vector_type(4)));
typedef unsigned v6u __attribute__((ext_vector_type(6)));
typedef unsigned v8u __attribute__((ext_vector_type(8)));
typedef unsigned v16u __attribute__((ext_vector_type(16)));
typedef __bf16 v2bf __attribute__((ext_vector_type(2)));
typedef __bf16 v32bf __attribute__((ext_vector_type(32)));

/// Element formats by their code in the cbsz and blgp fields of the scaled MFMA.
enum Element { E4M3 = 0, E5M2 = 1, E2M3 = 2, E3M2 = 3, E2M1 = 4 };

enum { WAVE = 64 };

#ifdef __HIP__
#define LB_DEVICE_ATTRIBUTE __attribute__((device))
#define LB_KERNEL_ATTRIBUTE __attribute__((global))
#else
#define LB_DEVICE_ATTRIBUTE
#define LB_KERNEL_ATTRIBUTE __attribute__((amdgpu_kernel))
#endif
#define LB_INLINE LB_DEVICE_ATTRIBUTE static inline __attribute__((always_inline))
#define LB_MEMBER LB_DEVICE_ATTRIBUTE inline __attribute__((always_inline))

namespace isa {

/// The bits of a scalar as another type. Passed by value: clang 22's __builtin_bit_cast of a vector's element reads element 0.
template <class To, class From> LB_INLINE To bits(From x) { return __builtin_bit_cast(To, x); }

}  // namespace isa

#ifdef __AMDGCN__

#define LB_GLOBAL __attribute__((address_space(1)))
#define LB_LDS __attribute__((address_space(3)))

/// A kernel of `waves` waves a workgroup; `occupancy` workgroup waves share a SIMD, which bounds the registers.
#define LB_KERNEL(name, waves, occupancy, Args)                                                                  \
  extern "C" LB_KERNEL_ATTRIBUTE __attribute__((amdgpu_flat_work_group_size(64 * (waves), 64 * (waves)),         \
                                                amdgpu_waves_per_eu(occupancy, occupancy))) void name(const Args args)

/// The LDS of the kernels in this file, in bytes.
#ifdef __HIP__
#define LB_LDS_BYTES(size)                                     \
  __attribute__((shared, aligned(16))) static u8 lds_array[size]; \
  LB_LDS u8* const lds_memory = (LB_LDS u8*)lds_array
#else
#define LB_LDS_BYTES(size) [[clang::loader_uninitialized]] static LB_LDS __attribute__((aligned(16))) u8 lds_memory[size]
#endif

namespace isa {

LB_INLINE unsigned thread() { return __builtin_amdgcn_workitem_id_x(); }
LB_INLINE unsigned group() { return __builtin_amdgcn_workgroup_id_x(); }
LB_INLINE unsigned lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
/// The wave's index in its workgroup, in a scalar register.
LB_INLINE unsigned wave() { return __builtin_amdgcn_readfirstlane(__builtin_amdgcn_workitem_id_x() / WAVE); }

/// A value that all lanes have, in a scalar register: a load that the compiler does not know to be uniform would turn every buffer
/// that depends on it into a loop over lanes.
LB_INLINE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }

/// Waits for this wave's copies to LDS.
LB_INLINE void wait_copies() { __builtin_amdgcn_s_waitcnt(0x0f70); }
/// Barrier of the workgroup. LDS reads are done; copies may still be in flight (a fence would wait for them and end the prefetch);
/// the scheduler moves nothing across.
LB_INLINE void barrier() {
  __builtin_amdgcn_sched_barrier(0);
  __builtin_amdgcn_s_waitcnt(0xc07f);
  asm volatile("s_barrier" ::: "memory");
  __builtin_amdgcn_sched_barrier(0);
}
LB_INLINE void keep_order() { __builtin_amdgcn_sched_barrier(0); }
/// Makes a value opaque here: arithmetic does not sink past, and it is not taken for a splat or a constant.
template <class T> LB_INLINE void pin(T& x) { asm volatile("" : "+v"(x)); }
LB_INLINE unsigned pin_scalar(unsigned x) { asm volatile("" : "+s"(x)); return x; }
/// Marks a block as outside the steady state, for whoever counts instructions.
LB_INLINE void cold() { asm volatile("; lb_cold"); }

typedef __amdgpu_buffer_rsrc_t Buffer;
LB_INLINE Buffer buffer(const LB_GLOBAL u8* base, unsigned bytes) {
  return __builtin_amdgcn_make_buffer_rsrc((void*)base, 0, bytes, 0x00020000);
}
#define LB_COPY(bytes)                                                                                                      \
  LB_INLINE void copy##bytes(LB_LDS u8* lds, Buffer from, unsigned lane_offset, unsigned offset, unsigned to) {             \
    __builtin_amdgcn_raw_ptr_buffer_load_lds(from, (LB_LDS void*)(lds + to), bytes, lane_offset, offset, 0, 0);             \
  }
LB_COPY(16)
LB_COPY(4)
template <class T> LB_INLINE T load(LB_LDS u8* lds, unsigned offset) { return *(LB_LDS T*)(lds + offset); }

template <Element A, Element B, int SELECT_A, int SELECT_B> LB_INLINE v16f mfma32(v8i a, v8i b, v16f c, int scale_a, int scale_b) {
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b, c, A, B, SELECT_A, scale_a, SELECT_B, scale_b);
}
template <Element A, Element B, int SELECT_A, int SELECT_B> LB_INLINE v4f mfma16(v8i a, v8i b, v4f c, int scale_a, int scale_b) {
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a, b, c, A, B, SELECT_A, scale_a, SELECT_B, scale_b);
}

LB_INLINE unsigned pack_unorm16(float low, float high) { return bits<unsigned>(__builtin_amdgcn_cvt_pknorm_u16(low, high)); }
LB_INLINE v6u fp6_from_bf16(v32bf x, float scale) { return __builtin_amdgcn_cvt_scalef32_pk32_fp6_bf16(x, scale); }
LB_INLINE v6u fp6_from_f32(v16f even, v16f odd, float scale) {
  return __builtin_amdgcn_cvt_scalef32_2xpk16_fp6_f32(even, odd, scale);
}
template <int HALF> LB_INLINE v2s fp8_from_bf16(v2s old, v2bf x, float scale) {
  return __builtin_amdgcn_cvt_scalef32_pk_fp8_bf16(old, x, scale, HALF);
}
template <int HALF> LB_INLINE v2s fp8_from_f32(v2s old, float low, float high, float scale) {
  return __builtin_amdgcn_cvt_scalef32_pk_fp8_f32(old, low, high, scale, HALF);
}
template <int BYTE> LB_INLINE unsigned fp4_from_f32(unsigned old, float low, float high, float scale) {
  return __builtin_amdgcn_cvt_scalef32_pk_fp4_f32(old, low, high, scale, BYTE);
}

LB_INLINE v2u swap_halves(unsigned x, unsigned y) {
  auto swapped = __builtin_amdgcn_permlane32_swap(x, y, false, false);
  return v2u{swapped[0], swapped[1]};
}
LB_INLINE float from_lane(float x, unsigned source) {
  return bits<float>(__builtin_amdgcn_ds_bpermute((int)(source << 2), bits<int>(x)));
}
LB_INLINE bool any(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }
LB_INLINE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
LB_INLINE float log2(float x) { return __builtin_amdgcn_logf(x); }
LB_INLINE unsigned field(unsigned x, unsigned offset, unsigned width) { return __builtin_amdgcn_ubfe(x, offset, width); }
LB_INLINE void raise(LB_GLOBAL unsigned* x, unsigned least) {
  __scoped_atomic_fetch_max(x, least, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}
/// Tells the emulator's observer; nothing on a device.
template <class... T> LB_INLINE void observe(T...) {}

}  // namespace isa

#else
#include "emulator.h"
#endif
