// Owns what a launch of the sampler gets and what it answers; laid out by codegen/sampler.rs.
#pragma once

// What a row of the table asks for.
enum SampleFlag : u32 {
  SAMPLE_GREEDY = 1,    // the arg-max: no noise, no filter
  SAMPLE_TOP_K = 2,
  SAMPLE_TOP_P = 4,
  SAMPLE_MIN_P = 8,
  SAMPLE_PENALTIES = 16,
  SAMPLE_LOGPROBS = 32,
  SAMPLE_MASK = 64,     // only ids of the mask may be chosen
};

// Most probable ids that are reported with their logits.
constexpr u32 SAMPLE_TOP_MAX = 20;

// A row of the table: how the next token of one row of a launch is chosen.
struct alignas(16) SampleRow {
  u32 row;         // of the launch
  u32 flags;
  u32 position;    // of the token in its sequence, in the first step
  u32 top_k;
  u32 top_p_q32;   // in units of 2^-32
  float min_p;
  float inverse_temperature; // 1: greedy
  float repetition, presence, frequency;
  u32 seed_low, seed_high;
  // Its entries: ids that are banned, then ids with a bias, then ids of the sequence with the times that each was generated.
  u32 edits;
  u32 banned, biased, seen;
  u32 banned_steps; // steps of the launch in which the ids are banned
  u32 top;          // most probable ids to report
  u32 reserved[2];
};
static_assert(sizeof(SampleRow) == 80, "rows are 80 bytes in codegen/sampler.rs");

// What all blocks of a row find together. Zero before a launch; the last step leaves it so.
struct SampleTotals {
  u64 best;      // rank of the best score
  u64 raw_best;  // rank of the best logit, as the model computed it
  u64 raw_total; // sum of the weights of these logits
  u64 chosen;    // rank of the best sum of score and noise, if no filter cuts
  u32 done;      // blocks that added all they have to the above and to the buckets
  u32 unused[3];
};
static_assert(sizeof(SampleTotals) == 48, "totals are 48 bytes in codegen/sampler.rs");

enum SampleStatus : u32 { SAMPLE_CHOSEN = 0, SAMPLE_NONE_ALLOWED = 1, SAMPLE_NO_CANDIDATE = 2 };

// The answer for a row in a step, in memory of the host.
struct SampleAnswer {
  u32 token;
  u32 status;
  float logit;     // of the token, as the model computed it
  float logit_max;
  u32 total_low, total_high; // sum of the weights of all logits, in units of 2^-40
  u32 top;         // entries of the list below
  u32 unused;
  u32 top_ids[SAMPLE_TOP_MAX];
  float top_logits[SAMPLE_TOP_MAX];
};
static_assert(sizeof(SampleAnswer) == 192, "answers are 192 bytes in codegen/sampler.rs");

struct SamplerParams {
  const float* logits;   // (rows of the launch, vocab)
  u64* list;             // (rows of the table, vocab)
  u64* weights;          // (rows of the table, SAMPLE_BUCKETS); zero before a launch
  u32* counts;           // likewise
  u64* bests;            // likewise
  u32* present;          // (rows of the table, parts, SAMPLE_BUCKETS / 32): a bit for each bucket with ids
  SampleTotals* totals;  // (rows of the table)
  u64* tops;             // (rows of the table, parts, SAMPLE_TOP_MAX)
  SampleRow* rows;
  uint2* edits;          // (id, value)
  const u32* masks;      // (rows of the table, words of vocab bits)
  SampleAnswer* answers; // (rows of the table), of this step
  i32* next;             // tokens of the launch that follows, `next_stride` words apart; null: none
  u32 next_stride;
  u32 vocab;
  u32 parts;             // blocks of a row
  u32 step;
};
