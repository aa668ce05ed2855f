// Owns the stream of a kernel for rows: blocks of k of several units in turn, and pages of the cache.
#pragma once

// Threads that copy in bulk. A copy takes its thread about 0.4 us of waits and fences, in which an SM gets 14 KiB from memory: chunks of
// more than 16 rows are shorter. A slot always has the same thread, which so sees each of its phases: a barrier tells two phases apart,
// not three.
template <class M>
constexpr u32 LOADERS = M::COPY != Copy::BULK ? 1 : ROW_GROUPS<M> < M::LOADER_WARPS ? ROW_GROUPS<M> : M::LOADER_WARPS;

template <class M>
struct RowsLoader : Loader<M, LOADERS<M>> {
  static_assert(M::SLOTS % LOADERS<M> == 0, "a slot has one loader");
  using Loader<M, LOADERS<M>>::await_free;
  using Loader<M, LOADERS<M>>::copy;
  using Loader<M, LOADERS<M>>::gone;
  using Loader<M, LOADERS<M>>::drain;
  using Loader<M, LOADERS<M>>::state;
  using Loader<M, LOADERS<M>>::tid;

  // Until the first task of the block has acquired the step. False: leave.
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

  __device__ void run_rows(const RowsParams& p) {
    this->begin();
    RingCursor<M> at{0, 0};
    u32 turn = 0;
    const u32 own = LOADERS<M> == 1 ? 0 : u32(tid) / 32;
    this->oldest.slot = own;
    // The next chunk, by the loader whose turn it is. False: leave.
    const auto load = [&](const u8* from, u32 bytes, u32 tag) {
      if (turn == own) {
        if (!await_free(at, tag)) return false;
        copy(at, from, bytes);
      }
      turn = turn + 1 < LOADERS<M> ? turn + 1 : 0;
      at.next();
      return true;
    };
    for (u32 s = 0; s < p.steps && !gone(); s++) {
      const u32 tag = p.tag + s, first = p.run_index[blockIdx.x];
      const u32 last = p.fills ? first + p.fills[blockIdx.x].y : p.run_index[blockIdx.x + 1];
      bool acquired = false;
      StreamRun next{};
      if (first < last) next = p.runs[first];
      for (u32 r = first; r < last && !gone(); r++) {
        const StreamRun run = next;
        if (r + 1 < last) next = p.runs[r + 1];
        if (next.bytes && tid == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(p.pack + u64(next.source) * OFFSET_BYTES));
        if (run.bytes) {
          // Of `pass` units at a time the first block of k of each, then the second, and so on.
          const u32 unit = run.block_bytes, units = run.bytes / unit;
          const u8* weights = p.pack + u64(run.source) * OFFSET_BYTES;
          for (u32 u0 = 0; u0 < units; u0 += run.splits) {
            const u32 end = min(u0 + run.splits, units);
            for (u32 k = 0; k < unit; k += run.chunk_bytes) {
              const u32 bytes = min(run.chunk_bytes, unit - k);
              for (u32 u = u0; u < end; u++)
                if (!load(weights + u64(u) * unit + k, bytes, tag)) return drain();
            }
          }
          continue;
        }
        if (!acquired) {
          if (!await_step(tag)) return drain();
          acquired = true;
        }
        // Of rows of one sequence the first one's position ends the history of all.
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
          if (!load(k + offset, bytes, tag) || !load(v + offset, bytes, tag)) return drain();
          begin = stop;
        }
      }
    }
    drain();
  }
};
