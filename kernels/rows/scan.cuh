// scan of rows: see ops/scan.cuh. A task takes the rows of a head whose sequences are in its part, as rows/mix.cuh does it.
//
// gate, x, b, c, step   words of the rows, side by side in one buffer
// out (ROWS, ..)        words
#pragma once

template <class M, class G>
struct ScanOfRows {
  typedef Scan<M, G> One;
  static constexpr int IN_COLS = One::COLS, SCALAR_COLS = One::COLS, SCALARS = 1, PARTS = G::PARTS, OUT_COLS = One::INNER, HEAD_COLS = G::HEAD_DIM;
  static __device__ __forceinline__ u32 scalars(const Entry& e) { return e.x; }
  static __device__ __forceinline__ int scalar_col(const Context<M>&, int head) { return One::STEPS_AT + head; }
};
template <class M, class G>
struct RowsScan : RowsStates<M, ScanOfRows<M, G>> {};
