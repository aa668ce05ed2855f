//! Owns templates: how a chat template is rendered, in the dialect of transformers.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Tuple};
use minijinja::{Environment, ErrorKind, Value};

use super::{collections, dialect, letters, methods, operators, python};

/// Most instructions that a template may execute; a thousand messages take about 10^5.
const TEMPLATE_FUEL: u64 = 20_000_000;
/// Largest chat that a template may produce.
const CHAT_BYTES_MAX: usize = 64 << 20;

/// Renders a chat template in the dialect of transformers: Jinja2 with its options, functions and `tojson`.
///
/// Instructions and output are bounded. Memory is not: a template may double a string without printing it.
pub(super) fn render(
    template: &str,
    context: BTreeMap<&str, Value>,
    now: SystemTime,
) -> Result<String, minijinja::Error> {
    let template = source(template)?;
    let mut env = environment()?;
    env.set_fuel(Some(TEMPLATE_FUEL));
    env.set_unknown_method_callback(python::method);
    env.set_formatter(python::print);
    // It breaks lines elsewhere than Python does.
    env.remove_filter("pprint");
    env.add_filter("tojson", python::to_json);
    env.add_filter("string", python::text);
    env.add_filter("join", python::join);
    env.add_filter("trim", python::trim);
    env.add_filter("percent", python::percent);
    env.add_filter("truncate", python::truncate);
    env.add_filter("int", python::int);
    env.add_filter("float", python::float_of);
    env.add_filter("wordcount", python::word_count);
    env.add_filter("replace", python::replace);
    env.add_filter("indent", python::indent);
    env.add_filter("center", python::center);
    env.add_filter("round", python::round);
    env.add_filter("safe", python::safe);
    env.add_filter("forceescape", python::escape_again);
    env.add_filter("upper", |value: &Value| python::of_text(value, str::to_uppercase));
    env.add_filter("lower", |value: &Value| python::of_text(value, str::to_lowercase));
    env.add_filter("capitalize", |value: &Value| python::of_text(value, letters::capitalize));
    env.add_filter("title", |value: &Value| Ok::<_, minijinja::Error>(letters::title_words(&python::str_of(value)?)));
    for name in ["length", "count"] {
        env.add_filter(name, python::length);
    }
    for name in ["default", "d"] {
        env.add_filter(name, python::or_default);
    }
    for name in ["escape", "e"] {
        env.add_filter(name, python::escape);
    }
    env.add_test("sequence", python::is_sequence);
    env.add_test("callable", python::is_callable);
    for name in ["lower", "upper"] {
        env.add_test(name, move |value: &Value| {
            Ok::<_, minijinja::Error>(letters::asks(&python::str_of(value)?, &format!("is{name}")))
        });
    }
    env.add_filter("attribute_", methods::attribute);
    env.add_filter("item_", methods::item);
    env.add_filter("attr", methods::own_attribute);
    env.add_filter("slice_", python::slice);
    env.add_filter("format", |text: &Value, values: Rest<Value>| {
        python::percent(text, &Value::from(Tuple::from(values.0)))
    });
    operators::add_to(&mut env);
    collections::add_to(&mut env);
    env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", move |format: String| strftime(&format, now));
    let mut output = Bounded { bytes: Vec::new() };
    env.template_from_str(&template)?.render_captured_to(Value::from(context), &mut output)?;
    String::from_utf8(output.bytes)
        .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Whether a template reads a variable that is given to it.
pub(super) fn reads(template: &str, name: &str) -> bool {
    let (Ok(template), Ok(env)) = (source(template), environment()) else { return false };
    let parsed = env.template_from_str(&template).ok();
    parsed.is_some_and(|template| template.undeclared_variables(false).contains(name))
}

/// What is wrong with the syntax of a template.
pub(super) fn fault(template: &str) -> Option<String> {
    let parsed =
        source(template).and_then(|template| environment().and_then(|env| env.template_from_str(&template).map(drop)));
    parsed.err().map(|error| chain(&error))
}

/// A template in the dialect of minijinja. Jinja2 has one kind of line break.
fn source(template: &str) -> Result<String, minijinja::Error> {
    let template = template.replace("\r\n", "\n").replace('\r', "\n");
    dialect::rewritten(&without_generation_tags(&template)).map_err(python::failed)
}

fn environment<'a>() -> Result<Environment<'a>, minijinja::Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    Ok(env)
}

/// An error and its causes on one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(|error| error.to_string()).collect::<Vec<_>>().join(": ")
}

/// Output of a template, up to `CHAT_BYTES_MAX`.
struct Bounded {
    bytes: Vec<u8>,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > CHAT_BYTES_MAX - self.bytes.len() {
            return Err(io::Error::other(format!("expected at most {CHAT_BYTES_MAX} bytes of text, found more")));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Turns `{% generation %}` blocks, which mark the assistant's words for training, into blocks that always print.
///
/// Rewriting the tag alone keeps its whitespace control (`{%-`) in force.
fn without_generation_tags(template: &str) -> String {
    let mut rest = template;
    let mut out = String::with_capacity(template.len());
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inside = &tag[..end];
        let name = inside.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        let plain = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&inside.replacen(name, plain, 1));
        rest = &tag[end..];
    }
    out.push_str(rest);
    out
}

/// Python's `strftime` in UTC with English names, for the directives that prompts use for dates.
fn strftime(format: &str, now: SystemTime) -> Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let days = seconds / 86_400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[((days + 4) % 7) as usize];
    let unknown = |directive: &str| {
        let message = format!("`strftime_now`: `{directive}` in `{format}` is not supported");
        minijinja::Error::new(ErrorKind::InvalidOperation, message)
    };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // glibc's flag for numbers without a zero or blank before them.
        let short = directive == Some('-');
        if short {
            directive = chars.next();
        }
        let mut padded = |number: u64| match short {
            true => out.push_str(&number.to_string()),
            false => out.push_str(&format!("{number:02}")),
        };
        match directive {
            Some('m') => padded(month),
            Some('d') => padded(day),
            Some('H') => padded(hour),
            Some('I') => padded((hour + 11) % 12 + 1),
            Some('M') => padded(minute),
            Some('S') => padded(second),
            Some('y') if !short => padded(year % 100),
            other if short => {
                let directive: String = "%-".chars().chain(other).collect();
                return Err(unknown(&directive));
            }
            Some('C') => padded(year / 100),
            Some('u') => out.push_str(&((days + 3) % 7 + 1).to_string()),
            Some('w') => out.push_str(&((days + 4) % 7).to_string()),
            Some('F') => out.push_str(&format!("{year}-{month:02}-{day:02}")),
            Some('D' | 'x') => out.push_str(&format!("{month:02}/{day:02}/{:02}", year % 100)),
            Some('T' | 'X') => out.push_str(&format!("{hour:02}:{minute:02}:{second:02}")),
            Some('R') => out.push_str(&format!("{hour:02}:{minute:02}")),
            Some('c') => out.push_str(&format!(
                "{} {} {day:2} {hour:02}:{minute:02}:{second:02} {year}",
                &day_name[..3],
                &month_name[..3]
            )),
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('j') => out.push_str(&format!("{:03}", days - first_day(year) + 1)),
            Some('Y') => out.push_str(&year.to_string()),
            Some('B') => out.push_str(month_name),
            Some('b' | 'h') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
            Some('%') => out.push('%'),
            other => {
                let directive: String = std::iter::once('%').chain(other).collect();
                return Err(unknown(&directive));
            }
        }
    }
    Ok(out)
}

/// The first day of a year since 1970, as a day count since 1970-01-01.
fn first_day(year: u64) -> u64 {
    let before = year - 1;
    365 * (year - 1970) + (before / 4 - before / 100 + before / 400) - 477
}

/// Year, month 1-12 and day 1-31 of a day count since 1970-01-01 (H. Hinnant, "chrono-compatible low-level date
/// algorithms", `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    // Years begin in March in this algorithm, so that the leap day is the last day of its year.
    let shifted = days + 719_468;
    let era_day = shifted % 146_097;
    let era_year = (era_day - era_day / 1460 + era_day / 36_524 - era_day / 146_096) / 365;
    let year_day = era_day - (365 * era_year + era_year / 4 - era_year / 100);
    let march_month = (5 * year_day + 2) / 153;
    let day = year_day - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    (era_year + shifted / 146_097 * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_line_break_is_one_of_the_same_kind() {
        let rendered = render("a\r\n{% if 1 %}\r\nb\r{% endif %}\r\n\rc{{ '\r\n' }}\r\n", BTreeMap::new(), UNIX_EPOCH);
        assert_eq!(rendered.expect("it renders"), "a\nb\n\nc\n");
    }

    #[test]
    fn dates_are_right() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let date = |seconds| strftime("%a %A %d %b %B %y %Y-%m-%d %H:%M:%S %I%p %%", at(seconds)).expect("it formats");
        assert_eq!(date(0), "Thu Thursday 01 Jan January 70 1970-01-01 00:00:00 12AM %");
        assert_eq!(date(951_825_599), "Tue Tuesday 29 Feb February 00 2000-02-29 11:59:59 11AM %");
        assert_eq!(date(4_107_542_400), "Mon Monday 01 Mar March 00 2100-03-01 00:00:00 12AM %");
        assert_eq!(date(1_735_689_599), "Tue Tuesday 31 Dec December 24 2024-12-31 23:59:59 11PM %");
        let short = |seconds| strftime("%-d.%-m. %-H:%-M:%-S %-I %e %j", at(seconds)).expect("it formats");
        assert_eq!(short(0), "1.1. 0:0:0 12  1 001");
        assert_eq!(short(951_825_599), "29.2. 11:59:59 11 29 060");
        assert_eq!(short(1_735_689_599), "31.12. 23:59:59 11 31 366");
        let whole = |seconds| strftime("%C %u %w %F %D %x %T %X %R %c %h", at(seconds)).expect("it formats");
        assert_eq!(
            whole(0),
            "19 4 4 1970-01-01 01/01/70 01/01/70 00:00:00 00:00:00 00:00 Thu Jan  1 00:00:00 1970 Jan"
        );
        assert_eq!(
            whole(951_652_799),
            "20 7 0 2000-02-27 02/27/00 02/27/00 11:59:59 11:59:59 11:59 Sun Feb 27 11:59:59 2000 Feb"
        );
        assert!(strftime("%-Q", at(0)).is_err());
    }
}
