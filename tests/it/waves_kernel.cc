// A generated wave kernel, run block by block on a CPU (waves_block.h): what a device does between two meetings of all blocks, each
// block does here alone, the last one first. Reads its tables, its pack and the rows of its launches from files of the working folder, and
// writes the cache, its arena, the tokens of each step, and the logits of each launch: see tests/it/waves.rs. A tail finds the cache and the
// residual of its chunk in files, too.

#include "waves_block.h"
#include "generated.cuh"
#include <string>

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

// What one of several devices has of its own. That of the device whose blocks run is in the variables of waves_block.h.
struct OnDevice {
  std::vector<Wave> waves;
  std::vector<Share> shares;
  std::vector<ShareRecord> records;
  std::vector<WeightBox> boxes;
  std::vector<CacheBox> caches;
  std::vector<u8> pack, work, cache;
  // Files of other devices than the first one have its number in their names.
  OnDevice(int device, size_t work_bytes, size_t cache_bytes) : work(work_bytes, 0), cache(cache_bytes, 0xff) {
    const auto name = [&](const char* of) { return of + (device ? std::to_string(device) : std::string()); };
    waves = contents<Wave>(name("waves").c_str()), shares = contents<Share>(name("shares").c_str());
    records = contents<ShareRecord>(name("records").c_str()), boxes = contents<WeightBox>(name("boxes").c_str());
    caches = contents<CacheBox>(name("caches").c_str());
    pack = contents<u8>(name("pack").c_str());
  }
};
constexpr int DEVICES = 1 + peers<Machine>();
static std::vector<OnDevice> devices;
static void swap_in(int device) {
  OnDevice& of = devices[device];
  std::swap(weight_boxes, of.boxes), std::swap(cache_boxes, of.caches), std::swap(constants, of.pack), std::swap(work, of.work), std::swap(cache, of.cache);
}
// Calls `run` with the memory and the parameters of a device.
template <class F>
static void on_device(int device, u64 (&places)[DEVICES], i32* mailbox, F run) {
  swap_in(device);
  const OnDevice& of = devices[device];
  params.pack = constants.data(), params.work = work.data(), params.cache = cache.data();
  params.shares = of.shares.data(), params.records = of.records.data();
  params.mailbox = device == 0 ? mailbox : nullptr;
  devices_of_launch.first_block = device * Machine::SMS;
  for (int other = 0, i = 0; other < DEVICES; other++)
    if (other != device) devices_of_launch.peers[i++] = places[other] - places[device];
  run(of);
  swap_in(device);
}

// Bytes of the work arena and of the cache, then rows and steps of each launch.
int main(int count, char** arguments) {
  for (int device = 0; device < DEVICES; device++) devices.emplace_back(device, std::atoll(arguments[1]), std::atoll(arguments[2]));
  const std::vector<u32> pages = contents<u32>("pages");
  const std::vector<Row> rows = contents<Row>("rows");
  const std::vector<u8> before = contents<u8>("before", false);
  const std::vector<float> taken = contents<float>("taken", false);
  u64 places[DEVICES];
  for (int device = 0; device < DEVICES; device++) {
    OnDevice& of = devices[device];
    require(before.empty() || before.size() == of.cache.size(), "the cache of a chunk");
    if (!before.empty()) of.cache = before;
    places[device] = u64(of.work.data());
  }
  params.taken = taken.data(), params.pages = pages.data(), params.rows = rows.data();
  params.tag = 1;
  std::vector<i32> all_tokens;
  std::vector<float> all_logits;
  const u32 wave_count = u32(devices[0].waves.size());
  for (int launch = 3; launch + 1 < count; launch += 2) {
    params.row_count = u32(std::atoi(arguments[launch])), params.steps = u32(std::atoi(arguments[launch + 1]));
    params.position = params.rows->position;
    params.wave_count = wave_count;
    std::vector<i32> mailbox(1 + (params.steps + 1) * Machine::BLOCK_ROWS, -1);
    std::vector<float> logits(Machine::STEPS ? size_t(params.row_count) * Machine::VOCAB : 0);
    if (Machine::STEPS) params.logits = logits.data();
    for (step_at_hand = 0; step_at_hand < params.steps; step_at_hand++)
      for (wave_at_hand = 0; wave_at_hand < wave_count; wave_at_hand++)
        // What one device does before another one, the other way round in the next wave.
        for (int turn = 0; turn < DEVICES; turn++)
          on_device(wave_at_hand % 2 ? turn : DEVICES - 1 - turn, places, Machine::STEPS ? mailbox.data() : nullptr, [&](const OnDevice& of) {
            const auto all = [&] {
              for (u32 sm = Machine::SMS; sm-- > 0;) {
                blockIdx.x = sm;
                wave = of.waves[wave_at_hand];
                run_wave<Machine, Any>();
              }
            };
            if (Machine::PAIRS)
              run_in_pairs(all);
            else
              all();
          });
    if (Machine::STEPS) on_device(0, places, mailbox.data(), [](const OnDevice&) { run_block(tell_last, 32); });
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
  for (int device = 0; device < DEVICES; device++) {
    const auto name = [&](const char* of) { return of + (device ? std::to_string(device) : std::string()); };
    put(name("cache").c_str(), devices[device].cache.data(), devices[device].cache.size());
  }
  put("work", devices[0].work.data(), devices[0].work.size());
  put("tokens", all_tokens.data(), all_tokens.size() * sizeof(i32));
  put("logits", all_logits.data(), all_logits.size() * sizeof(float));
}
