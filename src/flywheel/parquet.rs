//! Owns trials as Parquet: a file for each device and model, in folders that name both (`device=NVIDIA%20H200/model=Llama-3.2-1B`), as Hive,
//! DuckDB, Spark and pandas read them.
//!
//! Columns have the names and units of [`COLUMNS`]; counts are integers, other figures doubles, and empty cells nulls. The columns `model`
//! and `device` are in the names of the folders alone.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parquet::basic::{LogicalType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use super::trial::COLUMNS;
use crate::error::Fault;

/// As Hive names a folder for an empty value.
const EMPTY: &str = "__HIVE_DEFAULT_PARTITION__";
/// Name of the one file of a folder.
const FILE: &str = "trials.parquet";
/// Most rows of a group: a reader holds one at a time.
const GROUP_ROWS: usize = 1 << 16;

/// Cells by column, as [`super::Trial::cells`] has them.
type Row = [(&'static str, String)];

/// How the cells of a column are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Whole,
    Number,
}

fn kind_of(unit: &str) -> Kind {
    match unit {
        "digest" | "text" | "time" => Kind::Text,
        "count" | "positions" | "bytes" | "MHz" => Kind::Whole,
        _ => Kind::Number,
    }
}

/// Writes a folder of Parquet files. Files of an earlier export with the same device and model are replaced. Returns the paths.
///
/// # Errors
/// A folder that cannot be written.
pub fn write_parquet(folder: &Path, rows: &[Vec<(&'static str, String)>]) -> Result<Vec<PathBuf>, Fault> {
    let mut parts: BTreeMap<PathBuf, Vec<&Row>> = BTreeMap::new();
    for row in rows {
        let cell = |name: &str| row.iter().find(|(column, _)| *column == name).map_or("", |(_, cell)| cell);
        let device = match cell("device_name") {
            "" => cell("target"),
            device => device,
        };
        let part =
            PathBuf::from(format!("device={}", escaped(device))).join(format!("model={}", escaped(cell("model"))));
        parts.entry(part).or_default().push(row);
    }
    let mut written = vec![];
    for (part, rows) in parts {
        let path = folder.join(part).join(FILE);
        write_part(&path, &rows).map_err(|error| {
            Fault::environment(format!("cannot write `{}`: {error}", path.display()))
                .with_remedy("name another folder with `--parquet`")
        })?;
        written.push(path);
    }
    Ok(written)
}

/// A value as the name of a folder has it.
fn escaped(value: &str) -> String {
    if value.is_empty() {
        return EMPTY.to_string();
    }
    let plain = |byte: u8| {
        byte.is_ascii_alphanumeric() || b"-_".contains(&byte) || byte == b'.' && !value.trim_matches('.').is_empty()
    };
    value.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

/// Written beside and moved: a reader sees a whole file or none.
fn write_part(path: &Path, rows: &[&Row]) -> Result<(), ParquetError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let columns: Vec<(usize, &str, Kind)> = COLUMNS
        .iter()
        .enumerate()
        .filter(|(_, column)| column.name != "model")
        .map(|(at, column)| (at, column.name, kind_of(column.unit)))
        .collect();
    let fields = columns.iter().map(|(_, name, kind)| {
        let (physical, logical) = match kind {
            Kind::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
            Kind::Whole => (Physical::INT64, None),
            Kind::Number => (Physical::DOUBLE, None),
        };
        let field = Type::primitive_type_builder(name, physical).with_logical_type(logical);
        Ok(Arc::new(field.with_repetition(Repetition::OPTIONAL).build()?))
    });
    let schema =
        Type::group_type_builder("trials").with_fields(fields.collect::<Result<_, ParquetError>>()?).build()?;
    let settings = WriterProperties::builder().build();
    let file = tempfile::NamedTempFile::new_in(folder)?;
    let mut writer = SerializedFileWriter::new(file.as_file(), Arc::new(schema), Arc::new(settings))?;
    for rows in rows.chunks(GROUP_ROWS) {
        let mut group = writer.next_row_group()?;
        for &(at, name, kind) in &columns {
            let cells: Vec<Option<&str>> = rows
                .iter()
                .map(|row| row.get(at).map(|(_, cell)| cell.as_str()).filter(|cell| !cell.is_empty()))
                .collect();
            let levels: Vec<i16> = cells.iter().map(|cell| i16::from(cell.is_some())).collect();
            let present = || cells.iter().flatten();
            let wrong = |cell: &str| ParquetError::General(format!("column `{name}` has `{cell}`"));
            let Some(mut column) = group.next_column()? else { return Err(wrong("no place")) };
            match kind {
                Kind::Text => {
                    let values: Vec<ByteArray> = present().map(|cell| ByteArray::from(*cell)).collect();
                    column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None)?;
                }
                Kind::Whole => {
                    let values: Result<Vec<i64>, _> = present()
                        // A seed has all 64 bits.
                        .map(|cell| cell.parse::<u64>().map(|value| value as i64).map_err(|_| wrong(cell)))
                        .collect();
                    column.typed::<Int64Type>().write_batch(&values?, Some(&levels), None)?;
                }
                Kind::Number => {
                    let values: Result<Vec<f64>, _> =
                        present().map(|cell| cell.parse().map_err(|_| wrong(cell))).collect();
                    column.typed::<DoubleType>().write_batch(&values?, Some(&levels), None)?;
                }
            }
            column.close()?;
        }
        group.close()?;
    }
    writer.close()?;
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| ParquetError::from(error.error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_have_names_that_any_store_takes() {
        for (value, expected) in [
            ("NVIDIA H200", "NVIDIA%20H200"),
            ("Llama-3.2-1B", "Llama-3.2-1B"),
            ("", EMPTY),
            ("..", "%2E%2E"),
            ("a/b=c", "a%2Fb%3Dc"),
            ("é", "%C3%A9"),
        ] {
            assert_eq!(escaped(value), expected);
        }
    }
}
