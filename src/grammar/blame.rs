//! Owns the search for the part of a schema that llguidance refuses: it does not say where that part is.
//!
//! Parts are compiled by themselves, from the whole schema inwards. Each part has the whole schema in its `$defs`, so that its
//! references still lead somewhere.

use std::collections::BTreeSet;
use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::GrammarError;
use super::schema::{Place, pointer};

/// Name of the whole schema in the `$defs` of a part.
const WHOLE: &str = "whole";
/// Bounds of the search. What was found before stays true, and is only less exact.
const TRIALS_MAX: u32 = 400;
const TIME_MAX: Duration = Duration::from_secs(2);
/// How llguidance names keywords that it does not know.
const UNKNOWN: &str = "Unimplemented keys: ";
/// Formats of texts that llguidance knows.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Where a part of a schema is: `properties.date.anyOf[0].pattern`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Path(String);

impl Path {
    /// The path of a member of an object.
    pub fn key(&self, key: &str) -> Path {
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '$');
        let mut path = self.0.clone();
        if key.is_empty() || !key.chars().all(plain) {
            let _ = write!(path, "[{}]", Value::from(key));
        } else {
            let dot = if path.is_empty() { "" } else { "." };
            let _ = write!(path, "{dot}{key}");
        }
        Path(path)
    }

    /// The path of an item of a list.
    pub fn item(&self, at: usize) -> Path {
        Path(format!("{}[{at}]", self.0))
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const CHARACTERS_MAX: usize = 200;
        match self.0.char_indices().nth(CHARACTERS_MAX) {
            Some((end, _)) => write!(f, "{}…", &self.0[..end]),
            None => f.write_str(&self.0),
        }
    }
}

/// What llguidance refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blame {
    pub path: Path,
    /// The keyword at the end of the path, if it is one.
    pub keyword: Option<String>,
    /// What llguidance says of that part.
    pub reason: String,
}

impl From<Blame> for GrammarError {
    fn from(blame: Blame) -> GrammarError {
        let (reason, remedy) = blame.advice();
        GrammarError::Schema { path: blame.path, reason, remedy }
    }
}

impl Blame {
    /// The reason in the words of JSON schema, and what the client can do.
    fn advice(&self) -> (String, &'static str) {
        const LEAVE: &str = "leave it out, and check the text yourself";
        let Blame { keyword, reason, .. } = self;
        let keyword = keyword.as_deref().unwrap_or_default();
        if fits_nothing(reason) {
            return ("no text fits".to_string(), "change it, or what contradicts it");
        }
        if reason.contains(UNKNOWN) {
            return ("this keyword is not supported".to_string(), "leave it out, and check the JSON yourself");
        }
        match keyword {
            "pattern" | "patternProperties" => {
                let reason = reason.rsplit("regex parse error: ").next().unwrap_or(reason);
                let is_assertion = reason.contains("lookarounds not supported");
                let reason = if is_assertion {
                    "`\\b`, `\\B`, and `^` or `$` inside a pattern are not supported"
                } else {
                    reason
                };
                (reason.to_string(), "write the pattern in another way, or leave it out and check the text yourself")
            }
            "format" if reason.starts_with("Unknown format") => {
                let known = FORMATS.join("`, `");
                (format!("expected `{known}`, found `{}`", reason.rsplit(": ").next().unwrap_or_default()), LEAVE)
            }
            "oneOf" => (
                "several of its schemas may fit the same text".to_string(),
                "use `anyOf`, or give each schema a required property with a `const` of its own",
            ),
            "$ref" => (reason.clone(), "define it in `$defs`, and refer to `#/$defs/NAME`"),
            "type" => (
                reason.clone(),
                "expected `object`, `array`, `string`, `number`, `integer`, `boolean` or `null`, or a list of these",
            ),
            _ => (reason.clone(), "change it, or leave it out and check the JSON yourself"),
        }
    }
}

/// Finds what llguidance refuses in a schema; `reason` is what it says of the whole, and `refusal` what it says of another schema.
pub fn find(
    schema: &Map<String, Value>,
    reason: String,
    refusal: impl FnMut(Map<String, Value>) -> Option<String>,
) -> Blame {
    let mut whole = Value::Object(schema.clone());
    move_references(&mut whole, Place::Schema);
    let Value::Object(mut members) = whole else { return Blame { path: Path::default(), keyword: None, reason } };
    // An identifier would change where references lead.
    for key in ["$id", "id"] {
        if members.get(key).is_some_and(Value::is_string) {
            members.remove(key);
        }
    }
    let whole = Value::Object(members);
    let search = Search { whole: &whole, refusal, trials: TRIALS_MAX, begun: Instant::now() };
    search.run(reason)
}

/// Lets references lead into the whole schema in `$defs`.
fn move_references(value: &mut Value, place: Place) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| move_references(item, place)),
        Value::Object(members) => {
            for (key, value) in members {
                match (place, key.as_str(), &mut *value) {
                    (Place::Schema, "$ref", Value::String(reference)) => {
                        let pointer = reference.strip_prefix('#');
                        if let Some(pointer) = pointer.filter(|rest| rest.is_empty() || rest.starts_with('/')) {
                            *reference = format!("#/$defs/{WHOLE}{pointer}");
                        }
                    }
                    _ => place.of(key).into_iter().for_each(|place| move_references(value, place)),
                }
            }
        }
        _ => {}
    }
}

/// The schemas directly in a schema that may be refused: pointers from it, and paths.
fn parts<'a>(node: &'a Value, path: &Path) -> Vec<(String, Path, &'a Value)> {
    let mut parts = vec![];
    for (key, value) in node.as_object().into_iter().flatten() {
        // Definitions are looked at where a reference leads to them.
        let place = Place::Schema.of(key).filter(|_| key != "$defs" && key != "definitions");
        let (at, path) = (format!("/{}", escaped(key)), path.key(key));
        match (place, value) {
            (Some(Place::Schema), Value::Array(items)) => {
                let items = items.iter().enumerate();
                parts.extend(items.map(|(index, item)| (format!("{at}/{index}"), path.item(index), item)));
            }
            (Some(Place::Schema), value) => parts.push((at, path, value)),
            (Some(Place::Names), Value::Object(names)) => {
                let names = names.iter();
                parts.extend(names.map(|(name, value)| (format!("{at}/{}", escaped(name)), path.key(name), value)));
            }
            _ => {}
        }
    }
    parts.retain(|(_, _, value)| value.is_object() || *value == &json!(false));
    parts
}

/// The keyword of a schema that llguidance says it does not know.
fn unknown<'a>(node: &'a Value, reason: &str) -> Option<&'a str> {
    let listed = reason.split_once(UNKNOWN)?.1;
    node.as_object()?.keys().map(String::as_str).find(|key| listed.contains(&format!("\"{key}\"")))
}

/// A key in a JSON pointer.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

/// Whether llguidance says that no text fits, and not that it lacks something.
fn fits_nothing(reason: &str) -> bool {
    reason.contains("nsatisfiable") || reason.contains("no text fits")
}

struct Search<'a, R> {
    whole: &'a Value,
    refusal: R,
    trials: u32,
    begun: Instant,
}

impl<'a, R: FnMut(Map<String, Value>) -> Option<String>> Search<'a, R> {
    fn run(mut self, reason: String) -> Blame {
        let mut blame = Blame { path: Path::default(), keyword: None, reason };
        let mut node = self.whole;
        let mut followed = BTreeSet::new();
        loop {
            if let Some(key) = unknown(node, &blame.reason) {
                return Blame { path: blame.path.key(key), keyword: Some(key.to_string()), ..blame };
            }
            if let Some((path, inner, reason)) = self.inner(&blame.path, node, &blame.reason) {
                blame = Blame { path, keyword: None, reason };
                node = inner;
                continue;
            }
            let Some((keyword, path, reason)) = self.keyword(&blame.path, node, &blame.reason) else { return blame };
            let reference = node["$ref"].as_str().filter(|_| keyword == "$ref");
            let target = reference.and_then(|reference| Some((reference, self.target(reference)?)));
            match target {
                Some((reference, (path, target))) if followed.insert(reference) => {
                    blame = Blame { path, keyword: None, reason };
                    node = target;
                }
                _ => return Blame { path, keyword: Some(keyword), reason },
            }
        }
    }

    /// What a reference of [`move_references`] leads to.
    fn target(&self, reference: &str) -> Option<(Path, &'a Value)> {
        let keys = pointer(reference)?;
        let (mut path, mut value) = (Path::default(), self.whole);
        for key in keys.iter().skip(2) {
            (path, value) = match value {
                Value::Array(items) => {
                    let at: usize = key.parse().ok()?;
                    (path.item(at), items.get(at)?)
                }
                value => (path.key(key), value.get(key)?),
            };
        }
        (keys.len() > 2).then_some((path, value))
    }

    /// What is said of a part of the schema, if it is refused for the same kind of reason as `whole`.
    fn refused(&mut self, part: &Value, whole: &str) -> Option<String> {
        let mut members = match part {
            Value::Object(members) => members.clone(),
            Value::Bool(false) => Map::from_iter([("enum".to_string(), json!([]))]),
            _ => return None,
        };
        self.trials = self.trials.checked_sub(1).filter(|_| self.begun.elapsed() < TIME_MAX)?;
        members.remove("definitions");
        members.insert("$defs".to_string(), json!({ WHOLE: self.whole }));
        (self.refusal)(members).filter(|reason| fits_nothing(reason) == fits_nothing(whole))
    }

    /// A part that llguidance refuses when it is the whole schema.
    fn inner(&mut self, path: &Path, node: &'a Value, reason: &str) -> Option<(Path, &'a Value, String)> {
        let mut first = None;
        for (at, path, part) in parts(node, path) {
            let Some(said) = self.refused(part, reason) else { continue };
            // A property that fits nothing may be left out, so that another part can be the reason.
            if !fits_nothing(reason) || self.is_needed(node, &at, reason) {
                return Some((path, part, said));
            }
            first = first.or(Some((path, part, said)).filter(|_| part.is_object()));
        }
        first
    }

    /// Whether a schema is accepted with anything at a place.
    fn is_needed(&mut self, node: &Value, at: &str, reason: &str) -> bool {
        let mut without = node.clone();
        match without.pointer_mut(at) {
            Some(part) => *part = json!(true),
            None => return false,
        }
        self.refused(&without, reason).is_none()
    }

    /// The keyword that llguidance refuses together with the type, or without which it accepts the schema.
    fn keyword(&mut self, path: &Path, node: &Value, reason: &str) -> Option<(String, Path, String)> {
        let members = node.as_object()?;
        let of_type = |key: &str| members.get_key_value("type").filter(|_| key != "type");
        for (key, value) in members {
            let alone = |value: Value| {
                let kind = of_type(key).map(|(key, value)| (key.clone(), value.clone()));
                Value::Object(kind.into_iter().chain([(key.clone(), value)]).collect())
            };
            let Some(said) = self.refused(&alone(value.clone()), reason) else { continue };
            let path = path.key(key);
            if let ("patternProperties", Value::Object(patterns)) = (key.as_str(), value) {
                for (pattern, value) in patterns {
                    let one = alone(json!({ pattern: value }));
                    if let Some(said) = self.refused(&one, reason) {
                        return Some((key.clone(), path.key(pattern), said));
                    }
                }
            }
            return Some((key.clone(), path, said));
        }
        let mut others = members.keys().filter(|key| *key != "type").chain(members.keys().filter(|key| *key == "type"));
        let needed = others.find(|key| {
            let mut without = members.clone();
            without.remove(*key);
            self.refused(&Value::Object(without), reason).is_none()
        });
        needed.map(|key| (key.clone(), path.key(key), reason.to_string()))
    }
}
