// Matrices of codes: how the pack has them, by their definition, and random ones.
#pragma once

// What a format adds to the product P.
template <class P, Code C, int GROUP, ScaleCode S, bool Z, bool R>
struct CodedAs : P {
  static constexpr Code CODE = C;
  static constexpr ScaleCode SCALE_CODE = S;
  static constexpr int GROUP_K = GROUP;
  static constexpr bool ZEROS = Z, ROW_SCALES = R;
  static constexpr int GRANULE_K = C == Code::INT8 || C == Code::E4M3 ? 64 : 128;
  static constexpr int GRANULES = (P::K + GRANULE_K - 1) / GRANULE_K;
  static constexpr int GROUPS = GROUP == 0 ? 0 : GROUP < GRANULE_K ? GRANULE_K / GROUP : 1;
  static constexpr int SCALE_BYTES = S == ScaleCode::F32 ? 4 : S == ScaleCode::F16 || S == ScaleCode::BF16 ? 2 : 1;
  static constexpr int GRANULE_BYTES = 512 + (8 * GROUPS * (SCALE_BYTES + (Z ? 1 : 0)) + 15) / 16 * 16;
};

// The same with minima of groups.
template <class P, Code C, int GROUP, ScaleCode S>
struct LeastAs : CodedAs<P, C, GROUP, S, false, false> {
  typedef CodedAs<P, C, GROUP, S, false, false> Base;
  static constexpr bool MINIMA = true;
  // Of six bits: 4 bytes for a row, and 3 for each two groups.
  static constexpr int OF_ROW = S == ScaleCode::F16X6 ? 4 + 3 * Base::GROUPS / 2 : Base::GROUPS * 2 * Base::SCALE_BYTES;
  static constexpr int GRANULE_BYTES = 512 + (8 * OF_ROW + 15) / 16 * 16;
};

// The value of a code, by its definition.
static double value_of(Code code, u32 c) {
  if (code == Code::INT8) return double(i32(c << 24) >> 24);
  if (code == Code::INT4) return c;
  const int mantissa_bits = code == Code::E4M3 ? 3 : 1, bias = code == Code::E4M3 ? 7 : 1;
  const u32 sign = code == Code::E4M3 ? c >> 7 : c >> 3, rest = code == Code::E4M3 ? c & 127 : c & 7;
  const int e = int(rest >> mantissa_bits), m = int(rest & ((1u << mantissa_bits) - 1)), one = 1 << mantissa_bits;
  const double size = e == 0 ? std::ldexp(double(m) / one, 1 - bias) : std::ldexp(1 + double(m) / one, e - bias);
  return sign ? -size : size;
}
// Adds code `at` of the eight of 4 bits to their word. Neighbours are in its halves. Of e2m1 each bit of a pair has a place, the size from its lowest bit on and
// then the sign; that of the third pair is in the other half.
static void put_in_word(Code code, u8* word, int at, u32 c) {
  const int pair = at / 2, half = at % 2, places[4][4] = {{0, 1, 2, 9}, {4, 5, 6, 13}, {10, 11, 12, 3}, {14, 7, 8, 15}};
  for (int bit = 0; bit < 4; bit++) {
    const bool other = code == Code::E2M1 && pair == 2 && bit == 3;
    const int place = (other ? 1 - half : half) * 16 + (code == Code::E2M1 ? places[pair][bit] : pair * 4 + bit);
    word[place / 8] |= u8((c >> bit & 1) << place % 8);
  }
}
// A scale of a group, and its bytes.
static double scale_of(ScaleCode code, u32 word, u8* bytes) {
  u32 bits = 0;
  double value = 0;
  if (code == ScaleCode::F32) bits = __float_as_uint(float(word % 1000 + 1) / 777.f), value = __uint_as_float(bits);
  if (code == ScaleCode::BF16) bits = 0x3c00 + word % 512, value = __uint_as_float(bits << 16);
  if (code == ScaleCode::F16) bits = 0x2000 + word % 4096, value = std::ldexp(1 + (bits & 1023) / 1024., int(bits >> 10) - 15);
  if (code == ScaleCode::E4M3) bits = 1 + word % 100, value = value_of(Code::E4M3, bits);
  if (code == ScaleCode::E8M0) bits = 120 + word % 10, value = std::ldexp(1., int(bits) - 127);
  std::memcpy(bytes, &bits, 4);
  return value;
}

// A minimum of either sign, and its bytes.
static double least_of(ScaleCode code, u32 word, u8* bytes) {
  const double size = scale_of(code, word, bytes);
  if (word >> 31) return size;
  bytes[code == ScaleCode::F32 ? 3 : 1] |= 0x80;
  return -size;
}

// Scale and minimum of six bits, times a scale and a minimum (fp16) of the row, which come with its first group.
template <class G>
static void six_bits_of(u64& state, std::vector<u8>& granule, int row, int g, double& scale, double& least) {
  // Of two pairs, a row's low bits follow its scale and minimum.
  const int pairs = G::GROUPS / 2, at = row * pairs + g / 2, shift = g % 2 * 6;
  u8* of_row = granule.data() + 512 + row * (pairs == 2 ? 8 : 4);
  u8* low = pairs == 2 ? of_row + 4 + g / 2 * 2 : granule.data() + 512 + 32 + 2 * at;
  u8* high = granule.data() + 512 + (4 + 2 * pairs) * 8 + at;
  double whole[2];
  for (int i = 0; i < 2; i++) {
    u32 bits = 0x2000 + word_of(state) % 4096;
    if (g == 0) std::memcpy(of_row + 2 * i, &bits, 2);
    bits = of_row[2 * i] | u32(of_row[2 * i + 1]) << 8;
    whole[i] = std::ldexp(1 + (bits & 1023) / 1024., int(bits >> 10) - 15);
  }
  const u32 s = word_of(state) >> 26, m = word_of(state) >> 26;
  const u32 bits = s << shift | m << (12 + shift);
  low[0] |= u8(bits), low[1] |= u8(bits >> 8), *high |= u8(bits >> 16);
  scale = whole[0] * s, least = -whole[1] * m;
}

// Granule `j` of a unit, and its weights in `w` (ROWS, K). `rows`: the row of the matrix that each row of the unit is, or -1.
template <class G>
static std::vector<u8> random_granule(u64& state, int j, const int (&rows)[8], std::vector<double>& w) {
  constexpr int BITS = 8192 / 16 / G::GRANULE_K; // 64 bytes of a row
  std::vector<u8> granule(G::GRANULE_BYTES);
  for (int row = 0; row < 8; row++) {
    const auto weight = [&](int i) {
      const int k = j * G::GRANULE_K + i;
      return rows[row] >= 0 && k < G::K ? &w[size_t(rows[row]) * G::K + k] : nullptr;
    };
    for (int i = 0; i < G::GRANULE_K; i++) {
      // Every code comes, but the two that are no numbers. Past the end there are codes that must meet zeros.
      u32 code = word_of(state) >> (32 - BITS);
      if (G::CODE == Code::E4M3 && (code & 127) == 127) code = 3;
      // Of 32 columns a lane has eight: 16 bytes of a lane are its part of each 32, one after another.
      const int block = i / 32, lane = i % 32 / 8, at = i % 8;
      if (BITS == 8)
        granule[row * 64 + lane * 16 + block * 8 + at] = u8(code);
      else
        put_in_word(G::CODE, &granule[row * 64 + lane * 16 + block * 4], at, code);
      if (double* to = weight(i)) *to = value_of(G::CODE, code);
    }
    for (int g = 0; g < G::GROUPS; g++) {
      u8 bytes[4];
      double scale, zero = G::CODE == Code::INT4 && !MINIMA_OF<G> ? 8 : 0, least = 0;
      constexpr bool SIX = G::SCALE_CODE == ScaleCode::F16X6;
      if (SIX) {
        six_bits_of<G>(state, granule, row, g, scale, least);
      } else {
        scale = scale_of(G::SCALE_CODE, word_of(state), bytes);
        std::memcpy(granule.data() + 512 + (row * G::GROUPS + g) * G::SCALE_BYTES, bytes, G::SCALE_BYTES);
      }
      if (MINIMA_OF<G> && !SIX) {
        least = least_of(G::SCALE_CODE, word_of(state), bytes);
        std::memcpy(granule.data() + 512 + ((8 + row) * G::GROUPS + g) * G::SCALE_BYTES, bytes, G::SCALE_BYTES);
      }
      if (G::ZEROS) {
        const u8 byte = u8(word_of(state) >> (G::CODE == Code::INT4 ? 28 : 24));
        granule[512 + 8 * G::GROUPS * G::SCALE_BYTES + row * G::GROUPS + g] = byte;
        zero = G::CODE == Code::INT8 ? double(i32(u32(byte) << 24) >> 24) : byte;
      }
      for (int i = 0; i < G::GRANULE_K; i++) {
        double* to = weight(i);
        if (to && i * G::GROUPS / G::GRANULE_K == g) *to = scale * (*to - zero) + least;
      }
    }
  }
  return granule;
}
