//! Tests the workflows of docs/fleet.md and of this repository as their engines run them: the YAML is parsed, the matrix is expanded, and a
//! shell runs the lines, each job on a machine of its own.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cli_support::{Place, manifest_text};
use crate::fleet::example;
use crate::support::fixture;

/// Machines with a cache in common, as a remote one is.
struct Team {
    folder: TempDir,
    nvrtc: PathBuf,
}

impl Team {
    fn new(test: &str) -> Option<Team> {
        let nvrtc = crate::nvrtc::nvrtc(test)?.path().to_path_buf();
        if !Command::new("jq").arg("--version").stdout(Stdio::null()).status().is_ok_and(|status| status.success()) {
            crate::skipped(test, "jq", "it is not installed");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("shared")).unwrap();
        fs::create_dir_all(folder.path().join("bin")).unwrap();
        symlink(env!("CARGO_BIN_EXE_monobloc"), folder.path().join("bin/monobloc")).unwrap();
        Some(Team { folder, nvrtc })
    }

    /// A program of every machine.
    fn program(&self, name: &str, text: &str) {
        let path = self.folder.path().join("bin").join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// A checkout: two manifests, of two GPUs.
    fn checkout(&self) -> Place {
        let place = Place::new();
        let text = manifest_text(&format!("path:{}", fixture("variants/llama-defaults").display()), 8);
        let head = text.split("[[target]]").next().unwrap().to_string();
        fs::create_dir_all(place.path("manifests")).unwrap();
        for record in ["h200", "l4"] {
            place.write(&format!("manifests/{record}.toml"), format!("{head}[[target]]\nrecord = \"{record}\"\n"));
        }
        place.write("m.toml", format!("{head}[[target]]\nrecord = \"a100\"\n"));
        place
    }

    /// Lines by a shell, whose first word is its program.
    #[track_caller]
    fn shell(&self, place: &Place, shell: &str, lines: &str) -> Output {
        place.write("lines", lines);
        let mut words = shell.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command.args(words).arg("lines").current_dir(place.path("")).stdin(Stdio::null());
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.folder.path().join("bin").display()));
        command.env("MONOBLOC_CACHE_DIR", place.path("cache")).env("HOME", place.path(""));
        command.env("MONOBLOC_SHARED_CACHE", self.folder.path().join("shared")).env("MONOBLOC_NVRTC", &self.nvrtc);
        command.env("GITHUB_OUTPUT", place.path("output"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{lines}: {output:?}");
        output
    }
}

fn yaml(text: &str) -> Value {
    serde_yaml_ng::from_str(text).unwrap()
}

/// Values of expressions of a workflow: `needs.plan.outputs.compile`, `matrix.key`.
type Values = BTreeMap<String, String>;

fn expand(text: &str, values: &Values) -> String {
    let mut parts = text.split("${{");
    let first = parts.next().unwrap().to_string();
    parts.fold(first, |said, part| {
        let (expression, rest) = part.split_once("}}").expect("`}}`");
        let value = values.get(expression.trim()).unwrap_or_else(|| panic!("no `{expression}` in {values:?}"));
        said + value + rest
    })
}

/// The jobs `plan` and `compile` of a workflow of GitHub.
struct Workflow<'a> {
    team: &'a Team,
    jobs: Value,
}

impl Workflow<'_> {
    /// Runs the step of `plan` with an id. Outputs of the job, as later jobs name them.
    fn plan(&self, place: &Place) -> Values {
        let job = &self.jobs["plan"];
        let mut values = Values::new();
        for step in job["steps"].as_array().unwrap().iter().filter(|step| step["id"].is_string()) {
            place.write("output", "");
            self.team.shell(place, "bash -e", &expand(step["run"].as_str().unwrap(), &values));
            for line in fs::read_to_string(place.path("output")).unwrap().lines() {
                let (name, value) = line.split_once('=').expect("name=value");
                values.insert(format!("steps.{}.outputs.{name}", step["id"].as_str().unwrap()), value.to_string());
            }
        }
        let outputs = job["outputs"].as_object().unwrap().iter();
        let named = |(name, value): (&String, &Value)| {
            (format!("needs.plan.outputs.{name}"), expand(value.as_str().unwrap(), &values))
        };
        outputs.map(named).collect()
    }

    /// The jobs of the matrix, as values of `matrix`; none if the condition of the job does not hold.
    fn matrix(&self, planned: &Values) -> Vec<Values> {
        let job = &self.jobs["compile"];
        assert_eq!(job["needs"], "plan");
        let (name, empty) = job["if"].as_str().unwrap().split_once(" != ").expect("a comparison");
        if planned[name] == empty.trim_matches('\'') {
            return vec![];
        }
        let matrix = job["strategy"]["matrix"].as_str().unwrap();
        let expression = matrix.strip_prefix("${{ fromJSON(").and_then(|rest| rest.strip_suffix(") }}")).expect(matrix);
        let matrix: Value = serde_json::from_str(&planned[expression]).unwrap();
        assert_eq!(matrix.as_object().unwrap().keys().collect::<Vec<_>>(), ["include"], "other keys are axes");
        let jobs = matrix["include"].as_array().unwrap();
        // GitHub takes no more.
        assert!(!jobs.is_empty() && jobs.len() <= 256);
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
        let of = |job: &Value| {
            let fields = job.as_object().unwrap().iter();
            fields.map(|(field, value)| (format!("matrix.{field}"), text(value))).collect()
        };
        jobs.iter().map(of).collect()
    }

    /// The lines of one job of the matrix, on a machine.
    fn compile(&self, place: &Place, values: &Values) {
        for step in self.jobs["compile"]["steps"].as_array().unwrap().iter().filter(|step| step["run"].is_string()) {
            self.team.shell(place, "bash -e", &expand(step["run"].as_str().unwrap(), values));
        }
    }
}

#[test]
fn the_workflow_for_github_compiles_every_kernel() {
    let Some(team) = Team::new("the_workflow_for_github_compiles_every_kernel") else { return };
    let jobs = yaml(&example("yaml", "runs-on"))["jobs"].clone();
    let workflow = Workflow { team: &team, jobs };
    let matrix = workflow.matrix(&workflow.plan(&team.checkout()));
    let mut manifests: Vec<&str> = matrix.iter().map(|values| values["matrix.manifest"].as_str()).collect();
    manifests.sort_unstable();
    assert_eq!(manifests, ["manifests/h200.toml", "manifests/l4.toml"]);
    matrix.iter().for_each(|values| workflow.compile(&team.checkout(), values));
    let planned = workflow.plan(&team.checkout());
    assert!(workflow.matrix(&planned).is_empty(), "{planned:?}");
}

/// `.github/workflows/ci.yml`, with the first job of its matrix.
#[test]
fn the_workflow_of_this_repository_compiles_a_kernel() {
    let Some(team) = Team::new("the_workflow_of_this_repository_compiles_a_kernel") else { return };
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join(".github/workflows/ci.yml")).unwrap();
    let workflow = Workflow { team: &team, jobs: yaml(&text)["jobs"].clone() };
    let checkout = || {
        let place = Place::new();
        symlink(root.join("manifests"), place.path("manifests")).unwrap();
        for folder in ["target/debug", ".ci"] {
            fs::create_dir_all(place.path(folder)).unwrap();
        }
        for program in ["target/debug/monobloc", "monobloc"] {
            symlink(env!("CARGO_BIN_EXE_monobloc"), place.path(program)).unwrap();
        }
        // Where that compiler is already.
        symlink(team.folder.path().join("bin/install-nvrtc.sh"), place.path(".ci/install-nvrtc.sh")).unwrap();
        place
    };
    team.program("install-nvrtc.sh", &format!("echo '{}'", team.nvrtc.display()));
    let planned = workflow.plan(&checkout());
    let matrix = workflow.matrix(&planned);
    let mut targets: Vec<&str> = matrix.iter().map(|values| values["matrix.target"].as_str()).collect();
    targets.dedup();
    assert_eq!(targets.len(), 10, "{targets:?}");
    workflow.compile(&checkout(), &matrix[0]);
    let again = workflow.matrix(&workflow.plan(&checkout()));
    assert!(again.iter().all(|values| values["matrix.key"] != matrix[0]["matrix.key"]), "it was compiled");
}

#[test]
fn the_pipeline_for_gitlab_compiles_every_kernel() {
    let Some(team) = Team::new("the_pipeline_for_gitlab_compiles_every_kernel") else { return };
    let pipeline = yaml(&example("yaml", "trigger"));
    let (plan, compile) = (&pipeline["plan"], &pipeline["compile"]);
    assert_eq!(compile["trigger"]["include"][0], json!({ "artifact": plan["artifacts"]["paths"][0], "job": "plan" }));
    let lines = |job: &Value| {
        let lines = job["script"].as_array().unwrap().iter().map(|line| line.as_str().unwrap());
        lines.collect::<Vec<_>>().join("\n")
    };
    // The pipeline that the runner starts with this artifact.
    let child = || {
        let place = team.checkout();
        team.shell(&place, "bash -eo pipefail", &lines(plan));
        let file = plan["artifacts"]["paths"][0].as_str().unwrap();
        yaml(&fs::read_to_string(place.path(file)).unwrap()).as_object().unwrap().clone()
    };
    let jobs = child();
    assert_eq!(jobs.len(), 2, "{jobs:?}");
    jobs.values().for_each(|job| drop(team.shell(&team.checkout(), "bash -eo pipefail", &lines(job))));
    let jobs = child();
    assert_eq!(jobs.keys().collect::<Vec<_>>(), ["nothing to do"]);
    jobs.values().for_each(|job| drop(team.shell(&team.checkout(), "bash -eo pipefail", &lines(job))));
}

#[test]
fn the_jobs_for_kubernetes_compile_every_kernel() {
    let Some(team) = Team::new("the_jobs_for_kubernetes_compile_every_kernel") else { return };
    // A cluster keeps what is applied.
    team.program("kubectl", "[ \"$*\" = 'apply -f -' ] && exec cat > applied");
    let line = example("sh", "kubectl");
    let applied = || -> Vec<Value> {
        let place = team.checkout();
        team.shell(&place, "bash -eo pipefail", &line);
        let bytes = fs::read(place.path("applied")).unwrap();
        serde_json::Deserializer::from_slice(&bytes).into_iter().map(Result::unwrap).collect()
    };
    let jobs = applied();
    assert_eq!(jobs.len(), 1);
    for job in &jobs {
        assert_eq!((&job["apiVersion"], &job["kind"]), (&json!("batch/v1"), &json!("Job")));
        // A label of DNS.
        let name = job["metadata"]["name"].as_str().unwrap();
        assert!(name.len() <= 63 && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'));
        let pod = &job["spec"]["template"]["spec"];
        assert_eq!(pod["restartPolicy"], "Never", "a job takes no other one but OnFailure");
        let container = &pod["containers"][0];
        assert!(container["name"].is_string() && container["image"].is_string());
        let arguments = container["args"].as_array().unwrap().iter().map(|argument| argument.as_str().unwrap());
        // The entry point of the image.
        let line = format!("monobloc {}", arguments.collect::<Vec<_>>().join(" "));
        team.shell(&team.checkout(), "sh -e", &line);
    }
    assert!(applied().is_empty());
}
