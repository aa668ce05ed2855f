// Owns how a matvec reads its weights: the granules of each format, codes to operands, scales to sums. `src/format.rs` has the layout.
//
// A granule is 512 bytes of codes, then the scales and zero points of its groups, row by row. A lane has 16 bytes of codes of row
// lane / 4: of every 32 of k the eight from (lane % 4) * 8 on, as of bf16 weights. So codes become the operand that plain weights are,
// and meet the staged x at the same places:
//   int8   low seven bits under the exponent of 128 are 128 + low; less 128, or 256 of a negative one. Exact.
//   e4m3   its bits moved are the value * 2^-120 in bf16, subnormals included; one product by 2^120. Exact.
//   int4   its bits under the exponent of 128 are 128 + q; (128 + zero) * sum(x) of a group is taken from the sum once.
//   e2m1   its bits moved are the value * 2^-126; one product by 2^126. Exact.
// Scales are applied to sums in fp32: of groups after each group, of rows once.
#pragma once

// A granule: what a warp loads at once. OPERAND_ROWS rows (or parts of rows) of PART_BYTES, LANE_BYTES a lane.
constexpr int OPERAND_ROWS = 8, PART_BYTES = 64, LANE_BYTES = 16, GRANULE_BYTES = OPERAND_ROWS * PART_BYTES;

enum class Code : u32 { INT8, INT4, E4M3, E2M1 };
enum class ScaleCode : u32 { NONE, F32, F16, BF16, E4M3, E8M0 };

// Byte i of the result is byte (selector >> 4i) & 7 of b:a; with bit 3 set, its sign eight times.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) {
#ifdef __CUDA_ARCH__
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
#else
  u32 r = 0; // tests of ops on a CPU
  for (int i = 0; i < 4; i++) {
    const u32 s = selector >> 4 * i & 15, byte = u32((u64(b) << 32 | a) >> 8 * (s & 7) & 0xff);
    r |= (s & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
  }
  return r;
#endif
}
// a * b + c of pairs of bf16, rounded once.
__device__ __forceinline__ u32 bf16_pair_fma(u32 a, u32 b, u32 c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
#else
  return bf16_pair(bf16_lo(a) * bf16_lo(b) + bf16_lo(c), bf16_hi(a) * bf16_hi(b) + bf16_hi(c));
#endif
}
constexpr u32 BF16_ONES = 0x3f803f80u, BF16_2_120 = 0x7b807b80u, BF16_2_126 = 0x7e807e80u, BF16_ZEROS = 0x80008000u;

__device__ __forceinline__ float f16_value(u32 bits) {
#ifdef __CUDA_ARCH__
  float v;
  asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "h"(u16(bits)));
  return v;
#else
  const u32 e = bits >> 10 & 31, m = bits & 1023;
  const float size = e == 0 ? m * 0x1p-24f : __uint_as_float((e + 112) << 23 | m << 13);
  return bits & 0x8000 ? -size : size;
#endif
}

// Two or eight codes as bf16 pairs, in the order of k.
template <Code C>
struct Decode;

template <>
struct Decode<Code::INT8> {
  static constexpr int BITS = 8;
  static constexpr float OFFSET = 0.f; // that is added to every value
  static __device__ __forceinline__ u32 pair(u32 word, u32 selector) {
    const u32 p = permute(word, 0, selector);
    return bf16_pair_fma((p & 0x007f007fu) | 0x43004300u, BF16_ONES, (p & 0x00800080u) | 0xc300c300u);
  }
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 lo = block == 0 ? codes.x : codes.z, hi = block == 0 ? codes.y : codes.w;
    return make_uint4(pair(lo, 0x4140), pair(lo, 0x4342), pair(hi, 0x4140), pair(hi, 0x4342));
  }
  static __device__ __forceinline__ float zero(u32 byte) { return float(int(byte << 24) >> 24); }
};

template <>
struct Decode<Code::E4M3> {
  static constexpr int BITS = 8;
  static constexpr float OFFSET = 0.f;
  static __device__ __forceinline__ u32 pair(u32 word, u32 selector) {
    // Sign, then four bits of exponent and three of mantissa four places below the top.
    return bf16_pair_fma((permute(word, 0, selector) << 4) & 0x87f087f0u, BF16_2_120, BF16_ZEROS);
  }
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 lo = block == 0 ? codes.x : codes.z, hi = block == 0 ? codes.y : codes.w;
    return make_uint4(pair(lo, 0x9180), pair(lo, 0xb3a2), pair(hi, 0x9180), pair(hi, 0xb3a2));
  }
  static __device__ __forceinline__ float zero(u32) { return 0.f; }
};

__device__ __forceinline__ u32 word_of(const uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <>
struct Decode<Code::INT4> {
  static constexpr int BITS = 4;
  static constexpr float OFFSET = 128.f;
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 w = word_of(codes, block);
    const auto pair = [w](int p) { return ((w >> 4 * p) & 0x000f000fu) | 0x43004300u; };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }
  static __device__ __forceinline__ float zero(u32 byte) { return float(byte); }
};

template <>
struct Decode<Code::E2M1> {
  static constexpr int BITS = 4;
  static constexpr float OFFSET = 0.f;
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 w = word_of(codes, block);
    // Sign to the top, exponent and mantissa to the lowest bit of the one and the highest of the other.
    const auto pair = [w](int p) {
      const u32 n = w >> 4 * p;
      return bf16_pair_fma((n << 12 & 0x80008000u) | (n << 6 & 0x01c001c0u), BF16_2_126, BF16_ZEROS);
    };
    return make_uint4(pair(0), pair(1), pair(2), pair(3));
  }
  static __device__ __forceinline__ float zero(u32) { return 0.f; }
};

// What a matvec of configuration G reads. Of plain weights, as they have always been read.
template <class M, class G, class = int>
struct Coding {
  static constexpr bool CODED = false, GROUPED = false, ROW_SCALES = false;
  static constexpr int BITS = ElemOf<M::WEIGHT>::BYTES * 8, BYTES = GRANULE_BYTES, PAD = 32;
  typedef uint4 Held;
  static __device__ __forceinline__ Held read(const u8* lane_at, int) { return *reinterpret_cast<const uint4*>(lane_at); }
  static __device__ __forceinline__ Held none() { return make_uint4(0, 0, 0, 0); }
};

template <class M, class G>
struct Coding<M, G, decltype(int(G::CODE))> {
  typedef Decode<G::CODE> Codes;
  static constexpr bool CODED = true, GROUPED = G::GROUP_K > 0, ROW_SCALES = G::ROW_SCALES;
  static constexpr int BITS = Codes::BITS, BYTES = G::GRANULE_BYTES, PAD = PART_BYTES * 8 / BITS;
  static constexpr int BLOCKS = PAD / 32; // operands of 32 of k in a granule
  static_assert(G::UNIT_ROWS == OPERAND_ROWS, "units of codes have 8 rows");
  static_assert(!GROUPED || G::GROUP_K % 32 == 0, "a group is whole operands");
  static_assert(GROUPED || Codes::OFFSET == 0.f, "offsets are taken from the sums of groups");
  // Groups of a row in a granule, and operands of one group in it.
  static constexpr int GROUPS = GROUPED ? ceil_div(PAD, G::GROUP_K > 0 ? G::GROUP_K : 1) : 1, GROUP_BLOCKS = BLOCKS / GROUPS;
  static constexpr int SCALE_BYTES = G::SCALE_CODE == ScaleCode::F32 ? 4 : G::SCALE_CODE == ScaleCode::F16 || G::SCALE_CODE == ScaleCode::BF16 ? 2 : 1;
  // Tensor cores leave a lane the sums of rows 2t and 2t + 1, t = lane % 4; without them it has those of row lane / 4.
  static constexpr int ROWS = STAGE_BF16<M> ? 2 : 1;
  static constexpr bool SUMS_X = GROUPED && (Codes::OFFSET != 0.f || G::ZEROS);

  struct Scaled {
    uint4 codes;
    u8 scales[ROWS * GROUPS * SCALE_BYTES] = {};
    u8 zeros[G::ZEROS ? ROWS * GROUPS : 1] = {};
  };
  template <bool, class A, class B>
  struct Either { typedef A type; };
  template <class A, class B>
  struct Either<false, A, B> { typedef B type; };
  typedef typename Either<GROUPED, Scaled, uint4>::type Held;

  template <int N>
  static __device__ __forceinline__ void copy(u8 (&to)[N], const u8* from) {
    // In the widest loads that their places allow: N bytes lie at a multiple of N.
    constexpr int W = N % 16 == 0 ? 16 : N % 8 == 0 ? 8 : N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < N; i += W) {
      u32 v[4] = {};
      if constexpr (W == 16) {
        const uint4 q = *reinterpret_cast<const uint4*>(from + i);
        v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
      } else if constexpr (W == 8) {
        const uint2 q = *reinterpret_cast<const uint2*>(from + i);
        v[0] = q.x, v[1] = q.y;
      } else if constexpr (W == 4) {
        v[0] = *reinterpret_cast<const u32*>(from + i);
      } else if constexpr (W == 2) {
        v[0] = *reinterpret_cast<const u16*>(from + i);
      } else {
        v[0] = from[i];
      }
#pragma unroll
      for (int b = 0; b < W; b++) to[i + b] = u8(v[b / 4] >> 8 * (b % 4));
    }
  }
  // A lane's codes, from `lane_at` on, and its scales, from the beginning of the granule.
  static __device__ __forceinline__ Held read(const u8* lane_at, int lane) {
    if constexpr (GROUPED) {
      const u8* after = lane_at - lane * LANE_BYTES + GRANULE_BYTES;
      const int first = STAGE_BF16<M> ? lane % 4 * 2 : lane / 4;
      Held held;
      held.codes = *reinterpret_cast<const uint4*>(lane_at);
      copy(held.scales, after + first * (GROUPS * SCALE_BYTES));
      if constexpr (G::ZEROS) copy(held.zeros, after + (OPERAND_ROWS * SCALE_BYTES + first) * GROUPS);
      return held;
    } else {
      return *reinterpret_cast<const uint4*>(lane_at);
    }
  }
  static __device__ __forceinline__ Held none() { return Held{}; }
  static __device__ __forceinline__ uint4 codes(const uint4& held) { return held; }
  static __device__ __forceinline__ uint4 codes(const Scaled& held) { return held.codes; }

  // Scale of a lane's row `r` in group `g`, and what is taken from its values.
  static __device__ __forceinline__ float scale(const Scaled& held, int r, int g) {
    const u8* at = held.scales + (r * GROUPS + g) * SCALE_BYTES;
    if constexpr (G::SCALE_CODE == ScaleCode::F32) return __uint_as_float(u32(at[0]) | u32(at[1]) << 8 | u32(at[2]) << 16 | u32(at[3]) << 24);
    if constexpr (G::SCALE_CODE == ScaleCode::F16) return f16_value(u32(at[0]) | u32(at[1]) << 8);
    if constexpr (G::SCALE_CODE == ScaleCode::BF16) return __uint_as_float(u32(at[0]) << 16 | u32(at[1]) << 24);
    // Zero is half of the least power of two that fp32 holds in full.
    if constexpr (G::SCALE_CODE == ScaleCode::E8M0) return __uint_as_float(at[0] == 0 ? 1u << 22 : u32(at[0]) << 23);
    const u32 magnitude = u32(at[0] & 0x7f) << 20;
    const float size = __uint_as_float(magnitude) * 0x1p120f;
    return at[0] & 0x80 ? -size : size;
  }
  static __device__ __forceinline__ float offset(const Scaled& held, int r, int g) {
    const float zero = G::ZEROS ? Codes::zero(held.zeros[G::ZEROS ? r * GROUPS + g : 0]) : (G::CODE == Code::INT4 ? 8.f : 0.f);
    return Codes::OFFSET + zero;
  }
};

// `eight` codes of a lane as floats, without what tensor cores add to them.
template <Code C>
__device__ __forceinline__ void decode_floats(const uint4 codes, int block, float (&w)[8]) {
  const uint4 v = Decode<C>::eight(codes, block);
#pragma unroll
  for (int i = 0; i < 4; i++) w[2 * i] = bf16_lo(word_of(v, i)), w[2 * i + 1] = bf16_hi(word_of(v, i));
}
