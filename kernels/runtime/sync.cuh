// The only file that waits or signals. The memory model is the one of src/ir/mod.rs:
//
// - A packet is 8 bytes: 32 bits of payload below, the tag of the step above. It is stored and loaded as one
//   single-copy-atomic word, so a reader that sees the tag has the payload; nothing else is ordered by it.
// - `release_step` and `acquire_step` fence once a step around the arg-max pairs, which every SM reads: what a step wrote to the
//   cache is visible to the next step on every SM. `hand_over_step` passes that on to the loader, and `fence_history` to its
//   bulk copies.
// - Consumer warps of a block meet at one named barrier; ring slots are handed over through mbarriers.
// - Every wait is bounded: after `deadline_ns` it records what it waited for, raises the abort word, and all SMs leave. Blocks of the sampler,
//   which wait for one another alone, end the launch with an error instead.
#pragma once

// One for each block, in shared memory: every wait needs it, and it should not take registers.
struct Watchdog {
  u32* report;         // host-visible, 8 words an SM: state, step, task, event, observed, expected, kind, -
  volatile u32* abort; // device-wide abort word, also written by the host
  u64 deadline_ns;     // globaltimer value after which a wait gives up
};

enum class WaitKind : u32 { PACKET = 1, RING_FULL = 2, RING_EMPTY = 3, HISTORY = 4, WAVE = 5, PEER = 6, TURN = 7 };

// Who waits. The entry is read only when a wait is given up; null: the loader waits.
struct WaitSite {
  u32 step;
  const Entry* entry;
};

// What a consumer's wait needs. Ops make one for each wait: its addresses in shared memory cost no register then, and a copy that
// is kept between waits would.
struct Waiter {
  u32& patience; // polls of a wait before it looks at the clock
  const Watchdog* dog;
  WaitSite at;
};

__device__ __forceinline__ u64 global_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Values of a thread's patience: polls before it looks at the clock and the abort word. Once a launch is lost, every wait polls
// once and goes on, so that all threads run to the end of the step and leave together.
constexpr u32 POLLS_BETWEEN_CHECKS = 4096;
constexpr u32 POLLS_WHEN_LOST = 1;

// True: leave, the launch is lost. Out of line, so that what only this needs takes no registers of the waits.
__device__ __noinline__ bool wait_expired(const Watchdog* w, WaitSite at, WaitKind kind, u32 observed, u32 expected,
                                          bool done) {
  if (*w->abort) return true;
  if (global_ns() < w->deadline_ns) return false;
  u32* r = w->report + blockIdx.x * 8;
  if (!done && atomicCAS(r, 0u, 1u) == 0u) {
    r[1] = at.step;
    r[2] = at.entry ? at.entry->task : ~0u;
    r[3] = at.entry ? at.entry->event : ~0u;
    r[4] = observed;
    r[5] = expected;
    r[6] = u32(kind);
    __threadfence_system();
  }
  *w->abort = 1u;
  return true;
}

// After `patience` polls in vain, by whole warps. True: stop waiting.
__device__ __forceinline__ bool give_up(Waiter w, bool done, WaitKind kind, u32 observed, u32 expected) {
  if (w.patience == POLLS_WHEN_LOST) return true;
  if (!__any_sync(~0u, wait_expired(w.dog, w.at, kind, observed, expected, done))) return false;
  w.patience = POLLS_WHEN_LOST;
  return true;
}

__device__ __forceinline__ u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// ---- packets ----------------------------------------------------------------------------------------------------

// Of several devices, each SM stores packets and words into the memory of all and polls that of its own. All accesses to them have one scope, or
// 8 bytes may tear; and the step's fences reach as far as its packets.
#ifdef SEVERAL_DEVICES
#define REACH "sys"
#else
#define REACH "gpu"
#endif

__device__ __forceinline__ void publish(u64* to, u32 payload, u32 tag) {
  u64 word = (u64(tag) << 32) | payload;
  asm volatile("st.relaxed." REACH ".global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
// Two adjacent packets; each is atomic on its own.
__device__ __forceinline__ void publish2(u64* to, u32 first, u32 second, u32 tag) {
  const u64 high = u64(tag) << 32;
  asm volatile("st.relaxed." REACH ".global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(high | first), "l"(high | second) : "memory");
}
// Two adjacent packets, unless a lane is not `active`; each is atomic on its own, which is all that is needed. One
// predicated instruction: a branch around it would cost more than the load.
__device__ __forceinline__ void peek2(const u64* from, bool active, u64& a, u64& b) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.relaxed." REACH ".global.v2.u64 {%0,%1}, [%2];}"
               : "+l"(a), "+l"(b)
               : "l"(from), "r"(u32(active))
               : "memory");
}
__device__ __forceinline__ void peek(const u64* from, bool active, u64& a) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p ld.relaxed." REACH ".global.u64 %0, [%1];}"
               : "+l"(a)
               : "l"(from), "r"(u32(active))
               : "memory");
}
// The payload of a packet that the block has waited for, once more. As wide and as strong as the store: a race of two widths
// would take the program out of the memory model, and a weak load may be narrowed to the payload.
__device__ __forceinline__ u32 reread(const u64* from) {
  u64 packet;
  asm volatile("ld.relaxed." REACH ".global.u64 %0, [%1];" : "=l"(packet) : "l"(from) : "memory");
  return u32(packet);
}
__device__ __forceinline__ bool fresh(u64 packet, u32 tag) { return u32(packet >> 32) == tag; }

// What a lane holds in place of a packet that it does not wait for.
__device__ __forceinline__ u64 no_packet(u32 tag) { return u64(tag) << 32; }
// Waits until all lanes have the `active` ones of N pairs of packets at `base + offset(i)`; the others read as zeros. By whole
// warps: lanes that leave a loop one by one would meet again only at the price of a second wait. From three pairs on, the first
// is awaited alone: if every SM polled all of a long vector, the weights would lose L2 bandwidth. FEW: only a few SMs wait for
// these packets, so they poll all pairs and save that round.
template <int N, bool FEW = false, class Offset>
__device__ __forceinline__ void await_pairs(const u64* base, Offset offset, const bool (&active)[N], u32 tag, u64 (&a)[N],
                                            u64 (&b)[N], Waiter w) {
  if constexpr (N > 2 && !FEW) {
    const bool one[1] = {active[0]};
    u64 first[1], second[1];
    await_pairs<1>(base, offset, one, tag, first, second, w);
  }
  u32 left = w.patience;
#pragma unroll
  for (int i = 0; i < N; i++) a[i] = b[i] = no_packet(tag);
  for (;;) {
#pragma unroll
    for (int i = 0; i < N; i++) peek2(base + offset(i), active[i], a[i], b[i]);
    bool done = true;
#pragma unroll
    for (int i = 0; i < N; i++) done = done && fresh(a[i], tag) && fresh(b[i], tag);
    if (__all_sync(~0u, done)) return;
    if (--left == 0) {
      u32 seen = tag;
#pragma unroll
      for (int i = 0; i < N; i++) seen = !fresh(a[i], tag) ? u32(a[i] >> 32) : (!fresh(b[i], tag) ? u32(b[i] >> 32) : seen);
      if (give_up(w, done, WaitKind::PACKET, seen, tag)) return;
      left = POLLS_BETWEEN_CHECKS;
    }
  }
}
// The same for N single packets.
template <int N>
__device__ __forceinline__ void await_packets(const u64* const (&from)[N], const bool (&active)[N], u32 tag, u32 (&payload)[N],
                                              Waiter w) {
  u32 left = w.patience;
  u64 word[N];
#pragma unroll
  for (int i = 0; i < N; i++) word[i] = no_packet(tag);
  for (;;) {
#pragma unroll
    for (int i = 0; i < N; i++) peek(from[i], active[i], word[i]);
    bool done = true;
#pragma unroll
    for (int i = 0; i < N; i++) done = done && fresh(word[i], tag);
    if (__all_sync(~0u, done)) break;
    if (--left == 0) {
      u32 seen = tag;
#pragma unroll
      for (int i = 0; i < N; i++) seen = fresh(word[i], tag) ? seen : u32(word[i] >> 32);
      if (give_up(w, done, WaitKind::PACKET, seen, tag)) break;
      left = POLLS_BETWEEN_CHECKS;
    }
  }
#pragma unroll
  for (int i = 0; i < N; i++) payload[i] = u32(word[i]);
}

// ---- words ------------------------------------------------------------------------------------------------------
// See rows/words.cuh. An access to a vector of words is one access to each of them, in no order; each is single-copy atomic.

__device__ __forceinline__ void store_word(u32* to, u32 word) {
  asm volatile("st.relaxed." REACH ".global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}
__device__ __forceinline__ u32 load_word(const u32* from) {
  u32 word;
  asm volatile("ld.relaxed." REACH ".global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
  return word;
}
__device__ __forceinline__ void load_piece(const u8* from, bool active, uint4& v) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed." REACH ".global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "r"(u32(active))
               : "memory");
}
// Whether every word of a piece is there.
__device__ __forceinline__ bool whole(const uint4 v) { return max(max(v.x, v.y), max(v.z, v.w)) != ~0u; }

// Waits, by whole warps, until every piece of `v` is whole. The caller has loaded them from `base + offset(i)`, and set those that a
// lane does not want to zeros. Every round loads all missing pieces: polling one piece and fetching the rest after it would cost a
// second trip to L2 in every exchange.
template <int N, class Offset>
__device__ __forceinline__ void await_pieces(const u8* base, Offset offset, uint4 (&v)[N], Waiter w) {
  u32 left = w.patience;
  for (;;) {
    bool done = true;
#pragma unroll
    for (int i = 0; i < N; i++) done = done && whole(v[i]);
    if (__all_sync(~0u, done)) return;
    if (--left == 0) {
      if (give_up(w, done, WaitKind::PACKET, 0, 1)) {
#pragma unroll
        for (int i = 0; i < N; i++)
          if (!whole(v[i])) v[i] = make_uint4(0, 0, 0, 0);
        return;
      }
      left = POLLS_BETWEEN_CHECKS;
    }
#pragma unroll
    for (int i = 0; i < N; i++) load_piece(base + offset(i), !whole(v[i]), v[i]);
  }
}
// The same for N words; those that are not `active` read as zeros.
template <int N, class Offset>
__device__ __forceinline__ void await_words(const u8* base, Offset offset, const bool (&active)[N], u32 (&v)[N], Waiter w) {
  u32 left = w.patience;
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = active[i] ? ~0u : 0u;
  for (;;) {
    bool done = true;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (v[i] == ~0u) v[i] = load_word(reinterpret_cast<const u32*>(base + offset(i)));
#pragma unroll
    for (int i = 0; i < N; i++) done = done && v[i] != ~0u;
    if (__all_sync(~0u, done)) return;
    if (--left == 0) {
      if (give_up(w, done, WaitKind::PACKET, 0, 1)) {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = v[i] == ~0u ? 0u : v[i];
        return;
      }
      left = POLLS_BETWEEN_CHECKS;
    }
  }
}

// ---- step boundary ----------------------------------------------------------------------------------------------

// PTX 8.6 (CUDA 12.7) has fences that only release or only acquire, from sm_90 on.
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1207
#define ONE_SIDED_FENCES 1
#else
#define ONE_SIDED_FENCES 0
#endif

// Called by the thread that publishes the arg-max pairs of a step, before it does so: everything this block wrote in the step
// becomes visible with them. The thread has passed a block barrier since the last write of other warps.
__device__ __forceinline__ void release_step() {
#if ONE_SIDED_FENCES
  asm volatile("fence.release." REACH ";" ::: "memory");
#else
  asm volatile("fence.acq_rel." REACH ";" ::: "memory");
#endif
}
// Called by each thread that polled arg-max pairs, after its last poll and before a block barrier. That thread has to fence:
// a fence of another thread after the barrier is no acquire. On sm_90 an acquire waits for nothing.
__device__ __forceinline__ void acquire_step() {
#if ONE_SIDED_FENCES
  asm volatile("fence.acquire." REACH ";" ::: "memory");
#else
  asm volatile("fence.acq_rel." REACH ";" ::: "memory");
#endif
}
// A word in shared memory that tells other warps of the block what its writer stored before.
__device__ __forceinline__ void store_told(u32* to, u32 word) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(smem_address(to)), "r"(word) : "memory");
}
__device__ __forceinline__ u32 load_told(const u32* from) {
  u32 word;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(word) : "r"(smem_address(from)) : "memory");
  return word;
}
// The same between the two blocks of a pair: `to` is an address of the other block (`peer_address`), which looks at its own word.
__device__ __forceinline__ void store_at_peer(u32 to, u32 word) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
#endif
}
__device__ __forceinline__ void store_told_at_peer(u32 to, u32 word) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.release.cluster.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
#endif
}
__device__ __forceinline__ u32 load_told_by_peer(const u32* from) {
  u32 word = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];" : "=r"(word) : "r"(smem_address(from)) : "memory");
#endif
  return word;
}
// Hands the acquired step to the loader. One thread calls it, after the block barrier that follows `acquire_step`. It is a word that
// only grows, not an mbarrier: a loader that skips steps without history could not tell the parity of a step from that of two before.
__device__ __forceinline__ void hand_over_step(u32* word, u32 tag) { store_told(word, tag); }
// The last step that was handed over. Each thread of the loader calls it.
__device__ __forceinline__ u32 handed_over_step(const u32* word) { return load_told(word); }
// Called after that by the thread that copies in bulk: the copies read through another proxy what ordinary stores wrote to the cache.
// The fence has to be in this thread, between its acquire and the copy. A fence where the rows were written, or in the thread that
// hands the step over, is not on this path.
__device__ __forceinline__ void fence_history() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// ---- waves ------------------------------------------------------------------------------------------------------
// See waves/context.cuh. Each block adds one to a count when it comes to a meeting, so n meetings are over when the count is n * SMS.

// Counts a block in, after a fence.
__device__ __forceinline__ void count_in(u32* arrived) {
  asm volatile("red.relaxed." REACH ".global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}
// Called by one thread, after the block barrier that follows the last write of the wave before the meeting.
__device__ __forceinline__ void end_wave(u32* arrived) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrived) : "memory");
}
// Whole warps wait until all blocks have met so many times; they then see what those wrote before. Other warps of the block see
// it after a block barrier; a lane that copies in bulk needs a `fence_history` of its own.
template <int SMS>
__device__ __forceinline__ void await_waves(const u32* arrived, u32 meetings, Waiter w) {
  u32 left = w.patience;
  for (;;) {
    u32 count;
    asm volatile("ld.acquire." REACH ".global.u32 %0, [%1];" : "=r"(count) : "l"(arrived) : "memory");
    const bool done = count >= meetings * SMS;
    if (__all_sync(~0u, done)) return;
    if (--left == 0) {
      if (give_up(w, done, WaitKind::WAVE, count, meetings * SMS)) return;
      left = POLLS_BETWEEN_CHECKS;
    }
  }
}

// ---- pairs of blocks --------------------------------------------------------------------------------------------
// The two blocks of a cluster store to each other's shared memory. Each store adds its bytes to a barrier of the receiver, as a release at
// the scope of the cluster, so a thread that has seen the phase end, and has fenced since, sees what was stored. The fences name shared memory alone, and wait for
// nothing; those of older toolkits also make L1 forget what it has. The ISA does not say through which proxy `st.async` stores, so each
// side has a fence of proxies, too.

// Where the other block of the pair has what this one has at `p`.
__device__ __forceinline__ u32 peer_address(const void* p) {
  u32 at = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .u32 r; mov.u32 r, %%cluster_ctarank; xor.b32 r, r, 1; mapa.shared::cluster.u32 %0, %1, r;}" : "=r"(at) : "r"(smem_address(p)));
#endif
  return at;
}
// Before the first store to memory that the other block has used, of which it said so.
__device__ __forceinline__ void fence_before_sending() {
#if ONE_SIDED_FENCES
  asm volatile("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
#elif __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cluster;" ::: "memory");
#endif
}
__device__ __forceinline__ void send_to_peer(u32 to, float2 v, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to), "f"(v.x), "f"(v.y), "r"(barrier) : "memory");
#endif
}
__device__ __forceinline__ bool peer_has_sent(u64* word, u32 use) {
  u32 done = 0;
#if ONE_SIDED_FENCES
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
               : "=r"(done)
               : "r"(smem_address(word)), "r"(use & 1u)
               : "memory");
#elif __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
               : "=r"(done)
               : "r"(smem_address(word)), "r"(use & 1u)
               : "memory");
#endif
  return done;
}
// By each lane, between its wait and its loads of what was sent.
__device__ __forceinline__ void fence_sent() {
#if ONE_SIDED_FENCES
  asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
#endif
}
// By each lane, after its last access to that memory in a wave: the other block may store there once it has heard that the wave has ended.
__device__ __forceinline__ void fence_received() {
#if ONE_SIDED_FENCES
  asm volatile("fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;" ::: "memory");
#elif __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
// By all threads of both blocks.
__device__ __forceinline__ void meet_peer() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Copies 16 bytes of global memory to shared memory without a register, past L1.
__device__ __forceinline__ void copy_ahead(void* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_address(to)), "l"(from) : "memory");
#endif
}

// Until all of this thread's copies of that kind have landed. Other threads see them after a barrier.
__device__ __forceinline__ void await_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// ---- block ------------------------------------------------------------------------------------------------------

template <int THREADS>
__device__ __forceinline__ void consumer_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// The same of one of up to four teams of threads of the block.
template <int THREADS>
__device__ __forceinline__ void team_barrier(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + team), "n"(THREADS) : "memory");
}

// Gives each calling thread a place of its own in a list of this block. Orders nothing.
__device__ __forceinline__ u32 take_place(u32* count) { return atomicAdd(count, 1u); }
// Takes `count` places and returns the first; adds to a sum; raises a maximum: of several threads or blocks. They order nothing: a reader
// of the result waits at a barrier of the block, or runs in a later launch on the stream.
__device__ __forceinline__ u32 take_places(u32* taken, u32 count) { return atomicAdd(taken, count); }
__device__ __forceinline__ void add_to(u32* sum, u32 value) { atomicAdd(sum, value); }
__device__ __forceinline__ void add_to(u64* sum, u64 value) { atomicAdd(sum, value); }
__device__ __forceinline__ void raise_to(u64* most, u64 value) { atomicMax(most, value); }

// Counts this block among those that share sums, and returns how many were counted before. One thread calls it, after a barrier of the
// block. The block that is counted last sees, after its next barrier, all sums that blocks added before they were counted.
__device__ __forceinline__ u32 count_block(u32* blocks) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(blocks) : "memory");
  return before;
}

// Tells the other blocks of a launch a word that is not 0, each in a place of its own, and waits for such a word. It orders nothing else, unless
// the thread that tells calls `release_step` before, and each thread that waits `acquire_step` afterwards. All blocks are resident at once,
// and each tells its word before it waits, so a wait is short: after some seconds a block is missing.
__device__ __forceinline__ void tell_blocks(u64* to, u64 word) { publish(to, u32(word), u32(word >> 32)); }
// For the next launch, when no block waits for this word any more.
__device__ __forceinline__ void clear_told(u64* word) { publish(word, 0u, 0u); }
__device__ __forceinline__ u64 wait_for_block(const u64* from) {
  for (u32 polls = 1;; polls++) {
    u64 word = 0;
    peek(from, true, word);
    if (word != 0) return word;
    if (polls == 1u << 22) __trap();
  }
}

// ---- ring slots -------------------------------------------------------------------------------------------------
// A slot has a `full` and an `empty` word of 8 bytes each. With COUNTERS they are counts of fills and releases (sm_75 has
// no mbarriers; any target may choose plain copies); otherwise mbarriers, where `parity` is the low bit of the use.

template <bool COUNTERS>
struct Slot;

template <>
struct Slot<true> {
  static __device__ __forceinline__ void init(u64* word, u32) { *reinterpret_cast<u32*>(word) = 0; }
  // One arrival, which releases the thread's earlier accesses to shared memory.
  static __device__ __forceinline__ void arrive(u64* word) {
    asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(smem_address(word)) : "memory");
  }
  static __device__ __forceinline__ bool reached(u64* word, u32 use, u32 arrivals) {
    u32 count;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(count) : "r"(smem_address(word)) : "memory");
    return count - (use + 1) * arrivals < 0x80000000u;
  }
  static __device__ __forceinline__ bool peek(u64* word, u32 use, u32 arrivals) { return reached(word, use, arrivals); }
};

#if __CUDA_ARCH__ >= 800
template <>
struct Slot<false> {
  static __device__ __forceinline__ void init(u64* word, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(smem_address(word)), "r"(arrivals));
  }
  static __device__ __forceinline__ void arrive(u64* word) {
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(smem_address(word)) : "memory");
  }
  // By some lanes of a warp, without a branch.
  static __device__ __forceinline__ void arrive_if(u64* word, bool arrives) {
    asm volatile("{.reg .b64 s; .reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared.b64 s, [%0];}" ::"r"(smem_address(word)), "r"(u32(arrives))
                 : "memory");
  }
  static __device__ __forceinline__ bool reached(u64* word, u32 use, u32) {
    u32 done;
#if __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(smem_address(word)), "r"(use & 1u)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(smem_address(word)), "r"(use & 1u)
                 : "memory");
#endif
    return done;
  }
  // `reached` may suspend the thread for a while; this one only looks.
  static __device__ __forceinline__ bool peek(u64* word, u32 use, u32) {
    u32 done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(smem_address(word)), "r"(use & 1u)
                 : "memory");
    return done;
  }
};
#endif

// Called by the thread that copies in bulk, between its wait for an empty slot and the copy. The wait orders the consumers' reads
// before ordinary accesses of this thread, but not before accesses of another proxy: without the fence a bulk copy could overwrite
// the slot before an earlier read is done. The consumers could fence instead, but that would delay every product.
__device__ __forceinline__ void fence_empty_slot() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// One arrival at a slot that then waits for `bytes` of bulk copies.
__device__ __forceinline__ void expect_bytes(u64* full, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}" ::"r"(smem_address(full)), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void copy_in_bulk(u8* to, const u8* from, u32 bytes, u64* full, u64 policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(smem_address(to)),
               "l"(from), "r"(bytes), "r"(smem_address(full)), "l"(policy)
               : "memory");
#endif
}
// Asks for memory that is read soon, so that it comes from L2 then. L2 is what all SMs see, so it need not be written yet. A multiple of 16 bytes.
__device__ __forceinline__ void bring_to_l2(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}
// By a thread, before its first copy of a box of this tensor map in a launch. Tensor maps are read by a proxy of their own, which may still know another map that
// lay there in an earlier launch: the host has stored this one. PTX 8.3 (CUDA 12.3) has the fence.
__device__ __forceinline__ void see_tensor_map(const u8* map) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1203
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
#endif
}
// The same of a box of a tensor map of two dimensions, from element `x` of line `y` on. Elements that do not exist arrive as zeros.
__device__ __forceinline__ void copy_box_in_bulk(u8* to, const u8* map, u32 x, u32 y, u64* full, u64 policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem_address(to)),
               "l"(map), "r"(x), "r"(y), "r"(smem_address(full)), "l"(policy)
               : "memory");
#endif
}

// A box of a tensor map of three dimensions: lines of 64 bytes from `line` on, of units from `unit` on. What does not exist arrives as zeros.
__device__ __forceinline__ void copy_lines_in_bulk(u8* to, const u8* map, u32 line, u32 unit, u64* full, u64 policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(smem_address(to)),
               "l"(map), "r"(0), "r"(line), "r"(unit), "r"(smem_address(full)), "l"(policy)
               : "memory");
#endif
}

// A tile of positions of a cache by a tensor map of five dimensions (`CacheBox` of src/codegen/waves.rs): those from position 8 * `eight` on.
__device__ __forceinline__ void copy_tile_in_bulk(u8* to, const u8* map, u32 eight, u64* full, u64 policy) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %2, %2, %3, %2}], [%4], %5;" ::"r"(smem_address(to)),
      "l"(map), "r"(0), "r"(eight), "r"(smem_address(full)), "l"(policy)
      : "memory"
  );
#endif
}

// Slots that both blocks of a pair fill and read (`shares_weights`). A warp that has read one says so to both blocks, and a block copies to both once
// all warps of both have. So the barriers of such slots are used at the scope of the cluster, with the fences above: an arrival that released by
// itself would wait for all earlier stores to global memory.
struct PairSlot {
  // By some lanes of a warp, after `fence_received` by all of them: an arrival at the slot of block `rank` of the pair.
  static __device__ __forceinline__ void arrive_if(u64* word, u32 rank, bool arrives) {
#if ONE_SIDED_FENCES
    asm volatile(
        "{.reg .u32 r; .reg .pred p; setp.ne.u32 p, %2, 0; mapa.shared::cluster.u32 r, %0, %1; @p mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [r];}" ::"r"(
            smem_address(word)
        ),
        "r"(rank), "r"(u32(arrives))
        : "memory"
    );
#elif __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .u32 r; .reg .pred p; setp.ne.u32 p, %2, 0; mapa.shared::cluster.u32 r, %0, %1; @p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];}" ::"r"(
            smem_address(word)
        ),
        "r"(rank), "r"(u32(arrives))
        : "memory"
    );
#endif
  }
  static __device__ __forceinline__ bool reached(u64* word, u32 use) { return peer_has_sent(word, use); }
  // `reached` may suspend the thread for a while; this one only looks.
  static __device__ __forceinline__ bool peek(u64* word, u32 use) {
    u32 done = 0;
#if ONE_SIDED_FENCES
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(smem_address(word)), "r"(use & 1u)
                 : "memory");
#elif __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
                 : "=r"(done)
                 : "r"(smem_address(word)), "r"(use & 1u)
                 : "memory");
#endif
    return done;
  }
  // Copies to the same place of both blocks, each of which waits for the bytes at its own barrier.
  static __device__ __forceinline__ void copy(u8* to, const u8* from, u32 bytes, u64* full, u64 policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1], %2, [%3], %4, %5;" ::"r"(smem_address(to)), "l"(from),
        "r"(bytes), "r"(smem_address(full)), "h"((unsigned short)3), "l"(policy)
        : "memory"
    );
#endif
  }
  static __device__ __forceinline__ void copy_lines(u8* to, const u8* map, u32 line, u32 unit, u64* full, u64 policy) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(smem_address(to)),
        "l"(map), "r"(0), "r"(line), "r"(unit), "r"(smem_address(full)), "h"((unsigned short)3), "l"(policy)
        : "memory"
    );
#endif
  }
};

// Whole warps wait for a slot after a first look in vain. Out of line, because ops wait for slots at many places. Returns the thread's
// patience: a reference to it would force it into memory.
template <bool COUNTERS>
__device__ __noinline__ u32 await_slot_longer(u64* word, u32 use, u32 arrivals, u32 patience, const Watchdog* dog, WaitSite at,
                                              WaitKind kind) {
  u32 left = patience;
  for (;;) {
    const bool done = Slot<COUNTERS>::reached(word, use, arrivals);
    if (__all_sync(~0u, done)) return patience;
    if (--left == 0) {
      if (give_up(Waiter{patience, dog, at}, done, kind, use, arrivals)) return patience;
      left = POLLS_BETWEEN_CHECKS;
    }
  }
}
template <bool COUNTERS>
__device__ __forceinline__ void await_slot_longer(u64* word, u32 use, u32 arrivals, Waiter w, WaitKind kind) {
  w.patience = await_slot_longer<COUNTERS>(word, use, arrivals, w.patience, w.dog, w.at, kind);
}
template <bool COUNTERS>
__device__ __forceinline__ void await_slot(u64* word, u32 use, u32 arrivals, Waiter w, WaitKind kind) {
  if (!__all_sync(~0u, Slot<COUNTERS>::peek(word, use, arrivals))) await_slot_longer<COUNTERS>(word, use, arrivals, w, kind);
}
