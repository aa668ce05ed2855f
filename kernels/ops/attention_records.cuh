// Owns the end of an attention task: records of warps in shared memory, their merge, the publication.
#pragma once

// HEAD: RMS of each head, gains shared. CENTRED: LayerNorm of each head with gains of its own. PROJECTION: RMS of all heads.
enum class HeadNorm : int { NONE, HEAD, CENTRED, PROJECTION };

// Scales of the keys and values of a KV head in an fp8 cache. Products take codes without scales, so scores and sums are scaled; the
// current position's key and value are rounded like those of the cache.
template <class M, class G>
struct CacheScales {
  static constexpr bool FP8 = M::CACHE == Elem::FP8;
  float2 of; // of keys, of values
  __device__ __forceinline__ CacheScales(const Context<M>& c, const Entry& e, u32 kv) {
    if constexpr (FP8) of = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.cache_scales)) + kv);
  }
  // A key, or a value, in units of its scale.
  __device__ __forceinline__ float units(bool key, float x) const {
    if constexpr (FP8) return __fdiv_rn(x, key ? of.x : of.y);
    return x;
  }
  // The score of the product of a query with a key.
  __device__ __forceinline__ float score(float product) const {
    if constexpr (FP8) return softcap(product * (G::SCALE * of.x), G::SOFTCAP);
    return softcap(product * G::SCALE, G::SOFTCAP);
  }
  // A sum of values.
  __device__ __forceinline__ float sum(float values) const {
    if constexpr (FP8) return values * of.y;
    return values;
  }
};

// What the warps of a task leave in shared memory: (max, sum, DIM sums) for each of N warps (or teams of warps) and query head,
// and after them the score of the current position.
template <class M, class G, int N>
struct AttentionRecords {
  static constexpr int QUERIES = G::HEADS_PER_TASK;
  static constexpr int HEADER = 2; // maximum and sum, before the sums of each dimension
  static constexpr int RECORD = HEADER + G::DIM;
  // Lanes, a power of two, that hold the states of all records.
  static constexpr int LANES = N > 16 ? 32 : N > 8 ? 16 : N > 4 ? 8 : N > 2 ? 4 : N;
  static_assert(N <= 32, "a warp merges the records");

  static __device__ __forceinline__ float* of(const Context<M>& c, int n, int h) {
    return c.scratch() + (n * QUERIES + h) * RECORD;
  }

  // Merges the records of warps and the current position; a warp takes up to 64 dimensions of a head. `value` returns two dimensions of
  // the current position's value. `take` gets a head, a dimension, the maximum, the sum, and the sums of two dimensions.
  template <class V, class T>
  static __device__ __forceinline__ void merge(const Context<M>& c, bool last, V value, T take) {
    constexpr int BLOCKS = ceil_div(G::DIM, 64);
#pragma unroll 1
    for (int x = c.warp(); x < QUERIES * BLOCKS; x += M::WARPS) {
      const int h = x / BLOCKS, d = x % BLOCKS * 64 + c.lane() * 2;
      const bool live = d < G::DIM;
      // A lane takes the state of one record; all take their dimensions of every record.
      const float score = last ? of(c, N, h)[0] : NEGATIVE_INFINITY;
      float2 state = make_float2(NEGATIVE_INFINITY, 0.f);
      if (c.lane() % LANES < N) state = *reinterpret_cast<const float2*>(of(c, c.lane() % LANES, h));
      float top = fmaxf(score, state.x);
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      const float factor = state.x > NEGATIVE_INFINITY ? exp_fast(state.x - top) : 0.f;
      const float current = last ? exp_fast(score - top) : 0.f;
      float sum = factor * state.y;
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
      sum += current;
      const float2 v = last && live ? value(d) : make_float2(0.f, 0.f);
      float a = current * v.x, b = current * v.y;
#pragma unroll
      for (int n = 0; n < N; n++) {
        const float f = __shfl_sync(~0u, factor, n);
        const float2 o = *reinterpret_cast<const float2*>(of(c, n, h) + HEADER + (live ? d : 0));
        a += f * o.x;
        b += f * o.y;
      }
      if (live) take(h, d, top, sum, a, b);
    }
  }

  // Publishes what is merged: columns of the output, or a record of this share.
  template <class V>
  static __device__ __forceinline__ void finish(Context<M>& c, const Entry& e, int i, int j, bool last, V value) {
    merge(c, last, value, [&](int h, int d, float top, float sum, float a, float b) {
      if constexpr (G::SPLITS == 1) {
        publish_columns<G::HEADS * G::DIM>(c, e.out, (i * QUERIES + h) * G::DIM + d, __fdividef(a, sum), __fdividef(b, sum));
      } else {
        u64* record = c.p.exchange + e.out + u64((i * G::SPLITS + j) * QUERIES + h) * RECORD;
        if (d == 0) {
          publish(record, __float_as_uint(top), c.tag);
          publish(record + 1, __float_as_uint(sum), c.tag);
        }
        publish(record + HEADER + d, __float_as_uint(a), c.tag);
        publish(record + HEADER + d + 1, __float_as_uint(b), c.tag);
      }
    });
  }
};
