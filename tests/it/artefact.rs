//! Tests edited parts of a kernel in the cache. Each is edited and sealed again, so that the cache detects no damage. No edited
//! part may be executed.

use std::fs;
use std::path::{Path, PathBuf};

use monobloc::cache::Cache;
use monobloc::cuda::nvrtc::Nvrtc;
use monobloc::digest::Digest;
use monobloc::error::{Fault, Tier};
use monobloc::manifest::Manifest;
use monobloc::pipeline::{BuildReport, Workspace, build, prepare};
use monobloc::report::Report;

use crate::nvrtc::nvrtc;
use crate::support::{fixture, forge};

const MANIFEST: &str = "[model]
source = \"path:MODEL\"

[precision]
weights = \"bf16\"

[decode]
context_max = 48
steps_per_launch = 4
check_positions = [0, 5]
time_positions = [8]

[[target]]
record = \"RECORD\"
";

struct Place {
    folder: tempfile::TempDir,
    manifest: Manifest,
}

impl Place {
    /// A place with a build for one target.
    fn built(record: &str) -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let model = fixture("families/llama-gqa").display().to_string();
        let text = MANIFEST.replace("MODEL", &model).replace("RECORD", record);
        let manifest = Manifest::parse(&text, &folder.path().join("m.toml")).unwrap_or_else(|e| panic!("{e}"));
        let place = Place { folder, manifest };
        place.build().unwrap_or_else(|fault| panic!("{fault}"));
        place
    }

    fn workspace(&self) -> Workspace {
        Workspace {
            cache: Cache::open(self.folder.path().join("cache")).expect("a cache"),
            report: Report::quiet(),
            trials: self.folder.path().join("trials.csv"),
        }
    }

    fn build(&self) -> Result<BuildReport, Fault> {
        build(&self.workspace(), &self.manifest)
    }

    /// Files of a stage's entries.
    fn entries(&self, stage: &str) -> Vec<PathBuf> {
        let bucket = self.folder.path().join(format!("cache/{stage}-v1"));
        let files =
            walkdir::WalkDir::new(bucket).sort_by_file_name().into_iter().map(|e| e.expect("an entry").into_path());
        files.filter(|path| path.is_file() && path.extension().is_none()).collect()
    }

    fn entry(&self, stage: &str) -> PathBuf {
        let mut entries = self.entries(stage);
        assert_eq!(entries.len(), 1, "{stage}: {entries:?}");
        entries.remove(0)
    }

    fn forge(&self, path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
        forge(&self.folder.path().join("cache"), path, edit);
    }

    #[track_caller]
    fn refused(&self, stage: &str, fault: Fault) {
        let place = self.entry(stage).display().to_string();
        assert_eq!(fault.tier, Tier::Environment, "{fault}");
        assert!(fault.message.contains(&format!("the stored {stage} `{place}` is not what was built")), "{fault}");
        let remedy = fault.remedy.clone().unwrap_or_default();
        assert!(remedy.contains("remove both files") && remedy.contains(stage), "{fault:?}");
    }

    /// The refusal of an edited part by everything that would execute it, until it and its link are removed.
    #[track_caller]
    fn refuses(&self, stage: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let path = self.entry(stage);
        let sound = fs::read(&path).expect("an entry");
        self.forge(&path, edit);
        self.refused(stage, self.build().expect_err("an edited part is built with"));
        self.refused(stage, self.build().expect_err("an edited part is accepted the second time"));
        fs::write(&path, sound).expect("the entry as it was");
        let report = self.build().unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!(report.ran, 0, "what was built is accepted again");
    }
}

fn swap(bytes: &mut Vec<u8>, old: &str, new: &str) {
    let text = String::from_utf8(bytes.clone()).expect("text");
    assert!(text.contains(old), "{old}");
    *bytes = text.replacen(old, new, 1).into_bytes();
}

#[test]
fn an_edited_schedule_is_refused_whether_it_could_be_proven_or_not() {
    let place = Place::built("cpu");
    // This schedule can still be proven: only its loader would be slower.
    place.refuses("schedule", |bytes| swap(bytes, "flight_high=4", "flight_high=3"));
    // This one has a race.
    place.refuses("schedule", |bytes| swap(bytes, " wait e1>=", " wait e0>="));
    let path = place.entry("schedule");
    place.forge(&path, |bytes| swap(bytes, "flight_high=4", "flight_high=3"));
    let target = &place.manifest.targets[0];
    let fault = prepare(&place.workspace(), &place.manifest, target).map(drop).expect_err("it would be executed");
    place.refused("schedule", fault);
}

#[test]
fn an_edited_pack_is_refused() {
    let place = Place::built("cpu");
    place.refuses("pack", |bytes| bytes[100] ^= 1);
    let path = place.entry("pack");
    place.forge(&path, |bytes| bytes[100] ^= 1);
    let prepared = prepare(&place.workspace(), &place.manifest, &place.manifest.targets[0]).expect("a proof");
    place.refused("pack", prepared.runner(&place.workspace()).map(drop).expect_err("it would be executed"));
}

#[test]
fn an_edited_source_or_cubin_is_refused() {
    if nvrtc("an_edited_source_or_cubin_is_refused").is_none() || Nvrtc::load().is_err() {
        return;
    }
    let place = Place::built("h200");
    place.refuses("source", |bytes| swap(bytes, "__global__", "__global__ "));
    // A byte in the middle is code.
    place.refuses("compile", |bytes| {
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
    });
    // Another kernel in its place, complete and sealed.
    place.refuses("compile", |bytes| bytes.truncate(bytes.len() - 16));
}

#[test]
fn a_part_without_a_link_is_made_again_and_an_edited_link_vouches_for_nothing() {
    let place = Place::built("cpu");
    let links = place.entries("link");
    assert_eq!(links.len(), 2, "schedule and pack");
    for link in &links {
        fs::remove_file(link).expect("a link");
        let report = place.build().unwrap_or_else(|fault| panic!("{fault}"));
        assert_eq!(report.ran, 1, "the part is made again, and everything after it is as it was");
    }
    for link in &links {
        let sound = fs::read(link).expect("a link");
        place.forge(link, |bytes| *bytes = format!("{}\n", Digest::of(b"other")).into_bytes());
        let fault = place.build().expect_err("the part is not what the link says");
        assert!(fault.message.contains(&link.display().to_string()), "{fault}");
        place.forge(link, |bytes| *bytes = b"nothing".to_vec());
        let fault = place.build().expect_err("a link that says nothing");
        assert!(fault.message.contains("names no content") && fault.remedy.is_some(), "{fault}");
        fs::write(link, sound).expect("the link as it was");
    }
    // A damaged link counts as absent.
    let mut bytes = fs::read(&links[0]).expect("a link");
    bytes[3] ^= 1;
    fs::write(&links[0], bytes).expect("a link");
    assert_eq!(place.build().unwrap_or_else(|fault| panic!("{fault}")).ran, 1);
    assert_eq!(place.build().unwrap_or_else(|fault| panic!("{fault}")).ran, 0);
}
