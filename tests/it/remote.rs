//! Tests remote caches as users have them: with servers of S3, WebDAV and HTTP, and with everything that can go wrong on the way.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use monobloc::cache::{Cache, Note, Places, RemoteText};
use monobloc::digest::Digest;

use crate::cli_support::{Answer, Place, manifest_text};
use crate::nvrtc::nvrtc;
use crate::remote_servers::{Fault, Nginx, Proxy, Seen, bucket, plain, s3};
use crate::support::{fixture, forge};

const SECRET: &str = "hunter2hunter2";
const KEY_ID: &str = "AKIAHUNTER";
/// `me` and [`SECRET`] as a request to a WebDAV server has them.
const BASIC: &str = "bWU6aHVudGVyMmh1bnRlcjI";
/// A part of a large entry, as src/cache/remote/mod.rs has it.
const PART: usize = 8 << 20;

fn s3_address(server: SocketAddr, bucket: &str) -> String {
    format!("s3://{bucket}/team/monobloc?endpoint=http://{server}&region=us-east-1&timeout=60")
}

/// A machine of its own: an empty folder with an empty cache.
struct Machine(Place);

impl Machine {
    fn new() -> Machine {
        let place = Place::new();
        place.manifest(&fixture("variants/llama-defaults"), 8);
        Machine(place)
    }

    fn command(&self, remote: &str, arguments: &str) -> assert_cmd::Command {
        let mut command = self.0.command(arguments);
        command.env("MONOBLOC_REMOTE_CACHE", remote);
        command.env("AWS_ACCESS_KEY_ID", KEY_ID).env("AWS_SECRET_ACCESS_KEY", SECRET);
        command.env("AWS_EC2_METADATA_DISABLED", "true");
        command
    }

    #[track_caller]
    fn run(&self, remote: &str, arguments: &str) -> Answer {
        let answer = Answer::of(&mut self.command(remote, arguments));
        self.tells_no_secret(&answer);
        answer
    }

    #[track_caller]
    fn build(&self, remote: &str) -> Answer {
        self.run(remote, "build m.toml").code(0)
    }

    /// Logits, and what was said.
    #[track_caller]
    fn logits(&self, remote: &str) -> (Vec<u8>, String) {
        let answer = self.run(remote, "logits m.toml --ids 1,2,3 --out logits.safetensors").code(0);
        (fs::read(self.0.path("logits.safetensors")).unwrap(), answer.stderr)
    }

    #[track_caller]
    fn tells_no_secret(&self, answer: &Answer) {
        for text in [&answer.stdout, &answer.stderr] {
            assert!(!has_a_secret(text.as_bytes()), "{answer:#?}");
        }
        no_file_has_a_secret(&self.0.path(""));
    }

    /// With the password of the WebDAV server.
    fn with_password(self) -> Machine {
        self.0.write(".netrc", format!("machine 127.0.0.1 login me password {SECRET}\n"));
        self
    }
}

fn has_a_secret(bytes: &[u8]) -> bool {
    [SECRET, KEY_ID, BASIC].iter().any(|secret| bytes.windows(secret.len()).any(|window| window == secret.as_bytes()))
}

#[track_caller]
fn no_file_has_a_secret(folder: &Path) {
    // The file of passwords has it.
    for file in files(folder, |path| !path.ends_with("/.netrc")) {
        assert!(!has_a_secret(&fs::read(&file).unwrap()), "{}", file.display());
    }
}

fn honest() -> Vec<u8> {
    Machine::new().logits("").0
}

fn notes(said: &str) -> Vec<&str> {
    said.lines().filter(|line| line.contains("note remote cache:")).collect()
}

/// The files of one kind below a folder.
fn files(folder: &Path, is: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let files = walkdir::WalkDir::new(folder).sort_by_file_name().into_iter().map(|file| file.unwrap().into_path());
    files.filter(|path| path.is_file() && is(path.to_str().unwrap())).collect()
}

#[test]
fn a_second_machine_builds_nothing_with_s3() {
    let Some(server) = s3("a_second_machine_builds_nothing_with_s3") else { return };
    let remote = s3_address(server, &bucket(server));
    let first = Machine::new();
    let said = first.build(&remote).stderr;
    assert!(said.contains("run schedule") && notes(&said).is_empty(), "{said}");
    let begun = Instant::now();
    let said = Machine::new().build(&remote).stderr;
    eprintln!("a build from the remote cache took {} ms", begun.elapsed().as_millis());
    assert!(said.contains("no work to do") && notes(&said).is_empty(), "{said}");
    // Nothing is sent again, and nothing asked for, by a machine that has everything.
    let proxy = Proxy::start(server, |_| Fault::None);
    assert!(first.build(&s3_address(proxy.address, "none")).stderr.contains("no work to do"));
    assert_eq!(proxy.seen().len(), 0);
}

#[test]
fn a_second_machine_builds_nothing_with_webdav() {
    let Some(nginx) = Nginx::start("a_second_machine_builds_nothing_with_webdav") else { return };
    let remote = format!("dav://{}/locked/team", nginx.address());
    let said = Machine::new().with_password().build(&remote).stderr;
    assert!(said.contains("run schedule") && notes(&said).is_empty(), "{said}");
    let said = Machine::new().with_password().build(&remote).stderr;
    assert!(said.contains("no work to do") && notes(&said).is_empty(), "{said}");
    // Without the password: one note for reading, one for writing, and a build.
    let said = Machine::new().build(&remote).stderr;
    assert!(
        said.contains("run schedule") && said.contains("access denied; check the credentials (status 401)"),
        "{said}"
    );
    assert_eq!(notes(&said).len(), 2, "{said}");
}

/// Each part of a kernel waits at the server for its link: one that is asked for later would find no part.
#[test]
fn links_are_asked_for_beside_their_parts() {
    let Some(nginx) = Nginx::start("links_are_asked_for_beside_their_parts") else { return };
    Machine::new().build(&format!("dav://{}/team", nginx.address()));
    let mut parts = 0;
    let proxy = Proxy::start(nginx.address(), move |seen| {
        let is_part =
            ["/schedule-v1/", "/source-v1/", "/compile-v1/", "/pack-v1/"].iter().any(|part| seen.path.contains(part));
        if seen.method != "GET" || !is_part {
            return Fault::None;
        }
        parts += 1;
        Fault::Until("/link-v1/", parts)
    });
    let said = Machine::new().build(&format!("dav://{}/team?timeout=60", proxy.address)).stderr;
    assert!(said.contains("no work to do") && notes(&said).is_empty(), "{said}");
    assert!(proxy.faults().contains_key("Until"), "{:?}", proxy.seen());
}

/// Builds the kernels of two GPUs, with the compiler at `nvrtc`.
#[track_caller]
fn build_kernels(machine: &Machine, remote: &str, mode: &str, nvrtc: &Path) -> Answer {
    let text = manifest_text(&format!("path:{}", fixture("variants/llama-defaults").display()), 8);
    machine.0.write("gpus.toml", text.replace("\"cpu\"", "\"h200\"\n[[target]]\nrecord = \"l4\""));
    let mut command = machine.command(remote, "build gpus.toml --json --require compile");
    let answer = Answer::of(command.env("MONOBLOC_REMOTE_CACHE_MODE", mode).env("MONOBLOC_NVRTC", nvrtc));
    machine.tells_no_secret(&answer);
    answer
}

/// A second machine asks for the index, and then for everything else before anything else is answered.
#[test]
fn kernels_arrive_in_two_round_trips() {
    let test = "kernels_arrive_in_two_round_trips";
    let (Some(nvrtc), Some(nginx)) = (nvrtc(test), Nginx::start(test)) else { return };
    let remote = format!("dav://{}/team", nginx.address());
    build_kernels(&Machine::new(), &remote, "read-write", nvrtc.path()).code(0);
    let parts = ["compile", "compile", "import", "schedule", "schedule", "source", "source"];
    for compiler in [nvrtc.path(), Path::new("/nowhere")] {
        let proxy = Proxy::start(nginx.address(), move |seen| {
            let is_index = seen.path.contains("/index-v1/");
            if is_index { Fault::None } else { Fault::Until("/team/", parts.len() + 1) }
        });
        let machine = Machine::new();
        let remote = format!("dav://{}/team?timeout=60", proxy.address);
        let answer = build_kernels(&machine, &remote, "read", compiler).code(0);
        assert!(answer.json()["ran"] == 0 && notes(&answer.stderr).is_empty(), "{answer:#?}");
        let stage = |seen: Seen| seen.path.split('/').nth(2).unwrap().replace("-v1", "");
        let mut asked: Vec<String> = proxy.seen().into_iter().map(stage).collect();
        asked.sort();
        asked.retain(|stage| stage != "index");
        assert_eq!((asked.as_slice(), proxy.seen().len()), (parts.map(String::from).as_slice(), parts.len() + 1));
        // What the index stood for is here, with the texts that explain it.
        assert!(machine.run("", "cache verify").code(0).stdout.starts_with("sound: "));
        assert_eq!(build_kernels(&machine, "", "off", compiler).code(0).json()["ran"], 0);
    }
}

#[test]
fn a_wrong_index_changes_no_result_and_is_replaced() {
    let test = "a_wrong_index_changes_no_result_and_is_replaced";
    let (Some(nvrtc), Some(nginx)) = (nvrtc(test), Nginx::start(test)) else { return };
    let remote = format!("dav://{}/team", nginx.address());
    let team = nginx.files().join("team");
    build_kernels(&Machine::new(), &remote, "read-write", nvrtc.path()).code(0);
    let honest = build_kernels(&Machine::new(), &remote, "read", nvrtc.path()).code(0).json();
    let index = files(&team.join("index-v1"), |path| !path.ends_with(".why")).remove(0);
    let sound = fs::read(&index).unwrap();
    let text: String = String::from_utf8_lossy(&sound).lines().take(2).map(|line| format!("{line}\n")).collect();
    let other = Digest::of(b"other").to_string();
    // Another value in each place of each line, after its schedule.
    let changed = |place: usize, value: &str| -> Vec<u8> {
        let line = |line: &str| {
            let mut words: Vec<&str> = line.split(' ').collect();
            words[place] = value;
            format!("{}\n", words.join(" "))
        };
        text.lines().map(line).collect::<String>().into_bytes()
    };
    let first_cubin = text.split(' ').nth(3).unwrap();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", vec![]),
        ("no text", vec![0xff; 1000]),
        ("names with `..`", changed(3, "../../../etc/passwd")),
        (
            "many names",
            text.lines()
                .cycle()
                .take(20_000)
                .map(|line| format!("{}\n", line.replace('0', "1")))
                .collect::<String>()
                .into(),
        ),
        ("schedules", changed(1, &other)),
        ("sources", changed(2, &other)),
        ("keys of cubins", changed(3, &other)),
        ("one cubin for all", changed(3, first_cubin)),
        ("cubins", changed(4, &other)),
        ("compilers", changed(5, "12.0")),
    ];
    for (name, hostile) in cases {
        fs::write(&index, &sound).unwrap();
        forge(&team, &index, |bytes| *bytes = hostile);
        let proxy = Proxy::start(nginx.address(), |_| Fault::None);
        let machine = Machine::new();
        let answer =
            build_kernels(&machine, &format!("dav://{}/team", proxy.address), "read", Path::new("/nowhere")).code(0);
        assert!(answer.json() == honest && notes(&answer.stderr).is_empty(), "{name}: {answer:#?}");
        // As without an index, and one entry for each line of this build.
        assert!(proxy.seen().len() <= 1 + 1 + 2 * (7 + 2), "{name}: {:?}", proxy.seen());
        machine.run("", "cache verify").code(0);
        build_kernels(&Machine::new(), &remote, "read-write", nvrtc.path()).code(0);
        // That of another compiler stays: machines with both would replace it in turns.
        assert_eq!(fs::read(&index).unwrap() == sound, name != "compilers", "{name}");
    }
}

/// An index stands for links, and for no more than they do.
#[test]
fn a_part_that_is_not_that_of_the_index_is_refused() {
    let test = "a_part_that_is_not_that_of_the_index_is_refused";
    let (Some(nvrtc), Some(nginx)) = (nvrtc(test), Nginx::start(test)) else { return };
    let remote = format!("dav://{}/team", nginx.address());
    let team = nginx.files().join("team");
    build_kernels(&Machine::new(), &remote, "read-write", nvrtc.path()).code(0);
    for stage in ["schedule", "source", "compile"] {
        let part = files(&team.join(format!("{stage}-v1")), |path| !path.ends_with(".why")).remove(0);
        let sound = fs::read(&part).unwrap();
        forge(&team, &part, |bytes| *bytes.last_mut().unwrap() ^= 1);
        let said = build_kernels(&Machine::new(), &remote, "read", nvrtc.path()).code(3).stderr;
        assert!(said.contains(&format!("the stored {stage} ")) && said.contains("is not what was built"), "{said}");
        fs::remove_file(&part).unwrap();
        fs::write(&part, sound).unwrap();
    }
    fs::remove_dir_all(team.join("link-v1")).unwrap();
    assert_eq!(build_kernels(&Machine::new(), &remote, "read", nvrtc.path()).code(0).json()["ran"], 0);
}

#[test]
fn plain_http_is_read_and_never_written() {
    let Some(nginx) = Nginx::start("plain_http_is_read_and_never_written") else { return };
    Machine::new().build(&format!("dav://{}/team", nginx.address()));
    let before = files(&nginx.files(), |_| true).len();
    let remote = format!("http://{}/team", nginx.address());
    let reader = Machine::new();
    let mut command = reader.command(&remote, "build m.toml");
    let said = Answer::of(command.env("MONOBLOC_REMOTE_CACHE_MODE", "read")).code(0).stderr;
    assert!(said.contains("no work to do") && notes(&said).is_empty(), "{said}");
    // What it builds itself stays here.
    let mut command = reader.command(&remote, "logits m.toml --ids 1,2,3 --out logits.safetensors");
    let said = Answer::of(command.env("MONOBLOC_REMOTE_CACHE_MODE", "read")).code(0).stderr;
    assert!(notes(&said).is_empty(), "{said}");
    assert_eq!(files(&nginx.files(), |_| true).len(), before);
    let mut command = reader.command(&remote, "build m.toml");
    command.env("MONOBLOC_REMOTE_CACHE_MODE", "off").env("MONOBLOC_CACHE_DIR", "other");
    assert!(Answer::of(&mut command).code(0).stderr.contains("run schedule"));
}

#[test]
fn damaged_objects_are_built_again_and_replaced() {
    let Some(nginx) = Nginx::start("damaged_objects_are_built_again_and_replaced") else { return };
    let remote = format!("dav://{}/team", nginx.address());
    let honest = honest();
    Machine::new().logits(&remote);
    let entries = files(&nginx.files(), |path| path.contains("-v1/") && !path.ends_with(".why"));
    for (at, path) in entries.iter().enumerate() {
        let mut bytes = fs::read(path).unwrap();
        match at % 3 {
            0 => bytes.truncate(bytes.len() / 2),
            1 => bytes[3] ^= 1,
            _ => bytes = vec![],
        }
        fs::write(path, bytes).unwrap();
    }
    let answer = Machine::new().run(&remote, "cache verify --remote").code(1);
    assert_eq!(answer.stdout.lines().filter(|line| line.contains(": damaged: ")).count(), entries.len(), "{answer:#?}");
    let (logits, said) = Machine::new().logits(&remote);
    assert!(logits == honest, "{said}");
    assert!(notes(&said).len() == 1 && said.contains("is damaged:") && said.contains("it is built again"), "{said}");
    let answer = Machine::new().run(&remote, "cache verify --remote").code(0);
    assert!(answer.stdout.contains(&format!("no problem in {} entries", entries.len())), "{answer:#?}");
    let (logits, said) = Machine::new().logits(&remote);
    assert!(logits == honest && notes(&said).is_empty(), "{said}");
}

#[test]
fn entries_without_the_key_are_never_used() {
    let Some(nginx) = Nginx::start("entries_without_the_key_are_never_used") else { return };
    let remote = format!("dav://{}/team", nginx.address());
    let honest = honest();
    let with_key = |machine: &Machine| {
        let key = machine.0.write("key", "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff");
        let mut command = machine.command(&remote, "logits m.toml --ids 1,2,3 --out logits.safetensors");
        let said = Answer::of(command.env("MONOBLOC_CACHE_KEY_FILE", key)).code(0).stderr;
        (fs::read(machine.0.path("logits.safetensors")).unwrap(), said)
    };
    Machine::new().logits(&remote);
    let schedules = files(&nginx.files(), |path| path.contains("/schedule-v1/") && !path.ends_with(".why"));
    for schedule in &schedules {
        forge(&nginx.files().join("team"), schedule, |bytes| {
            let text = String::from_utf8(bytes.clone()).unwrap();
            *bytes = text.replacen("epilogue=logits scale=1", "epilogue=logits scale=2", 1).into_bytes();
        });
    }
    let (logits, said) = with_key(&Machine::new());
    assert!(logits == honest && said.contains("run schedule"), "{said}");
    // What the key sealed is used by others who have it, and forgeries at its place are refused.
    let (logits, said) = with_key(&Machine::new());
    assert!(logits == honest && !said.contains("run schedule"), "{said}");
    let sealed = files(&nginx.files(), |path| path.contains("/schedule-v1-k") && !path.ends_with(".why"));
    for (sealed, forged) in sealed.iter().zip(&schedules) {
        fs::write(sealed, fs::read(forged).unwrap()).unwrap();
    }
    let (logits, said) = with_key(&Machine::new());
    assert!(logits == honest && said.contains("made without the right key"), "{said}");
}

#[test]
fn a_broken_remote_costs_one_note_and_no_build() {
    let Some(server) = s3("a_broken_remote_costs_one_note_and_no_build") else { return };
    let honest = honest();
    let always = |fault: Fault| {
        s3_address(Proxy::start(server, move |_| fault).address, "bucket").replace("timeout=60", "timeout=2")
    };
    let full = Proxy::start(server, |seen| if seen.method == "PUT" { Fault::Status(507) } else { Fault::None });
    let cases = [
        ("down", "s3://bucket?endpoint=http://127.0.0.1:9&region=a&timeout=2".to_string(), 2, "Connection refused"),
        ("silent", always(Fault::Silence), 2, "2 s"),
        ("throttling", always(Fault::Status(429)), 2, "wants fewer requests (status 429)"),
        ("overloaded", always(Fault::Status(503)), 2, "wants fewer requests (status 503)"),
        ("denied", always(Fault::Status(403)), 2, "access denied; check the credentials (status 403)"),
        ("cut", always(Fault::CutAnswer), 2, ""),
        ("lost", s3_address(server, "no-such-bucket"), 2, "no such bucket"),
        ("full", s3_address(full.address, &bucket(server)), 1, "the server has no space (status 507)"),
    ];
    for (name, remote, count, expected) in cases {
        let begun = Instant::now();
        let (logits, said) = Machine::new().logits(&remote);
        assert!(logits == honest, "{name}: {said}");
        assert!(notes(&said).len() <= count && said.contains(expected), "{name}: {said}");
        assert!(begun.elapsed() < Duration::from_secs(60), "{name}: {} s", begun.elapsed().as_secs());
    }
}

/// With `MONOBLOC_FAULT_BUILDS=500`, as many builds.
#[test]
fn builds_are_right_with_random_faults() {
    let Some(server) = s3("builds_are_right_with_random_faults") else { return };
    let Some(nginx) = Nginx::start("builds_are_right_with_random_faults") else { return };
    let honest = honest();
    let builds = std::env::var("MONOBLOC_FAULT_BUILDS").ok().and_then(|count| count.parse().ok()).unwrap_or(8);
    let bucket = bucket(server);
    let mut injected = 0;
    for seed in 0..builds {
        let upstream = if seed % 2 == 0 { server } else { nginx.address() };
        let proxy = Proxy::random(upstream, seed, 2 + (seed % 9) as u32);
        let remote = match seed % 2 == 0 {
            true => s3_address(proxy.address, &bucket),
            false => format!("dav://{}/locked/team?timeout=60", proxy.address),
        };
        let (logits, said) = Machine::new().with_password().logits(&remote);
        assert!(logits == honest, "seed {seed}: {said}");
        let faults = proxy.faults();
        injected += faults.iter().filter(|(name, _)| *name != "None").map(|(_, count)| count).sum::<usize>();
    }
    no_file_has_a_secret(&nginx.files());
    Machine::new().run(&s3_address(server, &bucket), "cache pull").code(0);
    eprintln!("{builds} builds, {injected} faults");
    assert!(injected as u64 >= builds, "{injected}");
}

#[test]
fn push_pull_verify_and_gc() {
    let Some(server) = s3("push_pull_verify_and_gc") else { return };
    let remote = s3_address(server, &bucket(server));
    let first = Machine::new();
    first.build("");
    let sent = first.run(&remote, "cache push --json").code(0).json();
    assert!(sent["entries"].as_u64() > Some(5) && sent["there"] == 0, "{sent}");
    let again = first.run(&remote, "cache push --json").code(0).json();
    assert_eq!((again["entries"].as_u64(), &again["there"]), (Some(0), &sent["entries"]));

    let second = Machine::new();
    let brought = second.run(&remote, "cache pull").code(0).stdout;
    assert!(brought.starts_with(&format!("brought {} entries", sent["entries"])), "{brought}");
    second.run("", "cache verify").code(0);
    assert!(second.build("").stderr.contains("no work to do"));
    assert!(second.run(&remote, "cache verify --remote").code(0).stdout.starts_with("sound: no problem in"));

    let kept = second.run(&remote, "cache gc --remote --older-than 1h --json").code(0).json();
    assert_eq!(kept["entries"], 0);
    let gone = second.run(&remote, "cache gc --remote --older-than 0s --json").code(0).json();
    assert_eq!((&gone["entries"], &gone["there"]), (&sent["entries"], &serde_json::json!(0)));
    assert!(Machine::new().run(&remote, "cache pull").code(0).stdout.starts_with("brought 0 entries"));

    second.run("", "cache push").fault(2, &["there is no remote cache", "MONOBLOC_REMOTE_CACHE"]);
    let down = "s3://bucket?endpoint=http://127.0.0.1:9&timeout=1";
    second.run(down, "cache push").fault(3, &["cannot list the remote cache `s3://bucket?", "Connection refused"]);
}

#[test]
fn a_manifest_names_a_remote_without_credentials() {
    let Some(server) = s3("a_manifest_names_a_remote_without_credentials") else { return };
    let remote = s3_address(server, &bucket(server));
    let text = manifest_text(&format!("path:{}", fixture("variants/llama-defaults").display()), 8);
    let machine = |cache: &str| {
        let machine = Machine::new();
        machine.0.write("m.toml", format!("{text}{cache}"));
        machine
    };
    let section = format!("[cache]\nremote = \"{remote}\"\n");
    machine(&section).build("");
    assert!(machine(&section).build("").stderr.contains("no work to do"));
    assert!(machine(&format!("{section}mode = \"off\"\n")).build("").stderr.contains("run schedule"));

    for place in ["s3://AKIAHUNTER:hunter2hunter2@bucket", "s3://bucket?secret_access_key=hunter2hunter2"] {
        let answer = Answer::of(&mut machine(&format!("[cache]\nremote = \"{place}\"\n")).0.command("build m.toml"));
        let answer =
            answer.refused(&["`cache.remote` of `m.toml`: the URL has credentials in it", "AWS_ACCESS_KEY_ID"]);
        assert!(!answer.stderr.contains("hunter2"), "{answer:#?}");
        let plain = machine("");
        let mut command = plain.0.command("build m.toml");
        let answer = Answer::of(command.env("MONOBLOC_REMOTE_CACHE", place));
        assert!(!answer.fault(3, &["the URL has credentials in it"]).stderr.contains("hunter2"));
    }
    let answer = Answer::of(&mut machine("[cache]\nremote = \"s3//bucket\"\n").0.command("build m.toml"));
    answer.refused(&["`cache.remote` is no address", "^^^"]);
}

/// A cache whose local folder is `root`, and its notes.
fn cache_at(root: &Path, remote: &str) -> (Cache, Arc<Mutex<Vec<String>>>) {
    let notes = Arc::new(Mutex::new(vec![]));
    let sink = notes.clone();
    let remote = Some(RemoteText { address: remote.to_string(), mode: None });
    let places = Places { root: root.to_path_buf(), shared: None, shared_read_only: false, key_file: None, remote };
    // A slow machine waits, and that is no fault.
    let note = move |note: &Note| match note {
        Note::Sending | Note::Fetching { .. } | Note::Waiting { .. } => {}
        note => sink.lock().unwrap().push(note.to_string()),
    };
    (Cache::open_places(&places, note).unwrap(), notes)
}

#[test]
fn a_share_that_is_only_read_gets_nothing_from_a_remote() {
    let Some(nginx) = Nginx::start("a_share_that_is_only_read_gets_nothing_from_a_remote") else { return };
    let folder = tempfile::tempdir().unwrap();
    let address = format!("dav://{}/read-only-share", nginx.address());
    let key = Digest::of(b"small");
    let (first, _) = cache_at(&folder.path().join("first"), &address);
    first.put("pack", &key, "n = 1\n", b"content").unwrap();
    drop(first);
    let shared = folder.path().join("shared");
    fs::create_dir(&shared).unwrap();
    let machine = |name: &str, shared_read_only| {
        let remote = Some(RemoteText { address: address.clone(), mode: None });
        let (root, shared) = (folder.path().join(name), Some(shared.clone()));
        let cache = Cache::open_places(&Places { root, shared, shared_read_only, key_file: None, remote }, |_| {});
        cache.unwrap().get("pack", &key).unwrap().expect("an entry of the remote").into_bytes().unwrap()
    };
    assert_eq!(machine("second", true), b"content");
    assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
    assert_eq!(machine("third", false), b"content");
    assert_eq!(files(&shared, |path| path.contains(&key.to_string())).len(), 2, "the entry and its key text");
}

fn large_entry(cache: &Cache, bytes: usize) -> (Digest, Digest) {
    let key = Digest::of(b"large");
    let content = cache.put_file("pack", &key, "n = 1\n", |file| {
        let mut left = bytes;
        let mut block = Digest::of(b"begin");
        while left > 0 {
            let piece = block.to_string().repeat(1 << 12);
            let piece = &piece.as_bytes()[..left.min(piece.len())];
            file.write_all(piece).map_err(|source| monobloc::cache::CacheError::io("write", Path::new("x"), source))?;
            left -= piece.len();
            block = Digest::of(block.as_bytes());
        }
        Ok::<(), monobloc::cache::CacheError>(())
    });
    (key, content.unwrap())
}

#[test]
fn large_entries_travel_in_parts_and_are_resumed() {
    let Some(nginx) = Nginx::start("large_entries_travel_in_parts_and_are_resumed") else { return };
    let folder = tempfile::tempdir().unwrap();
    let direct = format!("dav://{}/team?timeout=120", nginx.address());
    let (first, notes) = cache_at(&folder.path().join("first"), &direct);
    let (key, content) = large_entry(&first, 5 * PART + 12345);
    drop(first);
    assert!(notes.lock().unwrap().is_empty(), "{notes:?}");

    // The server fails after three parts; a later process asks only for the rest.
    // By place, because parts are asked for at the same time.
    let failing = Proxy::start(nginx.address(), |seen| {
        let range = seen.range.as_deref().and_then(|range| range.strip_prefix("bytes=")?.split('-').next());
        let begin: Option<usize> = range.and_then(|begin| begin.parse().ok());
        if begin.is_some_and(|begin| begin == 3 * PART) { Fault::Status(503) } else { Fault::None }
    });
    let place = folder.path().join("second");
    let (second, notes) = cache_at(&place, &format!("dav://{}/team?timeout=120", failing.address));
    assert!(second.get("pack", &key).unwrap().is_none());
    drop(second);
    assert!(notes.lock().unwrap()[0].contains("cannot read"), "{notes:?}");
    let left = files(&place.join("tmp"), |path| path.contains("/part-"));
    let left_bytes = fs::metadata(&left[0]).unwrap().len() as usize;
    assert_eq!(left_bytes, 3 * PART);

    let proxy = Proxy::start(nginx.address(), |_| Fault::None);
    let (second, notes) = cache_at(&place, &format!("dav://{}/team", proxy.address));
    let entry = second.get("pack", &key).unwrap().expect("an entry");
    assert_eq!((entry.content(), entry.len() as usize), (content, 5 * PART + 12345));
    assert_eq!(second.why("pack", &key).as_deref(), Some("n = 1\n"));
    assert!(notes.lock().unwrap().is_empty() && second.verify(&mut |_, _| {}).unwrap().is_empty(), "{notes:?}");
    let parts: Vec<String> = proxy.seen().into_iter().filter_map(|seen| seen.range).collect();
    assert!(parts.iter().any(|range| range.starts_with(&format!("bytes={left_bytes}-"))), "{parts:?}");
    assert!(!parts.iter().any(|range| range.starts_with("bytes=0-")), "{parts:?}");

    // A flipped bit in a part: nothing of the entry is used.
    let flipping = Proxy::start(nginx.address(), |seen| match seen.range.as_deref() {
        Some(range) if range.starts_with(&format!("bytes={}-", 2 * PART)) => Fault::Flip,
        _ => Fault::None,
    });
    let (third, notes) = cache_at(&folder.path().join("third"), &format!("dav://{}/team", flipping.address));
    assert!(third.get("pack", &key).unwrap().is_none());
    assert!(notes.lock().unwrap()[0].contains("is damaged: expected content"), "{notes:?}");
}

#[test]
fn an_upload_may_take_longer_than_the_timeout() {
    let Some(nginx) = Nginx::start("an_upload_may_take_longer_than_the_timeout") else { return };
    let folder = tempfile::tempdir().unwrap();
    // 8 s: longer than the timeout, and shorter than what the entry may take in all.
    let slow = |seen: &Seen| if seen.method == "PUT" { Fault::Slow(5) } else { Fault::None };
    let proxy = Proxy::start(nginx.address(), slow);
    let (first, notes) = cache_at(&folder.path().join("first"), &format!("dav://{}/slow?timeout=6", proxy.address));
    let (key, content) = large_entry(&first, 5 * PART + 1);
    drop(first);
    assert!(notes.lock().unwrap().is_empty(), "{notes:?}");
    let name = format!("/{key}");
    let sent = proxy.seen().into_iter().filter(|seen| seen.method == "PUT" && seen.path.ends_with(&name)).count();
    assert_eq!(sent, 1, "{:?}", proxy.seen());
    let (second, notes) = cache_at(&folder.path().join("second"), &format!("dav://{}/slow", nginx.address()));
    assert_eq!(second.get("pack", &key).unwrap().map(|entry| entry.content()), Some(content), "{notes:?}");

    // A server that takes all and never answers costs one note, and not a wait without an end.
    let silent = Proxy::start(nginx.address(), |seen| match seen.method.as_str() {
        "PUT" if !seen.path.ends_with(".why") => Fault::Silence,
        _ => Fault::None,
    });
    let (third, notes) = cache_at(&folder.path().join("third"), &format!("dav://{}/silent?timeout=1", silent.address));
    large_entry(&third, 5 * PART + 1);
    drop(third);
    let notes = notes.lock().unwrap();
    let told = ["cannot write: the server did not answer in time", "cannot write: it took longer than"];
    assert!(notes.len() == 1 && told.iter().any(|text| notes[0].contains(text)), "{notes:?}");
}

/// What a server does that does not keep to its protocol.
#[derive(Debug, Clone, Copy)]
enum Lie {
    /// All of the object in place of the range.
    NoRanges,
    /// Another range than the one that was asked for.
    OtherRange,
    /// An answer without an end.
    Endless,
    /// A length that is more than what follows.
    TooLong,
    /// A length that is less than what follows.
    TooShort,
    /// Bytes of another object under each ETag.
    Changing,
}

/// A server of plain HTTP with one object below each name, and the bytes that it has sent.
fn liar(object: Vec<u8>, lie: Lie) -> (SocketAddr, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, sent) = (listener.local_addr().unwrap(), Arc::<AtomicU64>::default());
    let (object, count) = (Arc::new(object), sent.clone());
    thread::spawn(move || {
        for client in listener.incoming() {
            let (object, count) = (object.clone(), count.clone());
            // A client that has heard enough closes the connection.
            thread::spawn(move || client.map(|client| answer_wrongly(client, &object, lie, &count)));
        }
    });
    (address, sent)
}

fn answer_wrongly(client: TcpStream, object: &[u8], lie: Lie, count: &AtomicU64) -> std::io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let mut range = 0..object.len();
    let mut is_head = false;
    for at in 0.. {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        is_head |= at == 0 && line.starts_with("HEAD");
        if let Some((first, last)) =
            line.to_ascii_lowercase().strip_prefix("range: bytes=").and_then(|r| r.split_once('-'))
        {
            range = first.parse().unwrap()..last.trim().parse::<usize>().map_or(object.len(), |last| last + 1);
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let is_part = range != (0..object.len());
    let part = match lie {
        Lie::NoRanges => object,
        Lie::OtherRange if is_part => &object[range.start - 1..range.end - 1],
        _ => &object[range.clone()],
    };
    let mut part = part.to_vec();
    if matches!(lie, Lie::Changing) {
        part[0] = count.load(Ordering::Relaxed) as u8;
    }
    let length = match lie {
        Lie::TooLong => part.len() + 1,
        Lie::TooShort => part.len() - 1,
        _ => part.len(),
    };
    let status = if is_part && !matches!(lie, Lie::NoRanges) { "206 Partial Content" } else { "200 OK" };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Range: bytes {}-{}/{}\r\nETag: \"{}\"\r\nConnection: close\r\n",
        range.start,
        range.end - 1,
        object.len(),
        count.load(Ordering::Relaxed)
    );
    let mut client = &client;
    if matches!(lie, Lie::Endless) && is_part {
        client.write_all(format!("{head}Transfer-Encoding: chunked\r\n\r\n").as_bytes())?;
        let block = [b"100000\r\n".to_vec(), vec![7; 1 << 20], b"\r\n".to_vec()].concat();
        loop {
            client.write_all(&block)?;
            count.fetch_add(block.len() as u64, Ordering::Relaxed);
        }
    }
    client.write_all(format!("{head}Content-Length: {length}\r\n\r\n").as_bytes())?;
    if !is_head {
        for block in part.chunks(1 << 16) {
            client.write_all(block)?;
            count.fetch_add(block.len() as u64, Ordering::Relaxed);
        }
    }
    Ok(())
}

#[test]
fn a_server_that_lies_is_neither_believed_nor_kept() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("first");
    let (first, _) = cache_at(&place, "http://127.0.0.1:9/none?timeout=1");
    let (key, content) = large_entry(&first, 6 * PART + 777);
    let object = fs::read(files(&place, |path| path.ends_with(&key.to_string())).remove(0)).unwrap();
    let object_bytes = object.len() as u64;
    for lie in [Lie::NoRanges, Lie::OtherRange, Lie::Endless, Lie::TooLong, Lie::TooShort, Lie::Changing] {
        let (address, sent) = liar(object.clone(), lie);
        let (cache, notes) =
            cache_at(&folder.path().join(format!("{lie:?}")), &format!("http://{address}/team?timeout=20"));
        let begun = Instant::now();
        let found = cache.get("pack", &key).unwrap();
        // What is sound is used, whatever the head of an answer says.
        assert!(found.is_none_or(|entry| entry.content() == content), "{lie:?}");
        let notes = notes.lock().unwrap();
        assert!(notes.len() <= 1 && begun.elapsed() < Duration::from_secs(120), "{lie:?}: {notes:?}");
        // Parts that are too long are not read to their ends: of the object, or of nothing.
        let sent = sent.load(Ordering::Relaxed);
        assert!(sent < 12 * object_bytes, "{lie:?}: {sent} bytes");
        if matches!(lie, Lie::NoRanges | Lie::Endless) {
            assert!(notes[0].contains("the server sent another part than it was asked for"), "{lie:?}: {notes:?}");
        }
    }
}

#[test]
fn large_entries_travel_in_parts_with_s3() {
    let Some(server) = s3("large_entries_travel_in_parts_with_s3") else { return };
    let bucket = bucket(server);
    let folder = tempfile::tempdir().unwrap();
    // One part of three is answered with 503 once; a part is sent again.
    let mut count = 0;
    let proxy = Proxy::start(server, move |seen| {
        count += usize::from(seen.path.contains("partNumber"));
        if seen.path.contains("partNumber") && count == 2 { Fault::Status(503) } else { Fault::None }
    });
    let (first, notes) = cache_at(&folder.path().join("first"), &anonymous(proxy.address, &bucket));
    let (key, content) = large_entry(&first, 3 * PART + 77);
    drop(first);
    assert!(notes.lock().unwrap().is_empty(), "{notes:?}");
    assert!(proxy.seen().iter().filter(|seen| seen.path.contains("partNumber")).count() >= 5, "{:?}", proxy.faults());
    let (second, notes) = cache_at(&folder.path().join("second"), &anonymous(server, &bucket));
    assert_eq!(second.get("pack", &key).unwrap().map(|entry| entry.content()), Some(content), "{notes:?}");
    // An upload that was given up leaves nothing.
    let (status, listed) = plain(server, "GET", &format!("/{bucket}?uploads"), b"");
    assert!(status == 200 && !String::from_utf8_lossy(&listed).contains("<UploadId>"));
}

fn anonymous(server: SocketAddr, bucket: &str) -> String {
    format!("{}&anonymous=true", s3_address(server, bucket).replace("timeout=60", "timeout=300"))
}
