// The loop of a kernel of waves: every block executes every wave, and all blocks meet between most of them. Dispatch is generated.
#pragma once

// D::run(context, op, wave) is the consumers' part of a wave, D::load(loader, op, wave) the loader's. If D::holds(op), the op enters its wave itself.
template <class M, class D, class R>
__device__ __forceinline__ void load_waves(const WaveParams& p, int part) {
  WaveLoader<M, R> loader(p, part);
  for (u32 s = 0; s < p.steps; s++)
#pragma unroll 1
    for (u32 i = 0; i < p.wave_count; i++) {
      loader.step = s;
      loader.wave = i;
      loader.meetings = __ldg(&p.waves[i].meetings);
      D::load(loader, uniform(__ldg(&p.waves[i].op)), p.waves[i]);
    }
  loader.drain();
}
template <class M, class D>
__device__ __forceinline__ void consume_waves(const WaveParams& p) {
  WaveContext<M> c(p);
  c.fetch_first();
  c.await_fetched();
  c.barrier();
  u32 op = uniform(__ldg(&p.waves[0].op));
  for (u32 s = 0; s < p.steps; s++)
#pragma unroll 1
    for (u32 i = 0; i < p.wave_count; i++) {
      c.begin_wave(s, i);
      c.stamp(0);
      if (!D::holds(op)) c.enter();
      D::run(c, op, c.current());
      op = uniform(c.current().next_op); // known before the block enters that wave
      c.meetings = c.current().meets ? s * M::MEETINGS + c.current().meetings + 1 : 0;
      c.await_fetched();
      // Whatever a wave did in scratch: in a later one the other block of the pair sends to there.
      if (M::PAIRS) fence_received();
      c.barrier();
      c.stamp(3);
      if (c.meetings > 0 && c.tid() == 0) c.come_to_meeting();
    }
  // What the last step decided, for the host.
  if constexpr (M::STEPS)
    if (p.mailbox && blockIdx.x == 0) {
      c.begin_wave(p.steps, 0);
      c.await_meetings(p.steps * M::MEETINGS);
      for (u32 row = c.warp(); row < p.row_count; row += M::WARPS) {
        const int token = wave_decided<M>(c, row);
        if (c.lane() == 0) p.mailbox[1 + p.steps * M::BLOCK_ROWS + row] = token;
      }
    }
}

template <class M, class D>
__device__ __forceinline__ void run_waves(const WaveParams& p) {
  static_assert(sizeof(WaveState<M>) <= M::STATE_BYTES, "the state part of the shared-memory map is too small");
  WaveState<M>& state = wave_state<M>();
  if (threadIdx.x == 0) {
    for (int i = 0; i < M::INPUT_SLOTS + M::WEIGHT_SLOTS; i++) {
      Slot<false>::init(&state.full[i], i < M::INPUT_SLOTS ? InputRing<M>::FILLERS : WeightRing<M>::FILLERS);
      Slot<false>::init(&state.empty[i], i >= M::INPUT_SLOTS && shares_weights<M>(p) ? 2 * M::WARPS : M::WARPS);
    }
    if (M::PAIRS) Slot<false>::init(&state.paired, 1);
    if constexpr (told_turns<M>(nullptr) > 0)
      for (WaveTurn& turn : state.turns) turn.nth = 0;
    state.dog = Watchdog{p.report, p.abort, global_ns() + p.timeout_ns};
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  if constexpr (M::STEPS)
    if (threadIdx.x < p.row_count) place_row<M>(p, threadIdx.x);
  __syncthreads();
  // No block writes to one that is not there yet, or has gone.
  if (M::PAIRS) meet_peer();
  // At launch all threads have the same number of registers. Consumers need more than the loader.
  const u32 warp = uniform(threadIdx.x / 32);
  if (warp >= u32(M::WARPS)) {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(M::LOADER_REGISTERS));
#endif
    const int part = int(warp) - M::WARPS;
    if (part == 0)
      load_waves<M, D, InputRing<M>>(p, 0);
    else
      load_waves<M, D, WeightRing<M>>(p, part - 1);
  } else {
#if __CUDA_ARCH__ >= 900
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(M::REGISTERS));
#endif
    consume_waves<M, D>(p);
  }
  if (M::PAIRS) meet_peer();
}
