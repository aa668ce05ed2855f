// attention: q/k norm, RoPE, cache append, and softmax(scale * q K^T) V over one share of the history and, in the share
// that ends it, the current position.
//
// q (HPT, DIM), k, v (DIM)   packets; k and v are read by the last share only
// K, V (CONTEXT_MAX, PITCH)  cache of one KV head, DIM of each row in use; rows of the share arrive through the ring, K and V chunk in turn
// out                        SPLITS == 1: HPT * DIM columns; else one record (max, sum, DIM sums) a query head, see merge
//
// Work split: within a pair of chunks a warp takes tiles of rows and keeps its own running
// maximum, sum and accumulators, so no barrier is needed until all warps merge. The current position is merged last: its
// key and value never travel through the cache. With bf16 caches a tile is 16 rows and both products run on tensor cores
// (rows of A are the query heads of one KV head); else a tile is 32 rows, one a lane.
#pragma once

enum class HeadNorm : int { NONE, HEAD, PROJECTION };

template <class M, class G>
struct Attention {
  static constexpr int T = M::WARPS * 32;
  static constexpr int R = G::DIM + 2;
  static constexpr int HPT = G::HEADS_PER_TASK;
  static constexpr int KV_HEADS = G::HEADS / G::GROUP;
  static constexpr int PER_PACKET = Wire<M>::PER_PACKET;
  typedef typename ElemOf<M::CACHE>::type C;
  static constexpr bool TENSOR = M::CACHE == Elem::BF16 && M::DOT == Dot::MMA && G::DIM % 8 == 0;

  static __device__ __forceinline__ float* q_head(const Context<M>& c, int h) { return c.heads() + h * G::DIM; }
  static __device__ __forceinline__ float* key(const Context<M>& c) { return c.heads() + HPT * G::DIM; }
  static __device__ __forceinline__ float* value(const Context<M>& c) { return c.heads() + (HPT + 1) * G::DIM; }

  static __device__ __forceinline__ float rounded(float v) {
    C stored;
    narrow(v, &stored);
    return widen(stored);
  }

  // Sum of squares of a whole projection, on all threads (OLMo 2 normalises over all heads at once).
  static __device__ __forceinline__ float projection_squares(Context<M>& c, const Entry& e, int col, int cols, int which) {
    float squares = 0.f;
    for (int i = c.tid(); i < cols / PER_PACKET; i += T) {
      u32 payload = 0;
      if (!c.lost && !await_packet(c.p.exchange + e.x + col / PER_PACKET + i, c.tag, payload, c.dog(), c.site(e))) c.lost = true;
      float a = Wire<M>::lo(payload), b = PER_PACKET == 2 ? Wire<M>::hi(payload) : 0.f;
      squares += a * a + b * b;
    }
    squares = warp_sum(squares);
    if (c.lane() == 0) c.state().stat[c.task & 1][which][c.warp()] = squares;
    c.barrier();
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < M::WARPS; w++) sum += c.state().stat[c.task & 1][which][w];
    return sum;
  }

  // Norm, then RoPE, of one head in shared memory, by one warp.
  static constexpr int PAIRS = G::ROTARY / 2, PAIRS_PER_LANE = PAIRS == 0 ? 1 : ceil_div(PAIRS, 32);
  struct Angles {
    float cosine[PAIRS_PER_LANE], sine[PAIRS_PER_LANE];
  };

  // This lane's pairs of row `position` of the table: cos of every pair, then sin. Loaded before q arrives: the row is
  // new in every step, so it comes from memory, behind the stream.
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
    if constexpr (N != HeadNorm::NONE) {
      const float* weight = c.template constant<float>(weight_at) + (N == HeadNorm::PROJECTION ? head * G::DIM : 0);
      if constexpr (N == HeadNorm::HEAD) {
        squares = 0.f;
        for (int d = c.lane(); d < G::DIM; d += 32) squares += x[d] * x[d];
        squares = warp_sum(squares);
        width = G::DIM;
      }
      float factor = rsqrtf(squares / width + eps);
      for (int d = c.lane(); d < G::DIM; d += 32) x[d] = x[d] * factor * weight[d];
      __syncwarp();
    }
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

  // One head's packets into shared memory, by one warp.
  static __device__ __forceinline__ void fetch(Context<M>& c, const Entry& e, float* to, int col) {
    constexpr int PACKETS = G::DIM / PER_PACKET;
    for (int i = c.lane(); i < PACKETS; i += 32) {
      u32 payload = 0;
      if (!c.lost && !await_packet(c.p.exchange + e.x + col / PER_PACKET + i, c.tag, payload, c.dog(), c.site(e))) c.lost = true;
      to[i * PER_PACKET] = Wire<M>::lo(payload);
      if constexpr (PER_PACKET == 2) to[i * 2 + 1] = Wire<M>::hi(payload);
    }
    __syncwarp();
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int i = int(e.lo), j = int(e.j), kv = i * HPT / G::GROUP;
    const bool last = j == G::SPLITS - 1;
    const Angles angle = angles(c, e);
    float q_squares = 0.f, k_squares = 0.f;
    if constexpr (G::Q_NORM == HeadNorm::PROJECTION) q_squares = projection_squares(c, e, 0, G::HEADS * G::DIM, 0);
    if constexpr (G::K_NORM == HeadNorm::PROJECTION)
      if (last) k_squares = projection_squares(c, e, G::HEADS * G::DIM, KV_HEADS * G::DIM, 1);
    // A warp takes a head from its packets to its final values, so that one block barrier serves all of them.
    for (int h = c.warp(); h < HPT + (last ? 2 : 0); h += M::WARPS) {
      if (h < HPT) {
        fetch(c, e, q_head(c, h), (i * HPT + h) * G::DIM);
        prepare<G::Q_NORM>(c, angle, q_head(c, h), q_squares, G::HEADS * G::DIM, G::Q_EPS, e.q_norm, i * HPT + h);
        continue;
      }
      const bool is_key = h == HPT;
      float* x = is_key ? key(c) : value(c);
      fetch(c, e, x, (G::HEADS + (is_key ? 0 : KV_HEADS) + kv) * G::DIM);
      if (is_key) prepare<G::K_NORM>(c, angle, x, k_squares, KV_HEADS * G::DIM, G::K_EPS, e.k_norm, kv);
      // The current position uses what later steps will read: the value rounded to the cache type.
      for (int d = c.lane(); d < G::DIM; d += 32) x[d] = rounded(x[d]);
      __syncwarp();
    }
    c.barrier();
    c.stamp(1);
    u32 start, end;
    history_share(c.position, G::WINDOW, G::SPLITS, j, start, end);
    const int rows = int(end - start), pairs = ceil_div(rows, G::CHUNK_ROWS);
    if constexpr (TENSOR)
      history_tensor(c, e, rows, pairs);
    else
      history_lanes(c, e, rows, pairs);
    c.chunk += 2 * pairs;
    c.barrier();
    c.stamp(2);
    finish(c, e, i, j, last);
    // Nobody waits for the row in this step, and the fence waits for the stores: behind the publication.
    if (last && i % (G::GROUP / HPT) == 0) {
      for (int h = M::WARPS - 1 - c.warp(); h < 2; h += M::WARPS) {
        const float* x = h == 0 ? key(c) : value(c);
        C* row = reinterpret_cast<C*>(c.p.cache + u64(h == 0 ? e.k_cache : e.v_cache) * 256) +
                 (u64(kv) * M::CONTEXT_MAX + c.position) * G::PITCH;
        for (int d = c.lane(); d < G::DIM; d += 32) narrow(x[d], row + d);
        publish_cache_row();
      }
    }
    c.barrier(); // the next task may stage where the records are, or fetch other heads
  }

  static __device__ __forceinline__ float* warp_record(const Context<M>& c, int warp, int h) {
    return c.scratch() + (warp * HPT + h) * R;
  }

  static __device__ __forceinline__ void history_tensor(Context<M>& c, const Entry& e, int rows, int pairs) {
    constexpr int KJ = ceil_div(G::DIM, 32), NT = ceil_div(G::DIM, 8);
    const int g = c.lane() / 4, t = c.lane() % 4;
    u32 qa[KJ * 4];
#pragma unroll
    for (int k = 0; k < KJ; k++) {
      const int d = k * 32 + t * 8;
      const bool live = g < HPT && d < G::DIM;
      const float* x = q_head(c, live ? g : 0) + (live ? d : 0);
#pragma unroll
      for (int w = 0; w < 4; w++) qa[k * 4 + w] = live ? bf16_pair(x[2 * w], x[2 * w + 1]) : 0;
    }
    float m = NEGATIVE_INFINITY, l = 0.f, o[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++) o[n][0] = o[n][1] = 0.f;
    auto at = ring_cursor<M>(c.chunk);
    for (int pair = 0; pair < pairs; pair++) {
      const int live_rows = min(G::CHUNK_ROWS, rows - pair * G::CHUNK_ROWS);
      auto v_at = at;
      v_at.advance(1);
      const u8* keys = ring_take(c, e, at);
      const u8* values = ring_take(c, e, v_at);
      for (int tile = c.warp(); tile * 16 < live_rows; tile += M::WARPS) {
        const int row0 = tile * 16;
        float s[2][2] = {{0.f, 0.f}, {0.f, 0.f}};
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int k = 0; k < KJ; k++) {
            uint4 b = make_uint4(0, 0, 0, 0);
            if (G::DIM % 32 == 0 || k * 32 + t * 8 < G::DIM)
              b = *reinterpret_cast<const uint4*>(keys + (row0 + n * 8 + g) * (G::PITCH * 2) + k * 64 + t * 16);
            mma_rows8(s[n][0], s[n][1], qa[k * 4], qa[k * 4 + 1], b.x, b.y);
            mma_rows8(s[n][0], s[n][1], qa[k * 4 + 2], qa[k * 4 + 3], b.z, b.w);
          }
        float top = m;
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            s[n][i] = row0 + n * 8 + t * 2 + i < live_rows ? softcap(s[n][i] * G::SCALE, G::SOFTCAP) : NEGATIVE_INFINITY;
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
        for (int n = 0; n < NT; n++) {
          o[n][0] *= shrink;
          o[n][1] *= shrink;
        }
        // Transposed 8 x 8 blocks of V: rows row0 and row0 + 8 on, dimensions n * 8 on.
        const u8* from = values + (row0 + c.lane() % 16) * (G::PITCH * 2) + (c.lane() / 16) * 16;
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
          u32 b0, b1, b2, b3;
          load_transposed(n + 1 < NT, smem_address(from + n * 16 - (n + 1 < NT ? 0 : (c.lane() / 16) * 16)), b0, b1, b2, b3);
          if (partial) {
            // Bytes past the last row are whatever the slot held before; 0 * NaN would spread.
            const int r = live_rows - row0 - t * 2;
            b0 &= (r > 0 ? 0xffffu : 0u) | (r > 1 ? 0xffff0000u : 0u);
            b2 &= (r > 0 ? 0xffffu : 0u) | (r > 1 ? 0xffff0000u : 0u);
            b1 &= (r > 8 ? 0xffffu : 0u) | (r > 9 ? 0xffff0000u : 0u);
            b3 &= (r > 8 ? 0xffffu : 0u) | (r > 9 ? 0xffff0000u : 0u);
          }
          mma_rows8(o[n][0], o[n][1], p0, p2, b0, b1);
          if (n + 1 < NT) mma_rows8(o[n + 1 < NT ? n + 1 : n][0], o[n + 1 < NT ? n + 1 : n][1], p0, p2, b2, b3);
        }
      }
      ring_release(c, at);
      ring_release(c, v_at);
      at.advance(2);
    }
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    if (g < HPT) {
      float* record = warp_record(c, c.warp(), g);
      if (t == 0) {
        record[0] = m;
        record[1] = l;
      }
#pragma unroll
      for (int n = 0; n < NT; n++) *reinterpret_cast<float2*>(record + 2 + n * 8 + t * 2) = make_float2(o[n][0], o[n][1]);
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

  static __device__ __forceinline__ void history_lanes(Context<M>& c, const Entry& e, int rows, int pairs) {
    constexpr int DL = ceil_div(G::DIM, 32);
    float m[HPT], l[HPT], o[HPT][DL];
#pragma unroll
    for (int h = 0; h < HPT; h++) {
      m[h] = NEGATIVE_INFINITY;
      l[h] = 0.f;
#pragma unroll
      for (int d = 0; d < DL; d++) o[h][d] = 0.f;
    }
    auto at = ring_cursor<M>(c.chunk);
    for (int pair = 0; pair < pairs; pair++) {
      const int live_rows = min(G::CHUNK_ROWS, rows - pair * G::CHUNK_ROWS);
      auto v_at = at;
      v_at.advance(1);
      const C* keys = reinterpret_cast<const C*>(ring_take(c, e, at));
      const C* values = reinterpret_cast<const C*>(ring_take(c, e, v_at));
      for (int tile = c.warp(); tile * 32 < live_rows; tile += M::WARPS) {
        const int row = tile * 32 + c.lane();
        const bool live = row < live_rows;
#pragma unroll
        for (int h = 0; h < HPT; h++) {
          float s = 0.f;
          if (live)
            for (int d = 0; d < G::DIM; d++) {
              // Each lane starts at another dimension, or all would read one bank.
              int at_d = d + c.lane();
              at_d -= at_d >= G::DIM ? (at_d / G::DIM) * G::DIM : 0;
              s += q_head(c, h)[at_d] * widen(keys[row * G::PITCH + at_d]);
            }
          s = live ? softcap(s * G::SCALE, G::SOFTCAP) : NEGATIVE_INFINITY;
          const float top = fmaxf(m[h], warp_max(s));
          const float shrink = __expf(m[h] - top);
          s = __expf(s - top);
          m[h] = top;
          l[h] = l[h] * shrink + warp_sum(s);
#pragma unroll
          for (int d = 0; d < DL; d++) o[h][d] *= shrink;
          const int n = min(32, live_rows - tile * 32);
          for (int r = 0; r < n; r++) {
            const float p = __shfl_sync(~0u, s, r);
#pragma unroll
            for (int d = 0; d < DL; d++)
              if (d * 32 + c.lane() < G::DIM) o[h][d] += p * widen(values[(tile * 32 + r) * G::PITCH + d * 32 + c.lane()]);
          }
        }
      }
      ring_release(c, at);
      ring_release(c, v_at);
      at.advance(2);
    }
#pragma unroll
    for (int h = 0; h < HPT; h++) {
      float* record = warp_record(c, c.warp(), h);
      if (c.lane() == 0) {
        record[0] = m[h];
        record[1] = l[h];
      }
#pragma unroll
      for (int d = 0; d < DL; d++)
        if (d * 32 + c.lane() < G::DIM) record[2 + d * 32 + c.lane()] = o[h][d];
    }
  }

  // Merges the warps and the current position; a warp takes a head, and a lane the weight of one warp's record.
  static __device__ __forceinline__ void finish(Context<M>& c, const Entry& e, int i, int j, bool last) {
    static_assert(M::WARPS <= 32, "a lane holds the weight of a warp");
    for (int h = c.warp(); h < HPT; h += M::WARPS) {
      float score = NEGATIVE_INFINITY;
      if (last) {
        float dot = 0.f;
        for (int d = c.lane(); d < G::DIM; d += 32) dot += q_head(c, h)[d] * key(c)[d];
        score = softcap(warp_sum(dot) * G::SCALE, G::SOFTCAP);
      }
      const bool mine = c.lane() < M::WARPS;
      const float m = mine ? warp_record(c, c.lane(), h)[0] : NEGATIVE_INFINITY;
      const float top = fmaxf(score, warp_max(m));
      const float weight = m > NEGATIVE_INFINITY ? __expf(m - top) : 0.f;
      const float current = last ? __expf(score - top) : 0.f;
      const float sum = warp_sum(mine ? weight * warp_record(c, c.lane(), h)[1] : 0.f) + current;
      for (int d = c.lane() * 2; d < round_up(G::DIM, 64); d += 64) {
        const bool live = d < G::DIM;
        float a = last && live ? current * value(c)[d] : 0.f, b = last && live ? current * value(c)[d + 1] : 0.f;
#pragma unroll 8
        for (int w = 0; w < M::WARPS; w++) {
          const float factor = __shfl_sync(~0u, weight, w);
          const float2 o = *reinterpret_cast<const float2*>(warp_record(c, w, h) + 2 + (live ? d : 0));
          a += factor * o.x;
          b += factor * o.y;
        }
        if (!live) continue;
        if constexpr (G::SPLITS == 1) {
          publish_columns<G::HEADS * G::DIM>(c, e.out, (i * HPT + h) * G::DIM + d, __fdividef(a, sum), __fdividef(b, sum));
        } else {
          u64* record = c.p.exchange + e.out + u64((i * G::SPLITS + j) * HPT + h) * R;
          if (d == 0) {
            publish(record, __float_as_uint(top), c.tag);
            publish(record + 1, __float_as_uint(sum), c.tag);
          }
          publish(record + 2 + d, __float_as_uint(a), c.tag);
          publish(record + 3 + d, __float_as_uint(b), c.tag);
        }
      }
    }
  }
};
