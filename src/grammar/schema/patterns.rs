//! Owns patterns: they are those of ECMA-262, which llguidance reads in part in another way. What both do not read alike is rewritten or refused.

use serde_json::{Map, Value, json};

use super::super::blame::Path;
use super::GrammarError;

/// Digits, letters of words and white space of ECMA-262, as members of a class.
const DIGIT: &str = "0-9";
const WORD: &str = "0-9A-Za-z_";
const SPACE: &str = r"\t-\r\x20\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff";
/// What `.` stands for: any character that ends no line.
const ANY: &str = r"[^\n\r\u2028\u2029]";

/// Refuses what the regexes of llguidance would read in another way than ECMA-262.
pub fn check(members: &Map<String, Value>, path: &Path) -> Result<(), GrammarError> {
    let names = members.get("patternProperties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
    let names = names.map(|name| (name, path.key("patternProperties").key(name)));
    let pattern = members.get("pattern");
    let texts = match pattern {
        Some(Value::String(text)) => Some((text, path.key("pattern"))),
        _ => None,
    };
    texts.into_iter().chain(names).try_for_each(|(pattern, path)| {
        ported(pattern).map(drop).map_err(|reason| GrammarError::Schema {
            path,
            reason: reason.to_string(),
            remedy: "write the pattern in another way, or leave it out and check the text yourself",
        })
    })
}

/// Rewrites the patterns of a schema, which are values and names.
pub fn port(members: &mut Map<String, Value>) {
    // What `check` has refused stays as it is.
    let ported = |pattern: &str| ported(pattern).unwrap_or_else(|_| pattern.to_string());
    if let Some(Value::String(pattern)) = members.get_mut("pattern") {
        *pattern = ported(pattern);
    }
    let Some(Value::Object(patterns)) = members.get_mut("patternProperties") else { return };
    let mut ported_names = Map::new();
    for (pattern, schema) in std::mem::take(patterns) {
        let pattern = ported(&pattern);
        let schema = match ported_names.shift_remove(&pattern) {
            Some(other) => json!({ "allOf": [other, schema] }),
            None => schema,
        };
        ported_names.insert(pattern, schema);
    }
    *patterns = ported_names;
}

/// What stands before a quantifier.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    Atom,
    Quantifier,
    /// A quantifier with `?`.
    Lazy,
}

/// A pattern as llguidance reads it. White space and `.` are those of ECMA-262, and classes have no operators but ranges: `[`, `&&`, `--` and `~~` stand
/// for themselves, and so does a `-` beside `\w`.
fn ported(pattern: &str) -> Result<String, &'static str> {
    let mut out = String::with_capacity(pattern.len());
    let mut rest = pattern;
    // Whether `.` stands for line breaks, too: here, and after each group that is open.
    let (mut before, mut takes_lines, mut open) = (Before::Atom, false, vec![]);
    while let Some(c) = rest.chars().next() {
        let mut length = c.len_utf8();
        let now = match c {
            '?' if before == Before::Quantifier => Before::Lazy,
            '*' | '+' | '?' => Before::Quantifier,
            '{' if is_count(rest) => {
                length = rest.find('}').map_or(length, |end| end + 1);
                Before::Quantifier
            }
            _ => Before::Atom,
        };
        if now == Before::Quantifier && before != Before::Atom {
            return Err("a quantifier after another one is not supported");
        }
        before = now;
        match c {
            '\\' => {
                length = escape(rest);
                out.push_str(&escaped(&rest[..length], rest, false)?);
            }
            '[' => length = class(rest, &mut out)?,
            '.' if !takes_lines => out.push_str(ANY),
            '(' => {
                length = group(rest)?;
                let within = lines(&rest[..length]).unwrap_or(takes_lines);
                // Flags without a pattern of their own hold after their group.
                open.push(if length > 2 && rest[length..].starts_with(')') { within } else { takes_lines });
                takes_lines = within;
                out.push_str(&rest[..length]);
            }
            ')' => {
                takes_lines = open.pop().unwrap_or(takes_lines);
                out.push(c);
            }
            _ => out.push_str(&rest[..length]),
        }
        rest = &rest[length..];
    }
    Ok(out)
}

/// Whether a text begins with `{2}`, `{2,}` or `{2,3}`.
fn is_count(text: &str) -> bool {
    let Some((count, _)) = text[1..].split_once('}') else { return false };
    let (least, most) = count.split_once(',').unwrap_or((count, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    !least.is_empty() && digits(least) && digits(most)
}

/// Length of the beginning of a group: `(`, or up to its flags.
fn group(text: &str) -> Result<usize, &'static str> {
    let Some(inner) = text.strip_prefix("(?") else { return Ok(1) };
    let letters = inner.find(|c: char| !c.is_ascii_alphabetic() && c != '-').unwrap_or(inner.len());
    let named = ["P<", "P=", "P>"].iter().any(|name| inner.starts_with(name));
    if named || !inner[letters..].starts_with([':', ')']) {
        return Ok(2);
    }
    match inner[..letters].contains(|c| !matches!(c, 'i' | 'm' | 's' | '-')) {
        true => Err("flags other than `i`, `m` and `s` are not supported"),
        false => Ok(2 + letters),
    }
}

/// Whether the flags of a group say that `.` stands for line breaks.
fn lines(group: &str) -> Option<bool> {
    let flags = group.strip_prefix("(?")?;
    let at = flags.find('s')?;
    Some(flags.find('-').is_none_or(|off| at < off))
}

/// An escape, in a class or outside of one. `rest` is the text that begins with it.
fn escaped(atom: &str, rest: &str, in_class: bool) -> Result<String, &'static str> {
    let set = |members: &str| if in_class { members.to_string() } else { format!("[{members}]") };
    match &atom[1..] {
        "d" => Ok(set(DIGIT)),
        "D" => Ok(format!("[^{DIGIT}]")),
        "w" => Ok(set(WORD)),
        "W" => Ok(format!("[^{WORD}]")),
        "s" => Ok(set(SPACE)),
        "S" => Ok(format!("[^{SPACE}]")),
        "a" | "A" | "z" => Err("`\\a`, `\\A` and `\\z` are no escapes of ECMA-262"),
        "p" | "P" => Err("expected `{` after `\\p`"),
        "b" if !in_class && rest[atom.len()..].starts_with('{') => Err("expected no `{` after `\\b`"),
        _ => Ok(atom.to_string()),
    }
}

/// Writes the class at the beginning of a text, and gives its length.
fn class(text: &str, out: &mut String) -> Result<usize, &'static str> {
    let mut at = if text.starts_with("[^") { 2 } else { 1 };
    out.push_str(&text[..at]);
    if text[at..].starts_with(']') {
        return Err("a class that begins with `]` is not supported: write `\\]`");
    }
    // A `-` after what may begin a range makes one, unless it is the last of the class.
    let (mut may_begin, mut in_range) = (false, false);
    while let Some(c) = text[at..].chars().next() {
        let length = if c == '\\' { escape(&text[at..]) } else { c.len_utf8() };
        let atom = &text[at..at + length];
        match c {
            ']' => {
                out.push(']');
                return Ok(at + length);
            }
            '-' if may_begin && !text[at + length..].starts_with(']') => {
                out.push('-');
                at += length;
                (may_begin, in_range) = (false, true);
                continue;
            }
            '[' | '&' | '~' | '-' => {
                out.push('\\');
                out.push(c);
            }
            '\\' => out.push_str(&escaped(atom, &text[at..], true)?),
            _ => out.push_str(atom),
        }
        at += length;
        let is_set = matches!(atom.as_bytes(), [b'\\', b'd' | b'D' | b'w' | b'W' | b's' | b'S' | b'p' | b'P', ..]);
        may_begin = !in_range && !is_set;
        in_range = false;
    }
    Ok(at)
}

/// Length of the escape at the beginning of a text.
fn escape(text: &str) -> usize {
    let Some(c) = text[1..].chars().next() else { return 1 };
    let begun = 1 + c.len_utf8();
    let rest = &text[begun..];
    let digits = match c {
        'x' => 2,
        'u' | 'p' | 'P' if rest.starts_with('{') => rest.find('}').map_or(0, |end| end + 1),
        'u' => 4,
        'c' => 1,
        _ => 0,
    };
    begun + if rest.is_char_boundary(digits) { digits } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_has_no_operators_but_ranges() {
        for (pattern, expected) in [
            ("[[a]]", r"[\[a]]"),
            ("[[:alpha:]]{2}", r"[\[:alpha:]]{2}"),
            ("[a&&b]&&", r"[a\&\&b]&&"),
            ("[a~~b]", r"[a\~\~b]"),
            ("[+--]", r"[+-\-]"),
            ("[--a]", r"[\--a]"),
            ("[a-z--9]", r"[a-z\--9]"),
            ("[a-z-]", r"[a-z\-]"),
            ("[^-a]", r"[^\-a]"),
            (r"[\w-.]+@[\W-\.]\d", r"[0-9A-Za-z_\-.]+@[[^0-9A-Za-z_]\-\.][0-9]"),
            (r"[\p{L}-x]", r"[\p{L}\-x]"),
            (r"[\u00e0-\u00ff-\x41-b]", r"[\u00e0-\u00ff\-\x41-b]"),
            (r"[\[\]\\]\[[a", r"[\[\]\\]\[[a"),
            ("é[ü-ÿ]\\", "é[ü-ÿ]\\"),
            (r"\u{1f", r"\u{1f"),
            (r"[\ué", r"[\ué"),
        ] {
            assert_eq!(ported(pattern).as_deref(), Ok(expected), "{pattern}");
        }
    }

    #[test]
    fn names_that_become_one_pattern_keep_both_schemas() {
        let mut schema =
            json!({ "pattern": "[[]", "patternProperties": { "[&]": { "minimum": 1 }, r"[\&]": { "maximum": 2 } } });
        port(schema.as_object_mut().unwrap());
        let both = json!({ "allOf": [{ "minimum": 1 }, { "maximum": 2 }] });
        assert_eq!(schema, json!({ "pattern": r"[\[]", "patternProperties": { r"[\&]": both } }));
    }
}
