"""classifier_fused, every version and type, through the library and against numpy float64.

A result may be anything between the roundings of the exact one less and plus a slack: what the float arithmetic that
the library promises may be off. Sums are over a warp's lanes at least, each of which adds up V/32 terms. In the logits
of every case the padding is NaN, which nobody may read.

The CPU device takes some 100 ns an element: rows are few, or short.
"""

import itertools
import json
import re

import numpy as np
import pytest

import bookends
from bookends import (Array, BF16, DTYPES, FP16, FP32, INFINITY, INT_MAX, INT_MIN, OK, ON_CUDA, VALUE_FILL,
                      ClassifierOptions, from_bits, needs_cuda, status_array, to_bits)

VERSIONS = bookends.versions("classifier_fused")
OUTPUTS = ("dlogits", "losses", "lse", "probs", "correct")
VECTOR = {FP32: 4, FP16: 8, BF16: 8}  # elements in 16 bytes
IGNORE = -100
U = 2.0**-24  # a rounding of 1 in float

every_version = pytest.mark.parametrize("version", VERSIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)


# ---------------------------------------------------------------------------------------------------------------------
# the reference

class Reference:
    """The formula in float64, for logits (N, V), and how far float arithmetic may be off each result."""

    def __init__(self, x, targets, options, dlosses=None):
        o, (N, V) = options, x.shape
        scale, cap, eps, z_loss = (float(value) for value in (o.logit_scale, o.softcap, o.label_smoothing, o.z_loss))
        self.x, self.targets, self.options = x, targets, options
        ignored = targets == o.ignore_index
        bad = ~ignored & ((targets < 0) | (targets >= V))
        rows, t = np.arange(N), np.where(ignored | bad, 0, targets)
        good = ~ignored & ~bad
        unit = float(o.dloss) * scale * (np.ones(N) if dlosses is None else np.asarray(dlosses, np.float64))
        with np.errstate(all="ignore"):
            z = cap * np.tanh(scale * x / cap) if cap > 0 else scale * x
            top = z.max(1) if V else np.full(N, np.nan)
            e = np.exp(z - top[:, None])
            log_sum = np.log(e.sum(1))
            lse, p = top + log_sum, e / e.sum(1, keepdims=True)
            z_t = z[rows, t] if V else np.full(N, np.nan)
            mean = z.mean(1) if V else np.full(N, np.nan)
            losses = (1 - eps) * (log_sum - (z_t - top)) + (eps * (log_sum - (mean - top)) if eps else 0)
            losses = losses + (z_loss * lse**2 if z_loss else 0)
            slope = 1 / np.cosh(scale * x / cap)**2 if cap > 0 else np.ones_like(x)
            hot = np.zeros_like(x)
            hot[rows[good], t[good]] = 1
            factor = 1 + (2 * z_loss * lse if z_loss else np.zeros(N))
            d = unit[:, None] * slope * (factor[:, None] * p - (1 - eps) * hot - eps / max(V, 1))
        d[ignored], d[bad] = 0, np.nan
        self.exact = dict(dlogits=d, losses=np.where(ignored, 0, np.where(bad, np.nan, losses)), lse=lse, probs=p)
        with np.errstate(all="ignore"):  # of equal ones the first, before rounding: these products are exact
            argmax = (scale * x).argmax(1) if V else np.full(N, -1)
            self.correct = good & (argmax == t) & ~np.isnan(scale * x).any(1)

        with np.errstate(all="ignore"):
            additions = V / 32 + 60
            below = np.where(p > 0, top[:, None] - z, 0)
            of_e = 8 + 8 * cap + 4 * below  # relative: a tanh is off by a rounding or two of 1
            of_sum = 8 + 8 * cap + 4 * (p * below).sum(1) + additions
            of_lse = of_sum + 6 * np.abs(top) + 4 * np.abs(log_sum)
            of_p = p * (of_e + of_sum[:, None] + 6)
            of_factor = 2 * abs(z_loss) * of_lse + 6 * np.abs(factor)
            of_d = np.abs(factor)[:, None] * of_p + of_factor[:, None] * p + 6 * hot + 6 * eps / max(V, 1)
            of_slope = 20 + 10 * np.abs(scale * x / cap) if cap > 0 else 1
            to_target = np.abs(top - z_t)
            gap = top - mean  # a sum of positive terms
            of_loss = of_sum + 8 * cap + 4 * np.abs(log_sum) + 10 * to_target + \
                (eps * (additions + 6) * gap if eps else 0) + 6 * np.abs(losses) + \
                abs(z_loss) * np.abs(lse) * (2 * of_lse + 6 * np.abs(lse))
            # powers of two, and slopes, below the normal numbers are 0; where logits are large, below 2^-63
            lost = np.where(np.abs(top) < 2.0**23, 2.0**-126, 2.0**-63)[:, None]
            tiny = (np.abs(unit) * (1 + np.abs(factor)))[:, None] * 16 * lost + 2.0**-147
            slack = dict(dlogits=U * (np.abs(unit)[:, None] * slope * of_d + of_slope * np.abs(d)) + tiny,
                         losses=U * of_loss, lse=U * of_lse, probs=U * of_p + lost)
        self.slack = {name: np.where(np.isfinite(values), values, 0) for name, values in slack.items()}


def off(got, exact, slack, dtype):
    """Which elements are not a rounding of anything within the slack."""
    with np.errstate(all="ignore"):
        low, high = (from_bits(to_bits(value, dtype), dtype) for value in (exact - slack, exact + slack))
        return ~((low <= got) & (got <= high) | np.isnan(exact) & np.isnan(got))


class Case:
    """Rows on the device. logits: (N, V) numbers, which are rounded to dtype. offsets: by how many elements logits,
    dlogits and probs are off a multiple of 256 bytes."""

    def __init__(self, dtype, logits, targets, P=None, offsets=(0, 0, 0), dlosses=None, **options):
        self.dtype, self.targets = dtype, np.asarray(targets, np.int32)
        bits = to_bits(logits, dtype)
        self.N, self.V = bits.shape
        self.P = self.V if P is None else P
        self.offsets, self.dlosses = offsets, dlosses
        self.options = ClassifierOptions(**options)
        self.bits = np.full((self.N, self.P), to_bits(np.nan, dtype), dtype.bits)
        self.bits[:, :self.V] = bits
        self.reference = Reference(from_bits(bits, dtype), self.targets, self.options, dlosses)
        self.what = "%s N=%d V=%d P=%d offsets=%s %s" % (dtype.name, self.N, self.V, self.P, offsets, options)

    def call(self, version, wanted=OUTPUTS, in_place=False, stream=None):
        """{name: array as it is in memory} of a call; everything that it may not touch is looked at."""
        bits, N, P = self.dtype.bits, self.N, self.P
        logits = Array(N * P, bits, VALUE_FILL, self.offsets[0]).put(self.bits)
        targets, status = Array(N, np.int32).put(self.targets), status_array()
        dlosses = None if self.dlosses is None else Array(N, np.float32).put(self.dlosses)
        arrays = dict(dlogits=logits if in_place else Array(N * P, bits, VALUE_FILL, self.offsets[1]),
                      losses=Array(N, np.float32, VALUE_FILL), lse=Array(N, np.float32, VALUE_FILL),
                      probs=Array(N * P, bits, VALUE_FILL, self.offsets[2]), correct=Array(N, np.int32, VALUE_FILL))
        arrays = {name: array for name, array in arrays.items() if name in wanted}
        code, self.status = bookends.classifier_fused(
            *[arrays.get(name) for name in OUTPUTS], logits, targets, dlosses, status, N, self.V, P, self.options,
            self.dtype, version)
        assert code == OK, (self.what, bookends.error_string(code))
        for name, array in [*arrays.items(), ("logits", logits), ("targets", targets), ("status", status)]:
            assert array.guards_intact(), "version %d %s: wrote outside %s" % (version, self.what, name)
        if arrays.get("dlogits") is not logits:
            assert (logits.get() == self.bits.reshape(-1)).all(), "%s: the logits were changed" % self.what
        assert (targets.get() == self.targets).all()
        return {name: array.get().reshape((N, P) if name in ("dlogits", "probs") else (N,))
                for name, array in arrays.items()}

    def check(self, version, wanted=OUTPUTS, in_place=False):
        """One call, every element of it and the status word. Returns what call() does."""
        got, reference = self.call(version, wanted, in_place), self.reference
        what = "version %d %s wanted=%s in_place=%s" % (version, self.what, wanted, in_place)
        for name, values in got.items():
            if name == "correct":
                assert (values == reference.correct).all(), (what, values, reference.correct)
                continue
            matrix = name in ("dlogits", "probs")
            dtype = self.dtype if matrix else FP32
            if matrix:
                assert (values[:, self.V:] == 0).all(), "%s: padding of %s is not 0" % (what, name)
                values = values[:, :self.V]
            exact, slack = reference.exact[name], reference.slack[name]
            numbers = from_bits(values, self.dtype) if matrix else values.astype(np.float64)
            wrong = off(numbers, exact, slack, dtype)
            if wrong.any():
                first = tuple(map(int, np.argwhere(wrong)[0]))
                pytest.fail("%s: %d of %d elements of %s are wrong, the first is %s: %r, should be %r within %r" % (
                    what, wrong.sum(), wrong.size, name, first, float(numbers[first]), float(exact[first]),
                    float(slack[first])))
            ignored = self.targets == self.options.ignore_index
            if name in ("dlogits", "losses"):
                assert (values[ignored] == 0).all(), "%s: ignored rows' %s are not 0" % (what, name)
        bad = (self.targets != self.options.ignore_index) & ((self.targets < 0) | (self.targets >= self.V))
        assert self.status == (np.argmax(bad) if bad.any() else -1), what
        return got


def some_logits(rng, N, V, spread=3.0):
    """Of many sizes, a few of them large, so that there are large probabilities and tiny ones."""
    x = rng.standard_normal((N, V)) * spread
    peaks = rng.integers(0, max(V, 1), (N, 2))
    for row in range(0, N, 2) if V else ():
        x[row, peaks[row]] += 8
    return x


def some_case(dtype, N, V, seed=0, **arguments):
    rng = np.random.default_rng([seed, N, V])
    logits = some_logits(rng, N, V)
    targets = rng.integers(0, V, N)
    targets[::3] = logits[::3].argmax(1)
    return Case(dtype, logits, targets, **arguments)


def test_versions_are_known():
    assert VERSIONS == list(range(1, len(VERSIONS) + 1)) and len(VERSIONS) >= 4


# ---------------------------------------------------------------------------------------------------------------------
# the ruler itself

ALONE = [dict(label_smoothing=0.1), dict(label_smoothing=1.0), dict(z_loss=0.01), dict(z_loss=-0.5), dict(softcap=5.0),
         dict(softcap=30.0), dict(softcap=1e-3), dict(logit_scale=0.5), dict(logit_scale=-2.0), dict(logit_scale=0.0),
         dict(dloss=0.25), dict(dloss=-3.0), dict(dloss=0.0), dict(ignore_index=3), dict(ignore_index=INT_MAX)]
PAIRS = [{**one, **other} for one, other in itertools.combinations(ALONE, 2) if one.keys() != other.keys()]
ALL_OPTIONS = dict(dloss=0.5, logit_scale=1.5, softcap=10.0, label_smoothing=0.1, z_loss=0.01)


@pytest.mark.parametrize("options", [{}, *ALONE, *PAIRS], ids=str)
def test_finite_differences_of_the_reference(options):
    """Its gradient against its loss, in float64."""
    V, h = 6, 1e-5
    rng = np.random.default_rng(1)
    x, target, o = rng.standard_normal(V) * 2, 4, ClassifierOptions(**options)
    moved = np.concatenate([x + h * np.eye(V), x - h * np.eye(V)])
    losses = Reference(moved, np.full(2 * V, target), o).exact["losses"]
    gradient = Reference(x[None], np.array([target]), o).exact["dlogits"][0]
    assert gradient == pytest.approx(float(o.dloss) * (losses[:V] - losses[V:]) / (2 * h), rel=1e-5, abs=1e-7)


def test_a_wrong_element_is_seen():
    """An ulp more than the slack, in either direction; and what lies in it is not much: 16 bits are all right."""
    for dtype in DTYPES:
        case = some_case(dtype, 4, 50, label_smoothing=0.1)
        exact, slack = case.reference.exact["dlogits"], case.reference.slack["dlogits"]
        right = from_bits(to_bits(exact, dtype), dtype)
        assert not off(right, exact, slack, dtype).any()
        ulp = np.abs(right) * 2.0 ** -{FP32: 23, FP16: 10, BF16: 7}[dtype] + 2.0**-24
        for sign in (-1, 1):
            wrong = from_bits(to_bits(right + sign * (3 * ulp + 2 * slack), dtype), dtype)
            assert off(wrong, exact, slack, dtype).all()
        if dtype is not FP32:
            assert (slack < 0.05 * np.maximum(np.abs(exact), 2e-4)).all()
    assert off(np.array([np.nan, 1.0, np.inf]), np.array([1.0, np.nan, 1.0]), 0, FP32).all()


# ---------------------------------------------------------------------------------------------------------------------
# shapes and alignment

@every_version
@every_dtype
def test_shapes(dtype, version):
    for V in (*range(1, 36), 63, 64, 65, 255, 256, 257, 511, 513, 1000, 4095, 4097, 4103):
        for P in sorted({V, V + 1, -(-V // 8) * 8 + 8}):
            some_case(dtype, 2, V, P=P, label_smoothing=0.1).check(version, in_place=P % 2 == 1)


@every_version
@every_dtype
def test_large_vocabularies(dtype, version):
    """Every remainder of the vector width, up to 300,000."""
    for V in (50257, *range(300000 - VECTOR[dtype] + 1, 300001)):
        some_case(dtype, 1, V, P=-(-V // 64) * 64).check(version, ("dlogits", "losses", "lse"), in_place=True)


@every_version
def test_equal_logits(version):
    """Where all terms of a sum are the same, rounding errors go one way."""
    for V in (1001, 50257):
        for value in (0.0, 0.3, -7.1):
            logits = np.full((2, V), value)
            logits[1, 17] += 0.4
            Case(FP32, logits, [0, 17], label_smoothing=0.5).check(version)


@every_version
@every_dtype
def test_many_rows(dtype, version):
    """More than a grid of warps in a block, and rows of one element."""
    for N, V in ((1, 1), (300, 1), (65, 40)):
        some_case(dtype, N, V, P=V + 1, z_loss=0.1).check(version)


# Rows from 32 KB on are staged on the chip, those from 102 KB on by several blocks.
LONG = {FP32: (10241, 10246, 40963, 60001), FP16: (20482, 20487, 81921, 120007), BF16: (20481, 20488, 81925, 131071)}


@every_dtype
@pytest.mark.parametrize("version", VERSIONS[3:])
@pytest.mark.parametrize("which", range(4))
def test_long_rows(which, dtype, version):
    """More rows than are on the chip at a time, good, ignored and bad ones; aligned and not; with every option."""
    V = LONG[dtype][which]
    rows = 9 if V < 30000 or ON_CUDA else 5
    for k, (P, offsets, options) in enumerate((
            (V + 1, (0, 0, 0), {}), (V + 2, (1, 1, 1), dict(label_smoothing=0.1, z_loss=0.01)),
            (V + 3, (0, 1, 0), dict(softcap=15.0)), (-(-V // 128) * 128, (0, 0, 0), ALL_OPTIONS))):
        case = some_case(dtype, rows, V, P=P, offsets=offsets, **options)
        targets = case.targets.copy()
        targets[1], targets[3] = IGNORE, V
        case = Case(dtype, from_bits(case.bits[:, :V], dtype), targets, P=P, offsets=offsets, **options)
        case.check(version, in_place=True)
        case.check(version, ("dlogits", "losses"), in_place=k % 2 == 0)
        case.check(version, (("losses", "lse"), ("losses",), ("dlogits", "probs"), ("probs",))[k])


@pytest.mark.parametrize("dtype, V", [(BF16, 619850), (BF16, 619880), (FP32, 309925), (FP32, 309951), (FP16, 1000003),
                                      (FP32, 900001)], ids=str)
def test_very_long_rows(dtype, V):
    """Version 5's rows of 8 blocks and of 16, on either side of the limit, and rows that are too long for 16."""
    for P, offsets, options in ((V + 1, (0, 0, 0), {}), (V + 2, (1, 1, 1), dict(label_smoothing=0.1))):
        x = from_bits(some_case(dtype, 3, V, P=P).bits[:, :V], dtype)
        case = Case(dtype, x, [V - 1, IGNORE, 7], P=P, offsets=offsets, **options)
        case.check(5, ("dlogits", "losses"), in_place=True)


# ---------------------------------------------------------------------------------------------------------------------
# options

def option_case(dtype, options, **arguments):
    case = some_case(dtype, 7, 203, P=208, dlosses=np.array([1, 0.5, -2, 0, 1e-3, 7, 1], np.float32), **options,
                     **arguments)
    targets = case.targets.copy()
    targets[1], targets[4] = 3, IGNORE if case.options.ignore_index == IGNORE else case.options.ignore_index
    return Case(dtype, from_bits(case.bits[:, :203], dtype), targets, P=208, dlosses=case.dlosses, **options)


@every_version
@every_dtype
def test_options_alone(dtype, version):
    for options in ({}, *ALONE, ALL_OPTIONS):
        case = option_case(dtype, options)
        case.check(version, in_place=True)
        case.check(version, ("dlogits", "losses"))


@every_version
def test_softcap_at_every_size(version):
    """From where tanh is the identity to where it is 1: z and its slope keep their precision."""
    x = np.concatenate([-np.geomspace(1e-6, 200, 150), [0.0], np.geomspace(1e-6, 200, 150)])
    for cap in (0.01, 1.0, 5.0, 50.0):
        for dtype in DTYPES:
            for target in (0, 150, 220, 300):
                Case(dtype, x[None] * np.ones((2, 1)), [target, IGNORE], softcap=cap).check(version)


@every_version
@every_dtype
def test_finite_differences(dtype, version):
    """The library's own gradient against its own loss; in float, where 16-bit logits can't be moved a little."""
    V, h = 11, 2.0**-6
    rng = np.random.default_rng(2)
    x = np.round(rng.standard_normal(V) * 8) / 8
    for options in ({}, dict(label_smoothing=0.2), dict(z_loss=0.1), dict(softcap=3.0), ALL_OPTIONS):
        moved = Case(FP32, np.concatenate([x + h * np.eye(V), x - h * np.eye(V)]), np.full(2 * V, 3), **options)
        losses = moved.call(version, ("losses",))["losses"].astype(np.float64)
        case = Case(dtype, x[None], [3], **options)
        gradient = from_bits(case.call(version, ("dlogits",))["dlogits"][0], dtype)
        want = float(case.options.dloss) * (losses[:V] - losses[V:]) / (2 * h)
        assert gradient == pytest.approx(want, abs=4e-4 if dtype is FP32 else 4e-3), options


@every_version
@every_dtype
def test_a_rows_gradient_sums_to_zero(dtype, version):
    for options in ({}, dict(label_smoothing=0.3), dict(logit_scale=-0.5, dloss=8.0)):
        case = some_case(dtype, 6, 1003, P=1008, **options)
        d = from_bits(case.call(version, ("dlogits",))["dlogits"], dtype)
        each = {FP32: 2.0**-20, FP16: 2.0**-11, BF16: 2.0**-8}[dtype]
        allowed = each * np.abs(d).sum(1) + (1003 * 2.0**-25 if dtype is FP16 else 0)
        assert (np.abs(d.sum(1)) <= allowed).all(), options


# ---------------------------------------------------------------------------------------------------------------------
# precision

@every_version
def test_a_common_offset_costs_nothing(version):
    """1e4 in float: the loss stays what it is to 1e-3, of which the most is the rounding of the logits."""
    rng = np.random.default_rng(3)
    x = np.round(some_logits(rng, 5, 777) * 64) / 64
    plain, moved = Case(FP32, x, np.arange(5), label_smoothing=0.1), Case(FP32, x + 1e4, np.arange(5),
                                                                          label_smoothing=0.1)
    a, b = plain.check(version), moved.check(version)
    assert np.abs(a["losses"] - b["losses"]).max() < 1e-3
    assert b["lse"] == pytest.approx(a["lse"] + 1e4, abs=2e-3)
    difference = np.abs(from_bits(a["dlogits"], FP32) - from_bits(b["dlogits"], FP32))
    assert difference.max() < 2e-6  # these logits survive the offset exactly


@every_version
def test_a_common_offset_in_16_bits(version):
    rng = np.random.default_rng(4)
    x = rng.integers(-3, 4, (5, 777)) * 32.0
    for dtype, offset in ((FP16, 3e4), (FP16, -3e4), (BF16, 4096.0)):
        case = Case(dtype, x + offset, np.arange(5), label_smoothing=0.1)
        assert np.isfinite(case.check(version)["losses"]).all()


@every_version
@every_dtype
def test_probabilities_close_to_one(dtype, version):
    """p - 1 is formed before it is rounded: its value is small, and right."""
    for rest in (1e-2, 1e-3, 3e-4):
        V = 100
        logits = np.zeros((3, V))
        logits[:, 7] = np.log((V - 1) * (1 - rest) / rest)
        case = Case(dtype, logits, [7, 7, 8])
        got = from_bits(case.check(version)["dlogits"], dtype)
        exact = case.reference.exact["dlogits"]
        exponent = np.maximum(np.floor(np.log2(np.abs(exact))), -14 if dtype is FP16 else -126)
        ulp = 2.0 ** (exponent - {FP32: 23, FP16: 10, BF16: 7}[dtype])
        if dtype is BF16 or (dtype is FP16 and rest >= 1e-3):  # below that, fp16 has more bits than are left of p - 1
            assert (np.abs(got - exact) <= ulp).all(), rest
        assert 0.9 * rest < -got[0, 7] < 1.1 * rest


@every_version
def test_large_numbers(version):
    """To where float ends, or close to it."""
    with np.errstate(over="ignore"):
        for dtype in (FP32, BF16):
            for big in (1e30, 1e38, -1e38):
                Case(dtype, [[0, big, 1, 2], [big, big, big, big / 2], [-big, 0, 0, big]], [1, 2, 3]).check(version)
    for big in (1e38, -3.3e38):  # what is common to a row is taken off before anything is added up
        Case(BF16, np.full((2, 1000), big), [1, 999], label_smoothing=0.1).check(version)
    masked = np.zeros((2, 50))
    masked[:, 10:] = -3.38e38  # how masks are often written
    Case(BF16, masked, [3, 3]).check(version)
    Case(FP16, [[65504, -65504, 0], [-65504, -65504, -65504]], [0, 1]).check(version)


LOWEST = {FP32: np.finfo(np.float32).min, FP16: -65504.0, BF16: -(2 - 2.0**-7) * 2.0**127}


@every_version
def test_smoothed_losses_of_masked_targets(version):
    """The sum of what lies between the logits and the largest may be far beyond float, and the loss isn't."""
    x = np.random.default_rng(11).standard_normal((4, 100))
    for dtype, want in ((FP32, 3.066e38), (BF16, 3.054e38)):
        x[0, 7] = x[1, 7] = x[1, 8] = x[2, 7] = LOWEST[dtype]
        x[3, 7] = -1e37
        losses = Case(dtype, x, [7, 7, 8, 7], label_smoothing=0.1).check(version)["losses"]
        assert losses[0] == pytest.approx(want, rel=1e-3) and np.isfinite(losses).all()


@every_version
@every_dtype
@pytest.mark.parametrize("V", [3, 100, 1003, 21000])
def test_smoothed_losses_of_outliers(V, dtype, version):
    """One logit far from all others, anywhere, as the target and not; and two at the ends of the type's range. The loss
    is infinite only where the exact one is beyond float."""
    rng = np.random.default_rng(V)
    far = sorted({-1e4, -1e9, -1e37, LOWEST[dtype], 1e4, 1e37, -LOWEST[dtype]} if dtype is not FP16 else
                 {-1e4, LOWEST[dtype], 1e4, -LOWEST[dtype]})
    places = [0, 1, V // 2, V - 1]
    x = rng.standard_normal((2 * len(far) * len(places) + 4, V))
    targets = np.full(len(x), V - 2)
    for i, (value, place) in enumerate([(value, place) for value in far for place in places]):
        x[2 * i:2 * i + 2, place] = value
        targets[2 * i] = place
    x[-4:, [0, V - 1]] = LOWEST[dtype], -LOWEST[dtype]
    targets[-4:] = 0, V - 1, 1, 0
    x[-1, 1:] = -LOWEST[dtype]
    if V > 10000 and not ON_CUDA:
        keep = [*range(0, len(x), 7), *range(len(x) - 4, len(x))]
        x, targets = x[keep], targets[keep]
    for options in (dict(label_smoothing=0.1), dict(label_smoothing=1.0), dict(label_smoothing=1e-6),
                    dict(label_smoothing=0.9, logit_scale=0.25), dict(label_smoothing=0.3, logit_scale=1e-30),
                    dict(label_smoothing=0.3, logit_scale=-1.0), dict(label_smoothing=1e-4, logit_scale=100.0),
                    dict(label_smoothing=0.2, softcap=30.0)):
        Case(dtype, x, targets, **options).check(version, ("losses",))
        if options["label_smoothing"] == 0.1:
            Case(dtype, x, targets, P=V + 1, **options).check(version)


@every_version
def test_smoothed_losses_keep_their_digits(version):
    """With a row's logits a common offset apart from 0, with one of them an outlier that is as near as its loss allows,
    and with numbers so small that a scale makes them count: a few roundings of the loss itself."""
    V = 1000
    x = np.round(np.random.default_rng(12).standard_normal(V) * 64) / 64
    for moved, scale in ((x, 1.0), (x + 4096, 1.0), (x * 2.0**-120, 2.0**120), (x * 2.0**-140, 2.0**126),
                         (x * 2.0**100, 2.0**-100), (np.where(np.arange(V) == 0, -5000, x), 1.0)):
        case = Case(FP32, moved[None], [5], label_smoothing=0.5, logit_scale=scale)
        loss = case.call(version, ("losses",))["losses"][0]
        assert loss == pytest.approx(case.reference.exact["losses"][0], rel=1e-6), scale


@every_version
def test_logits_that_only_a_scale_makes_small(version):
    """Differences of logits overflow, and those of z are a few units: probabilities and losses are ordinary."""
    big = 3e38
    x = np.array([[-big, big, 0, big / 2, -big / 2] * 9, [big, -big, -big, -big, -big] * 9])
    for V in (5, 45):
        for scale in (1e-38, -1e-38, 4e-38):
            Case(FP32, x[:, :V], [0, 1], logit_scale=scale, label_smoothing=0.1).check(version)


@every_version
@pytest.mark.parametrize("exponent", [10, 23, 26, 29, 30, 31, 40, 90, 126])
def test_neighbours_at_every_size(exponent, version):
    """Logits that are a few roundings apart, where these are small numbers and where they are large ones: around the
    largest that an exponential's point is formed of (2^30 powers of two, which a scale moves), and far from it."""
    rng = np.random.default_rng(exponent)
    for sign, scale in ((1, 1), (-1, 1), (1, 1 / 1024), (1, 0.7)):
        V = 10241 if version >= 5 and sign * scale == 1 else 77
        steps = rng.integers(0, 60, (4, V))
        steps[1] *= rng.integers(0, 2, V)
        base = np.float32(sign * 2.0**exponent)
        x = base.view(np.int32) - sign * steps.astype(np.int32)
        x = x.view(np.float32).astype(np.float64)
        x[2, 5:] -= abs(x[2, 5:]) / 8  # few are near the largest
        x[3, ::3] = 0
        Case(FP32, x, [0, 1, 2, 3], logit_scale=scale).check(version)
        Case(FP32, x, [3, 2, 1, 0], logit_scale=scale, label_smoothing=0.1).check(version, in_place=True)


# ---------------------------------------------------------------------------------------------------------------------
# infinities and NaN

def special_rows(V):
    """(name, row, whether everything of it is NaN), each for a vocabulary of V."""
    rng = np.random.default_rng(5)
    inf = np.inf

    def row(**places):
        x = rng.standard_normal(V)
        for place, value in places.items():
            x[int(place[1:]) % V] = value
        return x

    begins, ends, first, last = row(), row(), row(), row()
    begins[:V // 2] = -inf
    ends[V // 2:] = -inf
    first[1:], last[:-1] = -inf, -inf
    every_other = row()
    every_other[::2] = -inf
    return [("begins", begins, False), ("ends", ends, False), ("first only", first, False), ("last only", last, False),
            ("every other", every_other, False), ("one -inf", row(_5=-inf), False), ("nothing", np.full(V, -inf), True),
            ("+inf", row(_3=inf), True), ("+inf last", row(_999=inf), True), ("two +inf", row(_3=inf, _70=inf), True),
            ("both", row(_0=-inf, _1=inf), True), ("all +inf", np.full(V, inf), True), ("NaN", row(_9=np.nan), True),
            ("NaN first", row(_0=np.nan), True), ("all NaN", np.full(V, np.nan), True),
            ("NaN and +inf", row(_2=np.nan, _3=inf), True),
            ("NaN among -inf", np.where(np.arange(V) == 6, np.nan, -inf), True)]


@every_version
@every_dtype
@pytest.mark.parametrize("V", [77, 1000])
def test_special_rows(V, dtype, version):
    rows = special_rows(V)
    logits = np.array([row for _, row, _ in rows])
    poisoned = np.array([nan for _, _, nan in rows])
    for target in (0, 3, V - 1):
        for options in ({}, dict(label_smoothing=0.1), dict(z_loss=0.01), dict(logit_scale=-1.0)):
            case = Case(dtype, logits, np.full(len(rows), target), P=V + 3, **options)
            got = case.check(version, in_place=target == 3)
            if "logit_scale" in options:
                continue
            for name in ("losses", "lse"):
                assert np.isnan(got[name][poisoned]).all()
            for name in ("dlogits", "probs"):
                numbers = from_bits(got[name][:, :V], dtype)
                assert np.isnan(numbers[poisoned]).all() and np.isfinite(numbers[~poisoned]).all()
            assert np.isfinite(got["lse"][~poisoned]).all()


@every_version
@every_dtype
def test_special_rows_under_a_softcap(dtype, version):
    """There infinities are the cap; NaN stays NaN."""
    rows = special_rows(77)
    logits = np.array([row for _, row, _ in rows])
    got = Case(dtype, logits, np.full(len(rows), 3), softcap=4.0, label_smoothing=0.1).check(version)
    assert (np.isnan(got["losses"]) == np.isnan(logits).any(1)).all()


@every_version
def test_ties(version):
    """Of equal logits the first counts; and before a softcap makes them equal."""
    x = np.zeros((6, 300))
    x[0, [5, 290]] = x[1, [5, 290]] = x[2, [5, 6]] = 2
    x[3, 40], x[4, 40] = 400, 404
    x[3, 41], x[4, 41] = 404, 400
    targets = [5, 290, 6, 40, 40, 0]
    assert list(Case(BF16, x, targets).check(version)["correct"]) == [1, 0, 0, 0, 1, 1]
    assert list(Case(FP32, x, targets, softcap=1.0).check(version)["correct"]) == [1, 0, 0, 0, 1, 1]
    assert list(Case(FP32, -x, targets, logit_scale=-1.0).check(version)["correct"]) == [1, 0, 0, 0, 1, 1]
    assert list(Case(FP32, x, targets, logit_scale=0.0).check(version)["correct"]) == [0, 0, 0, 0, 0, 1]


# ---------------------------------------------------------------------------------------------------------------------
# targets

@every_version
@every_dtype
def test_ignored_rows(dtype, version):
    """Nothing of them is NaN, whatever they hold; lse and probs are as for any row."""
    x = some_logits(np.random.default_rng(6), 8, 133)
    x[2], x[3], x[4, 7], x[5, 0] = np.nan, -np.inf, np.inf, np.nan
    for targets in ([5, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE, 7, 8], [IGNORE] * 8):
        case = Case(dtype, x, targets, P=136, label_smoothing=0.1, z_loss=0.1)
        for wanted in (OUTPUTS, ("dlogits", "losses"), ("dlogits", "losses", "correct"), ("dlogits", "probs"),
                       ("lse",)):
            for in_place in (False, True):
                case.check(version, wanted, in_place and "dlogits" in wanted)


@every_version
@pytest.mark.parametrize("ignore", [0, 5, 99, -1, 100, INT_MIN, INT_MAX])
def test_any_number_may_be_the_ignored_one(ignore, version):
    x = some_logits(np.random.default_rng(7), 6, 100)
    got = Case(BF16, x, [ignore, 5, 0, 99, ignore, 7], ignore_index=ignore).check(version)
    assert (got["losses"] == 0).sum() >= 2


@every_version
@every_dtype
def test_bad_targets(dtype, version):
    x = some_logits(np.random.default_rng(8), 7, 50)
    x[5, 3] = np.nan
    for targets, first in (([1, 2, 50, -1, INT_MAX, INT_MIN, IGNORE], 2), ([-99, -101, 3, 50, 49, 50, IGNORE], 0)):
        for in_place in (False, True):
            case = Case(dtype, x, targets, P=53, label_smoothing=0.1)
            case.check(version, in_place=in_place)
            assert case.status == first
            case.check(version, ("dlogits",), in_place)
            case.check(version, ("losses",))
            case.check(version, ())
            assert case.status == first


@every_version
def test_status_keeps_the_smallest(version):
    case = some_case(FP16, 5, 20)
    for before, targets, after in ((-1, [1, 20, 3, 20, 1], 1), (0, [1, 20, 3, 20, 1], 0), (3, [1, 2, 3, 4, 20], 3),
                                   (4, [1, 2, -5, 4, 20], 2), (7, [1, 2, 3, 4, 5], 7)):
        status = status_array(before)
        logits = Array(100, np.uint16).put(case.bits)
        code, word = bookends.classifier_fused(None, Array(5, np.float32), None, None, None, logits,
                                               Array(5, np.int32).put(targets), None, status, 5, 20, 20, None, FP16,
                                               version)
        assert (code, word) == (OK, after)


@every_version
def test_no_vocabulary(version):
    """V = 0: whatever is not ignored is bad; padding is zeroed."""
    for P in (0, 5, 16):
        case = Case(BF16, np.zeros((3, 0)), [IGNORE, 0, IGNORE], P=P)
        got = case.check(version)
        assert list(np.isnan(got["losses"])) == [False, True, False] and np.isnan(got["lse"]).all()


# ---------------------------------------------------------------------------------------------------------------------
# what is wanted, and where it goes

def assert_same(got, want, what=""):
    """The same bits. NaN of 32 bits are equal: a GPU's arithmetic gives another payload than a constant has."""
    for name in got:
        a, b = got[name], want[name]
        equal = a.view("u%d" % a.itemsize) == b.view("u%d" % b.itemsize)
        if a.itemsize == 4:
            equal |= np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32))
        assert equal.all(), (name, what)


@every_version
@every_dtype
def test_every_choice_of_outputs(dtype, version):
    """Each output has the same bits whatever else is wanted. (What is not wanted has no place to go to; the guards of
    the others, and the logits, show that it goes nowhere.)"""
    x = some_logits(np.random.default_rng(9), 5, 301)
    case = Case(dtype, x, [3, IGNORE, 300, 301, 0], P=304, z_loss=0.01)
    everything = case.check(version)
    for count in range(len(OUTPUTS)):
        for wanted in itertools.combinations(OUTPUTS, count):
            assert_same(case.call(version, wanted), everything, wanted)


@every_version
@every_dtype
@pytest.mark.parametrize("V, P, offset", [(1000, 1000, 0), (1003, 1003, 1), (517, 640, 3), (4099, 4104, 0)])
def test_in_place_is_the_same(V, P, offset, dtype, version):
    for options in ({}, dict(label_smoothing=0.1, softcap=30.0)):
        case = some_case(dtype, 5, V, P=P, offsets=(offset, 0, 5), **options)
        assert_same(case.call(version, in_place=True), case.call(version), options)


@every_version
@every_dtype
def test_the_same_bits_each_time(dtype, version):
    case = some_case(dtype, 40, 2011, P=2016, label_smoothing=0.1)
    first = case.call(version)
    for _ in range(3):
        assert_same(case.call(version), first)


@every_version
def test_rows_do_not_depend_on_each_other(version):
    """A row alone gives the bits that it gives among others, where it is as aligned."""
    case = some_case(BF16, 6, 333, P=336)
    together = case.call(version)
    for row in range(6):
        alone = Case(BF16, from_bits(case.bits[row:row + 1, :333], BF16), case.targets[row:row + 1], P=336)
        assert_same(alone.call(version), {name: values[row:row + 1] for name, values in together.items()})


# ---------------------------------------------------------------------------------------------------------------------
# the library's promises

@every_dtype
@pytest.mark.parametrize("version", [0, *VERSIONS])
def test_no_rows_are_no_work(dtype, version):
    for V, P in ((0, 0), (5, 8), (INT_MAX, INT_MAX)):
        nothing = bookends.classifier_fused(*[None] * 9, 0, V, P, None, dtype, version)
        assert nothing == (OK, None), (V, P)
        losses, status = Array(4, np.float32, VALUE_FILL), status_array()
        assert bookends.classifier_fused(None, losses, None, None, None, None, None, None, status, 0, V, P, None, dtype,
                                         version) == (OK, -1)
        assert losses.get().tobytes() == bytes([VALUE_FILL]) * 16 and losses.guards_intact()


def test_version_0_is_the_last():
    case = some_case(BF16, 5, 333)
    assert_same(case.check(0), case.check(VERSIONS[-1]))


def test_no_options_are_the_defaults():
    case = some_case(FP32, 5, 40)
    default = case.call(0)
    case.options = None
    assert_same(case.call(0), default)


def call_with(**changes):
    """(code, whether losses and dlogits were left alone) of a call that is fine but for the changes."""
    case = some_case(FP16, 3, 8)
    options = {name: changes.pop(name) for name, _ in ClassifierOptions._fields_ if name in changes}
    dlogits, losses, status = Array(24, np.uint16, VALUE_FILL), Array(3, np.float32, VALUE_FILL), status_array()
    arguments = dict(dlogits=dlogits, losses=losses, lse=None, probs=None, correct=None,
                     logits=Array(24, np.uint16).put(case.bits), targets=Array(3, np.int32).put(case.targets),
                     dlosses=None, status=status, N=3, V=8, P=8, options=ClassifierOptions(**options), dtype=FP16,
                     version=0)
    arguments.update(changes)
    code = bookends.classifier_fused(**arguments)[0]
    untouched = all(set(array.get().tobytes()) == {VALUE_FILL} for array in (dlogits, losses))
    return code, untouched and int(status.get()[0]) == -1


@pytest.mark.parametrize("changes, code", [
    (dict(logits=None), bookends.ERROR_NULL), (dict(targets=None), bookends.ERROR_NULL),
    *[({size: value}, bookends.ERROR_SHAPE) for size in "NVP" for value in (-1, INT_MIN)],
    (dict(P=7), bookends.ERROR_SHAPE), (dict(V=9), bookends.ERROR_SHAPE), (dict(N=0, P=7), bookends.ERROR_SHAPE),
    (dict(N=-1, logits=None), bookends.ERROR_SHAPE),
    *[({name: value}, bookends.ERROR_OPTIONS)
      for name in ("dloss", "logit_scale", "softcap", "label_smoothing", "z_loss")
      for value in (np.nan, np.inf, -np.inf)],
    (dict(softcap=-1.0), bookends.ERROR_OPTIONS), (dict(softcap=-1e-30), bookends.ERROR_OPTIONS),
    (dict(softcap=1e-30, logit_scale=1e30), bookends.ERROR_OPTIONS), (dict(softcap=3e38), bookends.ERROR_OPTIONS),
    (dict(logit_scale=3e38), bookends.ERROR_OPTIONS), (dict(logit_scale=-3e38), bookends.ERROR_OPTIONS),
    (dict(label_smoothing=-1e-6), bookends.ERROR_OPTIONS), (dict(label_smoothing=1.001), bookends.ERROR_OPTIONS),
    (dict(N=0, label_smoothing=2), bookends.ERROR_OPTIONS),
    *[(dict(dtype=value), bookends.ERROR_DTYPE) for value in (3, -1, 1000)],
    *[(dict(version=value), bookends.ERROR_VERSION) for value in (-1, len(VERSIONS) + 1, INT_MAX, INT_MIN)],
], ids=str)
def test_refused_calls_launch_nothing(changes, code):
    assert call_with() == (OK, False)
    assert call_with(**changes) == (code, True)
    bookends.check_last_message("bk_classifier_fused", code, changes)


@pytest.mark.parametrize("changes", [
    dict(softcap=1e30), dict(softcap=1e-30), dict(label_smoothing=1.0), dict(label_smoothing=1e-30), dict(z_loss=-1.0),
    dict(logit_scale=-1.0), dict(dloss=0), dict(dloss=-1e30), dict(dlogits=None, losses=None), dict(status=None),
], ids=str)
def test_calls_that_are_fine(changes):
    assert call_with(**changes)[0] == OK


def test_the_word_for_bad_options():
    assert "option" in bookends.error_string(bookends.ERROR_OPTIONS)


@pytest.mark.skipif(ON_CUDA, reason="needs the CUDA runtime that the library is linked with")
@every_version
def test_an_error_left_behind_is_not_the_calls(version):
    with bookends.pending_error():
        some_case(BF16, 2, 9).check(version)


# ---------------------------------------------------------------------------------------------------------------------
# streams and graphs

@needs_cuda
@every_version
def test_runs_on_the_stream_it_is_given(version):
    """The targets arrive on that stream late: a launch on any other would see the old ones, which are bad."""
    import torch
    case = some_case(BF16, 64, 1000)
    late = torch.from_numpy(case.targets.view(np.uint8).copy()).cuda()
    logits, targets = Array(64000, np.uint16).put(case.bits), Array(64, np.int32)
    losses, status = Array(64, np.float32, VALUE_FILL), status_array()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        targets.memory[targets.start:targets.end].copy_(late)
    code, _ = bookends.classifier_fused(logits, losses, None, None, None, logits, targets, None, status, 64, 1000, 1000,
                                        None, BF16, version, stream.cuda_stream)
    assert code == OK
    assert not stream.query(), "the call waited for the device"
    exact, slack = case.reference.exact, case.reference.slack
    assert not off(losses.get().astype(np.float64), exact["losses"], slack["losses"], FP32).any()
    assert not off(from_bits(logits.get().reshape(64, 1000), BF16), exact["dlogits"], slack["dlogits"], BF16).any()
    assert int(status.get()[0]) == -1


@needs_cuda
@every_version
@every_dtype
def test_graph_replay_with_other_logits(dtype, version):
    """Captured once with options that are gone by then, and replayed in place."""
    import torch
    options = dict(softcap=20.0, label_smoothing=0.1)
    case = some_case(dtype, 30, 1500, P=1504, **options)
    case.call(version)
    logits, targets = Array(30 * 1504, dtype.bits), Array(30, np.int32).put(case.targets)
    losses, status = Array(30, np.float32, VALUE_FILL), status_array()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        code, _ = bookends.classifier_fused(logits, losses, None, None, None, logits, targets, None, status, 30, 1500,
                                            1504, ClassifierOptions(**options), dtype, version,
                                            torch.cuda.current_stream().cuda_stream)
    assert code == OK
    for replay in range(3):
        now = some_case(dtype, 30, 1500, replay, P=1504, **options)
        logits.put(now.bits)
        targets.put(now.targets)
        torch.cuda.synchronize()
        graph.replay()
        exact, slack = now.reference.exact, now.reference.slack
        got = from_bits(logits.get().reshape(30, 1504)[:, :1500], dtype)
        assert not off(got, exact["dlogits"], slack["dlogits"], dtype).any(), replay
        assert not off(losses.get().astype(np.float64), exact["losses"], slack["losses"], FP32).any(), replay
    assert int(status.get()[0]) == -1


# ---------------------------------------------------------------------------------------------------------------------
# the command line

SMALL = ["-b", 2, "-t", 6, "-v", 300]
ITEM = {"fp32": 4, "fp16": 2, "bf16": 2}


def classifier(*arguments):
    return bookends.run("classifier_fused", *arguments)


def refused(*arguments, words):
    """Nothing on stdout; on stderr one line with each of the words."""
    result = classifier(*SMALL, *arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result
    assert result.stderr.startswith("classifier_fused: ")
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def record_of(*arguments):
    result = classifier(1, *SMALL, "--bench", "--repeat", 1, "--block-size", 256, "--json", "-", *arguments)
    assert result.returncode == 0, result
    return json.loads(result.stdout)


@every_version
@pytest.mark.parametrize("dtype", ITEM)
def test_the_files_own_check(dtype, version):
    """Each kind of logits, each output, each option."""
    for arguments in ([], ["--logits", "peaked", "--label-smoothing", 0.1, "--accuracy", "--lse"],
                      ["--logits", "uniform", "--softcap", 0.5, "--probs", "--output", "other", "-p", 301],
                      ["--output", "none", "--z-loss", 0.1, "--logit-scale", -2, "--ignore-every", 5, "--accuracy"],
                      ["--logits", "peaked", "--softcap", 0.5, "--accuracy"],
                      ["--logits", "peaked", "--probs", "--softcap", 20, "--ignore-every", 1],
                      ["--logit-scale", 0, "--softcap", 3], ["-v", 1, "-p", 2, "--label-smoothing", 1]):
        result = classifier(version, "-b", 1, "-t", 5, "-v", 300, "--check", "--dtype", dtype, *arguments)
        assert (result.returncode, result.stderr) == (0, ""), (arguments, result)
        same = r"the same bits each time( at a block size)?"
        last = result.stdout.splitlines()[-1]
        assert re.fullmatch(r"check: max error 0\.0 beyond the bounds of float sums \(allowed 0 .+ ulp\) " \
                            r"over \d+ elements, %s: ok" % same, last), last


def test_the_heading_says_what_was_asked_for():
    def heading(*arguments):
        return classifier(1, *SMALL, "--check", *arguments).stdout.splitlines()[1].split(": ")[1]

    assert heading() == "B=2 T=6 V=300 P=384 bf16 tokens=uniform"
    assert heading("-v", 256) == "B=2 T=6 V=256 P=256 bf16 tokens=uniform"
    assert heading("-p", 300) == "B=2 T=6 V=300 P=300 bf16 tokens=uniform"
    assert heading("--output", "other", "--logits", "peaked", "--probs", "--lse", "--accuracy") == \
        "B=2 T=6 V=300 P=384 bf16 tokens=uniform logits=peaked output=other probs lse accuracy"
    assert heading("--softcap", "30", "--z-loss", "1e-4", "--label-smoothing", ".1", "--logit-scale", "-0.5",
                   "--ignore-every", "4").endswith(
        " tokens=uniform label_smoothing=0.1 z_loss=0.0001 softcap=30 logit_scale=-0.5 ignore_every=4")


def test_options_in_json():
    record = record_of()
    assert [record[key] for key in "BTCVPN"] == [2, 6, None, 300, 384, 12]
    assert [record[key] for key in ("logits", "output", "probs", "lse", "accuracy", "label_smoothing", "z_loss",
                                    "softcap", "logit_scale", "ignore_every")] == \
        ["gaussian", "in-place", False, False, False, 0, 0, 0, 1, 0]
    record = record_of("--logits", "uniform", "--output", "none", "--lse", "--softcap", 0.1, "--ignore-every", 3)
    assert [record[key] for key in ("logits", "output", "lse", "softcap", "ignore_every")] == \
        ["uniform", "none", True, 0.1, 3]


@pytest.mark.parametrize("dtype", ITEM)
def test_fewest_bytes(dtype):
    """Logits once without their padding, gradient and probabilities with it; targets, and a float or int a row."""
    item, N, V, P = ITEM[dtype], 12, 300, 384
    for arguments, rows_read, matrices, vectors in (
            ([], N, 1, 2), (["--output", "other"], N, 1, 2), (["--output", "none"], N, 0, 2),
            (["--probs"], N, 2, 2), (["--output", "none", "--probs", "--lse"], N, 1, 3),
            (["--lse", "--accuracy"], N, 1, 4), (["--ignore-every", 5], 10, 1, 2), (["--ignore-every", 1], 0, 1, 2),
            (["--ignore-every", 5, "--lse"], N, 1, 3), (["--ignore-every", 13], N, 1, 2)):
        record = record_of("--dtype", dtype, *arguments)
        assert record["bytes"] == (rows_read * V + matrices * N * P) * item + vectors * N * 4, arguments
    assert record_of("--dtype", dtype, "-p", 300)["bytes"] == 2 * N * V * item + 2 * N * 4


def test_bad_options():
    refused("-p", 299, words=["-p", "'299'", "300"])
    refused("-p", 0, words=["-p", "'0'", "1 to"])
    refused("-c", 5, words=["'-c'"])
    refused("--logits", "normal", words=["--logits", "'normal'", "gaussian, peaked, uniform"])
    refused("--output", "inplace", words=["--output", "'inplace'", "in-place, other, none"])
    for option, values, allowed in (("--label-smoothing", ("-0.1", "1.01", "x", "nan", ""), "0 to 1"),
                                    ("--z-loss", ("-1", "1e7", "inf"), "0 to 1e+06"),
                                    ("--softcap", ("-30", "1e7", "0x1", " 3"), "0 to 1e+06"),
                                    ("--logit-scale", ("1e7", "-1e7", "one"), "-1e+06 to 1e+06"),
                                    ("--ignore-every", ("-1", "2.5", "x", "2147483648"), "0 to 2147483647")):
        refused(option, words=[option, "value"])
        for value in values:
            refused(option, value, words=[option, "'%s'" % value, allowed])
    refused("--softcap", "1e-36", "--logit-scale", "1e6", words=["--softcap", "--logit-scale"])
    refused("-b", 2**31 - 1, "-t", 2, words=["B*T", "-b, -t"])


def test_help_knows_the_default_of_p():
    text = classifier("--help").stdout
    assert re.search(r"^  -p INT +P, default V rounded up to a multiple of 128$", text, re.M)
    for option in ("--logits VALUE", "--output VALUE", "--probs", "--lse", "--accuracy", "--label-smoothing NUMBER",
                   "--z-loss NUMBER", "--softcap NUMBER", "--logit-scale NUMBER", "--ignore-every INT"):
        assert re.search(r"^  %s  +\S" % option, text, re.M), option


def test_the_reference_alone():
    result = classifier(0, *SMALL, "--probs", "--lse", "--accuracy")
    assert (result.returncode, result.stderr) == (0, "") and re.search(r"^time \d+\.\d{4} ms", result.stdout, re.M)


def test_list_and_header_agree():
    header = (bookends.ROOT / "classifier_fused.cu").read_text().split("*/")[0]
    assert list(map(int, re.findall(r"^version (\d+) ", header, re.M))) == VERSIONS
