// Elements by their type's code: 0 float32, 1 bfloat16, 2 float16. One rounding, one NaN: 0x7fff in both 16-bit types.
#include "include/hopper_ptx.cu"

template <int T> DEVICE float widen(u16 h) { return T == 1 ? __uint_as_float((u32)h << 16) : f16_to_float(h); }
template <int T> DEVICE u16 narrow(float v) {
  u16 h;
  if (T == 1) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return h;
}
template <int T> DEVICE u32 narrow(float low, float high) { return T == 1 ? pack_bf16(low, high) : pack_f16(low, high); }
DEVICE float canonical(float v) { return v == v ? v : __uint_as_float(0x7fffffff); }

template <int T> DEVICE float load_as(const void* p, i64 i) { return T == 0 ? ((const float*)p)[i] : widen<T>(((const u16*)p)[i]); }
template <int T> DEVICE void put(void* p, i64 i, float v) {
  if (T == 0) ((float*)p)[i] = canonical(v);
  else ((u16*)p)[i] = narrow<T>(v);
}
