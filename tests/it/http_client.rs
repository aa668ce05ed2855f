//! Owns a small HTTP client for tests, which sends and receives exact bytes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longest time that a test waits for a byte.
pub const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The events of a stream, without its end.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> =
            self.body.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").expect("data")).collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{self:?}");
        events.into_iter().map(|event| serde_json::from_str(event).expect(event)).collect()
    }
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// The head and body of a request that has its own connection.
pub fn request(method: &str, path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )
}

pub fn get(address: SocketAddr, path: &str) -> Reply {
    send(address, &request("GET", path, "", ""))
}

pub fn post(address: SocketAddr, path: &str, body: &Value) -> Reply {
    send(address, &request("POST", path, "Content-Type: application/json\r\n", &body.to_string()))
}

/// Sends bytes and reads the answer to its end.
#[track_caller]
pub fn send(address: SocketAddr, bytes: &str) -> Reply {
    let mut stream = connect(address);
    // A server may answer and close before it has read everything.
    let _ = stream.write_all(bytes.as_bytes());
    receive(stream)
}

#[track_caller]
pub fn receive(stream: TcpStream) -> Reply {
    let mut reader = BufReader::new(stream);
    let mut line = || {
        let mut line = String::new();
        reader.read_line(&mut line).expect("a line");
        line.trim_end().to_string()
    };
    let status = line();
    let status =
        status.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{status:?}"));
    let mut headers = vec![];
    loop {
        let line = line();
        let Some((name, value)) = line.split_once(':') else { break };
        headers.push((name.to_lowercase(), value.trim().to_string()));
    }
    let reply = Reply { status, headers, body: String::new() };
    let mut bytes = vec![];
    if reply.header("transfer-encoding") == Some("chunked") {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).expect("a size");
            let size = usize::from_str_radix(size.trim(), 16).unwrap_or_else(|_| panic!("{size:?}"));
            let from = bytes.len();
            bytes.resize(from + size + 2, 0);
            reader.read_exact(&mut bytes[from..]).expect("a chunk");
            bytes.truncate(from + size);
            if size == 0 {
                break;
            }
        }
    } else {
        reader.read_to_end(&mut bytes).expect("a body");
    }
    Reply { body: String::from_utf8(bytes).expect("UTF-8"), ..reply }
}
