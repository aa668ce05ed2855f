// Caches of each type as attention keeps them, and shapes of attention over them.
#pragma once

#include <algorithm>

// As tensor cores take it.
template <class H, int WARPS_PER_HEAD_, bool PREFETCH>
struct Swizzled : H {
  static constexpr int PITCH = H::DIM, WARPS_PER_HEAD = WARPS_PER_HEAD_;
  static constexpr bool SWIZZLED = true, PREFETCH_V = PREFETCH;
};
template <class H>
struct Capped : H {
  static constexpr float SOFTCAP = 2.f;
};
// A machine with a cache of another type.
template <class M, Elem C>
struct Cached : M {
  static constexpr Elem CACHE = C;
};
// What codes of keys, and of values, of each KV head are multiplied by; 1 of other types.
template <class M>
static std::vector<float> scales_of(int kv_heads) {
  std::vector<float> scales;
  for (int i = 0; i < 2 * kv_heads; i++) scales.push_back(M::CACHE == Elem::FP8 ? 0.3f + 0.17f * i : 1.f);
  return scales;
}
// What the codes of e4m3 up to the largest one stand for, in ascending order.
static std::vector<double> e4m3_sizes() {
  std::vector<double> sizes;
  for (int code = 0; code <= 0x7e; code++) sizes.push_back(code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10));
  return sizes;
}
// The nearest e4m3 code by search, ties to the even one.
static u8 nearest_e4m3(double v) {
  static const std::vector<double> sizes = e4m3_sizes();
  const double size = std::fabs(v);
  // The first code that is not below, and the one before.
  int best = int(std::lower_bound(sizes.begin(), sizes.end() - 1, size) - sizes.begin());
  if (best > 0) {
    const double further = std::fabs(sizes[best - 1] - size) - std::fabs(sizes[best] - size);
    if (further < 0 || (further == 0 && best % 2 == 1)) best--;
  }
  return u8(best | (std::signbit(v) ? 0x80 : 0));
}
// A value as a cache keeps it; of codes the quotient is one of fp32.
template <class M>
static double kept(double v, float scale) {
  if constexpr (M::CACHE == Elem::FP8) {
    return double(widen(e4m3{nearest_e4m3(float(v) / scale)})) * scale;
  } else {
    typename ElemOf<M::CACHE>::type narrowed;
    narrow(float(v), &narrowed);
    return double(widen(narrowed));
  }
}
// Where dimension `d` of the row of a position lies, in values.
template <class M, class G>
static u32 place_in_row(u32 position, u32 d) {
  constexpr int ELEM = ElemOf<M::CACHE>::BYTES, PIECE = 16 / ELEM;
  return G::SWIZZLED ? (d / PIECE ^ swizzle_of<G::PITCH * ELEM>(position)) * PIECE + d % PIECE : d;
}
template <class M, class G>
static void keep(float v, float scale, u8* row, u32 position, int d) {
  auto* to = reinterpret_cast<typename ElemOf<M::CACHE>::type*>(row) + place_in_row<M, G>(position, d);
  if constexpr (M::CACHE == Elem::FP8) to->bits = nearest_e4m3(v / scale);
  else narrow(v, to);
}
template <class M, class G>
static double found_in(float scale, const u8* row, u32 position, int d) {
  return double(widen(reinterpret_cast<const typename ElemOf<M::CACHE>::type*>(row)[place_in_row<M, G>(position, d)])) * scale;
}
