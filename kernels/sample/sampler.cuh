// sampler: the token of each row from its logits, exactly as src/sample specifies it for a request.
//
// logits (ROWS, VOCAB)  what a launch of a kernel for rows left in memory; this kernel starts after it on the same stream
// answers (ROWS)        token, and what its log-probabilities are computed from
//
// owner    `parts` blocks share a row, `at_once` rows are decided at the same time. The block of a row that is done last answers for it
// moves    the logits once, into shared memory
// assumes  all blocks are resident at once: those of a row wait for each other's best score
//
//   adjust   l = logit after mask, bans, bias and penalties; score s = l * inverse_temperature; the best s of the part, for all blocks of
//            the row; for each id a bound of its noise
//   choose   for each bucket of scores: ids in it, the sum of their weights; for ids that may win: s + noise.
//            The last block of a row then finds the buckets where the filters cut, and the best s + noise above them. Only if an id in
//            these buckets has a better one, it lists their ids and finds where exactly the filters cut
//
// A bucket is 1/64 wide near the best score, where filters cut, and 1/8 far below it: bucket_at. The subtraction s_max - s rounds, but
// monotonically, so buckets are in the order of scores. All sums are of integers: their order does not matter. Ids 60 or more below the
// best score are never chosen, because the noise of two ids differs by less than 27 and rounding at such scores cannot make up for the
// rest: no bucket has them.
//
// All threads run inline code only. A function out of line saves registers in local memory, and those of all threads took 15 MB of L2: the
// next step then had to fetch other lines again. The less code this kernel has, the more of its own code the next step finds in the caches of
// an SM.
#pragma once

constexpr u32 SAMPLE_BUCKETS = 1024;

template <class S>
struct Sampler {
  static constexpr int THREADS = S::THREADS, WARPS = THREADS / 32;
  static constexpr int EACH = SAMPLE_BUCKETS / THREADS; // buckets of a thread
  static constexpr int QUADS = 4;                       // four neighbouring ids of a thread that are on their way at once
  static constexpr int EDITS = 2;                       // entries of a thread that are on their way at once
  static constexpr int LOADS = 2;                       // values of a thread that are on their way at once
  // Words of the warps, results of a search, the row of the table, three words for each bucket, ids that may win; then for each id of the
  // part its logit, and a bound of its noise as bf16.
  static constexpr u32 LISTED = 512;
  static constexpr int RESULTS_AT = 256, ROW_AT = 384, BUCKETS_AT = 512, LIST_AT = BUCKETS_AT + int(SAMPLE_BUCKETS) * 12;
  static constexpr int LOGITS_AT = LIST_AT + int(LISTED) * 4;
  static_assert(WARPS <= 16 && WARPS * 16 <= RESULTS_AT && SAMPLE_BUCKETS % THREADS == 0, "each warp has two words, each thread as many buckets");
  static_assert(ROW_AT + int(sizeof(SampleRow)) <= BUCKETS_AT && THREADS * 16 <= LIST_AT - BUCKETS_AT && LOGITS_AT == S::FIXED_BYTES,
                "a row has its place, and a search that of the buckets");

  static __device__ __forceinline__ u64* words() { return reinterpret_cast<u64*>(block_memory()); }
  static __device__ __forceinline__ u64* results() { return reinterpret_cast<u64*>(block_memory() + RESULTS_AT); }
  static __device__ __forceinline__ SampleRow& own_row() { return *reinterpret_cast<SampleRow*>(block_memory() + ROW_AT); }
  static __device__ __forceinline__ u32* buckets() { return reinterpret_cast<u32*>(block_memory() + BUCKETS_AT); }
  static __device__ __forceinline__ float* logits() { return reinterpret_cast<float*>(block_memory() + LOGITS_AT); }
  static __device__ __forceinline__ u32* rivals() { return reinterpret_cast<u32*>(block_memory() + LIST_AT); }
  static __device__ __forceinline__ u32* rival_count() { return reinterpret_cast<u32*>(results() + 3); }
  static __device__ __forceinline__ u32* bounds(const SamplerParams& p) {
    return reinterpret_cast<u32*>(block_memory() + LOGITS_AT + p.part_ids * 4);
  }
  static __device__ __forceinline__ void barrier() { consumer_barrier<THREADS>(); }

  static __device__ __forceinline__ u64 warp_most(u64 value) {
    const u32 own = u32(value >> 32), high = warp_max(own);
    return u64(high) << 32 | warp_max(own == high ? u32(value) : 0u);
  }
  static __device__ __forceinline__ u64 warp_total(u64 value) {
#pragma unroll
    for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
    return value;
  }
  // Maxima over all threads of two values or of one, and the sum of a value. All threads get the results.
  static __device__ __forceinline__ void block_max(u64& a, u64& b, int thread) {
    const int lane = thread % 32;
    a = warp_most(a);
    b = warp_most(b);
    if (lane == 0) {
      words()[thread / 32] = a;
      words()[WARPS + thread / 32] = b;
    }
    barrier();
    a = warp_most(lane < WARPS ? words()[lane] : 0);
    b = warp_most(lane < WARPS ? words()[WARPS + lane] : 0);
    barrier();
  }
  static __device__ __forceinline__ u64 block_max(u64 value, int thread) {
    const int lane = thread % 32;
    value = warp_most(value);
    if (lane == 0) words()[thread / 32] = value;
    barrier();
    value = warp_most(lane < WARPS ? words()[lane] : 0);
    barrier();
    return value;
  }
  static __device__ __noinline__ u64 block_sum(u64 value, int thread) {
    const int lane = thread % 32;
    value = warp_total(value);
    if (lane == 0) words()[thread / 32] = value;
    barrier();
    value = warp_total(lane < WARPS ? words()[lane] : 0);
    barrier();
    return value;
  }
  // The sum of the values of all threads up to this one.
  static __device__ __forceinline__ u64 block_scan(u64 value, int thread) {
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      const u64 other = __shfl_up_sync(~0u, value, o);
      value += lane >= o ? other : 0;
    }
    if (lane == 31) words()[warp] = value;
    barrier();
    value += warp_total(lane < warp ? words()[lane] : 0);
    barrier();
    return value;
  }

  // A part of a row.
  struct Part {
    u32 at, index; // row of the table, part of it
    int first, count;
    const float* logits; // (count)
    __device__ __forceinline__ Part(const SamplerParams& p, u32 at, u32 index)
        : at(at), index(index), first(int(index * p.part_ids)), count(min(int(p.part_ids), int(p.vocab) - first)),
          logits(p.logits + u64(p.begins[at].row) * p.vocab + first) {}
  };
  // A row of the table is copied to shared memory, where all threads find it after a barrier: a thread's word of it.
  static constexpr int ROW_WORDS = sizeof(SampleRow) / 4;
  static __device__ __forceinline__ u32 load_row(const SamplerParams& p, u32 at, int thread) {
    return thread < ROW_WORDS ? __ldcg(reinterpret_cast<const u32*>(p.rows + at) + thread) : 0;
  }
  static __device__ __forceinline__ void store_row(u32 word, int thread) {
    if (thread < ROW_WORDS) reinterpret_cast<u32*>(&own_row())[thread] = word;
  }
  // With those of the steps before, of which each has an entry of its own: if its token was seen before, no id is in it.
  static __device__ __forceinline__ u32 seen_count(const SamplerParams& p) { return own_row().seen + p.step; }
  static __device__ __forceinline__ u64 seed_of(const SampleRow& row) { return u64(row.seed_high) << 32 | row.seed_low; }
  // Distance of a score from the best one, at most 0. Equality comes first, because the difference of infinities is a NaN.
  static __device__ __forceinline__ float distance(float score, float score_max) {
    return score == score_max ? 0.f : __fsub_rn(score, score_max);
  }
  // The bucket of a score at this distance; SAMPLE_BUCKETS: it is never chosen, or not a number. Numbers from 4 to 64 as bits of fp32 without the
  // lowest 15: 256 buckets for each power of two, so their widths are 1/64 to a distance of 4, 1/32 to 12, 1/16 to 28 and 1/8 to 60.
  static __device__ __forceinline__ u32 bucket_at(float distance) {
    return (__float_as_uint(fminf(__fsub_rn(4.f, distance), 64.f)) >> 15) - 0x8100u;
  }
  static __device__ __forceinline__ u32 bucket_of(float score, float score_max) { return bucket_at(distance(score, score_max)); }
  static __device__ __forceinline__ bool probable(const SampleRow& row, float score, float score_max) {
    return !(row.flags & SAMPLE_MIN_P) || score == score_max || exp_f32(__fsub_rn(score, score_max)) >= row.min_p;
  }

  // ---- adjust -----------------------------------------------------------------------------------------------------

  // Rank of a logit: the larger, the better; -inf is the lowest. 0: not a number.
  static __device__ __forceinline__ u64 raw_rank(float logit, u32 id) {
    if (logit != logit) return 0;
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.f));
    return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | u32(~id);
  }
  // The most probable ids of a part, in order.
  static __device__ __forceinline__ void top_of_part(const SamplerParams& p, const Part& part, u32 top, int thread) {
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

  // The lists of a row, in the order in which they are applied; no list has an id twice.
  enum List : u32 { BANNED, BIASED, SEEN, LISTS };
  static __device__ __forceinline__ u32 count_of(const SamplerParams& p, u32 list) {
    const SampleRow& row = own_row();
    if (list == BANNED) return p.step < row.banned_steps ? row.banned : 0;
    if (list == BIASED) return row.biased;
    return list == SEEN && row.flags & SAMPLE_PENALTIES ? seen_count(p) : 0;
  }
  // The first list from `list` on that has entries.
  static __device__ __forceinline__ u32 list_from(const SamplerParams& p, u32 list) {
    while (list < LISTS && count_of(p, list) == 0) list++;
    return list;
  }
  static __device__ __forceinline__ uint2* entries_of(const SamplerParams& p, u32 at, u32 list) {
    const SampleRow& row = own_row();
    return p.edits + p.begins[at].edits + (list > BANNED ? row.banned : 0) + (list > BIASED ? row.biased : 0);
  }
  static __device__ __forceinline__ float edited(u32 list, float logit, u32 value) {
    if (list == BANNED) return NEGATIVE_INFINITY;
    if (list == BIASED) return __fadd_rn(logit, __uint_as_float(value));
    return penalised(own_row(), logit, value);
  }
  // Every THREADS-th entry of a list from `from` on.
  static __device__ __forceinline__ void load(const uint2* edits, u32 from, u32 count, uint2 (&entries)[EDITS]) {
#pragma unroll
    for (int n = 0; n < EDITS; n++) entries[n] = from + n * THREADS < count ? __ldcg(edits + from + n * THREADS) : make_uint2(~0u, 0u);
  }

  // Brings the logits of a part to shared memory, four at a time.
  static __device__ __forceinline__ void bring(const Part& part, int thread) {
    float* logits = Sampler::logits();
#pragma unroll 1
    for (int first = 4 * thread; first < part.count; first += QUADS * 4 * THREADS) {
      float4 quads[QUADS];
#pragma unroll
      for (int n = 0; n < QUADS; n++) {
        const int at = first + n * 4 * THREADS;
        quads[n] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY};
        if (at < part.count) quads[n] = __ldcg(reinterpret_cast<const float4*>(part.logits + at));
      }
#pragma unroll
      for (int n = 0; n < QUADS; n++) {
        const int at = first + n * 4 * THREADS;
        if (at < part.count) reinterpret_cast<float4*>(logits + at)[0] = quads[n];
      }
    }
  }
  // Brings the logits of a part to shared memory, and changes them as the request says. A thread may then read its own ids, four at
  // `4 * (n * THREADS + thread)`, without a barrier. Four logits are loaded at a time if the vocabulary allows it.
  static __device__ __forceinline__ void stage(const SamplerParams& p, const Part part, int thread) {
    const SampleRow& row = own_row();
    float* logits = Sampler::logits();
    // The first entries are loaded together with the logits.
    u32 list = list_from(p, BANNED);
    uint2 entries[EDITS];
    load(entries_of(p, part.at, list), u32(thread), count_of(p, list), entries);
    if (p.vocab % 4 == 0) {
      bring(part, thread);
    } else {
#pragma unroll 4
      for (int i = thread; i < round_up(part.count, 4); i += THREADS) logits[i] = i < part.count ? __ldcg(part.logits + i) : NEGATIVE_INFINITY;
      barrier();
    }
    if (row.flags & SAMPLE_MASK) {
      const u32* mask = p.masks + u64(part.at) * u32(ceil_div(int(p.vocab), 32));
#pragma unroll 1
      for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
        const u32 id = u32(part.first + at), bits = __ldcg(mask + id / 32) >> id % 32;
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (!(bits >> i & 1)) logits[at + i] = NEGATIVE_INFINITY;
      }
    }
    if (list < LISTS) barrier();
#pragma unroll 1
    while (list < LISTS) {
      const u32 count = count_of(p, list);
#pragma unroll 1
      for (u32 from = thread; from < count; from += EDITS * THREADS) {
        if (from != u32(thread)) load(entries_of(p, part.at, list), from, count, entries);
#pragma unroll
        for (int n = 0; n < EDITS; n++) {
          const u32 at = entries[n].x - u32(part.first);
          if (at < u32(part.count)) logits[at] = edited(list, logits[at], entries[n].y);
        }
      }
      // The lists are applied one after the other.
      barrier();
      list = list_from(p, list + 1);
      load(entries_of(p, part.at, list), u32(thread), count_of(p, list), entries);
    }
  }
  // Four scores of a part that was staged.
  static __device__ __forceinline__ void scores_at(float inverse_temperature, int at, float (&scores)[4]) {
    const float4 four = reinterpret_cast<const float4*>(logits() + at)[0];
    scores[0] = __fmul_rn(four.x, inverse_temperature);
    scores[1] = __fmul_rn(four.y, inverse_temperature);
    scores[2] = __fmul_rn(four.z, inverse_temperature);
    scores[3] = __fmul_rn(four.w, inverse_temperature);
  }

  static __device__ __forceinline__ float most_of(const float (&four)[4]) { return fmaxf(fmaxf(four[0], four[1]), fmaxf(four[2], four[3])); }

  // For each id an upper bound of its noise. The noise is -ln(-ln(1 - u)) <= -ln(u) for u > x / 2^32, and x is the word of the id; 32 * ln(2)
  // is 22.18071.
  static __device__ __forceinline__ void bound_noise(const SamplerParams& p, const Part& part, int thread) {
    const SampleRow& row = own_row();
    const u32 own_position = row.position + p.step, seed_low = row.seed_low, seed_high = row.seed_high;
    u32* to = bounds(p);
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      u32 random[4] = {own_position, 0u, u32(part.first + at) / 4, 0u};
      philox<10>(random, seed_low, seed_high);
      float most[4];
#pragma unroll
      for (int i = 0; i < 4; i++) most[i] = 22.180710f - log_fast(__uint2float_rn(random[i]));
      reinterpret_cast<uint2*>(to + at / 2)[0] = make_uint2(bf16_pair(most[0], most[1]), bf16_pair(most[2], most[3]));
    }
  }

  // The words of the best score and of the best logit of each part of a row, which are not 0 once they are told. A rank is never 1.
  static __device__ __forceinline__ u64* best_words(const SamplerParams& p, u32 at) { return p.parts_best + u64(at) * p.parts * 2; }

  // The largest logit of a part as the model computed it, as a rank; 0: none is a number.
  static __device__ __forceinline__ u64 raw_best_of(const Part& part, int thread) {
    float most = NEGATIVE_INFINITY;
#pragma unroll 4
    for (int i = thread; i < part.count; i += THREADS) most = fmaxf(most, __ldcg(part.logits + i)); // of a number and a NaN: the number
    return block_max(rank_of(most, 0), thread);
  }

  static __device__ __forceinline__ void adjust(const SamplerParams& p, u32 at, u32 index, int thread) {
    store_row(load_row(p, at, thread), thread);
    barrier();
    const Part part(p, at, index);
    const SampleRow& row = own_row();
    const bool is_greedy = row.flags & SAMPLE_GREEDY, has_logprobs = row.flags & SAMPLE_LOGPROBS;
    if (!is_greedy)
      for (u32 n = thread; n < 3 * SAMPLE_BUCKETS / 4; n += THREADS) reinterpret_cast<uint4*>(buckets())[n] = make_uint4(0u, 0u, 0u, 0u);
    stage(p, part, thread);
    // The best score, and where the first four ids with it begin. A thread takes its ids in their order.
    const float inverse_temperature = row.inverse_temperature;
    float most = NEGATIVE_INFINITY;
    int found = 0;
#pragma unroll 2
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      float scores[4];
      scores_at(inverse_temperature, at, scores);
      const float best = most_of(scores);
      if (best > most) most = best, found = at;
    }
    float scores[4] = {};
    if (most > NEGATIVE_INFINITY) scores_at(inverse_temperature, found, scores);
    u32 id = u32(part.first + found);
    id += scores[0] == most ? 0 : scores[1] == most ? 1 : scores[2] == most ? 2 : 3;
    const u64 best = block_max(rank_of(most, id), thread);
    // If a part has an id that may be chosen, no answer says whether its logits are numbers.
    const u64 raw_best = has_logprobs || best == 0 ? raw_best_of(part, thread) : 0;
    if (thread == 0) {
      u64* to = best_words(p, at) + index * 2;
      tell_blocks(to, best ? best : 1);
      tell_blocks(to + 1, raw_best ? raw_best : 1);
    }
    if (has_logprobs) top_of_part(p, part, row.top, thread);
    // While the other blocks of the row find theirs.
    if (!is_greedy) bound_noise(p, part, thread);
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
    const SampleRow& row = own_row();
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
      // Together, so they are not by_weight and by_count: what no block added to is zero.
      weights[e] = __ldcg(p.weights + own + e);
      ids[e] = __ldcg(p.counts + own + e);
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

  // Adds a part to its buckets: ids, and sums of weights of 64 bits in two words.
  static __device__ __forceinline__ void fill_buckets(const Part& part, float most, int thread) {
    const SampleRow& row = own_row();
    const bool by_weight = row.flags & SAMPLE_TOP_P, by_count = row.flags & SAMPLE_TOP_K;
    const float inverse_temperature = row.inverse_temperature;
    u32 *low = buckets(), *high = low + SAMPLE_BUCKETS, *counts = high + SAMPLE_BUCKETS;
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      float scores[4];
      scores_at(inverse_temperature, at, scores);
      u32 in[4];
#pragma unroll
      for (int i = 0; i < 4; i++) in[i] = bucket_of(scores[i], most);
      if (by_weight) {
        u64 weights[4];
        // The same as weight_of, without branches, so that the four run side by side: e^-30 has a weight of 0, too. The exponent of
        // 2^n and of the unit is added to that of the fraction: the lowest bits of 1.5 * 2^23 + n + 40 are n + 40.
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float n;
          const float fraction = exp_fraction(fmaxf(distance(scores[i], most), -30.f), n);
          weights[i] = u64(__uint_as_float(__float_as_uint(fraction) + (__float_as_uint(__fadd_rn(n, 12582952.f)) << 23)));
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (in[i] == SAMPLE_BUCKETS || weights[i] == 0) continue;
          const u32 half = u32(weights[i]), carried = take_places(&low[in[i]], half) + half < half;
          const u32 rest = u32(weights[i] >> 32) + carried;
          if (rest) add_to(&high[in[i]], rest);
        }
      }
      if (by_count)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (in[i] != SAMPLE_BUCKETS) add_to(&counts[in[i]], 1u);
    }
  }
  // Adds the buckets of a part to those of the row.
  static __device__ __forceinline__ void add_buckets(const SamplerParams& p, const Part& part, int thread) {
    const u32 *low = buckets(), *high = low + SAMPLE_BUCKETS, *counts = high + SAMPLE_BUCKETS;
    const u64 first_bucket = u64(part.at) * SAMPLE_BUCKETS;
    u32* present = p.present + (u64(part.at) * p.parts + part.index) * (SAMPLE_BUCKETS / 32);
#pragma unroll
    for (u32 b = thread; b < SAMPLE_BUCKETS; b += THREADS) {
      const u64 weight = u64(high[b]) << 32 | low[b];
      const u32 count = counts[b], ids = __ballot_sync(~0u, weight != 0 || count != 0);
      if (weight != 0) add_to(&p.weights[first_bucket + b], weight);
      if (count != 0) add_to(&p.counts[first_bucket + b], count);
      if (thread % 32 == 0) present[b / 32] = ids;
    }
  }
  // The rank of s + noise of an id of a part, which its bucket also gets; 0: it is never chosen, or min-p leaves it out.
  static __device__ __forceinline__ u64 compete(const SamplerParams& p, const Part& part, u32 i, float most) {
    const SampleRow& row = own_row();
    const float score = __fmul_rn(logits()[i], row.inverse_temperature);
    const u32 bucket = bucket_of(score, most), id = u32(part.first) + i;
    if (bucket == SAMPLE_BUCKETS || !probable(row, score, most)) return 0;
    const u64 rank = rank_of(__fadd_rn(score, noise(seed_of(row), row.position + p.step, id)), id);
    if (row.flags & (SAMPLE_TOP_K | SAMPLE_TOP_P)) raise_to(&p.bests[u64(part.at) * SAMPLE_BUCKETS + bucket], rank);
    return rank;
  }
  // Lists the ids of a part that may reach `bound`, a sum of score and noise that another id has; -inf: all may. Sums below 2^14, bounds in
  // bf16 and logarithms have errors of less than 0.1. The count may be larger than the list.
  static __device__ __forceinline__ void list_rivals(const SamplerParams& p, const Part& part, float bound, int thread) {
    const float inverse_temperature = own_row().inverse_temperature, least = bound - 0.1f;
    const u32* above = bounds(p);
    u32 *listed = rivals(), *count = rival_count();
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      float scores[4];
      scores_at(inverse_temperature, at, scores);
      const uint2 pairs = reinterpret_cast<const uint2*>(above + at / 2)[0];
      const float most_noise[4] = {bf16_lo(pairs.x), bf16_hi(pairs.x), bf16_lo(pairs.y), bf16_hi(pairs.y)};
      u32 reach = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) reach |= u32(scores[i] + most_noise[i] >= least) << i;
      if (reach == 0) continue;
#pragma unroll 1
      for (int i = 0; i < 4; i++) {
        if (!(reach >> i & 1)) continue;
        const u32 place = take_place(count);
        if (place < LISTED) listed[place] = u32(at + i);
      }
    }
  }
  // The sum of the weights of a part's logits as the model computed them.
  static __device__ __forceinline__ void add_raw(const SamplerParams& p, const Part part, float most, int thread) {
    u64 sum = 0;
#pragma unroll 1
    for (int first = thread; first < part.count; first += LOADS * THREADS) {
      float logits[LOADS];
#pragma unroll
      for (int n = 0; n < LOADS; n++)
        logits[n] = first + n * THREADS < part.count ? __ldcg(part.logits + first + n * THREADS) : NEGATIVE_INFINITY;
#pragma unroll
      for (int n = 0; n < LOADS; n++) sum += logits[n] != logits[n] ? 0 : weight_of(logits[n], most);
    }
    sum = block_sum(sum, thread);
    if (thread == 0) add_to(&p.totals[part.at].raw_total, sum);
  }

  // Waits for the other parts of a row: the best score and the best logit of all.
  static __device__ __forceinline__ void find_bests(const SamplerParams& p, u32 at, u64& best, u64& raw_best, int thread) {
    if (thread < 32) {
      const u64* from = best_words(p, at);
      best = raw_best = 0;
      for (u32 index = thread; index < p.parts; index += 32) {
        const u64 score = wait_for_block(from + index * 2), logit = wait_for_block(from + index * 2 + 1);
        best = score > best ? score : best;
        raw_best = logit > raw_best ? logit : raw_best;
      }
      best = warp_most(best);
      raw_best = warp_most(raw_best);
      if (thread == 0) {
        results()[0] = best > 1 ? best : 0;
        results()[1] = raw_best > 1 ? raw_best : 0;
        *rival_count() = 0;
      }
    }
    barrier();
    best = results()[0];
    raw_best = results()[1];
  }

  // Whether this block is the last one of the row that is done, so that it answers.
  static __device__ __forceinline__ bool choose(const SamplerParams& p, u32 at, u32 index, int thread) {
    const SampleRow& row = own_row();
    const u32 flags = row.flags;
    const bool is_greedy = flags & SAMPLE_GREEDY, has_logprobs = flags & SAMPLE_LOGPROBS;
    const bool has_buckets = !is_greedy && (flags & (SAMPLE_TOP_K | SAMPLE_TOP_P));
    // One block decides.
    if (is_greedy && !has_logprobs && index > 0) return false;
    u64 best, raw_best;
    find_bests(p, at, best, raw_best, thread);
    if (is_greedy && !has_logprobs) return true;
    const Part part(p, at, index);
    SampleTotals& totals = p.totals[at];
    if (has_logprobs && raw_best != 0) add_raw(p, part, score_of(raw_best), thread);
    if (!is_greedy && best != 0) {
      const float most = score_of(best);
      // The best id is admitted in any case: its sum bounds that of the winner.
      float* bound = reinterpret_cast<float*>(results() + 2);
      // The last warp has the fewest ids.
      if (thread >= THREADS - 32) {
        const float sum = __fadd_rn(most, noise(seed_of(row), row.position + p.step, id_of(best)));
        // Errors of smaller sums only are allowed for.
        if (thread == THREADS - 1) *bound = fabsf(sum) < 16384.f ? sum : NEGATIVE_INFINITY;
      }
      if (has_buckets) fill_buckets(part, most, thread);
      barrier();
      list_rivals(p, part, *bound, thread);
      barrier();
      if (has_buckets) add_buckets(p, part, thread);
      // If not all have a place in the list, all ids are looked at.
      const bool are_listed = *rival_count() <= LISTED;
      const u32 count = are_listed ? *rival_count() : u32(part.count);
      u64 chosen = 0;
#pragma unroll 1
      for (u32 n = thread; n < count; n += THREADS) {
        const u64 rank = compete(p, part, are_listed ? rivals()[n] : n, most);
        chosen = rank > chosen ? rank : chosen;
      }
      if (!has_buckets) {
        chosen = block_max(chosen, thread);
        if (thread == 0) raise_to(&totals.chosen, chosen);
      }
    }
    // All threads add their sums before the block counts itself.
    u32* done = reinterpret_cast<u32*>(results() + 8);
    barrier();
    if (thread == 0) *done = count_block(&totals.done);
    barrier();
    return *done == p.parts - 1;
  }

  // The rows of a block, one after the other.
  static __device__ __forceinline__ void sample(const SamplerParams& p, u32 block, int thread) {
    for (u32 at = block / p.parts;;) {
      adjust(p, at, block % p.parts, thread);
      if (choose(p, at, block % p.parts, thread)) settle(p, at, thread);
      at += p.at_once;
      if (at >= p.row_count) return;
      barrier();
    }
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
    u64 *ranks = reinterpret_cast<u64*>(buckets()), *adds = ranks + THREADS, *found = results();
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

  // By one thread: the token of a row, for the host and for the next launch. `winner` 0: there is none, as `status` says.
  static __device__ __forceinline__ void write_token(const SamplerParams& p, u32 at, u64 winner, u32 status) {
    SampleAnswer& to = p.answers[at];
    to.token = id_of(winner);
    to.status = status;
    // The next launch reads a row of the table of embeddings in any case.
    if (p.next) p.next[p.begins[at].row * p.next_stride] = winner ? i32(id_of(winner)) : 0;
  }
  // Counts a token for the steps that follow. `entries` are the first ones of ids that were seen.
  static __device__ __forceinline__ void count_token(const SamplerParams& p, u32 at, u32 token, uint2 (&entries)[EDITS], int thread) {
    uint2* seen = entries_of(p, at, SEEN);
    const u32 count = seen_count(p);
    u32* found = reinterpret_cast<u32*>(words());
    if (thread == 0) *found = 0;
    barrier();
#pragma unroll 1
    for (u32 from = thread; from < count; from += EDITS * THREADS) {
      if (from != u32(thread)) load(seen, from, count, entries);
#pragma unroll
      for (int n = 0; n < EDITS; n++)
        if (entries[n].x == token) {
          seen[from + n * THREADS].y = entries[n].y + 1;
          *found = 1;
        }
    }
    barrier();
    if (thread == 0 && *found == 0) seen[count] = make_uint2(token, 1u);
  }
  static __device__ __forceinline__ void answer(const SamplerParams& p, u32 at, u64 winner, u64 raw_best, uint2 (&entries)[EDITS], int thread) {
    const SampleRow& row = own_row();
    SampleAnswer& to = p.answers[at];
    const u32 token = id_of(winner);
    if (thread == 0) write_token(p, at, winner, winner ? SAMPLE_CHOSEN : raw_best ? SAMPLE_NONE_ALLOWED : SAMPLE_NO_CANDIDATE);
    if (!winner) return;
    if (row.flags & SAMPLE_LOGPROBS) {
      if (thread == 0) {
        const u64 raw_total = __ldcg(&p.totals[at].raw_total);
        to.logit = __ldcg(p.logits + u64(p.begins[at].row) * p.vocab + token);
        to.logit_max = score_of(raw_best);
        to.total_low = u32(raw_total);
        to.total_high = u32(raw_total >> 32);
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
    if (row.flags & SAMPLE_PENALTIES) count_token(p, at, token, entries, thread);
  }

  // Lists the ids of the buckets where filters cut.
  static __device__ __forceinline__ u32 list_cut(const SamplerParams& p, u32 at, const Cuts cuts, float most, int thread) {
    const float inverse_temperature = own_row().inverse_temperature;
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
      const Part part(p, at, parts[n]);
      stage(p, part, thread);
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
    const SampleRow& row = own_row();
    const u32 count = list_cut(p, at, cuts, most, thread);
    const Listed q{p.list + u64(at) * p.vocab, count, 0, SAMPLE_BUCKETS - 1, most, false};
    const u64 least = find_least(p, row, q, cuts, thread), seed = seed_of(row);
    q.each(thread, [&](u64 rank) {
      const float score = score_of(rank);
      if (rank < least || !probable(row, score, most)) return;
      const u64 noisy = rank_of(__fadd_rn(score, noise(seed, row.position + p.step, id_of(rank))), id_of(rank));
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

  // Answers for a row, and zeroes what its blocks found together for the next launch.
  static __device__ __forceinline__ void settle(const SamplerParams& p, u32 at, int thread) {
    const u32 flags = own_row().flags;
    const u64 best = results()[0], raw_best = results()[1];
    uint2 entries[EDITS];
    load(entries_of(p, at, SEEN), u32(thread), count_of(p, SEEN), entries);
    barrier();
    SampleTotals& totals = p.totals[at];
    u64 winner = best;
    if (!(flags & SAMPLE_GREEDY) && best != 0)
      winner = flags & (SAMPLE_TOP_K | SAMPLE_TOP_P) ? admitted_winner(p, at, score_of(best), thread) : __ldcg(&totals.chosen);
    answer(p, at, winner, raw_best, entries, thread);
    u64* words = best_words(p, at);
    for (u32 n = thread; n < p.parts * 2; n += THREADS) words[n] = 0;
    barrier();
    if (thread == 0) totals = SampleTotals{};
  }
};
