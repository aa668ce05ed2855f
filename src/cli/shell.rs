//! Owns completions and manual pages, generated from the description of the command line.

use std::fs;
use std::path::Path;

use clap::CommandFactory;

use super::Outcome;
use super::arguments::{Arguments, Completions, Man, command};
use super::session::Session;
use crate::error::Fault;

/// Prints a script that completes commands and options.
pub fn completions(session: &Session, asked: &Completions) -> Result<Outcome, Fault> {
    let mut script = vec![];
    clap_complete::generate(asked.shell, &mut command(), "monobloc", &mut script);
    session.terminal.print(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}

/// Prints the manual page, or writes that of every command into a folder.
pub fn man(session: &Session, asked: &Man) -> Result<Outcome, Fault> {
    let Some(folder) = &asked.out else {
        let mut page = vec![];
        let rendered = clap_mangen::Man::new(Arguments::command()).render(&mut page);
        rendered.map_err(|error| Fault::internal(format!("the manual page cannot be written: {error}")))?;
        session.terminal.print(&String::from_utf8_lossy(&page))?;
        return Ok(Outcome::Done);
    };
    write_all(folder).map_err(|error| {
        Fault::environment(format!("cannot write manual pages to `{}`: {error}", folder.display()))
            .with_remedy("name another folder with `--out`")
    })?;
    session.terminal.say(&format!("manual pages in `{}`", folder.display()));
    Ok(Outcome::Done)
}

fn write_all(folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(Arguments::command(), folder)
}
