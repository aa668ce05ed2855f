// attention on tensor cores, for a bf16 wire and a bf16 or fp8 cache, if RoPE rotates whole heads, nothing, or in halves a part that lanes share
// evenly, and a norm, if any, is over single heads. See attention.cuh for operands, and for all other cases.
//
// One warp brings a head from its packets to shared memory; each lane takes the packets that it rotates together. The current
// position's key and value never travel through the cache: they are one more record of the merge.
//
// Rows of these caches are swizzled: the 16-byte pieces of each 128 bytes change places by `swizzle(position)`. So eight lanes that
// read one piece of eight rows, or four pieces of two rows, use different banks of shared memory.
//
// Codes of fp8 become fp16 operands, which hold them exactly (`Decode<Code::E4M3>`); queries and weights of values are then fp16, too,
// and queries are clamped to its range. A lane reads 16 codes of a key: of every 64 dimensions those from lane % 4 * 16 on. A word of
// values, loaded transposed, has two dimensions of two rows: the even dimensions go to one operand, the odd ones to another.
#pragma once

// The place of a 16-byte piece in its 128 bytes is XORed with this: it differs between eight neighbouring rows, and neighbours use
// different halves of the 128 bytes.
__device__ __forceinline__ constexpr u32 swizzle(u32 position) { return (position & 1) << 2 | (position >> 1 & 3); }
// The same for rows of ROW bytes. Two rows of 64 bytes share 128, and each keeps its half.
template <int ROW>
__device__ __forceinline__ constexpr u32 swizzle_of(u32 position) {
  return ROW == 64 ? position >> 1 & 3 : swizzle(position);
}

template <class M, class G>
struct AttentionTensor {
  static constexpr int QUERIES = G::HEADS_PER_TASK;
  static constexpr int KEY = QUERIES, VALUE = QUERIES + 1; // rows of the block's heads after the queries
  static constexpr bool FP8 = M::CACHE == Elem::FP8;
  static constexpr int ELEM = ElemOf<M::CACHE>::BYTES;
  static constexpr int HEAD_GRANULES = G::DIM / 32;           // granules of a query
  static constexpr int KEY_PARTS = G::DIM * ELEM / 64;        // 64 bytes of a key, 16 a lane
  // Warps that share a tile if heads are large. Each takes a part of the dimensions of V, because sums of 256 dimensions would need
  // all registers; each computes all scores.
  static constexpr int WARPS_PER_HEAD = G::WARPS_PER_HEAD;
  static constexpr int WARP_TEAMS = M::WARPS / WARPS_PER_HEAD;
  static constexpr int VALUE_TILES = G::DIM / WARPS_PER_HEAD / 8;
  static constexpr int ROW = G::PITCH * ELEM; // bytes of a cache row
  typedef CacheScales<M, G> Scales;
  typedef AttentionRecords<M, G, WARP_TEAMS> Records;
  // Whether queries stay in registers and values are loaded before the softmax: the sums must leave room for both.
  static constexpr bool PREFETCH_V = G::PREFETCH_V;
  static constexpr bool HALVES = G::ROTARY > 0 && !G::INTERLEAVED; // a pair is dimension d and d + ROTARY / 2
  static constexpr bool EVENLY = HALVES && (G::ROTARY == 16 || G::ROTARY == 32 || G::ROTARY == 64 || G::ROTARY % 128 == 0);
  // No norm, or an RMS norm of single heads whose gains all heads share.
  static constexpr bool shared(HeadNorm norm) { return norm == HeadNorm::NONE || norm == HeadNorm::HEAD; }
  static constexpr bool CACHED = M::CACHE == Elem::BF16 ||
                                 (FP8 && (G::DIM == 64 ? WARPS_PER_HEAD == 1 : G::DIM % (128 * WARPS_PER_HEAD) == 0));
  static constexpr bool FITS = CACHED && M::WIRE == Elem::BF16 && M::DOT == Dot::MMA && G::DIM % 64 == 0 &&
                               G::DIM <= 256 && M::WARPS % WARPS_PER_HEAD == 0 && (G::ROTARY == 0 || G::ROTARY == G::DIM || EVENLY) &&
                               VALUE_TILES % 8 == 0 && (!HALVES || G::DIM == 64 || G::DIM % 128 == 0) && shared(G::Q_NORM) && shared(G::K_NORM);

  static_assert(FITS == (M::DOT == Dot::MMA && G::SWIZZLED), "who else writes caches, as ir/variant.rs says, has to know");

  // Rows in the shared memory of heads: queries of 16 bits in operand order, then the key and the value as caches have them, but not
  // swizzled.
  static __device__ __forceinline__ u8* row_at(const Context<M>& c, int row) {
    return reinterpret_cast<u8*>(c.heads()) + row * (G::DIM * 2);
  }

  // This lane's part of the queries as an operand: 16 bytes of each granule. Its part of an fp8 key is 16 neighbouring dimensions, so there
  // it has 32 bytes of every second granule.
  struct Queries {
    const u8* at;
    uint4 held[PREFETCH_V ? HEAD_GRANULES : 1];
    __device__ __forceinline__ explicit Queries(const u8* at) : at(at) {
      if constexpr (PREFETCH_V)
#pragma unroll
        for (int k = 0; k < HEAD_GRANULES; k++) held[k] = *reinterpret_cast<const uint4*>(at + (FP8 ? k / 2 * 128 + k % 2 * 16 : k * 64));
    }
    __device__ __forceinline__ uint4 operator()(int k) const {
      return PREFETCH_V ? held[PREFETCH_V ? k : 0] : *reinterpret_cast<const uint4*>(at + (FP8 ? k / 2 * 128 + k % 2 * 16 : k * 64));
    }
  };

  // Adds the products of queries with part `j` of a key, 16 codes for each lane.
  static __device__ __forceinline__ void add_codes(Products& products, const Queries& q, int j, const uint4 codes) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint4 a = q(2 * j + half), b = Decode<Code::E4M3>::eight(codes, half);
      // Pairs 0 and 2 of k come first, see Decode.
      mma<true>(products.low, a, b.x, b.z);
      mma<true>(products.high, a, b.y, b.w);
    }
  }
  // Codes meet queries, and weights, as value * 2^-OPERAND_SHIFT.
  static constexpr float OPERAND_SCALE = float(1 << Decode<Code::E4M3>::OPERAND_SHIFT);
  static __device__ __forceinline__ float score(const Scales& scales, const Products& products, int column) {
    if constexpr (FP8) return scales.score(products.sum(column) * OPERAND_SCALE);
    return scales.score(products.sum(column));
  }

  // Two weights of values as an operand.
  static __device__ __forceinline__ u32 weights(float a, float b) { return FP8 ? f16_pair(a, b) : bf16_pair(a, b); }
  // Loads of values of 16 rows: each brings 16 dimensions in bf16, 32 in fp8.
  static constexpr int VALUE_LOADS = VALUE_TILES * ELEM / 4;
  // Adds weighted codes of load `n` to the sums of their dimensions; `low` and `high` are the rows that are there.
  static __device__ __forceinline__ void add_weighted(float (&o)[VALUE_TILES][2], int n, u32 p0, u32 p2, const uint4 v, u32 low, u32 high) {
#pragma unroll
    for (int piece = 0; piece < 2; piece++) {
      u32 even[2], odd[2];
      // Bytes: two dimensions of a row, then of the next.
      Decode<Code::E4M3>::four(permute(piece ? v.z : v.x, 0, 0x3120), even[0], odd[0]);
      Decode<Code::E4M3>::four(permute(piece ? v.w : v.y, 0, 0x3120), even[1], odd[1]);
      float(&e)[2] = o[4 * n + 2 * piece], (&d)[2] = o[4 * n + 2 * piece + 1];
      mma_rows8_f16(e[0], e[1], p0, p2, even[0] & low, even[1] & high);
      mma_rows8_f16(d[0], d[1], p0, p2, odd[0] & low, odd[1] & high);
    }
  }
  // Stores a warp's sums of fp8 values at `sums`, the place of its dimensions in its record.
  static __device__ __forceinline__ void store_sums(float* sums, int t, const Scales& scales, const float (&o)[VALUE_TILES][2]) {
    const auto sum = [&](float x) { return scales.sum(x * OPERAND_SCALE); };
    // Of every 16 dimensions the first tile has the even ones, the second the odd ones.
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n += 2) {
      *reinterpret_cast<float2*>(sums + n * 8 + t * 4) = make_float2(sum(o[n][0]), sum(o[n + 1][0]));
      *reinterpret_cast<float2*>(sums + n * 8 + t * 4 + 2) = make_float2(sum(o[n][1]), sum(o[n + 1][1]));
    }
  }

  // Walks a warp's tiles of 16 rows through pairs of chunks, K and V. Teams take tiles in turn; the last team begins, because the
  // first warps fetch heads.
  struct Walk {
    static constexpr int TILES = G::CHUNK_ROWS / 16; // of a whole pair
    int left; // rows of the share from the current pair on
    int tile; // the next one of this warp, counted from the current pair
    u32 key_at, value_at; // where this lane reads in a tile, for the first granule
    const u8 *keys, *values;

    __device__ __forceinline__ Walk(const Context<M>& c, u32 start, u32 end)
        : left(int(end - start)), tile(WARP_TEAMS - 1 - c.warp() / WARPS_PER_HEAD), keys(nullptr), values(nullptr) {
      // A lane reads piece lane % 4 of row lane / 4 of keys, and piece lane / 16 of row lane % 16 of values.
      key_at = c.lane() / 4 * ROW + (c.lane() % 4 ^ swizzle_of<ROW>(start + c.lane() / 4)) * 16;
      value_at = c.lane() % 16 * ROW + (c.lane() / 16 ^ swizzle_of<ROW>(start + c.lane() % 16)) * 16;
    }
    __device__ __forceinline__ bool partial() const { return tile * 16 + 16 > left; }
    __device__ __forceinline__ uint4 key(int n, int j) const {
      return *reinterpret_cast<const uint4*>(keys + (tile * 16 + n * 8) * ROW + j / 2 * 128 + (key_at ^ j % 2 * 64));
    }
    // Transposed 8 x 8 blocks of V, elements of 16 bits, from this warp's part of the dimensions: the first and the second 8 rows at byte
    // n * 32, then both at byte n * 32 + 16.
    __device__ __forceinline__ uint4 value(const Context<M>& c, int n) const {
      uint4 b;
      const u8* from = values + tile * 16 * ROW + c.warp() % WARPS_PER_HEAD * (VALUE_TILES * 8 * ELEM);
      load_transposed(smem_address(from) + n / 4 * 128 + (value_at ^ n % 4 * 32), b);
      return b;
    }
    // Waits for the current pair, if there is one.
    __device__ __forceinline__ void take(Context<M>& c) {
      if (left <= 0) return;
      RingCursor<M> at = c.ring;
      at.next();
      ring_take_pair(c, c.ring, at, keys, values);
    }
    // Goes on to the pair that has `tile`. False: the share has no such tile.
    __device__ __forceinline__ bool find(Context<M>& c) {
      while (left > 0) {
        if (tile < TILES && tile * 16 < left) return true;
        const RingCursor<M> at = c.ring;
        c.ring.next();
        ring_release_pair(c, at, c.ring);
        c.ring.next();
        left -= G::CHUNK_ROWS;
        tile -= TILES;
        take(c);
      }
      return false;
    }
  };

  static __device__ __forceinline__ void load_transposed(u32 address, uint4& b) {
#ifndef __CUDA_ARCH__
    emulated_load_transposed(address, b); // tests of ops on a CPU
#elif __CUDA_ARCH__ >= 750
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
                 : "r"(address)
                 : "memory");
#endif
  }

  // What a lane needs of a head besides its packets; loaded before they arrive. Packet n of a lane is packet n * 32 + lane of
  // the head. If halves are rotated, the first TURNED packets are, and a packet's partner is TURNED / 2 packets on: in the same lane, or in
  // lane ^ TURNED / 2.
  static constexpr int PACKETS = G::DIM / 2, N = PACKETS / 32, TURNED = HALVES ? G::ROTARY / 2 : 2;
  static constexpr int ANGLES = !HALVES ? N : TURNED <= 32 ? 1 : TURNED / 64;
  struct Constants {
    float2 cosine[ANGLES], sine[ANGLES], weight[N];
  };
  // Rows of the block's heads: queries, then the key, then the value.
  static __device__ __forceinline__ HeadNorm norm_of(int row) {
    return row < QUERIES ? G::Q_NORM : (row == KEY ? G::K_NORM : HeadNorm::NONE);
  }
  static __device__ __forceinline__ void load(const Context<M>& c, const Entry& e, int row, Constants& k) {
    if constexpr (G::ROTARY > 0) {
      const float* angle = c.template constant<float>(e.rope) + u64(c.position) * G::ROTARY;
#pragma unroll
      for (int n = 0; n < ANGLES; n++) {
        const int p = n * 32 + c.lane();
        const int at = G::INTERLEAVED ? p : p % (TURNED / 2) * 2;
        if constexpr (G::INTERLEAVED) {
          k.cosine[n].x = __ldg(angle + at);
          k.sine[n].x = __ldg(angle + G::ROTARY / 2 + at);
        } else {
          k.cosine[n] = __ldg(reinterpret_cast<const float2*>(angle + at));
          k.sine[n] = __ldg(reinterpret_cast<const float2*>(angle + G::ROTARY / 2 + at));
        }
      }
    }
    if constexpr (G::Q_NORM != HeadNorm::NONE || G::K_NORM != HeadNorm::NONE) {
      const float* weight = c.template constant<float>(norm_of(row) == HeadNorm::NONE ? 0 : (row == KEY ? e.k_norm : e.q_norm));
#pragma unroll
      for (int n = 0; n < N; n++) k.weight[n] = __ldg(reinterpret_cast<const float2*>(weight) + n * 32 + c.lane());
    }
  }

  template <class X>
  static __device__ __forceinline__ void norm(const Constants& k, int row, X& x) {
    if (norm_of(row) == HeadNorm::HEAD) {
      float squares = 0.f;
#pragma unroll
      for (int n = 0; n < N; n++) squares += x[n].x * x[n].x + x[n].y * x[n].y;
      const float factor = rsqrtf(warp_sum(squares) * (1.f / G::DIM) + (row == KEY ? G::K_EPS : G::Q_EPS));
#pragma unroll
      for (int n = 0; n < N; n++) x[n] = make_float2(x[n].x * factor * k.weight[n].x, x[n].y * factor * k.weight[n].y);
    }
  }
  // One warp brings a head from its packets to shared memory: norm, RoPE, rounding.
  static __device__ __forceinline__ void head(Context<M>& c, const Entry& e, const Scales& scales, int i, int row) {
    Constants k;
    load(c, e, row, k);
    const u32 kv = u32(i) * QUERIES / G::GROUP;
    const u32 head = row < QUERIES ? i * QUERIES + row : G::HEADS + (row == VALUE ? G::HEADS / G::GROUP : 0) + kv;
    const u64* packets = c.p.exchange + (e.x + head * PACKETS + c.lane());
    const u64* from[N];
    bool active[N];
#pragma unroll
    for (int n = 0; n < N; n++) from[n] = packets + n * 32, active[n] = true;
    u32 word[N];
    await_packets<N>(from, active, c.tag, word, c.waiter());
    float2 x[N];
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = make_float2(bf16_lo(word[n]), bf16_hi(word[n]));
    if constexpr (!NORM_AFTER_ROPE_OF<G>) norm(k, row, x);
    if (G::ROTARY > 0 && row != VALUE) {
      if constexpr (G::INTERLEAVED) {
#pragma unroll
        for (int n = 0; n < N; n++) rotate(x[n].x, x[n].y, k.cosine[n].x, k.sine[n].x);
      } else if constexpr (TURNED <= 32) {
        const float2 other = make_float2(__shfl_xor_sync(~0u, x[0].x, TURNED / 2), __shfl_xor_sync(~0u, x[0].y, TURNED / 2));
        const float sign = c.lane() < TURNED / 2 ? -1.f : 1.f;
        if (TURNED == 32 || c.lane() < TURNED) {
          x[0].x = x[0].x * k.cosine[0].x + sign * other.x * k.sine[0].x;
          x[0].y = x[0].y * k.cosine[0].y + sign * other.y * k.sine[0].y;
        }
      } else {
#pragma unroll
        for (int n = 0; n < ANGLES; n++) {
          rotate(x[n].x, x[n + ANGLES].x, k.cosine[n].x, k.sine[n].x);
          rotate(x[n].y, x[n + ANGLES].y, k.cosine[n].y, k.sine[n].y);
        }
      }
    }
    if constexpr (NORM_AFTER_ROPE_OF<G>) norm(k, row, x);
    if constexpr (QUERY_SCALE_OF<G>) {
      const float factor = row < QUERIES ? query_factor<G>(c.position) : 1.f;
#pragma unroll
      for (int n = 0; n < N; n++) x[n] = make_float2(x[n].x * factor, x[n].y * factor);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      const u32 d = (n * 32 + c.lane()) * 2;
      if constexpr (FP8) {
        if (row < QUERIES)
          *reinterpret_cast<u32*>(row_at(c, row) + operand_byte(d)) = f16_pair(in_f16(x[n].x), in_f16(x[n].y));
        else
          *reinterpret_cast<u16*>(row_at(c, row) + d) = u16(e4m3_pair(scales.units(row == KEY, x[n].x), scales.units(row == KEY, x[n].y)));
      } else {
        *reinterpret_cast<u32*>(row_at(c, row) + (row < QUERIES ? operand_byte(d) : d * 2)) = bf16_pair(x[n].x, x[n].y);
      }
    }
  }
  // Clamps a query to the range of fp16, because an infinite one would make its score a NaN. Queries of models stay far below.
  static __device__ __forceinline__ float in_f16(float x) { return fminf(fmaxf(x, -65504.f), 65504.f); }
  static __device__ __forceinline__ void rotate(float& lo, float& hi, float cosine, float sine) {
    const float x = lo;
    lo = x * cosine - hi * sine;
    hi = hi * cosine + x * sine;
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const int i = int(uniform(e.lo)), j = int(uniform(e.j));
    const bool last = j == G::SPLITS - 1;
    const int g = c.lane() / 4, t = c.lane() % 4;
    const Scales scales(c, e, u32(i) * QUERIES / G::GROUP);
    u32 start, end;
    history_share(c.position, G::WINDOW, G::SPLITS, j, start, end);
    // The page is looked up early: at the end of the task all warps would wait for it.
    u32 paged = 0;
    if constexpr (is_paged<M>()) paged = cache_row<M>(c.p, c.position);
    Walk walk(c, start, end);
    // Only the first pair: slots for later ones may be freed only after warps have passed this point.
    walk.take(c);
#pragma unroll 1
    for (int row = c.warp(); row < QUERIES + (last ? 2 : 0); row += M::WARPS) {
      head(c, e, scales, i, row);
      if (QUERIES + 2 <= M::WARPS) break;
    }
    c.barrier();
    c.stamp(1);
    const Queries q(row_at(c, g < QUERIES ? g : 0) + t * (FP8 ? 32 : 16)); // rows of the product beyond QUERIES are never read

    float m = NEGATIVE_INFINITY, l = 0.f, o[VALUE_TILES][2];
#pragma unroll
    for (int n = 0; n < VALUE_TILES; n++) o[n][0] = o[n][1] = 0.f;
#pragma unroll 1
    for (; walk.find(c); walk.tile += WARP_TEAMS) {
      Products products[2] = {};
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int k = 0; k < KEY_PARTS; k++) {
          if constexpr (FP8) add_codes(products[n], q, k, walk.key(n, k));
          else products[n].add(q(k), walk.key(n, k));
        }
      }
      uint4 ahead[PREFETCH_V ? VALUE_LOADS : 1];
      if constexpr (PREFETCH_V)
#pragma unroll
        for (int n = 0; n < VALUE_LOADS; n++) ahead[n] = walk.value(c, n);
      const int row = walk.tile * 16 + t * 2;
      float s[2][2], top = m;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float scored = score(scales, products[n], k);
          s[n][k] = row + n * 8 + k < walk.left ? scored : NEGATIVE_INFINITY;
          top = fmaxf(top, s[n][k]);
        }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float shrink = exp_fast(m - top);
      m = top;
      l *= shrink;
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
          s[n][k] = exp_fast(s[n][k] - top);
          l += s[n][k];
        }
      const u32 p0 = weights(s[0][0], s[0][1]), p2 = weights(s[1][0], s[1][1]);
      // Bytes past the last row are whatever the slot held before; 0 * NaN would spread.
      u32 low = ~0u, high = ~0u;
      if (walk.partial()) {
        low = (row < walk.left ? 0xffffu : 0u) | (row + 1 < walk.left ? 0xffff0000u : 0u);
        high = (row + 8 < walk.left ? 0xffffu : 0u) | (row + 9 < walk.left ? 0xffff0000u : 0u);
      }
#pragma unroll
      for (int n = 0; n < VALUE_TILES; n++) {
        o[n][0] *= shrink;
        o[n][1] *= shrink;
      }
#pragma unroll
      for (int n = 0; n < VALUE_LOADS; n++) {
        const uint4 v = PREFETCH_V ? ahead[PREFETCH_V ? n : 0] : walk.value(c, n);
        if constexpr (FP8) {
          add_weighted(o, n, p0, p2, v, low, high);
        } else {
          mma_rows8(o[2 * n][0], o[2 * n][1], p0, p2, v.x & low, v.y & high);
          mma_rows8(o[2 * n + 1][0], o[2 * n + 1][1], p0, p2, v.z & low, v.w & high);
        }
      }
    }
    if (last && c.warp() == 0) current(c, scales, q);
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    if (g < QUERIES) {
      float* record = Records::of(c, c.warp() / WARPS_PER_HEAD, g);
      if (t == 0) *reinterpret_cast<float2*>(record) = make_float2(m, l);
      if constexpr (FP8) {
        store_sums(record + Records::HEADER + c.warp() % WARPS_PER_HEAD * (VALUE_TILES * 8), t, scales, o);
      } else {
#pragma unroll
        for (int n = 0; n < VALUE_TILES; n++)
          *reinterpret_cast<float2*>(record + Records::HEADER + (c.warp() % WARPS_PER_HEAD * VALUE_TILES + n) * 8 + t * 2) = make_float2(o[n][0], o[n][1]);
      }
    }
    c.barrier();
    c.stamp(2);
    Records::finish(c, e, e.x, i, j, last, [&](int d) {
      if constexpr (FP8) {
        const e4m3* value = reinterpret_cast<const e4m3*>(row_at(c, VALUE) + d);
        return make_float2(scales.sum(widen(value[0])), scales.sum(widen(value[1])));
      } else {
        const u32 pair = *reinterpret_cast<const u32*>(row_at(c, VALUE) + d * 2);
        return make_float2(bf16_lo(pair), bf16_hi(pair));
      }
    });
    // After publishing: no SM reads the row in this step. The end of the step releases it.
    if (last && i % (G::GROUP / QUERIES) == 0 && c.warp() == M::WARPS - 1) {
      constexpr int PIECES = G::DIM * ELEM / 16; // of 16 bytes
#pragma unroll
      for (int n = 0; n < 2 * PIECES; n += 32) {
        const int at = n + c.lane();
        if (at < 2 * PIECES) {
          u8* row = c.p.cache + u64(at < PIECES ? e.k_cache : e.v_cache) * OFFSET_BYTES +
                    (u64(u32(i) * QUERIES / G::GROUP) * cache_rows<M>() + (is_paged<M>() ? paged : c.position)) * ROW;
          const u8* from = FP8 ? row_at(c, at < PIECES ? KEY : VALUE) + at % PIECES * 16 : row_at(c, KEY) + at * 16;
          *reinterpret_cast<uint4*>(row + (at % PIECES ^ swizzle_of<ROW>(c.position)) * 16) = *reinterpret_cast<const uint4*>(from);
        }
      }
    }
    c.barrier(); // the next task may stage where the records are, or load other angles
  }

  // Stores the current position's scores after the records of all teams.
  static __device__ __forceinline__ void current(const Context<M>& c, const Scales& scales, const Queries& q) {
    const int g = c.lane() / 4, t = c.lane() % 4;
    Products product = {};
#pragma unroll
    for (int k = 0; k < KEY_PARTS; k++) {
      if constexpr (FP8) add_codes(product, q, k, *reinterpret_cast<const uint4*>(row_at(c, KEY) + k * 64 + t * 16));
      else product.add(q(k), *reinterpret_cast<const uint4*>(row_at(c, KEY) + k * 64 + t * 16));
    }
    if (t == 0 && g < QUERIES) Records::of(c, WARP_TEAMS, g)[0] = score(scales, product, 0);
  }
};
