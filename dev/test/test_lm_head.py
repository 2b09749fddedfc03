"""lm_head, every version and type, through the library and against numpy float64.

A logit is a float sum rounded to its type: where the exact sum lies close to the middle between two numbers, it may be
either. What that does to losses and gradients, and what float sums may be off, is worked out for each element; a result
may be anything between the roundings of the exact one less and plus that.

The CPU device takes some 100 ns a logit: the matrices are small, and cut into blocks and tiles by small budgets.
"""

import contextlib
import functools
import itertools
import json
import os
import re

import numpy as np
import pytest

import bookends
from bookends import (Array, BF16, DTYPES, FP16, FP32, HAS_BIAS, INT_MAX, NAN_FILL, OK, ON_CUDA, TF32, VALUE_FILL,
                      WANT_DBIAS, WANT_DW, WANT_DX, ClassifierOptions, from_bits, needs_cuda, status_array,
                      to_bits)
from test_classifier_fused import Reference as Classifier
from test_classifier_fused import off as outside

VERSIONS = bookends.versions("lm_head")
BOUNDED = VERSIONS[2:]  # those that a budget cuts into pieces
IGNORE, U = -100, 2.0**-24
LARGEST = {FP32: 3.4e38, FP16: 65504.0, BF16: 3.38e38}
EVERYTHING = WANT_DX | WANT_DW | WANT_DBIAS | HAS_BIAS

every_version = pytest.mark.parametrize("version", VERSIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
GRADS = [(FP32, FP32), (FP16, FP16), (FP16, FP32), (BF16, BF16), (BF16, FP32)]
every_grad = pytest.mark.parametrize("dtype, grad", GRADS, ids=lambda d: d.name)


# ---------------------------------------------------------------------------------------------------------------------
# the reference

def rounded(values, dtype):
    return from_bits(to_bits(values, dtype), dtype)


def around(values, off, dtype):
    """The values rounded to dtype, and how far those may be off that are off by so much before."""
    nearest = rounded(values, dtype)
    with np.errstate(invalid="ignore"):
        apart = np.maximum(rounded(values + off, dtype) - nearest, nearest - rounded(values - off, dtype))
    return nearest, np.where(np.isnan(apart), 0, apart)


def of_sum(count, size, everything):
    """What a float sum of so many terms may be off, in any order; size: the root of its squares."""
    return U * (count / 8 + 8 * np.sqrt(count) + 16) * np.minimum(4 * size, everything)


def product(A, B, slack):
    """A B in float64, and how far the float one may be off, with A off by slack."""
    size, everything = np.sqrt((A**2) @ (B**2)), np.abs(A) @ np.abs(B)
    return A @ B, slack @ np.abs(B) + of_sum(A.shape[1], size, everything)


class Reference:
    def __init__(self, dtype, X, W, bias, targets, options, dlosses):
        o, (N, C), V = options, X.shape, len(W)
        with np.errstate(all="ignore"):
            exact = X @ W.T + (0 if bias is None else bias)
            size = np.sqrt((X**2) @ (W**2).T + (0 if bias is None else bias**2))
            logits, moved = around(exact, of_sum(C, size, np.inf), dtype)
            moved = moved * abs(float(o.logit_scale))  # of z; a softcap makes it no larger
            classifier = Classifier(logits, targets, o, dlosses)
            p, slack = classifier.exact["probs"], classifier.slack
            e, z_loss, eps, cap = np.expm1(moved), abs(float(o.z_loss)), float(o.label_smoothing), float(o.softcap)
            of_lse = 1.2 * (p * e).sum(1)
            lse, losses, d = (classifier.exact[name] for name in ("lse", "losses", "dlogits"))
            t = np.clip(targets, 0, max(V - 1, 0))
            at_target = moved[np.arange(N), t] if V else np.zeros(N)
            of_loss = of_lse + (1 - eps) * at_target + eps * (moved.mean(1) if V else 0) + \
                2 * z_loss * np.abs(lse) * of_lse
            unit = np.abs(float(o.dloss) * float(o.logit_scale) * (np.ones(N) if dlosses is None else dlosses))
            factor = np.abs(1 + 2 * float(o.z_loss) * lse) if z_loss else np.ones(N)
            of_d = unit[:, None] * p * (factor[:, None] * (e + of_lse[:, None]) + (2 * z_loss * of_lse)[:, None])
            steeper = 1 + (np.expm1(2 * moved / cap) if cap else 0)
            of_d = steeper * (of_d + slack["dlogits"]) + np.abs(d) * (steeper - 1)
            known = np.isfinite(d)
            dlogits, of_dlogits = around(d, np.where(known, of_d, 0), dtype)
            of_dlogits[targets == o.ignore_index] = 0
            self.exact = dict(losses=losses, lse=lse)
            self.slack = dict(losses=slack["losses"] + np.where(np.isfinite(losses), of_loss, 0),
                              lse=slack["lse"] + np.where(np.isfinite(of_lse), of_lse, 0))
            for name, A, B, off in (("dX", dlogits, W, of_dlogits), ("dW", dlogits.T, X, of_dlogits.T),
                                    ("dbias", dlogits.T, np.ones((N, 1)), of_dlogits.T)):
                self.exact[name], self.slack[name] = product(A, B, off)
            self.exact["dbias"], self.slack["dbias"] = self.exact["dbias"][:, 0], self.slack["dbias"][:, 0]
        for name, values in self.slack.items():
            self.slack[name] = np.where(np.isfinite(values), values, 0)


# ---------------------------------------------------------------------------------------------------------------------
# cases

@contextlib.contextmanager
def plan_for(N, C, V, flags, options, memory, dtype, grad, version):
    code, plan = bookends.lm_head_create(N, C, V, flags, options, memory, dtype, grad, version)
    assert code == OK, (bookends.error_string(code), N, C, V, flags, memory, dtype.name, grad.name, version)
    try:
        yield plan
    finally:
        bookends.library().bk_lm_head_destroy(plan)


@functools.lru_cache(maxsize=None)
def least_memory(N, C, V, flags, dtype, grad, version):
    """The smallest budget, or nearly, that the version accepts."""
    bad, good = 0, 1 << 24
    while good - bad > 64:
        middle = (bad + good) // 2
        code, plan = bookends.lm_head_create(N, C, V, flags, None, middle, dtype, grad, version)
        assert code in (OK, bookends.ERROR_MEMORY)
        if code == OK:
            bookends.library().bk_lm_head_destroy(plan)
            good = middle
        else:
            bad = middle
    return good


class Case:
    """offset: by how many elements each array but the workspace is off a multiple of 256 bytes."""

    def __init__(self, dtype, grad, N, C, V, seed=0, bias=True, targets=None, dlosses=False, spread=2.0, offset=0,
                 X=None, **options):
        rng = np.random.default_rng([seed, N, C, V])
        self.dtype, self.grad, self.shape, self.offset = dtype, grad, (N, C, V), offset
        self.options = ClassifierOptions(**options)
        X = rng.standard_normal((N, C)) if X is None else X
        self.bits = dict(X=to_bits(X, dtype), W=to_bits(rng.standard_normal((V, C)) * spread / max(C, 1)**0.5, dtype))
        if bias:
            self.bits["bias"] = to_bits(rng.standard_normal(V), dtype)
        targets = rng.integers(0, max(V, 1), N) if targets is None else targets
        self.targets = np.asarray(targets, np.int32).reshape(N)
        self.dlosses = rng.choice([1, 0.5, -2, 0.25], N).astype(np.float32) if dlosses else None
        self.initial = dict(dW=to_bits(rng.standard_normal((V, C)), grad), dbias=to_bits(rng.standard_normal(V), grad))
        values = {name: from_bits(bits, dtype) for name, bits in self.bits.items()}
        self.reference = Reference(dtype, values["X"], values["W"], values.get("bias"), self.targets, self.options,
                                   self.dlosses)
        self.what = "%s/%s %s %s" % (dtype.name, grad.name, self.shape, options)

    def flags(self, wanted):
        has = HAS_BIAS if "bias" in self.bits else 0
        return has | sum(flag for name, flag in (("dX", WANT_DX), ("dW", WANT_DW), ("dbias", WANT_DBIAS))
                         if name in wanted)

    def plan(self, version, memory=0, wanted=("dX", "dW", "dbias"), more=0):
        N, C, V = self.shape
        return plan_for(N, C, V, self.flags(wanted) | more, self.options, memory, self.dtype, self.grad, version)

    def run(self, version, memory=0, wanted=("dX", "dW", "dbias", "losses", "lse"), calls=1, tune=False, fill=NAN_FILL,
            more=0):
        """{name: array as it is in memory}, of so many calls in a row; what may not be touched is looked at."""
        N, C, V = self.shape
        with self.plan(version, memory, wanted, more) as plan:
            bytes_ = bookends.library().bk_lm_head_workspace_bytes(plan)
            assert bytes_ <= memory or memory == 0 or N == 0
            sizes = dict(dX=(N, C), dW=(V, C), dbias=(V,), losses=(N,), lse=(N,))
            types = dict(dX=self.dtype.bits, dW=self.grad.bits, dbias=self.grad.bits, losses=np.float32, lse=np.float32)
            arrays = {name: Array(int(np.prod(sizes[name])), types[name], VALUE_FILL, self.offset) for name in wanted}
            inputs = {name: Array(bits.size, self.dtype.bits, VALUE_FILL, self.offset).put(bits)
                      for name, bits in self.bits.items()}
            targets, status = Array(N, np.int32).put(self.targets), status_array()
            dlosses = None if self.dlosses is None else Array(N, np.float32).put(self.dlosses)
            workspace = Array(bytes_, np.uint8, fill)
            if tune:
                code = bookends.lm_head_tune(plan, arrays.get("dX"), arrays.get("dW"), inputs["X"], inputs["W"],
                                             inputs.get("bias"), workspace)
                assert code == OK
            for name, bits in self.initial.items():
                if name in arrays:
                    arrays[name].put(bits)
            for _ in range(calls):
                code, self.status = bookends.lm_head_run(
                    plan, *[arrays.get(name) for name in ("dX", "dW", "dbias", "losses", "lse")], inputs["X"],
                    inputs["W"], inputs.get("bias"), targets, dlosses, status, workspace)
                assert code == OK, (self.what, bookends.error_string(code))
        for name, array in [*arrays.items(), *inputs.items(), ("targets", targets), ("workspace", workspace)]:
            assert array.guards_intact(), "version %d %s: wrote outside %s" % (version, self.what, name)
        for name, array in inputs.items():
            assert (array.get() == self.bits[name].reshape(-1)).all(), name
        return {name: array.get().reshape(sizes[name]) for name, array in arrays.items()}

    def check(self, version, memory=0, calls=1, **how):
        got = self.run(version, memory, calls=calls, **how)
        for name, bits in got.items():
            dtype = self.dtype if name == "dX" else self.grad if name in ("dW", "dbias") else FP32
            numbers = bits.astype(np.float64) if bits.dtype == np.float32 else from_bits(bits, dtype)
            exact, slack = self.reference.exact[name], self.reference.slack[name]
            if name in self.initial:  # each call rounds once
                before = from_bits(self.initial[name], self.grad)
                ulps = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}[dtype] * (np.abs(before) + calls * np.abs(exact))
                # blocks of rows add to a float dW one after the other
                slack = calls * slack + (calls - 1) * ulps + of_sum(self.shape[0], np.abs(before), np.abs(before))
                exact = before + calls * exact
            slack = np.where(np.isfinite(slack), slack, 0)
            wrong = outside(numbers, exact, slack, dtype)
            if wrong.any():
                first = tuple(map(int, np.argwhere(wrong)[0]))
                pytest.fail("version %d memory %d %s: %d of %d elements of %s are wrong, the first is %s: %r, should "
                            "be %r within %r" % (version, memory, self.what, wrong.sum(), wrong.size, name, first,
                                              float(numbers[first]), float(exact[first]), float(slack[first])))
        bad = (self.targets != self.options.ignore_index) & ((self.targets < 0) | (self.targets >= self.shape[2]))
        assert self.status == (np.argmax(bad) if bad.any() else -1), self.what
        return got

    def budgets(self, version, wanted=("dX", "dW", "dbias"), count=4):
        """From the least to what makes one piece of it all."""
        least = least_memory(*self.shape, self.flags(wanted), self.dtype, self.grad, version)
        N, C, V = self.shape
        most = least + 8 * N * (V + 128) + 8 * (N + V) * (C + 16)
        return [int(least * (most / least)**(i / (count - 1))) for i in range(count)]


def test_versions_are_known():
    assert VERSIONS == [1, 2, 3, 4, 5, 6]


def test_the_ruler():
    """What is allowed is little: a few ulps of each result's size; and a wrong element is seen."""
    for dtype, ulp in ((FP32, 2.0**-23), (FP16, 2.0**-10), (BF16, 2.0**-7)):
        case = Case(dtype, FP32, 40, 64, 300, label_smoothing=0.1)
        exact, slack = case.reference.exact, case.reference.slack
        for name in ("dX", "dW", "dbias"):
            typical = np.sqrt((exact[name]**2).mean())
            assert np.median(slack[name]) < 0.05 * typical, (dtype.name, name, np.median(slack[name]) / typical)
        assert max(slack["losses"].max(), slack["lse"].max()) < 16 * ulp + 3e-4
        wrong = exact["dW"] + 3 * slack["dW"]
        assert outside(wrong, exact["dW"], slack["dW"], FP32).all()


# ---------------------------------------------------------------------------------------------------------------------
# shapes, budgets, alignment

SHAPES = [(1, 1, 1), (1, 5, 7), (7, 1, 9), (3, 8, 1), (2, 3, 1003), (13, 37, 203), (33, 64, 256), (130, 16, 129),
          (5, 129, 77), (129, 3, 17)]


@every_version
@every_grad
def test_shapes(dtype, grad, version):
    for i, (N, C, V) in enumerate(SHAPES):
        case = Case(dtype, grad, N, C, V, bias=i % 2 == 0, dlosses=i % 3 == 0, label_smoothing=0.1 * (i % 2))
        case.check(version)
        if version in BOUNDED:
            case.check(version, case.budgets(version)[0])


@pytest.mark.parametrize("version", BOUNDED)
@every_grad
def test_budgets(dtype, grad, version):
    """From the least, where a block is a row or a tile a few columns, to all at once; the last pieces are ragged."""
    case = Case(dtype, grad, 150, 24, 301, dlosses=True)
    used = []
    for memory in case.budgets(version, count=5):
        case.check(version, memory)
        with case.plan(version, memory) as plan:
            used.append(bookends.library().bk_lm_head_workspace_bytes(plan))
    assert used[0] < used[-1]


@pytest.mark.parametrize("version", BOUNDED)
@every_dtype
def test_chunked_equals_unchunked_to_rounding(dtype, version):
    case = Case(dtype, FP32, 150, 24, 301)
    whole = case.run(2)
    for memory in case.budgets(version):
        got = case.run(version, memory)
        for name in ("losses", "lse", "dW"):
            a, b = (from_bits(values[name].view(np.uint32), FP32) for values in (got, whole))
            # the same logits here, but for sums that lie between two roundings
            assert np.abs(a - b).max() <= 2 * case.reference.slack[name].max() + 1e-6, (name, memory)


@every_version
@every_dtype
def test_wide_vocabularies_are_padded(dtype, version):
    """From 4096 columns on rows are padded to multiples of 128; tiles have several vectors a thread."""
    for V in (4096, 4099, 9001):
        case = Case(dtype, FP32, 3, 8, V)
        case.check(version)
        if version in BOUNDED:
            case.check(version, case.budgets(version)[1])


@every_version
@every_dtype
def test_nothing_to_do(dtype, version):
    for N, C, V in ((0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0), (3, 0, 0)):
        for bias in (True, False):
            case = Case(dtype, FP32, N, C, V, bias=bias, targets=np.zeros(N) if V else np.full(N, IGNORE))
            got = case.check(version)
            if V == 0:
                assert not from_bits(got["dX"], dtype).any()
    code, plan = bookends.lm_head_create(0, 5, 7, EVERYTHING, None, 1, dtype, FP32, version)
    assert code == OK
    assert bookends.lm_head_run(plan, *[None] * 12)[0] == OK  # no rows need no memory
    bookends.library().bk_lm_head_destroy(plan)


# ---------------------------------------------------------------------------------------------------------------------
# what is wanted

@every_version
@every_grad
def test_gradients_alone(dtype, grad, version):
    case = Case(dtype, grad, 40, 24, 131, dlosses=True)
    plain = Case(dtype, grad, 40, 24, 131, bias=False)
    for wanted in (("dX",), ("dW",), ("dbias",), ("dX", "dbias"), ("dW", "dbias"), ()):
        for scalars in (("losses", "lse"), ("losses",), ("lse",), ()):
            if not wanted and scalars == ():
                continue
            case.check(version, wanted=wanted + scalars)
        if version in BOUNDED:
            case.check(version, case.budgets(version, wanted)[1], wanted=wanted + ("losses",))
        if "dbias" not in wanted:
            plain.check(version, wanted=wanted + ("losses", "lse"))


@every_version
@every_grad
def test_accumulation_over_calls(dtype, grad, version):
    case = Case(dtype, grad, 30, 16, 99)
    for memory in case.budgets(version)[:2] if version in BOUNDED else [0]:
        case.check(version, memory, calls=3)


@every_version
@every_grad
def test_arrays_of_no_elements_may_be_null(dtype, grad, version):
    """Which they are makes no difference; those that have some may not be."""
    N = 3
    targets = Array(N, np.int32).put(np.full(N, IGNORE))
    for C, V in ((0, 7), (5, 0), (0, 0)):
        sizes = dict(dX=N * C, dW=V * C, dbias=V, X=N * C, W=V * C, bias=V)
        with plan_for(N, C, V, EVERYTHING, None, 0, dtype, grad, version) as plan:
            sizes["workspace"] = bookends.library().bk_lm_head_workspace_bytes(plan)
            arrays = {name: Array(size, np.uint32) for name, size in sizes.items()}

            def run(a):
                code = bookends.lm_head_tune(plan, a["dX"], a["dW"], a["X"], a["W"], a["bias"], a["workspace"])
                losses = Array(N, np.float32)
                ran, status = bookends.lm_head_run(plan, a["dX"], a["dW"], a["dbias"], losses, None, a["X"], a["W"],
                                                   a["bias"], targets, None, status_array(), a["workspace"])
                assert ran != OK or (code == OK and status == -1 and not losses.get().any())
                return ran

            empty = [name for name, size in sizes.items() if size == 0]
            assert run(arrays) == OK
            for names in (*([name] for name in empty), empty):
                assert run({**arrays, **dict.fromkeys(names)}) == OK, (names, C, V)
            for name in set(sizes) - set(empty):
                assert run({**arrays, **dict.fromkeys([*empty, name])}) == bookends.ERROR_NULL, (name, C, V)


@every_version
@pytest.mark.parametrize("dtype, grad", [(FP16, FP16), (BF16, BF16)], ids=lambda d: d.name)
def test_small_gradients_are_not_lost(dtype, grad, version):
    """A dW of 16 bits is rounded once: 64 rows that each add less than half an ulp add up, whatever their block."""
    N, C, V = 64, 8, 24
    case = Case(dtype, grad, N, C, V, X=np.ones((N, C)), targets=np.full(N, 3), dloss=2.0**-6 if dtype is BF16 else
                2.0**-9, bias=False)
    case.initial["dW"] = to_bits(np.full((V, C), 8.0), grad)
    for memory in case.budgets(version, ("dW",))[:3] if version in BOUNDED else [0]:
        got = case.check(version, memory, wanted=("dW", "losses"))
        assert (from_bits(got["dW"], grad)[3] != 8).all()


@every_version
@every_dtype
def test_finite_differences(dtype, version):
    """The library's own gradients against its own losses, in float, whose inputs can be moved a little; the gradients
    of the 16-bit types at the same point."""
    N, C, V, h = 3, 4, 11, 2.0**-7
    for options in ({}, dict(label_smoothing=0.2, z_loss=0.02), dict(softcap=3.0, logit_scale=-1.5)):
        point = Case(FP16, FP16, N, C, V, **options)
        point.bits = {name: to_bits(np.round(from_bits(bits, FP16) * 4) / 4, FP16)
                      for name, bits in point.bits.items()}
        values = {name: from_bits(bits, FP16) for name, bits in point.bits.items()}

        def total(moved):
            case = Case(FP32, FP32, N, C, V, targets=point.targets, **options)
            case.bits = {name: to_bits(value, FP32) for name, value in moved.items()}
            return case.run(version, wanted=("losses",))["losses"].astype(np.float64).sum()

        case = Case(dtype, FP32, N, C, V, targets=point.targets, **options)
        case.bits = {name: to_bits(value, dtype) for name, value in values.items()}
        case.initial = {name: np.zeros_like(bits) for name, bits in case.initial.items()}
        got = case.run(version)
        rng = np.random.default_rng(3)
        for name, gradient in (("X", "dX"), ("W", "dW"), ("bias", "dbias")):
            have = from_bits(got[gradient], dtype if gradient == "dX" else FP32)
            for _ in range(6):
                where = tuple(rng.integers(0, size) for size in have.shape)
                high, low = ({key: value.copy() for key, value in values.items()} for _ in range(2))
                high[name][where] += h
                low[name][where] -= h
                want = (total(high) - total(low)) / (2 * h)
                assert have[where] == pytest.approx(want, abs=2e-3 if dtype is FP32 else 3e-2), (name, where, options)


# ---------------------------------------------------------------------------------------------------------------------
# options

ALONE = [dict(label_smoothing=0.1), dict(label_smoothing=1.0), dict(z_loss=0.01), dict(softcap=5.0), dict(softcap=30.0),
         dict(logit_scale=0.5), dict(logit_scale=-2.0), dict(logit_scale=0.0), dict(dloss=0.25), dict(dloss=-3.0),
         dict(ignore_index=3), dict(ignore_index=INT_MAX)]


@every_version
@every_dtype
def test_options(dtype, version):
    for i, options in enumerate(ALONE):
        targets = np.random.default_rng(i).integers(0, 131, 14)
        targets[[1, 9]] = options.get("ignore_index", IGNORE), 3
        case = Case(dtype, FP32, 14, 24, 131, targets=targets, dlosses=True, **options)
        case.check(version)
        if version in (4, 5):
            case.check(version, case.budgets(version)[1])


@every_version
def test_a_common_offset_costs_no_precision(version):
    """A bias of 1000 for all: sums of values count from one of them."""
    case = Case(FP32, FP32, 9, 16, 203, label_smoothing=0.1)
    for moved in (0.0, 1000.0):
        other = Case(FP32, FP32, 9, 16, 203, label_smoothing=0.1)
        bias = np.round(from_bits(case.bits["bias"], FP32) * 16) / 16 + moved
        other.bits["bias"] = to_bits(bias, FP32)
        losses = other.run(version, wanted=("losses",))["losses"]
        if moved == 0:
            plain = losses
    assert np.abs(losses - plain).max() < 1e-3


@every_version
@every_dtype
def test_smoothed_losses_of_outliers(dtype, version):
    """One column far from all others, wherever it is: the loss is exact to 1e-6 of itself. Sums of products are exact
    here, so the logits are known."""
    N, C = 2, 8
    rng = np.random.default_rng(13)
    far = (-1e4, 1e4) if dtype is FP16 else (-1e4, -1e9, -3.3e38)
    case = Case(dtype, FP32, 1, 1, 1)
    for V, columns, smoothing in ((128256, (0,), 0.1), (5001, (0,), 1.0), (5001, (1,), 0.1), (5001, (256,), 0.1),
                                  (5001, (7,), 1.0), (5001, (0, 5000), 0.1)):
        case.shape, case.targets = (N, C, V), np.array([V - 9, 7], np.int32)
        case.options = ClassifierOptions(label_smoothing=smoothing)
        X, W, bias = (rng.integers(-4, 5, shape) / 4 for shape in ((N, C), (V, C), V))
        for outlier in far:
            bias[list(columns)] = outlier
            case.bits = dict(X=to_bits(X, dtype), W=to_bits(W, dtype), bias=to_bits(bias, dtype))
            logits = rounded(X @ W.T + from_bits(case.bits["bias"], dtype), dtype)
            want = Classifier(logits, case.targets, case.options).exact["losses"]
            assert np.isfinite(want.astype(np.float32)).all()
            for memory in (0, 1 << 16) if version > 3 and V < 10000 else (0,):
                got = case.run(version, memory, wanted=("losses",))["losses"]
                assert got == pytest.approx(want, rel=1e-6), (V, columns, smoothing, outlier, memory)


# ---------------------------------------------------------------------------------------------------------------------
# targets

@every_version
@every_grad
def test_ignored_rows(dtype, grad, version):
    """The first, the last, every other, those of a whole block, and all."""
    N, C, V = 40, 16, 131
    rng = np.random.default_rng(7)
    for which in ([0], [N - 1], range(0, N, 2), range(8, 24), range(1, N), range(N)):
        targets = rng.integers(0, V, N)
        targets[list(which)] = IGNORE
        case = Case(dtype, grad, N, C, V, targets=targets)
        for memory in (0, case.budgets(version)[1]) if version in BOUNDED else (0,):
            got = case.check(version, memory, fill=NAN_FILL)
            assert not from_bits(got["dX"], dtype)[list(which)].any() and not got["losses"][list(which)].any()
            case.check(version, memory, wanted=("dX", "dW", "losses"))
            if len(which) == N:
                assert (got["dW"] == case.initial["dW"]).all() and (got["dbias"] == case.initial["dbias"]).all()


@every_version
@every_grad
def test_ignored_rows_hold_anything(dtype, grad, version):
    """NaN and infinities in the hidden states of ignored rows change no bit of any gradient or of another row's
    scalars; with either gradient, in one piece and in blocks and tiles, where vectors and products fit and where they
    don't."""
    for N, C, V, offset in ((40, 16, 131, 0), (150, 24, 301, 0), (33, 7, 64, 1)):
        rng = np.random.default_rng(N)
        targets = rng.integers(0, V, N)
        ignored = np.arange(N) % 3 == 1
        targets[ignored] = IGNORE
        case = Case(dtype, grad, N, C, V, targets=targets, offset=offset, label_smoothing=0.1, X=np.where(
            ignored[:, None], 0, rng.standard_normal((N, C))))
        clean, poisoned = case.bits, {**case.bits, "X": case.bits["X"].copy()}
        some = rng.integers(0, C, N)
        for k, row in enumerate(np.flatnonzero(ignored)):
            value = (np.nan, np.inf, -np.inf, LARGEST[dtype])[k % 4]
            poisoned["X"][row, slice(None) if k % 3 == 0 else some[row]] = to_bits(value, dtype)
        choices = ("dX", "dW", "dbias", "losses", "lse"), ("dW", "losses"), ("dX", "dW"), ("dbias",)
        for k, wanted in enumerate(choices):
            if k > 0 and N != 40:
                continue
            gradients = [name for name in wanted if name[0] == "d"]
            for memory in (0, case.budgets(version, gradients)[N == 40]) if version in BOUNDED else (0,):
                case.bits = clean
                want = case.check(version, memory, wanted=wanted)
                case.bits = poisoned
                got = case.run(version, memory, wanted=wanted)
                for name in wanted:
                    if name == "lse":
                        assert got[name][~ignored].tobytes() == want[name][~ignored].tobytes()
                        assert np.isnan(got[name][ignored]).any()
                    else:
                        assert got[name].tobytes() == want[name].tobytes(), (name, memory, wanted, N)


@every_version
@every_dtype
def test_bad_targets(dtype, version):
    """NaN losses and rows of dX; dW is a sum with NaN; the status word counts from the first row of all."""
    N, C, V = 40, 16, 131
    for targets in ({33: V, 35: -1}, {0: -2**31}, {N - 1: INT_MAX}, {20: -5, 21: IGNORE}):
        every = np.arange(N) % V
        for row, target in targets.items():
            every[row] = target
        case = Case(dtype, FP32, N, C, V, targets=every)
        for memory in (0, case.budgets(version)[1]) if version in BOUNDED else (0,):
            got = case.check(version, memory)
            bad = [row for row, target in targets.items() if target != IGNORE]
            assert np.isnan(got["losses"][bad]).all() and np.isnan(from_bits(got["dX"], dtype)[bad]).all()
            assert np.isnan(from_bits(got["dW"], FP32)).all() and np.isfinite(got["lse"]).all()
            assert np.isfinite(np.delete(from_bits(got["dX"], dtype), bad, 0)).all()
            case.run(version, memory, wanted=("losses",))
            assert case.status == min(bad)


@every_version
@every_dtype
def test_hidden_states_that_are_no_numbers(dtype, version):
    N, C, V = 6, 8, 40
    X = np.random.default_rng(1).standard_normal((N, C))
    X[2, 3], X[4, 1] = np.nan, np.inf
    case = Case(dtype, FP32, N, C, V, X=X)
    for memory in (0, case.budgets(version)[1]) if version in BOUNDED else (0,):
        got = case.run(version, memory)
        assert (np.isnan(got["losses"]) == [False, False, True, False, True, False]).all()
        dX = from_bits(got["dX"], dtype)
        assert np.isnan(dX[[2, 4]]).all() and np.isfinite(np.delete(dX, [2, 4], 0)).all()


# ---------------------------------------------------------------------------------------------------------------------
# the same bits, tied weights

@every_version
@every_grad
def test_two_runs_give_the_same_bits(dtype, grad, version):
    """Of one plan, whatever its workspace holds; and of two plans that were not tuned."""
    case = Case(dtype, grad, 140, 24, 203, label_smoothing=0.1)
    for memory in case.budgets(version)[:2] if version in BOUNDED else [0]:
        first = case.run(version, memory, fill=NAN_FILL)
        second = case.run(version, memory, fill=VALUE_FILL)
        for name, bits in first.items():
            assert bits.tobytes() == second[name].tobytes(), (name, memory)


@every_version
def test_tuned_plans(version):
    for dtype, grad in GRADS:
        case = Case(dtype, grad, 33, 24, 131)
        case.check(version, tune=True)
        case.check(version, tune=True, wanted=("dW", "losses"))
        case.check(version, tune=True, wanted=("losses",))


def test_tf32_is_a_flag():
    """The CPU device's products are exact either way; on a GPU the inputs are rounded to 10 bits."""
    case = Case(FP32, FP32, 17, 64, 130)
    if not ON_CUDA:
        case.check(5, more=TF32)
    a, b = case.run(2)["losses"], case.run(2, more=TF32)["losses"]
    assert np.abs(a - b).max() < 0.02


@every_version
@every_dtype
def test_tied_weights(dtype, version):
    """W is the embedding's table: its gradient gets the head's part, and then the embedding's."""
    B, T, C, V = 2, 9, 16, 60
    N = B * T
    case = Case(dtype, FP32, N, C, V, bias=False)
    rng = np.random.default_rng(5)
    ids, dout = rng.integers(0, V, N).astype(np.int32), to_bits(rng.standard_normal((N, C)), dtype)
    with case.plan(version, wanted=("dX", "dW")) as plan:
        bytes_ = bookends.library().bk_lm_head_workspace_bytes(plan)
        dW, dX = Array(V * C, np.uint32).put(case.initial["dW"]), Array(N * C, dtype.bits)
        X, W = (Array(case.bits[name].size, dtype.bits).put(case.bits[name]) for name in ("X", "W"))
        code, _ = bookends.lm_head_run(plan, dX, dW, None, None, None, X, W, None, Array(N, np.int32).put(case.targets),
                                       None, None, Array(bytes_, np.uint8))
        assert code == OK
    needed = bookends.encoder_backward_workspace_bytes(B, T, C, V)
    code, _ = bookends.encoder_backward(dW, None, Array(N * C, dtype.bits).put(dout), Array(N, np.int32).put(ids), None,
                                        Array(needed, np.uint8), B, T, C, V, dtype, FP32)
    assert code == OK
    want = from_bits(case.initial["dW"], FP32) + case.reference.exact["dW"]
    np.add.at(want, ids, from_bits(dout, dtype))
    got = from_bits(dW.get().reshape(V, C), FP32)
    assert (np.abs(got - want) <= case.reference.slack["dW"] + 1e-5).all()


# ---------------------------------------------------------------------------------------------------------------------
# refusals

def test_impossible_budgets():
    for dtype, grad in GRADS:
        for version in VERSIONS:
            code, plan = bookends.lm_head_create(100, 16, 1000, EVERYTHING, None, 100, dtype, grad, version)
            assert (code, plan) == (bookends.ERROR_MEMORY, None)
            assert "budget" in bookends.error_string(code)
            least = re.search(r" 100 bytes of scratch are too few: (\d+) are enough$", bookends.last_message())
            assert least, bookends.last_message()
            code, plan = bookends.lm_head_create(100, 16, 1000, EVERYTHING, None, int(least.group(1)), dtype, grad,
                                                 version)
            assert code == OK
            bookends.library().bk_lm_head_destroy(plan)
    # A dW of 16 bits is added to once: rows in blocks need all of it in float.
    case = Case(BF16, BF16, 150, 64, 301)
    assert case.budgets(3)[0] > 301 * 64 * 4 > Case(BF16, FP32, 150, 64, 301).budgets(3)[0]


@pytest.mark.parametrize("V", [5120, 5003])
def test_a_quarter_of_the_logits_has_a_quarter_of_the_rows(V):
    """Where 8 doesn't divide V too: the share is of what is held, and dX needs no sums in float for the tail."""
    result = head(3, "-b", 1, "-t", 512, "-c", 16, "-v", V, "--repeat", 1, "--json", "-")
    assert result.returncode == 0, result
    record = json.loads(result.stdout)
    assert (record["block_rows"], record["scratch_pct_of_logits"], record["gemm_bytes"]) == (128, 25, 0)
    assert record["scratch_bytes"] == 128 * 5120 * 2 == record["memory_bytes"]


def test_bad_arguments():
    def create(N=3, C=4, V=5, flags=3, options=None, memory=0, dtype=BF16, grad=FP32, version=0):
        code, plan = bookends.lm_head_create(N, C, V, flags, options, memory, dtype, grad, version)
        assert plan is None
        return code
    for negative in (dict(N=-1), dict(C=-1), dict(V=-1), dict(V=INT_MAX)):
        assert create(**negative) == bookends.ERROR_SHAPE
    for flags in (64, -1, 1 << 20):
        assert create(flags=flags) == bookends.ERROR_FLAGS
    assert create(dtype=3) == create(dtype=-1, grad=-1) == create(grad=FP16) == create(dtype=FP32, grad=BF16) == \
        bookends.ERROR_DTYPE
    assert create(version=7) == create(version=-1) == bookends.ERROR_VERSION
    assert create(options=ClassifierOptions(label_smoothing=1.5)) == bookends.ERROR_OPTIONS
    assert bookends.library().bk_lm_head_create(None, 1, 1, 1, 0, None, 0, 0.0, 0, 0, 0, None) == bookends.ERROR_NULL
    assert bookends.library().bk_lm_head_workspace_bytes(None) == 0
    bookends.library().bk_lm_head_destroy(None)


@every_version
def test_pointers_that_are_not_as_planned(version):
    """Nothing is written then."""
    case = Case(BF16, FP32, 5, 8, 20)
    names = ("dX", "dW", "dbias", "losses", "lse", "X", "W", "bias", "targets", "dlosses", "status", "workspace")
    with case.plan(version) as plan, case.plan(version, wanted=()) as forward:
        arrays = {name: Array(4096, np.uint32, VALUE_FILL) for name in names if name != "workspace"}
        arrays["workspace"] = Array(bookends.library().bk_lm_head_workspace_bytes(plan), np.uint8)
        before = {name: array.get() for name, array in arrays.items()}
        for name in ("dX", "dW", "dbias", "X", "W", "bias", "targets", "workspace"):
            given = [None if other == name else array for other, array in arrays.items()]
            assert bookends.lm_head_run(plan, *given)[0] == bookends.ERROR_NULL, name
            assert bookends.last_message().startswith("bk_lm_head_run: %s is null" % name)
        assert bookends.lm_head_run(forward, *arrays.values())[0] == bookends.ERROR_NOT_NULL
        assert bookends.last_message() == "bk_lm_head_run: dX must be null: the plan has none"
        assert bookends.lm_head_run(None, *arrays.values())[0] == bookends.ERROR_NULL
        assert bookends.last_message() == "bk_lm_head_run: plan is null"
        for offset in (4, 128):
            arrays["workspace"] = Array(bookends.library().bk_lm_head_workspace_bytes(plan), np.uint8, offset=offset)
            assert bookends.lm_head_run(plan, *arrays.values())[0] == bookends.ERROR_ALIGNMENT
            assert bookends.last_message() == "bk_lm_head_run: workspace is not at a multiple of 256 bytes"
            given = [arrays[name] for name in ("dX", "dW", "X", "W", "bias", "workspace")]
            assert bookends.lm_head_tune(plan, *given) == bookends.ERROR_ALIGNMENT
        assert all((arrays[name].get() == before[name]).all() for name in names)


@pytest.mark.skipif(ON_CUDA, reason="the runtime that the library is linked with is out of reach there")
@every_version
def test_an_error_from_before_is_not_this_calls(version):
    case = Case(BF16, FP32, 5, 8, 20)
    with bookends.pending_error():
        case.check(version)


@needs_cuda
@every_version
@every_dtype
@pytest.mark.parametrize("budget", range(4))
def test_graph_replay_with_other_inputs(budget, dtype, version):
    """Captured once, with the work on the plan's own stream, and replayed: from the smallest pieces to a single one."""
    if budget and version not in BOUNDED:
        pytest.skip("has no budget")
    import torch
    N, C, V = 300, 64, 5000
    cases = [Case(dtype, FP32, N, C, V, seed=seed, bias=False) for seed in range(3)]
    memory = cases[0].budgets(version, ("dX", "dW"))[budget] if version in BOUNDED else 0
    with cases[0].plan(version, memory, ("dX", "dW")) as plan:
        dX, dW, losses = Array(N * C, dtype.bits), Array(V * C, np.uint32), Array(N, np.float32)
        X, W = Array(N * C, dtype.bits), Array(V * C, dtype.bits)
        targets = Array(N, np.int32)
        workspace = Array(bookends.library().bk_lm_head_workspace_bytes(plan), np.uint8)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            code, _ = bookends.lm_head_run(plan, dX, dW, None, losses, None, X, W, None, targets, None, None, workspace,
                                           torch.cuda.current_stream().cuda_stream)
        assert code == OK
        for case in cases:
            for array, values in ((X, case.bits["X"]), (W, case.bits["W"]), (targets, case.targets),
                                  (dW, np.zeros(V * C, np.uint32))):
                array.put(values)
            torch.cuda.synchronize()
            graph.replay()
            exact, slack = case.reference.exact, case.reference.slack
            assert not outside(losses.get().astype(np.float64), exact["losses"], slack["losses"], FP32).any()
            for name, array, kind, shape in (("dX", dX, dtype, (N, C)), ("dW", dW, FP32, (V, C))):
                got = from_bits(array.get().reshape(shape), kind)
                assert not outside(got, exact[name], slack[name], kind).any(), name


# ---------------------------------------------------------------------------------------------------------------------
# the program

SMALL = ["-b", 2, "-t", 20, "-c", 24, "-v", 301]


def head(*arguments, **options):
    return bookends.run("lm_head", *arguments, **options)


def refused(*arguments, words, status=2):
    result = head(*SMALL, *arguments)
    assert (result.returncode, result.stdout) == (status, ""), result
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("lm_head: "), result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)


CHECKED = r"check: max error \d+\.\d( beyond the bounds of float sums)? \(allowed .* ulp\) over \d+ elements" \
          r"( of sampled rows)?, the same bits each time: ok"
TIMED = r"memory 25% +\| time \d+\.\d{4} ms \| \d+\.\d [TGM]FLOP/s \| \d+\.\d{3}x the gemms? \| scratch \d+\.\d% of the " \
    r"logits(?: \([^)]+\))? \| (textbook|rows|vocabulary|epilogue): \d of \d+ x \d+  <- best"


def test_report():
    result = head("all", *SMALL, "--repeat", 2)
    assert (result.returncode, result.stderr) == (0, "")
    lines, shares = result.stdout.splitlines()[1:], []
    for version in VERSIONS:
        assert re.fullmatch(r'lm_head %d "\w+": B=2 T=20 C=24 V=301 bf16 tokens=uniform' % version, lines.pop(0))
        assert re.fullmatch(CHECKED, lines[0]), lines.pop(0)
        assert re.fullmatch(TIMED, lines[1]), lines[1]
        shares.append(re.search(r"scratch (\S+)%", lines[1]).group(1))
        del lines[:2]
    assert lines[0] == "" and lines[1].split()[:3] == ["version", "name", "at"]
    assert lines[1].endswith("  scratch, %  x version 1") and len(set(map(len, lines[1:2 + len(VERSIONS)]))) == 1
    table = [line.split() for line in lines[2:2 + len(VERSIONS)]]
    assert [int(row[0]) for row in table] == VERSIONS and [row[-2] for row in table] == shares


@pytest.mark.parametrize("options", [
    ["--dtype", "fp32"], ["--dtype", "fp16", "--grad-dtype", "same"], ["--dtype", "fp32", "--tf32"],
    ["--bias", "--lse", "--label-smoothing", 0.1], ["--gradients", "dx", "--softcap", 10],
    ["--gradients", "dw", "--z-loss", 0.001, "--bias"], ["--forward", "--lse"], ["--ignore-every", 3, "--graph"],
    ["--ignore-every", 2, "--finite"],
    ["--logit-scale", -1, "--memory", 0.05], ["--memory", "3%", "--grad-dtype", "same"], ["--tokens", "zipf"],
    ["--dtype", "fp16"], ["--bias", "--label-smoothing", 0.1, "--ignore-every", 3],
    ["--softcap", 10, "--label-smoothing", 0.2, "--lse", "--dtype", "fp16", "--bias"],
    ["--gradients", "dx", "--z-loss", 0.01, "--logit-scale", 3],
    ["--gradients", "dw", "--grad-dtype", "same", "--memory", 1, "--bias"],
    ["--spread", 0], ["--spread", 8], ["--seed", 3],
    ["--logit-scale", 1e5], ["--softcap", 1e-10], ["--softcap", 1e4, "--logit-scale", 1e6],
], ids=lambda options: " ".join(map(str, options)))
def test_checks(options):
    result = head("all", *SMALL, "--check", *options)
    assert (result.returncode, result.stderr) == (0, ""), result
    checked = [line for line in result.stdout.splitlines() if line.startswith("check")]
    assert len(checked) == len(VERSIONS) and all(re.fullmatch(CHECKED, line) for line in checked)


@pytest.mark.parametrize("blas", ["none", ""])
@every_dtype
def test_with_and_without_a_blas(dtype, blas):
    environment = {key: value for key, value in os.environ.items() if key != "BOOKENDS_BLAS"}
    if blas:
        environment["BOOKENDS_BLAS"] = blas
    result = head("all", *SMALL, "--check", "--dtype", dtype.name, "--bias", env=environment)
    assert (result.returncode, result.stdout.count(": ok")) == (0, len(VERSIONS)), result


@pytest.mark.parametrize("rows", (128, 256, 512, 1024))
def test_a_share_is_kept(rows):
    """By version 6 wherever another version's plan keeps it."""
    def scratch(version):
        result = head(version, "-b", 1, "-t", rows, "-c", 64, "-v", 2000, "--memory", "10%", "--repeat", 1, "--bench",
                      "--json", "-")
        assert result.returncode == 0, result
        return json.loads(result.stdout)["scratch_pct_of_logits"]
    assert scratch(6) <= max(10, min(scratch(4), scratch(5)))


def timed_lines(*arguments):
    result = head(*arguments, "--bench", "--repeat", 1)
    assert result.returncode == 0, result
    return [line for line in result.stdout.splitlines() if line.startswith("memory ")]


def test_more_than_the_budget_has_a_reason():
    """Versions 1 and 2 hold all logits; a share below the least that makes sense is raised to that."""
    reasons = [re.search(r"scratch (\S+)% of the logits(?: \((.+?)\))? \|", line).groups()
               for line in timed_lines("all", "-b", 2, "-t", 8, "-c", 16, "-v", 3000, "--memory", "10%")]
    assert [reason for _, reason in reasons[:3]] == ["it holds all of them"] * 2 + \
        ["more than --memory: 16 rows at least"]
    for share, reason in reasons[3:]:
        assert (float(share) > 10) == (reason == "more than --memory: 16 rows and 128 columns at least"), reasons
    line, = timed_lines(3, "-b", 2, "-t", 200, "-c", 16, "-v", 300, "--memory", "10%")
    assert "(more than --memory: 128 rows at least)" in line
    line, = timed_lines(3, "-b", 2, "-t", 200, "-c", 16, "-v", 300, "--memory", "60%")
    assert "of the logits | rows: " in line


@pytest.mark.skipif(ON_CUDA, reason="of the CPU device")
def test_plans_of_the_cpu_device():
    """There version 5's own GEMM is emulated: version 6 takes it only if nothing else fits."""
    shape = ["-b", 2, "-t", 8, "-c", 64, "-v", 5000]
    for memory in ("100%", "25%", "10%"):
        for more in ([], ["--forward"], ["--gradients", "dx"]):
            line, = timed_lines(6, *shape, "--memory", memory, *more)
            assert " | rows: " in line or " | vocabulary: " in line, line
    assert " | rows: 1 of 16 x 5000" in timed_lines(6, *shape, "--memory", "400%")[0]
    assert " | epilogue: " in timed_lines(5, *shape)[0]


def test_large_checks_are_of_sampled_rows():
    """Some rows' losses are known, and dW is the sum over those."""
    result = head(3, "-b", 1, "-t", 420, "-c", 1, "-v", 50257, "--check", "--memory", "10%")
    assert result.returncode == 0, result
    count = int(re.search(r"over (\d+) elements of sampled rows", result.stdout).group(1))
    assert count == 50257 + 420 + 210  # dW, dX and losses


@pytest.mark.parametrize("gradients, products", [("both", 3), ("dx", 2), ("dw", 2), (None, 1)])
def test_json(gradients, products):
    wanted = ["--forward"] if gradients is None else ["--gradients", gradients]
    result = head("all", *SMALL, *wanted, "--repeat", 2, "--memory", "40%", "--json", "-")
    assert result.returncode == 0, result
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["version"] for record in records] == VERSIONS
    name = "gemm" if products == 1 else "gemms"
    for record in records:
        assert record["flops"] == 2 * 40 * 24 * 301 * products
        assert record[name + "_ms"] > 0
        assert record["ratio_to_" + name] == pytest.approx(record["time_ms_median"] / record[name + "_ms"], rel=1e-3)
        share = 100 * record["scratch_bytes"] / (40 * 304 * 2)  # of rows that are padded
        assert record["scratch_pct_of_logits"] == pytest.approx(share, rel=1e-6)
        assert record["memory"] == "40%" and record["at"] == "memory 40%" and record["block_size"] == 0
        assert record["best"] is True and record["ok"] is True
        if record["version"] > 2:
            assert record["scratch_bytes"] <= record["memory_bytes"]
    checked = json.loads(head(3, *SMALL, "--check", "--json", "-").stdout)
    assert checked["gemms_ms"] is None if "gemms_ms" in checked else checked["time_ms_median"] is None


def test_sweep_memory():
    result = head("all", "-b", 2, "-t", 90, "-c", 8, "-v", 400, "--sweep", "memory", "--repeat", 1, "--json", "-")
    assert result.returncode == 0, result
    records = [json.loads(line) for line in result.stdout.splitlines()]
    budgets = ["memory %d%%" % share for share in (100, 50, 25, 10, 5, 2, 1)]
    for version in VERSIONS:
        mine = [record for record in records if record["version"] == version]
        if version <= 2:
            assert len(mine) == 1 and "budget" in mine[0]["skipped"]
            assert (mine[0]["at"], mine[0]["memory"]) == (None, None)
            continue
        assert [record["at"] for record in mine] == ["memory " + record["memory"] for record in mine] == budgets
        scratch = [record["scratch_bytes"] for record in mine]
        assert scratch == sorted(scratch, reverse=True) and scratch[0] > scratch[-1]
        assert sum(record["best"] for record in mine) == 1
    lines = [line for line in result.stderr.splitlines() if line.startswith("memory ")]
    assert len(lines) == len(BOUNDED) * len(budgets) and [line.split(" |")[0].rstrip() for line in lines[:7]] == budgets
    for version in (0, 3):  # a record of no budget, or of all
        record = json.loads(head(version, *SMALL, "--sweep", "memory", "--check", "--json", "-").stdout)
        assert (record["at"], record["memory"]) == (None, None)


def test_bad_options():
    for value in ("", "x", "0", "-1", "0%", "10%%", "nan", "1e3", "10 %", "1e10", "%", "99999999999"):
        refused("--memory", value, words=["--memory", "'%s'" % value, "MiB"])
    refused("3", "--memory", "0.0001", words=["version 3", "--memory 0.0001", "too few", "are enough"])
    refused("--forward", "--gradients", "dx", words=["--gradients", "--forward"])
    refused("--sweep", "memory", "--memory", "10%", words=["--memory", "--sweep memory"])
    refused("--tf32", words=["--tf32", "bf16"])
    refused("--block-size", "64", words=["--block-size"])
    refused("-p", 304, words=["'-p'"])
    refused("--gradients", "dy", words=["--gradients", "'dy'", "both, dx, dw"])
    refused("--sweep", "time", words=["--sweep", "'time'", "none, memory"])
    refused("--softcap", "1e-36", "--logit-scale", "1e6", words=["--softcap", "--logit-scale"])
    refused("-b", 2**31 - 1, "-t", 2, words=["B*T", "-b, -t"])


def test_the_classifiers_options_are_those_of_its_own_program():
    """In the help, in what is refused and in the words for it."""
    both = ("lm_head", "classifier_fused")
    rows = [re.findall(r"^  --(?:label-smoothing|z-loss|softcap|logit-scale|ignore-every) .*$",
                       bookends.run(program, "--help").stdout, re.M) for program in both]
    assert len(rows[0]) == 5 and rows[0] == rows[1]
    for wrong in (["--softcap", "1e-36", "--logit-scale", "-1e6"], ["--label-smoothing", 1.1], ["--z-loss", -1],
                  ["--softcap", -1], ["--logit-scale", "1e7"], ["--ignore-every", "1.5"]):
        results = [bookends.run(program, *wrong) for program in both]
        assert {(result.returncode, result.stdout) for result in results} == {(2, "")}, results
        words = {result.stderr.split(": ", 1)[1] for result in results}
        assert len(words) == 1 and wrong[0] in words.pop(), results


def test_out_of_memory():
    for version in (2, 5):
        result = head(version, "-b", 1000000, "-t", 10, "-c", 1, "-v", 2000000)
        assert (result.returncode, result.stdout) == (3, "") and len(result.stderr.splitlines()) == 1, result
        assert re.search(r"out of memory: needs \S+ [GT]iB on the device", result.stderr)


def test_one_version_that_cannot_is_skipped():
    """Blocks of rows and a dW of 16 bits need all of it in float; tiles don't."""
    result = head("all", *SMALL, "--check", "--grad-dtype", "same", "--memory", "0.02")
    assert result.returncode == 0, result
    lines = result.stdout.splitlines()
    skipped = [line for line in lines if line.startswith("skipped")]
    assert len(skipped) == 1 and "--memory 0.02" in skipped[0] and "are enough" in skipped[0]


def test_help_and_list():
    text = head("--help").stdout
    assert "--block-size" not in text
    assert re.search(r"^  --memory TEXT +\S.* default 25%$", text, re.M)
    for option in ("--grad-dtype VALUE", "--gradients VALUE", "--forward", "--lse", "--bias", "--tf32", "--sweep VALUE",
                   "--graph", "--finite", "--label-smoothing NUMBER",
                   "--spread NUMBER"):
        assert re.search(r"^  %s  +\S" % option, text, re.M), option
    header = (bookends.ROOT / "lm_head.cu").read_text().split("*/")[0]
    assert list(map(int, re.findall(r"^version (\d+) ", header, re.M))) == VERSIONS


def test_the_reference_alone():
    result = head(0, *SMALL, "--bias")
    assert (result.returncode, result.stderr) == (0, "") and re.search(r"^time \d+\.\d{4} ms", result.stdout, re.M)
