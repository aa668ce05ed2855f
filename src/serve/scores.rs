//! Owns log-probabilities in replies, in the forms of both endpoints. They are written directly from the tokens: a reply may have
//! millions, and as JSON values they would take fifty times the memory of their text.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::desk::ScoredToken;
use super::reply::{Kind, json_text};
use crate::tokenizer::Piece;

/// Stands for the logarithm of 0, which JSON cannot express.
const LOGPROB_MIN: f64 = -9999.0;

/// Log-probabilities of a choice, or of some of its tokens.
pub struct Scores<'a> {
    pub kind: Kind,
    /// The first token of a prompt, which has no log-probability, and its characters in the text.
    pub first: Option<(&'a str, u32)>,
    /// Tokens of the prompt, and tokens after the prompt.
    pub scored: [&'a [ScoredToken]; 2],
    /// Where the first token begins in its choice's text, in characters.
    pub offset: usize,
}

impl<'a> Scores<'a> {
    fn tokens(&self) -> impl Iterator<Item = &'a ScoredToken> + use<'a> {
        self.scored.into_iter().flatten()
    }

    fn texts(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let first = self.first.map(|(text, _)| text);
        first.into_iter().chain(self.tokens().map(|token| token.piece.text.as_str()))
    }

    fn widths(&self) -> impl Iterator<Item = usize> + use<'a> {
        let first = self.first.map(|(_, characters)| characters);
        first.into_iter().chain(self.tokens().map(|token| token.characters)).map(|characters| characters as usize)
    }

    fn offsets(&self) -> impl Iterator<Item = usize> + use<'a> {
        self.widths().scan(self.offset, |offset, width| Some(std::mem::replace(offset, *offset + width)))
    }

    /// The JSON for an event; `offset` is moved to the token after these.
    pub fn event(self, offset: &mut usize) -> String {
        *offset += self.widths().sum::<usize>();
        json_text(&self)
    }
}

impl Serialize for Scores<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let none = self.first.map(|_| ());
        match self.kind {
            Kind::Chat => {
                let mut map = serializer.serialize_map(Some(2))?;
                map.serialize_entry("content", &List(|| self.tokens().map(Entry::of)))?;
                map.serialize_entry("refusal", &())?;
                map.end()
            }
            Kind::Completion => {
                let own =
                    || none.map(|()| None).into_iter().chain(self.tokens().map(|token| Some(finite(token.logprob))));
                let tops = || none.map(|()| None).into_iter().chain(self.tokens().map(|token| Some(Tops(token))));
                let mut map = serializer.serialize_map(Some(4))?;
                map.serialize_entry("tokens", &List(|| self.texts()))?;
                map.serialize_entry("token_logprobs", &List(own))?;
                map.serialize_entry("top_logprobs", &List(tops))?;
                map.serialize_entry("text_offset", &List(|| self.offsets()))?;
                map.end()
            }
        }
    }
}

fn finite(logprob: f64) -> f64 {
    logprob.max(LOGPROB_MIN)
}

/// A JSON list whose values are made while it is written.
struct List<F>(F);

impl<F: Fn() -> I, I: IntoIterator<Item: Serialize>> Serialize for List<F> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

/// A token of a chat, with the most probable ones beside it.
#[derive(Serialize)]
struct Entry<'a> {
    token: &'a str,
    logprob: f64,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry<'a>>>,
}

impl<'a> Entry<'a> {
    fn new(piece: &'a Piece, logprob: f64) -> Entry<'a> {
        Entry { token: &piece.text, logprob: finite(logprob), bytes: &piece.bytes, top_logprobs: None }
    }

    fn of(token: &'a ScoredToken) -> Entry<'a> {
        let top = token.top.iter().map(|(piece, logprob)| Entry::new(piece, *logprob)).collect();
        Entry { top_logprobs: Some(top), ..Entry::new(&token.piece, token.logprob) }
    }
}

/// Characters that each token of a prompt adds to its text. `parts` has what a tokenizer prints for each id, special tokens included, which the
/// text may lack. All of them together are the text.
pub fn widths(text: &str, parts: &[String]) -> Vec<u32> {
    let mut rest = text;
    let mut widths = vec![];
    for part in parts {
        // A decoder may leave out the space before a text.
        let length =
            [part.as_str(), part.trim_start()].into_iter().find(|part| rest.starts_with(part)).map_or(0, str::len);
        widths.push(rest[..length].chars().count() as u32);
        rest = &rest[length..];
    }
    if let Some(last) = widths.last_mut() {
        *last += rest.chars().count() as u32;
    }
    widths
}

/// The most probable tokens of a completion by their text, the most probable first. Of two tokens with the same text, it has the
/// more probable one. The token itself is always included.
struct Tops<'a>(&'a ScoredToken);

impl Serialize for Tops<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ScoredToken { piece, logprob, top, .. } = self.0;
        let is_new = |at: usize, text: &str| !top[..at].iter().any(|(before, _)| before.text == text);
        let mut map = serializer.serialize_map(None)?;
        for (_, (piece, logprob)) in top.iter().enumerate().filter(|(at, (piece, _))| is_new(*at, &piece.text)) {
            map.serialize_entry(&piece.text, &finite(*logprob))?;
        }
        if is_new(top.len(), &piece.text) {
            map.serialize_entry(&piece.text, &finite(*logprob))?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;

    fn piece(text: &str) -> Arc<Piece> {
        Arc::new(Piece { text: text.to_string(), bytes: text.into() })
    }

    fn token(text: &str, logprob: f64, top: &[(&str, f64)]) -> ScoredToken {
        let top = top.iter().map(|(text, logprob)| (piece(text), *logprob)).collect();
        ScoredToken { piece: piece(text), logprob, top, characters: text.chars().count() as u32 }
    }

    fn scores<'a>(
        kind: Kind,
        first: Option<(&'a str, u32)>,
        scored: [&'a [ScoredToken]; 2],
        offset: usize,
    ) -> Scores<'a> {
        Scores { kind, first, scored, offset }
    }

    #[test]
    fn a_completion_names_each_text_once_and_counts_characters() {
        let prompt = [token("ö", -1.0, &[("a", -0.5), ("a", -0.75)])];
        // A special token is not in the text.
        let special = ScoredToken { characters: 0, ..token("<s>", -3.0, &[]) };
        let after = [token(" fox", f64::NEG_INFINITY, &[(" fox", -0.25)]), special, token("x", -2.0, &[])];
        let mut offset = 3;
        let text = scores(Kind::Completion, Some(("Once", 4)), [&prompt, &after], offset).event(&mut offset);
        let expected = json!({
            "tokens": ["Once", "ö", " fox", "<s>", "x"],
            "token_logprobs": [null, -1.0, -9999.0, -3.0, -2.0],
            "top_logprobs": [null, { "a": -0.5, "ö": -1.0 }, { " fox": -0.25 }, { "<s>": -3.0 }, { "x": -2.0 }],
            "text_offset": [3, 7, 8, 12, 12],
        });
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
        assert_eq!(offset, 13);
    }

    #[test]
    fn tokens_of_a_prompt_begin_where_its_text_has_them() {
        let parts = |parts: &[&str]| parts.iter().map(|part| (*part).to_string()).collect::<Vec<_>>();
        assert_eq!(widths("Once, 日", &parts(&["<s>", "Once", ",", "", "", " 日"])), [0, 4, 1, 0, 0, 2]);
        assert_eq!(widths("Once", &parts(&["<s>", " Once"])), [0, 4], "a decoder without the space before a text");
        assert_eq!(widths("abc", &parts(&["x", "ab", "?"])), [0, 2, 1], "all of it is the text");
    }

    #[test]
    fn a_chat_has_the_bytes_of_each_token() {
        let after = [token("é", -1.0, &[("é", -1.0), ("b", f64::NEG_INFINITY)])];
        let text = scores(Kind::Chat, None, [&[], &after], 0).event(&mut 0);
        let entry = json!({ "token": "é", "logprob": -1.0, "bytes": [195, 169] });
        let mut expected = entry.clone();
        expected["top_logprobs"] = json!([entry, { "token": "b", "logprob": -9999.0, "bytes": [98] }]);
        assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), json!({ "content": [expected], "refusal": null }));
    }
}
