//! Owns a writer of GGUF files for tests: what it is told, sound or not.

/// The value of a key.
#[derive(Clone)]
pub enum Meta {
    U32(u32),
    F32(f32),
    Truth(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    Truths(Vec<bool>),
}

/// A tensor: name, extents with that of a row last, number of its type, bytes.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub shape: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
    /// Where its data begins; `None`: after that of the one before.
    pub offset: Option<u64>,
}

#[derive(Clone)]
pub struct Writer {
    pub version: u32,
    pub alignment: u64,
    pub metadata: Vec<(String, Meta)>,
    pub tensors: Vec<Tensor>,
}

impl Writer {
    pub fn new() -> Writer {
        Writer { version: 3, alignment: 32, metadata: vec![], tensors: vec![] }
    }

    pub fn set(&mut self, key: &str, value: Meta) {
        self.metadata.retain(|(own, _)| own != key);
        self.metadata.push((key.to_string(), value));
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.set(key, Meta::Text(value.to_string()));
    }

    pub fn tensor(&mut self, name: &str, shape: &[u64], kind: u32, data: Vec<u8>) {
        let (name, shape) = (name.to_string(), shape.to_vec());
        self.tensors.push(Tensor { name, shape, kind, data, offset: None });
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            string(key, &mut out);
            write(value, &mut out);
        }
        let mut end = 0u64;
        let mut data: Vec<u8> = vec![];
        for tensor in &self.tensors {
            string(&tensor.name, &mut out);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|extent| out.extend(extent.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            let offset = tensor.offset.unwrap_or(end);
            out.extend(offset.to_le_bytes());
            if tensor.offset.is_none() {
                data.resize(offset as usize, 0);
                data.extend(&tensor.data);
                end = (offset + tensor.data.len() as u64).next_multiple_of(self.alignment.max(1));
            }
        }
        out.resize(out.len().next_multiple_of(self.alignment.max(1) as usize), 0);
        out.extend(data);
        out
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn list<T>(kind: u32, items: &[T], out: &mut Vec<u8>, mut one: impl FnMut(&T, &mut Vec<u8>)) {
    out.extend(9u32.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend((items.len() as u64).to_le_bytes());
    items.iter().for_each(|item| one(item, out));
}

fn write(value: &Meta, out: &mut Vec<u8>) {
    let kind = |number: u32, out: &mut Vec<u8>| out.extend(number.to_le_bytes());
    match value {
        Meta::U32(n) => (kind(4, out), out.extend(n.to_le_bytes())).1,
        Meta::F32(x) => (kind(6, out), out.extend(x.to_le_bytes())).1,
        Meta::Truth(truth) => (kind(7, out), out.push(u8::from(*truth))).1,
        Meta::Text(text) => (kind(8, out), string(text, out)).1,
        Meta::Texts(texts) => list(8, texts, out, |text, out| string(text, out)),
        Meta::I32s(items) => list(5, items, out, |n, out| out.extend(n.to_le_bytes())),
        Meta::F32s(items) => list(6, items, out, |x, out| out.extend(x.to_le_bytes())),
        Meta::Truths(items) => list(7, items, out, |truth, out| out.push(u8::from(*truth))),
    }
}
