//! Owns the cost model: the predicted time of a candidate's step, from the calibrated figures of its target.
//!
//! ```text
//! layer  = few + max(many, stream - ahead) + a share of min(stream, few + many) that does not overlap
//! few    = exchanges around attention (qkv, attention, o), `wire` each, and the serial work between them
//! many   = the same for the MLP, where most bytes are streamed
//! ahead  = min(few, (bytes around attention + ring) / bandwidth): then the ring is full
//! stream = bytes of the SM with the most / min(its bandwidth, bytes in flight / latency of memory)
//! wire   = idle + (loaded - idle) (bytes in flight / 32 KiB) u^1.8, u = stream / layer: a poll waits for those bytes
//! ```
//!
//! The figures of the target are measured. The constants below describe the kernels' work between two exchanges. They were fitted to the
//! first 281 trials of `flywheel/corpus/h200.csv.zst`: shapes of SmolLM2-135M, Llama-3.2-1B, Qwen3-0.6B and Gemma-3-1B on H200s. `monobloc
//! flywheel rank` says how well predictions rank trials. Predictions rank candidates before anything runs, and never stand in a column of
//! measurements.

use crate::candidate::Candidate;
use crate::dtype::Precision;
use crate::ir::layout::{chunk_bytes, unit_bytes};
use crate::ir::op::UNIT_ROWS;
use crate::model::graph::{Linear, ModelGraph};
use crate::target::{Measured, Target, TargetKind};

/// Most bandwidth of a single SM, as a multiple of its share, if others leave bandwidth unused.
const SM_BANDWIDTH_MOST: f64 = 1.35;
/// Latency of device memory under load, µs: bytes in flight divided by it bound the bandwidth of one SM.
const MEMORY_LATENCY_US: f64 = 1.07;
/// Bytes in flight at which `hop_loaded_us` was measured.
const LOADED_BYTES: f64 = 32_768.0;
/// Exponent of the share of time in which memory is busy, in the delay of a poll.
const BUSY_EXPONENT: f64 = 1.78;
/// Serial instructions of a task between two exchanges, µs: for each task, and for each 1024 of k.
const SERIAL_US: f64 = 0.07;
const SERIAL_US_PER_K: f64 = 0.29;
/// Extra time compared with eight warps, as a share: with more warps, registers spill; with fewer, less is issued.
const SERIAL_MANY_WARPS: [(u32, f64); 2] = [(13, 1.09), (9, 0.28)];
const SERIAL_FEW_WARPS: f64 = 0.29;
/// A barrier and its wait, µs per chunk.
const CHUNK_US: f64 = 0.023;
/// Share of the shorter of stream and chain that does not overlap.
const OVERLAP_LOSS: f64 = 0.055;
/// Attention of one task: serial work, µs; its reading time relative to a matvec's; and the extra share for each further head.
const ATTENTION_US: f64 = 0.04;
const ATTENTION_READ: f64 = 0.4;
const ATTENTION_HEAD: f64 = 0.63;
/// The merge of split attention, µs per KV split.
const MERGE_US: f64 = 0.013;
/// Rounds of the fixed point of `layer` and `u`: each halves the error.
const ROUNDS: usize = 4;

/// The parts of a predicted step, µs.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Predicted {
    /// Weights and cache rows of the SM with the most bytes, at its bandwidth.
    pub stream_us: f64,
    /// Exchanges and the serial work between them, as far as the stream does not hide them.
    pub chain_us: f64,
    /// Attention over the cache, serial work included, likewise.
    pub attention_us: f64,
}

impl Predicted {
    pub fn total_us(&self) -> f64 {
        self.parts().iter().map(|(_, us)| us).sum()
    }

    /// The parts with their names.
    pub fn parts(&self) -> [(&'static str, f64); 3] {
        let Predicted { stream_us, chain_us, attention_us } = *self;
        [("streaming weights", stream_us), ("exchanges between SMs", chain_us), ("attention", attention_us)]
    }
}

/// Predicts a step at `position`; `None` if the target is no device, or was never calibrated.
pub fn predict(
    graph: &ModelGraph,
    target: &Target,
    measured: &Measured,
    precision: Precision,
    candidate: &Candidate,
    position: u32,
) -> Option<Predicted> {
    if target.kind == TargetKind::Cpu {
        return None;
    }
    let bandwidth = measured.read_bytes_per_s? / 1e6;
    let (idle, loaded) = (measured.hop_idle_us?, measured.hop_loaded_us?);
    let c = candidate;
    let (sms, slot) = (f64::from(c.sms.max(1)), f64::from(c.slot_bytes.max(1)));
    let mean = bandwidth / f64::from(target.sms().max(1));
    let fair = (bandwidth / sms).min(mean * SM_BANDWIDTH_MOST) * measured.sm_bandwidth_min_ratio.unwrap_or(1.0);
    // A slot in flight is not free: from an empty ring, `flight_high` applies until fewer than `flight_free` slots are left.
    let high = c.flight_high.min((c.ring_slots + 1).saturating_sub(c.flight_free)).max(c.flight_low);
    let per_sm = fair.min(f64::from(high) * slot / MEMORY_LATENCY_US);
    // While an SM waits, its loader fills the ring: `flight_high` applies until `flight_free` slots are left.
    let slots = f64::from(c.ring_slots.max(1));
    let hurry = 1.0 - f64::from(c.flight_free) / slots;
    let flight = slot * (f64::from(c.flight_low) + f64::from(high - c.flight_low) * hurry);
    let queued = (loaded - idle).max(0.0) * flight / LOADED_BYTES;
    let many = SERIAL_MANY_WARPS.into_iter().find(|(warps, _)| c.consumer_warps >= *warps);
    let few = if c.consumer_warps < 8 { SERIAL_FEW_WARPS } else { 0.0 };
    let slower = 1.0 + many.map_or(few, |(_, share)| share);

    let matvec = |rows: u32, linear: &Linear| {
        let units = f64::from(rows.div_ceil(UNIT_ROWS).div_ceil(c.sms.max(1)));
        let unit = unit_bytes(linear.cols, precision);
        let (unit, chunk) = (f64::from(unit), f64::from(chunk_bytes(unit, c.slot_bytes)));
        let serial = (SERIAL_US + SERIAL_US_PER_K * f64::from(linear.cols) / 1024.0) * slower;
        (units * unit, (units * unit / chunk).ceil() * CHUNK_US, serial, chunk)
    };
    let split = c.splits > 1 && position >= c.split_from;
    let shares = if split { c.splits } else { 1 };
    let mut predicted = Predicted::default();
    let mut wire = idle;
    for layer in &graph.layers {
        // No program has a layer without attention yet, so none is predicted. Of experts, those that a row chooses.
        let (Some(attn), Some(mlp)) = (layer.attention(), layer.feed.mlps().next()) else { continue };
        let chosen = layer.feed.experts().map_or(1, |experts| experts.router.top_k);
        let gates = if mlp.gate.is_some() { 2 } else { 1 };
        let tasks = [
            matvec(attn.projections().iter().map(|part| part.rows).sum(), &attn.q),
            matvec(attn.o.rows, &attn.o),
            matvec(mlp.up.rows * gates * chosen, &mlp.up),
            matvec(mlp.down.rows * chosen, &mlp.down),
        ];
        // Sums over tasks: their bytes, and the time of the instructions between their exchanges.
        let sums = |tasks: &[(f64, f64, f64, f64)]| {
            tasks.iter().fold((0.0, 0.0), |(b, us), (bytes, chunks, serial, _)| (b + bytes, us + chunks + serial))
        };
        let (bytes, _) = sums(&tasks);
        let (few_bytes, few_us) = sums(&tasks[..2]);
        let (_, many_us) = sums(&tasks[2..]);
        // Bytes that the ring holds: a chunk in each slot, of the mean size of a layer's chunks.
        let chunk: f64 = tasks.iter().map(|(bytes, .., chunk)| bytes * chunk).sum::<f64>() / bytes.max(1.0);
        let held = slots * chunk;
        let seen = f64::from(attn.window.map_or(position, |window| position.min(window)));
        let together = c.heads_per_task.clamp(1, attn.heads.max(1));
        let turns = f64::from((attn.heads.div_ceil(together) * shares).div_ceil(c.sms.max(1)));
        let rows = 2.0 * seen * f64::from(attn.head_dim) * precision.cache.bytes() as f64 / f64::from(shares);
        // A task's dot products for several heads cost instructions, not bytes.
        let heads = 1.0 + ATTENTION_HEAD * f64::from(together - 1);
        let merge = if split { MERGE_US * f64::from(shares) } else { 0.0 };
        let attention = turns * (rows / per_sm * heads * ATTENTION_READ + ATTENTION_US) + merge;
        let stream = (bytes + turns * rows) / per_sm;
        // Exchanges before qkv, attention, o and the merge; before gate and up, and down. A sum after a norm is one more, unless every SM
        // makes it: then the next matvec waits for none.
        let posts = [&layer.attn_post_norm, &layer.mlp_post_norm]
            .map(|norm| if norm.is_some() && c.sums_everywhere == 0 { 1.0 } else { 0.0 });
        let few_hops = 3.0 + if split { 1.0 } else { 0.0 } + posts[0];
        let many_hops = 2.0 + posts[1];
        let (mut us, mut chain) = (stream, 0.0);
        for _ in 0..ROUNDS {
            let busy = (stream / us).min(1.0);
            wire = idle + queued * busy.powf(BUSY_EXPONENT);
            // Around attention little is streamed, and the ring fills before the chain of waits ends.
            let few = few_hops * wire + few_us + attention;
            let many = many_hops * wire + many_us;
            let ahead = few.min((few_bytes + turns * rows + held) / per_sm);
            chain = few + many;
            us = few + many.max(stream - ahead) + OVERLAP_LOSS * stream.min(chain);
        }
        // The stream takes its full time; the chain takes the remainder that the stream does not hide.
        let hidden = (us - stream).max(0.0);
        predicted.stream_us += us.min(stream);
        predicted.attention_us += hidden * attention / chain;
        predicted.chain_us += hidden * (1.0 - attention / chain);
    }
    let (bytes, ..) = matvec(graph.head.rows, &graph.head);
    predicted.stream_us += bytes / per_sm;
    predicted.chain_us += wire;
    Some(predicted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::model::config::import_config_only;
    use crate::target::TargetRecord;

    const BF16: Precision = Precision { weights: DType::Bf16, cache: DType::Bf16, wire: DType::Bf16 };

    #[test]
    fn predictions_move_as_the_hardware_does() {
        let config = include_str!("../../manifests/configs/llama-3.2-1b.json");
        let graph = import_config_only(config, 0).expect("a config of the repository").graph;
        let TargetRecord { target, measured } = TargetRecord::builtin("h200").expect("a record");
        let default = Candidate::default_for(&graph, &target, BF16);
        let predicted = |c: &Candidate, position| predict(&graph, &target, &measured, BF16, c, position);
        let us = |c: &Candidate, position| predicted(c, position).expect("calibrated").total_us();
        let base = us(&default, 32);
        // 2.47 GB of weights at 4.6 TB/s.
        assert!(base > 537.0 && base < 700.0, "{base}");
        assert!(us(&default, 1900) > base, "history takes time");
        let worse = [
            ("half of the SMs", Candidate { sms: 66, ..default.clone() }),
            ("a small ring", Candidate { ring_slots: 4, flight_free: 2, ..default.clone() }),
            ("one small copy in flight", Candidate { flight_high: 1, flight_low: 1, ..default.clone() }),
            ("sixteen warps", Candidate { consumer_warps: 16, ..default.clone() }),
        ];
        for (what, candidate) in worse {
            assert!(us(&candidate, 32) > base, "{what}: {} against {base}", us(&candidate, 32));
        }
        let unsplit = Candidate { splits: 1, ..default.clone() };
        assert!(us(&unsplit, 1900) > us(&default, 1900), "a long history wants every SM");
        let never = Candidate { flight_high: 4, flight_low: 1, flight_free: default.ring_slots, ..default.clone() };
        assert!(us(&never, 32) > 1.1 * us(&default, 32), "one copy in flight is not the bandwidth of memory");
        let cpu = Target::builtin("cpu").expect("a record");
        assert_eq!(predict(&graph, &cpu, &measured, BF16, &default, 32), None);
    }
}
