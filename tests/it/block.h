// One block of CUDA threads on a CPU: fibers that take turns at synchronisation points, and the parts of CUDA that the kernels' source
// needs. Warps meet at shuffles and at __syncwarp, the block at its barrier; a fiber runs until it has to wait.
#pragma once

// The checked `longjmp` reports a jump to another stack as an error.
#undef _FORTIFY_SOURCE

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

// Which edit is in force, of several that a test has compiled into one program; 0: none.
static const int mutant = std::getenv("MUTANT") ? std::atoi(std::getenv("MUTANT")) : 0;

#define __device__
#define __shared__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

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
// Contraction is disabled, so each of these is one rounded operation.
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __uint2float_rn(unsigned x) { return float(x); }
static float __fdividef(float a, float b) { return a / b; }
static void __threadfence_system() {}
static float rsqrtf(float x) { return 1.f / std::sqrt(x); }
#define __expf std::exp
template <class T>
static T __ldcg(const T* from) { return *from; }
template <class T>
static T __ldg(const T* from) { return *from; }
static int min(int a, int b) { return a < b ? a : b; }
static unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static int max(int a, int b) { return a < b ? b : a; }
static unsigned max(unsigned a, unsigned b) { return a < b ? b : a; }

static int __ffsll(long long bits) { return __builtin_ffsll(bits); }
static int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
static int __popc(unsigned v) { return __builtin_popcount(v); }

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static struct {
  unsigned x = 0;
} blockIdx, threadIdx;

// Programs with many cases are not optimised; this part of them is, because they spend most of their time in it.
#pragma GCC push_options
#pragma GCC optimize("O3")

// ---- threads ------------------------------------------------------------------------------------------------------

// Threads of a block unless a test asks for more, and the most.
constexpr int THREADS = 64, WARPS = THREADS / 32, THREADS_MAX = 256;
constexpr int STACK_BYTES = 1 << 18;
static ucontext_t contexts[THREADS_MAX];
static std::vector<char> stacks(size_t(THREADS_MAX) * STACK_BYTES);
static int threads, current;
static bool finished[THREADS_MAX];
static void (*thread_body)(int);
// Shared memory of the block, more than a device has.
#ifndef SMEM_BYTES
#define SMEM_BYTES (1 << 20)
#endif
alignas(1024) unsigned char smem[SMEM_BYTES];

// A barrier for a number of threads, used again and again.
struct Meeting {
  int expected, arrived;
  unsigned round;
  void meet();
};
// What a thread waits for: the end of a round.
static struct {
  const Meeting* meeting;
  unsigned round;
} awaited_rounds[THREADS_MAX];

// The next thread that can run. Waiting threads are skipped; otherwise a barrier of a warp would cost a turn of every thread.
static int next_of(int from) {
  for (int i = 1; i <= threads; i++) {
    const int thread = (from + i) % threads;
    const auto& waits = awaited_rounds[thread];
    if (!finished[thread] && !(waits.meeting && waits.meeting->round == waits.round)) return thread;
  }
  return -1;
}
// A context begins a thread. Afterwards `_setjmp` saves its state, without the system call of `swapcontext`. Between two blocks a thread waits
// at the end of the first one, because to begin it again takes system calls, too.
static bool begun[THREADS_MAX];
static jmp_buf places[THREADS_MAX], main_place;
static void go_on(int thread) {
  current = thread;
  if (begun[thread]) _longjmp(places[thread], 1);
  begun[thread] = true;
  setcontext(&contexts[thread]);
}
void Meeting::meet() {
  if (++arrived == expected) {
    arrived = 0;
    round++;
    return;
  }
  const int from = current;
  awaited_rounds[from] = {this, round};
  const int next = next_of(from);
  if (next < 0) {
    std::fprintf(stderr, "every thread waits for another one\n");
    std::exit(1);
  }
  if (!_setjmp(places[from])) go_on(next);
  awaited_rounds[from] = {nullptr, 0};
}
static Meeting block_meeting, team_meetings[4], warp_meetings[THREADS_MAX / 32];
static unsigned long long lanes[2][THREADS_MAX];
static int turns[THREADS_MAX];

static void __syncwarp() { warp_meetings[current / 32].meet(); }
template <class T>
static T value_of(int other, T value) {
  static_assert(sizeof(T) <= 8, "a lane holds 8 bytes");
  // Two sets, because a lane may reach the next exchange before all lanes have read this one.
  const int turn = turns[current]++ & 1;
  std::memcpy(&lanes[turn][current], &value, sizeof value);
  __syncwarp();
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
template <class T>
static T __shfl_up_sync(unsigned, T value, int delta) {
  return value_of(current % 32 < delta ? current : current - delta, value);
}

static unsigned __ballot_sync(unsigned, bool value) {
  unsigned bits = unsigned(value) << current % 32;
  for (int o = 16; o; o >>= 1) bits |= __shfl_xor_sync(~0u, bits, o);
  return bits;
}

// The value of fp16 bits by their definition, the same from a table, and the nearest fp16 of a float, ties to even.
static float f16_defined(unsigned bits) {
  const unsigned e = bits >> 10 & 31, m = bits & 1023;
  const float size = e == 0 ? std::ldexp(float(m), -24) : e == 31 ? (m ? NAN : INFINITY) : std::ldexp(float(1024 + m), int(e) - 25);
  return bits & 0x8000 ? -size : size;
}
static float f16_of(unsigned bits) {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 16);
    for (unsigned of = 0; of < all.size(); of++) all[of] = f16_defined(of);
    return all;
  }();
  return values[bits];
}
static unsigned f16_bits(float value) {
  const unsigned sign = std::signbit(value) ? 0x8000 : 0;
  const float size = std::fabs(value);
  if (!(size < 65520.f)) return sign | (size != size ? 0x7e00 : 0x7c00);
  // Codes of one sign are consecutive: steps of the binade, subnormals with the first.
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  return sign | ((exponent + 14) * 1024 + unsigned(std::nearbyint(std::ldexp(size, 10 - exponent))));
}

// Element `i` of the 8 elements of a bf16 or fp16 matrix that a lane holds in four registers.
static inline __attribute__((always_inline)) float element(const unsigned* registers, int i, bool f16) {
  if (f16) return f16_of(registers[i / 2] >> i % 2 * 16 & 0xffff);
  return bits_to_float(i % 2 ? registers[i / 2] & 0xffff0000u : registers[i / 2] << 16);
}
// A product of a warp: both matrices, and the sums. Rows of eight columns are vectors of the compiler, which adds each column separately.
typedef float Columns __attribute__((vector_size(32)));
struct WarpProduct {
  float a[16][16];
  Columns b[16], d[16];
  int stored; // lanes
};
static WarpProduct products[2][THREADS_MAX / 32];
// mma.m16n8k16 of bf16 or fp16, by a whole warp: PTX ISA, "Matrix Fragments for mma.m16n8k16". Sums are added in the order of k. The last
// lane that has stored its part multiplies for all.
static void emulated_product(float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                             unsigned b1, bool f16 = false) {
  WarpProduct& p = products[turns[current]++ & 1][current / 32];
  const int lane = current % 32, group = lane / 4, pair = lane % 4 * 2;
  const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  float* const sums[4] = {&d0, &d1, &d2, &d3};
  for (int i = 0; i < 8; i++) p.a[group + i / 2 % 2 * 8][pair + i / 4 * 8 + i % 2] = element(a, i, f16);
  for (int i = 0; i < 4; i++) p.b[pair + i / 2 * 8 + i % 2][group] = element(b, i, f16);
  for (int i = 0; i < 4; i++) p.d[group + i / 2 * 8][pair + i % 2] = *sums[i];
  if (++p.stored == 32) {
    p.stored = 0;
    for (int row = 0; row < 16; row++) {
      Columns sum = p.d[row];
      for (int k = 0; k < 16; k++) sum += p.a[row][k] * p.b[k];
      p.d[row] = sum;
    }
  }
  __syncwarp();
  for (int i = 0; i < 4; i++) *sums[i] = p.d[group + i / 2 * 8][pair + i % 2];
}
// wgmma with A in registers, by one of its four warps. B says where elements of the right operand lie, from offset `b` of shared memory on.
template <int N, class B>
static void emulated_warpgroup_product(float (&d)[N / 2], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) {
  const int lane = current % 32;
  for (int j = 0; j < N / 8; j++) {
    unsigned words[2]; // column lane / 4, pair lane % 4 of both eights of k
    for (int half = 0; half < 2; half++) {
      unsigned short pair[2];
      for (int i = 0; i < 2; i++) std::memcpy(&pair[i], smem + B::place(b + B::element(half * 8 + lane % 4 * 2 + i, j * 8 + lane / 4)), 2);
      words[half] = pair[0] | unsigned(pair[1]) << 16;
    }
    emulated_product(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3], a0, a1, a2, a3, words[0], words[1]);
  }
}
// The same with both operands in memory, of which A and B say where an element is.
template <int N, class A, class B>
static void emulated_warpgroup_product(float (&d)[N / 2], unsigned long long a, unsigned long long b) {
  const int lane = current % 32, warp = current / 32 % 4;
  // A pair of k of a row or a column: `half` is the eight of k that it belongs to.
  const auto pair = [&](auto of, unsigned long long at, int column, int half) {
    unsigned word;
    std::memcpy(&word, smem + decltype(of)::place(at + decltype(of)::element(half * 8 + lane % 4 * 2, column)), 4);
    return word;
  };
  unsigned words[4]; // rows lane / 4 and 8 further, of both eights of k
  for (int i = 0; i < 4; i++) words[i] = pair(A(), a, warp * 16 + i % 2 * 8 + lane / 4, i / 2);
  for (int j = 0; j < N / 8; j++) {
    const unsigned first = pair(B(), b, j * 8 + lane / 4, 0), second = pair(B(), b, j * 8 + lane / 4, 1);
    emulated_product(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3], words[0], words[1], words[2], words[3], first, second);
  }
}
static float transposed_pairs[2][THREADS_MAX][2];
// Two 8 x 8 matrices of 16 bits, transposed by movmatrix: the halves of fp32 values. A lane has a pair of values of a row.
static float2 emulated_transpose(float a, float b) {
  const int turn = turns[current]++ & 1, first = current / 32 * 32, lane = current % 32;
  transposed_pairs[turn][current][0] = a, transposed_pairs[turn][current][1] = b;
  __syncwarp();
  const auto of_row = [&](int row) { return transposed_pairs[turn][first + row * 4 + lane / 8][lane / 4 % 2]; };
  return {of_row(lane % 4 * 2), of_row(lane % 4 * 2 + 1)};
}
static unsigned addresses[2][THREADS_MAX];
// ldmatrix.x4.trans: lane l names row l % 8 of matrix l / 8, and gets rows l % 4 * 2 and the next of column l / 4 of each.
template <class V>
static void emulated_load_transposed(unsigned address, V& v) {
  const int turn = turns[current]++ & 1, first = current / 32 * 32, lane = current % 32;
  addresses[turn][current] = address;
  __syncwarp();
  unsigned words[4];
  for (int matrix = 0; matrix < 4; matrix++) {
    unsigned short halves[2];
    for (int i = 0; i < 2; i++)
      std::memcpy(&halves[i], smem + addresses[turn][first + matrix * 8 + lane % 4 * 2 + i] + lane / 4 * 2, 2);
    words[matrix] = halves[0] | unsigned(halves[1]) << 16;
  }
  v = V{words[0], words[1], words[2], words[3]};
}

#pragma GCC pop_options

static void thread_main(int thread) {
  for (;;) {
    thread_body(thread);
    finished[thread] = true;
    if (_setjmp(places[thread])) continue;
    const int next = next_of(thread);
    if (next >= 0) go_on(next);
    // The remaining threads wait for one that has ended.
    for (int other = 0; other < threads; other++)
      if (!finished[other]) std::abort();
    _longjmp(main_place, 1);
  }
}
// Runs `body` by all `count` threads of a block, to its end.
static void run_block(void (*body)(int), int count = THREADS) {
  thread_body = body;
  threads = count;
  block_meeting = {threads, 0, 0};
  for (Meeting& team : team_meetings) team = {};
  for (Meeting& warp : warp_meetings) warp = {32, 0, 0};
  for (int thread = 0; thread < threads; thread++) {
    turns[thread] = 0;
    finished[thread] = false;
    awaited_rounds[thread] = {nullptr, 0};
    if (begun[thread]) continue;
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks.data() + size_t(thread) * STACK_BYTES;
    contexts[thread].uc_stack.ss_size = STACK_BYTES;
    makecontext(&contexts[thread], reinterpret_cast<void (*)()>(thread_main), 1, thread);
  }
  if (!_setjmp(main_place)) go_on(0);
}

#include "core/types.cuh"
#include "core/math.cuh"
#include "core/sample.cuh"

template <int>
void consumer_barrier() {
  block_meeting.meet();
}
template <int COUNT>
void team_barrier(int team) {
  team_meetings[team].expected = COUNT;
  team_meetings[team].meet();
}
