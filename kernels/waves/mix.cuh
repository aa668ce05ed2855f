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

template <class M, class G>
struct WaveNet {
  static constexpr int THREADS = M::WARPS * 32, GROUP = G::VALUE_HEADS / G::KEY_HEADS;
  static constexpr int KEY_COLS = G::KEY_HEADS * G::KEY_DIM, VALUES = G::VALUE_HEADS * G::VALUE_DIM, QKV = 2 * KEY_COLS + VALUES;
  static constexpr int TURNED = QKV + 2 * G::VALUE_HEADS;
  static constexpr int MATRIX = G::KEY_DIM * G::VALUE_DIM, CHANNELS = 2 * G::KEY_DIM + G::VALUE_DIM, PAST = G::KERNEL - 1;
  static constexpr int STATE_COLS = MATRIX + PAST * CHANNELS;
  static constexpr int KEPT = PAST < 1 ? 1 : PAST; // of an array

  static __device__ __forceinline__ float2 input(const WaveContext<M>& c, u32 at, int row, int col) { return wave_columns<G::X_PARTS, G::COLS>(c, at, row, col); }
  static __device__ __forceinline__ float scalar(const WaveContext<M>& c, const Wave& e, int row, int col) {
    const float2 pair = wave_columns<G::SCALAR_PARTS, G::SCALAR_COLS>(c, scalars_of(e), row, col / 2 * 2);
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
    ::load_taps(c.template constant<float>(taps_of(e)) + channel * G::KERNEL, taps);
  }
  // The convolution of two channels, whose past inputs move on.
  static __device__ __forceinline__ float2 convolve(float2 (&past)[KEPT], const float2 (&taps)[G::KERNEL], float2 own) {
    const float2 sum = convolve_pair(past, taps, own);
    return make_float2(activate<Act::SILU>(sum.x), activate<Act::SILU>(sum.y));
  }
  static __device__ __forceinline__ float beta(float b) { return sigmoid(b) * (G::DOUBLES ? 2.f : 1.f); }
  static __device__ __forceinline__ float log_decay(float rate, float x) { return bounded_log(rate * softplus(x)); }
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
template <class M, class G>
struct WaveMix : WaveCarry<M, G::KEY_DIM, G::VALUE_DIM, G::VALUE_DIM / G::PARTS, tiles_at_once(G::VALUE_DIM / G::PARTS / 8), true> {
  typedef WaveNet<M, G> N;
  typedef WaveCarry<M, G::KEY_DIM, G::VALUE_DIM, G::VALUE_DIM / G::PARTS, tiles_at_once(G::VALUE_DIM / G::PARTS / 8), true> C;
  using typename C::Ahead;
  using C::KD, C::ROWS, C::WIDE, C::TILES, C::UNITS, C::Y_WARPS, C::Y_EACH, C::KEYS, C::KEY_PITCH, C::QUERIES, C::SCORES, C::SOLVED, C::SQUARE, C::STATE, C::PITCH;
  using C::WANTED, C::DELTAS, C::at, C::line, C::pair, C::each;
  static_assert(G::VALUE_DIM % G::PARTS == 0 && G::X_PARTS == 0, "whole tiles of all warps");

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
      for (u32 i = share.lo; i < share.hi; i++) one(c.p, e, c.tid(), int(i) / G::PARTS, int(i) % G::PARTS);
    }
    // The loader copies to this memory after the next meeting.
    fence_empty_slot();
  }

  static __device__ __forceinline__ void fetch(const WaveContext<M>& c, const Wave& e, const Task& task, int first, Ahead& a) {
    const int key = task.head / N::GROUP * KD, beta = N::QKV + task.head;
    const typename C::Columns of{N::KEY_COLS + key, key, 2 * N::KEY_COLS + task.value(), beta, beta + G::VALUE_HEADS};
    C::template fetch<N::TURNED>(c, c.template work<float>(e.x), of, first, a);
  }

  // A, transposed, and the weights of D in y: of 16 positions and 16 earlier ones each warp. The other 16 by 16 are above the diagonal.
  static __device__ __forceinline__ void weigh(const WaveContext<M>& c) {
    const int lane = c.lane(), unit = c.warp();
    if (unit >= 6) return;
    const bool scores = unit >= 3;
    const int row0 = unit % 3 == 0 ? 0 : 16, col0 = unit % 3 == 2 ? 16 : 0;
    float d[2][4] = {};
    C::template multiply<KEY_PITCH, 1, 1, KEY_PITCH, false, false>(lane, at(c, (scores ? QUERIES : KEYS) + row0 * KEY_PITCH), at(c, KEYS + col0 * KEY_PITCH), KD / 8, d);
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
      C::template multiply<KEY_PITCH, 1, PITCH, 1, true, false>(lane, at(c, KEYS + row0 * KEY_PITCH), at(c, STATE + col0), KD / 8, d);
      each(lane, d, [&](int r, int col, float x, float y) {
        const float beta = line(c, 1)[row0 + r], decay = line(c, 2)[row0 + r];
        float2& v = pair(at(c, WANTED), row0 + r, col0 + col, PITCH);
        v = make_float2(beta * (v.x - decay * x), beta * (v.y - decay * y));
      });
    }
  }
  // D = R + (T - I) R.
  static __device__ __forceinline__ void correct(const WaveContext<M>& c) {
    const int lane = c.lane();
    for (int unit = c.warp(); unit < UNITS; unit += M::WARPS) {
      const int row0 = unit % 2 * 16, col0 = unit / 2 * (TILES * 8);
      float d[TILES][4] = {};
      C::template multiply<SQUARE, 1, PITCH, 1, true, false>(lane, at(c, SOLVED + row0 * SQUARE), at(c, WANTED + col0), row0 / 8 + 2, d);
      each(lane, d, [&](int r, int col, float x, float y) {
        const float2 own = pair(at(c, WANTED), row0 + r, col0 + col, PITCH);
        pair(at(c, DELTAS), row0 + r, col0 + col, PITCH) = make_float2(own.x + x, own.y + y);
      });
    }
  }
  // A function of its own: what else is in the kernel has no part in which registers it has. Parameters are copied: else each round would load them once more.
  static __device__ __noinline__ void one(const WaveParams& of_launch, const Wave& of_wave, int thread, int head, int part) {
    const WaveParams p = of_launch;
    const Wave e = of_wave;
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(p.work)), __builtin_assume(__isGlobal(p.cache)), __builtin_assume(__isGlobal(p.pack));
#endif
    WaveContext<M> c(p);
    c.thread = thread, c.warp_index = int(uniform(u32(thread) / 32));
    const Task task{head, part};
    float* const state = N::state_of(c, e, 0, task.head);
    const bool begins = c.p.position == 0;
    Ahead ahead;
    fetch(c, e, task, 0, ahead);
    C::each_piece(c, task.part * WIDE, state, [&](float4* here, const float4* there) { *here = begins ? make_float4(0.f, 0.f, 0.f, 0.f) : *there; });
    if (task.part == 0) keep_inputs<N>(c, inputs_of(e), task.head, state);
#pragma unroll 1
    for (int first = 0; first < int(c.p.row_count); first += ROWS) {
      C::place(c, ahead);
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
        C::recall(c, y);
      c.barrier();
      correct(c);
      c.barrier();
      if (c.warp() >= Y_WARPS) {
        float* const out = c.template work<float>(e.out) + task.value();
        C::finish(c, y, [&](int r, int col, float x, float z) {
          if (first + r < int(c.p.row_count)) *reinterpret_cast<float2*>(out + u64(first + r) * N::VALUES + col) = make_float2(x, z);
        });
      }
      C::advance(c);
      c.barrier();
    }
    C::each_piece(c, task.part * WIDE, state, [&](const float4* here, float4* there) { *there = *here; });
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

// Of a step: all of it for the rows of one sequence and a value head, one position after another.
//
// owner    of a state: the block that has the first row of its sequence in the step. Blocks of later rows leave them to it
template <class M, class G>
struct WaveMixRow : WaveColumns<M, G::KEY_DIM, G::VALUE_DIM> {
  typedef WaveNet<M, G> N;
  typedef WaveColumns<M, G::KEY_DIM, G::VALUE_DIM> C;
  using C::THREADS, C::VD, C::KD, C::PARTS, C::COLUMNS, C::column_of, C::total, C::each_row;
  static constexpr int VALUES = N::CHANNELS + VD, SUMS_AT = round_up(VALUES + 2, 4);
  // Pairs of q, k, v and the gate of a head; a thread has pairs tid, tid + THREADS, ..
  static constexpr int PAIRS = (N::CHANNELS + VD) / 2, EACH = ceil_div(PAIRS, THREADS);
  static_assert((SUMS_AT + 2 * PARTS * VD) * sizeof(float) <= M::SCRATCH_BYTES, "scratch holds the values of a head");

  struct Held {
    typename C::Part s;
    float2 past[EACH][N::KEPT], taps[EACH][G::KERNEL], own[EACH];
    float scalar, rate, dt_bias;
  };
  // In scratch: q, k, v after the convolution, and the gate; beta and the decay; two sums of each part and column.
  static __device__ __forceinline__ float* values(const WaveContext<M>& c) { return c.scratch(); }
  static __device__ __forceinline__ float* scalars(const WaveContext<M>& c) { return c.scratch() + VALUES; }
  static __device__ __forceinline__ float* sums(const WaveContext<M>& c, int which) { return c.scratch() + SUMS_AT + which * (PARTS * VD); }
  static __device__ __forceinline__ int first_of(const WaveContext<M>& c, int n) { return (n * THREADS + c.tid()) * 2; }
  static __device__ __forceinline__ bool has_pair(const WaveContext<M>& c, int n) { return PAIRS % THREADS == 0 || n * THREADS + c.tid() < PAIRS; }
  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) { C::template each_task<WaveMixRow>(c, e); }
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
    C::load_part(c, state, begins, held.s);
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
    C::store_part(c, state, held.s);
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
      if (!C::follows(c, row)) break;
      bring_inputs(c, e, int(row), head, held);
    }
    store(c, N::state_of(c, e, share.row, head), held);
  }
  static __device__ __forceinline__ void position(WaveContext<M>& c, const Wave& e, u32 row, int head, Held& held) {
    const float *q = values(c), *k = q + KD, *v = k + KD, *gate = v + VD;
    const float q_scale = unit(c, q) * rsqrtf(float(KD)), k_scale = unit(c, k);
    const float beta = scalars(c)[0], decay = scalars(c)[1];
    typename C::Sums sum = {}, all;
    each_row(c, k, k, [&](int r, float k, float) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        held.s[n][r] *= decay;
        sum[n] += held.s[n][r] * k;
      }
    });
    C::put_sums(c, sums(c, 0), sum, k_scale);
    c.barrier();
    C::totals(c, sums(c, 0), all);
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) {
      all[n] = beta * (v[column_of(c, n) < VD ? column_of(c, n) : 0] - all[n]) * k_scale;
      sum[n] = 0.f;
    }
    each_row(c, k, q, [&](int r, float k, float q) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        held.s[n][r] += k * all[n];
        sum[n] += held.s[n][r] * q;
      }
    });
    C::put_sums(c, sums(c, 1), sum, q_scale);
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
