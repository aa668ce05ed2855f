// route: the experts of a row, and how much each of them counts (`Router` of the model graph).
//
// x (EXPERTS)       scores of the router, fp32 packets
// bias (EXPERTS)    added to the scores for the choice, if CORRECTED
// out (TOP_K)       ids of experts as packets, below EXPERTS
// aux (TOP_K)       their weights, fp32 packets
//
// owner    one warp of one block, for all; loaders wait for an id before they load what it names
// moves    EXPERTS packets in, 2 * TOP_K packets out
// assumes  a lane of one warp has a slot
#pragma once

// How a warp chooses experts of a row: TOP_K times the largest key, of equal ones that of the lowest id. So ids are distinct, whatever the scores are.
// A lane holds EACH scores, of the experts `id(0)`, `id(1)`, .. in ascending order. Lane s has slot s in the end.
template <class G>
struct ExpertChoice {
  // Scores keep the order of what they are made of, so that is compared, unless something is added to them.
  static constexpr bool BY_SCORE = G::CORRECTED || G::GROUPS > 0;
  static constexpr int SCRATCH_WORDS = G::GROUPS > 0 ? G::EXPERTS + G::GROUPS : 0; // of shared memory
  // Keys: none, or chosen already; what comes last.
  static constexpr u32 NONE = 0, LAST = 1;

  u32 expert = 0;
  float score = 0.f; // BY_SCORE: what the weight is made of; else the router's own score

  // A number with the order of x, above NONE. What is no number comes last.
  static __device__ __forceinline__ u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.f); // there is one zero
    return x != x ? LAST : (bits >> 31 ? ~bits : bits | 0x80000000u);
  }
  static __device__ __forceinline__ float value(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

  // The router's scores in `x`; they become those that weights are made of, if BY_SCORE.
  template <int EACH, class Id>
  __device__ __forceinline__ ExpertChoice(int lane, float (&x)[EACH], const float* correction, u32* scratch, Id id) {
    u32 keys[EACH];
    if constexpr (BY_SCORE) {
      const Softmax all(lane, x, id);
#pragma unroll
      for (int k = 0; k < EACH; k++) x[k] = all.of(x[k]);
    }
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      float key = x[k];
      if constexpr (G::CORRECTED) key += id(k) < G::EXPERTS ? __ldg(correction + id(k)) : 0.f;
      keys[k] = id(k) < G::EXPERTS ? ordered(key) : NONE;
    }
    if constexpr (G::GROUPS > 0) keep_groups(lane, keys, scratch, id);
#pragma unroll 1
    for (int s = 0; s < G::TOP_K; s++) {
      u32 best = NONE, which = 0;
      float own = 0.f;
#pragma unroll
      for (int k = 0; k < EACH; k++)
        if (keys[k] > best) best = keys[k], which = k, own = x[k];
      const u32 most = warp_max(best), mine = id(int(which));
      const u32 first = ~warp_max(best == most ? ~mine : 0u);
      const bool chosen = best == most && mine == first;
      own = __shfl_sync(~0u, own, __ffs(__ballot_sync(~0u, chosen)) - 1);
      if (lane == s) expert = first, score = own;
#pragma unroll
      for (int k = 0; k < EACH; k++)
        if (chosen && which == u32(k)) keys[k] = NONE;
    }
  }

  // How much the expert of this lane's slot counts. `x` as it was before.
  template <int EACH, class Id>
  __device__ __forceinline__ float weight(int lane, const float (&x)[EACH], Id id) const {
    float weight = score;
    if constexpr (!BY_SCORE) weight = Softmax(lane, x, id).of(score);
    if (lane >= G::TOP_K) weight = 0.f;
    if constexpr (G::NORMALISED) weight /= warp_sum(weight) + G::ADDED;
    return weight * G::SCALE;
  }

  // What scores are of all experts: a softmax, unless they are sigmoids.
  struct Softmax {
    float most = NEGATIVE_INFINITY, sum = 0.f;
    template <int EACH, class Id>
    __device__ __forceinline__ Softmax(int lane, const float (&x)[EACH], Id id) {
      if constexpr (!G::SIGMOID) {
#pragma unroll
        for (int k = 0; k < EACH; k++)
          if (id(k) < G::EXPERTS) most = fmaxf(most, x[k]);
        most = warp_max(most);
#pragma unroll
        for (int k = 0; k < EACH; k++)
          if (id(k) < G::EXPERTS) sum += exp_fast(x[k] - most);
        sum = warp_sum(sum);
      }
    }
    __device__ __forceinline__ float of(float x) const { return G::SIGMOID ? __fdividef(1.f, 1.f + exp_fast(-x)) : exp_fast(x - most) / sum; }
  };

  // Experts of groups that are not kept come last.
  template <int EACH, class Id>
  static __device__ __forceinline__ void keep_groups(int lane, u32 (&keys)[EACH], u32* scratch, Id id) {
    constexpr int OWN = G::EXPERTS / (G::GROUPS > 0 ? G::GROUPS : 1);
    u32* const groups = scratch + G::EXPERTS;
    __syncwarp(); // slow lanes may still read what was there before
#pragma unroll
    for (int k = 0; k < EACH; k++)
      if (id(k) < G::EXPERTS) scratch[id(k)] = keys[k];
    __syncwarp();
    for (int g = lane; g < G::GROUPS; g += 32) {
      u32 best = LAST, second = LAST;
      for (int i = 0; i < OWN; i++) {
        const u32 key = scratch[g * OWN + i];
        second = max(second, min(best, key));
        best = max(best, key);
      }
      groups[g] = G::SUM_OF_TWO && OWN > 1 ? ordered(value(best) + value(second)) : best;
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < EACH; k++) {
      const int own = id(k) / OWN;
      int before = 0;
      for (int g = 0; g < G::GROUPS; g++) before += groups[g] > groups[min(own, G::GROUPS - 1)] || (groups[g] == groups[min(own, G::GROUPS - 1)] && g < own);
      if (id(k) < G::EXPERTS && before >= G::KEPT) keys[k] = LAST;
    }
  }
};

template <class M, class G>
struct Route {
  static constexpr int PAIRS = ceil_div(G::EXPERTS, 64), EACH = 2 * PAIRS;

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    c.barrier(); // slow warps may still add up the previous task's partial sums in scratch
    if (c.warp() == 0) choose(c, e);
    c.barrier(); // the next task may use scratch
  }
  static __device__ __forceinline__ void choose(Context<M>& c, const Entry& e) {
    const int lane = c.lane();
    const auto id = [&](int k) { return k / 2 * 64 + lane * 2 + k % 2; };
    bool active[PAIRS];
    u64 a[PAIRS], b[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) active[j] = id(2 * j) < G::EXPERTS;
    await_pairs<PAIRS>(c.p.exchange + e.x, [&](int j) { return id(2 * j); }, active, c.tag, a, b, c.waiter());
    c.stamp(1);
    float x[EACH];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) x[2 * j] = __uint_as_float(u32(a[j])), x[2 * j + 1] = __uint_as_float(u32(b[j]));
    const ExpertChoice<G> choice(lane, x, c.template constant<float>(e.bias), reinterpret_cast<u32*>(c.scratch()), id);
    // Readers poll two packets at once, so an odd number is followed by one of padding. Loaders wait for ids, so those come first.
    const bool mine = lane < G::TOP_K, sends = lane < round_up(G::TOP_K, 2);
    if (sends) send(c, c.p.exchange + e.out + lane, mine ? choice.expert : 0u);
    c.stamp(2);
    const float weight = choice.weight(lane, x, id);
    if (sends) send(c, c.p.exchange + e.aux + lane, __float_as_uint(mine ? weight : 0.f));
  }
};
