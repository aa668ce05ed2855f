// Short convolutions, Mamba-2 and norms of groups in double precision: shapes, constants, and what a text leaves at each of its positions.
#pragma once

static double silu_of(double x) { return x / (1 + std::exp(-x)); }

template <int CHANNELS_, int KERNEL_, bool B>
struct Channels {
  static constexpr int CHANNELS = CHANNELS_, KERNEL = KERNEL_;
  static constexpr bool BIAS = B;
};
template <int HEADS_, int HEAD_DIM_, int GROUPS_, int STATE_, int KERNEL_, bool GATE, bool B>
struct Steps {
  static constexpr int HEADS = HEADS_, HEAD_DIM = HEAD_DIM_, GROUPS = GROUPS_, STATE = STATE_, KERNEL = KERNEL_;
  static constexpr float X_SCALE = 0.5f, B_SCALE = 1.5f, C_SCALE = 0.75f, STEP_SCALE = 1.25f, GATE_SCALE = 0.625f;
  static constexpr bool GATED = GATE, BIAS = B;
};
template <int WIDTH_, int GROUPS_, bool GATE>
struct Groups {
  static constexpr int WIDTH = WIDTH_, GROUPS = GROUPS_, GATED_AT = 12, GATE_COLS = WIDTH + 20;
  static constexpr float EPS = 1e-5f, GATE_SCALE = 0.625f;
  static constexpr bool GATED = GATE;
};

// The convolution of a channel at the last of some positions, whose inputs are `of(position)`.
template <class Of>
static double convolved(const std::vector<float>& taps, int kernel, int channel, int positions, double bias, Of of) {
  double sum = bias;
  for (int t = 0; t < kernel; t++)
    if (positions - kernel + t >= 0) sum += of(positions - kernel + t) * taps[channel * kernel + t];
  return sum;
}

// A text of short convolutions: inputs of all positions, each b, c and x.
template <class G>
struct ConvolveText {
  static constexpr int COLS = 3 * G::CHANNELS, OUT = G::CHANNELS, STATE = G::CHANNELS * (G::KERNEL - 1), INDICES = (G::CHANNELS + 7) / 8;
  std::vector<float> taps, bias;
  std::vector<std::vector<float>> inputs;
  explicit ConvolveText(u64& seed) : taps(numbers(seed, G::CHANNELS * G::KERNEL)), bias(numbers(seed, G::CHANNELS)) {}
  void constants_of(Entry& e) const { e.conv = constant(taps), e.conv_bias = constant(bias); }
  double own(int position, int channel) const { return double(inputs[position][channel]) * inputs[position][2 * G::CHANNELS + channel]; }
  std::vector<double> step(const std::vector<float>& x) {
    inputs.push_back(x);
    std::vector<double> out;
    for (int c = 0; c < G::CHANNELS; c++)
      out.push_back(x[G::CHANNELS + c] * convolved(taps, G::KERNEL, c, inputs.size(), G::BIAS ? bias[c] : 0.f, [&](int p) { return own(p, c); }));
    return out;
  }
  std::vector<double> state() const {
    std::vector<double> all;
    for (int c = 0; c < G::CHANNELS; c++)
      for (int t = 1; t < G::KERNEL; t++) {
        const int position = int(inputs.size()) - G::KERNEL + t;
        all.push_back(position >= 0 ? own(position, c) : 0.);
      }
    return all;
  }
};

// A text of Mamba-2: inputs of all positions, each the gate, x, b, c and the steps; S of all heads.
template <class G>
struct ScanText {
  static constexpr int INNER = G::HEADS * G::HEAD_DIM, GROUPED = G::GROUPS * G::STATE, CHANNELS = INNER + 2 * GROUPED;
  static constexpr int COLS = INNER + CHANNELS + G::HEADS, OUT = INNER, OWN = G::HEAD_DIM + 2 * G::STATE, INDICES = G::HEADS;
  static constexpr int STATE = G::HEADS * (G::STATE * G::HEAD_DIM + (G::KERNEL - 1) * OWN);
  std::vector<float> taps, bias, a_log, d, dt_bias;
  std::vector<std::vector<float>> inputs;
  std::vector<double> s;
  explicit ScanText(u64& seed)
      : taps(numbers(seed, CHANNELS * G::KERNEL)), bias(numbers(seed, CHANNELS)), a_log(numbers(seed, G::HEADS)), d(numbers(seed, G::HEADS)),
        dt_bias(numbers(seed, G::HEADS)), s(G::HEADS * G::STATE * G::HEAD_DIM) {}
  void constants_of(Entry& e) const {
    e.conv = constant(taps), e.conv_bias = constant(bias), e.a_log = constant(a_log), e.d = constant(d), e.dt_bias = constant(dt_bias);
  }
  double own(int position, int channel) const {
    const float scale = channel < INNER ? G::X_SCALE : channel < INNER + GROUPED ? G::B_SCALE : G::C_SCALE;
    return double(scale) * inputs[position][INNER + channel];
  }
  std::vector<double> step(const std::vector<float>& x) {
    inputs.push_back(x);
    std::vector<double> mixed, out;
    for (int c = 0; c < CHANNELS; c++)
      mixed.push_back(silu_of(convolved(taps, G::KERNEL, c, inputs.size(), G::BIAS ? bias[c] : 0.f, [&](int p) { return own(p, c); })));
    for (int h = 0; h < G::HEADS; h++) {
      const double by = std::log1p(std::exp(double(G::STEP_SCALE) * x[INNER + CHANNELS + h] + dt_bias[h]));
      const double decay = std::exp(-std::exp(double(a_log[h])) * by);
      const double* const b = &mixed[INNER + h / (G::HEADS / G::GROUPS) * G::STATE];
      for (int i = 0; i < G::HEAD_DIM; i++) {
        const double own = mixed[h * G::HEAD_DIM + i];
        double y = d[h] * own;
        for (int n = 0; n < G::STATE; n++) {
          double& kept = s[(h * G::STATE + n) * G::HEAD_DIM + i];
          kept = decay * kept + by * own * b[n];
          y += kept * b[GROUPED + n];
        }
        out.push_back(G::GATED ? y * silu_of(double(G::GATE_SCALE) * x[h * G::HEAD_DIM + i]) : y);
      }
    }
    return out;
  }
  std::vector<double> state() const {
    std::vector<double> all;
    for (int h = 0; h < G::HEADS; h++) {
      all.insert(all.end(), &s[h * G::STATE * G::HEAD_DIM], &s[h * G::STATE * G::HEAD_DIM] + G::STATE * G::HEAD_DIM);
      const int group = h / (G::HEADS / G::GROUPS) * G::STATE;
      for (int t = 1; t < G::KERNEL; t++)
        for (int i = 0; i < OWN; i++) {
          const int position = int(inputs.size()) - G::KERNEL + t, of_group = INNER + group + (i - G::HEAD_DIM) % G::STATE;
          const int channel = i < G::HEAD_DIM ? h * G::HEAD_DIM + i : i < G::HEAD_DIM + G::STATE ? of_group : of_group + GROUPED;
          all.push_back(position >= 0 ? own(position, channel) : 0.);
        }
    }
    return all;
  }
};

template <class G>
static std::vector<double> expected_groups(const std::vector<float>& x, const std::vector<float>& gate, const std::vector<float>& gains) {
  constexpr int GROUP = G::WIDTH / G::GROUPS;
  std::vector<double> out;
  for (int i = 0; i < G::WIDTH; i++) {
    double squares = 0;
    for (int k = 0; k < GROUP; k++) squares += double(x[i / GROUP * GROUP + k]) * x[i / GROUP * GROUP + k] / GROUP;
    const double y = x[i] / std::sqrt(squares + G::EPS) * gains[i];
    out.push_back(G::GATED ? y * silu_of(double(G::GATE_SCALE) * gate[G::GATED_AT + i]) : y);
  }
  return out;
}
