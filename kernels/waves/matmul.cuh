// matmul: y = x W^T + bias for blocks of 128 rows, then the epilogue.
//
// x (rows, K)    bf16, as `OperandPlace` has it
// W              units as in ops/matvec.cuh, through the ring: a chunk is 64 of k of all units of a pass (128 where units have 2 rows or
//                codes 4 bits), with the same k of the block of rows before it
// out            STORE, ACT: a column a row of W; GATED: 4 columns a unit; as products read it, or row by row (PLAIN).
//                RESIDUAL: residual += SCALE * y, in place
//
// owner    of a unit and a block of rows: one block
// assumes  columns of x past K and rows of W past ROWS are zeros
//
// Warps are 2 groups of 64 rows by 4 groups of units. A lane loads 16 bytes of row lane / 4 of W, and the same k of rows lane / 4 and
// lane / 4 + 8 of x: as operands of m16n8k16 they are a permutation of k that both sides share (rows/matvec.cuh). Codes become operands as in
// rows/matvec_codes.cuh; the input of each of their chunks is made to meet them by every warp that reads it.
#pragma once

// Codes of a matrix as operands; plain weights are operands as they lie.
template <class M, class G, class = int>
struct WaveCodes {
  static constexpr bool CODED = false, GROUPED = false, ROW_SCALES = false;
  static constexpr float FACTOR = 1.f;
};
template <class M, class G>
struct WaveCodes<M, G, decltype(int(G::CODE))> {
  typedef Coding<M, G> Weights;
  typedef RowsOperand<G::CODE> Operand;
  typedef RowsHeld<M, G, 2> Held; // of the two columns of a lane
  static constexpr bool CODED = true, GROUPED = Weights::GROUPED, ROW_SCALES = Weights::ROW_SCALES;
  static constexpr float FACTOR = Operand::FACTOR;
  static constexpr int OFFSET = Operand::OFFSET + int(Weights::Codes::ZERO);
  static constexpr bool SUMS_X = G::ZEROS || OFFSET != 0;
  static constexpr int GROUPS = Weights::GROUPS, GROUP_BLOCKS = Weights::GROUP_BLOCKS;

  // Operands of rows g and g + 8 made to meet codes.
  static __device__ __forceinline__ void meet(uint4& a, uint4& b) {
    const uint4 low = Operand::input(make_uint4(a.x, a.z, b.x, b.z)), high = Operand::input(make_uint4(a.y, a.w, b.y, b.w));
    a = made_here(make_uint4(low.x, high.x, low.y, high.y));
    b = made_here(make_uint4(low.z, high.z, low.w, high.w));
  }
  // What a column takes from its sums for `sums` of x, as a product with the constant made them.
  static __device__ __forceinline__ float taken(const Held& w, int col, int group, float sums) {
    if constexpr (G::ZEROS)
      return (float(OFFSET - int(Weights::Codes::ZERO)) + w.zero(col, group)) * sums;
    else
      return SUMS_X ? sums : 0.f;
  }
};

template <class M, class G>
struct WaveMatMul {
  typedef WaveCodes<M, G> Codes;
  static constexpr int K_PARTS = OPERAND_ROWS / G::UNIT_ROWS;
  static constexpr int GRANULE_K = K_PARTS * (PART_BYTES * 8 / Coding<M, G>::BITS), GRANULE = Coding<M, G>::BYTES;
  static constexpr int UNIT_GRANULES = ceil_div(G::K, GRANULE_K);
  // Spans of 32 of k of a chunk, granules of it of each unit, and chunks.
  static constexpr int SPANS = GRANULE_K > 64 ? GRANULE_K / 32 : 2, CHUNK_GRANULES = SPANS * 32 / GRANULE_K, CHUNKS = ceil_div(UNIT_GRANULES, CHUNK_GRANULES);
  static constexpr u32 INPUT_BYTES = SPANS * (BLOCK_ROWS * 64), UNIT_BYTES = UNIT_GRANULES * GRANULE;
  static constexpr int ROW_GROUPS = 2, UNIT_GROUPS = 4, ROW_TILES = BLOCK_ROWS / ROW_GROUPS / 16;
  static constexpr int PASS = G::PASS, MOST = ceil_div(PASS, UNIT_GROUPS); // units at once at most, of a block and of a warp
  typedef OperandPlace<G::K> X;
  static_assert(M::WARPS == ROW_GROUPS * UNIT_GROUPS, "eight warps");
  static_assert(INPUT_BYTES + MOST * UNIT_GROUPS * CHUNK_GRANULES * GRANULE <= M::SLOT_BYTES, "a slot holds a chunk");

  // Units of a share in passes of nearly equal length.
  struct Passes {
    u32 lo, hi, count;
    __device__ __forceinline__ explicit Passes(const Share& s) : lo(s.lo), hi(s.hi), count((s.hi - s.lo + PASS - 1) / PASS) {}
    __device__ __forceinline__ u32 first(u32 pass) const { return lo + (hi - lo) * pass / count; }
  };

  // ---- the loader ----------------------------------------------------------------------------------------------------
  // Weights are asked for as soon as a slot is free, their input once the blocks have met.
  static __device__ __forceinline__ void load(WaveLoader<M>& l, const Wave& e) {
    constexpr int WEIGHT_WARPS = M::LOADER_WARPS - 1;
    const Shares<M> shares(l.p, e.shares);
    const u8* weights = l.p.pack + u64(e.weight) * OFFSET_BYTES;
    const u8* x = l.p.work + u64(e.x) * OFFSET_BYTES;
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= l.p.row_count) continue;
      const Passes passes(share);
      const u8* input = x + X::block(share.row / BLOCK_ROWS, 0);
#pragma unroll 1
      for (u32 pass = 0; pass < passes.count; pass++) {
        const u32 first = passes.first(pass), here = passes.first(pass + 1) - first;
        const u32 unit = u32(l.part - 1 + l.lane * WEIGHT_WARPS); // that this lane copies
        const u8* from = weights + u64(first + unit) * UNIT_BYTES;
#pragma unroll 1
        for (u32 chunk = 0; chunk < CHUNKS; chunk++, l.at.next()) {
          const u32 bytes = u32(min(CHUNK_GRANULES, UNIT_GRANULES - int(chunk) * CHUNK_GRANULES)) * GRANULE;
          u8* slot = l.free_slot();
          if (l.part == 0) {
            l.meet();
            if (l.lane == 0) l.copy(slot, input + u64(chunk) * INPUT_BYTES, INPUT_BYTES, false);
          } else if (unit < here) {
            l.copy(slot + INPUT_BYTES + unit * (CHUNK_GRANULES * GRANULE), from + chunk * (CHUNK_GRANULES * GRANULE), bytes, true);
          }
          l.arrive(INPUT_BYTES + here * bytes);
          __syncwarp();
        }
      }
    }
  }

  // ---- consumers -----------------------------------------------------------------------------------------------------
  // A chunk times N units of the warp, which are every fourth one. What lies where a pass has no unit is multiplied, and not stored.
  template <int N>
  static __device__ __forceinline__ void multiply(const u8* slot, int tiles_at, int units_at, int lane, int granules, float (&d)[ROW_TILES][N][4]) {
    const u8* input = slot + tiles_at * X::TILE_BYTES + lane * 16;
    const u8* weights = slot + INPUT_BYTES + units_at * (CHUNK_GRANULES * GRANULE) + lane * 16;
#pragma unroll
    for (int j = 0; j < CHUNK_GRANULES; j++) {
      if (j > 0 && j >= granules) break;
#pragma unroll
      for (int p = 0; p < K_PARTS; p++) {
        const int span = j * K_PARTS + p;
        uint4 a[ROW_TILES], b[ROW_TILES];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          const u8* at = input + span / 2 * X::BLOCK_BYTES + span % 2 * X::SPAN_BYTES + m * X::TILE_BYTES;
          a[m] = *reinterpret_cast<const uint4*>(at);
          b[m] = *reinterpret_cast<const uint4*>(at + X::HALF_BYTES);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
          uint4 w = *reinterpret_cast<const uint4*>(weights + i * (UNIT_GROUPS * CHUNK_GRANULES * GRANULE) + j * GRANULE);
          // Rows of a granule that are of other parts of k meet zeros.
          if (K_PARTS > 1 && lane / 4 / G::UNIT_ROWS != p) w = make_uint4(0, 0, 0, 0);
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++)
            tensor_product(d[m][i][0], d[m][i][1], d[m][i][2], d[m][i][3], a[m].x, a[m].y, a[m].z, a[m].w, w.x, w.y);
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++)
            tensor_product(d[m][i][0], d[m][i][1], d[m][i][2], d[m][i][3], b[m].x, b[m].y, b[m].z, b[m].w, w.z, w.w);
        }
      }
    }
  }

  // The same of codes: a chunk is one granule of each unit. The sums of a group are scaled before they are added up.
  template <int N>
  static __device__ __forceinline__ void multiply_codes(const u8* slot, int tiles_at, int units_at, int lane, float (&d)[ROW_TILES][N][4]) {
    const u8* input = slot + tiles_at * X::TILE_BYTES + lane * 16;
    typename Codes::Held w[N];
#pragma unroll
    for (int i = 0; i < N; i++) w[i].read(slot + INPUT_BYTES + (units_at + i * UNIT_GROUPS) * GRANULE, lane, lane % 4 * 2);
    const uint2 n = Codes::Operand::constant(G::ZEROS ? 1 : Codes::OFFSET);
#pragma unroll
    for (int group = 0; group < Codes::GROUPS; group++) {
      float own[Codes::GROUPED ? ROW_TILES : 1][Codes::GROUPED ? N : 1][4] = {}, sums[Codes::SUMS_X ? ROW_TILES : 1][4] = {};
#pragma unroll
      for (int block = group * Codes::GROUP_BLOCKS; block < (group + 1) * Codes::GROUP_BLOCKS; block++) {
        uint4 a[ROW_TILES], b[ROW_TILES];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          const u8* at = input + block / 2 * X::BLOCK_BYTES + block % 2 * X::SPAN_BYTES + m * X::TILE_BYTES;
          a[m] = *reinterpret_cast<const uint4*>(at);
          b[m] = *reinterpret_cast<const uint4*>(at + X::HALF_BYTES);
          Codes::meet(a[m], b[m]);
          if constexpr (Codes::SUMS_X) {
            tensor_product(sums[m][0], sums[m][1], sums[m][2], sums[m][3], a[m].x, a[m].y, a[m].z, a[m].w, n.x, n.y);
            tensor_product(sums[m][0], sums[m][1], sums[m][2], sums[m][3], b[m].x, b[m].y, b[m].z, b[m].w, n.x, n.y);
          }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
          const uint4 v = Codes::Operand::eight(w[i].codes, block);
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++) {
            float(&to)[4] = pick<Codes::GROUPED>(own[Codes::GROUPED ? m : 0][Codes::GROUPED ? i : 0], d[m][i]);
            tensor_product(to[0], to[1], to[2], to[3], a[m].x, a[m].y, a[m].z, a[m].w, v.x, v.y);
          }
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++) {
            float(&to)[4] = pick<Codes::GROUPED>(own[Codes::GROUPED ? m : 0][Codes::GROUPED ? i : 0], d[m][i]);
            tensor_product(to[0], to[1], to[2], to[3], b[m].x, b[m].y, b[m].z, b[m].w, v.z, v.w);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const float taken = Codes::taken(w[i], k % 2, group, sums[Codes::SUMS_X ? m : 0][k]);
            if constexpr (Codes::GROUPED)
              d[m][i][k] += w[i].scale(k % 2, group) * (own[m][i][k] - taken);
            else
              d[m][i][k] -= taken;
          }
    }
  }
  template <bool FIRST>
  static __device__ __forceinline__ float (&pick(float (&first)[4], float (&second)[4]))[4] {
    if constexpr (FIRST)
      return first;
    else
      return second;
  }

  // Columns 2 t and 2 t + 1 of a unit, of one row.
  static __device__ __forceinline__ void finish(const WaveContext<M>& c, const Wave& e, u32 unit, int row, int t, float2 y) {
    // The parts of k of a row lie in lanes side by side.
    if constexpr (K_PARTS == 4) {
      y.x += __shfl_xor_sync(~0u, y.x, 1), y.y += __shfl_xor_sync(~0u, y.y, 1);
    }
    if constexpr (K_PARTS >= 2) {
      y.x += __shfl_xor_sync(~0u, y.x, 2), y.y += __shfl_xor_sync(~0u, y.y, 2);
    }
    constexpr int PAIRS = G::UNIT_ROWS / 2;
    if constexpr (Codes::CODED) y.x *= Codes::FACTOR, y.y *= Codes::FACTOR;
    if constexpr (Codes::ROW_SCALES) {
      const float2 scale = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.row_scales) + unit * G::UNIT_ROWS + t * 2));
      y.x *= scale.x, y.y *= scale.y;
    }
    if constexpr (G::BIAS)
      if (t < PAIRS) {
        const float2 b = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.bias) + unit * G::UNIT_ROWS + t * 2));
        y.x += b.x, y.y += b.y;
      }
    if constexpr (G::EPILOGUE == Epilogue::GATED) {
      const float2 up = make_float2(__shfl_xor_sync(~0u, y.x, 2), __shfl_xor_sync(~0u, y.y, 2));
      const int col = int(unit) * 4 + t * 2;
      if (t < 2 && col < G::ROWS / 2 && u32(row) < c.p.row_count)
        put<G::ROWS / 2>(c, e, row, col, activate<G::ACT>(y.x) * up.x, activate<G::ACT>(y.y) * up.y);
    } else {
      const int col = int(unit) * G::UNIT_ROWS + t * 2;
      if (t >= PAIRS || col >= G::ROWS || u32(row) >= c.p.row_count) return;
      if constexpr (G::EPILOGUE == Epilogue::RESIDUAL) {
        float* at = c.template work<float>(e.residual) + u64(row) * G::ROWS + col;
        if (G::ROWS % 2 == 0) {
          float2* pair = reinterpret_cast<float2*>(at);
          const float2 old = *pair;
          *pair = make_float2(old.x + G::SCALE * y.x, old.y + G::SCALE * y.y);
        } else {
          at[0] += G::SCALE * y.x;
          if (col + 1 < G::ROWS) at[1] += G::SCALE * y.y;
        }
      } else {
        if constexpr (G::EPILOGUE == Epilogue::ACT) y = make_float2(activate<G::ACT>(y.x), activate<G::ACT>(y.y));
        put<G::ROWS>(c, e, row, col, y.x, y.y);
      }
    }
  }
  template <int COLS>
  static __device__ __forceinline__ void put(const WaveContext<M>& c, const Wave& e, int row, int col, float a, float b) {
    static_assert(COLS % 2 == 0, "columns are stored in pairs");
    u8* out = c.template work<u8>(e.out);
    *reinterpret_cast<u32*>(out + (G::PLAIN ? (u64(row) * COLS + col) * 2 : OperandPlace<COLS>::at(row, col))) = bf16_pair(a, b);
  }

  template <int N>
  static __device__ __forceinline__ void pass(WaveContext<M>& c, const Wave& e, const Share& share, u32 first, u32 here) {
    const int tiles_at = c.warp() / UNIT_GROUPS * ROW_TILES, units_at = c.warp() % UNIT_GROUPS;
    float d[ROW_TILES][N][4] = {};
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; chunk++) {
      const u8* slot = wave_take(c);
      if constexpr (Codes::CODED)
        multiply_codes<N>(slot, tiles_at, units_at, c.lane(), d);
      else
        multiply<N>(slot, tiles_at, units_at, c.lane(), UNIT_GRANULES - chunk * CHUNK_GRANULES, d);
      wave_release(c);
    }
    const int g = c.lane() / 4, t = c.lane() % 4;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u32 unit = u32(i * UNIT_GROUPS + units_at);
      if (unit >= here) break;
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          finish(c, e, first + unit, int(share.row) + (tiles_at + m) * 16 + h * 8 + g, t, make_float2(d[m][i][2 * h], d[m][i][2 * h + 1]));
    }
  }
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const Shares<M> shares(c.p, e.shares);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= c.p.row_count) continue;
      const Passes passes(share);
#pragma unroll 1
      for (u32 i = 0; i < passes.count; i++) {
        const u32 first = passes.first(i), here = passes.first(i + 1) - first;
        // Fewer units have code of their own: what is not there costs as much as what is.
        if (here <= UNIT_GROUPS)
          pass<1>(c, e, share, first, here);
        else if (here <= 2 * UNIT_GROUPS)
          pass<MOST < 2 ? MOST : 2>(c, e, share, first, here);
        else if (here <= 4 * UNIT_GROUPS)
          pass<MOST < 4 ? MOST : 4>(c, e, share, first, here);
        else
          pass<MOST>(c, e, share, first, here);
      }
    }
  }
};
