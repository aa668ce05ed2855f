// Mixtures of experts by batch kernels: scores, the choice of each row, products with the part that a row and slot chose, and the sum over slots.
#pragma once

#include "op_choices.h"

// Packets, COUNT for each row; none is there yet.
template <class M>
static u32 packets(int count) {
  const u32 at = u32((exchange.size() + 1) / 2 * 2);
  exchange.resize(at + M::ROWS * round_up(count, 2));
  return at;
}
static u32 row_of_packets(u32 at, int row, int count) { return at + u32(row) * round_up(count, 2); }
static void put_packets(u32 at, const std::vector<float>& values) {
  for (size_t i = 0; i < values.size(); i++) exchange.at(at + i) = u64(tag) << 32 | __float_as_uint(values[i]);
}

template <class M, class G>
static void scores(const char* name, u64 active) {
  u64 state = 4711;
  start<M>(1, active);
  const std::vector<float> weight = numbers(state, G::K);
  std::vector<double> w, expected, found;
  for (float value : numbers(state, size_t(G::ROWS) * G::K)) w.push_back(value);
  std::vector<std::vector<float>> x;
  entry.x = words<M, G::K>();
  for (int row = 0; row < M::ROWS; row++) {
    x.push_back(numbers(state, G::K));
    if (takes(active, row)) put_words<M, G::K>(entry.x, row, x[row]);
  }
  stream<M, G>(state, w);
  entry.lo = 0, entry.hi = G::UNITS, entry.norm_weight = constant(weight);
  entry.out = packets<M>(G::ROWS);
  run<M, RowsMatVec<M, G>>();
  for (int row = 0; row < M::ROWS; row++) {
    const std::vector<double> input = normalised(G::NORM, x[row], weight, {}, G::EPS);
    // An odd number is followed by a packet of zeros.
    for (int r = 0; r < int(round_up(G::ROWS, 2)); r++) {
      const u64 packet = exchange.at(row_of_packets(entry.out, row, G::ROWS) + r);
      double y = 0;
      for (int k = 0; k < G::K && r < G::ROWS; k++) y += w[size_t(r) * G::K + k] * input[k];
      if (!takes(active, row)) {
        expected.push_back(0), found.push_back(packet == 0 ? 0 : 1);
        continue;
      }
      expected.push_back(y), found.push_back(packet >> 32 == tag ? __uint_as_float(u32(packet)) : std::nanf(""));
    }
  }
  report(name, expected, found);
}

template <class M, class G>
static void route(const char* name, u64 active) {
  for (int kind = 0; kind < 4; kind++) {
    u64 state = kind * 31 + G::EXPERTS;
    start<M>(kind, active);
    const std::vector<float> correction = numbers(state, G::EXPERTS);
    std::vector<std::vector<float>> x;
    const u32 in = packets<M>(G::EXPERTS), ids = packets<M>(G::TOP_K), shares = packets<M>(G::TOP_K);
    entry.bias = constant(correction);
    std::vector<double> expected, found;
    for (int row = 0; row < M::ROWS; row++) {
      x.push_back(scores_of<G>(state, kind));
      // Kernels poll pairs.
      x[row].resize(round_up(G::EXPERTS, 2));
      entry.x = row_of_packets(in, row, G::EXPERTS), entry.row = row;
      entry.out = row_of_packets(ids, row, G::TOP_K), entry.aux = row_of_packets(shares, row, G::TOP_K);
      if (takes(active, row)) put_packets(entry.x, x[row]);
      x[row].resize(G::EXPERTS);
      run<M, RowsRoute<M, G>>();
    }
    for (int row = 0; row < M::ROWS; row++) {
      const u64* id = &exchange.at(row_of_packets(ids, row, G::TOP_K));
      const u64* share = &exchange.at(row_of_packets(shares, row, G::TOP_K));
      if (takes(active, row))
        compare_choice<G>(x[row], correction, id, share, tag, expected, found);
      else
        expected.push_back(0), found.push_back(*id == 0 && *share == 0 ? 0 : 1);
    }
    report(name, expected, found);
  }
}

// Scores of rows lie 6 packets apart, and the gate of the shared expert is the last of 5.
template <class G>
struct Gated5 : G {
  static constexpr int GATE_PITCH = 6;
};
template <class M, class P>
static void combine(const char* name, u64 active) {
  typedef Gated5<P> G;
  constexpr int INPUTS = G::SLOTS + (G::SHARED ? 1 : 0), SCORES = 5;
  for (u64 seed = 1; seed <= 2; seed++) {
    u64 state = seed * 4099;
    start<M>(seed, active);
    const std::vector<float> before = numbers(state, size_t(M::ROWS) * M::RESIDUAL_COLS);
    std::vector<std::vector<float>> x, shares, scores;
    const int first = G::WIDTH > 8 ? 8 : 0;
    entry.lo = first / 8, entry.hi = G::WIDTH / 8;
    entry.x = words<M, INPUTS * G::WIDTH>();
    entry.out = words<M, G::WIDTH>();
    entry.aux = packets<M>(G::SLOTS);
    entry.shared_gate = packets<M>(SCORES) + SCORES - 1;
    for (int row = 0; row < M::ROWS; row++) {
      x.push_back(numbers(state, INPUTS * G::WIDTH)), shares.push_back(numbers(state, G::SLOTS)), scores.push_back(numbers(state, SCORES));
      if (!takes(active, row)) continue;
      put_words<M, INPUTS * G::WIDTH>(entry.x, row, x[row]);
      put_packets(row_of_packets(entry.aux, row, G::SLOTS), shares[row]);
      put_packets(row_of_packets(entry.shared_gate - SCORES + 1, row, SCORES), scores[row]);
    }
    std::memcpy(residual<M>(0), before.data(), before.size() * 4);
    run<M, RowsCombine<M, G>>();
    std::vector<double> expected, found;
    for (int row = 0; row < M::ROWS; row++) {
      const float* old = before.data() + row * M::RESIDUAL_COLS;
      for (int col = first; col < G::WIDTH; col++) {
        const bool in = takes(active, row);
        const double y = in ? sum_of_slots<G>(x[row], shares[row].data(), scores[row][SCORES - 1], col, old[col - first]) : old[col - first];
        if (G::PUBLISH && in) expected.push_back(y), found.push_back(published<M, G::WIDTH>(entry.out, row, col));
        if (G::ADDS) expected.push_back(y), found.push_back(residual<M>(row)[col - first]);
      }
      if (G::PUBLISH && !takes(active, row)) expected.push_back(1), found.push_back(left_alone<M, G::WIDTH>(entry.out, row, NO_WORD, first));
    }
    report(name, expected, found);
  }
}

// P by two slots of three parts. The input is the same for all slots, or one for each.
template <class P, bool SLOTS_OF_X>
struct BySlots : Chosen<P> {
  static constexpr int EACH = 2, COLS = P::EPILOGUE == Epilogue::GATED || P::EPILOGUE == Epilogue::CLAMPED ? P::ROWS / 2 : P::ROWS;
  static constexpr int X_STEP = SLOTS_OF_X ? P::K : 0, X_COLS = SLOTS_OF_X ? EACH * P::K : P::K;
  // Beside what else the output has.
  static constexpr int OUT_STEP = COLS, OUT_AT = 0, OUT_COLS = EACH * COLS;
};
// A block of several that parts are dealt to.
template <class M>
struct Dealing : M {
  static constexpr int SMS = 4, CHOSEN_PARTS = PARTS_MOST, CHOSEN_EACH = 2, COPIERS = 1, LOADER_WARPS = 1;
  static constexpr bool CHOOSES = true;
  static constexpr Copy COPY = Copy::PLAIN;
};
template <class Block, class G>
static void chosen(const char* name, u64 active) {
  typedef Dealing<Block> M;
  typedef RowsMatVecShape<M, G> S;
  u64 state = 4711;
  start<M>(1, active);
  const std::vector<float> weight = numbers(state, G::K);
  entry.x = words<M, G::X_COLS>();
  entry.out = words<M, G::OUT_COLS>();
  entry.lo = 0, entry.hi = G::UNITS, entry.norm_weight = constant(weight), entry.choice = packets<M>(G::EACH);
  // Of each part the values, and the granules of each unit.
  std::vector<double> w[PARTS_MOST];
  std::vector<u8> granules[PARTS_MOST][G::UNITS][S::UNIT_GRANULES];
  for (int part = 0; part < PARTS_MOST; part++) {
    for (float value : numbers(state, size_t(G::ROWS) * G::K)) w[part].push_back(value);
    for (int unit = 0; unit < G::UNITS; unit++)
      for (int j = 0; j < S::UNIT_GRANULES; j++) granules[part][unit][j] = granule_of<M, G>(state, unit, j, w[part], 0);
  }
  const std::vector<float> row_scales = numbers(state, PARTS_MOST * G::UNITS * G::UNIT_ROWS), biases = numbers(state, PARTS_MOST * G::UNITS * G::UNIT_ROWS);
  if (G::BIAS) entry.bias = constant(biases);
  if (Coding<M, G>::ROW_SCALES) entry.row_scales = constant(row_scales);
  std::vector<std::vector<float>> x;
  int choice[M::ROWS][G::EACH];
  bool is_chosen[PARTS_MOST] = {};
  for (int row = 0; row < M::ROWS; row++) {
    x.push_back(numbers(state, G::X_COLS));
    for (int slot = 0; slot < G::EACH; slot++) choice[row][slot] = (row * 2 + slot) % PARTS_MOST;
    if (!takes(active, row)) continue;
    put_words<M, G::X_COLS>(entry.x, row, x[row]);
    for (int slot = 0; slot < G::EACH; slot++) {
      // One beyond the parts is that of the last one.
      const int part = choice[row][slot], said = part == PARTS_MOST - 1 ? part + row % 2 : part;
      is_chosen[part] = true;
      exchange.at(row_of_packets(entry.choice, row, G::EACH) + slot) = u64(tag) << 32 | u32(said);
    }
  }
  std::vector<int> list;
  for (int part = 0; part < PARTS_MOST; part++)
    for (int unit = 0; unit < (is_chosen[part] ? G::UNITS : 0); unit++) list.push_back(part * G::UNITS + unit);
  // Each block takes a share of the list, part by part and pass by pass.
  for (int j = 0; j < M::SMS; j++) {
    chunk_count = 0;
    const int end = int(list.size()) * (j + 1) / M::SMS;
    for (int at = int(list.size()) * j / M::SMS; at < end;) {
      const int part = list[at] / G::UNITS;
      int count = 1;
      while (count < G::PASS && at + count < end && list[at + count] / G::UNITS == part) count++;
      for (int block = 0; block < S::BLOCKS; block++)
        for (int i = 0; i < count; i++) {
          u8* to = new_chunk();
          for (int g = block * S::BLOCK; g < min((block + 1) * S::BLOCK, S::UNIT_GRANULES); g++) {
            const std::vector<u8>& granule = granules[part][list[at + i] % G::UNITS][g];
            std::memcpy(to + (g % S::BLOCK) * granule.size(), granule.data(), granule.size());
          }
        }
      at += count;
    }
    entry.j = j, entry.deals_first = 1;
    begin_deals<M>();
    run<M, RowsMatVec<M, G>>();
  }
  std::vector<double> expected, found;
  const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
  for (int row = 0; row < M::ROWS; row++) {
    if (!takes(active, row)) {
      expected.push_back(1), found.push_back(left_alone<M, G::OUT_COLS>(entry.out, row));
      continue;
    }
    for (int slot = 0; slot < G::EACH; slot++) {
      const int part = choice[row][slot];
      const std::vector<float> own(x[row].begin() + slot * G::X_STEP, x[row].begin() + slot * G::X_STEP + G::K);
      const std::vector<double> input = normalised(G::NORM, own, weight, {}, G::EPS);
      std::vector<double> y(G::ROWS);
      for (int i = 0; i < G::UNITS * G::UNIT_ROWS; i++) {
        const int r = row_of_matrix<G>(i / G::UNIT_ROWS, i % G::UNIT_ROWS), of_part = part * G::UNITS * G::UNIT_ROWS + i;
        if (r < 0) continue;
        for (int k = 0; k < G::K; k++) y[r] += w[part][size_t(r) * G::K + k] * input[k];
        y[r] = y[r] * (Coding<M, G>::ROW_SCALES ? row_scales[of_part] : 1.) + (G::BIAS ? biases[of_part] : 0.);
      }
      for (int col = 0; col < G::COLS; col++) {
        double value = y[col];
        if (G::EPILOGUE == Epilogue::ACT) value = silu(value);
        if (G::EPILOGUE == Epilogue::GATED) value = silu(value) * y[G::COLS + col];
        if constexpr (G::EPILOGUE == Epilogue::CLAMPED) {
          const double gate = std::fmin(value, G::LIMIT), up = std::fmax(std::fmin(y[G::COLS + col], G::LIMIT), -G::LIMIT);
          value = (up + 1) * gate / (1 + std::exp(-G::ALPHA * gate));
        }
        expected.push_back(value), found.push_back(published<M, G::OUT_COLS>(entry.out, row, slot * G::OUT_STEP + col));
      }
    }
  }
  report(name, expected, found);
}
