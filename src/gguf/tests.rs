//! Tests headers of GGUF files, sound and hostile, and what names the files of a model.

use super::*;

#[allow(dead_code)] // Integration tests use all of it.
#[path = "../../tests/it/gguf_writer.rs"]
mod writer;

use writer::{Meta, Writer};

/// Two tensors of two fp32 numbers and a few keys.
fn two() -> Writer {
    let mut two = Writer::new();
    two.text("general.architecture", "llama");
    two.set("n", Meta::U32(7));
    two.set("x", Meta::F32(0.5));
    two.set("yes", Meta::Truth(true));
    two.set("list", Meta::I32s(vec![-1, 2]));
    two.set("names", Meta::Texts(vec!["a".to_string(), String::new(), "日本".to_string()]));
    two.set("floats", Meta::F32s(vec![1.5]));
    two.set("truths", Meta::Truths(vec![true, false]));
    two.tensor("a", &[2], 0, vec![1; 8]);
    two.tensor("b", &[1, 2], 0, vec![2; 8]);
    two
}

fn parse(bytes: &[u8]) -> Result<Header, String> {
    Header::parse("m.gguf", bytes, bytes.len() as u64)
        .map_err(|faults| faults.iter().map(|fault| format!("{fault}\n")).collect())
}

#[track_caller]
fn refused(bytes: &[u8], expected: &str) {
    let found = parse(bytes).unwrap_err();
    assert!(found.contains(expected), "{found}");
}

#[test]
fn a_header_is_read_whole_and_no_data() {
    let bytes = two().bytes();
    let header = parse(&bytes).unwrap();
    let get = |key: &str| &header.metadata[key];
    assert_eq!((get("n"), get("x"), get("yes")), (&Value::Unsigned(7), &Value::Float(0.5), &Value::Truth(true)));
    assert_eq!(get("list"), &Value::Integers(vec![-1, 2]));
    assert_eq!(get("truths"), &Value::Truths(vec![true, false]));
    let Value::Texts(names) = get("names") else { panic!() };
    assert_eq!(names.iter().collect::<Vec<_>>(), ["a", "", "日本"]);
    let [a, b] = header.tensors.as_slice() else { panic!() };
    assert_eq!((a.name.as_str(), &a.shape[..], b.name.as_str(), &b.shape[..]), ("a", &[2][..], "b", &[1, 2][..]));
    assert_eq!(bytes[a.range.start as usize..a.range.end as usize], [1; 8]);
    assert_eq!(bytes[b.range.start as usize..b.range.end as usize], [2; 8]);
    assert_eq!(b.range.start, a.range.start + 32);
    // Nothing after the header is asked for.
    let only = &bytes[..header.bytes as usize];
    assert_eq!(Header::parse("m.gguf", only, bytes.len() as u64).unwrap(), header);
}

#[test]
fn other_files_and_versions_are_refused() {
    refused(b"", "is no GGUF file");
    refused(b"GGML....", "is no GGUF file");
    let version = |version: u32| Writer { version, ..two() }.bytes();
    refused(&version(1), "version 1 of GGUF, expected 2 or 3");
    refused(&version(3 << 24), "highest byte first");
    assert!(parse(&version(2)).is_ok());
}

#[test]
fn counts_and_lengths_beyond_the_file_are_refused() {
    let bytes = two().bytes();
    let with = |at: usize, value: u64| {
        let mut bytes = bytes.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    refused(&with(8, 1 << 60), "expected at most 131072 tensors, found 1152921504606846976");
    refused(&with(16, u64::MAX), "expected at most 16384 keys");
    // The entries of further tensors would be the data of the first.
    refused(&with(8, 1 << 16), "expected at most 512 bytes in the name of a key or tensor");
    // The name of the first key, then its value.
    refused(&with(24, 1 << 60), "expected at most 512 bytes in the name");
    let value = 24 + 8 + "general.architecture".len() + 4;
    refused(&with(value, 1 << 60), "the value of a key takes 1152921504606846976 bytes");
    let at = bytes.windows(5).position(|window| window == b"names").unwrap() + 5 + 8;
    refused(&with(at, 1 << 60), "the list of a key takes 9223372036854775808 bytes");
    refused(&with(at, u64::MAX), "the list of a key takes");
    refused(&with(at + 8, 1 << 60), "a string of a list takes");
    let length = |end: u64| Header::parse("m.gguf", &bytes[..], end).unwrap_err()[0].to_string();
    assert!(length(100).contains("the file ends at byte 100"));
    // A file that is as long as it says, but for its bytes.
    assert!(Header::parse("m.gguf", &bytes[..40], bytes.len() as u64).is_err());
    // More than a header may have.
    let mut long = Writer::new();
    long.set("n", Meta::Text("a".repeat(1000)));
    let mut bytes = long.bytes();
    bytes[24 + 8 + 1 + 4..][..8].copy_from_slice(&(200u64 << 20).to_le_bytes());
    let found = Header::parse("m.gguf", &bytes[..], 1 << 40).unwrap_err()[0].to_string();
    assert!(found.contains("expected a header of at most 134217728 bytes"), "{found}");
}

#[test]
fn values_of_no_type_are_refused() {
    let bytes = two().bytes();
    let at = bytes.windows(3).position(|window| window == b"yes").unwrap() + 3;
    let with = |at: usize, value: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = value;
        bytes
    };
    refused(&with(at, 13), "key `yes` has type 13, expected 0 to 12");
    refused(&with(at + 4, 2), "expected 0 or 1 for a truth value, found 2");
    let list = bytes.windows(4).position(|window| window == b"list").unwrap() + 4;
    refused(&with(list + 4, 9), "key `list` is a list of lists");
    refused(&with(list + 4, 99), "key `list` has type 99");
    let text = bytes.windows(5).position(|window| window == b"llama").unwrap();
    refused(&with(text, 0xff), "expected UTF-8 in the value of a key");
    let mut twice = two();
    twice.metadata.push(("n".to_string(), Meta::U32(1)));
    refused(&twice.bytes(), "names key `n` twice");
}

#[test]
fn the_table_of_tensors_is_checked() {
    let change = |change: &dyn Fn(&mut Writer)| {
        let mut two = two();
        change(&mut two);
        two.bytes()
    };
    for (alignment, shown) in [(0, "0"), (24, "24"), (1 << 30, "1073741824")] {
        let bytes = change(&|two| two.set("general.alignment", Meta::U32(alignment)));
        refused(&bytes, &format!("`general.alignment` is {shown}, expected a power of two"));
    }
    refused(&change(&|two| two.text("general.alignment", "x")), "`general.alignment` is \"x\"");
    let aligned = change(&|two| {
        two.set("general.alignment", Meta::U32(64));
        two.alignment = 64;
    });
    assert_eq!(parse(&aligned).unwrap().tensors[1].range.start % 64, 0);

    let second = |shape: &[u64], kind: u32, offset: Option<u64>| {
        let shape = shape.to_vec();
        change(&move |two| {
            two.tensors[1].shape = shape.clone();
            (two.tensors[1].kind, two.tensors[1].offset) = (kind, offset);
        })
    };
    refused(
        &second(&[2], 0, Some(0)),
        "tensors `a` and `b` overlap: one ends at byte 8 of the data, the next begins at 0",
    );
    refused(&second(&[2], 0, Some(40)), "begins at byte 40 of the data, expected a multiple of 32");
    refused(
        &second(&[2], 0, Some(1 << 60)),
        "takes 8 bytes from byte 1152921504606846976 of the data on, the file has",
    );
    refused(&second(&[1 << 40, 1 << 40], 0, None), "takes more than 2^63 bytes");
    refused(&second(&[1 << 20], 0, None), "takes 4194304 bytes from byte 32 of the data on, the file has 40 bytes");
    refused(&second(&[2], 99, None), "tensor `b` has type 99, which is none of ggml");
    refused(&second(&[33], 8, None), "tensor `b` of Q8_0 [33] has rows of 33 values, expected a multiple of 32");
    refused(&second(&[1; 5], 0, None), "tensor `b` has 5 extents, expected at most 4");
    let twice = change(&|two| two.tensors[1].name = "a".to_string());
    refused(&twice, "names tensor `a` twice");
    let hole = change(&|two| {
        two.tensors.insert(1, two.tensors[0].clone());
        two.tensors.remove(0);
        two.tensors[1].offset = Some(64);
        two.tensors[0].data.resize(100, 0);
    });
    refused(&hole, "a hole of 56 bytes before tensor `b`");
}

#[test]
fn a_place_names_its_files() {
    let dir = tempfile::tempdir().unwrap();
    let put = |name: &str| std::fs::write(dir.path().join(name), "").unwrap();
    let names = |place: &Path| {
        let found = files_of(place).map_err(|error| error.to_string())?;
        Ok::<_, String>(found.map(|files| files.iter().map(|file| name_of(file)).collect::<Vec<_>>()))
    };
    assert_eq!(names(dir.path()), Ok(None));
    put("m-00002-of-00002.gguf");
    let missing = names(&dir.path().join("m-00002-of-00002.gguf")).unwrap_err();
    assert!(missing.starts_with("`m-00001-of-00002.gguf` is not there"), "{missing}");
    put("m-00001-of-00002.gguf");
    let both = vec!["m-00001-of-00002.gguf".to_string(), "m-00002-of-00002.gguf".to_string()];
    assert_eq!(names(dir.path()), Ok(Some(both.clone())));
    assert_eq!(names(&dir.path().join("m-00002-of-00002.gguf")), Ok(Some(both)));
    put("other.GGUF");
    assert!(names(dir.path()).unwrap_err().contains("are two models in one folder"));
    assert_eq!(names(&dir.path().join("other.GGUF")), Ok(Some(vec!["other.GGUF".to_string()])));
    put("config.json");
    assert_eq!(names(dir.path()), Ok(None));
}

#[test]
fn parts_have_to_be_of_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let part = |number: u32, count: u32, name: &str| {
        let mut part = Writer::new();
        part.set("split.no", Meta::U32(number));
        part.set("split.count", Meta::U32(count));
        part.set("split.tensors.count", Meta::U32(2));
        part.tensor(name, &[2], 0, vec![0; 8]);
        part.bytes()
    };
    let read = |first: Vec<u8>, second: Vec<u8>| {
        let paths = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"].map(|name| dir.path().join(name));
        std::fs::write(&paths[0], first).unwrap();
        std::fs::write(&paths[1], second).unwrap();
        read_parts(&paths).map(|parts| parts.len()).map_err(|faults| faults[0].to_string())
    };
    assert_eq!(read(part(0, 2, "a"), part(1, 2, "b")), Ok(2));
    let swapped = read(part(1, 2, "a"), part(0, 2, "b")).unwrap_err();
    assert!(swapped.contains("is part 2 of a model of 2 parts, expected part 1"), "{swapped}");
    assert!(read(part(0, 3, "a"), part(1, 2, "b")).unwrap_err().contains("its model has 3 parts, expected 2"));
    assert!(read(part(0, 2, "a"), Writer::new().bytes()).unwrap_err().contains("its model has 1 parts"));
}

/// A file that is changed in any byte of its header, or ends early, is read or refused.
#[test]
fn damaged_headers_never_panic() {
    let bytes = two().bytes();
    let header = parse(&bytes).unwrap().bytes as usize;
    for at in 0..header {
        for bit in 0..8 {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            let _ = parse(&damaged);
        }
        assert!(parse(&bytes[..at]).is_err());
    }
}
