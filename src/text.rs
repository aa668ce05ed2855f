//! Owns text for people: byte spans, errors with carets, escaping for terminals, and the nearest known word.

use std::borrow::Cow;
use std::fmt;
use std::io::IsTerminal;
use std::ops::Range;

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};

/// Bytes of a source text, half open.
pub type Span = Range<usize>;

/// Most faults rendered for one text; the rest is counted. People fix fewer than this before they try again.
const FAULTS_RENDERED_MAX: usize = 20;

/// Words longer than this have no nearest word: the distance is quadratic in their length, and such words are no typos.
const NEAREST_CHARS_MAX: usize = 64;

/// Whether a terminal interprets a character instead of printing it: control characters (escape sequences begin with one), marks
/// of bidirectional text, which reorder the text around them, and the line breaks of Unicode.
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped<'t>(text: &'t str, obeyed: impl Fn(char) -> bool) -> Cow<'t, str> {
    if !text.contains(&obeyed) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match obeyed(c) {
            true => safe.extend(c.escape_unicode()),
            false => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

/// Text that is safe for a terminal. Line breaks and tabs stay; every other character that a terminal interprets is written as its
/// number, `\u{1b}`. A second application changes nothing.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped(text, |c| is_obeyed(c) && c != '\n' && c != '\t')
}

/// As [`printable`], on one line: for a name inside a message.
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escaped(text, is_obeyed)
}

/// As [`printable`], for text that a model wrote: marks of bidirectional text stay, because some languages need them.
pub fn printable_prose(text: &str) -> Cow<'_, str> {
    escaped(text, |c| c.is_control() && c != '\n' && c != '\t')
}

/// As [`printable`], for text that was coloured here: colours and weights stay. Text from untrusted files may then use colours, too,
/// but cannot hide, move or erase anything.
pub fn printable_painted(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\u{1b}') {
        let (before, sequence) = rest.split_at(at);
        safe.push_str(&printable(before));
        let end = paint_bytes(sequence).unwrap_or(1);
        let (sequence, after) = sequence.split_at(end);
        match end {
            1 => safe.push_str(&printable(sequence)),
            _ => safe.push_str(sequence),
        }
        rest = after;
    }
    safe.push_str(&printable(rest));
    safe
}

/// Length of the escape sequence at the start of `text` if it only changes style: reset, bold, underline, a colour except black.
fn paint_bytes(text: &str) -> Option<usize> {
    let parameters = text.strip_prefix("\u{1b}[")?;
    let end = parameters.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    let paints = |part: &str| {
        let number = if part.is_empty() { Ok(0) } else { part.parse::<u32>() };
        number.is_ok_and(|number| matches!(number, 0 | 1 | 4 | 22 | 24 | 31..=37 | 39 | 91..=97))
    };
    (parameters[end..].starts_with('m') && parameters[..end].split(';').all(paints)).then_some(end + 3)
}

/// JSON that is safe for a terminal: escaped by the rules of JSON, so that its meaning does not change.
pub fn printable_json(text: &str) -> Cow<'_, str> {
    let obeyed = |c| is_obeyed(c) && c != '\n';
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let escape = |c: char| if obeyed(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    Cow::Owned(text.chars().map(escape).collect())
}

/// Whether a rendering may use terminal colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Plain,
    Colour,
}

impl Style {
    /// Colours if stderr is a terminal, unless the environment refuses them.
    pub fn for_stderr() -> Self {
        if std::io::stderr().is_terminal() && !Style::is_refused() { Style::Colour } else { Style::Plain }
    }

    /// Whether `NO_COLOR` is set (<https://no-color.org>), or the terminal is one that shows colours as text.
    pub fn is_refused() -> bool {
        std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
            || std::env::var_os("TERM").is_some_and(|term| term == "dumb")
    }
}

/// One fault in a source text: what is wrong, where, what was expected there, and perhaps how to mend it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Lower-case fragment, names in backticks.
    pub title: String,
    /// Place of the carets. Clamped to the text when rendered, so a wrong span cannot panic.
    pub span: Span,
    /// Text beside the carets: what was expected, then what was found.
    pub label: String,
    pub help: Option<String>,
}

impl Diagnostic {
    pub fn new(title: impl Into<String>, span: Span, label: impl Into<String>) -> Self {
        Diagnostic { title: title.into(), span, label: label.into(), help: None }
    }

    pub fn with_help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Renders the fault with its line, without a leading `error: `, which `cli` writes.
    ///
    /// `name` is the file as the user called it, `text` its whole content.
    pub fn render(&self, name: &str, text: &str, style: Style) -> String {
        self.render_as(Level::ERROR.no_name(), name, text, style)
    }

    fn render_as(&self, level: Level<'_>, name: &str, text: &str, style: Style) -> String {
        let annotation = AnnotationKind::Primary.span(clamp(&self.span, text)).label(&self.label);
        let snippet = Snippet::source(text).path(name).fold(true).annotation(annotation);
        let mut group = level.primary_title(&self.title).element(snippet);
        if let Some(help) = &self.help {
            group = group.element(Level::HELP.message(help));
        }
        match style {
            Style::Plain => Renderer::plain().render(&[group]),
            Style::Colour => Renderer::styled().render(&[group]),
        }
    }
}

/// A text that was read and refused, with every fault that was found in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The file as the user called it.
    pub name: String,
    pub text: String,
    /// In the order of the text; never empty.
    pub faults: Vec<Diagnostic>,
}

impl Rejection {
    pub fn new(name: impl Into<String>, text: impl Into<String>, mut faults: Vec<Diagnostic>) -> Self {
        faults.sort_by_key(|fault| fault.span.start);
        Rejection { name: name.into(), text: text.into(), faults }
    }

    /// Renders the faults one below the other. The first has no leading `error: `, which `cli` writes; the others do.
    pub fn render(&self, style: Style) -> String {
        let mut blocks = Vec::new();
        for (i, fault) in self.faults.iter().take(FAULTS_RENDERED_MAX).enumerate() {
            let level = if i == 0 { Level::ERROR.no_name() } else { Level::ERROR };
            blocks.push(fault.render_as(level, &self.name, &self.text, style));
        }
        if self.faults.len() > FAULTS_RENDERED_MAX {
            blocks.push(format!("error: {} more faults in `{}`", self.faults.len() - FAULTS_RENDERED_MAX, self.name));
        }
        blocks.join("\n\n")
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(Style::Plain))
    }
}

impl std::error::Error for Rejection {}

/// Moves a span into the text and to character boundaries; the renderer panics on other spans.
fn clamp(span: &Span, text: &str) -> Span {
    let floor = |mut at: usize| {
        at = at.min(text.len());
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        at
    };
    let start = floor(span.start);
    start..floor(span.end).max(start)
}

/// The option that a user who typed `word` most likely meant, or none if no option is near; the earliest wins a tie.
///
/// An option is near if it differs, ignoring case, by at most one edit (insert, delete, replace, swap neighbours) per five characters
/// of the longer word, and one if it has three or four: `unk_token_id` is another name than `bos_token_id`, no slip. If none is, it is the only option that begins with the word or with which the word begins
/// (three characters at least).
pub fn nearest<'a>(word: &str, options: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let folded = |word: &str| -> String { word.to_lowercase().chars().take(NEAREST_CHARS_MAX + 1).collect() };
    let wanted = folded(word);
    let wanted_chars = wanted.chars().count();
    if wanted.is_empty() || wanted_chars > NEAREST_CHARS_MAX {
        return None;
    }
    let mut best: Option<(usize, &str)> = None;
    let mut extensions = Vec::new();
    for option in options {
        let known = folded(option);
        let known_chars = known.chars().count();
        // Levenshtein plus swaps of neighbours; no character is edited twice.
        let edits = strsim::osa_distance(&wanted, &known);
        let longer = wanted_chars.max(known_chars);
        if edits <= (longer / 5).max(longer.min(3) / 3) && best.is_none_or(|(least, _)| edits < least) {
            best = Some((edits, option));
        }
        if wanted_chars.min(known_chars) >= 3 && (known.starts_with(&wanted) || wanted.starts_with(&known)) {
            extensions.push(option);
        }
    }
    match (best, extensions.as_slice()) {
        (Some((_, option)), _) => Some(option),
        (None, [only]) => Some(only),
        (None, _) => None,
    }
}

/// Names in backticks, joined for a sentence: `` `a` ``, `` `a` or `b` ``, `` `a`, `b` or `c` ``.
pub fn one_of<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    match quoted.as_slice() {
        [] => "nothing".to_string(),
        [only] => only.clone(),
        [first @ .., last] => format!("{} or {last}", first.join(", ")),
    }
}

/// `1 row`, `3 rows`.
pub fn counted(count: u64, noun: &str) -> String {
    match (count, noun.strip_suffix('y')) {
        (1, _) => format!("1 {noun}"),
        (_, Some(stem)) => format!("{count} {stem}ies"),
        (_, None) => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_noun_has_the_number_of_its_count() {
        assert_eq!(counted(1, "entry"), "1 entry");
        assert_eq!(counted(0, "entry"), "0 entries");
        assert_eq!(counted(2, "row"), "2 rows");
    }

    #[test]
    fn what_a_terminal_obeys_is_shown() {
        let hostile = "a\u{1b}[31mb\u{9b}2J\u{7}\u{202e}c\u{2066}\u{7f}\r\n\td é 日 🦊";
        let shown = "a\\u{1b}[31mb\\u{9b}2J\\u{7}\\u{202e}c\\u{2066}\\u{7f}\\u{d}\n\td é 日 🦊";
        assert_eq!(printable(hostile), shown);
        assert_eq!(printable(shown), shown);
        assert_eq!(printable_line(hostile), shown.replace('\n', "\\u{a}").replace('\t', "\\u{9}"));
        assert_eq!(printable_prose("א\u{200f}\u{1b}c"), "א\u{200f}\\u{1b}c");
        assert!(matches!(printable("plain\n"), Cow::Borrowed(_)));
    }

    #[test]
    fn paint_stays_and_nothing_else_of_a_terminal() {
        let painted = "\u{1b}[1;31merror\u{1b}[0m: \u{1b}[1m\u{1b}[94mx\u{1b}[m";
        assert_eq!(printable_painted(painted), painted);
        for sequence in
            ["[2J", "[8m", "[30m", "[40m", "[38;5;0m", "[1;31", "[1;99999999999m", "]0;t\u{7}", "c", "", "["]
        {
            let shown = printable_painted(&format!("a\u{1b}{sequence}z"));
            assert!(!shown.contains(char::is_control) && shown.starts_with("a\\u{1b}"), "{sequence}: {shown}");
        }
    }

    #[test]
    fn json_means_what_it_meant() {
        let value = serde_json::json!({"k\u{1b}": "\u{9b}\u{202e}\u{7f}\n é"});
        let text = format!("{value:#}\n");
        let safe = printable_json(&text);
        assert!(!safe.contains(|c| is_obeyed(c) && c != '\n'), "{safe}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&safe).expect("JSON"), value);
    }

    #[test]
    fn a_fault_is_rendered_with_its_line_and_carets() {
        let text = "name = \"a\"\ncontxt_max = 64\n";
        let fault = Diagnostic::new("unknown key `contxt_max`", 11..21, "expected `context_max`").with_help("mend it");
        assert_eq!(
            fault.render("m.toml", text, Style::Plain),
            "unknown key `contxt_max`
 --> m.toml:2:1
  |
2 | contxt_max = 64
  | ^^^^^^^^^^ expected `context_max`
  |
  = help: mend it"
        );
    }

    #[test]
    fn faults_are_rendered_in_the_order_of_the_text_and_capped() {
        let text = "a = 1\nb = 2\n";
        let second = Diagnostic::new("bad `b`", 6..7, "here");
        let first = Diagnostic::new("bad `a`", 0..1, "here");
        assert_eq!(
            Rejection::new("x.toml", text, vec![second, first.clone()]).to_string(),
            "bad `a`
 --> x.toml:1:1
  |
1 | a = 1
  | ^ here

error: bad `b`
 --> x.toml:2:1
  |
2 | b = 2
  | ^ here"
        );
        let many = Rejection::new("x.toml", text, vec![first; 25]).to_string();
        assert!(many.ends_with("\n\nerror: 5 more faults in `x.toml`"), "{many}");
        assert_eq!(many.matches("bad `a`").count(), 20);
    }

    #[test]
    fn colour_is_only_in_the_coloured_style() {
        let fault = Diagnostic::new("bad", 0..1, "here");
        assert!(fault.render("x", "a", Style::Colour).contains('\u{1b}'));
        assert!(!fault.render("x", "a", Style::Plain).contains('\u{1b}'));
    }

    #[test]
    fn spans_outside_the_text_or_inside_a_character_do_not_panic() {
        for text in ["", "\n", "é", "tab\there\r\n", "a\u{1b}[31mb", "last line without end"] {
            for start in 0..8 {
                for end in [0, start, start + 1, 1000, usize::MAX] {
                    let rendered = Diagnostic::new("bad", start..end, "here").render("x", text, Style::Plain);
                    assert!(rendered.starts_with("bad\n"), "{rendered}");
                    assert!(!rendered.contains('\u{1b}'), "an escape of the source reached the terminal: {rendered}");
                }
            }
        }
    }

    #[test]
    fn the_nearest_word_is_a_typing_slip_away() {
        let keys = ["context_max", "steps_per_launch", "check_positions", "time_positions"];
        for (word, expected) in [
            ("contxt_max", Some("context_max")),
            ("context-max", Some("context_max")),
            ("ContextMax", Some("context_max")),
            ("cotnext_max", Some("context_max")),
            ("context", Some("context_max")),
            ("steps", Some("steps_per_launch")),
            ("chek_positions", Some("check_positions")),
            ("positions", None),
            ("batch", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, keys), expected, "{word}");
        }
        assert_eq!(nearest("H20", ["h100", "h200", "cpu"]), Some("h200"));
        assert_eq!(nearest("gpu", ["h100", "cpu"]), Some("cpu"));
        assert_eq!(nearest("xy", ["ab"]), None);
        assert_eq!(nearest("unk_token_id", ["bos_token_id", "eos_token_id"]), None);
        assert_eq!(nearest("abdc", ["abcd"]), Some("abcd"), "a swap of neighbours is one edit");
        assert_eq!(nearest("rtx", ["rtx4090", "rtx5090"]), None, "two words begin so");
        assert_eq!(nearest(&"a".repeat(100_000), ["aaaa"]), None);
    }

    #[test]
    fn alternatives_read_as_a_sentence() {
        assert_eq!(one_of(["a"]), "`a`");
        assert_eq!(one_of(["a", "b"]), "`a` or `b`");
        assert_eq!(one_of(["a", "b", "c"]), "`a`, `b` or `c`");
    }
}
