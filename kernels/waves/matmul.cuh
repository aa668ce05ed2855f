// matmul: y = x W^T + bias for blocks of M::BLOCK_ROWS rows, then the epilogue.
//
// x (rows, K)    bf16 in the layout of `OperandPlace`, through the ring of inputs. A chunk is as many columns of a block of rows as a slot holds
// W              units as in ops/matvec.cuh, through the ring of weights. A chunk is CHUNK granules of all units of a pass; if BOXED, boxes of a tensor
//                map bring several units at once
// out            STORE, ACT: one column for each row of W. GATED: 4 columns for each unit. In the layout of operands, or row by row (PLAIN).
//                RESIDUAL: residual += SCALE * y, in place. With SPLITS parts of k these write the fp32 sums of each part: (SPLITS, rows, ROWS);
//                if PACKETS each sum is a packet
//                LOGITS: the block's best logit of each row, and all logits if the host asks for them
//
// squares (rows / 4, parts, 4)  fp32. With FACTOR the input lacks the factor of its norm. The factor follows from these sums, which WaveRows or a product in
//                pairs has left, and multiplies the result. In a chunk a product with SUMS has left them, and its wave says whether the input lacks it
// PAIRED         residual += SCALE * y by the two blocks of a cluster, which have the two parts of k of the same units (end_pair)
// out      (rows, ROWS)  if PAIRED and OUT: the residual times the weight of the next norm, in the layout of operands; and
// squares_out (rows / 4, blocks / 2, 4)  fp32: each pair's sum of squares of a row; zero for a pair without units
// SUMS           residual += SCALE * y in launches with one part of k, then `out` as of PAIRED, and
// squares_out (rows / 4, GROUPS, 4)  fp32: of each group of 64 columns the sum of squares of a row. With several parts their sums go to
// branch   (SPLITS, rows, ROWS)  fp32, and the wave after it adds them up
//
// owner    of a unit, a part of k and a block of rows: one block
// assumes  columns of x past K and rows of W past ROWS are zeros
//
// Warps are divided into ROW_GROUPS groups by rows, UNIT_GROUPS by units, and K_GROUPS that take the granules of k in turn and add up their sums at the
// end. A lane loads 16 bytes of row lane / 4 of W, and the same columns of rows lane / 4 and lane / 4 + 8 of x. As operands of m16n8k16 these are a
// permutation of k that both sides share (rows/matvec.cuh). Codes become operands as in rows/matvec_codes.cuh; every warp that reads a chunk of the input
// rearranges it to match them.
//
// By warpgroups (M::WARPGROUPS): W is the left operand, in registers. x is the right one, in shared memory, so warps do not read it again for each unit.
// Both share the same permutation of k. A warpgroup has all rows of the block, or half of them; each of its warps has two units of a tile, and a pass is a few
// whole tiles. Sums are transposed, and then end like those of warps. Codes become operands as in warpgroup_codes.cuh, and the input stays as it is.
// If all weights are plain (M::SHARED), tensor cores read both from shared memory: x is the left operand, and boxes bring weights as the right one wants
// them. With PAIRS the two blocks of a cluster have the same units, and copy them once for both.
// A step multiplies tiles in the same way (TILES); its warpgroups have units of their own, or share k. Lanes turn two sums at a time into places of warps, with
// other lanes (`row_of`), and sums then end like those of warps.
#pragma once

// How codes of a matrix become operands. Plain weights are operands already.
template <class M, class G, class = int>
struct WaveCodes {
  static constexpr bool CODED = false, GROUPED = false, ROW_SCALES = false;
  static constexpr float FACTOR = 1.f;
  static constexpr int INPUT_POWER = 0;
};
template <class M, class G>
struct WaveCodes<M, G, decltype(int(G::CODE))> {
  typedef Coding<M, G> Weights;
  typedef RowsOperand<G::CODE> Operand;
  typedef RowsHeld<M, G, 2> Held; // codes of the two columns of a lane
  typedef WideOperand<G::CODE> Wide;
  typedef RowsHeld<M, G, 1> WideHeld; // codes of the row of a lane
  static constexpr bool CODED = true, GROUPED = Weights::GROUPED, ROW_SCALES = Weights::ROW_SCALES;
  static constexpr float FACTOR = M::WARPGROUPS || G::TILES ? 1.f : Operand::FACTOR;
  static constexpr int OFFSET = Operand::OFFSET + int(Weights::Codes::ZERO);
  static constexpr bool SUMS_X = G::ZEROS || OFFSET != 0;
  static constexpr int GROUPS = Weights::GROUPS, GROUP_BLOCKS = Weights::GROUP_BLOCKS;
  // Of `Wide::raw`: what its inputs are stored times, and what sums are multiplied by at the end.
  static constexpr int INPUT_POWER = M::STEPS ? Wide::INPUT_POWER : 0;
  static constexpr float RAW_FACTOR = float(1 << (Wide::RAW_POWER - Wide::INPUT_POWER)) * (WideHeld::TWICE ? 0.5f : 1.f);

  // Rearranges the operands of rows g and g + 8 to match codes.
  static __device__ __forceinline__ void meet(uint4& a, uint4& b) {
    const uint4 low = Operand::input(make_uint4(a.x, a.z, b.x, b.z)), high = Operand::input(make_uint4(a.y, a.w, b.y, b.w));
    a = made_here(make_uint4(low.x, high.x, low.y, high.y));
    b = made_here(make_uint4(low.z, high.z, low.w, high.w));
  }
  // What is subtracted from the sums of a column. `sums`: x times the constant.
  static __device__ __forceinline__ float taken(const Held& w, int col, int group, float sums) {
    if constexpr (G::ZEROS)
      return (float(OFFSET - int(Weights::Codes::ZERO)) + w.zero(col, group)) * sums;
    else
      return SUMS_X ? sums : 0.f;
  }
};

template <class M, class G>
struct WaveMatMul {
  typedef WaveCodes<M, G> Codes;
  static constexpr int K_PARTS = OPERAND_ROWS / G::UNIT_ROWS;
  static constexpr int GRANULE_K = K_PARTS * (PART_BYTES * 8 / Coding<M, G>::BITS), GRANULE = Coding<M, G>::BYTES;
  static constexpr int UNIT_GRANULES = ceil_div(G::K, GRANULE_K), UNITS = ceil_div(G::ROWS, G::UNIT_ROWS);
  static constexpr u32 UNIT_BYTES = UNIT_GRANULES * GRANULE;
  typedef OperandPlace<G::K, M::BLOCK_ROWS, M::WARPGROUPS || G::TILES, M::SHARED> X;
  static constexpr bool WIDE = M::WARPGROUPS, SHARED = M::SHARED;
  // Spans of 32 columns: of a granule, of a chunk of each ring, and of a step of the loop, which is the shorter of both chunks.
  static constexpr int GRANULE_SPANS = GRANULE_K / 32;
  static constexpr int X_SPANS = M::INPUT_BYTES / (M::BLOCK_ROWS * 64), W_SPANS = G::CHUNK * GRANULE_SPANS, STEP = X_SPANS < W_SPANS ? X_SPANS : W_SPANS;
  static constexpr int X_STEPS = X_SPANS / STEP, W_STEPS = W_SPANS / STEP, STEP_GRANULES = STEP / GRANULE_SPANS;
  static constexpr int ROW_GROUPS = G::ROW_GROUPS, UNIT_GROUPS = G::UNIT_GROUPS, K_GROUPS = G::K_GROUPS, WARP_GRANULES = STEP_GRANULES / K_GROUPS;
  static constexpr int ROW_TILES = M::BLOCK_ROWS / ROW_GROUPS / 16;
  // Most units at once, of a block and of a warp. Those of a tile come in twos.
  static constexpr int PASS = G::PASS, MOST = G::TILES ? 2 * ceil_div(PASS, 2 * UNIT_GROUPS) : ceil_div(PASS, UNIT_GROUPS);
  // Granules of a part of k. Parts are whole blocks of 64 columns.
  static constexpr int ALIGN = GRANULE_K >= 64 ? 1 : 64 / GRANULE_K, PART_GRANULES = round_up(ceil_div(UNIT_GRANULES, G::SPLITS), ALIGN);
  // EQUAL: all parts of k have the same length. WHOLE: no step lacks a granule, so the work of a step is known at compile time.
  static constexpr bool EQUAL = PART_GRANULES * G::SPLITS == UNIT_GRANULES, WHOLE = EQUAL && PART_GRANULES % STEP_GRANULES == 0;
  // Whether launches of more blocks of rows have fewer parts.
  static constexpr bool BY_ROWS = SHARED && G::SPLITS > 1;
  typedef PartsOfRows<M, G::SPLITS> Parts;
  static constexpr int UNIT_PITCH = G::CHUNK * GRANULE; // of a unit in a slot
  static constexpr u32 BOX_UNITS = 8;
  // For warpgroups: rows of one, and units of a tile. Each warp has two units of a tile, side by side.
  static constexpr int GROUP_ROWS = M::BLOCK_ROWS / ROW_GROUPS, TILE_UNITS = 2 * UNIT_GROUPS, PASS_TILES = ceil_div(PASS, TILE_UNITS);
  static_assert(!WIDE || (K_PARTS == 1 && K_GROUPS == 1 && !M::STEPS && X_STEPS == 1 && W_STEPS == 1), "what warpgroups multiply");
  static_assert(!WIDE || (Codes::CODED ? STEP_GRANULES == 1 : STEP == 2), "a chunk is a granule of codes, or 64 of k");
  static_assert(!WIDE || SHARED || PASS_TILES * TILE_UNITS * UNIT_PITCH <= M::WEIGHT_BYTES, "a slot holds a chunk of whole tiles");
  static_assert(!M::PAIRS || M::STEPS || SHARED, "chunks that a pair shares are left by warps of warpgroups alone");
  static_assert(!SHARED || (WIDE && !Codes::CODED && UNIT_PITCH == int(SwizzledOperand::UNIT_BYTES) && PASS % int(BOX_UNITS) == 0 && PASS <= 32), "what tensor cores read from shared memory");
  static_assert(!G::BOXED || UNIT_PITCH <= 2048, "a box has at most 256 elements of 8 bytes side by side");
  static_assert(M::WARPS == ROW_GROUPS * UNIT_GROUPS * K_GROUPS, "each warp has a place");
  static_assert((G::TILES || STEP % 2 == 0) && X_SPANS % STEP == 0 && W_SPANS % STEP == 0 && STEP % GRANULE_SPANS == 0, "steps are whole blocks of 64 columns");
  static_assert(WARP_GRANULES > 0 && STEP_GRANULES % K_GROUPS == 0, "groups of k have as many granules of each step");
  static_assert(G::TILES || MOST * UNIT_GROUPS * UNIT_PITCH <= M::WEIGHT_BYTES, "a slot holds a chunk");

  // Divides the units of a share into passes of nearly equal length, or of whole tiles. A share lies in one part of k.
  struct Passes {
    u32 lo, hi, count, part, from, granules; // `from`: the first granule of the part
    __device__ __forceinline__ Passes(const WaveParams& p, const Share& s)
        : lo(s.lo % UNITS), hi(lo + (s.hi - s.lo)), count((s.hi - s.lo + PASS - 1) / PASS), part(s.lo / UNITS), from(part * part_granules(p)),
          granules(EQUAL && !BY_ROWS ? u32(PART_GRANULES) : min(part_granules(p), UNIT_GRANULES - from)) {}
    static __device__ __forceinline__ u32 part_granules(const WaveParams& p) {
      if constexpr (BY_ROWS) return round_up(ceil_div(u32(UNIT_GRANULES), Parts::count(p.row_count)), u32(ALIGN));
      return PART_GRANULES;
    }
    __device__ __forceinline__ u32 first(u32 pass) const { return WIDE ? min(lo + PASS * pass, hi) : lo + (hi - lo) * pass / count; }
  };

  // ---- the loader ----------------------------------------------------------------------------------------------------
  // Weights are copied as soon as a slot is free, inputs once all blocks have met.
  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e) {
    const Shares<M> shares(l.p, e.division);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= l.p.row_count) continue;
      const Passes passes(l.p, share);
#pragma unroll 1
      for (u32 pass = 0; pass < passes.count; pass++) {
        if constexpr (R::FIRST == 0)
          load_input(l, e, share, passes);
        else
          load_weights(l, e, passes, pass);
      }
    }
  }
  template <class L>
  static __device__ __forceinline__ void load_input(L& l, const Wave& e, const Share& share, const Passes& passes) {
    const u8* x = l.p.work + u64(e.x) * OFFSET_BYTES + X::block(share.row / M::BLOCK_ROWS, passes.from * GRANULE_SPANS / 2);
    const u32 spans = round_up(passes.granules * GRANULE_SPANS, 2u);
#pragma unroll 1
    for (u32 at = 0; at < spans; at += X_SPANS, l.at.next()) {
      const u32 bytes = min(u32(X_SPANS), spans - at) * (M::BLOCK_ROWS * 64);
      u8* slot = l.free_slot();
      l.meet();
      if (l.lane == 0) l.copy(slot, x + u64(at) * (M::BLOCK_ROWS * 64), bytes);
      l.arrive(bytes);
    }
  }
  template <class L>
  static __device__ __forceinline__ void load_weights(L& l, const Wave& e, const Passes& passes, u32 pass) {
    constexpr int FILLERS = WeightRing<M>::FILLERS;
    const u32 here = passes.first(pass + 1) - passes.first(pass), first = passes.first(pass) - first_unit<M>(e);
    if constexpr (SHARED) return load_boxes(l, e, passes, first, here);
    // A copy takes as long as 1 KiB takes to arrive, however short it is. So short pieces come in boxes: of all units of a pass, or of eight units and the rest
    // unit by unit. Every piece of a box has its full length. Beyond the end of a unit it is zeros; beyond the end of a part no warp reads it.
    const bool is_pass = G::BOXED && (here == PASS || here + 1 == PASS);
    const u32 boxes = !G::BOXED ? 0 : is_pass ? 1 : here / BOX_UNITS, boxed = boxes * (is_pass ? here : BOX_UNITS);
    const u32 box = e.boxes + (here == PASS ? 0 : here + 1 == PASS ? 1 : 2);
    const bool copies_box = G::BOXED && l.part == 0 && u32(l.lane) < boxes;
    if (copies_box && l.step == 0) l.see_box(box);
    const u32 unit = boxed + u32(l.part + l.lane * FILLERS); // that this lane copies
    const u8* from = l.p.pack + u64(e.weight) * OFFSET_BYTES + u64(first + unit) * UNIT_BYTES + passes.from * GRANULE;
#pragma unroll 1
    for (u32 at = 0; at < passes.granules; at += G::CHUNK, l.at.next()) {
      const u32 bytes = min(u32(G::CHUNK), passes.granules - at) * GRANULE;
      u8* slot = l.free_slot();
      if (copies_box)
        l.copy_box(slot + l.lane * BOX_UNITS * UNIT_PITCH, box, (passes.from + at) * (GRANULE / 8), first + l.lane * BOX_UNITS);
      if (unit < here) l.copy(slot + unit * UNIT_PITCH, from + at * GRANULE, bytes);
      l.arrive(boxed * UNIT_PITCH + (here - boxed) * bytes);
    }
  }

  // ---- consumers -----------------------------------------------------------------------------------------------------
  // The place of a warp.
  struct Warp {
    int lane, tiles_at, units_at, k_at;
    __device__ __forceinline__ explicit Warp(const WaveContext<M>& c)
        : lane(c.lane()), tiles_at(c.warp() / (UNIT_GROUPS * K_GROUPS) * ROW_TILES),
          units_at(G::TILES ? c.warp() % UNIT_GROUPS : c.warp() / K_GROUPS % UNIT_GROUPS), k_at(G::TILES ? c.warp() / UNIT_GROUPS : c.warp() % K_GROUPS) {}
  };
  // The place of a lane in sums of 8 rows by a unit: its row, and its pair of columns, of which the next one lies COLUMN_LANES further. Sums of tiles are turned
  // by lanes that exchange them (`turned`), which leaves other places than products of warps.
  static constexpr int COLUMN_LANES = G::TILES ? 8 : 1;
  static __device__ __forceinline__ int row_of(int lane) { return G::TILES ? lane % 4 * 2 + lane / 4 % 2 : lane / 4; }
  static __device__ __forceinline__ int pair_of(int lane) { return G::TILES ? lane / 8 : lane % 4; }
  static __device__ __forceinline__ const u8* span_at(const u8* input, int span) { return input + span / 2 * X::BLOCK_BYTES + span % 2 * X::SPAN_BYTES; }

  // Multiplies a step by the N units of the warp, every UNIT_GROUPS-th of the pass. Where the pass has no unit, whatever lies there is multiplied too, and
  // not stored.
  template <int N>
  static __device__ __forceinline__ void multiply(const u8* x, const u8* w, const Warp& at, int granules, float (&d)[ROW_TILES][N][4]) {
    const u8* input = x + at.tiles_at * X::TILE_BYTES + at.lane * 16;
    const u8* weights = w + at.units_at * UNIT_PITCH + at.lane * 16;
    // Without a test for each granule all loads are issued at once.
    if (WHOLE || granules >= STEP_GRANULES) {
#pragma unroll
      for (int i = 0; i < WARP_GRANULES; i++) multiply_granule<N>(input, i * K_GROUPS + at.k_at, words_at<N>(weights, i * K_GROUPS + at.k_at), at.lane, d);
    } else {
#pragma unroll 1
      for (int granule = at.k_at; granule < granules; granule += K_GROUPS) multiply_granule<N>(input, granule, words_at<N>(weights, granule), at.lane, d);
    }
  }
  // The words of a lane of a granule of the n-th unit of its warp.
  template <int N>
  static __device__ __forceinline__ auto words_at(const u8* weights, int granule) {
    return [=](int n) { return *reinterpret_cast<const uint4*>(weights + n * (UNIT_GROUPS * UNIT_PITCH) + granule * GRANULE); };
  }
  template <int N, class Words>
  static __device__ __forceinline__ void multiply_granule(const u8* input, int granule, const Words& words, int lane, float (&d)[ROW_TILES][N][4]) {
#pragma unroll
    for (int p = 0; p < K_PARTS; p++) {
      uint4 a[ROW_TILES], b[ROW_TILES];
      const u8* from = span_at(input, granule * K_PARTS + p);
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++) {
        a[m] = *reinterpret_cast<const uint4*>(from + m * X::TILE_BYTES);
        b[m] = *reinterpret_cast<const uint4*>(from + m * X::TILE_BYTES + X::HALF_BYTES);
      }
#pragma unroll
      for (int n = 0; n < N; n++) {
        uint4 w = words(n);
        // Rows of a granule that belong to other parts of k are multiplied as zeros.
        if (K_PARTS > 1 && lane / 4 / G::UNIT_ROWS != p) w = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
          tensor_product(d[m][n][0], d[m][n][1], d[m][n][2], d[m][n][3], a[m].x, a[m].y, a[m].z, a[m].w, w.x, w.y);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
          tensor_product(d[m][n][0], d[m][n][1], d[m][n][2], d[m][n][3], b[m].x, b[m].y, b[m].z, b[m].w, w.z, w.w);
      }
    }
  }

  // The weights of the first chunks of a wave (HELD). They leave the ring before the blocks meet, so that the loader goes on meanwhile.
  static constexpr int TURN = X_STEPS > W_STEPS ? X_STEPS : W_STEPS; // steps after which a chunk begins in both rings
  static constexpr int STEP_WORDS = WARP_GRANULES * MOST; // words of 16 bytes that a lane multiplies in a step
  static_assert(G::HELD == 0 || (M::STEPS && !G::PAIRED && !Codes::CODED && G::HELD * W_STEPS % TURN == 0), "what a warp may hold");
  struct Held {
    uint4 words[G::HELD * W_STEPS * STEP_WORDS];
    __device__ __forceinline__ void take(WaveContext<M>& c) {
      // Zeros, or else registers without a value would count as in use throughout the kernel.
      if (c.next_shares() == 0) {
#pragma unroll
        for (uint4& word : words) word = make_uint4(0, 0, 0, 0);
        return;
      }
      const Warp at(c);
      wave_take_many<G::HELD>(c, c.weights, [&](int chunk, const u8* from) {
        const u8* weights = from + at.units_at * UNIT_PITCH + at.lane * 16;
#pragma unroll
        for (int i = 0; i < W_STEPS * WARP_GRANULES; i++)
#pragma unroll
          for (int n = 0; n < MOST; n++) words[(chunk * W_STEPS * WARP_GRANULES + i) * MOST + n] = words_at<MOST>(weights, i * K_GROUPS + at.k_at)(n);
      });
    }
    // Multiplies the weights by the first chunks of the input.
    __device__ __forceinline__ void multiply(WaveContext<M>& c, const Warp& at, float (&d)[ROW_TILES][MOST][4]) const {
      WaveChunk<InputRing<M>> x;
      const WaveChunk<WeightRing<M>> none;
#pragma unroll
      for (int step = 0; step < G::HELD * W_STEPS; step++) {
        if (step % X_STEPS == 0) {
          wave_take(c, c.inputs);
          x.take(c, c.inputs);
        }
        const u8* input = x.at + step % X_STEPS * (STEP / 2) * X::BLOCK_BYTES + at.tiles_at * X::TILE_BYTES + at.lane * 16;
#pragma unroll
        for (int i = 0; i < WARP_GRANULES; i++)
          multiply_granule<MOST>(input, i * K_GROUPS + at.k_at, [&](int n) { return words[step * STEP_WORDS + i * MOST + n]; }, at.lane, d);
        wave_leave(c, x, none, step % X_STEPS == X_STEPS - 1, false);
      }
    }
  };

  // The same of codes. The sums of a group are scaled before they are added up.
  template <int N>
  static __device__ __forceinline__ void multiply_codes(const u8* x, const u8* w, const Warp& at, int granules, float (&d)[ROW_TILES][N][4]) {
#pragma unroll 1
    for (int granule = at.k_at; granule < (WHOLE ? STEP_GRANULES : min(granules, STEP_GRANULES)); granule += K_GROUPS)
      multiply_granule_codes<N>(x + at.tiles_at * X::TILE_BYTES + at.lane * 16, granule, w + at.units_at * UNIT_PITCH + granule * GRANULE, at.lane, d);
  }
  template <int N>
  static __device__ __forceinline__ void multiply_granule_codes(const u8* input, int granule, const u8* weights, int lane, float (&d)[ROW_TILES][N][4]) {
    typename Codes::Held w[N];
#pragma unroll
    for (int i = 0; i < N; i++) w[i].read(weights + i * (UNIT_GROUPS * UNIT_PITCH), lane, lane % 4 * 2);
    const uint2 one = Codes::Operand::constant(G::ZEROS ? 1 : Codes::OFFSET);
#pragma unroll
    for (int group = 0; group < Codes::GROUPS; group++) {
      float own[Codes::GROUPED ? ROW_TILES : 1][Codes::GROUPED ? N : 1][4] = {}, sums[Codes::SUMS_X ? ROW_TILES : 1][4] = {};
#pragma unroll
      for (int block = group * Codes::GROUP_BLOCKS; block < (group + 1) * Codes::GROUP_BLOCKS; block++) {
        uint4 a[ROW_TILES], b[ROW_TILES];
        const u8* from = span_at(input, granule * GRANULE_SPANS + block);
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          a[m] = *reinterpret_cast<const uint4*>(from + m * X::TILE_BYTES);
          b[m] = *reinterpret_cast<const uint4*>(from + m * X::TILE_BYTES + X::HALF_BYTES);
          Codes::meet(a[m], b[m]);
          if constexpr (Codes::SUMS_X) {
            tensor_product(sums[m][0], sums[m][1], sums[m][2], sums[m][3], a[m].x, a[m].y, a[m].z, a[m].w, one.x, one.y);
            tensor_product(sums[m][0], sums[m][1], sums[m][2], sums[m][3], b[m].x, b[m].y, b[m].z, b[m].w, one.x, one.y);
          }
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
          const uint4 v = Codes::Operand::eight(w[i].codes, block);
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++) {
            float(&to)[4] = pick<Codes::GROUPED>(own[Codes::GROUPED ? m : 0][Codes::GROUPED ? i : 0], d[m][i]);
            tensor_product(to[0], to[1], to[2], to[3], a[m].x, a[m].y, a[m].z, a[m].w, v.x, v.y);
          }
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++) {
            float(&to)[4] = pick<Codes::GROUPED>(own[Codes::GROUPED ? m : 0][Codes::GROUPED ? i : 0], d[m][i]);
            tensor_product(to[0], to[1], to[2], to[3], b[m].x, b[m].y, b[m].z, b[m].w, v.z, v.w);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const float taken = Codes::taken(w[i], k % 2, group, sums[Codes::SUMS_X ? m : 0][k]);
            if constexpr (Codes::GROUPED)
              d[m][i][k] += w[i].scale(k % 2, group) * (own[m][i][k] - taken);
            else
              d[m][i][k] -= taken;
          }
    }
  }
  template <bool FIRST>
  static __device__ __forceinline__ float (&pick(float (&first)[4], float (&second)[4]))[4] {
    if constexpr (FIRST)
      return first;
    else
      return second;
  }

  // The best logits that a lane has found, of rows lane / 4 and lane / 4 + 8 of its tiles.
  struct Best {
    float score[ROW_TILES][2];
    int id[ROW_TILES][2];
    __device__ __forceinline__ void begin() {
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) score[m][h] = NEGATIVE_INFINITY, id[m][h] = 0x7fffffff;
    }
  };
  // Whether sums of a warp leave no registers for what only the end of a pass needs.
  static constexpr bool MANY_ROWS = ROW_TILES > 4;
  // The best then lie in scratch between passes, unless groups of k exchange their sums there.
  static constexpr bool BEST_MEETS = G::EPILOGUE == Epilogue::LOGITS && MANY_ROWS && K_GROUPS == 1;
  // The factors of the input's norm follow from sums of squares that blocks have left (`square_at`). A warp has four rows at a time, and a lane every 32nd part of
  // them: so whatever the number of rows of a block is, a row has the same sum. They are asked for before the products, and arrive meanwhile.
  struct Squares {
    static constexpr int ROUNDS = ceil_div(M::BLOCK_ROWS / 4, M::WARPS), PARTS = M::SQUARE_PARTS > 32 ? ceil_div(M::SQUARE_PARTS, 32) : 1;
    // More than a lane can hold while it multiplies are awaited before the products.
    static constexpr bool HELD = ROUNDS * PARTS <= 8;
    float4 of[ROUNDS][PARTS];
    static __device__ __forceinline__ u32 first_row(const WaveContext<M>& c, int round) { return u32(round * M::WARPS + c.warp()) * 4; }
    // `block_row`: where the block of rows begins.
    __device__ __forceinline__ void ask(const WaveContext<M>& c, const Wave& e, u32 block_row = 0) {
      static_assert((M::STEPS || SHARED) && M::BLOCK_ROWS % 4 == 0, "warps have four rows at a time");
      static_assert(!G::PAIRED, "no product in pairs has an input that lacks a factor");
      const u32 parts = e.square_parts;
      const float* from = c.template work<float>(e.squares);
#pragma unroll
      for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          const u32 part = u32(i * 32 + c.lane()), row = first_row(c, r);
          of[r][i] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (part < parts && row < M::BLOCK_ROWS) of[r][i] = *reinterpret_cast<const float4*>(from + square_at(parts, part, block_row + row));
        }
      if constexpr (!HELD) leave_factors(c);
    }
    // All warps see the factors after the next barrier.
    __device__ __forceinline__ void leave_factors(const WaveContext<M>& c) const {
      const int lane = c.lane();
#pragma unroll
      for (int r = 0; r < ROUNDS; r++) {
        float4 sum = of[r][0];
#pragma unroll
        for (int i = 1; i < PARTS; i++) sum.x += of[r][i].x, sum.y += of[r][i].y, sum.z += of[r][i].z, sum.w += of[r][i].w;
        // Lanes add up in pairs. Of four rows each gives two away, then one of two.
        const bool last = lane & 16, odd = lane & 8;
        const float a = (last ? sum.z : sum.x) + __shfl_xor_sync(~0u, last ? sum.x : sum.z, 16), b = (last ? sum.w : sum.y) + __shfl_xor_sync(~0u, last ? sum.y : sum.w, 16);
        float all = (odd ? b : a) + __shfl_xor_sync(~0u, odd ? a : b, 8);
#pragma unroll
        for (int o = 4; o > 0; o >>= 1) all += __shfl_xor_sync(~0u, all, o);
        const u32 row = first_row(c, r) + lane / 8;
        if (lane % 8 == 0 && row < M::BLOCK_ROWS) c.state().factors[row] = rsqrtf(all * (1.f / G::K) + G::NORM_EPS);
      }
    }
  };
  // Of a chunk: whether the input lacks the factor in this launch.
  static __device__ __forceinline__ bool lacks_factor(const WaveContext<M>& c, const Wave& e) {
    return e.square_parts > 0 && e.square_splits / PartsOfRows<M, 1>::blocks(c.p.row_count) <= 1;
  }
  // By the whole block: the factors of the rows of a share, before its products. Those of the share before may still be read.
  static __device__ __forceinline__ void take_factors(WaveContext<M>& c, const Wave& e, u32 block_row) {
    if (!lacks_factor(c, e)) return;
    c.barrier();
    Squares squares;
    squares.ask(c, e, block_row);
    if constexpr (Squares::HELD) squares.leave_factors(c);
    c.barrier();
  }
  // Completes the sums of columns 2 t and 2 t + 1 of a unit, of one row: parts of k of a granule, factors, scales and bias. By whole warps.
  static __device__ __forceinline__ float2 settled(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, int row, int t, float2 y) {
    // Lanes side by side have the parts of k of a row.
    if constexpr (K_PARTS == 4) {
      y.x += __shfl_xor_sync(~0u, y.x, 1), y.y += __shfl_xor_sync(~0u, y.y, 1);
    }
    if constexpr (K_PARTS >= 2) {
      y.x += __shfl_xor_sync(~0u, y.x, 2), y.y += __shfl_xor_sync(~0u, y.y, 2);
    }
    constexpr int PAIRS = G::UNIT_ROWS / 2;
    if constexpr (G::FACTOR && !SHARED) {
      const float factor = c.state().factors[row];
      y.x *= factor, y.y *= factor;
    }
    if constexpr (Codes::CODED) y.x *= Codes::FACTOR, y.y *= Codes::FACTOR;
    if constexpr (Codes::ROW_SCALES) {
      const float2 scale = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.row_scales) + unit * G::UNIT_ROWS + t * 2));
      y.x *= scale.x, y.y *= scale.y;
    }
    if constexpr (G::BIAS)
      if (t < PAIRS && part == 0) {
        const float2 b = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.bias) + unit * G::UNIT_ROWS + t * 2));
        y.x += b.x, y.y += b.y;
      }
    return y;
  }
  // Whether the residual has pairs of columns, which are loaded and stored together.
  static constexpr bool ADDS_PAIRS = G::EPILOGUE == Epilogue::RESIDUAL && G::ROWS % 2 == 0 && !G::PACKETS && G::SPLITS == 1;
  // Adds N sums to the residual, at `residual + offset(i)` where `exists(i)`. All old values are loaded before the first is stored: the compiler keeps the order of
  // loads and stores, so each load would wait for L2.
  template <int N, class Exists, class Offset, class Sums>
  static __device__ __forceinline__ void add_all(const WaveContext<M>& c, float* residual, const Exists& exists, const Offset& offset, const Sums& sum) {
    float2 old[N];
#pragma unroll
    for (int i = 0; i < N; i++) old[i] = exists(i) ? *reinterpret_cast<const float2*>(residual + offset(i)) : make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float2 y = sum(i);
      if (exists(i)) c.template give<residual_everywhere<M, G>()>(reinterpret_cast<float2*>(residual + offset(i)), make_float2(old[i].x + G::SCALE * y.x, old[i].y + G::SCALE * y.y));
    }
  }
  // Of columns 2 t and 2 t + 1 of a unit.
  static __device__ __forceinline__ float* residual_at(const WaveContext<M>& c, const Wave& e, u32 unit, int row, int t) {
    return c.template work<float>(e.residual) + u64(row) * G::ROWS + unit * G::UNIT_ROWS + t * 2;
  }
  static __device__ __forceinline__ bool is_column(u32 unit, int t) { return t < G::UNIT_ROWS / 2 && unit * G::UNIT_ROWS + t * 2 < u32(G::ROWS); }
  // Completes and stores columns 2 t and 2 t + 1 of a unit, of one row. By all lanes: the noise of a logit is computed in a function, which all lanes of a warp
  // must call together.
  static __device__ __forceinline__ void finish(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, int row, int t, float2 y, float& best, int& best_id) {
    y = settled(c, e, part, unit, row, t, y);
    constexpr int PAIRS = G::UNIT_ROWS / 2;
    const bool exists = u32(row) < c.p.row_count;
    if constexpr (G::EPILOGUE == Epilogue::GATED) {
      const float2 up = make_float2(__shfl_xor_sync(~0u, y.x, 2 * COLUMN_LANES), __shfl_xor_sync(~0u, y.y, 2 * COLUMN_LANES));
      const int col = int(unit) * 4 + t * 2;
      if (t < 2 && col < G::ROWS / 2 && exists) put<G::ROWS / 2>(c, e, row, col, activate_scaled<G>(y.x) * up.x, activate_scaled<G>(y.y) * up.y);
    } else if constexpr (G::EPILOGUE == Epilogue::LOGITS) {
      const int id = int(unit) * G::UNIT_ROWS + t * 2;
      logits(c, t < PAIRS && exists, row, id, y, best, best_id);
    } else {
      const int col = int(unit) * G::UNIT_ROWS + t * 2;
      if (t >= PAIRS || col >= G::ROWS || !exists) return;
      if constexpr (G::PACKETS) {
        c.template give_packets<everywhere<M, G>()>(c.template work<u64>(e.out) + (u64(part) * M::BLOCK_ROWS + row) * G::ROWS + col, y);
      } else if constexpr (G::SPLITS > 1) {
        float* at = c.template work<float>(G::SUMS ? e.branch : e.out) + (u64(part) * Parts::pitch(c.p.row_count) + row) * G::ROWS + col;
        c.template give<everywhere<M, G>()>(reinterpret_cast<float2*>(at), y);
      } else if constexpr (G::EPILOGUE == Epilogue::RESIDUAL) {
        float* at = c.template work<float>(e.residual) + u64(row) * G::ROWS + col;
        if (G::ROWS % 2 == 0) {
          float2* pair = reinterpret_cast<float2*>(at);
          const float2 old = *pair;
          c.template give<residual_everywhere<M, G>()>(pair, make_float2(old.x + G::SCALE * y.x, old.y + G::SCALE * y.y));
        } else {
          c.template give<residual_everywhere<M, G>()>(at, at[0] + G::SCALE * y.x);
          if (col + 1 < G::ROWS) c.template give<residual_everywhere<M, G>()>(at + 1, at[1] + G::SCALE * y.y);
        }
      } else {
        if constexpr (G::EPILOGUE == Epilogue::ACT) y = make_float2(activate<G::ACT>(y.x), activate<G::ACT>(y.y));
        put<G::ROWS>(c, e, row, col, y.x, y.y);
      }
    }
  }
  // Columns 4 u + 2 t of two GATED units u, of one row: half of the lanes complete the first unit, and half the second one.
  static __device__ __forceinline__ u32 gated(int t, float2 y, float2 z) {
    const bool has_gates = t < 2;
    const float2 given = has_gates ? z : y;
    const float2 got = make_float2(__shfl_xor_sync(~0u, given.x, 2 * COLUMN_LANES), __shfl_xor_sync(~0u, given.y, 2 * COLUMN_LANES));
    const float2 gate = has_gates ? y : got, up = has_gates ? got : z;
    return bf16_pair(activate_scaled<G>(gate.x) * up.x, activate_scaled<G>(gate.y) * up.y);
  }
  // Completes and stores two GATED units, of all rows of a warp. What has to be known for it is known before the first row is stored, and no branch is around what
  // is computed: so many rows overlap.
  template <int N>
  static __device__ __forceinline__ void finish_two(const WaveContext<M>& c, const Wave& e, u32 first, bool both, const Warp& at, const float (&d)[ROW_TILES][N][4], int i) {
    constexpr int COLS = G::ROWS / 2;
    typedef OutPlace<M, G, COLS> Place;
    const u32 row = u32(at.tiles_at * 16 + row_of(at.lane)), second = both ? first + UNIT_GROUPS : first;
    const int t = pair_of(at.lane);
    const u32 col = (t < 2 ? first : second) * 4 + u32(t % 2 * 2);
    u8* const out = c.template work<u8>(e.out) + (G::PLAIN ? (u64(row) * COLS + col) * 2 : u64(Place::at(row, col)));
    const u32 rows = (t < 2 || both) && col < u32(COLS) ? c.p.row_count : 0; // that this lane stores
    u32 made[ROW_TILES * 2];
#pragma unroll
    for (int k = 0; k < ROW_TILES * 2; k++) {
      const float2 y = settled(c, e, 0, first, int(row) + k * 8, t, half(d[k / 2][i], k % 2)), z = settled(c, e, 0, second, int(row) + k * 8, t, half(d[k / 2][i + 1], k % 2));
      made[k] = made_here(gated(t, y, z));
    }
#pragma unroll
    for (int k = 0; k < ROW_TILES * 2; k++)
      if (row + k * 8 < rows) c.template give<everywhere<M, G>()>(reinterpret_cast<u32*>(out + (G::PLAIN ? u32(k) * 16 * COLS : Place::eights(k))), made[k]);
  }
  static __device__ __forceinline__ float2 half(const float (&of)[4], int h) { return make_float2(of[2 * h], of[2 * h + 1]); }
  // The same for a unit of a part of k, whose sums are stored as they are.
  template <int N>
  static __device__ __forceinline__ void finish_part(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, const Warp& at, const float (&d)[ROW_TILES][N][4], int i) {
    static_assert(G::ROWS % 2 == 0, "columns are stored in pairs");
    const u32 row = u32(at.tiles_at * 16 + row_of(at.lane));
    const int t = pair_of(at.lane);
    const u32 col = unit * G::UNIT_ROWS + u32(t * 2);
    u64* const out = reinterpret_cast<u64*>(c.template work<float>(e.out) + (u64(part) * M::BLOCK_ROWS + row) * G::ROWS + col);
    const u32 rows = col < u32(G::ROWS) ? c.p.row_count : 0;
#pragma unroll
    for (int k = 0; k < ROW_TILES * 2; k++) {
      const float2 y = settled(c, e, part, unit, int(row) + k * 8, t, half(d[k / 2][i], k % 2));
      if (row + k * 8 < rows) c.template give<everywhere<M, G>()>(out + k * 4 * G::ROWS, u64(__float_as_uint(y.y)) << 32 | __float_as_uint(y.x));
    }
  }
  template <int COLS>
  static __device__ __forceinline__ void put(const WaveContext<M>& c, const Wave& e, int row, int col, float a, float b) {
    static_assert(COLS % 2 == 0, "columns are stored in pairs");
    u8* out = c.template work<u8>(e.out);
    u32* const to = reinterpret_cast<u32*>(out + (G::PLAIN ? (u64(row) * COLS + col) * 2 : u64(OutPlace<M, G, COLS>::at(u32(row), u32(col)))));
    c.template give<everywhere<M, G>()>(to, bf16_pair(a, b));
  }
  static __device__ __forceinline__ void logits(const WaveContext<M>& c, bool live, int row, int id, float2 y, float& best, int& best_id) {
    const WaveParams& p = c.p;
    const Row* r = p.rows + (live ? row : 0);
    const float inverse_temperature = __ldg(&r->inverse_temperature);
    const bool noisy = __any_sync(~0u, live && inverse_temperature > 0.f);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float v = softcap((i == 0 ? y.x : y.y) * G::SCALE, G::SOFTCAP);
      const bool exists = live && id + i < G::ROWS;
      if (p.logits && exists && c.step + 1 == p.steps) p.logits[u64(row) * G::ROWS + id + i] = v;
      float score = v;
      // The noise belongs to the token that this step decides.
      if (noisy) {
        const float with = mul_add(v, inverse_temperature, noise(u64(__ldg(&r->seed_high)) << 32 | __ldg(&r->seed_low), __ldg(&r->position) + c.step + 1, u32(id + i)));
        if (inverse_temperature > 0.f) score = with;
      }
      if (exists) argmax_take(best, best_id, score, id + i);
    }
  }
  // Leaves the best of a tile's rows that a warp has found in its place of scratch; with `adds` the better of both.
  static __device__ __forceinline__ void leave_best(const WaveContext<M>& c, const Warp& at, int tile, float (&score)[2], int (&id)[2], bool adds) {
    BestLogit* met = reinterpret_cast<BestLogit*>(c.scratch()); // [groups of units and k][row]
    static_assert(M::BLOCK_ROWS * UNIT_GROUPS * K_GROUPS * sizeof(BestLogit) <= M::SCRATCH_BYTES, "the best of all groups meet");
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int o = 1; o < 4; o <<= 1) {
        const float v = __shfl_xor_sync(~0u, score[h], o * COLUMN_LANES);
        const int i = __shfl_xor_sync(~0u, id[h], o * COLUMN_LANES);
        argmax_take(score[h], id[h], v, i);
      }
      if (pair_of(at.lane) == 0) {
        BestLogit& to = met[(at.units_at * K_GROUPS + at.k_at) * M::BLOCK_ROWS + (at.tiles_at + tile) * 16 + h * 8 + row_of(at.lane)];
        if (adds) argmax_take(score[h], id[h], to.score, to.id);
        to = BestLogit{score[h], id[h]};
      }
    }
  }
  static __device__ __forceinline__ void leave_best(const WaveContext<M>& c, const Warp& at, Best& best, bool adds) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) leave_best(c, at, m, best.score[m], best.id[m], adds);
  }
  // Stores the block's best logit of each row, over all its passes and shares.
  static __device__ __forceinline__ void tell_best(WaveContext<M>& c, const Wave& e, const Warp& at, Best& best) {
    const BestLogit* met = reinterpret_cast<const BestLogit*>(c.scratch());
    if constexpr (!BEST_MEETS) {
      c.barrier();
      leave_best(c, at, best, false);
    }
    c.barrier();
    if (c.tid() >= M::BLOCK_ROWS) return;
    BestLogit most = met[c.tid()];
#pragma unroll
    for (int i = 1; i < UNIT_GROUPS * K_GROUPS; i++) {
      const BestLogit v = met[i * M::BLOCK_ROWS + c.tid()];
      argmax_take(most.score, most.id, v.score, v.id);
    }
    c.template give<everywhere<M, G>()>(c.template work<BestLogit>(e.out) + u64(c.tid()) * all_blocks<M>() + block_number<M>(c.p), most);
  }

  template <int N>
  static __device__ __forceinline__ void pass(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here, Best& best, const Squares& squares, bool is_first) {
    const Warp at(c);
    PairEnds<N> ends;
    // What the end of a pair needs arrives while warps multiply, or while they send if sums leave no registers for it.
    if constexpr (G::PAIRED && !MANY_ROWS) ends.ask(c, e, passes.part, first, here, at);
    float d[ROW_TILES][N][4] = {};
    if constexpr (G::TILES)
      multiply_tiles(c, passes, at, here, d);
    else
      multiply_pass<N>(c, passes, at, 0, d);
    if constexpr (G::PAIRED && MANY_ROWS) ends.ask(c, e, passes.part, first, here, at);
    if constexpr (BEST_MEETS && G::TILES) {
      end_logits<N>(c, e, share, passes.part, first, here, at, squares, is_first, d);
    } else {
      if constexpr (BEST_MEETS) best.begin();
      end_pass<N>(c, e, share, passes, first, here, at, best, squares, is_first, d, ends);
      if constexpr (BEST_MEETS) leave_best(c, at, best, true);
    }
  }
  // Logits of many tiles of rows: a loop in which sums move down. Straight code for them takes as long to compile as all other ops, and spills.
  template <int N>
  static __device__ __forceinline__ void end_logits(WaveContext<M>& c, const Wave& shared, const Share& share, u32 part, u32 first, u32 here, const Warp& at, const Squares& squares, bool is_first,
                                                    float (&d)[ROW_TILES][N][4]) {
    leave_first_factors(c, squares, is_first);
    const Wave e = shared; // in registers for the loop
    const int g = row_of(at.lane), t = pair_of(at.lane);
#pragma unroll 1
    for (int m = 0; m < ROW_TILES; m++) {
      float score[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
      int id[2] = {0x7fffffff, 0x7fffffff};
      const int row = int(share.row) + (at.tiles_at + m) * 16 + g;
#pragma unroll
      for (int i = 0; i < N; i++) {
        const u32 unit = u32(i * UNIT_GROUPS + at.units_at);
        if (unit >= here) continue;
        finish(c, e, part, first + unit, row, t, make_float2(d[0][i][0], d[0][i][1]), score[0], id[0]);
        finish(c, e, part, first + unit, row + 8, t, make_float2(d[0][i][2], d[0][i][3]), score[1], id[1]);
      }
      leave_best(c, at, m, score, id, true);
#pragma unroll
      for (int k = 0; k + 1 < ROW_TILES; k++)
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) d[k][i][j] = d[k + 1][i][j];
    }
  }
  // Of the first pass: the factors that its rows lack.
  static __device__ __forceinline__ void leave_first_factors(WaveContext<M>& c, const Squares& squares, bool is_first) {
    if constexpr (G::FACTOR)
      if (is_first) {
        if constexpr (Squares::HELD) squares.leave_factors(c);
        if (K_GROUPS == 1) c.barrier(); // groups of k meet in any case
      }
  }
  // Multiplies chunks, all but the first `done`, which must be whole turns.
  template <int N>
  static __device__ __forceinline__ void multiply_pass(WaveContext<M>& c, const Passes& passes, const Warp& at, int done, float (&d)[ROW_TILES][N][4]) {
    const int granules = int(passes.granules), steps = ceil_div(granules, STEP_GRANULES);
    // Each step of a turn has its own code, because a branch takes as long as several products.
    constexpr bool TURNS = WHOLE && PART_GRANULES / STEP_GRANULES % TURN == 0;
    WaveChunk<InputRing<M>> x;
    WaveChunk<WeightRing<M>> w;
    bool seen = wave_look(c, c.inputs, c.weights, true, true);
#pragma unroll 1
    for (int turn = done * W_STEPS; turn < steps; turn += TURN) {
#pragma unroll
      for (int i = 0; i < TURN; i++) {
        const int step = turn + i;
        if (!TURNS && i > 0 && step >= steps) break;
        wave_await(c, c.inputs, c.weights, seen, i % X_STEPS == 0, i % W_STEPS == 0);
        if (i % X_STEPS == 0) x.take(c, c.inputs);
        if (i % W_STEPS == 0) w.take(c, c.weights);
        // Its result arrives while the products of this step run.
        seen = wave_look(c, c.inputs, c.weights, (i + 1) % X_STEPS == 0, (i + 1) % W_STEPS == 0);
        const u8* input = x.at + i % X_STEPS * (STEP / 2) * X::BLOCK_BYTES;
        const u8* weights = w.at + i % W_STEPS * STEP_GRANULES * GRANULE;
        const int left = granules - step * STEP_GRANULES;
        if constexpr (Codes::CODED)
          multiply_codes<N>(input, weights, at, left, d);
        else
          multiply<N>(input, weights, at, left, d);
        const bool last = !TURNS && step + 1 == steps;
        wave_leave(c, x, w, last || i % X_STEPS == X_STEPS - 1, last || i % W_STEPS == W_STEPS - 1);
      }
    }
  }
  template <int N, class Ends>
  static __device__ __forceinline__ void end_pass(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here, const Warp& at, Best& best, const Squares& squares,
                                                  bool is_first, const float (&d)[ROW_TILES][N][4], const Ends& ends) {
    leave_first_factors(c, squares, is_first);
    if constexpr (G::PAIRED) return end_pair<N>(c, e, passes.part, first, here, at, d, ends);
    const int g = row_of(at.lane), t = pair_of(at.lane);
    const auto done = [&](int m, int i, const float4& v) {
      const u32 unit = u32(i * UNIT_GROUPS + at.units_at);
      const int row = int(share.row) + (at.tiles_at + m) * 16 + g;
      const int own = G::EPILOGUE == Epilogue::LOGITS ? m : 0;
      finish(c, e, passes.part, first + unit, row, t, make_float2(v.x, v.y), best.score[own][0], best.id[own][0]);
      finish(c, e, passes.part, first + unit, row + 8, t, make_float2(v.z, v.w), best.score[own][1], best.id[own][1]);
    };
    if constexpr (K_GROUPS == 1 && G::TILES && G::EPILOGUE == Epilogue::GATED) {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const u32 unit = u32(i * UNIT_GROUPS + at.units_at);
        if (unit >= here) break;
        finish_two(c, e, first + unit, unit + UNIT_GROUPS < here, at, d, i);
      }
    } else if constexpr (K_GROUPS == 1 && G::TILES && G::SPLITS > 1 && !G::PACKETS) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        const u32 unit = u32(i * UNIT_GROUPS + at.units_at);
        if (unit < here) finish_part(c, e, passes.part, first + unit, at, d, i);
      }
    } else if constexpr (K_GROUPS == 1 && G::TILES) {
      // Row by row: what logits need to know of a row is loaded once.
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int i = 0; i < N; i++)
          if (u32(i * UNIT_GROUPS + at.units_at) < here) done(m, i, make_float4(d[m][i][0], d[m][i][1], d[m][i][2], d[m][i][3]));
    } else if constexpr (K_GROUPS == 1 && (!M::STEPS || G::EPILOGUE == Epilogue::LOGITS)) {
#pragma unroll
      for (int i = 0; i < N; i++) {
        if (u32(i * UNIT_GROUPS + at.units_at) >= here) break;
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) done(m, i, make_float4(d[m][i][0], d[m][i][1], d[m][i][2], d[m][i][3]));
      }
    } else {
      // Each group of k has sums of all tiles (16 rows by a unit) and completes every K_GROUPS-th of them. [group of rows and units][tile][group of k][lane].
      // With one group of k this is done for the sake of the loop: its instructions are fetched once.
      constexpr int ROOM = M::SCRATCH_BYTES / (M::WARPS * ROW_TILES * 512), ROUND_UNITS = ROOM < N ? ROOM : N; // of a warp at once
      static_assert(ROUND_UNITS > 0, "a tile of each warp");
      float4* met = reinterpret_cast<float4*>(c.scratch()) + (at.tiles_at / ROW_TILES * UNIT_GROUPS + at.units_at) * (ROW_TILES * ROUND_UNITS * K_GROUPS * 32) + at.lane;
#pragma unroll
      for (int begin = 0; begin < N; begin += ROUND_UNITS) {
        constexpr int TILES = ROW_TILES * ROUND_UNITS;
        if (K_GROUPS > 1) c.barrier();
#pragma unroll
        for (int i = begin; i < begin + ROUND_UNITS && i < N; i++)
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++)
            met[(((i - begin) * ROW_TILES + m) * K_GROUPS + at.k_at) * 32] = make_float4(d[m][i][0], d[m][i][1], d[m][i][2], d[m][i][3]);
        if (K_GROUPS > 1) c.barrier();
#pragma unroll 1
        for (u32 tile = at.k_at; tile < TILES; tile += K_GROUPS) {
          const int i = begin + int(tile / ROW_TILES), m = int(tile % ROW_TILES);
          if (i >= N || u32(i * UNIT_GROUPS + at.units_at) >= here) break;
          float4 sum = met[tile * K_GROUPS * 32];
#pragma unroll
          for (int k = 1; k < K_GROUPS; k++) {
            const float4 v = met[(tile * K_GROUPS + k) * 32];
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
          }
          if constexpr (G::EPILOGUE != Epilogue::LOGITS)
            done(m, i, sum);
          else
#pragma unroll
            for (int own = 0; own < ROW_TILES; own++)
              if (own == m) done(own, i, sum);
        }
      }
    }
  }
  // The end of a PAIRED product. The blocks of a pair have the two parts of k of the same units. Each completes eight rows of every 16, from its own sums
  // and from those that the other block sends. The groups of k of a block add up first.
  static constexpr int PAIR_ROWS = M::BLOCK_ROWS / 2;
  static constexpr int INBOX_BYTES = MOST * UNIT_GROUPS * PAIR_ROWS * 32, SQUARES_BYTES = MOST * UNIT_GROUPS * PAIR_ROWS * 4;
  // Each of the second half of the groups of k leaves its sums, and one of the first half adds its own in place. So scratch has PAIR_SUMS sums of a tile,
  // and room for PAIR_ROOM units of a warp at once.
  static constexpr int PAIR_SUMS = K_GROUPS > 1 ? K_GROUPS / 2 : 1;
  static constexpr int PAIR_ROOM = (M::SCRATCH_BYTES - INBOX_BYTES - SQUARES_BYTES) / (M::WARPS / K_GROUPS * PAIR_SUMS * ROW_TILES * 512);
  // The tiles that a warp completes: their units and rows, and the residual and the norm's weight there.
  template <int N>
  struct PairEnds {
    static constexpr int ROUND_UNITS = PAIR_ROOM < 1 ? 1 : PAIR_ROOM < N ? PAIR_ROOM : N, TILES = ROW_TILES * ROUND_UNITS, ROUNDS = ceil_div(N, ROUND_UNITS), OWN = ceil_div(TILES, K_GROUPS);
    float2 old[ROUNDS][OWN], gain[ROUNDS][OWN];
    struct Tile {
      int i, m, row, col;
      u32 unit;
      bool ends, exists;
    };
    static __device__ __forceinline__ Tile tile(const WaveContext<M>& c, u32 part, u32 first, u32 here, const Warp& at, int round, int own) {
      Tile to;
      const int n = own * K_GROUPS + at.k_at;
      to.i = round * ROUND_UNITS + n / ROW_TILES;
      to.m = n % ROW_TILES;
      to.unit = u32(to.i * UNIT_GROUPS + at.units_at);
      to.ends = n < TILES && to.i < N && to.unit < here;
      to.row = (at.tiles_at + to.m) * 16 + int(part) * 8 + row_of(at.lane);
      to.col = int(first + to.unit) * G::UNIT_ROWS + pair_of(at.lane) * 2;
      to.exists = to.ends && pair_of(at.lane) < G::UNIT_ROWS / 2 && to.col < G::ROWS && u32(to.row) < c.p.row_count;
      return to;
    }
    // Loads both ahead of the end.
    __device__ __forceinline__ void ask(const WaveContext<M>& c, const Wave& e, u32 part, u32 first, u32 here, const Warp& at) {
      const float* const residual = c.template work<float>(e.residual);
      const bool has_gain = G::OUT && e.norm_weight != ~0u;
      const float* const gains = c.template constant<float>(has_gain ? e.norm_weight : 0);
#pragma unroll
      for (int r = 0; r < ROUNDS; r++)
#pragma unroll
        for (int n = 0; n < OWN; n++) {
          const Tile to = tile(c, part, first, here, at, r, n);
          old[r][n] = make_float2(0.f, 0.f);
          gain[r][n] = make_float2(1.f, 1.f);
          if (!to.exists) continue;
          old[r][n] = *reinterpret_cast<const float2*>(residual + u64(to.row) * G::ROWS + to.col);
          if (has_gain) gain[r][n] = __ldg(reinterpret_cast<const float2*>(gains + to.col));
        }
    }
  };
  template <int N>
  static __device__ __forceinline__ void end_pair(WaveContext<M>& c, const Wave& e, u32 part, u32 first, u32 here, const Warp& at, const float (&d)[ROW_TILES][N][4],
                                                  const PairEnds<N>& ends) {
    typedef PairEnds<N> E;
    static_assert(PAIR_ROOM > 0, "a tile of each warp");
    u8* const scratch = reinterpret_cast<u8*>(c.scratch());
    float2* const inbox = reinterpret_cast<float2*>(scratch + M::SCRATCH_BYTES - INBOX_BYTES - SQUARES_BYTES);
    float* const squares = reinterpret_cast<float*>(scratch + M::SCRATCH_BYTES - SQUARES_BYTES);
    u64* const paired = &c.state().paired;
    const int group = at.tiles_at / ROW_TILES * UNIT_GROUPS + at.units_at, g = row_of(at.lane), t = pair_of(at.lane);
    const u32 inbox_of_peer = peer_address(inbox), paired_of_peer = peer_address(paired);
    float4* const met = reinterpret_cast<float4*>(scratch) + group * (E::TILES * PAIR_SUMS * 32) + at.lane; // [tile][group of k][lane]
    const auto place = [&](const typename E::Tile& to) { return ((group * N + to.i) * ROW_TILES + to.m) * 32 + at.lane; };
    // In a launch that is lost nothing is sent: no store may be on its way when a block ends, and a barrier counts at most 1 MiB.
    const bool lost = c.lost();
    if (c.tid() == 0 && !lost) expect_bytes(paired, here * (PAIR_ROWS * 32));
    fence_before_sending();
    float2 own[E::ROUNDS][E::OWN] = {};
#pragma unroll
    for (int r = 0; r < E::ROUNDS; r++) {
      if (r > 0) c.barrier();
      const auto meet = [&](bool adds) {
#pragma unroll
        for (int i = r * E::ROUND_UNITS; i < (r + 1) * E::ROUND_UNITS && i < N; i++)
#pragma unroll
          for (int m = 0; m < ROW_TILES; m++) {
            float4& to = met[(((i - r * E::ROUND_UNITS) * ROW_TILES + m) * PAIR_SUMS + at.k_at % PAIR_SUMS) * 32];
            float4 sum = make_float4(d[m][i][0], d[m][i][1], d[m][i][2], d[m][i][3]);
            if (adds) {
              const float4 v = to;
              sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
            to = sum;
          }
      };
      if (K_GROUPS > 1 && at.k_at >= PAIR_SUMS) meet(false);
      if (K_GROUPS > 1) c.barrier();
      if (at.k_at < PAIR_SUMS) meet(K_GROUPS > 1);
      c.barrier();
#pragma unroll
      for (int n = 0; n < E::OWN; n++) {
        const typename E::Tile to = E::tile(c, part, first, here, at, r, n);
        if (!to.ends) continue;
        float4 sum = met[(n * K_GROUPS + at.k_at) * PAIR_SUMS * 32];
#pragma unroll
        for (int k = 1; k < PAIR_SUMS; k++) {
          const float4 v = met[((n * K_GROUPS + at.k_at) * PAIR_SUMS + k) * 32];
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        const float2 low = make_float2(sum.x, sum.y), high = make_float2(sum.z, sum.w);
        own[r][n] = part == 0 ? low : high;
        if (!lost) send_to_peer(inbox_of_peer + place(to) * 8, part == 0 ? high : low, paired_of_peer);
      }
    }
    await_peer(c);
    float* const residual = c.template work<float>(e.residual);
    u8* const out = c.template work<u8>(e.out);
#pragma unroll
    for (int r = 0; r < E::ROUNDS; r++)
#pragma unroll
      for (int n = 0; n < E::OWN; n++) {
        const typename E::Tile to = E::tile(c, part, first, here, at, r, n);
        if (!to.ends) continue;
        const float2 sent = inbox[place(to)];
        const float2 y = settled(c, e, 0, first + to.unit, to.row, t, make_float2(own[r][n].x + sent.x, own[r][n].y + sent.y));
        const float2 x = make_float2(ends.old[r][n].x + G::SCALE * y.x, ends.old[r][n].y + G::SCALE * y.y);
        if (to.exists) {
          c.template give<residual_everywhere<M, G>()>(reinterpret_cast<float2*>(residual + u64(to.row) * G::ROWS + to.col), x);
          if constexpr (G::OUT)
            c.template give<everywhere<M, G>()>(reinterpret_cast<u32*>(out + OutPlace<M, G, G::ROWS>::at(u32(to.row), u32(to.col))), bf16_pair(x.x * ends.gain[r][n].x, x.y * ends.gain[r][n].y));
        }
        if constexpr (G::OUT) {
          float square = to.exists ? x.x * x.x + x.y * x.y : 0.f;
          square += __shfl_xor_sync(~0u, square, COLUMN_LANES);
          square += __shfl_xor_sync(~0u, square, 2 * COLUMN_LANES);
          if (t == 0) squares[to.unit * PAIR_ROWS + (at.tiles_at + to.m) * 8 + g] = square;
        }
      }
    if constexpr (G::OUT) {
      c.barrier();
      leave_squares(c, e, squares, here);
    }
  }
  // Stores the sum of squares of this block's columns of the residual, for each of its rows.
  static __device__ __forceinline__ void leave_squares(WaveContext<M>& c, const Wave& e, const float* of, u32 units) {
    if constexpr (G::OUT)
      if (c.tid() < PAIR_ROWS) {
        // Without a loop of unknown length all are read at once.
        float sum = 0.f;
#pragma unroll
        for (int unit = 0; unit < MOST * UNIT_GROUPS; unit++) sum += u32(unit) < units ? of[unit * PAIR_ROWS + c.tid()] : 0.f;
        const u32 row = c.tid() / 8 * 16 + blockIdx.x % 2 * 8 + c.tid() % 8;
        c.template give<everywhere<M, G>()>(c.template work<float>(e.squares_out) + square_at(all_blocks<M>() / 2, block_number<M>(c.p) / 2, row), sum);
      }
  }
  static __device__ __forceinline__ void await_peer(WaveContext<M>& c) {
    u32 left = c.patience;
    while (!__all_sync(~0u, peer_has_sent(&c.state().paired, c.exchanges)))
      if (--left == 0) {
        if (give_up(c.waiter(), false, WaitKind::PEER, c.exchanges, M::WARPS)) break;
        left = POLLS_BETWEEN_CHECKS;
      }
    c.exchanges++;
    fence_sent();
  }
  // Loads the words of a span of a granule, of the two units that a warp has of a tile.
  static __device__ __forceinline__ void load_tile(const u8* w, int span, int tile, bool exists, const Warp& at, uint4 (&a)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i] = *reinterpret_cast<const uint4*>(w + (tile * TILE_UNITS + at.units_at * 2 + i) * UNIT_PITCH + span * GRANULE + at.lane * 16);
      // Memory that no chunk has filled may hold NaN.
      if (!exists) a[i] = make_uint4(0, 0, 0, 0);
    }
  }
  // Begins to multiply a tile by 32 of k, whose input is at `first`. FIRST: the sums begin with this product.
  template <bool FIRST = false>
  static __device__ __forceinline__ void multiply_span(u64 first, const uint4 (&a)[2], float (&d)[GROUP_ROWS / 2]) {
    const u64 second = WarpgroupOperand::next(first, 2 * WarpgroupOperand::CORE_BYTES);
    warpgroup_product<GROUP_ROWS, FIRST>(d, a[0].x, a[1].x, a[0].y, a[1].y, first);
    warpgroup_product<GROUP_ROWS>(d, a[0].z, a[1].z, a[0].w, a[1].w, second);
  }
  template <bool FIRST = false>
  static __device__ __forceinline__ void multiply_tile(const u8* x, const uint4 (&a)[2], float (&d)[GROUP_ROWS / 2]) {
    warpgroup_begin();
    multiply_span<FIRST>(WarpgroupOperand::at(x), a, d);
    warpgroup_commit();
  }
  // Multiplies N tiles. Words of a tile are loaded two products ahead, so that one product always waits while another runs. A chunk is left when the products
  // of the next one have begun.
  template <int N>
  static __device__ __forceinline__ void pass_wide(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here) {
    const Warp at(c);
    float d[N][GROUP_ROWS / 2] = {};
    // PRODUCTS of a chunk. After CHUNKS chunks each product has its words in the same registers again.
    constexpr int AHEAD = 2, PRODUCTS = 2 * N, BUFFERS = PRODUCTS % 3 ? 4 : 3, CHUNKS = PRODUCTS % BUFFERS ? 2 : 1;
    uint4 a[BUFFERS][2];
    int left = int(passes.granules); // one at least
    bool begun = false;
    RingCursor<InputRing<M>> inputs = c.inputs;
    RingCursor<WeightRing<M>> weights = c.weights;
    const u8 *x = nullptr, *w = nullptr;
    wave_take_pair(c, inputs, weights, x, w);
    const u8* next_x = x;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) load_tile(w, i / N, i % N, i < N || left > 1, at, a[i]);
    do {
#pragma unroll
      for (int i = 0; i < CHUNKS * PRODUCTS; i++) {
        constexpr int LAST = PRODUCTS - 1;
        const int at_chunk = i % PRODUCTS, ahead = (at_chunk + AHEAD) % PRODUCTS;
        multiply_tile(x + at.tiles_at * 16 * 64 + at_chunk / N * X::SPAN_BYTES, a[i % BUFFERS], d[at_chunk % N]);
        warpgroup_await<1>();
        if (at_chunk == 0) {
          if (begun) wave_release_pair(c, c.inputs, c.weights);
          begun = true;
        }
        const bool of_next = at_chunk + AHEAD >= PRODUCTS;
        const int there = of_next ? left - STEP_GRANULES : left;
        if (there > 0) {
          if (of_next && ahead == 0) {
            inputs.next();
            weights.next();
            wave_take_pair(c, inputs, weights, next_x, w);
          }
          load_tile(w, ahead / N, ahead % N, ahead < N || there > 1, at, a[(i + AHEAD) % BUFFERS]);
        }
        if (at_chunk == LAST) {
          left -= STEP_GRANULES;
          x = next_x;
          if (left <= 0) break;
        }
      }
    } while (left > 0);
    warpgroup_await<0>();
    wave_release_pair(c, c.inputs, c.weights);
    finish_tiles<N>(c, e, share, passes, first, here, at, d);
  }
  // ---- both operands in shared memory --------------------------------------------------------------------------------
  // Boxes of eight units. The last may have units of the next pass, which no warp reads, or zeros. The blocks of a pair make them in turns.
  template <class L>
  static __device__ __forceinline__ void load_boxes(L& l, const Wave& e, const Passes& passes, u32 first, u32 here) {
    const u32 boxes = ceil_div(here, BOX_UNITS);
    const bool copies = l.part == 0 && u32(l.lane) < boxes && l.makes(l.lane);
    if (copies && l.step == 0) l.see_box(e.boxes);
#pragma unroll 1
    for (u32 at = 0; at < passes.granules; at += G::CHUNK, l.at.next()) {
      u8* slot = l.free_slot();
      if (copies) l.copy_lines(slot + l.lane * (BOX_UNITS * UNIT_PITCH), e.boxes, (passes.from + at) * 8, first + l.lane * BOX_UNITS);
      l.arrive(boxes * (BOX_UNITS * UNIT_PITCH));
    }
  }
  // Sums of a pass, and of eight of its units.
  static constexpr int PASS_SUMS = PASS * 4, BOX_SUMS = int(BOX_UNITS) * 4;
  static __device__ __forceinline__ void pass_shared(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here) {
    float d[PASS_SUMS] = {};
    multiply_columns<64>(c, passes, here, d);
    finish_shared(c, e, passes.part, share, first, here, d);
  }
  // With the instruction of fewest columns, in multiples of 64, that has those of the pass.
  template <int N>
  static __device__ __forceinline__ void multiply_columns(WaveContext<M>& c, const Passes& passes, u32 here, float (&d)[PASS_SUMS]) {
    if constexpr (N < PASS * 8) {
      if (here * 8 > u32(N)) return multiply_columns<N + 64>(c, passes, here, d);
    }
    multiply_shared<N>(c, passes, reinterpret_cast<float (&)[N / 2]>(d));
  }
  // Each warpgroup has half of the rows, and multiplies them by N / 8 units. A chunk is left when the products of the next one have begun.
  template <int N>
  static __device__ __forceinline__ void multiply_shared(WaveContext<M>& c, const Passes& passes, float (&d)[N / 2]) {
    constexpr int GROUP = M::BLOCK_ROWS / 2;
    static_assert(GROUP == 64, "rows of the left operand");
    const u32 rows_at = u32(c.warp()) / 4 * (GROUP / 8 * WarpgroupOperand::COLUMNS_BYTES);
    RingCursor<InputRing<M>> inputs = c.inputs;
    RingCursor<WeightRing<M>> weights = c.weights;
    bool begun = false;
#pragma unroll 1
    for (int left = int(passes.granules); left > 0; left -= STEP_GRANULES, inputs.next(), weights.next()) {
      const u8 *x = nullptr, *w = nullptr;
      wave_take_pair(c, inputs, weights, x, w);
      warpgroup_begin();
#pragma unroll
      for (u32 span = 0; span < 2; span++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)
          warpgroup_product<N>(d, WarpgroupOperand::at(x + rows_at + span * X::SPAN_BYTES + half * (2 * WarpgroupOperand::CORE_BYTES)),
                               SwizzledOperand::at(w + span * SwizzledOperand::GRANULE_BYTES + half * 32));
      warpgroup_commit();
      warpgroup_await<1>();
      if (begun) wave_release_pair(c, c.inputs, c.weights);
      begun = true;
    }
    warpgroup_await<0>();
    wave_release_pair(c, c.inputs, c.weights);
  }
  // Whether results go to other devices row by row, in whole units of 16 bytes.
  static constexpr bool GIVES_UNITS = everywhere<M, G>() && G::PLAIN && G::EPILOGUE == Epilogue::STORE && G::SPLITS == 1 && G::UNIT_ROWS == 8 && G::ROWS % 8 == 0;
  // Calls `complete(units before)` for eight units after eight of a pass, with the same registers: sums that follow move to those of the ones before them. So a pass ends with one piece of
  // code, whatever its width; straight code for all units of each width was most of the kernel.
  template <class F>
  static __device__ __forceinline__ void by_boxes(u32 here, float (&d)[PASS_SUMS], const F& complete) {
#pragma unroll 1
    for (u32 before = 0; before < here; before += BOX_UNITS) {
      complete(before);
#pragma unroll
      for (int i = 0; i < PASS_SUMS - BOX_SUMS; i++) d[i] = d[i + BOX_SUMS];
    }
  }
  // Completes and stores the sums of a pass. As far as the compiler knows, what a wave stores may be its parameters, so they are copied first.
  static __device__ __forceinline__ void finish_shared(const WaveContext<M>& c, const Wave& held, u32 part, const Share& share, u32 first, u32 here, float (&d)[PASS_SUMS]) {
    const Wave e = held;
    const int lane = made_here(c.lane()), t = lane % 4, row = int(share.row) + c.warp() * 16 + lane / 4;
    if constexpr (G::SUMS)
      if (Parts::count(c.p.row_count) == 1) return leave_sums(c, e, first, here, row, t, d);
    float factors[2] = {1.f, 1.f};
    if constexpr (G::FACTOR)
      if (lacks_factor(c, e)) {
        const float* of = c.state().factors + c.warp() * 16 + lane / 4;
        factors[0] = of[0], factors[1] = of[8];
      }
    by_boxes(here, d, [&](u32 before) {
      if constexpr (G::FACTOR) {
#pragma unroll
        for (int i = 0; i < BOX_SUMS; i++) d[i] *= factors[i % 4 / 2];
      }
      const u32 unit = first + before, units = here - before;
      if constexpr (ADDS_PAIRS)
        add_units(c, e, part, unit, units, row, t, d);
      else if constexpr (G::EPILOGUE == Epilogue::GATED)
        gate_units(c, e, part, unit, units, row, t, d);
      else
        finish_units(c, e, part, unit, units, row, t, d);
    });
  }
  // Completes and stores up to eight units from `unit` on, of the row of a lane and of the one eight further on. `here` units are left of the pass.
  static __device__ __forceinline__ void finish_units(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, u32 here, int row, int t, const float (&d)[PASS_SUMS]) {
    if constexpr (GIVES_UNITS) {
      if (here >= BOX_UNITS) {
#pragma unroll
        for (int i = 0; i < int(BOX_UNITS); i += 2) give_two(c, e, part, unit, row, t, d, i);
        return;
      }
    }
    float none = 0.f;
    int no_id = 0;
#pragma unroll
    for (int i = 0; i < int(BOX_UNITS); i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (u32(i) < here) finish(c, e, part, unit + i, row + 8 * h, t, sums_of(d, i, h), none, no_id);
  }
  // Sums of columns 2 t and 2 t + 1 of unit `i` of eight, of the row of a lane and of the one eight further on.
  static __device__ __forceinline__ float2 sums_of(const float (&d)[PASS_SUMS], int i, int h) { return make_float2(d[4 * i + 2 * h], d[4 * i + 2 * h + 1]); }
  static __device__ __forceinline__ void add_units(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, u32 here, int row, int t, const float (&d)[PASS_SUMS]) {
    const bool rows[2] = {u32(row) < c.p.row_count, u32(row + 8) < c.p.row_count};
    add_all<2 * int(BOX_UNITS)>(
        c, residual_at(c, e, unit, row, t), [&](int i) { return rows[i % 2] && u32(i / 2) < here && is_column(unit + i / 2, t); },
        [](int i) { return i % 2 * 8 * G::ROWS + i / 2 * G::UNIT_ROWS; },
        [&](int i) { return settled(c, e, part, unit + i / 2, row + i % 2 * 8, t, sums_of(d, i / 2, i % 2)); }
    );
  }
  // A pass of a product with SUMS: the residual, the input of the next product, and of each row the sum of squares of each group of columns. A group is of one share.
  static constexpr u32 GROUPS = ceil_div(UNITS, int(BOX_UNITS));
  // Of a lane at once: units, of its row and of the one eight further on.
  static constexpr int AT_ONCE = 4;
  typedef float2 SomeUnits[2 * AT_ONCE];
  static __device__ __forceinline__ void load_sums(const WaveContext<M>& c, const float* residual, int row, u32 units, SomeUnits& to) {
#pragma unroll
    for (int i = 0; i < 2 * AT_ONCE; i++) {
      to[i] = make_float2(0.f, 0.f);
      if (u32(row + i % 2 * 8) < c.p.row_count && u32(i / 2) < units) to[i] = *reinterpret_cast<const float2*>(residual + i % 2 * 8 * G::ROWS + i / 2 * 8);
    }
  }
  static __device__ __forceinline__ void leave_sums(const WaveContext<M>& c, const Wave& e, u32 first, u32 here, int row, int t, float (&d)[PASS_SUMS]) {
    static_assert(SHARED && G::UNIT_ROWS == 8 && G::ROWS % 8 == 0 && !G::FACTOR, "units are whole");
    static_assert(AT_ONCE == 4, "the 32 columns of a span of the input");
    typedef OutPlace<M, G, G::ROWS> Place;
    const auto left = [&](u32 from) { return here > from ? here - from : 0; };
    // Old values are loaded before the stores of the units before: a load waits for L2, and the compiler keeps the order of loads and stores.
    SomeUnits old, next;
    load_sums(c, residual_at(c, e, first, row, t), row, here, next);
    by_boxes(here, d, [&](u32 before) {
      float squares[2] = {0.f, 0.f};
#pragma unroll
      for (int of = 0; of < int(BOX_UNITS); of += AT_ONCE) {
        const u32 unit = first + before + of, units = left(before + of);
        float* const residual = residual_at(c, e, unit, row, t);
        float2 gains[AT_ONCE];
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) old[i] = next[i];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          gains[i] = make_float2(1.f, 1.f);
          if (e.norm_weight != ~0u && u32(i) < units) gains[i] = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.norm_weight) + (unit + i) * 8 + t * 2));
        }
        load_sums(c, residual + AT_ONCE * 8, row, left(before + of + AT_ONCE), next);
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) {
          if (u32(i / 2) >= units) continue;
          const float2 y = settled(c, e, 0, unit + i / 2, row + i % 2 * 8, t, sums_of(d, of + i / 2, i % 2));
          old[i] = make_float2(old[i].x + G::SCALE * y.x, old[i].y + G::SCALE * y.y);
          squares[i % 2] += old[i].x * old[i].x + old[i].y * old[i].y;
        }
        u8* const out = c.template work<u8>(e.out) + Place::at(u32(row), unit * 8 + t * 2);
#pragma unroll
        for (int i = 0; i < 2 * AT_ONCE; i++) {
          if (u32(row + i % 2 * 8) >= c.p.row_count || u32(i / 2) >= units) continue;
          float2* const to = reinterpret_cast<float2*>(residual + i % 2 * 8 * G::ROWS + i / 2 * 8);
          *to = old[i];
          if (peers<M>() > 0 && e.shown) c.template give<everywhere<M, G>()>(to, old[i]);
          const u32 pair = bf16_pair(old[i].x * gains[i / 2].x, old[i].y * gains[i / 2].y);
          c.template give<everywhere<M, G>()>(reinterpret_cast<u32*>(out + Place::eights(i % 2) + i / 2 * 128), pair);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float sum = squares[h] + __shfl_xor_sync(~0u, squares[h], 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        if (t == 0 && u32(row + h * 8) < c.p.row_count) c.template give<everywhere<M, G>()>(c.template work<float>(e.squares_out) + square_at(GROUPS, (first + before) / BOX_UNITS, u32(row + h * 8)), sum);
      }
    });
  }
  // Of four lanes that have a row of a unit, two have columns of the gate and two those of `up`. The first two complete this row, the others the one eight further on.
  static __device__ __forceinline__ void gate_units(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, u32 here, int row, int t, const float (&d)[PASS_SUMS]) {
    const bool ups = t >= 2;
    const int mine = row + (ups ? 8 : 0);
    if constexpr (everywhere<M, G>() && !G::PLAIN) {
      if (here >= BOX_UNITS && unit % 2 == 0) return give_units(c, e, part, unit, row, t, d);
    }
#pragma unroll
    for (u32 i = 0; i < BOX_UNITS; i++) {
      if (i >= here) continue;
      const float2 low = settled(c, e, part, unit + i, row, t, sums_of(d, i, 0)), high = settled(c, e, part, unit + i, row + 8, t, sums_of(d, i, 1));
      const float2 given = ups ? low : high, taken = make_float2(__shfl_xor_sync(~0u, given.x, 2), __shfl_xor_sync(~0u, given.y, 2));
      const float2 gate = ups ? taken : low, up = ups ? high : taken;
      const int col = int(unit + i) * 4 + t % 2 * 2;
      if (col < G::ROWS / 2 && u32(mine) < c.p.row_count) put<G::ROWS / 2>(c, e, mine, col, activate_scaled<G>(gate.x) * up.x, activate_scaled<G>(gate.y) * up.y);
    }
  }
  // The same of eight units, in pieces of 16 bytes: what goes to other devices goes in whole lines. Two lanes side by side have the halves of the columns of a row; of
  // four units each takes two whole ones.
  static __device__ __forceinline__ void give_units(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, int row, int t, const float (&d)[PASS_SUMS]) {
    const bool ups = t >= 2, odd = t % 2;
    const int mine = row + (ups ? 8 : 0);
    u8* const out = c.template work<u8>(e.out);
#pragma unroll
    for (u32 first = 0; first < BOX_UNITS; first += 4) {
      u32 made[4];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        const u32 at = first + i;
        const float2 low = settled(c, e, part, unit + at, row, t, sums_of(d, at, 0)), high = settled(c, e, part, unit + at, row + 8, t, sums_of(d, at, 1));
        const float2 given = ups ? low : high, taken = make_float2(__shfl_xor_sync(~0u, given.x, 2), __shfl_xor_sync(~0u, given.y, 2));
        const float2 gate = ups ? taken : low, up = ups ? high : taken;
        made[i] = bf16_pair(activate_scaled<G>(gate.x) * up.x, activate_scaled<G>(gate.y) * up.y);
      }
      const u32 third = __shfl_xor_sync(~0u, odd ? made[0] : made[2], 1), fourth = __shfl_xor_sync(~0u, odd ? made[1] : made[3], 1);
      const uint4 piece = odd ? make_uint4(third, made[2], fourth, made[3]) : make_uint4(made[0], third, made[1], fourth);
      const int col = int(unit + first + (odd ? 2 : 0)) * 4;
      if (col < G::ROWS / 2 && u32(mine) < c.p.row_count) c.template give<true>(reinterpret_cast<uint4*>(out + OutPlace<M, G, G::ROWS / 2>::at(u32(mine), u32(col))), piece);
    }
  }
  // Results of two units side by side, as they are: a lane takes a whole unit of a row, of the four that four lanes have parts of.
  static __device__ __forceinline__ void give_two(const WaveContext<M>& c, const Wave& e, u32 part, u32 unit, int row, int t, const float (&d)[PASS_SUMS], int from) {
    u32 made[4]; // unit by unit, of the row and of the one eight further on
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 y = settled(c, e, part, unit + from + i / 2, row + i % 2 * 8, t, sums_of(d, from + i / 2, i % 2));
      made[i] = bf16_pair(y.x, y.y);
    }
    const uint4 piece = words_of_four(made, t);
    const u32 mine = u32(row + t % 2 * 8);
    const u64 at = u64(mine) * G::ROWS + (unit + from + t / 2) * G::UNIT_ROWS;
    if (mine < c.p.row_count) c.template give<true>(reinterpret_cast<uint4*>(c.template work<u8>(e.out) + at * 2), piece);
  }
  // ---- tiles of a step ---------------------------------------------------------------------------------------------
  // As by warpgroups above, but a chunk of the input has X_STEPS chunks of weights, and weights leave the ring before they are multiplied. Of each chunk of
  // weights a group of k has TILE_GRANULES: 64 of k, or a granule if a pass has several tiles of many rows, or of codes.
  static constexpr int TILE_GRANULES = Codes::CODED || PASS_TILES * GROUP_ROWS > 128 ? 1 : 2;
  static __device__ __forceinline__ u32 unit_of_tile(const Warp& at, int tile, int i) { return u32((tile * 2 + i) * UNIT_GROUPS + at.units_at); }
  // Plain weights. Where the pass has no unit, whatever lies in the slot is multiplied too, and not stored.
  struct TileWords {
    uint4 of[PASS_TILES][TILE_GRANULES][2]; // [tile][span][unit]
    __device__ __forceinline__ void take(WaveContext<M>& c, const Warp& at, u32 here) {
      static_assert(PASS_TILES * TILE_UNITS * UNIT_PITCH <= M::WEIGHT_BYTES, "a slot holds a chunk of whole tiles");
      const u8* w = wave_take(c, c.weights);
#pragma unroll
      for (int n = 0; n < PASS_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int span = 0; span < TILE_GRANULES; span++)
            of[n][span][i] = *reinterpret_cast<const uint4*>(w + unit_of_tile(at, n, i) * UNIT_PITCH + (at.k_at * TILE_GRANULES + span) * GRANULE + at.lane * 16);
      wave_release(c, c.weights);
    }
    // Begins products, and calls `next` when those of the chunk before have ended.
    template <class Next>
    __device__ __forceinline__ void multiply(const u8* input, float (&d)[PASS_TILES][GROUP_ROWS / 2], const Next& next) const {
#pragma unroll
      for (int span = 0; span < TILE_GRANULES; span++)
#pragma unroll
        for (int n = 0; n < PASS_TILES; n++) multiply_tile(input + span * X::SPAN_BYTES, of[n][span], d[n]);
      warpgroup_await<TILE_GRANULES * PASS_TILES>();
      next();
    }
  };
  // Codes. Instead of a unit that does not exist the last one is multiplied again: whole tiles would need a longer slot.
  struct TileCodes {
    typename WaveCodes<M, G>::WideHeld of[PASS_TILES][2];
    __device__ __forceinline__ void take(WaveContext<M>& c, const Warp& at, u32 here) {
      static_assert(PASS * UNIT_PITCH <= M::WEIGHT_BYTES, "a slot holds a chunk");
      const u8* w = wave_take(c, c.weights);
#pragma unroll
      for (int n = 0; n < PASS_TILES; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) of[n][i].read(w + min(unit_of_tile(at, n, i), here - 1) * UNIT_PITCH + at.k_at * GRANULE, at.lane, at.lane / 4);
      wave_release(c, c.weights);
    }
    template <class Next>
    __device__ __forceinline__ void multiply(const u8* input, float (&d)[PASS_TILES][GROUP_ROWS / 2], const Next& next) const {
      constexpr bool GROUPED = Codes::GROUPED;
      constexpr int SUMS = GROUP_ROWS / 2, RUNS = GROUPED ? Codes::GROUPS : 1, RUN_SPANS = GRANULE_SPANS / RUNS;
      constexpr int BATCH = RUN_SPANS % 2 ? 1 : 2, BATCHES = RUN_SPANS / BATCH * PASS_TILES; // spans of a tile at once, and how often in a run
      const u64 x = WarpgroupOperand::at(input);
      uint4 a[2][BATCH][2];
#pragma unroll
      for (int run = 0; run < RUNS; run++) {
        float own[PASS_TILES][GROUPED ? SUMS : 1] = {};
        u32 zeros[PASS_TILES][2];
#pragma unroll
        for (int n = 0; n < PASS_TILES; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) zeros[n][i] = Codes::Wide::zero(G::ZEROS ? of[n][i].zero(0, run) : Codes::Weights::Codes::ZERO);
        // Products of one tile run while operands of the other are made.
#pragma unroll
        for (int k = 0; k < BATCHES; k++) {
          const int n = k % PASS_TILES, s = k / PASS_TILES * BATCH;
          if (run * BATCHES + k == RUNS * BATCHES / 2) next();
          uint4(&now)[BATCH][2] = a[k % 2];
#pragma unroll
          for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int i = 0; i < 2; i++) now[b][i] = Codes::Wide::template eight<G::ZEROS>(of[n][i].codes, run * RUN_SPANS + s + b, zeros[n][i]);
          warpgroup_begin();
#pragma unroll
          for (int b = 0; b < BATCH; b++) {
            const u64 from = WarpgroupOperand::next(x, (run * RUN_SPANS + s + b) * X::SPAN_BYTES);
            if constexpr (!GROUPED)
              multiply_span(from, now[b], d[n]);
            else if (s + b == 0)
              multiply_span<true>(from, now[b], own[n]);
            else
              multiply_span(from, now[b], own[n]);
          }
          warpgroup_commit();
          warpgroup_await<1>();
        }
        warpgroup_await<0>();
        if constexpr (GROUPED)
#pragma unroll
          for (int n = 0; n < PASS_TILES; n++)
#pragma unroll
            for (int k = 0; k < SUMS; k++) d[n][k] += of[n][k / 2 % 2].scale(0, run) * own[n][k];
      }
    }
  };
  // Of two rows of a column, which a product leaves to a lane, and those of the next column, which another lane has: two columns of a row (`row_of`, `pair_of`).
  static __device__ __forceinline__ float2 turned(int lane, float a, float b) {
    const bool odd = lane & 4;
    const float got = __shfl_xor_sync(~0u, odd ? a : b, 4);
    return odd ? make_float2(got, b) : make_float2(a, got);
  }
  // Leaves sums as products of warps do. Groups of k are whole warpgroups. Products of a chunk run while the next chunks are looked for.
  static __device__ __forceinline__ void multiply_tiles(WaveContext<M>& c, const Passes& passes, const Warp& at, u32 here, float (&sums)[ROW_TILES][MOST][4]) {
    static_assert(W_STEPS == 1 && STEP_GRANULES == K_GROUPS * TILE_GRANULES, "each group of k has 64 of k of a chunk, or a granule");
    static_assert(X_STEPS == 1 || X_STEPS % 2 == 0, "a turn begins with the first of two chunks of words");
    typedef typename Either<Codes::CODED, TileCodes, TileWords>::type Tiles;
    float d[PASS_TILES][GROUP_ROWS / 2] = {};
    Tiles tiles[2] = {};
    int left = int(passes.granules);
    // Products of words run on while those of the next chunk begin, so the input is left later.
    constexpr bool LATE = !Codes::CODED;
    WaveChunk<InputRing<M>> x, x_before, x_next;
    bool begun = false;
    const WaveChunk<WeightRing<M>> none;
    tiles[0].take(c, at, here);
    wave_take(c, c.inputs);
    x_next.take(c, c.inputs);
    constexpr int STEPS = X_STEPS < 2 ? 2 : X_STEPS; // of a turn, so that each has its own words
    do {
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        if (i % X_STEPS == 0) x_before = x, x = x_next;
        const auto next = [&]() {
          if (LATE && i % X_STEPS == 0) {
            if (begun) wave_leave(c, x_before, none, true, false);
            begun = true;
          }
          if (left > STEP_GRANULES) {
            tiles[(i + 1) % 2].take(c, at, here);
            if (i % X_STEPS == X_STEPS - 1) {
              wave_take(c, c.inputs);
              x_next.take(c, c.inputs);
            }
          }
        };
        // The last chunk may have nothing for a group.
        if (WHOLE || K_GROUPS == 1 || left > at.k_at * TILE_GRANULES)
          tiles[i % 2].multiply(span_at(x.at, i % X_STEPS * STEP + at.k_at * TILE_GRANULES * GRANULE_SPANS), d, next);
        else {
          warpgroup_await<0>();
          next();
        }
        left -= STEP_GRANULES;
        if (!LATE && (i % X_STEPS == X_STEPS - 1 || left <= 0)) wave_leave(c, x, none, true, false);
        if (left <= 0) break;
      }
    } while (left > 0);
    warpgroup_await<0>();
    if (LATE) wave_leave(c, x, none, true, false);
#pragma unroll
    for (int n = 0; n < PASS_TILES; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
          const float2 upper = turned(at.lane, d[n][8 * m + 2 * i], d[n][8 * m + 2 * i + 1]), lower = turned(at.lane, d[n][8 * m + 4 + 2 * i], d[n][8 * m + 5 + 2 * i]);
          float(&to)[4] = sums[m][2 * n + i];
          to[0] = upper.x, to[1] = upper.y, to[2] = lower.x, to[3] = lower.y;
        }
  }
  template <int N>
  static __device__ __forceinline__ void finish_tiles(const WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here,
                                                      const Warp& at, const float (&d)[N][GROUP_ROWS / 2]) {
    float none = 0.f;
    int no_id = 0;
    // Computed again here: otherwise values that follow from the lane would be kept in registers throughout the loop, which has none to spare.
    const int lane = made_here(at.lane);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const u32 unit = u32(n * TILE_UNITS + at.units_at * 2 + i);
        if (unit >= here) continue;
        const auto row = [&](int j) { return int(share.row) + at.tiles_at * 16 + j * 8 + lane / 4; };
        const auto sum = [&](int j) { return transposed(d[n][4 * j + 2 * i], d[n][4 * j + 2 * i + 1]); };
        if constexpr (ADDS_PAIRS)
          add_all<GROUP_ROWS / 8>(
              c, residual_at(c, e, first + unit, row(0), lane % 4), [&](int j) { return u32(row(j)) < c.p.row_count && is_column(first + unit, lane % 4); },
              [](int j) { return j * 8 * G::ROWS; }, [&](int j) { return settled(c, e, passes.part, first + unit, row(j), lane % 4, sum(j)); }
          );
        else
#pragma unroll
          for (int j = 0; j < GROUP_ROWS / 8; j++) finish(c, e, passes.part, first + unit, row(j), lane % 4, sum(j), none, no_id);
      }
  }
  // The same for codes. A chunk is a granule of each unit, and is left when its products have ended; otherwise ptxas serialises the products (C7513).
  // Operands of a span are made while the products of the previous span run. Sums of a group are scaled before they are added up.
  template <int N>
  static __device__ __forceinline__ void pass_wide_codes(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here) {
    const Warp at(c);
    constexpr bool GROUPED = Codes::GROUPED;
    constexpr int SUMS = GROUP_ROWS / 2, RUNS = GROUPED ? Codes::GROUPS : 1, RUN_SPANS = GRANULE_SPANS / RUNS;
    float d[N][SUMS] = {}, own[GROUPED ? SUMS : 1] = {};
    uint4 a[2][2];
    int left = int(passes.granules); // one at least
    do {
      const u8 *x = nullptr, *w = nullptr;
      wave_take_pair(c, c.inputs, c.weights, x, w);
      const u8* input = x + at.tiles_at * 16 * 64;
#pragma unroll
      for (int n = 0; n < N; n++) {
        typename Codes::WideHeld held[2];
#pragma unroll
        for (int i = 0; i < 2; i++) held[i].read(w + (n * TILE_UNITS + at.units_at * 2 + i) * UNIT_PITCH, at.lane, at.lane / 4);
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
              multiply_tile(input + span * X::SPAN_BYTES, now, d[n]);
            else if (s == 0)
              multiply_tile<true>(input + span * X::SPAN_BYTES, now, own);
            else
              multiply_tile(input + span * X::SPAN_BYTES, now, own);
            warpgroup_await<1>();
          }
          if constexpr (GROUPED) {
            warpgroup_await<0>();
            if (n == N - 1 && run == RUNS - 1) wave_release_pair(c, c.inputs, c.weights);
#pragma unroll
            for (int k = 0; k < SUMS; k++) d[n][k] += held[k / 2 % 2].scale(0, run) * own[k];
          }
        }
      }
      if constexpr (!GROUPED) {
        warpgroup_await<0>();
        wave_release_pair(c, c.inputs, c.weights);
      }
      left -= STEP_GRANULES;
    } while (left > 0);
    finish_tiles<N>(c, e, share, passes, first, here, at, d);
  }
  // In a plan of chunks, passes of fewer units have code of their own, because units that do not exist cost as much as others. Steps have one piece of code: they
  // are bound by how fast instructions are fetched.
  static __device__ __forceinline__ void run_warps(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here, Best& best, const Squares& squares, bool is_first) {
    if constexpr (M::STEPS) {
      pass<MOST>(c, e, share, passes, first, here, best, squares, is_first);
    } else {
      if (here <= UNIT_GROUPS)
        pass<1>(c, e, share, passes, first, here, best, squares, is_first);
      else if (here <= 2 * UNIT_GROUPS)
        pass<MOST < 2 ? MOST : 2>(c, e, share, passes, first, here, best, squares, is_first);
      else if (here <= 4 * UNIT_GROUPS)
        pass<MOST < 4 ? MOST : 4>(c, e, share, passes, first, here, best, squares, is_first);
      else
        pass<MOST>(c, e, share, passes, first, here, best, squares, is_first);
    }
  }
  // For warps without a unit of a pass: they leave chunks, too.
  static __device__ __forceinline__ void pass_idle(WaveContext<M>& c, const Passes& passes) {
#pragma unroll 1
    for (int left = int(passes.granules); left > 0; left -= STEP_GRANULES) {
      const u8 *x = nullptr, *w = nullptr;
      wave_take_pair(c, c.inputs, c.weights, x, w);
      wave_release_pair(c, c.inputs, c.weights);
    }
  }
  static __device__ __forceinline__ void run_wide(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here) {
    const u32 tiles = (here + TILE_UNITS - 1) / TILE_UNITS;
    // Either all four warps of a warpgroup multiply or none.
    if (u32(Warp(c).units_at / 4 * 8) >= here) return pass_idle(c, passes);
    if constexpr (PASS_TILES > 2)
      if (tiles > 2) return pass_tiles<PASS_TILES>(c, e, share, passes, first, here);
    if constexpr (PASS_TILES > 1)
      if (tiles > 1) return pass_tiles<2>(c, e, share, passes, first, here);
    pass_tiles<1>(c, e, share, passes, first, here);
  }
  template <int N>
  static __device__ __forceinline__ void pass_tiles(WaveContext<M>& c, const Wave& e, const Share& share, const Passes& passes, u32 first, u32 here) {
    if constexpr (Codes::CODED)
      pass_wide_codes<N>(c, e, share, passes, first, here);
    else
      pass_wide<N>(c, e, share, passes, first, here);
  }
  // The first pass begins with the weights that warps hold. All rows of a step are in one block of rows.
  static __device__ __forceinline__ void run_held(WaveContext<M>& c, const Wave& e, Best& best) {
    Held held;
    held.take(c);
    c.enter_after_looking();
    const HeldShares<M> shares(c);
    if (shares.count == 0) return;
    Squares squares;
    if constexpr (G::FACTOR) squares.ask(c, e);
    Share share = shares[0];
    Passes passes(c.p, share);
    const Warp at(c);
    PairEnds<MOST> no_pair;
    float d[ROW_TILES][MOST][4] = {};
    held.multiply(c, at, d);
    int done = G::HELD;
    for (u32 s = 0, pass = 0;;) {
      const u32 first = passes.first(pass), here = passes.first(pass + 1) - first;
      multiply_pass<MOST>(c, passes, at, done, d);
      if constexpr (BEST_MEETS) best.begin();
      end_pass<MOST>(c, e, share, passes, first, here, at, best, squares, done > 0, d, no_pair);
      if constexpr (BEST_MEETS) leave_best(c, at, best, true);
      done = 0;
      if (++pass == passes.count) {
        if (++s == shares.count) return;
        share = shares[s];
        passes = Passes(c.p, share);
        pass = 0;
      }
#pragma unroll
      for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < MOST; n++) d[m][n][0] = d[m][n][1] = d[m][n][2] = d[m][n][3] = 0.f;
    }
  }
  static __device__ __forceinline__ void run_shares(WaveContext<M>& c, const Wave& e, Best& best) {
    const HeldShares<M> shares(c);
    Squares squares;
    if constexpr (G::FACTOR && !SHARED)
      if (shares.count > 0) squares.ask(c, e);
    for (u32 s = 0; s < shares.count; s++) {
      const Share share = shares[s];
      if (share.row >= c.p.row_count) continue;
      const Passes passes(c.p, share);
      if constexpr (G::FACTOR && SHARED) take_factors(c, e, share.row);
#pragma unroll 1
      for (u32 i = 0; i < passes.count; i++) {
        const u32 first = passes.first(i), here = passes.first(i + 1) - first;
        if constexpr (SHARED)
          pass_shared(c, e, share, passes, first, here);
        else if constexpr (WIDE)
          run_wide(c, e, share, passes, first, here);
        else
          run_warps(c, e, share, passes, first, here, best, squares, s == 0 && i == 0);
      }
    }
    if constexpr (G::PAIRED)
      if (shares.count == 0) leave_squares(c, e, nullptr, 0);
  }
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    Best best;
    if constexpr (G::EPILOGUE == Epilogue::LOGITS) best.begin();
    if constexpr (BEST_MEETS) leave_best(c, Warp(c), best, false);
    if constexpr (G::HELD > 0)
      run_held(c, e, best);
    else
      run_shares(c, e, best);
    if constexpr (G::EPILOGUE == Epilogue::LOGITS) tell_best(c, e, Warp(c), best);
  }
};
