//! The `monobloc` binary, which runs [`monobloc::cli`].

use std::process::ExitCode;

fn main() -> ExitCode {
    monobloc::cli::run(std::env::args_os())
}
