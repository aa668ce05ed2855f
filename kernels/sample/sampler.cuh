// sampler: the token of each row from its logits, exactly as src/sample specifies it for a request.
//
// logits (ROWS, VOCAB)  what a launch of a kernel for rows left in memory; this kernel starts after it on the same stream
// answers (ROWS)        token, and what its log-probabilities are computed from
//
// owner    adjust, measure and gather: a block for each PART ids of a row; decide: a block, of more threads, for each row
// moves    the logits once, the scores three times, all of them from L2
// assumes  the four run one after the other on one stream, so nothing here waits for another block
//
//   adjust   l = logit after mask, bans, bias and penalties; score s = l * inverse_temperature; the best s
//   measure  for each bucket of scores: ids in it, and the sum of their weights. Only for top-k, top-p and log-probabilities
//   gather   the best s + noise of the ids that are surely admitted; a list of the ids in buckets that a filter cuts
//   decide   where the cuts lie in the list, the best s + noise of what it admits, and the answer
//
// A bucket is 1/16 wide: bucket_of(s) = floor(16 (s_max - s)). The subtraction rounds, but monotonically, so buckets are in the order
// of scores. All sums are of integers: their order does not matter. Ids 64 or more below the best score are never chosen, because the
// noise of two ids differs by less than 27 and rounding at such scores cannot make up for the rest: no bucket has them.
#pragma once

constexpr u32 SAMPLE_BUCKETS = 1024;

template <class S>
struct Sampler {
  static constexpr int THREADS = S::THREADS, WARPS = THREADS / 32, PART = S::PART;
  static constexpr int EACH = SAMPLE_BUCKETS / THREADS; // buckets of a thread
  // Words of the warps, results of a search, data of a step.
  static constexpr int RESULTS_AT = 256, DATA_AT = 512, SHARED_BYTES = S::SHARED_BYTES;
  static constexpr int LOADS = 5; // values of a thread that are on their way at once
  static_assert(WARPS * 8 <= RESULTS_AT && SAMPLE_BUCKETS % THREADS == 0, "each warp has a word, each thread as many buckets");
  // Half weights of a part are added up in 32 bits: below 2^20 each, or 2^20 at most.
  static_assert(PART % 4 == 0 && PART < 4096, "sums of half weights have 32 bits");
  static_assert(DATA_AT + PART * 4 <= SHARED_BYTES && DATA_AT + int(SAMPLE_BUCKETS) * 12 <= SHARED_BYTES &&
                DATA_AT + THREADS * 16 <= SHARED_BYTES, "each step has room for its data");

  static __device__ __forceinline__ u64* words() { return reinterpret_cast<u64*>(block_memory()); }
  static __device__ __forceinline__ u64* results() { return reinterpret_cast<u64*>(block_memory() + RESULTS_AT); }
  template <class T>
  static __device__ __forceinline__ T* data() { return reinterpret_cast<T*>(block_memory() + DATA_AT); }
  static __device__ __forceinline__ void barrier() { consumer_barrier<THREADS>(); }

  // The largest value of all threads, and the sum of all, for all threads.
  static __device__ __noinline__ u64 block_max(u64 value, int thread) {
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      const u64 other = __shfl_xor_sync(~0u, value, o);
      value = other > value ? other : value;
    }
    if (thread % 32 == 0) words()[thread / 32] = value;
    barrier();
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) value = words()[w] > value ? words()[w] : value;
    barrier();
    return value;
  }
  static __device__ __noinline__ u64 block_sum(u64 value, int thread) {
#pragma unroll
    for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
    if (thread % 32 == 0) words()[thread / 32] = value;
    barrier();
    u64 sum = 0;
#pragma unroll 1
    for (int w = 0; w < WARPS; w++) sum += words()[w];
    barrier();
    return sum;
  }
  // The sum of the values of all threads up to this one.
  static __device__ __noinline__ u64 block_scan(u64 value, int thread) {
    const int lane = thread % 32;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const u64 other = __shfl_up_sync(~0u, value, o);
      value += lane >= o ? other : 0;
    }
    if (lane == 31) words()[thread / 32] = value;
    barrier();
#pragma unroll 1
    for (int w = 0; w < thread / 32; w++) value += words()[w];
    barrier();
    return value;
  }

  // A part of a row.
  struct Part {
    u32 at, index; // row of the table, part of it
    int first, count;
    const float* logits; // (count)
    float* scores;
    __device__ __forceinline__ Part(const SamplerParams& p, u32 block)
        : at(block / p.parts), index(block % p.parts), first(int(index) * PART), count(min(PART, int(p.vocab) - first)),
          logits(p.logits + u64(p.rows[at].row) * p.vocab + first), scores(row_scores(p, at) + first) {}
  };
  static __device__ __forceinline__ float* row_scores(const SamplerParams& p, u32 at) {
    return p.scores + u64(at) * u32(round_up(int(p.vocab), 4));
  }
  static __device__ __forceinline__ u64 seed_of(const SampleRow& row) { return u64(row.seed_high) << 32 | row.seed_low; }
  // The bucket of a score; SAMPLE_BUCKETS: it is never chosen.
  static __device__ __forceinline__ u32 bucket_of(float score, float score_max) {
    if (!(score > NEGATIVE_INFINITY)) return SAMPLE_BUCKETS;
    const float below = score == score_max ? 0.f : __fsub_rn(score_max, score);
    return below < 64.f ? u32(below * 16.f) : SAMPLE_BUCKETS;
  }
  static __device__ __forceinline__ bool probable(const SampleRow& row, float score, float score_max) {
    return !(row.flags & SAMPLE_MIN_P) || score == score_max || exp_f32(__fsub_rn(score, score_max)) >= row.min_p;
  }

  // ---- adjust -----------------------------------------------------------------------------------------------------

  // The place of a logit among all, -inf after the others. 0: not a number.
  static __device__ __forceinline__ u64 raw_rank(float logit, u32 id) {
    if (logit != logit) return 0;
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.f));
    return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | u32(~id);
  }
  // The most probable ids of a part, in order.
  static __device__ __noinline__ void top_of_part(const SamplerParams& p, const Part& part, u32 top, int thread) {
    u64 last = ~0ull;
#pragma unroll 1
    for (u32 n = 0; n < top; n++) {
      u64 best = 0;
#pragma unroll 4
      for (int i = thread; i < part.count; i += THREADS) {
        const u64 rank = raw_rank(__ldcg(part.logits + i), u32(part.first + i));
        best = rank < last && rank > best ? rank : best;
      }
      last = block_max(best, thread);
      if (thread == 0) p.tops[(u64(part.at) * p.parts + part.index) * SAMPLE_TOP_MAX + n] = last;
    }
  }
  static __device__ __forceinline__ float penalised(const SampleRow& row, float logit, u32 count) {
    if (row.repetition != 1.f) logit = logit < 0.f ? __fmul_rn(logit, row.repetition) : __fdiv_rn(logit, row.repetition);
    if (count > 0 && row.frequency != 0.f) logit = __fsub_rn(logit, __fmul_rn(row.frequency, __uint2float_rn(count)));
    if (count > 0 && row.presence != 0.f) logit = __fsub_rn(logit, row.presence);
    return logit;
  }

  static __device__ __forceinline__ void adjust(const SamplerParams& p, u32 block, int thread) {
    const Part part(p, block);
    const SampleRow& row = p.rows[part.at];
    float* logits = data<float>();
    const u32* mask = row.flags & SAMPLE_MASK ? p.masks + u64(part.at) * u32(ceil_div(int(p.vocab), 32)) : nullptr;
    u64 raw_best = 0;
#pragma unroll 5
    for (int i = thread; i < part.count; i += THREADS) {
      const u32 id = u32(part.first + i);
      const float raw = __ldcg(part.logits + i);
      const u64 rank = rank_of(raw, id);
      raw_best = rank > raw_best ? rank : raw_best;
      logits[i] = !mask || mask[id / 32] >> id % 32 & 1 ? raw : NEGATIVE_INFINITY;
    }
    if (row.flags & SAMPLE_LOGPROBS) top_of_part(p, part, row.top, thread);
    barrier();
    // An id stands once in each list; the lists are applied one after the other.
    const uint2* edits = p.edits + row.edits;
    if (p.step < row.banned_steps && row.banned > 0) {
      for (u32 i = thread; i < row.banned; i += THREADS)
        if (edits[i].x - u32(part.first) < u32(part.count)) logits[edits[i].x - u32(part.first)] = NEGATIVE_INFINITY;
      barrier();
    }
    edits += row.banned;
    if (row.biased > 0) {
      for (u32 i = thread; i < row.biased; i += THREADS) {
        const u32 at = edits[i].x - u32(part.first);
        if (at < u32(part.count)) logits[at] = __fadd_rn(logits[at], __uint_as_float(edits[i].y));
      }
      barrier();
    }
    edits += row.biased;
    if (row.flags & SAMPLE_PENALTIES) {
      for (u32 i = thread; i < row.seen; i += THREADS) {
        const u32 at = edits[i].x - u32(part.first);
        if (at < u32(part.count)) logits[at] = penalised(row, logits[at], edits[i].y);
      }
      barrier();
    }
    u64 best = 0;
    for (int i = thread; i < part.count; i += THREADS) {
      const float score = __fmul_rn(logits[i], row.inverse_temperature);
      part.scores[i] = score;
      const u64 rank = rank_of(score, u32(part.first + i));
      best = rank > best ? rank : best;
    }
    // Later steps read four scores at a time.
    if (thread < round_up(part.count, 4) - part.count) part.scores[part.count + thread] = NEGATIVE_INFINITY;
    best = block_max(best, thread);
    raw_best = block_max(raw_best, thread);
    if (thread == 0) {
      raise_to(&p.totals[part.at].best, best);
      raise_to(&p.totals[part.at].raw_best, raw_best);
    }
  }

  // ---- measure ----------------------------------------------------------------------------------------------------

  // Every THREADS-th value from `first` on, -inf where there is none.
  static __device__ __forceinline__ void load(const float* from, int first, int count, float (&values)[LOADS]) {
#pragma unroll
    for (int n = 0; n < LOADS; n++) values[n] = first + n * THREADS < count ? __ldcg(from + first + n * THREADS) : NEGATIVE_INFINITY;
  }

  static __device__ __forceinline__ void measure(const SamplerParams& p, u32 block, int thread) {
    const Part part(p, block);
    const u32 flags = p.rows[part.at].flags;
    SampleTotals& totals = p.totals[part.at];
    if (flags & SAMPLE_LOGPROBS && totals.raw_best != 0) {
      const float most = score_of(totals.raw_best);
      u64 sum = 0;
#pragma unroll 1
      for (int first = thread; first < part.count; first += LOADS * THREADS) {
        float logits[LOADS];
        load(part.logits, first, part.count, logits);
#pragma unroll
        for (int n = 0; n < LOADS; n++) sum += logits[n] != logits[n] ? 0 : weight_of(logits[n], most);
      }
      sum = block_sum(sum, thread);
      if (thread == 0) add_to(&totals.raw_total, sum);
    }
    if (!(flags & (SAMPLE_TOP_K | SAMPLE_TOP_P)) || totals.best == 0) return;
    const float most = score_of(totals.best);
    u32 *low = data<u32>(), *high = low + SAMPLE_BUCKETS, *counts = high + SAMPLE_BUCKETS;
    for (u32 b = thread; b < 3 * SAMPLE_BUCKETS; b += THREADS) low[b] = 0;
    barrier();
#pragma unroll 1
    for (int first = thread; first < part.count; first += LOADS * THREADS) {
      float scores[LOADS];
      load(part.scores, first, part.count, scores);
#pragma unroll
      for (int n = 0; n < LOADS; n++) {
        const u32 bucket = bucket_of(scores[n], most);
        if (bucket == SAMPLE_BUCKETS) continue;
        if (flags & SAMPLE_TOP_K) add_to(&counts[bucket], 1u);
        const u64 weight = flags & SAMPLE_TOP_P ? weight_of(scores[n], most) : 0;
        if (weight != 0) {
          add_to(&low[bucket], u32(weight) & 0xfffffu);
          add_to(&high[bucket], u32(weight >> 20));
        }
      }
    }
    barrier();
    for (u32 b = thread; b < SAMPLE_BUCKETS; b += THREADS) {
      const u64 weight = low[b] + (u64(high[b]) << 20), at = u64(part.at) * SAMPLE_BUCKETS + b;
      if (weight != 0) add_to(&p.weights[at], weight);
      if (counts[b] != 0) add_to(&p.counts[at], counts[b]);
    }
  }

  // ---- gather -----------------------------------------------------------------------------------------------------

  // Where the filters cut, in buckets: ids in buckets below `sure` are admitted, those from `first` to `last` and in `k_bucket` may be.
  struct Cuts {
    u32 sure, first, last;
    u32 k_bucket;     // SAMPLE_BUCKETS: top-k keeps all
    u64 k_before;     // ids above it
    u64 k_weight;     // weights above it
    u64 total;        // of all weights
    u64 first_weight; // weights above `first`
    __device__ __forceinline__ bool lists(u32 bucket) const {
      return bucket < SAMPLE_BUCKETS && ((bucket >= first && bucket <= last) || bucket == k_bucket);
    }
  };
  static __device__ __noinline__ Cuts find_cuts(const SamplerParams& p, u32 at, int thread) {
    const SampleRow& row = p.rows[at];
    const bool by_weight = row.flags & SAMPLE_TOP_P;
    // [0] k_bucket, ids and weights above it, its weight; [4] total; [5] first bucket of top-p, weights above it; [7] last one
    u64* found = results();
    if (thread == 0) {
      found[0] = found[5] = found[7] = SAMPLE_BUCKETS;
      found[1] = found[2] = found[3] = found[4] = found[6] = 0;
    }
    u64 weights[EACH], ids[EACH], weight = 0, count = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const u64 b = u64(at) * SAMPLE_BUCKETS + u32(thread * EACH + e);
      weight += weights[e] = by_weight ? __ldcg(p.weights + b) : 0;
      count += ids[e] = row.flags & SAMPLE_TOP_K ? __ldcg(p.counts + b) : 0;
    }
    const u64 weight_before = block_scan(weight, thread) - weight, count_before = block_scan(count, thread) - count;
    u64 above = weight_before, before = count_before;
    if (thread == THREADS - 1) found[4] = weight_before + weight;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      if (row.flags & SAMPLE_TOP_K && before < row.top_k && before + ids[e] >= row.top_k) {
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
    barrier();
    return cuts;
  }
  static __device__ __forceinline__ Cuts no_cuts() {
    return Cuts{SAMPLE_BUCKETS, SAMPLE_BUCKETS, SAMPLE_BUCKETS, SAMPLE_BUCKETS, 0, 0, 0, 0};
  }

  // Whether an id with this random word may reach `bound`, a sum of score and noise that another id has. The noise is
  // -ln(-ln(1 - u)) <= -ln(u) for u > x / 2^32. 2 % are far more than the errors of both exponentials and of the sums, where these are
  // below 2^14.
  static __device__ __forceinline__ bool may_reach(u32 x, float score, float bound) {
    return !(fabsf(bound) < 16384.f) || __uint2float_rn(x) * 2.3283064365386963e-10f <= 1.02f * exp_fast(score - bound);
  }

  static __device__ __forceinline__ void gather(const SamplerParams& p, u32 block, int thread) {
    const Part part(p, block);
    const SampleRow& row = p.rows[part.at];
    SampleTotals& totals = p.totals[part.at];
    if (row.flags & SAMPLE_GREEDY || totals.best == 0) return;
    const bool is_filtered = row.flags & (SAMPLE_TOP_K | SAMPLE_TOP_P);
    const Cuts cuts = is_filtered ? find_cuts(p, part.at, thread) : no_cuts();
    u32 *taken = reinterpret_cast<u32*>(results()), *base = taken + 1, *ids = data<u32>();
    if (thread == 0) *taken = 0;
    barrier();
    const float most = score_of(totals.best);
    const u64 seed = seed_of(row);
    const u32 position = row.position + p.step;
    const float bound = __fadd_rn(most, noise(seed, position, id_of(totals.best)));
    u64 best = 0;
#pragma unroll 1
    for (int first = thread * 4; first < part.count; first += THREADS * 4) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(part.scores + first));
      const float scores[4] = {four.x, four.y, four.z, four.w};
      u32 buckets[4], random[4] = {position, 0u, u32(part.first + first) / 4, 0u};
      bool any = false;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        buckets[i] = bucket_of(scores[i], most);
        any = any || buckets[i] < cuts.sure;
        if (is_filtered && cuts.lists(buckets[i])) ids[take_place(taken)] = u32(part.first + first + i);
      }
      if (!any) continue;
      philox(random, u32(seed), u32(seed >> 32));
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (buckets[i] < cuts.sure && may_reach(random[i], scores[i], bound) && probable(row, scores[i], most)) {
          const u64 rank = rank_of(__fadd_rn(scores[i], gumbel(random[i])), u32(part.first + first + i));
          best = rank > best ? rank : best;
        }
    }
    best = block_max(best, thread);
    const u32 count = *taken;
    if (thread == 0) {
      raise_to(&totals.chosen, best);
      if (count > 0) *base = take_places(&totals.listed, count);
    }
    barrier();
    u32* list = p.list + u64(part.at) * p.vocab + *base;
    for (u32 i = thread; i < count; i += THREADS) list[i] = ids[i];
  }

  // ---- decide -----------------------------------------------------------------------------------------------------

  // The listed ids in buckets `first` to `last`, in the order of ranking, and what each adds to a sum.
  struct Listed {
    const u32* list;
    const float* scores;
    u32 count, first, last;
    float most;
    bool by_weight; // else each adds 1
    // Every THREADS-th from `at` on; 0 where there is none. All loads of a kind are on their way at once.
    __device__ __forceinline__ void load(u32 at, u64 (&ranks)[LOADS]) const {
      u32 ids[LOADS];
      float values[LOADS];
#pragma unroll
      for (int n = 0; n < LOADS; n++) ids[n] = at + n * THREADS < count ? __ldcg(list + at + n * THREADS) : ~0u;
#pragma unroll
      for (int n = 0; n < LOADS; n++) values[n] = ids[n] != ~0u ? __ldcg(scores + ids[n]) : NEGATIVE_INFINITY;
#pragma unroll
      for (int n = 0; n < LOADS; n++) {
        const u32 bucket = bucket_of(values[n], most);
        ranks[n] = bucket >= first && bucket <= last ? rank_of(values[n], ids[n]) : 0;
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
      u64 lowest = 0, highest = 0, inside = 0; // `lowest` inverted, so that the largest counts
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
  static __device__ __noinline__ u64 find_least(const SamplerParams& p, const SampleRow& row, Listed q, const Cuts cuts, int thread) {
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

  static __device__ __noinline__ void answer(const SamplerParams& p, u32 at, u64 winner, int thread) {
    SampleRow& row = p.rows[at];
    const SampleTotals& totals = p.totals[at];
    SampleAnswer& to = p.answers[at];
    const u32 token = id_of(winner);
    if (thread == 0) {
      to.token = token;
      to.status = winner ? SAMPLE_CHOSEN : totals.raw_best ? SAMPLE_NONE_ALLOWED : SAMPLE_NO_CANDIDATE;
      // The next launch reads a row of the table of embeddings in any case.
      if (p.next) p.next[row.row * p.next_stride] = winner ? i32(token) : 0;
    }
    if (!winner) return;
    if (row.flags & SAMPLE_LOGPROBS) {
      if (thread == 0) {
        to.logit = __ldcg(p.logits + u64(row.row) * p.vocab + token);
        to.logit_max = score_of(totals.raw_best);
        to.total_low = u32(totals.raw_total);
        to.total_high = u32(totals.raw_total >> 32);
      }
      const u64* tops = p.tops + u64(at) * p.parts * SAMPLE_TOP_MAX;
      u64 last = ~0ull;
      u32 count = 0;
#pragma unroll 1
      for (; count < row.top; count++) {
        u64 best = 0;
#pragma unroll 1
        for (u32 i = thread; i < p.parts * row.top; i += THREADS) {
          const u64 rank = __ldcg(tops + i / row.top * SAMPLE_TOP_MAX + i % row.top);
          best = rank < last && rank > best ? rank : best;
        }
        last = block_max(best, thread);
        if (last == 0) break;
        if (thread == 0) {
          to.top_ids[count] = id_of(last);
          to.top_logits[count] = score_of(last);
        }
      }
      if (thread == 0) to.top = count;
    }
    if (row.flags & SAMPLE_PENALTIES) {
      // Counts the token for the steps that follow.
      uint2* seen = p.edits + row.edits + row.banned + row.biased;
      const u32 count = row.seen;
      u64 found = 0;
      for (u32 i = thread; i < count; i += THREADS)
        if (seen[i].x == token) {
          seen[i].y++;
          found = 1;
        }
      found = block_max(found, thread);
      if (found == 0 && thread == 0) {
        seen[count] = make_uint2(token, 1u);
        row.seen = count + 1;
      }
    }
  }

  static __device__ __forceinline__ void decide(const SamplerParams& p, u32 at, int thread) {
    const SampleRow& row = p.rows[at];
    SampleTotals& totals = p.totals[at];
    u64 winner = row.flags & SAMPLE_GREEDY ? totals.best : totals.chosen;
    if (row.flags & (SAMPLE_TOP_K | SAMPLE_TOP_P) && totals.best != 0) {
      const Cuts cuts = find_cuts(p, at, thread);
      const float most = score_of(totals.best);
      const Listed q{p.list + u64(at) * p.vocab, row_scores(p, at), totals.listed, 0, SAMPLE_BUCKETS - 1, most, false};
      const u64 least = find_least(p, row, q, cuts, thread);
      const u64 seed = seed_of(row);
      q.each(thread, [&](u64 rank) {
        const float score = score_of(rank);
        if (rank < least || !probable(row, score, most)) return;
        const u64 noisy = rank_of(__fadd_rn(score, noise(seed, row.position + p.step, id_of(rank))), id_of(rank));
        winner = noisy > winner ? noisy : winner;
      });
      winner = block_max(winner, thread);
    }
    answer(p, at, winner, thread);
    barrier();
    for (u32 b = thread; b < SAMPLE_BUCKETS; b += THREADS) {
      p.weights[u64(at) * SAMPLE_BUCKETS + b] = 0;
      p.counts[u64(at) * SAMPLE_BUCKETS + b] = 0;
    }
    if (thread == 0) totals = SampleTotals{};
  }
};
