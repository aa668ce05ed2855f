// matvec: y = W norm(x) + bias, then the epilogue.
//
// x (K)          packets, or, OWN_INPUT, the residual; staged in shared memory as bf16 (tensor cores) or fp32
// W              codes and scales as matvec_formats.cuh has them, or plain weights:
//                units of 8 rows, streamed: per unit UNIT_GRANULES granules of 512 bytes, a granule is 8 rows x 64 bytes of k;
//                units of 4 or 2 rows: a granule is 2 or 4 parts of k, each 64 bytes of every row, part by part
// choice         of a chosen part: its number, a packet; where its scales and biases lie depends on it
// aux            WEIGHED: the share of its slot, an fp32 packet, which multiplies the result
// out            STORE, ACT: a column for each row; GATED, CLAMPED: 4 columns for each unit, from 4 gate and 4 up rows; SCORES: fp32
//                RESIDUAL: the fp32 sum stays in the block, its rounded copy travels; LOGITS: best (value, row)
//
// owner    of a unit: one task. Its rows are added up by the warp whose number is the unit's within its batch, modulo WARPS
// moves    UNIT_GRANULES granules (GRANULE_BYTES each, and the scales of codes) of the stream for each unit; all K values of x into every block
// assumes  a chunk is whole units, or a unit is whole chunks; rows past ROWS and k past K are zeros in the pack
//
// Warps take the granules of a unit in turn (split k): warp w always reads the slices of k whose granule is w modulo WARPS,
// so it stages them itself and waits for no other packets. A lane of a warp loads 16 bytes of row lane / 4 at
// k = (lane % 4) * 16 bytes. As the B operand of two m16n8k16 products these bytes are a permutation of k; the A operand reads
// the staged x at the same places, so no data is rearranged. If a unit has parts, row p of A is x for part p. The warps' partial
// sums meet in shared memory, M::REDUCE_BATCH units at a time; four lanes of a warp add up one unit, two rows each. With codes a
// warp adds up eight units at once.
//
// Which granules a warp reads, and where, is therefore known at compile time.
//
// Between two hops a step is serial instructions. So everything that can be a constant is one, warps do not diverge, and work
// that does not depend on x (loading the first weights) comes before the wait for x.
#pragma once

enum class Epilogue : u32 { STORE, ACT, GATED, RESIDUAL, LOGITS, SCORES, CLAMPED };

// Parts of a matrix among which a step chooses: experts. 0: there is one matrix.
template <class G>
__device__ constexpr int parts_of(decltype(G::EXPERTS)*) {
  return G::EXPERTS;
}
template <class G>
__device__ constexpr int parts_of(...) {
  return 0;
}
// Units of a part, and whether the input is there before the choice.
template <class G, bool = (parts_of<G>(nullptr) > 0)>
struct Part {
  static constexpr u32 UNITS = 0;
  static constexpr bool INPUT_FIRST = false;
};
template <class G>
struct Part<G, true> {
  static constexpr u32 UNITS = G::PART_UNITS;
  static constexpr bool INPUT_FIRST = G::INPUT_FIRST;
};
// Whether the result is multiplied with the share of a slot.
template <class G>
__device__ constexpr bool is_weighed(decltype(G::WEIGHED)*) {
  return G::WEIGHED;
}
template <class G>
__device__ constexpr bool is_weighed(...) {
  return false;
}
// The formula of `ClampedSwiglu` of the model graph.
template <class G>
__device__ __forceinline__ float clamped(float gate, float up) {
  gate = fminf(gate, G::LIMIT);
  up = fminf(fmaxf(up, -G::LIMIT), G::LIMIT);
  return (up + 1.f) * __fdividef(gate, 1.f + exp_fast(-G::ALPHA * gate));
}

template <class M, class G>
struct MatVec {
  typedef Coding<M, G> Weights;
  static constexpr int ELEM = ElemOf<M::WEIGHT>::BYTES;
  // Columns of B are rows of a part of k: K_PARTS parts of UNIT_ROWS rows each.
  static constexpr int K_PARTS = OPERAND_ROWS / G::UNIT_ROWS;
  static constexpr bool GATED = G::EPILOGUE == Epilogue::GATED || G::EPILOGUE == Epilogue::CLAMPED;
  static constexpr bool CHOSEN = parts_of<G>(nullptr) > 0;
  static constexpr u32 PART_UNITS = Part<G>::UNITS;
  static constexpr bool WEIGHED = is_weighed<G>(nullptr);
  // The first weights are loaded before the wait for x, unless x is there before it is known which weights they are.
  static constexpr bool INPUT_FIRST = Part<G>::INPUT_FIRST;
  static_assert(K_PARTS == 1 || ((G::EPILOGUE == Epilogue::STORE || G::EPILOGUE == Epilogue::ACT || G::EPILOGUE == Epilogue::SCORES) && G::K % (PART_BYTES * 8 / Weights::BITS * K_PARTS) == 0),
                "units of fewer rows are columns of the output, of whole granules");
  static constexpr int PART_K = PART_BYTES * 8 / Weights::BITS, GRANULE_K = K_PARTS * PART_K;
  static constexpr int UNIT_GRANULES = ceil_div(G::K, GRANULE_K);  // granules of a unit
  static constexpr int CHUNK = G::CHUNK;               // granules of a chunk
  static constexpr int CHUNK_UNITS = CHUNK >= UNIT_GRANULES ? CHUNK / UNIT_GRANULES : 1;     // units of a chunk
  static constexpr int CHUNKS = CHUNK >= UNIT_GRANULES ? 1 : ceil_div(UNIT_GRANULES, CHUNK); // chunks of a unit
  static_assert(CHUNKS == 1 ? CHUNK % UNIT_GRANULES == 0 : CHUNK % M::WARPS == 0, "chunks as codegen/emit.rs lays them out");
  // Granules of a chunk that one warp reads for one unit.
  static constexpr int WARP_GRANULES = ceil_div(CHUNKS == 1 ? UNIT_GRANULES : CHUNK, M::WARPS);
  // Units whose weights a warp holds at once: all of a short task, so that it loads nothing between its input and its sums.
  static constexpr int UNITS_PER_WARP = G::UNITS_PER_WARP;
  static_assert(UNITS_PER_WARP == 1 || (CHUNKS == 1 && (G::UNITS <= M::REDUCE_BATCH || M::REDUCE_BATCH % UNITS_PER_WARP == 0)),
                "no group reaches over the end of a batch of sums");
  static constexpr bool SINGLE_PASS = CHUNKS == 1 && G::UNITS <= UNITS_PER_WARP;
  // Operands of codes are made before the input is there, if a warp takes all its units at once and has registers for them.
  static constexpr int AHEAD_WORDS = UNITS_PER_WARP * WARP_GRANULES * Weights::OPERAND_WORDS;
  static constexpr bool AHEAD = SINGLE_PASS && AHEAD_WORDS > 0 && AHEAD_WORDS <= Weights::AHEAD_MAX;
  typedef typename Weights::template Held<AHEAD> Held; // of a granule, by a lane

  // Pairs of packets of this warp's granules, for each lane.
  static constexpr int PAIR_K = 2 * Wire<M>::PER_PACKET, GRANULE_PAIRS = GRANULE_K / PAIR_K;
  static constexpr int PAIRS = ceil_div(ceil_div(UNIT_GRANULES, M::WARPS) * GRANULE_PAIRS, 32);
  static_assert(32 % GRANULE_PAIRS == 0, "lanes of a turn take whole granules");
  // Elements between two pairs of a lane.
  static constexpr int PAIR_STEP = 32 / GRANULE_PAIRS * M::WARPS * GRANULE_K;

  // A warp's sums of a unit. Two sets of products, because a product waits for the sum that it adds to.
  static constexpr int SETS = STAGE_BF16<M> && WARP_GRANULES > 1 ? 2 : 1;
  struct PlainSums {
    Products products[SETS];
    float lane[4]; // without tensor cores: of row lane / 4, over the k of this lane
    __device__ __forceinline__ PlainSums() : products{}, lane{} {}
  };
  struct CodeSums {
    float products[2][4]; // of codes without groups, on tensor cores
    float lane;           // otherwise: of row lane / 4, over the k of this lane
    float other;          // BOTH: the same of the other half, with the scales of this one: never read where it counts
    __device__ __forceinline__ CodeSums() : products{}, lane(0.f), other(0.f) {}
  };
  typedef typename Either<Weights::CODED, CodeSums, PlainSums>::type Sums;
  static constexpr bool BOTH = Weights::BOTH;

  // This lane's part of granule j of the staged x, as an operand. All rows of A are the same token, so rows of the same part are
  // equal: loading them again costs nothing, and their sums are not read.
  static __device__ __forceinline__ uint4 staged(const Context<M>& c, int j) {
    return *reinterpret_cast<const uint4*>(c.stage() + (j * K_PARTS + c.lane() / 4 % K_PARTS) * PART_BYTES + (c.lane() % 4) * LANE_BYTES);
  }
  // One granule of W against granule j of x, without tensor cores.
  static __device__ __forceinline__ void accumulate(const Context<M>& c, const uint4 b, int j, Sums& s) {
    const float* x = reinterpret_cast<const float*>(c.stage()) + j * GRANULE_K + c.lane() / 4 / G::UNIT_ROWS * PART_K +
                     (c.lane() % 4) * (LANE_BYTES / ELEM);
    const float4 v = *reinterpret_cast<const float4*>(x);
    if constexpr (ELEM == 4) {
      s.lane[0] += v.x * __uint_as_float(b.x);
      s.lane[1] += v.y * __uint_as_float(b.y);
      s.lane[2] += v.z * __uint_as_float(b.z);
      s.lane[3] += v.w * __uint_as_float(b.w);
    } else {
      const float4 u = *reinterpret_cast<const float4*>(x + 4);
      s.lane[0] += v.x * bf16_lo(b.x) + u.x * bf16_lo(b.z);
      s.lane[1] += v.y * bf16_hi(b.x) + u.y * bf16_hi(b.z);
      s.lane[2] += v.z * bf16_lo(b.y) + u.z * bf16_lo(b.w);
      s.lane[3] += v.w * bf16_hi(b.y) + u.w * bf16_hi(b.w);
    }
  }

  // What is subtracted from the sums of codes without groups, and the power of two that all sums are multiplied by.
  struct Input {
    float taken = 0.f, factor = 1.f;
  };

  // Block h of a lane's half of granule j of the staged x: the two pairs that the first product meets, then those of the second.
  static __device__ __forceinline__ uint4 staged_half(const Context<M>& c, int j, int h) {
    const int block = j * Weights::BLOCKS + c.lane() / 16 * Weights::HALF_BLOCKS + h;
    return *reinterpret_cast<const uint4*>(c.stage() + block * PART_BYTES + (c.lane() % 4) * LANE_BYTES);
  }
  // The products of block h of both halves of a granule.
  static __device__ __forceinline__ void product(float (&first)[4], float (&second)[4], const Held& b, int h, const uint4 x) {
    const uint4 lo = b.operand(h), hi = b.operand(Weights::HALF_BLOCKS + h);
    mma<Weights::F16>(first, make_uint4(lo.x, hi.x, lo.y, hi.y), x.x, x.y);
    mma<Weights::F16>(second, make_uint4(lo.z, hi.z, lo.w, hi.w), x.z, x.w);
  }
  // This lane's sum of its row in a product, over its half of k.
  static __device__ __forceinline__ float half_of(const Context<M>& c, const float (&d)[4]) { return c.lane() % 4 < 2 ? d[0] : d[2]; }
  // Adds the sums of x over the blocks of granule j to `d`: products with codes that are all 1. Column n of B is 16 of k: the pairs of a
  // block that the first product meets, or the second. Lane t of four has columns 2t and 2t + 1: the sums of one block of its half.
  static __device__ __forceinline__ void add_up(const Context<M>& c, float (&d)[4], int j, bool mine) {
    const int n = c.lane() / 4, block = Weights::BLOCKS == 4 ? n / 2 : n / 4;
    const u8* piece = c.stage() + (j * Weights::BLOCKS + block) * PART_BYTES + c.lane() % 4 * LANE_BYTES + n % 2 * (LANE_BYTES / 2);
    const uint2 x = mine ? *reinterpret_cast<const uint2*>(piece) : make_uint2(0, 0);
    const u32 one = 0x00010001u;
    mma<false>(d, make_uint4(one, one, one, one), x.x, x.y);
  }
  static __device__ __forceinline__ float sum_of(const float (&d)[4]) { return d[0] + float(1 << Weights::SECOND_SHIFT) * d[1]; }
  // Sums of x for those groups of granule j that this lane has products of: the groups of its half.
  static __device__ __forceinline__ void group_sums(const Context<M>& c, int j, bool mine, float* sums) {
    float d[4] = {};
    add_up(c, d, j, mine);
    const float own = sum_of(d);
    if constexpr (Weights::LANE_GROUPS == 2) {
      const float other = __shfl_xor_sync(~0u, own, 1);
      sums[0] = c.lane() % 2 == 0 ? own : other;
      sums[1] = c.lane() % 2 == 0 ? other : own;
    } else {
      sums[0] = own;
      if constexpr (Weights::BLOCKS == 4) sums[0] += __shfl_xor_sync(~0u, sums[0], 1);
    }
  }

  // Multiplies the codes of UNITS_PER_WARP units with granule j of x, and the sums of groups, if there are any, with their scales.
  static __device__ __forceinline__ void multiply_codes(const Context<M>& c, const Held (&b)[UNITS_PER_WARP][WARP_GRANULES], int i, int j,
                                                        bool mine, Sums (&s)[UNITS_PER_WARP]) {
    constexpr int LANE_GROUPS = Weights::LANE_GROUPS;
    if constexpr (Weights::TENSOR) {
      constexpr int BLOCKS = Weights::HALF_BLOCKS / LANE_GROUPS;
      uint4 x[Weights::HALF_BLOCKS];
#pragma unroll
      for (int h = 0; h < Weights::HALF_BLOCKS; h++) {
        // A lane that takes one group finds the sums of that group alone in its column: other blocks meet zeros there.
        const bool meets = mine && (!Weights::OWN_GROUP || c.lane() / 8 % 2 == h);
        x[h] = meets ? staged_half(c, j, h) : make_uint4(0, 0, 0, 0);
      }
      if constexpr (!Weights::GROUPED) {
#pragma unroll
        for (int u = 0; u < UNITS_PER_WARP; u++)
#pragma unroll
          for (int h = 0; h < Weights::HALF_BLOCKS; h++) product(s[u].products[0], s[u].products[1], b[u][i], h, x[h]);
      } else if constexpr (Weights::OWN_GROUP) {
        float d[4] = {};
        add_up(c, d, j, mine);
        const float own = sum_of(d);
#pragma unroll
        for (int u = 0; u < UNITS_PER_WARP; u++) {
          float y[4] = {};
          product(y, y, b[u][i], 0, x[0]), product(y, y, b[u][i], 1, x[1]);
          s[u].lane += Weights::scale(b[u][i], 0) * half_of(c, y);
          s[u].lane += Weights::minimum(b[u][i], 0) * own;
        }
      } else {
        float sums[LANE_GROUPS];
        if constexpr (Weights::SUMS_X) group_sums(c, j, mine, sums);
#pragma unroll
        for (int g = 0; g < LANE_GROUPS; g++) {
#pragma unroll
          for (int u = 0; u < UNITS_PER_WARP; u++) {
            float d[4] = {};
#pragma unroll
            for (int h = 0; h < BLOCKS; h++) product(d, d, b[u][i], g * BLOCKS + h, x[g * BLOCKS + h]);
            if constexpr (BOTH) {
              const float scale = Weights::scale(b[u][i], g);
              s[u].lane += scale * d[0], s[u].other += scale * d[2];
              continue;
            }
            float y = half_of(c, d);
            if constexpr (Weights::SUMS_X) y -= Weights::offset(b[u][i], g) * sums[g];
            s[u].lane += Weights::scale(b[u][i], g) * y;
            if constexpr (Weights::MINIMA) s[u].lane += Weights::minimum(b[u][i], g) * sums[g];
          }
        }
      }
    } else if (mine) {
#pragma unroll
      for (int g = 0; g < LANE_GROUPS; g++) {
        float own[UNITS_PER_WARP] = {}, sum_x = 0.f;
#pragma unroll
        for (int h = g * Weights::GROUP_BLOCKS; h < (g + 1) * Weights::GROUP_BLOCKS; h++) {
          const float* x = reinterpret_cast<const float*>(c.stage()) + j * GRANULE_K + h * 32 + (c.lane() % 4) * 8;
#pragma unroll
          for (int k = 0; k < 8; k++) {
            if constexpr (Weights::SUMS_X) sum_x += x[k];
#pragma unroll
            for (int u = 0; u < UNITS_PER_WARP; u++) own[u] += x[k] * Weights::Codes::value(b[u][i].codes[0], h, k);
          }
        }
#pragma unroll
        for (int u = 0; u < UNITS_PER_WARP; u++) {
          if constexpr (Weights::GROUPED) {
            if constexpr (Weights::SUMS_X) own[u] -= Weights::offset(b[u][i], g) * sum_x;
            own[u] *= Weights::scale(b[u][i], g);
            if constexpr (Weights::MINIMA) own[u] += Weights::minimum(b[u][i], g) * sum_x;
          }
          s[u].lane += own[u];
        }
      }
    }
  }

  // Where the format needs it: turns the x that this warp staged into fp16, times a power of two of its own, and sums x up.
  static __device__ __forceinline__ Input prepare(const Context<M>& c) {
    Input input;
    if constexpr (Weights::CODED && STAGE_BF16<M>) {
      constexpr int GRANULES = ceil_div(UNIT_GRANULES, M::WARPS); // of this warp
      constexpr int SHIFT = Weights::Codes::OPERAND_SHIFT - Weights::X_SHIFT;
      input.factor = __uint_as_float(u32(127 + SHIFT) << 23);
      if constexpr (Weights::F16) {
        // A granule is eight pieces of 16 bytes: a warp takes four granules at a time.
        constexpr int PIECES = ceil_div(GRANULES, 4);
        uint4 x[PIECES];
        uint4* at[PIECES];
        bool exists[PIECES];
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const int j = (4 * i + c.lane() / 8) * M::WARPS + c.warp();
          at[i] = reinterpret_cast<uint4*>(c.stage() + j * (2 * PART_BYTES) + c.lane() % 8 * LANE_BYTES);
          exists[i] = j < UNIT_GRANULES;
          x[i] = exists[i] ? *at[i] : make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int w = 0; w < 4; w++) {
            const u32 lo = word_of(x[i], w) << 16 & 0x7fffffffu, hi = word_of(x[i], w) & 0x7fff0000u;
            most = most > lo ? most : lo, most = most > hi ? most : hi;
          }
        }
        // Bits of floats of one sign are in the order of their values. The power is 2^12 over that of the largest value, but has an inverse.
        const u32 exponent = 266 - (warp_max(most) >> 23), up = exponent < 253 ? exponent : 253;
        const float power = __uint_as_float(up << 23);
        input.factor *= __uint_as_float((254 - up) << 23);
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
          const auto half = [power](u32 pair) { return f16_pair(bf16_lo(pair) * power, bf16_hi(pair) * power); };
          if (exists[i]) *at[i] = make_uint4(half(x[i].x), half(x[i].y), half(x[i].z), half(x[i].w));
        }
        __syncwarp();
      }
      if constexpr (!Weights::GROUPED && Weights::SUMS_X) {
        static_assert(Weights::BLOCKS == 2, "a lane has the sums of its half");
        float d[2][4] = {};
#pragma unroll
        for (int i = 0; i < GRANULES; i++) {
          const int j = i * M::WARPS + c.warp();
          add_up(c, d[i % 2], j, (i + 1) * M::WARPS <= UNIT_GRANULES || j < UNIT_GRANULES);
        }
        input.taken = Weights::OFFSET * (sum_of(d[0]) + sum_of(d[1]));
      }
    }
    return input;
  }

  // Stores a warp's partial sums of the 8 rows of a unit, or of the rows of each part.
  static __device__ __forceinline__ void put_partial(const Context<M>& c, float* to, const Sums& s, const Input& input) {
    if constexpr (Weights::CODED) {
      float v = BOTH && c.lane() % 4 >= 2 ? s.other : s.lane;
      if constexpr (Weights::TENSOR) {
        if constexpr (!Weights::GROUPED) v = half_of(c, s.products[0]) + half_of(c, s.products[1]) - input.taken;
        v *= input.factor;
      }
      if constexpr (!Weights::TENSOR || Weights::OWN_GROUP) v += __shfl_xor_sync(~0u, v, 1);
      v += __shfl_xor_sync(~0u, v, 2);
      if (c.lane() % 4 == 0) to[c.lane() / 4] = v;
    } else if constexpr (STAGE_BF16<M>) {
      // Lane t of row p of the product has columns 2t and 2t + 1 of B, times part p of x. Both columns belong to one part.
      float2 y = make_float2(s.products[0].sum(0), s.products[0].sum(1));
      if constexpr (SETS == 2) y.x += s.products[1].sum(0), y.y += s.products[1].sum(1);
      if (c.lane() / 4 == c.lane() % 4 * 2 / G::UNIT_ROWS) *reinterpret_cast<float2*>(to + c.lane() % 4 * 2) = y;
    } else {
      float v = (s.lane[0] + s.lane[1]) + (s.lane[2] + s.lane[3]);
      v += __shfl_xor_sync(~0u, v, 1);
      v += __shfl_xor_sync(~0u, v, 2);
      if (c.lane() % 4 == 0) to[c.lane() / 4] = v;
    }
  }

  // Whether this warp has an i-th granule from granule `first` on: a unit's last granules may be fewer than warps. An answer that is
  // known at compile time needs no predicate.
  static __device__ __forceinline__ bool exists(const Context<M>& c, int first, int i) {
    const bool whole = CHUNKS == 1 ? (i + 1) * M::WARPS <= UNIT_GRANULES : UNIT_GRANULES % CHUNK == 0;
    return whole || first + i * M::WARPS + c.warp() < UNIT_GRANULES;
  }

  // This warp's granules of units `first` on; of a unit of several chunks, those from granule `first` on.
  static __device__ __forceinline__ void multiply(const Context<M>& c, const Held (&b)[UNITS_PER_WARP][WARP_GRANULES], int first,
                                                  Sums (&s)[UNITS_PER_WARP]) {
#pragma unroll
    for (int i = 0; i < WARP_GRANULES; i++) {
      const int j = first + i * M::WARPS + c.warp();
      // Multiplying by zeros costs less than a branch that only some warps take. A unit's last chunk of several may lack more than one
      // granule, so there they are skipped.
      const bool mine = exists(c, first, i);
      if (CHUNKS > 1 && !mine) continue;
      if constexpr (Weights::CODED) {
        multiply_codes(c, b, i, j, mine, s);
      } else if constexpr (STAGE_BF16<M>) {
        const uint4 a = mine ? staged(c, j) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < UNITS_PER_WARP; u++) s[u].products[i % SETS].add(a, b[u][i]);
      } else if (mine) {
#pragma unroll
        for (int u = 0; u < UNITS_PER_WARP; u++) accumulate(c, b[u][i], j, s[u]);
      }
    }
  }

  // With codes a warp takes whole chunks, so that their ends are known at compile time. In the slot of a task's last chunk it also reads
  // what follows that chunk: bytes of an earlier one, whose sums are not stored.
  static constexpr bool WHOLE_CHUNKS = Weights::CODED && CHUNKS == 1 && (SINGLE_PASS || UNITS_PER_WARP % CHUNK_UNITS == 0);

  // Reads the chunks of a task. A warp releases a chunk as soon as its part is in registers.
  struct Stream {
    const u8* slot;
    int held; // units of the current chunk that were read
    int left; // units of the task that no read has begun
    // Reads the granules from `first` on of the next UNITS_PER_WARP units, or of as many as are left.
    __device__ __forceinline__ void read(Context<M>& c, int first, Held (&b)[UNITS_PER_WARP][WARP_GRANULES]) {
      if constexpr (WHOLE_CHUNKS)
        read_chunks(c, b);
      else
        read_units(c, first, b);
    }
    __device__ __forceinline__ void read_units(Context<M>& c, int first, Held (&b)[UNITS_PER_WARP][WARP_GRANULES]) {
#pragma unroll
      for (int u = 0; u < UNITS_PER_WARP; u++) {
        if (UNITS_PER_WARP > 1 && left == 0) return;
        if (held == 0) slot = ring_take(c, c.ring);
        const u8* from = slot + held * (UNIT_GRANULES * Weights::BYTES) + c.warp() * Weights::BYTES + c.lane() * LANE_BYTES;
#pragma unroll
        for (int i = 0; i < WARP_GRANULES; i++) {
          const bool mine = exists(c, first, i);
          if (CHUNKS > 1 && !mine) continue;
          b[u][i] = mine ? Weights::template read<AHEAD>(from + i * (M::WARPS * Weights::BYTES), c.lane()) : Held{};
        }
        held++;
        if (first == 0) left--;
        if (CHUNKS > 1 || CHUNK_UNITS == 1 || held == CHUNK_UNITS || left == 0) {
          ring_release(c, c.ring);
          c.ring.next();
          held = 0;
        }
      }
    }
    __device__ __forceinline__ void read_chunks(Context<M>& c, Held (&b)[UNITS_PER_WARP][WARP_GRANULES]) {
#pragma unroll
      for (int u0 = 0; u0 < UNITS_PER_WARP; u0 += CHUNK_UNITS) {
        if (u0 > 0 && left <= 0) return;
        const u8* from = ring_take(c, c.ring) + c.warp() * Weights::BYTES + c.lane() * LANE_BYTES;
#pragma unroll
        for (int u = u0; u < u0 + CHUNK_UNITS && u < UNITS_PER_WARP; u++)
#pragma unroll
          for (int i = 0; i < WARP_GRANULES; i++) {
            const u8* at = from + ((u - u0) * UNIT_GRANULES + i * M::WARPS) * Weights::BYTES;
            b[u][i] = exists(c, 0, i) ? Weights::template read<AHEAD>(at, c.lane()) : Held{};
          }
        ring_release(c, c.ring);
        c.ring.next();
        left -= CHUNK_UNITS;
      }
    }
  };

  // What the end of a task needs of its entry, loaded before the input is there.
  struct Ends {
    u32 lo, out, residual, bias, row_scales;
    u32 part; // units before those of the chosen part
    float share; // WEIGHED: of its slot
  };
  // The chosen part, when the step has chosen. Every warp waits for it, beside its loader.
  static __device__ __forceinline__ u32 chosen(Context<M>& c, const Entry& e) {
    if constexpr (CHOSEN) {
      const u64* const from[1] = {c.p.exchange + e.choice};
      const bool active[1] = {true};
      u32 part[1];
      await_packets<1>(from, active, c.tag, part, c.waiter());
      return min(part[0], u32(parts_of<G>(nullptr)) - 1u) * PART_UNITS;
    }
    return 0;
  }

  // The share of the slot; `packet` is what was there when it was asked for.
  static __device__ __forceinline__ float await_share(Context<M>& c, const Entry& e, u64 packet) {
    u32 word[1] = {u32(packet)};
    if (__ballot_sync(~0u, !fresh(packet, c.tag))) {
      const u64* const from[1] = {c.p.exchange + e.aux};
      const bool active[1] = {true};
      await_packets<1>(from, active, c.tag, word, c.waiter());
    }
    return __uint_as_float(word[0]);
  }

  // Scales of the two rows of a unit that a lane completes; of gated units also those of the two up rows.
  struct RowScales {
    float2 own, up;
  };
  // Loads them for the units that this warp completes at once, from u0 up to `end`. A lane without a unit loads those of the warp's first.
  // Called before the products, because the scales come from L2 at best.
  static __device__ __forceinline__ RowScales row_scales(const Context<M>& c, const Ends& e, int u0, int end) {
    RowScales scales = {};
    if constexpr (Weights::ROW_SCALES) {
      const int own = u0 + c.warp() + c.lane() / 4 * M::WARPS, r = c.lane() % 4 * 2;
      const int local = own < end ? own : min(u0 + c.warp(), end - 1);
      const float* of_unit = c.template constant<float>(e.row_scales) + (int(e.part + e.lo) + local) * OPERAND_ROWS;
      scales.own = __ldg(reinterpret_cast<const float2*>(of_unit + r));
      if constexpr (GATED) scales.up = __ldg(reinterpret_cast<const float2*>(of_unit + (r + 4) % OPERAND_ROWS));
    }
    return scales;
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    constexpr int X_SHIFT = Weights::X_SHIFT, SECOND_SHIFT = Weights::SECOND_SHIFT;
    const int units = int(uniform(e.hi - e.lo));
    Ends ends{e.lo, e.out, e.residual, e.bias, e.row_scales, INPUT_FIRST ? 0 : chosen(c, e), 1.f};
    Stream stream{nullptr, 0, units};
    Held b[UNITS_PER_WARP][WARP_GRANULES] = {};
    RowScales scales;
    if constexpr (!INPUT_FIRST) {
      stream.read(c, 0, b);
      scales = row_scales(c, ends, 0, min(M::REDUCE_BATCH, units));
    }
    float squares = 0.f;
    static_assert(!G::OWN_INPUT || G::NORM != Norm::LAYER, "the variance of a LayerNorm is that of packets");
    if constexpr (G::NORM == Norm::LAYER) {
      // The mean has to be known before anything is staged.
      stage_block<M, G::K, G::NORM, true, Weights::PAD, X_SHIFT, SECOND_SHIFT>(c, e, G::EPS);
    } else {
      constexpr int COUNT = G::POLL_BATCH;
      const u32 first = u32(c.lane()) / GRANULE_PAIRS * M::WARPS + c.warp();
      const u32 k0 = first * GRANULE_K + u32(c.lane()) % GRANULE_PAIRS * PAIR_K;
      float unused = 0.f;
#pragma unroll 1
      for (int q = 0; q < PAIRS; q += COUNT)
        squares += stage_pairs<M, G::K, G::NORM, true, COUNT, PAIR_STEP, G::OWN_INPUT, Weights::PAD, X_SHIFT, SECOND_SHIFT>(
            c, e, k0 + q * PAIR_STEP, unused);
      __syncwarp();
    }
    const Input input = prepare(c);
    if constexpr (INPUT_FIRST) {
      ends.part = chosen(c, e);
      stream.read(c, 0, b);
      scales = row_scales(c, ends, 0, min(M::REDUCE_BATCH, units));
    }
    // Asked for here. The products come first, then the wait.
    u64 share = 0;
    if constexpr (WEIGHED) peek(c.p.exchange + e.aux, true, share);
    c.stamp(1);
    float best = NEGATIVE_INFINITY, factor = 1.f;
    int best_row = 0x7fffffff;
#pragma unroll 1
    for (int u0 = 0; u0 == 0 || (u0 < G::UNITS && u0 < units); u0 += M::REDUCE_BATCH) {
      const int n = min(M::REDUCE_BATCH, units - u0);
      float* partial = c.reduce() + c.batch * (M::REDUCE_BATCH * M::WARPS * OPERAND_ROWS);
#pragma unroll 1
      for (int u = 0; u == 0 || (!SINGLE_PASS && u < n); u += UNITS_PER_WARP) {
        Sums s[UNITS_PER_WARP];
        if constexpr (CHUNKS == 1) {
          multiply(c, b, 0, s);
        } else {
#pragma unroll 1
          for (int first = 0; first < UNIT_GRANULES; first += CHUNK) {
            multiply(c, b, first, s);
            // After the products: the next weights arrive while the products are added up.
            if (first + CHUNK < UNIT_GRANULES || stream.left > 0) stream.read(c, first + CHUNK < UNIT_GRANULES ? first + CHUNK : 0, b);
          }
        }
        if constexpr (CHUNKS == 1 && !SINGLE_PASS)
          if (stream.left > 0) stream.read(c, 0, b);
        if constexpr (G::NORM == Norm::RMS)
          if (u0 + u == 0) put_statistic(c, 0, squares);
#pragma unroll
        for (int t = 0; t < UNITS_PER_WARP; t++)
          if (UNITS_PER_WARP == 1 || u + t < n) put_partial(c, partial + ((u + t) * M::WARPS + c.warp()) * OPERAND_ROWS, s[t], input);
      }
      if constexpr (WEIGHED)
        if (u0 == 0) ends.share = await_share(c, e, share);
      c.barrier();
      c.stamp(2);
      // Four lanes complete a unit. A warp takes eight units of codes at once, or one of plain weights.
      constexpr int AT_ONCE = Weights::CODED ? 8 : 1;
#pragma unroll 1
      for (int u1 = c.warp(); u1 < n; u1 += M::WARPS * AT_ONCE) {
        if constexpr (G::NORM == Norm::RMS)
          if (u0 == 0) factor = rms_factor<M, G::K>(c, G::EPS);
        if constexpr (Weights::ROW_SCALES && M::REDUCE_BATCH > M::WARPS * AT_ONCE)
          if (u1 >= M::WARPS * AT_ONCE) scales = row_scales(c, ends, u0 + u1 - c.warp(), u0 + n);
        const int own = AT_ONCE > 1 ? u1 + c.lane() / 4 * M::WARPS : u1;
        const bool mine = AT_ONCE > 1 ? own < n : c.lane() < 4;
        const int u = mine ? own : u1;
        if (G::EPILOGUE == Epilogue::LOGITS || mine)
          epilogue(c, ends, u0 + u, int(ends.lo) + u0 + u, partial + u * (M::WARPS * OPERAND_ROWS), factor, scales, best, best_row);
        if (M::REDUCE_BATCH <= M::WARPS * AT_ONCE || G::UNITS <= M::WARPS * AT_ONCE) break;
      }
      c.batch ^= 1;
      if constexpr (Weights::ROW_SCALES)
        if (u0 + M::REDUCE_BATCH < units) scales = row_scales(c, ends, u0 + M::REDUCE_BATCH, min(u0 + 2 * M::REDUCE_BATCH, units));
    }
    if constexpr (G::EPILOGUE == Epilogue::LOGITS) publish_best(c, e, best, best_row);
  }

  // Rows `r` and `r + 1` of a unit, summed over warps and parts.
  static __device__ __forceinline__ float2 rows(const Context<M>& c, const Ends& e, const float* partial, int unit, int r,
                                                float factor, float2 scale) {
    float2 y = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < M::WARPS * K_PARTS; w++) {
      const float2 v = *reinterpret_cast<const float2*>(partial + w * G::UNIT_ROWS + r);
      y.x += v.x, y.y += v.y;
    }
    if constexpr (Weights::ROW_SCALES) y.x *= scale.x, y.y *= scale.y;
    if constexpr (G::NORM == Norm::RMS) y.x *= factor, y.y *= factor;
    if constexpr (G::BIAS) {
      const float2 bias = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.bias) + (int(e.part) + unit) * G::UNIT_ROWS + r));
      y.x += bias.x, y.y += bias.y;
    }
    return y;
  }

  static __device__ __forceinline__ float weighed(const Ends& e, float y) {
    if constexpr (WEIGHED) return e.share * y;
    return y;
  }

  // Four lanes take two rows each; gated and smaller units need fewer lanes. For logits all lanes repeat what those four do: the
  // noise is a call, which some lanes of a warp must not make alone.
  static __device__ __forceinline__ void epilogue(Context<M>& c, const Ends& e, int local, int unit, const float* partial,
                                                  float factor, const RowScales& scales, float& best, int& best_row) {
    const int r = c.lane() % 4 * 2;
    if constexpr (GATED) {
      // Rows 0..3 are gate, rows 4..7 up.
      const int col = unit * 4 + r;
      if (r < 4 && col < G::ROWS / 2) {
        const float2 gate = rows(c, e, partial, unit, r, factor, scales.own), up = rows(c, e, partial, unit, r + 4, factor, scales.up);
        if constexpr (G::EPILOGUE == Epilogue::CLAMPED)
          publish_columns<G::ROWS / 2>(c, e.out, col, weighed(e, clamped<G>(gate.x, up.x)), weighed(e, clamped<G>(gate.y, up.y)));
        else
          publish_columns<G::ROWS / 2>(c, e.out, col, weighed(e, activate_scaled<G>(gate.x) * up.x), weighed(e, activate_scaled<G>(gate.y) * up.y));
      }
    } else {
      if (K_PARTS > 1 && r >= G::UNIT_ROWS) return;
      const int row = unit * G::UNIT_ROWS + r;
      float2 y = rows(c, e, partial, unit, r, factor, scales.own);
      if constexpr (G::EPILOGUE == Epilogue::LOGITS) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float v = softcap((i == 0 ? y.x : y.y) * G::SCALE, G::SOFTCAP);
          // With noise, sampling among all ids is an arg-max, too. The noise belongs to the token that this step decides.
          float score = v;
          if (c.p.inverse_temperature > 0.f && !filters(c.p))
            score = mul_add(v, c.p.inverse_temperature, noise(c.p.seed, c.position + 1, u32(row + i)));
          if (row + i < G::ROWS) {
            if (c.p.logits && (Weights::CODED || c.lane() < 4)) hand_out(c, u64(c.tag - c.p.tag) * G::ROWS + row + i, v);
            argmax_take(best, best_row, score, row + i);
          }
        }
      } else {
        if constexpr (G::EPILOGUE == Epilogue::ACT) y = make_float2(weighed(e, activate<G::ACT>(y.x)), weighed(e, activate<G::ACT>(y.y)));
        if constexpr (G::EPILOGUE == Epilogue::RESIDUAL) {
          float2* own = reinterpret_cast<float2*>(c.residual() + e.residual + local * G::UNIT_ROWS + r);
          const float2 old = *own;
          y = make_float2(old.x + G::SCALE * y.x, old.y + G::SCALE * y.y);
          *own = y;
        }
        if constexpr (G::EPILOGUE == Epilogue::SCORES) {
          if (row < G::ROWS) publish_scores<G::ROWS>(c, e.out, row, y.x, y.y);
        } else if constexpr (G::PUBLISH)
          if (row < G::ROWS) publish_columns<G::ROWS>(c, e.out, row, y.x, y.y);
      }
    }
  }

  static __device__ __forceinline__ void publish_best(Context<M>& c, const Entry& e, float best, int best_row) {
    warp_argmax(best, best_row);
    if (c.lane() == 0) {
      c.state().best[1][c.warp()] = best;
      c.state().best_index[1][c.warp()] = best_row;
    }
    c.barrier();
    if (c.warp() == 0) {
      best = c.lane() < M::WARPS ? c.state().best[1][c.lane()] : NEGATIVE_INFINITY;
      best_row = c.lane() < M::WARPS ? c.state().best_index[1][c.lane()] : 0x7fffffff;
      warp_argmax(best, best_row);
      if (c.lane() == 0) {
        u64* to = c.p.exchange + e.aux + (c.tag & 1) * round_up(2 * G::PARTS, 2) + 2 * e.j;
        release_step();
        send(c, to, __float_as_uint(best));
        send(c, to + 1, u32(best_row));
      }
    }
  }
};
