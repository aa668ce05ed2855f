// mix of rows: see ops/mix.cuh. A task takes the rows of a value head whose sequences are in its part, one after another: of sequence `s`,
// where `s % PARTS` is the task's `j`.
//
// q, k, v, gate   words of the rows, side by side in a buffer of COLS columns; beta, decay in one of SCALAR_COLS columns
// out (ROWS, ..)  words
//
// Rows of one sequence are neighbours at ascending positions. Their state is loaded with the first of them, stays in registers, and is stored after
// the last one; then that of the next sequence takes the registers, which has been brought into L2 meanwhile. A row that takes no part in the step has no effect on a state; the task of its part clears its words. A row keeps its sequence
// during a launch, so the same task has its words and its state in every step.
#pragma once

// All rows of a task whose recurrence is OP: what a head reads, and where.
template <class M, class OP>
struct RowsStates {
  typedef typename OP::One One;
  typedef Words<M, OP::IN_COLS> In;
  typedef Words<M, OP::SCALAR_COLS> Scalars;
  static constexpr int EACH = 2 / In::WORD_COLS;

  // What a thread brings of the inputs of a row: words of its pairs, and a scalar by each of the first lanes of warp 0.
  struct Inputs {
    u32 word[One::IN_PAIRS][EACH];
    u32 scalar;
  };
  static __device__ __forceinline__ u32 input_at(const Context<M>& c, int head, int row, int n, int h) {
    return In::at(row, One::column(head, One::has_pair(c, n) ? One::pair(c, n) : 0) + h * In::WORD_COLS);
  }
  static __device__ __forceinline__ u32 scalar_at(const Context<M>& c, int head, int row) {
    return Scalars::at(row, OP::scalar_col(c, head) / Scalars::WORD_COLS * Scalars::WORD_COLS);
  }
  static __device__ __forceinline__ bool has_scalar(const Context<M>& c) { return c.warp() == 0 && c.lane() < OP::SCALARS; }

  // Waits until the inputs of `rows` are there, a few rows at a time. Here and not where they are used: what is in registers during a wait is
  // spilled, and a thread has most of them full of state.
  static __device__ __forceinline__ void wait(Context<M>& c, const Entry& e, int head, u64 rows) {
    constexpr int AT_ONCE = 4;
    const u8 *const x = words_of<M, OP::IN_COLS>(c, e.x), *const scalars = words_of<M, OP::SCALAR_COLS>(c, OP::scalars(e));
#pragma unroll 1
    while (rows) {
      int row[AT_ONCE];
      bool there[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        there[i] = rows != 0;
        row[i] = there[i] ? lowest_bit(rows) : 0;
        rows &= rows - 1;
      }
#pragma unroll
      for (int n = 0; n < One::IN_PAIRS; n++) {
        bool active[AT_ONCE * EACH];
        u32 word[AT_ONCE * EACH];
#pragma unroll
        for (int i = 0; i < AT_ONCE * EACH; i++) active[i] = there[i / EACH] && One::has_pair(c, n);
        await_words<AT_ONCE * EACH>(x, [&](int i) { return input_at(c, head, row[i / EACH], n, i % EACH); }, active, word, c.waiter());
      }
      if (c.warp() != 0) continue;
      bool active[AT_ONCE];
      u32 word[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) active[i] = there[i] && has_scalar(c);
      await_words<AT_ONCE>(scalars, [&](int i) { return scalar_at(c, head, row[i]); }, active, word, c.waiter());
    }
  }
  // Reads them again: a thread that has seen a word finds it, or in a launch that is given up any value.
  static __device__ __forceinline__ void read(const Context<M>& c, const Entry& e, int head, int row, Inputs& in) {
    const u8 *const x = words_of<M, OP::IN_COLS>(c, e.x), *const scalars = words_of<M, OP::SCALAR_COLS>(c, OP::scalars(e));
#pragma unroll
    for (int n = 0; n < One::IN_PAIRS; n++)
#pragma unroll
      for (int h = 0; h < EACH; h++)
        if (One::has_pair(c, n)) in.word[n][h] = load_word(reinterpret_cast<const u32*>(x + input_at(c, head, row, n, h)));
    if (has_scalar(c)) in.scalar = load_word(reinterpret_cast<const u32*>(scalars + scalar_at(c, head, row)));
  }
  static __device__ __forceinline__ void take(const Context<M>& c, int head, const Inputs& in, typename One::Held& held, const typename One::Constants& constants) {
#pragma unroll
    for (int n = 0; n < One::IN_PAIRS; n++) {
      const u32 *const word = in.word[n], first = word[0], last = word[EACH - 1];
      if (One::has_pair(c, n)) One::take(c, held, constants, n, EACH == 1 ? bf16_lo(first) : __uint_as_float(first), EACH == 1 ? bf16_hi(first) : __uint_as_float(last));
    }
    if (has_scalar(c)) One::scalars(c)[c.lane()] = EACH == 2 ? __uint_as_float(in.scalar) : OP::scalar_col(c, head) % 2 == 1 ? bf16_hi(in.scalar) : bf16_lo(in.scalar);
  }

  // Loads a state; at position 0 it counts as zeros. Values that a thread does not have are anything. No value is touched here, so nothing waits
  // for a load.
  static __device__ __forceinline__ void load(const Context<M>& c, const float* state, bool begins, typename One::Held& held) {
    if (begins)
      One::each(c, held, [](bool, int, float& value) { value = 0.f; });
    else
      One::each(c, held, [&](bool in, int at, float& value) { value = state[in ? at : 0]; });
  }
  // Brings a state into L2.
  static __device__ __forceinline__ void bring(const Context<M>& c, const float* state) {
    constexpr int LINE = 128 / sizeof(float);
#pragma unroll 1
    for (int at = c.tid() * LINE; at < One::STATE_COLS + LINE - 1; at += One::THREADS * LINE) {
      const float* const from = state + min(at, One::STATE_COLS - 1);
#ifdef __CUDA_ARCH__
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const RowsParams& p = rows_params(c);
    const int head = int(uniform(e.lo)), count = min(int(uniform(p.row_count)), M::ROWS);
    u8* const out = words_of<M, OP::OUT_COLS>(c, e.out);
    u64 rest = 0;
#pragma unroll 1
    for (u64 own = rows_of_part(c, uniform(e.j), OP::PARTS); own; own &= own - 1) {
      const int row = lowest_bit(own);
      if (row < count && takes_part<M>(row)) {
        rest |= 1ull << row;
        continue;
      }
      for (int d = c.tid() * 2; d < OP::HEAD_COLS; d += One::THREADS * 2) clear_pair<OP::OUT_COLS>(c, out, row, head * OP::HEAD_COLS + d);
    }
    if (!rest) return;
    int row = lowest_bit(rest);
    u32 sequence = uniform(p.rows[row].slot);
    typename One::Held held;
    typename One::Constants constants;
    Inputs in;
    float* state = One::state_of(c, e, sequence, head);
    load(c, state, uniform(position_of(c, row)) == 0, held);
    One::load_constants(c, e, head, constants);
    wait(c, e, head, rest);
    read(c, e, head, row, in);
#pragma unroll 1
    for (;;) {
      take(c, head, in, held, constants);
      rest &= rest - 1;
      const int after = rest ? lowest_bit(rest) : row;
      const u32 then = uniform(p.rows[after].slot);
      const bool ends = !rest || then != sequence;
      float* const next = One::state_of(c, e, then, head);
      // Under way while this row is computed.
      if (rest) {
        if (ends) bring(c, next);
        read(c, e, head, after, in);
      }
      c.barrier();
      One::advance(c, constants, head, held, [&](int col, float a, float b) { publish_pair<OP::OUT_COLS>(c, out, row, col, a, b); });
      if (ends) One::store(c, state, held);
      if (!rest) return;
      row = after, sequence = then;
      if (ends) state = next, load(c, state, uniform(position_of(c, row)) == 0, held);
    }
  }
};

// Of gated delta nets.
template <class M, class G>
struct MixOfRows {
  typedef Mix<M, G> One;
  static constexpr int IN_COLS = G::COLS, SCALAR_COLS = G::SCALAR_COLS, SCALARS = 2, PARTS = G::PARTS, OUT_COLS = One::VALUE_COLS, HEAD_COLS = G::VALUE_DIM;
  static __device__ __forceinline__ u32 scalars(const Entry& e) { return e.beta; }
  // Lane 0 has beta, and lane 1 the decay.
  static __device__ __forceinline__ int scalar_col(const Context<M>& c, int head) { return (c.lane() == 0 ? G::BETA_AT : G::DECAY_AT) + head; }
};
template <class M, class G>
struct RowsMix : RowsStates<M, MixOfRows<M, G>> {};
