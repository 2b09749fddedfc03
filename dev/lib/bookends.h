/* Bookends as a C library: one function per operation of the first and the last layer of a language model.
 *
 * Memory. Pointers to tensors are device memory (on the CPU device: any memory). Tensors are row-major and need only
 * the alignment of their elements; offsets are 64-bit. A workspace is device memory that a function uses while it runs.
 * It begins at a multiple of 256 bytes, as memory from cudaMalloc does (on the CPU device: aligned_alloc). It may hold
 * anything before and after a call.
 *
 * Calls. A function launches kernels on `stream` (a cudaStream_t; null: the default stream) and returns. It does not
 * allocate, print or synchronise, so that a CUDA graph can capture a call. The exceptions are the functions that
 * create, tune and destroy the LM head's plans; their comments say so. Several host threads may call at once. On the
 * CPU device the results are complete when the call returns.
 *
 * Errors. A function returns BK_OK or an error. A refused call launches nothing. bk_error_string() describes the kind
 * of error; bk_last_message() names the argument. The caller's pending CUDA error, the one that cudaGetLastError()
 * returns, stays pending and is not returned. An error that a function returns is not left pending, unless it has
 * replaced another one. The current device does not change. No attribute of a kernel is lowered.
 *
 * Versions. `version` is the number of a kernel version, as in the list that the programs print with --list. 0 is the
 * default version: deterministic, best over the measured shapes.
 *
 * The status word is one int64_t in device memory, for token ids and targets out of range. The caller sets it to -1
 * once: cudaMemset(status, 0xff, 8). A function that finds a bad id lowers the word, read as an unsigned number, to the
 * id's position if that is smaller. So the word is -1, or the first bad position of all calls so far. If the pointer is
 * null, nothing is reported.
 */
#ifndef BOOKENDS_H
#define BOOKENDS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header: 10000 * major + 100 * minor + patch. Before 1.0 a minor version may change functions;
 * CHANGELOG.md lists every change. */
#define BK_VERSION 200

/* The BK_VERSION from which the library was built. */
int bk_version(void);

typedef enum { BK_FP32 = 0, BK_FP16 = 1, BK_BF16 = 2 } bk_dtype;

/* The same pointer type as cudaStream_t, without CUDA's headers. */
typedef struct CUstream_st *bk_stream;

enum {
    BK_OK = 0,
    BK_ERROR_NULL = 1,        /* a pointer is null that must not be, and there is work to do */
    BK_ERROR_SHAPE = 2,       /* a size is negative or larger than the function allows, or P is less than V */
    BK_ERROR_DTYPE = 3,       /* there is no such bk_dtype, or the types cannot be combined */
    BK_ERROR_VERSION = 4,     /* there is no such version */
    BK_ERROR_UNSUPPORTED = 5, /* this version does not support the request */
    BK_ERROR_FLAGS = 6,       /* there is no such flag */
    BK_ERROR_OPTIONS = 7,     /* an option is not finite or outside its range */
    BK_ERROR_MEMORY = 8,      /* the budget for scratch memory is too small */
    BK_ERROR_NOT_NULL = 9,    /* a pointer is not null that must be */
    BK_ERROR_ALIGNMENT = 10,  /* a workspace does not begin at a multiple of 256 bytes */
    BK_ERROR_TUNING = 11,     /* a blob of tuning results is damaged, or is for another plan, device or cuBLASLt */
    BK_ERROR_CUDA = 1000      /* 1000 + a cudaError_t */
};

/* The meaning of an error. Never null; must not be freed. */
const char *bk_error_string(int error);

/* The last error of the calling thread in words: the function, the argument, its value, and the message of cuBLASLt or
 * CUDA. Successful calls do not change it; "" before the first error. Never null; must not be freed; valid until the
 * thread's next call. */
const char *bk_last_message(void);

/* Token + position embedding:  out[b,t,:] = wte[inp[b,t],:] + wpe[t,:]
 *
 *   out      (B, T, C) of dtype; overwritten; must not overlap the inputs
 *   inp      (B, T) token ids in 0..V-1
 *   wte      (V, C) of dtype; may be null if V is 0
 *   wpe      (T, C) of dtype; null: out[b,t,:] = wte[inp[b,t],:], for models with rotary positions
 *   status   the status word, or null. The row of an id outside 0..V-1 becomes NaN, and the word is lowered to its
 *            position, an index into inp. Memory outside the tables is not accessed.
 *
 * The sum is computed in float and rounded once to dtype. B, T or C of 0: nothing to do, BK_OK. With V of 0 every id is
 * bad. */
int bk_encoder_forward(void *out, const int32_t *inp, const void *wte, const void *wpe, int64_t *status, int B, int T,
                       int C, int V, bk_dtype dtype, int version, bk_stream stream);

/* Flags of outputs. Without a flag, gradients of weights are added to the output, and all other outputs are
 * overwritten. */
enum {
    BK_OVERWRITE = 1,  /* bk_encoder_backward and bk_embedding_bag_backward: sums are written, not added; rows without
                          positions become zero */
    BK_STOCHASTIC = 2, /* bk_encoder_backward, bk_embedding_update (accumulate) and bk_embedding_optimizer: 16-bit
                          results are rounded up or down at random, right on average */
    BK_ADD_LOSSES = 4, /* bk_classifier_options.flags: losses are added to, for gradient accumulation */
    BK_DISTINCT = 8    /* bk_embedding_update: the caller promises that all good indices differ */
};

/* Bytes of workspace that bk_encoder_backward needs with that version. 0 for versions 1 to 3, for no positions, and for
 * shapes that bk_encoder_backward refuses. Version 4: 8 bytes for each position and for each id of the vocabulary.
 * From version 5 on: about 50 bytes for each position, 4*C for each 32 positions, and a bit for each id. */
size_t bk_encoder_backward_workspace_bytes(int B, int T, int C, int V, int version);

/* Gradient of the token + position embedding:
 *   dwte[inp[b,t],:] += dout[b,t,:]      dwpe[t,:] += sum over b of dout[b,t,:]
 *
 *   dwte       (V, C) of grad_dtype; added to, or overwritten with BK_OVERWRITE; null: not computed
 *   dwpe       (T, C) of grad_dtype; the same
 *   dout       (B, T, C) of dtype
 *   inp        (B, T) token ids in 0..V-1
 *   status     the status word, or null. An id outside 0..V-1 adds nothing to either gradient, and lowers the word to
 *              its position, an index into inp.
 *   workspace  of bk_encoder_backward_workspace_bytes(); may be null if that is 0. (It need not begin at a multiple of
 *              256 bytes.)
 *   B, T       at most 2^31-1 positions together, else BK_ERROR_SHAPE
 *   grad_dtype dtype, or BK_FP32
 *   flags      BK_OVERWRITE, BK_STOCHASTIC, both or 0
 *   seed       for BK_STOCHASTIC: the same seed and sums give the same bits
 *
 * Versions 5, 6 and 7 were 4, 5 and 6 in 0.1.0; version 4 is new in 0.2.0.
 *
 * From version 4 on, the bits are the same each time: sums are float, in an order that depends on the ids alone, and a
 * 16-bit result is rounded once, from the old value plus the sum. BK_STOCHASTIC rounds to one of the two neighbours.
 * The probability of each is proportional to the distance to the other, in steps of 2^-16 (so a float far below fp16's
 * smallest number still becomes that number with probability 1/65536). Exact results stay. Results beyond half an ulp
 * over the largest number are infinite. fp32 gradients are not affected. Versions 1 to 3 round at every addition; they
 * refuse BK_STOCHASTIC with 16-bit gradients (BK_ERROR_UNSUPPORTED). The arrays must not overlap. If there is nothing
 * to add (B or T of 0, or no good id), BK_OVERWRITE still zeroes. If both gradients are null, nothing is done and no id
 * is checked. */
int bk_encoder_backward(void *dwte, void *dwpe, const void *dout, const int32_t *inp, int64_t *status, void *workspace,
                        int B, int T, int C, int V, bk_dtype dtype, bk_dtype grad_dtype, int flags, uint64_t seed,
                        int version, bk_stream stream);

/* The type of indices, and of the offsets of bags. */
typedef enum { BK_INT32 = 0, BK_INT64 = 1 } bk_index_type;

/* Gather:  out[i,:] = table[idx[i],:]
 *
 *   out         (N, C) of out_dtype; written; must not overlap the inputs
 *   idx         (N) row numbers of index_type in 0..rows-1
 *   table       (rows, C) of dtype; row r begins at element r * stride; may be null if rows is 0
 *   status      the status word, or null. The row of an index outside 0..rows-1 becomes NaN, and the word is lowered to
 *               its position, i. Negative indices are bad. Memory outside the table is not accessed.
 *   stride      elements from row to row; at least C, else BK_ERROR_SHAPE
 *   out_dtype   dtype, or BK_FP32
 *
 * A copy within one type keeps all bits. N or C of 0: nothing to do, BK_OK. With rows of 0 every index is bad. */
int bk_embedding_lookup(void *out, const void *idx, const void *table, int64_t *status, int64_t N, int C, int64_t rows,
                        int64_t stride, bk_dtype dtype, bk_dtype out_dtype, bk_index_type index_type, int version,
                        bk_stream stream);

/* How bk_embedding_bag combines the rows of a bag. */
typedef enum { BK_BAG_SUM = 0, BK_BAG_MEAN = 1, BK_BAG_MAX = 2 } bk_bag_mode;

/* Options of bk_embedding_bag. Start from BK_BAG_OPTIONS, the defaults, and set fields by name. */
typedef struct {
    int32_t mode;        /* a bk_bag_mode */
    int32_t offset_type; /* the bk_index_type of offsets */
    const void *offsets; /* (bags + 1), ascending: bag g consists of the indices offsets[g] to offsets[g+1]-1. Offsets
                            outside 0..count are clamped. Null: every bag has `hotness` indices. */
    int64_t hotness;     /* without offsets: count must be bags * hotness, else BK_ERROR_SHAPE */
    const float *weights;      /* (count): one factor per index, for sums and means only; null: all 1 */
    int64_t padding_idx;       /* an index that bags skip, also in the mean's count; negative: none */
    const int64_t *first_rows; /* (tables + 1): `table` holds several tables. Table t consists of the rows first_rows[t]
                                  to first_rows[t+1]-1, and its indices are relative to first_rows[t]. Null: one. */
    int32_t tables;            /* number of tables, a divisor of the number of bags; 1 without first_rows */
    int32_t reserved[5];       /* 0, else BK_ERROR_OPTIONS */
} bk_bag_options;

#define BK_BAG_OPTIONS {BK_BAG_SUM, BK_INT32, NULL, 1, NULL, -1, NULL, 1, {0}}

/* Bags: the sum, mean or maximum of several rows of the table,
 *   out[g,:] = sum over the indices k of bag g of weights[k] * table[idx[k],:]
 *
 *   out         (bags, C) of out_dtype; written. With several tables: (batch, tables, C), where batch = bags / tables
 *               and the bags t * batch to (t+1) * batch - 1 look up table t (the layout of FBGEMM's table-batched
 *               embedding)
 *   argmax      int64, the shape of out; written: the position in idx of each maximum, the first of equal ones; -1 for
 *               an empty bag and for a bag with a bad index. Null: not wanted. Must be null in other modes.
 *   idx         (count) row numbers of index_type
 *   table       (rows, C) of dtype, with its stride; all tables together
 *   status      the status word, or null. A bag with an index outside its table becomes NaN, and the word is lowered to
 *               the position of that index in idx.
 *   options     null: BK_BAG_OPTIONS
 *
 * Sums are float and are rounded once. Their order depends on the bag's length, C and the alignment only, so the bits
 * are the same each time. Version 5 divides bags of more than 512 indices into parts; versions 1 to 4 add in order. A
 * mean divides by the number of indices that are not padding. A bag that is empty, or consists of padding, is 0 in
 * every mode. NaN is larger than any number. The other arguments are those of bk_embedding_lookup. */
int bk_embedding_bag(void *out, int64_t *argmax, const void *idx, const void *table, int64_t *status, int64_t count,
                     int64_t bags, int C, int64_t rows, int64_t stride, const bk_bag_options *options, bk_dtype dtype,
                     bk_dtype out_dtype, bk_index_type index_type, int version, bk_stream stream);

/* Bytes of workspace that bk_embedding_bag_backward needs: about 40 bytes for each index (48 if rows is 2^32 or more),
 * and 4*C for each 16 indices. 0 for arguments that it refuses, and while a CUDA error is pending. The pointers of the
 * options are only compared with null. */
size_t bk_embedding_bag_backward_workspace_bytes(int64_t count, int64_t bags, int C, int64_t rows,
                                                 const bk_bag_options *options);

/* Gradients of bk_embedding_bag. f[i] is the weight of position i, or 1, divided for a mean by the bag's number of
 * indices that are not padding:
 *   dtable[r,:] += sum over the positions i with idx[i] = r of f[i] * dout[bag(i),:]
 *   dweights[i]  = dout[bag(i),:] . table[idx[i],:]  (divided for a mean by the same number)
 * With BK_BAG_MAX, each element of dout goes to the position that argmax names.
 *
 *   dtable     dense: (rows, C) of grad_dtype; added to, or written with BK_OVERWRITE; null: not wanted
 *              sparse: (count, C); row k is written for each k below *distinct, and is the gradient of row indices[k]
 *   indices    (count); written: the distinct row numbers in ascending order (of all tables together); null: dense
 *   distinct   one number; written: how many there are; null if and only if indices is null
 *   dweights   (count); written; null: not wanted; must be null with BK_BAG_MAX
 *   dout       (bags, C) of dtype, or with several tables (batch, tables, C)
 *   argmax     with BK_BAG_MAX what bk_embedding_bag wrote there; else null
 *   table      (rows, C) of dtype, with its stride; needed for dweights only, else may be null
 *   status     the status word, or null. A bad index adds nothing, and the word is lowered to its position in idx.
 *   workspace  of bk_embedding_bag_backward_workspace_bytes(), aligned to 256 bytes; version 1 without dweights: null
 *   count      at most 2^31-1, as bags; else BK_ERROR_SHAPE
 *   grad_dtype dtype, or BK_FP32
 *   flags      BK_OVERWRITE or 0; no effect on a sparse gradient
 *
 * The bags are those of bk_embedding_bag, with the same options. Padding and positions in no bag add nothing; their
 * dweights, and those of bad indices, are 0. Versions 2 on give the same bits each time: sums are float, in an order
 * that depends on the indices only, and are rounded once. Their time depends on the number of indices, not on the rows
 * of the table, except that BK_OVERWRITE zeroes a dense gradient. Version 1 adds with atomics, rounds at each addition,
 * and has no sparse gradient (BK_ERROR_UNSUPPORTED). Versions 2 on call CUB, which takes a pending CUDA error for its
 * own: they return that error and do nothing. */
int bk_embedding_bag_backward(void *dtable, int64_t *indices, int64_t *distinct, float *dweights, const void *dout,
                              const int64_t *argmax, const void *idx, const void *table, int64_t *status,
                              void *workspace, int64_t count, int64_t bags, int C, int64_t rows, int64_t stride,
                              const bk_bag_options *options, bk_dtype dtype, bk_dtype grad_dtype, int flags,
                              bk_index_type index_type, int version, bk_stream stream);

/* Bytes of workspace that bk_embedding_transpose needs. 0 for arguments that it refuses, and while a CUDA error is
 * pending. */
size_t bk_embedding_transpose_workspace_bytes(int64_t count, int64_t rows);

/* Transposition: the positions of each index. For the indices 7 3 7 9 7: indices 3 7 9, begin 0 1 4 5, positions 1 0 2
 * 4 3, group 0 1 1 1 2, *distinct 3.
 *
 *   indices    (count); written: the distinct indices, ascending
 *   begin      (count + 1); written up to begin[*distinct]: index indices[g] has the positions positions[begin[g]] to
 *              positions[begin[g+1]-1], in ascending order
 *   positions  (count); written; positions with bad indices come last
 *   group      (count); written: the group of each of them; -1 for bad indices
 *   distinct   one number; written
 *   idx        (count) of index_type; good ones are in 0..rows-1; count is at most 2^31-1
 *   status     the status word, or null: lowered to the first position with a bad index
 *   workspace  of bk_embedding_transpose_workspace_bytes(), aligned to 256 bytes
 *
 * A pending CUDA error is returned, and nothing is done: see bk_embedding_bag_backward. */
int bk_embedding_transpose(int64_t *indices, int32_t *begin, int32_t *positions, int32_t *group, int64_t *distinct,
                           const void *idx, int64_t *status, void *workspace, int64_t count, int64_t rows,
                           bk_index_type index_type, bk_stream stream);

/* What bk_embedding_update does with a row. */
typedef enum { BK_UPDATE_OVERWRITE = 0, BK_UPDATE_ACCUMULATE = 1 } bk_update_op;

/* Bytes of workspace that bk_embedding_update needs with that op, flags and version. 0 with BK_DISTINCT, for no indices
 * and for arguments that bk_embedding_update refuses. Overwrite: 8 to 16 for each index from version 2 on.
 * Accumulate: about 40 for each index (48 if rows is 2^32 or more) and 4*C for each 16 indices with version 4, and 0
 * while a CUDA error is pending; 0 with versions 1 to 3. */
size_t bk_embedding_update_workspace_bytes(int64_t count, int C, int64_t rows, bk_update_op op, int flags, int version);

/* Update of table rows in place:
 *   BK_UPDATE_OVERWRITE    table[idx[i],:] = values[i,:]; of equal indices, the last one wins
 *   BK_UPDATE_ACCUMULATE   table[idx[i],:] += scale * values[i,:]; equal indices add up
 *
 *   table        (rows, C) of dtype; updated; row r begins at element r * stride; may be null if rows is 0. Rows
 *                without an index, and the elements between two rows, are not accessed.
 *   idx          (count) row numbers of index_type in 0..rows-1
 *   values       (count, C) of value_dtype
 *   status       the status word, or null. A bad index updates nothing, and the word is lowered to its position.
 *   workspace    of bk_embedding_update_workspace_bytes(), aligned to 256 bytes; may be null where that is 0
 *   count        at most 2^31-1, else BK_ERROR_SHAPE
 *   stride       elements from row to row; at least C, else BK_ERROR_SHAPE
 *   scale        finite, else BK_ERROR_OPTIONS; no effect on overwrite
 *   value_dtype  dtype or BK_FP32; with dtype BK_FP32 any
 *   flags        BK_DISTINCT: the caller promises that all good indices differ, and no time goes into finding equal
 *                ones. (If some are equal nevertheless, their rows hold any mixture of the results.) Accumulate also:
 *                BK_STOCHASTIC, see bk_encoder_backward
 *   seed         of BK_STOCHASTIC
 *
 * Overwrite converts by rounding to nearest, and keeps all bits within one type. Accumulate forms float sums. Versions
 * 1 and 4, and all versions with BK_DISTINCT, round old value + sum once and give the same bits each time. Versions 2
 * and 3 add by atomics otherwise: in any order, rounding at each addition; they refuse BK_STOCHASTIC with a 16-bit
 * table (BK_ERROR_UNSUPPORTED). Version 1 of both takes time by the square of count. Accumulate's version 4 calls CUB:
 * without BK_DISTINCT, it returns a pending CUDA error and does nothing. The arrays must not overlap. */
int bk_embedding_update(void *table, const void *idx, const void *values, int64_t *status, void *workspace,
                        int64_t count, int C, int64_t rows, int64_t stride, bk_update_op op, float scale,
                        bk_dtype dtype, bk_dtype value_dtype, int flags, uint64_t seed, bk_index_type index_type,
                        int version, bk_stream stream);

/* Optimizers for sparse gradients. w: an element of the table; g: its gradient; t: the number of the step; mean(): over
 * the row.
 *
 *   BK_SGD              w -= learning_rate * (g + weight_decay * w)
 *   BK_ROWWISE_ADAGRAD  g += weight_decay * w;  s += mean(g^2);  w -= learning_rate * g / (sqrt(s) + eps)
 *   BK_ADAM             m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2
 *                       w -= learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w)
 *   BK_ROWWISE_ADAM     BK_ADAM with v = beta2 * v + (1 - beta2) * mean(g^2), one v per row
 *
 * The last three are FBGEMM's EXACT_ROWWISE_ADAGRAD, ADAM and PARTIAL_ROWWISE_ADAM. torch.optim.Adagrad has one s per
 * element. torch.optim.SparseAdam adds eps before the bias correction: its eps is eps * sqrt(1 - beta2^t) here. */
typedef enum { BK_SGD = 0, BK_ROWWISE_ADAGRAD = 1, BK_ADAM = 2, BK_ROWWISE_ADAM = 3 } bk_optimizer_kind;

/* Options of bk_embedding_optimizer. Start from BK_OPTIMIZER_OPTIONS, the defaults, and set fields by name. */
typedef struct {
    int32_t kind;               /* a bk_optimizer_kind */
    int32_t flags;              /* BK_STOCHASTIC or 0, for the table; states are float */
    float learning_rate;        /* finite */
    float eps;                  /* finite, 0 or more; not for SGD */
    float weight_decay;         /* finite, 0 or more */
    double beta1, beta2;        /* from 0 to below 1; for Adam */
    int64_t step;               /* t, from 1 on; for Adam. The caller counts. */
    const int64_t *device_step; /* t in device memory, read when the kernel runs, so that the replays of a CUDA graph
                                   can have different ones; null: step */
    uint64_t seed;              /* of BK_STOCHASTIC; take another one in each step */
    int32_t reserved[6];        /* 0, else BK_ERROR_OPTIONS */
} bk_optimizer_options;

#define BK_OPTIMIZER_OPTIONS {BK_SGD, 0, 0.01f, 1e-8f, 0, 0.9, 0.999, 1, NULL, 0, {0}}

/* One step of an optimizer, in one launch, for the rows of a sparse gradient, such as bk_embedding_bag_backward writes
 * (its indices, dtable and distinct are idx with BK_INT64, gradients and device_count here).
 *
 *   table         (rows, C) of dtype, with its stride; updated: formed in float, rounded once
 *   first         (rows, C) float, m of BK_ADAM and BK_ROWWISE_ADAM; updated; null for the others. 0 before step 1
 *   second        float; updated; null for BK_SGD. BK_ADAM: v (rows, C). BK_ROWWISE_ADAM: v (rows).
 *                 BK_ROWWISE_ADAGRAD: s (rows)
 *   idx           (count) row numbers; all good ones must differ, else their rows hold any mixture of the results
 *   gradients     (count, C) of grad_dtype: dtype or BK_FP32; with dtype BK_FP32 any
 *   device_count  the number of rows of the gradient, read when the kernel runs, limited to count; null: count
 *   status        the status word, or null. A bad index updates nothing, and the word is lowered to its position.
 *   count         at most 2^31-1, else BK_ERROR_SHAPE
 *   options       may not be null
 *
 * Rows without a gradient, and their states, are not accessed: no decay applies to them. The same bits each time. The
 * arrays must not overlap. The other arguments are those of bk_embedding_update. */
int bk_embedding_optimizer(void *table, float *first, float *second, const void *idx, const void *gradients,
                           const int64_t *device_count, int64_t *status, int64_t count, int C, int64_t rows,
                           int64_t stride, const bk_optimizer_options *options, bk_dtype dtype, bk_dtype grad_dtype,
                           bk_index_type index_type, int version, bk_stream stream);

/* Options of the classifier and of the LM head. Start from BK_CLASSIFIER_OPTIONS, the defaults, and set fields by name.
 * A null pointer to options means the defaults. Later versions may use the reserved fields, where 0 will mean the
 * present behaviour. */
typedef struct {
    float dloss;           /* the gradient of each row's loss; 1/N for the mean of the losses */
    float logit_scale;     /* a factor of the logits */
    float softcap;         /* logits are limited to -softcap..softcap by a tanh; 0: no softcap */
    float label_smoothing; /* from 0 to 1: the share of a target that is spread over the whole vocabulary */
    float z_loss;          /* the factor of lse^2 in the loss */
    int32_t ignore_index;  /* rows with this target have loss 0 and gradient 0; any number is allowed */
    const float *divisor;  /* a float in device memory that divides the gradients (if it is 0, they are 0); null: 1 */
    int32_t flags;         /* BK_ADD_LOSSES, or 0 */
    int32_t reserved[7];   /* 0, else BK_ERROR_OPTIONS */
} bk_classifier_options;

#define BK_CLASSIFIER_OPTIONS {1, 1, 0, 0, 0, -100, NULL, 0, {0}}

/* Softmax, cross-entropy and their gradient, for each of N rows of V logits x, t being the row's target:
 *   z_j = logit_scale * x_j, or softcap * tanh(logit_scale * x_j / softcap)
 *   lse = log(sum_j exp(z_j))      p_j = exp(z_j - lse)      eps = label_smoothing
 *   loss = (1-eps) * (lse - z_t) + eps * (lse - mean_j z_j) + z_loss * lse^2
 *   d = dloss * dlosses[row] / *divisor
 *   dlogits_j = d * logit_scale * (1 - (z_j/softcap)^2) * ((1 + 2*z_loss*lse) * p_j - (1-eps)*[j=t] - eps/V)
 * (without a softcap the factor with it is 1).
 *
 *   dlogits  (N, P) of dtype; overwritten; may be logits itself, which is then overwritten; null: not computed
 *   losses   (N) float; overwritten, or added to with BK_ADD_LOSSES; not multiplied by d; null: not computed
 *   lse      (N) float; overwritten; null: not computed
 *   probs    (N, P) of dtype, the p_j; overwritten; null: not computed
 *   correct  (N) int32; overwritten: 1 if the largest logit (the first among equals) is the target's, otherwise 0;
 *            null: not computed
 *   logits   (N, P) of dtype; columns V to P-1 are not read, and become 0 in dlogits and in probs
 *   targets  (N) int32, in 0..V-1, or options->ignore_index
 *   dlosses  (N) float, factors of the rows' gradients; null: 1
 *   status   the status word, or null. Any other target lowers it to its row; the row's loss and its V columns of
 *            dlogits become NaN, and correct 0.
 *   P        at least V, else BK_ERROR_SHAPE
 *   options  read before this returns (the divisor: when the kernel runs); null: the defaults
 *
 * A row with ignore_index has loss 0, correct 0 and dlogits 0, whatever it holds. Its lse and probs are as for any row;
 * if neither is wanted, the row is not read. A logit of -inf has probability 0. If a row holds a NaN or +inf, or only
 * -inf, its lse, loss, probs and dlogits are NaN; with a softcap, infinities become +-softcap instead. If a logit is
 * NaN, correct is 0. dlogits and probs are computed in float and rounded once to dtype. The arrays must not overlap,
 * except that dlogits may be logits. The same inputs give the same bits each time, for the same outputs. With a
 * softcap, z is exact to about softcap * 1e-7. The label smoothing term of a loss, the mean of max_i z_i - z_j over the
 * vocabulary, has a relative error of at most 1e-6 for all finite logits, also with masked ones at the type's lowest
 * number; a loss is infinite only if it is beyond float's range. N of 0: nothing to do, BK_OK. With V of 0 every target
 * but ignore_index is bad, and lse is NaN. Source: the online softmax of Milakov and Gimelshein, 2018; see
 * classifier_fused.cu. */
int bk_classifier_fused(void *dlogits, float *losses, float *lse, void *probs, int32_t *correct, const void *logits,
                        const int32_t *targets, const float *dlosses, int64_t *status, int N, int V, int P,
                        const bk_classifier_options *options, bk_dtype dtype, int version, bk_stream stream);

/* Totals over the rows that are not ignored, to compute a mean without the host: adds the number of these rows to
 * *rows, and the sum of all N losses to *total.
 *
 *   rows     one float in device memory; added to; exact up to 2^24; null: not computed
 *   total    one float in device memory; added to, rounded once per call; null: not computed
 *   targets  (N) int32; may be null without rows
 *   losses   (N) float; may be null without total
 *
 * Set both to 0 and call this with the targets of each micro-batch: `rows` is then the divisor of all their gradients.
 * Call it again with the losses when they are written: *total / *rows is their mean. A target outside the vocabulary
 * counts as a row, and its loss is NaN. The same inputs give the same bits each time. */
int bk_classifier_totals(float *rows, float *total, const int32_t *targets, const float *losses, int N,
                         int32_t ignore_index, bk_stream stream);

/* x[i] *= *factor: for gradients computed before the gradient of the loss was known, such as those of bk_lm_head_run.
 *
 *   x        (count) of dtype; products are computed in float and rounded once
 *   factor   one float in device memory. If it is 1, the kernel does not access x
 *   count    0 or more, else BK_ERROR_SHAPE */
int bk_scale(void *x, const float *factor, int64_t count, bk_dtype dtype, bk_stream stream);

/* The LM head: from hidden states X and weights W to losses and all gradients; the logits x need not be stored whole:
 *   x = X W^T (+ bias), rounded to dtype      losses, lse and dlogits of x as above      dlogits is rounded to dtype
 *   dX = dlogits W      dW += dlogits^T X      dbias += the sum of dlogits over the rows
 * A plan is made once for a shape, and can be run any number of times, by one thread at a time. */
typedef struct bk_lm_head bk_lm_head;

/* The purpose of a plan: the gradients to compute (none: forward only), and the inputs beside X and W. */
enum {
    BK_LM_HEAD_DX = 1,
    BK_LM_HEAD_DW = 2,
    BK_LM_HEAD_DBIAS = 4, /* the gradient of a bias, also if the bias itself is 0 and not given */
    BK_LM_HEAD_BIAS = 8,  /* the logits have a bias */
    BK_LM_HEAD_TF32 = 16, /* products of BK_FP32 round their inputs to TF32; no effect on other types */
    BK_LM_HEAD_FINITE = 32 /* ignored rows of X hold finite numbers, so that dW needs no copy of X */
};

/* Makes a plan. Queries cuBLASLt for algorithms, and allocates host memory and a cuBLASLt handle, so a CUDA graph
 * cannot capture it.
 *
 *   plan        receives the plan; null in case of an error
 *   N, C, V     rows, channels and vocabulary; 0 is allowed
 *   flags       BK_LM_HEAD_... flags
 *   options     for runs without options of their own; null: the defaults
 *   memory      most bytes of workspace; 0: use `share`. Versions 1 and 2 hold all logits and some MiB for cuBLASLt. A
 *               16-bit dW needs float sums: of all of dW if the logits are divided into blocks of rows or not at all,
 *               of one tile if the vocabulary is divided
 *   share       most workspace, as a share of all logits (N * P of dtype; P is V rounded up to a multiple of 8, from
 *               4096 on of 128), for instance 0.1. If a practical plan (blocks of 128 rows, tiles of 128 columns) needs
 *               more, the plan uses the least amount for that. 0: a quarter
 *   grad_dtype  of dW and dbias: dtype, or BK_FP32
 *   version     if the GEMM of version 5 cannot run, version 5 is version 4 (lm_head.cu lists the requirements)
 *   least       null, or receives the bytes that suffice with BK_ERROR_MEMORY, otherwise 0
 *
 * Errors: BK_ERROR_SHAPE, BK_ERROR_DTYPE, BK_ERROR_FLAGS, BK_ERROR_OPTIONS (also for a share that is negative, not a
 * number, or combined with memory), BK_ERROR_VERSION, BK_ERROR_MEMORY, or BK_ERROR_CUDA and more if the device or
 * cuBLASLt refuses: bk_last_message() then has cuBLASLt's message. */
int bk_lm_head_create(bk_lm_head **plan, int N, int C, int V, int flags, const bk_classifier_options *options,
                      size_t memory, double share, bk_dtype dtype, bk_dtype grad_dtype, int version, size_t *least);

/* plan may be null. No call may be using the plan. A CUDA graph with one of its runs may outlive it. */
void bk_lm_head_destroy(bk_lm_head *plan);

/* Bytes of workspace that the plan's runs need, at most its budget. */
size_t bk_lm_head_workspace_bytes(const bk_lm_head *plan);

/* The description of a plan. Later versions add fields at the end. */
typedef struct {
    const char *way;     /* "textbook", "rows", "vocabulary" or "epilogue"; must not be freed */
    int32_t version;     /* 1 or more */
    int32_t rows;        /* of a block */
    int32_t columns;     /* of a tile */
    int32_t buffers;     /* number of buffers of rows x columns logits; 0: no logits are stored */
    double share;        /* bytes, as a share of the bytes of all logits */
    size_t bytes;        /* of the workspace. Its parts, rounded up to multiples of 256: */
    size_t logits_bytes; /* all buffers */
    size_t statistics_bytes; /* of the rows; with the way "epilogue", other parts use the same memory later */
    size_t probs_bytes;  /* of version 1 */
    size_t X_bytes;      /* a copy of X in which ignored rows are 0 */
    size_t dX_bytes;     /* sums in float */
    size_t dW_bytes;     /* sums in float */
    size_t dbias_bytes;  /* sums in float, also of slices */
    size_t gemm_bytes;   /* cuBLASLt's scratch */
} bk_lm_head_description;

/* Writes the first `size` bytes of the plan's description. Pass sizeof *description, so that a program built with an
 * older header receives the fields of that header. */
int bk_lm_head_describe(const bk_lm_head *plan, bk_lm_head_description *description, size_t size);

/* Times the algorithms that cuBLASLt proposes for the plan's products, and keeps the fastest. A plan that is not tuned
 * uses cuBLASLt's first proposal. Pointers, their alignment and workspace are as for the runs. This function waits for
 * the stream, and leaves arbitrary values in dX, dW and the workspace: call it before the first run, and afterwards
 * zero dW (or write the values to which the run adds). */
int bk_lm_head_tune(bk_lm_head *plan, void *dX, void *dW, const void *X, const void *W, const void *bias,
                    void *workspace, bk_stream stream);

/* Tuning results as a blob of bytes in host memory, so that a restarted program need not tune again. A plan can restore
 * the blob of a plan that is equal in everything but its options, on the same model of GPU with the same version of
 * cuBLASLt. Any other blob, or a damaged one, is refused with BK_ERROR_TUNING and changes nothing.
 *
 * bk_lm_head_tuning_bytes: the size of the blob. bk_lm_head_save_tuning writes it; if `bytes` is less than its size, it
 * returns BK_ERROR_SHAPE. */
size_t bk_lm_head_tuning_bytes(const bk_lm_head *plan);
int bk_lm_head_save_tuning(const bk_lm_head *plan, void *blob, size_t bytes);
int bk_lm_head_restore_tuning(bk_lm_head *plan, const void *blob, size_t bytes);

/* Runs the plan.
 *
 *   dX         (N, C) of dtype; overwritten
 *   dW         (V, C) of grad_dtype; added to; may be the embedding's gradient, to which bk_encoder_backward adds its
 *              part (tied weights)
 *   dbias      (V) of grad_dtype; added to
 *   losses     (N) float; overwritten, or added to with BK_ADD_LOSSES; null: not computed
 *   lse        (N) float; overwritten; null: not computed
 *   X          (N, C) of dtype
 *   W          (V, C) of dtype; may be the embedding's table
 *   bias       (V) of dtype
 *   targets    (N) int32, in 0..V-1, or options->ignore_index
 *   dlosses    (N) float, factors of the rows' gradients; null: 1
 *   status     the status word, or null; as for bk_classifier_fused
 *   options    of this run; read before this returns (the divisor: when kernels run); null: the plan's. They must agree
 *              with the plan's in having a softcap or not and in the sign of logit_scale, else BK_ERROR_OPTIONS
 *   workspace  of bk_lm_head_workspace_bytes(), at a multiple of 256 bytes, else BK_ERROR_ALIGNMENT
 *
 * dX, dW, dbias and bias must not be null if the plan has them (else BK_ERROR_NULL), and must be null otherwise (else
 * BK_ERROR_NOT_NULL); an array without elements (C or V of 0) may be either. The arrays must not overlap. Rows with
 * ignore_index have loss 0 and contribute to no gradient, whatever X holds there (without BK_LM_HEAD_FINITE). A bad
 * target makes the loss and the row of dX NaN, and all of dW and dbias, since the row is a term of their sums.
 * Gradients are float sums of dlogits (rounded to dtype), rounded once; a 16-bit dW or dbias is the old value plus the
 * sum over all rows, rounded once. The same plan gives the same bits each time. Two runs of one plan must not be in
 * progress at the same time. N of 0: nothing to do, BK_OK. With V of 0, dX is 0. With C of 0, the logits are the bias
 * or 0. Sources: blocks of rows, Liger Kernel; statistics before gradients, Cut Cross-Entropy (Wijmans et al. 2024).
 * See lm_head.cu. */
int bk_lm_head_run(const bk_lm_head *plan, void *dX, void *dW, void *dbias, float *losses, float *lse, const void *X,
                   const void *W, const void *bias, const int32_t *targets, const float *dlosses, int64_t *status,
                   const bk_classifier_options *options, void *workspace, bk_stream stream);

#ifdef __cplusplus
}
#endif
#endif
