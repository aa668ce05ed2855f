// Owns what every form of the sampler does in a block: sums and maxima over its threads, a part of a row in shared memory, and the answer.
#pragma once

// QUADS: four neighbouring ids, of a thread, that are on their way at once. DATA_AT: byte of shared memory where the logits of a part begin.
template <int THREADS, int QUADS, int DATA_AT>
struct SampleBlock {
  static constexpr int WARPS = THREADS / 32;
  static constexpr int EDITS = 4; // entries of a thread that are on their way at once
  static constexpr int LOADS = 5; // values of a thread that are on their way at once
  // Words of the warps, then results of a search.
  static constexpr int RESULTS_AT = 256, SHARED_END = 512;
  static_assert(WARPS <= 16 && WARPS * 16 <= RESULTS_AT && DATA_AT >= SHARED_END, "each warp has two words");

  static __device__ __forceinline__ u64* words() { return reinterpret_cast<u64*>(block_memory()); }
  static __device__ __forceinline__ u64* results() { return reinterpret_cast<u64*>(block_memory() + RESULTS_AT); }
  template <class T>
  static __device__ __forceinline__ T* data() { return reinterpret_cast<T*>(block_memory() + DATA_AT); }
  static __device__ __forceinline__ void barrier() { consumer_barrier<THREADS>(); }

  static __device__ __forceinline__ u64 warp_most(u64 value) {
    const u32 own = u32(value >> 32), high = warp_max(own);
    return u64(high) << 32 | warp_max(own == high ? u32(value) : 0u);
  }
  // By parts of 22 bits, of which 32 have a sum of 27 bits.
  static __device__ __forceinline__ u64 warp_total(u64 value) {
    constexpr u32 PART = (1u << 22) - 1;
    const u64 low = warp_sum(u32(value) & PART), middle = warp_sum(u32(value >> 22) & PART), high = warp_sum(u32(value >> 44));
    return low + (middle << 22) + (high << 44);
  }
  // Maxima over all threads of two values or of one, and the sum of a value. All threads get the results.
  static __device__ __noinline__ void block_max(u64& a, u64& b, int thread) {
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
  static __device__ __noinline__ u64 block_max(u64 value, int thread) {
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
  static __device__ __noinline__ u64 block_scan(u64 value, int thread) {
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
    // `size` ids, except in the last part. Parts after that one are empty.
    __device__ __forceinline__ Part(const SamplerParams& p, u32 at, u32 index, int size)
        : at(at), index(index), first(int(index) * size), count(max(0, min(size, int(p.vocab) - first))),
          logits(p.logits + u64(p.rows[at].row) * p.vocab + first) {}
  };
  static __device__ __forceinline__ u64 seed_of(const SampleRow& row) { return u64(row.seed_high) << 32 | row.seed_low; }
  // Of the token in its sequence.
  static __device__ __forceinline__ u32 position_of(const SamplerParams& p, const SampleRow& row) { return row.position + p.step; }
  // Distance of a score from the best one, at most 0. Equality comes first, because the difference of infinities is a NaN.
  static __device__ __forceinline__ float distance(float score, float score_max) {
    return score == score_max ? 0.f : __fsub_rn(score, score_max);
  }
  static __device__ __forceinline__ bool probable(const SampleRow& row, float score, float score_max) {
    return !(row.flags & SAMPLE_MIN_P) || score == score_max || exp_f32(__fsub_rn(score, score_max)) >= row.min_p;
  }

  // ---- a part in shared memory ------------------------------------------------------------------------------------

  // Rank of a logit: the larger, the better; -inf is the lowest. 0: not a number.
  static __device__ __forceinline__ u64 raw_rank(float logit, u32 id) {
    if (logit != logit) return 0;
    const u32 bits = __float_as_uint(__fadd_rn(logit, 0.f));
    return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | u32(~id);
  }
  // The best rank below `last` among a thread's own ids.
  static __device__ __forceinline__ u64 next_best(const Part& part, u64 last, int thread) {
    u64 best = 0;
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u64 rank = at + i < part.count ? raw_rank(data<float>()[at + i], u32(part.first + at + i)) : 0;
        best = rank < last && rank > best ? rank : best;
      }
    return best;
  }
  // The most probable ids of a part that is as the model computed it, in order.
  static __device__ __noinline__ void top_of_part(const SamplerParams& p, const Part part, u32 top, int thread) {
    u64 own = next_best(part, ~0ull, thread);
#pragma unroll 1
    for (u32 n = 0; n < top; n++) {
      const u64 best = block_max(own, thread);
      if (thread == 0) p.tops[(u64(part.at) * p.parts + part.index) * SAMPLE_TOP_MAX + n] = best;
      // One thread has it, or no id is left.
      if (own == best) own = next_best(part, best, thread);
    }
  }
  static __device__ __forceinline__ float penalised(const SampleRow& row, float logit, u32 count) {
    if (row.repetition != 1.f) logit = logit < 0.f ? __fmul_rn(logit, row.repetition) : __fdiv_rn(logit, row.repetition);
    if (count > 0 && row.frequency != 0.f) logit = __fsub_rn(logit, __fmul_rn(row.frequency, __uint2float_rn(count)));
    if (count > 0 && row.presence != 0.f) logit = __fsub_rn(logit, row.presence);
    return logit;
  }

  // `load` takes every THREADS-th entry of a list from `from` on; `change` applies entries to the logits of a part. A list has an id at
  // most once.
  static __device__ __forceinline__ void load(const uint2* edits, u32 from, u32 count, uint2 (&entries)[EDITS]) {
#pragma unroll
    for (int n = 0; n < EDITS; n++) entries[n] = from + n * THREADS < count ? __ldcg(edits + from + n * THREADS) : make_uint2(~0u, 0u);
  }
  template <class With>
  static __device__ __forceinline__ void change(const Part& part, const uint2 (&entries)[EDITS], With with) {
#pragma unroll
    for (int n = 0; n < EDITS; n++) {
      const u32 at = entries[n].x - u32(part.first);
      if (at < u32(part.count)) data<float>()[at] = with(data<float>()[at], entries[n].y);
    }
  }
  template <class With>
  static __device__ __forceinline__ void change_all(const Part& part, const uint2* edits, u32 from, u32 count, With with) {
#pragma unroll 1
    for (u32 i = from; i < count; i += EDITS * THREADS) {
      uint2 entries[EDITS];
      load(edits, i, count, entries);
      change(part, entries, with);
    }
    barrier();
  }

  // Brings the logits of a part to shared memory, and changes them as the request says. A thread may then read its own ids, four at
  // `4 * (n * THREADS + thread)`, without a barrier. Returns the thread's largest logit as the model computed it; -inf: none is a number.
  // WIDE loads four logits at a time if the vocabulary allows it. That takes registers that some callers need for values of their own.
  // Before the changes it finds the `top` most probable ids.
  template <bool WIDE>
  static __device__ __noinline__ float stage(const SamplerParams& p, const Part part, u32 top, int thread) {
    const SampleRow& row = p.rows[part.at];
    float* logits = data<float>();
    const uint2 *banned = p.edits + row.edits, *biased = banned + row.banned, *seen = biased + row.biased;
    const bool is_banned = p.step < row.banned_steps && row.banned > 0, is_penalised = row.flags & SAMPLE_PENALTIES;
    // Loaded together with the logits.
    uint2 first_seen[EDITS];
    load(seen, u32(thread), is_penalised ? row.seen : 0, first_seen);
    float most = NEGATIVE_INFINITY;
    if (WIDE && p.vocab % 4 == 0) {
#pragma unroll 1
      for (int first = 4 * thread; first < part.count; first += 4 * THREADS * QUADS) {
        float4 quads[QUADS];
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
          const int at = first + 4 * n * THREADS;
          if (at < part.count) quads[n] = __ldcg(reinterpret_cast<const float4*>(part.logits + at));
        }
#pragma unroll
        for (int n = 0; n < QUADS; n++) {
          const int at = first + 4 * n * THREADS;
          if (at >= part.count) break;
          reinterpret_cast<float4*>(logits + at)[0] = quads[n];
          // If one operand is a NaN, fmaxf returns the other.
          most = fmaxf(fmaxf(most, fmaxf(quads[n].x, quads[n].y)), fmaxf(quads[n].z, quads[n].w));
        }
      }
    } else {
#pragma unroll 4
      for (int i = thread; i < round_up(part.count, 4); i += THREADS) {
        const float logit = i < part.count ? __ldcg(part.logits + i) : NEGATIVE_INFINITY;
        logits[i] = logit;
        most = fmaxf(most, logit);
      }
      barrier();
    }
    if (top > 0) top_of_part(p, part, top, thread);
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
    // The lists are applied one after the other.
    if (is_banned || row.biased > 0 || is_penalised) barrier();
    if (is_banned) change_all(part, banned, u32(thread), row.banned, [](float, u32) { return NEGATIVE_INFINITY; });
    if (row.biased > 0)
      change_all(part, biased, u32(thread), row.biased, [](float logit, u32 bias) { return __fadd_rn(logit, __uint_as_float(bias)); });
    if (is_penalised) {
      const auto with = [&](float logit, u32 count) { return penalised(row, logit, count); };
      change(part, first_seen, with);
      change_all(part, seen, u32(thread) + EDITS * THREADS, row.seen, with);
    }
    return most;
  }
  // Four scores of a part that was staged.
  static __device__ __forceinline__ void scores_at(float inverse_temperature, int at, float (&scores)[4]) {
    const float4 four = reinterpret_cast<const float4*>(data<float>() + at)[0];
    scores[0] = __fmul_rn(four.x, inverse_temperature);
    scores[1] = __fmul_rn(four.y, inverse_temperature);
    scores[2] = __fmul_rn(four.z, inverse_temperature);
    scores[3] = __fmul_rn(four.w, inverse_temperature);
  }

  // The best score of a part that was staged, as a rank.
  static __device__ __forceinline__ u64 best_of_part(const Part& part, float inverse_temperature, int thread) {
    float most = NEGATIVE_INFINITY;
    u32 id = 0;
#pragma unroll 1
    for (int at = 4 * thread; at < part.count; at += 4 * THREADS) {
      float scores[4];
      scores_at(inverse_temperature, at, scores);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (scores[i] > most) {
          most = scores[i];
          id = u32(part.first + at + i);
        }
    }
    return rank_of(most, id);
  }
  // The rank of s + noise; 0: min-p leaves the id out.
  static __device__ __noinline__ u64 noisy_rank(const SampleRow& row, u32 x, float score, float most, u32 id) {
    return probable(row, score, most) ? rank_of(__fadd_rn(score, gumbel(x)), id) : 0;
  }

  // The sum of score and noise of the best id, as a rank: the winner reaches it, because this id is admitted in any case. By a whole warp.
  static __device__ __forceinline__ u64 sum_of_best(const SamplerParams& p, const SampleRow& row, u64 best) {
    return rank_of(__fadd_rn(score_of(best), noise(seed_of(row), position_of(p, row), id_of(best))), id_of(best));
  }
  // The same as a bound of other sums; -inf: sums of that size round by too much.
  static __device__ __forceinline__ float bound_of(u64 rank) { return fabsf(score_of(rank)) < 16384.f ? score_of(rank) : NEGATIVE_INFINITY; }
  // The weights of a thread's logits as the model computed them.
  static __device__ __noinline__ u64 raw_weights(const SamplerParams& p, const Part part, float most, int thread) {
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
    return sum;
  }

  // ---- the answer for a row ---------------------------------------------------------------------------------------

  static __device__ __noinline__ void answer(const SamplerParams& p, u32 at, u64 winner, u64 raw_best, u64 raw_total, int thread) {
    SampleRow& row = p.rows[at];
    SampleAnswer& to = p.answers[at];
    const u32 token = id_of(winner);
    if (thread == 0) {
      to.token = token;
      to.status = winner ? SAMPLE_CHOSEN : raw_best ? SAMPLE_NONE_ALLOWED : SAMPLE_NO_CANDIDATE;
      // The next launch reads a row of the table of embeddings in any case.
      if (p.next) p.next[row.row * p.next_stride] = winner ? i32(token) : 0;
    }
    if (!winner) return;
    if (row.flags & SAMPLE_LOGPROBS) {
      if (thread == 0) {
        to.logit = __ldcg(p.logits + u64(row.row) * p.vocab + token);
        to.logit_max = score_of(raw_best);
        to.total_low = u32(raw_total);
        to.total_high = u32(raw_total >> 32);
      }
      const u64* tops = p.tops + u64(at) * p.parts * SAMPLE_TOP_MAX;
      const auto rank_at = [&](u32 i) { return i < p.parts * row.top ? __ldcg(tops + i / row.top * SAMPLE_TOP_MAX + i % row.top) : 0; };
      const u64 first = rank_at(thread);
      u64 last = ~0ull;
      u32 count = 0;
#pragma unroll 1
      for (; count < row.top; count++) {
        u64 best = first < last ? first : 0;
#pragma unroll 1
        for (u32 i = thread + THREADS; i < p.parts * row.top; i += THREADS) {
          const u64 rank = rank_at(i);
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
#pragma unroll 1
      for (u32 i = thread; i < count; i += EDITS * THREADS) {
        uint2 entries[EDITS];
        load(seen, i, count, entries);
#pragma unroll
        for (int n = 0; n < EDITS; n++)
          if (entries[n].x == token) {
            seen[i + n * THREADS].y++;
            found = 1;
          }
      }
      found = block_max(found, thread);
      if (found == 0 && thread == 0) {
        seen[count] = make_uint2(token, 1u);
        row.seen = count + 1;
      }
    }
  }
};
