// Runs the sampler's source block by block on a CPU: see tests/it/sampler.rs. Reads launches from stdin, and writes the answers of each
// to stdout. With LIBRARY it has no `main`: the fake driver (fake_cuda.c) runs its steps.

#include "block.h"

static u8* block_memory() { return smem; }
static u32 take_places(u32* taken, u32 count) {
  const u32 first = *taken;
  *taken += count;
  return first;
}
static u32 take_place(u32* taken) { return take_places(taken, 1); }
template <class T>
static void add_to(T* sum, T value) { *sum += value; }
static u32 count_block(u32* blocks) { return take_places(blocks, 1); }
static void let_next_start() {}
static void wait_for_previous() {}
static void raise_to(u64* most, u64 value) { *most = value > *most ? value : *most; }

#include "sample/table.cuh"
#include "sample/sampler.cuh"

// Parts of few ids by one warp, so that every loop and every search has several iterations; and those of the generated kernel.
struct Small {
  static constexpr int THREADS = 32, PART = 240, SHARED_BYTES = 28672;
};
struct Middle {
  static constexpr int THREADS = 64, PART = 960, SHARED_BYTES = 28672;
};
struct Whole {
  static constexpr int THREADS = 256, PART = 3888, SHARED_BYTES = 28672;
};

static SamplerParams params;
static u32 step_of, block_of;

template <class S>
static void body(int thread) {
  if (step_of == 0) Sampler<S>::adjust(params, block_of, thread);
  if (step_of == 1) Sampler<S>::choose(params, block_of, thread);
}
// One of the two launches. Every second one runs its blocks from the last to the first.
template <class S>
static void launch(u32 step, u32 grid) {
  step_of = step;
  for (u32 i = 0; i < grid; i++) {
    block_of = (params.step + step) % 2 ? grid - 1 - i : i;
    std::memset(smem, 0xff, S::SHARED_BYTES);
    run_block(body<S>, S::THREADS);
    for (int at = S::SHARED_BYTES; at < S::SHARED_BYTES + 1024; at++)
      if (smem[at] != 0x5a) std::abort(); // beyond the memory of the block
  }
}
static void guard() { std::memset(smem, 0x5a, sizeof smem); }

#ifdef LIBRARY
// The parts of the generated kernel, by fewer threads.
struct Library {
  static constexpr int THREADS = 32, PART = 3888, SHARED_BYTES = 28672;
};
extern "C" void sampler_step(u32 step, const void* p, u32 grid) {
  std::memcpy(&params, p, sizeof params);
  guard();
  launch<Library>(step, grid);
}
// The choice of a head with temperature.
extern "C" u32 choice_at_head(const float* logits, u32 vocab, float inverse_temperature, u64 seed, u32 position) {
  u64 best = 0;
  for (u32 id = 0; id < vocab; id++) {
    const u64 rank = rank_of(mul_add(logits[id], inverse_temperature, noise(seed, position, id)), id);
    best = rank > best ? rank : best;
  }
  return id_of(best);
}
#else

struct Head {
  u32 size; // 0: Small, 1: Middle, 2: Whole
  u32 vocab, launch_rows, rows, steps, edits, mask_words;
};
template <class T>
static std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (count && std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return values;
}

template <class S>
static void run(const Head& head) {
  std::vector<float> logits = read<float>(size_t(head.steps) * head.launch_rows * head.vocab);
  std::vector<SampleRow> rows = read<SampleRow>(head.rows);
  std::vector<uint2> edits = read<uint2>(head.edits);
  std::vector<u32> masks = read<u32>(head.mask_words);
  const u32 parts = ceil_div(head.vocab, S::PART);
  std::vector<u32> counts(head.rows * SAMPLE_BUCKETS), present(head.rows * parts * SAMPLE_BUCKETS / 32, ~0u);
  std::vector<u64> list(head.rows * head.vocab, ~0ull), weights(head.rows * SAMPLE_BUCKETS), bests(head.rows * SAMPLE_BUCKETS);
  std::vector<u64> tops(head.rows * parts * SAMPLE_TOP_MAX, ~0ull);
  std::vector<SampleTotals> totals(head.rows);
  std::vector<SampleAnswer> answers(head.steps * head.rows);
  std::vector<i32> next(head.launch_rows * 3, -7);
  guard();
  for (u32 step = 0; step < head.steps; step++) {
    params = SamplerParams{logits.data() + size_t(step) * head.launch_rows * head.vocab, list.data(), weights.data(), counts.data(),
                           bests.data(), present.data(), totals.data(), tops.data(), rows.data(), edits.data(), masks.data(), answers.data() + step * head.rows,
                           step + 1 < head.steps ? next.data() : nullptr, 3, head.vocab, parts, step};
    launch<S>(0, head.rows * parts);
    launch<S>(1, head.rows * parts);
    // The next launch begins with zeros, and with the tokens.
    for (u64 weight : weights) if (weight) std::abort();
    for (u32 count : counts) if (count) std::abort();
    for (u64 best : bests) if (best) std::abort();
    for (const SampleTotals& t : totals) if (t.best || t.raw_best || t.raw_total || t.chosen || t.done) std::abort();
    if (params.next)
      for (u32 at = 0; at < head.rows; at++) {
        const SampleAnswer& answer = params.answers[at];
        if (next[rows[at].row * 3] != (answer.status == SAMPLE_CHOSEN ? i32(answer.token) : 0)) std::abort();
      }
  }
  std::fwrite(answers.data(), sizeof(SampleAnswer), answers.size(), stdout);
}

int main() {
  Head head;
  while (std::fread(&head, sizeof head, 1, stdin) == 1) {
    if (head.size == 0) run<Small>(head);
// Mutants have the small parts alone.
#ifndef SMALL_ALONE
    if (head.size == 1) run<Middle>(head);
    if (head.size == 2) run<Whole>(head);
#endif
  }
}
#endif
