//! Owns the command line: its commands, their output, and their exit codes.
//!
//! `arguments` holds the parsed command line. Each command has a file that calls the stages. Results go to stdout; progress,
//! notes and errors go to stderr. Only this module prints, asks whether there is a terminal, or ends the process.

mod arguments;
mod bench;
mod build;
mod builtin;
mod cache;
mod calibrate;
mod chat;
mod choosing;
mod doctor;
mod export;
mod flywheel;
mod generate;
mod import;
mod init;
pub(crate) mod places;
mod plan;
mod printer;
mod proposes;
mod score;
mod serve;
pub(crate) mod session;
mod shell;
mod status;
mod targets;
mod terminal;
mod trace;
mod tune;
mod units;
mod validate;

use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use crate::error::{Fault, Tier};
use crate::model::config::{schema_json, schema_table};
use arguments::Command;
use session::Session;
use terminal::interrupt;

/// Result of a command that did what it was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    /// A check or a verification said no: exit code 1.
    No,
    /// The user stopped it: exit code 130, as a shell reports SIGINT.
    Interrupted,
}

impl Outcome {
    fn exit_code(self) -> u8 {
        match self {
            Outcome::Done => 0,
            Outcome::No => 1,
            Outcome::Interrupted => 130,
        }
    }
}

/// Runs one command line, prints its answer, and returns its exit code. For `main` only: it installs a panic hook and a
/// handler of interrupts.
pub fn run(words: impl Iterator<Item = OsString>) -> ExitCode {
    terminal::catch_panics();
    let words: Vec<OsString> = words.collect();
    let arguments = match arguments::parse(&words) {
        Ok(arguments) => arguments,
        // For clap, `--help` and `--version` are such errors, too. A closed stdout is no failure.
        Err(error) => {
            match error.use_stderr() && arguments::has_json_option(&words) {
                true => terminal::print_fault_json(&arguments::usage_fault(&error)),
                false => terminal::print_usage(&error),
            }
            return ExitCode::from(if error.use_stderr() { Tier::Input.exit_code() } else { 0 });
        }
    };
    if let Some(jobs) = arguments.global.jobs {
        // This fails only if a thread pool exists already, and none does.
        let _ = rayon::ThreadPoolBuilder::new().num_threads(jobs).build_global();
    }
    let session = Session::new(arguments.global, arguments.json);
    if let Err(fault) = places::check_variables() {
        session.terminal.print_fault(&fault);
        return ExitCode::from(fault.tier.exit_code());
    }
    interrupt::install();
    let answer = catch_unwind(AssertUnwindSafe(|| answer(&session, arguments.command)));
    let fault = match answer {
        Ok(Ok(outcome)) => return ExitCode::from(outcome.exit_code()),
        Ok(Err(fault)) => fault,
        Err(_) => terminal::panicked(),
    };
    session.terminal.print_fault(&fault);
    ExitCode::from(fault.tier.exit_code())
}

fn answer(session: &Session, command: Command) -> Result<Outcome, Fault> {
    match command {
        Command::Init(asked) => init::init(session, &asked),
        Command::Build(asked) => build::build(session, &asked),
        Command::Clean(asked) => build::clean(session, &asked),
        Command::Generate(asked) => generate::generate(session, &asked),
        Command::Chat(asked) => chat::chat(session, &asked),
        Command::Serve(asked) => serve::serve(session, &asked),
        Command::Perplexity(asked) => score::perplexity(session, &asked),
        Command::Logits(asked) => score::logits(session, &asked),
        Command::Compare(asked) => score::compare(session, &asked),
        Command::Export(asked) => export::export(session, &asked),
        Command::Bench(asked) => bench::bench(session, &asked),
        Command::Trace(asked) => trace::trace(session, &asked),
        Command::Validate(asked) => validate::validate(session, &asked),
        Command::Show(asked) => build::show(session, &asked),
        Command::Explain(asked) => build::explain(session, &asked),
        Command::Plan(asked) => plan::plan(session, &asked),
        Command::Run(asked) => plan::run(session, &asked),
        Command::Import(asked) => import::import(session, &asked),
        Command::Doctor(asked) => doctor::doctor(session, &asked),
        Command::Calibrate(asked) => calibrate::calibrate(session, &asked),
        Command::Cache(asked) => cache::cache(session, &asked),
        Command::Targets(asked) => targets::targets(session, &asked),
        Command::Flywheel(asked) => flywheel::flywheel(session, &asked),
        Command::Tune(asked) => tune::tune(session, &asked),
        Command::TuneOp(asked) => tune::tune_op(session, &asked),
        Command::Status(asked) => status::status(session, &asked),
        Command::Next(asked) => status::next(session, &asked),
        Command::Report(asked) => status::report(session, &asked),
        Command::Trials(asked) => tune::trials(session, &asked),
        Command::Tokens(asked) => session::serve_tokens(&asked),
        Command::Schema(asked) => {
            match asked.json {
                true => session.terminal.print_json(&schema_json())?,
                false => session.terminal.print(&schema_table())?,
            }
            Ok(Outcome::Done)
        }
        Command::Completions(asked) => shell::completions(session, &asked),
        Command::Man(asked) => shell::man(session, &asked),
    }
}

#[cfg(test)]
mod tests {
    use super::arguments::{GROUPS, command};
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let all = command();
        let names = all.get_subcommands().map(clap::Command::get_name).filter(|name| *name != "help");
        let mut expected: Vec<&str> = names.collect();
        let mut found: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        expected.sort();
        found.sort();
        assert_eq!(found, expected);
    }

    #[test]
    fn help_is_at_most_100_columns_wide() {
        fn check(command: &mut clap::Command, wide: &mut Vec<String>) {
            let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for help in [command.render_long_help(), command.render_help()] {
                for line in help.to_string().lines() {
                    let is_code = line.starts_with("Usage: ") || examples.contains(line) && line.starts_with("  ");
                    let has_values = line.contains("[possible") || line.contains("[default:");
                    if line.chars().count() > 100 && !is_code && !has_values {
                        wide.push(format!("{}: {line}", command.get_name()));
                    }
                }
            }
            // The list of `help` is clap's own, where that of the program is in groups.
            let commands = command.get_subcommands_mut().filter(|command| command.get_name() != "help");
            commands.for_each(|command| check(command, wide));
        }
        let (mut all, mut wide) = (command(), vec![]);
        all.build();
        check(&mut all, &mut wide);
        assert!(wide.is_empty(), "{wide:#?}");
    }

    /// An installed binary has no `manifests/` and no fixtures beside it.
    #[test]
    fn examples_name_no_file_of_the_repository() {
        fn check(command: &clap::Command) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for inside in ["manifests/", "tests/", "docs/"] {
                assert!(!help.contains(inside), "{}: {help}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&command());
    }

    #[test]
    fn the_command_line_is_well_formed_and_every_command_has_an_example() {
        let mut all = command();
        all.build();
        all.clone().debug_assert();
        for command in all.get_subcommands().filter(|command| command.get_name() != "help") {
            let name = command.get_name();
            assert!(command.get_about().is_some(), "`{name}` says what it does");
            let example = format!("monobloc {name}");
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains(&example), "`{name} --help` shows an example");
        }
    }

    #[test]
    fn the_help_documents_every_exit_code() {
        let help = command().render_long_help().to_string();
        let codes = [Tier::Input, Tier::Environment, Tier::Internal].map(Tier::exit_code);
        let outcomes = [Outcome::Done, Outcome::No, Outcome::Interrupted].map(Outcome::exit_code);
        for code in codes.into_iter().chain(outcomes) {
            assert!(help.lines().any(|line| line.trim_start().starts_with(&format!("{code} "))), "{code} in {help}");
        }
    }
}
