//! Prints the sampler, and owns what it reads and answers, as `kernels/sample/table.cuh` declares it. It is the same for every model.

use super::{HEADERS, KernelSource, SAMPLER_HEADERS};
use crate::target::Target;
use bytemuck::{Pod, Zeroable};
use std::fmt::Write;

/// Names of the entry points, in the order of their launches.
pub const ENTRY_POINTS: [&str; 2] = ["sampler_adjust", "sampler_choose"];
/// Threads of a block.
pub const THREADS: u32 = 256;
/// Ids of a block: four times four for nearly every thread. A vocabulary of 128256 has 33 parts, so the parts of 4 rows are one block for
/// each of 132 SMs.
pub const PART: u32 = 3888;
/// Shared memory of a block: the logits of a part, three words for each bucket, and what the warps share.
pub const SHARED_BYTES: u32 = 28672;
/// Buckets of scores; `SAMPLE_BUCKETS` of sampler.cuh.
pub const BUCKETS: u32 = 1024;
/// Most probable ids that an answer has; `SAMPLE_TOP_MAX` of table.cuh.
pub const TOP_MAX: u32 = 20;
/// Bytes of the totals of a row; `SampleTotals` of table.cuh.
pub const TOTALS_BYTES: u64 = 48;

/// What a row asks for; `SampleFlag` of table.cuh.
pub mod flag {
    pub const GREEDY: u32 = 1;
    pub const TOP_K: u32 = 2;
    pub const TOP_P: u32 = 4;
    pub const MIN_P: u32 = 8;
    pub const PENALTIES: u32 = 16;
    pub const LOGPROBS: u32 = 32;
    pub const MASK: u32 = 64;
}

/// `SampleRow` of table.cuh: how the next token of one row of a launch is chosen.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct SampleRow {
    /// Of the launch.
    pub row: u32,
    pub flags: u32,
    /// Of the token in its sequence, in the first step.
    pub position: u32,
    pub top_k: u32,
    /// In units of 2^-32.
    pub top_p_q32: u32,
    pub min_p: f32,
    /// 1: greedy.
    pub inverse_temperature: f32,
    pub repetition: f32,
    pub presence: f32,
    pub frequency: f32,
    pub seed_low: u32,
    pub seed_high: u32,
    /// Its first entry.
    pub edits: u32,
    pub banned: u32,
    pub biased: u32,
    pub seen: u32,
    /// Steps of the launch in which ids are banned.
    pub banned_steps: u32,
    /// Most probable ids to report.
    pub top: u32,
    pub reserved: [u32; 2],
}

/// An entry of a row: an id, and its bias as bits of fp32 or its count.
pub type SampleEdit = [u32; 2];

/// `SampleAnswer` of table.cuh: what was chosen for a row in a step.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct SampleAnswer {
    pub token: u32,
    /// 0: there is a token; 1: no id is allowed; 2: no logit is a number above -inf.
    pub status: u32,
    /// Of the token, as the model computed it.
    pub logit: f32,
    pub logit_max: f32,
    /// The sum of the weights of all logits, in units of 2^-40: low word, then high word.
    pub total: [u32; 2],
    /// Entries of the lists below.
    pub top: u32,
    pub reserved: u32,
    pub top_ids: [u32; TOP_MAX as usize],
    pub top_logits: [f32; TOP_MAX as usize],
}

/// `SamplerParams` of table.cuh: the one parameter of each entry point. Pointers are device addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct SamplerParams {
    pub logits: u64,
    pub list: u64,
    pub weights: u64,
    pub counts: u64,
    pub bests: u64,
    pub present: u64,
    pub totals: u64,
    pub tops: u64,
    pub rows: u64,
    pub edits: u64,
    pub masks: u64,
    pub answers: u64,
    /// The tokens of the launch that follows, `next_stride` words apart; 0: none follows.
    pub next: u64,
    pub next_stride: u32,
    pub vocab: u32,
    /// Blocks of a row: parts of [`PART`] ids.
    pub parts: u32,
    pub step: u32,
}

/// Prints the sampler for a target.
pub fn emit(target: &Target) -> KernelSource {
    let mut text = format!(
        "// The sampler for `{}`.\n#include \"monobloc_sampler.cuh\"\n\nstruct Sizes {{\n  \
         static constexpr int THREADS = {THREADS}, PART = {PART}, SHARED_BYTES = {SHARED_BYTES};\n}};\n",
        target.name
    );
    for (entry, step) in ENTRY_POINTS.iter().zip(["adjust", "choose"]) {
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\nextern \"C\" __global__ void __launch_bounds__({THREADS}, 4) {entry}(const __grid_constant__ SamplerParams p) {{\n  \
             Sampler<Sizes>::{step}(p, blockIdx.x, threadIdx.x);\n}}\n"
        );
    }
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

    /// The sizes that table.cuh asserts.
    #[test]
    fn tables_have_the_bytes_that_the_kernel_declares() {
        assert_eq!((size_of::<SampleRow>(), size_of::<SampleAnswer>(), size_of::<SamplerParams>()), (80, 192, 120));
    }
}
