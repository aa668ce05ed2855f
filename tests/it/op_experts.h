// Mixtures of experts: the choice of a row, products with a chosen part of a matrix, and the sum over slots.
#pragma once

// ---- route ----------------------------------------------------------------------------------------------------------

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

template <class M, class G>
static void route(const char* name) {
  for (int kind = 0; kind < 4; kind++) {
   std::vector<double> expected, found;
   for (u64 seed = 1; seed <= 5; seed++) {
    u64 state = seed * 517 + kind * 31 + G::EXPERTS;
    start();
    const std::vector<float> x = scores_of<G>(state, kind), correction = numbers(state, G::EXPERTS);
    constexpr size_t SLOTS = (G::TOP_K + 1) / 2 * 2;
    entry.x = packets<Machine<Elem::F32>>(x);
    entry.bias = constant(correction);
    entry.out = room(SLOTS), entry.aux = room(SLOTS);
    run<M, Route<M, G>>();

    // Scores, and what the choice is made by.
    std::vector<double> score(x.begin(), x.end()), by;
    double most = -INFINITY, all = 0;
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
    const std::vector<int> slots = largest(by, G::TOP_K);
    double sum = 0;
    for (int e : slots) sum += score[e];
    // A wrong id is an error of one. Weights of what is no number are none.
    for (size_t s = 0; s < SLOTS; s++) {
      const u64 id = exchange.at(entry.out + s), weight = exchange.at(entry.aux + s);
      const bool slot = s < size_t(G::TOP_K);
      expected.push_back(0.), found.push_back((id >> 32 == TAG && weight >> 32 == TAG && u32(id) == u32(slot ? slots[s] : 0)) ? 0. : 1.);
      const double want = slot ? score[slots[s]] / (G::NORMALISED ? sum + G::ADDED : 1.) * G::SCALE : 0.;
      if (std::isnan(want)) continue;
      expected.push_back(want), found.push_back(__uint_as_float(u32(weight)));
    }
   }
   report(name, expected, found);
  }
}

// ---- combine --------------------------------------------------------------------------------------------------------

template <int WIDTH_, int SLOTS_, bool SHARED_, bool GATED_, bool ADDS_, bool PUBLISH_ = true>
struct Mixed {
  static constexpr int WIDTH = WIDTH_, SLOTS = SLOTS_;
  static constexpr bool SHARED = SHARED_, GATED = GATED_, ADDS = ADDS_, PUBLISH = PUBLISH_;
  static constexpr float SHARED_SCALE = 0.75f, SCALE = 0.5f;
};
template <class M, class G>
static void combine(const char* name) {
  constexpr int INPUTS = G::SLOTS + (G::SHARED ? 1 : 0);
  for (u64 seed = 1; seed <= 3; seed++) {
    u64 state = seed * 4099;
    start();
    const std::vector<float> x = numbers(state, INPUTS * G::WIDTH), shares = numbers(state, G::SLOTS), before = numbers(state, G::WIDTH);
    // Scores of a router, of which the gate is the last.
    const std::vector<float> scores = numbers(state, 5);
    // An owner of a part.
    const int first = G::WIDTH > 8 ? 8 : 0;
    entry.lo = first / 8, entry.hi = G::WIDTH / 8;
    entry.x = packets<M>(x);
    entry.aux = packets<Machine<Elem::F32>>(shares);
    entry.shared_gate = packets<Machine<Elem::F32>>(scores) + 4;
    entry.out = room(G::WIDTH + 2);
    std::memcpy(residual<M>(), before.data() + first, (G::WIDTH - first) * 4);
    run<M, Combine<M, G>>();
    std::vector<double> expected, found;
    for (int col = first; col < G::WIDTH; col++) {
      double y = 0;
      for (int s = 0; s < G::SLOTS; s++) y += double(shares[s]) * x[s * G::WIDTH + col];
      if (G::SHARED) y += G::SHARED_SCALE / (G::GATED ? 1 + std::exp(-double(scores[4])) : 1.) * x[G::SLOTS * G::WIDTH + col];
      y = G::SCALE * y + (G::ADDS ? before[col] : 0.);
      if (G::PUBLISH) expected.push_back(y), found.push_back(published<M>(entry.out, col));
      if (G::ADDS) expected.push_back(y), found.push_back(residual<M>()[col - first]);
    }
    report(name, expected, found);
  }
}

// ---- products with a chosen part --------------------------------------------------------------------------------------

constexpr int PARTS_MOST = 3;
// P with the weights of one of three parts; the scales of rows and the biases of all parts are in memory.
template <class P, bool FIRST = false>
struct Chosen : P {
  static constexpr int EXPERTS = PARTS_MOST, PART_UNITS = P::UNITS;
  static constexpr bool INPUT_FIRST = FIRST;
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
// Packets of the choice of a part. One beyond the parts is that of the last one.
static u32 chosen_packet(u32 choice) {
  const u32 at = room(2);
  exchange.at(at) = u64(TAG) << 32 | choice;
  exchange.at(at + 1) = 0; // the choice of the next slot is not there yet
  return at;
}
