// attention of one row of the step: q/k norm, RoPE, cache append, and softmax(scale * q K^T) V over the history of its sequence and
// the rows of its sequence in this step, up to itself.
//
// q, k, v (ROWS, ..)   words; q of the task's row, k and v of the rows of its sequence, from the first in the step to this one
// K, V                 pages of one KV head, through the ring: a K and a V chunk in turn, no chunk reaches beyond its page
// gate                 words after v, if the output is gated; sinks (HEADS) one more score of each softmax
// out                  QUERIES * DIM columns of the task's row
//
// owner    of QUERIES query heads of a row: one task; the one with the first query head of a KV head appends the row to its page
// moves    2 * PITCH values for each position before the step; (QUERIES + 2 * rows of the sequence) * DIM values of q, k and v
// assumes  rows of a sequence are neighbours at ascending positions; positions before the first of them are in the cache,
//          acquired with the step
//
// Keys and values of the step never travel through the cache: every task rounds them as they will be appended, and takes them as
// tiles after the history.
#pragma once

// What a task knows of its row.
template <class M>
struct OwnRow {
  int row, count;       // of the step; rows of its sequence up to itself
  u32 position, before; // own position; that of the first row of its sequence, which ends the history
  u32 begin, start;     // first position of the first chunk; first position that is seen
  __device__ __forceinline__ OwnRow(const Context<M>& c, const Entry& e, u32 window) {
    const RowsParams& p = rows_params(c);
    row = int(uniform(e.row));
    const u32 first = uniform(p.rows[row].first);
    count = row - int(first) + 1;
    position = uniform(position_of(c, row));
    before = uniform(position_of(c, int(first)));
    start = window && position + 1 > window ? position + 1 - window : 0;
    begin = history_begin(position, window);
  }
  // Rows of the history from `begin` on.
  __device__ __forceinline__ int history() const { return begin < before ? int(before - begin) : 0; }
};

// Walks the history of the row through pairs of chunks. `teams` teams take its tiles of TILE rows in turn, and call f(keys and values
// of the chunk, its place in the history, first row of the tile in it, rows of the chunk). Returns the turn after the last one.
template <int TILE, class M, class G, class F>
__device__ __forceinline__ int walk_history(Context<M>& c, const OwnRow<M>& own, int teams, int team, F f) {
  int turn = 0;
  const int rows = own.history();
#pragma unroll 1
  for (int at = 0; at < rows;) {
    const int chunk = min(G::CHUNK_ROWS - int(own.begin + at) % G::CHUNK_ROWS, rows - at);
    const RingCursor<M> first = c.ring;
    c.ring.next();
    const u8 *k, *v;
    ring_take_pair(c, first, c.ring, k, v);
#pragma unroll 1
    for (int row = 0; row < chunk; row += TILE, turn++)
      if (turn % teams == team) f(k, v, at, row, chunk);
    ring_release_pair(c, first, c.ring);
    c.ring.next();
    at += chunk;
  }
  return turn;
}

// As PacketGates, from the words of one row.
template <class M, class G>
struct WordGates {
  static constexpr bool THERE = GATED_OF<G>;
  typedef Words<M, QKV_COLS<G>> W;
  Context<M>& c;
  const u8* words;
  int row, first; // of the step; head of the task
  __device__ __forceinline__ float2 operator()(int h, int d, bool live) const {
    if constexpr (THERE) {
      constexpr int N = 2 / W::WORD_COLS;
      const int col = G::GATE_AT + (first + h) * G::DIM + (live ? d : 0);
      bool active[N];
      u32 word[N];
#pragma unroll
      for (int n = 0; n < N; n++) active[n] = live;
      await_words<N>(words, [&](int n) { return W::at(row, col + n * W::WORD_COLS); }, active, word, c.waiter());
      if constexpr (N == 1) return make_float2(sigmoid(bf16_lo(word[0])), sigmoid(bf16_hi(word[0])));
      else return make_float2(sigmoid(__uint_as_float(word[0])), sigmoid(__uint_as_float(word[N - 1])));
    }
    return make_float2(1.f, 1.f);
  }
};

template <class M, class G>
struct RowsAttentionTensor {
  static constexpr int COLS = QKV_COLS<G>;
  typedef Words<M, COLS> W;
  static constexpr int QUERIES = G::HEADS_PER_TASK, KV_HEADS = G::HEADS / G::GROUP;
  static constexpr int WARPS_PER_HEAD = G::WARPS_PER_HEAD, WARP_TEAMS = M::WARPS / WARPS_PER_HEAD;
  static constexpr int VALUE_TILES = G::DIM / WARPS_PER_HEAD / 8;
  static constexpr bool FP8 = M::CACHE == Elem::FP8;
  static constexpr int ELEM = ElemOf<M::CACHE>::BYTES, ROW = G::PITCH * ELEM; // bytes of a cache row
  static constexpr int OWN_TILE = 16, OWN_ROWS = round_up(M::ROWS, OWN_TILE); // rows of the step in a tile, and room for all
  static constexpr bool HALVES = G::ROTARY > 0 && !G::INTERLEAVED, PREFETCH_V = G::PREFETCH_V;
  typedef AttentionRecords<M, G, WARP_TEAMS> Records;
  typedef AttentionTensor<M, G> One;
  typedef CacheScales<M, G> Scales;

  static __device__ __forceinline__ u8* query_at(const Context<M>& c, int h) { return reinterpret_cast<u8*>(c.heads()) + h * (G::DIM * 2); }
  static __device__ __forceinline__ u8* keys(const Context<M>& c) { return query_at(c, QUERIES); }
  static __device__ __forceinline__ u8* values(const Context<M>& c) { return keys(c) + OWN_ROWS * ROW; }

  // Brings heads from their words to shared memory: norm, RoPE, rounding. A lane takes 16 bytes, so a warp takes several heads.
  static constexpr int PIECES = G::DIM / 8, LANES = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32, HEADS_AT_ONCE = 32 / LANES;
  static constexpr int TURNED = HALVES ? G::ROTARY / 8 : 2; // pieces that are rotated in halves
  static __device__ __forceinline__ void heads(Context<M>& c, const Entry& e, const OwnRow<M>& own, const Scales& scales, int i) {
    const int lane = c.lane() % LANES, kv = i * QUERIES / G::GROUP, all = QUERIES + 2 * own.count;
    const u8* x = words_of<M, COLS>(c, e.x);
#pragma unroll 1
    for (int first = c.warp() * HEADS_AT_ONCE; first < all; first += M::WARPS * HEADS_AT_ONCE) {
      // Queries, then keys, then values, of each row of the sequence.
      const int n = first + c.lane() / LANES, kind = n < QUERIES ? 0 : n < QUERIES + own.count ? 1 : 2;
      const int of = kind == 0 ? own.count - 1 : kind == 1 ? n - QUERIES : n - QUERIES - own.count;
      const int row = own.row - own.count + 1 + of, head = kind == 0 ? i * QUERIES + n : G::HEADS + (kind - 1) * KV_HEADS + kv;
      const bool live = n < all && lane < PIECES;
      const u8* from = x + W::at(live ? row : 0, live ? head * G::DIM + lane * 8 : 0);
      uint4 v[1] = {make_uint4(0, 0, 0, 0)};
      load_piece(from, live, v[0]);
      // If halves are rotated, a lane has 8 dimensions of one half, and the lane TURNED / 2 on has their partners.
      const bool turns = kind < 2 && (!HALVES || lane < TURNED);
      float cosine[8], sine[8], weight[8];
      const float* angle = c.template constant<float>(e.rope) + u64(own.before + of) * G::ROTARY;
      if constexpr (G::ROTARY > 0)
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const int at = HALVES ? lane % (TURNED / 2) * 8 + k : lane * 4 + k / 2;
          cosine[k] = live && turns ? __ldg(angle + at) : 1.f;
          sine[k] = live && turns ? __ldg(angle + G::ROTARY / 2 + at) : 0.f;
        }
      const bool norm = kind == 0 ? G::Q_NORM == HeadNorm::HEAD : kind == 1 && G::K_NORM == HeadNorm::HEAD;
      if constexpr (G::Q_NORM == HeadNorm::HEAD || G::K_NORM == HeadNorm::HEAD)
#pragma unroll
        for (int k = 0; k < 8; k++)
          weight[k] = live && norm ? __ldg(c.template constant<float>(kind == 0 ? e.q_norm : e.k_norm) + lane * 8 + k) : 1.f;
      await_pieces<1>(from, [](int) { return 0u; }, v, c.waiter());
      float y[8];
      unpack_piece<M>(v[0], y);
      const auto normed = [&] {
        if constexpr (G::Q_NORM == HeadNorm::HEAD || G::K_NORM == HeadNorm::HEAD) {
          float squares = 0.f;
#pragma unroll
          for (int k = 0; k < 8; k++) squares += y[k] * y[k];
#pragma unroll
          for (int o = LANES / 2; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
          const float factor = norm ? rsqrtf(squares * (1.f / G::DIM) + (kind == 0 ? G::Q_EPS : G::K_EPS)) : 1.f;
#pragma unroll
          for (int k = 0; k < 8; k++) y[k] *= factor * weight[k];
        }
      };
      if constexpr (!NORM_AFTER_ROPE_OF<G>) normed();
      if constexpr (HALVES) {
        const int partner = c.lane() - lane + (lane < TURNED ? (lane + TURNED / 2) % TURNED : lane);
        const float sign = lane < TURNED / 2 ? -1.f : 1.f;
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const float other = __shfl_sync(~0u, y[k], partner);
          if (turns) y[k] = y[k] * cosine[k] + sign * other * sine[k];
        }
      } else if constexpr (G::ROTARY > 0) {
#pragma unroll
        for (int k = 0; k < 8; k += 2)
          if (kind < 2) One::rotate(y[k], y[k + 1], cosine[k], sine[k]);
      }
      if constexpr (NORM_AFTER_ROPE_OF<G>) normed();
      if constexpr (QUERY_SCALE_OF<G>) {
        const float factor = kind == 0 ? query_factor<G>(own.position) : 1.f;
#pragma unroll
        for (int k = 0; k < 8; k++) y[k] *= factor;
      }
      if constexpr (FP8) {
        const auto query = [&](int k) { return f16_pair(One::in_f16(y[k]), One::in_f16(y[k + 1])); };
        const auto cached = [&](int k) { return e4m3_pair(scales.units(kind == 1, y[k]), scales.units(kind == 1, y[k + 1])); };
        if (live) {
          if (kind == 0)
            *reinterpret_cast<uint4*>(query_at(c, n) + lane * 16) = make_uint4(query(0), query(4), query(2), query(6)); // as `operand_byte` has them
          else
            *reinterpret_cast<uint2*>((kind == 1 ? keys(c) : values(c)) + of * ROW + (lane / 2 ^ swizzle_of<ROW>(of)) * 16 + lane % 2 * 8) =
                make_uint2(cached(0) | cached(2) << 16, cached(4) | cached(6) << 16);
        }
      } else {
        const u32 w0 = bf16_pair(y[0], y[1]), w1 = bf16_pair(y[2], y[3]), w2 = bf16_pair(y[4], y[5]), w3 = bf16_pair(y[6], y[7]);
        if (live) {
          if (kind == 0)
            *reinterpret_cast<uint4*>(query_at(c, n) + lane * 16) = make_uint4(w0, w2, w1, w3); // as `operand_byte` has them
          else
            *reinterpret_cast<uint4*>((kind == 1 ? keys(c) : values(c)) + of * ROW + (lane ^ swizzle(of)) * 16) = make_uint4(w0, w1, w2, w3);
        }
      }
    }
  }

  // The running softmax of a warp.
  struct Running {
    float m, l, o[VALUE_TILES][2];
  };
  // 16 rows at `keys` and `values`, of which those from `lo` up to `hi` are seen.
  static __device__ __forceinline__ void tile(const Context<M>& c, const Scales& scales, const typename One::Queries& q, const u8* keys,
                                              const u8* values, int lo, int hi, Running& r) {
    const int t = c.lane() % 4;
    const u32 key_at = c.lane() / 4 * ROW + (c.lane() % 4 ^ swizzle_of<ROW>(c.lane() / 4)) * 16;
    const u32 value_at = c.lane() % 16 * ROW + (c.lane() / 16 ^ swizzle_of<ROW>(c.lane() % 16)) * 16;
    Products products[2] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int j = 0; j < One::KEY_PARTS; j++) {
        if constexpr (FP8) One::add_codes(products[n], q, j, *reinterpret_cast<const uint4*>(keys + n * 8 * ROW + j / 2 * 128 + (key_at ^ j % 2 * 64)));
        else products[n].add(q(j), *reinterpret_cast<const uint4*>(keys + n * 8 * ROW + j / 2 * 128 + (key_at ^ j % 2 * 64)));
      }
    }
    const u32 first = smem_address(values) + c.warp() % WARPS_PER_HEAD * (VALUE_TILES * 8 * ELEM);
    const auto value = [&](int n) {
      uint4 b;
      One::load_transposed(first + n / 4 * 128 + (value_at ^ n % 4 * 32), b);
      return b;
    };
    uint4 ahead[PREFETCH_V ? One::VALUE_LOADS : 1];
    if constexpr (PREFETCH_V)
#pragma unroll
      for (int n = 0; n < One::VALUE_LOADS; n++) ahead[n] = value(n);
    float s[2][2], top = r.m;
    const auto seen = [&](int row) { return row >= lo && row < hi; };
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        const float score = One::score(scales, products[n], k);
        s[n][k] = seen(t * 2 + n * 8 + k) ? score : NEGATIVE_INFINITY;
        top = fmaxf(top, s[n][k]);
      }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    // A tile of which no row is seen changes nothing.
    const float shift = top > NEGATIVE_INFINITY ? top : 0.f, shrink = exp_fast(r.m - shift);
    r.m = top;
    r.l *= shrink;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        s[n][k] = exp_fast(s[n][k] - shift);
        r.l += s[n][k];
      }
    const u32 p0 = One::weights(s[0][0], s[0][1]), p2 = One::weights(s[1][0], s[1][1]);
    // Bytes of rows that are not there are whatever the memory held before; 0 * NaN would spread.
    u32 low = ~0u, high = ~0u;
    if (lo > 0 || hi < 16) {
      low = (seen(t * 2) ? 0xffffu : 0u) | (seen(t * 2 + 1) ? 0xffff0000u : 0u);
      high = (seen(t * 2 + 8) ? 0xffffu : 0u) | (seen(t * 2 + 9) ? 0xffff0000u : 0u);
    }
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++) {
      r.o[n][0] *= shrink;
      r.o[n][1] *= shrink;
    }
#pragma unroll
    for (int n = 0; n < One::VALUE_LOADS; n++) {
      const uint4 v = PREFETCH_V ? ahead[PREFETCH_V ? n : 0] : value(n);
      if constexpr (FP8) {
        One::add_weighted(r.o, n, p0, p2, v, low, high);
      } else {
        mma_rows8(r.o[2 * n][0], r.o[2 * n][1], p0, p2, v.x & low, v.y & high);
        mma_rows8(r.o[2 * n + 1][0], r.o[2 * n + 1][1], p0, p2, v.z & low, v.w & high);
      }
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int i = int(uniform(e.lo)), g = c.lane() / 4, t = c.lane() % 4;
    const OwnRow<M> own(c, e, G::WINDOW);
    const Scales scales(c, e, i * QUERIES / G::GROUP);
    heads(c, e, own, scales, i);
    c.barrier();
    c.stamp(1);
    const typename One::Queries q(query_at(c, g < QUERIES ? g : 0) + t * (FP8 ? 32 : 16)); // rows of the product beyond QUERIES are never read
    Running r;
    r.m = NEGATIVE_INFINITY, r.l = 0.f;
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++) r.o[n][0] = r.o[n][1] = 0.f;
    // Teams take tiles in turn, over chunks and the own rows.
    const int team = c.warp() / WARPS_PER_HEAD;
    int turn = walk_history<16, M, G>(c, own, WARP_TEAMS, team, [&](const u8* k, const u8* v, int at, int row, int chunk) {
      tile(c, scales, q, k + row * ROW, v + row * ROW, int(own.start - own.begin) - at - row, chunk - row, r);
    });
    // A window may begin inside the rows of the step.
    for (int at = 0; at < (M::ROWS > OWN_TILE ? own.count : 1); at += OWN_TILE, turn++)
      if (turn % WARP_TEAMS == team)
        tile(c, scales, q, keys(c) + at * ROW, values(c) + at * ROW, int(own.start) - int(own.before) - at, own.count - at, r);
    r.l += __shfl_xor_sync(~0u, r.l, 1);
    r.l += __shfl_xor_sync(~0u, r.l, 2);
    if (g < QUERIES) {
      float* record = Records::of(c, team, g);
      if (t == 0) *reinterpret_cast<float2*>(record) = make_float2(r.m, r.l);
      if constexpr (FP8) {
        One::store_sums(record + Records::HEADER + c.warp() % WARPS_PER_HEAD * (VALUE_TILES * 8), t, scales, r.o);
      } else {
#pragma unroll
        for (int n = 0; n < VALUE_TILES; n++)
          *reinterpret_cast<float2*>(record + Records::HEADER + (c.warp() % WARPS_PER_HEAD * VALUE_TILES + n) * 8 + t * 2) = make_float2(r.o[n][0], r.o[n][1]);
      }
    }
    c.barrier();
    c.stamp(2);
    const HeadSinks<M, G> sinks(c, e, i * QUERIES, true);
    const WordGates<M, G> gate{c, words_of<M, COLS>(c, e.x), own.row, i * QUERIES};
    Records::merge(c, false, [](int) { return make_float2(0.f, 0.f); }, sinks, gate, [&](int h, int d, float, float sum, float a, float b) {
      publish_pair<G::HEADS * G::DIM>(c, words_of<M, G::HEADS * G::DIM>(c, e.out), own.row, (i * QUERIES + h) * G::DIM + d, __fdividef(a, sum), __fdividef(b, sum));
    });
    // After publishing: no SM reads the row in this step. The end of the step releases it.
    if (i % (G::GROUP / QUERIES) == 0 && c.warp() == M::WARPS - 1) {
      const RowsParams& p = rows_params(c);
      const u32 of = own.count - 1;
      const u64 row = u64(i * QUERIES / G::GROUP) * M::POOL_ROWS + pool_row<M>(p.pages, p.rows[own.row].sequence, own.position);
      constexpr int CACHED = G::DIM * ELEM / 16; // pieces of 16 bytes of a row
#pragma unroll
      for (int n = 0; n < 2 * CACHED; n += 32) {
        const u32 at = n + c.lane();
        if (at < 2 * CACHED) {
          u8* to = p.cache + u64(at < CACHED ? e.k_cache : e.v_cache) * OFFSET_BYTES + row * ROW;
          const u8* from = (at < CACHED ? keys(c) : values(c)) + of * ROW;
          *reinterpret_cast<uint4*>(to + (at % CACHED ^ swizzle_of<ROW>(own.position)) * 16) = *reinterpret_cast<const uint4*>(from + (at % CACHED ^ swizzle_of<ROW>(of)) * 16);
        }
      }
    }
    c.barrier(); // the next task may use the places of records and heads
  }
};

// All other shapes: heads of fp32 in shared memory, a row of keys for each lane.
template <class M, class G>
struct RowsAttentionLanes {
  static constexpr int COLS = QKV_COLS<G>;
  typedef Words<M, COLS> W;
  typedef Attention<M, G> One;
  typedef typename ElemOf<M::CACHE>::type C;
  typedef AttentionRecords<M, G, M::WARPS> Records;
  static constexpr int QUERIES = G::HEADS_PER_TASK, KV_HEADS = G::HEADS / G::GROUP, WORDS = G::DIM / W::WORD_COLS;
  static constexpr int LANE_DIMS = ceil_div(G::DIM, 32);

  static __device__ __forceinline__ float* query(const Context<M>& c, int h) { return c.heads() + h * G::DIM; }
  static __device__ __forceinline__ float* keys(const Context<M>& c) { return query(c, QUERIES); }
  static __device__ __forceinline__ float* values(const Context<M>& c) { return keys(c) + M::ROWS * G::DIM; }

  // By a warp: `cols` columns of a row from `col` on, 32 words at a time; f(column, value).
  template <class F>
  static __device__ __forceinline__ void columns(Context<M>& c, const u8* x, int row, int col, int cols, F f) {
#pragma unroll 1
    for (int first = 0; first < cols / W::WORD_COLS; first += 32) {
      const int at = (first + c.lane()) * W::WORD_COLS;
      const bool live[1] = {at < cols};
      u32 word[1];
      const u32 offset = W::at(row, col + (live[0] ? at : 0));
      await_words<1>(x, [&](int) { return offset; }, live, word, c.waiter());
      if (!live[0]) continue;
      if constexpr (W::WORD_COLS == 2) {
        f(at, bf16_lo(word[0]));
        f(at + 1, bf16_hi(word[0]));
      } else {
        f(at, __uint_as_float(word[0]));
      }
    }
  }
  static __device__ __forceinline__ float squares(Context<M>& c, const u8* x, int row, int col, int cols) {
    float sum = 0.f;
    columns(c, x, row, col, cols, [&](int, float v) { sum += v * v; });
    return warp_sum(sum);
  }
  static __device__ __forceinline__ typename One::Angles angles(const Context<M>& c, const Entry& e, u32 position) {
    typename One::Angles a;
    const float* row = c.template constant<float>(e.rope) + u64(position) * G::ROTARY;
#pragma unroll
    for (int k = 0; k < One::PAIRS_PER_LANE; k++) {
      const int i = k * 32 + c.lane();
      a.cosine[k] = i < One::PAIRS ? __ldg(row + i) : 1.f;
      a.sine[k] = i < One::PAIRS ? __ldg(row + One::PAIRS + i) : 0.f;
    }
    return a;
  }
  static __device__ __forceinline__ void heads(Context<M>& c, const Entry& e, const OwnRow<M>& own, const CacheScales<M, G>& scales, int i) {
    const u8* x = words_of<M, COLS>(c, e.x);
    const int kv = i * QUERIES / G::GROUP;
#pragma unroll 1
    for (int n = c.warp(); n < QUERIES + 2 * own.count; n += M::WARPS) {
      const int kind = n < QUERIES ? 0 : n < QUERIES + own.count ? 1 : 2;
      const int of = kind == 0 ? own.count - 1 : kind == 1 ? n - QUERIES : n - QUERIES - own.count;
      const int row = own.row - own.count + 1 + of, head = kind == 0 ? i * QUERIES + n : G::HEADS + (kind - 1) * KV_HEADS + kv;
      float* to = kind == 0 ? query(c, n) : (kind == 1 ? keys(c) : values(c)) + of * G::DIM;
      columns(c, x, row, head * G::DIM, G::DIM, [&](int d, float v) { to[d] = v; });
      __syncwarp();
      const typename One::Angles angle = angles(c, e, own.before + of);
      if (kind == 0) {
        const float all = G::Q_NORM == HeadNorm::PROJECTION ? squares(c, x, row, 0, G::HEADS * G::DIM) : 0.f;
        One::template prepare<G::Q_NORM>(c, angle, to, all, G::HEADS * G::DIM, G::Q_EPS, e.q_norm, head);
        One::scale(c, to, own.position);
      } else {
        if (kind == 1) {
          const float all = G::K_NORM == HeadNorm::PROJECTION ? squares(c, x, row, G::HEADS * G::DIM, KV_HEADS * G::DIM) : 0.f;
          One::template prepare<G::K_NORM>(c, angle, to, all, KV_HEADS * G::DIM, G::K_EPS, e.k_norm, kv);
        }
        // What later steps will read: values rounded to the cache type.
        for (int d = c.lane(); d < G::DIM; d += 32) to[d] = One::rounded(scales.units(kind == 1, to[d]));
      }
      __syncwarp();
    }
  }

  struct Running {
    float m, l, o[LANE_DIMS];
  };
  // 32 rows of `pitch` values, of which those from `lo` up to `hi` are seen.
  template <class V>
  static __device__ __forceinline__ void tile(const Context<M>& c, const CacheScales<M, G>& scales, const V* keys, const V* values, int pitch,
                                              int lo, int hi, Running (&running)[QUERIES]) {
    const bool live = c.lane() >= lo && c.lane() < hi;
#pragma unroll 1
    for (int h = 0; h < QUERIES; h++) {
      Running& r = running[h];
      float s = 0.f;
      if (live)
        for (int d = 0; d < G::DIM; d++) {
          // Each lane starts at another dimension, or all would read one bank.
          const int at = (d + c.lane()) % G::DIM;
          s += query(c, h)[at] * widen(keys[c.lane() * pitch + at]);
        }
      s = live ? scales.score(s) : NEGATIVE_INFINITY;
      const float top = fmaxf(r.m, warp_max(s)), shift = top > NEGATIVE_INFINITY ? top : 0.f, shrink = __expf(r.m - shift);
      s = __expf(s - shift);
      r.m = top;
      r.l = r.l * shrink + warp_sum(s);
#pragma unroll
      for (int d = 0; d < LANE_DIMS; d++) r.o[d] *= shrink;
#pragma unroll 1
      for (int row = max(lo, 0); row < min(hi, 32); row++) {
        const float p = __shfl_sync(~0u, s, row);
#pragma unroll
        for (int d = 0; d < LANE_DIMS; d++)
          if (d * 32 + c.lane() < G::DIM) r.o[d] += p * widen(values[row * pitch + d * 32 + c.lane()]);
      }
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int i = int(uniform(e.lo));
    const OwnRow<M> own(c, e, G::WINDOW);
    const CacheScales<M, G> scales(c, e, i * QUERIES / G::GROUP);
    heads(c, e, own, scales, i);
    c.barrier();
    c.stamp(1);
    Running running[QUERIES];
#pragma unroll
    for (int h = 0; h < QUERIES; h++) {
      running[h].m = NEGATIVE_INFINITY, running[h].l = 0.f;
#pragma unroll
      for (int d = 0; d < LANE_DIMS; d++) running[h].o[d] = 0.f;
    }
    int turn = walk_history<32, M, G>(c, own, M::WARPS, c.warp(), [&](const u8* k, const u8* v, int at, int row, int chunk) {
      tile(c, scales, reinterpret_cast<const C*>(k) + row * G::PITCH, reinterpret_cast<const C*>(v) + row * G::PITCH, G::PITCH,
           int(own.start - own.begin) - at - row, chunk - row, running);
    });
    for (int at = 0; at < (M::ROWS > 32 ? own.count : 1); at += 32, turn++)
      if (turn % M::WARPS == c.warp())
        tile(c, scales, keys(c) + at * G::DIM, values(c) + at * G::DIM, G::DIM, int(own.start) - int(own.before) - at, own.count - at, running);
#pragma unroll
    for (int h = 0; h < QUERIES; h++) {
      float* record = Records::of(c, c.warp(), h);
      if (c.lane() == 0) record[0] = running[h].m, record[1] = running[h].l;
#pragma unroll
      for (int d = 0; d < LANE_DIMS; d++)
        if (d * 32 + c.lane() < G::DIM) record[Records::HEADER + d * 32 + c.lane()] = scales.sum(running[h].o[d]);
    }
    c.barrier();
    c.stamp(2);
    const HeadSinks<M, G> sinks(c, e, i * QUERIES, true);
    const WordGates<M, G> gate{c, words_of<M, COLS>(c, e.x), own.row, i * QUERIES};
    Records::merge(c, false, [](int) { return make_float2(0.f, 0.f); }, sinks, gate, [&](int h, int d, float, float sum, float a, float b) {
      publish_pair<G::HEADS * G::DIM>(c, words_of<M, G::HEADS * G::DIM>(c, e.out), own.row, (i * QUERIES + h) * G::DIM + d, __fdividef(a, sum), __fdividef(b, sum));
    });
    if (i % (G::GROUP / QUERIES) == 0) {
      const RowsParams& p = rows_params(c);
      const u64 row = u64(i * QUERIES / G::GROUP) * M::POOL_ROWS + pool_row<M>(p.pages, p.rows[own.row].sequence, own.position);
      for (int h = M::WARPS - 1 - c.warp(); h < 2; h += M::WARPS) {
        const float* x = (h == 0 ? keys(c) : values(c)) + (own.count - 1) * G::DIM;
        C* to = reinterpret_cast<C*>(p.cache + u64(h == 0 ? e.k_cache : e.v_cache) * OFFSET_BYTES) + row * G::PITCH;
        for (int d = c.lane(); d < G::DIM; d += 32) narrow(x[d], to + d);
      }
    }
    c.barrier();
  }
};

template <class M, class G>
struct RowsAttention {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int row = int(uniform(e.row));
    if (!takes_part<M>(row)) {
      constexpr int COLS = G::HEADS_PER_TASK * G::DIM;
      const int first = int(uniform(e.lo)) * COLS;
      for (int d = c.tid() * 2; d < COLS; d += M::WARPS * 64) clear_pair<G::HEADS * G::DIM>(c, words_of<M, G::HEADS * G::DIM>(c, e.out), row, first + d);
      return;
    }
    if constexpr (AttentionTensor<M, G>::FITS)
      RowsAttentionTensor<M, G>::run(c, e);
    else
      RowsAttentionLanes<M, G>::run(c, e);
  }
};
