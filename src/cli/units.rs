//! Owns how sizes, ages and token ids are written on a command line, and how numbers are printed for people.

use std::path::PathBuf;
use std::time::Duration;

use super::arguments::Ids;
use crate::digest::Digest;

/// `1,2,3`; blanks and one pair of brackets around it are accepted.
pub fn parse_ids(text: &str) -> Result<Ids, String> {
    let trimmed = text.trim();
    let inner = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(trimmed);
    let items = inner.split(|c: char| c == ',' || c.is_whitespace()).filter(|item| !item.is_empty());
    let ids: Result<Vec<u32>, String> = items
        .map(|item| item.parse().map_err(|_| format!("expected token ids such as `1,2,3`, found `{item}`")))
        .collect();
    match ids? {
        ids if ids.is_empty() => Err("expected at least one token id".to_string()),
        ids => Ok(Ids(ids)),
    }
}

/// `42=-1.5`: an id, and what is added to its logit.
pub fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(id, bias)| Some((id.trim().parse().ok()?, bias.trim().parse().ok()?)));
    parsed.ok_or_else(|| format!("expected a token id and a number such as `42=-1.5`, found `{text}`"))
}

/// `10G`, `512M`, `4096`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let expected = || format!("expected a size such as `10G` or `512M`, found `{text}`");
    let (number, unit) = split_unit(text);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(expected()),
    };
    number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift)).ok_or_else(expected)
}

/// `30s`, `12h`, `1d`.
pub fn parse_age(text: &str) -> Result<Duration, String> {
    let expected = || format!("expected an age such as `12h` or `1d`, found `{text}`");
    let (number, unit) = split_unit(text);
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        "w" => 7 * 86_400,
        // Zero needs no unit.
        "" if number == "0" => 1,
        _ => return Err(expected()),
    };
    let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(seconds)).ok_or_else(expected)?;
    Ok(Duration::from_secs(seconds))
}

/// A key as `plan` prints it.
pub fn parse_digest(text: &str) -> Result<Digest, String> {
    Digest::parse(text).map_err(|_| format!("expected a key of 64 hex digits, found `{text}`"))
}

/// `30`, `0.5`: above 0, up to a week.
pub fn parse_minutes(text: &str) -> Result<f64, String> {
    let minutes = text.parse::<f64>().ok().filter(|minutes| *minutes > 0.0 && *minutes <= 7.0 * 24.0 * 60.0);
    minutes.ok_or_else(|| format!("expected minutes above 0, such as `30` or `0.5`, found `{text}`"))
}

/// The file of the trials. A number alone is refused: it is meant to bound a search, and would make a file of that name.
pub fn parse_trials(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if text.bytes().all(|byte| byte.is_ascii_digit()) && !path.exists() {
        return Err(format!("expected a file, found a number; `--max-trials {text}` bounds a search"));
    }
    Ok(path)
}

fn split_unit(text: &str) -> (&str, &str) {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    text.split_at(digits)
}

/// `0 B`, `12.3 MiB`.
pub fn bytes_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(UNITS.len() as u32 - 1);
    match power {
        0 => format!("{bytes} B"),
        _ => format!("{:.1} {}", bytes as f64 / f64::from(1u32 << 10).powi(power as i32), UNITS[power as usize]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_people_write_them() {
        for text in ["1,2,3", " [1, 2, 3] ", "1 2 3", "1,2,3,"] {
            assert_eq!(parse_ids(text), Ok(Ids(vec![1, 2, 3])), "{text}");
        }
        for text in ["", "[]", "1,x", "-1", "4294967296", "1.5", "[1,2"] {
            assert!(parse_ids(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_bias_is_an_id_and_a_number() {
        assert_eq!(parse_bias("42=-1.5"), Ok((42, -1.5)));
        assert_eq!(parse_bias("7 = 3"), Ok((7, 3.0)));
        for text in ["", "42", "=1", "42=", "-1=2", "a=1", "1=b", "1=2=3"] {
            assert!(parse_bias(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_and_ages_have_units() {
        assert_eq!(parse_bytes("10G"), Ok(10 << 30));
        assert_eq!(parse_bytes("512MiB"), Ok(512 << 20));
        assert_eq!(parse_bytes("0"), Ok(0));
        for text in ["", "G", "1.5G", "10X", "99999999999G", "-1"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
        assert_eq!(parse_age("1d"), Ok(Duration::from_secs(86_400)));
        assert_eq!(parse_age("0"), Ok(Duration::ZERO));
        for text in ["", "d", "1", "1y", "99999999999999999w"] {
            assert!(parse_age(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_print_for_people() {
        assert_eq!(bytes_text(0), "0 B");
        assert_eq!(bytes_text(1023), "1023 B");
        assert_eq!(bytes_text(1 << 20), "1.0 MiB");
        assert_eq!(bytes_text(u64::MAX), "16777216.0 TiB");
    }
}
