//! Tests `monobloc bench`: the check comes first, then ratios, and baselines of every kind that fail in every way.

use crate::cli_support::Place;
use crate::support::fixture;

/// A baseline in shell: `time` takes `us`, and `prepare` of position 9 is refused.
fn peer(place: &Place, us: &str) -> String {
    let script = format!(
        r#"while read -r line; do
  case "$line" in
    *'"open"'*) echo '{{"name":"shell","variants":["plain"]}}' ;;
    *'"position":9'*) echo '{{"error":"nine is not my number"}}' ;;
    *'"prepare"'*) echo '{{}}' ;;
    *) echo '{{"us_per_step":{us}}}' ;;
  esac
done
"#
    );
    format!("sh {}", place.write("peer.sh", script).display())
}

fn bench(place: &Place, baselines: &[&str], more: &str) -> crate::cli_support::Answer {
    place.manifest(&fixture("families/llama-gqa"), 24);
    let mut command = place.command(&format!("bench m.toml --rounds 3 --time 1s {more}"));
    for baseline in baselines {
        command.arg("--baseline").arg(baseline);
    }
    crate::cli_support::Answer::of(&mut command)
}

#[test]
fn a_verdict_stands_before_the_figures_and_baselines_have_ratios() {
    let place = Place::new();
    let slow = peer(&place, "1e9");
    let answer = bench(&place, &[&slow], "--position 0,9").code(1);
    let lines: Vec<&str> = answer.stdout.lines().collect();
    assert!(lines[0].starts_with("cpu on ") && lines[0].contains("fp32 weights"), "{answer:#?}");
    assert!(lines[1].starts_with("checked: 3 positions") && lines[1].ends_with("equal at 3"), "{answer:#?}");
    assert!(lines[2].starts_with("position      0 ") && lines[2].contains("µs a step"), "{answer:#?}");
    assert!(lines[3].contains("sh ") && lines[3].contains("plain: 1000000000.0 µs"), "{answer:#?}");
    // Any machine is faster than a baseline with a thousand seconds per step, and the printed ratio says so.
    let ratio: f64 = lines[3].split(", ").nth(2).unwrap().split('x').next().unwrap().parse().unwrap();
    assert!(ratio > 100.0, "{answer:#?}");
    assert!(lines[4].starts_with("position      9 "), "{answer:#?}");
    assert!(lines[5].contains("no figure: ") && lines[5].ends_with("nine is not my number"), "{answer:#?}");
    assert_eq!(lines.len(), 6, "{answer:#?}");
}

#[test]
fn another_monobloc_and_a_schedule_are_baselines() {
    let place = Place::new();
    place.manifest(&fixture("families/llama-gqa"), 24);
    let schedule = place.run("show schedule m.toml").code(0).stdout;
    place.write("same.mkir", &schedule);
    let serve = format!("{} bench m.toml --serve", env!("CARGO_BIN_EXE_monobloc"));
    let answer = bench(&place, &["same.mkir", &serve], "--json").code(0);
    let all = answer.json();
    assert_eq!(all["checked"]["argmax_agree"], 3, "{all}");
    let position = &all["positions"][0];
    let latency = position["latency_us_p50"].as_f64().unwrap();
    assert!(latency > 0.0 && position["latency_us_p10"].as_f64().unwrap() <= latency, "{all}");
    let baselines = position["baselines"].as_array().unwrap();
    assert_eq!(baselines.len(), 2, "{all}");
    assert_eq!((&baselines[0]["variant"], &baselines[1]["variant"]), (&"schedule".into(), &"cpu".into()), "{all}");
    for baseline in baselines {
        let figure = |name: &str| baseline[name].as_f64().unwrap_or_else(|| panic!("{name} of {baseline}"));
        assert!(figure("ratio_low") <= figure("ratio") && figure("ratio") <= figure("ratio_high"), "{baseline}");
        assert!(figure("latency_us_p10") <= figure("latency_us_p90") && figure("rounds") >= 3.0, "{baseline}");
    }
    // A benchmark is no trial.
    assert!(!place.path("flywheel/trials.csv").exists());
}

#[test]
fn a_baseline_that_cannot_start_ends_it_before_anything_is_timed() {
    for (baseline, expected) in [
        ("no-such-program-here", "ended without an answer to `open`"),
        ("echo hello", "answered `open` with `hello`, expected a JSON object"),
        ("echo '{\"error\":\"no torch\"}'", "`echo '{\"error\":\"no torch\"}'`: no torch"),
        ("echo '{\"name\":\"x\",\"variants\":[]}'", "expected `name` and at least one of `variants`"),
        ("sleep 100", "did not answer `open` within 1 s"),
    ] {
        let answer = bench(&Place::new(), &[baseline], "--baseline-timeout 1s").fault(3, &["baseline ", expected]);
        assert!(!answer.stdout.contains("µs"), "{answer:#?}");
    }
}

#[test]
fn a_baseline_of_one_row_says_so_when_it_is_asked_for_more() {
    let place = Place::new();
    place.manifest(&fixture("families/llama-gqa"), 24);
    place.write("same.mkir", "mkir 2\n");
    let answer = bench(&place, &["same.mkir"], "--rows 2");
    answer.refused(&["baseline `same.mkir`: a schedule decodes one sequence", "leave out `--rows` and `--prompt`"]);
    let questions = ["\"position\":0", "\"position\":0,\"rows\":1", "\"position\":0,\"rows\":8", "\"prompt\":5"]
        .map(|what| format!("{{\"do\":\"prepare\",\"variant\":\"cpu\",{what}}}\n"))
        .concat();
    let answer = crate::cli_support::Answer::of(place.command("bench m.toml --serve").write_stdin(questions)).code(0);
    let ready: Vec<bool> =
        answer.stdout.lines().map(|line| !line.contains("this baseline times steps of one row")).collect();
    assert_eq!(ready, [true, true, false, false], "{answer:#?}");
}

#[test]
fn figures_that_cannot_be_are_no_figures() {
    for us in ["0", "-1", "\"fast\"", "1e999"] {
        let place = Place::new();
        let odd = peer(&place, us);
        let answer = bench(&place, &[&odd], "").code(1);
        assert!(answer.stdout.contains("plain: no figure: "), "{answer:#?}");
    }
}

#[test]
fn schedules_of_others_and_positions_without_room_are_refused() {
    let place = Place::new();
    place.write("broken.mkir", "mkir 2\n");
    bench(&place, &["broken.mkir"], "").refused(&["broken.mkir"]);
    bench(&place, &["none.mkir"], "").code(2);
    let other = Place::new();
    other.manifest(&fixture("families/qwen3"), 24);
    place.write("other.mkir", other.run("show schedule m.toml").code(0).stdout);
    let answer = bench(&place, &["other.mkir"], "");
    assert!(answer.code != 0 && !answer.stdout.contains("schedule:"), "{answer:#?}");
    bench(&place, &[], "--position 23").refused(&["position 23 leaves no room", "at most 22"]);
}

#[test]
fn histories_of_many_lengths_are_those_of_several_rows_on_a_gpu() {
    let place = Place::new();
    for more in ["--others 3", "--rows 2 --others 3 --prompt 5"] {
        let answer = bench(&place, &[], more);
        assert!(answer.code == 2 && answer.stderr.contains("--others"), "{answer:#?}");
    }
    for more in ["--rows 1,8 --others 3 --position 5", "--rows 8 --others 6 --position 7,5"] {
        bench(&place, &[], more)
            .refused(&["`--others` wants `--rows` of 2 and more, and a `--position` that is no smaller"]);
    }
    bench(&place, &[], "--rows 8 --others 3 --position 5").refused(&["target `cpu` has no kernels for rows"]);
}

/// Needs torch in `python3`, and no GPU.
#[test]
fn torch_computes_the_experts_that_rows_choose() {
    let test = "torch_computes_the_experts_that_rows_choose";
    let python = |arguments: &[&str]| {
        let output =
            std::process::Command::new("python3").args(arguments).current_dir(env!("CARGO_MANIFEST_DIR")).output();
        let output = output.map_err(|error| error.to_string())?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
        if output.status.success() { Ok(String::from_utf8_lossy(&output.stdout).to_string()) } else { Err(said) }
    };
    if let Err(said) = python(&["-c", "import torch"]) {
        let reason = said.lines().last().unwrap_or_default().to_string();
        let required = std::env::var_os("MONOBLOC_REQUIRE_TORCH").is_some_and(|value| value == "1");
        assert!(!required, "`MONOBLOC_REQUIRE_TORCH` is set, but {reason}");
        return crate::skipped(test, "torch", &reason);
    }
    let said =
        python(&["tests/it/torch_experts.py", "src/pipeline/torch_decode.py"]).unwrap_or_else(|said| panic!("{said}"));
    let errors: Vec<f64> = said.lines().map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    // Four models, three numbers of rows, two formats, with and without a compiler that fuses.
    assert_eq!(errors.len(), 48, "{said}");
    assert!(errors.iter().all(|error| *error < 1e-5), "{said}");
}
