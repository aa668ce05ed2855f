//! The `monobloc` binary; [`monobloc::cli`] is what it does.

use std::process::ExitCode;

fn main() -> ExitCode {
    monobloc::cli::run(std::env::args_os())
}
