// matvec of more than 16 rows on tensor cores: as matvec.cuh has it, with the input in shared memory.
//
// A warp has 16 rows of the step and some of the units, with all of k: warps of the same rows take units in turn. So no sums meet, and a
// task reads its input once for each pass, whose units are as many as lanes have sums of. All warps read a stage of the input together
// while they multiply the one before it, and write it, normalised, to shared memory.
//
// owner    of a unit: one task
// moves    UNIT_GRANULES * GRANULE_BYTES of the stream for each unit; all values of x into every block, once for each pass
// assumes  as matvec.cuh. There is room for 2 stages, which has the sums of a pass when they are done
#pragma once

// Units that a warp multiplies at once: the more, the less often it reads its rows of the stage.
constexpr int STAGED_CHUNKS_AT_ONCE = 8;
// Chunks of k of a stage: of a tile of rows fewer bytes are on their way than latency wants.
template <class M>
constexpr int STAGE_CHUNKS = M::ROWS <= 2 * WARP_ROWS ? 2 : 1;
// Bytes of both stages, and columns of one at most.
constexpr int STAGE_COLS_MAX = 512;
template <class M>
constexpr int STAGES_BYTES = 2 * M::ROWS * STAGE_CHUNKS<M> * PART_BYTES * 8;

template <class M, class G>
struct RowsMatVecStaged {
  typedef RowsMatVecShape<M, G> S;
  typedef Words<M, G::K> W;
  static constexpr int TILES = M::ROWS / WARP_ROWS, TURNS_OF_UNITS = M::WARPS / TILES; // warps that take units in turn
  static_assert(!Coding<M, G>::CODED, "weights are no codes");
  static_assert(M::ROWS % WARP_ROWS == 0 && M::WARPS % TILES == 0, "a warp has a whole tile, and tiles have as many warps each");
  static constexpr int K_PARTS = S::K_PARTS, PASS = G::PASS;
  static constexpr int AT_ONCE = STAGED_CHUNKS_AT_ONCE / TURNS_OF_UNITS;
  static_assert(AT_ONCE > 0 && STAGED_CHUNKS_AT_ONCE % TURNS_OF_UNITS == 0, "every warp has a unit of those at once");
  static constexpr int ROUNDS = ceil_div(PASS, STAGED_CHUNKS_AT_ONCE);
  static constexpr int CHUNKS = STAGE_CHUNKS<M>, STAGES = ceil_div(S::BLOCKS, CHUNKS);
  // 64 bytes of k of 8 rows, as a lane reads 16 bytes of them: of a stage, and those that a warp brings to it.
  static constexpr int CHUNK_SPANS = S::BLOCK * K_PARTS, SPANS = CHUNKS * CHUNK_SPANS;
  static constexpr int GROUPS = M::ROWS / 8, LOADS = ceil_div(SPANS * GROUPS, M::WARPS);
  static_assert(M::WARPS % GROUPS == 0, "a lane reads one row");
  static constexpr int STAGE_BYTES = SPANS * GROUPS * GRANULE_BYTES;

  static __device__ __forceinline__ int group(const Context<M>& c) { return c.warp() % GROUPS; }
  static __device__ __forceinline__ int span(const Context<M>& c, int i) { return (i * M::WARPS + c.warp()) / GROUPS; }
  static __device__ __forceinline__ int row(const Context<M>& c) { return group(c) * 8 + c.lane() / 4; }
  static __device__ __forceinline__ int piece(const Context<M>& c, int stage, int i) { return (stage * SPANS + span(c, i)) * 4 + c.lane() % 4; }
  static __device__ __forceinline__ u8* stage_at(const Context<M>& c, int which) { return reinterpret_cast<u8*>(c.stage()) + which * STAGE_BYTES; }

  // Loads i of a stage, from the lane's own place on.
  static __device__ __forceinline__ u32 offset(int i) { return u32(i * (M::WARPS / GROUPS)) * W::SPAN_BYTES; }
  static __device__ __forceinline__ u32 lane_at(const Context<M>& c, int stage) {
    return u32(group(c)) * W::GROUP_BYTES + u32(stage * SPANS + span(c, 0)) * W::SPAN_BYTES + u32(c.lane()) * 16;
  }
  static __device__ __forceinline__ void issue(const Context<M>& c, const u8* x, int stage, bool active, uint4 (&v)[LOADS]) {
    const u8* base = x + lane_at(c, stage);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      v[i] = make_uint4(0, 0, 0, 0);
      load_piece(base + offset(i), active && span(c, i) < SPANS && piece(c, stage, i) < W::PIECES, v[i]);
    }
  }
  static __device__ __forceinline__ void settle(Context<M>& c, const u8* x, int stage, uint4 (&v)[LOADS]) {
    await_pieces<LOADS>(x + lane_at(c, stage), [](int i) { return offset(i); }, v, c.waiter());
  }

  // A LayerNorm needs both statistics before anything is multiplied.
  struct Means {
    float mean, factor;
  };
  static __device__ __forceinline__ Means layer_statistics(Context<M>& c, const u8* x, bool active) {
    Means m{0.f, 0.f};
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      float sum[1] = {0.f};
#pragma unroll 1
      for (int stage = 0; stage < STAGES; stage++) {
        uint4 v[LOADS];
        issue(c, x, stage, active, v);
        settle(c, x, stage, v);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
          float y[8];
          unpack_piece<M>(v[i], y);
          const int col = piece(c, stage, i) * 8;
#pragma unroll
          for (int k = 0; k < 8; k++)
            if (active && span(c, i) < SPANS && col + k < G::K) sum[0] += which == 0 ? y[k] : (y[k] - m.mean) * (y[k] - m.mean);
        }
      }
      put_row_statistic<M, 1>(c, which, c.warp() / GROUPS, group(c) * 8, sum);
      c.barrier();
      const float mean = row_statistic(c, which, row(c)) * (1.f / G::K);
      (which == 0 ? m.mean : m.factor) = which == 0 ? mean : rsqrtf(mean + G::EPS);
    }
    return m;
  }

  // Weights of an RMS norm, of the columns of a stage: every thread has two on their way, one stage earlier than its input, or each stage
  // would wait for them.
  static constexpr int COLS = SPANS * 32;
  static_assert(COLS <= STAGE_COLS_MAX && COLS <= 2 * S::THREADS, "a thread has two columns");
  static __device__ __forceinline__ float* scales_at(const Context<M>& c, int which) {
    return reinterpret_cast<float*>(stage_at(c, 0) + STAGES_BYTES<M>) + which * STAGE_COLS_MAX;
  }
  static __device__ __forceinline__ float2 ask(const Context<M>& c, const Entry& e, int stage) {
    const int at = c.tid() * 2;
    const bool there = G::NORM == Norm::RMS && at < COLS && stage * COLS + at < W::PIECES * W::PIECE_COLS;
    return there ? __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.norm_weight) + stage * COLS + at)) : make_float2(0.f, 0.f);
  }
  static __device__ __forceinline__ void put_scales(const Context<M>& c, int stage, float2 scales) {
    if (G::NORM == Norm::RMS && c.tid() * 2 < COLS) *reinterpret_cast<float2*>(scales_at(c, stage & 1) + c.tid() * 2) = scales;
  }

  // A stage of the input, normalised, to its place.
  static __device__ __forceinline__ void put_input(const Context<M>& c, const Entry& e, int stage, const Means& m, const uint4 (&v)[LOADS],
                                                   float (&squares)[1]) {
    u8* to = stage_at(c, stage & 1) + c.lane() * 16;
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      uint4 out = v[i];
      float x[8];
      if constexpr (G::NORM != Norm::NONE) unpack_piece<M>(out, x);
      if constexpr (G::NORM == Norm::RMS) {
        const float4* from = reinterpret_cast<const float4*>(scales_at(c, stage & 1) + min(span(c, i), SPANS - 1) * 32 + c.lane() % 4 * 8);
        const float4 lo = from[0], hi = from[1];
        const float w[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int k = 0; k < 8; k++) {
          squares[0] += x[k] * x[k];
          x[k] *= w[k];
        }
      } else if constexpr (G::NORM == Norm::LAYER) {
        const int col = piece(c, stage, i) * 8;
        const bool there = span(c, i) < SPANS && piece(c, stage, i) < W::PIECES;
        const float* weight = c.template constant<float>(e.norm_weight) + col;
        const float* bias = c.template constant<float>(e.norm_bias) + col;
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const float w = there ? __ldg(weight + k) : 0.f, b = there && e.norm_bias != ~0u ? __ldg(bias + k) : 0.f;
          x[k] = col + k < G::K ? (x[k] - m.mean) * m.factor * w + b : 0.f;
        }
      }
      if constexpr (G::NORM != Norm::NONE)
        out = make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
      if (span(c, i) < SPANS) *reinterpret_cast<uint4*>(to + (span(c, i) * GROUPS + group(c)) * GRANULE_BYTES) = out;
    }
  }

  // The chunks at hand, of `here` units of which the warp has every TURNS_OF_UNITS-th, N at most, times its rows of the staged block.
  template <int N>
  static __device__ __forceinline__ void multiply(Context<M>& c, int block, int here, float (&d)[AT_ONCE][K_PARTS][4]) {
    const int turn = c.warp() / TILES, tile = c.warp() % TILES;
    const RingCursor<M> first = c.ring;
    ring_await(c, first, here);
    const u8* chunk[N];
#pragma unroll
    for (int u = 0; u < N; u++) {
      // A unit that is not there is one that is, and its sums are never read.
      const int unit = u * TURNS_OF_UNITS + turn;
      chunk[u] = ring_chunk(ring_ahead<M>(first, unit < here ? unit : 0)) + c.lane() * LANE_BYTES;
    }
    const u8* x = stage_at(c, block / CHUNKS & 1) + block % CHUNKS * (CHUNK_SPANS * GROUPS * GRANULE_BYTES) + tile * 2 * GRANULE_BYTES + c.lane() * 16;
#pragma unroll
    for (int j = 0; j < S::BLOCK; j++) {
      // The last block may be shorter, and the rest of a slot is whatever it held.
      if (S::UNIT_GRANULES % S::BLOCK != 0 && block * S::BLOCK + j >= S::UNIT_GRANULES) break;
      uint4 w[N];
#pragma unroll
      for (int u = 0; u < N; u++) w[u] = *reinterpret_cast<const uint4*>(chunk[u] + j * GRANULE_BYTES);
#pragma unroll
      for (int p = 0; p < K_PARTS; p++) {
        const u8* from = x + (j * K_PARTS + p) * (GROUPS * GRANULE_BYTES);
        const uint4 lo = *reinterpret_cast<const uint4*>(from), hi = *reinterpret_cast<const uint4*>(from + GRANULE_BYTES);
#pragma unroll
        for (int u = 0; u < N; u++)
          tensor_product(d[u][p][0], d[u][p][1], d[u][p][2], d[u][p][3], lo.x, hi.x, lo.y, hi.y, w[u].x, w[u].y);
#pragma unroll
        for (int u = 0; u < N; u++)
          tensor_product(d[u][p][0], d[u][p][1], d[u][p][2], d[u][p][3], lo.z, hi.z, lo.w, hi.w, w[u].z, w[u].w);
      }
    }
    ring_release(c, first, here);
    c.ring = ring_ahead<M>(first, here);
  }

  // All units of a pass, as many rounds as that takes.
  template <int ROUND = 0>
  static __device__ __forceinline__ void rounds(Context<M>& c, int block, int here, float (&d)[ROUNDS][AT_ONCE][K_PARTS][4]) {
    constexpr int BEFORE = ROUND * STAGED_CHUNKS_AT_ONCE, UNITS = PASS - BEFORE < STAGED_CHUNKS_AT_ONCE ? PASS - BEFORE : STAGED_CHUNKS_AT_ONCE;
    if (BEFORE >= here) return;
    multiply<ceil_div(UNITS, TURNS_OF_UNITS)>(c, block, min(here - BEFORE, UNITS), d[ROUND]);
    if constexpr (ROUND + 1 < ROUNDS) rounds<ROUND + 1>(c, block, here, d);
  }

  // Sums of a unit to shared memory: [row][column], of each column the part of k that it belongs to.
  static __device__ __forceinline__ void put_sums(const Context<M>& c, float* to, const float (&d)[K_PARTS][4]) {
    const int g = c.lane() / 4, column = c.lane() % 4 * 2, tile = c.warp() % TILES;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float2 y = make_float2(d[0][2 * h], d[0][2 * h + 1]);
#pragma unroll
      for (int p = 1; p < K_PARTS; p++)
        if (column / G::UNIT_ROWS == p) y = make_float2(d[p][2 * h], d[p][2 * h + 1]);
      *reinterpret_cast<float2*>(to + (tile * WARP_ROWS + h * 8 + g) * OPERAND_ROWS + column) = y;
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int units = int(uniform(e.hi - e.lo));
    const bool active = takes_part<M>(row(c));
    const u8* x = words_of<M, G::K>(c, e.x);
    Means means{};
    if constexpr (G::NORM == Norm::LAYER) means = layer_statistics(c, x, active);
    RowsEpilogue<M, G> epilogue(c);
#pragma unroll 1
    for (int first = 0; first < units; first += PASS) {
      const int here = min(PASS, units - first);
      float d[ROUNDS][AT_ONCE][K_PARTS][4] = {}, squares[1] = {0.f};
      uint4 v[LOADS];
      put_scales(c, 0, ask(c, e, 0));
      float2 scales = ask(c, e, 1);
      c.barrier();
      issue(c, x, 0, active, v);
      settle(c, x, 0, v);
      if (first == 0) c.stamp(1);
      put_input(c, e, 0, means, v, squares);
#pragma unroll 1
      for (int stage = 0; stage < STAGES; stage++) {
        const int next = stage + 1;
        if (next < STAGES) {
          issue(c, x, next, active, v);
          put_scales(c, next, scales);
          scales = ask(c, e, next + 1);
        }
        c.barrier();
#pragma unroll 1
        for (int block = stage * CHUNKS; block < min(next * CHUNKS, S::BLOCKS); block++) rounds(c, block, here, d);
        if (next < STAGES) {
          // The other one: everybody has left it at the last barrier.
          settle(c, x, next, v);
          put_input(c, e, next, means, v, squares);
        }
      }
      if (G::NORM == Norm::RMS && first == 0) put_row_statistic<M, 1>(c, 1, c.warp() / GROUPS, group(c) * 8, squares);
      c.barrier();
      if (first + PASS >= units) c.stamp(2);
      float* sums = reinterpret_cast<float*>(c.stage());
#pragma unroll
      for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
          const int unit = r * STAGED_CHUNKS_AT_ONCE + u * TURNS_OF_UNITS + c.warp() / TILES;
          if (unit < here) put_sums(c, sums + unit * S::UNIT_SUMS, d[r][u]);
        }
      c.barrier();
      if (first == 0) epilogue.load_factor(c);
#pragma unroll 1
      for (int batch = 0; batch < here; batch += S::BATCH) epilogue.run(c, e, sums + batch * S::UNIT_SUMS, int(e.lo) + first + batch, here - batch);
      c.barrier(); // the stage is the next one's
    }
    if constexpr (G::EPILOGUE == Epilogue::LOGITS) epilogue.publish_best(c, e);
  }
};
