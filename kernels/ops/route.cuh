// route: the experts of a row, and how much each of them counts (`Router` of the model graph).
//
// x (EXPERTS)       scores of the router, fp32 packets
// bias (EXPERTS)    added to the scores for the choice, if CORRECTED
// out (TOP_K)       ids of experts as packets, below EXPERTS
// aux (TOP_K)       their weights, fp32 packets
//
// owner    one block, for all; loaders wait for an id before they load what it names
// moves    EXPERTS packets in, 2 * TOP_K packets out
// assumes  a lane of one warp has a slot
//
// The place of an expert is the number of experts that come before it: larger ones, and of equal ones those with a lower id. Each thread
// counts for its own experts, so nothing is serial in TOP_K. Places are those of a permutation, whatever the scores are.
#pragma once

template <class M, class G>
struct Route {
  static constexpr int THREADS = M::WARPS * 32;
  // Scores keep the order of what they are made of, so that is compared, unless something is added to them.
  static constexpr bool BY_SCORE = G::CORRECTED || G::GROUPS > 0;

  // A number with the order of x. What is no number comes last.
  static __device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.f); // there is one zero
    return x != x ? 0u : (bits >> 31 ? ~bits : bits | 0x80000000u);
  }
  static __device__ __forceinline__ float value(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }
  // How many of N keys come before the one at `at`.
  template <int N>
  static __device__ __forceinline__ int place(const u32* keys, int at) {
    const u32 own = keys[at];
    int before = 0;
#pragma unroll 8
    for (int i = 0; i < N; i++) before += keys[i] > own || (keys[i] == own && i < at);
    return before;
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    float* const scores = c.scratch();
    u32* const keys = reinterpret_cast<u32*>(scores + G::EXPERTS);
    u32* const experts = keys + G::EXPERTS;
    float* const weights = reinterpret_cast<float*>(experts + G::TOP_K);
    c.barrier(); // slow warps may still add up the previous task's partial sums there
#pragma unroll 1
    for (int first = 0; first < G::EXPERTS; first += 2 * THREADS) {
      const int i = first + c.tid() * 2;
      const bool active[1] = {i < G::EXPERTS};
      u64 a[1], b[1];
      await_pairs<1>(c.p.exchange + e.x + i, [](int) { return 0; }, active, c.tag, a, b, c.waiter());
      if (i < G::EXPERTS) scores[i] = __uint_as_float(u32(a[0]));
      if (i + 1 < G::EXPERTS) scores[i + 1] = __uint_as_float(u32(b[0]));
    }
    c.stamp(1);
    c.barrier();
    float most = NEGATIVE_INFINITY, sum = 0.f;
    if constexpr (!G::SIGMOID) {
      for (int i = c.lane(); i < G::EXPERTS; i += 32) most = fmaxf(most, scores[i]);
      most = warp_max(most);
      for (int i = c.lane(); i < G::EXPERTS; i += 32) sum += exp_fast(scores[i] - most);
      sum = warp_sum(sum);
    }
    c.barrier(); // every warp has read what now becomes scores
    for (int i = c.tid(); i < G::EXPERTS; i += THREADS) {
      const float x = scores[i], score = G::SIGMOID ? __fdividef(1.f, 1.f + exp_fast(-x)) : exp_fast(x - most) / sum;
      float key = BY_SCORE ? score : x;
      if constexpr (G::CORRECTED) key += __ldg(c.template constant<float>(e.bias) + i);
      scores[i] = score;
      keys[i] = ordered(key);
    }
    c.barrier();
    if constexpr (G::GROUPS > 0) keep_groups(c, keys, reinterpret_cast<u32*>(weights + G::TOP_K));
    for (int i = c.tid(); i < G::EXPERTS; i += THREADS) {
      const int slot = place<G::EXPERTS>(keys, i);
      if (slot < G::TOP_K) experts[slot] = i, weights[slot] = scores[i];
    }
    c.barrier();
    c.stamp(2);
    if (c.warp() == 0) {
      const bool mine = c.lane() < G::TOP_K;
      float weight = mine ? weights[c.lane()] : 0.f;
      if constexpr (G::NORMALISED) {
        const float all = warp_sum(weight) + G::ADDED;
        weight /= all;
      }
      // Readers poll two packets at once, so an odd number is followed by one of padding.
      if (c.lane() < round_up(G::TOP_K, 2)) {
        publish(c.p.exchange + e.out + c.lane(), mine ? experts[c.lane()] : 0u, c.tag);
        publish(c.p.exchange + e.aux + c.lane(), __float_as_uint(mine ? weight * G::SCALE : 0.f), c.tag);
      }
    }
    c.barrier(); // the next task may stage where these are
  }

  // Experts of groups that are not kept come last.
  static __device__ __forceinline__ void keep_groups(Context<M>& c, u32* keys, u32* groups) {
    constexpr int EACH = G::EXPERTS / G::GROUPS;
    for (int g = c.tid(); g < G::GROUPS; g += THREADS) {
      u32 best = 0, second = 0;
      for (int i = 0; i < EACH; i++) {
        const u32 key = keys[g * EACH + i];
        second = max(second, min(best, key));
        best = max(best, key);
      }
      groups[g] = G::SUM_OF_TWO && EACH > 1 ? ordered(value(best) + value(second)) : best;
    }
    c.barrier();
    for (int i = c.tid(); i < G::EXPERTS; i += THREADS)
      if (place<G::GROUPS>(groups, i / EACH) >= G::KEPT) keys[i] = 0;
    c.barrier();
  }
};
