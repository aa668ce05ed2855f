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

// Element types of weights, cache and wire, as the generated configuration names them.
enum class Elem : int { F32, BF16 };

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

__device__ __forceinline__ float bf16_lo(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_hi(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float(u32(v.bits) << 16); }
__device__ __forceinline__ float widen(float v) { return v; }

// Round to nearest even. Every value here is finite or infinite; a NaN keeps its sign and becomes quiet.
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

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
