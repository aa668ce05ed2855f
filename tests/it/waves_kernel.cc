// A generated wave kernel, run block by block on a CPU (waves_block.h): what a device does between two meetings of all blocks, each
// block does here alone, the last one first. Reads its tables, its pack and the rows of its launches from files of the working folder, and
// writes the cache, its arena, the tokens of each step, and the logits of each launch: see tests/it/waves.rs. A tail finds the cache and the
// residual of its chunk in files, too.

#include "waves_block.h"
#include "generated.cuh"

// Nothing where there is no such file.
template <class T>
static std::vector<T> contents(const char* name, bool must = true) {
  std::FILE* file = std::fopen(name, "rb");
  require(file || !must, name);
  if (!file) return {};
  std::fseek(file, 0, SEEK_END);
  std::vector<T> all(std::ftell(file) / sizeof(T));
  std::rewind(file);
  require(std::fread(all.data(), sizeof(T), all.size(), file) == all.size(), name);
  std::fclose(file);
  return all;
}

// One of the generated cases.
struct Any {
  template <class L>
  static void load(L& l, const Wave& e) { Dispatch::load(l, e.op, e); }
  // A block knows the op before it enters the wave, and nothing else of it.
  static void run(WaveContext<Machine>& c, const Wave& e) { Dispatch::run(c, wave.op, e); }
};

template <>
struct Holds<Any> {
  static bool in(const Wave& e) { return Dispatch::holds(e.op); }
};

// By a warp: what rows decided in the last step.
static void tell_last(int lane) {
  WaveContext<Machine> c(params);
  c.thread = lane;
  for (u32 row = 0; row < params.row_count; row++) params.mailbox[1 + params.steps * Machine::BLOCK_ROWS + row] = wave_decided<Machine>(c, row);
}

// Bytes of the work arena and of the cache, then rows and steps of each launch.
int main(int count, char** arguments) {
  const std::vector<Wave> waves = contents<Wave>("waves");
  const std::vector<Share> shares = contents<Share>("shares");
  const std::vector<ShareRecord> records = contents<ShareRecord>("records");
  weight_boxes = contents<WeightBox>("boxes");
  const std::vector<u32> pages = contents<u32>("pages");
  const std::vector<Row> rows = contents<Row>("rows");
  constants = contents<u8>("pack");
  work.assign(std::atoll(arguments[1]), 0);
  cache.assign(std::atoll(arguments[2]), 0xff);
  const std::vector<u8> before = contents<u8>("before", false);
  require(before.empty() || before.size() == cache.size(), "the cache of a chunk");
  if (!before.empty()) cache = before;
  const std::vector<float> taken = contents<float>("taken", false);
  params.taken = taken.data();
  params.pack = constants.data(), params.work = work.data(), params.cache = cache.data();
  params.shares = shares.data(), params.records = records.data(), params.pages = pages.data();
  params.rows = rows.data();
  params.tag = 1;
  std::vector<i32> all_tokens;
  std::vector<float> all_logits;
  for (int launch = 3; launch + 1 < count; launch += 2) {
    params.row_count = u32(std::atoi(arguments[launch])), params.steps = u32(std::atoi(arguments[launch + 1]));
    params.position = params.rows->position;
    params.wave_count = u32(waves.size());
    std::vector<i32> mailbox(1 + (params.steps + 1) * Machine::BLOCK_ROWS, -1);
    std::vector<float> logits(Machine::STEPS ? size_t(params.row_count) * Machine::VOCAB : 0);
    if (Machine::STEPS) params.mailbox = mailbox.data(), params.logits = logits.data();
    for (step_at_hand = 0; step_at_hand < params.steps; step_at_hand++)
      for (wave_at_hand = 0; wave_at_hand < waves.size(); wave_at_hand++) {
        const auto all = [&] {
          for (u32 sm = Machine::SMS; sm-- > 0;) {
            blockIdx.x = sm;
            wave = waves[wave_at_hand];
            run_wave<Machine, Any>();
          }
        };
        if (Machine::PAIRS)
          run_in_pairs(all);
        else
          all();
      }
    if (Machine::STEPS) run_block(tell_last, 32);
    for (u32 step = 0; Machine::STEPS && step <= params.steps; step++)
      for (u32 row = 0; row < params.row_count; row++) all_tokens.push_back(mailbox[1 + step * Machine::BLOCK_ROWS + row]);
    all_logits.insert(all_logits.end(), logits.begin(), logits.end());
    params.rows += params.row_count;
    params.tag += params.steps * params.wave_count;
  }
  const auto put = [](const char* name, const void* from, size_t bytes) {
    std::FILE* file = std::fopen(name, "wb");
    require(file && std::fwrite(from, 1, bytes, file) == bytes && std::fclose(file) == 0, name);
  };
  put("cache", cache.data(), cache.size());
  put("work", work.data(), work.size());
  put("tokens", all_tokens.data(), all_tokens.size() * sizeof(i32));
  put("logits", all_logits.data(), all_logits.size() * sizeof(float));
}
