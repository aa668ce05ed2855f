// Experts of rows: each row of the step chooses its own.
//
// Scores, choices and shares travel as packets, row by row, as with one row; what experts read and write are words.
#pragma once

// route of one row: see ops/route.cuh. A row that takes no part chooses nothing, and nothing waits for it.
template <class M, class G>
struct RowsRoute {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    if (takes_part<M>(int(uniform(e.row)))) Route<M, G>::run(c, e);
  }
};

// combine: see ops/combine.cuh; for each row.
//
// x (ROWS, INPUTS * WIDTH)  words
// aux (ROWS, SLOTS)         shares, fp32 packets; gate (ROWS) one of the scores of each row
// out (ROWS, WIDTH)         words
template <class M, class G>
struct RowsCombine {
  static constexpr int INPUTS = G::SLOTS + (G::SHARED ? 1 : 0), THREADS = M::WARPS * 32;
  typedef Words<M, INPUTS * G::WIDTH> W;
  // Words of two columns of an input.
  static constexpr int EACH = 2 / W::WORD_COLS, N = INPUTS * EACH;

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    float* const shares = c.scratch(); // [row][input]
    c.barrier(); // slow warps may still add up the previous task's partial sums there
#pragma unroll 1
    for (int base = c.warp() * 32; base < M::ROWS * INPUTS; base += THREADS) {
      const int i = base + c.lane(), row = min(i / INPUTS, M::ROWS - 1), s = i % INPUTS;
      const bool in = i < M::ROWS * INPUTS && takes_part<M>(row), counted[1] = {in && (s < G::SLOTS || G::GATED)};
      const u32 at = s < G::SLOTS ? e.aux + u32(row) * round_up(G::SLOTS, 2) + s : e.shared_gate + u32(row) * G::GATE_PITCH;
      const u64* const from[1] = {c.p.exchange + at};
      u32 word[1];
      await_packets<1>(from, counted, c.tag, word, c.waiter());
      float share = counted[0] ? __uint_as_float(word[0]) : G::SHARED_SCALE;
      if (s == G::SLOTS && G::GATED) share = __fdividef(G::SHARED_SCALE, 1.f + exp_fast(-share));
      if (in) shares[i] = share;
    }
    c.barrier();
    c.stamp(1);
    const u8* const y = words_of<M, INPUTS * G::WIDTH>(c, e.x);
    u8* out = nullptr;
    if constexpr (G::PUBLISH) out = words_of<M, G::WIDTH>(c, e.out);
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::WIDTH), pairs = (last - first) / 2;
#pragma unroll 1
    for (int base = c.warp() * 32; base < pairs * M::ROWS; base += THREADS) {
      const int i = base + c.lane(), row = min(i / pairs, M::ROWS - 1), col = first + i % pairs * 2;
      const bool in = i < pairs * M::ROWS, takes = in && takes_part<M>(row);
      bool active[N];
      u32 x[N];
#pragma unroll
      for (int n = 0; n < N; n++) active[n] = takes;
      await_words<N>(y, [&](int n) { return W::at(row, n / EACH * G::WIDTH + col + n % EACH); }, active, x, c.waiter());
      if (!in) continue;
      if (!takes) {
        if constexpr (G::PUBLISH) clear_pair<G::WIDTH>(c, out, row, col);
        continue;
      }
      float sum[2] = {};
#pragma unroll
      for (int s = 0; s < INPUTS; s++) {
        const float share = shares[row * INPUTS + s];
        sum[0] += share * (EACH == 1 ? bf16_lo(x[s * EACH]) : __uint_as_float(x[s * EACH]));
        sum[1] += share * (EACH == 1 ? bf16_hi(x[s * EACH]) : __uint_as_float(x[s * EACH + EACH - 1]));
      }
#pragma unroll
      for (int k = 0; k < 2; k++) sum[k] *= G::SCALE;
      if constexpr (G::ADDS) {
        float* own = c.residual() + row * M::RESIDUAL_COLS + e.residual + (col - first);
#pragma unroll
        for (int k = 0; k < 2; k++) sum[k] = own[k] += sum[k];
      }
      if constexpr (G::PUBLISH) publish_pair<G::WIDTH>(c, out, row, col, sum[0], sum[1]);
    }
    c.barrier(); // the next task may stage where the shares are
  }
};
