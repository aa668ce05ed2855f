// rows: what a wave does with each row on its own. Embeds the token, adds a branch to the residual (of experts the sum over slots), or takes the residual of a row of
// the preceding chunk (TAKE); then computes the norm of the sum.
// With ROW_PARTS parts of the columns several blocks share a row. None has the whole norm then: each leaves the sum of its squares, and the
// product divides by the norm (WaveMatMul). After a product in pairs of blocks there is no such wave if an RMS norm follows.
//
// token    of the first step the host's, or what a row decided before: the arg-max over the best logits of all blocks
// residual (rows, HIDDEN)  fp32, in place
// branch   (rows, HIDDEN)  residual += BRANCH_SCALE * norm(branch): bf16 row by row, or BRANCH_PARTS sums of fp32, (BRANCH_PARTS, rows, HIDDEN). With SLOTS what
//                          `WaveSlots` adds up
// out      (rows, HIDDEN)  bf16, as products read it: normalised, or of parts times the norm's weight alone
// rows     (rows, HIDDEN)  the same row by row, with OUT_ROWS
// squares  (rows / 4, ROW_PARTS, 4)  fp32, of parts
//
// owner    in a step, of a part of a row: one warp, or several where one would lack registers. In a chunk, of rows side by side: a block
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

template <class G>
__device__ constexpr int slots_added(decltype(G::SLOTS)*) {
  return G::SLOTS;
}
template <class G>
__device__ constexpr int slots_added(...) {
  return 0;
}
// What experts made of a row: the sum over SLOTS slots of share * x, in their order, then the shared expert.
//
// x (places, COLS)             bf16: what the expert of each slot made
// branch (rows, SLOTS)         places
// squares_out (rows, SLOTS)    fp32: shares
// branch_weight (rows, COLS)   bf16: what the shared expert made
// bias (rows, SCORES)          fp32: scores; the sigmoid of score GATE times SHARED_SCALE is the share of the shared expert, if GATED; else that is SHARED_SCALE
template <class M, class G, int COLS>
struct WaveSlots {
  static constexpr int INPUTS = G::SLOTS + (G::SHARED ? 1 : 0);
  u32 rows[INPUTS]; // of x; the last one of the shared expert
  float share[INPUTS];
  WaveSlots() = default;
  __device__ __forceinline__ WaveSlots(const WaveContext<M>& c, const Wave& e, u32 row) {
#pragma unroll
    for (int s = 0; s < G::SLOTS; s++) {
      rows[s] = c.template work<u32>(e.branch)[row * G::SLOTS + s];
      share[s] = c.template work<float>(e.squares_out)[row * G::SLOTS + s];
    }
    if constexpr (G::SHARED) {
      rows[INPUTS - 1] = row;
      share[INPUTS - 1] = G::SHARED_SCALE;
      if constexpr (G::GATED) share[INPUTS - 1] = __fdividef(G::SHARED_SCALE, 1.f + exp_fast(-c.template work<float>(e.bias)[u64(row) * G::SCORES + G::GATE]));
    }
  }
  // Adds those of 8 columns.
  __device__ __forceinline__ void add8(const WaveContext<M>& c, const Wave& e, int col, float (&y)[8]) const {
    uint4 held[INPUTS];
#pragma unroll
    for (int s = 0; s < INPUTS; s++) held[s] = *reinterpret_cast<const uint4*>(c.template work<bf16>(s < G::SLOTS ? e.x : e.branch_weight) + u64(rows[s]) * COLS + col);
#pragma unroll
    for (int s = 0; s < INPUTS; s++) {
      float v[8];
      unpack8(held[s], v);
#pragma unroll
      for (int k = 0; k < 8; k++) y[k] += share[s] * v[k];
    }
  }
};

template <class M, class G>
struct WaveRowValues {
  static constexpr int H = G::HIDDEN;
  static constexpr bool SLOTS = slots_added<G>(nullptr) > 0;
  static_assert(H % 8 == 0, "a thread has 8 columns at a time");

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

  // `each` calls its argument for all that a thread has: its number, the first of 8 columns, and whether they exist. If not, they are others that do. `sum` adds up a value over
  // all threads of a row.
  // What is added to a row, before its norm.
  template <class Each, class Held>
  static __device__ __forceinline__ void load_branch(const WaveContext<M>& c, const Wave& e, u32 row, const Each& each, Held& y) {
    if constexpr (G::BRANCH_PARTS > 0) {
      typedef PartsOfRows<M, G::BRANCH_PARTS> Parts;
      const float* parts = c.template work<float>(e.branch) + u64(row) * H;
      const u32 count = Parts::count(c.p.row_count), pitch = Parts::pitch(c.p.row_count) * H;
      const auto add = [&](int s, int i, int col) { add8(parts + u64(s) * pitch + col, y[i]); };
      if constexpr (M::STEPS) {
        each([&](int i, int col, bool) {
#pragma unroll
          for (int s = 0; s < G::BRANCH_PARTS; s++) add(s, i, col);
        });
      } else {
        // All loads of four parts are on their way at once.
#pragma unroll 4
        for (int s = 0; s < int(count); s++) each([&](int i, int col, bool) { add(s, i, col); });
      }
    } else {
      const bf16* branch = c.template work<bf16>(e.branch) + u64(row) * H;
      each([&](int i, int col, bool) { unpack8(*reinterpret_cast<const uint4*>(branch + col), y[i]); });
    }
  }
  static __device__ __forceinline__ void add8(const float* from, float (&to)[8]) {
    float v[8];
    load8(from, v);
#pragma unroll
    for (int k = 0; k < 8; k++) to[k] += v[k];
  }
  template <class Each, class Sum, class Held>
  static __device__ __forceinline__ void add_branch(const WaveContext<M>& c, const Wave& e, const Each& each, const Sum& sum, Held& y, Held& x) {
    const Norms n = statistics<G::BRANCH_NORM>(G::BRANCH_EPS, each, sum, y);
    each([&](int i, int col, bool) {
      apply<G::BRANCH_NORM>(c, n, e.branch_weight, e.branch_bias, col, y[i]);
#pragma unroll
      for (int k = 0; k < 8; k++) x[i][k] += G::BRANCH_SCALE * y[i][k];
    });
  }
  template <class Each, class Held>
  static __device__ __forceinline__ void embed(const WaveContext<M>& c, const Wave& e, u32 token, const Each& each, Held& x) {
    const WaveTable<M, G> table(c.template constant<u8>(e.table), token);
    each([&](int i, int col, bool) {
      table.read8(col, x[i]);
#pragma unroll
      for (int k = 0; k < 8; k++) x[i][k] *= G::EMBED_SCALE;
    });
  }
  static __device__ __forceinline__ void store_residual(float* to, const float (&x)[8]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
  }
  static __device__ __forceinline__ void store_out(u8* out, u32 row, int col, const float (&x)[8]) {
    typedef OutPlace<M, G, H> Place;
    u32 pairs[4];
#pragma unroll
    for (int k = 0; k < 4; k++) pairs[k] = bf16_pair(x[2 * k], x[2 * k + 1]);
    // Eight columns side by side, or pairs that threads side by side complete.
    if constexpr (M::SHARED) {
      *reinterpret_cast<uint4*>(out + Place::at(row, col)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
#pragma unroll
      for (int k = 0; k < 4; k++) *reinterpret_cast<u32*>(out + Place::at(row, col + 2 * k)) = pairs[k];
    }
  }
  // Of whole rows.
  template <Norm KIND, class Each, class Sum, class Held>
  static __device__ __forceinline__ Norms statistics(float eps, const Each& each, const Sum& sum, const Held& x) {
    Norms n{0.f, 1.f};
    if constexpr (KIND == Norm::LAYER) {
      float own = 0.f;
      each([&](int i, int, bool exists) {
        float of = 0.f;
#pragma unroll
        for (int k = 0; k < 8; k++) of += x[i][k];
        own += exists ? of : 0.f;
      });
      n.mean = sum(0, own) * (1.f / H);
    }
    if constexpr (KIND != Norm::NONE) {
      float squares = 0.f;
      each([&](int i, int, bool exists) {
        float of = 0.f;
#pragma unroll
        for (int k = 0; k < 8; k++) of += (x[i][k] - n.mean) * (x[i][k] - n.mean);
        squares += exists ? of : 0.f;
      });
      n.factor = rsqrtf(sum(1, squares) * (1.f / H) + eps);
    }
    return n;
  }
};

// Of a step.
template <class M, class G>
struct WaveRowsOfStep : WaveRowValues<M, G> {
  typedef WaveRowValues<M, G> V;
  using typename V::Norms;
  static constexpr int H = G::HIDDEN;
  // Warps of a row, so that a lane has few columns, and columns that a group of warps has at once.
  static constexpr int PARTS = G::ROW_PARTS, PART_COLS = round_up(ceil_div(H, PARTS), 8);
  static constexpr int LANE_COLS = 8, WANTED = ceil_div(PART_COLS, 32 * LANE_COLS);
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
      if ((PART_COLS % STRIDE == 0 || at < PART_COLS) && (PARTS * PART_COLS == H || col < H)) f(i, col, true);
    }
  }
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 round = 0;
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
      for (u32 part = share.lo; part < share.hi; part++)
#pragma unroll 1
        for (u32 row = share.row; row < end; row += GROUPS, round++) {
          const u32 mine = row + u32(c.warp() / WARPS);
          one(c, e, int(min(mine, end - 1)), int(part), mine < end, round & 1);
        }
    }
  }
  // By whole warps. In a launch of steps the owner of a row tells the host.
  static __device__ __forceinline__ int token_of(const WaveContext<M>& c, int row, int part) {
    const WaveParams& p = c.p;
    const Row* r = p.rows + row;
    int token = __ldg(&r->token);
    if (c.step > 0 || token < 0) token = wave_decided<M>(c, c.step > 0 ? u32(row) : __ldg(&r->from));
    if (p.mailbox && part == 0 && c.tid() % STRIDE_LANES == 0) p.mailbox[1 + c.step * M::BLOCK_ROWS + row] = token;
    return token;
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, int row, int part, bool live, u32 round) {
    const auto each = [&](auto f) { each_of(c, part, f); };
    const auto sum_of = [&](int first) { return [&, first](int which, float v) { return row_sum(c, round, first + which, v); }; };
    float* residual = c.template work<float>(e.residual) + u64(row) * H;
    Held x = {};
    if constexpr (G::EMBED) {
      V::embed(c, e, u32(token_of(c, row, part)), each, x);
    } else {
      const float* from = residual;
      if constexpr (G::TAKE) from = c.p.taken + u64(__ldg(&c.p.rows[row].from)) * H;
      each([&](int i, int col, bool) { V::load8(from + col, x[i]); });
    }
    if constexpr (G::BRANCH) {
      Held y = {};
      if constexpr (V::SLOTS) {
        const WaveSlots<M, G, H> slots(c, e, u32(row));
        each([&](int i, int col, bool) { slots.add8(c, e, col, y[i]); });
      } else {
        V::load_branch(c, e, u32(row), each, y);
      }
      V::add_branch(c, e, each, sum_of(0), y, x);
    }
    if ((G::EMBED || G::BRANCH || G::TAKE) && live) each([&](int i, int col, bool) { V::store_residual(residual + col, x[i]); });
    if constexpr (G::OUT) {
      // If a lane has few columns, its gains are loaded while warps add up.
      constexpr bool EARLY = CHUNKS <= 2 && G::NORM != Norm::NONE;
      float w[EARLY ? CHUNKS : 1][8], b[EARLY ? CHUNKS : 1][8];
      if constexpr (EARLY) each([&](int i, int col, bool) { V::template load_gains<G::NORM>(c, e.norm_weight, e.norm_bias, col, w[i], b[i]); });
      Norms n{0.f, 1.f};
      if constexpr (PARTS == 1) {
        n = V::template statistics<G::NORM>(G::EPS, each, sum_of(2), x);
      } else {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
#pragma unroll
          for (int k = 0; k < 8; k++) squares += x[i][k] * x[i][k];
        squares = row_sum(c, round, 3, squares);
        if (live && c.tid() % STRIDE_LANES == 0) c.template work<float>(e.squares)[square_at(PARTS, u32(part), u32(row))] = squares;
      }
      each([&](int i, int col, bool) {
        if (!live) return;
        if constexpr (EARLY) {
#pragma unroll
          for (int k = 0; k < 8; k++) x[i][k] = (x[i][k] - n.mean) * n.factor * w[i][k] + b[i][k];
        } else {
          V::template apply<G::NORM>(c, n, e.norm_weight, e.norm_bias, col, x[i]);
        }
        V::store_out(c.template work<u8>(e.out), u32(row), col, x[i]);
      });
    }
  }
};

template <bool SLOTS, class M, class G>
struct HeldSlots {
  HeldSlots() = default;
  __device__ __forceinline__ HeldSlots(const WaveContext<M>&, const Wave&, u32) {}
};
template <class M, class G>
struct HeldSlots<true, M, G> : WaveSlots<M, G, G::HIDDEN> {
  using WaveSlots<M, G, G::HIDDEN>::WaveSlots;
};

// Of a chunk: a team of warps has ROWS rows side by side at once, and threads side by side the same 8 columns of them. In the input of a product these are whole sectors; of a
// row alone they are half of one, which L2 takes many times as long to write. While one team waits for what it reads, another one stores. The bits of a row do not depend
// on which rows a block has.
template <class M, class G>
struct WaveRowsOfChunk : WaveRowValues<M, G> {
  typedef WaveRowValues<M, G> V;
  using typename V::Norms;
  static_assert(G::ROW_PARTS == 1 && !G::TAKE, "blocks share rows of steps alone");
  // A thread has registers for its pieces of 8 columns, and for what is added to them: all that it reads is on its way at once.
  static constexpr int H = G::HIDDEN, PIECES = H / 8, HELD_MAX = 4;
  static __device__ constexpr int rows_of(int threads, int rows = int(ROWS_OF_LINE)) {
    return rows == 1 || ceil_div(PIECES * rows, threads) <= HELD_MAX ? rows : rows_of(threads, rows / 2);
  }
  // As many teams as have two rows each, which are a sector.
  static __device__ constexpr int teams_of(int teams) { return teams == 1 || rows_of(M::WARPS / teams * 32) >= 2 ? teams : teams_of(teams / 2); }
  static constexpr int TEAMS = teams_of(M::WARPS < 4 ? M::WARPS : 4), WARPS = M::WARPS / TEAMS, THREADS = WARPS * 32, ROWS = rows_of(THREADS), EACH = ceil_div(PIECES * ROWS, THREADS);
  static_assert(M::WARPS % TEAMS == 0, "teams of as many warps");
  typedef float Held[EACH][8];

  static __device__ __forceinline__ int thread(const WaveContext<M>& c) { return c.tid() % THREADS; }
  template <class F>
  static __device__ __forceinline__ void each_of(const WaveContext<M>& c, F f) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const int piece = (thread(c) + i * THREADS) / ROWS;
      if constexpr (PIECES * ROWS % THREADS == 0)
        f(i, piece * 8, true);
      else
        f(i, min(piece, PIECES - 1) * 8, piece < PIECES);
    }
  }
  // Over all threads of a row. The whole team comes here; `sums` counts how often.
  static __device__ __forceinline__ float row_sum(WaveContext<M>& c, u32& sums, float v) {
#pragma unroll
    for (int o = 16; o >= ROWS; o /= 2) v += __shfl_xor_sync(~0u, v, o);
    if constexpr (WARPS == 1) return v;
    auto& stats = c.state().stats[sums++ & 1];
    if (c.lane() < ROWS) stats[c.lane()][c.warp()] = v;
    if constexpr (TEAMS == 1)
      c.barrier();
    else
      team_barrier<THREADS>(c.warp() / WARPS);
    v = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) v += stats[c.lane() % ROWS][c.warp() / WARPS * WARPS + w];
    return v;
  }
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 sums = 0;
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
      // Rows of a group that are not of the share are others that are.
      const auto row_of = [&](u32 first) { return first + u32(thread(c) % ROWS); };
      const auto own = [&](u32 first) { return max(share.row, min(row_of(first), end - 1)); };
      u32 first = share.row / ROWS * ROWS + u32(c.warp() / WARPS) * ROWS;
      if (share.row >= end || first >= end) continue;
      // Where experts left what rows add up is asked for ahead.
      HeldSlots<V::SLOTS, M, G> slots(c, e, own(first));
#pragma unroll 1
      for (;;) {
        const u32 then = first + TEAMS * ROWS;
        HeldSlots<V::SLOTS, M, G> next;
        if (then < end) next = HeldSlots<V::SLOTS, M, G>(c, e, own(then));
        one(c, e, own(first), row_of(first) == own(first), sums, slots, [&] {
          if constexpr (V::SLOTS)
            if (then < end && thread(c) < ROWS) bring(c, e, own(then), next);
        });
        if (then >= end) break;
        first = then;
        slots = next;
      }
    }
  }
  // By a thread: what is added to a row later on, from places that lie anywhere.
  static __device__ __forceinline__ void bring(const WaveContext<M>& c, const Wave& e, u32 row, const HeldSlots<V::SLOTS, M, G>& slots) {
    bring_to_l2(c.template work<float>(e.residual) + u64(row) * H, H * sizeof(float));
#pragma unroll
    for (int s = 0; s < G::SLOTS; s++) bring_to_l2(c.template work<bf16>(e.x) + u64(slots.rows[s]) * H, H * 2);
  }
  // `between` is called as soon as what it needs has arrived.
  template <class Between>
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, u32 row, bool live, u32& sums, const HeldSlots<V::SLOTS, M, G>& slots, const Between& between) {
    const auto each = [&](auto f) { each_of(c, f); };
    const auto sum = [&](int, float v) { return row_sum(c, sums, v); };
    Held x;
    if constexpr (G::EMBED) {
      V::embed(c, e, u32(__ldg(&c.p.rows[row].token)), each, x);
    } else {
      const float* const from = c.template work<float>(e.residual) + u64(row) * H;
      each([&](int i, int col, bool) { V::load8(from + col, x[i]); });
    }
    if constexpr (G::BRANCH) {
      Held y = {};
      if constexpr (V::SLOTS)
        each([&](int i, int col, bool) { slots.add8(c, e, col, y[i]); });
      else
        V::load_branch(c, e, row, each, y);
      V::add_branch(c, e, each, sum, y, x);
    }
    between();
    float w[EACH][8], b[EACH][8];
    if constexpr (G::OUT && G::NORM != Norm::NONE) each([&](int i, int col, bool) { V::template load_gains<G::NORM>(c, e.norm_weight, e.norm_bias, col, w[i], b[i]); });
    if constexpr (G::EMBED || G::BRANCH) {
      float* const residual = c.template work<float>(e.residual) + u64(row) * H;
      each([&](int i, int col, bool exists) {
        if (live && exists) V::store_residual(residual + col, x[i]);
      });
    }
    if constexpr (G::OUT) {
      const Norms n = V::template statistics<G::NORM>(G::EPS, each, sum, x);
      u8 *const out = c.template work<u8>(e.out), *const by_row = c.template work<u8>(e.rows) + u64(row) * H * 2;
      each([&](int i, int col, bool exists) {
        if constexpr (G::NORM != Norm::NONE)
#pragma unroll
          for (int k = 0; k < 8; k++) x[i][k] = (x[i][k] - n.mean) * n.factor * w[i][k] + b[i][k];
        if (!live || !exists) return;
        V::store_out(out, row, col, x[i]);
        if constexpr (G::OUT_ROWS)
          *reinterpret_cast<uint4*>(by_row + col * 2) = make_uint4(bf16_pair(x[i][0], x[i][1]), bf16_pair(x[i][2], x[i][3]), bf16_pair(x[i][4], x[i][5]), bf16_pair(x[i][6], x[i][7]));
      });
    }
  }
};

template <bool STEPS, class M, class G>
struct WaveRowsOf : WaveRowsOfStep<M, G> {};
template <class M, class G>
struct WaveRowsOf<false, M, G> : WaveRowsOfChunk<M, G> {};
template <class M, class G>
struct WaveRows : WaveRowsOf<M::STEPS, M, G> {
  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
};
