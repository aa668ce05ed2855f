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
static void tell_blocks(u64* to, u64 word) {
  if (*to != 0 || word == 0) std::abort();
  *to = word;
}
static void clear_told(u64* word) { *word = 0; }
static u64 wait_for_block(const u64* from) {
  if (*from == 0) std::abort();
  return *from;
}
static void release_step() {}
static void acquire_step() {}
static void raise_to(u64* most, u64 value) { *most = value > *most ? value : *most; }

#include "sample/table.cuh"
#include "sample/sampler.cuh"
#include "sample/rivals.cuh"

// Parts of few ids by one warp, so that every loop and every search has several iterations; and the threads of the generated kernel.
template <int N>
struct Sizes {
  static constexpr int THREADS = N, FIXED_BYTES = 14848;
};

static SamplerParams params;
static u32 at_of, index_of, step_of;
static bool by_rivals;

template <class S>
static void body(int thread) {
  if (by_rivals) {
    typedef RivalSampler<S> Rivals;
    if (step_of == 0) Rivals::find(params, at_of, index_of, thread);
    if (step_of == 1) Rivals::weigh(params, at_of, index_of, thread);
    if (step_of == 2 && index_of == 0) Rivals::settle(params, at_of, thread);
    return;
  }
  if (step_of == 0) Sampler<S>::adjust(params, at_of, index_of, thread);
  if (step_of == 1 && Sampler<S>::choose(params, at_of, index_of, thread)) Sampler<S>::settle(params, at_of, thread);
}
// Blocks run one after the other here, so each step of a row runs in all of its blocks before the next one does. Every second one runs them
// from the last to the first.
template <class S>
static void launch() {
  const size_t bytes = S::FIXED_BYTES + params.part_ids * (by_rivals ? 4 : 6);
  std::vector<std::vector<u8>> memory(params.parts, std::vector<u8>(bytes, 0xff));
  std::memset(smem, 0x5a, sizeof smem);
  for (at_of = 0; at_of < params.row_count; at_of++)
    for (step_of = 0; step_of < 3; step_of++)
      for (u32 i = 0; i < params.parts; i++) {
        index_of = (params.step + step_of) % 2 ? params.parts - 1 - i : i;
        std::memcpy(smem, memory[index_of].data(), bytes);
        run_block(body<S>, S::THREADS);
        std::memcpy(memory[index_of].data(), smem, bytes);
        for (size_t at = bytes; at < bytes + 1024; at++)
          if (smem[at] != 0x5a) std::abort(); // beyond the memory of the block
      }
}

#ifdef LIBRARY
extern "C" void sampler_step(const void* p, bool rivals) {
  by_rivals = rivals;
  std::memcpy(&params, p, sizeof params);
  launch<Sizes<32>>();
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
  u32 size; // of parts
  u32 by_rivals;
  u32 vocab, launch_rows, rows, steps, edits, mask_words;
};
template <class T>
static std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (count && std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return values;
}

template <class S>
static void run(const Head& head, u32 part_ids) {
  std::vector<float> logits = read<float>(size_t(head.steps) * head.launch_rows * head.vocab);
  std::vector<SampleRow> rows = read<SampleRow>(head.rows);
  std::vector<SampleBegin> begins = read<SampleBegin>(head.rows + 1);
  std::vector<uint2> edits = read<uint2>(head.edits);
  std::vector<u32> masks = read<u32>(head.mask_words);
  const u32 parts = ceil_div(head.vocab, part_ids);
  std::vector<u32> counts(head.rows * SAMPLE_BUCKETS), present(head.rows * parts * SAMPLE_BUCKETS / 32, ~0u);
  std::vector<u64> list(head.rows * head.vocab, ~0ull), weights(head.rows * SAMPLE_BUCKETS), bests(head.rows * SAMPLE_BUCKETS);
  std::vector<u64> tops(head.rows * parts * SAMPLE_TOP_MAX, ~0ull);
  std::vector<u64> parts_best(head.rows * parts * 2);
  std::vector<u64> told(head.rows * parts * TOLD_WORDS);
  std::vector<SampleTotals> totals(head.rows);
  std::vector<SampleAnswer> answers(head.steps * head.rows);
  std::vector<i32> next(head.launch_rows * 3, -7);
  for (u32 step = 0; step < head.steps; step++) {
    params = SamplerParams{logits.data() + size_t(step) * head.launch_rows * head.vocab, list.data(), weights.data(), counts.data(),
                           bests.data(), present.data(), parts_best.data(), told.data(), totals.data(), tops.data(), rows.data(), edits.data(), masks.data(),
                           answers.data() + step * head.rows, step + 1 < head.steps ? next.data() : nullptr, 3, head.vocab, step, head.rows,
                           head.rows, parts, part_ids};
    std::memcpy(params.begins, begins.data(), begins.size() * 8);
    launch<S>();
    // The next launch begins with zeros, and with the tokens.
    for (u64 weight : weights) if (weight) std::abort();
    for (u32 count : counts) if (count) std::abort();
    for (u64 best : bests) if (best) std::abort();
    for (u64 best : parts_best) if (best) std::abort();
    for (u64 word : told) if (word) std::abort();
    for (const SampleTotals& t : totals) if (t.raw_total || t.chosen || t.done) std::abort();
    if (params.next)
      for (u32 at = 0; at < head.rows; at++) {
        const SampleAnswer& answer = params.answers[at];
        if (next[begins[at].row * 3] != (answer.status == SAMPLE_CHOSEN ? i32(answer.token) : 0)) std::abort();
      }
  }
  std::fwrite(answers.data(), sizeof(SampleAnswer), answers.size(), stdout);
}

int main() {
  Head head;
  while (std::fread(&head, sizeof head, 1, stdin) == 1) {
    by_rivals = head.by_rivals;
    if (head.size == 0) run<Sizes<32>>(head, 240);
// Mutants have the small parts alone.
#ifndef SMALL_ALONE
    if (head.size == 1) run<Sizes<64>>(head, 960);
    if (head.size == 2) run<Sizes<256>>(head, 2064);
#endif
  }
}
#endif
