// Owns the integer types, bf16 storage and packed vectors that NVRTC does not bring along. No headers are included
// anywhere, so the bytes given to NVRTC are the whole input of a compile.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// bf16 is stored as its bits; arithmetic is always fp32.
struct bf16 {
  u16 bits;
};

// A code of a cached key or value: sign, 4 bits of exponent with bias 7, 3 bits of mantissa. All ones after the sign is a NaN.
struct e4m3 {
  u8 bits;
};

// Element types of weights, cache and wire, as the generated configuration names them. Only caches are FP8.
enum class Elem : int { F32, BF16, FP8 };

template <Elem E>
struct ElemOf;
template <>
struct ElemOf<Elem::F32> {
  typedef float type;
  static constexpr int BYTES = 4;
};
template <>
struct ElemOf<Elem::BF16> {
  typedef bf16 type;
  static constexpr int BYTES = 2;
};
template <>
struct ElemOf<Elem::FP8> {
  typedef e4m3 type;
  static constexpr int BYTES = 1;
};

__device__ __forceinline__ float bf16_lo(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float(u32(v.bits) << 16); }
__device__ __forceinline__ float widen(float v) { return v; }
// The bits of a code, moved to these places of an fp32, are its value * 2^-120; this holds for subnormals, too.
__device__ __forceinline__ float widen(e4m3 v) { return __uint_as_float(u32(v.bits & 0x80) << 24 | u32(v.bits & 0x7f) << 20) * 0x1p120f; }

// Rounds to nearest even. Any NaN becomes 0x7fff: rows/words.cuh relies on that.
__device__ __forceinline__ u32 bf16_pair(float lo, float hi) {
#if __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
  return pair;
#else
  u32 a = __float_as_uint(lo), b = __float_as_uint(hi);
  a = lo != lo ? 0x7fff0000u : a + 0x7fffu + ((a >> 16) & 1u);
  b = hi != hi ? 0x7fff0000u : b + 0x7fffu + ((b >> 16) & 1u);
  return (a >> 16) | (b & 0xffff0000u);
#endif
}
__device__ __forceinline__ void narrow(float v, float* to) { *to = v; }
__device__ __forceinline__ void narrow(float v, bf16* to) { to->bits = u16(bf16_pair(v, 0.f)); }

// Rounds to the nearest codes, ties to even. Values beyond 448 become 448; a NaN stays one. Generated kernels define FP8_CVT if the target
// record says `fp8_cvt`.
#ifdef FP8_CVT
__device__ __forceinline__ u32 e4m3_pair(float lo, float hi) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(hi), "f"(lo));
  return pair;
}
#else
__device__ __forceinline__ u32 e4m3_code(float v) {
  const u32 sign = __float_as_uint(v) >> 24 & 0x80u, size = __float_as_uint(v) & 0x7fffffffu;
  if (size > 0x7f800000u) return sign | 0x7fu;
  if (size >= 0x43e00000u) return sign | 0x7eu; // 448
  // Below 2^-6 codes count in steps of 2^-9, as fp32 does from 2^14 on: adding 2^14 rounds to such a step.
  if (size < 0x3c800000u) return sign | (__float_as_uint(__fadd_rn(__uint_as_float(size), 16384.f)) - 0x46800000u);
  return sign | (((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - (120u << 3));
}
__device__ __forceinline__ u32 e4m3_pair(float lo, float hi) { return e4m3_code(lo) | e4m3_code(hi) << 8; }
#endif
__device__ __forceinline__ void narrow(float v, e4m3* to) { to->bits = u8(e4m3_pair(v, 0.f)); }

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
