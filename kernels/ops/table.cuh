// A row of the table of embeddings, for the ops that look one up.
//
// table (VOCAB, HIDDEN)  2 or 4 bytes a value; or ROW_BYTES a row: codes, scales of groups, zero points, the row's scale (src/format.rs)
#pragma once

// A row of the table: operator[] has the value of a column.
template <class M, class G, class = int>
struct TableRow {
  typedef typename ElemOf<M::WEIGHT>::type W;
  const W* row;
  // `table` is where the table begins.
  __device__ __forceinline__ TableRow(const u8* table, u32 token) : row(reinterpret_cast<const W*>(table) + u64(token) * G::HIDDEN) {}
  __device__ __forceinline__ float operator[](int col) const { return widen(row[col]); }
};
// Of codes: (scale of the group * scale of the row) * (code - zero point), or scale * code + minimum, in fp32 as the packer means them.
template <class M, class G>
struct TableRow<M, G, decltype(int(G::CODE))> {
  typedef Decode<G::CODE> Codes;
  static constexpr int SCALE_BYTES = SCALE_BYTES_OF<G::SCALE_CODE>;
  const u8* row;
  float row_scale;
  __device__ __forceinline__ TableRow(const u8* table, u32 token) : row(table + u64(token) * G::ROW_BYTES) {
    row_scale = G::ROW_SCALES ? *reinterpret_cast<const float*>(row + G::ROW_SCALE_AT) : 1.f;
  }
  __device__ __forceinline__ float operator[](int col) const {
    const u32 code = Codes::BITS == 4 ? u32(row[col / 2]) >> col % 2 * 4 & 15 : u32(row[col]);
    const float value = Codes::of_code(code);
    if constexpr (G::GROUP_K == 0) {
      return row_scale * (value - Codes::ZERO);
    } else {
      const int group = col / G::GROUP_K;
      const u8* at = row + G::SCALES_AT + group * SCALE_BYTES;
      u32 bits = 0;
#pragma unroll
      for (int i = 0; i < SCALE_BYTES; i++) bits |= u32(at[i]) << 8 * i;
      if constexpr (MINIMA_OF<G>) {
        const u8* least = row + G::ZEROS_AT + group * SCALE_BYTES;
        u32 of = 0;
#pragma unroll
        for (int i = 0; i < SCALE_BYTES; i++) of |= u32(least[i]) << 8 * i;
        return scale_value<G::SCALE_CODE>(bits) * value + scale_value<G::SCALE_CODE>(of);
      }
      const float zero = G::ZEROS ? Codes::zero(row[G::ZEROS_AT + group]) : Codes::ZERO;
      return (scale_value<G::SCALE_CODE>(bits) * row_scale) * (value - zero);
    }
  }
};
