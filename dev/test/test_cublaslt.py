"""The CPU device's cuBLASLt, called as lm_head.cu calls it: products against numpy, and what it refuses."""

import ctypes
import itertools
import os

import numpy as np
import pytest

import bookends
from bookends import BF16, DTYPES, FP16, FP32, Array, from_bits, to_bits

pytestmark = pytest.mark.skipif(bookends.DEVICE == "cuda", reason="of the CPU device")

CODES = {FP32: 0, FP16: 2, BF16: 14}
COMPUTE_32F, TRANSA, TRANSB, EPILOGUE, BIAS_POINTER, BIAS = 68, 3, 4, 7, 8, 4
MAX_WORKSPACE, ALIGNMENT_A, ALIGNMENT_D = 1, 5, 8
SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 7, 15


def made(create, *arguments, status=SUCCESS):
    handle = ctypes.c_void_p()
    assert bookends.hidden(create)(ctypes.byref(handle), *arguments) == status
    return handle


class Product:
    """D (m, n) = alpha A (m, k) B (k, n) + beta C (+ bias), column-major, with `more` rows of memory than they have."""

    def __init__(self, m, n, k, dtype, result, transposed=(False, False), bias=False, more=0, align=1):
        self.dtype, self.result, self.more = dtype, result, more
        long = ctypes.c_int64
        self.handle = made("cublasLtCreate")
        self.desc = made("cublasLtMatmulDescCreate", COMPUTE_32F, CODES[FP32])
        for attribute, value in ((TRANSA, transposed[0]), (TRANSB, transposed[1]), (EPILOGUE, BIAS if bias else 1)):
            self.set("cublasLtMatmulDescSetAttribute", self.desc, attribute, ctypes.c_int32(value))
        self.shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n), (m, n)]
        self.layouts = [made("cublasLtMatrixLayoutCreate", CODES[kind], long(rows), long(cols), long(rows + more))
                        for (rows, cols), kind in zip(self.shapes, (dtype, dtype, result))]
        self.preference = made("cublasLtMatmulPreferenceCreate")
        self.set("cublasLtMatmulPreferenceSetAttribute", self.preference, MAX_WORKSPACE, ctypes.c_uint64(4096))
        for attribute in range(ALIGNMENT_A, ALIGNMENT_D + 1):
            self.set("cublasLtMatmulPreferenceSetAttribute", self.preference, attribute, ctypes.c_uint32(align))

    @staticmethod
    def set(function, handle, attribute, value):
        assert bookends.hidden(function)(handle, attribute, ctypes.byref(value),
                                            ctypes.c_size_t(ctypes.sizeof(value))) == SUCCESS

    def algorithms(self):
        a, b, d = self.layouts
        results, found = (ctypes.c_uint64 * 10 * 4)(), ctypes.c_int()
        heuristic = bookends.hidden("cublasLtMatmulAlgoGetHeuristic")
        status = heuristic(self.handle, self.desc, a, b, d, d, self.preference, 4, results, ctypes.byref(found))
        assert status == SUCCESS and found.value == 2
        return results[:found.value]

    def memory(self, which, offset=0):
        (rows, cols), kind = self.shapes[which], self.result if which == 2 else self.dtype
        return Array((rows + self.more) * cols, kind.bits, offset=offset)

    def run(self, A, B, D, algorithm, alpha=1.0, beta=0.0, bias=None, workspace=4096):
        if bias is not None:
            self.set("cublasLtMatmulDescSetAttribute", self.desc, BIAS_POINTER, ctypes.c_void_p(bias.pointer))
        a, b, d = self.layouts
        scratch = Array(workspace, np.uint8)
        status = bookends.hidden("cublasLtMatmul")(
            self.handle, self.desc, ctypes.byref(ctypes.c_float(alpha)), ctypes.c_void_p(A.pointer), a,
            ctypes.c_void_p(B.pointer), b, ctypes.byref(ctypes.c_float(beta)), ctypes.c_void_p(D.pointer), d,
            ctypes.c_void_p(D.pointer), d, algorithm, ctypes.c_void_p(scratch.pointer), ctypes.c_size_t(workspace),
            None)
        assert A.guards_intact() and B.guards_intact() and D.guards_intact() and scratch.guards_intact()
        return status


TYPES = [(FP32, FP32), (FP16, FP16), (FP16, FP32), (BF16, BF16), (BF16, FP32)]


@pytest.mark.parametrize("dtype, result", TYPES, ids=lambda d: d.name)
def test_products(dtype, result):
    """Whole numbers, whose sums are exact: every bit is right, and what lies between the columns is left alone."""
    rng = np.random.default_rng(1)
    for (m, n, k), transposed, more, bias in itertools.product(
            ((1, 1, 1), (3, 200, 5), (300, 2, 7), (130, 70, 520)), itertools.product((False, True), repeat=2), (0, 3),
            (False, True)):
        product = Product(m, n, k, dtype, result, transposed, bias, more)
        numbers = [rng.integers(-2, 3, shape).astype(np.float64) for shape in product.shapes]
        offsets = rng.integers(-3, 4, m).astype(np.float64)
        for algorithm, beta in itertools.product(product.algorithms(), (0.0, 2.0)):
            arrays = [product.memory(which) for which in range(3)]
            for array, values, kind in zip(arrays, numbers, (dtype, dtype, result)):
                rows = np.full((values.shape[1], values.shape[0] + more), to_bits(np.nan, kind), kind.bits)
                rows[:, :values.shape[0]] = to_bits(values.T, kind)
                array.put(rows)
            if beta == 0:
                arrays[2].put(np.full(n * (m + more), to_bits(np.nan, result)))
            added = Array(m, result.bits).put(to_bits(offsets, result)) if bias else None
            assert product.run(*arrays, algorithm, 0.5, beta, added) == SUCCESS
            A, B = (values.T if flip else values for values, flip in zip(numbers, transposed))
            want = 0.5 * (A @ B) + (offsets[:, None] if bias else 0) + (beta * numbers[2] if beta else 0)
            got = arrays[2].get().reshape(n, m + more).T
            assert (got[:m] == to_bits(want, result)).all(), (m, n, k, transposed, more, bias, beta)
            assert np.isnan(from_bits(got[m:], result)).all()


def test_alignment_is_what_was_promised():
    for dtype in DTYPES:
        product = Product(8, 8, 8, dtype, dtype, align=16)
        promised, any_ = product.algorithms()
        for which in range(3):
            arrays = [product.memory(other, offset=other == which) for other in range(3)]
            assert product.run(*arrays, promised) == INVALID_VALUE
            assert product.run(*arrays, any_) == SUCCESS


def test_a_workspace_is_what_was_promised():
    product = Product(8, 8, 8, FP32, FP32)
    needs, needs_none = product.algorithms()
    arrays = [product.memory(which) for which in range(3)]
    assert product.run(*arrays, needs, workspace=16) == INVALID_VALUE
    assert product.run(*arrays, needs_none, workspace=0) == SUCCESS


def test_an_algorithm_for_other_matrices():
    """What is named for the one may do for the other: that says the check."""
    for dtype, (m, n, k), want in ((BF16, (8, 5, 7), SUCCESS), (BF16, (7, 8, 7), NOT_SUPPORTED),
                                   (FP16, (8, 5, 8), NOT_SUPPORTED), (FP32, (8, 8, 7), NOT_SUPPORTED),
                                   (FP32, (8, 8, 8), SUCCESS)):
        proposed, product = Product(8, 8, 8, dtype, FP32).algorithms(), Product(m, n, k, dtype, FP32)
        for algorithm in [*proposed, *product.algorithms()]:
            result, of_others = (ctypes.c_uint64 * 10)(), any(algorithm is one for one in proposed)
            a, b, d = product.layouts
            assert bookends.hidden("cublasLtMatmulAlgoCheck")(product.handle, product.desc, a, b, d, d, algorithm,
                                                     result) == (want if of_others else SUCCESS)
            assert result[8] == (algorithm[8] if want == SUCCESS or not of_others else 0)  # bytes of workspace
    wrong = Product(9, 8, 8, FP32, FP32).layouts[2]
    assert bookends.hidden("cublasLtMatmulAlgoCheck")(product.handle, product.desc, a, b, wrong, wrong, algorithm,
                                             result) == INVALID_VALUE


def test_what_does_not_fit_is_refused():
    long, layout = ctypes.c_int64, "cublasLtMatrixLayoutCreate"
    made("cublasLtMatmulDescCreate", 64, 0, status=NOT_SUPPORTED)  # sums in fp16
    for rows, cols, ld in ((0, 3, 3), (3, 0, 3), (3, 3, 2)):
        made(layout, 0, long(rows), long(cols), long(ld), status=INVALID_VALUE)
    made(layout, 1, long(3), long(3), long(3), status=INVALID_VALUE)
    product, other = Product(4, 5, 6, FP32, FP32), Product(4, 7, 6, FP16, FP16)
    results, found = (ctypes.c_uint64 * 10 * 4)(), ctypes.c_int()
    a, b, d = product.layouts
    for wrong in ((b, a, d), (a, b, other.layouts[2]), (a, other.layouts[1], d)):
        assert bookends.hidden("cublasLtMatmulAlgoGetHeuristic")(product.handle, product.desc, *wrong, wrong[2],
                                                        product.preference, 4, results, ctypes.byref(found)) in \
            (INVALID_VALUE, NOT_SUPPORTED)


@pytest.mark.parametrize("name, why", [("/nowhere/libblas.so", "/nowhere/libblas.so"), ("libm.so.6", "sgemm_")])
def test_a_blas_that_will_not_do_is_reported(name, why):
    """Once, however many products; the loops make them then."""
    result = bookends.run("lm_head", "all", "-b", 2, "-t", 8, "-c", 24, "-v", 300, "--check",
                          env={**os.environ, "BOOKENDS_BLAS": name})
    assert result.returncode == 0 and result.stdout.count(": ok") == len(bookends.versions("lm_head")), result
    line, = result.stderr.splitlines()
    assert line.startswith("BOOKENDS_BLAS: ") and why in line and "loops" in line
    result = bookends.run("lm_head", "--list", env={**os.environ, "BOOKENDS_BLAS": name})
    assert (result.returncode, result.stderr) == (0, "")
