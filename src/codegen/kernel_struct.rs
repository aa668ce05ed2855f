//! Owns how structs that the host fills are declared to kernels: once, in Rust. The text for kernels is made of that.

/// A field, as [`declaration`] prints it.
#[cfg(test)]
pub(super) struct Field {
    pub name: &'static str,
    /// Its type in Rust.
    pub ty: &'static str,
    /// What an address points to, with its qualifiers and the star; empty: the field is no address.
    pub pointer: &'static str,
    /// What kernels call it, if one field means different things for different ops. `Some` of nothing: the base of the struct has it.
    pub names: Option<&'static [&'static str]>,
    /// A comment of one line, if there is one.
    pub docs: &'static [&'static str],
}

/// Declares a struct for the host, and makes [`declaration`] of it for kernels. A field is `name: type`, with ` = "const u8*"` if it is an
/// address, and ` as [one, other]` if kernels know it by several names. The line above it is the comment of both.
macro_rules! kernel_struct {
    (
        $(#[$meta:meta])*
        $name:ident = $head:literal {
            $($(#[doc = $doc:literal])* $field:ident: $ty:ty $(= $pointer:literal)? $(as [$($known:ident),*])?,)*
        }
    ) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
        pub struct $name {
            $($(#[doc = $doc])* pub $field: $ty,)*
        }

        impl $name {
            /// The struct as kernels declare it.
            #[cfg(test)]
            fn declaration() -> String {
                let fields = [$(crate::codegen::kernel_struct::Field {
                    name: stringify!($field),
                    ty: stringify!($ty),
                    pointer: concat!($($pointer)?),
                    names: [$(&[$(stringify!($known)),*] as &[&str])?].first().copied(),
                    docs: &[$($doc),*],
                }),*];
                crate::codegen::kernel_struct::declaration($head, stringify!($name), size_of::<$name>(), &fields)
            }
        }
    };
}
pub(super) use kernel_struct;

/// Declares a module of named numbers for the host, and makes a declaration of it for kernels, where each name has a prefix.
macro_rules! kernel_enum {
    (
        $(#[$meta:meta])*
        $module:ident: $head:literal, $prefix:literal { $($(#[doc = $doc:literal])* $name:ident = $value:literal,)* }
    ) => {
        $(#[$meta])*
        pub mod $module {
            $($(#[doc = $doc])* pub const $name: u32 = $value;)*

            /// The numbers as kernels declare them.
            #[cfg(test)]
            pub(super) fn declaration() -> String {
                let lines = [$(concat!("  ", $prefix, stringify!($name), " = ", $value, ",", $(" //", $doc,)* "\n")),*];
                format!("{} {{\n{}}};\n", $head, lines.concat())
            }
        }
    };
}
pub(super) use kernel_enum;

/// The declaration of a struct of `bytes` bytes for kernels; `head` is what its first line says.
#[cfg(test)]
pub(super) fn declaration(head: &str, name: &str, bytes: usize, fields: &[Field]) -> String {
    let mut text = format!("{head} {{\n");
    for Field { name, ty, pointer, names, docs } in fields {
        // `i32 eos[EOS_MAX]` is `eos: [i32; EOS_MAX]`.
        let (ty, extent) = match ty.strip_prefix('[').and_then(|array| array.strip_suffix(']')?.split_once("; ")) {
            Some((ty, count)) => (ty, format!("[{count}]")),
            None => (*ty, String::new()),
        };
        let ty = match (*pointer, ty) {
            ("", "f32") => "float",
            ("", ty) => ty,
            (pointer, _) => pointer,
        };
        let field = match names {
            None => format!("{ty} {name}{extent};"),
            Some([]) => continue,
            Some(names) => format!("union {{ {ty} {}; }};", names.join(", ")),
        };
        let comment: String = docs.iter().map(|doc| format!(" //{doc}")).collect();
        text += &format!("  {field}{comment}\n");
    }
    text + &format!("}};\nstatic_assert(sizeof({name}) == {bytes}, \"the host fills this struct\");\n")
}

/// Puts the declaration of a struct in place of the one that the text of a kernel has; `None`: it has none.
#[cfg(test)]
fn with_declaration(text: &str, declared: &str) -> Option<String> {
    let (head, size) = (declared.lines().next()?, declared.lines().next_back()?.split(" == ").next()?);
    let begin = text.find(&format!("\n{head}\n"))? + 1;
    let (_, rest) = text[begin..].split_once("\n};\n")?;
    let rest = if rest.starts_with(size) { rest.split_once('\n')?.1 } else { rest };
    Some(format!("{}{declared}{rest}", &text[..begin]))
}

/// Compares the declarations that files of `kernels/` have with those of the host; with `BLESS=1` writes these.
#[cfg(test)]
pub(super) fn assert_declared<const N: usize>(structs: [(&str, String); N]) {
    let kernels = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    for (file, declared) in structs {
        let text = std::fs::read_to_string(kernels.join(file)).expect("a file of kernels");
        let expected = with_declaration(&text, &declared).expect("a struct of that name");
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(kernels.join(file), &expected).expect("written");
            continue;
        }
        assert!(text == expected, "{file} declares another struct, expected (`BLESS=1` writes it):\n{declared}");
    }
}
