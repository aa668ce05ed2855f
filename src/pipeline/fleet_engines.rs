//! Owns the engines that start workers of a search on other machines: Slurm, Ray, or people.
//!
//! An engine gets the command of a worker, and starts it as often as asked. The workers connect by themselves.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::fleet_wire::TOKEN;
use crate::error::Fault;
use crate::target::TargetKind;

/// Starts workers on a cluster of Ray, and ends them when its stdin does.
const RAY: &str = include_str!("ray_workers.py");
/// Time for Ray to end its workers.
const GRACE: Duration = Duration::from_secs(10);

/// What starts workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Engine {
    /// A job array.
    Slurm,
    /// A cluster at this address, `None`: that of `RAY_ADDRESS`, or of this machine.
    Ray(Option<String>),
    /// People, or an engine that monobloc does not know.
    Hands,
}

impl Engine {
    /// `slurm`, `ray`, `ray://HOST:PORT` or `hands`.
    ///
    /// # Errors
    /// Another text.
    pub fn parse(text: &str) -> Result<Engine, String> {
        match text {
            "slurm" => Ok(Engine::Slurm),
            "ray" => Ok(Engine::Ray(None)),
            "hands" => Ok(Engine::Hands),
            _ => match text.strip_prefix("ray://") {
                Some(address) if address.contains(':') => Ok(Engine::Ray(Some(address.to_string()))),
                _ => Err("expected `slurm`, `ray`, `ray://HOST:PORT` or `hands`".to_string()),
            },
        }
    }

    /// As the column `engine` has it.
    pub fn name(&self) -> &'static str {
        match self {
            Engine::Slurm => "slurm",
            Engine::Ray(_) => "ray",
            Engine::Hands => "hands",
        }
    }
}

/// What is to be started.
pub(super) struct Wanted<'a> {
    pub workers: u32,
    pub target: TargetKind,
    /// Program and arguments of a worker.
    pub command: &'a [String],
    pub token: &'a str,
}

/// Workers that were started; they end with this value.
pub(super) enum Started {
    Slurm { job: String },
    Ray(Box<Child>),
    Hands,
}

impl Started {
    /// Starts workers.
    ///
    /// # Errors
    /// An engine that is not there, or refuses.
    pub fn new(engine: &Engine, wanted: &Wanted<'_>) -> Result<Started, Fault> {
        match engine {
            Engine::Slurm => submit(wanted).map(|job| Started::Slurm { job }),
            Engine::Ray(address) => ray(wanted, address.as_deref()).map(|child| Started::Ray(Box::new(child))),
            Engine::Hands => Ok(Started::Hands),
        }
    }

    /// Whether workers run or may still start.
    ///
    /// # Errors
    /// An engine that failed; the text is its own.
    pub fn is_alive(&mut self) -> Result<bool, Fault> {
        match self {
            Started::Hands => Ok(true),
            Started::Slurm { job } => {
                let listed = Command::new("squeue").args(["--noheader", "--jobs", job, "--format=%T"]).output();
                // A job that ended a while ago is not known any more. A controller that does not answer has ended nothing.
                Ok(match listed {
                    Ok(output) if output.status.success() => !output.stdout.trim_ascii().is_empty(),
                    Ok(output) => !String::from_utf8_lossy(&output.stderr).contains("Invalid job id"),
                    Err(_) => true,
                })
            }
            Started::Ray(child) => match child.try_wait() {
                Ok(None) => Ok(true),
                _ => {
                    let mut said = String::new();
                    if let Some(stderr) = &mut child.stderr {
                        let _ = stderr.take(1 << 16).read_to_string(&mut said);
                    }
                    let last = said.trim().lines().next_back().unwrap_or("it ended").to_string();
                    Err(Fault::environment(format!("Ray: {last}"))
                        .with_remedy("`pip install 'monobloc[ray]'`, and name the cluster: `--on ray://HOST:6379`"))
                }
            },
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        match self {
            Started::Hands => {}
            Started::Slurm { job } => {
                let _ = Command::new("scancel").arg(&*job).stdin(Stdio::null()).output();
            }
            Started::Ray(child) => {
                drop(child.stdin.take());
                let begun = Instant::now();
                while begun.elapsed() < GRACE && matches!(child.try_wait(), Ok(None)) {
                    thread::sleep(Duration::from_millis(50));
                }
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// Submits a job array; its number. Options of `sbatch` come from its own variables, such as `SBATCH_PARTITION`.
fn submit(wanted: &Wanted<'_>) -> Result<String, Fault> {
    let mut sbatch = Command::new("sbatch");
    sbatch.args(["--parsable", "--requeue", "--job-name=monobloc-tune", &format!("--array=1-{}", wanted.workers)]);
    let is_set = |name: &str| std::env::var_os(name).is_some();
    if !is_set("SBATCH_OUTPUT") {
        // A worker tells the search what is wrong.
        sbatch.arg("--output=/dev/null");
    }
    if wanted.target == TargetKind::Cuda && !is_set("SBATCH_GRES") && !is_set("SBATCH_GPUS") {
        sbatch.arg("--gres=gpu:1");
    }
    sbatch.env(TOKEN, wanted.token);
    let line: Vec<String> = wanted.command.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
    let failed = |what: String| {
        Fault::environment(format!("Slurm: {what}"))
            .with_remedy("`sbatch` has to work here; its options come from its variables, such as `SBATCH_PARTITION`")
    };
    let mut child = sbatch
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| failed(format!("cannot start `sbatch`: {error}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        let _ = write!(stdin, "#!/bin/sh\nexec {}\n", line.join(" "));
    }
    let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
    let said = String::from_utf8_lossy(&output.stdout);
    // `JOB` or `JOB;CLUSTER`.
    let job = said.trim().split(';').next().unwrap_or_default().to_string();
    if !output.status.success() || job.is_empty() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_string()));
    }
    Ok(job)
}

fn ray(wanted: &Wanted<'_>, address: Option<&str>) -> Result<Child, Fault> {
    let failed = |error: std::io::Error| {
        Fault::environment(format!("cannot start `python3`: {error}"))
            .with_remedy("`--on ray` needs Python with the package `ray`")
    };
    let mut child = Command::new("python3")
        .args(["-c", RAY])
        .env("RAY_USAGE_STATS_ENABLED", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let asked = json!({
        "address": address,
        "workers": wanted.workers,
        "gpus": u32::from(wanted.target == TargetKind::Cuda),
        "command": wanted.command,
        "variables": { TOKEN: wanted.token },
    });
    if let Some(stdin) = &mut child.stdin {
        writeln!(stdin, "{asked}").map_err(failed)?;
    }
    Ok(child)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_named_as_people_write_them() {
        for (text, expected) in [
            ("slurm", Engine::Slurm),
            ("ray", Engine::Ray(None)),
            ("ray://head:6379", Engine::Ray(Some("head:6379".to_string()))),
            ("hands", Engine::Hands),
        ] {
            assert_eq!(Engine::parse(text), Ok(expected));
        }
        for text in ["", "Slurm", "ray://", "ray://head", "kubernetes"] {
            assert!(Engine::parse(text).is_err(), "{text}");
        }
    }
}
