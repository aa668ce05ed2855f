//! Owns patterns: ECMA-262 reads some characters of a class as they are, for which the regexes of llguidance have operators.

use serde_json::{Map, Value, json};

/// Rewrites the patterns of a schema, which are values and names.
pub fn port(members: &mut Map<String, Value>) {
    if let Some(Value::String(pattern)) = members.get_mut("pattern") {
        *pattern = ported(pattern);
    }
    let Some(Value::Object(patterns)) = members.get_mut("patternProperties") else { return };
    let mut ported_names = Map::new();
    for (pattern, schema) in std::mem::take(patterns) {
        let pattern = ported(&pattern);
        let schema = match ported_names.remove(&pattern) {
            Some(other) => json!({ "allOf": [other, schema] }),
            None => schema,
        };
        ported_names.insert(pattern, schema);
    }
    *patterns = ported_names;
}

/// A pattern whose classes have no operators but ranges: `[`, `&&`, `--` and `~~` stand for themselves, and so does a `-` beside `\w`.
fn ported(pattern: &str) -> String {
    let mut out = String::with_capacity(pattern.len());
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '\\' => escape(rest),
            '[' => {
                let length = class(rest, &mut out);
                rest = &rest[length..];
                continue;
            }
            c => c.len_utf8(),
        };
        out.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    out
}

/// Writes the class at the beginning of a text, and gives its length.
fn class(text: &str, out: &mut String) -> usize {
    let mut at = if text.starts_with("[^") { 2 } else { 1 };
    out.push_str(&text[..at]);
    if text[at..].starts_with(']') {
        out.push(']');
        at += 1;
    }
    // A `-` after what may begin a range makes one, unless it is the last of the class.
    let (mut may_begin, mut in_range) = (false, false);
    while let Some(c) = text[at..].chars().next() {
        let length = if c == '\\' { escape(&text[at..]) } else { c.len_utf8() };
        let atom = &text[at..at + length];
        at += length;
        match c {
            ']' => {
                out.push(']');
                break;
            }
            '-' if may_begin && !text[at..].starts_with(']') => {
                out.push('-');
                (may_begin, in_range) = (false, true);
                continue;
            }
            '[' | '&' | '~' | '-' => {
                out.push('\\');
                out.push(c);
            }
            _ => out.push_str(atom),
        }
        let is_set = matches!(atom.as_bytes(), [b'\\', b'd' | b'D' | b'w' | b'W' | b's' | b'S' | b'p' | b'P', ..]);
        may_begin = !in_range && !is_set;
        in_range = false;
    }
    at
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
            ("[]a[]", r"[]a\[]"),
            (r"[\w-.]+@[\w-\.]", r"[\w\-.]+@[\w\-\.]"),
            (r"[\p{L}-x]", r"[\p{L}\-x]"),
            (r"[\u00e0-\u00ff-\x41-b]", r"[\u00e0-\u00ff\-\x41-b]"),
            (r"[\[\]\\]\[[a", r"[\[\]\\]\[[a"),
            ("é[ü-ÿ]\\", "é[ü-ÿ]\\"),
            (r"\u{1f", r"\u{1f"),
            (r"[\ué", r"[\ué"),
        ] {
            assert_eq!(ported(pattern), expected, "{pattern}");
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
