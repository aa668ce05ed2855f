//! Owns the figures of `/metrics`, in the text format of Prometheus and with the names that vLLM gives them.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use super::Summary;
use super::desk::Times;
use crate::engine::Figures;

/// Upper bounds in seconds: those of vLLM, without the bounds that no request reaches here.
const FIRST_TOKEN_S: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0];
const TOKEN_S: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5];
const REQUEST_S: &[f64] = &[
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0,
];

/// Counts of observations by upper bound.
#[derive(Debug, Clone)]
struct Histogram {
    name: &'static str,
    help: &'static str,
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    fn new(name: &'static str, help: &'static str, bounds: &'static [f64]) -> Histogram {
        Histogram { name, help, bounds, counts: vec![0; bounds.len()], sum: 0.0, count: 0 }
    }

    fn take(&mut self, from: Instant, to: Instant) {
        let value = to.saturating_duration_since(from).as_secs_f64();
        if let Some(at) = self.bounds.iter().position(|bound| value <= *bound) {
            self.counts[at] += 1;
        }
        self.sum += value;
        self.count += 1;
    }

    fn print(&self, label: &str, out: &mut String) {
        let Histogram { name, help, sum, count, .. } = self;
        head(out, name, help, "histogram");
        let mut below = 0;
        for (bound, counted) in self.bounds.iter().zip(&self.counts) {
            below += counted;
            let _ = writeln!(out, "{name}_bucket{{{label},le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(out, "{name}_bucket{{{label},le=\"+Inf\"}} {count}");
        let _ = writeln!(out, "{name}_sum{{{label}}} {sum}");
        let _ = writeln!(out, "{name}_count{{{label}}} {count}");
    }
}

fn head(out: &mut String, name: &str, help: &str, kind: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// What was counted and timed since the start.
#[derive(Debug, Clone)]
pub struct Metrics {
    model: String,
    pub prompt_tokens: u64,
    generation_tokens: u64,
    stopped: u64,
    at_length: u64,
    aborted: u64,
    first_token: Histogram,
    between_tokens: Histogram,
    request: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
}

impl Metrics {
    pub fn new(model: &str) -> Metrics {
        let escaped = model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        Metrics {
            model: escaped,
            prompt_tokens: 0,
            generation_tokens: 0,
            stopped: 0,
            at_length: 0,
            aborted: 0,
            first_token: Histogram::new("vllm:time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S),
            between_tokens: Histogram::new("vllm:inter_token_latency_seconds", "Time between two tokens.", TOKEN_S),
            request: Histogram::new("vllm:e2e_request_latency_seconds", "Time of a whole request.", REQUEST_S),
            queue: Histogram::new("vllm:request_queue_time_seconds", "Time that a request waits.", REQUEST_S),
            prefill: Histogram::new(
                "vllm:request_prefill_time_seconds",
                "Time from the start of the computation to the first token.",
                REQUEST_S,
            ),
            decode: Histogram::new(
                "vllm:request_decode_time_seconds",
                "Time from the first token to the last one.",
                REQUEST_S,
            ),
        }
    }

    /// A token arrived; `before` is the time of the previous token.
    pub fn token(&mut self, times: &Times, before: Option<Instant>) {
        self.generation_tokens += 1;
        let Some(now) = times.last else { return };
        match before {
            Some(before) => self.between_tokens.take(before, now),
            None => self.first_token.take(times.arrived, now),
        }
    }

    /// A choice ended; `None`: with an error.
    pub fn ended(&mut self, times: &Times, reason: Option<&str>) {
        match reason {
            Some("stop") => self.stopped += 1,
            Some(_) => self.at_length += 1,
            None => self.aborted += 1,
        }
        let Times { arrived, began, first, last } = *times;
        let (Some(began), Some(first), Some(last)) = (began, first, last) else { return };
        self.queue.take(arrived, began);
        self.prefill.take(began, first);
        self.decode.take(first, last);
        self.request.take(arrived, last);
    }

    /// The counts of the whole run.
    pub fn summary(&self, ran: Duration, refused: u64) -> Summary {
        let Metrics { stopped, at_length, aborted, prompt_tokens, generation_tokens, .. } = *self;
        let choices = stopped + at_length + aborted;
        Summary { ran, choices, failed: aborted, prompt_tokens, tokens: generation_tokens, refused }
    }

    /// The figures in the text format of Prometheus.
    pub fn print(&self, figures: &Figures) -> String {
        let label = format!("model_name=\"{}\"", self.model);
        let mut out = String::new();
        let usage = f64::from(figures.pages_used) / f64::from(figures.pages.max(1));
        let gauges = [
            ("vllm:num_requests_running", "Choices that run now.", figures.running as f64),
            ("vllm:num_requests_waiting", "Choices that wait to run.", figures.waiting as f64),
            ("vllm:kv_cache_usage_perc", "Share of the cache's pages that running choices hold, 0 to 1.", usage),
            ("monobloc:state_snapshots", "Snapshots of recurrent states that are kept.", figures.snapshots as f64),
            ("monobloc:state_snapshots_max", "Snapshots that there is room for.", figures.snapshots_max as f64),
        ];
        for (name, help, value) in gauges {
            head(&mut out, name, help, "gauge");
            let _ = writeln!(out, "{name}{{{label}}} {value}");
        }
        let counters = [
            (
                "vllm:prefix_cache_queries_total",
                "Prompt tokens that were looked up in the cache.",
                figures.prefix_queries,
            ),
            ("vllm:prefix_cache_hits_total", "Prompt tokens that were found in the cache.", figures.prefix_hits),
            ("vllm:num_preemptions_total", "Choices that had to give up their pages.", figures.preemptions),
            ("vllm:prompt_tokens_total", "Prompt tokens.", self.prompt_tokens),
            ("vllm:generation_tokens_total", "Generated tokens.", self.generation_tokens),
            ("monobloc:launches_total", "Launches of the engine.", figures.launches),
            ("monobloc:steps_total", "Steps of all launches.", figures.steps),
            ("monobloc:rows_total", "Rows of all steps.", figures.rows),
            ("vllm:spec_decode_num_drafts_total", "Proposals of a draft that were verified.", figures.proposals.steps),
            ("vllm:spec_decode_num_draft_tokens_total", "Tokens of these proposals.", figures.proposals.proposed),
            ("vllm:spec_decode_num_accepted_tokens_total", "Those that were accepted.", figures.proposals.accepted),
        ];
        for (name, help, value) in counters {
            head(&mut out, name, help, "counter");
            let _ = writeln!(out, "{name}{{{label}}} {value}");
        }
        let name = "vllm:request_success_total";
        head(&mut out, name, "Choices that ended, by reason.", "counter");
        for (reason, count) in [("stop", self.stopped), ("length", self.at_length), ("abort", self.aborted)] {
            let _ = writeln!(out, "{name}{{{label},finished_reason=\"{reason}\"}} {count}");
        }
        let histograms =
            [&self.first_token, &self.between_tokens, &self.request, &self.queue, &self.prefill, &self.decode];
        histograms.iter().for_each(|histogram| histogram.print(&label, &mut out));
        out
    }
}
