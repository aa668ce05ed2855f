// join: embedded[i] = scale * table[token][i], given[i] = what is given for this step, residual[i] = 0. A draft begins with it.
//
// table (VOCAB, HIDDEN)  one row of it (table.cuh)
// x (HIDDEN)             packets of the step before: what its last layer left
// given (HIDDEN)         fp32, a row for each of the first steps of the launch, which the host has written before it; or what a batch kernel
//                        of the model left of rows, in words (rows/words.cuh), with the final norm of the model. Later steps: x with that of the draft
// residual               fp32, the columns this block owns
// out, aux (HIDDEN)      packets: the embedded token, and what is given
//
// owner    of a column: the block with its unit of 8
// moves    one row of the table and one that is given; HIDDEN values of the step before into each block; 2 * HIDDEN values out in all
// assumes  `select` of this step has put the token into shared memory; the cache is that of one text, and has no pages; RMS norms
//
// Every step but the first one of a launch waits for what the step before left, whether it goes on with it or not: the proof counts on that.
#pragma once

// Of a kernel that begins with `join`.
struct GivenParams : Params {
  const float* given; // [steps][HIDDEN] what the first steps read in addition to their tokens; null: what a model left, with its norm
  const u8* left; // words of rows that a batch kernel of the model left
  const float* norm_of_model; // [HIDDEN] of the final norm of the model
  const float* norm; // [HIDDEN] of that of the draft
  float eps_of_model; // of the norm of the model
  float eps; // of that of the draft
  u32 left_row; // row of `left` that the first step reads; the next step reads the next row
  u32 given_steps; // steps that are given something; later ones go on with what the step before left
  u32 ahead; // positions that the text is ahead of the cache
  u32 only_reads; // no step chooses a token: all are in `prompt`
};
static_assert(sizeof(GivenParams) == 240, "the host fills this struct");

template <class M, class G>
struct Join {
  static constexpr int THREADS = M::WARPS * 32, PER_PAIR = 2 * Wire<M>::PER_PACKET;
  // Places of words in a row of `left`: see Words of rows/words.cuh.
  static constexpr int ELEM = ElemOf<M::WIRE>::BYTES, PIECE_COLS = 16 / ELEM, SPANS = ceil_div(ceil_div(G::HIDDEN, PIECE_COLS), 4);

  static __device__ __forceinline__ const u32* word_at(const GivenParams& p, u32 row, int col) {
    const int piece = col / PIECE_COLS;
    const u64 at = u64(row / 8) * (SPANS * 512) + piece / 4 * 512 + row % 8 * 64 + piece % 4 * 16 + col % PIECE_COLS * ELEM;
    return reinterpret_cast<const u32*>(p.left + at);
  }
  // Columns `col` (even) and `col + 1` of a row that a batch kernel left.
  static __device__ __forceinline__ float2 of_words(const GivenParams& p, u32 row, int col) {
    const u32 first = load_word(word_at(p, row, col));
    if constexpr (M::WIRE == Elem::BF16) return make_float2(bf16_lo(first), col + 1 < G::HIDDEN ? bf16_hi(first) : 0.f);
    return make_float2(__uint_as_float(first), col + 1 < G::HIDDEN ? __uint_as_float(load_word(word_at(p, row, col + 1))) : 0.f);
  }
  // The same of what the step before left, which the block has waited for.
  static __device__ __forceinline__ float2 of_packets(const u64* x, int col) {
    const u32 first = reread(x + col / Wire<M>::PER_PACKET);
    if constexpr (M::WIRE == Elem::BF16) return make_float2(bf16_lo(first), col + 1 < G::HIDDEN ? bf16_hi(first) : 0.f);
    return make_float2(__uint_as_float(first), col + 1 < G::HIDDEN ? __uint_as_float(reread(x + col + 1)) : 0.f);
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const GivenParams& p = static_cast<const GivenParams&>(c.p);
    const TableRow<M, G> row(c.template constant<u8>(e.table), u32(c.state().token));
    const u32 step = c.tag - p.tag;
    const bool goes_on = step >= p.given_steps, in_words = !goes_on && !p.given;
    const u64* const x = p.exchange + e.x;
    float squares = 0.f;
    if (step > 0 || goes_on) {
#pragma unroll 1
      for (int base = 0; base < G::HIDDEN; base += THREADS * PER_PAIR) {
        const int col = base + c.tid() * PER_PAIR;
        const bool active[1] = {col < G::HIDDEN};
        u64 a[1], b[1];
        await_pairs<1>(x + col / Wire<M>::PER_PACKET, [](int) { return 0; }, active, c.tag - 1, a, b, c.waiter());
        float v[PER_PAIR];
        unpack_pair<M>(a[0], b[0], v);
#pragma unroll
        for (int j = 0; j < PER_PAIR; j++)
          if (goes_on && col + j < G::HIDDEN) squares += v[j] * v[j];
      }
    }
    if (in_words) {
#pragma unroll 1
      for (int col = c.tid() * 2; col < G::HIDDEN; col += THREADS * 2) {
        const float2 v = of_words(p, p.left_row + step, col);
        squares += v.x * v.x + v.y * v.y;
      }
    }
    put_statistic(c, 0, squares);
    c.barrier();
    const float factor = rms_factor<M, G::HIDDEN>(c, goes_on ? p.eps : p.eps_of_model);
    const float* weight = goes_on ? p.norm : p.norm_of_model;
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::HIDDEN);
#pragma unroll 1
    for (int base = first; base < last; base += THREADS * 2) {
      const int col = base + c.tid() * 2;
      if (col >= last) continue;
      const bool both = col + 1 < last;
      float* mine = c.residual() + e.residual + (col - first);
      mine[0] = 0.f;
      mine[1] = 0.f;
      float2 v;
      if (goes_on || in_words) {
        v = goes_on ? of_packets(x, col) : of_words(p, p.left_row + step, col);
        v.x *= factor * weight[col];
        v.y *= both ? factor * weight[col + 1] : 0.f;
      } else {
        const float* given = p.given + u64(step) * G::HIDDEN;
        v = make_float2(given[col], both ? given[col + 1] : 0.f);
      }
      publish_columns<G::HIDDEN>(c, e.out, col, row[col] * G::SCALE, both ? row[col + 1] * G::SCALE : 0.f);
      publish_columns<G::HIDDEN>(c, e.aux, col, v.x, v.y);
    }
    c.barrier();
  }
};

// The head of a draft: its noise is that of the token's position in the text, so that a draft chooses as its model does. In a launch that only reads
// tokens it waits and signals as ever, and has no weights: its runs are not among those of the loader.
template <class Head>
struct InText;
template <class M, class G>
struct InText<MatVec<M, G>> {
  typedef MatVec<M, G> Head;
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const GivenParams& p = static_cast<const GivenParams&>(c.p);
    const u32 ahead = p.ahead;
    if (p.only_reads) {
      stage_block<M, G::K, Norm::NONE, false>(c, e, 0.f);
      Head::publish_best(c, e, NEGATIVE_INFINITY, 0x7fffffff);
      return;
    }
    c.position += ahead;
    Head::run(c, e);
    c.position -= ahead;
  }
};
