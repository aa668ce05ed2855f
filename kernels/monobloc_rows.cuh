// The one header that generated kernels for rows include: everything, in order of dependence.
#pragma once
#include "monobloc.cuh"
#include "rows/context.cuh"
#include "rows/words.cuh"
#include "rows/ring.cuh"
#include "rows/select.cuh"
#include "rows/matvec_codes.cuh"
#include "rows/matvec.cuh"
#include "rows/attention.cuh"
#include "rows/experts.cuh"
#include "rows/mix.cuh"
#include "rows/kernel.cuh"
