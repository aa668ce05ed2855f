//! Tests batch and wave kernels in every format on a device: their numbers against the interpreter.

use std::time::Duration;

use monobloc::abba::Limits;
use monobloc::pipeline::bench::{Baseline, Request};
use monobloc::pipeline::device_rows::{Asked, FoundOfRows, Took, bench_rows};

use crate::{Gpu, Place, say};

/// Heads of 64 and wide enough for a group of 128 weights.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 2048,
"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true}"#;

/// A benchmark compares first: the logits of every row with the interpreter, the choices of the sampler with those of the host, then keys
/// and values of every position that waves read with those of the batch kernel. It ends with an error if they differ.
#[test]
fn rows_and_waves_of_every_format_compute_what_the_interpreter_does() {
    let Some(gpu) = Gpu::here("rows_and_waves_of_every_format_compute_what_the_interpreter_does") else { return };
    for weights in ["fp32", "bf16", "int8", "fp8", "int4:128", "int4:32", "mxfp4"] {
        let place = Place::new();
        std::fs::write(place.path("config.json"), CONFIG).unwrap();
        let source = format!("synthetic:{}", place.path("config.json").display());
        let decode = "context_max = 2048\ntime_positions = [32]";
        let mut manifest = place.manifest_of(&source, &gpu.record, gpu.record.spec.copy, weights, decode);
        manifest.formats.embed = manifest.formats.weights;
        // Those of 32 rows and more are run by waves; in fp32 by several launches of the kernel for 16.
        let rows: &[u32] = &[1, 8, 16, 32, 64, 128];
        let asked = Asked { rows, prompts: &[100, 700], chunks: &[] };
        // A baseline that takes turns with steps and prompts, but refuses 16 rows.
        let program = r#"while read -r line; do case "$line" in
            *'"open"'*) echo '{"name":"shell","variants":["plain"]}' ;;
            *'"rows":16'*) echo '{"error":"sixteen"}' ;;
            *'"prepare"'*) echo '{}' ;;
            *) echo '{"us_per_step":1e9}' ;;
            esac; done"#;
        let request = Request {
            baselines: vec![Baseline::Command(program.to_string())],
            limits: Limits { rounds_min: 1, rounds_max: 1, time_max: Duration::ZERO },
            baseline_timeout: Duration::from_secs(10),
        };
        let (mut chunks, mut compared) = (vec![], vec![]);
        let workspace = place.workspace(None);
        let timed = bench_rows(&workspace, &manifest, &manifest.targets[0], asked, &request, &mut |found| {
            match found {
                FoundOfRows::Versus(versus) => compared.push(versus.outcome.as_ref().map(|c| c.ratio.ratio).ok()),
                FoundOfRows::Own(timed) => {
                    if let Took::Prompt { tokens, .. } = timed.took {
                        chunks.push((tokens, timed.rows));
                        say(&format!("{weights}: {tokens} tokens in chunks of {}: {:?}", timed.rows, timed.checked));
                    }
                }
            }
            Ok(())
        });
        timed.unwrap_or_else(|fault| panic!("{weights}: {fault}"));
        // Each number of rows and each prompt has one comparison.
        assert_eq!(compared.len(), rows.len() + 2, "{weights}: {compared:?}");
        assert_eq!(compared.iter().filter(|ratio| ratio.is_none()).count(), 1, "{weights}: {compared:?}");
        assert!(compared.iter().flatten().all(|ratio| *ratio > 100.0), "{weights}: {compared:?}");
        let waves = gpu.record.spec.register_reallocation && weights != "fp32";
        assert_eq!(chunks.len(), 2, "{weights}: {chunks:?}");
        // Waves read a prompt in one chunk here; the kernel for 16 rows in many.
        assert!(!waves || chunks.iter().all(|(tokens, rows)| rows >= tokens), "{weights}: {chunks:?}");
    }
}
