// A generated kernel of waves, run block by block on a CPU (waves_block.h): what a device does between two meetings of all blocks, each
// block does here alone, the last one first. Reads its tables, its pack and a text from files of the working folder, and writes the
// cache: see tests/it/waves.rs.

#include "waves_block.h"
#include "generated.cuh"

template <class T>
static std::vector<T> contents(const char* name) {
  std::FILE* file = std::fopen(name, "rb");
  require(file, name);
  std::fseek(file, 0, SEEK_END);
  std::vector<T> all(std::ftell(file) / sizeof(T));
  std::rewind(file);
  require(std::fread(all.data(), sizeof(T), all.size(), file) == all.size(), name);
  std::fclose(file);
  return all;
}

// One of the generated cases.
struct Any {
  static void load(WaveLoader<Machine>& l, const Wave& e) { Dispatch::load(l, e.op, e); }
  static void run(WaveContext<Machine>& c, const Wave& e) { Dispatch::run(c, e.op, e); }
};

// Bytes of the work arena and of the cache, then rows of each chunk.
int main(int count, char** arguments) {
  const std::vector<Wave> waves = contents<Wave>("waves");
  const std::vector<Share> shares = contents<Share>("shares");
  const std::vector<u32> share_index = contents<u32>("share_index"), pages = contents<u32>("pages");
  const std::vector<i32> tokens = contents<i32>("tokens");
  constants = contents<u8>("pack");
  work.assign(std::atoll(arguments[1]), 0);
  cache.assign(std::atoll(arguments[2]), 0xff);
  params.pack = constants.data(), params.work = work.data(), params.cache = cache.data();
  params.shares = shares.data(), params.share_index = share_index.data(), params.pages = pages.data();
  for (int chunk = 3; chunk < count; chunk++) {
    params.tokens = tokens.data() + params.position;
    params.row_count = u32(std::atoi(arguments[chunk]));
    for (const Wave& now : waves)
      for (u32 sm = Machine::SMS; sm-- > 0;) {
        blockIdx.x = sm;
        wave = now;
        run_wave<Machine, Any>();
      }
    params.position += params.row_count;
  }
  std::FILE* file = std::fopen("cache", "wb");
  require(file && std::fwrite(cache.data(), 1, cache.size(), file) == cache.size() && std::fclose(file) == 0, "the cache");
}
