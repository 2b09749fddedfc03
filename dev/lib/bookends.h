/* Bookends as a C library: one function per operation.
 *
 * Every function works on device memory (on the CPU device: any memory), launches on `stream` (a cudaStream_t; null is
 * the default stream) and returns at once: nothing is allocated, printed or synchronised, so that a call may be
 * captured in a CUDA graph. It returns BK_OK or an error that bk_error_string() puts into words; a refused call
 * launches nothing. Tensors are row-major and need only the alignment of their elements; offsets are 64-bit throughout.
 */
#ifndef BOOKENDS_H
#define BOOKENDS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum { BK_FP32 = 0, BK_FP16 = 1, BK_BF16 = 2 } bk_dtype;

/* The same pointer type as cudaStream_t, without CUDA's headers. */
typedef struct CUstream_st *bk_stream;

enum {
    BK_OK = 0,
    BK_ERROR_NULL = 1,    /* a pointer that may not be null is null, and there is work to do */
    BK_ERROR_SHAPE = 2,   /* a negative size */
    BK_ERROR_DTYPE = 3,   /* no such bk_dtype */
    BK_ERROR_VERSION = 4, /* no such version */
    BK_ERROR_CUDA = 1000  /* 1000 + the cudaError_t that the launch returned */
};

/* What an int returned by these functions means. Never null; not to be freed. */
const char *bk_error_string(int error);

/* Token + position embedding:  out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]
 *
 *   out      (B, T, C) of dtype; must not overlap the inputs
 *   inp      (B, T) token ids in 0..V-1
 *   wte      (V, C) of dtype
 *   wpe      (T, C) of dtype
 *   status   may be null; else one word in device memory that the caller has set to -1. An id outside 0..V-1 lowers it to
 *            its position (an index into inp) if that is the smallest so far. Nothing raises it again, so one look after
 *            many calls is enough. That position's row of out becomes NaN; memory outside the tables is not touched.
 *   version  0 is the last, the best known over the shapes that were measured; 1.. are those that
 *            `encoder_forward --list` shows
 *
 * The sum is formed in float and rounded once to dtype. B, T or C of 0: nothing to do, BK_OK. With V of 0 every id is
 * bad. */
int bk_encoder_forward(void *out, const int32_t *inp, const void *wte, const void *wpe, int64_t *status, int B, int T,
                       int C, int V, bk_dtype dtype, int version, bk_stream stream);

#ifdef __cplusplus
}
#endif
#endif
