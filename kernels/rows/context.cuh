// Owns what a launch of rows gets beside Params, and what a block keeps of its rows.
#pragma once

// One row of a launch, as the host's guard has judged it. The test in codegen/abi.rs writes what the host fills here.
struct alignas(16) Row {
  u32 sequence; // row of the page table
  u32 position; // in the first step; one more in each step after it
  i32 token; // of the first step; below 0: what row `from` of the step before this launch decided
  u32 from; // see `token`
  u32 first; // the first row of the launch of the same sequence
  u32 steps; // steps that the row takes part in
  u32 seed_low; // of sampling, the low half
  u32 seed_high; // of sampling, the high half
  float inverse_temperature; // 0: greedy
  u32 slot; // which recurrent states are those of its sequence
  u32 reserved[2]; // no meaning yet
};
static_assert(sizeof(Row) == 48, "the host fills this struct");

struct RowsParams : Params {
  const Row* rows; // rows of the launch
  const u32* pages; // [sequences][M::BLOCKS]
  const uint2* fills; // of each block: entries and runs of a launch that only fills the cache; null: the launch has whole steps
  u32 row_count; // rows of the launch
  u32 logits_from; // first step whose logits are written
};
static_assert(sizeof(RowsParams) == 216, "the host fills this struct");
// Of several devices: see DevicesParams.
struct RowsDevicesParams : RowsParams {
  u64 peers[PEERS_MAX]; // from `exchange` of this device to that of each other one, in bytes modulo 2^64
  u64 peer_logits[PEERS_MAX]; // the same of `logits`
};
static_assert(sizeof(RowsDevicesParams) == 328, "the host fills this struct");

template <class M>
struct RowsState {
  State<M> block;
  u32 active[ceil_div(M::ROWS, 32)]; // a bit for each row that takes part in the step
  int token[M::ROWS];
  float stat[2][2][M::WARPS][M::ROWS]; // [task parity][sum, sum of squares][group of k][row]
  float best[M::WARPS][M::ROWS];
  int best_index[M::WARPS][M::ROWS];
};
template <class M>
__device__ __forceinline__ RowsState<M>& rows_state() {
  return *reinterpret_cast<RowsState<M>*>(block_memory() + M::STATE_AT);
}
template <class M>
__device__ __forceinline__ const RowsParams& rows_params(const Context<M>& c) {
  return static_cast<const RowsParams&>(c.p);
}
template <class M>
__device__ __forceinline__ bool takes_part(int row) {
  return rows_state<M>().active[row / 32] >> row % 32 & 1;
}
template <class M>
__device__ __forceinline__ bool all_take_part() {
  bool all = true;
#pragma unroll
  for (int first = 0; first < M::ROWS; first += 32)
    all = all && !(~rows_state<M>().active[first / 32] & (M::ROWS - first < 32 ? (1u << (M::ROWS - first) % 32) - 1 : ~0u));
  return all;
}
// The rows in part `part` of `parts` of the sequences, a bit each; `part_of` of src/ir/program.rs says which. Called by whole warps.
template <class M>
__device__ __forceinline__ u64 rows_of_part(const Context<M>& c, u32 part, u32 parts) {
  static_assert(M::ROWS <= 64, "a bit each");
  const u32 count = rows_params(c).row_count;
  u64 bits = 0;
#pragma unroll
  for (int first = 0; first < M::ROWS; first += 32) {
    const u32 row = first + c.lane();
    const u32 sequence = row < count && row < M::ROWS ? rows_params(c).rows[row].slot : row;
    bits |= u64(__ballot_sync(~0u, row < M::ROWS && sequence % parts == part)) << first;
  }
  return bits;
}
__device__ __forceinline__ int lowest_bit(u64 bits) { return __ffsll(static_cast<long long>(bits)) - 1; }
// The position of a row in the running step.
template <class M>
__device__ __forceinline__ u32 position_of(const Context<M>& c, int row) {
  return min(rows_params(c).rows[row].position + (c.tag - c.p.tag), M::CONTEXT_MAX - 1);
}
// Where the cache has the row of `position` of a sequence: a row of the pool.
template <class M>
__device__ __forceinline__ u32 pool_row(const u32* pages, u32 sequence, u32 position) {
  const u32 page = min(__ldg(pages + u64(sequence) * M::BLOCKS + position / M::PAGE_ROWS), M::PAGES - 1);
  return page * M::PAGE_ROWS + position % M::PAGE_ROWS;
}

// Most rows that a warp multiplies: a tile of an operand. Warps share the rows of a step, and warps with the same rows share k.
constexpr int WARP_ROWS = 16;
template <class M>
constexpr int ROW_GROUPS = ceil_div(M::ROWS, WARP_ROWS);
template <class M>
constexpr int K_GROUPS = M::WARPS / ROW_GROUPS<M>;

// Leaves a warp's part of the statistics of its rows; valid after the next barrier. A lane has parts of row lane / 4 (and lane / 4 + 8).
template <class M, int GROUPS>
__device__ __forceinline__ void put_row_statistic(const Context<M>& c, int which, const float (&value)[GROUPS]) {
#pragma unroll
  for (int h = 0; h < GROUPS; h++) {
    float v = value[h];
    v += __shfl_xor_sync(~0u, v, 1);
    v += __shfl_xor_sync(~0u, v, 2);
    const int row = c.warp() % ROW_GROUPS<M> * WARP_ROWS + h * 8 + c.lane() / 4;
    if (c.lane() % 4 == 0) rows_state<M>().stat[c.task & 1][which][c.warp() / ROW_GROUPS<M>][row] = v;
  }
}
template <class M>
__device__ __forceinline__ float row_statistic(const Context<M>& c, int which, int row) {
  float sum = 0.f;
#pragma unroll
  for (int k = 0; k < K_GROUPS<M>; k++) sum += rows_state<M>().stat[c.task & 1][which][k][row];
  return sum;
}

// The next chunks of a warp, of AT_ONCE units or of a lone one that stands for both.
template <class M, int AT_ONCE>
struct RowsChunks {
  const RingCursor<M> first;
  const bool lone;
  const u8* slot[2];
  __device__ __forceinline__ RowsChunks(Context<M>& c, bool is_lone) : first(c.ring), lone(is_lone) {
    if constexpr (AT_ONCE == 2) {
      if (!lone) c.ring.next();
      ring_take_pair(c, first, c.ring, slot[0], slot[1]);
    } else {
      slot[0] = ring_take(c, first);
    }
  }
  // Called when all lanes have read what they need.
  __device__ __forceinline__ void release(Context<M>& c) {
    if constexpr (AT_ONCE == 2)
      ring_release_pair(c, first, c.ring, !lone);
    else
      ring_release(c, first);
    c.ring.next();
  }
};

// The first position that the row at `position` sees, or one a little before: histories begin at whole tiles of 16.
__device__ __forceinline__ u32 history_begin(u32 position, u32 window) {
  return (window && position + 1 > window ? position + 1 - window : 0) / 16 * 16;
}
