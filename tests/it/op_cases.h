// What cases of ops have in common: random inputs, constants, and the line that is printed.
#pragma once

static std::vector<u8> constants;

static u32 word_of(u64& state) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return u32(state >> 32);
}
// Uniform in -1 to 1, and exact in bf16.
static float number(u64& state) { return float(int(word_of(state) % 255) - 127) / 128.f; }
static std::vector<float> numbers(u64& state, size_t n) {
  std::vector<float> all(n);
  for (float& v : all) v = number(state);
  return all;
}
// A constant of its own, as entries name it.
static u32 constant(const std::vector<float>& values) {
  const size_t at = constants.size();
  constants.resize(at + (values.size() * 4 + OFFSET_BYTES - 1) / OFFSET_BYTES * OFFSET_BYTES + 16 * OFFSET_BYTES);
  std::memcpy(constants.data() + at, values.data(), values.size() * 4);
  return u32(at / OFFSET_BYTES);
}

static void report(const char* name, const std::vector<double>& expected, const std::vector<double>& found) {
  double worst = 0, scale = 1e-30;
  for (size_t i = 0; i < expected.size(); i++) {
    scale = std::fmax(scale, std::fabs(expected[i]));
    const double difference = std::fabs(expected[i] - found.at(i));
    if (!std::isnan(worst) && !(difference <= worst)) worst = difference; // a NaN stays
  }
  std::printf("%s %zu %.3e\n", name, expected.size(), worst / scale);
}
