// Owns the parameters of a launch of waves, the state of a block in shared memory and that of a thread.
//
// A wave is the work of one grid of the program for all rows of a launch: a prompt chunk, or a step or a tail (M::STEPS). Where all blocks
// meet between two waves, the second one can read everything that earlier waves wrote. They do not meet between a product and a wave that reads nothing of it but
// packets: these say themselves when they are there. No wave writes weights: a loader copies those of the next wave before the blocks meet.
#pragma once

// One wave; codegen/waves.rs declares it, and the structs below. Places of the work arena, of constants and of caches are in OFFSET_BYTES.
struct alignas(16) Wave {
  u32 op; // case of the generated dispatch
  u32 division; // which division of work it has
  u32 x; // work arena: what it reads
  u32 out; // work arena: what it writes
  u32 residual; // work arena
  union { u32 branch, square_parts, gate; }; // work arena: what is added to the residual; of attention what KV splits leave, or heads with the gate; of a product parts of squares, or where sums of parts go
  union { u32 weight, rows; }; // matrix; or work arena: the output row by row
  union { u32 norm_weight, q_norm; }; // norm weight of the output, or of q
  union { u32 norm_bias, k_norm, shown; }; // norm bias of the output, or norm weight of k; of a product 1 if the residual goes to all devices
  union { u32 bias, rope, table; }; // by op
  union { u32 branch_weight, sinks, square_splits; }; // norm of a branch before it is added; of attention sinks; of a product in a chunk most parts of k of the one that left squares
  union { u32 branch_bias, boxes; }; // its bias; or boxes of a matrix: the first of three tensor maps
  union { u32 k_cache, squares; }; // cache; or work arena: sums of squares of parts of rows, for a norm
  union { u32 v_cache, squares_out; }; // cache; or work arena: sums of squares that a product leaves
  u32 next_division; // division of the wave after it; of the last one, of the first
  u32 row_scales; // of a matrix of codes
  u32 meetings; // of all blocks in the step, before it
  u32 meets; // 1 if all blocks meet after it, else 0
  u32 next_op; // op of the wave after it; of the last one, of the first
  u32 first_unit; // unit of the matrix where the device's part begins
};
static_assert(sizeof(Wave) == 80, "the host fills this struct");

// The part of one block in a wave: launch indices lo to hi for `rows` rows of the launch.
struct alignas(16) Share {
  u32 row; // rows of the launch, from here
  u32 rows; // so many
  u32 lo; // launch indices, from here
  u32 hi; // ... up to here
};
static_assert(sizeof(Share) == 16, "the host fills this struct");
// The shares of one block in a division. The first ones are in the record itself, and arrive with it.
constexpr u32 SHARES_HELD = 4;
struct alignas(16) ShareRecord {
  u32 first; // in the list of all shares
  u32 count; // shares of the block
  u32 reserved[2]; // 0
  Share held[SHARES_HELD]; // the first of them
};
static_assert(sizeof(ShareRecord) == 80, "the host fills this struct");

// A task of attention of a step: KV split `split` of a row, for a group of heads. It is all of the row's history if that is not cut.
struct WaveSplit {
  u32 row, group, split;
};

struct WaveParams {
  const u8* pack; // weights and constants
  u8* cache; // keys and values of earlier positions
  u8* work; // activations of the rows
  const Wave* waves; // of a step
  const Share* shares; // of all blocks and divisions
  const ShareRecord* records; // [blocks of rows - 1][divisions][SMS]
  const Row* rows; // of the launch
  const u32* pages; // [sequences][M::BLOCKS]; of a chunk there is one sequence
  u32* arrived; // arrivals of blocks at meetings of the launch; 0 before it
  u32* report; // host-visible watchdog report, 8 words an SM
  volatile u32* abort; // host-visible
  u64* stamps; // [SMS][steps][waves][STAMP_WORDS] nanoseconds, traced builds only
  float* logits; // null, or of the last step: [ROWS][vocabulary]
  i32* mailbox; // host-visible: [1 + step * ROWS + row] tokens; of a launch that decides none not looked at
  u64 timeout_ns; // of the launch
  u32 wave_count; // waves of a step
  u32 row_count; // rows of the launch
  u32 position; // of the first row
  u32 steps; // of the launch
  const float* taken; // of a tail: residual of the rows of the chunk before it
  const u8* boxes; // tensor maps, of 128 bytes each
  u32 tag; // of packets of the first wave; each wave of the launch has the next one
  u32 reserved; // 0
};
static_assert(sizeof(WaveParams) == 160, "the host fills this struct");
// Of several devices: M has PEERS, how many others there are, and Launch, which is this. Each device has its own copy of all that the host fills.
struct WaveDevicesParams : WaveParams {
  u64 peers[PEERS_MAX]; // from `work` of this device to that of each other one, in bytes modulo 2^64
  u64 peer_counts[PEERS_MAX]; // the same of `arrived`
  u32 first_block; // blocks of the devices before this one
  u32 spare; // 0
};
static_assert(sizeof(WaveDevicesParams) == 280, "the host fills this struct");

// Blocks of all devices; M::SMS are those of one.
template <class M>
__device__ constexpr int all_blocks() {
  return M::SMS * (1 + peers<M>());
}
template <class M>
__device__ __forceinline__ const auto& devices_params(const WaveParams& p) {
  return static_cast<const typename M::Launch&>(p);
}
// The number of this block among those of all devices.
template <class M>
__device__ __forceinline__ u32 block_number(const WaveParams& p) {
  if constexpr (peers<M>() > 0) return devices_params<M>(p).first_block + blockIdx.x;
  return blockIdx.x;
}
// Where a matrix has the units of this device: the number of the first of them.
template <class M>
__device__ __forceinline__ u32 first_unit(const Wave& e) {
  return peers<M>() > 0 ? e.first_unit : 0;
}
// Whether a wave of configuration G leaves its output, and the residual to which it adds, on all devices.
template <class M, class G>
__device__ constexpr bool everywhere() {
  if constexpr (peers<M>() > 0) return G::EVERYWHERE;
  return false;
}
template <class M, class G>
__device__ constexpr bool residual_everywhere() {
  if constexpr (peers<M>() > 0) return G::RESIDUAL_EVERYWHERE;
  return false;
}

// A wave and the shares of this block in it.
struct HeldWave {
  Wave wave;
  ShareRecord record;
};

// A turn of a block at an item that it drew a ticket for. The first warp of its loader tells it to the other warps. It writes `nth` last, which counts the turns of a launch from 1.
// There are two entries more than slots of inputs. So all warps have read a turn before its entry is used again: the slots of its inputs hold those of later turns.
// Where the first block of a pair tells those of the second one, too, there is one entry more for each slot of weights, and another: it is ahead by those that they share.
struct __align__(16) WaveTurn {
  u32 words[3], nth;
};
template <class M>
__device__ constexpr int told_turns(decltype(M::TURNS)*) {
  return M::TURNS;
}
template <class M>
__device__ constexpr int told_turns(...) {
  return 0;
}
template <int N>
struct WaveTurns {
  WaveTurn turns[N];
};
template <>
struct WaveTurns<0> {};
// Rows side by side of a chunk of which the input of a product has the same 16 bytes in one line.
constexpr u32 ROWS_OF_LINE = 8;
template <class M>
struct WaveState : WaveTurns<told_turns<M>(nullptr)> {
  Watchdog dog;
  u64 full[M::INPUT_SLOTS + M::WEIGHT_SLOTS];
  u64 empty[M::INPUT_SLOTS + M::WEIGHT_SLOTS];
  // Of a step: [parity of the row at hand][mean and squares of a branch, of the sum][warp]. Of a chunk: [parity of the sum at hand][row of those side by side][warp].
  float stats[2][M::STEPS ? 4 : ROWS_OF_LINE][M::WARPS];
  HeldWave now, next; // for consumers; the next one arrives while they run the current one
  // Of a step: where each row is before the first step, and which row of the page table it has.
  u32 positions[M::STEPS ? M::BLOCK_ROWS : 1], sequences[M::STEPS ? M::BLOCK_ROWS : 1];
  u32 leads[M::STEPS ? M::BLOCK_ROWS : 1]; // rows before it of the same sequence
  float factors[M::STEPS || M::SHARED ? M::BLOCK_ROWS : 1]; // of the norm of a product's input, by row of the block of rows
  u64 paired; // bytes of sums that the other block of the pair sends
};
template <class M>
__device__ __forceinline__ WaveState<M>& wave_state() {
  return *reinterpret_cast<WaveState<M>*>(block_memory() + M::STATE_AT);
}
// The memory of the block, for code that uses it all the time. Its address is kept in a register: otherwise the compiler computes it again before each use,
// from the place of the block in its cluster, which takes longer than an access.
struct HeldMemory {
#ifdef __CUDA_ARCH__
  u32 at;
  __device__ __forceinline__ HeldMemory() : at(smem_address(block_memory())) { asm volatile("" : "+r"(at)); }
  __device__ __forceinline__ u8* memory() const { return static_cast<u8*>(__cvta_shared_to_generic(at)); }
#else
  u8* memory() const { return block_memory(); }
#endif
};

// The two rings of a block: what waves wrote (inputs of products, histories), and weights.
template <class M>
struct InputRing {
  static constexpr int SLOTS = M::INPUT_SLOTS, SLOT_BYTES = M::INPUT_BYTES, AT = M::INPUT_AT, FIRST = 0, FILLERS = 1;
};
template <class M>
struct WeightRing {
  static constexpr int SLOTS = M::WEIGHT_SLOTS, SLOT_BYTES = M::WEIGHT_BYTES, AT = 0, FIRST = M::INPUT_SLOTS, FILLERS = M::LOADER_WARPS - 1;
};

// Whether both blocks of a pair multiply the same weights by rows of their own, in this launch: each then copies half of a chunk of weights, to both.
template <class M>
__device__ __forceinline__ bool shares_weights(const WaveParams& p) {
  return M::PAIRS && !M::STEPS && (p.row_count + M::BLOCK_ROWS - 1) / M::BLOCK_ROWS % 2 == 0;
}
// The position of a row in a step. Of a chunk, rows are at consecutive positions.
template <class M>
__device__ __forceinline__ u32 wave_position(const WaveParams& p, u32 step, u32 row) {
  if constexpr (M::STEPS)
    return min(wave_state<M>().positions[row] + step, M::CONTEXT_MAX - 1);
  else
    return p.position + row;
}
// The row of the page table that a row of the launch has.
template <class M>
__device__ __forceinline__ u32 wave_sequence(u32 row) {
  return M::STEPS ? wave_state<M>().sequences[row] : 0;
}
// The record of this block in a division.
template <class M>
__device__ __forceinline__ const ShareRecord* share_record(const WaveParams& p, u32 division) {
  const u32 blocks = (p.row_count + M::BLOCK_ROWS - 1) / M::BLOCK_ROWS;
  return p.records + ((blocks - 1) * M::DIVISIONS + division) * M::SMS + blockIdx.x;
}
__device__ __forceinline__ Share share_of(const uint4 v) { return Share{uniform(v.x), uniform(v.y), uniform(v.z), uniform(v.w)}; }
// The shares of this block in a wave, for the loader.
template <class M>
struct Shares {
  const Share* first;
  u32 count;
  __device__ __forceinline__ Shares(const WaveParams& p, u32 division) {
    const ShareRecord* record = share_record<M>(p, division);
    first = p.shares + __ldg(&record->first);
    count = uniform(__ldg(&record->count));
  }
  __device__ __forceinline__ Share operator[](u32 i) const { return share_of(__ldg(reinterpret_cast<const uint4*>(first + i))); }
};
// By a warp of the consumers: asks for the next wave and the shares of this block in it. They are there when the warp has called `await_copies`.
template <class M>
__device__ __forceinline__ void fetch_wave(const WaveParams& p, u32 wave, u32 division, u32 lane) {
  static_assert(sizeof(HeldWave) <= 32 * 16, "a piece a lane");
  const u32 at = lane * 16;
  const u8* from = at < sizeof(Wave) ? reinterpret_cast<const u8*>(p.waves + wave) + at : reinterpret_cast<const u8*>(share_record<M>(p, division)) + (at - sizeof(Wave));
  if (at < sizeof(HeldWave)) copy_ahead(reinterpret_cast<u8*>(&wave_state<M>().next) + at, from);
}
// By the same warp, then: the next wave becomes the current one. It always has the same place, so that no register holds where it is.
template <class M>
__device__ __forceinline__ void take_wave(u32 lane) {
  WaveState<M>& state = wave_state<M>();
  if (lane < sizeof(HeldWave) / 16) reinterpret_cast<uint4*>(&state.now)[lane] = reinterpret_cast<const uint4*>(&state.next)[lane];
  __syncwarp();
}

// Before the first wave, by the thread of a row: where it is, and how many rows before it its sequence has in a step.
template <class M>
__device__ __forceinline__ void place_row(const WaveParams& p, u32 row) {
  WaveState<M>& state = wave_state<M>();
  const u32 sequence = __ldg(&p.rows[row].sequence);
  state.positions[row] = __ldg(&p.rows[row].position);
  state.sequences[row] = sequence;
  u32 lead = 0;
  while (lead < row && __ldg(&p.rows[row - lead - 1].sequence) == sequence) lead++;
  state.leads[row] = lead;
}

// Thread-wide view of a block.
template <class M>
struct WaveContext {
  static constexpr bool PAIRED = M::PAIRS && !M::STEPS; // turns may come from the other block of a pair
  const WaveParams& p;
  const HeldMemory held;
  RingCursor<InputRing<M>> inputs; // next chunks to consume
  RingCursor<WeightRing<M>> weights;
  u32 step, wave;
  u32 patience;
  u32 meetings; // of all blocks in the launch, that the next wave waits for; 0 if for none
  u32 starved_ns; // traced builds: time of this wave before chunks that had not landed
  u32 exchanges; // with the other block of the pair, so far
  u32 turns;     // told, so far
  int thread, warp_index;

  __device__ __forceinline__ explicit WaveContext(const WaveParams& p)
      : p(p), held(), inputs{0, 0}, weights{0, 0}, step(0), wave(0), patience(POLLS_BETWEEN_CHECKS), meetings(0), starved_ns(0), exchanges(0), turns(0), thread(int(threadIdx.x)), warp_index(int(uniform(threadIdx.x / 32))) {}
  // At the start of every wave. The compiler must take the thread index for a new value; otherwise it keeps everything that ops derive from it in
  // registers throughout.
  __device__ __forceinline__ void begin_wave(u32 s, u32 i) {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp_index = int(uniform(u32(thread) / 32));
    step = s;
    wave = i;
  }
  __device__ __forceinline__ int tid() const { return thread; }
  __device__ __forceinline__ int warp() const { return warp_index; }
  __device__ __forceinline__ int lane() const { return int(u32(thread) % 32); }
  __device__ __forceinline__ void barrier() const { consumer_barrier<M::WARPS * 32>(); }
  __device__ __forceinline__ u8* memory() const { return held.memory(); }
  __device__ __forceinline__ WaveState<M>& state() const { return *reinterpret_cast<WaveState<M>*>(memory() + M::STATE_AT); }
  __device__ __forceinline__ float* scratch() const { return reinterpret_cast<float*>(memory() + M::SCRATCH_AT); }
  __device__ __forceinline__ const Wave& current() const { return state().now.wave; }
  // How many shares the block has in the wave that it has not entered yet.
  __device__ __forceinline__ u32 next_shares() const { return uniform(state().next.record.count); }
  // Before the first wave.
  __device__ __forceinline__ void fetch_first() const {
    if (warp() == 1) fetch_wave<M>(p, 0, __ldg(&p.waves[0].division), u32(lane()));
  }
  // Before a barrier of the block, after which it may enter the wave that warp 1 has asked for.
  __device__ __forceinline__ void await_fetched() const {
    if (warp() == 1) await_copies();
  }
  // Begins the next wave once all blocks have met often enough. Warp 1 asks for the wave after it while warp 0 waits.
  __device__ __forceinline__ void enter() {
    if (warp() == 1) {
      take_wave<M>(u32(lane()));
      fetch_following();
    }
    await_meetings(meetings);
    stamp(1);
  }
  // The same for an op that looks at the next wave before it enters: that wave stays in its place until all warps have done so.
  __device__ __forceinline__ void enter_after_looking() {
    if (warp() == 1) take_wave<M>(u32(lane()));
    await_meetings(meetings);
    if (warp() == 1) fetch_following();
    stamp(1);
  }
  __device__ __forceinline__ void fetch_following() const {
    fetch_wave<M>(p, wave + 1 == p.wave_count ? 0 : wave + 1, current().next_division, u32(lane()));
  }
  __device__ __forceinline__ void await_meetings(u32 count) {
    if (count > 0 && warp() == 0) await_waves<all_blocks<M>()>(p.arrived, count, waiter());
    barrier();
  }
  // The tag of the packets of a wave of this step.
  __device__ __forceinline__ u32 tag_of(u32 of) const { return p.tag + step * p.wave_count + of; }
  __device__ __forceinline__ Waiter waiter() { return Waiter{patience, &state().dog, WaitSite{wave, nullptr}}; }
  // In a launch that is lost, waits return at once.
  __device__ __forceinline__ bool lost() const { return patience == POLLS_WHEN_LOST; }
  // Traced builds: 0 wave begins, 1 all blocks ended the one before, 3 wave ends. Costs nothing when off.
  __device__ __forceinline__ void stamp(int k) {
    if constexpr (M::TRACE)
      if (tid() == 0) {
        u64* words = p.stamps + ((u64(blockIdx.x) * p.steps + step) * p.wave_count + wave) * STAMP_WORDS;
        words[k] = global_ns();
        if (k == 0) starved_ns = 0;
        if (k == 3) words[4] = starved_ns;
      }
  }
  template <class T>
  __device__ __forceinline__ const T* constant(u32 at) const {
    return reinterpret_cast<const T*>(p.pack + u64(at) * OFFSET_BYTES);
  }
  template <class T>
  __device__ __forceinline__ T* work(u32 at) const {
    return reinterpret_cast<T*>(p.work + u64(at) * OFFSET_BYTES);
  }
  // Stores to the arena, of EVERYWHERE also to that of each other device.
  template <bool EVERYWHERE, class T>
  __device__ __forceinline__ void give(T* at, const T& value) const {
    *at = value;
    if constexpr (EVERYWHERE) {
#pragma unroll
      for (int i = 0; i < peers<M>(); i++) *of_peer(at, devices_params<M>(p).peers[i]) = value;
    }
  }
  // The same of two packets of this wave.
  template <bool EVERYWHERE>
  __device__ __forceinline__ void give_packets(u64* at, float2 value) const {
    const u32 first = __float_as_uint(value.x), second = __float_as_uint(value.y), tag = tag_of(wave);
    publish2(at, first, second, tag);
    if constexpr (EVERYWHERE) {
#pragma unroll
      for (int i = 0; i < peers<M>(); i++) publish2(of_peer(at, devices_params<M>(p).peers[i]), first, second, tag);
    }
  }
  // By one thread, after the block barrier that follows the last write of the wave: the block comes to the meeting, on every device.
  __device__ __forceinline__ void come_to_meeting() const {
    if constexpr (peers<M>() > 0) {
      release_step();
      count_in(p.arrived);
#pragma unroll
      for (int i = 0; i < peers<M>(); i++) count_in(of_peer(p.arrived, devices_params<M>(p).peer_counts[i]));
    } else {
      end_wave(p.arrived);
    }
  }
};

// The shares of this block in the current wave, for consumers.
template <class M>
struct HeldShares {
  const Share* first;
  const u32 count;
  const WaveContext<M>& c;
  __device__ __forceinline__ explicit HeldShares(const WaveContext<M>& c)
      : first(c.p.shares + c.state().now.record.first), count(uniform(c.state().now.record.count)), c(c) {}
  __device__ __forceinline__ Share operator[](u32 i) const {
    const uint4 v = read(i);
    return share_of(v);
  }
  // Where lanes ask for different ones.
  __device__ __forceinline__ Share of_lane(u32 i) const {
    const uint4 v = read(i);
    return Share{v.x, v.y, v.z, v.w};
  }
  __device__ __forceinline__ uint4 read(u32 i) const {
    return i < SHARES_HELD ? *reinterpret_cast<const uint4*>(c.state().now.record.held + i) : __ldg(reinterpret_cast<const uint4*>(first + i));
  }
};

// The input of a product, in the order in which it is read: 64 columns of all rows of a block lie side by side, 16 KiB of bf16 for 128 rows.
// By warps: 16 rows by 32 columns are 1 KiB, of which a lane reads 16 bytes twice: columns 8 t to 8 t + 3 of the rows g and g + 8
// (t = lane % 4, g = lane / 4), then the next four. A pair of columns of the one row, the same of the other, and so on: registers of an
// operand as they stand. By warpgroups (WARPGROUPS): 32 columns of all rows lie side by side, and of 8 rows of those four core matrices of
// WarpgroupOperand. Matrix q has the columns 8 t + 2 q and the next, in the order of t: a lane with 16 bytes of a row of a
// matrix has the same columns of them in its words. If weights stay in shared memory, too (SHARED), matrix q has columns 8 q to 8 q + 7. Columns that pad the
// last block stay zero.
template <int COLS, int BLOCK_ROWS, bool WARPGROUPS, bool SHARED = false>
struct OperandPlace {
  static constexpr u32 BLOCK_BYTES = BLOCK_ROWS * 128, BLOCKS = u32(ceil_div(COLS, 128)) * 2;
  static constexpr u32 TILE_BYTES = 2048, SPAN_BYTES = WARPGROUPS ? BLOCK_BYTES / 2 : 1024, HALF_BYTES = 512; // of 16 rows: 64 columns, 32, and half of those
  static __device__ __forceinline__ u32 block(u32 row_block, u32 block) { return (row_block * BLOCKS + block) * BLOCK_BYTES; }
  // How far on the same columns lie, `n` times eight rows further in the block.
  static __device__ __forceinline__ constexpr u32 eights(int n) { return WARPGROUPS ? n * 512 : n / 2 * TILE_BYTES + n % 2 * 4; }
  // Of `col` and the next column; `col` is even.
  static __device__ __forceinline__ u32 at(u32 row, u32 col) {
    const u32 of_block = block(row / BLOCK_ROWS, col / 64);
    const u32 g = row % 8, span = col % 64 / 32;
    const u32 t = SHARED ? col % 8 / 2 : col % 32 / 8, q = SHARED ? col % 32 / 8 : col % 8 / 2;
    if constexpr (WARPGROUPS) return of_block + span * SPAN_BYTES + row % BLOCK_ROWS / 8 * 512 + q * 128 + g * 16 + t * 4;
    return of_block + row % BLOCK_ROWS / 16 * TILE_BYTES + span * SPAN_BYTES + q / 2 * HALF_BYTES + (g * 4 + t) * 16 + q % 2 * 8 + row % 16 / 8 * 4;
  }
};
// Parts of k of a product in a launch of `rows` rows, if it has MOST of them in a launch of one block (`waves::parts_of`), and rows from a part of the sums to the next.
template <class M, int MOST>
struct PartsOfRows {
  static __device__ __forceinline__ u32 blocks(u32 rows) {
    u32 n = 1;
    while (!M::STEPS && n * M::BLOCK_ROWS < rows) n *= 2;
    return n;
  }
  static __device__ __forceinline__ u32 count(u32 rows) { return M::STEPS ? u32(MOST) : max(1u, u32(MOST) / blocks(rows)); }
  static __device__ __forceinline__ u32 pitch(u32 rows) { return blocks(rows) * M::BLOCK_ROWS; }
};
// Of the machine.
template <class M, int COLS>
using WaveOperand = OperandPlace<COLS, M::BLOCK_ROWS, M::WARPGROUPS, M::SHARED>;
// Of what a wave of configuration G writes: the product that reads it may multiply tiles.
template <class M, class G, int COLS>
using OutPlace = OperandPlace<COLS, M::BLOCK_ROWS, M::WARPGROUPS || G::OUT_TILES, M::SHARED>;
