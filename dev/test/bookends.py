"""libbookends.so from Python, and arrays that are numpy's on the CPU device and torch's on a GPU.

The environment says what to load: BOOKENDS_BUILD (a build directory), BOOKENDS_DEVICE (cpu or cuda), SANITIZE (what it
was built with). The references in the tests are numpy float64; to_bits() and from_bits() go between that and the
element types as they lie in memory, so nothing here leans on the code under test.
"""

import collections
import contextlib
import ctypes
import json
import os
import pathlib
import subprocess

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICE = os.environ.get("BOOKENDS_DEVICE") or "cpu"
SANITIZE = os.environ.get("SANITIZE", "")
BUILD = ROOT / (os.environ.get("BOOKENDS_BUILD") or "build/" + "-".join([DEVICE, *SANITIZE.split()]))

OK, ERROR_NULL, ERROR_SHAPE, ERROR_DTYPE, ERROR_VERSION, ERROR_CUDA = 0, 1, 2, 3, 4, 1000

# ---------------------------------------------------------------------------------------------------------------------
# element types

Dtype = collections.namedtuple("Dtype", "name code bits")
FP32, FP16, BF16 = Dtype("fp32", 0, np.uint32), Dtype("fp16", 1, np.uint16), Dtype("bf16", 2, np.uint16)
DTYPES = (FP32, FP16, BF16)


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


# ---------------------------------------------------------------------------------------------------------------------
# memory

GUARD = 1 << 14  # bytes
NAN_FILL, VALUE_FILL = 0xff, 0xa5  # bytes: a NaN in each float type and the id -1; a small number that no test expects


class Array:
    """`count` elements of device memory that start `offset` elements after a multiple of 256 bytes, a guard zone on
    either side. Elements and guards hold the byte `fill` at first; with fill=None the elements are zeros that take no
    memory until they are touched (on the CPU device), and the guards hold NaN_FILL.
    """

    def __init__(self, count, item, fill=NAN_FILL, offset=0):
        self.count, self.item = count, np.dtype(item)
        self.guard_fill = NAN_FILL if fill is None else fill
        total = count * self.item.itemsize + 2 * GUARD + 512 + offset * self.item.itemsize
        if DEVICE == "cuda":
            import torch
            make = torch.zeros if fill is None else torch.empty
            self.memory = make(total, dtype=torch.uint8, device="cuda")
            address = self.memory.data_ptr()
        else:
            self.memory = (np.zeros if fill is None else np.empty)(total, np.uint8)
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
        if DEVICE == "cuda":
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
        if DEVICE == "cuda":
            import torch
            torch.cuda.synchronize()
            return self.memory[start:end].cpu().numpy()
        return self.memory[start:end].copy()


def available_bytes():
    """Device memory that may be taken."""
    if DEVICE == "cuda":
        import torch
        return torch.cuda.mem_get_info()[0]
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


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
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        _library.bk_error_string.restype = ctypes.c_char_p
        _library.bk_error_string.argtypes = [integer]
        _library.bk_encoder_forward.restype = integer
        _library.bk_encoder_forward.argtypes = [pointer] * 5 + [integer] * 6 + [pointer]
    return _library


def error_string(code):
    return library().bk_error_string(code).decode()


def encoder_forward(out, inp, wte, wpe, status, B, T, C, V, dtype, version=0, stream=None):
    """bk_encoder_forward: each of the first five is an Array or None; dtype a Dtype or a number; stream an address.
    Returns (error code, status word or None)."""
    arrays = (out, inp, wte, wpe, status)
    with forbidden([a for a in arrays if a is not None]):
        code = library().bk_encoder_forward(*[a and a.pointer for a in arrays], B, T, C, V,
                                            getattr(dtype, "code", dtype), version, stream)
    return code, None if status is None or stream is not None else int(status.get()[0])


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
