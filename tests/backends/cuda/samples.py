"""Small kernels that show how values, maps, clusters and dependent launches arrive; Triton's where it is installed."""

from __future__ import annotations

AXPY = r"""
extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = __fadd_rn(__fmul_rn(a, x[i]), y[i]);
}
"""

CLUSTER = r"""
extern "C" __global__ void rank(int* out) {
  unsigned rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  if (threadIdx.x == 0) out[blockIdx.x] = rank + 100 * size;
}
"""

# A box of 8 rows of 64 bfloat16, copied by the tensor copy engine and written out as it lies in shared memory.
TILE = r"""
struct alignas(64) Map { char bytes[128]; };
extern "C" __global__ void tile(const __grid_constant__ Map map, unsigned short* out, int row, int column) {
  extern __shared__ __align__(1024) unsigned short memory[];
  __shared__ alignas(8) unsigned long long full;
  unsigned to = (unsigned)__cvta_generic_to_shared(memory), bar = (unsigned)__cvta_generic_to_shared(&full);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(bar));
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" ::"r"(bar));
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(column), "r"(row), "r"(bar) : "memory");
  }
  __syncthreads();
  for (unsigned done = 0; !done;)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar) : "memory");
  for (int i = threadIdx.x; i < 512; i += blockDim.x) out[i] = memory[i];
}
"""

try:
    import triton
    import triton.language as tl
except ImportError:
    pass
else:

    @triton.jit
    def add(x, out, n, value, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < n) + value, mask=at < n)

    @triton.jit
    def scale(x, out, a):
        tl.store(out, tl.load(x) * a + tl.load(out))

    @triton.jit
    def rows(x, out, n, k, ROWS: tl.constexpr):
        """A descriptor made on the device, which lies in scratch memory."""
        at = tl.program_id(0) * ROWS
        tile = tl.make_tensor_descriptor(x, [n, k], [k, 1], [ROWS, 64]).load([at, 0])
        to = (at + tl.arange(0, ROWS))[:, None] * 64 + tl.arange(0, 64)[None, :]
        tl.store(out + to, tile)
