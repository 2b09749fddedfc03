"""encoder_backward, every version and every pair of types, through the library and against numpy float64.

A sum in float depends on the order of its terms, so a result may be anything between the roundings of the exact sum
less and plus a slack, which follows from how a version adds. The slack is zero where every order gives the same: where
there is but one addition, and where the terms are small whole numbers, which most tests here use.

Most shapes here are small: on the CPU device every thread takes its time, and the versions that group positions by
their ids start blocks of 1,024 threads for a few positions.
"""

import collections
import concurrent.futures
import contextlib

import numpy as np
import pytest

import bookends
from bookends import (Array, BF16, CHANNELS, FP16, FP32, INFINITY, INT_MAX, INT_MIN, NAN_FILL, OK, ON_CUDA, OVERWRITE,
                      STOCHASTIC, VALUE_FILL, from_bits, needs_cuda, or_skip, random_bits, random_ids, status_array,
                      to_bits)

VERSIONS = bookends.versions("encoder_backward")
IN_MEMORY = (1, 2, 3)  # add in memory, in the gradients' type: 16 bits are rounded at every addition
ATOMIC = (1, 3)        # add in any order
IN_FLOAT = [version for version in VERSIONS if version not in IN_MEMORY]  # round once, and can do so at random
BOTH = ("dwte", "dwpe")

Types = collections.namedtuple("Types", "dtype grad")
TYPES = [Types(FP32, FP32), Types(FP16, FP16), Types(BF16, BF16), Types(FP16, FP32), Types(BF16, FP32)]
ALL_FP32, ALL_FP16, ALL_BF16, FP16_TO_FP32, BF16_TO_FP32 = TYPES


def types_name(types):
    return types.dtype.name if types.dtype is types.grad else "%s-%s" % (types.dtype.name, types.grad.name)


every_types = pytest.mark.parametrize("types", TYPES, ids=types_name)
bf16_types = pytest.mark.parametrize("types", [ALL_BF16, BF16_TO_FP32], ids=types_name)
types_of_16_bits = pytest.mark.parametrize("types", [ALL_FP16, ALL_BF16], ids=types_name)
every_version = pytest.mark.parametrize("version", VERSIONS)
every_version_in_float = pytest.mark.parametrize("version", IN_FLOAT)
# For what takes long on the CPU device: there the versions between "grouped" and the last are left out.
most_versions = pytest.mark.parametrize("version", VERSIONS if ON_CUDA else sorted({*VERSIONS[:5], *VERSIONS[-1:]}))


# ---------------------------------------------------------------------------------------------------------------------
# the reference, and one call compared with it

class Sums:
    """The terms added up by their targets: the rows that have any, in order, and of each row how many terms, their sum
    and the sum of their magnitudes."""

    def __init__(self, targets, terms):
        order = np.argsort(targets, kind="stable")
        self.rows, first, self.count = np.unique(targets[order], return_index=True, return_counts=True)
        self.total = self.magnitude = np.zeros((0, terms.shape[1]))
        if self.rows.size:
            with np.errstate(invalid="ignore"):
                self.total = np.add.reduceat(terms[order], first, axis=0)
                self.magnitude = np.add.reduceat(np.abs(terms[order]), first, axis=0)


def neighbours(values, dtype):
    """The largest number of dtype that is not above each value, and the smallest that is not below."""
    bits = to_bits(values, dtype).astype(np.int64)
    sign = 1 << (8 * np.dtype(dtype.bits).itemsize - 1)
    place = np.where(bits & sign, sign - bits, bits)  # in the order of the numbers

    def at(places):
        return from_bits(np.where(places < 0, sign - places, places).astype(dtype.bits), dtype)

    nearest = at(place)
    return at(place - (nearest > values)), at(place + (nearest < values))


def interval(exact, slack, dtype, stochastic):
    """The smallest and the largest result of a rounding of anything within the slack."""
    low, high = exact - slack, exact + slack
    nearest_low, nearest_high = from_bits(to_bits(low, dtype), dtype), from_bits(to_bits(high, dtype), dtype)
    if not stochastic:
        return nearest_low, nearest_high
    return (np.where(np.isfinite(nearest_low), neighbours(low, dtype)[0], nearest_low),
            np.where(np.isfinite(nearest_high), neighbours(high, dtype)[1], nearest_high))


def slack_of(sums, before, version, grad, whole):
    """How far a sum in float (or in memory) may be from the exact one; `before`: what its rows held."""
    step = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}[grad if version in IN_MEMORY else FP32]
    count, scale = sums.count[:, None], np.abs(before) + sums.magnitude
    result = 8 * 2.0**-24 * scale
    if version in IN_MEMORY:
        result += count * step * scale
    exact = count - 1 + (before != 0) <= 1
    if whole:
        exact |= scale <= 1 / step
    result[exact | ~np.isfinite(scale)] = 0
    if version in ATOMIC and grad is FP32:
        result += (2 * count + 1) * 2.0**-126  # a GPU's atomics take subnormals for zeros
    return result


class Case:
    """Inputs on the device, what the gradients hold before, and the exact sums. `whole`: dout and the gradients before
    are whole numbers from -8 to 8. Positions with a bad id hold NaN in dout. offsets: by how many elements dwte, dwpe,
    dout and inp, and by how many bytes the workspace, are off a multiple of 256 bytes."""

    def __init__(self, types, ids, C, V, seed=0, offsets=(0, 0, 0, 0, 0), whole=True, dout=None, dwte=None, dwpe=None):
        rng = np.random.default_rng([seed, *ids.shape, C, V, types.dtype.code])
        self.types, self.ids, self.C, self.V, self.offsets = types, np.asarray(ids, np.int32), C, V, offsets
        self.B, self.T = ids.shape
        self.whole = whole and dout is None

        def make(shape, dtype):
            if whole:
                return to_bits(rng.integers(-8, 9, shape), dtype)
            return random_bits(rng, shape, dtype, (-9, 4))

        self.before = dict(dwte=make((V, C), types.grad) if dwte is None else dwte,
                           dwpe=make((self.T, C), types.grad) if dwpe is None else dwpe)
        good = ((self.ids >= 0) & (self.ids < V)).reshape(-1)
        self.dout = (make((self.ids.size, C), types.dtype) if dout is None else dout).reshape(-1, C)
        self.dout[~good] = np.iinfo(types.dtype.bits).max
        terms = from_bits(self.dout, types.dtype)[good]
        self.sums = dict(dwte=Sums(self.ids.reshape(-1)[good], terms),
                         dwpe=Sums(np.tile(np.arange(self.T), self.B)[good], terms))
        self.first_bad = -1 if good.all() else int(np.argmin(good))
        self.dout_array = Array(self.dout.size, types.dtype.bits, offset=offsets[2]).put(self.dout)
        self.inp_array = Array(self.ids.size, np.int32, offset=offsets[3]).put(self.ids)

    def gradient(self, name, values):
        """An array for dwte or dwpe that holds these bits."""
        offset = self.offsets[BOTH.index(name)]
        return Array(values.size, self.types.grad.bits, VALUE_FILL, offset).put(values)

    def workspace(self, version, fill=NAN_FILL):
        """As large as asked for and not a byte larger; None if none is."""
        size = bookends.encoder_backward_workspace_bytes(self.B, self.T, self.C, self.V, version)
        return Array(size, np.uint8, fill, self.offsets[4]) if size else None

    def call(self, version, flags=0, seed=0, wanted=BOTH, before=None, status=None, fill=NAN_FILL, stream=None):
        """(error code, status word, {name: bits of that gradient}) of a call with new gradients, which hold `before`,
        and a workspace all of `fill`."""
        before = before or self.before
        arrays = {name: self.gradient(name, before[name]) for name in wanted}
        workspace = self.workspace(version, fill)
        if stream is not None:
            bookends.synchronize()
        code, word = bookends.encoder_backward(arrays.get("dwte"), arrays.get("dwpe"), self.dout_array, self.inp_array,
                                               status, workspace, self.B, self.T, self.C, self.V, *self.types, flags,
                                               seed, version, stream)
        for name, array in arrays.items():
            assert array.guards_intact(), "%s: wrote outside %s" % (self.name(version, flags), name)
        if workspace is not None:
            assert workspace.guards_intact(), "%s: wrote outside the workspace" % self.name(version, flags)
        return code, word, {name: array.get().reshape(before[name].shape) for name, array in arrays.items()}

    def check(self, version, flags=0, seed=0, wanted=BOTH, before=None, fill=NAN_FILL, **context):
        """One call: the code, every element of the gradients, what lies around them, the inputs, the status word.
        Returns {name: bits}. Gradients that are overwritten are NaN before."""
        name = self.name(version, flags, wanted=wanted, **context)
        if flags & OVERWRITE and before is None:
            before = {key: np.full_like(bits, np.iinfo(bits.dtype).max) for key, bits in self.before.items()}
        status = status_array()
        code, word, got = self.call(version, flags, seed, wanted, before, status, fill)
        assert code == OK, "%s: %s" % (name, bookends.error_string(code))
        for key in wanted:
            self.compare(key, got[key], (before or self.before)[key], version, flags, name)
        assert word == self.first_bad, name
        assert status.guards_intact(), name
        for array, values in (self.inp_array, self.ids), (self.dout_array, self.dout):
            assert (array.get() == values.reshape(-1)).all(), "%s: an input was changed" % name
        return got

    def compare(self, key, got, before, version, flags, name):
        sums, grad = self.sums[key], self.types.grad
        if flags & OVERWRITE:
            before = np.zeros_like(before)
        good = got == before  # as it should be in the rows that get nothing
        old, values = from_bits(before[sums.rows], grad), from_bits(got[sums.rows], grad)
        with np.errstate(invalid="ignore"):
            exact = old + sums.total
            low, high = interval(exact, slack_of(sums, old, version or VERSIONS[-1], grad, self.whole), grad,
                                 flags & STOCHASTIC and grad is not FP32)
            good[sums.rows] = (low <= values) & (values <= high) | np.isnan(exact) & np.isnan(values)
        if not good.all():
            r, c = map(int, np.argwhere(~good)[0])
            i = np.searchsorted(sums.rows, r)
            summed = i < len(sums.rows) and sums.rows[i] == r
            pytest.fail("%s: %d of %d elements of %s are wrong, the first is %s[%d, %d]: %r (0x%x), should be %s" % (
                name, (~good).sum(), good.size, key, key, r, c, float(from_bits(got[r:r + 1, c], grad)[0]), got[r, c],
                "%r to %r, a sum of %d" % (float(low[i, c]), float(high[i, c]), sums.count[i]) if summed else
                "0x%x, as no position adds to it" % before[r, c]))

    def name(self, version, flags, **context):
        return "version %d %s B=%d T=%d C=%d V=%d offsets=%s flags=%d %s" % (
            version, types_name(self.types), self.B, self.T, self.C, self.V, self.offsets, flags, context)


def same_bits(first, second):
    return first.keys() == second.keys() and all((first[key] == second[key]).all() for key in first)


def same_in_any_order(version, types):
    """Whether a version gives the same bits each time; the atomic ones of whole numbers, if they don't round them."""
    return version not in ATOMIC or types.grad is FP32


def test_versions_are_known():
    assert VERSIONS == list(range(1, len(VERSIONS) + 1)) and IN_FLOAT


# ---------------------------------------------------------------------------------------------------------------------
# the ruler itself

def test_sums_of_the_reference():
    """Against the formula, word for word."""
    rng = np.random.default_rng(0)
    B, T, C, V = 5, 6, 3, 7
    ids = rng.integers(-1, V + 1, (B, T))
    case = Case(ALL_FP32, ids, C, V, whole=False)
    dout = from_bits(case.dout, FP32).reshape(B, T, C)
    dwte, dwpe, largest = np.zeros((V, C)), np.zeros((T, C)), np.zeros((V, C))
    for b in range(B):
        for t in range(T):
            if 0 <= ids[b, t] < V:
                dwte[ids[b, t]] += dout[b, t]
                dwpe[t] += dout[b, t]
                largest[ids[b, t]] += abs(dout[b, t])
    for sums, want in (case.sums["dwte"], dwte), (case.sums["dwpe"], dwpe):
        assert np.abs(sums.total - want[sums.rows]).max() < 1e-12
        assert (np.delete(want, sums.rows, 0) == 0).all()
    assert np.abs(case.sums["dwte"].magnitude - largest[case.sums["dwte"].rows]).max() < 1e-12
    assert case.sums["dwte"].count.sum() == case.sums["dwpe"].count.sum() == ((ids >= 0) & (ids < V)).sum()


@pytest.mark.parametrize("dtype", [FP16, BF16], ids=lambda d: d.name)
def test_neighbours_of_the_reference(dtype):
    most = from_bits(np.array([INFINITY[dtype] - 1], dtype.bits), dtype)[0]
    positive = from_bits(np.arange(INFINITY[dtype], dtype=dtype.bits), dtype)
    every = np.concatenate([-positive[::-1], positive[1:]])
    assert (np.diff(every) > 0).all()
    for values in neighbours(every, dtype):
        assert (values == every).all()
    for fraction in (1e-6, 0.3, 0.5, 0.9):
        below, above = neighbours(every[:-1] + np.diff(every) * fraction, dtype)
        assert (below == every[:-1]).all() and (above == every[1:]).all()
    ulp = positive[-1] - positive[-2]
    exact = np.array([most + 0.4 * ulp, most + 0.6 * ulp, most, -most - 0.4 * ulp, -most - 0.6 * ulp, np.inf, -np.inf])
    low, high = interval(exact, 0, dtype, True)
    assert list(low) == [most, np.inf, most, -np.inf, -np.inf, np.inf, -np.inf]
    assert list(high) == [np.inf, np.inf, most, -most, -np.inf, np.inf, -np.inf]
    low, high = interval(exact, 0, dtype, False)
    assert list(low) == list(high) == [most, np.inf, most, -most, -np.inf, np.inf, -np.inf]


def fail_of(case, key, got, before, version=4, flags=0):
    """What compare says, or None."""
    try:
        case.compare(key, got, before, version, flags, "")
    except pytest.fail.Exception as failure:
        return str(failure)


@every_types
@pytest.mark.parametrize("key", BOTH)
def test_a_wrong_element_is_seen(key, types):
    """Of whole numbers the least bit; and whichever term is missing, or there twice."""
    ids = np.array([[0, 2, 0, 5], [2, 2, 0, 5], [2, -1, 2, 6]])
    case = Case(types, ids, 5, 7)
    for flags in (0, OVERWRITE):
        before = case.before[key]
        sums = case.sums[key]
        right = np.zeros_like(before) if flags else before.copy()
        right[sums.rows] = to_bits(from_bits(right[sums.rows], types.grad) + sums.total, types.grad)
        assert fail_of(case, key, right, before, flags=flags) is None
        for index in (0, right.size // 2, right.size - 1):
            wrong = right.copy()
            wrong.reshape(-1)[index] ^= 1
            assert "1 of %d elements of %s are wrong" % (right.size, key) in fail_of(case, key, wrong, before,
                                                                                     flags=flags)
        unwritten = np.full_like(right, np.iinfo(right.dtype).max)
        assert "%d of %d" % (right.size, right.size) in fail_of(case, key, unwritten, before, flags=flags)
        assert "a sum of" in fail_of(case, key, unwritten, before, flags=flags)
    if key == "dwte":
        wrong = right.copy()
        wrong[1, 4] = before[1, 4]  # kept, though nothing was to be
        assert "[1, 4]" in fail_of(case, key, wrong, before, flags=flags)
        assert "no position adds to it" in fail_of(case, key, wrong, before, flags=flags)


@every_types
@pytest.mark.parametrize("version", [1, 4])
def test_a_missing_term_is_seen(version, types):
    """With real numbers, among 12 that are added to the same rows."""
    case = Case(types, np.zeros((12, 2), np.int32), 40, 1, whole=False)
    terms = from_bits(case.dout, types.dtype)
    for factor in (0, 2):
        for which in range(len(terms)):
            for key, row in ("dwte", 0), ("dwpe", which % 2):
                before = case.before[key]
                got = from_bits(before, types.grad).copy()
                got[case.sums[key].rows] += case.sums[key].total
                assert fail_of(case, key, to_bits(got, types.grad), before, version) is None
                got[row] += (factor - 1) * terms[which]
                assert "are wrong" in fail_of(case, key, to_bits(got, types.grad), before, version)


def test_what_lies_around_is_seen():
    case = Case(ALL_BF16, np.zeros((2, 3), np.int32), 5, 4, offsets=(1, 2, 3, 1, 5))
    arrays = [case.gradient("dwte", case.before["dwte"]), case.gradient("dwpe", case.before["dwpe"]),
              case.dout_array, case.inp_array]
    for array in [*arrays, *[w for w in map(case.workspace, VERSIONS) if w is not None]]:
        assert array.guards_intact()
        for where in (array.start - 1, array.end):
            old = int(array.memory[where])
            array._fill(where, where + 1, 0)
            assert not array.guards_intact()
            array._fill(where, where + 1, old)


# ---------------------------------------------------------------------------------------------------------------------
# shapes and alignment

@every_version
@every_types
@pytest.mark.parametrize("C", CHANNELS)
def test_shapes(C, types, version):
    rng = np.random.default_rng(C)
    k = CHANNELS.index(C) % 3
    for B, T in (((1, 2), (3, 7)), ((5, 1), (2, 3)), ((1, 33 if C < 200 else 5), (8, 2)))[k]:
        V = (1, 2, 50)[(B + k) % 3]
        Case(types, random_ids(rng, B, T, V), C, V, whole=B != 8).check(version, OVERWRITE * (T % 2))


@every_version
@every_types
@pytest.mark.parametrize("B, T, C, V", [
    (64, 1, 8, 1000), (64, 2, 65, 2), (65, 3, 16, 1000), (9, 129, 96, 40), (16, 257, 24, 7), (1, 1025, 32, 1000),
    (1000, 1, 1, 1), (1, 1, 4096, 2), (2, 3, 5000, 5), (3, 2, 8191, 5), (2, 5, 16384, 3), (4, 33, 5, 5025),
    (5, 8, 768, 80), (1, 1, 1, 1)])
def test_more_shapes(B, T, C, V, types, version):
    ids = random_ids(np.random.default_rng(C), B, T, V)
    ids.reshape(-1)[-1] = V - 1
    ids[0, 0] = 0 if ids.size > 1 else V - 1
    Case(types, ids, C, V).check(version)


@most_versions
@pytest.mark.parametrize("B, T, C, V", [
    (1, 1, 300007, 1), (1, 2, 70001, 2), (300000, 1, 2, 40), (1, 70000, 1, 3),
    *[pytest.param(*sizes, marks=needs_cuda) for sizes in (
        (1, 1, 8400000, 1), (1, 3, 16800000, 2), (66000, 3, 1, 70000), (1, 131073, 2, 131073), (3, 200000, 8, 10**6))]])
def test_one_side_very_long(B, T, C, V, version):
    """Longer than a grid is along y or z (65535 blocks), however the work is cut."""
    Case(BF16_TO_FP32, random_ids(np.random.default_rng(C), B, T, V), C, V).check(version)


@pytest.mark.parametrize("version", [5])
@pytest.mark.parametrize("wanted", [BOTH, ("dwpe",)], ids="-".join)
def test_more_blocks_than_one_side_of_a_grid_holds(wanted, version):
    """Those that are too many leave the rows alone that nobody asks for."""
    Case(BF16_TO_FP32, np.zeros((1, 1100000), np.int32), 1, 2000).check(version, 0, 1, wanted, fill=0)


# ---------------------------------------------------------------------------------------------------------------------
# which ids meet

# More ids than a bin has room for, all of neighbouring hashes (parts/group_positions.h): its worst case.
FEW_HASHES = np.array([i for i in range(60000) if i * 0x9e3779b1 % 2**31 < 2**26])

PATTERNS = {  # V, and n ids below that
    "one": (1, lambda rng, n: np.zeros(n)),
    "last": (1000, lambda rng, n: np.full(n, 999)),
    "two": (1000, lambda rng, n: np.arange(n) % 2 * 999),
    "uniform": (1000, lambda rng, n: rng.integers(0, 1000, n)),
    "zipf": (1000, lambda rng, n: (rng.zipf(1.2, n) - 1) % 1000),
    "sorted": (1000, lambda rng, n: np.sort(rng.integers(0, 1000, n))),
    "backwards": (1000, lambda rng, n: np.sort(rng.integers(0, 1000, n))[::-1]),
    "counting": (1000, lambda rng, n: np.arange(n) % 1000),
    "steps": (40, lambda rng, n: np.arange(n) * 40 // n),
    "padding": (500, lambda rng, n: np.where(rng.random(n) < 0.9, 499, rng.integers(0, 500, n))),
    "half bad": (9, lambda rng, n: np.where(rng.random(n) < 0.5, -1 - np.arange(n), rng.integers(0, 9, n))),
    "distinct": (9000, lambda rng, n: rng.permutation(9000)[:n]),
    "strided": (300 * 128, lambda rng, n: rng.integers(0, 300, n) * 128),
    "high bits": (16 * 4096, lambda rng, n: rng.integers(0, 16, n) * 4096 + 5),
    "one bin": (60000, lambda rng, n: rng.choice(FEW_HASHES, n)),
    "one bin, few rows": (60000, lambda rng, n: rng.choice(FEW_HASHES[:100], n)),
    "narrow": (60000, lambda rng, n: rng.integers(50000, 50011, n)),
}


def pattern_ids(name, B, T):
    V, make = PATTERNS[name]
    return np.asarray(make(np.random.default_rng(1), B * T), np.int32).reshape(B, T), V


@most_versions
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_ids(pattern, version):
    ids, V = pattern_ids(pattern, 24, 64)
    Case(BF16_TO_FP32, ids, 3, V).check(version)
    if V < 10000 or ON_CUDA:
        Case(ALL_BF16, ids.reshape(64, 24), 8, V, whole=False).check(version, OVERWRITE)


@most_versions
@pytest.mark.parametrize("pattern, V", [("uniform", 1000), ("zipf", 50257)])
def test_many_positions_and_many_ids(pattern, V, version):
    rng = np.random.default_rng(22)
    ids = rng.zipf(1.1, 20000) % V if pattern == "zipf" else rng.integers(0, V, 20000)
    Case(BF16_TO_FP32, ids.reshape(20, 1000), 3, V).check(version)


@most_versions
@pytest.mark.parametrize("types, B, T, C", [
    (BF16_TO_FP32, 65536, 1, 2), (ALL_BF16, 65536, 1, 2), (BF16_TO_FP32, 1, 65536, 1), (ALL_BF16, 1024, 65, 8)],
    ids=lambda value: types_name(value) if isinstance(value, Types) else str(value))
def test_many_contributions_to_one_row(types, B, T, C, version):
    Case(types, np.full((B, T), 2, np.int32), C, 4, whole=types is BF16_TO_FP32).check(version)


def ids_in_groups(rng, lengths, B):
    """Each id k lengths[k] times, in random order, and so many bad ids that B rows come out even."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.concatenate([ids, np.full(-len(ids) % B, -1)])
    return rng.permutation(ids).reshape(B, -1)


LENGTHS = {
    "1 to 130": range(1, 131),
    "around powers of 2": [2**k + d for k in range(1, 12) for d in (-1, 0, 1)],
    "around multiples of 32": [32 * k + d for k in range(1, 11) for d in (-1, 0, 1)],
    "around multiples of 64": [64 * k + d for k in range(5, 15) for d in (-1, 0, 1)],
    "one long, many short": [3000, *[1] * 90, *[0] * 9, 2, 3],
    "none, long, none": [0, 0, 1500, 0, 0],
    "around 16^2 pieces": [32 * 256 + d for d in (-32, -1, 0, 1, 31, 32, 33)],
    "32^3 + 1": [32**3 + 1],
    "64^2 * 4 and a neighbour": [64**2 * 4, 1],
}


@most_versions
@bf16_types
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths_of_groups(lengths, types, version):
    """Long groups are cut in pieces, which meet again in the sum."""
    ids = ids_in_groups(np.random.default_rng(2), LENGTHS[lengths], 7)
    Case(types, ids, 2, len(LENGTHS[lengths]), whole=types is BF16_TO_FP32).check(version)


@every_version
@bf16_types
def test_lengths_of_batches(types, version):
    """dwpe's groups are the columns of the batch."""
    rng = np.random.default_rng(3)
    for B in (*range(1, 35), 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 160, 191, 192, 193, 200, 255, 256, 257,
              511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 16385):
        T, C = ((1, 3), (3, 8))[B % 2]
        Case(types, random_ids(rng, B, T, 2), C, 2, whole=B % 4 != 3).check(version, OVERWRITE * (B // 2 % 2))


@most_versions
@pytest.mark.parametrize("near", [256, 512, 1024, 2048, 4096, 8192])
def test_numbers_of_positions(near, version):
    rng = np.random.default_rng(near)
    for n in (near - 1, near, near + 1):
        ids = random_ids(rng, 1, n, 100)
        Case(BF16_TO_FP32, ids, 2, 100).check(version)
        Case(ALL_BF16, ids.reshape(n, 1), 1, 100).check(version)


@most_versions
@pytest.mark.parametrize("V", [31, 32, 33, 64, 255, 256, 257, 512, 513, 1024, 1025, 65537, 131073, 300000, *[
    pytest.param(V, marks=needs_cuda) for V in (65535, 65536, 131071, 131072, 262144, 262145, 2**24 + 1)]])
def test_vocabularies(V, version):
    """However many bits an id has, all of them count; rows that nobody asks for are kept, or zeroed."""
    rng = np.random.default_rng(V)
    ids = np.concatenate([rng.integers(0, V, 400), [0, V - 1, V // 2, V - 1], 2**np.arange(20) % V,
                          (V - 1 - 2**np.arange(8)) % V])
    case = Case(BF16_TO_FP32, rng.permutation(ids).reshape(16, 27), 2, V)
    for flags in (0, OVERWRITE) if V < 100000 or ON_CUDA else (OVERWRITE,):
        case.check(version, flags)


@most_versions
@types_of_16_bits
@pytest.mark.parametrize("C", [1, 769, 770, 776])
def test_rows_without_positions_are_zeroed(C, types, version):
    """Whether the rows begin at multiples of 16 bytes or not; of the last 32 ids, those that exist."""
    rng = np.random.default_rng(C)
    for V in (31, 32, 33, 100):
        Case(types, random_ids(rng, 2, 9, V), C, V, offsets=(V % 2, 0, 0, 0, 0)).check(version, OVERWRITE)


# ---------------------------------------------------------------------------------------------------------------------
# ids outside the table

@every_version
@pytest.mark.parametrize("C", [1, 65])
@pytest.mark.parametrize("value", [-1, "V", "V+1", INT_MIN, INT_MAX])
def test_bad_ids(value, C, version):
    for k, (B, T, V) in enumerate(((1, 1, 5), (3, 7, 5), (3, 7, 2), (4, 2, 1), (40, 3, 4))):
        last = B * T - 1
        for where in ([0], [last], [last, last // 2], range(last + 1)):
            ids = random_ids(np.random.default_rng(1), B, T, V)
            ids.reshape(-1)[list(where)] = {"V": V, "V+1": V + 1}.get(value, value)
            Case(TYPES[k], ids, C, V).check(version, OVERWRITE * (len(where) % 2), bad=value, where=list(where)[:3])


@every_version
def test_every_position_may_be_the_bad_one(version):
    for position in range(35):
        ids = np.zeros((5, 7), np.int32)
        ids.reshape(-1)[position] = -1
        wanted = (BOTH, ("dwte",), ("dwpe",))[position % 3]
        Case(ALL_BF16, ids, 12, 2).check(version, wanted=wanted, position=position)


@every_version
@pytest.mark.parametrize("wanted", [BOTH, ("dwte",), ("dwpe",)], ids="-".join)
def test_the_first_of_many_bad_ids_is_reported(wanted, version):
    rng = np.random.default_rng(4)
    for B, T in ((3000, 2), (2, 3000), (1, 9000)):
        for first in (0, 1, B * T // 3, B * T - 2):
            ids = np.where(rng.random(B * T) < 0.5, rng.choice([-1, 4, INT_MAX], B * T), rng.integers(0, 4, B * T))
            ids[:first], ids[first] = 3, -1
            Case(BF16_TO_FP32, ids.reshape(B, T), 2, 4).check(version, wanted=wanted)


@every_version
@every_types
def test_every_id_is_bad(types, version):
    for B, T, C in ((1, 1, 1), (3, 5, 8), (70, 40, 2)):
        ids = np.random.default_rng(5).choice([-1, 2, INT_MIN, INT_MAX], (B, T))
        for flags in (0, OVERWRITE):
            Case(types, ids, C, 2).check(version, flags)


@every_version
@every_types
def test_empty_vocabulary(types, version):
    for C in (1, 65, 512):
        case = Case(types, np.array([[0, 1, -1], [INT_MAX, 0, 7]]), C, 0)
        for flags in (0, OVERWRITE):
            for wanted in (BOTH, ("dwte",), ("dwpe",)):  # dwte of no elements, or null
                case.check(version, flags, wanted=wanted)


@every_version
def test_status_is_only_lowered(version):
    good = np.zeros((4, 6), np.int32)

    def bad_at(*positions):
        ids = good.copy()
        ids.reshape(-1)[list(positions)] = -5
        return Case(ALL_FP32, ids, 9, 3)

    status = status_array()
    for case, word in ((bad_at(), -1), (bad_at(13, 20), 13), (bad_at(21), 13), (bad_at(), 13), (bad_at(5), 5),
                       (bad_at(23, 6), 5), (bad_at(0), 0), (bad_at(0, 1), 0)):
        assert case.call(version, status=status)[:2] == (OK, word)


@every_version
def test_status_of_others_is_untouched(version):
    case = Case(ALL_BF16, np.zeros((2, 2), np.int32), 16, 3)
    for word in (-1, 0, 7, 2**40, 2**63 - 1):
        assert case.call(version, status=status_array(word))[:2] == (OK, word)


@every_version
@every_types
def test_null_status(types, version):
    for ids in ([[0, 1, 2]], [[-1, 1, INT_MAX]]):
        for C in (3, 64):
            case = Case(types, np.array(ids), C, 3)
            code, word, got = case.call(version)
            assert (code, word) == (OK, None)
            for key in BOTH:
                case.compare(key, got[key], case.before[key], version, 0, "null status")


# ---------------------------------------------------------------------------------------------------------------------
# accumulating, overwriting, and one gradient without the other

@every_version
@every_types
def test_calls_add_up(types, version):
    """The second call finds what the first left, in 16 bits rounded as it is."""
    rng = np.random.default_rng(6)
    for whole in (True, False):
        before = None
        for seed in range(3):
            case = Case(types, random_ids(rng, 6, 20, 4), 24, 4, seed=seed, whole=whole)
            before = case.check(version, before=before, call=seed)


@every_version
@every_types
def test_overwriting_is_adding_to_zero(types, version):
    """Whatever was there, and in the rows that nobody asks for too."""
    rng = np.random.default_rng(7)
    for B, T, C, V in ((4, 7, 5, 60), (33, 9, 16, 3), (2, 3, 64, 3000), (1, 1, 264, 2)):
        case = Case(types, random_ids(rng, B, T, V), C, V, whole=version in ATOMIC)
        added = case.check(version, before={key: np.zeros_like(bits) for key, bits in case.before.items()})
        results = []
        for low, high in ((0, np.iinfo(types.grad.bits).max), (INFINITY[types.grad], INFINITY[types.grad] + 1)):
            garbage = {key: rng.integers(low, high, bits.shape, types.grad.bits) for key, bits in case.before.items()}
            results.append(case.check(version, OVERWRITE, before=garbage))
        if same_in_any_order(version, types):
            assert same_bits(results[0], results[1])
            for key in BOTH:
                values = [from_bits(some[key], types.grad) for some in (added, results[0])]
                assert (values[0] == values[1]).all()  # zeros may differ in sign


@every_version
@every_types
@pytest.mark.parametrize("flags", [0, OVERWRITE])
def test_one_gradient_without_the_other(flags, types, version):
    """The other pointer is null; the bits are those that both together get."""
    rng = np.random.default_rng(8)
    for B, T, C, V in ((1, 1, 1, 1), (5, 9, 7, 8), (70, 3, 16, 4), (130, 9, 8, 3)):
        ids = random_ids(rng, B, T, V)
        ids[B // 2, T // 2] = V
        case = Case(types, ids, C, V, whole=version in ATOMIC)
        both = case.check(version, flags)
        for key in BOTH:
            alone = case.check(version, flags, wanted=(key,))
            if same_in_any_order(version, types):
                assert (alone[key] == both[key]).all(), case.name(version, flags, alone=key)


@every_version
@every_types
def test_no_gradient_wanted(types, version):
    case = Case(types, np.array([[0, 1, -1]]), 8, 3)
    for flags in (0, OVERWRITE):
        assert case.call(version, flags, wanted=(), status=status_array()) == (OK, -1, {})
        assert bookends.encoder_backward(None, None, None, None, None, None, 1, 3, 8, 3, *types, flags,
                                         version=version) == (OK, None)


@every_version
def test_a_workspace_serves_many_calls(version):
    """One after the other, as it is left; of the largest size, or just large enough by itself."""
    rng = np.random.default_rng(9)
    cases = [Case(BF16_TO_FP32, random_ids(rng, B, T, V), C, V) for B, T, C, V in
             ((3, 5, 8, 20), (40, 9, 3, 2), (1, 500, 2, 900), (70, 1, 64, 5), (3, 5, 8, 20), (200, 20, 1, 1))]
    size = max(bookends.encoder_backward_workspace_bytes(c.B, c.T, c.C, c.V, version) for c in cases)
    workspace = Array(size, np.uint8, VALUE_FILL)
    for case in cases * 2:
        arrays = {key: case.gradient(key, case.before[key]) for key in BOTH}
        code, _ = bookends.encoder_backward(arrays["dwte"], arrays["dwpe"], case.dout_array, case.inp_array, None,
                                            workspace, case.B, case.T, case.C, case.V, *case.types, version=version)
        assert code == OK
        for key in BOTH:
            got = arrays[key].get().reshape(case.before[key].shape)
            case.compare(key, got, case.before[key], version, 0, case.name(version, 0))
    assert workspace.guards_intact()


# ---------------------------------------------------------------------------------------------------------------------
# values

@every_version
@every_types
def test_ieee_specials(types, version):
    """Every pair of: zeros, infinities, NaN, the largest and the smallest, and what makes them overflow, side by side;
    as two terms, and as one that is added to what was there."""
    values = bookends.special_values(types.dtype)
    n = len(values)
    first, second = np.repeat(values, n)[None], np.tile(values, n)[None]
    two = Case(types, np.zeros((2, 1), np.int32), n * n, 1, dout=np.concatenate([first, second]))
    exact = two.sums["dwte"].total
    assert np.isnan(exact).any() and np.isinf(exact).any() and (np.isfinite(exact) & (exact != 0)).any()
    two.check(version, OVERWRITE)
    two.check(version, before={key: np.zeros_like(bits) for key, bits in two.before.items()})
    if types.grad is types.dtype:
        for offset in (0, 1):
            case = Case(types, np.zeros((1, 1), np.int32), n * n, 1, dout=second, dwte=first, dwpe=first,
                        offsets=(offset, 0, 0, 0, 0))
            case.check(version)
            if version in IN_FLOAT:
                case.check(version, STOCHASTIC, 1)


@every_version
@every_types
@pytest.mark.parametrize("length", [40, 3000])
def test_infinities_reach_their_column_only(length, types, version):
    rng = np.random.default_rng(10)
    C = 9
    dout = random_bits(rng, (length, C), types.dtype, (-9, 4))
    infinity, minus = to_bits([np.inf, -np.inf], types.dtype)
    dout[length // 3, 1] = infinity
    dout[length - 1, 2] = minus
    dout[1, 3], dout[length - 2, 3] = infinity, minus
    dout[length // 2, 4] = to_bits(np.nan, types.dtype)
    dout[0, 5] = dout[length - 1, 5] = minus
    for shape in ((length, 1), (length // 20, 20)):
        case = Case(types, np.full(shape, 1, np.int32), C, 3, dout=dout.copy())
        assert "inf -inf nan nan -inf" == " ".join(map(str, case.sums["dwte"].total[0, 1:6]))
        case.check(version)
        case.check(version, OVERWRITE)


@every_version
@every_types
def test_every_kind_of_bits(types, version):
    rng = np.random.default_rng(11)
    V, C = 4, 640
    dout = rng.integers(0, np.iinfo(types.dtype.bits).max, (V, C), types.dtype.bits, endpoint=True)
    case = Case(types, rng.permutation(V).reshape(1, V), C, V, dout=dout)
    case.check(version, OVERWRITE)
    case.check(version, before={key: np.zeros_like(bits) for key, bits in case.before.items()})


@every_version
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=lambda d: d.name)
def test_gradients_of_16_bits_in_float(dtype, version):
    """fp32 gradients take what 16 bits would round away: 1 and 2^-10, and 10,000 ones."""
    types = Types(dtype, FP32)
    dout = to_bits(np.where(np.arange(6)[:, None] == 0, 1, 2.0**-10) * np.ones(8), dtype)
    case = Case(types, np.zeros((6, 1), np.int32), 8, 1, dout=dout)
    assert (case.sums["dwte"].total == 1 + 5 * 2.0**-10).all()
    for key in BOTH:
        assert (from_bits(case.check(version, OVERWRITE)[key], FP32) == 1 + 5 * 2.0**-10).all()
    ones = to_bits(np.ones((10000, 3)), dtype)
    got = Case(types, np.zeros((10000, 1), np.int32), 3, 1, dout=ones).check(version, OVERWRITE)
    assert (from_bits(got["dwte"], FP32) == 10000).all() and (from_bits(got["dwpe"], FP32) == 10000).all()


@every_version_in_float
@types_of_16_bits
def test_16_bits_are_rounded_once(types, version):
    """10,000 ones would stay at 256 or 2048 if each sum were rounded; what was there is rounded with them, not before
    and not after."""
    ones = to_bits(np.ones((10001, 3)), types.dtype)
    got = Case(types, np.zeros((10001, 1), np.int32), 3, 1, dout=ones).check(version, OVERWRITE)
    for key in BOTH:
        assert (got[key] == to_bits(10001, types.grad)).all()
    half = {FP16: 2.0**-11, BF16: 2.0**-8}[types.grad]  # half an ulp of 1
    for terms, want in (([half / 2, half], 1 + 2 * half), ([half, half], 1 + 2 * half), ([half / 2, half / 4], 1)):
        dout = to_bits(np.repeat(terms, 4).reshape(2, 4), types.dtype)
        one = to_bits(np.ones((1, 4)), types.grad)
        got = Case(types, np.zeros((2, 1), np.int32), 4, 1, dout=dout, dwte=one, dwpe=one).check(version)
        for key in BOTH:
            assert (from_bits(got[key], types.grad) == want).all(), (terms, want)


@every_version
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "real"])
@pytest.mark.parametrize("types", [ALL_FP32, BF16_TO_FP32], ids=types_name)
def test_it_is_the_gradient_of_the_forward_pass(types, whole, version):
    """<dout, forward(e)> = <backward(dout), e> in every direction e: forward is linear, backward its transpose."""
    rng = np.random.default_rng(12)
    for B, T, C, V in ((3, 5, 7, 4), (6, 20, 64, 15), (40, 3, 16, 8)):
        ids = random_ids(rng, B, T, V)
        case = Case(types, ids, C, V, whole=whole)
        gradients = {key: from_bits(bits, FP32) for key, bits in case.check(version, OVERWRITE).items()}
        dout = from_bits(case.dout, types.dtype)
        for _ in range(3):
            wte, wpe = [to_bits(rng.integers(-8, 9, (rows, C)), types.dtype) if whole else
                        random_bits(rng, (rows, C), types.dtype) for rows in (V, T)]
            out = Array(dout.size, types.dtype.bits)
            code, _ = bookends.encoder_forward(out, case.inp_array, Array(wte.size, wte.dtype).put(wte),
                                               Array(wpe.size, wpe.dtype).put(wpe), None, B, T, C, V, types.dtype)
            assert code == OK
            direction = dict(dwte=from_bits(wte, types.dtype), dwpe=from_bits(wpe, types.dtype))
            forward = (dout.reshape(-1) * from_bits(out.get(), types.dtype)).sum()
            backward = sum((gradients[key] * direction[key]).sum() for key in BOTH)
            size = sum((case.sums[key].magnitude * np.abs(direction[key][case.sums[key].rows])).sum() for key in BOTH)
            step = {FP32: 2.0**-24, BF16: 2.0**-8}[types.dtype]
            assert abs(forward - backward) <= (0 if whole else size * (step + 50 * 2.0**-24))


# ---------------------------------------------------------------------------------------------------------------------
# the same bits each time

@contextlib.contextmanager
def busy_device():
    """On a GPU other kernels run beside the calls."""
    if not ON_CUDA:
        yield
        return
    import torch
    matrix = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(20):
            matrix = matrix @ matrix * 1e-4
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("version", [version for version in VERSIONS if version not in ATOMIC])
@bf16_types
@pytest.mark.parametrize("pattern", ["one", "zipf", "padding"])
def test_repeats_bit_for_bit(pattern, types, version):
    """One call after another, whatever the workspace held, and many at once."""
    ids, V = pattern_ids(pattern, 96, 40)
    case = Case(types, ids, 33, V, whole=False)
    flags = STOCHASTIC if version in IN_FLOAT else 0
    first = case.check(version, flags, seed=5)
    assert same_bits(case.call(version, flags, 5, fill=VALUE_FILL)[2], first)

    def call(number):
        stream = None
        if ON_CUDA:
            import torch
            stream = torch.cuda.Stream().cuda_stream
        return case.call(version, flags, 5, fill=number, stream=stream)

    with busy_device(), concurrent.futures.ThreadPoolExecutor(4) as pool:
        for code, _, got in pool.map(call, range(40 if ON_CUDA else 4)):
            assert code == OK and same_bits(got, first)


@pytest.mark.parametrize("types", [ALL_FP32, BF16_TO_FP32], ids=types_name)
def test_plain_groups_add_in_order_of_position(types):
    """Version 4, bit for bit: 32 rows at a time in float, those sums in double, both in order of position."""
    ids, V = pattern_ids("padding", 7, 700)
    case = Case(types, ids, 3, V, whole=False)
    got = case.check(4, OVERWRITE)
    terms = from_bits(case.dout, types.dtype).astype(np.float32)
    for key, targets in ("dwte", ids.reshape(-1)), ("dwpe", np.tile(np.arange(700), 7)):
        for row in np.unique(targets):
            rows, total = terms[targets == row], np.zeros(3)
            for first in range(0, len(rows), 32):
                part = np.zeros(3, np.float32)
                for term in rows[first:first + 32]:
                    part += term
                total += part
            assert (got[key][row] == to_bits(total, FP32)).all(), (key, row)


# ---------------------------------------------------------------------------------------------------------------------
# stochastic rounding

def between(rng, types, R, C):
    """(R, C) numbers `low` of the type, `high` the next ones away from zero, and the fraction of the way from low to
    high at which low + add lies; low and add as bits."""
    bits = {FP16: 10, BF16: 7}[types.grad]
    exponent = rng.integers(-2, 9, (R, C))
    sign = rng.choice([-1.0, 1.0], (R, C))
    low = sign * (1 + rng.integers(0, 2**bits, (R, C)) * 2.0**-bits) * np.exp2(exponent)
    fraction = rng.integers(1, 256, (R, C)) / 256
    ulp = np.exp2(exponent - bits)
    return to_bits(low, types.dtype), to_bits(sign * fraction * ulp, types.dtype), low + sign * ulp, fraction


class Rounding:
    """Sums that lie between two numbers of the type, in dwte and in dwpe the same ones; the result of a call says for
    each whether it went up (away from zero). A fair rounding does so with the probability `fraction`."""

    def __init__(self, types, R, C, seed=0):
        self.low, self.add, self.high, self.fraction = between(np.random.default_rng(seed), types, R, C)
        self.types = types
        self.ids = np.arange(R)[None]
        self.case = Case(types, self.ids, C, R, dout=self.add, dwte=self.low, dwpe=self.low)

    def went_up(self, version, seed):
        got = self.case.check(version, STOCHASTIC, seed)
        return np.stack([from_bits(got[key], self.types.grad) == self.high for key in BOTH])

    def surprise(self, version, seed):
        """Of each element: 0 on average, 1 squared on average, and independent of the others if all is well."""
        return (self.went_up(version, seed) - self.fraction) / np.sqrt(self.fraction * (1 - self.fraction))


def deviations(values):
    """By how many standard deviations the sum of so many independent surprises is off."""
    return abs(values.sum()) / np.sqrt(values.size)


SEEDS = (0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1)


@types_of_16_bits
def test_stochastic_rounding_is_unbiased(types):
    """A bias of one percent of the distance would be 30 standard deviations over the 1.2 million elements."""
    rounding = Rounding(types, 4, 16384)
    every = np.stack([rounding.surprise(0, seed) for seed in SEEDS])
    assert deviations(every) < 5
    assert abs((every**2).mean() - 1) < 0.02
    slices = [every[:, key] for key in (0, 1)] + [every[k] for k in range(len(SEEDS))]
    slices += [every[..., k::8] for k in range(8)] + [every[..., k, :] for k in range(4)]
    for low in range(0, 256, 16):
        fraction = rounding.fraction * 256
        slices.append(every[..., (fraction >= low) & (fraction < low + 16)])
    positive = from_bits(rounding.low, types.grad) > 0
    slices += [every[..., positive], every[..., ~positive]]
    assert [round(deviations(some), 1) for some in slices if deviations(some) >= 5] == []


@types_of_16_bits
def test_stochastic_rounding_of_each_element_is_fair(types):
    """Over 150 seeds: for each of 1,024 elements the sum of its surprises is what independent ones would give."""
    rounding = Rounding(types, 1, 512)
    total = sum(rounding.surprise(0, seed) for seed in range(150))
    chi_squared, n = (total**2 / 150).sum(), total.size
    assert abs(chi_squared - n) < 6 * np.sqrt(2 * n)
    assert np.abs(total).max() < 5.5 * np.sqrt(150)


@types_of_16_bits
def test_stochastic_rounding_is_independent(types):
    """Between neighbours, between the two gradients and between seeds, in their high bits too."""
    rounding = Rounding(types, 4, 16384)
    surprises = {seed: rounding.surprise(0, seed) for seed in SEEDS}
    for seed in SEEDS:
        for other in SEEDS:
            if seed < other:
                assert deviations(surprises[seed] * surprises[other]) < 5, (seed, other)
            assert deviations(surprises[seed][0] * surprises[other][1]) < 5, ("dwte", seed, "dwpe", other)
        flat = surprises[seed].reshape(2, -1)
        for apart in (1, 2, 3, 4, 7, 8, 16, 32, 255, 256, 257, 2048, 16384):
            assert deviations(flat[:, apart:] * flat[:, :-apart]) < 5, (seed, apart)


@types_of_16_bits
@every_version_in_float
def test_stochastic_rounding_depends_on_seed_tensor_and_element_alone(version, types):
    """Not on the version, the shape, the alignment, the other gradient, nor on how the sum came about."""
    low, add, _, _ = between(np.random.default_rng(13), types, 1, 480)
    want = Case(types, np.array([[0]]), 480, 1, dout=add.copy(), dwte=low, dwpe=low).check(0, STOCHASTIC, 77)
    for R, C in ((1, 480), (3, 160), (8, 60), (32, 15)):
        ids = np.arange(R)[None]
        one = lambda bits: bits.reshape(R, C).copy()
        both = np.concatenate([one(low), one(add)])
        zeros = np.zeros_like(one(low))
        for offsets in ((0, 0, 0, 0, 0), (1, 2, 1, 1, 3)):
            added = Case(types, ids, C, R, offsets=offsets, dout=one(add), dwte=one(low), dwpe=one(low))
            summed = Case(types, np.repeat(ids, 2, 0), C, R, offsets=offsets, dout=both.copy())
            results = [added.check(version, STOCHASTIC, 77), summed.check(version, STOCHASTIC | OVERWRITE, 77)]
            if offsets[0] == 0:
                results += [added.check(version, STOCHASTIC, 77, wanted=(key,)) for key in BOTH]
                results += [summed.check(version, STOCHASTIC, 77, before=dict(dwte=zeros, dwpe=zeros))]
            for got in results:
                for key, bits in got.items():
                    assert (bits.reshape(-1) == want[key].reshape(-1)).all(), added.name(version, STOCHASTIC, key=key)
            other = added.check(version, STOCHASTIC, 78)
            assert all((other[key].reshape(-1) != want[key].reshape(-1)).any() for key in BOTH)


@every_version_in_float
@types_of_16_bits
def test_stochastic_rounding_keeps_what_needs_none(types, version):
    """Numbers of the type, subnormal ones too: sums of 16-bit numbers that small are always exact."""
    rng = np.random.default_rng(14)
    for scale in (1, 2.0**-24 if types.grad is FP16 else 2.0**-133):
        dout = to_bits(rng.integers(-20, 21, (5, 4, 48)) * scale, types.dtype)
        before = [to_bits(rng.integers(-20, 21, (4, 48)) * scale, types.grad) for _ in BOTH]
        case = Case(types, np.tile(rng.permutation(4), (5, 1)), 48, 4, dout=dout, dwte=before[0], dwpe=before[1])
        nearest = case.check(version)
        for key in BOTH:
            values = from_bits(nearest[key], types.grad)[case.sums[key].rows]
            assert (values == case.sums[key].total + from_bits(case.before[key], types.grad)).all()
        for seed in range(10):
            got = case.check(version, STOCHASTIC, seed)
            for key in BOTH:
                assert (from_bits(got[key], types.grad) == from_bits(nearest[key], types.grad)).all()


@every_version_in_float
@types_of_16_bits
def test_stochastic_rounding_overflows_as_the_nearest_does(types, version):
    most, less = from_bits(np.array([INFINITY[types.grad] - 1, INFINITY[types.grad] - 2], types.grad.bits), types.grad)
    ulp = most - less
    first = [most, -most, most, most, np.inf, -np.inf, np.nan, np.inf]
    second = [ulp / 2, -ulp / 2, ulp, 0, 1, -ulp, 1, -np.inf]
    want = [np.inf, -np.inf, np.inf, most, np.inf, -np.inf, np.nan, np.nan]
    before = np.tile(to_bits(first, types.grad), 64)[None]
    case = Case(types, np.array([[0]]), 512, 1, dout=np.tile(to_bits(second, types.dtype), 64)[None], dwte=before,
                dwpe=before)
    for seed in range(10):
        for got in case.check(version, STOCHASTIC, seed).values():
            assert bookends.same(got, np.tile(to_bits(want, types.grad), 64)[None], types.grad).all()


@every_version_in_float
@pytest.mark.parametrize("exponent", [0, 100, 121, 122, 124, 127, -120])
def test_stochastic_rounding_at_every_magnitude(exponent, version):
    """A quarter of the way from one bf16 to the next, up to the largest."""
    C, types = 8192, ALL_BF16
    old, quarter = to_bits(np.full(C, 2.0**exponent), BF16), to_bits(np.full(C, 2.0**(exponent - 9)), BF16)
    dwte = Array(C, BF16.bits).put(old)
    code, _ = bookends.encoder_backward(
        dwte, None, Array(C, BF16.bits).put(quarter), Array(1, np.int32).put([0]), None,
        Array(bookends.encoder_backward_workspace_bytes(1, 1, C, 1, version), np.uint8), 1, 1, C, 1, *types, STOCHASTIC,
        5, version=version)
    assert code == OK
    up = int((dwte.get() != old).sum())
    assert abs(up / C - 0.25) < 0.025  # five standard deviations


@every_version_in_float
@types_of_16_bits
def test_stochastic_rounding_of_long_sums(types, version):
    """Goes to a neighbour of what the sum in float can be, and not always to the nearest."""
    for pattern in ("padding", "half bad"):
        ids, V = pattern_ids(pattern, 40, 30)
        for whole in (True, False):
            case = Case(types, ids, 16, V, whole=whole)
            nearest = case.check(version)
            at_random = case.check(version, STOCHASTIC, 3)
            if not whole:
                assert any((at_random[key] != nearest[key]).any() for key in BOTH)
            case.check(version, STOCHASTIC | OVERWRITE, 4)


@every_version
@pytest.mark.parametrize("types", [types for types in TYPES if types.grad is FP32], ids=types_name)
def test_stochastic_rounding_has_no_effect_on_fp32(types, version):
    rng = np.random.default_rng(15)
    case = Case(types, random_ids(rng, 12, 9, 5), 24, 5, whole=version in ATOMIC)
    for flags in (0, OVERWRITE):
        nearest = case.check(version, flags)
        for seed in (0, 1):
            assert same_bits(case.check(version, flags | STOCHASTIC, seed), nearest)


# ---------------------------------------------------------------------------------------------------------------------
# anything

@every_version
@pytest.mark.parametrize("seed", range(10))
def test_anything(seed, version):
    """Shapes, types, ids, alignments, flags and which gradients: drawn at random."""
    rng = np.random.default_rng([16, seed])
    for _ in range(100 if ON_CUDA else 8):
        size = lambda most: int(rng.integers(1, int(np.exp2(rng.uniform(1, np.log2(most)))) + 1))
        B, T, C, V = size(200), size(200), size(300), size(3000)
        if B * T * C > 200000:
            continue
        types = TYPES[rng.integers(len(TYPES))]
        ids = rng.integers(0, V, (B, T)) if rng.random() < 0.5 else rng.zipf(1.3, (B, T)) % V
        if rng.random() < 0.4:
            ids = np.where(rng.random((B, T)) < rng.random(), rng.choice([-1, V, INT_MIN, INT_MAX], (B, T)), ids)
        offsets = tuple(rng.integers(0, 17, 5).tolist()) if rng.random() < 0.5 else (0,) * 5
        flags = int(rng.integers(0, 4))
        if version in IN_MEMORY and types.grad is not FP32:
            flags &= ~STOCHASTIC
        wanted = (BOTH, ("dwte",), ("dwpe",))[rng.integers(3)]
        case = Case(types, ids, C, V, seed, offsets, whole=rng.random() < 0.7)
        case.check(version, flags, int(rng.integers(2**63)), wanted, fill=int(rng.integers(256)))


# ---------------------------------------------------------------------------------------------------------------------
# past 2^31 and 2^32 elements

@most_versions
@pytest.mark.parametrize("flags", [0, pytest.param(OVERWRITE, marks=needs_cuda)])
@pytest.mark.parametrize("types, V, C", [
    (ALL_FP32, 262144, 8960), (ALL_BF16, 262144, 17920), *[pytest.param(*table, marks=needs_cuda) for table in (
        (ALL_BF16, 262144, 8960), (BF16_TO_FP32, 262144, 8960), (ALL_BF16, INT_MAX, 1), (ALL_BF16, INT_MAX, 3))]],
    ids=lambda value: types_name(value) if isinstance(value, Types) else str(value))
def test_large_tables(types, V, C, flags, version):
    """Offsets that neither a signed nor an unsigned 32-bit number holds. On the CPU device what was not written to
    takes no memory."""
    size = bookends.encoder_backward_workspace_bytes(4, 3, C, V, version)
    or_skip(V * C * np.dtype(types.grad.bits).itemsize + size)
    edge, edge32 = min(2**31 // C, V - 4), min(2**32 // C, V - 3)
    ids = np.array([[V - 1, edge, V - 2], [edge - 1, edge - 2, 2**30 // C], [V - 17, 3, V - 1],
                    [edge32 - 1, edge32, edge32 + 1]], np.int32)
    rng = np.random.default_rng(17)
    terms = rng.integers(-8, 9, (12, C))
    sums = Sums(ids.reshape(-1), terms.astype(float))
    before = None if flags else to_bits(rng.integers(-8, 9, sums.total.shape), types.grad)
    dwte = Array(V * C, types.grad.bits, None)
    untouched = {int(row) + by for row in sums.rows for by in (-1, 1)}
    untouched |= {int(row) * C % 2**32 // C + by for row in sums.rows for by in (0, 1)}
    untouched = sorted(row for row in untouched - set(sums.rows.tolist()) if 0 <= row < V)
    for k, row in enumerate(sums.rows.tolist()):
        dwte.put(np.full(C, np.iinfo(types.grad.bits).max) if flags else before[k], row * C)
    if flags:
        for row in untouched:
            dwte.put(np.full(C, np.iinfo(types.grad.bits).max), row * C)
    dwpe = Array(3 * C, types.grad.bits).put(to_bits(np.zeros(3 * C), types.grad))
    workspace = Array(size, np.uint8) if size else None
    code, word = bookends.encoder_backward(
        dwte, dwpe, Array(terms.size, types.dtype.bits).put(to_bits(terms, types.dtype)),
        Array(12, np.int32).put(ids), status_array(), workspace, 4, 3, C, V, *types, flags, version=version)
    assert (code, word) == (OK, -1)
    want = to_bits(sums.total + (0 if flags else from_bits(before, types.grad)), types.grad)
    for k, row in enumerate(sums.rows.tolist()):
        assert (from_bits(dwte.get(row * C, C), types.grad) == from_bits(want[k], types.grad)).all(), row
    for row in untouched:
        assert not dwte.get(row * C, C).any(), row
    assert (from_bits(dwpe.get(), types.grad).reshape(3, C) == terms.reshape(4, 3, C).sum(0)).all()
    assert dwte.guards_intact() and dwpe.guards_intact()
    assert workspace is None or workspace.guards_intact()


@needs_cuda
@every_version
@pytest.mark.parametrize("B, T, C, V", [(64, 1024, 32776, 100), (1, 262144, 8960, 262144), (3000, 1024, 701, 50),
                                        (2**20, 257, 8, 1000),
                                        (64, 1024, 65544, 50), (2**20, 520, 8, 1000)])
def test_dout_past_2_31_elements(B, T, C, V, version):
    """Zeros, save a few positions."""
    types, N = BF16_TO_FP32, B * T
    if version in (2, 4) and N > 10**8:
        pytest.skip("a minute or more: 2 loops over all positions in eight threads, 4 orders lists of 10^5 positions")
    size = bookends.encoder_backward_workspace_bytes(B, T, C, V, version)
    or_skip(2 * N * C + 4 * N + 4 * (V + T) * C + size)
    rng = np.random.default_rng(18)
    ids = rng.integers(0, V, (B, T), np.int32)
    ids[B - 1, T - 2] = -1
    edge, edge32 = 2**31 // C, min(2**32 // C, N - 4)
    positions = np.unique([0, 1, N // 2, edge - 1, edge, min(edge + 1, N - 1), edge32 - 1, edge32, edge32 + 1, N - 3,
                           N - 1, *rng.integers(0, N - 2, 20)])
    terms = rng.integers(-8, 9, (len(positions), C))
    dout = Array(N * C, types.dtype.bits, None)
    for position, row in zip(positions.tolist(), to_bits(terms, types.dtype)):
        dout.put(row, position * C)
    dwte, dwpe = Array(V * C, np.uint32), Array(T * C, np.uint32)
    code, word = bookends.encoder_backward(
        dwte, dwpe, dout, Array(N, np.int32).put(ids), status_array(), Array(size, np.uint8) if size else None,
        B, T, C, V, *types, OVERWRITE, version=version)
    assert (code, word) == (OK, N - 2)
    for array, targets, rows in (dwte, ids.reshape(-1)[positions], V), (dwpe, positions % T, T):
        sums = Sums(targets, terms.astype(float))
        for row, want in zip(sums.rows.tolist(), sums.total):
            assert (from_bits(array.get(row * C, C), FP32) == want).all(), row
        for row in sorted(set(range(rows)) - set(sums.rows.tolist()))[:: max(1, rows // 100)]:
            assert not from_bits(array.get(row * C, C), FP32).any(), row
        assert array.guards_intact()


# ---------------------------------------------------------------------------------------------------------------------
# the library's promises

@every_types
@pytest.mark.parametrize("version", [0, *VERSIONS])
def test_no_work_is_no_error(types, version):
    for B, T, C in ((0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0), (0, INT_MAX, INT_MAX)):
        for V in (0, 4):
            nothing = bookends.encoder_backward(*[None] * 6, B, T, C, V, *types, version=version)
            assert nothing == (OK, None), (B, T, C)
            dwte, dwpe = Array(64, types.grad.bits, VALUE_FILL), Array(64, types.grad.bits, VALUE_FILL)
            inp, dout, status = Array(64, np.int32), Array(64, types.dtype.bits), status_array()  # every id is -1
            for given in ((dout, inp), (None, None)):
                assert bookends.encoder_backward(dwte, dwpe, *given, status, None, B, T, C, V, *types,
                                                 version=version) == (OK, -1)
            for array in (dwte, dwpe):
                assert array.get().tobytes() == bytes([VALUE_FILL]) * array.get().nbytes and array.guards_intact()


@every_types
@pytest.mark.parametrize("version", [0, *VERSIONS])
def test_overwriting_with_nothing(types, version):
    """No positions, so both gradients become zero."""
    for B, T, C, V in ((0, 3, 5, 7), (0, 1, 1, 1), (0, 4, 264, 50), (0, 3, 8, 0), (5, 0, 3, 7), (0, 0, 264, 8)):
        case = Case(types, np.zeros((B, T), np.int32), C, V)
        for flags in (OVERWRITE, OVERWRITE | STOCHASTIC if version not in IN_MEMORY else OVERWRITE):
            for wanted in (BOTH, ("dwte",), ("dwpe",)):
                case.check(version, flags, wanted=wanted)
        dwte, dwpe = Array(V * C, types.grad.bits), Array(T * C, types.grad.bits)
        code = bookends.encoder_backward(dwte, dwpe, None, None, None, case.workspace(version), B, T, C, V, *types,
                                         OVERWRITE, version=version)
        assert code == (OK, None)
        assert not dwte.get().any() and not dwpe.get().any()


@every_types
def test_version_0_is_the_last(types):
    case = Case(types, random_ids(np.random.default_rng(19), 50, 9, 8), 264, 8, whole=False)
    assert same_bits(case.check(0), case.check(VERSIONS[-1]))


def call_with(**changes):
    """(code, whether gradients, status and workspace were left alone) of a call that is fine but for the changes."""
    version = changes.get("version", 0)
    case = Case(ALL_FP16, np.array([[0, 1, -1], [3, 3, 3]]), 8, 4)
    dwte, dwpe = [case.gradient(key, case.before[key]) for key in BOTH]
    status = status_array()
    workspace = case.workspace(version if version in VERSIONS else 0, VALUE_FILL) or Array(16, np.uint8, VALUE_FILL)
    arguments = dict(dwte=dwte, dwpe=dwpe, dout=case.dout_array, inp=case.inp_array, status=status, workspace=workspace,
                     B=2, T=3, C=8, V=4, dtype=FP16, grad_dtype=FP16, flags=0, seed=0, version=0)
    arguments.update(changes)
    code = bookends.encoder_backward(**arguments)[0]
    left = [(array.get() == case.before[key].reshape(-1)).all() for key, array in (("dwte", dwte), ("dwpe", dwpe))]
    left += [int(status.get()[0]) == -1, (workspace.get() == VALUE_FILL).all()]
    return code, all(left)


@pytest.mark.parametrize("flags", [0, OVERWRITE])
@pytest.mark.parametrize("changes, code", [
    (dict(dout=None), bookends.ERROR_NULL), (dict(inp=None), bookends.ERROR_NULL),
    (dict(dout=None, dwte=None), bookends.ERROR_NULL), (dict(inp=None, dwpe=None), bookends.ERROR_NULL),
    *[({size: value}, bookends.ERROR_SHAPE) for size in "BTCV" for value in (-1, INT_MIN)],
    (dict(B=-1, dwte=None), bookends.ERROR_SHAPE), (dict(B=0, T=-1), bookends.ERROR_SHAPE),
    (dict(B=1 << 16, T=1 << 15), bookends.ERROR_SHAPE), (dict(B=INT_MAX, T=2), bookends.ERROR_SHAPE),
    (dict(B=INT_MAX, T=INT_MAX, C=1), bookends.ERROR_SHAPE), (dict(B=1 << 16, T=1 << 16), bookends.ERROR_SHAPE),
    *[(dict(dtype=value, grad_dtype=value), bookends.ERROR_DTYPE) for value in (3, -1, 1000)],
    *[(dict(dtype=value), bookends.ERROR_DTYPE) for value in (3, -1, BF16, FP32)],
    *[(dict(grad_dtype=value), bookends.ERROR_DTYPE) for value in (3, -1, INT_MAX, BF16)],
    *[(dict(dtype=dtype, grad_dtype=grad), bookends.ERROR_DTYPE) for dtype, grad in ((BF16, FP16), (FP32, BF16))],
    *[(dict(version=value), bookends.ERROR_VERSION) for value in (-1, len(VERSIONS) + 1, INT_MAX, INT_MIN)],
], ids=str)
def test_refused_calls_launch_nothing(changes, code, flags):
    assert call_with(flags=flags) == (OK, False)
    assert call_with(flags=flags, **changes) == (code, True)
    bookends.check_last_message("bk_encoder_backward", code, changes)


@pytest.mark.parametrize("flags", [4, 8, 4 | OVERWRITE, 1 << 30, INT_MIN, -1])
def test_unknown_flags_are_refused(flags):
    for version in (0, *VERSIONS):
        assert call_with(flags=flags, version=version) == (bookends.ERROR_FLAGS, True)


@every_version
@pytest.mark.parametrize("flags", [0, OVERWRITE])
def test_a_missing_workspace_is_refused(flags, version):
    needed = bookends.encoder_backward_workspace_bytes(2, 3, 8, 4, version)
    want = (bookends.ERROR_NULL, True) if needed else (OK, False)
    assert call_with(flags=flags, version=version, workspace=None) == want


@pytest.mark.parametrize("version", [version for version in VERSIONS if version in IN_MEMORY])
@pytest.mark.parametrize("flags", [STOCHASTIC, STOCHASTIC | OVERWRITE])
def test_rounding_at_every_addition_cannot_be_stochastic(flags, version):
    assert call_with(flags=flags, version=version) == (bookends.ERROR_UNSUPPORTED, True)
    assert call_with(flags=flags, version=version, dtype=BF16, grad_dtype=BF16) == (bookends.ERROR_UNSUPPORTED, True)


def test_workspace_bytes_of_anything():
    """Whatever the arguments, a number comes back; it is the one of version 0 for the last version."""
    for B, T, C, V in ((0, 0, 0, 0), (-1, 4, 4, 4), (4, -1, 4, 4), (4, 4, -1, 4), (4, 4, 4, -1), (INT_MAX,) * 4,
                       (1 << 16, 1 << 15, 8, 8), (INT_MIN,) * 4, (1, 1, 1, INT_MAX), (64, 1024, 768, 50257)):
        for version in (0, *VERSIONS, -1, len(VERSIONS) + 1, INT_MAX, INT_MIN):
            assert bookends.encoder_backward_workspace_bytes(B, T, C, V, version) >= 0
    assert bookends.encoder_backward_workspace_bytes(64, 1024, 768, 50257, 0) == \
        bookends.encoder_backward_workspace_bytes(64, 1024, 768, 50257, VERSIONS[-1])


def test_workspace_grows_with_the_positions_not_with_the_vocabulary():
    """Of a vocabulary of more ids than positions, it has a bit for each id and no more."""
    size = bookends.encoder_backward_workspace_bytes
    for B, T, C in ((1, 7, 3), (8, 1024, 64), (64, 1024, 256), (512, 1024, 1024)):
        for V in (600_000, 2_000_000, INT_MAX):
            more = size(B, T, C, V, 0) - size(B, T, C, B * T, 0)
            assert abs(more - (V - B * T) / 8) < 32, (B, T, C, V)


def test_workspace_of_plain_groups():
    """Version 4's: 8 bytes for each position and for each id, and some for alignment."""
    for B, T, C, V in ((1, 1, 1, 0), (3, 5, 768, 7), (64, 1024, 8, 50257), (2, INT_MAX // 2, 1, INT_MAX)):
        size = bookends.encoder_backward_workspace_bytes(B, T, C, V, 4)
        assert 0 <= size - 8 * (B * T + V) < 80, (B, T, C, V)


def test_error_strings():
    words = {bookends.ERROR_UNSUPPORTED: "version", bookends.ERROR_FLAGS: "flag"}
    for code, word in words.items():
        assert word in bookends.error_string(code) and "no such error" not in bookends.error_string(code)
    assert len({bookends.error_string(code) for code in range(7)}) == 7


@pytest.mark.skipif(ON_CUDA, reason="needs the CUDA runtime that the library is linked with")
@every_version
def test_an_error_left_behind_is_not_the_calls(version):
    with bookends.pending_error():
        Case(ALL_BF16, np.array([[0, 1, 2]]), 8, 3).check(version)


# ---------------------------------------------------------------------------------------------------------------------
# streams and graphs

@needs_cuda
@every_version
def test_runs_on_the_stream_it_is_given(version):
    """The ids arrive on that stream late: a launch on any other would see the old ones, which are bad."""
    import torch
    case = Case(ALL_BF16, random_ids(np.random.default_rng(20), 8, 64, 50), 264, 50)
    late = torch.from_numpy(case.ids.reshape(-1).view(np.uint8).copy()).cuda()
    case.inp_array.put(np.full(case.ids.shape, -1, np.int32))
    arrays, status = {key: case.gradient(key, case.before[key]) for key in BOTH}, status_array()
    workspace = case.workspace(version)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.inp_array.memory[case.inp_array.start:case.inp_array.end].copy_(late)
    code, _ = bookends.encoder_backward(arrays["dwte"], arrays["dwpe"], case.dout_array, case.inp_array, status,
                                        workspace, 8, 64, 264, 50, *case.types, 0, 0, version, stream.cuda_stream)
    assert code == OK
    assert not stream.query(), "the call waited for the device"
    for key in BOTH:
        case.compare(key, arrays[key].get().reshape(case.before[key].shape), case.before[key], version, 0, "late ids")
    assert int(status.get()[0]) == -1


@needs_cuda
@every_version
@every_types
@pytest.mark.parametrize("flags", [0, OVERWRITE, STOCHASTIC])
def test_graph_replay_with_other_ids(flags, types, version):
    import torch
    if flags & STOCHASTIC and version in IN_MEMORY and types.grad is not FP32:
        pytest.skip("rounds at every addition")
    rng = np.random.default_rng(21)
    case = Case(types, rng.permutation(1024).reshape(16, 64), 136, 1024)
    case.call(version, flags)
    arrays, status = {key: case.gradient(key, case.before[key]) for key in BOTH}, status_array()
    workspace = case.workspace(version)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        code, _ = bookends.encoder_backward(arrays["dwte"], arrays["dwpe"], case.dout_array, case.inp_array, status,
                                            workspace, 16, 64, 136, 1024, *types, flags, 7, version,
                                            torch.cuda.current_stream().cuda_stream)
    assert code == OK
    before = case.before
    for replay in range(4):
        ids = (random_ids(rng, 16, 64, 1024), rng.zipf(1.2, (16, 64)) % 1024, np.zeros((16, 64), np.int32),
               rng.permutation(1024).reshape(16, 64))[replay].astype(np.int32)
        if replay == 2:
            ids[1, 5] = 1024
        now = Case(types, ids, 136, 1024, dwte=before["dwte"], dwpe=before["dwpe"], seed=replay)
        case.inp_array.put(ids)
        case.dout_array.put(now.dout)
        torch.cuda.synchronize()
        graph.replay()
        after = {key: arrays[key].get().reshape(before[key].shape) for key in BOTH}
        for key in BOTH:
            now.compare(key, after[key], before[key], version, flags, now.name(version, flags, replay=replay))
        assert int(status.get()[0]) == (69 if replay >= 2 else -1)
        before = after
    assert workspace is None or workspace.guards_intact()
