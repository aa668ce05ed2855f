// Owns what waves with recurrent states have in common: columns of products, the taps of a convolution, products of small matrices, the state of a block in a
// chunk, and that of the threads of a block in a step.
//
// Only generated kernels with such waves include this.
#pragma once

// Two columns of what a product has left, rounded to bf16 as it stores them: bf16 row by row, or PARTS sums in fp32, (PARTS, rows, COLS).
template <int PARTS, int COLS, class M>
__device__ __forceinline__ float2 wave_columns(const WaveContext<M>& c, u32 at, int row, int col) {
  const u64 from = u64(row) * COLS + u32(col);
  u32 pair;
  if constexpr (PARTS > 0) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const float2 part = *reinterpret_cast<const float2*>(c.template work<float>(at) + u64(i) * (M::BLOCK_ROWS * COLS) + from);
      sum.x += part.x, sum.y += part.y;
    }
    pair = bf16_pair(sum.x, sum.y);
  } else {
    pair = *reinterpret_cast<const u32*>(c.template work<u8>(at) + from * 2);
  }
  return make_float2(bf16_lo(pair), bf16_hi(pair));
}

// The taps of a channel and the next one, KERNEL of each, oldest first.
template <int KERNEL>
__device__ __forceinline__ void load_taps(const float* from, float2 (&taps)[KERNEL]) {
  if constexpr (KERNEL == 4) {
    const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
    taps[0] = make_float2(a.x, b.x), taps[1] = make_float2(a.y, b.y), taps[2] = make_float2(a.z, b.z), taps[3] = make_float2(a.w, b.w);
  } else {
#pragma unroll
    for (int t = 0; t < KERNEL; t++) taps[t] = make_float2(__ldg(from + t), __ldg(from + KERNEL + t));
  }
}
// The convolution of two channels, whose past inputs move on.
template <int KERNEL, int KEPT>
__device__ __forceinline__ float2 convolve_pair(float2 (&past)[KEPT], const float2 (&taps)[KERNEL], float2 own) {
  constexpr int PAST = KERNEL - 1;
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int t = 0; t < PAST; t++) {
    sum.x += past[t].x * taps[t].x, sum.y += past[t].y * taps[t].y;
    past[t] = t + 1 < PAST ? past[t + 1 < PAST ? t + 1 : t] : own;
  }
  sum.x += own.x * taps[PAST].x, sum.y += own.y * taps[PAST].y;
  return sum;
}
// Precise functions: a decay is applied again at every position.
__device__ __forceinline__ float softplus(float x) { return x > 0.f ? x + log1pf(expf(-x)) : log1pf(expf(x)); }
// The logarithm of a decay. e^-104 is 0, so a smaller one would only cost digits of sums.
__device__ __forceinline__ float bounded_log(float y) { return y < -104.f ? -104.f : y; }

// The nearest number with 10 bits after the point: an operand of `product_tf32`.
__device__ __forceinline__ float to_tf32(float x) {
#ifndef __CUDA_ARCH__
  return rounded_tf32(x); // tests of ops on a CPU
#else
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
#endif
}
// D(16 x 8) += A(16 x 8) B(8 x 8), fp32 sums. Lane l has A of rows l / 4 and l / 4 + 8 at k = l % 4 (a0, a1) and l % 4 + 4 (a2, a3), B of
// column l / 4 at the same k, and D as `tensor_product` has it.
__device__ __forceinline__ void product_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
#ifndef __CUDA_ARCH__
  emulated_product_tf32(d, a0, a1, a2, a3, b0, b1); // tests of ops on a CPU
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
#endif
}

// How many of `all` tiles of eight columns a warp multiplies at once, so that groups are whole.
constexpr int tiles_at_once(int all) { return all % 4 == 0 ? 4 : all % 3 == 0 ? 3 : all % 2 == 0 ? 2 : 1; }
// The same, but so few that there are groups for four warps: each has 16 of 32 positions.
constexpr int tiles_for_warps(int all) { return all % 8 == 0 ? 4 : all % 6 == 0 ? 3 : all % 4 == 0 ? 2 : 1; }

// Of a chunk: what a block has of a state S (KD, VD), columns of WIDE, and of ROWS positions at a time. All products take operands in tf32 and add up in
// fp32. TILES: tiles of eight columns that a warp multiplies at once. SOLVES: values of positions depend on each other, and a square and a second set of
// values solve that.
//
// assumes  nothing is on its way to the ring of inputs: its memory, and the scratch after it, hold the operands. Copies to that ring wait for the next meeting
template <class M, int KEY_DIM, int VD, int COLUMNS, int AT_ONCE, bool SOLVES>
struct WaveCarry {
  static constexpr int ROWS = 32, KD = KEY_DIM, WIDE = COLUMNS, THREADS = M::WARPS * 32;
  static_assert(M::WARPS == 8 && KD % 16 == 0 && WIDE % 8 == 0 && VD % WIDE == 0, "whole tiles of all warps");
  // Rows of four lanes, and columns of eight, lie in different banks.
  static constexpr int KEY_PITCH = KD + (36 - KD % 32) % 32, PITCH = WIDE % 16 == 8 ? WIDE : WIDE + 8, SQUARE = ROWS + 4;
  static constexpr int KEYS = 0, QUERIES = KEYS + ROWS * KEY_PITCH, SOLVED = QUERIES + ROWS * KEY_PITCH, SCORES = SOLVED + (SOLVES ? ROWS * SQUARE : 0);
  static constexpr int STATE = SCORES + ROWS * SQUARE, WANTED = STATE + KD * PITCH, DELTAS = WANTED + (SOLVES ? ROWS * PITCH : 0), LINES = DELTAS + ROWS * PITCH;
  static constexpr int BYTES = (LINES + 4 * ROWS) * 4;
  static_assert(BYTES <= M::INPUT_SLOTS * M::INPUT_BYTES + M::SCRATCH_BYTES && M::SCRATCH_AT == M::INPUT_AT + M::INPUT_SLOTS * M::INPUT_BYTES, "the ring of inputs and the scratch hold it");
  // Tiles that a warp multiplies at once, and such groups.
  static constexpr int TILES_ALL = WIDE / 8, TILES = AT_ONCE, GROUPS = TILES_ALL / TILES;
  static constexpr int UNITS = 2 * GROUPS, Y_WARPS = 4, Y_EACH = ceil_div(UNITS, Y_WARPS); // of 16 positions by a group
  static constexpr int KEY_EACH = ceil_div(ROWS * KD / 4, THREADS), VALUE_EACH = ceil_div(ROWS * WIDE / 4, THREADS);

  static __device__ __forceinline__ float* at(const WaveContext<M>& c, int place) { return reinterpret_cast<float*>(c.memory() + M::INPUT_AT) + place; }
  // Of each position: g, a factor, e^g, and what its values have in the state after the last one, without the product.
  static __device__ __forceinline__ float* line(const WaveContext<M>& c, int which) { return at(c, LINES + which * ROWS); }

  // What a thread brings of the next positions.
  struct Ahead {
    float4 queries[KEY_EACH], keys[KEY_EACH], values[VALUE_EACH];
    float factor, decay;
  };
  // Where a row of PITCH floats has them: the first columns, that of the factor, and that of the logarithm of the decay.
  struct Columns {
    int key, query, value, factor, decay;
  };

  template <int FROM_PITCH>
  static __device__ __forceinline__ void fetch(const WaveContext<M>& c, const float* from, const Columns& of, int first, Ahead& a) {
    const int end = int(c.p.row_count);
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int n = 0; n < KEY_EACH; n++) {
      const int i = n * THREADS + c.tid(), row = first + i / (KD / 4);
      const bool live = i < ROWS * KD / 4 && row < end;
      const float* p = from + u64(live ? row : 0) * FROM_PITCH + i % (KD / 4) * 4;
      a.queries[n] = live ? *reinterpret_cast<const float4*>(p + of.query) : none;
      a.keys[n] = live ? *reinterpret_cast<const float4*>(p + of.key) : none;
    }
#pragma unroll
    for (int n = 0; n < VALUE_EACH; n++) {
      const int i = n * THREADS + c.tid(), row = first + i / (WIDE / 4);
      const bool live = i < ROWS * WIDE / 4 && row < end;
      a.values[n] = live ? *reinterpret_cast<const float4*>(from + u64(row) * FROM_PITCH + of.value + i % (WIDE / 4) * 4) : none;
    }
    a.factor = a.decay = 0.f;
    if (c.warp() == 0 && first + c.lane() < end) {
      const float* p = from + u64(first + c.lane()) * FROM_PITCH;
      a.factor = p[of.factor], a.decay = p[of.decay];
    }
  }
  static __device__ __forceinline__ float4 rounded(const float4& v) { return make_float4(to_tf32(v.x), to_tf32(v.y), to_tf32(v.z), to_tf32(v.w)); }
  // By a warp, for its position: the sums of logarithms of decays up to it.
  static __device__ __forceinline__ float log_decays(float decay, int lane) {
    float g = decay;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const float before = __shfl_up_sync(~0u, g, o);
      if (lane >= o) g += before;
    }
    return g;
  }
  static __device__ __forceinline__ void place(const WaveContext<M>& c, const Ahead& a) {
#pragma unroll
    for (int n = 0; n < KEY_EACH; n++) {
      const int i = n * THREADS + c.tid(), to = i / (KD / 4) * KEY_PITCH + i % (KD / 4) * 4;
      if (i >= ROWS * KD / 4) continue;
      *reinterpret_cast<float4*>(at(c, QUERIES + to)) = rounded(a.queries[n]);
      *reinterpret_cast<float4*>(at(c, KEYS + to)) = rounded(a.keys[n]);
    }
#pragma unroll
    for (int n = 0; n < VALUE_EACH; n++) {
      const int i = n * THREADS + c.tid();
      if (i < ROWS * WIDE / 4) *reinterpret_cast<float4*>(at(c, WANTED + i / (WIDE / 4) * PITCH + i % (WIDE / 4) * 4)) = a.values[n];
    }
    if (c.warp() == 0) {
      const int lane = c.lane();
      const float g = log_decays(a.decay, lane);
      line(c, 0)[lane] = g;
      line(c, 1)[lane] = a.factor;
      line(c, 2)[lane] = expf(g);
      line(c, 3)[lane] = expf(__shfl_sync(~0u, g, 31) - g) * (SOLVES ? 1.f : a.factor);
    }
  }

  // D += A B of 16 rows and N tiles, over `steps` times eight of k. Element (row, k) of A lies at row * A_ROW + k * A_K, (k, column) of B at k * B_K + column * B_COL.
  // ROUND: B is no operand yet. SCALED: it is multiplied by by[k] first.
  template <int A_ROW, int A_K, int B_K, int B_COL, bool ROUND, bool SCALED, int COUNT>
  static __device__ __forceinline__ void multiply(int lane, const float* a, const float* b, int steps, float (&d)[COUNT][4], const float* by = nullptr) {
    const int g = lane / 4, t = lane % 4;
    a += g * A_ROW + t * A_K, b += t * B_K + g * B_COL;
#pragma unroll 4
    for (int k = 0; k < steps; k++, a += 8 * A_K, b += 8 * B_K) {
      const float a0 = a[0], a1 = a[8 * A_ROW], a2 = a[4 * A_K], a3 = a[8 * A_ROW + 4 * A_K];
      float low = 1.f, high = 1.f;
      if constexpr (SCALED) low = by[k * 8 + t], high = by[k * 8 + t + 4];
#pragma unroll
      for (int n = 0; n < COUNT; n++) {
        float b0 = b[n * 8 * B_COL], b1 = b[n * 8 * B_COL + 4 * B_K];
        if constexpr (SCALED) b0 *= low, b1 *= high;
        if constexpr (ROUND) b0 = to_tf32(b0), b1 = to_tf32(b1);
        product_tf32(d[n], a0, a1, a2, a3, b0, b1);
      }
    }
  }
  // Calls f(row, column, sums of this column and the next) for what a lane has of tiles.
  template <int COUNT, class F>
  static __device__ __forceinline__ void each(int lane, float (&d)[COUNT][4], F f) {
#pragma unroll
    for (int n = 0; n < COUNT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) f(lane / 4 + 8 * h, n * 8 + lane % 4 * 2, d[n][2 * h], d[n][2 * h + 1]);
  }
  static __device__ __forceinline__ float2& pair(float* matrix, int row, int col, int pitch) { return *reinterpret_cast<float2*>(matrix + row * pitch + col); }

  // By warps Y_WARPS and later: what y has of the state before the positions.
  static __device__ __forceinline__ void recall(const WaveContext<M>& c, float (&y)[Y_EACH][TILES][4]) {
    const int lane = c.lane();
#pragma unroll
    for (int n = 0; n < Y_EACH; n++) {
      const int unit = c.warp() - Y_WARPS + n * Y_WARPS, row0 = unit % 2 * 16, col0 = unit / 2 * (TILES * 8);
#pragma unroll
      for (int i = 0; i < TILES; i++) y[n][i][0] = y[n][i][1] = y[n][i][2] = y[n][i][3] = 0.f;
      if (unit >= UNITS) continue;
      multiply<KEY_PITCH, 1, PITCH, 1, true, false>(lane, at(c, QUERIES + row0 * KEY_PITCH), at(c, STATE + col0), KD / 8, y[n]);
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float decay = line(c, 2)[row0 + lane / 4 + 8 * h];
          y[n][i][2 * h] *= decay, y[n][i][2 * h + 1] *= decay;
        }
    }
  }
  // By the same warps: adds what y has of the positions, and calls store(position, column, y, y of the next column).
  template <class F>
  static __device__ __forceinline__ void finish(const WaveContext<M>& c, float (&y)[Y_EACH][TILES][4], F store) {
    const int lane = c.lane();
#pragma unroll
    for (int n = 0; n < Y_EACH; n++) {
      const int unit = c.warp() - Y_WARPS + n * Y_WARPS, row0 = unit % 2 * 16, col0 = unit / 2 * (TILES * 8);
      if (unit >= UNITS) continue;
      multiply<SQUARE, 1, PITCH, 1, true, false>(lane, at(c, SCORES + row0 * SQUARE), at(c, DELTAS + col0), row0 / 8 + 2, y[n]);
      each(lane, y[n], [&](int r, int col, float x, float z) { store(row0 + r, col0 + col, x, z); });
    }
  }
  // S after the positions.
  static __device__ __forceinline__ void advance(const WaveContext<M>& c) {
    const int lane = c.lane();
    const float decay = line(c, 2)[ROWS - 1];
    for (int unit = c.warp(); unit < KD / 16 * GROUPS; unit += M::WARPS) {
      const int row0 = unit / GROUPS * 16, col0 = unit % GROUPS * (TILES * 8);
      float d[TILES][4];
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float2 s = pair(at(c, STATE), row0 + lane / 4 + 8 * h, col0 + n * 8 + lane % 4 * 2, PITCH);
          d[n][2 * h] = s.x * decay, d[n][2 * h + 1] = s.y * decay;
        }
      multiply<1, KEY_PITCH, PITCH, 1, true, true>(lane, at(c, KEYS + row0), at(c, DELTAS + col0), ROWS / 8, d, line(c, 3));
      each(lane, d, [&](int r, int col, float x, float y) { pair(at(c, STATE), row0 + r, col0 + col, PITCH) = make_float2(x, y); });
    }
  }
  // Calls f(piece in shared memory, piece in memory) for all 16 bytes of the columns of S from column `col0` on.
  template <class F>
  static __device__ __forceinline__ void each_piece(const WaveContext<M>& c, int col0, float* state, F f) {
    for (int i = c.tid(); i < KD * WIDE / 4; i += THREADS) {
      const int row = i / (WIDE / 4), col = i % (WIDE / 4) * 4;
      f(reinterpret_cast<float4*>(at(c, STATE + row * PITCH + col)), reinterpret_cast<float4*>(state + row * VD + col0 + col));
    }
  }
};

// The inputs of the last positions of a chunk become those of the past. N: how a model has them. A thread has the same channels of all of them.
template <class N, class M>
__device__ __forceinline__ void keep_inputs(const WaveContext<M>& c, u32 inputs, int head, float* state) {
  const int rows = int(c.p.row_count);
  for (int i = c.tid() * 2; i < N::CHANNELS; i += M::WARPS * 64) {
    float2 kept[N::KEPT];
#pragma unroll
    for (int t = 0; t < N::PAST; t++) {
      const int row = rows - N::PAST + t;
      kept[t] = make_float2(0.f, 0.f);
      if (row >= 0)
        kept[t] = N::input(c, inputs, row, N::column(head, i));
      else if (c.p.position > 0)
        kept[t] = *reinterpret_cast<const float2*>(state + N::MATRIX + (N::PAST + row) * N::CHANNELS + i);
    }
#pragma unroll
    for (int t = 0; t < N::PAST; t++) *reinterpret_cast<float2*>(state + N::MATRIX + t * N::CHANNELS + i) = kept[t];
  }
}

// Of a step: which part of a state S (KD, VD) a thread has: four columns side by side, or one where they are no multiple of that, and some rows. So a thread
// moves 16 bytes at a time, and reads what multiplies a row once for four columns.
template <class M, int KEY_DIM, int VALUE_DIM>
struct WaveColumns {
  static constexpr int THREADS = M::WARPS * 32, VD = VALUE_DIM, KD = KEY_DIM;
  static constexpr int WIDE = VD % 4 == 0 ? 4 : 1, ACROSS = VD / WIDE;
  // Parts of the rows of S, rows of a part, and columns of a thread.
  // No part is empty: each has a sum.
  static constexpr int MOST = THREADS / ACROSS, ROWS = ceil_div(KD, MOST < 1 ? 1 : MOST < KD ? MOST : KD), PARTS = ceil_div(KD, ROWS), COLUMNS = ceil_div(ACROSS, THREADS) * WIDE;
  static constexpr bool AHEAD = ROWS * COLUMNS <= 64; // registers have room for a second state
  typedef float Part[COLUMNS][ROWS];
  typedef float Sums[COLUMNS];

  static __device__ __forceinline__ int part(const WaveContext<M>& c) { return ACROSS > THREADS ? 0 : c.tid() / ACROSS; }
  static __device__ __forceinline__ int column_of(const WaveContext<M>& c, int n) { return (ACROSS > THREADS ? n / WIDE * THREADS + c.tid() : c.tid() % ACROSS) * WIDE + n % WIDE; }
  static __device__ __forceinline__ bool has(const WaveContext<M>& c, int n, int r) {
    // Without predicates where threads fill columns and parts evenly.
    if constexpr (COLUMNS == WIDE && PARTS * ACROSS == THREADS && PARTS * ROWS == KD) return true;
    return part(c) < PARTS && column_of(c, n) < VD && part(c) * ROWS + r < KD;
  }
  static __device__ __forceinline__ int place(const WaveContext<M>& c, int n, int r) { return (part(c) * ROWS + r) * VD + column_of(c, n); }
  // WIDE values side by side.
  static __device__ __forceinline__ void load_wide(const float* from, float (&x)[WIDE]) {
    if constexpr (WIDE == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      x[0] = *from;
    }
  }
  static __device__ __forceinline__ void store_wide(float* to, const float (&x)[WIDE]) {
    if constexpr (WIDE == 4)
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    else
      *to = x[0];
  }
  // `begins`: at position 0 a state counts as zeros.
  static __device__ __forceinline__ void load_part(const WaveContext<M>& c, const float* state, bool begins, Part& s) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += WIDE)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const bool in = has(c, n, r);
        float x[WIDE];
        load_wide(state + (in ? place(c, n, r) : 0), x);
#pragma unroll
        for (int i = 0; i < WIDE; i++) s[n + i][r] = in && !begins ? x[i] : 0.f;
      }
  }
  static __device__ __forceinline__ void store_part(const WaveContext<M>& c, float* state, const Part& s) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += WIDE)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        float x[WIDE];
#pragma unroll
        for (int i = 0; i < WIDE; i++) x[i] = s[n + i][r];
        if (has(c, n, r)) store_wide(state + place(c, n, r), x);
      }
  }
  // Stores the sums over the rows of a part, times a factor: `sums` (PARTS, VD).
  static __device__ __forceinline__ void put_sums(const WaveContext<M>& c, float* sums, const Sums& own, float factor) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += WIDE) {
      float x[WIDE];
#pragma unroll
      for (int i = 0; i < WIDE; i++) x[i] = own[n + i] * factor;
      if (has(c, n, 0)) store_wide(sums + part(c) * VD + column_of(c, n), x);
    }
  }
  // The sums over all parts, of the columns of a thread.
  static __device__ __forceinline__ void totals(const WaveContext<M>& c, const float* sums, Sums& all) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n += WIDE) {
      const int col = has(c, n, 0) ? column_of(c, n) : 0;
#pragma unroll
      for (int i = 0; i < WIDE; i++) all[n + i] = 0.f;
#pragma unroll
      for (int p = 0; p < PARTS; p++) {
        float x[WIDE];
        load_wide(sums + p * VD + col, x);
#pragma unroll
        for (int i = 0; i < WIDE; i++) all[n + i] += x[i];
      }
    }
  }
  // A column's sum over all parts.
  static __device__ __forceinline__ float total(const float* sums, int col) {
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) sum += sums[p * VD + col];
    return sum;
  }
  // Calls f(r, x of row r of the part of a thread, y of it), four rows at a time where they lie so.
  template <class F>
  static __device__ __forceinline__ void each_row(const WaveContext<M>& c, const float* x, const float* y, F f) {
    const int row0 = part(c) * ROWS;
    if constexpr (ROWS % 4 == 0 && PARTS * ROWS == KD && VD % 4 == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; r += 4) {
        const float4 a = *reinterpret_cast<const float4*>(x + row0 + r), b = *reinterpret_cast<const float4*>(y + row0 + r);
        f(r, a.x, b.x), f(r + 1, a.y, b.y), f(r + 2, a.z, b.z), f(r + 3, a.w, b.w);
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (row0 + r < KD) f(r, x[row0 + r], y[row0 + r]);
    }
  }
  // The first share from `s` on whose states are this block's.
  static __device__ __forceinline__ u32 task_from(const WaveContext<M>& c, const HeldShares<M>& shares, u32 s) {
    for (; s < shares.count; s++) {
      const u32 row = shares[s].row;
      if (row < c.p.row_count && uniform(c.state().leads[row]) == 0) break;
    }
    return s;
  }
  // Whether row `row` continues the sequence of the one before.
  static __device__ __forceinline__ bool follows(const WaveContext<M>& c, u32 row) { return row < c.p.row_count && uniform(c.state().leads[row]) > 0; }
  // All tasks of a block: OP brings what a task holds, and computes it. While a block computes, the next state that it needs is on its way to registers.
  template <class OP>
  static __device__ __forceinline__ void each_task(WaveContext<M>& c, const Wave& e) {
    typedef typename OP::Held Held;
    const HeldShares<M> shares(c);
    u32 s = task_from(c, shares, 0);
    if (s >= shares.count) return;
    Held held;
    OP::bring(c, e, shares[s], held);
#pragma unroll 1
    for (;;) {
      const Share share = shares[s];
      s = task_from(c, shares, s + 1);
      if constexpr (AHEAD) {
        Held next;
        if (s < shares.count) OP::bring(c, e, shares[s], next);
        OP::one(c, e, share, held);
        if (s >= shares.count) break;
        held = next;
      } else {
        OP::one(c, e, share, held);
        if (s >= shares.count) break;
        OP::bring(c, e, shares[s], held);
      }
    }
  }
};
