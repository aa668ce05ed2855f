// Owns the ring between loader and consumers: who fills which slot with what, and when.
//
// The loader walks the SM's stream in order. It waits for a free slot for each chunk; and before the first history chunk of a step,
// it waits until this block has acquired the step. A poll of the consumers waits for all bytes that were requested before it, so the
// loader keeps few copies in flight while many slots are full (docs/perf-log.md).
#pragma once

template <class M>
constexpr bool RING_COUNTERS = M::COPY == Copy::PLAIN;

template <class M>
constexpr u32 FULL_ARRIVALS = M::COPY == Copy::BULK ? 1 : (M::COPY == Copy::CP_ASYNC ? M::LOADER_WARPS * 32 : M::LOADER_WARPS);

// ---- consumer side ----------------------------------------------------------------------------------------------

// Waits for a chunk.
template <class M>
__device__ __forceinline__ const u8* ring_take(Context<M>& c, const RingCursor<M>& at) {
  const u64 begun = c.begin_starving();
  await_slot<RING_COUNTERS<M>>(&c.state().full[at.slot], at.use, FULL_ARRIVALS<M>, c.waiter(), WaitKind::RING_FULL);
  c.end_starving(begun);
  return block_memory() + at.slot * M::SLOT_BYTES;
}
// Waits for two chunks. If both are there, one look is enough.
template <class M>
__device__ __forceinline__ void ring_take_pair(Context<M>& c, const RingCursor<M>& a, const RingCursor<M>& b, const u8*& first,
                                               const u8*& second) {
  const u64 begun = c.begin_starving();
  typedef Slot<RING_COUNTERS<M>> S;
  u64* const full = c.state().full;
  const bool there = S::peek(&full[a.slot], a.use, FULL_ARRIVALS<M>) & S::peek(&full[b.slot], b.use, FULL_ARRIVALS<M>);
  if (!__all_sync(~0u, there)) {
    await_slot_longer<RING_COUNTERS<M>>(&full[a.slot], a.use, FULL_ARRIVALS<M>, c.waiter(), WaitKind::RING_FULL);
    await_slot_longer<RING_COUNTERS<M>>(&full[b.slot], b.use, FULL_ARRIVALS<M>, c.waiter(), WaitKind::RING_FULL);
  }
  c.end_starving(begun);
  first = block_memory() + a.slot * M::SLOT_BYTES;
  second = block_memory() + b.slot * M::SLOT_BYTES;
}
// Each warp calls it once for each chunk.
template <class M>
__device__ __forceinline__ void ring_release(Context<M>& c, const RingCursor<M>& at) {
  __syncwarp();
  if (c.lane() == 0) Slot<RING_COUNTERS<M>>::arrive(&c.state().empty[at.slot]);
}
template <class M>
__device__ __forceinline__ void ring_release_pair(Context<M>& c, const RingCursor<M>& a, const RingCursor<M>& b, bool both = true) {
  __syncwarp();
  if (c.lane() < (both ? 2 : 1)) Slot<RING_COUNTERS<M>>::arrive(&c.state().empty[c.lane() == 0 ? a.slot : b.slot]);
}

// Whether a step chooses among parts of matrices.
template <class M>
__device__ constexpr bool chooses(decltype(M::CHOOSES)*) {
  return true;
}
template <class M>
__device__ constexpr bool chooses(...) {
  return false;
}

// Most slots whose parts a run streams together; 0: each run is of one part.
template <class M>
__device__ constexpr int slots_of(decltype(M::CHOSEN_SLOTS)*) {
  return M::CHOSEN_SLOTS;
}
template <class M>
__device__ constexpr int slots_of(...) {
  return 0;
}

// ---- loader side ------------------------------------------------------------------------------------------------

// Where the weights of a run begin, or those of the first part that it may be of.
__device__ __forceinline__ const u8* weights_of(const Params& p, const StreamRun& run) {
  return p.pack + (u64(run.source) * OFFSET_BYTES + (run.splits >> 16));
}

template <class M>
struct Loader {
  static constexpr u32 THREADS = M::LOADER_WARPS * 32;
  const Params& p;
  State<M>& state;
  int tid; // within the loader warps
  RingCursor<M> oldest; // the first copy that has not landed
  u32 flying;           // copies in flight
  bool lost;
#if __CUDA_ARCH__ >= 900
  u64 policy;
#endif

  __device__ __forceinline__ bool gone() const { return lost || state.stop != 0; }

  // Waits until the slot of the next chunk is free and few enough copies are in flight. False: leave.
  __device__ __forceinline__ bool await_free(const RingCursor<M>& at, u32 tag) {
    if constexpr (M::COPY == Copy::BULK) {
#if __CUDA_ARCH__ >= 900
      // Free slots ahead decide how much may be in flight.
      constexpr u32 AHEAD = M::FLIGHT_FREE > 0 ? M::FLIGHT_FREE - 1 : 0;
      const bool wraps = at.slot + AHEAD >= M::SLOTS;
      const u32 slot = wraps ? at.slot + AHEAD - M::SLOTS : at.slot + AHEAD, use = wraps ? at.use + 1 : at.use;
      const bool roomy = use == 0 || Slot<false>::peek(&state.empty[slot], use - 1, M::WARPS);
      const u32 cap = roomy ? M::FLIGHT_HIGH : M::FLIGHT_LOW;
      while (flying >= cap) {
        if (!wait(&state.full[oldest.slot], oldest.use, 1, tag, WaitKind::RING_FULL)) return false;
        oldest.next();
        flying--;
      }
#endif
    }
    if (at.use != 0 && !wait(&state.empty[at.slot], at.use - 1, M::WARPS, tag, WaitKind::RING_EMPTY)) return false;
    if constexpr (M::COPY == Copy::BULK) fence_empty_slot();
    return true;
  }
  __device__ __forceinline__ bool wait(u64* word, u32 use, u32 arrivals, u32 tag, WaitKind kind) {
    u32 polls = 0;
    while (!Slot<RING_COUNTERS<M>>::reached(word, use, arrivals)) {
      if (state.stop) return false;
      if (++polls % POLLS_BETWEEN_CHECKS == 0 && wait_expired(&state.dog, WaitSite{tag, nullptr}, kind, use, arrivals, false)) {
        lost = true;
        return false;
      }
    }
    return true;
  }

  // Waits for the choice of the part that a run is of, and moves `weights` there. False: leave.
  __device__ __forceinline__ bool await_choice(const StreamRun& run, u32 tag, const u8*& weights) {
    if (run.choice == 0) return true;
    u64 packet;
    for (u32 polls = 0;;) {
      peek(p.exchange + (run.choice - 1), true, packet);
      if (fresh(packet, tag)) break;
      if (state.stop) return false;
      if (++polls % POLLS_BETWEEN_CHECKS == 0 &&
          wait_expired(&state.dog, WaitSite{tag, nullptr}, WaitKind::PACKET, u32(packet >> 32), tag, false)) {
        lost = true;
        return false;
      }
    }
    weights += u64(min(u32(packet), (run.parts & 0xffff) - 1)) * run.part * COPY_ALIGN_BYTES;
    return true;
  }

  // Waits for the choices of all slots of a run: its parts, by slot. False: leave.
  template <int N>
  __device__ __forceinline__ bool await_choices(const StreamRun& run, u32 slots, u32 tag, u32 (&part)[N]) {
    for (u32 polls = 0;;) {
      u64 packet[N] = {};
      bool all = true;
#pragma unroll
      for (int s = 0; s < N; s++) peek(p.exchange + (run.choice - 1) + s, s < slots, packet[s]);
#pragma unroll
      for (int s = 0; s < N; s++) all = all && (s >= slots || fresh(packet[s], tag));
      if (all) {
#pragma unroll
        for (int s = 0; s < N; s++) part[s] = min(u32(packet[s]), (run.parts & 0xffff) - 1);
        return true;
      }
      if (state.stop) return false;
      if (++polls % POLLS_BETWEEN_CHECKS == 0 &&
          wait_expired(&state.dog, WaitSite{tag, nullptr}, WaitKind::PACKET, u32(packet[0] >> 32), tag, false)) {
        lost = true;
        return false;
      }
    }
  }
  // Copies a run of units of all slots, each with its piece of the part that its slot chose: those of the first unit, then the next unit.
  // False: leave.
  __device__ __forceinline__ bool copy_slots(RingCursor<M>& at, const StreamRun& run, u32 tag, const u8* weights) {
    constexpr int N = slots_of<M>(nullptr);
    const u32 slots = run.splits & 0xffff, piece = (run.parts >> 16) * COPY_ALIGN_BYTES;
    u32 part[N];
    if (!await_choices(run, slots, tag, part)) return false;
    u32 slot = 0, left = piece; // of a piece
    for (u32 end = 0, done = 0; done < run.bytes;) {
      if (done == end) end = min(done + run.block_bytes, run.bytes);
      const u32 bytes = min(end - done, run.chunk_bytes);
      if (!await_free(at, tag)) return false;
      announce(at, bytes);
      for (u32 put = 0; put < bytes;) {
        const u32 n = min(left, bytes - put);
        u32 chosen = 0;
#pragma unroll
        for (int s = 0; s < N; s++) chosen = s == slot ? part[s] : chosen;
        copy_piece(at, put, weights + (u64(chosen) * run.part * COPY_ALIGN_BYTES + (piece - left)), n);
        put += n;
        left -= n;
        if (left == 0) {
          left = piece;
          if (++slot == slots) slot = 0, weights += piece;
        }
      }
      issued(at);
      at.next();
      done += bytes;
    }
    return true;
  }

  __device__ __forceinline__ void copy(const RingCursor<M>& at, const u8* from, u32 bytes) {
    announce(at, bytes);
    copy_piece(at, 0, from, bytes);
    issued(at);
  }
  // Copies a chunk of the history of one KV head, whose cache rows begin at `head`. In a cache of one sequence the chunk lies `offset`
  // bytes from there; in a pool, each page has a piece of it.
  __device__ __forceinline__ void copy_history(const RingCursor<M>& at, const u8* head, u32 row, u64 offset, u32 bytes, u32 row_bytes) {
    if constexpr (is_paged<M>()) {
      announce(at, bytes);
      for (u32 done = 0; done < bytes;) {
        const u32 piece = min(bytes - done, (M::PAGE_ROWS - row % M::PAGE_ROWS) * row_bytes);
        copy_piece(at, done, head + u64(cache_row<M>(p, row)) * row_bytes, piece);
        done += piece;
        row += M::PAGE_ROWS - row % M::PAGE_ROWS;
      }
      issued(at);
    } else {
      copy(at, head + offset, bytes);
    }
  }
  // Called before the first piece of a chunk, with the bytes of all pieces.
  __device__ __forceinline__ void announce(const RingCursor<M>& at, u32 bytes) {
    if constexpr (M::COPY == Copy::BULK) {
#if __CUDA_ARCH__ >= 900
      asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1;}" ::"r"(smem_address(&state.full[at.slot])), "r"(bytes)
                   : "memory");
#endif
    }
  }
  __device__ __forceinline__ void copy_piece(const RingCursor<M>& at, u32 to_byte, const u8* from, u32 bytes) {
    u8* to = block_memory() + at.slot * M::SLOT_BYTES + to_byte;
    if constexpr (M::COPY == Copy::BULK) {
#if __CUDA_ARCH__ >= 900
      u32 barrier = smem_address(&state.full[at.slot]);
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
              smem_address(to)),
          "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
          : "memory");
#endif
    } else if constexpr (M::COPY == Copy::CP_ASYNC) {
      for (u32 i = tid * 16; i < bytes; i += THREADS * 16) copy_ahead(to + i, from + i);
    } else {
      constexpr int UNROLL = 4;
      for (u32 base = 0; base < bytes; base += UNROLL * THREADS * 16) {
        uint4 v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
          u32 i = base + (k * THREADS + tid) * 16;
          if (i < bytes) v[k] = __ldcg(reinterpret_cast<const uint4*>(from + i));
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
          u32 i = base + (k * THREADS + tid) * 16;
          if (i < bytes) *reinterpret_cast<uint4*>(to + i) = v[k];
        }
      }
    }
  }
  // Called after the last piece of a chunk.
  __device__ __forceinline__ void issued(const RingCursor<M>& at) {
    u64* full = &state.full[at.slot];
    if constexpr (M::COPY == Copy::CP_ASYNC) {
#if __CUDA_ARCH__ >= 800
      asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem_address(full)) : "memory");
#endif
    } else if constexpr (M::COPY == Copy::PLAIN) {
      __syncwarp();
      if (tid % 32 == 0) Slot<RING_COUNTERS<M>>::arrive(full);
    }
    flying++;
  }

  __device__ __forceinline__ void begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  }

  __device__ void run() {
    begin();
    RingCursor<M> at{0, 0};
    for (u32 s = 0; s < p.steps && !gone(); s++) {
      u32 position = p.position + s, tag = p.tag + s;
      u32 queue = (position >= M::SPLIT_FROM ? gridDim.x : 0) + blockIdx.x;
      u32 first = p.run_index[queue], last = p.run_index[queue + 1];
      bool acquired = false;
      StreamRun next{};
      if (first < last) next = p.runs[first];
      for (u32 r = first; r < last && !gone(); r++) {
        StreamRun run = next;
        if (r + 1 < last) next = p.runs[r + 1];
        // All SMs reach a matrix at about the same time, and the first access to a page walks the page tables: begin the walk of
        // the next run while this one streams.
        if (next.bytes && tid == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights_of(p, next)));
        if (run.bytes) {
          const u8* weights = weights_of(p, run);
          if constexpr (slots_of<M>(nullptr) > 0)
            if ((run.splits & 0xffff) > 1) {
              if (!copy_slots(at, run, tag, weights)) return drain();
              continue;
            }
          if constexpr (chooses<M>(nullptr))
            if (!await_choice(run, tag, weights)) return drain();
          for (u32 end = 0, done = 0; done < run.bytes;) {
            // No chunk reaches beyond its block.
            if (done == end) end = min(done + run.block_bytes, run.bytes);
            const u32 bytes = min(end - done, run.chunk_bytes);
            if (!await_free(at, tag)) return drain();
            copy(at, weights + done, bytes);
            at.next();
            done += bytes;
          }
        } else {
          u32 start, end;
          history_share(position, run.window, run.splits, run.head_j & 0xffff, start, end);
          if (start < end && !acquired) {
            u32 polls = 0, seen;
            while (seen = handed_over_step(&state.acquired_tag), i32(seen - tag) < 0) {
              if (state.stop) return drain();
              if (++polls % POLLS_BETWEEN_CHECKS == 0 &&
                  wait_expired(&state.dog, WaitSite{tag, nullptr}, WaitKind::HISTORY, seen, tag, false)) {
                lost = true;
                return drain();
              }
            }
            if constexpr (M::COPY == Copy::BULK) fence_history();
            acquired = true;
          }
          u64 head = u64(run.head_j >> 16) * cache_rows<M>() * run.row_bytes;
          const u8* k = p.cache + u64(run.k_cache) * OFFSET_BYTES + head;
          const u8* v = p.cache + u64(run.v_cache) * OFFSET_BYTES + head;
          for (u32 row = start; row < end; row += run.rows) {
            u32 bytes = min(run.rows, end - row) * run.row_bytes;
            u64 offset = u64(row) * run.row_bytes;
            if (!await_free(at, tag)) return drain();
            copy_history(at, k, row, offset, bytes, run.row_bytes);
            at.next();
            if (!await_free(at, tag)) return drain();
            copy_history(at, v, row, offset, bytes, run.row_bytes);
            at.next();
          }
        }
      }
    }
    drain();
  }

  // No copy may land in shared memory that the block has given up.
  __device__ __forceinline__ void drain() {
    if constexpr (M::COPY == Copy::BULK) {
      for (u32 polls = 0; flying > 0; flying--, oldest.next())
        while (!Slot<RING_COUNTERS<M>>::reached(&state.full[oldest.slot], oldest.use, 1))
          if (++polls % POLLS_BETWEEN_CHECKS == 0 &&
              wait_expired(&state.dog, WaitSite{~0u, nullptr}, WaitKind::RING_FULL, oldest.use, 1, false))
            return;
    } else if constexpr (M::COPY == Copy::CP_ASYNC) {
      asm volatile("cp.async.wait_all;" ::: "memory");
    }
  }
};
