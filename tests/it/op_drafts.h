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

// Whole units, and a part of them that begins and ends elsewhere; in the third step of a launch.
template <class M>
static void join(const char* name) {
  typedef typename ElemOf<M::WEIGHT>::type W;
  constexpr int HIDDEN = JoinOf::HIDDEN, VOCAB = 5, STEP = 2, RESIDUAL = 4;
  for (u64 seed = 1; seed <= 2; seed++) {
    u64 state = seed * 91;
    start();
    params.tag = TAG - STEP;
    const std::vector<float> table = numbers(state, VOCAB * HIDDEN), given = numbers(state, (STEP + 1) * HIDDEN);
    std::vector<float> stored(VOCAB * HIDDEN);
    for (size_t i = 0; i < table.size(); i++) {
      W value;
      narrow(table[i], &value);
      std::memcpy(reinterpret_cast<u8*>(stored.data()) + i * sizeof(W), &value, sizeof(W));
    }
    entry.table = constant(stored);
    entry.lo = seed == 1 ? 0 : 2, entry.hi = seed == 1 ? 5 : 4, entry.residual = RESIDUAL;
    entry.out = room(HIDDEN + 1), entry.aux = room(HIDDEN + 1);
    given_params.given = given.data();
    const int token = int(seed) + 1;
    block_state<M>().token = token;
    run_draft<M, Join<M, JoinOf>>();

    std::vector<double> expected, found;
    const int first = int(entry.lo) * 8, last = min(int(entry.hi) * 8, HIDDEN);
    for (int i = first; i < last; i++) {
      expected.push_back(JoinOf::SCALE * table[token * HIDDEN + i]), found.push_back(published<M>(entry.out, i));
      expected.push_back(given[STEP * HIDDEN + i]), found.push_back(published<M>(entry.aux, i));
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
  report(name, of[0], of[1]);
}
