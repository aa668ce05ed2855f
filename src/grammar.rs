//! Owns grammars: which tokens may come next, so that a text has the form that its client asked for. The crate llguidance does the work.
//!
//! A [`Vocabulary`] knows the bytes of every token. It compiles a [`Source`] into a [`Grammar`], and each text has its own
//! [`Guide`]. A guide gives a set of tokens before each choice, and takes the chosen token after it. Its sets depend on the tokens of
//! its own text alone, not on other texts.
//!
//! Sources are not trusted. Their size is bounded here, and the work for one token is bounded in units that do not depend on the
//! machine. The work to compile a source is not bounded here: `pipeline::tokens` compiles it first in a process with limits.
//!
//! The bytes of every token are known exactly, or the tokenizer is refused.

mod blame;
mod schema;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use thiserror::Error;

use crate::error::Fault;
use crate::sample::TokenSet;

pub use blame::Path;
pub use schema::{arguments, schema, target};

/// Most bytes of a source: the largest schemas that people write by hand are half as long.
pub const SOURCE_BYTES_MAX: usize = 64 << 10;
/// White space between two tokens of JSON: a blank, or a line break with an indent. Bounded, because a weak model might print it for ever.
const WHITE_SPACE: &str = r"\x20|\x0A[\x20\x09]{0,32}";
/// Bounds of one grammar and of one set of tokens. llguidance states the speeds: a core takes 14,000 units of `step_lexer_fuel` or
/// 20,000 of `step_max_items` in a millisecond, so a set takes 10 ms at most; a lexer state takes 2 KiB.
const STEP_LEXER_FUEL: u64 = 100_000;
const STEP_ITEMS_MAX: usize = 50_000;
const LEXER_STATES_MAX: usize = 20_000;
const GRAMMAR_SIZE_MAX: usize = 100_000;

/// The form that a text has to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// JSON of this schema, as its client sent it.
    Json(String),
    /// An object of this schema of a function's arguments, as its client sent it.
    Arguments(String),
    /// A grammar in the language of llguidance.
    Lark(String),
}

/// A source that cannot be compiled, or a text that cannot be continued.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GrammarError {
    #[error("expected at most {SOURCE_BYTES_MAX} bytes, found {found}")]
    Size { found: usize },
    #[error("expected an object as the schema")]
    NoObject,
    #[error("expected a schema of the type `object`")]
    NoArguments,
    #[error(
        "`{path}`: the number {number} cannot be kept exactly; expected one of at most 2^53 and 17 digits, or a whole one that fp64 holds, above -2^63 \
         and below 2^63"
    )]
    Number { path: Path, number: String },
    #[error("`{path}`: `{reference}`: {why}")]
    Reference { path: Path, reference: String, why: &'static str },
    #[error(
        "`{path}`: `{reference}` leads back to itself, with no value in between; put it into `properties` or `items`, or leave it out"
    )]
    Circle { path: Path, reference: String },
    /// A part that llguidance refuses.
    #[error("{}{reason}; {remedy}", place(.path))]
    Schema { path: Path, reason: String, remedy: &'static str },
    /// llguidance reads its own settings in this keyword.
    #[error("`x-guidance` is no keyword of JSON schemas")]
    Setting,
    #[error("{reason}")]
    Source { reason: String },
    #[error("the model has no token that ends its text")]
    NoEnd,
    #[error("the tokens of the model cannot be used as a vocabulary: {reason}")]
    Vocabulary { reason: String },
    #[error("the tokens that may come next cannot be found: {reason}")]
    Step { reason: String },
}

/// The beginning of a message about a part of a schema; the whole schema has no name.
fn place(path: &Path) -> String {
    if *path == Path::default() { String::new() } else { format!("`{path}`: ") }
}

impl From<GrammarError> for Fault {
    fn from(error: GrammarError) -> Fault {
        Fault::input(error.to_string())
    }
}

/// The bytes of every token of a model.
#[derive(Clone)]
pub struct Vocabulary {
    factory: Arc<ParserFactory>,
}

impl Vocabulary {
    /// Takes the bytes of each id. An id without bytes is never allowed by a grammar. The ids of `eos` end a text.
    ///
    /// # Errors
    /// A model without an id that ends its text.
    pub fn new(tokens: &[Vec<u8>], eos: &[u32]) -> Result<Vocabulary, GrammarError> {
        let &[first, ..] = eos else { return Err(GrammarError::NoEnd) };
        let info = TokRxInfo::new(tokens.len() as u32, first);
        let made = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let trie = TokTrie::from(&info, tokens).with_eos_tokens(eos);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory =
                ParserFactory::new(&env, InferenceCapabilities::default(), &SlicedBiasComputer::json_slices())?;
            factory.quiet();
            *factory.limits_mut() = ParserLimits {
                step_lexer_fuel: STEP_LEXER_FUEL,
                step_max_items: STEP_ITEMS_MAX,
                max_lexer_states: LEXER_STATES_MAX,
                max_grammar_size: GRAMMAR_SIZE_MAX,
                verbose_errors: false,
                ..ParserLimits::default()
            };
            Ok(Vocabulary { factory: Arc::new(factory) })
        }));
        made.map_err(|error| GrammarError::Vocabulary { reason: reason(&error.to_string()) })
    }

    /// Compiles a source.
    ///
    /// # Errors
    /// A source that is too long, that no text fits, or that llguidance would only approximate. Of a schema, the error names the part.
    pub fn compile(&self, source: &Source) -> Result<Grammar, GrammarError> {
        let schema = match source {
            Source::Json(text) => schema::read(text)?,
            Source::Arguments(text) => schema::read_arguments(text)?,
            // Frames of tool calls come on top of the schemas that `schema` has bounded.
            Source::Lark(lark) if lark.len() > 2 * SOURCE_BYTES_MAX => {
                return Err(GrammarError::Size { found: lark.len() });
            }
            Source::Lark(lark) => {
                let made = self.made(TopLevelGrammar::from_lark(lark.clone()));
                return made.map_err(|reason| GrammarError::Source { reason });
            }
        };
        let of_schema = |schema: Value| self.made(TopLevelGrammar::from_json_schema(schema));
        of_schema(schema::finished(schema.clone())?).map_err(|reason| {
            let refusal = |part: Map<String, Value>| match schema::finished(part) {
                Ok(part) => of_schema(part).err(),
                Err(error) => Some(error.to_string()),
            };
            blame::find(&schema, reason, refusal).into()
        })
    }

    /// The error is a line for people.
    fn made(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        let made = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            Ok(Matcher::new(Ok(self.factory.create_parser(grammar)?)))
        }));
        let mut matcher = made.map_err(|error| reason(&error.to_string()))?;
        if let Some(error) = matcher.get_error() {
            return Err(reason(&error));
        }
        // llguidance warns if some texts that it allows would not fit the schema.
        match matcher.grammar_warnings().first() {
            Some(warning) => Err(reason(warning)),
            None => Ok(Grammar(Arc::new(matcher))),
        }
    }
}

/// The first line of an error of llguidance, and its last `error:` line if the first only announces it. The rest is for developers.
fn reason(said: &str) -> String {
    const CHARACTERS_MAX: usize = 300;
    if said.contains("NoExtensionBias") {
        return "no text fits the schema".to_string();
    }
    let first = said.lines().next().unwrap_or_default();
    let fault = said.lines().rev().find_map(|line| line.trim().strip_prefix("error: "));
    let text = match fault.filter(|_| first.ends_with(':')) {
        Some(fault) => format!("{first} {fault}"),
        None => first.to_string(),
    };
    text.chars().take(CHARACTERS_MAX).collect()
}

/// A compiled source.
#[derive(Clone)]
pub struct Grammar(Arc<Matcher>);

impl Grammar {
    /// Begins a text. Guides share no state, so that other texts do not change when a bound is reached.
    pub fn begin(&self) -> Guide {
        Guide { matcher: self.0.deep_clone(), allowed: None }
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

/// The state of one text in its grammar.
pub struct Guide {
    matcher: Matcher,
    /// The set before the next token, once it was asked for.
    allowed: Option<TokenSet>,
}

impl Guide {
    /// The ids that may come next; at least one.
    ///
    /// # Errors
    /// More work than a token may take.
    pub fn allowed(&mut self) -> Result<&TokenSet, GrammarError> {
        if self.allowed.is_none() {
            let mask = self.matcher.compute_mask().map_err(step)?;
            self.allowed = Some(TokenSet::from_words(mask.as_slice().to_vec()));
        }
        self.allowed.as_ref().ok_or_else(|| GrammarError::Step { reason: "there is no set".to_string() })
    }

    /// Takes the chosen token. Returns whether the text is complete, so that no token may follow.
    ///
    /// # Errors
    /// A token that may not come next; more work than a token may take.
    pub fn push(&mut self, token: u32) -> Result<bool, GrammarError> {
        self.allowed = None;
        self.matcher.consume_token(token).map_err(step)?;
        Ok(self.matcher.is_stopped())
    }
}

fn step(error: impl fmt::Display) -> GrammarError {
    GrammarError::Step { reason: reason(&error.to_string()) }
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guide")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::random::Random;

    const EOS: u32 = 300;

    /// All bytes, some longer tokens, one without bytes, and two ends.
    fn vocabulary() -> Vocabulary {
        let mut tokens: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
        let longer = ["{\"", "\":", "\",\"", "true", "fal", "}", "\"}", "name", "é", "a fox", " {", "12", "]]"];
        tokens.extend(longer.iter().map(|text| text.as_bytes().to_vec()));
        tokens.resize(EOS as usize + 20, vec![]);
        Vocabulary::new(&tokens, &[EOS, EOS + 1]).unwrap()
    }

    fn bytes(id: u32) -> Vec<u8> {
        let longer = ["{\"", "\":", "\",\"", "true", "fal", "}", "\"}", "name", "é", "a fox", " {", "12", "]]"];
        match id {
            0..=255 => vec![id as u8],
            id if id >= EOS => vec![],
            id => longer[id as usize - 256].as_bytes().to_vec(),
        }
    }

    fn json_of(text: &str) -> Result<Grammar, GrammarError> {
        vocabulary().compile(&Source::Json(text.to_string()))
    }

    /// A text of tokens drawn from those allowed, and whether it ended.
    fn draw(guide: &mut Guide, random: &mut Random, tokens_max: usize) -> (Vec<u8>, bool) {
        let mut text = vec![];
        for _ in 0..tokens_max {
            let allowed = guide.allowed().unwrap();
            let ids: Vec<u32> = (0..EOS + 20).filter(|id| allowed.contains(*id)).collect();
            let id = ids[random.below(ids.len())];
            text.extend(bytes(id));
            if guide.push(id).unwrap() {
                return (text, true);
            }
        }
        (text, false)
    }

    #[test]
    fn every_text_of_a_schema_is_what_the_schema_says() {
        let grammar = json_of(
            r##"{"type": "object", "properties": {
                "name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 3, "maximum": 120},
                "kind": {"enum": ["fox", "dog"]}, "old": {"type": "boolean"}, "next": {"$ref": "#/$defs/list"}
            }, "required": ["name", "age", "kind"], "additionalProperties": false,
            "$defs": {"list": {"type": "array", "maxItems": 2, "items": {"type": "null"}}}}"##,
        )
        .unwrap();
        let mut random = Random::new(7);
        for _ in 0..100 {
            let (text, ended) = draw(&mut grammar.begin(), &mut random, 500);
            assert!(ended);
            let value: Value = serde_json::from_slice(&text).unwrap();
            assert!(value["name"].as_str().unwrap().chars().count() <= 6, "{value}");
            assert!((3..=120).contains(&value["age"].as_i64().unwrap()), "{value}");
            assert!(["fox", "dog"].contains(&value["kind"].as_str().unwrap()), "{value}");
            for (key, value) in value.as_object().unwrap() {
                match key.as_str() {
                    "name" | "age" | "kind" => {}
                    "old" => assert!(value.is_boolean()),
                    "next" => assert!(value.as_array().is_some_and(|list| list.len() <= 2)),
                    other => panic!("{other}"),
                }
            }
        }
    }

    #[test]
    fn a_text_that_could_go_on_ends_with_an_end_and_texts_do_not_touch_each_other() {
        let grammar = json_of(r#"{"type": "integer"}"#).unwrap();
        let (mut one, mut other) = (grammar.begin(), grammar.begin());
        assert!(!one.allowed().unwrap().contains(EOS));
        assert_eq!(one.push(u32::from(b'4')), Ok(false));
        assert!(one.allowed().unwrap().contains(EOS) && one.allowed().unwrap().contains(EOS + 1));
        assert!(!one.allowed().unwrap().contains(EOS + 2), "an id without bytes");
        assert_eq!(one.push(EOS + 1), Ok(true));
        assert!(!other.allowed().unwrap().contains(EOS));
        assert!(other.push(u32::from(b'x')).is_err());
        assert_eq!(Vocabulary::new(&[vec![1]], &[]).err(), Some(GrammarError::NoEnd));
    }

    #[test]
    fn frames_stand_around_schemas() {
        let parameters = arguments("{}").unwrap();
        let lark = format!("start: \"<call>\\n{{\\\"a\\\": \" one \"}}\\n</call>\"\none: %json {parameters}");
        let grammar = vocabulary().compile(&Source::Lark(lark)).unwrap();
        let (text, ended) = draw(&mut grammar.begin(), &mut Random::new(1), 200);
        let text = String::from_utf8(text).unwrap();
        let inner = text.strip_prefix("<call>\n{\"a\": ").and_then(|text| text.strip_suffix("}\n</call>")).unwrap();
        assert!(ended && serde_json::from_str::<Value>(inner).unwrap() == json!({}), "{text}");
    }

    #[test]
    fn what_cannot_be_kept_to_exactly_is_refused_with_its_path_and_a_remedy() {
        let check = "leave it out, and check the ";
        for (text, expected, remedy) in [
            (r#"{"type": "array", "uniqueItems": true}"#, "`uniqueItems`: this keyword is not supported", check),
            (r#"{"items": {"not": {"const": 1}}}"#, "`items.not`: this keyword is not supported", check),
            (
                r#"{"type": "string", "format": "poem"}"#,
                "`format`: expected `date-time`, ",
                "found `poem`; leave it out",
            ),
            (
                r#"{"properties": {"a.b": {"oneOf": [{"minimum": 1}, {"minimum": 2}]}}}"#,
                "`properties[\"a.b\"].oneOf`: several of its schemas may fit the same text",
                "use `anyOf`",
            ),
            (r#"{"type": "string", "pattern": "("}"#, "`pattern`: unclosed group", "write the pattern in another way"),
            (
                r#"{"properties": {"ok": {"pattern": "^a"}, "date": {"type": "string", "pattern": "^(?=2)[0-9]+$"}}}"#,
                "`properties.date.pattern`: look-around, including look-ahead and look-behind, is not supported",
                "write the pattern in another way, or leave it out",
            ),
            (
                r#"{"items": [{"anyOf": [{"type": "null"}, {"pattern": "(a)\\1"}]}]}"#,
                "`items[0].anyOf[1].pattern`: backreferences are not supported",
                "write the pattern in another way",
            ),
            (
                r#"{"patternProperties": {"^a": true, "\\bb": {"type": "null"}}, "additionalProperties": {"not": {}}}"#,
                "`additionalProperties.not`: this keyword",
                check,
            ),
            (
                r#"{"patternProperties": {"^a": true, "\\bb": {"type": "null"}}}"#,
                "`patternProperties[\"\\\\bb\"]`: `\\b`, `\\B`, and `^` or `$` inside a pattern are not supported",
                "write the pattern in another way",
            ),
            // The place where a reference leads, also within the schema's own properties.
            (
                r##"{"properties": {"a": {"$ref": "#/$defs/d"}}, "$defs": {"unused": {"not": {}}, "d": {"format": "byte"}}}"##,
                "`$defs.d.format`: expected `date-time`",
                "found `byte`",
            ),
            (
                r##"{"properties": {"a": {"items": {"$ref": "#/properties/b~1"}}, "b/": {"contains": {"$ref": "#"}}}}"##,
                "`properties[\"b/\"].contains`: this keyword",
                check,
            ),
            (r#"{"type": "integer", "minimum": 5, "maximum": 2}"#, "`minimum`: no text fits", "what contradicts it"),
            (
                r#"{"type": "object", "properties": {"no": false, "a": {"enum": []}, "k": {"const": "ab", "maxLength": 1}}, "required": ["k"]}"#,
                "`properties.k.",
                "no text fits; change it, or what contradicts it",
            ),
            (r#"{"properties": {"a": {"type": "String"}}}"#, "`properties.a.type`: ", "expected `object`, `array`"),
            (r##"{"items": {"$ref": "#/nowhere"}}"##, "`items.$ref`: ", "define it in `$defs`"),
            (r##"{"items": {"$ref": "#/a~1b"}}"##, "`items.$ref`: `#/a/b`: there is nothing", "define it in `$defs`"),
            (r##"{"$ref": "#/a~2"}"##, "`$ref`: `#/a~2`: ", "expected `~0` or `~1`"),
            (r##"{"$ref": "#/a%2"}"##, "`$ref`: `#/a%2`: ", "expected two hexadecimal digits"),
            (
                r##"{"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}"##,
                "`$ref`: `#/$defs/a` leads back to itself",
                "put it into `properties`",
            ),
            (
                r##"{"properties": {"a": {"$ref": "#/properties/a"}}}"##,
                "`properties.a.$ref`: `#/properties/a` leads back to itself",
                "leave it out",
            ),
            (r##"{"$ref": "#"}"##, "`$ref`: `#` leads back to itself", "leave it out"),
            (r#"{"x-guidance": {}}"#, "`x-guidance` is no keyword of JSON schemas", ""),
            ("[]", "expected an object as the schema", ""),
        ] {
            let error = json_of(text).map(|_| ()).expect_err(text).to_string();
            assert!(error.starts_with(expected) && error.contains(remedy) && !error.contains('\n'), "{text}: {error}");
        }
        let long = json!({ "enum": ["x".repeat(SOURCE_BYTES_MAX)] });
        assert!(matches!(schema(&long.to_string()), Err(GrammarError::Size { .. })));
    }

    #[test]
    fn classes_of_a_pattern_are_those_of_ecma_262() {
        for (pattern, fits, others) in [
            (r"^[[a]{2}$", ["[a", "a["], ["a", "b["]),
            (r"^[a&&b]{2}$", ["a&", "&b"], ["c&", "a"]),
            (r"^[+--]{2}$", ["+,", "--"], [".+", "*+"]),
            (r"^[\\w-.]+@[\\w-\\.]+$", ["a-b.c@d-e.f", "-@."], ["a/b@c", "a@c/"]),
            (r"^[[:alpha:]]$", ["a]", ":]"], ["b]", "a"]),
        ] {
            let schema = format!(r#"{{"type": "string", "pattern": "{pattern}"}}"#);
            let grammar = json_of(&schema).expect(pattern);
            let takes = |text: &str| takes(&grammar, &format!("\"{text}\""));
            assert!(fits.into_iter().all(takes), "{pattern}");
            assert!(!others.into_iter().any(takes), "{pattern}");
        }
    }

    /// Whether a whole text fits.
    fn takes(grammar: &Grammar, text: &str) -> bool {
        let mut guide = grammar.begin();
        let ended = text.bytes().try_fold(false, |_, byte| guide.push(u32::from(byte)));
        ended.is_ok_and(|ended| ended || guide.allowed().is_ok_and(|next| next.contains(EOS)))
    }

    /// Each schema with texts that fit, and with others.
    fn check_texts(cases: &[(&str, &[&str], &[&str])]) {
        for (schema, fits, others) in cases {
            let grammar = json_of(schema).unwrap_or_else(|error| panic!("{schema}: {error}"));
            fits.iter().for_each(|text| assert!(takes(&grammar, text), "{schema}: {text}"));
            others.iter().for_each(|text| assert!(!takes(&grammar, text), "{schema}: {text}"));
        }
    }

    #[test]
    fn a_keyword_constrains_values_of_its_own_type_only() {
        check_texts(&[
            (r#"{"minimum": 3}"#, &["3", "\"a\"", "null", "true", "[]", "[1, 2]", "{\"a\":0}"], &["2.5", "-1"]),
            (r#"{"minLength": 2}"#, &["\"ab\"", "1", "[]", "{}"], &["\"\"", "\"a\""]),
            (r#"{"pattern": "^a"}"#, &["\"ab\"", "1", "[\"b\"]", "{\"b\": \"b\"}"], &["\"b\""]),
            (r#"{"maxItems": 1}"#, &["[]", "[null]", "\"ab\"", "12", "{}"], &["[1, 2]", "[1,2]"]),
            (
                r#"{"prefixItems": [{"type": "null"}], "items": false}"#,
                &["[null]", "[]", "1", "{}"],
                &["[1]", "[null,1]"],
            ),
            (r#"{"required": ["a"]}"#, &["{\"a\":1}", "\"a\"", "0", "null", "[]"], &["{}", "{\"b\": 1}"]),
            (
                r#"{"properties": {"a": {"maximum": 1}}, "additionalProperties": false}"#,
                &["{}", "{\"a\": 1}", "{\"a\": \"x\"}", "[2]", "2"],
                &["{\"a\": 2}", "{\"b\":1}"],
            ),
            (
                r#"{"enum": [1, "a", [2], {"b": null}], "minimum": 2, "minLength": 1}"#,
                &["\"a\"", "[2]", "{\"b\": null}"],
                &["1", "null"],
            ),
            (
                r#"{"anyOf": [{"maximum": 1}, {"minLength": 2}], "type": ["number", "string"]}"#,
                &["1", "2", "\"a\""],
                &["null", "[]"],
            ),
            (r#"{"allOf": [{"maximum": 1}, {"minLength": 2}]}"#, &["1", "\"ab\"", "[]", "true"], &["2", "\"a\""]),
            (
                r#"{"oneOf": [{"type": "string", "maxItems": 0}, {"type": "array", "maxLength": 0}]}"#,
                &["\"a\"", "[1]"],
                &["1", "{}"],
            ),
            (
                r##"{"$ref": "#/$defs/x", "maxLength": 1, "$defs": {"x": {"minimum": 3}}}"##,
                &["3", "\"a\"", "{}"],
                &["2", "\"ab\""],
            ),
            (r#"{"propertyNames": {"pattern": "^a"}}"#, &["{\"ab\": 1}", "\"b\"", "1"], &["{\"b\": 1}"]),
            (r#"{"multipleOf": 2}"#, &["4", "\"a\"", "[3]"], &["3", "2.5"]),
        ]);
    }

    #[test]
    fn keywords_of_all_drafts_have_one_meaning_in_any_order() {
        const DRAFT_4: &str = "http://json-schema.org/draft-04/schema#";
        let old = |rest: &str| format!(r#"{{"$schema": "{DRAFT_4}", {rest}}}"#);
        check_texts(&[
            (r#"{"minimum": 3, "anyOf": [{}], "exclusiveMinimum": true}"#, &["3.5", "\"a\""], &["3", "2"]),
            (&old(r#""exclusiveMaximum": true, "allOf": [{}], "maximum": 3"#), &["2"], &["3"]),
            (&old(r#""const": 1"#), &["1"], &["2", "\"a\""]),
            (&old(r#""prefixItems": [{"type": "null"}], "items": false"#), &["[null]"], &["[1]"]),
            (
                r#"{"items": [{"type": "null"}], "anyOf": [{}], "additionalItems": false}"#,
                &["[null]", "[]"],
                &["[null, 1]", "[1]"],
            ),
            (
                r#"{"items": [{"type": "null"}], "additionalItems": {"type": "integer"}}"#,
                &["[null, 1]"],
                &["[null, \"a\"]"],
            ),
            (
                r#"{"patternProperties": {"^a": {}}, "allOf": [{}], "additionalProperties": false}"#,
                &["{}", "{\"ab\": 1}"],
                &["{\"b\": 1}"],
            ),
        ]);
        let inner = r##"{"$defs": {"a": {"$id": "http://a/b", "$ref": "#/$defs/b"}}, "$ref": "#/$defs/a"}"##;
        let error = json_of(inner).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("`$defs.a.$id`: references below an identifier"), "{error}");
        let error = json_of(&old(r#""contains": {"type": "null"}"#)).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("`contains`: this keyword is not supported"), "{error}");
    }

    #[test]
    fn multiples_are_found_exactly_or_refused() {
        check_texts(&[
            (
                r#"{"multipleOf": 0.25}"#,
                &["0.5", "0.50", "0.75", "1.0", "-1.5", "3", "\"a\""],
                &["0.7", "0.3", "0.251"],
            ),
            (
                r#"{"type": "number", "multipleOf": 0.125, "maximum": 1}"#,
                &["0.5", "0.25", "0.375", "1"],
                &["0.1", "1.5", "null"],
            ),
            (r#"{"multipleOf": 0.07}"#, &["0.07", "0.7", "1.4", "7"], &["0.08", "1"]),
            (r#"{"type": "integer", "multipleOf": 1.5}"#, &["3", "-6"], &["1", "1.5"]),
            (r#"{"allOf": [{"multipleOf": 0.25}, {"multipleOf": 0.3}]}"#, &["1.5", "3"], &["0.25", "0.3", "0.6"]),
            (r#"{"type": "integer", "multipleOf": 1000000}"#, &["429000000"], &["4294967296", "429000001"]),
        ]);
        for (text, expected) in [
            (
                r#"{"multipleOf": 3000000000}"#,
                "`multipleOf`: the multiples of 3000000000 cannot be found exactly; use one",
            ),
            (r#"{"items": {"multipleOf": 1e-9}}"#, "`items.multipleOf`: the multiples of 1e-9 "),
            (r#"{"multipleOf": 0}"#, "`multipleOf`: expected a number above 0, found 0"),
            (
                r#"{"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}"#,
                "the common multiples of its `multipleOf` may",
            ),
        ] {
            let error = json_of(text).map(|_| ()).expect_err(text).to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }

    #[test]
    fn patterns_are_those_of_ecma_262() {
        check_texts(&[
            (r#"{"pattern": "^.$"}"#, &["\"a\"", "\"é\"", "\"\u{85}\""], &[r#""\r""#, r#""\n""#, "\"\u{2028}\""]),
            (r#"{"pattern": "^\\s$"}"#, &["\" \"", "\"\u{feff}\"", "\"\u{a0}\"", r#""\r""#], &["\"\u{85}\"", "\"a\""]),
            (r#"{"pattern": "^[\\S]$"}"#, &["\"\u{85}\"", "\"a\""], &["\"\u{feff}\"", "\" \""]),
            (r#"{"pattern": "^(?:(?s:.)|(?s).)[.]$"}"#, &[r#""\r.""#, r#""\n.""#], &[r#""\r\r""#]),
            (r#"{"pattern": "^(?s:a).$"}"#, &["\"ab\""], &[r#""a\r""#]),
            (r#"{"pattern": "^[^\\s.]+?$"}"#, &["\"ab\""], &["\"a b\"", "\"a.b\""]),
        ]);
        for (pattern, expected) in [
            ("a++", "a quantifier after another one"),
            ("a{1,2}{3}", "a quantifier after another one"),
            (r"\\Aa\\z", "`\\a`, `\\A` and `\\z` are no escapes of ECMA-262"),
            (r"\\pL", "expected `{` after `\\p`"),
            ("[]a]", "a class that begins with `]`"),
            ("(?x: a)", "flags other than"),
            ("(?-u:a)", "flags other than"),
        ] {
            for schema in
                [format!(r#"{{"pattern": "{pattern}"}}"#), format!(r#"{{"patternProperties": {{"{pattern}": {{}}}}}}"#)]
            {
                let error = json_of(&schema).map(|_| ()).expect_err(&schema).to_string();
                assert!(error.contains(expected) && error.starts_with("`pattern"), "{pattern}: {error}");
            }
        }
    }

    #[test]
    fn numbers_stay_exact_or_are_refused_by_name() {
        let only = |text: &str| {
            let (found, ended) = draw(&mut json_of(text).expect(text).begin(), &mut Random::new(1), 100);
            assert!(ended, "{text}");
            String::from_utf8(found).unwrap()
        };
        for (text, expected) in [
            (r#"{"const": 9007199254740991}"#, "9007199254740991"),
            (r#"{"const": 9007199254740992}"#, "9007199254740992"),
            (r#"{"const": 1152921504606846976}"#, "1152921504606846976"),
            (r#"{"const": -1152921504606846976}"#, "-1152921504606846976"),
            (r#"{"const": 9223372036854775807}"#, "9223372036854775807"),
            (r#"{"const": 0.1}"#, "0.1"),
            (r#"{"const": -2.5e-7}"#, "-0.00000025"),
            (r#"{"enum": [12.5]}"#, "12.5"),
            (
                r#"{"type": "integer", "minimum": 9223372036854775807, "maximum": 9223372036854775807}"#,
                "9223372036854775807",
            ),
        ] {
            assert_eq!(only(text), expected, "{text}");
        }
        for (text, named) in [
            (r#"{"const": 1234567890123456789}"#, "`const`: the number 1234567890123456789 "),
            (r#"{"const": 9007199254740993}"#, "`const`: the number 9007199254740993 "),
            (r#"{"const": -9223372036854775808}"#, "`const`: the number -9223372036854775808 "),
            (r#"{"const": 18446744073709551615}"#, "`const`: the number 18446744073709551615 "),
            (r#"{"const": 123456789012345678901234567890}"#, "`const`: the number 123456789012345678901234567890 "),
            (r#"{"const": 1e400}"#, "`const`: the number 1e400 "),
            (r#"{"type": "integer", "const": 1e20}"#, "`const`: the number 1e20 "),
            (r#"{"const": 0.30000000000000001}"#, "`const`: the number 0.30000000000000001 "),
            (r#"{"enum": [1, {"a": [9007199254740993]}]}"#, "`enum`: the number 9007199254740993 "),
            (
                r#"{"properties": {"const": {"maximum": 9007199254740993}}}"#,
                "`properties.const.maximum`: the number 9007199254740993 ",
            ),
            (r#"{"type": "integer", "minimum": -9223372036854775808}"#, "`minimum`: the number -9223372036854775808 "),
            (r#"{"exclusiveMaximum": 9007199254740992}"#, "`exclusiveMaximum`: the number 9007199254740992 "),
            (r#"{"maximum": 9007199254740992, "exclusiveMaximum": true}"#, "`maximum`: the number 9007199254740992 "),
            (
                r#"{"items": [{"multipleOf": 0.10000000000000001}]}"#,
                "`items[0].multipleOf`: the number 0.10000000000000001 ",
            ),
        ] {
            let error = json_of(text).map(|_| ()).expect_err(text).to_string();
            assert!(error.starts_with(named), "{text}: {error}");
        }
        // Data that constrains nothing, and properties with the names of keywords.
        json_of(r#"{"properties": {"maximum": {"const": 1}}, "default": 1234567890123456789}"#).unwrap();
    }

    /// Values of a schema, drawn again and again.
    fn drawn(schema: Value, count: u64) -> Vec<Value> {
        let grammar = json_of(&schema.to_string()).unwrap();
        let one = |seed| {
            let (text, ended) = draw(&mut grammar.begin(), &mut Random::new(seed), 4000);
            assert!(ended, "{schema}");
            serde_json::from_slice(&text).unwrap()
        };
        (0..count).map(one).collect()
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        // Two years, of which one has a 29th of February: the days of February are drawn often.
        let texts = |schema: Value, count| {
            let values = drawn(schema, count);
            values.iter().map(|value| value.as_str().unwrap().to_string()).collect::<Vec<_>>()
        };
        let february = texts(json!({ "type": "string", "format": "date", "pattern": "^2(000|100)-02" }), 300);
        assert!(february.contains(&"2000-02-29".to_string()) && !february.contains(&"2100-02-29".to_string()));
        assert!(february.contains(&"2100-02-28".to_string()));
        let exists = |date: &str| {
            let parts: Vec<u32> = date.split('-').map(|part| part.parse().unwrap()).collect();
            let year = parts[0];
            let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
            let days = [31, 28 + u32::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
            (1..=days[parts[1] as usize - 1]).contains(&parts[2])
        };
        let dates = texts(json!({ "type": "string", "format": "date" }), 100);
        assert!(dates.iter().all(|date| exists(date)), "{dates:?}");
        for time in texts(json!({ "type": "string", "format": "date-time", "pattern": "-02-2.*Z$" }), 100) {
            assert!(exists(&time[..10]) && !time[17..].starts_with("60"), "{time}");
        }
        for bound in [
            json!({ "maxLength": 64 }),
            json!({ "minLength": 20, "maxLength": 30 }),
            json!({ "allOf": [{ "maxLength": 25 }] }),
        ] {
            let mut schema = json!({ "type": "string", "format": "date-time" });
            schema.as_object_mut().unwrap().extend(bound.as_object().unwrap().clone());
            assert!(texts(schema.clone(), 50).iter().all(|time| exists(&time[..10]) && time.len() <= 64), "{schema}");
        }
        assert!(
            texts(json!({ "type": "string", "format": "time" }), 200).iter().all(|time| !time[6..].starts_with("60"))
        );
    }

    #[test]
    fn names_of_properties_may_come_from_lists_and_patterns() {
        let schema = json!({
            "type": "object", "required": ["score"], "additionalProperties": false, "minProperties": 1,
            "properties": { "score": { "type": "integer", "multipleOf": 5 } },
            "patternProperties": { "^score$": { "minimum": 0, "maximum": 9 } },
        });
        let found = drawn(schema, 50);
        assert!(found.iter().all(|value| [json!({ "score": 0 }), json!({ "score": 5 })].contains(value)), "{found:?}");
        let schema = json!({
            "type": "object", "propertyNames": { "type": "string", "enum": ["a", "b"] }, "required": ["b"],
            "additionalProperties": { "type": "null" },
        });
        let found = drawn(schema, 50);
        assert!(found.contains(&json!({ "a": null, "b": null })) && found.contains(&json!({ "b": null })), "{found:?}");
        assert!(found.iter().all(|value| value.as_object().unwrap().keys().all(|key| key == "a" || key == "b")));
    }

    #[test]
    fn references_are_read_as_pointers_in_fragments() {
        let grammar = json_of(
            r##"{"$defs": {"a/b": {"const": 1}, "c~d": {"const": 2}, "e f": {"$ref": "#/$defs/a~1b"}, "ref0": {"const": 4}},
                "type": "array", "prefixItems": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/c~0d"}, {"$ref": "#/%24defs/e%20f"},
                {"$ref": "#/$defs/ref0"}, {"const": {"$ref": "#/$defs/a~1b"}}], "minItems": 5, "maxItems": 5}"##,
        )
        .unwrap();
        let (text, ended) = draw(&mut grammar.begin(), &mut Random::new(3), 200);
        let value: Value = serde_json::from_slice(&text).unwrap();
        assert!(ended);
        assert_eq!(value, json!([1, 2, 1, 4, { "$ref": "#/$defs/a~1b" }]));
    }

    #[test]
    fn references_may_lead_through_keywords_that_are_written_in_another_way() {
        check_texts(&[
            (
                r##"{"items": [{"type": "null"}, {"$ref": "#/items/0"}], "additionalItems": {"$ref": "#/items/1"}, "type": "array"}"##,
                &["[null, null, null]", "[]"],
                &["[1]", "[null, 1]", "[null, null, 1]"],
            ),
            (
                r##"{"patternProperties": {"^.$": {"type": "null"}}, "properties": {"ab": {"$ref": "#/patternProperties/^.$"}}, "type": "object"}"##,
                &["{\"ab\": null}", "{\"a\": null}"],
                &["{\"ab\": 1}", "{\"a\": 1}"],
            ),
            (
                r##"{"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/items"}}]}}"##,
                &["[null, [null, []]]"],
                &["[1]", "[[1]]"],
            ),
        ]);
        for reference in ["#/prefixItems/+0", "#/prefixItems/00", "#/prefixItems/1", "#/prefixItems/-"] {
            let text = json!({ "prefixItems": [{ "type": "null" }], "items": { "$ref": reference } }).to_string();
            let error = json_of(&text).map(|_| ()).expect_err(&text).to_string();
            assert!(error.starts_with("`items.$ref`: ") && error.contains("define it in `$defs`"), "{text}: {error}");
        }
    }

    #[test]
    fn arguments_are_objects_whatever_else_is_allowed() {
        for text in [
            "{}",
            r#"{"type": ["object", "null"], "properties": {}}"#,
            r#"{"anyOf": [{"type": "object"}, {"type": "null"}]}"#,
        ] {
            let grammar = vocabulary().compile(&Source::Arguments(text.to_string())).unwrap();
            assert!(grammar.begin().allowed().unwrap().contains(u32::from(b'{')), "{text}");
            for other in *b"[\"0n-tf" {
                assert!(!grammar.begin().allowed().unwrap().contains(u32::from(other)), "{text}");
            }
        }
        assert_eq!(arguments(r#"{"type": "string"}"#), Err(GrammarError::NoArguments));
        assert!(
            arguments(r##"{"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}"##).unwrap().get("type").is_none()
        );
    }

    #[test]
    fn a_schema_that_takes_too_much_is_refused_or_ends_its_text() {
        // An automaton of 2^n states, deep nesting, and a product of alternatives.
        let pattern = json!({ "type": "string", "pattern": "^(a|b)*a(a|b){60}$" });
        let nest = (0..50).fold(json!({ "type": "null" }), |inner, _| json!({ "type": "array", "items": inner }));
        let sides =
            json!({ "anyOf": (0..6).map(|at| json!({ "properties": { format!("p{at}"): {} } })).collect::<Vec<_>>() });
        let product = json!({ "allOf": vec![sides; 4] });
        for source in [pattern, nest, product] {
            let Ok(grammar) = json_of(&source.to_string()) else { continue };
            let (mut guide, mut random) = (grammar.begin(), Random::new(3));
            for _ in 0..300 {
                let Ok(allowed) = guide.allowed() else { break };
                let ids: Vec<u32> = (0..256).filter(|id| allowed.contains(*id)).collect();
                let Some(&id) = ids.get(random.below(ids.len().max(1))) else { break };
                if guide.push(id) != Ok(false) {
                    break;
                }
            }
        }
    }
}
