// Owns how codes become the left operand of products by warpgroups. ops/matvec_formats.cuh has the formats and where their codes lie.
//
// Operands are the values themselves less their zero points, in the order of k: every one of them is a bf16. So the input is what it is for
// plain weights, nothing is taken from sums afterwards, and sums of groups need only their scales.
//   int4   a nibble in the mantissa of 128 is 128 + its value; 128 and the zero point are taken from that
//   int8   the same of the lower seven bits; 128 is taken from that and, where the highest bit is set, another 128
//   e4m3   bits moved are the value * 2^-120
//   e2m1   bits moved are the value * 2^-126
#pragma once

// a - b of pairs of bf16.
__device__ __forceinline__ u32 bf16_pair_sub(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  return bf16_pair(bf16_lo(a) - bf16_lo(b), bf16_hi(a) - bf16_hi(b));
#endif
}

// (a & b) | c in one instruction: of two constants the compiler would make two.
__device__ __forceinline__ u32 and_or(u32 a, u32 b, u32 c) {
#ifdef __CUDA_ARCH__
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
#else
  return (a & b) | c;
#endif
}

// `eight`: the eight codes of a lane in a block of 32 of k. `zero`: what it takes for a zero point. `raw`: the bits before they are multiplied by 2^RAW_POWER. They meet inputs
// that were stored times 2^INPUT_POWER, which are fewer: sums are then normal numbers, and an input of 2^28 and more overflows.
template <Code C>
struct WideOperand;

constexpr u32 BF16_128_PAIR = 0x43004300;

template <>
struct WideOperand<Code::INT4> {
  static constexpr int RAW_POWER = 0, INPUT_POWER = 0;
  static __device__ __forceinline__ u32 zero(float point) { return bf16_pair(128.f + point, 128.f + point); }
  template <bool>
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block, u32 zero) {
    const u32 w = word_of(codes, block);
    const auto pair = [&](int p) { return bf16_pair_sub(and_or(w >> 4 * p, 0x000f000fu, BF16_128_PAIR), zero); };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }
  template <bool ZEROS>
  static __device__ __forceinline__ uint4 raw(const uint4 codes, int block, u32 zero) {
    return eight<ZEROS>(codes, block, zero);
  }
};

template <>
struct WideOperand<Code::INT8> {
  static constexpr int RAW_POWER = 0, INPUT_POWER = 0;
  static __device__ __forceinline__ u32 zero(float point) { return bf16_pair(point, point); }
  template <bool ZEROS>
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block, u32 zero) {
    const auto pair = [&](u32 halves) {
      const u32 value = bf16_pair_sub((halves & 0x007f007fu) | BF16_128_PAIR, (halves & 0x00800080u) | BF16_128_PAIR);
      return ZEROS ? bf16_pair_sub(value, zero) : value;
    };
    const u32 lo = word_of(codes, 2 * block), hi = word_of(codes, 2 * block + 1);
    return make_uint4(pair(permute(lo, 0, 0x4140)), pair(permute(lo, 0, 0x4342)), pair(permute(hi, 0, 0x4140)), pair(permute(hi, 0, 0x4342)));
  }
  template <bool ZEROS>
  static __device__ __forceinline__ uint4 raw(const uint4 codes, int block, u32 zero) {
    return eight<ZEROS>(codes, block, zero);
  }
};

// Pairs of bf16 times 2^POWER.
template <int POWER>
__device__ __forceinline__ u32 times_power(u32 pair) {
  constexpr u32 BITS = u32(127 + POWER) << 7;
  if constexpr (POWER == 0)
    return pair;
  else
    return bf16_pair_mul(pair, BITS << 16 | BITS);
}
template <int POWER>
__device__ __forceinline__ uint4 times_power(const uint4 pairs) {
  return make_uint4(times_power<POWER>(pairs.x), times_power<POWER>(pairs.y), times_power<POWER>(pairs.z), times_power<POWER>(pairs.w));
}

template <>
struct WideOperand<Code::E4M3> {
  static constexpr int RAW_POWER = 120, INPUT_POWER = 100;
  static __device__ __forceinline__ u32 zero(float) { return 0; }
  template <bool>
  static __device__ __forceinline__ uint4 raw(const uint4 codes, int block, u32) {
    // Bytes in the upper halves of a pair.
    const auto pair = [](u32 tops) { return (tops & 0x80008000u) | (tops >> 4 & 0x07f007f0u); };
    const u32 lo = word_of(codes, 2 * block), hi = word_of(codes, 2 * block + 1);
    return make_uint4(pair(permute(lo, 0, 0x1404)), pair(permute(lo, 0, 0x3424)), pair(permute(hi, 0, 0x1404)), pair(permute(hi, 0, 0x3424)));
  }
  template <bool ZEROS>
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block, u32 zero) {
    return times_power<RAW_POWER>(raw<ZEROS>(codes, block, zero));
  }
};

template <>
struct WideOperand<Code::E2M1> {
  static constexpr int RAW_POWER = 126, INPUT_POWER = 100;
  static __device__ __forceinline__ u32 zero(float) { return 0; }
  template <bool>
  static __device__ __forceinline__ uint4 raw(const uint4 codes, int block, u32) {
    return Decode<Code::E2M1>::in_order(codes, block);
  }
  template <bool ZEROS>
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block, u32 zero) {
    return times_power<RAW_POWER>(raw<ZEROS>(codes, block, zero));
  }
};
