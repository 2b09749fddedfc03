"""libbookends.so from Python, and arrays that are numpy's on the CPU device and torch's on a GPU.

The environment says what to load: BOOKENDS_BUILD (a build directory), BOOKENDS_DEVICE (cpu or cuda), SANITIZE (what it
was built with). The references in the tests are numpy float64; to_bits() and from_bits() go between that and the
element types as they lie in memory, so nothing here leans on the code under test.
"""

import collections
import contextlib
import ctypes
import functools
import json
import mmap
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("BOOKENDS_DEVICE") or "cpu"
SANITIZE = os.environ.get("SANITIZE", "")
BUILD = ROOT / (os.environ.get("BOOKENDS_BUILD") or "build/" + "-".join([DEVICE, *SANITIZE.split()]))

ON_CUDA = DEVICE == "cuda"
needs_cuda = pytest.mark.skipif(not ON_CUDA, reason="needs a GPU")

OK, ERROR_NULL, ERROR_SHAPE, ERROR_DTYPE, ERROR_VERSION, ERROR_CUDA = 0, 1, 2, 3, 4, 1000
ERROR_UNSUPPORTED, ERROR_FLAGS, ERROR_OPTIONS, ERROR_MEMORY, ERROR_NOT_NULL, ERROR_ALIGNMENT = 5, 6, 7, 8, 9, 10
ERROR_TUNING = 11
OVERWRITE, STOCHASTIC, ADD_LOSSES, DISTINCT = 1, 2, 4, 8  # flags
WANT_DX, WANT_DW, WANT_DBIAS, HAS_BIAS, TF32 = 1, 2, 4, 8, 16  # those of bk_lm_head_create
INT_MIN, INT_MAX = -2**31, 2**31 - 1

# ---------------------------------------------------------------------------------------------------------------------
# element types

Dtype = collections.namedtuple("Dtype", "name code bits")
FP32, FP16, BF16 = Dtype("fp32", 0, np.uint32), Dtype("fp16", 1, np.uint16), Dtype("bf16", 2, np.uint16)
DTYPES = (FP32, FP16, BF16)
INFINITY = {FP32: 0x7f800000, FP16: 0x7c00, BF16: 0x7f80}
# The largest and the smallest, normal and not, and what is on either side of half an ulp of the largest.
SPECIAL = {
    FP32: [0x7f7fffff, 0x7f7ffffe, 0x00800000, 0x007fffff, 0x00000001, 0x73000000, 0x3f800001],
    FP16: [0x7bff, 0x7bfe, 0x4bff, 0x4c00, 0x4c01, 0x0400, 0x03ff, 0x0001, 0x3c01],  # 0x4c00: half an ulp of 0x7bff
    BF16: [0x7f7f, 0x7f7e, 0x7aff, 0x7b00, 0x7b01, 0x0080, 0x007f, 0x0001, 0x3f81],
}


def to_bits(values, dtype):
    """float64 -> the bits of dtype, rounded once, to nearest even."""
    values = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype is FP16:
            return values.astype(np.float16).view(np.uint16)
        single = values.astype(np.float32)
    bits = single.view(np.uint32)
    if dtype is FP32:
        return bits
    # bf16 by way of a float that is rounded to odd, which keeps the second rounding from undoing the first: towards
    # zero, and then the last bit says that something was cut off.
    inexact = (single.astype(np.float64) != values) & ~np.isnan(values)
    too_far = inexact & (np.abs(single.astype(np.float64)) > np.abs(values))
    bits = np.where(inexact, (bits - too_far) | 1, bits).astype(np.uint32)
    rounded = (bits + np.uint32(0x7fff) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def from_bits(bits, dtype):
    """The bits of dtype -> float64, which holds every value of each type."""
    if dtype is FP16:
        return bits.view(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return (bits if dtype is FP32 else bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def same(got, want, dtype):
    """Element by element: the same bits (so zeros' signs count), or NaN and NaN."""
    return (got == want) | (np.isnan(from_bits(got, dtype)) & np.isnan(from_bits(want, dtype)))


def special_values(dtype):
    """The bits of the specials and their negatives, zeros, ordinary numbers, infinities and NaN, signalling too."""
    sign = 1 << (8 * np.dtype(dtype.bits).itemsize - 1)
    positive = np.array([0, INFINITY[dtype], *SPECIAL[dtype], *to_bits([1.0, 0.5], dtype)], dtype.bits)
    return np.concatenate([positive, positive | dtype.bits(sign), [dtype.bits(INFINITY[dtype] | 1)],
                           to_bits([np.nan], dtype)]).astype(dtype.bits)


def random_bits(rng, shape, dtype, exponents=(-9, 9)):
    """Values of many magnitudes, so that sums need rounding at every bit."""
    return to_bits(rng.standard_normal(shape) * np.exp2(rng.integers(*exponents, shape)), dtype)


# Every remainder of the vector widths, and what lies around the powers of two that blocks and slices are made of.
CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 255, 256, 257, 264,
            511, 512, 513, 768, 769, 1600)


def random_ids(rng, B, T, V):
    return rng.integers(0, V, (B, T)).astype(np.int32)


# ---------------------------------------------------------------------------------------------------------------------
# memory

GUARD = 1 << 14  # bytes
NAN_FILL, VALUE_FILL = 0xff, 0xa5  # bytes: a NaN in each float type and the id -1; a small number that no test expects


def untouched_zeros(size):
    """Bytes that take no memory until they are touched, and may be more than there is of it."""
    mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    return np.frombuffer(mapped, np.uint8)


class Array:
    """`count` elements of device memory that start `offset` elements after a multiple of 256 bytes, a guard zone on
    either side. Elements and guards hold the byte `fill` at first; with fill=None the elements are zeros that take no
    memory until they are touched (on the CPU device), and the guards hold NaN_FILL.
    """

    def __init__(self, count, item, fill=NAN_FILL, offset=0):
        self.count, self.item = count, np.dtype(item)
        self.guard_fill = NAN_FILL if fill is None else fill
        total = count * self.item.itemsize + 2 * GUARD + 512 + offset * self.item.itemsize
        if ON_CUDA:
            import torch
            make = torch.zeros if fill is None else torch.empty
            self.memory = make(total, dtype=torch.uint8, device="cuda")
            address = self.memory.data_ptr()
        else:
            self.memory = untouched_zeros(total) if fill is None else np.empty(total, np.uint8)
            address = self.memory.ctypes.data
        self.start = -address % 256 + GUARD + offset * self.item.itemsize
        self.end = self.start + count * self.item.itemsize
        self.pointer = address + self.start
        if fill is None:
            self._fill(self.start - GUARD, self.start, NAN_FILL)
            self._fill(self.end, self.end + GUARD, NAN_FILL)
        else:
            self._fill(0, total, fill)

    def put(self, values, first=0):
        """Writes values (of the element's type) from element `first` on, and returns the array."""
        values = np.ascontiguousarray(values, self.item).reshape(-1).view(np.uint8)
        start = self.start + first * self.item.itemsize
        assert start + values.size <= self.end
        if ON_CUDA:
            import torch
            self.memory[start:start + values.size].copy_(torch.from_numpy(values))
        else:
            self.memory[start:start + values.size] = values
        return self

    def get(self, first=0, count=None):
        """`count` elements from `first` on, after everything on the device is done."""
        start = self.start + first * self.item.itemsize
        end = self.end if count is None else start + count * self.item.itemsize
        assert self.start <= start <= end <= self.end
        return self._bytes(start, end).view(self.item)

    def guards_intact(self):
        return (self._bytes(self.start - GUARD, self.start) == self.guard_fill).all() and \
               (self._bytes(self.end, self.end + GUARD) == self.guard_fill).all()

    def guards(self):
        """(address, bytes) of each."""
        return (self.pointer - GUARD, GUARD), (self.pointer + self.end - self.start, GUARD)

    def _fill(self, start, end, byte):
        self.memory[start:end] = byte

    def _bytes(self, start, end):
        synchronize()
        if ON_CUDA:
            return self.memory[start:end].cpu().numpy()
        return self.memory[start:end].copy()


def synchronize():
    """Waits for everything on the device."""
    if ON_CUDA:
        import torch
        torch.cuda.synchronize()


def available_bytes():
    """Device memory that may be taken."""
    if ON_CUDA:
        import torch
        return torch.cuda.mem_get_info()[0]
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def or_skip(needed):
    """Skips the test that runs if so many bytes of device memory are not there."""
    if available_bytes() < needed + (2 << 30):
        pytest.skip("needs %.1f GiB of device memory" % (needed / 2**30))


@contextlib.contextmanager
def forbidden(arrays):
    """Under the address sanitizer even a read of a guard zone is an error, for as long as this lasts."""
    zones = [zone for array in arrays for zone in array.guards()] if "address" in SANITIZE else []
    runtime = ctypes.CDLL(None)
    for address, size in zones:
        runtime.__asan_poison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))
    try:
        yield
    finally:
        for address, size in zones:
            runtime.__asan_unpoison_memory_region(ctypes.c_void_p(address), ctypes.c_size_t(size))


# ---------------------------------------------------------------------------------------------------------------------
# the library

_library = None


def library():
    global _library
    if _library is None:
        _library = ctypes.CDLL(str(BUILD / "libbookends.so"))
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        for name, result, *arguments in (
                ("bk_version", integer),
                ("bk_error_string", ctypes.c_char_p, integer),
                ("bk_last_message", ctypes.c_char_p),
                ("bk_encoder_forward", integer, *[pointer] * 5, *[integer] * 6, pointer),
                ("bk_encoder_backward_workspace_bytes", ctypes.c_size_t, *[integer] * 5),
                ("bk_encoder_backward", integer, *[pointer] * 6, *[integer] * 7, ctypes.c_uint64, integer, pointer),
                ("bk_embedding_lookup", integer, *[pointer] * 4, long, integer, *[long] * 2, *[integer] * 4, pointer),
                ("bk_embedding_bag", integer, *[pointer] * 5, *[long] * 2, integer, *[long] * 2, pointer,
                 *[integer] * 4, pointer),
                ("bk_embedding_bag_backward_workspace_bytes", ctypes.c_size_t, *[long] * 2, integer, long, pointer),
                ("bk_embedding_bag_backward", integer, *[pointer] * 10, *[long] * 2, integer, *[long] * 2, pointer,
                 *[integer] * 5, pointer),
                ("bk_embedding_transpose_workspace_bytes", ctypes.c_size_t, *[long] * 2),
                ("bk_embedding_transpose", integer, *[pointer] * 8, *[long] * 2, integer, pointer),
                ("bk_embedding_update_workspace_bytes", ctypes.c_size_t, long, integer, long, *[integer] * 3),
                ("bk_embedding_update", integer, *[pointer] * 5, long, integer, *[long] * 2, integer, ctypes.c_float,
                 *[integer] * 3, ctypes.c_uint64, *[integer] * 2, pointer),
                ("bk_embedding_optimizer", integer, *[pointer] * 7, long, integer, *[long] * 2, pointer,
                 *[integer] * 4, pointer),
                ("bk_classifier_fused", integer, *[pointer] * 9, *[integer] * 3, pointer, *[integer] * 2, pointer),
                ("bk_classifier_totals", integer, *[pointer] * 4, *[integer] * 2, pointer),
                ("bk_scale", integer, pointer, pointer, ctypes.c_int64, integer, pointer),
                ("bk_lm_head_create", integer, pointer, *[integer] * 4, pointer, ctypes.c_size_t, ctypes.c_double,
                 *[integer] * 3, pointer),
                ("bk_lm_head_destroy", None, pointer),
                ("bk_lm_head_workspace_bytes", ctypes.c_size_t, pointer),
                ("bk_lm_head_describe", integer, pointer, pointer, ctypes.c_size_t),
                ("bk_lm_head_tune", integer, *[pointer] * 8),
                ("bk_lm_head_tuning_bytes", ctypes.c_size_t, pointer),
                ("bk_lm_head_save_tuning", integer, pointer, pointer, ctypes.c_size_t),
                ("bk_lm_head_restore_tuning", integer, pointer, pointer, ctypes.c_size_t),
                ("bk_lm_head_run", integer, *[pointer] * 15)):
            function = getattr(_library, name)
            function.restype, function.argtypes = result, arguments
    return _library


@functools.lru_cache(maxsize=None)
def hidden(name):
    """A function of the shared library that it does not export: the CPU device's are in it."""
    table = subprocess.run(["nm", str(BUILD / "libbookends.so")], stdout=subprocess.PIPE, universal_newlines=True)
    offsets = {line.split()[2]: int(line.split()[0], 16) for line in table.stdout.splitlines()
               if len(line.split()) == 3}
    exported = ctypes.cast(library().bk_version, ctypes.c_void_p).value
    return ctypes.CFUNCTYPE(ctypes.c_int)(exported - offsets["bk_version"] + offsets[name])


@contextlib.contextmanager
def pending_error():
    """A pending CUDA error of the thread, as a failed call of the user's leaves it, in the library's CUDA runtime: the
    CPU device's. It is cleared at the end, since some functions return it."""
    pointer = ctypes.c_void_p()
    assert hidden("_Z10cudaMallocPPvm")(ctypes.byref(pointer), ctypes.c_size_t(1 << 60)) == 2
    try:
        yield
    finally:
        hidden("_Z16cudaGetLastErrorv")()


def last_message():
    return library().bk_last_message().decode()


def check_last_message(function, code, changes):
    """That the thread's last message is of this function, and names the argument (of those changed) that it refused."""
    message = last_message()
    assert message.startswith(function + ": "), message
    if code == ERROR_NULL:
        assert message in ["%s: %s is null" % (function, name) for name, value in changes.items() if value is None]
    elif code != ERROR_OPTIONS:
        kinds = {ERROR_SHAPE: "BTCVNP", ERROR_DTYPE: ("dtype", "grad_dtype"), ERROR_VERSION: ("version",)}[code]
        numbers = [str(getattr(value, "code", value)) for name, value in changes.items() if name in kinds]
        product = [str(changes.get("B", 2) * changes.get("T", 3))]
        assert set(re.findall(r"-?\d+", message)) & {*numbers, *product}, message


def error_string(code):
    return library().bk_error_string(code).decode()


def encoder_forward(out, inp, wte, wpe, status, B, T, C, V, dtype, version=0, stream=None):
    """bk_encoder_forward: each of the first five is an Array or None; dtype a Dtype or a number; stream an address.
    Returns (error code, status word or None)."""
    code = _call("bk_encoder_forward", (out, inp, wte, wpe, status), B, T, C, V, dtype, version, stream)
    return code, _word(status, stream)


def encoder_backward_workspace_bytes(B, T, C, V, version=0):
    return library().bk_encoder_backward_workspace_bytes(B, T, C, V, version)


def encoder_backward(dwte, dwpe, dout, inp, status, workspace, B, T, C, V, dtype, grad_dtype, flags=0, seed=0,
                     version=0, stream=None):
    """bk_encoder_backward, in the same way."""
    code = _call("bk_encoder_backward", (dwte, dwpe, dout, inp, status, workspace), B, T, C, V, dtype, grad_dtype,
                 flags, seed, version, stream)
    return code, _word(status, stream)


INT32, INT64 = 0, 1  # bk_index_type
SUM, MEAN, MAX = 0, 1, 2  # bk_bag_mode


def index_type(array):
    """The bk_index_type of an Array."""
    return INT64 if array is not None and array.item == np.int64 else INT32


def embedding_lookup(out, idx, table, status, N, C, rows, stride, dtype, out_dtype, version=0, stream=None):
    """bk_embedding_lookup, in the same way; the index type is that of idx."""
    code = _call("bk_embedding_lookup", (out, idx, table, status), N, C, rows, stride, dtype, out_dtype,
                 index_type(idx), version, stream)
    return code, _word(status, stream)


class BagOptions(ctypes.Structure):
    """bk_bag_options, with its defaults; offsets, weights and first_rows are Arrays."""
    _fields_ = [("mode", ctypes.c_int32), ("offset_type", ctypes.c_int32), ("offsets", ctypes.c_void_p),
                ("hotness", ctypes.c_int64), ("weights", ctypes.c_void_p), ("padding_idx", ctypes.c_int64),
                ("first_rows", ctypes.c_void_p), ("tables", ctypes.c_int32), ("reserved", ctypes.c_int32 * 5)]

    def __init__(self, mode=SUM, offsets=None, hotness=1, weights=None, padding_idx=-1, first_rows=None, tables=1):
        super().__init__(mode, index_type(offsets), offsets and offsets.pointer, hotness, weights and weights.pointer,
                         padding_idx, first_rows and first_rows.pointer, tables)
        self.keeps = offsets, weights, first_rows


def embedding_bag(out, argmax, idx, table, status, count, bags, C, rows, stride, options, dtype, out_dtype, version=0,
                  stream=None):
    """bk_embedding_bag, in the same way; options: BagOptions or None."""
    code = _call("bk_embedding_bag", (out, argmax, idx, table, status), count, bags, C, rows, stride,
                 _reference(options), dtype, out_dtype, index_type(idx), version, stream)
    return code, _word(status, stream)


def _reference(options):
    return None if options is None else ctypes.byref(options)


def embedding_bag_backward_workspace_bytes(count, bags, C, rows, options):
    return library().bk_embedding_bag_backward_workspace_bytes(count, bags, C, rows, _reference(options))


def embedding_bag_backward(dtable, indices, distinct, dweights, dout, argmax, idx, table, status, workspace, count,
                           bags, C, rows, stride, options, dtype, grad_dtype, flags=0, version=0, stream=None):
    """bk_embedding_bag_backward, in the same way."""
    arrays = (dtable, indices, distinct, dweights, dout, argmax, idx, table, status, workspace)
    code = _call("bk_embedding_bag_backward", arrays, count, bags, C, rows, stride, _reference(options), dtype,
                 grad_dtype, flags, index_type(idx), version, stream)
    return code, _word(status, stream)


def embedding_transpose_workspace_bytes(count, rows):
    return library().bk_embedding_transpose_workspace_bytes(count, rows)


def embedding_transpose(indices, begin, positions, group, distinct, idx, status, workspace, count, rows, stream=None):
    """bk_embedding_transpose, in the same way."""
    code = _call("bk_embedding_transpose", (indices, begin, positions, group, distinct, idx, status, workspace), count,
                 rows, index_type(idx), stream)
    return code, _word(status, stream)


OVERWRITE_ROWS, ACCUMULATE = 0, 1  # bk_update_op


def embedding_update_workspace_bytes(count, C, rows, op, flags=0, version=0):
    return library().bk_embedding_update_workspace_bytes(count, C, rows, op, flags, version)


def embedding_update(table, idx, values, status, workspace, count, C, rows, stride, op, dtype, value_dtype, scale=1.0,
                     flags=0, seed=0, version=0, stream=None):
    """bk_embedding_update, in the same way."""
    code = _call("bk_embedding_update", (table, idx, values, status, workspace), count, C, rows, stride, op, scale,
                 dtype, value_dtype, flags, seed, index_type(idx), version, stream)
    return code, _word(status, stream)


SGD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM = 0, 1, 2, 3  # bk_optimizer_kind


class OptimizerOptions(ctypes.Structure):
    """bk_optimizer_options, with its defaults; device_step is an Array."""
    _fields_ = [("kind", ctypes.c_int32), ("flags", ctypes.c_int32),
                *[(name, ctypes.c_float) for name in ("learning_rate", "eps", "weight_decay")],
                ("beta1", ctypes.c_double), ("beta2", ctypes.c_double), ("step", ctypes.c_int64),
                ("device_step", ctypes.c_void_p), ("seed", ctypes.c_uint64), ("reserved", ctypes.c_int32 * 6)]

    def __init__(self, kind=SGD, flags=0, learning_rate=0.01, eps=1e-8, weight_decay=0, beta1=0.9, beta2=0.999, step=1,
                 device_step=None, seed=0):
        super().__init__(kind, flags, learning_rate, eps, weight_decay, beta1, beta2, step,
                         device_step and device_step.pointer, seed)
        self.keeps = device_step


def embedding_optimizer(table, first, second, idx, gradients, device_count, status, count, C, rows, stride, options,
                        dtype, grad_dtype, version=0, stream=None):
    """bk_embedding_optimizer, in the same way; options: OptimizerOptions or None."""
    code = _call("bk_embedding_optimizer", (table, first, second, idx, gradients, device_count, status), count, C, rows,
                 stride, _reference(options), dtype, grad_dtype, index_type(idx), version, stream)
    return code, _word(status, stream)


class ClassifierOptions(ctypes.Structure):
    """bk_classifier_options, with its defaults."""
    _fields_ = [*[(name, ctypes.c_float) for name in ("dloss", "logit_scale", "softcap", "label_smoothing", "z_loss")],
                ("ignore_index", ctypes.c_int32), ("divisor", ctypes.c_void_p), ("flags", ctypes.c_int32),
                ("reserved", ctypes.c_int32 * 7)]

    def __init__(self, dloss=1, logit_scale=1, softcap=0, label_smoothing=0, z_loss=0, ignore_index=-100, divisor=None,
                 flags=0):
        """divisor: an Array."""
        super().__init__(dloss, logit_scale, softcap, label_smoothing, z_loss, ignore_index,
                         divisor and divisor.pointer, flags)
        self.keeps = divisor


def classifier_fused(dlogits, losses, lse, probs, correct, logits, targets, dlosses, status, N, V, P, options, dtype,
                     version=0, stream=None):
    """bk_classifier_fused, in the same way; options: ClassifierOptions or None."""
    code = _call("bk_classifier_fused", (dlogits, losses, lse, probs, correct, logits, targets, dlosses, status), N, V,
                 P, None if options is None else ctypes.byref(options), dtype, version, stream)
    return code, _word(status, stream)


def classifier_totals(rows, total, targets, losses, N, ignore_index=-100, stream=None):
    return _call("bk_classifier_totals", (rows, total, targets, losses), N, ignore_index, stream)


def scale(x, factor, count, dtype, stream=None):
    return _call("bk_scale", (x, factor), count, dtype, stream)


def lm_head_create(N, C, V, flags, options, memory, dtype, grad_dtype, version=0, share=0.0, least=None):
    """bk_lm_head_create: (error code, plan or None); least: a c_size_t."""
    plan = ctypes.c_void_p(1)
    code = library().bk_lm_head_create(ctypes.byref(plan), N, C, V, flags,
                                       None if options is None else ctypes.byref(options), memory, share,
                                       *[getattr(argument, "code", argument) for argument in (dtype, grad_dtype)],
                                       version, None if least is None else ctypes.byref(least))
    return code, plan.value


class LmHeadDescription(ctypes.Structure):
    """bk_lm_head_description."""
    _fields_ = [("way", ctypes.c_char_p),
                *[(name, ctypes.c_int32) for name in ("version", "rows", "columns", "buffers")],
                ("share", ctypes.c_double),
                *[(name, ctypes.c_size_t) for name in ("bytes", "logits_bytes", "statistics_bytes", "probs_bytes",
                                                       "X_bytes", "dX_bytes", "dW_bytes", "dbias_bytes", "gemm_bytes")]]


def lm_head_describe(plan):
    description = LmHeadDescription()
    assert library().bk_lm_head_describe(plan, ctypes.byref(description), ctypes.sizeof(description)) == OK
    return description


def lm_head_save_tuning(plan):
    """The blob, as bytes."""
    blob = ctypes.create_string_buffer(library().bk_lm_head_tuning_bytes(plan))
    assert library().bk_lm_head_save_tuning(plan, blob, len(blob)) == OK
    return blob.raw


def lm_head_restore_tuning(plan, blob):
    return library().bk_lm_head_restore_tuning(plan, blob, len(blob))


def lm_head_run(plan, dX, dW, dbias, losses, lse, X, W, bias, targets, dlosses, status, workspace, stream=None,
                options=None):
    """bk_lm_head_run, in the same way as the others; workspace may be an address; options: ClassifierOptions."""
    arrays = (dX, dW, dbias, losses, lse, X, W, bias, targets, dlosses, status, workspace)
    with forbidden([array for array in arrays if isinstance(array, Array)]):
        *pointers, last = [getattr(array, "pointer", array) for array in arrays]
        code = library().bk_lm_head_run(plan, *pointers, None if options is None else ctypes.byref(options), last,
                                        stream)
    return code, _word(status, stream)


def lm_head_tune(plan, dX, dW, X, W, bias, workspace, stream=None):
    with forbidden([array for array in (dX, dW, X, W, bias, workspace) if array is not None]):
        return library().bk_lm_head_tune(plan, *[array and array.pointer for array in (dX, dW, X, W, bias, workspace)],
                                         stream)


def _call(name, arrays, *arguments):
    with forbidden([array for array in arrays if array is not None]):
        return getattr(library(), name)(*[array and array.pointer for array in arrays],
                                        *[getattr(argument, "code", argument) for argument in arguments])


def _word(status, stream):
    return None if status is None or stream is not None else int(status.get()[0])


def status_array(value=-1):
    return Array(1, np.int64).put([value])


# ---------------------------------------------------------------------------------------------------------------------
# the programs

def run(program, *arguments, timeout=300, **options):
    """A program of the build directory as a user runs it; stdout and stderr are text."""
    command = [str(BUILD / program), *map(str, arguments)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
                          timeout=timeout, **options)


def versions(program):
    """The numbers that --list shows; none if it is not built (test_command_line.py then fails)."""
    if not (BUILD / program).exists():
        return []
    return [json.loads(line)["version"] for line in run(program, "--list", "--json", "-").stdout.splitlines()]
