//! Tests waves over several devices: that their generated text has the bits of one device, that each device holds and computes its part alone, and that
//! a plan which forgets what crosses has no proof.

use monobloc::format::FormatPlan;
use monobloc::ir::layout::share_of;
use monobloc::model::config::Imported;
use monobloc::rows::Shape;
use monobloc::target::Target;
use monobloc::validate::Validated;
use monobloc::waves::{Action, Form, Over, Plan, Target as Written, derive, derive_alike, derive_ragged, prove};

use crate::formats::{all, named, rounded};
use crate::nvrtc::nvrtc;
use crate::skipped;
use crate::waves::{
    Ran, TILES_COLS, form_compiles, given, kernel, of_size, proven, rows_have_the_bits_that_they_have_alone, rows_of,
    run_kernel, run_kernel_after, small, stored, tokens, wide, with_tail,
};
use crate::waves_experts::of_layers;

/// Two or three devices with as many SMs as [`alone`] has.
fn together(devices: u32) -> Target {
    let mut target = small();
    target.spec.sm_count = 24 / devices;
    target.on_devices(devices)
}

fn alone() -> Target {
    together(1)
}

fn pages_of(validated: &Validated, sequences: u32) -> Vec<u32> {
    let shape = Shape::of(&validated.schedule().program).unwrap();
    (0..sequences * shape.blocks()).map(|block| (block * 7 + 5) % shape.pages).collect()
}

fn codes(weights: &str, embed: &str) -> FormatPlan {
    FormatPlan { embed: Some(named(embed)), ..all(named(weights)) }
}

/// Steps of two texts, read at once and then decoded together: the logits, and the tokens that the first device tells.
#[test]
fn generated_steps_of_several_devices_compute_what_one_does() {
    let mut bits = 0;
    for (devices, name, (cols, within), rows, plan) in [
        (2, "families/gemma3", (128, None), 16, FormatPlan::default()),
        (2, "families/qwen3", (384, Some(576)), 32, codes("int4:32", "int8")),
        (2, "families/llama-gqa", (128, None), 64, codes("fp8", "mxfp4")),
        (3, "families/starcoder2", (128, None), 64, FormatPlan::default()),
        (2, "families/qwen3", (TILES_COLS, Some(576)), 64, FormatPlan::default()),
    ] {
        let (_folder, imported) = stored(&of_size(name, cols, within));
        let imported = rounded(imported, &plan);
        let texts = [tokens(&imported, 9), tokens(&imported, 13)[9..].to_vec()];
        let launches = [
            ([rows_of(0, 0, &given(&texts[0])), rows_of(1, 0, &given(&texts[1]))].concat(), 1),
            ([rows_of(0, 9, &[Err(8)]), rows_of(1, 4, &[Err(12)])].concat(), 3),
        ];
        let on = |target: &Target| {
            let validated = kernel(&imported.graph, target);
            let proven =
                proven(&validated, target, Form::Steps, rows).unwrap_or_else(|refused| panic!("{name}: {refused}"));
            let ran = run_kernel(&imported, &proven, &launches, &pages_of(&validated, 2));
            (proven.plan().order(), ran)
        };
        let (one, several) = (on(&alone()), on(&together(devices)));
        let same_order = one.0 == several.0;
        let (Some(one), Some(several)) = (one.1, several.1) else {
            return skipped("generated_steps_of_several_devices_compute_what_one_does", "C++ compiler", "`c++`");
        };
        assert!(one.logits.iter().any(|bits| *bits != 0), "{name}");
        if same_order {
            assert!(one.logits == several.logits, "{name}");
            assert_eq!(one.tokens, several.tokens, "{name}");
            bits += 1;
        }
        // Otherwise heads are sums of one part of k, and not of two: the first launch has the same tokens.
        let first = |ran: &Ran| {
            ran.logits[..13 * imported.graph.vocab as usize]
                .iter()
                .map(|bits| f32::from_bits(*bits))
                .collect::<Vec<_>>()
        };
        let (one, several) = (first(&one), first(&several));
        let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v * v)).sum::<f64>().sqrt();
        let error = norm(&mut one.iter().zip(&several).map(|(a, b)| a - b)) / norm(&mut one.iter().copied());
        assert!(error < 0.01, "{name}: {error:e}");
    }
    assert!(bits >= 2, "{bits} cases add up in the same order");
}

/// The plan of chunks, and what it and its tail leave of a text: a chunk of two blocks of rows after a short one, and its last rows. `None`: no compiler.
fn read_and_decide(imported: &Imported, target: &Target) -> Option<(Plan, Ran, Ran)> {
    let text = tokens(imported, 142);
    let (some, rest) = text.split_at(11);
    let launches = [(rows_of(0, 0, &given(some)), 1), (rows_of(0, 11, &given(rest)), 1)];
    let last = rest.len() as u32;
    let tail = [(rows_of(0, text.len() as u32 - 3, &[Err(last - 3), Err(last - 2), Err(last - 1)]), 1)];
    let validated = kernel(&imported.graph, target);
    let both = with_tail(&validated, target, 256, 16).unwrap_or_else(|refused| panic!("{refused}"));
    let pages = pages_of(&validated, 1);
    let chunk = run_kernel(imported, both.chunk(), &launches, &pages)?;
    let tail = run_kernel_after(imported, both.tail(), &tail, &pages, (&chunk, both.taken()))?;
    Some((both.chunk().plan().clone(), chunk, tail))
}

/// A chunk of two blocks of rows after a short one, and its tail. Each device has the keys and values of all heads.
#[test]
fn generated_chunks_of_several_devices_have_the_bits_of_one() {
    for (devices, name, plan) in [
        (2, "families/gemma3", FormatPlan::default()),
        (2, "families/qwen3", codes("int4:32", "int8")),
        (3, "families/starcoder2", FormatPlan::default()),
    ] {
        let (_folder, imported) = stored(&wide(name));
        let imported = rounded(imported, &plan);
        let on = |target: &Target| read_and_decide(&imported, target);
        let (Some((_, one, of_one)), Some((_, several, of_several))) = (on(&alone()), on(&together(devices))) else {
            return skipped("generated_chunks_of_several_devices_have_the_bits_of_one", "C++ compiler", "`c++`");
        };
        assert_eq!(several.others.len() as u32, devices - 1);
        for cache in several.others.iter().chain([&several.cache]) {
            let other = cache.iter().zip(&one.cache).filter(|(found, expected)| found != expected).count();
            assert_eq!(other, 0, "{name}: bytes of {} that are others", cache.len());
        }
        assert!(of_one.logits == of_several.logits, "{name}");
        assert_eq!(of_one.tokens, of_several.tokens, "{name}");
    }
}

/// Chunks that leave the input of the next product: with one part of k in every launch, and with two in launches of one block of rows. Both of two devices have the cache of one
/// device; so has the tail that reads the residual of all columns.
#[test]
fn generated_chunks_of_two_devices_that_keep_columns_compute_what_one_does() {
    for (within, parts) in [(None, [1, 1]), (Some(576), [1, 2])] {
        let (_folder, imported) = stored(&of_size("families/llama-gqa", 128, within));
        let on = |target: &Target| {
            let (plan, chunk, tail) = read_and_decide(&imported, target)?;
            let sums = plan.waves.iter().filter_map(|wave| match wave.action {
                Action::MatMul { target: Written::Sums { shown, .. }, .. } => {
                    let Over::Units { parts, .. } = plan.divisions[wave.division.index()].over else { unreachable!() };
                    Some((parts, shown))
                }
                _ => None,
            });
            Some((sums.collect::<Vec<_>>(), chunk, tail))
        };
        let (Some((of_alone, one, of_one)), Some((sums, two, of_two))) = (on(&alone()), on(&together(2))) else {
            const NAME: &str = "generated_chunks_of_two_devices_that_keep_columns_compute_what_one_does";
            return skipped(NAME, "C++ compiler", "`c++`");
        };
        let parts_of = |sums: &[(u32, bool)]| sums.iter().map(|(parts, _)| *parts).collect::<Vec<_>>();
        assert_eq!(parts_of(&sums)[..2], parts, "{within:?}");
        assert_eq!(parts_of(&of_alone), parts_of(&sums), "{within:?}");
        // The last sum goes to the tail, and of sums of other launches the whole is read.
        let shown = |(n, (parts, _)): (usize, &(u32, bool))| sums.get(n + 1).is_none_or(|(next, _)| next != parts);
        assert!(sums.iter().enumerate().all(|sum| shown(sum) == sum.1.1), "{within:?}: {sums:?}");
        assert!(of_alone.iter().all(|(_, shown)| !shown), "{within:?}: {of_alone:?}");
        assert!(two.others == [two.cache.clone()] && two.cache == one.cache, "{within:?}");
        assert!(of_two.logits == of_one.logits, "{within:?}");
    }
}

/// With `batch_invariant`, rows in batches and chunks have the bits that they have alone.
#[test]
fn generated_kernels_of_two_devices_in_one_order_give_rows_the_bits_that_they_have_alone() {
    rows_have_the_bits_that_they_have_alone(
        "generated_kernels_of_two_devices_in_one_order_give_rows_the_bits_that_they_have_alone",
        &together(2),
    );
}

/// Each device has the units that it holds, the heads that it keeps, and all rows.
#[test]
fn devices_divide_units_and_heads_and_no_rows() {
    let (imported, target) = (wide("families/llama-gqa"), together(2));
    let validated = kernel(&imported.graph, &target);
    for (form, rows) in [(Form::Chunk, 256), (Form::Steps, 64)] {
        let proven = proven(&validated, &target, form, rows).unwrap();
        for division in &proven.plan().divisions {
            for (device, of_sms) in (0..).zip(division.shares[0].chunks(12)) {
                let of_device = || of_sms.iter().flatten();
                match division.over {
                    Over::Units { n, .. } => {
                        let own = share_of(n, device, 2);
                        assert!(
                            of_device()
                                .all(|share| own.contains(&(share.lo % n)) && own.contains(&((share.hi - 1) % n)))
                        );
                    }
                    Over::Heads { n, kept, .. } => {
                        assert!(of_device().all(|share| share.lo / kept * 2 / (n / kept) == device), "{division:?}");
                    }
                    Over::Rows { .. } => {
                        let of_device: u32 = of_device().map(|share| share.rows * (share.hi - share.lo)).sum();
                        assert!(
                            of_device
                                >= division.shares[0]
                                    .iter()
                                    .flatten()
                                    .map(|share| share.row + share.rows)
                                    .max()
                                    .unwrap()
                        );
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

fn refused(plan: Plan, validated: &Validated, target: &Target, rule: &str) {
    let violations = prove(plan, validated, target).expect_err("a broken plan");
    assert!(violations.iter().any(|violation| violation.rule.name() == rule), "{rule}: {violations:?}");
}

#[test]
fn a_plan_that_forgets_what_crosses_has_no_proof() {
    let (imported, target) = (wide("families/llama-gqa"), together(2));
    let validated = kernel(&imported.graph, &target);
    for (form, rows) in [(Form::Chunk, 256), (Form::Steps, 64)] {
        let of = proven(&validated, &target, form, rows).unwrap().plan().clone();
        let crossing: Vec<usize> = (0..of.work.len()).filter(|at| of.work[*at].everywhere).collect();
        assert!(crossing.len() >= 3, "{form:?}");
        for at in crossing {
            let mut plan = of.clone();
            plan.work[at].everywhere = false;
            refused(plan, &validated, &target, "home");
        }
        // Devices change places, or one has what another one holds.
        for d in 0..of.divisions.len() {
            let mut plan = of.clone();
            plan.divisions[d].shares.iter_mut().for_each(|of_sms| of_sms.rotate_left(12));
            if !matches!(of.divisions[d].over, Over::Rows { .. }) {
                refused(plan, &validated, &target, "partition");
            }
            let mut plan = of.clone();
            plan.divisions[d].shares[0].swap(0, 12);
            let same = plan.divisions[d] == of.divisions[d] || matches!(of.divisions[d].over, Over::Rows { .. });
            if !same {
                refused(plan, &validated, &target, "partition");
            }
        }
        // A device that leaves its rows to another one.
        for (d, division) in of.divisions.iter().enumerate() {
            if let Over::Rows { .. } = division.over {
                let mut plan = of.clone();
                plan.divisions[d].shares[0][12..].iter_mut().for_each(Vec::clear);
                refused(plan, &validated, &target, "partition");
            }
        }
        for change in [|plan: &mut Plan| plan.machine.devices = 1, |plan: &mut Plan| plan.machine.devices = 5] {
            let mut plan = of.clone();
            change(&mut plan);
            refused(plan, &validated, &target, "machine");
        }
        let text = of.to_string();
        assert!(text.contains(" devices=2 ") && text.contains(" everywhere "), "{text}");
    }
}

#[test]
fn what_several_devices_have_no_waves_for_is_refused_by_name() {
    let target = together(2);
    let refusal = |imported: &Imported, form: Form, rows: u32| {
        derive(kernel(&imported.graph, &target).schedule(), &target, form, rows).unwrap_err().to_string()
    };
    let experts = of_layers("experts/olmoe", Some(2));
    assert!(refusal(&experts, Form::Chunk, 256).ends_with("wave kernels with experts run on one"));
    assert!(refusal(&experts, Form::Steps, 32).ends_with("wave kernels with experts run on one"));
    let dense = wide("families/llama-gqa");
    let validated = kernel(&dense.graph, &target);
    // Without waves no kernel adds up in one order.
    let alike = derive_alike(kernel(&experts.graph, &target).schedule(), &target, &[32, 64]).unwrap_err().to_string();
    assert!(alike.ends_with("wave kernels with experts run on one"), "{alike}");
    let cut = derive_ragged(validated.schedule(), &target, 64).unwrap_err().to_string();
    assert!(cut.ends_with("KV splits are dealt out among the SMs of one"), "{cut}");
}

#[test]
fn wave_kernels_of_two_devices_compile() {
    let nvrtc = nvrtc("wave_kernels_of_two_devices_compile");
    let (imported, target) = (wide("families/llama-gqa"), together(2));
    let validated = kernel(&imported.graph, &target);
    for of in [(Form::Chunk, 256), (Form::Steps, 64), (Form::Tail, 16)] {
        form_compiles(nvrtc, &validated, &target, of, &[]);
    }
}
