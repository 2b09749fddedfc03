/* Bookends as a C library: one function per operation of the first and the last layer of a language model.
 *
 * Memory. Pointers to tensors are device memory (on the CPU device: any memory). Tensors are row-major and need only the
 * alignment of their elements; offsets are 64-bit. A workspace is device memory that a function uses while it runs. It
 * begins at a multiple of 256 bytes, as memory from cudaMalloc does (on the CPU device: aligned_alloc). Its contents do
 * not matter, before or after.
 *
 * Calls. A function launches kernels on `stream` (a cudaStream_t; null: the default stream) and returns. It allocates,
 * prints and synchronises nothing, so a call can be captured in a CUDA graph. The functions that create, tune and destroy
 * the LM head's plans differ, as they say. Several host threads may call at once. On the CPU device the results are
 * complete when the call returns.
 *
 * Errors. A function returns BK_OK or an error. A refused call launches nothing. bk_error_string() names the kind of an
 * error; bk_last_message() names the argument.
 * The caller's pending CUDA error, which cudaGetLastError() returns, stays pending and is not returned. An error that a
 * function returns is not left pending, unless it has replaced another one. The current device stays the same. No
 * attribute of a kernel is lowered.
 *
 * Versions. `version` is the number of a kernel version, as the programs' --list shows them. 0 is the default:
 * deterministic, best over the measured shapes.
 *
 * The status word is one int64_t in device memory, for token ids and targets out of range. Its owner sets it to -1 once:
 * cudaMemset(status, 0xff, 8). A function that meets a bad id lowers the word, read as an unsigned number, to the id's
 * position if that is smaller. So the word holds -1, or the first bad position of all calls so far. A null pointer turns
 * this off.
 */
#ifndef BOOKENDS_H
#define BOOKENDS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header: 10000 * major + 100 * minor + patch. Before 1.0 a minor version may change functions;
 * CHANGELOG.md names every change. */
#define BK_VERSION 200

/* The BK_VERSION that the library was built from. */
int bk_version(void);

typedef enum { BK_FP32 = 0, BK_FP16 = 1, BK_BF16 = 2 } bk_dtype;

/* The same pointer type as cudaStream_t, without CUDA's headers. */
typedef struct CUstream_st *bk_stream;

enum {
    BK_OK = 0,
    BK_ERROR_NULL = 1,        /* a pointer is null that may not be, and there is work to do */
    BK_ERROR_SHAPE = 2,       /* a size is negative or larger than the function allows, or P is less than V */
    BK_ERROR_DTYPE = 3,       /* there is no such bk_dtype, or two do not go together */
    BK_ERROR_VERSION = 4,     /* there is no such version */
    BK_ERROR_UNSUPPORTED = 5, /* the version cannot do what was asked */
    BK_ERROR_FLAGS = 6,       /* there is no such flag */
    BK_ERROR_OPTIONS = 7,     /* an option is not finite or outside its range */
    BK_ERROR_MEMORY = 8,      /* a budget for scratch memory is too small */
    BK_ERROR_NOT_NULL = 9,    /* a pointer is not null that must be */
    BK_ERROR_ALIGNMENT = 10,  /* a workspace does not begin at a multiple of 256 bytes */
    BK_ERROR_CUDA = 1000      /* 1000 + a cudaError_t */
};

/* What an error means. Never null; not to be freed. */
const char *bk_error_string(int error);

/* The last error of the calling thread in words: the function, the argument, its value, and what cuBLASLt or CUDA said.
 * Successful calls leave it as it is; "" before the first error. Never null; not to be freed; valid until the thread's
 * next call. */
const char *bk_last_message(void);

/* Token + position embedding:  out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]
 *
 *   out      (B, T, C) of dtype; written; must not overlap the inputs
 *   inp      (B, T) token ids in 0..V-1
 *   wte      (V, C) of dtype; may be null if V is 0
 *   wpe      (T, C) of dtype; null: out[b,t,:] = wte[inp[b,t],:], for models whose positions are rotary
 *   status   the status word, or null. The row of an id outside 0..V-1 becomes NaN, and the word is lowered to its
 *            position, an index into inp. Memory outside the tables is not touched.
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
 * over the largest number is infinity, and fp32 gradients are not affected. Versions 1 to 3 round at every addition;
 * they refuse BK_STOCHASTIC with 16-bit gradients (BK_ERROR_UNSUPPORTED). The arrays must not overlap. Nothing to add (B
 * or T of 0, or no good id): BK_OVERWRITE still zeroes. Both gradients null: nothing is done, and no id is looked at. */
int bk_encoder_backward(void *dwte, void *dwpe, const void *dout, const int32_t *inp, int64_t *status, void *workspace,
                        int B, int T, int C, int V, bk_dtype dtype, bk_dtype grad_dtype, int flags, uint64_t seed,
                        int version, bk_stream stream);

/* The defaults are what a null pointer to them means: {1, 1, 0, 0, 0, -100}. */
typedef struct {
    float dloss;           /* the gradient of each row's loss: 1/N for that of their mean */
    float logit_scale;     /* a factor of the logits */
    float softcap;         /* logits are squeezed between -softcap and softcap; 0: they are not */
    float label_smoothing; /* from 0 to 1: the share of a target that goes to the whole vocabulary */
    float z_loss;          /* the factor of lse^2 in the loss */
    int32_t ignore_index;  /* rows with this target have loss 0 and gradient 0; it may be any number */
} bk_classifier_options;

/* Softmax, cross-entropy and their gradient, for each of N rows of V logits x, t being the row's target:
 *   z_j = logit_scale * x_j, or softcap * tanh(logit_scale * x_j / softcap)
 *   lse = log(sum_j exp(z_j))      p_j = exp(z_j - lse)      eps = label_smoothing
 *   loss = (1-eps) * (lse - z_t) + eps * (lse - mean_j z_j) + z_loss * lse^2
 *   dlogits_j = dloss * logit_scale * (1 - (z_j/softcap)^2) * ((1 + 2*z_loss*lse) * p_j - (1-eps)*[j=t] - eps/V)
 * (without a softcap the factor with it is 1).
 *
 *   dlogits  (N, P) of dtype; may be logits itself, which then are gone; null: not wanted
 *   losses   (N) float; null: not wanted
 *   lse      (N) float; null: not wanted
 *   probs    (N, P) of dtype, the p_j; null: not wanted
 *   correct  (N), 1 where the largest logit (of equal ones the first) is the target's, else 0; null: not wanted
 *   logits   (N, P) of dtype; columns V to P-1 are not read, and become 0 in dlogits and in probs
 *   targets  (N), in 0..V-1, or options->ignore_index
 *   dlosses  (N) float, factors of the rows' gradients beside options->dloss; null: 1
 *   status   may be null; else as for bk_encoder_forward: a target that is neither of these lowers it to its row. The
 *            row's loss and its V columns of dlogits become NaN, and correct 0.
 *   P        V at least, else BK_ERROR_SHAPE
 *   options  read before this returns; null: the defaults
 *   version  0 is the last, the best known over the shapes that were measured; 1.. are those that
 *            `classifier_fused --list` shows
 *
 * A row with ignore_index has loss 0, correct 0 and dlogits 0, whatever it holds; it is read only if lse or probs are
 * wanted, which are as for any row. A logit of -inf has probability 0. In a row that holds a NaN, +inf or nothing but
 * -inf, lse, loss, probs and dlogits are NaN; with a softcap infinities are +-softcap instead. Where one is NaN, none is
 * the largest. dlogits and probs are formed in float and rounded once to dtype. The arrays must not overlap, save that
 * dlogits may be logits. The same inputs give the same bits each time, for the same outputs. A softcap leaves z exact to
 * about softcap * 1e-7. The label smoothing term of a loss, the mean of max_i z_i - z_j over the vocabulary, is within
 * 1e-6 of itself for all finite logits, masked ones at the type's lowest number included; a loss is infinite only if it
 * is beyond float's range. N of 0: nothing to do, BK_OK. With V of 0 every target but ignore_index is bad, and lse NaN. */
int bk_classifier_fused(void *dlogits, float *losses, float *lse, void *probs, int32_t *correct, const void *logits,
                        const int32_t *targets, const float *dlosses, int64_t *status, int N, int V, int P,
                        const bk_classifier_options *options, bk_dtype dtype, int version, bk_stream stream);

/* The LM head: from hidden states X and weights W to losses and every gradient, without holding the logits x whole:
 *   x = X W^T (+ bias), rounded to dtype      losses, lse and dlogits of x as above      dlogits is rounded to dtype
 *   dX = dlogits W      dW += dlogits^T X      dbias += the sum of dlogits over the rows
 * It is done by a plan, made once for a shape, and run as often as one likes, by one thread at a time. */
typedef struct bk_lm_head bk_lm_head;

/* What a plan is for: gradients that are wanted (none: forward only), and what there is beside X and W. */
enum {
    BK_LM_HEAD_DX = 1,
    BK_LM_HEAD_DW = 2,
    BK_LM_HEAD_DBIAS = 4, /* of a bias that there is, or may be 0 */
    BK_LM_HEAD_BIAS = 8, /* the logits have a bias */
    BK_LM_HEAD_TF32 = 16 /* the products of BK_FP32 round their inputs to TF32; of no effect on other types */
};

/* Makes a plan: it asks cuBLASLt for algorithms, and takes host memory, what cuBLASLt takes for a handle, and a stream,
 * so this is no call for a CUDA graph.
 *
 *   plan        gets it; null in case of an error
 *   N, C, V     rows, channels and vocabulary: sizes of 0 are allowed
 *   flags       of those above
 *   options     of the classifier; null: the defaults
 *   memory      bytes of workspace at most; 0: a quarter of the logits (N * P of dtype, P being V rounded up to a
 *               multiple of 8, from 4096 on of 128), or the least that makes sense: 128 rows, or tiles of 128 columns.
 *               Too few for the version: BK_ERROR_MEMORY. Versions 1 and 2 take all logits and some MiB for cuBLASLt. A
 *               dW of 16 bits takes sums in float: of all of dW where the rows are cut into blocks, or nothing is cut;
 *               of a tile where the vocabulary is cut
 *   grad_dtype  of dW and dbias: dtype, or BK_FP32
 *   version     0 is the last, the best known; 1.. are those that `lm_head --list` shows. Where version 5's own product
 *               can't be had (see lm_head.cu), it does as version 4
 *
 * Errors: BK_ERROR_SHAPE, BK_ERROR_DTYPE, BK_ERROR_FLAGS, BK_ERROR_OPTIONS, BK_ERROR_VERSION, BK_ERROR_MEMORY, or
 * BK_ERROR_CUDA and more if the device or cuBLASLt refuses. */
int bk_lm_head_create(bk_lm_head **plan, int N, int C, int V, int flags, const bk_classifier_options *options,
                      size_t memory, bk_dtype dtype, bk_dtype grad_dtype, int version);

/* Null is none. No call of it may be under way; a CUDA graph that holds one may outlive it. */
void bk_lm_head_destroy(bk_lm_head *plan);

/* Bytes of workspace that the plan's runs need, at a multiple of 256; within `memory`. */
size_t bk_lm_head_workspace_bytes(const bk_lm_head *plan);

/* Tries the algorithms that cuBLASLt proposes for the plan's products, on memory that is aligned as that of the runs
 * will be, and remembers the fastest; without it, a plan takes what cuBLASLt proposes first. The one function that waits
 * for the stream. dX, dW and the workspace hold anything afterwards: its place is before the first run, and dW is to be
 * zeroed (or filled with what is added to) between the two. Pointers and workspace as for bk_lm_head_run. */
int bk_lm_head_tune(bk_lm_head *plan, void *dX, void *dW, const void *X, const void *W, const void *bias,
                    void *workspace, bk_stream stream);

/* Runs the plan.
 *
 *   dX         (N, C) of dtype
 *   dW         (V, C) of grad_dtype, to which is added; may be the embedding's gradient, to which bk_encoder_backward
 *              adds its part (tied weights)
 *   dbias      (V) of grad_dtype, to which is added
 *   losses     (N) float; null: not wanted
 *   lse        (N) float; null: not wanted
 *   X          (N, C) of dtype
 *   W          (V, C) of dtype; may be the embedding's table
 *   bias       (V) of dtype
 *   targets    (N), in 0..V-1, or options->ignore_index
 *   dlosses    (N) float, factors of the rows' gradients beside options->dloss; null: 1
 *   status     may be null; else as for bk_classifier_fused
 *   workspace  device memory of bk_lm_head_workspace_bytes(), at a multiple of 256 bytes, as cudaMalloc's is (else
 *              BK_ERROR_CUDA and cudaErrorMisalignedAddress); what it holds does not matter, before or after
 *
 * Of dX, dW, dbias and bias those that the plan has must be there and the others null, else BK_ERROR_NULL; where C or V
 * of 0 leaves one no elements, either will do. The arrays must not overlap. Rows with ignore_index have loss 0, and no
 * part in any gradient, whatever X holds there. A bad target makes the loss and the row of dX NaN, and all of
 * dW and dbias, whose sums it is a term of. Gradients are sums in float of dlogits as rounded to dtype, rounded once; dW
 * and dbias of 16 bits from what was there plus the sum over all rows. The same plan gives the same bits each time. Work
 * on the plan's own stream begins behind what is in `stream` and ends before what follows, so that the call may be
 * captured in a CUDA graph; two runs of one plan must not be under way at the same time. N of 0: nothing to do, BK_OK.
 * With V of 0 dX is 0; with C of 0 the logits are the bias or 0. */
int bk_lm_head_run(const bk_lm_head *plan, void *dX, void *dW, void *dbias, float *losses, float *lse, const void *X,
                   const void *W, const void *bias, const int32_t *targets, const float *dlosses, int64_t *status,
                   void *workspace, bk_stream stream);

#ifdef __cplusplus
}
#endif
#endif
