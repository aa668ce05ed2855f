// Owns Mamba-2 in waves. The formula is `Scan` of src/ir/op.rs; ops/scan.cuh has it for one position.
//
// A prompt chunk has two waves, and a step one: `WaveScanInputs` makes x, b, c, the steps and decays of every position, `WaveScan` carries the state of each
// head through the chunk, and `WaveScanRow` does both for the positions of each sequence. Where no norm follows (GATED), they gate the output, too.
// Else `WaveGateNorm` norms and gates it.
//
// x (rows, COLS)            gate, x, b, c and step of all heads, one after another: bf16 row by row, or X_PARTS sums in fp32, (X_PARTS, rows, COLS)
// conv (channels, KERNEL), bias (channels)   fp32 constants, channels of x, b and c in turn; no bias unless BIAS
// a_log, d, dt_bias (HEADS)                  fp32 constants
// state                     of each sequence (slot), for each head: S (STATE, HEAD_DIM), then inputs of KERNEL - 1 positions, fp32
// turned (rows, TURNED)     fp32: x, b, c, the step, and the logarithm of the decay
// mixed (rows, INNER)       fp32: S^T c + d x
// out (rows, INNER)         bf16, in the layout of the input of products
//
// owner    of a state in a launch: in a chunk one block for some columns of S, which no other column needs; that of the first columns also has the past
//          inputs. In a step one block for all of it, with all rows of the sequence
// assumes  the state in memory is that of the position before. At position 0 it counts as zeros and is not read
//
// Only generated kernels with Mamba-2 include this. Words of a `Wave` that have other names here:
//   weight        conv
//   bias          bias of the convolution
//   branch_weight dt_bias
//   norm_bias     d
//   v_cache       a_log
//   k_cache       state
//   residual      of `WaveScan` x
//   gate          of `WaveGateNorm` x
#pragma once

template <class M, class G>
struct WaveMamba {
  static constexpr int THREADS = M::WARPS * 32, GROUP = G::HEADS / G::GROUPS, INNER = G::HEADS * G::HEAD_DIM, GROUPED = G::GROUPS * G::STATE;
  static constexpr int ALL_CHANNELS = INNER + 2 * GROUPED, STEPS_AT = INNER + ALL_CHANNELS, COLS = STEPS_AT + G::HEADS;
  static constexpr int TURNED = round_up(ALL_CHANNELS + 2 * G::HEADS, 4); // whole pieces of 16 bytes
  static constexpr int MATRIX = G::STATE * G::HEAD_DIM, CHANNELS = G::HEAD_DIM + 2 * G::STATE, PAST = G::KERNEL - 1;
  static constexpr int STATE_COLS = MATRIX + PAST * CHANNELS;
  static constexpr int KEPT = PAST < 1 ? 1 : PAST; // of an array
  static_assert(COLS % 2 == 0 && G::HEAD_DIM % 2 == 0 && G::STATE % 2 == 0, "a lane has two columns");

  // What two columns of x are multiplied by.
  static __device__ __forceinline__ float scale(int col) {
    return col < INNER ? G::GATE_SCALE : col < 2 * INNER ? G::X_SCALE : col < 2 * INNER + GROUPED ? G::B_SCALE : G::C_SCALE;
  }
  static __device__ __forceinline__ float2 input(const WaveContext<M>& c, u32 at, int row, int col) {
    const float2 x = wave_columns<G::X_PARTS, COLS>(c, at, row, col);
    const float by = scale(col);
    return make_float2(by * x.x, by * x.y);
  }
  // The step of a head before its softplus, without its bias.
  static __device__ __forceinline__ float raw_step(const WaveContext<M>& c, u32 at, int row, int head) {
    const int col = STEPS_AT + head;
    const float2 pair = wave_columns<G::X_PARTS, COLS>(c, at, row, col / 2 * 2);
    return G::STEP_SCALE * (col % 2 ? pair.y : pair.x);
  }
  // The column of x that has value `i` of x, b, c and the gate of a head. Channels count from column INNER on.
  static __device__ __forceinline__ int column(int head, int i) {
    const int group = head / GROUP * G::STATE;
    if (i < G::HEAD_DIM) return INNER + head * G::HEAD_DIM + i;
    if (i < G::HEAD_DIM + G::STATE) return 2 * INNER + group + i - G::HEAD_DIM;
    if (i < CHANNELS) return 2 * INNER + GROUPED + group + i - G::HEAD_DIM - G::STATE;
    return head * G::HEAD_DIM + i - CHANNELS;
  }
  static __device__ __forceinline__ void load_channel(const WaveContext<M>& c, const Wave& e, int channel, float2 (&taps)[G::KERNEL], float2& bias) {
    load_taps(c.template constant<float>(e.weight) + channel * G::KERNEL, taps);
    bias = make_float2(0.f, 0.f);
    if constexpr (G::BIAS) bias = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.bias) + channel));
  }
  static __device__ __forceinline__ float2 convolve(float2 (&past)[KEPT], const float2 (&taps)[G::KERNEL], float2 bias, float2 own) {
    const float2 sum = convolve_pair(past, taps, own);
    return make_float2(activate<Act::SILU>(sum.x + bias.x), activate<Act::SILU>(sum.y + bias.y));
  }
  static __device__ __forceinline__ float rate(const WaveContext<M>& c, const Wave& e, int head) { return -expf(__ldg(c.template constant<float>(e.v_cache) + head)); }
  static __device__ __forceinline__ float dt_bias(const WaveContext<M>& c, const Wave& e, int head) { return __ldg(c.template constant<float>(e.branch_weight) + head); }
  static __device__ __forceinline__ float skip(const WaveContext<M>& c, const Wave& e, int head) { return __ldg(c.template constant<float>(e.norm_bias) + head); }
  // The state of a head of the sequence of a row.
  static __device__ __forceinline__ float* state_of(const WaveContext<M>& c, const Wave& e, u32 row, int head) {
    const u32 slot = __ldg(&c.p.rows[row].slot);
    return reinterpret_cast<float*>(c.p.cache + u64(e.k_cache) * OFFSET_BYTES) + (u64(slot) * G::HEADS + head) * STATE_COLS;
  }
  // Stores two columns of the output of a row.
  static __device__ __forceinline__ void put(const WaveContext<M>& c, const Wave& e, u32 x_at, u32 row, int col, float y0, float y1) {
    if constexpr (G::GATED) {
      const float2 gate = input(c, x_at, int(row), col);
      const u32 pair = bf16_pair(y0 * activate<Act::SILU>(gate.x), y1 * activate<Act::SILU>(gate.y));
      *reinterpret_cast<u32*>(c.template work<u8>(e.out) + OutPlace<M, G, INNER>::at(row, u32(col))) = pair;
    } else {
      *reinterpret_cast<float2*>(c.template work<float>(e.out) + u64(row) * INNER + col) = make_float2(y0, y1);
    }
  }
};

// Of a chunk: the convolution, steps and decays.
//
// owner    of a row: one block. A warp has 64 channels
template <class M, class G>
struct WaveScanInputs {
  typedef WaveMamba<M, G> N;
  static constexpr int UNITS = ceil_div(N::ALL_CHANNELS, 64), AT_ONCE = 2, ROWS = 4; // units and rows that a warp loads at once

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
      steps(c, e, row, end);
    }
  }
  static __device__ __forceinline__ void steps(const WaveContext<M>& c, const Wave& e, int first, int end) {
    float* const out = c.template work<float>(e.out);
    for (int i = c.tid(); i < (end - first) * G::HEADS; i += N::THREADS) {
      const int row = first + i / G::HEADS, head = i % G::HEADS;
      float* const to = out + u64(row) * N::TURNED + N::ALL_CHANNELS + head;
      const float step = softplus(N::raw_step(c, e.x, row, head) + N::dt_bias(c, e, head));
      to[0] = step;
      to[G::HEADS] = bounded_log(N::rate(c, e, head) * step);
    }
  }
  // The first of two channels of a lane, and whether there are any.
  static __device__ __forceinline__ int channel_of(int unit, int lane, bool& in) {
    const int channel = unit * 64 + lane * 2;
    in = channel < N::ALL_CHANNELS;
    return in ? channel : 0;
  }
  // Where the state of a sequence has the oldest input of a channel: in the first head that has the channel.
  static __device__ __forceinline__ int kept_at(int channel) {
    int head = channel / G::HEAD_DIM, i = channel % G::HEAD_DIM;
    if (channel >= N::INNER) {
      const int of = (channel - N::INNER) % N::GROUPED;
      head = of / G::STATE * N::GROUP;
      i = G::HEAD_DIM + (channel >= N::INNER + N::GROUPED ? G::STATE : 0) + of % G::STATE;
    }
    return head * N::STATE_COLS + N::MATRIX + i;
  }
  // Units `first`, `first + WARPS`, .. of rows `row` to `end`.
  static __device__ __forceinline__ void units(const WaveContext<M>& c, const Wave& e, int first, int row, int end) {
    const int lane = c.lane();
    float2 past[AT_ONCE][N::KEPT], taps[AT_ONCE][G::KERNEL], bias[AT_ONCE];
    const float* const state = N::state_of(c, e, 0, 0);
#pragma unroll
    for (int u = 0; u < AT_ONCE; u++) {
      bool in;
      const int channel = channel_of(first + u * M::WARPS, lane, in);
      N::load_channel(c, e, channel, taps[u], bias[u]);
#pragma unroll
      for (int t = 0; t < N::PAST; t++) {
        const int at = row - N::PAST + t; // before the chunk: an input that the state has
        past[u][t] = make_float2(0.f, 0.f);
        if (at >= 0)
          past[u][t] = N::input(c, e.x, at, N::INNER + channel);
        else if (c.p.position > 0)
          past[u][t] = *reinterpret_cast<const float2*>(state + kept_at(channel) + (N::PAST + at) * N::CHANNELS);
      }
    }
#pragma unroll 1
    for (int base = row; base < end; base += ROWS) {
      float2 own[AT_ONCE][ROWS];
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        bool in;
        const int channel = channel_of(first + u * M::WARPS, lane, in);
#pragma unroll
        for (int r = 0; r < ROWS; r++) own[u][r] = N::input(c, e.x, min(base + r, end - 1), N::INNER + channel);
      }
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        bool in;
        const int channel = channel_of(first + u * M::WARPS, lane, in);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
          const float2 y = N::convolve(past[u], taps[u], bias[u], own[u][r]);
          if (in && base + r < end) *reinterpret_cast<float2*>(c.template work<float>(e.out) + u64(base + r) * N::TURNED + channel) = y;
        }
      }
    }
  }
};

// Of a chunk: the state of a head, some columns of it, through all positions, ROWS at a time (arXiv 2405.21060, section 6, with the step apart from x).
//
// With g_i the sum of log decays of the ROWS up to i, and S the state before them:
//   y_i   = e^(g_i) S^T c_i + sum over j <= i of e^(g_i - g_j) step_j (c_i . b_j) x_j + d x_i
//   S     = e^(g_last) S + sum over j of e^(g_last - g_j) step_j b_j x_j^T
// No exponent is above 0. Products take operands in tf32 and add up in fp32; S, g and d x are fp32. Positions beyond the end of the chunk have zeros,
// which change nothing.
//
// owner    of WIDE columns of a head: one block. Warps 0 to 2 make what c and b have in common while warps 4 to 7 begin y
template <class M, class G>
struct WaveScan : WaveCarry<M, G::STATE, G::HEAD_DIM, G::HEAD_DIM / G::PARTS, tiles_for_warps(G::HEAD_DIM / G::PARTS / 8), false> {
  typedef WaveMamba<M, G> N;
  typedef WaveCarry<M, G::STATE, G::HEAD_DIM, G::HEAD_DIM / G::PARTS, tiles_for_warps(G::HEAD_DIM / G::PARTS / 8), false> C;
  using typename C::Ahead;
  using C::KD, C::ROWS, C::WIDE, C::TILES, C::Y_WARPS, C::Y_EACH, C::KEYS, C::KEY_PITCH, C::QUERIES, C::SCORES, C::SQUARE, C::PITCH, C::WANTED, C::at, C::line;
  static_assert(G::HEAD_DIM % G::PARTS == 0 && G::X_PARTS == 0, "whole tiles of all warps");

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
#pragma unroll 1
      for (u32 i = share.lo; i < share.hi; i++) one(c, e, int(i) / G::PARTS, int(i) % G::PARTS);
    }
    // The loader copies to this memory after the next meeting.
    fence_empty_slot();
  }
  static __device__ __forceinline__ void fetch(const WaveContext<M>& c, const Wave& e, int head, int part, int first, Ahead& a) {
    const int b = N::INNER + head / N::GROUP * G::STATE, step = N::ALL_CHANNELS + head;
    const typename C::Columns of{b, N::GROUPED + b, head * G::HEAD_DIM + part * WIDE, step, step + G::HEADS};
    C::template fetch<N::TURNED>(c, c.template work<float>(e.x), of, first, a);
  }
  // The weights of x in y: of 16 positions and 16 earlier ones each warp. The other 16 by 16 are above the diagonal.
  static __device__ __forceinline__ void weigh(const WaveContext<M>& c) {
    const int lane = c.lane(), unit = c.warp();
    if (unit >= 3) return;
    const int row0 = unit == 0 ? 0 : 16, col0 = unit == 2 ? 16 : 0;
    float d[2][4] = {};
    C::template multiply<KEY_PITCH, 1, 1, KEY_PITCH, false, false>(lane, at(c, QUERIES + row0 * KEY_PITCH), at(c, KEYS + col0 * KEY_PITCH), KD / 8, d);
    const float *g = line(c, 0), *step = line(c, 1);
    C::each(lane, d, [&](int r, int col, float x, float y) {
      const int i = row0 + r, j = col0 + col;
      x *= j <= i ? exp_fast(g[i] - g[j]) * step[j] : 0.f;
      y *= j + 1 <= i ? exp_fast(g[i] - g[j + 1]) * step[j + 1] : 0.f;
      C::pair(at(c, SCORES), i, j, SQUARE) = make_float2(to_tf32(x), to_tf32(y));
    });
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, int head, int part) {
    float* const state = N::state_of(c, e, 0, head);
    const bool begins = c.p.position == 0;
    Ahead ahead;
    fetch(c, e, head, part, 0, ahead);
    C::each_piece(c, part * WIDE, state, [&](float4* here, const float4* there) { *here = begins ? make_float4(0.f, 0.f, 0.f, 0.f) : *there; });
    if (part == 0) keep_inputs<N>(c, e.residual, head, state);
    const float skip = N::skip(c, e, head);
#pragma unroll 1
    for (int first = 0; first < int(c.p.row_count); first += ROWS) {
      C::place(c, ahead);
      fetch(c, e, head, part, first + ROWS, ahead);
      c.barrier();
      float y[Y_EACH][TILES][4];
      if (c.warp() < Y_WARPS)
        weigh(c);
      else
        C::recall(c, y);
      c.barrier();
      if (c.warp() >= Y_WARPS)
        C::finish(c, y, [&](int r, int col, float x, float z) {
          const float2 own = C::pair(at(c, WANTED), r, col, PITCH);
          if (first + r < int(c.p.row_count)) N::put(c, e, e.residual, u32(first + r), head * G::HEAD_DIM + part * WIDE + col, x + skip * own.x, z + skip * own.y);
        });
      C::advance(c);
      c.barrier();
    }
    C::each_piece(c, part * WIDE, state, [&](const float4* here, float4* there) { *there = *here; });
    c.barrier(); // the next task has its columns there
  }
};

// Of a step: all of it for the rows of one sequence and a head, one position after another.
//
// owner    of a state: the block that has the first row of its sequence in the step. Blocks of later rows leave them to it
template <class M, class G>
struct WaveScanRow : WaveColumns<M, G::STATE, G::HEAD_DIM> {
  typedef WaveMamba<M, G> N;
  typedef WaveColumns<M, G::STATE, G::HEAD_DIM> C;
  using C::THREADS, C::VD, C::PARTS, C::COLUMNS, C::column_of;
  static constexpr int SUMS_AT = round_up(N::CHANNELS + 2, 4);
  // Pairs of x, b and c of a head; a thread has pairs tid, tid + THREADS, ..
  static constexpr int PAIRS = N::CHANNELS / 2, EACH = ceil_div(PAIRS, THREADS);
  static_assert((SUMS_AT + PARTS * VD) * sizeof(float) <= M::SCRATCH_BYTES, "scratch holds the values of a head");

  struct Held {
    typename C::Part s;
    float2 past[EACH][N::KEPT], taps[EACH][G::KERNEL], bias[EACH], own[EACH];
    float step, rate, dt_bias, skip;
  };
  // In scratch: x, b and c after the convolution; the step and the decay; a sum of each part and column.
  static __device__ __forceinline__ float* values(const WaveContext<M>& c) { return c.scratch(); }
  static __device__ __forceinline__ float* scalars(const WaveContext<M>& c) { return c.scratch() + N::CHANNELS; }
  static __device__ __forceinline__ float* sums(const WaveContext<M>& c) { return c.scratch() + SUMS_AT; }
  static __device__ __forceinline__ int first_of(const WaveContext<M>& c, int n) { return (n * THREADS + c.tid()) * 2; }
  static __device__ __forceinline__ bool has_pair(const WaveContext<M>& c, int n) { return PAIRS % THREADS == 0 || n * THREADS + c.tid() < PAIRS; }

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) { C::template each_task<WaveScanRow>(c, e); }
  static __device__ __forceinline__ void bring_inputs(const WaveContext<M>& c, const Wave& e, int row, int head, Held& held) {
#pragma unroll
    for (int n = 0; n < EACH; n++) held.own[n] = has_pair(c, n) ? N::input(c, e.x, row, N::column(head, first_of(c, n))) : make_float2(0.f, 0.f);
    held.step = c.tid() == 0 ? N::raw_step(c, e.x, row, head) : 0.f;
  }
  // The state before a row, its inputs and the constants of a head, all on their way at once.
  static __device__ __forceinline__ void bring(const WaveContext<M>& c, const Wave& e, const Share& share, Held& held) {
    const int head = int(share.lo);
    const float* const state = N::state_of(c, e, share.row, head);
    const bool begins = wave_position<M>(c.p, c.step, share.row) == 0;
    C::load_part(c, state, begins, held.s);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const bool in = has_pair(c, n);
      N::load_channel(c, e, in ? N::column(head, first_of(c, n)) - N::INNER : 0, held.taps[n], held.bias[n]);
#pragma unroll
      for (int t = 0; t < N::PAST; t++) {
        const float2 x = *reinterpret_cast<const float2*>(state + N::MATRIX + t * N::CHANNELS + (in ? first_of(c, n) : 0));
        held.past[n][t] = in && !begins ? x : make_float2(0.f, 0.f);
      }
    }
    held.rate = N::rate(c, e, head), held.dt_bias = N::dt_bias(c, e, head), held.skip = N::skip(c, e, head);
    bring_inputs(c, e, int(share.row), head, held);
  }
  static __device__ __forceinline__ void store(const WaveContext<M>& c, float* state, const Held& held) {
    C::store_part(c, state, held.s);
#pragma unroll
    for (int n = 0; n < EACH; n++)
#pragma unroll
      for (int t = 0; t < N::PAST; t++)
        if (has_pair(c, n)) *reinterpret_cast<float2*>(state + N::MATRIX + t * N::CHANNELS + first_of(c, n)) = held.past[n][t];
  }
  // All rows of the sequence that begins at the row of a share.
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, const Share& share, Held& held) {
    const int head = int(share.lo);
#pragma unroll 1
    for (u32 row = share.row;;) {
#pragma unroll
      for (int n = 0; n < EACH; n++)
        if (has_pair(c, n)) *reinterpret_cast<float2*>(values(c) + first_of(c, n)) = N::convolve(held.past[n], held.taps[n], held.bias[n], held.own[n]);
      if (c.tid() == 0) {
        const float step = softplus(held.step + held.dt_bias);
        scalars(c)[0] = step, scalars(c)[1] = expf(bounded_log(held.rate * step));
      }
      c.barrier();
      position(c, e, row, head, held);
      row++;
      if (!C::follows(c, row)) break;
      bring_inputs(c, e, int(row), head, held);
    }
    store(c, N::state_of(c, e, share.row, head), held);
  }
  static __device__ __forceinline__ void position(WaveContext<M>& c, const Wave& e, u32 row, int head, Held& held) {
    const float *x = values(c), *b = x + G::HEAD_DIM, *by = b + G::STATE;
    const float step = scalars(c)[0], decay = scalars(c)[1];
    typename C::Sums own, sum = {};
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) own[n] = step * x[column_of(c, n) < VD ? column_of(c, n) : 0];
    C::each_row(c, b, by, [&](int r, float b, float by) {
#pragma unroll
      for (int n = 0; n < COLUMNS; n++) {
        held.s[n][r] = held.s[n][r] * decay + b * own[n];
        sum[n] += held.s[n][r] * by;
      }
    });
    C::put_sums(c, sums(c), sum, 1.f);
    c.barrier();
    for (int d = c.tid() * 2; d < VD; d += THREADS * 2)
      N::put(c, e, e.x, row, head * VD + d, C::total(sums(c), d) + held.skip * x[d], C::total(sums(c), d + 1) + held.skip * x[d + 1]);
    c.barrier(); // the next position has its values and sums there
  }
};

// out = rms_norm(mixed * silu(gate)), or rms_norm(mixed) * silu(gate) if the norm is FIRST; the mean over a group of columns.
//
// owner    of a group of columns of a row: TEAM warps of one block, and of a column in it one thread
template <class M, class G>
struct WaveGateNorm {
  static constexpr int GROUP = G::WIDTH / G::GROUPS, PAIRS = GROUP / 2, WANTED = ceil_div(PAIRS, 32 * 4);
  static constexpr int TEAM = WANTED <= 1 ? 1 : WANTED <= 2 ? 2 : WANTED <= 4 ? 4 : M::WARPS, TEAMS = M::WARPS / TEAM, EACH = ceil_div(PAIRS, 32 * TEAM);
  static_assert(GROUP % 2 == 0, "a lane has two columns");

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 round = 0;
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const int all = (int(min(share.row + share.rows, c.p.row_count)) - int(share.row)) * G::GROUPS;
#pragma unroll 1
      for (int first = 0; first < all; first += TEAMS, round++) {
        const int item = first + c.warp() / TEAM, at = min(item, all - 1);
        one(c, e, int(share.row) + at / G::GROUPS, at % G::GROUPS * GROUP, item < all, round & 1);
      }
    }
  }
  // Over all warps of the team. All warps of the block come here.
  static __device__ __forceinline__ float team_sum(const WaveContext<M>& c, u32 round, float v) {
    v = warp_sum(v);
    if constexpr (TEAM == 1) return v;
    float* const stats = c.state().stats[round][0];
    if (c.lane() == 0) stats[c.warp()] = v;
    c.barrier();
    v = 0.f;
#pragma unroll
    for (int w = 0; w < TEAM; w++) v += stats[c.warp() / TEAM * TEAM + w];
    return v;
  }
  static __device__ __forceinline__ void one(const WaveContext<M>& c, const Wave& e, int row, int col0, bool live, u32 round) {
    const int thread = c.tid() % (32 * TEAM);
    float2 y[EACH], gate[EACH];
    float squares = 0.f;
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int i = (n * 32 * TEAM + thread) * 2, col = col0 + (i < GROUP ? i : 0);
      y[n] = *reinterpret_cast<const float2*>(c.template work<float>(e.x) + u64(row) * G::WIDTH + col);
      gate[n] = wave_columns<G::X_PARTS, G::COLS>(c, e.gate, row, col);
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      gate[n] = make_float2(activate<Act::SILU>(G::GATE_SCALE * gate[n].x), activate<Act::SILU>(G::GATE_SCALE * gate[n].y));
      if constexpr (!G::FIRST) y[n].x *= gate[n].x, y[n].y *= gate[n].y;
      if ((n * 32 * TEAM + thread) * 2 < GROUP) squares += y[n].x * y[n].x + y[n].y * y[n].y;
    }
    const float factor = rsqrtf(team_sum(c, round, squares) * (1.f / GROUP) + G::EPS);
    const float* const gains = c.template constant<float>(e.norm_weight);
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int i = (n * 32 * TEAM + thread) * 2, col = col0 + i;
      if (!live || i >= GROUP) continue;
      const float2 gain = __ldg(reinterpret_cast<const float2*>(gains + col));
      float a = y[n].x * factor * gain.x, b = y[n].y * factor * gain.y;
      if constexpr (G::FIRST) a *= gate[n].x, b *= gate[n].y;
      *reinterpret_cast<u32*>(c.template work<u8>(e.out) + OutPlace<M, G, G::WIDTH>::at(u32(row), u32(col))) = bf16_pair(a, b);
    }
  }
};
