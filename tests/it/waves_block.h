// In place of runtime/sync.cuh and waves/ring.cuh: a wave of one block on a CPU. The loader's part runs first, by threads of its own, and
// fills as many slots as the wave has chunks, so nothing waits. Consumers then take the same chunks in the same order. Every copy is
// checked: where it comes from, how it is aligned, and that the bytes of a chunk are as many as consumers wait for.
#pragma once

#include "block.h"
#include "runtime/queue.cuh"
#include "op_cases.h"
#include "op_packets.h"
#include "runtime/context.cuh"
constexpr u32 POLLS_BETWEEN_CHECKS = 64;
static void hand_over_step(u32*, u32) {}
static void store_word(u32*, u32) { std::abort(); }
template <class M>
static const u8* ring_take(Context<M>&, const RingCursor<M>&) { std::abort(); }
template <class M>
static void ring_release(Context<M>&, const RingCursor<M>&) { std::abort(); }
template <class M>
static void ring_take_pair(Context<M>&, const RingCursor<M>&, const RingCursor<M>&, const u8*&, const u8*&) { std::abort(); }
template <class M>
static void ring_release_pair(Context<M>&, const RingCursor<M>&, const RingCursor<M>&, bool = true) { std::abort(); }
#include "runtime/stage.cuh"
#include "ops/matvec_formats.cuh"
#include "ops/matvec.cuh"
#include "ops/attention_records.cuh"
#include "ops/attention_tensor.cuh"
#include "rows/context.cuh"
#include "rows/words.cuh"
#include "rows/matvec_codes.cuh"
#include "waves/context.cuh"
#include "op_formulas.h"
#include "op_codes.h"

static void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// ---- in place of waves/ring.cuh ---------------------------------------------------------------------------------------

constexpr int CHUNKS_MOST = 256;
static u32 promised[CHUNKS_MOST], landed[CHUNKS_MOST]; // bytes of each chunk
static u32 arrivals[CHUNKS_MOST];                      // warps of the loader that arrived at it
static u32 filled, taken[256];                         // chunks of the wave, and of each thread
static std::vector<u8> work, cache;

static bool within(const std::vector<u8>& all, const u8* from, u32 bytes) {
  return from >= all.data() && from + bytes <= all.data() + all.size();
}
// The chunk of the wave at a cursor, and where it lies: chunks lie one after another, however many slots there are.
template <class M>
static u32 chunk_of(const RingCursor<M>& at) {
  const u32 chunk = at.use * M::SLOTS + at.slot;
  require(chunk < CHUNKS_MOST && (chunk + 1) * M::SLOT_BYTES <= sizeof smem, "more chunks than this memory holds");
  return chunk;
}
template <class M>
struct WaveLoader {
  const WaveParams& p;
  RingCursor<M> at;
  bool met;
  int part, lane;
  u8* free_slot() { return block_memory() + chunk_of(at) * M::SLOT_BYTES; }
  void arrive(u32 bytes) {
    require(bytes > 0 && bytes <= M::SLOT_BYTES, "a chunk of no bytes, or of more than a slot has");
    if (lane == 0 && part == 0) {
      require(chunk_of(at) == filled && promised[filled] == 0, "a chunk is announced twice, or out of turn");
      promised[filled++] = bytes;
    }
    if (lane == 0) arrivals[chunk_of(at)]++;
    __syncwarp();
  }
  void copy(u8* to, const u8* from, u32 bytes, bool weights) {
    require(u64(to) % 16 == 0 && u64(from) % 16 == 0 && bytes % 16 == 0 && bytes > 0, "a copy that is not aligned");
    const u8* slot = block_memory() + chunk_of(at) * M::SLOT_BYTES;
    require(to >= slot && to + bytes <= slot + M::SLOT_BYTES, "a copy beyond its slot");
    require(weights ? within(constants, from, bytes) : within(work, from, bytes) || within(cache, from, bytes), "a copy from elsewhere");
    require(weights || met, "a copy of activations before the blocks met");
    std::memcpy(to, from, bytes);
    landed[chunk_of(at)] += bytes;
  }
  void meet() { met = true; }
};
template <class M>
static const u8* wave_take(WaveContext<M>& c) {
  require(chunk_of(c.ring) < filled, "a chunk is taken that the loader did not fill");
  return block_memory() + chunk_of(c.ring) * M::SLOT_BYTES;
}
template <class M>
static void wave_release(WaveContext<M>& c) {
  __syncwarp();
  c.ring.next();
}

#include "waves/rows.cuh"
#include "waves/matmul.cuh"
#include "waves/attention.cuh"

static WaveParams params;
static Wave wave;

template <class M, class Op>
static void load(int thread) {
  WaveLoader<M> loader{params, {0, 0}, false, thread / 32, thread % 32};
  Op::load(loader, wave);
  taken[thread] = loader.at.use * M::SLOTS + loader.at.slot;
}
template <class M, class Op>
static void consume(int thread) {
  WaveContext<M> c(params);
  c.thread = thread;
  c.warp_index = thread / 32;
  Op::run(c, wave);
  taken[thread] = c.ring.use * M::SLOTS + c.ring.slot;
}
// The part of this block in `wave`.
template <class M, class Op>
static void run_wave() {
  filled = 0;
  std::memset(promised, 0, sizeof promised);
  std::memset(landed, 0, sizeof landed);
  std::memset(arrivals, 0, sizeof arrivals);
  std::memset(smem, 0xff, sizeof smem); // not a number, until it is written
  run_block(load<M, Op>, M::LOADER_WARPS * 32);
  for (u32 i = 0; i < CHUNKS_MOST; i++) require(promised[i] == landed[i] && (promised[i] > 0) == (i < filled), "other bytes land than are awaited");
  for (u32 i = 0; i < filled; i++) require(arrivals[i] == u32(M::LOADER_WARPS), "consumers pass a chunk that a warp of the loader has not seen");
  for (int i = 0; i < M::LOADER_WARPS * 32; i++) require(taken[i] == filled, "a warp of the loader left out a chunk");
  run_block(consume<M, Op>, M::WARPS * 32);
  for (int i = 0; i < M::WARPS * 32; i++) require(taken[i] == filled, "a warp left out a chunk");
}
