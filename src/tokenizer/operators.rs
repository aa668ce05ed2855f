//! Owns the operators of Python in templates: arithmetic, comparisons and concatenation. `dialect` writes them as filters.

use std::cmp::Ordering;

use minijinja::value::{Rest, Tuple, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::collections::Group;
use super::python::{self, failed};

/// Most bytes of a text, and most items of a list, that an operator makes.
const LENGTH_MAX: usize = 64 << 20;

/// Adds the filters that `dialect` writes, and the tests that compare.
pub fn add_to(env: &mut Environment<'_>) {
    env.add_filter("add_", add);
    env.add_filter("mul_", multiply);
    env.add_filter("mod_", modulo);
    env.add_filter("sub_", |a: &Value, b: &Value| arithmetic("-", a, b));
    env.add_filter("div_", |a: &Value, b: &Value| arithmetic("/", a, b));
    env.add_filter("floor_", |a: &Value, b: &Value| arithmetic("//", a, b));
    env.add_filter("pow_", |a: &Value, b: &Value| arithmetic("**", a, b));
    env.add_filter("neg_", |a: &Value| arithmetic("-", &Value::from(0), a).map(|value| negative_zero(a, value)));
    env.add_filter("pos_", |a: &Value| arithmetic("+", &Value::from(0), a));
    env.add_filter("concat_", |a: &Value, b: &Value| Ok::<_, Error>(python::str_of(a)? + &python::str_of(b)?));
    env.add_filter("eq_", |a: &Value, b: &Value| equal(a, b));
    env.add_filter("ne_", |a: &Value, b: &Value| !equal(a, b));
    env.add_filter("in_", |a: &Value, b: &Value| contains(b, a));
    env.add_filter("not_in_", |a: &Value, b: &Value| contains(b, a).map(|contains| !contains));
    for names in [["eq", "equalto", "=="], ["ne", "ne", "!="]] {
        for name in names {
            let is = names[0] == "eq";
            env.add_test(name, move |a: &Value, b: &Value| equal(a, b) == is);
        }
    }
    env.add_filter("chain_", chain);
    env.add_test("in", |a: &Value, b: &Value| contains(b, a));
    let divides = |a: &Value, b: &Value| Ok::<_, Error>(equal(&arithmetic("%", a, b)?, &Value::from(0)));
    env.add_test("divisibleby", divides);
    env.add_test("even", move |a: &Value| divides(a, &Value::from(2)));
    env.add_test("odd", |a: &Value| Ok::<_, Error>(equal(&arithmetic("%", a, &Value::from(2))?, &Value::from(1))));
    for (filter, names, mark) in [
        ("lt_", ["lt", "lessthan", "<"], "<"),
        ("le_", ["le", "le", "<="], "<="),
        ("gt_", ["gt", "greaterthan", ">"], ">"),
        ("ge_", ["ge", "ge", ">="], ">="),
    ] {
        env.add_filter(filter, move |a: &Value, b: &Value| compare(mark, a, b));
        for name in names {
            env.add_test(name, move |a: &Value, b: &Value| compare(mark, a, b));
        }
    }
}

fn refused(mark: &str, a: &Value, b: &Value) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("`{mark}` of {} and {} is not supported", a.kind(), b.kind()))
}

/// A number of Python; `True` is 1.
#[derive(Clone, Copy)]
enum Number {
    Whole(i128),
    Float(f64),
}

impl Number {
    fn of(value: &Value) -> Option<Number> {
        match value.kind() {
            ValueKind::Bool => Some(Number::Whole(i128::from(value.is_true()))),
            ValueKind::Number if value.is_integer() => i128::try_from(value.clone()).ok().map(Number::Whole),
            ValueKind::Number => f64::try_from(value.clone()).ok().map(Number::Float),
            _ => None,
        }
    }

    fn float(self) -> f64 {
        match self {
            Number::Whole(number) => number as f64,
            Number::Float(number) => number,
        }
    }
}

fn whole(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

/// `-0.0` is not `0 - 0.0`.
fn negative_zero(of: &Value, value: Value) -> Value {
    match Number::of(of) {
        Some(Number::Float(number)) => Value::from(-number),
        _ => value,
    }
}

fn arithmetic(mark: &str, a: &Value, b: &Value) -> Result<Value, Error> {
    let (Some(left), Some(right)) = (Number::of(a), Number::of(b)) else { return Err(refused(mark, a, b)) };
    let beyond = || failed(format!("`{mark}`: the result has more than 128 bits"));
    if let (Number::Whole(left), Number::Whole(right)) = (left, right) {
        if right == 0 && ["/", "//", "%"].contains(&mark) {
            return Err(failed("division by zero"));
        }
        let result = match mark {
            "+" => left.checked_add(right),
            "-" => left.checked_sub(right),
            "*" => left.checked_mul(right),
            "//" => left.checked_div_euclid(right).map(|_| floor(left, right)),
            "%" => left.checked_rem_euclid(right).map(|_| left - floor(left, right) * right),
            "**" if right >= 0 => u32::try_from(right).ok().and_then(|right| left.checked_pow(right)),
            _ => return floats(mark, left as f64, right as f64),
        };
        return result.map(whole).ok_or_else(beyond);
    }
    floats(mark, left.float(), right.float())
}

fn floor(a: i128, b: i128) -> i128 {
    let quotient = a / b;
    quotient - i128::from(a % b != 0 && (a < 0) != (b < 0))
}

/// Python's arithmetic of floats (`Objects/floatobject.c`).
fn floats(mark: &str, a: f64, b: f64) -> Result<Value, Error> {
    if b == 0.0 && ["/", "//", "%"].contains(&mark) {
        return Err(failed("division by zero"));
    }
    let remainder = || {
        let remainder = a % b;
        if remainder != 0.0 && (remainder < 0.0) != (b < 0.0) { remainder + b } else { remainder }
    };
    Ok(Value::from(match mark {
        "+" => a + b,
        "-" => a - b,
        "*" => a * b,
        "/" => a / b,
        "%" => {
            let remainder = remainder();
            if remainder == 0.0 { 0f64.copysign(b) } else { remainder }
        }
        "//" => {
            let quotient = (a - remainder()) / b;
            let floored = quotient.floor();
            if quotient == 0.0 { 0f64.copysign(a / b) } else { floored + f64::from(u8::from(quotient - floored > 0.5)) }
        }
        _ if a == 0.0 && b < 0.0 => return Err(failed("zero cannot be raised to a negative power")),
        _ if a < 0.0 && b.fract() != 0.0 => return Err(failed("a negative number to a fraction is not supported")),
        _ => {
            let power = a.powf(b);
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                return Err(failed("the result is too large"));
            }
            power
        }
    }))
}

pub fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        return match (a.is_safe(), b.is_safe()) {
            (false, false) => Ok(Value::from([left, right].concat())),
            // Markup escapes what is added to it.
            _ => Ok(Value::from_safe_string([escaped(a), escaped(b)].concat())),
        };
    }
    if a.kind() != ValueKind::Seq || b.kind() != ValueKind::Seq || python::is_range(a) || python::is_range(b) {
        return arithmetic("+", a, b);
    }
    if is_tuple(a) != is_tuple(b) {
        return Err(failed("`+` of a list and a tuple is not supported"));
    }
    let items: Vec<Value> = a.try_iter()?.chain(b.try_iter()?).collect();
    if items.len() > LENGTH_MAX / 8 {
        return Err(failed("`+`: the list is too long"));
    }
    Ok(if is_tuple(a) { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

fn escaped(value: &Value) -> String {
    let text = value.as_str().unwrap_or_default();
    if value.is_safe() { text.to_string() } else { python::escaped(text) }
}

pub fn is_tuple(value: &Value) -> bool {
    value.downcast_object_ref::<Tuple>().is_some() || value.downcast_object_ref::<Group>().is_some()
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    let (repeated, count) = if Number::of(a).is_some() { (b, a) } else { (a, b) };
    let Some(Number::Whole(count)) = Number::of(count) else { return arithmetic("*", a, b) };
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    let too_long = |length: usize, limit: usize| match length.saturating_mul(count) > limit {
        true => Err(failed("`*`: the result is too long")),
        false => Ok(()),
    };
    if let Some(text) = repeated.as_str() {
        too_long(text.len(), LENGTH_MAX)?;
        let text = text.repeat(count);
        return Ok(if repeated.is_safe() { Value::from_safe_string(text) } else { Value::from(text) });
    }
    if repeated.kind() != ValueKind::Seq || python::is_range(repeated) {
        return arithmetic("*", a, b);
    }
    let items: Vec<Value> = repeated.try_iter()?.collect();
    too_long(items.len(), LENGTH_MAX / 8)?;
    let items: Vec<Value> = std::iter::repeat_n(items, count).flatten().collect();
    Ok(if is_tuple(repeated) { Value::from(Tuple::from(items)) } else { Value::from(items) })
}

fn modulo(a: &Value, b: &Value) -> Result<Value, Error> {
    if a.as_str().is_none() {
        return arithmetic("%", a, b);
    }
    if a.is_safe() {
        return Err(failed("`%` of an escaped text is not supported"));
    }
    python::percent(a, b).map(Value::from)
}

/// `a == b`.
pub fn equal(a: &Value, b: &Value) -> bool {
    match (Number::of(a), Number::of(b)) {
        (Some(Number::Whole(a)), Some(Number::Whole(b))) => return a == b,
        (Some(a), Some(b)) => return a.float() == b.float(),
        (None, None) => {}
        _ => return false,
    }
    match (a.kind(), b.kind()) {
        (ValueKind::String, ValueKind::String) => a.as_str() == b.as_str(),
        (ValueKind::None, ValueKind::None) | (ValueKind::Undefined, ValueKind::Undefined) => true,
        (ValueKind::Seq, ValueKind::Seq) => {
            let same_type = is_tuple(a) == is_tuple(b) && python::is_range(a) == python::is_range(b);
            let (Ok(left), Ok(right)) = (a.try_iter(), b.try_iter()) else { return false };
            same_type && a.len() == b.len() && left.zip(right).all(|(a, b)| equal(&a, &b))
        }
        (ValueKind::Map, ValueKind::Map) => {
            let Ok(mut keys) = a.try_iter() else { return false };
            a.len() == b.len()
                && keys.all(|key| {
                    let (left, right) = (a.get_item(&key), b.get_item(&key));
                    let has = || contains(b, &key).unwrap_or(false);
                    matches!((left, right), (Ok(left), Ok(right)) if equal(&left, &right) && has())
                })
        }
        _ => a == b,
    }
}

/// `item in values`.
fn contains(values: &Value, item: &Value) -> Result<bool, Error> {
    match values.kind() {
        ValueKind::Undefined => Ok(false),
        ValueKind::String => match item.as_str() {
            Some(item) => Ok(values.as_str().is_some_and(|text| text.contains(item))),
            None => {
                Err(failed(format!("`in`: expected a text before a text, found a value of the kind {}", item.kind())))
            }
        },
        ValueKind::Map if [ValueKind::Seq, ValueKind::Map].contains(&item.kind()) && !is_tuple(item) => {
            Err(failed("`in`: a list or a mapping is no key"))
        }
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable => {
            Ok(values.try_iter()?.any(|value| equal(&value, item)))
        }
        kind => Err(failed(format!("`in`: expected a text, a list or a mapping, found a value of the kind {kind}"))),
    }
}

/// The order of two values, if Python has one. Of NaN there is none, and no error.
pub fn order(a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    match (Number::of(a), Number::of(b)) {
        (Some(Number::Whole(a)), Some(Number::Whole(b))) => return Ok(Some(a.cmp(&b))),
        (Some(a), Some(b)) => return Ok(a.float().partial_cmp(&b.float())),
        _ => {}
    }
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    if a.kind() != ValueKind::Seq || b.kind() != ValueKind::Seq || is_tuple(a) != is_tuple(b) {
        return Err(refused("<", a, b));
    }
    for (a, b) in a.try_iter()?.zip(b.try_iter()?) {
        if !equal(&a, &b) {
            return order(&a, &b);
        }
    }
    Ok(Some(a.len().cmp(&b.len())))
}

/// `a < b == c`: the names of comparisons and their right sides. What follows a false one is not compared.
fn chain(first: &Value, rest: Rest<Value>) -> Result<bool, Error> {
    let mut left = first;
    for pair in rest.chunks(2) {
        let [name, right] = pair else { return Err(failed("a comparison has two sides")) };
        let holds = match name.as_str() {
            Some("eq_") => equal(left, right),
            Some("ne_") => !equal(left, right),
            Some("in_") => contains(right, left)?,
            Some("not_in_") => !contains(right, left)?,
            Some("lt_") => compare("<", left, right)?,
            Some("le_") => compare("<=", left, right)?,
            Some("gt_") => compare(">", left, right)?,
            _ => compare(">=", left, right)?,
        };
        if !holds {
            return Ok(false);
        }
        left = right;
    }
    Ok(true)
}

fn compare(mark: &str, a: &Value, b: &Value) -> Result<bool, Error> {
    let order = order(a, b).map_err(|_| refused(mark, a, b))?;
    Ok(order.is_some_and(|order| match mark {
        "<" => order.is_lt(),
        "<=" => order.is_le(),
        ">" => order.is_gt(),
        _ => order.is_ge(),
    }))
}
