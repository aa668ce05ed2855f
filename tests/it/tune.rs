//! Tests campaigns as users see them: kept, interrupted, killed, resumed, warm-started from a corpus, and with failing trials.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use monobloc::cache::{Cache, Places};
use monobloc::candidate::Candidate;
use monobloc::flywheel::{Corpus, Decision, Proposer, Trial};
use monobloc::lower::LayerOp;
use monobloc::manifest::Manifest;
use monobloc::pipeline::{self, Tuned, Tuning, Workspace};
use monobloc::report::Report;
use monobloc::search::{Space, histories};
use serde_json::json;

use crate::cli_support::{Place, manifest_text};

/// Long enough that attention may be split in several ways: more points than any test visits.
const CONTEXT: u32 = 1000;

/// A place with a copy of a fixture that says it was made for longer contexts; the folder of the copy.
fn roomy(model: &str) -> (Place, PathBuf) {
    let place = Place::new();
    let checkpoint = place.checkpoint(model);
    let config = fs::read_to_string(checkpoint.join("config.json")).unwrap();
    let longer = config.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 1024");
    assert_ne!(config, longer);
    fs::write(checkpoint.join("config.json"), longer).unwrap();
    (place, checkpoint)
}

fn place() -> Place {
    let (place, checkpoint) = roomy("families/llama-gqa");
    place.manifest(&checkpoint, CONTEXT);
    place
}

fn trials_of(path: &Path) -> Vec<Trial> {
    let corpus = Corpus::read(&[path]).unwrap();
    assert_eq!(corpus.broken, []);
    corpus.trials
}

/// Numbers of the trials that ran, in the order of their rows.
fn numbers(path: &Path) -> Vec<u32> {
    trials_of(path).iter().filter_map(|trial| trial.facts().point.trial).collect()
}

#[test]
fn a_campaign_is_printed_resumed_and_reported() {
    let place = place();
    let trials = place.path("flywheel/trials.csv");
    place.run("next m.toml").code(0);
    place.run("report m.toml").refused(&["`m` has no campaign yet", "monobloc tune m.toml"]);
    assert!(place.run("status m.toml").code(0).stdout.contains("m on cpu: 0 campaigns"));

    let first = place.run("tune m.toml --max-trials 3").code(0);
    assert!(first.stdout.contains("cpu: the budget of 3 trials is spent; 3 trials, "), "{first:#?}");
    assert!(first.stderr.contains("trial 0 default: default: "), "{first:#?}");
    let rows = numbers(&trials);
    assert_eq!(rows[..4], [0, 1, 2, 3]);

    // The same command has nothing to do; a larger budget continues after the last trial.
    let again = place.run("tune m.toml --max-trials 3").code(0);
    assert!(again.stdout.contains("3 trials, 0 measurements now"), "{again:#?}");
    assert_eq!(numbers(&trials), rows);
    assert!(place.run("next m.toml --max-trials 3").code(1).stdout.starts_with("cpu: stop: the budget of 3 trials"));
    let more = place.run("tune m.toml --max-trials 5").code(0);
    assert!(more.stderr.contains(&format!("resumes after trial {}", rows.len() - 1)), "{more:#?}");
    let all = numbers(&trials);
    assert_eq!(all, (0..all.len() as u32).collect::<Vec<_>>(), "no trial is repeated or left out");

    let status = place.run("status m.toml --json").code(0).json();
    let campaign = &status[0]["campaigns"][0];
    assert_eq!((campaign["trials"].as_u64(), campaign["failed"].as_u64()), (Some(5), Some(0)), "{status}");
    assert_eq!(status[0]["built"], place.run("tune m.toml --max-trials 5 --json").code(0).json()[0]["candidate"]);

    // All commands show one figure; the default is exactly 1.
    let tuned = place.run("tune m.toml --max-trials 5 --json").code(0).json();
    let ratio = &tuned[0]["ratio_against_default"];
    assert_eq!(ratio, &campaign["ratio_against_default"], "{status}");
    assert_eq!(ratio, &place.run("report m.toml --json").code(0).json()[0]["campaigns"][0]["ratio_against_default"]);
    let times = 1.0 / ratio["p50"].as_f64().unwrap();
    let is_default = tuned[0]["is_default"].as_bool().unwrap();
    assert_eq!(is_default, ratio["p50"] == 1.0 && ratio["low"] == 1.0, "{tuned}");
    let [said, shown] = ["tune m.toml --max-trials 5", "status m.toml"].map(|run| place.run(run).code(0).stdout);
    let words = format!("{times:.3} times as fast as the default");
    assert!(is_default || (said.contains(&words) && shown.contains(&words)), "{words}: {said}{shown}");
    place.run("report m.toml --out page.html").code(0);
    let page = fs::read_to_string(place.path("page.html")).unwrap();
    assert!(page.contains(&format!("<b>{times:.3}×</b>")), "the page headlines another figure than {times:.3}");
    let page = fs::read_to_string(place.path("page.html")).unwrap();
    for needed in ["<!doctype html>", "Search curve", "Latency against floor", "µs at 0 (p10 to p90)", "</html>"] {
        assert!(page.contains(needed), "no `{needed}` in the page");
    }
    // The namespace of SVG is a name, not a place.
    let page = page.replace("http://www.w3.org/2000/svg", "");
    assert!(["<script", "http:", "https:", "src=", "@import", "url("].iter().all(|outside| !page.contains(outside)));
    assert_eq!(page.matches("<tr").count(), 1 + all.len(), "a row for each trial, and the head");

    let rank = place.run("flywheel rank --json").code(0).json();
    assert_eq!(rank["cost_model"][0]["campaign"], "m on cpu");
    assert_eq!(rank["cost_model"][0]["rank_correlation"], serde_json::Value::Null, "nothing was predicted");
}

#[test]
fn a_target_without_wave_kernels_refuses_their_search() {
    let (place, checkpoint) = roomy("families/llama-gqa");
    let text = manifest_text(&format!("path:{}", checkpoint.display()), CONTEXT);
    for kernel in ["chunk", "wave:32"] {
        place.write("m.toml", text.replace("trials = 0", &format!("trials = 2\nkernel = \"{kernel}\"")));
        place.run("tune m.toml").refused(&[&format!("target `cpu` has no kernel `{kernel}`"), "kernel = \"decode\""]);
    }
    // A build has nothing to search then, and one op alone is one of the decode kernel.
    place.run("build m.toml").code(0);
    place.run("tune-op m.toml attention --max-trials 1").code(0);
    place.write("m.toml", text.replace("[[target]]", "[[target]]\ncandidate = \"wave_pass=16\""));
    place.run("build m.toml").refused(&["`wave_pass=16` is of wave kernels", "`kernel` in `[search]`"]);
}

#[test]
fn a_build_spends_the_budget_of_its_manifest_once() {
    let (place, checkpoint) = roomy("families/llama-gqa");
    let text = manifest_text(&format!("path:{}", checkpoint.display()), CONTEXT);
    place.write("m.toml", text.replace("trials = 0", "trials = 2"));
    let trials = place.path("flywheel/trials.csv");
    place.run("build m.toml --no-search").code(0);
    assert_eq!(numbers(&trials), [0u32; 0], "a build alone belongs to no campaign");
    let built = place.run("build m.toml").code(0);
    assert!(built.stderr.contains("the budget of 2 trials is spent"), "{built:#?}");
    let searched = numbers(&trials);
    assert!(searched.len() >= 3, "{searched:?}");
    let again = place.run("build m.toml").code(0);
    assert!(again.stderr.contains("no work to do") && !again.stderr.contains("trial"), "{again:#?}");
    assert_eq!(numbers(&trials), searched);
}

#[test]
fn the_corpus_of_the_repository_is_sound_and_of_this_space() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("flywheel/corpus");
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        for trial in trials_of(&path) {
            let facts = trial.facts();
            assert!(!facts.machine.device_name.is_empty(), "{}: a row that no device measured", path.display());
            let remedy = "rows of another space teach nothing: measure again, or remove the file";
            assert!(Space::contains(&facts.point.space), "{}: {remedy}", path.display());
        }
    }
}

/// Waits until a campaign has this many rows.
fn wait_for_rows(path: &Path, rows: usize) {
    let started = Instant::now();
    while Corpus::read(&[path]).unwrap().trials.len() < rows {
        assert!(started.elapsed() < Duration::from_secs(120), "no {rows} rows in two minutes");
        sleep(Duration::from_millis(10));
    }
}

#[test]
fn ctrl_c_keeps_everything_and_the_same_command_resumes() {
    let place = place();
    let trials = place.path("flywheel/trials.csv");
    let command = "tune m.toml --max-trials 60";
    let child = place.process(command).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_for_rows(&trials, 4);
    // As `timeout` sends it: to the process, and to its group.
    let twice = format!("kill -INT {0}; sleep 0.01; kill -INT {0}", child.id());
    assert!(Command::new("sh").args(["-c", &twice]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    assert!(said.contains("cpu: interrupted; "), "{said}");
    let before = numbers(&trials);
    assert!(before.len() >= 4);

    let budget = before.len() + 2;
    place.run(&format!("tune m.toml --max-trials {budget}")).code(0);
    let after = numbers(&trials);
    assert_eq!(after[..before.len()], before);
    assert_eq!(after, (0..after.len() as u32).collect::<Vec<_>>());
}

#[test]
fn an_early_interrupt_of_a_search_is_130() {
    let place = place();
    let mut child = place.process("tune m.toml --max-trials 60").stderr(Stdio::piped()).spawn().unwrap();
    // The search was announced, and its child process starts.
    let mut stderr = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    std::io::BufRead::read_line(&mut stderr, &mut said).unwrap();
    assert!(Command::new("sh").args(["-c", &format!("kill -INT {}", child.id())]).status().unwrap().success());
    std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
    assert!(!said.contains("error: "), "{said}");
}

#[test]
fn an_answer_without_a_candidate_ends_the_search() {
    let place = place();
    let refused = place.run("tune m.toml --max-trials 3 --proposer cat");
    let refused = refused.fault(3, &["expected the key `candidate`", "proposer `cat`"]);
    // `cat` answers with the whole question, which has some thousand characters.
    assert!(refused.stderr.lines().all(|line| line.chars().count() < 500), "{refused:#?}");
}

#[test]
fn a_long_candidate_that_is_refused_is_quoted_in_part() {
    let place = place();
    let answer = format!("while read -r q; do echo '{{\"candidate\": \"{}=1\"}}'; done", "splits".repeat(1000));
    let output = place.command("tune m.toml --max-trials 1 --proposer").arg(answer).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let note = said.lines().find(|line| line.contains("proposer: `splitssplits")).expect(&said);
    assert!(note.contains('…') && note.chars().count() < 700, "{note}");
}

#[test]
fn every_command_counts_the_same_trials() {
    let place = place();
    let tuned = place.run("tune m.toml --max-trials 3").code(0);
    let json = &place.run("status m.toml --json").code(0).json()[0]["campaigns"][0];
    let counted = format!("; {} trials, ", json["trials"]);
    assert!(tuned.stdout.contains(&counted) && json["trials"] == 3, "{tuned:#?} {json}");
    let best_is_default = json["best_is_default"] == true;
    assert!(json["kept"].as_u64().unwrap() <= 3 && (best_is_default || json["kept"] != 0), "{json}");
    // The ratio of the log is that of the rows, which the report reads.
    let log = tuned.stderr.lines().find_map(|line| line.split_once(" of the incumbent's time")?.0.rsplit(' ').next());
    place.run("report m.toml").code(0);
    let page = fs::read_to_string(place.path("report.html")).unwrap();
    let log = log.expect("a trial");
    assert!(page.contains(&format!("<td>{log} (")), "{log} in {page}");
    assert!(page.contains("Written by monobloc") && page.contains("monobloc report m.toml"), "{page}");
    assert!(page.contains("trials from 20"), "{page}");
    if !best_is_default {
        assert!(tuned.stderr.contains("closing duel: default / best = "), "{tuned:#?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_campaign_loses_the_trial_in_flight_at_most() {
    let place = place();
    let trials = place.path("flywheel/trials.csv");
    let mut child =
        place.process("tune m.toml --max-trials 60").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_for_rows(&trials, 3);
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id())).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    // The process of the trials ends with its parent.
    let started = Instant::now();
    for id in children.split_whitespace() {
        let is_there = || fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
        while is_there() {
            assert!(started.elapsed() < Duration::from_secs(60), "process {id} outlives the campaign");
            sleep(Duration::from_millis(20));
        }
    }
    let before = numbers(&trials);
    assert!(before.len() >= 3 && before == (0..before.len() as u32).collect::<Vec<_>>(), "{before:?}");
    place.run(&format!("tune m.toml --max-trials {}", before.len() + 1)).code(0);
    let after = numbers(&trials);
    assert!(after.len() > before.len() && after == (0..after.len() as u32).collect::<Vec<_>>(), "{after:?}");
}

#[test]
fn a_program_proposes_and_gets_the_same_gate() {
    let place = place();
    let script = "\
n=0
while read -r question; do
  n=$((n + 1))
  echo \"$question\" >> questions.jsonl
  case $n in
    1) echo '{\"candidate\": \"sms=1\"}' ;;
    2) echo '{\"candidate\": \"sms=99\"}' ;;
    3) echo '{\"candidate\": \"wings=2\"}' ;;
    4) echo '{\"candidate\": \"sms=3;splits=6\"}' ;;
    *) echo '{\"candidate\": null}' ;;
  esac
done
";
    place.write("propose.sh", script);
    let command = |words: &[&str]| {
        let mut command = place.command("tune m.toml --max-trials 5 --proposer");
        command.args(words);
        crate::cli_support::Answer::of(&mut command)
    };
    let answer = command(&["sh propose.sh"]).code(0);
    for refused in ["`sms=99`: `sms` is 99, expected 1 to 4", "`wings=2`: unknown knob `wings`"] {
        assert!(answer.stderr.contains(refused), "{answer:#?}");
    }
    let external: Vec<String> = trials_of(&place.path("flywheel/trials.csv"))
        .iter()
        .filter(|trial| trial.facts().point.proposer == Proposer::External)
        .map(|trial| trial.facts().point.candidate.split(';').next().unwrap().to_string())
        .collect();
    assert_eq!(external, ["sms=1", "sms=3"]);
    let asked = fs::read_to_string(place.path("questions.jsonl")).unwrap();
    let questions: Vec<serde_json::Value> = asked.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(questions[2]["refused"], "`sms` is 99, expected 1 to 4 on `cpu`");
    assert_eq!(questions[3]["refused"], "unknown knob `wings`");
    assert_eq!(questions[4]["refused"], serde_json::Value::Null);
    assert!(questions[0]["knobs"].as_array().unwrap().iter().any(|knob| knob["name"] == "splits"));
    assert_eq!(questions[1]["tried"].as_array().unwrap().len(), 2);

    fs::remove_dir_all(place.path("flywheel")).unwrap();
    let remedy = "it reads one JSON object a line, and answers";
    command(&["echo hello; cat"]).fault(3, &["answered `hello`, expected JSON", remedy]);
    command(&["sh -c 'exit 4'"]).fault(3, &["gave no answer: the child process ended with exit code 4", remedy]);
}

fn repository_corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("flywheel/corpus/h200.csv.zst")
}

/// A child with invented answers: by a checksum of the candidate, `FAULTS` of them are wrong, late, crashes or nonsense.
/// `served` has one line for each job, with question and answer.
/// Without faults, fewer SMs are faster.
const FAKE: &str = r#"
time_of() { case $1 in sms=1\;*) echo 80.5 ;; sms=2\;*) echo 90.5 ;; sms=3\;*) echo 110.5 ;; *) echo 100.5 ;; esac; }
while read -r job; do
  candidate=${job#*\"candidate\":\"}; candidate=${candidate%%\"*}
  set -- $(printf %s "$candidate$SALT" | cksum)
  fault=$(($1 % 16)); noise=$(($1 / 16 % 100))
  [ "$candidate" = "$DEFAULT" ] && fault=15
  [ "$FAULTS" = none ] && fault=15
  case $fault in
    0) [ "$noise" -lt 40 ] && { echo "$candidate hang" >> served; exec sleep 60; }
      echo "$candidate crash" >> served; kill -ABRT $$ ;;
    1|2) echo "$candidate crash" >> served; kill -SEGV $$ ;;
    3|4) echo "$candidate exit" >> served; exit 9 ;;
    5|6) echo "$candidate garbage" >> served; echo 'Segmentation fault (core dumped)'; continue ;;
    7|8|9) echo "$candidate wrong" >> served
      echo '{"answer":"failed","verdict":"fail","detail":"error at position 5","figures":null,"check_ms":1.0}'
      continue ;;
    10) echo "$candidate lost" >> served
      echo '{"answer":"failed","verdict":"crash","detail":"an illegal address","figures":null,"check_ms":1.0}'
      continue ;;
    11) echo "$candidate senseless" >> served; b=0.0 ;;
    12) echo "$candidate senseless" >> served; b=-4.5 ;;
    *) echo "$candidate ok" >> served; b=1$noise.5 ;;
  esac
  a=100.5
  if [ "$FAULTS" = none ]; then
    incumbent=${job#*\"incumbent\":\"}
    a=$(time_of "$incumbent"); b=$(time_of "$candidate")
  fi
  rounds="[$a,$b,$b,$a]"
  rounds="$rounds,$rounds,$rounds,$rounds,$rounds"
  case $job in *'"incumbent":null'*) rounds='[]' ;; *) rounds="[[0,[$rounds]]]" ;; esac
  echo '{"answer":"timed","figures":{"positions":3,"error_abs_max":0.0,"error_rel_l2":0.0,"kl_max":0.0,"argmax_agree":3},"timed":[{"position":0,"steps_per_launch":2,"samples":10,"latency_us_p10":99.5,"latency_us_p50":100.5,"latency_us_p90":101.5,"bytes_per_step":1000,"floor_us":null,"clock_sm_mhz":null,"clock_mem_mhz":null,"throttle":""}],"rounds":'$rounds',"check_ms":1.0,"measure_ms":1.0}'
done
"#;

/// Campaigns of a manifest whose trials a script invents.
struct Fake {
    place: Place,
    manifest: Manifest,
    trials: PathBuf,
    faults: &'static str,
}

impl Fake {
    fn new(model: &str, seed: u64, faults: &'static str) -> Fake {
        let (place, checkpoint) = roomy(model);
        place.write("fake.sh", FAKE);
        let mut manifest = Manifest::load(&place.manifest(&checkpoint, CONTEXT)).unwrap();
        manifest.search.seed = seed;
        let trials = place.path("flywheel/trials.csv");
        Fake { place, manifest, trials, faults }
    }

    fn tune(&self, trials: u32) -> Tuned {
        self.search(None, trials)
    }

    fn search(&self, op: Option<LayerOp>, trials: u32) -> Tuned {
        let (root, shared, key_file, remote) = (self.place.path("cache"), None, None, None);
        let places = Places { root, shared, shared_read_only: false, key_file, remote };
        let cache = Cache::open_places(&places, |_| {}).unwrap();
        let notes = fs::OpenOptions::new().create(true).append(true).open(self.place.path("notes")).unwrap();
        let report = Report::to_writer(Box::new(notes));
        let workspace = Workspace { cache, report, trials: self.trials.clone() };
        let target = self.manifest.targets[0].clone();
        let default = pipeline::show(&workspace, &self.manifest, &target, "candidate", None).unwrap();
        let child = |_: &monobloc::target::Target| {
            let mut command = Command::new("sh");
            command.arg(self.place.path("fake.sh")).current_dir(self.place.path(""));
            command.env("DEFAULT", default.trim()).env("FAULTS", self.faults);
            command.env("SALT", self.manifest.search.seed.to_string());
            command
        };
        let trial_timeout = Some(Duration::from_millis(500));
        let tuning =
            Tuning { op, trials, minutes: 60.0, proposer: None, trial_timeout, child: &child, stop: &|| false };
        pipeline::tune(&workspace, &self.manifest, &target, &tuning).unwrap()
    }

    /// How the script answered each candidate.
    fn served(&self) -> BTreeMap<String, String> {
        let served = fs::read_to_string(self.place.path("served")).unwrap();
        served
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(c, how)| (c.to_string(), how.to_string()))
            .collect()
    }
}

#[test]
fn of_a_thousand_trials_with_faults_none_becomes_the_incumbent_and_no_row_is_lost() {
    let (mut jobs, mut faults, mut kinds) = (0, 0, BTreeSet::new());
    let shipped = String::from_utf8(zstd::decode_all(fs::File::open(repository_corpus()).unwrap()).unwrap()).unwrap();
    let space = trials_of(&repository_corpus())[0].facts().point.space.to_string();
    let stale = shipped.replace(&space, &space.chars().rev().collect::<String>());
    let stale = &stale[..stale.len() - 300];
    for seed in 0.. {
        if jobs >= 1000 {
            break;
        }
        let fake = Fake::new("families/llama-gqa", seed, "some");
        // Beside it a corpus of another space, whose last row a crash cut.
        fake.place.write("flywheel/corpus/stale.csv", stale);
        let tuned = fake.tune(250);
        let rows = trials_of(&fake.trials);
        let served = fake.served();
        jobs += served.len();
        for trial in &rows {
            let point = &trial.facts().point;
            let Some(how) = served.get(&point.candidate) else { continue };
            assert_ne!(point.proposer, Proposer::Prior, "a stale row taught something");
            if how != "ok" {
                let kept = point.decision.is_some_and(Decision::is_kept);
                assert!(!kept, "{} answered {how} and was kept", point.candidate);
            }
        }
        let told: BTreeSet<&str> = rows.iter().map(|trial| trial.facts().point.candidate.as_str()).collect();
        for (candidate, how) in &served {
            assert!(told.contains(candidate.as_str()), "{candidate} answered {how} and has no row");
            faults += usize::from(how != "ok");
            kinds.insert(how.clone());
        }
        assert_eq!(served.get(&tuned.candidate).map_or("ok", String::as_str), "ok", "{tuned:?}");
        let history = histories(&rows).pop().unwrap();
        assert!(history.entries.iter().zip(history.entries.iter().filter_map(|e| e.number)).count() >= served.len());
    }
    assert!(faults >= 500, "{faults} faults among {jobs} trials");
    assert_eq!(kinds.len(), 8, "{kinds:?}");
}

#[test]
fn a_shared_corpus_keeps_the_trials_that_failed() {
    let fake = Fake::new("families/llama-gqa", 0, "some");
    fake.tune(60);
    let verdicts = |path: &Path| -> Vec<(String, &str, String)> {
        let row = |trial: &Trial| {
            (trial.facts().point.candidate.clone(), trial.verdict().name(), trial.verdict().detail().to_string())
        };
        trials_of(path).iter().map(row).collect()
    };
    let own = verdicts(&fake.trials);
    fake.place.run("flywheel export --own --share --out shared.csv.zst").code(0);
    assert_eq!(verdicts(&fake.place.path("shared.csv.zst")), own);
    let names: BTreeSet<&str> = own.iter().map(|(_, verdict, _)| *verdict).collect();
    assert!(["ok", "fail", "crash"].iter().all(|name| names.contains(name)), "{names:?}");
    assert!(own.iter().any(|(.., detail)| detail == "error at position 5"), "{own:?}");
}

#[test]
fn good_candidates_of_one_model_are_tried_first_on_another_and_stale_rows_are_ignored() {
    let teacher = Fake::new("families/llama-gqa", 0, "none");
    teacher.tune(30);
    let best = histories(&trials_of(&teacher.trials)).pop().unwrap().incumbent().unwrap().candidate.clone();
    let notes = fs::read_to_string(teacher.place.path("notes")).unwrap();
    assert!(best.sms <= 2, "{best}: {notes}");

    let pupil = Fake::new("families/qwen2", 0, "none");
    let corpus = fs::read_to_string(&teacher.trials).unwrap();
    pupil.place.write("flywheel/corpus/teacher.csv", &corpus);
    pupil.tune(3);
    let first = trials_of(&pupil.trials).into_iter().find(|trial| trial.facts().point.trial == Some(1)).unwrap();
    let point = &first.facts().point;
    assert_eq!(point.proposer, Proposer::Prior);
    let tried = Candidate::parse(&point.candidate, &best).unwrap();
    assert!(tried.sms <= 2 && point.decision == Some(Decision::Faster), "{tried}");
    assert!(fs::read_to_string(pupil.place.path("notes")).unwrap().contains("1 earlier campaign to learn from"));
    let unchanged = fs::read_to_string(pupil.place.path("flywheel/corpus/teacher.csv")).unwrap();
    assert_eq!(unchanged, corpus, "a corpus is read only");

    // Compared with a cold campaign of the same model, which shows how much the corpus helped.
    let alone = Fake::new("families/qwen2", 1, "none");
    alone.tune(30);
    let study =
        alone.place.run(&format!("flywheel study {} {} --plots plots", alone.trials.display(), pupil.trials.display()));
    let study = study.code(0).stdout;
    assert!(study.contains("m on cpu: the best of all cold campaigns takes 0.801 of the default's time"), "{study}");
    let median = study.lines().find(|line| line.starts_with("| median | ")).expect("a line of medians");
    assert!(median.contains(" | 1 | | | ") && median.ends_with(" % |"), "{study}");
    let plot = fs::read_to_string(alone.place.path("plots/m-on-cpu.svg")).unwrap();
    assert_eq!(plot.matches("<polyline").count(), 2, "a curve each");
    // `--warm` decides which campaigns are warm, not the candidates that they tried.
    let said = alone.place.run(&format!("flywheel study {} --warm {}", pupil.trials.display(), alone.trials.display()));
    assert!(said.code(0).stdout.contains("the best of all cold campaigns takes"));
    let lone = alone.place.run(&format!("flywheel study {}", alone.trials.display()));
    lone.refused(&["no cold and warm campaigns of one model", "run `monobloc tune` with several seeds"]);

    // With another grid of knobs, the same rows belong to another space.
    let space = trials_of(&teacher.trials)[0].facts().point.space.to_string();
    let stale = Fake::new("families/qwen2", 0, "none");
    stale.place.write("flywheel/corpus/teacher.csv", corpus.replace(&space, &space.chars().rev().collect::<String>()));
    stale.tune(3);
    let rows = trials_of(&stale.trials);
    assert!(rows.iter().all(|trial| trial.facts().point.proposer != Proposer::Prior));
    let said = fs::read_to_string(stale.place.path("notes")).unwrap();
    assert!(said.contains("rows are of another space of knobs and teach nothing here"), "{said}");
}

#[test]
fn results_of_an_op_alone_are_tried_first_and_have_no_other_effect() {
    let fake = Fake::new("families/llama-gqa", 0, "none");
    let tuned = fake.search(Some(LayerOp::Attention), 30);
    assert!(!tuned.is_default, "{tuned:?}");
    let rows = trials_of(&fake.trials);
    assert!(rows.iter().all(|row| row.facts().model.family == "LlamaForCausalLM:attention"));
    let best = histories(&rows).pop().unwrap().incumbent().unwrap().candidate.clone();
    assert!(best.sms <= 2, "{best}");

    fake.tune(1);
    let whole: Vec<Trial> =
        trials_of(&fake.trials).into_iter().filter(|row| row.facts().model.op().is_none()).collect();
    let first = whole.iter().find(|row| row.facts().point.trial == Some(1)).unwrap();
    assert_eq!(first.facts().point.proposer, Proposer::Prior);
    assert_eq!(Candidate::parse(&first.facts().point.candidate, &best).unwrap().sms, best.sms);
    let said = fs::read_to_string(fake.place.path("notes")).unwrap();
    assert!(!said.contains("earlier campaign"), "an op is no campaign of the model: {said}");
    assert!(fake.place.run("status m.toml").code(0).stdout.contains("m on cpu: 1 campaign"));
}

/// Rows name the target with its devices, which have equal numbers of SMs, and a build takes the best of them.
#[test]
fn a_target_of_two_devices_is_searched() {
    let place = place();
    let text = fs::read_to_string(place.path("m.toml")).unwrap();
    place.write("m.toml", text.replace("record = \"cpu\"", "record = \"cpu\"\ndevices = 2"));
    let tuned = place.run("tune m.toml --max-trials 4 --json").code(0).json();
    assert_eq!((&tuned[0]["target"], &tuned[0]["trials"]), (&json!("cpu-x2"), &json!(4)));
    let rows = trials_of(&place.path("flywheel/trials.csv"));
    for row in &rows {
        let machine = &row.facts().machine;
        assert_eq!((machine.target.as_str(), machine.devices, machine.sm_count % 2), ("cpu-x2", 2, 0));
    }
    assert!(rows.len() > 4, "{rows:?}");
    assert!(rows.iter().all(|row| row.verdict().name() == "ok"), "{rows:?}");
    assert_eq!(place.run("status m.toml --json").code(0).json()[0]["built"], tuned[0]["candidate"]);
    let found = place.run("tune-op m.toml down --max-trials 1").code(0);
    assert!(found.stdout.starts_with("cpu-x2: "), "{found:#?}");
}

#[test]
fn an_op_is_tuned_alone_by_its_name() {
    let place = place();
    place
        .run("tune-op m.toml gate")
        .refused(&["'gate'", "expected one of `qkv`, `attention`, `o`, `up`, `down`, `head`"]);
    let found = place.run("tune-op m.toml down --max-trials 2").code(0);
    assert!(found.stderr.contains("trial 1 ") && found.stdout.starts_with("cpu: "), "{found:#?}");
    let rows = trials_of(&place.path("flywheel/trials.csv"));
    assert!(rows.iter().all(|row| row.facts().model.op() == Some("down") && row.verdict().name() == "ok"), "{rows:?}");
    // The same command resumes.
    let again = place.run("tune-op m.toml down --max-trials 2 --json").code(0);
    assert!(again.stdout.contains("\"ran\": 0"), "{again:#?}");
}

#[test]
fn a_full_disk_stops_a_campaign_which_resumes_when_there_is_room() {
    let place = place();
    place.run("tune m.toml --max-trials 1").code(0);
    let trials = place.path("flywheel/trials.csv");
    // Blank lines up to 4 MiB, and room for a few rows after them: a limit on the size of files fails like a full disk, and
    // no other file of a campaign is so large.
    let text = fs::read_to_string(&trials).unwrap();
    let padding = (" ".repeat(4095) + "\n").repeat(1024);
    let whole = numbers(&trials).len();
    fs::write(&trials, text + &padding).unwrap();
    let inner = place.process("tune m.toml --max-trials 40");
    let mut shell = Command::new("sh");
    // Blocks of 512 bytes, as POSIX has it.
    let blocks = fs::metadata(&trials).unwrap().len() / 512 + 12;
    let limited = format!("trap '' XFSZ; ulimit -f {blocks} && exec \"$0\" \"$@\"");
    shell.args(["-c", &limited]).arg(inner.get_program()).args(inner.get_args());
    shell.current_dir(place.path("")).env("HOME", place.path("")).stdin(Stdio::null());
    let output = shell.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(said.contains("cannot append to") && said.contains("free space on that disk"), "{said}");
    let kept = numbers(&trials);
    assert!(kept.len() >= whole, "{kept:?}");
    place.run(&format!("tune m.toml --max-trials {}", kept.len() + 1)).code(0);
    let after = numbers(&trials);
    assert!(after.len() > kept.len() && after == (0..after.len() as u32).collect::<Vec<_>>(), "{after:?}");
}
