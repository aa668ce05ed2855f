// Mixtures of experts: what a router chooses, what the sum over slots is, and products with a chosen part of a matrix. The formulas, for kernels of
// one row and of several.
#pragma once

// ---- choices ----------------------------------------------------------------------------------------------------------

template <int EXPERTS_, int TOP_K_, bool SIGMOID_, bool CORRECTED_ = false, int GROUPS_ = 0, int KEPT_ = 0, bool SUM = false, bool NORMALISED_ = true>
struct Choice {
  static constexpr int EXPERTS = EXPERTS_, TOP_K = TOP_K_, GROUPS = GROUPS_, KEPT = KEPT_;
  static constexpr bool SIGMOID = SIGMOID_, CORRECTED = CORRECTED_, SUM_OF_TWO = SUM, NORMALISED = NORMALISED_;
  static constexpr float ADDED = SIGMOID_ ? 1e-3f : 0.f, SCALE = 2.5f;
};

// The first `count` of the places that may be taken: larger values first, of equal ones the lower place; what is no number comes last.
static std::vector<int> largest(const std::vector<double>& values, int count) {
  std::vector<int> order;
  for (int turn = 0; turn < count; turn++) {
    int best = -1;
    for (int i = 0; i < int(values.size()); i++) {
      bool taken = false;
      for (int other : order) taken |= other == i;
      if (taken) continue;
      if (best < 0 || values[i] > values[best] || (std::isnan(values[best]) && !std::isnan(values[i]))) best = i;
    }
    order.push_back(best);
  }
  return order;
}

// Scores of all kinds: random ones, many equal ones, some that are infinite, some that are no numbers.
template <class G>
static std::vector<float> scores_of(u64& state, int kind) {
  std::vector<float> x = numbers(state, G::EXPERTS);
  for (int i = 0; i < G::EXPERTS; i++) {
    if (kind == 1) x[i] = float(i % 3) / 2.f * (i % 2 ? -1.f : 1.f);
    if (kind == 2 && i % 3 == 1) x[i] = -INFINITY;
    if (kind == 3 && i % 4 == 2) x[i] = std::nanf("");
  }
  return x;
}

// The experts of a row by slot, and their weights; no weight of what is no number.
template <class G>
static void choose_experts(const std::vector<float>& x, const std::vector<float>& correction, std::vector<int>& slots, std::vector<double>& weights) {
  // Scores, and what the choice is made by.
  std::vector<double> score(x.begin(), x.end()), by;
  double most = -INFINITY, all = 0, sum = 0;
  for (double v : score) most = v > most ? v : most;
  for (double v : score) all += std::exp(v - most);
  for (double& v : score) v = G::SIGMOID ? 1 / (1 + std::exp(-v)) : std::exp(v - most) / all;
  by = G::CORRECTED || G::GROUPS ? score : std::vector<double>(x.begin(), x.end());
  for (int i = 0; i < G::EXPERTS; i++) by[i] += G::CORRECTED ? double(correction[i]) : 0.;
  if (G::GROUPS) {
    const int each = G::EXPERTS / (G::GROUPS ? G::GROUPS : 1);
    std::vector<double> groups;
    for (int g = 0; g < G::GROUPS; g++) {
      const std::vector<double> own(by.begin() + g * each, by.begin() + (g + 1) * each);
      const std::vector<int> two = largest(own, each > 1 ? 2 : 1);
      groups.push_back(own[two[0]] + (G::SUM_OF_TWO && each > 1 ? own[two[1]] : 0.));
    }
    const std::vector<int> kept = largest(groups, G::KEPT);
    for (int i = 0; i < G::EXPERTS; i++) {
      bool keeps = false;
      for (int g : kept) keeps |= g == i / each;
      if (!keeps) by[i] = std::nan("");
    }
  }
  slots = largest(by, G::TOP_K);
  for (int e : slots) sum += score[e];
  weights.clear();
  for (int e : slots) weights.push_back(score[e] / (G::NORMALISED ? sum + G::ADDED : 1.) * G::SCALE);
}

// Compares packets of a choice with it: a wrong id is an error of one. Readers poll pairs, so an odd number of slots is followed by a packet of
// zeros.
template <class G>
static void compare_choice(const std::vector<float>& x, const std::vector<float>& correction, const u64* ids, const u64* shares, u32 tag,
                           std::vector<double>& expected, std::vector<double>& found) {
  std::vector<int> slots;
  std::vector<double> weights;
  choose_experts<G>(x, correction, slots, weights);
  for (int s = 0; s < (G::TOP_K + 1) / 2 * 2; s++) {
    const bool slot = s < G::TOP_K, right = ids[s] >> 32 == tag && shares[s] >> 32 == tag && u32(ids[s]) == u32(slot ? slots[s] : 0);
    expected.push_back(0.), found.push_back(right ? 0. : 1.);
    const double want = slot ? weights[s] : 0.;
    if (!std::isnan(want)) expected.push_back(want), found.push_back(__uint_as_float(u32(shares[s])));
  }
}

// ---- sums over slots --------------------------------------------------------------------------------------------------

template <int WIDTH_, int SLOTS_, bool SHARED_, bool GATED_, bool ADDS_, bool PUBLISH_ = true>
struct Mixed {
  static constexpr int WIDTH = WIDTH_, SLOTS = SLOTS_;
  static constexpr bool SHARED = SHARED_, GATED = GATED_, ADDS = ADDS_, PUBLISH = PUBLISH_;
  static constexpr float SHARED_SCALE = 0.75f, SCALE = 0.5f;
};
// Column `col` of the sum over slots, added to `before`. `gate`: the score of the gate.
template <class G>
static double sum_of_slots(const std::vector<float>& x, const float* shares, double gate, int col, double before) {
  double y = 0;
  for (int s = 0; s < G::SLOTS; s++) y += double(shares[s]) * x[s * G::WIDTH + col];
  if (G::SHARED) y += G::SHARED_SCALE / (G::GATED ? 1 + std::exp(-gate) : 1.) * x[G::SLOTS * G::WIDTH + col];
  return G::SCALE * y + (G::ADDS ? before : 0.);
}

// ---- products with a chosen part --------------------------------------------------------------------------------------

constexpr int PARTS_MOST = 3;
// P with the weights of one of three parts; the scales of rows and the biases of all parts are in memory.
template <class P, bool FIRST = false>
struct Chosen : P {
  static constexpr int EXPERTS = PARTS_MOST, PART_UNITS = P::UNITS;
  static constexpr bool INPUT_FIRST = FIRST;
};
// The same, for a slot whose share multiplies the result.
template <class P>
struct Weighed : P {
  static constexpr bool WEIGHED = true;
};
template <class P>
struct Clamped : P {
  static constexpr float ALPHA = 1.702f, LIMIT = 0.5f;
};
// A number for each row of the units of a part, beside those of other parts, which are far off.
static std::vector<float> among_parts(u64& state, const std::vector<float>& own, int part) {
  std::vector<float> all;
  for (int p = 0; p < PARTS_MOST; p++) {
    const std::vector<float> other = numbers(state, own.size());
    for (size_t i = 0; i < own.size(); i++) all.push_back(p == part ? own[i] : 100.f + other[i]);
  }
  return all;
}
