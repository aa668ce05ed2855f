//! Owns connections: how many there are, how long a peer may take, and how they end.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};

use super::access::{Access, guard};
use super::error::ApiError;

/// Most connections at a time; a further one is closed at once.
const CONNECTIONS_MAX: usize = 4096;
/// Time limit for the head of a request, and for an open connection without a request.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// A peer with unread output has to read [`WRITE_BYTES`] in this time, or its connection is closed: its request holds memory and
/// permits that other requests need.
const WRITE_TIME: Duration = Duration::from_secs(30);
const WRITE_BYTES: usize = 2048;
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 100;
/// File descriptors to ask for: one for each connection, and as many for other files.
const FILES_MAX: u64 = 2 * CONNECTIONS_MAX as u64;
/// Pause after a failed accept: the process may be out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `stop` is done, then waits at most `grace` for open requests. Returns false if some did not finish.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    access: Access,
    stop: impl Future<Output = ()>,
    grace: Duration,
) -> bool {
    let (stopping, stopped) = watch::channel(false);
    let open = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let router = router.layer(from_fn_with_state(Arc::new(access), guard)).layer(from_fn(refuse_long_head));
    let mut stop = pin!(stop);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut stop => break,
        };
        let Ok((stream, _)) = accepted else {
            sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(permit) = open.clone().try_acquire_owned() else { continue };
        let (router, mut stopped) = (router.clone(), stopped.clone());
        tokio::spawn(async move {
            let _permit = permit;
            let _ = stream.set_nodelay(true);
            let io = TokioIo::new(Patient::new(stream));
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME)
                // Of a head that did not end yet: the last read may end a longer one.
                .max_buf_size(HEAD_BYTES_MAX + 1)
                .max_headers(HEADERS_MAX);
            let mut connection = pin!(http.serve_connection(io, TowerToHyperService::new(router)));
            // An error means that the peer disconnected, or did not send HTTP.
            tokio::select! {
                _ = connection.as_mut() => return,
                _ = stopped.wait_for(|stopped| *stopped) => {}
            }
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        });
    }
    drop(listener);
    let _ = stopping.send(true);
    timeout(grace, open.acquire_many(CONNECTIONS_MAX as u32)).await.is_ok()
}

/// Refuses a head that is longer than [`HEAD_BYTES_MAX`].
async fn refuse_long_head(request: Request, next: Next) -> Response {
    // Of a header: its name, `: `, its value and the end of the line.
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    let line = request.method().as_str().len() + request.uri().to_string().len() + " HTTP/1.1\r\n".len() + 1;
    if line + headers.sum::<usize>() + 2 <= HEAD_BYTES_MAX {
        return next.run(request).await;
    }
    let message = format!("expected a head of at most {HEAD_BYTES_MAX} bytes");
    ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, message).with_code("request_too_large").response()
}

/// Listens at an address. Raises the limit of file descriptors as far as needed and allowed.
///
/// # Errors
/// Errors of the system: the port is taken, or the address does not belong to this machine.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let most = maximum.map_or(FILES_MAX, |maximum| maximum.min(FILES_MAX));
    // A lower limit only means fewer connections.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum });
    TcpListener::bind(address).await
}

/// A stream that fails if its peer does not read.
struct Patient<S> {
    stream: S,
    /// Fires [`WRITE_TIME`] after a write that the peer took only in part.
    stalled: Option<Pin<Box<Sleep>>>,
    /// Bytes that the peer took since that write.
    taken: usize,
}

impl<S> Patient<S> {
    fn new(stream: S) -> Patient<S> {
        Patient { stream, stalled: None, taken: 0 }
    }

    /// Starts, renews or stops the timer after a write of `asked` bytes.
    fn written(
        &mut self,
        context: &mut Context<'_>,
        asked: usize,
        polled: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        match polled {
            Poll::Ready(Ok(taken)) if taken < asked => {
                self.taken += taken;
                if self.taken >= WRITE_BYTES {
                    (self.stalled, self.taken) = (None, 0);
                }
            }
            Poll::Ready(_) => {
                (self.stalled, self.taken) = (None, 0);
                return polled;
            }
            Poll::Pending => {}
        }
        let stalled =
            self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + WRITE_TIME)));
        match stalled.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => polled,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(context, bytes.len(), polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.written(context, bytes.iter().map(|bytes| bytes.len()).sum(), polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.written(context, 0, polled.map_ok(|()| 0)).map_ok(|_| ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.written(context, 0, polled.map_ok(|()| 0)).map_ok(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// Writes `bytes` to a peer that reads `each` bytes every ten seconds.
    async fn write_to_reader(bytes: usize, each: usize) -> io::Result<()> {
        let (server, mut peer) = duplex(1024);
        let mut patient = Patient::new(server);
        let reading = async move {
            let mut read = vec![0; each];
            loop {
                sleep(Duration::from_secs(10)).await;
                if peer.read_exact(&mut read).await.is_err() {
                    return;
                }
            }
        };
        let writing = async {
            patient.write_all(&vec![1; bytes]).await?;
            patient.flush().await
        };
        tokio::select! {
            written = writing => written,
            () = reading => Ok(()),
        }
    }

    #[test]
    fn a_peer_that_reads_too_slowly_is_cut_off_and_a_slow_one_is_not() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            assert_eq!(write_to_reader(64 << 10, 16).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
            write_to_reader(64 << 10, 1024).await.unwrap();
            write_to_reader(64 << 10, WRITE_BYTES).await.unwrap();
        });
    }
}
