// Owns what a launch of the sampler gets and what it answers. `codegen/sampler.rs` declares it, and the test there writes the text of it here.
#pragma once

// What a row of the table asks for.
enum SampleFlag : u32 {
  SAMPLE_GREEDY = 1, // the arg-max: no noise, no filter
  SAMPLE_TOP_K = 2, // the first `top_k` ids
  SAMPLE_TOP_P = 4, // the fewest ids whose probabilities reach `top_p_q32`
  SAMPLE_MIN_P = 8, // ids with `min_p` times the best probability
  SAMPLE_PENALTIES = 16, // repetition, presence, frequency
  SAMPLE_LOGPROBS = 32, // the answer has logits
  SAMPLE_MASK = 64, // only ids of the mask may be chosen
};

// Most probable ids that are reported with their logits.
constexpr u32 SAMPLE_TOP_MAX = 20;

// Most rows of a table.
constexpr u32 SAMPLE_ROWS_MAX = 128, SAMPLE_BEGINS = SAMPLE_ROWS_MAX + 1;

// Words that a part of a row tells the others: what `rivals` needs.
constexpr u32 TOLD_WORDS = 8;

// A row of the table: how the next token of one row of a launch is chosen. Its entries are ids that are banned, then ids with a bias, then
// ids of the sequence with the times that each was generated.
struct alignas(16) SampleRow {
  u32 flags; // SampleFlag
  u32 position; // of the token in its sequence, in the first step
  u32 top_k; // ids that may be chosen
  u32 top_p_q32; // in units of 2^-32
  float min_p; // of the best probability
  float inverse_temperature; // 1: greedy
  float repetition; // 1: none
  float presence; // 0: none
  float frequency; // 0: none
  u32 seed_low; // low word
  u32 seed_high; // high word
  u32 banned; // entries
  u32 biased; // entries
  u32 seen; // entries before the launch; each step has one more
  u32 banned_steps; // steps of the launch in which ids are banned
  u32 top; // most probable ids to report
  u32 reserved[4]; // 0
};
static_assert(sizeof(SampleRow) == 80, "the host fills this struct");

// What a block knows of a row of the table before it has read it.
struct SampleBegin {
  u32 edits; // its first entry
  u32 row; // of the launch
};
static_assert(sizeof(SampleBegin) == 8, "the host fills this struct");

// What all blocks of a row find together. Zero before a launch; the last step leaves it so.
struct SampleTotals {
  u64 raw_total; // sum of the weights of the logits as the model computed them
  u64 chosen; // rank of the best sum of score and noise, if no filter cuts
  u32 done; // blocks that added all they have to the above and to the buckets
  u32 reserved[3]; // 0
};
static_assert(sizeof(SampleTotals) == 32, "the host fills this struct");

// What became of a row.
enum SampleStatus : u32 {
  SAMPLE_CHOSEN = 0, // there is a token
  SAMPLE_NONE_ALLOWED = 1, // no id is allowed
  SAMPLE_NO_CANDIDATE = 2, // no logit is a number above -inf
};

// The answer for a row in a step, in memory of the host.
struct SampleAnswer {
  u32 token; // if there is one
  u32 status; // SampleStatus
  float logit; // of the token, as the model computed it
  float logit_max; // the largest one, as the model computed it
  u32 total_low; // sum of the weights of all logits, in units of 2^-40: low word
  u32 total_high; // high word
  u32 top; // entries of the lists below
  u32 reserved; // 0
  u32 top_ids[SAMPLE_TOP_MAX]; // most probable ids, in order
  float top_logits[SAMPLE_TOP_MAX]; // their logits, as the model computed them
};
static_assert(sizeof(SampleAnswer) == 192, "the host fills this struct");

// The one parameter of both kernels.
struct SamplerParams {
  const float* logits; // (rows of the launch, vocab)
  u64* list; // (rows of the table, vocab)
  u64* weights; // (rows of the table, SAMPLE_BUCKETS); zero before a launch
  u32* counts; // likewise
  u64* bests; // likewise
  u32* present; // (rows of the table, parts, SAMPLE_BUCKETS / 32): a bit for each bucket with ids
  u64* parts_best; // (rows of the table, parts, 2): ranks of the best score and of the best logit of a part; 1: there is none. Zero before a launch
  u64* told; // (rows of the table, parts, TOLD_WORDS): what a part tells the others; zero before a launch
  SampleTotals* totals; // (rows of the table)
  u64* tops; // (rows of the table, parts, SAMPLE_TOP_MAX)
  const SampleRow* rows; // (rows of the table)
  uint2* edits; // (id, value)
  const u32* masks; // (rows of the table, words of vocab bits)
  SampleAnswer* answers; // (rows of the table), of this step
  i32* next; // tokens of the launch that follows, `next_stride` words apart; null: none
  u32 next_stride; // words
  u32 vocab; // ids
  u32 step; // of the launch
  u32 row_count; // of the table
  u32 at_once; // rows that are decided at the same time
  u32 parts; // blocks of a row
  u32 part_ids; // ids of a part, a multiple of 16; the last part may have fewer
  u32 parts_inverse_q31; // 1 / parts in units of 2^-31, rounded up
  SampleBegin begins[SAMPLE_BEGINS]; // of each row of the table; then where the last entry ends
};
static_assert(sizeof(SamplerParams) == 1184, "the host fills this struct");
