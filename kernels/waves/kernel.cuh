// The loop of a kernel of waves: every block executes every wave, and all blocks meet between two of them. Dispatch is generated.
#pragma once

// D::run(context, op, wave) is the consumers' part of a wave, D::load(loader, op, wave) the loader's.
template <class M, class D>
__device__ __forceinline__ void load_waves(const WaveParams& p) {
  WaveLoader<M> loader(p);
#pragma unroll 1
  for (u32 i = 0; i < p.wave_count; i++) {
    loader.wave = i;
    loader.met = i == 0;
    D::load(loader, uniform(__ldg(&p.waves[i].op)), p.waves[i]);
  }
  loader.drain();
}
template <class M, class D>
__device__ __forceinline__ void consume_waves(const WaveParams& p) {
  WaveContext<M> c(p);
#pragma unroll 1
  for (u32 i = 0; i < p.wave_count; i++) {
    c.begin_wave(i);
    c.stamp(0);
    if (i > 0) {
      if (c.warp() == 0) await_waves<M::SMS>(p.arrived, i, c.waiter());
      c.barrier();
    }
    c.stamp(1);
    D::run(c, uniform(__ldg(&p.waves[i].op)), p.waves[i]);
    c.barrier();
    c.stamp(3);
    if (c.tid() == 0) end_wave(p.arrived);
  }
}

template <class M, class D>
__device__ __forceinline__ void run_waves(const WaveParams& p) {
  static_assert(sizeof(WaveState<M>) <= M::STATE_BYTES, "the state part of the shared-memory map is too small");
  WaveState<M>& state = wave_state<M>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < M::SLOTS; i++) {
      Slot<false>::init(&state.full[i], M::LOADER_WARPS);
      Slot<false>::init(&state.empty[i], M::WARPS);
    }
    state.dog = Watchdog{p.report, p.abort, global_ns() + p.timeout_ns};
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __syncthreads();
  // The launch has given as many registers to each thread as there are for all, and consumers want more.
  const u32 warp = uniform(threadIdx.x / 32);
  if (warp >= u32(M::WARPS)) {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(M::LOADER_REGISTERS));
#endif
    load_waves<M, D>(p);
  } else {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(M::REGISTERS));
#endif
    consume_waves<M, D>(p);
  }
}
