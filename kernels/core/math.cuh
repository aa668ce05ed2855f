// Owns warp reductions, activation functions and the tensor-core dot product.
#pragma once

// Tells the compiler that a value is the same in all lanes. It then takes branches on the value for the whole warp, and need not
// bring lanes together again before votes, shuffles and products.
__device__ __forceinline__ u32 uniform(u32 v) { return __shfl_sync(~0u, v, 0); }
// Asks for the cache line at `from`, which will be read soon, in the cache of this SM.
__device__ __forceinline__ void prefetch_near(const void* from) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
#endif
}
// A load of a constant that stays where it stands: the compiler would move a plain one to where its value is used.
__device__ __forceinline__ float4 load_constant_here(const float4* from) {
#ifndef __CUDA_ARCH__
  return *from;
#else
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
#endif
}
__device__ __forceinline__ float2 load_constant_here(const float2* from) {
#ifndef __CUDA_ARCH__
  return *from;
#else
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
#endif
}
// Keeps a value in a register from here on: the compiler would work it out again where it is used.
__device__ __forceinline__ void keep(u32& v) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(v));
#endif
}
__device__ __forceinline__ void keep(u8*& v) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(v));
#endif
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, o));
  return v;
}

__device__ __forceinline__ u32 warp_max(u32 v) {
#if __CUDA_ARCH__ >= 800
  u32 most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(v));
  return most;
#else
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    const u32 other = __shfl_xor_sync(~0u, v, o);
    v = v > other ? v : other;
  }
  return v;
#endif
}

// Tensor-core sums D(16 x 8) += A(16 x 16) B(16 x 8), bf16 operands, fp32 sums. Lane l has columns l % 4 * 2
// and l % 4 * 2 + 1: those of row l / 4 are d0 and d1, those of row l / 4 + 8 are d2 and d3.
__device__ __forceinline__ void tensor_product(float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#ifndef __CUDA_ARCH__
  emulated_product(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1); // tests of ops on a CPU
#elif __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// The same product, of fp16 or bf16 operands. Words of A: rows 0..7, rows 8..15, then both for the second eight of k.
template <bool F16>
__device__ __forceinline__ void mma(float (&d)[4], const uint4 a, u32 b0, u32 b1) {
  if constexpr (!F16) {
    tensor_product(d[0], d[1], d[2], d[3], a.x, a.y, a.z, a.w, b0, b1);
  } else {
#ifndef __CUDA_ARCH__
    emulated_product(d[0], d[1], d[2], d[3], a.x, a.y, a.z, a.w, b0, b1, true); // tests of ops on a CPU
#elif __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
  }
}

// Products where only rows 0..7 of A are wanted: row lane / 4 is one token or one query head. So rows 8..15 carry a second slice of k.
// B has four words (x, y, z, w) of a row of W or of K, A the words of the vector in the order (x, z, y, w). The first product adds
// x and y to the low rows, the second adds z and w to the high rows of another set of sums; the other halves are never read. So no
// register is moved, and none holds zeros.
struct Products {
  float low[4], high[4];
  __device__ __forceinline__ float sum(int column) const { return low[column] + high[2 + column]; }
  __device__ __forceinline__ void add(const uint4 a, const uint4 b) {
    tensor_product(low[0], low[1], low[2], low[3], a.x, a.y, a.z, a.w, b.x, b.y);
    tensor_product(high[0], high[1], high[2], high[3], a.x, a.y, a.z, a.w, b.z, b.w);
  }
};
// Byte of the elements `k` and `k + 1` (k even) of a vector in that order: the middle two words of every 16 bytes change places.
__device__ __forceinline__ u32 operand_byte(u32 k) {
  const u32 word = k / 2 % 4;
  return k / 8 * 16 + ((word & 1) << 1 | word >> 1) * 4;
}

// One product of 8 rows: rows 8..15 of A are zeros, and their sums are not used.
__device__ __forceinline__ void mma_rows8(float& d0, float& d1, u32 a0, u32 a2, u32 b0, u32 b1) {
#ifndef __CUDA_ARCH__
  float unused0 = 0.f, unused1 = 0.f;
  emulated_product(d0, d1, unused0, unused1, a0, 0, a2, 0, b0, b1); // tests of ops on a CPU
#elif __CUDA_ARCH__ >= 800
  [[maybe_unused]] float unused0, unused1;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%5},{%7,%8},{%0,%1,%9,%9};"
      : "+f"(d0), "+f"(d1), "=f"(unused0), "=f"(unused1)
      : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.f));
#endif
}

// The same, of fp16 operands.
__device__ __forceinline__ void mma_rows8_f16(float& d0, float& d1, u32 a0, u32 a2, u32 b0, u32 b1) {
#ifndef __CUDA_ARCH__
  float unused0 = 0.f, unused1 = 0.f;
  emulated_product(d0, d1, unused0, unused1, a0, 0, a2, 0, b0, b1, true); // tests of ops on a CPU
#elif __CUDA_ARCH__ >= 800
  [[maybe_unused]] float unused0, unused1;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%5},{%7,%8},{%0,%1,%9,%9};"
      : "+f"(d0), "+f"(d1), "=f"(unused0), "=f"(unused1)
      : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.f));
#endif
}

// Natural logarithm; of 0 it is -inf. The error is below 1e-5.
__device__ __forceinline__ float log_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y * 0.6931471805599453f;
#else
  return logf(x); // tests of ops on a CPU
#endif
}

// 2^x; 0 where the result would not be normal.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x); // tests of ops on a CPU
#endif
}
// e^x; 0 where the result would not be normal, so e^-inf is 0. The error is at most about 2 + |x| units of the last place: the
// product x * log2(e) is rounded.
__device__ __forceinline__ float exp_fast(float x) { return exp2_fast(x * 1.4426950408889634f); }

enum class Act : u32 { SILU, GELU_ERF, GELU_TANH, RELU, SQUARED_RELU };

// Formulas: see `Act` of the model graph.
template <Act A>
__device__ __forceinline__ float activate(float x) {
  if constexpr (A == Act::SILU) return __fdividef(x, 1.f + exp_fast(-x));
  if constexpr (A == Act::GELU_ERF) return 0.5f * x * (1.f + erff(x * 0.70710678118654752f));
  if constexpr (A == Act::GELU_TANH)
    return 0.5f * x * (1.f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  if constexpr (A == Act::SQUARED_RELU) return fmaxf(x, 0.f) * fmaxf(x, 0.f);
  return fmaxf(x, 0.f);
}
// The same of SCALE * x.
template <class G>
__device__ __forceinline__ float activate_scaled(float x) {
  if constexpr (G::SCALE == 1.f) return activate<G::ACT>(x);
  return activate<G::ACT>(G::SCALE * x);
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + exp_fast(-x)); }

// cap * tanh(x / cap); a cap of 0 stands for none.
__device__ __forceinline__ float softcap(float x, float cap) { return cap > 0.f ? cap * tanhf(x / cap) : x; }

// The larger value wins; of equal values the lower index, as everywhere in the project.
__device__ __forceinline__ void argmax_take(float& value, int& index, float v, int i) {
  if (v > value || (v == value && i < index)) {
    value = v;
    index = i;
  }
}
__device__ __forceinline__ void warp_argmax(float& value, int& index) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    float v = __shfl_xor_sync(~0u, value, o);
    int i = __shfl_xor_sync(~0u, index, o);
    argmax_take(value, index, v, i);
  }
}
