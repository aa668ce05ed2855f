// Owns attention of prompt chunks by warpgroups, for heads of 64 or 128 dimensions: softmax(scale * q K^T) V.
//
// Operands and shares are those of `WaveAttend` (waves/attention.cuh): a warp has 16 rows of a head. Four warps multiply together, all by the same keys and values of TILE positions,
// which the tensor cores read from shared memory; queries, and weights of values, are in registers. Keys and values have slots of their own in the ring of inputs. While values are
// multiplied by the weights of one tile, a warp computes the weights of the next one (FlashAttention-3, arXiv 2407.08608, section 3.2).
//
// A tile arrives by a tensor map (`CacheBox` of src/codegen/waves.rs) in halves of 64 dimensions: lines of 128 bytes, eight positions one after another, of these first
// the even ones. So position r of eight is line `swizzle(r)`, and because the cache has piece p of 16 bytes at p ^ swizzle(r), pieces lie where the instruction has them
// with the swizzle of 128 bytes. Columns of scores are lines, and so are those of their weights: the order of positions within eight matters to masks alone.
#pragma once

// Lines of a tile as the right operand of products.
struct TileOperand {
  static constexpr u32 POSITIONS = 64, LINE_BYTES = 128, HALF_BYTES = POSITIONS * LINE_BYTES, EIGHT_BYTES = 8 * LINE_BYTES;
  static __device__ __forceinline__ u64 at(const u8* from, u32 leading) {
#ifndef __CUDA_ARCH__
    return u64(from - smem); // tests of ops on a CPU
#else
    return u64(EIGHT_BYTES >> 4 | 1u << 30) << 32 | uniform(leading >> 4 << 16 | (smem_address(from) & 0x3ffff) >> 4);
#endif
  }
  // `bytes` further on. The upper word is a constant, so few instructions make a descriptor, and the products of a tile follow each other faster.
  static __device__ __forceinline__ u64 next(u64 at, u32 bytes) {
#ifndef __CUDA_ARCH__
    return at + bytes;
#else
    return at >> 32 << 32 | (u32(at) + (bytes >> 4));
#endif
  }
  // What the swizzle of 128 bytes makes of a place in shared memory.
  static __device__ __forceinline__ u64 place(u64 at) { return at ^ (at >> 7 & 7) << 4; }
};
// Keys: columns are lines, k is along them.
struct KeyOperand : TileOperand {
  static constexpr bool TRANSPOSED = false;
  // 16 dimensions from `dim` on.
  static __device__ __forceinline__ u64 of(u64 first, u32 dim) { return next(first, dim / 64 * HALF_BYTES + dim % 64 * 2); }
  // Where the instruction has an element, from `of(..)` on, before the swizzle.
  static __device__ __forceinline__ u32 element(u32 k, u32 column) { return column * LINE_BYTES + k * 2; }
};
// Values: k is lines, columns are along them.
struct ValueOperand : TileOperand {
  static constexpr bool TRANSPOSED = true;
  // All dimensions of 16 lines from `line` on.
  static __device__ __forceinline__ u64 of(u64 first, u32 line) { return next(first, line * LINE_BYTES); }
  static __device__ __forceinline__ u32 element(u32 k, u32 column) { return column / 64 * HALF_BYTES + k * LINE_BYTES + column % 64 * 2; }
};

template <class M, class G>
struct WaveAttendWide {
  typedef WaveHeads<M, G> H;
  static constexpr int QUERIES = G::HEADS_PER_TASK, ROW_TILES = M::WARPS / QUERIES, DIM = G::DIM, TILE = G::TILE, EIGHTS = TILE / 8;
  static constexpr u32 TILE_BYTES = TILE * DIM * 2;
  static_assert(TILE == int(TileOperand::POSITIONS) && (DIM == 64 || DIM == 128) && G::SWIZZLED && H::ROW == DIM * 2, "lines of tiles");
  static_assert(TILE_BYTES <= u32(M::INPUT_BYTES) && M::PAGE_ROWS % TILE == 0 && M::INPUT_AT % 1024 == 0 && M::INPUT_BYTES % 1024 == 0, "a slot holds a tile");
  static_assert(G::SCALE > 0.f, "the largest score is that of the largest product");
  // A weight is 2^(FACTOR * (score - largest score)). Scores are products as they are, unless they are capped.
  static constexpr float UNIT = G::SOFTCAP > 0.f ? 1.f : G::SCALE, FACTOR = UNIT * 1.4426950408889634f, GROWTH = 8.f / FACTOR;

  // ---- the loader ----------------------------------------------------------------------------------------------------
  // Keys of a tile, then values of the one before: the order in which they are multiplied.
  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e) {
    if constexpr (R::FIRST == 0) {
      if (l.lane == 0) l.see_box(e.boxes), l.see_box(e.boxes + 1);
      const Shares<M> shares(l.p, e.division);
      for (u32 s = 0; s < shares.count; s++) {
        const Share share = shares[s];
        if (share.row >= l.p.row_count) continue;
        const u32 kv = share.lo * QUERIES / G::GROUP, end = H::end_of(l.p, share);
        u32 before = 0;
        for (u32 at = H::begin_of(l.p, share), n = 0; at < end; at += TILE, n++) {
          const u32 row = kv * u32(M::POOL_ROWS / 8) + H::pool_row(l.p, 0, at) / 8;
          load_tile(l, e.boxes, row);
          if (n > 0) load_tile(l, e.boxes + 1, before);
          before = row;
        }
        load_tile(l, e.boxes + 1, before);
      }
    }
  }
  template <class L>
  static __device__ __forceinline__ void load_tile(L& l, u32 box, u32 eight) {
    u8* slot = l.free_slot();
    l.meet();
    if (l.lane == 0) l.copy_tile(slot, box, eight, TILE_BYTES);
    l.arrive(TILE_BYTES);
    l.at.next();
  }

  // ---- consumers -----------------------------------------------------------------------------------------------------
  // The rows of a warp, of which a lane has `first` + lane / 4 and the one eight further on: positions.
  struct Rows {
    int first;
    // Row h of a lane sees positions lo(h) to hi(h) - 1.
    __device__ __forceinline__ int hi(int lane, int h) const { return first + lane / 4 + 8 * h + 1; }
    __device__ __forceinline__ int lo(int lane, int h) const { return int(H::seen_from(u32(hi(lane, h) - 1))); }
    // Whether a row does not see some position of the tile at `at`.
    __device__ __forceinline__ bool are_masked(int at) const { return at + TILE > first + 1 || (G::WINDOW && at < int(H::seen_from(u32(first + 15)))); }
  };
  struct Running {
    float m[2], l[2], o[DIM / 2];
  };
  typedef float Scores[TILE / 2];
  typedef u32 Weights[TILE / 16][4];

  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row < c.p.row_count) one(c, e, share);
    }
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, const Share& share) {
    const int lane = c.lane(), g = lane / 4, t = lane % 4, head = int(share.lo) * QUERIES + c.warp() % QUERIES;
    // Warps beyond the last whole group of heads multiply row 0, and store nothing.
    const int row0 = int(share.row) + c.warp() / QUERIES * 16, end_row = c.warp() < QUERIES * ROW_TILES ? int(min(share.row + share.rows, c.p.row_count)) : 0;
    const bool live = row0 < end_row;
    u32 q[DIM / 16][4];
    const u8* query = c.template work<u8>(e.x) + (u64(live ? row0 + g : 0) * H::QUERY_COLS + (live ? head : 0) * DIM + t * 2) * 2;
#pragma unroll
    for (int i = 0; i < DIM / 16; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) q[i][k] = *reinterpret_cast<const u32*>(query + k % 2 * 8 * (H::QUERY_COLS * 2) + (i * 16 + k / 2 * 8) * 2);
    Running r;
#pragma unroll
    for (int h = 0; h < 2; h++) r.m[h] = NEGATIVE_INFINITY, r.l[h] = 0.f;
    if constexpr (SINKS_OF<G>) {
      // A score without a value. Four lanes add up what they have of a row's sum.
      const float sink = live ? H::sink(c, e, head) : 0.f;
#pragma unroll
      for (int h = 0; h < 2; h++) r.m[h] = sink / UNIT, r.l[h] = t == 0 ? 1.f : 0.f;
    }
#pragma unroll
    for (int i = 0; i < DIM / 2; i++) r.o[i] = 0.f;
    const Rows rows{int(c.p.position) + row0};
    const int begin = int(H::begin_of(c.p, share)), end = int(H::end_of(c.p, share));
    Scores s;
    Weights p;
    float shrink[2];
    RingCursor<InputRing<M>> at = c.inputs; // next tile to take
    const auto take = [&] {
      const u8* slot = wave_take(c, at);
      at.next();
      return slot;
    };
    const u8* keys = take();
    warpgroup_begin();
    score(keys, q, s);
    warpgroup_await<0>();
    warpgroup_done(s);
    wave_release(c, c.inputs);
    weigh(rows, lane, begin, s, r, shrink);
    settle(s, p);
    int now = begin;
#pragma unroll 1
    for (; now + TILE < end; now += TILE) {
      keys = take();
      const u8* const values = take();
      warpgroup_begin();
      score(keys, q, s);
      add(values, p, r.o);
      warpgroup_await<1>();
      warpgroup_done(s);
      wave_release(c, c.inputs);
      weigh(rows, lane, now + TILE, s, r, shrink);
      // Both ways wait. ptxas moves a wait to the beginning of its block, and weights would be computed after it: so it begins a block of its own.
      if (__any_sync(~0u, shrink[0] < 1.f || shrink[1] < 1.f)) {
        warpgroup_await<0>();
        warpgroup_done(r.o);
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) r.o[i] *= shrink[i / 2 % 2];
      } else {
        warpgroup_await<0>();
        warpgroup_done(r.o);
      }
      wave_release(c, c.inputs);
      settle(s, p);
    }
    u8* values = const_cast<u8*>(take());
    clear(c, values, int(c.p.position + c.p.row_count) - now);
    warpgroup_begin();
    add(values, p, r.o);
    warpgroup_await<0>();
    warpgroup_done(r.o);
    wave_release(c, c.inputs);
    if (live) H::leave(c, e, row0, end_row, head, r.l, [&](int n, int h) { return make_float2(r.o[4 * n + 2 * h], r.o[4 * n + 2 * h + 1]); });
  }
  // Begins s = q K^T.
  static __device__ __forceinline__ void score(const u8* keys, const u32 (&q)[DIM / 16][4], Scores& s) {
    const u64 first = KeyOperand::at(keys, 16);
    warpgroup_product<TILE, true, KeyOperand>(s, q[0][0], q[0][1], q[0][2], q[0][3], first);
#pragma unroll
    for (int i = 1; i < DIM / 16; i++) warpgroup_product<TILE, false, KeyOperand>(s, q[i][0], q[i][1], q[i][2], q[i][3], KeyOperand::of(first, i * 16));
    warpgroup_commit();
  }
  // Begins o += p V.
  static __device__ __forceinline__ void add(const u8* values, const Weights& p, float (&o)[DIM / 2]) {
    const u64 first = ValueOperand::at(values, ValueOperand::HALF_BYTES);
#pragma unroll
    for (int i = 0; i < TILE / 16; i++) warpgroup_product<DIM, false, ValueOperand>(o, p[i][0], p[i][1], p[i][2], p[i][3], ValueOperand::of(first, i * 16));
    warpgroup_commit();
  }
  // Makes weights of the scores of the tile at `at`, and says what earlier sums are multiplied by.
  static __device__ __forceinline__ void weigh(const Rows& rows, int lane, int at, Scores& s, Running& r, float (&shrink)[2]) {
    const int t = lane % 4;
    if constexpr (G::SOFTCAP > 0.f) {
#pragma unroll
      for (int i = 0; i < TILE / 2; i++) s[i] = softcap(s[i] * G::SCALE, G::SOFTCAP);
    }
    if (rows.are_masked(at)) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        // From the first position of a lane on: columns 2 t and 2 t + 1 are every second position of eight.
        const int from = at + t % 2 * 4 + t / 2, lo = rows.lo(lane, h) - from, hi = rows.hi(lane, h) - from;
#pragma unroll
        for (int n = 0; n < EIGHTS; n++)
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const int position = n * 8 + k * 2;
            if (position < lo || position >= hi) s[4 * n + 2 * h + k] = NEGATIVE_INFINITY;
          }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = r.m[h];
#pragma unroll
      for (int n = 0; n < EIGHTS; n++) top = fmaxf(top, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // Where scores grow by little, weights stay relative to an older maximum, and are up to 2^8: so earlier sums seldom shrink.
      const float now = top > r.m[h] + GROWTH ? top : r.m[h];
      // A tile in which a row sees no position changes nothing.
      const float shift = now > NEGATIVE_INFINITY ? now * FACTOR : 0.f;
      shrink[h] = now > r.m[h] ? exp2_fast((r.m[h] - now) * FACTOR) : 1.f;
      r.m[h] = now;
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < EIGHTS; n++) {
        float &x = s[4 * n + 2 * h], &y = s[4 * n + 2 * h + 1];
        x = exp2_fast(fmaf(x, FACTOR, -shift)), y = exp2_fast(fmaf(y, FACTOR, -shift));
        sum += x + y;
      }
      r.l[h] = r.l[h] * shrink[h] + sum;
    }
  }
  // Weights as operands. No product runs meanwhile: else ptxas would let all products of the kernel wait for one another.
  static __device__ __forceinline__ void settle(const Scores& s, Weights& p) {
#pragma unroll
    for (int i = 0; i < TILE / 16; i++)
#pragma unroll
      for (int k = 0; k < 4; k++) p[i][k] = bf16_pair(s[8 * i + k / 2 * 4 + k % 2 * 2], s[8 * i + k / 2 * 4 + k % 2 * 2 + 1]);
  }
  // Values of positions that do not exist yet are what the cache had there: their weights are 0, but a NaN among them would survive that.
  static __device__ __forceinline__ void clear(WaveContext<M>& c, u8* values, int there) {
    if (there >= TILE) return;
    constexpr int PIECES = DIM / 8;
    for (int i = c.tid(); i < (TILE - there) * PIECES; i += M::WARPS * 32) {
      const u32 position = u32(there + i / PIECES), piece = u32(i % PIECES), line = position / 8 * 8 + swizzle(position);
      *reinterpret_cast<uint4*>(values + piece / 8 * TileOperand::HALF_BYTES + line * TileOperand::LINE_BYTES + piece % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
    fence_empty_slot();
    c.barrier();
  }
};
