// Cases of a gated delta net in steps of several rows: rows of several sequences, whose ids are no ids of rows, several rows of one sequence, rows
// that take no part, and launches of fewer rows. Tasks of several parts divide the sequences.
#pragma once

template <int KEY_HEADS_, int VALUE_HEADS_, int KEY_DIM_, int VALUE_DIM_, int KERNEL_, int PARTS_>
struct DividedNet {
  static constexpr int KEY_HEADS = KEY_HEADS_, VALUE_HEADS = VALUE_HEADS_, KEY_DIM = KEY_DIM_, VALUE_DIM = VALUE_DIM_, KERNEL = KERNEL_;
  static constexpr int PARTS = PARTS_, KEYS = KEY_HEADS * KEY_DIM, VALUES = VALUE_HEADS * VALUE_DIM, CHANNELS = 2 * KEYS + VALUES;
  // Beta and the decay have a buffer of their own.
  static constexpr int COLS = CHANNELS + VALUES, SCALAR_COLS = 2 * VALUE_HEADS, BETA_AT = 0, DECAY_AT = VALUE_HEADS;
  static constexpr float EPS = 1e-6f;
  static constexpr bool DOUBLES = false;
};

struct NetConstants {
  std::vector<float> taps, a_log, bias, gains;
};
// One text by the formula of src/ir/op.rs, in double precision.
template <class G>
struct NetText {
  std::vector<std::vector<float>> inputs;
  std::vector<double> state = std::vector<double>(G::VALUE_HEADS * G::KEY_DIM * G::VALUE_DIM);

  std::vector<double> next(const NetConstants& k, const std::vector<float>& x, const std::vector<float>& scalars) {
    inputs.push_back(x);
    const int position = int(inputs.size()) - 1;
    const auto silu = [](double v) { return v / (1 + std::exp(-v)); };
    const auto convolved = [&](int channel) {
      double sum = 0;
      for (int t = 0; t < G::KERNEL; t++)
        if (position + t >= G::KERNEL - 1) sum += double(inputs[position + t - (G::KERNEL - 1)][channel]) * k.taps[channel * G::KERNEL + t];
      return silu(sum);
    };
    const auto unit = [&](int from) {
      std::vector<double> y;
      double squares = 0;
      for (int d = 0; d < G::KEY_DIM; d++) y.push_back(convolved(from + d)), squares += y[d] * y[d];
      for (double& v : y) v /= std::sqrt(squares + 1e-6);
      return y;
    };
    std::vector<double> out;
    for (int h = 0; h < G::VALUE_HEADS; h++) {
      const int key = h / (G::VALUE_HEADS / G::KEY_HEADS) * G::KEY_DIM;
      const std::vector<double> q = unit(key), r = unit(G::KEYS + key);
      const double beta = 1 / (1 + std::exp(-double(scalars[G::BETA_AT + h])));
      const double decay = std::exp(-std::exp(double(k.a_log[h])) * std::log1p(std::exp(double(scalars[G::DECAY_AT + h]) + k.bias[h])));
      std::vector<double> y(G::VALUE_DIM);
      double squares = 0;
      for (int d = 0; d < G::VALUE_DIM; d++) {
        double* column = &state[size_t(h) * G::KEY_DIM * G::VALUE_DIM + d];
        double remembered = 0;
        for (int i = 0; i < G::KEY_DIM; i++) column[i * G::VALUE_DIM] *= decay, remembered += column[i * G::VALUE_DIM] * r[i];
        const double delta = beta * (convolved(2 * G::KEYS + h * G::VALUE_DIM + d) - remembered);
        for (int i = 0; i < G::KEY_DIM; i++) {
          column[i * G::VALUE_DIM] += r[i] * delta;
          y[d] += column[i * G::VALUE_DIM] * q[i] / std::sqrt(double(G::KEY_DIM));
        }
        squares += y[d] * y[d] / G::VALUE_DIM;
      }
      for (int d = 0; d < G::VALUE_DIM; d++)
        out.push_back(y[d] / std::sqrt(squares + G::EPS) * k.gains[d] * silu(x[G::CHANNELS + h * G::VALUE_DIM + d]));
    }
    return out;
  }
};

// Rows of a launch that are neighbours.
struct RowsOfText {
  u32 slot, count;
  bool takes_part;
};
// Launches of one step each. A slot that another text takes begins at position 0 again.
template <class M, class G>
static void mix(const char* name) {
  constexpr int OUT = G::VALUES, SLOTS = 12, STATE = Mix<M, G>::STATE_COLS * G::VALUE_HEADS;
  const std::vector<std::vector<RowsOfText>> launches = {
      {{9, 1, true}, {4, 3, true}, {1, 1, true}, {11, 2, true}},
      {{1, 1, true}, {9, 1, false}, {4, 1, true}, {11, 1, true}, {6, 1, true}, {0, 1, true}, {3, 1, true}, {2, 1, true}},
      {{2, 2, true}, {9, 4, true}, {0, 1, true}},
      {{11, 1, true}, {3, 1, true}, {9, 1, false}},
  };
  const u32 begins_again = 3; // at the last launch
  u64 seed = 41;
  NetConstants k;
  k.taps = numbers(seed, G::CHANNELS * G::KERNEL), k.a_log = numbers(seed, G::VALUE_HEADS), k.bias = numbers(seed, G::VALUE_HEADS);
  k.gains = numbers(seed, G::VALUE_DIM);
  std::vector<NetText<G>> texts(SLOTS);
  std::vector<u8> kept(size_t(SLOTS) * STATE * 4, 0xff); // not numbers
  for (size_t n = 0; n < launches.size(); n++) {
    u64 active = 0;
    u32 count = 0;
    for (const RowsOfText& of : launches[n])
      for (u32 i = 0; i < of.count; i++, count++) active |= u64(of.takes_part) << count;
    start<M>(n, active);
    params.row_count = count;
    entry.x = words<M, G::COLS>(), entry.beta = words<M, G::SCALAR_COLS>(), entry.out = words<M, OUT>();
    entry.conv = constant(k.taps), entry.a_log = constant(k.a_log), entry.dt_bias = constant(k.bias), entry.norm_weight = constant(k.gains);
    if (n + 1 == launches.size()) texts[begins_again] = NetText<G>();
    std::vector<std::vector<double>> outs(M::ROWS);
    u32 row = 0;
    for (const RowsOfText& of : launches[n])
      for (u32 i = 0, first = row; i < of.count; i++, row++) {
        rows[row].sequence = u32(&of - launches[n].data()), rows[row].slot = of.slot, rows[row].first = first;
        rows[row].position = u32(texts[of.slot].inputs.size());
        if (!of.takes_part) continue;
        const std::vector<float> x = numbers(seed, G::COLS), scalars = numbers(seed, G::SCALAR_COLS);
        put_words<M, G::COLS>(entry.x, row, x);
        put_words<M, G::SCALAR_COLS>(entry.beta, row, scalars);
        outs[row] = texts[of.slot].next(k, x, scalars);
      }
    cache = kept;
    std::vector<double> expected, found;
    for (u32 part = 0; part < u32(G::PARTS); part++)
      for (int h = 0; h < G::VALUE_HEADS; h++) {
        const std::vector<u64> before = exchange;
        entry.lo = h, entry.j = part;
        run<M, RowsMix<M, G>>();
        // No task touches a row of another part.
        bool alone = true;
        for (int r = 0; r < M::ROWS; r++)
          for (int d = 0; d < 2 * OUT && (u32(r) < count ? rows[r].slot : u32(r)) % G::PARTS != part; d++) {
            const size_t at = size_t(word<M, OUT>(entry.out, r, d / 4 * 2, d % 2) - reinterpret_cast<u32*>(exchange.data())) / 2;
            alone = alone && before[at] == exchange[at];
          }
        expected.push_back(1), found.push_back(alone);
      }
    kept = cache;
    for (int r = 0; r < M::ROWS; r++) {
      if (outs[r].empty()) expected.push_back(1), found.push_back(left_alone<M, OUT>(entry.out, r));
      for (size_t d = 0; d < outs[r].size(); d++) expected.push_back(outs[r][d]), found.push_back(published<M, OUT>(entry.out, r, int(d)));
    }
    for (u32 slot = 0; slot < SLOTS; slot++)
      for (int h = 0; h < G::VALUE_HEADS && !texts[slot].inputs.empty(); h++)
        for (int i = 0; i < G::KEY_DIM * G::VALUE_DIM; i++) {
          const float* state = reinterpret_cast<const float*>(kept.data()) + (size_t(slot) * G::VALUE_HEADS + h) * Mix<M, G>::STATE_COLS;
          expected.push_back(texts[slot].state[size_t(h) * G::KEY_DIM * G::VALUE_DIM + i]), found.push_back(state[i]);
        }
    report(name, expected, found);
  }
}
