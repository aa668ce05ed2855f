//! Owns the cost model: what a step of a candidate should take, from the calibrated figures of its target.
//!
//! ```text
//! step = launch / steps + sum over tasks of an SM's stream + sum over hops of what the ring does not cover
//! stream = bytes of the SM with the most / min(bandwidth of an SM, bytes in flight / latency of memory)
//! hop    = idle + (loaded - idle) (bytes in flight / 32 KiB)^1.4 + the serial work around it
//! ```
//!
//! The exponent is that of three measurements of a hop on an H200: 0.98 us idle, 2.0 us behind 32 KiB and 14 us behind
//! 192 KiB. It ranks candidates before anything runs; a prediction never stands in a column of measurements.

use crate::candidate::Candidate;
use crate::dtype::Precision;
use crate::ir::op::UNIT_ROWS;
use crate::model::graph::{Linear, ModelGraph};
use crate::target::{Target, TargetKind};

/// A single SM takes this much more than its share when others leave bandwidth over.
const SM_BANDWIDTH_MOST: f64 = 1.35;
/// Unloaded latency of device memory, µs: bytes in flight by it bound what one SM can take.
const MEMORY_LATENCY_US: f64 = 0.8;
/// Instructions between two hops that nothing hides: staging, barriers, reduction, epilogue (docs/perf-log.md, 0.65 us and less).
const SERIAL_US: f64 = 0.5;
/// Bytes in flight at which `hop_loaded_us` was measured.
const LOADED_BYTES: f64 = 32_768.0;
const LOADED_EXPONENT: f64 = 1.4;
/// Bytes that one SM's ring, its barriers aside, needs for each chunk: the cost of a barrier in bytes of stream.
const CHUNK_OVERHEAD_BYTES: f64 = 1024.0;

/// Where a predicted step goes, µs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Predicted {
    /// Weights and cache rows, at the bandwidth that the SM with the most of them gets.
    pub stream_us: f64,
    /// Exchanges, as far as the ring does not cover them.
    pub hop_us: f64,
    /// Attention over the cache, serial work included.
    pub attention_us: f64,
}

impl Predicted {
    pub fn total_us(&self) -> f64 {
        self.parts().iter().map(|(_, us)| us).sum()
    }

    /// The parts with their names.
    pub fn parts(&self) -> [(&'static str, f64); 3] {
        let Predicted { stream_us, hop_us, attention_us } = *self;
        [("streaming weights", stream_us), ("exchanges between SMs", hop_us), ("attention", attention_us)]
    }
}

/// Predicts a step at `position`; `None` where the target is no device, or was never calibrated.
pub fn predict(
    graph: &ModelGraph,
    target: &Target,
    precision: Precision,
    candidate: &Candidate,
    position: u32,
) -> Option<Predicted> {
    if target.kind == TargetKind::Cpu {
        return None;
    }
    let measured = &target.measured;
    let bandwidth = measured.read_bytes_per_s? / 1e6;
    let (idle, loaded) = (measured.hop_idle_us?, measured.hop_loaded_us?);
    let c = candidate;
    let (sms, slot) = (f64::from(c.sms.max(1)), f64::from(c.slot_bytes.max(1)));
    let mean = bandwidth / f64::from(target.spec.sm_count.max(1));
    let latency_bound = |copies: u32| f64::from(copies) * slot / MEMORY_LATENCY_US;
    let efficiency = slot / (slot + CHUNK_OVERHEAD_BYTES);
    // Between two hops the loader alternates between its two policies; the higher one is what a long stream sees.
    let fair = (bandwidth / sms).min(mean * SM_BANDWIDTH_MOST) * measured.sm_bandwidth_min_ratio.unwrap_or(1.0);
    let per_sm = fair.min(latency_bound(c.flight_high)) * efficiency;
    let near_hop = fair.min(latency_bound(c.flight_low)) * efficiency;

    let weight = precision.weights.bytes() as f64;
    let most = |linear: &Linear, rows_together: u32| -> f64 {
        let units = (linear.rows * rows_together).div_ceil(UNIT_ROWS);
        f64::from(units.div_ceil(c.sms.max(1)) * UNIT_ROWS) * f64::from(linear.cols) * weight
    };
    let flight = f64::from(c.flight_low) * slot;
    let hop = idle + (loaded - idle).max(0.0) * (flight / LOADED_BYTES).powf(LOADED_EXPONENT);
    // While an SM waits, its loader fills what is free of the ring.
    let cover = f64::from(c.ring_slots) * slot / near_hop;
    let exposed =
        |hop: f64| (hop + SERIAL_US - cover).max(0.0) + (hop + SERIAL_US).min(cover) * (1.0 - near_hop / fair).max(0.0);

    let split = c.splits > 1 && position >= c.split_from;
    let mut predicted = Predicted::default();
    for layer in &graph.layers {
        let attn = &layer.attn;
        let qkv =
            f64::from((attn.q.rows + attn.k.rows + attn.v.rows).div_ceil(UNIT_ROWS).div_ceil(c.sms.max(1)) * UNIT_ROWS)
                * f64::from(attn.q.cols)
                * weight;
        let gates = if layer.mlp.gate.is_some() { 2 } else { 1 };
        let bytes = qkv + most(&attn.o, 1) + most(&layer.mlp.up, gates) + most(&layer.mlp.down, 1);
        predicted.stream_us += bytes / per_sm;
        // qkv, attention, o, gate and up, down.
        predicted.hop_us += 5.0 * exposed(hop) + if split { exposed(hop) } else { 0.0 };

        let seen = f64::from(attn.window.map_or(position, |window| position.min(window)));
        let tasks = attn.heads.div_ceil(c.heads_per_task.max(1)) * if split { c.splits } else { 1 };
        let rows = 2.0 * seen * f64::from(attn.head_dim) * precision.cache.bytes() as f64;
        let task_bytes = rows / if split { f64::from(c.splits) } else { 1.0 };
        let turns = f64::from(tasks.div_ceil(c.sms.max(1)));
        // A task's dot products for several heads cost instructions, not bytes.
        let heads = 1.0 + 0.15 * f64::from(c.heads_per_task.saturating_sub(1));
        let merge = if split { 0.02 * f64::from(c.splits) } else { 0.0 };
        predicted.attention_us += turns * (task_bytes / per_sm * heads + SERIAL_US) + merge;
    }
    predicted.stream_us += most(&graph.head, 1) / per_sm;
    predicted.hop_us += exposed(hop);
    Some(predicted)
}
