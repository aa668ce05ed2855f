// Owns products of experts whose tensor cores read both operands from shared memory (M::SHARED), for chunks of bf16 weights.
//
// Words of a `Wave` and of groups are those of experts.cuh, and so are places and tiles.
#pragma once

// experts: y = x W^T + bias by the matrix of the expert that a tile of places has, then the epilogue.
//
// x (tiles)    TILE places of K columns (`TilePlace`), through the ring of weights, whose slots both blocks of a pair may fill and read
// W            EXPERTS matrices of UNITS units, one after another, through the ring of inputs: 64 of k of a pass, swizzled (`SwizzledOperand`). Of a tile with FEW rows the rings change
//              places, and a slot has 128 of k: then weights take the larger slots, as they are most of what is copied
// out          GATED, CLAMPED: 4 columns for each unit; ACT: one for each row of W; like x. STORE: (places, ROWS) bf16
//
// owner    of an item, which is a tile and a part of the units: the block that draws its ticket. Where blocks share chunks (`shares_weights`), the two blocks of a pair have one ticket for
//          two parts of a tile. So each copies half of the input to both, and both take equally many chunks. The tiles of an expert follow one another within a part, so blocks
//          read the same weights at the same time. Without TICKETS each block or pair has one item of each round, at another place in the next round: tiles with many and with few
//          rows alternate
// assumes  the first warp of each loader has met before it reads the groups
//
// Weights are the left operand: a warpgroup has eight units, and a warp two of them. Places are columns of the right one, so a tile with few rows takes less time. Those without a row
// are multiplied, too, and not stored.
template <class M, class G>
struct WaveExpertsShared {
  static constexpr int UNITS = ceil_div(G::ROWS, G::UNIT_ROWS), GRANULES = ceil_div(G::K, 32), CHUNKS = ceil_div(GRANULES, G::CHUNK);
  typedef TilePlace<M, G::K, G::TILE> X;
  static constexpr u32 BOX_UNITS = 8, PASS = 2 * BOX_UNITS, UNIT_BYTES = SwizzledOperand::UNIT_BYTES, BOX_BYTES = BOX_UNITS * UNIT_BYTES;
  static constexpr int SPANS = 2; // of a chunk
  // Parts of the units of an expert, of which the blocks of a pair have two side by side.
  static constexpr int BESIDE = M::PAIRS ? 2 : 1, PARTS = ceil_div(ceil_div(UNITS, G::PASS), BESIDE) * BESIDE;
  static constexpr bool GATED = G::EPILOGUE == Epilogue::GATED || G::EPILOGUE == Epilogue::CLAMPED;
  static_assert(M::SHARED && G::UNIT_ROWS == OPERAND_ROWS && M::WARPS == 8 && G::CHUNK == SPANS, "two warpgroups, units of eight rows, and chunks of 64 of k");
  static_assert(G::PASS <= int(PASS) && PARTS <= UNITS && UNITS < 1 << 16, "a part has units, and a pass as many as there are sums of");
  static_assert(int(PASS * UNIT_BYTES) <= M::INPUT_BYTES && int(SPANS * X::SPAN_BYTES) <= M::WEIGHT_BYTES, "slots hold a chunk");
  static_assert(M::INPUT_BYTES % 1024 == 0 && M::INPUT_AT % 1024 == 0, "weights begin at a whole pattern of the swizzle");
  // Of a tile with few rows.
  static constexpr u32 FEW = 64, TOGETHER = 2, FEW_SPANS = TOGETHER * SPANS, FEW_SPAN_BYTES = FEW * 64; // rows, chunks of a slot, their spans, and bytes from one to the next
  static constexpr int FEW_CHUNKS = ceil_div(CHUNKS, int(TOGETHER));
  static_assert(int(FEW_SPANS * FEW_SPAN_BYTES) <= M::INPUT_BYTES && int(TOGETHER * PASS * UNIT_BYTES) <= M::WEIGHT_BYTES && M::WEIGHT_BYTES % 1024 == 0, "slots hold its chunks");
  static_assert(X::SPANS % FEW_SPANS == 0, "columns that pad the last chunk are there");

  typedef ExpertItem Item;
  static_assert(PASS < 1 << 7 && G::TILE < 1 << 9, "what the words of a turn hold");
  // The items of a wave. A ticket is for as many of them as blocks share chunks.
  struct Items {
    const uint4* all;
    u32 together, tickets, blocks; // items of a ticket, tickets, and blocks or pairs that draw them
    __device__ __forceinline__ Items(const WaveParams& p, const Wave& e) : all(groups_from(p, e)) {
      together = shares_weights<M>(p) ? 2 : 1;
      tickets = uniform(*reinterpret_cast<const u32*>(all)) * PARTS / together;
      blocks = M::SMS / together;
    }
    __device__ __forceinline__ u32 block() const { return blockIdx.x / together; }
    // Of the block that is `nth` of those that have the ticket.
    __device__ __forceinline__ Item item(u32 ticket, u32 nth) const {
      Item item;
      if (ticket >= tickets) return item;
      const u32 n = ticket * together + nth;
      const uint4 of = group_of(all, n / PARTS);
      const u32 expert = of.x, first = of.y, tiles = of.z, slots = of.w;
      const u32 within = n - first * PARTS, beside = within / BESIDE, part = beside / tiles * BESIDE + within % BESIDE;
      item.tile = first + beside % tiles;
      item.own = UNITS * part / PARTS;
      item.units = UNITS * (part + 1) / PARTS - item.own;
      item.unit = expert * UNITS + item.own;
      item.rows = min(u32(G::TILE), slots - (item.tile - first) * G::TILE);
      return item;
    }
    // Of this block, and of the other one that has its ticket.
    __device__ __forceinline__ Item own(u32 ticket) const { return item(ticket, blockIdx.x % together); }
    __device__ __forceinline__ Item other(u32 ticket) const { return item(ticket, together - 1 - blockIdx.x % together); }
  };

  // Calls f<columns of an instruction, instructions>() for a tile with so many rows.
  template <class F>
  static __device__ __forceinline__ void by_rows(u32 rows, const F& f) {
    static_assert(G::TILE == 288, "places that the last of these have");
    if (rows <= 32)
      f.template of<32, 1>();
    else if (rows <= 64)
      f.template of<64, 1>();
    else if (rows <= 128)
      f.template of<128, 1>();
    else if (rows <= 144)
      f.template of<144, 1>();
    else if (rows <= 192)
      f.template of<96, 2>();
    else if (rows <= 256)
      f.template of<128, 2>();
    else
      f.template of<144, 2>();
  }
  struct Places {
    u32& to;
    template <int N, int TIMES>
    __device__ __forceinline__ void of() const {
      to = N * TIMES;
    }
  };
  static __device__ __forceinline__ u32 places_multiplied(const Item& item) {
    u32 places = 0;
    by_rows(item.rows, Places{places});
    return places;
  }

  // ---- the loader ----------------------------------------------------------------------------------------------------
  template <class R>
  static __device__ __forceinline__ void load(WaveLoader<M, R>& l, const Wave& e) {
    l.meet();
    if (l.lost()) return;
    if (l.part == 0 && u32(l.lane) < TOGETHER * PASS / BOX_UNITS && l.step == 0) l.see_box(e.boxes);
    const Items items(l.p, e);
    Item item = items.own(items.block());
#pragma unroll 1
    for (u32 round = 1; item.units > 0; round++)
      if constexpr (R::FIRST == 0) {
        item = load_inputs(l, e, items, item, round);
      } else {
        if (item.rows <= FEW) {
          l.template set_hint<false>();
          const Boxes<WaveLoader<M, R>> boxes(l, item, TOGETHER);
#pragma unroll 1
          for (int at = 0; at < FEW_CHUNKS; at++, l.at.next()) boxes.copy(l, e, at);
        } else {
          l.template set_hint<true>();
          load_places(l, e, item);
        }
        item = Item::of(wave_turn(l));
      }
    l.template set_hint<R::FIRST == 0>();
  }
  // Copies of the weights of an item, of `together` times 64 of k in a slot: one of each eight units and 64 of k. The last units of a box may be those of another part, which no lane
  // stores, or zeros.
  template <class L>
  struct Boxes {
    u32 count, unit, half, to, halves;
    bool copies;
    __device__ __forceinline__ Boxes(const L& l, const Item& item, u32 together) {
      count = ceil_div(item.units, BOX_UNITS);
      half = u32(l.lane) / count;
      const u32 box = u32(l.lane) % count;
      unit = item.unit + box * BOX_UNITS, to = half * (PASS * UNIT_BYTES) + box * BOX_BYTES, halves = together;
      copies = l.part == 0 && half < together;
    }
    __device__ __forceinline__ void copy(L& l, const Wave& e, int at) const {
      const u32 first = u32(at) * halves, here = min(halves, u32(CHUNKS) - first);
      u8* slot = l.free_slot();
      if (copies && half < here) l.copy_own_lines(slot + to, e.boxes, (first + half) * (SPANS * 8), unit);
      l.arrive(here * count * BOX_BYTES);
    }
  };
  // Weights, or the places of a tile with few rows. Returns the next item.
  template <class L>
  static __device__ __forceinline__ Item load_inputs(L& l, const Wave& e, const Items& items, const Item& item, u32 round) {
    const bool few = item.rows <= FEW;
    const Boxes<L> boxes(l, item, 1);
    const u32 places = places_multiplied(item);
    const u8* x = l.p.work + u64(e.x) * OFFSET_BYTES + X::tile(item.tile) + l.lane * X::SPAN_BYTES;
    // The ticket of the next item is drawn after half of the chunks, and told after the next one.
    const int chunks = few ? FEW_CHUNKS : CHUNKS, drawn = chunks / 2, told = min(drawn + 1, chunks - 1);
    u32 ticket = (round - 1) * items.blocks + (items.block() + round) % items.blocks; // after the first round
    Item next;
    if (few)
      l.template set_hint<true>();
    else
      l.template set_hint<false>();
#pragma unroll 1
    for (int at = 0; at < chunks; at++, l.at.next()) {
      if (G::TICKETS && at == drawn && l.draws() && l.lane == 0) ticket = l.draw(drawn_from<G>(l.p, e));
      if (at == told && l.draws()) {
        const u32 of = items.blocks + __shfl_sync(~0u, ticket, 0);
        next = items.own(of);
        l.tell(next.turn(), items.other(of).turn());
      }
      if (few) {
        u8* slot = l.free_slot();
        if (u32(l.lane) < FEW_SPANS) l.copy(slot + l.lane * FEW_SPAN_BYTES, x + u32(at) * (FEW_SPANS * X::SPAN_BYTES), places * 64);
        l.arrive(FEW_SPANS * places * 64);
      } else {
        boxes.copy(l, e, at);
      }
    }
    return l.draws() ? next : Item::of(wave_turn(l));
  }
  // Spans of a chunk, of the places that are multiplied. The blocks of a pair make them in turns.
  template <class L>
  static __device__ __forceinline__ void load_places(L& l, const Wave& e, const Item& item) {
    const u32 places = places_multiplied(item);
    const u8* x = l.p.work + u64(e.x) * OFFSET_BYTES + X::tile(item.tile) + l.lane * X::SPAN_BYTES;
    const bool copies = l.part == 0 && l.lane < SPANS && l.makes(l.lane);
#pragma unroll 1
    for (int at = 0; at < CHUNKS; at++, l.at.next(), x += SPANS * X::SPAN_BYTES) {
      u8* slot = l.free_slot();
      if (copies) l.copy_shared(slot + l.lane * X::SPAN_BYTES, x, places * 64);
      l.arrive(SPANS * places * 64);
    }
  }

  // ---- consumers -----------------------------------------------------------------------------------------------------
  struct Pass {
    WaveContext<M>& c;
    const Wave& e;
    const Item& item;
    template <int N, int TIMES>
    __device__ __forceinline__ void of() const {
      pass<N, TIMES>(c, e, item);
    }
  };
  static __device__ __forceinline__ void run(WaveContext<M>& c, const Wave& e) {
    if (c.lost()) return;
    const Items items(c.p, e);
    Item item = items.own(items.block());
#pragma unroll 1
    while (item.units > 0) {
      by_rows(item.rows, Pass{c, e, item});
      item = Item::of(wave_turn(c));
    }
  }
  // A slot is left when the products of the next one have begun.
  template <int N, int TIMES>
  static __device__ __forceinline__ void pass(WaveContext<M>& c, const Wave& e, const Item& item) {
    constexpr bool IS_FEW = N * TIMES <= int(FEW);
    constexpr int TAKEN = IS_FEW ? FEW_CHUNKS : CHUNKS;
    constexpr u32 SPANS_TAKEN = IS_FEW ? FEW_SPANS : SPANS, X_BYTES = IS_FEW ? FEW_SPAN_BYTES : X::SPAN_BYTES;
    float d[TIMES][N / 2] = {};
    const u32 units_at = u32(c.warp()) / 4 * BOX_BYTES;
    RingCursor<InputRing<M>> inputs = c.inputs;
    RingCursor<WeightRing<M>> weights = c.weights;
#pragma unroll 1
    for (int at = 0; at < TAKEN; at++, inputs.next(), weights.next()) {
      const u8 *w = nullptr, *x = nullptr;
      wave_take_pair(c, inputs, weights, IS_FEW ? x : w, IS_FEW ? w : x);
      warpgroup_begin();
#pragma unroll
      for (u32 span = 0; span < SPANS_TAKEN; span++) {
        if (span == SPANS && at * int(TOGETHER) + 1 == CHUNKS) break;
#pragma unroll
        for (u32 half = 0; half < 2; half++)
#pragma unroll
          for (u32 i = 0; i < TIMES; i++)
            warpgroup_product<N, SwizzledOperand, WarpgroupOperand>(
                d[i], SwizzledOperand::at(w + span / SPANS * (PASS * UNIT_BYTES) + units_at + span % SPANS * SwizzledOperand::GRANULE_BYTES + half * 32),
                WarpgroupOperand::at(x + span * X_BYTES + half * (2 * WarpgroupOperand::CORE_BYTES) + i * (N / 8 * WarpgroupOperand::COLUMNS_BYTES))
            );
      }
      warpgroup_commit();
      warpgroup_await<1>();
      if (at > 0) wave_release_pair(c, c.inputs, c.weights);
    }
    warpgroup_await<0>();
    wave_release_pair(c, c.inputs, c.weights);
    // With one piece of code for both instructions: sums of the other one move to the registers of the first.
#pragma unroll 1
    for (u32 first = 0; first < u32(N * TIMES); first += N) {
      finish<N>(c, e, item, first, d[0]);
#pragma unroll
      for (int k = 0; k < N / 2; k++) d[0][k] = d[TIMES - 1][k];
    }
  }
  // Completes and stores the places from `first` on. A warp has the two units from `unit` on.
  template <int N>
  static __device__ __forceinline__ void finish(const WaveContext<M>& c, const Wave& held, const Item& item, u32 first, float (&d)[N / 2]) {
    const Wave e = held; // as far as the compiler knows, what a wave stores may be its parameters
    constexpr int COLS = GATED ? G::ROWS / 2 : G::ROWS;
    static_assert(COLS % 2 == 0, "columns are stored in pairs");
    typedef TilePlace<M, COLS, G::TILE> Out;
    const int lane = made_here(c.lane()), t = lane % 4;
    const u32 unit = u32(c.warp()) * 2, place = item.tile * G::TILE + first + lane / 4; // of the first eight
    const u32 rows = item.rows > first + lane / 4 ? item.rows - first - lane / 4 : 0;
    float2 bias[2] = {make_float2(0.f, 0.f), make_float2(0.f, 0.f)};
    if constexpr (G::BIAS) {
#pragma unroll
      for (u32 i = 0; i < 2; i++)
        bias[i] = __ldg(reinterpret_cast<const float2*>(c.template constant<float>(e.bias) + (item.unit + min(unit + i, item.units - 1)) * G::UNIT_ROWS + t * 2));
    }
    // Columns 2 t and 2 t + 1 of unit i, of place lane / 4 of eight j.
    const auto settled = [&](int i, int j) {
      const float2 y = transposed(d[4 * j + 2 * i], d[4 * j + 2 * i + 1]);
      return make_float2(y.x + bias[i].x, y.y + bias[i].y);
    };
    if constexpr (GATED) {
      // Half of the lanes complete the first unit, and half the second one: so four lanes have eight columns side by side.
      const bool ups = t >= 2;
      const u32 col = (item.own + unit) * 4 + t * 2;
      const bool stores = unit + (ups ? 1 : 0) < item.units && col < u32(COLS);
      u8* const out = c.template work<u8>(e.out) + Out::at(place, col);
#pragma unroll
      for (int j = 0; j < N / 8; j++) {
        const float2 y = settled(0, j), z = settled(1, j), given = ups ? y : z;
        const float2 got = make_float2(__shfl_xor_sync(~0u, given.x, 2), __shfl_xor_sync(~0u, given.y, 2));
        const float2 made = gated_by_expert<G>(ups ? got : y, ups ? z : got);
        const u32 pair = bf16_pair(made.x, made.y);
        if (stores && u32(j * 8) < rows) *reinterpret_cast<u32*>(out + j * Out::EIGHT_BYTES) = pair;
      }
    } else if constexpr (G::EPILOGUE == Epilogue::STORE && COLS % 8 == 0) {
      // Of two eights and two units lane t takes one: whole sectors.
      const bool stores = unit + t % 2 < item.units;
      u8* const out = c.template work<u8>(e.out) + (u64(place + t / 2 * 8) * COLS + (item.own + unit + t % 2) * G::UNIT_ROWS) * 2;
#pragma unroll
      for (int j = 0; j < N / 8; j += 2) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float2 y = settled(i % 2, j + i / 2);
          pairs[i] = bf16_pair(y.x, y.y);
        }
        const uint4 piece = words_of_four(pairs, t);
        if (stores && u32((j + t / 2) * 8) < rows) *reinterpret_cast<uint4*>(out + u64(j) * (8 * COLS * 2)) = piece;
      }
    } else {
#pragma unroll
      for (int j = 0; j < N / 8; j++)
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
          float2 y = settled(i, j);
          if constexpr (G::EPILOGUE == Epilogue::ACT) y = make_float2(activate<G::ACT>(y.x), activate<G::ACT>(y.y));
          const u32 col = (item.own + unit + i) * G::UNIT_ROWS + t * 2, at = place + j * 8;
          u8* const to = c.template work<u8>(e.out) + (G::EPILOGUE == Epilogue::STORE ? (u64(at) * COLS + col) * 2 : u64(Out::at(at, col)));
          if (unit + i < item.units && col < u32(COLS) && u32(j * 8) < rows) *reinterpret_cast<u32*>(to) = bf16_pair(y.x, y.y);
        }
    }
  }
};
