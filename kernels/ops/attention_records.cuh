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

// What few models have. A configuration has members for it only then.
template <class G, class = int>
constexpr bool SINKS_OF = false;
template <class G>
constexpr bool SINKS_OF<G, decltype(int(G::SINKS))> = true;
template <class G, class = int>
constexpr bool GATED_OF = false;
template <class G>
constexpr bool GATED_OF<G, decltype(int(G::GATE_AT))> = true;
template <class G, class = int>
constexpr bool NORM_AFTER_ROPE_OF = false;
template <class G>
constexpr bool NORM_AFTER_ROPE_OF<G, decltype(int(G::NORM_AFTER_ROPE))> = true;
template <class G, class = int>
constexpr bool QUERY_SCALE_OF = false;
template <class G>
constexpr bool QUERY_SCALE_OF<G, decltype(int(G::QUERY_ORIGINAL))> = true;

// Columns of the product that attention reads: q, k, v, and the gate if there is one.
template <class G>
constexpr int QKV_COLS = (G::HEADS + 2 * (G::HEADS / G::GROUP)) * G::DIM + (GATED_OF<G> ? G::HEADS * G::DIM : 0);

// What queries at `position` are multiplied by: 1 + beta * ln(1 + floor(position / original)).
template <class G>
__device__ __forceinline__ float query_factor(u32 position) {
  if constexpr (QUERY_SCALE_OF<G>) return 1.f + G::QUERY_BETA * log_fast(float(1 + position / G::QUERY_ORIGINAL));
  return 1.f;
}

// The sinks of a task's heads: one more score of each softmax, with no value. One share of the history adds them.
template <class M, class G>
struct HeadSinks {
  static constexpr bool THERE = SINKS_OF<G>;
  const float* of;
  bool adds;
  __device__ __forceinline__ HeadSinks(const Context<M>& c, const Entry& e, int first, bool adds) : of(nullptr), adds(adds) {
    if constexpr (THERE) of = c.template constant<float>(e.sinks) + first;
  }
  __device__ __forceinline__ float operator()(int h) const { return adds ? __ldg(of + h) : NEGATIVE_INFINITY; }
};
// The gates of a task's heads, from packets: what dimensions d and d + 1 of a head are multiplied by. Whole warps ask.
template <class M, class G>
struct PacketGates {
  static constexpr bool THERE = GATED_OF<G>;
  Context<M>& c;
  u32 at;    // first packet of the buffer
  int first; // head of the task
  __device__ __forceinline__ float2 operator()(int h, int d, bool live) const {
    if constexpr (THERE) {
      constexpr int PER_PACKET = Wire<M>::PER_PACKET, N = 2 / PER_PACKET;
      const u64* from[N];
      bool active[N];
      u32 payload[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        active[n] = live;
        from[n] = c.p.exchange + (at + (G::GATE_AT + (first + h) * G::DIM + (live ? d : 0)) / PER_PACKET + n);
      }
      await_packets<N>(from, active, c.tag, payload, c.waiter());
      return make_float2(sigmoid(Wire<M>::lo(payload[0])), sigmoid(PER_PACKET == 2 ? Wire<M>::hi(payload[0]) : Wire<M>::lo(payload[N - 1])));
    }
    return make_float2(1.f, 1.f);
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
  // the current position's value. `take` gets a head, a dimension, the maximum, the sum, and the sums of two dimensions, which `gate` has
  // multiplied.
  template <class V, class S, class F, class T>
  static __device__ __forceinline__ void merge(const Context<M>& c, bool last, V value, const S& sinks, const F& gate, T take) {
    constexpr int BLOCKS = ceil_div(G::DIM, 64);
#pragma unroll 1
    for (int x = c.warp(); x < QUERIES * BLOCKS; x += M::WARPS) {
      const int h = x / BLOCKS, d = x % BLOCKS * 64 + c.lane() * 2;
      const bool live = d < G::DIM;
      // A lane takes the state of one record; all take their dimensions of every record.
      const float score = last ? of(c, N, h)[0] : NEGATIVE_INFINITY;
      float2 state = make_float2(NEGATIVE_INFINITY, 0.f);
      if (c.lane() % LANES < N) state = *reinterpret_cast<const float2*>(of(c, c.lane() % LANES, h));
      float top = fmaxf(score, state.x), sink = NEGATIVE_INFINITY;
      if constexpr (S::THERE) {
        sink = sinks(h);
        top = fmaxf(top, sink);
      }
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
      const float factor = state.x > NEGATIVE_INFINITY ? exp_fast(state.x - top) : 0.f;
      const float current = last ? exp_fast(score - top) : 0.f;
      float sum = factor * state.y;
#pragma unroll
      for (int o = LANES / 2; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
      sum += current;
      // A share that adds no sink may have no row either.
      if constexpr (S::THERE) sum += sink > NEGATIVE_INFINITY ? exp_fast(sink - top) : 0.f;
      const float2 v = last && live ? value(d) : make_float2(0.f, 0.f);
      float a = current * v.x, b = current * v.y;
#pragma unroll
      for (int n = 0; n < N; n++) {
        const float f = __shfl_sync(~0u, factor, n);
        const float2 o = *reinterpret_cast<const float2*>(of(c, n, h) + HEADER + (live ? d : 0));
        a += f * o.x;
        b += f * o.y;
      }
      if constexpr (F::THERE) {
        const float2 by = gate(h, d, live);
        a *= by.x;
        b *= by.y;
      }
      if (live) take(h, d, top, sum, a, b);
    }
  }

  // Publishes what is merged: columns of the output, or a record of this share. The gate, if there is one, is in the packets from `gates` on.
  template <class V>
  static __device__ __forceinline__ void finish(Context<M>& c, const Entry& e, u32 gates, int i, int j, bool last, V value) {
    const HeadSinks<M, G> sinks(c, e, i * QUERIES, last);
    const PacketGates<M, G> gate{c, gates, i * QUERIES};
    merge(c, last, value, sinks, gate, [&](int h, int d, float top, float sum, float a, float b) {
      if constexpr (G::SPLITS == 1) {
        publish_columns<G::HEADS * G::DIM>(c, e.out, (i * QUERIES + h) * G::DIM + d, __fdividef(a, sum), __fdividef(b, sum));
      } else {
        u64* record = c.p.exchange + e.out + u64((i * G::SPLITS + j) * QUERIES + h) * RECORD;
        if (d == 0) {
          send(c, record, __float_as_uint(top));
          send(c, record + 1, __float_as_uint(sum));
        }
        send(c, record + HEADER + d, __float_as_uint(a));
        send(c, record + HEADER + d + 1, __float_as_uint(b));
      }
    });
  }
};
