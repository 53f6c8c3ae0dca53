// Consumers of quant/integers/wide.cu for super-blocks: operands are s q, so that tensor cores sum over PART of K.
//
// T = sum t_j * (sum of a) is one product more: t times sums of 16 codes each, which float16 holds.

struct Consumer : Reader {
  __device__ __forceinline__ void fragment(u32 (&a)[4], const Words& w, int j, const Factor& f) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int field = 2 * j + r % 2, at = in_place(field);
      const u32 s = f.s[r % 2];
      if (Q_ZERO == 0) {  // (1024 + q 2**at) (s / 2**at) - 1024 s / 2**at
        const u32 down = half_of(-at) * 0x10001u, up = (0x8000u + half_of(10 - at)) * 0x10001u;
        a[r] = fma_pair(raw_pair(w, field, r / 2), at ? mul_pair(s, down) : s, mul_pair(s, up));
      } else {
        a[r] = mul_pair(code_pair(w, field, r / 2), s);
      }
    }
  }
  // t of 16 sums of 16 as the operand of one instruction: sums 2 t and 2 t + 1, and 8 further on, of rows g and g + 8.
  __device__ __forceinline__ void offsets(u32 (&a)[4], const u8* record) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const u32 half = r % 2;
      if (Q_JOINT) {
        const int sub = 2 * (lane % 4) + 8 * (r / 2);
        const u32 even = ints_of(record, sub, lane / 4), odd = ints_of(record, sub + 1, lane / 4);
        const u32 two = (even >> 8 * half & 0xff) >> 4 | (odd >> 8 * half & 0xff) >> 4 << 16;
        a[r] = add_pair(two | 0x64006400u, 0xe400e400u);
      } else {
        a[r] = byte_pair(ints_of(record, lane % 4 + 4 * (r / 2), lane / 4), 2 * half + 1, 0);
      }
    }
  }
  // order-critical: one step of the chain. From `quarter` of the columns on TOGETHER, or all.
  __device__ __forceinline__ void chains(float (&acc)[NACC], const float (&s)[NACC], const float (&w)[2], u32 slot,
                                         int quarter = -1) const {
    const float* x = (const float*)(slot_at(slot) + LINE_AT) + 4 * (lane % 4);
#pragma unroll
    for (int j = 0; j < BN / 8; ++j) {
      if (quarter >= 0 && j % 4 / TOGETHER != quarter / TOGETHER) continue;
      const float2 d = *(const float2*)(x + j / 2 * 16 + j % 2 * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& a = acc[4 * j + e];
        a = __fmaf_rn(s[4 * j + e], __fmul_rn(w[e / 2], e % 2 ? d.y : d.x), a);
      }
    }
  }
  // The product for T of the record in a slot.
  __device__ __forceinline__ void multiply_offsets(float (&s)[NACC], u32 slot) const {
    u32 a[4];
    offsets(a, record_at(slot));
    const u64 sums = (u64)((shared(slot_at(slot)) & 0x3ffff) >> 4) | (u64)1 << 16 | (u64)16 << 32 | (u64)3 << 62;
    wgmma_fence();
    mma(s, a, sums, 0);
    wgmma_commit();
  }
  // Both steps of a record whose S is in s[0].
  __device__ __forceinline__ void finish(float (&acc)[NACC], float (&s)[2][NACC], u32 slot) const {
    const Floats f = floats_of(record_at(slot), 0, lane / 4);
    if (SUMS_BYTES) multiply_offsets(s[1], slot);
    chains(acc, s[0], f.d, slot);
    if (!SUMS_BYTES) return;
    wait_group<0>();
    hold(s[1]);
    chains(acc, s[1], f.o, slot);
  }
  // TOGETHER steps of 16 of K of the buffer, from j on.
  __device__ __forceinline__ void multiply(float (&s)[NACC], u32 (&a)[TOGETHER][4], const Words& w, Factor& f, int st, int j,
                                           bool more) const {
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      if ((j + i) * 16 % Q_SUB == 0) f = factor_of(record_at(at.slot), (64 * st + 16 * (j + i)) / Q_SUB, lane / 4);
      fragment(a[i], w, j + i, f);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) mma(s, a[i], operand(j + i), more || i > 0);
    wgmma_commit();
  }

  // A record, and beside its products the chains of the one before, whose S is in s[0]: a quarter to each instruction.
  template <bool PENDING>
  __device__ __forceinline__ void record(float (&acc)[NACC], float (&s)[2][NACC], u32& before) {
    const u32 last = at.slot == 0 ? SLOTS - 1 : at.slot - 1;
    u32 a[2][TOGETHER][4];
    Factor f;
#pragma unroll
    for (int st = 0; st < SPAN; ++st) {
      if (st) at.next();
      barrier_wait(full + 8 * at.stage, at.parity);
      Words w;
      load_words_together<false>(w, codes(), lane);
      Floats of;
      if (PENDING && st < 2) of = floats_of(record_at(last), 0, lane / 4);
      if (PENDING && SUMS_BYTES && st == 1) multiply_offsets(s[0], last);
#pragma unroll
      for (int j = 0; j < 4; j += TOGETHER) {
        multiply(s[st * 64 < PART], a[(4 * st + j) / TOGETHER & 1], w, f, st, j, (64 * st + 16 * j) % PART != 0);
        if (PENDING && st == 0) chains(acc, s[0], of.d, last, j);
        wait_group<1>();
        if (PENDING && SUMS_BYTES && st == 1) {
          if (j == 0) hold(s[0]);
          chains(acc, s[0], of.o, last, j);
        }
        if (j == 0 && before < STAGES) release(before);
      }
      before = at.stage;
    }
    wait_group<0>();
    hold(s[0]);
    hold(s[1]);
#pragma unroll
    for (int e = 0; e < NACC; ++e) s[0][e] = PART == 128 ? __fadd_rn(s[0][e], s[1][e]) : s[1][e];
    at.next();
  }
  __device__ __forceinline__ void walk(float (&all)[1][NACC], int iters) {
    float(&acc)[NACC] = all[0];
    float s[2][NACC];
    u32 before = STAGES;
    record<false>(acc, s, before);
#pragma unroll 1
    for (int i = SPAN; i < iters; i += SPAN) record<true>(acc, s, before);
    finish(acc, s, at.slot == 0 ? SLOTS - 1 : at.slot - 1);
    release(before);
  }
};
