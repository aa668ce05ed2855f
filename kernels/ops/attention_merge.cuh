// attention_merge: one query head from the partial records of all shares of its history.
//
// partial  records of (max, sum, DIM sums), fp32 packets: head h, share s at ((h / G) * SPLITS + s) * G * R + (h % G) * R,
//          G query heads a record group, R = DIM + 2
// out      DIM columns of the attention output, packets
//
// M = max m_s;  out[d] = sum_s exp(m_s - M) o_s[d] / sum_s exp(m_s - M) l_s.  Threads take (pair of dimensions, slice of
// the shares); slices meet in shared memory. SPLITS * R packets are read once: 17 KiB at 16 shares of 128 dimensions.
#pragma once

template <class M, class G>
struct AttentionMerge {
  static constexpr int R = G::DIM + 2;
  static constexpr int T = M::WARPS * 32;
  static constexpr int N = ceil_div(G::SPLITS * R, T) < 8 ? ceil_div(G::SPLITS * R, T) : 8; // packets a thread waits for at once

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int h = int(e.lo);
    const u64* records = c.p.exchange + e.x + (u64(h / G::HEADS_PER_TASK) * G::SPLITS * G::HEADS_PER_TASK + h % G::HEADS_PER_TASK) * R;
    constexpr int STRIDE = G::HEADS_PER_TASK * R;
    float* scratch = c.scratch();
    c.barrier(); // slow warps may still add up the previous task's partial sums there
    // Everything is read by somebody, into shared memory.
#pragma unroll 1
    for (int first = 0; first < G::SPLITS * R; first += T * N) {
      bool active[N];
      const u64* from[N];
      u32 payload[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        const int i = first + n * T + c.tid();
        active[n] = i < G::SPLITS * R;
        from[n] = records + u64(i / R) * STRIDE + i % R;
      }
      await_packets<N>(from, active, c.tag, payload, c.patience, c.dog(), c.site());
#pragma unroll
      for (int n = 0; n < N; n++)
        if (active[n]) scratch[first + n * T + c.tid()] = __uint_as_float(payload[n]);
    }
    c.barrier();
    c.stamp(1);
    for (int d = c.tid() * 2; d < G::DIM; d += T * 2) {
      float top = NEGATIVE_INFINITY;
      for (int s = 0; s < G::SPLITS; s++) top = fmaxf(top, scratch[s * R]);
      float sum = 0.f, a = 0.f, b = 0.f;
      for (int s = 0; s < G::SPLITS; s++) {
        float w = __expf(scratch[s * R] - top);
        sum += w * scratch[s * R + 1];
        a += w * scratch[s * R + 2 + d];
        b += w * scratch[s * R + 3 + d];
      }
      publish_columns<G::HEADS * G::DIM>(c, e.out, h * G::DIM + d, __fdividef(a, sum), __fdividef(b, sum));
    }
    c.barrier(); // the next task may stage where these records are
  }
};
