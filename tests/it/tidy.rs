//! Tests rules that no compiler checks: which module may import which, where `unsafe` and waiting are allowed, and that the documents
//! agree with the code.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use monobloc::codegen::{
    ATTEND_HEADERS, CONVOLVE_HEADERS, EXPERTS_HEADERS, HEADERS, JOIN_HEADERS, NET_HEADERS, ROWS_HEADERS,
    SAMPLER_HEADERS, SCAN_HEADERS, STATE_HEADERS, WAVES_HEADERS,
};
use monobloc::manifest::Manifest;
use monobloc::model::config::schema_table;
use monobloc::target::Target;

/// What each module may import from the crate. A file of a module may have a row of its own, which then replaces the
/// module's. Groups of `src/lib.rs` are layers: a row names its own layer and those above it in that file.
const IMPORTS: &[(&str, &[&str])] = &[
    ("dtype", &[]),
    ("error", &[]),
    ("format", &["dtype"]),
    ("id", &[]),
    ("address", &[]),
    ("digest", &[]),
    ("random", &["digest"]),
    ("text", &[]),
    ("fields", &["text"]),
    ("files", &["error"]),
    // A container: knows no model and no tokenizer.
    ("gguf", &["files"]),
    ("manifest", &["address", "dtype", "error", "fields", "files", "format", "target", "text"]),
    // A model knows no hardware and no tiles. It writes what decides its values to the identity of weights.
    ("model", &["digest", "dtype", "error", "files", "format", "gguf", "id", "random", "text"]),
    ("sample", &["error"]),
    // A target is data: it never asks a device.
    ("target", &["error", "fields", "files", "text"]),
    ("tokenizer", &["error", "files", "gguf"]),
    // Sets of tokens: knows no model, and no text except that of tokens.
    ("grammar", &["error", "sample"]),
    // Token ids in, token ids out.
    ("speculate", &[]),
    ("candidate", &["ir"]),
    // The only module that knows what measurements advise.
    ("defaults", &["candidate", "dtype", "format", "ir", "lower", "model", "schedule", "target"]),
    // The language knows no pass and no target; machines and variants count in warps and registers.
    ("ir", &["dtype", "error", "format", "id", "model", "text"]),
    ("pages", &["rows"]),
    // Knows the facts that a program declares, and no pass.
    ("rows", &["id", "ir"]),
    ("lower", &["candidate", "dtype", "format", "ir", "model"]),
    ("schedule", &["candidate", "ir", "target"]),
    ("pack", &["dtype", "error", "format", "ir", "model"]),
    ("reference", &["dtype", "format", "model"]),
    // The judges import neither lowering nor scheduling, nor each other.
    ("validate", &["dtype", "error", "format", "ir", "model", "target", "text"]),
    // A plan over a proven schedule, and its proof.
    ("waves", &["candidate", "dtype", "format", "id", "ir", "target", "validate"]),
    // The proof of a plan knows no knob.
    ("waves/prove", &["dtype", "format", "ir", "target", "validate"]),
    // Runs rows only with tables that the guard gave out.
    ("interp", &["dtype", "error", "format", "ir", "model", "pack", "pages", "random", "rows", "sample"]),
    // Prints and encodes what was proven; decides nothing.
    ("codegen", &["digest", "dtype", "format", "ir", "model", "rows", "target", "validate", "waves"]),
    // Source in, cubin out, bytes to a device; only kernels and their sessions know what a schedule is.
    ("cuda", &["codegen", "error", "target"]),
    ("cuda/kernel", &["codegen", "ir", "trace"]),
    ("cuda/session", &["codegen", "error", "ir", "pack", "rows", "sample", "speculate", "target"]),
    // Launches rows only with tables that the guard gave out.
    ("cuda/rows", &["codegen", "error", "ir", "rows", "speculate", "target"]),
    ("cuda/one_row", &["codegen", "ir", "rows"]),
    // Knows which device has which head.
    ("cuda/peers", &["codegen", "ir", "rows"]),
    ("cuda/turns", &["codegen", "ir", "rows"]),
    ("cuda/waves", &["codegen", "ir", "rows", "trace", "waves"]),
    // A vector that no host gives follows from the position.
    ("cuda/given", &["codegen", "dtype", "ir", "model", "speculate"]),
    // Copies the states that the guard was told of.
    ("cuda/states", &["ir", "rows"]),
    // Encodes requests for the kernel that chooses tokens.
    ("cuda/sampler", &["codegen", "sample"]),
    (
        "check",
        &[
            "codegen",
            "cuda",
            "dtype",
            "error",
            "format",
            "interp",
            "ir",
            "model",
            "pack",
            "pages",
            "random",
            "reference",
            "rows",
            "sample",
            "target",
            "validate",
        ],
    ),
    (
        "measure",
        &["abba", "check", "codegen", "cuda", "dtype", "error", "interp", "ir", "model", "pack", "target", "validate"],
    ),
    // Decides which requests run together; knows no clock, no thread and no text.
    (
        "engine",
        &["cuda", "digest", "error", "grammar", "interp", "ir", "pages", "rows", "sample", "speculate", "waves"],
    ),
    ("goldens", &["dtype"]),
    ("abba", &["random"]),
    ("trace", &["ir"]),
    // Stores bytes under digests and understands none of them.
    ("cache", &["address", "digest", "error", "files"]),
    // Rows of text and figures: no pass, no device.
    ("flywheel", &["cache", "digest", "error", "files"]),
    ("report", &["text"]),
    // Prints the results of campaigns; knows no device.
    ("page", &["flywheel", "search"]),
    // Proposes, and schedules to learn what is legal; never compiles.
    (
        "search",
        &[
            "abba",
            "candidate",
            "digest",
            "dtype",
            "flywheel",
            "format",
            "ir",
            "lower",
            "model",
            "random",
            "schedule",
            "target",
        ],
    ),
    // Connections, threads and text around an engine; the caller provides the engine's executor.
    ("serve", &["engine", "error", "grammar", "pipeline", "sample", "tokenizer"]),
];

/// Modules that wire the others together and may import any of them.
const WIRING: &[&str] = &["cli", "embed", "lib", "main", "pipeline"];

/// Files outside `src/cuda` that may have `unsafe`, each for one reason.
const UNSAFE: &[(&str, &str)] = &[
    ("src/interp/adversary.rs", "reads rows of the cache arena"),
    ("src/interp/kernel.rs", "vector loads"),
    ("src/interp/memory.rs", "the cache arena: rows read as plain slices while others are written"),
    ("src/interp/threads.rs", "reads rows of the cache arena"),
    ("src/model/rounding.rs", "wider instructions, where they were detected"),
    ("src/model/weights.rs", "maps weight files"),
    ("src/pipeline/stages.rs", "maps packs of the cache"),
    ("src/cli/terminal.rs", "ends a process without its destructors"),
];

/// Words of CUDA code that wait, signal or order memory.
const SYNCHRONISES: &[&str] = &[
    "__threadfence",
    "__syncthreads",
    "atomic",
    "mbarrier",
    "bar.sync",
    "barrier.",
    "fence.",
    "ld.relaxed",
    "st.relaxed",
    "ld.acquire",
    "st.release",
    "red.relaxed",
    "red.release",
    "atom.",
    "cp.async",
    "wait_expired",
];

/// Where these words are allowed outside `kernels/runtime/sync.cuh`: file, text that the line must contain, reason.
const SYNCHRONISES_ELSEWHERE: &[(&str, &str, &str)] = &[
    ("runtime/ring.cuh", "cp.async.bulk", "a copy of the loader, completing on the slot's barrier"),
    ("runtime/ring.cuh", "mbarrier.arrive.expect_tx", "announces the bytes of that copy"),
    ("runtime/ring.cuh", "cp.async", "a copy of the loader in pieces of 16 bytes, and the end of all copies"),
    (
        "runtime/ring.cuh",
        "wait_expired",
        "the loader's waits for a free slot and for the acquired step, bounded as all",
    ),
    ("runtime/kernel.cuh", "fence.mbarrier_init", "once, before the roles of the warps part"),
    ("runtime/kernel.cuh", "__syncthreads", "once, before the roles of the warps part"),
    ("ops/select.cuh", "__threadfence_system", "the token reaches the host before the count that says so"),
    ("rows/ring.cuh", "wait_expired", "the loader's wait for the acquired step, bounded as all"),
    ("waves/kernel.cuh", "fence.mbarrier_init", "once, before the roles of the warps part"),
    ("waves/kernel.cuh", "__syncthreads", "once, before the roles of the warps part"),
    (
        "waves/warpgroup.cuh",
        "wgmma.fence",
        "orders registers of a warp with its products, and waits for no other thread",
    ),
    ("rows/select.cuh", "__threadfence_system", "the tokens reach the host before the count that says so"),
];

/// Documents outside `docs/`.
const DOCUMENTS: [&str; 5] =
    ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "flywheel/README.md", "src/ARCHITECTURE.md"];

struct Source {
    /// Relative to the repository, with `/`.
    path: String,
    text: String,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Files below `folder` whose name ends in one of `endings`, in order of their paths.
fn sources(folder: &str, endings: &[&str]) -> Vec<Source> {
    let mut found = vec![];
    for entry in walkdir::WalkDir::new(root().join(folder)).sort_by_file_name() {
        let entry = entry.unwrap();
        if !entry.file_type().is_file()
            || !endings.iter().any(|e| entry.path().as_os_str().to_str().unwrap().ends_with(e))
        {
            continue;
        }
        let path = entry.path().strip_prefix(root()).unwrap().to_str().unwrap().to_string();
        let text = fs::read_to_string(entry.path()).unwrap_or_else(|error| panic!("{path}: {error}"));
        found.push(Source { path, text });
    }
    assert!(!found.is_empty(), "no {endings:?} below {folder}");
    found
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Numbered lines without those that are only a comment; text after `//` on a line of code is cut.
fn code_lines(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines().enumerate().filter_map(|(at, line)| {
        let code = line.split("//").next().unwrap_or_default();
        (!code.trim().is_empty()).then_some((at + 1, code))
    })
}

/// Whether `word` stands in `line` and is no part of a longer word.
fn has_word(line: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| {
        !line[..at].chars().next_back().is_some_and(part_of_word)
            && !line[at + word.len()..].chars().next().is_some_and(part_of_word)
    })
}

#[track_caller]
fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

/// Modules of `src/lib.rs` by layer: a blank line begins the next one.
fn layers() -> BTreeMap<String, usize> {
    let text = read("src/lib.rs");
    let mut layers = BTreeMap::new();
    for (layer, group) in text.split("\n\n").enumerate() {
        let names = group.lines().filter_map(|line| line.trim().strip_prefix("pub mod ")?.strip_suffix(';'));
        layers.extend(names.map(|name| (name.to_string(), layer)));
    }
    layers
}

/// `src/cuda/session.rs` is the module `cuda` and the file `cuda/session`.
fn module_of(path: &str) -> (&str, &str) {
    let file = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
    (file.split('/').next().unwrap_or(file), file)
}

/// Modules named after `crate::` in code that is not a unit test, with their lines.
fn imports(text: &str) -> Vec<(usize, String)> {
    let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    let mut found = vec![];
    for (line, code) in code_lines(&text[..end]) {
        for (at, _) in code.match_indices("crate::") {
            let rest = &code[at + "crate::".len()..];
            let names = match rest.strip_prefix('{') {
                Some(list) => list.split('}').next().unwrap_or_default().split(',').collect(),
                None => vec![rest],
            };
            for name in names {
                let name = name.trim().split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
                // The macro of `id` is exported at the root.
                let name = if name == "define_id" { "id" } else { name };
                found.push((line, name.to_string()));
            }
        }
    }
    found
}

#[test]
fn a_module_imports_only_what_the_matrix_allows() {
    let mut faults = vec![];
    for source in sources("src", &[".rs"]).iter().filter(|source| !source.path.ends_with("/tests.rs")) {
        let (module, file) = module_of(&source.path);
        if WIRING.contains(&module) {
            continue;
        }
        let row = IMPORTS.iter().find(|(name, _)| *name == file).or(IMPORTS.iter().find(|(name, _)| *name == module));
        let Some((row, allowed)) = row else {
            faults.push(format!("{}: `{module}` has no row in the import matrix", source.path));
            continue;
        };
        for (line, name) in imports(&source.text) {
            if name != module && !allowed.contains(&name.as_str()) {
                faults.push(format!("{}:{line}: `{row}` may not import `{name}`", source.path));
            }
        }
    }
    none(faults);
}

#[test]
fn the_matrix_follows_the_layers() {
    let layers = layers();
    let mut faults = vec![];
    for module in layers.keys().filter(|name| !WIRING.contains(&name.as_str())) {
        if !IMPORTS.iter().any(|(row, _)| row == module) {
            faults.push(format!("`{module}` of lib.rs has no row"));
        }
    }
    for (row, allowed) in IMPORTS {
        let module = row.split('/').next().unwrap_or(row);
        let Some(layer) = layers.get(module) else {
            faults.push(format!("row `{row}` is no module of lib.rs"));
            continue;
        };
        for name in *allowed {
            match layers.get(*name) {
                None => faults.push(format!("`{row}`: `{name}` is no module of lib.rs")),
                Some(other) if other > layer => faults.push(format!("`{row}` imports `{name}` from a later layer")),
                Some(_) => {}
            }
        }
    }
    none(faults);
}

/// A module on the way from `module` back to itself, as `a -> b -> a`.
fn circle(
    edges: &BTreeMap<String, BTreeSet<String>>,
    path: &mut Vec<String>,
    done: &mut BTreeSet<String>,
) -> Option<String> {
    let module = path.last()?.clone();
    for next in edges.get(&module).into_iter().flatten() {
        if let Some(from) = path.iter().position(|seen| seen == next) {
            return Some(format!("{} -> {next}", path[from..].join(" -> ")));
        }
        if done.contains(next) {
            continue;
        }
        path.push(next.clone());
        if let Some(found) = circle(edges, path, done) {
            return Some(found);
        }
        path.pop();
    }
    done.insert(module);
    None
}

#[test]
fn no_modules_import_each_other_in_a_circle() {
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for source in sources("src", &[".rs"]).iter().filter(|source| !source.path.ends_with("/tests.rs")) {
        let (module, _) = module_of(&source.path);
        let own = edges.entry(module.to_string()).or_default();
        own.extend(imports(&source.text).into_iter().map(|(_, name)| name).filter(|name| name != module));
    }
    assert!(edges["schedule"].contains("candidate") && edges["lower"].contains("candidate"), "{edges:?}");
    let mut done = BTreeSet::new();
    let found = edges.keys().find_map(|module| circle(&edges, &mut vec![module.clone()], &mut done));
    assert_eq!(found, None);
    // The search itself finds what is there.
    edges.entry("candidate".to_string()).or_default().insert("schedule".to_string());
    let found = circle(&edges, &mut vec!["candidate".to_string()], &mut BTreeSet::new());
    assert_eq!(found.as_deref(), Some("candidate -> schedule -> candidate"));
}

/// Lines of each function of a file, with its first line and name. Relies on `cargo fmt`: the brace that ends a function
/// stands where its first line begins.
fn function_lengths(text: &str) -> Vec<(usize, &str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = vec![];
    for (at, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let indent = &line[..line.len() - code.len()];
        let mut words = code.split_whitespace().skip_while(|word| {
            ["pub", "const", "async", "unsafe", "extern"].contains(word)
                || word.starts_with("pub(")
                || word.starts_with('"')
        });
        let (Some("fn"), Some(name)) = (words.next(), words.next()) else { continue };
        let name = name.split(['(', '<']).next().unwrap_or_default();
        // A declaration, or a function of one line.
        let ends_here = line.ends_with([';', '}']);
        let end = format!("{indent}}}");
        let length = if ends_here { 1 } else { lines[at..].iter().take_while(|line| **line != end).count() + 1 };
        // A trait may declare a function over several lines.
        let declared =
            lines[at..].iter().take(length).find(|line| line.starts_with(&format!("{indent})")) || line.ends_with('{'));
        if !declared.is_some_and(|line| line.ends_with(';')) {
            found.push((at + 1, name, length));
        }
    }
    found
}

#[test]
fn a_function_is_measured_from_its_first_line_to_its_brace() {
    let text = "pub(super) fn one(\n    a: u32,\n) -> u32 {\n    a\n}\n\ntrait T {\n    fn two(\n        &self,\n    );\n\n    \
                fn three(&self);\n\n    fn four(&self) -> u32 {\n        4\n    }\n}\n\nfn five() {}\n";
    assert_eq!(function_lengths(text), [(1, "one", 5), (12, "three", 1), (14, "four", 3), (19, "five", 1)]);
}

/// A function above this many lines is long. n2 has 2 % of them.
const LONG_LINES: usize = 70;

/// At most one function in this many may be long.
const LONG_ONE_IN: usize = 100;

#[test]
fn long_functions_are_few() {
    let (mut all, mut long) = (0, vec![]);
    for Source { path, text } in sources("src", &[".rs"]) {
        for (line, name, length) in function_lengths(&text) {
            all += 1;
            if length > LONG_LINES {
                long.push(format!("{length} {path}:{line} `{name}`"));
            }
        }
    }
    assert!(all > 2000, "{all} functions: the search for them is broken");
    long.sort_by_key(|fault| {
        std::cmp::Reverse(fault.split(' ').next().and_then(|length| length.parse::<usize>().ok()))
    });
    let few = long.len() * LONG_ONE_IN < all;
    assert!(few, "{} of {all} functions have more than {LONG_LINES} lines:\n{}", long.len(), long.join("\n"));
}

#[test]
fn a_file_says_what_it_owns() {
    let mut faults = vec![];
    for folder in ["src", "tests/it", "tests/net", "tests/device", "tests/bench", "tests/computed", "bindings"] {
        for source in sources(folder, &[".rs"]) {
            // The crate's own head is a file of its own.
            let starts = source.text.starts_with("//! ") || source.path == "src/lib.rs";
            if !starts {
                faults.push(format!("{}: expected `//!` and a sentence on the first line", source.path));
            }
        }
    }
    for source in sources("kernels", &[".cuh", ".cu"]) {
        if !source.text.starts_with("// ") {
            faults.push(format!("{}: expected `//` and a sentence on the first line", source.path));
        }
    }
    none(faults);
}

#[test]
fn nothing_is_left_for_later_and_no_path_is_of_one_machine() {
    // In halves, so that this file does not find itself.
    let words = [("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("to", "do!"), ("unimple", "mented!"), ("db", "g!")];
    let places = [("/ho", "me/"), ("/ro", "ot/"), ("/Use", "rs/"), ("/wo", "rk/"), ("../sha", "red")];
    let mut faults = vec![];
    let mut all = vec![];
    for (folder, endings) in [
        ("src", &[".rs", ".md", ".cu"][..]),
        ("kernels", &[".cuh", ".cu"]),
        ("tests/it", &[".rs", ".c"]),
        ("tests/net", &[".rs"]),
        ("tests/device", &[".rs"]),
        ("tests/computed", &[".rs", ".toml"]),
        ("tests/bench", &[".rs"]),
        ("tests/device", &[".sh"]),
        ("tests/filetests", &[".mkir", ".cu"]),
        ("manifests", &[".toml", ".json"]),
        ("docs", &[".md"]),
        ("bindings", &[".rs", ".c", ".h", ".py", ".pyi", ".toml"]),
        (".ci", &["run", ".sh"]),
        (".github", &[".yml"]),
    ] {
        all.extend(sources(folder, endings));
    }
    for path in [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Cargo.toml",
        "Justfile",
        "cache/README.md",
        "flywheel/README.md",
    ] {
        all.push(Source { path: path.to_string(), text: read(path) });
    }
    for Source { path, text } in all {
        for (at, line) in text.lines().enumerate() {
            for word in words.map(|(a, b)| format!("{a}{b}")) {
                let found = if word.ends_with('!') { line.contains(&word) } else { has_word(line, &word) };
                if found {
                    faults.push(format!("{path}:{}: `{word}`", at + 1));
                }
            }
            for place in places.map(|(a, b)| format!("{a}{b}")) {
                if line.contains(&place) {
                    faults.push(format!("{path}:{}: `{place}` names a place on one machine", at + 1));
                }
            }
        }
    }
    none(faults);
}

#[test]
fn unsafe_stays_where_it_is_named() {
    let mut faults = vec![];
    for source in sources("src", &[".rs"]) {
        let named = UNSAFE.iter().any(|(path, _)| *path == source.path);
        let uses = code_lines(&source.text).filter(|(_, line)| has_word(line, "unsafe"));
        let lines: Vec<usize> = uses.map(|(line, _)| line).collect();
        if !named && !source.path.starts_with("src/cuda/") {
            faults.extend(lines.iter().map(|line| format!("{}:{line}: `unsafe`", source.path)));
        }
        if named && lines.is_empty() {
            faults.push(format!("{}: has no `unsafe`, and needs no mention", source.path));
        }
    }
    // That each block says why it is sound is a lint.
    let manifest = read("Cargo.toml");
    assert!(manifest.contains("undocumented_unsafe_blocks = \"warn\""), "the lint that asks for SAFETY is gone");
    none(faults);
}

/// Files that name a stream of the process: file, text that the line must contain, reason.
const STREAMS: &[(&str, &str, &str)] = &[
    ("src/cli/terminal.rs", "", "the one way of text to stdout and stderr, which escapes it"),
    ("src/report.rs", "io::stderr()", "lines of a build, whose names are escaped where they enter"),
    ("src/text.rs", "is_terminal()", "asks whether there is a terminal"),
    ("src/cli/session.rs", "serve_tokens", "answers a parent process in JSON"),
    ("src/cli/tune.rs", "serve", "answers a parent process in JSON"),
];

/// CI lints the library as a part of its unit tests (`.ci/lint-and-compile`).
#[test]
fn unit_tests_have_all_code_of_the_library() {
    let mut faults = vec![];
    for source in sources("src", &["rs"]) {
        for (number, line) in code_lines(&source.text) {
            if line.contains("not(test)") {
                faults.push(format!("{}:{number}: {line}", source.path));
            }
        }
    }
    none(faults);
}

/// A message that is printed elsewhere might contain untrusted text that is not escaped.
#[test]
fn text_reaches_a_terminal_in_one_way() {
    let mut faults = vec![];
    let mut used = vec![false; STREAMS.len()];
    for source in sources("src", &[".rs"]).iter().filter(|source| !source.path.ends_with("/tests.rs")) {
        let end = source.text.find("#[cfg(test)]\nmod tests").unwrap_or(source.text.len());
        for (line, code) in code_lines(&source.text[..end]) {
            if !["print!(", "println!(", "io::stdout()", "io::stderr()", "error.print()"]
                .iter()
                .any(|word| code.contains(word))
            {
                continue;
            }
            let excuse = STREAMS.iter().position(|(path, word, _)| *path == source.path && code.contains(word));
            match excuse {
                Some(at) => used[at] = true,
                None => faults.push(format!("{}:{line}: {}", source.path, code.trim())),
            }
        }
    }
    for ((file, word, _), used) in STREAMS.iter().zip(used) {
        if !used {
            faults.push(format!("{file}: `{word}` is excused and not there"));
        }
    }
    none(faults);
}

#[test]
fn only_sync_waits_and_signals() {
    let mut faults = vec![];
    let mut used = vec![false; SYNCHRONISES_ELSEWHERE.len()];
    for source in sources("kernels", &[".cuh", ".cu"]) {
        let path = source.path.trim_start_matches("kernels/");
        if path == "runtime/sync.cuh" {
            continue;
        }
        for (line, code) in code_lines(&source.text) {
            if !SYNCHRONISES.iter().any(|word| code.contains(word)) {
                continue;
            }
            let mut excused = false;
            for (i, (file, word, _)) in SYNCHRONISES_ELSEWHERE.iter().enumerate() {
                if *file == path && code.contains(word) {
                    (excused, used[i]) = (true, true);
                }
            }
            if !excused {
                faults.push(format!("{}:{line}: {}", source.path, code.trim()));
            }
        }
    }
    for ((file, word, _), used) in SYNCHRONISES_ELSEWHERE.iter().zip(used) {
        if !used {
            faults.push(format!("{file}: `{word}` is excused and not there"));
        }
    }
    none(faults);
}

#[test]
fn kernels_know_no_gpu() {
    let mut names: Vec<String> =
        ["turing", "ampere", "ada", "lovelace", "hopper", "blackwell"].map(str::to_string).into();
    let mut counts: Vec<String> = vec![];
    for target in Target::builtin_names().filter(|name| *name != "cpu") {
        let target = Target::builtin(target).unwrap();
        let sms = target.spec.sm_count;
        // Powers of two are everywhere, and 80 is the first digits of an architecture.
        if !sms.is_power_of_two() && sms != 80 {
            counts.push(sms.to_string());
        }
        names.push(target.name);
    }
    let mut faults = vec![];
    for source in sources("kernels", &[".cuh", ".cu"]) {
        for (at, line) in source.text.lines().enumerate() {
            let lower = line.to_lowercase();
            for name in names.iter().filter(|name| has_word(&lower, name)) {
                faults.push(format!("{}:{}: names `{name}`", source.path, at + 1));
            }
        }
        for (line, code) in code_lines(&source.text) {
            // `%40` is an operand of an instruction.
            let code = code.replace('%', "r");
            for count in counts.iter().filter(|count| has_word(&code, count)) {
                faults.push(format!("{}:{line}: {count} is the SM count of a GPU", source.path));
            }
        }
    }
    none(faults);
}

#[test]
fn the_compiler_gets_every_header_and_the_master_header_includes_them() {
    let files: Vec<String> = sources("kernels", &[".cuh", ".cu"])
        .iter()
        .map(|source| source.path.trim_start_matches("kernels/").to_string())
        .collect();
    let mut listed: Vec<&str> = HEADERS
        .iter()
        .chain(&ROWS_HEADERS)
        .chain(&WAVES_HEADERS)
        .chain(&STATE_HEADERS)
        .chain(&NET_HEADERS)
        .chain(&SCAN_HEADERS)
        .chain(&CONVOLVE_HEADERS)
        .chain(&EXPERTS_HEADERS)
        .chain(&ATTEND_HEADERS)
        .chain(&JOIN_HEADERS)
        .chain(&SAMPLER_HEADERS)
        .map(|(name, _)| *name)
        .collect();
    listed.sort();
    assert_eq!(files, listed, "files below kernels/ and HEADERS of src/codegen/mod.rs");
    let master = ["", "_rows", "_waves", "_sampler"].map(|of| read(&format!("kernels/monobloc{of}.cuh"))).concat();
    let mut included: Vec<&str> =
        master.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"')).collect();
    // The header for waves includes that for rows, which includes that for one row; so does that of the sampler.
    included.extend(["monobloc_waves.cuh", "monobloc_sampler.cuh"]);
    // Kernels with experts, recurrent states or attention by warpgroups include theirs themselves, and so do drafts.
    let states =
        STATE_HEADERS.iter().chain(&NET_HEADERS).chain(&SCAN_HEADERS).chain(&CONVOLVE_HEADERS).chain(&JOIN_HEADERS);
    included.extend(EXPERTS_HEADERS.iter().chain(&ATTEND_HEADERS).chain(states).map(|(name, _)| *name));
    included.sort();
    included.dedup();
    assert_eq!(included, listed, "the headers of each kind of kernel include every header");
}

/// Compares a document with what the code says, or writes it under `BLESS=1`.
#[track_caller]
fn blessed(path: &str, expected: &str) {
    if std::env::var_os("BLESS").is_some() {
        fs::write(root().join(path), expected).unwrap();
    }
    let found = fs::read_to_string(root().join(path)).unwrap_or_default();
    assert!(found == expected, "{path} is not what the code says; `BLESS=1 cargo test --test it tidy` rewrites it");
}

#[test]
fn the_table_of_families_is_that_of_the_importer() {
    let head = "# What the importer does with every key of `config.json`

Generated from the importer's schema (`src/model/config/schema.rs`, `families.rs`) by `BLESS=1 cargo test --test it tidy`.

A key is *modelled*: what it says reaches the model graph; or *neutral*: it does not change the logits while it has the
stated value. Every other key, and every other value of a neutral key, refuses the import with the key's name: a model
that is accepted and computed wrong is worse than one that is not accepted. A value `null` counts as absent. An absent key
has the default of the family's configuration class in transformers 5.

Neutral `any value` means that the key speaks about something else: training, Python code, sampling advice.
`monobloc import DIR` prints what was understood of a checkpoint, or the complete list of reasons against it.

";
    let table = schema_table();
    blessed("docs/families.md", &format!("{head}{}\n", table.trim_end()));
}

/// What stands between two marker comments of a document, without them.
fn marked<'a>(text: &'a str, name: &str) -> &'a str {
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
    let from = text.find(&begin).unwrap_or_else(|| panic!("no `{begin}`")) + begin.len();
    let to = text[from..].find(&end).unwrap_or_else(|| panic!("no `{end}`"));
    text[from..from + to].trim()
}

#[test]
fn the_manifest_reference_is_that_of_the_module() {
    let head: String = read("src/manifest.rs")
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| format!("{}\n", line.strip_prefix(' ').unwrap_or(line)))
        .collect();
    let from = head.find("```toml").expect("a block of TOML");
    let to = from + 3 + head[from + 3..].find("```").expect("its end") + 3;
    let page = read("docs/manifests.md");
    assert_eq!(marked(&page, "manifest reference"), &head[from..to]);
    // It is a manifest, too, except for keys that belong to other kinds of source: every key in it is read.
    let body = head[from..to].trim_start_matches("```toml").trim_end_matches("```");
    let fits =
        |line: &&str| !["revision", "seed = 0                     # synthetic"].iter().any(|k| line.starts_with(k));
    let text: String = body.lines().filter(fits).map(|line| format!("{line}\n")).collect();
    assert_eq!(text.lines().count() + 2, body.lines().count());
    Manifest::parse(&text, Path::new("reference.toml")).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn the_readme_names_every_target_and_no_other() {
    let readme = read("README.md");
    let listed: Vec<&str> =
        marked(&readme, "targets").split(['`', '|']).filter(|word| Target::builtin(word.trim()).is_some()).collect();
    let known: Vec<&str> = Target::builtin_names().collect();
    assert_eq!(listed, known);
}

/// What a command's `--help` lists below `title`: the first word of each line of the first level.
fn listed(help: &str, title: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != title).skip(1).take_while(|line| !line.is_empty());
    // An explanation begins in the third column or on a deeper line.
    let words = lines.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let first = |line: &str| line.split_whitespace().next().unwrap().trim_end_matches(',').to_string();
    words.map(first).filter(|word| word != "help").collect()
}

fn help(arguments: &[&str]) -> String {
    let help = Command::new(env!("CARGO_BIN_EXE_monobloc")).args(arguments).arg("--help").output().unwrap();
    String::from_utf8(help.stdout).unwrap()
}

#[test]
fn the_page_of_commands_names_every_command_exit_code_and_variable() {
    let help_of_all = help(&[]);
    let listed_in_all = |title| listed(&help_of_all, title);
    let groups = ["Build and run:", "Measure:", "Search:", "Inspect:"];
    let commands: Vec<String> = groups.into_iter().flat_map(listed_in_all).collect();
    let (codes, variables) = (listed_in_all("Exit codes:"), listed_in_all("Environment:"));
    assert!(commands.len() > 5 && codes.len() > 3 && variables.len() > 3, "{help_of_all}");
    let page = read("docs/commands.md");
    let mut faults = vec![];
    for group in groups {
        let title = format!("\n## {}\n", group.trim_end_matches(':'));
        if !page.contains(&title) {
            faults.push(format!("docs/commands.md: no group `{group}`"));
        }
    }
    for command in &commands {
        let row = page.lines().filter(|line| line.starts_with(&format!("| `{command}"))).collect::<String>();
        if row.is_empty() {
            faults.push(format!("docs/commands.md: no row for the command `{command}`"));
        }
        for action in listed(&help(&[command]), "Commands:") {
            if !row.contains(&format!("`{command} {action}`")) && !row.contains(&format!("`{action}`")) {
                faults.push(format!("docs/commands.md: the rows of `{command}` do not name `{action}`"));
            }
        }
    }
    for code in &codes {
        if !page.contains(&format!("\n| {code} | ")) {
            faults.push(format!("docs/commands.md: no row for exit code {code}"));
        }
    }
    for variable in &variables {
        if !page.contains(&format!("`{variable}`")) {
            faults.push(format!("docs/commands.md: does not say what `{variable}` means"));
        }
    }
    none(faults);
}

#[test]
fn the_page_of_models_names_every_family() {
    let (table, page) = (schema_table(), read("docs/models.md"));
    let classes: Vec<&str> = table.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    assert!(classes.len() > 10, "{classes:?}");
    let missing = |class: &&&str| class.starts_with('`') && !page.contains(**class);
    none(classes.iter().filter(missing).map(|class| format!("docs/models.md: no {class}")).collect());
}

#[test]
fn the_readme_is_short_and_every_page_is_linked() {
    let readme = read("README.md");
    let lines = readme.lines().count();
    let mut faults = vec![];
    if lines > 150 {
        faults.push(format!("README.md: {lines} lines, expected at most 150: move detail to docs/"));
    }
    let pages = sources("docs", &[".md"]);
    let linked = |text: &str, path: &str| text.contains(&format!("]({path})"));
    for Source { path, .. } in &pages {
        // From a page of `docs`, of the same folder, or from outside.
        let (name, file) = (path.trim_start_matches("docs/"), path.rsplit('/').next().unwrap_or(path));
        let folder = path.trim_end_matches(file);
        let elsewhere = pages
            .iter()
            .filter(|page| page.path != *path)
            .any(|page| linked(&page.text, name) || page.path.starts_with(folder) && linked(&page.text, file));
        let architecture = linked(&read("src/ARCHITECTURE.md"), &format!("../{path}"));
        if !linked(&readme, path) && !elsewhere && !architecture && !linked(&read("CONTRIBUTING.md"), path) {
            faults.push(format!("{path}: no page links to it"));
        }
    }
    none(faults);
}

#[test]
fn documents_use_plain_words() {
    // Habits that make a reader stop: "after" is the word for order, and a sentence names who acts.
    let odd = ["behind", "nobody", "whoever", "somebody", "came to", "as many times", "of so many"];
    let mut documents = sources("docs", &[".md"]);
    for path in DOCUMENTS {
        documents.push(Source { path: path.to_string(), text: read(path) });
    }
    let mut faults = vec![];
    for Source { path, text } in &documents {
        for (at, line) in text.lines().enumerate() {
            let lower = line.to_lowercase();
            faults.extend(
                odd.iter().filter(|phrase| has_word(&lower, phrase)).map(|p| format!("{path}:{}: `{p}`", at + 1)),
            );
        }
    }
    none(faults);
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut faults = vec![];
    let mut documents: Vec<PathBuf> = DOCUMENTS.iter().map(PathBuf::from).collect();
    documents.push("cache/README.md".into());
    documents.extend(sources("docs", &[".md"]).into_iter().map(|source| PathBuf::from(source.path)));
    for document in documents {
        let text = read(document.to_str().unwrap());
        for rest in text.split("](").skip(1) {
            let link = rest.split(')').next().unwrap_or_default().split('#').next().unwrap_or_default();
            let external = link.contains("://") || link.is_empty();
            if !external && !root().join(&document).parent().unwrap().join(link).exists() {
                faults.push(format!("{}: `{link}` leads nowhere", document.display()));
            }
        }
    }
    none(faults);
}
