// Owns sampling's arithmetic. src/sample specifies it to the bit, so every operation is rounded by itself (no contraction to
// fma), and no library function takes part. Decimals name the fp32 coefficients of src/sample/noise.rs exactly.
#pragma once

// Philox4x32 with 10 rounds: four random words of (c[0] .. c[3]), in place. Callers with many ids unroll the rounds.
template <int UNROLL = 1>
__device__ __forceinline__ void philox(u32 (&c)[4], u32 k0, u32 k1) {
#pragma unroll UNROLL
  for (int round = 0; round < 10; round++) {
    const u64 p0 = u64(0xD2511F53u) * c[0], p1 = u64(0xCD9E8D57u) * c[2];
    c[0] = u32(p1 >> 32) ^ c[1] ^ k0;
    c[2] = u32(p0 >> 32) ^ c[3] ^ k1;
    c[1] = u32(p1);
    c[3] = u32(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// a * b + c as two rounded operations.
__device__ __forceinline__ float mul_add(float a, float b, float c) { return __fadd_rn(__fmul_rn(a, b), c); }

// Natural logarithm of a positive normal number.
__device__ __forceinline__ float ln_f32(float x) {
  const u32 shifted = __float_as_uint(x) - 0x3F3504F3u;
  const float e = float(int(shifted) >> 23);
  const float f = __fsub_rn(__uint_as_float((shifted & 0x007FFFFFu) + 0x3F3504F3u), 1.f);
  const float z = __fmul_rn(f, f);
  float p = 0.070376836f;
  p = mul_add(p, f, -0.1151461f);
  p = mul_add(p, f, 0.116769984f);
  p = mul_add(p, f, -0.12420141f);
  p = mul_add(p, f, 0.14249323f);
  p = mul_add(p, f, -0.16668057f);
  p = mul_add(p, f, 0.20000714f);
  p = mul_add(p, f, -0.24999994f);
  p = mul_add(p, f, 0.3333333f);
  float y = __fmul_rn(__fmul_rn(f, z), p);
  y = __fadd_rn(y, __fmul_rn(e, -0.00021219444f));
  y = __fsub_rn(y, __fmul_rn(z, 0.5f));
  return __fadd_rn(__fadd_rn(f, y), __fmul_rn(e, 0.6933594f));
}

// e^d / 2^n and n, for d from -30 to 0.
__device__ __forceinline__ float exp_fraction(float d, float& n) {
  n = floorf(mul_add(d, 1.44269502f, 0.5f));
  float r = __fsub_rn(d, __fmul_rn(n, 0.6933594f));
  r = __fsub_rn(r, __fmul_rn(n, -0.00021219444f));
  const float z = __fmul_rn(r, r);
  float p = 0.00019875691f;
  p = mul_add(p, r, 0.0013981999f);
  p = mul_add(p, r, 0.008333452f);
  p = mul_add(p, r, 0.041665796f);
  p = mul_add(p, r, 0.16666666f);
  p = mul_add(p, r, 0.5f);
  return __fadd_rn(__fadd_rn(__fmul_rn(p, z), r), 1.f);
}
// e^d for d <= 0; 0 below -30. Out of line: loops over all ids are unrolled around it.
__device__ __noinline__ float exp_f32(float d) {
  if (d < -30.f) return 0.f;
  float n;
  const float y = exp_fraction(d, n);
  return __fmul_rn(y, __uint_as_float(u32(int(n) + 127) << 23));
}

// Standard exponential and Gumbel variates of a random word.
__device__ __forceinline__ float exponential(u32 x) {
  constexpr float UNIT = 2.3283064365386963e-10f; // 2^-32
  const bool is_high = x >= 0x80000000u;
  const float v = __fmul_rn(__fadd_rn(__uint2float_rn(is_high ? ~x : x), 0.5f), UNIT), w = __fsub_rn(1.f, v);
  const float ln = ln_f32(is_high ? v : w);
  if (is_high) return -ln;
  return w == 1.f ? v : __fmul_rn(-ln, __fdiv_rn(v, __fsub_rn(1.f, w)));
}
__device__ __forceinline__ float gumbel(u32 x) { return -ln_f32(exponential(x)); }

// The random word of an id for the token at `position` of sequence 0.
__device__ __forceinline__ u32 random_word(u64 seed, u32 position, u32 id) {
  u32 words[4] = {position, 0u, id / 4, 0u};
  philox(words, u32(seed), u32(seed >> 32));
  // By selection: an index would put the words into local memory.
  const u32 low = id & 1 ? words[1] : words[0], high = id & 1 ? words[3] : words[2];
  return id & 2 ? high : low;
}
// The noise of this id. Out of line: greedy decoding does not call it, and keeps its registers.
__device__ __noinline__ float noise(u64 seed, u32 position, u32 id) { return gumbel(random_word(seed, position, id)); }

// Unnormalised probability in units of 2^-40.
__device__ __forceinline__ u64 weight_of(float score, float score_max) {
  const float ratio = score == score_max ? 1.f : exp_f32(__fsub_rn(score, score_max));
  return u64(__fmul_rn(ratio, 1099511627776.f));
}

// Rank of an id: the larger, the better. The score decides, then the lower id. 0: never chosen.
__device__ __forceinline__ u64 rank_of(float score, u32 id) {
  if (!(score > -__uint_as_float(0x7f800000u))) return 0;
  const u32 bits = __float_as_uint(__fadd_rn(score, 0.f));
  return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | u32(~id);
}
__device__ __forceinline__ float score_of(u64 rank) {
  const u32 key = u32(rank >> 32);
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ u32 id_of(u64 rank) { return ~u32(rank); }

// ceil(total * fraction / 2^32), for total below 2^63.
__device__ __forceinline__ u64 part_of(u64 total, u32 fraction) {
  const u64 low = (total & 0xffffffffu) * fraction, high = (total >> 32) * fraction;
  return high + (low >> 32) + ((low & 0xffffffffu) != 0);
}
