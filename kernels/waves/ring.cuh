// Owns the rings of a kernel of waves. The first warp of the loader copies what earlier waves wrote, the others copy weights: to issue a bulk copy
// takes a warp as long as many bytes take to arrive. The warps that fill a slot each arrive once at each chunk, even if they copy nothing,
// so consumers pass no chunk before all these warps have seen its slot free. A barrier knows only the parity of a phase: a warp that is
// late by a phase could take one phase for another.
#pragma once

// Whether launches of the machine may share the chunks of a ring.
template <class M, class R>
constexpr bool MAY_SHARE = M::PAIRS && !M::STEPS && R::FIRST != 0;
// Whether a chunk is there, of either kind. The second may suspend the thread for a while.
template <class M, class R>
__device__ __forceinline__ bool chunk_peek(u64* word, u32 use) {
  if constexpr (MAY_SHARE<M, R>) return PairSlot::peek(word, use);
  return Slot<false>::peek(word, use, R::FILLERS);
}
template <class M, class R>
__device__ __forceinline__ void chunk_await(WaveContext<M>& c, u64* word, u32 use) {
  if constexpr (MAY_SHARE<M, R>) {
    u32 left = c.patience;
    while (!__all_sync(~0u, PairSlot::reached(word, use)))
      if (--left == 0) {
        if (give_up(c.waiter(), false, WaitKind::RING_FULL, use, R::FILLERS)) break;
        left = POLLS_BETWEEN_CHECKS;
      }
  } else {
    await_slot_longer<false>(word, use, R::FILLERS, c.waiter(), WaitKind::RING_FULL);
  }
}

// Waits for the next N chunks, gives each to `read`, and leaves them. Each lane looks for one. Before the block enters a wave; so no time counts as starved.
template <int N, class M, class R, class Read>
__device__ __forceinline__ void wave_take_many(WaveContext<M>& c, RingCursor<R>& at, const Read& read) {
  static_assert(N <= R::SLOTS && N <= 32, "the chunks are in the ring at the same time");
  const u32 nth = at.slot + min(u32(c.lane()), u32(N - 1)), wraps = nth >= u32(R::SLOTS) ? 1 : 0, slot = nth - wraps * R::SLOTS;
  await_slot<false>(&c.state().full[R::FIRST + slot], at.use + wraps, R::FILLERS, c.waiter(), WaitKind::RING_FULL);
  __syncwarp(); // a lane reads chunks that other lanes have looked for
#pragma unroll
  for (int i = 0; i < N; i++, at.next()) read(i, c.memory() + R::AT + at.slot * R::SLOT_BYTES);
  __syncwarp();
  Slot<false>::arrive_if(&c.state().empty[R::FIRST + slot], c.lane() < N);
}
// Takes chunks in three steps, for a loop that looks for its next chunks before it multiplies those that it has. `wave_look` says whether the chunks at
// two cursors are there, for each ring that is asked for. `wave_await` waits if not all lanes have seen them. `WaveChunk::take` takes a chunk and
// moves the cursor past it. A chunk that was seen stays until all warps have left it.
template <class M, class A, class B>
__device__ __forceinline__ bool wave_look(const WaveContext<M>& c, const RingCursor<A>& a, const RingCursor<B>& b, bool first, bool second) {
  u64* const full = c.state().full;
  bool there = true;
  if (first) there &= chunk_peek<M, A>(&full[A::FIRST + a.slot], a.use);
  if (second) there &= chunk_peek<M, B>(&full[B::FIRST + b.slot], b.use);
  return there;
}
template <class M, class A, class B>
__device__ __forceinline__ void wave_await(WaveContext<M>& c, const RingCursor<A>& a, const RingCursor<B>& b, bool seen, bool first, bool second) {
  if (!(first || second) || __all_sync(~0u, seen)) return;
  const u64 begun = M::TRACE && c.tid() == 0 ? global_ns() : 0;
  u64* const full = c.state().full;
  if (first) chunk_await<M, A>(c, &full[A::FIRST + a.slot], a.use);
  if (second) chunk_await<M, B>(c, &full[B::FIRST + b.slot], b.use);
  if constexpr (M::TRACE)
    if (c.tid() == 0) c.starved_ns += u32(global_ns() - begun);
}
// Waits for the chunk at a cursor, by all consumer warps.
template <class M, class R>
__device__ __forceinline__ const u8* wave_take(WaveContext<M>& c, const RingCursor<R>& at) {
  // A trace reads no clock for a chunk that is there: a wave may take fifty.
  if constexpr (M::TRACE)
    wave_await(c, at, at, wave_look(c, at, at, true, false), true, false);
  else
    await_slot<false>(&c.state().full[R::FIRST + at.slot], at.use, R::FILLERS, c.waiter(), WaitKind::RING_FULL);
  return c.memory() + R::AT + at.slot * R::SLOT_BYTES;
}
// Waits for two chunks; one look is enough if both are there. Without `both` the first one was taken before.
template <class M, class A, class B>
__device__ __forceinline__ void wave_take_pair(WaveContext<M>& c, const RingCursor<A>& a, const RingCursor<B>& b, const u8*& first, const u8*& second, bool both = true) {
  wave_await(c, a, b, wave_look(c, a, b, both, true), both, true);
  if constexpr (MAY_SHARE<M, B>) fence_sent();
  first = c.memory() + A::AT + a.slot * A::SLOT_BYTES;
  second = c.memory() + B::AT + b.slot * B::SLOT_BYTES;
}
template <class R>
struct WaveChunk {
  const u8* at = nullptr;
  int slot = 0;
  template <class M>
  __device__ __forceinline__ void take(const WaveContext<M>& c, RingCursor<R>& cursor) {
    slot = cursor.slot;
    at = c.memory() + R::AT + slot * R::SLOT_BYTES;
    cursor.next();
  }
};
// Once by each warp, after its last read of these chunks.
template <class M, class A, class B>
__device__ __forceinline__ void wave_leave(const WaveContext<M>& c, const WaveChunk<A>& input, const WaveChunk<B>& weights, bool leaves_input, bool leaves_weights) {
  if (!leaves_input && !leaves_weights) return;
  __syncwarp();
  u64* const empty = c.state().empty;
  const int first = leaves_input ? A::FIRST + input.slot : B::FIRST + weights.slot;
  if (leaves_input && leaves_weights)
    Slot<false>::arrive_if(&empty[c.lane() == 0 ? first : B::FIRST + weights.slot], c.lane() < 2);
  else
    Slot<false>::arrive_if(&empty[first], c.lane() == 0);
}
// Once by each warp, after its last read.
template <class M, class R>
__device__ __forceinline__ void wave_release(WaveContext<M>& c, RingCursor<R>& at) {
  __syncwarp();
  if (c.lane() == 0) Slot<false>::arrive(&c.state().empty[R::FIRST + at.slot]);
  at.next();
}

template <class M, class A, class B>
__device__ __forceinline__ void wave_release_pair(WaveContext<M>& c, RingCursor<A>& a, RingCursor<B>& b) {
  if constexpr (MAY_SHARE<M, B>) {
    const bool shares = shares_weights<M>(c.p);
    fence_received();
    __syncwarp();
    Slot<false>::arrive_if(&c.state().empty[A::FIRST + a.slot], c.lane() == 0);
    // One lane for each block that waits for this warp; without a shared chunk its own block alone.
    PairSlot::arrive_if(&c.state().empty[B::FIRST + b.slot], u32(c.lane()), shares ? c.lane() < 2 : u32(c.lane()) == blockIdx.x % 2);
    a.next();
    b.next();
    return;
  }
  __syncwarp();
  if (c.lane() < 2) Slot<false>::arrive(&c.state().empty[c.lane() == 0 ? A::FIRST + a.slot : B::FIRST + b.slot]);
  a.next();
  b.next();
}

// Returns the next turn that the loader tells its block, or no turn if the launch is lost. Whole warps call it; `w` is a context or a loader.
template <class W>
__device__ __forceinline__ WaveTurn wave_turn(W& w) {
  const u32 nth = ++w.turns;
  auto& turns = w.state().turns;
  const WaveTurn& told = turns[nth % (sizeof turns / sizeof turns[0])];
  u32 left = w.patience, seen;
  for (;;) {
    seen = W::PAIRED ? load_told_by_peer(&told.nth) : load_told(&told.nth);
    if (__all_sync(~0u, seen == nth)) break;
    if (--left == 0) {
      if (give_up(w.waiter(), seen == nth, WaitKind::TURN, seen, nth)) return WaveTurn{};
      left = POLLS_BETWEEN_CHECKS;
    }
  }
  return WaveTurn{{uniform(told.words[0]), uniform(told.words[1]), uniform(told.words[2])}, nth};
}

// What a warp of the loader does: R is the ring that it fills, `part` its place among those that do.
template <class M, class R>
struct WaveLoader {
  static constexpr bool PAIRED = WaveContext<M>::PAIRED;
  const WaveParams& p;
  const HeldMemory held;
  RingCursor<R> at;  // next chunk to fill
  u32 step, wave;
  u32 meetings;      // of all blocks in the step, before the wave
  u32 patience;
  u32 met;           // meetings of the launch that all blocks are known to have come to
  u32 turns;         // told, so far
  int part, lane;
#if __CUDA_ARCH__ >= 900
  u64 hint; // for L2: weights are read once, activations again
#endif

  __device__ __forceinline__ WaveLoader(const WaveParams& p, int part)
      : p(p), held(), at{0, 0}, step(0), wave(0), meetings(0), patience(POLLS_BETWEEN_CHECKS), met(0), turns(0), part(part), lane(int(threadIdx.x % 32)) {
    set_hint<R::FIRST == 0>();
  }
  // From now on: whether what is copied is read again.
  template <bool AGAIN>
  __device__ __forceinline__ void set_hint() {
#if __CUDA_ARCH__ >= 900
    if constexpr (AGAIN)
      asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(hint));
    else
      asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(hint));
#endif
  }
  __device__ __forceinline__ WaveState<M>& state() const { return *reinterpret_cast<WaveState<M>*>(held.memory() + M::STATE_AT); }
  __device__ __forceinline__ Waiter waiter() { return Waiter{patience, &state().dog, WaitSite{wave, nullptr}}; }
  // In a launch that is lost, waits return at once and nothing more is copied.
  __device__ __forceinline__ bool lost() const { return patience == POLLS_WHEN_LOST; }
  __device__ __forceinline__ bool shares() const { return MAY_SHARE<M, R> && shares_weights<M>(p); }
  // Whether this block makes copy `i` of a chunk: all of them, or every second one of a chunk that both blocks of the pair have.
  __device__ __forceinline__ bool makes(u32 i) const { return !shares() || i % 2 == blockIdx.x % 2; }
  __device__ __forceinline__ bool is_empty() const {
    u64* const word = &state().empty[R::FIRST + at.slot];
    if constexpr (MAY_SHARE<M, R>) return PairSlot::reached(word, at.use - 1);
    return Slot<false>::reached(word, at.use - 1, M::WARPS);
  }
  // Inlined: if consumers called the same function, ptxas would give them no more registers than the loader has.
  __device__ __forceinline__ void await_empty() {
    u32 left = patience;
    while (!__all_sync(~0u, is_empty()))
      if (--left == 0) {
        if (give_up(waiter(), false, WaitKind::RING_EMPTY, at.use - 1, shares() ? 2 * M::WARPS : M::WARPS)) return;
        left = POLLS_BETWEEN_CHECKS;
      }
  }
  // The slot at the cursor, once all consumers have left it. By every warp that fills the ring, for every chunk.
  __device__ __forceinline__ u8* free_slot() {
    if (at.use != 0) await_empty();
    if constexpr (MAY_SHARE<M, R>)
      fence_before_sending();
    else
      fence_empty_slot();
    return held.memory() + R::AT + at.slot * R::SLOT_BYTES;
  }
  // This warp's arrival at the chunk. The first warp says how many bytes all warps copy; some may have landed already.
  __device__ __forceinline__ void arrive(u32 bytes) {
    u64* full = &state().full[R::FIRST + at.slot];
    if (lane == 0 && !lost()) {
      if (part == 0)
        expect_bytes(full, bytes);
      else
        Slot<false>::arrive(full);
    }
    __syncwarp();
  }
  // Draws the next ticket of a counter in device memory. One lane calls it. It orders nothing: the blocks have met since the items were written.
  __device__ __forceinline__ u32 draw(u32* drawn) const { return take_place(drawn); }
  // Tells the other warps of the block their next turn.
  __device__ __forceinline__ void tell(const WaveTurn& turn) {
    auto& turns_told = state().turns;
    WaveTurn& to = turns_told[++turns % (sizeof turns_told / sizeof turns_told[0])];
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < 3; i++) to.words[i] = turn.words[i];
      store_told(&to.nth, turns);
    }
    __syncwarp();
  }
  // Whether this block draws the tickets that it has. Of two blocks that share chunks one draws for both.
  __device__ __forceinline__ bool draws() const { return !paired() || blockIdx.x % 2 == 0; }
  __device__ __forceinline__ bool paired() const { return PAIRED && shares_weights<M>(p); }
  // `tell`, and where blocks share chunks, tells all warps of the other one theirs.
  __device__ __forceinline__ void tell(const WaveTurn& turn, const WaveTurn& of_peer) {
    tell(turn);
    if (!paired()) return;
    auto& turns_told = state().turns;
    if (lane == 0) {
      WaveTurn& to = turns_told[turns % (sizeof turns_told / sizeof turns_told[0])];
#pragma unroll
      for (int i = 0; i < 3; i++) store_at_peer(peer_address(&to.words[i]), of_peer.words[i]);
      store_told_at_peer(peer_address(&to.nth), turns);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void copy(u8* to, const u8* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    if (!lost()) copy_in_bulk(to, from, bytes, &state().full[R::FIRST + at.slot], hint);
#endif
  }
  // The same to both blocks of a pair, if they share the chunk.
  __device__ __forceinline__ void copy_shared(u8* to, const u8* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    if (lost()) return;
    u64* const full = &state().full[R::FIRST + at.slot];
    if (shares())
      PairSlot::copy(to, from, bytes, full, hint);
    else
      copy_in_bulk(to, from, bytes, full, hint);
#endif
  }
  // Before this lane's first copy of a box in the launch.
  __device__ __forceinline__ void see_box(u32 box) { see_tensor_map(p.boxes + box * 128); }
  // A box of a tensor map: from element `x` of unit `y` on. What lies beyond a unit is zeros.
  __device__ __forceinline__ void copy_box(u8* to, u32 box, u32 x, u32 y) {
#if __CUDA_ARCH__ >= 900
    if (!lost()) copy_box_in_bulk(to, p.boxes + box * 128, x, y, &state().full[R::FIRST + at.slot], hint);
#endif
  }
  // The same of lines of 64 bytes, from line `line` of each unit on, swizzled (`SwizzledOperand`).
  __device__ __forceinline__ void copy_lines(u8* to, u32 box, u32 line, u32 unit) {
#if __CUDA_ARCH__ >= 900
    if (lost()) return;
    u64* const full = &state().full[R::FIRST + at.slot];
    if (shares())
      PairSlot::copy_lines(to, p.boxes + box * 128, line, unit, full, hint);
    else
      copy_lines_in_bulk(to, p.boxes + box * 128, line, unit, full, hint);
#endif
  }
  // To this block alone.
  __device__ __forceinline__ void copy_own_lines(u8* to, u32 box, u32 line, u32 unit) {
#if __CUDA_ARCH__ >= 900
    if (!lost()) copy_lines_in_bulk(to, p.boxes + box * 128, line, unit, &state().full[R::FIRST + at.slot], hint);
#endif
  }
  // A tile of a cache, of `bytes` bytes, from position 8 * `eight` of its pools on.
  __device__ __forceinline__ void copy_tile(u8* to, u32 box, u32 eight, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    if (!lost()) copy_tile_in_bulk(to, p.boxes + box * 128, eight, &state().full[R::FIRST + at.slot], hint);
#endif
  }
  // Before a copy of what waves wrote before the last meeting.
  __device__ __forceinline__ void meet() { meet(step * M::MEETINGS + meetings); }
  // Before a copy of what this wave wrote in the step before: until the first meeting after it.
  __device__ __forceinline__ void meet_last_step() { meet(step == 0 ? 0 : (step - 1) * M::MEETINGS + meetings + 1); }
  __device__ __forceinline__ void meet(u32 count) {
    if (met >= count) return;
    await_waves<all_blocks<M>()>(p.arrived, count, waiter());
    fence_history();
    met = count;
  }
  // No copy may land in shared memory after the block has ended. Consumers have waited for every copy unless the launch is lost.
  __device__ __forceinline__ void drain() {
    if (!lost()) return;
    const u64 end = global_ns() + 1000000;
    while (global_ns() < end) {}
  }
};
