//! Owns reading a TOML document field by field. Reports wrong types, ranges and unknown keys, every fault with its place.
//!
//! Manifests and target records are read through this module and not through `serde::Deserialize`, because people repair
//! them. All faults are reported at once. Each names what was expected before what was found, and an unknown key gets the
//! nearest known one as a suggestion. A reader asks for the fields that it knows; any other key is unknown, so no field is
//! accepted and then ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use crate::text::{Diagnostic, Span, nearest, one_of};

/// Reads a whole document; `read` asks for its fields.
///
/// `read` returns `None` if a field that it needs is missing or wrong, and has then recorded a fault.
///
/// # Errors
/// Every fault of the document: syntax alone if there is any, else types, ranges, missing and unknown keys.
pub fn read_document<T>(text: &str, read: impl FnOnce(&mut Fields<'_>) -> Option<T>) -> Result<T, Vec<Diagnostic>> {
    let (document, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        return Err(errors.iter().map(syntax_fault).collect());
    }
    let mut faults = Vec::new();
    let mut fields = Fields::new(String::new(), 0..0, document.get_ref(), &mut faults);
    let value = read(&mut fields);
    fields.refuse_unknown();
    match value {
        Some(value) if faults.is_empty() => Ok(value),
        _ => Err(faults),
    }
}

fn syntax_fault(error: &toml::de::Error) -> Diagnostic {
    Diagnostic::new("not valid TOML", error.span().unwrap_or(0..0), error.message())
}

/// One table of a document, with the keys that were asked for so far.
pub struct Fields<'a> {
    /// Dotted name of the table, `decode`; empty for the top.
    path: String,
    /// The table's header, where a missing key is reported.
    span: Span,
    table: &'a DeTable<'a>,
    known: BTreeSet<&'static str>,
    /// Whether all keys were read as numbers.
    numbered: bool,
    faults: &'a mut Vec<Diagnostic>,
}

impl<'a> Fields<'a> {
    fn new(path: String, span: Span, table: &'a DeTable<'a>, faults: &'a mut Vec<Diagnostic>) -> Self {
        Fields { path, span, table, known: BTreeSet::new(), numbered: false, faults }
    }

    /// Reads a required field: `fields.required("source", Fields::text)`.
    pub fn required<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&mut Self, &'static str) -> Option<T>,
    ) -> Option<T> {
        if self.table.contains_key(key) {
            return read(self, key);
        }
        self.known.insert(key);
        let place = self.place();
        self.refuse(self.span.clone(), missing_title(key, &place), format!("expected a key `{key}` here"));
        None
    }

    /// A string.
    pub fn text(&mut self, key: &'static str) -> Option<Spanned<String>> {
        let value = self.value(key)?;
        match value.get_ref() {
            DeValue::String(text) => Some(Spanned::new(value.span(), text.to_string())),
            _ => self.refuse_type(key, value, "a string"),
        }
    }

    /// A word that can be part of a file name; see [`is_file_name`].
    pub fn file_name(&mut self, key: &'static str) -> Option<Spanned<String>> {
        let word = self.text(key)?;
        if is_file_name(word.get_ref()) {
            return Some(word);
        }
        let title = format!("`{}` cannot be part of a file name", self.name(key));
        self.refuse(word.span(), title, format!("expected {FILE_NAME_IN_WORDS}"));
        None
    }

    /// `true` or `false`.
    pub fn flag(&mut self, key: &'static str) -> Option<Spanned<bool>> {
        let value = self.value(key)?;
        match value.get_ref() {
            DeValue::Boolean(flag) => Some(Spanned::new(value.span(), *flag)),
            _ => self.refuse_type(key, value, "`true` or `false`"),
        }
    }

    /// An integer in `range`.
    pub fn integer(&mut self, key: &'static str, range: RangeInclusive<u64>) -> Option<Spanned<u64>> {
        let value = self.value(key)?;
        self.integer_value(key, value, &range)
    }

    /// An integer in `range` that fits 32 bits.
    pub fn integer_u32(&mut self, key: &'static str, range: RangeInclusive<u32>) -> Option<Spanned<u32>> {
        let value = self.value(key)?;
        self.integer_u32_value(key, value, &range)
    }

    /// An array of at most `count_max` integers in `range`, each fitting 32 bits.
    pub fn integers_u32(
        &mut self,
        key: &'static str,
        range: RangeInclusive<u32>,
        count_max: usize,
    ) -> Option<Spanned<Vec<Spanned<u32>>>> {
        let (span, items) = self.items(key, "an array of integers", count_max)?;
        let mut integers = Vec::new();
        for item in items.iter() {
            integers.push(self.integer_u32_value(key, item, &range)?);
        }
        Some(Spanned::new(span, integers))
    }

    /// An array of at most `count_max` strings.
    pub fn texts(&mut self, key: &'static str, count_max: usize) -> Option<Vec<String>> {
        let (_, items) = self.items(key, "an array of strings", count_max)?;
        let mut texts = Vec::new();
        for item in items.iter() {
            match item.get_ref() {
                DeValue::String(text) => texts.push(text.to_string()),
                _ => return self.refuse_type(key, item, "a string"),
            }
        }
        Some(texts)
    }

    /// A finite number, written as a float or an integer, for which `fits` holds; `expected` describes those numbers.
    pub fn number(&mut self, key: &'static str, expected: &str, fits: impl Fn(f64) -> bool) -> Option<f64> {
        let value = self.value(key)?;
        let number = match value.get_ref() {
            DeValue::Float(float) => float.as_str().parse::<f64>().ok(),
            DeValue::Integer(integer) => integer_of(integer).map(|integer| integer as f64),
            _ => return self.refuse_type(key, value, "a number"),
        };
        match number {
            Some(number) if number.is_finite() && fits(number) => Some(number),
            _ => self.refuse_range(key, value, expected),
        }
    }

    /// One of a few words, each with its meaning.
    pub fn choice<T: Clone>(&mut self, key: &'static str, choices: &[(&'static str, T)]) -> Option<Spanned<T>> {
        let word = self.text(key)?;
        let names = choices.iter().map(|(name, _)| *name);
        if let Some((_, meaning)) = choices.iter().find(|(name, _)| name == word.get_ref()) {
            return Some(Spanned::new(word.span(), meaning.clone()));
        }
        let title = format!("unknown value for `{}`", self.name(key));
        let label = format!("expected {}, found `{}`", one_of(names.clone()), word.get_ref());
        let fault = Diagnostic::new(title, word.span(), label);
        self.faults.push(match nearest(word.get_ref(), names) {
            Some(meant) => fault.with_help(format!("did you mean `{meant}`?")),
            None => fault,
        });
        None
    }

    /// A choice for each key of this table, all of which are numbers.
    pub fn numbered_choices<T: Clone>(&mut self, choices: &[(&'static str, T)]) -> BTreeMap<u32, T> {
        let mut found = BTreeMap::new();
        self.numbered = true;
        for (key, value) in self.table {
            let name: &str = key.get_ref();
            let Ok(number) = name.parse::<u32>() else {
                self.refuse(key.span(), format!("`{}` is no number", self.name(name)), "expected a number as the key");
                continue;
            };
            let chosen = match value.get_ref() {
                DeValue::String(text) => choices.iter().find(|(word, _)| word == text),
                _ => None,
            };
            match chosen {
                Some((_, meaning)) => {
                    found.insert(number, meaning.clone());
                }
                None => {
                    let label = format!("expected {}", one_of(choices.iter().map(|(word, _)| *word)));
                    self.refuse(value.span(), format!("unknown value for `{}`", self.name(name)), label);
                }
            }
        }
        found
    }

    /// A table, `[key]`; `read` asks for its fields.
    pub fn table<T>(&mut self, key: &'static str, read: impl FnOnce(&mut Fields<'_>) -> Option<T>) -> Option<T> {
        let value = self.value(key)?;
        match value.get_ref() {
            DeValue::Table(table) => self.read_table(key, value.span(), table, read),
            _ => self.refuse_type(key, value, &format!("a table `[{key}]`")),
        }
    }

    /// An array of at least one and at most `count_max` tables, `[[key]]`; `read` asks for the fields of each.
    pub fn tables<T>(
        &mut self,
        key: &'static str,
        count_max: usize,
        mut read: impl FnMut(&mut Fields<'_>) -> Option<T>,
    ) -> Option<Vec<T>> {
        let expected = format!("an array of tables `[[{key}]]`");
        let (span, items) = self.items(key, &expected, count_max)?;
        if items.is_empty() {
            self.refuse(span, format!("`{}` is empty", self.name(key)), format!("expected at least one `[[{key}]]`"));
            return None;
        }
        let mut tables = Vec::new();
        for item in items.iter() {
            match item.get_ref() {
                DeValue::Table(table) => tables.push(self.read_table(key, item.span(), table, &mut read)),
                _ => return self.refuse_type(key, item, "a table"),
            }
        }
        tables.into_iter().collect()
    }

    /// Records a fault that the reader found itself.
    pub fn refuse(&mut self, span: Span, title: impl Into<String>, label: impl Into<String>) {
        self.faults.push(Diagnostic::new(title, span, label));
    }

    fn value(&mut self, key: &'static str) -> Option<&'a Spanned<DeValue<'a>>> {
        self.known.insert(key);
        self.table.get(key)
    }

    fn items(&mut self, key: &'static str, expected: &str, count_max: usize) -> Option<(Span, &'a DeArray<'a>)> {
        let value = self.value(key)?;
        match value.get_ref() {
            DeValue::Array(items) if items.len() <= count_max => Some((value.span(), items)),
            DeValue::Array(items) => {
                let title = format!("`{}` is too long", self.name(key));
                self.refuse(value.span(), title, format!("expected at most {count_max} items, found {}", items.len()));
                None
            }
            _ => self.refuse_type(key, value, expected),
        }
    }

    fn integer_value(
        &mut self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        range: &RangeInclusive<u64>,
    ) -> Option<Spanned<u64>> {
        let DeValue::Integer(written) = value.get_ref() else {
            return self.refuse_type(key, value, "an integer");
        };
        let integer = integer_of(written).and_then(|integer| u64::try_from(integer).ok());
        match integer.filter(|integer| range.contains(integer)) {
            Some(integer) => Some(Spanned::new(value.span(), integer)),
            None => self.refuse_range(key, value, &range_in_words(range)),
        }
    }

    fn integer_u32_value(
        &mut self,
        key: &str,
        value: &Spanned<DeValue<'_>>,
        range: &RangeInclusive<u32>,
    ) -> Option<Spanned<u32>> {
        let range = u64::from(*range.start())..=u64::from(*range.end());
        let integer = self.integer_value(key, value, &range)?;
        u32::try_from(*integer.get_ref()).ok().map(|narrow| Spanned::new(integer.span(), narrow))
    }

    fn read_table<T>(
        &mut self,
        key: &str,
        span: Span,
        table: &DeTable<'_>,
        read: impl FnOnce(&mut Fields<'_>) -> Option<T>,
    ) -> Option<T> {
        let mut fields = Fields::new(self.name(key), span, table, self.faults);
        let value = read(&mut fields);
        fields.refuse_unknown();
        value
    }

    fn refuse_unknown(&mut self) {
        for key in self.table.keys().filter(|_| !self.numbered) {
            let name: &str = key.get_ref();
            if self.known.contains(name) {
                continue;
            }
            let title = format!("unknown key `{name}`{}", self.place());
            let label = format!("expected {}", one_of(self.known.iter().copied()));
            let fault = Diagnostic::new(title, key.span(), label);
            let Some(meant) = nearest(name, self.known.iter().copied()) else {
                self.faults.push(fault);
                continue;
            };
            // One mistake is one fault: the key that is missing is the one that was misspelt.
            let missing = missing_title(meant, &self.place());
            self.faults.retain(|fault| fault.title != missing);
            self.faults.push(fault.with_help(format!("did you mean `{meant}`?")));
        }
    }

    fn refuse_type<T>(&mut self, key: &str, value: &Spanned<DeValue<'_>>, expected: &str) -> Option<T> {
        let title = format!("wrong type for `{}`", self.name(key));
        self.refuse(value.span(), title, format!("expected {expected}, found {}", in_words(value.get_ref())));
        None
    }

    fn refuse_range<T>(&mut self, key: &str, value: &Spanned<DeValue<'_>>, expected: &str) -> Option<T> {
        let title = format!("`{}` is out of range", self.name(key));
        self.refuse(value.span(), title, format!("expected {expected}, found {}", in_words(value.get_ref())));
        None
    }

    fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    fn place(&self) -> String {
        if self.path.is_empty() { String::new() } else { format!(" in `{}`", self.path) }
    }
}

fn missing_title(key: &str, place: &str) -> String {
    format!("missing key `{key}`{place}")
}

/// The rule of [`is_file_name`], for errors.
pub const FILE_NAME_IN_WORDS: &str = "1 to 100 letters, digits, `.`, `_` or `-`, the first not `.` or `-`";

/// Whether a name can be part of a file name on any system, and needs no quotes in a shell.
pub fn is_file_name(name: &str) -> bool {
    name.len() <= 100
        && name.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '_')
        && name.chars().all(|char| char.is_ascii_alphanumeric() || "._-".contains(char))
}

/// TOML integers are signed and have 64 bits. People may write longer ones, which are out of any range.
fn integer_of(written: &toml::de::DeInteger<'_>) -> Option<i128> {
    i128::from_str_radix(written.as_str(), written.radix()).ok()
}

fn range_in_words(range: &RangeInclusive<u64>) -> String {
    match *range.end() {
        // The largest TOML integer stands for "no upper bound".
        end if end >= i64::MAX as u64 => format!("{} or more", range.start()),
        end => format!("{} to {end}", range.start()),
    }
}

fn in_words(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(_) => "a string".to_string(),
        DeValue::Integer(integer) => shortened(&integer.to_string()),
        DeValue::Float(float) => shortened(float.as_str()),
        DeValue::Boolean(flag) => format!("`{flag}`"),
        DeValue::Datetime(_) => "a date or time".to_string(),
        DeValue::Array(_) => "an array".to_string(),
        DeValue::Table(_) => "a table".to_string(),
    }
}

/// A number as it was written, cut to fit a line of an error.
fn shortened(number: &str) -> String {
    const CHARS_MAX: usize = 40;
    match number.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}...", &number[..end]),
        None => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Rejection;

    fn faults<T>(text: &str, read: impl FnOnce(&mut Fields<'_>) -> Option<T>) -> String {
        match read_document(text, read) {
            Ok(_) => "no fault".to_string(),
            Err(faults) => {
                assert!(!faults.is_empty(), "refused without a fault: {text}");
                let rejection = Rejection::new("f", text, faults);
                let lines = rejection.faults.iter().map(|f| match &f.help {
                    Some(help) => format!("{:?}: {} | {} | {help}", &text[f.span.clone()], f.title, f.label),
                    None => format!("{:?}: {} | {}", &text[f.span.clone()], f.title, f.label),
                });
                lines.collect::<Vec<_>>().join("\n")
            }
        }
    }

    #[test]
    fn types_are_compared() {
        let integer = |text| faults(text, |f| f.integer("n", 1..=9));
        assert_eq!(integer("n = 0x9"), "no fault");
        assert_eq!(integer("n = 'x'"), "\"'x'\": wrong type for `n` | expected an integer, found a string");
        assert_eq!(integer("n = 1.0"), "\"1.0\": wrong type for `n` | expected an integer, found 1.0");
        assert_eq!(integer("n = true"), "\"true\": wrong type for `n` | expected an integer, found `true`");
        assert_eq!(integer("[n]\na = 1"), "\"[n]\": wrong type for `n` | expected an integer, found a table");
        assert_eq!(
            integer("n = 2020-01-01"),
            "\"2020-01-01\": wrong type for `n` | expected an integer, found a date or time"
        );
        assert_eq!(faults("n = 1", |f| f.text("n")), "\"1\": wrong type for `n` | expected a string, found 1");
        assert_eq!(faults("n = 1", |f| f.flag("n")), "\"1\": wrong type for `n` | expected `true` or `false`, found 1");
        assert_eq!(
            faults("n = ['a', 1]", |f| f.texts("n", 3)),
            "\"1\": wrong type for `n` | expected a string, found 1"
        );
        assert_eq!(
            faults("n = 1", |f| f.table("n", |_| Some(()))),
            "\"1\": wrong type for `n` | expected a table `[n]`, found 1"
        );
        assert_eq!(
            faults("[n]", |f| f.tables("n", 3, |_| Some(()))),
            "\"[n]\": wrong type for `n` | expected an array of tables `[[n]]`, found a table"
        );
    }

    #[test]
    fn ranges_hold_for_every_way_to_write_a_number() {
        let integer = |text| faults(text, |f| f.integer("n", 1..=1048576));
        for (text, found) in [
            ("n = 0", "0"),
            ("n = -5", "-5"),
            ("n = 1_048_577", "1048577"),
            ("n = 0xFFFFFFFF", "0xFFFFFFFF"),
            ("n = 99999999999999999999", "99999999999999999999"),
        ] {
            let expected = format!("`n` is out of range | expected 1 to 1048576, found {found}");
            assert!(integer(text).ends_with(&expected), "{}", integer(text));
        }
        let long = format!("n = {}", "9".repeat(5000));
        assert!(integer(&long).ends_with("found 9999999999999999999999999999999999999999..."), "{}", integer(&long));
        let number = |text| faults(text, |f| f.number("n", "0 up to 1", |x| (0.0..1.0).contains(&x)));
        assert_eq!(number("n = 0"), "no fault");
        assert_eq!(number("n = 0.999"), "no fault");
        for text in ["n = 1", "n = -0.1", "n = nan", "n = inf", "n = 1e999"] {
            assert!(number(text).contains("`n` is out of range | expected 0 up to 1, found"), "{}", number(text));
        }
        assert_eq!(
            faults("n = [1, 7]", |f| f.integers_u32("n", 0..=6, 2)),
            "\"7\": `n` is out of range | expected 0 to 6, found 7"
        );
        assert_eq!(
            faults("n = [1, 2, 3]", |f| f.integers_u32("n", 0..=6, 2)),
            "\"[1, 2, 3]\": `n` is too long | expected at most 2 items, found 3"
        );
        assert_eq!(
            faults("n = -1", |f| f.integer("n", 0..=i64::MAX as u64)),
            "\"-1\": `n` is out of range | expected 0 or more, found -1"
        );
    }

    #[test]
    fn what_nobody_asked_for_is_refused_wherever_it_stands() {
        let read = |f: &mut Fields<'_>| {
            f.table("decode", |d| {
                d.integer("context_max", 1..=9);
                d.integer("steps", 1..=9);
                Some(())
            })
        };
        assert_eq!(
            faults("[decode]\ncontext_mx = 1\nzebra = 2\n", read),
            "\"context_mx\": unknown key `context_mx` in `decode` | expected `context_max` or `steps` | did you mean \
             `context_max`?\n\"zebra\": unknown key `zebra` in `decode` | expected `context_max` or `steps`"
        );
        assert_eq!(
            faults("decod.steps = 1", read),
            "\"decod\": unknown key `decod` | expected `decode` | did you mean `decode`?"
        );
        assert_eq!(
            faults("[[a]]\nb = 1\n[[a]]\nc = 1\n", |f| f.tables("a", 9, |a| a.integer("b", 0..=1))),
            "\"c\": unknown key `c` in `a` | expected `b`"
        );
    }

    #[test]
    fn missing_keys_are_reported_at_their_table() {
        let read =
            |f: &mut Fields<'_>| f.required("model", |f, key| f.table(key, |m| m.required("source", Fields::text)));
        assert_eq!(faults("", read), "\"\": missing key `model` | expected a key `model` here");
        assert_eq!(
            faults("a = 1\n[model]\n", read),
            "\"a\": unknown key `a` | expected `model`\n\"[model]\": missing key `source` in `model` | expected a key `source` here"
        );
    }

    #[test]
    fn words_are_compared_exactly_and_guessed_at() {
        let read = |f: &mut Fields<'_>| f.choice("p", &[("fp32", 1), ("bf16", 2)]);
        assert_eq!(faults("p = 'bf16'", read), "no fault");
        assert_eq!(
            faults("p = 'f32'", read),
            "\"'f32'\": unknown value for `p` | expected `fp32` or `bf16`, found `f32` | did you mean `fp32`?"
        );
        assert_eq!(
            faults("p = 'int8'", read),
            "\"'int8'\": unknown value for `p` | expected `fp32` or `bf16`, found `int8`"
        );
    }

    #[test]
    fn names_of_files_are_plain() {
        for good in ["llama-3.2-1b", "a", "_x", "0"] {
            assert!(is_file_name(good), "{good}");
        }
        for bad in ["", ".", "..", "-x", ".x", "a/b", "a b", "a\\b", "é", "a\n", &"a".repeat(101)] {
            assert!(!is_file_name(bad), "{bad}");
        }
        assert_eq!(
            faults("n = '../x'", |f| f.file_name("n")),
            "\"'../x'\": `n` cannot be part of a file name | expected 1 to 100 letters, digits, `.`, `_` or `-`, the first not `.` or `-`"
        );
    }

    #[test]
    fn an_empty_list_of_tables_is_refused() {
        let read = |f: &mut Fields<'_>| f.tables("t", 2, |_| Some(()));
        assert_eq!(faults("t = []", read), "\"[]\": `t` is empty | expected at least one `[[t]]`");
        assert_eq!(faults("[[t]]\n[[t]]", read), "no fault");
        assert!(faults("[[t]]\n[[t]]\n[[t]]", read).ends_with("`t` is too long | expected at most 2 items, found 3"));
    }

    #[test]
    fn broken_toml_is_reported_alone() {
        for text in ["a = ", "a = 1\na = 2", "[a", "a = 'x", "\u{0}", "= 1", "a = [1, ", "[a]\n[a]\n"] {
            let found = faults(text, |f| f.required("missing", Fields::text));
            assert!(found.contains(": not valid TOML | "), "{text:?}: {found}");
            assert!(!found.contains("missing key"), "{text:?}: {found}");
        }
        let deep = format!("a = {}", "[".repeat(100_000));
        assert!(faults(&deep, |f| f.text("a")).contains("not valid TOML"));
    }
}
