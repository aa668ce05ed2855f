// Owns the input of a matvec: packets in, a normalised vector in shared memory and its statistics out.
//
// The staged vector is bf16 where tensor cores read it and fp32 otherwise. With an RMS norm the vector is x * weight, and
// the factor rsqrt(mean(x^2) + eps) is applied after the dot product, so that no thread waits for the statistics of all.
// Sizes are data of the queue entry: one copy of this code serves every matvec, which keeps the layer loop in the
// instruction cache.
#pragma once

enum class Norm : u32 { NONE, RMS, LAYER };

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
__device__ __forceinline__ float block_sum(const Context<M>& c, int which) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < M::WARPS; w++) sum += c.state().stat[c.task & 1][which][w];
  return sum;
}

// LayerNorm: the mean first, then the variance around it, for a difference of squares would cancel. All packets have been
// seen by the block; they are read again. Ends with a block barrier.
template <class M>
__device__ __forceinline__ void stage_layer_norm(Context<M>& c, const Entry& e) {
  constexpr int T = M::WARPS * 32, PER_PACKET = Wire<M>::PER_PACKET;
  const int K = int(e.k);
  const float* weight = c.template constant<float>(e.norm_weight);
  const float* bias = c.template constant<float>(e.norm_bias);
  const u64* packets = c.p.exchange + e.x;
  const float mean = block_sum(c, 0) / K;
  float around = 0.f;
  for (int k = c.tid() * PER_PACKET; k < K; k += T * PER_PACKET) {
    const u32 payload = u32(__ldcg(packets + k / PER_PACKET));
    const float a = Wire<M>::lo(payload) - mean, b = PER_PACKET == 2 && k + 1 < K ? Wire<M>::hi(payload) - mean : 0.f;
    around += a * a + b * b;
  }
  around = warp_sum(around);
  if (c.lane() == 0) c.state().stat[c.task & 1][1][c.warp()] = around;
  c.barrier();
  const float factor = rsqrtf(block_sum(c, 1) / K + __uint_as_float(e.eps));
  for (int k = c.tid() * 2; k < K; k += T * 2) {
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      x[j] = 0.f;
      if (k + j < K) {
        const u32 payload = u32(__ldcg(packets + (k + j) / PER_PACKET));
        const float v = PER_PACKET == 2 && j == 1 ? Wire<M>::hi(payload) : Wire<M>::lo(payload);
        x[j] = (v - mean) * factor * weight[k + j] + (e.norm_bias != ~0u ? bias[k + j] : 0.f);
      }
    }
    stage_store(c, k, x[0], x[1]);
  }
  c.barrier();
}

// Stages `e.k` values from packet `e.x` on; ends with a block barrier. Returns the factor of the dot products.
// STORE false: only the statistics are wanted.
template <class M, bool STORE>
__device__ __forceinline__ float stage_input(Context<M>& c, const Entry& e) {
  constexpr int T = M::WARPS * 32, PER_PACKET = Wire<M>::PER_PACKET, PER_THREAD = 2 * PER_PACKET;
  // Loads that are polled together: more would not stay in registers, fewer would wait for one after another.
  constexpr int GROUP = 4;
  const int K = int(e.k);
  const Norm norm = Norm(e.norm);
  const float* weight = c.template constant<float>(e.norm_weight);
  float sum = 0.f, squares = 0.f;
  if constexpr (STORE)
    for (int k = round_up(K, 2) + c.tid() * 2; k < round_up(K, 32); k += T * 2) stage_store(c, k, 0.f, 0.f);
#pragma unroll 1
  for (int base = c.tid() * PER_THREAD; base < K; base += GROUP * T * PER_THREAD) {
    bool active[GROUP];
    u64 a[GROUP], b[GROUP];
    float w[GROUP][PER_THREAD];
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const int k = base + i * T * PER_THREAD;
      active[i] = k < K && !c.lost;
      a[i] = b[i] = 0;
      // Before the wait, so that the weights are there when the packets are. Past the end lies other constant memory.
      if (STORE && norm == Norm::RMS && k < K) {
        if constexpr (PER_THREAD == 4) {
          const float4 v = __ldg(reinterpret_cast<const float4*>(weight + k));
          w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
        } else {
          const float2 v = __ldg(reinterpret_cast<const float2*>(weight + k));
          w[i][0] = v.x, w[i][1] = v.y;
        }
      } else {
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) w[i][j] = 1.f;
      }
    }
    if (!await_pairs<GROUP>(c.p.exchange + e.x + base / PER_PACKET, T * 2, active, c.tag, a, b, c.dog(), c.site(e))) c.lost = true;
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
      const int k = base + i * T * PER_THREAD;
      if (k >= K) continue;
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
        squares += x[j] * x[j];
        if constexpr (M::LAYER_NORMS) sum += x[j];
        x[j] *= w[i][j];
      }
      if constexpr (STORE)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j += 2)
          if (k + j < K) stage_store(c, k + j, x[j], k + j + 1 < K ? x[j + 1] : 0.f);
    }
  }
  if (norm != Norm::NONE) {
    squares = warp_sum(squares);
    if constexpr (M::LAYER_NORMS) sum = warp_sum(sum);
    if (c.lane() == 0) {
      c.state().stat[c.task & 1][0][c.warp()] = M::LAYER_NORMS && norm == Norm::LAYER ? sum : squares;
    }
  }
  c.barrier();
  if (norm == Norm::NONE) return 1.f;
  if constexpr (M::LAYER_NORMS)
    if (norm == Norm::LAYER) {
      stage_layer_norm(c, e);
      return 1.f;
    }
  return rsqrtf(block_sum(c, 0) / K + __uint_as_float(e.eps));
}
