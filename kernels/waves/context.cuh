// Owns what a launch of waves gets, what a block keeps in shared memory and what a thread carries.
//
// A wave is what one grid of the program does for all rows of a prompt chunk. Between two waves all blocks meet, so a wave reads
// what earlier waves wrote wherever it lies. Weights are written by none: a loader brings those of the next wave before the blocks meet.
#pragma once

// One wave; 64 bytes, laid out by codegen/waves.rs. Places of the work arena, of constants and of caches are in OFFSET_BYTES.
struct alignas(16) Wave {
  u32 op;     // case of the generated dispatch
  u32 shares; // which division of work it has
  u32 x, out; // work arena
  u32 residual, branch;
  u32 weight;
  union {
    u32 norm_weight, q_norm;
  };
  union {
    u32 norm_bias, k_norm;
  };
  union {
    u32 bias, rope, table;
  };
  u32 branch_weight, branch_bias; // norm of a branch before it is added
  u32 k_cache, v_cache;
  u32 grid; // for readers
  u32 row_scales; // of a matrix of codes
};
static_assert(sizeof(Wave) == 64, "waves are 64 bytes in codegen/waves.rs");

// What one block does of a wave: launch indices lo to hi for `rows` rows of the chunk.
struct alignas(16) Share {
  u32 row, rows, lo, hi;
};

struct WaveParams {
  const u8* pack;
  u8* cache;
  u8* work;              // activations of the chunk
  const Wave* waves;
  const Share* shares;
  const u32* share_index; // [blocks of rows - 1][divisions][SMS], one more at the end
  const i32* tokens;     // of the chunk
  const u32* pages;      // of the one sequence: [BLOCKS]
  u32* arrived;          // blocks that ended a wave, counted over all waves of the launch; 0 before it
  u32* report;           // host-visible watchdog report, 8 words an SM
  volatile u32* abort;   // host-visible
  u64* stamps;           // [SMS][waves][STAMP_WORDS] nanoseconds, traced builds only
  u64 timeout_ns;
  u32 wave_count;
  u32 row_count;
  u32 position;          // of the first row
  u32 reserved;
};
static_assert(sizeof(WaveParams) == 13 * 8 + 4 * 4, "parameters are as codegen/waves.rs declares them");

template <class M>
struct WaveState {
  Watchdog dog;
  u64 full[M::SLOTS];
  u64 empty[M::SLOTS];
  float stats[2][4][M::WARPS]; // [parity of the rows at hand][mean and squares of a branch, of the sum][warp]
};
template <class M>
__device__ __forceinline__ WaveState<M>& wave_state() {
  return *reinterpret_cast<WaveState<M>*>(block_memory() + M::STATE_AT);
}

// Rows of a block of rows: what a matrix product has of them at once.
constexpr int BLOCK_ROWS = 128;

// The shares of this block in a wave.
template <class M>
struct Shares {
  const Share* first;
  u32 count;
  __device__ __forceinline__ Shares(const WaveParams& p, u32 division) {
    const u32 blocks = (p.row_count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const u32* at = p.share_index + ((blocks - 1) * M::DIVISIONS + division) * M::SMS + blockIdx.x;
    first = p.shares + __ldg(at);
    count = uniform(__ldg(at + 1) - __ldg(at));
  }
  __device__ __forceinline__ Share operator[](u32 i) const {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(first + i));
    return Share{uniform(v.x), uniform(v.y), uniform(v.z), uniform(v.w)};
  }
};

// Thread-wide view of a block.
template <class M>
struct WaveContext {
  const WaveParams& p;
  RingCursor<M> ring; // next chunk to consume
  u32 wave;
  u32 patience;
  u32 starved_ns; // traced builds: time of this wave before chunks that had not landed
  int thread, warp_index;

  __device__ __forceinline__ explicit WaveContext(const WaveParams& p)
      : p(p), ring{0, 0}, wave(0), patience(POLLS_BETWEEN_CHECKS), starved_ns(0), thread(int(threadIdx.x)), warp_index(int(uniform(threadIdx.x / 32))) {}
  // At the start of every wave: the thread is taken for new, or what all ops derive from it is kept in registers throughout.
  __device__ __forceinline__ void begin_wave(u32 i) {
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    warp_index = int(uniform(u32(thread) / 32));
    wave = i;
  }
  __device__ __forceinline__ int tid() const { return thread; }
  __device__ __forceinline__ int warp() const { return warp_index; }
  __device__ __forceinline__ int lane() const { return int(u32(thread) % 32); }
  __device__ __forceinline__ void barrier() const { consumer_barrier<M::WARPS * 32>(); }
  __device__ __forceinline__ Waiter waiter() { return Waiter{patience, &wave_state<M>().dog, WaitSite{wave, nullptr}}; }
  // Traced builds: 0 wave begins, 1 all blocks ended the one before, 3 wave ends. Costs nothing when off.
  __device__ __forceinline__ void stamp(int k) {
    if constexpr (M::TRACE)
      if (tid() == 0) {
        u64* words = p.stamps + (u64(blockIdx.x) * p.wave_count + wave) * STAMP_WORDS;
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
};

// Where the cache has the row of `position` of the sequence: a row of the pool.
template <class M>
__device__ __forceinline__ u32 wave_pool_row(const WaveParams& p, u32 position) {
  const u32 page = min(__ldg(p.pages + position / M::PAGE_ROWS), M::PAGES - 1);
  return page * M::PAGE_ROWS + position % M::PAGE_ROWS;
}

// The input of a product, as its lanes read it: 128 rows by 64 columns of bf16 are 16 KiB side by side. In them 16 rows by 32 columns are
// 1 KiB, of which a lane reads 16 bytes twice: columns 8 t to 8 t + 3 of the rows g and g + 8 (t = lane % 4, g = lane / 4), then the
// next four. A pair of columns of the one row, the same of the other, and so on: registers of an operand as they stand. Columns that pad the
// last block stay zero.
template <int COLS>
struct OperandPlace {
  static constexpr u32 BLOCK_BYTES = BLOCK_ROWS * 128, BLOCKS = u32(ceil_div(COLS, 128)) * 2;
  static constexpr u32 TILE_BYTES = 2048, SPAN_BYTES = 1024, HALF_BYTES = 512; // of 16 rows: 64 columns, 32, and half of those
  static __device__ __forceinline__ u64 block(u32 row_block, u32 block) { return (u64(row_block) * BLOCKS + block) * BLOCK_BYTES; }
  // Of `col` and the next column; `col` is even.
  static __device__ __forceinline__ u64 at(int row, int col) {
    const u32 lane = u32(row % 8) * 4 + u32(col % 32 / 8);
    return block(u32(row) / BLOCK_ROWS, u32(col) / 64) + u32(row % BLOCK_ROWS / 16) * TILE_BYTES + u32(col % 64 / 32) * SPAN_BYTES +
           u32(col % 8 / 4) * HALF_BYTES + lane * 16 + u32(col % 4 / 2) * 8 + u32(row % 16 / 8) * 4;
  }
};
