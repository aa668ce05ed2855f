//! Owns the choice of a token from logits, and its specification, by which interpreter and device choose the same token.
//!
//! Every operation below is a plain fp32 or integer operation with one defined result, so a kernel that follows the
//! list gives the same token for the same logits, bit for bit. A kernel writes them as `__fadd_rn`, `__fsub_rn`,
//! `__fmul_rn` and `__fdiv_rn` (never contracted to fma, subnormals kept), and no library function takes part: `logf`
//! and `expf` differ by ulps between libraries, and one ulp is enough to change a token.
//!
//! A [`Request`] does all steps, in this order; a [`Sampler`] does those from `score` on, without `min-p`. A step whose
//! setting is off is left out, so a request that uses none of the others chooses what its sampler chooses.
//!
//! ```text
//! sampler      host, once     inv_t = 1 / temperature; top_p_q32 = round(top_p * 2^32); key = (seed low, seed high)
//! mask         per id         l = -inf if the id is not allowed; or if it is an eos or stop id and fewer than
//!                             min_tokens were generated
//! bias         per id         l = l + bias
//! repetition   per id seen    l = l < 0 ? l * r : l / r              seen: in the prompt, or generated
//! frequency    per id made    l = l - f * float(count)               made: generated, count times; two roundings
//! presence     per id made    l = l - p
//! score        per id         s = l * inv_t                          NaN and -inf are never chosen
//! greedy       temperature 0  argmax of l, ties to the lowest id; no noise, no filter
//! order        ranking        s descending, then id ascending; -0 equals +0 (a packed integer key adds +0 first)
//! top-k        if top_k > 0   the first top_k ids of the order
//! top-p        if < 2^32      w = trunc(exp_f32(s - s_max) * 2^40) as u64, s_max over the vocabulary;
//!                             total = sum of w over the top-k set; need = ceil(total * top_p_q32 / 2^32);
//!                             the shortest prefix of the order whose sum of w reaches need, at least one id
//! min-p        if > 0         those of the ids with s = s_max, or exp_f32(s - s_max) >= min_p
//! noise        per id         x = word (id mod 4) of Philox4x32-10(counter = (position, 0, id / 4, 0), key)
//!                             g = -ln_f32(exponential(x))
//! choice                      argmax of s + g over the admitted ids, ties to the lowest id
//! ```
//!
//! The reason for this form: the Gumbel-max trick turns sampling into an arg-max, a reduction that a greedy kernel already has.
//! The noise of an id depends on (seed, position, id) alone: position is the index of the chosen token in its own
//! sequence, and the second word of the counter is always 0. So neither the number of threads, nor the row of a sequence
//! in a batch, nor the other sequences there, nor a repeated step changes it. Two requests with one seed therefore have the
//! same noise, so a client that wants several continuations of one prompt gives each its own seed.
//! Top-p sums integers, whose order does not matter: a kernel may use
//! atomics, buckets of scores, or a binary search over the score instead of a sort. Equal scores at the edge of top-p add equal w, so
//! one division gives the number of ids to keep there.
//!
//! Sources of the definitions:
//!
//! - Repetition penalty: transformers, `RepetitionPenaltyLogitsProcessor` (prompt and generated tokens, divided where the
//!   logit is not below 0); vLLM has the same (`model_executor/layers/utils.py`, `apply_penalties`).
//! - Presence and frequency penalty: the OpenAI API, and vLLM in that function: generated tokens only.
//! - Order of mask, bias and penalties: vLLM (`v1/sample/sampler.py`): allowed ids, min-tokens, bias, repetition,
//!   frequency, presence, temperature.
//! - Top-k precedes top-p, top-p sees probabilities renormalised over the top-k set, and min-p comes last, as in transformers
//!   (`TemperatureLogitsWarper`, `TopKLogitsWarper`, `TopPLogitsWarper`, `MinPLogitsWarper`). One difference: transformers
//!   keeps every id that ties with the k-th score, here the lowest ids win, so the set never exceeds k. vLLM applies min-p
//!   before top-p, which then sees the probabilities of fewer ids.
//! - Log-probabilities: of the model's own logits, before every step of the list, as vLLM's `raw_logprobs`. They are
//!   computed in f64 with the exponential of the platform and decide nothing. A device sums the integer weights w of all ids instead,
//!   which changes a logarithm by less than 1e-6.

mod counts;
mod error;
mod logprobs;
mod noise;
mod request;
mod sampler;

pub use counts::{TokenCounts, TokenSet};
pub use error::SampleError;
pub use logprobs::{Logprobs, divergence};
pub use noise::{exp_f32, exponential, gumbel, ln_f32, philox4x32_10};
pub use request::{Adjustments, Decided, End, Penalties, Request, RequestSettings};
pub use sampler::{SampleSettings, Sampler, TEMPERATURE_MAX, TEMPERATURE_MIN, argmax};
