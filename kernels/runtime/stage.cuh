// Owns the input of a matvec: packets in, a normalised vector in shared memory and its statistics out.
//
// The staged vector is bf16 where tensor cores read it and fp32 otherwise. With an RMS norm the vector is x * weight, and
// the factor rsqrt(mean(x^2) + eps) is applied after the dot product, so that no thread waits for the mean before it multiplies.
#pragma once

enum class Norm : u32 { NONE, RMS, LAYER };

template <class M>
constexpr bool STAGE_BF16 = M::WEIGHT == Elem::BF16 && M::DOT == Dot::MMA;

// Place of the elements `k` and `k + 1` (k even) of the staged vector. `k + 2` is 8 bytes on if 4 divides k; `k + 8n` is
// 8n STAGE_ELEM bytes on.
template <class M>
constexpr int STAGE_ELEM = STAGE_BF16<M> ? 2 : 4;
template <class M>
__device__ __forceinline__ u8* staged_at(const Context<M>& c, u32 k) {
  return c.stage() + (STAGE_BF16<M> ? operand_byte(k) : k * 4);
}
template <class M>
__device__ __forceinline__ void stage_store(u8* at, float a, float b) {
  if constexpr (STAGE_BF16<M>)
    *reinterpret_cast<u32*>(at) = bf16_pair(a, b);
  else
    *reinterpret_cast<float2*>(at) = make_float2(a, b);
}
// x * 2^SHIFT.
template <int SHIFT>
__device__ __forceinline__ float shifted(float x) {
  if constexpr (SHIFT == 0) return x;
  return x * __uint_as_float(u32(127 + SHIFT) << 23);
}

// Pairs of packets that a thread waits for in one round. Each round costs a trip to L2.
constexpr int STAGE_PAIRS_MAX = 8;

// Leaves a warp's part of a statistic, for `block_sum` after the next block barrier.
template <class M>
__device__ __forceinline__ void put_statistic(const Context<M>& c, int which, float value) {
  value = warp_sum(value);
  if (c.lane() == 0) c.state().stat[c.task & 1][which][c.warp()] = value;
}
template <class M>
__device__ __forceinline__ float block_sum(const Context<M>& c, int which) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < M::WARPS; w++) sum += c.state().stat[c.task & 1][which][w];
  return sum;
}
template <class M, int K>
__device__ __forceinline__ float rms_factor(const Context<M>& c, float eps) {
  return rsqrtf(block_sum(c, 0) * (1.f / K) + eps);
}

// The values of a pair of packets.
template <class M>
__device__ __forceinline__ void unpack_pair(u64 a, u64 b, float* x) {
  x[0] = Wire<M>::lo(u32(a));
  if constexpr (Wire<M>::PER_PACKET == 2) {
    x[1] = Wire<M>::hi(u32(a));
    x[2] = Wire<M>::lo(u32(b));
    x[3] = Wire<M>::hi(u32(b));
  } else {
    x[1] = Wire<M>::lo(u32(b));
  }
}

// Waits, by whole warps, for COUNT pairs of packets of this thread, at elements k0 + i * STEP (multiples of a pair) below K. With OWN it
// reads these elements of the residual instead, of which the block then has all columns. With STORE it stages x * weight, times 2^SHIFT,
// and divides the second two of every four values by 2^SECOND. Returns the sum of squares; LayerNorm also adds x to `sum`.
template <class M, int K, Norm N, bool STORE, int COUNT, int STEP, bool OWN = false, int PAD = 32, int SHIFT = 0, int SECOND = 0>
__device__ __forceinline__ float stage_pairs(Context<M>& c, const Entry& e, u32 k0, float& sum) {
  constexpr int PER_PACKET = Wire<M>::PER_PACKET, PER_PAIR = 2 * PER_PACKET;
  static_assert(STEP % 8 == 0, "the pairs of a thread are staged at constant distances");
  static_assert(SECOND == 0 || PER_PAIR == 4, "a pair of packets begins at a multiple of four");
  const float* weight = c.template constant<float>(e.norm_weight) + k0;
  u8* const to = staged_at(c, k0);
  bool active[COUNT];
  u64 a[COUNT], b[COUNT];
  float w[COUNT][PER_PAIR];
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    active[i] = k0 + i * STEP < K;
    // Loaded before the wait, so that the weights are there when the packets are. Not past the end, where other constants lie.
    if constexpr (STORE && N == Norm::RMS) {
      if constexpr (PER_PAIR == 4) {
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        if (active[i]) v = __ldg(reinterpret_cast<const float4*>(weight + i * STEP));
        w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
      } else {
        float2 v = make_float2(0.f, 0.f);
        if (active[i]) v = __ldg(reinterpret_cast<const float2*>(weight + i * STEP));
        w[i][0] = v.x, w[i][1] = v.y;
      }
    }
  }
  if constexpr (!OWN)
    await_pairs<COUNT>(c.p.exchange + (e.x + k0 / PER_PACKET), [](int i) { return i * (STEP / PER_PACKET); }, active, c.tag, a, b, c.waiter());
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    float x[PER_PAIR];
    if constexpr (OWN) {
      // A pair may reach beyond K: the residual has whole units, so the rest is read, and then replaced by zeros.
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
      const float* own = c.residual() + k0 + i * STEP;
      if constexpr (PER_PAIR == 4) {
        if (active[i]) v = *reinterpret_cast<const float4*>(own);
      } else {
        if (active[i]) v.x = own[0], v.y = own[1];
      }
      x[0] = v.x, x[1] = v.y;
      if constexpr (PER_PAIR == 4) x[2] = v.z, x[3] = v.w;
#pragma unroll
      for (int j = 1; j < PER_PAIR; j++)
        if (K % PER_PAIR != 0 && k0 + i * STEP + j >= K) x[j] = 0.f;
    } else {
      unpack_pair<M>(a[i], b[i], x);
    }
#pragma unroll
    for (int j = 0; j < PER_PAIR; j++) {
      if constexpr (N != Norm::NONE) squares += x[j] * x[j];
      if constexpr (N == Norm::LAYER) sum += x[j];
      if constexpr (STORE && N == Norm::RMS) x[j] *= w[i][j];
    }
    // Packets past the end read as zeros, so the rest of the last granule becomes zeros.
    if constexpr (STORE && N != Norm::LAYER) {
      if (k0 + i * STEP < round_up(K, PAD)) {
#pragma unroll
        for (int j = 0; j < PER_PAIR; j += 2) {
          u8* const at = to + i * STEP * STAGE_ELEM<M> + j * 4;
          if (j % 4 == 0)
            stage_store<M>(at, shifted<SHIFT>(x[j]), shifted<SHIFT>(x[j + 1]));
          else
            stage_store<M>(at, shifted<SHIFT - SECOND>(x[j]), shifted<SHIFT - SECOND>(x[j + 1]));
        }
      }
    }
  }
  return squares;
}

// LayerNorm: the mean first, then the variance around it, because a difference of squares would cancel. The block has waited for
// all packets, so they are only read again. Ends with a block barrier.
template <class M, int K, int PAD = 32, int SHIFT = 0, int SECOND = 0>
__device__ __forceinline__ void stage_layer_norm(Context<M>& c, const Entry& e, float eps) {
  constexpr int THREADS = M::WARPS * 32, PER_PACKET = Wire<M>::PER_PACKET;
  const float* weight = c.template constant<float>(e.norm_weight);
  const float* bias = c.template constant<float>(e.norm_bias);
  const u64* packets = c.p.exchange + e.x;
  const float mean = block_sum(c, 0) / K;
  float around = 0.f;
  for (int k = c.tid() * PER_PACKET; k < K; k += THREADS * PER_PACKET) {
    const u32 payload = reread(packets + k / PER_PACKET);
    const float a = Wire<M>::lo(payload) - mean, b = PER_PACKET == 2 && k + 1 < K ? Wire<M>::hi(payload) - mean : 0.f;
    around += a * a + b * b;
  }
  put_statistic(c, 1, around);
  c.barrier();
  const float factor = rsqrtf(block_sum(c, 1) / K + eps);
  for (int k = c.tid() * 2; k < round_up(K, PAD); k += THREADS * 2) {
    float x[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      x[j] = 0.f;
      if (k + j < K) {
        const u32 payload = reread(packets + (k + j) / PER_PACKET);
        const float v = PER_PACKET == 2 && j == 1 ? Wire<M>::hi(payload) : Wire<M>::lo(payload);
        x[j] = (v - mean) * factor * weight[k + j] + (e.norm_bias != ~0u ? bias[k + j] : 0.f);
      }
    }
    if (SECOND != 0 && k / 2 % 2 != 0)
      stage_store<M>(staged_at(c, k), shifted<SHIFT - SECOND>(x[0]), shifted<SHIFT - SECOND>(x[1]));
    else
      stage_store<M>(staged_at(c, k), shifted<SHIFT>(x[0]), shifted<SHIFT>(x[1]));
  }
  c.barrier();
}

// All threads read all K values from packet `e.x` on, for the statistics. With STORE, and for LayerNorm, the values are staged, too.
// Ends with a block barrier.
template <class M, int K, Norm N, bool STORE, int PAD = 32, int SHIFT = 0, int SECOND = 0>
__device__ __forceinline__ void stage_block(Context<M>& c, const Entry& e, float eps) {
  constexpr int THREADS = M::WARPS * 32, PER_PAIR = 2 * Wire<M>::PER_PACKET;
  constexpr int PASSES = ceil_div(K, THREADS * PER_PAIR), COUNT = PASSES < STAGE_PAIRS_MAX ? PASSES : STAGE_PAIRS_MAX;
  float sum = 0.f, squares = 0.f;
#pragma unroll 1
  for (int g = 0; g < PASSES; g += COUNT)
    squares += stage_pairs<M, K, N, STORE, COUNT, THREADS * PER_PAIR, false, PAD, SHIFT, SECOND>(c, e, (g * THREADS + c.tid()) * PER_PAIR, sum);
  if constexpr (N != Norm::NONE) put_statistic(c, 0, N == Norm::LAYER ? sum : squares);
  c.barrier();
  if constexpr (N == Norm::LAYER) stage_layer_norm<M, K, PAD, SHIFT, SECOND>(c, e, eps);
}
