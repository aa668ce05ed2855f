// Attention over the cache up to each row's own position: softmax(scale * q K^T) V.
//   If q and k have norms over all heads, `WaveNormHeads` comes first, and the others norm nothing.
//   A prompt chunk has two waves. `WaveAppend` norms and rotates the heads, and appends keys and values to the cache. `WaveAttend` attends,
//   for tiles of 16 rows of a head.
//   A step has one wave. `WaveAttendRow` does both, for the heads of one row that share a KV head.
//   A step of a kernel with KV splits has two waves. `WaveAttendSplits` does the same for one KV split of a row. `WaveMerge` adds splits up.
//
// qkv (rows, ..)  q, k and v of all heads: bf16 row by row, or PARTS sums in fp32, (PARTS, rows, ..); if PACKETS each sum is a packet
// q   (rows, ..)  in a chunk: normed and rotated, bf16 row by row. In a step queries stay in shared memory
// K, V            pages of one KV head, through the ring of inputs: K of TILE positions, then V of the same positions
// gate (rows, ..) after v, if the output is gated: out is multiplied by its sigmoid. sinks (HEADS): one more score of each softmax
// out (rows, ..)  bf16, in the layout of the input of products
// left (rows, SPLITS_MOST, HEADS, DIM + 2)  fp32: the results of each KV split for each head: the largest score, the sum, the values
//
// owner    of a row of a head: one warp in `WaveAppend` and `WaveAttend`; in a step all warps of a block, which take tiles in turn
// assumes  the cache has all positions before the step. Rows of one sequence are neighbours, at consecutive positions.
//          All rows of a chunk belong to one sequence. Heads are as in ops/attention_tensor.cuh; cache rows of other ones are not swizzled
#pragma once

template <class M, class G>
struct WaveHeads {
  static constexpr int KV_HEADS = G::HEADS / G::GROUP, COLS = QKV_COLS<G>, QUERY_COLS = G::HEADS * G::DIM;
  static constexpr int ROW = G::PITCH * 2; // bytes of a cache row
  // What pieces of the cache row of a position change places by.
  static __device__ __forceinline__ constexpr u32 swizzled(u32 position) { return G::SWIZZLED ? swizzle(position) : 0; }
  // The pool of keys or of values of a KV head.
  static __device__ __forceinline__ u8* pool(const WaveParams& p, u32 cache, int kv) {
    return p.cache + u64(cache) * OFFSET_BYTES + u64(kv) * M::POOL_ROWS * ROW;
  }
  // The row of the pool that holds `position` of a sequence.
  static __device__ __forceinline__ u32 pool_row(const WaveParams& p, u32 sequence, u32 position) { return ::pool_row<M>(p.pages, sequence, position); }
  // The sink of a head.
  static __device__ __forceinline__ float sink(const WaveContext<M>& c, const Wave& e, int head) { return __ldg(c.template constant<float>(e.sinks) + head); }
  // What two columns of heads are multiplied by, from their gates as a product has left them: sums of PARTS, or bf16.
  static __device__ __forceinline__ float2 gates(const WaveContext<M>& c, u32 x, int row, int col) {
    static_assert(G::GATE_AT == COLS - QUERY_COLS, "the gate lies after q, k and v");
    const u64 from = u64(row) * COLS + u32(G::GATE_AT + col);
    u32 pair;
    if constexpr (G::PARTS > 0) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int i = 0; i < G::PARTS; i++) {
        const float2 part = *reinterpret_cast<const float2*>(c.template work<float>(x) + u64(i) * (M::BLOCK_ROWS * COLS) + from);
        sum.x += part.x, sum.y += part.y;
      }
      pair = bf16_pair(sum.x, sum.y);
    } else {
      pair = *reinterpret_cast<const u32*>(c.template work<u8>(x) + from * 2);
    }
    return open(pair);
  }
  static __device__ __forceinline__ float2 open(u32 pair) { return make_float2(sigmoid(bf16_lo(pair)), sigmoid(bf16_hi(pair))); }
  // The positions that a share of a chunk reads. The first one begins a tile.
  static __device__ __forceinline__ u32 begin_of(const WaveParams& p, const Share& s) { return seen_from(p.position + s.row) / G::TILE * G::TILE; }
  static __device__ __forceinline__ u32 end_of(const WaveParams& p, const Share& s) { return p.position + min(s.row + s.rows, p.row_count); }
  // Stores what a warp of a chunk has of 16 rows of a head, from `row0` on: a lane has a part of the sums of weights of rows lane / 4 and 8 further, and of row h
  // columns 8 n + lane % 4 * 2 and the next, `value(n, h)`.
  template <class F>
  static __device__ __forceinline__ void leave(const WaveContext<M>& c, const Wave& e, int row0, int end_row, int head, const float (&sums)[2], F value) {
    u8* const out = c.template work<u8>(e.out);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = sums[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = row0 + c.lane() / 4 + h * 8;
      if (row >= end_row) continue;
      const float factor = __fdividef(1.f, sum);
#pragma unroll
      for (int n = 0; n < G::DIM / 8; n++) {
        const float2 v = value(n, h);
        float2 by = make_float2(factor, factor);
        const int col = head * G::DIM + n * 8 + c.lane() % 4 * 2;
        if constexpr (GATED_OF<G>) {
          const float2 gate = gates(c, e.gate, row, col);
          by.x *= gate.x, by.y *= gate.y;
        }
        u32* const to = reinterpret_cast<u32*>(out + WaveOperand<M, QUERY_COLS>::at(row, col));
        c.template give<everywhere<M, G>()>(to, bf16_pair(v.x * by.x, v.y * by.y));
      }
    }
  }
  // The first position that the row at `position` sees.
  static __device__ __forceinline__ u32 seen_from(u32 position) { return G::WINDOW && position + 1 > G::WINDOW ? position + 1 - G::WINDOW : 0; }
};

// q and k over all their heads: out = x * rsqrt(mean(x^2) + eps) * w, in fp32. Later columns are copied.
//
// owner    of a row: one block, one row after another. A thread has 8 columns at a time
template <class M, class G>
struct WaveNormHeads {
  typedef WaveHeads<M, G> H;
  static constexpr int QUERIES = H::QUERY_COLS, KEYS = H::KV_HEADS * G::DIM, STRIDE = M::WARPS * 32 * 8, CHUNKS = ceil_div(H::COLS, STRIDE);
  static constexpr bool NORMS_Q = G::Q_NORM == HeadNorm::PROJECTION, NORMS_K = G::K_NORM == HeadNorm::PROJECTION;
  static_assert(G::DIM % 8 == 0, "8 columns are of one kind");

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 round = 0;
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
#pragma unroll 1
      for (u32 row = share.row; row < end; row++, round++) one(c, e, row, round & 1);
    }
  }
  template <class F>
  static __device__ __forceinline__ void each(const WaveContext<M>& c, F f) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int col = i * STRIDE + c.tid() * 8;
      if (H::COLS % STRIDE == 0 || col < H::COLS) f(i, col);
    }
  }
  static __device__ __forceinline__ void add8(const float* from, float (&to)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    to[0] += a.x, to[1] += a.y, to[2] += a.z, to[3] += a.w, to[4] += b.x, to[5] += b.y, to[6] += b.z, to[7] += b.w;
  }
  // Of the whole block.
  static __device__ __forceinline__ float total(const float* of_warps) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < M::WARPS; w++) sum += of_warps[w];
    return sum;
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, u32 row, u32 round) {
    float x[CHUNKS][8] = {}, squares[2] = {0.f, 0.f};
    each(c, [&](int i, int col) {
      const u64 from = u64(row) * H::COLS + u32(col);
      if constexpr (G::PARTS > 0) {
#pragma unroll
        for (int part = 0; part < G::PARTS; part++) add8(c.template work<float>(e.x) + u64(part) * (M::BLOCK_ROWS * H::COLS) + from, x[i]);
      } else {
        unpack8(*reinterpret_cast<const uint4*>(c.template work<bf16>(e.x) + from), x[i]);
      }
      float own = 0.f;
#pragma unroll
      for (int k = 0; k < 8; k++) own += x[i][k] * x[i][k];
      squares[0] += col < QUERIES ? own : 0.f;
      squares[1] += col >= QUERIES && col < QUERIES + KEYS ? own : 0.f;
    });
    auto& stats = c.state().stats[round];
#pragma unroll
    for (int kind = 0; kind < 2; kind++) {
      const float sum = warp_sum(squares[kind]);
      if (c.lane() == 0) stats[kind][c.warp()] = sum;
    }
    c.barrier();
    const float q = NORMS_Q ? rsqrtf(total(stats[0]) * (1.f / QUERIES) + G::Q_EPS) : 1.f, k = NORMS_K ? rsqrtf(total(stats[1]) * (1.f / KEYS) + G::K_EPS) : 1.f;
    each(c, [&](int i, int col) {
      const bool is_query = col < QUERIES, is_key = !is_query && col < QUERIES + KEYS;
      if (is_query ? NORMS_Q : is_key && NORMS_K) {
        float gains[8] = {};
        add8(c.template constant<float>(is_query ? e.q_norm : e.k_norm) + col - (is_query ? 0 : QUERIES), gains);
#pragma unroll
        for (int n = 0; n < 8; n++) x[i][n] *= (is_query ? q : k) * gains[n];
      }
      float* const out = c.template work<float>(e.out) + u64(row) * H::COLS + u32(col);
      *reinterpret_cast<float4*>(out) = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
      *reinterpret_cast<float4*>(out + 4) = make_float4(x[i][4], x[i][5], x[i][6], x[i][7]);
    });
  }
};

// Norms and rotates heads of q, k and v for attention, 16 bytes a lane.
template <class M, class G>
struct WavePieces {
  typedef WaveHeads<M, G> H;
  typedef AttentionTensor<M, G> One;
  static constexpr bool HALVES = G::ROTARY > 0 && !G::INTERLEAVED;
  // A lane has 16 bytes of a head, so a warp has several heads at once.
  static constexpr int PIECES = G::DIM / 8, LANES = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32, HEADS_AT_ONCE = 32 / LANES;
  static constexpr int TURNED = HALVES ? G::ROTARY / 8 : 2; // pieces that are rotated in halves
  static constexpr int HEADS = G::HEADS + 2 * H::KV_HEADS;
  static constexpr int ROUNDS = G::PARTS > 0 ? 2 : 4; // heads that a lane loads at once

  // Which piece of which head a lane has.
  struct Place {
    int lane, row, head, kind; // kind: 0 of queries, 1 of keys, 2 of values
    bool live;                 // if not, the row still exists, but the lane stores nothing
    u32 position;
    // `head` counts the heads of q first, then those of k, then those of v.
    __device__ __forceinline__ Place(const WaveContext<M>& c, int row, int head, bool live)
        : lane(c.lane() % LANES), row(row), head(head), kind(head < G::HEADS ? 0 : head < G::HEADS + H::KV_HEADS ? 1 : 2),
          live(live && c.lane() % LANES < PIECES), position(wave_position<M>(c.p, c.step, u32(row))) {}
  };
  // 8 columns as read from memory.
  struct Piece {
    float4 v[G::PARTS > 0 ? 2 * G::PARTS : 1];
  };
  // By whole warps: the lanes wait for packets together.
  static __device__ __forceinline__ void head_piece(WaveContext<M>& c, const Wave& e, const Place& at, Piece& piece) {
    const u64 from = u64(at.row) * H::COLS + at.head * G::DIM + at.lane * 8;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (G::PACKETS) {
      constexpr int PAIRS = 4 * G::PARTS;
      u64 first[PAIRS], second[PAIRS];
      bool active[PAIRS];
#pragma unroll
      for (int i = 0; i < PAIRS; i++) active[i] = at.live;
      const auto offset = [&](int i) { return u64(i / 4) * (M::BLOCK_ROWS * H::COLS) + from + i % 4 * 2; };
      await_pairs<PAIRS, true>(c.template work<u64>(e.x), offset, active, c.tag_of(c.wave - 1), first, second, c.waiter());
#pragma unroll
      for (int i = 0; i < 2 * G::PARTS; i++)
        piece.v[i] = make_float4(__uint_as_float(u32(first[2 * i])), __uint_as_float(u32(second[2 * i])), __uint_as_float(u32(first[2 * i + 1])), __uint_as_float(u32(second[2 * i + 1])));
    } else if constexpr (G::PARTS > 0) {
#pragma unroll
      for (int i = 0; i < 2 * G::PARTS; i++)
        piece.v[i] = at.live ? *reinterpret_cast<const float4*>(c.template work<float>(e.x) + u64(i / 2) * (M::BLOCK_ROWS * H::COLS) + from + i % 2 * 4) : none;
    } else {
      piece.v[0] = at.live ? *reinterpret_cast<const float4*>(c.template work<u8>(e.x) + from * 2) : none;
    }
  }
  static __device__ __forceinline__ void widen_piece(const Piece& piece, float (&y)[8]) {
    if constexpr (G::PARTS > 0) {
#pragma unroll
      for (int k = 0; k < 8; k++) y[k] = 0.f;
#pragma unroll
      for (int i = 0; i < 2 * G::PARTS; i++) {
        const float4 v = piece.v[i];
        y[i % 2 * 4] += v.x, y[i % 2 * 4 + 1] += v.y, y[i % 2 * 4 + 2] += v.z, y[i % 2 * 4 + 3] += v.w;
      }
    } else {
      const float4 v = piece.v[0];
      unpack8(make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w)), y);
    }
  }
  // What norms and rotates the columns of a lane. No wave writes it, so a lane can load it before it waits for the columns.
  struct Turn {
    static constexpr bool NORMS = G::Q_NORM == HeadNorm::HEAD || G::K_NORM == HeadNorm::HEAD;
    static constexpr int ANGLES = HALVES ? 8 : 4;
    float weight[NORMS ? 8 : 1], cosine[ANGLES], sine[ANGLES];
    bool norms, turns;
    Turn() = default;
    // `before`: of an earlier head of the same row, if any. It is not one of values unless this one is, too.
    __device__ __forceinline__ Turn(const WaveContext<M>& c, const Wave& e, const Place& at, const Turn* before = nullptr)
        : norms(at.kind == 0 ? G::Q_NORM == HeadNorm::HEAD : at.kind == 1 && G::K_NORM == HeadNorm::HEAD), turns(at.live && at.kind < 2 && (!HALVES || at.lane < TURNED)) {
      if constexpr (NORMS) {
        const float* from = c.template constant<float>(at.kind == 0 ? e.q_norm : e.k_norm) + at.lane * 8;
#pragma unroll
        for (int k = 0; k < 8; k += 4) {
          const float4 v = at.live && norms ? __ldg(reinterpret_cast<const float4*>(from + k)) : make_float4(1.f, 1.f, 1.f, 1.f);
          weight[k] = v.x, weight[k + 1] = v.y, weight[k + 2] = v.z, weight[k + 3] = v.w;
        }
      }
      if (before) {
#pragma unroll
        for (int k = 0; k < ANGLES; k++) cosine[k] = before->cosine[k], sine[k] = before->sine[k];
        return;
      }
      const float* angle = c.template constant<float>(e.rope) + u64(at.position) * G::ROTARY + (HALVES ? at.lane % (TURNED / 2) * 8 : at.lane * 4);
#pragma unroll
      for (int k = 0; k < ANGLES; k += 4) {
        float4 low = make_float4(1.f, 1.f, 1.f, 1.f), high = make_float4(0.f, 0.f, 0.f, 0.f);
        if (G::ROTARY > 0 && turns) {
          low = __ldg(reinterpret_cast<const float4*>(angle + k));
          high = __ldg(reinterpret_cast<const float4*>(angle + G::ROTARY / 2 + k));
        }
        cosine[k] = low.x, cosine[k + 1] = low.y, cosine[k + 2] = low.z, cosine[k + 3] = low.w;
        sine[k] = high.x, sine[k + 1] = high.y, sine[k + 2] = high.z, sine[k + 3] = high.w;
      }
    }
  };
  static __device__ __forceinline__ void norm(int kind, const Turn& by, float (&y)[8]) {
    if constexpr (Turn::NORMS) {
      float squares = 0.f;
#pragma unroll
      for (int k = 0; k < 8; k++) squares += y[k] * y[k];
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
      const float factor = by.norms ? rsqrtf(squares * (1.f / G::DIM) + (kind == 0 ? G::Q_EPS : G::K_EPS)) : 1.f;
#pragma unroll
      for (int k = 0; k < 8; k++) y[k] *= factor * by.weight[k];
    }
  }
  // Norms and rotates 8 columns of a head. Whole warps call it; their lanes may have heads of different rows.
  static __device__ __forceinline__ uint4 turned(const WaveContext<M>& c, const Place& at, const Turn& by, const Piece& piece) {
    const int lane = at.lane, kind = at.kind;
    float y[8];
    widen_piece(piece, y);
    if constexpr (!NORM_AFTER_ROPE_OF<G>) norm(kind, by, y);
    // HALVES: a lane has 8 dimensions of one half, and rotates them with the 8 dimensions of the lane TURNED / 2 further.
    if constexpr (HALVES) {
      const int partner = c.lane() - lane + (lane < TURNED ? (lane + TURNED / 2) % TURNED : lane);
      const float sign = lane < TURNED / 2 ? -1.f : 1.f;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const float other = __shfl_sync(~0u, y[k], partner);
        if (by.turns) y[k] = y[k] * by.cosine[k] + sign * other * by.sine[k];
      }
    } else if constexpr (G::ROTARY > 0) {
#pragma unroll
      for (int k = 0; k < 8; k += 2)
        if (by.turns) One::rotate(y[k], y[k + 1], by.cosine[k / 2], by.sine[k / 2]);
    }
    if constexpr (NORM_AFTER_ROPE_OF<G>) norm(kind, by, y);
    if constexpr (QUERY_SCALE_OF<G>) {
      const float factor = kind == 0 ? query_factor<G>(at.position) : 1.f;
#pragma unroll
      for (int k = 0; k < 8; k++) y[k] *= factor;
    }
    return make_uint4(bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3]), bf16_pair(y[4], y[5]), bf16_pair(y[6], y[7]));
  }
  // The row of the cache to which a row of the launch appends.
  static __device__ __forceinline__ u32 appended_row(const WaveContext<M>& c, const Place& at) { return H::pool_row(c.p, wave_sequence<M>(u32(at.row)), at.position); }
  // Stores a piece of a key or a value in this row of the cache.
  static __device__ __forceinline__ void append(const WaveContext<M>& c, const Wave& e, const Place& at, u32 row, const uint4& piece) {
    const int kv = at.head - G::HEADS - (at.kind - 1) * H::KV_HEADS;
    u8* to = H::pool(c.p, at.kind == 1 ? e.k_cache : e.v_cache, kv) + u64(row) * H::ROW;
    *reinterpret_cast<uint4*>(to + (at.lane ^ H::swizzled(at.position)) * 16) = piece;
  }
};

template <class M, class G>
struct WaveAppend {
  typedef WaveHeads<M, G> H;
  typedef WavePieces<M, G> P;

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
      if (share.row >= end) continue;
      const int all = int(end - share.row) * P::HEADS;
      // A lane has heads of one row in a round, if whole rounds have the heads of a row: then its angles are loaded once.
      constexpr int ROUND = P::ROUNDS * P::HEADS_AT_ONCE;
      constexpr bool ONE_ROW = P::HEADS % ROUND == 0;
      const auto place_at = [&](int n) { return typename P::Place(c, int(share.row) + (n < all ? n / P::HEADS : 0), n < all ? n % P::HEADS : 0, n < all); };
      // All loads of a round come before its first store, and so do those of heads of the next round, if registers have room: each takes the time of L2.
      constexpr bool AHEAD = G::PARTS == 0;
      typename P::Piece v[P::ROUNDS], next[AHEAD ? P::ROUNDS : 1];
      const auto load_heads = [&](int first, auto& to) {
#pragma unroll
        for (int i = 0; i < P::ROUNDS; i++) P::head_piece(c, e, place_at(first + i * P::HEADS_AT_ONCE + c.lane() / P::LANES), to[i]);
      };
      if constexpr (AHEAD) load_heads(c.warp() * ROUND, v);
#pragma unroll 1
      for (int first = c.warp() * ROUND; first < all; first += M::WARPS * ROUND) {
        const auto place = [&](int i) { return place_at(first + i * P::HEADS_AT_ONCE + c.lane() / P::LANES); };
        if constexpr (!AHEAD) load_heads(first, v);
        typename P::Turn by[P::ROUNDS];
        u32 rows[P::ROUNDS];
#pragma unroll
        for (int i = 0; i < P::ROUNDS; i++) {
          by[i] = typename P::Turn(c, e, place(i), ONE_ROW && i > 0 ? &by[0] : nullptr);
          rows[i] = ONE_ROW && i > 0 ? rows[0] : P::appended_row(c, place(i));
        }
        if constexpr (AHEAD) load_heads(first + M::WARPS * ROUND, next);
#pragma unroll
        for (int i = 0; i < P::ROUNDS; i++) {
          const typename P::Place at = place(i);
          const uint4 w = P::turned(c, at, by[i], v[i]);
          if (!at.live) continue;
          if (at.kind == 0)
            *reinterpret_cast<uint4*>(c.template work<u8>(e.out) + (u64(at.row) * H::QUERY_COLS + at.head * G::DIM + at.lane * 8) * 2) = w;
          else
            P::append(c, e, at, rows[i], w);
        }
        if constexpr (AHEAD)
#pragma unroll
          for (int i = 0; i < P::ROUNDS; i++) v[i] = next[i];
      }
    }
  }
};

// Tiles of attention: 16 queries by the positions of a chunk of the ring. The queries are rows of a prompt chunk, or heads of one row of a step.
template <class M, class G>
struct WaveTiles {
  typedef WaveHeads<M, G> H;
  typedef AttentionTensor<M, G> One;
  static constexpr int QUERIES = G::HEADS_PER_TASK;
  static constexpr int HEAD_GRANULES = G::DIM / 32, ROW = H::ROW;
  // In a step several warps share a tile, each with 64 dimensions of V. Each of them computes all scores.
  static constexpr int TEAM = M::STEPS ? G::DIM / 64 : 1, VALUE_TILES = G::DIM / TEAM / 8;
  static constexpr int TILE = G::TILE; // positions of a chunk; a page has whole tiles
  static_assert(2 * TILE * ROW <= M::INPUT_BYTES && TILE % 16 == 0 && M::PAGE_ROWS % TILE == 0, "a slot holds keys and values of a tile");
  // Queries stay in registers if the sums leave room for them.
  static constexpr bool HOLDS_QUERIES = G::DIM <= (M::STEPS ? 64 : 128);
  // Positions whose scores are computed at once.
  static constexpr int STEP = HOLDS_QUERIES && TILE % 32 == 0 ? 32 : 16, STEP_TILES = STEP / 8;

  // The queries in rows lane / 4 and lane / 4 + 8 of a tile, as operands.
  struct Queries {
    const u8 *first, *second;
    uint4 held[HOLDS_QUERIES ? 2 * HEAD_GRANULES : 1];
    __device__ __forceinline__ Queries(const u8* first, const u8* second) : first(first), second(second) {
      if constexpr (HOLDS_QUERIES)
#pragma unroll
        for (int j = 0; j < HEAD_GRANULES; j++) load(j, held[2 * j], held[2 * j + 1]);
    }
    __device__ __forceinline__ void load(int j, uint4& low, uint4& high) const {
      const uint4 a = *reinterpret_cast<const uint4*>(first + j * 64), b = *reinterpret_cast<const uint4*>(second + j * 64);
      low = make_uint4(a.x, b.x, a.y, b.y);
      high = make_uint4(a.z, b.z, a.w, b.w);
    }
    // Granule j.
    __device__ __forceinline__ void operator()(int j, uint4& low, uint4& high) const {
      if constexpr (HOLDS_QUERIES)
        low = held[2 * j], high = held[2 * j + 1];
      else
        load(j, low, high);
    }
  };
  // Copies up to TILE positions from `at` on, before `end`. In a prompt chunk the previous wave appended some of them, so the loader first waits for
  // that wave; in a step it waits only for the previous step.
  template <class R>
  static __device__ __forceinline__ void load_chunk(WaveLoader<M, R>& l, const Wave& e, u32 sequence, int kv, u32 at, u32 end) {
    const u32 bytes = min(u32(TILE), end - at) * ROW;
    const u8* from = H::pool(l.p, l.lane == 0 ? e.k_cache : e.v_cache, kv) + u64(H::pool_row(l.p, sequence, at)) * ROW;
    u8* slot = l.free_slot();
    if (M::STEPS)
      l.meet_last_step();
    else
      l.meet();
    if (l.lane < 2) l.copy(slot + l.lane * (TILE * ROW), from, bytes);
    l.arrive(2 * bytes);
    l.at.next();
  }
  // The running softmax of rows lane / 4 and lane / 4 + 8 of a tile.
  struct Running {
    float m[2], l[2], o[VALUE_TILES][4];
  };
  static __device__ __forceinline__ void begin(Running& r) {
#pragma unroll
    for (int h = 0; h < 2; h++) r.m[h] = NEGATIVE_INFINITY, r.l[h] = 0.f;
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++) r.o[n][0] = r.o[n][1] = r.o[n][2] = r.o[n][3] = 0.f;
  }
  // A row begins with its sink: a score without a value. Four lanes add up what they have of a row's sum.
  static __device__ __forceinline__ void begin_with(Running& r, int h, float sink, int lane) { r.m[h] = sink, r.l[h] = lane % 4 == 0 ? 1.f : 0.f; }
  // Adds STEP positions at `keys` and `values`. Row h sees positions lo[h] to hi[h] - 1. Only the first `there` positions are valid.
  static __device__ __forceinline__ void tile(int lane, const Queries& queries, const u8* keys, const u8* values, const int (&lo)[2], const int (&hi)[2], int there, Running& r) {
    const int t = lane % 4;
    const u32 key_at = lane / 4 * ROW + (lane % 4 ^ H::swizzled(lane / 4)) * 16;
    const u32 value_at = lane % 16 * ROW + (lane / 16 ^ H::swizzled(lane % 16)) * 16;
    float s[STEP_TILES][4] = {};
#pragma unroll
    for (int j = 0; j < HEAD_GRANULES; j++) {
      uint4 q[2];
      queries(j, q[0], q[1]);
#pragma unroll
      for (int n = 0; n < STEP_TILES; n++) {
        const uint4 k = *reinterpret_cast<const uint4*>(keys + n * 8 * ROW + j / 2 * 128 + (key_at ^ j % 2 * 64));
        tensor_product(s[n][0], s[n][1], s[n][2], s[n][3], q[0].x, q[0].y, q[0].z, q[0].w, k.x, k.y);
        tensor_product(s[n][0], s[n][1], s[n][2], s[n][3], q[1].x, q[1].y, q[1].z, q[1].w, k.z, k.w);
      }
    }
    u32 p[STEP_TILES][2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = r.m[h];
#pragma unroll
      for (int n = 0; n < STEP_TILES; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const int at = n * 8 + t * 2 + k;
          float& score = s[n][2 * h + k];
          score = at >= lo[h] && at < hi[h] ? softcap(score * G::SCALE, G::SOFTCAP) : NEGATIVE_INFINITY;
          top = fmaxf(top, score);
        }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // A tile in which a row sees no position changes nothing.
      const float shift = top > NEGATIVE_INFINITY ? top : 0.f, shrink = exp_fast(r.m[h] - shift);
      r.m[h] = top;
      r.l[h] *= shrink;
#pragma unroll
      for (int n = 0; n < STEP_TILES; n++) {
        const float x = exp_fast(s[n][2 * h] - shift), y = exp_fast(s[n][2 * h + 1] - shift);
        r.l[h] += x + y;
        p[n][h] = bf16_pair(x, y);
      }
#pragma unroll
      for (int n = 0; n < VALUE_TILES; n++) {
        r.o[n][2 * h] *= shrink;
        r.o[n][2 * h + 1] *= shrink;
      }
    }
    const u32 first = smem_address(values);
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
      // Beyond `there` the slot has older bytes. They are masked, because a NaN among them would survive a weight of 0.
      u32 low = ~0u, high = ~0u;
      if (there < STEP) {
        const int left = there - k * 16;
        low = (t * 2 < left ? 0xffffu : 0u) | (t * 2 + 1 < left ? 0xffff0000u : 0u);
        high = (t * 2 + 8 < left ? 0xffffu : 0u) | (t * 2 + 9 < left ? 0xffff0000u : 0u);
      }
#pragma unroll
      for (int n = 0; n < VALUE_TILES / 2; n++) {
        uint4 v;
        One::load_transposed(first + k * 16 * ROW + n / 4 * 128 + (value_at ^ n % 4 * 32), v);
        float(&x)[4] = r.o[2 * n];
        float(&y)[4] = r.o[2 * n + 1];
        tensor_product(x[0], x[1], x[2], x[3], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v.x & low, v.y & high);
        tensor_product(y[0], y[1], y[2], y[3], p[2 * k][0], p[2 * k][1], p[2 * k + 1][0], p[2 * k + 1][1], v.z & low, v.w & high);
      }
    }
  }
};

template <class M, class G>
struct WaveAttend {
  typedef WaveHeads<M, G> H;
  typedef WaveTiles<M, G> T;
  static constexpr int QUERIES = T::QUERIES, ROW_TILES = M::WARPS / QUERIES, TILE_ROWS = ROW_TILES * 16, TILE = T::TILE, STEP = T::STEP, ROW = H::ROW;

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e) {
    if constexpr (R::FIRST == 0) {
      const Shares<M> shares(l.p, e.division);
      for (u32 s = 0; s < shares.count; s++) {
        const Share share = shares[s];
        if (share.row >= l.p.row_count) continue;
        const u32 end = H::end_of(l.p, share);
        for (u32 at = H::begin_of(l.p, share); at < end; at += TILE) T::load_chunk(l, e, 0, int(share.lo) * QUERIES / G::GROUP, at, end);
      }
    }
  }

  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= c.p.row_count) continue;
      one(c, e, share);
    }
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, const Share& share) {
    const int lane = c.lane(), g = lane / 4, t = lane % 4, head = int(share.lo) * QUERIES + c.warp() % QUERIES;
    // Warps beyond the last whole group of heads have no rows. They only take and release chunks.
    const int row0 = int(share.row) + c.warp() / QUERIES * 16, end_row = c.warp() < QUERIES * ROW_TILES ? int(min(share.row + share.rows, c.p.row_count)) : 0;
    const bool live = row0 < end_row;
    const u8* query = c.template work<u8>(e.x) + (u64(live ? row0 + g : 0) * H::QUERY_COLS + (live ? head : 0) * G::DIM + t * 8) * 2;
    const typename T::Queries queries(query, query + 8 * (H::QUERY_COLS * 2));
    typename T::Running r;
    T::begin(r);
    if constexpr (SINKS_OF<G>) {
      const float sink = live ? H::sink(c, e, head) : 0.f;
#pragma unroll
      for (int h = 0; h < 2; h++) T::begin_with(r, h, sink, lane);
    }
    // The positions of the rows of this warp, and the first position that a row sees.
    const int first = int(c.p.position) + row0, last = int(c.p.position) + min(row0 + 16, end_row) - 1;
    const auto start = [](int position) { return int(H::seen_from(u32(position))); };
    const int begin = int(H::begin_of(c.p, share)), end = int(H::end_of(c.p, share));
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += TILE) {
      const u8* slot = wave_take(c, c.inputs);
      if (live)
#pragma unroll 1
        for (int at = chunk; at < min(chunk + TILE, end); at += STEP) {
          if (at > last || at + STEP <= start(first)) continue;
          const int lo[2] = {start(first + g) - at, start(first + g + 8) - at}, hi[2] = {first + g + 1 - at, first + g + 9 - at};
          T::tile(lane, queries, slot + (at - chunk) * ROW, slot + TILE * ROW + (at - chunk) * ROW, lo, hi, end - at, r);
        }
      wave_release(c, c.inputs);
    }
    if (live) H::leave(c, e, row0, end_row, head, r.l, [&](int n, int h) { return make_float2(r.o[n][2 * h], r.o[n][2 * h + 1]); });
  }
};

// How histories are cut into KV splits, and which block has which split. All blocks compute the same assignment from the positions of the rows.
// So each split has exactly one block, and no block waits for another one to learn its splits.
//
// The history of a row begins with the tile of the first position that it sees, and is cut every SPLIT positions from there. So the order in
// which a row adds up depends only on its own position. A row with one split needs no merge.
template <class M, class G>
struct WaveSplits {
  typedef WaveHeads<M, G> H;
  static constexpr int QUERIES = G::HEADS_PER_TASK;
  static constexpr u32 SPLIT = G::SPLIT, MOST = G::SPLITS_MOST, GROUPS = G::HEADS / QUERIES;
  static_assert(SPLIT % G::TILE == 0, "a split has whole tiles");

  static __device__ __forceinline__ u32 begin(u32 position) { return H::seen_from(position) / G::TILE * G::TILE; }
  // The number of splits of a row at `position`. The last split has the row's own position.
  static __device__ __forceinline__ u32 count(u32 position) {
    const u32 length = position - begin(position);
    return length <= SPLIT ? 1 : (length + SPLIT - 1) / SPLIT;
  }
  // The results of split `split` of a row, from head `head` on.
  static __device__ __forceinline__ float* left(const WaveParams& p, const Wave& e, u32 row, u32 split, int head) {
    return reinterpret_cast<float*>(p.work + u64(e.branch) * OFFSET_BYTES) + ((u64(row) * MOST + split) * G::HEADS + u32(head)) * (G::DIM + 2);
  }

  // The list of all splits of a step, which blocks take in turn. Full splits come first, in order of rows: all but the last split of each row. Then
  // come the last splits, the longest first; lengths are compared in eighths of SPLIT. Only whole warps may call it.
  struct Deal {
    static constexpr u32 ROWS = M::BLOCK_ROWS > 64 ? M::BLOCK_ROWS / 32 : 2; // of a lane
    const WaveParams& p;
    u32 step, lane, more[ROWS], before, full; // full splits: of each row of this lane, of all rows before them, of all rows
    __device__ __forceinline__ Deal(const WaveParams& p, u32 step, int of_lane) : p(p), step(step), lane(u32(of_lane)) {
      u32 upto = 0;
#pragma unroll
      for (u32 i = 0; i < ROWS; i++) {
        more[i] = is_live(ROWS * lane + i) ? count(position(ROWS * lane + i)) - 1 : 0;
        upto += more[i];
      }
      const u32 own = upto;
#pragma unroll
      for (int o = 1; o < 32; o *= 2) {
        const u32 other = __shfl_up_sync(~0u, upto, o);
        if (lane >= u32(o)) upto += other;
      }
      before = upto - own;
      full = __shfl_sync(~0u, upto, 31);
    }
    __device__ __forceinline__ bool is_live(u32 row) const { return row < p.row_count; }
    __device__ __forceinline__ u32 position(u32 row) const { return wave_position<M>(p, step, row); }
    // The length of the list: each split of each row, once for each group of heads.
    __device__ __forceinline__ u32 items() const { return (full + p.row_count) * GROUPS; }
    // The number of splits of this block.
    __device__ __forceinline__ u32 of_block() const { return (items() + M::SMS - 1 - blockIdx.x) / M::SMS; }
    __device__ __forceinline__ WaveSplit operator[](u32 n) const {
      const u32 at = n / GROUPS, group = n % GROUPS;
      if (at < full) {
        u32 left = at - before, of = ROWS; // which of the rows of this lane has it
#pragma unroll
        for (u32 i = 0; i < ROWS; i++)
          if (of == ROWS && at >= before) {
            if (left < more[i])
              of = i;
            else
              left -= more[i];
          }
        const bool is_mine = of < ROWS;
        const u32 mine = (ROWS * lane + of) << 24 | left;
        const u32 found = __shfl_sync(~0u, mine, __ffs(__ballot_sync(~0u, is_mine)) - 1);
        return WaveSplit{found >> 24, group, found & 0xffffff};
      }
      u32 eighths[ROWS], rank = at - full;
#pragma unroll
      for (u32 i = 0; i < ROWS; i++) {
        const u32 row = ROWS * lane + i;
        eighths[i] = ~0u;
        if (is_live(row)) {
          const u32 length = position(row) - begin(position(row)) - more[i] * SPLIT;
          eighths[i] = min(length / (SPLIT / 8), 7u);
        }
      }
      u32 row = 0;
#pragma unroll 1
      for (u32 eighth = 8; eighth-- > 0;) {
        // The first rows of all lanes, then the second ones, and so on.
        u32 here = 0, of = ROWS;
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
          const u32 lanes = __ballot_sync(~0u, eighths[i] == eighth);
          if (eighths[i] == eighth && here + u32(__popc(lanes & ((1u << lane) - 1))) == rank) of = i;
          here += u32(__popc(lanes));
        }
        if (rank < here) {
          row = __shfl_sync(~0u, ROWS * lane + of, __ffs(__ballot_sync(~0u, of < ROWS)) - 1);
          break;
        }
        rank -= here;
      }
      return WaveSplit{row, group, count(position(row)) - 1};
    }
  };
};

// Attention of a task in a step. A task has one row, a group of its heads, and the whole history or, if CUTS, one split of it.
//
// The rows of a tile are the heads of a task, which share a KV head. The cache holds positions of earlier steps. A row also sees positions of this
// step: its own, and those of earlier rows of its sequence. Every task computes the keys and values of these positions itself, from the
// output of the product, so no task waits for another. The task with the first heads of a KV head appends those of its own row.
//
// A row has the same bits wherever its prompt was cut and whatever other rows are in its step. Its own position is a separate tile, the
// first of its split. Tiles of earlier positions begin at multiples of STEP. Each tile has the bits that the cache has or will have: the
// tile in which the step begins is assembled from cached and new positions. Which team has a tile, and in which order teams and splits add
// up, depends only on the row's position.
template <class M, class G, bool CUTS>
struct WaveAttention {
  typedef WaveHeads<M, G> H;
  typedef WavePieces<M, G> P;
  typedef WaveTiles<M, G> T;
  static constexpr int QUERIES = T::QUERIES, TILE = T::TILE, STEP = T::STEP, ROW = H::ROW;
  static_assert(QUERIES <= 16, "a tile has 16 rows");
  static_assert(G::GROUP % QUERIES == 0, "tasks have whole parts of the heads of a KV head");
  // Scratch: first the queries, the key and the value of the own row of each of TASKS tasks, and the gates of its heads. After them, keys and values of other new positions. The
  // results of teams of warps use the same place later: for each head the largest score, the sum, and the values.
  static constexpr int QUERY_BYTES = G::DIM * 2 + 16, GATES_AT = QUERIES * QUERY_BYTES + 2 * ROW, GATE_HEADS = GATED_OF<G> ? QUERIES : 0;
  static constexpr int OWN_BYTES = round_up(GATES_AT + GATE_HEADS * G::DIM * 2, 128);
  static constexpr int TEAM = T::TEAM, TEAMS = M::WARPS / TEAM, LEFT = QUERIES * (G::DIM + 2);
  // What lies after the tasks: the results of all teams, or keys and values of a STEP. `tile` reads all of it even if only one position is there.
  static constexpr int NEW_BYTES = 2 * STEP * ROW, AFTER_BYTES = TEAMS * LEFT * 4 < NEW_BYTES ? NEW_BYTES : TEAMS * LEFT * 4;
  // Tasks whose own rows are computed at once. Teams then read the histories of several of them side by side.
  static constexpr int TASKS_MOST = M::SCRATCH_BYTES < AFTER_BYTES + OWN_BYTES ? 1 : (M::SCRATCH_BYTES - AFTER_BYTES) / OWN_BYTES, TASKS = TASKS_MOST < 8 ? TASKS_MOST : 8;
  static constexpr int AFTER_OWN = TASKS * OWN_BYTES, ROOM = (M::SCRATCH_BYTES - AFTER_OWN) / 4 / LEFT;
  static constexpr int TAKERS = ROOM < TEAMS ? ROOM : TEAMS; // teams that take STEPs in turn
  static constexpr int ALONE = TILE < 64 ? 64 : TILE; // the longest history that one team reads alone, in positions
  static_assert(TAKERS > 0, "a team's part of a row meets those of others");
  static_assert(AFTER_OWN + NEW_BYTES <= M::SCRATCH_BYTES, "new positions have room");

  struct Task {
    // The task has positions `begin` to `limit` of the history. `lead` is the number of earlier rows of the sequence in this step. Positions before
    // `end` come through the ring: all if `lead` is 0, else the whole STEPs before the first of those rows.
    u32 row, sequence, position, lead, split, begin, limit, end;
    int head;
    bool is_last, is_only; // whether this is the last split of the row, which has its own position; whether it is the only one
    __device__ __forceinline__ Task(const WaveSplit& of, u32 sequence, u32 position)
        : row(of.row), sequence(sequence), position(position), lead(wave_state<M>().leads[of.row]), split(of.split), begin(H::seen_from(position) / TILE * TILE),
          limit(position), end(lead == 0 ? position : (position - lead) / STEP * STEP), head(int(of.group) * QUERIES), is_last(true), is_only(true) {
      if constexpr (CUTS) {
        typedef WaveSplits<M, G> S;
        const u32 count = S::count(position);
        is_last = split + 1 == count, is_only = count == 1;
        begin += split * S::SPLIT;
        if (!is_last) limit = begin + S::SPLIT;
        end = min(end, limit);
      }
    }
  };
  static __device__ __forceinline__ u8* scratch(const WaveContext<M>& c, u32 at) { return reinterpret_cast<u8*>(c.scratch()) + at; }
  static __device__ __forceinline__ float* left(const WaveContext<M>& c) { return reinterpret_cast<float*>(scratch(c, AFTER_OWN)); }

  // Copies the positions of a task that come through the ring.
  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e, const WaveSplit& of) {
    const Task task(of, wave_sequence<M>(of.row), wave_position<M>(l.p, l.step, of.row));
    for (u32 at = task.begin; at < task.end; at += TILE) T::load_chunk(l, e, task.sequence, task.head / G::GROUP, at, task.end);
  }
  // Computes the queries, key and value of the own row of up to TASKS of `count` tasks. `split_of(i)` is the row, group and split of task i; each lane
  // asks for its own task.
  template <class F>
  static __device__ __forceinline__ void prepare(WaveContext<M>& c, const Wave& e, u32 count, F split_of) {
    constexpr int HEADS = QUERIES + 2 + GATE_HEADS, STRIDE = M::WARPS * P::HEADS_AT_ONCE;
    const int tasks = int(min(u32(TASKS), count));
#pragma unroll 1
    for (int from = c.warp() * P::HEADS_AT_ONCE; from < tasks * HEADS; from += STRIDE) {
      const int n = from + c.lane() / P::LANES, task = min(n / HEADS, tasks - 1), own = n % HEADS;
      const WaveSplit of = split_of(u32(task));
      const int first_head = int(of.group) * QUERIES, kv = first_head / G::GROUP;
      const bool live = n < tasks * HEADS && of.row < c.p.row_count;
      // Gates pass as values do: as they are.
      const bool is_gate = GATE_HEADS > 0 && own >= QUERIES + 2;
      const int column = is_gate ? G::HEADS + 2 * H::KV_HEADS + first_head + own - (QUERIES + 2) : G::HEADS + (own - QUERIES) * H::KV_HEADS + kv;
      const typename P::Place at(c, live ? int(of.row) : 0, own < QUERIES ? first_head + own : column, live);
      const typename P::Turn by(c, e, at);
      // Exactly one task appends: the one with the first heads of the KV head, in the first split.
      const bool appends = at.live && at.kind != 0 && !is_gate && first_head % G::GROUP == 0 && (!CUTS || of.split == 0);
      const u32 row = appends ? P::appended_row(c, at) : 0;
      typename P::Piece v;
      P::head_piece(c, e, at, v);
      const uint4 w = P::turned(c, at, by, v);
      if (!at.live) continue;
      const u32 to = own < QUERIES ? own * QUERY_BYTES : is_gate ? GATES_AT + (own - (QUERIES + 2)) * (G::DIM * 2) : QUERIES * QUERY_BYTES + (own - QUERIES) * ROW;
      *reinterpret_cast<uint4*>(scratch(c, u32(task) * OWN_BYTES + to) + at.lane * 16) = w;
      if (appends) P::append(c, e, at, row, w);
    }
  }
  // Puts keys and values of `count` positions into scratch, from `first` on, a multiple of STEP. Those of earlier steps come from the cache. Those of
  // this step are computed, with the bits that the cache will have.
  static __device__ __forceinline__ void gather(WaveContext<M>& c, const Wave& e, const Task& task, u32 first, u32 count) {
    const int kv = task.head / G::GROUP;
#pragma unroll 1
    for (int from = c.warp() * P::HEADS_AT_ONCE; from < int(count) * 2; from += M::WARPS * P::HEADS_AT_ONCE) {
      const int n = from + c.lane() / P::LANES;
      const u32 position = first + u32(n / 2), back = task.position - position;
      const bool exists = n < int(count) * 2, is_new = exists && back <= task.lead;
      const typename P::Place at(c, int(task.row - (is_new ? back : 0)), G::HEADS + n % 2 * H::KV_HEADS + kv, is_new);
      const typename P::Turn by(c, e, at);
      typename P::Piece v;
      P::head_piece(c, e, at, v);
      uint4 w = P::turned(c, at, by, v);
      if (!exists || at.lane >= P::PIECES) continue;
      const u32 piece = (at.lane ^ H::swizzled(position)) * 16;
      if (!is_new) {
        const u32 row = H::pool_row(c.p, wave_sequence<M>(task.row), position);
        w = *reinterpret_cast<const uint4*>(H::pool(c.p, n % 2 == 0 ? e.k_cache : e.v_cache, kv) + u64(row) * ROW + piece);
      }
      *reinterpret_cast<uint4*>(scratch(c, AFTER_OWN + n % 2 * (STEP * ROW) + n / 2 * ROW) + piece) = w;
    }
  }
  // Returns `v`, but hides its value from the compiler, which would otherwise generate most of `one` twice: for one team and for several.
  static __device__ __forceinline__ u32 opaque(u32 v) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(v));
#endif
    return v;
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, const Task& task, const u8* own, u32& turns) {
    const int lane = c.lane(), g = lane / 4, t = lane % 4, team = c.warp() / TEAM, part = c.warp() % TEAM;
    const int limit = int(task.limit), start = int(H::seen_from(task.position)), begin = int(task.begin), end = int(task.end);
    // One team reads a short history alone, without a merge. For a longer history teams take STEPs in turn, so that all of them work on the few
    // chunks that the ring holds. The first of these teams also has the row's own position.
    const u32 first = turns % TAKERS, count = opaque(!task.is_only || limit - begin > ALONE ? u32(TAKERS) : 1);
    turns += count;
    // The place of this team among the teams of the row, and whether it takes part. Other teams only release chunks, and are soon free for the next row.
    const u32 place = opaque((u32(team) + TAKERS - first) % TAKERS);
    const bool takes = team < TAKERS && place < count;
    typename T::Running r;
    T::begin(r);
    const u8* head = own + t * 16;
    const u8 *low = head + (takes && g < QUERIES ? g : 0) * QUERY_BYTES, *high = head + (takes && g + 8 < QUERIES ? g + 8 : 0) * QUERY_BYTES;
    // The row's own position comes first, then STEPs of the history. One loop has both, so that `tile` is inlined here only once.
    const typename T::Queries queries(low, high);
    bool is_own = takes && place == 0;
    if constexpr (CUTS) is_own = is_own && task.is_last;
    if constexpr (SINKS_OF<G>)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (is_own && g + h * 8 < QUERIES) T::begin_with(r, h, H::sink(c, e, task.head + g + h * 8), lane);
#pragma unroll 1
    for (int chunk = begin, at = begin; is_own || chunk < end;) {
      const u8 *keys = own + QUERIES * QUERY_BYTES, *values = keys + ROW;
      int lo[2] = {0, 0}, hi[2] = {1, 1}, there = 1;
      bool sees = true, ends = false;
      if (!is_own) {
        const u8* slot = wave_take(c, c.inputs);
        keys = slot + (at - chunk) * ROW, values = keys + TILE * ROW;
        lo[0] = lo[1] = start - at, hi[0] = hi[1] = there = end - at;
        sees = takes && (count == 1 || u32(at - begin) / STEP % TAKERS == place) && at + STEP > start;
        ends = !takes || at + STEP >= min(chunk + TILE, end);
      }
      if (sees) T::tile(lane, queries, keys, values + part * 128, lo, hi, there, r);
      if (ends) wave_release(c, c.inputs), chunk += TILE;
      if (!is_own) at = ends ? chunk : at + STEP;
      is_own = false;
    }
    if (task.lead > 0) {
#pragma unroll 1
      for (int at = max(begin, end); at < limit; at += STEP) {
        const int there = min(STEP, limit - at), from = start - at;
        c.barrier();
        gather(c, e, task, u32(at), u32(there));
        c.barrier();
        if (takes && (count == 1 || u32(at - begin) / STEP % TAKERS == place) && at + STEP > start) {
          const u8* keys = scratch(c, AFTER_OWN);
          const int lo[2] = {from, from}, hi[2] = {there, there};
          T::tile(lane, typename T::Queries(low, high), keys, keys + STEP * ROW + part * 128, lo, hi, there, r);
        }
      }
      c.barrier();
    }
    float sum[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] = r.l[h];
      sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
      sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    }
    u8* out = c.template work<u8>(e.out);
    const auto put = [&](int query, int col, float a, float b) {
      if constexpr (GATED_OF<G>) {
        const float2 gate = H::open(*reinterpret_cast<const u32*>(own + GATES_AT + query * (G::DIM * 2) + col * 2));
        a *= gate.x, b *= gate.y;
      }
      u32* const to = reinterpret_cast<u32*>(out + OutPlace<M, G, H::QUERY_COLS>::at(int(task.row), (task.head + query) * G::DIM + col));
      c.template give<everywhere<M, G>()>(to, bf16_pair(a, b));
    };
    if (count == 1) {
      // One team has read the whole history, so nothing is merged.
      if (takes)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          if (g + h * 8 >= QUERIES) continue;
          const float factor = __fdividef(1.f, sum[h]);
#pragma unroll
          for (int n = 0; n < T::VALUE_TILES; n++) put(g + h * 8, part * 64 + n * 8 + t * 2, r.o[n][2 * h] * factor, r.o[n][2 * h + 1] * factor);
        }
      return;
    }
    // Layout: [place of a team][head][largest score, sum, values].
    if (team < TAKERS)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        if (g + h * 8 >= QUERIES) continue;
        float* at = left(c) + place * LEFT + (g + h * 8) * (G::DIM + 2);
        if (t == 0 && part == 0) at[0] = r.m[h], at[1] = sum[h];
#pragma unroll
        for (int n = 0; n < T::VALUE_TILES; n++) *reinterpret_cast<float2*>(at + 2 + part * 64 + n * 8 + t * 2) = make_float2(r.o[n][2 * h], r.o[n][2 * h + 1]);
      }
    c.barrier();
#pragma unroll 1
    for (int i = c.tid(); i < QUERIES * G::DIM / 2; i += M::WARPS * 32) {
      const int query = i / (G::DIM / 2), col = i % (G::DIM / 2) * 2;
      const float* at = left(c) + query * (G::DIM + 2);
      float top = NEGATIVE_INFINITY, all = 0.f, x = 0.f, y = 0.f;
#pragma unroll
      for (int w = 0; w < TAKERS; w++) top = fmaxf(top, at[w * LEFT]);
#pragma unroll
      for (int w = 0; w < TAKERS; w++) {
        const float* of = at + w * LEFT;
        const float weight = exp_fast(of[0] - top);
        const float2 v = *reinterpret_cast<const float2*>(of + 2 + col);
        all += weight * of[1], x += weight * v.x, y += weight * v.y;
      }
      if (task.is_only) {
        const float factor = __fdividef(1.f, all);
        put(query, col, x * factor, y * factor);
      } else if constexpr (CUTS) {
        float* to = WaveSplits<M, G>::left(c.p, e, task.row, task.split, task.head + query);
        if (col == 0) *reinterpret_cast<float2*>(to) = make_float2(top, all);
        *reinterpret_cast<float2*>(to + 2 + col) = make_float2(x, y);
      }
    }
    c.barrier();
  }
};

// Each task reads a whole history. The division of the wave assigns rows and groups of heads to blocks.
template <class M, class G>
struct WaveAttendRow {
  typedef WaveAttention<M, G, false> A;

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e) {
    if constexpr (R::FIRST == 0) {
      const Shares<M> shares(l.p, e.division);
      for (u32 s = 0; s < shares.count; s++) {
        const Share share = shares[s];
        if (share.row >= l.p.row_count) continue;
        A::load(l, e, WaveSplit{share.row, share.lo, 0});
      }
    }
  }
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 turns = 0;
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s += A::TASKS) {
      if (s > 0) c.barrier();
      A::prepare(c, e, shares.count - s, [&](u32 i) {
        const Share share = shares.of_lane(s + i);
        return WaveSplit{share.row, share.lo, 0};
      });
      c.barrier();
#pragma unroll 1
      for (u32 i = s; i < min(s + A::TASKS, shares.count); i++) {
        const Share share = shares[i];
        // Only the loader uses the sequence of a task, to find its pages. So none is passed here.
        if (share.row < c.p.row_count)
          A::one(c, e, typename A::Task(WaveSplit{share.row, share.lo, 0}, 0, wave_position<M>(c.p, c.step, share.row)), A::scratch(c, (i - s) * A::OWN_BYTES), turns);
      }
    }
  }
};

// Each task reads one KV split. `WaveSplits` assigns splits to blocks. The division of the wave is not used here; it is that of `WaveMerge`.
template <class M, class G>
struct WaveAttendSplits {
  typedef WaveAttention<M, G, true> A;
  typedef typename WaveSplits<M, G>::Deal Deal;
  static_assert(A::TASKS <= M::WARPS, "a warp finds each task at hand");
  static_assert(sizeof(WaveState<M>) + A::TASKS * sizeof(WaveSplit) <= M::STATE_BYTES, "the state part has no room for the splits at hand");
  // The splits of the current tasks of a block. They lie in shared memory after the state.
  static __device__ __forceinline__ WaveSplit* held(const WaveContext<M>& c) { return reinterpret_cast<WaveSplit*>(&c.state() + 1); }

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e) {
    if constexpr (R::FIRST == 0) {
      const Deal deal(l.p, l.step, l.lane);
#pragma unroll 1
      for (u32 n = blockIdx.x; n < deal.items(); n += M::SMS) A::load(l, e, deal[n]);
    }
  }
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    u32 turns = 0;
    const u32 count = Deal(c.p, c.step, c.lane()).of_block();
#pragma unroll 1
    for (u32 s = 0; s < count; s += A::TASKS) {
      if (s > 0) c.barrier();
      const u32 tasks = min(u32(A::TASKS), count - s);
      // The deal is computed again for each group of tasks, so that it occupies no registers while splits are read.
      if (u32(c.warp()) < tasks) {
        const WaveSplit of = Deal(c.p, c.step, c.lane())[blockIdx.x + (s + u32(c.warp())) * M::SMS];
        if (c.lane() == 0) held(c)[c.warp()] = of;
      }
      c.barrier();
      A::prepare(c, e, tasks, [&](u32 i) { return held(c)[i]; });
      c.barrier();
#pragma unroll 1
      for (u32 i = 0; i < tasks; i++) {
        const WaveSplit of = {uniform(held(c)[i].row), uniform(held(c)[i].group), uniform(held(c)[i].split)};
        A::one(c, e, typename A::Task(of, 0, wave_position<M>(c.p, c.step, of.row)), A::scratch(c, i * A::OWN_BYTES), turns);
      }
    }
  }
};

// The wave after `WaveAttendSplits`. For each row with several splits, adds up their results, in the order of the splits.
template <class M, class G>
struct WaveMerge {
  typedef WaveSplits<M, G> S;

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= c.p.row_count) continue;
      const u32 splits = S::count(wave_position<M>(c.p, c.step, share.row));
      if (splits > 1) merge(c, e, share.row, int(share.lo) * S::QUERIES, splits);
    }
  }
  // By all warps, for the heads of one task, from `head` on.
  static __device__ __forceinline__ void merge(WaveContext<M>& c, const Wave& e, u32 row, int head, u32 splits) {
#pragma unroll 1
    for (int i = c.tid(); i < S::QUERIES * G::DIM / 2; i += M::WARPS * 32) {
      const int query = i / (G::DIM / 2), col = i % (G::DIM / 2) * 2;
      const float* at = S::left(c.p, e, row, 0, head + query);
      float top = NEGATIVE_INFINITY, all = 0.f, x = 0.f, y = 0.f;
#pragma unroll 8
      for (u32 s = 0; s < splits; s++, at += G::HEADS * (G::DIM + 2)) {
        const float2 of = *reinterpret_cast<const float2*>(at), v = *reinterpret_cast<const float2*>(at + 2 + col);
        const float now = fmaxf(top, of.x), shrink = exp_fast(top - now), weight = exp_fast(of.x - now);
        top = now;
        all = all * shrink + weight * of.y;
        x = x * shrink + weight * v.x, y = y * shrink + weight * v.y;
      }
      const float factor = __fdividef(1.f, all);
      if constexpr (GATED_OF<G>) {
        const float2 gate = S::H::gates(c, e.x, int(row), (head + query) * G::DIM + col);
        x *= gate.x, y *= gate.y;
      }
      *reinterpret_cast<u32*>(c.template work<u8>(e.out) + OutPlace<M, G, S::H::QUERY_COLS>::at(int(row), (head + query) * G::DIM + col)) = bf16_pair(x * factor, y * factor);
    }
  }
};
