//! Owns what a build without the feature `remote` does with a remote cache: it says so, and goes on without.

use std::sync::Arc;
use std::time::Duration;

use super::error::CacheError;
use super::store::{Entry, Store};
use super::{Moved, Note};
use crate::address::{RemoteMode, RemotePlace};
use crate::digest::Digest;

/// There is none.
pub(super) enum Remote {}

impl Remote {
    pub fn open(place: RemotePlace, note: Arc<dyn Fn(&Note) + Send + Sync>) -> Option<Remote> {
        if place.mode != RemoteMode::Off {
            let reason = "this monobloc was built without the feature `remote`".to_string();
            note(&Note::Remote { action: "use it", reason });
        }
        None
    }

    pub fn place(&self) -> &RemotePlace {
        match *self {}
    }

    pub fn reads(&self) -> bool {
        match *self {}
    }

    pub fn fetch(&self, _: &Store, _: &str, _: &Digest, _: Option<&str>) -> Option<Entry> {
        match *self {}
    }

    pub fn send(&self, _: &Store, _: &str, _: &Digest) {
        match *self {}
    }

    pub fn finish(&self) {
        match *self {}
    }

    pub fn remove(&self, _: &Store, _: &str, _: &Digest) {
        match *self {}
    }

    pub fn push(&self, _: &Store, _: &mut dyn FnMut(u64, u64)) -> Result<Moved, CacheError> {
        match *self {}
    }

    pub fn pull(&self, _: &Store, _: &mut dyn FnMut(u64, u64)) -> Result<Moved, CacheError> {
        match *self {}
    }

    pub fn verify(&self, _: &Store, _: &mut dyn FnMut(u64, u64)) -> Result<(Moved, Vec<(String, String)>), CacheError> {
        match *self {}
    }

    pub fn gc(&self, _: &Store, _: Duration) -> Result<Moved, CacheError> {
        match *self {}
    }
}
