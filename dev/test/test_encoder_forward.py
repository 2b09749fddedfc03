"""encoder_forward, every version and dtype, through the library and against numpy float64.

A sum of two numbers of a type, formed in float and rounded once, is the correctly rounded sum in each of the three
types. So results are compared bit for bit.
"""

import json
import threading

import numpy as np
import pytest

import bookends
from bookends import (Array, BF16, CHANNELS, DTYPES, FP16, FP32, INFINITY, INT_MAX, INT_MIN, NAN_FILL, OK, ON_CUDA,
                      VALUE_FILL, needs_cuda, or_skip, random_bits, random_ids, status_array, to_bits)

VERSIONS = bookends.versions("encoder_forward")

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
every_version = pytest.mark.parametrize("version", VERSIONS)


# ---------------------------------------------------------------------------------------------------------------------
# the reference, and one call compared with it

def reference(ids, wte, wpe, C, V, dtype):
    """The bits that out should hold. ids (B, T); wte: {id: row of bits}; wpe (T, C) bits, or None."""
    good = (ids >= 0) & (ids < V)
    values = np.full((*ids.shape, C), np.nan)
    if good.any():
        used, index = np.unique(ids[good], return_inverse=True)
        rows = bookends.from_bits(np.stack([wte[row] for row in used.tolist()]), dtype)
        with np.errstate(invalid="ignore"):
            values[good] = rows[index.reshape(-1)]
            if wpe is not None:
                values[good] += bookends.from_bits(wpe, dtype)[np.nonzero(good)[1]]
    return to_bits(values, dtype)


class Case:
    """Inputs on the device. Rows of wte that ids don't ask for are NaN. offsets: by how many elements out, inp, wte
    and wpe are off a multiple of 256 bytes. Without positions wpe is null."""

    def __init__(self, dtype, ids, C, V, seed=0, offsets=(0, 0, 0, 0), wte=None, wpe=None, positions=True):
        rng = np.random.default_rng([seed, *ids.shape, C, V, dtype.code])
        self.dtype, self.ids, self.C, self.V, self.offsets = dtype, np.asarray(ids, np.int32), C, V, offsets
        self.B, self.T = ids.shape
        good = np.unique(self.ids[(self.ids >= 0) & (self.ids < V)]).tolist()
        self.wte = wte if wte is not None else dict(zip(good, random_bits(rng, (len(good), C), dtype)))
        self.wpe = wpe if wpe is not None or not positions else random_bits(rng, (self.T, C), dtype)
        self.inp_array = Array(self.ids.size, np.int32, offset=offsets[1]).put(self.ids)
        self.wte_array = Array(V * C, dtype.bits, offset=offsets[2])
        if V * C <= 1 << 20:
            table = np.full((V, C), np.iinfo(dtype.bits).max, dtype.bits)
            for row in good:
                table[row] = self.wte[row]
            self.wte_array.put(table)
        else:
            for row in good:
                self.wte_array.put(self.wte[row], row * C)
        self.wpe_array = Array(self.T * C, dtype.bits, offset=offsets[3]).put(self.wpe) if positions else None
        self.want = reference(self.ids, self.wte, self.wpe, C, V, dtype)
        bad = np.flatnonzero((self.ids < 0) | (self.ids >= V))
        self.first_bad = int(bad[0]) if bad.size else -1

    def call(self, version, status=None, fill=VALUE_FILL):
        """(out, error code, status word); out starts as `fill` all over, its guards too."""
        out = Array(self.ids.size * self.C, self.dtype.bits, fill, self.offsets[0])
        return (out, *bookends.encoder_forward(out, self.inp_array, self.wte_array, self.wpe_array, status, self.B,
                                               self.T, self.C, self.V, self.dtype, version))

    def check(self, version, **context):
        """One call: the code, every element of out, what lies around it, the inputs, the status word."""
        name = "version %d %s B=%d T=%d C=%d V=%d offsets=%s %s" % (
            version, self.dtype.name, self.B, self.T, self.C, self.V, self.offsets, context or "")
        status = status_array()
        out, code, word = self.call(version, status)
        assert code == OK, "%s: %s" % (name, bookends.error_string(code))
        self.compare(out, name)
        assert word == self.first_bad, name
        assert status.guards_intact(), name
        arrays = (self.inp_array, self.ids), (self.wpe_array, self.wpe)
        for array, before in arrays:
            if array is None:
                continue
            assert (array.get() == before.reshape(-1)).all(), "%s: an input was changed" % name
        for row in self.wte:
            assert (self.wte_array.get(row * self.C, self.C) == self.wte[row]).all(), "%s: wte was changed" % name

    def compare(self, out, name):
        got = out.get().reshape(self.want.shape)
        good = bookends.same(got, self.want, self.dtype)
        if not good.all():
            where = tuple(map(int, np.argwhere(~good)[0]))
            pytest.fail("%s: %d of %d elements are wrong, the first is out%s: 0x%x, should be 0x%x" % (
                name, (~good).sum(), good.size, list(where), got[where], self.want[where]))
        assert out.guards_intact(), "%s: wrote outside out" % name


def test_versions_are_known():
    assert VERSIONS == list(range(1, len(VERSIONS) + 1)) and VERSIONS


# ---------------------------------------------------------------------------------------------------------------------
# the ruler itself

@pytest.mark.parametrize("dtype", [FP16, BF16], ids=lambda d: d.name)
def test_rounding_of_the_reference(dtype):
    every = np.arange(65536, dtype=np.uint16)
    values = bookends.from_bits(every, dtype)
    assert bookends.same(to_bits(values, dtype), every, dtype).all()
    below = np.arange(INFINITY[dtype] - 1, dtype=np.uint16)  # every finite one that is not negative, save the largest
    low, high = bookends.from_bits(below, dtype), bookends.from_bits(below + np.uint16(1), dtype)
    assert (low < high).all()
    middle = (low + high) / 2
    for sign, bit in ((1, 0), (-1, 0x8000)):
        assert (to_bits(sign * middle, dtype) == below + below % 2 + bit).all()
        assert (to_bits(sign * np.nextafter(middle, 0), dtype) == below + bit).all()
        assert (to_bits(sign * np.nextafter(middle, np.inf), dtype) == below + 1 + bit).all()
    most = high[-1]
    limit = most + (most - low[-1]) / 2
    assert np.isinf(bookends.from_bits(to_bits([limit, -limit, 1e300], dtype), dtype)).all()
    assert bookends.from_bits(to_bits([np.nextafter(limit, 0)], dtype), dtype) == most


def test_a_wrong_element_is_seen():
    case = Case(BF16, np.zeros((2, 3), np.int32), 5, 4)
    out = Array(30, np.uint16, VALUE_FILL).put(case.want)
    case.compare(out, "right")
    for index in (0, 13, 29):
        wrong = case.want.reshape(-1).copy()
        wrong[index] ^= 1
        with pytest.raises(pytest.fail.Exception, match="1 of 30 elements are wrong"):
            case.compare(Array(30, np.uint16, VALUE_FILL).put(wrong), "wrong")
    with pytest.raises(pytest.fail.Exception, match="30 of 30"):
        case.compare(Array(30, np.uint16, VALUE_FILL), "unwritten")
    for where in (out.start - 1, out.end, out.start - bookends.GUARD, out.end + bookends.GUARD - 1):
        out._fill(where, where + 1, 0)
        with pytest.raises(AssertionError, match="wrote outside"):
            case.compare(out, "outside")
        out._fill(where, where + 1, VALUE_FILL)


# ---------------------------------------------------------------------------------------------------------------------
# shapes and alignment

@every_version
@every_dtype
@pytest.mark.parametrize("C", CHANNELS)
def test_shapes(C, dtype, version):
    rng = np.random.default_rng(C)
    for B in (1, 2, 3, 4, 5, 8):
        for T in (1, 2, 7, 33) if C < 200 else (1, 7):
            V = (1, 2, 1000)[(B + T + C) % 3]
            Case(dtype, random_ids(rng, B, T, V), C, V).check(version)


@every_version
@every_dtype
@pytest.mark.parametrize("B, T, C, V", [
    (64, 1, 8, 1000), (64, 2, 65, 2), (65, 3, 16, 1000), (9, 129, 96, 1000), (16, 257, 24, 7), (1, 1025, 32, 1000),
    (1000, 1, 1, 1), (1, 1, 4096, 2), (2, 3, 5000, 50), (3, 2, 8191, 5), (2, 5, 16384, 3),
    (4, 33, 5, 50257), (8, 16, 64, 50257), (5, 8, 768, 50257), (1, 1, 1, 1)])
def test_more_shapes(B, T, C, V, dtype, version):
    ids = random_ids(np.random.default_rng(C), B, T, V)
    ids.reshape(-1)[-1] = V - 1
    ids[0, 0] = 0 if ids.size > 1 else V - 1
    Case(dtype, ids, C, V).check(version)


@every_version
@pytest.mark.parametrize("B, T, C", [(1, 1, 8400000), (1, 2, 1100003), (300000, 1, 2), (70000, 3, 8), (1, 200000, 3)])
def test_one_side_very_long(B, T, C, version):
    """Longer than a grid is along y or z (65535 blocks), however the work is cut."""
    Case(BF16, random_ids(np.random.default_rng(C), B, T, 3), C, 3).check(version)


@every_version
@every_dtype
def test_repeated_and_distinct_ids(dtype, version):
    for B, T, C in ((3, 5, 8), (8, 33, 40), (6, 2, 257)):
        count = B * T
        for V in (1, count, 3 * count):
            for ids in (np.zeros(count), np.full(count, V - 1), np.arange(count) % V, np.arange(count)[::-1] % V,
                        np.arange(count) * 7 % V):
                Case(dtype, ids.astype(np.int32).reshape(B, T), C, V).check(version)


# ---------------------------------------------------------------------------------------------------------------------
# no table of positions

@every_version
@every_dtype
@pytest.mark.parametrize("C", [1, 2, 3, 8, 9, 12, 64, 65, 128, 257, 768, 769])
def test_without_positions(C, dtype, version):
    """out holds rows of wte, bit for bit: zeros keep their sign."""
    for B, T, V in ((1, 1, 1), (1, 7, 50), (4, 5, 50), (3, 2, 2), (8, 1, 1000)):
        rng = np.random.default_rng(C)
        for offset in (0, 1):
            Case(dtype, random_ids(rng, B, T, V), C, V, offsets=(offset, 0, offset, 0), positions=False).check(version)
        ids = random_ids(rng, B, T, V)
        ids.reshape(-1)[rng.integers(ids.size)] = V
        Case(dtype, ids, C, V, positions=False).check(version)
    Case(dtype, np.array([[0, 1, -1], [INT_MAX, 0, 7]]), C, 0, positions=False).check(version)
    values = bookends.special_values(dtype)
    rows = np.repeat(values[:, None], C, 1)
    every = np.arange(len(values))[:, None]
    case = Case(dtype, every, C, len(values), wte=dict(enumerate(rows)), positions=False)
    case.check(version)
    number = ~np.isnan(bookends.from_bits(rows, dtype))
    assert (case.want[:, 0, :][number] == rows[number]).all() and (case.want == to_bits(-0.0, dtype)).any()


@every_dtype
def test_the_default_version_at_every_alignment(dtype):
    """It is another version for rows of odd length, with the same bits."""
    for C in (1, 2, 7, 8, 33, 64, 769, 770):
        for offset in (0, 1, 2, 4):
            for positions in (True, False):
                Case(dtype, random_ids(np.random.default_rng(C), 4, 9, 50), C, 50, offsets=(offset, 0, 0, 0),
                     positions=positions).check(0)


def test_the_program_without_positions():
    """It counts no bytes of wpe."""
    arguments = ("4", "-b", 2, "-t", 8, "-c", 64, "-v", 100, "--dtype", "fp32", "--json", "-", "--repeat", 1)
    with_wpe, without = (json.loads(bookends.run("encoder_forward", *arguments, *more).stdout.splitlines()[0])
                         for more in ((), ("--no-positions",)))
    assert without["no_positions"] is True and with_wpe["no_positions"] is False
    assert with_wpe["bytes"] - without["bytes"] == 8 * 64 * 4
    assert (with_wpe["flops"], without["flops"]) == (16 * 64, 0)
    result = bookends.run("encoder_forward", "all", "--no-positions", "-b", 3, "-t", 7, "-c", 65, "-v", 9, "--check")
    assert result.returncode == 0 and result.stdout.count(": ok") == len(VERSIONS)
    assert "no_positions" in result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# ids outside the table

@every_version
@every_dtype
@pytest.mark.parametrize("C", [1, 3, 8, 65, 264, 768])
def test_bad_ids(C, dtype, version):
    for B, T, V in ((1, 1, 5), (3, 7, 50), (4, 2, 1), (9, 11, 50)):
        last = B * T - 1
        for value in (-1, V, V + 1, INT_MIN, INT_MAX):
            for where in ([0], [last // 2], [last], [last, 0], [last, last // 2], range(last + 1)):
                ids = random_ids(np.random.default_rng(1), B, T, V)
                ids.reshape(-1)[list(where)] = value
                Case(dtype, ids, C, V).check(version, bad=value, where=list(where)[:3])


@every_version
def test_every_position_may_be_the_bad_one(version):
    for position in range(35):
        ids = np.zeros((5, 7), np.int32)
        ids.reshape(-1)[position] = -1
        Case(BF16, ids, 12, 4).check(version, position=position)


@every_version
@every_dtype
def test_empty_vocabulary(dtype, version):
    for C in (1, 8, 65, 512):
        case = Case(dtype, np.array([[0, 1, -1], [INT_MAX, 0, 7]]), C, 0)
        case.check(version)
        status, out = status_array(), Array(6 * C, dtype.bits, VALUE_FILL)
        code, word = bookends.encoder_forward(out, case.inp_array, None, case.wpe_array, status, 2, 3, C, 0, dtype,
                                              version)
        assert (code, word) == (OK, 0)
        case.compare(out, "V=0, wte null, C=%d" % C)


@every_version
def test_status_is_only_lowered(version):
    good = np.zeros((4, 6), np.int32)

    def bad_at(*positions):
        ids = good.copy()
        ids.reshape(-1)[list(positions)] = -5
        return Case(FP32, ids, 9, 3)

    status = status_array()
    for case, word in ((bad_at(), -1), (bad_at(13, 20), 13), (bad_at(21), 13), (bad_at(), 13), (bad_at(5), 5),
                       (bad_at(23, 6), 5), (bad_at(0), 0), (bad_at(0, 1), 0)):
        assert case.call(version, status)[1:] == (OK, word)


@every_version
def test_status_of_others_is_untouched(version):
    case = Case(BF16, np.zeros((2, 2), np.int32), 16, 3)
    for word in (-1, 0, 7, 2**40, 2**63 - 1):
        assert case.call(version, status_array(word))[1:] == (OK, word)


@every_version
@every_dtype
def test_null_status(dtype, version):
    for ids in ([[0, 1, 2]], [[-1, 1, INT_MAX]]):
        for C in (3, 64):
            case = Case(dtype, np.array(ids), C, 3)
            out, code, word = case.call(version, None)
            assert (code, word) == (OK, None)
            case.compare(out, "null status")


@pytest.mark.skipif(ON_CUDA, reason="needs the CUDA runtime that the library is linked with")
def test_an_error_left_behind_is_not_the_calls():
    case = Case(BF16, np.array([[0, 1, 2]]), 8, 3)
    with bookends.pending_error():
        out, code, _ = case.call(0, None)
    assert code == OK
    case.compare(out, "after an error")


# ---------------------------------------------------------------------------------------------------------------------
# values

@every_version
@every_dtype
def test_ieee_specials(dtype, version):
    """Every pair of: zeros, infinities, NaN, the largest and the smallest, and what makes them overflow."""
    values = bookends.special_values(dtype)
    n = len(values)
    for C in (1, 8, 9):
        columns = np.repeat(values[:, None], C, 1)
        case = Case(dtype, np.repeat(np.arange(n)[:, None], n, 1), C, n, wte=dict(enumerate(columns)), wpe=columns)
        want = bookends.from_bits(case.want, dtype)
        assert np.isinf(want).any() and np.isnan(want).any() and (np.isfinite(want) & (want != 0)).any()
        assert (np.signbit(want) & (want == 0)).any() and (~np.signbit(want) & (want == 0)).any()
        case.check(version)


def test_what_the_specials_hold():
    """Pairs on either side of an overflow, and subnormals that must not be flushed."""
    def add(a, b, dtype):
        values = bookends.from_bits(np.array([a, b], dtype.bits), dtype)
        return int(to_bits(values.sum(), dtype))
    assert add(0x7bff, 0x4c00, FP16) == 0x7c00 and add(0x7bff, 0x4bff, FP16) == 0x7bff
    assert add(0x7f7f, 0x7b00, BF16) == 0x7f80 and add(0x7f7f, 0x7aff, BF16) == 0x7f7f
    assert add(0x0001, 0x007f, BF16) == 0x0080 and add(0x0001, 0x0001, BF16) == 0x0002
    assert add(0x03ff, 0x0001, FP16) == 0x0400
    assert add(0x7f7fffff, 0x73000000, FP32) == 0x7f800000


@every_version
@every_dtype
def test_every_kind_of_bits(dtype, version):
    rng = np.random.default_rng(3)
    V, T, C = 64, 64, 40
    bits = lambda rows: rng.integers(0, np.iinfo(dtype.bits).max, (rows, C), dtype.bits, endpoint=True)
    Case(dtype, rng.permutation(V).reshape(1, V), C, V, wte=dict(enumerate(bits(V))), wpe=bits(T)).check(version)


@every_version
@every_dtype
def test_repeats_bit_for_bit(dtype, version):
    rng = np.random.default_rng(4)
    ids = random_ids(rng, 9, 17, 30)
    ids[2, 3], ids[8, 16] = -1, 30
    for C in (7, 64, 520):
        case = Case(dtype, ids, C, 30)
        first = case.call(version)[0].get()
        for fill in (VALUE_FILL, NAN_FILL, 0):
            assert (case.call(version, fill=fill)[0].get() == first).all()


# ---------------------------------------------------------------------------------------------------------------------
# past 2^31 and 2^32 elements

@every_version
@pytest.mark.parametrize("dtype, C", [(FP32, 8960), (FP16, 8960), (BF16, 8960), (FP16, 17920), (BF16, 17920)],
                         ids=lambda value: getattr(value, "name", value))
def test_large_tables(dtype, C, version):
    """Offsets that neither a signed nor an unsigned 32-bit number holds."""
    V = 262144
    or_skip(V * C * np.dtype(dtype.bits).itemsize)
    edge, edge32 = 2**31 // C, min(2**32 // C, V - 3)
    ids = np.array([[V - 1, edge, V - 2], [edge + 1, edge - 1, 2**30 // C], [V - 17, 3, V - 1],
                    [edge32 - 1, edge32, edge32 + 1]], np.int32)
    rng = np.random.default_rng(5)
    rows = {int(row): random_bits(rng, C, dtype) for row in np.unique(ids)}
    wpe = random_bits(rng, (3, C), dtype)
    wte_array = Array(V * C, dtype.bits, None)
    for row, values in rows.items():
        wte_array.put(values, row * C)
    inp_array, wpe_array = Array(ids.size, np.int32).put(ids), Array(wpe.size, dtype.bits).put(wpe)
    out = Array(ids.size * C, dtype.bits, VALUE_FILL)
    code, word = bookends.encoder_forward(out, inp_array, wte_array, wpe_array, status_array(), 4, 3, C, V, dtype,
                                          version)
    assert (code, word) == (OK, -1)
    want = reference(ids, rows, wpe, C, V, dtype).reshape(12, C)
    for position, row in enumerate(out.get().reshape(12, C)):
        assert bookends.same(row, want[position], dtype).all(), (position, ids.reshape(-1)[position])
    assert out.guards_intact()


# ---------------------------------------------------------------------------------------------------------------------
# the library's promises

@every_dtype
@pytest.mark.parametrize("version", [0, *VERSIONS])
def test_no_work_is_no_error(dtype, version):
    for B, T, C in ((0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0), (0, INT_MAX, INT_MAX), (INT_MAX, INT_MAX, 0)):
        for V in (0, 4):
            nothing = bookends.encoder_forward(None, None, None, None, None, B, T, C, V, dtype, version)
            assert nothing == (OK, None), (B, T, C)
            out, status = Array(64, dtype.bits, VALUE_FILL), status_array()
            inp, table = Array(64, np.int32), Array(64, dtype.bits)  # every id is -1
            assert bookends.encoder_forward(out, inp, table, table, status, B, T, C, V, dtype, version) == (OK, -1)
            assert out.get().tobytes() == bytes([VALUE_FILL]) * out.get().nbytes and out.guards_intact()


def test_version_0_is_one_of_them():
    case = Case(BF16, random_ids(np.random.default_rng(7), 5, 9, 20), 264, 20)
    case.check(0)


def call_with(**changes):
    """(code, whether out was left alone) of a call that is fine but for the changes."""
    case = Case(FP16, np.zeros((2, 3), np.int32), 8, 4)
    out, status = Array(48, np.uint16, VALUE_FILL), status_array()
    arguments = dict(out=out, inp=case.inp_array, wte=case.wte_array, wpe=case.wpe_array, status=status, B=2, T=3, C=8,
                     V=4, dtype=FP16, version=0)
    arguments.update(changes)
    code = bookends.encoder_forward(**arguments)[0]
    return code, out.get().tobytes() == bytes([VALUE_FILL]) * 96 and int(status.get()[0]) == -1


@pytest.mark.parametrize("changes, code", [
    (dict(out=None), bookends.ERROR_NULL), (dict(inp=None), bookends.ERROR_NULL),
    (dict(wte=None), bookends.ERROR_NULL), (dict(wte=None, wpe=None), bookends.ERROR_NULL),
    *[({size: value}, bookends.ERROR_SHAPE) for size in "BTCV" for value in (-1, INT_MIN)],
    (dict(B=-1, out=None), bookends.ERROR_SHAPE), (dict(B=0, T=-1), bookends.ERROR_SHAPE),
    *[(dict(dtype=value), bookends.ERROR_DTYPE) for value in (3, -1, 1000)],
    *[(dict(version=value), bookends.ERROR_VERSION) for value in (-1, len(VERSIONS) + 1, INT_MAX, INT_MIN)],
], ids=str)
def test_refused_calls_launch_nothing(changes, code):
    assert call_with() == (OK, False)
    assert call_with(**changes) == (code, True)
    bookends.check_last_message("bk_encoder_forward", code, changes)


def test_error_strings():
    assert bookends.error_string(OK) == "no error"
    words = {bookends.ERROR_NULL: "null", bookends.ERROR_SHAPE: "negative", bookends.ERROR_DTYPE: "dtype",
             bookends.ERROR_VERSION: "version"}
    for code, word in words.items():
        assert word in bookends.error_string(code)
    assert len({bookends.error_string(code) for code in (OK, *words)}) == 5
    assert bookends.error_string(bookends.ERROR_CUDA + 9) == "invalid configuration argument"
    assert "must be null" in bookends.error_string(bookends.ERROR_NOT_NULL)
    assert "256" in bookends.error_string(bookends.ERROR_ALIGNMENT)
    for code in (-1, 12, 999, INT_MIN):
        assert "no such error" in bookends.error_string(code)
    for code in (1000, 1999, 2000, INT_MAX):
        assert bookends.error_string(code)


def test_each_thread_has_its_last_message():
    assert call_with(out=None)[0] == bookends.ERROR_NULL
    seen = []

    def other():
        seen.append(bookends.last_message())
        assert call_with(inp=None)[0] == bookends.ERROR_NULL
        seen.append(bookends.last_message())
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == ["", "bk_encoder_forward: inp is null"]
    assert call_with()[0] == OK
    assert bookends.last_message() == "bk_encoder_forward: out is null"


def test_long_messages_are_cut():
    assert bookends.classifier_fused(*[None] * 9, 1, 1, 1, bookends.ClassifierOptions(*[-3.4e38] * 5), BF16)[0] == \
        bookends.ERROR_OPTIONS
    assert len(bookends.last_message()) < 512


# ---------------------------------------------------------------------------------------------------------------------
# streams and graphs

@needs_cuda
@every_version
def test_runs_on_the_stream_it_is_given(version):
    """The ids arrive on that stream late: a launch on any other would see the old ones, which are bad."""
    import torch
    ids = random_ids(np.random.default_rng(8), 8, 64, 50)
    case = Case(BF16, ids, 264, 50)
    late = torch.from_numpy(ids.reshape(-1).view(np.uint8).copy()).cuda()
    case.inp_array.put(np.full(ids.shape, -1, np.int32))
    out, status = Array(ids.size * 264, np.uint16, VALUE_FILL), status_array()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        case.inp_array.memory[case.inp_array.start:case.inp_array.end].copy_(late)
    code, _ = bookends.encoder_forward(out, case.inp_array, case.wte_array, case.wpe_array, status, 8, 64, 264, 50,
                                       BF16, version, stream.cuda_stream)
    assert code == OK
    assert not stream.query(), "the call waited for the device"
    case.compare(out, "late ids")
    assert int(status.get()[0]) == -1


@needs_cuda
@every_version
@every_dtype
def test_graph_replay_with_other_ids(dtype, version):
    import torch
    rng = np.random.default_rng(9)
    case = Case(dtype, rng.permutation(64).reshape(4, 16), 136, 64)
    out, status = Array(64 * 136, dtype.bits, VALUE_FILL), status_array()
    case.call(version)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        code, _ = bookends.encoder_forward(out, case.inp_array, case.wte_array, case.wpe_array, status, 4, 16, 136, 64,
                                           dtype, version, torch.cuda.current_stream().cuda_stream)
    assert code == OK
    for replay in range(4):
        ids = random_ids(rng, 4, 16, 64)
        if replay == 2:
            ids[1, 5] = 64
        case.inp_array.put(ids)
        torch.cuda.synchronize()
        graph.replay()
        case.want = reference(ids, case.wte, case.wpe, case.C, 64, dtype)
        case.compare(out, "replay %d" % replay)
        assert int(status.get()[0]) == (21 if replay >= 2 else -1)
