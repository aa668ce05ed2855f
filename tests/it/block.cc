// Runs the kernels' source for sampling by one block of threads on a CPU. Reads cases from stdin, and writes the token of each to
// stdout: see tests/it/sampling.rs.

#include "block.h"

static u8* block_memory() { return smem; }
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
static void choose_by_all(int thread) {
  if (now.scratch_kb == 1) choose<Block<1024>>(thread);
  if (now.scratch_kb == 4) choose<Block<4096>>(thread);
  if (now.scratch_kb == 16) choose<Block<16384>>(thread);
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
      // Like the head's epilogue without filters.
      float value = NEGATIVE_INFINITY;
      for (int i = 0; i < Shape::VOCAB; i++)
        argmax_take(value, row, mul_add(logits[i], now.inverse_temperature, noise(now.seed, now.position, u32(i))), i);
    } else {
      // The best of each part, in the layout of `select`.
      float* best = reinterpret_cast<float*>(smem);
      for (int part = 0; part < Shape::PARTS; part++) {
        best[part] = NEGATIVE_INFINITY;
        for (int i = part * Shape::VOCAB / Shape::PARTS; i < (part + 1) * Shape::VOCAB / Shape::PARTS; i++)
          best[part] = std::fmax(best[part], logits[i]);
      }
      run_block(choose_by_all);
      row = tokens[0];
      for (int token : tokens)
        if (token != row) return 1;
    }
    std::fwrite(&row, 4, 1, stdout);
  }
}
