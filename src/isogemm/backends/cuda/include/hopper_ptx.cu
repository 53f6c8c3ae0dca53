// Hopper's instructions as functions: mbarriers, the tensor copy engine, clusters, wgmma's glue, programmatic launch.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE static __device__ __forceinline__

struct alignas(64) Map { u8 bytes[128]; };  // a CUtensorMap

DEVICE u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 cluster_rank() { u32 r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE u32 cluster_id() { u32 r; asm("mov.u32 %0, %%clusterid.x;" : "=r"(r)); return r; }
DEVICE u32 cluster_count() { u32 r; asm("mov.u32 %0, %%nclusterid.x;" : "=r"(r)); return r; }
// All threads of the cluster meet. Orders nothing but the barriers' initialisation, which has a fence of its own.
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// True in one thread of a converged warp. Behind it the compiler knows that there is one; behind `lane == 0` it does not,
// and makes a loop over threads of every copy, of some 35 cycles.
DEVICE bool elected() {
  u32 one;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(one));
  return one;
}

// mbarriers. A wait for parity p returns once the phase of parity p is complete; a fresh barrier is in phase 0, so a wait
// for parity 1 passes at once.
DEVICE void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
DEVICE void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// Neighbouring bytes into shared memory, by the copy engine.
DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(bar) : "memory");
}
DEVICE void barrier_wait(u32 bar, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra ready;\nbra again;\nready:\n}" ::"r"(bar), "r"(parity) : "memory");
}
// Whether that phase is complete, without waiting.
DEVICE bool barrier_passed(u32 bar, u32 parity) {
  u32 passed;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(passed) : "r"(bar), "r"(parity) : "memory");
  return passed;
}
DEVICE void barrier_arrive(u32 bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory"); }
// The same barrier of another block of the cluster. Without ordering of memory: the reads that it reports, wgmma's, are
// complete (`.release.cluster` costs a fence of the whole GPU, 0.5 us a stage on an H200).
DEVICE void barrier_arrive_at(u32 bar, u32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(bar), "r"(rank) : "memory");
}
// A producer's last act in a cluster: a block must not leave while others may still arrive at its barriers, and they have
// arrived once every buffer is free, from the one that would be filled next. (A meeting of the blocks is not enough: an
// arrival may be under way when they have met, and arrives at a block that has left. That ends the program.)
DEVICE void drain(u32 empty, u32 stages, u32 stage, u32 parity) {
  for (u32 i = 0; i < stages; ++i) {
    barrier_wait(empty + 8 * stage, parity);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
}
// Between what this thread loads from shared memory, or stores there, and what the copy engine or wgmma does there later. A barrier
// alone does not order them: a load may wait behind other blocks' traffic for longer than a buffer takes to be filled again.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Turns among warpgroups: `take` blocks its 128 threads until the 128 of another have given.
DEVICE void turn_take(u32 id) { asm volatile("bar.sync %0, 256;" ::"r"(id) : "memory"); }
DEVICE void turn_give(u32 id) { asm volatile("bar.arrive %0, 256;" ::"r"(id) : "memory"); }

// The copy engine: a box at (c0, c1, c2) of a three-dimensional tensor; `mask` names the blocks of the cluster that receive
// it at the same offsets, and whose barriers count its bytes. `policy` is an L2 eviction policy, 0 for none.
DEVICE void tma_load(u32 to, const Map* map, u32 bar, int c0, int c1, int c2, u64 policy) {
  if (policy)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], "
        "[%2], %6;" ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "l"(policy) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
DEVICE void tma_multicast(u32 to, const Map* map, u32 bar, int c0, int c1, int c2, u16 mask, u64 policy) {
  if (policy)
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "h"(mask),
        "l"(policy) : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(to), "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "h"(mask) : "memory");
}
DEVICE void map_prefetch(const Map* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// wgmma. Reads of accumulators must not move above a wait, nor writes below the fence: `pin` ties each register down.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int N> DEVICE void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
// Shared-memory matrix descriptor. K-major: rows of 128 bytes, 8 rows to an atom of 1024 bytes, swizzled over 128 bytes.
// MN-major: LINE elements of M or N to a row, swizzled over as many bytes, 8 of K to an atom. Of 64 elements the next ones lie a
// chunk of 8192 bytes, 64 of K, further on; fewer are followed by themselves.
template <bool MN, int LINE = 64> DEVICE u64 descriptor(u32 address) {
  constexpr u64 SWIZZLE = LINE == 64 ? 1 : LINE == 32 ? 2 : 3, NEXT = !MN ? 1 : LINE == 64 ? 512 : 0;
  return (u64)((address & 0x3ffff) >> 4) | NEXT << 16 | (u64)LINE << 32 | SWIZZLE << 62;
}

// Programmatic dependent launch: no-ops in a launch without the attribute.
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void release_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <int R> DEVICE void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R)); }
template <int R> DEVICE void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R)); }

DEVICE u32 pack_bf16(float x, float y) { u32 d; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x)); return d; }
DEVICE u32 pack_f16(float x, float y) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(y), "f"(x)); return d; }
DEVICE float f16_to_float(u16 h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
// Four 8 x 8 blocks of a warp, each turned; lane i has the address of what becomes row i % 8 of block i / 8.
DEVICE void store_matrices_turned(u32 at, const u32 (&a)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(at), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

// Lane q of each four gives word i of its w to lane i, and gets its own word of theirs: a 4 x 4 transpose.
DEVICE void transpose_quad(u32 (&w)[4], u32 lane) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
    if (odd) w[i] = other; else w[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 other = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
    if (high) w[i] = other; else w[i + 2] = other;
  }
}
