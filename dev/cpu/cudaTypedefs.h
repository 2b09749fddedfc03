// The CPU device's cudaTypedefs.h: the types of the driver's functions that cudaGetDriverEntryPointByVersion finds.
#pragma once

#include "cuda.h"

// `strides` in bytes, of all dimensions but the first, whose elements are side by side. What the driver would refuse is
// CUDA_ERROR_INVALID_VALUE, and so is what the CPU device has not: more dimensions than two, strides of elements.
typedef CUresult(CUDAAPI *PFN_cuTensorMapEncodeTiled_v12000)(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *dims,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill);
