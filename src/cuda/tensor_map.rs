//! Owns tensor maps: what a device needs to copy a box of weights at once.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use super::api::call;
use super::driver::{Device, DriverError};
use crate::codegen::waves::WeightBox;

/// Bytes of an element: the largest that a map may have, as a box has at most 256 of them side by side.
const ELEMENT_BYTES: u32 = 8;
/// Bytes of a map.
const MAP_BYTES: usize = size_of::<CUtensorMap>();

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
        let steps = [1; 3];
        let (dims, strides, shape, count) = match swizzled {
            true => (dims, strides, shape, 3),
            false => ([dims[0], dims[2], 0], [strides[1], 0], [shape[0], shape[2], 0], 2),
        };
        let address = (pack + of.place) as *mut c_void;
        let swizzle = match swizzled {
            true => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            false => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        };
        let mut map = MaybeUninit::<CUtensorMap>::zeroed();
        // SAFETY: the call reads arrays of `count` dimensions and one stride less, and writes one map. It does not read the address.
        unsafe {
            call!(
                api,
                cuTensorMapEncodeTiled(
                    map.as_mut_ptr(),
                    CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_INT64,
                    count,
                    address,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    shape.as_ptr(),
                    steps.as_ptr(),
                    CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    swizzle,
                    CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            )
        }?;
        // SAFETY: a map is 16 words of 8 bytes, all of them written.
        bytes.extend(unsafe { map.assume_init() }.opaque.iter().flat_map(|word| word.to_ne_bytes()));
    }
    Ok(bytes)
}
