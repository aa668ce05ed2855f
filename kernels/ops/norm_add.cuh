// norm_add: residual[i] += scale * y[i] * rsqrt(mean(y^2) + eps) * weight[i]; publishes the sum.
//
// y (WIDTH)         packets of all owners, for the statistics; the own columns again for the values
// residual          fp32, the columns this block owns
// out (WIDTH)       packets
#pragma once

template <class M, class G>
struct NormAdd {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
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
      y[0] = Wire<M>::lo(u32(__ldcg(from)));
      y[1] = 0.f;
      if (col + 1 < last) y[1] = Wire<M>::PER_PACKET == 2 ? Wire<M>::hi(u32(__ldcg(from))) : Wire<M>::lo(u32(__ldcg(from + 1)));
      float* own = c.residual() + e.residual + (col - first);
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (col + i < last) own[i] += G::SCALE * (y[i] * factor * weight[col + i]);
      publish_columns<G::WIDTH>(c, e.out, col, own[0], col + 1 < last ? own[1] : 0.f);
    }
  }
};
