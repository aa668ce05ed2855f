//! Owns Python's side of templates: how values print, `json.dumps`, and the methods of texts and lists, as Jinja2 has them in transformers.

use std::fmt::Write as _;
use std::sync::LazyLock;

use fancy_regex::Regex;
use minijinja::formatting::{self, FormatStyle};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, Output, State, Value, escape_formatter, filters};
use minijinja_contrib::pycompat;

use super::collections::{Range, View, items};
use super::{letters, methods, operators};

/// Deepest nesting that prints: each level takes stack.
const DEPTH_MAX: usize = 500;
/// Longest text that a method pads to.
const WIDTH_MAX: usize = 1 << 20;

pub fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Prints an expression, as `str` has it.
pub fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Plain => {
            out.write_str(&str_of(value)?).map_err(|_| Error::from(ErrorKind::WriteFailure))
        }
        _ => escape_formatter(out, state, value),
    }
}

/// `str(value)`.
pub fn str_of(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_string()),
        None if value.is_undefined() => Ok(String::new()),
        None => {
            let mut out = String::new();
            repr(value, &mut out, 0)?;
            Ok(out)
        }
    }
}

/// `repr(value)`.
fn repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(failed(format!("a value of more than {DEPTH_MAX} levels cannot be printed")));
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number if !value.is_integer() => out.push_str(&float(number(value)?)),
        ValueKind::Seq if is_range(value) => {
            out.extend(value.downcast_object_ref::<Range>().map(Range::text));
        }
        ValueKind::Iterable => {
            let View { name, items } = value
                .downcast_object_ref::<View>()
                .ok_or_else(|| failed("an iterator is printed; the filter `list` makes a list of it"))?;
            out.push_str(&format!("{name}("));
            repr(&Value::from(items.clone()), out, depth + 1)?;
            out.push(')');
        }
        ValueKind::Seq => {
            let is_tuple = operators::is_tuple(value);
            out.push(if is_tuple { '(' } else { '[' });
            let mut count = 0;
            for item in value.try_iter()? {
                if count > 0 {
                    out.push_str(", ");
                }
                repr(&item, out, depth + 1)?;
                count += 1;
            }
            out.push_str(match (is_tuple, count) {
                (true, 1) => ",)",
                (true, _) => ")",
                (false, _) => "]",
            });
        }
        ValueKind::Map if is_macro(value) => {
            let _ = write!(out, "<Macro '{}'>", value.get_attr("name")?);
        }
        ValueKind::Map => {
            out.push('{');
            for (at, (key, value)) in pairs(value)?.into_iter().enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                repr(&key, out, depth + 1)?;
                out.push_str(": ");
                repr(&value, out, depth + 1)?;
            }
            out.push('}');
        }
        ValueKind::String => match value.as_str() {
            Some(text) if value.is_safe() => {
                out.push_str("Markup(");
                quoted(text, out);
                out.push(')');
            }
            Some(text) => quoted(text, out),
            None => return Err(failed("expected a text of characters")),
        },
        _ => {
            methods::refuse(value)?;
            let _ = write!(out, "{value:?}");
        }
    }
    Ok(())
}

/// Whether a value is a `range`.
pub fn is_range(value: &Value) -> bool {
    value.downcast_object_ref::<Range>().is_some()
}

/// `repr` of a text: characters that do not print are escaped.
fn quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        let _ = match c {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote => write!(out, "\\{c}"),
            ' '..='~' => write!(out, "{c}"),
            c if prints(c) => write!(out, "{c}"),
            c => match u32::from(c) {
                code @ ..=0xff => write!(out, "\\x{code:02x}"),
                code @ ..=0xffff => write!(out, "\\u{code:04x}"),
                code => write!(out, "\\U{code:08x}"),
            },
        };
    }
    out.push(quote);
}

/// As `str.isprintable` has it: no other character, and no separator but the blank.
pub fn prints(c: char) -> bool {
    static OTHERS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}]").ok());
    !OTHERS.as_ref().is_some_and(|others| others.is_match(c.encode_utf8(&mut [0; 4])).unwrap_or(false))
}

fn number(value: &Value) -> Result<f64, Error> {
    f64::try_from(value.clone())
}

fn pairs(value: &Value) -> Result<Vec<(Value, Value)>, Error> {
    let object = value.as_object().ok_or_else(|| failed("expected a mapping"))?;
    Ok(object.try_iter_pairs().into_iter().flatten().collect())
}

/// `repr` of a float: the shortest digits that give it, with an exponent below 1e-4 and from 1e16 on.
pub fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_string();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf" } else { "-inf" }.to_string();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = value.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The filter `string`.
pub fn text(value: &Value) -> Result<Value, Error> {
    Ok(if value.as_str().is_some() { value.clone() } else { Value::from(str_of(value)?) })
}

/// The filter `join`.
pub fn join(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let arguments = arguments.into_values();
    let (separator, attribute, named): (Option<String>, Option<Value>, Kwargs) = from_args(&arguments)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => named.get("d")?,
    };
    let attribute: Option<Value> = match attribute {
        Some(attribute) => Some(attribute),
        None => named.get("attribute")?,
    };
    named.assert_all_used()?;
    let separator = separator.unwrap_or_default();
    let mut out = String::new();
    for (at, item) in items(value)?.into_iter().enumerate() {
        if at > 0 {
            out.push_str(&separator);
        }
        let item = match &attribute {
            None => item,
            // `a.b.0`: attributes and indices, one after another.
            Some(path) => str_of(path)?.split('.').try_fold(item, |item, key| match key.parse::<i64>() {
                Ok(index) => item.get_item(&Value::from(index)),
                Err(_) => item.get_attr(key),
            })?,
        };
        out.push_str(&str_of(&item)?);
    }
    Ok(out)
}

/// `text % values`: a tuple has a value for each conversion, and any other value is the only one.
pub fn percent(text: &Value, values: &Value) -> Result<String, Error> {
    let format = text.as_str().ok_or_else(|| failed("expected a text before `%`"))?;
    let values: Vec<Value> = match values.downcast_object_ref::<Tuple>() {
        Some(_) => values.try_iter()?.collect(),
        None => vec![values.clone()],
    };
    let conversions = format.replace("%%", "").matches('%').count();
    if values.len() > conversions && !matches!(&values[..], [only] if only.kind() == ValueKind::Map) {
        return Err(failed(format!("`%`: expected {conversions} values, found {}", values.len())));
    }
    // Python prints floats and lists in its own way; with `%s` alone they may be texts.
    let only_texts = conversions == format.replace("%%", "").matches("%s").count();
    let values = match only_texts {
        true => values.iter().map(|value| str_of(value).map(Value::from)).collect::<Result<Vec<_>, _>>()?,
        false => values,
    };
    formatting::format(FormatStyle::Printf, format, &values)
}

/// The filter `default`: for what is not defined, and with `boolean` for everything that is not true.
pub fn or_default(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let arguments = arguments.into_values();
    let (default, boolean, named): (Option<Value>, Option<bool>, Kwargs) = from_args(&arguments)?;
    let default = match default {
        Some(default) => default,
        None => named.get::<Option<Value>>("default_value")?.unwrap_or_else(|| Value::from("")),
    };
    let boolean = match boolean {
        Some(boolean) => boolean,
        None => named.get::<Option<bool>>("boolean")?.unwrap_or(false),
    };
    named.assert_all_used()?;
    let absent = value.is_undefined() || (boolean && !value.is_true());
    Ok(if absent { default } else { value.clone() })
}

/// The filter `escape`, with the entities of markupsafe. Text that was escaped stays.
pub fn escape(value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    Ok(Value::from_safe_string(escaped(&str_of(value)?)))
}

/// A text with the entities of markupsafe.
pub fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&#34;").replace('\'', "&#39;")
}

/// The filter `forceescape`: escapes what was escaped, too.
pub fn escape_again(value: &Value) -> Result<Value, Error> {
    Ok(Value::from_safe_string(escaped(&str_of(value)?)))
}

/// The filter `safe`.
pub fn safe(value: &Value) -> Result<Value, Error> {
    Ok(Value::from_safe_string(str_of(value)?))
}

/// A filter of texts, which leaves escaped text escaped.
pub fn of_text(value: &Value, change: impl Fn(&str) -> String) -> Result<Value, Error> {
    let text = change(&str_of(value)?);
    Ok(if value.is_safe() { Value::from_safe_string(text) } else { Value::from(text) })
}

/// The filter `round`.
pub fn round(value: &Value, precision: Option<i32>, method: Option<String>, arguments: Kwargs) -> Result<Value, Error> {
    let precision = precision.or(arguments.get("precision")?).unwrap_or(0);
    let method = method.or(arguments.get("method")?).unwrap_or_else(|| "common".to_string());
    arguments.assert_all_used()?;
    let value = if value.kind() == ValueKind::Bool { Value::from(i64::from(value.is_true())) } else { value.clone() };
    if method == "common" {
        return filters::round(value, Some(precision), None, Kwargs::from_iter(std::iter::empty::<(&str, Value)>()));
    }
    // As Jinja2 does it: scaled, rounded, and divided, so the result is a float.
    let scale = 10f64.powi(precision);
    let scaled = number(&value)? * scale;
    match &*method {
        "ceil" => Ok(Value::from(scaled.ceil() / scale)),
        "floor" => Ok(Value::from(scaled.floor() / scale)),
        _ => Err(failed(format!("`round`: expected `common`, `ceil` or `floor`, found `{method}`"))),
    }
}

/// The filter `replace`, for at most `count` places.
pub fn replace(value: &Value, old: &Value, new: &Value, count: Option<i64>, named: Kwargs) -> Result<String, Error> {
    let count = match count {
        Some(count) => Some(count),
        None => named.get::<Option<i64>>("count")?,
    };
    named.assert_all_used()?;
    let (text, old, new) = (str_of(value)?, str_of(old)?, str_of(new)?);
    Ok(match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text.replacen(&old, &new, count),
        None => text.replace(&old, &new),
    })
}

/// The filter `indent`: a width or a text before each line but the first and empty ones.
pub fn indent(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let arguments = arguments.into_values();
    let (width, first, blank, named): (Option<Value>, Option<bool>, Option<bool>, Kwargs) = from_args(&arguments)?;
    let flag = |given: Option<bool>, name: &str| match given {
        Some(given) => Ok::<bool, Error>(given),
        None => Ok(named.get::<Option<bool>>(name)?.unwrap_or(false)),
    };
    let width = match width {
        Some(width) => Some(width),
        None => named.get::<Option<Value>>("width")?,
    };
    let (first, blank) = (flag(first, "first")?, flag(blank, "blank")?);
    named.assert_all_used()?;
    let indent = match &width {
        None => " ".repeat(4),
        Some(width) => match width.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(within(usize::try_from(width.clone()).unwrap_or(0), "indent")?),
        },
    };
    let text = value.as_str().ok_or_else(|| failed(format!("`indent`: expected a text, found a {}", value.kind())))?;
    // As Jinja2 does it: a text that ends in a line break keeps it.
    let text = format!("{text}\n");
    let mut out = String::new();
    for (at, line) in lines(&text, false).into_iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        if if at == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// The filter `center`.
pub fn center(value: &Value, width: Option<i64>, named: Kwargs) -> Result<Value, Error> {
    let width = match width {
        Some(width) => width,
        None => named.get::<Option<i64>>("width")?.unwrap_or(80),
    };
    named.assert_all_used()?;
    pad(&str_of(value)?, "center", &[Value::from(width)])
}

/// The filters `length` and `count`: what is not defined has no items.
pub fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// A width that a text may be padded to.
fn within(width: usize, name: &str) -> Result<usize, Error> {
    if width > WIDTH_MAX {
        return Err(failed(format!("`{name}`: expected a width of at most {WIDTH_MAX}, found {width}")));
    }
    Ok(width)
}

/// The filter `trim`.
pub fn trim(value: &Value, characters: Option<String>) -> Result<Value, Error> {
    of_text(value, |text| strip(text, characters.as_deref(), true, true).to_string())
}

/// Filter `int`: what is no number is the default, which is 0.
pub fn int(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    arguments: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(arguments.get("default")?).unwrap_or(Value::from(0));
    filters::int(state, &digits(value), Some(default), base, arguments)
}

/// Filter `float`, in the same way.
pub fn float_of(
    state: &State<'_, '_>,
    value: &Value,
    default: Option<Value>,
    arguments: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(arguments.get("default")?).unwrap_or(Value::from(0.0));
    filters::float(state, &digits(value), Some(default), arguments)
}

/// A text as Python reads numbers in it: spaces around it do not count, nor does a `_` between two digits.
fn digits(value: &Value) -> Value {
    let Some(text) = value.as_str() else { return value.clone() };
    let chars: Vec<char> = text.trim_matches(is_space).chars().collect();
    let is_digit = |at: usize| chars.get(at).is_some_and(char::is_ascii_alphanumeric);
    let between = |at: usize| chars[at] == '_' && at > 0 && is_digit(at - 1) && is_digit(at + 1);
    Value::from((0..chars.len()).filter(|&at| !between(at)).map(|at| chars[at]).collect::<String>())
}

/// Filter `wordcount`: runs of letters, digits and `_`.
pub fn word_count(value: &Value) -> Result<usize, Error> {
    let text = str_of(value)?;
    Ok(text.split(|c: char| !letters::is_word(c)).filter(|word| !word.is_empty()).count())
}

/// The filter `truncate` of Jinja2.
pub fn truncate(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let arguments = arguments.into_values();
    let (length, whole, end, leeway, named): (Option<usize>, Option<bool>, Option<String>, Option<usize>, Kwargs) =
        from_args(&arguments)?;
    let or_named = |given: Option<usize>, name: &str, absent| match given {
        Some(given) => Ok::<usize, Error>(given),
        None => Ok(named.get::<Option<usize>>(name)?.unwrap_or(absent)),
    };
    let length = or_named(length, "length", 255)?;
    let leeway = or_named(leeway, "leeway", 5)?;
    let cuts_words = match whole {
        Some(whole) => whole,
        None => named.get::<Option<bool>>("killwords")?.unwrap_or(false),
    };
    let end = match end {
        Some(end) => end,
        None => named.get::<Option<String>>("end")?.unwrap_or_else(|| "...".to_string()),
    };
    named.assert_all_used()?;
    if !matches!(value.kind(), ValueKind::String | ValueKind::Undefined) {
        return Err(failed(format!("`truncate`: expected a text, found a value of the kind {}", value.kind())));
    }
    let text = str_of(value)?;
    let end_length = end.chars().count();
    if length < end_length {
        return Err(failed(format!("`truncate`: expected a length of at least {end_length}, found {length}")));
    }
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let kept: String = text.chars().take(length - end_length).collect();
    let kept = if cuts_words { &kept } else { kept.rsplit_once(' ').map_or(&*kept, |(before, _)| before) };
    Ok(format!("{kept}{end}"))
}

/// The test `sequence`: what has a length and items by index or key, so texts and mappings, too.
pub fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Map)
}

/// The test `callable`: macros, functions, methods and `loop`; a value that is not defined has a call, which fails.
pub fn is_callable(value: &Value) -> bool {
    value.is_undefined() || is_macro(value) || (value.kind() == ValueKind::Plain && value.as_object().is_some())
}

/// Whether a value is a macro: minijinja has it as a mapping of its name, its arguments and whether it has a caller.
pub fn is_macro(value: &Value) -> bool {
    value.kind() == ValueKind::Map && value.len() == Some(3) && value.to_string().starts_with("<macro ")
}

/// How JSON is written.
struct Json {
    /// Text of a level; `None`: all on one line.
    indent: Option<String>,
    /// After an item, and after a key.
    separators: [String; 2],
    ascii: bool,
    sorted: bool,
}

/// The filter `tojson` of transformers: `json.dumps` with `ensure_ascii=False`.
pub fn to_json(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let arguments = arguments.into_values();
    let (ascii, indent, separators, sorted, named): (
        Option<Value>,
        Option<Value>,
        Option<Value>,
        Option<Value>,
        Kwargs,
    ) = from_args(&arguments)?;
    let given = |given: Option<Value>, name: &str| match given {
        Some(given) => Ok::<_, Error>(Some(given).filter(|value| !value.is_none())),
        None => Ok(named.get::<Option<Value>>(name)?.filter(|value| !value.is_none())),
    };
    let ascii = given(ascii, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = given(indent, "indent")?;
    let separators = given(separators, "separators")?;
    let sorted = given(sorted, "sort_keys")?.is_some_and(|value| value.is_true());
    named.assert_all_used()?;
    let indent = match &indent {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_string(),
            None => {
                let width =
                    usize::try_from(indent.clone()).map_err(|_| failed("`tojson`: expected a width as `indent`"))?;
                if width > 64 {
                    return Err(failed(format!("`tojson`: expected `indent` of at most 64, found {width}")));
                }
                " ".repeat(width)
            }
        }),
    };
    let separators = match separators {
        None => [if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()],
        Some(value) => {
            let texts: Vec<Option<String>> = value.try_iter()?.map(|item| item.as_str().map(str::to_string)).collect();
            match <[Option<String>; 2]>::try_from(texts) {
                Ok([Some(item), Some(key)]) => [item, key],
                _ => return Err(failed("`tojson`: expected two texts as `separators`")),
            }
        }
    };
    let mut out = String::new();
    Json { indent, separators, ascii, sorted }.write(value, &mut out, 0)?;
    Ok(out)
}

impl Json {
    fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(failed(format!("`tojson`: expected at most {DEPTH_MAX} levels, found more")));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&Json::number(value)?),
            ValueKind::String => self.text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq if is_range(value) => {
                return Err(failed("`tojson`: expected a value of JSON, found a `range`"));
            }
            ValueKind::Seq => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list('[', ']', &items, out, depth, |item, out| self.write(item, out, depth + 1))?;
            }
            ValueKind::Map => {
                let mut members = pairs(value)?;
                if self.sorted {
                    if members.iter().any(|(key, _)| key.as_str().is_none()) {
                        return Err(failed("`tojson`: `sort_keys` is supported for keys that are texts"));
                    }
                    members.sort_by(|(a, _), (b, _)| a.as_str().cmp(&b.as_str()));
                }
                self.list('{', '}', &members, out, depth, |(key, value), out| {
                    let name = match key.kind() {
                        ValueKind::String => key.as_str().unwrap_or_default().to_string(),
                        ValueKind::None => "null".to_string(),
                        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_string(),
                        ValueKind::Number => Json::number(key)?,
                        kind => return Err(failed(format!("`tojson`: expected texts as keys, found a {kind}"))),
                    };
                    self.text(&name, out);
                    out.push_str(&self.separators[1]);
                    self.write(value, out, depth + 1)
                })?;
            }
            kind => {
                return Err(failed(format!("`tojson`: expected a value of JSON, found a value of the kind {kind}")));
            }
        }
        Ok(())
    }

    fn number(value: &Value) -> Result<String, Error> {
        if value.is_integer() {
            return Ok(value.to_string());
        }
        let number = number(value)?;
        Ok(match number {
            _ if number.is_nan() => "NaN".to_string(),
            f64::INFINITY => "Infinity".to_string(),
            f64::NEG_INFINITY => "-Infinity".to_string(),
            _ => float(number),
        })
    }

    fn list<T>(
        &self,
        open: char,
        close: char,
        items: &[T],
        out: &mut String,
        depth: usize,
        mut write: impl FnMut(&T, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                (0..depth).for_each(|_| out.push_str(indent));
            }
        };
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                out.push_str(&self.separators[0]);
            }
            line(out, depth + 1);
            write(item, out)?;
        }
        if !items.is_empty() {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !(' '..='~').contains(&c)) => {
                    c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
                        let _ = write!(out, "\\u{unit:04x}");
                    });
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// Methods of Python's texts, lists and mappings; the others are those of `pycompat`.
pub fn method(state: &mut State<'_, '_>, value: &Value, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let found = match (value.as_str(), value.kind(), name) {
        (Some(text), _, _) => return method_of_text(state, value, text, name, arguments),
        (None, ValueKind::Seq, "index") => Some(index_of(value, arguments)?),
        (None, ValueKind::Seq, "count") => {
            let (what,): (&Value,) = from_args(arguments)?;
            Some(Value::from(value.try_iter()?.filter(|item| operators::equal(item, what)).count()))
        }
        (None, ValueKind::Seq | ValueKind::Map, "copy")
            if arguments.is_empty() && !operators::is_tuple(value) && !is_range(value) =>
        {
            Some(value.clone())
        }
        (None, ValueKind::Map, "items" | "keys" | "values") => {
            let () = from_args(arguments)?;
            let pairs = pairs(value)?.into_iter();
            let view = match name {
                "items" => {
                    let items = pairs.map(|(key, value)| Value::from(Tuple::from([key, value])));
                    View { name: "dict_items", items: items.collect() }
                }
                "keys" => View { name: "dict_keys", items: pairs.map(|(key, _)| key).collect() },
                _ => View { name: "dict_values", items: pairs.map(|(_, value)| value).collect() },
            };
            Some(Value::from_object(view))
        }
        _ => None,
    };
    found.map_or_else(|| pycompat::unknown_method_callback(state, value, name, arguments), Ok)
}

/// A method of a text. Those of escaped text give escaped text, and escape their arguments, which is not supported.
fn method_of_text(
    state: &mut State<'_, '_>,
    value: &Value,
    text: &str,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if value.is_safe()
        && arguments.iter().any(|argument| argument.as_str().is_some() || argument.kind() == ValueKind::Seq)
    {
        return Err(failed(format!("`{name}` of an escaped text is not supported with texts as arguments")));
    }
    let result = match text_method(text, name, arguments)? {
        Some(result) => result,
        None => pycompat::unknown_method_callback(state, &Value::from(text), name, arguments)?,
    };
    Ok(match result.as_str() {
        Some(result) if value.is_safe() => Value::from_safe_string(result.to_string()),
        _ => result,
    })
}

/// `list.index`.
fn index_of(list: &Value, arguments: &[Value]) -> Result<Value, Error> {
    let (what, start, end): (Value, Option<i64>, Option<i64>) = from_args(arguments)?;
    let items: Vec<Value> = list.try_iter()?.collect();
    let (start, end) = range(items.len(), start, end);
    let at = (start..end).find(|&at| operators::equal(&items[at], &what));
    at.map(Value::from).ok_or_else(|| failed("the value is not in the list"))
}

/// `value[start:stop:step]`.
pub fn slice(value: &Value, start: Option<i64>, stop: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let step = step.unwrap_or(1);
    if !matches!(value.kind(), ValueKind::String | ValueKind::Seq) {
        return Err(failed(format!("a slice of a value of the kind {} is not supported", value.kind())));
    }
    if step == 0 {
        return Err(failed("slice step cannot be zero"));
    }
    let items = items(value)?;
    let length = items.len() as i64;
    // Backwards, a slice begins at the last item and ends before the first.
    let (low, high) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let clip = |at: i64| if at < 0 { at.saturating_add(length).max(low) } else { at.min(high) };
    let (start, stop) =
        (start.map_or(if step > 0 { low } else { high }, clip), stop.map_or(if step > 0 { high } else { low }, clip));
    if let Some(range) = value.downcast_object_ref::<Range>() {
        return Ok(Value::from_object(range.part(start, stop, step)));
    }
    let mut taken = vec![];
    let mut at = start;
    while if step > 0 { at < stop } else { at > stop } {
        taken.extend(items.get(at as usize).cloned());
        at = at.saturating_add(step);
    }
    Ok(match value.as_str() {
        Some(_) => of_text(value, |_| taken.iter().filter_map(Value::as_str).collect())?,
        None if operators::is_tuple(value) => Value::from(Tuple::from(taken)),
        None => Value::from(taken),
    })
}

/// Bounds of a slice, as Python clips them.
fn range(length: usize, start: Option<i64>, end: Option<i64>) -> (usize, usize) {
    let clip =
        |at: i64| if at < 0 { length.saturating_sub(at.unsigned_abs() as usize) } else { length.min(at as usize) };
    (start.map_or(0, clip), end.map_or(length, clip))
}

/// What `str.isspace` and the methods without an argument take for white space; beyond Unicode's property four separators.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip<'a>(text: &'a str, characters: Option<&str>, left: bool, right: bool) -> &'a str {
    let is_one = |c: char| characters.map_or_else(|| is_space(c), |characters| characters.contains(c));
    let text = if left { text.trim_start_matches(is_one) } else { text };
    if right { text.trim_end_matches(is_one) } else { text }
}

fn texts<'a>(parts: impl IntoIterator<Item = &'a str>) -> Value {
    parts.into_iter().map(Value::from).collect()
}

fn text_method(text: &str, name: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let of_letters = letters::changed(text, name).map(Value::from).or(letters::asks(text, name).map(Value::from));
    if let Some(value) = of_letters {
        let () = from_args(arguments)?;
        return Ok(Some(value));
    }
    Ok(Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(arguments)?;
            Value::from(strip(text, characters, name != "rstrip", name != "lstrip"))
        }
        "split" | "rsplit" => split(text, name == "rsplit", arguments)?,
        "splitlines" => {
            let (keeps, named): (Option<bool>, Kwargs) = from_args(arguments)?;
            let keeps = keeps.map_or_else(|| named.get::<Option<bool>>("keepends"), |keeps| Ok(Some(keeps)))?;
            named.assert_all_used()?;
            texts(lines(text, keeps.unwrap_or(false)))
        }
        "replace" => {
            let (old, new, count, named): (&str, &str, Option<i64>, Kwargs) = from_args(arguments)?;
            let count = count.or(named.get("count")?).and_then(|count| usize::try_from(count).ok());
            named.assert_all_used()?;
            Value::from(count.map_or_else(|| text.replace(old, new), |count| text.replacen(old, new, count)))
        }
        "startswith" | "endswith" => {
            let (what, start, end): (Value, Option<i64>, Option<i64>) = from_args(arguments)?;
            Value::from(has_at_end(text, name, &what, start, end)?)
        }
        "removeprefix" | "removesuffix" => {
            let (part,): (&str,) = from_args(arguments)?;
            let rest = if name == "removeprefix" { text.strip_prefix(part) } else { text.strip_suffix(part) };
            Value::from(rest.unwrap_or(text))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            partition(text, separator, name == "rpartition")?
        }
        "ljust" | "rjust" | "center" | "zfill" => pad(text, name, arguments)?,
        "find" | "rfind" | "index" | "rindex" => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(arguments)?;
            match (find(text, what, start, end, name.starts_with('r')), name) {
                (Some(at), _) => Value::from(at),
                (None, "find" | "rfind") => Value::from(-1),
                (None, _) => return Err(failed("substring not found")),
            }
        }
        "count" => {
            let (what, start, end): (&str, Option<i64>, Option<i64>) = from_args(arguments)?;
            let (start, end) = range(text.chars().count(), start, end);
            let part: String = text.chars().skip(start).take(end.saturating_sub(start)).collect();
            Value::from(part.matches(what).count())
        }
        "join" => {
            let (values,): (Value,) = from_args(arguments)?;
            let mut parts = vec![];
            for (at, item) in values.try_iter()?.enumerate() {
                let part = item.as_str().map(str::to_string);
                parts.push(
                    part.ok_or_else(|| failed(format!("`join`: expected texts, found a {} at {at}", item.kind())))?,
                );
            }
            Value::from(parts.join(text))
        }
        _ => return Ok(None),
    }))
}

/// `str.startswith` and `str.endswith`: one of several texts at the end of a part.
fn has_at_end(text: &str, name: &str, what: &Value, start: Option<i64>, end: Option<i64>) -> Result<bool, Error> {
    let length = text.chars().count();
    let starts_beyond = start.is_some_and(|start| start > length as i64);
    let (start, end) = range(length, start, end);
    let part: String = text.chars().skip(start).take(end.saturating_sub(start)).collect();
    let choices: Vec<Value> = match what.downcast_object_ref::<Tuple>() {
        Some(_) => what.try_iter()?.collect(),
        None => vec![what.clone()],
    };
    for choice in choices {
        let choice = choice.as_str().ok_or_else(|| failed(format!("`{name}`: expected a text or a tuple of texts")))?;
        let has = if name == "startswith" { part.starts_with(choice) } else { part.ends_with(choice) };
        if has && start <= end && !starts_beyond {
            return Ok(true);
        }
    }
    Ok(false)
}

/// `str.partition`: before, separator and after.
fn partition(text: &str, separator: &str, from_right: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(failed("`partition`: empty separator"));
    }
    let found = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

/// `str.find`: the place of a part in characters.
fn find(text: &str, what: &str, start: Option<i64>, end: Option<i64>, last: bool) -> Option<usize> {
    let length = text.chars().count();
    if start.is_some_and(|start| start > length as i64) {
        return None;
    }
    let (start, end) = range(length, start, end);
    if start > end {
        return None;
    }
    let part: String = text.chars().skip(start).take(end - start).collect();
    let at = if last { part.rfind(what) } else { part.find(what) }?;
    Some(start + part[..at].chars().count())
}

fn pad(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (width, fill): (i64, Option<&str>) = from_args(arguments)?;
    let fill = fill.unwrap_or(if name == "zfill" { "0" } else { " " });
    let mut characters = fill.chars();
    let (Some(fill), None) = (characters.next(), characters.next()) else {
        return Err(failed(format!("`{name}`: the fill character must be exactly one character long")));
    };
    let width = within(usize::try_from(width).unwrap_or(0), name)?;
    let missing = width.saturating_sub(text.chars().count());
    let filled = |count: usize| fill.to_string().repeat(count);
    Ok(Value::from(match name {
        "ljust" => format!("{text}{}", filled(missing)),
        "rjust" => format!("{}{text}", filled(missing)),
        "center" => {
            // CPython puts the odd one to the left where the width is odd, too.
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", filled(left), filled(missing - left))
        }
        _ => {
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            format!("{sign}{}{digits}", filled(missing))
        }
    }))
}

fn split(text: &str, from_right: bool, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, most, named): (Option<Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = match separator {
        Some(separator) => Some(separator),
        None => named.get::<Option<Value>>("sep")?,
    };
    let most = match most {
        Some(most) => Some(most),
        None => named.get::<Option<i64>>("maxsplit")?,
    };
    named.assert_all_used()?;
    let separator = separator.filter(|separator| !separator.is_none());
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let Some(separator) = separator else { return Ok(texts(words(text, from_right, most))) };
    let separator = separator.as_str().filter(|separator| !separator.is_empty());
    let separator = separator.ok_or_else(|| failed("`split`: expected a text that is not empty as separator"))?;
    let count = most.saturating_add(1);
    Ok(if from_right {
        let mut parts: Vec<&str> = text.rsplitn(count, separator).collect();
        parts.reverse();
        texts(parts)
    } else {
        texts(text.splitn(count, separator))
    })
}

/// The words of a text, without the white space around them. After `most` of them the rest is the last one; from the right, the first.
fn words(text: &str, from_right: bool, most: usize) -> Vec<&str> {
    let mut parts = vec![];
    let mut rest = strip(text, None, !from_right, from_right);
    while !rest.is_empty() {
        let cut = if from_right {
            rest.char_indices().rfind(|(_, c)| is_space(*c))
        } else {
            rest.char_indices().find(|(_, c)| is_space(*c))
        };
        let Some((at, space)) = cut.filter(|_| parts.len() < most) else {
            parts.push(rest);
            break;
        };
        let (before, after) = (&rest[..at], &rest[at + space.len_utf8()..]);
        let (word, left) = if from_right { (after, before) } else { (before, after) };
        parts.push(word);
        rest = strip(left, None, !from_right, from_right);
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// `str.splitlines`.
fn lines(text: &str, keeps: bool) -> Vec<&str> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let mut parts = vec![];
    let mut rest = text;
    while let Some((at, end)) = rest.char_indices().find(|(_, c)| is_end(*c)) {
        let length = if rest[at..].starts_with("\r\n") { 2 } else { end.len_utf8() };
        parts.push(if keeps { &rest[..at + length] } else { &rest[..at] });
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        parts.push(rest);
    }
    parts
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::UNIX_EPOCH;

    use crate::tokenizer::jinja::render;

    /// Expressions and what CPython 3.12 with Jinja2 3.1 makes of them.
    #[test]
    fn expressions_give_the_text_of_python() {
        for (expression, expected) in [
            ("0.00001", "1e-05"),
            ("0.00000015", "1.5e-07"),
            ("0.0001", "0.0001"),
            ("1e16", "1e+16"),
            ("1e15", "1000000000000000.0"),
            ("-2.5", "-2.5"),
            ("[0.00001, 'a', (1,), {'b': 1e22}]", "[1e-05, 'a', (1,), {'b': 1e+22}]"),
            ("0.00001 | string", "1e-05"),
            ("[0.00001, 2] | join('|')", "1e-05|2"),
            ("[{'a': 1}, {'a': 2}] | join(', ', attribute='a')", "1, 2"),
            (
                "{'min': 0.00001, 'big': 1e16, 'n': none, 't': true} | tojson",
                r#"{"min": 1e-05, "big": 1e+16, "n": null, "t": true}"#,
            ),
            (
                "{'b': 1, 'a': [1, {}]} | tojson(sort_keys=true, indent=2)",
                "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": 1\n}",
            ),
            ("{'a': [1, 2]} | tojson(separators=(',', ':'))", r#"{"a":[1,2]}"#),
            ("'é😀\x7f<' | tojson(ensure_ascii=true)", r#""\u00e9\ud83d\ude00\u007f<""#),
            ("'é😀\x7f<' | tojson", "\"é😀\x7f<\""),
            ("{1: 2} | tojson(indent=0)", "{\n\"1\": 2\n}"),
            (
                "['a' is sequence, {} is sequence, [] is sequence, 1 is sequence, none is sequence]",
                "[True, True, True, False, False]",
            ),
            ("'a.b.c'.rsplit('.', 1)", "['a.b', 'c']"),
            ("' a  b c '.split(none, 1)", "['a', 'b c ']"),
            ("' a  b c '.rsplit(none, 1)", "[' a  b', 'c']"),
            ("' a  b '.split()", "['a', 'b']"),
            ("'a,b'.split(sep=',', maxsplit=1)", "['a', 'b']"),
            ("'prefix-x'.removeprefix('prefix-')", "x"),
            ("'x.py'.removesuffix('.py')", "x"),
            ("'k=v=w'.partition('=')", "('k', '=', 'v=w')"),
            ("'k=v=w'.rpartition('=')", "('k=v', '=', 'w')"),
            ("'kv'.partition('=')", "('kv', '', '')"),
            ("'a'.ljust(3, '.') ~ 'b'.rjust(3) ~ 'c'.center(4, '*') ~ '-7'.zfill(4)", "a..  b*c**-007"),
            ("'abcb'.index('b') ~ 'abcb'.rindex('b') ~ 'abcb'.find('b', 2) ~ 'abc'.find('z')", "133-1"),
            ("[5, 6].index(6)", "1"),
            ("\"they're bill's 3rd\".title()", "They'Re Bill'S 3Rd"),
            ("'a\u{2028}b\r\nc\u{85}'.splitlines()", "['a', 'b', 'c']"),
            ("'a\r\nb'.splitlines(keepends=true) | length", "2"),
            ("'\u{1f}a\u{1f}'.strip() ~ '\u{1f}b ' | trim", "ab"),
            ("'foo bar baz qux' | truncate(9)", "foo..."),
            ("'foo bar baz qux' | truncate(9, true)", "foo ba..."),
            ("'foo bar baz qux' | truncate(11)", "foo bar baz qux"),
            ("'foo bar baz qux' | truncate(11, leeway=0, end='')", "foo bar"),
            ("'%s has %d' | format('a', 3)", "a has 3"),
            ("'a-b-a'.count('a', 1)", "1"),
            ("'%s has %s' % ('a', [0.00001])", "a has [1e-05]"),
            ("'%d %%' % 5", "5 %"),
            ("'%05.2f|' % 3.14159 ~ 'b'", "03.14|b"),
            ("'%(a)s-%(b)s' % {'a': 1, 'b': 2}", "1-2"),
            ("'ab'.center(5, '*')", "**ab*"),
            ("'12abc' | int ~ 'x' | int(7) ~ '3.9' | int ~ ' 4 ' | int ~ none | int", "07340"),
            ("'z' | float ~ 'z' | float(default=1.5) ~ ' 2.5 ' | float", "0.01.52.5"),
            ("'1_000' | int ~ '0x1f' | int(base=16) ~ '1e3' | float", "1000311000.0"),
            ("'one, two  th-ree' | wordcount", "4"),
            (
                "[1, 2, 3][2:0:-1] ~ [1, 2, 3, 4][::-2] ~ 'hello'[-2::-2] ~ [1, 2, 3][5:-9:-1]",
                "[3, 2][4, 2]le[3, 2, 1]",
            ),
            ("[][::-1] ~ ''[::-1] ~ [1, 2, 3][0:2:-1] ~ (1, 2)[::-1] ~ range(5)[1::2] | list", "[][](2, 1)[1, 3]"),
            ("none | default('x') ~ none | default('y', boolean=true) ~ z | d ~ '' | d('w', true)", "Noneyw"),
            (
                "'aXbXc' | replace('X', '-', 1) ~ 'ab' | replace('', '.') ~ 'aa' | replace('a', 'b', count=1)",
                "a-bXc.a.b.ba",
            ),
            ("'a\nb\n\nc' | indent('> ') ~ 'd' | indent(2, first=true)", "a\n> b\n\n> c  d"),
            ("'a\n\nb\n' | indent(1, blank=true)", "a\n \n b\n "),
            ("'x' | center(5) ~ '|'", "  x  |"),
            ("'a&b<c>\"\\'' | e ~ '<' | e | e", "a&amp;b&lt;c&gt;&#34;&#39;&lt;"),
            ("{'a': 1}.copy() ~ [1].copy()", "{'a': 1}[1]"),
            ("(z | length) ~ (z | count) ~ ('ab' | length) ~ (z | first) ~ ([] | first) ~ ('ab' | first)", "002a"),
            (
                "['abc'.startswith('b', 1), 'abc'.startswith('b', 2), 'abc'.endswith('b', 0, 2), 'abc'.endswith(('x', 'c'))]",
                "[True, False, True, True]",
            ),
            (
                "['abc'.startswith('', 3), 'abc'.startswith('', 4), 'abc'.endswith('', 2, 1), 'äb'.startswith('b', -1)]",
                "[True, False, False, True]",
            ),
            (r"'\/\U0001F600\d' ~ '\a\v' | length", "\\/😀\\d2"),
        ] {
            let rendered = render(&format!("{{{{ {expression} }}}}"), BTreeMap::new(), UNIX_EPOCH);
            assert_eq!(rendered.expect(expression), expected, "{expression}");
        }
    }

    #[test]
    fn what_python_refuses_is_refused() {
        for (expression, part) in [
            ("missing | tojson", "kind undefined"),
            ("{'a': 1}.items() | tojson", "kind"),
            ("'a'.index('b')", "substring not found"),
            ("[1].index(2)", "not in the list"),
            ("'a'.partition('')", "empty separator"),
            ("'a'.startswith(1)", "expected a text"),
            ("'a'.endswith(['a'])", "expected a text"),
            ("'a'.split('')", "not empty"),
            ("','.join([1])", "expected texts"),
            ("'abc' | truncate(2)", "at least 3"),
            ("'a'.ljust(3, 'ab')", "exactly one"),
            ("{1: 2, 'a': 3} | tojson(sort_keys=true)", "sort_keys"),
            ("1 | tojson(default=2)", "default"),
            ("'%s %s' % ('a',)", "missing an argument"),
        ] {
            let error = render(&format!("{{{{ {expression} }}}}"), BTreeMap::new(), UNIX_EPOCH).expect_err(expression);
            let text = crate::tokenizer::jinja::chain(&error);
            assert!(text.contains(part), "{expression}: {text}");
        }
    }
}
