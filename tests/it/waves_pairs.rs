//! Tests products in pairs of blocks: which plans have them, what a proof says of pairs that are none, that such a plan computes something else, and
//! which fences the exchange has.

use computed::executor::{TOLERANCE, difference, execute, expected};
use monobloc::codegen::KernelSource;
use monobloc::codegen::emit::Trace;
use monobloc::codegen::waves::{ENTRY_POINT, emit};
use monobloc::target::Target;
use monobloc::validate::Validated;
use monobloc::waves::{
    Action, Division, DivisionId, Form, Input, Over, Plan, Products, Share, Sums, Target as Written, Warps, Wave, Work,
    WorkId, derive, derive_alike, prove, prove_alike,
};

use rayon::prelude::*;

use crate::formats::{all, named, rounded};
use crate::nvrtc::nvrtc;
use crate::ptx::{Statement, edit, functions, rules};
use crate::waves::{filling, kernel, listed, proven, small, stored, tokens, unpaired, wide};

/// The products in pairs of a plan: wave and division.
fn paired(plan: &Plan) -> Vec<(usize, usize)> {
    let waves = plan.waves.iter().enumerate();
    let all = waves.filter_map(|(w, wave)| match (&wave.action, plan.divisions[wave.division.index()].over) {
        (Action::MatMul { target: Written::Residual(_), .. }, Over::Units { parts: 2, .. }) => {
            Some((w, wave.division.index()))
        }
        _ => None,
    });
    all.collect()
}

/// The input of the next product that a wave leaves.
fn then(plan: &mut Plan, w: usize) -> &mut Option<Input> {
    let Action::MatMul { then, .. } = &mut plan.waves[w].action else { panic!("a product") };
    then
}

fn steps(validated: &Validated, rows: u32) -> Plan {
    proven(validated, &small(), Form::Steps, rows).unwrap().plan().clone()
}

/// Products are in pairs where a target has clusters and an even number of SMs, in plans of steps and tails. Pairs share the weights of a chunk there. After an RMS norm they leave the next
/// product's input; after a norm that takes more than a factor they do not.
#[test]
fn products_are_in_pairs_where_they_can_be() {
    let [even, mut odd, mut alone] = [small(), small(), small()];
    odd.spec.sm_count = 11;
    alone.spec.cluster_max = 1;
    for (name, leaves) in [("families/qwen3", true), ("families/starcoder2", false)] {
        let graph = wide(name).graph;
        let validated = kernel(&graph, &even);
        for (form, rows) in [(Form::Steps, 16), (Form::Steps, 32), (Form::Steps, 64), (Form::Tail, 16)] {
            let mut plan = derive(validated.schedule(), &even, form, rows).unwrap();
            let all = paired(&plan);
            assert!(plan.machine.pairs && !all.is_empty(), "{name}, {form:?} of {rows}");
            for (w, _) in all {
                assert_eq!(then(&mut plan, w).is_some(), leaves, "{name}, {form:?} of {rows}, w{w}");
            }
        }
        let chunk = derive(validated.schedule(), &even, Form::Chunk, 256).unwrap();
        let shared = chunk.machine.products == Products::Shared;
        assert!(shared || name != "families/qwen3");
        assert!(chunk.shares_weights(2) == shared && !chunk.shares_weights(1) && paired(&chunk).is_empty(), "{name}");
        for target in [&odd, &alone] {
            for (form, rows) in [(Form::Steps, 32), (Form::Chunk, 256)] {
                let plan = derive(kernel(&graph, target).schedule(), target, form, rows).unwrap();
                assert!(!plan.machine.pairs && paired(&plan).is_empty(), "{name}, {form:?}");
            }
        }
    }
}

/// Scratch of a pair has room for whole tiles, even if a pass has fewer units.
#[test]
fn a_pair_has_scratch_for_whole_tiles() {
    let (target, imported) = (small(), rounded(filling("families/qwen3"), &all(named("int4:32"))));
    let validated = kernel(&imported.graph, &target);
    let of = proven(&validated, &target, Form::Steps, 32).unwrap().plan().clone();
    let down = |wave: &Wave| {
        matches!(wave.action, Action::MatMul { tiles: true, target: Written::Residual(_), .. })
            && matches!(wave.sums, Sums::Product { paired: true, .. })
    };
    let w = of.waves.iter().position(down).expect("tiles in pairs");
    let with = |bytes: u32| {
        let mut plan = of.clone();
        if let Wave { action: Action::MatMul { pass, chunk, warps, .. }, sums: Sums::Product { groups, .. }, .. } =
            &mut plan.waves[w]
        {
            (*pass, *chunk, *warps, *groups) = (8, 1, Warps { rows: 1, units: 8, k: 1 }, 1);
        }
        plan.waves[w].boxes.clear();
        plan.machine.scratch_bytes = bytes;
        for wave in &mut plan.waves {
            if let Sums::History { scratch_bytes, .. } = &mut wave.sums {
                *scratch_bytes = bytes;
            }
        }
        prove(plan, &validated, &target).map(drop).map_err(|violations| listed(&violations))
    };
    // Sums of a unit of each warp, and of 16 units what was sent and squares, of 16 rows each.
    let bytes = 8 * 2 * 512 + 16 * 16 * (32 + 4);
    assert_eq!(with(bytes), Ok(()));
    let refused = with(bytes - 128).unwrap_err();
    assert!(refused.contains("sums of a pair that no scratch holds"), "{refused}");
}

/// What a proof says of pairs that are none.
#[test]
fn pairs_that_are_none_have_no_proof() {
    let validated = kernel(&wide("families/qwen3").graph, &small());
    let of = steps(&validated, 32);
    let (w, d) = paired(&of)[0];
    let n = match of.divisions[d].over {
        Over::Units { n, .. } => n,
        _ => unreachable!(),
    };
    let refused = |plan: Plan, target: &Target| {
        let violations = prove(plan, &validated, target).map(drop).expect_err("a proof");
        listed(&violations)
    };
    let with = |change: &dyn Fn(&mut Plan)| {
        let mut plan = of.clone();
        change(&mut plan);
        refused(plan, &small())
    };
    let mut alone = small();
    alone.spec.cluster_max = 1;
    let no_pairs = "machine: schedule: pairs of an odd number of blocks, or of a target without clusters";
    let mut found = vec![
        (refused(of.clone(), &alone), no_pairs),
        (with(&|p| p.machine.sms = 11), no_pairs),
        (with(&|p| p.machine.pairs = false), "sums of pairs of blocks, which are no pairs or have no two parts"),
        // Sums that are sent, and squares, of so many units.
        (
            with(&|p| {
                let Action::MatMul { pass, .. } = &mut p.waves[w].action else { unreachable!() };
                *pass = 64;
                p.waves[w].boxes.clear();
            }),
            "sums of a pair that no scratch holds",
        ),
        (with(&|p| *then(p, w) = None), "expected the input of the product"),
        (
            with(&|p| {
                let squares = then(p, w).unwrap().squares.unwrap();
                p.work[squares.index()].place = p.work_bytes().next_multiple_of(256);
                p.work[squares.index()].cols = 2;
            }),
            " is parts:6 of 2 columns",
        ),
        (
            with(&|p| then(p, w).as_mut().unwrap().norm.as_mut().unwrap().norm.eps *= 2.0),
            "is normalised as no product takes it",
        ),
    ];
    let what = ["a part of its own", "a part of its own", "a part of its own", "other units", "a part of its own"];
    for ((_, change), what) in unpaired().into_iter().zip(what) {
        found.push((with(&|p| change(&mut p.divisions[d].shares[0], n)), what));
    }
    for (found, expected) in found {
        assert!(found.contains(expected), "expected `{expected}`, found\n{found}");
    }
}

/// Plans for 32 and 64 rows with other units in their pairs, or of which one has no pairs: each is proven, and together they are not.
#[test]
fn plans_with_other_pairs_are_not_proven_together() {
    let target = small();
    let graph = wide("families/qwen3").graph;
    let validated = kernel(&graph, &target);
    let [few, most] = <[Plan; 2]>::try_from(derive_alike(validated.schedule(), &target, &[32, 64]).unwrap()).unwrap();
    let (w, d) = paired(&most)[0];
    let mut other = most.clone();
    // The first pair has the units of the second one.
    let shares = &mut other.divisions[d].shares[0];
    shares.swap(0, 2);
    shares.swap(1, 3);
    prove(other.clone(), &validated, &target).unwrap_or_else(|rules| panic!("{}", listed(&rules)));
    let rules = prove_alike(vec![few.clone(), other], &validated, &target).unwrap_err();
    let expected = format!("alike: w{w}: plans for 32 and 64 rows divide units otherwise");
    assert_eq!((rules.len(), rules[0].to_string()), (1, expected));
    prove_alike(vec![few, most], &validated, &target).unwrap_or_else(|rules| panic!("{}", listed(&rules)));

    // Without squares, too: bias and scales are added to the sums of a pair, and to those of the first part.
    let validated = kernel(&wide("families/starcoder2").graph, &target);
    let mut alone = target.clone();
    alone.spec.cluster_max = 1;
    let few = derive(validated.schedule(), &alone, Form::Steps, 32).unwrap();
    let most = derive(validated.schedule(), &target, Form::Steps, 64).unwrap();
    let in_pairs = |sums: &Sums| matches!(sums, Sums::Product { paired: true, squares: 0, .. });
    assert!(most.order().iter().any(in_pairs) && !few.order().iter().any(in_pairs));
    let rules = prove_alike(vec![few, most], &validated, &target).unwrap_err();
    assert!(rules[0].to_string().starts_with("alike: "), "{}", listed(&rules));
}

/// Two plans in one order of sums, with a norm after a product in pairs that one of them does not read: its next product takes a factor.
#[test]
fn plans_whose_products_read_other_waves_are_not_proven_together() {
    let target = small();
    let validated = kernel(&wide("families/qwen3").graph, &target);
    let [few, most] = <[Plan; 2]>::try_from(derive_alike(validated.schedule(), &target, &[32, 64]).unwrap()).unwrap();
    let (w, _) = paired(&most)[0];
    let with_norm = |mut plan: Plan, is_read: bool| {
        let (of, grid) = (then(&mut plan, w).unwrap(), plan.waves[w + 1].grid);
        let Action::MatMul { target: Written::Residual(residual), .. } = plan.waves[w].action else { unreachable!() };
        let (to, division) = (WorkId::from(plan.work.len()), DivisionId::from(plan.divisions.len()));
        let place = plan.work_bytes().next_multiple_of(256);
        plan.work.push(Work { place, ..plan.work[of.to.index()].clone() });
        let mut shares = vec![vec![]; plan.machine.sms as usize];
        shares[0].push(Share { row: 0, rows: plan.rows, lo: 0, hi: 1 });
        plan.divisions.push(Division { over: Over::Rows { parts: 1 }, shares: vec![shares] });
        let action = Action::Rows { residual, sum: None, out: Some(Input { to, squares: None, ..of }) };
        plan.waves
            .insert(w + 1, Wave { grid, action, division, sums: Sums::Row { parts: 1 }, boxes: vec![], meets: true });
        let Action::MatMul { x, squares, .. } = &mut plan.waves[w + 2].action else { unreachable!() };
        if is_read {
            (*x, *squares) = (to, None);
        }
        plan
    };
    let rules = prove_alike(vec![with_norm(few.clone(), true), with_norm(most.clone(), false)], &validated, &target);
    let expected = format!("alike: w{}: reads what other waves left for 32 rows than for 64", w + 2);
    assert_eq!(rules.unwrap_err()[0].to_string(), expected);
    for is_read in [true, false] {
        let plans = vec![with_norm(few.clone(), is_read), with_norm(most.clone(), is_read)];
        prove_alike(plans, &validated, &target).unwrap_or_else(|rules| panic!("{}", listed(&rules)));
    }
}

/// The executor sees blocks with other parts or units than their peers, and inputs that are not left.
#[test]
fn a_wrong_plan_in_pairs_computes_something_else() {
    let ((_folder, imported), target) = (stored(&wide("families/qwen3")), small());
    let validated = kernel(&imported.graph, &target);
    let program = &validated.schedule().program;
    let of = steps(&validated, 32);
    let text = tokens(&imported, 75);
    let keys_and_values = expected(&imported, &text);
    // Launches of fewer rows than the plan has, too.
    let chunks: Vec<&[u32]> = text.chunks(29).collect();
    let differs = |plan: &Plan| difference(&keys_and_values, &execute(program, &imported, plan, &chunks, 5));
    assert!(differs(&of) < TOLERANCE);
    let (w, d) = paired(&of)[0];
    let Over::Units { n, .. } = of.divisions[d].over else { unreachable!() };
    let mut wrong: Vec<(&str, Plan)> = vec![];
    let mut add = |name, change: &dyn Fn(&mut Plan)| {
        let mut plan = of.clone();
        change(&mut plan);
        wrong.push((name, plan));
    };
    for (name, change) in unpaired() {
        // A division of its own: other products may have the same one.
        add(name, &|p| {
            let mut division = p.divisions[d].clone();
            change(&mut division.shares[0], n);
            p.waves[w].division.0 = p.divisions.len() as u32;
            p.divisions.push(division);
        });
    }
    add("no input of the next product", &|p| *then(p, w) = None);
    add("no squares", &|p| then(p, w).as_mut().unwrap().squares = None);
    add("squares of another wave", &|p| {
        let work = p.work.len();
        p.work.push(p.work[then(&mut p.clone(), w).unwrap().squares.unwrap().index()].clone());
        p.work[work].place = p.work_bytes().next_multiple_of(256);
        then(p, w).as_mut().unwrap().squares = Some(WorkId::from(work));
    });
    add("no weight of the norm", &|p| then(p, w).as_mut().unwrap().norm.as_mut().unwrap().weight = None);
    for (name, plan) in wrong {
        let found = differs(&plan);
        assert!(found > 1e-4, "{name}: {found:e}");
    }
}

/// Faults of the exchange of a wave kernel, each with the rule that it breaks.
fn faults(ptx: &str) -> Vec<String> {
    let functions = functions(ptx);
    let kernel = functions.iter().find(|f| f.name == ENTRY_POINT).expect("the entry point");
    let all = |begin: &str| -> Vec<usize> {
        (0..kernel.statements.len()).filter(|&at| kernel.statements[at].opcode.starts_with(begin)).collect()
    };
    let starts =
        |at: usize, begin: &str| !kernel.statements[at].guarded && kernel.statements[at].opcode.starts_with(begin);
    const END: &str = "red.release.gpu.global.add";
    const SEND: &str = "st.async.shared::cluster.mbarrier::complete_tx::bytes";
    const WAIT: &str = "mbarrier.try_wait.parity.relaxed.cluster";
    const MAY_SEND: &str = "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster";
    const SEES: &str = "fence.acquire.sync_restrict::shared::cluster.cluster";
    const RECEIVED: &str = "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster";
    let mut found = vec![];
    for (what, begin) in [("sends", SEND), ("waits", WAIT), ("ends of waves", END)] {
        if all(begin).is_empty() {
            found.push(format!("missing: no {what}"));
        }
    }
    // Cluster barriers: no block stores to one that is not there yet, or that has left.
    if all("barrier.cluster.arrive.release").len() != 2 || all("barrier.cluster.wait.acquire").len() != 2 {
        found.push("cluster: expected a barrier of the pair at the start and at the end".to_owned());
    }
    if !all("cp.async.bulk.tensor").is_empty() && all("fence.proxy.tensormap::generic.acquire.sys").is_empty() {
        found.push("maps: no fence before a tensor map is used".to_owned());
    }
    // A fence that waits for stores to global memory. `wait_expired` alone has one, in a function of its own.
    for begin in ["membar", "fence.sc", "fence.acq_rel", "fence.release.gpu", "fence.acquire.gpu"] {
        found.extend(all(begin).iter().map(|at| format!("slow: statement {at} is {begin}")));
    }
    if all("fence.proxy.async").into_iter().any(|at| kernel.statements[at].opcode == "fence.proxy.async") {
        found.push("slow: a fence of all state spaces".to_owned());
    }
    // 1: fenced since the last wave.
    let may_send = kernel.on_all_paths(0, |at, before| match () {
        () if starts(at, MAY_SEND) => 1,
        () if kernel.statements[at].opcode.starts_with(END) => 0,
        () => before,
    });
    let unfenced = all(SEND).into_iter().filter(|&at| may_send[at] == Some(0));
    found.extend(unfenced.map(|at| format!("send: a path to statement {at} has no fence in its wave")));
    // 1: fenced since the last wait.
    let received = kernel.on_all_paths(0, |at, before| match () {
        () if starts(at, RECEIVED) => 1,
        () if kernel.statements[at].opcode.starts_with(WAIT) || kernel.statements[at].opcode.starts_with(SEND) => 0,
        () => before,
    });
    let unfenced = all(END).into_iter().filter(|&at| received[at] == Some(0));
    found.extend(unfenced.map(|at| format!("received: a path to statement {at} has no fence after its exchange")));
    let touches =
        |s: &Statement| ["ld.shared", "st.shared", "st.async"].iter().any(|begin| s.opcode.starts_with(begin));
    for at in all(RECEIVED) {
        let (next, _) = kernel.next_after(at, |s| touches(s) || s.opcode.starts_with("bar"));
        if next.iter().any(|&next| touches(&kernel.statements[next])) {
            found.push(format!("received: shared memory is used between the fence of statement {at} and the barrier"));
        }
    }
    for at in all(WAIT) {
        let sees = |s: &Statement| !s.guarded && s.opcode.starts_with(SEES);
        let (next, _) = kernel.next_after(at, |s| sees(s) || touches(s));
        if !next.iter().all(|&next| sees(&kernel.statements[next])) {
            found.push(format!(
                "sees: a path from the wait of statement {at} has no fence before shared memory is read"
            ));
        }
    }
    found
}

/// The kernel of a plan with pairs, for all SMs.
fn in_pairs() -> KernelSource {
    let target = Target::builtin("h200").unwrap();
    let validated = kernel(&wide("families/qwen3").graph, &target);
    let proven = proven(&validated, &target, Form::Steps, 32).unwrap();
    emit(&proven, &target, Trace::Off)
}

#[test]
fn an_exchange_has_the_fences_that_its_argument_names() {
    let Some(nvrtc) = nvrtc("an_exchange_has_the_fences_that_its_argument_names") else { return };
    let source = in_pairs();
    let found = faults(&nvrtc.ptx(&source).unwrap());
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn an_exchange_without_one_of_its_fences_is_found() {
    let Some(nvrtc) = nvrtc("an_exchange_without_one_of_its_fences_is_found") else { return };
    let (matmul, kernel, sync) = ("waves/matmul.cuh", "waves/kernel.cuh", "runtime/sync.cuh");
    let before = "    fence_before_sending();\n";
    // Each rule is broken by one edit of a kernel: what is found must be exactly these rules.
    let broken: [&[(&str, &str, &str, &str)]; 3] = [
        &[
            (matmul, before, "", "send"),
            (matmul, "    fence_sent();\n", "", "sees"),
            (kernel, "if (M::PAIRS) fence_received();", "", "received"),
            (
                kernel,
                "    consume_waves<M, D>(p);\n  }\n  if (M::PAIRS) meet_peer();",
                "    consume_waves<M, D>(p);\n  }",
                "cluster",
            ),
        ],
        &[
            (matmul, before, "    if (c.warp() == 0) fence_before_sending();\n", "send"),
            (
                kernel,
                "if (M::PAIRS) fence_received();\n      c.barrier();",
                "c.barrier();\n      if (M::PAIRS && c.tid() == 32) fence_received();",
                "received",
            ),
            (
                sync,
                "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
                "fence.proxy.async",
                "slow",
            ),
        ],
        &[
            (matmul, before, "    fence_before_sending();\n    __threadfence();\n", "slow"),
            (matmul, "    if (copies_box && l.step == 0) l.see_box(box);\n", "", "maps"),
        ],
    ];
    let source = in_pairs();
    broken.into_par_iter().for_each(|edits| {
        let mut source = source.clone();
        for (header, from, to, _) in edits {
            edit(&mut source, header, from, to);
        }
        let found = faults(&nvrtc.ptx(&source).unwrap());
        assert_eq!(rules(&found), edits.iter().map(|(.., rule)| *rule).collect(), "{found:?}");
    });
}
