// embed: residual[i] = scale * table[token][i]; publishes it.
//
// table (VOCAB, HIDDEN)  one row of it (table.cuh)
// residual               fp32, the columns this block owns; all of them if REPLICATED
// out (HIDDEN)           packets; none if REPLICATED
//
// owner    of a column: the block with its unit of 8; if REPLICATED, every block writes all columns for itself
// moves    one row of the table; HIDDEN values out in all
// assumes  `select` of this step has put the token into shared memory
#pragma once

template <class M, class G>
struct Embed {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const TableRow<M, G> row(c.template constant<u8>(e.table), u32(c.state().token));
    const int first = G::REPLICATED ? 0 : int(uniform(e.lo)) * 8;
    const int last = G::REPLICATED ? G::HIDDEN : min(int(uniform(e.hi)) * 8, G::HIDDEN);
#pragma unroll(G::REPLICATED ? 4 : 1)
    for (int base = first; base < last; base += M::WARPS * 64) {
      const int col = base + c.tid() * 2;
      if (col >= last) continue;
      float a = row[col] * G::SCALE, b = col + 1 < last ? row[col + 1] * G::SCALE : 0.f;
      float* mine = c.residual() + e.residual + (col - first);
      mine[0] = a;
      mine[1] = b;
      if constexpr (!G::REPLICATED) publish_columns<G::HIDDEN>(c, e.out, col, a, b);
    }
    c.barrier();
  }
};
