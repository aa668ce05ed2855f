// The persistent loop: warp roles, the queue of each step, the end of a launch. The dispatch over ops is generated.
#pragma once

// All consumers copy this block's queue, in the regime of `position`, to shared memory. Returns its number of tasks.
template <class M>
__device__ __forceinline__ u32 load_queue(const Context<M>& c, u32 position) {
  const u32 queue = (position >= M::SPLIT_FROM ? M::SMS : 0) + blockIdx.x;
  const u32 first = c.p.entry_index[queue], count = uniform(c.p.entry_index[queue + 1] - first);
  const uint4* from = reinterpret_cast<const uint4*>(c.p.entries + first);
  uint4* to = reinterpret_cast<uint4*>(c.queue());
  c.barrier();
  for (u32 i = c.tid(); i < count * (sizeof(Entry) / 16); i += M::WARPS * 32) to[i] = from[i];
  c.barrier();
  return count;
}

// D::run(context, op, entry) executes one task.
template <class M, class D>
__device__ __forceinline__ void consume(const Params& p) {
  Context<M> c{p, {}};
  c.tag = p.tag;
  c.position = p.position;
  c.ring = RingCursor<M>{0, 0};
  c.batch = c.task = 0;
  c.in_step = 0;
  c.patience = POLLS_BETWEEN_CHECKS;
  c.begin_task();
  u32 count = load_queue(c, c.position);
  for (u32 s = 0; s < p.steps; s++) {
    if (s > 0 && c.position == M::SPLIT_FROM) count = load_queue(c, c.position);
    u32 op = uniform(c.queue()[0].op);
#pragma unroll 1
    for (u32 i = 0; i < count; i++) {
      c.in_step = int(i);
      c.stamp(0);
      c.begin_task();
      const u32 now = op;
      op = uniform(c.queue()[i + 1 < count ? i + 1 : i].op); // loaded early, so that the next task can jump at once
      D::run(c, now, c.queue()[i]);
      c.stamp(3);
      c.task++;
      if (i == 0 && uniform(c.state().stop)) {
        // Block 0 still reports the token that ended the sequence: that is the next task of its queue.
        c.in_step = 1;
        if (c.sm() == 0) D::select_and_report(c, c.queue()[1]);
        return;
      }
    }
    c.position++;
    c.tag++;
  }
  // Block 0 selects and reports once more, so that the host gets the token that follows the last step.
  if (c.sm() == 0)
    for (u32 i = 0; i < 2; i++) {
      c.in_step = int(i);
      D::select_and_report(c, c.queue()[i]);
      c.task++;
    }
}

// Initialises the ring's barriers and the watchdog. All threads of a block call it.
template <class M>
__device__ __forceinline__ void begin_block(const Params& p) {
  State<M>& state = block_state<M>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < M::SLOTS; i++) {
      Slot<RING_COUNTERS<M>>::init(&state.full[i], FULL_ARRIVALS<M>);
      Slot<RING_COUNTERS<M>>::init(&state.empty[i], M::WARPS);
    }
    state.dog = Watchdog{p.report, p.abort, global_ns() + p.timeout_ns};
    state.acquired_tag = p.tag - 1;
    state.stop = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __syncthreads();
}

template <class M, class D>
__device__ __forceinline__ void persistent(const Params& p) {
  static_assert(sizeof(State<M>) <= M::STATE_BYTES, "the state part of the shared-memory map is too small");
  begin_block<M>(p);
  if (uniform(threadIdx.x / 32) >= u32(M::WARPS)) {
    Loader<M> loader{p, block_state<M>(), int(threadIdx.x) - M::WARPS * 32, RingCursor<M>{0, 0}, 0, false};
    if (M::COPY != Copy::BULK || loader.tid == 0) loader.run();
  } else {
    consume<M, D>(p);
  }
}
