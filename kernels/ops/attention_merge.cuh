// attention_merge: one query head from the partial records of all shares of its history.
//
// partial  records of (max, sum, DIM sums), fp32 packets: head h, share s at ((h / G) * SPLITS + s) * G * RECORD + (h % G) * RECORD,
//          G query heads a record group, RECORD = DIM + 2
// gate     DIM columns in the packets of q, k and v, if the output is gated: out is multiplied by its sigmoid
// out      DIM columns of the attention output, packets
//
// owner    of a query head: one task
// moves    SPLITS * (DIM + 2) packets in, DIM values out
// assumes  a share without rows has a maximum of -inf and sums of zero; the last share has the current position
//
// M = max m_s;  out[d] = sum_s exp(m_s - M) o_s[d] / sum_s exp(m_s - M) l_s.  Warps take the shares in turn, lanes the
// dimensions, so that a record is read as it lies. The warps' results meet in shared memory, as in attention.
#pragma once

template <class M, class G>
struct AttentionMerge {
  // One head, as if attention had not been split.
  struct Whole : G {
    static constexpr int HEADS_PER_TASK = 1, SPLITS = 1;
  };
  static constexpr int MERGING = M::WARPS < G::SPLITS ? M::WARPS : G::SPLITS; // warps that have a share
  typedef AttentionRecords<M, Whole, MERGING> Records;
  static constexpr int RECORD = Records::RECORD, STRIDE = G::HEADS_PER_TASK * RECORD;
  // Pairs of packets that a lane reads of a share: the share's state, then the lane's dimensions.
  static constexpr int BLOCKS = ceil_div(G::DIM, 64), SHARE_PAIRS = 1 + BLOCKS;
  // Shares of a warp, and how many of them registers hold at once.
  static constexpr int WARP_SHARES = ceil_div(G::SPLITS, M::WARPS), SHARES_HELD = SHARE_PAIRS < 12 ? 12 / SHARE_PAIRS : 1;
  static constexpr int SHARES = WARP_SHARES < SHARES_HELD ? WARP_SHARES : SHARES_HELD, N = SHARES * SHARE_PAIRS;

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int h = int(e.lo);
    const u64* records = c.p.exchange + e.x + (u64(h / G::HEADS_PER_TASK) * G::SPLITS * G::HEADS_PER_TASK + h % G::HEADS_PER_TASK) * RECORD;
    const auto dim = [&](int block) { return block * 64 + c.lane() * 2; };
    float top = NEGATIVE_INFINITY, sum = 0.f, x[BLOCKS][2] = {};
#pragma unroll 1
    for (int first = 0; first < WARP_SHARES; first += SHARES) {
      const auto share = [&](int n) { return (first + n / SHARE_PAIRS) * M::WARPS + c.warp(); };
      bool active[N];
      u64 a[N], b[N];
#pragma unroll
      for (int n = 0; n < N; n++) active[n] = share(n) < G::SPLITS && (n % SHARE_PAIRS == 0 || dim(n % SHARE_PAIRS - 1) < G::DIM);
      const auto offset = [&](int n) { return share(n) * STRIDE + (n % SHARE_PAIRS == 0 ? 0 : Records::HEADER + dim(n % SHARE_PAIRS - 1)); };
      await_pairs<N, true>(records, offset, active, c.tag, a, b, c.waiter());
      float m[SHARES], high = top;
#pragma unroll
      for (int s = 0; s < SHARES; s++) {
        m[s] = active[s * SHARE_PAIRS] ? __uint_as_float(u32(a[s * SHARE_PAIRS])) : NEGATIVE_INFINITY;
        high = fmaxf(high, m[s]);
      }
      // Shares without a row have a maximum of -inf, and so may all shares of a warp.
      const float shift = high > NEGATIVE_INFINITY ? high : 0.f, shrink = exp_fast(top - shift);
      top = high;
      sum *= shrink;
#pragma unroll
      for (int k = 0; k < BLOCKS; k++) {
        x[k][0] *= shrink;
        x[k][1] *= shrink;
      }
#pragma unroll
      for (int s = 0; s < SHARES; s++) {
        const float w = exp_fast(m[s] - shift);
        sum += w * __uint_as_float(u32(b[s * SHARE_PAIRS]));
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
          x[k][0] += w * __uint_as_float(u32(a[s * SHARE_PAIRS + 1 + k]));
          x[k][1] += w * __uint_as_float(u32(b[s * SHARE_PAIRS + 1 + k]));
        }
      }
    }
    c.stamp(1);
    c.barrier(); // slow warps may still add up the previous task's partial sums there
    if (c.warp() < MERGING) {
      float* record = Records::of(c, c.warp(), 0);
      if (c.lane() == 0) *reinterpret_cast<float2*>(record) = make_float2(top, sum);
#pragma unroll
      for (int k = 0; k < BLOCKS; k++)
        if (dim(k) < G::DIM) *reinterpret_cast<float2*>(record + Records::HEADER + dim(k)) = make_float2(x[k][0], x[k][1]);
    }
    c.barrier();
    Records::finish(c, e, e.gate, h, 0, false, [](int) { return make_float2(0.f, 0.f); });
    c.barrier(); // the next task may stage where these records are
  }
};
