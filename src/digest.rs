//! Owns `Digest`, the key walk, and its two sinks: the hash that names an artefact and the text that explains it.
//!
//! A key part writes itself once, to a [`KeySink`]. The same calls feed blake3 and a readable text (the `.why`
//! stored beside an artefact). Both encodings are injective, so two walks have one digest exactly when they have one
//! text. So a stage that runs again can always name the line that changed.
//!
//! Key structs are destructured in their walk, so that a new field does not compile until it is keyed:
//!
//! ```
//! use monobloc::digest::{KeyPart, KeySink, key};
//!
//! struct CompileKey<'a> {
//!     source: &'a str,
//!     options: &'a [&'a str],
//!     nvrtc: (u32, u32),
//! }
//!
//! impl KeyPart for CompileKey<'_> {
//!     fn write(&self, key: &mut dyn KeySink) {
//!         let Self { source, options, nvrtc } = self;
//!         key.text("source", source);
//!         key.list("option", *options);
//!         key.value("nvrtc", format_args!("{}.{}", nvrtc.0, nvrtc.1));
//!     }
//! }
//!
//! let (digest, why) = key(&CompileKey { source: "void f() {}", options: &["-arch=sm_90a"], nvrtc: (12, 8) });
//! assert_eq!(why, "source = \"void f() {}\"\noption:\n  - -arch=sm_90a\nnvrtc = 12.8\n");
//! assert_eq!(digest.to_string().len(), 64);
//! ```

use std::fmt::{self, Display, Write as _};
use std::str::FromStr;

/// Text up to this many bytes is shown in the `.why`; longer text is shown by its length and digest, because a
/// whole kernel source in a key text hides the line that changed.
const TEXT_BYTES_SHOWN_MAX: usize = 160;
/// Bytes up to this many are shown in hex: one digest, or one 32-byte setting.
const BYTES_SHOWN_MAX: usize = 32;
/// Separates keys from other uses of blake3. It must change if the encoding below changes.
const KEY_CONTEXT: &str = "monobloc stage key v1";

/// A 256-bit blake3 digest: the key of a stage, or the content of an artefact. Prints as 64 lower-case hex digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// Digest of one run of bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Digest(bytes)
    }

    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first 12 digits, for people: 48 bits distinguish all entries of one cache.
    pub fn short(&self) -> String {
        let mut hex = self.to_string();
        hex.truncate(12);
        hex
    }

    /// Reads exactly what `Display` prints: 64 lower-case hex digits.
    pub fn parse(text: &str) -> Result<Self, DigestParseError> {
        let fault = || DigestParseError { found: text.chars().take(80).collect() };
        let digits = text.as_bytes();
        if digits.len() != 64 {
            return Err(fault());
        }
        let mut bytes = [0u8; 32];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let [high, low] = pair else { return Err(fault()) };
            *byte = (hex_digit(*high).ok_or_else(fault)? << 4) | hex_digit(*low).ok_or_else(fault)?;
        }
        Ok(Digest(bytes))
    }
}

/// Lower case only, so that each digest has one spelling, and file names and CSV cells can be compared as text.
fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    }
}

impl From<blake3::Hash> for Digest {
    fn from(hash: blake3::Hash) -> Self {
        Digest(*hash.as_bytes())
    }
}

impl Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl FromStr for Digest {
    type Err = DigestParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Digest::parse(text)
    }
}

/// A text that is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected 64 lower-case hex digits, found `{found}`")]
pub struct DigestParseError {
    /// The text found, cut to 80 characters.
    pub found: String,
}

/// A part of a key.
pub trait KeyPart {
    /// Writes every input that can change the result of the stage, in a fixed order.
    fn write(&self, key: &mut dyn KeySink);
}

impl<T: KeyPart + ?Sized> KeyPart for &T {
    fn write(&self, key: &mut dyn KeySink) {
        (**self).write(key);
    }
}

/// One named value of a key, as a sink sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaf<'a> {
    Bytes(&'a [u8]),
    Text(&'a str),
}

/// Receives a key walk. Key parts call the methods of `dyn KeySink` below, never these three.
pub trait KeySink {
    fn leaf(&mut self, name: &str, leaf: Leaf<'_>);
    fn begin(&mut self, name: &str);
    fn end(&mut self);
}

impl dyn KeySink + '_ {
    /// Raw bytes: file contents, header bytes.
    pub fn bytes(&mut self, name: &str, value: &[u8]) {
        self.leaf(name, Leaf::Bytes(value));
    }

    pub fn text(&mut self, name: &str, value: &str) {
        self.leaf(name, Leaf::Text(value));
    }

    /// Any value that prints. Different values must have different texts (numbers, ids, digests and enums have).
    pub fn value(&mut self, name: &str, value: impl Display) {
        self.leaf(name, Leaf::Text(&value.to_string()));
    }

    /// Printed values in order; order and count are part of the key.
    pub fn list<I>(&mut self, name: &str, items: I)
    where
        I: IntoIterator,
        I::Item: Display,
    {
        self.begin(name);
        for item in items {
            self.value("", item);
        }
        self.end();
    }

    pub fn nested(&mut self, name: &str, part: &dyn KeyPart) {
        self.begin(name);
        part.write(self);
        self.end();
    }
}

/// The key of `part`: its digest, and the text that explains it.
pub fn key(part: &dyn KeyPart) -> (Digest, String) {
    let mut sink = BothSinks { hash: HashSink::new(), why: WhySink::default() };
    part.write(&mut sink);
    (Digest::from(sink.hash.hasher.finalize()), sink.why.text)
}

/// Feeds one walk to both sinks, so that digest and text always belong to the same walk.
struct BothSinks {
    hash: HashSink,
    why: WhySink,
}

impl KeySink for BothSinks {
    fn leaf(&mut self, name: &str, leaf: Leaf<'_>) {
        self.hash.leaf(name, leaf);
        self.why.leaf(name, leaf);
    }

    fn begin(&mut self, name: &str) {
        self.hash.begin(name);
        self.why.begin(name);
    }

    fn end(&mut self) {
        self.hash.end();
        self.why.end();
    }
}

/// Encodes a walk as `tag, length, name, length, value`: prefix-free, so no two walks share an encoding.
struct HashSink {
    hasher: blake3::Hasher,
}

impl HashSink {
    fn new() -> Self {
        HashSink { hasher: blake3::Hasher::new_derive_key(KEY_CONTEXT) }
    }

    fn run(&mut self, bytes: &[u8]) {
        self.hasher.update(&(bytes.len() as u64).to_le_bytes());
        self.hasher.update(bytes);
    }
}

impl KeySink for HashSink {
    fn leaf(&mut self, name: &str, leaf: Leaf<'_>) {
        let (tag, value) = match leaf {
            Leaf::Bytes(bytes) => (b"b", bytes),
            Leaf::Text(text) => (b"t", text.as_bytes()),
        };
        self.hasher.update(tag);
        self.run(name.as_bytes());
        self.run(value);
    }

    fn begin(&mut self, name: &str) {
        self.hasher.update(b"{");
        self.run(name.as_bytes());
    }

    fn end(&mut self) {
        self.hasher.update(b"}");
    }
}

/// Writes a walk as indented lines: `name = value`, `- item`, and `name:` above a group.
#[derive(Default)]
struct WhySink {
    text: String,
    depth: usize,
}

impl WhySink {
    fn line(&mut self, name: &str) {
        for _ in 0..self.depth {
            self.text.push_str("  ");
        }
        if name.is_empty() {
            self.text.push('-');
        } else if is_bare_name(name) {
            self.text.push_str(name);
        } else {
            // `Debug` of a string is injective and has no line breaks.
            let _ = write!(self.text, "{name:?}");
        }
    }
}

impl KeySink for WhySink {
    fn leaf(&mut self, name: &str, leaf: Leaf<'_>) {
        self.line(name);
        self.text.push_str(if name.is_empty() { " " } else { " = " });
        // Each arm has a spelling no other arm can produce; a bare text is neither quoted, nor `0x..`, nor holds `[`.
        let _ = match leaf {
            Leaf::Text(text) if text.len() > TEXT_BYTES_SHOWN_MAX => {
                write!(self.text, "text[{} bytes] blake3 {}", text.len(), Digest::of(text.as_bytes()))
            }
            Leaf::Text(text) if is_bare_value(text) => write!(self.text, "{text}"),
            Leaf::Text(text) => write!(self.text, "{text:?}"),
            Leaf::Bytes(bytes) if bytes.len() > BYTES_SHOWN_MAX => {
                write!(self.text, "bytes[{} bytes] blake3 {}", bytes.len(), Digest::of(bytes))
            }
            Leaf::Bytes(bytes) => {
                self.text.push_str("0x");
                bytes.iter().try_for_each(|byte| write!(self.text, "{byte:02x}"))
            }
        };
        self.text.push('\n');
    }

    fn begin(&mut self, name: &str) {
        self.line(name);
        self.text.push_str(":\n");
        self.depth += 1;
    }

    fn end(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }
}

fn is_bare_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '/' | '-'))
}

fn is_bare_value(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with("0x")
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "_.,+:/=;@%-".contains(c))
}

/// What changed between two key texts, one sentence fragment a change, each with the path of its groups:
/// `target.sm_count: 132 -> 114`, `option: added -lineinfo`, `option: removed -G`. Empty when nothing did.
pub fn diff_why(old: &str, new: &str) -> Vec<String> {
    let (old, new) = (why_lines(old), why_lines(new));
    let mut changes = Vec::new();
    for (removed, added) in hunks(&old, &new) {
        let mut added: Vec<Option<&WhyLine>> = added.iter().map(Some).collect();
        for gone in removed {
            // A named value that is in both sides of one hunk was changed; list items come and go.
            let twin = added.iter_mut().find(|line| {
                line.is_some_and(|line| gone.name.is_some() && line.path == gone.path && line.name == gone.name)
            });
            match twin.and_then(Option::take) {
                Some(line) => changes.push(format!("{}: {} -> {}", gone.place(), gone.value, line.value)),
                None => changes.push(format!("{}: removed {}", gone.place(), gone.value).trim_end().to_string()),
            }
        }
        for line in added.into_iter().flatten() {
            changes.push(format!("{}: added {}", line.place(), line.value).trim_end().to_string());
        }
    }
    changes
}

/// One line of a key text, with the groups that it is in.
#[derive(Debug, PartialEq, Eq)]
struct WhyLine<'a> {
    /// The whole line with its indentation, by which lines are compared.
    line: &'a str,
    path: String,
    /// None for a list item.
    name: Option<&'a str>,
    /// Empty for the head line of a group.
    value: &'a str,
}

impl WhyLine<'_> {
    fn place(&self) -> String {
        match (self.path.is_empty(), self.name) {
            (true, None) => "-".to_string(),
            (true, Some(name)) => name.to_string(),
            (false, None) => self.path.clone(),
            (false, Some(name)) => format!("{}.{name}", self.path),
        }
    }
}

fn why_lines(text: &str) -> Vec<WhyLine<'_>> {
    let mut groups: Vec<&str> = Vec::new();
    let mut lines = Vec::new();
    for line in text.lines() {
        let body = line.trim_start_matches(' ');
        groups.truncate((line.len() - body.len()) / 2);
        let path = groups.join(".");
        let (name, rest) = body.split_at(name_length(body));
        if rest == ":" {
            lines.push(WhyLine { line, path, name: Some(name), value: "" });
            groups.push(name);
        } else if let Some(value) = rest.strip_prefix(" = ") {
            lines.push(WhyLine { line, path, name: Some(name), value });
        } else {
            lines.push(WhyLine { line, path, name: None, value: body.strip_prefix("- ").unwrap_or(body) });
        }
    }
    lines
}

/// Length of the name that a line starts with: up to its closing quote, or to what cannot be in a bare name.
fn name_length(body: &str) -> usize {
    let Some(quoted) = body.strip_prefix('"') else {
        return body.find([' ', ':']).unwrap_or(body.len());
    };
    let mut escaped = false;
    let end = quoted.find(|c| {
        let closes = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        closes
    });
    end.map_or(body.len(), |end| end + 2)
}

/// Runs of lines that differ, as (removed, added), by longest common subsequence.
fn hunks<'a, T: PartialEq>(old: &'a [T], new: &'a [T]) -> Vec<(&'a [T], &'a [T])> {
    /// 4 M cells of 4 B: key texts have tens of lines; beyond this the whole middle counts as one change.
    const CELLS_MAX: usize = 4 << 20;
    let same_head = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let (old, new) = (&old[same_head..], &new[same_head..]);
    let same_tail = old.iter().rev().zip(new.iter().rev()).take_while(|(a, b)| a == b).count();
    let (old, new) = (&old[..old.len() - same_tail], &new[..new.len() - same_tail]);
    let columns = new.len() + 1;
    if old.len().saturating_add(1).saturating_mul(columns) > CELLS_MAX {
        return vec![(old, new)];
    }
    // common[i * columns + j] = length of the longest common subsequence of old[i..] and new[j..].
    let mut common = vec![0u32; (old.len() + 1) * columns];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            common[i * columns + j] = if old[i] == new[j] {
                common[(i + 1) * columns + j + 1] + 1
            } else {
                common[(i + 1) * columns + j].max(common[i * columns + j + 1])
            };
        }
    }
    let mut found = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < old.len() || j < new.len() {
        let start = (i, j);
        while i < old.len() || j < new.len() {
            if i < old.len() && j < new.len() && old[i] == new[j] {
                break;
            }
            let skip_old =
                j == new.len() || (i < old.len() && common[(i + 1) * columns + j] >= common[i * columns + j + 1]);
            if skip_old { i += 1 } else { j += 1 }
        }
        found.push((&old[start.0..i], &new[start.1..j]));
        while i < old.len() && j < new.len() && old[i] == new[j] {
            i += 1;
            j += 1;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A key walk as data.
    #[derive(Debug, Clone, PartialEq)]
    enum Part {
        Bytes(String, Vec<u8>),
        Text(String, String),
        Group(String, Vec<Part>),
    }

    struct Walk<'a>(&'a [Part]);

    impl KeyPart for Walk<'_> {
        fn write(&self, key: &mut dyn KeySink) {
            for part in self.0 {
                match part {
                    Part::Bytes(name, bytes) => key.bytes(name, bytes),
                    Part::Text(name, text) => key.text(name, text),
                    Part::Group(name, parts) => key.nested(name, &Walk(parts)),
                }
            }
        }
    }

    fn text(name: &str, value: &str) -> Part {
        Part::Text(name.into(), value.into())
    }

    #[test]
    fn hex_has_one_spelling() {
        let digest = Digest::of(b"monobloc");
        assert_eq!(Digest::parse(&digest.to_string()), Ok(digest));
        assert_eq!(digest.short(), digest.to_string()[..12]);
        assert!(Digest::parse(&digest.to_string().to_uppercase()).is_err());
        assert!(Digest::parse(&digest.to_string()[1..]).is_err());
        assert!(Digest::parse(&"é".repeat(32)).is_err());
        assert!(Digest::parse("").is_err());
    }

    #[test]
    fn neighbours_cannot_lend_each_other_characters() {
        let group = |parts: &[Part]| Part::Group("a = 1:\"".into(), parts.to_vec());
        let pairs: [(&[Part], &[Part]); 8] = [
            (&[group(&[group(&[])]), group(&[])], &[group(&[]), group(&[group(&[])])]),
            (&[text("a", "bc")], &[text("ab", "c")]),
            (&[text("a", "1"), text("b", "2")], &[text("a", "1\nb = 2")]),
            (&[text("a", "0x61")], &[Part::Bytes("a".into(), b"a".to_vec())]),
            (&[text("a", "1"), text("b", "2")], &[text("b", "2"), text("a", "1")]),
            (&[Part::Group("g".into(), vec![text("a", "1")])], &[Part::Group("g".into(), vec![]), text("a", "1")]),
            (&[Part::Group("g".into(), vec![])], &[]),
            (&[text("", "x")], &[text("-", "x")]),
        ];
        for (left, right) in pairs {
            let ((left_key, left_why), (right_key, right_why)) = (key(&Walk(left)), key(&Walk(right)));
            assert_ne!(left_key, right_key, "{left:?} {right:?}");
            assert_ne!(left_why, right_why);
            assert_ne!(diff_why(&left_why, &right_why), Vec::<String>::new());
        }
    }

    #[test]
    fn long_values_are_shown_by_digest_and_stay_one_line() {
        let long = "line\n".repeat(100);
        let (_, why) = key(&Walk(&[text("source", &long), Part::Bytes("header".into(), vec![7; 4096])]));
        let expected = format!(
            "source = text[500 bytes] blake3 {}\nheader = bytes[4096 bytes] blake3 {}\n",
            Digest::of(long.as_bytes()),
            Digest::of(&[7; 4096])
        );
        assert_eq!(why, expected);
    }

    #[test]
    fn a_diff_names_the_place_and_both_values() {
        let walk = |count: &str, options: &[&str]| {
            let options = options.iter().map(|option| text("", option)).collect();
            let target = Part::Group("target".into(), vec![text("name", "h200"), text("sm_count", count)]);
            key(&Walk(&[text("tool", "1"), target, Part::Group("option".into(), options), text("nvrtc", "12.8")])).1
        };
        let old = walk("132", &["-G", "-arch=sm_90a"]);
        assert_eq!(diff_why(&old, &old), Vec::<String>::new());
        assert_eq!(
            diff_why(&old, &walk("114", &["-arch=sm_90a", "-lineinfo"])),
            ["target.sm_count: 132 -> 114", "option: removed -G", "option: added -lineinfo"]
        );
        let shorter = key(&Walk(&[text("tool", "2"), text("nvrtc", "12.8")])).1;
        assert_eq!(
            diff_why(&old, &shorter)[..2],
            ["tool: 1 -> 2".to_string(), "target: removed".to_string()],
            "a group that left is named"
        );
    }

    #[test]
    fn a_walk_of_typed_values_reads_well() {
        struct Typed;
        impl KeyPart for Typed {
            fn write(&self, key: &mut dyn KeySink) {
                key.value("count", 3u32);
                key.value("negative_zero", -0.0f32);
                key.list("option", ["-a", "-b c"]);
                key.nested("inner", &Walk(&[text("k", "v;w=1")]));
            }
        }
        let expected = "count = 3\nnegative_zero = -0\noption:\n  - -a\n  - \"-b c\"\ninner:\n  k = v;w=1\n";
        assert_eq!(key(&Typed).1, expected);
    }

    /// Text of few characters, each with a meaning in one of the encodings, so that near misses are frequent.
    fn tricky_text() -> impl Strategy<Value = String> {
        prop_oneof![
            "[a0x:=\"\\\\ \n-]{0,4}",
            Just("a = 1".to_string()),
            Just("a:\n  a = 1".to_string()),
            Just("\"a\"".to_string()),
            "[a-b]{159,162}",
        ]
    }

    fn parts(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Part>> {
        let leaf = prop_oneof![
            (tricky_text(), tricky_text()).prop_map(|(name, value)| Part::Text(name, value)),
            (tricky_text(), tricky_text()).prop_map(|(name, value)| Part::Bytes(name, value.into_bytes())),
        ];
        let part = leaf.prop_recursive(3, 12, 3, |inner| {
            (tricky_text(), prop::collection::vec(inner, 0..3)).prop_map(|(name, parts)| Part::Group(name, parts))
        });
        prop::collection::vec(part, count)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_difference_in_the_hash_is_a_line_of_the_text(left in parts(0..4), right in parts(0..4)) {
            let ((left_key, left_why), (right_key, right_why)) = (key(&Walk(&left)), key(&Walk(&right)));
            prop_assert_eq!(left == right, left_key == right_key);
            prop_assert_eq!(left_key == right_key, left_why == right_why);
            prop_assert_eq!(left_key == right_key, diff_why(&left_why, &right_why).is_empty());
        }

        /// The most likely near miss: one part of a walk is changed, moved, dropped or doubled.
        #[test]
        fn one_change_shows(
            parts in parts(1..4), at in any::<prop::sample::Index>(), how in 0..4, value in tricky_text(),
        ) {
            let mut changed = parts.clone();
            let at = at.index(parts.len());
            match how {
                0 => { changed.remove(at); }
                1 => changed.insert(at, parts[at].clone()),
                2 => changed.swap(0, at),
                _ => match &mut changed[at] {
                    Part::Text(_, text) => *text = value,
                    Part::Bytes(_, bytes) => *bytes = value.into_bytes(),
                    Part::Group(name, _) => *name = value,
                },
            }
            let ((old_key, old_why), (new_key, new_why)) = (key(&Walk(&parts)), key(&Walk(&changed)));
            prop_assert_eq!(parts == changed, old_key == new_key);
            prop_assert_eq!(old_key == new_key, diff_why(&old_why, &new_why).is_empty());
        }

        /// The diff must report a changed line in any two texts.
        #[test]
        fn a_diff_is_empty_only_for_equal_texts(old in "([a-c]\n){0,6}", new in "([a-c]\n){0,6}") {
            prop_assert_eq!(old == new, diff_why(&old, &new).is_empty());
        }
    }
}
