// Ops of kernels of waves, run by one block of threads on a CPU over random inputs, each against its formula in double precision
// (waves_block.h). Prints a line a case: its name, and the largest difference over the largest value expected.

#include "waves_block.h"

// ---- a block and its memory -------------------------------------------------------------------------------------------

template <int SLOT_KIB, int SLOTS_, u32 PAGE = 64>
struct Machine {
  static constexpr int SMS = 1, WARPS = 8, LOADER_WARPS = 4, SLOTS = SLOTS_, SLOT_BYTES = SLOT_KIB << 10, DIVISIONS = 1;
  static constexpr int STATE_AT = SLOTS * SLOT_BYTES, STATE_BYTES = 1 << 14, STAGE_AT = 0, HEADS_AT = 0, SCRATCH_BYTES = 0, REDUCE_AT = 0;
  static constexpr int REDUCE_BATCH = 1, ROWS = 8, REGISTERS = 216, LOADER_REGISTERS = 72, STAMPS_MAX = 0;
  static constexpr Elem WEIGHT = Elem::BF16, CACHE = Elem::BF16, WIRE = Elem::BF16;
  static constexpr Dot DOT = Dot::MMA;
  static constexpr bool TRACE = false;
  static constexpr u32 PAGE_ROWS = PAGE, PAGES = 12, CONTEXT_MAX = PAGE * 8;
  static constexpr u64 POOL_ROWS = PAGES * PAGE_ROWS;
  static_assert(STATE_AT + STATE_BYTES <= int(sizeof smem), "shared memory holds the chunks");
};
static std::vector<Share> shares;
static std::vector<u32> share_index, pages;
static std::vector<i32> tokens;

static void start(u32 rows, u32 position = 0) {
  constants.clear();
  work.clear();
  cache.clear();
  shares.clear();
  params = WaveParams{};
  params.row_count = rows;
  params.position = position;
  std::memset(&wave, 0xff, sizeof wave);
  wave.shares = 0;
}
// Activations, of which none was written. By their place in steps of OFFSET_BYTES.
static u32 activations(size_t bytes) {
  const size_t at = work.size();
  work.resize((at + bytes + OFFSET_BYTES - 1) / OFFSET_BYTES * OFFSET_BYTES + OFFSET_BYTES, 0xff);
  return u32(at / OFFSET_BYTES);
}
static u32 blocks(u32 rows) { return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS; }
template <int COLS>
static u32 operand(u32 rows) {
  return activations(size_t(blocks(rows)) * OperandPlace<COLS>::BLOCKS * OperandPlace<COLS>::BLOCK_BYTES);
}
// The place of a column of an operand as waves/context.cuh defines it, computed here without that code.
template <int COLS>
static u8* operand_at(u32 at, u32 row, u32 col) {
  const u32 tiles = (COLS + 127) / 128 * 2, lane = row % 8 * 4 + col % 32 / 8;
  const size_t piece = (size_t(row / 128) * tiles + col / 64) * 16384 + row % 128 / 16 * 2048 + col % 64 / 32 * 1024 + col % 8 / 4 * 512 + lane * 16;
  return work.data() + size_t(at) * OFFSET_BYTES + piece + col % 4 / 2 * 8 + row % 16 / 8 * 4 + col % 2 * 2;
}
template <int COLS>
static void put_operand(u32 at, u32 rows, const std::vector<float>& x) {
  for (u32 row = 0; row < rows; row++)
    for (u32 col = 0; col < u32((COLS + 127) / 128 * 128); col++)
      narrow(col < COLS ? x[size_t(row) * COLS + col] : 0.f, reinterpret_cast<bf16*>(operand_at<COLS>(at, row, col)));
}
static u8* plain_at(u32 at, u32 row, u32 col, u32 cols, u32 bytes) { return work.data() + size_t(at) * OFFSET_BYTES + (size_t(row) * cols + col) * bytes; }
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
static void run() {
  params.pack = constants.data();
  params.work = work.data();
  params.cache = cache.data();
  params.shares = shares.data();
  params.tokens = tokens.data();
  params.pages = pages.data();
  const u32 n = blocks(params.row_count);
  share_index.assign(n + 1, 0);
  share_index[n] = u32(shares.size());
  params.share_index = share_index.data();
  require(u64(params.pack) % 16 == 0 && u64(params.work) % 16 == 0 && u64(params.shares) % 16 == 0, "vectors that are not aligned");
  run_wave<M, Op>();
}

// ---- rows ---------------------------------------------------------------------------------------------------------------

template <int H, bool E, bool B, bool O, Norm N, Norm BN = Norm::NONE>
struct Rowwise {
  static constexpr int HIDDEN = H;
  static constexpr bool EMBED = E, BRANCH = B, OUT = O;
  static constexpr float EMBED_SCALE = 1.5f, BRANCH_SCALE = 0.25f, EPS = 1e-5f, BRANCH_EPS = 1e-6f;
  static constexpr Norm NORM = N, BRANCH_NORM = BN;
};
// `name` of the residual, `out_name` of what products read.
template <class G>
static void rowwise(const char* name, const char* out_name, u32 rows) {
  typedef Machine<1, 2> M;
  constexpr int H = G::HIDDEN, VOCAB = 30;
  start(rows);
  u64 state = H + rows;
  const std::vector<float> table = numbers(state, size_t(VOCAB) * H), before = numbers(state, size_t(rows) * H), branch = numbers(state, before.size());
  const std::vector<float> w = numbers(state, H), b = numbers(state, H), bw = numbers(state, H), bb = numbers(state, H);
  wave.norm_weight = constant(w), wave.branch_weight = constant(bw);
  if (G::NORM == Norm::LAYER) wave.norm_bias = constant(b);
  if (G::BRANCH_NORM == Norm::LAYER) wave.branch_bias = constant(bb);
  std::vector<float> pairs(table.size() / 2);
  for (size_t i = 0; i < pairs.size(); i++) pairs[i] = __uint_as_float(bf16_pair(table[2 * i], table[2 * i + 1]));
  wave.table = constant(pairs);
  const u32 whole = blocks(rows) * BLOCK_ROWS;
  wave.residual = activations(size_t(whole) * H * 4);
  wave.branch = activations(size_t(whole) * H * 2);
  wave.out = operand<H>(rows);
  tokens.clear();
  for (u32 row = 0; row < rows; row++) {
    tokens.push_back(i32(row * 7 % VOCAB));
    for (int i = 0; i < H; i++) {
      if (!G::EMBED) std::memcpy(plain_at(wave.residual, row, i, H, 4), &before[size_t(row) * H + i], 4);
      narrow(branch[size_t(row) * H + i], reinterpret_cast<bf16*>(plain_at(wave.branch, row, i, H, 2)));
    }
  }
  // Two shares, the second one of more rows than the chunk has.
  const u32 first = rows / 3;
  shares = {{0, first, 0, 1}, {first, whole - first, 0, 1}};
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
    const std::vector<double> normed = normalised(G::NORM, sum, w, b, G::EPS);
    for (int i = 0; i < H; i++) out.push_back(normed[i]), found_out.push_back(bf16_at(operand_at<H>(wave.out, row, i)));
  }
  for (u32 row = rows; row < whole; row++) {
    expected.push_back(1), found.push_back(untouched(plain_at(wave.residual, row, 0, H, 4), H * 4));
    out.push_back(1), found_out.push_back(untouched(operand_at<H>(wave.out, row, row % H), 2));
  }
  report(name, expected, found);
  if (G::OUT)
    report(out_name, out, found_out);
  else
    require(untouched(work.data() + size_t(wave.out) * OFFSET_BYTES, OperandPlace<H>::BLOCK_BYTES), "an output that the wave does not have");
}

// ---- matmul -------------------------------------------------------------------------------------------------------------

template <int ROWS_, int K_, Epilogue E, int PASS_, int UNIT_ROWS_ = 8, bool B = false, bool P = false, Act A = Act::SILU>
struct Product {
  static constexpr int ROWS = ROWS_, K = K_, UNIT_ROWS = UNIT_ROWS_, PASS = PASS_;
  static constexpr int UNITS = E == Epilogue::GATED ? (ROWS / 2 + 3) / 4 : (ROWS + UNIT_ROWS - 1) / UNIT_ROWS;
  static constexpr Epilogue EPILOGUE = E;
  static constexpr Act ACT = A;
  static constexpr float SCALE = 0.5f;
  static constexpr bool BIAS = B, PLAIN = P;
};
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
static double activated(Act act, double v) {
  if (act == Act::SILU) return v / (1 + std::exp(-v));
  if (act == Act::GELU_ERF) return 0.5 * v * (1 + std::erf(v * std::sqrt(0.5)));
  if (act == Act::GELU_TANH) return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v)));
  return v > 0 ? v : 0;
}
template <class G>
static void matmul(const char* name, u32 rows) {
  typedef Machine<46, 21> M;
  constexpr int COLS = G::EPILOGUE == Epilogue::GATED ? G::ROWS / 2 : G::ROWS;
  start(rows);
  u64 state = G::ROWS * 7 + G::K + rows;
  const std::vector<float> plain = numbers(state, size_t(G::ROWS) * G::K), x = numbers(state, size_t(rows) * G::K), before = numbers(state, size_t(rows) * COLS);
  // As units have it.
  std::vector<float> bias = numbers(state, G::ROWS), units(G::UNITS * G::UNIT_ROWS);
  for (int i = 0; i < int(units.size()); i++) {
    const int r = row_of_matrix<G>(i / G::UNIT_ROWS, i % G::UNIT_ROWS);
    units[i] = r < 0 ? 0.f : bias[r];
  }
  if (G::BIAS) wave.bias = constant(units);
  std::vector<double> w(plain.begin(), plain.end());
  std::vector<float> by_row(G::ROWS, 1.f);
  if constexpr (IS_CODED<G>)
    pack_codes<G>(state, w, by_row);
  else
    pack<G>(plain);
  const u32 whole = blocks(rows) * BLOCK_ROWS;
  wave.x = operand<G::K>(rows);
  put_operand<G::K>(wave.x, rows, x);
  wave.residual = activations(size_t(whole) * COLS * 4);
  wave.out = G::PLAIN ? activations(size_t(whole) * COLS * 2) : operand<COLS>(rows);
  for (u32 row = 0; row < rows; row++) std::memcpy(plain_at(wave.residual, row, 0, COLS, 4), before.data() + size_t(row) * COLS, COLS * 4);
  // Of each block two shares, of the last one first.
  for (u32 block = blocks(rows); block-- > 0;) {
    const u32 row = block * BLOCK_ROWS, middle = G::UNITS * 2 / 5;
    if (middle > 0) shares.push_back({row, BLOCK_ROWS, 0, middle});
    shares.push_back({row, BLOCK_ROWS, middle, u32(G::UNITS)});
  }
  run<M, WaveMatMul<M, G>>();
  const bool sums = G::EPILOGUE == Epilogue::RESIDUAL;
  const auto out_at = [&](u32 row, u32 col) { return G::PLAIN ? plain_at(wave.out, row, col, COLS, 2) : operand_at<COLS>(wave.out, row, col); };
  std::vector<double> expected, found, y(G::ROWS);
  for (u32 row = 0; row < rows; row++) {
    for (int r = 0; r < G::ROWS; r++) {
      y[r] = 0.;
      for (int k = 0; k < G::K; k++) y[r] += w[size_t(r) * G::K + k] * x[size_t(row) * G::K + k];
      if constexpr (IS_CODED<G>)
        if (G::ROW_SCALES) y[r] *= by_row[r];
      if (G::BIAS) y[r] += bias[r];
    }
    for (int r = 0; r < COLS; r++) {
      double value = y[r];
      if (G::EPILOGUE == Epilogue::ACT) value = activated(G::ACT, y[r]);
      if (G::EPILOGUE == Epilogue::GATED) value = activated(G::ACT, y[r]) * y[G::ROWS / 2 + r];
      if (sums) value = before[size_t(row) * COLS + r] + G::SCALE * y[r];
      expected.push_back(value);
      found.push_back(sums ? float_at(plain_at(wave.residual, row, r, COLS, 4)) : bf16_at(out_at(row, r)));
    }
    // Columns that pad an operand.
    for (u32 col = COLS; !G::PLAIN && col < u32((COLS + 127) / 128 * 128); col++) expected.push_back(1), found.push_back(untouched(out_at(row, col), 2));
  }
  for (u32 row = rows; row < whole; row++)
    for (u32 col = 0; col < COLS; col++) expected.push_back(1), found.push_back(untouched(sums ? plain_at(wave.residual, row, col, COLS, 4) : out_at(row, col), 2));
  report(name, expected, found);
}

// ---- attention ----------------------------------------------------------------------------------------------------------

template <class H, int TILE_, HeadNorm Q, HeadNorm K>
struct Tiled : H {
  static constexpr int PITCH = H::DIM, TILE = TILE_;
  static constexpr bool SWIZZLED = true;
  static constexpr HeadNorm Q_NORM = Q, K_NORM = K;
};
template <class H>
struct Capped : H {
  static constexpr float SOFTCAP = 2.f;
};
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

// What the waves of attention append, and what they compute: of `rows` rows from `position` on.
template <class G, int SLOT_KIB, int SLOTS, u32 PAGE>
static void attention(const char* name, u32 position, u32 rows) {
  typedef Machine<SLOT_KIB, SLOTS, PAGE> M;
  constexpr int KV = G::HEADS / G::GROUP, COLS = (G::HEADS + 2 * KV) * G::DIM, OUT = G::HEADS * G::DIM, TASKS = G::HEADS / G::HEADS_PER_TASK;
  constexpr u32 ROW = G::DIM * 2, TILE_ROWS = 8 / G::HEADS_PER_TASK * 16;
  start(rows, position);
  u64 state = position * 31 + rows;
  require(position + rows <= M::CONTEXT_MAX, "too many positions");
  const std::vector<float> q_weight = numbers(state, G::DIM), k_weight = numbers(state, G::DIM), table = numbers(state, M::CONTEXT_MAX * G::DIM);
  const std::vector<float> qkv = numbers(state, size_t(rows) * COLS);
  const auto at = [](u32 of, int kv) { return (size_t(of) * KV + kv) * G::DIM; };
  const std::vector<float> keys = numbers(state, M::CONTEXT_MAX * KV * G::DIM), values = numbers(state, keys.size());
  pages.resize(8);
  for (u32 i = 0; i < 8; i++) pages[i] = (i * 5 + 3) % M::PAGES;
  const size_t cache_bytes = KV * M::POOL_ROWS * ROW;
  cache.assign(2 * cache_bytes, 0xff);
  wave.k_cache = 0, wave.v_cache = u32(cache_bytes / OFFSET_BYTES);
  const auto cell = [&](u32 kind, u32 of, int kv, u32 d) {
    const size_t row = kv * M::POOL_ROWS + pages[of / PAGE] * PAGE + of % PAGE;
    return reinterpret_cast<bf16*>(cache.data() + kind * cache_bytes + row * ROW + (d / 8 ^ swizzle(of)) * 16 + d % 8 * 2);
  };
  for (u32 of = 0; of < position; of++)
    for (int kv = 0; kv < KV; kv++)
      for (u32 d = 0; d < u32(G::DIM); d++) narrow(keys[at(of, kv) + d], cell(0, of, kv, d)), narrow(values[at(of, kv) + d], cell(1, of, kv, d));
  const std::vector<u8> cache_before = cache;
  wave.q_norm = constant(q_weight), wave.k_norm = constant(k_weight), wave.rope = constant(table);
  const u32 whole = blocks(rows) * BLOCK_ROWS, x = activations(size_t(whole) * COLS * 2), queries = activations(size_t(whole) * OUT * 2), out = operand<OUT>(rows);
  for (u32 row = 0; row < rows; row++)
    for (int i = 0; i < COLS; i++) narrow(qkv[size_t(row) * COLS + i], reinterpret_cast<bf16*>(plain_at(x, row, i, COLS, 2)));
  wave.x = x, wave.out = queries;
  shares = {{0, rows / 2 + 1, 0, 1}, {rows / 2 + 1, whole - rows / 2 - 1, 0, 1}};
  run<M, WaveAppend<M, G>>();

  const int k_at = G::HEADS * G::DIM, v_at = k_at + KV * G::DIM;
  std::vector<double> expected, found;
  const auto angles = [&](u32 of) { return std::vector<float>(table.begin() + of * G::DIM, table.end()); };
  const auto row_of = [&](u32 of) { return std::vector<float>(qkv.begin() + size_t(of) * COLS, qkv.begin() + size_t(of + 1) * COLS); };
  std::vector<std::vector<double>> all_keys((position + rows) * KV), all_values(all_keys.size());
  for (u32 of = 0; of < position + rows; of++)
    for (int kv = 0; kv < KV; kv++) {
      std::vector<double> k(keys.begin() + at(of, kv), keys.begin() + at(of, kv) + G::DIM), v(values.begin() + at(of, kv), values.begin() + at(of, kv) + G::DIM);
      if (of >= position) {
        const std::vector<float> row = row_of(of - position);
        k = prepared<OfKeys<G>>(row, k_at, k_at, KV, kv, k_weight, angles(of), G::K_EPS);
        v.assign(row.begin() + v_at + kv * G::DIM, row.begin() + v_at + (kv + 1) * G::DIM);
      }
      for (int d = 0; d < G::DIM; d++) {
        expected.push_back(k[d]), found.push_back(bf16_at(reinterpret_cast<u8*>(cell(0, of, kv, d))));
        expected.push_back(v[d]), found.push_back(bf16_at(reinterpret_cast<u8*>(cell(1, of, kv, d))));
        k[d] = rounded(k[d]);
      }
      all_keys[of * KV + kv] = k, all_values[of * KV + kv] = v;
    }
  // Nothing else of the cache has changed: as many bytes as are written are other ones.
  size_t changed = 0;
  for (size_t i = 0; i < cache.size(); i += 16) changed += !untouched(cache.data() + i, 16) && untouched(cache_before.data() + i, 16);
  expected.push_back(double(rows) * KV * 2 * ROW / 16), found.push_back(double(changed));
  std::vector<std::vector<double>> all_queries;
  for (u32 row = 0; row < rows; row++)
    for (int h = 0; h < G::HEADS; h++) {
      all_queries.push_back(prepared<G>(row_of(row), 0, 0, G::HEADS, h, q_weight, angles(position + row), G::Q_EPS));
      for (int d = 0; d < G::DIM; d++) {
        expected.push_back(all_queries.back()[d]), found.push_back(bf16_at(plain_at(queries, row, h * G::DIM + d, OUT, 2)));
        all_queries.back()[d] = rounded(all_queries.back()[d]);
      }
    }
  for (u32 row = rows; row < whole; row++) expected.push_back(1), found.push_back(untouched(plain_at(queries, row, 0, OUT, 2), OUT * 2));
  // Counts are larger than values: a value of the sum decides about the count alone.
  const double count = expected[size_t(position + rows) * KV * G::DIM * 2];
  require(count == found[size_t(position + rows) * KV * G::DIM * 2], "other rows of the cache are written");
  expected[size_t(position + rows) * KV * G::DIM * 2] = found[size_t(position + rows) * KV * G::DIM * 2] = 0;

  wave.x = queries, wave.out = out;
  // One share at a time: the chunks of all of them would not fit.
  for (u32 row = 0; row < whole; row += TILE_ROWS)
    for (u32 i = 0; i < TASKS; i++) {
      shares = {{row, TILE_ROWS, i, i + 1}};
      run<M, WaveAttend<M, G>>();
    }
  for (u32 row = 0; row < rows; row++) {
    const u32 own = position + row, seen = G::WINDOW && own + 1 > G::WINDOW ? own + 1 - G::WINDOW : 0;
    for (int h = 0; h < G::HEADS; h++) {
      const std::vector<double>& q = all_queries[row * G::HEADS + h];
      std::vector<double> sums(G::DIM);
      double all = 0;
      for (u32 of = seen; of <= own; of++) {
        double score = 0;
        for (int d = 0; d < G::DIM; d++) score += q[d] * all_keys[of * KV + h / G::GROUP][d];
        score *= G::SCALE;
        if (G::SOFTCAP > 0) score = G::SOFTCAP * std::tanh(score / G::SOFTCAP);
        const double weight = std::exp(score);
        all += weight;
        for (int d = 0; d < G::DIM; d++) sums[d] += weight * all_values[of * KV + h / G::GROUP][d];
      }
      for (int d = 0; d < G::DIM; d++) expected.push_back(sums[d] / all), found.push_back(bf16_at(operand_at<OUT>(out, row, h * G::DIM + d)));
    }
  }
  for (u32 row = rows; row < whole; row++)
    for (int col = 0; col < OUT; col += 2) expected.push_back(1), found.push_back(untouched(operand_at<OUT>(out, row, col), 4));
  report(name, expected, found);
}

int main() {
  // A row by one warp, by two, by four and by eight.
  rowwise<Rowwise<200, true, false, true, Norm::RMS>>("rows-embed", "rows-embed-bf16", 37);
  rowwise<Rowwise<256, false, true, true, Norm::RMS, Norm::RMS>>("rows-branch", "rows-branch-bf16", 130);
  rowwise<Rowwise<2304, false, true, true, Norm::LAYER, Norm::LAYER>>("rows-layer-2-warps", "rows-layer-2-warps-bf16", 11);
  rowwise<Rowwise<4104, true, false, true, Norm::LAYER>>("rows-embed-4-warps", "rows-embed-4-warps-bf16", 5);
  rowwise<Rowwise<8200, false, true, true, Norm::RMS, Norm::LAYER>>("rows-8-warps", "rows-8-warps-bf16", 3);
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
  // Codes: a chunk is a granule; of scales of groups, of rows, of both, with zero points; of k that ends within a granule.
  typedef Product<44, 200, Epilogue::RESIDUAL, 4, 8, true> Sum;
  typedef Product<92, 328, Epilogue::GATED, 16> Gate;
  typedef Product<130, 256, Epilogue::RESIDUAL, 12> Long;
  matmul<CodedAs<Sum, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-int8-rows", 37);
  matmul<CodedAs<Long, Code::INT8, 32, ScaleCode::F32, true, false>>("codes-int8-32-zeros", 130);
  matmul<CodedAs<Long, Code::E4M3, 0, ScaleCode::NONE, false, true>>("codes-e4m3-rows", 70);
  matmul<CodedAs<Sum, Code::E4M3, 64, ScaleCode::BF16, false, true>>("codes-e4m3-64-both", 5);
  matmul<CodedAs<Sum, Code::INT4, 128, ScaleCode::F16, false, false>>("codes-int4-128", 129);
  matmul<CodedAs<Long, Code::INT4, 64, ScaleCode::BF16, true, false>>("codes-int4-64-zeros", 37);
  matmul<CodedAs<Gate, Code::INT4, 32, ScaleCode::F16, true, false>>("codes-int4-32-gated-bf16", 100);
  matmul<CodedAs<Sum, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("codes-mxfp4", 64);
  matmul<CodedAs<Long, Code::E2M1, 64, ScaleCode::E4M3, false, true>>("codes-e2m1-both", 16);
  typedef Heads<4, 2, 2, 64, 64, false, HeadNorm::HEAD, 0, 1> Halves;
  const HeadNorm none = HeadNorm::NONE, head = HeadNorm::HEAD;
  // From the start, after a history that ends within a tile, and in rows of two blocks.
  for (const auto& at : {std::pair<u32, u32>{0, 37}, {61, 130}, {100, 1}}) attention<Tiled<Halves, 64, none, none>, 16, 6, 64>("attention-halves-bf16", at.first, at.second);
  attention<Capped<Tiled<Heads<4, 4, 4, 64, 0, false, HeadNorm::HEAD, 24, 1>, 32, head, head>>, 8, 16, 32>("attention-window-cap-bf16", 75, 70);
  attention<Tiled<Heads<3, 3, 3, 64, 64, true, HeadNorm::HEAD, 50, 1>, 16, head, none>, 4, 20, 32>("attention-pairs-3-bf16", 40, 40);
  attention<Tiled<Heads<6, 3, 3, 64, 64, false, HeadNorm::HEAD, 0, 1>, 64, none, none>, 16, 6, 64>("attention-3-bf16", 5, 70);
  attention<Tiled<Heads<6, 6, 2, 64, 0, false, HeadNorm::HEAD, 33, 1>, 32, head, none>, 8, 16, 32>("attention-2-of-6-bf16", 50, 20);
  attention<Tiled<Heads<8, 8, 8, 64, 64, false, HeadNorm::HEAD, 0, 1>, 32, none, head>, 8, 16, 32>("attention-8-bf16", 17, 33);
  attention<Tiled<Heads<2, 1, 1, 128, 128, false, HeadNorm::HEAD, 0, 1>, 64, head, head>, 32, 6, 64>("attention-128-bf16", 70, 140);
  attention<Tiled<Heads<2, 2, 2, 192, 192, true, HeadNorm::HEAD, 0, 1>, 16, none, none>, 12, 20, 16>("attention-192-bf16", 33, 20);
  attention<Tiled<Heads<4, 2, 2, 256, 256, false, HeadNorm::HEAD, 40, 1>, 32, head, head>, 32, 8, 32>("attention-256-bf16", 90, 35);
}
