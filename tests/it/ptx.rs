//! Reads the PTX that NVRTC prints: functions of statements, the edges between them, and where addresses come from.

use std::collections::{BTreeMap, BTreeSet};

use monobloc::codegen::KernelSource;

/// One instruction or directive of a function's body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// Executed by some threads only: it has a guard predicate.
    pub guarded: bool,
    /// `ld.relaxed.gpu.global.u64`
    pub opcode: String,
    /// What follows the opcode.
    pub operands: String,
}

/// One `.entry` or `.func` with a body.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    pub statements: Vec<Statement>,
    /// Statements that may follow each one.
    successors: Vec<Vec<usize>>,
}

/// The functions of a module, in order.
pub fn functions(ptx: &str) -> Vec<Function> {
    let text: String =
        ptx.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    let mut found = vec![];
    let mut rest = text.as_str();
    while let Some(at) = [".entry ", ".func "].iter().filter_map(|word| rest.find(word)).min() {
        rest = &rest[at..];
        let header = rest.find(['{', ';']).map_or(rest, |end| &rest[..end]);
        let body = &rest[header.len()..];
        if !body.starts_with('{') {
            // A declaration.
            rest = &rest[header.len()..];
            continue;
        }
        let end = closing(body);
        found.push(Function::of(&name_of(header), &body[1..end]));
        rest = &body[end..];
    }
    found
}

/// Where the brace that `text` begins with is closed.
fn closing(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return at,
            '}' => depth -= 1,
            _ => {}
        }
    }
    panic!("a body has no end")
}

/// `.func (.param .b32 result) name(...)`
fn name_of(header: &str) -> String {
    let mut text = header.split_once(' ').map_or("", |(_, rest)| rest).trim_start();
    if text.starts_with('(') {
        text = text.split_once(')').map_or("", |(_, rest)| rest).trim_start();
    }
    text.split(['(', ' ', '\n']).next().unwrap_or_default().to_owned()
}

impl Function {
    fn of(name: &str, body: &str) -> Function {
        let mut statements = vec![];
        let mut labels: BTreeMap<String, usize> = BTreeMap::new();
        let mut tables: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for text in body.split(';') {
            // A brace opens or closes a scope where a statement could begin; elsewhere it is a list of registers.
            let mut text = text.trim_start_matches(|c: char| c.is_whitespace() || c == '{' || c == '}').trim_end();
            let mut own_label = None;
            while let Some((label, rest)) = text.split_once(':').filter(|(label, _)| {
                !label.is_empty() && label.chars().all(|c| c.is_alphanumeric() || "$_%".contains(c))
            }) {
                labels.insert(label.to_owned(), statements.len());
                own_label = Some(label.to_owned());
                text = rest.trim_start_matches(|c: char| c.is_whitespace() || c == '{' || c == '}');
            }
            let text = text.trim_end_matches(|c: char| c.is_whitespace());
            if text.is_empty() {
                continue;
            }
            let guarded = text.starts_with('@');
            let plain =
                if guarded { text.split_once(char::is_whitespace).map_or("", |(_, rest)| rest.trim()) } else { text };
            let (opcode, operands) = plain.split_once(char::is_whitespace).unwrap_or((plain, ""));
            if opcode == ".branchtargets" {
                let label = own_label.expect("a table of branch targets has a label");
                tables.insert(label, operands.split(',').map(|target| target.trim().to_owned()).collect());
                continue;
            }
            if opcode.starts_with('.') {
                continue;
            }
            statements.push(Statement { guarded, opcode: opcode.to_owned(), operands: operands.trim().to_owned() });
        }
        let target =
            |label: &str| *labels.get(label.trim()).unwrap_or_else(|| panic!("`{name}` has no label `{label}`"));
        let successors = statements.iter().enumerate().map(|(at, statement)| {
            let next = (at + 1 < statements.len()).then_some(at + 1);
            let kind = statement.opcode.split('.').next().unwrap_or_default();
            let mut all: Vec<usize> = match kind {
                "bra" => vec![target(&statement.operands)],
                "brx" => {
                    let (_, table) = statement.operands.rsplit_once(',').expect("an index and a table");
                    tables[table.trim()].iter().map(|label| target(label)).collect()
                }
                "ret" | "exit" | "trap" => vec![],
                _ => return next.into_iter().collect(),
            };
            all.extend(next.filter(|_| statement.guarded));
            all
        });
        let successors = successors.collect();
        Function { name: name.to_owned(), statements, successors }
    }

    /// A data-flow analysis: the state that holds before each statement on all paths to it. `entry` is the state before the first
    /// statement, `step` gives the state after one, and paths that join take the minimum. `None`: no path leads there.
    pub fn on_all_paths(&self, entry: u8, step: impl Fn(usize, u8) -> u8) -> Vec<Option<u8>> {
        let mut before: Vec<Option<u8>> = vec![None; self.statements.len()];
        let mut open = vec![];
        if let Some(first) = before.first_mut() {
            *first = Some(entry);
            open.push(0);
        }
        while let Some(at) = open.pop() {
            let after = step(at, before[at].expect("reached"));
            for &next in &self.successors[at] {
                let joined = before[next].map_or(after, |known| known.min(after));
                if before[next] != Some(joined) {
                    before[next] = Some(joined);
                    open.push(next);
                }
            }
        }
        before
    }

    /// The first statements after `from`, on any path, for which `wanted` holds; and whether a path ends without one.
    pub fn next_after(&self, from: usize, wanted: impl Fn(&Statement) -> bool) -> (BTreeSet<usize>, bool) {
        let (mut found, mut ends) = (BTreeSet::new(), false);
        let mut seen = BTreeSet::new();
        let mut open = vec![from];
        while let Some(at) = open.pop() {
            ends |= self.successors[at].is_empty();
            for &next in &self.successors[at] {
                if wanted(&self.statements[next]) {
                    found.insert(next);
                } else if seen.insert(next) {
                    open.push(next);
                }
            }
        }
        (found, ends)
    }

    /// For a kernel with one structure of parameters: the offsets of the 64-bit words in it that each register may hold or be
    /// computed from. Values loaded from other memory are not tracked.
    pub fn pointers(&self) -> BTreeMap<String, BTreeSet<u32>> {
        let parameter = format!("{}_param_0", self.name);
        let is_wide = |opcode: &str| opcode.ends_with("64");
        let mut structs: BTreeSet<String> = BTreeSet::new();
        let mut pointers: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        loop {
            let before = (structs.len(), pointers.values().map(BTreeSet::len).sum::<usize>());
            for statement in &self.statements {
                let kind = statement.opcode.split('.').next().unwrap_or_default();
                let words = registers_and_names(&statement.operands);
                let Some((to, from)) = words.split_first() else { continue };
                if ["mov", "cvta"].contains(&kind)
                    && from.iter().any(|word| *word == parameter || structs.contains(word))
                {
                    structs.insert(to.clone());
                } else if statement.opcode.starts_with("ld.param")
                    || (kind == "ld" && from.iter().any(|w| structs.contains(w)))
                {
                    let whole = from.iter().any(|word| *word == parameter || structs.contains(word));
                    if let (true, Some(offset)) = (whole && is_wide(&statement.opcode), offset_of(&statement.operands))
                    {
                        let width = if statement.opcode.contains(".v2") { 2 } else { 1 };
                        for (n, register) in words.iter().take(width).enumerate() {
                            pointers.entry(register.clone()).or_default().insert(offset + 8 * n as u32);
                        }
                    }
                } else if !["ld", "ldu", "atom", "st", "red", "call"].contains(&kind) {
                    let all: BTreeSet<u32> =
                        from.iter().filter_map(|word| pointers.get(word)).flatten().copied().collect();
                    if !all.is_empty() {
                        pointers.entry(to.clone()).or_default().extend(all);
                    }
                }
            }
            if before == (structs.len(), pointers.values().map(BTreeSet::len).sum()) {
                return pointers;
            }
        }
    }
}

impl Statement {
    /// The register in brackets: the address of a load or a store.
    pub fn address(&self) -> Option<String> {
        let inside = self.operands.split_once('[')?.1.split_once(']')?.0;
        registers_and_names(inside).into_iter().next()
    }
}

fn registers_and_names(text: &str) -> Vec<String> {
    let part = |c: char| c.is_alphanumeric() || "%_$.".contains(c);
    let words = text
        .split(|c: char| !part(c))
        .filter(|word| word.starts_with(|c: char| c == '%' || c == '_' || c.is_alphabetic()));
    words.map(str::to_owned).collect()
}

/// `{%rd1, %rd2}, [%rd3+16]`: 16.
fn offset_of(operands: &str) -> Option<u32> {
    let inside = operands.split_once('[')?.1.split_once(']')?.0;
    inside.split_once('+').map_or(Some(0), |(_, offset)| offset.trim().parse().ok())
}

/// Replaces a text of a kernel's header that exists once.
pub fn edit(source: &mut KernelSource, header: &str, from: &str, to: &str) {
    let (_, text) = source.headers.iter_mut().find(|(name, _)| name == header).expect("the header");
    assert_eq!(text.matches(from).count(), 1, "`{header}` has changed: where is `{from}`?");
    *text = text.replace(from, to);
}

/// The rules that faults name, in the form `rule: what is wrong`.
pub fn rules(faults: &[String]) -> BTreeSet<&str> {
    faults.iter().map(|fault| fault.split(':').next().unwrap()).collect()
}
