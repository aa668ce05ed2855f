//! Owns the index of a build: one small entry that names what its kernels are made of, under a key that is known before any of them is there.
//!
//! Each stage is keyed on the content of the stage before it. A machine that asks a remote cache for one after another waits for the server
//! once for each. With an index it waits twice: for the index, then for everything at the same time.
//!
//! An index is a hint. Only the lines of this build's schedules are read, so what it names wrongly costs two requests a target, and the
//! build then asks as if there were no index. If a part has the content that the index says, the index stands for its link (`attest`), too:
//! both are entries of their own. A cubin is used only if its source gives the key that the index names.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::thread;

use crate::cache::Entry;
use crate::cuda::nvrtc::NvrtcVersion;
use crate::digest::Digest;
use crate::error::Fault;
use crate::manifest::Manifest;
use crate::target::TargetKind;

use super::Workspace;
use super::chain::{Chain, Host, NotMade};
use super::compile::{cubin_key, keep_published};
use super::keys::{self, IndexKey, Keyed};
use super::stages::{BuildContext, Generated, Model, stored_source, subject};

/// Targets whose kernels are brought at the same time.
const BROUGHT_AT_ONCE: usize = 16;
/// Largest index that is read: about 2,500 targets.
const BYTES_MAX: u64 = 1 << 20;

/// What the kernel of one target is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Listed {
    /// Contents.
    schedule: Digest,
    source: Digest,
    /// Key and content.
    cubin: (Digest, Digest),
    nvrtc: NvrtcVersion,
}

/// By the keys of schedules.
type Index = BTreeMap<Digest, Listed>;

fn print(index: &Index) -> String {
    let line = |(schedule_key, listed): (&Digest, &Listed)| {
        let Listed { schedule, source, cubin: (key, cubin), nvrtc } = listed;
        format!("{schedule_key} {schedule} {source} {key} {cubin} {nvrtc}\n")
    };
    index.iter().map(line).collect()
}

/// Lines that cannot be read are left out.
fn parse(text: &str) -> Index {
    let line = |line: &str| {
        let mut words = line.split(' ');
        let mut digest = || Digest::parse(words.next()?).ok();
        let (schedule_key, schedule, source) = (digest()?, digest()?, digest()?);
        let cubin = (digest()?, digest()?);
        let nvrtc = NvrtcVersion::parse(words.next()?)?;
        Some((schedule_key, Listed { schedule, source, cubin, nvrtc }))
    };
    text.lines().filter_map(line).collect()
}

/// The index under a key, if there is one that can be read.
fn find(workspace: &Workspace, keyed: &Keyed) -> Option<Index> {
    let entry = workspace.cache.get_known(keyed.stage, &keyed.key, &keyed.why).ok()??;
    if entry.len() > BYTES_MAX {
        return Some(Index::new());
    }
    Some(parse(std::str::from_utf8(&entry.bytes().ok()?).unwrap_or_default()))
}

fn schedule_key(chain: &Chain<'_>) -> Keyed {
    chain.context.schedule_key(&chain.candidate)
}

fn is_compiled(chain: &Chain<'_>) -> bool {
    chain.context.target.kind == TargetKind::Cuda
}

/// The key of the index of these chains; `None`: none of them is compiled.
fn index_key(chains: &[Chain<'_>]) -> Option<Keyed> {
    let compiled = chains.iter().filter(|chain| is_compiled(chain));
    let schedules: Vec<Digest> = compiled.map(|chain| schedule_key(chain).key).collect();
    (!schedules.is_empty()).then(|| IndexKey { code: keys::code(keys::SOURCE), schedules: &schedules }.keyed())
}

/// Brings here what a remote cache has of the import and of the kernels of all targets. What is missing, and every fault, is left to the build.
pub(super) fn bring(workspace: &Workspace, manifest: &Manifest, model: &Model, host: &Host<'_>) {
    let cache = &workspace.cache;
    let looking = |target| {
        let context = BuildContext::new(workspace, manifest, target, model).ok()?;
        Some(Chain::looking(context, host, context.candidate()))
    };
    let mut chains: Vec<Chain<'_>> = manifest.targets.iter().filter_map(looking).collect();
    let keyed = index_key(&chains);
    let index = OnceLock::new();
    let index = || index.get_or_init(|| keyed.as_ref().and_then(|keyed| find(workspace, keyed)).unwrap_or_default());
    chains.retain(|chain| cache.may_bring(keys::SCHEDULE, &schedule_key(chain).key));
    while !chains.is_empty() {
        let now = chains.split_off(chains.len().saturating_sub(BROUGHT_AT_ONCE));
        thread::scope(|scope| {
            // Looked for while the server is asked: finding none takes as long as a request.
            scope.spawn(|| keyed.as_ref().map(|_| host.compiler.version()));
            scope.spawn(index);
            scope.spawn(|| cache.get_known(keys::IMPORT, &model.keyed.key, &model.keyed.why));
            for chain in now {
                scope.spawn(move || bring_kernel(&chain, index));
            }
        });
    }
}

fn bring_kernel<'i>(chain: &Chain<'_>, index: impl Fn() -> &'i Index) -> Result<(), NotMade> {
    let keyed = schedule_key(chain);
    let get = &|keyed: &Keyed| chain.context.workspace.cache.get_known(keyed.stage, &keyed.key, &keyed.why).ok()?;
    let is_whole = is_compiled(chain)
        && thread::scope(|scope| {
            let schedule = scope.spawn(|| get(&keyed));
            let listed = index().get(&keyed.key);
            let Some(listed) = listed else { return Ok(false) };
            let source_keyed = chain.context.source_key(listed.schedule);
            let source = scope.spawn(move || get(&source_keyed));
            let cubin = scope.spawn(|| {
                let is_ours = chain.host.compiler.version().map_or(true, |version| version == listed.nvrtc);
                // Its key text is known when the source is there.
                is_ours.then(|| get(&Keyed { stage: keys::COMPILE, key: listed.cubin.0, why: String::new() }))?
            });
            keep_listed(chain, listed, [schedule, source, cubin].map(|entry| entry.join().ok().flatten()))
        })?;
    if !is_whole {
        chain.schedule()?;
        chain.cubin()?;
    }
    Ok(())
}

/// Stores the links of a schedule, its source and its cubin, as far as they are those of the index; `false`: not all of them are.
fn keep_listed(chain: &Chain<'_>, listed: &Listed, entries: [Option<Entry>; 3]) -> Result<bool, Fault> {
    let Chain { context, .. } = chain;
    let [schedule, source, cubin] = entries;
    let is = |entry: &Option<Entry>, content| entry.as_ref().is_some_and(|entry| entry.content() == content);
    if !is(&schedule, listed.schedule) {
        return Ok(false);
    }
    context.workspace.attest_listed(keys::SCHEDULE, &schedule_key(chain).key, listed.schedule)?;
    let Some(source) = source.filter(|entry| entry.content() == listed.source) else { return Ok(false) };
    context.workspace.attest_listed(keys::SOURCE, &context.source_key(listed.schedule).key, listed.source)?;
    let source = Generated { source: stored_source(&source)?, content: listed.source };
    let (key, content) = listed.cubin;
    if !is(&cubin, content) || cubin_key(&source.source, listed.nvrtc)?.key != key {
        return Ok(false);
    }
    context.workspace.attest_listed(keys::COMPILE, &key, content)?;
    keep_published(context.workspace, &source, listed.nvrtc)?;
    Ok(true)
}

/// Stores the index of a build whose kernels are all there, unless there is one. One that is wrong is replaced; one of another compiler stays.
pub(super) fn leave(workspace: &Workspace, manifest: &Manifest, chains: &[Chain<'_>]) {
    let Some(keyed) = index_key(chains) else { return };
    let listed = |chain: &Chain<'_>| {
        let (Some(schedule), Some(source), Some(cubin)) = chain.made() else { return None };
        let (schedule, source, nvrtc) = (schedule.content, source.content, NvrtcVersion::parse(&cubin.nvrtc)?);
        Some((schedule_key(chain).key, Listed { schedule, source, cubin: cubin.entry, nvrtc }))
    };
    let Some(index) = chains.iter().filter(|chain| is_compiled(chain)).map(listed).collect::<Option<Index>>() else {
        return;
    };
    // For `clean`.
    let _ = workspace.point(&keyed, &subject(manifest, "model"));
    if let Some(there) = find(workspace, &keyed) {
        let is_other = |(key, listed): (&Digest, &Listed)| index.get(key).is_some_and(|own| own.nvrtc != listed.nvrtc);
        if there == index || there.iter().any(is_other) || workspace.cache.remove(keyed.stage, &keyed.key).is_err() {
            return;
        }
    }
    // A build without an index asks more often.
    let _ = workspace.cache.put(keyed.stage, &keyed.key, &keyed.why, print(&index).as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_read_as_it_was_printed_and_other_lines_are_left_out() {
        let digest = |text: &str| Digest::of(text.as_bytes());
        let listed = |of: &str| Listed {
            schedule: digest(&format!("schedule {of}")),
            source: digest(&format!("source {of}")),
            cubin: (digest(&format!("key {of}")), digest(&format!("cubin {of}"))),
            nvrtc: NvrtcVersion { major: 13, minor: 0, patch: Some(88) },
        };
        let index: Index = ["a", "b"].map(|of| (digest(of), listed(of))).into();
        let text = print(&index);
        assert_eq!(parse(&text), index);
        let (first, second) = text.split_once('\n').expect("two lines");
        for wrong in
            [&first.to_uppercase(), &first.replacen(' ', " ../", 1), &first[1..], &first[..first.len() - 8], "", "\0"]
        {
            assert_eq!(parse(&format!("{wrong}\n{second}")).len(), 1, "{wrong}");
        }
    }
}
