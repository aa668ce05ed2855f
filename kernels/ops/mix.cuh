// mix: one position of a gated delta net, of one value head.
//
// q, k (KEY_DIM), v, gate (VALUE_DIM)   packets of the head, side by side in one buffer: q of all key heads, k, v of all value heads, gate
// beta, decay (VALUE_HEADS)             packets of a buffer, from columns BETA_AT and DECAY_AT on
// conv (channels, KERNEL), norm (VALUE_DIM), a_log, dt_bias (VALUE_HEADS)   fp32 constants; channels are the columns of q, k and v
// state   of each sequence, for each value head S (KEY_DIM, VALUE_DIM), then inputs of KERNEL - 1 positions, oldest first: (2 KEY_DIM + VALUE_DIM) each; fp32
// out     VALUE_DIM columns, packets
//
// owner    of a value head and its state: one task, on the same SM in every step and regime
// moves    the state, read and written once; 2 KEY_DIM + 2 VALUE_DIM values in, VALUE_DIM out
// assumes  the state in memory is that of the position before. At position 0 it counts as zeros and is not read
//
// Formula: `Mix` of src/ir/op.rs. Threads share the columns of S, and parts of its rows where there are more threads than columns. A thread
// has its part in registers, with the past inputs of its channels and all constants, loaded before the packets arrive. In every step the
// same thread reads and writes the same words of the state, so no word of it is ever seen by two threads.
#pragma once

template <class M, class G>
struct Mix {
  static constexpr int THREADS = M::WARPS * 32;
  static constexpr int GROUP = G::VALUE_HEADS / G::KEY_HEADS, KEY_COLS = G::KEY_HEADS * G::KEY_DIM, VALUE_COLS = G::VALUE_HEADS * G::VALUE_DIM;
  static constexpr int MATRIX = G::KEY_DIM * G::VALUE_DIM, CHANNELS = 2 * G::KEY_DIM + G::VALUE_DIM, PAST = G::KERNEL - 1;
  static constexpr int STATE_COLS = MATRIX + PAST * CHANNELS;
  // Most parts of the rows of S, rows of a part, parts that have rows, and columns of a thread.
  static constexpr int MOST = THREADS / G::VALUE_DIM < 1 ? 1 : THREADS / G::VALUE_DIM;
  static constexpr int ROWS = ceil_div(G::KEY_DIM, MOST), PARTS = ceil_div(G::KEY_DIM, ROWS), COLS = ceil_div(G::VALUE_DIM, THREADS);
  // Pairs of q, k, v and the gate of a head; a thread has pairs tid, tid + THREADS, .. of them, and of the output.
  static constexpr int PAIRS = (CHANNELS + G::VALUE_DIM) / 2, IN_PAIRS = ceil_div(PAIRS, THREADS), OUT_PAIRS = ceil_div(G::VALUE_DIM / 2, THREADS);

  // What a thread has of the state of a sequence.
  struct Held {
    float s[COLS][ROWS];
    float past[IN_PAIRS][PAST < 1 ? 1 : PAST][2];
  };
  // What it has of the constants of a head.
  struct Constants {
    float taps[IN_PAIRS][G::KERNEL][2];
    float gains[OUT_PAIRS][2];
    float rate, dt_bias; // -exp(a_log)
  };

  // In shared memory: q, k, v after the convolution, and the gate; beta and the decay; two sums of each part and column.
  static __device__ __forceinline__ float* values(const Context<M>& c) { return c.heads(); }
  static __device__ __forceinline__ float* scalars(const Context<M>& c) { return c.heads() + CHANNELS + G::VALUE_DIM; }
  static __device__ __forceinline__ float* sums(const Context<M>& c, int which) { return c.scratch() + which * (PARTS * G::VALUE_DIM); }

  // The column of the buffer that has value `i` of q, k, v and the gate of a head. Of q, k and v it is the channel, too.
  static __device__ __forceinline__ int column(int head, int i) {
    const int key = head / GROUP * G::KEY_DIM;
    if (i < G::KEY_DIM) return key + i;
    if (i < 2 * G::KEY_DIM) return KEY_COLS + key + i - G::KEY_DIM;
    if (i < CHANNELS) return 2 * KEY_COLS + head * G::VALUE_DIM + i - 2 * G::KEY_DIM;
    return 2 * KEY_COLS + VALUE_COLS + head * G::VALUE_DIM + i - CHANNELS;
  }
  // The first value of pair `n` of the thread, and whether there is one.
  static __device__ __forceinline__ int pair(const Context<M>& c, int n) { return (n * THREADS + c.tid()) * 2; }
  static __device__ __forceinline__ bool has_pair(const Context<M>& c, int n) { return PAIRS % THREADS == 0 || n * THREADS + c.tid() < PAIRS; }

  // The part of S of a thread: a column of several rows, or several columns.
  static __device__ __forceinline__ int part(const Context<M>& c) { return COLS > 1 ? 0 : c.tid() / G::VALUE_DIM; }
  static __device__ __forceinline__ int column_of(const Context<M>& c, int n) { return COLS > 1 ? n * THREADS + c.tid() : c.tid() % G::VALUE_DIM; }
  static __device__ __forceinline__ bool has(const Context<M>& c, int n, int r) {
    // Without predicates, whose number would spill registers, where threads fill columns and parts evenly.
    if constexpr (COLS == 1 && PARTS * G::VALUE_DIM == THREADS && PARTS * ROWS == G::KEY_DIM) return true;
    return part(c) < PARTS && column_of(c, n) < G::VALUE_DIM && part(c) * ROWS + r < G::KEY_DIM;
  }
  static __device__ __forceinline__ int place(const Context<M>& c, int n, int r) { return (part(c) * ROWS + r) * G::VALUE_DIM + column_of(c, n); }

  // The state of a head of a sequence.
  static __device__ __forceinline__ float* state_of(const Context<M>& c, const Entry& e, u32 sequence, int head) {
    return reinterpret_cast<float*>(c.p.cache + u64(e.state) * OFFSET_BYTES) + (u64(sequence) * G::VALUE_HEADS + head) * STATE_COLS;
  }
  // Calls f(whether the thread has it, word of the state, value) for all values of a thread.
  template <class F>
  static __device__ __forceinline__ void each(const Context<M>& c, Held& held, F f) {
#pragma unroll
    for (int n = 0; n < COLS; n++)
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
    const float *taps = c.template constant<float>(e.conv), *gains = c.template constant<float>(e.norm_weight);
#pragma unroll
    for (int n = 0; n < IN_PAIRS; n++) {
      const bool live = has_pair(c, n) && pair(c, n) < CHANNELS;
      const float* tap = taps + (live ? column(head, pair(c, n)) : 0) * G::KERNEL;
#pragma unroll
      for (int t = 0; t < G::KERNEL; t++) {
        k.taps[n][t][0] = live ? __ldg(tap + t) : 0.f;
        k.taps[n][t][1] = live ? __ldg(tap + G::KERNEL + t) : 0.f;
      }
    }
#pragma unroll
    for (int n = 0; n < OUT_PAIRS; n++) {
      const int d = (n * THREADS + c.tid()) * 2;
#pragma unroll
      for (int h = 0; h < 2; h++) k.gains[n][h] = d < G::VALUE_DIM ? __ldg(gains + d + h) : 0.f;
    }
    // Precise functions, here and below: a decay is applied again at every position.
    k.rate = -expf(__ldg(c.template constant<float>(e.a_log) + head));
    k.dt_bias = __ldg(c.template constant<float>(e.dt_bias) + head);
  }

  // Takes pair `n` of the inputs of a position: the convolution of its channels, whose past inputs move on, or the gate.
  static __device__ __forceinline__ void take(const Context<M>& c, Held& held, const Constants& k, int n, float x0, float x1) {
    const float own[2] = {x0, x1};
    float* to = values(c) + pair(c, n);
    if (pair(c, n) >= CHANNELS) {
      to[0] = x0, to[1] = x1;
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float sum = 0.f;
#pragma unroll
      for (int t = 0; t < PAST; t++) {
        const float x = held.past[n][t][h];
        sum += x * k.taps[n][t][h];
        held.past[n][t][h] = t + 1 < PAST ? held.past[n][t + 1 < PAST ? t + 1 : t][h] : own[h];
      }
      to[h] = activate<Act::SILU>(sum + own[h] * k.taps[n][PAST][h]);
    }
  }

  // What a vector of KEY_DIM values is multiplied by to have length 1, by each warp for itself.
  static __device__ __forceinline__ float unit(const Context<M>& c, const float* x) {
    float squares = 0.f;
    for (int d = c.lane(); d < G::KEY_DIM; d += 32) squares += x[d] * x[d];
    return rsqrtf(warp_sum(squares) + 1e-6f);
  }

  // A column's sum over all parts.
  static __device__ __forceinline__ float total(const float* sums, int col) {
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < PARTS; p++) sum += sums[p * G::VALUE_DIM + col];
    return sum;
  }

  // Calls f(r, x of row r of the part of a thread, y of it), four rows at a time where they lie so.
  template <class F>
  static __device__ __forceinline__ void each_row(const Context<M>& c, const float* x, const float* y, F f) {
    const int row0 = part(c) * ROWS;
    if constexpr (ROWS % 4 == 0 && PARTS * ROWS == G::KEY_DIM) {
#pragma unroll
      for (int r = 0; r < ROWS; r += 4) {
        const float4 a = *reinterpret_cast<const float4*>(x + row0 + r), b = *reinterpret_cast<const float4*>(y + row0 + r);
        f(r, a.x, b.x), f(r + 1, a.y, b.y), f(r + 2, a.z, b.z), f(r + 3, a.w, b.w);
      }
    } else {
#pragma unroll
      for (int r = 0; r < ROWS; r++)
        if (row0 + r < G::KEY_DIM) f(r, x[row0 + r], y[row0 + r]);
    }
  }

  // One position, whose inputs are in shared memory: brings `held` to it, and calls publish(d, a, b) for columns d and d + 1 of the output.
  template <class P>
  static __device__ __forceinline__ void advance(Context<M>& c, const Constants& constants, int head, Held& held, P publish) {
    const float *q = values(c), *k = q + G::KEY_DIM, *v = k + G::KEY_DIM, *gate = v + G::VALUE_DIM;
    const float q_scale = unit(c, q) * rsqrtf(float(G::KEY_DIM)), k_scale = unit(c, k);
    const float beta = sigmoid(scalars(c)[0]) * (G::DOUBLES ? 2.f : 1.f);
    const float x = scalars(c)[1] + constants.dt_bias;
    const float softplus = x > 0.f ? x + log1pf(expf(-x)) : log1pf(expf(x));
    const float decay = expf(constants.rate * softplus);
#pragma unroll
    for (int n = 0; n < COLS; n++) {
      if (!has(c, n, 0)) continue;
      float sum = 0.f;
      each_row(c, k, k, [&](int r, float k, float) {
        held.s[n][r] *= decay;
        sum += held.s[n][r] * k;
      });
      sums(c, 0)[part(c) * G::VALUE_DIM + column_of(c, n)] = sum * k_scale;
    }
    c.barrier();
#pragma unroll
    for (int n = 0; n < COLS; n++) {
      if (!has(c, n, 0)) continue;
      const int col = column_of(c, n);
      const float delta = beta * (v[col] - total(sums(c, 0), col)) * k_scale;
      float sum = 0.f;
      each_row(c, k, q, [&](int r, float k, float q) {
        held.s[n][r] += k * delta;
        sum += held.s[n][r] * q;
      });
      sums(c, 1)[part(c) * G::VALUE_DIM + col] = sum * q_scale;
    }
    c.barrier();
    c.stamp(2);
    float squares = 0.f;
    for (int d = c.lane(); d < G::VALUE_DIM; d += 32) {
      const float y = total(sums(c, 1), d);
      squares += y * y;
    }
    const float factor = rsqrtf(warp_sum(squares) * (1.f / G::VALUE_DIM) + G::EPS);
#pragma unroll
    for (int n = 0; n < OUT_PAIRS; n++) {
      const int d = (n * THREADS + c.tid()) * 2;
      if (d >= G::VALUE_DIM) continue;
      float out[2];
#pragma unroll
      for (int h = 0; h < 2; h++)
        out[h] = total(sums(c, 1), d + h) * factor * constants.gains[n][h] * activate<Act::SILU>(gate[d + h]);
      publish(head * G::VALUE_DIM + d, out[0], out[1]);
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
    // Lanes 0 and 1 of a warp bring beta and the decay of the head.
    if (c.warp() == 0) {
      const int at = (c.lane() == 0 ? G::BETA_AT : G::DECAY_AT) + head;
      const bool active[1] = {c.lane() < 2};
      const u64* const from[1] = {c.p.exchange + (e.beta + at / Wire<M>::PER_PACKET)};
      u32 payload[1];
      await_packets<1>(from, active, c.tag, payload, c.waiter());
      if (active[0]) scalars(c)[c.lane()] = EACH == 1 && at % 2 == 1 ? Wire<M>::hi(payload[0]) : Wire<M>::lo(payload[0]);
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
    advance(c, constants, head, held, [&](int col, float a, float b) { publish_columns<VALUE_COLS>(c, e.out, col, a, b); });
    store(c, state, held);
  }
};
