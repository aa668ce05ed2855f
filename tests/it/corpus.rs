//! Tests the rows in the binary: how people and programs read them, and what searches learn from them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use monobloc::flywheel::trial::ADDED_IN_4;
use monobloc::flywheel::{COLUMNS, Corpus};

use crate::cli_support::{Place, python_packages, without_packages};

/// Largest size of the file, because it is downloaded with the source.
const BYTES_MAX: u64 = 3_000_000;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn file() -> PathBuf {
    root().join("flywheel/corpus/h200.csv.zst")
}

/// The rows as any reader of CSV sees them: by column.
fn rows() -> Vec<BTreeMap<String, String>> {
    let mut text = String::new();
    zstd::Decoder::new(fs::File::open(file()).unwrap()).unwrap().read_to_string(&mut text).unwrap();
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let names: Vec<String> = reader.headers().unwrap().iter().map(str::to_string).collect();
    let cells = |record: csv::StringRecord| record.iter().map(str::to_string).collect::<Vec<_>>();
    reader.records().map(|record| names.iter().cloned().zip(cells(record.unwrap())).collect()).collect()
}

#[test]
fn the_corpus_is_small_has_one_row_a_key_and_names_no_device() {
    assert!(fs::metadata(file()).unwrap().len() <= BYTES_MAX);
    let rows = rows();
    assert!(rows.len() > 10_000);
    let key = |row: &BTreeMap<String, String>| ["campaign", "device_uuid", "trial", "position"].map(|c| row[c].clone());
    assert_eq!(rows.iter().map(key).collect::<BTreeSet<_>>().len(), rows.len(), "two rows of one key");
    assert_eq!(rows.iter().map(|row| &row["trial_id"]).collect::<BTreeSet<_>>().len(), rows.len());
    let configs: BTreeSet<String> = fs::read_dir(root().join("manifests/configs"))
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_string_lossy().into_owned())
        .collect();
    for row in &rows {
        assert_eq!(row.len(), COLUMNS.len() - ADDED_IN_4.len(), "of schema 3: all rows are of the decode kernel");
        assert!(configs.contains(&row["model"]), "no config of this repository is called `{}`", row["model"]);
        assert_eq!(row["op"], "");
        assert!(row["device_uuid"].starts_with("device-"), "{}", row["device_uuid"]);
        let ratio: f64 = row["ratio_vs_default"].parse().expect("a ratio");
        assert!(ratio > 0.3 && ratio < 3.0, "{ratio}");
        if row["proposer"] == "default" {
            assert_eq!(ratio, 1.0, "the default takes the default's time");
        }
    }
    let read = Corpus::read(&[file()]).unwrap();
    assert_eq!((read.trials.len(), read.broken.len()), (rows.len(), 0));
}

/// The query of flywheel/README.md: the best ratio of each model.
fn expected() -> BTreeMap<String, f64> {
    let mut best = BTreeMap::new();
    for row in rows().iter().filter(|row| row["verdict"] == "ok" && row["decision"] != "reverted") {
        let ratio: f64 = row["ratio_vs_default"].parse().unwrap();
        let own = best.entry(row["model"].clone()).or_insert(ratio);
        *own = ratio.min(*own);
    }
    best
}

/// The lines of a block of flywheel/README.md.
fn block(language: &str) -> String {
    let page = fs::read_to_string(root().join("flywheel/README.md")).unwrap();
    let begin = page.find(&format!("```{language}\n")).expect("the block is there") + language.len() + 4;
    let text = &page[begin..];
    text[..text.find("```").unwrap()].to_string()
}

fn same(found: &str, by: &str) {
    let found: BTreeMap<String, f64> =
        serde_json::from_str(found.trim()).unwrap_or_else(|error| panic!("{by}: {error}: {found}"));
    let expected = expected();
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>(), "{by}");
    for (model, ratio) in expected {
        assert!((found[&model] - ratio).abs() < 1e-9, "{by}: {model}: {} is not {ratio}", found[&model]);
    }
}

/// Python with these modules, from `.ci/install-clients.sh` or of this machine. `None` if there is none, and the test is skipped.
fn python_with(test: &str, modules: &str) -> Option<Command> {
    let python = || {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", python_packages());
        python
    };
    let found = python().args(["-c", &format!("import {modules}")]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(python());
    }
    without_packages(test, modules);
    None
}

#[test]
fn pandas_reads_the_corpus_as_the_page_says() {
    let test = "pandas_reads_the_corpus_as_the_page_says";
    let Some(mut python) = python_with(test, "pandas, zstandard") else { return };
    // The last line of the block is an expression: a series by model.
    let code = block("python");
    let (before, last) = code.trim_end().rsplit_once('\n').unwrap();
    let script = format!("{before}\nimport json\nprint(json.dumps(({last}).to_dict()))");
    let output = python.args(["-c", &script]).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    same(&String::from_utf8(output.stdout).unwrap(), "pandas");
}

#[test]
fn duckdb_reads_the_corpus_as_the_page_says() {
    let test = "duckdb_reads_the_corpus_as_the_page_says";
    let Some(mut python) = python_with(test, "duckdb") else { return };
    let script = "import duckdb, json, sys; print(json.dumps(dict(duckdb.sql(sys.argv[1]).fetchall())))";
    let output = python.args(["-c", script, &block("sql")]).current_dir(root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    same(&String::from_utf8(output.stdout).unwrap(), "duckdb");
}

#[test]
fn duckdb_reads_exported_parquet_as_the_page_says() {
    let place = Place::new();
    fs::copy(file(), place.path("flywheel/corpus/h200.csv.zst")).unwrap();
    let written = place.run("flywheel export --parquet trials").code(0);
    assert!(place.path("trials/device=NVIDIA%20H200/model=smollm2-135m/trials.parquet").is_file(), "{written:#?}");
    let test = "duckdb_reads_exported_parquet_as_the_page_says";
    let Some(mut python) = python_with(test, "duckdb") else { return };
    let page = fs::read_to_string(root().join("docs/trials.md")).unwrap();
    let mut blocks = page.split("```sql\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let query = blocks.find(|block| block.contains("read_parquet")).expect("the block is there").to_string();
    // What the page asks; and each cell, as a number or a text, against those of the CSV.
    let script = "import csv, duckdb, io, json, subprocess, sys\n\
        print(json.dumps(dict(duckdb.sql(sys.argv[1]).fetchall())))\n\
        rows = duckdb.sql(\"SELECT * FROM read_parquet('trials/**/*.parquet', hive_partitioning = true)\")\n\
        names, found = rows.columns, {row[1]: row for row in rows.fetchall()}\n\
        assert names[1] == 'trial_id', names\n\
        expected = list(csv.DictReader(open(sys.argv[2])))\n\
        assert len(found) == len(expected) > 1000, (len(found), len(expected))\n\
        for row in expected:\n    \
            own = dict(zip(names, found[row['trial_id']]))\n    \
            for name, cell in row.items():\n        \
                value = own[name]\n        \
                same = value is None if cell == '' else str(value) == cell if isinstance(value, str) else float(cell) == float(value)\n        \
                assert same, (name, cell, value)\n";
    place.run("flywheel export --out all.csv").code(0);
    let output = python.args(["-c", script, &query, "all.csv"]).current_dir(place.path("")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    same(&String::from_utf8(output.stdout).unwrap(), "duckdb");
}

/// The first candidates of searches with these rows, for the shapes of this repository. Another encoding of the same rows must not
/// change them; `BLESS=1` writes the file again after an intended change of the search.
#[test]
fn searches_decide_with_the_corpus_as_they_did() {
    let golden = root().join("tests/it/corpus_decisions.txt");
    let place = Place::new();
    fs::remove_dir(place.path("flywheel/corpus")).unwrap();
    let mut found = String::new();
    for model in ["smollm2-135m", "qwen2.5-0.5b", "tinyllama-1.1b", "llama-3.2-1b"] {
        let manifest = root().join(format!("manifests/{model}-synthetic.toml"));
        let next = place.run(&format!("next {} --target h200 --json", manifest.display())).code(0).json();
        found +=
            &format!("{model} {} {} {}\n", next["proposer"], next["candidate"], next["expected_ratio_against_default"]);
    }
    if std::env::var_os("BLESS").is_some() {
        fs::write(&golden, &found).unwrap();
    }
    assert_eq!(found, fs::read_to_string(&golden).unwrap());
}
