/* Bookends as a C library: one function per operation.
 *
 * Every function works on device memory (on the CPU device: any memory), launches on `stream` (a cudaStream_t; null is
 * the default stream) and returns at once: nothing is allocated, printed or synchronised, so that a call may be
 * captured in a CUDA graph. It returns BK_OK or an error that bk_error_string() puts into words; a refused call
 * launches nothing. Tensors are row-major and need only the alignment of their elements; offsets are 64-bit throughout.
 * On the CPU device the results are there when the call returns.
 */
#ifndef BOOKENDS_H
#define BOOKENDS_H

#include <stddef.h>
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
    BK_ERROR_SHAPE = 2,   /* a negative size, or one beyond what the function allows */
    BK_ERROR_DTYPE = 3,   /* no such bk_dtype, or two that don't go together */
    BK_ERROR_VERSION = 4, /* no such version */
    BK_ERROR_UNSUPPORTED = 5, /* that version cannot do what was asked */
    BK_ERROR_FLAGS = 6,   /* no such flag */
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

/* What a gradient does with what is there already, and how it is rounded; 0: += , to nearest. */
enum {
    BK_OVERWRITE = 1,  /* sums replace what is there; rows that nobody asked for become zero */
    BK_STOCHASTIC = 2  /* 16-bit results are rounded up or down at random, right on average */
};

/* Bytes of workspace that bk_encoder_backward needs with that version (0: the best known), at any alignment. 0 for
 * versions 1 to 3, where there are no positions, and for shapes that bk_encoder_backward refuses. */
size_t bk_encoder_backward_workspace_bytes(int B, int T, int C, int V, int version);

/* Gradient of the token + position embedding:
 *   dwte[inp[b,t],:] += dout[b,t,:]      dwpe[t,:] += sum over b of dout[b,t,:]
 *
 *   dwte       (V, C) of grad_dtype; null: not wanted
 *   dwpe       (T, C) of grad_dtype; null: not wanted
 *   dout       (B, T, C) of dtype
 *   inp        (B, T) token ids in 0..V-1
 *   status     may be null; else as for bk_encoder_forward. A position with an id outside 0..V-1 adds nothing, neither
 *              to dwte nor to dwpe.
 *   workspace  device memory of bk_encoder_backward_workspace_bytes(), aligned in any way; what it holds does not
 *              matter, before or after. May be null where that is 0.
 *   B, T       at most 2^31-1 positions together, else BK_ERROR_SHAPE
 *   grad_dtype dtype, or BK_FP32
 *   flags      BK_OVERWRITE, BK_STOCHASTIC, both or 0
 *   seed       of BK_STOCHASTIC: the same seed and sums give the same bits
 *   version    0 is the last, the best known over the shapes that were measured; 1.. are those that
 *              `encoder_backward --list` shows
 *
 * Versions 4 on give the same bits each time: sums are float, added up in an order that depends on the ids alone, and
 * a 16-bit result is rounded once, from what was there plus the sum. With BK_STOCHASTIC it goes to one of its two
 * neighbours with the probability of its distance from the other, in steps of 2^-16 (so a float far below fp16's
 * smallest number still has one chance in 65,536 of becoming that); what is exact stays, what is beyond half an ulp
 * over the largest number is infinity, and fp32 gradients are not affected. Versions 1 to 3 round at every addition; they refuse BK_STOCHASTIC
 * with 16-bit gradients (BK_ERROR_UNSUPPORTED). The arrays must not overlap. Nothing to add (B or T of 0, or no good id):
 * BK_OVERWRITE still zeroes. Both gradients null: nothing is done, and no id is looked at. */
int bk_encoder_backward(void *dwte, void *dwpe, const void *dout, const int32_t *inp, int64_t *status, void *workspace,
                        int B, int T, int C, int V, bk_dtype dtype, bk_dtype grad_dtype, int flags, uint64_t seed,
                        int version, bk_stream stream);

#ifdef __cplusplus
}
#endif
#endif
