// matvec: y = W norm(x) + bias, then the epilogue.
//
// x (K)          packets, staged in shared memory as bf16 (tensor cores) or fp32
// W              units of 8 rows, streamed: per unit J granules of 512 bytes, a granule is 8 rows x 64 bytes of k
// out            STORE, ACT: 8 columns a unit; GATED: 4 columns a unit from 4 gate and 4 up rows
//                RESIDUAL: the fp32 sum stays in the block, its rounded copy travels; LOGITS: best (value, row)
//
// Warp groups take chunks in turn; within a chunk the warps of a group take granules in turn (split k). A lane of a warp
// loads 16 bytes of row lane / 4 at k = (lane % 4) * 16 bytes: as the B operand of two m16n8k16 products that is a
// permutation of k, and the A operand reads the staged x at the same places, so no data is rearranged. Partial sums of a
// unit from all warps meet in shared memory, M::REDUCE_UNITS units at a time; a warp adds up one unit.
#pragma once

enum class Epilogue : u32 { STORE, ACT, GATED, RESIDUAL, LOGITS };

template <class M, class G>
struct MatVec {
  static constexpr int ELEM = ElemOf<M::WEIGHT>::BYTES;
  static constexpr int GRANULE_K = 64 / ELEM;
  static constexpr int PER_CHUNK = M::SLOT_BYTES / 512;    // granules of a chunk
  static constexpr int GROUP_WARPS = M::WARPS / M::GROUPS;
  static constexpr int PER_WARP = PER_CHUNK / GROUP_WARPS; // granules of a chunk for each warp of its group

  struct Sums {
    float d0, d1, e0, e1;
  };

  // One granule of W against the staged x at granule j of k.
  static __device__ __forceinline__ void granule(const Context<M>& c, const u8* w, int j, Sums& s) {
    uint4 b = *reinterpret_cast<const uint4*>(w + c.lane() * 16);
    if constexpr (STAGE_BF16<M>) {
      uint4 a = make_uint4(0, 0, 0, 0);
      if (c.lane() < 4) a = *reinterpret_cast<const uint4*>(c.stage() + j * 64 + c.lane() * 16);
      mma_rows8(s.d0, s.d1, a.x, a.y, b.x, b.y);
      mma_rows8(s.e0, s.e1, a.z, a.w, b.z, b.w);
    } else {
      const float* x = reinterpret_cast<const float*>(c.stage()) + j * GRANULE_K + (c.lane() % 4) * (16 / ELEM);
      if constexpr (ELEM == 4) {
        float4 v = *reinterpret_cast<const float4*>(x);
        s.d0 += v.x * __uint_as_float(b.x);
        s.d1 += v.y * __uint_as_float(b.y);
        s.e0 += v.z * __uint_as_float(b.z);
        s.e1 += v.w * __uint_as_float(b.w);
      } else {
        float4 v = *reinterpret_cast<const float4*>(x), u = *reinterpret_cast<const float4*>(x + 4);
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
    const float factor = stage_input<M, true>(c, e);
    c.stamp(1);
    const int group = c.warp() / GROUP_WARPS, member = c.warp() % GROUP_WARPS;
    auto at = ring_cursor<M>(c.chunk + group);
    float best = NEGATIVE_INFINITY;
    int best_row = 0x7fffffff;
    const int units = int(e.hi - e.lo), J = int(e.unit_granules), total = units * J;
    // Every unit a whole number of chunks for each group: no chunk is shared by two units.
    const bool regular = J % (PER_CHUNK * M::GROUPS) == 0;
    int held = -1; // chunk of this task that this warp holds
    const u8* slot = nullptr;
#pragma unroll 1
    for (int u0 = 0; u0 < units; u0 += M::REDUCE_UNITS) {
      const int n = min(M::REDUCE_UNITS, units - u0);
      float* partial = c.reduce() + c.batch * (M::REDUCE_UNITS * M::WARPS * 8);
#pragma unroll 1
      for (int u = 0; u < n; u++) {
        Sums s{0.f, 0.f, 0.f, 0.f};
        if (regular) {
#pragma unroll 1
          for (int j = group * PER_CHUNK + member; j < J; j += PER_CHUNK * M::GROUPS) {
            slot = ring_take(c, e, at) + member * 512;
#pragma unroll
            for (int i = 0; i < PER_WARP; i++) granule(c, slot + i * (GROUP_WARPS * 512), j + i * GROUP_WARPS, s);
            ring_release(c, at);
            at.advance(M::GROUPS);
          }
        } else {
          const int g0 = (u0 + u) * J, g1 = g0 + J;
#pragma unroll 1
          for (int chunk = g0 / PER_CHUNK; chunk * PER_CHUNK < g1; chunk++) {
            if (chunk % M::GROUPS != group) continue;
            if (chunk != held) {
              slot = ring_take(c, e, at);
              held = chunk;
            }
            const int from = max(g0, chunk * PER_CHUNK), to = min(g1, (chunk + 1) * PER_CHUNK);
            // Granules of the chunk belong to the warps of the group in turn.
            int g = from + (member + PER_CHUNK - (from - chunk * PER_CHUNK)) % GROUP_WARPS;
#pragma unroll 1
            for (; g < to; g += GROUP_WARPS) granule(c, slot + (g - chunk * PER_CHUNK) * 512, g - g0, s);
            if (to == (chunk + 1) * PER_CHUNK || to == total) {
              ring_release(c, at);
              at.advance(M::GROUPS);
            }
          }
        }
        put_partial(c, partial + (u * M::WARPS + c.warp()) * 8, s);
      }
      c.barrier();
      c.stamp(2);
#pragma unroll 1
      for (int u = c.warp(); u < n; u += M::WARPS) {
        // Lane 4r + t adds the sums of warps t, t + 4, ... of row r; then the four lanes of a row agree.
        const int r = c.lane() / 4;
        float y = 0.f;
#pragma unroll
        for (int w = 0; w < M::WARPS; w += 4)
          if (w + c.lane() % 4 < M::WARPS) y += partial[(u * M::WARPS + w + c.lane() % 4) * 8 + r];
        y += __shfl_xor_sync(~0u, y, 1);
        y += __shfl_xor_sync(~0u, y, 2);
        y *= factor;
        const int unit = int(e.lo) + u0 + u;
        if (M::BIASES && (e.flags & FLAG_BIAS)) y += __ldg(c.template constant<float>(e.bias) + unit * 8 + r);
        epilogue(c, e, u0 + u, unit, r, y, best, best_row);
      }
      c.batch ^= 1;
    }
    c.chunk += e.chunks;
    if (Epilogue(e.epilogue) == Epilogue::LOGITS) publish_best(c, e, best, best_row);
  }

  // Four lanes hold y of row r (0..7) of the unit; the first of them acts.
  static __device__ __forceinline__ void epilogue(Context<M>& c, const Entry& e, int local, int unit, int r, float y,
                                                  float& best, int& best_row) {
    const bool mine = c.lane() % 4 == 0;
    const Epilogue kind = Epilogue(e.epilogue);
    const int rows = int(e.rows);
    const float scale = __uint_as_float(e.scale);
    if (kind == Epilogue::LOGITS) {
      const int row = unit * 8 + r;
      if (mine && row < rows) {
        y = softcap(y * scale, __uint_as_float(e.cap));
        if (c.p.logits) c.p.logits[u64(c.tag - c.p.tag) * rows + row] = y;
        argmax_take(best, best_row, y, row);
      }
      return;
    }
    int col = unit * 8 + r, cols = rows;
    bool first = (r & 1) == 0;
    if (kind == Epilogue::GATED) {
      // Rows 0..3 are gate, rows 4..7 up: 16 lanes further.
      const float up = __shfl_down_sync(~0u, y, 16);
      y = activate<M::ACTS>(Act(e.act), y) * up;
      col = unit * 4 + r;
      cols = rows / 2;
      first = first && r < 4;
    } else if (kind == Epilogue::ACT) {
      y = activate<M::ACTS>(Act(e.act), y);
    } else if (kind == Epilogue::RESIDUAL) {
      float* own = c.residual() + e.residual + local * 8 + r;
      y = *own + scale * y;
      __syncwarp();
      if (mine) *own = y;
    }
    const float next = __shfl_down_sync(~0u, y, 4);
    if ((e.flags & FLAG_PUBLISH) && mine && first && col < cols) publish_columns(c, e.out, col, cols, y, next);
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
