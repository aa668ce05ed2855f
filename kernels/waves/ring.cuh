// Owns the ring of a kernel of waves. The warps of the loader fill each chunk together: a bulk copy costs the warp that asks for it as
// much time as many bytes take, so the first one asks for what earlier waves wrote, the others for weights. Each of them arrives once at each
// chunk, also where it copies nothing: consumers then pass no chunk before all have seen its slot free. A barrier knows the parity of a
// phase, so a warp that is late by a phase could take one for another.
#pragma once

// Waits for the chunk at the cursor, by all consumer warps.
template <class M>
__device__ __forceinline__ const u8* wave_take(WaveContext<M>& c) {
  const u64 begun = M::TRACE && c.tid() == 0 ? global_ns() : 0;
  await_slot<false>(&wave_state<M>().full[c.ring.slot], c.ring.use, 1, c.waiter(), WaitKind::RING_FULL);
  if constexpr (M::TRACE)
    if (c.tid() == 0) c.starved_ns += u32(global_ns() - begun);
  return block_memory() + c.ring.slot * M::SLOT_BYTES;
}
// Once by each warp, after its last read.
template <class M>
__device__ __forceinline__ void wave_release(WaveContext<M>& c) {
  __syncwarp();
  if (c.lane() == 0) Slot<false>::arrive(&wave_state<M>().empty[c.ring.slot]);
  c.ring.next();
}

template <class M>
struct WaveLoader {
  const WaveParams& p;
  RingCursor<M> at;  // next chunk to fill
  u32 wave;
  u32 patience;
  bool met;          // all blocks ended the wave before
  int part, lane;    // warp of the loader
#if __CUDA_ARCH__ >= 900
  u64 stream_once, keep; // hints for L2: weights are read once, activations again
#endif

  __device__ __forceinline__ explicit WaveLoader(const WaveParams& p)
      : p(p), at{0, 0}, wave(0), patience(POLLS_BETWEEN_CHECKS), met(false), part(int(uniform(threadIdx.x / 32)) - M::WARPS), lane(int(threadIdx.x % 32)) {
#if __CUDA_ARCH__ >= 900
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream_once));
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
#endif
  }
  __device__ __forceinline__ Waiter waiter() { return Waiter{patience, &wave_state<M>().dog, WaitSite{wave, nullptr}}; }
  // The waits of a launch that is lost return at once: nothing more is copied.
  __device__ __forceinline__ bool lost() const { return patience == POLLS_WHEN_LOST; }
  // In line: with a function that consumers call, too, ptxas gives them no more registers than the loader has.
  __device__ __forceinline__ void await_empty() {
    u32 left = patience;
    while (!__all_sync(~0u, Slot<false>::reached(&wave_state<M>().empty[at.slot], at.use - 1, M::WARPS)))
      if (--left == 0) {
        if (give_up(waiter(), false, WaitKind::RING_EMPTY, at.use - 1, M::WARPS)) return;
        left = POLLS_BETWEEN_CHECKS;
      }
  }
  // The slot at the cursor, once all consumers have left it. By every warp, for every chunk.
  __device__ __forceinline__ u8* free_slot() {
    if (at.use != 0) await_empty();
    fence_empty_slot();
    return block_memory() + at.slot * M::SLOT_BYTES;
  }
  // This warp's arrival at the chunk; the first warp says how many bytes all copy, whether or not some have landed before.
  __device__ __forceinline__ void arrive(u32 bytes) {
    u64* full = &wave_state<M>().full[at.slot];
    if (lane == 0 && !lost()) {
      if (part == 0)
        expect_bytes(full, bytes);
      else
        Slot<false>::arrive(full);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void copy(u8* to, const u8* from, u32 bytes, bool weights) {
#if __CUDA_ARCH__ >= 900
    if (!lost()) copy_in_bulk(to, from, bytes, &wave_state<M>().full[at.slot], weights ? stream_once : keep);
#endif
  }
  // Before the first copy of what an earlier wave wrote.
  __device__ __forceinline__ void meet() {
    if (met) return;
    await_waves<M::SMS>(p.arrived, wave, waiter());
    fence_history();
    met = true;
  }
  // No copy may land in shared memory that the block has given up. Consumers have waited for every copy unless the launch is lost.
  __device__ __forceinline__ void drain() {
    if (!lost()) return;
    const u64 end = global_ns() + 1000000;
    while (global_ns() < end) {}
  }
};
