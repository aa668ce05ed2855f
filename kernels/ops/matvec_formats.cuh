// Owns how a matvec reads its weights: the granules of each format, codes to operands, scales to sums. `src/format.rs` has the layout.
//
// A granule is 512 bytes of codes, then the scales and zero points of its groups, row by row. A lane has 16 bytes of codes of row
// lane / 4: of every 32 of k the eight from (lane % 4) * 8 on, as of bf16 weights. So codes meet the staged x at the same places.
//
// On tensor cores codes are the A operand. Rows 0..7 are the first half of the k of a granule, rows 8..15 the second half; columns 0..3
// of B are x of the first half, columns 4..7 x of the second. One product then covers 8 rows of 32 of k, and a lane reads half of x.
// A lane has the sum of row lane / 4: of the first half if lane % 4 < 2, else of the second; so it needs the scales of one half only.
//   int8   bf16: the byte, shifted up by 128; a bf16 below 2^-125 counts in steps of 2^-133
//   int4   bf16: the bits, in the same steps. Pairs 1 and 3 of four lie four bits higher: they are 16 times as large, and meet x / 16
//   e4m3   fp16: one conversion from sm_89 on; on older GPUs its bits, moved, are the value * 2^-8, subnormals included
//   e2m1   bf16: its bits, moved, are the value * 2^-126 (`Code::spread`)
// All are exact. An offset of the operands is subtracted from the sum of a group (without groups: of all k) as `offset * sum(x)`, and
// sum(x) is a product with ones. The sum of a unit is multiplied by the power of two. x of bf16 products is staged times 2^64 (2^100 for
// e2m1), so it overflows from 2^64 (2^28) on. x of fp16 products is staged as fp16, times a power of two for each warp that brings its
// largest value to 2^12 .. 2^13: nothing overflows, and values 2^-26 of the largest are exact.
//
// Without tensor cores a lane multiplies the values themselves, in fp32. Scales are applied to sums in fp32: of groups after each
// group, of rows once.
#pragma once

// A granule: what a warp loads at once. OPERAND_ROWS rows (or parts of rows) of PART_BYTES, LANE_BYTES a lane.
constexpr int OPERAND_ROWS = 8, PART_BYTES = 64, LANE_BYTES = 16, GRANULE_BYTES = OPERAND_ROWS * PART_BYTES;

enum class Code : u32 { INT8, INT4, E4M3, E2M1 };
enum class ScaleCode : u32 { NONE, F32, F16, BF16, E4M3, E8M0, F16X6 };

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
// a * b of pairs of bf16.
__device__ __forceinline__ u32 bf16_pair_mul(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
  return r;
#else
  return bf16_pair(bf16_lo(a) * bf16_lo(b), bf16_hi(a) * bf16_hi(b));
#endif
}
// Two floats as fp16, rounded to nearest even.
__device__ __forceinline__ u32 f16_pair(float lo, float hi) {
#ifdef __CUDA_ARCH__
  u32 r;
  asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }" : "=r"(r) : "f"(lo), "f"(hi));
  return r;
#else
  return f16_bits(lo) | f16_bits(hi) << 16; // tests of ops on a CPU
#endif
}

__device__ __forceinline__ float f16_value(u32 bits) {
#ifdef __CUDA_ARCH__
  float v;
  asm("{ .reg .b16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(v) : "h"(u16(bits)));
  return v;
#else
  return f16_of(bits); // tests of ops on a CPU
#endif
}

__device__ __forceinline__ u32 word_of(const uint4 v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// How a lane's codes become numbers. `eight`: those in a block of 32 of k, as pairs of an operand; `value`: the i-th of them in fp32; `of_code`: one that is alone. Pairs
// 0 and 2 of k come first, then 1 and 3, as x is staged (`operand_byte`). An operand is (value + OFFSET) * 2^-OPERAND_SHIFT, and meets
// x * 2^X_SHIFT; in pairs 1 and 3 the operand is 2^SECOND_SHIFT times as large, and x is divided by that. AHEAD_MAX: registers for operands
// that are made before the input is there. More would spill (as compiled for sm_80 and sm_90a); operands of more steps spill earlier.
template <Code C>
struct Decode;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int AHEAD_REGISTERS = 64;
#else
constexpr int AHEAD_REGISTERS = 96;
#endif

template <>
struct Decode<Code::INT8> {
  static constexpr int BITS = 8, OPERAND_SHIFT = 133, X_SHIFT = 64, SECOND_SHIFT = 0, AHEAD_MAX = AHEAD_REGISTERS;
  static constexpr bool F16 = false;
  static constexpr float OFFSET = 128.f, ZERO = 0.f;
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 lo = word_of(codes, 2 * block) ^ 0x80808080u, hi = word_of(codes, 2 * block + 1) ^ 0x80808080u;
    return make_uint4(permute(lo, 0, 0x4140), permute(hi, 0, 0x4140), permute(lo, 0, 0x4342), permute(hi, 0, 0x4342));
  }
  static __device__ __forceinline__ float value(const uint4 codes, int block, int i) {
    return float(int(word_of(codes, 2 * block + i / 4) << (24 - i % 4 * 8)) >> 24);
  }
  static __device__ __forceinline__ float of_code(u32 code) { return value(make_uint4(code, 0, 0, 0), 0, 0); }
  static __device__ __forceinline__ float zero(u32 byte) { return float(int(byte << 24) >> 24); }
};

template <>
struct Decode<Code::E4M3> {
  static constexpr int BITS = 8, X_SHIFT = 0, SECOND_SHIFT = 0, AHEAD_MAX = AHEAD_REGISTERS;
  static constexpr bool F16 = true;
  static constexpr float OFFSET = 0.f, ZERO = 0.f;
#ifdef FP8_CVT
  static constexpr int OPERAND_SHIFT = 0;
  static __device__ __forceinline__ void four(u32 word, u32& lo, u32& hi) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(lo), "=r"(hi)
        : "r"(word));
  }
#else
  static constexpr int OPERAND_SHIFT = 8;
  static __device__ __forceinline__ void four(u32 word, u32& lo, u32& hi) {
    // Moves bytes to the tops of the halves, then exponent (4 bits) and mantissa (3 bits) down by one.
    const auto pair = [](u32 p) { return (p & 0x80008000u) | (p >> 1 & 0x3f803f80u); };
    lo = pair(permute(word, 0, 0x1404)), hi = pair(permute(word, 0, 0x3424));
  }
#endif
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    uint4 pairs;
    four(word_of(codes, 2 * block), pairs.x, pairs.z), four(word_of(codes, 2 * block + 1), pairs.y, pairs.w);
    return pairs;
  }
  static __device__ __forceinline__ float value(const uint4 codes, int block, int i) {
    const u32 code = word_of(codes, 2 * block + i / 4) >> i % 4 * 8;
    return __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
  }
  static __device__ __forceinline__ float of_code(u32 code) { return value(make_uint4(code, 0, 0, 0), 0, 0); }
  static __device__ __forceinline__ float zero(u32) { return 0.f; }
};

template <>
struct Decode<Code::INT4> {
  static constexpr int BITS = 4, OPERAND_SHIFT = 133, X_SHIFT = 64, SECOND_SHIFT = 4, AHEAD_MAX = AHEAD_REGISTERS;
  static constexpr bool F16 = false;
  static constexpr float OFFSET = 0.f, ZERO = 8.f;
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 w = word_of(codes, block), high = w >> 8;
    return make_uint4(w & 0x000f000fu, high & 0x000f000fu, w & 0x00f000f0u, high & 0x00f000f0u);
  }
  static __device__ __forceinline__ float value(const uint4 codes, int block, int i) {
    return float(word_of(codes, block) >> (i / 2 * 4 + i % 2 * 16) & 15);
  }
  static __device__ __forceinline__ float of_code(u32 code) { return value(make_uint4(code, 0, 0, 0), 0, 0); }
  static __device__ __forceinline__ float zero(u32 byte) { return float(byte); }
};

// a * b. Of a power of two a compiler would make shifts.
__device__ __forceinline__ u64 wide_product(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u64 r;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(r) : "r"(a), "r"(b));
  return r;
#else
  return u64(a) * b; // tests of ops on a CPU
#endif
}
// The larger number. A compiler that knows that one of both is a constant of one bit would take a test and a selection.
__device__ __forceinline__ u32 larger(u32 a, u32 b) {
#ifdef __CUDA_ARCH__
  u32 r;
  asm("max.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#else
  return a > b ? a : b; // tests of ops on a CPU
#endif
}

template <>
struct Decode<Code::E2M1> {
  static constexpr int BITS = 4, OPERAND_SHIFT = 126, X_SHIFT = 100, SECOND_SHIFT = 0, AHEAD_MAX = 64;
  static constexpr bool F16 = false;
  static constexpr float OFFSET = 0.f, ZERO = 0.f;
  // `eight` in the order of k. The sign goes to the top of a bf16, two bits to the low end of its exponent, and one to the top of its mantissa. `Code::spread` of
  // src/format.rs says where the bits of a pair lie in a word: three pairs as far from each other as here. Shifts to the left are multiplications, which have a pipe of their
  // own; those to the right take turns with the logic, which decides how long this takes.
  static __device__ __forceinline__ uint4 in_order(const uint4 codes, int block) {
    constexpr u32 PAIR = 0x81c081c0u;
    const u32 w = word_of(codes, block);
    const u64 turned = wide_product(w, 1u << 28);
    return make_uint4(w << 6 & PAIR, w << 2 & PAIR, (u32(turned >> 32) | u32(turned)) & PAIR, (w & 0x81808180u) | (w >> 8 & 0x00400040u));
  }
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const uint4 pairs = in_order(codes, block);
    return make_uint4(pairs.x, pairs.z, pairs.y, pairs.w);
  }
  static __device__ __forceinline__ float value(const uint4 codes, int block, int i) {
    const u32 pair = word_of(in_order(codes, block), i / 2);
    return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u) * 0x1p126f;
  }
  static __device__ __forceinline__ float of_code(u32 code) { return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f; }
  static __device__ __forceinline__ float zero(u32) { return 0.f; }
};

// Returns `v`. The compiler must compute it here, not later.
__device__ __forceinline__ uint4 made_here(uint4 v) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
#endif
  return v;
}
__device__ __forceinline__ u32 made_here(u32 v) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(v));
#endif
  return v;
}
__device__ __forceinline__ int made_here(int v) { return int(made_here(u32(v))); }
__device__ __forceinline__ float made_here(float v) { return __uint_as_float(made_here(__float_as_uint(v))); }

// Whether groups have minima: a configuration has the member only then. `scale * value + minimum` is a weight: the minimum, too, comes in by
// the sum of x of its group.
template <class G, class = int>
constexpr bool MINIMA_OF = false;
template <class G>
constexpr bool MINIMA_OF<G, decltype(int(G::MINIMA))> = true;
// The words that a lane loaded minima in.
template <int WORDS>
struct MinimaWords {
  u32 minima[WORDS] = {};
};
template <>
struct MinimaWords<0> {};

// An unsigned integer below 64, from BIT on in `bits`, as fp32: the lowest bits of the mantissa of a power of two.
template <int BIT>
__device__ __forceinline__ float six_bits(u32 bits) {
  // Bit 23 is no part of a mantissa.
  constexpr int SHIFT = BIT + 6 > 23 ? BIT : 0, AT = BIT - SHIFT;
  constexpr u32 POWER = u32(127 + 23 - AT) << 23;
  return __uint_as_float((bits >> SHIFT & 63u << AT) | POWER) - __uint_as_float(POWER);
}
// ScaleCode::F16X6: what a row of a granule has for PAIRS of its groups, two groups each. The granule has after its codes, for each row, a scale and a minimum (fp16); then 24 bits for each pair, the low 16 of all, then the high 8 of all: two scales, two minima.
// Where a row has two pairs, its low bits follow its scale and minimum. Scale and minimum of a group are products with those of the row, exact in fp32; a minimum is negated.
template <int PAIRS>
struct SixBits {
  u32 row, pairs[PAIRS];
  // Bytes from the scale of a row to that of the next one.
  template <int ROW_PAIRS>
  static __device__ __forceinline__ constexpr int row_bytes() { return ROW_PAIRS == 2 ? 8 : 4; }
  // `after`: past the codes. ROW_PAIRS: pairs of a row. `first`: the first pair here.
  template <int ROW_PAIRS>
  __device__ __forceinline__ void read(const u8* after, int of_row, int first) {
    const u8* high = after + (4 + 2 * ROW_PAIRS) * OPERAND_ROWS + of_row * ROW_PAIRS + first;
    if constexpr (ROW_PAIRS == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(after + 8 * of_row);
      row = v.x;
      // Two bytes of the low bits, one of the high ones, and a byte of zeros.
#pragma unroll
      for (int i = 0; i < PAIRS; i++) pairs[i] = permute(v.y, high[i], 0x5410u + (first + i) * 0x22u);
    } else {
      row = *reinterpret_cast<const u32*>(after + 4 * of_row);
      const u8* low = after + 4 * OPERAND_ROWS + 2 * (of_row * ROW_PAIRS + first);
#pragma unroll
      for (int i = 0; i < PAIRS; i++) pairs[i] = u32(*reinterpret_cast<const u16*>(low + 2 * i)) | u32(high[i]) << 16;
    }
  }
  __device__ __forceinline__ float scale(int group) const {
    const u32 bits = pairs[group / 2];
    return f16_value(row & 0xffff) * (group % 2 == 0 ? six_bits<0>(bits) : six_bits<6>(bits));
  }
  __device__ __forceinline__ float minimum(int group) const {
    const u32 bits = pairs[group / 2];
    return -f16_value(row >> 16) * (group % 2 == 0 ? six_bits<12>(bits) : six_bits<18>(bits));
  }
};
// What a lane holds of scales of six bits: those of its only group, or what they are made of. Nothing where scales have other forms.
template <bool SIX, bool OWN, int PAIRS>
struct HeldSixBits {};
template <int PAIRS>
struct HeldSixBits<true, false, PAIRS> {
  SixBits<PAIRS> six = {};
};
template <int PAIRS>
struct HeldSixBits<true, true, PAIRS> {
  float own_scale = 0.f, own_minimum = 0.f;
};

template <bool, class A, class B>
struct Either {
  typedef A type;
};
template <class A, class B>
struct Either<false, A, B> {
  typedef B type;
};

// How a matvec of configuration G reads its weights. This one: plain weights.
template <class M, class G, class = int>
struct Coding {
  static constexpr bool CODED = false, GROUPED = false, ROW_SCALES = false, BOTH = false;
  static constexpr int BITS = ElemOf<M::WEIGHT>::BYTES * 8, BYTES = GRANULE_BYTES, PAD = 32, X_SHIFT = 0, SECOND_SHIFT = 0;
  static constexpr int OPERAND_WORDS = 0, AHEAD_MAX = 0;
  template <bool>
  using Held = uint4;
  template <bool>
  static __device__ __forceinline__ uint4 read(const u8* lane_at, int) { return *reinterpret_cast<const uint4*>(lane_at); }
};

// Bytes of a scale, and the value of the scale in the lowest bits of a word.
template <ScaleCode C>
constexpr int SCALE_BYTES_OF = C == ScaleCode::F32 ? 4 : C == ScaleCode::F16 || C == ScaleCode::BF16 ? 2 : 1; // not of F16X6
template <ScaleCode C>
__device__ __forceinline__ float scale_value(u32 bits) {
  if constexpr (C == ScaleCode::F32) return __uint_as_float(bits);
  if constexpr (C == ScaleCode::F16) return f16_value(bits & 0xffff);
  if constexpr (C == ScaleCode::BF16) return __uint_as_float(bits << 16);
  const u32 code = bits & 0xff;
  // Code 0 is 2^-127, half of the smallest normal number of fp32.
  if constexpr (C == ScaleCode::E8M0) return __uint_as_float(larger(code << 23, 1u << 22));
  return __uint_as_float((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
}

template <class M, class G>
struct Coding<M, G, decltype(int(G::CODE))> {
  typedef Decode<G::CODE> Codes;
  static constexpr bool CODED = true, GROUPED = G::GROUP_K > 0, ROW_SCALES = G::ROW_SCALES;
  static constexpr int BITS = Codes::BITS, BYTES = G::GRANULE_BYTES, PAD = PART_BYTES * 8 / BITS;
  static constexpr int BLOCKS = PAD / 32; // operands of 32 of k in a granule
  static_assert(G::UNIT_ROWS == OPERAND_ROWS, "units of codes have 8 rows");
  static_assert(!GROUPED || G::GROUP_K % 32 == 0, "a group is whole operands");
  static_assert(GROUPED || Codes::ZERO == 0.f, "zero points are of groups");
  // Groups of a row in a granule, and operands of one group in it.
  static constexpr int GROUPS = GROUPED ? ceil_div(PAD, G::GROUP_K > 0 ? G::GROUP_K : 1) : 1, GROUP_BLOCKS = BLOCKS / GROUPS;
  static constexpr int SCALE_BYTES = SCALE_BYTES_OF<G::SCALE_CODE>;
  // With tensor cores a lane has the sums of half of a granule, without them those of all of it.
  static constexpr bool TENSOR = STAGE_BF16<M>, MINIMA = MINIMA_OF<G>;
  static_assert(!MINIMA || (GROUPED && !G::ZEROS), "minima are of groups, in the place of zero points");
  // Whether scales and minima have six bits each.
  static constexpr bool SIX = G::SCALE_CODE == ScaleCode::F16X6;
  static_assert(!SIX || (MINIMA && GROUPS % 2 == 0), "groups of six bits are pairs, with minima");
  // The zero point of codes for which none is stored.
  static constexpr float ZERO = MINIMA ? 0.f : Codes::ZERO;
  static constexpr int HALF_BLOCKS = BLOCKS / 2;
  // Whether each of the four lanes of a row takes one group: a product on tensor cores gives the sums of a half to two lanes, and to unpack six
  // bits takes as long as to make an operand.
  static constexpr bool OWN_GROUP = TENSOR && SIX && GROUPS == 4;
  // Groups of a row that a lane has sums of.
  static constexpr int LANE_GROUPS = OWN_GROUP ? 1 : TENSOR && GROUPS > 1 ? GROUPS / 2 : GROUPS;
  static constexpr float OFFSET = TENSOR ? Codes::OFFSET : 0.f;
  // Whether offsets or zero points are subtracted from sums, which takes sums of x.
  static constexpr bool SUMS_X = G::ZEROS || MINIMA || (TENSOR ? OFFSET + ZERO != 0.f : GROUPED && ZERO != 0.f);
  // Scaled sums of both halves of k are added up, and one is taken at the end: a multiplication more takes less than to choose each time.
  static constexpr bool BOTH = TENSOR && GROUPED && !SUMS_X;
  static constexpr bool F16 = TENSOR && Codes::F16;
  static constexpr int X_SHIFT = TENSOR ? Codes::X_SHIFT : 0, SECOND_SHIFT = TENSOR ? Codes::SECOND_SHIFT : 0;
  // What is subtracted from the values of all groups, if no zero points are stored.
  static constexpr float OFFSET_OF_ALL = OFFSET + ZERO;

  // Registers of a granule's operands.
  static constexpr int OPERAND_WORDS = TENSOR ? BLOCKS * 4 : 0, AHEAD_MAX = Codes::AHEAD_MAX;
  // What a lane holds of a granule: its codes, or operands, if they are made AHEAD of the input; scales and zero points of its groups,
  // in the words that they were loaded in.
  template <bool AHEAD>
  struct Held : MinimaWords<MINIMA && !SIX ? ceil_div(LANE_GROUPS * SCALE_BYTES, 4) : 0>, HeldSixBits<SIX, OWN_GROUP, ceil_div(LANE_GROUPS, 2)> {
    uint4 codes[AHEAD ? BLOCKS : 1] = {};
    u32 scales[GROUPED && !SIX ? ceil_div(LANE_GROUPS * SCALE_BYTES, 4) : 1] = {};
    u32 zeros = 0;
    __device__ __forceinline__ uint4 operand(int block) const { return AHEAD ? codes[AHEAD ? block : 0] : Codes::eight(codes[0], block); }
  };

  // N bytes at a multiple of N.
  template <int N>
  static __device__ __forceinline__ void copy(u32* to, const u8* from) {
    if constexpr (N == 16) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (N == 8) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      to[0] = v.x, to[1] = v.y;
    } else if constexpr (N == 4) {
      to[0] = *reinterpret_cast<const u32*>(from);
    } else if constexpr (N == 2) {
      to[0] = *reinterpret_cast<const u16*>(from);
    } else {
      static_assert(N == 1, "a power of two of at most 16 bytes");
      to[0] = *from;
    }
  }
  // A lane's codes, from `lane_at` on, and its scales, from the beginning of the granule.
  template <bool AHEAD>
  static __device__ __forceinline__ Held<AHEAD> read(const u8* lane_at, int lane) {
    Held<AHEAD> held;
    const uint4 codes = *reinterpret_cast<const uint4*>(lane_at);
    if constexpr (AHEAD) {
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) held.codes[block] = made_here(Codes::eight(codes, block));
    } else {
      held.codes[0] = codes;
    }
    if constexpr (GROUPED) {
      const u8* after = lane_at - lane * LANE_BYTES + GRANULE_BYTES;
      const int begin = LANE_GROUPS < GROUPS ? lane % 4 / 2 * LANE_GROUPS : 0, first = lane / 4 * GROUPS + begin;
      if constexpr (OWN_GROUP) {
        const int group = lane % 4;
        SixBits<1> six;
        six.template read<GROUPS / 2>(after, lane / 4, group / 2);
        six.pairs[0] >>= group % 2 * 6;
        held.own_scale = six.scale(0), held.own_minimum = six.minimum(0);
        // Ahead of the input nothing else is to be done.
        if constexpr (AHEAD) held.own_scale = made_here(held.own_scale), held.own_minimum = made_here(held.own_minimum);
      } else if constexpr (SIX) {
        held.six.template read<GROUPS / 2>(after, lane / 4, begin / 2);
        // A lane's only group is the first of its pair then.
        if constexpr (LANE_GROUPS == 1) held.six.pairs[0] >>= begin % 2 * 6;
      } else {
        copy<LANE_GROUPS * SCALE_BYTES>(held.scales, after + first * SCALE_BYTES);
        if constexpr (G::ZEROS) copy<LANE_GROUPS>(&held.zeros, after + OPERAND_ROWS * GROUPS * SCALE_BYTES + first);
        if constexpr (MINIMA) copy<LANE_GROUPS * SCALE_BYTES>(held.minima, after + (OPERAND_ROWS * GROUPS + first) * SCALE_BYTES);
      }
    }
    return held;
  }

  static __device__ __forceinline__ float scale_of(u32 bits) { return scale_value<G::SCALE_CODE>(bits); }
  // Scale of the lane's g-th group, and what is subtracted from its values.
  template <bool AHEAD>
  static __device__ __forceinline__ float scale(const Held<AHEAD>& held, int g) {
    if constexpr (OWN_GROUP) return held.own_scale;
    else if constexpr (SIX) return held.six.scale(g);
    else return scale_of(held.scales[g * SCALE_BYTES / 4] >> g * SCALE_BYTES % 4 * 8);
  }
  template <bool AHEAD>
  static __device__ __forceinline__ float minimum(const Held<AHEAD>& held, int g) {
    if constexpr (OWN_GROUP) return held.own_minimum;
    else if constexpr (SIX) return held.six.minimum(g);
    else return scale_of(held.minima[g * SCALE_BYTES / 4] >> g * SCALE_BYTES % 4 * 8);
  }
  template <bool AHEAD>
  static __device__ __forceinline__ float offset(const Held<AHEAD>& held, int g) {
    return G::ZEROS ? OFFSET + Codes::zero(held.zeros >> g * 8 & 0xff) : OFFSET_OF_ALL;
  }
};
