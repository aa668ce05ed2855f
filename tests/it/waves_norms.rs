//! Tests waves of attention whose norms of q and k are over all heads: that a proven plan computes its model, that a wrong one has no proof, and that
//! the generated text does what the plan says.

use computed::executor::expected;
use monobloc::model::config::Imported;
use monobloc::rows::Shape;
use monobloc::waves::{Action, Form, Plan, prove};

use crate::nvrtc::nvrtc;
use crate::skipped;
use crate::waves::{
    Ran, cached, every_form_computes, form_compiles, given, judge_mutants_of, kernel, proven, rows_of, run_kernel,
    small, tokens, wide, worst_position,
};
use crate::waves_experts::of_layers;

/// OLMo 2: q and k over all heads, and branches that are normed.
fn dense() -> Imported {
    wide("families/olmo2")
}

#[test]
fn a_proven_plan_with_norms_of_all_heads_computes_its_model() {
    // With experts; and with heads that are rotated in part.
    let models = [dense(), of_layers("experts/olmoe", Some(2)), of_layers("experts/minimax-m2", Some(2))];
    for (seed, imported) in (0u64..).zip(models) {
        let (validated, target) = (kernel(&imported.graph, &small()), small());
        let of_chunk = proven(&validated, &target, Form::Chunk, 256).unwrap_or_else(|refused| panic!("{refused}"));
        assert!(of_chunk.plan().waves.iter().any(|wave| matches!(wave.action, Action::NormHeads { .. })));
        every_form_computes(&format!("model {seed}"), &imported, &[11, 40], seed);
    }
}

#[test]
fn a_wrong_plan_with_norms_of_all_heads_has_no_proof() {
    let imported = dense();
    for (form, rows) in [(Form::Chunk, 256), (Form::Steps, 32)] {
        let mutants = judge_mutants_of("norms of all heads", &imported, &small(), form, rows, None);
        assert!(mutants > 500, "{mutants} mutants");
    }
    let (validated, target) = (kernel(&imported.graph, &small()), small());
    let of = proven(&validated, &target, Form::Steps, 32).unwrap().plan().clone();
    let at = of.waves.iter().position(|wave| matches!(wave.action, Action::NormHeads { .. })).unwrap();
    let Action::NormHeads { x, .. } = of.waves[at].action else { unreachable!() };
    // Without the wave, attention reads heads that nothing has normed, from where they are.
    let mut plan: Plan = of.clone();
    plan.waves.remove(at);
    let Action::AttendRow { x: heads, .. } = &mut plan.waves[at].action else { panic!("attention") };
    *heads = x;
    let violations = prove(plan, &validated, &target).unwrap_err();
    assert!(violations.iter().any(|violation| violation.message.contains("norm all heads")), "{violations:?}");
}

/// The generated text, its tables and the pack, run block by block: a chunk after another one, and steps.
#[test]
fn a_generated_kernel_norms_all_heads() {
    let (imported, target) = (dense(), small());
    let validated = kernel(&imported.graph, &target);
    let shape = Shape::of(&validated.schedule().program).unwrap();
    let page_of: Vec<u32> = (0..shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect();
    for (form, rows, count) in [(Form::Chunk, 256, 150), (Form::Steps, 32, 40)] {
        let proven = proven(&validated, &target, form, rows).unwrap();
        let text = tokens(&imported, count);
        let (some, rest) = text.split_at(11);
        let launches = [(rows_of(0, 0, &given(some)), 1), (rows_of(0, 11, &given(rest)), 1)];
        let Some(Ran { cache, .. }) = run_kernel(&imported, &proven, &launches, &page_of) else {
            return skipped("a_generated_kernel_norms_all_heads", "C++ compiler", "`c++`");
        };
        let found = cached(validated.schedule(), &cache, &page_of, text.len());
        let error = worst_position(&expected(&imported, &text), &found);
        assert!(error < 0.03, "{form:?}: {error:e}");
    }
}

#[test]
fn wave_kernels_with_norms_of_all_heads_compile() {
    let nvrtc = nvrtc("wave_kernels_with_norms_of_all_heads_compile");
    let (imported, target) = (dense(), small());
    let validated = kernel(&imported.graph, &target);
    for of in [(Form::Chunk, 256), (Form::Steps, 64)] {
        form_compiles(nvrtc, &validated, &target, of, &[]);
    }
}
