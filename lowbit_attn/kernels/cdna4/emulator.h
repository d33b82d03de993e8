// The functions of isa.h on a host, several waves to a workgroup. Every lane is a fiber.
//
// A cross-lane instruction is a rendezvous of its wave, computed by the last lane to arrive; a barrier one of the workgroup. LDS
// is reached through `load` and `copy*` only; each of its words remembers who wrote it, who read it and when, in epochs (barriers
// passed) and copies in flight. An error ends the launch: a race between waves, a word read before it was written, an address
// outside LDS or outside a buffer, lanes of a wave at different instructions, a barrier that not every wave reaches. Not seen:
// hazards between lanes of one wave, waits for LDS reads, the order of rounding inside an MFMA, the compiler's own faults.
#pragma once
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include "semantics.h"

#define LB_GLOBAL
#define LB_LDS
#define LB_LDS_BYTES(size) static emulator::Lds<size> lds_memory
#define LB_KERNEL(name, waves, occupancy, Args)                                                        \
  static void name##_lane(const Args& args);                                                           \
  extern "C" int name(const Args* args, unsigned groups, emulator::Report* report) {                   \
    return emulator::launch(waves, groups, [args] { name##_lane(*args); }, report);                    \
  }                                                                                                    \
  static void name##_lane(const Args& args)

namespace emulator {

enum { MAX_WAVES = 8, STACK = 96 << 10, LDS_LIMIT = 160 << 10, WORD = 4, MAX_COPIES = 64 };

struct Report {
  char message[240];
  float* observed;       // room for what `observe` is told, or null
  long long capacity;    // in floats
};
struct Operands { int kind; v8i a, b; v16f c; int scale_a, scale_b; unsigned x, y; };
struct Results { v16f d; unsigned x, y; };
struct Copy { const u8* from; unsigned to, bytes; };
struct Lane {
  ucontext_t context;
  bool done;
  const unsigned* waits;   // runnable once *waits differs from `seen`
  unsigned seen;
  Operands in;
  Results out;
  Copy copies[MAX_COPIES];
  int copying;
};
struct Meeting { int arrived; unsigned generation; };
struct Word { unsigned written, read; u8 writer, readers, in_flight; };   // epochs plus one; zero: never

inline Lane lanes[MAX_WAVES * WAVE];
inline Meeting waves[MAX_WAVES], workgroup;
inline ucontext_t outside;
inline int count, current;
inline unsigned group, epoch, lds_size;
inline Word words[LDS_LIMIT / WORD];
inline u8 memory[LDS_LIMIT];
inline Report* report;
inline bool failed;

template <int SIZE> struct Lds {
  static_assert(SIZE <= LDS_LIMIT, "LDS holds 160 KiB");
  operator unsigned() const { return SIZE; }
};

/// Ends the launch with a message.
template <class... T> [[noreturn]] inline void fail(const char* format, T... values) {
  int n = snprintf(report->message, sizeof report->message, format, values...);
  snprintf(report->message + n, sizeof report->message - n, " (workgroup %u, wave %d, lane %d, epoch %u)", group, current / WAVE,
           current % WAVE, epoch);
  failed = true;
  setcontext(&outside);
  abort();
}

/// Runs the next lane that can go on.
inline void reschedule() {
  int me = current;
  for (int k = 1; k <= count; k++) {
    int next = me + k < count ? me + k : me + k - count;
    Lane& lane = lanes[next];
    if (lane.done || (lane.waits && *lane.waits == lane.seen)) continue;
    lane.waits = nullptr;
    current = next;
    if (next != me) swapcontext(&lanes[me].context, &lane.context);
    return;
  }
  for (int i = 0; i < count; i++)
    if (!lanes[i].done) fail("deadlock: a wave or lane waits for others that left or took another way");
  setcontext(&outside);
}
inline void wait_for(const unsigned& generation) {
  lanes[current].waits = &generation;
  lanes[current].seen = generation;
  reschedule();
}

/// One instruction of a whole wave: the last lane to arrive computes it for all.
template <class F> inline Results& together(int kind, F compute) {
  int me = current, wave = me / WAVE;
  Meeting& meeting = waves[wave];
  lanes[me].in.kind = kind;
  if (++meeting.arrived < WAVE) { wait_for(meeting.generation); return lanes[me].out; }
  for (int i = 0; i < WAVE; i++)
    if (lanes[wave * WAVE + i].in.kind != kind) fail("lanes of a wave meet at different instructions");
  meeting.arrived = 0;
  compute(lanes + wave * WAVE);
  meeting.generation++;
  return lanes[me].out;
}

inline void touch(unsigned offset, unsigned bytes, bool write, bool in_flight) {
  if (offset % WORD || bytes % WORD) fail("LDS access of %u bytes at %u is not of whole words", bytes, offset);
  if (offset + bytes > lds_size || offset + bytes < offset)
    fail("LDS access of %u bytes at %u, LDS has %u", bytes, offset, lds_size);
  int wave = current / WAVE;
  for (unsigned i = offset / WORD; i < (offset + bytes) / WORD; i++) {
    Word& w = words[i];
    if (w.in_flight && (!write || w.in_flight - 1 != wave))
      fail("LDS word %u is touched while wave %d's copy to it is in flight", i, w.in_flight - 1);
    if (w.written == epoch + 1 && w.writer != wave) fail("LDS word %u was written by wave %d, with no barrier since", i, w.writer);
    if (write) {
      if (w.read == epoch + 1 && w.readers & ~(1 << wave)) fail("LDS word %u is written over while other waves may read it", i);
      w = {epoch + 1, w.read, (u8)wave, w.readers, (u8)(in_flight ? wave + 1 : 0)};
    } else {
      if (!w.written) fail("LDS word %u is read and was never written", i);
      if (w.read != epoch + 1) w.read = epoch + 1, w.readers = 0;
      w.readers |= 1 << wave;
    }
  }
}

struct Buffer { const u8* base; unsigned bytes; };
inline void copy(Buffer from, unsigned offset, unsigned to, unsigned bytes) {
  Lane& lane = lanes[current];
  if (offset + bytes > from.bytes) fail("copy of %u bytes at %u from a buffer of %u", bytes, offset, from.bytes);
  if (lane.copying == MAX_COPIES) fail("more than %d copies in flight", MAX_COPIES);
  to = semantics::copy_place(to, bytes, current % WAVE);
  touch(to, bytes, true, true);
  lane.copies[lane.copying++] = {from.base + offset, to, bytes};
}

inline const float* table(int element) {
  static float values[5][256];
  static bool filled;
  if (!filled)
    for (int e = 0; e < 5; e++)
      for (int code = 0; code < 256; code++)
        values[e][code] = semantics::decode(e, code & ((1u << semantics::FORMATS[e].bits) - 1));
  filled = true;
  return values[element];
}
inline unsigned element(const v8i& operand, int width, int j) {
  const u8* bytes = (const u8*)&operand;
  int bit = j * width;
  unsigned two = bytes[bit / 8] | (bit / 8 + 1 < 32 ? bytes[bit / 8 + 1] << 8 : 0);
  return two >> bit % 8 & ((1u << width) - 1);
}
/// Decodes an operand to [ROWS][K].
template <int ROWS, int K> inline void gather(const Lane* wave, bool first, int format, float* values) {
  const float* of = table(format);
  for (int i = 0; i < WAVE; i++)
    for (int j = 0; j < 32; j++)
      values[i % ROWS * K + semantics::operand_k(format, ROWS, i, j)] =
          of[element(first ? wave[i].in.a : wave[i].in.b, semantics::FORMATS[format].bits, j)];
}
template <int ROWS, int K> inline void multiply(Lane* wave, int format_a, int format_b, int select_a, int select_b) {
  static float a[ROWS * K], b[ROWS * K];
  static double scale_a[ROWS][K / 32], scale_b[ROWS][K / 32];
  gather<ROWS, K>(wave, true, format_a, a);
  gather<ROWS, K>(wave, false, format_b, b);
  for (int row = 0; row < ROWS; row++)
    for (int block = 0; block < K / 32; block++) {
      const Operands& in = wave[semantics::scale_lane(ROWS, row, block)].in;
      scale_a[row][block] = semantics::power(semantics::scale_byte(in.scale_a, select_a));
      scale_b[row][block] = semantics::power(semantics::scale_byte(in.scale_b, select_b));
    }
  bool wide = semantics::FORMATS[format_a].bits == 8 || semantics::FORMATS[format_b].bits == 8;
  for (int i = 0; i < WAVE; i++)
    for (int r = 0; r < ROWS * ROWS / WAVE; r++) {
      int row = semantics::result_row(ROWS, i, r), column = i % ROWS;
      float total = wave[i].in.c[r];
      for (int block = 0; block < K / 32; block++) {
        const float *x = a + row * K + 32 * block, *y = b + column * K + 32 * block;
        double sum = 0;
        if (wide) {
          for (int k = 0; k < 32; k++) sum += (double)x[k] * y[k];
        } else {   // exact in float32, and faster
          float narrow = 0;
          for (int k = 0; k < 32; k++) narrow += x[k] * y[k];
          sum = narrow;
        }
        total = semantics::accumulate(total, sum, scale_a[row][block] * scale_b[column][block]);
      }
      wave[i].out.d[r] = total;
    }
}
template <class T> inline void put(T& words, int width, int j, unsigned code) {
  int bit = j * width;
  words[bit / 32] |= code << bit % 32;
  if (bit % 32 + width > 32) words[bit / 32 + 1] |= code >> (32 - bit % 32);
}

template <class F> inline int launch(int wave_count, unsigned groups, F lane_code, Report* to) {
  static F* code;
  static u8* stacks = (u8*)malloc((size_t)MAX_WAVES * WAVE * STACK);
  code = &lane_code;
  report = to;
  report->message[0] = 0;
  count = wave_count * WAVE;
  failed = false;
  for (group = 0; group < groups && !failed; group++) {
    memset(words, 0, sizeof words);
    memset(memory, 0xa5, sizeof memory);
    memset(waves, 0, sizeof waves);
    workgroup = {};
    epoch = 0;
    for (int i = 0; i < count; i++) {
      Lane& lane = lanes[i];
      lane.done = false, lane.waits = nullptr, lane.copying = 0;
      getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = stacks + (size_t)i * STACK;
      lane.context.uc_stack.ss_size = STACK;
      lane.context.uc_link = nullptr;
      makecontext(&lane.context, (void (*)()) + [] { (*code)(); lanes[current].done = true; reschedule(); }, 0);
    }
    current = 0;
    swapcontext(&outside, &lanes[0].context);
  }
  return failed;
}

}  // namespace emulator

namespace isa {

typedef emulator::Buffer Buffer;

LB_INLINE unsigned thread() { return emulator::current; }
LB_INLINE unsigned group() { return emulator::group; }
LB_INLINE unsigned lane() { return emulator::current % WAVE; }
LB_INLINE unsigned wave() { return emulator::current / WAVE; }
LB_INLINE int uniform(int x) {
  using namespace emulator;
  lanes[current].in.x = (unsigned)x;
  return (int)together(4, [](Lane* wave) {
    for (int i = 0; i < WAVE; i++) {
      if (wave[i].in.x != wave[0].in.x) fail("a value taken for uniform differs between lanes");
      wave[i].out.x = wave[0].in.x;
    }
  }).x;
}
LB_INLINE void barrier() {
  using namespace emulator;
  if (++workgroup.arrived < count) { wait_for(workgroup.generation); return; }
  workgroup.arrived = 0, epoch++, workgroup.generation++;
}
LB_INLINE void wait_copies() {
  using namespace emulator;
  Lane& lane = lanes[current];
  for (int i = 0; i < lane.copying; i++) {
    const Copy& c = lane.copies[i];
    memcpy(memory + c.to, c.from, c.bytes);
    for (unsigned w = c.to / WORD; w < (c.to + c.bytes) / WORD; w++) words[w].in_flight = 0;
  }
  lane.copying = 0;
}
LB_INLINE void keep_order() {}
template <class T> LB_INLINE void pin(T&) {}
LB_INLINE unsigned pin_scalar(unsigned x) { return x; }
LB_INLINE void cold() {}

LB_INLINE Buffer buffer(const u8* base, unsigned bytes) { return {base, bytes}; }
LB_INLINE void copy16(unsigned size, Buffer from, unsigned lane_offset, unsigned offset, unsigned to) {
  emulator::lds_size = size;
  emulator::copy(from, lane_offset + offset, to, 16);
}
LB_INLINE void copy4(unsigned size, Buffer from, unsigned lane_offset, unsigned offset, unsigned to) {
  emulator::lds_size = size;
  emulator::copy(from, lane_offset + offset, to, 4);
}
template <class T> LB_INLINE T load(unsigned size, unsigned offset) {
  emulator::lds_size = size;
  emulator::touch(offset, sizeof(T), false, false);
  T x;
  memcpy((void*)&x, emulator::memory + offset, sizeof(T));
  return x;
}

template <Element A, Element B, int SELECT_A, int SELECT_B> LB_INLINE v16f mfma32(v8i a, v8i b, v16f c, int scale_a, int scale_b) {
  using namespace emulator;
  Operands& in = lanes[current].in;
  in.a = a, in.b = b, in.c = c, in.scale_a = scale_a, in.scale_b = scale_b;
  return together(1000 + A * 100 + B * 16 + SELECT_A * 4 + SELECT_B,
                  [](Lane* wave) { multiply<32, 64>(wave, A, B, SELECT_A, SELECT_B); }).d;
}
template <Element A, Element B, int SELECT_A, int SELECT_B> LB_INLINE v4f mfma16(v8i a, v8i b, v4f c, int scale_a, int scale_b) {
  using namespace emulator;
  Operands& in = lanes[current].in;
  in.a = a, in.b = b, in.scale_a = scale_a, in.scale_b = scale_b;
  for (int i = 0; i < 4; i++) in.c[i] = c[i];
  Results& out = together(2000 + A * 100 + B * 16 + SELECT_A * 4 + SELECT_B,
                          [](Lane* wave) { multiply<16, 128>(wave, A, B, SELECT_A, SELECT_B); });
  return v4f{out.d[0], out.d[1], out.d[2], out.d[3]};
}

LB_INLINE unsigned pack_unorm16(float low, float high) { return semantics::unorm16(low) | semantics::unorm16(high) << 16; }
LB_INLINE v6u fp6_from_bf16(v32bf x, float scale) {
  v6u words = {};
  for (int j = 0; j < 32; j++) emulator::put(words, 6, j, semantics::convert(E2M3, (float)x[j], scale));
  return words;
}
LB_INLINE v6u fp6_from_f32(v16f even, v16f odd, float scale) {
  v6u words = {};
  for (int i = 0; i < 16; i++) {
    emulator::put(words, 6, semantics::interleaved(0, i), semantics::convert(E2M3, even[i], scale));
    emulator::put(words, 6, semantics::interleaved(1, i), semantics::convert(E2M3, odd[i], scale));
  }
  return words;
}
template <int HALF> LB_INLINE v2s fp8_from_f32(v2s old, float low, float high, float scale) {
  old[HALF] = (short)(semantics::convert(E4M3, low, scale) | semantics::convert(E4M3, high, scale) << 8);
  return old;
}
template <int HALF> LB_INLINE v2s fp8_from_bf16(v2s old, v2bf x, float scale) {
  return fp8_from_f32<HALF>(old, (float)x[0], (float)x[1], scale);
}
template <int BYTE> LB_INLINE unsigned fp4_from_f32(unsigned old, float low, float high, float scale) {
  unsigned pair = semantics::convert(E2M1, low, scale) | semantics::convert(E2M1, high, scale) << 4;
  return (old & ~(255u << 8 * BYTE)) | pair << 8 * BYTE;
}

LB_INLINE v2u swap_halves(unsigned x, unsigned y) {
  using namespace emulator;
  lanes[current].in.x = x, lanes[current].in.y = y;
  Results& out = together(1, [](Lane* wave) {
    for (int i = 0; i < WAVE; i++) {
      semantics::Source x = semantics::swapped_x(i), y = semantics::swapped_y(i);
      wave[i].out.x = x.from_y ? wave[x.lane].in.y : wave[x.lane].in.x;
      wave[i].out.y = y.from_y ? wave[y.lane].in.y : wave[y.lane].in.x;
    }
  });
  return v2u{out.x, out.y};
}
/// ds_bpermute.
LB_INLINE float from_lane(float x, unsigned source) {
  using namespace emulator;
  lanes[current].in.x = bits<unsigned>(x), lanes[current].in.y = source;
  return bits<float>(together(2, [](Lane* wave) {
    for (int i = 0; i < WAVE; i++) wave[i].out.x = wave[wave[i].in.y % WAVE].in.x;
  }).x);
}
LB_INLINE bool any(bool x) {
  using namespace emulator;
  lanes[current].in.x = x;
  return together(3, [](Lane* wave) {
    unsigned found = 0;
    for (int i = 0; i < WAVE; i++) found |= wave[i].in.x;
    for (int i = 0; i < WAVE; i++) wave[i].out.x = found;
  }).x;
}
LB_INLINE float exp2(float x) { return exp2f(x); }
LB_INLINE float log2(float x) { return log2f(x); }
LB_INLINE unsigned field(unsigned x, unsigned offset, unsigned width) { return x >> offset & ((1u << width) - 1); }
LB_INLINE void raise(unsigned* x, unsigned least) { if (least > *x) *x = least; }

/// Keeps a lane's record: `size` floats or words at `size` times its index, if the launch has an observer.
template <class... T> LB_INLINE void observe(long long index, T... parts) {
  constexpr long long size = (sizeof(T) + ... + 0) / 4;
  if (!emulator::report->observed || (index + 1) * size > emulator::report->capacity) return;
  u8* to = (u8*)(emulator::report->observed + index * size);
  ((memcpy(to, &parts, sizeof(T)), to += sizeof(T)), ...);
}

}  // namespace isa
