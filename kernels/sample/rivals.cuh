// rivals: the token of each row as `Sampler` chooses it, in less time and with less code, for requests that ask for temperature, penalties and a
// top-p that admits nearly all.
//
// The best few sums of score and noise of a row, its rivals, are known before any filter is. Then one pass over the scores finds what top-p
// needs to know of all of them: the sum of all weights, and for each rival the sum of those above it. The first rival that is admitted wins.
//
//   find     adjusted logits; for each id a bound of its sum; exact sums of the few ids with the best bounds. A part tells its best score, its
//            two best sums, and a bound of all its other sums
//   weigh    the row's four best sums; the weights of the part, and those above each rival. A part tells these sums
//   settle   the first block of a row compares sums, and answers. Where it cannot be sure, it alone looks through the row
//
// Weights are numbers of fp32 here, whose sums have errors. A comparison counts only if no such error could change it. So does a rival only if
// no id that was not looked at can have a better sum.
//
// Loops are short rather than unrolled where one warp runs them: see `Sampler` about code.
#pragma once

template <class S>
struct RivalSampler : Sampler<S> {
  typedef Sampler<S> Base;
  typedef typename Base::Part Part;
  using Base::barrier, Base::logits, Base::most_of, Base::own_row, Base::scores_at, Base::EDITS, Base::THREADS, Base::WARPS;

  static constexpr int RIVALS = 4, OF_PART = 2; // of a row, of a part of it
  // Most ids of a part with an exact sum. Where fewer than four warps have ids, all may be listed: three warps have 3 * 128 at least.
  static constexpr u32 LISTED = 3 * (THREADS > 128 ? 128 : THREADS);
  static constexpr float LN_2_32 = 22.180710f; // ln(2^32)
  // What a part tells: best score and bound; rank, then score and ties, of each rival; negative sums of weights, of which no word is 0.
  static constexpr int SUMS = 1 + RIVALS, SUMS_AT = 1 + 2 * OF_PART, SUM_WORDS = (SUMS + 1) / 2, WORDS = TOLD_WORDS;
  static_assert(SUMS_AT + SUM_WORDS <= WORDS && OF_PART < RIVALS, "a part has so many words");

  // What the block knows of the row.
  struct Found {
    u64 ranks[RIVALS];                   // of the best sums of score and noise, in order; 0: no more
    float scores[RIVALS], below[RIVALS]; // of these ids, and the largest numbers below them
    u32 ties[RIVALS];                    // ids of the same four with equal scores and better ranks
    float sums[SUMS];                    // of all weights, and of those above each rival
    float most, bound;                   // the best score; no sum above this one is missing in `ranks`
    u32 listed;                          // ids of the part that are listed
  };
  static_assert(sizeof(Found) <= Base::ROW_AT - Base::RESULTS_AT, "it has its place");
  static __device__ __forceinline__ Found& found() { return *reinterpret_cast<Found*>(Base::results()); }
  // Listed ids, then words of parts, take the place of the buckets; so do sums of warps.
  static __device__ __forceinline__ u64* board() { return reinterpret_cast<u64*>(Base::buckets()); }
  static __device__ __forceinline__ float* sums_of_warps() { return reinterpret_cast<float*>(Base::buckets()); }

  static __device__ __forceinline__ u64* told(const SamplerParams& p, u32 at, u32 index) { return p.told + (u64(at) * p.parts + index) * WORDS; }
  // The warp that tells words. It has the fewest ids.
  static __device__ __forceinline__ bool tells(int thread) { return thread >= THREADS - 32; }

  // Keys of numbers, in their order and above 1; -inf and what is no number have 1.
  static __device__ __forceinline__ u32 key_of(float number) {
    const u32 key = u32(rank_of(number, 0) >> 32);
    return key > 1 ? key : 1;
  }
  static __device__ __forceinline__ float number_of(u32 key) { return key > 1 ? score_of(u64(key) << 32) : NEGATIVE_INFINITY; }
  // The largest number below a score.
  static __device__ __forceinline__ float below(float score) {
    const u32 bits = __float_as_uint(__fadd_rn(score, 0.f));
    return __uint_as_float(bits == 0 ? 0x80000001u : bits >> 31 ? bits + 1 : bits - 1);
  }
  static __device__ __forceinline__ void sum_lanes(float (&sums)[SUMS]) {
#pragma unroll 1
    for (int o = 16; o; o >>= 1)
#pragma unroll
      for (int s = 0; s < SUMS; s++) sums[s] += __shfl_xor_sync(~0u, sums[s], o);
  }

  // ---- find -------------------------------------------------------------------------------------------------------

  // All entries of a row are of ids that were seen, or of later steps. These have no id.
  static __device__ __forceinline__ const uint2* seen_of(const SamplerParams& p, u32 at) { return p.edits + p.begins[at].edits; }
  static __device__ __forceinline__ u32 seen_max(const SamplerParams& p, u32 at) { return p.begins[at + 1].edits - p.begins[at].edits; }

  // Penalises the logits of ids that were seen. `entries` are the first ones of the row. Then a thread may read any logits.
  static __device__ __forceinline__ void penalise(const SamplerParams& p, const Part& part, uint2 (&entries)[EDITS], int thread) {
    static_assert(EDITS == 2, "an entry is one of two");
    const SampleRow& row = own_row();
    const u32 count = seen_max(p, part.at);
#pragma unroll 1
    for (u32 from = thread; from < count; from += EDITS * THREADS) {
      if (from != u32(thread)) Base::load(seen_of(p, part.at), from, count, entries);
#pragma unroll 1
      for (int n = 0; n < EDITS; n++) {
        const u32 at = (n == 0 ? entries[0].x : entries[1].x) - u32(part.first);
        if (at < u32(part.count)) logits()[at] = Base::penalised(row, logits()[at], n == 0 ? entries[0].y : entries[1].y);
      }
    }
    barrier();
  }
  // Brings a part of a row to shared memory: its row of the table, and its logits, penalised. All that it needs is loaded at once.
  static __device__ __forceinline__ void stage(const SamplerParams& p, const Part& part, int thread) {
    uint2 entries[EDITS];
    const u32 word = Base::load_row(p, part.at, thread);
    Base::load(seen_of(p, part.at), u32(thread), seen_max(p, part.at), entries);
    Base::bring(part, thread);
    Base::store_row(word, thread);
    barrier();
    if (own_row().flags & SAMPLE_PENALTIES) penalise(p, part, entries, thread);
  }
  // The logits again, in fewer instructions and more time.
  static __device__ __forceinline__ void stage_again(const SamplerParams& p, const Part& part, int thread) {
#pragma unroll 1
    for (int i = thread; i < part.count; i += THREADS) logits()[i] = __ldcg(part.logits + i);
    barrier();
    if (!(own_row().flags & SAMPLE_PENALTIES)) return;
#pragma unroll 1
    for (u32 n = thread; n < seen_max(p, part.at); n += THREADS) {
      const uint2 entry = __ldcg(seen_of(p, part.at) + n);
      const u32 at = entry.x - u32(part.first);
      if (at < u32(part.count)) logits()[at] = Base::penalised(own_row(), logits()[at], entry.y);
    }
    barrier();
  }

  // The noise of an id from its random word.
  static __device__ __noinline__ float noise_of(u32 random) { return gumbel(random); }

  // The word of a rival: its rank, or its score and how many of the four ids that are loaded together have it, too, and a better rank.
  static __device__ __forceinline__ u64 word_of(const Part& part, u64 rank, bool is_rank) {
    if (rank == 0 || is_rank) return rank ? rank : 1;
    const u32 at = id_of(rank) - u32(part.first), own = at % 4;
    float four[4];
    scores_at(own_row().inverse_temperature, at - own, four);
    const float score = own == 0 ? four[0] : own == 1 ? four[1] : own == 2 ? four[2] : four[3];
    const u32 ties = (own > 0 && four[0] == score) + (own > 1 && four[1] == score) + (own > 2 && four[2] == score);
    return u64(1 + ties) << 32 | __float_as_uint(score);
  }

  // One warp computes the sums that were listed, and tells the best of them. No other sum is above `bound`.
  static __device__ __forceinline__ void tell_rivals(const SamplerParams& p, const Part& part, u32 best, float bound, int lane) {
    const SampleRow& row = own_row();
    const u32 listed = found().listed, count = min(listed, LISTED);
    u64 first = 0, second = 0, third = 0; // of this lane
#pragma unroll 1
    for (u32 n = lane; n < count; n += 32) {
      const u32 i = u32(board()[n]), id = u32(part.first) + i;
      const float score = __fmul_rn(logits()[i], row.inverse_temperature);
      const u64 rank = rank_of(row.flags & SAMPLE_GREEDY ? score : __fadd_rn(score, noise_of(u32(board()[n] >> 32))), id);
      if (rank > first)
        third = second, second = first, first = rank;
      else if (rank > second)
        third = second, second = rank;
      else if (rank > third)
        third = rank;
    }
    u64 ranks[OF_PART + 1];
#pragma unroll
    for (int r = 0; r <= OF_PART; r++) {
      ranks[r] = Base::warp_most(first);
      if (first == ranks[r]) first = second, second = third, third = 0;
    }
    if (ranks[OF_PART] != 0) bound = fmaxf(bound, score_of(ranks[OF_PART]));
    if (listed > LISTED) bound = -NEGATIVE_INFINITY;
    if (lane < SUMS_AT) {
      const u64 word = lane == 0 ? u64(best) << 32 | key_of(bound) : word_of(part, lane < 3 ? ranks[0] : ranks[1], lane % 2);
      tell_blocks(told(p, part.at, part.index) + lane, word);
    }
  }

  // Bounds of the sums of this thread's ids, without ln(2^32): of the best four that are loaded together, and of all others.
  struct Bounds {
    float score; // the best one
    float top, second;
    int top_at;
    u32 random[4]; // of the best four
  };
  static __device__ __forceinline__ Bounds bound_sums(const SamplerParams& p, const Part& part, bool is_greedy, int thread) {
    const SampleRow& row = own_row();
    const float inverse_temperature = row.inverse_temperature;
    // Maxima over a warp lie in registers that all its lanes share, so keys of rounds take no instructions of lanes.
    const u32 own_position = row.position + p.step, seed_low = warp_max(row.seed_low), seed_high = warp_max(row.seed_high);
    Bounds of{NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY};
#pragma unroll 1
    for (int i = 4 * thread; i < part.count; i += 4 * THREADS) {
      float sums[4];
      scores_at(inverse_temperature, i, sums);
      of.score = fmaxf(of.score, most_of(sums));
      u32 random[4] = {own_position, 0u, u32(part.first + i) / 4, 0u};
      if (!is_greedy) {
        philox<10>(random, seed_low, seed_high);
        // The noise is -ln(-ln(1 - u)) <= -ln(u), and 2^32 * u is above the word of the id.
#pragma unroll
        for (int k = 0; k < 4; k++) sums[k] -= log_fast(__uint2float_rn(random[k]));
      }
      const float most = most_of(sums);
      of.second = fmaxf(of.second, fminf(most, of.top));
      if (most > of.top) {
        of.top = most, of.top_at = i;
#pragma unroll
        for (int k = 0; k < 4; k++) of.random[k] = random[k];
      }
    }
    return of;
  }
  // Lists those of the best four ids whose bounds reach `least`, with their random words. The count may be larger than the list.
  static __device__ __forceinline__ void list_sums(const Bounds& of, float least, bool is_greedy) {
    if (of.top < least || of.top == NEGATIVE_INFINITY) return;
    float sums[4];
    scores_at(own_row().inverse_temperature, of.top_at, sums);
    u32 reach = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      if (!is_greedy) sums[k] -= log_fast(__uint2float_rn(of.random[k]));
      reach += sums[k] >= least;
    }
    u32 place = take_places(&found().listed, reach);
#pragma unroll
    for (int k = 0; k < 4; k++)
      if (sums[k] >= least && place < LISTED) board()[place++] = u64(of.random[k]) << 32 | u32(of.top_at + k);
  }

  static __device__ __forceinline__ void find(const SamplerParams& p, u32 at, u32 index, int thread) {
    const Part part(p, at, index);
    stage(p, part, thread);
    const bool is_greedy = own_row().flags & SAMPLE_GREEDY;
    // After it has seen all words, the first block of a row changes the entries that this block has just read.
    if (tells(thread)) release_step();
    const Bounds of = bound_sums(p, part, is_greedy, thread);
    u32 keys[3] = {key_of(of.score), key_of(of.top), key_of(of.second)};
    const int lane = thread % 32, warp = thread / 32;
    u32* words = reinterpret_cast<u32*>(Base::words()); // [key][warp]
#pragma unroll
    for (int k = 0; k < 3; k++) {
      keys[k] = warp_max(keys[k]);
      if (lane == 0) words[k * WARPS + warp] = keys[k];
    }
    if (thread < RIVALS) found().ranks[thread] = 0;
    if (thread == 0) found().listed = 0;
    barrier();
    const u32 top_of_warp = lane < WARPS ? words[WARPS + lane] : 1u;
#pragma unroll
    for (int k = 0; k < 3; k++) keys[k] = warp_max(lane < WARPS ? words[k * WARPS + lane] : 1u);
    // All of some four warps have a bound that reaches `least`, and so have about sixteen threads. No thread has it twice.
    u32 least_key = min(top_of_warp, __shfl_xor_sync(~0u, top_of_warp, 1));
    least_key = warp_max(min(least_key, __shfl_xor_sync(~0u, least_key, 2)));
    const float most = number_of(keys[1]), least = is_greedy ? most : number_of(least_key > keys[2] ? least_key : keys[2]);
    list_sums(of, least, is_greedy);
    barrier();
    // Fast logarithms and sums have errors.
    const float bound = is_greedy ? NEGATIVE_INFINITY : least + (LN_2_32 + 0.01f + fabsf(most) * (1.f / (1 << 21)));
    if (tells(thread)) tell_rivals(p, part, keys[0], bound, lane);
  }

  // ---- weigh ------------------------------------------------------------------------------------------------------

  // Waits for `count` words of each part of a row, from word `from` on.
  static __device__ __forceinline__ void gather(const SamplerParams& p, u32 at, u32 from, u32 count, int thread) {
    const u64* words = told(p, at, 0) + from;
#pragma unroll 1
    for (u32 n = thread; n < p.parts * count; n += THREADS) board()[n] = wait_for_block(words + n / count * WORDS + n % count);
  }

  // The rivals of a row: the best sums of all parts.
  static __device__ __forceinline__ void find_rivals(const SamplerParams& p, u32 at, int thread) {
    // The warp that tells words has read the list.
    barrier();
    gather(p, at, 0, SUMS_AT, thread);
    barrier();
    if (tells(thread)) {
      u32 most = 1, bound = 1;
#pragma unroll 1
      for (u32 index = thread % 32; index < p.parts; index += 32) {
        const u64 word = board()[index * SUMS_AT];
        most = u32(word >> 32) > most ? u32(word >> 32) : most;
        bound = u32(word) > bound ? u32(word) : bound;
      }
      most = warp_max(most);
      bound = warp_max(bound);
      if (thread == THREADS - 1) {
        found().most = number_of(most);
        found().bound = number_of(bound);
      }
    }
    // The place of a sum is the number of better ones, which 16 lanes count.
    const u64* ranks = board() + 1;
#pragma unroll 1
    for (u32 n = thread / 16; n < p.parts * OF_PART; n += THREADS / 16) {
      const u64* own = ranks + n / OF_PART * SUMS_AT + n % OF_PART * 2;
      u32 place = 0;
#pragma unroll 1
      for (u32 index = thread % 16; index < p.parts; index += 16)
        place += (ranks[index * SUMS_AT] > own[0]) + (ranks[index * SUMS_AT + 2] > own[0]);
#pragma unroll
      for (int o = 8; o; o >>= 1) place += __shfl_xor_sync(~0u, place, o);
      if (thread % 16 == 0 && own[0] > 1 && place < RIVALS) {
        found().ranks[place] = own[0];
        const float score = __uint_as_float(u32(own[1]));
        found().scores[place] = score;
        found().below[place] = below(score);
        found().ties[place] = u32(own[1] >> 32) - 1;
      }
    }
    barrier();
  }

  // Sums of the weights of a part: of all, and of those above each rival, without ties among the four ids of a rival.
  static __device__ __forceinline__ void tell_sums(const SamplerParams& p, const Part& part, int thread) {
    const float inverse_temperature = own_row().inverse_temperature, most = found().most;
    // exp(s - most) = 2^(s / ln(2) - most / ln(2)). Of equal scores, those of lower ids are above.
    const float unit = 1.4426950f, origin = -most * unit;
    float sums[SUMS] = {}, limits[RIVALS], lower[RIVALS];
    int places[RIVALS];
#pragma unroll
    for (int r = 0; r < RIVALS; r++) {
      limits[r] = found().scores[r];
      lower[r] = found().below[r];
      places[r] = int(id_of(found().ranks[r])) - part.first - 3;
    }
#pragma unroll 1
    for (int i = 4 * thread; i < part.count; i += 4 * THREADS) {
      float scores[4];
      scores_at(inverse_temperature, i, scores);
      float least[RIVALS];
#pragma unroll
      for (int r = 0; r < RIVALS; r++) least[r] = i < places[r] ? lower[r] : limits[r];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const float weight = exp2_fast(fmaf(scores[k], unit, origin));
        sums[0] += weight;
#pragma unroll
        for (int r = 0; r < RIVALS; r++)
          if (scores[k] > least[r]) sums[1 + r] += weight;
      }
    }
    const int lane = thread % 32, warp = thread / 32;
    sum_lanes(sums);
    if (lane == 0)
#pragma unroll
      for (int s = 0; s < SUMS; s++) sums_of_warps()[s * WARPS + warp] = sums[s];
    barrier();
    if (!tells(thread)) return;
#pragma unroll
    for (int s = 0; s < SUMS; s++) sums[s] = lane < WARPS ? sums_of_warps()[s * WARPS + lane] : 0.f;
    sum_lanes(sums);
    if (lane < SUM_WORDS) {
      const float low = lane == 0 ? sums[0] : lane == 1 ? sums[2] : sums[4], high = lane == 0 ? sums[1] : lane == 1 ? sums[3] : 0.f;
      tell_blocks(told(p, part.at, part.index) + SUMS_AT + lane, u64(__float_as_uint(-high)) << 32 | __float_as_uint(-low));
    }
  }

  static __device__ __forceinline__ void weigh(const SamplerParams& p, u32 at, u32 index, int thread) {
    const bool by_weight = own_row().flags & SAMPLE_TOP_P;
    if (index > 0 && !by_weight) return;
    find_rivals(p, at, thread);
    if (by_weight) tell_sums(p, Part(p, at, index), thread);
  }

  // ---- the first block of a row -----------------------------------------------------------------------------------

  // The rank of the first rival that is admitted, if that is certain; else 0, and the rank of the last one that is refused.
  static __device__ __forceinline__ u64 decide(u64& refused) {
    const SampleRow& row = own_row();
    const Found& of = found();
    const float share = __uint2float_rn(row.top_p_q32) * (1.f / 4294967296.f), total = of.sums[0];
    // Temperatures are 0.001 at least. Sums differ by less than this share of the total from those of `Sampler`. The error of a weight is below 3e-6 and 6e-8 times the best
    // score, that of a sum of 128 numbers in a thread and of 9 levels above that below 9e-6.
    const float errors = 1.f / (1 << 14) + fabsf(of.most) * (1.f / (1 << 21));
    const float low = (share - errors) * total, high = (share + errors) * total;
    refused = ~0ull;
#pragma unroll 1
    for (int r = 0; r < RIVALS; r++) {
      const u64 rank = of.ranks[r];
      if (rank == 0 || !(score_of(rank) > of.bound)) break;
      const float above = of.sums[1 + r] + __uint2float_rn(of.ties[r]) * exp_fast(of.scores[r] - of.most);
      if (!(row.flags & SAMPLE_TOP_P) || above < low) return rank;
      if (!(above > high)) break;
      refused = rank;
    }
    return 0;
  }

  // Looks through a row for the best sum after `last` that is admitted: twice for each sum, which takes about 0.1 ms. One of thousands of tokens
  // needs it.
  static __device__ __noinline__ u64 search(const SamplerParams& p, u32 at, u64 last, int thread) {
    const SampleRow& row = own_row();
    const float most = found().most;
    u64 rival = 0; // rank of its score; 0: the next best sum is looked for
    // The next best sum and the rank of its score; or all weights, and those above the rival.
    u64 *first = &found().ranks[0], *second = &found().ranks[1];
#pragma unroll 1
    for (;;) {
      u64 best = 0, own_best = 0, total = 0, above = 0;
      barrier();
      if (thread == 0) *first = *second = 0;
#pragma unroll 1
      for (u32 index = 0; index < p.parts; index++) {
        const Part part(p, at, index);
        barrier();
        stage_again(p, part, thread);
#pragma unroll 1
        for (int i = thread; i < part.count; i += THREADS) {
          const u32 id = u32(part.first + i);
          const float score = __fmul_rn(logits()[i], row.inverse_temperature);
          const u64 own = rank_of(score, id);
          if (rival != 0) {
            const u64 weight = own ? weight_of(score, most) : 0;
            total += weight;
            above += own > rival ? weight : 0;
            continue;
          }
          const u32 word = random_word(Base::seed_of(row), row.position + p.step, id);
          const u64 rank = rank_of(row.flags & SAMPLE_GREEDY ? score : __fadd_rn(score, noise_of(word)), id);
          if (rank < last && rank > best) best = rank, own_best = own;
        }
      }
      if (rival != 0) {
        add_to(first, total);
        add_to(second, above);
      } else {
        raise_to(first, best);
      }
      barrier();
      if (rival != 0) {
        const u64 need = part_of(*first, row.top_p_q32);
        if (*second < (need ? need : 1)) return last;
        rival = 0;
        continue;
      }
      last = *first;
      if (last == 0 || !(row.flags & SAMPLE_TOP_P)) return last;
      if (best == last) *second = own_best;
      barrier();
      rival = *second;
    }
  }

  // Whether the model computed a number above -inf.
  static __device__ __noinline__ bool has_number(const SamplerParams& p, u32 at, int thread) {
    const float* logits = p.logits + u64(p.begins[at].row) * p.vocab;
    if (thread == 0) found().listed = 0;
    barrier();
#pragma unroll 1
    for (u32 id = thread; id < p.vocab; id += THREADS)
      if (__ldcg(logits + id) > NEGATIVE_INFINITY) found().listed = 1;
    barrier();
    return found().listed != 0;
  }

  static __device__ __forceinline__ void settle(const SamplerParams& p, u32 at, int thread) {
    const SampleRow& row = own_row();
    uint2 entries[EDITS];
    Base::load(seen_of(p, at), u32(thread), seen_max(p, at), entries);
    if (row.flags & SAMPLE_TOP_P) {
      barrier();
      gather(p, at, SUMS_AT, SUM_WORDS, thread);
    }
    // Other blocks have read the entries before they told their last words.
    acquire_step();
    barrier();
    if (thread < 32 && row.flags & SAMPLE_TOP_P) {
      const float* words = reinterpret_cast<const float*>(board());
      float sums[SUMS] = {};
#pragma unroll 1
      for (u32 index = thread; index < p.parts; index += 32)
#pragma unroll
        for (int s = 0; s < SUMS; s++) sums[s] -= words[index * SUM_WORDS * 2 + s];
      sum_lanes(sums);
      if (thread == 0)
#pragma unroll
        for (int s = 0; s < SUMS; s++) found().sums[s] = sums[s];
    }
    barrier();
    u64 refused, winner = decide(refused);
    if (winner == 0 && found().most > NEGATIVE_INFINITY) winner = search(p, at, refused, thread);
    const u32 status = winner ? SAMPLE_CHOSEN : has_number(p, at, thread) ? SAMPLE_NONE_ALLOWED : SAMPLE_NO_CANDIDATE;
    if (thread == 0) Base::write_token(p, at, winner, status);
    if (winner && row.flags & SAMPLE_PENALTIES) Base::count_token(p, at, id_of(winner), entries, thread);
    // All blocks have read these words: what they told last depends on them.
#pragma unroll 1
    for (u32 n = thread; n < p.parts * WORDS; n += THREADS) clear_told(told(p, at, 0) + n);
  }

  // The rows of a block, one after the other.
  static __device__ __forceinline__ void sample(const SamplerParams& p, u32 block, int thread) {
    // block / parts without a division: exact for less than 2^15 blocks.
    const u32 first = u32(u64(block) * p.parts_inverse_q31 >> 31), index = block - first * p.parts;
    for (u32 at = first;;) {
      find(p, at, index, thread);
      weigh(p, at, index, thread);
      if (index == 0) settle(p, at, thread);
      at += p.at_once;
      if (at >= p.row_count) return;
      barrier();
    }
  }
};
