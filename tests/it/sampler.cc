// Runs the sampler's source block by block on a CPU: see tests/it/sampler.rs. Reads launches from stdin, and writes the answers of each
// to stdout. With LIBRARY it has no `main`: the fake driver (fake_cuda.c) runs its steps.

#include "block.h"

// Shared memory of each block of a cluster.
constexpr int BLOCKS_MAX = 8, BLOCK_BYTES = SMEM_BYTES / BLOCKS_MAX;
static u8* memory_of(u32 block) { return smem + block * BLOCK_BYTES; }
static u8* block_memory() { return memory_of(current / block_threads); }
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
static void arrive_at_cluster() {}
static void await_cluster() { cluster_meeting.meet(); }
template <class T>
static T* at_block(const T* own, u32 block) {
  return reinterpret_cast<T*>(memory_of(block) + (reinterpret_cast<const u8*>(own) - block_memory()));
}
static void store_to_block(u64* own, u32 block, u64 value) { *at_block(own, block) = value; }
static u32 load_from_block(const u32* own, u32 block) { return *at_block(own, block); }
static void prefetch_line(const void*) {}
// Who reads a line afterwards finds NaNs.
static void discard_line(u64 line) {
  if (line % 128) std::abort();
  std::memset(reinterpret_cast<void*>(line), 0xff, 128);
}
static bool __any_sync(unsigned, bool value) { return __ballot_sync(~0u, value) != 0; }
static void raise_to(u64* most, u64 value) { *most = value > *most ? value : *most; }

#include "sample/table.cuh"
#include "sample/block.cuh"
#include "sample/sampler.cuh"
#include "sample/cluster.cuh"

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
// Clusters: fewer threads than those of the generated kernel.
struct SmallCluster {
  static constexpr int THREADS = 32, BLOCKS = 3, QUADS = 1;
};
struct WholeCluster {
  static constexpr int THREADS = 32, BLOCKS = 8, QUADS = 8;
};

static SamplerParams params;
static u32 block_of;

template <class S>
static void adjust(int thread) {
  Sampler<S>::adjust(params, block_of, thread);
}
template <class S>
static void choose(int thread) {
  Sampler<S>::choose(params, block_of, thread);
}
template <class S>
static void decide(int thread) {
  ClusterSampler<S>::decide(params, block_of + current / S::THREADS, thread);
}
// A launch: clusters of blocks of `threads` threads, with so much shared memory each. Every second one runs from the last to the first.
static void launch(void (*body)(int), u32 clusters, u32 blocks, int threads, u32 shared_bytes, bool backwards) {
  if (blocks > BLOCKS_MAX || shared_bytes + 1024 > BLOCK_BYTES) std::abort();
  for (u32 i = 0; i < clusters; i++) {
    block_of = (backwards ? clusters - 1 - i : i) * blocks;
    for (u32 b = 0; b < blocks; b++) std::memset(memory_of(b), 0xff, shared_bytes);
    run_block(body, threads, blocks);
    for (u32 b = 0; b < blocks; b++)
      for (u32 at = shared_bytes; at < shared_bytes + 1024; at++)
        if (memory_of(b)[at] != 0x5a) std::abort(); // beyond the memory of the block
  }
}
template <class S>
static void launch_adjust(u32 grid) {
  launch(adjust<S>, grid, 1, S::THREADS, S::SHARED_BYTES, params.step % 2);
}
template <class S>
static void launch_choose(u32 grid) {
  launch(choose<S>, grid, 1, S::THREADS, S::SHARED_BYTES, params.step % 2 == 0);
}
template <class S>
static u32 cluster_bytes(u32 vocab) {
  return ClusterLayout<S>::DATA_AT + round_up(ceil_div(int(vocab), S::BLOCKS), 32) * 4;
}
template <class S>
static void launch_decide(u32 grid) {
  launch(decide<S>, grid / S::BLOCKS, S::BLOCKS, S::THREADS, cluster_bytes<S>(params.vocab), params.step % 2);
}
static void guard() { std::memset(smem, 0x5a, sizeof smem); }

#ifdef LIBRARY
// The parts of the generated kernel, by fewer threads.
struct Library {
  static constexpr int THREADS = 32, PART = 3888, SHARED_BYTES = 28672;
};
// Shared memory of a block of the third kernel, as the generated one has it: its exchange has values of 16 warps.
struct Generated {
  static constexpr int THREADS = 512, BLOCKS = 8, QUADS = 8;
};
extern "C" u32 sampler_bytes(u32 vocab) { return cluster_bytes<Generated>(vocab); }
// One of the three kernels.
extern "C" void sampler_step(u32 kernel, const void* p, u32 grid) {
  std::memcpy(&params, p, sizeof params);
  guard();
  if (kernel == 0) launch_adjust<Library>(grid);
  if (kernel == 1) launch_choose<Library>(grid);
  if (kernel == 2) launch_decide<WholeCluster>(grid);
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
  u32 size; // 0: Small, 1: Middle, 2: Whole, 3: SmallCluster, 4: WholeCluster
  u32 vocab, launch_rows, rows, steps, edits, mask_words;
};
template <class T>
static std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (count && std::fread(values.data(), sizeof(T), count, stdin) != count) std::exit(2);
  return values;
}

// Launches of a step, one after the other, with `parts` blocks for each row.
static void run(const Head& head, u32 parts, std::vector<void (*)(u32)> launches) {
  std::vector<float> logits = read<float>(size_t(head.steps) * head.launch_rows * head.vocab);
  std::vector<SampleRow> rows = read<SampleRow>(head.rows);
  std::vector<uint2> edits = read<uint2>(head.edits);
  std::vector<u32> masks = read<u32>(head.mask_words);
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
                           step + 1 < head.steps ? next.data() : nullptr, 3, head.vocab, parts, step, 1, 0};
    for (const auto launch : launches) launch(head.rows * parts);
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

template <class S>
static void run_parts(const Head& head) {
  run(head, ceil_div(int(head.vocab), S::PART), {launch_adjust<S>, launch_choose<S>});
}
template <class S>
static void run_clusters(const Head& head) {
  run(head, S::BLOCKS, {launch_decide<S>});
}

int main() {
  Head head;
  while (std::fread(&head, sizeof head, 1, stdin) == 1) {
    if (head.size == 0) run_parts<Small>(head);
    if (head.size == 3) run_clusters<SmallCluster>(head);
// The small parts and clusters are compiled again for each mutant.
#ifndef SMALL_ALONE
    if (head.size == 1) run_parts<Middle>(head);
    if (head.size == 2) run_parts<Whole>(head);
    if (head.size == 4) run_clusters<WholeCluster>(head);
#endif
  }
}
#endif
