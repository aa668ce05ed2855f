// group_norm: out[i] = x[i] * rsqrt(mean(x^2) + EPS) * weight[i], the mean over a group; times silu(GATE_SCALE * gate[i]) if GATED.
//
// x (WIDTH)      packets
// gate (WIDTH)   packets, columns GATED_AT .. of their buffer
// weight (WIDTH) fp32 constant
// out (WIDTH)    packets
//
// owner    of a group of columns: one task, and of a column in it one thread, which keeps it in a register
// moves    a group in, with its gates, and out
// assumes  groups are an even number of columns
#pragma once

template <class M, class G>
struct GroupNorm {
  static constexpr int THREADS = M::WARPS * 32, GROUP = G::WIDTH / G::GROUPS, PAIRS = GROUP / 2, TURNS = ceil_div(PAIRS, THREADS);

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    constexpr int PER_PACKET = Wire<M>::PER_PACKET, EACH = 2 / PER_PACKET, N = TURNS * EACH;
    const int first = int(uniform(e.lo)) * GROUP;
    const float* const weight = c.template constant<float>(e.norm_weight);
    float gains[TURNS][2];
    bool active[N];
    const u64 *from[N], *gate_at[N];
    u32 x[N], gate[N];
    const auto at = [&](int n) { return (n * THREADS + c.tid()) * 2; };
#pragma unroll
    for (int n = 0; n < TURNS; n++) {
      const bool in = at(n) < GROUP;
      const int col = first + (in ? at(n) : 0);
#pragma unroll
      for (int h = 0; h < 2; h++) gains[n][h] = __ldg(weight + col + h);
#pragma unroll
      for (int h = 0; h < EACH; h++) {
        active[n * EACH + h] = in;
        from[n * EACH + h] = c.p.exchange + e.x + col / PER_PACKET + h;
        if constexpr (G::GATED) gate_at[n * EACH + h] = c.p.exchange + e.gate + (G::GATED_AT + col) / PER_PACKET + h;
      }
    }
    // The gates were there before.
    if constexpr (G::GATED) await_packets<N>(gate_at, active, c.tag, gate, c.waiter());
    await_packets<N>(from, active, c.tag, x, c.waiter());
    const auto value = [&](const u32(&of)[N], int n, int h) {
      return PER_PACKET == 2 && h == 1 ? Wire<M>::hi(of[n]) : Wire<M>::lo(of[n * EACH + h * (EACH - 1)]);
    };
    float squares = 0.f;
#pragma unroll
    for (int n = 0; n < TURNS; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float v = value(x, n, h);
        squares += v * v;
      }
    put_statistic(c, 0, squares);
    c.stamp(1);
    c.barrier();
    const float factor = rms_factor<M, GROUP>(c, G::EPS);
#pragma unroll
    for (int n = 0; n < TURNS; n++) {
      if (at(n) >= GROUP) continue;
      float y[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        y[h] = value(x, n, h) * factor * gains[n][h];
        if constexpr (G::GATED) y[h] *= activate<Act::SILU>(G::GATE_SCALE * value(gate, n, h));
      }
      publish_columns<G::WIDTH>(c, e.out, first + at(n), y[0], y[1]);
    }
  }
};
