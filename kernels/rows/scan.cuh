// scan of rows: see ops/scan.cuh. One task takes all rows of a head, one after another.
//
// gate, x, b, c, step   words of the rows, side by side in one buffer
// out (ROWS, ..)        words
//
// Rows of one sequence are neighbours at ascending positions. Their state is loaded with the first of them, stays in registers, and is stored after
// the last one. A row that takes no part has no effect on a state.
#pragma once

template <class M, class G>
struct RowsScan {
  typedef Scan<M, G> One;
  typedef Words<M, One::COLS> In;
  static constexpr int EACH = 2 / In::WORD_COLS;

  static __device__ __forceinline__ void fetch(
      Context<M>& c, const Entry& e, int head, int row, typename One::Held& held, const typename One::Constants& constants
  ) {
    const u8* x = words_of<M, One::COLS>(c, e.x);
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
      const int at = One::STEPS_AT + head;
      const bool active[1] = {c.lane() == 0};
      u32 word[1];
      await_words<1>(x, [&](int) { return In::at(row, at / In::WORD_COLS * In::WORD_COLS); }, active, word, c.waiter());
      if (active[0]) One::scalar(c)[0] = In::WORD_COLS == 1 ? __uint_as_float(word[0]) : at % 2 == 1 ? bf16_hi(word[0]) : bf16_lo(word[0]);
    }
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const RowsParams& p = rows_params(c);
    const int head = int(uniform(e.lo)), rows = min(int(uniform(p.row_count)), M::ROWS);
    u8* const out = words_of<M, One::INNER>(c, e.out);
    typename One::Held held;
    typename One::Constants constants;
    One::load_constants(c, e, head, constants);
#pragma unroll 1
    for (int row = 0; row < M::ROWS; row++) {
      if (row >= rows || !takes_part<M>(row)) {
        for (int d = c.tid() * 2; d < G::HEAD_DIM; d += One::THREADS * 2) clear_pair<One::INNER>(c, out, row, head * G::HEAD_DIM + d);
        continue;
      }
      const u32 first = uniform(p.rows[row].first);
      const bool ends = row + 1 >= rows || uniform(p.rows[min(row + 1, rows - 1)].first) != first;
      float* const state = One::state_of(c, e, uniform(p.rows[row].sequence), head);
      if (int(first) == row) One::load(c, state, uniform(position_of(c, row)) == 0, held);
      fetch(c, e, head, row, held, constants);
      c.barrier();
      One::advance(c, constants, head, held, [&](int col, float a, float b) { publish_pair<One::INNER>(c, out, row, col, a, b); });
      if (ends) One::store(c, state, held);
    }
  }
};
