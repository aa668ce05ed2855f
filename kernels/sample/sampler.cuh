// adjust and choose: the token of each row from its logits, exactly as src/sample specifies it for a request. `ClusterSampler` does the same where a
// cluster of blocks has room for a row.
//
// logits (ROWS, VOCAB)  what a launch of a kernel for rows left in memory; this kernel starts after it on the same stream
// answers (ROWS)        token, and what its log-probabilities are computed from
//
// owner    both launches have a block for each PART ids of a row; the block of a row that is done last in `choose` answers for the row
// moves    the logits twice, all of them from L2
// assumes  the two run one after the other on one stream. No block waits for another: blocks of a row only count themselves
//
//   adjust   l = logit after mask, bans, bias and penalties; score s = l * inverse_temperature; the best s
//   choose   for each bucket of scores: ids in it, the sum of their weights, and the best s + noise.
//            The last block of a row then finds the buckets where the filters cut, and the best s + noise above them. Only if an id in
//            these buckets has a better one, it lists their ids and finds where exactly the filters cut
//
// A bucket is 1/64 wide near the best score, where filters cut, and 1/4 far below it: bucket_of. The subtraction s_max - s rounds, but
// monotonically, so buckets are in the order of scores. All sums are of integers: their order does not matter. Ids 64 or more below the
// best score are never chosen, because the noise of two ids differs by less than 27 and rounding at such scores cannot make up for the
// rest: no bucket has them.
#pragma once

constexpr u32 SAMPLE_BUCKETS = 1024;

template <class S>
struct Sampler : SampleBlock<S::THREADS, ceil_div(S::PART / 4, S::THREADS), 512> {
  static constexpr int THREADS = S::THREADS, PART = S::PART;
  using Block = SampleBlock<THREADS, ceil_div(PART / 4, THREADS), 512>;
  using typename Block::Part;
  using Block::results, Block::barrier, Block::block_max, Block::block_sum, Block::block_scan, Block::seed_of, Block::position_of, Block::distance, Block::probable;
  using Block::scores_at, Block::best_of_part, Block::noisy_rank, Block::sum_of_best, Block::bound_of, Block::raw_weights, Block::answer;
  using Block::LOADS;
  template <class T>
  static __device__ __forceinline__ T* data() {
    return Block::template data<T>();
  }

  static constexpr int EACH = SAMPLE_BUCKETS / THREADS; // buckets of a thread
  // Logits of a part, buckets of a part.
  static constexpr int BUCKETS_AT = 512 + round_up(PART * 4, 16), SHARED_BYTES = S::SHARED_BYTES;
  static_assert(SAMPLE_BUCKETS % THREADS == 0, "each thread has as many buckets");
  // Half weights of a part are added up in 32 bits: below 2^20 each, or 2^20 at most.
  static_assert(PART % 16 == 0 && PART < 4096, "four ids are in one word of a mask, and sums of half weights have 32 bits");
  static_assert(BUCKETS_AT + int(SAMPLE_BUCKETS) * 12 <= SHARED_BYTES && 512 + THREADS * 16 <= BUCKETS_AT + int(SAMPLE_BUCKETS) * 12,
                "each step has room for its data");

  static __device__ __forceinline__ u32* buckets() { return reinterpret_cast<u32*>(block_memory() + BUCKETS_AT); }
  static __device__ __forceinline__ Part part_of_block(const SamplerParams& p, u32 block) { return Part(p, block / p.parts, block % p.parts, PART); }
  // The bucket of a score at this distance; SAMPLE_BUCKETS: it is never chosen, or not a number.
  static __device__ __forceinline__ u32 bucket_at(float distance) {
    const float below = fminf(-distance, 64.f);
    // Both products are exact.
    const u32 bucket = u32(below < 12.f ? below * 64.f : below * 4.f + 720.f);
    return -distance < 64.f ? bucket : SAMPLE_BUCKETS;
  }
  static __device__ __forceinline__ u32 bucket_of(float score, float score_max) { return bucket_at(distance(score, score_max)); }

  // ---- adjust -----------------------------------------------------------------------------------------------------

  static __device__ __forceinline__ void adjust(const SamplerParams& p, u32 block, int thread) {
    let_next_start();
    const Part part = part_of_block(p, block);
    const SampleRow& row = p.rows[part.at];
    const float raw_most = Block::template stage<true>(p, part, row.flags & SAMPLE_LOGPROBS ? row.top : 0, thread);
    u64 best = best_of_part(part, row.inverse_temperature, thread), raw_best = rank_of(raw_most, 0);
    block_max(best, raw_best, thread);
    if (thread == 0) {
      raise_to(&p.totals[part.at].best, best);
      raise_to(&p.totals[part.at].raw_best, raw_best);
    }
  }

  // ---- choose -----------------------------------------------------------------------------------------------------

  // Where the filters cut, in buckets: ids in buckets below `sure` are admitted, those from `first` to `last` and in `k_bucket` may be.
  struct Cuts {
    u32 sure, first, last;
    u32 k_bucket;     // SAMPLE_BUCKETS: top-k keeps all
    u64 k_before;     // ids above it
    u64 k_weight;     // weights above it
    u64 total;        // of all weights
    u64 first_weight; // weights above `first`
    u64 chosen;       // the best s + noise in buckets below `sure`, and in those that are listed
    u64 challenger;
    __device__ __forceinline__ bool lists(u32 bucket) const {
      return bucket < SAMPLE_BUCKETS && ((bucket >= first && bucket <= last) || bucket == k_bucket);
    }
  };
  // Zeroes the buckets of the row for the next launch.
  static __device__ __forceinline__ Cuts find_cuts(const SamplerParams& p, u32 at, int thread) {
    const SampleRow& row = p.rows[at];
    const bool by_weight = row.flags & SAMPLE_TOP_P, by_count = row.flags & SAMPLE_TOP_K;
    // [0] k_bucket, ids and weights above it, its weight; [4] total; [5] first bucket of top-p, weights above it; [7] last one
    u64* found = results();
    if (thread == 0) {
      found[0] = found[5] = found[7] = SAMPLE_BUCKETS;
      found[1] = found[2] = found[3] = found[4] = found[6] = 0;
    }
    u64 weights[EACH], bests[EACH], weight = 0, count = 0;
    u32 ids[EACH];
    const u64 own = u64(at) * SAMPLE_BUCKETS + u32(thread * EACH);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      weights[e] = by_weight ? __ldcg(p.weights + own + e) : 0;
      ids[e] = by_count ? __ldcg(p.counts + own + e) : 0;
      bests[e] = __ldcg(p.bests + own + e);
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      weight += weights[e];
      count += ids[e];
      if (weights[e] != 0) p.weights[own + e] = 0;
      if (ids[e] != 0) p.counts[own + e] = 0;
      if (bests[e] != 0) p.bests[own + e] = 0;
    }
    const u64 weight_before = block_scan(weight, thread) - weight;
    const u64 count_before = by_count ? block_scan(count, thread) - count : 0;
    u64 above = weight_before, before = count_before;
    if (thread == THREADS - 1) found[4] = weight_before + weight;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (by_count && before < row.top_k && before + ids[e] >= row.top_k) {
        found[0] = u32(thread * EACH + e);
        found[1] = before;
        found[2] = above;
        found[3] = weights[e];
      }
      before += ids[e];
      above += weights[e];
    }
    barrier();
    Cuts cuts;
    cuts.k_bucket = u32(found[0]);
    cuts.k_before = found[1];
    cuts.k_weight = found[2];
    cuts.total = found[4];
    const bool cut = cuts.k_bucket < SAMPLE_BUCKETS;
    if (by_weight) {
      // How much of the bucket belongs to the top-k set is not known yet, so the total lies between two sums.
      const u64 least = part_of(cut ? cuts.k_weight : cuts.total, row.top_p_q32);
      const u64 most = part_of(cut ? cuts.k_weight + found[3] : cuts.total, row.top_p_q32);
      const u64 need_least = least ? least : 1, need_most = most ? most : 1;
      above = weight_before;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const u64 upto = above + weights[e];
        if (above < need_least && upto >= need_least) {
          found[5] = u32(thread * EACH + e);
          found[6] = above;
        }
        if (above < need_most && upto >= need_most) found[7] = u32(thread * EACH + e);
        above = upto;
      }
    }
    barrier();
    cuts.first = by_weight ? u32(found[5]) : cuts.k_bucket;
    cuts.first_weight = found[6];
    cuts.last = by_weight ? u32(found[7]) : cuts.k_bucket;
    cuts.sure = cuts.first;
    cuts.chosen = cuts.challenger = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u32 bucket = u32(thread * EACH + e);
      if (bucket < cuts.sure) cuts.chosen = bests[e] > cuts.chosen ? bests[e] : cuts.chosen;
      else if (cuts.lists(bucket)) cuts.challenger = bests[e] > cuts.challenger ? bests[e] : cuts.challenger;
    }
    block_max(cuts.chosen, cuts.challenger, thread);
    return cuts;
  }

  // Whether an id with this random word may reach `bound`, a sum of score and noise that another id has; -inf: all may. The noise is
  // -ln(-ln(1 - u)) <= -ln(u) for u > x / 2^32. The margin of 2 % is far more than the errors of both exponentials, and of the sums if
  // they are below 2^14.
  static __device__ __forceinline__ bool may_reach(u32 x, float score, float bound) {
    return __uint2float_rn(x) * 2.3283064365386963e-10f <= 1.02f * exp_fast(score - bound);
  }
  // Adds a part to the buckets: ids, weights, the best s + noise. A row without filters needs only the best s + noise of all.
  static __device__ __forceinline__ void measure(const SamplerParams& p, const Part& part, float most, float bound, int thread) {
    const SampleRow& row = p.rows[part.at];
    const bool by_weight = row.flags & SAMPLE_TOP_P, by_count = row.flags & SAMPLE_TOP_K;
    u32 *low = buckets(), *high = low + SAMPLE_BUCKETS, *counts = high + SAMPLE_BUCKETS;
    const u64 seed = seed_of(row), first_bucket = u64(part.at) * SAMPLE_BUCKETS;
    const u32 position = position_of(p, row);
    const float inverse_temperature = row.inverse_temperature;
    u64 chosen = 0;
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      const u32 id = u32(part.first + at);
      float scores[4];
      scores_at(inverse_temperature, at, scores);
      u32 in[4];
#pragma unroll
      for (int i = 0; i < 4; i++) in[i] = bucket_of(scores[i], most);
      if (by_weight) {
        u64 weights[4];
        // The same as weight_of, without branches, so that the four run side by side: e^-30 has a weight of 0, too.
#pragma unroll
        for (int i = 0; i < 4; i++) weights[i] = u64(__fmul_rn(exp_inline(fmaxf(distance(scores[i], most), -30.f)), 1099511627776.f));
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (in[i] != SAMPLE_BUCKETS && weights[i] != 0) {
            add_to(&low[in[i]], u32(weights[i]) & 0xfffffu);
            add_to(&high[in[i]], u32(weights[i] >> 20));
          }
      }
      if (by_count)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (in[i] != SAMPLE_BUCKETS) add_to(&counts[in[i]], 1u);
      // Noise is below 23.
      const float best = fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3]));
      if (!(best + 23.f >= bound)) continue;
      u32 random[4] = {position, 0u, id / 4, 0u}, reach = 0;
      philox<10>(random, u32(seed), u32(seed >> 32));
#pragma unroll
      for (int i = 0; i < 4; i++) reach |= u32(in[i] != SAMPLE_BUCKETS && may_reach(random[i], scores[i], bound)) << i;
      if (reach == 0) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (!(reach >> i & 1)) continue;
        const u64 rank = noisy_rank(row, random[i], scores[i], most, id + i);
        if ((by_weight || by_count) && rank != 0) raise_to(&p.bests[first_bucket + in[i]], rank);
        chosen = rank > chosen ? rank : chosen;
      }
    }
    if (!by_weight && !by_count) {
      chosen = block_max(chosen, thread);
      if (thread == 0) raise_to(&p.totals[part.at].chosen, chosen);
      return;
    }
    barrier();
    u32* present = p.present + (u64(part.at) * p.parts + part.index) * (SAMPLE_BUCKETS / 32);
#pragma unroll 1
    for (u32 b = thread; b < SAMPLE_BUCKETS; b += THREADS) {
      const u64 weight = low[b] + (u64(high[b]) << 20);
      const u32 count = counts[b], ids = __ballot_sync(~0u, weight != 0 || count != 0);
      if (weight != 0) add_to(&p.weights[first_bucket + b], weight);
      if (count != 0) add_to(&p.counts[first_bucket + b], count);
      if (thread % 32 == 0) present[b / 32] = ids;
    }
  }

  static __device__ __forceinline__ void choose(const SamplerParams& p, u32 block, int thread) {
    const Part part = part_of_block(p, block);
    const SampleRow& row = p.rows[part.at];
    const u32 flags = row.flags;
    const bool is_greedy = flags & SAMPLE_GREEDY, has_logprobs = flags & SAMPLE_LOGPROBS;
    // `adjust` found the token already.
    if (is_greedy && !has_logprobs && part.index > 0) return;
    // What does not depend on `adjust` is done while that still runs.
    if (!is_greedy) {
      if (flags & (SAMPLE_TOP_K | SAMPLE_TOP_P))
        for (u32 b = thread; b < 3 * SAMPLE_BUCKETS; b += THREADS) buckets()[b] = 0;
      Block::template stage<true>(p, part, 0, thread);
    }
    wait_for_previous();
    SampleTotals& totals = p.totals[part.at];
    const u64 best = __ldcg(&totals.best), raw_best = __ldcg(&totals.raw_best);
    if (has_logprobs && raw_best != 0) {
      const u64 sum = block_sum(raw_weights(p, part, score_of(raw_best), thread), thread);
      if (thread == 0) add_to(&totals.raw_total, sum);
    }
    if (!is_greedy && best != 0) {
      float* bound = reinterpret_cast<float*>(results());
      if (thread < 32) {
        const float least = bound_of(sum_of_best(p, row, best));
        if (thread == 0) *bound = least;
      }
      barrier();
      measure(p, part, score_of(best), *bound, thread);
    }
    if (is_greedy && !has_logprobs) return settle(p, part.at, best, thread);
    // All threads add their sums before the block counts itself.
    u32* done = reinterpret_cast<u32*>(results() + 8);
    barrier();
    if (thread == 0) *done = count_block(&totals.done);
    barrier();
    if (*done != p.parts - 1) return;
    settle(p, part.at, best, thread);
  }

  // ---- the last block of a row ------------------------------------------------------------------------------------

  // The listed ids in buckets `first` to `last`, in the order of ranking, and what each adds to a sum.
  struct Listed {
    const u64* list;
    u32 count, first, last;
    float most;
    bool by_weight; // else each adds 1
    // Every THREADS-th rank from `at` on, loaded at once; 0 past the end and outside the buckets.
    __device__ __forceinline__ void load(u32 at, u64 (&ranks)[LOADS]) const {
#pragma unroll
      for (int n = 0; n < LOADS; n++) ranks[n] = at + n * THREADS < count ? __ldcg(list + at + n * THREADS) : 0;
#pragma unroll
      for (int n = 0; n < LOADS; n++) {
        const u32 bucket = ranks[n] ? bucket_of(score_of(ranks[n]), most) : SAMPLE_BUCKETS;
        ranks[n] = bucket >= first && bucket <= last ? ranks[n] : 0;
      }
    }
    // Calls `with` for each rank of this thread.
    template <class With>
    __device__ __forceinline__ void each(int thread, With with) const {
#pragma unroll 1
      for (u32 at = thread; at < count; at += LOADS * THREADS) {
        u64 ranks[LOADS];
        load(at, ranks);
#pragma unroll
        for (int n = 0; n < LOADS; n++)
          if (ranks[n] != 0) with(ranks[n]);
      }
    }
    __device__ __forceinline__ u64 add(u64 rank) const { return by_weight ? weight_of(score_of(rank), most) : 1; }
  };
  // The last id of the shortest prefix whose sum reaches `need`, which is above 0 and at most the sum of all.
  static __device__ __noinline__ u64 find_last(const Listed q, u64 need, int thread) {
    u64 least = 1, most = ~0ull;
    u64 *ranks = data<u64>(), *adds = ranks + THREADS, *found = results();
    for (;;) {
      u64 lowest = 0, highest = 0, inside = 0; // `lowest` is inverted, so that a maximum finds it
      q.each(thread, [&](u64 rank) {
        if (rank < least || rank > most) return;
        inside++;
        highest = rank > highest ? rank : highest;
        lowest = ~rank > lowest ? ~rank : lowest;
      });
      inside = block_sum(inside, thread);
      highest = block_max(highest, thread);
      lowest = ~block_max(lowest, thread);
      if (inside <= THREADS) {
        u32* taken = reinterpret_cast<u32*>(found);
        if (thread == 0) *taken = 0;
        barrier();
        q.each(thread, [&](u64 rank) {
          if (rank < least || rank > most) return;
          const u32 at = take_place(taken);
          ranks[at] = rank;
          adds[at] = q.add(rank);
        });
        barrier();
        const bool has = u32(thread) < inside;
        const u64 mine = has ? ranks[thread] : 0;
        u64 before = 0;
#pragma unroll 4
        for (u32 i = 0; i < u32(inside); i++) before += ranks[i] > mine ? adds[i] : 0;
        // The lowest of those that are kept.
        const u64 kept = block_max(has && before < need ? ~mine : 0, thread);
        return ~kept;
      }
      int shift = 0;
      while ((highest - lowest) >> shift >= u64(THREADS)) shift++;
      ranks[thread] = 0;
      if (thread == 0) found[0] = THREADS - 1, found[1] = 0;
      barrier();
      q.each(thread, [&](u64 rank) {
        if (rank >= least && rank <= most) add_to(&ranks[(highest - rank) >> shift], q.add(rank));
      });
      barrier();
      const u64 mine = ranks[thread], upto = block_scan(mine, thread);
      if (upto - mine < need && upto >= need) {
        found[0] = u32(thread);
        found[1] = upto - mine;
      }
      barrier();
      need -= found[1];
      most = highest - (found[0] << shift);
      const u64 width = (1ull << shift) - 1;
      least = most - lowest > width ? most - width : lowest;
      barrier();
    }
  }

  // The rank of the last id that the filters admit among the listed ones.
  static __device__ __forceinline__ u64 find_least(const SamplerParams& p, const SampleRow& row, Listed q, const Cuts cuts, int thread) {
    u64 least = 0, total = cuts.total;
    if (cuts.k_bucket < SAMPLE_BUCKETS) {
      q.first = q.last = cuts.k_bucket;
      q.by_weight = false;
      least = find_last(q, row.top_k - cuts.k_before, thread);
      if (row.flags & SAMPLE_TOP_P) {
        q.by_weight = true;
        u64 sum = 0;
        q.each(thread, [&](u64 rank) { sum += rank >= least ? q.add(rank) : 0; });
        total = cuts.k_weight + block_sum(sum, thread);
      }
    }
    if (row.flags & SAMPLE_TOP_P) {
      q.first = cuts.first;
      q.last = SAMPLE_BUCKETS - 1;
      q.by_weight = true;
      const u64 part = part_of(total, row.top_p_q32), need = part ? part : 1;
      const u64 last = find_last(q, need - cuts.first_weight, thread);
      least = last > least ? last : least;
    }
    return least;
  }

  // Lists the ids of the buckets where filters cut.
  static __device__ __forceinline__ u32 list_cut(const SamplerParams& p, u32 at, const Cuts cuts, float most, int thread) {
    const float inverse_temperature = p.rows[at].inverse_temperature;
    u32 *taken = reinterpret_cast<u32*>(results()), *part_count = taken + 1, *parts = buckets();
    if (thread == 0) *taken = *part_count = 0;
    barrier();
    // Parts that have such ids.
    for (u32 index = thread; index < p.parts; index += THREADS) {
      const u32* present = p.present + (u64(at) * p.parts + index) * (SAMPLE_BUCKETS / 32);
      u32 any = cuts.k_bucket < SAMPLE_BUCKETS ? __ldcg(present + cuts.k_bucket / 32) >> cuts.k_bucket % 32 & 1 : 0;
#pragma unroll 1
      for (u32 b = cuts.first; b <= cuts.last && b < SAMPLE_BUCKETS && !any; b++) any = __ldcg(present + b / 32) >> b % 32 & 1;
      if (any) parts[take_place(part_count)] = index;
    }
    barrier();
    u64* list = p.list + u64(at) * p.vocab;
#pragma unroll 1
    for (u32 n = 0; n < *part_count; n++) {
      const Part part(p, at, parts[n], PART);
      Block::template stage<false>(p, part, 0, thread);
#pragma unroll 1
      for (int i = 4 * thread; i < part.count; i += 4 * THREADS) {
        float scores[4];
        scores_at(inverse_temperature, i, scores);
#pragma unroll
        for (int k = 0; k < 4; k++)
          if (cuts.lists(bucket_of(scores[k], most))) list[take_place(taken)] = rank_of(scores[k], u32(part.first + i + k));
      }
      barrier();
    }
    const u32 count = *taken;
    barrier();
    return count;
  }

  // The better of `winner` and the ids that the filters admit in the buckets where they cut.
  static __device__ __forceinline__ u64 winner_at_cut(const SamplerParams& p, u32 at, const Cuts cuts, float most, u64 winner, int thread) {
    const SampleRow& row = p.rows[at];
    const u32 count = list_cut(p, at, cuts, most, thread);
    const Listed q{p.list + u64(at) * p.vocab, count, 0, SAMPLE_BUCKETS - 1, most, false};
    const u64 least = find_least(p, row, q, cuts, thread), seed = seed_of(row);
    q.each(thread, [&](u64 rank) {
      const float score = score_of(rank);
      if (rank < least || !probable(row, score, most)) return;
      const u64 noisy = rank_of(__fadd_rn(score, noise(seed, position_of(p, row), id_of(rank))), id_of(rank));
      winner = noisy > winner ? noisy : winner;
    });
    return block_max(winner, thread);
  }
  // The winner of a row with filters.
  static __device__ __forceinline__ u64 admitted_winner(const SamplerParams& p, u32 at, float most, int thread) {
    const Cuts cuts = find_cuts(p, at, thread);
    // Where exactly the filters cut does not matter to an id above the cuts.
    if (cuts.challenger <= cuts.chosen) return cuts.chosen;
    return winner_at_cut(p, at, cuts, most, cuts.chosen, thread);
  }

  // Answers for a row, and zeroes its totals for the next launch.
  static __device__ __noinline__ void settle(const SamplerParams& p, u32 at, u64 best, int thread) {
    const u32 flags = p.rows[at].flags;
    SampleTotals& totals = p.totals[at];
    u64 winner = best;
    if (!(flags & SAMPLE_GREEDY) && best != 0)
      winner = flags & (SAMPLE_TOP_K | SAMPLE_TOP_P) ? admitted_winner(p, at, score_of(best), thread) : __ldcg(&totals.chosen);
    answer(p, at, winner, __ldcg(&totals.raw_best), __ldcg(&totals.raw_total), thread);
    barrier();
    if (thread == 0) totals = SampleTotals{};
  }
};
