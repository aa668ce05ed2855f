//! Time that the machine's other work does not count in.

use std::fs;
use std::sync::OnceLock;
use std::time::Instant;

/// Seconds that this thread has had a core. Elsewhere than on Linux, seconds.
pub fn core_seconds() -> f64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    let begin = BEGIN.get_or_init(Instant::now);
    let stat = fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ns = stat.and_then(|stat| stat.split(' ').next()?.parse::<f64>().ok());
    ns.map_or_else(|| begin.elapsed().as_secs_f64(), |ns| ns * 1e-9)
}
