// Mixtures of experts by decode kernels: the choice, the sum over slots, and the packets of a choice.
#pragma once

#include "op_choices.h"

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
      compare_choice<G>(x, correction, &exchange.at(entry.out), &exchange.at(entry.aux), TAG, expected, found);
    }
    report(name, expected, found);
  }
}

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
      const double y = sum_of_slots<G>(x, shares.data(), scores[4], col, before[col]);
      if (G::PUBLISH) expected.push_back(y), found.push_back(published<M>(entry.out, col));
      if (G::ADDS) expected.push_back(y), found.push_back(residual<M>()[col - first]);
    }
    report(name, expected, found);
  }
}

// Packets of the choice of a part. One beyond the parts is that of the last one.
static u32 chosen_packet(u32 choice) {
  const u32 at = room(2);
  exchange.at(at) = u64(TAG) << 32 | choice;
  exchange.at(at + 1) = 0; // the choice of the next slot is not there yet
  return at;
}
