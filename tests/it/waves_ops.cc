// Ops of wave kernels, run by one block of threads on a CPU over random inputs, each against its formula in double precision
// (waves_block.h). Prints a line a case: its name, and the largest difference over the largest value expected.

#include "waves_block.h"

#include <algorithm>

// ---- a block and its memory -------------------------------------------------------------------------------------------

template <bool STEPS_, int ROWS_, int INPUT_KIB, int WEIGHT_KIB, u32 PAGE = 64, bool WIDE = false, bool SHARED_ = false>
struct Machine {
  static constexpr int SMS = 40, WARPS = 8, LOADER_WARPS = 4, INPUT_SLOTS = 3, WEIGHT_SLOTS = 2, INPUT_BYTES = INPUT_KIB << 10, WEIGHT_BYTES = WEIGHT_KIB << 10;
  static constexpr bool STEPS = STEPS_, WARPGROUPS = WIDE, SHARED = SHARED_, PAIRS = STEPS || SHARED;
  // With more rows, more parts than lanes hold while they multiply.
  static constexpr int SQUARE_PARTS = !STEPS && !SHARED ? 0 : ROWS_ > 64 ? 66 : SMS / 2;
  static constexpr int BLOCK_ROWS = ROWS_, INPUT_AT = WEIGHT_SLOTS * WEIGHT_BYTES, SCRATCH_AT = 0, SCRATCH_BYTES = !STEPS ? 0 : (ROWS_ > 64 ? 36 : 32) << 10;
  static constexpr int DIVISIONS = 1, STATE_AT = 64 << 10, STATE_BYTES = 1 << 14, STAGE_AT = 0, HEADS_AT = 0, REDUCE_AT = 0;
  static constexpr int REDUCE_BATCH = 1, ROWS = 8, REGISTERS = 216, LOADER_REGISTERS = 72, STAMPS_MAX = 0, VOCAB = 30;
  static constexpr Elem WEIGHT = Elem::BF16, CACHE = Elem::BF16, WIRE = Elem::BF16;
  static constexpr Dot DOT = Dot::MMA;
  static constexpr bool TRACE = false;
  static constexpr u32 BEST = 0, PAGE_ROWS = PAGE, BLOCKS = 16, PAGES = 8 * BLOCKS, CONTEXT_MAX = PAGE * BLOCKS;
  static constexpr u64 POOL_ROWS = PAGES * PAGE_ROWS;
};
template <int INPUT_KIB, int WEIGHT_KIB, u32 PAGE = 64>
using ChunkMachine = Machine<false, 128, INPUT_KIB, WEIGHT_KIB, PAGE>;
using WideMachine = Machine<false, 128, 16, 32, 64, true>;
// With both operands in shared memory.
using SharedMachine = Machine<false, 128, 16, 32, 64, true, true>;
// For codes of which a granule is 128 of k.
using LongWideMachine = Machine<false, 128, 32, 32, 64, true>;
template <int ROWS, u32 PAGE = 64>
using StepMachine = Machine<true, ROWS, 16, 16, PAGE>;
// The block that runs: others are left out.
constexpr u32 SM = 1;
static std::vector<Share> shares;
static std::vector<ShareRecord> records;
static std::vector<u32> pages;
static std::vector<Row> rows_at;

static void start(u32 rows, u32 position = 0) {
  constants.clear();
  work.clear();
  cache.clear();
  shares.clear();
  params = WaveParams{};
  params.row_count = rows;
  params.position = position;
  params.steps = 5;
  params.tag = 100, params.wave_count = 3;
  step_at_hand = 0, wave_at_hand = 2;
  rows_at.assign(rows, Row{});
  std::memset(&wave, 0xff, sizeof wave);
  wave.division = wave.next_division = 0;
}
// Activations, of which none was written. By their place in steps of OFFSET_BYTES.
static u32 activations(size_t bytes) {
  const size_t at = work.size();
  work.resize((at + bytes + OFFSET_BYTES - 1) / OFFSET_BYTES * OFFSET_BYTES + OFFSET_BYTES, 0xff);
  return u32(at / OFFSET_BYTES);
}
template <class M>
static u32 blocks(u32 rows) { return (rows + M::BLOCK_ROWS - 1) / M::BLOCK_ROWS; }
template <class M, int COLS>
static u32 operand(u32 rows) {
  typedef WaveOperand<M, COLS> Place;
  return activations(size_t(blocks<M>(rows)) * Place::BLOCKS * Place::BLOCK_BYTES);
}
// The place of a column of an operand as waves/context.cuh defines it, computed here without that code. TILES: as warpgroups of a step read it.
template <class M, int COLS, bool TILES = false>
static u8* operand_at(u32 at, u32 row, u32 col) {
  const u32 tiles = (COLS + 127) / 128 * 2, lane = row % 8 * 4 + col % 32 / 8, of = M::BLOCK_ROWS;
  // Core matrices: 8 rows of 16 bytes, of consecutive columns, or of a pair of each 8.
  if (M::SHARED) {
    const size_t core = (size_t(row / of) * tiles + col / 64) * (of * 128) + col % 64 / 32 * (of * 64) + row % of / 8 * 512 + col % 32 / 8 * 128;
    return work.data() + size_t(at) * OFFSET_BYTES + core + row % 8 * 16 + col % 8 * 2;
  }
  if (M::WARPGROUPS || TILES) {
    const size_t core = (size_t(row / of) * tiles + col / 64) * (of * 128) + col % 64 / 32 * (of * 64) + row % of / 8 * 512 + col % 8 / 2 * 128;
    return work.data() + size_t(at) * OFFSET_BYTES + core + row % 8 * 16 + col % 32 / 8 * 4 + col % 2 * 2;
  }
  const size_t piece = (size_t(row / of) * tiles + col / 64) * (of * 128) + row % of / 16 * 2048 + col % 64 / 32 * 1024 + col % 8 / 4 * 512 + lane * 16;
  return work.data() + size_t(at) * OFFSET_BYTES + piece + col % 4 / 2 * 8 + row % 16 / 8 * 4 + col % 2 * 2;
}
template <class M, int COLS, bool TILES = false>
static void put_operand(u32 at, u32 rows, const std::vector<float>& x) {
  for (u32 row = 0; row < rows; row++)
    for (u32 col = 0; col < u32((COLS + 127) / 128 * 128); col++)
      narrow(col < COLS ? x[size_t(row) * COLS + col] : 0.f, reinterpret_cast<bf16*>(operand_at<M, COLS, TILES>(at, row, col)));
}
static u8* plain_at(u32 at, u32 row, u32 col, u32 cols, u32 bytes) { return work.data() + size_t(at) * OFFSET_BYTES + (size_t(row) * cols + col) * bytes; }
static u8* square_of(u32 at, u32 parts, u32 part, u32 row) { return plain_at(at, square_at(parts, part, row), 0, 1, 4); }
// Of a sum, alone or in a packet that has this tag.
template <class G>
static u8* sum_at(u32 at, u32 row, u32 col, u32 cols) { return plain_at(at, row, col, cols, G::PACKETS ? 8 : 4); }
static u32 tag_of(u32 of) { return params.tag + step_at_hand * params.wave_count + of; }
static bool has_tag(const u8* at, u32 tag) { return std::memcmp(at + 4, &tag, 4) == 0; }
static double bf16_at(const u8* at) {
  bf16 v;
  std::memcpy(&v, at, 2);
  return widen(v);
}
static double float_at(const u8* at) {
  float v;
  std::memcpy(&v, at, 4);
  return v;
}
// Rows past the last of the chunk, up to a whole block, were left alone.
static bool untouched(const u8* at, u32 bytes) {
  for (u32 i = 0; i < bytes; i++)
    if (at[i] != 0xff) return false;
  return true;
}

// A wave of the only block.
template <class M, class Op>
static void run(u32 sm = SM) {
  params.pack = constants.data();
  params.work = work.data();
  params.cache = cache.data();
  params.shares = shares.data();
  params.rows = rows_at.data();
  params.pages = pages.data();
  const u32 n = blocks<M>(params.row_count), at = (n - 1) * M::SMS + sm;
  blockIdx.x = sm;
  records.assign(n * M::SMS, ShareRecord{});
  records[at].count = u32(shares.size());
  std::copy_n(shares.begin(), std::min<size_t>(shares.size(), SHARES_HELD), records[at].held);
  params.records = records.data();
  require(u64(params.pack) % 16 == 0 && u64(params.work) % 16 == 0 && u64(params.shares) % 16 == 0, "vectors that are not aligned");
  run_wave<M, Op>();
}
// A wave of all blocks, the last one first. They have the shares in turn.
template <class M, class Op>
static void run_all() {
  const std::vector<Share> of_all = shares;
  for (u32 sm = M::SMS; sm-- > 0;) {
    shares.clear();
    for (size_t i = sm; i < of_all.size(); i += M::SMS) shares.push_back(of_all[i]);
    run<M, Op>(sm);
  }
  shares = of_all;
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

template <int H, bool E, bool B, bool O, Norm N, Norm BN = Norm::NONE>
struct Rowwise {
  static constexpr int HIDDEN = H;
  static constexpr bool EMBED = E, TAKE = false, BRANCH = B, OUT = O, OUT_TILES = false, OUT_ROWS = false;
  static constexpr float EMBED_SCALE = 1.5f, BRANCH_SCALE = 0.25f, EPS = 1e-5f, BRANCH_EPS = 1e-6f;
  static constexpr Norm NORM = N, BRANCH_NORM = BN;
  static constexpr int BRANCH_PARTS = 0, ROW_PARTS = 1;
};
// Rows of a launch before.
template <class G>
struct Taking : G {
  static constexpr bool TAKE = true;
};
// Several blocks share a row.
template <class G, int N>
struct RowsIn : G {
  static constexpr int ROW_PARTS = N;
};
template <class G, int N>
struct SumsOf : G {
  static constexpr int BRANCH_PARTS = N;
};
// The branch is what experts made: of N slots and a shared expert, whose share the sigmoid of a score scales.
template <class G, int N>
struct SlotsOf : G {
  static constexpr int SLOTS = N, SCORES = 5, GATE = 3;
  static constexpr bool SHARED = true, GATED = true;
  static constexpr float SHARED_SCALE = 0.75f;
};
// Leaves its output row by row, too.
template <class G>
struct ByRow : G {
  static constexpr bool OUT_ROWS = true;
};
// Fills what `WaveSlots` reads, and returns what it adds up.
template <class G>
static std::vector<float> slots_made(u32 rows, u64& state) {
  constexpr int H = G::HIDDEN, SLOTS = slots_added<G>(nullptr);
  std::vector<float> sum(size_t(rows) * H);
  if constexpr (SLOTS > 0) {
    const u32 count = rows * SLOTS;
    wave.x = activations(size_t(count) * H * 2), wave.branch = activations(size_t(count) * 4), wave.squares_out = activations(size_t(count) * 4);
    wave.branch_weight = activations(sum.size() * 2), wave.table = activations(size_t(rows) * G::SCORES * 4);
    const std::vector<float> made = numbers(state, size_t(count) * H), shared = numbers(state, sum.size()), of = numbers(state, count), scores = numbers(state, size_t(rows) * G::SCORES);
    for (u32 row = 0; row < rows; row++) {
      for (int i = 0; i < G::SCORES; i++) std::memcpy(plain_at(wave.table, row, i, G::SCORES, 4), &scores[row * G::SCORES + i], 4);
      for (int slot = 0; slot < SLOTS; slot++) {
        const u32 n = row * SLOTS + slot, place = count - 1 - n; // the last rows have the first places
        std::memcpy(plain_at(wave.branch, row, slot, SLOTS, 4), &place, 4);
        std::memcpy(plain_at(wave.squares_out, row, slot, SLOTS, 4), &of[n], 4);
        for (int i = 0; i < H; i++) {
          narrow(made[size_t(n) * H + i], reinterpret_cast<bf16*>(plain_at(wave.x, place, i, H, 2)));
          sum[size_t(row) * H + i] += of[n] * made[size_t(n) * H + i];
        }
      }
      const float by = G::SHARED_SCALE / (1.f + std::exp(-scores[row * G::SCORES + G::GATE]));
      for (int i = 0; i < H; i++) {
        narrow(shared[size_t(row) * H + i], reinterpret_cast<bf16*>(plain_at(wave.branch_weight, row, i, H, 2)));
        sum[size_t(row) * H + i] += by * shared[size_t(row) * H + i];
      }
    }
  }
  return sum;
}
// Leaves the input of a product in tiles.
template <class G>
struct ToTiles : G {
  static constexpr bool OUT_TILES = true;
};
// `name` of the residual, `out_name` of what products read.
template <class G, class M = ChunkMachine<1, 1>>
static void rowwise(const char* name, const char* out_name, u32 rows, u32 step = 0) {
  constexpr int H = G::HIDDEN, VOCAB = M::VOCAB, PARTS = G::BRANCH_PARTS;
  start(rows);
  step_at_hand = step;
  // What all blocks decided of every row, which lies first; of equal ones the least id counts.
  const size_t best_bytes = size_t(M::BLOCK_ROWS) * M::SMS * 8;
  if (M::STEPS) require(activations(best_bytes) == M::BEST, "best logits lie first");
  u64 state = H + rows;
  const std::vector<float> table = numbers(state, size_t(VOCAB) * H), before = numbers(state, size_t(rows) * H);
  constexpr bool SLOTS = slots_added<G>(nullptr) > 0;
  const std::vector<float> branch = SLOTS ? slots_made<G>(rows, state) : numbers(state, before.size());
  const std::vector<float> w = numbers(state, H), b = numbers(state, H), bw = numbers(state, H), bb = numbers(state, H);
  wave.norm_weight = constant(w);
  if (!SLOTS) wave.branch_weight = constant(bw);
  if (G::NORM == Norm::LAYER) wave.norm_bias = constant(b);
  if (G::BRANCH_NORM == Norm::LAYER) wave.branch_bias = constant(bb);
  std::vector<float> pairs(table.size() / 2);
  for (size_t i = 0; i < pairs.size(); i++) pairs[i] = __uint_as_float(bf16_pair(table[2 * i], table[2 * i + 1]));
  if (!SLOTS) wave.table = constant(pairs);
  const u32 whole = blocks<M>(rows) * M::BLOCK_ROWS;
  wave.residual = activations(size_t(whole) * H * 4);
  if (!SLOTS) wave.branch = activations(size_t(whole) * H * (PARTS > 0 ? 4 * PARTS : 2));
  wave.out = operand<M, H>(rows);
  wave.rows = activations(size_t(whole) * H * 2);
  std::vector<float> taken(before.size());
  params.taken = taken.data();
  std::vector<i32> tokens, mailbox(1 + (params.steps + 1) * M::BLOCK_ROWS, -9), told = mailbox;
  if (M::STEPS) params.mailbox = mailbox.data();
  const auto best_of = [&](u32 row) {
    std::pair<float, int> best{-1e30f, 0};
    for (u32 i = 0; i < u32(M::SMS); i++) {
      const BestLogit v{float(i * 7 % 11 + row % 3 - 3.5f), int((i * 13 + row * 5) % VOCAB)};
      std::memcpy(work.data() + (size_t(row) * M::SMS + i) * 8, &v, 8);
      if (v.score > best.first || (v.score == best.first && v.id < best.second)) best = {v.score, v.id};
    }
    return best.second;
  };
  if constexpr (M::STEPS)
    for (u32 row = rows; row < u32(M::BLOCK_ROWS); row++) best_of(row);
  for (u32 row = 0; row < rows; row++) {
    Row& at = rows_at[row];
    at.token = i32(row * 7 % VOCAB), at.from = rows - 1 - row;
    if (M::STEPS) {
      if (row % 3 == 1) at.token = -1;
      const bool decided = step > 0 || at.token < 0;
      best_of(row), best_of(at.from);
      tokens.push_back(decided ? best_of(step > 0 ? row : at.from) : at.token);
      if (G::EMBED) told[1 + step * M::BLOCK_ROWS + row] = tokens[row];
    } else {
      tokens.push_back(at.token);
    }
    for (int i = 0; i < H; i++) {
      if (G::TAKE)
        taken[size_t(at.from) * H + i] = before[size_t(row) * H + i];
      else if (!G::EMBED)
        std::memcpy(plain_at(wave.residual, row, i, H, 4), &before[size_t(row) * H + i], 4);
      const float y = branch[size_t(row) * H + i];
      if (PARTS == 0 && !SLOTS) narrow(y, reinterpret_cast<bf16*>(plain_at(wave.branch, row, i, H, 2)));
      // Parts of very different sizes that are exact, and add up to it.
      for (u32 part = 0; part < u32(PARTS); part++) {
        const float of = part == 0 ? (PARTS == 1 ? y : y * 4.f) : part == 1 ? (PARTS == 2 ? y * -3.f : y * -2.f) : -y;
        std::memcpy(plain_at(wave.branch, part * M::BLOCK_ROWS + row, i, H, 4), &of, 4);
      }
    }
  }
  // Two shares, the second one of more rows than the chunk has.
  const u32 first = rows / 3;
  constexpr int ROW_PARTS = G::ROW_PARTS;
  const u32 squares = wave.squares = activations(size_t(whole) * ROW_PARTS * 4);
  if (ROW_PARTS == 1)
    shares = {{0, first, 0, 1}, {first, whole - first, 0, 1}};
  else // Of some rows this block has two parts.
    for (u32 row = 0; row < whole; row++) {
      shares.push_back({row, 1, row % ROW_PARTS, row % ROW_PARTS + 1});
      if (row % ROW_PARTS > 0) shares.push_back({row, 1, 0, row % ROW_PARTS});
      if (row % ROW_PARTS + 1 < ROW_PARTS) shares.push_back({row, 1, row % ROW_PARTS + 1, ROW_PARTS});
    }
  run<M, WaveRows<M, G>>();
  std::vector<double> expected, found, out, found_out;
  for (u32 row = 0; row < rows; row++) {
    std::vector<float> sum(H);
    const std::vector<float> y(branch.begin() + size_t(row) * H, branch.begin() + size_t(row + 1) * H);
    const std::vector<double> added = normalised(G::BRANCH_NORM, y, bw, bb, G::BRANCH_EPS);
    for (int i = 0; i < H; i++) {
      double value = G::EMBED ? G::EMBED_SCALE * table[size_t(tokens[row]) * H + i] : before[size_t(row) * H + i];
      if (G::BRANCH) value += G::BRANCH_SCALE * added[i];
      sum[i] = float(value);
      expected.push_back(value), found.push_back(float_at(plain_at(wave.residual, row, i, H, 4)));
    }
    std::vector<double> normed = normalised(G::NORM, sum, w, b, G::EPS);
    // Of parts the factor is left to the product.
    if (ROW_PARTS > 1) {
      for (int i = 0; i < H; i++) normed[i] = double(sum[i]) * w[i];
      for (int part = 0; part < ROW_PARTS; part++) {
        double of = 0;
        for (int i = part * (H / ROW_PARTS); i < (part + 1) * (H / ROW_PARTS); i++) of += double(sum[i]) * sum[i];
        expected.push_back(of / H), found.push_back(float_at(square_of(squares, ROW_PARTS, part, row)) / H);
      }
    }
    for (int i = 0; i < H; i++) out.push_back(normed[i]), found_out.push_back(bf16_at(operand_at<M, H, G::OUT_TILES>(wave.out, row, i)));
    if (G::OUT_ROWS)
      for (int i = 0; i < H; i++) out.push_back(normed[i]), found_out.push_back(bf16_at(plain_at(wave.rows, row, i, H, 2)));
  }
  for (u32 row = rows; row < whole; row++) {
    expected.push_back(1), found.push_back(untouched(plain_at(wave.residual, row, 0, H, 4), H * 4));
    out.push_back(1), found_out.push_back(untouched(operand_at<M, H, G::OUT_TILES>(wave.out, row, row % H), 2));
  }
  // In the order in which it was told.
  if (M::STEPS)
    for (size_t i = 0; i < told.size(); i++) expected.push_back(told[i]), found.push_back(mailbox[i]);
  report(name, expected, found);
  if (!G::OUT_ROWS) require(untouched(plain_at(wave.rows, 0, 0, H, 2), whole * H * 2), "rows that the wave does not leave");
  if (G::OUT)
    report(out_name, out, found_out);
  else
    require(untouched(work.data() + size_t(wave.out) * OFFSET_BYTES, (WaveOperand<M, H>::BLOCK_BYTES)), "an output that the wave does not have");
}

// ---- matmul -------------------------------------------------------------------------------------------------------------

template <int ROWS_, int K_, Epilogue E, int PASS_, int UNIT_ROWS_ = 8, bool B = false, bool P = false, Act A = Act::SILU>
struct Product {
  static constexpr int ROWS = ROWS_, K = K_, UNIT_ROWS = UNIT_ROWS_, PASS = PASS_;
  static constexpr int UNITS = E == Epilogue::GATED ? (ROWS / 2 + 3) / 4 : (ROWS + UNIT_ROWS - 1) / UNIT_ROWS;
  static constexpr Epilogue EPILOGUE = E;
  static constexpr Act ACT = A;
  static constexpr float SCALE = 0.5f, SOFTCAP = E == Epilogue::LOGITS ? 3.f : 0.f;
  static constexpr bool BIAS = B, PLAIN = P;
  static constexpr int ROW_GROUPS = 2, UNIT_GROUPS = 4, K_GROUPS = 1, SPLITS = 1, CHUNK = UNIT_ROWS == 8 ? 2 : 1, HELD = 0, NORM_PARTS = 0;
  static constexpr bool FACTOR = false, PAIRED = false, SUMS = false, PACKETS = false, OUT = false, BOXED = true, TILES = false, OUT_TILES = false;
  static constexpr float NORM_EPS = 0.f;
};
template <class P>
struct InPackets : P {
  static constexpr bool PACKETS = true;
};
// An input that lacks the factor of its norm, with squares of N parts.
template <class P, int N>
struct Weighted : P {
  static constexpr int NORM_PARTS = N;
  static constexpr bool FACTOR = true;
  static constexpr float NORM_EPS = 0.125f;
};
// In pairs of blocks, maybe with the input of the next product.
template <class P, bool THEN>
struct Paired : P {
  static constexpr bool PAIRED = true, OUT = THEN;
};
// How warps share it: groups of rows, of units and of k; granules of a chunk; and parts of k.
template <class P, int BY_ROWS, int BY_UNITS, int BY_K, int CHUNK_, int SPLITS_ = 1>
struct By : P {
  static constexpr int ROW_GROUPS = BY_ROWS, UNIT_GROUPS = BY_UNITS, K_GROUPS = BY_K, CHUNK = CHUNK_, SPLITS = SPLITS_;
  static constexpr bool BOXED = CHUNK <= 2;
};
// In tiles of 16 units, by warpgroups of a step.
template <class P, int CHUNK_, int SPLITS_ = 1>
struct InTiles : By<P, 1, 8, 1, CHUNK_, SPLITS_> {
  static constexpr bool TILES = true;
};
// In tiles of 8 units, by two warpgroups that share k.
template <class P, int CHUNK_, int SPLITS_ = 1>
struct InTilesOfK : By<P, 1, 4, 2, CHUNK_, SPLITS_> {
  static constexpr bool TILES = true;
};
// Chunks of weights that warps hold before the block enters the wave.
template <class P, int N>
struct Holding : P {
  static constexpr int HELD = N;
};
template <int ROWS>
struct HoldingMachine : StepMachine<ROWS> {
  static constexpr int WEIGHT_SLOTS = 5;
};
// The boxes of the matrix, after one of another.
template <class M, class G>
static void put_boxes() {
  typedef WaveMatMul<M, G> P;
  const auto of = [](u32 units) { return WeightBox{u64(wave.weight) * OFFSET_BYTES, P::UNITS, P::UNIT_BYTES, units, P::UNIT_PITCH}; };
  weight_boxes = {WeightBox{}, of(G::PASS), of(G::PASS > 1 ? G::PASS - 1 : 1), of(8)};
  if (M::SHARED) {
    weight_boxes = {WeightBox{}, of(8)};
    weight_boxes[1].line_bytes = 64;
  }
  wave.boxes = 1;
}
// The row of the matrix that a row of a unit is, or -1. Of gated units the first half is of the first half of the matrix.
template <class G>
static int row_of_matrix(int unit, int row) {
  if (G::EPILOGUE == Epilogue::GATED) {
    const int half = unit * 4 + row % 4;
    return half >= G::ROWS / 2 ? -1 : row < 4 ? half : G::ROWS / 2 + half;
  }
  return unit * G::UNIT_ROWS + row < G::ROWS ? unit * G::UNIT_ROWS + row : -1;
}
template <class G>
static void pack(const std::vector<float>& w) {
  constexpr int PARTS = 8 / G::UNIT_ROWS, GRANULES = (G::K + PARTS * 32 - 1) / (PARTS * 32);
  const size_t at = constants.size();
  wave.weight = u32(at / OFFSET_BYTES);
  constants.resize(at + (size_t(G::UNITS) * GRANULES * 512 + OFFSET_BYTES - 1) / OFFSET_BYTES * OFFSET_BYTES);
  u8* to = constants.data() + at;
  for (int unit = 0; unit < G::UNITS; unit++)
    for (int granule = 0; granule < GRANULES; granule++)
      for (int part = 0; part < PARTS; part++)
        for (int row = 0; row < G::UNIT_ROWS; row++)
          for (int i = 0; i < 32; i++, to += 2) {
            const int r = row_of_matrix<G>(unit, row), k = (granule * PARTS + part) * 32 + i;
            narrow(r >= 0 && k < G::K ? w[size_t(r) * G::K + k] : 0.f, reinterpret_cast<bf16*>(to));
          }
}
template <class G, class = int>
constexpr bool IS_CODED = false;
template <class G>
constexpr bool IS_CODED<G, decltype(int(G::CODE))> = true;
// Random codes; their values are put into `w`, scales of rows into `by_row`, which is as long as the matrix has rows.
template <class G>
static void pack_codes(u64& state, std::vector<double>& w, std::vector<float>& by_row) {
  const size_t at = constants.size();
  wave.weight = u32(at / OFFSET_BYTES);
  std::vector<float> scales(G::UNITS * 8);
  for (int unit = 0; unit < G::UNITS; unit++) {
    int rows[8];
    for (int row = 0; row < 8; row++) {
      rows[row] = row_of_matrix<G>(unit, row);
      scales[unit * 8 + row] = 0.25f + numbers(state, 1)[0] * 0.125f;
      if (rows[row] >= 0) by_row[rows[row]] = scales[unit * 8 + row];
    }
    for (int granule = 0; granule < G::GRANULES; granule++) {
      const std::vector<u8> bytes = random_granule<G>(state, granule, rows, w);
      constants.insert(constants.end(), bytes.begin(), bytes.end());
    }
  }
  constants.resize((constants.size() + OFFSET_BYTES - 1) / OFFSET_BYTES * OFFSET_BYTES);
  if constexpr (G::ROW_SCALES) wave.row_scales = constant(scales);
}
// The matrix and the input of a product. Of codes `w` becomes their values.
template <class M, class G>
static void put_product(u64& state, u32 rows, const std::vector<float>& plain, const std::vector<float>& x, std::vector<double>& w, std::vector<float>& by_row) {
  if constexpr (IS_CODED<G>)
    pack_codes<G>(state, w, by_row);
  else
    pack<G>(plain);
  put_boxes<M, G>();
  wave.x = operand<M, G::K>(rows);
  put_operand<M, G::K, G::TILES>(wave.x, rows, x);
}
static double activated(Act act, double v) {
  if (act == Act::SILU) return v / (1 + std::exp(-v));
  if (act == Act::GELU_ERF) return 0.5 * v * (1 + std::erf(v * std::sqrt(0.5)));
  if (act == Act::GELU_TANH) return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
  return v > 0 ? v : 0;
}
// A wave of the only block, after one without a share: that one holds nothing and, apart from its best logits, leaves nothing.
template <class M, class G>
static void run_product() {
  const auto held = [](u32 chunks) {
    for (int i = 0; i < M::WARPS * 32; i++) require(rings[1].held[i] == chunks, "a warp holds other chunks than its first ones");
  };
  if (G::HELD > 0) {
    const std::vector<u8> before = work;
    std::vector<Share> none;
    std::swap(shares, none);
    run<M, WaveMatMul<M, G>>();
    std::swap(shares, none);
    held(0);
    require(G::EPILOGUE == Epilogue::LOGITS || work == before, "a block without a share writes");
    work = before;
  }
  run<M, WaveMatMul<M, G>>();
  held(G::HELD);
}
template <class M, class G>
static void matmul(const char* name, u32 rows) {
  constexpr int COLS = G::EPILOGUE == Epilogue::GATED ? G::ROWS / 2 : G::ROWS, SPLITS = G::SPLITS;
  constexpr bool IS_LOGITS = G::EPILOGUE == Epilogue::LOGITS, PARTS = SPLITS > 1;
  constexpr bool SUMS = G::EPILOGUE == Epilogue::RESIDUAL && !PARTS, PLAIN = G::PLAIN || PARTS || IS_LOGITS;
  start(rows);
  u64 state = G::ROWS * 7 + G::K + rows;
  std::vector<float> plain = numbers(state, size_t(G::ROWS) * G::K);
  const std::vector<float> x = numbers(state, size_t(rows) * G::K), before = numbers(state, size_t(rows) * COLS);
  // Rows that are alike have logits that are.
  if (IS_LOGITS && !IS_CODED<G>)
    for (size_t i = 0; i < plain.size(); i++) plain[i] = plain[i / G::K % 5 * G::K + i % G::K];
  // As units have it.
  std::vector<float> bias = numbers(state, G::ROWS), units(G::UNITS * G::UNIT_ROWS);
  for (int i = 0; i < int(units.size()); i++) {
    const int r = row_of_matrix<G>(i / G::UNIT_ROWS, i % G::UNIT_ROWS);
    units[i] = r < 0 ? 0.f : bias[r];
  }
  if (G::BIAS) wave.bias = constant(units);
  std::vector<double> w(plain.begin(), plain.end());
  std::vector<float> by_row(G::ROWS, 1.f);
  put_product<M, G>(state, rows, plain, x, w, by_row);
  const u32 whole = blocks<M>(rows) * M::BLOCK_ROWS;
  wave.residual = activations(size_t(whole) * COLS * 4);
  const size_t plain_bytes = IS_LOGITS ? size_t(whole) * M::SMS * 8 : size_t(whole) * COLS * (PARTS ? (G::PACKETS ? 8 : 4) * SPLITS : 2);
  wave.out = PLAIN ? activations(plain_bytes) : operand<M, COLS>(rows);
  for (u32 row = 0; row < rows; row++) std::memcpy(plain_at(wave.residual, row, 0, COLS, 4), before.data() + size_t(row) * COLS, COLS * 4);
  // Of each block and part two shares, of the last block first.
  for (u32 block = blocks<M>(rows); block-- > 0;)
    for (u32 part = 0; part < u32(SPLITS); part++) {
      const u32 row = block * M::BLOCK_ROWS, middle = G::UNITS * 2 / 5, from = part * G::UNITS;
      if (middle > 0) shares.push_back({row, u32(M::BLOCK_ROWS), from, from + middle});
      shares.push_back({row, u32(M::BLOCK_ROWS), from + middle, from + G::UNITS});
    }
  std::vector<float> logits(IS_LOGITS ? size_t(rows) * G::ROWS : 0, -77.f);
  if (IS_LOGITS) {
    step_at_hand = 2, params.steps = 3, params.logits = logits.data();
    for (u32 row = 0; row < rows; row++) {
      rows_at[row].position = row * 3 + 1, rows_at[row].seed_low = row * 77, rows_at[row].seed_high = row;
      rows_at[row].inverse_temperature = row % 3 == 0 ? 0.f : row % 3 == 1 ? 1.25f : 8.f;
    }
  }
  std::vector<double> factors(rows, 1.);
  if (G::NORM_PARTS > 0) {
    const std::vector<float> squares = numbers(state, size_t(rows) * G::NORM_PARTS);
    wave.squares = activations(size_t(whole) * G::NORM_PARTS * 4);
    wave.square_parts = G::NORM_PARTS;
    wave.square_splits = u32(blocks<M>(rows));
    for (u32 row = 0; row < rows; row++) {
      double sum = 0;
      for (u32 i = 0; i < u32(G::NORM_PARTS); i++) {
        const float of = G::K * (0.5f + std::fabs(squares[row * G::NORM_PARTS + i]));
        std::memcpy(square_of(wave.squares, G::NORM_PARTS, i, row), &of, 4);
        sum += of;
      }
      factors[row] = 1 / std::sqrt(sum / G::K + G::NORM_EPS);
    }
  }
  run_product<M, G>();
  const auto out_at = [&](u32 row, u32 col) { return PLAIN ? plain_at(wave.out, row, col, COLS, PARTS ? (G::PACKETS ? 8 : 4) : 2) : operand_at<M, COLS, G::OUT_TILES>(wave.out, row, col); };
  // Columns of a part: whole granules, and whole blocks of 64.
  constexpr int BITS = IS_CODED<G> ? 0 : 16;
  int granule_k = BITS ? 8 / G::UNIT_ROWS * 32 : 0;
  if constexpr (IS_CODED<G>) granule_k = G::GRANULE_K;
  const int step_k = granule_k < 64 ? 64 : granule_k, steps = (G::K + step_k - 1) / step_k, part_k = (steps + SPLITS - 1) / SPLITS * step_k;
  std::vector<double> expected, found, y(G::ROWS);
  for (u32 row = 0; row < rows; row++)
    for (int part = 0; part < SPLITS; part++) {
      for (int r = 0; r < G::ROWS; r++) {
        y[r] = 0.;
        for (int k = part * part_k; k < (part + 1) * part_k && k < G::K; k++) y[r] += w[size_t(r) * G::K + k] * x[size_t(row) * G::K + k];
        if constexpr (IS_CODED<G>)
          if (G::ROW_SCALES) y[r] *= by_row[r];
        y[r] *= factors[row];
        if (G::BIAS && part == 0) y[r] += bias[r];
      }
      for (int r = 0; r < COLS; r++) {
        double value = y[r];
        if (G::EPILOGUE == Epilogue::ACT) value = activated(G::ACT, y[r]);
        if (G::EPILOGUE == Epilogue::GATED) value = activated(G::ACT, G::SCALE * y[r]) * y[G::ROWS / 2 + r];
        if (SUMS) value = before[size_t(row) * COLS + r] + G::SCALE * y[r];
        if (IS_LOGITS) value = G::SOFTCAP * std::tanh(G::SCALE * y[r] / G::SOFTCAP);
        expected.push_back(value);
        if (IS_LOGITS)
          found.push_back(logits[size_t(row) * G::ROWS + r]);
        else if (PARTS) {
          const u8* at = sum_at<G>(wave.out, part * M::BLOCK_ROWS + row, r, COLS);
          found.push_back(float_at(at));
          if (G::PACKETS) expected.push_back(1), found.push_back(has_tag(at, tag_of(wave_at_hand)));
        } else
          found.push_back(SUMS ? float_at(plain_at(wave.residual, row, r, COLS, 4)) : bf16_at(out_at(row, r)));
      }
      // Columns that pad an operand.
      for (u32 col = COLS; !PLAIN && col < u32((COLS + 127) / 128 * 128); col++) expected.push_back(1), found.push_back(untouched(out_at(row, col), 2));
    }
  if constexpr (IS_LOGITS) {
    for (u32 row = 0; row < whole; row++)
      for (u32 sm = 0; sm < u32(M::SMS); sm++) {
        const u8* at = work.data() + size_t(wave.out) * OFFSET_BYTES + (size_t(row) * M::SMS + sm) * 8;
        if (sm != SM) {
          expected.push_back(1), found.push_back(untouched(at, 8));
          continue;
        }
        // The best of these logits, with noise where that is asked for; of equal ones the first.
        float best = -INFINITY;
        int id = 0x7fffffff;
        for (int r = 0; row < rows && r < G::ROWS; r++) {
          const Row& of = rows_at[row];
          float score = logits[size_t(row) * G::ROWS + r];
          if (of.inverse_temperature > 0) score = mul_add(score, of.inverse_temperature, noise(u64(of.seed_high) << 32 | of.seed_low, of.position + 3, u32(r)));
          if (score > best) best = score, id = r;
        }
        BestLogit best_logit;
        std::memcpy(&best_logit, at, 8);
        expected.push_back(1), found.push_back(best_logit.id == id && best_logit.score == best);
      }
  } else {
    for (u32 row = rows; row < whole; row++)
      for (u32 col = 0; col < u32(COLS); col++) {
        expected.push_back(1), found.push_back(untouched(SUMS ? plain_at(wave.residual, row, col, COLS, 4) : out_at(row, col), 2));
        for (int part = 0; PARTS && part < SPLITS; part++) expected.push_back(1), found.push_back(untouched(sum_at<G>(wave.out, part * M::BLOCK_ROWS + row, col, COLS), 4));
      }
  }
  report(name, expected, found);
}
template <class G>
static void matmul(const char* name, u32 rows) { matmul<ChunkMachine<32, 46>, G>(name, rows); }
// A product that adds to the residual and may leave the input of the next one: its memory, and what that holds in the end.
struct Compared {
  std::vector<double> expected, found, out, found_out;
};
template <class M, class G>
struct Addition {
  static constexpr int COLS = G::ROWS;
  u32 rows;
  bool weighted;
  std::vector<float> x, before, bias, weight, by_row;
  std::vector<double> w;
  Compared compared;
  Addition(u32 rows, bool weighted) : rows(rows), weighted(weighted), by_row(G::ROWS, 1.f) {
    start(rows);
    u64 state = G::ROWS * 5 + G::K + rows;
    const std::vector<float> plain = numbers(state, size_t(G::ROWS) * G::K);
    x = numbers(state, size_t(rows) * G::K), before = numbers(state, size_t(rows) * COLS);
    bias = numbers(state, G::UNITS * G::UNIT_ROWS), weight = numbers(state, COLS);
    if (G::BIAS) wave.bias = constant(bias);
    wave.norm_weight = weighted ? constant(weight) : ~0u;
    w.assign(plain.begin(), plain.end());
    put_product<M, G>(state, rows, plain, x, w, by_row);
    wave.residual = activations(size_t(blocks<M>(rows)) * M::BLOCK_ROWS * COLS * 4);
    for (u32 row = 0; row < rows; row++) std::memcpy(plain_at(wave.residual, row, 0, COLS, 4), before.data() + size_t(row) * COLS, COLS * 4);
    wave.out = operand<M, COLS>(rows);
  }
  // A column of the residual, and of the input of the next product. Returns the sum; 0 of a row that the launch does not have.
  double compare(u32 row, int r) {
    auto& [expected, found, out, found_out] = compared;
    if (row >= rows) {
      expected.push_back(1), found.push_back(untouched(plain_at(wave.residual, row, r, COLS, 4), 4));
      return 0;
    }
    double y = 0;
    for (int k = 0; k < G::K; k++) y += w[size_t(r) * G::K + k] * x[size_t(row) * G::K + k];
    if constexpr (IS_CODED<G>)
      if (G::ROW_SCALES) y *= by_row[r];
    if (G::BIAS) y += bias[r];
    const double sum = before[size_t(row) * COLS + r] + G::SCALE * y;
    expected.push_back(sum), found.push_back(float_at(plain_at(wave.residual, row, r, COLS, 4)));
    out.push_back(weighted ? sum * weight[r] : sum), found_out.push_back(bf16_at(operand_at<M, COLS, G::OUT_TILES>(wave.out, row, r)));
    return sum;
  }
  // What pads that input, and all of it of a row that the launch does not have.
  void compare_rest(u32 row) {
    for (u32 col = row < rows ? COLS : 0; col < u32((COLS + 127) / 128 * 128); col += 2)
      compared.out.push_back(1), compared.found_out.push_back(untouched(operand_at<M, COLS, G::OUT_TILES>(wave.out, row, col), 4));
  }
};
// By pairs of blocks, of which the last one has no units: the residual, and where the next product's input is left, `out_name` of that and of its
// squares. `weighted`: the norm has a weight.
template <class M, class G>
static void in_pairs(const char* name, const char* out_name, u32 rows, bool weighted = true) {
  constexpr int COLS = G::ROWS;
  // The second pair has fewer units than a pass.
  std::vector<u32> ends{0};
  while (ends.back() < u32(G::UNITS)) ends.push_back(min(ends.back() + (ends.size() == 2 && G::PASS > 1 ? G::PASS - 1 : G::PASS), u32(G::UNITS)));
  ends.push_back(G::UNITS);
  const u32 pairs = u32(ends.size()) - 1;
  require(pairs < u32(M::SMS / 2), "a pair that leaves nothing");
  Addition<M, G> addition(rows, weighted);
  wave.squares_out = activations(size_t(M::SMS / 2) * M::BLOCK_ROWS * 4);
  run_in_pairs([&] {
    for (u32 sm = 2 * pairs; sm-- > 0;) {
      const u32 part = sm % 2 * G::UNITS, lo = ends[sm / 2], hi = ends[sm / 2 + 1];
      shares.clear();
      if (lo < hi) shares.push_back({0, u32(M::BLOCK_ROWS), part + lo, part + hi});
      run<M, WaveMatMul<M, G>>(sm);
    }
  });
  auto& [expected, found, out, found_out] = addition.compared;
  for (u32 row = 0; row < u32(M::BLOCK_ROWS); row++) {
    std::vector<double> squares(pairs);
    for (int r = 0; r < COLS; r++) {
      const double sum = addition.compare(row, r);
      for (u32 pair = 0; pair < pairs; pair++)
        if (u32(r) / G::UNIT_ROWS >= ends[pair] && u32(r) / G::UNIT_ROWS < ends[pair + 1]) squares[pair] += sum * sum;
    }
    for (u32 pair = 0; G::OUT && pair < u32(M::SMS / 2); pair++) {
      const u8* at = square_of(wave.squares_out, M::SMS / 2, pair, row);
      expected.push_back(pair < pairs ? squares[pair] / COLS : 1), found.push_back(pair < pairs ? float_at(at) / COLS : untouched(at, 4));
    }
    addition.compare_rest(row);
  }
  report(name, expected, found);
  if (G::OUT)
    report(out_name, out, found_out);
  else
    require(untouched(work.data() + size_t(wave.out) * OFFSET_BYTES, (WaveOperand<M, COLS>::BLOCK_BYTES)), "an output that the wave does not have");
}
// By blocks that have whole groups of columns: the residual, the next product's input, and of each group its sum of squares.
template <class P>
struct Summing : P {
  static constexpr bool SUMS = true, OUT = true;
};
template <class M, class G>
static void in_sums(const char* name, const char* out_name, u32 rows, bool weighted = true) {
  constexpr int COLS = G::ROWS, GROUPS = (G::UNITS + 7) / 8;
  Addition<M, G> addition(rows, weighted);
  const u32 whole = blocks<M>(rows) * M::BLOCK_ROWS;
  wave.squares_out = activations(size_t(whole) * GROUPS * 4);
  // Of a share of several passes, and of one with the last, shorter group.
  for (u32 block = blocks<M>(rows); block-- > 0;) {
    const u32 row = block * M::BLOCK_ROWS, middle = G::UNITS / 16 * 8;
    if (middle > 0) shares.push_back({row, u32(M::BLOCK_ROWS), 0, middle});
    shares.push_back({row, u32(M::BLOCK_ROWS), middle, u32(G::UNITS)});
  }
  run<M, WaveMatMul<M, G>>();
  auto& [expected, found, out, found_out] = addition.compared;
  for (u32 row = 0; row < whole; row++) {
    std::vector<double> squares(GROUPS);
    for (int r = 0; r < COLS; r++) {
      const double sum = addition.compare(row, r);
      squares[r / 64] += sum * sum;
    }
    for (int group = 0; group < GROUPS; group++) {
      const u8* at = square_of(wave.squares_out, GROUPS, group, row);
      expected.push_back(row < rows ? squares[group] / COLS : 1), found.push_back(row < rows ? float_at(at) / COLS : untouched(at, 4));
    }
    addition.compare_rest(row);
  }
  report(name, expected, found);
  report(out_name, out, found_out);
}
// Factors alone.
template <class M, class G>
struct Factors {
  template <class R>
  static void load(WaveLoader<M, R>&, const Wave&) {}
  static void run(WaveContext<M>& c, const Wave& e) {
    typename WaveMatMul<M, G>::Squares squares;
    squares.ask(c, e);
    squares.leave_factors(c);
  }
};
template <class M, class G>
static std::vector<double> factors_of(const std::vector<float>& squares) {
  start(16);
  wave.squares = activations(size_t(G::NORM_PARTS) * M::BLOCK_ROWS * 4), wave.square_parts = G::NORM_PARTS;
  for (u32 part = 0; part < u32(G::NORM_PARTS); part++)
    for (u32 row = 0; row < 16; row++) std::memcpy(square_of(wave.squares, G::NORM_PARTS, part, row), &squares[part * 16 + row], 4);
  shares = {{0, u32(M::BLOCK_ROWS), 0, 1}};
  run<M, Factors<M, G>>();
  return std::vector<double>(wave_state<M>().factors, wave_state<M>().factors + 16);
}

// A row has the same factor whatever the number of rows of a block is.
template <class G>
static void same_factors(const char* name) {
  u64 state = 11;
  std::vector<float> squares = numbers(state, G::NORM_PARTS * 16);
  for (float& v : squares) v = std::exp(8.f * v);
  const std::vector<double> few = factors_of<StepMachine<16>, G>(squares), some = factors_of<StepMachine<32>, G>(squares), most = factors_of<StepMachine<64>, G>(squares);
  std::vector<double> expected, found;
  for (int row = 0; row < 16; row++) {
    double sum = 0;
    for (int part = 0; part < G::NORM_PARTS; part++) sum += squares[part * 16 + row];
    expected.push_back(1), found.push_back(few[row] * std::sqrt(sum / G::K + G::NORM_EPS));
    expected.push_back(1), found.push_back(few[row] == some[row] && few[row] == most[row]);
  }
  report(name, expected, found);
}

// ---- attention ----------------------------------------------------------------------------------------------------------

template <class H, int TILE_, HeadNorm Q, HeadNorm K>
struct Tiled : H {
  static constexpr int PITCH = H::DIM, TILE = TILE_, PARTS = 0;
  static constexpr u32 SPLITS_MOST = 1;
  static constexpr bool SWIZZLED = true, PACKETS = false, OUT_TILES = false;
  static constexpr HeadNorm Q_NORM = Q, K_NORM = K;
};
template <class H>
struct Capped : H {
  static constexpr float SOFTCAP = 2.f;
};
template <class G, int N>
struct HeadsOf : G {
  static constexpr int PARTS = N;
};
template <class G, int N>
struct PacketsOf : HeadsOf<G, N> {
  static constexpr bool PACKETS = true;
};
// Bytes of a head of q, k or v for each of its columns, and of one that it puts as `part` of x.
template <class G>
constexpr size_t HEAD_BYTES = G::PARTS > 0 ? (G::PACKETS ? 8 : 4) * G::PARTS : 2;
template <class M, class G>
static void put_head(u32 x, int part, u32 row, u32 col, u32 cols, float of) {
  u8* at = sum_at<G>(x, part * M::BLOCK_ROWS + row, col, cols);
  std::memcpy(at, &of, 4);
  const u32 tag = tag_of(wave_at_hand - 1);
  if (G::PACKETS) std::memcpy(at + 4, &tag, 4);
}
// Histories of up to 1024 positions in KV splits.
template <class G, u32 N>
struct CutAt : G {
  static constexpr u32 SPLIT = N, SPLITS_MOST = 1024 / N;
};
// Attention of a step: by the block that has all shares, or in splits by all blocks.
template <class M, class G>
static void attend_rows() {
  if constexpr (G::SPLITS_MOST > 1) {
    wave.branch = activations(size_t(M::BLOCK_ROWS) * G::SPLITS_MOST * G::HEADS * (G::DIM + 2) * 4);
    run_all<M, WaveAttendSplits<M, G>>();
    run_all<M, WaveMerge<M, G>>();
  } else {
    run<M, WaveAttendRow<M, G>>();
  }
}
// As `prepared` wants the norm of keys.
template <class G>
struct OfKeys : G {
  static constexpr HeadNorm Q_NORM = G::K_NORM;
};

static double rounded(double v) {
  bf16 narrowed;
  narrow(float(v), &narrowed);
  return widen(narrowed);
}

// Where a row is: its sequence and position.
typedef std::pair<u32, u32> At;
// What the waves of attention append, and what they compute: of rows that are each in a sequence. Rows of a sequence follow each other.
template <class M, class G>
static void attention(const char* name, const std::vector<At>& places, u32 step = 0) {
  constexpr u32 PAGE = M::PAGE_ROWS;
  const u32 rows = u32(places.size()), position = places[0].second;
  constexpr int KV = G::HEADS / G::GROUP, COLS = QKV_COLS<G>, OUT = G::HEADS * G::DIM, TASKS = G::HEADS / G::HEADS_PER_TASK;
  constexpr u32 ROW = G::DIM * 2;
  [[maybe_unused]] constexpr u32 TILE_ROWS = (G::HEADS_PER_TASK <= 8 ? 8 / G::HEADS_PER_TASK : 1) * 16;
  start(rows, position);
  step_at_hand = step;
  u64 state = position * 31 + rows;
  // Positions of each sequence before its first row, and with its last.
  u32 old[8] = {}, all_of[8] = {};
  for (u32 row = 0; row < rows; row++) {
    const auto [sequence, at] = places[row];
    require(sequence < 8 && at < M::CONTEXT_MAX && at >= step, "a place that is not there");
    if (all_of[sequence] == 0) old[sequence] = at;
    all_of[sequence] = at + 1;
    rows_at[row].sequence = sequence, rows_at[row].position = at - step;
  }
  const std::vector<float> q_weight = numbers(state, G::DIM), k_weight = numbers(state, G::DIM), table = numbers(state, M::CONTEXT_MAX * G::DIM);
  const std::vector<float> qkv = numbers(state, size_t(rows) * COLS);
  const std::vector<float> sinks = SINKS_OF<G> ? numbers(state, G::HEADS) : std::vector<float>();
  const auto at = [](u32 sequence, u32 of, int kv) { return ((size_t(sequence) * M::CONTEXT_MAX + of) * KV + kv) * G::DIM; };
  const std::vector<float> keys = numbers(state, 8 * M::CONTEXT_MAX * KV * G::DIM), values = numbers(state, keys.size());
  pages.resize(M::PAGES);
  for (u32 i = 0; i < M::PAGES; i++) pages[i] = (i * 5 + 3) % M::PAGES;
  const size_t cache_bytes = KV * M::POOL_ROWS * ROW;
  cache.assign(2 * cache_bytes, 0xff);
  wave.k_cache = 0, wave.v_cache = u32(cache_bytes / OFFSET_BYTES);
  const auto cell = [&](u32 kind, u32 sequence, u32 of, int kv, u32 d) {
    const size_t row = kv * M::POOL_ROWS + pages[sequence * M::BLOCKS + of / PAGE] * PAGE + of % PAGE;
    return reinterpret_cast<bf16*>(cache.data() + kind * cache_bytes + row * ROW + (d / 8 ^ swizzle(of)) * 16 + d % 8 * 2);
  };
  for (u32 s = 0; s < 8; s++)
    for (u32 of = 0; of < old[s]; of++)
      for (int kv = 0; kv < KV; kv++)
        for (u32 d = 0; d < u32(G::DIM); d++) narrow(keys[at(s, of, kv) + d], cell(0, s, of, kv, d)), narrow(values[at(s, of, kv) + d], cell(1, s, of, kv, d));
  const std::vector<u8> cache_before = cache;
  wave.q_norm = constant(q_weight), wave.k_norm = constant(k_weight), wave.rope = constant(table);
  if constexpr (SINKS_OF<G>) wave.sinks = constant(sinks);
  const u32 whole = blocks<M>(rows) * M::BLOCK_ROWS, x = activations(size_t(whole) * COLS * HEAD_BYTES<G>);
  const u32 queries = activations(size_t(whole) * OUT * 2), out = operand<M, OUT>(rows);
  for (u32 row = 0; row < rows; row++)
    for (int i = 0; i < COLS; i++) {
      const float y = qkv[size_t(row) * COLS + i];
      if (G::PARTS == 0) narrow(y, reinterpret_cast<bf16*>(plain_at(x, row, i, COLS, 2)));
      for (int part = 0; part < G::PARTS; part++) {
        const float of = G::PARTS == 1 ? y : part == 0 ? y * 4.f : part == 1 ? y * -3.f : 0.f;
        put_head<M, G>(x, part, row, i, COLS, of);
      }
    }
  wave.x = x;
  if constexpr (M::STEPS) {
    // A block with tasks of all rows, and of some that are not there.
    wave.out = out;
    for (u32 row = 0; row < whole; row++)
      for (u32 i = 0; i < TASKS; i++) shares.push_back({row, 1, i, i + 1});
    attend_rows<M, G>();
  } else {
    wave.out = queries;
    shares = {{0, rows / 2 + 1, 0, 1}, {rows / 2 + 1, whole - rows / 2 - 1, 0, 1}};
    run<M, WaveAppend<M, G>>();
  }

  const int k_at = G::HEADS * G::DIM, v_at = k_at + KV * G::DIM;
  std::vector<double> expected, found;
  const auto angles = [&](u32 of) { return std::vector<float>(table.begin() + of * G::ROTARY, table.end()); };
  const auto row_of = [&](u32 of) { return std::vector<float>(qkv.begin() + size_t(of) * COLS, qkv.begin() + size_t(of + 1) * COLS); };
  std::vector<std::vector<double>> all_keys(8 * M::CONTEXT_MAX * KV), all_values(all_keys.size());
  for (u32 s = 0; s < 8; s++)
    for (u32 of = 0; of < all_of[s]; of++)
      for (int kv = 0; kv < KV; kv++) {
        std::vector<double> k(keys.begin() + at(s, of, kv), keys.begin() + at(s, of, kv) + G::DIM), v(values.begin() + at(s, of, kv), values.begin() + at(s, of, kv) + G::DIM);
        if (of >= old[s]) {
          const std::vector<float> row = row_of(u32(std::find(places.begin(), places.end(), At{s, of}) - places.begin()));
          k = prepared<OfKeys<G>>(row, k_at, k_at, KV, kv, k_weight, angles(of), G::K_EPS);
          v.assign(row.begin() + v_at + kv * G::DIM, row.begin() + v_at + (kv + 1) * G::DIM);
        }
        for (int d = 0; d < G::DIM; d++) {
          expected.push_back(k[d]), found.push_back(bf16_at(reinterpret_cast<u8*>(cell(0, s, of, kv, d))));
          expected.push_back(v[d]), found.push_back(bf16_at(reinterpret_cast<u8*>(cell(1, s, of, kv, d))));
          k[d] = rounded(k[d]);
        }
        all_keys[(s * M::CONTEXT_MAX + of) * KV + kv] = k, all_values[(s * M::CONTEXT_MAX + of) * KV + kv] = v;
      }
  // Nothing else of the cache has changed: as many bytes as are written are other ones.
  size_t changed = 0;
  for (size_t i = 0; i < cache.size(); i += 16) changed += !untouched(cache.data() + i, 16) && untouched(cache_before.data() + i, 16);
  expected.push_back(1), found.push_back(changed == size_t(rows) * KV * 2 * ROW / 16);
  std::vector<std::vector<double>> all_queries;
  for (u32 row = 0; row < rows; row++)
    for (int h = 0; h < G::HEADS; h++) {
      all_queries.push_back(prepared<G>(row_of(row), 0, 0, G::HEADS, h, q_weight, angles(places[row].second), G::Q_EPS));
      for (double& q : all_queries.back()) q *= expected_query_factor<G>(places[row].second);
      for (int d = 0; d < G::DIM; d++) {
        if (!M::STEPS) expected.push_back(all_queries.back()[d]), found.push_back(bf16_at(plain_at(queries, row, h * G::DIM + d, OUT, 2)));
        all_queries.back()[d] = rounded(all_queries.back()[d]);
      }
    }
  for (u32 row = M::STEPS ? 0 : rows; row < whole; row++) expected.push_back(1), found.push_back(untouched(plain_at(queries, row, 0, OUT, 2), OUT * 2));
  if constexpr (!M::STEPS) {
    wave.x = queries, wave.out = out;
    if constexpr (GATED_OF<G>) wave.gate = x;
    shares.clear();
    for (u32 row = 0; row < whole; row += TILE_ROWS)
      for (u32 i = 0; i < TASKS; i++) {
        shares = {{row, TILE_ROWS, i, i + 1}};
        run<M, WaveAttend<M, G>>();
      }
  }
  for (u32 row = 0; row < rows; row++) {
    const auto [s, own] = places[row];
    const u32 seen = G::WINDOW && own + 1 > G::WINDOW ? own + 1 - G::WINDOW : 0;
    for (int h = 0; h < G::HEADS; h++) {
      const std::vector<double>& q = all_queries[row * G::HEADS + h];
      std::vector<double> sums(G::DIM);
      double all = SINKS_OF<G> ? std::exp(double(sinks[h])) : 0.;
      for (u32 of = seen; of <= own; of++) {
        double score = 0;
        for (int d = 0; d < G::DIM; d++) score += q[d] * all_keys[(s * M::CONTEXT_MAX + of) * KV + h / G::GROUP][d];
        score *= G::SCALE;
        if (G::SOFTCAP > 0) score = G::SOFTCAP * std::tanh(score / G::SOFTCAP);
        const double weight = std::exp(score);
        all += weight;
        for (int d = 0; d < G::DIM; d++) sums[d] += weight * all_values[(s * M::CONTEXT_MAX + of) * KV + h / G::GROUP][d];
      }
      for (int d = 0; d < G::DIM; d++) expected.push_back(sums[d] / all * expected_gate<G>(row_of(row), h, d)), found.push_back(bf16_at(operand_at<M, OUT, G::OUT_TILES>(out, row, h * G::DIM + d)));
    }
  }
  for (u32 row = rows; row < whole; row++)
    for (int col = 0; col < OUT; col += 2) expected.push_back(1), found.push_back(untouched(operand_at<M, OUT, G::OUT_TILES>(out, row, col), 4));
  report(name, expected, found);
}

// Rows of a chunk, from `position` on.
template <class G, int SLOT_KIB, u32 PAGE>
static void attention(const char* name, u32 position, u32 rows) {
  std::vector<At> places;
  for (u32 row = 0; row < rows; row++) places.push_back({0, position + row});
  attention<ChunkMachine<SLOT_KIB, 1, PAGE>, G>(name, places);
}

// What attention of a step computes of rows over the cache as it is, which it appends to. What a row has of a product follows from its sequence
// and its position.
template <class M, class G>
static std::vector<std::vector<u8>> attended(const std::vector<At>& places) {
  constexpr int KV = G::HEADS / G::GROUP, COLS = QKV_COLS<G>, OUT = G::HEADS * G::DIM, TASKS = G::HEADS / G::HEADS_PER_TASK;
  std::vector<u8> kept = std::move(cache);
  const u32 rows = u32(places.size());
  start(rows);
  cache = std::move(kept);
  u64 state = 3;
  const std::vector<float> q_weight = numbers(state, G::DIM), k_weight = numbers(state, G::DIM), table = numbers(state, M::CONTEXT_MAX * G::DIM);
  wave.q_norm = constant(q_weight), wave.k_norm = constant(k_weight), wave.rope = constant(table);
  wave.k_cache = 0, wave.v_cache = u32(cache.size() / 2 / OFFSET_BYTES);
  wave.x = activations(size_t(M::BLOCK_ROWS) * COLS * HEAD_BYTES<G>), wave.out = operand<M, OUT>(rows);
  for (u32 row = 0; row < rows; row++) {
    rows_at[row].sequence = places[row].first, rows_at[row].position = places[row].second;
    state = places[row].first * 100003 + places[row].second + 1;
    if (G::PARTS == 0)
      for (int i = 0; i < COLS; i++) narrow(numbers(state, 1)[0], reinterpret_cast<bf16*>(plain_at(wave.x, row, i, COLS, 2)));
    for (int part = 0; part < G::PARTS; part++) {
      const std::vector<float> of = numbers(state, COLS);
      for (int i = 0; i < COLS; i++) put_head<M, G>(wave.x, part, row, i, COLS, of[i]);
    }
    for (u32 i = 0; i < TASKS; i++) shares.push_back({row, 1, i, i + 1});
  }
  attend_rows<M, G>();
  std::vector<std::vector<u8>> all(rows);
  for (u32 row = 0; row < rows; row++)
    for (int col = 0; col < OUT; col++) {
      const u8* at = operand_at<M, OUT, G::OUT_TILES>(wave.out, row, col);
      all[row].insert(all[row].end(), at, at + 2);
    }
  return all;
}
// A row has the same bits alone and beside any others, and a text the same outputs and the same cache wherever it is cut. The text has a history
// of `history` positions that is there before. Fewer positions are read one by one, because that takes longest.
template <class M, class G>
static void same_bits(const char* name, u32 history) {
  constexpr u32 READ = 66, READ_ALONE = 18;
  require(history + READ <= M::CONTEXT_MAX && history > 7 * 9, "a text that is too long or too short");
  pages.resize(M::PAGES);
  for (u32 i = 0; i < M::PAGES; i++) pages[i] = (i * 5 + 3) % M::PAGES;
  std::vector<u8> before(2 * (G::HEADS / G::GROUP) * M::POOL_ROWS * G::DIM * 2);
  u64 state = history;
  for (size_t i = 0; i < before.size(); i += 2) narrow(numbers(state, 1)[0], reinterpret_cast<bf16*>(before.data() + i));
  std::vector<double> expected, found;
  const auto compare = [&](const std::vector<u8>& a, const std::vector<u8>& b) { expected.push_back(1), found.push_back(a == b); };
  std::vector<std::vector<u8>> together;
  std::vector<u8> left;
  for (u32 cut : {64u, 16u, 7u, 1u}) {
    std::vector<std::vector<u8>> all;
    cache = before;
    const u32 read = cut == 1 ? READ_ALONE : READ;
    for (u32 at = 0; at < read; at += cut) {
      std::vector<At> places;
      for (u32 i = at; i < min(at + cut, read); i++) places.push_back({0, history + i});
      for (const std::vector<u8>& row : attended<M, G>(places)) all.push_back(row);
    }
    if (cut == 64) together = all, left = cache;
    for (u32 i = 0; i < read; i++) compare(together[i], all[i]);
    if (read == READ) compare(left, cache);
  }
  // Beside rows of other sequences, several of each at once, of which some have longer histories.
  for (u32 count : {2u, 5u, 16u, 33u}) {
    const u32 own = count / 15 * 5;
    std::vector<At> places;
    for (u32 i = 0; i + 1 < count; i++) places.push_back({1 + i / 5, history + i % 5 - i / 5 * 9});
    places.insert(places.begin() + own, {0, history});
    cache = before;
    compare(together[0], attended<M, G>(places)[own]);
  }
  report(name, expected, found);
}

#ifdef SAME_BITS
// The begin of the text lies within a tile and at its end; several turns of teams; windows that end within the step, and in a step before.
int main() {
  typedef StepMachine<64> S64;
  typedef Heads<4, 2, 2, 64, 64, false, HeadNorm::HEAD, 0, 1> Halves;
  const HeadNorm none = HeadNorm::NONE, head = HeadNorm::HEAD;
  same_bits<S64, PacketsOf<Tiled<Halves, 64, none, none>, 2>>("same-halves", 75);
  same_bits<S64, Tiled<Heads<4, 4, 4, 64, 64, false, HeadNorm::HEAD, 24, 1>, 64, head, none>>("same-window", 128);
  same_bits<StepMachine<64, 32>, HeadsOf<Tiled<Heads<2, 2, 2, 128, 128, true, HeadNorm::HEAD, 0, 1>, 32, head, head>, 1>>("same-128", 203);
  same_bits<S64, Tiled<Heads<4, 4, 4, 256, 256, false, HeadNorm::HEAD, 100, 1>, 16, head, head>>("same-256", 300);
  // Histories in KV splits, whose borders lie before, within and after the text.
  same_bits<S64, CutAt<HeadsOf<Tiled<Halves, 64, none, none>, 2>, 128>>("same-splits", 230);
  same_bits<StepMachine<64, 32>, CutAt<HeadsOf<Tiled<Heads<4, 2, 2, 128, 128, true, HeadNorm::HEAD, 0, 1>, 32, head, head>, 1>, 64>>("same-splits-128", 150);
  same_bits<S64, CutAt<Tiled<Heads<4, 4, 4, 64, 64, false, HeadNorm::HEAD, 150, 1>, 32, head, none>, 64>>("same-splits-window", 270);
}
#else

int main() {
  // A row by one warp, by two, by four and by eight.
  rowwise<Rowwise<200, true, false, true, Norm::RMS>>("rows-embed", "rows-embed-bf16", 37);
  rowwise<Rowwise<256, false, true, true, Norm::RMS, Norm::RMS>>("rows-branch", "rows-branch-bf16", 130);
  rowwise<Rowwise<1104, false, true, true, Norm::LAYER, Norm::LAYER>>("rows-layer-2-warps", "rows-layer-2-warps-bf16", 11);
  rowwise<Rowwise<2312, true, false, true, Norm::LAYER>>("rows-embed-4-warps", "rows-embed-4-warps-bf16", 5);
  rowwise<Rowwise<8200, false, true, true, Norm::RMS, Norm::LAYER>>("rows-8-warps", "rows-8-warps-bf16", 3);
  // Of experts; four rows, two and one side by side, in teams of two warps and of all.
  rowwise<ByRow<SlotsOf<Rowwise<264, false, true, true, Norm::RMS>, 3>>>("rows-slots", "rows-slots-bf16", 75);
  rowwise<ByRow<SlotsOf<Rowwise<2056, false, true, true, Norm::LAYER>, 2>>, SharedMachine>("rows-slots-of-two", "rows-slots-of-two-bf16", 21);
  rowwise<ByRow<Rowwise<4104, false, false, true, Norm::RMS>>>("rows-of-one", "rows-of-one-bf16", 13);
  rowwise<Rowwise<64, false, false, true, Norm::NONE>>("rows-as-they-are", "rows-as-they-are-bf16", 9);
  rowwise<Rowwise<72, false, true, false, Norm::NONE>>("rows-sum-alone", "", 9);
  // Of k that ends within a chunk and within a granule; of units that end within a pass; a block of rows, a part of one, and two.
  matmul<Product<40, 200, Epilogue::STORE, 3, 8, true, true>>("matmul-store-bf16", 37);
  matmul<Product<44, 96, Epilogue::STORE, 28, 8, false, false>>("matmul-store-operand-bf16", 130);
  matmul<Product<138, 64, Epilogue::ACT, 9, 8, true, false, Act::GELU_TANH>>("matmul-act-bf16", 128);
  matmul<Product<74, 72, Epilogue::ACT, 6, 8, false, true, Act::GELU_ERF>>("matmul-act-plain-bf16", 16);
  matmul<Product<92, 160, Epilogue::GATED, 5, 8, false, false>>("matmul-gated-bf16", 100);
  matmul<Product<44, 40, Epilogue::GATED, 2, 8, true, true, Act::GELU_TANH>>("matmul-gated-bias-bf16", 129);
  matmul<Product<200, 136, Epilogue::RESIDUAL, 12>>("matmul-residual", 131);
  matmul<Product<41, 80, Epilogue::RESIDUAL, 4, 8, true>>("matmul-residual-odd", 5);
  matmul<Product<50, 192, Epilogue::STORE, 5, 4, true, true>>("matmul-units-of-4-bf16", 70);
  matmul<Product<26, 384, Epilogue::ACT, 7, 2, true, false>>("matmul-units-of-2-bf16", 65);
  matmul<Product<34, 640, Epilogue::STORE, 28, 2, false, true>>("matmul-units-of-2-long-bf16", 3);
  // By warpgroups: tiles of 16 units for all rows, or of 8 for half of them; passes of one to four tiles, the last ones shorter.
  rowwise<Rowwise<256, false, true, true, Norm::RMS>, WideMachine>("wide-rows", "wide-rows-bf16", 130);
  rowwise<Rowwise<256, false, true, true, Norm::RMS>, SharedMachine>("shared-rows", "shared-rows-bf16", 130);
  matmul<SharedMachine, By<Product<40, 200, Epilogue::STORE, 16, 8, true, true>, 2, 4, 1, 2>>("shared-store-bf16", 37);
  matmul<SharedMachine, By<Product<264, 96, Epilogue::STORE, 32, 8, false, false>, 2, 4, 1, 2>>("shared-store-operand-bf16", 130);
  matmul<SharedMachine, By<Product<1138, 160, Epilogue::ACT, 24, 8, true, false, Act::GELU_TANH>, 2, 4, 1, 2>>("shared-act-bf16", 128);
  matmul<SharedMachine, By<Product<388, 64, Epilogue::GATED, 32>, 2, 4, 1, 2>>("shared-gated-bf16", 200);
  matmul<SharedMachine, By<Product<541, 712, Epilogue::RESIDUAL, 16, 8, true>, 2, 4, 1, 2>>("shared-residual", 131);
  // A product that leaves the input of the next one, with whole groups of columns and a shorter one; and products whose input lacks the factor of its norm.
  in_sums<SharedMachine, Summing<By<Product<512, 200, Epilogue::RESIDUAL, 16, 8, true>, 2, 4, 1, 2>>>("shared-sums", "shared-sums-bf16", 131);
  in_sums<SharedMachine, Summing<By<Product<168, 64, Epilogue::RESIDUAL, 32>, 2, 4, 1, 2>>>("shared-sums-short", "shared-sums-short-bf16", 37, false);
  matmul<SharedMachine, Weighted<By<Product<264, 96, Epilogue::STORE, 32, 8, true, true>, 2, 4, 1, 2>, 40>>("shared-factor-bf16", 200);
  matmul<SharedMachine, Weighted<By<Product<388, 64, Epilogue::GATED, 32>, 2, 4, 1, 2>, 3>>("shared-factor-gated-bf16", 150);
  matmul<WideMachine, By<Product<40, 200, Epilogue::STORE, 16, 8, true, true>, 1, 8, 1, 2>>("wide-store-bf16", 37);
  matmul<WideMachine, By<Product<264, 96, Epilogue::STORE, 32, 8, false, false>, 1, 8, 1, 2>>("wide-store-operand-bf16", 130);
  matmul<WideMachine, By<Product<1138, 160, Epilogue::ACT, 32, 8, true, false, Act::GELU_TANH>, 2, 4, 1, 2>>("wide-act-bf16", 128);
  matmul<WideMachine, By<Product<388, 64, Epilogue::GATED, 32>, 1, 8, 1, 2>>("wide-gated-bf16", 100);
  matmul<WideMachine, By<Product<92, 544, Epilogue::GATED, 24, 8, true, true, Act::GELU_TANH>, 2, 4, 1, 2>>("wide-gated-bias-bf16", 129);
  matmul<WideMachine, By<Product<200, 712, Epilogue::RESIDUAL, 8>, 2, 4, 1, 2>>("wide-residual", 131);
  matmul<WideMachine, By<Product<541, 40, Epilogue::RESIDUAL, 16, 8, true>, 1, 8, 1, 2>>("wide-residual-odd", 5);
  // Codes: a chunk is a granule; of scales of groups, of rows, of both, with zero points; of k that ends within a granule.
  typedef By<Product<44, 200, Epilogue::RESIDUAL, 4, 8, true>, 2, 4, 1, 1> Sum;
  typedef By<Product<92, 328, Epilogue::GATED, 16>, 2, 4, 1, 1> Gate;
  typedef By<Product<130, 256, Epilogue::RESIDUAL, 12>, 2, 4, 1, 1> Long;
  matmul<CodedAs<Sum, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-int8-rows", 37);
  matmul<CodedAs<Long, Code::INT8, 32, ScaleCode::F32, true, false>>("codes-int8-32-zeros", 130);
  matmul<CodedAs<Long, Code::E4M3, 0, ScaleCode::NONE, false, true>>("codes-e4m3-rows", 70);
  matmul<CodedAs<Sum, Code::E4M3, 64, ScaleCode::BF16, false, true>>("codes-e4m3-64-both", 5);
  matmul<CodedAs<Sum, Code::INT4, 128, ScaleCode::F16, false, false>>("codes-int4-128", 129);
  matmul<CodedAs<Long, Code::INT4, 64, ScaleCode::BF16, true, false>>("codes-int4-64-zeros", 37);
  matmul<CodedAs<Gate, Code::INT4, 32, ScaleCode::F16, true, false>>("codes-int4-32-gated-bf16", 100);
  matmul<CodedAs<Sum, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("codes-mxfp4", 64);
  matmul<CodedAs<Long, Code::E2M1, 64, ScaleCode::E4M3, false, true>>("codes-e2m1-both", 16);
  // Codes by warpgroups.
  typedef By<Product<264, 200, Epilogue::RESIDUAL, 32, 8, true>, 1, 8, 1, 1> WideRows;
  typedef By<Product<404, 328, Epilogue::GATED, 24>, 2, 4, 1, 1> WideGate;
  typedef By<Product<200, 256, Epilogue::RESIDUAL, 16>, 1, 8, 1, 1> WideLong;
  matmul<WideMachine, CodedAs<WideRows, Code::INT8, 0, ScaleCode::NONE, false, true>>("wide-int8-rows", 37);
  matmul<WideMachine, CodedAs<WideLong, Code::INT8, 32, ScaleCode::F32, true, false>>("wide-int8-32-zeros", 130);
  matmul<WideMachine, CodedAs<WideRows, Code::E4M3, 0, ScaleCode::NONE, false, true>>("wide-e4m3-rows", 70);
  matmul<WideMachine, CodedAs<WideGate, Code::E4M3, 128, ScaleCode::BF16, false, true>>("wide-e4m3-128-both-bf16", 5);
  matmul<LongWideMachine, CodedAs<WideGate, Code::INT4, 128, ScaleCode::F16, false, false>>("wide-int4-128-gated-bf16", 129);
  matmul<LongWideMachine, CodedAs<WideLong, Code::INT4, 64, ScaleCode::BF16, true, false>>("wide-int4-64-zeros", 37);
  matmul<LongWideMachine, CodedAs<WideGate, Code::INT4, 32, ScaleCode::F16, true, false>>("wide-int4-32-gated-bf16", 100);
  matmul<LongWideMachine, CodedAs<WideLong, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("wide-mxfp4", 64);
  matmul<LongWideMachine, CodedAs<WideRows, Code::E2M1, 0, ScaleCode::NONE, false, true>>("wide-e2m1-rows", 16);
  typedef Heads<4, 2, 2, 64, 64, false, HeadNorm::HEAD, 0, 1> Halves;
  const HeadNorm none = HeadNorm::NONE, head = HeadNorm::HEAD;
  // From the start, after a history that ends within a tile, and in rows of two blocks.
  attention<WideMachine, Tiled<Halves, 64, none, none>>("wide-attention-bf16", {{0, 0}, {0, 1}, {0, 2}});
  attention<SharedMachine, Tiled<Halves, 64, none, none>>("shared-attention-bf16", {{0, 0}, {0, 1}, {0, 2}});
  for (const auto& at : {std::pair<u32, u32>{0, 37}, {61, 130}, {100, 1}}) attention<Tiled<Halves, 64, none, none>, 16, 64>("attention-halves-bf16", at.first, at.second);
  attention<Capped<Tiled<Heads<4, 4, 4, 64, 0, false, HeadNorm::HEAD, 24, 1>, 32, head, head>>, 8, 32>("attention-window-cap-bf16", 75, 70);
  attention<Tiled<Heads<3, 3, 3, 64, 64, true, HeadNorm::HEAD, 50, 1>, 16, head, none>, 4, 32>("attention-pairs-3-bf16", 40, 40);
  attention<Tiled<Heads<6, 3, 3, 64, 64, false, HeadNorm::HEAD, 0, 1>, 64, none, none>, 16, 64>("attention-3-bf16", 5, 70);
  attention<Tiled<Heads<6, 6, 2, 64, 0, false, HeadNorm::HEAD, 33, 1>, 32, head, none>, 8, 32>("attention-2-of-6-bf16", 50, 20);
  attention<Tiled<Heads<8, 8, 8, 64, 64, false, HeadNorm::HEAD, 0, 1>, 32, none, head>, 8, 32>("attention-8-bf16", 17, 33);
  attention<Tiled<Heads<2, 1, 1, 128, 128, false, HeadNorm::HEAD, 0, 1>, 64, head, head>, 32, 64>("attention-128-bf16", 70, 140);
  attention<Tiled<Heads<2, 2, 2, 192, 192, true, HeadNorm::HEAD, 0, 1>, 16, none, none>, 12, 16>("attention-192-bf16", 33, 20);
  attention<Tiled<Heads<4, 2, 2, 256, 256, false, HeadNorm::HEAD, 40, 1>, 32, head, head>, 32, 32>("attention-256-bf16", 90, 35);
  attention<Tiled<Heads<4, 2, 2, 256, 64, false, HeadNorm::HEAD, 40, 1>, 32, head, head>, 32, 32>("attention-part-256-bf16", 90, 35);
  attention<Gated<Tiled<Halves, 64, none, none>>, 16, 64>("attention-gate-bf16", 61, 37);
  attention<Gated<Featured<Tiled<Heads<6, 3, 3, 64, 64, true, HeadNorm::HEAD, 50, 1>, 16, head, head>>>, 4, 32>("attention-featured-bf16", 40, 40);

  // Steps. Tokens of the host, of the launch before and of the step before; branches as they are, and sums of parts; rows of one warp to eight.
  typedef StepMachine<16> S16;
  typedef StepMachine<32> S32;
  typedef StepMachine<64> S64;
  rowwise<Rowwise<200, true, false, true, Norm::RMS>, S16>("steps-embed", "steps-embed-bf16", 11);
  rowwise<Rowwise<1000, true, false, true, Norm::LAYER>, S64>("steps-embed-later", "steps-embed-later-bf16", 50, 3);
  rowwise<SumsOf<Rowwise<512, false, true, true, Norm::RMS>, 2>, S32>("steps-addend", "steps-addend-bf16", 32);
  rowwise<SumsOf<Rowwise<2304, false, true, true, Norm::RMS, Norm::RMS>, 2>, S16>("steps-parts-norm", "steps-parts-norm-bf16", 5);
  rowwise<SumsOf<Rowwise<72, false, true, false, Norm::NONE>, 3>, S64>("steps-addend-alone", "", 33);
  rowwise<Rowwise<1032, false, true, true, Norm::LAYER, Norm::LAYER>, S16>("steps-branch", "steps-branch-bf16", 16);
  rowwise<SlotsOf<Rowwise<1032, false, true, true, Norm::RMS>, 4>, S16>("steps-slots", "steps-slots-bf16", 15);
  rowwise<RowsIn<SlotsOf<Rowwise<256, false, true, true, Norm::RMS>, 8>, 4>, S32>("steps-slots-4", "steps-slots-4-bf16", 29);
  // Parts of rows: of one warp, of several, and with two pieces a lane.
  rowwise<Taking<Rowwise<264, false, false, true, Norm::RMS>>, S16>("steps-taken", "steps-taken-bf16", 11);
  rowwise<RowsIn<Rowwise<256, true, false, true, Norm::RMS>, 4>, S32>("steps-embed-4", "steps-embed-4-bf16", 29, 1);
  rowwise<RowsIn<SumsOf<Rowwise<1600, false, true, true, Norm::RMS>, 2>, 2>, S64>("steps-addend-2", "steps-addend-2-bf16", 64);
  rowwise<RowsIn<Rowwise<12288, false, true, true, Norm::RMS>, 3>, S16>("steps-branch-3", "steps-branch-3-bf16", 5);
  // Eight, four, two and one groups of k; chunks of weights that are longer than those of inputs, and shorter; several passes; parts of
  // which the last is shorter.
  matmul<S16, By<Product<44, 200, Epilogue::STORE, 2, 8, true, true>, 1, 1, 8, 8>>("steps-8-groups-bf16", 11);
  matmul<S16, By<Product<138, 712, Epilogue::ACT, 2, 8, true, false, Act::GELU_TANH>, 1, 2, 4, 16>>("steps-4-groups-bf16", 16);
  matmul<S32, By<Product<92, 160, Epilogue::GATED, 5>, 2, 2, 2, 4>>("steps-gated-bf16", 21);
  matmul<S64, By<Product<92, 328, Epilogue::GATED, 3, 8, true, false>, 4, 2, 1, 2>>("steps-gated-64-bf16", 64);
  matmul<S64, By<Product<200, 136, Epilogue::RESIDUAL, 3>, 2, 1, 4, 8>>("steps-residual", 50);
  matmul<S64, By<Product<41, 80, Epilogue::RESIDUAL, 4, 8, true>, 1, 8, 1, 2>>("steps-residual-odd", 33);
  matmul<S16, By<Product<44, 328, Epilogue::RESIDUAL, 3, 8, true>, 1, 2, 4, 8, 2>>("steps-parts", 9);
  matmul<S32, By<Product<72, 200, Epilogue::STORE, 4, 8, true>, 1, 1, 8, 8, 2>>("steps-parts-32", 32);
  matmul<S32, InPackets<By<Product<72, 200, Epilogue::STORE, 4, 8, true>, 1, 1, 8, 8, 2>>>("steps-packets-32", 29);
  matmul<S64, InPackets<By<Product<200, 712, Epilogue::STORE, 7>, 4, 1, 2, 4, 2>>>("steps-packets-64", 61);
  matmul<S64, By<Product<200, 712, Epilogue::RESIDUAL, 8>, 2, 4, 1, 2, 3>>("steps-parts-3", 20);
  matmul<S16, By<Product<50, 328, Epilogue::STORE, 3, 4, true>, 1, 1, 8, 8, 2>>("steps-units-of-4-parts", 16);
  matmul<S32, By<Product<26, 384, Epilogue::ACT, 7, 2, true, false>, 2, 2, 2, 2>>("steps-units-of-2-bf16", 30);
  matmul<S16, Weighted<By<Product<44, 200, Epilogue::STORE, 2, 8, true, true>, 1, 1, 8, 8>, 8>>("steps-factor-8-groups-bf16", 11);
  matmul<S64, Weighted<By<Product<92, 328, Epilogue::GATED, 3, 8, true, false>, 4, 2, 1, 2>, 2>>("steps-factor-gated-bf16", 64);
  matmul<S32, Weighted<By<Product<72, 200, Epilogue::STORE, 4, 8, true>, 1, 1, 8, 8, 2>, 4>>("steps-factor-parts", 32);
  matmul<S32, Weighted<By<Product<61, 200, Epilogue::LOGITS, 4, 8, true>, 2, 4, 1, 4>, 3>>("steps-factor-logits", 29);
  matmul<S16, CodedAs<Weighted<By<Product<44, 200, Epilogue::RESIDUAL, 4, 8, true>, 1, 4, 2, 2>, 2>, Code::INT8, 0, ScaleCode::NONE, false, true>>("steps-factor-int8", 11);
  matmul<S64, Weighted<By<Product<92, 328, Epilogue::GATED, 3, 8, true, false>, 4, 2, 1, 2>, 20>>("steps-factor-20-bf16", 64);
  // Weights held before the block enters: chunks that are shorter than those of inputs, as long, and longer; all chunks of a unit; several passes of
  // several shares; units of 4 rows; a factor of the first pass.
  typedef HoldingMachine<16> H16;
  typedef HoldingMachine<32> H32;
  typedef HoldingMachine<64> H64;
  matmul<H16, Holding<By<Product<138, 712, Epilogue::ACT, 2, 8, true, false, Act::GELU_TANH>, 1, 2, 4, 4>, 4>>("steps-held-bf16", 13);
  matmul<H64, Holding<By<Product<92, 328, Epilogue::GATED, 3, 8, true, false>, 4, 2, 1, 2>, 4>>("steps-held-gated-bf16", 64);
  matmul<H32, Holding<By<Product<200, 712, Epilogue::RESIDUAL, 4>, 2, 2, 2, 8>, 2>>("steps-held-alike", 29);
  matmul<H64, Holding<By<Product<44, 328, Epilogue::STORE, 2, 8, true, true>, 1, 2, 4, 8>, 1>>("steps-held-long-bf16", 50);
  matmul<H32, Holding<By<Product<72, 256, Epilogue::RESIDUAL, 4, 8, true>, 2, 4, 1, 2>, 4>>("steps-held-all", 32);
  matmul<H16, Holding<By<Product<50, 712, Epilogue::STORE, 3, 4, true>, 1, 1, 8, 8>, 1>>("steps-held-units-of-4-bf16", 16);
  matmul<H32, Weighted<Holding<By<Product<72, 456, Epilogue::GATED, 4>, 2, 2, 2, 2>, 4>, 4>>("steps-held-factor-bf16", 31);
  matmul<H32, Weighted<Holding<By<Product<61, 328, Epilogue::LOGITS, 4, 8, true>, 2, 4, 1, 2>, 4>, 3>>("steps-held-logits", 29);
  // Of 128 rows, whose best logits lie in scratch between passes.
  matmul<HoldingMachine<128>, Weighted<Holding<By<Product<437, 328, Epilogue::LOGITS, 8, 8, true>, 1, 8, 1, 2>, 4>, 66>>("steps-held-logits-128", 97);
  // In tiles of 16 units: several shares and passes, with fewer units than a tile and than there are warps; k that ends inside a chunk of the input, of
  // one chunk, and of a chunk for each chunk of weights; one tile and two; a factor of the first pass; codes, of groups and of rows. In
  // tiles of 8 units: a last chunk that has nothing for the second warpgroup, one tile and two, and an output in tiles.
  typedef Product<404, 320, Epilogue::GATED, 16> Tiles;
  typedef Product<404, 328, Epilogue::GATED, 24> LongTiles;
  matmul<S64, InTiles<Tiles, 2>>("steps-tiles-bf16", 61);
  matmul<S64, InTiles<Product<92, 192, Epilogue::GATED, 5, 8, true, true, Act::GELU_TANH>, 2>>("steps-tiles-few-bf16", 33);
  matmul<S64, InTiles<Product<12, 64, Epilogue::GATED, 1>, 2>>("steps-tiles-one-bf16", 64);
  matmul<S64, Weighted<InTiles<Tiles, 2>, 8>>("steps-tiles-factor-bf16", 50);
  matmul<Machine<true, 32, 16, 64>, InTiles<Product<404, 448, Epilogue::GATED, 32>, 2>>("steps-tiles-32-bf16", 29);
  matmul<S32, CodedAs<InTiles<LongTiles, 1>, Code::INT4, 128, ScaleCode::F16, false, false>>("steps-tiles-int4-128-bf16", 29);
  matmul<S32, CodedAs<InTiles<LongTiles, 1>, Code::INT4, 128, ScaleCode::F16, true, false>>("steps-tiles-int4-128-zeros-bf16", 32);
  matmul<S32, CodedAs<Weighted<InTiles<Product<200, 712, Epilogue::GATED, 7, 8, true>, 1>, 4>, Code::INT4, 32, ScaleCode::F16, true, false>>("steps-tiles-int4-32-factor-bf16", 17);
  matmul<S64, CodedAs<InTiles<Product<200, 712, Epilogue::GATED, 16>, 1>, Code::INT4, 64, ScaleCode::BF16, false, false>>("steps-tiles-int4-64-bf16", 40);
  matmul<S32, CodedAs<Weighted<InTiles<LongTiles, 1>, 3>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("steps-tiles-e4m3-rows-bf16", 30);
  matmul<S64, Weighted<InTilesOfK<Product<200, 704, Epilogue::GATED, 7>, 4>, 5>>("steps-tiles-k-bf16", 61);
  matmul<S32, ToTiles<CodedAs<InTilesOfK<Product<200, 640, Epilogue::ACT, 13, 8, true>, 2>, Code::INT4, 128, ScaleCode::F16, false, false>>>("steps-tiles-k-int4-128-bf16", 29);
  // Of 128 rows: two tiles at once, whose chunk is one granule, and one; sums of parts, and logits; an input in slots of 128 columns.
  typedef Machine<true, 128, 32, 16> S128;
  matmul<S128, ToTiles<Weighted<InTiles<Product<404, 448, Epilogue::GATED, 31, 8, true>, 1>, 66>>>("steps-tiles-two-bf16", 121);
  matmul<S128, Weighted<InTiles<Product<200, 704, Epilogue::STORE, 12, 8, true>, 2, 2>, 66>>("steps-tiles-parts", 128);
  matmul<S128, Weighted<InTiles<Product<437, 192, Epilogue::LOGITS, 27, 8, true>, 1>, 66>>("steps-tiles-logits", 97);
  rowwise<ToTiles<Rowwise<1000, true, false, true, Norm::RMS>>, S64>("steps-to-tiles", "steps-to-tiles-bf16", 50);
  rowwise<RowsIn<ToTiles<Rowwise<256, false, true, true, Norm::RMS>>, 4>, S32>("steps-to-tiles-4", "steps-to-tiles-4-bf16", 29);
  same_factors<Weighted<By<Product<44, 200, Epilogue::STORE, 8>, 1, 8, 1, 2>, 19>>("steps-factors-alike");
  // In pairs of blocks: a unit a warp and several; groups of k, of units and of rows; units of 4 and of 2 rows; codes; fewer rows than there are.
  in_pairs<S16, Paired<By<Product<44, 200, Epilogue::RESIDUAL, 2, 8, true>, 1, 1, 8, 8, 2>, true>>("pairs-16", "pairs-16-bf16", 11);
  in_pairs<S32, Paired<By<Product<120, 328, Epilogue::RESIDUAL, 6>, 2, 2, 2, 4, 2>, true>>("pairs-32", "pairs-32-bf16", 32);
  in_pairs<S64, Paired<By<Product<74, 712, Epilogue::RESIDUAL, 4, 8, true>, 4, 1, 2, 4, 2>, true>>("pairs-64", "pairs-64-bf16", 61);
  in_pairs<S64, Paired<By<Product<150, 136, Epilogue::RESIDUAL, 7>, 2, 4, 1, 2, 2>, true>>("pairs-64-units", "pairs-64-units-bf16", 33, false);
  in_pairs<S64, Paired<By<Product<200, 328, Epilogue::RESIDUAL, 12>, 2, 4, 1, 2, 2>, true>>("pairs-64-rounds", "pairs-64-rounds-bf16", 60);
  in_pairs<S32, Paired<By<Product<72, 200, Epilogue::RESIDUAL, 4, 8, true>, 1, 1, 8, 8, 2>, false>>("pairs-alone", "", 17);
  in_pairs<S16, Paired<By<Product<50, 328, Epilogue::RESIDUAL, 5, 4, true>, 1, 2, 4, 4, 2>, true>>("pairs-units-of-4", "pairs-units-of-4-bf16", 16);
  in_pairs<S32, Paired<By<Product<26, 640, Epilogue::RESIDUAL, 5, 2>, 2, 2, 2, 2, 2>, true>>("pairs-units-of-2", "pairs-units-of-2-bf16", 30);
  in_pairs<S16, CodedAs<Paired<By<Product<44, 200, Epilogue::RESIDUAL, 4, 8, true>, 1, 4, 2, 2, 2>, true>, Code::INT8, 0, ScaleCode::NONE, false, true>>("pairs-int8", "pairs-int8-bf16", 11);
  in_pairs<S32, CodedAs<Paired<By<Product<72, 712, Epilogue::RESIDUAL, 4, 8, true>, 2, 2, 2, 2, 2>, true>, Code::INT4, 64, ScaleCode::BF16, true, false>>("pairs-int4-64-zeros", "pairs-int4-64-zeros-bf16", 30);
  in_pairs<S64, CodedAs<Paired<By<Product<72, 200, Epilogue::RESIDUAL, 4>, 2, 2, 2, 2, 2>, true>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("pairs-e4m3", "pairs-e4m3-bf16", 64);
  in_pairs<S64, ToTiles<Paired<By<Product<74, 712, Epilogue::RESIDUAL, 4, 8, true>, 4, 1, 2, 4, 2>, true>>>("pairs-to-tiles-64", "pairs-to-tiles-64-bf16", 61);
  in_pairs<S32, ToTiles<CodedAs<Paired<By<Product<72, 712, Epilogue::RESIDUAL, 4, 8, true>, 2, 2, 2, 2, 2>, true>, Code::INT4, 128, ScaleCode::F16, false, false>>>("pairs-to-tiles-32", "pairs-to-tiles-32-bf16", 30);
  in_pairs<S32, CodedAs<Paired<InTilesOfK<Product<74, 1352, Epilogue::RESIDUAL, 5, 8, true>, 2, 2>, true>, Code::INT4, 128, ScaleCode::F16, true, false>>("pairs-tiles", "pairs-tiles-bf16", 29);
  in_pairs<S128, ToTiles<Paired<InTilesOfK<Product<74, 1216, Epilogue::RESIDUAL, 5, 8, true>, 4, 2>, true>>>("pairs-tiles-128", "pairs-tiles-128-bf16", 121);
  matmul<S16, By<Product<37, 96, Epilogue::LOGITS, 3>, 1, 8, 1, 2>>("steps-logits", 13);
  matmul<S16, By<Product<37, 200, Epilogue::LOGITS, 2>, 1, 1, 8, 8>>("steps-logits-8-groups", 16);
  matmul<S32, By<Product<61, 200, Epilogue::LOGITS, 4, 8, true>, 2, 4, 1, 4>>("steps-logits-32", 29);
  matmul<S64, By<Product<61, 136, Epilogue::LOGITS, 2, 4>, 2, 2, 2, 2>>("steps-logits-64", 64);
  typedef Product<44, 200, Epilogue::RESIDUAL, 4, 8, true> Few;
  typedef Product<130, 712, Epilogue::RESIDUAL, 6> Many;
  matmul<S16, CodedAs<By<Few, 1, 4, 2, 2>, Code::INT8, 0, ScaleCode::NONE, false, true>>("steps-int8-rows", 11);
  matmul<S32, CodedAs<By<Many, 2, 2, 2, 2, 2>, Code::INT8, 32, ScaleCode::F32, true, false>>("steps-int8-32-zeros-parts", 30);
  matmul<S64, CodedAs<By<Many, 2, 2, 2, 2>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("steps-e4m3-rows", 63);
  matmul<S16, CodedAs<By<Few, 1, 2, 4, 4, 2>, Code::E4M3, 64, ScaleCode::BF16, false, true>>("steps-e4m3-64-both-parts", 5);
  matmul<S16, CodedAs<By<Few, 1, 2, 4, 4>, Code::INT4, 128, ScaleCode::F16, false, false>>("steps-int4-128", 16);
  matmul<S32, CodedAs<By<Many, 2, 4, 1, 2, 2>, Code::INT4, 64, ScaleCode::BF16, true, false>>("steps-int4-64-zeros-parts", 17);
  matmul<S64, CodedAs<By<Product<92, 328, Epilogue::GATED, 4>, 4, 2, 1, 2>, Code::INT4, 32, ScaleCode::F16, true, false>>("steps-int4-32-gated-bf16", 40);
  matmul<S16, CodedAs<By<Few, 1, 8, 1, 2>, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("steps-mxfp4", 12);
  matmul<S32, CodedAs<By<Many, 1, 4, 2, 2>, Code::E2M1, 64, ScaleCode::E4M3, false, true>>("steps-e2m1-both", 32);
  matmul<S16, CodedAs<By<Product<61, 256, Epilogue::LOGITS, 4>, 1, 4, 2, 2>, Code::INT8, 32, ScaleCode::F16, false, false>>("steps-logits-int8", 16);
  // Histories of many lengths, rows that follow each other in one sequence, later steps; queries of a task and of a KV head, windows.
  const std::vector<At> lengths = {{3, 0}, {0, 32}, {5, 63}, {1, 64}, {2, 299}, {7, 999}, {4, 5}, {4, 6}, {4, 7}}, few = {{1, 40}, {0, 2}, {2, 64}, {2, 65}}, two = {{6, 999}, {0, 129}};
  attention<S16, HeadsOf<Tiled<Halves, 64, none, none>, 2>>("steps-halves-bf16", lengths);
  attention<S16, PacketsOf<Tiled<Halves, 64, none, none>, 2>>("steps-packets-bf16", lengths);
  attention<S32, Tiled<Heads<4, 4, 4, 64, 64, false, HeadNorm::HEAD, 50, 1>, 64, head, none>>("steps-window-bf16", lengths);
  attention<S16, Capped<Tiled<Heads<6, 3, 3, 64, 0, false, HeadNorm::HEAD, 24, 1>, 32, head, head>>>("steps-window-cap-bf16", few, 2);
  attention<StepMachine<16, 32>, HeadsOf<Tiled<Heads<4, 2, 2, 128, 128, true, HeadNorm::HEAD, 0, 1>, 32, head, head>, 1>>("steps-128-bf16", few);
  attention<S64, PacketsOf<Tiled<Heads<8, 8, 8, 128, 128, false, HeadNorm::HEAD, 300, 1>, 32, none, head>, 2>>("steps-128-of-8-bf16", two, 1);
  attention<S16, Tiled<Heads<4, 4, 4, 256, 256, false, HeadNorm::HEAD, 0, 1>, 16, head, head>>("steps-256-bf16", two);
  attention<S16, Tiled<Heads<16, 16, 16, 64, 64, false, HeadNorm::HEAD, 0, 1>, 64, none, none>>("steps-16-of-16-bf16", few);
  attention<S16, Tiled<Heads<4, 2, 2, 64, 32, false, HeadNorm::HEAD, 0, 1>, 64, head, head>>("steps-part-bf16", lengths);
  attention<S16, Sunk<Tiled<Halves, 64, none, none>>>("steps-sinks-bf16", lengths);
  attention<S16, Gated<PacketsOf<Tiled<Halves, 64, none, none>, 2>>>("steps-gate-bf16", lengths);
  attention<S16, Gated<Featured<HeadsOf<Tiled<Heads<6, 3, 3, 64, 64, false, HeadNorm::HEAD, 24, 1>, 32, head, head>, 2>>>>("steps-featured-bf16", few, 2);
  // Histories in KV splits of 64 positions: of one less than a split, of one, of one more, of several; rows that follow each other across a
  // border; windows of more than a split; rows of two steps later, which have other splits.
  const std::vector<At> borders = {{3, 0}, {0, 63}, {5, 64}, {1, 65}, {2, 128}, {7, 999}, {4, 126}, {4, 127}, {4, 128}, {4, 129}, {6, 320}};
  const std::vector<At> even = {{0, 200}, {1, 201}, {2, 210}, {3, 190}, {4, 200}, {5, 129}, {5, 130}}, one = {{2, 500}};
  typedef Heads<16, 1, 1, 64, 64, false, HeadNorm::HEAD, 0, 1> Many1;
  attention<S16, CutAt<PacketsOf<Tiled<Halves, 64, none, none>, 2>, 64>>("splits-halves-bf16", borders);
  attention<S16, CutAt<Tiled<Many1, 64, none, none>, 64>>("splits-alike-bf16", even);
  attention<S32, CutAt<Tiled<Heads<4, 4, 4, 64, 64, false, HeadNorm::HEAD, 150, 1>, 64, head, none>, 64>>("splits-window-bf16", borders);
  attention<S16, Capped<CutAt<Tiled<Heads<6, 3, 3, 64, 0, false, HeadNorm::HEAD, 100, 1>, 32, head, head>, 64>>>("splits-window-cap-bf16", {{1, 40}, {0, 2}, {2, 640}, {2, 641}}, 2);
  attention<StepMachine<64, 32>, CutAt<HeadsOf<Tiled<Heads<4, 2, 2, 128, 128, true, HeadNorm::HEAD, 0, 1>, 32, head, head>, 1>, 64>>("splits-128-bf16", {{1, 40}, {0, 2}, {2, 64}, {2, 65}, {3, 500}}, 1);
  attention<S64, CutAt<HeadsOf<Tiled<Heads<8, 8, 8, 128, 128, false, HeadNorm::HEAD, 0, 1>, 32, none, head>, 2>, 128>>("splits-128-of-8-bf16", one);
  attention<S16, CutAt<Tiled<Heads<4, 4, 4, 256, 256, false, HeadNorm::HEAD, 0, 1>, 16, head, head>, 256>>("splits-256-bf16", two);
  attention<S16, CutAt<Tiled<Heads<16, 16, 16, 64, 64, false, HeadNorm::HEAD, 0, 1>, 64, none, none>, 64>>("splits-16-of-16-bf16", one);
  attention<S16, CutAt<Gated<HeadsOf<Tiled<Halves, 64, none, none>, 2>>, 64>>("splits-gate-bf16", borders);
  attention<S32, CutAt<Gated<Featured<Tiled<Heads<4, 4, 4, 64, 64, false, HeadNorm::HEAD, 150, 1>, 64, head, head>>>, 64>>("splits-featured-bf16", borders);
  // More rows than two a lane, for a product in tiles.
  std::vector<At> many;
  for (u32 i = 0; i < 102; i++) many.push_back(i < 30 ? At{0, 100 + i} : i < 31 ? At{1, 700} : i < 90 ? At{2, 210 + i} : i < 91 ? At{3, 65} : At{4, i - 91});
  attention<S128, CutAt<ToTiles<HeadsOf<Tiled<Halves, 64, none, none>, 2>>, 64>>("splits-128-rows-bf16", many);
}
#endif
