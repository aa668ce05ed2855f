//! Owns what minijinja reads in another way than Jinja2, rewritten before it is parsed.
//!
//! - `%` after a text: `'%s' % a` becomes `('%s' | percent(a))`. A text in a variable keeps its operator, which then fails by name.
//! - A slice with a step: `a[b:c:d]` becomes `a.slice_by(b, c, d)`. minijinja counts wrongly backwards.
//! - Escapes in texts.

/// The template in the dialect of minijinja.
pub fn rewritten(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let length = match rest.as_bytes().get(at + 1) {
            Some(b'{') => block(&rest[at..], "}}"),
            Some(b'%') => block(&rest[at..], "%}"),
            Some(b'#') => rest[at..].find("#}").map(|end| end + 2),
            _ => Some(1),
        };
        // A block without an end is left to the parser.
        let Some(length) = length else { break };
        let inside = &rest[at..at + length];
        out.push_str(&rest[..at]);
        rest = &rest[at + length..];
        if inside.len() < 4 || inside.starts_with("{#") {
            out.push_str(inside);
            continue;
        }
        out.push_str(&inside[..2]);
        out.push_str(&expression(&inside[2..inside.len() - 2]));
        out.push_str(&inside[inside.len() - 2..]);
        if inside[2..].trim_start_matches(['-', '+', ' ']).starts_with("raw") {
            let end = rest.find("endraw").unwrap_or(rest.len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        }
    }
    out + rest
}

/// Length of the block at the beginning of a text, with its marks.
fn block(text: &str, end: &str) -> Option<usize> {
    let (mut at, mut depth) = (2, 0);
    loop {
        let rest = text.get(at..)?;
        if depth == 0 && rest.starts_with(end) {
            return Some(at + 2);
        }
        match rest.chars().next()? {
            '\'' | '"' => {
                at += literal(rest)?;
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        at += rest.chars().next()?.len_utf8();
    }
}

/// Length of the text literal at the beginning of a text.
fn literal(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut escaped = false;
    let end = text[1..].find(|c: char| {
        let ends = c == quote && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map(|end| end + 2)
}

fn expression(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Where the last token begins in `out`, if it is a text and no operator of the same rank is before it.
    let (mut subject, mut before) = (None, ' ');
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        if let ('\'' | '"', Some(length)) = (c, literal(rest)) {
            subject = (!matches!(before, '*' | '/' | '%')).then_some(out.len());
            out.push_str(&escapes(&rest[..length]));
            (at, before) = (at + length, c);
            continue;
        }
        if let ('[', Some(length)) = (c, bracket(rest))
            && let Some([start, stop, step]) = slice(&rest[1..length - 1])
        {
            let part = |part: &str| if part.trim().is_empty() { "none".to_string() } else { expression(part) };
            out.truncate(out.trim_end().len());
            out.push_str(&format!(".slice_by({}, {}, {})", part(start), part(stop), part(step)));
            (at, subject, before) = (at + length, None, ')');
            continue;
        }
        if let ('%', Some(start), Some(length)) = (c, subject, operand(&rest[1..])) {
            out.insert(start, '(');
            let operand = expression(rest[1..1 + length].trim());
            out.truncate(out.trim_end().len());
            out.push_str(&format!(" | percent({operand}))"));
            (at, subject, before) = (at + 1 + length, None, ')');
            continue;
        }
        if !c.is_whitespace() {
            (subject, before) = (None, c);
        }
        out.push(c);
        at += c.len_utf8();
    }
    out
}

/// A text literal with the escapes of Python that minijinja has otherwise or lacks.
fn escapes(literal: &str) -> String {
    let mut out = String::with_capacity(literal.len());
    let mut rest = literal;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let Some(c) = rest[at + 1..].chars().next() else { break };
        let mut length = 1 + c.len_utf8();
        match c {
            '/' => out.push_str("\\\\/"),
            'a' => out.push_str("\\x07"),
            'v' => out.push_str("\\x0b"),
            '\n' => {}
            'U' => {
                let digits = rest.get(at + 2..at + 10).unwrap_or_default();
                match u32::from_str_radix(digits, 16).ok().and_then(char::from_u32) {
                    Some(c) => (out.push(c), length += digits.len()).0,
                    None => out.push_str("\\U"),
                }
            }
            _ => out.push_str(&rest[at..at + length]),
        }
        rest = &rest[at + length..];
    }
    out + rest
}

/// The three parts of a slice with a step: start, stop and step.
fn slice(inside: &str) -> Option<[&str; 3]> {
    let (mut at, mut from) = (0, 0);
    let mut parts = vec![];
    while let Some(c) = inside[at..].chars().next() {
        match c {
            '\'' | '"' => at += literal(&inside[at..])?,
            '(' | '[' | '{' => at += bracket(&inside[at..])?,
            _ => {
                if c == ':' {
                    parts.push(&inside[from..at]);
                    from = at + 1;
                }
                at += c.len_utf8();
            }
        }
    }
    parts.push(&inside[from..]);
    <[&str; 3]>::try_from(parts).ok().filter(|[_, _, step]| !step.trim().is_empty())
}

/// Length of the brackets at the beginning of a text, with what is inside.
fn bracket(text: &str) -> Option<usize> {
    let (mut at, mut depth) = (0, 0);
    while let Some(c) = text[at..].chars().next() {
        match c {
            '\'' | '"' => {
                at += literal(&text[at..])?;
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        at += c.len_utf8();
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// Length of the operand at the beginning of a text: a value with its attributes, items, calls and filters.
fn operand(text: &str) -> Option<usize> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let blank = |text: &str| text.len() - text.trim_start().len();
    let name = |text: &str| text.find(|c: char| !is_name(c)).unwrap_or(text.len());
    let mut at = blank(text);
    at += match text[at..].chars().next()? {
        '\'' | '"' => literal(&text[at..])?,
        '(' | '[' | '{' => bracket(&text[at..])?,
        c if is_name(c) => name(&text[at..]),
        _ => return None,
    };
    loop {
        let rest = &text[at..];
        let next = blank(rest);
        at += match rest[next..].chars().next() {
            Some('.') => next + 1 + name(&rest[next + 1..]),
            Some('(' | '[') => next + bracket(&rest[next..])?,
            Some('|') => {
                let gap = next + 1 + blank(&rest[next + 1..]);
                gap + name(&rest[gap..])
            }
            _ => return Some(at),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percent_after_a_text_becomes_a_filter() {
        for (template, expected) in [
            ("{{ '%s' % a }}", "{{ ('%s' | percent(a)) }}"),
            (
                "{{- 'a' ~ '%s-%s' % (a, b[0].c('}}') | upper) ~ 'x' -}}",
                "{{- 'a' ~ ('%s-%s' | percent((a, b[0].c('}}') | upper))) ~ 'x' -}}",
            ),
            ("{% set x = '%d' % m.n %}{% if n % 2 %}", "{% set x = ('%d' | percent(m.n)) %}{% if n % 2 %}"),
            ("{{ '%s' % ('%s' % a) }}", "{{ ('%s' | percent((('%s' | percent(a))))) }}"),
            ("{{ {'a': {'b': '%s' % 1}} }} {# '%s' % a #}", "{{ {'a': {'b': ('%s' | percent(1))}} }} {# '%s' % a #}"),
            (
                "{% raw %}{{ '%s' % a }}{% endraw %}{{ '\\'%s' % a }}",
                "{% raw %}{{ '%s' % a }}{% endraw %}{{ ('\\'%s' | percent(a)) }}",
            ),
            ("{{ 2 * 'a' % b }} '%s' % a {", "{{ 2 * 'a' % b }} '%s' % a {"),
            ("{{ 'open", "{{ 'open"),
        ] {
            assert_eq!(rewritten(template), expected, "{template}");
        }
    }

    #[test]
    fn a_slice_with_a_step_becomes_a_method() {
        for (template, expected) in [
            ("{{ a[::-1] }}", "{{ a.slice_by(none, none, -1) }}"),
            ("{{ a [b[0]:c(1, ':'):2] [1:] }}", "{{ a.slice_by(b[0], c(1, ':'), 2) [1:] }}"),
            ("{% for m in a[:b[::2]:-1] %}", "{% for m in a.slice_by(none, b.slice_by(none, none, 2), -1) %}"),
            (
                "{{ a[1:2] }} {{ a[1:2:] }} {{ [1, {'a': 2}] }} a[1:2:3]",
                "{{ a[1:2] }} {{ a[1:2:] }} {{ [1, {'a': 2}] }} a[1:2:3]",
            ),
            ("{{ '[::2]' % a[::2] }}", "{{ ('[::2]' | percent(a.slice_by(none, none, 2))) }}"),
        ] {
            assert_eq!(rewritten(template), expected, "{template}");
        }
    }
}
