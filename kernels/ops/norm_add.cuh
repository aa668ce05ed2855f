// norm_add: residual[i] += scale * y[i] * rsqrt(mean(y^2) + eps) * weight[i]; publishes the sum, unless REPLICATED.
//
// y (WIDTH)         packets of all owners: all columns for the statistics, this block's columns again for the values
// residual          fp32, the columns this block owns; all of them if REPLICATED
// out (WIDTH)       packets; none if REPLICATED
//
// owner    of a column: the block with its unit of 8; every block if REPLICATED
// moves    all WIDTH values of y into every block, for the statistics; the own columns once more, out again
// assumes  RMS norm: y is published by its owners without the norm
//
// If REPLICATED, every block adds up all columns for itself. It has read all of them for the statistics anyway, and a matvec over
// the sum finds it in shared memory instead of waiting for an exchange.
#pragma once

template <class M, class G>
struct NormAdd {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    if constexpr (G::REPLICATED)
      everywhere(c, e);
    else
      owned(c, e);
  }

  static __device__ __forceinline__ void everywhere(Context<M>& c, const Entry& e) {
    constexpr int PER_PACKET = Wire<M>::PER_PACKET, PER_PAIR = 2 * PER_PACKET, STEP = M::WARPS * 32 * PER_PAIR;
    constexpr int PASSES = ceil_div(G::WIDTH, STEP);
    static_assert(PASSES <= STAGE_PAIRS_MAX, "a block holds all of a sum in registers");
    const u32 k0 = c.tid() * PER_PAIR;
    const float* weight = c.template constant<float>(e.norm_weight) + k0;
    bool active[PASSES];
    u64 a[PASSES], b[PASSES];
    float w[PASSES][PER_PAIR], y[PASSES][PER_PAIR];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      active[i] = k0 + i * STEP < G::WIDTH;
#pragma unroll
      for (int j = 0; j < PER_PAIR; j++) w[i][j] = k0 + i * STEP + j < G::WIDTH ? __ldg(weight + i * STEP + j) : 0.f;
    }
    await_pairs<PASSES>(c.p.exchange + (e.x + k0 / PER_PACKET), [](int i) { return i * (STEP / PER_PACKET); }, active, c.tag, a, b,
                        c.waiter());
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      unpack_pair<M>(a[i], b[i], y[i]);
#pragma unroll
      for (int j = 0; j < PER_PAIR; j++) squares += y[i][j] * y[i][j];
    }
    put_statistic(c, 0, squares);
    c.stamp(1);
    c.barrier();
    const float factor = rms_factor<M, G::WIDTH>(c, G::EPS);
    float* own = c.residual() + k0;
#pragma unroll
    for (int i = 0; i < PASSES; i++)
#pragma unroll
      for (int j = 0; j < PER_PAIR; j++)
        if (k0 + i * STEP + j < G::WIDTH) own[i * STEP + j] += G::SCALE * (y[i][j] * factor * w[i][j]);
    c.barrier();
  }

  static __device__ __forceinline__ void owned(Context<M>& c, const Entry& e) {
    stage_block<M, G::WIDTH, Norm::RMS, false>(c, e, G::EPS);
    const float factor = rms_factor<M, G::WIDTH>(c, G::EPS);
    c.stamp(1);
    const float* weight = c.template constant<float>(e.norm_weight);
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::WIDTH);
#pragma unroll 1
    for (int base = first; base < last; base += M::WARPS * 64) {
      const int col = base + c.tid() * 2;
      if (col >= last) continue;
      const u64* from = c.p.exchange + e.x + col / Wire<M>::PER_PACKET;
      float y[2];
      y[0] = Wire<M>::lo(reread(from));
      y[1] = 0.f;
      if (col + 1 < last) y[1] = Wire<M>::PER_PACKET == 2 ? Wire<M>::hi(reread(from)) : Wire<M>::lo(reread(from + 1));
      float* own = c.residual() + e.residual + (col - first);
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (col + i < last) own[i] += G::SCALE * (y[i] * factor * weight[col + i]);
      publish_columns<G::WIDTH>(c, e.out, col, own[0], col + 1 < last ? own[1] : 0.f);
    }
  }
};
