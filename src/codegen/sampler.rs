//! Prints the sampler, and owns what it reads and answers, as `kernels/sample/table.cuh` declares it. It is the same for every model.

use super::kernel_struct::{kernel_enum, kernel_struct};
use super::{HEADERS, KernelSource, SAMPLER_HEADERS};
use crate::target::Target;

/// Name of the kernel for any request; `kernels/sample/sampler.cuh`.
pub const ENTRY_POINT: &str = "monobloc_sampler";
/// Name of the faster one for usual requests: temperature, penalties, and a top-p that admits nearly all of the probability;
/// `kernels/sample/rivals.cuh`.
pub const ENTRY_POINT_RIVALS: &str = "monobloc_sampler_rivals";
/// Threads of a block, of which an SM has two.
pub const THREADS: u32 = 512;
/// Shared memory of a block for what its warps share: a row of the table, three words for each bucket and a list of ids.
pub const FIXED_BYTES: u32 = 14848;
/// Shared memory of a block for each id of its part: a logit, and a bound of the noise.
pub const ID_BYTES: u32 = 6;
/// The same for the kernel with rivals: a logit.
pub const ID_BYTES_RIVALS: u32 = 4;
/// Most parts of a row there: their words have a place in the block.
pub const PARTS_MAX_RIVALS: u32 = 307;
/// The least top-p there, in units of 2^-32: 0.85. The four best sums of score and noise are known; where top-p refuses all of them, one block
/// looks for the token alone, which takes about 0.1 ms. With 0.85 that is one token of 2000, if probabilities are small and many.
pub const TOP_P_MIN_RIVALS: u32 = 3_650_722_202;
/// Words that a part of a row tells the others there; `TOLD_WORDS` of table.cuh.
pub const TOLD_WORDS: u32 = 8;
/// The number of ids of a part is a multiple of this one. Then four neighbouring ids lie in one word of a mask, and are loaded at once.
pub const PART_ALIGN: u32 = 16;
/// A row has no more parts than it has this many ids, so that all threads of a block have some.
pub const PART_IDS_MIN: u32 = THREADS * 4;
/// Most parts of a row.
pub const PARTS_MAX: u32 = 64;
/// Buckets of scores; `SAMPLE_BUCKETS` of sampler.cuh.
pub const BUCKETS: u32 = 1024;
/// Most rows of a table.
pub const SAMPLE_ROWS_MAX: usize = 128;
/// A [`SampleBegin`] for each row, and one that says where entries end.
pub const SAMPLE_BEGINS: usize = SAMPLE_ROWS_MAX + 1;
/// Most probable ids that an answer has; table.cuh asserts the size of one.
pub const SAMPLE_TOP_MAX: usize = 20;

kernel_enum! {
    /// What a row of the table asks for.
    flag: "enum SampleFlag : u32", "SAMPLE_" {
        /// the arg-max: no noise, no filter
        GREEDY = 1,
        /// the first `top_k` ids
        TOP_K = 2,
        /// the fewest ids whose probabilities reach `top_p_q32`
        TOP_P = 4,
        /// ids with `min_p` times the best probability
        MIN_P = 8,
        /// repetition, presence, frequency
        PENALTIES = 16,
        /// the answer has logits
        LOGPROBS = 32,
        /// only ids of the mask may be chosen
        MASK = 64,
    }
}

kernel_enum! {
    /// What became of a row.
    status: "enum SampleStatus : u32", "SAMPLE_" {
        /// there is a token
        CHOSEN = 0,
        /// no id is allowed
        NONE_ALLOWED = 1,
        /// no logit is a number above -inf
        NO_CANDIDATE = 2,
    }
}

kernel_struct! {
    /// A row of the table: how the next token of one row of a launch is chosen. Its entries are ids that are banned, then ids with a bias,
    /// then ids of the sequence with the times that each was generated.
    SampleRow = "struct alignas(16) SampleRow" {
        /// SampleFlag
        flags: u32,
        /// of the token in its sequence, in the first step
        position: u32,
        /// ids that may be chosen
        top_k: u32,
        /// in units of 2^-32
        top_p_q32: u32,
        /// of the best probability
        min_p: f32,
        /// 1: greedy
        inverse_temperature: f32,
        /// 1: none
        repetition: f32,
        /// 0: none
        presence: f32,
        /// 0: none
        frequency: f32,
        /// low word
        seed_low: u32,
        /// high word
        seed_high: u32,
        /// entries
        banned: u32,
        /// entries
        biased: u32,
        /// entries before the launch; each step has one more
        seen: u32,
        /// steps of the launch in which ids are banned
        banned_steps: u32,
        /// most probable ids to report
        top: u32,
        /// 0
        reserved: [u32; 4],
    }
}

/// An entry of a row: an id, and its bias as bits of fp32 or its count.
pub type SampleEdit = [u32; 2];

kernel_struct! {
    /// What a block knows of a row of the table before it has read it.
    SampleBegin = "struct SampleBegin" {
        /// its first entry
        edits: u32,
        /// of the launch
        row: u32,
    }
}

kernel_struct! {
    /// What all blocks of a row find together. Zero before a launch; the last step leaves it so.
    SampleTotals = "struct SampleTotals" {
        /// sum of the weights of the logits as the model computed them
        raw_total: u64,
        /// rank of the best sum of score and noise, if no filter cuts
        chosen: u64,
        /// blocks that added all they have to the above and to the buckets
        done: u32,
        /// 0
        reserved: [u32; 3],
    }
}

kernel_struct! {
    /// What was chosen for a row in a step, in memory of the host.
    SampleAnswer = "struct SampleAnswer" {
        /// if there is one
        token: u32,
        /// SampleStatus
        status: u32,
        /// of the token, as the model computed it
        logit: f32,
        /// the largest one, as the model computed it
        logit_max: f32,
        /// sum of the weights of all logits, in units of 2^-40: low word
        total_low: u32,
        /// high word
        total_high: u32,
        /// entries of the lists below
        top: u32,
        /// 0
        reserved: u32,
        /// most probable ids, in order
        top_ids: [u32; SAMPLE_TOP_MAX],
        /// their logits, as the model computed them
        top_logits: [f32; SAMPLE_TOP_MAX],
    }
}

kernel_struct! {
    /// The one parameter of both kernels. Pointers are device addresses; tables have a row for each row that is sampled.
    SamplerParams = "struct SamplerParams" {
        /// (rows of the launch, vocab)
        logits: u64 = "const float*",
        /// (rows of the table, vocab)
        list: u64 = "u64*",
        /// (rows of the table, SAMPLE_BUCKETS); zero before a launch
        weights: u64 = "u64*",
        /// likewise
        counts: u64 = "u32*",
        /// likewise
        bests: u64 = "u64*",
        /// (rows of the table, parts, SAMPLE_BUCKETS / 32): a bit for each bucket with ids
        present: u64 = "u32*",
        /// (rows of the table, parts, 2): ranks of the best score and of the best logit of a part; 1: there is none. Zero before a launch
        parts_best: u64 = "u64*",
        /// (rows of the table, parts, TOLD_WORDS): what a part tells the others; zero before a launch
        told: u64 = "u64*",
        /// (rows of the table)
        totals: u64 = "SampleTotals*",
        /// (rows of the table, parts, SAMPLE_TOP_MAX)
        tops: u64 = "u64*",
        /// (rows of the table)
        rows: u64 = "const SampleRow*",
        /// (id, value)
        edits: u64 = "uint2*",
        /// (rows of the table, words of vocab bits)
        masks: u64 = "const u32*",
        /// (rows of the table), of this step
        answers: u64 = "SampleAnswer*",
        /// tokens of the launch that follows, `next_stride` words apart; null: none
        next: u64 = "i32*",
        /// words
        next_stride: u32,
        /// ids
        vocab: u32,
        /// of the launch
        step: u32,
        /// of the table
        row_count: u32,
        /// rows that are decided at the same time
        at_once: u32,
        /// blocks of a row
        parts: u32,
        /// ids of a part, a multiple of 16; the last part may have fewer
        part_ids: u32,
        /// 1 / parts in units of 2^-31, rounded up
        parts_inverse_q31: u32,
        /// of each row of the table; then where the last entry ends
        begins: [SampleBegin; SAMPLE_BEGINS],
    }
}

/// Prints the kernel of a sampler with this name.
fn kernel(entry_point: &str, sampler: &str) -> String {
    format!(
        "extern \"C\" __global__ void __launch_bounds__({THREADS}, 2) {entry_point}(const __grid_constant__ SamplerParams p) {{\n  \
         {sampler}<Sizes>::sample(p, blockIdx.x, threadIdx.x);\n}}\n"
    )
}

/// Prints both kernels of the sampler for a target.
pub fn emit(target: &Target) -> KernelSource {
    let text = format!(
        "// The sampler for `{}`.\n#include \"monobloc_sampler.cuh\"\n\nstruct Sizes {{\n  \
         static constexpr int THREADS = {THREADS}, FIXED_BYTES = {FIXED_BYTES};\n}};\n\n\
         {}\n{}",
        target.name,
        kernel(ENTRY_POINT, "Sampler"),
        kernel(ENTRY_POINT_RIVALS, "RivalSampler"),
    );
    KernelSource {
        name: "monobloc_sampler.cu".to_string(),
        text,
        headers: HEADERS.iter().chain(&SAMPLER_HEADERS).map(|(n, t)| (n.to_string(), t.to_string())).collect(),
        arch: target.spec.arch.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codegen::kernel_struct::assert_declared;

    #[test]
    fn kernels_declare_what_the_host_fills() {
        const TABLE: &str = "sample/table.cuh";
        assert_declared([
            (TABLE, flag::declaration()),
            (TABLE, SampleRow::declaration()),
            (TABLE, SampleBegin::declaration()),
            (TABLE, SampleTotals::declaration()),
            (TABLE, status::declaration()),
            (TABLE, SampleAnswer::declaration()),
            (TABLE, SamplerParams::declaration()),
        ]);
    }
}
