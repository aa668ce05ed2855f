// sampling: the token among those that top-k and top-p admit, as src/sample specifies it.
//
// logits (VOCAB)   of the step before, in memory; published after the release of that step
// best             best logit of each task of the head, in `scratch`: at least k logits reach the k-th best of them
//
// Every block decides by itself and all decide the same: the sums are of integers, so their order does not matter. The ids that
// may be admitted are gathered in shared memory if they fit, in one pass over the logits for top-k and in two for top-p; if not,
// each pass reads all logits. A cut is found three bits at a time, by seven sums over what lies above seven thresholds.
//
// Functions are out of line and get only copies from the context, so that greedy decoding keeps its values in registers.
#pragma once

template <class M, class G>
struct Sampling {
  static constexpr int THREADS = M::WARPS * 32;
  static constexpr int THRESHOLDS = 7;
  static constexpr int LOADS_IN_FLIGHT = 8; // ids whose logits a thread loads at once
  // Scratch: best logits, sums of the warps, two words, the list.
  static constexpr int SUMS_AT = round_up(G::PARTS * 4, 16), WORDS_AT = SUMS_AT + M::WARPS * THRESHOLDS * 8;
  static constexpr int LIST_AT = WORDS_AT + 16, LIST_MAX = (M::SCRATCH_BYTES - LIST_AT) / 8;
  static_assert(LIST_MAX > 0, "no room for a single id");

  // What an id adds to a sum, and what of it is compared with a threshold.
  enum class Measure {
    COUNT,  // 1, by its score
    WEIGHT, // its probability, by its score
    TIES,   // 1 where it has the score of `key`, by its id
  };

  // The ids that a search looks through (a list, or all), and how it measures them.
  struct Query {
    const u64* list; // or null
    const float* logits;
    float inverse_temperature, score_max;
    int count, thread;
    Measure measure;
    u32 key;

    __device__ __forceinline__ u64 rank(int i) const { return list ? list[i] : rank_of(score(i), u32(i)); }
    __device__ __forceinline__ float score(int i) const { return __fmul_rn(__ldcg(logits + i), inverse_temperature); }
    // Every THREADS-th rank from `first` on; 0 past the end. No load waits for another.
    __device__ __forceinline__ void load(int first, u64 (&ranks)[LOADS_IN_FLIGHT]) const {
#pragma unroll
      for (int n = 0; n < LOADS_IN_FLIGHT; n++) ranks[n] = first + n * THREADS < count ? rank(first + n * THREADS) : 0;
    }
    // The same for the scores of all ids; -inf past the end.
    __device__ __forceinline__ void load_scores(int first, float (&scores)[LOADS_IN_FLIGHT]) const {
#pragma unroll
      for (int n = 0; n < LOADS_IN_FLIGHT; n++) scores[n] = first + n * THREADS < G::VOCAB ? score(first + n * THREADS) : NEGATIVE_INFINITY;
    }
    __device__ __forceinline__ u32 part(u64 rank) const {
      return measure != Measure::TIES ? u32(rank >> 32) : u32(rank >> 32) == key ? u32(rank) : 0u;
    }
    __device__ __forceinline__ u64 add(u64 rank) const {
      if (rank == 0) return 0;
      if (measure == Measure::WEIGHT) return weight_of(score_of(rank), score_max);
      return measure == Measure::COUNT || u32(rank >> 32) == key;
    }
  };
  struct Cut {
    u32 at;
    u64 above; // sum over what lies above it
  };

  static __device__ __forceinline__ u64* scratch(int at) { return reinterpret_cast<u64*>(block_memory() + M::STAGE_AT + at); }

  // Sums over all threads, for all threads.
  template <int N>
  static __device__ __forceinline__ void block_sums(u64 (&sums)[N], int thread) {
    static_assert(N <= THRESHOLDS, "room in scratch");
    u64* warps = scratch(SUMS_AT);
#pragma unroll
    for (int j = 0; j < N; j++) {
#pragma unroll
      for (int o = 16; o; o >>= 1) sums[j] += __shfl_xor_sync(~0u, sums[j], o);
      if (thread % 32 == 0) warps[thread / 32 * N + j] = sums[j];
    }
    consumer_barrier<THREADS>();
#pragma unroll
    for (int j = 0; j < N; j++) {
      sums[j] = 0;
#pragma unroll 1
      for (int w = 0; w < M::WARPS; w++) sums[j] += warps[w * N + j];
    }
    consumer_barrier<THREADS>();
  }
  // Sum over all ranks from `least` on.
  static __device__ __noinline__ u64 total(const Query q, u64 least) {
    u64 sums[1] = {0};
#pragma unroll 1
    for (int first = q.thread; first < q.count; first += LOADS_IN_FLIGHT * THREADS) {
      u64 ranks[LOADS_IN_FLIGHT];
      q.load(first, ranks);
#pragma unroll
      for (int n = 0; n < LOADS_IN_FLIGHT; n++)
        if (ranks[n] >= least) sums[0] += q.add(ranks[n]);
    }
    block_sums(sums, q.thread);
    return sums[0];
  }
  // The largest cut for which the sum over all parts from the cut on reaches `need`; 0 where it never does.
  static __device__ __noinline__ Cut find_cut(const Query q, u64 need) {
    Cut cut{0, 0};
#pragma unroll 1
    for (int shift = 30; shift >= 0; shift -= 3) {
      u64 sums[THRESHOLDS] = {};
#pragma unroll 1
      for (int first = q.thread; first < q.count; first += LOADS_IN_FLIGHT * THREADS) {
        u64 ranks[LOADS_IN_FLIGHT];
        q.load(first, ranks);
#pragma unroll
        for (int n = 0; n < LOADS_IN_FLIGHT; n++) {
          const u32 part = q.part(ranks[n]), digit = part >= cut.at ? (part - cut.at) >> shift : 0;
          const u64 add = digit ? q.add(ranks[n]) : 0;
#pragma unroll
          for (int j = 0; j < THRESHOLDS; j++) sums[j] += digit > u32(j) ? add : 0;
        }
      }
      block_sums(sums, q.thread);
      u32 digit = 0;
#pragma unroll
      for (int j = 0; j < THRESHOLDS; j++) digit += sums[j] >= need ? 1 : 0;
      // The largest digit has no threshold above it, so the sum above the cut stays. (The first digit has two bits: three thresholds.)
#pragma unroll
      for (int j = 0; j < THRESHOLDS; j++)
        if (u32(j) == digit) cut.above = sums[j];
      cut.at += digit << shift;
    }
    return cut;
  }
  // Among ids in the order of ranks, the last one of the shortest prefix whose sum reaches `need`. Equal scores add the same, so a
  // division tells how many of them the prefix has; it has those with the lowest ids.
  static __device__ __noinline__ u64 find_last(Query q, u64 need) {
    const Cut cut = find_cut(q, need);
    const u64 score = u64(cut.at) << 32, each = q.add(score);
    const u64 wanted = each ? (need - cut.above + each - 1) / each : 1;
    q.measure = Measure::TIES;
    q.key = cut.at;
    if (wanted >= total(q, 0)) return score;
    return score | find_cut(q, wanted).at;
  }

  // Lists the ids with scores from `least` on: those that top-k or top-p admits, or a few more. False: they do not fit.
  static __device__ __noinline__ bool gather(const Query q, float least, u64* list, u32* count) {
#pragma unroll 1
    for (int first = q.thread; first < G::VOCAB; first += LOADS_IN_FLIGHT * THREADS) {
      float scores[LOADS_IN_FLIGHT];
      q.load_scores(first, scores);
#pragma unroll
      for (int n = 0; n < LOADS_IN_FLIGHT; n++)
        if (scores[n] >= least && scores[n] > NEGATIVE_INFINITY) {
          const u32 at = take_place(count);
          if (at < LIST_MAX) list[at] = rank_of(scores[n], u32(first + n * THREADS));
        }
    }
    consumer_barrier<THREADS>();
    return *count <= LIST_MAX;
  }
  // The sum of the weights of all ids; and a score such that the ids from it on include all that top-p admits, or -inf. It is the first
  // of six steps below the best score, each a factor of e^2 in probability: if a model is confident, the first is enough.
  struct Bound {
    u64 all;
    float least;
  };
  static __device__ __noinline__ Bound below_top_p(const Query q, u32 top_p_q32) {
    u64 sums[THRESHOLDS] = {};
#pragma unroll 1
    for (int first = q.thread; first < G::VOCAB; first += LOADS_IN_FLIGHT * THREADS) {
      float scores[LOADS_IN_FLIGHT];
      q.load_scores(first, scores);
#pragma unroll
      for (int n = 0; n < LOADS_IN_FLIGHT; n++) {
        // A NaN is above no threshold and must not be added.
        const u64 add = scores[n] > NEGATIVE_INFINITY ? weight_of(scores[n], q.score_max) : 0;
#pragma unroll
        for (int j = 0; j < THRESHOLDS; j++) sums[j] += j == THRESHOLDS - 1 || scores[n] >= step_below(q.score_max, j) ? add : 0;
      }
    }
    block_sums(sums, q.thread);
    const u64 all = sums[THRESHOLDS - 1], need = part_of(all, top_p_q32);
    float least = NEGATIVE_INFINITY;
#pragma unroll
    for (int j = THRESHOLDS - 2; j >= 0; j--)
      if (sums[j] >= need) least = step_below(q.score_max, j);
    return {all, least};
  }
  static __device__ __forceinline__ float step_below(float score_max, int j) { return __fsub_rn(score_max, 2.f * float(j + 1)); }

  // Returns the token to all threads. `best`: the largest logit of all. The k-th best task of the head bounds the k-th logit from
  // below, so if k is at most the number of tasks, one pass gathers what top-k may admit.
  static __device__ __noinline__ int choose(const Params& p, u32 row, u32 position, float best, int thread) {
    const float* logits = p.logits + u64(row) * G::VOCAB;
    Query q{nullptr, logits, p.inverse_temperature, __fmul_rn(best, p.inverse_temperature), G::VOCAB, thread, Measure::COUNT, 0};
    u32* words = reinterpret_cast<u32*>(scratch(WORDS_AT));
    u64* list = scratch(LIST_AT);
    if (thread == 0) {
      words[0] = 0;
      words[1] = __float_as_uint(NEGATIVE_INFINITY);
    }
    consumer_barrier<THREADS>();
    if (p.top_k != 0 && p.top_k <= G::PARTS) {
      const float* best = reinterpret_cast<const float*>(scratch(0));
      for (int i = thread; i < G::PARTS; i += THREADS) {
        u32 before = 0;
#pragma unroll 1
        for (int j = 0; j < G::PARTS; j++)
          before += best[j] > best[i] || (best[j] == best[i] && j < i) ? 1 : 0;
        if (before == p.top_k - 1) words[1] = __float_as_uint(best[i]);
      }
    }
    consumer_barrier<THREADS>();
    float least = __fmul_rn(__uint_as_float(words[1]), p.inverse_temperature);
    u64 all = 0;
    if (p.top_k == 0 && G::VOCAB > LIST_MAX) {
      const Bound bound = below_top_p(q, p.top_p_q32);
      all = bound.all;
      least = bound.least;
    }
    if (G::VOCAB <= LIST_MAX || least > NEGATIVE_INFINITY)
      if (gather(q, least, list, &words[0])) {
        q.list = list;
        q.count = int(words[0]);
      }
    u64 last = 0;
    q.measure = Measure::COUNT;
    if (p.top_k != 0) last = find_last(q, p.top_k);
    if (p.top_p_q32 != 0) {
      q.measure = Measure::WEIGHT;
      last = find_last(q, part_of(all ? all : total(q, last), p.top_p_q32));
    }
    float value = NEGATIVE_INFINITY;
    int id = 0x7fffffff;
#pragma unroll 1
    for (int i = thread; i < q.count; i += THREADS) {
      const u64 rank = q.rank(i);
      if (rank != 0 && rank >= last)
        argmax_take(value, id, __fadd_rn(score_of(rank), noise(p.seed, position, id_of(rank))), int(id_of(rank)));
    }
    warp_argmax(value, id);
    float* values = reinterpret_cast<float*>(scratch(SUMS_AT));
    int* ids = reinterpret_cast<int*>(values + M::WARPS);
    if (thread % 32 == 0) {
      values[thread / 32] = value;
      ids[thread / 32] = id;
    }
    consumer_barrier<THREADS>();
#pragma unroll 1
    for (int w = 0; w < M::WARPS; w++) argmax_take(value, id, values[w], ids[w]);
    // The next task stages where this was read.
    consumer_barrier<THREADS>();
    return id;
  }
};
