// attention: q/k norm, RoPE, cache append, and softmax(scale * q K^T) V over one share of the history (one of SPLITS KV splits). The
// last share also has the current position.
//
// q (QUERIES, DIM), k, v (DIM)   packets; k and v are read by the last share only
// gate (QUERIES, DIM)            packets after v, if the output is gated and SPLITS == 1: out is multiplied by its sigmoid
// sinks (HEADS)                  one more score of each head's softmax, with no value; the last share adds it
// K, V (cache rows, PITCH)   cache of one KV head, DIM of each row in use; rows of the share arrive through the ring, K and V chunk in turn
//                            (swizzled rows: attention_tensor.cuh)
// out                        SPLITS == 1: QUERIES * DIM columns; else one record (max, sum, DIM sums) a query head, see merge
//
// owner    of QUERIES query heads and one share of their history: one task; the task with the first query head of a KV head, in the
//          last share, appends the row of the cache
// moves    2 * PITCH values for each row of the share; (QUERIES + 2) * DIM values of q, k and v
// assumes  all query heads of a task have one KV head; rows before the position are in the cache, acquired with the step
//
// Work split: within a pair of chunks a warp takes tiles of rows and keeps its own running
// maximum, sum and accumulators, so no barrier is needed until all warps merge. The current position is one more record of
// the merge: its key and value never travel through the cache, and the warps that are the last to get a tile score it. With
// bf16 caches (and with fp8 ones, see attention_tensor.cuh) a tile is 16 rows and both products run on tensor cores (rows of A are the query heads of one KV head); else a
// tile is 32 rows, one a lane.
#pragma once

template <class M, class G>
struct Attention {
  typedef AttentionRecords<M, G, M::WARPS> Records;
  static constexpr int THREADS = M::WARPS * 32;
  static constexpr int QUERIES = G::HEADS_PER_TASK;
  static constexpr int KV_HEADS = G::HEADS / G::GROUP;
  static constexpr int PER_PACKET = Wire<M>::PER_PACKET;
  typedef typename ElemOf<M::CACHE>::type C;
  static constexpr bool TENSOR = M::CACHE == Elem::BF16 && M::DOT == Dot::MMA && G::DIM % 8 == 0;

  static __device__ __forceinline__ float* q_head(const Context<M>& c, int h) { return c.heads() + h * G::DIM; }
  static __device__ __forceinline__ float* key(const Context<M>& c) { return c.heads() + QUERIES * G::DIM; }
  static __device__ __forceinline__ float* value(const Context<M>& c) { return c.heads() + (QUERIES + 1) * G::DIM; }
  // Tensor cores: the queries once more, as bf16, HEAD_GRANULES granules of 32 values a head.
  static constexpr int HEAD_GRANULES = ceil_div(G::DIM, 32);
  static __device__ __forceinline__ u8* q_operand(const Context<M>& c, int h) {
    return reinterpret_cast<u8*>(c.heads() + (QUERIES + 2) * G::DIM) + h * (HEAD_GRANULES * 64);
  }

  static __device__ __forceinline__ float rounded(float v) {
    C stored;
    narrow(v, &stored);
    return widen(stored);
  }

  // Sum of squares of a whole projection, on all threads (OLMo 2 normalises over all heads at once).
  static __device__ __forceinline__ float projection_squares(Context<M>& c, const Entry& e, int col, int cols, int which) {
    float squares = 0.f;
    for (int first = 0; first < cols / PER_PACKET; first += THREADS) {
      const int i = first + c.tid();
      const bool active[1] = {i < cols / PER_PACKET};
      u32 payload[1];
      const u64* const from[1] = {c.p.exchange + e.x + col / PER_PACKET + i};
      await_packets<1>(from, active, c.tag, payload, c.waiter());
      float a = Wire<M>::lo(payload[0]), b = PER_PACKET == 2 ? Wire<M>::hi(payload[0]) : 0.f;
      squares += a * a + b * b;
    }
    put_statistic(c, which, squares);
    c.barrier();
    return block_sum(c, which);
  }

  // Norm, then RoPE, of one head in shared memory, by one warp.
  static constexpr int PAIRS = G::ROTARY / 2, PAIRS_PER_LANE = PAIRS == 0 ? 1 : ceil_div(PAIRS, 32);
  struct Angles {
    float cosine[PAIRS_PER_LANE], sine[PAIRS_PER_LANE];
  };

  // This lane's pairs of row `position` of the table: cos of every pair, then sin. Loaded before q arrives: the row is
  // new in every step, so it comes from device memory, where it queues with the stream's copies.
  static __device__ __forceinline__ Angles angles(const Context<M>& c, const Entry& e) {
    Angles a;
    const float* row = c.template constant<float>(e.rope) + u64(c.position) * G::ROTARY;
#pragma unroll
    for (int k = 0; k < PAIRS_PER_LANE; k++) {
      const int i = k * 32 + c.lane();
      a.cosine[k] = i < PAIRS ? __ldg(row + i) : 1.f;
      a.sine[k] = i < PAIRS ? __ldg(row + PAIRS + i) : 0.f;
    }
    return a;
  }

  template <HeadNorm N>
  static __device__ __forceinline__ void prepare(const Context<M>& c, const Angles& angle, float* x, float squares, int width,
                                                 float eps, u32 weight_at, int head) {
    if constexpr (!NORM_AFTER_ROPE_OF<G>) norm<N>(c, x, squares, width, eps, weight_at, head);
    rotate(c, angle, x);
    if constexpr (NORM_AFTER_ROPE_OF<G>) norm<N>(c, x, squares, width, eps, weight_at, head);
  }
  template <HeadNorm N>
  static __device__ __forceinline__ void norm(const Context<M>& c, float* x, float squares, int width, float eps, u32 weight_at, int head) {
    if constexpr (N != HeadNorm::NONE) {
      const float* weight = c.template constant<float>(weight_at) + (N == HeadNorm::HEAD ? 0 : head * G::DIM);
      float mean = 0.f;
      if constexpr (N == HeadNorm::CENTRED) {
        for (int d = c.lane(); d < G::DIM; d += 32) mean += x[d];
        mean = warp_sum(mean) / G::DIM;
      }
      if constexpr (N != HeadNorm::PROJECTION) {
        squares = 0.f;
        for (int d = c.lane(); d < G::DIM; d += 32) squares += (x[d] - mean) * (x[d] - mean);
        squares = warp_sum(squares);
        width = G::DIM;
      }
      float factor = rsqrtf(squares / width + eps);
      for (int d = c.lane(); d < G::DIM; d += 32) x[d] = (x[d] - mean) * factor * weight[d];
      __syncwarp();
    }
  }
  static __device__ __forceinline__ void rotate(const Context<M>& c, const Angles& angle, float* x) {
    if constexpr (G::ROTARY > 0) {
#pragma unroll
      for (int k = 0; k < PAIRS_PER_LANE; k++) {
        const int i = k * 32 + c.lane();
        if (i < PAIRS) {
          const int lo = G::INTERLEAVED ? 2 * i : i, hi = G::INTERLEAVED ? 2 * i + 1 : i + PAIRS;
          const float a = x[lo], b = x[hi];
          x[lo] = a * angle.cosine[k] - b * angle.sine[k];
          x[hi] = b * angle.cosine[k] + a * angle.sine[k];
        }
      }
      __syncwarp();
    }
  }

  // Scales a query in shared memory, by one warp.
  static __device__ __forceinline__ void scale(const Context<M>& c, float* x, u32 position) {
    if constexpr (QUERY_SCALE_OF<G>) {
      const float factor = query_factor<G>(position);
      for (int d = c.lane(); d < G::DIM; d += 32) x[d] *= factor;
      __syncwarp();
    }
  }

  // One warp brings one head from its packets to shared memory.
  static __device__ __forceinline__ void fetch(Context<M>& c, const Entry& e, float* to, int col) {
    constexpr int PACKETS = G::DIM / PER_PACKET, N = ceil_div(PACKETS, 32);
    bool active[N];
    const u64* from[N];
    u32 payload[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
      active[n] = n * 32 + c.lane() < PACKETS;
      from[n] = c.p.exchange + e.x + col / PER_PACKET + n * 32 + c.lane();
    }
    await_packets<N>(from, active, c.tag, payload, c.waiter());
#pragma unroll
    for (int n = 0; n < N; n++) {
      if (!active[n]) continue;
      float* x = to + (n * 32 + c.lane()) * PER_PACKET;
      if constexpr (PER_PACKET == 2)
        *reinterpret_cast<float2*>(x) = make_float2(Wire<M>::lo(payload[n]), Wire<M>::hi(payload[n]));
      else
        *x = Wire<M>::lo(payload[n]);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    if constexpr (AttentionTensor<M, G>::FITS) return AttentionTensor<M, G>::run(c, e);
    else run_general(c, e);
  }

  static __device__ __forceinline__ void run_general(Context<M>& c, const Entry& e) {
    const int i = int(e.lo), j = int(e.j), kv = i * QUERIES / G::GROUP;
    const bool last = j == G::SPLITS - 1;
    const Angles angle = angles(c, e);
    const CacheScales<M, G> scales(c, e, kv);
    float q_squares = 0.f, k_squares = 0.f;
    if constexpr (G::Q_NORM == HeadNorm::PROJECTION) q_squares = projection_squares(c, e, 0, G::HEADS * G::DIM, 0);
    if constexpr (G::K_NORM == HeadNorm::PROJECTION)
      if (last) k_squares = projection_squares(c, e, G::HEADS * G::DIM, KV_HEADS * G::DIM, 1);
    // A warp takes a head from its packets to its final values, so that one block barrier serves all of them.
    for (int h = c.warp(); h < QUERIES + (last ? 2 : 0); h += M::WARPS) {
      if (h < QUERIES) {
        fetch(c, e, q_head(c, h), (i * QUERIES + h) * G::DIM);
        prepare<G::Q_NORM>(c, angle, q_head(c, h), q_squares, G::HEADS * G::DIM, G::Q_EPS, e.q_norm, i * QUERIES + h);
        scale(c, q_head(c, h), c.position);
        if constexpr (TENSOR)
          for (int d = c.lane() * 2; d < HEAD_GRANULES * 32; d += 64) {
            const float2 x = d < G::DIM ? *reinterpret_cast<const float2*>(q_head(c, h) + d) : make_float2(0.f, 0.f);
            *reinterpret_cast<u32*>(q_operand(c, h) + operand_byte(d)) = bf16_pair(x.x, x.y);
          }
        continue;
      }
      const bool is_key = h == QUERIES;
      float* x = is_key ? key(c) : value(c);
      fetch(c, e, x, (G::HEADS + (is_key ? 0 : KV_HEADS) + kv) * G::DIM);
      if (is_key) prepare<G::K_NORM>(c, angle, x, k_squares, KV_HEADS * G::DIM, G::K_EPS, e.k_norm, kv);
      // The current position uses what later steps will read: the value rounded to the cache type.
      for (int d = c.lane(); d < G::DIM; d += 32) x[d] = rounded(scales.units(is_key, x[d]));
      __syncwarp();
    }
    c.barrier();
    c.stamp(1);
    u32 start, end;
    history_share(c.position, G::WINDOW, G::SPLITS, j, start, end);
    const int rows = int(end - start), pairs = ceil_div(rows, G::CHUNK_ROWS);
    if (last)
      for (int h = M::WARPS - 1 - c.warp(); h < QUERIES; h += M::WARPS) score_current(c, scales, h);
    if constexpr (TENSOR)
      history_tensor(c, e, rows, pairs);
    else
      history_lanes(c, scales, rows, pairs);
    c.barrier();
    c.stamp(2);
    Records::finish(c, e, e.x, i, j, last, [&](int d) {
      const float2 v = *reinterpret_cast<const float2*>(value(c) + d);
      return make_float2(scales.sum(v.x), scales.sum(v.y));
    });
    // After publishing: no SM reads the row in this step. The end of the step releases it.
    if (last && i % (G::GROUP / QUERIES) == 0) {
      for (int h = M::WARPS - 1 - c.warp(); h < 2; h += M::WARPS) {
        const float* x = h == 0 ? key(c) : value(c);
        C* row = reinterpret_cast<C*>(c.p.cache + u64(h == 0 ? e.k_cache : e.v_cache) * OFFSET_BYTES) +
                 (u64(kv) * cache_rows<M>() + cache_row<M>(c.p, c.position)) * G::PITCH;
        for (int d = c.lane(); d < G::DIM; d += 32) narrow(x[d], row + d);
      }
    }
    c.barrier(); // the next task may stage where the records are, or fetch other heads
  }

  // Stores the current position's score after the records of all warps. Its value stays where `fetch` left it.
  static __device__ __forceinline__ void score_current(const Context<M>& c, const CacheScales<M, G>& scales, int h) {
    float dot = 0.f;
    for (int d = c.lane(); d < G::DIM; d += 32) dot += q_head(c, h)[d] * key(c)[d];
    dot = warp_sum(dot);
    if (c.lane() == 0) Records::of(c, M::WARPS, h)[0] = scales.score(dot);
  }

  static __device__ __forceinline__ void history_tensor(Context<M>& c, const Entry& e, int rows, int pairs) {
    constexpr int VALUE_TILES = ceil_div(G::DIM, 8);
    const int g = c.lane() / 4, t = c.lane() % 4;
    // Rows of the product beyond QUERIES are never read.
    const u8* q = q_operand(c, g < QUERIES ? g : 0) + t * 16;
    // Queries are kept in registers if the sums leave room for them.
    constexpr bool KEEP = G::DIM <= 128;
    uint4 qa[KEEP ? HEAD_GRANULES : 1];
    if constexpr (KEEP)
#pragma unroll
      for (int k = 0; k < HEAD_GRANULES; k++) qa[k] = *reinterpret_cast<const uint4*>(q + k * 64);
    float m = NEGATIVE_INFINITY, l = 0.f, o[VALUE_TILES][2];
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++) o[n][0] = o[n][1] = 0.f;
#pragma unroll 1
    for (int pair = 0; pair < pairs; pair++) {
      const int live_rows = min(G::CHUNK_ROWS, rows - pair * G::CHUNK_ROWS);
      const RingCursor<M> at = c.ring;
      c.ring.next();
      const RingCursor<M> v_at = c.ring;
      c.ring.next();
      const u8* keys = ring_take(c, at);
      const u8* values = ring_take(c, v_at);
#pragma unroll 1
      for (int tile = c.warp(); tile * 16 < live_rows; tile += M::WARPS) {
        const int row0 = tile * 16;
        Products products[2] = {};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int k = 0; k < HEAD_GRANULES; k++) {
            uint4 b = make_uint4(0, 0, 0, 0);
            if (G::DIM % 32 == 0 || k * 32 + t * 8 < G::DIM)
              b = *reinterpret_cast<const uint4*>(keys + (row0 + n * 8 + g) * (G::PITCH * 2) + k * 64 + t * 16);
            products[n].add(KEEP ? qa[KEEP ? k : 0] : *reinterpret_cast<const uint4*>(q + k * 64), b);
          }
        float s[2][2];
        float top = m;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const float score = softcap(products[n].sum(i) * G::SCALE, G::SOFTCAP);
            s[n][i] = row0 + n * 8 + t * 2 + i < live_rows ? score : NEGATIVE_INFINITY;
            top = fmaxf(top, s[n][i]);
          }
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float shrink = __expf(m - top);
        m = top;
        l *= shrink;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            s[n][i] = __expf(s[n][i] - top);
            l += s[n][i];
          }
        const u32 p0 = bf16_pair(s[0][0], s[0][1]), p2 = bf16_pair(s[1][0], s[1][1]);
        const bool partial = row0 + 16 > live_rows;
#pragma unroll
        for (int n = 0; n < VALUE_TILES; n++) {
          o[n][0] *= shrink;
          o[n][1] *= shrink;
        }
        // Transposed 8 x 8 blocks of V: rows row0 and row0 + 8 on, dimensions n * 8 on.
        const u8* from = values + (row0 + c.lane() % 16) * (G::PITCH * 2) + (c.lane() / 16) * 16;
#pragma unroll
        for (int n = 0; n < VALUE_TILES; n += 2) {
          u32 b0, b1, b2, b3;
          load_transposed(n + 1 < VALUE_TILES, smem_address(from + n * 16 - (n + 1 < VALUE_TILES ? 0 : (c.lane() / 16) * 16)), b0, b1, b2, b3);
          if (partial) {
            // Bytes past the last row are whatever the slot held before; 0 * NaN would spread.
            const int r = live_rows - row0 - t * 2;
            b0 &= (r > 0 ? 0xffffu : 0u) | (r > 1 ? 0xffff0000u : 0u);
            b2 &= (r > 0 ? 0xffffu : 0u) | (r > 1 ? 0xffff0000u : 0u);
            b1 &= (r > 8 ? 0xffffu : 0u) | (r > 9 ? 0xffff0000u : 0u);
            b3 &= (r > 8 ? 0xffffu : 0u) | (r > 9 ? 0xffff0000u : 0u);
          }
          mma_rows8(o[n][0], o[n][1], p0, p2, b0, b1);
          if (n + 1 < VALUE_TILES) mma_rows8(o[n + 1 < VALUE_TILES ? n + 1 : n][0], o[n + 1 < VALUE_TILES ? n + 1 : n][1], p0, p2, b2, b3);
        }
      }
      ring_release(c, at);
      ring_release(c, v_at);
    }
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    if (g < QUERIES) {
      float* record = Records::of(c, c.warp(), g);
      if (t == 0) {
        record[0] = m;
        record[1] = l;
      }
#pragma unroll
      for (int n = 0; n < VALUE_TILES; n++) *reinterpret_cast<float2*>(record + Records::HEADER + n * 8 + t * 2) = make_float2(o[n][0], o[n][1]);
    }
  }

  static __device__ __forceinline__ void load_transposed(bool four, u32 address, u32& b0, u32& b1, u32& b2, u32& b3) {
#if __CUDA_ARCH__ >= 750
    if (four) {
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(b0), "=r"(b1), "=r"(b2), "=r"(b3)
                   : "r"(address)
                   : "memory");
    } else {
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                   : "=r"(b0), "=r"(b1)
                   : "r"(address)
                   : "memory");
      b2 = b3 = 0;
    }
#endif
  }

  static __device__ __forceinline__ void history_lanes(Context<M>& c, const CacheScales<M, G>& scales, int rows, int pairs) {
    constexpr int LANE_DIMS = ceil_div(G::DIM, 32);
    float m[QUERIES], l[QUERIES], o[QUERIES][LANE_DIMS];
#pragma unroll
    for (int h = 0; h < QUERIES; h++) {
      m[h] = NEGATIVE_INFINITY;
      l[h] = 0.f;
#pragma unroll
      for (int d = 0; d < LANE_DIMS; d++) o[h][d] = 0.f;
    }
#pragma unroll 1
    for (int pair = 0; pair < pairs; pair++) {
      const int live_rows = min(G::CHUNK_ROWS, rows - pair * G::CHUNK_ROWS);
      const RingCursor<M> at = c.ring;
      c.ring.next();
      const RingCursor<M> v_at = c.ring;
      c.ring.next();
      const C* keys = reinterpret_cast<const C*>(ring_take(c, at));
      const C* values = reinterpret_cast<const C*>(ring_take(c, v_at));
      for (int tile = c.warp(); tile * 32 < live_rows; tile += M::WARPS) {
        const int row = tile * 32 + c.lane();
        const bool live = row < live_rows;
#pragma unroll
        for (int h = 0; h < QUERIES; h++) {
          float s = 0.f;
          if (live)
            for (int d = 0; d < G::DIM; d++) {
              // Each lane starts at another dimension, or all would read one bank.
              int at_d = d + c.lane();
              at_d -= at_d >= G::DIM ? (at_d / G::DIM) * G::DIM : 0;
              s += q_head(c, h)[at_d] * widen(keys[row * G::PITCH + at_d]);
            }
          s = live ? scales.score(s) : NEGATIVE_INFINITY;
          const float top = fmaxf(m[h], warp_max(s));
          const float shrink = __expf(m[h] - top);
          s = __expf(s - top);
          m[h] = top;
          l[h] = l[h] * shrink + warp_sum(s);
#pragma unroll
          for (int d = 0; d < LANE_DIMS; d++) o[h][d] *= shrink;
          const int n = min(32, live_rows - tile * 32);
          for (int r = 0; r < n; r++) {
            const float p = __shfl_sync(~0u, s, r);
#pragma unroll
            for (int d = 0; d < LANE_DIMS; d++)
              if (d * 32 + c.lane() < G::DIM) o[h][d] += p * widen(values[(tile * 32 + r) * G::PITCH + d * 32 + c.lane()]);
          }
        }
      }
      ring_release(c, at);
      ring_release(c, v_at);
    }
#pragma unroll
    for (int h = 0; h < QUERIES; h++) {
      float* record = Records::of(c, c.warp(), h);
      if (c.lane() == 0) {
        record[0] = m[h];
        record[1] = l[h];
      }
#pragma unroll
      for (int d = 0; d < LANE_DIMS; d++)
        if (d * 32 + c.lane() < G::DIM) record[Records::HEADER + d * 32 + c.lane()] = scales.sum(o[h][d]);
    }
  }
};
