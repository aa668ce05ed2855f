// Owns the input of a matvec: packets in, a normalised vector in shared memory and its statistics out.
//
// The staged vector is bf16 where tensor cores read it and fp32 otherwise. With an RMS norm the vector is x * weight, and
// the factor rsqrt(mean(x^2) + eps) is applied after the dot product, so that no thread waits for the statistics of all.
#pragma once

enum class Norm : int { NONE, RMS, LAYER };

template <class M>
constexpr bool STAGE_BF16 = M::WEIGHT == Elem::BF16 && M::DOT == Dot::MMA;

template <class M>
__device__ __forceinline__ void stage_store(const Context<M>& c, int k, float a, float b) {
  if constexpr (STAGE_BF16<M>)
    *reinterpret_cast<u32*>(c.stage() + k * 2) = bf16_pair(a, b);
  else
    *reinterpret_cast<float2*>(c.stage() + k * 4) = make_float2(a, b);
}

template <class M>
__device__ __forceinline__ void block_statistics(const Context<M>& c, float& sum, float& squares) {
  const auto& stat = c.state.stat[c.task & 1];
  sum = squares = 0.f;
#pragma unroll
  for (int w = 0; w < M::WARPS; w++) {
    sum += stat[0][w];
    squares += stat[1][w];
  }
}

// Stages K values from packet `e.x` on; ends with a block barrier. Returns the factor of the dot products.
template <class M, int K, Norm N, bool STORE = true>
__device__ __forceinline__ float stage_input(Context<M>& c, const Entry& e, float eps) {
  constexpr int T = M::WARPS * 32;
  constexpr int PER_PACKET = Wire<M>::PER_PACKET, PER_THREAD = 2 * PER_PACKET;
  constexpr int PASSES = ceil_div(K, T * PER_THREAD);
  // More than this in one go would not stay in registers; the passes of a group are polled together.
  constexpr int GROUP = PASSES < 4 ? PASSES : 4;
  constexpr int KPAD = round_up(K, 32);
  const float* weight = c.template constant<float>(e.norm_weight);
  const float* bias = c.template constant<float>(e.norm_bias);
  float sum = 0.f, squares = 0.f;
  if constexpr (STORE)
    for (int k = round_up(K, 2) + c.tid * 2; k < KPAD; k += T * 2) stage_store(c, k, 0.f, 0.f);
#pragma unroll
  for (int g = 0; g < PASSES; g += GROUP) {
    bool active[GROUP];
    u64 a[GROUP], b[GROUP];
    float w[GROUP][PER_THREAD];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      int k = ((g + i) * T + c.tid) * PER_THREAD;
      active[i] = g + i < PASSES && k < K && !c.lost;
      if constexpr (N == Norm::RMS && STORE)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) w[i][j] = k + j < K ? __ldg(weight + k + j) : 0.f;
      a[i] = b[i] = 0;
    }
    if (!await_pairs<GROUP>(c.p.exchange + e.x + (g * T + c.tid) * 2, T * 2, active, c.tag, a, b,
                            c.dog, c.site(e)))
      c.lost = true;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      int k = ((g + i) * T + c.tid) * PER_THREAD;
      if (g + i >= PASSES || k >= K) continue;
      float x[4];
      x[0] = Wire<M>::lo(u32(a[i]));
      if constexpr (PER_PACKET == 2) {
        x[1] = Wire<M>::hi(u32(a[i]));
        x[2] = Wire<M>::lo(u32(b[i]));
        x[3] = Wire<M>::hi(u32(b[i]));
      } else {
        x[1] = Wire<M>::lo(u32(b[i]));
      }
#pragma unroll
      for (int j = 0; j < PER_THREAD; j++) {
        if constexpr (N != Norm::NONE) squares += x[j] * x[j];
        if constexpr (N == Norm::LAYER) sum += x[j];
        if constexpr (N == Norm::RMS && STORE) x[j] *= w[i][j];
      }
      if constexpr (STORE && N != Norm::LAYER)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j += 2)
          if (k + j < K) stage_store(c, k + j, x[j], x[j + 1]);
    }
  }
  if constexpr (N != Norm::NONE) {
    squares = warp_sum(squares);
    if constexpr (N == Norm::LAYER) sum = warp_sum(sum);
    if (c.lane == 0) {
      c.state.stat[c.task & 1][0][c.warp] = sum;
      c.state.stat[c.task & 1][1][c.warp] = squares;
    }
  }
  c.barrier();
  if constexpr (N == Norm::RMS) {
    block_statistics(c, sum, squares);
    return rsqrtf(squares / K + eps);
  }
  if constexpr (N == Norm::LAYER) {
    // The mean first, then the variance around it: the difference of squares would cancel. The packets are all there.
    block_statistics(c, sum, squares);
    float mean = sum / K, around = 0.f;
    for (int k = c.tid * PER_PACKET; k < K; k += T * PER_PACKET) {
      u32 payload = u32(__ldcg(c.p.exchange + e.x + k / PER_PACKET));
      float x0 = Wire<M>::lo(payload) - mean;
      around += x0 * x0;
      if (PER_PACKET == 2 && k + 1 < K) {
        float x1 = Wire<M>::hi(payload) - mean;
        around += x1 * x1;
      }
    }
    around = warp_sum(around);
    c.barrier();
    if (c.lane == 0) c.state.stat[c.task & 1][0][c.warp] = around;
    c.barrier();
    block_statistics(c, sum, squares);
    float factor = rsqrtf(sum / K + eps);
    for (int k = c.tid * 2; k < K; k += T * 2) {
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        x[j] = 0.f;
        if (k + j < K) {
          u32 payload = u32(__ldcg(c.p.exchange + e.x + (k + j) / PER_PACKET));
          float v = PER_PACKET == 2 && ((k + j) & 1) ? Wire<M>::hi(payload) : Wire<M>::lo(payload);
          x[j] = (v - mean) * factor * weight[k + j] + (e.norm_bias != ~0u ? bias[k + j] : 0.f);
        }
      }
      stage_store(c, k, x[0], x[1]);
    }
    c.barrier();
  }
  return 1.f;
}
