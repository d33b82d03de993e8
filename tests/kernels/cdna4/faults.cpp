// What a workgroup must not do, for tests of the emulator.
#include "isa.h"

struct ProbeArgs {
  const u8* in;
  u8* out;
  float scale;
  int option;
};

/// Two waves and 4 KiB. Wave 0 copies 1 KiB to offset 0; `option` says what goes wrong, 0 for nothing.
LB_KERNEL(fault_lds, 2, 1, ProbeArgs) {
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
  ((v4u*)args.out)[isa::thread()] = x;
}
