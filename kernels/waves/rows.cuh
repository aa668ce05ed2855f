// rows: what a wave does to each row alone. Embeds the token, or adds a branch to the residual; then the norm of the sum.
//
// residual (rows, HIDDEN)  fp32, in place
// branch   (rows, HIDDEN)  bf16 row by row: residual += BRANCH_SCALE * norm(branch)
// out      (rows, HIDDEN)  bf16, as products read it
//
// owner    of a row: one warp, or several where one would lack registers
// assumes  HIDDEN is whole pieces of 8 columns
#pragma once

__device__ __forceinline__ void unpack8(const uint4 v, float (&to)[8]) {
  to[0] = bf16_lo(v.x), to[1] = bf16_hi(v.x), to[2] = bf16_lo(v.y), to[3] = bf16_hi(v.y);
  to[4] = bf16_lo(v.z), to[5] = bf16_hi(v.z), to[6] = bf16_lo(v.w), to[7] = bf16_hi(v.w);
}

template <class M, class G>
struct WaveRows {
  static constexpr int H = G::HIDDEN;
  static_assert(H % 8 == 0, "a lane has 8 columns at a time");

  struct Norms {
    float mean, factor;
  };
  static __device__ __forceinline__ void load8(const float* from, float (&to)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
  }
  // x = (x - mean) * factor * weight + bias
  template <Norm KIND>
  static __device__ __forceinline__ void apply(const WaveContext<M>& c, const Norms& n, u32 weight, u32 bias, int col, float (&x)[8]) {
    if constexpr (KIND != Norm::NONE) {
      float w[8], b[8] = {};
      if (weight != ~0u) {
        load8(c.template constant<float>(weight) + col, w);
      } else {
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = 1.f;
      }
      if (KIND == Norm::LAYER && bias != ~0u) load8(c.template constant<float>(bias) + col, b);
#pragma unroll
      for (int k = 0; k < 8; k++) x[k] = (x[k] - n.mean) * n.factor * w[k] + b[k];
    }
  }

  // Warps of a row, so that a lane has 64 columns at most, and columns that a group of warps has at once.
  static constexpr int WARPS = H <= 2048 ? 1 : H <= 4096 ? 2 : H <= 8192 ? 4 : 8, STRIDE_LANES = WARPS * 32, STRIDE = STRIDE_LANES * 8, GROUPS = M::WARPS / WARPS;

  static __device__ __forceinline__ void load(WaveLoader<M>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const Shares<M> shares(c.p, e.shares);
    u32 round = 0;
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
#pragma unroll 1
      for (u32 row = share.row; row < end; row += GROUPS, round++) {
        const u32 mine = row + u32(c.warp() / WARPS);
        one(c, e, int(min(mine, end - 1)), mine < end, round & 1);
      }
    }
  }
  // Over all warps of the row. All warps of the block come here.
  static __device__ __forceinline__ float row_sum(WaveContext<M>& c, u32 round, int which, float v) {
    v = warp_sum(v);
    if constexpr (WARPS == 1) return v;
    float* stats = wave_state<M>().stats[round][which];
    if (c.lane() == 0) stats[c.warp()] = v;
    c.barrier();
    v = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) v += stats[c.warp() / WARPS * WARPS + w];
    return v;
  }
  // Columns of a row that a lane has, 8 in each of CHUNKS; those past HIDDEN are zeros.
  static constexpr int CHUNKS = ceil_div(H, STRIDE);
  typedef float Held[CHUNKS][8];
  template <class F>
  static __device__ __forceinline__ void each(const WaveContext<M>& c, F f) {
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const int col = i * STRIDE + c.tid() % STRIDE_LANES * 8;
      if (H % STRIDE == 0 || col < H) f(i, col);
    }
  }
  template <Norm KIND>
  static __device__ __forceinline__ Norms statistics(WaveContext<M>& c, u32 round, int which, float eps, const Held& x) {
    Norms n{0.f, 1.f};
    if constexpr (KIND == Norm::LAYER) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < CHUNKS; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) sum += x[i][k];
      n.mean = row_sum(c, round, which, sum) * (1.f / H);
    }
    if constexpr (KIND != Norm::NONE) {
      float squares = 0.f;
      each(c, [&](int i, int) {
#pragma unroll
        for (int k = 0; k < 8; k++) squares += (x[i][k] - n.mean) * (x[i][k] - n.mean);
      });
      n.factor = rsqrtf(row_sum(c, round, which + 1, squares) * (1.f / H) + eps);
    }
    return n;
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, int row, bool live, u32 round) {
    float* residual = c.template work<float>(e.residual) + u64(row) * H;
    Held x = {};
    if constexpr (G::EMBED) {
      const bf16* table = c.template constant<bf16>(e.table) + u64(u32(__ldg(c.p.tokens + row))) * H;
      each(c, [&](int i, int col) {
        unpack8(__ldg(reinterpret_cast<const uint4*>(table + col)), x[i]);
#pragma unroll
        for (int k = 0; k < 8; k++) x[i][k] *= G::EMBED_SCALE;
      });
    } else {
      each(c, [&](int i, int col) { load8(residual + col, x[i]); });
    }
    if constexpr (G::BRANCH) {
      const bf16* branch = c.template work<bf16>(e.branch) + u64(row) * H;
      Held y = {};
      each(c, [&](int i, int col) { unpack8(*reinterpret_cast<const uint4*>(branch + col), y[i]); });
      const Norms n = statistics<G::BRANCH_NORM>(c, round, 0, G::BRANCH_EPS, y);
      each(c, [&](int i, int col) {
        apply<G::BRANCH_NORM>(c, n, e.branch_weight, e.branch_bias, col, y[i]);
#pragma unroll
        for (int k = 0; k < 8; k++) x[i][k] += G::BRANCH_SCALE * y[i][k];
      });
    }
    if ((G::EMBED || G::BRANCH) && live)
      each(c, [&](int i, int col) {
        *reinterpret_cast<float4*>(residual + col) = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
        *reinterpret_cast<float4*>(residual + col + 4) = make_float4(x[i][4], x[i][5], x[i][6], x[i][7]);
      });
    if constexpr (G::OUT) {
      u8* out = c.template work<u8>(e.out);
      const Norms n = statistics<G::NORM>(c, round, 2, G::EPS, x);
      each(c, [&](int i, int col) {
        if (!live) return;
        apply<G::NORM>(c, n, e.norm_weight, e.norm_bias, col, x[i]);
#pragma unroll
        for (int k = 0; k < 8; k += 2) *reinterpret_cast<u32*>(out + OperandPlace<H>::at(row, col + k)) = bf16_pair(x[i][k], x[i][k + 1]);
      });
    }
  }
};
