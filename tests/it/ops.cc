// Runs ops of the kernels by one block of threads on a CPU over random inputs, and compares each with its formula in double precision.
// Packets and chunks are in memory before a task begins, so waits and signals are left out. Prints a line for each case: its name, and
// the largest difference divided by the largest expected value.

#include "block.h"
#include "runtime/queue.cuh"
#include "op_cases.h"
#include "op_packets.h"
#include "runtime/context.cuh"

// ---- in place of runtime/ring.cuh -----------------------------------------------------------------------------------

constexpr int RING_AT = 1 << 18, RING_SLOTS = 32;
// Chunks in the order of the stream.
static std::vector<std::vector<u8>> chunks;
template <class M>
static const u8* ring_take(Context<M>&, const RingCursor<M>& at) {
  // In shared memory, where `ldmatrix` may read them; more chunks than a task holds at once.
  const size_t index = at.use * M::SLOTS + at.slot;
  const std::vector<u8>& chunk = chunks.at(index);
  if (chunk.size() > M::SLOT_BYTES) std::abort();
  u8* slot = smem + RING_AT + index % RING_SLOTS * M::SLOT_BYTES;
  std::memcpy(slot, chunk.data(), chunk.size());
  return slot;
}
template <class M>
static void ring_take_pair(Context<M>& c, const RingCursor<M>& a, const RingCursor<M>& b, const u8*& first, const u8*& second) {
  first = ring_take(c, a);
  second = ring_take(c, b);
}
template <class M>
static void ring_release(Context<M>&, const RingCursor<M>&) {}
template <class M>
static void ring_release_pair(Context<M>&, const RingCursor<M>&, const RingCursor<M>&) {}

#include "runtime/stage.cuh"
#include "ops/matvec_formats.cuh"
#include "ops/matvec.cuh"
#include "ops/attention_records.cuh"
#include "ops/attention_tensor.cuh"
#include "ops/attention.cuh"
#include "ops/attention_merge.cuh"
#include "ops/mix.cuh"
#include "ops/convolve.cuh"
#include "ops/scan.cuh"
#include "ops/group_norm.cuh"
#include "ops/norm_add.cuh"
#include "ops/route.cuh"
#include "ops/combine.cuh"
#include "op_formulas.h"
#include "op_peers.h"
#include "op_recurrent.h"
#include "op_caches.h"
#include "op_codes.h"

// ---- a block and its memory -----------------------------------------------------------------------------------------

template <Elem WEIGHTS>
struct Machine {
  static constexpr int SMS = 1, WARPS = ::WARPS, SLOTS = 3, SLOT_BYTES = 1 << 14, REDUCE_BATCH = 2, STAMPS_MAX = 0;
  static constexpr int STAGE_AT = 0, REDUCE_AT = 1 << 16, HEADS_AT = 1 << 17, RESIDUAL_AT = HEADS_AT + (1 << 14);
  static constexpr int QUEUE_AT = RESIDUAL_AT + (1 << 14), STATE_AT = QUEUE_AT + 1024, SCRATCH_BYTES = 1 << 17;
  static constexpr u32 CONTEXT_MAX = 64;
  static constexpr Elem WEIGHT = WEIGHTS, CACHE = Elem::F32, WIRE = WEIGHTS;
  static constexpr Dot DOT = Dot::FMA;
  static constexpr bool TRACE = false;
};
// A machine with tensor cores.
struct Tensor : Machine<Elem::BF16> {
  static constexpr Dot DOT = Dot::MMA;
};
template <int UNITS>
struct Batches : Tensor {
  static constexpr int REDUCE_BATCH = UNITS;
};
// One of three devices.
template <class M>
struct Third : M {
  static constexpr int PEERS = 2;
  typedef DevicesParams Launch;
};
constexpr u32 TAG = 7;
static Params params;
static DevicesParams with_peers;
static Entry entry;
static std::vector<u64> exchange;
static std::vector<u8> cache;

template <class M>
static u32 packets(const std::vector<float>& values) {
  const size_t at = exchange.size(), per = Wire<M>::PER_PACKET, count = (values.size() + per - 1) / per;
  exchange.resize(at + (count + 1) / 2 * 2);
  for (size_t i = 0; i < exchange.size() - at; i++) {
    const auto value = [&](size_t n) { return n < values.size() ? values[n] : 0.f; };
    const u32 payload = per == 2 ? bf16_pair(value(2 * i), value(2 * i + 1)) : __float_as_uint(value(i));
    exchange[at + i] = u64(TAG) << 32 | payload;
  }
  return u32(at);
}
// Room for packets that a task publishes.
static u32 room(size_t count) {
  exchange.resize(exchange.size() + count);
  return u32(exchange.size() - count);
}
template <class M>
static float published(u32 at, size_t column) {
  const u64 packet = exchange.at(at + column / Wire<M>::PER_PACKET);
  if (packet >> 32 != TAG) return std::nanf("");
  return column % Wire<M>::PER_PACKET ? Wire<M>::hi(u32(packet)) : Wire<M>::lo(u32(packet));
}
template <class M>
static float* residual() { return reinterpret_cast<float*>(smem + M::RESIDUAL_AT); }

static void start() {
  exchange.clear();
  constants.clear();
  cache.clear();
  chunks.clear();
  std::memset(smem, 0xff, sizeof smem); // not a number, until a task writes it
  params = Params{};
  params.tag = TAG;
  entry = Entry{};
  entry.norm_bias = ~0u;
}
template <class M, class Op>
static void task(int thread) {
  Context<M> c{peers<M>() > 0 ? with_peers : params};
  c.tag = TAG;
  c.position = params.position;
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
    run_with_peers<M>(params, with_peers, exchange, [] { run_block(task<M, Op>); });
  else
    run_block(task<M, Op>);
}

// ---- matvec ---------------------------------------------------------------------------------------------------------

template <int ROWS_, int K_, Norm N, Epilogue E, int UNIT_ROWS_ = 8, int CHUNK_UNITS = 1, bool B = false>
struct Product {
  static constexpr int ROWS = ROWS_, K = K_, UNIT_ROWS = UNIT_ROWS_, UNITS = (ROWS + UNIT_ROWS - 1) / UNIT_ROWS;
  static constexpr int UNITS_PER_WARP = 1, POLL_BATCH = 1, PARTS = 1;
  static constexpr bool OWN_INPUT = false, BIAS = B, PUBLISH = true;
  static constexpr Norm NORM = N;
  static constexpr Epilogue EPILOGUE = E;
  static constexpr Act ACT = Act::SILU;
  static constexpr float EPS = 1e-5f, SCALE = E == Epilogue::GATED ? 1.f : 0.5f, SOFTCAP = E == Epilogue::LOGITS ? 3.f : 0.f;
  // Granules of a chunk: those of whole units; 0: half a unit or less.
  template <int GRANULES>
  static constexpr int chunk() { return CHUNK_UNITS ? CHUNK_UNITS * GRANULES : ::WARPS; }
};
// Two units at once.
template <class P>
struct Pairs : P {
  static constexpr int UNITS_PER_WARP = 2, POLL_BATCH = 2;
};
// The gate is multiplied first.
template <class P>
struct Factor : P {
  static constexpr float SCALE = 0.75f;
};
template <class M, class P>
struct Chunked : P {
  static constexpr int GRANULE_K = 8 / P::UNIT_ROWS * (64 / ElemOf<M::WEIGHT>::BYTES);
  static constexpr int GRANULES = (P::K + GRANULE_K - 1) / GRANULE_K;
  static constexpr int CHUNK = P::template chunk<GRANULES>();
};

template <class G>
constexpr bool IS_GATED = G::EPILOGUE == Epilogue::GATED || G::EPILOGUE == Epilogue::CLAMPED;

// The row of the matrix for a row of a unit; -1: none. In gated units, the first half of the rows is from the first half of the matrix.
template <class G>
static int row_of(int unit, int row) {
  if (!IS_GATED<G>) return unit * G::UNIT_ROWS + row < G::ROWS ? unit * G::UNIT_ROWS + row : -1;
  return unit * 4 + row % 4 < G::ROWS / 2 ? row / 4 * (G::ROWS / 2) + unit * 4 + row % 4 : -1;
}

// The expected output of the epilogue for `y` (ROWS), and the output of the task; for a residual the sum and the published value.
template <class M, class G>
static void outcome(const std::vector<double>& y, const std::vector<float>& before, const std::vector<float>& logits,
                    std::vector<double>& expected, std::vector<double>& found) {
  const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  int best = 0;
  for (int r = 0; r < (IS_GATED<G> ? G::ROWS / 2 : G::ROWS); r++) {
    double value = y[r];
    if (G::EPILOGUE == Epilogue::ACT) value = silu(y[r]);
    if (G::EPILOGUE == Epilogue::GATED) value = silu(G::SCALE * y[r]) * y[G::ROWS / 2 + r];
    if constexpr (G::EPILOGUE == Epilogue::CLAMPED) {
      const double gate = std::fmin(y[r], G::LIMIT), up = std::fmax(std::fmin(y[G::ROWS / 2 + r], G::LIMIT), -G::LIMIT);
      value = (up + 1) * gate / (1 + std::exp(-G::ALPHA * gate));
    }
    if (G::EPILOGUE == Epilogue::RESIDUAL) value = before[r] + G::SCALE * y[r];
    if (G::EPILOGUE == Epilogue::LOGITS) value = G::SOFTCAP * std::tanh(G::SCALE * y[r] / G::SOFTCAP);
    expected.push_back(value);
    if (value > expected[best]) best = r;
    const bool scores = G::EPILOGUE == Epilogue::SCORES;
    found.push_back(G::EPILOGUE == Epilogue::LOGITS ? logits[r] : scores ? published<Machine<Elem::F32>>(entry.out, r) : published<M>(entry.out, r));
  }
  // Readers poll pairs, so an odd number of scores is followed by a packet of padding.
  if (G::EPILOGUE == Epilogue::SCORES && G::ROWS % 2)
    expected.push_back(0), found.push_back(published<Machine<Elem::F32>>(entry.out, G::ROWS));
  if (G::EPILOGUE == Epilogue::RESIDUAL)
    for (int r = 0; r < G::ROWS; r++) expected.push_back(expected[r]), found.push_back(residual<M>()[r]);
  if (G::EPILOGUE == Epilogue::LOGITS) {
    // The arg-max pair: the best logit, then its row.
    const u64* pair = exchange.data() + entry.aux + (TAG & 1) * 2;
    expected.push_back(expected[best]), found.push_back(__uint_as_float(u32(pair[0])));
    expected.push_back(best), found.push_back(u32(pair[1]));
  }
}

#include "op_experts.h"
// A choice, and the part that it names. Seeds have each part once, the last by a choice beyond all parts.
template <class G>
static int choose(u64 seed) {
  if constexpr (parts_of<G>(nullptr) > 0) {
    entry.choice = chosen_packet(seed < 3 ? u32(seed) % 3 : 9);
    return seed < 3 ? int(seed) % 3 : 2;
  }
  return 0;
}
// A number for each row of the matrix, as units have them; of all parts, if there are some.
template <class G>
static u32 of_rows(u64& state, const std::vector<float>& rows, int part) {
  std::vector<float> units(G::UNITS * G::UNIT_ROWS, 0.f);
  for (int i = 0; i < int(units.size()); i++) {
    const int row = row_of<G>(i / G::UNIT_ROWS, i % G::UNIT_ROWS);
    if (row >= 0) units[i] = rows[row];
  }
  return constant(parts_of<G>(nullptr) > 0 ? among_parts(state, units, part) : units);
}

// The granules of W (ROWS, K) in the layout of the pack, cut into chunks.
template <class M, class G>
static void stream(const std::vector<float>& w) {
  constexpr int PART_K = 64 / ElemOf<M::WEIGHT>::BYTES, PARTS = 8 / G::UNIT_ROWS;
  typedef typename ElemOf<M::WEIGHT>::type W;
  std::vector<u8> unit_bytes;
  for (int unit = 0; unit < G::UNITS; unit++) {
    for (int j = 0; j < G::GRANULES; j++) {
      if (j % G::CHUNK == 0 && (G::CHUNK < G::GRANULES || unit % (G::CHUNK / G::GRANULES) == 0)) chunks.emplace_back();
      for (int part = 0; part < PARTS; part++)
        for (int row = 0; row < G::UNIT_ROWS; row++)
          for (int i = 0; i < PART_K; i++) {
            const int k = (j * PARTS + part) * PART_K + i;
            const int from = row_of<G>(unit, row);
            W value;
            narrow(from >= 0 && k < G::K ? w[size_t(from) * G::K + k] : 0.f, &value);
            const u8* bytes = reinterpret_cast<const u8*>(&value);
            chunks.back().insert(chunks.back().end(), bytes, bytes + sizeof value);
          }
    }
  }
}

template <class M, class P>
static void matvec(const char* name) {
  typedef Chunked<M, P> G;
  for (u64 seed = 1; seed <= 3; seed++) {
    u64 state = seed * 77;
    start();
    const std::vector<float> w = numbers(state, size_t(G::ROWS) * G::K), x = numbers(state, G::K);
    const std::vector<float> weight = numbers(state, G::K), norm_bias = numbers(state, G::K), bias = numbers(state, G::ROWS + 8);
    const std::vector<float> before = numbers(state, G::ROWS + 8);
    stream<M, G>(w);
    entry.lo = 0, entry.hi = G::UNITS;
    entry.x = packets<M>(x);
    entry.norm_weight = constant(weight);
    if (G::NORM == Norm::LAYER) entry.norm_bias = constant(norm_bias);
    const int part = choose<G>(seed);
    if (G::BIAS) entry.bias = of_rows<G>(state, bias, part);
    entry.out = room(G::ROWS + 2), entry.aux = room(8);
    const float share = is_weighed<G>(nullptr) ? 0.375f : 1.f;
    if (is_weighed<G>(nullptr)) exchange.at(entry.aux) = u64(TAG) << 32 | __float_as_uint(share);
    std::memcpy(residual<M>(), before.data(), before.size() * 4);
    std::vector<float> logits(G::ROWS);
    params.logits = logits.data();
    run<M, MatVec<M, G>>();

    const std::vector<double> input = normalised(G::NORM, x, weight, norm_bias, G::EPS);
    std::vector<double> y(G::ROWS), expected, found;
    for (int r = 0; r < G::ROWS; r++) {
      y[r] = G::BIAS ? bias[r] : 0.;
      for (int k = 0; k < G::K; k++) y[r] += double(w[size_t(r) * G::K + k]) * input[k];
    }
    outcome<M, G>(y, before, logits, expected, found);
    if (is_weighed<G>(nullptr))
      for (double& value : expected) value *= share;
    report(name, expected, found);
  }
}

#include "op_drafts.h"

// ---- matvec over codes ----------------------------------------------------------------------------------------------

template <class P, Code C, int GROUP, ScaleCode S, bool Z, bool R>
struct Coded : CodedAs<P, C, GROUP, S, Z, R> {
  static constexpr int CHUNK = P::template chunk<CodedAs<P, C, GROUP, S, Z, R>::GRANULES>();
};

template <class P, Code C, int GROUP, ScaleCode S>
struct Least : LeastAs<P, C, GROUP, S> {
  static constexpr int CHUNK = P::template chunk<LeastAs<P, C, GROUP, S>::GRANULES>();
};

template <class M, class G>
static void matvec_codes(const char* name) {
  constexpr bool LOGITS = G::EPILOGUE == Epilogue::LOGITS;
  for (u64 seed = 1; seed <= 3; seed++) {
    u64 state = seed * 991;
    start();
    std::vector<float> x = numbers(state, G::K);
    const std::vector<float> weight = numbers(state, G::K), before = numbers(state, G::ROWS + 8);
    // Values beyond the range of fp16. Not for logits, which are capped and would all be equal.
    if (seed == 1 && !LOGITS)
      for (int k = 3; k < G::K; k += 50) x[k] *= 0x1p20f;
    std::vector<float> scales(G::ROWS); // of rows of the matrix
    for (float& scale : scales) scale = number(state) * (LOGITS ? 0x1p-9f : 1.f);
    std::vector<double> w(size_t(G::ROWS) * G::K);
    for (int unit = 0; unit < G::UNITS; unit++) {
      int rows[8];
      for (int row = 0; row < 8; row++) rows[row] = row_of<G>(unit, row);
      for (int j = 0; j < G::GRANULES; j++) {
        if (j % G::CHUNK == 0 && (G::CHUNK < G::GRANULES || unit % (G::CHUNK / G::GRANULES) == 0)) chunks.emplace_back();
        const std::vector<u8> granule = random_granule<G>(state, j, rows, w);
        chunks.back().insert(chunks.back().end(), granule.begin(), granule.end());
      }
    }
    entry.lo = 0, entry.hi = G::UNITS;
    entry.x = packets<M>(x);
    entry.norm_weight = constant(weight);
    const std::vector<float> norm_bias = numbers(state, G::K);
    if (G::NORM == Norm::LAYER) entry.norm_bias = constant(norm_bias);
    const int part = choose<G>(seed);
    entry.row_scales = of_rows<G>(state, scales, part);
    const std::vector<float> bias = numbers(state, G::ROWS);
    if (G::BIAS) entry.bias = of_rows<G>(state, bias, part);
    entry.out = room(G::ROWS + 2), entry.aux = room(8);
    std::memcpy(residual<M>(), before.data(), before.size() * 4);
    std::vector<float> logits(G::ROWS);
    params.logits = logits.data();
    run<M, MatVec<M, G>>();

    const std::vector<double> input = normalised(G::NORM, x, weight, norm_bias, G::EPS);
    std::vector<double> y(G::ROWS), expected, found;
    for (int r = 0; r < G::ROWS; r++) {
      for (int k = 0; k < G::K; k++) y[r] += w[size_t(r) * G::K + k] * input[k];
      if (G::ROW_SCALES) y[r] *= scales[r];
      if (G::BIAS) y[r] += bias[r];
    }
    outcome<M, G>(y, before, logits, expected, found);
    // The published value is rounded to bf16, the sum is not.
    if (G::EPILOGUE == Epilogue::RESIDUAL) expected.erase(expected.begin(), expected.begin() + G::ROWS), found.erase(found.begin(), found.begin() + G::ROWS);
    report(name, expected, found);
  }
}

// ---- norm_add -------------------------------------------------------------------------------------------------------

template <int WIDTH_, bool R>
struct Sum {
  static constexpr int WIDTH = WIDTH_;
  static constexpr float EPS = 1e-6f, SCALE = 0.25f;
  static constexpr bool REPLICATED = R;
};
template <class M, class G>
static void norm_add(const char* name) {
  for (u64 seed = 1; seed <= 3; seed++) {
    u64 state = seed * 1234;
    start();
    const std::vector<float> y = numbers(state, G::WIDTH), weight = numbers(state, G::WIDTH), before = numbers(state, G::WIDTH);
    // An owner of a part has units of eight columns, the last of which may be cut off.
    const int first = G::REPLICATED ? 0 : 8, units = (G::WIDTH + 7) / 8;
    entry.lo = first / 8, entry.hi = units;
    entry.x = packets<M>(y);
    entry.norm_weight = constant(weight);
    entry.out = room(G::WIDTH + 2);
    std::memcpy(residual<M>(), before.data() + first, (G::WIDTH - first) * 4);
    run<M, NormAdd<M, G>>();
    const std::vector<double> sum = normalised(Norm::RMS, y, weight, {}, G::EPS);
    std::vector<double> expected, found;
    for (int i = first; i < G::WIDTH; i++) {
      expected.push_back(before[i] + G::SCALE * sum[i]), found.push_back(residual<M>()[i - first]);
      if (!G::REPLICATED) expected.push_back(expected.back()), found.push_back(published<M>(entry.out, i));
    }
    report(name, expected, found);
  }
}

// ---- attention ------------------------------------------------------------------------------------------------------

template <class M, class G>
static void attention(const char* name) {
  constexpr int KV = G::HEADS / G::GROUP, TASKS = G::HEADS / G::HEADS_PER_TASK;
  for (u32 position : {0u, 1u, 15u, 40u, 63u}) {
    u64 state = position * 31 + 5;
    start();
    const std::vector<float> qkv = numbers(state, QKV_COLS<G>);
    const std::vector<float> q_weight = numbers(state, G::HEADS * G::DIM), k_weight = numbers(state, KV * G::DIM);
    const std::vector<float> table = numbers(state, (position + 1) * G::ROTARY + 1);
    const std::vector<float> keys = numbers(state, KV * 64 * G::DIM), values = numbers(state, KV * 64 * G::DIM);
    const std::vector<float> scales = scales_of<M>(KV);
    const std::vector<float> sinks = SINKS_OF<G> ? numbers(state, G::HEADS) : std::vector<float>();
    params.position = position;
    entry.x = packets<M>(qkv);
    entry.q_norm = constant(q_weight), entry.k_norm = constant(k_weight), entry.rope = constant(table);
    entry.cache_scales = constant(scales);
    if constexpr (SINKS_OF<G>) entry.sinks = constant(sinks);
    const u32 qkv_at = entry.x;
    const u32 out = room(size_t(G::HEADS) * G::SPLITS * (G::DIM + 2) + 2), merged = room(G::HEADS * G::DIM + 2);
    entry.out = out;
    // Two caches, of keys and values, one after the other.
    constexpr u32 ROW = G::PITCH * ElemOf<M::CACHE>::BYTES;
    const size_t cache_bytes = (KV * 64 * ROW + OFFSET_BYTES - 1) / OFFSET_BYTES * OFFSET_BYTES;
    cache.assign(2 * cache_bytes, 0xff);
    entry.k_cache = 0, entry.v_cache = u32(cache_bytes / OFFSET_BYTES);
    const auto row_of = [&](int kind, int kv, u32 row) { return cache.data() + kind * cache_bytes + (kv * 64 + row) * ROW; };
    for (int kv = 0; kv < KV; kv++)
      for (u32 row = 0; row < position; row++)
        for (int d = 0; d < G::DIM; d++) {
          keep<M, G>(keys[(kv * 64 + row) * G::DIM + d], scales[2 * kv], row_of(0, kv, row), row, d);
          keep<M, G>(values[(kv * 64 + row) * G::DIM + d], scales[2 * kv + 1], row_of(1, kv, row), row, d);
        }
    for (int i = 0; i < TASKS; i++)
      for (int j = 0; j < G::SPLITS; j++) {
        u32 begin, end;
        history_share(position, G::WINDOW, G::SPLITS, j, begin, end);
        const int kv = i * G::HEADS_PER_TASK / G::GROUP;
        chunks.clear();
        for (u32 row = begin; row < end; row += G::CHUNK_ROWS)
          for (int kind = 0; kind < 2; kind++) {
            // Memory after the last row is NaN.
            chunks.emplace_back(G::CHUNK_ROWS * ROW, 0xff);
            std::memcpy(chunks.back().data(), row_of(kind, kv, row), min(end - row, u32(G::CHUNK_ROWS)) * ROW);
          }
        entry.lo = i, entry.j = j;
        run<M, Attention<M, typename SplitOf<G>::type>>();
      }
    if constexpr (G::SPLITS > 1) {
      entry.x = out, entry.out = merged, entry.gate = qkv_at;
      for (int h = 0; h < G::HEADS; h++) {
        entry.lo = h;
        run<M, AttentionMerge<M, G>>();
      }
    }
    std::vector<double> expected, found;
    const std::vector<float> angles(table.begin() + position * G::ROTARY, table.end());
    const int k_at = G::HEADS * G::DIM, v_at = k_at + KV * G::DIM;
    const u32 first = G::WINDOW && position + 1 > G::WINDOW ? position + 1 - G::WINDOW : 0;
    for (int h = 0; h < G::HEADS; h++) {
      const int kv = h / G::GROUP;
      std::vector<double> q = prepared<G>(qkv, 0, 0, G::HEADS, h, q_weight, angles, G::Q_EPS);
      for (double& x : q) x *= expected_query_factor<G>(position);
      const std::vector<double> k = prepared<G>(qkv, k_at, k_at, KV, kv, k_weight, angles, G::K_EPS);
      // softmax(scale * q K^T) V over the rows of the window and the current position.
      std::vector<double> sums(G::DIM), scores;
      double all = SINKS_OF<G> ? std::exp(double(sinks[h])) : 0.;
      for (u32 row = first; row <= position; row++) {
        double score = 0;
        for (int d = 0; d < G::DIM; d++) score += q[d] * kept<M>(row == position ? k[d] : keys[(kv * 64 + row) * G::DIM + d], scales[2 * kv]);
        score *= G::SCALE;
        if (G::SOFTCAP > 0) score = G::SOFTCAP * std::tanh(score / G::SOFTCAP);
        const double weight = std::exp(score);
        all += weight;
        for (int d = 0; d < G::DIM; d++)
          sums[d] += weight * kept<M>(row == position ? qkv[v_at + kv * G::DIM + d] : values[(kv * 64 + row) * G::DIM + d], scales[2 * kv + 1]);
      }
      for (int d = 0; d < G::DIM; d++) {
        expected.push_back(sums[d] / all * expected_gate<G>(qkv, h, d));
        found.push_back(published<M>(G::SPLITS > 1 ? merged : out, h * G::DIM + d));
      }
      // The row that the step appended, by one of the tasks of the group.
      for (int d = 0; d < G::DIM; d++) {
        expected.push_back(kept<M>(k[d], scales[2 * kv])), found.push_back(found_in<M, G>(scales[2 * kv], row_of(0, kv, position), position, d));
        expected.push_back(kept<M>(qkv[v_at + kv * G::DIM + d], scales[2 * kv + 1]));
        found.push_back(found_in<M, G>(scales[2 * kv + 1], row_of(1, kv, position), position, d));
      }
    }
    report(name, expected, found);
  }
}

// ---- mix ------------------------------------------------------------------------------------------------------------

template <int KEY_HEADS_, int VALUE_HEADS_, int KEY_DIM_, int VALUE_DIM_, int KERNEL_, bool D>
struct Net {
  static constexpr int KEY_HEADS = KEY_HEADS_, VALUE_HEADS = VALUE_HEADS_, KEY_DIM = KEY_DIM_, VALUE_DIM = VALUE_DIM_, KERNEL = KERNEL_;
  static constexpr int CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM; // columns of q, k and v
  static constexpr int BETA_AT = CHANNELS + VALUE_HEADS * VALUE_DIM, DECAY_AT = BETA_AT + VALUE_HEADS;
  static constexpr float EPS = 1e-6f;
  static constexpr bool DOUBLES = D;
};
static double expected_silu(double x) { return x / (1 + std::exp(-x)); }
// Seven positions of one text, the first with a state that is not a number.
template <class M, class G>
static void mix(const char* name) {
  constexpr int KD = G::KEY_DIM, VD = G::VALUE_DIM, PAST = G::KERNEL - 1, OWN = 2 * KD + VD, STATE_COLS = KD * VD + PAST * OWN;
  u64 seed = 77;
  const std::vector<float> taps = numbers(seed, G::CHANNELS * G::KERNEL), a_log = numbers(seed, G::VALUE_HEADS);
  const std::vector<float> bias = numbers(seed, G::VALUE_HEADS), gains = numbers(seed, VD);
  std::vector<u8> kept(G::VALUE_HEADS * STATE_COLS * 4, 0xff);
  std::vector<double> expected_state(G::VALUE_HEADS * KD * VD);
  std::vector<std::vector<float>> inputs;
  for (u32 position = 0; position < 7; position++) {
    start();
    inputs.push_back(numbers(seed, G::DECAY_AT + G::VALUE_HEADS));
    const std::vector<float>& x = inputs.back();
    params.position = position;
    entry.x = entry.beta = packets<M>(x);
    entry.conv = constant(taps), entry.a_log = constant(a_log), entry.dt_bias = constant(bias), entry.norm_weight = constant(gains);
    entry.out = room(G::VALUE_HEADS * VD + 2);
    cache = kept;
    for (int h = 0; h < G::VALUE_HEADS; h++) {
      entry.lo = h;
      run<M, Mix<M, G>>();
    }
    kept = cache;
    std::vector<double> expected, found;
    for (int h = 0; h < G::VALUE_HEADS; h++) {
      const float* state = reinterpret_cast<const float*>(kept.data()) + h * STATE_COLS;
      const int key = h / (G::VALUE_HEADS / G::KEY_HEADS) * KD;
      const auto convolved = [&](int channel) {
        double sum = 0;
        for (int t = 0; t < G::KERNEL; t++) {
          const int at = int(position) + t - PAST;
          if (at >= 0) sum += double(inputs[at][channel]) * taps[channel * G::KERNEL + t];
        }
        return expected_silu(sum);
      };
      const auto unit = [&](int from) {
        std::vector<double> y(KD);
        double squares = 0;
        for (int d = 0; d < KD; d++) y[d] = convolved(from + d), squares += y[d] * y[d];
        for (double& v : y) v /= std::sqrt(squares + 1e-6);
        return y;
      };
      const std::vector<double> q = unit(key), k = unit(G::KEY_HEADS * KD + key);
      const double beta = (G::DOUBLES ? 2 : 1) / (1 + std::exp(-double(x[G::BETA_AT + h])));
      const double decay = std::exp(-std::exp(double(a_log[h])) * std::log1p(std::exp(double(x[G::DECAY_AT + h]) + bias[h])));
      std::vector<double> y(VD);
      double squares = 0;
      for (int d = 0; d < VD; d++) {
        double* column = &expected_state[h * KD * VD + d];
        double remembered = 0;
        for (int r = 0; r < KD; r++) column[r * VD] *= decay, remembered += column[r * VD] * k[r];
        const double delta = beta * (convolved(2 * G::KEY_HEADS * KD + h * VD + d) - remembered);
        for (int r = 0; r < KD; r++) column[r * VD] += k[r] * delta, y[d] += column[r * VD] * q[r] / std::sqrt(double(KD));
        squares += y[d] * y[d] / VD;
        for (int r = 0; r < KD; r++) expected.push_back(column[r * VD]), found.push_back(state[r * VD + d]);
      }
      for (int d = 0; d < VD; d++) {
        expected.push_back(y[d] / std::sqrt(squares + G::EPS) * gains[d] * expected_silu(x[G::CHANNELS + h * VD + d]));
        found.push_back(published<M>(entry.out, h * VD + d));
      }
    }
    report(name, expected, found);
  }
}

// ---- convolve, scan, group_norm -------------------------------------------------------------------------------------

// Seven positions of one text, the first with a state that is not a number. `each`: launch indices of a task.
template <class M, class Op, class Text>
static void recurrent(const char* name, int each = 1) {
  u64 seed = 99;
  Text text(seed);
  std::vector<u8> kept(Text::STATE * 4, 0xff);
  for (u32 position = 0; position < 7; position++) {
    start();
    const std::vector<float> x = numbers(seed, Text::COLS);
    params.position = position;
    entry.x = packets<M>(x);
    text.constants_of(entry);
    entry.out = room(Text::OUT + 2);
    cache = kept;
    for (int index = 0; index < Text::INDICES; index += each) {
      entry.lo = index, entry.hi = min(index + each, Text::INDICES);
      run<M, Op>();
    }
    kept = cache;
    std::vector<double> expected = text.step(x), found;
    for (int i = 0; i < Text::OUT; i++) found.push_back(published<M>(entry.out, i));
    const std::vector<double> state = text.state();
    expected.insert(expected.end(), state.begin(), state.end());
    for (int i = 0; i < Text::STATE; i++) found.push_back(reinterpret_cast<const float*>(kept.data())[i]);
    report(name, expected, found);
  }
}
template <class M, class G>
static void convolve(const char* name, int each) { recurrent<M, Convolve<M, G>, ConvolveText<G>>(name, each); }
template <class M, class G>
static void scan(const char* name) { recurrent<M, Scan<M, G>, ScanText<G>>(name); }
template <class M, class G>
static void group_norm(const char* name) {
  for (u64 seed = 1; seed <= 2; seed++) {
    u64 state = seed;
    start();
    const std::vector<float> x = numbers(state, G::WIDTH), gate = numbers(state, G::GATE_COLS), gains = numbers(state, G::WIDTH);
    entry.x = packets<M>(x), entry.gate = packets<M>(gate), entry.norm_weight = constant(gains), entry.out = room(G::WIDTH + 2);
    for (int group = 0; group < G::GROUPS; group++) {
      entry.lo = group, entry.hi = group + 1;
      run<M, GroupNorm<M, G>>();
    }
    std::vector<double> found;
    for (int i = 0; i < G::WIDTH; i++) found.push_back(published<M>(entry.out, i));
    report(name, expected_groups<G>(x, gate, gains), found);
  }
}

int main() {
  typedef Machine<Elem::F32> F;
  typedef Machine<Elem::BF16> B;
  matvec<F, Product<24, 96, Norm::NONE, Epilogue::STORE, 8, 1, true>>("matvec-store-bias");
  matvec<F, Product<40, 70, Norm::RMS, Epilogue::STORE, 8, 2>>("matvec-rms-ragged");
  matvec<F, Pairs<Product<40, 96, Norm::RMS, Epilogue::STORE, 8, 1>>>("matvec-two-at-once");
  matvec<F, Product<21, 128, Norm::LAYER, Epilogue::ACT, 8, 1>>("matvec-layer-act");
  matvec<F, Product<36, 64, Norm::RMS, Epilogue::GATED, 8, 1>>("matvec-gated");
  matvec<F, Factor<Product<36, 64, Norm::RMS, Epilogue::GATED, 8, 1>>>("matvec-gated-by");
  matvec<F, Product<16, 200, Norm::NONE, Epilogue::RESIDUAL, 8, 0>>("matvec-residual-chunks");
  matvec<F, Product<37, 64, Norm::RMS, Epilogue::LOGITS, 8, 1>>("matvec-logits");
  head_in_text<F, Product<37, 64, Norm::RMS, Epilogue::LOGITS, 8, 1>>("head-in-text");
  join<F>("join");
  join<B>("join-bf16");
  matvec<Third<F>, Product<21, 96, Norm::RMS, Epilogue::STORE, 8, 1>>("matvec-three-devices");
  matvec<Third<Tensor>, Product<36, 104, Norm::NONE, Epilogue::GATED, 8, 1>>("matvec-three-devices-gated-bf16");
  matvec<Third<F>, Product<37, 64, Norm::RMS, Epilogue::LOGITS, 8, 1>>("matvec-three-devices-logits");
  matvec<F, Product<12, 128, Norm::NONE, Epilogue::STORE, 4, 1>>("matvec-units-of-4");
  matvec<F, Product<10, 128, Norm::RMS, Epilogue::STORE, 2, 2>>("matvec-units-of-2");
  matvec<B, Product<24, 160, Norm::RMS, Epilogue::STORE, 8, 1, true>>("matvec-bf16");
  matvec<Tensor, Product<24, 160, Norm::RMS, Epilogue::STORE, 8, 1, true>>("matvec-tensor-bf16");
  matvec<Tensor, Product<36, 104, Norm::NONE, Epilogue::GATED, 8, 1>>("matvec-tensor-gated-bf16");
  matvec<Tensor, Product<12, 128, Norm::LAYER, Epilogue::ACT, 4, 1>>("matvec-tensor-units-of-4-bf16");
  matvec<Tensor, Product<16, 1000, Norm::NONE, Epilogue::RESIDUAL, 8, 0>>("matvec-tensor-chunks-bf16");
  typedef Product<21, 200, Norm::RMS, Epilogue::RESIDUAL, 8, 1> Ragged;
  typedef Product<16, 1000, Norm::NONE, Epilogue::RESIDUAL, 8, 0> Long; // units of several chunks
  matvec_codes<F, Coded<Ragged, Code::INT8, 0, ScaleCode::NONE, false, true>>("codes-int8-rows");
  matvec_codes<B, Coded<Pairs<Ragged>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("codes-e4m3-rows");
  matvec_codes<F, Coded<Long, Code::E4M3, 128, ScaleCode::F32, false, false>>("codes-e4m3-blocks");
  matvec_codes<F, Coded<Ragged, Code::INT8, 64, ScaleCode::F16, true, false>>("codes-int8-zeros");
  matvec_codes<B, Coded<Ragged, Code::INT4, 128, ScaleCode::F16, false, false>>("codes-int4-128");
  matvec_codes<B, Coded<Pairs<Ragged>, Code::INT4, 64, ScaleCode::BF16, true, false>>("codes-int4-64-zeros");
  matvec_codes<B, Coded<Long, Code::INT4, 32, ScaleCode::F16, true, false>>("codes-int4-32-zeros");
  matvec_codes<B, Least<Ragged, Code::INT4, 32, ScaleCode::F16>>("codes-int4-32-minima");
  matvec_codes<F, Least<Long, Code::INT8, 32, ScaleCode::F32>>("codes-int8-32-minima");
  matvec_codes<B, Least<Ragged, Code::INT4, 32, ScaleCode::F16X6>>("codes-int4-32-six-bits");
  matvec_codes<F, Least<Long, Code::INT8, 32, ScaleCode::F16X6>>("codes-int8-32-six-bits");
  matvec_codes<B, Coded<Ragged, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("codes-mxfp4");
  matvec_codes<B, Coded<Ragged, Code::E2M1, 32, ScaleCode::E4M3, false, true>>("codes-e2m1-both");
  // On tensor cores x is staged as bf16, so it is exact without a norm.
  typedef Tensor T;
  typedef Product<21, 200, Norm::NONE, Epilogue::RESIDUAL, 8, 1> Exact;
  matvec_codes<T, Coded<Ragged, Code::INT8, 0, ScaleCode::NONE, false, true>>("tensor-int8-rms-bf16");
  matvec_codes<T, Coded<Ragged, Code::INT4, 32, ScaleCode::F16, false, false>>("tensor-int4-rms-bf16");
  matvec_codes<T, Coded<Pairs<Exact>, Code::INT8, 0, ScaleCode::NONE, false, true>>("tensor-int8-rows");
  matvec_codes<T, Coded<Exact, Code::INT8, 64, ScaleCode::F16, true, false>>("tensor-int8-zeros");
  matvec_codes<T, Coded<Long, Code::INT8, 32, ScaleCode::F32, false, false>>("tensor-int8-32");
  matvec_codes<T, Coded<Pairs<Exact>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("tensor-e4m3-rows");
  matvec_codes<T, Coded<Long, Code::E4M3, 128, ScaleCode::F32, false, false>>("tensor-e4m3-blocks");
  matvec_codes<T, Coded<Exact, Code::E4M3, 32, ScaleCode::BF16, false, true>>("tensor-e4m3-32");
  matvec_codes<T, Coded<Exact, Code::INT4, 128, ScaleCode::F16, false, false>>("tensor-int4-128");
  matvec_codes<T, Coded<Pairs<Exact>, Code::INT4, 64, ScaleCode::BF16, true, false>>("tensor-int4-64-zeros");
  matvec_codes<T, Coded<Long, Code::INT4, 32, ScaleCode::F16, true, false>>("tensor-int4-32-zeros");
  matvec_codes<T, Least<Pairs<Exact>, Code::INT4, 32, ScaleCode::F16>>("tensor-int4-32-minima");
  matvec_codes<T, Least<Long, Code::INT4, 32, ScaleCode::F32>>("tensor-int4-32-wide-minima");
  matvec_codes<T, Least<Exact, Code::INT8, 32, ScaleCode::F32>>("tensor-int8-32-minima");
  matvec_codes<T, Least<Pairs<Exact>, Code::INT4, 32, ScaleCode::F16X6>>("tensor-int4-32-six-bits");
  matvec_codes<T, Least<Long, Code::INT4, 32, ScaleCode::F16X6>>("tensor-int4-32-long-six-bits");
  matvec_codes<T, Least<Exact, Code::INT8, 32, ScaleCode::F16X6>>("tensor-int8-32-six-bits");
  matvec_codes<T, Coded<Pairs<Exact>, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("tensor-mxfp4");
  matvec_codes<T, Coded<Exact, Code::E2M1, 64, ScaleCode::E4M3, false, true>>("tensor-e2m1-both");
  // Tasks of a single pass, whose operands are made before the input arrives.
  typedef Pairs<Product<16, 200, Norm::NONE, Epilogue::RESIDUAL, 8, 1>> Single;
  matvec_codes<T, Coded<Single, Code::INT8, 0, ScaleCode::NONE, false, true>>("tensor-int8-ahead");
  matvec_codes<T, Coded<Single, Code::INT4, 32, ScaleCode::F16, true, false>>("tensor-int4-ahead");
  matvec_codes<T, Least<Single, Code::INT4, 32, ScaleCode::F32>>("tensor-int4-ahead-minima");
  matvec_codes<T, Least<Single, Code::INT4, 32, ScaleCode::F16X6>>("tensor-int4-ahead-six-bits");
  // The other epilogues and inputs of a task.
  matvec_codes<T, Coded<Product<36, 200, Norm::NONE, Epilogue::GATED, 8, 1>, Code::INT8, 0, ScaleCode::NONE, false, true>>("tensor-int8-gated-bf16");
  matvec_codes<T, Coded<Product<21, 200, Norm::LAYER, Epilogue::RESIDUAL, 8, 1>, Code::INT4, 64, ScaleCode::F16, true, false>>("tensor-int4-layer-bf16");
  matvec_codes<T, Coded<Product<45, 200, Norm::NONE, Epilogue::LOGITS, 8, 1>, Code::INT8, 0, ScaleCode::NONE, false, true>>("tensor-int8-logits");
  // Whole chunks at once, of which the last one is shorter.
  matvec_codes<T, Coded<Pairs<Product<37, 200, Norm::NONE, Epilogue::RESIDUAL, 8, 2>>, Code::E2M1, 32, ScaleCode::F16, false, false>>("tensor-e2m1-whole-chunks");
  // A warp finishes more than one unit of a batch, then more than it can at once; 40 units are more than a batch.
  typedef Product<317, 256, Norm::NONE, Epilogue::RESIDUAL, 8, 1> Many;
  matvec_codes<Batches<16>, Coded<Pairs<Many>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("tensor-e4m3-batches");
  matvec_codes<Batches<32>, Coded<Pairs<Many>, Code::INT8, 0, ScaleCode::NONE, false, true>>("tensor-int8-batches");
  matvec_codes<Batches<16>, Coded<Product<317, 256, Norm::NONE, Epilogue::LOGITS, 8, 2>, Code::E2M1, 32, ScaleCode::E4M3, false, true>>("tensor-e2m1-logits");
  // Scores, chosen parts, and the SwiGLU of gpt-oss.
  matvec<F, Product<15, 96, Norm::RMS, Epilogue::SCORES, 8, 1, true>>("scores");
  matvec<B, Product<33, 160, Norm::RMS, Epilogue::SCORES, 8, 1>>("scores-bf16");
  matvec<T, Product<9, 128, Norm::NONE, Epilogue::SCORES, 8, 1>>("scores-tensor");
  matvec<T, Product<13, 128, Norm::NONE, Epilogue::SCORES, 4, 1>>("scores-tensor-units-of-4");
  matvec<F, Clamped<Product<36, 64, Norm::RMS, Epilogue::CLAMPED, 8, 1, true>>>("matvec-clamped");
  matvec<T, Clamped<Product<40, 104, Norm::NONE, Epilogue::CLAMPED, 8, 1, true>>>("matvec-tensor-clamped-bf16");
  matvec<F, Chosen<Product<24, 96, Norm::NONE, Epilogue::STORE, 8, 1, true>>>("chosen");
  matvec<T, Chosen<Product<24, 96, Norm::NONE, Epilogue::STORE, 8, 1, true>, true>>("chosen-tensor-bf16");
  matvec<F, Chosen<Product<16, 128, Norm::RMS, Epilogue::ACT, 4, 1, true>>>("chosen-units-of-4");
  matvec<B, Chosen<Product<20, 64, Norm::RMS, Epilogue::GATED, 8, 1, true>, true>>("chosen-ragged-gated-bf16");
  matvec<T, Clamped<Chosen<Product<40, 104, Norm::NONE, Epilogue::CLAMPED, 8, 1, true>>>>("chosen-tensor-clamped-bf16");
  matvec<T, Weighed<Chosen<Product<20, 64, Norm::NONE, Epilogue::GATED, 8, 1, true>, true>>>("weighed-tensor-gated-bf16");
  matvec<B, Weighed<Clamped<Chosen<Product<40, 104, Norm::NONE, Epilogue::CLAMPED, 8, 1, true>>>>>("weighed-clamped-bf16");
  matvec<F, Weighed<Chosen<Product<16, 128, Norm::RMS, Epilogue::ACT, 8, 1>>>>("weighed-act");
  matvec_codes<F, Coded<Chosen<Product<24, 200, Norm::RMS, Epilogue::STORE, 8, 1, true>>, Code::INT8, 0, ScaleCode::NONE, false, true>>("chosen-int8-rows");
  matvec_codes<T, Coded<Chosen<Product<24, 200, Norm::NONE, Epilogue::GATED, 8, 1, true>, true>, Code::E4M3, 0, ScaleCode::NONE, false, true>>("chosen-tensor-e4m3-rows-bf16");
  matvec_codes<T, Coded<Clamped<Chosen<Product<24, 200, Norm::NONE, Epilogue::CLAMPED, 8, 1, true>>>, Code::E2M1, 32, ScaleCode::E8M0, false, false>>("chosen-tensor-mxfp4-bf16");
  matvec_codes<B, Coded<Chosen<Product<24, 200, Norm::NONE, Epilogue::STORE, 8, 1>>, Code::INT4, 32, ScaleCode::F16, true, true>>("chosen-int4-both-bf16");
  route<F, Choice<8, 2, false>>("route");
  route<B, Choice<7, 3, false, false, 0, 0, false, false>>("route-odd-whole");
  route<B, Choice<1, 1, true>>("route-one");
  route<T, Choice<128, 8, false>>("route-128");
  route<B, Choice<512, 9, true, true>>("route-512-corrected");
  route<F, Choice<32, 32, true, false, 0, 0, false, false>>("route-all");
  route<F, Choice<12, 3, false, false, 4, 2, false>>("route-groups");
  route<B, Choice<160, 6, true, true, 8, 3, true>>("route-groups-of-two");
  route<B, Choice<6, 2, false, true, 6, 3, true>>("route-groups-of-one");
  combine<F, Mixed<104, 3, false, false, true>>("combine");
  combine<B, Mixed<104, 8, true, false, true>>("combine-shared-bf16");
  combine<B, Mixed<72, 2, true, true, false>>("combine-gated-stored-bf16");
  combine<F, Mixed<24, 1, true, true, true, false>>("combine-one-unpublished");
  combine<T, Mixed<264, 31, true, true, true>>("combine-31-bf16");
  norm_add<F, Sum<100, false>>("norm_add-owned");
  norm_add<F, Sum<203, true>>("norm_add-replicated");
  norm_add<B, Sum<100, false>>("norm_add-bf16");
  attention<F, Heads<4, 2, 1, 16, 16, false, HeadNorm::NONE, 0, 1>>("attention-halves");
  attention<F, Heads<4, 2, 2, 20, 10, true, HeadNorm::HEAD, 0, 1>>("attention-pairs-partial");
  attention<F, Heads<3, 3, 3, 40, 40, false, HeadNorm::PROJECTION, 24, 1>>("attention-window");
  attention<F, Heads<2, 1, 1, 8, 0, false, HeadNorm::CENTRED, 0, 1>>("attention-centred");
  attention<F, Heads<4, 2, 1, 16, 16, false, HeadNorm::NONE, 0, 3>>("attention-splits");
  attention<Third<F>, Heads<4, 2, 1, 16, 16, false, HeadNorm::NONE, 0, 3>>("attention-three-devices-splits");
  typedef Cached<F, Elem::FP8> Narrow;
  typedef Cached<Tensor, Elem::FP8> NarrowTensor;
  attention<Narrow, Heads<4, 2, 1, 16, 16, false, HeadNorm::NONE, 0, 3>>("attention-fp8-splits");
  attention<Narrow, Heads<3, 3, 3, 40, 40, false, HeadNorm::PROJECTION, 24, 1>>("attention-fp8-window");
  attention<Cached<Tensor, Elem::BF16>, Swizzled<Heads<4, 2, 2, 64, 64, false, HeadNorm::NONE, 0, 1>, 1, true>>("attention-tensor-bf16");
  attention<NarrowTensor, Swizzled<Heads<4, 2, 2, 64, 64, false, HeadNorm::NONE, 0, 1>, 1, true>>("attention-tensor-fp8-bf16");
  attention<NarrowTensor, Capped<Swizzled<Heads<4, 2, 1, 64, 64, true, HeadNorm::HEAD, 24, 3>, 1, false>>>("attention-tensor-fp8-splits-bf16");
  attention<NarrowTensor, Swizzled<Heads<2, 2, 2, 128, 0, false, HeadNorm::HEAD, 0, 1>, 1, true>>("attention-tensor-fp8-128-bf16");
  attention<NarrowTensor, Swizzled<Heads<2, 1, 1, 256, 256, false, HeadNorm::NONE, 30, 1>, 2, false>>("attention-tensor-fp8-256-bf16");
  attention<Cached<Tensor, Elem::BF16>, Swizzled<Heads<4, 2, 2, 64, 32, false, HeadNorm::HEAD, 0, 1>, 1, true>>("attention-tensor-part-bf16");
  attention<Cached<Tensor, Elem::BF16>, Swizzled<Heads<2, 1, 1, 256, 64, false, HeadNorm::HEAD, 30, 1>, 2, false>>("attention-tensor-part-256-bf16");
  attention<NarrowTensor, Swizzled<Heads<2, 1, 1, 256, 128, false, HeadNorm::NONE, 0, 1>, 2, false>>("attention-tensor-fp8-part-256-bf16");
  attention<F, Sunk<Heads<4, 2, 1, 16, 16, false, HeadNorm::NONE, 0, 3>>>("attention-sinks-splits");
  attention<F, Gated<Heads<2, 1, 1, 8, 0, false, HeadNorm::CENTRED, 0, 1>>>("attention-gate");
  attention<F, Scaled<Heads<2, 1, 1, 8, 0, false, HeadNorm::CENTRED, 0, 1>>>("attention-scaled");
  attention<Cached<Tensor, Elem::BF16>, After<Swizzled<Heads<4, 2, 2, 64, 64, false, HeadNorm::HEAD, 0, 1>, 1, true>>>("attention-after-tensor-bf16");
  attention<F, Gated<Featured<Heads<4, 2, 2, 20, 10, true, HeadNorm::HEAD, 0, 1>>>>("attention-featured");
  attention<F, Gated<Featured<Heads<4, 2, 1, 16, 16, false, HeadNorm::CENTRED, 24, 3>>>>("attention-featured-splits");
  attention<B, Featured<Heads<4, 2, 2, 20, 10, true, HeadNorm::HEAD, 0, 1>>>("attention-featured-bf16");
  attention<Cached<Tensor, Elem::BF16>, Gated<Featured<Swizzled<Heads<4, 2, 2, 64, 64, false, HeadNorm::HEAD, 24, 1>, 1, true>>>>("attention-featured-tensor-bf16");
  attention<NarrowTensor, Gated<Featured<Swizzled<Heads<4, 4, 4, 128, 128, true, HeadNorm::HEAD, 0, 3>, 1, false>>>>("attention-featured-tensor-splits-bf16");
  // Fewer columns than threads, in parts; more columns than threads; one input in the convolution.
  mix<F, Net<2, 4, 6, 8, 4, false>>("mix-parts");
  mix<F, Net<1, 2, 10, 300, 3, true>>("mix-wide");
  mix<F, Net<2, 2, 128, 128, 1, false>>("mix-128");
  mix<F, Net<1, 2, 12, 24, 4, false>>("mix-12");
  mix<B, Net<1, 3, 16, 32, 4, false>>("mix-bf16");
  // One and several units of a task, the last with two channels; more than the threads have.
  convolve<F, Channels<34, 3, false>>("convolve", 1);
  convolve<F, Channels<600, 4, true>>("convolve-bias", 75);
  convolve<B, Channels<72, 2, true>>("convolve-two-bf16", 4);
  // As for mix; b and c of one group, and of several.
  scan<F, Steps<4, 6, 2, 10, 4, true, true>>("scan-parts");
  scan<F, Steps<2, 300, 1, 6, 3, false, false>>("scan-wide");
  scan<F, Steps<2, 64, 2, 128, 1, true, false>>("scan-64");
  scan<B, Steps<3, 16, 1, 32, 4, true, true>>("scan-bf16");
  group_norm<F, Groups<24, 3, false>>("group_norm");
  group_norm<F, Groups<700, 1, true>>("group_norm-gated");
  group_norm<B, Groups<80, 2, true>>("group_norm-gated-bf16");
}
