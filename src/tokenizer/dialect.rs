//! Owns the dialect of minijinja: rewrites the expressions of a Jinja2 template so that minijinja gives what Jinja2 would.
//!
//! The grammar is that of Jinja2 3.1 (`jinja2/parser.py`). Each operator becomes a filter or a method that `operators` and `python` define:
//!
//! | Jinja2 | minijinja |
//! | --- | --- |
//! | `a + b`, `a % b`, `-a`, `a ~ b` | `a\|add_(b)`, `a\|mod_(b)`, `a\|neg_`, `a\|concat_(b)` |
//! | `a < b`, `a in b`, `a < b < c` | `a\|lt_(b)`, `a\|in_(b)`, `a\|chain_('lt_', b, 'lt_', c)` |
//! | `a[b]`, `a[b:c]` | `a\|item_(b)`, `a\|slice_(b, c, none)` |
//! | `a.items` without a call | `a\|attribute_('items')`: a method is a value, too |
//! | `with a = 1, b = a` | `with (a, b) = (1, a)` |
//! | `for x in a` | `for x in a\|iterate_`: all items, so that `loop.last` is known |
//! | `macro m(a, b=a)` | `macro m(a, b)`, then `set b = a` where `b` was not given |
//!
//! What does not parse stays as it is, and minijinja says what is wrong with it.

use std::collections::{BTreeMap, BTreeSet};

use super::methods;

/// Deepest nesting of expressions; minijinja takes 150 levels.
const DEPTH_MAX: usize = 140;
/// The template in the dialect of minijinja.
///
/// # Errors
/// Names a statement of Jinja2 that is not supported.
pub fn rewritten(template: &str) -> Result<String, String> {
    let mut out = String::with_capacity(template.len() * 2);
    let mut known = Known::default();
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
        let whole = &rest[at..at + length];
        out.push_str(&rest[..at]);
        rest = &rest[at + length..];
        if whole.len() < 4 || whole.starts_with("{#") {
            out.push_str(whole);
            continue;
        }
        if whole[2..].trim_start_matches(['-', '+', ' ', '\t', '\n']).starts_with("raw") {
            if whole.ends_with("+%}") {
                return Err("`{% raw +%}` is not supported in chat templates".to_string());
            }
            out.push_str(whole);
            // Jinja2 trims no line break after this tag.
            if rest.starts_with('\n') && !whole.ends_with("-%}") {
                out.push('\n');
            }
            let end = rest.find("endraw").unwrap_or(rest.len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        match known.block(whole) {
            Ok(text) => out.push_str(&text),
            Err(Fault::Syntax) => out.push_str(whole),
            Err(Fault::Unsupported(what)) => return Err(what),
        }
    }
    Ok(out + rest)
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

/// Why a block is not rewritten.
enum Fault {
    /// It is no Jinja2, or none that this grammar knows.
    Syntax,
    /// It is Jinja2 that is refused, by its name.
    Unsupported(String),
}

type Parsed<T> = Result<T, Fault>;

/// What earlier blocks of a template define.
#[derive(Default)]
struct Known {
    /// The parameters of each macro, and which of them have a default.
    macros: BTreeMap<String, Vec<(String, bool)>>,
    /// Variables that are namespaces: their attributes are no methods.
    namespaces: BTreeSet<String>,
}

impl Known {
    /// A block of the template, with its marks.
    fn block(&mut self, whole: &str) -> Parsed<String> {
        let (open, inside, close) = (&whole[..2], &whole[2..whole.len() - 2], &whole[whole.len() - 2..]);
        let inside_after = inside.strip_prefix(['-', '+']).unwrap_or(inside);
        let before = &inside[..inside.len() - inside_after.len()];
        let inside = inside_after.strip_suffix(['-', '+']).unwrap_or(inside_after);
        let after = &inside_after[inside.len()..];
        let mut parser = Parser { tokens: tokens(inside).ok_or(Fault::Syntax)?, at: 0, depth: 0, known: self };
        let (text, then) = match open {
            "{{" => (parser.tuple(true)?.text, vec![]),
            _ => parser.statement()?,
        };
        if parser.now() != Token::End {
            return Err(Fault::Syntax);
        }
        let mut out = format!("{open}{before} {text} ");
        for set in then {
            out.push_str(&format!("{close}{open} {set} "));
        }
        // Line numbers of errors stay those of the template.
        out.extend(inside.chars().filter(|c| *c == '\n'));
        Ok(out + after + close)
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Token<'a> {
    Name(&'a str),
    Number(&'a str),
    Text(&'a str),
    Mark(&'a str),
    End,
}

fn tokens(text: &str) -> Option<Vec<Token<'_>>> {
    let mut out = vec![];
    let mut at = 0;
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        let (token, length) = match c {
            _ if c.is_whitespace() => {
                at += c.len_utf8();
                continue;
            }
            '\'' | '"' => {
                let length = literal(rest)?;
                (Token::Text(&rest[..length]), length)
            }
            '0'..='9' => {
                let length = number(rest, out.last() == Some(&Token::Mark(".")));
                (Token::Number(&rest[..length]), length)
            }
            _ if is_name(c) => {
                let length = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
                (Token::Name(&rest[..length]), length)
            }
            _ => {
                let two = rest.get(..2).filter(|two| ["==", "!=", "<=", ">=", "//", "**"].contains(two));
                let length = two.map_or(1, str::len);
                if !"+-*/%~<>=()[]{}.,:|!".contains(c) {
                    return None;
                }
                (Token::Mark(&rest[..length]), length)
            }
        };
        out.push(token);
        at += length;
    }
    Some(out)
}

/// Length of the number at the beginning of a text. After a dot it is an index: digits alone.
fn number(text: &str, is_index: bool) -> usize {
    let digits = |from: usize| {
        text[from..].find(|c: char| !(c.is_ascii_digit() || c == '_')).map_or(text.len(), |length| from + length)
    };
    if let Some(b'x' | b'X' | b'o' | b'O' | b'b' | b'B') = text.as_bytes().get(1)
        && text.starts_with('0')
    {
        return 2 + text[2..].find(|c: char| !(c.is_ascii_hexdigit() || c == '_')).unwrap_or(text.len() - 2);
    }
    let is_digit = |at: usize| text.as_bytes().get(at).is_some_and(u8::is_ascii_digit);
    let mut end = digits(0);
    if is_index {
        return end;
    }
    if text[end..].starts_with('.') && is_digit(end + 1) {
        end = digits(end + 1);
    }
    if text[end..].starts_with(['e', 'E']) {
        let sign = usize::from(text[end + 1..].starts_with(['+', '-']));
        if is_digit(end + 1 + sign) {
            end = digits(end + 1 + sign);
        }
    }
    end
}

/// How tightly the parts of a written expression hold together.
#[derive(Clone, Copy, PartialEq)]
enum Level {
    /// A name, a literal, a call: attributes and items may follow.
    Primary,
    /// Filters may follow.
    Filtered,
    /// `and`, `or`, `not`, `if`.
    Loose,
}

/// An expression in the dialect of minijinja.
struct Written {
    text: String,
    level: Level,
}

impl Written {
    fn new(text: impl Into<String>, level: Level) -> Written {
        Written { text: text.into(), level }
    }

    fn primary(text: impl Into<String>) -> Written {
        Written::new(text, Level::Primary)
    }

    /// With brackets unless attributes may follow it as it is.
    fn tight(self) -> String {
        if self.level == Level::Primary { self.text } else { format!("({})", self.text) }
    }

    fn filtered(self) -> String {
        if self.level == Level::Loose { format!("({})", self.text) } else { self.text }
    }

    fn filter(self, name: &str, arguments: &[&str]) -> Written {
        let arguments = if arguments.is_empty() { String::new() } else { format!("({})", arguments.join(", ")) };
        Written::new(format!("{}|{name}{arguments}", self.filtered()), Level::Filtered)
    }
}

struct Parser<'a, 'k> {
    tokens: Vec<Token<'a>>,
    at: usize,
    depth: usize,
    known: &'k mut Known,
}

impl<'a> Parser<'a, '_> {
    fn now(&self) -> Token<'a> {
        self.tokens.get(self.at).copied().unwrap_or(Token::End)
    }

    fn next(&mut self) -> Token<'a> {
        let token = self.now();
        self.at += 1;
        token
    }

    fn is(&self, mark: &str) -> bool {
        self.now() == Token::Mark(mark)
    }

    fn eat(&mut self, mark: &str) -> bool {
        let is = self.is(mark);
        self.at += usize::from(is);
        is
    }

    fn eat_name(&mut self, name: &str) -> bool {
        let is = self.now() == Token::Name(name);
        self.at += usize::from(is);
        is
    }

    fn expect(&mut self, mark: &str) -> Parsed<()> {
        if self.eat(mark) { Ok(()) } else { Err(Fault::Syntax) }
    }

    fn name(&mut self) -> Parsed<&'a str> {
        match self.next() {
            Token::Name(name) => Ok(name),
            _ => Err(Fault::Syntax),
        }
    }

    fn deeper(&mut self) -> Parsed<()> {
        self.depth += 1;
        match self.depth > DEPTH_MAX {
            true => Err(Fault::Unsupported(format!("an expression has more than {DEPTH_MAX} levels"))),
            false => Ok(()),
        }
    }

    /// A statement, and the assignments that follow it.
    fn statement(&mut self) -> Parsed<(String, Vec<String>)> {
        let keyword = self.name()?;
        let text = match keyword {
            "if" | "elif" => format!("{keyword} {}", self.tuple(false)?.text),
            "for" => self.for_loop()?,
            "set" => self.set()?,
            "macro" => return self.macro_head(),
            "call" => {
                let parameters = if self.is("(") { self.parameters()? } else { vec![] };
                let parameters: Vec<String> = parameters.into_iter().map(Parameter::written).collect();
                let parameters =
                    if parameters.is_empty() { String::new() } else { format!("({})", parameters.join(", ")) };
                format!("call{parameters} {}", self.expression()?.text)
            }
            "filter" => {
                let name = self.dotted_name()?;
                let arguments = if self.is("(") { self.arguments(None)? } else { String::new() };
                format!("filter {}", self.filters(Written::new(format!("{name}{arguments}"), Level::Filtered))?.text)
            }
            "with" => {
                // All values are those outside of the block.
                let (mut targets, mut values) = (vec![], vec![]);
                while self.now() != Token::End {
                    let target = self.name()?;
                    self.expect("=")?;
                    targets.push(target);
                    values.push(self.expression()?.filtered());
                    if !self.eat(",") {
                        break;
                    }
                }
                match targets.len() {
                    0 => "with".to_string(),
                    1 => format!("with {} = {}", targets[0], values[0]),
                    _ => format!("with ({}) = ({})", targets.join(", "), values.join(", ")),
                }
            }
            "autoescape" | "do" => {
                return Err(Fault::Unsupported(format!("`{{% {keyword} %}}` is not supported in chat templates")));
            }
            _ => return Err(Fault::Syntax),
        };
        Ok((text, vec![]))
    }

    /// The tokens up to one of some marks or to `in`: names, brackets, commas and dots.
    fn target(&mut self, ends: &[&str]) -> Parsed<String> {
        let mut out = String::new();
        loop {
            match self.now() {
                Token::Name("in") => break,
                Token::Mark(mark) if ends.contains(&mark) => break,
                Token::End => break,
                Token::Name(name) => out.push_str(name),
                Token::Mark(mark @ ("(" | ")" | "," | ".")) => out.push_str(mark),
                _ => return Err(Fault::Syntax),
            }
            self.at += 1;
        }
        if out.is_empty() { Err(Fault::Syntax) } else { Ok(out) }
    }

    fn for_loop(&mut self) -> Parsed<String> {
        let target = self.target(&[])?;
        if !self.eat_name("in") {
            return Err(Fault::Syntax);
        }
        let items = self.tuple(false)?.filter("iterate_", &[]).text;
        let mut text = format!("for {target} in {items}");
        if self.eat_name("if") {
            text.push_str(&format!(" if {}", self.expression()?.text));
        }
        if self.eat_name("recursive") {
            text.push_str(" recursive");
        }
        Ok(text)
    }

    fn set(&mut self) -> Parsed<String> {
        let target = self.target(&["=", "|"])?;
        if self.eat("=") {
            if self.now() == Token::Name("namespace") {
                self.known.namespaces.insert(target.clone());
            }
            return Ok(format!("set {target} = {}", self.tuple(true)?.text));
        }
        Ok(format!("set {}", self.filters(Written::new(target, Level::Filtered))?.text))
    }

    /// Defaults become assignments after the head, where they see the parameters.
    fn macro_head(&mut self) -> Parsed<(String, Vec<String>)> {
        let name = self.name()?;
        let parameters = self.parameters()?;
        let sets = parameters.iter().filter_map(|Parameter { name, default }| {
            let default = default.as_ref()?;
            Some(format!("set {name} = ({default}) if {name} is undefined else {name}|received_"))
        });
        let names: Vec<&str> = parameters.iter().map(|parameter| parameter.name).collect();
        let head = (format!("macro {name}({})", names.join(", ")), sets.collect());
        let known = parameters.iter().map(|parameter| (parameter.name.to_string(), parameter.default.is_some()));
        self.known.macros.insert(name.to_string(), known.collect());
        Ok(head)
    }

    fn parameters(&mut self) -> Parsed<Vec<Parameter<'a>>> {
        self.expect("(")?;
        let mut parameters = vec![];
        while !self.eat(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
            }
            let name = self.name()?;
            let default = if self.eat("=") { Some(self.expression()?.text) } else { None };
            parameters.push(Parameter { name, default });
        }
        Ok(parameters)
    }

    /// An expression, or several with commas between them: a tuple.
    fn tuple(&mut self, conditional: bool) -> Parsed<Written> {
        let item = |parser: &mut Self| if conditional { parser.expression() } else { parser.or() };
        let first = item(self)?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut items = first.text;
        while self.eat(",") {
            items.push(',');
            if self.now() == Token::End || self.is(")") {
                break;
            }
            items.push(' ');
            items.push_str(&item(self)?.text);
        }
        Ok(Written::primary(format!("({items})")))
    }

    fn expression(&mut self) -> Parsed<Written> {
        self.deeper()?;
        let mut value = self.or()?;
        while self.eat_name("if") {
            let condition = self.or()?.filtered();
            let other =
                if self.eat_name("else") { format!(" else {}", self.expression()?.filtered()) } else { String::new() };
            value = Written::new(format!("{} if {condition}{other}", value.filtered()), Level::Loose);
        }
        self.depth -= 1;
        Ok(value)
    }

    fn or(&mut self) -> Parsed<Written> {
        self.joined("or", |parser| parser.joined("and", Parser::not))
    }

    fn joined(&mut self, word: &str, part: impl Fn(&mut Self) -> Parsed<Written>) -> Parsed<Written> {
        let first = part(self)?;
        if self.now() != Token::Name(word) {
            return Ok(first);
        }
        let mut text = first.filtered();
        while self.eat_name(word) {
            text = format!("{text} {word} {}", part(self)?.filtered());
        }
        Ok(Written::new(text, Level::Loose))
    }

    fn not(&mut self) -> Parsed<Written> {
        if !self.eat_name("not") {
            return self.comparison();
        }
        self.deeper()?;
        let value = self.not()?.filtered();
        self.depth -= 1;
        Ok(Written::new(format!("not {value}"), Level::Loose))
    }

    fn comparison(&mut self) -> Parsed<Written> {
        let left = self.sum()?;
        let mut parts: Vec<(&str, String)> = vec![];
        loop {
            let name = match self.now() {
                Token::Mark("==") => "eq_",
                Token::Mark("!=") => "ne_",
                Token::Mark("<") => "lt_",
                Token::Mark("<=") => "le_",
                Token::Mark(">") => "gt_",
                Token::Mark(">=") => "ge_",
                Token::Name("in") => "in_",
                Token::Name("not") if self.tokens.get(self.at + 1) == Some(&Token::Name("in")) => {
                    self.at += 1;
                    "not_in_"
                }
                _ => break,
            };
            self.at += 1;
            parts.push((name, self.sum()?.text));
        }
        Ok(match &parts[..] {
            [] => left,
            [(name, right)] => left.filter(name, &[right]),
            _ => {
                let parts: Vec<String> = parts.iter().map(|(name, right)| format!("'{name}', {right}")).collect();
                left.filter("chain_", &[&parts.join(", ")])
            }
        })
    }

    fn sum(&mut self) -> Parsed<Written> {
        let mut value = self.concatenation()?;
        loop {
            let name = match self.now() {
                Token::Mark("+") => "add_",
                Token::Mark("-") => "sub_",
                _ => return Ok(value),
            };
            self.at += 1;
            value = value.filter(name, &[&self.concatenation()?.text]);
        }
    }

    fn concatenation(&mut self) -> Parsed<Written> {
        let mut value = self.product()?;
        while self.eat("~") {
            value = value.filter("concat_", &[&self.product()?.text]);
        }
        Ok(value)
    }

    fn product(&mut self) -> Parsed<Written> {
        let mut value = self.power()?;
        loop {
            let name = match self.now() {
                Token::Mark("*") => "mul_",
                Token::Mark("/") => "div_",
                Token::Mark("//") => "floor_",
                Token::Mark("%") => "mod_",
                _ => return Ok(value),
            };
            self.at += 1;
            value = value.filter(name, &[&self.power()?.text]);
        }
    }

    fn power(&mut self) -> Parsed<Written> {
        let mut value = self.unary(true)?;
        while self.eat("**") {
            // Jinja2 writes `-2` without brackets, and Python then reads `-(2 ** b)`.
            let of_literal =
                value.text.starts_with(|c: char| c.is_ascii_digit()) || value.text.starts_with(['t', 'T', 'f', 'F']);
            if of_literal && value.text.ends_with("|neg_") {
                return Err(Fault::Unsupported(
                    "`**` after a negative number is not supported in chat templates".to_string(),
                ));
            }
            value = value.filter("pow_", &[&self.unary(true)?.text]);
        }
        Ok(value)
    }

    fn unary(&mut self, with_filters: bool) -> Parsed<Written> {
        self.deeper()?;
        let value = match self.now() {
            Token::Mark(mark @ ("-" | "+")) => {
                self.at += 1;
                let value = self.unary(false)?.filter(if mark == "-" { "neg_" } else { "pos_" }, &[]);
                self.postfix(value)?
            }
            _ => {
                let value = self.primary()?;
                self.postfix(value)?
            }
        };
        self.depth -= 1;
        if with_filters { self.filters(value) } else { Ok(value) }
    }

    fn primary(&mut self) -> Parsed<Written> {
        Ok(Written::primary(match self.next() {
            Token::Name("not" | "and" | "or" | "if" | "else" | "in" | "is") => return Err(Fault::Syntax),
            Token::Name(name) => name.to_string(),
            Token::Number(number) => number.to_string(),
            Token::Text(text) => {
                let mut value = Written::primary(escapes(text)?);
                while let Token::Text(text) = self.now() {
                    self.at += 1;
                    value = value.filter("concat_", &[&escapes(text)?]);
                }
                return Ok(value);
            }
            Token::Mark("(") => {
                if self.eat(")") {
                    return Ok(Written::primary("()"));
                }
                let inside = self.tuple(true)?;
                self.expect(")")?;
                return Ok(inside);
            }
            Token::Mark("[") => {
                let mut items = vec![];
                while !self.eat("]") {
                    if !items.is_empty() {
                        self.expect(",")?;
                        if self.eat("]") {
                            break;
                        }
                    }
                    items.push(self.expression()?.text);
                }
                format!("[{}]", items.join(", "))
            }
            Token::Mark("{") => {
                let mut items = vec![];
                while !self.eat("}") {
                    if !items.is_empty() {
                        self.expect(",")?;
                        if self.eat("}") {
                            break;
                        }
                    }
                    let key = self.expression()?.text;
                    self.expect(":")?;
                    items.push(format!("{key}: {}", self.expression()?.text));
                }
                // A space: `{{` and `}}` would be marks of a block.
                format!("{{ {} }}", items.join(", "))
            }
            _ => return Err(Fault::Syntax),
        }))
    }

    /// Attributes, items and calls.
    fn postfix(&mut self, mut value: Written) -> Parsed<Written> {
        loop {
            if self.eat(".") {
                value = match self.next() {
                    Token::Number(index) => value.filter("item_", &[index]),
                    Token::Name(name) => self.attribute(value, name)?,
                    _ => return Err(Fault::Syntax),
                };
            } else if self.eat("[") {
                value = self.item(value)?;
            } else if self.is("(") {
                let callee = value.tight();
                value = Written::primary(format!("{callee}{}", self.arguments(Some(&callee))?));
            } else {
                return Ok(value);
            }
        }
    }

    fn attribute(&mut self, value: Written, name: &str) -> Parsed<Written> {
        let is_object = ["loop", "self"].contains(&&*value.text) || self.known.namespaces.contains(&value.text);
        let subject = value.tight();
        if methods::is_name(name) && !is_object && !self.is("(") {
            return Ok(Written::primary(subject).filter("attribute_", &[&format!("'{name}'")]));
        }
        let arguments = if self.is("(") { self.arguments(None)? } else { String::new() };
        Ok(Written::primary(format!("{subject}.{name}{arguments}")))
    }

    /// What follows `[`.
    fn item(&mut self, value: Written) -> Parsed<Written> {
        let mut parts: Vec<Option<String>> = vec![None];
        loop {
            match self.now() {
                Token::Mark("]") => break,
                Token::Mark(":") => {
                    self.at += 1;
                    parts.push(None);
                }
                _ => {
                    let part = self.expression()?.text;
                    match parts.last_mut() {
                        Some(last @ None) => *last = Some(part),
                        _ => return Err(Fault::Syntax),
                    }
                }
            }
        }
        self.expect("]")?;
        let or_none = |at: usize| parts.get(at).cloned().flatten().unwrap_or_else(|| "none".to_string());
        match &parts[..] {
            [Some(key)] => Ok(value.filter("item_", &[key])),
            [_, _] | [_, _, _] => Ok(value.filter("slice_", &[&or_none(0), &or_none(1), &or_none(2)])),
            _ => Err(Fault::Syntax),
        }
    }

    /// The arguments of a call, in brackets. A macro must tell what is not defined from what is not given.
    fn arguments(&mut self, callee: Option<&str>) -> Parsed<String> {
        self.expect("(")?;
        let parameters = callee.and_then(|name| self.known.macros.get(name)).cloned().unwrap_or_default();
        let mut arguments: Vec<String> = vec![];
        while !self.eat(")") {
            if !arguments.is_empty() {
                self.expect(",")?;
                if self.eat(")") {
                    break;
                }
            }
            let stars = ["**", "*"].into_iter().find(|stars| self.eat(stars));
            let keyword = match (self.now(), self.tokens.get(self.at + 1)) {
                (Token::Name(name), Some(Token::Mark("="))) if stars.is_none() => {
                    self.at += 2;
                    Some(name)
                }
                _ => None,
            };
            let mut value = self.expression()?;
            let parameter = match keyword {
                Some(keyword) => parameters.iter().find(|(name, _)| name == keyword),
                None => parameters.get(arguments.len()),
            };
            if stars.is_none() && parameter.is_some_and(|(_, has_default)| *has_default) {
                value = value.filter("given_", &[]);
            }
            let name = keyword.map(|name| format!("{name}=")).unwrap_or_default();
            arguments.push(format!("{}{name}{}", stars.unwrap_or_default(), value.text));
        }
        Ok(format!("({})", arguments.join(", ")))
    }

    fn dotted_name(&mut self) -> Parsed<String> {
        let mut name = self.name()?.to_string();
        while self.eat(".") {
            name = format!("{name}.{}", self.name()?);
        }
        Ok(name)
    }

    /// Filters, tests, and calls of what they give.
    fn filters(&mut self, mut value: Written) -> Parsed<Written> {
        loop {
            if self.eat("|") {
                let name = self.dotted_name()?;
                let arguments = if self.is("(") { self.arguments(None)? } else { String::new() };
                value = Written::new(format!("{}|{name}{arguments}", value.filtered()), Level::Filtered);
            } else if self.eat_name("is") {
                value = self.test(value)?;
            } else if self.is("(") {
                let callee = value.tight();
                value = Written::primary(format!("{callee}{}", self.arguments(None)?));
            } else {
                return Ok(value);
            }
        }
    }

    fn test(&mut self, value: Written) -> Parsed<Written> {
        let negated = if self.eat_name("not") { "not " } else { "" };
        let name = self.dotted_name()?;
        let takes_one = match self.now() {
            Token::Name(word) => !["else", "or", "and", "is", "if", "in", "not"].contains(&word),
            Token::Number(_) | Token::Text(_) => true,
            Token::Mark(mark) => ["[", "{"].contains(&mark),
            Token::End => false,
        };
        let arguments = if self.is("(") {
            self.arguments(None)?
        } else if takes_one {
            let value = self.primary()?;
            format!("({})", self.postfix(value)?.text)
        } else {
            String::new()
        };
        Ok(Written::primary(format!("({} is {negated}{name}{arguments})", value.filtered())))
    }
}

/// A parameter of a macro.
struct Parameter<'a> {
    name: &'a str,
    default: Option<String>,
}

impl Parameter<'_> {
    fn written(self) -> String {
        match self.default {
            Some(default) => format!("{}={default}", self.name),
            None => self.name.to_string(),
        }
    }
}

/// A text literal with the escapes of Python that minijinja has otherwise or lacks.
fn escapes(literal: &str) -> Parsed<String> {
    let mut out = String::with_capacity(literal.len());
    let mut rest = literal;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let Some(c) = rest[at + 1..].chars().next() else { break };
        let mut length = 1 + c.len_utf8();
        match c {
            '\\' | '\'' | '"' | 'n' | 'r' | 't' => out.push_str(&rest[at..at + length]),
            'a' => out.push_str("\\x07"),
            'b' => out.push_str("\\x08"),
            'v' => out.push_str("\\x0b"),
            'f' => out.push_str("\\x0c"),
            '\n' => {}
            '0'..='7' => {
                let digits = rest[at + 1..].bytes().take(3).take_while(|byte| (b'0'..=b'7').contains(byte)).count();
                let code = u32::from_str_radix(&rest[at + 1..at + 1 + digits], 8).map_err(|_| Fault::Syntax)?;
                out.push_str(&format!("\\u{code:04x}"));
                length = 1 + digits;
            }
            'x' | 'u' | 'U' => {
                let digits = match c {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let hex = rest.get(at + 2..at + 2 + digits).ok_or(Fault::Syntax)?;
                let code = u32::from_str_radix(hex, 16).map_err(|_| Fault::Syntax)?;
                match (c, char::from_u32(code)) {
                    ('U', Some(c)) => out.push(c),
                    ('U', None) => return Err(Fault::Syntax),
                    // Surrogates stay: two of them are one character.
                    _ => out.push_str(&format!("\\u{code:04x}")),
                }
                length += digits;
            }
            'N' => {
                return Err(Fault::Unsupported("`\\N{...}` in a text is not supported in chat templates".to_string()));
            }
            _ => out.push_str(&format!("\\\\{c}")),
        }
        rest = &rest[at + length..];
    }
    Ok(out + rest)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::UNIX_EPOCH;

    use super::rewritten;
    use crate::tokenizer::jinja::{chain, render};

    #[test]
    fn operators_become_filters() {
        for (template, expected) in [
            ("{{ '%s' % a }}", "{{ '%s'|mod_(a) }}"),
            ("{{- a ~ b[0].c('}}') | upper -}}", "{{- a|concat_((b|item_(0)).c('}}')|upper) -}}"),
            ("{{ a + b * -c.d ** 2 }}", "{{ a|add_(b|mul_(c.d|neg_|pow_(2))) }}"),
            ("{% if a < b <= c and not d in e %}", "{% if a|chain_('lt_', b, 'le_', c) and (not d|in_(e)) %}"),
            (
                "{{ a[::-1] }}{{ a[b:] }}{{ a.0 }}",
                "{{ a|slice_(none, none, 1|neg_) }}{{ a|slice_(b, none, none) }}{{ a|item_(0) }}",
            ),
            (
                "{% for m in a[1:] if m.items %}",
                "{% for m in a|slice_(1, none, none)|iterate_ if m|attribute_('items') %}",
            ),
            ("{{ d.items() }}{{ loop.index }}", "{{ d.items() }}{{ loop.index }}"),
            ("{{ a is not divisibleby 3 or (b, c)[0] }}", "{{ (a is not divisibleby(3)) or (b, c)|item_(0) }}"),
            (
                "{%- macro m(a, b=a) -%}\n{{ m(1, c) }}",
                "{%- macro m(a, b) %}{% set b = (a) if b is undefined else b|received_ -%}\n{{ m(1, c|given_) }}",
            ),
            ("{{ {'a': 1,\n'b': [1, 2,]} }} {# '%s' % a #}", "{{ { 'a': 1, 'b': [1, 2] } \n}} {# '%s' % a #}"),
            ("{% raw %}\n{{ a % b }}{% endraw %}", "{% raw %}\n\n{{ a % b }}{% endraw %}"),
            ("{{ 'open", "{{ 'open"),
            ("{{ a b }}{% else %}{", "{{ a b }}{% else %}{"),
        ] {
            assert_eq!(rewritten(template).as_deref(), Ok(expected), "{template}");
        }
    }

    fn rendered(template: &str) -> Result<String, String> {
        render(template, BTreeMap::new(), UNIX_EPOCH).map_err(|error| chain(&error))
    }

    /// Expressions, and what CPython 3.11 with Jinja2 3.1.6 makes of them.
    const EXPRESSIONS: &[(&str, &str)] = &[
        ("[1 < 2 < 3, 1 < 3 < 2, 1 <= 1 != 0 == false, 2 > 1 in [1]]", "[True, False, True, True]"),
        ("[(1 == 1) <= 0.5, true + 1, 1 == true, (1, 2) == [1, 2], [1.0] == [true]]", "[False, 2, True, False, True]"),
        (
            "-7 // 2 ~ ' ' ~ -7 % 3 ~ ' ' ~ 7 / 2 ~ ' ' ~ 2 ** -1 ~ ' ' ~ -7.5 // 2 ~ ' ' ~ 2 ** 3 ** 2",
            "-4 2 3.5 0.5 -4.0 64",
        ),
        (
            "'ab' * 2 ~ [1] * 2 ~ ((1,) + (2,)) ~ (([1] + [2]) is sequence) ~ ([1, 2][1:] is sequence)",
            "abab[1, 1](1, 2)TrueTrue",
        ),
        ("[1, 2][1:] | tojson ~ ([1] + [2]) | tojson", "[2][1, 2]"),
        ("'<' | e + '<'", "&lt;&lt;"),
        ("'<a>' + {'b': '<c>'} | tojson | safe + '</a>'", r#"&lt;a&gt;{"b": "<c>"}&lt;/a&gt;"#),
        (
            "('<' | e)[0] + '<' ~ ['<' | e] ~ (('<' | e).upper() + '>') ~ '<' | e | forceescape",
            "&&lt;[Markup(&#39;&amp;lt;&#39;)]&amp;LT;&amp;gt;&amp;amp;lt;",
        ),
        (
            "{'a': 1}.items() ~ {'a': 1}.keys() ~ {'a': 1}.values()",
            "dict_items([('a', 1)])dict_keys(['a'])dict_values([1])",
        ),
        (
            "range(3) ~ range(1, 9, 2)[1:] ~ range(3) | list ~ (range(3) is sequence)",
            "range(0, 3)range(3, 9, 2)[0, 1, 2]True",
        ),
        (
            "[{}.items is defined, {}.foo is defined, 'a'.upper is callable, {}.get('a') is none]",
            "[True, False, True, True]",
        ),
        ("'y' if {'keys': 0}.keys else 'n'", "y"),
        ("{'items': 5}['items'] ~ ('y' if {}['items'] else 'n')", "5y"),
        ("[].append is defined ~ ('y' if {'pop': 1}.pop else 'n')", "Falsen"),
        ("[z, 1]", "[Undefined, 1]"),
        ("{'a': 1, 'b': 2} | reverse | list", "['b', 'a']"),
        ("{'a': 1}.keys()[0] ~ '|' ~ {'a': 1} | attr('a')", "|"),
        ("[1, 'a', true, 1.0, 'A', none] | unique | list", "[1, 'a', None]"),
        (
            "['b', 'A', 'c'] | sort ~ ['b', 'A'] | sort(true) ~ ['b', 'A'] | max ~ ['b', 'B'] | max",
            "['A', 'b', 'c']['b', 'A']bb",
        ),
        (
            "[{'r': 'b', 'n': 2}, {'r': 'User', 'n': 1}, {'r': 'user', 'n': 3}] | groupby('r') | map('first') | list",
            "['b', 'User']",
        ),
        (
            "[{'r': 'A', 'n': 1}, {'r': 'a', 'n': 2}] | groupby('r')",
            "[('A', [{'r': 'A', 'n': 1}, {'r': 'a', 'n': 2}])]",
        ),
        ("[{'r': 'A'}, {'r': 'a'}] | groupby('r', case_sensitive=true) | length", "2"),
        ("2.5 | round ~ 3 | round(1, 'floor') ~ -3 | round(0, 'ceil') ~ 2.675 | round(2)", "2.03.0-3.02.67"),
        ("[1.5, 2] | sum ~ [{'a': 1}, {'a': 2}] | sum('a', 10)", "3.513"),
        ("'straße ﬁn ǆ'.title() ~ 'ﬁx' | capitalize ~ 'ﬁx' | title ~ 'ﬁx' | upper", "Straße Fin ǅFixFIxFIX"),
        ("'ΑΣ ΣΑ'.lower() ~ 'ΑΣ'.title() ~ 'ΑΣ' | capitalize ~ 'ŉ ა'.title() ~ 'ᾳᾀ'.title()", "ας σαΑςΑςʼN აᾼᾀ"),
        (
            "['²'.isdigit(), '½'.isdigit(), '½'.isnumeric(), '五'.isnumeric(), 'ⅷ'.isalpha(), 'ǅ'.isupper()]",
            "[True, False, True, True, False, False]",
        ),
        (
            "['A1'.istitle(), 'a b'.isprintable(), '٣'.isdecimal(), 5 is lower, 'Ab' is upper]",
            "[True, True, True, False, False]",
        ),
        (r#"'a' 'b' ~ "it's" ~ 'x\x41\101\u0042'"#, "abit'sxAAB"),
        ("-2 | abs ~ (not 1 == 2) ~ (1 if false) ~ (5 is divisibleby 5)", "2TrueTrue"),
        (
            "[none is iterable, 1 is iterable, '' is iterable, {} is iterable, z is iterable]",
            "[False, False, True, True, True]",
        ),
        ("'one ⓐ two½' | wordcount", "2"),
    ];

    /// Templates, in the same way.
    const TEMPLATES: &[(&str, &str)] = &[
        ("{% macro m(a, b=a) %}{{ a }}-{{ b }}{% endmacro %}{{ m(3) }}|{{ m(3, 4) }}|{{ m(a=5) }}", "3-3|3-4|5-5"),
        (
            "{% set c = 9 %}{% macro m(a, b=c, c=a) %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(3) }}|{{ m(3, c=4) }}",
            "3--3|3-4-4",
        ),
        (
            "{% macro m(a, b='d') %}{{ a }}-{{ b }}{% endmacro %}{{ m(z) }}|{{ m(1, z) }}|{{ m(1, b=z) }}|{{ m(1, none) }}",
            "-d|1-|1-|1-None",
        ),
        ("{% macro m(a, b=1) -%}\n  {{ b }}\n{%- endmacro %}{{ m(2) }}{{ m }}", "1<Macro 'm'>"),
        ("{% for c in 'añ' %}{{ c }}{{ loop.revindex }}{% if not loop.last %},{% endif %}{% endfor %}", "a2,ñ1"),
        (
            "{% for k in {'a': 1, 'b': 2}.keys() %}{{ loop.length }}{{ loop.last }}{% endfor %}{% for x in z %}1{% else %}0{% endfor %}",
            "2False2True0",
        ),
        ("{% set a = 5 %}{% with a = 1, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}", "155"),
        ("{% raw %}\n{{ a }}{% endraw %}\n|{% raw -%}\n b{% endraw %}", "\n{{ a }}|b"),
        (
            "{% set ns = namespace(items=[], count=0) %}{% for x in [1, 2] %}{% set ns.items = ns.items + [x] %}{% set ns.count = ns.count + x %}{% endfor %}{{ ns.items }}{{ ns.count }}",
            "[1, 2]3",
        ),
        ("{% set f = 'ab'.upper %}{{ f() }}{% set x = 'a', 1 %}{{ x }}{% set a, b = 1, 2 %}{{ b }}", "AB('a', 1)2"),
        ("{% filter upper | trim %} a{{ 'b' ~ 1.0 }} {% endfilter %}{% set x | upper %}q{% endset %}{{ x }}", "AB1.0Q"),
        ("{% macro c() %}<{{ caller(1) }}>{% endmacro %}{% call(x, y=2) c() %}{{ x }}{% endcall %}", "<1>"),
        (
            "{% if [1, 2][1:] is sequence and not (z or 0) %}y{% elif 1 %}n{% endif %}{{ {'a': {'b': [1]}}.a.b.0 }}",
            "y1",
        ),
        ("{% for m in [{'c': [{'c': []}]}] recursive %}{{ loop.depth }}{{ loop(m.c) }}{% endfor %}", "12"),
    ];

    #[test]
    fn templates_give_the_text_of_jinja2() {
        for (expression, expected) in EXPRESSIONS {
            assert_eq!(rendered(&format!("{{{{ {expression} }}}}")).as_deref(), Ok(*expected), "{expression}");
        }
        for (template, expected) in TEMPLATES {
            assert_eq!(rendered(template).as_deref(), Ok(*expected), "{template}");
        }
    }

    #[test]
    fn what_would_differ_from_jinja2_is_refused() {
        for (template, expected) in [
            ("{% autoescape true %}a{% endautoescape %}", "`{% autoescape %}` is not supported"),
            ("{% do f() %}", "`{% do %}` is not supported"),
            ("{% raw +%}a{% endraw %}", "`{% raw +%}` is not supported"),
            ("{{ {'items': 1}.items }}", "the method `items` is printed, and not called"),
            ("{{ 'a' ~ {}.keys }}", "the method `keys` is printed"),
            ("{{ [1].append(2) }}", "no method named append"),
            ("{{ -2 ** n }}", "`**` after a negative number"),
            ("{{ 2 ** 500 }}", "more than 128 bits"),
            ("{{ ('%s' | e) % 'a' }}", "`%` of an escaped text"),
            ("{{ ('<' | e).replace('a', 'b') }}", "`replace` of an escaped text"),
            ("{{ 'a' + 1 }}", "`+` of string and number"),
            ("{{ missing + 1 }}", "`+` of undefined and number"),
            ("{{ 1 < 'a' }}", "`<` of number and string"),
            ("{{ [1, 'a'] | sort }}", "`<` of string and number"),
            ("{{ 1 in 5 }}", "expected a text, a list or a mapping"),
            ("{{ missing[1:] }}", "a slice of a value of the kind undefined"),
            ("{% for x in none %}{% endfor %}", "expected items"),
            ("{{ '%s' % (1, 2) }}", "expected 1 values, found 2"),
            ("{{ 'a' * 100000000 }}", "too long"),
            ("{{ 'a' is odd }}", "`%` of string and number"),
            (r"{{ '\N{BULLET}' }}", "is not supported"),
            ("\n{{ 'a'\n ~ \n'b' }}{{ nope() }}", "(in <string>:4)"),
        ] {
            let error = rendered(template).expect_err(template);
            assert!(error.contains(expected), "{template}: {error}");
        }
        let deep = |levels: usize| rendered(&format!("{{{{ {}1{} }}}}", "(".repeat(levels), ")".repeat(levels)));
        assert_eq!(deep(60).as_deref(), Ok("1"));
        assert!(deep(5000).is_err_and(|error| error.contains("levels")));
        let chained = format!("{{{{ {}1{} }}}}", "1 < (1 < ".repeat(30), ") < 1".repeat(30));
        assert!(rendered(&chained).is_ok(), "a comparison is written once");
    }
}
