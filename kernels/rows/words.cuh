// Owns words: how rows of a step travel between SMs.
//
// A word is 4 bytes, two bf16 values or one fp32 value, stored and loaded relaxed and whole. A word of all ones says that
// nothing is there yet, so a reader's load is its wait. No value has these bits: conversion to bf16 writes a NaN as 0x7fff,
// and an fp32 value with these bits is stored as 0x7fffffff.
//
// A buffer of words has two phases, which steps use in turn. The owner of a word stores it, and clears the same word of the other
// phase for the step after. Words of rows that take no part are not stored, but cleared all the same: the row may have taken
// part in the step before, and take part in the step after. Two facts make that sound (src/ir/mod.rs, "words"):
// - reads of the step before are over: the SM has seen all arg-max pairs of that step, and each SM publishes its own after its last read;
// - the clear is visible before the next step reads: it lies before this step's release, the read after the next step's acquire.
//   So a reader finds all ones or the value of its own step, never one of two steps before.
// Of several devices, the owner does both in the memory of each, and a reader loads from that of its own. Both facts are about all SMs of all devices.
//
// Layout: 8 rows by 64 bytes at a time, row by row, as the lanes of a warp read them: 16 bytes each, 8 lanes a cache line. Reads
// matter more than stores: every SM reads what one SM stores.
#pragma once

constexpr u32 NO_WORD = ~0u;

// Places within a buffer of COLS columns.
template <class M, int COLS>
struct Words {
  static constexpr int ELEM = ElemOf<M::WIRE>::BYTES;
  static constexpr int PIECE_COLS = 16 / ELEM, WORD_COLS = 4 / ELEM;
  static constexpr int PIECES = ceil_div(COLS, PIECE_COLS);
  // A span is 64 bytes of 8 rows.
  static constexpr int SPAN_PIECES = 4;
  static constexpr u32 SPAN_BYTES = 512, GROUP_BYTES = u32(ceil_div(PIECES, SPAN_PIECES)) * SPAN_BYTES;
  static constexpr u32 PHASE_BYTES = GROUP_BYTES * (M::ROWS / 8);
  // Byte of column `col` (even where words hold two) of `row`.
  static __device__ __forceinline__ u32 at(int row, int col) {
    return piece_at(row, col / PIECE_COLS) + u32(col % PIECE_COLS) * ELEM;
  }
  static __device__ __forceinline__ u32 piece_at(int row, int piece) {
    return u32(row / 8) * GROUP_BYTES + u32(piece / SPAN_PIECES) * SPAN_BYTES + u32(row % 8) * 64 + u32(piece % SPAN_PIECES) * 16;
  }
};

// The phase of the running step of a buffer that begins at packet `at` of the exchange.
template <class M, int COLS>
__device__ __forceinline__ u8* words_of(const Context<M>& c, u32 at) {
  return reinterpret_cast<u8*>(c.p.exchange + at) + (c.tag & 1) * Words<M, COLS>::PHASE_BYTES;
}

// Stores the word at byte `at` of the phase `to` if its row takes part, and clears it in the other phase.
template <class M, int COLS>
__device__ __forceinline__ void publish_word(const Context<M>& c, u8* to, u32 at, u32 payload, bool takes_part) {
  if (M::WIRE == Elem::F32 && payload == NO_WORD) payload = 0x7fffffffu;
  u8* other = (c.tag & 1) ? to - Words<M, COLS>::PHASE_BYTES : to + Words<M, COLS>::PHASE_BYTES;
  if constexpr (peers<M>() > 0) {
#pragma unroll
    for (int i = 0; i < peers<M>(); i++) {
      if (takes_part) store_word(reinterpret_cast<u32*>(in_exchange_of(c, i, to + at)), payload);
      store_word(reinterpret_cast<u32*>(in_exchange_of(c, i, other + at)), NO_WORD);
    }
  }
  if (takes_part) store_word(reinterpret_cast<u32*>(to + at), payload);
  store_word(reinterpret_cast<u32*>(other + at), NO_WORD);
}

// Publishes columns `col` (even) and `col + 1` of a row that takes part in the phase `to`, and clears those of the other phase. Readers take
// whole pieces, so the owner of the last column fills the rest of its piece with zeros.
template <int COLS, class M>
__device__ __forceinline__ void publish_pair(const Context<M>& c, u8* to, int row, int col, float a, float b, bool takes_part = true) {
  typedef Words<M, COLS> W;
  if (col + 1 >= COLS) b = 0.f;
  const auto store = [&](int at, float x, float y) {
    if constexpr (M::WIRE == Elem::BF16) {
      publish_word<M, COLS>(c, to, W::at(row, at), bf16_pair(x, y), takes_part);
    } else {
      publish_word<M, COLS>(c, to, W::at(row, at), __float_as_uint(x), takes_part);
      publish_word<M, COLS>(c, to, W::at(row, at + 1), __float_as_uint(y), takes_part);
    }
  };
  store(col, a, b);
  if constexpr (COLS % W::PIECE_COLS != 0)
    if (col + 2 >= COLS)
      for (int rest = col + 2; rest < W::PIECES * W::PIECE_COLS; rest += 2) store(rest, 0.f, 0.f);
}
// The same for a row that takes no part: it only clears.
template <int COLS, class M>
__device__ __forceinline__ void clear_pair(const Context<M>& c, u8* to, int row, int col) {
  publish_pair<COLS>(c, to, row, col, 0.f, 0.f, false);
}

// Values 2n and 2n + 1 of a piece, or value n of fp32.
template <class M>
__device__ __forceinline__ void unpack_piece(const uint4 v, float (&x)[16 / ElemOf<M::WIRE>::BYTES]) {
  const u32 word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (M::WIRE == Elem::BF16) {
      x[2 * i] = bf16_lo(word[i]);
      x[2 * i + 1] = bf16_hi(word[i]);
    } else {
      x[i] = __uint_as_float(word[i]);
    }
  }
}
