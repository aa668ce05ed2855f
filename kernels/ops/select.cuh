// select: token = prompt[p] while p < prompt_len, else the arg-max over the arg-max pairs of the previous step; or, if top-k or
// top-p is set, the choice among the ids that they admit (sampling.cuh).
//
// best (2 * PARTS)  arg-max pairs of the previous step as packets: value bits, row; published after the release of that step
// token             shared memory of this block; every block decides the same
//
// owner    every block for itself; the first one reports to the host
// moves    2 * PARTS packets into every block, and the logits where a filter needs them
// assumes  each block published its pair after the release of its step; here each polling thread acquires
//
// One thread takes one pair, so one round trip brings all of them. Ends with a block barrier.
#pragma once

template <class M, class G>
struct Select {
  static constexpr int THREADS = M::WARPS * 32;

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    // A step reads what the previous one published, from the copy of that step's parity.
    const u32 tag = c.tag - 1;
    const u64* from = c.p.exchange + e.x + (tag & 1) * round_up(2 * G::PARTS, 2);
    const bool given = c.position < c.p.prompt_len, filtered = !given && filters(c.p);
    float value = NEGATIVE_INFINITY;
    int row = 0x7fffffff;
    for (int first = 0; first < G::PARTS; first += THREADS) {
      const int i = first + c.tid();
      const bool active[1] = {i < G::PARTS};
      u64 a[1] = {0}, b[1] = {0};
      await_pairs<1>(from + i * 2, [](int) { return 0; }, active, tag, a, b, c.waiter());
      if (active[0]) argmax_take(value, row, __uint_as_float(u32(a[0])), int(u32(b[0])));
      if (filtered && active[0]) c.scratch()[i] = __uint_as_float(u32(a[0]));
    }
    acquire_step();
    c.stamp(1);
    warp_argmax(value, row);
    if (c.lane() == 0) {
      c.state().best[0][c.warp()] = value;
      c.state().best_index[0][c.warp()] = row;
    }
    c.barrier();
    int chosen = 0;
    if (filtered) {
      float best = NEGATIVE_INFINITY;
      for (int w = 0; w < M::WARPS; w++) best = fmaxf(best, c.state().best[0][w]);
      chosen = Sampling<M, G>::choose(c.p, c.tag - 1 - c.p.tag, c.position, best, c.tid());
    }
    if (c.warp() == 0) {
      value = c.lane() < M::WARPS ? c.state().best[0][c.lane()] : NEGATIVE_INFINITY;
      row = c.lane() < M::WARPS ? c.state().best_index[0][c.lane()] : 0x7fffffff;
      warp_argmax(value, row);
      if (filtered) row = chosen;
      if (c.lane() == 0) {
        // If no logit was a number, no row was chosen; `embed` needs a valid row of the table all the same.
        const int token = given ? c.p.prompt[c.position] : min(row, G::VOCAB - 1);
        bool stop = c.lost();
        if (!given)
          for (u32 i = 0; i < c.p.eos_count; i++) stop = stop || token == c.p.eos[i];
        c.state().token = token;
        if (stop) c.state().stop = 1;
        hand_over_step(&c.state().acquired_tag, c.tag);
      }
    }
    c.barrier();
  }
};

// report: hands the token of this position to the host. The count follows the token, so a host that sees the count may
// read the token.
template <class M, class G>
struct Report {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    if (c.tid() == 0) {
      c.p.mailbox[1 + c.position] = c.state().token;
      __threadfence_system();
      c.p.mailbox[0] = int(c.position) + 1;
    }
    c.barrier();
  }
};
