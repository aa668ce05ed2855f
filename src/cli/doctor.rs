//! Owns `doctor`: what monobloc finds on this machine, and whether what it stores can be used.

use serde_json::{Value, json};

use super::Outcome;
use super::arguments::Doctor;
use super::session::Session;
use super::units::bytes_text;
use crate::address::RemotePlace;
use crate::cache::{Key, Places};
use crate::cuda::driver::{Device, DeviceIdentity};
use crate::cuda::links::Link;
use crate::cuda::nvrtc::Nvrtc;
use crate::cuda::self_test::{SelfTest, self_test};
use crate::error::Fault;
use crate::flywheel::Corpus;
use crate::target::Target;
use crate::text::counted;

/// The finding about one part: text for people, JSON for programs, and whether it is a fault.
struct Finding {
    name: &'static str,
    text: String,
    json: Value,
    sound: bool,
}

pub fn doctor(session: &Session, asked: &Doctor) -> Result<Outcome, Fault> {
    let nvrtc = Nvrtc::load().map_err(Fault::from);
    let devices = Device::list().map_err(Fault::from);
    let mut findings = vec![version(), cache(session), trials(session), targets(), compiler(&nvrtc), driver(&devices)];
    if let Ok(devices) = &devices {
        findings.push(device_list(devices));
        if devices.len() > 1 {
            findings.push(links(devices)?);
        }
    }
    if asked.device {
        let (devices, nvrtc) = (devices?, nvrtc?);
        let tested: Result<Vec<SelfTest>, Fault> =
            devices.iter().map(|device| Ok(self_test(&Device::open(device.ordinal)?, &nvrtc)?)).collect();
        findings.push(self_tests(&tested?));
    }
    if asked.json {
        let all: serde_json::Map<_, _> =
            findings.iter().map(|finding| (finding.name.to_string(), finding.json.clone())).collect();
        session.terminal.print_json(&Value::Object(all))?;
    } else {
        for Finding { name, text, sound, .. } in &findings {
            let mut lines = text.lines();
            let fault = if *sound { String::new() } else { format!("{}: ", session.terminal.bad("fault")) };
            session.terminal.print(&format!("{name:<10} {fault}{}\n", lines.next().unwrap_or_default()))?;
            lines.try_for_each(|line| session.terminal.print(&format!("{:<10} {line}\n", "")))?;
        }
    }
    Ok(if findings.iter().all(|finding| finding.sound) { Outcome::Done } else { Outcome::No })
}

fn version() -> Finding {
    let version = env!("CARGO_PKG_VERSION");
    let hub = cfg!(feature = "hub");
    let remote = cfg!(feature = "remote");
    let word = |there| if there { "with" } else { "without" };
    let text = format!("{version}, {} the hub, {} remote caches", word(hub), word(remote));
    let json = json!({ "version": version, "hub": hub, "remote": remote });
    Finding { name: "monobloc", text, json, sound: true }
}

fn cache(session: &Session) -> Finding {
    let root = session.places.root.display().to_string();
    let shared = session.places.shared.as_ref().map(|shared| shared.display().to_string());
    let shared_text = shared.iter().map(|shared| format!("\nshared with `{shared}`")).collect::<String>();
    let remote = session.places.remote();
    let remote_text = match &remote {
        Ok(Some(RemotePlace { address, mode })) => format!("\nremote `{address}` ({})", mode.name()),
        _ => String::new(),
    };
    let remote_json = remote.as_ref().ok().and_then(|remote| Some(remote.as_ref()?.address.to_string()));
    let key = session.places.key_file.as_deref().map(|path| (path.display().to_string(), Key::read(path)));
    let key_text = match &key {
        Some((path, Ok(key))) => format!("\nsealed with the key {} of `{path}`", key.id()),
        // Opening the cache says what is wrong with it.
        Some((_, Err(_))) => String::new(),
        None if shared.is_some() => {
            format!("\nno key (`{}`): everyone who may write the shared folder is trusted", Places::KEY_VARIABLE)
        }
        None => String::new(),
    };
    let key_id = key.as_ref().and_then(|(_, key)| Some(key.as_ref().ok()?.id().to_string()));
    let finding = |text: String, state: &str, entries: u64, bytes: u64, sound: bool| Finding {
        name: "cache",
        text: format!("`{root}`: {text}{shared_text}{remote_text}{key_text}"),
        json: json!({
            "root": root, "shared": shared, "remote": remote_json, "key": key_id, "state": state, "entries": entries, "bytes": bytes,
        }),
        sound,
    };
    if let Err(error) = &remote {
        return finding(error.to_string(), "unusable", 0, 0, false);
    }
    if let Some((_, Err(error))) = &key {
        return finding(error.to_string(), "unusable", 0, 0, false);
    }
    // `doctor` changes nothing; opening would create the folder.
    if !session.places.root.exists() {
        return finding("not there yet; the first build makes it".to_string(), "absent", 0, 0, true);
    }
    let stats = session.open_cache().and_then(|cache| Ok(cache.stats()?));
    match stats {
        Err(fault) => finding(fault.message, "unusable", 0, 0, false),
        Ok(stats) => {
            let entries = stats.stages.iter().map(|stage| stage.entries).sum();
            let size = format!("{}, {}", counted(entries, "entry"), bytes_text(stats.bytes));
            match tempfile::tempfile_in(&session.places.root) {
                Ok(_) => finding(size, "writable", entries, stats.bytes, true),
                Err(error) => {
                    finding(format!("{size}, and cannot be written: {error}"), "read-only", entries, stats.bytes, false)
                }
            }
        }
    }
}

fn trials(session: &Session) -> Finding {
    let path = session.trials.display().to_string();
    match Corpus::read(&[&session.trials]) {
        Ok(corpus) => {
            let (rows, broken) = (corpus.trials.len(), corpus.broken.len());
            let skipped = match broken {
                0 => String::new(),
                _ => format!(", {} that cannot be read (`monobloc flywheel stats`)", counted(broken as u64, "line")),
            };
            let text = format!("`{path}`: {}{skipped}", counted(rows as u64, "row"));
            Finding { name: "trials", text, json: json!({ "path": path, "rows": rows, "broken": broken }), sound: true }
        }
        Err(error) => {
            let fault = error.to_string();
            Finding { name: "trials", json: json!({ "path": path, "error": fault }), text: fault, sound: false }
        }
    }
}

fn targets() -> Finding {
    let names: Vec<&str> = Target::builtin_names().collect();
    Finding { name: "targets", text: names.join(", "), json: json!(names), sound: true }
}

fn compiler(nvrtc: &Result<Nvrtc, Fault>) -> Finding {
    let (text, json) = match nvrtc {
        Ok(nvrtc) => {
            let (version, path) = (nvrtc.version().to_string(), nvrtc.path().display().to_string());
            let archs: Vec<String> = nvrtc.supported().iter().map(|arch| format!("sm_{arch}")).collect();
            (
                format!("{version} at `{path}`\ncompiles for {}", archs.join(" ")),
                json!({ "found": true, "version": version, "path": path, "archs": archs }),
            )
        }
        Err(fault) => absent(fault, "sources are generated without it"),
    };
    Finding { name: "nvrtc", text, json, sound: true }
}

/// The finding for a missing part: what is missing, the consequence, and how to get it.
fn absent(fault: &Fault, consequence: &str) -> (String, Value) {
    let remedy = fault.remedy.iter().map(|remedy| format!("\n{remedy}")).collect::<String>();
    let json = json!({ "found": false, "error": fault.message, "remedy": fault.remedy });
    (format!("{}\n{consequence}{remedy}", fault.message), json)
}

fn driver(devices: &Result<Vec<DeviceIdentity>, Fault>) -> Finding {
    let (text, json) = match devices {
        Ok(devices) => {
            let first = devices.first();
            let cuda = first.map(|device| device.driver_cuda.clone());
            let release = first.and_then(|device| device.driver_release.clone());
            let name = release.clone().unwrap_or_else(|| "of unknown release".to_string());
            let text = format!("{name}, runs CUDA up to {}", cuda.clone().unwrap_or_default());
            (text, json!({ "found": true, "release": release, "cuda": cuda }))
        }
        Err(fault) => absent(fault, "checks and measurements of CUDA targets wait for a machine with a device"),
    };
    Finding { name: "driver", text, json, sound: true }
}

fn device_list(devices: &[DeviceIdentity]) -> Finding {
    let mut text = String::new();
    let mut listed = Vec::new();
    for device in devices {
        let matching: Vec<&str> = Target::builtin_names()
            .filter(|name| Target::builtin(name).is_some_and(|target| device.matches(&target).is_ok()))
            .collect();
        let target = match matching.as_slice() {
            [] => "no builtin target describes it".to_string(),
            names => format!("target {}", names.join(" or ")),
        };
        let (major, minor) = device.compute_capability;
        text.push_str(&format!(
            "{}: {}, compute capability {major}.{minor}, {} SMs, {}: {target}\n",
            device.ordinal,
            device.name,
            device.sm_count,
            bytes_text(device.memory_bytes)
        ));
        listed.push(json!({ "identity": device, "targets": matching }));
    }
    Finding { name: "devices", text, json: json!(listed), sound: true }
}

/// Which devices can run one model together.
fn links(devices: &[DeviceIdentity]) -> Result<Finding, Fault> {
    let ordinals: Vec<u32> = devices.iter().map(|device| device.ordinal).collect();
    let links = Link::among(&ordinals)?;
    let mut text = String::new();
    for link in links.iter().filter(|link| link.from < link.to) {
        let back = links.iter().find(|back| (back.from, back.to) == (link.to, link.from));
        let lacks =
            link.lacks().or(back.and_then(Link::lacks)).unwrap_or("they can run one model together (`devices`)");
        text.push_str(&format!("{} and {}: {lacks}\n", link.from, link.to));
    }
    Ok(Finding { name: "links", text, json: json!(links), sound: true })
}

fn self_tests(tested: &[SelfTest]) -> Finding {
    let mut text = String::new();
    for test in tested {
        let cluster = test.cluster.map_or("none".to_string(), |blocks| blocks.to_string());
        text.push_str(&format!(
            "{}: passed as {}; launch {:.1} µs, abort {:.0} µs, clusters {cluster}, upload {:.1} GB/s\n",
            test.device.ordinal,
            test.arch,
            test.empty_launch_us_p50,
            test.abort_us,
            test.upload_bytes_per_s / 1e9
        ));
    }
    Finding { name: "self-test", text, json: json!(tested), sound: true }
}
