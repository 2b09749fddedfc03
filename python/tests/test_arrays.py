"""Arrays of numpy and of any library with DLPack, as arguments and as outputs; what is refused and how."""

import ctypes

import numpy as np
import pytest

import bookends
from bookends import _library

ON_CPU = _library.build()["device"] == "cpu"
pytestmark = pytest.mark.skipif(not ON_CPU, reason="numpy arrays need the CPU device's library")

rng = np.random.default_rng(1)
WTE = rng.standard_normal((11, 6)).astype(np.float32)
WPE = rng.standard_normal((4, 6)).astype(np.float32)
INP = rng.integers(0, 11, (3, 4)).astype(np.int32)
WANT = WTE[INP] + WPE


class OnlyDLPack:
    """An array that has nothing but DLPack, of the version before 1.0 if `old`."""

    def __init__(self, array, old=False):
        self.array, self.old = array, old

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments):
        if self.old:
            if arguments:
                raise TypeError("unexpected keyword argument 'max_version'")
            return self.array.__dlpack__()
        return self.array.__dlpack__(**arguments)


class OnlyInterface:
    """An array that has nothing but numpy's array interface."""

    def __init__(self, array):
        self.array = array
        self.__array_interface__ = array.__array_interface__


class Elsewhere(OnlyDLPack):
    def __dlpack_device__(self):
        return (10, 0)  # ROCm


@pytest.mark.parametrize("wrap", [lambda a: a, OnlyDLPack, lambda a: OnlyDLPack(a, old=True), OnlyInterface],
                         ids=["numpy", "dlpack", "old dlpack", "interface"])
def test_arrays_of_any_library(wrap):
    out = bookends.encoder_forward(wrap(INP), wrap(WTE), wrap(WPE))
    assert isinstance(out, np.ndarray) and out.dtype == np.float32 and (out == WANT).all()
    given = np.empty_like(WANT)
    target = wrap(given)
    assert bookends.encoder_forward(wrap(INP), wrap(WTE), wrap(WPE), out=target) is target
    assert (given == WANT).all()


def test_float16_and_bfloat16():
    half = bookends.encoder_forward(INP, WTE.astype(np.float16), WPE.astype(np.float16))
    want = WTE.astype(np.float16)[INP].astype(np.float64) + WPE.astype(np.float16)
    assert half.dtype == np.float16 and (half == want.astype(np.float16)).all()


def test_bfloat16_of_numpy():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    out = bookends.encoder_forward(INP, WTE.astype(bfloat16))
    assert out.dtype == bfloat16 and (out == WTE.astype(bfloat16)[INP]).all()


def test_bfloat16_by_dlpack():
    """A capsule of bfloat16 made here: numpy has no such type."""
    class DLManaged(ctypes.Structure):
        from bookends._arrays import DLTensor
        _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]

    bits = (WTE.view(np.uint32) >> 16).astype(np.uint16)

    class Bfloat16:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self):
            self.shape = (ctypes.c_int64 * 2)(*bits.shape)
            self.managed = DLManaged()
            tensor = self.managed.tensor
            tensor.data, tensor.device_type, tensor.ndim, tensor.code = bits.ctypes.data, 1, 2, 4
            tensor.bits, tensor.lanes, tensor.shape = 16, 1, ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
            new = ctypes.pythonapi.PyCapsule_New
            new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
            return new(ctypes.addressof(self.managed), b"dltensor", None)

    out = bookends.embedding_lookup(INP, Bfloat16(), out_dtype="float32")
    assert (out == (bits.astype(np.uint32) << 16).view(np.float32)[INP]).all()
    with pytest.raises(TypeError, match="wpe: expected bfloat16, given float32"):
        bookends.encoder_forward(INP, Bfloat16(), WPE)


def test_empty_arrays():
    assert bookends.encoder_forward(INP[:0], WTE).shape == (0, 4, 6)
    assert bookends.encoder_forward(INP, WTE[:, :0]).shape == (3, 4, 0)
    assert np.isnan(bookends.encoder_forward(INP, WTE[:0])).all()
    assert bookends.embedding_lookup(np.zeros((0, 2), np.int64), WTE).shape == (0, 2, 6)


READ_ONLY = np.empty_like(WANT)
READ_ONLY.flags.writeable = False
UNALIGNED = np.frombuffer(bytearray(WTE.nbytes + 1), np.uint8)[1:].view(np.float32).reshape(WTE.shape)


@pytest.mark.parametrize("changes, error, words", [
    (dict(inp=INP.astype(np.int64)), TypeError, "inp: expected int32, given int64"),
    (dict(inp=INP.astype(np.float32)), TypeError, "inp: expected int32, given float32"),
    (dict(inp=INP[0]), ValueError, r"inp: expected shape \(B, T\) = \(any, any\), given \(4,\)"),
    (dict(inp=INP.T), ValueError, r"inp: expected a contiguous \(row-major\) array, given strides \(1, 4\)"),
    (dict(inp=[[1, 2]]), TypeError, "inp: expected an array with DLPack or an array interface, given list"),
    (dict(inp=None), TypeError, "inp: expected an array .* given NoneType"),
    (dict(inp=Elsewhere(INP)), ValueError, "inp: expected an array in memory of the CPU .* given one on .* type 10"),
    (dict(wte=WTE.astype(np.float64)), TypeError, "wte: expected float32 or float16 or bfloat16, given float64"),
    (dict(wte=WTE.astype(">f4")), TypeError, "wte: expected .* given >f4"),
    (dict(wte=np.asfortranarray(WTE)), ValueError, "wte: expected a contiguous"),
    (dict(wte=WTE[::2]), ValueError, r"wte: expected a contiguous \(row-major\) array, given strides \(12, 1\)"),
    (dict(wte=UNALIGNED), ValueError, "wte: expected memory aligned to its elements of 4 bytes, given address 0x"),
    (dict(wpe=WPE.astype(np.float16)), TypeError, "wpe: expected float32, given float16"),
    (dict(wpe=WPE[:3].copy()), ValueError, r"wpe: expected shape \(T, C\) = \(4, 6\), given \(3, 6\)"),
    (dict(out=READ_ONLY), ValueError, "out: expected a writable array, given a read-only one"),
    (dict(out=np.empty((3, 4, 5), np.float32)), ValueError, r"out: expected shape \(B, T, C\) = \(3, 4, 6\), given"),
    (dict(out=np.empty((3, 4, 6), np.float16)), TypeError, "out: expected float32, given float16"),
    (dict(version=77), bookends.ArgumentError, "bk_encoder_forward: there is no version 77"),
    (dict(version=2**32), ValueError, "version: expected an int from -2147483648 to 2147483647, given 4294967296"),
    (dict(version="5"), TypeError, "version: expected an int, given '5'"),
    (dict(status=np.zeros(1, np.int64)), TypeError, "status: expected a bookends.Status, given ndarray"),
    (dict(stream="main"), TypeError, "stream: expected an int or a stream of torch or cupy, given str"),
])
def test_wrong_arguments(changes, error, words):
    arguments = dict(inp=INP, wte=WTE, wpe=WPE)
    with pytest.raises(error, match=words):
        bookends.encoder_forward(**{**arguments, **changes})


def test_status():
    status = bookends.Status()
    assert status.position is None and repr(status) == "Status(position=None)"
    bookends.encoder_forward(INP, WTE, status=status)
    assert status.position is None
    status.raise_if_bad()
    bad = INP.copy()
    bad[1, 2] = -1
    bad[2, 0] = 11
    out = bookends.encoder_forward(bad, WTE, status=status)
    assert status.position == 6 and np.isnan(out[1, 2]).all() and np.isnan(out).sum() == 12
    bookends.encoder_forward(INP, WTE, status=status)
    assert status.position == 6
    with pytest.raises(bookends.BadIdError, match="ids: the value at position 6 is out of range"):
        status.raise_if_bad()
    status.reset()
    assert status.position is None


def test_check():
    bad = INP.copy()
    bad[1, 2] = -1
    assert (bookends.encoder_forward(INP, WTE, check=True) == WTE[INP]).all()
    with pytest.raises(IndexError, match=r"inp\[1, 2\] is -1: expected 0..10") as caught:
        bookends.encoder_forward(bad, WTE, check=True)
    assert caught.value.position == 6 and caught.value.argument == "inp"
    with pytest.raises(IndexError, match=r"inp\[1, 2\] is -1"):
        bookends.encoder_backward(WANT, bad, True, V=11, check=True)
    with pytest.raises(IndexError, match=r"idx\[1, 2\] is 8589934592: expected 0..10"):
        bookends.embedding_lookup(np.where(bad < 0, 2**33, bad.astype(np.int64)), WTE, check=True)
    with pytest.raises(IndexError, match=r"idx\[2, 1\] is 11: expected 0..10"):
        bookends.embedding_bag(np.array([[0, 1], [2, 3], [4, 11]]), WTE, check=True)
    with pytest.raises(IndexError, match=r"targets\[2\] is 6: expected 0..5 or ignore_index, -100"):
        bookends.classifier_fused(WTE, np.array([0, -100, 6] + [1] * 8, np.int32), check=True)
    with pytest.raises(IndexError, match=r"targets\[3\] is 11: expected 0..10"):
        bookends.LmHead(4, 6, 11, dtype="float32").run(WPE, WTE, np.array([0, 1, 10, 11], np.int32), check=True)
