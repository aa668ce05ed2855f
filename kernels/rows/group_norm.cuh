// group_norm of rows: see ops/group_norm.cuh. Warps take rows in turn.
//
// x (ROWS, WIDTH), gate (ROWS, ..)   words; the gate has columns GATED_AT .. of GATE_COLS
// out (ROWS, WIDTH)                  words
#pragma once

template <class M, class G>
struct RowsGroupNorm {
  static constexpr int GROUP = G::WIDTH / G::GROUPS, HELD = 4; // pairs of a lane that are on their way at once
  typedef Words<M, G::WIDTH> W;
  typedef Words<M, G::GATE_COLS> Gates;
  static constexpr int EACH = 2 / W::WORD_COLS;

  // A pair of columns of a row that was waited for.
  template <class From>
  static __device__ __forceinline__ void take(const u8* from, int row, int col, float (&x)[2]) {
    u32 word[EACH];
#pragma unroll
    for (int h = 0; h < EACH; h++) word[h] = load_word(reinterpret_cast<const u32*>(from + From::at(row, col + h * W::WORD_COLS)));
    x[0] = EACH == 1 ? bf16_lo(word[0]) : __uint_as_float(word[0]);
    x[1] = EACH == 1 ? bf16_hi(word[0]) : __uint_as_float(word[EACH - 1]);
  }

  // Waits for the columns of a group; returns what a lane has of the sum of their squares.
  template <class From>
  static __device__ __forceinline__ float await(Context<M>& c, const u8* from, int row, int first) {
    float squares = 0.f;
#pragma unroll 1
    for (int base = 0; base < GROUP; base += 64 * HELD) {
      const auto col = [&](int i) { return base + i * 64 + c.lane() * 2; };
      bool active[HELD * EACH];
      u32 word[HELD * EACH];
#pragma unroll
      for (int i = 0; i < HELD * EACH; i++) active[i] = col(i / EACH) < GROUP;
      await_words<HELD * EACH>(from, [&](int i) { return From::at(row, first + (col(i / EACH) < GROUP ? col(i / EACH) : 0) + i % EACH * W::WORD_COLS); }, active, word, c.waiter());
#pragma unroll
      for (int i = 0; i < HELD * EACH; i++) {
        const float a = EACH == 1 ? bf16_lo(word[i]) : __uint_as_float(word[i]), b = EACH == 1 ? bf16_hi(word[i]) : 0.f;
        squares += a * a + b * b;
      }
    }
    return squares;
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int first = int(uniform(e.lo)) * GROUP;
    const u8* const x = words_of<M, G::WIDTH>(c, e.x);
    const u8* gate = nullptr;
    if constexpr (G::GATED) gate = words_of<M, G::GATE_COLS>(c, e.gate);
    u8* const out = words_of<M, G::WIDTH>(c, e.out);
    const float* const weight = c.template constant<float>(e.norm_weight) + first;
#pragma unroll 1
    for (int row = c.warp(); row < M::ROWS; row += M::WARPS) {
      if (!takes_part<M>(row)) {
        for (int d = c.lane() * 2; d < GROUP; d += 64) clear_pair<G::WIDTH>(c, out, row, first + d);
        continue;
      }
      if constexpr (G::GATED) await<Gates>(c, gate, row, G::GATED_AT + first);
      const float factor = rsqrtf(warp_sum(await<W>(c, x, row, first)) * (1.f / GROUP) + G::EPS);
      for (int d = c.lane() * 2; d < GROUP; d += 64) {
        float y[2];
        take<W>(x, row, first + d, y);
#pragma unroll
        for (int h = 0; h < 2; h++) y[h] *= factor * __ldg(weight + d + h);
        if constexpr (G::GATED) {
          float by[2];
          take<Gates>(gate, row, G::GATED_AT + first + d, by);
#pragma unroll
          for (int h = 0; h < 2; h++) y[h] *= activate<Act::SILU>(G::GATE_SCALE * by[h]);
        }
        publish_pair<G::WIDTH>(c, out, row, first + d, y[0], y[1]);
      }
    }
    c.stamp(1);
    c.barrier(); // every task has one: what the task before left in shared memory is used until then
  }
};
