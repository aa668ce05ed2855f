//! Owns the words of the command line: commands, options, and the text of each `--help`.

use std::any::TypeId;
use std::ffi::{OsStr, OsString};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, ValueHint};

use super::units::{parse_age, parse_bias, parse_bytes, parse_digest, parse_ids, parse_minutes, parse_trials};
use crate::digest::Digest;
use crate::error::Fault;
use crate::flywheel::Verdict;
use crate::lower::LayerOp;
use crate::pipeline::{Engine, SHOW_STAGES};
use crate::target::Target;

const EXIT_CODES: &str = "\
Exit codes:
  0    done
  1    a check failed: the schedule is not proven, the cache is damaged, a figure is withheld,
       logits differ from their goldens, or a search has nothing left to try
  2    the input has to change: manifest, checkpoint, prompt, arguments
  3    the machine lacks something: a driver, a library, disk space, a network
  70   a bug in monobloc: please report it
  130  interrupted

Environment:
  MONOBLOC_CACHE_DIR     folder of the cache, unless `--cache` names one
  MONOBLOC_SHARED_CACHE  a folder that machines share: read on a miss, written after a build
  MONOBLOC_SHARED_CACHE_READ_ONLY
                         1: that folder is only read
  MONOBLOC_REMOTE_CACHE  a store that machines share, such as s3://BUCKET/PREFIX?region=REGION: read
                         last, written after a build; its credentials come from AWS_ACCESS_KEY_ID,
                         ~/.aws, ~/.netrc and the like
  MONOBLOC_REMOTE_CACHE_MODE
                         read-write, read or off
  MONOBLOC_CACHE_KEY_FILE
                         a file with 64 hex digits that seal cache entries; entries with no such
                         seal are not used
  MONOBLOC_API_KEY       the key that `serve` asks its clients for, unless `--api-key-file` names
                         one
  MONOBLOC_NVRTC         the CUDA compiler library, or its folder
  HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT
                         the Hugging Face hub, as its Python client reads them
  NO_COLOR               disables colours

Places: a project is the nearest folder, from the current one upward, with a `cache/` or a
`flywheel/` of monobloc. Outside of projects the cache is in $XDG_CACHE_HOME/monobloc
(~/.cache/monobloc), the trials in $XDG_DATA_HOME/monobloc (~/.local/share/monobloc), and on macOS
in ~/Library. Paths in a manifest are relative to the manifest.

A command that takes a manifest also takes `hf:OWNER/NAME`, the folder of a checkpoint or a `.gguf`
file: it uses the manifest that `init` would write, with the same cache and trials, and writes none.

Start with:
  monobloc generate tinystories --prompt \"Once upon a time\"
  monobloc chat hf:HuggingFaceTB/SmolLM2-135M-Instruct
  monobloc init hf:HuggingFaceTB/SmolLM2-135M && monobloc build monobloc.toml";

/// Compiles a decoder model into one persistent, statically proven GPU kernel.
#[derive(Debug, Parser)]
#[command(name = "monobloc", version, after_help = EXIT_CODES)]
pub struct Arguments {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
    /// Whether the command has `--json` or `--jsonl`: its errors are JSON, too.
    #[arg(skip)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Folder of the cache [default: $MONOBLOC_CACHE_DIR, else the project's `cache/`, else the user's]
    #[arg(long, global = true, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// File of the trials [default: the project's `flywheel/trials.csv`, else the user's]
    #[arg(long, global = true, value_name = "FILE", value_parser = parse_trials)]
    pub trials: Option<PathBuf>,
    /// Also name the stages that had nothing to do
    #[arg(long, short, global = true, conflicts_with = "quiet")]
    pub verbose: bool,
    /// Print results and errors only
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Threads that compile, pack and hash [default: one for each core]
    #[arg(long, short, global = true, value_name = "N", value_parser = parse_jobs)]
    pub jobs: Option<usize>,
    /// Colours: on a terminal, always or never
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Init(Init),
    Build(Build),
    Clean(Clean),
    Generate(Generate),
    Chat(Chat),
    Serve(Serve),
    Perplexity(Perplexity),
    Logits(Logits),
    Compare(Compare),
    Export(Export),
    Bench(Bench),
    Trace(Trace),
    Calibrate(Calibrate),
    Validate(Validate),
    Show(Show),
    Explain(Explain),
    Plan(Plan),
    Run(Run),
    Import(Import),
    Doctor(Doctor),
    Cache(Cache),
    Targets(Targets),
    Flywheel(Flywheel),
    Tune(Tune),
    TuneOp(TuneOp),
    Status(Status),
    Next(Next),
    Report(Report),
    /// Print for each model family the config.json keys that are modelled, and values of the others
    #[command(after_help = "Example:\n  monobloc schema > schema.md")]
    Schema(Schema),
    Completions(Completions),
    Man(Man),
    #[command(skip)]
    Trials(Trials),
    #[command(skip)]
    Tokens(Tokens),
}

/// Commands by what they are for, as docs/commands.md has them.
pub const GROUPS: [(&str, &[&str]); 4] = [
    (
        "Build and run",
        &["init", "build", "clean", "generate", "chat", "serve", "perplexity", "logits", "export", "compare"],
    ),
    ("Measure", &["bench", "trace", "calibrate"]),
    ("Search", &["tune", "tune-op", "status", "next", "report", "flywheel"]),
    (
        "Inspect",
        &[
            "validate",
            "show",
            "explain",
            "plan",
            "run",
            "import",
            "schema",
            "targets",
            "completions",
            "man",
            "doctor",
            "cache",
        ],
    ),
];

/// Columns of a line of help; examples may be longer.
const HELP_COLUMNS: usize = 100;
/// The columns that the text of an option has in `--help`, and in `-h`.
const LONG_COLUMNS: usize = HELP_COLUMNS - 10;
const SHORT_COLUMNS: usize = 64;

/// The command line, with its commands in groups, and help that is no wider than [`HELP_COLUMNS`].
pub fn command() -> clap::Command {
    let plain = Arguments::command();
    let mut template = "{about-with-newline}\n{usage-heading} {usage}\n".to_string();
    for (title, names) in GROUPS {
        template.push_str(&format!("\n{title}:\n"));
        for name in names {
            let about = plain.find_subcommand(name).and_then(clap::Command::get_about).map(ToString::to_string);
            let about = wrapped(&about.unwrap_or_default(), HELP_COLUMNS - 15).replace('\n', &format!("\n{:15}", ""));
            template.push_str(&format!("  {name:<12} {about}\n"));
        }
    }
    template.push_str("\n{options}\n{after-help}");
    narrow(plain).help_template(template)
}

/// A command whose help is wrapped, and whose options say what a shell may complete.
fn narrow(command: clap::Command) -> clap::Command {
    let long = command.get_long_about().map(|text| wrapped(&text.to_string(), HELP_COLUMNS));
    let command = match long {
        Some(long) => command.long_about(long),
        None => command,
    };
    command.mut_args(narrow_option).mut_subcommands(narrow)
}

fn narrow_option(option: clap::Arg) -> clap::Arg {
    let text = option.get_long_help().or(option.get_help()).map(ToString::to_string).unwrap_or_default();
    let short = option.get_help().map(ToString::to_string).unwrap_or_default();
    let option = option.help(wrapped(&short, SHORT_COLUMNS)).long_help(wrapped(&text, LONG_COLUMNS));
    let value = option.get_value_parser().type_id();
    if !option.get_action().takes_values() || value == TypeId::of::<PathBuf>() {
        return option;
    }
    if option.get_id() == "target" && value == TypeId::of::<String>() {
        return option.value_parser(TargetName).hide_possible_values(true);
    }
    match option.get_id().as_str() {
        // A folder, among others.
        "source" => option.value_hint(ValueHint::AnyPath),
        _ => option.value_hint(ValueHint::Other),
    }
}

/// Text whose lines are at most `columns` wide. Lines that begin with a blank stay as they are.
fn wrapped(text: &str, columns: usize) -> String {
    let (mut out, mut width) = (String::new(), 0);
    for line in text.lines() {
        let stays = line.is_empty() || line.starts_with(' ');
        if stays || width == 0 {
            let begins = !out.is_empty() && !out.ends_with('\n');
            out.push_str(if begins { "\n" } else { "" });
        }
        if stays {
            out.push_str(line);
            out.push('\n');
            width = 0;
            continue;
        }
        for word in line.split_whitespace() {
            let length = word.chars().count();
            if width > 0 && width + 1 + length > columns {
                out.push('\n');
                width = 0;
            } else if width > 0 {
                out.push(' ');
                width += 1;
            }
            out.push_str(word);
            width += length;
        }
    }
    out.trim_end().to_string()
}

/// A target of a manifest: any name. Shells complete those of built-in records.
#[derive(Debug, Clone)]
struct TargetName;

impl TypedValueParser for TargetName {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        option: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, option, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Target::builtin_names().map(PossibleValue::new)))
    }
}

/// Reads a command line.
///
/// # Errors
/// As clap has them: `--help` and `--version` are such errors, too.
pub fn parse(words: &[OsString]) -> Result<Arguments, clap::Error> {
    if let Some(word) = words.iter().find(|word| word.to_str().is_none()) {
        let message = format!("expected UTF-8 text, found `{}`: rename the file", word.display());
        return Err(command().error(ErrorKind::InvalidUtf8, message));
    }
    // Processes that monobloc starts: no part of what people are shown.
    let is_internal = words.get(1).is_some_and(|word| word == "trials" || word == "tokens");
    if is_internal {
        let InternalArguments { global, command } = InternalArguments::try_parse_from(words)?;
        let command = match command {
            Internal::Trials(asked) => Command::Trials(asked),
            Internal::Tokens(asked) => Command::Tokens(asked),
        };
        return Ok(Arguments { global, command, json: false });
    }
    let matches = command().try_get_matches_from(words)?;
    let json = asks_for_json(&matches);
    Ok(Arguments { json, ..Arguments::from_arg_matches(&matches)? })
}

/// Ids of the options that print JSON.
const JSON_OPTIONS: [&str; 2] = ["json", "jsonl"];

/// Whether the innermost command prints JSON.
fn asks_for_json(matches: &clap::ArgMatches) -> bool {
    match matches.subcommand() {
        Some((_, inner)) => asks_for_json(inner),
        None => JSON_OPTIONS.iter().any(|id| matches!(matches.try_get_one::<bool>(id), Ok(Some(true)))),
    }
}

/// As [`Arguments::json`], for a command line that cannot be parsed.
pub fn has_json_option(words: &[OsString]) -> bool {
    let options = words.iter().take_while(|word| *word != "--").filter_map(|word| word.to_str()?.strip_prefix("--"));
    options.into_iter().any(|option| JSON_OPTIONS.contains(&option))
}

/// What clap says of a command line that it refuses, without its layout.
pub fn usage_fault(error: &clap::Error) -> Fault {
    let text = error.render().to_string();
    let mut parts = text.split("\n\n").map(str::trim);
    let message = parts.next().unwrap_or_default();
    let rest: Vec<&str> = parts.collect();
    let remedy = rest.iter().find_map(|part| part.strip_prefix("tip: "));
    let remedy = remedy.or_else(|| rest.iter().find(|part| part.starts_with("Usage: ")).copied());
    Fault::input(message.strip_prefix("error: ").unwrap_or(message))
        .with_remedy(remedy.unwrap_or("`--help` lists the options and their values"))
}

#[derive(Debug, Parser)]
#[command(name = "monobloc", version)]
struct InternalArguments {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Internal,
}

#[derive(Debug, Subcommand)]
enum Internal {
    Trials(Trials),
    Tokens(Tokens),
}

#[derive(Debug, Args)]
pub struct Schema {
    /// Print one JSON object with the text
    #[arg(long)]
    pub json: bool,
}

/// Print a script that completes commands and options in a shell
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  monobloc completions bash > ~/.local/share/bash-completion/completions/monobloc\n  monobloc completions fish > ~/.config/fish/completions/monobloc.fish"
)]
pub struct Completions {
    /// Shell that reads it
    pub shell: clap_complete::Shell,
}

/// Print the manual page, or write one for every command
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  monobloc man | man -l -\n  monobloc man --out ~/.local/share/man/man1")]
pub struct Man {
    /// Folder for the page of every command
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// Remove the results of a manifest's last build from the cache
///
/// The next build runs every stage again. `monobloc cache gc` makes the whole cache smaller.
#[derive(Debug, Args)]
#[command(verbatim_doc_comment, after_help = "Example:\n  monobloc clean monobloc.toml --target h200")]
pub struct Clean {
    /// Manifest whose results are removed
    pub manifest: PathBuf,
    /// Remove only the results of this target
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Write a manifest for a model: of the hub, a checkpoint folder, a config.json, or the built-in one
///
/// The target is the GPU of this machine if a built-in record describes it, else `cpu`.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc init                                  # a small built-in model
  monobloc init hf:HuggingFaceTB/SmolLM2-135M
  monobloc init ~/models/mine --target h200 --out mine.toml"
)]
pub struct Init {
    /// `hf:OWNER/NAME`, a folder, a .gguf file, a config.json, or a built-in model [default: `tinystories`]
    #[arg(value_name = "SOURCE")]
    pub source: Option<String>,
    /// File to write
    #[arg(long, value_name = "FILE", default_value = "monobloc.toml")]
    pub out: PathBuf,
    /// Target record: a name that `monobloc targets` lists, or a path; repeat it for several targets
    #[arg(long, value_name = "NAME")]
    pub target: Vec<String>,
    /// Replace the file if it exists
    #[arg(long)]
    pub force: bool,
    /// Print what was written as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Build every target of a manifest: import, lower, prove, compile, check, measure
///
/// If `[search]` of the manifest has a budget, each target that can run here is tuned first, once (see `tune`). A stage
/// whose inputs did not change comes from the cache. Stages that need a device or a tool that this machine lacks wait,
/// and are listed at the end: run the same command with the same cache on a machine that has it.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc build tinystories
  monobloc build hf:HuggingFaceTB/SmolLM2-135M --target h200
  monobloc build monobloc.toml --json | jq '.targets[].positions'
  monobloc build *.toml --keep-going --require compile     # in CI without a GPU
  monobloc build *.toml --keep-going --require all         # where the GPUs are

A manifest needs at least:
  [model]
  source = \"path:DIR\"          # or \"hf:OWNER/NAME\", or \"synthetic:CONFIG.json\"
  [precision]
  weights = \"bf16\"             # or \"fp32\"
  [decode]
  context_max = 2048
  [[target]]
  record = \"cpu\"               # a name that `monobloc targets` lists, or the path of a record"
)]
pub struct Build {
    /// Manifests to build, one after another, or models in their place (`hf:OWNER/NAME`, a checkpoint folder, a .gguf file)
    #[arg(required = true)]
    pub manifest: Vec<PathBuf>,
    /// Build only this target of the manifest
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Skip the search of the manifest, and build the best candidate found so far
    #[arg(long)]
    pub no_search: bool,
    /// Fail with exit code 3 if a target waits: `compile` for its compiler, `all` for its compiler or its device
    #[arg(long, value_name = "WHAT", conflicts_with = "require_complete")]
    pub require: Option<Require>,
    /// As `--require all`
    #[arg(long)]
    pub require_complete: bool,
    /// Continue with the next manifest after one that fails; the exit code is that of the first failure
    #[arg(long)]
    pub keep_going: bool,
    /// Print which stages would run, and run none
    #[arg(long, conflicts_with = "force")]
    pub dry_run: bool,
    /// Run every stage again, even if the cache has its result
    #[arg(long)]
    pub force: bool,
    /// Print what was done as one JSON object, or for several manifests as an array
    #[arg(long)]
    pub json: bool,
}

/// What has to be done for a build to succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Require {
    /// Every kernel is compiled
    Compile,
    /// Every target is compiled, checked and measured
    All,
}

/// Serve a manifest's model over HTTP, for clients of the OpenAI API
///
/// Builds and checks what is missing, then listens until SIGTERM (exit code 0) or Ctrl-C (130), and lets open requests finish. Requests run together
/// in the steps of one engine. On a target of kind `cpu`, and on a GPU with `batch_invariant` in the manifest, a request gets the
/// same tokens with any other requests. docs/serve.md has the endpoints.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc serve tinystories
  monobloc serve tinystories --port 8080 --max-batch 16 --max-waiting 1000
  monobloc serve tinystories --host 0.0.0.0 --api-key-file key.txt"
)]
pub struct Serve {
    /// Manifest whose model is served, a model in its place (`hf:OWNER/NAME`, a checkpoint folder, a .gguf file), or an export
    pub manifest: PathBuf,
    /// Address to listen on; 0.0.0.0 accepts connections from other machines
    #[arg(long, value_name = "IP", default_value = "127.0.0.1")]
    pub host: std::net::IpAddr,
    /// Name that clients may call this server by, beside `localhost` and loopback addresses; repeat it for more names. Without this, a
    /// server that other machines can use answers to any name
    #[arg(long, value_name = "NAME")]
    pub allow_host: Vec<String>,
    /// Origin of web pages that may use this server, such as `https://chat.example`, or `*` for all; repeat it for more origins
    #[arg(long, value_name = "ORIGIN")]
    pub allow_origin: Vec<String>,
    /// Port to listen on; 0 takes a free one and prints it
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub port: u16,
    /// File with the key that clients have to send as bearer token [default: $MONOBLOC_API_KEY, else none is asked for]
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Name that clients call the model by [default: the manifest's]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// Maximum number of requests that run at the same time [default: the manifest's `sequences_max`, else 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_batch: Option<u32>,
    /// Maximum number of requests that wait; further ones are refused with status 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub max_waiting: u32,
    /// Prompt tokens of a step in which other requests decode: more tokens read prompts faster, and delay the other requests
    /// [default: the manifest's `chunk_max`, else 8; on a GPU 512, read in launches of their own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub max_chunk: Option<u32>,
    /// Steps of a launch on a GPU: more steps are faster, but new requests wait longer. With 1, no launch is queued while another
    /// one runs. A launch on the target `cpu` always has one step
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_steps: u32,
    /// Speculative decoding with the layer of the checkpoint that predicts further tokens (MTP): propose up to N tokens of each request and
    /// verify them in one step; `mtp` is `mtp:2`
    #[arg(long, value_name = "mtp[:N]", value_parser = parse_draft)]
    pub draft: Option<DraftOf>,
    /// Tokens that the cache holds for all requests together. A model with a recurrent state also keeps a snapshot of it for each
    /// context of these tokens [default: the manifest's `cache_pages`, else four contexts; on a GPU what fits into free memory]
    #[arg(long, value_name = "N")]
    pub cache_tokens: Option<u32>,
    /// Seconds after which a request ends, even if it is not complete
    #[arg(long, value_name = "N", default_value_t = 600)]
    pub max_seconds: u64,
    /// Seconds that open requests get to finish when the server ends
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub grace_seconds: u64,
    /// Print a line on stderr for each request [default: `text` with `--verbose`, else `off`]
    #[arg(long, value_name = "FORM")]
    pub log: Option<LogForm>,
    /// Target to run on [default: the manifest's first that this machine can run]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    #[command(flatten)]
    pub checks: Checks,
}

/// The form of the log of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogForm {
    Off,
    Text,
    Json,
}

/// Generate text, or token ids, with a manifest's model
///
/// Builds and checks what is missing, then streams the generated text. Without `--temperature` it is greedy. The text ends at the
/// model's end-of-text token, at a text of `--stop`, after `--max-tokens`, or when the context is full. A terminal
/// shows the prompt first; a pipe gets only the generated text.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    group = clap::ArgGroup::new("input").required(true),
    after_help = "\
Examples:
  monobloc generate tinystories --prompt \"Once upon a time, there was a little fox\"
  monobloc generate tinystories --chat \"Tell me a story about a blue kite.\"
  monobloc generate tinystories --prompt \"One day\" --temperature 0.8 --top-p 0.95 --seed 7
  echo 'One day' | monobloc generate tinystories --prompt - --stop .
  monobloc generate tinystories --prompt \"One day\" --jsonl --logprobs 3
  monobloc generate tinystories --prompt-file story.txt --lookup 4
  monobloc generate tinystories --ids 0,364,839 --max-tokens 16 --ignore-eos")]
pub struct Generate {
    /// Manifest whose model is run, a model in its place (`hf:OWNER/NAME`, a checkpoint folder, a .gguf file), or an export
    pub manifest: PathBuf,
    /// Text to continue, after the tokens that the tokenizer puts before a text; `-` reads stdin
    #[arg(long, value_name = "TEXT", group = "input", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// File with the text to continue
    #[arg(long, value_name = "FILE", group = "input")]
    pub prompt_file: Option<PathBuf>,
    /// Message to answer, put into the checkpoint's chat template; `-` reads stdin
    #[arg(long, value_name = "TEXT", group = "input", allow_hyphen_values = true)]
    pub chat: Option<String>,
    /// Token ids to continue; prints ids
    #[arg(long, value_name = "IDS", group = "input", value_parser = parse_ids)]
    pub ids: Option<Ids>,
    /// System prompt before a chat
    #[arg(long, value_name = "TEXT", requires = "chat", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Let the model answer a chat without thinking first, if its chat template can ask for that
    #[arg(long, requires = "chat")]
    pub no_think: bool,
    /// Add nothing to the text: no chat template, no token that begins a text
    #[arg(long, conflicts_with_all = ["ids", "system", "no_think"])]
    pub raw: bool,
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub max_tokens: usize,
    #[command(flatten)]
    pub choosing: Choosing,
    /// Text that ends the generation and is not printed; repeat it for more texts
    #[arg(long, value_name = "TEXT", conflicts_with = "ids", allow_hyphen_values = true, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Print the prompt first, as on a terminal
    #[arg(long, conflicts_with = "ids")]
    pub echo: bool,
    /// Continue after the end-of-text token, and print special tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Speculative decoding, for text that repeats itself: propose up to N tokens that followed the last tokens earlier in the
    /// text, and verify them in one step
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub lookup: Option<u32>,
    /// Speculative decoding with the layer of the checkpoint that predicts further tokens (MTP): propose up to N tokens and verify them in
    /// one step; `mtp` is `mtp:2`
    #[arg(long, value_name = "mtp[:N]", value_parser = parse_draft, conflicts_with = "lookup")]
    pub draft: Option<DraftOf>,
    /// Target to run on [default: the manifest's first that this machine can run]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Also print the log-probability of each token and of the N most probable tokens at its position
    #[arg(long, value_name = "N", requires = "format")]
    pub logprobs: Option<u32>,
    /// Print one JSON object at the end instead of text
    #[arg(long, group = "format")]
    pub json: bool,
    /// Print a line of JSON for each token as soon as it is generated, and a last line with `stop`
    #[arg(long, group = "format")]
    pub jsonl: bool,
    #[command(flatten)]
    pub checks: Checks,
}

/// A draft of the checkpoint itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftOf {
    /// Tokens of a proposal, at most.
    pub most: u32,
}

/// Tokens of a proposal where the user names no number.
const DRAFT_MOST: u32 = 2;
/// The most tokens of a proposal that a user may name: no step has more rows.
const DRAFT_MOST_MAX: u32 = 127;

/// `mtp`, or `mtp:N`.
fn parse_draft(text: &str) -> Result<DraftOf, String> {
    let expected = || format!("expected `mtp` or `mtp:N` with N from 1 to {DRAFT_MOST_MAX}");
    let most = match text.strip_prefix("mtp").ok_or_else(expected)? {
        "" => DRAFT_MOST,
        rest => rest.strip_prefix(':').and_then(|most| most.parse().ok()).ok_or_else(expected)?,
    };
    if (1..=DRAFT_MOST_MAX).contains(&most) { Ok(DraftOf { most }) } else { Err(expected()) }
}

/// How the tokens of a text are chosen.
#[derive(Debug, Args)]
#[command(next_help_heading = "Choice of tokens")]
pub struct Choosing {
    /// 0 chooses the most probable token; higher values vary more
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Choose among the N most probable tokens
    #[arg(long, value_name = "N")]
    pub top_k: Option<u32>,
    /// Choose among the fewest most probable tokens whose probabilities sum to at least this
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Leave out tokens whose probability is below this fraction of the highest one
    #[arg(long, value_name = "F", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Random seed; the same seed gives the same text [default: 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Make tokens of the prompt and the answer less likely: divide a positive logit by this, multiply a negative one; 1 changes nothing
    #[arg(long, value_name = "F", default_value_t = 1.0, allow_negative_numbers = true)]
    pub repetition_penalty: f32,
    /// Subtract this from the logit of every generated token; -2 to 2
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Subtract this from the logit of a token once for each time that it was generated; -2 to 2
    #[arg(long, value_name = "F", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Add F (-100 to 100) to the logit of a token; repeat it for more tokens
    #[arg(long, value_name = "ID=F", value_parser = parse_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Do not end the text before this number of tokens
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub min_tokens: u32,
}

/// Whether kernels are checked before they run.
#[derive(Debug, Args)]
pub struct Checks {
    /// Run kernels whose numbers were not compared on a device of this kind. Without it they are compared before the first token, once, and
    /// one that computes something else is refused
    #[arg(long)]
    pub unchecked: bool,
}

/// Token ids of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ids(pub Vec<u32>);

/// Chat with a manifest's model, in the chat template of its checkpoint
///
/// On a terminal, you can edit lines and recall those of earlier chats. Otherwise each line of stdin is a message.
/// Ctrl-C stops an answer, and the chat continues with the next message; Ctrl-D ends the chat. A turn decodes only its
/// new tokens.
///
/// Lines that begin with `/` are commands:
///   /help        lists the commands
///   /reset       forgets the conversation, but not the system prompt
///   /save FILE   writes the conversation as JSON: {"messages": [{"role": ..., "content": ...}, ...]}
///   /quit        ends the chat
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc chat tinystories
  monobloc chat monobloc.toml --system \"Answer in one sentence.\" --temperature 0.7 --top-p 0.95
  printf 'Tell me a story.\\nAnd another one.\\n' | monobloc chat tinystories"
)]
pub struct Chat {
    /// Manifest whose model is run, a model in its place (`hf:OWNER/NAME`, a checkpoint folder, a .gguf file), or an export
    pub manifest: PathBuf,
    /// System prompt before the conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Let the model answer without thinking first, if its chat template can ask for that
    #[arg(long)]
    pub no_think: bool,
    /// Maximum number of tokens of an answer [default: as many as fit into the context]
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<usize>,
    #[command(flatten)]
    pub choosing: Choosing,
    /// Target to run on [default: the manifest's first that this machine can run]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    #[command(flatten)]
    pub checks: Checks,
}

/// Measure how well a manifest's model predicts a text
///
/// Prints the mean negative log-likelihood of each next token in nats, and its exponential, the perplexity. A text with
/// more tokens than the manifest's `context_max` is read in windows of that size. Each window begins with the text's
/// first special token, if there is one, and the last token of the previous window, so every token is scored once.
///
/// `--formats` compares all formats that weights can be rounded to: bytes and time of a step, perplexity, and the mean
/// Kullback-Leibler divergence from the predictions without rounding.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc perplexity tinystories story.txt
  monobloc perplexity tinystories story.txt --json | jq .ppl
  monobloc perplexity tinystories story.txt --formats"
)]
pub struct Perplexity {
    /// Manifest whose model is run, a model in its place (`hf:OWNER/NAME`, a checkpoint folder, a .gguf file), or an export
    pub manifest: PathBuf,
    /// UTF-8 text
    pub file: PathBuf,
    /// Target to run on [default: the manifest's first that this machine can run]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Compare all formats that weights can be rounded to, in one table
    #[arg(long)]
    pub formats: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub checks: Checks,
}

/// Write the logits of a manifest's model into a file, to compare them with another implementation
///
/// The model reads the ids one after another. The file has one fp32 tensor, `logits` [positions, vocab]: row i has the
/// logits after id i.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Example:
  monobloc logits DIR --ids 0,364,839 --out logits.safetensors

and to compare:
  from safetensors.torch import load_file; from transformers import AutoModelForCausalLM; import torch
  model = AutoModelForCausalLM.from_pretrained(\"DIR\", dtype=torch.float32)
  print((load_file(\"logits.safetensors\")[\"logits\"] - model(torch.tensor([[0, 364, 839]])).logits[0]).abs().max())"
)]
pub struct Logits {
    /// Manifest whose model is run, a model in its place (`hf:OWNER/NAME`, a checkpoint folder, a .gguf file), or an export
    pub manifest: PathBuf,
    /// Token ids
    #[arg(long, value_name = "IDS", value_parser = parse_ids)]
    pub ids: Ids,
    /// File to write
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Target to run on [default: the manifest's first that this machine can run]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print what was written as one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub checks: Checks,
}

/// Export a manifest's model: write a folder with all that a device needs to run it
///
/// Builds what is missing. The folder has schedules, cubins, weights, tokenizer and target records, each with its
/// digest; an interrupted export leaves no folder. `generate`, `chat`, `serve`, `perplexity` and `logits` take it in
/// place of a manifest, and need no checkpoint and no cache. They compare every file that they use with its digest, and
/// prove every schedule again.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc export tinystories --out tinystories.export
  monobloc generate tinystories.export --prompt \"Once upon a time\"
  monobloc export hf:HuggingFaceTB/SmolLM2-135M --target h200 --max-batch 32 --out smollm.export
  monobloc serve smollm.export"
)]
pub struct Export {
    /// Manifest whose model is exported
    pub manifest: PathBuf,
    /// Folder to write, which must not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Target to export; repeat it for several [default: every target of the manifest]
    #[arg(long, value_name = "NAME")]
    pub target: Vec<String>,
    /// Maximum number of requests that a server of the export runs at the same time [default: the manifest's `sequences_max`, else 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub max_batch: Option<u32>,
    /// Tokens that the cache of a server of the export holds for all requests together [default: the manifest's `cache_pages`, else
    /// four contexts; on a GPU what fits into its memory beside the weights]
    #[arg(long, value_name = "N")]
    pub cache_tokens: Option<u32>,
    /// Print what was written as one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub checks: Checks,
}

/// Compare the logits and tokens of a manifest's model with those of another implementation
///
/// The goldens are a safetensors file with `input_ids` [positions] and fp32 `logits` [positions, vocab]. Optional are
/// `logits_bf16` of the same shape, `greedy_ids` [steps] (the greedy continuation of the ids), and `greedy_margin`
/// [steps] (the difference of its logit to the second largest one).
///
/// In fp32, no logit may differ by more than 3e-4, and the greedy tokens have to be equal. If anything is bf16, the
/// norm of all differences divided by the norm of all logits may be at most 1.5 times that of `logits_bf16`, or 0.04
/// without it. Greedy tokens then have to be equal up to the first one whose margin is below twice the largest
/// difference. Exit code 1: they differ.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc compare DIR --goldens goldens.safetensors
  monobloc compare DIR --goldens goldens.safetensors --target h200 --json | jq .error_abs_max

and to make the file:
  from safetensors.torch import save_file; from transformers import AutoModelForCausalLM; import torch
  ids = torch.tensor([[0, 364, 839]])
  logits = lambda dtype: AutoModelForCausalLM.from_pretrained(\"DIR\", dtype=dtype)(ids).logits[0].detach()
  save_file({\"input_ids\": ids[0], \"logits\": logits(torch.float32), \"logits_bf16\": logits(torch.bfloat16)},
            \"goldens.safetensors\")"
)]
pub struct Compare {
    /// Manifest whose model is run
    pub manifest: PathBuf,
    /// Golden outputs of the manifest's checkpoint
    #[arg(long, value_name = "FILE")]
    pub goldens: PathBuf,
    /// Target to run on [default: the manifest's first that this machine can run]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub checks: Checks,
}

/// Time a manifest's kernel, alone and in turns with baselines
///
/// Builds and checks the kernel first: a kernel with wrong numbers gets no figure. Whole launches are timed, on a
/// device by events around each. A baseline and the kernel run in turns, A B B A. A baseline's ratio is the median over
/// rounds with a 95 % bootstrap interval: 1.5x means that the baseline takes 1.5 times as long. A time in which the
/// device cannot read the bytes of a step is withheld.
///
/// A baseline is `torch` (PyTorch's decode step at the shapes of the manifest's config, run by `python3`), a schedule
/// FILE.mkir for the same model, or the command line of a program; docs/bench.md has its protocol.
///
/// Exit code 1: a figure is withheld, or a baseline gave none.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc bench tinystories
  monobloc bench monobloc.toml --baseline torch
  monobloc bench monobloc.toml --rows 1,8,16 --prompt 512 --baseline torch
  monobloc bench monobloc.toml --rows 8,32 --position 16000 --others 300
  monobloc bench tinystories --baseline mine.mkir --position 0,32
  monobloc bench monobloc.toml --baseline '../before/monobloc bench monobloc.toml --serve'"
)]
pub struct Bench {
    /// Manifest whose kernel is timed
    pub manifest: PathBuf,
    /// What to compare with; repeat it for several
    #[arg(long, value_name = "WHAT", conflicts_with = "serve")]
    pub baseline: Vec<String>,
    /// Positions at which launches begin [default: the manifest's `time_positions`]
    #[arg(long, value_name = "N,N", value_parser = parse_ids)]
    pub position: Option<Ids>,
    /// Time steps of several rows; each number is a count of sequences that are decoded together
    #[arg(long, value_name = "N,N", value_parser = parse_ids, conflicts_with = "serve")]
    pub rows: Option<Ids>,
    /// Position of all sequences of `--rows` but the first: steps with and without KV splits
    #[arg(long, value_name = "N", requires = "rows", conflicts_with_all = ["prompt", "baseline"])]
    pub others: Option<u32>,
    /// Time prompts of these lengths, in tokens, read in chunks
    #[arg(long, value_name = "N,N", value_parser = parse_ids, conflicts_with = "serve")]
    pub prompt: Option<Ids>,
    /// Tokens of a prompt chunk [default: the rows of the kernel that reads prompts]
    #[arg(long, value_name = "N,N", value_parser = parse_ids, requires = "prompt")]
    pub chunk: Option<Ids>,
    /// Maximum number of rounds of a comparison, with four launches each
    #[arg(long, value_name = "N", default_value_t = 15)]
    pub rounds: usize,
    /// Time after which no further round of a comparison starts: s, m or h
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_age)]
    pub time: Duration,
    /// Maximum wait for one answer of a baseline: s, m or h
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_age)]
    pub baseline_timeout: Duration,
    /// Act as a baseline: answer questions on stdin
    #[arg(long, conflicts_with_all = ["json", "position"])]
    pub serve: bool,
    /// Target to time [default: the manifest's first]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Show where the time of a step goes, SM by SM
///
/// Compiles the kernel with time stamps, runs it, and writes the timeline of every SM as a file for
/// https://ui.perfetto.dev. The table shows for each kind of task how long an SM waited for other SMs, waited for
/// bytes, computed and finished: µs of one step, as mean, minimum and maximum over SMs. Stamps take time: compare the
/// step with that of `monobloc bench`.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc trace monobloc.toml --target h200
  monobloc trace monobloc.toml --position 1024 --out deep.json
  monobloc trace monobloc.toml --rows 8
  monobloc trace monobloc.toml --prompt 512 --position 0
  monobloc trace monobloc.toml --json | jq '.rows[] | {kind, wait: .wait.mean_us}'"
)]
pub struct Trace {
    /// Manifest whose kernel is traced
    pub manifest: PathBuf,
    /// Position of the first step [default: the manifest's first of `time_positions`]
    #[arg(long, value_name = "N")]
    pub position: Option<u32>,
    /// Trace a step of this number of sequences instead of a step of one
    #[arg(long, value_name = "N")]
    pub rows: Option<u32>,
    /// Trace a prompt chunk of this number of tokens, and the tail that decides the next token, instead of a step
    #[arg(long, value_name = "N", conflicts_with_all = ["rows", "steps"])]
    pub prompt: Option<u32>,
    /// Steps of the traced launch
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub steps: u32,
    /// File of the timeline
    #[arg(long, value_name = "FILE", default_value = "trace.json")]
    pub out: PathBuf,
    /// Target to trace [default: the manifest's first]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print the table as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Measure a device, and print its target record with the measured figures
///
/// Measures the read bandwidth with the record's copy mechanism, an exchange of 1024 packets between all SMs (idle, and
/// with 32 KiB in flight on each), an empty launch, and the slowest SM's share of the mean bandwidth. It takes a few
/// seconds.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc calibrate h200
  monobloc calibrate mine.toml --out mine.toml"
)]
pub struct Calibrate {
    /// Record that describes the device: a builtin name, or a path
    pub target: String,
    /// File to write instead of stdout
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Print the record as one JSON object
    #[arg(long, conflicts_with = "out")]
    pub json: bool,
}

/// Prove that a schedule has no deadlock and no race, or show what is wrong with it
///
/// Plans of wave kernels that follow the schedule are proven, too: each computes the program of the schedule.
///
/// Exit code 0: proven. 1: rejected, with every violation on the line that it concerns. 2: not a schedule.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc show schedule tinystories > mine.mkir
  monobloc validate mine.mkir
  monobloc show waves monobloc.toml --target h200 > waves.mkir
  monobloc validate mine.mkir --target h200 --json | jq '.violations[].rule'"
)]
pub struct Validate {
    /// Schedule in text form
    pub file: PathBuf,
    /// Target to prove it for [default: the one that it names]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print the verdict as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Print the result of a build stage as text
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  monobloc show model tinystories
  monobloc show schedule tinystories > mine.mkir
  monobloc show source monobloc.toml --target h200")]
pub struct Show {
    /// Stage to print
    #[arg(value_parser = PossibleValuesParser::new(SHOW_STAGES))]
    pub stage: String,
    /// Manifest to show
    pub manifest: PathBuf,
    /// Target to show it for [default: the manifest's first]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Of the steps of several sequences, show those of this number of rows [default: 32]
    #[arg(long, value_name = "N")]
    pub rows: Option<u32>,
    /// Print one JSON object with the text
    #[arg(long)]
    pub json: bool,
}

/// Print which stages a build would run, and which input of each has changed
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  monobloc explain tinystories
  monobloc explain tinystories --json | jq '.[] | select(.cached | not) | .stage'")]
pub struct Explain {
    /// Manifest to explain
    pub manifest: PathBuf,
    /// Explain only this target of the manifest
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print a JSON array of stages
    #[arg(long)]
    pub json: bool,
}

/// Print the stages that builds would run as jobs for other machines
///
/// A line for each stage: its key, stage, target, what it needs, manifest, and the kernel unless it is the decode kernel. With
/// `--json` it is a matrix, as GitHub Actions takes it. The machines need the same manifests and one cache, such as a remote one.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc plan *.toml
  monobloc plan *.toml --needs nvrtc --json     # {\"include\": [{\"key\": ..., \"target\": ...}]}
  monobloc plan m.toml --needs gpu | while read key rest; do monobloc run m.toml --stage $key; done"
)]
pub struct Plan {
    /// Manifests to build
    #[arg(required = true)]
    pub manifest: Vec<PathBuf>,
    /// Print only stages that need this
    #[arg(long, value_name = "WHAT")]
    pub needs: Option<NeedsWord>,
    /// Command whose kernels are made
    #[arg(long = "for", value_name = "COMMAND", default_value = "build")]
    pub purpose: ForWord,
    /// Print stages with a result in the cache, too
    #[arg(long)]
    pub all: bool,
    /// Print one JSON object, a matrix
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ForWord {
    /// What `build` makes; with `sequences_max` above 1 also the kernels of a server
    Build,
    /// Also the kernels of a server of the manifest's sizes
    Serve,
    /// Also the kernels that read the prompt of one text
    Generate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NeedsWord {
    /// The program and the checkpoint
    Host,
    /// The CUDA compiler library, and no GPU
    Nvrtc,
    /// A GPU that the target describes
    Gpu,
}

/// Run one stage of a plan, and what it needs that is not in the cache
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  monobloc run monobloc.toml --stage KEY   # a key that `monobloc plan` printed")]
pub struct Run {
    /// Manifests of the plan
    #[arg(required = true)]
    pub manifest: Vec<PathBuf>,
    /// Key of the stage
    #[arg(long, value_name = "KEY", value_parser = parse_digest)]
    pub stage: Digest,
}

/// Print what a checkpoint is, or every reason why it is not supported
///
/// Reads the config and the headers of the weight files, never the weights.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc import hf:HuggingFaceTB/SmolLM2-135M
  monobloc import ~/models/mine
  monobloc import ~/models/mine --json | jq '.reasons[]'"
)]
pub struct Import {
    /// Folder of a checkpoint, `hf:OWNER/NAME`, a .gguf file, or a config.json alone
    #[arg(value_name = "SOURCE")]
    pub place: PathBuf,
    /// Has no effect, because an import changes nothing; accepted since scripts have it
    #[arg(long, hide = true)]
    pub dry_run: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Print versions, cache, trials, targets, CUDA compiler, driver and devices
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  monobloc doctor
  monobloc doctor --device          # on a machine with a GPU
  monobloc doctor --json | jq .nvrtc

A machine without CUDA is healthy: the `cpu` target needs nothing. Exit code 1 means that the cache
or the trials cannot be used.")]
pub struct Doctor {
    /// Also test every device for the hardware behaviour that kernels rely on; about a second each
    #[arg(long)]
    pub device: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Show, clean up or verify the cache, or copy it to and from the remote one
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  monobloc cache stats
  monobloc cache gc --max-size 5G --min-age 12h
  monobloc cache verify && echo sound
  MONOBLOC_REMOTE_CACHE=s3://bucket/monobloc monobloc cache push
  monobloc cache gc --remote --older-than 4w")]
pub struct Cache {
    #[command(subcommand)]
    pub action: CacheAction,
}

#[derive(Debug, Subcommand)]
pub enum CacheAction {
    /// Print the number and size of entries of each stage
    Stats {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Remove the least recently used entries until the cache is below a size
    Gc {
        /// Size that the cache may have afterwards; K, M, G and T are powers of 1024
        #[arg(long, value_name = "SIZE", default_value = "10G", value_parser = parse_bytes)]
        max_size: u64,
        /// Keep what was used within this time: s, m, h, d or w
        #[arg(long, value_name = "AGE", default_value = "1d", value_parser = parse_age)]
        min_age: Duration,
        /// Remove entries of the remote cache instead, by the time since they were written
        #[arg(long, requires = "older_than", conflicts_with_all = ["max_size", "min_age"])]
        remote: bool,
        /// Age from which entries of the remote cache are removed: s, m, h, d or w
        #[arg(long, value_name = "AGE", requires = "remote", value_parser = parse_age)]
        older_than: Option<Duration>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Send the entries that the remote cache lacks
    Push {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Bring the entries of the remote cache here
    Pull {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Read every byte and list what is damaged; exit code 1 if anything is
    Verify {
        /// Read the remote cache instead
        #[arg(long)]
        remote: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

/// List the target records, or print one
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  monobloc targets
  monobloc targets h200 > mine.toml   # a record to start from; name it in a manifest by its path")]
pub struct Targets {
    /// A record's name, or the path of one
    pub name: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Read and merge the trials: what was tried, where, and with which result
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  monobloc flywheel stats
  monobloc flywheel best --json | jq '.[0]'
  monobloc flywheel rank
  monobloc flywheel export --own --target h200 --verdict ok > h200.csv
  monobloc flywheel export --own --share --out corpus/mine.csv.zst
  monobloc flywheel merge elsewhere/trials.csv --trials flywheel/trials.csv")]
pub struct Flywheel {
    /// Read only the file of trials, without the corpora that searches read
    #[arg(long, global = true)]
    pub own: bool,
    #[command(subcommand)]
    pub action: FlywheelAction,
}

#[derive(Debug, Subcommand)]
pub enum FlywheelAction {
    /// Count the trials by verdict, target and manifest, and list the rows that cannot be read
    Stats {
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Print the fastest trial of each manifest, precision, target, device and position
    Best {
        /// Print a JSON array
        #[arg(long)]
        json: bool,
    },
    /// Print the valid rows as CSV, each trial once
    Export {
        /// Only trials of this target
        #[arg(long, value_name = "NAME")]
        target: Option<String>,
        /// Only trials with this verdict
        #[arg(long, value_name = "VERDICT", value_parser = PossibleValuesParser::new(Verdict::NAMES))]
        verdict: Option<String>,
        /// Write a corpus for other users: devices by number, ratios to the default, figures of six digits, and only digests that are read
        #[arg(long)]
        share: bool,
        /// File to write instead of stdout; compressed if its name ends in `.csv.zst`
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// Write Parquet files into a folder, one for each device and model
        #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "json"])]
        parquet: Option<PathBuf>,
        /// Print a JSON array of rows instead of CSV
        #[arg(long)]
        json: bool,
    },
    /// Print how well predictions of the cost model, and of learned models, rank measured trials
    Rank {
        /// Also rank the campaigns of these manifests with today's cost model; rows hold the predictions of the time when they were made
        #[arg(value_name = "MANIFEST")]
        manifests: Vec<PathBuf>,
        /// Also test learned models: each campaign is ranked by models that are trained on all others; takes seconds
        #[arg(long)]
        held_out: bool,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Compare cold and warm campaigns: trials until each is within 2 % of the best cold result
    Study {
        /// Files of trials: campaigns of one model with several seeds, with and without a corpus
        #[arg(required = true, value_name = "FILE")]
        inputs: Vec<PathBuf>,
        /// Files of the campaigns that had a corpus; all others had none [default: a campaign had one if it tried a warm start]
        #[arg(long, value_name = "FILE", num_args = 1..)]
        warm: Vec<PathBuf>,
        /// Folder for a plot of each model
        #[arg(long, value_name = "DIR")]
        plots: Option<PathBuf>,
        /// Print a JSON array instead of tables
        #[arg(long)]
        json: bool,
    },
    /// Append the rows of other files that the file of `--trials` does not have
    Merge {
        /// Files to take rows from
        #[arg(required = true, value_name = "FILE")]
        inputs: Vec<PathBuf>,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

/// Search for a faster kernel: propose, prove, check, time against the best, keep or revert
///
/// Each candidate is proven, checked, timed in turns with the best one so far, and kept or reverted. Ctrl-C loses
/// nothing; run the command again to resume. Later builds use the best candidate. Every trial becomes rows of
/// `--trials`. Earlier rows decide what to try first: those of that file, and of the corpora next to it
/// (`corpus/*.csv`, `corpus/*.csv.zst`) or else of the built-in corpus.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc tune tinystories --max-trials 20
  monobloc tune monobloc.toml --target h200 --minutes 30
  monobloc tune monobloc.toml --proposer 'python3 propose.py'"
)]
pub struct Tune {
    /// Manifest to tune
    pub manifest: PathBuf,
    /// Tune only this target of the manifest [default: each in turn]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Candidates to measure beyond the default [default: the manifest's `search.trials`, or 40 if that is 0]
    #[arg(long, value_name = "N")]
    pub max_trials: Option<u32>,
    /// Time after which no further trial starts [default: the manifest's `search.minutes`]
    #[arg(long, value_name = "N", value_parser = parse_minutes)]
    pub minutes: Option<f64>,
    /// Random seed of the search; another seed starts another campaign [default: the manifest's `search.seed`]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Time limit of a trial [default: 2 minutes, or ten times the slowest trial so far]
    #[arg(long, value_name = "AGE", value_parser = parse_age)]
    pub trial_timeout: Option<Duration>,
    /// Program that proposes candidates in JSON lines; each is proven, checked and timed like any other
    #[arg(long, value_name = "COMMAND", conflicts_with = "on")]
    pub proposer: Option<String>,
    /// Run trials on other machines: `slurm`, `ray`, `ray://HOST:PORT`, or `hands` for workers that you start
    #[arg(long, value_name = "ENGINE", value_parser = Engine::parse)]
    pub on: Option<Engine>,
    /// Workers of `--on`
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024), requires = "on")]
    pub workers: u32,
    /// Address and port at which workers of `--on` join [default: a free port of this machine]
    #[arg(long, value_name = "ADDRESS", requires = "on")]
    pub listen: Option<SocketAddr>,
    /// Print the results as one JSON array
    #[arg(long)]
    pub json: bool,
}

/// Search for a faster variant of one op, in a program of that op alone
///
/// OP is `qkv`, `attention`, `o`, `up` (with the gate, if there is one), `down` or `head`. The program runs the op of
/// every layer with its weights, one after another on one input, without exchanges between them. It is proven, compared
/// with the interpreter, and timed in turns. `tune` tries first what `tune-op` kept, and decides by whole steps.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc tune-op tinystories attention
  monobloc tune-op monobloc.toml down --target h200 --max-trials 10"
)]
pub struct TuneOp {
    /// Manifest whose model has the op
    pub manifest: PathBuf,
    /// Op to tune
    #[arg(value_name = "OP", value_parser = parse_op)]
    pub op: LayerOp,
    /// Tune only for this target of the manifest [default: each in turn]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Candidates to measure beyond the default
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub max_trials: u32,
    /// Time after which no further trial starts [default: the manifest's `search.minutes`]
    #[arg(long, value_name = "N", value_parser = parse_minutes)]
    pub minutes: Option<f64>,
    /// Random seed of the search; another seed starts another campaign [default: the manifest's `search.seed`]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Print the results as one JSON array
    #[arg(long)]
    pub json: bool,
}

/// Print search results: trials, best candidate, latencies, and the candidate that builds use
///
/// Reads the trials and the corpora beside them; needs no device.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc status tinystories
  monobloc status monobloc.toml --json | jq '.[].campaigns[].ratio_against_default.p50'"
)]
pub struct Status {
    /// Manifest whose search results are printed
    pub manifest: PathBuf,
    /// Print only this target of the manifest
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Print a JSON array of targets
    #[arg(long)]
    pub json: bool,
}

/// Print whether another trial is worth its time, which one is next, and where the time of a step goes
///
/// Exit code 0: continue. 1: stop, with the reason. The regions that take the most time come from a traced run if this
/// machine has a device of the target, else from the cost model.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc next monobloc.toml --target h200
  while monobloc next mine.toml; do monobloc tune mine.toml --minutes 10; done"
)]
pub struct Next {
    /// Manifest whose search might continue
    pub manifest: PathBuf,
    /// Target to ask for [default: the manifest's first]
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// Budget of candidates beyond the default [default: the manifest's `search.trials`, or 40 if that is 0]
    #[arg(long, value_name = "N")]
    pub max_trials: Option<u32>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Write the search results of a manifest as one HTML page
///
/// The page has the search curve, latencies and their floors, the effect of each knob, the time that trials took, and
/// every trial. It needs no script and no network.
#[derive(Debug, Args)]
#[command(
    verbatim_doc_comment,
    after_help = "\
Examples:
  monobloc report tinystories
  monobloc report monobloc.toml --target h200 --out smollm.html"
)]
pub struct Report {
    /// Manifest whose searches are reported
    pub manifest: PathBuf,
    /// Report only this target of the manifest
    #[arg(long, value_name = "NAME")]
    pub target: Option<String>,
    /// File of the page
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    pub out: PathBuf,
    /// Print the content of the page as JSON, like `status`, and write no page
    #[arg(long)]
    pub json: bool,
}

/// Serve the tokenizer of a checkpoint: one JSON line in, one out. Started by commands that read text
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  monobloc tokens DIR < asked.jsonl")]
pub struct Tokens {
    /// Folder of the checkpoint
    pub dir: PathBuf,
}

/// Serve the trials of a search: one JSON line in, one out. Started by `tune`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  monobloc trials tinystories --target cpu < jobs.jsonl")]
pub struct Trials {
    /// Manifest whose candidates are tried
    pub manifest: PathBuf,
    /// Target that they are tried on
    #[arg(long, value_name = "NAME")]
    pub target: String,
    /// Op that is tried alone
    #[arg(long, value_name = "OP", value_parser = parse_op)]
    pub op: Option<LayerOp>,
    /// Seed of the search [default: the manifest's]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Address of a search on many machines, whose candidates are tried; `MONOBLOC_FLEET_TOKEN` has its token
    #[arg(long, value_name = "HOST:PORT")]
    pub join: Option<String>,
}

fn parse_jobs(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|jobs| *jobs > 0)
        .ok_or_else(|| format!("expected a number of threads above 0, found `{text}`"))
}

fn parse_op(text: &str) -> Result<LayerOp, String> {
    let names = || LayerOp::ALONE.map(|op| format!("`{}`", op.name())).join(", ");
    let op = LayerOp::parse(text).filter(|op| LayerOp::ALONE.contains(op));
    op.ok_or_else(|| format!("expected one of {}", names()))
}
