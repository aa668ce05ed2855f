// join: embedded[i] = scale * table[token][i], given[i] = what the host gives for this step, residual[i] = 0. A draft begins with it.
//
// table (VOCAB, HIDDEN)  one row of it (table.cuh)
// given (HIDDEN)         fp32, a row for each step of the launch, which the host has written before it
// residual               fp32, the columns this block owns
// out, aux (HIDDEN)      packets: the embedded token, and what is given
//
// owner    of a column: the block with its unit of 8
// moves    one row of the table and one that is given; 2 * HIDDEN values out in all
// assumes  `select` of this step has put the token into shared memory; the cache is that of one text, and has no pages
#pragma once

// Of a kernel that begins with `join`.
struct GivenParams : Params {
  const float* given; // [steps][HIDDEN] what a step reads in addition to its token
  u32 ahead; // positions that the text is ahead of the cache
  u32 reserved_of_given; // no meaning yet
};
static_assert(sizeof(GivenParams) == 200, "the host fills this struct");

template <class M, class G>
struct Join {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const TableRow<M, G> row(c.template constant<u8>(e.table), u32(c.state().token));
    const float* given = static_cast<const GivenParams&>(c.p).given + u64(c.tag - c.p.tag) * G::HIDDEN;
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::HIDDEN);
#pragma unroll 1
    for (int base = first; base < last; base += M::WARPS * 64) {
      const int col = base + c.tid() * 2;
      if (col >= last) continue;
      const bool both = col + 1 < last;
      float* mine = c.residual() + e.residual + (col - first);
      mine[0] = 0.f;
      mine[1] = 0.f;
      publish_columns<G::HIDDEN>(c, e.out, col, row[col] * G::SCALE, both ? row[col + 1] * G::SCALE : 0.f);
      publish_columns<G::HIDDEN>(c, e.aux, col, given[col], both ? given[col + 1] : 0.f);
    }
    c.barrier();
  }
};

// The head of a draft: its noise is that of the token's position in the text, so that a draft chooses as its model does.
template <class Head>
struct InText {
  template <class M>
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const u32 ahead = static_cast<const GivenParams&>(c.p).ahead;
    c.position += ahead;
    Head::run(c, e);
    c.position -= ahead;
  }
};
