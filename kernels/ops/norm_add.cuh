// norm_add: residual[i] += scale * y[i] * rsqrt(mean(y^2) + eps) * weight[i]; publishes the sum.
//
// y (WIDTH)         packets of all owners, for the statistics; the own columns again for the values
// residual          fp32, the columns this block owns
// out (WIDTH)       packets
#pragma once

template <class M, class G>
struct NormAdd {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    float factor = stage_input<M, false>(c, e);
    c.stamp(1);
    const int width = int(e.k);
    const float scale = __uint_as_float(e.scale);
    const float* weight = c.template constant<float>(e.norm_weight);
    int first = int(e.lo) * 8, last = min(int(e.hi) * 8, width);
    for (int col = first + c.tid() * 2; col < last; col += M::WARPS * 64) {
      const u64* from = c.p.exchange + e.x + col / Wire<M>::PER_PACKET;
      float y[2];
      y[0] = Wire<M>::lo(u32(__ldcg(from)));
      y[1] = 0.f;
      if (col + 1 < last) y[1] = Wire<M>::PER_PACKET == 2 ? Wire<M>::hi(u32(__ldcg(from))) : Wire<M>::lo(u32(__ldcg(from + 1)));
      float* own = c.residual() + e.residual + (col - first);
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (col + i < last) own[i] += scale * (y[i] * factor * weight[col + i]);
      publish_columns(c, e.out, col, width, own[0], col + 1 < last ? own[1] : 0.f);
    }
  }
};
