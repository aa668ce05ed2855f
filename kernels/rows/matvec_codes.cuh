// Owns how a matvec of rows reads and multiplies codes. ops/matvec_formats.cuh has the formats and where their codes lie.
//
// Operands of tensor cores are bf16. The bits of a code are placed so that they are its value times a power of two:
//   int8, int4   the code itself, as an integer below 2^8: the lowest bits of a bf16 count in steps of 2^-133, through all subnormals
//                and the first binade. Codes of int8 are shifted up by 128 for that
//   e4m3         bits moved into a bf16 are the value * 2^-120, subnormals included
//   e2m1         the value * 2^-126
// To make up for that, x is multiplied by 2^64 and the sums by the rest; x overflows from 2^64 on. Every product is exact.
//
// Few instructions unpack a word of codes, so operands may have another order than k, or another power of two. x is changed to match,
// once for each block of k: `Operand::input`.
//
// Offsets of codes (128 of int8, 8 of int4, zero points) are subtracted from sums as `offset * sum(x)` of a group: a group's sums start at
// minus that value. sum(x) is a product with a constant code. Scales of groups are applied to the fp32 sums of a group.
#pragma once

// How codes become operands. `eight`: the eight codes of a lane in a block of 32 of k; `input`: x of the same, to meet them.
// `constant`: the first half of the operand for eight codes that are the same integer; the second half is equal. FACTOR: what sums of
// products are multiplied by.
template <Code C>
struct RowsOperand;

constexpr int ROWS_X_SHIFT = 64;

// Pairs of bf16 times 2^even and 2^odd, in turn.
__device__ __forceinline__ uint4 times_power(const uint4 x, int even, int odd) {
  const u32 a = u32(127 + even) << 7, b = u32(127 + odd) << 7;
  return make_uint4(bf16_pair_mul(x.x, a << 16 | a), bf16_pair_mul(x.y, b << 16 | b), bf16_pair_mul(x.z, a << 16 | a),
                    bf16_pair_mul(x.w, b << 16 | b));
}

template <>
struct RowsOperand<Code::INT8> {
  static constexpr int OFFSET = 128;
  static constexpr float FACTOR = 0x1p69f;
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 lo = word_of(codes, 2 * block) ^ 0x80808080u, hi = word_of(codes, 2 * block + 1) ^ 0x80808080u;
    return make_uint4(permute(lo, 0, 0x4140), permute(lo, 0, 0x4342), permute(hi, 0, 0x4140), permute(hi, 0, 0x4342));
  }
  static __device__ __forceinline__ uint4 input(const uint4 x) { return times_power(x, ROWS_X_SHIFT, ROWS_X_SHIFT); }
  static __device__ __forceinline__ uint2 constant(u32 n) { return make_uint2(n << 16 | n, n << 16 | n); }
};

template <>
struct RowsOperand<Code::E4M3> {
  static constexpr int OFFSET = 0;
  static constexpr float FACTOR = 0x1p56f;
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 lo = word_of(codes, 2 * block), hi = word_of(codes, 2 * block + 1);
    const auto even = [](u32 w) { return (w << 8 & 0x80008000u) | (w << 4 & 0x07f007f0u); };
    const auto odd = [](u32 w) { return (w & 0x80008000u) | (w >> 4 & 0x07f007f0u); };
    return make_uint4(even(lo), odd(lo), even(hi), odd(hi));
  }
  // Bytes 0 and 2 of a word are a pair, then bytes 1 and 3.
  static __device__ __forceinline__ uint4 input(const uint4 from) {
    const uint4 x = times_power(from, ROWS_X_SHIFT, ROWS_X_SHIFT);
    return make_uint4(permute(x.x, x.y, 0x5410), permute(x.x, x.y, 0x7632), permute(x.z, x.w, 0x5410), permute(x.z, x.w, 0x7632));
  }
  static __device__ __forceinline__ uint2 constant(u32) { return make_uint2(0, 0); }
};

template <>
struct RowsOperand<Code::INT4> {
  static constexpr int OFFSET = 0;
  static constexpr float FACTOR = 0x1p69f;
  // Every other pair lies four bits higher, so it is sixteen times as large.
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) {
    const u32 w = word_of(codes, block), high = w >> 8;
    return make_uint4(w & 0x000f000fu, w & 0x00f000f0u, high & 0x000f000fu, high & 0x00f000f0u);
  }
  static __device__ __forceinline__ uint4 input(const uint4 x) { return times_power(x, ROWS_X_SHIFT, ROWS_X_SHIFT - 4); }
  static __device__ __forceinline__ uint2 constant(u32 n) { return make_uint2(n << 16 | n, n << 20 | n << 4); }
};

template <>
struct RowsOperand<Code::E2M1> {
  static constexpr int OFFSET = 0;
  static constexpr float FACTOR = 0x1p62f;
  static __device__ __forceinline__ uint4 eight(const uint4 codes, int block) { return Decode<Code::E2M1>::in_order(codes, block); }
  static __device__ __forceinline__ uint4 input(const uint4 x) { return times_power(x, ROWS_X_SHIFT, ROWS_X_SHIFT); }
  static __device__ __forceinline__ uint2 constant(u32) { return make_uint2(0, 0); }
};

// Scales and minima of six bits (ScaleCode::F16X6) of COLS rows of W with GROUPS groups each. Several lanes need the same ones, so each lane
// unpacks one, and gives it to the others as a pair of bf16, which has six bits exactly.
template <bool SIX, int COLS, int GROUPS>
struct SharedSixBits {};
template <int COLS, int GROUPS>
struct SharedSixBits<true, COLS, GROUPS> {
  u32 rows[COLS] = {}, own = 0;
  __device__ __forceinline__ void read_six(const u8* after, int lane, int row) {
    // A row of W belongs to four neighbouring lanes, or two rows to every fourth lane.
    const int at = COLS == 1 ? lane % GROUPS : lane / 4 % (COLS * GROUPS), group = at % GROUPS;
    SixBits<1> six;
    six.template read<GROUPS / 2>(after, row + at / GROUPS, group / 2);
    const u32 bits = six.pairs[0] >> group % 2 * 6;
    own = permute(__float_as_uint(six_bits<0>(bits)), __float_as_uint(six_bits<12>(bits)), 0x7632);
#pragma unroll
    for (int i = 0; i < COLS; i++) rows[i] = *reinterpret_cast<const u32*>(after + SixBits<1>::template row_bytes<GROUPS / 2>() * (row + i));
  }
  // Scale and minimum of a group, without the factors of its row; by all lanes of a warp.
  __device__ __forceinline__ float2 six(int lane, int col, int group) const {
    const u32 pair = COLS == 1 ? __shfl_sync(~0u, own, lane / GROUPS * GROUPS + group) : __shfl_sync(~0u, own, (col * GROUPS + group) * 4 + lane % 4);
    return make_float2(bf16_lo(pair), bf16_hi(pair));
  }
  __device__ __forceinline__ float2 factors(int col) const { return make_float2(f16_value(rows[col] & 0xffff), -f16_value(rows[col] >> 16)); }
};

// What a lane has of a granule: its codes; scales and zero points of COLS rows of W, in the words that they were loaded in.
template <class M, class G, int COLS>
struct RowsHeld : MinimaWords<MINIMA_OF<G> && !Coding<M, G>::SIX ? ceil_div(COLS * Coding<M, G>::GROUPS * Coding<M, G>::SCALE_BYTES, 4) : 0>,
                  SharedSixBits<Coding<M, G>::SIX, COLS, Coding<M, G>::GROUPS> {
  typedef Coding<M, G> Weights;
  static constexpr int GROUPS = Weights::GROUPS, SCALE_BYTES = COLS * GROUPS * Weights::SCALE_BYTES, ZERO_BYTES = COLS * GROUPS;
  uint4 codes = {};
  u32 scales[Weights::GROUPED && !Weights::SIX ? ceil_div(SCALE_BYTES, 4) : 1] = {};
  u32 zeros[G::ZEROS ? ceil_div(ZERO_BYTES, 4) : 1] = {};

  // `granule`: its first byte; `row`: the first row of W whose scales the lane needs.
  __device__ __forceinline__ void read(const u8* granule, int lane, int row) {
    codes = *reinterpret_cast<const uint4*>(granule + lane * LANE_BYTES);
    if constexpr (Weights::SIX) {
      this->read_six(granule + GRANULE_BYTES, lane, row);
    } else if constexpr (Weights::GROUPED) {
      const u8* from = granule + GRANULE_BYTES + row * (GROUPS * Weights::SCALE_BYTES);
      constexpr int ONCE = SCALE_BYTES < 16 ? SCALE_BYTES : 16;
#pragma unroll
      for (int i = 0; i < SCALE_BYTES / ONCE; i++) Weights::template copy<ONCE>(scales + 4 * i, from + 16 * i);
      if constexpr (Weights::MINIMA) {
        const u8* least = from + OPERAND_ROWS * (GROUPS * Weights::SCALE_BYTES);
#pragma unroll
        for (int i = 0; i < SCALE_BYTES / ONCE; i++) Weights::template copy<ONCE>(this->minima + 4 * i, least + 16 * i);
      }
      if constexpr (G::ZEROS)
        Weights::template copy<ZERO_BYTES>(zeros, granule + GRANULE_BYTES + OPERAND_ROWS * GROUPS * Weights::SCALE_BYTES + row * GROUPS);
    }
  }
  __device__ __forceinline__ float scale(int col, int group) const {
    const int at = (col * GROUPS + group) * Weights::SCALE_BYTES;
    return Weights::scale_of(scales[at / 4] >> at % 4 * 8);
  }
  // Of powers of two (ScaleCode::E8M0) twice the scale: the smallest is then a normal number, whose exponent is an addition away. Packs have none of 2^127.
  static constexpr bool TWICE = Weights::GROUPED && G::SCALE_CODE == ScaleCode::E8M0;
  __device__ __forceinline__ float scale_of_sum(int col, int group) const {
    if constexpr (TWICE) {
      const int place = col * GROUPS + group, byte = place % 4;
      const u32 word = scales[place / 4], exponent = byte == 3 ? u32(wide_product(word, 1u << 31) >> 32) : word << (23 - byte * 8);
      return __uint_as_float((exponent + (1u << 23)) & 0x7f800000u);
    } else {
      return scale(col, group);
    }
  }
  __device__ __forceinline__ float minimum(int col, int group) const {
    const int at = (col * GROUPS + group) * Weights::SCALE_BYTES;
    return Weights::scale_of(this->minima[at / 4] >> at % 4 * 8);
  }
  // The stored zero point.
  __device__ __forceinline__ float zero(int col, int group) const {
    const int at = col * GROUPS + group;
    return Weights::Codes::zero(zeros[at / 4] >> at % 4 * 8 & 0xff);
  }
};

// The words of rows g and g + 8 of a tile, as a product takes them: in four neighbouring registers.
template <int N>
__device__ __forceinline__ void interleave(uint4 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const uint4 lo = x[i], hi = x[i + 1];
    x[i] = made_here(make_uint4(lo.x, hi.x, lo.y, hi.y)), x[i + 1] = made_here(make_uint4(lo.z, hi.z, lo.w, hi.w));
  }
}

// Products of a block of k on tensor cores, for `RowsMatVecTensor`. PIECES: what a lane holds of x in a block, AT_ONCE: units at once.
template <class M, class G, class S, int PIECES, int AT_ONCE, class = int>
struct RowsCodes {
  struct Input {};
  static constexpr float FACTOR = 1.f;

  // Plain weights meet x as it is. Without a norm, the words of a tile would stay in the registers that they were loaded to, and be moved
  // before each product. The compiler does not know that none is all ones, so it must make this minimum in another register.
  static __device__ __forceinline__ void prepare(const uint4 (&from)[PIECES], uint4 (&x)[PIECES], Input&) {
    constexpr bool TILE = M::ROWS >= WARP_ROWS, COPY = TILE && G::NORM == Norm::NONE;
    constexpr u32 MOST = NO_WORD - 1;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const uint4 v = from[i];
      x[i] = COPY ? make_uint4(min(v.x, MOST), min(v.y, MOST), min(v.z, MOST), min(v.w, MOST)) : v;
    }
    if constexpr (TILE) interleave(x);
  }
};

template <class M, class G, class S, int PIECES, int AT_ONCE>
struct RowsCodes<M, G, S, PIECES, AT_ONCE, decltype(int(G::CODE))> {
  typedef Coding<M, G> Weights;
  typedef RowsOperand<G::CODE> Operand;
  static constexpr int GROUPS = M::ROWS / 8, BLOCKS = Weights::BLOCKS, WARP_GRANULES = S::WARP_GRANULES;
  // 16 rows are the rows of a product and a unit its columns; 8 rows are the columns, and two units the rows.
  static constexpr int LANE_SUMS = 2 * GROUPS;
  // Rows of the step, and rows of a unit, that a lane has sums of.
  static constexpr int LANE_ROWS = LANE_SUMS / (GROUPS == 1 ? 1 : 2), LANE_COLS = GROUPS == 1 ? 1 : 2;
  static __device__ __forceinline__ constexpr int row_of(int sum) { return GROUPS == 1 ? sum : sum / 2; }
  static __device__ __forceinline__ constexpr int col_of(int sum) { return GROUPS == 1 ? 0 : sum % 2; }
  static_assert(GROUPS <= 2, "a step has 8 or 16 rows");
  static_assert(GROUPS > 1 || AT_ONCE == 2, "of 8 rows two units are one product");
  typedef RowsHeld<M, G, LANE_COLS> Held;

  static constexpr float FACTOR = Operand::FACTOR * (Held::TWICE ? 0.5f : 1.f);
  static constexpr int OFFSET = Operand::OFFSET + int(Weights::ZERO);
  static constexpr bool SUMS_X = G::ZEROS || Weights::MINIMA || OFFSET != 0;
  // Parts of a block of k whose sums are taken by themselves: groups, or, where there are none, the block.
  static constexpr int RUNS = Weights::GROUPED ? WARP_GRANULES * Weights::GROUPS : 1, RUN_BLOCKS = WARP_GRANULES * BLOCKS / RUNS;
  // A product waits for the one before it on the same sums, so two sets alternate if there is only one product at a time, unless other runs come between.
  static constexpr int SETS = (GROUPS == 1 || AT_ONCE == 1) && RUN_BLOCKS > 1 ? 2 : 1;

  // For each run, what is subtracted from its sums; or, if zero points are stored, the sum of x to multiply them by.
  struct Input {
    float taken[RUNS][LANE_ROWS];
  };

  // One half of the products of a block of 32 of k: of two units (8 rows), or of one unit with a tile.
  static __device__ __forceinline__ void product_of_units(float (&first)[LANE_SUMS], float (&second)[LANE_SUMS], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                                          u32 b1) {
    tensor_product(first[0], first[1], second[0], second[1], a0, a1, a2, a3, b0, b1);
  }
  static __device__ __forceinline__ void product_of_tile(float (&d)[LANE_SUMS], const uint4 a, u32 b0, u32 b1) {
    tensor_product(d[0], d[1], d[2], d[3], a.x, a.y, a.z, a.w, b0, b1);
  }

  // Turns a block of x into operands, and sums it up.
  static __device__ __forceinline__ void prepare(const uint4 (&from)[PIECES], uint4 (&x)[PIECES], Input& input) {
#pragma unroll
    for (int i = 0; i < PIECES; i++) x[i] = Operand::input(from[i]);
    if constexpr (GROUPS > 1) interleave(x);
    if constexpr (SUMS_X) {
      const uint2 n = Operand::constant(G::ZEROS || Weights::MINIMA ? 1 : OFFSET);
#pragma unroll
      for (int r = 0; r < RUNS; r++) {
        float d[LANE_SUMS] = {}, unused[LANE_SUMS] = {};
#pragma unroll
        for (int i = r * RUN_BLOCKS; i < (r + 1) * RUN_BLOCKS; i++) {
          if constexpr (GROUPS == 1) {
            product_of_units(d, unused, n.x, n.x, n.y, n.y, x[i].x, x[i].y);
            product_of_units(d, unused, n.x, n.x, n.y, n.y, x[i].z, x[i].w);
          } else {
            product_of_tile(d, x[i * GROUPS], n.x, n.y);
            product_of_tile(d, x[i * GROUPS + 1], n.x, n.y);
          }
        }
#pragma unroll
        for (int k = 0; k < LANE_SUMS; k++)
          if (col_of(k) == 0) input.taken[r][row_of(k)] = d[k];
      }
    }
  }

  typedef float Sums[AT_ONCE][1][LANE_SUMS];
  // Sums of a run, in sets.
  typedef float RunSums[SETS][AT_ONCE][LANE_SUMS];

  // Multiplies the next chunks, of `AT_ONCE` units or of a lone one that stands for both, with a block of x. A granule is read while the one
  // before it is multiplied: all of them at once would take the registers of x.
  static __device__ __forceinline__ void multiply(Context<M>& c, int block, bool lone, const uint4 (&x)[PIECES], const Input& input, Sums& d) {
    RowsChunks<M, AT_ONCE> chunks(c, lone);
    Held w[2][AT_ONCE];
    RunSums all = {};
    if constexpr (!Weights::GROUPED) begin(d, input, all);
    read(c, chunks, block, 0, w[0]);
#pragma unroll
    for (int j = 0; j < WARP_GRANULES; j++) {
      if (j + 1 < WARP_GRANULES) read(c, chunks, block, j + 1, w[(j + 1) % 2]);
      if (j == (WARP_GRANULES > 1 ? WARP_GRANULES - 2 : 0)) chunks.release(c);
      if constexpr (Weights::GROUPED)
        multiply_groups(c, j, x, input, w[j % 2], d);
      else
        multiply_blocks<BLOCKS>(j * BLOCKS, x, w[j % 2], all);
    }
    if constexpr (!Weights::GROUPED)
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
        for (int k = 0; k < LANE_SUMS; k++) d[u][0][k] = total(all, u, k);
  }
  static __device__ __forceinline__ float total(const RunSums& y, int unit, int k) { return SETS == 2 ? y[0][unit][k] + y[1][unit][k] : y[0][unit][k]; }
  static __device__ __forceinline__ void begin(const Sums& d, const Input& input, RunSums& y) {
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
      for (int k = 0; k < LANE_SUMS; k++) y[0][u][k] = SUMS_X ? d[u][0][k] - input.taken[0][row_of(k)] : d[u][0][k];
  }
  template <class C>
  static __device__ __forceinline__ void read(const Context<M>& c, const C& chunks, int block, int j, Held (&w)[AT_ONCE]) {
    const int row = GROUPS == 1 ? c.lane() / 4 : c.lane() % 4 * 2;
    // For a granule that does not exist any other one stands, because its input is zeros.
    const int at = S::exists(c, block, j) ? S::in_block(c, j) : 0;
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) w[u].read(chunks.slot[u] + at * Weights::BYTES, c.lane(), row);
  }
  // N blocks of 32 of k, from block `first` of x on.
  template <int N>
  static __device__ __forceinline__ void multiply_blocks(int first, const uint4 (&x)[PIECES], const Held (&w)[AT_ONCE], RunSums& y) {
#pragma unroll
    for (int i = first; i < first + N; i++) {
      uint4 v[AT_ONCE];
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) v[u] = Operand::eight(w[u].codes, i % BLOCKS);
      if constexpr (GROUPS == 1) {
        product_of_units(y[0][0], y[0][1], v[0].x, v[1].x, v[0].y, v[1].y, x[i].x, x[i].y);
        product_of_units(y[SETS - 1][0], y[SETS - 1][1], v[0].z, v[1].z, v[0].w, v[1].w, x[i].z, x[i].w);
      } else {
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) product_of_tile(y[0][u], x[i * GROUPS], v[u].x, v[u].y);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) product_of_tile(y[SETS - 1][u], x[i * GROUPS + 1], v[u].z, v[u].w);
      }
    }
  }
  // The groups of a granule, whose sums have scales of their own.
  static __device__ __forceinline__ void multiply_groups(const Context<M>& c, int granule, const uint4 (&x)[PIECES], const Input& input, const Held (&w)[AT_ONCE],
                                                         Sums& d) {
    // Of six bits: sums of a granule without the factors of its rows.
    float2 parts[AT_ONCE][LANE_SUMS] = {};
#pragma unroll
    for (int group = 0; group < Weights::GROUPS; group++) {
      const int r = granule * Weights::GROUPS + group;
      RunSums y = {};
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
        for (int k = 0; k < LANE_SUMS; k++) {
          if constexpr (Weights::MINIMA)
            y[0][u][k] = OFFSET == 0 ? 0.f : -float(OFFSET) * input.taken[r][row_of(k)];
          else if constexpr (G::ZEROS)
            y[0][u][k] = -(float(OFFSET - int(Weights::Codes::ZERO)) + w[u].zero(col_of(k), group)) * input.taken[r][row_of(k)];
          else if constexpr (SUMS_X)
            y[0][u][k] -= input.taken[r][row_of(k)];
        }
      multiply_blocks<RUN_BLOCKS>(r * RUN_BLOCKS, x, w, y);
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++)
#pragma unroll
        for (int k = 0; k < LANE_SUMS; k++) {
          const float sum = total(y, u, k);
          if constexpr (Weights::SIX) {
            const float2 own = w[u].six(c.lane(), col_of(k), group);
            float2& part = parts[u][k];
            part.x += own.x * sum, part.y += own.y * input.taken[r][row_of(k)];
            if (group == Weights::GROUPS - 1) {
              const float2 factors = w[u].factors(col_of(k));
              d[u][0][k] += factors.x * part.x, d[u][0][k] += factors.y * part.y;
            }
          } else {
            d[u][0][k] += w[u].scale_of_sum(col_of(k), group) * sum;
          }
          if constexpr (Weights::MINIMA && !Weights::SIX) d[u][0][k] += w[u].minimum(col_of(k), group) * input.taken[r][row_of(k)];
        }
    }
  }
};

// Codes without tensor cores, for `RowsMatVecLanes`: the values themselves, in fp32. `x(row)`: x of the granule, of one row of the step.
template <class M, class G>
struct RowsCodesLanes {
  typedef Coding<M, G> Weights;

  // A lane's part of a granule, for all rows.
  template <class X>
  static __device__ __forceinline__ void add(const Context<M>& c, const u8* granule, X x, float (&d)[M::ROWS]) {
    constexpr int RUNS = Weights::GROUPS, RUN_BLOCKS = Weights::BLOCKS / RUNS;
    RowsHeld<M, G, 1> held;
    held.read(granule, c.lane(), c.lane() / 4);
#pragma unroll
    for (int g = 0; g < RUNS; g++) {
      const float zero = G::ZEROS ? held.zero(0, g) : Weights::ZERO;
      float scale = 1.f, least = 0.f;
      if constexpr (Weights::SIX) {
        const float2 own = held.six(c.lane(), 0, g), factors = held.factors(0);
        scale = factors.x * own.x, least = factors.y * own.y;
      } else if constexpr (Weights::GROUPED) {
        scale = held.scale(0, g);
        if constexpr (Weights::MINIMA) least = held.minimum(0, g);
      }
      float w[RUN_BLOCKS][8];
#pragma unroll
      for (int b = 0; b < RUN_BLOCKS; b++)
#pragma unroll
        for (int i = 0; i < 8; i++) w[b][i] = Weights::Codes::value(held.codes, g * RUN_BLOCKS + b, i) - zero;
#pragma unroll
      for (int row = 0; row < M::ROWS; row++) {
        float sum = 0.f, sum_x = 0.f;
#pragma unroll
        for (int b = 0; b < RUN_BLOCKS; b++)
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float value = x(row)[(g * RUN_BLOCKS + b) * 32 + c.lane() % 4 * 8 + i];
            sum += value * w[b][i];
            if constexpr (Weights::MINIMA) sum_x += value;
          }
        d[row] += scale * sum;
        if constexpr (Weights::MINIMA) d[row] += least * sum_x;
      }
    }
  }
};
