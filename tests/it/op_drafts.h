// Cases of how a draft begins (join.cuh), and of its head. Included by ops.cc.
#pragma once
#include "ops/table.cuh"
#include "ops/join.cuh"

static GivenParams given_params;
template <class M, class Op>
static void task_of_draft(int thread) {
  Context<M> c{given_params};
  c.tag = TAG;
  c.position = given_params.position;
  c.thread = thread;
  c.warp_index = thread / 32;
  c.patience = 2;
  Op::run(c, entry);
}
template <class M, class Op>
static void run_draft() {
  params.exchange = exchange.data();
  params.pack = constants.data();
  static_cast<Params&>(given_params) = params;
  run_block(task_of_draft<M, Op>);
}

struct JoinOf {
  static constexpr int HIDDEN = 37;
  static constexpr float SCALE = 0.5f;
};

// The bytes of word `col` of row `row` in a group of eight rows: 64 bytes of each row, row by row.
template <class M>
static size_t word_of(int row, int col) {
  constexpr int ELEM = sizeof(typename ElemOf<M::WIRE>::type), SPANS = ceil_div(JoinOf::HIDDEN * ELEM, 64);
  const int byte = col * ELEM;
  return size_t(row / 8 * SPANS + byte / 64) * 512 + row % 8 * 64 + byte % 64;
}
template <class M>
static float rounded(float value) {
  typename ElemOf<M::WIRE>::type stored;
  narrow(value, &stored);
  return widen(stored);
}

// Whole units, and a part of them that begins and ends elsewhere; in the third step of a launch. It reads what the host gives, what a batch kernel left
// of a row beyond the first eight, or what the step before left.
template <class M>
static void join(const char* name) {
  typedef typename ElemOf<M::WEIGHT>::type W;
  enum { HOST, WORDS, STEP_BEFORE };
  constexpr int HIDDEN = JoinOf::HIDDEN, VOCAB = 5, STEP = 2, RESIDUAL = 4, LEFT_ROW = 7, ROWS = 16;
  for (u64 seed = 1; seed <= 2; seed++)
    for (int from : {HOST, WORDS, STEP_BEFORE}) {
      u64 state = seed * 91;
      start();
      params.tag = TAG - STEP;
      const std::vector<float> table = numbers(state, VOCAB * HIDDEN), given = numbers(state, (STEP + 1) * HIDDEN), before = numbers(state, HIDDEN);
      const std::vector<float> rows = numbers(state, ROWS * HIDDEN), weights[2] = {numbers(state, HIDDEN), numbers(state, HIDDEN)};
      std::vector<float> stored(VOCAB * HIDDEN);
      for (size_t i = 0; i < table.size(); i++) {
        W value;
        narrow(table[i], &value);
        std::memcpy(reinterpret_cast<u8*>(stored.data()) + i * sizeof(W), &value, sizeof(W));
      }
      entry.table = constant(stored);
      entry.lo = seed == 1 ? 0 : 2, entry.hi = seed == 1 ? 5 : 4, entry.residual = RESIDUAL;
      entry.x = packets<M>(before);
      for (u64& packet : exchange) packet -= u64(1) << 32;
      entry.out = room(HIDDEN + 1), entry.aux = room(HIDDEN + 1);
      std::vector<u8> left(word_of<M>(ROWS - 8, HIDDEN - 1) + 512, 0xff);
      for (int i = 0; i < ROWS * HIDDEN; i++) {
        typename ElemOf<M::WIRE>::type value;
        narrow(rows[i], &value);
        std::memcpy(&left.at(word_of<M>(i / HIDDEN, i % HIDDEN)), &value, sizeof value);
      }
      given_params.given = from == WORDS ? nullptr : given.data();
      given_params.left = left.data(), given_params.left_row = LEFT_ROW;
      given_params.given_steps = from == STEP_BEFORE ? STEP : STEP + 1;
      given_params.norm_of_model = weights[0].data(), given_params.norm = weights[1].data();
      given_params.eps_of_model = 0.5f, given_params.eps = 0.25f;
      const int token = int(seed) + 1;
      block_state<M>().token = token;
      run_draft<M, Join<M, JoinOf>>();

      const float* source = from == WORDS ? &rows[(LEFT_ROW + STEP) * HIDDEN] : before.data();
      double squares = 0;
      for (int i = 0; i < HIDDEN; i++) squares += double(rounded<M>(source[i])) * rounded<M>(source[i]);
      const double factor = 1 / std::sqrt(squares / HIDDEN + (from == WORDS ? 0.5 : 0.25));
      const std::vector<float>& weight = weights[from == WORDS ? 0 : 1];
      std::vector<double> expected, found;
      const int first = int(entry.lo) * 8, last = min(int(entry.hi) * 8, HIDDEN);
      for (int i = first; i < last; i++) {
        expected.push_back(JoinOf::SCALE * table[token * HIDDEN + i]), found.push_back(published<M>(entry.out, i));
        expected.push_back(from == HOST ? given[STEP * HIDDEN + i] : rounded<M>(source[i]) * factor * weight[i]);
        found.push_back(published<M>(entry.aux, i));
        expected.push_back(0), found.push_back(residual<M>()[RESIDUAL + i - first]);
      }
      // Columns of other blocks stay as they were.
      for (int i = 0; i < first; i++) expected.push_back(0), found.push_back(exchange[entry.out + i / Wire<M>::PER_PACKET] >> 32);
      // Readers take pairs.
      if (last == HIDDEN) expected.push_back(0), found.push_back(published<M>(entry.aux, HIDDEN));
      report(name, expected, found);
    }
}

// A head chooses with the noise of a position of the text, and hands out the same logits.
template <class M, class P>
static void head_in_text(const char* name) {
  typedef Chunked<M, P> G;
  constexpr u32 POSITION = 3, AHEAD = 11;
  std::vector<double> of[2];
  for (int drafts = 0; drafts < 2; drafts++) {
    u64 state = 5;
    start();
    stream<M, G>(numbers(state, size_t(G::ROWS) * G::K));
    entry.lo = 0, entry.hi = G::UNITS;
    entry.x = packets<M>(numbers(state, G::K));
    entry.norm_weight = constant(numbers(state, G::K));
    entry.aux = room(8);
    std::vector<float> logits(G::ROWS);
    params.logits = logits.data();
    params.inverse_temperature = 0.25f, params.seed = 12345;
    params.position = drafts ? POSITION : POSITION + AHEAD;
    given_params.ahead = AHEAD;
    if (drafts)
      run_draft<M, InText<MatVec<M, G>>>();
    else
      run<M, MatVec<M, G>>();
    const u64* pair = exchange.data() + entry.aux + (TAG & 1) * 2;
    of[drafts].assign(logits.begin(), logits.end());
    of[drafts].push_back(__uint_as_float(u32(pair[0]))), of[drafts].push_back(u32(pair[1]));
  }
  // Where all tokens are known it waits for its input, has no weights, and leaves no choice.
  start();
  chunks.clear();
  u64 state = 5;
  entry.lo = 0, entry.hi = G::UNITS;
  entry.x = packets<M>(numbers(state, G::K));
  entry.aux = room(8);
  given_params.only_reads = 1;
  run_draft<M, InText<MatVec<M, G>>>();
  given_params.only_reads = 0;
  const u64* pair = exchange.data() + entry.aux + (TAG & 1) * 2;
  const bool found[3] = {pair[0] >> 32 == TAG, __uint_as_float(u32(pair[0])) == NEGATIVE_INFINITY, pair[1] == (u64(TAG) << 32 | 0x7fffffff)};
  for (bool is_so : found) of[0].push_back(1), of[1].push_back(is_so);
  report(name, of[0], of[1]);
}
