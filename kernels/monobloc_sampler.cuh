// The one header that the generated sampler includes: everything, in order of dependence.
#pragma once
#include "monobloc.cuh"
#include "sample/table.cuh"
#include "sample/sampler.cuh"
#include "sample/rivals.cuh"
