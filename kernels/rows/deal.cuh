// Owns the deal: with which parts of a matrix the rows of a step compute, and which block computes with which of their units.
//
// The distinct parts that rows chose, in ascending order, are one list of units, and a task takes its share of the list (`dealt` of
// src/ir/program.rs). Every block counts alike, so no message between SMs says who does what, and a part is read once for all rows that chose it.
//
// A block keeps the choices of one layer. Before the layer's first dealt task a warp of the consumers takes them from their packets, and hands
// them to the threads that copy as a chunk is handed over: `full` says that they are there, `empty` that no loader needs those of the layer before.
#pragma once

// Threads that walk the stream of a block.
template <class M>
constexpr u32 LOADERS = M::COPY == Copy::BULK ? M::COPIERS : M::LOADER_WARPS * 32;

template <class M, bool = chooses<M>(nullptr)>
struct Deal {};
template <class M>
struct Deal<M, true> {
  static constexpr int MASKS = ceil_div(M::ROWS, 32), PAIRS = M::ROWS * M::CHOSEN_EACH;
  u64 full, empty;
  u32 uses;  // layers whose choices were taken
  u32 count; // distinct parts
  u32 rows[M::CHOSEN_PARTS * MASKS]; // of each part, a bit for each row that chose it
  u16 part[PAIRS < M::CHOSEN_PARTS ? PAIRS : M::CHOSEN_PARTS]; // the distinct parts
  u16 choice[PAIRS]; // [row][slot]
};

template <class M>
struct RowsDealState : RowsState<M> {
  Deal<M> deal;
};
template <class M>
__device__ __forceinline__ Deal<M>& deal_of() {
  return reinterpret_cast<RowsDealState<M>*>(block_memory() + M::STATE_AT)->deal;
}
// Called by one thread before the block begins.
template <class M>
__device__ __forceinline__ void begin_deals() {
  if constexpr (chooses<M>(nullptr)) {
    Deal<M>& deal = deal_of<M>();
    Slot<RING_COUNTERS<M>>::init(&deal.full, 1);
    Slot<RING_COUNTERS<M>>::init(&deal.empty, LOADERS<M>);
    deal.uses = 0;
  }
}

// A share of `units` units of each part: those in `lo..hi` of the list.
struct DealtShare {
  u32 units, lo, hi;
  __device__ __forceinline__ DealtShare(u32 parts, u32 units, u32 j, u32 shares) : units(units) {
    const u64 all = u64(parts) * units;
    lo = u32(all * j / shares), hi = u32(all * (j + 1) / shares);
  }
  // Calls `f` with the place of each part in the list, the first of its units that are in the share, and how many are; until `f` is false.
  template <class F>
  __device__ __forceinline__ bool each_part(F f) const {
#pragma unroll 1
    for (u32 at = lo; at < hi;) {
      const u32 first = at % units, count = min(units - first, hi - at);
      if (!f(at / units, first, count)) return false;
      at += count;
    }
    return true;
  }
};

// Takes the choices of a layer, EACH of a row and below PARTS, which begin at packet `choices`. Called by all consumers.
template <class M, int EACH, int PARTS>
__device__ __forceinline__ void take_choices(Context<M>& c, u32 choices) {
  typedef Deal<M> D;
  constexpr int PAIRS = M::ROWS * EACH, AT_ONCE = PAIRS > 64 ? 4 : ceil_div(PAIRS, 32), MASKS = D::MASKS;
  D& deal = deal_of<M>();
  c.barrier(); // slow warps may still look at the choices of the layer before
  if (c.warp() == 0) {
    const u32 use = deal.uses;
    if (use > 0) await_slot<RING_COUNTERS<M>>(&deal.empty, use - 1, LOADERS<M>, c.waiter(), WaitKind::RING_EMPTY);
    for (int i = c.lane(); i < PARTS * MASKS; i += 32) deal.rows[i] = 0;
    __syncwarp();
#pragma unroll 1
    for (int first = 0; first < PAIRS; first += 32 * AT_ONCE) {
      const u64* from[AT_ONCE];
      bool active[AT_ONCE];
      u32 chosen[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int pair = min(first + i * 32 + c.lane(), PAIRS - 1), row = pair / EACH;
        active[i] = first + i * 32 + c.lane() < PAIRS && takes_part<M>(row);
        from[i] = c.p.exchange + choices + row * round_up(EACH, 2) + pair % EACH;
      }
      await_packets<AT_ONCE>(from, active, c.tag, chosen, c.waiter());
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int pair = first + i * 32 + c.lane(), row = pair / EACH;
        if (!active[i]) continue;
        const u32 part = min(chosen[i], u32(PARTS - 1));
        deal.choice[pair] = u16(part);
        // A row chooses a part once, so a sum of bits is their union.
        add_to(&deal.rows[part * MASKS + row / 32], 1u << row % 32);
      }
    }
    __syncwarp();
    u32 count = 0;
#pragma unroll 1
    for (int first = 0; first < PARTS; first += 32) {
      const int part = first + c.lane();
      u32 rows = 0;
#pragma unroll
      for (int i = 0; i < MASKS; i++)
        if (part < PARTS) rows |= deal.rows[part * MASKS + i];
      const u32 chosen = __ballot_sync(~0u, rows != 0);
      if (rows != 0) deal.part[count + u32(__popc(chosen & ((1u << c.lane()) - 1)))] = u16(part);
      count += u32(__popc(chosen));
    }
    __syncwarp();
    if (c.lane() == 0) {
      deal.count = count, deal.uses = use + 1;
      Slot<RING_COUNTERS<M>>::arrive(&deal.full);
    }
  }
  c.barrier();
}

// The slot in which a row chose a part, if it did.
template <class M, int EACH>
__device__ __forceinline__ u32 slot_of_part(int row, u32 part) {
  const u16* const choice = deal_of<M>().choice + row * EACH;
  u32 slot = 0;
#pragma unroll
  for (int s = 0; s < EACH; s++) slot = choice[s] == part ? u32(s) : slot;
  return slot;
}
template <class M>
__device__ __forceinline__ bool row_chose(int row, u32 part) {
  return deal_of<M>().rows[part * Deal<M>::MASKS + row / 32] >> row % 32 & 1;
}
