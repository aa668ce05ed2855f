// Owns mixtures of experts in waves: scores, the choice, the rows of each expert side by side, products with them, and the sum over slots.
//
// Rows that chose one expert are multiplied together, so each weight is read once for up to TILE of them. A *place* is where a slot of a row lies
// in the order of experts: expert by expert, within one by row and slot. The places of an expert begin with a whole *tile* of TILE places. A tile has
// rows of one expert alone; places after its last row are not used. Every block counts the choices itself, so all blocks find the same places.
// Counts do not depend on the order in which they are counted, and no block adds to what another one adds to: so the bits of a row depend on no other row.
//
// Only generated kernels with experts include this. Words of a `Wave` that have other names here:
//   residual     choices (rows, TOP_K)       ids below EXPERTS; the wave that chooses has them in `out`
//   branch       groups (1 + tiles) of 16 bytes: the number of tiles, how many tickets blocks have drawn for the first product and for the second, and how many times eight places
//                the fullest tile has; then for each tile its expert, the first tile of that expert, its tiles, and its slots
//   squares      places (rows, TOP_K)
//   squares_out  shares (rows, TOP_K)        fp32
#pragma once

__device__ __forceinline__ u32 choices_of(const Wave& e) { return e.residual; }
__device__ __forceinline__ u32 groups_of(const Wave& e) { return e.branch; }
__device__ __forceinline__ u32 places_of(const Wave& e) { return e.squares; }
__device__ __forceinline__ u32 shares_of(const Wave& e) { return e.squares_out; }

// The groups of a wave, the record of a tile, and how many tickets are drawn for its product.
__device__ __forceinline__ const uint4* groups_from(const WaveParams& p, const Wave& e) { return reinterpret_cast<const uint4*>(p.work + u64(groups_of(e)) * OFFSET_BYTES); }
__device__ __forceinline__ uint4 group_of(const uint4* groups, u32 tile) {
  const uint4 v = groups[1 + tile];
  return make_uint4(uniform(v.x), uniform(v.y), uniform(v.z), uniform(v.w));
}
template <class G>
__device__ __forceinline__ u32* drawn_from(const WaveParams& p, const Wave& e) {
  return reinterpret_cast<u32*>(p.work + u64(groups_of(e)) * OFFSET_BYTES) + (G::EPILOGUE == Epilogue::STORE ? 2 : 1);
}
// Of an item, a tile and units of its expert; `unit` is counted over all experts, `own` over those of this one. No units: there is no further item.
struct ExpertItem {
  u32 tile = 0, unit = 0, own = 0, units = 0, rows = 0;
  ExpertItem() = default;
  static __device__ __forceinline__ ExpertItem of(const WaveTurn& turn) {
    ExpertItem item;
    item.tile = turn.words[0], item.unit = turn.words[1], item.own = turn.words[2] >> 16, item.units = turn.words[2] >> 9 & 0x7f, item.rows = turn.words[2] & 0x1ff;
    return item;
  }
  __device__ __forceinline__ WaveTurn turn() const { return WaveTurn{{tile, unit, own << 16 | units << 9 | rows}, 0}; }
};
// What an expert makes of two columns of its gate and of `up`.
template <class G>
__device__ __forceinline__ float2 gated_by_expert(float2 gate, float2 up) {
  if constexpr (G::EPILOGUE == Epilogue::CLAMPED)
    return make_float2(clamped<G>(gate.x, up.x), clamped<G>(gate.y, up.y));
  else
    return make_float2(activate<G::ACT>(gate.x) * up.x, activate<G::ACT>(gate.y) * up.y);
}

// scores: y = x W^T + bias in fp32, of 16 rows by COLUMNS columns at once in a step, which has few rows, and of 64 in a chunk.
//
// x (rows, K)       bf16, in the layout of operands
// W                 units as in ops/matvec.cuh, read from L2: a router is small
// out (rows, ROWS)  fp32
//
// owner    of these rows and columns: one block. The warps of 16 rows take granules in turn, and add up their sums in their order
template <class M, class G>
struct WaveScores {
  static constexpr int K_PARTS = OPERAND_ROWS / G::UNIT_ROWS, GRANULE_K = K_PARTS * 32, GRANULES = ceil_div(G::K, GRANULE_K);
  static constexpr int UNITS = ceil_div(G::ROWS, G::UNIT_ROWS), COLUMNS = G::COLUMNS, AT_ONCE = COLUMNS / G::UNIT_ROWS;
  static constexpr int ROW_TILES = M::STEPS ? 1 : 4, K_WARPS = M::WARPS / ROW_TILES;
  // Granules of a warp that are on their way at once.
  static constexpr int AHEAD = M::STEPS ? (AT_ONCE < 4 ? 8 / AT_ONCE : 2) : 4;
  static constexpr u32 UNIT_BYTES = GRANULES * GRANULE_BYTES;
  typedef WaveOperand<M, G::K> X;
  static_assert(M::WARPS * 16 * COLUMNS * sizeof(float) <= M::SCRATCH_BYTES, "the sums of all warps meet");

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= c.p.row_count) continue;
      if (s > 0) c.barrier(); // slow warps still add up there
      one(c, e, share.row, int(share.lo) * AT_ONCE);
    }
  }
  // Eight columns of a row, and of the one eight further on, from 8 * (lane % 4) of a span on: the words of an operand.
  static __device__ __forceinline__ void operands(const u8* x, u32 row, u32 col, uint4& a, uint4& b) {
    const auto piece = [&](u32 row, u32 col) { return *reinterpret_cast<const uint4*>(x + X::at(row, col)); };
    if constexpr (M::SHARED) {
      a = piece(row, col), b = piece(row + 8, col);
    } else if constexpr (!M::WARPGROUPS) {
      const uint4 low = piece(row, col), high = piece(row, col + 4); // pairs of columns of both rows
      a = make_uint4(low.x, low.z, high.x, high.z), b = make_uint4(low.y, low.w, high.y, high.w);
    } else {
      const auto word = [&](u32 row, u32 q) { return *reinterpret_cast<const u32*>(x + X::at(row, col + 2 * q)); };
      a = make_uint4(word(row, 0), word(row, 1), word(row, 2), word(row, 3));
      b = make_uint4(word(row + 8, 0), word(row + 8, 1), word(row + 8, 2), word(row + 8, 3));
    }
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, u32 row, int first) {
    const int lane = c.lane(), g = lane / 4, t = lane % 4;
    const u32 own = row + u32(c.warp() / K_WARPS) * 16; // of this warp
    const u8* const x = c.template work<u8>(e.x);
    const u8* const weights = c.template constant<u8>(e.weight) + lane * LANE_BYTES;
    float d[AT_ONCE][4] = {};
#pragma unroll AHEAD
    for (int granule = c.warp() % K_WARPS; granule < GRANULES; granule += K_WARPS) {
      uint4 w[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++) {
        const int unit = min(first + n, UNITS - 1);
        w[n] = __ldg(reinterpret_cast<const uint4*>(weights + unit * UNIT_BYTES + granule * GRANULE_BYTES));
      }
#pragma unroll
      for (int p = 0; p < K_PARTS; p++) {
        uint4 a, b;
        operands(x, own + g, u32(granule * K_PARTS + p) * 32 + t * 8, a, b);
#pragma unroll
        for (int n = 0; n < AT_ONCE; n++) {
          // Rows of a granule that belong to other parts of k are multiplied as zeros.
          const uint4 v = K_PARTS > 1 && g / G::UNIT_ROWS != p ? make_uint4(0, 0, 0, 0) : w[n];
          tensor_product(d[n][0], d[n][1], d[n][2], d[n][3], a.x, b.x, a.y, b.y, v.x, v.y);
          tensor_product(d[n][0], d[n][1], d[n][2], d[n][3], a.z, b.z, a.w, b.w, v.z, v.w);
        }
      }
    }
    float* const met = c.scratch(); // [warp][row][column]
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float2 y = make_float2(d[n][2 * h], d[n][2 * h + 1]);
        // Lanes side by side have the parts of k of a row.
        if constexpr (K_PARTS == 4) y.x += __shfl_xor_sync(~0u, y.x, 1), y.y += __shfl_xor_sync(~0u, y.y, 1);
        if constexpr (K_PARTS >= 2) y.x += __shfl_xor_sync(~0u, y.x, 2), y.y += __shfl_xor_sync(~0u, y.y, 2);
        if (t < G::UNIT_ROWS / 2) *reinterpret_cast<float2*>(met + (c.warp() * 16 + g + h * 8) * COLUMNS + n * G::UNIT_ROWS + t * 2) = y;
      }
    c.barrier();
    float* const out = c.template work<float>(e.out);
    for (int i = c.tid(); i < ROW_TILES * 16 * COLUMNS; i += M::WARPS * 32) {
      const int r = i / COLUMNS, col = first * G::UNIT_ROWS + i % COLUMNS;
      if (col >= G::ROWS || row + r >= c.p.row_count) continue;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < K_WARPS; w++) sum += met[((r / 16 * K_WARPS + w) * 16 + r % 16) * COLUMNS + i % COLUMNS];
      if constexpr (G::BIAS) sum += __ldg(c.template constant<float>(e.bias) + col);
      out[u64(row + r) * G::ROWS + col] = sum;
    }
  }
};

// route: the experts of each row, and how much each of them counts; the rule is that of ops/route.cuh.
//
// x (rows, COLS)  fp32 scores, those of experts first
// bias (EXPERTS)  added to the scores for the choice, if CORRECTED
//
// owner    of a row: one warp. A lane has every 32nd expert
template <class M, class G>
struct WaveRoute {
  static constexpr int EACH = ceil_div(G::EXPERTS, 32), WORDS = ExpertChoice<G>::SCRATCH_WORDS; // of a warp
  static_assert(M::WARPS * WORDS * sizeof(u32) <= M::SCRATCH_BYTES, "the keys of all warps");
  static_assert(G::TOP_K <= 32, "a lane of a warp has a slot");

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
#pragma unroll 1
      for (u32 row = share.row + c.warp(); row < end; row += M::WARPS) one(c, e, row);
    }
  }
  static __device__ __forceinline__ void one(WaveContext<M>& c, const Wave& e, u32 row) {
    const int lane = c.lane();
    const auto id = [&](int k) { return k * 32 + lane; };
    const float* const from = c.template work<float>(e.x) + u64(row) * G::COLS;
    float x[EACH];
#pragma unroll
    for (int k = 0; k < EACH; k++) x[k] = id(k) < G::EXPERTS ? from[id(k)] : 0.f;
    const ExpertChoice<G> choice(lane, x, c.template constant<float>(e.bias), reinterpret_cast<u32*>(c.scratch()) + c.warp() * WORDS, id);
    const float weight = choice.weight(lane, x, id);
    if (lane < G::TOP_K) {
      c.template work<u32>(e.out)[u64(row) * G::TOP_K + lane] = choice.expert;
      c.template work<float>(shares_of(e))[u64(row) * G::TOP_K + lane] = weight;
    }
  }
};

// Which place each slot of each row has. All blocks count the choices of all rows, and find the same places.
template <class M, class G>
struct WaveOrder {
  static constexpr int THREADS = M::WARPS * 32;
  static_assert((3 * G::EXPERTS + G::TOP_K) * sizeof(u32) <= M::SCRATCH_BYTES, "counts of all experts, and places of a row");
  // In scratch: slots of each expert, those of earlier rows, its first tile, and places of a row.
  static __device__ __forceinline__ u32* all(const WaveContext<M>& c) { return reinterpret_cast<u32*>(c.scratch()); }
  static __device__ __forceinline__ u32* before(const WaveContext<M>& c) { return all(c) + G::EXPERTS; }
  static __device__ __forceinline__ u32* first(const WaveContext<M>& c) { return all(c) + 2 * G::EXPERTS; }
  static __device__ __forceinline__ u32* to(const WaveContext<M>& c) { return all(c) + 3 * G::EXPERTS; }

  static __device__ __forceinline__ u32 choice(const WaveContext<M>& c, const Wave& e, u32 pair) {
    return min(c.template work<u32>(choices_of(e))[pair], u32(G::EXPERTS - 1));
  }
  // Counts all choices, and apart those before `row`; begins and ends with a barrier. The block with row 0 stores the groups.
  static __device__ __forceinline__ void begin(WaveContext<M>& c, const Wave& e, u32 row) {
    const Choices first(c, e, c.tid(), c.p.row_count); // on their way while counts are set to zero
    c.barrier();
    for (int i = c.tid(); i < 2 * G::EXPERTS; i += THREADS) all(c)[i] = 0;
    c.barrier();
    const auto add = [&](u32 pair, u32 expert) {
      add_to(all(c) + expert, 1u);
      if (pair < row * G::TOP_K) add_to(before(c) + expert, 1u);
    };
    first.each(add);
    count(c, e, Choices::MOST + c.tid(), c.p.row_count, add);
    c.barrier();
    if (c.warp() == 0) number(c, e, row == 0);
  }
  // Choices that a thread asks for at once: those of the pairs of a row and a slot from `base` on, every THREADS-th, of rows before `end`.
  struct Choices {
    static constexpr u32 EACH = 8, MOST = EACH * THREADS;
    u32 expert[EACH], base, pairs;
    __device__ __forceinline__ Choices(const WaveContext<M>& c, const Wave& e, u32 base, u32 end) : base(base), pairs(end * G::TOP_K) {
#pragma unroll
      for (u32 k = 0; k < EACH; k++) expert[k] = choice(c, e, min(base + k * THREADS, pairs - 1));
    }
    // Calls f(pair, its expert).
    template <class F>
    __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
      for (u32 k = 0; k < EACH; k++)
        if (base + k * THREADS < pairs) f(base + k * THREADS, expert[k]);
    }
  };
  // The same of all that follow.
  template <class F>
  static __device__ __forceinline__ void count(const WaveContext<M>& c, const Wave& e, u32 base, u32 end, const F& f) {
#pragma unroll 1
    for (; base < end * G::TOP_K; base += Choices::MOST) Choices(c, e, base, end).each(f);
  }
  // By a warp: the first tile of each expert. A lane has a range of experts.
  static __device__ __forceinline__ void number(const WaveContext<M>& c, const Wave& e, bool tells) {
    constexpr int OWN = ceil_div(G::EXPERTS, 32);
    const int lane = c.lane(), from = min(lane * OWN, G::EXPERTS), until = min(from + OWN, G::EXPERTS);
    u32 own = 0;
    for (int i = from; i < until; i++) own += tiles_of(all(c)[i]);
    u32 end = own;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const u32 other = __shfl_up_sync(~0u, end, o);
      if (lane >= o) end += other;
    }
    u32 at = end - own;
    for (int i = from; i < until; i++) first(c)[i] = at, at += tiles_of(all(c)[i]);
    if (tells) {
      u32 most = 0;
      for (int i = from; i < until; i++) most = max(most, min(all(c)[i], u32(G::TILE)));
#pragma unroll
      for (int o = 16; o > 0; o >>= 1) most = max(most, __shfl_xor_sync(~0u, most, o));
      if (lane == 31) c.template work<uint4>(groups_of(e))[0] = make_uint4(end, 0, 0, ceil_div(most, 8u));
    }
    __syncwarp();
  }
  static __device__ __forceinline__ u32 tiles_of(u32 slots) { return (slots + G::TILE - 1) / G::TILE; }
  static __device__ __forceinline__ void tell(const WaveContext<M>& c, const Wave& e) {
    uint4* const groups = c.template work<uint4>(groups_of(e)) + 1;
    for (int i = c.tid(); i < G::EXPERTS; i += THREADS) {
      const u32 slots = all(c)[i], at = first(c)[i];
      for (u32 tile = 0; tile < tiles_of(slots); tile++) groups[at + tile] = make_uint4(u32(i), at, tiles_of(slots), slots);
    }
  }
};

// Where columns of places lie: TILE places of a tile, in the order in which operands are read (`OperandPlace`). Warpgroups of a chunk take a span of 32 columns of a whole tile. Warps
// of a step take eight places at once, so of these all spans follow one another: a tile with few rows is then one copy.
template <class M, int COLS, int TILE>
struct TilePlace {
  static constexpr u32 SPANS = u32(ceil_div(COLS, 128)) * 4; // those that pad the last 128 columns, too
  static constexpr u32 SPAN_BYTES = M::STEPS ? 512 : TILE * 64, EIGHT_BYTES = M::STEPS ? SPANS * 512 : 512;
  static __device__ __forceinline__ u32 tile(u32 n) { return n * SPANS * (TILE * 64); }
  // Of `col` and the next column; `col` is even.
  static __device__ __forceinline__ u32 at(u32 place, u32 col) {
    const u32 t = M::SHARED ? col % 8 / 2 : col % 32 / 8, q = M::SHARED ? col % 32 / 8 : col % 8 / 2;
    return tile(place / TILE) + place % TILE / 8 * EIGHT_BYTES + col / 32 * SPAN_BYTES + q * 128 + place % 8 * 16 + t * 4;
  }
};

// gather: of a step, finds the place of each slot of each row, and copies the row there.
//
// x (rows, K)    bf16, in the layout of operands
// out (tiles)    TILE places of K columns (`TilePlace`), times 2^POWER
//
// owner    of the places of a row: the block that has the row. The block with row 0 stores the groups
template <class M, class G>
struct WaveGather : WaveOrder<M, G> {
  typedef WaveOrder<M, G> O;
  typedef OperandPlace<G::K, M::BLOCK_ROWS, M::WARPGROUPS> X;
  typedef TilePlace<M, G::K, G::TILE> Out;
  static constexpr int THREADS = M::WARPS * 32, PIECES = int(X::BLOCKS) * 8, EACH = ceil_div(PIECES, THREADS); // of 16 bytes: of a row and of a thread
  static_assert(!M::SHARED, "columns that a lane reads at once lie side by side");

  // Piece `i` of a row: of 32 columns those that a lane reads at once.
  static __device__ __forceinline__ u32 column(int i) { return u32(i / 4 * 32 + i % 4 * 2); }
  static __device__ __forceinline__ uint4 piece(const u8* x, u32 row, int i) {
    const u32 col = column(i);
    const auto word = [&](u32 t) { return *reinterpret_cast<const u32*>(x + X::at(row, col + 8 * t)); };
    return make_uint4(word(0), word(1), word(2), word(3));
  }

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    u32 counted = 0; // rows before whose choices are counted
#pragma unroll 1
    for (u32 s = 0; s < shares.count; s++) {
      const u32 row = shares[s].row;
      if (row >= c.p.row_count) return;
      // What follows from no place is asked for before the choices are counted.
      uint4 held[EACH];
#pragma unroll
      for (int k = 0; k < EACH; k++) held[k] = piece(c.template work<u8>(e.x), row, min(c.tid() + k * THREADS, PIECES - 1));
      const u32 expert = O::choice(c, e, row * G::TOP_K + min(c.lane(), G::TOP_K - 1));
      if (s == 0) {
        O::begin(c, e, row);
      } else {
        c.barrier(); // slow warps still read places
        O::count(c, e, counted * G::TOP_K + c.tid(), row, [&](u32, u32 expert) { add_to(O::before(c) + expert, 1u); });
        c.barrier();
      }
      counted = row;
      // The experts of a row are distinct.
      if (c.warp() == 0 && c.lane() < G::TOP_K) {
        const u32 place = O::first(c)[expert] * G::TILE + O::before(c)[expert];
        O::to(c)[c.lane()] = place;
        c.template work<u32>(places_of(e))[row * G::TOP_K + c.lane()] = place;
      }
      c.barrier();
      if (row == 0) O::tell(c, e);
      u32 places[G::TOP_K];
#pragma unroll
      for (int slot = 0; slot < G::TOP_K; slot++) places[slot] = O::to(c)[slot];
      u8* const out = c.template work<u8>(e.out);
#pragma unroll
      for (int k = 0; k < EACH; k++) {
        const int i = c.tid() + k * THREADS;
        if (i >= PIECES) break;
#pragma unroll
        for (int slot = 0; slot < G::TOP_K; slot++) *reinterpret_cast<uint4*>(out + Out::at(places[slot], column(i))) = times_power<G::POWER>(held[k]);
      }
    }
  }
};

// places: of a chunk, finds the place of each slot of each row, and the row of each place.
//
// out (places)       rows. Places after the last row of a tile have none
//
// owner    of the places of a row: the block that has the row. The block with row 0 stores the groups
template <class M, class G>
struct WavePlaces : WaveOrder<M, G> {
  typedef WaveOrder<M, G> O;

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
      if (share.row >= end) continue;
      O::begin(c, e, share.row);
      if (c.warp() == 0) settle(c, e, share.row * G::TOP_K, end * G::TOP_K);
      c.barrier();
      if (share.row == 0) O::tell(c, e);
    }
  }
  // By the warp that numbered tiles: pairs of a row and a slot in their order, 32 at a time.
  static __device__ __forceinline__ void settle(const WaveContext<M>& c, const Wave& e, u32 from, u32 end) {
    u32* const places = c.template work<u32>(places_of(e));
    u32* const sources = c.template work<u32>(e.out);
    u32* const before = O::before(c);
#pragma unroll 1
    for (u32 base = from; base < end; base += 32) {
      const u32 pair = base + c.lane();
      const bool exists = pair < end;
      const u32 expert = exists ? O::choice(c, e, pair) : u32(G::EXPERTS);
      u32 earlier = 0, same = 0; // lanes with the same expert
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const bool equal = __shfl_sync(~0u, expert, i) == expert;
        same += equal;
        earlier += equal && i < c.lane();
      }
      if (exists) {
        const u32 place = O::first(c)[expert] * G::TILE + before[expert] + earlier;
        places[pair] = place;
        sources[place] = pair / G::TOP_K;
      }
      __syncwarp();
      if (exists && earlier == 0) before[expert] += same;
      __syncwarp();
    }
  }
};

// fill: of a chunk, copies the row of each place there.
//
// x (rows, K)      bf16, row by row
// residual         sources (places): rows
// out (tiles)      TILE places of K columns, in the layout that warpgroups read; columns that pad the last 128 are zero
//
// owner    of eight neighbouring places: block n modulo SMS has the n-th, of as many of each tile as the fullest one has. Pieces of 16 bytes of these are a whole line; of a place alone they would be half of a sector, which
//          L2 takes many times as long to write
template <class M, class G>
struct WaveFill {
  typedef TilePlace<M, G::K, G::TILE> Out;
  static constexpr u32 PLACES = 8, OF_TILE = G::TILE / PLACES;
  // A thread has spans of 32 columns of a place.
  static constexpr int SPANS = int(Out::SPANS), ACROSS = M::WARPS * 32 / int(PLACES), EACH = ceil_div(SPANS, ACROSS), AT_ONCE = EACH < 2 ? EACH : 2;
  static constexpr int GROUPS = 2; // of eight places, at once: their rows lie anywhere, so each load takes the time of L2
  static constexpr u32 NO_ROW = ~0u;
  static_assert(G::K % 8 == 0, "a row has whole pieces");

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const uint4* const all = c.template work<uint4>(groups_of(e));
    const u32* const sources = c.template work<u32>(e.residual);
    const u8* const x = c.template work<u8>(e.x);
    u8* const out = c.template work<u8>(e.out);
    const u32 each = min(all[0].w, OF_TILE), count = all[0].x * each, own = u32(c.tid()) % PLACES;
    const int first = c.tid() / int(PLACES);
    // The row of this thread's place of eight.
    const auto row_of = [&](u32 n) {
      if (n >= count) return NO_ROW;
      const u32 tile = n / each, place = n % each * PLACES + own;
      const uint4 group = all[1 + tile];
      return place < group.w - (tile - group.y) * G::TILE ? sources[tile * G::TILE + place] : NO_ROW;
    };
    u32 rows[GROUPS];
#pragma unroll
    for (int i = 0; i < GROUPS; i++) rows[i] = row_of(blockIdx.x + i * M::SMS);
#pragma unroll 1
    for (u32 n = blockIdx.x; n < count; n += GROUPS * M::SMS) {
      u32 next[GROUPS] = {}, to[GROUPS];
#pragma unroll
      for (int i = 0; i < GROUPS; i++) to[i] = (n + i * M::SMS) / each * G::TILE + (n + i * M::SMS) % each * PLACES + own;
#pragma unroll 1
      for (int from = first; from < SPANS; from += AT_ONCE * ACROSS) {
        u32 held[GROUPS][AT_ONCE][4][4]; // pieces of 8 columns
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
          for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
            for (int t = 0; t < 4; t++) {
              const u32 col = u32(from + k * ACROSS) * 32 + u32(t) * 8;
              uint4 v = make_uint4(0, 0, 0, 0);
              if (col < u32(G::K)) v = *reinterpret_cast<const uint4*>(x + (u64(min(rows[i], c.p.row_count - 1)) * G::K + col) * 2);
              held[i][k][t][0] = v.x, held[i][k][t][1] = v.y, held[i][k][t][2] = v.z, held[i][k][t][3] = v.w;
            }
        // Asked for before the stores: a load after them would wait for L2 once more.
        if (from == first)
#pragma unroll
          for (int i = 0; i < GROUPS; i++) next[i] = row_of(n + (GROUPS + i) * M::SMS);
#pragma unroll
        for (int i = 0; i < GROUPS; i++)
#pragma unroll
          for (int k = 0; k < AT_ONCE; k++)
            if (rows[i] != NO_ROW && from + k * ACROSS < SPANS)
#pragma unroll
              for (int q = 0; q < 4; q++) {
                const auto& of = held[i][k];
                const u32 col = u32(from + k * ACROSS) * 32 + u32(q) * (M::SHARED ? 8 : 2);
                const uint4 piece = M::SHARED ? make_uint4(of[q][0], of[q][1], of[q][2], of[q][3]) : make_uint4(of[0][q], of[1][q], of[2][q], of[3][q]);
                *reinterpret_cast<uint4*>(out + Out::at(to[i], col)) = piece;
              }
      }
#pragma unroll
      for (int i = 0; i < GROUPS; i++) rows[i] = next[i];
    }
  }
};

// experts: y = x W^T + bias by the matrix of the expert that a tile of places has, then the epilogue.
//
// x (tiles)    TILE places of K columns (`TilePlace`), times 2^POWER, through the ring of inputs
// W            EXPERTS matrices of UNITS units, one after another, through the ring of weights
// out          GATED, CLAMPED: 4 columns for each unit; ACT: one for each row of W; like x, times 2^OUT_POWER. STORE: (places, ROWS) bf16
//
// owner    of an item, which is a tile and a part of the units: the block that draws its ticket. SMs read at different speeds, up to a sixth of the time of a wave apart. The
//          tiles of an expert follow one another within a part, so blocks read the same weights at the same time. In a step the last items may have a ticket for each half.
//          Without TICKETS each block has one item of each round, at another place in the next round: tiles with many and with few rows alternate
// assumes  the first warp of each loader has met before it reads the groups. If what left x is another product of them (MET), it has met before that one, so it copies weights before
//          the blocks meet again
//
// A warp has two units of each 16, as by warpgroups in matmul.cuh. Chunks are multiplied by warpgroups. Steps are by warps, which do not wait for each other: most of their tiles
// have a few rows, for which the instruction of a warpgroup takes as long as for many. Places without a row are multiplied, too, and not stored.
template <class M, class G>
struct WaveExperts {
  typedef WaveCodes<M, G> Codes;
  static constexpr int GRANULE_K = PART_BYTES * 8 / Coding<M, G>::BITS, GRANULE = Coding<M, G>::BYTES, GRANULE_SPANS = GRANULE_K / 32;
  static constexpr int UNIT_GRANULES = ceil_div(G::K, GRANULE_K), UNITS = ceil_div(G::ROWS, G::UNIT_ROWS);
  static constexpr u32 UNIT_BYTES = UNIT_GRANULES * GRANULE;
  typedef TilePlace<M, G::K, G::TILE> X;
  // Places that are multiplied of a tile with few rows. The last tile of an expert has any number of them, and one of a step most often few.
  static constexpr int FEW = G::TILE / 4, SOME = G::TILE / 2;
  // Granules and spans of a chunk.
  static constexpr int CHUNK = G::CHUNK, SPANS = CHUNK * GRANULE_SPANS;
  static constexpr u32 INPUT_BYTES = SPANS * G::TILE * 64;
  static constexpr int PASS = G::PASS, PARTS = ceil_div(UNITS, PASS), TILE_UNITS = 16, TILES = ceil_div(PASS, TILE_UNITS), UNIT_PITCH = CHUNK * GRANULE;
  static constexpr bool GATED = G::EPILOGUE == Epilogue::GATED || G::EPILOGUE == Epilogue::CLAMPED;
  static_assert(G::UNIT_ROWS == OPERAND_ROWS && M::WARPS == 8, "two warpgroups, and units of eight rows");
  static_assert(CHUNK == (Codes::CODED ? 1 : 2) * (M::STEPS ? 2 : 1), "a chunk is a granule of codes, or 64 of k, and in a step twice as many");
  static_assert(G::POWER == Codes::INPUT_POWER, "an input that is not what the codes meet");
  static_assert(int(INPUT_BYTES) <= M::INPUT_BYTES, "a slot holds a chunk of a tile");
  static_assert(M::STEPS || M::INPUT_BYTES / X::SPAN_BYTES <= 32, "a lane copies a span of a slot");
  // A slot of inputs holds several chunks of a tile, so that there are as many of them on their way as of weights.
  static constexpr int UNIT_CHUNKS = ceil_div(UNIT_GRANULES, CHUNK), WANTED = ceil_div(M::WEIGHT_SLOTS, M::INPUT_SLOTS);
  static constexpr int FITTING = M::INPUT_BYTES / int(INPUT_BYTES), MOST = FITTING < UNIT_CHUNKS ? FITTING : UNIT_CHUNKS, TOGETHER = WANTED < MOST ? WANTED : MOST;
  // In a slot: of one chunk, and from eight places to the next.
  static constexpr u32 CHUNK_BYTES = M::STEPS ? SPANS * X::SPAN_BYTES : INPUT_BYTES, EIGHT_BYTES = M::STEPS ? TOGETHER * CHUNK_BYTES : X::EIGHT_BYTES;

  // Items that have several tickets: the last LAST, of GRAIN units each. Half an item fills half of a slot, so none are halved where few slots are on their way at once. Nor are items
  // of codes: their arithmetic binds, and of half an item it takes as long.
  static constexpr int SPLITS = M::STEPS && !Codes::CODED && M::WEIGHT_SLOTS >= 4 && PASS >= 4 ? 2 : 1, GRAIN = ceil_div(PASS, SPLITS), LAST = M::SMS * 3 / 2;
  // Chunks after which the loader draws the ticket of the next item, and after which it tells the other warps of the block.
  static constexpr int DRAWN = UNIT_CHUNKS / 2 / TOGETHER * TOGETHER, TOLD = DRAWN + TOGETHER < UNIT_CHUNKS ? DRAWN + TOGETHER : DRAWN;

  typedef ExpertItem Item;
  static_assert(UNITS < 1 << 16 && PASS < 1 << 7 && G::TILE < 1 << 9, "what the words of a turn hold");
  // The items of a wave.
  struct Items {
    const uint4* all;
    u32 count, whole, tickets; // items, those of one ticket, and tickets
    __device__ __forceinline__ Items(const WaveParams& p, const Wave& e) : all(groups_from(p, e)) {
      count = uniform(*reinterpret_cast<const u32*>(all)) * PARTS;
      whole = SPLITS == 1 ? count : max(count, u32(LAST)) - LAST;
      tickets = whole + (count - whole) * SPLITS;
    }
    __device__ __forceinline__ Item item(u32 ticket) const {
      Item item;
      if (ticket >= tickets) return item;
      u32 n = ticket, from = 0, end = PASS;
      if (SPLITS > 1 && n >= whole) n = whole + (ticket - whole) / SPLITS, from = (ticket - whole) % SPLITS * GRAIN, end = from + GRAIN;
      const uint4 of = group_of(all, n / PARTS);
      const u32 within = n - of.y * PARTS, part = within / of.z, first = UNITS * part / PARTS;
      item.tile = of.y + within % of.z;
      item.own = first + from;
      item.units = min(UNITS * (part + 1) / PARTS, first + end) - item.own;
      item.unit = of.x * UNITS + item.own;
      item.rows = min(u32(G::TILE), of.w - (item.tile - of.y) * G::TILE);
      return item;
    }
  };

  static __device__ __forceinline__ int places_multiplied(const Item& item) { return item.rows <= FEW ? FEW : item.rows <= SOME ? SOME : G::TILE; }

  // ---- the loader ----------------------------------------------------------------------------------------------------
  // Which weights they are is known once all blocks have met, in this wave or in one before.
  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e) {
    if (R::FIRST == 0 || !G::MET) l.meet();
    if (l.lost()) return;
    if (R::FIRST != 0 && G::BOXED && l.part == 0 && l.lane == 0 && l.step == 0) l.see_box(e.boxes), l.see_box(e.boxes + 1);
    const Items items(l.p, e);
    Item item = items.item(blockIdx.x);
#pragma unroll 1
    for (u32 round = 1; item.units > 0; round++)
      if constexpr (R::FIRST == 0) {
        item = load_input(l, e, items, item, round);
      } else {
        load_weights(l, e, item);
        item = Item::of(wave_turn(l));
      }
  }
  // Returns the next item.
  template <class L>
  static __device__ __forceinline__ Item load_input(L& l, const Wave& e, const Items& items, const Item& item, u32 round) {
    // Of a tile with few rows, the places that are multiplied.
    const u8* x = l.p.work + u64(e.x) * OFFSET_BYTES + X::tile(item.tile);
    const u32 places = u32(places_multiplied(item));
    u32 ticket = (round - 1) * M::SMS + (blockIdx.x + round) % M::SMS; // after the first round
    Item next;
#pragma unroll 1
    for (int at = 0; at < UNIT_CHUNKS; at += TOGETHER, l.at.next()) {
      if (G::TICKETS && at == DRAWN && l.lane == 0) ticket = l.draw(drawn_from<G>(l.p, e));
      if (at == TOLD) {
        next = items.item(M::SMS + __shfl_sync(~0u, ticket, 0));
        l.tell(next.turn());
      }
      const u32 spans = min(u32(min(TOGETHER, UNIT_CHUNKS - at) * SPANS), X::SPANS - at * SPANS);
      const u8* from = x + u32(at) * SPANS * X::SPAN_BYTES;
      u8* slot = l.free_slot();
      if constexpr (M::STEPS) {
        if (l.lane < places / 8) l.copy(slot + l.lane * EIGHT_BYTES, from + l.lane * X::EIGHT_BYTES, spans * X::SPAN_BYTES);
      } else if (places == G::TILE) {
        if (l.lane == 0) l.copy(slot, from, spans * X::SPAN_BYTES);
      } else if (l.lane < spans) {
        l.copy(slot + l.lane * X::SPAN_BYTES, from + l.lane * X::SPAN_BYTES, places * 64);
      }
      l.arrive(spans * places * 64);
    }
    return next;
  }
  template <class L>
  static __device__ __forceinline__ void load_weights(L& l, const Wave& e, const Item& item) {
    constexpr int FILLERS = WeightRing<M>::FILLERS;
    const u32 here = item.units, box = e.boxes + (here == PASS ? 0 : 1), unit = l.part + l.lane * FILLERS; // that this lane copies
    const u8* from = l.p.pack + u64(e.weight) * OFFSET_BYTES + u64(item.unit + unit) * UNIT_BYTES;
#pragma unroll 1
    for (int at = 0; at < UNIT_GRANULES; at += CHUNK, l.at.next()) {
      const u32 bytes = u32(min(CHUNK, UNIT_GRANULES - at)) * GRANULE;
      u8* slot = l.free_slot();
      if (G::BOXED && here + 1 >= PASS) {
        // Every piece of a box has its full length. Beyond the end of a unit it is zeros.
        if (l.part == 0 && l.lane == 0) l.copy_box(slot, box, u32(at) * (GRANULE / 8), item.unit);
        l.arrive(here * UNIT_PITCH);
      } else {
        if (unit < here) l.copy(slot + unit * UNIT_PITCH, from + u32(at) * GRANULE, bytes);
        l.arrive(here * bytes);
      }
    }
  }

  // ---- consumers -----------------------------------------------------------------------------------------------------
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    if (c.lost()) return;
    Item item = Items(c.p, e).item(blockIdx.x);
#pragma unroll 1
    while (item.units > 0) {
      const int places = places_multiplied(item);
      if (places == FEW)
        pass<FEW>(c, e, item);
      else if (places == SOME)
        pass<SOME>(c, e, item);
      else
        pass<G::TILE>(c, e, item);
      item = Item::of(wave_turn(c));
    }
  }
  template <int PLACES>
  static __device__ __forceinline__ void pass(WaveContext<M>& c, const Wave& e, const Item& item) {
    if constexpr (M::STEPS)
      pass_warps<PLACES>(c, e, item);
    else if constexpr (Codes::CODED)
      pass_codes<PLACES>(c, e, item);
    else
      pass_plain<PLACES>(c, e, item);
  }
  // Which unit of a pass a warp has as its i-th of a tile. If a chunk has two tiles, the four units of a warp are those whose columns a lane stores at once: four side by side,
  // or of gated ones every second of eight.
  static constexpr bool TOGETHER_STORED = !M::STEPS && TILES == 2;
  static __device__ __forceinline__ int unit_of(const WaveContext<M>& c, int tile, int i) {
    if constexpr (!TOGETHER_STORED) return tile * TILE_UNITS + c.warp() * 2 + i;
    return GATED ? c.warp() / 2 * 8 + c.warp() % 2 + 2 * (tile * 2 + i) : c.warp() * 4 + tile * 2 + i;
  }
  static __device__ __forceinline__ void load_tile(const u8* w, int span, int tile, bool exists, const WaveContext<M>& c, uint4 (&a)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i] = *reinterpret_cast<const uint4*>(w + unit_of(c, tile, i) * UNIT_PITCH + span * GRANULE + c.lane() * 16);
      // Memory that no chunk has filled may hold NaN.
      if (!exists) a[i] = make_uint4(0, 0, 0, 0);
    }
  }
  template <int PLACES, bool FIRST = false>
  static __device__ __forceinline__ void multiply(const u8* x, const uint4 (&a)[2], float (&d)[PLACES / 2]) {
    const u64 first = WarpgroupOperand::at(x), second = WarpgroupOperand::next(first, 2 * WarpgroupOperand::CORE_BYTES);
    warpgroup_begin();
    warpgroup_product<PLACES, FIRST>(d, a[0].x, a[1].x, a[0].y, a[1].y, first);
    warpgroup_product<PLACES>(d, a[0].z, a[1].z, a[0].w, a[1].w, second);
    warpgroup_commit();
  }
  // Chunk `at` of an item is next: waits for it.
  static __device__ __forceinline__ void take(WaveContext<M>& c, const RingCursor<InputRing<M>>& inputs, const RingCursor<WeightRing<M>>& weights, int at, const u8*& x, const u8*& w) {
    wave_take_pair(c, inputs, weights, x, w, at % TOGETHER == 0);
    x += at % TOGETHER * CHUNK_BYTES;
  }
  // Once by each warp, after its last read of chunk `at`.
  static __device__ __forceinline__ void leave(WaveContext<M>& c, int at) {
    if (at % TOGETHER == TOGETHER - 1 || at == UNIT_CHUNKS - 1)
      wave_release_pair(c, c.inputs, c.weights);
    else
      wave_release(c, c.weights);
  }
  // Words are loaded two products ahead, so that one product always waits while another runs. A chunk is left when the products of the next one have begun.
  template <int PLACES>
  static __device__ __forceinline__ void pass_plain(WaveContext<M>& c, const Wave& e, const Item& item) {
    float d[TILES][PLACES / 2] = {};
    constexpr int AHEAD = 2, PRODUCTS = 2 * TILES, BUFFERS = PRODUCTS % 3 ? 4 : 3, CHUNKS = PRODUCTS % BUFFERS ? 2 : 1;
    uint4 a[BUFFERS][2];
    int left = UNIT_GRANULES, now = 0; // granules, and the chunk that is multiplied
    RingCursor<InputRing<M>> inputs = c.inputs;
    RingCursor<WeightRing<M>> weights = c.weights;
    const u8 *x = nullptr, *w = nullptr;
    take(c, inputs, weights, 0, x, w);
    const u8* next_x = x;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load_tile(w, i / TILES, i % TILES, i < TILES || left > 1, c, a[i]);
    do {
#pragma unroll
      for (int i = 0; i < CHUNKS * PRODUCTS; i++) {
        constexpr int LAST = PRODUCTS - 1;
        const int at_chunk = i % PRODUCTS, ahead = (at_chunk + AHEAD) % PRODUCTS;
        multiply<PLACES>(x + at_chunk / TILES * X::SPAN_BYTES, a[i % BUFFERS], d[at_chunk % TILES]);
        warpgroup_await<1>();
        if (at_chunk == 0 && now > 0) leave(c, now - 1);
        const bool of_next = at_chunk + AHEAD >= PRODUCTS;
        const int there = of_next ? left - CHUNK : left;
        if (there > 0) {
          if (of_next && ahead == 0) {
            if ((now + 1) % TOGETHER == 0) inputs.next();
            weights.next();
            take(c, inputs, weights, now + 1, next_x, w);
          }
          load_tile(w, ahead / TILES, ahead % TILES, ahead < TILES || there > 1, c, a[(i + AHEAD) % BUFFERS]);
        }
        if (at_chunk == LAST) {
          left -= CHUNK;
          x = next_x;
          if (left <= 0) break;
          now++;
        }
      }
    } while (left > 0);
    warpgroup_await<0>();
    leave(c, UNIT_CHUNKS - 1);
    finish<PLACES>(c, e, item, d);
  }
  // The same for codes, as `pass_wide_codes` of matmul.cuh.
  template <int PLACES>
  static __device__ __forceinline__ void pass_codes(WaveContext<M>& c, const Wave& e, const Item& item) {
    constexpr bool GROUPED = Codes::GROUPED;
    constexpr int SUMS = PLACES / 2, RUNS = GROUPED ? Codes::GROUPS : 1, RUN_SPANS = GRANULE_SPANS / RUNS;
    // Sums of groups: while those of one are scaled, the products of the next one run, if there is room for both.
    constexpr int SETS = GROUPED && RUNS % 2 == 0 && SUMS <= 16 ? 2 : 1;
    const int lane = c.lane();
    float d[TILES][SUMS] = {}, own[SETS][GROUPED ? SUMS : 1] = {};
    uint4 a[2][2];
#pragma unroll 1
    for (int at = 0; at < UNIT_CHUNKS; at++) {
      const u8 *x = nullptr, *w = nullptr;
      take(c, c.inputs, c.weights, at, x, w);
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        typename Codes::WideHeld held[2];
#pragma unroll
        for (int i = 0; i < 2; i++) held[i].read(w + unit_of(c, n, i) * UNIT_PITCH, lane, lane / 4);
        const auto scale = [&](int run) {
          auto& sums = own[run % SETS];
          warpgroup_done(sums);
#pragma unroll
          for (int k = 0; k < SUMS; k++) d[n][k] += held[k / 2 % 2].scale(0, run) * sums[k];
        };
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
          u32 zeros[2];
#pragma unroll
          for (int i = 0; i < 2; i++) zeros[i] = Codes::Wide::zero(G::ZEROS ? held[i].zero(0, run) : Codes::Weights::Codes::ZERO);
#pragma unroll
          for (int s = 0; s < RUN_SPANS; s++) {
            const int span = run * RUN_SPANS + s;
            uint4(&now)[2] = a[span % 2];
#pragma unroll
            for (int i = 0; i < 2; i++) now[i] = Codes::Wide::template eight<G::ZEROS>(held[i].codes, span, zeros[i]);
            if constexpr (!GROUPED)
              multiply<PLACES>(x + span * X::SPAN_BYTES, now, d[n]);
            else if (s == 0)
              multiply<PLACES, true>(x + span * X::SPAN_BYTES, now, own[run % SETS]);
            else
              multiply<PLACES>(x + span * X::SPAN_BYTES, now, own[run % SETS]);
            warpgroup_await<1>();
            if (SETS == 2 && s == 0 && run > 0) scale(run - 1);
          }
          if constexpr (GROUPED && SETS == 1) {
            warpgroup_await<0>();
            if (n == TILES - 1 && run == RUNS - 1) leave(c, at);
            scale(run);
          }
        }
        if constexpr (SETS == 2) {
          warpgroup_await<0>();
          if (n == TILES - 1) leave(c, at);
          scale(RUNS - 1);
        }
      }
      if constexpr (!GROUPED) {
        warpgroup_await<0>();
        leave(c, at);
      }
    }
    finish<PLACES>(c, e, item, d);
  }
  // By warps, each on its own.
  template <int PLACES>
  static __device__ __forceinline__ void pass_warps(WaveContext<M>& c, const Wave& e, const Item& item) {
    float d[TILES][PLACES / 2] = {};
#pragma unroll 1
    for (int at = 0; at < UNIT_CHUNKS; at++) {
      const u8 *x = nullptr, *w = nullptr;
      take(c, c.inputs, c.weights, at, x, w);
      const u32 of = smem_address(x) + c.lane() * 16; // 16 bytes of each operand
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        // Granules that a unit has: of its last chunk perhaps not all.
        const int there = UNIT_GRANULES % CHUNK == 0 ? CHUNK : min(CHUNK, UNIT_GRANULES - at * CHUNK);
        if constexpr (Codes::CODED) {
#pragma unroll
          for (int g = 0; g < CHUNK; g++)
            if (g < there) warp_codes<PLACES>(c, of + g * GRANULE_SPANS * X::SPAN_BYTES, w + g * GRANULE, n, d[n]);
        } else {
          uint4 a[SPANS][2];
#pragma unroll
          for (int s = 0; s < SPANS; s++) load_tile(w, s, n, true, c, a[s]);
#pragma unroll
          for (int s = 0; s < SPANS; s++)
            if (s < there) warp_product<PLACES>(of + s * X::SPAN_BYTES, a[s], d[n]);
        }
      }
      leave(c, at);
    }
    if constexpr (Codes::CODED) {
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int k = 0; k < PLACES / 2; k++) d[n][k] *= Codes::RAW_FACTOR;
    }
    finish<PLACES>(c, e, item, d);
  }
  // A granule of each of two units.
  template <int PLACES>
  static __device__ __forceinline__ void warp_codes(const WaveContext<M>& c, u32 x, const u8* w, int n, float (&d)[PLACES / 2]) {
    constexpr bool GROUPED = Codes::GROUPED;
    constexpr int RUNS = GROUPED ? Codes::GROUPS : 1, RUN_SPANS = GRANULE_SPANS / RUNS;
    const int lane = c.lane();
    typename Codes::WideHeld held[2];
#pragma unroll
    for (int i = 0; i < 2; i++) held[i].read(w + unit_of(c, n, i) * UNIT_PITCH, lane, lane / 4);
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
      float own[PLACES / 2] = {};
#pragma unroll
      for (int s = 0; s < RUN_SPANS; s++) {
        const int span = run * RUN_SPANS + s;
        uint4 a[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const u32 zero = Codes::Wide::zero(G::ZEROS ? held[i].zero(0, run) : Codes::Weights::Codes::ZERO);
          a[i] = Codes::Wide::template raw<G::ZEROS>(held[i].codes, span, zero);
        }
        warp_product<PLACES>(x + span * X::SPAN_BYTES, a, GROUPED ? own : d);
      }
      if constexpr (GROUPED) {
        const float scale[2] = {held[0].scale_of_sum(0, run), held[1].scale_of_sum(0, run)};
#pragma unroll
        for (int k = 0; k < PLACES / 2; k++) d[k] += scale[k / 2 % 2] * own[k];
      }
    }
  }
  // 32 of k of eight places, as a lane has them as the right operand of two products.
  static __device__ __forceinline__ uint4 load_operand(u32 address) {
    uint4 b;
#ifdef __CUDA_ARCH__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w) : "r"(address));
#else
    const u32 lane = address / 16 % 32; // tests of ops on a CPU
    const u32* const words = reinterpret_cast<const u32*>(smem + address - lane * 12);
    b = make_uint4(words[0], words[32], words[64], words[96]);
#endif
    return b;
  }
  // 32 of k, of two units and PLACES places.
  template <int PLACES>
  static __device__ __forceinline__ void warp_product(u32 x, const uint4 (&a)[2], float (&d)[PLACES / 2]) {
#pragma unroll
    for (int j = 0; j < PLACES / 8; j++) {
      const uint4 b = load_operand(x + j * EIGHT_BYTES);
      tensor_product(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3], a[0].x, a[1].x, a[0].y, a[1].y, b.x, b.y);
      tensor_product(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3], a[0].z, a[1].z, a[0].w, a[1].w, b.z, b.w);
    }
  }
  template <int PLACES>
  static __device__ __forceinline__ void finish(const WaveContext<M>& c, const Wave& e, const Item& item, const float (&d)[TILES][PLACES / 2]) {
    constexpr int COLS = GATED ? G::ROWS / 2 : G::ROWS;
    static_assert(COLS % 2 == 0, "columns are stored in pairs");
    typedef TilePlace<M, COLS, G::TILE> Out;
    // Computed again here, so that the loop above has no registers for it.
    const int lane = made_here(c.lane()), t = lane % 4;
    u8* const out = c.template work<u8>(e.out);
    // Two columns of a unit, of place lane / 4 of eight.
    const auto column = [&](u32 unit) { return (item.own + unit) * (GATED ? 4 : G::UNIT_ROWS) + u32(t * 2); };
    const auto stores = [&](u32 unit) { return unit < item.units && column(unit) < u32(COLS) && (!GATED || t < 2); };
    const auto settled = [&](int n, int i, int j) {
      const u32 of_matrix = (item.unit + min(u32(unit_of(c, n, i)), item.units - 1)) * G::UNIT_ROWS + u32(t * 2);
      float2 y = transposed(d[n][4 * j + 2 * i], d[n][4 * j + 2 * i + 1]);
      if constexpr (Codes::ROW_SCALES) {
        const float2 scale = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.row_scales) + of_matrix));
        y.x *= scale.x, y.y *= scale.y;
      }
      if constexpr (G::BIAS) {
        const float2 bias = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.bias) + of_matrix));
        y.x += bias.x, y.y += bias.y;
      }
      if constexpr (GATED) {
        const float2 up = make_float2(__shfl_xor_sync(~0u, y.x, 2), __shfl_xor_sync(~0u, y.y, 2));
        y = gated_by_expert<G>(y, up);
      }
      if constexpr (G::EPILOGUE == Epilogue::ACT) y = make_float2(activate<G::ACT>(y.x), activate<G::ACT>(y.y));
      const u32 pair = bf16_pair(y.x, y.y);
      return G::EPILOGUE == Epilogue::STORE ? pair : times_power<G::OUT_POWER>(pair);
    };
    const auto to = [&](u32 place, u32 col) {
      if constexpr (G::EPILOGUE == Epilogue::STORE) return out + (u64(place) * COLS + col) * 2;
      return out + Out::at(place, col);
    };
#pragma unroll
    for (int j = 0; j < PLACES / 8; j++) {
      const u32 row = u32(j * 8 + lane / 4), place = item.tile * G::TILE + row;
      const bool exists = row < item.rows;
      u32 pairs[2 * TILES];
#pragma unroll
      for (int k = 0; k < 2 * TILES; k++) pairs[k] = settled(k / 2, k % 2, j);
      if constexpr (TOGETHER_STORED && GATED) {
        // The four columns of every second unit are those that a piece of an operand has: if all exist, and begin a span of 32.
        const u32 last = u32(unit_of(c, 1, 1));
        if (last < item.units && item.own % 8 == 0 && column(last) < u32(COLS)) {
          if (exists && t < 2) *reinterpret_cast<uint4*>(to(place, column(u32(unit_of(c, 0, 0))))) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
          continue;
        }
      }
      if constexpr (TOGETHER_STORED && G::EPILOGUE == Epilogue::STORE && COLS % 8 == 0) {
        if (u32(c.warp()) * 4 + 3 < item.units) {
          // Lane t takes unit t of four, of which four lanes have two columns each.
          const uint4 piece = words_of_four(pairs, t);
          if (exists) *reinterpret_cast<uint4*>(to(place, (item.own + u32(c.warp()) * 4 + t) * G::UNIT_ROWS)) = piece;
          continue;
        }
      }
#pragma unroll
      for (int k = 0; k < 2 * TILES; k++) {
        const u32 unit = u32(unit_of(c, k / 2, k % 2));
        if (exists && stores(unit)) *reinterpret_cast<u32*>(to(place, column(unit))) = pairs[k];
      }
    }
  }
};

// combine: out = SCALE * what experts made of a row (`WaveSlots`), of which another wave takes the norm.
//
// out (rows, WIDTH)     fp32
//
// owner    of a row: one block
template <class M, class G>
struct WaveCombine {
  static constexpr int THREADS = M::WARPS * 32, PIECES = G::WIDTH / 8;
  static_assert(G::WIDTH % 8 == 0, "a lane has 8 columns at a time");

  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>&, const Wave&) {}
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    const HeldShares<M> shares(c);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      const u32 end = min(share.row + share.rows, c.p.row_count);
      if (share.row >= end) continue;
#pragma unroll 1
      for (u32 i = c.tid(); i < (end - share.row) * PIECES; i += THREADS) one(c, e, share.row + i / PIECES, int(i % PIECES) * 8);
    }
  }
  static __device__ __forceinline__ void one(const WaveContext<M>& c, const Wave& e, u32 row, int col) {
    float y[8] = {};
    WaveSlots<M, G, G::WIDTH>(c, e, row).add8(c, e, col, y);
    float* const to = c.template work<float>(e.out) + u64(row) * G::WIDTH + col;
    *reinterpret_cast<float4*>(to) = make_float4(G::SCALE * y[0], G::SCALE * y[1], G::SCALE * y[2], G::SCALE * y[3]);
    *reinterpret_cast<float4*>(to + 4) = make_float4(G::SCALE * y[4], G::SCALE * y[5], G::SCALE * y[6], G::SCALE * y[7]);
  }
};
