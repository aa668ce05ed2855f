//! Owns the built-in model: a small trained model with its manifest inside the executable, for a first run anywhere.

use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::digest::Digest;
use crate::error::Fault;
use crate::text::{nearest, one_of};

/// The scheme of a source that is embedded.
pub const SCHEME: &str = "builtin:";
/// Model and manifest have one name.
pub const NAMES: [&str; 1] = ["tinystories"];

const MANIFEST: &str = include_str!("../../manifests/tinystories.toml");
/// The source in the repository's manifest: a path that an installed binary does not have.
const MANIFEST_SOURCE: &str = "path:../tests/fixtures/tinystories-llama";

macro_rules! files {
    ($($name:literal),*) => {
        [$(($name, include_bytes!(concat!("../../tests/fixtures/tinystories-llama/", $name)).as_slice())),*]
    };
}

const FILES: [(&str, &[u8]); 4] =
    files!["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
const WEIGHTS: &str = "model.safetensors";
/// Compressed by the build script, which names the digest of what they were.
const WEIGHTS_COMPRESSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/model.safetensors.zst"));
const WEIGHTS_DIGEST: &str = env!("MONOBLOC_BUILTIN_WEIGHTS");

/// The text of a built-in manifest.
pub fn manifest(name: &Path) -> Option<String> {
    (name == Path::new(NAMES[0])).then(|| MANIFEST.replace(MANIFEST_SOURCE, &format!("{SCHEME}{}", NAMES[0])))
}

/// The folder of a built-in checkpoint below `root`. Files that are missing or not whole are written.
///
/// # Errors
/// An unknown name, or a folder that cannot be written.
pub fn checkpoint(name: &str, root: &Path) -> Result<PathBuf, Fault> {
    if !NAMES.contains(&name) {
        let fault = Fault::input(format!("no model `{name}` is built in: expected {}", one_of(NAMES)));
        return Err(match nearest(name, NAMES) {
            Some(meant) => fault.with_remedy(format!("did you mean `{meant}`?")),
            None => fault,
        });
    }
    let folder = root.join("builtin").join(name);
    for (file, bytes) in FILES {
        keep(&folder, file, |found| found == bytes, || Ok(bytes.to_vec()))?;
    }
    let is_whole = |found: &[u8]| Digest::of(found).to_string() == WEIGHTS_DIGEST;
    keep(&folder, WEIGHTS, is_whole, || zstd::decode_all(WEIGHTS_COMPRESSED))?;
    Ok(folder)
}

/// Writes a file unless it is there and whole.
fn keep(
    folder: &Path,
    file: &str,
    is_whole: impl Fn(&[u8]) -> bool,
    bytes: impl Fn() -> io::Result<Vec<u8>>,
) -> Result<(), Fault> {
    let path = folder.join(file);
    if fs::read(&path).is_ok_and(|found| is_whole(&found)) {
        return Ok(());
    }
    bytes().and_then(|bytes| write(folder, &path, &bytes)).map_err(|error| {
        Fault::environment(format!("cannot write the built-in model to `{}`: {error}", path.display()))
            .with_remedy("name a folder that can be written with `--cache`")
    })
}

/// Writes a file that other processes see complete or not at all.
fn write(folder: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let file = tempfile::NamedTempFile::new_in(folder)?;
    fs::write(file.path(), bytes)?;
    file.persist(path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::Manifest;

    #[test]
    fn the_built_in_manifest_names_the_built_in_model() {
        let text = manifest(Path::new("tinystories")).expect("built in");
        let manifest = Manifest::parse(&text, Path::new("tinystories.toml")).expect("sound");
        assert_eq!(manifest.source, "builtin:tinystories");
        assert_eq!(super::manifest(Path::new("tinystory")), None);
    }

    #[test]
    fn a_damaged_copy_of_the_model_is_written_again() {
        let root = tempfile::tempdir().expect("temporary folder");
        let folder = checkpoint("tinystories", root.path()).expect("written");
        fs::write(folder.join("config.json"), "{}").expect("damaged");
        fs::remove_file(folder.join("tokenizer.json")).expect("removed");
        let weights = folder.join(WEIGHTS);
        let mut flipped = fs::read(&weights).expect("weights");
        flipped[1 << 20] ^= 1;
        fs::write(&weights, flipped).expect("damaged");
        assert_eq!(checkpoint("tinystories", root.path()).expect("mended"), folder);
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tinystories-llama").join(WEIGHTS);
        assert!(fs::read(weights).expect("weights") == fs::read(fixture).expect("fixture"));
        for (file, bytes) in FILES {
            assert!(fs::read(folder.join(file)).expect(file) == bytes, "{file}");
        }
        let fault = checkpoint("tinystorys", root.path()).expect_err("none");
        assert_eq!(fault.remedy.as_deref(), Some("did you mean `tinystories`?"));
    }
}
