// The persistent loop of a kernel for rows; see runtime/kernel.cuh.
#pragma once

// D::run(context, op, entry) executes one task.
template <class M, class D>
__device__ __forceinline__ void consume_rows(const RowsParams& p) {
  Context<M> c{p};
  c.tag = p.tag;
  c.position = 0;
  c.ring = RingCursor<M>{0, 0};
  c.batch = c.task = 0;
  c.in_step = 0;
  c.patience = POLLS_BETWEEN_CHECKS;
  c.begin_task();
  Queue<M> queue;
  queue.load(c, p.fills);
  for (u32 s = 0; s < p.steps; s++) {
    u32 op = queue.begin(c);
#pragma unroll 1
    for (u32 i = 0; i < queue.count; i++) {
      c.in_step = int(i);
      c.stamp(0);
      c.begin_task();
      queue.advance(c, i, op);
      const u32 now = op;
      op = queue.op_after(c, i); // loaded early, so that the next task can jump at once
      D::run(c, now, queue.entry(c, i));
      c.stamp(3);
      c.task++;
      if (i == 0 && uniform(c.state().stop)) {
        // Block 0 still reports the tokens that ended the rows: that is the next task of its queue.
        if (c.sm() == 0) select_and_report<M, D>(c, queue, 1);
        queue.end();
        return;
      }
    }
    c.tag++;
  }
  if (p.fills || !p.mailbox) return queue.end();
  // Block 0 selects and reports once more, so that the host gets the tokens that follow the last step.
  if (c.sm() == 0)
    for (u32 i = 0; i < 2; i++) {
      select_and_report<M, D>(c, queue, i);
      c.task++;
    }
  queue.end();
}

template <class M, class D>
__device__ __forceinline__ void persistent_rows(const RowsParams& p) {
  static_assert(sizeof(RowsDealState<M>) <= M::STATE_BYTES, "the state part of the shared-memory map is too small");
  if (threadIdx.x < sizeof(RowsState<M>::active) / 4) rows_state<M>().active[threadIdx.x] = 0;
  if (threadIdx.x == 0) begin_deals<M>();
  begin_block<M>(p);
  // The launch gave every thread the same number of registers. The loader hands some of its own to the consumers.
  if (uniform(threadIdx.x / 32) >= u32(M::WARPS)) {
#if __CUDA_ARCH__ >= 900
    if constexpr (M::LOADER_REGISTERS > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(M::LOADER_REGISTERS));
#endif
    const int tid = int(threadIdx.x) - M::WARPS * 32;
    const u32 part = M::COPIERS > 1 ? u32(tid) / 32 : 0;
    RowsLoader<M> loader(Loader<M>{p, block_state<M>(), tid, RingCursor<M>{0, 0}, 0, false}, part);
    if (M::COPY != Copy::BULK || (tid % 32 == 0 && part < u32(M::COPIERS) && (part > 0 || tid == 0))) loader.run_rows(p);
  } else {
#if __CUDA_ARCH__ >= 900
    if constexpr (M::LOADER_REGISTERS > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(M::REGISTERS));
#endif
    consume_rows<M, D>(p);
  }
}
