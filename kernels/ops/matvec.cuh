// matvec: y = W norm(x) + bias, then the epilogue.
//
// x (K)          packets, staged in shared memory as bf16 (tensor cores) or fp32
// W              units of 8 rows, streamed: per unit J granules of 512 bytes, a granule is 8 rows x 64 bytes of k
// out            STORE, ACT: 8 columns a unit; GATED: 4 columns a unit from 4 gate and 4 up rows
//                RESIDUAL: the fp32 sum stays in the block, its rounded copy travels; LOGITS: best (value, row)
//
// Warps take the granules of a unit in turn (split k): warp w always reads the slices of k whose granule is w modulo WARPS,
// so it stages them itself and waits for nobody else's packets. A lane of a warp loads 16 bytes of row lane / 4 at
// k = (lane % 4) * 16 bytes: as the B operand of two m16n8k16 products that is a permutation of k, and the A operand reads
// the staged x at the same places, so no data is rearranged. Partial sums of a unit from all warps meet in shared memory,
// M::REDUCE_UNITS units at a time; a warp adds up one unit.
//
// Serial instructions between two hops are what a step is made of (about 0.4 us a hundred on sm_90), so everything that can
// be is a constant.
#pragma once

enum class Epilogue : u32 { STORE, ACT, GATED, RESIDUAL, LOGITS };

template <class M, class G>
struct MatVec {
  static constexpr int ELEM = ElemOf<M::WEIGHT>::BYTES;
  static constexpr int GRANULE_K = 64 / ELEM;
  static constexpr int J = ceil_div(G::K, GRANULE_K);      // granules of a unit
  static constexpr int PER_CHUNK = M::SLOT_BYTES / 512;    // granules of a chunk
  // No chunk is shared by two units, and every warp has as many granules of each.
  static constexpr bool REGULAR = J % PER_CHUNK == 0;
  static constexpr int PER_WARP = PER_CHUNK / M::WARPS;    // granules of a chunk for each warp

  // Pairs of packets of this warp's granules, for each lane.
  static constexpr int PAIR_K = 2 * Wire<M>::PER_PACKET, GRANULE_PAIRS = GRANULE_K / PAIR_K;
  static constexpr int PAIRS = ceil_div(ceil_div(J, M::WARPS) * GRANULE_PAIRS, 32);
  static_assert(32 % GRANULE_PAIRS == 0, "lanes of a turn take whole granules");
  // Elements between two pairs of a lane.
  static constexpr int PAIR_STEP = 32 / GRANULE_PAIRS * M::WARPS * GRANULE_K;

  struct Sums {
    float d0, d1, e0, e1;
  };

  // One granule of W against the staged x at granule j of k. With tensor cores all 8 rows of A are the same token: lanes
  // of other rows load what lane % 4 loads, which costs nothing, and their sums are not read.
  static __device__ __forceinline__ void granule(const Context<M>& c, const u8* w, int j, Sums& s) {
    const uint4 b = *reinterpret_cast<const uint4*>(w + c.lane() * 16);
    if constexpr (STAGE_BF16<M>) {
      const uint4 a = *reinterpret_cast<const uint4*>(c.stage() + j * 64 + (c.lane() % 4) * 16);
      mma_rows8(s.d0, s.d1, a.x, a.y, b.x, b.y);
      mma_rows8(s.e0, s.e1, a.z, a.w, b.z, b.w);
    } else {
      const float* x = reinterpret_cast<const float*>(c.stage()) + j * GRANULE_K + (c.lane() % 4) * (16 / ELEM);
      if constexpr (ELEM == 4) {
        const float4 v = *reinterpret_cast<const float4*>(x);
        s.d0 += v.x * __uint_as_float(b.x);
        s.d1 += v.y * __uint_as_float(b.y);
        s.e0 += v.z * __uint_as_float(b.z);
        s.e1 += v.w * __uint_as_float(b.w);
      } else {
        const float4 v = *reinterpret_cast<const float4*>(x), u = *reinterpret_cast<const float4*>(x + 4);
        s.d0 += v.x * bf16_lo(b.x) + u.x * bf16_lo(b.z);
        s.d1 += v.y * bf16_hi(b.x) + u.y * bf16_hi(b.z);
        s.e0 += v.z * bf16_lo(b.y) + u.z * bf16_lo(b.w);
        s.e1 += v.w * bf16_hi(b.y) + u.w * bf16_hi(b.w);
      }
    }
  }

  // A warp's partial sums of the 8 rows of a unit.
  static __device__ __forceinline__ void put_partial(const Context<M>& c, float* to, Sums s) {
    if constexpr (STAGE_BF16<M>) {
      // Lane t of row 0 of the product holds rows 2t and 2t + 1 of the unit.
      if (c.lane() < 4) *reinterpret_cast<float2*>(to + c.lane() * 2) = make_float2(s.d0 + s.e0, s.d1 + s.e1);
    } else {
      float v = (s.d0 + s.d1) + (s.e0 + s.e1);
      v += __shfl_xor_sync(~0u, v, 1);
      v += __shfl_xor_sync(~0u, v, 2);
      if (c.lane() % 4 == 0) to[c.lane() / 4] = v;
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    if constexpr (G::NORM == Norm::LAYER) {
      // The mean has to be known before anything is staged.
      stage_block<M, G::K, G::NORM, true>(c, e, G::EPS);
    } else {
      constexpr int COUNT = PAIRS < 4 ? PAIRS : 4;
      const int first = c.lane() / GRANULE_PAIRS * M::WARPS + c.warp();
      const int k0 = first * GRANULE_K + c.lane() % GRANULE_PAIRS * PAIR_K;
      float squares = 0.f, unused = 0.f;
#pragma unroll 1
      for (int q = 0; q < PAIRS; q += COUNT)
        squares += stage_pairs<M, G::K, G::NORM, true, COUNT>(c, e, k0 + q * PAIR_STEP, PAIR_STEP, unused);
      if constexpr (G::NORM != Norm::NONE) put_statistic(c, 0, squares);
      __syncwarp();
    }
    c.stamp(1);
    float best = NEGATIVE_INFINITY, factor = 1.f;
    int best_row = 0x7fffffff;
    const int units = int(e.hi - e.lo);
    auto at = ring_cursor<M>(c.chunk);
    int held = -1; // chunk of this task that this warp holds, if chunks are shared by units
    const u8* slot = nullptr;
#pragma unroll 1
    for (int u0 = 0; u0 < units; u0 += M::REDUCE_UNITS) {
      const int n = min(M::REDUCE_UNITS, units - u0);
      float* partial = c.reduce() + c.batch * (M::REDUCE_UNITS * M::WARPS * 8);
#pragma unroll 1
      for (int u = 0; u < n; u++) {
        // Two sets of sums: products wait for the sum they add to.
        Sums s{0.f, 0.f, 0.f, 0.f}, s1{0.f, 0.f, 0.f, 0.f};
        if constexpr (REGULAR) {
#pragma unroll 1
          for (int j = c.warp(); j < J; j += PER_CHUNK) {
            slot = ring_take(c, e, at) + c.warp() * 512;
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) granule(c, slot + i * (M::WARPS * 512), j + i * M::WARPS, i & 1 ? s1 : s);
            ring_release(c, at);
            at.advance(1);
          }
        } else {
          const int g0 = (u0 + u) * J;
#pragma unroll
          for (int i = 0; i < ceil_div(J, M::WARPS); i++) {
            const int j = i * M::WARPS + c.warp();
            // Every warp passes through every chunk, also where it has nothing to read there: a slot is free when all have.
            const int chunk = (g0 + min(j, J - 1)) / PER_CHUNK;
            while (held < chunk) {
              if (held >= 0) {
                ring_release(c, at);
                at.advance(1);
              }
              slot = ring_take(c, e, at);
              held++;
            }
            if (J % M::WARPS == 0 || j < J) granule(c, slot + (g0 + j - chunk * PER_CHUNK) * 512, j, i & 1 ? s1 : s);
          }
        }
        s.d0 += s1.d0, s.d1 += s1.d1, s.e0 += s1.e0, s.e1 += s1.e1;
        put_partial(c, partial + (u * M::WARPS + c.warp()) * 8, s);
      }
      c.barrier();
      c.stamp(2);
      if constexpr (G::NORM == Norm::RMS)
        if (u0 == 0 && c.warp() < n) factor = rms_factor<M, G::K>(c, G::EPS);
#pragma unroll 1
      for (int u = c.warp(); u < n; u += M::WARPS) {
        // Lane 4r + t adds the sums of warps t, t + 4, ... of row r; then the four lanes of a row agree.
        const int r = c.lane() / 4;
        float y = 0.f;
#pragma unroll
        for (int w = 0; w < M::WARPS; w += 4)
          if (M::WARPS % 4 == 0 || w + c.lane() % 4 < M::WARPS) y += partial[(u * M::WARPS + w + c.lane() % 4) * 8 + r];
        y += __shfl_xor_sync(~0u, y, 1);
        y += __shfl_xor_sync(~0u, y, 2);
        if constexpr (G::NORM == Norm::RMS) y *= factor;
        const int unit = int(e.lo) + u0 + u;
        if constexpr (G::BIAS) y += __ldg(c.template constant<float>(e.bias) + unit * 8 + r);
        epilogue(c, e, u0 + u, unit, r, y, best, best_row);
      }
      c.batch ^= 1;
    }
    if constexpr (!REGULAR)
      for (; held < int(e.chunks); held++) {
        // The last chunk, and those in which this warp had no granule.
        if (held >= 0) {
          ring_release(c, at);
          at.advance(1);
        }
        if (held + 1 < int(e.chunks)) ring_take(c, e, at);
      }
    c.chunk += e.chunks;
    if constexpr (G::EPILOGUE == Epilogue::LOGITS) publish_best(c, e, best, best_row);
  }

  // Four lanes hold y of row r (0..7) of the unit; the first of them acts.
  static __device__ __forceinline__ void epilogue(Context<M>& c, const Entry& e, int local, int unit, int r, float y,
                                                  float& best, int& best_row) {
    const bool mine = c.lane() % 4 == 0;
    if constexpr (G::EPILOGUE == Epilogue::GATED) {
      // Rows 0..3 are gate, rows 4..7 up: 16 lanes further.
      const float up = __shfl_down_sync(~0u, y, 16);
      const float v = activate<G::ACT>(y) * up;
      const float next = __shfl_down_sync(~0u, v, 4);
      const int col = unit * 4 + r;
      if (mine && r < 4 && (r & 1) == 0 && col < G::ROWS / 2) publish_columns<G::ROWS / 2>(c, e.out, col, v, next);
    } else if constexpr (G::EPILOGUE == Epilogue::LOGITS) {
      const int row = unit * 8 + r;
      if (mine && row < G::ROWS) {
        y = softcap(y * G::SCALE, G::SOFTCAP);
        if (c.p.logits) c.p.logits[u64(c.tag - c.p.tag) * G::ROWS + row] = y;
        argmax_take(best, best_row, y, row);
      }
    } else {
      const int row = unit * 8 + r;
      if constexpr (G::EPILOGUE == Epilogue::ACT) y = activate<G::ACT>(y);
      if constexpr (G::EPILOGUE == Epilogue::RESIDUAL) {
        float* own = c.residual() + e.residual + local * 8 + r;
        y = *own + G::SCALE * y;
        __syncwarp();
        if (mine) *own = y;
      }
      if constexpr (G::PUBLISH) {
        const float next = __shfl_down_sync(~0u, y, 4);
        if (mine && (r & 1) == 0 && row < G::ROWS) publish_columns<G::ROWS>(c, e.out, row, y, next);
      }
    }
  }

  static __device__ __forceinline__ void publish_best(Context<M>& c, const Entry& e, float best, int best_row) {
    warp_argmax(best, best_row);
    if (c.lane() == 0) {
      c.state().best[c.warp()] = best;
      c.state().best_index[c.warp()] = best_row;
    }
    c.barrier();
    if (c.warp() == 0) {
      best = c.lane() < M::WARPS ? c.state().best[c.lane()] : NEGATIVE_INFINITY;
      best_row = c.lane() < M::WARPS ? c.state().best_index[c.lane()] : 0x7fffffff;
      warp_argmax(best, best_row);
      if (c.lane() == 0) {
        u64* to = c.p.exchange + e.aux + (c.tag & 1) * round_up(2 * G::PARTS, 2) + 2 * e.j;
        release_step();
        publish(to, __float_as_uint(best), c.tag);
        publish(to + 1, u32(best_row), c.tag);
      }
    }
  }
};
