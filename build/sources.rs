//! Owns the digest of the code of each stage: which files of the two crates the code reaches, and what they say.
//!
//! The build script embeds these digests and the keys of the stages name them, so a changed line changes the keys of the
//! stages that it can reach and no others, and no version number has to be raised by hand. A stage names the modules that make its
//! result; what they use is found by following every path that begins with `crate`, `self` or `super`. A module that is
//! reached brings its child modules, the files that it includes as text, and files elsewhere that add methods to its types.
//! The locked versions of the packages that the files name are hashed, too. Comments and unit tests are left out.
//!
//! What is not seen: a method that a macro adds to a type, and environment variables that the compiler reads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Paths of the package `monobloc-core` begin with it, wherever its sources lie.
const CORE: &str = "core/";

/// Where the sources of the packages lie. Modules of both have one tree, because `monobloc` exports those of the other one.
#[derive(Clone, Copy)]
pub struct Roots<'a> {
    pub monobloc: &'a Path,
    pub core: &'a Path,
}

impl Roots<'_> {
    /// The file of a path that [`module_files`] gave, or that is relative to one.
    fn file(&self, path: &str) -> PathBuf {
        match path.strip_prefix(CORE) {
            Some(path) => self.core.join(path),
            None => self.monobloc.join(path),
        }
    }
}

/// A stage, and where its code begins.
pub struct Stage {
    pub name: &'static str,
    /// Modules that make the result, followed to everything that they use.
    modules: &'static [&'static str],
    /// Modules that put the others together. They are hashed and not followed: they import what all stages need.
    glue: &'static [&'static str],
    /// Whether the result is a figure of compiled code, such as a latency of the interpreter.
    compiled: bool,
}

/// Every stage whose code is no part of its other inputs. A cubin is keyed by text and compiler alone.
pub const STAGES: [Stage; 8] = [
    Stage { name: "import", modules: &["model::config"], glue: &["pipeline::stages"], compiled: false },
    Stage {
        name: "schedule",
        modules: &["candidate", "lower", "schedule", "validate", "ir::print", "ir::parse"],
        glue: &["pipeline::stages", "pipeline::keys"],
        compiled: false,
    },
    Stage {
        name: "source",
        modules: &["codegen", "validate", "ir::parse"],
        glue: &["pipeline::chain", "pipeline::stages", "pipeline::stored", "pipeline::keys"],
        compiled: false,
    },
    Stage {
        // Its key does not name the schedule that says where everything lies: the code that makes schedules stands for it.
        name: "pack",
        modules: &["pack", "model::weights", "lower", "schedule", "validate", "ir::parse"],
        glue: &["pipeline::chain", "pipeline::stages", "pipeline::keys"],
        compiled: false,
    },
    Stage {
        name: "check",
        modules: &["check", "interp", "reference", "pack", "cuda::session", "model::weights"],
        glue: &["pipeline::chain", "pipeline::stages", "pipeline::evaluate", "pipeline::execute", "pipeline::stored"],
        compiled: true,
    },
    Stage {
        name: "measure",
        modules: &["measure", "interp", "pack", "cuda::session", "model::weights"],
        glue: &["pipeline::chain", "pipeline::stages", "pipeline::evaluate", "pipeline::execute", "pipeline::stored"],
        compiled: true,
    },
    Stage {
        name: "expect",
        modules: &["check", "interp", "reference", "pack", "cuda::session", "model::weights"],
        glue: &["pipeline::chain", "pipeline::stages", "pipeline::trial", "pipeline::execute"],
        compiled: true,
    },
    Stage {
        name: "campaign",
        modules: &["search", "lower", "schedule", "validate", "codegen", "check", "measure", "interp", "cuda::session"],
        glue: &[
            "pipeline::chain",
            "pipeline::stages",
            "pipeline::campaign",
            "pipeline::search_start",
            "pipeline::arena",
            "pipeline::ahead",
            "pipeline::proposer",
            "pipeline::resident",
            "pipeline::trial",
            "pipeline::rows",
        ],
        compiled: true,
    },
];

/// The code of one stage.
pub struct Code {
    pub stage: &'static str,
    /// 64 hex digits.
    pub digest: String,
    /// Relative to the package `monobloc`, with `/`; of the other one with [`CORE`] before.
    pub files: BTreeSet<String>,
    /// Names and versions of packages.
    pub packages: BTreeSet<String>,
}

/// Reads the packages and hashes the code of every stage. `compiler` says how figures are compiled.
///
/// # Errors
/// A file that cannot be read, and a path whose module is not found: nothing may be left out without a word.
pub fn digests(roots: Roots, compiler: &str) -> Result<Vec<Code>, String> {
    let tree = Tree::read(roots)?;
    let lock = Lock::read(&fs::read_to_string(roots.monobloc.join("Cargo.lock")).unwrap_or_default());
    STAGES.iter().map(|stage| code(stage, &tree, &lock, compiler)).collect()
}

fn code(stage: &'static Stage, tree: &Tree, lock: &Lock, compiler: &str) -> Result<Code, String> {
    let mut reached: BTreeSet<&str> = BTreeSet::new();
    let mut next: Vec<&str> = stage.modules.to_vec();
    while let Some(module) = next.pop() {
        let (module, file) = tree.module(module)?;
        if reached.insert(module) {
            next.extend(file.uses.iter().map(String::as_str));
        }
    }
    for module in stage.glue {
        reached.insert(tree.module(module)?.0);
    }
    let mut files: BTreeMap<&str, &[u8]> = BTreeMap::new();
    let mut named: BTreeSet<&str> = BTreeSet::new();
    for module in reached {
        let (_, file) = tree.module(module)?;
        files.insert(&file.path, file.code.as_bytes());
        files.extend(file.included.iter().map(|(path, bytes)| (path.as_str(), bytes.as_slice())));
        named.extend(file.outside.iter().map(String::as_str));
    }
    let packages = lock.closure(&named);
    let mut hasher = blake3::Hasher::new_derive_key("monobloc code of a stage v1");
    let mut field = |bytes: &[u8]| {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    for (path, bytes) in &files {
        field(path.as_bytes());
        field(bytes);
    }
    packages.iter().for_each(|package| field(package.as_bytes()));
    field(if stage.compiled { compiler.as_bytes() } else { b"" });
    let digest = hasher.finalize().to_hex().to_string();
    Ok(Code { stage: stage.name, digest, files: files.keys().map(|path| path.to_string()).collect(), packages })
}

/// The modules of the crates, by path: `codegen::emit`.
struct Tree {
    modules: BTreeMap<String, Source>,
}

struct Source {
    /// As in [`Code::files`].
    path: String,
    /// Without comments and unit tests.
    code: String,
    /// Modules that are reached from here.
    uses: BTreeSet<String>,
    /// Files that are part of the code as text, with their bytes.
    included: Vec<(String, Vec<u8>)>,
    /// First names of paths that do not begin in this crate.
    outside: BTreeSet<String>,
}

impl Tree {
    fn read(roots: Roots) -> Result<Tree, String> {
        let mut tokens: BTreeMap<String, Vec<Token>> = BTreeMap::new();
        let mut modules = BTreeMap::new();
        for (module, path) in module_files(roots)? {
            let text = fs::read_to_string(roots.file(&path)).map_err(|error| format!("{path}: {error}"))?;
            let (code, found) = lex(&text);
            let source = Source { path, code, uses: BTreeSet::new(), included: vec![], outside: BTreeSet::new() };
            modules.insert(module.clone(), source);
            tokens.insert(module, found);
        }
        let mut tree = Tree { modules };
        let names: BTreeSet<String> = tree.modules.keys().cloned().collect();
        let macros = defined_macros(&tokens);
        // Methods that a file adds to a type of another module, as (that module, this one).
        let mut added: Vec<(String, String)> = vec![];
        for (module, tokens) in &tokens {
            let Some(source) = tree.modules.get_mut(module) else { continue };
            let folder = Path::new(&source.path).parent().map(Path::to_path_buf).unwrap_or_default();
            for path in paths(tokens) {
                let used = resolve(&path, module, &names, &macros)
                    .ok_or_else(|| format!("{}: no module of `{}`", source.path, path.join("::")))?;
                if let (Some(name), true) = (path.last(), used != *module)
                    && adds_to(tokens, name)
                {
                    added.push((used.clone(), module.clone()));
                }
                source.uses.insert(used);
            }
            source.uses.extend(children(tokens).into_iter().map(|child| join(module, &child)));
            source.uses.retain(|used| names.contains(used));
            source.outside = outside(tokens);
            for name in included(tokens) {
                let path = normal(&folder.join(&name));
                // Records and configs are data: what is used of them is in the keys themselves.
                if !["src/", "core/src/", "kernels/"].iter().any(|code| path.starts_with(code)) {
                    continue;
                }
                let bytes = fs::read(roots.file(&path)).map_err(|error| format!("{path}: {error}"))?;
                source.included.push((path, bytes));
            }
        }
        for (of, by) in added {
            if let Some(source) = tree.modules.get_mut(&of) {
                source.uses.insert(by);
            }
        }
        Ok(tree)
    }

    fn module<'t>(&'t self, name: &str) -> Result<(&'t str, &'t Source), String> {
        let found = self.modules.get_key_value(name).map(|(name, source)| (name.as_str(), source));
        found.ok_or_else(|| format!("no module `{name}`"))
    }
}

/// Every module below `src` with its file; files that hold unit tests alone are left out.
fn module_files(roots: Roots) -> Result<Vec<(String, String)>, String> {
    let mut found = vec![];
    let mut folders = vec!["src".to_string(), format!("{CORE}src")];
    while let Some(folder) = folders.pop() {
        let failed = |error| format!("{folder}: {error}");
        for entry in fs::read_dir(roots.file(&folder)).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            let path = format!("{folder}/{name}");
            if roots.file(&path).is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") && name != "tests.rs" {
                let inside = path.trim_start_matches(CORE).trim_start_matches("src/");
                let module = inside.trim_end_matches(".rs").trim_end_matches("/mod");
                // The roots of the crates say which modules there are, and nothing else.
                if module != "lib" {
                    found.push((module.replace('/', "::"), path));
                }
            }
        }
    }
    Ok(found)
}

fn join(module: &str, child: &str) -> String {
    if module.is_empty() { child.to_string() } else { format!("{module}::{child}") }
}

/// A path without `..`, with `/`.
fn normal(path: &Path) -> String {
    let mut parts: Vec<String> = vec![];
    for part in path.components() {
        match part.as_os_str().to_string_lossy().as_ref() {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part.to_string()),
        }
    }
    parts.join("/")
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    Name(String),
    /// What a string literal says, escapes as they are written.
    Text(String),
    Sign(char),
}

impl Token {
    fn is(&self, sign: char) -> bool {
        *self == Token::Sign(sign)
    }

    fn name(&self) -> Option<&str> {
        match self {
            Token::Name(name) => Some(name),
            _ => None,
        }
    }
}

/// The code without comments and without its module of unit tests, as text and as tokens.
fn lex(text: &str) -> (String, Vec<Token>) {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let (mut code, mut tokens) = (String::new(), vec![]);
    let mut i = 0;
    while i < chars.len() {
        let from = i;
        let c = at(i);
        if c == '/' && at(i + 1) == '/' {
            while i < chars.len() && at(i) != '\n' {
                i += 1;
            }
            continue;
        }
        if c == '/' && at(i + 1) == '*' {
            let mut depth = 0;
            while i < chars.len() {
                match (at(i), at(i + 1)) {
                    ('/', '*') => (depth, i) = (depth + 1, i + 2),
                    ('*', '/') => (depth, i) = (depth - 1, i + 2),
                    _ => i += 1,
                }
                if depth == 0 {
                    break;
                }
            }
            continue;
        }
        let hashes = (i + 1..).take_while(|&i| at(i) == '#').count();
        if c == 'r' && at(i + 1 + hashes) == '"' {
            let end: String = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
            let end: Vec<char> = end.chars().collect();
            i += 2 + hashes;
            let begin = i;
            while i < chars.len() && !chars[i..].starts_with(&end) {
                i += 1;
            }
            tokens.push(Token::Text(chars[begin..i.min(chars.len())].iter().collect()));
            i = (i + end.len()).min(chars.len());
        } else if c == '"' {
            i += 1;
            let begin = i;
            while i < chars.len() && at(i) != '"' {
                i += if at(i) == '\\' { 2 } else { 1 };
            }
            tokens.push(Token::Text(chars[begin.min(chars.len())..i.min(chars.len())].iter().collect()));
            i = (i + 1).min(chars.len());
        } else if c == '\'' && (at(i + 1) == '\\' || at(i + 2) == '\'') {
            // A character; any other quote begins a lifetime.
            i += if at(i + 1) == '\\' { 3 } else { 2 };
            while i < chars.len() && at(i) != '\'' {
                i += 1;
            }
            i = (i + 1).min(chars.len());
        } else if c.is_alphabetic() || c == '_' {
            while at(i).is_alphanumeric() || at(i) == '_' {
                i += 1;
            }
            tokens.push(Token::Name(chars[from..i].iter().collect()));
        } else {
            if !c.is_whitespace() {
                tokens.push(Token::Sign(c));
            }
            i += 1;
        }
        code.extend(&chars[from..i]);
    }
    // A line that was only a comment leaves blanks; where it stood is no part of the code.
    let lines: Vec<&str> = code.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    (lines.join("\n"), tokens)
}

fn is_path_sign(tokens: &[Token], at: usize) -> bool {
    tokens.get(at).is_some_and(|t| t.is(':')) && tokens.get(at + 1).is_some_and(|t| t.is(':'))
}

/// Every path that begins with `crate`, `self` or `super`, groups in braces taken apart.
fn paths(tokens: &[Token]) -> Vec<Vec<String>> {
    let mut found = vec![];
    for at in 0..tokens.len() {
        let begins = tokens[at].name().is_some_and(|name| ["crate", "self", "super"].contains(&name));
        let inside = at >= 2 && is_path_sign(tokens, at - 2);
        if begins && !inside && is_path_sign(tokens, at + 1) {
            path_tree(tokens, at, &[], &mut found);
        }
    }
    found
}

/// Reads a path from `at` on; returns where it ends.
fn path_tree(tokens: &[Token], mut at: usize, before: &[String], found: &mut Vec<Vec<String>>) -> usize {
    let mut path = before.to_vec();
    loop {
        match tokens.get(at) {
            Some(Token::Name(name)) => path.push(name.clone()),
            Some(token) if token.is('{') => {
                at += 1;
                while tokens.get(at).is_some_and(|token| !token.is('}')) {
                    let end = path_tree(tokens, at, &path, found);
                    at = if end > at { end } else { at + 1 };
                    // `as NAME`, and the comma.
                    while tokens.get(at).is_some_and(|token| !token.is(',') && !token.is('}')) {
                        at += 1;
                    }
                    if tokens.get(at).is_some_and(|token| token.is(',')) {
                        at += 1;
                    }
                }
                return at + 1;
            }
            // A glob, or generic arguments.
            _ => {
                found.push(path);
                return at;
            }
        }
        if !is_path_sign(tokens, at + 1) {
            // `use a::{self, B}` names `a`.
            if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
                path.pop();
            }
            found.push(path);
            return at + 1;
        }
        at += 3;
    }
}

/// The module that a path names something of.
fn resolve(
    path: &[String],
    module: &str,
    names: &BTreeSet<String>,
    macros: &BTreeMap<String, String>,
) -> Option<String> {
    let mut at: Vec<&str> = module.split("::").filter(|part| !part.is_empty()).collect();
    let mut rest = path;
    while let Some((first, tail)) = rest.split_first() {
        match first.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            _ => break,
        }
        rest = tail;
    }
    for name in rest {
        let deeper = join(&at.join("::"), name);
        if !names.contains(&deeper) {
            break;
        }
        at.push(name);
    }
    match at.is_empty() {
        false => Some(at.join("::")),
        // Of the crate's root there are only macros.
        true => macros.get(rest.first()?).cloned(),
    }
}

/// Macros by name, with the module that defines them.
fn defined_macros(all: &BTreeMap<String, Vec<Token>>) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for (module, tokens) in all {
        for window in tokens.windows(3) {
            if let [Token::Name(word), Token::Sign('!'), Token::Name(name)] = window
                && word == "macro_rules"
            {
                found.insert(name.clone(), module.clone());
            }
        }
    }
    found
}

/// Modules that are declared here and are files of their own, those of tests aside.
fn children(tokens: &[Token]) -> Vec<String> {
    let mut found = vec![];
    for (at, window) in tokens.windows(3).enumerate() {
        if let [Token::Name(word), Token::Name(name), Token::Sign(';')] = window
            && word == "mod"
        {
            let before: Vec<&str> = tokens[at.saturating_sub(5)..at].iter().filter_map(Token::name).collect();
            if before != ["cfg", "test"] {
                found.push(name.clone());
            }
        }
    }
    found
}

/// Whether methods are added here to a type `name` that is defined elsewhere.
fn adds_to(tokens: &[Token], name: &str) -> bool {
    tokens.iter().enumerate().filter(|(_, token)| token.name() == Some("impl")).any(|(at, _)| {
        let head = tokens[at + 1..].iter().take_while(|token| !token.is('{'));
        let mut depth = 0;
        let mut names = vec![];
        for token in head {
            match token {
                Token::Sign('<') => depth += 1,
                Token::Sign('>') => depth -= 1,
                Token::Name(name) if depth == 0 => names.push(name.as_str()),
                _ => {}
            }
        }
        names == [name]
    })
}

/// First names of paths, in lower case as packages have them.
fn outside(tokens: &[Token]) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, token) in tokens.iter().enumerate() {
        if let Some(name) = token.name()
            && is_path_sign(tokens, at + 1)
            && !(at >= 2 && is_path_sign(tokens, at - 2))
        {
            found.insert(name.to_string());
        }
    }
    found
}

/// Files that the code includes as text or bytes.
fn included(tokens: &[Token]) -> Vec<String> {
    let mut found = vec![];
    for window in tokens.windows(4) {
        if let [Token::Name(word), Token::Sign('!'), Token::Sign('('), Token::Text(path)] = window
            && (word == "include_str" || word == "include_bytes")
        {
            found.push(path.clone());
        }
    }
    found
}

/// The packages of a `Cargo.lock`.
struct Lock {
    /// By name as paths have it: name and version, and the names of what it depends on.
    packages: BTreeMap<String, Vec<(String, Vec<String>)>>,
}

impl Lock {
    fn read(text: &str) -> Lock {
        let mut packages: BTreeMap<String, Vec<(String, Vec<String>)>> = BTreeMap::new();
        for block in text.split("[[package]]").skip(1) {
            let field = |key: &str| {
                let line = block.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
                line.map(|value| value.trim_end_matches('"').to_string()).unwrap_or_default()
            };
            // The package itself is its own sources.
            if field("source").is_empty() {
                continue;
            }
            let depends = block.split("dependencies = [").nth(1).unwrap_or_default();
            let depends = depends.split(']').next().unwrap_or_default().split('"').skip(1).step_by(2);
            let depends = depends.map(|name| underscored(name.split(' ').next().unwrap_or(name))).collect();
            let named = format!("{} {} {}", field("name"), field("version"), field("checksum"));
            packages.entry(underscored(&field("name"))).or_default().push((named, depends));
        }
        Lock { packages }
    }

    /// The packages of these names and everything that they depend on, of a package in two versions both.
    fn closure(&self, names: &BTreeSet<&str>) -> BTreeSet<String> {
        let mut next: Vec<&str> = names.iter().copied().collect();
        let mut seen: BTreeSet<&str> = BTreeSet::new();
        let mut found = BTreeSet::new();
        while let Some(name) = next.pop() {
            let known = self.packages.get_key_value(name).filter(|(name, _)| seen.insert(name));
            let Some((_, versions)) = known else { continue };
            for (named, depends) in versions {
                found.insert(named.clone());
                next.extend(depends.iter().map(String::as_str));
            }
        }
        found
    }
}

fn underscored(name: &str) -> String {
    name.replace('-', "_")
}
