// The attention kernels of the recipes fused_mxfp8, fused_mxfp6 and fused_mxfp4: attention.h.
#include "attention.h"

#define ATTENTION(name, R)                                                \
  LB_KERNEL(name, ATTENTION_WAVES, 2, AttentionArgs) {                    \
    LB_LDS_BYTES(Slots<R>::BYTES);                                        \
    attend<R, Wave<R, Fused<R>, decltype(lds_memory)>>(args, lds_memory); \
  }
ATTENTION(attention_mxfp8, Mxfp8)
ATTENTION(attention_mxfp6, Mxfp6)
ATTENTION(attention_mxfp4, Mxfp4)
