// Enough of Metal's language to compile its kernels as C++: a threadgroup's threads are fibers, which take turns at
// barriers; threadgroup memory is static, and groups run one behind the other.
#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#define kernel
#define device
#define threadgroup static
typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef _Float16 half;
struct uint3 { uint x, y, z; };

namespace shim {
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; };
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline uint current;
inline float lanes[1024];

inline void barrier() { swapcontext(&fibers[current].context, &scheduler); }

template <class Body> void run_group(uint threads, Body body) {
  static Body* entry;
  entry = &body;
  fibers.clear();
  fibers.resize(threads);
  for (auto& fiber : fibers) {
    fiber.stack.resize(1 << 16);
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, +[]() { (*entry)(current); fibers[current].done = true; }, 0);
  }
  for (bool alive = true; alive;) {
    alive = false;
    for (current = 0; current < threads; current++) {
      if (!fibers[current].done) {
        swapcontext(&scheduler, &fibers[current].context);
        alive = true;
      }
    }
  }
}
}  // namespace shim

namespace metal {
enum class mem_flags { mem_none, mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { shim::barrier(); }
inline float fma(float x, float y, float z) { return std::fma(x, y, z); }
inline uint min(uint x, uint y) { return x < y ? x : y; }
template <class To, class From> To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To made;
  std::memcpy(&made, &x, sizeof x);
  return made;
}
inline float simd_shuffle_xor(float x, uint mask) {
  shim::lanes[shim::current] = x;
  shim::barrier();
  float found = shim::lanes[shim::current ^ mask];
  shim::barrier();
  return found;
}
struct simdgroup_float8x8 { float of[64]; };  // each thread holds all of it
template <class, int, int> simdgroup_float8x8 make_filled_simdgroup_matrix(float x) {
  simdgroup_float8x8 made;
  for (float& each : made.of) each = x;
  return made;
}
inline void simdgroup_load(simdgroup_float8x8& m, const float* at, unsigned long row) {
  for (int e = 0; e < 64; e++) m.of[e] = at[e / 8 * row + e % 8];
}
inline void simdgroup_store(const simdgroup_float8x8& m, float* at, unsigned long row) {
  for (int e = 0; e < 64; e++) at[e / 8 * row + e % 8] = m.of[e];
}
inline void simdgroup_multiply_accumulate(simdgroup_float8x8& d, const simdgroup_float8x8& a,
                                          const simdgroup_float8x8& b, const simdgroup_float8x8& c) {
  simdgroup_float8x8 made = c;
  for (int e = 0; e < 64; e++)
    for (int p = 0; p < 8; p++) made.of[e] = std::fma(a.of[e / 8 * 8 + p], b.of[p * 8 + e % 8], made.of[e]);
  d = made;
}
}  // namespace metal

template <class X, class W>
void launch(void (*body)(const X*, const W*, uint*, const uint*, uint3, uint), const void* x, const void* w, uint* y,
            const uint* shape, const float*, uint columns, uint rows, uint threads) {
  for (uint row = 0; row < rows; row++)
    for (uint column = 0; column < columns; column++)
      shim::run_group(threads, [&](uint local) {
        body((const X*)x, (const W*)w, y, shape, uint3{column, row, 0}, local);
      });
}

template <class X, class W>
void launch(void (*body)(const X*, const W*, uint*, const uint*, const float*, uint3, uint), const void* x,
            const void* w, uint* y, const uint* shape, const float* scales, uint columns, uint rows, uint threads) {
  for (uint row = 0; row < rows; row++)
    for (uint column = 0; column < columns; column++)
      shim::run_group(threads, [&](uint local) {
        body((const X*)x, (const W*)w, y, shape, scales, uint3{column, row, 0}, local);
      });
}
