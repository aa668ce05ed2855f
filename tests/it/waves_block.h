// In place of runtime/sync.cuh and waves/ring.cuh: a wave of one block on a CPU. The loader's part runs first, by threads of its own, and
// fills as many slots of each ring as the wave has chunks, so nothing waits. Consumers then take the same chunks in the same order. Every
// copy is checked: where it comes from, how it is aligned, and that the bytes of a chunk are as many as consumers wait for.
#pragma once

#define SMEM_BYTES (16 << 20)
#include <algorithm>
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
#include "ops/table.cuh"
#include "ops/matvec.cuh"
#include "ops/attention_records.cuh"
#include "ops/attention_tensor.cuh"
#include "ops/route.cuh"
#include "rows/context.cuh"
#include "rows/words.cuh"
#include "rows/matvec_codes.cuh"
static void add_to(u32* sum, u32 value) { *sum += value; }
template <int>
static void await_waves(const u32*, u32, Waiter) { std::abort(); }
static void count_in(u32*) { std::abort(); }
static void end_wave(u32*) { std::abort(); }
static void bring_to_l2(const void* from, u32 bytes) {
  if (u64(from) % 16 != 0 || bytes % 16 != 0) std::abort();
}
static void copy_ahead(void* to, const void* from) { std::memcpy(to, from, 16); }
static void await_copies() {}
static bool __any_sync(unsigned, bool v) {
  int any = v;
  for (int o = 16; o; o >>= 1) any |= __shfl_xor_sync(~0u, any, o);
  return any;
}
#include "waves/context.cuh"
#include "op_formulas.h"
#include "op_codes.h"

static void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

// ---- in place of waves/ring.cuh ---------------------------------------------------------------------------------------

// Chunks of a ring are stored one after another, for any number of slots, after all other memory of a block.
constexpr u32 CHUNKS_MOST = 1024, RINGS_AT = 256 << 10, RING_BYTES = (SMEM_BYTES - RINGS_AT) / 2;
struct Ring {
  u32 promised[CHUNKS_MOST], landed[CHUNKS_MOST]; // bytes of each chunk
  u32 arrivals[CHUNKS_MOST];                      // warps of the loader that arrived at it
  u32 filled, taken[THREADS_MAX];                 // chunks of the wave, and of each thread
  u32 seen[THREADS_MAX], left[THREADS_MAX];       // chunks up to which each thread has looked and waited, and those that it has left
  u32 held[THREADS_MAX];                          // chunks that each thread took before it entered the wave
};
static Ring rings[2]; // inputs, weights
static std::vector<u8> work, cache;
static std::vector<WaveTurn> told; // to this block
static u32 drawn_of_wave;          // tickets, by all blocks

static bool within(const std::vector<u8>& all, const u8* from, u32 bytes) {
  return from >= all.data() && from + bytes <= all.data() + all.size();
}
// What a tensor map says: `WeightBox` of src/codegen/waves.rs.
struct WeightBox {
  u64 place, units, unit_bytes;
  u32 box_units, piece_bytes, line_bytes, reserved;
};
static std::vector<WeightBox> weight_boxes;
// After them: `CacheBox`.
struct CacheBox {
  u64 place, rows;
  u32 row_bytes, positions;
};
static std::vector<CacheBox> cache_boxes;
template <class R>
static Ring& ring_of() { return rings[R::FIRST == 0 ? 0 : 1]; }
// The chunk of the wave at a cursor, and where it lies.
template <class R>
static u32 chunk_of(const RingCursor<R>& at) {
  const u32 chunk = at.use * R::SLOTS + at.slot;
  require(chunk < CHUNKS_MOST && (chunk + 1) * R::SLOT_BYTES <= RING_BYTES, "more chunks than this memory holds");
  return chunk;
}
template <class R>
static u8* slot_of(const RingCursor<R>& at) { return block_memory() + RINGS_AT + (R::FIRST == 0 ? 0 : RING_BYTES) + chunk_of(at) * R::SLOT_BYTES; }
template <class M, class R>
struct WaveLoader {
  const WaveParams& p;
  RingCursor<R> at;
  u32 step, wave, meetings;
  bool met, met_last_step;
  int part, lane;
  std::vector<u32> boxes; // that this lane may copy
  u32 turns = 0, rounds = 0;
  bool lost() const { return false; }
  // In rounds, as blocks that are equally fast would draw; each has another place in the next round. The blocks of a pair that share chunks have the same ticket: as one block runs here,
  // it finds that itself.
  u32 draw(u32* drawn) {
    require(met && within(work, reinterpret_cast<u8*>(drawn), 4) && *drawn == drawn_of_wave++, "a ticket of a counter that did not begin at 0");
    ++*drawn;
    rounds++;
    const u32 together = paired() ? 2 : 1, blocks = M::SMS / together;
    return (rounds - 1) * blocks + (blockIdx.x / together + rounds) % blocks;
  }
  bool paired() const { return M::PAIRS && shares_weights<M>(p); }
  bool draws() const { return true; }
  void tell(const WaveTurn& turn) {
    if (lane == 0) told.push_back(turn);
    __syncwarp();
  }
  void tell(const WaveTurn& turn, const WaveTurn& of_peer) {
    const u32 units[2] = {turn.words[2] >> 9 & 0x7f, of_peer.words[2] >> 9 & 0x7f};
    require(!paired() || (turn.words[0] == of_peer.words[0] && turn.words[1] != of_peer.words[1] && units[0] > 0 && units[1] > 0) || units[0] + units[1] == 0, "a pair whose blocks have no parts of a tile");
    tell(turn);
  }
  template <bool AGAIN>
  void set_hint() {}
  void copy_shared(u8* to, const u8* from, u32 bytes) { copy(to, from, bytes); }
  void copy_own_lines(u8* to, u32 box, u32 line, u32 unit) { copy_lines(to, box, line, unit); }
  u8* free_slot() { return slot_of(at); }
  void arrive(u32 bytes) {
    Ring& ring = ring_of<R>();
    require(bytes > 0 && bytes <= u32(R::SLOT_BYTES), "a chunk of no bytes, or of more than a slot has");
    if (lane == 0 && part == 0) {
      require(chunk_of(at) == ring.filled && ring.promised[ring.filled] == 0, "a chunk is announced twice, or out of turn");
      ring.promised[ring.filled++] = bytes;
    }
    if (lane == 0) ring.arrivals[chunk_of(at)]++;
    __syncwarp();
  }
  void copy(u8* to, const u8* from, u32 bytes) {
    require(u64(to) % 16 == 0 && u64(from) % 16 == 0 && bytes % 16 == 0 && bytes > 0, "a copy that is not aligned");
    const u8* slot = slot_of(at);
    require(to >= slot && to + bytes <= slot + R::SLOT_BYTES, "a copy beyond its slot");
    require(within(work, from, bytes) || (R::FIRST != 0 ? within(constants, from, bytes) : within(cache, from, bytes)), "a copy from elsewhere");
    require(within(constants, from, bytes) || (within(work, from, bytes) ? met : met || met_last_step), "a copy of activations before the blocks met");
    std::memcpy(to, from, bytes);
    ring_of<R>().landed[chunk_of(at)] += bytes;
  }
  // One block runs here: what the other block of its pair would copy to both, it copies.
  bool shares() const { return R::FIRST != 0 && shares_weights<M>(p); }
  bool makes(u32) const { return true; }
  void see_box(u32 box) { boxes.push_back(box); }
  // What lies beyond a unit is zeros, and counts.
  void copy_box(u8* to, u32 box, u32 x, u32 y) {
    require(R::FIRST != 0 && box < weight_boxes.size(), "a box that there is not");
    require(step > 0 || std::find(boxes.begin(), boxes.end(), box) != boxes.end(), "a box whose tensor map was not fenced in the launch");
    const WeightBox& of = weight_boxes[box];
    const u8* slot = slot_of(at);
    require(u64(to) % 128 == 0 && to >= slot && to + of.box_units * of.piece_bytes <= slot + R::SLOT_BYTES, "a box beyond its slot");
    require(of.line_bytes == 0, "a box of lines that is copied whole");
    require(of.unit_bytes % 16 == 0 && of.piece_bytes % 16 == 0 && of.piece_bytes <= 2048 && of.box_units <= 256, "a box that no tensor map has");
    for (u32 unit = 0; unit < of.box_units; unit++)
      for (u32 i = 0; i < of.piece_bytes; i++) {
        const u64 byte = u64(x) * 8 + i;
        const bool exists = y + unit < of.units && byte < of.unit_bytes;
        to[unit * of.piece_bytes + i] = exists ? constants.at(of.place + (y + unit) * of.unit_bytes + byte) : 0;
      }
    ring_of<R>().landed[chunk_of(at)] += of.box_units * of.piece_bytes;
  }
  // Lines of 64 bytes, of which pieces of 16 bytes lie where the bits of their place above the line say.
  void copy_lines(u8* to, u32 box, u32 line, u32 unit) {
    require(box < weight_boxes.size(), "a box that there is not");
    require(step > 0 || std::find(boxes.begin(), boxes.end(), box) != boxes.end(), "a box whose tensor map was not fenced in the launch");
    const WeightBox& of = weight_boxes[box];
    const u8* slot = slot_of(at);
    require(to >= slot && to + of.box_units * of.piece_bytes <= slot + R::SLOT_BYTES, "a box beyond its slot");
    require(of.line_bytes == 64 && of.unit_bytes % 64 == 0 && of.piece_bytes % 64 == 0 && of.piece_bytes / 64 <= 256 && of.box_units <= 256, "a box that no tensor map has");
    require((to - smem) % 128 == 0, "a box that is not aligned");
    for (u32 i = 0; i < of.box_units * of.piece_bytes; i++) {
      const u64 byte = u64(line) * 64 + i % of.piece_bytes, row = unit + i / of.piece_bytes, place = u64(to - smem) + i;
      smem[place ^ (place >> 7 & 3) << 4] = row < of.units && byte < of.unit_bytes ? constants.at(of.place + row * of.unit_bytes + byte) : 0;
    }
    ring_of<R>().landed[chunk_of(at)] += of.box_units * of.piece_bytes;
  }
  // Of each 128 bytes of positions the even ones of each eight, then the odd ones.
  void copy_tile(u8* to, u32 box, u32 eight, u32 bytes) {
    require(R::FIRST == 0 && box >= weight_boxes.size() && box < weight_boxes.size() + cache_boxes.size(), "a box that there is not");
    require(std::find(boxes.begin(), boxes.end(), box) != boxes.end(), "a box whose tensor map was not fenced in the launch");
    require(met, "a copy of keys or values before the blocks met");
    const CacheBox& of = cache_boxes[box - weight_boxes.size()];
    const u8* slot = slot_of(at);
    require(bytes == of.positions * of.row_bytes && of.row_bytes % 128 == 0 && u64(eight) * 8 + of.positions <= of.rows, "a box that no tensor map has");
    require((to - smem) % 1024 == 0 && to >= slot && to + bytes <= slot + R::SLOT_BYTES, "a box beyond its slot");
    for (u32 i = 0; i < bytes; i++) {
      const u32 half = i / (of.positions * 128), line = i / 128 % of.positions, position = line / 8 * 8 + line % 4 * 2 + line % 8 / 4;
      to[i] = cache.at(of.place + (u64(eight) * 8 + position) * of.row_bytes + half * 128 + i % 128);
    }
    ring_of<R>().landed[chunk_of(at)] += bytes;
  }
  void meet() { met = true; }
  void meet_last_step() { met_last_step = true; }
};
template <class W>
static WaveTurn wave_turn(W& w) {
  require(w.turns < told.size(), "a turn that is not told");
  return told[w.turns++];
}
template <class R>
static bool see(const RingCursor<R>& at) {
  const u32 chunk = at.use * R::SLOTS + at.slot;
  Ring& ring = ring_of<R>();
  if (chunk >= ring.filled) return false;
  ring.seen[current] = chunk + 1;
  return true;
}
template <class M, class R>
static const u8* wave_take(WaveContext<M>&, const RingCursor<R>& at) {
  require(see(at), "a chunk is taken that the loader did not fill");
  return slot_of(at);
}
template <class M, class A, class B>
static void wave_take_pair(WaveContext<M>& c, const RingCursor<A>& a, const RingCursor<B>& b, const u8*& first, const u8*& second, bool both = true) {
  first = both ? wave_take(c, a) : slot_of(a), second = wave_take(c, b);
}
static void leave(Ring& ring, u32 chunk) { require(ring.left[current]++ == chunk, "a chunk is left twice, or out of turn"); }
template <class M, class R>
static void wave_release(WaveContext<M>&, RingCursor<R>& at) {
  __syncwarp();
  leave(ring_of<R>(), chunk_of(at));
  at.next();
}
// Each lane looks for one chunk, and reads all of them once its whole warp has looked.
template <int N, class M, class R, class Read>
static void wave_take_many(WaveContext<M>& c, RingCursor<R>& at, const Read& read) {
  static_assert(N <= R::SLOTS && N <= 32, "the chunks are in the ring at the same time");
  RingCursor<R> own = at;
  for (int i = 0; i < min(c.lane(), N - 1); i++) own.next();
  wave_take(c, own);
  __syncwarp();
  for (int i = 0; i < N; i++) {
    read(i, slot_of(at));
    wave_release(c, at);
  }
  ring_of<R>().held[current] += N;
}
template <class M, class A, class B>
static void wave_release_pair(WaveContext<M>& c, RingCursor<A>& a, RingCursor<B>& b) {
  wave_release(c, a), wave_release(c, b);
}
template <class M, class A, class B>
static bool wave_look(const WaveContext<M>&, const RingCursor<A>& a, const RingCursor<B>& b, bool first, bool second) {
  const bool has_first = !first || see(a), has_second = !second || see(b);
  return has_first && has_second;
}
template <class M, class A, class B>
static void wave_await(WaveContext<M>& c, const RingCursor<A>& a, const RingCursor<B>& b, bool seen, bool first, bool second) {
  require(seen || wave_look(c, a, b, first, second), "a chunk is awaited that the loader did not fill");
}
template <class R>
struct WaveChunk {
  const u8* at = nullptr;
  u32 chunk = 0;
  template <class M>
  void take(const WaveContext<M>&, RingCursor<R>& cursor) {
    chunk = chunk_of(cursor);
    require(ring_of<R>().seen[current] == chunk + 1, "a chunk is taken that was not awaited");
    at = slot_of(cursor);
    cursor.next();
  }
};
template <class M, class A, class B>
static void wave_leave(const WaveContext<M>&, const WaveChunk<A>& input, const WaveChunk<B>& weights, bool leaves_input, bool leaves_weights) {
  __syncwarp();
  if (leaves_input) leave(ring_of<A>(), input.chunk);
  if (leaves_weights) leave(ring_of<B>(), weights.chunk);
}

// ---- in place of the pairs of blocks of runtime/sync.cuh -------------------------------------------------------------

// Blocks run one after another, so those of a wave in pairs run twice: what each sends is collected first, and is there the second time. An even
// block has it from the start, as if the other one was ahead; an odd block when it waits.
enum class WaitKind : u32 { PEER = 6 };
enum class Exchange { NONE, SENDS, RECEIVES };
struct Sent {
  u32 at, barrier;
  float2 sums;
};
static Exchange exchange = Exchange::NONE;
static std::vector<Sent> inboxes[256]; // of each block
static bool exchanged;                 // a block has sent, or waited
static struct {
  u32 scratch, end, barrier; // places in shared memory
  u32 expected;              // bytes
  bool delivered;
  bool may_send[THREADS_MAX], has_waited[THREADS_MAX], has_seen[THREADS_MAX];
} peer;
static std::vector<Sent>& inbox() { return inboxes[blockIdx.x]; }
static void deliver() {
  for (const Sent& sent : inbox()) {
    require(sent.barrier == peer.barrier, "a store that arrives at another barrier");
    std::memcpy(smem + sent.at, &sent.sums, sizeof sent.sums);
  }
  peer.delivered = true;
}
static u32 peer_address(const void* p) { return smem_address(p); }
static void expect_bytes(u64* barrier, u32 bytes) {
  require(smem_address(barrier) == peer.barrier && peer.expected == 0 && bytes > 0, "bytes that are expected twice, or elsewhere");
  peer.expected = bytes;
}
static void fence_before_sending() { peer.may_send[current] = true; }
static void send_to_peer(u32 to, float2 sums, u32 barrier) {
  require(exchange != Exchange::NONE && peer.may_send[current], "sums are sent before a fence, or in a wave that is not in pairs");
  require(to >= peer.scratch && to + 8 <= peer.end && to % 8 == 0, "sums are sent out of scratch");
  if (exchange == Exchange::RECEIVES) return;
  exchanged = true;
  inboxes[blockIdx.x ^ 1].push_back({to, barrier, sums});
}
static bool peer_has_sent(u64* barrier, u32 use) {
  require(exchange != Exchange::NONE && smem_address(barrier) == peer.barrier && use == 0, "a wait for something else than the sums of this wave");
  exchanged = peer.has_waited[current] = true;
  if (exchange == Exchange::SENDS) return true;
  require(peer.expected == inbox().size() * 8, "other bytes are sent than are awaited");
  if (!peer.delivered) deliver();
  return true;
}
static bool give_up(Waiter, bool, WaitKind, u32, u32) { std::abort(); }
static bool __all_sync(unsigned, bool v) { return !__any_sync(~0u, !v); }
static void fence_sent() { peer.has_seen[current] = peer.has_waited[current]; }
static void begin_exchange(u32 scratch, u32 bytes, const void* barrier) {
  std::memset(&peer, 0, sizeof peer);
  peer.scratch = scratch, peer.end = scratch + bytes, peer.barrier = smem_address(barrier);
  if (exchange == Exchange::RECEIVES && blockIdx.x % 2 == 0) deliver();
}
static void end_exchange() {
  for (int i = 0; i < THREADS_MAX; i++) require(peer.has_waited[i] == peer.has_seen[i], "no fence after the wait");
  if (exchange != Exchange::RECEIVES) return;
  std::vector<bool> taken(SMEM_BYTES);
  for (const Sent& sent : inbox()) {
    require(!taken[sent.at], "sums are sent to one place twice");
    taken[sent.at] = true;
  }
  require(peer.expected == inbox().size() * 8, "sums are sent to a block that does not wait");
}
// `all` runs the blocks of a wave.
template <class F>
static void run_in_pairs(F all) {
  const std::vector<u8> before = work;
  for (std::vector<Sent>& of : inboxes) of.clear();
  exchange = Exchange::SENDS, exchanged = false;
  all();
  if (exchanged) {
    std::memcpy(work.data(), before.data(), before.size());
    exchange = Exchange::RECEIVES;
    all();
  }
  exchange = Exchange::NONE;
}

// ---- nets -----------------------------------------------------------------------------------------------------------

static void fence_empty_slot() {}
// To 10 bits after the point, ties away from 0.
static float rounded_tf32(float x) { return x == x ? __uint_as_float((__float_as_uint(x) + 0x1000) & ~0x1fffu) : bits_to_float(0x7fc00000); }
struct Tf32Product {
  float a[16][8], b[8][8], d[16][8];
  int stored;
};
static Tf32Product tf32_products[2][THREADS_MAX / 32];
// mma.m16n8k8 of tf32, by a whole warp: PTX ISA, "Matrix Fragments for mma.m16n8k8". Operands have 10 bits after the point.
static void emulated_product_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1) {
  Tf32Product& p = tf32_products[turns[current]++ & 1][current / 32];
  const int lane = current % 32, group = lane / 4, t = lane % 4;
  for (float v : {a0, a1, a2, a3, b0, b1}) require((__float_as_uint(v) & 0x1fff) == 0, "an operand that is not rounded");
  p.a[group][t] = a0, p.a[group + 8][t] = a1, p.a[group][t + 4] = a2, p.a[group + 8][t + 4] = a3;
  p.b[t][group] = b0, p.b[t + 4][group] = b1;
  for (int i = 0; i < 4; i++) p.d[group + i / 2 * 8][t * 2 + i % 2] = d[i];
  if (++p.stored == 32) {
    p.stored = 0;
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 8; k++)
        for (int col = 0; col < 8; col++) p.d[row][col] += p.a[row][k] * p.b[k][col];
  }
  __syncwarp();
  for (int i = 0; i < 4; i++) d[i] = p.d[group + i / 2 * 8][t * 2 + i % 2];
}

#include "waves/rows.cuh"
#include "waves/warpgroup.cuh"
#include "waves/warpgroup_codes.cuh"
#include "waves/matmul.cuh"
#include "waves/attention.cuh"

// Whether an op enters its wave itself.
template <class Op>
struct Holds {
  static bool in(const Wave&) { return false; }
};
template <class M, class G>
struct Holds<WaveMatMul<M, G>> {
  static bool in(const Wave&) { return G::HELD > 0; }
};

static WaveDevicesParams devices_of_launch; // of one device only its parameters are looked at
static WaveParams& params = devices_of_launch;
static Wave wave;
static std::vector<Wave> step_waves; // as a block fetches them: it is told this wave, whichever is next
static u32 step_at_hand, wave_at_hand;
static u32 used[2] = {RING_BYTES, RING_BYTES}; // bytes of each ring that a wave has written

template <class M, class Op, class R>
static void load(int thread) {
  WaveLoader<M, R> loader{params, {0, 0}, step_at_hand, 0, 0, false, false, thread / 32, thread % 32, {}};
  Op::load(loader, wave);
  ring_of<R>().taken[thread] = loader.at.use * R::SLOTS + loader.at.slot;
}
template <class M, class Op>
static void consume(int thread) {
  WaveContext<M> c(params);
  c.thread = thread;
  c.warp_index = thread / 32;
  c.step = step_at_hand;
  c.wave = wave_at_hand;
  c.fetch_first();
  c.await_fetched();
  c.barrier();
  if (!Holds<Op>::in(wave)) c.enter();
  Op::run(c, c.current());
  require(c.turns == told.size(), "a warp was told a turn that it did not take");
  rings[0].taken[thread] = c.inputs.use * M::INPUT_SLOTS + c.inputs.slot;
  rings[1].taken[thread] = c.weights.use * M::WEIGHT_SLOTS + c.weights.slot;
}
template <class M, class Op, class R>
static void fill() {
  Ring& ring = ring_of<R>();
  std::memset(&ring, 0, sizeof ring);
  run_block(load<M, Op, R>, R::FILLERS * 32);
  for (u32 i = 0; i < CHUNKS_MOST; i++) require(ring.promised[i] == ring.landed[i] && (ring.promised[i] > 0) == (i < ring.filled), "other bytes land than are awaited");
  for (u32 i = 0; i < ring.filled; i++) require(ring.arrivals[i] == u32(R::FILLERS), "consumers pass a chunk that a warp of the loader has not seen");
  for (int i = 0; i < R::FILLERS * 32; i++) require(ring.taken[i] == ring.filled, "a warp of the loader left out a chunk");
}
// The part of this block in `wave`.
template <class M, class Op>
static void run_wave() {
  static_assert(sizeof(WaveState<M>) <= M::STATE_BYTES && M::STATE_AT + M::STATE_BYTES <= RINGS_AT, "a block has room for its state");
  // Not a number, until it is written. Of the rings, what the wave before filled.
  std::memset(smem, 0xff, RINGS_AT);
  for (u32 i = 0; i < 2; i++) std::memset(smem + RINGS_AT + i * RING_BYTES, 0xff, used[i]);
  step_waves.assign(params.wave_count, wave);
  params.waves = step_waves.data();
  // What a block does before its first wave.
  WaveState<M>& state = wave_state<M>();
  for (u32 row = 0; M::STEPS && row < params.row_count; row++) place_row<M>(params, row);
  told.clear();
  if (blockIdx.x == M::SMS - 1) drawn_of_wave = 0; // the first block of a wave
  fill<M, Op, InputRing<M>>();
  fill<M, Op, WeightRing<M>>();
  used[0] = rings[0].filled * M::INPUT_BYTES, used[1] = rings[1].filled * M::WEIGHT_BYTES;
  begin_exchange(M::SCRATCH_AT, M::SCRATCH_BYTES, &state.paired);
  run_block(consume<M, Op>, M::WARPS * 32);
  end_exchange();
  for (const Ring& ring : rings)
    for (int i = 0; i < M::WARPS * 32; i++) {
      require(ring.taken[i] == ring.filled, "a warp left out a chunk");
      require(ring.left[i] == ring.filled, "a warp did not leave a chunk");
    }
}
