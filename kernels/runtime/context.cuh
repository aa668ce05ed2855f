// Owns what a launch gets (Params), what a block keeps in shared memory (State) and what a thread carries (Context).
#pragma once

enum class Copy : int { PLAIN, CP_ASYNC, BULK };
enum class Dot : int { FMA, MMA };

constexpr int EOS_MAX = 8;
constexpr int STAMP_WORDS = 5; // of a task: four moments, and the time that it waited for chunks

struct Params {
  const u8* pack; // weights and constants
  u8* cache; // keys and values of earlier positions
  u64* exchange; // what SMs tell each other
  float* logits; // [steps][VOCAB], or null
  const Entry* entries; // all queues, one after another
  const u32* entry_index; // [REGIMES * SMS + 1]
  const StreamRun* runs; // all streams, one after another
  const u32* run_index; // [REGIMES * SMS + 1]
  const i32* prompt; // token of each position below prompt_len
  volatile i32* mailbox; // host-visible: [0] tokens decided so far (positions), then the token of each position; of rows null if a sampler decides
  u32* report; // host-visible watchdog report, 8 words an SM
  volatile u32* abort; // host-visible
  u64* stamps; // [steps][SMS][STAMPS_MAX][STAMP_WORDS] nanoseconds, traced builds only
  u64 timeout_ns; // of each wait
  u64 seed; // of sampling
  u32 prompt_len; // tokens of `prompt`
  u32 position; // of the first step
  u32 steps; // of the launch
  u32 tag; // of the first step; the next step has the next tag
  u32 eos_count; // ids in `eos`
  i32 eos[EOS_MAX]; // ids that end a text
  float inverse_temperature; // 0: greedy
  u32 top_k; // ids that top-k keeps, 0: all
  u32 top_p_q32; // probability that top-p keeps in units of 2^-32, 0: all
};
static_assert(sizeof(Params) == 184, "the host fills this struct");
__device__ __forceinline__ bool filters(const Params& p) { return (p.top_k | p.top_p_q32) != 0; }

// Of a kernel whose cache is a pool of pages: M has PAGE_ROWS, PAGES and POOL_ROWS.
struct PagedParams : Params {
  const u32* pages; // of each block of PAGE_ROWS positions, its page
  u32 sequence; // row of the page table, and of recurrent states
  u32 reserved_of_pages; // no meaning yet
};
static_assert(sizeof(PagedParams) == 200, "the host fills this struct");

enum { PEERS_MAX = 7 }; // no constant of the module, which every kernel would have

// Of a kernel of several devices: M has PEERS, how many others there are, and Launch, what a launch gets. Each device has its own copy of all
// that the host fills.
struct DevicesParams : Params {
  u64 peers[PEERS_MAX]; // from `exchange` of this device to that of each other one, in bytes modulo 2^64
  u64 peer_logits[PEERS_MAX]; // the same of `logits`
};
static_assert(sizeof(DevicesParams) == 296, "the host fills this struct");
// The same over a pool of pages.
struct PagedDevicesParams : PagedParams {
  u64 peers[PEERS_MAX]; // from `exchange` of this device to that of each other one, in bytes modulo 2^64
  u64 peer_logits[PEERS_MAX]; // the same of `logits`
};
static_assert(sizeof(PagedDevicesParams) == 312, "the host fills this struct");

template <class M>
__device__ constexpr int peers_of(decltype(M::PEERS)*) {
  return M::PEERS;
}
template <class M>
__device__ constexpr int peers_of(...) {
  return 0;
}
// Devices that run a step together with this one.
template <class M>
__device__ constexpr int peers() {
  return peers_of<M>(nullptr);
}
// What another device has in place of `at`.
template <class T>
__device__ __forceinline__ T* of_peer(T* at, u64 bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<u64>(at) + bytes);
}

template <class M>
__device__ constexpr bool has_pages(decltype(M::PAGE_ROWS)*) {
  return true;
}
template <class M>
__device__ constexpr bool has_pages(...) {
  return false;
}
template <class M>
__device__ constexpr bool is_paged() {
  return has_pages<M>(nullptr);
}

// Rows of a KV head in the cache.
template <class M>
__device__ __forceinline__ constexpr u64 cache_rows() {
  if constexpr (is_paged<M>())
    return M::POOL_ROWS;
  else
    return M::CONTEXT_MAX;
}
// Where the cache has the row of `position`.
template <class M>
__device__ __forceinline__ u32 cache_row(const Params& p, u32 position) {
  if constexpr (is_paged<M>()) {
    const u32 page = min(__ldg(static_cast<const PagedParams&>(p).pages + position / M::PAGE_ROWS), M::PAGES - 1);
    return page * M::PAGE_ROWS + position % M::PAGE_ROWS;
  } else {
    return position;
  }
}

template <class M>
struct State {
  Watchdog dog;
  u64 full[M::SLOTS];
  u64 empty[M::SLOTS];
  float stat[2][2][M::WARPS]; // [task parity][sum, sum of squares][warp]
  // [of select, of the head][warp]. Two: in `select` a warp without arg-max pairs does not wait, so it may store while the first
  // warp still reads what the head left.
  float best[2][M::WARPS];
  int best_index[2][M::WARPS];
  u32 acquired_tag;          // step whose cache the loader may read: see `hand_over_step`
  volatile u32 stop;         // the loader leaves after the copies it has issued
  int token;
};

__device__ __forceinline__ u8* block_memory() {
  extern __shared__ __align__(1024) u8 smem[];
  return smem;
}
template <class M>
__device__ __forceinline__ State<M>& block_state() {
  return *reinterpret_cast<State<M>*>(block_memory() + M::STATE_AT);
}

// Where a chunk of the stream lies: its slot, and how often the slot was filled before.
template <class M>
struct RingCursor {
  u32 slot, use;
  __device__ __forceinline__ void next() {
    if (++slot == M::SLOTS) {
      slot = 0;
      use++;
    }
  }
};

template <class M>
__device__ constexpr u32 queue_window_of(decltype(M::QUEUE_WINDOW)*) {
  return M::QUEUE_WINDOW;
}
template <class M>
__device__ constexpr u32 queue_window_of(...) {
  return 0;
}
// Entries of its queue that a block has in shared memory at a time; 0: all. Of a long queue two halves: while tasks of one run, the other is filled.
template <class M>
__device__ constexpr u32 queue_window() {
  return queue_window_of<M>(nullptr);
}

// What a thread carries from task to task.
template <class M>
struct Context {
  const Params& p;
  u32 tag, position;
  RingCursor<M> ring; // next chunk to consume
  u32 batch;          // parity of the partial-sum buffer
  u32 task;           // tasks executed since the launch began: parity of `stat`, and place in the window of the queue
  int in_step;        // place of the running task in the queue
  u32 patience;       // polls of a wait before it looks at the clock
  u32 starved_ns;     // traced builds: time that this task waited for chunks

  int thread, warp_index;

  // Called at the start of every task. Reloads tid: otherwise the compiler would compute the addresses of all ops before the
  // loop over tasks, and keep them in registers throughout.
  __device__ __forceinline__ void begin_task() { asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread)); warp_index = int(uniform(u32(thread) / 32)); }
  __device__ __forceinline__ int tid() const { return thread; }
  __device__ __forceinline__ int warp() const { return warp_index; }
  __device__ __forceinline__ int lane() const { return int(u32(thread) % 32); }
  static __device__ __forceinline__ int sm() { return int(blockIdx.x); }
  static __device__ __forceinline__ State<M>& state() { return block_state<M>(); }
  __device__ __forceinline__ u8* stage() const { return block_memory() + M::STAGE_AT; }
  __device__ __forceinline__ float* reduce() const { return reinterpret_cast<float*>(block_memory() + M::REDUCE_AT); }
  // `stage` and `reduce` lie side by side; an op that stages nothing may use both.
  __device__ __forceinline__ float* scratch() const { return reinterpret_cast<float*>(block_memory() + M::STAGE_AT); }
  static __device__ __forceinline__ Entry* queue() { return reinterpret_cast<Entry*>(block_memory() + M::QUEUE_AT); }
  __device__ __forceinline__ float* heads() const { return reinterpret_cast<float*>(block_memory() + M::HEADS_AT); }
  __device__ __forceinline__ float* residual() const { return reinterpret_cast<float*>(block_memory() + M::RESIDUAL_AT); }
  template <class T>
  __device__ __forceinline__ const T* constant(u32 at) const {
    return reinterpret_cast<const T*>(p.pack + u64(at) * OFFSET_BYTES);
  }
  // The entry of the running task.
  __device__ __forceinline__ Entry* entry() const {
    if constexpr (queue_window<M>() > 0) return queue() + task % queue_window<M>();
    else return queue() + in_step;
  }
  __device__ __forceinline__ Waiter waiter() { return Waiter{patience, &block_state<M>().dog, WaitSite{tag, entry()}}; }
  __device__ __forceinline__ bool lost() const { return patience == POLLS_WHEN_LOST; }
  __device__ __forceinline__ void barrier() const { consumer_barrier<M::WARPS * 32>(); }
  // Traced builds: 0 task begins, 1 inputs are there, 2 sums are done, 3 task ends. Costs nothing when off.
  __device__ __forceinline__ void stamp(int k) {
    if constexpr (M::TRACE)
      if (tid() == 0 && in_step < M::STAMPS_MAX) {
        u64* words = p.stamps + ((u64(tag - p.tag) * M::SMS + sm()) * M::STAMPS_MAX + in_step) * STAMP_WORDS;
        words[k] = global_ns();
        if (k == 0) starved_ns = 0;
        if (k == 3) words[4] = starved_ns;
      }
  }
  // Traced builds: around the first warp's wait for a chunk.
  __device__ __forceinline__ u64 begin_starving() const { return M::TRACE && tid() == 0 ? global_ns() : 0; }
  __device__ __forceinline__ void end_starving(u64 begun) {
    if constexpr (M::TRACE)
      if (tid() == 0) starved_ns += u32(global_ns() - begun);
  }
};

// Exchange packets: two bf16 values or one fp32 value each.
template <class M>
struct Wire {
  static constexpr int PER_PACKET = M::WIRE == Elem::BF16 ? 2 : 1;
  static __device__ __forceinline__ float lo(u32 payload) {
    return M::WIRE == Elem::BF16 ? bf16_lo(payload) : __uint_as_float(payload);
  }
  static __device__ __forceinline__ float hi(u32 payload) { return bf16_hi(payload); }
};

// What another device has in place of `at` in the exchange.
template <class M, class T>
__device__ __forceinline__ T* in_exchange_of(const Context<M>& c, int peer, T* at) {
  return of_peer(at, static_cast<const typename M::Launch&>(c.p).peers[peer]);
}

// Stores a packet where every SM polls it: on each device.
template <class M>
__device__ __forceinline__ void send(const Context<M>& c, u64* to, u32 payload) {
  if constexpr (peers<M>() > 0) {
#pragma unroll
    for (int i = 0; i < peers<M>(); i++) publish(in_exchange_of(c, i, to), payload, c.tag);
  }
  publish(to, payload, c.tag);
}

// Hands out a logit, to each device: what chooses among all logits reads them where it runs.
template <class M>
__device__ __forceinline__ void hand_out(const Context<M>& c, u64 at, float logit) {
  if constexpr (peers<M>() > 0) {
#pragma unroll
    for (int i = 0; i < peers<M>(); i++) *of_peer(c.p.logits + at, static_cast<const typename M::Launch&>(c.p).peer_logits[i]) = logit;
  }
  c.p.logits[at] = logit;
}

// Publishes values of columns `col` (even) and `col + 1` of a buffer of COLS columns that starts at packet `base`. Readers
// poll two packets at once, so the last packet of an odd count is followed by one of padding.
template <int COLS, class M>
__device__ __forceinline__ void publish_columns(const Context<M>& c, u32 base, u32 col, float a, float b) {
  if constexpr (M::WIRE == Elem::BF16) {
    constexpr int PACKETS = ceil_div(COLS, 2);
    u64* at = c.p.exchange + (base + col / 2);
    send(c, at, bf16_pair(a, COLS % 2 == 0 || col + 1 < COLS ? b : 0.f));
    if constexpr ((PACKETS & 1) != 0)
      if (col / 2 == PACKETS - 1) send(c, at + 1, 0);
  } else {
    u64* at = c.p.exchange + (base + col);
    send(c, at, __float_as_uint(a));
    send(c, at + 1, COLS % 2 == 0 || col + 1 < COLS ? __float_as_uint(b) : 0u);
  }
}

// The same in fp32, whatever travels elsewhere.
template <int COLS, class M>
__device__ __forceinline__ void publish_scores(const Context<M>& c, u32 base, u32 col, float a, float b) {
  u64* at = c.p.exchange + (base + col);
  send(c, at, __float_as_uint(a));
  send(c, at + 1, COLS % 2 == 0 || col + 1 < COLS ? __float_as_uint(b) : 0u);
}
