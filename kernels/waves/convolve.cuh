// Owns gated short convolutions in waves. The formula is `Convolve` of src/ir/op.rs; ops/convolve.cuh has it for one position.
//
// x (rows, COLS)       b, c and x of all channels, one after another: bf16 row by row, or PARTS sums in fp32, (PARTS, rows, COLS)
// conv (CHANNELS, KERNEL), bias (CHANNELS)   fp32 constants, taps oldest first; no bias unless BIAS
// state                of each sequence (slot): (CHANNELS, KERNEL - 1), oldest first: b * x at the positions before; fp32
// out (rows, CHANNELS) bf16, in the layout of the input of products
//
// owner    of GROUP channels of a sequence and their state, with all rows of the sequence: in a chunk one block, in a step one warp
// assumes  the state in memory is that of the position before. At position 0 it counts as zeros and is not read
//
// Only generated kernels with short convolutions include this. Words of a `Wave` that have other names here: weight is conv, table is bias, k_cache
// is state.
#pragma once

template <class M, class G>
struct WaveShortConv {
  static constexpr int COLS = 3 * G::CHANNELS, PAST = G::KERNEL - 1, PAIRS = G::GROUP / 2;
  // Threads of a team; rows that it has at once.
  static constexpr int TEAM = M::STEPS ? 32 : M::WARPS * 32, ROWS = TEAM / PAIRS;
  static_assert(PAST > 0 && TEAM % PAIRS == 0 && G::CHANNELS % 2 == 0, "a thread has two channels");

  // What a thread has of its channels: taps, and b * x before the first row.
  struct Held {
    float2 taps[G::KERNEL], bias, before[PAST];
  };
  static __device__ __forceinline__ float* state_of(const WaveContext<M>& c, const Wave& e, u32 row) {
    const u32 slot = __ldg(&c.p.rows[row].slot);
    return reinterpret_cast<float*>(c.p.cache + u64(e.k_cache) * OFFSET_BYTES) + u64(slot) * (G::CHANNELS * PAST);
  }
  static __device__ __forceinline__ float2 two(const WaveContext<M>& c, const Wave& e, int row, int col) { return wave_columns<G::PARTS, COLS>(c, e.x, row, col); }
  // b * x of a row; before row `first` it is kept.
  static __device__ __forceinline__ float2 input(const WaveContext<M>& c, const Wave& e, const Held& held, int first, int row, int channel) {
    if (row >= first) {
      const float2 b = two(c, e, row, channel), x = two(c, e, row, 2 * G::CHANNELS + channel);
      return make_float2(b.x * x.x, b.y * x.y);
    }
    float2 kept = make_float2(0.f, 0.f);
#pragma unroll
    for (int t = 0; t < PAST; t++)
      if (t == PAST + row - first) kept = held.before[t];
    return kept;
  }
  static __device__ __forceinline__ void bring(const WaveContext<M>& c, const Wave& e, const float* state, int channel, bool begins, Held& held) {
    const float* const taps = c.template constant<float>(e.weight) + channel * G::KERNEL;
#pragma unroll
    for (int t = 0; t < G::KERNEL; t++) held.taps[t] = make_float2(__ldg(taps + t), __ldg(taps + G::KERNEL + t));
    held.bias = make_float2(0.f, 0.f);
    if constexpr (G::BIAS) {
      const float* const bias = c.template constant<float>(e.table) + channel;
      held.bias = make_float2(__ldg(bias), __ldg(bias + 1));
    }
#pragma unroll
    for (int t = 0; t < PAST; t++) {
      const float x = state[channel * PAST + t], y = state[(channel + 1) * PAST + t];
      held.before[t] = begins ? make_float2(0.f, 0.f) : make_float2(x, y);
    }
  }
  // Rows `first` to `end` of a sequence, and the state after them. By a team, of which this is thread `thread`.
  template <class F>
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, int group, int first, int end, int thread, F meet) {
    const int channel = group * G::GROUP + thread % PAIRS * 2, own = thread / PAIRS;
    const bool in = channel < G::CHANNELS;
    float* const state = state_of(c, e, u32(first));
    Held held;
    bring(c, e, state, in ? channel : 0, wave_position<M>(c.p, c.step, u32(first)) == 0, held);
    float2 kept[PAST];
#pragma unroll
    for (int t = 0; t < PAST; t++) kept[t] = input(c, e, held, first, end - PAST + t, in ? channel : 0);
#pragma unroll 1
    for (int row = first + own; row < end && in; row += ROWS) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int t = 0; t < G::KERNEL; t++) {
        const float2 u = input(c, e, held, first, row - PAST + t, channel);
        sum.x += u.x * held.taps[t].x, sum.y += u.y * held.taps[t].y;
      }
      const float2 by = two(c, e, row, G::CHANNELS + channel);
      *reinterpret_cast<u32*>(c.template work<u8>(e.out) + OutPlace<M, G, G::CHANNELS>::at(u32(row), u32(channel))) =
          bf16_pair(by.x * (sum.x + held.bias.x), by.y * (sum.y + held.bias.y));
    }
    meet(); // all threads have the state before the first row
    if (in && own == 0)
#pragma unroll
      for (int t = 0; t < PAST; t++) state[channel * PAST + t] = kept[t].x, state[(channel + 1) * PAST + t] = kept[t].y;
  }

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    if constexpr (M::STEPS) {
      // Blocks of later rows of a sequence leave them to that of the first one.
#pragma unroll 1
      for (u32 s = u32(c.warp()); s < shares.count; s += M::WARPS) {
        const Share share = shares[s];
        if (share.row >= c.p.row_count || uniform(c.state().leads[share.row]) > 0) continue;
        u32 end = share.row + 1;
        while (end < c.p.row_count && uniform(c.state().leads[end]) > 0) end++;
        one(c, e, int(share.lo), int(share.row), int(end), c.lane(), [] { __syncwarp(); });
      }
    } else {
#pragma unroll 1
      for (u32 s = 0; s < shares.count; s++) {
        const Share share = shares[s];
#pragma unroll 1
        for (u32 i = share.lo; i < share.hi; i++) one(c, e, int(i), 0, int(c.p.row_count), c.tid(), [&] { c.barrier(); });
      }
    }
  }
};
