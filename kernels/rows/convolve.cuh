// convolve of rows: see ops/convolve.cuh.
//
// b, c, x (ROWS, CHANNELS)   words of the rows, side by side in one buffer
// out (ROWS, CHANNELS)       words
//
// Rows of one sequence are neighbours at ascending positions, and a thread takes them one after another: their state is loaded with the first of them,
// stays in registers, and is stored after the last one. Warps that have no channels of their own take other sequences. A row that takes no part has no
// effect on a state.
#pragma once

template <class M, class G>
struct RowsConvolve {
  typedef Convolve<M, G> One;
  typedef Words<M, One::COLS> In;
  static constexpr int EACH = 2 / In::WORD_COLS, N = 3 * EACH;

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const RowsParams& p = rows_params(c);
    const int rows = min(int(uniform(p.row_count)), M::ROWS);
    const u8* const x = words_of<M, One::COLS>(c, e.x);
    u8* const out = words_of<M, G::CHANNELS>(c, e.out);
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::CHANNELS);
    // Blocks of 64 channels; warps that share a block take sequences in turn.
    const int blocks = ceil_div(last - first, 64), turns = max(M::WARPS / blocks, 1);
    if (c.warp() < blocks * turns) {
#pragma unroll 1
      for (int block = c.warp() % min(blocks, M::WARPS); block < blocks; block += M::WARPS) {
        const int turn = c.warp() / min(blocks, M::WARPS), base = first + block * 64;
        const bool in = base + c.lane() * 2 < last;
        const int col = in ? base + c.lane() * 2 : first;
        typename One::Held held;
        typename One::Constants constants;
        One::load_constants(c, e, col, constants);
#pragma unroll 1
        for (int row = 0; row < M::ROWS; row++) {
          const u32 begin = row < rows ? uniform(p.rows[row].first) : u32(row);
          if (int(begin) % turns != turn) continue;
          if (row >= rows || !takes_part<M>(row)) {
            if (in) clear_pair<G::CHANNELS>(c, out, row, col);
            continue;
          }
          const bool ends = row + 1 >= rows || uniform(p.rows[min(row + 1, rows - 1)].first) != begin;
          float* const state = One::state_of(c, e, uniform(p.rows[row].slot));
          if (int(begin) == row) One::load(state, col, uniform(position_of(c, row)) == 0, held);
          bool active[N];
          u32 word[N];
#pragma unroll
          for (int n = 0; n < N; n++) active[n] = in;
          await_words<N>(x, [&](int n) { return In::at(row, n / EACH * One::PART + col + n % EACH * In::WORD_COLS); }, active, word, c.waiter());
          c.stamp(1);
          if (!in) continue;
          float y[2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const auto value = [&](int part) { return EACH == 1 ? (h == 1 ? bf16_hi(word[part]) : bf16_lo(word[part])) : __uint_as_float(word[part * EACH + h * (EACH - 1)]); };
            y[h] = One::step(held, constants, h, value(0), value(1), value(2));
          }
          publish_pair<G::CHANNELS>(c, out, row, col, y[0], y[1]);
          if (ends) One::store(state, col, held);
        }
      }
    }
    c.barrier(); // as in ops/convolve.cuh
  }
};
