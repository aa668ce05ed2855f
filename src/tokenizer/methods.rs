//! Owns methods of Python as values: `d.items` without a call, in templates.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::{operators, python};

const OF_TEXTS: &str = "capitalize casefold center count encode endswith expandtabs find format format_map index isalnum isalpha \
    isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip maketrans \
    partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase \
    title translate upper zfill";
const OF_LISTS: &str = "copy count index";
const OF_TUPLES: &str = "count index";
const OF_MAPPINGS: &str = "copy fromkeys get items keys values";
/// Methods that change a list or a mapping: the sandbox of transformers has a value that is not defined in their place.
const CHANGING_LISTS: &str = "append clear extend insert pop remove reverse sort";
const CHANGING_MAPPINGS: &str = "clear pop popitem setdefault update";

fn has(names: &str, name: &str) -> bool {
    names.split_ascii_whitespace().any(|one| one == name)
}

/// Whether a text, a list or a mapping has a method of this name.
pub fn is_name(name: &str) -> bool {
    [OF_TEXTS, OF_LISTS, OF_MAPPINGS, CHANGING_LISTS, CHANGING_MAPPINGS].iter().any(|names| has(names, name))
}

/// `value.name`: the method, else the item.
pub fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    match of(value, name) {
        Some(method) => Ok(method),
        None => value.get_attr(name),
    }
}

/// `value[key]`: the item, else the method of this name.
pub fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    if value.kind() == ValueKind::Iterable {
        return Ok(Value::UNDEFINED);
    }
    let item = value.get_item(key)?;
    Ok(match key.as_str() {
        _ if value.is_safe() && item.as_str().is_some() => python::safe(&item)?,
        Some(name) if item.is_undefined() => of(value, name).unwrap_or(item),
        _ => item,
    })
}

/// The filter `attr`: an attribute, which an item of a mapping is not.
pub fn own_attribute(value: &Value, name: &str) -> Result<Value, Error> {
    match of(value, name) {
        Some(method) => Ok(method),
        None if value.kind() == ValueKind::Map => Ok(Value::UNDEFINED),
        None => value.get_attr(name),
    }
}

/// The method of a value, if it has one of this name.
fn of(value: &Value, name: &str) -> Option<Value> {
    let (names, changing) = match value.kind() {
        ValueKind::String => (OF_TEXTS, ""),
        ValueKind::Seq if operators::is_tuple(value) || python::is_range(value) => (OF_TUPLES, ""),
        ValueKind::Seq => (OF_LISTS, CHANGING_LISTS),
        ValueKind::Map => (OF_MAPPINGS, CHANGING_MAPPINGS),
        _ => return None,
    };
    if has(changing, name) {
        return Some(Value::UNDEFINED);
    }
    has(names, name).then(|| Value::from_object(Method { value: value.clone(), name: name.to_string() }))
}

/// A method that was not called.
#[derive(Debug)]
pub struct Method {
    value: Value,
    name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        python::method(state, &self.value, &self.name, arguments)
    }

    /// Python prints an address, which no template can want.
    fn render(self: &Arc<Self>, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Err(fmt::Error)
    }
}

/// Refuses to print a method.
pub fn refuse(value: &Value) -> Result<(), Error> {
    match value.downcast_object_ref::<Method>() {
        Some(Method { name, .. }) => Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("the method `{name}` is printed, and not called; an item of this name is `['{name}']`"),
        )),
        None => Ok(()),
    }
}
