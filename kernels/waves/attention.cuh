// Attention of the rows of a prompt chunk, in two waves: `WaveAppend` norms and rotates the heads, and appends keys and values to the
// cache; `WaveAttend` computes softmax(scale * q K^T) V for tiles of 16 rows of a head, over the cache up to each row's own position.
//
// qkv (rows, ..)  bf16 row by row: q, k and v of all heads
// q   (rows, ..)  bf16 row by row: normed, rotated
// K, V            pages of one KV head; the second wave reads them through the ring, K and V of TILE positions side by side
// out (rows, ..)  bf16, as products read it
//
// owner    of a row of a head: one warp in either wave
// assumes  rows of one sequence at consecutive positions; positions before the first are in the cache; heads as in ops/attention_tensor.cuh
#pragma once

template <class M, class G>
struct WaveHeads {
  static constexpr int KV_HEADS = G::HEADS / G::GROUP, COLS = (G::HEADS + 2 * KV_HEADS) * G::DIM, QUERY_COLS = G::HEADS * G::DIM;
  static constexpr int ROW = G::PITCH * 2; // bytes of a cache row
  // Rows of the pool of a KV head of keys or values.
  static __device__ __forceinline__ u8* pool(const WaveParams& p, u32 cache, int kv) {
    return p.cache + u64(cache) * OFFSET_BYTES + u64(kv) * M::POOL_ROWS * ROW;
  }
};

template <class M, class G>
struct WaveAppend {
  typedef WaveHeads<M, G> H;
  typedef AttentionTensor<M, G> One;
  static constexpr bool HALVES = G::ROTARY > 0 && !G::INTERLEAVED;
  // 16 bytes a lane, so several heads a warp.
  static constexpr int PIECES = G::DIM / 8, LANES = PIECES <= 8 ? 8 : PIECES <= 16 ? 16 : 32, HEADS_AT_ONCE = 32 / LANES;
  static constexpr int HEADS = G::HEADS + 2 * H::KV_HEADS;
  static constexpr int ROUNDS = 4; // heads that a lane has on their way at once

  static __device__ __forceinline__ void load(WaveLoader<M>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const Shares<M> shares(c.p, e.shares);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
      if (share.row >= end) continue;
      const int all = int(end - share.row) * HEADS;
      constexpr int STRIDE = M::WARPS * HEADS_AT_ONCE;
#pragma unroll 1
      for (int first = c.warp() * HEADS_AT_ONCE; first < all; first += ROUNDS * STRIDE) {
        uint4 v[ROUNDS];
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) v[i] = head_piece(c, e, Place(c, int(share.row), first + i * STRIDE, all));
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) heads(c, e, Place(c, int(share.row), first + i * STRIDE, all), v[i]);
      }
    }
  }
  // The piece of a head that a lane has.
  struct Place {
    int lane, row, head, kind; // queries, keys, values
    bool live;
    u32 position;
    __device__ __forceinline__ Place(const WaveContext<M>& c, int row0, int first, int all) : lane(c.lane() % LANES) {
      const int n = first + c.lane() / LANES;
      live = n < all && lane < PIECES;
      row = row0 + (live ? n / HEADS : 0), head = live ? n % HEADS : 0;
      kind = head < G::HEADS ? 0 : head < G::HEADS + H::KV_HEADS ? 1 : 2;
      position = c.p.position + u32(row);
    }
  };
  static __device__ __forceinline__ uint4 head_piece(const WaveContext<M>& c, const Wave& e, const Place& at) {
    const u8* from = c.template work<u8>(e.x) + (u64(at.row) * H::COLS + at.head * G::DIM + at.lane * 8) * 2;
    return at.live ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
  }
  // Some heads of a row, or of two.
  static __device__ __forceinline__ void heads(WaveContext<M>& c, const Wave& e, const Place& at, const uint4 v) {
    const int lane = at.lane, row = at.row, head = at.head, kind = at.kind;
    const bool live = at.live;
    const u32 position = at.position;
    float y[8];
    unpack8(v, y);
    if constexpr (G::Q_NORM == HeadNorm::HEAD || G::K_NORM == HeadNorm::HEAD) {
      const bool norm = kind == 0 ? G::Q_NORM == HeadNorm::HEAD : kind == 1 && G::K_NORM == HeadNorm::HEAD;
      float squares = 0.f;
#pragma unroll
      for (int k = 0; k < 8; k++) squares += y[k] * y[k];
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
      const float factor = norm ? rsqrtf(squares * (1.f / G::DIM) + (kind == 0 ? G::Q_EPS : G::K_EPS)) : 1.f;
      const float* weight = c.template constant<float>(kind == 0 ? e.q_norm : e.k_norm) + lane * 8;
#pragma unroll
      for (int k = 0; k < 8; k++) y[k] *= factor * (live && norm ? __ldg(weight + k) : 1.f);
    }
    // Of halves a lane has 8 dimensions of one half, and turns them with those of the lane PIECES / 2 on.
    const float* angle = c.template constant<float>(e.rope) + u64(position) * G::DIM;
    const bool turns = live && kind < 2;
    if constexpr (HALVES) {
      const int partner = c.lane() - lane + (lane + PIECES / 2) % PIECES, from = lane % (PIECES / 2) * 8;
      const float sign = lane < PIECES / 2 ? -1.f : 1.f;
#pragma unroll
      for (int k = 0; k < 8; k++) {
        const float other = __shfl_sync(~0u, y[k], partner);
        if (turns) y[k] = y[k] * __ldg(angle + from + k) + sign * other * __ldg(angle + G::DIM / 2 + from + k);
      }
    } else if constexpr (G::ROTARY > 0) {
#pragma unroll
      for (int k = 0; k < 8; k += 2)
        if (turns) One::rotate(y[k], y[k + 1], __ldg(angle + lane * 4 + k / 2), __ldg(angle + G::DIM / 2 + lane * 4 + k / 2));
    }
    const uint4 w = make_uint4(bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3]), bf16_pair(y[4], y[5]), bf16_pair(y[6], y[7]));
    if (!live) return;
    if (kind == 0) {
      *reinterpret_cast<uint4*>(c.template work<u8>(e.out) + (u64(row) * H::QUERY_COLS + head * G::DIM + lane * 8) * 2) = w;
    } else {
      const int kv = head - G::HEADS - (kind - 1) * H::KV_HEADS;
      u8* to = H::pool(c.p, kind == 1 ? e.k_cache : e.v_cache, kv) + u64(wave_pool_row<M>(c.p, position)) * H::ROW;
      *reinterpret_cast<uint4*>(to + (lane ^ swizzle(position)) * 16) = w;
    }
  }
};

template <class M, class G>
struct WaveAttend {
  typedef WaveHeads<M, G> H;
  typedef AttentionTensor<M, G> One;
  static constexpr int QUERIES = G::HEADS_PER_TASK, ROW_TILES = M::WARPS / QUERIES, TILE_ROWS = ROW_TILES * 16;
  static constexpr int HEAD_GRANULES = G::DIM / 32, VALUE_TILES = G::DIM / 8, ROW = H::ROW;
  static constexpr int TILE = G::TILE; // positions of a chunk; pages are whole tiles
  static_assert(2 * TILE * ROW <= M::SLOT_BYTES && TILE % 16 == 0 && M::PAGE_ROWS % TILE == 0, "a slot holds keys and values of a tile");
  // Queries stay in registers where the sums leave room for them.
  static constexpr bool HOLDS_QUERIES = G::DIM <= 128;
  // Positions whose scores are taken at once.
  static constexpr int STEP = HOLDS_QUERIES && TILE % 32 == 0 ? 32 : 16, STEP_TILES = STEP / 8;

  // Positions that a share reads: from a whole tile on.
  static __device__ __forceinline__ u32 begin_of(const WaveParams& p, const Share& s) {
    const u32 first = p.position + s.row;
    return (G::WINDOW && first + 1 > G::WINDOW ? first + 1 - G::WINDOW : 0) / TILE * TILE;
  }
  static __device__ __forceinline__ u32 end_of(const WaveParams& p, const Share& s) { return p.position + min(s.row + s.rows, p.row_count); }

  static __device__ __forceinline__ void load(WaveLoader<M>& l, const Wave& e) {
    const Shares<M> shares(l.p, e.shares);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= l.p.row_count) continue;
      const int kv = int(share.lo) * QUERIES / G::GROUP;
      const u32 end = end_of(l.p, share);
      for (u32 at = begin_of(l.p, share); at < end; at += TILE, l.at.next()) {
        const u32 bytes = min(u32(TILE), end - at) * ROW;
        u8* slot = l.free_slot();
        if (l.part == 0) l.meet();
        l.arrive(2 * bytes);
        if (l.part == 0 && l.lane < 2) {
          const u8* from = H::pool(l.p, l.lane == 0 ? e.k_cache : e.v_cache, kv) + u64(wave_pool_row<M>(l.p, at)) * ROW;
          l.copy(slot + l.lane * (TILE * ROW), from, bytes, false);
        }
        __syncwarp();
      }
    }
  }

  // Granule j of the queries of rows lane / 4 and lane / 4 + 8, as two operands.
  static __device__ __forceinline__ void load_queries(const u8* query, int j, uint4& first, uint4& second) {
    const uint4 a = *reinterpret_cast<const uint4*>(query + j * 64), b = *reinterpret_cast<const uint4*>(query + 8 * (H::QUERY_COLS * 2) + j * 64);
    first = make_uint4(a.x, b.x, a.y, b.y);
    second = make_uint4(a.z, b.z, a.w, b.w);
  }
  // The running softmax of rows lane / 4 and lane / 4 + 8 of a warp.
  struct Running {
    float m[2], l[2], o[VALUE_TILES][4];
  };
  // STEP positions at `keys` and `values`; row h sees those from lo[h] up to hi[h], and `there` have landed.
  static __device__ __forceinline__ void tile(int lane, const u8* query, const uint4 (&held)[HOLDS_QUERIES ? 2 * HEAD_GRANULES : 1], const u8* keys, const u8* values,
                                              const int (&lo)[2], const int (&hi)[2], int there, Running& r) {
    const int t = lane % 4;
    const u32 key_at = lane / 4 * ROW + (lane % 4 ^ swizzle(lane / 4)) * 16;
    const u32 value_at = lane % 16 * ROW + (lane / 16 ^ swizzle(lane % 16)) * 16;
    float s[STEP_TILES][4] = {};
#pragma unroll
    for (int j = 0; j < HEAD_GRANULES; j++) {
      uint4 q[2];
      if constexpr (HOLDS_QUERIES)
        q[0] = held[2 * j], q[1] = held[2 * j + 1];
      else
        load_queries(query, j, q[0], q[1]);
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
      // A tile of which nothing is seen changes nothing.
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
      // What has not landed is whatever the slot held before; 0 * NaN would spread.
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

  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const Shares<M> shares(c.p, e.shares);
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= c.p.row_count) continue;
      one(c, e, share);
    }
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, const Share& share) {
    const int lane = c.lane(), g = lane / 4, t = lane % 4, head = int(share.lo) * QUERIES + c.warp() % QUERIES;
    // Warps beyond whole groups of heads have no rows, and release what they take.
    const int row0 = int(share.row) + c.warp() / QUERIES * 16, end_row = c.warp() < QUERIES * ROW_TILES ? int(min(share.row + share.rows, c.p.row_count)) : 0;
    const bool live = row0 < end_row;
    const u8* query = c.template work<u8>(e.x) + (u64(live ? row0 + g : 0) * H::QUERY_COLS + (live ? head : 0) * G::DIM + t * 8) * 2;
    uint4 held[HOLDS_QUERIES ? 2 * HEAD_GRANULES : 1];
    if constexpr (HOLDS_QUERIES)
#pragma unroll
      for (int j = 0; j < HEAD_GRANULES; j++) load_queries(query, j, held[2 * j], held[2 * j + 1]);
    Running r;
#pragma unroll
    for (int h = 0; h < 2; h++) r.m[h] = NEGATIVE_INFINITY, r.l[h] = 0.f;
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++) r.o[n][0] = r.o[n][1] = r.o[n][2] = r.o[n][3] = 0.f;
    // Positions of the rows of this warp, and from where on each sees.
    const int first = int(c.p.position) + row0, last = int(c.p.position) + min(row0 + 16, end_row) - 1;
    const auto start = [](int position) { return G::WINDOW && position + 1 > int(G::WINDOW) ? position + 1 - int(G::WINDOW) : 0; };
    const int begin = int(begin_of(c.p, share)), end = int(end_of(c.p, share));
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += TILE) {
      const u8* slot = wave_take(c);
      if (live)
#pragma unroll 1
        for (int at = chunk; at < min(chunk + TILE, end); at += STEP) {
          if (at > last || at + STEP <= start(first)) continue;
          const int lo[2] = {start(first + g) - at, start(first + g + 8) - at}, hi[2] = {first + g + 1 - at, first + g + 9 - at};
          tile(lane, query, held, slot + (at - chunk) * ROW, slot + TILE * ROW + (at - chunk) * ROW, lo, hi, end - at, r);
        }
      wave_release(c);
    }
    if (!live) return;
    u8* out = c.template work<u8>(e.out);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = r.l[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = row0 + g + h * 8;
      if (row >= end_row) continue;
      const float factor = __fdividef(1.f, sum);
#pragma unroll
      for (int n = 0; n < VALUE_TILES; n++)
        *reinterpret_cast<u32*>(out + OperandPlace<H::QUERY_COLS>::at(row, head * G::DIM + n * 8 + t * 2)) =
            bf16_pair(r.o[n][2 * h] * factor, r.o[n][2 * h + 1] * factor);
    }
  }
};
