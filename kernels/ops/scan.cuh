// scan: one position of Mamba-2, of one head.
//
// gate, x (HEADS * HEAD_DIM), b, c (GROUPS * STATE), step (HEADS)   packets, side by side in one buffer; the gate is read if GATED
// conv (channels, KERNEL), bias (channels)                          fp32 constants, channels of x, b and c in turn; no bias unless BIAS
// a_log, d, dt_bias (HEADS)                                         fp32 constants
// state   of each sequence, for each head S (STATE, HEAD_DIM), then inputs of KERNEL - 1 positions, oldest first: (HEAD_DIM + 2 STATE) each; fp32
// out     HEAD_DIM columns, packets
//
// owner    of a head and its state: one task, on the same SM in every step and regime
// moves    the state, read and written once; 2 HEAD_DIM + 2 STATE values in, HEAD_DIM out
// assumes  the state in memory is that of the position before. At position 0 it counts as zeros and is not read
//
// Formula: `Scan` of src/ir/op.rs. Each head keeps the past inputs of its group's b and c for itself. Threads share the columns of S, and parts of
// its rows where there are more threads than columns, as in mix.cuh, whose rules of memory hold here, too.
#pragma once

template <class M, class G>
struct Scan {
  static constexpr int THREADS = M::WARPS * 32;
  static constexpr int GROUP = G::HEADS / G::GROUPS, INNER = G::HEADS * G::HEAD_DIM, GROUPED = G::GROUPS * G::STATE;
  static constexpr int COLS = 2 * INNER + 2 * GROUPED + G::HEADS, STEPS_AT = COLS - G::HEADS;
  static constexpr int MATRIX = G::STATE * G::HEAD_DIM, CHANNELS = G::HEAD_DIM + 2 * G::STATE, PAST = G::KERNEL - 1;
  static constexpr int STATE_COLS = MATRIX + PAST * CHANNELS;
  // Parts of the rows of S, rows of a part, and columns of a thread.
  static constexpr int MOST = THREADS / G::HEAD_DIM, PARTS = MOST < 1 ? 1 : MOST < G::STATE ? MOST : G::STATE;
  static constexpr int ROWS = ceil_div(G::STATE, PARTS), WIDTH = ceil_div(G::HEAD_DIM, THREADS);
  // Pairs of x, b, c and the gate of a head; a thread has pairs tid, tid + THREADS, .. of them, and of the output.
  static constexpr int PAIRS = (CHANNELS + (G::GATED ? G::HEAD_DIM : 0)) / 2, IN_PAIRS = ceil_div(PAIRS, THREADS);
  static constexpr int OUT_PAIRS = ceil_div(G::HEAD_DIM / 2, THREADS);

  // What a thread has of the state of a sequence.
  struct Held {
    float s[WIDTH][ROWS];
    float past[IN_PAIRS][PAST < 1 ? 1 : PAST][2];
  };
  // What it has of the constants of a head.
  struct Constants {
    float taps[IN_PAIRS][G::KERNEL][2], bias[IN_PAIRS][2];
    float rate, dt_bias, d; // rate: -exp(a_log)
  };

  // In shared memory: x, b, c after the convolution, and silu of the gate; the step; a sum of each part and column.
  static __device__ __forceinline__ float* values(const Context<M>& c) { return c.heads(); }
  static __device__ __forceinline__ float* scalars(const Context<M>& c) { return c.heads() + CHANNELS + G::HEAD_DIM; }
  static __device__ __forceinline__ float* sums(const Context<M>& c) { return c.scratch(); }

  // The column of the buffer that has value `i` of x, b, c and the gate of a head. Channels count from column INNER on.
  static __device__ __forceinline__ int column(int head, int i) {
    const int group = head / GROUP * G::STATE;
    if (i < G::HEAD_DIM) return INNER + head * G::HEAD_DIM + i;
    if (i < G::HEAD_DIM + G::STATE) return 2 * INNER + group + i - G::HEAD_DIM;
    if (i < CHANNELS) return 2 * INNER + GROUPED + group + i - G::HEAD_DIM - G::STATE;
    return head * G::HEAD_DIM + i - CHANNELS;
  }
  static __device__ __forceinline__ float scale(int i) {
    return i < G::HEAD_DIM ? G::X_SCALE : i < G::HEAD_DIM + G::STATE ? G::B_SCALE : i < CHANNELS ? G::C_SCALE : G::GATE_SCALE;
  }
  // The first value of pair `n` of the thread, and whether there is one.
  static __device__ __forceinline__ int pair(const Context<M>& c, int n) { return (n * THREADS + c.tid()) * 2; }
  static __device__ __forceinline__ bool has_pair(const Context<M>& c, int n) { return PAIRS % THREADS == 0 || n * THREADS + c.tid() < PAIRS; }

  // The part of S of a thread: a column of several rows, or several columns.
  static __device__ __forceinline__ int part(const Context<M>& c) { return WIDTH > 1 ? 0 : c.tid() / G::HEAD_DIM; }
  static __device__ __forceinline__ int column_of(const Context<M>& c, int n) { return WIDTH > 1 ? n * THREADS + c.tid() : c.tid() % G::HEAD_DIM; }
  static __device__ __forceinline__ bool has(const Context<M>& c, int n, int r) {
    // Without predicates, whose number would spill registers, where threads fill columns and parts evenly.
    if constexpr (WIDTH == 1 && PARTS * G::HEAD_DIM == THREADS && PARTS * ROWS == G::STATE) return true;
    return part(c) < PARTS && column_of(c, n) < G::HEAD_DIM && part(c) * ROWS + r < G::STATE;
  }
  static __device__ __forceinline__ int place(const Context<M>& c, int n, int r) { return (part(c) * ROWS + r) * G::HEAD_DIM + column_of(c, n); }

  // The state of a head of a sequence.
  static __device__ __forceinline__ float* state_of(const Context<M>& c, const Entry& e, u32 sequence, int head) {
    return reinterpret_cast<float*>(c.p.cache + u64(e.state) * OFFSET_BYTES) + (u64(sequence) * G::HEADS + head) * STATE_COLS;
  }
  // Calls f(whether the thread has it, word of the state, value) for all values of a thread.
  template <class F>
  static __device__ __forceinline__ void each(const Context<M>& c, Held& held, F f) {
#pragma unroll
    for (int n = 0; n < WIDTH; n++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) f(has(c, n, r), place(c, n, r), held.s[n][r]);
#pragma unroll
    for (int n = 0; n < IN_PAIRS; n++)
#pragma unroll
      for (int t = 0; t < PAST; t++) {
        const bool in = has_pair(c, n) && pair(c, n) < CHANNELS;
        f(in, MATRIX + t * CHANNELS + pair(c, n), held.past[n][t][0]);
        f(in, MATRIX + t * CHANNELS + pair(c, n) + 1, held.past[n][t][1]);
      }
  }
  // `begins`: at position 0 a state counts as zeros. All loads are under way at once, without branches.
  static __device__ __forceinline__ void load(const Context<M>& c, const float* state, bool begins, Held& held) {
    each(c, held, [&](bool in, int at, float& value) {
      const float x = state[in ? at : 0];
      value = in && !begins ? x : 0.f;
    });
  }
  static __device__ __forceinline__ void store(const Context<M>& c, float* state, Held& held) {
    each(c, held, [&](bool in, int at, float& value) {
      if (in) state[at] = value;
    });
  }

  static __device__ __forceinline__ void load_constants(const Context<M>& c, const Entry& e, int head, Constants& k) {
    const float* taps = c.template constant<float>(e.conv);
#pragma unroll
    for (int n = 0; n < IN_PAIRS; n++) {
      const bool live = has_pair(c, n) && pair(c, n) < CHANNELS;
      const int channel = live ? column(head, pair(c, n)) - INNER : 0;
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int t = 0; t < G::KERNEL; t++) k.taps[n][t][h] = live ? __ldg(taps + (channel + h) * G::KERNEL + t) : 0.f;
        k.bias[n][h] = 0.f;
        if constexpr (G::BIAS) k.bias[n][h] = live ? __ldg(c.template constant<float>(e.conv_bias) + channel + h) : 0.f;
      }
    }
    // Precise functions, here and below: a decay is applied again at every position.
    k.rate = -expf(__ldg(c.template constant<float>(e.a_log) + head));
    k.dt_bias = __ldg(c.template constant<float>(e.dt_bias) + head);
    k.d = __ldg(c.template constant<float>(e.d) + head);
  }

  // Takes pair `n` of the inputs of a position: the convolution of its channels, whose past inputs move on, or the gate.
  static __device__ __forceinline__ void take(const Context<M>& c, Held& held, const Constants& k, int n, float x0, float x1) {
    const float by = scale(pair(c, n)), own[2] = {by * x0, by * x1};
    float* to = values(c) + pair(c, n);
    const bool gate = pair(c, n) >= CHANNELS;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = 0.f;
#pragma unroll
      for (int t = 0; t < PAST; t++) {
        const float x = held.past[n][t][h];
        sum += x * k.taps[n][t][h];
        held.past[n][t][h] = t + 1 < PAST ? held.past[n][t + 1 < PAST ? t + 1 : t][h] : own[h];
      }
      to[h] = activate<Act::SILU>(gate ? own[h] : sum + own[h] * k.taps[n][PAST][h] + k.bias[n][h]);
    }
  }

  // A column's sum over all parts.
  static __device__ __forceinline__ float total(const float* sums, int col) {
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) sum += sums[p * G::HEAD_DIM + col];
    return sum;
  }

  // Calls f(r, x of row r of the part of a thread, y of it), four rows at a time where they lie so.
  template <class F>
  static __device__ __forceinline__ void each_row(const Context<M>& c, const float* x, const float* y, F f) {
    const int row0 = part(c) * ROWS;
    if constexpr (ROWS % 4 == 0 && PARTS * ROWS == G::STATE && G::HEAD_DIM % 4 == 0) {
#pragma unroll
      for (int r = 0; r < ROWS; r += 4) {
        const float4 a = *reinterpret_cast<const float4*>(x + row0 + r), b = *reinterpret_cast<const float4*>(y + row0 + r);
        f(r, a.x, b.x), f(r + 1, a.y, b.y), f(r + 2, a.z, b.z), f(r + 3, a.w, b.w);
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (row0 + r < G::STATE) f(r, x[row0 + r], y[row0 + r]);
    }
  }

  // One position, whose inputs are in shared memory: brings `held` to it, and calls publish(d, a, b) for columns d and d + 1 of the output.
  template <class P>
  static __device__ __forceinline__ void advance(Context<M>& c, const Constants& constants, int head, Held& held, P publish) {
    const float *x = values(c), *b = x + G::HEAD_DIM, *by = b + G::STATE, *gate = by + G::STATE;
    const float raw = G::STEP_SCALE * scalars(c)[0] + constants.dt_bias;
    const float step = raw > 0.f ? raw + log1pf(expf(-raw)) : log1pf(expf(raw));
    const float decay = expf(constants.rate * step);
#pragma unroll
    for (int n = 0; n < WIDTH; n++) {
      if (!has(c, n, 0)) continue;
      const int col = column_of(c, n);
      const float own = step * x[col];
      float sum = 0.f;
      each_row(c, b, by, [&](int r, float b, float by) {
        held.s[n][r] = held.s[n][r] * decay + b * own;
        sum += held.s[n][r] * by;
      });
      sums(c)[part(c) * G::HEAD_DIM + col] = sum;
    }
    c.barrier();
    c.stamp(2);
#pragma unroll
    for (int n = 0; n < OUT_PAIRS; n++) {
      const int d = (n * THREADS + c.tid()) * 2;
      if (d >= G::HEAD_DIM) continue;
      float out[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        out[h] = total(sums(c), d + h) + constants.d * x[d + h];
        if constexpr (G::GATED) out[h] *= gate[d + h];
      }
      publish(head * G::HEAD_DIM + d, out[0], out[1]);
    }
    c.barrier(); // the next position, or the next task, may write where inputs and sums are
  }

  static __device__ __forceinline__ void fetch(Context<M>& c, const Entry& e, int head, Held& held, const Constants& constants) {
    constexpr int EACH = 2 / Wire<M>::PER_PACKET;
#pragma unroll
    for (int n = 0; n < IN_PAIRS; n++) {
      bool active[EACH];
      const u64* from[EACH];
      u32 payload[EACH];
#pragma unroll
      for (int h = 0; h < EACH; h++) {
        active[h] = has_pair(c, n);
        from[h] = c.p.exchange + (e.x + (active[h] ? column(head, pair(c, n)) : 0) / Wire<M>::PER_PACKET + h);
      }
      await_packets<EACH>(from, active, c.tag, payload, c.waiter());
      if (has_pair(c, n)) take(c, held, constants, n, Wire<M>::lo(payload[0]), EACH == 1 ? Wire<M>::hi(payload[0]) : Wire<M>::lo(payload[EACH - 1]));
    }
    // Lane 0 of a warp brings the step of the head.
    if (c.warp() == 0) {
      const int at = STEPS_AT + head;
      const bool active[1] = {c.lane() == 0};
      const u64* const from[1] = {c.p.exchange + (e.x + at / Wire<M>::PER_PACKET)};
      u32 payload[1];
      await_packets<1>(from, active, c.tag, payload, c.waiter());
      if (active[0]) scalars(c)[0] = EACH == 1 && at % 2 == 1 ? Wire<M>::hi(payload[0]) : Wire<M>::lo(payload[0]);
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int head = int(uniform(e.lo));
    u32 sequence = 0;
    if constexpr (is_paged<M>()) sequence = static_cast<const PagedParams&>(c.p).sequence;
    float* const state = state_of(c, e, sequence, head);
    Held held;
    Constants constants;
    load(c, state, c.position == 0, held);
    load_constants(c, e, head, constants);
    fetch(c, e, head, held, constants);
    c.barrier();
    c.stamp(1);
    advance(c, constants, head, held, [&](int col, float a, float b) { publish_columns<INNER>(c, e.out, col, a, b); });
    store(c, state, held);
  }
};
