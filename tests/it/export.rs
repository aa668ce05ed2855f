//! Exports: a folder runs a model without a manifest, a checkpoint or a cache, and no part of it is used that is not what was exported.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use monobloc::cache::Cache;
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::digest::Digest;
use monobloc::error::{Fault, Tier};
use monobloc::manifest::Manifest;
use monobloc::pipeline::{Exported, Ready, Serving, Workspace, export};
use monobloc::report::Report;
use serde_json::{Value, json};

use crate::cli_support::{Answer, Place};
use crate::http_client::post;
use crate::nvrtc::nvrtc;
use crate::support::fixture;

const SERVING: Serving = Serving { running_max: 2, chunk_rows: 2, steps_max: 1, cache_tokens: Some(512) };

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

/// An export in a folder of its own, to damage.
struct Export {
    folder: tempfile::TempDir,
}

fn manifest(folder: &Path, record: &str, model: &str) -> Manifest {
    let text = MANIFEST.replace("MODEL", &fixture(model).display().to_string()).replace("RECORD", record);
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
    Ok(export(&workspace, &manifest, out, &SERVING, &|| stop)?.is_some())
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
        if target.name == "cpu" {
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

    /// Changes the index as one can who may write the folder: the digests fit.
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
    // Nothing is left of what it was made from, and the export may lie anywhere.
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

    place.run("serve moved --max-batch 64").refused(&["the export has steps of at most 16 rows, 72 are asked for"]);
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
    let fault = write(folder.path(), "cpu", "tinystories-llama", &folder.path().join("no/export"), false);
    assert_eq!(fault.expect_err("no such folder").tier, Tier::Environment);
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
            // A digest that changed says so of what it is the digest of.
            let named = if file == "export.b3" && what != "missing" { "export.json" } else { &file };
            assert!(fault.message.contains(&format!("{named}` is ")), "{file} {what}: {fault}");
            assert_eq!(fault.tier, Tier::Environment, "{file} {what}: {fault}");
            assert!(fault.remedy.is_some_and(|remedy| remedy.contains("again")), "{file} {what}");
        }
        fs::write(&path, sound).expect("written");
    }
    export.load().unwrap_or_else(|fault| panic!("{fault}"));
    // The tokenizer would take this template.
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
        &|index| index["format"] = json!(2),
        "has format 2, written by monobloc 0.1.0; this monobloc reads format 3",
    );
    refused(&|index| index["surprise"] = json!(2), "is no index of an export: unknown field `surprise`");
    refused(&|index| index["vocab"] = json!(7), "is for another model, or for weights in another layout");
    refused(&|index| index["context_max"] = json!(64), "is for another model");
    refused(&|index| index["targets"][0]["pack_identity"] = json!("0"), "is for another model");
    refused(&|index| index["targets"][0]["pack"] = json!("other"), "names `other` and does not list it");
    let outside = |index: &mut Value| index["files"]["../m.toml"] = json!({ "bytes": 1, "digest": "0" });
    refused(&outside, "names `../m.toml`, which is outside of its folder");

    // A race, under a digest that fits.
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

/// Heads of 64 in bf16, so that long chunks of a prompt have a kernel.
const SMALL: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512, "max_position_embeddings": 1024,
"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true, "torch_dtype": "bfloat16"}"#;

#[test]
fn an_export_has_the_kernel_of_long_prompts() {
    if nvrtc("an_export_has_the_kernel_of_long_prompts").is_none() || Nvrtc::load().is_err() {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let config = folder.path().join("config.json");
    fs::write(&config, SMALL).expect("written");
    let text = MANIFEST.replace("path:MODEL", &format!("synthetic:{}", config.display())).replace("RECORD", "h200");
    let manifest = Manifest::parse(&text, &folder.path().join("m.toml")).unwrap_or_else(|error| panic!("{error}"));
    let workspace = workspace(folder.path());
    let out = folder.path().join("export");
    assert!(
        export(&workspace, &manifest, &out, &SERVING, &|| false).unwrap_or_else(|fault| panic!("{fault}")).is_some()
    );
    let export = Export { folder };
    let index = export.index();
    let kernels = index["targets"][0]["kernels"].as_array().expect("kernels");
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
}

#[test]
fn a_cubin_runs_only_if_this_version_would_compile_it() {
    if nvrtc("a_cubin_runs_only_if_this_version_would_compile_it").is_none() || Nvrtc::load().is_err() {
        return;
    }
    let export = Export::of("h200");
    let index = export.index();
    let kernels = index["targets"][0]["kernels"].as_array().expect("kernels");
    let does: Vec<&str> = kernels.iter().filter_map(|kernel| kernel["does"].as_str()).collect();
    assert_eq!(does, ["text", "prompt"]);
    // Without a device of its kind this is where it ends.
    let no_device = |fault: Fault| fault.message.contains("has no device here");
    assert!(export.load().err().is_none_or(no_device), "what was exported is accepted as far as this machine can");
    for (part, expected) in [("source", "has another source here"), ("queues", "has other queues here")] {
        export.edit(|index| index["targets"][0]["kernels"][0]["compiled"][part] = json!("0"));
        let fault = export.refused();
        assert!(fault.message.contains(expected) && fault.message.contains("monobloc 0.1.0 wrote it"), "{fault}");
        export.edit(|edited| *edited = index.clone());
    }
    export.edit(|index| index["targets"][0]["kernels"][0]["compiled"] = Value::Null);
    assert!(export.refused().message.contains("does not fit the kind of target `h200`"));
    export.edit(|edited| *edited = index.clone());
    let cubin = fs::read(export.path("h200/text.cubin")).expect("a cubin");
    let mut changed = cubin.clone();
    changed[cubin.len() / 2] ^= 4;
    fs::write(export.path("h200/text.cubin"), changed).expect("written");
    assert!(export.refused().message.contains("text.cubin` is not what was exported"));
}
