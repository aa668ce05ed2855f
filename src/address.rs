//! Owns `RemoteAddress`: where a remote cache is, in a URL that has no credentials.
//!
//! ```text
//! s3://BUCKET/PREFIX?region=REGION&endpoint=URL     S3, and every store that speaks its protocol
//! gs://BUCKET/PREFIX                                Google Cloud Storage
//! az://CONTAINER/PREFIX?account=NAME                Azure Blob Storage
//! davs://HOST/PATH  dav://HOST/PATH                 WebDAV
//! https://HOST/PATH  http://HOST/PATH               plain HTTP, read only
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// Longest wait of `timeout`, in seconds.
const TIMEOUT_S_MAX: u64 = 3600;
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// Words in names of options that look like credentials.
const SECRET_WORDS: [&str; 8] = ["key", "secret", "token", "pass", "sas", "sig", "credential", "auth"];

/// What serves a remote cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    S3,
    Gcs,
    Azure,
    Webdav,
    Http,
}

/// How a remote cache is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RemoteMode {
    Off,
    Read,
    #[default]
    ReadWrite,
}

impl RemoteMode {
    pub const NAMED: [(&'static str, RemoteMode); 3] =
        [("off", RemoteMode::Off), ("read", RemoteMode::Read), ("read-write", RemoteMode::ReadWrite)];

    pub fn parse(text: &str) -> Option<RemoteMode> {
        Self::NAMED.into_iter().find(|(name, _)| *name == text).map(|(_, mode)| mode)
    }

    pub fn name(self) -> &'static str {
        Self::NAMED.into_iter().find(|(_, mode)| *mode == self).map_or("off", |(name, _)| name)
    }
}

/// A remote cache and how it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePlace {
    pub address: RemoteAddress,
    pub mode: RemoteMode,
}

/// Why a text is no address. The text itself is not repeated: it may have credentials in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("the URL has credentials in it ({what})")]
    Credentials { what: &'static str },
    #[error("{0}")]
    Invalid(String),
}

impl AddressError {
    pub fn remedy(&self) -> &'static str {
        match self {
            AddressError::Credentials { .. } => {
                "remove them, and change them if anyone could read them; they belong in the environment or the usual files, \
                 such as `AWS_ACCESS_KEY_ID` and `~/.aws/credentials`, or `~/.netrc` for HTTP and WebDAV"
            }
            AddressError::Invalid(_) => {
                "write `s3://BUCKET/PREFIX?region=REGION`, `davs://HOST/PATH` or `https://HOST/PATH`; docs/cache.md has all forms"
            }
        }
    }
}

/// The address of a remote cache. It has no credentials, so it may be printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteAddress {
    pub service: Service,
    scheme: String,
    /// Bucket or container; of HTTP and WebDAV the host, with its port.
    pub host: String,
    /// Without slashes at its ends.
    pub prefix: String,
    options: BTreeMap<String, String>,
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.host)?;
        if !self.prefix.is_empty() {
            write!(f, "/{}", self.prefix)?;
        }
        for (at, (name, value)) in self.options.iter().enumerate() {
            write!(f, "{}{name}={value}", if at == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

impl RemoteAddress {
    /// # Errors
    /// A URL with credentials; another scheme; options that this scheme does not have.
    pub fn parse(text: &str) -> Result<RemoteAddress, AddressError> {
        let invalid = |text: String| AddressError::Invalid(text);
        let (scheme, rest) =
            text.split_once("://").ok_or_else(|| invalid("expected a URL such as `s3://BUCKET/PREFIX`".to_string()))?;
        let (service, known): (Service, &[&str]) = match scheme {
            "s3" => (Service::S3, &["region", "endpoint", "anonymous", "timeout"]),
            "gs" => (Service::Gcs, &["endpoint", "anonymous", "timeout"]),
            "az" => (Service::Azure, &["account", "endpoint", "timeout"]),
            "dav" | "davs" => (Service::Webdav, &["timeout"]),
            "http" | "https" => (Service::Http, &["timeout"]),
            _ => {
                let schemes = "`s3`, `gs`, `az`, `dav`, `davs`, `http` or `https`";
                return Err(invalid(format!("expected a URL with the scheme {schemes}")));
            }
        };
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, prefix) = place.split_once('/').unwrap_or((place, ""));
        if place.contains('@') {
            return Err(AddressError::Credentials { what: "a user name before `@`" });
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "-._~/:[]".contains(c);
        if host.is_empty() || !place.chars().all(plain) {
            let what = "expected a bucket or host after `://`, and a path of letters, digits, `-`, `_`, `.` and `/`";
            return Err(invalid(what.to_string()));
        }
        let prefix = prefix.trim_matches('/');
        if prefix.split('/').any(|part| part == "." || part == ".." || (part.is_empty() && !prefix.is_empty())) {
            return Err(invalid("expected a path without empty parts, `.` and `..`".to_string()));
        }
        let mut options = BTreeMap::new();
        for option in query.split('&').filter(|option| !option.is_empty()) {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            let lower = name.to_ascii_lowercase();
            if !known.contains(&name) {
                if SECRET_WORDS.iter().any(|word| lower.contains(word)) {
                    return Err(AddressError::Credentials { what: "an option that looks like a key" });
                }
                let known = known.join("`, `");
                return Err(invalid(format!("an option is not known: `{scheme}` URLs have `{known}`")));
            }
            if value.is_empty() || !value.chars().all(plain) {
                return Err(match value.contains('@') {
                    true => AddressError::Credentials { what: "a user name before `@`" },
                    false => invalid(format!("expected `{name}=VALUE` without special characters")),
                });
            }
            options.insert(name.to_string(), value.to_string());
        }
        let address = RemoteAddress {
            service,
            scheme: scheme.to_string(),
            host: host.to_string(),
            prefix: prefix.to_string(),
            options,
        };
        let timeout = address.option("timeout").map(str::parse::<u64>);
        if timeout.is_some_and(|timeout| !timeout.is_ok_and(|s| (1..=TIMEOUT_S_MAX).contains(&s))) {
            return Err(invalid(format!("expected `timeout` in seconds, 1 to {TIMEOUT_S_MAX}")));
        }
        if address.option("anonymous").is_some_and(|value| value != "true" && value != "false") {
            return Err(invalid("expected `anonymous=true` or `anonymous=false`".to_string()));
        }
        if address.option("endpoint").is_some_and(|url| !url.starts_with("https://") && !url.starts_with("http://")) {
            return Err(invalid("expected `endpoint=https://HOST`".to_string()));
        }
        Ok(address)
    }

    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.get(name).map(String::as_str)
    }

    /// Longest time that the server may take for a small object.
    pub fn timeout(&self) -> Duration {
        let seconds = self.option("timeout").and_then(|seconds| seconds.parse().ok());
        seconds.map_or(TIMEOUT_DEFAULT, Duration::from_secs)
    }

    /// The URL of the server of HTTP and WebDAV addresses.
    pub fn http_endpoint(&self) -> String {
        let scheme = if matches!(self.scheme.as_str(), "davs" | "https") { "https" } else { "http" };
        format!("{scheme}://{}", self.host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_print_as_they_are_read() {
        for text in [
            "s3://bucket",
            "s3://bucket/team/cache?endpoint=http://127.0.0.1:9000&region=eu-central-1",
            "gs://bucket/a",
            "az://container/a?account=name",
            "davs://host/a",
            "http://127.0.0.1:80/a?timeout=5",
        ] {
            assert_eq!(RemoteAddress::parse(text).map(|address| address.to_string()), Ok(text.to_string()));
        }
        let address = RemoteAddress::parse("dav://host:81/a/b/").unwrap();
        assert_eq!((address.http_endpoint().as_str(), address.prefix.as_str()), ("http://host:81", "a/b"));
    }

    #[test]
    fn credentials_are_refused_and_not_repeated() {
        for text in [
            "s3://AKIASECRET:hunter2@bucket/prefix",
            "davs://user:hunter2@host/path",
            "s3://bucket?access_key_id=hunter2",
            "s3://bucket?secret_access_key=hunter2",
            "az://container?sas_token=hunter2",
            "https://host/path?X-Amz-Signature=hunter2",
            "s3://bucket?endpoint=http://user:hunter2@host",
        ] {
            let error = RemoteAddress::parse(text).unwrap_err();
            assert!(matches!(error, AddressError::Credentials { .. }), "{text}: {error}");
            assert!(!error.to_string().contains("hunter2") && !error.to_string().contains("AKIA"), "{error}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "bucket",
            "ftp://host",
            "s3://",
            "s3://bucket/../other",
            "s3://bucket?regoin=x",
            "s3://bucket?timeout=0",
            "s3://bucket?anonymous=1",
            "s3://bucket?endpoint=host",
            "s3://bu cket",
        ] {
            assert!(matches!(RemoteAddress::parse(text), Err(AddressError::Invalid(_))), "{text}");
        }
    }
}
