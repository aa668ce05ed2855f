// Runs ops of batch kernels by one block of threads on a CPU over random inputs, and compares each row with its formula in double
// precision. Words and chunks are in memory before a task begins, so waits and signals are left out; a wait for a word that was not
// published ends the program. Prints a line for each case: its name, and the largest difference divided by the largest expected value.

#include "block.h"
#include "runtime/queue.cuh"
#include "op_cases.h"
#include "op_packets.h"

// ---- in place of words and steps of runtime/sync.cuh, and of runtime/ring.cuh ---------------------------------------

static void hand_over_step(u32* to, u32 step) { *to = step; }
static void store_word(u32* to, u32 word) { *to = word; }
static void load_piece(const u8* from, bool active, uint4& v) {
  if (active) std::memcpy(&v, from, 16);
}
template <int N, class Offset>
static void await_pieces(const u8*, Offset, uint4 (&v)[N], Waiter) {
  for (const uint4& piece : v)
    if (piece.x == ~0u || piece.y == ~0u || piece.z == ~0u || piece.w == ~0u) missing();
}
template <int N, class Offset>
static void await_words(const u8* base, Offset offset, const bool (&active)[N], u32 (&v)[N], Waiter) {
  for (int i = 0; i < N; i++) {
    v[i] = active[i] ? *reinterpret_cast<const u32*>(base + offset(i)) : 0;
    if (v[i] == ~0u) missing();
  }
}

#include "runtime/context.cuh"

// Chunks in the order of the stream are after the shared memory of the machine, where `ldmatrix` may read them.
constexpr int RING_AT = 1 << 18, SLOT_BYTES = 1 << 13, SLOTS = 96;
static int chunk_count;
static u8* new_chunk() {
  if (chunk_count == SLOTS) std::abort();
  return smem + RING_AT + chunk_count++ * SLOT_BYTES;
}
template <class M>
static const u8* ring_take(Context<M>&, const RingCursor<M>& at) {
  const int chunk = int(at.use * M::SLOTS + at.slot);
  if (chunk >= chunk_count) missing();
  return smem + RING_AT + chunk * SLOT_BYTES;
}
template <class M>
static void ring_take_pair(Context<M>& c, const RingCursor<M>& a, const RingCursor<M>& b, const u8*& first, const u8*& second) {
  first = ring_take(c, a);
  second = ring_take(c, b);
}
template <class M>
static void ring_release(Context<M>&, const RingCursor<M>&) {}
template <class M>
static void ring_release_pair(Context<M>&, const RingCursor<M>&, const RingCursor<M>&, bool = true) {}

#include "runtime/stage.cuh"
#include "ops/matvec_formats.cuh"
#include "ops/table.cuh"
#include "ops/matvec.cuh"
#include "ops/attention_records.cuh"
#include "ops/attention_tensor.cuh"
#include "ops/attention.cuh"
#include "ops/mix.cuh"
#include "rows/context.cuh"
#include "rows/words.cuh"

// ---- in place of what a deal takes of runtime/ring.cuh and runtime/sync.cuh: the choices of a layer are taken once ------

template <class M>
constexpr bool RING_COUNTERS = true;
template <class M>
constexpr bool chooses(decltype(M::CHOOSES)*) {
  return true;
}
template <class M>
constexpr bool chooses(...) {
  return false;
}
template <bool>
struct Slot {
  static void init(u64* word, u32) { *word = 0; }
  static void arrive(u64* word) { ++*word; }
};
enum class WaitKind : u32 { RING_EMPTY };
template <bool>
static void await_slot(u64*, u32, u32, Waiter, WaitKind) {
  missing();
}
static void add_to(u32* sum, u32 value) { *sum += value; }

#include "rows/deal.cuh"
#include "rows/select.cuh"
#include "rows/matvec_codes.cuh"
#include "rows/matvec.cuh"
#include "rows/attention.cuh"
#include "ops/route.cuh"
#include "rows/experts.cuh"
#include "rows/mix.cuh"
#include "ops/convolve.cuh"
#include "ops/scan.cuh"
#include "ops/group_norm.cuh"
#include "rows/convolve.cuh"
#include "rows/scan.cuh"
#include "rows/group_norm.cuh"
#include "op_formulas.h"
#include "op_peers.h"
#include "op_recurrent.h"
#include "op_caches.h"
#include "op_codes.h"

// ---- a block and its memory -----------------------------------------------------------------------------------------

template <Elem E, int ROWS_, bool MOVED = false, int WARPS_ = ::WARPS, Dot D = E == Elem::BF16 ? Dot::MMA : Dot::FMA>
struct Machine {
  static constexpr int SMS = 1, WARPS = WARPS_, SLOTS = 3, SLOT_BYTES = ::SLOT_BYTES, REDUCE_BATCH = 2, STAMPS_MAX = 0;
  static constexpr int STAGE_AT = 0, REDUCE_AT = 1 << 16, HEADS_AT = 1 << 17, RESIDUAL_AT = HEADS_AT + (1 << 15);
  static constexpr int QUEUE_AT = RESIDUAL_AT + (1 << 16), STATE_AT = QUEUE_AT + 1024, SCRATCH_BYTES = 1 << 17;
  static constexpr Elem WEIGHT = E, CACHE = E, WIRE = E;
  static constexpr Dot DOT = D;
  static constexpr bool TRACE = false;
  static constexpr int ROWS = ROWS_, RESIDUAL_COLS = 240, REGISTERS = 216, LOADER_REGISTERS = MOVED ? 72 : 0;
  static constexpr u32 CONTEXT_MAX = 128, PAGE_ROWS = 32, BLOCKS = CONTEXT_MAX / PAGE_ROWS, PAGES = 2 * BLOCKS;
  static constexpr u64 POOL_ROWS = PAGES * PAGE_ROWS;
};
// One of three devices.
template <class M>
struct Third : M {
  static constexpr int PEERS = 2;
  typedef RowsDevicesParams Launch;
};
static RowsParams params;
static RowsDevicesParams with_peers;
static Entry entry;
static Row rows[64];
static u32 tag;
static std::vector<u64> exchange;
static std::vector<u8> cache;

constexpr u32 OLD_WORD = 0xdeadbeefu; // what the step before left in its phase

// Words of both phases that no task may read.
template <class M, int COLS>
static u32 words() {
  const size_t at = (exchange.size() + 15) / 16 * 16;
  exchange.resize(at + Words<M, COLS>::PHASE_BYTES / 4);
  u32* first = reinterpret_cast<u32*>(exchange.data() + at);
  const size_t count = Words<M, COLS>::PHASE_BYTES / 4;
  for (size_t i = 0; i < 2 * count; i++) first[i] = i / count == (tag & 1) ? NO_WORD : OLD_WORD;
  return u32(at);
}
template <class M, int COLS>
static u32* word(u32 at, int row, int col, bool other = false) {
  return reinterpret_cast<u32*>(reinterpret_cast<u8*>(exchange.data() + at) + ((tag & 1) != other ? Words<M, COLS>::PHASE_BYTES : 0) +
                                Words<M, COLS>::at(row, col));
}
template <class M, int COLS>
static void put_words(u32 at, int row, const std::vector<float>& values) {
  typedef Words<M, COLS> W;
  const auto value = [&](int col) { return col < COLS ? values.at(col) : 0.f; };
  for (int col = 0; col < W::PIECES * W::PIECE_COLS; col += W::WORD_COLS)
    *word<M, COLS>(at, row, col) = W::WORD_COLS == 2 ? bf16_pair(value(col), value(col + 1)) : __float_as_uint(value(col));
}
// NaN if nothing was published, or if the word of the other phase was not cleared.
template <class M, int COLS>
static float published(u32 at, int row, int col) {
  const int even = col / Words<M, COLS>::WORD_COLS * Words<M, COLS>::WORD_COLS;
  const u32 found = *word<M, COLS>(at, row, even);
  if (found == NO_WORD || *word<M, COLS>(at, row, even, true) != NO_WORD) return std::nanf("");
  if (Words<M, COLS>::WORD_COLS == 1) return __uint_as_float(found);
  return col % 2 ? bf16_hi(found) : bf16_lo(found);
}
// Whether a row that takes no part was not changed, and has `other` in the other phase: nothing if the task clears its words, which
// begin with column `first`.
template <class M, int COLS>
static bool left_alone(u32 at, int row, u32 other = NO_WORD, int first = 0) {
  typedef Words<M, COLS> W;
  bool all = true;
  for (int col = first; col < W::PIECES * W::PIECE_COLS; col += W::WORD_COLS)
    all = all && *word<M, COLS>(at, row, col) == NO_WORD && *word<M, COLS>(at, row, col, true) == other;
  return all;
}

// Begins a case: `active` rows take part in the step.
template <class M>
static void start(u64 seed, u64 active) {
  exchange.clear();
  constants.clear();
  cache.clear();
  chunk_count = 0;
  tag = 6 + u32(seed);
  std::memset(smem, 0xff, sizeof smem); // not a number, until a task writes it
  std::memset(rows, 0, sizeof rows);
  params = RowsParams{};
  params.tag = tag;
  params.rows = rows;
  params.row_count = M::ROWS;
  entry = Entry{};
  entry.norm_bias = ~0u;
  std::memcpy(rows_state<M>().active, &active, sizeof rows_state<M>().active);
}
template <class M, class Op>
static void task(int thread) {
  Context<M> c{peers<M>() > 0 ? with_peers : params};
  c.tag = tag;
  c.thread = thread;
  c.warp_index = thread / 32;
  c.patience = 2;
  Op::run(c, entry);
}
template <class M, class Op>
static void run() {
  params.exchange = exchange.data();
  params.pack = constants.data();
  params.cache = cache.data();
  if constexpr (peers<M>() > 0)
    run_with_peers<M>(params, with_peers, exchange, [] { run_block(task<M, Op>, M::WARPS * 32); });
  else
    run_block(task<M, Op>, M::WARPS * 32);
}
static bool takes(u64 active, int row) { return active >> row & 1; }
template <class M>
static float* residual(int row) { return reinterpret_cast<float*>(smem + M::RESIDUAL_AT) + row * M::RESIDUAL_COLS; }

// ---- matvec ---------------------------------------------------------------------------------------------------------

template <int ROWS_, int K_, Norm N, Epilogue E, int BLOCK, int PASS_, int UNIT_ROWS_ = 8, bool B = false>
struct Product {
  static constexpr int ROWS = ROWS_, K = K_, UNIT_ROWS = UNIT_ROWS_, UNITS = (ROWS + UNIT_ROWS - 1) / UNIT_ROWS;
  static constexpr int CHUNK = BLOCK, PASS = PASS_, PARTS = 3;
  static constexpr bool BIAS = B, PUBLISH = true;
  static constexpr Norm NORM = N;
  static constexpr Epilogue EPILOGUE = E;
  static constexpr Act ACT = Act::SILU;
  static constexpr float EPS = 1e-5f, SCALE = E == Epilogue::GATED ? 1.f : 0.5f, SOFTCAP = E == Epilogue::LOGITS ? 3.f : 0.f;
};

// The gate is multiplied first.
template <class P>
struct Factor : P {
  static constexpr float SCALE = 0.75f;
};

// The row of the matrix for a row of a unit, or -1. In gated units, the first half is from the first half of the matrix.
template <class G>
static int row_of_matrix(int unit, int row) {
  if (G::EPILOGUE == Epilogue::GATED || G::EPILOGUE == Epilogue::CLAMPED) {
    const int half = unit * 4 + row % 4;
    return half >= G::ROWS / 2 ? -1 : row < 4 ? half : G::ROWS / 2 + half;
  }
  return unit * G::UNIT_ROWS + row < G::ROWS ? unit * G::UNIT_ROWS + row : -1;
}
// Granule `j` of a unit in the layout of the pack, with values of W (ROWS, K).
template <class M, class G>
static std::vector<u8> granule_of(u64&, int unit, int j, std::vector<double>& w, ...) {
  typedef RowsMatVecShape<M, G> S;
  typedef typename ElemOf<M::WEIGHT>::type W;
  std::vector<u8> bytes;
  for (int part = 0; part < S::K_PARTS; part++)
    for (int row = 0; row < G::UNIT_ROWS; row++)
      for (int i = 0; i < S::PART_K; i++) {
        const int r = row_of_matrix<G>(unit, row), k = (j * S::K_PARTS + part) * S::PART_K + i;
        W value;
        narrow(r >= 0 && k < G::K ? float(w[size_t(r) * G::K + k]) : 0.f, &value);
        const u8* from = reinterpret_cast<const u8*>(&value);
        bytes.insert(bytes.end(), from, from + sizeof value);
      }
  return bytes;
}
// The same with random codes, whose values are written to `w`.
template <class M, class G>
static std::vector<u8> granule_of(u64& state, int unit, int j, std::vector<double>& w, decltype(int(G::CODE))) {
  int rows[8];
  for (int row = 0; row < 8; row++) rows[row] = row_of_matrix<G>(unit, row);
  return random_granule<G>(state, j, rows, w);
}
// The chunks of a matrix in the order of `RowsLoader`: for PASS units at a time, one block of k of each unit after another.
template <class M, class G>
static void stream(u64& state, std::vector<double>& w) {
  typedef RowsMatVecShape<M, G> S;
  for (int first = 0; first < G::UNITS; first += G::PASS)
    for (int block = 0; block < S::BLOCKS; block++)
      for (int unit = first; unit < min(first + G::PASS, G::UNITS); unit++) {
        u8* to = new_chunk();
        for (int j = block * S::BLOCK; j < min((block + 1) * S::BLOCK, S::UNIT_GRANULES); j++) {
          const std::vector<u8> granule = granule_of<M, G>(state, unit, j, w, 0);
          if ((j % S::BLOCK + 1) * granule.size() > SLOT_BYTES) std::abort();
          std::memcpy(to + (j % S::BLOCK) * granule.size(), granule.data(), granule.size());
        }
      }
}

// Op WHICH of those that share code.
template <class M, int WHICH, class... Gs>
struct Sharing {
  static void run(Context<M>& c, const Entry& e) { RowsMatVec<M, Gs...>::run(c, e, WHICH); }
};

template <class M, class G, class Op = RowsMatVec<M, G>>
static void matvec(const char* name, u64 active) {
  constexpr int COLS = G::EPILOGUE == Epilogue::GATED ? G::ROWS / 2 : G::ROWS;
  for (u64 seed = 1; seed <= 2; seed++) {
    u64 state = seed * 77;
    start<M>(seed, active);
    // Sums over codes are compared as fp32, before they are rounded to be published; then rows may have different sizes.
    constexpr bool CODED = Coding<M, G>::CODED, SUMS = CODED && G::EPILOGUE == Epilogue::RESIDUAL;
    const auto size = [](int row) { return SUMS && G::NORM == Norm::NONE && row % 3 == 1 ? 0x1p20f : 1.f; };
    const std::vector<float> values = numbers(state, size_t(G::ROWS) * G::K), weight = numbers(state, G::K);
    std::vector<double> w(values.begin(), values.end());
    const std::vector<float> norm_bias = numbers(state, G::K), bias = numbers(state, G::ROWS + 8);
    const std::vector<float> before = numbers(state, size_t(M::ROWS) * M::RESIDUAL_COLS), row_scales = numbers(state, G::UNITS * 8);
    std::vector<std::vector<float>> x;
    entry.x = words<M, G::K>();
    entry.out = words<M, COLS>();
    for (int row = 0; row < M::ROWS; row++) {
      x.push_back(numbers(state, G::K));
      for (float& v : x[row]) v *= size(row);
      if (takes(active, row)) put_words<M, G::K>(entry.x, row, x[row]);
    }
    stream<M, G>(state, w);
    entry.lo = 0, entry.hi = G::UNITS, entry.j = 1;
    entry.norm_weight = constant(weight);
    if (G::NORM == Norm::LAYER) entry.norm_bias = constant(norm_bias);
    if (G::BIAS) entry.bias = constant(bias);
    if (Coding<M, G>::ROW_SCALES) entry.row_scales = constant(row_scales);
    entry.aux = u32(exchange.size());
    exchange.resize(exchange.size() + 2 * M::ROWS * round_up(2 * G::PARTS, 2));
    std::memcpy(residual<M>(0), before.data(), before.size() * 4);
    std::vector<float> logits(size_t(M::ROWS) * G::ROWS);
    params.logits = logits.data();
    i32 mailbox = 0;
    params.mailbox = &mailbox; // Without one a sampler decides, and the best logits have no reader.
    run<M, Op>();

    std::vector<double> expected, found;
    const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
    for (int row = 0; row < M::ROWS; row++) {
      if (!takes(active, row)) {
        expected.push_back(1), found.push_back(left_alone<M, COLS>(entry.out, row, G::EPILOGUE == Epilogue::LOGITS ? OLD_WORD : NO_WORD));
        continue;
      }
      const std::vector<double> input = normalised(G::NORM, x[row], weight, norm_bias, G::EPS);
      std::vector<double> y(G::ROWS);
      for (int r = 0; r < G::ROWS; r++) {
        y[r] = G::BIAS ? bias[r] : 0.;
        // In the order of rows in a unit.
        const int half = G::ROWS / 2, unit_row = G::EPILOGUE == Epilogue::GATED ? r % half / 4 * 8 + r % half % 4 + r / half * 4 : r;
        const double scale = Coding<M, G>::ROW_SCALES ? row_scales[unit_row] : 1.;
        for (int k = 0; k < G::K; k++) y[r] += scale * w[size_t(r) * G::K + k] * input[k];
      }
      for (int r = 0; r < COLS; r++) {
        const double old = before[row * M::RESIDUAL_COLS + r];
        double value = y[r];
        if (G::EPILOGUE == Epilogue::ACT) value = silu(y[r]);
        if (G::EPILOGUE == Epilogue::GATED) value = silu(G::SCALE * y[r]) * y[G::ROWS / 2 + r];
        if (G::EPILOGUE == Epilogue::RESIDUAL) value = old + G::SCALE * y[r];
        if (G::EPILOGUE == Epilogue::LOGITS) value = G::SOFTCAP * std::tanh(G::SCALE * y[r] / G::SOFTCAP);
        const bool is_logit = G::EPILOGUE == Epilogue::LOGITS;
        if (SUMS) {
          expected.push_back(value / size(row)), found.push_back(residual<M>(row)[r] / size(row));
          continue;
        }
        expected.push_back(value);
        found.push_back(is_logit ? logits[row * G::ROWS + r] : published<M, COLS>(entry.out, row, r));
        if (G::EPILOGUE == Epilogue::RESIDUAL) expected.push_back(value), found.push_back(residual<M>(row)[r]);
      }
      if (G::EPILOGUE == Epilogue::LOGITS) {
        // The arg-max pair: the best of these logits, and where it is.
        const float* all = logits.data() + row * G::ROWS;
        int best = 0;
        for (int r = 1; r < G::ROWS; r++) best = all[r] > all[best] ? r : best;
        const u64* pair = exchange.data() + entry.aux + ((tag & 1) * M::ROWS + row) * round_up(2 * G::PARTS, 2) + 2 * entry.j;
        expected.push_back(all[best]), found.push_back(pair[0] >> 32 == tag ? __uint_as_float(u32(pair[0])) : std::nanf(""));
        expected.push_back(best), found.push_back(pair[1] >> 32 == tag ? u32(pair[1]) : std::nanf(""));
      }
    }
    report(name, expected, found);
  }
}

#include "rows_experts.h"
#include "rows_mix.h"

// ---- norm_add, embed, select ------------------------------------------------------------------------------------------

template <int WIDTH_>
struct Sum {
  static constexpr int WIDTH = WIDTH_, HIDDEN = WIDTH_;
  static constexpr float EPS = 1e-6f, SCALE = 0.25f;
};
template <class M, class G>
static void norm_add(const char* name, u64 active) {
  u64 state = 1234;
  start<M>(1, active);
  const std::vector<float> weight = numbers(state, G::WIDTH), before = numbers(state, size_t(M::ROWS) * M::RESIDUAL_COLS);
  entry.lo = 1, entry.hi = (G::WIDTH + 7) / 8;
  entry.x = words<M, G::WIDTH>();
  entry.out = words<M, G::WIDTH>();
  entry.norm_weight = constant(weight);
  std::vector<std::vector<float>> y;
  for (int row = 0; row < M::ROWS; row++) {
    y.push_back(numbers(state, G::WIDTH));
    if (takes(active, row)) put_words<M, G::WIDTH>(entry.x, row, y[row]);
  }
  std::memcpy(residual<M>(0), before.data(), before.size() * 4);
  run<M, RowsNormAdd<M, G>>();
  std::vector<double> expected, found;
  for (int row = 0; row < M::ROWS; row++) {
    if (!takes(active, row)) {
      expected.push_back(1), found.push_back(left_alone<M, G::WIDTH>(entry.out, row, NO_WORD, 8));
      continue;
    }
    const std::vector<double> sum = normalised(Norm::RMS, y[row], weight, {}, G::EPS);
    for (int i = 8; i < G::WIDTH; i++) {
      expected.push_back(before[row * M::RESIDUAL_COLS + i - 8] + G::SCALE * sum[i]), found.push_back(residual<M>(row)[i - 8]);
      expected.push_back(expected.back()), found.push_back(published<M, G::WIDTH>(entry.out, row, i));
    }
  }
  report(name, expected, found);
}

// A table of values in the constants; its values.
template <class M, class G, class = int>
struct MakeTable {
  static std::vector<double> run(u64& state, int rows) {
    typedef typename ElemOf<M::WEIGHT>::type W;
    const std::vector<float> table = numbers(state, rows * G::HIDDEN);
    constants.resize(table.size() * sizeof(W));
    for (size_t i = 0; i < table.size(); i++) narrow(table[i], reinterpret_cast<W*>(constants.data()) + i);
    return std::vector<double>(table.begin(), table.end());
  }
};
// A table of codes, with rows in the layout of Format::table_row.
template <int H, Code C, int GROUP, ScaleCode S, bool Z, bool R>
struct TableAs : Sum<H> {
  static constexpr Code CODE = C;
  static constexpr ScaleCode SCALE_CODE = S;
  static constexpr int GROUP_K = GROUP;
  static constexpr bool ZEROS = Z, ROW_SCALES = R;
  static constexpr int BITS = C == Code::INT8 || C == Code::E4M3 ? 8 : 4, GROUPS = GROUP == 0 ? 0 : (H + GROUP - 1) / (GROUP + (GROUP == 0));
  static constexpr int SCALE_BYTES = S == ScaleCode::F32 ? 4 : S == ScaleCode::F16 || S == ScaleCode::BF16 ? 2 : 1;
  static constexpr int SCALES_AT = ((H * BITS + 7) / 8 + 3) / 4 * 4, ZEROS_AT = SCALES_AT + GROUPS * SCALE_BYTES;
  static constexpr int ROW_SCALE_AT = (ZEROS_AT + (Z ? GROUPS : 0) + 3) / 4 * 4, ROW_BYTES = (ROW_SCALE_AT + (R ? 4 : 0) + 15) / 16 * 16;
};
template <int H, Code C, int GROUP, ScaleCode S>
struct TableLeast : TableAs<H, C, GROUP, S, false, false> {
  typedef TableAs<H, C, GROUP, S, false, false> Base;
  static constexpr bool MINIMA = true;
  static constexpr int ROW_SCALE_AT = (Base::ZEROS_AT + Base::GROUPS * Base::SCALE_BYTES + 3) / 4 * 4, ROW_BYTES = (ROW_SCALE_AT + 15) / 16 * 16;
};
template <class M, class G>
struct MakeTable<M, G, decltype(int(G::CODE))> {
  static std::vector<double> run(u64& state, int rows) {
    std::vector<double> values;
    constants.assign(size_t(rows) * G::ROW_BYTES, 0);
    for (int r = 0; r < rows; r++) {
      u8* row = reinterpret_cast<u8*>(constants.data()) + size_t(r) * G::ROW_BYTES;
      u8 bytes[4];
      double row_scale = 1;
      if (G::ROW_SCALES) row_scale = scale_of(ScaleCode::F32, word_of(state), bytes), std::memcpy(row + G::ROW_SCALE_AT, bytes, 4);
      double scale = row_scale, zero = G::CODE == Code::INT4 && !MINIMA_OF<G> ? 8 : 0, least = 0;
      for (int i = 0; i < G::HIDDEN; i++) {
        if (G::GROUP_K > 0 && i % (G::GROUP_K + (G::GROUP_K == 0)) == 0) {
          const int group = i / (G::GROUP_K + (G::GROUP_K == 0));
          // Products of fp32 numbers.
          scale = float(float(scale_of(G::SCALE_CODE, word_of(state), bytes)) * float(row_scale));
          std::memcpy(row + G::SCALES_AT + group * G::SCALE_BYTES, bytes, G::SCALE_BYTES);
          if (MINIMA_OF<G>) {
            least = least_of(G::SCALE_CODE, word_of(state), bytes);
            std::memcpy(row + G::ZEROS_AT + group * G::SCALE_BYTES, bytes, G::SCALE_BYTES);
          }
          if (G::ZEROS) zero = row[G::ZEROS_AT + group] = u8(word_of(state) >> 28);
        }
        u32 code = word_of(state) >> (32 - G::BITS);
        if (G::CODE == Code::E4M3 && (code & 127) == 127) code = 3;
        if (G::BITS == 8)
          row[i] = u8(code);
        else
          row[i / 2] |= u8(code << i % 2 * 4);
        values.push_back(float(scale * (value_of(G::CODE, code) - zero) + least));
      }
    }
    return values;
  }
};

template <class M, class G>
static void embed(const char* name, u64 active) {
  constexpr int VOCAB = 30;
  u64 state = 4321;
  start<M>(2, active);
  const std::vector<double> table = MakeTable<M, G>::run(state, VOCAB);
  entry.table = 0, entry.lo = 0, entry.hi = (G::HIDDEN + 7) / 8;
  entry.out = words<M, G::HIDDEN>();
  for (int row = 0; row < M::ROWS; row++) rows_state<M>().token[row] = row * 7 % VOCAB;
  run<M, RowsEmbed<M, G>>();
  std::vector<double> expected, found;
  for (int row = 0; row < M::ROWS; row++) {
    if (!takes(active, row)) {
      expected.push_back(1), found.push_back(left_alone<M, G::HIDDEN>(entry.out, row));
      continue;
    }
    for (int i = 0; i < G::HIDDEN; i++) {
      expected.push_back(G::SCALE * table[row * 7 % VOCAB * G::HIDDEN + i]), found.push_back(residual<M>(row)[i]);
      expected.push_back(expected.back()), found.push_back(published<M, G::HIDDEN>(entry.out, row, i));
    }
  }
  report(name, expected, found);
}

struct Selecting {
  static constexpr int PARTS = 40, VOCAB = 1000;
};
// A row that ends with its best logit, one that no longer took part, one whose steps are over, and the others.
template <class M>
static void select(const char* name, u64 active) {
  constexpr int STRIDE = 2 * Selecting::PARTS;
  u64 state = 99;
  start<M>(1, active);
  params.tag = tag - 1; // the second step of a launch
  params.eos_count = 1, params.eos[0] = 17;
  exchange.resize(size_t(2) * M::ROWS * STRIDE);
  std::vector<int> best(M::ROWS);
  for (int row = 0; row < M::ROWS; row++) {
    rows[row].steps = row == 1 ? 1 : 5;
    float top = -2;
    for (int i = 0; i < Selecting::PARTS; i++) {
      // Two parts tie: the lower id wins.
      const float value = i == 9 || i == 33 ? 1.5f : number(state);
      const int id = row == 0 ? (i == 9 ? 17 : 20 + i) : i == 33 ? 25 : 40 + i;
      if (value > top || (value == top && id < best[row])) top = value, best[row] = id;
      u64* to = exchange.data() + ((tag - 1 & 1) * M::ROWS + row) * STRIDE + 2 * i;
      if (takes(active, row)) publish(to, __float_as_uint(value), tag - 1), publish(to + 1, id, tag - 1);
    }
  }
  run<M, RowsSelect<M, Selecting>>();
  std::vector<double> expected, found;
  u64 left = 0, stays = 0;
  for (int row = 0; row < M::ROWS; row++) {
    if (!takes(active, row)) continue;
    expected.push_back(best[row]), found.push_back(rows_state<M>().token[row]);
    if (row > 1) left |= 1ull << row;
  }
  std::memcpy(&stays, rows_state<M>().active, sizeof rows_state<M>().active);
  expected.push_back(left), found.push_back(stays);
  expected.push_back(tag), found.push_back(rows_state<M>().block.acquired_tag);
  expected.push_back(17), found.push_back(rows_state<M>().token[0]);
  while (expected.size() < 9) expected.push_back(0), found.push_back(0);
  report(name, expected, found);
}

// ---- attention ------------------------------------------------------------------------------------------------------

// Two sequences: five eighths of the rows belong to the first, the others to the second, whose last row takes no part.
template <class M, class G>
static void attention(const char* name) {
  typedef typename ElemOf<M::CACHE>::type C;
  constexpr int KV = G::HEADS / G::GROUP, TASKS = G::HEADS / G::HEADS_PER_TASK, COLS = QKV_COLS<G>, OUT = G::HEADS * G::DIM;
  constexpr u32 COUNT[2] = {M::ROWS / 8 * 5, M::ROWS / 8 * 3}, STARTS[][2] = {{0, 0}, {3, 61}, {17, 32}, {40, 100}, {75, 15}};
  for (const auto& starts : STARTS) {
    u64 state = starts[0] * 31 + 5;
    const u64 active = ~0ull >> (65 - M::ROWS);
    start<M>(starts[0] & 1, active);
    const std::vector<float> q_weight = numbers(state, G::HEADS * G::DIM), k_weight = numbers(state, KV * G::DIM);
    const std::vector<float> table = numbers(state, M::CONTEXT_MAX * G::ROTARY + 1);
    const std::vector<float> scales = scales_of<M>(KV);
    const std::vector<float> sinks = SINKS_OF<G> ? numbers(state, G::HEADS) : std::vector<float>();
    // Keys and values of each sequence, position and KV head.
    const auto at = [](u32 sequence, u32 position, int kv) { return ((sequence * M::CONTEXT_MAX + position) * KV + kv) * G::DIM; };
    const std::vector<float> keys = numbers(state, 2 * M::CONTEXT_MAX * KV * G::DIM), values = numbers(state, keys.size());
    std::vector<u32> pages(2 * M::BLOCKS);
    for (u32 i = 0; i < pages.size(); i++) pages[i] = (i * 3 + 1) % M::PAGES;
    params.pages = pages.data();
    const size_t cache_bytes = KV * M::POOL_ROWS * G::PITCH * sizeof(C);
    cache.assign(2 * cache_bytes, 0xff);
    entry.k_cache = 0, entry.v_cache = u32(cache_bytes / OFFSET_BYTES);
    // The place of dimension `d` of a row of the cache.
    const auto row_of = [&](u32 kind, u32 sequence, u32 position, int kv) {
      const u32 page = pages[sequence * M::BLOCKS + position / M::PAGE_ROWS];
      return cache.data() + kind * cache_bytes + (kv * M::POOL_ROWS + page * M::PAGE_ROWS + position % M::PAGE_ROWS) * G::PITCH * sizeof(C);
    };
    for (u32 sequence = 0; sequence < 2; sequence++)
      for (u32 position = 0; position < starts[sequence]; position++)
        for (int kv = 0; kv < KV; kv++)
          for (int d = 0; d < G::DIM; d++) {
            keep<M, G>(keys[at(sequence, position, kv) + d], scales[2 * kv], row_of(0, sequence, position, kv), position, d);
            keep<M, G>(values[at(sequence, position, kv) + d], scales[2 * kv + 1], row_of(1, sequence, position, kv), position, d);
          }
    entry.x = words<M, COLS>();
    entry.out = words<M, OUT>();
    entry.q_norm = constant(q_weight), entry.k_norm = constant(k_weight), entry.rope = constant(table);
    entry.cache_scales = constant(scales);
    if constexpr (SINKS_OF<G>) entry.sinks = constant(sinks);
    std::vector<std::vector<float>> qkv;
    for (u32 row = 0; row < COUNT[0] + COUNT[1]; row++) {
      const u32 sequence = row >= COUNT[0], first = sequence ? COUNT[0] : 0;
      rows[row].sequence = sequence, rows[row].first = first, rows[row].position = starts[sequence] + row - first, rows[row].steps = 1;
      qkv.push_back(numbers(state, COLS));
      if (takes(active, row)) put_words<M, COLS>(entry.x, row, qkv[row]);
    }
    for (u32 row = 0; row < COUNT[0] + COUNT[1]; row++)
      for (int i = 0; i < TASKS; i++) {
        const u32 sequence = rows[row].sequence, end = starts[sequence];
        chunk_count = 0;
        // In the order of `RowsLoader`.
        for (u32 begin = history_begin(rows[row].position, G::WINDOW); takes(active, row) && begin < end;) {
          const u32 stop = min(begin / G::CHUNK_ROWS * G::CHUNK_ROWS + G::CHUNK_ROWS, end);
          for (u32 kind = 0; kind < 2; kind++) {
            u8* to = new_chunk();
            std::memset(to, 0xff, SLOT_BYTES);
            std::memcpy(to, row_of(kind, sequence, begin, i * G::HEADS_PER_TASK / G::GROUP), (stop - begin) * G::PITCH * sizeof(C));
          }
          begin = stop;
        }
        entry.lo = i, entry.row = row;
        run<M, RowsAttention<M, G>>();
      }

    std::vector<double> expected, found;
    const int k_at = G::HEADS * G::DIM, v_at = k_at + KV * G::DIM;
    const auto stored = [&](u32 kind, int kv, double v) { return kept<M>(v, scales[2 * kv + kind]); };
    for (u32 row = 0; row < COUNT[0] + COUNT[1]; row++) {
      if (!takes(active, row)) {
        expected.push_back(1), found.push_back(left_alone<M, OUT>(entry.out, row));
        continue;
      }
      const u32 sequence = rows[row].sequence, position = rows[row].position, before = starts[sequence];
      const u32 seen = G::WINDOW && position + 1 > G::WINDOW ? position + 1 - G::WINDOW : 0;
      const auto angles = [&](u32 of) { return std::vector<float>(table.begin() + of * G::ROTARY, table.end()); };
      // A key of the row's own sequence, from the cache or from this step.
      const auto key = [&](u32 of, int kv) {
        std::vector<double> k(keys.begin() + at(sequence, of, kv), keys.begin() + at(sequence, of, kv) + G::DIM);
        if (of >= before) k = prepared<G>(qkv[rows[row].first + of - before], k_at, k_at, KV, kv, k_weight, angles(of), G::K_EPS);
        for (double& v : k) v = stored(0, kv, v);
        return k;
      };
      const auto value = [&](u32 of, int kv, int d) {
        return stored(1, kv, of >= before ? qkv[rows[row].first + of - before][v_at + kv * G::DIM + d] : values[at(sequence, of, kv) + d]);
      };
      for (int h = 0; h < G::HEADS; h++) {
        const int kv = h / G::GROUP;
        std::vector<double> q = prepared<G>(qkv[row], 0, 0, G::HEADS, h, q_weight, angles(position), G::Q_EPS);
        for (double& x : q) x *= expected_query_factor<G>(position);
        // softmax(cap(scale * q K^T)) V over the rows of the window, up to the own one.
        std::vector<double> sums(G::DIM);
        double all = SINKS_OF<G> ? std::exp(double(sinks[h])) : 0.;
        for (u32 of = seen; of <= position; of++) {
          const std::vector<double> k = key(of, kv);
          double score = 0;
          for (int d = 0; d < G::DIM; d++) score += q[d] * k[d];
          score *= G::SCALE;
          if (G::SOFTCAP > 0) score = G::SOFTCAP * std::tanh(score / G::SOFTCAP);
          const double weight = std::exp(score);
          all += weight;
          for (int d = 0; d < G::DIM; d++) sums[d] += weight * value(of, kv, d);
        }
        for (int d = 0; d < G::DIM; d++) expected.push_back(sums[d] / all * expected_gate<G>(qkv[row], h, d)), found.push_back(published<M, OUT>(entry.out, row, h * G::DIM + d));
      }
      // The rows that the step appended.
      for (int kv = 0; kv < KV; kv++) {
        const std::vector<double> k = key(position, kv);
        for (int d = 0; d < G::DIM; d++) {
          expected.push_back(k[d]), found.push_back(found_in<M, G>(scales[2 * kv], row_of(0, sequence, position, kv), position, d));
          expected.push_back(value(position, kv, d));
          found.push_back(found_in<M, G>(scales[2 * kv + 1], row_of(1, sequence, position, kv), position, d));
        }
      }
    }
    report(name, expected, found);
  }
}

// ---- convolve, scan, group_norm -------------------------------------------------------------------------------------

// Three launches of texts in slots of their own: of some rows and of one; a row that takes no part and one beyond the launch leave their
// states alone. States are not numbers at first.
template <class M, class Op, class Text>
static void recurrent(const char* name, int each = 1, u32 parts = 1) {
  constexpr int SEQUENCES = 4;
  const auto slot_of = [](int sequence) { return u32(sequence * 3 + 2) % SEQUENCES; };
  // Rows of each sequence in each launch; below 0: one that takes no part.
  constexpr int COUNTS[3][SEQUENCES] = {{3, 1, 1, 0}, {1, -1, 2, 1}, {0, 3, -1, 4}};
  u64 seed = 99;
  const Text first(seed);
  std::vector<Text> texts(SEQUENCES, first);
  std::vector<u8> kept(SEQUENCES * Text::STATE * 4, 0xff);
  for (const auto& counts : COUNTS) {
    u64 active = 0;
    int count = 0;
    for (int n : counts) {
      for (int i = 0; i < n; i++) active |= u64(1) << (count + i);
      count += std::abs(n);
    }
    start<M>(count, active);
    params.row_count = count;
    first.constants_of(entry);
    const u32 in = words<M, Text::COLS>(), out = words<M, Text::OUT>();
    entry.x = in, entry.out = out;
    std::vector<double> expected, found;
    std::vector<std::pair<int, std::vector<double>>> results;
    u32 place = 0;
    for (int sequence = 0, row = 0; sequence < SEQUENCES; sequence++) {
      const int begin = row, n = counts[sequence];
      place += n != 0;
      for (int i = 0; i < std::abs(n); i++, row++) {
        rows[row].sequence = place - 1, rows[row].slot = slot_of(sequence), rows[row].first = begin;
        rows[row].position = u32(texts[sequence].inputs.size());
        if (n < 0) continue;
        const std::vector<float> x = numbers(seed, Text::COLS);
        put_words<M, Text::COLS>(in, row, x);
        results.emplace_back(row, texts[sequence].step(x));
      }
    }
    cache = kept;
    for (entry.j = 0; entry.j < parts; entry.j++)
      for (int index = 0; index < Text::INDICES; index += each) {
        entry.lo = index, entry.hi = min(index + each, Text::INDICES);
        run<M, Op>();
      }
    kept = cache;
    for (const auto& [row, y] : results)
      for (int i = 0; i < Text::OUT; i++) expected.push_back(y[i]), found.push_back(published<M, Text::OUT>(out, row, i));
    for (int row = 0; row < M::ROWS; row++)
      if (!takes(active, row)) expected.push_back(1), found.push_back(left_alone<M, Text::OUT>(out, row));
    for (int sequence = 0; sequence < SEQUENCES; sequence++) {
      const float* state = reinterpret_cast<const float*>(kept.data()) + slot_of(sequence) * Text::STATE;
      const std::vector<double> y = texts[sequence].state();
      for (int i = 0; i < Text::STATE; i++) {
        const bool none = texts[sequence].inputs.empty();
        expected.push_back(none ? 1 : y[i]), found.push_back(none ? std::isnan(state[i]) : state[i]);
      }
    }
    report(name, expected, found);
  }
}
template <class M, class G>
static void convolve(const char* name, int each) { recurrent<M, RowsConvolve<M, G>, ConvolveText<G>>(name, each); }
template <class Of, int PARTS_>
struct Parted : Of {
  static constexpr int PARTS = PARTS_;
};
template <class M, class G>
static void scan(const char* name) { recurrent<M, RowsScan<M, G>, ScanText<G>>(name, 1, G::PARTS); }
template <class M, class G>
static void group_norm(const char* name, u64 active) {
  u64 seed = 5;
  start<M>(1, active);
  const u32 in = words<M, G::WIDTH>(), gates = words<M, G::GATE_COLS>(), out = words<M, G::WIDTH>();
  const std::vector<float> gains = numbers(seed, G::WIDTH);
  entry.x = in, entry.gate = gates, entry.out = out, entry.norm_weight = constant(gains);
  std::vector<double> expected, found;
  std::vector<std::vector<double>> results(M::ROWS);
  for (int row = 0; row < M::ROWS; row++)
    if (takes(active, row)) {
      const std::vector<float> x = numbers(seed, G::WIDTH), gate = numbers(seed, G::GATE_COLS);
      put_words<M, G::WIDTH>(in, row, x), put_words<M, G::GATE_COLS>(gates, row, gate);
      results[row] = expected_groups<G>(x, gate, gains);
    }
  for (int group = 0; group < G::GROUPS; group++) {
    entry.lo = group, entry.hi = group + 1;
    run<M, RowsGroupNorm<M, G>>();
  }
  for (int row = 0; row < M::ROWS; row++) {
    if (!takes(active, row)) expected.push_back(1), found.push_back(left_alone<M, G::WIDTH>(out, row));
    for (size_t i = 0; i < results[row].size(); i++) expected.push_back(results[row][i]), found.push_back(published<M, G::WIDTH>(out, row, i));
  }
  report(name, expected, found);
}

int main() {
  typedef Machine<Elem::BF16, 8> B8;
  typedef Machine<Elem::BF16, 16> B16;
  typedef Machine<Elem::BF16, 16, true> Moved;
  // Two and four tiles of rows, which warps share.
  typedef Machine<Elem::BF16, 32, true, 8> B32;
  typedef Machine<Elem::BF16, 64, true, 8> B64;
  typedef Machine<Elem::BF16, 32, true, 4> Narrow;
  typedef Machine<Elem::F32, 8> F8;
  const u32 some = 0xb6d5;
  // A short k stays in registers, a long one does not, and has an even or an odd number of blocks; passes have one unit, an odd number, or
  // more units than there are.
  matvec<B8, Product<40, 160, Norm::NONE, Epilogue::STORE, 4, 3, 8, true>>("matvec-8-bf16", some & 0xff);
  matvec<B8, Product<44, 200, Norm::RMS, Epilogue::RESIDUAL, 2, 2>>("matvec-8-long-bf16", 0xff);
  matvec<B8, Product<44, 256, Norm::NONE, Epilogue::RESIDUAL, 2, 2>>("matvec-8-even-bf16", some & 0xff);
  matvec<B8, Product<36, 104, Norm::RMS, Epilogue::GATED, 2, 5>>("matvec-8-gated-bf16", some & 0xff);
  matvec<B8, Product<21, 128, Norm::LAYER, Epilogue::ACT, 4, 2>>("matvec-8-layer-bf16", some & 0xff);
  matvec<B8, Product<37, 96, Norm::RMS, Epilogue::LOGITS, 3, 4>>("matvec-8-logits-bf16", some & 0xff);
  matvec<Third<B8>, Product<40, 160, Norm::NONE, Epilogue::STORE, 4, 3, 8, true>>("matvec-8-three-devices-bf16", some & 0xff);
  matvec<Third<B16>, Product<36, 104, Norm::RMS, Epilogue::GATED, 2, 5>>("matvec-16-three-devices-gated-bf16", some);
  matvec<Third<F8>, Product<37, 64, Norm::RMS, Epilogue::LOGITS, 2, 2>>("matvec-three-devices-logits", some & 0xff);
  matvec<B8, Product<12, 200, Norm::RMS, Epilogue::STORE, 2, 3, 4>>("matvec-8-units-of-4-bf16", 0x81);
  matvec<B8, Product<10, 256, Norm::NONE, Epilogue::STORE, 1, 2, 2>>("matvec-8-units-of-2-bf16", 0xff);
  matvec<B8, Product<12, 300, Norm::RMS, Epilogue::STORE, 16, 2>>("matvec-8-short-bf16", some & 0xff);
  matvec<B16, Product<40, 160, Norm::NONE, Epilogue::STORE, 4, 3, 8, true>>("matvec-16-bf16", some);
  matvec<B16, Product<44, 200, Norm::RMS, Epilogue::RESIDUAL, 2, 2>>("matvec-16-long-bf16", 0xffff);
  matvec<B16, Product<44, 180, Norm::NONE, Epilogue::RESIDUAL, 2, 4>>("matvec-16-odd-bf16", some);
  matvec<B16, Product<36, 104, Norm::RMS, Epilogue::GATED, 2, 5>>("matvec-16-gated-bf16", some);
  matvec<B16, Product<21, 128, Norm::LAYER, Epilogue::ACT, 4, 2>>("matvec-16-layer-bf16", some);
  matvec<B16, Product<37, 96, Norm::RMS, Epilogue::LOGITS, 3, 4>>("matvec-16-logits-bf16", some);
  matvec<B16, Product<12, 200, Norm::RMS, Epilogue::STORE, 2, 3, 4>>("matvec-16-units-of-4-bf16", 0x8001);
  matvec<Moved, Product<20, 328, Norm::RMS, Epilogue::RESIDUAL, 16, 3>>("matvec-16-short-bf16", some);
  matvec<Moved, Product<44, 200, Norm::RMS, Epilogue::RESIDUAL, 2, 3>>("matvec-16-moved-bf16", some);
  matvec<Moved, Product<36, 104, Norm::RMS, Epilogue::GATED, 2, 4>>("matvec-16-moved-gated-bf16", 0xffff);
  matvec<Moved, Product<44, 256, Norm::NONE, Epilogue::STORE, 2, 3>>("matvec-16-moved-even-bf16", some);
  // Two ops that share code, of another k, another number of units in a pass and another epilogue.
  typedef Product<44, 128, Norm::NONE, Epilogue::RESIDUAL, 2, 2> Short16;
  typedef Product<40, 384, Norm::NONE, Epilogue::STORE, 2, 3, 8, true> Long16;
  matvec<Moved, Short16, Sharing<Moved, 0, Short16, Long16>>("matvec-16-sharing-first-bf16", some);
  matvec<Moved, Long16, Sharing<Moved, 1, Short16, Long16>>("matvec-16-sharing-second-bf16", some);
  const u64 many = 0x9b6d5e731f0c8a27;
  matvec<B32, Product<40, 160, Norm::NONE, Epilogue::STORE, 4, 3, 8, true>>("matvec-32-bf16", many >> 32);
  matvec<B32, Product<44, 300, Norm::RMS, Epilogue::RESIDUAL, 3, 3>>("matvec-32-long-bf16", ~0u);
  matvec<B32, Product<21, 128, Norm::LAYER, Epilogue::ACT, 4, 2>>("matvec-32-layer-bf16", many >> 32);
  matvec<B64, Product<36, 200, Norm::RMS, Epilogue::GATED, 3, 5>>("matvec-64-gated-bf16", many);
  matvec<B64, Product<37, 96, Norm::RMS, Epilogue::LOGITS, 3, 4>>("matvec-64-logits-bf16", many);
  matvec<B64, Product<12, 200, Norm::RMS, Epilogue::STORE, 2, 3, 4>>("matvec-64-units-of-4-bf16", many);
  matvec<Narrow, Product<44, 200, Norm::RMS, Epilogue::STORE, 2, 3>>("matvec-32-narrow-bf16", many & 0xffffffff);
  matvec<F8, Product<40, 100, Norm::NONE, Epilogue::STORE, 4, 2, 8, true>>("matvec-lanes", some & 0xff);
  matvec<F8, Product<21, 70, Norm::LAYER, Epilogue::ACT, 2, 1>>("matvec-lanes-layer", some & 0xff);
  matvec<F8, Product<36, 64, Norm::RMS, Epilogue::GATED, 2, 2>>("matvec-lanes-gated", 0xff);
  matvec<F8, Factor<Product<36, 64, Norm::RMS, Epilogue::GATED, 2, 2>>>("matvec-lanes-gated-by", 0xff);
  matvec<F8, Product<16, 200, Norm::RMS, Epilogue::RESIDUAL, 4, 2>>("matvec-lanes-residual", some & 0xff);
  // Codes; without a norm x is exact. Blocks with several granules of a warp and with one, the last one shorter; single units.
  typedef Product<44, 200, Norm::NONE, Epilogue::RESIDUAL, 4, 3> Short;
  typedef Product<21, 1000, Norm::NONE, Epilogue::RESIDUAL, 4, 2> Long;
  typedef Product<37, 600, Norm::NONE, Epilogue::RESIDUAL, 2, 5> Single;
  matvec<B8, CodedAs<Short, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-8-int8-rows", some & 0xff);
  matvec<B8, CodedAs<Long, Code::INT8, 32, ScaleCode::F32, true, false>>("codes-8-int8-32-zeros", 0xff);
  matvec<B8, CodedAs<Single, Code::INT8, 128, ScaleCode::F16, false, false>>("codes-8-int8-128", some & 0xff);
  matvec<B8, CodedAs<Long, Code::E4M3, 0, ScaleCode::NONE, false, true>>("codes-8-e4m3-rows", some & 0xff);
  matvec<B8, CodedAs<Short, Code::E4M3, 64, ScaleCode::BF16, false, true>>("codes-8-e4m3-64-both", 0xff);
  matvec<B8, CodedAs<Single, Code::INT4, 128, ScaleCode::F16, false, false>>("codes-8-int4-128", some & 0xff);
  matvec<B8, CodedAs<Long, Code::INT4, 64, ScaleCode::BF16, true, false>>("codes-8-int4-64-zeros", 0xff);
  matvec<B8, CodedAs<Long, Code::INT4, 32, ScaleCode::F32, true, false>>("codes-8-int4-32-zeros", some & 0xff);
  matvec<B8, LeastAs<Long, Code::INT4, 32, ScaleCode::F16>>("codes-8-int4-32-minima", some & 0xff);
  matvec<B8, LeastAs<Short, Code::INT8, 32, ScaleCode::F32>>("codes-8-int8-32-minima", 0xff);
  matvec<B8, LeastAs<Long, Code::INT4, 32, ScaleCode::F16X6>>("codes-8-int4-32-six-bits", some & 0xff);
  matvec<B8, LeastAs<Short, Code::INT8, 32, ScaleCode::F16X6>>("codes-8-int8-32-six-bits", 0xff);
  matvec<B8, CodedAs<Short, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("codes-8-mxfp4", some & 0xff);
  matvec<B8, CodedAs<Long, Code::E2M1, 64, ScaleCode::E4M3, false, true>>("codes-8-e2m1-both", 0xff);
  matvec<B16, CodedAs<Long, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-16-int8-rows", some);
  matvec<B16, CodedAs<Short, Code::INT8, 64, ScaleCode::F16, true, false>>("codes-16-int8-64-zeros", 0xffff);
  matvec<B16, CodedAs<Single, Code::E4M3, 128, ScaleCode::F32, false, false>>("codes-16-e4m3-128", some);
  matvec<B16, CodedAs<Long, Code::INT4, 128, ScaleCode::F16, true, false>>("codes-16-int4-128-zeros", some);
  matvec<B16, CodedAs<Single, Code::INT4, 32, ScaleCode::F16, false, false>>("codes-16-int4-32", 0xffff);
  matvec<B16, LeastAs<Single, Code::INT4, 32, ScaleCode::F32>>("codes-16-int4-32-minima", 0xffff);
  matvec<B16, LeastAs<Long, Code::INT8, 32, ScaleCode::F16>>("codes-16-int8-32-minima", some);
  matvec<B16, LeastAs<Single, Code::INT4, 32, ScaleCode::F16X6>>("codes-16-int4-32-six-bits", 0xffff);
  matvec<B16, LeastAs<Long, Code::INT8, 32, ScaleCode::F16X6>>("codes-16-int8-32-six-bits", some);
  matvec<B16, CodedAs<Short, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("codes-16-mxfp4", some);
  matvec<Moved, CodedAs<Long, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-16-moved-int8-rows", some);
  matvec<Moved, CodedAs<Short, Code::E4M3, 0, ScaleCode::NONE, false, true>>("codes-16-moved-e4m3-rows", 0xffff);
  matvec<Moved, CodedAs<Single, Code::INT4, 128, ScaleCode::F16, false, false>>("codes-16-moved-int4-128", some);
  matvec<Moved, CodedAs<Long, Code::INT4, 32, ScaleCode::F32, true, false>>("codes-16-moved-int4-32-zeros", some);
  matvec<Moved, LeastAs<Long, Code::INT4, 32, ScaleCode::F32>>("codes-16-moved-int4-32-minima", some);
  matvec<Moved, LeastAs<Long, Code::INT4, 32, ScaleCode::F16X6>>("codes-16-moved-int4-32-six-bits", some);
  matvec<Moved, CodedAs<Long, Code::E2M1, 64, ScaleCode::E4M3, false, true>>("codes-16-moved-e2m1-both", 0xffff);
  // With norms and every other epilogue of a task.
  matvec<B8, CodedAs<Product<36, 200, Norm::RMS, Epilogue::GATED, 4, 3>, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-8-gated-bf16", 0xff);
  matvec<B16, CodedAs<Product<40, 328, Norm::LAYER, Epilogue::ACT, 2, 2, 8, true>, Code::INT4, 64, ScaleCode::F16, true, false>>("codes-16-layer-bf16", some);
  matvec<Moved, CodedAs<Product<37, 600, Norm::RMS, Epilogue::LOGITS, 2, 4>, Code::INT4, 128, ScaleCode::F16, false, false>>("codes-16-logits-bf16", some);
  // Lanes: activations of fp32, and of bf16 on a GPU without tensor cores.
  typedef Machine<Elem::BF16, 8, false, ::WARPS, Dot::FMA> N8;
  typedef Machine<Elem::BF16, 16, false, ::WARPS, Dot::FMA> N16;
  matvec<F8, CodedAs<Short, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-lanes-int8-rows", some & 0xff);
  matvec<F8, CodedAs<Long, Code::E4M3, 32, ScaleCode::F16, false, true>>("codes-lanes-e4m3-both", 0xff);
  matvec<N8, CodedAs<Long, Code::INT8, 64, ScaleCode::F16, true, false>>("codes-lanes-int8-zeros", some & 0xff);
  matvec<N8, CodedAs<Single, Code::INT4, 128, ScaleCode::F16, false, false>>("codes-lanes-int4-128", some & 0xff);
  matvec<N16, CodedAs<Short, Code::INT4, 32, ScaleCode::F16, true, false>>("codes-lanes-int4-32-zeros", some);
  matvec<N16, LeastAs<Short, Code::INT4, 32, ScaleCode::F16>>("codes-lanes-int4-32-minima", some);
  matvec<N16, LeastAs<Short, Code::INT4, 32, ScaleCode::F16X6>>("codes-lanes-int4-32-six-bits", some);
  matvec<F8, LeastAs<Long, Code::INT8, 32, ScaleCode::F16X6>>("codes-lanes-int8-32-six-bits", 0xff);
  matvec<N16, CodedAs<Short, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("codes-lanes-mxfp4", some);
  norm_add<F8, Sum<100>>("norm_add", some & 0xff);
  norm_add<B16, Sum<203>>("norm_add-bf16", some);
  embed<F8, Sum<41>>("embed", some & 0xff);
  norm_add<B64, Sum<72>>("norm_add-64-bf16", many);
  embed<B16, Sum<64>>("embed-bf16", some);
  embed<B64, Sum<24>>("embed-64-bf16", many);
  embed<F8, TableAs<41, Code::INT8, 0, ScaleCode::NONE, false, true>>("embed-int8", some & 0xff);
  embed<B16, TableAs<64, Code::E4M3, 0, ScaleCode::NONE, false, true>>("embed-fp8-bf16", some);
  embed<B16, TableAs<203, Code::INT4, 32, ScaleCode::F16, false, false>>("embed-int4-bf16", some);
  embed<F8, TableAs<72, Code::INT4, 16, ScaleCode::BF16, true, true>>("embed-int4-zeros", some & 0xff);
  embed<F8, TableLeast<72, Code::INT4, 32, ScaleCode::F16>>("embed-int4-minima", some & 0xff);
  embed<B64, TableAs<72, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("embed-mxfp4-bf16", many);
  select<B16>("select", 0xfff7);
  select<B64>("select-64", 0xfffffff7fffffff7);
  // Scores of an even and an odd number of experts; choices by scores of a softmax and of a sigmoid, by groups, and corrected.
  scores<B8, Product<12, 104, Norm::RMS, Epilogue::SCORES, 2, 2>>("scores-bf16", some & 0xff);
  scores<B16, Product<21, 128, Norm::NONE, Epilogue::SCORES, 4, 3>>("scores-odd-bf16", some);
  scores<F8, Product<13, 70, Norm::RMS, Epilogue::SCORES, 2, 1>>("scores-lanes", some & 0xff);
  route<B8, Choice<8, 2, false>>("route", some & 0xff);
  route<F8, Choice<7, 3, false, false, 0, 0, false, false>>("route-odd", some & 0xff);
  route<B16, Choice<40, 4, true, true>>("route-corrected", some);
  route<B16, Choice<24, 3, true, true, 4, 2, true>>("route-groups", 0xffff);
  // The sum over slots, with a shared expert, a gated one, and without the residual.
  combine<F8, Mixed<64, 2, false, false, true>>("combine", some & 0xff);
  combine<B8, Mixed<72, 3, true, false, true>>("combine-shared-bf16", some & 0xff);
  combine<B16, Mixed<40, 4, true, true, false>>("combine-gated-stored-bf16", some);
  combine<B16, Mixed<88, 8, false, false, true, false>>("combine-unpublished-bf16", 0xffff);
  // The part that a row and slot chose: on tensor cores and lanes, with each activation, values and codes.
  chosen<B8, BySlots<Product<40, 200, Norm::RMS, Epilogue::GATED, 2, 3>, false>>("chosen-8-gated-bf16", 0x95);
  chosen<B8, BySlots<Product<24, 96, Norm::NONE, Epilogue::STORE, 2, 2, 8, true>, true>>("chosen-8-slots-bf16", 0x95);
  chosen<B16, BySlots<Clamped<Product<48, 128, Norm::NONE, Epilogue::CLAMPED, 2, 4, 8, true>>, false>>("chosen-16-clamped-bf16", 0x8421);
  chosen<Moved, BySlots<Product<24, 160, Norm::NONE, Epilogue::STORE, 4, 2>, true>>("chosen-16-slots-bf16", 0x8421);
  chosen<B16, BySlots<Product<32, 64, Norm::RMS, Epilogue::ACT, 4, 2>, false>>("chosen-16-act-bf16", 0x8421);
  chosen<F8, BySlots<Product<24, 48, Norm::NONE, Epilogue::STORE, 2, 2, 8, true>, true>>("chosen-lanes-slots", 0x95);
  chosen<F8, BySlots<Product<32, 64, Norm::RMS, Epilogue::GATED, 2, 2>, false>>("chosen-lanes-gated", 0x95);
  chosen<B8, CodedAs<BySlots<Product<32, 64, Norm::RMS, Epilogue::GATED, 4, 2>, false>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("chosen-8-e4m3-rows-bf16", 0x95);
  chosen<B16, CodedAs<BySlots<Product<24, 128, Norm::NONE, Epilogue::STORE, 4, 2, 8, true>, true>, Code::INT4, 32, ScaleCode::F16, false, false>>("chosen-16-int4-32-bf16", 0x8421);
  // Rows of several sequences: more and fewer channels than a warp has, more than the threads have; heads in parts.
  convolve<F8, Channels<34, 3, false>>("convolve", 1);
  convolve<B8, Channels<150, 4, true>>("convolve-bias-bf16", 19);
  convolve<B16, Channels<600, 2, true>>("convolve-two-bf16", 75);
  scan<F8, Parted<Steps<4, 6, 2, 10, 4, true, true>, 1>>("scan");
  scan<B8, Parted<Steps<3, 16, 1, 32, 3, false, false>, 3>>("scan-bf16");
  scan<B16, Parted<Steps<2, 64, 2, 16, 4, true, true>, 2>>("scan-64-bf16");
  group_norm<F8, Groups<24, 3, false>>("group_norm", some & 0xff);
  group_norm<B8, Groups<700, 1, true>>("group_norm-gated-bf16", some & 0xff);
  group_norm<B16, Groups<80, 2, true>>("group_norm-16-bf16", some);
  typedef Heads<4, 2, 2, 64, 64, false, HeadNorm::NONE, 0, 1> Halves;
  attention<Third<B8>, Swizzled<Halves, 1, true>>("attention-three-devices-bf16");
  attention<B8, Swizzled<Halves, 1, true>>("attention-halves-bf16");
  attention<B8, Capped<Swizzled<Heads<4, 4, 4, 64, 0, false, HeadNorm::HEAD, 24, 1>, 1, false>>>("attention-window-bf16");
  attention<B8, Swizzled<Heads<4, 2, 1, 64, 64, true, HeadNorm::HEAD, 0, 1>, 1, true>>("attention-pairs-bf16");
  attention<B16, Swizzled<Heads<2, 2, 2, 128, 128, false, HeadNorm::HEAD, 50, 1>, 2, false>>("attention-128-bf16");
  attention<B8, Swizzled<Heads<4, 2, 2, 64, 16, false, HeadNorm::HEAD, 0, 1>, 1, true>>("attention-part-bf16");
  attention<B16, Swizzled<Heads<2, 2, 2, 256, 64, false, HeadNorm::HEAD, 50, 1>, 2, false>>("attention-part-256-bf16");
  attention<B64, Swizzled<Halves, 1, true>>("attention-64-bf16");
  attention<B32, Swizzled<Heads<4, 4, 4, 64, 0, false, HeadNorm::HEAD, 24, 1>, 1, false>>("attention-32-window-bf16");
  attention<Cached<B8, Elem::FP8>, Swizzled<Halves, 1, true>>("attention-fp8-halves-bf16");
  attention<Cached<B8, Elem::FP8>, Capped<Swizzled<Heads<4, 4, 4, 64, 0, false, HeadNorm::HEAD, 24, 1>, 1, false>>>("attention-fp8-window-bf16");
  attention<Cached<B16, Elem::FP8>, Swizzled<Heads<4, 2, 1, 128, 128, true, HeadNorm::HEAD, 0, 1>, 1, true>>("attention-fp8-pairs-128-bf16");
  attention<Cached<B16, Elem::FP8>, Swizzled<Heads<2, 2, 2, 256, 256, false, HeadNorm::HEAD, 50, 1>, 2, false>>("attention-fp8-256-bf16");
  attention<Cached<B64, Elem::FP8>, Swizzled<Halves, 1, true>>("attention-fp8-64-bf16");
  attention<Cached<F8, Elem::FP8>, Heads<4, 2, 2, 20, 10, true, HeadNorm::HEAD, 0, 1>>("attention-fp8-lanes");
  attention<F8, Heads<4, 2, 2, 20, 10, true, HeadNorm::HEAD, 0, 1>>("attention-lanes");
  attention<B64, Heads<2, 2, 2, 20, 20, false, HeadNorm::HEAD, 0, 1>>("attention-64-lanes-bf16");
  attention<F8, Heads<3, 3, 3, 40, 40, false, HeadNorm::PROJECTION, 24, 1>>("attention-lanes-window");
  attention<F8, Capped<Heads<2, 1, 1, 8, 0, false, HeadNorm::CENTRED, 0, 1>>>("attention-lanes-centred");
  attention<B8, Gated<Swizzled<Heads<4, 2, 2, 64, 64, false, HeadNorm::NONE, 0, 1>, 1, true>>>("attention-gate-bf16");
  attention<B8, Gated<Featured<Swizzled<Heads<4, 2, 2, 64, 64, false, HeadNorm::HEAD, 0, 1>, 1, true>>>>("attention-featured-bf16");
  attention<Cached<B16, Elem::FP8>, Gated<Featured<Swizzled<Heads<4, 2, 1, 128, 128, true, HeadNorm::HEAD, 50, 1>, 1, true>>>>("attention-featured-fp8-bf16");
  attention<F8, Gated<Featured<Heads<4, 2, 2, 20, 10, true, HeadNorm::HEAD, 0, 1>>>>("attention-featured-lanes");
  attention<B64, Featured<Heads<2, 2, 2, 20, 20, false, HeadNorm::CENTRED, 24, 1>>>("attention-featured-64-lanes-bf16");
  // Tasks with all rows, with several rows each, and with a row each or none.
  mix<F8, DividedNet<2, 4, 6, 8, 4, 1>>("mix");
  mix<F8, DividedNet<1, 2, 10, 6, 3, 2>>("mix-2-parts");
  mix<F8, DividedNet<1, 2, 4, 12, 2, 3>>("mix-3-parts");
  mix<B16, DividedNet<1, 2, 16, 32, 4, 3>>("mix-16-3-parts-bf16");
  mix<B8, DividedNet<1, 2, 16, 32, 1, 8>>("mix-8-parts-bf16");
  mix<B64, DividedNet<1, 2, 8, 8, 4, 5>>("mix-64-5-parts-bf16");
}
