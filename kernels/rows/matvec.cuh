// matvec of rows: y = W norm(x) + bias for each row of the step, then the epilogue.
//
// choice         of parts that rows chose: the task takes its share of their units (deal.cuh), each for the rows that chose its part
// x (ROWS, K)    words; every warp loads its own granules of k into registers
// W              units as in ops/matvec.cuh, streamed by blocks of k: PASS units at a time, the first block of each, then the second
// out            STORE, ACT: a column for each row of W; GATED: 4 columns for each unit; RESIDUAL: the fp32 sum stays in the block,
//                its rounded copy travels; LOGITS: best (value, id) of each row
//
// owner    of a unit: one task. A unit's sums are added up by as many threads as it has pairs of columns, times ROWS
// moves    UNIT_GRANULES * GRANULE_BYTES of the stream for each unit; all values of x into every block, once for each pass
// assumes  rows of W past ROWS and k past K are zeros in the pack; the publisher of x fills its last piece
//
// A warp takes 16 rows of the step; if the step has no more, every warp takes all. Warps with the same rows take the granules of a
// block of k in turn (split k), as with one row. A lane loads 16 bytes of row lane / 4 of W, and the same 16 bytes of k of rows lane / 4
// and lane / 4 + 8 of x: as operands of m16n8k16 they are a permutation of k that both sides share.
// A warp holds the input of a block of k in registers while it multiplies it with that block of all units of the pass, and the next block
// is on its way. What does not depend on the input comes before the wait for it: each instruction after that wait delays all other SMs.
#pragma once

// Where the columns of an op lie in the words that it reads and writes: slot j begins STEP columns after the one before it.
template <class G>
__device__ constexpr bool has_columns_of_slots(decltype(G::X_COLS)*) {
  return true;
}
template <class G>
__device__ constexpr bool has_columns_of_slots(...) {
  return false;
}
template <class G, bool = has_columns_of_slots<G>(nullptr)>
struct SlotColumns {
  static constexpr bool GATED = G::EPILOGUE == Epilogue::GATED || G::EPILOGUE == Epilogue::CLAMPED;
  static constexpr int X_COLS = G::K, X_STEP = 0, OUT_COLS = GATED ? G::ROWS / 2 : G::ROWS, OUT_AT = 0, OUT_STEP = 0, EACH = 0;
};
template <class G>
struct SlotColumns<G, true> {
  static constexpr int X_COLS = G::X_COLS, X_STEP = G::X_STEP, OUT_COLS = G::OUT_COLS, OUT_AT = G::OUT_AT, OUT_STEP = G::OUT_STEP;
  static constexpr int EACH = G::EACH; // parts that a row chooses, 0: there is no choice
};

template <class M, class G>
struct RowsMatVecShape {
  static constexpr bool GATED = G::EPILOGUE == Epilogue::GATED || G::EPILOGUE == Epilogue::CLAMPED;
  static constexpr bool CHOSEN = parts_of<G>(nullptr) > 0;
  static constexpr u32 PART_UNITS = Part<G>::UNITS;
  typedef SlotColumns<G> Slots;
  static constexpr int EACH = Slots::EACH;
  typedef Coding<M, G> Weights;
  static constexpr int ELEM = ElemOf<M::WEIGHT>::BYTES;
  static constexpr int K_PARTS = OPERAND_ROWS / G::UNIT_ROWS;
  static constexpr int PART_K = PART_BYTES * 8 / Weights::BITS, GRANULE_K = K_PARTS * PART_K;
  static constexpr int UNIT_GRANULES = ceil_div(G::K, GRANULE_K);
  static constexpr int BLOCK = G::CHUNK < UNIT_GRANULES ? G::CHUNK : UNIT_GRANULES; // granules of a block of k
  static constexpr int BLOCKS = ceil_div(UNIT_GRANULES, BLOCK);
  static constexpr int WARP_GRANULES = ceil_div(BLOCK, K_GROUPS<M>);
  static constexpr int THREADS = M::WARPS * 32;
  // Threads that complete a unit, and units that are completed at once.
  static constexpr int PAIRS = G::UNIT_ROWS / 2, UNIT_THREADS = M::ROWS * 4, BATCH = THREADS / UNIT_THREADS;
  static_assert(BATCH > 0 && THREADS % UNIT_THREADS == 0, "a thread has one row");
  // Sums of a unit: [group of k][row][column]
  static constexpr int UNIT_SUMS = K_GROUPS<M> * M::ROWS * OPERAND_ROWS;
  // Rows and granules of this warp.
  static __device__ __forceinline__ int row_group(const Context<M>& c) { return ROW_GROUPS<M> == 1 ? 0 : c.warp() % ROW_GROUPS<M>; }
  static __device__ __forceinline__ int k_group(const Context<M>& c) { return ROW_GROUPS<M> == 1 ? c.warp() : c.warp() / ROW_GROUPS<M>; }
  // Place of its i-th granule in a block.
  static __device__ __forceinline__ int in_block(const Context<M>& c, int i) { return i * K_GROUPS<M> + k_group(c); }
  // Whether this warp has an i-th granule of a block. An answer that is known at compile time needs no predicate.
  static __device__ __forceinline__ bool exists(const Context<M>& c, int block, int i) {
    const int at = in_block(c, i);
    const bool in = (i + 1) * K_GROUPS<M> <= BLOCK || at < BLOCK;
    return in && (UNIT_GRANULES % BLOCK == 0 || block * BLOCK + at < UNIT_GRANULES);
  }
};

// A configuration as a value.
template <class G>
struct RowsOp {
  typedef G Type;
};
// Ops that share code: they multiply alike, for any k, and each has an epilogue of its own.
template <class... Gs>
struct RowsOps {
  // Calls `f` with op number `which`, a `RowsOp`.
  template <class F>
  static __device__ __forceinline__ void with(int which, F f) {
    int i = 0;
    ((sizeof...(Gs) == 1 || which == i++ ? f(RowsOp<Gs>()) : void()), ...);
  }
  static constexpr int pass_max() {
    int most = 0;
    ((most = Gs::PASS > most ? Gs::PASS : most), ...);
    return most;
  }
};

// Completes sums. A thread has one row of the step, and the columns 2 * pair and 2 * pair + 1 of units.
template <class M, class G>
struct RowsEpilogue {
  typedef RowsMatVecShape<M, G> S;
  int row, pair, unit_of_batch;
  float factor, best;
  int best_id;
  u32 takes; // whether `row` takes part
  u8* out;   // words of the result; null: logits, or scores
  int first; // column of `out` of the first row of W
  u32 part;  // units before those of the chosen part
  bool mine; // of a chosen part: whether the result of `row` is asked for
  static constexpr bool ASKS = S::Weights::CODED;
  static constexpr int HALVES = S::GATED ? 2 : 1;
  struct {
    float2 scale[ASKS ? HALVES : 1], bias[ASKS ? HALVES : 1];
  } asked;

  __device__ __forceinline__ RowsEpilogue(const Context<M>& c, u8* out)
      : row(c.tid() / 4 % M::ROWS), pair(c.tid() % 4), unit_of_batch(c.tid() / S::UNIT_THREADS), factor(1.f), best(NEGATIVE_INFINITY),
        best_id(0x7fffffff), takes(takes_part<M>(row)), out(out), first(0), part(0), mine(false) {
    // Codes need their registers for scales.
    if constexpr (!S::Weights::CODED) keep(takes), keep(this->out);
  }
  // Words that op E writes.
  template <class E>
  static __device__ __forceinline__ u8* words(const Context<M>& c, const Entry& e) {
    if constexpr (E::EPILOGUE == Epilogue::LOGITS || E::EPILOGUE == Epilogue::SCORES || !E::PUBLISH) return nullptr;
    return words_of<M, SlotColumns<E>::OUT_COLS>(c, e.out);
  }
  // Called at the start of a task whose columns are those of a slot.
  __device__ __forceinline__ void begin_slot(u32 slot) { first = S::Slots::OUT_AT + int(slot) * S::Slots::OUT_STEP; }
  // Called at the start of a task of a chosen part, for the rows that chose it.
  __device__ __forceinline__ void begin_part(u32 of) {
    part = of * S::PART_UNITS;
    mine = row_chose<M>(row, of);
    begin_slot(slot_of_part<M, S::EACH>(row, of));
  }
  // Clears what rows that take no part have in a share: that of all slots of each of them.
  __device__ __forceinline__ void clear_share(Context<M>& c, const Entry& e) {
    takes = 0, mine = !takes_part<M>(row);
    DealtShare(S::EACH, e.hi - e.lo, e.j, M::SMS).each_part([&](u32 slot, u32 from, u32 count) {
      begin_slot(slot);
      for (u32 i = 0; i < count; i += S::BATCH) run<G>(c, e, nullptr, int(e.lo + from + i), min(S::BATCH, int(count - i)), false);
      return true;
    });
  }

  // Asks for scales and biases of the first batch of `n` units from unit `first` on: they are there when the products are. Plain weights leave no
  // registers for them.
  template <class E>
  __device__ __forceinline__ void ask(const Context<M>& c, const Entry& e, int first, int n) {
    if constexpr (ASKS) {
      const int unit = int(part) + first + min(unit_of_batch, n - 1);
#pragma unroll
      for (int h = 0; h < HALVES; h++) {
        const int at = unit * G::UNIT_ROWS + (S::GATED ? h * 4 + pair % 2 * 2 : pair * 2);
        if constexpr (S::Weights::ROW_SCALES) asked.scale[h] = load_constant_here(reinterpret_cast<const float2*>(c.template constant<float>(e.row_scales) + at));
        if constexpr (E::BIAS) asked.bias[h] = load_constant_here(reinterpret_cast<const float2*>(c.template constant<float>(e.bias) + at));
      }
    }
  }
  // Called after the first barrier of a task.
  __device__ __forceinline__ void load_factor(const Context<M>& c) {
    if constexpr (G::NORM == Norm::RMS) factor = rsqrtf(row_statistic(c, 1, row) * (1.f / G::K) + G::EPS);
  }
  // Sums of columns `col` and `col + 1` of a unit, over groups and parts of k.
  __device__ __forceinline__ float2 sum(const float* unit, int col) const {
    float2 y = make_float2(0.f, 0.f);
#pragma unroll
    for (int p = 0; p < S::K_PARTS; p++)
#pragma unroll
      for (int k = 0; k < K_GROUPS<M>; k++) {
        const float2 v = *reinterpret_cast<const float2*>(unit + (k * M::ROWS + row) * OPERAND_ROWS + p * G::UNIT_ROWS + col);
        y.x += v.x, y.y += v.y;
      }
    y.x *= factor, y.y *= factor;
    return y;
  }
  // Of half `h` of a gated unit, or the only one. `was_asked`: of a batch that `ask` has asked for.
  template <class E>
  __device__ __forceinline__ void scale_and_bias(const Context<M>& c, const Entry& e, int unit, int h, bool was_asked, float2& y) const {
    const int at = (int(part) + unit) * G::UNIT_ROWS + (S::GATED ? h * 4 : 0) + pair * 2;
    const auto of = [&](u32 from, float2 value) {
      return ASKS && was_asked ? value : __ldg(reinterpret_cast<const float2*>(c.template constant<float>(from) + at));
    };
    if constexpr (S::Weights::ROW_SCALES) {
      const float2 scale = of(e.row_scales, asked.scale[ASKS ? h : 0]);
      y.x *= scale.x, y.y *= scale.y;
    }
    if constexpr (E::BIAS) {
      const float2 b = of(e.bias, asked.bias[ASKS ? h : 0]);
      y.x += b.x, y.y += b.y;
    }
  }
  // Completes the sums of op E in `sums`: of `n` units from unit `first` on (unit `first - e.lo` of the task).
  template <class E>
  __device__ __forceinline__ void run(Context<M>& c, const Entry& e, const float* sums, int first, int n, bool was_asked) {
    if (unit_of_batch >= n) return;
    if constexpr (S::CHOSEN)
      if (!mine) return;
    constexpr int COLS = SlotColumns<E>::OUT_COLS;
    const int unit = first + unit_of_batch;
    const float* mine = sums + unit_of_batch * S::UNIT_SUMS;
    if constexpr (S::GATED) {
      const int col = unit * 4 + pair * 2;
      if (pair >= 2 || col >= E::ROWS / 2) return;
      if (!takes) return clear_pair<COLS>(c, out, row, first_of(col));
      float2 gate = sum(mine, pair * 2), up = sum(mine, 4 + pair * 2);
      scale_and_bias<E>(c, e, unit, 0, was_asked, gate);
      scale_and_bias<E>(c, e, unit, 1, was_asked, up);
      if constexpr (E::EPILOGUE == Epilogue::CLAMPED)
        publish_pair<COLS>(c, out, row, first_of(col), clamped<E>(gate.x, up.x), clamped<E>(gate.y, up.y));
      else
        publish_pair<COLS>(c, out, row, first_of(col), activate_scaled<E>(gate.x) * up.x, activate_scaled<E>(gate.y) * up.y);
    } else {
      const int col = unit * G::UNIT_ROWS + pair * 2;
      if (pair >= S::PAIRS || col >= E::ROWS) return;
      if (!takes) {
        if constexpr (E::PUBLISH && E::EPILOGUE != Epilogue::LOGITS && E::EPILOGUE != Epilogue::SCORES) clear_pair<COLS>(c, out, row, first_of(col));
        return;
      }
      float2 y = sum(mine, pair * 2);
      scale_and_bias<E>(c, e, unit, 0, was_asked, y);
      if constexpr (E::EPILOGUE == Epilogue::LOGITS) {
        logits<E>(c, col, y);
      } else if constexpr (E::EPILOGUE == Epilogue::SCORES) {
        publish_scores<E::ROWS>(c, e.out + u32(row) * round_up(E::ROWS, 2), col, y.x, y.y);
      } else {
        if constexpr (E::EPILOGUE == Epilogue::ACT) y = make_float2(activate<E::ACT>(y.x), activate<E::ACT>(y.y));
        if constexpr (E::EPILOGUE == Epilogue::RESIDUAL) {
          float2* own = reinterpret_cast<float2*>(c.residual() + row * M::RESIDUAL_COLS + e.residual + (unit - int(e.lo)) * 8 + pair * 2);
          const float2 old = *own;
          y = make_float2(old.x + E::SCALE * y.x, old.y + E::SCALE * y.y);
          *own = y;
        }
        if constexpr (E::PUBLISH) publish_pair<COLS>(c, out, row, first_of(col), y.x, y.y);
      }
    }
  }
  __device__ __forceinline__ int first_of(int col) const { return has_columns_of_slots<G>(nullptr) ? first + col : col; }
  template <class E>
  __device__ __forceinline__ void logits(const Context<M>& c, int id, float2 y) {
    const RowsParams& p = rows_params(c);
    const Row& r = p.rows[row];
    const u32 step = c.tag - p.tag;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (id + i >= E::ROWS) break;
      const float v = softcap((i == 0 ? y.x : y.y) * E::SCALE, E::SOFTCAP);
      if (p.logits && step >= p.logits_from) hand_out(c, (u64(step - p.logits_from) * M::ROWS + row) * E::ROWS + id + i, v);
      float score = v;
      // The noise belongs to the token that this step decides.
      if (r.inverse_temperature > 0.f)
        score = mul_add(v, r.inverse_temperature, noise(u64(r.seed_high) << 32 | r.seed_low, r.position + step + 1, u32(id + i)));
      argmax_take(best, best_id, score, id + i);
    }
  }
  // Publishes the best (value, id) of each row, after everything that this block wrote in the step. Without a mailbox a sampler decides.
  template <class E>
  __device__ __forceinline__ void publish_best(Context<M>& c, const Entry& e) {
    if (!rows_params(c).mailbox) return;
    RowsState<M>& state = rows_state<M>();
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) {
      const float v = __shfl_xor_sync(~0u, best, o);
      const int i = __shfl_xor_sync(~0u, best_id, o);
      argmax_take(best, best_id, v, i);
    }
    // Here a warp has 8 rows, and the warps w, w + M::ROWS / 8, .. have the same ones.
    if (pair == 0) {
      state.best[c.warp()][row] = best;
      state.best_index[c.warp()][row] = best_id;
    }
    c.barrier();
    if (c.warp() == 0) {
      release_step();
      for (int row = c.lane(); row < M::ROWS; row += 32) {
        if (!takes_part<M>(row)) continue;
        constexpr int STRIDE = M::ROWS / 8;
        best = NEGATIVE_INFINITY, best_id = 0x7fffffff;
#pragma unroll
        for (int w = 0; w < M::WARPS / STRIDE; w++) {
          const int from = w * STRIDE + row / 8;
          argmax_take(best, best_id, state.best[from][row], state.best_index[from][row]);
        }
        u64* to = c.p.exchange + e.aux + ((c.tag & 1) * M::ROWS + row) * round_up(2 * E::PARTS, 2) + 2 * e.j;
        send(c, to, __float_as_uint(best));
        send(c, to + 1, u32(best_id));
      }
    }
  }
};

// Calls `f` with an entry of the units of each part in a task's share, the part, and whether it is the first; then clears what rows that take no part have there.
template <class M, class G, class F>
__device__ __forceinline__ void each_dealt_part(Context<M>& c, const Entry& e, F f) {
  typedef RowsMatVecShape<M, G> S;
  if (uniform(e.deals_first)) take_choices<M, S::EACH, G::EXPERTS>(c, e.choice);
  Entry of = e;
  const DealtShare share(uniform(deal_of<M>().count), uniform(e.hi - e.lo), uniform(e.j), M::SMS);
  bool is_first = true;
  share.each_part([&](u32 place, u32 first, u32 count) {
    // Statistics of the part before are read.
    if (!is_first) c.barrier();
    of.lo = uniform(e.lo) + first, of.hi = of.lo + count;
    f(of, uniform(u32(deal_of<M>().part[place])), is_first);
    is_first = false;
    return true;
  });
  if (is_first) c.stamp(1), c.stamp(2); // nothing is dealt to this block
  if (all_take_part<M>()) return;
  RowsEpilogue<M, G>(c, RowsEpilogue<M, G>::template words<G>(c, e)).clear_share(c, e);
}

// Most blocks of k that a warp keeps for several passes.
constexpr int RESIDENT_BLOCKS = 2;
// Most turns, over all blocks that are kept, that have code of their own.
constexpr int STRAIGHT_TURNS = 7;
// Most turns of a pass that leave registers for second sums, or with 16 rows for weights before the input.
constexpr int FEW_TURNS = 2;

// A number as a type.
template <int N>
struct Number {
  static constexpr int VALUE = N;
};
// Calls `f` with `i`, which is one of LO to HI - 1.
template <int LO, int HI, class F>
__device__ __forceinline__ void pick(int i, F f) {
  if constexpr (HI - LO == 1) {
    f(Number<LO>());
  } else {
    constexpr int MIDDLE = (LO + HI) / 2;
    if (i < MIDDLE)
      pick<LO, MIDDLE>(i, f);
    else
      pick<MIDDLE, HI>(i, f);
  }
}

// Calls `f` with 0, 1, .. while `more` says so, at most MOST times: in a loop, or with code for each call.
template <bool LOOP, int MOST, class More, class F>
__device__ __forceinline__ void repeat(More more, F f) {
  if constexpr (LOOP) {
#pragma unroll 1
    for (int i = 0; more(i); i++) f(i);
  } else {
#pragma unroll
    for (int i = 0; i < MOST; i++) {
      if (!more(i)) break;
      f(i);
    }
  }
}

// Tensor cores: words of bf16, and weights of bf16 or codes. `Others` are ops that share the code of G.
template <class M, class G, class... Others>
struct RowsMatVecTensor {
  typedef RowsMatVecShape<M, G> S;
  typedef Words<M, G::K> W;
  typedef RowsOps<G, Others...> Ops;
  // Parts of a granule, 32 of k each. If units have fewer rows, each part has columns of its own in a product; sums of codes are over all k.
  static constexpr int GROUPS = M::ROWS < WARP_ROWS ? 1 : 2, K_PARTS = S::GRANULE_K / 32, SUM_PARTS = S::K_PARTS, WARP_GRANULES = S::WARP_GRANULES;
  // Pieces of the input that a lane holds: of each granule and part, of each group of 8 rows of its warp.
  static constexpr int N = WARP_GRANULES * K_PARTS * GROUPS;
  static constexpr int PASS = Ops::pass_max();
  // Units that are multiplied at once. A product waits for the one before it on the same sums, so those of two units alternate. With 8
  // rows two units are one product; with 16 rows two fit only if the loader's registers are moved to the consumers.
  static constexpr int AT_ONCE = GROUPS == 1 || M::LOADER_REGISTERS > 0 ? 2 : 1, TURNS = ceil_div(PASS, AT_ONCE);
  // Sums that a lane has of a unit and part of k. 16 rows of the step are the rows of a product, and the unit its columns; 8 rows are
  // its columns, and two units its rows.
  static constexpr int LANE_SUMS = 2 * GROUPS;
  typedef RowsCodes<M, G, S, N, AT_ONCE> Codes;
  typedef float Sums[AT_ONCE][SUM_PARTS][LANE_SUMS];
  typedef typename Codes::Input Input;
  // Weights of a turn that a lane multiplies with a block of the input.
  typedef uint4 Weights[AT_ONCE][WARP_GRANULES];
  static constexpr bool PLAIN = !S::Weights::CODED;

  // If k is short and there are several passes, a warp keeps its whole input; else it has a block and the next one. Ops that share code have
  // different numbers of blocks.
  static constexpr bool RESIDENT = S::BLOCKS <= RESIDENT_BLOCKS && G::UNITS > PASS && sizeof...(Others) == 0;
  static constexpr int KEPT = RESIDENT ? S::BLOCKS : 1;
  static constexpr bool ONE_PASS = G::UNITS <= G::PASS && ((Others::UNITS <= Others::PASS) && ...);
  // An SM keeps 128 KiB of code. If a layer has more, the SM fetches it again in each layer, from the L2 that brings its weights. So many
  // turns are a loop, in which only products and stores of sums have code for each turn, because registers have no index; few turns have
  // code of their own, which is faster (docs/perf-log.md, entry 38).
  static constexpr bool LOOPS = PLAIN && TURNS * KEPT > STRAIGHT_TURNS;
  // Each block of the input meets weights that are in registers already; with 16 rows there is room for them if there are few turns.
  static constexpr bool WEIGHTS_FIRST = PLAIN && !RESIDENT && (GROUPS == 1 || TURNS <= FEW_TURNS);
  // A turn's products are two sums, so that each product waits for fewer before it.
  static constexpr bool TWO_SUMS = PLAIN && GROUPS == 1 && TURNS <= FEW_TURNS;
  // The weights of the norm are in registers, too.
  static constexpr bool NORM_FIRST = PLAIN && S::BLOCKS == 1 && G::NORM == Norm::RMS;
  // Tensor cores add up squares: they are the diagonal of x x^T.
  static constexpr bool SQUARES_BY_PRODUCT = PLAIN && GROUPS == 1 && G::NORM == Norm::RMS;

  // Whether an op can share this code.
  template <class Other>
  static constexpr bool alike() {
    typedef RowsMatVecShape<M, Other> T;
    const bool whole = S::UNIT_GRANULES % S::BLOCK == 0 && T::UNIT_GRANULES % T::BLOCK == 0 && G::K % S::GRANULE_K == 0 && Other::K % T::GRANULE_K == 0;
    const bool plain = !S::Weights::CODED && !T::Weights::CODED && G::NORM == Norm::NONE && Other::NORM == Norm::NONE;
    return whole && plain && S::BLOCK == T::BLOCK && G::UNIT_ROWS == Other::UNIT_ROWS;
  }
  static_assert((alike<Others>() && ...), "blocks of k are whole and alike");
  // What differs between ops that share code, until sums are completed.
  struct Extent {
    const u8* x;     // words of the input
    u32 group_bytes; // of 8 rows of them
    int blocks;      // of k
    int pass;        // units
    u8* out;         // words of the result
    u32 slots[GROUPS]; // of a chosen part: from the first slot's columns to those of the lane's rows, in bytes
  };
  static constexpr u32 SLOT_BYTES = S::CHOSEN ? u32(S::Slots::X_STEP) * W::ELEM / 64 * W::SPAN_BYTES : 0;
  static __device__ __forceinline__ Extent extent(const Context<M>& c, const Entry& e, int which) {
    Extent of{};
    Ops::with(which, [&](auto op) {
      typedef typename decltype(op)::Type E;
      typedef SlotColumns<E> At;
      // Slots begin with whole spans.
      static_assert(At::X_STEP * W::ELEM % 64 == 0, "a slot begins with a span of words");
      const u8* x = words_of<M, At::X_COLS>(c, e.x);
      of = Extent{x, Words<M, At::X_COLS>::GROUP_BYTES, RowsMatVecShape<M, E>::BLOCKS, E::PASS, RowsEpilogue<M, G>::template words<E>(c, e), {}};
    });
    return of;
  }

  // Piece i of a block, from the lane's own place in the block on.
  static __device__ __forceinline__ u32 offset(const Extent& of, int i) {
    const int h = i % GROUPS, p = i / GROUPS % K_PARTS, j = i / GROUPS / K_PARTS;
    return (SLOT_BYTES > 0 ? of.slots[h] : 0) + u32(h) * of.group_bytes + u32(j * K_GROUPS<M> * K_PARTS + p) * W::SPAN_BYTES;
  }
  static __device__ __forceinline__ u32 lane_at(const Context<M>& c, const Extent& of, int block) {
    return u32(S::row_group(c)) * (GROUPS * of.group_bytes) + u32((block * S::BLOCK + S::k_group(c)) * K_PARTS) * W::SPAN_BYTES + u32(c.lane()) * 16;
  }
  // The rows of this warp that take part.
  static __device__ __forceinline__ u32 active_rows(const Context<M>& c) {
    const int first = S::row_group(c) * WARP_ROWS;
    return uniform(rows_state<M>().active[first / 32]) >> first % 32;
  }
  static __device__ __forceinline__ bool wants(const Context<M>& c, int block, int i, u32 active) {
    return has_columns(c, block, i) && (active >> (i % GROUPS * 8 + c.lane() / 4) & 1);
  }
  static __device__ __forceinline__ void issue(const Context<M>& c, const Extent& of, int block, u32 active, uint4 (&v)[N]) {
    const u8* base = of.x + lane_at(c, of, block);
#pragma unroll
    for (int i = 0; i < N; i++) {
      v[i] = make_uint4(0, 0, 0, 0);
      load_piece(base + offset(of, i), wants(c, block, i, active), v[i]);
    }
  }
  static __device__ __forceinline__ void settle(Context<M>& c, const Extent& of, int block, uint4 (&v)[N]) {
    await_pieces<N>(of.x + lane_at(c, of, block), [&](int i) { return offset(of, i); }, v, c.waiter());
  }

  // A LayerNorm needs both statistics before anything is multiplied.
  struct Means {
    float mean[GROUPS], factor[GROUPS];
  };
  static __device__ __forceinline__ Means layer_statistics(Context<M>& c, const Extent& x, u32 active) {
    Means m;
#pragma unroll
    for (int h = 0; h < GROUPS; h++) m.mean[h] = 0.f, m.factor[h] = 0.f;
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      float sum[GROUPS] = {};
#pragma unroll 1
      for (int block = 0; block < S::BLOCKS; block++) {
        uint4 v[N];
        issue(c, x, block, active, v);
        settle(c, x, block, v);
#pragma unroll
        for (int i = 0; i < N; i++) {
          float y[W::PIECE_COLS];
          unpack_piece<M>(v[i], y);
          const int h = i % GROUPS, col = first_col(c, block, i);
#pragma unroll
          for (int k = 0; k < W::PIECE_COLS; k++)
            if (wants(c, block, i, active) && col + k < G::K) sum[h] += which == 0 ? y[k] : (y[k] - m.mean[h]) * (y[k] - m.mean[h]);
        }
      }
      put_row_statistic<M, GROUPS>(c, which, sum);
      c.barrier();
#pragma unroll
      for (int h = 0; h < GROUPS; h++) {
        const float mean = row_statistic(c, which, S::row_group(c) * WARP_ROWS + h * 8 + c.lane() / 4) * (1.f / G::K);
        (which == 0 ? m.mean[h] : m.factor[h]) = which == 0 ? mean : rsqrtf(mean + G::EPS);
      }
    }
    return m;
  }
  static __device__ __forceinline__ int first_col(const Context<M>& c, int block, int i) {
    const int p = i / GROUPS % K_PARTS, j = i / GROUPS / K_PARTS;
    return ((block * S::BLOCK + S::in_block(c, j)) * K_PARTS + p) * 32 + c.lane() % 4 * 8;
  }

  // Whether piece i of a block has columns of the input.
  static __device__ __forceinline__ bool has_columns(const Context<M>& c, int block, int i) {
    const int p = i / GROUPS % K_PARTS, j = i / GROUPS / K_PARTS;
    const int granule = block * S::BLOCK + S::in_block(c, j);
    return S::exists(c, block, j) && (W::PIECES == S::UNIT_GRANULES * K_PARTS * 4 || (granule * K_PARTS + p) * 4 + c.lane() % 4 < W::PIECES);
  }
  // Weights or biases of a norm for a piece.
  struct NormPiece {
    float4 lo, hi;
    __device__ __forceinline__ float at(int k) const {
      const float4 v = k < 4 ? lo : hi;
      return k % 4 == 0 ? v.x : (k % 4 == 1 ? v.y : (k % 4 == 2 ? v.z : v.w));
    }
  };
  // Loaded where this stands, because the compiler would move a plain load to where it is used.
  static __device__ __forceinline__ NormPiece load_norm(const Context<M>& c, u32 at, int block, int i) {
    NormPiece piece{make_float4(0.f, 0.f, 0.f, 0.f), make_float4(0.f, 0.f, 0.f, 0.f)};
    if (!has_columns(c, block, i)) return piece;
    const float4* from = reinterpret_cast<const float4*>(c.template constant<float>(at) + first_col(c, block, i));
    if constexpr (NORM_FIRST)
      piece.lo = load_constant_here(from), piece.hi = load_constant_here(from + 1);
    else
      piece.lo = __ldg(from), piece.hi = __ldg(from + 1);
    return piece;
  }
  struct NormWeights {
    NormPiece of[NORM_FIRST ? N / GROUPS : 1];
  };
  typedef float Squares[SQUARES_BY_PRODUCT ? 8 : GROUPS];
  static __device__ __forceinline__ void add_squares(const uint4 v, const float (&x)[8], int h, Squares& squares) {
    if constexpr (SQUARES_BY_PRODUCT) {
      tensor_product(squares[0], squares[1], squares[2], squares[3], v.x, v.x, v.y, v.y, v.x, v.y);
      tensor_product(squares[4], squares[5], squares[6], squares[7], v.z, v.z, v.w, v.w, v.z, v.w);
    } else {
#pragma unroll
      for (int k = 0; k < 8; k++) squares[h] += x[k] * x[k];
    }
  }
  static __device__ __forceinline__ void put_squares(const Context<M>& c, const Squares& squares) {
    if constexpr (SQUARES_BY_PRODUCT) {
      // Row lane / 4 of the products, and columns lane % 4 * 2 and one more.
      const int row = c.lane() / 4;
      const float even = squares[0] + squares[4], odd = squares[1] + squares[5];
      if (c.lane() % 4 == row / 2) rows_state<M>().stat[c.task & 1][1][S::k_group(c)][row] = row % 2 == 0 ? even : odd;
    } else {
      put_row_statistic<M, GROUPS>(c, 1, squares);
    }
  }

  // The norm of a block of the input, in place.
  static __device__ __forceinline__ void normalise(const Context<M>& c, const Entry& e, int block, const Means& m, const NormWeights& held,
                                                   uint4 (&v)[N], Squares& squares) {
    if constexpr (G::NORM != Norm::NONE) {
#pragma unroll
      for (int i = 0; i < N; i += GROUPS) {
        const int col = first_col(c, block, i);
        NormPiece w, b{};
        if constexpr (NORM_FIRST)
          w = held.of[i / GROUPS];
        else
          w = load_norm(c, e.norm_weight, block, i);
        if (G::NORM == Norm::LAYER && e.norm_bias != ~0u) b = load_norm(c, e.norm_bias, block, i);
#pragma unroll
        for (int h = 0; h < GROUPS; h++) {
          float x[8];
          unpack_piece<M>(v[i + h], x);
          if constexpr (G::NORM == Norm::RMS) add_squares(v[i + h], x, h, squares);
#pragma unroll
          for (int k = 0; k < 8; k++) {
            if constexpr (G::NORM == Norm::RMS)
              x[k] *= w.at(k);
            else
              x[k] = col + k < G::K ? (x[k] - m.mean[h]) * m.factor[h] * w.at(k) + b.at(k) : 0.f;
          }
          v[i + h] = make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
        }
        // Weights of the norm for all pieces at once would take the registers of a long input.
        if (!PLAIN && GROUPS == 2 && N > 8 && i / GROUPS % 4 == 3) __syncwarp();
      }
    }
  }

  // Takes the next chunks: of a block of k of `AT_ONCE` units, or of a lone one that stands for both.
  static __device__ __forceinline__ void fetch(Context<M>& c, int block, bool lone, Weights& w) {
    RowsChunks<M, AT_ONCE> chunks(c, lone);
#pragma unroll
    for (int j = 0; j < WARP_GRANULES; j++)
#pragma unroll
      for (int u = 0; u < AT_ONCE; u++) {
        const u8* from = chunks.slot[u] + S::k_group(c) * GRANULE_BYTES + c.lane() * LANE_BYTES + j * (K_GROUPS<M> * GRANULE_BYTES);
        w[u][j] = S::exists(c, block, j) ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
      }
    chunks.release(c);
  }
  // Multiplies these units, which are turn `turn` of the pass, with the block of the input in `x`.
  static __device__ __forceinline__ void multiply(const Weights& w, const uint4 (&x)[N], int turn, Sums (&sums)[TURNS]) {
    pick<0, TURNS>(turn, [&](auto which) {
      Sums& d = sums[which.VALUE];
      if constexpr (GROUPS == 2)
        multiply_16(w, x, d);
      else
        multiply_8(w, x, d);
    });
  }
  static __device__ __forceinline__ void multiply_16(const Weights& w, const uint4 (&x)[N], Sums& d) {
#pragma unroll
    for (int j = 0; j < WARP_GRANULES; j++)
#pragma unroll
      for (int p = 0; p < K_PARTS; p++) {
        const uint4 first = x[(j * K_PARTS + p) * GROUPS], second = x[(j * K_PARTS + p) * GROUPS + 1];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
          tensor_product(d[u][p][0], d[u][p][1], d[u][p][2], d[u][p][3], first.x, first.y, first.z, first.w, w[u][j].x, w[u][j].y);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
          tensor_product(d[u][p][0], d[u][p][1], d[u][p][2], d[u][p][3], second.x, second.y, second.z, second.w, w[u][j].z, w[u][j].w);
      }
  }
  static __device__ __forceinline__ void multiply_8(const Weights& w, const uint4 (&x)[N], Sums& d) {
    Sums other = {};
    Sums& e = TWO_SUMS ? other : d;
#pragma unroll
    for (int j = 0; j < WARP_GRANULES; j++)
#pragma unroll
      for (int p = 0; p < K_PARTS; p++) {
        const uint4 in = x[j * K_PARTS + p], v = w[0][j], u = w[1][j];
        tensor_product(d[0][p][0], d[0][p][1], d[1][p][0], d[1][p][1], v.x, u.x, v.y, u.y, in.x, in.y);
        tensor_product(e[0][p][0], e[0][p][1], e[1][p][0], e[1][p][1], v.z, u.z, v.w, u.w, in.z, in.w);
      }
    if constexpr (TWO_SUMS)
#pragma unroll
      for (int p = 0; p < K_PARTS; p++)
#pragma unroll
        for (int i = 0; i < 4; i++) d[i / 2][p][i % 2] += other[i / 2][p][i % 2];
  }
  // Stores a warp's sums of a unit in shared memory, [row][column]; a column takes the sums of its own part of k.
  static __device__ __forceinline__ void put(const Context<M>& c, float* to, const float (&d)[SUM_PARTS][LANE_SUMS]) {
    const int g = c.lane() / 4, t = c.lane() % 4, column = GROUPS == 2 ? t * 2 : g;
#pragma unroll
    for (int h = 0; h < GROUPS; h++) {
      float2 y = make_float2(d[0][2 * h], d[0][2 * h + 1]);
#pragma unroll
      for (int p = 1; p < SUM_PARTS; p++) {
        // All parts are read: a choice of what to read would be a choice of address, and registers have none.
        const float2 other = make_float2(d[p][2 * h], d[p][2 * h + 1]);
        const bool own = column / G::UNIT_ROWS == p;
        y.x = own ? other.x : y.x, y.y = own ? other.y : y.y;
      }
      y.x *= Codes::FACTOR, y.y *= Codes::FACTOR;
      float* at = to + (S::k_group(c) * M::ROWS + S::row_group(c) * WARP_ROWS) * OPERAND_ROWS;
      if constexpr (GROUPS == 2) {
        *reinterpret_cast<float2*>(at + (h * 8 + g) * OPERAND_ROWS + column) = y;
      } else {
        at[t * 2 * OPERAND_ROWS + column] = y.x;
        at[(t * 2 + 1) * OPERAND_ROWS + column] = y.y;
      }
    }
  }

  // Multiplies a block of the input with the units of a pass: `here` of them. `first`: weights of the first turn, if they are there before.
  static __device__ __forceinline__ void add(Context<M>& c, int block, const Weights& first, const uint4 (&x)[N], const Input& input, int here, Sums (&d)[TURNS]) {
    constexpr int DONE = WEIGHTS_FIRST ? 1 : 0; // turns
    if constexpr (WEIGHTS_FIRST) multiply(first, x, 0, d);
    if constexpr (TURNS > DONE)
      repeat<LOOPS, TURNS - DONE>([&](int i) { return (i + DONE) * AT_ONCE < here; }, [&](int i) {
        const int turn = i + DONE;
        const bool lone = turn * AT_ONCE + 1 >= here;
        if constexpr (PLAIN) {
          Weights w;
          fetch(c, block, lone, w);
          multiply(w, x, turn, d);
        } else {
          Codes::multiply(c, block, lone, x, input, d[turn]);
        }
      });
  }
  // Brings the sums of a pass from registers to shared memory and completes them: of `here` units, from unit `first` of the task on.
  static __device__ __forceinline__ void end_pass(Context<M>& c, const Entry& e, int which, RowsEpilogue<M, G>& epilogue, const Sums (&d)[TURNS], int first, int here) {
    constexpr int BATCHES = ceil_div(PASS, S::BATCH);
    repeat<LOOPS, BATCHES>([&](int batch) { return batch * S::BATCH < here; }, [&](int batch) {
      float* sums = c.reduce() + c.batch * (S::BATCH * S::UNIT_SUMS);
      pick<0, BATCHES>(batch, [&](auto i) {
        constexpr int AT = i.VALUE * S::BATCH; // units before this batch
        // The remainder keeps an index in bounds that the condition leaves out.
#pragma unroll
        for (int u = 0; u < S::BATCH; u++)
          if (AT + u < PASS) put(c, sums + u * S::UNIT_SUMS, d[(AT + u) / AT_ONCE % TURNS][(AT + u) % AT_ONCE]);
      });
      c.barrier();
      if (first == 0 && batch == 0) epilogue.load_factor(c);
      Ops::with(which, [&](auto op) {
        epilogue.template run<typename decltype(op)::Type>(c, e, sums, int(e.lo) + first + batch * S::BATCH, here - batch * S::BATCH, batch == 0);
      });
      c.batch ^= 1;
    });
  }

  // All SMs reach a norm at about the same time, and would wait for its weights when their input is there.
  static __device__ __forceinline__ void prefetch_norm(const Context<M>& c, const Entry& e) {
    constexpr int LINE = 128 / sizeof(float);
    if constexpr (G::NORM != Norm::NONE && !NORM_FIRST)
      for (int at = c.tid() * LINE; at < G::K; at += S::THREADS * LINE) prefetch_near(c.template constant<float>(e.norm_weight) + at);
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e, int which) {
    prefetch_norm(c, e);
    if constexpr (S::CHOSEN) {
      static_assert(sizeof...(Others) == 0, "chosen parts share no code");
      each_dealt_part<M, G>(c, e, [&](const Entry& of, u32 part, bool is_first) { run_units(c, of, which, part, is_first); });
    } else {
      run_units(c, e, which, 0, true);
    }
  }
  // Units of W, or of a part that rows chose.
  static __device__ __forceinline__ void run_units(Context<M>& c, const Entry& e, int which, u32 part, bool is_first) {
    u32 active = active_rows(c);
    Extent x = extent(c, e, which);
    const int units = int(uniform(e.hi - e.lo));
    RowsEpilogue<M, G> epilogue(c, x.out);
    if constexpr (S::CHOSEN) {
      const int first_row = S::row_group(c) * WARP_ROWS;
      active = uniform(deal_of<M>().rows[part * Deal<M>::MASKS + first_row / 32]) >> first_row % 32;
      epilogue.begin_part(part);
      if constexpr (SLOT_BYTES > 0)
#pragma unroll
        for (int h = 0; h < GROUPS; h++) x.slots[h] = slot_of_part<M, S::EACH>(first_row + h * 8 + c.lane() / 4, part) * SLOT_BYTES;
    } else if constexpr (has_columns_of_slots<G>(nullptr)) {
      epilogue.begin_slot(0);
    }
    Means means{};
    if constexpr (G::NORM == Norm::LAYER) means = layer_statistics(c, x, active);
    uint4 words[KEPT][N], operands[KEPT][N];
    Input inputs[KEPT];
    NormWeights norms[KEPT];
    Squares squares = {};
    const auto take = [&](int block, int i) {
      settle(c, x, block, words[i]);
      normalise(c, e, block, means, norms[i], words[i], squares);
      Codes::prepare(words[i], operands[i], inputs[i]);
    };
#pragma unroll
    for (int i = 0; i < KEPT; i++) issue(c, x, i, active, words[i]);
    if constexpr (NORM_FIRST)
#pragma unroll
      for (int i = 0; i < N; i += GROUPS) norms[0].of[i / GROUPS] = load_norm(c, e.norm_weight, 0, i);
    if constexpr (RESIDENT) {
#pragma unroll
      for (int block = 0; block < KEPT; block++) take(block, block);
      if (is_first) c.stamp(1);
      if constexpr (G::NORM == Norm::RMS) put_squares(c, squares);
    }
#pragma unroll 1
    for (int first = 0; first < (ONE_PASS ? 1 : units); first += ONE_PASS ? 1 : x.pass) {
      const int here = ONE_PASS ? units : min(x.pass, units - first);
      Ops::with(which, [&](auto op) { epilogue.template ask<typename decltype(op)::Type>(c, e, int(e.lo) + first, here); });
      Sums d[TURNS] = {};
      Weights w;
      if constexpr (RESIDENT) {
#pragma unroll
        for (int block = 0; block < KEPT; block++) add(c, block, w, operands[block], inputs[block], here, d);
      } else {
#pragma unroll 1
        for (int block = 0; block < x.blocks; block++) {
          if constexpr (WEIGHTS_FIRST) fetch(c, block, here < 2, w);
          take(block, 0);
          if (is_first && first == 0 && block == 0) c.stamp(1);
          // The first block of the next pass follows the last one of this pass.
          const bool more = block + 1 < x.blocks;
          if (more || (!ONE_PASS && first + x.pass < units)) issue(c, x, more ? block + 1 : 0, active, words[0]);
          add(c, block, w, operands[0], inputs[0], here, d);
        }
        // Later passes add the same squares again; nothing reads those.
        if constexpr (G::NORM == Norm::RMS)
          if (first == 0) put_squares(c, squares);
      }
      if (ONE_PASS || first + x.pass >= units) c.stamp(2);
      end_pass(c, e, which, epilogue, d, first, here);
    }
    Ops::with(which, [&](auto op) {
      typedef typename decltype(op)::Type E;
      if constexpr (E::EPILOGUE == Epilogue::LOGITS) epilogue.template publish_best<E>(c, e);
    });
  }
};

// All other types: rows of fp32 in shared memory, a block of k at a time.
template <class M, class G>
struct RowsMatVecLanes {
  typedef RowsMatVecShape<M, G> S;
  typedef Words<M, G::K> W;
  static constexpr int PASS = G::PASS, BLOCK_K = S::BLOCK * S::GRANULE_K, LANE_K = LANE_BYTES / S::ELEM;
  typedef Words<M, SlotColumns<G>::X_COLS> At;
  static_assert(ROW_GROUPS<M> == 1, "every warp has all rows");
  static_assert(SlotColumns<G>::X_STEP % W::PIECE_COLS == 0, "a slot begins with a piece of words");

  static __device__ __forceinline__ float* staged(const Context<M>& c, int row) { return reinterpret_cast<float*>(c.stage()) + row * BLOCK_K; }

  // All threads bring a block of k, of all rows, to shared memory. Ends with a block barrier.
  static __device__ __forceinline__ void fetch(Context<M>& c, const u8* x, int block, u32 part) {
    const int first = block * BLOCK_K / W::PIECE_COLS, pieces = BLOCK_K / W::PIECE_COLS;
    c.barrier();
    // Whole warps wait together.
    for (int base = 0; base < pieces * M::ROWS; base += S::THREADS) {
      const int i = base + c.tid(), row = i % M::ROWS, piece = first + i / M::ROWS;
      const bool in = i < pieces * M::ROWS;
      bool want = in && piece < W::PIECES && takes_part<M>(row);
      int first_x = 0;
      if constexpr (S::CHOSEN) {
        want = want && row_chose<M>(row, part);
        first_x = int(slot_of_part<M, S::EACH>(row, part)) * S::Slots::X_STEP;
      }
      uint4 v[1] = {make_uint4(0, 0, 0, 0)};
      const u8* from = x + At::at(row % M::ROWS, first_x + piece * W::PIECE_COLS);
      load_piece(from, want, v[0]);
      await_pieces<1>(from, [](int) { return 0u; }, v, c.waiter());
      float y[W::PIECE_COLS];
      unpack_piece<M>(v[0], y);
      if (in)
#pragma unroll
        for (int k = 0; k < W::PIECE_COLS; k++) staged(c, row)[i / M::ROWS * W::PIECE_COLS + k] = y[k];
    }
    c.barrier();
  }
  // Sums over the staged block, of rows warp, warp + WARPS, ..: lanes over k.
  template <class F>
  static __device__ __forceinline__ void add_rows(const Context<M>& c, int block, float* sums, F f) {
#pragma unroll 1
    for (int row = c.warp(); row < M::ROWS; row += M::WARPS) {
      float sum = 0.f;
      for (int k = c.lane(); k < BLOCK_K; k += 32)
        if (block * BLOCK_K + k < G::K) sum += f(row, staged(c, row)[k]);
      sum = warp_sum(sum);
      if (c.lane() == 0) sums[row] += sum;
    }
  }
  // Leaves the statistics of the rows in the state, under group 0: the mean (0 without LayerNorm), and 1 / deviation.
  static __device__ __forceinline__ void statistics(Context<M>& c, const u8* x, u32 part) {
    float* mean = rows_state<M>().stat[c.task & 1][0][0];
    float* square = rows_state<M>().stat[c.task & 1][1][0];
    c.barrier();
    if (c.tid() < M::ROWS) mean[c.tid()] = square[c.tid()] = 0.f;
#pragma unroll 1
    for (int which = G::NORM == Norm::LAYER ? 0 : 1; which < 2; which++) {
#pragma unroll 1
      for (int block = 0; block < S::BLOCKS; block++) {
        fetch(c, x, block, part);
        if (which == 0)
          add_rows(c, block, mean, [](int, float v) { return v; });
        else
          add_rows(c, block, square, [&](int row, float v) { return (v - mean[row]) * (v - mean[row]); });
      }
      c.barrier();
      if (c.tid() < M::ROWS) {
        if (which == 0)
          mean[c.tid()] *= 1.f / G::K;
        else
          square[c.tid()] = rsqrtf(square[c.tid()] * (1.f / G::K) + G::EPS);
      }
      c.barrier();
    }
  }
  static __device__ __forceinline__ void normalise(Context<M>& c, const Entry& e, int block) {
    const float* mean = rows_state<M>().stat[c.task & 1][0][0];
    const float* factor = rows_state<M>().stat[c.task & 1][1][0];
    const float* weight = c.template constant<float>(e.norm_weight);
    const float* bias = c.template constant<float>(e.norm_bias);
    for (int i = c.tid(); i < M::ROWS * BLOCK_K; i += S::THREADS) {
      const int row = i / BLOCK_K, k = block * BLOCK_K + i % BLOCK_K;
      float* x = staged(c, row) + i % BLOCK_K;
      *x = k < G::K ? (*x - mean[row]) * factor[row] * weight[k] + (G::NORM == Norm::LAYER && e.norm_bias != ~0u ? bias[k] : 0.f) : 0.f;
    }
    c.barrier();
  }
  // Adds a lane's part of a granule of plain weights, which begins at element `first` of the block.
  static __device__ __forceinline__ void add_values(const Context<M>& c, const uint4 b, int first, float (&d)[M::ROWS]) {
    float w[LANE_K];
    const u32 word[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (S::ELEM == 4)
        w[i] = __uint_as_float(word[i]);
      else
        w[2 * i] = bf16_lo(word[i]), w[2 * i + 1] = bf16_hi(word[i]);
    }
    const int k = first + c.lane() / 4 / G::UNIT_ROWS * S::PART_K + c.lane() % 4 * LANE_K;
#pragma unroll
    for (int row = 0; row < M::ROWS; row++)
#pragma unroll
      for (int i = 0; i < LANE_K; i++) d[row] += staged(c, row)[k + i] * w[i];
  }
  static __device__ __forceinline__ void multiply(Context<M>& c, int block, float (&d)[M::ROWS]) {
    const u8* slot = ring_take(c, c.ring) + c.warp() * S::Weights::BYTES;
#pragma unroll 1
    for (int j = 0; j < S::WARP_GRANULES; j++) {
      if (!S::exists(c, block, j)) continue;
      const u8* granule = slot + j * (M::WARPS * S::Weights::BYTES);
      const int k = (j * M::WARPS + c.warp()) * S::GRANULE_K;
      if constexpr (S::Weights::CODED)
        RowsCodesLanes<M, G>::add(c, granule, [&](int row) { return staged(c, row) + k; }, d);
      else
        add_values(c, *reinterpret_cast<const uint4*>(granule + c.lane() * LANE_BYTES), k, d);
    }
    ring_release(c, c.ring);
    c.ring.next();
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    if constexpr (S::CHOSEN)
      each_dealt_part<M, G>(c, e, [&](const Entry& of, u32 part, bool is_first) { run_units(c, of, part, is_first); });
    else
      run_units(c, e, 0, true);
  }
  // Units of W, or of a part that rows chose.
  static __device__ __forceinline__ void run_units(Context<M>& c, const Entry& e, u32 part, bool is_first) {
    const int units = int(uniform(e.hi - e.lo)), passes = ceil_div(units, PASS);
    const u8* x = words_of<M, SlotColumns<G>::X_COLS>(c, e.x);
    RowsEpilogue<M, G> epilogue(c, RowsEpilogue<M, G>::template words<G>(c, e));
    if constexpr (S::CHOSEN)
      epilogue.begin_part(part);
    else if constexpr (has_columns_of_slots<G>(nullptr))
      epilogue.begin_slot(0);
    if constexpr (G::NORM != Norm::NONE) statistics(c, x, part);
#pragma unroll 1
    for (int pass = 0; pass < passes; pass++) {
      const int first = pass * PASS, here = min(PASS, units - first);
      float d[PASS][M::ROWS] = {};
#pragma unroll 1
      for (int block = 0; block < S::BLOCKS; block++) {
        fetch(c, x, block, part);
        if constexpr (G::NORM != Norm::NONE) normalise(c, e, block);
#pragma unroll
        for (int u = 0; u < PASS; u++)
          if (u < here) multiply(c, block, d[u]);
      }
      if (is_first) c.stamp(1);
#pragma unroll
      for (int u = 0; u < PASS; u++) {
        if (u >= here) break;
        float* sums = c.reduce() + c.batch * (S::BATCH * S::UNIT_SUMS);
#pragma unroll
        for (int row = 0; row < M::ROWS; row++) {
          float v = d[u][row];
          v += __shfl_xor_sync(~0u, v, 1);
          v += __shfl_xor_sync(~0u, v, 2);
          if (c.lane() % 4 == 0) sums[(c.warp() * M::ROWS + row) * OPERAND_ROWS + c.lane() / 4] = v;
        }
        c.barrier();
        epilogue.template run<G>(c, e, sums, int(e.lo) + first + u, 1, false);
        c.batch ^= 1;
      }
    }
    c.stamp(2);
    if constexpr (G::EPILOGUE == Epilogue::LOGITS) epilogue.template publish_best<G>(c, e);
  }
};

template <class M, class G, class... Others>
struct RowsMatVec {
  static constexpr bool TENSOR = STAGE_BF16<M> && M::WIRE == Elem::BF16;
  // `which`: the number of the op among these.
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e, int which = 0) {
    static_assert(ROW_GROUPS<M> == 1 || !Coding<M, G>::CODED, "codes meet at most a tile of rows");
    static_assert(TENSOR || sizeof...(Others) == 0, "lanes share no code");
    if constexpr (TENSOR)
      RowsMatVecTensor<M, G, Others...>::run(c, e, which);
    else
      RowsMatVecLanes<M, G>::run(c, e);
  }
};
