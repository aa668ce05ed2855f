//! Owns `Budget`: an allocator that refuses memory beyond a bound, or after a deadline, while an input is read.
//!
//! monobloc runs a checkpoint's tokenizer in a process with a bounded address space and a deadline. A fuzzer cannot afford a
//! process for each input, and would not see the code in it. So here an allocation fails where that process would end, and
//! the failure is a panic that the reader's own guard catches.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Memory for one input. Less than monobloc allows, so that a machine can run many fuzzers at once.
const BYTES_MAX: usize = 256 << 20;
/// Processor time of the thread for one input, which is ample for any valid one. Time of the wall would end inputs that wait for other programs.
const TIME_MAX: Duration = Duration::from_millis(500);
/// Allocations between two checks of the clock, and the size from which an allocation is checked on its own.
const LOOK_EVERY: u32 = 1024;
const LOOK_BYTES: usize = 64 << 10;

pub struct Budget {
    live: AtomicUsize,
    /// Bytes allocated before the input: libraries keep some 200 bytes of each tokenizer for good.
    before: AtomicUsize,
    armed: AtomicBool,
    /// Whether an allocation of this input was refused.
    refused: AtomicBool,
}

thread_local! {
    static DEADLINE: Cell<Option<Duration>> = const { Cell::new(None) };
    static COUNT: Cell<u32> = const { Cell::new(0) };
}

/// Processor time of this thread.
fn spent_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec`, which lives here.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

impl Budget {
    pub const fn new() -> Budget {
        Budget {
            live: AtomicUsize::new(0),
            before: AtomicUsize::new(0),
            armed: AtomicBool::new(false),
            refused: AtomicBool::new(false),
        }
    }

    pub fn spend(&self, work: impl FnOnce()) {
        DEADLINE.set(Some(spent_time() + TIME_MAX));
        self.refused.store(false, Relaxed);
        self.before.store(self.live.load(Relaxed), Relaxed);
        self.armed.store(true, Relaxed);
        let ended = catch_unwind(AssertUnwindSafe(work));
        self.armed.store(false, Relaxed);
        // An uncaught refusal would end monobloc's process, which its parent reports. Any other panic is a finding.
        if let Err(panic) = ended
            && !self.refused.load(Relaxed)
        {
            resume_unwind(panic);
        }
    }

    /// Whether `bytes` more bytes exceed the budget. A panic that is unwinding may allocate what it needs.
    fn is_spent(&self, bytes: usize) -> bool {
        if !self.armed.load(Relaxed) || std::thread::panicking() {
            return false;
        }
        let count = COUNT.get().wrapping_add(1);
        COUNT.set(count);
        let looks = bytes >= LOOK_BYTES || count % LOOK_EVERY == 0;
        let live = self.live.load(Relaxed).saturating_sub(self.before.load(Relaxed));
        let spent =
            live.saturating_add(bytes) > BYTES_MAX || looks && DEADLINE.get().is_some_and(|end| spent_time() > end);
        if spent {
            self.refused.store(true, Relaxed);
        }
        spent
    }
}

// SAFETY: every call goes to the system's allocator, or returns null, as any allocator may.
unsafe impl GlobalAlloc for Budget {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if self.is_spent(layout.size()) {
            return null_mut();
        }
        self.live.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise; the memory came from the system.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if self.is_spent(layout.size()) {
            return null_mut();
        }
        self.live.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if self.is_spent(size.saturating_sub(layout.size())) {
            return null_mut();
        }
        self.live.fetch_add(size, Relaxed);
        self.live.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise; the old memory came from the system.
        unsafe { System.realloc(place, layout, size) }
    }
}
