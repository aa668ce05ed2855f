// The persistent loop: warp roles, the queue of each step, the end of a launch. The dispatch over ops is generated.
#pragma once

// All consumers copy this block's queue, in the regime of the position, to shared memory. Returns its number of tasks.
template <class M>
__device__ __forceinline__ u32 load_queue(const Context<M>& c) {
  const u32 queue = (c.position >= M::SPLIT_FROM ? M::SMS : 0) + blockIdx.x;
  const u32 first = c.p.entry_index[queue], count = uniform(c.p.entry_index[queue + 1] - first);
  const uint4* from = reinterpret_cast<const uint4*>(c.p.entries + first);
  uint4* to = reinterpret_cast<uint4*>(c.queue());
  c.barrier();
  for (u32 i = c.tid(); i < count * (sizeof(Entry) / 16); i += M::WARPS * 32) to[i] = from[i];
  c.barrier();
  return count;
}

// What a block runs in each step. All of it is in shared memory.
template <class M, bool WINDOWED = (queue_window<M>() > 0)>
struct Queue {
  u32 count = 0; // tasks of a step
  // In the regime of the position. `shorter`: of each block, how many entries a step has if not all; or null.
  __device__ __forceinline__ void load(const Context<M>& c, const uint2* shorter = nullptr) {
    count = load_queue(c);
    if (shorter) count = uniform(shorter[blockIdx.x].x);
  }
  // That of the running task, number `i` of its step.
  __device__ __forceinline__ const Entry& entry(const Context<M>& c, u32 i) const { return c.queue()[i]; }
  // The op of the first task of a step.
  __device__ __forceinline__ u32 begin(const Context<M>& c) const { return uniform(c.queue()[0].op); }
  // Before task `i` of a step, whose op is `op`.
  __device__ __forceinline__ void advance(const Context<M>&, u32, u32&) const {}
  // The op of the task after number `i` of a step.
  __device__ __forceinline__ u32 op_after(const Context<M>& c, u32 i) const { return uniform(c.queue()[i + 1 < count ? i + 1 : i].op); }
  // Before the block ends.
  __device__ __forceinline__ void end() const {}
};

// A window of it is in shared memory, by tasks since the launch began; after the last entry of a step comes the first of the next.
template <class M>
struct Queue<M, true> {
  static constexpr u32 WINDOW = queue_window<M>(), HALF = WINDOW / 2, PIECES = sizeof(Entry) / 16;
  static_assert(M::COPY != Copy::PLAIN && WINDOW % 2 == 0, "one half is copied while tasks of the other run");
  const uint4* from = nullptr;
  u32 count = 0;

  // Begins to copy `n` entries from the `ahead`th after the task that comes next, number `i` of its step.
  __device__ __forceinline__ void copy(const Context<M>& c, u32 i, u32 ahead, u32 n) const {
    for (u32 at = c.tid(); count > 0 && at < n * PIECES; at += M::WARPS * 32) {
      const u32 entry = ahead + at / PIECES, piece = at % PIECES;
      copy_ahead(reinterpret_cast<uint4*>(c.queue() + (c.task + entry) % WINDOW) + piece, from + (i + entry) % count * PIECES + piece);
    }
  }
  __device__ __forceinline__ void load(const Context<M>& c, const uint2* shorter = nullptr) {
    const u32 queue = (c.position >= M::SPLIT_FROM ? M::SMS : 0) + blockIdx.x, first = c.p.entry_index[queue];
    count = uniform(shorter ? shorter[blockIdx.x].x : c.p.entry_index[queue + 1] - first);
    from = reinterpret_cast<const uint4*>(c.p.entries + first);
    await_copies();
    c.barrier();
    copy(c, 0, 0, WINDOW);
    await_copies();
    c.barrier();
  }
  __device__ __forceinline__ const Entry& entry(const Context<M>& c, u32) const { return *c.entry(); }
  __device__ __forceinline__ u32 begin(const Context<M>& c) const { return c.task % HALF == 0 ? 0 : uniform(c.entry()->op); }
  // Where a half begins, it has arrived, and what follows it is copied over the other half, which all warps have left.
  __device__ __forceinline__ void advance(const Context<M>& c, u32 i, u32& op) const {
    if (c.task % HALF != 0) return;
    await_copies();
    c.barrier();
    copy(c, i, HALF, HALF);
    op = uniform(c.entry()->op);
  }
  __device__ __forceinline__ u32 op_after(const Context<M>& c, u32) const {
    const u32 next = (c.task + 1) % WINDOW;
    return next % HALF == 0 ? 0 : uniform(c.queue()[next].op);
  }
  __device__ __forceinline__ void end() const { await_copies(); }
};

// Runs task `i` of a step that the launch does not have, for what the host gets from it alone.
template <class M, class D>
__device__ __forceinline__ void select_and_report(Context<M>& c, const Queue<M>& queue, u32 i) {
  u32 op = 0;
  c.in_step = int(i);
  queue.advance(c, i, op);
  D::select_and_report(c, queue.entry(c, i));
}

// D::run(context, op, entry) executes one task.
template <class M, class D>
__device__ __forceinline__ void consume(const Params& p) {
  Context<M> c{p};
  c.tag = p.tag;
  c.position = p.position;
  c.ring = RingCursor<M>{0, 0};
  c.batch = c.task = 0;
  c.in_step = 0;
  c.patience = POLLS_BETWEEN_CHECKS;
  c.begin_task();
  Queue<M> queue;
  queue.load(c);
  for (u32 s = 0; s < p.steps; s++) {
    if (s > 0 && c.position == M::SPLIT_FROM) queue.load(c);
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
        // Block 0 still reports the token that ended the sequence: that is the next task of its queue.
        if (c.sm() == 0) select_and_report<M, D>(c, queue, 1);
        queue.end();
        return;
      }
    }
    c.position++;
    c.tag++;
  }
  // Block 0 selects and reports once more, so that the host gets the token that follows the last step.
  if (c.sm() == 0)
    for (u32 i = 0; i < 2; i++) {
      select_and_report<M, D>(c, queue, i);
      c.task++;
    }
  queue.end();
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
