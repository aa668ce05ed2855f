//! Owns tensor maps: what a device needs to copy a box of weights, or of positions of a cache, at once.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use super::api::{Api, call};
use super::driver::{Device, DriverError};
use crate::codegen::waves::{CacheBox, WeightBox};

/// Bytes of an element: the largest that a map may have, as a box has at most 256 of them side by side.
const ELEMENT_BYTES: u32 = 8;
/// Bytes of a map.
const MAP_BYTES: usize = size_of::<CUtensorMap>();

/// A map of up to five dimensions: elements of 8 bytes that follow one another, then what follows at `strides`, in bytes.
struct Tensor<'a> {
    address: u64,
    dims: &'a [u64],
    strides: &'a [u64],
    shape: &'a [u32],
    swizzle: CUtensorMapSwizzle,
}

/// Appends the words of a map to `bytes`.
fn encode(api: &'static Api, of: &Tensor<'_>, bytes: &mut Vec<u8>) -> Result<(), DriverError> {
    let (count, steps) = (of.dims.len(), [1; 5]);
    assert!(
        of.strides.len() + 1 == count && of.shape.len() == count && count <= steps.len(),
        "a stride less than dimensions"
    );
    let mut map = MaybeUninit::<CUtensorMap>::zeroed();
    // SAFETY: the call reads arrays of `count` dimensions and one stride less, and writes one map. It does not read the address.
    unsafe {
        call!(
            api,
            cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_INT64,
                count as u32,
                of.address as *mut c_void,
                of.dims.as_ptr(),
                of.strides.as_ptr(),
                of.shape.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                of.swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
    }?;
    // SAFETY: a map is 16 words of 8 bytes, all of them written.
    bytes.extend(unsafe { map.assume_init() }.opaque.iter().flat_map(|word| word.to_ne_bytes()));
    Ok(())
}

/// The maps of `boxes` in the pack at device address `pack`, as kernels read them.
///
/// # Errors
/// What the driver refuses.
pub(super) fn tensor_maps(device: &Device, boxes: &[WeightBox], pack: u64) -> Result<Vec<u8>, DriverError> {
    let api = device.context.bind()?;
    let mut bytes = Vec::with_capacity(boxes.len() * MAP_BYTES);
    for of in boxes {
        // Elements of a line, lines of a unit, units. What is not swizzled has one line, which is left out.
        let line = u64::from(of.line_bytes);
        let swizzled = line > 0;
        let line = if swizzled { line } else { of.unit_bytes };
        let piece_lines = if swizzled { of.piece_bytes / of.line_bytes } else { 1 };
        let dims = [line / u64::from(ELEMENT_BYTES), of.unit_bytes / line, of.units];
        let strides = [line, of.unit_bytes];
        let shape = [of.piece_bytes / piece_lines / ELEMENT_BYTES, piece_lines, of.box_units];
        let address = pack + of.place;
        let tensor = match swizzled {
            true => Tensor {
                address,
                dims: &dims,
                strides: &strides,
                shape: &shape,
                swizzle: CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            },
            false => Tensor {
                address,
                dims: &[dims[0], dims[2]],
                strides: &strides[1..],
                shape: &[shape[0], shape[2]],
                swizzle: CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            },
        };
        encode(api, &tensor, &mut bytes)?;
    }
    Ok(bytes)
}

/// Bytes of a line of a position.
const TILE_LINE_BYTES: u32 = 128;

/// The maps of `boxes` in the cache at device address `cache`. A box has, for each 128 bytes of a position, the even ones of each eight positions, then the odd ones.
///
/// # Errors
/// What the driver refuses.
pub(super) fn cache_maps(device: &Device, boxes: &[CacheBox], cache: u64) -> Result<Vec<u8>, DriverError> {
    let api = device.context.bind()?;
    let mut bytes = Vec::with_capacity(boxes.len() * MAP_BYTES);
    for of in boxes {
        let (row, line) = (u64::from(of.row_bytes), u64::from(TILE_LINE_BYTES));
        let (elements, lines) = (TILE_LINE_BYTES / ELEMENT_BYTES, of.row_bytes / TILE_LINE_BYTES);
        let tensor = Tensor {
            address: cache + of.place,
            dims: &[u64::from(elements), 4, 2, of.rows / 8, u64::from(lines)],
            strides: &[2 * row, row, 8 * row, line],
            shape: &[elements, 4, 2, of.positions / 8, lines],
            swizzle: CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        encode(api, &tensor, &mut bytes)?;
    }
    Ok(bytes)
}
