// The persistent loop: warp roles, the queue of each step, the end of a launch. Dispatch is generated.
#pragma once

// Brings entry `index` (of the launch-wide sequence of this SM) into its place in shared memory, without waiting for it.
template <class M>
__device__ __forceinline__ void fetch_entry(Context<M>& c, const Entry* from, u32 index) {
  if (c.tid() < 8) {
    u8* to = reinterpret_cast<u8*>(&c.state().entries[index % 4]) + c.tid() * 16;
    const u8* source = reinterpret_cast<const u8*>(from) + c.tid() * 16;
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(source) : "memory");
#else
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(source);
#endif
  }
}
template <class M>
__device__ __forceinline__ void entries_landed(const Context<M>& c) {
#if __CUDA_ARCH__ >= 800
  if (c.tid() < 8) asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

template <class M>
struct Queue {
  const Entry* first;
  u32 count;
  __device__ __forceinline__ Queue(const Params& p, u32 position) {
    u32 queue = (position >= M::SPLIT_FROM ? M::SMS : 0) + blockIdx.x;
    first = p.entries + p.entry_index[queue];
    count = p.entry_index[queue + 1] - p.entry_index[queue];
  }
};

// D::run(context, entry) executes one task.
template <class M, class D>
__device__ __forceinline__ void consume(const Params& p) {
  Context<M> c{p};
  State<M>& state = block_state<M>();
  c.tag = p.tag;
  c.position = p.position;
  c.chunk = c.batch = c.task = 0;
  c.in_step = 0;
  c.lost = false;
  Queue<M> queue(p, c.position);
  // Every queue starts with select and holds at least two tasks, which the importer's smallest model guarantees.
  fetch_entry(c, queue.first, 0);
  fetch_entry(c, queue.first + 1, 1);
  entries_landed(c);
  c.barrier();
  for (u32 s = 0; s < p.steps; s++) {
    const Queue<M> after(p, min(c.position + 1, u32(M::CONTEXT_MAX - 1)));
    for (u32 i = 0; i < queue.count; i++) {
      entries_landed(c);
      const Entry& e = state.entries[c.task % 4];
      fetch_entry(c, i + 2 < queue.count ? queue.first + i + 2 : after.first + (i + 2 - queue.count), c.task + 2);
      c.in_step = int(i);
      c.stamp(0);
      D::run(c, e);
      c.stamp(3);
      c.task++;
      if (i == 0 && state.stop) {
        // The token that ended the sequence is reported all the same; in the queue of block 0 that is the next task.
        entries_landed(c);
        c.barrier();
        if (c.sm() == 0) D::select_and_report(c, state.entries[c.task % 4]);
        return;
      }
    }
    queue = after;
    c.position++;
    c.tag++;
  }
  // The token that follows the last step, for the host: block 0 selects and reports once more.
  if (c.sm() == 0)
    for (u32 i = 0; i < 2; i++) {
      entries_landed(c);
      c.barrier();
      D::select_and_report(c, state.entries[c.task % 4]);
      c.task++;
    }
}

template <class M, class D>
__device__ __forceinline__ void persistent(const Params& p) {
  State<M>& state = block_state<M>();
  static_assert(sizeof(State<M>) <= M::STATE_BYTES, "the state part of the shared-memory map is too small");
  if (threadIdx.x == 0) {
    for (int i = 0; i < M::SLOTS; i++) {
      Slot<RING_COUNTERS<M>>::init(&state.full[i], FULL_ARRIVALS<M>);
      Slot<RING_COUNTERS<M>>::init(&state.empty[i], M::WARPS / M::GROUPS);
    }
    state.dog = Watchdog{p.report, p.abort, global_ns() + p.timeout_ns};
    state.history_tag = p.tag - 1;
    state.stop = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __threadfence_block();
  }
  __syncthreads();
  if (threadIdx.x >= M::WARPS * 32) {
    Loader<M> loader{p, state, int(threadIdx.x) - M::WARPS * 32, 0, 0, false};
    if (M::COPY != Copy::BULK || loader.tid == 0) loader.run();
  } else {
    consume<M, D>(p);
  }
}
