// rows: what a wave does with each row on its own. Embeds the token, adds a branch to the residual, or takes the residual of a row of the
// preceding chunk (TAKE); then computes the norm of the sum.
// With ROW_PARTS parts of the columns several blocks share a row. None has the whole norm then: each leaves the sum of its squares, and the
// product divides by the norm (WaveMatMul). After a product in pairs of blocks there is no such wave if an RMS norm follows.
//
// token    of the first step the host's, or what a row decided before: the arg-max over the best logits of all blocks
// residual (rows, HIDDEN)  fp32, in place
// branch   (rows, HIDDEN)  residual += BRANCH_SCALE * norm(branch): bf16 row by row, or BRANCH_PARTS sums of fp32, (BRANCH_PARTS, rows, HIDDEN)
// out      (rows, HIDDEN)  bf16, as products read it: normalised, or of parts times the norm's weight alone
// squares  (rows / 4, ROW_PARTS, 4)  fp32, of parts
//
// owner    of a part of a row: one warp, or several where one would lack registers. Of a step there are fewer rows than blocks: all warps
// assumes  HIDDEN is whole pieces of 8 columns
#pragma once

__device__ __forceinline__ void unpack8(const uint4 v, float (&to)[8]) {
  to[0] = bf16_lo(v.x), to[1] = bf16_hi(v.x), to[2] = bf16_lo(v.y), to[3] = bf16_hi(v.y);
  to[4] = bf16_lo(v.z), to[5] = bf16_hi(v.z), to[6] = bf16_lo(v.w), to[7] = bf16_hi(v.w);
}

// Place of the sum of squares of a part of a row: those of four rows lie side by side, so a warp loads them at once.
__device__ __forceinline__ u32 square_at(u32 parts, u32 part, u32 row) { return (row / 4 * parts + part) * 4 + row % 4; }

// One block's best score of a row, and its id: of each row those of all blocks side by side.
struct BestLogit {
  float score;
  i32 id;
};
// By a warp: the token that a row decided in the previous step.
template <class M>
__device__ __forceinline__ int wave_decided(const WaveContext<M>& c, u32 row) {
  constexpr int BLOCKS = all_blocks<M>();
  const BestLogit* all = c.template work<BestLogit>(M::BEST) + u64(row) * BLOCKS;
  float score = NEGATIVE_INFINITY;
  int id = 0x7fffffff;
#pragma unroll
  for (int i = 0; i < ceil_div(BLOCKS, 32); i++)
    if (i * 32 + c.lane() < BLOCKS) {
      const uint2 v = *reinterpret_cast<const uint2*>(all + i * 32 + c.lane());
      argmax_take(score, id, __uint_as_float(v.x), int(v.y));
    }
  warp_argmax(score, id);
  // If no logit was a number there is no id, but the next step reads a row of the table in any case.
  return min(id, M::VOCAB - 1);
}

// Eight columns of a row of the table of embeddings: of bf16 with one load, of codes one by one.
template <class M, class G, class = int>
struct WaveTable {
  const bf16* row;
  __device__ __forceinline__ WaveTable(const u8* table, u32 token) : row(reinterpret_cast<const bf16*>(table) + u64(token) * G::HIDDEN) {}
  __device__ __forceinline__ void read8(int col, float (&to)[8]) const { unpack8(__ldg(reinterpret_cast<const uint4*>(row + col)), to); }
};
template <class M, class G>
struct WaveTable<M, G, decltype(int(G::CODE))> : TableRow<M, G> {
  using TableRow<M, G>::TableRow;
  __device__ __forceinline__ void read8(int col, float (&to)[8]) const {
#pragma unroll
    for (int k = 0; k < 8; k++) to[k] = (*this)[col + k];
  }
};

template <class M, class G>
struct WaveRows {
  static constexpr int H = G::HIDDEN;
  static_assert(H % 8 == 0, "a lane has 8 columns at a time");

  struct Norms {
    float mean, factor;
  };
  static __device__ __forceinline__ void load8(const float* from, float (&to)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
  }
  // The same of what no wave writes: the compiler may load it before an earlier store.
  static __device__ __forceinline__ void load8_constant(const float* from, float (&to)[8]) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from + 4));
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
  }
  // Weight and bias of the columns that a lane has.
  template <Norm KIND>
  static __device__ __forceinline__ void load_gains(const WaveContext<M>& c, u32 weight, u32 bias, int col, float (&w)[8], float (&b)[8]) {
#pragma unroll
    for (int k = 0; k < 8; k++) w[k] = 1.f, b[k] = 0.f;
    if (weight != ~0u) load8_constant(c.template constant<float>(weight) + col, w);
    if (KIND == Norm::LAYER && bias != ~0u) load8_constant(c.template constant<float>(bias) + col, b);
  }
  // x = (x - mean) * factor * weight + bias
  template <Norm KIND>
  static __device__ __forceinline__ void apply(const WaveContext<M>& c, const Norms& n, u32 weight, u32 bias, int col, float (&x)[8]) {
    if constexpr (KIND != Norm::NONE) {
      float w[8], b[8];
      load_gains<KIND>(c, weight, bias, col, w, b);
#pragma unroll
      for (int k = 0; k < 8; k++) x[k] = (x[k] - n.mean) * n.factor * w[k] + b[k];
    }
  }

  // Warps of a row, so that a lane has few columns, and columns that a group of warps has at once. A block has about four rows of a chunk:
  // with two warps or more for each, all warps have something.
  static constexpr int PARTS = G::ROW_PARTS, PART_COLS = round_up(ceil_div(H, PARTS), 8);
  static constexpr int LANE_COLS = M::STEPS ? 8 : 32, WANTED = ceil_div(PART_COLS, 32 * LANE_COLS);
  static_assert(PARTS == 1 || G::BRANCH_NORM == Norm::NONE, "a branch is normalised by one block");
  static_assert(PARTS == 1 || !G::OUT || G::NORM == Norm::RMS, "the factor of a norm is all that is left to the product");
  static constexpr int WARPS = WANTED <= 1 ? 1 : WANTED <= 2 ? 2 : WANTED <= 4 ? 4 : WANTED <= 8 ? 8 : M::WARPS, STRIDE_LANES = WARPS * 32, STRIDE = STRIDE_LANES * 8, GROUPS = M::WARPS / WARPS;

  // Over all warps of the row. All warps of the block come here.
  static __device__ __forceinline__ float row_sum(WaveContext<M>& c, u32 round, int which, float v) {
    v = warp_sum(v);
    if constexpr (WARPS == 1) return v;
    float* stats = c.state().stats[round][which];
    if (c.lane() == 0) stats[c.warp()] = v;
    c.barrier();
    v = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) v += stats[c.warp() / WARPS * WARPS + w];
    return v;
  }
  // Columns of a part of a row that a lane has, 8 in each of CHUNKS; those past its end are zeros.
  static constexpr int CHUNKS = ceil_div(PART_COLS, STRIDE);
  typedef float Held[CHUNKS][8];
  template <class F>
  static __device__ __forceinline__ void each_of(const WaveContext<M>& c, int part, F f) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int at = i * STRIDE + c.tid() % STRIDE_LANES * 8, col = part * PART_COLS + at;
      if ((PART_COLS % STRIDE == 0 || at < PART_COLS) && (PARTS * PART_COLS == H || col < H)) f(i, col);
    }
  }
  // Whether a row is loaded while the one before it is normalised: of a chunk, if the residual is all that is read.
  static constexpr bool AHEAD = !M::STEPS && !G::EMBED && !G::TAKE && !G::BRANCH;

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 round = 0;
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
      for (u32 part = share.lo; part < share.hi; part++) {
        const auto mine = [&](u32 row) { return row + u32(c.warp() / WARPS); };
        Held x = {};
        if (AHEAD && share.row < end) load_residual(c, e, min(mine(share.row), end - 1), part, x);
#pragma unroll 1
        for (u32 row = share.row; row < end; row += GROUPS, round++) {
          Held next = {};
          if (AHEAD && row + GROUPS < end) load_residual(c, e, min(mine(row + GROUPS), end - 1), part, next);
          one(c, e, int(min(mine(row), end - 1)), int(part), mine(row) < end, round & 1, x);
          if (AHEAD)
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
#pragma unroll
              for (int k = 0; k < 8; k++) x[i][k] = next[i][k];
        }
      }
    }
  }
  // Over whole rows.
  template <Norm KIND>
  static __device__ __forceinline__ Norms statistics(WaveContext<M>& c, u32 round, int which, float eps, const Held& x) {
    const auto each = [&](auto f) { each_of(c, 0, f); };
    Norms n{0.f, 1.f};
    if constexpr (KIND == Norm::LAYER) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) sum += x[i][k];
      n.mean = row_sum(c, round, which, sum) * (1.f / H);
    }
    if constexpr (KIND != Norm::NONE) {
      float squares = 0.f;
      each([&](int i, int) {
#pragma unroll
        for (int k = 0; k < 8; k++) squares += (x[i][k] - n.mean) * (x[i][k] - n.mean);
      });
      n.factor = rsqrtf(row_sum(c, round, which + 1, squares) * (1.f / H) + eps);
    }
    return n;
  }
  // By whole warps. In a launch of steps the owner of a row tells the host.
  static __device__ __forceinline__ int token_of(const WaveContext<M>& c, int row, int part) {
    const WaveParams& p = c.p;
    const Row* r = p.rows + row;
    int token = __ldg(&r->token);
    if constexpr (M::STEPS) {
      if (c.step > 0 || token < 0) token = wave_decided<M>(c, c.step > 0 ? u32(row) : __ldg(&r->from));
      if (p.mailbox && part == 0 && c.tid() % STRIDE_LANES == 0) p.mailbox[1 + c.step * M::BLOCK_ROWS + row] = token;
    }
    return token;
  }
  static __device__ __forceinline__ void load_residual(const WaveContext<M>& c, const Wave& e, u32 row, u32 part, Held& x) {
    const float* const from = c.template work<float>(e.residual) + u64(row) * H;
    each_of(c, int(part), [&](int i, int col) { load8(from + col, x[i]); });
  }
  // If AHEAD, `x` is the residual of the row.
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, int row, int part, bool live, u32 round, Held& x) {
    const auto each = [&](auto f) { each_of(c, part, f); };
    float* residual = c.template work<float>(e.residual) + u64(row) * H;
    if constexpr (G::EMBED) {
      const WaveTable<M, G> table(c.template constant<u8>(e.table), u32(token_of(c, row, part)));
      each([&](int i, int col) {
        table.read8(col, x[i]);
#pragma unroll
        for (int k = 0; k < 8; k++) x[i][k] *= G::EMBED_SCALE;
      });
    } else if constexpr (!AHEAD) {
      const float* from = residual;
      if constexpr (G::TAKE) from = c.p.taken + u64(__ldg(&c.p.rows[row].from)) * H;
      each([&](int i, int col) { load8(from + col, x[i]); });
    }
    if constexpr (G::BRANCH) {
      Held y = {};
      if constexpr (G::BRANCH_PARTS > 0) {
        typedef PartsOfRows<M, G::BRANCH_PARTS> Parts;
        const float* parts = c.template work<float>(e.branch) + u64(row) * H;
        const u32 count = Parts::count(c.p.row_count), pitch = Parts::pitch(c.p.row_count) * H;
        each([&](int i, int col) {
#pragma unroll
          for (int s = 0; s < G::BRANCH_PARTS; s++) {
            // Not left early: so loads of several parts are on their way at once.
            float part[8] = {};
            if (u32(s) < count) load8(parts + u64(s) * pitch + col, part);
#pragma unroll
            for (int k = 0; k < 8; k++) y[i][k] += part[k];
          }
        });
      } else {
        const bf16* branch = c.template work<bf16>(e.branch) + u64(row) * H;
        each([&](int i, int col) { unpack8(*reinterpret_cast<const uint4*>(branch + col), y[i]); });
      }
      const Norms n = statistics<G::BRANCH_NORM>(c, round, 0, G::BRANCH_EPS, y);
      each([&](int i, int col) {
        apply<G::BRANCH_NORM>(c, n, e.branch_weight, e.branch_bias, col, y[i]);
#pragma unroll
        for (int k = 0; k < 8; k++) x[i][k] += G::BRANCH_SCALE * y[i][k];
      });
    }
    if ((G::EMBED || G::BRANCH || G::TAKE) && live)
      each([&](int i, int col) {
        *reinterpret_cast<float4*>(residual + col) = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
        *reinterpret_cast<float4*>(residual + col + 4) = make_float4(x[i][4], x[i][5], x[i][6], x[i][7]);
      });
    if constexpr (G::OUT) {
      u8* out = c.template work<u8>(e.out);
      // If a lane has few columns, its gains are loaded while warps add up.
      constexpr bool EARLY = CHUNKS <= 2 && M::STEPS && G::NORM != Norm::NONE;
      float w[EARLY ? CHUNKS : 1][8], b[EARLY ? CHUNKS : 1][8];
      if constexpr (EARLY) each([&](int i, int col) { load_gains<G::NORM>(c, e.norm_weight, e.norm_bias, col, w[i], b[i]); });
      Norms n{0.f, 1.f};
      if constexpr (PARTS == 1) {
        n = statistics<G::NORM>(c, round, 2, G::EPS, x);
      } else {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
#pragma unroll
          for (int k = 0; k < 8; k++) squares += x[i][k] * x[i][k];
        squares = row_sum(c, round, 3, squares);
        if (live && c.tid() % STRIDE_LANES == 0) c.template work<float>(e.squares)[square_at(PARTS, u32(part), u32(row))] = squares;
      }
      each([&](int i, int col) {
        if (!live) return;
        if constexpr (EARLY) {
#pragma unroll
          for (int k = 0; k < 8; k++) x[i][k] = (x[i][k] - n.mean) * n.factor * w[i][k] + b[i][k];
        } else {
          apply<G::NORM>(c, n, e.norm_weight, e.norm_bias, col, x[i]);
        }
        u32 pairs[4];
#pragma unroll
        for (int k = 0; k < 4; k++) pairs[k] = bf16_pair(x[i][2 * k], x[i][2 * k + 1]);
        typedef OutPlace<M, G, H> Place;
        // Eight columns side by side, or pairs that lanes side by side complete.
        if constexpr (M::SHARED) {
          *reinterpret_cast<uint4*>(out + Place::at(row, col)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        } else {
#pragma unroll
          for (int k = 0; k < 4; k++) *reinterpret_cast<u32*>(out + Place::at(row, col + 2 * k)) = pairs[k];
        }
      });
    }
  }
};
