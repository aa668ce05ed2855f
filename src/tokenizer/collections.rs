//! Owns Python's collections in templates: ranges, views of mappings, groups, and the filters of Jinja2 that order and list values.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, Value};

use super::operators;
use super::python::failed;

/// Most numbers of a range.
const RANGE_MAX: i64 = 100_000;

/// Adds the filters and the function `range`.
pub fn add_to(env: &mut Environment<'_>) {
    env.add_filter("iterate_", iterate);
    env.add_filter(
        "given_",
        |value: &Value| if value.is_undefined() { Value::from_object(Absent) } else { value.clone() },
    );
    env.add_filter("received_", |value: &Value| match value.downcast_object_ref::<Absent>() {
        Some(_) => Value::UNDEFINED,
        None => value.clone(),
    });
    env.add_filter("list", list);
    env.add_filter("first", |value: &Value| Ok::<_, Error>(items(value)?.first().cloned().unwrap_or_default()));
    env.add_filter("last", |value: &Value| Ok::<_, Error>(items(value)?.last().cloned().unwrap_or_default()));
    env.add_filter("reverse", reverse);
    env.add_filter("sort", sort);
    env.add_filter("dictsort", sort_pairs);
    env.add_filter("unique", unique);
    env.add_filter("groupby", group);
    env.add_filter("sum", sum);
    env.add_filter("min", |value: &Value, arguments: Rest<ValueOrKwargs>| extreme(value, arguments, false));
    env.add_filter("max", |value: &Value, arguments: Rest<ValueOrKwargs>| extreme(value, arguments, true));
    env.add_test("iterable", |value: &Value| items(value).is_ok());
    env.add_function("range", range);
}

/// What a macro is given for a parameter if the argument is not defined: it is no default then.
#[derive(Debug)]
struct Absent;

impl Object for Absent {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        false
    }

    fn render(self: &Arc<Self>, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ok(())
    }
}

/// `range(start, stop, step)`.
#[derive(Debug)]
pub struct Range {
    start: i64,
    stop: i64,
    step: i64,
}

impl Range {
    fn length(&self) -> i64 {
        let (distance, step) = if self.step > 0 {
            (self.stop.saturating_sub(self.start), self.step)
        } else {
            (self.start.saturating_sub(self.stop), self.step.saturating_neg())
        };
        if distance <= 0 { 0 } else { (distance - 1) / step + 1 }
    }

    fn at(&self, index: i64) -> Option<Value> {
        let index = if index < 0 { index.checked_add(self.length())? } else { index };
        (0..self.length()).contains(&index).then(|| Value::from(self.start + index * self.step))
    }

    /// The numbers at the indices from `start` to before `stop`.
    pub fn part(&self, start: i64, stop: i64, step: i64) -> Range {
        let at = |index: i64| self.start.saturating_add(index.saturating_mul(self.step));
        Range { start: at(start), stop: at(stop), step: self.step.saturating_mul(step) }
    }

    pub fn text(&self) -> String {
        let Range { start, stop, step } = self;
        if *step == 1 { format!("range({start}, {stop})") } else { format!("range({start}, {stop}, {step})") }
    }
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.at(i64::try_from(key.clone()).ok()?)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(usize::try_from(self.length()).unwrap_or(0))
    }
}

fn range(first: i64, stop: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (start, stop) = stop.map_or((0, first), |stop| (first, stop));
    let range = Range { start, stop, step: step.unwrap_or(1) };
    if range.step == 0 {
        return Err(failed("`range`: the step must not be zero"));
    }
    if range.length() > RANGE_MAX {
        return Err(failed(format!("`range`: expected at most {RANGE_MAX} numbers, found {}", range.length())));
    }
    Ok(Value::from_object(range))
}

/// What `items`, `keys` and `values` of a mapping give.
#[derive(Debug)]
pub struct View {
    pub name: &'static str,
    pub items: Vec<Value>,
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }
}

/// A group of `groupby`: a tuple with names.
#[derive(Debug)]
pub struct Group {
    grouper: Value,
    list: Value,
}

impl Object for Group {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match (i64::try_from(key.clone()).ok(), key.as_str()) {
            (Some(0 | -2), _) | (_, Some("grouper")) => Some(self.grouper.clone()),
            (Some(1 | -1), _) | (_, Some("list")) => Some(self.list.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}

/// The items of a value, as `list(value)` has them.
pub fn items(value: &Value) -> Result<Vec<Value>, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(vec![]),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().chars().map(Value::from).collect()),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => Ok(value.try_iter()?.collect()),
        kind => Err(failed(format!("expected items, found a value of the kind {kind}"))),
    }
}

/// What a loop goes through: minijinja does not know the length of texts, so `loop.last` would be false.
fn iterate(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => Ok(value.clone()),
        _ => list(value),
    }
}

fn list(value: &Value) -> Result<Value, Error> {
    items(value).map(Value::from)
}

fn reverse(value: &Value) -> Result<Value, Error> {
    let mut items = items(value)?;
    items.reverse();
    Ok(match value.as_str() {
        Some(text) if value.is_safe() => Value::from_safe_string(text.chars().rev().collect()),
        Some(text) => Value::from(text.chars().rev().collect::<String>()),
        None => Value::from(items),
    })
}

/// Arguments of a filter, by place or by name.
fn named<const N: usize>(arguments: Rest<ValueOrKwargs>, names: [&str; N]) -> Result<[Option<Value>; N], Error> {
    let arguments = arguments.into_values();
    let (values, named): (&[Value], Kwargs) = from_args(&arguments)?;
    if values.len() > N {
        return Err(failed(format!("expected at most {N} arguments, found {}", values.len())));
    }
    let mut out = std::array::from_fn(|at| values.get(at).cloned());
    for (name, slot) in names.iter().zip(&mut out) {
        if slot.is_none() && named.has(name) {
            *slot = Some(named.get::<Value>(name)?);
        }
    }
    named.assert_all_used()?;
    Ok(out)
}

fn is_set(flag: &Option<Value>) -> bool {
    flag.as_ref().is_some_and(Value::is_true)
}

/// The attribute of an item: names and indices with dots between them.
fn attribute(item: &Value, path: &Value, default: Option<&Value>) -> Result<Value, Error> {
    let Some(path) = path.as_str() else { return item.get_item(path) };
    path.split('.').try_fold(item.clone(), |item, key| {
        let part = match key.parse::<i64>() {
            Ok(index) => item.get_item(&Value::from(index)),
            Err(_) => item.get_item(&Value::from(key)),
        }?;
        Ok(match default {
            Some(default) if part.is_undefined() && !default.is_none() => default.clone(),
            _ => part,
        })
    })
}

/// The key that an item is compared by: its attribute, or itself. Without `case_sensitive` texts are in lower case.
fn key(item: &Value, path: Option<&Value>, default: Option<&Value>, case_sensitive: bool) -> Result<Value, Error> {
    let key = match path.filter(|path| !path.is_none()) {
        Some(path) => attribute(item, path, default)?,
        None => item.clone(),
    };
    Ok(match key.as_str() {
        Some(text) if !case_sensitive => Value::from(text.to_lowercase()),
        _ => key,
    })
}

fn is_before(a: &Value, b: &Value) -> Result<bool, Error> {
    Ok(operators::order(a, b)?.ok_or_else(|| failed("NaN has no order"))?.is_lt())
}

/// Items by their keys; those of equal keys stay in their order.
fn sorted(mut items: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<(Value, Value)>, Error> {
    if items.len() < 2 {
        return Ok(items);
    }
    let right = items.split_off(items.len() / 2);
    let mut out = Vec::with_capacity(items.len() + right.len());
    let mut left = sorted(items, reverse)?.into_iter().peekable();
    let mut right = sorted(right, reverse)?.into_iter().peekable();
    while let (Some((a, _)), Some((b, _))) = (left.peek(), right.peek()) {
        let right_first = if reverse { is_before(a, b)? } else { is_before(b, a)? };
        out.extend(if right_first { right.next() } else { left.next() });
    }
    out.extend(left);
    out.extend(right);
    Ok(out)
}

fn sort(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [reverse, case_sensitive, path] = named(arguments, ["reverse", "case_sensitive", "attribute"])?;
    // As in Jinja2, the keys are lists: equal ones need no order.
    let paths: Vec<Option<Value>> = match path.as_ref().and_then(Value::as_str) {
        Some(paths) => paths.split(',').map(|path| Some(Value::from(path))).collect(),
        None => vec![path],
    };
    let keyed = items(value)?.into_iter().map(|item| {
        let keys = paths.iter().map(|path| key(&item, path.as_ref(), None, is_set(&case_sensitive)));
        Ok((Value::from(keys.collect::<Result<Vec<Value>, Error>>()?), item))
    });
    let keyed = keyed.collect::<Result<Vec<_>, Error>>()?;
    Ok(sorted(keyed, is_set(&reverse))?.into_iter().map(|(_, item)| item).collect())
}

fn sort_pairs(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [case_sensitive, by, reverse] = named(arguments, ["case_sensitive", "by", "reverse"])?;
    let at = match by.as_ref().map(|by| by.as_str()) {
        None | Some(Some("key")) => 0,
        Some(Some("value")) => 1,
        _ => return Err(failed("`dictsort`: expected `key` or `value` as `by`")),
    };
    if value.kind() != ValueKind::Map {
        return Err(failed(format!("`dictsort`: expected a mapping, found a value of the kind {}", value.kind())));
    }
    let keyed = items(value)?.into_iter().map(|name| {
        let pair = [name.clone(), value.get_item(&name)?];
        let key = key(&pair[at], None, None, is_set(&case_sensitive))?;
        Ok((key, Value::from(Tuple::from(pair))))
    });
    let keyed = keyed.collect::<Result<Vec<_>, Error>>()?;
    Ok(sorted(keyed, is_set(&reverse))?.into_iter().map(|(_, pair)| pair).collect())
}

fn unique(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [case_sensitive, path] = named(arguments, ["case_sensitive", "attribute"])?;
    let mut texts = BTreeSet::new();
    let mut others: Vec<Value> = vec![];
    let mut out: Vec<Value> = vec![];
    for item in items(value)? {
        let key = key(&item, path.as_ref(), None, is_set(&case_sensitive))?;
        let is_new = match (key.as_str(), key.kind()) {
            (Some(text), _) => texts.insert(text.to_string()),
            (None, ValueKind::Map | ValueKind::Seq) if !operators::is_tuple(&key) => {
                return Err(failed(format!("`unique`: a value of the kind {} cannot be hashed", key.kind())));
            }
            _ => !others.iter().any(|other| operators::equal(other, &key)),
        };
        if is_new {
            others.extend(key.as_str().is_none().then_some(key));
            out.push(item);
        }
    }
    Ok(Value::from(out))
}

fn group(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [path, default, case_sensitive] = named(arguments, ["attribute", "default", "case_sensitive"])?;
    let path = path.ok_or_else(|| failed("`groupby`: expected an attribute"))?;
    let keyed = items(value)?
        .into_iter()
        .map(|item| Ok((key(&item, Some(&path), default.as_ref(), is_set(&case_sensitive))?, item)));
    let keyed = sorted(keyed.collect::<Result<Vec<_>, Error>>()?, false)?;
    let mut groups: Vec<(Value, Vec<Value>)> = vec![];
    for (key, item) in keyed {
        match groups.last_mut() {
            Some((last, list)) if operators::equal(last, &key) => list.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let groups = groups.into_iter().map(|(_, list)| {
        // The name of a group is that of its first item.
        let grouper = key(&list[0], Some(&path), default.as_ref(), true)?;
        Ok(Value::from_object(Group { grouper, list: Value::from(list) }))
    });
    groups.collect::<Result<Vec<Value>, Error>>().map(Value::from)
}

fn sum(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [path, start] = named(arguments, ["attribute", "start"])?;
    let start = start.unwrap_or(Value::from(0));
    if start.as_str().is_some() {
        return Err(failed("`sum` of texts is not supported: use `join`"));
    }
    items(value)?.iter().try_fold(start, |sum, item| {
        let item = match path.as_ref().filter(|path| !path.is_none()) {
            Some(path) => attribute(item, path, None)?,
            None => item.clone(),
        };
        operators::add(&sum, &item)
    })
}

fn extreme(value: &Value, arguments: Rest<ValueOrKwargs>, largest: bool) -> Result<Value, Error> {
    let [case_sensitive, path] = named(arguments, ["case_sensitive", "attribute"])?;
    let mut best: Option<(Value, Value)> = None;
    for item in items(value)? {
        let key = key(&item, path.as_ref(), None, is_set(&case_sensitive))?;
        let is_better = match &best {
            None => true,
            Some((than, _)) if largest => is_before(than, &key)?,
            Some((than, _)) => is_before(&key, than)?,
        };
        if is_better {
            best = Some((key, item));
        }
    }
    Ok(best.map_or(Value::UNDEFINED, |(_, item)| item))
}
