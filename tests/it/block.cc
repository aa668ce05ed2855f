// One block of CUDA threads on a CPU: fibers that take turns at barriers, and the kernels' own text for sampling. Reads cases
// from stdin, and writes the token of each to stdout: see tests/it/sampling.rs.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))

static float bits_to_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static float __uint_as_float(unsigned bits) { return bits_to_float(bits); }
static float __int_as_float(unsigned bits) { return bits_to_float(bits); }
static unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
// The compiler is told not to contract, so each of these is one rounded operation.
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __uint2float_rn(unsigned x) { return float(x); }
static float __ldcg(const float* from) { return *from; }
// Named by headers, and not called.
struct uint4 {
  unsigned x, y, z, w;
};
static float __fdividef(float a, float b) { return a / b; }
#define __expf std::exp

// ---- threads ------------------------------------------------------------------------------------------------------

constexpr int THREADS = 64;
static ucontext_t main_context, contexts[THREADS];
static std::vector<char> stacks(THREADS * 65536);
static int current;
static unsigned long long lanes[2][THREADS];
static int turns[THREADS];
alignas(1024) static unsigned char memory[1 << 16];

// Every thread comes here equally often, so going round once is a barrier.
static void next_thread() {
  const int from = current;
  current = (current + 1) % THREADS;
  swapcontext(&contexts[from], &contexts[current]);
}
template <class T>
static T value_of(int other, T value) {
  const int me = current;
  unsigned long long& mine = lanes[turns[me] & 1][me];
  mine = 0;
  std::memcpy(&mine, &value, sizeof value);
  const int turn = turns[me]++ & 1;
  next_thread();
  std::memcpy(&value, &lanes[turn][other], sizeof value);
  return value;
}
template <class T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
  return value_of(current ^ mask, value);
}
template <class T>
static T __shfl_sync(unsigned, T value, int lane) {
  return value_of(current / 32 * 32 + lane, value);
}

#include "core/types.cuh"
#include "core/math.cuh"
#include "core/sample.cuh"

template <int>
void consumer_barrier() {
  next_thread();
}
static u8* block_memory() { return memory; }
static u32 take_place(u32* count) { return (*count)++; }
struct Params {
  const float* logits;
  u64 seed;
  float inverse_temperature;
  u32 top_k, top_p_q32;
};

#include "ops/sampling.cuh"

// ---- cases --------------------------------------------------------------------------------------------------------

struct Shape {
  static constexpr int PARTS = 24, VOCAB = 1000;
};
template <int BYTES>
struct Block {
  static constexpr int WARPS = THREADS / 32, STAGE_AT = 0, SCRATCH_BYTES = BYTES;
};

struct Case {
  u32 scratch_kb, position, top_k, top_p_q32;
  u64 seed;
  float inverse_temperature;
  u32 unused;
};
static Case now;
static float logits[Shape::VOCAB];
static int tokens[THREADS];

template <class M>
static void choose(int thread) {
  const Params p{logits, now.seed, now.inverse_temperature, now.top_k, now.top_p_q32};
  float best = NEGATIVE_INFINITY;
  for (float logit : logits) best = std::fmax(best, logit);
  tokens[thread] = Sampling<M, Shape>::choose(p, 0, now.position, best, thread);
}
static void thread_main(int thread) {
  if (now.scratch_kb == 1) choose<Block<1024>>(thread);
  if (now.scratch_kb == 4) choose<Block<4096>>(thread);
  if (now.scratch_kb == 16) choose<Block<16384>>(thread);
  if (thread + 1 < THREADS) {
    current = thread + 1;
    setcontext(&contexts[current]);
  }
  setcontext(&main_context);
}

int main() {
  while (std::fread(&now, sizeof now, 1, stdin) == 1 && std::fread(logits, sizeof logits, 1, stdin) == 1) {
    int row = 0x7fffffff;
    if (now.scratch_kb == 2) {
      // The functions alone: of a number, and of its bits as a random word.
      u32 sum = 0;
      for (float x : logits) {
        sum = sum * 31 + __float_as_uint(exp_f32(x));
        sum = sum * 31 + __float_as_uint(gumbel(__float_as_uint(x)));
      }
      row = int(sum);
    } else if (now.scratch_kb == 0) {
      // As the head's epilogue does without filters.
      float value = NEGATIVE_INFINITY;
      for (int i = 0; i < Shape::VOCAB; i++)
        argmax_take(value, row, mul_add(logits[i], now.inverse_temperature, noise(now.seed, now.position, u32(i))), i);
    } else {
      // Best of each part, as `select` leaves them.
      float* candidates = reinterpret_cast<float*>(memory);
      for (int part = 0; part < Shape::PARTS; part++) {
        candidates[part] = NEGATIVE_INFINITY;
        for (int i = part * Shape::VOCAB / Shape::PARTS; i < (part + 1) * Shape::VOCAB / Shape::PARTS; i++)
          candidates[part] = std::fmax(candidates[part], logits[i]);
      }
      volatile bool ran = false;
      getcontext(&main_context);
      if (!ran) {
        ran = true;
        for (int thread = 0; thread < THREADS; thread++) {
          turns[thread] = 0;
          getcontext(&contexts[thread]);
          contexts[thread].uc_stack.ss_sp = stacks.data() + thread * 65536;
          contexts[thread].uc_stack.ss_size = 65536;
          contexts[thread].uc_link = &main_context;
          makecontext(&contexts[thread], reinterpret_cast<void (*)()>(thread_main), 1, thread);
        }
        current = 0;
        setcontext(&contexts[0]);
      }
      row = tokens[0];
      for (int token : tokens)
        if (token != row) return 1;
    }
    std::fwrite(&row, 4, 1, stdout);
  }
}
