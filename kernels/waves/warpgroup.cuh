// Owns products by four warps at once (wgmma, sm_90a): D(64 x N) += A(64 x 16) B(16 x N), bf16 operands, fp32 sums.
//
// A is in registers: warp w of the four has rows 16 w to 16 w + 15, a lane those of mma.m16n8k16. B is in shared memory: core matrices of
// 8 columns by 16 bytes of k, those that follow each other along k CORE_BYTES apart, along columns COLUMNS_BYTES. Of lane l, d[4 j] and
// d[4 j + 1] are columns 8 j + l % 4 * 2 and the next of row l / 4, d[4 j + 2] and d[4 j + 3] those of row l / 4 + 8 (PTX ISA, "Asynchronous
// warpgroup level matrix instructions").
//
// Products run on while a warp goes on. Between warpgroup_begin and warpgroup_await neither the operands in registers nor the sums may be
// touched, and B may not be overwritten.
#pragma once

struct WarpgroupOperand {
  static constexpr u32 CORE_BYTES = 128, COLUMNS_BYTES = 512;
  static constexpr bool TRANSPOSED = false; // columns are along memory, not k
  // B where it begins, as the instruction wants it: not swizzled.
  static __device__ __forceinline__ u64 at(const u8* from) {
#ifndef __CUDA_ARCH__
    return u64(from - smem); // tests of ops on a CPU
#else
    return u64(CORE_BYTES >> 4) << 16 | u64(COLUMNS_BYTES >> 4) << 32 | (smem_address(from) & 0x3ffff) >> 4;
#endif
  }
  // `bytes` further on.
  static __device__ __forceinline__ u64 next(u64 at, u32 bytes) {
#ifndef __CUDA_ARCH__
    return at + bytes;
#else
    return at + (bytes >> 4);
#endif
  }
  // Where the instruction has an element, from `at(..)` on, and what a swizzle makes of a place.
  static __device__ __forceinline__ u32 element(u32 k, u32 column) { return k / 8 * CORE_BYTES + column / 8 * COLUMNS_BYTES + column % 8 * 16 + k % 8 * 2; }
  static __device__ __forceinline__ u64 place(u64 at) { return at; }
};

// Two granules of plain weights of each unit, one unit after another, as a box of a tensor map brings them: of 8 rows of 64 bytes that begin at a multiple of 512,
// piece p of 16 bytes of row r lies at p ^ r / 2 % 4. That is the swizzle of 64 bytes, for which the instruction takes them.
struct SwizzledOperand {
  static constexpr u32 UNIT_BYTES = 1024, GRANULE_BYTES = 512;
  static __device__ __forceinline__ u32 element(u32 k, u32 column) { return column / 8 * UNIT_BYTES + column % 8 * 64 + k * 2; }
  static __device__ __forceinline__ u64 place(u64 at) { return at ^ (at >> 7 & 3) << 4; }
  static __device__ __forceinline__ u64 at(const u8* from) {
#ifndef __CUDA_ARCH__
    return u64(from - smem); // tests of ops on a CPU
#else
    return u64(1) << 16 | u64(UNIT_BYTES >> 4) << 32 | u64(2) << 62 | (smem_address(from) & 0x3ffff) >> 4;
#endif
  }
};

// After the last write of operands and sums in registers.
__device__ __forceinline__ void warpgroup_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// The products since the last call are a group.
__device__ __forceinline__ void warpgroup_commit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most LEFT groups are under way.
template <int LEFT>
__device__ __forceinline__ void warpgroup_await() {
#if __CUDA_ARCH__ >= 900
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

// Sums whose products are done: what reads them comes after the wait that says so.
template <int N>
__device__ __forceinline__ void warpgroup_done(float (&sums)[N]) {
#ifdef __CUDA_ARCH__
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(sums[i])::"memory");
#endif
}

#define MONOBLOC_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MONOBLOC_SUMS8(i) MONOBLOC_SUMS4(i), MONOBLOC_SUMS4(i + 4)
#define MONOBLOC_SUMS16(i) MONOBLOC_SUMS4(i), MONOBLOC_SUMS4(i + 4), MONOBLOC_SUMS4(i + 8), MONOBLOC_SUMS4(i + 12)
// FIRST: sums begin at the product, whatever they were before. B says how the right operand lies in shared memory.
template <int N, bool FIRST = false, class B = WarpgroupOperand>
__device__ __forceinline__ void warpgroup_product(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 128, "columns that there is an instruction for");
#ifndef __CUDA_ARCH__
  for (float& sum : d) sum = FIRST ? 0.f : sum;
  emulated_warpgroup_product<N, B>(d, a0, a1, a2, a3, b); // tests of ops on a CPU
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (N == 128)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,"
        "%59,%60,%61,%62,%63},{%64,%65,%66,%67},%68,%69,1,1,%70;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16), MONOBLOC_SUMS16(32), MONOBLOC_SUMS16(48)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(FIRST ? 0 : 1), "n"(B::TRANSPOSED ? 1 : 0));
  else if constexpr (N == 16)
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},%12,%13,1,1,%14;"
                 : MONOBLOC_SUMS8(0)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(FIRST ? 0 : 1), "n"(B::TRANSPOSED ? 1 : 0));
  else if constexpr (N == 32)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19},%20,%21,1,1,%22;"
        : MONOBLOC_SUMS16(0)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(FIRST ? 0 : 1), "n"(B::TRANSPOSED ? 1 : 0));
  else
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31},{%32,%33,%34,%35},%36,%37,1,1,%38;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(FIRST ? 0 : 1), "n"(B::TRANSPOSED ? 1 : 0));
#endif
}
// D(64 x N) += A B with both operands in shared memory. A and B say how they lie there; rows of A are what columns of an operand are.
template <int N, class A = WarpgroupOperand, class B = SwizzledOperand>
__device__ __forceinline__ void warpgroup_product(float (&d)[N / 2], u64 a, u64 b) {
#ifndef __CUDA_ARCH__
  emulated_warpgroup_product<N, A, B>(d, a, b); // tests of ops on a CPU
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (N == 32)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},%16,%17,1,1,1,0,0;"
        : MONOBLOC_SUMS16(0)
        : "l"(a), "l"(b));
  else if constexpr (N == 64)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31},%32,%33,1,1,1,0,0;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16)
        : "l"(a), "l"(b));
  else if constexpr (N == 96)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47},%48,%49,1,1,1,0,0;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16), MONOBLOC_SUMS16(32)
        : "l"(a), "l"(b));
  else if constexpr (N == 128)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},%64,%65,1,1,1,0,0;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16), MONOBLOC_SUMS16(32), MONOBLOC_SUMS16(48)
        : "l"(a), "l"(b));
  else if constexpr (N == 144)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71},%72,%73,1,1,1,0,0;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16), MONOBLOC_SUMS16(32), MONOBLOC_SUMS16(48), MONOBLOC_SUMS8(64)
        : "l"(a), "l"(b));
  else if constexpr (N == 192)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,"
        "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95},%96,%97,1,1,1,0,0;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16), MONOBLOC_SUMS16(32), MONOBLOC_SUMS16(48), MONOBLOC_SUMS16(64), MONOBLOC_SUMS16(80)
        : "l"(a), "l"(b));
  else if constexpr (N == 256)
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
        "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,"
        "%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
        "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,"
        "%120,%121,%122,%123,%124,%125,%126,%127},%128,%129,1,1,1,0,0;"
        : MONOBLOC_SUMS16(0), MONOBLOC_SUMS16(16), MONOBLOC_SUMS16(32), MONOBLOC_SUMS16(48), MONOBLOC_SUMS16(64), MONOBLOC_SUMS16(80), MONOBLOC_SUMS16(96), MONOBLOC_SUMS16(112)
        : "l"(a), "l"(b));
  else
    static_assert(N < 0, "columns that there is an instruction for");
#endif
}
#undef MONOBLOC_SUMS16
#undef MONOBLOC_SUMS8
#undef MONOBLOC_SUMS4

// The transpose of 8 x 8 values, of which a lane has columns l % 4 * 2 and the next of row l / 4, before and after: as halves of 16 bits.
__device__ __forceinline__ float2 transposed(float a, float b) {
#ifndef __CUDA_ARCH__
  return emulated_transpose(a, b); // tests of ops on a CPU
#else
  const u32 first = __float_as_uint(a), second = __float_as_uint(b);
  u32 low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(low));
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(high));
  return make_float2(__uint_as_float(__byte_perm(low, high, 0x5410)), __uint_as_float(__byte_perm(low, high, 0x7632)));
#endif
}

// Of four lanes side by side, of which this is lane t: word t of each of them, in their order. Lanes two apart exchange two words each, then neighbours.
__device__ __forceinline__ uint4 words_of_four(const u32 (&words)[4], int t) {
  const bool high = t & 2, odd = t & 1;
  const u32 given[2] = {high ? words[0] : words[2], high ? words[1] : words[3]};
  u32 own[2][2] = {{high ? words[2] : words[0], 0}, {high ? words[3] : words[1], 0}}; // words t & 2 and the next: of lane t & 1, and of the one two further
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 other = __shfl_xor_sync(~0u, given[i], 2);
    own[i][1] = high ? own[i][0] : other;
    own[i][0] = high ? other : own[i][0];
  }
  const u32 first = __shfl_xor_sync(~0u, odd ? own[0][0] : own[1][0], 1), second = __shfl_xor_sync(~0u, odd ? own[0][1] : own[1][1], 1);
  return odd ? make_uint4(first, own[1][0], second, own[1][1]) : make_uint4(own[0][0], first, own[0][1], second);
}
