// select: the token of each row: given by the host in the first step of a launch, else the arg-max over the arg-max pairs of the
// step before; and which rows take part in the step.
//
// best (ROWS, 2 * PARTS)  arg-max pairs of the step before as packets: value bits, id; published after the release of that step
// token                   shared memory of this block; every block decides the same
//
// owner    every block for itself; the first one reports to the host
// moves    2 * PARTS packets of each row into every block
// assumes  each block published its pairs after the release of its step; here each polling thread acquires
//
// A row whose token ends it takes no part in this step or later ones. Every block sees the same pairs, so the row leaves on all SMs
// in the same step. Ends with a block barrier.
#pragma once

template <class M, class G>
struct RowsSelect {
  static constexpr int SHARES = ceil_div(G::PARTS, 32);

  // The token that row `from` of the step before decided. Called by whole warps.
  static __device__ __forceinline__ int decided(Context<M>& c, const Entry& e, u32 from) {
    const u32 tag = c.tag - 1;
    const u64* packets = c.p.exchange + e.x + ((tag & 1) * M::ROWS + from) * round_up(2 * G::PARTS, 2);
    bool active[SHARES];
    u64 a[SHARES], b[SHARES];
#pragma unroll
    for (int i = 0; i < SHARES; i++) active[i] = i * 32 + c.lane() < G::PARTS;
    await_pairs<SHARES>(packets + c.lane() * 2, [](int i) { return i * 64; }, active, tag, a, b, c.waiter());
    float value = NEGATIVE_INFINITY;
    int id = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < SHARES; i++)
      if (active[i]) argmax_take(value, id, __uint_as_float(u32(a[i])), int(u32(b[i])));
    warp_argmax(value, id);
    // If no logit was a number, no id was chosen; `embed` needs a valid row of the table all the same.
    return min(id, G::VOCAB - 1);
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const RowsParams& p = rows_params(c);
    RowsState<M>& state = rows_state<M>();
    const u32 step = c.tag - p.tag;
    for (u32 row = c.warp(); row < p.row_count; row += M::WARPS) {
      const Row& r = p.rows[row];
      if (step > 0 && !takes_part<M>(row)) continue;
      const bool given = step == 0 && r.token >= 0;
      const int token = given ? r.token : decided(c, e, step == 0 ? r.from : row);
      if (c.lane() == 0) state.token[row] = token;
    }
    acquire_step();
    c.stamp(1);
    c.barrier();
    if (c.tid() == 0) {
      bool any = false;
      for (u32 first = 0; first < p.row_count; first += 32) {
        u32 active = 0;
        for (u32 row = first; row < min(first + 32, p.row_count); row++) {
          const Row& r = p.rows[row];
          bool goes_on = step < r.steps && (step == 0 || takes_part<M>(row));
          if (step > 0)
            for (u32 i = 0; i < p.eos_count; i++) goes_on = goes_on && state.token[row] != p.eos[i];
          active |= goes_on ? 1u << row % 32 : 0u;
        }
        state.active[first / 32] = active;
        any = any || active != 0;
      }
      if (!any || c.lost()) state.block.stop = 1;
      hand_over_step(&state.block.acquired_tag, c.tag);
    }
    c.barrier();
  }
};

// report: hands the tokens of the step to the host: [1 + step * ROWS + row], and then the count of steps. Without a mailbox a sampler
// decides, and tokens have no reader here.
template <class M, class G>
struct RowsReport {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const RowsParams& p = rows_params(c);
    if (!p.mailbox) return;
    const u32 step = c.tag - p.tag;
    if (c.warp() == 0) {
      for (u32 row = c.lane(); row < p.row_count; row += 32) p.mailbox[1 + step * M::ROWS + row] = rows_state<M>().token[row];
      __threadfence_system();
      __syncwarp();
      if (c.lane() == 0) p.mailbox[0] = int(step) + 1;
    }
    c.barrier();
  }
};

// embed: residual[row][i] = scale * table[token of row][i]; publishes it. See ops/embed.cuh.
template <class M, class G>
struct RowsEmbed {
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    u8* const out = words_of<M, G::HIDDEN>(c, e.out);
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::HIDDEN), pairs = ceil_div(last - first, 2);
    for (int i = c.tid(); i < pairs * M::ROWS; i += M::WARPS * 32) {
      const int row = i / pairs, col = first + i % pairs * 2;
      if (!takes_part<M>(row)) {
        clear_pair<G::HIDDEN>(c, out, row, col);
        continue;
      }
      const TableRow<M, G> from(c.template constant<u8>(e.table), u32(rows_state<M>().token[row]));
      const float a = from[col] * G::SCALE, b = col + 1 < last ? from[col + 1] * G::SCALE : 0.f;
      float* mine = c.residual() + row * M::RESIDUAL_COLS + e.residual + (col - first);
      mine[0] = a;
      mine[1] = b;
      publish_pair<G::HIDDEN>(c, out, row, col, a, b);
    }
    c.barrier();
  }
};

// norm_add: residual[row][i] += scale * y[i] * rsqrt(mean(y^2) + eps) * weight[i] for each row; publishes the sum.
template <class M, class G>
struct RowsNormAdd {
  typedef Words<M, G::WIDTH> W;
  static constexpr int HELD = 4; // pieces of a lane that are on their way at once
  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    const u8* y = words_of<M, G::WIDTH>(c, e.x);
    // Warps take rows in turn, lanes pieces.
#pragma unroll 1
    for (int row = c.warp(); row < M::ROWS; row += M::WARPS) {
      if (!takes_part<M>(row)) continue;
      float squares = 0.f;
#pragma unroll 1
      for (int first = 0; first < W::PIECES; first += 32 * HELD) {
        uint4 v[HELD];
        // The piece 32 on has the same place in its span, 8 spans on.
        constexpr u32 STRIDE = 32 / W::SPAN_PIECES * W::SPAN_BYTES;
        const u8* base = y + W::piece_at(row, first + c.lane());
#pragma unroll
        for (int i = 0; i < HELD; i++) {
          v[i] = make_uint4(0, 0, 0, 0);
          load_piece(base + i * STRIDE, first + i * 32 + c.lane() < W::PIECES, v[i]);
        }
        await_pieces<HELD>(base, [](int i) { return u32(i) * STRIDE; }, v, c.waiter());
#pragma unroll
        for (int i = 0; i < HELD; i++) {
          float x[W::PIECE_COLS];
          unpack_piece<M>(v[i], x);
#pragma unroll
          for (int k = 0; k < W::PIECE_COLS; k++) squares += x[k] * x[k];
        }
      }
      squares = warp_sum(squares);
      if (c.lane() == 0) rows_state<M>().stat[c.task & 1][1][0][row] = squares;
    }
    c.stamp(1);
    c.barrier();
    u8* const out = words_of<M, G::WIDTH>(c, e.out);
    const float* weight = c.template constant<float>(e.norm_weight);
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::WIDTH), pairs = ceil_div(last - first, 2);
    for (int i = c.tid(); i < pairs * M::ROWS; i += M::WARPS * 32) {
      const int row = i / pairs, col = first + i % pairs * 2;
      if (!takes_part<M>(row)) {
        clear_pair<G::WIDTH>(c, out, row, col);
        continue;
      }
      const float factor = rsqrtf(rows_state<M>().stat[c.task & 1][1][0][row] * (1.f / G::WIDTH) + G::EPS);
      float x[2];
      // The block has waited for these words.
      const u32 word = load_word(reinterpret_cast<const u32*>(y + W::at(row, col)));
      if constexpr (M::WIRE == Elem::BF16) {
        x[0] = bf16_lo(word), x[1] = bf16_hi(word);
      } else {
        x[0] = __uint_as_float(word);
        x[1] = __uint_as_float(load_word(reinterpret_cast<const u32*>(y + W::at(row, col + 1))));
      }
      float* own = c.residual() + row * M::RESIDUAL_COLS + e.residual + (col - first);
#pragma unroll
      for (int k = 0; k < 2; k++)
        if (col + k < last) own[k] += G::SCALE * (x[k] * factor * weight[col + k]);
      publish_pair<G::WIDTH>(c, out, row, col, own[0], col + 1 < last ? own[1] : 0.f);
    }
    c.barrier();
  }
};
