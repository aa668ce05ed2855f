//! Owns the digest of the code of each stage: the files of the crate that its code uses, and their contents.
//!
//! The build script embeds these digests, and they are a part of the keys of the stages. So a changed line changes the keys of
//! all stages that use it and of no others, and no version number has to be raised by hand. A stage names the modules that
//! make its result. Modules that they use are found by following every path that begins with `crate`, `self` or `super`. A
//! module brings its child modules, the files that it includes as text, and files elsewhere that add methods to its types.
//! The locked versions of the packages that the files name are hashed, too. Comments and unit tests are left out.
//!
//! What is not seen: a method that a macro adds to a type, and environment variables that the compiler reads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A stage, and the modules in which its code begins.
pub struct Stage {
    pub name: &'static str,
    /// Modules that make the result; everything that they use is hashed, too.
    modules: &'static [&'static str],
    /// Modules that combine the others. They are hashed but not followed, because they import the code of all stages.
    glue: &'static [&'static str],
    /// Whether the result is a figure of compiled code, such as a latency of the interpreter.
    compiled: bool,
}

/// All stages whose result depends on our code beyond their other inputs. A cubin depends on its source and the compiler alone.
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
        // Its key does not have the schedule, which decides the layout. So it has the code that makes schedules.
        name: "pack",
        modules: &["pack", "model::weights", "lower", "schedule", "validate", "ir::parse"],
        glue: &["pipeline::chain", "pipeline::stages", "pipeline::keys"],
        compiled: false,
    },
    Stage {
        name: "check",
        modules: &["check", "interp", "reference", "pack", "cuda::session", "model::weights"],
        glue: &[
            "pipeline::chain",
            "pipeline::stages",
            "pipeline::evaluate",
            "pipeline::execute",
            "pipeline::stored",
            "pipeline::checks",
            "pipeline::kernels",
            "pipeline::device_sampler",
        ],
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
        glue: &["pipeline::chain", "pipeline::stages", "pipeline::trial", "pipeline::checks", "pipeline::execute"],
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
            "pipeline::made",
            "pipeline::proposer",
            "pipeline::resident",
            "pipeline::trial",
            "pipeline::wave_trial",
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
    /// Paths relative to the package, with `/`.
    pub files: BTreeSet<String>,
    /// Names and versions of packages.
    pub packages: BTreeSet<String>,
}

/// Reads the package in `root` and hashes the code of every stage. `compiler` says how figures are compiled.
///
/// # Errors
/// A file that cannot be read, or a path whose module is not found: nothing may be left out silently.
pub fn digests(root: &Path, compiler: &str) -> Result<Vec<Code>, String> {
    let tree = Tree::read(root)?;
    let lock = Lock::read(&fs::read_to_string(root.join("Cargo.lock")).unwrap_or_default());
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

/// The modules of the crate, by path: `codegen::emit`.
struct Tree {
    modules: BTreeMap<String, Source>,
}

struct Source {
    /// Path relative to the package.
    path: String,
    /// The text without comments and unit tests.
    code: String,
    /// Modules that this one uses.
    uses: BTreeSet<String>,
    /// Files that are part of the code as text, with their bytes.
    included: Vec<(String, Vec<u8>)>,
    /// First names of paths that do not begin in this crate.
    outside: BTreeSet<String>,
}

impl Tree {
    fn read(root: &Path) -> Result<Tree, String> {
        let mut tokens: BTreeMap<String, Vec<Token>> = BTreeMap::new();
        let mut modules = BTreeMap::new();
        for (module, path) in module_files(root)? {
            let text = fs::read_to_string(root.join(&path)).map_err(|error| format!("{path}: {error}"))?;
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
                // Records and configs are data: the parts that a stage uses are in its key.
                if !["src/", "kernels/"].iter().any(|code| path.starts_with(code)) {
                    continue;
                }
                let bytes = fs::read(root.join(&path)).map_err(|error| format!("{path}: {error}"))?;
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
        found.ok_or_else(|| format!("no module `{name}` in src"))
    }
}

/// Every module below `src` with its file; files that hold unit tests alone are left out.
fn module_files(root: &Path) -> Result<Vec<(String, String)>, String> {
    let mut found = vec![];
    let mut folders = vec![PathBuf::from("src")];
    while let Some(folder) = folders.pop() {
        let failed = |error| format!("{}: {error}", folder.display());
        for entry in fs::read_dir(root.join(&folder)).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            let path = folder.join(&name);
            if root.join(&path).is_dir() {
                folders.push(path);
            } else if name.ends_with(".rs") && name != "tests.rs" {
                let path = path.to_string_lossy().replace('\\', "/");
                let module = path.trim_start_matches("src/").trim_end_matches(".rs").trim_end_matches("/mod");
                let module = if module == "lib" { "" } else { module };
                found.push((module.replace('/', "::"), path));
            }
        }
    }
    Ok(found)
}

fn join(module: &str, child: &str) -> String {
    if module.is_empty() { child.to_string() } else { format!("{module}::{child}") }
}

/// A path with `/` and without `..`.
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
    /// The content of a string literal, with escapes as they are written.
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
    // A line with only a comment leaves blanks, which are removed, because its place is no part of the code.
    let lines: Vec<&str> = code.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    (lines.join("\n"), tokens)
}

fn is_path_sign(tokens: &[Token], at: usize) -> bool {
    tokens.get(at).is_some_and(|t| t.is(':')) && tokens.get(at + 1).is_some_and(|t| t.is(':'))
}

/// Every path that begins with `crate`, `self` or `super`; groups in braces are expanded.
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

/// The module of the item that a path names.
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
        // Items of the crate's root are macros.
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

/// Modules that are declared here and have their own files, except those of tests.
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

/// First names of paths, in lower case like names of packages.
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
    /// By the name that paths use: name and version, and the names of its dependencies.
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
            // The package itself is hashed by its sources.
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

    /// The packages with these names and all their dependencies; all versions of a package that is locked more than once.
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
