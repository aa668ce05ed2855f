//! Tests exports: the folder runs a model without a manifest, a checkpoint or a cache, and no changed part of it is used.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

use monobloc::cache::Cache;
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::digest::Digest;
use monobloc::error::{Fault, Tier};
use monobloc::manifest::Manifest;
use monobloc::pipeline::{AskedSizes, Checking, Exported, Ready, Serving, Workspace, export as export_model};
use monobloc::report::Report;
use monobloc::target::TargetKind;
use serde_json::{Value, json};

use crate::cli_support::{Answer, Place, manifest_text};
use crate::http_client::post;
use crate::nvrtc::nvrtc;
use crate::serve::Server;
use crate::support::fixture;

const NOT_ASKED: AskedSizes = AskedSizes { running_max: None, chunk_rows: None };
const SERVING: Serving =
    Serving { asked: NOT_ASKED, running_max: 2, chunk_rows: 2, steps_max: 1, proposed: 0, cache_tokens: Some(512) };

const MANIFEST: &str = "[model]
source = \"path:MODEL\"
[precision]
weights = \"bf16\"
[decode]
context_max = 256
steps_per_launch = 4
[[target]]
record = \"RECORD\"
";

/// An export that a test may damage.
struct Export {
    folder: tempfile::TempDir,
}

/// `record`: a record, or `cpu x 2` for two devices of it.
fn manifest(folder: &Path, record: &str, model: &str) -> Manifest {
    let (record, devices) = record.split_once(" x ").unwrap_or((record, "1"));
    let text = MANIFEST.replace("MODEL", &fixture(model).display().to_string()).replace("RECORD", record);
    let text = format!("{text}devices = {devices}\n");
    Manifest::parse(&text, &folder.join("m.toml")).unwrap_or_else(|error| panic!("{error}"))
}

fn workspace(folder: &Path) -> Workspace {
    Workspace {
        cache: Cache::open(folder.join("cache")).expect("a cache"),
        report: Report::quiet(),
        trials: folder.join("trials.csv"),
    }
}

fn write(folder: &Path, record: &str, model: &str, out: &Path, stop: bool) -> Result<bool, Fault> {
    let workspace = workspace(folder);
    let manifest = manifest(folder, record, model);
    Ok(export_model(&workspace, &manifest, out, &SERVING, Checking::Required, &|| stop)?.is_some())
}

impl Export {
    fn of(record: &str) -> Export {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("export");
        assert!(write(folder.path(), record, "tinystories-llama", &out, false).unwrap_or_else(|f| panic!("{f}")));
        fs::remove_dir_all(folder.path().join("cache")).expect("the cache is not used");
        Export { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("export").join(name)
    }

    /// Loads everything that the export has.
    fn load(&self) -> Result<(), Fault> {
        let exported = Exported::open(&self.path(""))?;
        let target = exported.manifest().targets[0].clone();
        let ready = Ready::exported(Report::quiet(), exported, &target)?;
        if target.kind == TargetKind::Cpu {
            ready.batched(&SERVING)?.stepper()?;
        }
        ready.runner().map(drop)
    }

    #[track_caller]
    fn refused(&self) -> Fault {
        self.load().expect_err("a part that is not what was exported is used")
    }

    fn index(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("export.json")).expect("an index")).expect("JSON")
    }

    /// Files of the index, and the index itself.
    fn files(&self) -> Vec<String> {
        let index = self.index();
        let listed = index["files"].as_object().expect("files").keys().cloned();
        listed.chain(["export.json".to_string(), "export.b3".to_string()]).collect()
    }

    /// Changes the index as an attacker with write access can: the digests fit.
    fn edit(&self, change: impl FnOnce(&mut Value)) {
        let mut index = self.index();
        change(&mut index);
        let text = index.to_string();
        fs::write(self.path("export.json"), &text).expect("written");
        fs::write(self.path("export.b3"), format!("{}\n", Digest::of(text.as_bytes()))).expect("written");
    }

    /// Replaces a file, and its digest in the index.
    fn replace(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).expect("written");
        let facts = json!({ "bytes": bytes.len(), "digest": Digest::of(bytes).to_string() });
        self.edit(|index| index["files"][name] = facts);
    }
}

#[test]
fn commands_run_from_an_export_alone() {
    let place = Place::new();
    let checkpoint = place.checkpoint("tinystories-llama");
    place.manifest(&checkpoint, 256);
    place.write("story.txt", "Once upon a time, there was a little fox. He liked to run.");
    let said = |model: &str| {
        let run = |arguments: String| place.run(&arguments).code(0);
        run(format!("logits {model} --ids 0,364,839 --out {model}.safetensors"));
        let chat = Answer::of(place.command(&format!("chat {model} --max-tokens 12")).write_stdin("Hello.\n")).code(0);
        (
            run(format!("generate {model} --prompt Once --max-tokens 12")).stdout,
            run(format!("generate {model} --ids 0,364 --max-tokens 5 --temperature 0.9 --seed 3")).stdout,
            run(format!("perplexity {model} story.txt")).stdout,
            chat.stdout,
            fs::read(place.path(&format!("{model}.safetensors"))).expect("logits"),
        )
    };
    let built = said("m.toml");
    let written = place.run("export m.toml --out m.export --json").code(0).json();
    assert_eq!(written["targets"], json!(["cpu"]));
    let index = fs::read(place.path("m.export/export.json")).expect("an index");
    assert_eq!(written["digest"], Digest::of(&index).to_string());
    // The inputs of the export are removed, and the folder may be anywhere.
    fs::remove_dir_all(checkpoint).expect("removed");
    fs::remove_file(place.path("m.toml")).expect("removed");
    fs::remove_dir_all(place.path("cache")).expect("removed");
    fs::rename(place.path("m.export"), place.path("moved")).expect("moved");
    assert_eq!(said("moved"), built);

    let mut command = place.process("serve moved --port 0");
    let mut server = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("a server");
    let mut line = String::new();
    BufReader::new(server.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("serving `m` at http://").and_then(|address| address.parse().ok());
    let reply = address.map(|address| {
        post(address, "/v1/completions", &json!({ "prompt": "Once", "max_tokens": 12, "temperature": 0 }))
    });
    let _ = server.kill();
    let _ = server.wait();
    let reply = reply.unwrap_or_else(|| panic!("{line:?}"));
    assert_eq!(format!("{}\n", reply.json()["choices"][0]["text"].as_str().unwrap_or_default()), built.0, "{reply:?}");
    assert!(!place.path("cache").exists(), "no cache is made");

    place.run("serve moved --max-batch 64").refused(&["the export has room for at most 16 rows, 65 are asked for"]);
    place.run("build moved").refused(&["`moved` is an export", "name the manifest"]);
    place.run("perplexity moved story.txt --formats").refused(&["`moved` is an export"]);
    place.run("generate moved --ids 1 --target h200").refused(&["has no target `h200`: expected `cpu`"]);
}

#[test]
fn an_export_is_complete_or_not_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("export");
    let names = || {
        let entries = fs::read_dir(folder.path()).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
        names.filter(|name| name != "cache").collect::<Vec<String>>()
    };
    assert!(!write(folder.path(), "cpu", "tinystories-llama", &out, true).expect("it stops"));
    assert_eq!(names(), Vec::<String>::new(), "nothing is left of an export that was stopped");
    fs::write(folder.path().join("file"), "").expect("a file");
    for (parent, said) in [("no", "No such file or directory (os error 2)"), ("file", "Not a directory (os error 20)")]
    {
        let beside = folder.path().join(parent).join("export");
        let fault = write(folder.path(), "cpu", "tinystories-llama", &beside, false).expect_err("no such folder");
        assert_eq!(fault.tier, Tier::Environment);
        assert!(fault.message.ends_with(&format!("/{parent}/export`: {said}")), "{fault}");
        assert!(fault.to_string().contains("whose parent is a folder"), "{fault}");
    }
    fs::remove_file(folder.path().join("file")).expect("the file");
    fs::create_dir(&out).expect("a folder in its place");
    let fault = write(folder.path(), "cpu", "tinystories-llama", &out, false).expect_err("it would be overwritten");
    assert!(fault.message.ends_with("export` exists") && fault.tier == Tier::Input, "{fault}");
    assert_eq!(names(), ["export"]);
}

#[test]
fn every_file_is_compared_with_its_digest() {
    let export = Export::of("cpu");
    export.load().unwrap_or_else(|fault| panic!("{fault}"));
    let files = export.files();
    for part in ["model/tokenizer.json", "targets/cpu.toml", "cpu/text.mkir", "cpu/batch.mkir"] {
        assert!(files.iter().any(|file| file == part), "{part}: {files:?}");
    }
    for file in files {
        let path = export.path(&file);
        let sound = fs::read(&path).expect("a file");
        let mut changed = sound.clone();
        changed[sound.len() / 2] ^= 1;
        for (bytes, what) in [(Some(changed), "changed"), (Some(sound[1..].to_vec()), "cut"), (None, "missing")] {
            match bytes {
                Some(bytes) => fs::write(&path, bytes).expect("written"),
                None => fs::remove_file(&path).expect("removed"),
            }
            let fault = export.refused();
            // If a digest file changed, the message names the file that it belongs to.
            let named = if file == "export.b3" && what != "missing" { "export.json" } else { &file };
            assert!(fault.message.contains(&format!("{named}` is ")), "{file} {what}: {fault}");
            assert_eq!(fault.tier, Tier::Environment, "{file} {what}: {fault}");
            assert!(fault.remedy.is_some_and(|remedy| remedy.contains("again")), "{file} {what}");
        }
        fs::write(&path, sound).expect("written");
    }
    export.load().unwrap_or_else(|fault| panic!("{fault}"));
    // The tokenizer would accept this template.
    fs::write(export.path("model/chat_template.jinja"), "{{ messages }}").expect("written");
    let fault = export.refused();
    assert!(fault.message.contains("chat_template.jinja` is no part of the export"), "{fault}");
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let export = Export::of("cpu");
    let index = export.index();
    let text = "cpu/text.mkir";
    let schedule = fs::read_to_string(export.path(text)).expect("a schedule");
    let refused = |change: &dyn Fn(&mut Value), expected: &str| {
        export.edit(change);
        let fault = export.refused();
        assert!(fault.message.contains(expected), "{fault}");
        assert!(fault.tier == Tier::Input && fault.remedy.is_some(), "{fault:?}");
        export.edit(|edited| *edited = index.clone());
    };
    refused(
        &|index| index["format"] = json!(3),
        concat!("has format 3, written by monobloc ", env!("CARGO_PKG_VERSION"), "; this monobloc reads format 6"),
    );
    refused(&|index| index["surprise"] = json!(2), "is no index of an export: unknown field `surprise`");
    refused(&|index| index["vocab"] = json!(7), "is for another model, or for weights in another layout");
    refused(&|index| index["context_max"] = json!(64), "is for another model");
    refused(&|index| index["targets"][0]["pack_identity"] = json!("0"), "is for another model");
    refused(&|index| index["targets"][0]["pack"] = json!("other"), "names `other` and does not list it");
    for record in ["/etc/passwd", "../m.toml", "cpu", "targets/other.toml", "model/config.json"] {
        let elsewhere = |index: &mut Value| index["targets"][0]["record"] = json!(record);
        refused(
            &elsewhere,
            &format!("takes the record of target `cpu` from `{record}`, expected a file of `targets/`"),
        );
    }
    let pack = index["targets"][0]["pack"].as_str().expect("a pack").to_string();
    let bytes = index["files"][&pack]["bytes"].as_u64().expect("its length");
    // A hole of a TiB, which would be hashed for an hour.
    let file = fs::OpenOptions::new().write(true).open(export.path(&pack)).expect("the pack");
    file.set_len(1 << 40).expect("a sparse file");
    let longer = |index: &mut Value| index["files"][&pack]["bytes"] = json!(1u64 << 40);
    refused(&longer, &format!("has 1099511627776 bytes, expected the {bytes} of its schedule"));
    file.set_len(bytes).expect("its length");
    let outside = |index: &mut Value| index["files"]["../m.toml"] = json!({ "bytes": 1, "digest": "0" });
    refused(&outside, "names `../m.toml`, which is outside of its folder");

    // A schedule with a race, with a digest that fits.
    assert!(schedule.contains(" wait e1>="), "the edit applies");
    export.replace(text, schedule.replacen(" wait e1>=", " wait e0>=", 1).as_bytes());
    let fault = export.refused();
    assert!(fault.message.contains("text.mkir` is not proven: ") && fault.tier == Tier::Input, "{fault}");
    export.replace(text, b"mkir 99\n");
    let fault = export.refused();
    assert!(fault.message.contains("text.mkir` cannot be read: "), "{fault}");
    assert!(fault.remedy.is_some_and(|remedy| remedy.contains("export the model again")));
    export.replace(text, schedule.as_bytes());
    export.load().unwrap_or_else(|fault| panic!("{fault}"));
}

#[test]
fn an_export_of_two_devices_answers_as_that_of_one() {
    let place = Place::new();
    let source = format!("path:{}", fixture("tinystories-llama").display());
    let text = manifest_text(&source, 128) + "\n[[target]]\nrecord = \"cpu\"\ndevices = 2\n";
    place.write("tiny.toml", text);
    let written = place.run("export tiny.toml --out both --json").code(0).json();
    assert_eq!(written["targets"], json!(["cpu", "cpu-x2"]));
    fs::remove_file(place.path("tiny.toml")).expect("removed");
    fs::remove_dir_all(place.path("cache")).expect("removed");
    let index: Value =
        serde_json::from_slice(&fs::read(place.path("both/export.json")).expect("an index")).expect("JSON");
    let [one, two] = [0, 1].map(|at| &index["targets"][at]);
    assert_eq!((&one["devices"], &two["devices"]), (&Value::Null, &json!(2)));
    // One pack for any number of devices, and the record of one device.
    assert_eq!((&one["pack"], &one["pack_identity"]), (&two["pack"], &two["pack_identity"]));
    let [record, of_two] = ["cpu", "cpu-x2"].map(|name| fs::read(place.path(&format!("both/targets/{name}.toml"))));
    assert_eq!(record.expect("a record"), of_two.expect("a record"));
    let said = |target: &str| {
        let run = |arguments: String| place.run(&format!("{arguments} --target {target}")).code(0).stdout;
        run(format!("logits both --ids 0,364,839 --out {target}.safetensors"));
        let logits = fs::read(place.path(&format!("{target}.safetensors"))).expect("logits");
        let sampled = run("generate both --ids 0,364 --max-tokens 5 --temperature 0.9 --seed 3".to_string());
        (run("generate both --prompt Once --max-tokens 12".to_string()), sampled, logits)
    };
    assert_eq!(said("cpu"), said("cpu-x2"));
    assert!(!place.path("cache").exists(), "no cache is made");
    let export = place.path("both");
    let answers = ["cpu", "cpu-x2"].map(|target| {
        let arguments = format!("--max-batch 2 --target {target}");
        let server = Server::start_in(Place::new(), &export.display().to_string(), &arguments, |_| {});
        let asked =
            json!({ "prompt": ["Once upon a time", "The cat"], "max_tokens": 12, "temperature": 0.8, "seed": 1 });
        server.ok("/v1/completions", &asked)["choices"].clone()
    });
    assert!(answers[0].as_array().is_some_and(|choices| choices.len() == 2), "{}", answers[0]);
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn devices_of_an_export_that_do_not_fit_are_refused() {
    let export = Export::of("cpu x 2");
    export.load().unwrap_or_else(|fault| panic!("{fault}"));
    let (index, text) = (export.index(), "cpu-x2/text.mkir");
    let schedule = fs::read_to_string(export.path(text)).expect("a schedule");
    let refused = |change: &dyn Fn(&mut Value), expected: &str| {
        export.edit(|index| change(&mut index["targets"][0]));
        let fault = export.refused();
        assert!(fault.message.contains(expected), "{expected}: {fault}");
        assert!(fault.tier == Tier::Input && fault.remedy.is_some(), "{fault:?}");
        export.edit(|edited| *edited = index.clone());
    };
    for devices in [0, 3, 16] {
        let expected = format!("gives target `cpu-x2` {devices} devices, expected 1, 2, 4 or 8");
        refused(&|target| target["devices"] = json!(devices), &expected);
    }
    let of_four =
        "has a target `cpu-x2`, expected `cpu-x4`, as `targets/cpu-x2.toml` and its number of devices, 4, say";
    refused(&|target| target["devices"] = json!(4), of_four);
    let of_one = |target: &mut Value| drop(target.as_object_mut().expect("a target").remove("devices"));
    refused(&of_one, "has a target `cpu-x2`, expected `cpu`");
    refused(&|target| target["devices"] = json!(-2), "is no index of an export");
    refused(&|target| (target["name"], target["devices"]) = (json!("cpu-x4"), json!(4)), ".mkir` is not proven: ");
    // A schedule for another number of devices, with a digest that fits: parts that no device has, or that one has twice.
    let machine = "machine \"cpu-x2\" sms=8 devices=2 ";
    assert!(schedule.contains(machine), "the edit applies");
    for (other, expected) in [
        ("machine \"cpu-x2\" sms=8 devices=4 ", "cpu-x2/text.mkir` is for 4 devices, expected the 2 of its target"),
        ("machine \"cpu-x2\" sms=8 ", "cpu-x2/text.mkir` is not proven: "),
        ("machine \"cpu\" sms=8 ", "cpu-x2/text.mkir` is not proven: "),
    ] {
        export.replace(text, schedule.replacen(machine, other, 1).as_bytes());
        let fault = export.refused();
        assert!(fault.message.contains(expected) && fault.tier == Tier::Input, "{expected}: {fault}");
    }
    export.replace(text, schedule.as_bytes());
    export.load().unwrap_or_else(|fault| panic!("{fault}"));
    // A record that calls one device by the name of two.
    let record = "targets/cpu-x2.toml";
    let of_two = fs::read_to_string(export.path(record)).expect("a record").replacen("\"cpu\"", "\"cpu-x2\"", 1);
    export.replace(record, of_two.as_bytes());
    export.edit(|index| of_one(&mut index["targets"][0]));
    let fault = export.refused();
    assert!(fault.message.contains(".mkir` is for 2 devices, expected the 1 of its target"), "{fault}");
}

/// Heads of 64 in bf16, so that long chunks of a prompt have a kernel, and contexts that are worth KV splits.
const SMALL: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 16384,
"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16"}"#;

/// An export of a small model for a device; `None` without a compiler. Kernels are compiled once for all tests.
fn on_device(test: &str) -> Option<Export> {
    if nvrtc(test).is_none() || Nvrtc::load().is_err() {
        return None;
    }
    static WRITTEN: OnceLock<Export> = OnceLock::new();
    let written = WRITTEN.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("config.json");
        fs::write(&config, SMALL).expect("written");
        let text = MANIFEST.replace("path:MODEL", &format!("synthetic:{}", config.display())).replace("RECORD", "h200");
        let text = text.replace("context_max = 256", "context_max = 16384");
        let manifest = Manifest::parse(&text, &folder.path().join("m.toml")).unwrap_or_else(|error| panic!("{error}"));
        let (workspace, out) = (workspace(folder.path()), folder.path().join("export"));
        let written = export_model(&workspace, &manifest, &out, &ON_DEVICE, Checking::Required, &|| false);
        assert!(written.unwrap_or_else(|fault| panic!("{fault}")).is_some());
        Export { folder }
    });
    let folder = tempfile::tempdir().expect("a folder");
    let files = written.files();
    for file in &files {
        let to = folder.path().join("export").join(file);
        fs::create_dir_all(to.parent().expect("a folder")).expect("a folder");
        fs::copy(written.path(file), to).expect("copied");
    }
    Some(Export { folder })
}

/// Nine requests need steps of 16 rows, and together with prompts steps of 64.
const ON_DEVICE: Serving =
    Serving { asked: NOT_ASKED, running_max: 9, chunk_rows: 2, steps_max: 1, proposed: 0, cache_tokens: Some(20_000) };

/// Asserts that loading a part fails only for the device, which this machine does not have.
#[track_caller]
fn taken<T>(loaded: Result<T, Fault>) -> Result<(), Fault> {
    match loaded.map(drop) {
        Err(fault) if fault.message.contains("has no device here") => Ok(()),
        other => other,
    }
}

#[test]
fn an_export_has_the_kernels_of_long_prompts_and_of_a_server() {
    let Some(export) = on_device("an_export_has_the_kernels_of_long_prompts_and_of_a_server") else { return };
    let index = export.index();
    let target = &index["targets"][0];
    let kernels = target["kernels"].as_array().expect("kernels");
    let does: Vec<&str> = kernels.iter().filter_map(|kernel| kernel["does"].as_str()).collect();
    assert_eq!(does, ["text", "prompt", "waves", "tail"]);
    let [prompt, waves, tail] = [1, 2, 3].map(|at| kernels[at]["compiled"].clone());
    for (a, b) in [(&prompt, &waves), (&waves, &tail), (&prompt, &tail)] {
        assert!(a["source"] != b["source"] && a["queues"] != b["queues"]);
    }
    // Waves are derived from the schedule of the kernel for prompts.
    let schedule =
        |kernel: &Value| fs::read(export.path(kernel["schedule"].as_str().expect("a path"))).expect("a schedule");
    assert_eq!(schedule(&kernels[1]), schedule(&kernels[2]));
    assert_eq!(schedule(&kernels[1]), schedule(&kernels[3]));

    let served = &target["served"];
    assert_eq!(served["running_max"], json!(9));
    let steps = served["steps"].as_array().expect("steps");
    let of = |key: &str| steps.iter().map(|steps| steps[key].clone()).collect::<Vec<Value>>();
    assert_eq!(of("rows"), [1, 8, 16, 32, 64].map(|rows| json!(rows)));
    assert_eq!(of("by"), ["words", "words", "words", "waves", "waves"].map(|by| json!(by)));
    let schedules = ["1", "8", "16", "8", "8"].map(|rows| json!(format!("h200/serve-{rows}.mkir")));
    assert_eq!(of("schedule"), schedules);
    // Nine requests have the kernel for 32 rows, which cuts long histories, too.
    let ragged = &served["ragged"];
    assert_eq!([&ragged["rows"], &ragged["by"], &ragged["schedule"]], [&json!(32), &json!("splits"), &schedules[1]]);
    assert_eq!(ragged["compiled"]["cubin"], json!("h200/serve-32-splits.cubin"));
    assert!(ragged["compiled"]["source"] != steps[3]["compiled"]["source"]);
    assert_eq!(served["prompts"].as_array().map(Vec::len), Some(2), "chunks and their tail");
}

#[test]
fn a_cubin_runs_only_if_this_version_would_compile_it() {
    let Some(export) = on_device("a_cubin_runs_only_if_this_version_would_compile_it") else { return };
    let serve = |serving: Serving| {
        let exported = Exported::open(&export.path(""))?;
        let target = exported.manifest().targets[0].clone();
        taken(Ready::exported(Report::quiet(), exported, &target)?.batched(&serving))
    };
    let run = || taken(export.load());
    assert_eq!((run(), serve(ON_DEVICE)), (Ok(()), Ok(())), "what was exported is accepted as far as this machine can");
    let more = serve(Serving { running_max: 10, ..ON_DEVICE }).expect_err("more than there is room for");
    assert_eq!(more.message, "the export has room for at most 9 requests, 10 are asked for");
    let more = serve(Serving { cache_tokens: Some(30_000), ..ON_DEVICE }).expect_err("more than there is room for");
    assert!(more.message.contains("cached tokens, 30000 are asked for"), "{more}");

    let out = export.folder.path().join("other");
    let write = |running_max, cache_tokens| {
        let manifest = manifest(export.folder.path(), "h200", "tinystories-llama");
        let serving = Serving { running_max, cache_tokens, ..ON_DEVICE };
        export_model(&workspace(export.folder.path()), &manifest, &out, &serving, Checking::Required, &|| false)
    };
    for (fault, expected) in
        [(write(129, None), "`--max-batch` is 129"), (write(8, Some(u32::MAX)), "tokens does not fit")]
    {
        let fault = fault.map(drop).expect_err(expected);
        assert!(fault.message.contains(expected) && fault.remedy.is_some(), "{fault}");
        assert!(!out.exists());
    }

    let index = export.index();
    let refused = |loads: &dyn Fn() -> Result<(), Fault>, change: &dyn Fn(&mut Value), expected: &str| {
        export.edit(|index| change(&mut index["targets"][0]));
        let fault = loads().expect_err(expected);
        assert!(fault.message.contains(expected), "{fault}");
        export.edit(|edited| *edited = index.clone());
    };
    let serves = || serve(ON_DEVICE);
    for (part, expected) in [("source", "has another source here"), ("queues", "has other queues here")] {
        refused(&run, &|target| target["kernels"][0]["compiled"][part] = json!("0"), expected);
        for at in 0..5 {
            refused(&serves, &|target| target["served"]["steps"][at]["compiled"][part] = json!("0"), expected);
        }
        refused(&serves, &|target| target["served"]["ragged"]["compiled"][part] = json!("0"), expected);
        for at in 0..2 {
            refused(&serves, &|target| target["served"]["prompts"][at][part] = json!("0"), expected);
        }
    }
    refused(&serves, &|target| target["served"]["sampler"]["source"] = json!("0"), "has another source here");
    // Kernels that differ from the index, and missing parts.
    refused(
        &serves,
        &|target| target["served"]["steps"][1]["rows"] = json!(1),
        concat!("monobloc ", env!("CARGO_PKG_VERSION"), " wrote it"),
    );
    refused(&serves, &|target| target["served"]["steps"][2]["by"] = json!("waves"), "has another source here");
    refused(&serves, &|target| target["served"]["ragged"]["rows"] = json!(64), "has another source here");
    let long = "a kernel of a server for long histories";
    refused(&serves, &|target| target["served"]["ragged"]["rows"] = json!(16), long);
    refused(&serves, &|target| target["served"]["ragged"]["by"] = json!("waves"), long);
    refused(&serves, &|target| target["served"]["steps"][3]["by"] = json!("splits"), long);
    refused(&serves, &|target| target["served"]["ragged"]["schedule"] = json!("other"), "does not list it");
    export.edit(|index| index["batch_invariant"] = json!(true));
    let fault = serves().expect_err("rows with other bits on one of the kernels");
    assert!(fault.message.contains(long), "{fault}");
    export.edit(|edited| *edited = index.clone());
    refused(&serves, &|target| target["served"]["steps"] = json!([]), "a server without kernels");
    refused(
        &serves,
        &|target| target["served"]["prompts"].as_array_mut().expect("two").truncate(1),
        "1 kernels for prompts",
    );
    refused(&serves, &|target| target["served"] = Value::Null, "has no steps of several rows on target `h200`");
    // A schedule over other pages.
    refused(
        &serves,
        &|target| {
            let other = target["kernels"][1].clone();
            target["served"]["steps"][1]["schedule"] = other["schedule"].clone();
            target["served"]["steps"][1]["compiled"] = other["compiled"].clone();
        },
        concat!("monobloc ", env!("CARGO_PKG_VERSION"), " wrote it"),
    );
    refused(&run, &|target| target["kernels"][0]["compiled"] = Value::Null, "does not fit the kind of target `h200`");
    for (loads, file) in [
        (&run as &dyn Fn() -> Result<(), Fault>, "h200/text.cubin"),
        (&serves, "h200/serve-32.cubin"),
        (&serves, "h200/serve-32-splits.cubin"),
        (&serves, "h200/sampler.cubin"),
    ] {
        let cubin = fs::read(export.path(file)).expect("a cubin");
        let mut changed = cubin.clone();
        changed[cubin.len() / 2] ^= 4;
        fs::write(export.path(file), changed).expect("written");
        let fault = loads().expect_err("a changed cubin");
        assert!(fault.message.contains(&format!("{file}` is not what was exported")), "{fault}");
        fs::write(export.path(file), cubin).expect("written");
    }
}

#[test]
fn an_interrupted_export_leaves_no_folder() {
    let place = Place::new();
    place.manifest(&fixture("tinystories-llama"), 256);
    let mut child = place.process("export m.toml --out e").stderr(std::process::Stdio::piped()).spawn().unwrap();
    let folders = || {
        let entries = fs::read_dir(place.path("")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with(".monobloc-export-") || name == "e").collect::<Vec<_>>()
    };
    while folders().is_empty() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it wrote");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    let interrupt = format!("kill -INT {}", child.id());
    assert!(std::process::Command::new("sh").args(["-c", &interrupt]).status().unwrap().success());
    let code = child.wait().unwrap().code();
    // It may have been quick enough to end.
    assert!(
        code == Some(130) && folders().is_empty() || code == Some(0) && folders() == ["e"],
        "{code:?} {:?}",
        folders()
    );
}
