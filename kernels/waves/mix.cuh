// Owns gated delta nets in waves. The formula is `Mix` of src/ir/op.rs; ops/mix.cuh has it for one position.
//
// A prompt chunk has three waves. `WaveConvolve` makes q, k, v, beta and the decay of every position. `WaveMix` carries the state of each value head
// through the chunk. `WaveGated` norms and gates its output. A step has one wave: `WaveMixRow` does all of it for one position of each sequence.
//
// x (rows, COLS)            q, k, v of all heads, the gate: bf16 row by row, or X_PARTS sums in fp32, (X_PARTS, rows, COLS)
// scalars (rows, ..)        beta and decay from columns BETA_AT and DECAY_AT on, stored likewise; they may be columns of x
// conv (channels, KERNEL), norm (VALUE_DIM), a_log, dt_bias (VALUE_HEADS)   fp32 constants
// state                     of each sequence (slot), for each value head: S (KEY_DIM, VALUE_DIM), then inputs of KERNEL - 1 positions, fp32
// turned (rows, TURNED)     fp32: q and k of unit length, q / sqrt(KEY_DIM), v, beta, the logarithm of the decay
// mixed (rows, VALUES)      fp32: S^T q
// out (rows, VALUES)        bf16, in the layout of the input of products
//
// owner    of a state in a launch: in a chunk one block for some columns of S, which no other column needs; that of the first columns also has the past
//          inputs. In a step one block for all of it, with all rows of the sequence
// assumes  the state in memory is that of the position before. At position 0 it counts as zeros and is not read
//
// Only generated kernels with nets include this. Words of a `Wave` that have other names here:
//   gate          scalars; of `WaveGated` x
//   weight        conv
//   table         a_log
//   branch_weight dt_bias
//   k_cache       state
//   residual      of `WaveMix` x
#pragma once

__device__ __forceinline__ u32 scalars_of(const Wave& e) { return e.gate; }
__device__ __forceinline__ u32 taps_of(const Wave& e) { return e.weight; }
__device__ __forceinline__ u32 a_log_of(const Wave& e) { return e.table; }
__device__ __forceinline__ u32 dt_bias_of(const Wave& e) { return e.branch_weight; }
__device__ __forceinline__ u32 states_of(const Wave& e) { return e.k_cache; }
__device__ __forceinline__ u32 inputs_of(const Wave& e) { return e.residual; }

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

template <class M, class G>
struct WaveNet {
  static constexpr int THREADS = M::WARPS * 32, GROUP = G::VALUE_HEADS / G::KEY_HEADS;
  static constexpr int KEY_COLS = G::KEY_HEADS * G::KEY_DIM, VALUES = G::VALUE_HEADS * G::VALUE_DIM, QKV = 2 * KEY_COLS + VALUES;
  static constexpr int TURNED = QKV + 2 * G::VALUE_HEADS;
  static constexpr int MATRIX = G::KEY_DIM * G::VALUE_DIM, CHANNELS = 2 * G::KEY_DIM + G::VALUE_DIM, PAST = G::KERNEL - 1;
  static constexpr int STATE_COLS = MATRIX + PAST * CHANNELS;
  static constexpr int KEPT = PAST < 1 ? 1 : PAST; // of an array

  // Two columns of what a product has left, rounded to bf16 as it stores them.
  template <int PARTS, int COLS>
  static __device__ __forceinline__ float2 two(const WaveContext<M>& c, u32 at, int row, int col) {
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
  static __device__ __forceinline__ float2 input(const WaveContext<M>& c, u32 at, int row, int col) { return two<G::X_PARTS, G::COLS>(c, at, row, col); }
  static __device__ __forceinline__ float scalar(const WaveContext<M>& c, const Wave& e, int row, int col) {
    const float2 pair = two<G::SCALAR_PARTS, G::SCALAR_COLS>(c, scalars_of(e), row, col / 2 * 2);
    return col % 2 ? pair.y : pair.x;
  }
  // The column of x that has value `i` of q, k, v and the gate of a value head. Of q, k and v it is the channel, too.
  static __device__ __forceinline__ int column(int head, int i) {
    const int key = head / GROUP * G::KEY_DIM;
    if (i < G::KEY_DIM) return key + i;
    if (i < 2 * G::KEY_DIM) return KEY_COLS + key + i - G::KEY_DIM;
    if (i < CHANNELS) return 2 * KEY_COLS + head * G::VALUE_DIM + i - 2 * G::KEY_DIM;
    return QKV + head * G::VALUE_DIM + i - CHANNELS;
  }
  // The taps of a channel and the next one.
  static __device__ __forceinline__ void load_taps(const WaveContext<M>& c, const Wave& e, int channel, float2 (&taps)[G::KERNEL]) {
    const float* from = c.template constant<float>(taps_of(e)) + channel * G::KERNEL;
    if constexpr (G::KERNEL == 4) {
      const float4 a = __ldg(reinterpret_cast<const float4*>(from)), b = __ldg(reinterpret_cast<const float4*>(from) + 1);
      taps[0] = make_float2(a.x, b.x), taps[1] = make_float2(a.y, b.y), taps[2] = make_float2(a.z, b.z), taps[3] = make_float2(a.w, b.w);
    } else {
#pragma unroll
      for (int t = 0; t < G::KERNEL; t++) taps[t] = make_float2(__ldg(from + t), __ldg(from + G::KERNEL + t));
    }
  }
  // The convolution of two channels, whose past inputs move on.
  static __device__ __forceinline__ float2 convolve(float2 (&past)[KEPT], const float2 (&taps)[G::KERNEL], float2 own) {
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int t = 0; t < PAST; t++) {
      sum.x += past[t].x * taps[t].x, sum.y += past[t].y * taps[t].y;
      past[t] = t + 1 < PAST ? past[t + 1 < PAST ? t + 1 : t] : own;
    }
    sum.x += own.x * taps[PAST].x, sum.y += own.y * taps[PAST].y;
    return make_float2(activate<Act::SILU>(sum.x), activate<Act::SILU>(sum.y));
  }
  static __device__ __forceinline__ float beta(float b) { return sigmoid(b) * (G::DOUBLES ? 2.f : 1.f); }
  // The logarithm of a decay. e^-104 is 0, so a smaller one would only cost digits of sums. Precise functions: a decay is applied again at every position.
  static __device__ __forceinline__ float log_decay(float rate, float x) {
    const float softplus = x > 0.f ? x + log1pf(expf(-x)) : log1pf(expf(x)), y = rate * softplus;
    return y < -104.f ? -104.f : y;
  }
  static __device__ __forceinline__ float rate(const WaveContext<M>& c, const Wave& e, int head) { return -expf(__ldg(c.template constant<float>(a_log_of(e)) + head)); }
  static __device__ __forceinline__ float dt_bias(const WaveContext<M>& c, const Wave& e, int head) { return __ldg(c.template constant<float>(dt_bias_of(e)) + head); }
  // The state of a head of the sequence of a row.
  static __device__ __forceinline__ float* state_of(const WaveContext<M>& c, const Wave& e, u32 row, int head) {
    const u32 slot = __ldg(&c.p.rows[row].slot);
    return reinterpret_cast<float*>(c.p.cache + u64(states_of(e)) * OFFSET_BYTES) + (u64(slot) * G::VALUE_HEADS + head) * STATE_COLS;
  }
};

// Of a chunk: the convolution, unit lengths, beta and the decay.
//
// owner    of a row: one block. A warp has a head of q, of k or of v
template <class M, class G>
struct WaveConvolve {
  typedef WaveNet<M, G> N;
  static constexpr int UNITS = 2 * G::KEY_HEADS + G::VALUE_HEADS, WIDEST = G::KEY_DIM < G::VALUE_DIM ? G::VALUE_DIM : G::KEY_DIM;
  static constexpr int EACH = ceil_div(WIDEST, 64), AT_ONCE = 2, ROWS = 4; // pairs of a lane; units and rows that a warp loads at once

  // A head of q, k or v.
  struct Unit {
    int column, dim, head, at; // its first column, columns, a value head that has it, and where that has it among its channels
    bool is_key, is_query;
    __device__ __forceinline__ explicit Unit(int n) {
      is_query = n < G::KEY_HEADS, is_key = n < 2 * G::KEY_HEADS;
      const int value = n - 2 * G::KEY_HEADS;
      dim = is_key ? G::KEY_DIM : G::VALUE_DIM;
      column = is_key ? n * G::KEY_DIM : 2 * N::KEY_COLS + value * G::VALUE_DIM;
      head = is_key ? n % G::KEY_HEADS * N::GROUP : value;
      at = is_query ? 0 : is_key ? G::KEY_DIM : 2 * G::KEY_DIM;
    }
  };

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const int row = int(share.row), end = int(min(share.row + share.rows, c.p.row_count));
      if (row >= end) continue;
#pragma unroll 1
      for (int first = c.warp(); first < UNITS; first += AT_ONCE * M::WARPS) units(c, e, first, row, end);
      scalars(c, e, row, end);
    }
  }
  static __device__ __forceinline__ void scalars(const WaveContext<M>& c, const Wave& e, int first, int end) {
    float* const out = c.template work<float>(e.out);
    for (int i = c.tid(); i < (end - first) * G::VALUE_HEADS; i += N::THREADS) {
      const int row = first + i / G::VALUE_HEADS, head = i % G::VALUE_HEADS;
      float* const to = out + u64(row) * N::TURNED + N::QKV + head;
      to[0] = N::beta(N::scalar(c, e, row, G::BETA_AT + head));
      to[G::VALUE_HEADS] = N::log_decay(N::rate(c, e, head), N::scalar(c, e, row, G::DECAY_AT + head) + N::dt_bias(c, e, head));
    }
  }
  // Units `first`, `first + WARPS`, .. of rows `row` to `end`.
  static __device__ __forceinline__ void units(const WaveContext<M>& c, const Wave& e, int first, int row, int end) {
    const int lane = c.lane();
    float2 past[AT_ONCE][EACH][N::KEPT], taps[AT_ONCE][EACH][G::KERNEL];
    const auto has = [&](const Unit& unit, int n) { return n * 64 + lane * 2 < unit.dim; };
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      const Unit unit(min(first + u * M::WARPS, UNITS - 1));
      const float* state = N::state_of(c, e, 0, unit.head) + N::MATRIX + unit.at;
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        const int col = has(unit, n) ? n * 64 + lane * 2 : 0;
        N::load_taps(c, e, unit.column + col, taps[u][n]);
#pragma unroll
        for (int t = 0; t < N::PAST; t++) {
          const int at = row - N::PAST + t; // before the chunk: an input that the state has
          past[u][n][t] = make_float2(0.f, 0.f);
          if (at >= 0)
            past[u][n][t] = N::input(c, e.x, at, unit.column + col);
          else if (c.p.position > 0)
            past[u][n][t] = *reinterpret_cast<const float2*>(state + (N::PAST + at) * N::CHANNELS + col);
        }
      }
    }
#pragma unroll 1
    for (int base = row; base < end; base += ROWS) {
      float2 own[AT_ONCE][EACH][ROWS];
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        const Unit unit(min(first + u * M::WARPS, UNITS - 1));
#pragma unroll
        for (int n = 0; n < EACH; n++)
#pragma unroll
          for (int r = 0; r < ROWS; r++) own[u][n][r] = N::input(c, e.x, min(base + r, end - 1), unit.column + (has(unit, n) ? n * 64 + lane * 2 : 0));
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        const Unit unit(min(first + u * M::WARPS, UNITS - 1));
        const bool exists = first + u * M::WARPS < UNITS;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          float2 y[EACH];
          float squares = 0.f;
#pragma unroll
          for (int n = 0; n < EACH; n++) {
            y[n] = N::convolve(past[u][n], taps[u][n], own[u][n][r]);
            if (has(unit, n)) squares += y[n].x * y[n].x + y[n].y * y[n].y;
          }
          const float length = rsqrtf(warp_sum(squares) + 1e-6f);
          const float by = unit.is_query ? length * rsqrtf(float(G::KEY_DIM)) : unit.is_key ? length : 1.f;
          float* const out = c.template work<float>(e.out) + u64(base + r) * N::TURNED + unit.column;
#pragma unroll
          for (int n = 0; n < EACH; n++)
            if (exists && base + r < end && has(unit, n)) *reinterpret_cast<float2*>(out + n * 64 + lane * 2) = make_float2(y[n].x * by, y[n].y * by);
        }
      }
    }
  }
};

// Of a chunk: the state of a value head, some columns of it, through all positions, ROWS at a time (arXiv 2412.06464, chunk form).
//
// With g_i the sum of log decays of the ROWS up to i, and S the state before them:
//   A_ij  = beta_i e^(g_i - g_j) (k_i . k_j) for j < i, else 0;    T = (I + A)^-1
//   R_i   = beta_i (v_i - e^(g_i) S^T k_i);                        D = T R, which the positions add to the state
//   y_i   = e^(g_i) S^T q_i + sum over j <= i of e^(g_i - g_j) (q_i . k_j) D_j
//   S     = e^(g_last) S + sum over j of e^(g_last - g_j) k_j D_j^T
// No exponent is above 0. Products take operands in tf32 and add up in fp32. S, g, R, D and T are fp32; of T the part below the diagonal is
// rounded as an operand. Positions beyond the end of the chunk have zeros, which change nothing.
//
// owner    of WIDE columns of a head: one block. Warp 0 solves while warps 1 to 3 make R and warps 4 to 7 begin y
// assumes  nothing is on its way to the ring of inputs: its memory, and the scratch after it, hold the operands. Copies to that ring wait for the next meeting
template <class M, class G>
struct WaveMix {
  typedef WaveNet<M, G> N;
  static constexpr int ROWS = 32, KD = G::KEY_DIM, WIDE = G::VALUE_DIM / G::PARTS, THREADS = N::THREADS;
  static_assert(M::WARPS == 8 && KD % 16 == 0 && WIDE % 8 == 0 && G::VALUE_DIM % G::PARTS == 0 && G::X_PARTS == 0, "whole tiles of all warps");
  // Rows of four lanes, and columns of eight, lie in different banks.
  static constexpr int KEY_PITCH = KD + (36 - KD % 32) % 32, PITCH = WIDE % 16 == 8 ? WIDE : WIDE + 8, SQUARE = ROWS + 4;
  static constexpr int KEYS = 0, QUERIES = KEYS + ROWS * KEY_PITCH, SOLVED = QUERIES + ROWS * KEY_PITCH, SCORES = SOLVED + ROWS * SQUARE;
  static constexpr int STATE = SCORES + ROWS * SQUARE, WANTED = STATE + KD * PITCH, DELTAS = WANTED + ROWS * PITCH, LINES = DELTAS + ROWS * PITCH;
  static constexpr int BYTES = (LINES + 4 * ROWS) * 4;
  static_assert(BYTES <= M::INPUT_SLOTS * M::INPUT_BYTES + M::SCRATCH_BYTES && M::SCRATCH_AT == M::INPUT_AT + M::INPUT_SLOTS * M::INPUT_BYTES, "the ring of inputs and the scratch hold it");
  // Tiles of eight columns that a warp multiplies at once, and such groups.
  static constexpr int TILES_ALL = WIDE / 8, TILES = TILES_ALL % 4 == 0 ? 4 : TILES_ALL % 3 == 0 ? 3 : TILES_ALL % 2 == 0 ? 2 : 1, GROUPS = TILES_ALL / TILES;
  static constexpr int UNITS = 2 * GROUPS, Y_WARPS = 4, Y_EACH = ceil_div(UNITS, Y_WARPS); // of 16 positions by a group
  static constexpr int KEY_EACH = ceil_div(ROWS * KD / 4, THREADS), VALUE_EACH = ceil_div(ROWS * WIDE / 4, THREADS);

  static __device__ __forceinline__ float* at(const WaveContext<M>& c, int place) { return reinterpret_cast<float*>(c.memory() + M::INPUT_AT) + place; }
  // Of each position: g, beta, e^g, and e^(g_last - g).
  static __device__ __forceinline__ float* line(const WaveContext<M>& c, int which) { return at(c, LINES + which * ROWS); }

  // What a thread brings of the next positions.
  struct Ahead {
    float4 queries[KEY_EACH], keys[KEY_EACH], values[VALUE_EACH];
    float beta, decay;
  };
  // A block's columns of a head.
  struct Task {
    int head, part;
    __device__ __forceinline__ int value() const { return head * G::VALUE_DIM + part * WIDE; }
  };

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
#pragma unroll 1
      for (u32 i = share.lo; i < share.hi; i++) one(c, e, Task{int(i) / G::PARTS, int(i) % G::PARTS});
    }
    // The loader copies to this memory after the next meeting.
    fence_empty_slot();
  }

  static __device__ __forceinline__ void fetch(const WaveContext<M>& c, const Wave& e, const Task& task, int first, Ahead& a) {
    const float* const from = c.template work<float>(e.x);
    const int end = int(c.p.row_count), key = task.head / N::GROUP * KD, value = 2 * N::KEY_COLS + task.value();
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
    for (int n = 0; n < KEY_EACH; n++) {
      const int i = n * THREADS + c.tid(), row = first + i / (KD / 4);
      const bool live = i < ROWS * KD / 4 && row < end;
      const float* p = from + u64(live ? row : 0) * N::TURNED + key + i % (KD / 4) * 4;
      a.queries[n] = live ? *reinterpret_cast<const float4*>(p) : none;
      a.keys[n] = live ? *reinterpret_cast<const float4*>(p + N::KEY_COLS) : none;
    }
#pragma unroll
    for (int n = 0; n < VALUE_EACH; n++) {
      const int i = n * THREADS + c.tid(), row = first + i / (WIDE / 4);
      const bool live = i < ROWS * WIDE / 4 && row < end;
      a.values[n] = live ? *reinterpret_cast<const float4*>(from + u64(row) * N::TURNED + value + i % (WIDE / 4) * 4) : none;
    }
    a.beta = a.decay = 0.f;
    if (c.warp() == 0 && first + c.lane() < end) {
      const float* p = from + u64(first + c.lane()) * N::TURNED + N::QKV + task.head;
      a.beta = p[0], a.decay = p[G::VALUE_HEADS];
    }
  }
  static __device__ __forceinline__ float4 rounded(const float4& v) { return make_float4(to_tf32(v.x), to_tf32(v.y), to_tf32(v.z), to_tf32(v.w)); }
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
      float g = a.decay;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        const float before = __shfl_up_sync(~0u, g, o);
        if (lane >= o) g += before;
      }
      line(c, 0)[lane] = g;
      line(c, 1)[lane] = a.beta;
      line(c, 2)[lane] = expf(g);
      line(c, 3)[lane] = expf(__shfl_sync(~0u, g, 31) - g);
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

  // A, transposed, and the weights of D in y: of 16 positions and 16 earlier ones each warp. The other 16 by 16 are above the diagonal.
  static __device__ __forceinline__ void weigh(const WaveContext<M>& c) {
    const int lane = c.lane(), unit = c.warp();
    if (unit >= 6) return;
    const bool scores = unit >= 3;
    const int row0 = unit % 3 == 0 ? 0 : 16, col0 = unit % 3 == 2 ? 16 : 0;
    float d[2][4] = {};
    multiply<KEY_PITCH, 1, 1, KEY_PITCH, false, false>(lane, at(c, (scores ? QUERIES : KEYS) + row0 * KEY_PITCH), at(c, KEYS + col0 * KEY_PITCH), KD / 8, d);
    const float *g = line(c, 0), *beta = line(c, 1);
    each(lane, d, [&](int r, int col, float x, float y) {
      const int i = row0 + r, j = col0 + col;
      x *= j <= i ? exp_fast(g[i] - g[j]) : 0.f;
      y *= j + 1 <= i ? exp_fast(g[i] - g[j + 1]) : 0.f;
      if (scores) {
        pair(at(c, SCORES), i, j, SQUARE) = make_float2(to_tf32(x), to_tf32(y));
      } else {
        at(c, SOLVED)[j * SQUARE + i] = beta[i] * x;
        at(c, SOLVED)[(j + 1) * SQUARE + i] = beta[i] * y;
      }
    });
  }
  // By a warp: T - I in place of A. A lane has a column, and takes each row from all later ones once it is known.
  static __device__ __forceinline__ void solve(const WaveContext<M>& c) {
    const int lane = c.lane();
    float* const a = at(c, SOLVED);
    float t[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) t[r] = r == lane ? 1.f : 0.f;
#pragma unroll
    for (int i = 0; i < ROWS - 1; i++)
#pragma unroll
      for (int q = (i + 1) / 4; q < ROWS / 4; q++) {
        const float4 v = *reinterpret_cast<const float4*>(a + i * SQUARE + q * 4);
        const float each[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (q * 4 + k > i) t[q * 4 + k] -= each[k] * t[i];
      }
    __syncwarp(); // every lane has read A
#pragma unroll
    for (int r = 0; r < ROWS; r++) a[r * SQUARE + lane] = r == lane ? 0.f : to_tf32(t[r]);
  }
  // R in place of v.
  static __device__ __forceinline__ void want(const WaveContext<M>& c) {
    const int lane = c.lane();
    for (int unit = c.warp() - 1; unit < UNITS; unit += Y_WARPS - 1) {
      const int row0 = unit % 2 * 16, col0 = unit / 2 * (TILES * 8);
      float d[TILES][4] = {};
      multiply<KEY_PITCH, 1, PITCH, 1, true, false>(lane, at(c, KEYS + row0 * KEY_PITCH), at(c, STATE + col0), KD / 8, d);
      each(lane, d, [&](int r, int col, float x, float y) {
        const float beta = line(c, 1)[row0 + r], decay = line(c, 2)[row0 + r];
        float2& v = pair(at(c, WANTED), row0 + r, col0 + col, PITCH);
        v = make_float2(beta * (v.x - decay * x), beta * (v.y - decay * y));
      });
    }
  }
  // What y has of the state before the positions.
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
  // D = R + (T - I) R.
  static __device__ __forceinline__ void correct(const WaveContext<M>& c) {
    const int lane = c.lane();
    for (int unit = c.warp(); unit < UNITS; unit += M::WARPS) {
      const int row0 = unit % 2 * 16, col0 = unit / 2 * (TILES * 8);
      float d[TILES][4] = {};
      multiply<SQUARE, 1, PITCH, 1, true, false>(lane, at(c, SOLVED + row0 * SQUARE), at(c, WANTED + col0), row0 / 8 + 2, d);
      each(lane, d, [&](int r, int col, float x, float y) {
        const float2 own = pair(at(c, WANTED), row0 + r, col0 + col, PITCH);
        pair(at(c, DELTAS), row0 + r, col0 + col, PITCH) = make_float2(own.x + x, own.y + y);
      });
    }
  }
  static __device__ __forceinline__ void finish(const WaveContext<M>& c, const Wave& e, const Task& task, int first, float (&y)[Y_EACH][TILES][4]) {
    const int lane = c.lane();
#pragma unroll
    for (int n = 0; n < Y_EACH; n++) {
      const int unit = c.warp() - Y_WARPS + n * Y_WARPS, row0 = unit % 2 * 16, col0 = unit / 2 * (TILES * 8);
      if (unit >= UNITS) continue;
      multiply<SQUARE, 1, PITCH, 1, true, false>(lane, at(c, SCORES + row0 * SQUARE), at(c, DELTAS + col0), row0 / 8 + 2, y[n]);
      float* const out = c.template work<float>(e.out) + task.value() + col0;
      each(lane, y[n], [&](int r, int col, float x, float z) {
        const int row = first + row0 + r;
        if (row < int(c.p.row_count)) *reinterpret_cast<float2*>(out + u64(row) * N::VALUES + col) = make_float2(x, z);
      });
    }
  }
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
  // Calls f(piece in shared memory, piece in memory) for all 16 bytes of the columns of S.
  template <class F>
  static __device__ __forceinline__ void each_piece(const WaveContext<M>& c, const Task& task, float* state, F f) {
    for (int i = c.tid(); i < KD * WIDE / 4; i += THREADS) {
      const int row = i / (WIDE / 4), col = i % (WIDE / 4) * 4;
      f(reinterpret_cast<float4*>(at(c, STATE + row * PITCH + col)), reinterpret_cast<float4*>(state + row * G::VALUE_DIM + task.part * WIDE + col));
    }
  }
  // The inputs of the last positions become those of the past. A thread has the same channels of all of them.
  static __device__ __forceinline__ void keep_inputs(const WaveContext<M>& c, const Wave& e, int head, float* state) {
    const int rows = int(c.p.row_count);
    for (int i = c.tid() * 2; i < N::CHANNELS; i += THREADS * 2) {
      float2 kept[N::KEPT];
#pragma unroll
      for (int t = 0; t < N::PAST; t++) {
        const int row = rows - N::PAST + t;
        kept[t] = make_float2(0.f, 0.f);
        if (row >= 0)
          kept[t] = N::input(c, inputs_of(e), row, N::column(head, i));
        else if (c.p.position > 0)
          kept[t] = *reinterpret_cast<const float2*>(state + N::MATRIX + (N::PAST + row) * N::CHANNELS + i);
      }
#pragma unroll
      for (int t = 0; t < N::PAST; t++) *reinterpret_cast<float2*>(state + N::MATRIX + t * N::CHANNELS + i) = kept[t];
    }
  }

  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, const Task& task) {
    float* const state = N::state_of(c, e, 0, task.head);
    const bool begins = c.p.position == 0;
    Ahead ahead;
    fetch(c, e, task, 0, ahead);
    each_piece(c, task, state, [&](float4* here, const float4* there) { *here = begins ? make_float4(0.f, 0.f, 0.f, 0.f) : *there; });
    if (task.part == 0) keep_inputs(c, e, task.head, state);
#pragma unroll 1
    for (int first = 0; first < int(c.p.row_count); first += ROWS) {
      place(c, ahead);
      fetch(c, e, task, first + ROWS, ahead);
      c.barrier();
      weigh(c);
      c.barrier();
      float y[Y_EACH][TILES][4];
      if (c.warp() == 0)
        solve(c);
      else if (c.warp() < Y_WARPS)
        want(c);
      else
        recall(c, y);
      c.barrier();
      correct(c);
      c.barrier();
      if (c.warp() >= Y_WARPS) finish(c, e, task, first, y);
      advance(c);
      c.barrier();
    }
    each_piece(c, task, state, [&](const float4* here, float4* there) { *there = *here; });
    c.barrier(); // the next task has its columns there
  }
};

// Of a chunk: out = rms_norm(mixed) * silu(gate), head by head.
//
// owner    of a row: one block. A warp has a head
template <class M, class G>
struct WaveGated {
  typedef WaveNet<M, G> N;
  static constexpr int EACH = ceil_div(G::VALUE_DIM, 64), ROUNDS = 4; // pairs of a lane, and heads that a warp loads at once

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    float2 gains[EACH];
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int d = n * 64 + c.lane() * 2;
      gains[n] = d < G::VALUE_DIM ? __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.norm_weight) + d)) : make_float2(0.f, 0.f);
    }
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const int end = int(min(share.row + share.rows, c.p.row_count)), all = (end - int(share.row)) * G::VALUE_HEADS;
#pragma unroll 1
      for (int first = c.warp(); first < all; first += ROUNDS * M::WARPS) heads(c, e, int(share.row), first, all, gains);
    }
  }
  // Heads `first`, `first + WARPS`, .. of all rows of a share.
  static __device__ __forceinline__ void heads(const WaveContext<M>& c, const Wave& e, int row0, int first, int all, const float2 (&gains)[EACH]) {
    float2 y[ROUNDS][EACH], gate[ROUNDS][EACH];
    const auto each_pair = [&](auto f) {
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) {
        const int at = min(first + i * M::WARPS, all - 1), row = row0 + at / G::VALUE_HEADS, head = at % G::VALUE_HEADS;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
          const int d = n * 64 + c.lane() * 2;
          f(i, n, row, head * G::VALUE_DIM + (d < G::VALUE_DIM ? d : 0), d < G::VALUE_DIM && first + i * M::WARPS < all);
        }
      }
    };
    each_pair([&](int i, int n, int row, int col, bool live) {
      y[i][n] = *reinterpret_cast<const float2*>(c.template work<float>(e.x) + u64(row) * N::VALUES + col);
      gate[i][n] = N::input(c, e.gate, row, N::QKV + col);
      if (!live) y[i][n] = make_float2(0.f, 0.f);
    });
    float factor[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      float squares = 0.f;
#pragma unroll
      for (int n = 0; n < EACH; n++) squares += y[i][n].x * y[i][n].x + y[i][n].y * y[i][n].y;
      factor[i] = rsqrtf(warp_sum(squares) * (1.f / G::VALUE_DIM) + G::EPS);
    }
    each_pair([&](int i, int n, int row, int col, bool live) {
      const float a = y[i][n].x * factor[i] * gains[n].x * activate<Act::SILU>(gate[i][n].x);
      const float b = y[i][n].y * factor[i] * gains[n].y * activate<Act::SILU>(gate[i][n].y);
      if (live) *reinterpret_cast<u32*>(c.template work<u8>(e.out) + OutPlace<M, G, N::VALUES>::at(u32(row), u32(col))) = bf16_pair(a, b);
    });
  }
};

// Of a step: all of it for the rows of one sequence and a value head, one position after another. Threads share the columns of S, and parts of its rows
// where there are more threads than columns, as in ops/mix.cuh. While a block computes, the next state that it needs is on its way to registers.
//
// owner    of a state: the block that has the first row of its sequence in the step. Blocks of later rows leave them to it
template <class M, class G>
struct WaveMixRow {
  typedef WaveNet<M, G> N;
  static constexpr int THREADS = N::THREADS, VD = G::VALUE_DIM, KD = G::KEY_DIM;
  // Parts of the rows of S, rows of a part, and columns of a thread.
  // No part is empty: each has a sum.
  static constexpr int MOST = THREADS / VD, ROWS = ceil_div(KD, MOST < 1 ? 1 : MOST < KD ? MOST : KD), PARTS = ceil_div(KD, ROWS), COLUMNS = ceil_div(VD, THREADS);
  // Pairs of q, k, v and the gate of a head; a thread has pairs tid, tid + THREADS, ..
  static constexpr int PAIRS = (N::CHANNELS + VD) / 2, EACH = ceil_div(PAIRS, THREADS);
  static constexpr bool AHEAD = ROWS * COLUMNS <= 64; // registers have room for a second state
  static_assert((N::CHANNELS + VD + 2 + 2 * PARTS * VD) * sizeof(float) <= M::SCRATCH_BYTES, "scratch holds the values of a head");

  struct Held {
    float s[COLUMNS][ROWS];
    float2 past[EACH][N::KEPT], taps[EACH][G::KERNEL], own[EACH];
    float scalar, rate, dt_bias;
  };
  // In scratch: q, k, v after the convolution, and the gate; beta and the decay; two sums of each part and column.
  static __device__ __forceinline__ float* values(const WaveContext<M>& c) { return c.scratch(); }
  static __device__ __forceinline__ float* scalars(const WaveContext<M>& c) { return c.scratch() + N::CHANNELS + VD; }
  static __device__ __forceinline__ float* sums(const WaveContext<M>& c, int which) { return scalars(c) + 2 + which * (PARTS * VD); }
  static __device__ __forceinline__ int first_of(const WaveContext<M>& c, int n) { return (n * THREADS + c.tid()) * 2; }
  static __device__ __forceinline__ bool has_pair(const WaveContext<M>& c, int n) { return PAIRS % THREADS == 0 || n * THREADS + c.tid() < PAIRS; }
  static __device__ __forceinline__ int part(const WaveContext<M>& c) { return COLUMNS > 1 ? 0 : c.tid() / VD; }
  static __device__ __forceinline__ int column_of(const WaveContext<M>& c, int n) { return COLUMNS > 1 ? n * THREADS + c.tid() : c.tid() % VD; }
  static __device__ __forceinline__ bool has(const WaveContext<M>& c, int n, int r) {
    // Without predicates where threads fill columns and parts evenly.
    if constexpr (COLUMNS == 1 && PARTS * VD == THREADS && PARTS * ROWS == KD) return true;
    return part(c) < PARTS && column_of(c, n) < VD && part(c) * ROWS + r < KD;
  }
  static __device__ __forceinline__ int place(const WaveContext<M>& c, int n, int r) { return (part(c) * ROWS + r) * VD + column_of(c, n); }

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  // The first share from `s` on whose states are this block's.
  static __device__ __forceinline__ u32 task_from(const WaveContext<M>& c, const HeldShares<M>& shares, u32 s) {
    for (; s < shares.count; s++) {
      const u32 row = shares[s].row;
      if (row < c.p.row_count && uniform(c.state().leads[row]) == 0) break;
    }
    return s;
  }
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 s = task_from(c, shares, 0);
    if (s >= shares.count) return;
    Held held;
    bring(c, e, shares[s], held);
#pragma unroll 1
    for (;;) {
      const Share share = shares[s];
      s = task_from(c, shares, s + 1);
      if constexpr (AHEAD) {
        Held next;
        if (s < shares.count) bring(c, e, shares[s], next);
        one(c, e, share, held);
        if (s >= shares.count) break;
        held = next;
      } else {
        one(c, e, share, held);
        if (s >= shares.count) break;
        bring(c, e, shares[s], held);
      }
    }
  }
  static __device__ __forceinline__ void bring_inputs(const WaveContext<M>& c, const Wave& e, int row, int head, Held& held) {
#pragma unroll
    for (int n = 0; n < EACH; n++) held.own[n] = has_pair(c, n) ? N::input(c, e.x, row, N::column(head, first_of(c, n))) : make_float2(0.f, 0.f);
    held.scalar = c.tid() < 2 ? N::scalar(c, e, row, (c.tid() == 0 ? G::BETA_AT : G::DECAY_AT) + head) : 0.f;
  }
  // The state before a row, its inputs and the constants of a head, all on their way at once.
  static __device__ __forceinline__ void bring(const WaveContext<M>& c, const Wave& e, const Share& share, Held& held) {
    const int head = int(share.lo);
    const float* const state = N::state_of(c, e, share.row, head);
    const bool begins = wave_position<M>(c.p, c.step, share.row) == 0;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        const bool in = has(c, n, r);
        const float x = state[in ? place(c, n, r) : 0];
        held.s[n][r] = in && !begins ? x : 0.f;
      }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const bool in = has_pair(c, n) && first_of(c, n) < N::CHANNELS;
      N::load_taps(c, e, in ? N::column(head, first_of(c, n)) : 0, held.taps[n]);
#pragma unroll
      for (int t = 0; t < N::PAST; t++) {
        const float2 x = *reinterpret_cast<const float2*>(state + N::MATRIX + t * N::CHANNELS + (in ? first_of(c, n) : 0));
        held.past[n][t] = in && !begins ? x : make_float2(0.f, 0.f);
      }
    }
    held.rate = N::rate(c, e, head), held.dt_bias = N::dt_bias(c, e, head);
    bring_inputs(c, e, int(share.row), head, held);
  }
  static __device__ __forceinline__ void store(const WaveContext<M>& c, float* state, const Held& held) {
#pragma unroll
    for (int n = 0; n < COLUMNS; n++)
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (has(c, n, r)) state[place(c, n, r)] = held.s[n][r];
#pragma unroll
    for (int n = 0; n < EACH; n++)
#pragma unroll
      for (int t = 0; t < N::PAST; t++)
        if (has_pair(c, n) && first_of(c, n) < N::CHANNELS) *reinterpret_cast<float2*>(state + N::MATRIX + t * N::CHANNELS + first_of(c, n)) = held.past[n][t];
  }
  // What a vector of KEY_DIM values is multiplied by to have length 1, by each warp for itself.
  static __device__ __forceinline__ float unit(const WaveContext<M>& c, const float* x) {
    float squares = 0.f;
    for (int d = c.lane(); d < KD; d += 32) squares += x[d] * x[d];
    return rsqrtf(warp_sum(squares) + 1e-6f);
  }
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
    if constexpr (ROWS % 4 == 0 && PARTS * ROWS == KD) {
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
  // All rows of the sequence that begins at the row of a share.
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, const Share& share, Held& held) {
    const int head = int(share.lo);
#pragma unroll 1
    for (u32 row = share.row;;) {
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        if (!has_pair(c, n)) continue;
        float2 y = held.own[n];
        if (first_of(c, n) < N::CHANNELS) y = N::convolve(held.past[n], held.taps[n], y);
        *reinterpret_cast<float2*>(values(c) + first_of(c, n)) = y;
      }
      if (c.tid() == 0) scalars(c)[0] = N::beta(held.scalar);
      if (c.tid() == 1) scalars(c)[1] = expf(N::log_decay(held.rate, held.scalar + held.dt_bias));
      c.barrier();
      position(c, e, row, head, held);
      row++;
      if (row >= c.p.row_count || uniform(c.state().leads[row]) == 0) break;
      bring_inputs(c, e, int(row), head, held);
    }
    store(c, N::state_of(c, e, share.row, head), held);
  }
  static __device__ __forceinline__ void position(WaveContext<M>& c, const Wave& e, u32 row, int head, Held& held) {
    const float *q = values(c), *k = q + KD, *v = k + KD, *gate = v + VD;
    const float q_scale = unit(c, q) * rsqrtf(float(KD)), k_scale = unit(c, k);
    const float beta = scalars(c)[0], decay = scalars(c)[1];
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      if (!has(c, n, 0)) continue;
      float sum = 0.f;
      each_row(c, k, k, [&](int r, float k, float) {
        held.s[n][r] *= decay;
        sum += held.s[n][r] * k;
      });
      sums(c, 0)[part(c) * VD + column_of(c, n)] = sum * k_scale;
    }
    c.barrier();
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      if (!has(c, n, 0)) continue;
      const int col = column_of(c, n);
      const float delta = beta * (v[col] - total(sums(c, 0), col)) * k_scale;
      float sum = 0.f;
      each_row(c, k, q, [&](int r, float k, float q) {
        held.s[n][r] += k * delta;
        sum += held.s[n][r] * q;
      });
      sums(c, 1)[part(c) * VD + col] = sum * q_scale;
    }
    c.barrier();
    float squares = 0.f;
    for (int d = c.lane(); d < VD; d += 32) {
      const float y = total(sums(c, 1), d);
      squares += y * y;
    }
    const float factor = rsqrtf(warp_sum(squares) * (1.f / VD) + G::EPS);
    const float* const gains = c.template constant<float>(e.norm_weight);
    for (int d = c.tid() * 2; d < VD; d += THREADS * 2) {
      float out[2];
#pragma unroll
      for (int h = 0; h < 2; h++) out[h] = total(sums(c, 1), d + h) * factor * __ldg(gains + d + h) * activate<Act::SILU>(gate[d + h]);
      *reinterpret_cast<u32*>(c.template work<u8>(e.out) + OutPlace<M, G, N::VALUES>::at(row, u32(head * VD + d))) = bf16_pair(out[0], out[1]);
    }
    c.barrier(); // the next position has its values and sums there
  }
};
