//! Owns the links: what a build proved, printed, compiled and packed, by digest, kept apart from the entries themselves.
//!
//! The cache sees a damaged byte, because every entry ends with a line that seals it. It does not see an entry that was
//! edited and sealed anew. So a stage that makes a part of a kernel also stores its digest in a separate entry, the link. A part that
//! differs is refused before any of it reaches a device or an interpreter, and a part without a link is made again. The index of a build,
//! which is a separate entry, too, stands for the links of the parts that it names (`index`). Queues are not
//! stored: they are encoded from a schedule that was proven in this process, and compared with the digest of its first proof.
//!
//! Not promised without a key: a user who can write the cache can replace a part and its link, or the index. Then the schedule is still proven
//! anew, and a launch still has a deadline, but only `check` notices a schedule or cubin that computes something else, unless its
//! result is replaced, too. With a key (`cache::Key`) every entry, links among them, is sealed with it, and what was made without it is
//! not found at all.

use std::fmt;
use std::thread;

use crate::cache::Entry;
use crate::codegen::abi::Queues;
use crate::digest::Digest;
use crate::error::{Fault, Tier};
use crate::ir::print::print;
use crate::validate::Validated;

use super::Workspace;
use super::keys::{self, Keyed};

/// Stages whose results a launch is made of.
const PARTS: [&str; 4] = [keys::SCHEDULE, keys::SOURCE, keys::COMPILE, keys::PACK];

/// The link of the queues of a schedule, by the digest of the schedule's text.
const QUEUES: &str = "queues";

/// Something that a launch is made of and that is not what was made.
struct Refused<'a> {
    part: &'a str,
    /// The file with the part, or what it is made from.
    place: String,
    /// The file that says what it must be.
    link: String,
    expected: Digest,
    found: Digest,
}

impl fmt::Display for Refused<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refused { part, place, link, expected, found } = self;
        write!(
            f,
            "the stored {part} `{place}` is not what was built: expected content {}, as `{link}` says, found {}",
            expected.short(),
            found.short()
        )
    }
}

impl From<Refused<'_>> for Fault {
    fn from(refused: Refused<'_>) -> Fault {
        Fault {
            tier: Tier::Environment,
            message: refused.to_string(),
            remedy: Some(format!(
                "remove both files unless the change was intended: the next build makes `{}` again",
                refused.part
            )),
        }
    }
}

fn link_key(stage: &str, key: &Digest) -> Digest {
    Digest::of(format!("{stage} {key}").as_bytes())
}

/// What the cache says about a link.
fn link_why(stage: &str, key: &Digest) -> String {
    format!("{stage} = {key}\n")
}

/// The digest that a link names.
pub(super) fn linked_content(bytes: &[u8]) -> Option<Digest> {
    std::str::from_utf8(bytes).ok().and_then(|text| Digest::parse(text.trim_end()).ok())
}

impl Workspace {
    /// The entry under `keyed`, if it is what was built. One without a link is removed, and a miss.
    ///
    /// # Errors
    /// An entry that is another than the one that was built: it is refused, and left for people to look at.
    pub(super) fn trusted(&self, keyed: &Keyed) -> Result<Option<Entry>, Fault> {
        let Some(entry) = self.with_link(keyed)? else { return Ok(None) };
        if self.linked(keyed, &entry)? {
            return Ok(Some(entry));
        }
        self.cache.remove(keyed.stage, &keyed.key)?;
        Ok(None)
    }

    /// The entry under `keyed`. A remote cache is asked for its link at the same time, so that each part waits once for the server.
    /// The link is not compared.
    ///
    /// # Errors
    /// This machine's folder cannot be read.
    pub(super) fn with_link(&self, keyed: &Keyed) -> Result<Option<Entry>, Fault> {
        let Keyed { stage, key, why } = keyed;
        thread::scope(|scope| {
            if PARTS.contains(stage) && self.cache.may_bring(keys::LINK, &link_key(stage, key)) {
                // `linked` looks it up again, and reports what is wrong with it.
                scope.spawn(|| self.attested(stage, key));
            }
            Ok(self.cache.get_known(stage, key, why)?)
        })
    }

    /// Whether an entry has its link; an entry that is no part of a kernel needs none.
    ///
    /// # Errors
    /// The link names another entry.
    pub(super) fn linked(&self, keyed: &Keyed, entry: &Entry) -> Result<bool, Fault> {
        if !PARTS.contains(&keyed.stage) {
            return Ok(true);
        }
        match self.attested(keyed.stage, &keyed.key)? {
            None => Ok(false),
            Some((expected, _)) if expected == entry.content() => Ok(true),
            Some((expected, link)) => {
                let (place, found) = (entry.path().display().to_string(), entry.content());
                Err(Refused { part: keyed.stage, place, link, expected, found }.into())
            }
        }
    }

    /// Stores the link of what the stage makes under this key; if possible, before the entry can be seen. A process that is
    /// killed in between costs the next one a stage.
    pub(super) fn attest(&self, keyed: &Keyed, content: Digest) -> Result<(), Fault> {
        if PARTS.contains(&keyed.stage) {
            self.put_link(keyed.stage, &keyed.key, content)?;
        }
        Ok(())
    }

    /// Stores the link of an entry with this content here, as an index names both.
    pub(super) fn attest_listed(&self, stage: &str, key: &Digest, content: Digest) -> Result<(), Fault> {
        let (link, why) = (link_key(stage, key), link_why(stage, key));
        Ok(self.cache.keep(keys::LINK, &link, &why, format!("{content}\n").as_bytes())?)
    }

    /// The queues of a proven schedule as they are uploaded.
    ///
    /// # Errors
    /// Other bytes than those that this schedule had when it was proven first.
    pub(super) fn queues<'v>(&self, validated: &'v Validated) -> Result<Queues<'v>, Fault> {
        let queues = Queues::of(validated);
        let schedule = Digest::of(print(validated.schedule()).as_bytes());
        match self.attested(QUEUES, &schedule)? {
            // A cache that cannot be written has nothing to compare with the next time.
            None => drop(self.put_link(QUEUES, &schedule, queues.digest())),
            Some((expected, _)) if expected == queues.digest() => {}
            Some((expected, link)) => {
                let place = format!("of schedule {}", schedule.short());
                return Err(Refused { part: QUEUES, place, link, expected, found: queues.digest() }.into());
            }
        }
        Ok(queues)
    }

    fn attested(&self, stage: &str, key: &Digest) -> Result<Option<(Digest, String)>, Fault> {
        let why = link_why(stage, key);
        let Some(entry) = self.cache.get_known(keys::LINK, &link_key(stage, key), &why)? else { return Ok(None) };
        let place = entry.path().display().to_string();
        let bytes = entry.bytes()?;
        match linked_content(&bytes) {
            Some(digest) => Ok(Some((digest, place))),
            None => Err(Fault::environment(format!("the stored link `{place}` names no content, expected a digest"))
                .with_remedy("remove the file: the next build makes it again")),
        }
    }

    fn put_link(&self, stage: &str, key: &Digest, content: Digest) -> Result<(), Fault> {
        match self.attested(stage, key)? {
            Some((there, _)) if there == content => return Ok(()),
            // A part that is built again after damage can have other bytes, if the compiler is not deterministic.
            Some(_) => self.cache.remove(keys::LINK, &link_key(stage, key))?,
            None => {}
        }
        let why = link_why(stage, key);
        self.cache.put(keys::LINK, &link_key(stage, key), &why, format!("{content}\n").as_bytes())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::ir::parse::parse;
    use crate::report::Report;
    use crate::target::Target;
    use crate::validate::validate;

    fn proven() -> Validated {
        let text = include_str!("../../tests/filetests/validate/proven-layer-h200.mkir");
        let target = Target::builtin("h200").expect("a record");
        validate(parse(text).expect("a schedule"), &target).expect("a proof")
    }

    #[test]
    fn queues_are_those_of_the_first_proof_or_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let workspace = Workspace {
            cache: Cache::open(folder.path()).expect("a cache"),
            report: Report::quiet(),
            trials: folder.path().join("trials.csv"),
        };
        let validated = proven();
        let first = workspace.queues(&validated).expect("queues");
        assert_eq!(workspace.queues(&validated).expect("the same queues"), first);
        // The link says that this schedule had other queues.
        let schedule = Digest::of(print(validated.schedule()).as_bytes());
        let key = link_key(QUEUES, &schedule);
        workspace.cache.remove(keys::LINK, &key).expect("removed");
        let other = Digest::of(b"other");
        workspace.cache.put(keys::LINK, &key, "", format!("{other}\n").as_bytes()).expect("put");
        let fault = workspace.queues(&validated).expect_err("refused");
        assert_eq!(fault.tier, Tier::Environment);
        for part in ["the stored queues", &schedule.short(), &other.short(), &first.digest().short(), "link-v1"] {
            assert!(fault.message.contains(part), "{part}: {fault}");
        }
        assert!(fault.remedy.is_some_and(|remedy| remedy.contains("remove")), "a remedy");
    }

    #[test]
    fn every_byte_of_a_queue_counts() {
        let validated = proven();
        let mut schedule = validated.schedule().clone();
        // Another place of the last buffer that travels between SMs: still proven, and another queue.
        let last = schedule
            .placement
            .iter()
            .zip(&schedule.program.buffers)
            .rposition(|(place, buffer)| place.is_some() && buffer.space == crate::ir::program::Space::Exchange);
        let last = last.expect("an exchange buffer");
        schedule.placement[last] = schedule.placement[last].map(|at| at + (1 << 20));
        let target = Target::builtin("h200").expect("a record");
        let moved = validate(schedule, &target).expect("a proof");
        assert_ne!(Queues::of(&moved).digest(), Queues::of(&validated).digest());
    }
}
