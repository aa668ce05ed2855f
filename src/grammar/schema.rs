//! Owns a client's JSON schema until llguidance compiles it: numbers that stay exact, and references in the one form that llguidance reads.
//!
//! [`plain`] writes keywords that llguidance lacks with those that it has, where that changes nothing.
//!
//! llguidance keeps numbers as fp64 and writes bounds of integers with 64 bits. A number that would be another one there is refused by
//! name, because a text would fit another schema than the client sent.

mod bounds;
mod drafts;
mod multiples;
mod patterns;
mod plain;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::blame::Path;
use super::{GrammarError, SOURCE_BYTES_MAX, WHITE_SPACE};

/// Deepest nesting that is read; serde_json has the same bound for values.
const DEPTH_MAX: usize = 127;
/// Up to here fp64 holds every whole number.
const EXACT_MAX: f64 = 9_007_199_254_740_992.0;
const NOTHING_THERE: &str = "there is nothing; define it in `$defs`, and refer to `#/$defs/NAME`";
/// Keywords with values that are data, not schemas.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "example"];
/// Keywords with schemas by name.
const NAMED: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// A client's JSON schema, with the rule for white space added.
///
/// # Errors
/// A schema that is no object, has a keyword of llguidance, is too long, has a number that llguidance would round, or a reference that leads
/// nowhere or back to itself.
pub fn schema(text: &str) -> Result<Value, GrammarError> {
    finished(read(text)?)
}

/// As [`schema`], for the arguments of a function: an object, whatever else the schema allows. An empty schema stands for a function without
/// arguments, as in the API of OpenAI.
///
/// # Errors
/// As [`schema`]; a schema that allows no object.
pub fn arguments(text: &str) -> Result<Value, GrammarError> {
    finished(read_arguments(text)?)
}

/// As [`read`], for the arguments of a function.
pub(super) fn read_arguments(text: &str) -> Result<Map<String, Value>, GrammarError> {
    let mut schema = read(text)?;
    if schema.is_empty() {
        schema.insert("additionalProperties".to_string(), json!(false));
    }
    match schema.get("type") {
        Some(Value::String(kind)) if kind == "object" => {}
        Some(Value::Array(kinds)) if kinds.iter().any(|kind| kind == "object") => {
            schema.insert("type".to_string(), json!("object"));
        }
        Some(_) => return Err(GrammarError::NoArguments),
        None => {
            let target = schema.get("$ref").and_then(Value::as_str).and_then(|pointer| located(&schema, pointer));
            if target.is_none_or(|target| target["type"] != "object") {
                schema.insert("type".to_string(), json!("object"));
            }
        }
    }
    Ok(schema)
}

/// A client's schema as it was sent.
pub(super) fn read(text: &str) -> Result<Map<String, Value>, GrammarError> {
    let syntax = |error: serde_json::Error| GrammarError::Source { reason: error.to_string() };
    if !text.trim_start().starts_with('{') {
        return Err(GrammarError::NoObject);
    }
    if text.len() > 4 * SOURCE_BYTES_MAX {
        return Err(GrammarError::Size { found: text.len() });
    }
    let raw: &RawValue = serde_json::from_str(text).map_err(syntax)?;
    check_numbers(&Exact::of(raw, 0)?, Place::Schema, &Path::default())?;
    let schema: Map<String, Value> = serde_json::from_str(text).map_err(syntax)?;
    if schema.contains_key("x-guidance") {
        return Err(GrammarError::Setting);
    }
    let found = json!(schema).to_string().len();
    if found > SOURCE_BYTES_MAX {
        return Err(GrammarError::Size { found });
    }
    Ok(schema)
}

/// A schema as llguidance reads it.
pub(super) fn finished(mut schema: Map<String, Value>) -> Result<Value, GrammarError> {
    // Keywords of all drafts are read, each with one meaning. llguidance would ignore those that the named draft lacks.
    schema.shift_remove("$schema");
    each_schema(&schema, &mut |members, path| {
        drafts::check(members, path)?;
        patterns::check(members, path)?;
        multiples::check(members, path)
    })?;
    let mut renamed = Renamed { taken: names(&schema), names: BTreeMap::new() };
    let mut root = Value::Object(schema);
    rewrite(&mut root, Place::Schema, &Path::default(), &mut renamed)?;
    let Value::Object(mut schema) = root else { return Err(GrammarError::NoObject) };
    define(&mut schema, renamed)?;
    let mut root = Value::Object(schema);
    plain::rewrite(&mut root, Place::Schema);
    let Value::Object(mut schema) = root else { return Err(GrammarError::NoObject) };
    if let Some((path, reference)) = circle(&schema) {
        return Err(GrammarError::Circle { path, reference });
    }
    bounds::check(&schema)?;
    multiples::check_common(&schema)?;
    schema.insert("x-guidance".to_string(), json!({ "whitespace_pattern": WHITE_SPACE }));
    Ok(Value::Object(schema))
}

/// JSON whose numbers are still text.
enum Exact<'a> {
    Number(&'a str),
    List(Vec<Exact<'a>>),
    Object(Vec<(String, Exact<'a>)>),
    /// A text, true, false or null.
    Other(&'a str),
}

/// The members of an object, in order.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Members<'a>, D::Error> {
        struct Named;
        impl<'de> Visitor<'de> for Named {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = vec![];
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(members)
            }
        }
        deserializer.deserialize_map(Named).map(Members)
    }
}

impl<'a> Exact<'a> {
    fn of(raw: &'a RawValue, depth: usize) -> Result<Exact<'a>, GrammarError> {
        let text = raw.get();
        let syntax = |error: serde_json::Error| GrammarError::Source { reason: error.to_string() };
        if depth > DEPTH_MAX {
            return Err(GrammarError::Source { reason: format!("expected at most {DEPTH_MAX} levels, found more") });
        }
        Ok(match text.as_bytes().first() {
            Some(b'{') => {
                let Members(members) = serde_json::from_str(text).map_err(syntax)?;
                let inner = |(name, raw)| Ok((name, Exact::of(raw, depth + 1)?));
                Exact::Object(members.into_iter().map(inner).collect::<Result<_, GrammarError>>()?)
            }
            Some(b'[') => {
                let items: Vec<&'a RawValue> = serde_json::from_str(text).map_err(syntax)?;
                let inner = |raw| Exact::of(raw, depth + 1);
                Exact::List(items.into_iter().map(inner).collect::<Result<_, GrammarError>>()?)
            }
            Some(b'-' | b'0'..=b'9') => Exact::Number(text),
            _ => Exact::Other(text),
        })
    }
}

/// What a value of a schema is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Schema,
    /// Schemas by name.
    Names,
}

impl Place {
    /// The place of a member; `None`: it is data.
    pub(super) fn of(self, key: &str) -> Option<Place> {
        match self {
            Place::Names => Some(Place::Schema),
            Place::Schema if DATA.contains(&key) => None,
            Place::Schema if NAMED.contains(&key) => Some(Place::Names),
            Place::Schema => Some(Place::Schema),
        }
    }
}

/// Does something with each schema in a schema, itself included.
fn each_schema(
    schema: &Map<String, Value>,
    each: &mut impl FnMut(&Map<String, Value>, &Path) -> Result<(), GrammarError>,
) -> Result<(), GrammarError> {
    fn inner(
        value: &Value,
        place: Place,
        path: &Path,
        each: &mut impl FnMut(&Map<String, Value>, &Path) -> Result<(), GrammarError>,
    ) -> Result<(), GrammarError> {
        match value {
            Value::Array(items) => {
                items.iter().enumerate().try_for_each(|(at, item)| inner(item, place, &path.item(at), each))
            }
            Value::Object(members) if place == Place::Schema => of_members(members, path, each),
            Value::Object(members) => {
                members.iter().try_for_each(|(key, value)| inner(value, Place::Schema, &path.key(key), each))
            }
            _ => Ok(()),
        }
    }
    fn of_members(
        members: &Map<String, Value>,
        path: &Path,
        each: &mut impl FnMut(&Map<String, Value>, &Path) -> Result<(), GrammarError>,
    ) -> Result<(), GrammarError> {
        each(members, path)?;
        members.iter().try_for_each(|(key, value)| match Place::Schema.of(key) {
            Some(place) => inner(value, place, &path.key(key), each),
            None => Ok(()),
        })
    }
    of_members(schema, &Path::default(), each)
}

/// Refuses numbers that llguidance would round.
fn check_numbers(value: &Exact<'_>, place: Place, path: &Path) -> Result<(), GrammarError> {
    let members = match value {
        Exact::Object(members) => members,
        Exact::List(items) => {
            return items.iter().enumerate().try_for_each(|(at, item)| check_numbers(item, place, &path.item(at)));
        }
        Exact::Number(_) | Exact::Other(_) => return Ok(()),
    };
    let says = |key: &str, text: &str| {
        members.iter().any(|(name, value)| name == key && matches!(value, Exact::Other(found) if *found == text))
    };
    let whole = says("type", "\"integer\"");
    for (key, value) in members {
        let path = path.key(key);
        match (place.of(key), key.as_str(), value) {
            (Some(Place::Schema), "minimum" | "maximum", Exact::Number(number)) if place == Place::Schema => {
                let draft_4 = if key == "minimum" { "exclusiveMinimum" } else { "exclusiveMaximum" };
                bound(path, number, whole, says(draft_4, "true"))?;
            }
            (Some(Place::Schema), "exclusiveMinimum" | "exclusiveMaximum", Exact::Number(number))
                if place == Place::Schema =>
            {
                bound(path, number, whole, true)?;
            }
            (Some(Place::Schema), "multipleOf", Exact::Number(number)) if place == Place::Schema => {
                if !is_small(number, false) {
                    return Err(rounded(path, number));
                }
            }
            (Some(place), _, value) => check_numbers(value, place, &path)?,
            (None, "const" | "enum", value) => constants(&path, value)?,
            (None, _, _) => {}
        }
    }
    Ok(())
}

/// Refuses numbers in `const` or `enum` that would be others.
fn constants(path: &Path, value: &Exact<'_>) -> Result<(), GrammarError> {
    match value {
        Exact::Object(members) => members.iter().try_for_each(|(_, value)| constants(path, value)),
        Exact::List(items) => items.iter().try_for_each(|item| constants(path, item)),
        Exact::Number(number) if is_small(number, false) || is_integer(number) => Ok(()),
        Exact::Number(number) => Err(rounded(path.clone(), number)),
        Exact::Other(_) => Ok(()),
    }
}

fn bound(path: Path, number: &str, whole: bool, exclusive: bool) -> Result<(), GrammarError> {
    // A bound of whole numbers is written with 64 bits, one of other numbers as fp64 is printed.
    let large = !exclusive && is_integer(number) && (whole || is_printed(number));
    if is_small(number, exclusive) || large { Ok(()) } else { Err(rounded(path, number)) }
}

fn rounded(path: Path, number: &str) -> GrammarError {
    GrammarError::Number { path, number: number.chars().take(60).collect() }
}

/// Whether llguidance has exactly this number, as a whole one and as any other. An exclusive bound has to leave room for one more.
fn is_small(number: &str, exclusive: bool) -> bool {
    let size = number.parse::<f64>().map_or(f64::INFINITY, f64::abs);
    (if exclusive { size < EXACT_MAX } else { size <= EXACT_MAX }) && is_printed(number)
}

/// Whether fp64 holds this whole number of 64 bits, or rounds it to the end of that range. The least one has no negative.
fn is_integer(number: &str) -> bool {
    number.parse::<i64>().is_ok_and(|value| value != i64::MIN && (value as f64) as i64 == value)
}

/// Whether fp64 prints this number as the same one.
fn is_printed(number: &str) -> bool {
    let value = number.parse::<f64>().ok().filter(|value| value.is_finite());
    value.is_some_and(|value| decimal(&value.to_string()) == decimal(number))
}

/// A decimal number as sign, digits without zeros around them, and exponent of the last digit. Zero has no digits.
fn decimal(number: &str) -> (bool, String, i64) {
    let (negative, rest) = number.strip_prefix('-').map_or((false, number), |rest| (true, rest));
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    // An exponent of more digits is out of the range of fp64 anyway.
    let exponent = exponent.trim_start_matches('+').parse::<i32>().map_or(i64::from(i32::MAX), i64::from);
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    let short = digits.trim_end_matches('0');
    if short.is_empty() {
        return (false, String::new(), 0);
    }
    (negative, short.to_string(), exponent - fraction.len() as i64 + (digits.len() - short.len()) as i64)
}

/// References that llguidance does not read, by the path that they name, with the name that their target gets in `$defs`.
struct Renamed {
    taken: BTreeSet<String>,
    /// With the first place that has the reference.
    names: BTreeMap<Vec<String>, (String, Path)>,
}

/// Names in the `$defs` of a schema.
fn names(schema: &Map<String, Value>) -> BTreeSet<String> {
    schema.get("$defs").and_then(Value::as_object).map_or(BTreeSet::new(), |defs| defs.keys().cloned().collect())
}

fn misread(path: &Path, reference: &str, why: &'static str) -> GrammarError {
    GrammarError::Reference { path: path.clone(), reference: reference.chars().take(100).collect(), why }
}

/// Whether a reference has to be resolved here: it has escapes (RFC 6901, in a fragment as RFC 3986 has it), which llguidance takes as they are
/// spelled, or an index that it takes for another one, or it leads through keywords that [`plain`] moves.
fn is_own(reference: &str) -> bool {
    const MOVED: [&str; 6] =
        ["items", "additionalItems", "patternProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"];
    let Some(keys) = reference.strip_prefix("#/") else { return false };
    let is_odd = |key: &str| {
        let is_index = key.trim_start_matches('+').bytes().all(|byte| byte.is_ascii_digit());
        is_index && key.len() > 1 && key.starts_with(['+', '0'])
    };
    keys.is_empty() || keys.contains(['%', '~']) || keys.split('/').any(|key| MOVED.contains(&key) || is_odd(key))
}

/// Gives each reference that is resolved here a name in `$defs`.
fn rewrite(value: &mut Value, place: Place, path: &Path, renamed: &mut Renamed) -> Result<(), GrammarError> {
    let members = match value {
        Value::Object(members) => members,
        Value::Array(items) => {
            let mut items = items.iter_mut().enumerate();
            return items.try_for_each(|(at, item)| rewrite(item, place, &path.item(at), renamed));
        }
        _ => return Ok(()),
    };
    for (key, value) in members {
        let path = path.key(key);
        match (place, key.as_str(), &mut *value) {
            (Place::Schema, "$ref", Value::String(reference)) => {
                if is_own(reference) {
                    let keys = keys(reference).map_err(|why| misread(&path, reference, why))?;
                    let name = renamed.name(keys, path);
                    *reference = format!("#/$defs/{name}");
                }
            }
            _ => {
                if let Some(place) = place.of(key) {
                    rewrite(value, place, &path, renamed)?;
                }
            }
        }
    }
    Ok(())
}

impl Renamed {
    fn name(&mut self, keys: Vec<String>, path: Path) -> String {
        if let Some((name, _)) = self.names.get(&keys) {
            return name.clone();
        }
        let mut at = self.names.len();
        let name = loop {
            let name = format!("ref{at}");
            if self.taken.insert(name.clone()) {
                break name;
            }
            at += 1;
        };
        self.names.insert(keys, (name.clone(), path));
        name
    }
}

/// The keys that a reference names, without its escapes.
fn keys(reference: &str) -> Result<Vec<String>, &'static str> {
    let hex = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16)).map(|digit| digit as u8);
    let mut bytes = reference.bytes();
    let mut plain = vec![];
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            plain.push(byte);
            continue;
        }
        match (hex(bytes.next()), hex(bytes.next())) {
            (Some(high), Some(low)) => plain.push(high << 4 | low),
            _ => return Err("expected two hexadecimal digits after `%`"),
        }
    }
    let plain = String::from_utf8(plain).map_err(|_| "expected UTF-8")?;
    let parts = plain.strip_prefix("#/").unwrap_or_default().split('/').map(|part| {
        let unknown = part.match_indices('~').any(|(at, _)| !matches!(part.as_bytes().get(at + 1), Some(b'0' | b'1')));
        if unknown {
            return Err("expected `~0` or `~1` where there is a `~`");
        }
        Ok(part.replace("~1", "/").replace("~0", "~"))
    });
    parts.collect()
}

/// An index of a list: RFC 6901 has no sign and no zero before other digits.
fn index(key: &str) -> Option<usize> {
    let is_plain = key == "0" || !key.starts_with(['0', '+']);
    key.parse().ok().filter(|_| is_plain)
}

fn follow(schema: &Map<String, Value>, path: impl IntoIterator<Item = impl AsRef<str>>) -> Option<&Value> {
    let mut path = path.into_iter();
    let mut value = schema.get(path.next()?.as_ref())?;
    for key in path {
        value = match value {
            Value::Array(items) => items.get(index(key.as_ref())?)?,
            value => value.get(key.as_ref())?,
        };
    }
    Some(value)
}

/// What a reference in `schema` leads to.
pub fn target<'a>(schema: &'a Map<String, Value>, reference: &str) -> Option<&'a Value> {
    follow(schema, pointer(reference)?)
}

/// The keys that a reference into its own schema names.
pub(super) fn pointer(reference: &str) -> Option<Vec<String>> {
    keys(reference).ok().filter(|_| reference.starts_with("#/"))
}

/// The target of a reference without escapes; `None` for the whole schema, and where there is nothing.
fn located<'a>(schema: &'a Map<String, Value>, reference: &str) -> Option<&'a Value> {
    follow(schema, reference.strip_prefix("#/")?.split('/'))
}

/// Adds the targets of renamed references to `$defs`.
fn define(schema: &mut Map<String, Value>, renamed: Renamed) -> Result<(), GrammarError> {
    if renamed.names.is_empty() {
        return Ok(());
    }
    let mut targets = Map::new();
    let mut bytes = 0;
    for (keys, (name, path)) in &renamed.names {
        let target = follow(schema, keys);
        let target = target.ok_or_else(|| misread(path, &format!("#/{}", keys.join("/")), NOTHING_THERE))?;
        bytes += target.to_string().len();
        if bytes > SOURCE_BYTES_MAX {
            return Err(GrammarError::Size { found: bytes });
        }
        targets.insert(name.clone(), target.clone());
    }
    match schema.entry("$defs").or_insert_with(|| json!({})) {
        Value::Object(defs) => defs.extend(targets),
        _ => return Err(GrammarError::Source { reason: "`$defs`: expected an object".to_string() }),
    }
    Ok(())
}

/// A reference that leads back to itself, with no value in between that a text could begin with, and where the first one is.
fn circle(schema: &Map<String, Value>) -> Option<(Path, String)> {
    /// References that every value of a schema has to obey.
    fn obeyed<'a>(members: &'a Map<String, Value>, into: &mut Vec<&'a str>) {
        into.extend(members.get("$ref").and_then(Value::as_str));
        for (key, is_and) in [("allOf", true), ("anyOf", false), ("oneOf", false)] {
            match members.get(key) {
                Some(Value::Array(items)) if is_and || items.len() == 1 => {
                    items.iter().filter_map(Value::as_object).for_each(|item| obeyed(item, into));
                }
                _ => {}
            }
        }
    }
    fn all<'a>(value: &'a Value, place: Place, path: &Path, into: &mut BTreeMap<&'a str, Path>) {
        match value {
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(at, item)| all(item, place, &path.item(at), into))
            }
            Value::Object(members) => members.iter().for_each(|(key, value)| member(key, value, place, path, into)),
            _ => {}
        }
    }
    fn member<'a>(key: &str, value: &'a Value, place: Place, path: &Path, into: &mut BTreeMap<&'a str, Path>) {
        let path = path.key(key);
        match (place, key, value) {
            (Place::Schema, "$ref", Value::String(reference)) => {
                into.entry(reference).or_insert(path);
            }
            _ => place.of(key).into_iter().for_each(|place| all(value, place, &path, into)),
        }
    }
    let mut references = BTreeMap::new();
    schema.iter().for_each(|(key, value)| member(key, value, Place::Schema, &Path::default(), &mut references));
    let next = |reference: &str| {
        let mut obeys = vec![];
        let target =
            if reference == "#" { Some(schema) } else { located(schema, reference).and_then(Value::as_object) };
        target.into_iter().for_each(|target| obeyed(target, &mut obeys));
        obeys
    };
    // References that lead to no circle.
    let mut fine: BTreeSet<&str> = BTreeSet::new();
    for first in references.keys().copied().chain(["#"]) {
        let mut way = vec![(first, next(first))];
        while let Some((reference, left)) = way.last_mut() {
            let Some(then) = left.pop() else {
                fine.insert(*reference);
                way.pop();
                continue;
            };
            if way.iter().any(|(before, _)| *before == then) {
                let path = references.get(then).cloned().unwrap_or_default();
                return Some((path, then.to_string()));
            }
            if !fine.contains(then) {
                way.push((then, next(then)));
            }
        }
    }
    None
}
