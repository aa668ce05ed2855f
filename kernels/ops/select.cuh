// select: token = prompt[p] while p < prompt_len, else the arg-max over the candidates of the previous step.
//
// candidates (2 * PARTS)  packets of the previous step: value bits, row; published behind the release of that step
// token                   shared memory of this block; every block decides the same
//
// One warp reads them all: 2 * PARTS packets are two or three loads a lane. Ends with a block barrier.
#pragma once

template <class M, class G>
struct Select {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    if (c.warp == 0) {
      // A step reads what the previous one published, from the copy of that step's parity.
      u32 tag = c.tag - 1;
      const u64* from = c.p.exchange + e.x + (tag & 1) * round_up(2 * G::PARTS, 2);
      float value = NEGATIVE_INFINITY;
      int row = 0;
      constexpr int N = ceil_div(G::PARTS, 32);
      bool active[N];
      u64 a[N], b[N];
#pragma unroll
      for (int i = 0; i < N; i++) active[i] = i * 32 + c.lane < G::PARTS && !c.lost;
      if (!await_pairs<N>(from + c.lane * 2, 64, active, tag, a, b, c.dog, WaitSite{c.tag, e.task, e.event})) c.lost = true;
#pragma unroll
      for (int i = 0; i < N; i++)
        if (active[i]) argmax_take(value, row, __uint_as_float(u32(a[i])), int(u32(b[i])));
      warp_argmax(value, row);
      acquire_step();
      if (c.lane == 0) {
        bool given = c.position < c.p.prompt_len;
        int token = given ? c.p.prompt[c.position] : row;
        bool stop = c.lost;
        if (!given)
          for (u32 i = 0; i < c.p.eos_count; i++) stop = stop || token == c.p.eos[i];
        c.state.token = token;
        if (stop) c.state.stop = 1;
        c.state.history_tag = c.tag;
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
    if (c.tid == 0) {
      c.p.mailbox[1 + c.position] = c.state.token;
      __threadfence_system();
      c.p.mailbox[0] = int(c.position) + 1;
    }
    c.barrier();
  }
};
