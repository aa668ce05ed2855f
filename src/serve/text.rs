//! Owns what of a growing text is certain while some texts end it.

/// How much of a text can be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stopped {
    /// Bytes.
    pub ready: usize,
    /// A text that ends it begins there.
    pub found: bool,
}

/// The text up to the first of `stops`; if there is none, all but what may be the beginning of one.
pub fn certain(text: &str, stops: &[String]) -> Stopped {
    if let Some(ready) = stops.iter().filter_map(|stop| text.find(stop.as_str())).min() {
        return Stopped { ready, found: true };
    }
    let begins = |at: usize| stops.iter().any(|stop| stop.starts_with(&text[at..]));
    let held = text.char_indices().map(|(at, _)| at).find(|&at| begins(at));
    Stopped { ready: held.unwrap_or(text.len()), found: false }
}
