//! Tests programs of single ops: they are proven, their outputs are compared, and a wrong weight changes the outputs.

use std::sync::Arc;

use monobloc::candidate::Candidate;
use monobloc::check::{CheckError, Checked, Subject, compare_cpu, expect_cuda};
use monobloc::codegen::emit::{Trace, emit};
use monobloc::interp::{Interp, Options, Pack};
use monobloc::ir::schedule::{Schedule, Source};
use monobloc::lower::{LayerOp, graph_of, lower_alone, outputs};
use monobloc::model::config::{Imported, import, import_config_only};
use monobloc::pack::pack;
use monobloc::schedule::schedule;
use monobloc::target::Target;
use monobloc::validate::validate;

use crate::nvrtc::nvrtc;
use crate::proof_support::{BF16, FP32};
use crate::support::fixture;

/// Models with and without a gate; norms before and after branches, over heads and over projections; parallel blocks, biases, windows.
const MODELS: [&str; 6] = ["llama-gqa", "gemma3", "olmo2", "gpt-neox", "qwen3", "starcoder2"];
const CONTEXT: u32 = 32;

fn place(imported: &Imported, op: LayerOp, target: &Target) -> Schedule {
    let graph = &imported.graph;
    // Short and split attention.
    let candidate = Candidate { splits: 2, split_from: 16, ..Candidate::default_for(graph, target, FP32) };
    let program = lower_alone(graph, "alone", FP32, CONTEXT, &candidate, op).unwrap();
    schedule(program, target, &candidate).unwrap()
}

#[test]
fn every_op_alone_is_proven_and_a_wrong_weight_shows_in_its_outputs() {
    let (cpu, h200) = (Target::builtin("cpu").unwrap(), Target::builtin("h200").unwrap());
    for (model, op) in MODELS.iter().flat_map(|model| LayerOp::ALONE.map(|op| (model, op))) {
        let mut imported = import(&fixture("families").join(model)).unwrap();
        graph_of(op, &mut imported.graph, cpu.spec.sm_count);
        let Imported { graph, weights, .. } = &imported;
        validate(place(&imported, op, &h200), &h200).unwrap_or_else(|e| panic!("{model} {op:?} on a device: {e}"));
        let validated = validate(place(&imported, op, &cpu), &cpu).unwrap_or_else(|e| panic!("{model} {op:?}: {e}"));
        let placed = validated.schedule();
        let made = outputs(op, &placed.program);
        assert_eq!(made.is_empty(), op == LayerOp::Head, "{model} {op:?}");
        assert!(op == LayerOp::Head || made.len() >= graph.layers.len(), "{model} {op:?}: one of each layer");

        let bytes = pack(placed, graph, weights).unwrap();
        let right: Pack = Arc::new(bytes.clone());
        let subject = Subject {
            validated: &validated,
            target: &cpu,
            graph,
            weights,
            pack: right.clone(),
            positions: &[0, 5, 20],
            alone: Some(made),
        };
        let expected = expect_cuda(&subject, &|| {}).unwrap();
        let compared = |pack: Pack| -> Result<Checked, CheckError> {
            compare_cpu(&subject, &expected, &mut Interp::new(placed, pack, Options::fast())?)
        };
        let figures = compared(right).unwrap_or_else(|e| panic!("{model} {op:?}: {e}")).figures();
        assert_eq!(figures.positions, 3, "{model} {op:?}");

        // Not a weight of the head: a wrong one would show in the logits anyway.
        let regime = &placed.regimes[0];
        let of_op = |run: &&monobloc::ir::schedule::Run| {
            let grid = &placed.program.grids[regime.tasks[run.task.index()].grid.index()].name;
            (grid == "head") == (op == LayerOp::Head) && matches!(run.source, Source::Units { .. })
        };
        let wrong = regime.streams[0].iter().rfind(of_op).unwrap();
        let Source::Units { buffer, .. } = wrong.source else { unreachable!("it is weights") };
        let mut broken = bytes;
        // Changes the sign and enlarges the exponent of one weight.
        broken[placed.placement[buffer.index()].unwrap() as usize + 3] ^= 0xc1;
        let error = compared(Arc::new(broken)).expect_err(&format!("{model} {op:?}"));
        assert!(matches!(error, CheckError::Wrong { .. } | CheckError::NotFinite { .. }), "{model} {op:?}: {error}");
    }
}

#[test]
fn ops_alone_compile() {
    let Some(nvrtc) = nvrtc("ops_alone_compile") else { return };
    let target = Target::builtin("h200").unwrap();
    for op in [LayerOp::Attention, LayerOp::Down] {
        let config = include_str!("../../manifests/configs/smollm2-135m.json");
        let mut graph = import_config_only(config, 0).unwrap().graph;
        graph_of(op, &mut graph, target.spec.sm_count);
        let candidate = Candidate::default_for(&graph, &target, BF16);
        let program = lower_alone(&graph, "alone", BF16, 1024, &candidate, op).unwrap();
        let validated = validate(schedule(program, &target, &candidate).unwrap(), &target).unwrap();
        let compiled = nvrtc.compile(&emit(&validated, &target, Trace::Off)).unwrap_or_else(|e| panic!("{op:?}: {e}"));
        assert!(!compiled.log.contains("warning"), "{op:?}: {}", compiled.log);
    }
}
