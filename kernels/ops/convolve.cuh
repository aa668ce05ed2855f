// convolve: one position of a gated short convolution, of units of 8 channels.
//
// b, c, x (CHANNELS)   packets of the channels, side by side in one buffer
// conv (CHANNELS, KERNEL), bias (CHANNELS)   fp32 constants, taps oldest first; no bias unless BIAS
// state   of each sequence (CHANNELS, KERNEL - 1), oldest first: b * x at the positions before; fp32
// out (CHANNELS)       packets
//
// owner    of a channel and its state: one task, on the same SM in every step and regime, and in it one thread
// moves    the state, read and written once; 3 values in for each channel, one out
// assumes  the state in memory is that of the position before. At position 0 it counts as zeros and is not read
//
// Formula: `Convolve` of src/ir/op.rs. A thread has two channels with the constants and the state, loaded before the packets arrive.
#pragma once

template <class M, class G>
struct Convolve {
  static constexpr int PAST = G::KERNEL - 1, STATE_COLS = G::CHANNELS * PAST, COLS = 3 * G::CHANNELS;
  // The first columns of b, c and x.
  static constexpr int PART = G::CHANNELS;

  // What a thread has of its two channels.
  struct Held {
    float past[PAST][2];
  };
  struct Constants {
    float taps[G::KERNEL][2], bias[2];
  };

  static __device__ __forceinline__ float* state_of(const Context<M>& c, const Entry& e, u32 sequence) {
    return reinterpret_cast<float*>(c.p.cache + u64(e.state) * OFFSET_BYTES) + u64(sequence) * STATE_COLS;
  }
  // `begins`: at position 0 a state counts as zeros. `col` is in the state, if the thread has channels or not.
  static __device__ __forceinline__ void load(const float* state, int col, bool begins, Held& held) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int t = 0; t < PAST; t++) {
        const float x = state[(col + h) * PAST + t];
        held.past[t][h] = begins ? 0.f : x;
      }
  }
  static __device__ __forceinline__ void store(float* state, int col, const Held& held) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int t = 0; t < PAST; t++) state[(col + h) * PAST + t] = held.past[t][h];
  }
  static __device__ __forceinline__ void load_constants(const Context<M>& c, const Entry& e, int col, Constants& k) {
    const float* taps = c.template constant<float>(e.conv) + col * G::KERNEL;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int t = 0; t < G::KERNEL; t++) k.taps[t][h] = __ldg(taps + h * G::KERNEL + t);
      k.bias[h] = 0.f;
      if constexpr (G::BIAS) k.bias[h] = __ldg(c.template constant<float>(e.conv_bias) + col + h);
    }
  }
  // The output of channel `h` at a position with these inputs; the state moves on.
  static __device__ __forceinline__ float step(Held& held, const Constants& k, int h, float b, float gate, float x) {
    const float own = b * x;
    float sum = 0.f;
#pragma unroll
    for (int t = 0; t < PAST; t++) {
      sum += held.past[t][h] * k.taps[t][h];
      held.past[t][h] = t + 1 < PAST ? held.past[t + 1 < PAST ? t + 1 : t][h] : own;
    }
    return gate * (sum + own * k.taps[PAST][h] + k.bias[h]);
  }

  static __device__ __forceinline__ void run(Context<M>& c, const Entry& e) {
    constexpr int PER_PACKET = Wire<M>::PER_PACKET, EACH = 2 / PER_PACKET, N = 3 * EACH;
    u32 sequence = 0;
    if constexpr (is_paged<M>()) sequence = static_cast<const PagedParams&>(c.p).sequence;
    float* const state = state_of(c, e, sequence);
    const int first = int(uniform(e.lo)) * 8, last = min(int(uniform(e.hi)) * 8, G::CHANNELS);
#pragma unroll 1
    for (int base = first + c.warp() * 64; base < last; base += M::WARPS * 64) {
      const bool in = base + c.lane() * 2 < last;
      const int col = in ? base + c.lane() * 2 : first;
      Held held;
      Constants constants;
      load(state, col, c.position == 0, held);
      load_constants(c, e, col, constants);
      bool active[N];
      const u64* from[N];
      u32 word[N];
#pragma unroll
      for (int n = 0; n < N; n++) {
        active[n] = in;
        from[n] = c.p.exchange + e.x + (n / EACH * PART + col) / PER_PACKET + n % EACH;
      }
      await_packets<N>(from, active, c.tag, word, c.waiter());
      c.stamp(1);
      if (!in) continue;
      float y[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const auto value = [&](int part) { return PER_PACKET == 2 && h == 1 ? Wire<M>::hi(word[part]) : Wire<M>::lo(word[part * EACH + h * (EACH - 1)]); };
        y[h] = step(held, constants, h, value(0), value(1), value(2));
      }
      publish_columns<G::CHANNELS>(c, e.out, col, y[0], y[1]);
      store(state, col, held);
    }
    c.barrier(); // every task has one: what the task before left in shared memory is used until then
  }
};
