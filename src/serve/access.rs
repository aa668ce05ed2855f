//! Owns who may use a server from where: the names that it is called by, and the pages of other sites that it answers.
//!
//! A page can point its own name at this machine (DNS rebinding). The browser then sends it here as if page and server were one site, with
//! that name in `Host`. A server that only this machine can reach therefore answers to no name but its own. Pages that call it by its own
//! name are stopped by the browser, unless the server names their origin (CORS).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version, header};
use axum::middleware::Next;

use super::error::ApiError;

/// Seconds for which a browser remembers the answer to a preflight request.
const PREFLIGHT_SECONDS: &str = "600";
const PRIVATE_ASKED: HeaderName = HeaderName::from_static("access-control-request-private-network");
const PRIVATE_ALLOWED: HeaderName = HeaderName::from_static("access-control-allow-private-network");

/// Names and origins.
#[derive(Debug, Clone)]
pub struct Access {
    /// The address that the server listens on.
    address: IpAddr,
    /// Further names; empty on an address of other machines: any name.
    hosts: Vec<String>,
    /// Origins of pages; `*` is any.
    origins: Vec<String>,
}

impl Access {
    pub fn new(address: SocketAddr, hosts: &[String], origins: &[String]) -> Access {
        let plain = |name: &String| name.trim_end_matches('.').to_ascii_lowercase();
        Access { address: address.ip(), hosts: hosts.iter().map(plain).collect(), origins: origins.to_vec() }
    }

    /// # Errors
    /// No name where HTTP asks for one, more than one, or another one than that of the server.
    fn check_host(&self, request: &Request) -> Result<(), ApiError> {
        let mut hosts = request.headers().get_all(header::HOST).iter();
        let sent = match (hosts.next(), hosts.next()) {
            (Some(_), Some(_)) => return Err(ApiError::bad("expected one `Host` header, found more")),
            (None, _) if request.version() == Version::HTTP_11 => {
                return Err(ApiError::bad("expected a `Host` header, found none"));
            }
            (host, _) => host,
        };
        let unread = || ApiError::bad("expected a name or an address in `Host`, with a port or without");
        // The name in the target overrules the header, as RFC 9112 3.2.2 has it.
        let target = request.uri().authority().map(|authority| authority.as_str());
        let sent = sent.map(|host| host.to_str().map_err(|_| unread())).transpose()?;
        for host in sent.into_iter().chain(target) {
            let name = name_of(host).ok_or_else(unread)?;
            if !self.allows(&name) {
                let shown: String = name.chars().take(80).collect();
                let message = format!("this server does not answer to the name `{shown}`; `--allow-host` adds names");
                return Err(ApiError::new(StatusCode::FORBIDDEN, message).with_code("host_not_allowed"));
            }
        }
        Ok(())
    }

    fn allows(&self, name: &str) -> bool {
        if !self.address.is_loopback() && self.hosts.is_empty() {
            return true;
        }
        let address: Option<IpAddr> = name.trim_matches(['[', ']']).parse().ok();
        let is_own = |address: IpAddr| address.is_loopback() || address == self.address;
        name == "localhost" || address.is_some_and(is_own) || self.hosts.iter().any(|host| host == name)
    }

    /// The origin of a page that may use the server, as the reply repeats it.
    fn origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        if self.origins.iter().any(|allowed| allowed == "*") {
            return Some(HeaderValue::from_static("*"));
        }
        let text = origin.to_str().ok()?;
        self.origins
            .iter()
            .any(|allowed| allowed.trim_end_matches('/').eq_ignore_ascii_case(text))
            .then(|| origin.clone())
    }
}

/// The name in a `Host` header, in lower case and without its port; `None`: it is none.
fn name_of(host: &str) -> Option<String> {
    let (name, port) = match host.strip_prefix('[') {
        Some(rest) => {
            let end = rest.find(']')? + 2;
            (&host[..end], &host[end..])
        }
        None => host.split_at(host.find(':').unwrap_or(host.len())),
    };
    let is_port = port.strip_prefix(':').map_or(port.is_empty(), |port| port.bytes().all(|byte| byte.is_ascii_digit()));
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._[]:".contains(c);
    (is_port && name.chars().all(plain)).then(|| name.trim_end_matches('.').to_ascii_lowercase())
}

/// Refuses requests under other names, and lets pages of allowed origins read replies.
pub async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response<Body> {
    if let Err(error) = access.check_host(&request) {
        return error.response();
    }
    let Some(origin) = access.origin(request.headers()) else { return next.run(request).await };
    let mut response = match preflight(&request) {
        Some(response) => response,
        None => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.append(header::VARY, HeaderValue::from_static("Origin"));
    response
}

/// The answer to a preflight request; `None`: the request is another one.
fn preflight(request: &Request) -> Option<Response<Body>> {
    let asks = |name: &HeaderName| request.headers().get(name).cloned();
    if request.method() != Method::OPTIONS {
        return None;
    }
    asks(&header::ACCESS_CONTROL_REQUEST_METHOD)?;
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(PREFLIGHT_SECONDS));
    if let Some(names) = asks(&header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, names);
    }
    if asks(&PRIVATE_ASKED).is_some() {
        headers.insert(PRIVATE_ALLOWED, HeaderValue::from_static("true"));
    }
    Some(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(address: &str, hosts: &[&str]) -> Access {
        let hosts: Vec<String> = hosts.iter().map(|host| (*host).to_string()).collect();
        Access::new(SocketAddr::new(address.parse().unwrap(), 80), &hosts, &["https://chat.example".to_string()])
    }

    fn status(access: &Access, hosts: &[&str], target: &str) -> u16 {
        let mut request = Request::builder().uri(target).version(Version::HTTP_11);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        access.check_host(&request.body(Body::empty()).unwrap()).map_or_else(|error| error.status.as_u16(), |()| 200)
    }

    #[test]
    fn a_loopback_server_answers_to_its_own_names() {
        let own = access("127.0.0.1", &["Box.Example"]);
        for host in
            ["localhost", "LOCALHOST:80", "localhost.:1", "127.0.0.1:8000", "127.0.0.2", "[::1]:9", "box.example:1"]
        {
            assert_eq!(status(&own, &[host], "/"), 200, "{host}");
        }
        for host in ["pages.example", "pages.example:8000", "localhost.pages.example", "10.0.0.1", "[fe80::1]", ""] {
            assert_eq!(status(&own, &[host], "/"), 403, "{host}");
        }
        for hosts in
            [&[][..], &["localhost", "localhost"], &["local host"], &["localhost:x"], &["[::1"], &["a@localhost"]]
        {
            assert_eq!(status(&own, hosts, "/"), 400, "{hosts:?}");
        }
        assert_eq!(status(&own, &["localhost"], "http://pages.example/"), 403);
        assert_eq!(status(&access("0.0.0.0", &[]), &["pages.example"], "/"), 200);
        assert_eq!(status(&access("0.0.0.0", &["box"]), &["pages.example"], "/"), 403);
        assert_eq!(status(&access("10.0.0.1", &["box"]), &["10.0.0.1:80"], "/"), 200);
    }

    #[test]
    fn only_named_origins_are_allowed() {
        let origin = |access: &Access, origin: &str| {
            let headers = HeaderMap::from_iter([(header::ORIGIN, HeaderValue::from_str(origin).unwrap())]);
            access.origin(&headers).map(|value| value.to_str().unwrap().to_string())
        };
        let own = access("127.0.0.1", &[]);
        assert_eq!(origin(&own, "https://chat.example").as_deref(), Some("https://chat.example"));
        assert_eq!((origin(&own, "https://pages.example"), origin(&own, "null")), (None, None));
        let any = Access { origins: vec!["*".to_string()], ..own };
        assert_eq!(origin(&any, "https://pages.example").as_deref(), Some("*"));
    }
}
