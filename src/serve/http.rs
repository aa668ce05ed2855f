//! Owns connections: who may connect, how long a peer may take, and how all of it ends.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};

/// Connections at a time; one more is closed at once.
const CONNECTIONS_MAX: usize = 4096;
/// A peer gets this long for the head of a request, and to begin one on an open connection.
const HEAD_TIME: Duration = Duration::from_secs(30);
/// A peer that reads nothing for this long is gone.
const WRITE_TIME: Duration = Duration::from_secs(30);
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 100;
/// Connections, and what else this process opens.
const FILES_MAX: u64 = 2 * CONNECTIONS_MAX as u64;
/// After an accept that failed, for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until `stop` is done, then lets open requests finish for at most `grace`. False: some did not.
pub async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()>, grace: Duration) -> bool {
    let (stopping, stopped) = watch::channel(false);
    let open = Arc::new(Semaphore::new(CONNECTIONS_MAX));
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
            let io = TokioIo::new(Patient { stream, stalled: None });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIME)
                .max_buf_size(HEAD_BYTES_MAX)
                .max_headers(HEADERS_MAX);
            let mut connection = pin!(http.serve_connection(io, TowerToHyperService::new(router)));
            // Errors are the peer's: it is gone, or did not speak HTTP.
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

/// Listens at an address, with as many file descriptors as the system lets this process have.
///
/// # Errors
/// The system's: the port is taken, the address is not of this machine.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let most = maximum.map_or(FILES_MAX, |maximum| maximum.min(FILES_MAX));
    // With fewer there are fewer connections.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum });
    TcpListener::bind(address).await
}

/// A stream whose peer has to read what is written.
struct Patient {
    stream: TcpStream,
    /// Since a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Patient {
    fn written<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.stalled = None;
            return polled;
        }
        let stalled =
            self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + WRITE_TIME)));
        match stalled.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Patient {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Patient {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.written(context, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.written(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.written(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.written(context, polled)
    }
}
