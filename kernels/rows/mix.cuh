// mix of rows: see ops/mix.cuh. A task takes the rows of a value head whose sequences are in its part, one after another: of sequence `s`,
// where `s % PARTS` is the task's `j`.
//
// q, k, v, gate   words of the rows, side by side in a buffer of COLS columns; beta, decay in one of SCALAR_COLS columns
// out (ROWS, ..)  words
//
// Rows of one sequence are neighbours at ascending positions. Their state is loaded with the first of them, stays in registers, and is stored after
// the last one. A row that takes no part in the step has no effect on a state; the task of its part clears its words. A row keeps its sequence
// during a launch, so the same task has its words and its state in every step.
#pragma once

template <class M, class G>
struct RowsMix {
  typedef Mix<M, G> One;
  typedef Words<M, G::COLS> In;
  typedef Words<M, G::SCALAR_COLS> Scalars;
  static constexpr int EACH = 2 / In::WORD_COLS;

  static __device__ __forceinline__ void fetch(
      Context<M>& c, const Entry& e, int head, int row, typename One::Held& held, const typename One::Constants& constants
  ) {
    const u8* x = words_of<M, G::COLS>(c, e.x);
#pragma unroll
    for (int n = 0; n < One::IN_PAIRS; n++) {
      const bool in = One::has_pair(c, n);
      const int col = One::column(head, in ? One::pair(c, n) : 0);
      bool active[EACH];
      u32 word[EACH];
#pragma unroll
      for (int h = 0; h < EACH; h++) active[h] = in;
      await_words<EACH>(x, [&](int h) { return In::at(row, col + h * In::WORD_COLS); }, active, word, c.waiter());
      if (in) One::take(c, held, constants, n, EACH == 1 ? bf16_lo(word[0]) : __uint_as_float(word[0]), EACH == 1 ? bf16_hi(word[0]) : __uint_as_float(word[EACH - 1]));
    }
    if (c.warp() == 0) {
      const int at = (c.lane() == 0 ? G::BETA_AT : G::DECAY_AT) + head;
      const bool active[1] = {c.lane() < 2};
      u32 word[1];
      const u8* scalars = words_of<M, G::SCALAR_COLS>(c, e.beta);
      await_words<1>(scalars, [&](int) { return Scalars::at(row, at / Scalars::WORD_COLS * Scalars::WORD_COLS); }, active, word, c.waiter());
      if (active[0]) One::scalars(c)[c.lane()] = Scalars::WORD_COLS == 1 ? __uint_as_float(word[0]) : at % 2 == 1 ? bf16_hi(word[0]) : bf16_lo(word[0]);
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const RowsParams& p = rows_params(c);
    const int head = int(uniform(e.lo)), count = min(int(uniform(p.row_count)), M::ROWS);
    u8* const out = words_of<M, One::VALUE_COLS>(c, e.out);
    const auto slot = [&](int row) { return uniform(p.rows[row].slot); };
    u64 rest = 0;
#pragma unroll 1
    for (u64 own = rows_of_part(c, uniform(e.j), G::PARTS); own; own &= own - 1) {
      const int row = lowest_bit(own);
      if (row < count && takes_part<M>(row)) {
        rest |= 1ull << row;
        continue;
      }
      for (int d = c.tid() * 2; d < G::VALUE_DIM; d += One::THREADS * 2) clear_pair<One::VALUE_COLS>(c, out, row, head * G::VALUE_DIM + d);
    }
    if (!rest) return;
    typename One::Held held;
    typename One::Constants constants;
    One::load_constants(c, e, head, constants);
    bool begins = true;
#pragma unroll 1
    for (; rest; rest &= rest - 1) {
      const int row = lowest_bit(rest);
      const u64 others = rest & (rest - 1);
      float* const state = One::state_of(c, e, slot(row), head);
      if (begins) One::load(c, state, uniform(position_of(c, row)) == 0, held);
      fetch(c, e, head, row, held, constants);
      c.barrier();
      One::advance(c, constants, head, held, [&](int col, float a, float b) { publish_pair<One::VALUE_COLS>(c, out, row, col, a, b); });
      begins = !others || slot(lowest_bit(others)) != slot(row);
      if (begins) One::store(c, state, held);
    }
  }
};
