// The one header that generated kernels of waves include: everything, in order of dependence.
#pragma once
#include "monobloc_rows.cuh"
#include "waves/context.cuh"
#include "waves/ring.cuh"
#include "waves/rows.cuh"
#include "waves/warpgroup.cuh"
#include "waves/warpgroup_codes.cuh"
#include "waves/matmul.cuh"
#include "waves/attention.cuh"
#include "waves/kernel.cuh"
