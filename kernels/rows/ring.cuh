// Owns the stream of a kernel for rows: blocks of k of several units in turn, and pages of the cache.
//
// A thread that copies in bulk takes 0.3 to 0.4 us for a chunk of any size. Where chunks are short, M::COPIERS threads, each in a warp of its
// own, copy chunks in turn. Each slot belongs to one of them: a barrier tells only the parity of a phase, so a thread that misses phases of a
// slot could take one for another.
#pragma once

template <class M>
struct RowsLoader : Loader<M> {
  using Loader<M>::gone;
  using Loader<M>::drain;
  using Loader<M>::flying;
  using Loader<M>::oldest;
  using Loader<M>::state;
  using Loader<M>::tid;

  u32 part = 0, turn = 0; // which copier this is; whose turn the next chunk is
  u32 deals = 0;          // layers whose choices it has asked for

  __device__ __forceinline__ explicit RowsLoader(Loader<M> loader, u32 part) : Loader<M>(loader), part(part) {
    for (u32 i = 0; i < part; i++) oldest.next();
  }
  // The next chunk: if it is this thread's turn, waits until its slot is free, and copies. False: leave.
  __device__ __forceinline__ bool chunk(RingCursor<M>& at, const u8* from, u32 bytes, u32 tag) {
    if constexpr (M::COPIERS == 1) {
      if (!this->await_free(at, tag)) return false;
      this->copy(at, from, bytes);
    } else {
      static_assert(M::SLOTS % M::COPIERS == 0, "a slot belongs to one thread");
      if (turn == part) {
        // This thread may have its part of all copies in flight; they are COPIERS chunks apart.
        constexpr u32 CAP = ceil_div(M::FLIGHT_HIGH, M::COPIERS);
        while (flying >= CAP) {
          if (!this->wait(&state.full[oldest.slot], oldest.use, 1, tag, WaitKind::RING_FULL)) return false;
          for (int i = 0; i < M::COPIERS; i++) oldest.next();
          flying--;
        }
        if (at.use != 0 && !this->wait(&state.empty[at.slot], at.use - 1, M::WARPS, tag, WaitKind::RING_EMPTY)) return false;
        fence_empty_slot();
        this->copy(at, from, bytes);
      }
      turn = turn + 1 == u32(M::COPIERS) ? 0 : turn + 1;
    }
    at.next();
    return true;
  }

  // Waits until the first task of the block has acquired the step. False: leave.
  __device__ __forceinline__ bool await_step(u32 tag) {
    u32 polls = 0, seen;
    while (seen = handed_over_step(&state.acquired_tag), i32(seen - tag) < 0) {
      if (state.stop) return false;
      if (++polls % POLLS_BETWEEN_CHECKS == 0 && wait_expired(&state.dog, WaitSite{tag, nullptr}, WaitKind::HISTORY, seen, tag, false)) {
        this->lost = true;
        return false;
      }
    }
    if constexpr (M::COPY == Copy::BULK) fence_history();
    return true;
  }

  // Units of a run that lie side by side, some at a time: the first block of k of each, then the second, and so on. False: leave.
  __device__ __forceinline__ bool units(RingCursor<M>& at, const StreamRun& run, const u8* weights, u32 units, u32 tag) {
    const u32 unit = run.block_bytes, together = run.splits & 0xffff;
    for (u32 u0 = 0; u0 < units; u0 += together) {
      const u32 end = min(u0 + together, units);
      for (u32 k = 0; k < unit; k += run.chunk_bytes) {
        const u32 bytes = min(run.chunk_bytes, unit - k);
        for (u32 u = u0; u < end; u++) {
          if (!chunk(at, weights + u64(u) * unit + k, bytes, tag)) return false;
        }
      }
    }
    return true;
  }
  // The share of a run whose parts are dealt. False: leave.
  __device__ __forceinline__ bool dealt(RingCursor<M>& at, const StreamRun& run, const u8* weights, u32 tag) {
    Deal<M>& deal = deal_of<M>();
    if (run.parts >> 31) {
      if (deals > 0) Slot<RING_COUNTERS<M>>::arrive(&deal.empty);
      deals++;
    }
    if (!this->wait(&deal.full, deals - 1, 1, tag, WaitKind::RING_FULL)) return false;
    const DealtShare share(deal.count, run.bytes / run.block_bytes, run.parts >> 16 & 0x7fff, M::SMS);
    return share.each_part([&](u32 place, u32 first, u32 count) {
      const u8* part = weights + u64(deal.part[place]) * run.part * COPY_ALIGN_BYTES;
      return units(at, run, part + u64(first) * run.block_bytes, count, tag);
    });
  }

  __device__ void run_rows(const RowsParams& p) {
    this->begin();
    stream(p);
    finish();
  }
  // Copies until all steps are done, or the block leaves.
  __device__ __forceinline__ void stream(const RowsParams& p) {
    RingCursor<M> at{0, 0};
    for (u32 s = 0; s < p.steps && !gone(); s++) {
      const u32 tag = p.tag + s, first = p.run_index[blockIdx.x];
      const u32 last = p.fills ? first + p.fills[blockIdx.x].y : p.run_index[blockIdx.x + 1];
      bool acquired = false;
      StreamRun next{};
      if (first < last) next = p.runs[first];
      for (u32 r = first; r < last && !gone(); r++) {
        const StreamRun run = next;
        if (r + 1 < last) next = p.runs[r + 1];
        if (next.bytes && tid == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights_of(p, next)));
        if (run.bytes) {
          const u8* weights = weights_of(p, run);
          if constexpr (chooses<M>(nullptr))
            if (run.choice != 0) {
              if (!dealt(at, run, weights, tag)) return;
              continue;
            }
          if (!units(at, run, weights, run.bytes / run.block_bytes, tag)) return;
          continue;
        }
        if (!acquired) {
          if (!await_step(tag)) return;
          acquired = true;
        }
        // The position of a sequence's first row ends the history of all its rows.
        const u32 row = run.splits;
        if (!takes_part<M>(row)) continue;
        const Row& mine = p.rows[row];
        const u32 end = min(p.rows[mine.first].position + s, M::CONTEXT_MAX), position = min(mine.position + s, M::CONTEXT_MAX - 1);
        const u64 head = u64(run.head_j >> 16) * M::POOL_ROWS * run.row_bytes;
        const u8* k = p.cache + u64(run.k_cache) * OFFSET_BYTES + head;
        const u8* v = p.cache + u64(run.v_cache) * OFFSET_BYTES + head;
        for (u32 begin = history_begin(position, run.window); begin < end;) {
          // No chunk reaches beyond its page.
          const u32 stop = min(begin / run.rows * run.rows + run.rows, end), bytes = (stop - begin) * run.row_bytes;
          const u64 offset = u64(pool_row<M>(p.pages, mine.sequence, begin)) * run.row_bytes;
          if (!chunk(at, k + offset, bytes, tag) || !chunk(at, v + offset, bytes, tag)) return;
          begin = stop;
        }
      }
    }
  }

  // No copy may land in shared memory that the block has given up.
  __device__ __forceinline__ void finish() {
    if constexpr (M::COPIERS == 1) {
      drain();
    } else {
      for (u32 polls = 0; flying > 0; flying--) {
        while (!Slot<RING_COUNTERS<M>>::reached(&state.full[oldest.slot], oldest.use, 1))
          if (++polls % POLLS_BETWEEN_CHECKS == 0 && wait_expired(&state.dog, WaitSite{~0u, nullptr}, WaitKind::RING_FULL, oldest.use, 1, false)) return;
        for (int i = 0; i < M::COPIERS; i++) oldest.next();
      }
    }
  }
};
