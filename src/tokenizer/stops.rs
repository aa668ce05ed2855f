//! Owns the rule for stop texts: how much of a growing text can be shown.

/// How much of a text can be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// Bytes.
    pub ready: usize,
    /// A stop text begins there.
    pub found: bool,
}

/// The text up to the first of `stops`; if there is none, all text except what may be the beginning of one.
pub fn certain(text: &str, stops: &[String]) -> Stopped {
    if let Some(ready) = stops.iter().filter_map(|stop| text.find(stop.as_str())).min() {
        return Stopped { ready, found: true };
    }
    let begins = |at: usize| stops.iter().any(|stop| stop.starts_with(&text[at..]));
    let held = text.char_indices().map(|(at, _)| at).find(|&at| begins(at));
    Stopped { ready: held.unwrap_or(text.len()), found: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_begin_a_stop_text_is_held_back() {
        let stops = ["\n\n".to_string(), "END".to_string()];
        for (text, ready, found) in [
            ("once", 4, false),
            ("once\n", 4, false),
            ("once\n\n upon", 4, true),
            ("the E", 4, false),
            ("the EN", 4, false),
            ("the ENG", 7, false),
            ("the END", 4, true),
            ("END\n\n", 0, true),
            ("", 0, false),
            ("µE", 2, false),
        ] {
            assert_eq!(certain(text, &stops), Stopped { ready, found }, "{text:?}");
        }
        assert_eq!(certain("END", &[]), Stopped { ready: 3, found: false });
    }
}
