//! Owns continuous batching: many requests, of which each launch takes the rows that are ready.
//!
//! `batch` decides, `stepper` is what executes ([`Stepwise`] over the interpreter or with a draft, [`DeviceStepper`] on a GPU), `prefix` remembers which pages hold which tokens, `snapshots` which recurrent states are kept.
//! Nothing here knows HTTP, text, threads or a clock: the time is an argument, and the same arrivals at the same times give the
//! same launches.
//!
//! The rules:
//!
//! - **Order.** Requests are numbered as they arrive, and a choice of a request (`n`) comes after the choices before it. Older goes
//!   first, everywhere.
//! - **Admission.** The oldest waiting request runs as soon as a row and a sequence are free, and pages for its whole prompt, its
//!   first token and one page for each running request. Nothing overtakes it. A request whose pages cannot fit into the whole cache
//!   is refused when it arrives.
//! - **Launches.** Each running request that decodes has one row in every launch. Prompts take the rows that are left, the oldest
//!   first; beside decoding rows they take at most `chunk_rows` together, which bounds what they delay. A stepper may read long chunks of one
//!   prompt faster alone: then the oldest such prompt has launches of its own. If the stepper can decide what follows the last token there,
//!   that token is part of them; else, and where others decode, it is a row of the step after them. Where others decode, what is left of a
//!   prompt shares their steps if three of these have room for it. Otherwise launches alternate: a chunk of the prompt, of at most `chunk_rows`
//!   tokens, and a step of the others.
//! - **Steps.** A launch has one step, with one exception: if no prompt is computed, the stepper chooses the tokens of all rows, all
//!   requests have their first token, and none has a grammar, it has up to `steps_max` steps. Tokens are told at the end of a launch, so
//!   a first token never waits for others. A request that arrives waits for at most `steps_max` steps before it is looked at. A launch
//!   never has more steps than the shortest of its requests has tokens to go, and never takes pages from another request for them.
//!   Tokens after the end of a request are thrown away.
//! - **Queued ahead.** While a launch runs whose rows all get their tokens from the kernel, the next one is queued with the same rows: each
//!   goes on from what it decides in the last step, which the host does not know yet. This happens when the last step has begun, and
//!   only if no request waits and no request ends as far as is known: by its length, or by a token of the steps before. The second launch
//!   has at most three quarters of `steps_max` steps. So a request that arrives meanwhile waits for at most `steps_max` steps (with
//!   `steps_max` 1 nothing is queued ahead), and for no more on average than if nothing were queued. A row that ends after all, or is
//!   cancelled, stays in the queued launch: what it decides there is thrown away. No other launch is submitted before both were
//!   collected, so its pages are written by no other request before.
//! - **Beside a prompt.** While a launch reads a prompt alone, the next one is queued: it has what is ready, and depends on nothing that the
//!   host has to know. In the same way a prompt is queued after the launch that decodes. This needs that all running requests get their
//!   tokens from the kernel, that none has ended since, and pages without any from another request.
//! - **Prefixes.** A full page of tokens is found again by the hash of all tokens up to its end. The least recently used page that
//!   no request holds makes room. Other choices of a request wait until the first one has written their common prompt.
//! - **Snapshots.** A model with a recurrent state needs the state at the end of the pages that it finds, too. Snapshots are kept in the states
//!   of the sequences that keep pages, which have no rows: one for each context that the cache holds. A request begins at the end of the longest
//!   prefix whose pages are kept and of whose end there is a snapshot. It leaves a snapshot at the end of the last full page of its prompt, and one
//!   where pages were found and no snapshot: there other prompts go on differently. A chunk of a prompt ends there. The snapshot that was used
//!   longest ago makes room, and one whose page is gone is dropped.
//! - **Preemption.** When no page is left, the youngest running request gives its pages back and waits. What it had decided stays
//!   decided; its positions are computed again. The oldest request is never preempted, so something always advances.
//!
//! A token depends on its request alone: a row's logits do not depend on its neighbours or on how a prompt is cut, and the choice
//! depends on the logits, the history, the seed and the position.

mod batch;
mod cpu;
mod device;
mod prefix;
mod snapshots;
mod stepper;
mod stepwise;

pub use batch::{Ask, ChoiceId, End, Engine, Event, Figures, Limits, Refused, RequestId};
pub use cpu::CpuSteps;
pub use device::{DeviceStepper, DeviceSteps};
pub use prefix::Chain;
pub use snapshots::Snapshots;
pub use stepper::{Alone, Bounds, Chooser, Launch, LaunchRow, Proposals, Said, Stepper, Want, admit, admit_rows};
pub use stepwise::{After, Drafts, SEEN_MAX, Steps, Stepwise, TextDraft};
