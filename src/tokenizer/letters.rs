//! Owns upper, lower and title case of texts and what kind of characters they have, as Python's `str` has it.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use fancy_regex::Regex;

/// Characters with a title case of their own (Unicode's `UnicodeData.txt` and `SpecialCasing.txt`), by pairs of character and title
/// case. Greek letters with an iota below them are those of `IOTAS`.
const TITLES: &str = "ß Ss Ǆ ǅ ǅ ǅ ǆ ǅ Ǉ ǈ ǈ ǈ ǉ ǈ Ǌ ǋ ǋ ǋ ǌ ǋ Ǳ ǲ ǲ ǲ ǳ ǲ և Եւ ﬀ Ff ﬁ Fi ﬂ Fl ﬃ Ffi ﬄ Ffl ﬅ St ﬆ St ﬓ Մն ﬔ Մե ﬕ Մի \
    ﬖ Վն ﬗ Մխ \u{1fb2} \u{1fba}\u{345} \u{1fb3} \u{1fbc} \u{1fb4} \u{386}\u{345} \u{1fb7} \u{391}\u{342}\u{345} \u{1fbc} \u{1fbc} \
    \u{1fc2} \u{1fca}\u{345} \u{1fc3} \u{1fcc} \u{1fc4} \u{389}\u{345} \u{1fc7} \u{397}\u{342}\u{345} \u{1fcc} \u{1fcc} \
    \u{1ff2} \u{1ffa}\u{345} \u{1ff3} \u{1ffc} \u{1ff4} \u{38f}\u{345} \u{1ff7} \u{3a9}\u{342}\u{345} \u{1ffc} \u{1ffc}";

/// Characters that are digits and no decimals: superscripts, subscripts, digits in circles and brackets.
const DIGITS: &[(u32, u32)] = &[
    (0xb2, 0xb3),
    (0xb9, 0xb9),
    (0x1369, 0x1371),
    (0x19da, 0x19da),
    (0x2070, 0x2070),
    (0x2074, 0x2079),
    (0x2080, 0x2089),
    (0x2460, 0x2468),
    (0x2474, 0x247c),
    (0x2488, 0x2490),
    (0x24ea, 0x24ea),
    (0x24f5, 0x24fd),
    (0x24ff, 0x24ff),
    (0x2776, 0x277e),
    (0x2780, 0x2788),
    (0x278a, 0x2792),
    (0x10a40, 0x10a43),
    (0x10e60, 0x10e68),
    (0x11052, 0x1105a),
    (0x1f100, 0x1f10a),
];

/// Ideographs that are numbers (`Unihan_NumericValues.txt`).
const NUMERALS: &str = "㐅㒃㠪㭍一七万三九二五亖亿什仟仨伍佰億兆兩八六十千卄卅卌叁参參叄四壱壹幺廾廿弌弍弎弐拾捌柒漆玖百肆萬貮貳贰阡陆陌陸零\u{f96b}\u{f973}\u{f978}\u{f9b2}\u{f9d1}\u{f9d3}\u{f9fd}\u{20001}\u{20064}\u{200e2}\u{20121}\u{2092a}\u{20983}\u{2098c}\u{2099c}\u{20aea}\u{20afd}\u{20b19}\u{22390}\u{22998}\u{23b1b}\u{2626d}\u{2f890}";

fn is(pattern: &LazyLock<Option<Regex>>, c: char) -> bool {
    pattern.as_ref().is_some_and(|regex| regex.is_match(c.encode_utf8(&mut [0; 4])).unwrap_or(false))
}

static LETTER: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\p{L}").ok());
static DECIMAL: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\p{Nd}").ok());
static NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\p{N}").ok());
static TITLED: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\p{Lt}").ok());

/// The title case of one character.
fn titled(c: char, out: &mut String) {
    static TABLE: LazyLock<BTreeMap<char, &str>> = LazyLock::new(|| {
        let words: Vec<&str> = TITLES.split_ascii_whitespace().collect();
        words.chunks(2).filter_map(|pair| Some((pair[0].chars().next()?, pair[1]))).collect()
    });
    match c {
        _ if c.is_ascii() => out.push(c.to_ascii_uppercase()),
        // Georgian letters are capitals in headlines alone.
        '\u{10d0}'..='\u{10ff}' => out.push(c),
        // Greek letters with an iota: eight small ones, then their eight capitals.
        '\u{1f80}'..='\u{1faf}' => out.extend(char::from_u32(u32::from(c) | 8)),
        _ => match TABLE.get(&c) {
            Some(title) => out.push_str(title),
            None => out.extend(c.to_uppercase()),
        },
    }
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || (!c.is_ascii() && is(&TITLED, c))
}

/// `str.lower` of what begins at a byte of a text: a sigma at the end of a word depends on what is before it.
fn lower_from(text: &str, at: usize) -> String {
    match text[at..].contains('Σ') {
        false => text[at..].to_lowercase(),
        true => {
            let (whole, before) = (text.to_lowercase(), text[..at].to_lowercase());
            whole.get(before.len()..).map(str::to_string).unwrap_or_default()
        }
    }
}

/// `str.capitalize`.
pub fn capitalize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    if let Some(first) = text.chars().next() {
        titled(first, &mut out);
        out.push_str(&lower_from(text, first.len_utf8()));
    }
    out
}

/// `str.title`: a letter is a capital where no letter is before it.
pub fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut after_cased = false;
    for (at, c) in text.char_indices() {
        match (after_cased, c) {
            (true, 'Σ') => out.extend(lower_from(text, at).chars().next()),
            (true, _) => out.extend(c.to_lowercase()),
            (false, _) => titled(c, &mut out),
        }
        after_cased = is_cased(c);
    }
    out
}

/// The filter `title`: words begin after blanks, `-` and opening brackets.
pub fn title_words(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let is_gap = |c: char| "-({[<".contains(c) || super::python::is_space(c);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|c| is_gap(c) != is_gap(first)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        out.extend(first.to_uppercase());
        out.push_str(&word[first.len_utf8()..].to_lowercase());
        rest = after;
    }
    out
}

/// `str.swapcase`.
pub fn swap(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        match c {
            'Σ' => out.extend(lower_from(text, at).chars().next()),
            _ if c.is_uppercase() => out.extend(c.to_lowercase()),
            _ if c.is_lowercase() => out.extend(c.to_uppercase()),
            _ => out.push(c),
        }
    }
    out
}

/// The methods of `str` that change the case of its letters; `None`: another name.
pub fn changed(text: &str, name: &str) -> Option<String> {
    Some(match name {
        "title" => title(text),
        "capitalize" => capitalize(text),
        "swapcase" => swap(text),
        "upper" => text.to_uppercase(),
        "lower" => text.to_lowercase(),
        _ => return None,
    })
}

/// The methods of `str` that ask for the kind of its characters; `None`: another name.
pub fn asks(text: &str, name: &str) -> Option<bool> {
    let all = |test: fn(char) -> bool| !text.is_empty() && text.chars().all(test);
    Some(match name {
        "isalpha" => all(is_letter),
        "isdecimal" => all(|c| c.is_ascii_digit() || is(&DECIMAL, c)),
        "isdigit" => all(is_digit),
        "isnumeric" => all(is_numeric),
        "isalnum" => all(|c| is_letter(c) || is_numeric(c)),
        "isspace" => all(super::python::is_space),
        "isprintable" => text.chars().all(|c| c == ' ' || super::python::prints(c)),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(|c| is_cased(c) && !c.is_lowercase()),
        "isupper" => text.chars().any(char::is_uppercase) && !text.chars().any(|c| is_cased(c) && !c.is_uppercase()),
        "istitle" => {
            let (mut after_cased, mut any) = (false, false);
            for c in text.chars() {
                let begins = c.is_uppercase() || is(&TITLED, c);
                if (begins && after_cased) || (c.is_lowercase() && !after_cased) {
                    return Some(false);
                }
                after_cased = begins || c.is_lowercase();
                any |= after_cased;
            }
            any
        }
        _ => return None,
    })
}

/// Whether a character is part of a word: `\\w` of Python's `re`.
pub fn is_word(c: char) -> bool {
    c == '_' || is_letter(c) || is_numeric(c)
}

fn is_letter(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_alphabetic() } else { is(&LETTER, c) }
}

fn is_digit(c: char) -> bool {
    let code = u32::from(c);
    c.is_ascii_digit() || is(&DECIMAL, c) || DIGITS.iter().any(|(first, last)| (*first..=*last).contains(&code))
}

fn is_numeric(c: char) -> bool {
    c.is_ascii_digit() || is(&NUMBER, c) || NUMERALS.contains(c)
}
