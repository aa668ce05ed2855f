// Norms and heads in double precision, and shapes of attention.
#pragma once

#include <type_traits>

// x * rsqrt(mean(x^2) + eps) * weight; or (x - mean) * rsqrt(var + eps) * weight + bias.
static std::vector<double> normalised(Norm norm, const std::vector<float>& x, const std::vector<float>& weight,
                                      const std::vector<float>& bias, double eps) {
  std::vector<double> y(x.begin(), x.end());
  if (norm == Norm::NONE) return y;
  double mean = 0, squares = 0;
  if (norm == Norm::LAYER)
    for (double v : y) mean += v / y.size();
  for (double v : y) squares += (v - mean) * (v - mean) / y.size();
  for (size_t i = 0; i < y.size(); i++)
    y[i] = (y[i] - mean) / std::sqrt(squares + eps) * weight[i] + (norm == Norm::LAYER ? bias[i] : 0.);
  return y;
}

template <int HEADS_, int GROUP_, int PER_TASK, int DIM_, int ROTARY_, bool PAIRS, HeadNorm N, u32 W, int SPLITS_>
struct Heads {
  static constexpr int HEADS = HEADS_, GROUP = GROUP_, HEADS_PER_TASK = PER_TASK, DIM = DIM_, PITCH = (DIM_ + 3) / 4 * 4;
  static constexpr int ROTARY = ROTARY_, SPLITS = SPLITS_, CHUNK_ROWS = 16, WARPS_PER_HEAD = 1;
  static constexpr float SCALE = 0.3f, SOFTCAP = 0.f, Q_EPS = 1e-5f, K_EPS = 1e-6f;
  static constexpr u32 WINDOW = W;
  static constexpr bool INTERLEAVED = PAIRS, PREFETCH_V = false, SWIZZLED = false;
  static constexpr HeadNorm Q_NORM = N, K_NORM = N;
};
// What few models have: sinks, queries scaled by position, norms after RoPE, and a gate of the output.
template <class H>
struct Sunk : H {
  static constexpr bool SINKS = true;
};
template <class H>
struct Scaled : H {
  static constexpr float QUERY_BETA = 0.5f;
  static constexpr u32 QUERY_ORIGINAL = 7;
};
template <class H>
struct After : H {
  static constexpr bool NORM_AFTER_ROPE = true;
};
template <class H>
struct Featured : Sunk<Scaled<After<H>>> {};
template <class H>
struct Gated : H {
  typedef H Ungated;
  static constexpr int GATE_AT = (H::HEADS + 2 * (H::HEADS / H::GROUP)) * H::DIM;
};
// Of split attention the merge has the gate.
template <class G, class = void>
struct SplitOf {
  typedef G type;
};
template <class G>
struct SplitOf<G, typename std::enable_if<(G::GATE_AT > 0 && G::SPLITS > 1)>::type> {
  typedef typename G::Ungated type;
};
template <class G>
static double expected_query_factor(u32 position) {
  if constexpr (QUERY_SCALE_OF<G>) return 1 + G::QUERY_BETA * std::log(1. + position / G::QUERY_ORIGINAL);
  return 1;
}
// What dimension `d` of head `h` is multiplied by.
template <class G>
static double expected_gate(const std::vector<float>& columns, int h, int d) {
  if constexpr (GATED_OF<G>) return 1 / (1 + std::exp(-double(columns[G::GATE_AT + h * G::DIM + d])));
  return 1;
}
// A head as attention uses it: norm, then RoPE; or the other way round.
template <class G>
static std::vector<double> prepared(const std::vector<float>& all, int first, int heads_at, int heads, int head,
                                    const std::vector<float>& weight, const std::vector<float>& angles, double eps) {
  std::vector<double> x(all.begin() + first + head * G::DIM, all.begin() + first + (head + 1) * G::DIM);
  const auto norm = [&] {
    if (G::Q_NORM == HeadNorm::NONE) return;
    double mean = 0, squares = 0;
    if (G::Q_NORM == HeadNorm::CENTRED)
      for (double v : x) mean += v / G::DIM;
    if (G::Q_NORM == HeadNorm::PROJECTION)
      for (int i = 0; i < heads * G::DIM; i++) squares += double(all[heads_at + i]) * all[heads_at + i] / (heads * G::DIM);
    else
      for (double v : x) squares += (v - mean) * (v - mean) / G::DIM;
    for (int d = 0; d < G::DIM; d++)
      x[d] = (x[d] - mean) / std::sqrt(squares + eps) * weight[G::Q_NORM == HeadNorm::HEAD ? d : head * G::DIM + d];
  };
  if (!NORM_AFTER_ROPE_OF<G>) norm();
  for (int i = 0; i < G::ROTARY / 2; i++) {
    const int lo = G::INTERLEAVED ? 2 * i : i, hi = G::INTERLEAVED ? 2 * i + 1 : i + G::ROTARY / 2;
    const double a = x[lo], b = x[hi], cosine = angles[i], sine = angles[G::ROTARY / 2 + i];
    x[lo] = a * cosine - b * sine;
    x[hi] = b * cosine + a * sine;
  }
  if (NORM_AFTER_ROPE_OF<G>) norm();
  return x;
}
