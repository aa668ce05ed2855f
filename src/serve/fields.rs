//! Owns the body of a request as named fields. Each is taken once; fields that are left over are refused by name.
//!
//! Values are parsed directly from the bytes of the body into their types, so a hostile body takes at most a small multiple
//! of its size in memory.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::value::MapDeserializer;
use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::error::ApiError;

/// The fields of a JSON object that were not taken yet.
#[derive(Debug)]
pub struct Fields<'a> {
    left: Vec<(String, &'a RawValue)>,
}

impl<'a> Fields<'a> {
    /// # Errors
    /// A body that is no JSON object, or names a field twice.
    pub fn of(body: &'a [u8]) -> Result<Fields<'a>, ApiError> {
        let mut fields: Fields<'a> = serde_json::from_slice(body)
            .map_err(|error| ApiError::bad(in_words(format!("the body is no JSON object: {error}"))))?;
        fields.left.sort_by(|a, b| a.0.cmp(&b.0));
        match fields.left.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(twice) => Err(ApiError::field(&*twice[0].0, "is there twice")),
            None => {
                fields.left.retain(|(_, value)| value.get() != "null");
                Ok(fields)
            }
        }
    }

    /// The value of a field; `None` if it is absent or null.
    ///
    /// # Errors
    /// A value of another type, or a long one.
    pub fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        self.read(name, FIELD_BYTES_MAX)
    }

    /// The value of a field that may be as long as a body. Its type has to bound the memory that it takes.
    ///
    /// # Errors
    /// A value of another type.
    pub fn take_long<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        self.read(name, usize::MAX)
    }

    /// The value of a required field, which may be as long as a body.
    ///
    /// # Errors
    /// A missing field, or a value of another type.
    pub fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, ApiError> {
        self.take_long(name)?.ok_or_else(|| ApiError::field(name, "is missing"))
    }

    fn read<T: DeserializeOwned>(&mut self, name: &str, bytes_max: usize) -> Result<Option<T>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        let found = value.get().len();
        if found > bytes_max {
            return Err(ApiError::field(name, format!("expected at most {bytes_max} bytes, found {found}")));
        }
        let read = serde_json::from_str::<Option<T>>(value.get());
        read.map_err(|error| {
            let message = plain(&error);
            // An item of the field has a name, too.
            match message.strip_prefix(ITEM).and_then(|rest| rest.split_once(": ")) {
                Some((at, message)) => ApiError::field(format!("{name}[{at}]"), message),
                None => ApiError::field(name, message),
            }
        })
    }

    /// Takes a field that the server accepts only with values that change nothing.
    ///
    /// # Errors
    /// Any other value: the server does not support it.
    pub fn neutral(&mut self, name: &str, neutral: &[&str]) -> Result<(), ApiError> {
        match self.raw(name) {
            Some(value) if !neutral.contains(&value.get()) => Err(unsupported(name)),
            _ => Ok(()),
        }
    }

    fn raw(&mut self, name: &str) -> Option<&'a RawValue> {
        let at = self.left.iter().position(|(key, _)| key == name)?;
        Some(self.left.swap_remove(at).1)
    }

    /// # Errors
    /// A field that was not taken.
    pub fn finish(mut self) -> Result<(), ApiError> {
        self.left.sort_by(|a, b| a.0.cmp(&b.0));
        match self.left.first() {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(80).collect();
                Err(ApiError::field(&*name, "this server knows no such field").with_code("unknown_parameter"))
            }
        }
    }
}

/// The error for a field that the API has and this server does not support.
pub fn unsupported(name: &str) -> ApiError {
    ApiError::field(name, "this server does not support it").with_code("unsupported_parameter")
}

/// The text of an error, without line and column.
fn plain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    in_words(text.split(" at line ").next().unwrap_or_default().to_string())
}

/// A message with plain words instead of the names of Rust's types.
fn in_words(mut text: String) -> String {
    for (rust, words) in [
        ("expected u32", "expected a whole number from 0 to 4294967295"),
        ("expected i64", "expected a whole number of at most 64 bits"),
        ("expected f32", "expected a number"),
        ("expected a sequence", "expected a list"),
        ("expected a map", "expected an object"),
        ("invalid type: sequence", "invalid type: list"),
        ("invalid type: map", "invalid type: object"),
    ] {
        text = text.replace(rust, words);
    }
    // `struct Name`, `tuple struct Name`, `enum Name`: clients know no such names.
    for kind in ["expected tuple struct ", "expected struct ", "expected enum "] {
        while let Some(at) = text.find(kind) {
            let name = text[at + kind.len()..].find(|c: char| !c.is_alphanumeric() && c != '_');
            let end = name.map_or(text.len(), |name| at + kind.len() + name);
            text.replace_range(at..end, "expected an object");
        }
    }
    text
}

/// The first whole number of a JSON text that has more than 64 bits: as a value it would be rounded.
pub fn beyond_64_bits(json: &str) -> Option<&str> {
    let mut rest = json;
    while let Some(at) = rest.find(|c: char| c == '"' || c == '-' || c.is_ascii_digit()) {
        rest = &rest[at..];
        if let Some(text) = rest.strip_prefix('"') {
            let mut escaped = false;
            let end = text.find(|c: char| {
                let ends = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                ends
            });
            rest = end.map_or("", |end| &text[end + 1..]);
            continue;
        }
        let end = rest.find(|c: char| !c.is_ascii_digit() && !"+-.eE".contains(c)).unwrap_or(rest.len());
        let number = &rest[..end];
        let whole = !number.contains(['.', 'e', 'E']);
        if whole && number.parse::<i64>().is_err() && number.parse::<u64>().is_err() {
            return Some(number);
        }
        rest = &rest[end..];
    }
    None
}

/// An object whose members that are null count as left out: clients send whole objects back, with a null for each field that is not set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent<T>(pub T);

impl<T: DeserializeOwned> Sent<T> {
    /// # Errors
    /// The error of `T`; more members than any object of the API has.
    pub fn of_map<'de, A: MapAccess<'de>>(map: A) -> Result<Sent<T>, A::Error> {
        let members = members(map)?.into_iter().filter(|(_, value)| value.get() != "null");
        let members: MapDeserializer<'_, _, serde_json::Error> = MapDeserializer::new(members);
        T::deserialize(members).map(Sent).map_err(|error| A::Error::custom(plain(&error)))
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Sent<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Sent<T>, D::Error> {
        struct Named<T>(PhantomData<T>);
        impl<'de, T: DeserializeOwned> Visitor<'de> for Named<T> {
            type Value = Sent<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Sent<T>, A::Error> {
                Sent::of_map(map)
            }
        }
        deserializer.deserialize_map(Named(PhantomData))
    }
}

/// The members of an object, in order.
fn members<'de, A: MapAccess<'de>>(mut map: A) -> Result<Vec<(String, &'de RawValue)>, A::Error> {
    let mut members = vec![];
    while let Some(member) = map.next_entry::<String, &'de RawValue>()? {
        members.push(member);
        if members.len() > FIELDS_MAX {
            return Err(A::Error::custom("more fields than any request has"));
        }
    }
    Ok(members)
}

/// A list of at most `MOST` values. A longer one is refused before the rest of it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Few<T, const MOST: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Deserialize<'de> for Few<T, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Few<T, MOST>, D::Error> {
        struct Listed<T, const MOST: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Listed<T, MOST> {
            type Value = Few<T, MOST>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                few(list, MOST).map(Few)
            }
        }
        deserializer.deserialize_seq(Listed(PhantomData))
    }
}

/// The beginning of an error of an item, before its index.
const ITEM: &str = "item ";

/// The values of a list, of which there are at most `most`.
///
/// # Errors
/// A longer list, or the error of a value, with the index of that value.
pub fn few<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(mut list: A, most: usize) -> Result<Vec<T>, A::Error> {
    let mut values = vec![];
    loop {
        let value = list.next_element().map_err(|error| {
            let text = error.to_string();
            let text = text.split(" at line ").next().unwrap_or_default();
            serde::de::Error::custom(format!("{ITEM}{}: {text}", values.len()))
        })?;
        let Some(value) = value else { break };
        if values.len() == most {
            return Err(serde::de::Error::custom(format!("expected at most {most}, found more")));
        }
        values.push(value);
    }
    Ok(values)
}

impl<'de: 'a, 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Fields<'a>, D::Error> {
        struct Named;
        impl<'de> Visitor<'de> for Named {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                members(map)
            }
        }
        Ok(Fields { left: deserializer.deserialize_map(Named)? })
    }
}

/// Largest number of fields; the API has fewer.
const FIELDS_MAX: usize = 200;
/// Bytes of a field that is neither a prompt nor messages. Some values take 30 times their bytes of JSON.
const FIELD_BYTES_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_taken_once_and_the_rest_is_refused_by_name() {
        let mut fields = Fields::of(br#"{"a": 1, "b": null, "c": "text", "d": {"e": [1, 2]}, "f": false}"#).unwrap();
        assert_eq!(fields.take::<u32>("a"), Ok(Some(1)));
        assert_eq!((fields.take::<u32>("a"), fields.take::<u32>("b")), (Ok(None), Ok(None)));
        let wrong = fields.take::<u32>("c").unwrap_err();
        assert_eq!(wrong.message, "`c`: invalid type: string \"text\", expected a whole number from 0 to 4294967295");
        assert_eq!(wrong.param.as_deref(), Some("c"));
        assert_eq!(fields.neutral("f", &["false"]), Ok(()));
        let left = fields.finish().unwrap_err();
        assert_eq!(
            (left.message.as_str(), left.code),
            ("`d`: this server knows no such field", Some("unknown_parameter"))
        );
    }

    #[test]
    fn a_list_is_read_no_further_than_it_may_be_long() {
        let mut fields = Fields::of(br#"{"a": [1, 2], "b": [1, 2, 3, "not read"], "c": {}}"#).unwrap();
        assert_eq!(fields.need::<Few<u32, 2>>("a"), Ok(Few(vec![1, 2])));
        for (name, expected) in
            [("b", "`b`: expected at most 2, found more"), ("c", "`c`: invalid type: object, expected a list")]
        {
            assert_eq!(fields.need::<Few<u32, 2>>(name).unwrap_err().message, expected);
        }
        let long = format!("{{\"a\": [{}1]}}", "1,".repeat(FIELD_BYTES_MAX / 2));
        let refused = Fields::of(long.as_bytes()).unwrap().take::<Vec<u32>>("a").unwrap_err();
        assert_eq!(refused.message, "`a`: expected at most 1048576 bytes, found 1048579");
    }

    #[test]
    fn members_that_are_null_count_as_left_out() {
        #[derive(Debug, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Inner {
            a: u32,
            b: Option<Sent<Empty>>,
        }
        #[derive(Debug, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Empty {}
        let read = |json: &str| Fields::of(format!("{{\"x\": {json}}}").as_bytes()).unwrap().need::<Sent<Inner>>("x");
        let sent = r#"{"a": 1, "unknown": null, "b": {"unknown": null}}"#;
        assert_eq!(read(sent), Ok(Sent(Inner { a: 1, b: Some(Sent(Empty {})) })));
        for (json, expected) in [
            (r#"{"a": null}"#, "`x`: missing field `a`"),
            (r#"{"a": 1, "c": 2}"#, "`x`: unknown field `c`, expected `a` or `b`"),
            ("5", "`x`: invalid type: integer `5`, expected an object"),
            (r#"{"a": []}"#, "`x`: invalid type: list, expected a whole number from 0 to 4294967295"),
        ] {
            assert_eq!(read(json).unwrap_err().message, expected, "{json}");
        }
        assert_eq!(Fields::of(br#"{"unknown": null}"#).unwrap().finish(), Ok(()));
    }

    #[test]
    fn whole_numbers_of_more_than_64_bits_are_found() {
        let json =
            r#"{"a": "1234567890123456789012345", "b\"": [1, -9223372036854775808, 18446744073709551615, 1e40, 0.5]"#;
        assert_eq!(beyond_64_bits(json), None);
        for number in ["18446744073709551616", "-9223372036854775809"] {
            assert_eq!(beyond_64_bits(&format!("{json}, \"c\": {number}}}")), Some(number));
        }
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for (body, expected) in [
            ("", "the body is no JSON object: EOF while parsing a value at line 1 column 0"),
            ("[1]", "the body is no JSON object: invalid type: list, expected an object at line 1 column 0"),
            (r#"{"a": 1, "a": 2}"#, "`a`: is there twice"),
            (r#"{"a": 1"#, "the body is no JSON object: EOF while parsing an object at line 1 column 7"),
        ] {
            assert_eq!(Fields::of(body.as_bytes()).unwrap_err().message, expected);
        }
        assert!(Fields::of(b"{\"a\": \"\xff\"}").is_err());
        let deep = format!("{{\"a\": {}", "[".repeat(1 << 20));
        assert!(Fields::of(deep.as_bytes()).is_err());
        let many: Vec<String> = (0..300).map(|i| format!("\"{i}\": 0")).collect();
        let refused = Fields::of(format!("{{{}}}", many.join(",")).as_bytes()).unwrap_err();
        assert!(refused.message.contains("more fields than any request has"), "{}", refused.message);
    }

    #[test]
    fn a_value_that_asks_for_something_else_is_refused_by_name() {
        let mut fields = Fields::of(br#"{"best_of": 2}"#).unwrap();
        let refused = fields.neutral("best_of", &["1"]).unwrap_err();
        assert_eq!((refused.param.as_deref(), refused.code), (Some("best_of"), Some("unsupported_parameter")));
    }
}
