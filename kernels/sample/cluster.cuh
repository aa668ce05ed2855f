// decide: the token of each row in one kernel, exactly as src/sample specifies it for a request.
//
// logits (ROWS, VOCAB)  what a launch of a kernel for rows left in memory; this kernel waits for it
// answers (ROWS)        token, and what its log-probabilities are computed from
//
// owner    a cluster of BLOCKS blocks has a row, each block a part of it in its shared memory; the first one answers
// moves    the logits once
// assumes  a part fits into shared memory; `Sampler` has the form for other vocabularies and devices
//
// l = logit after mask, bans, bias and penalties; score s = l * inverse_temperature. Each step below ends with a meeting of the cluster:
//
//   1  the best s
//   2  the id with the best s + noise, and the sum of all weights
//   3  for top-k and top-p: ids above that one in the order of scores, and their weights. What filters admit is the beginning of this order, so
//      these sums tell whether they admit the id. If not, all that they admit is above it: 2 and 3 again with the ids above it
//
// The id of the first round has the probability that top-p keeps to be admitted, 0.95 say; each further round halves what is left, or better.
// Sums of floats, which bound those of integer weights, mostly decide. Otherwise the weights are added up exactly, and if top-p follows top-k,
// `find_kth` finds the last id of the top-k set first. So every decision is that of integers, whatever the order of sums or the number of blocks.
#pragma once

// S: THREADS of a block, BLOCKS of a cluster, QUADS.
template <class S>
struct ClusterLayout {
  static constexpr int WARPS = S::THREADS / 32, ENTRIES = WARPS * S::BLOCKS; // a value of each warp of the cluster
  static constexpr int VALUES = 3, BINS = 1024;
  // After the words of the block: values of the warps of the cluster, for two turns; bins of a search; logits.
  static constexpr int EXCHANGE_AT = 512, BINS_AT = EXCHANGE_AT + 2 * VALUES * ENTRIES * 8, DATA_AT = BINS_AT + BINS * 4;
};

template <class S>
struct ClusterSampler : SampleBlock<S::THREADS, S::QUADS, ClusterLayout<S>::DATA_AT> {
  using Layout = ClusterLayout<S>;
  using Block = SampleBlock<S::THREADS, S::QUADS, Layout::DATA_AT>;
  using typename Block::Part;
  using Block::WARPS, Block::results, Block::barrier, Block::warp_most, Block::warp_total, Block::block_scan, Block::seed_of, Block::position_of, Block::distance;
  using Block::scores_at, Block::best_of_part, Block::noisy_rank, Block::sum_of_best, Block::bound_of, Block::raw_weights, Block::answer;
  static constexpr int THREADS = S::THREADS, BLOCKS = S::BLOCKS, ENTRIES = Layout::ENTRIES, BINS = Layout::BINS;
  static_assert(BLOCKS <= 32 && BINS % THREADS == 0, "a lane stores to each block, and each thread has as many bins");

  static __device__ __forceinline__ u64* exchange() { return reinterpret_cast<u64*>(block_memory() + Layout::EXCHANGE_AT); }
  static __device__ __forceinline__ u32* bins() { return reinterpret_cast<u32*>(block_memory() + Layout::BINS_AT); }
  // Ids of a block. Parts begin at a word of a mask and, if rows do, at a line of memory.
  static __device__ __forceinline__ int part_size(const SamplerParams& p) { return round_up(ceil_div(int(p.vocab), BLOCKS), 32); }

  // Values of a thread, or of all threads of the cluster together.
  struct Values {
    u64 v[Layout::VALUES];
  };
  static __device__ __forceinline__ u64 of_warp(bool is_max, u64 value) { return is_max ? warp_most(value) : warp_total(value); }
  // Brings `count` values of all threads together, for every thread: the first `maxima` as maxima, the others as sums. Turns alternate between two places: a block that stores for turn n + 2 has met the
  // others in turn n + 1, after they read what turn n left.
  static __device__ __noinline__ Values combine(u32 index, u32 turn, int maxima, int count, Values values, int thread) {
    const int lane = thread % 32;
    u64* all = exchange() + turn % 2 * (Layout::VALUES * ENTRIES);
#pragma unroll
    for (int n = 0; n < Layout::VALUES; n++) {
      if (n >= count) break;
      const u64 value = of_warp(n < maxima, values.v[n]);
      if (lane < BLOCKS) store_to_block(all + n * ENTRIES + index * WARPS + thread / 32, lane, value);
    }
    arrive_at_cluster();
    await_cluster();
#pragma unroll
    for (int n = 0; n < Layout::VALUES; n++) {
      if (n >= count) break;
      u64 value = 0;
#pragma unroll
      for (int i = lane; i < ENTRIES; i += 32) {
        const u64 other = all[n * ENTRIES + i];
        value = n < maxima ? (other > value ? other : value) : value + other;
      }
      values.v[n] = of_warp(n < maxima, value);
    }
    return values;
  }

  // What ranks above an id: a better score, or the same and a lower id. A limit of 0: all that may be chosen.
  struct Above {
    float score;
    u32 id;
    __device__ __forceinline__ Above(u64 limit) : score(limit ? score_of(limit) : NEGATIVE_INFINITY), id(limit ? id_of(limit) : 0) {}
    __device__ __forceinline__ bool has(float other, u32 other_id) const { return bool(u32(other > score) | (u32(other == score) & u32(other_id < id))); }
  };
  // A score as the search for the best one left it, by any block.
  static __device__ __forceinline__ u64 rank_of_id(const SamplerParams& p, const SampleRow& row, u32 id) {
    const u32 block = id / part_size(p), at = id % part_size(p);
    const float logit = __uint_as_float(load_from_block(Block::template data<u32>() + at, block));
    return rank_of(__fmul_rn(logit, row.inverse_temperature), id);
  }

  // The best of a sum s + noise and those of a thread's ids above a limit. Sums are given as ranks.
  static __device__ __noinline__ u64 draw(const SamplerParams& p, const Part part, u64 limit, float most, u64 chosen, int thread) {
    const SampleRow& row = p.rows[part.at];
    const Above above(limit);
    const u64 seed = seed_of(row);
    const u32 position = position_of(p, row);
    const float inverse_temperature = row.inverse_temperature;
    float bound = bound_of(chosen);
    const bool is_bounded = bound > NEGATIVE_INFINITY;
    // By whole warps, which share the best sum so far as the bound.
#pragma unroll 1
    for (int first = thread / 32 * 128; first < part.count; first += 4 * THREADS) {
      const int at = first + thread % 32 * 4;
      const u32 id = u32(part.first + at);
      float scores[4] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY};
      if (at < part.count) scores_at(inverse_temperature, at, scores);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (!above.has(scores[i], id + i) || !(-distance(scores[i], most) < 64.f)) scores[i] = NEGATIVE_INFINITY;
      // Noise is below 23.
      const float best = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
      if (!__any_sync(~0u, best > NEGATIVE_INFINITY && best + 23.f >= bound)) continue;
      u32 random[4] = {position, 0u, id / 4, 0u};
      philox<10>(random, u32(seed), u32(seed >> 32));
      // The noise is -ln(-ln(1 - u)) <= -ln(u) for u > x / 2^32. The margin of 0.02 is far more than the errors of the logarithm, and of sums below 2^14.
      float upper[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        upper[i] = scores[i] > NEGATIVE_INFINITY ? scores[i] + (22.2007098f - 0.693147182f * log2_fast(__uint2float_rn(random[i]))) : NEGATIVE_INFINITY;
      for (;;) {
        // Each lane computes the sum that may be its largest. Mostly no other one reaches the best of them.
        u32 which = 0;
        float reach = upper[0];
#pragma unroll
        for (u32 i = 1; i < 4; i++)
          if (upper[i] > reach) {
            reach = upper[i];
            which = i;
          }
        const bool reaches = reach > NEGATIVE_INFINITY && reach >= bound;
        if (!__any_sync(~0u, reaches)) break;
        float sum = NEGATIVE_INFINITY;
        if (reaches) {
          float score = scores[0];
          u32 x = random[0];
#pragma unroll
          for (u32 i = 1; i < 4; i++)
            if (which == i) {
              score = scores[i];
              x = random[i];
            }
          const u64 rank = noisy_rank(row, x, score, most, id + which);
          sum = rank ? score_of(rank) : NEGATIVE_INFINITY;
          chosen = rank > chosen ? rank : chosen;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) upper[i] = reaches && which == i ? NEGATIVE_INFINITY : upper[i];
        if (is_bounded) bound = fmaxf(bound, warp_max(sum));
      }
    }
    return chosen;
  }

  // Of a thread's ids above a limit: about the sum of weights, and their number.
  static __device__ __noinline__ ulonglong2 about_above(const Part part, u64 limit, float inverse_temperature, float most, int thread) {
    const Above above(limit);
    float sum = 0.f;
    u32 count = 0;
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      float scores[4], weights[4];
      scores_at(inverse_temperature, at, scores);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool has = above.has(scores[i], u32(part.first + at + i));
        count += has;
        weights[i] = has ? exp_fast(distance(scores[i], most)) : 0.f;
      }
      sum += (weights[0] + weights[1]) + (weights[2] + weights[3]);
    }
    return ulonglong2{u64(sum * 1099511627776.f), count};
  }
  // More than the error of such a sum over a row: 2^-14 of all weights. An exponential has an error of 32 units of 2^-24, a sum of the 2^9 ids that a
  // thread has at most one of 2^9 units, and the rounding of weights to integers changes a sum over 2^24 ids by 2^-16 of the best weight.
  static __device__ __forceinline__ u64 error_of(u64 total) { return total >> 14; }

  // The sum of the weights of a thread's ids above a limit.
  static __device__ __noinline__ u64 sum_above(const Part part, u64 limit, float inverse_temperature, float most, int thread) {
    const Above above(limit);
    u64 sum = 0;
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      float scores[4];
      scores_at(inverse_temperature, at, scores);
#pragma unroll
      for (int i = 0; i < 4; i++) sum += above.has(scores[i], u32(part.first + at + i)) ? weight_of(scores[i], most) : 0;
    }
    return sum;
  }

  // The rank of the k-th id of the row, or of the last one if there are fewer.
  static __device__ __noinline__ u64 find_kth(const SamplerParams& p, const Part part, u32& turn, int thread) {
    const SampleRow& row = p.rows[part.at];
    u64 need = row.top_k, least = 1, most = ~0ull;
    const auto each = [&](auto with) {
#pragma unroll 1
      for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
        float scores[4];
        scores_at(row.inverse_temperature, at, scores);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const u64 rank = rank_of(scores[i], u32(part.first + at + i));
          if (rank >= least && rank <= most) with(rank);
        }
      }
    };
    for (;;) {
      u64 highest = 0, inverted = 0, ids = 0; // the lowest rank is inverted, so that a maximum finds it
      each([&](u64 rank) {
        highest = rank > highest ? rank : highest;
        inverted = ~rank > inverted ? ~rank : inverted;
        ids++;
      });
      const Values found = combine(part.index, turn++, 2, 3, {highest, inverted, ids}, thread);
      const u64 lowest = ~found.v[1];
      highest = found.v[0];
      if (need == 1) return highest;
      if (need >= found.v[2]) return lowest;
      int shift = 0;
      while ((highest - lowest) >> shift >= u64(BINS)) shift++;
      // All blocks have read the bins of the round before: they have met since.
      for (int b = thread; b < BINS; b += THREADS) bins()[b] = 0;
      barrier();
      each([&](u64 rank) { add_to(&bins()[(highest - rank) >> shift], 1u); });
      arrive_at_cluster();
      await_cluster();
      constexpr int EACH = BINS / THREADS;
      u32 counts[EACH], own = 0;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        counts[e] = 0;
#pragma unroll
        for (u32 block = 0; block < u32(BLOCKS); block++) counts[e] += load_from_block(&bins()[thread * EACH + e], block);
        own += counts[e];
      }
      u64 before = block_scan(own, thread) - own;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        if (before < need && before + counts[e] >= need) {
          results()[0] = u64(thread * EACH + e);
          results()[1] = before;
        }
        before += counts[e];
      }
      barrier();
      need -= results()[1];
      most = highest - (results()[0] << shift);
      const u64 width = (1ull << shift) - 1;
      least = most - lowest > width ? most - width : lowest;
      // A bin of one rank is found; otherwise the next round stores results after all threads have met.
      if (shift == 0) return most;
    }
  }

  // The sum of weights that top-p reaches with its last id.
  static __device__ __forceinline__ u64 need_of(const SampleRow& row, u64 total) {
    const u64 need = part_of(total, row.top_p_q32);
    return need ? need : 1;
  }
  // What rounds of a row share.
  struct Round {
    float most;     // the best score
    u64 about;      // about the sum of all weights
    u64 kept;       // the sum of the weights that top-k keeps, exactly; 0: not known yet
    u32 turn;       // meetings with values so far
  };
  // Whether top-k and top-p admit an id.
  static __device__ __forceinline__ bool admits(const SamplerParams& p, const Part& part, u64 rank, Round& round, int thread) {
    const SampleRow& row = p.rows[part.at];
    const bool by_count = row.flags & SAMPLE_TOP_K;
    const ulonglong2 own = about_above(part, rank, row.inverse_temperature, round.most, thread);
    const Values above = combine(part.index, round.turn++, 0, 2, {own.x, own.y, 0}, thread);
    if (by_count && above.v[1] >= row.top_k) return false;
    if (!(row.flags & SAMPLE_TOP_P)) return true;
    // What top-k keeps is no more than all, and has the id and those above it.
    const u64 least = by_count ? above.v[0] + weight_of(score_of(rank), round.most) : round.about, error = 2 * error_of(round.about);
    if (above.v[0] + error < need_of(row, least)) return true;
    if (above.v[0] >= need_of(row, round.about) + error) return false;
    Values sums{{sum_above(part, rank, row.inverse_temperature, round.most, thread), 0, 0}};
    if (round.kept == 0) {
      const u64 limit = by_count ? find_kth(p, part, round.turn, thread) - 1 : 0;
      sums.v[1] = sum_above(part, limit, row.inverse_temperature, round.most, thread);
    }
    sums = combine(part.index, round.turn++, 0, 2, sums, thread);
    round.kept = round.kept ? round.kept : sums.v[1];
    return sums.v[0] < need_of(row, round.kept);
  }

  // The id that is chosen from a row whose best one is `best`, as a rank.
  static __device__ __noinline__ u64 winner(const SamplerParams& p, const Part& part, u64 best, u64 raw_best, u64& raw_total, int thread) {
    const SampleRow& row = p.rows[part.at];
    const u32 flags = row.flags;
    const bool is_greedy = flags & SAMPLE_GREEDY;
    const float most = score_of(best);
    const u64 sum = is_greedy ? best : sum_of_best(p, row, best);
    Values values;
    values.v[0] = is_greedy ? best : draw(p, part, 0, most, sum, thread);
    values.v[1] = flags & SAMPLE_TOP_P ? about_above(part, 0, row.inverse_temperature, most, thread).x : 0;
    values.v[2] = flags & SAMPLE_LOGPROBS ? raw_weights(p, part, score_of(raw_best), thread) : 0;
    values = combine(part.index, 1, 1, 3, values, thread);
    u64 chosen = values.v[0];
    raw_total = values.v[2];
    if (!(flags & (SAMPLE_TOP_K | SAMPLE_TOP_P))) return chosen;
    Round round{most, values.v[1], 0, 2};
    // The best id is admitted in any case.
    while (id_of(chosen) != id_of(best)) {
      const u64 rank = rank_of_id(p, row, id_of(chosen));
      if (admits(p, part, rank, round, thread)) break;
      chosen = combine(part.index, round.turn++, 1, 1, {draw(p, part, rank, most, sum, thread), 0, 0}, thread).v[0];
    }
    return chosen;
  }

  // Drops the lines that have logits of the part alone. The block has read them, because it has met others since.
  static __device__ __forceinline__ void drop(const Part& part, int thread) {
    const u64 end = u64(part.logits + part.count) / 128 * 128;
#pragma unroll 1
    for (u64 line = (u64(part.logits) + 127) / 128 * 128 + 128 * u64(thread); line < end; line += 128 * THREADS) discard_line(line);
  }

  static __device__ __forceinline__ void decide(const SamplerParams& p, u32 block, int thread) {
    arrive_at_cluster();
    // The table is as the host uploaded it, or as the sampler before left it. That has ended, because the step waited for it before it let this
    // kernel start. So only logits have to be waited for.
    const Part part(p, block / BLOCKS, block % BLOCKS, part_size(p));
    const SampleRow& row = p.rows[part.at];
    for (u32 entry = 16 * thread; entry < row.banned + row.biased + row.seen; entry += 16 * THREADS) prefetch_line(p.edits + row.edits + entry);
    wait_for_previous();
    let_next_start();
    const bool has_logprobs = row.flags & SAMPLE_LOGPROBS;
    const float raw_most = Block::template stage<true>(p, part, has_logprobs ? row.top : 0, thread);
    const u64 own = best_of_part(part, row.inverse_temperature, thread);
    // All blocks have started.
    await_cluster();
    const Values bests = combine(part.index, 0, 2, 2, {own, rank_of(raw_most, 0), 0}, thread);
    u64 chosen = bests.v[0], raw_total = 0;
    if (chosen != 0 && (has_logprobs || !(row.flags & SAMPLE_GREEDY))) chosen = winner(p, part, chosen, bests.v[1], raw_total, thread);
    // The answer for log-probabilities reads a logit again.
    if (p.drops && !has_logprobs) drop(part, thread);
    if (part.index == 0) answer(p, part.at, chosen, bests.v[1], raw_total, thread);
  }
};
