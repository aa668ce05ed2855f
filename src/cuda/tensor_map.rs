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
        let dims = [of.unit_bytes / u64::from(ELEMENT_BYTES), of.units];
        let strides = [of.unit_bytes];
        let (shape, steps) = ([of.piece_bytes / ELEMENT_BYTES, of.box_units], [1, 1]);
        let address = (pack + of.place) as *mut c_void;
        let mut map = MaybeUninit::<CUtensorMap>::zeroed();
        // SAFETY: the call reads arrays of two dimensions and one stride, and writes one map. It does not read the address.
        unsafe {
            call!(
                api,
                cuTensorMapEncodeTiled(
                    map.as_mut_ptr(),
                    CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_INT64,
                    2,
                    address,
                    dims.as_ptr(),
                    strides.as_ptr(),
                    shape.as_ptr(),
                    steps.as_ptr(),
                    CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
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
