//! Owns a clock that does not count the time of other work on the machine.

/// Seconds of processor time of this thread. On Linux `/proc/thread-self/schedstat` has them, too, but on some kernels only in ticks of 4 ms.
#[cfg(unix)]
pub fn core_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Wall-clock seconds since the first call.
#[cfg(not(unix))]
pub fn core_seconds() -> f64 {
    static BEGIN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    BEGIN.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}
