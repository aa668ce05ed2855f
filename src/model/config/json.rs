//! Owns JSON as Python writes it: with `Infinity`, `-Infinity` and `NaN`, which are no JSON.

use std::borrow::Cow;

use serde_json::Value;

/// The words, and how transformers 5 writes them.
const WORDS: [(&str, &str); 3] = [
    ("-Infinity", r#"{"__float__":"-Infinity"}"#),
    ("Infinity", r#"{"__float__":"Infinity"}"#),
    ("NaN", r#"{"__float__":"NaN"}"#),
];

/// Reads a text of JSON. Numbers that JSON does not have become objects, as in configs that transformers 5 wrote.
pub fn parse(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(&plain(text))
}

/// The text with these words replaced, but not inside of strings.
fn plain(text: &str) -> Cow<'_, str> {
    if !WORDS.iter().any(|(word, _)| text.contains(word)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 64);
    let (mut rest, mut in_string) = (text, false);
    while let Some(first) = rest.chars().next() {
        let found = WORDS.iter().find(|(word, _)| !in_string && rest.starts_with(word));
        let taken = match found {
            Some((word, object)) => {
                out.push_str(object);
                word.len()
            }
            None => {
                // What follows a backslash ends no string.
                let second = rest.chars().nth(1).filter(|_| in_string && first == '\\');
                in_string ^= first == '"';
                let taken = first.len_utf8() + second.map_or(0, char::len_utf8);
                out.push_str(&rest[..taken]);
                taken
            }
        };
        rest = &rest[taken..];
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn words_of_python_become_objects() {
        let read = |text| parse(text).unwrap();
        let infinity = json!({"__float__": "Infinity"});
        assert_eq!(read(r#"{"a": [0.0, Infinity]}"#), json!({"a": [0.0, infinity]}));
        assert_eq!(read("[NaN, -Infinity]"), json!([{"__float__": "NaN"}, {"__float__": "-Infinity"}]));
        // Strings are left alone, whatever is escaped in them.
        assert_eq!(read(r#"["Infinity", Infinity]"#), json!(["Infinity", infinity]));
        assert_eq!(read(r#"["\" NaN", "\\", Infinity, "é"]"#), json!(["\" NaN", "\\", infinity, "é"]));
        for text in ["Infinity5", "[Infinity", r#"{Infinity: 1}"#, r#"["NaN]"#, "nan", r#""\"#] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
