// combine: y = sum over slots of share * x, in the order of slots, then the shared expert; residual += SCALE * y, or out = SCALE * y.
//
// x (INPUTS * WIDTH) packets: what the expert of each slot made, side by side, then what the shared expert made
// aux (SLOTS)        shares, fp32 packets
// gate (1)           its sigmoid times SHARED_SCALE is the share of the shared expert, if GATED; else that is SHARED_SCALE
// residual           fp32, the columns that this block owns
// out (WIDTH)        packets
//
// owner    of a column: the block with its unit of 8
// moves    INPUTS values in for each column, one out
// assumes  WIDTH is whole units
#pragma once

template <class M, class G>
struct Combine {
  static constexpr int INPUTS = G::SLOTS + (G::SHARED ? 1 : 0);
  // Packets of two columns of an input.
  static constexpr int PER_PACKET = Wire<M>::PER_PACKET, EACH = 2 / PER_PACKET, N = INPUTS * EACH;

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    // Lane s of each warp has the share of input s.
    const bool gate = G::GATED && c.lane() == G::SLOTS, counted[1] = {c.lane() < G::SLOTS || gate};
    const u64* const share_at[1] = {c.p.exchange + (gate ? e.shared_gate : e.aux + c.lane())};
    u32 word[1];
    await_packets<1>(share_at, counted, c.tag, word, c.waiter());
    float share = counted[0] ? __uint_as_float(word[0]) : G::SHARED_SCALE;
    if (gate) share = __fdividef(G::SHARED_SCALE, 1.f + exp_fast(-share));
    c.barrier(); // other warps have updated these columns of the residual
    c.stamp(1);
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::WIDTH);
#pragma unroll 1
    for (int base = first + c.warp() * 64; base < last; base += M::WARPS * 64) {
      const int col = base + c.lane() * 2;
      bool active[N];
      const u64* from[N];
      u32 x[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        active[n] = col < last;
        from[n] = c.p.exchange + e.x + (n / EACH * G::WIDTH + col) / PER_PACKET + n % EACH;
      }
      await_packets<N>(from, active, c.tag, x, c.waiter());
      float y[2] = {};
#pragma unroll
      for (int s = 0; s < INPUTS; s++) {
        const float own = __shfl_sync(~0u, share, s);
        y[0] += own * Wire<M>::lo(x[s * EACH]);
        y[1] += own * (PER_PACKET == 2 ? Wire<M>::hi(x[s * EACH]) : Wire<M>::lo(x[s * EACH + EACH - 1]));
      }
      if (col >= last) continue;
#pragma unroll
      for (int i = 0; i < 2; i++) y[i] *= G::SCALE;
      if constexpr (G::ADDS) {
        float* own = c.residual() + e.residual + (col - first);
#pragma unroll
        for (int i = 0; i < 2; i++) y[i] = own[i] += y[i];
      }
      if constexpr (G::PUBLISH) publish_columns<G::WIDTH>(c, e.out, col, y[0], y[1]);
    }
  }
};
