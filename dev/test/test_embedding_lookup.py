"""bk_embedding_lookup and bk_embedding_bag against numpy float64."""

import numpy as np
import pytest

import bookends
from bookends import (BF16, CHANNELS, DTYPES, FP16, FP32, MAX, MEAN, OK, SUM, VALUE_FILL, Array, BagOptions,
                      from_bits, random_bits, status_array, to_bits)

VERSIONS, BAG_VERSIONS = (1, 2, 3, 4, 5), (1, 2, 3, 4, 5)
TYPES = [(FP32, FP32), (FP16, FP16), (FP16, FP32), (BF16, BF16), (BF16, FP32)]
INDEX_TYPES = (np.int32, np.int64)

every_version = pytest.mark.parametrize("version", VERSIONS)
every_bag_version = pytest.mark.parametrize("version", BAG_VERSIONS)
every_type = pytest.mark.parametrize("dtype, out_dtype", TYPES, ids=["%s-%s" % (a.name, b.name) for a, b in TYPES])


def test_versions_are_known():
    assert bookends.versions("embedding_lookup") == list(VERSIONS)


# ---------------------------------------------------------------------------------------------------------------------
# the gather

def gather(ids, table, rows, dtype, out_dtype):
    """The bits of out; table (rows, C) in bits."""
    good = (ids >= 0) & (ids < rows)
    C = table.shape[1]
    out = np.full((ids.size, C), to_bits(np.nan, out_dtype))
    values = table[ids[good]] if rows else np.zeros((0, C), dtype.bits)
    out[good] = values if out_dtype is dtype else to_bits(from_bits(values, dtype), out_dtype)
    return out


def check_gather(ids, table, dtype, out_dtype, version, index=np.int32, stride=None, offsets=(0, 0, 0)):
    """One call with every check. table (rows, C) in bits; offsets, in elements, of out, idx and the table."""
    rows, C = table.shape
    stride = C if stride is None else stride
    name = "version %d %s-%s N=%d C=%d rows=%d stride=%d offsets=%s %s" % (
        version, dtype.name, out_dtype.name, ids.size, C, rows, stride, offsets, np.dtype(index).name)
    out = Array(ids.size * C, out_dtype.bits, VALUE_FILL, offsets[0])
    idx = Array(ids.size, index, offset=offsets[1]).put(ids)
    spread = np.full((rows, stride), dtype.bits(0xa5a5))
    spread[:, :C] = table
    device_table = Array(rows * stride, dtype.bits, offset=offsets[2]).put(spread)
    status = status_array()
    code, word = bookends.embedding_lookup(out, idx, device_table, status, ids.size, C, rows, stride, dtype, out_dtype,
                                           version)
    assert code == OK, name + ": " + bookends.last_message()
    got, want = out.get().reshape(ids.size, C), gather(ids, table, rows, dtype, out_dtype)
    good = (ids >= 0) & (ids < rows)
    # Within one type every bit is copied, of a NaN too; a conversion may change a NaN's bits.
    assert (got[good] == want[good]).all() if out_dtype is dtype else bookends.same(got, want, out_dtype).all(), name
    assert np.isnan(from_bits(got[~good], out_dtype)).all(), name
    assert word == (-1 if good.all() else int(np.argmin(good))), name
    assert out.guards_intact() and status.guards_intact(), name
    assert (idx.get() == ids).all() and (device_table.get() == spread.reshape(-1)).all(), name


@every_version
@every_type
@pytest.mark.parametrize("C", CHANNELS + (5000,))
def test_gather_shapes(C, dtype, out_dtype, version):
    rng = np.random.default_rng(C)
    for N, rows in ((1, 1), (2, 50), (7, 2), (33, 1000 if C < 200 else 40)):
        table = random_bits(rng, (rows, C), dtype)
        index = INDEX_TYPES[(N + C) % 2]
        check_gather(rng.integers(0, rows, N), table, dtype, out_dtype, version, index)


@every_version
@every_type
def test_gather_alignment_and_stride(dtype, out_dtype, version):
    rng = np.random.default_rng(1)
    for C in (8, 9, 64, 72, 130):
        table = random_bits(rng, (20, C), dtype)
        for stride in (C, C + 1, C + 4, C + 8, 4 * C):
            for offsets in ((0, 0, 0), (1, 1, 0), (0, 1, 1), (2, 0, 4), (4, 0, 2), (8, 0, 8)):
                check_gather(rng.integers(0, 20, 13), table, dtype, out_dtype, version, stride=stride, offsets=offsets)


@every_version
@pytest.mark.parametrize("index", INDEX_TYPES, ids=["int32", "int64"])
def test_gather_bad_indices(index, version):
    """Negative indices are bad, and so is an int64 index whose lower half would be good."""
    rng = np.random.default_rng(2)
    bad = [-1, 10, 2**31 - 1, -2**31] + ([2**32 + 3, -2**32 + 3, 2**63 - 1, -2**63] if index is np.int64 else [])
    for C in (3, 64, 200):
        table = random_bits(rng, (10, C), BF16)
        for count in (1, 5):
            for where in (0, 3, 12):
                ids = rng.integers(0, 10, 13)
                ids[where:where + count] = rng.choice(bad, ids[where:where + count].size)
                check_gather(ids, table, BF16, BF16, version, index)
        check_gather(rng.choice(bad, 9), table, BF16, FP32, version, index)


@every_version
def test_gather_special_values(version):
    for dtype in DTYPES:
        values = bookends.special_values(dtype)
        C = 8 * (values.size // 8 + 1)
        table = np.resize(values, (3, C)).astype(dtype.bits)
        check_gather(np.array([2, 0, 1, 1]), table, dtype, dtype, version)
        check_gather(np.array([2, 0, 1, 1]), table, dtype, FP32, version)


@every_version
def test_gather_no_work(version):
    for N, C, rows in ((0, 8, 5), (3, 0, 5), (0, 0, 0)):
        out = Array(64, np.uint16, VALUE_FILL)
        code, _ = bookends.embedding_lookup(out, None, None, None, N, C, rows, C, BF16, BF16, version)
        assert code == OK and (out.get() == 0xa5a5).all()
    check_gather(np.array([0, 3]), np.zeros((0, 64), np.uint16), BF16, BF16, version)


@every_version
@pytest.mark.parametrize("N, C", [(200000, 3), (70000, 8), (2, 1100003), (1, 8400000)])
def test_gather_one_side_very_long(N, C, version):
    rng = np.random.default_rng(C)
    check_gather(rng.integers(0, 3, N), random_bits(rng, (3, C), BF16), BF16, BF16, version)


@every_version
@pytest.mark.parametrize("rows, C", [(2**31 + 7, 1), (2**20, 4096), (2**33, 1)])
def test_gather_large_tables(rows, C, version):
    """Beyond 2^31 and 2^32 elements, and beyond 2^31 rows."""
    if bookends.ON_CUDA:
        bookends.or_skip(2 * rows * C)
    table = Array(rows * C, np.uint16, None)
    ids = np.array([rows - 1, 0, rows // 2, 5, rows - 2, rows], np.int64)
    for k, row in enumerate(ids[:-1]):
        table.put(np.full(C, 100 + k, np.uint16), int(row) * C)
    idx, out, status = Array(ids.size, np.int64).put(ids), Array(ids.size * C, np.uint16, VALUE_FILL), status_array()
    code, word = bookends.embedding_lookup(out, idx, table, status, ids.size, C, rows, C, BF16, BF16, version)
    assert code == OK and word == 5
    got = out.get().reshape(-1, C)
    assert (got[:-1] == 100 + np.arange(5)[:, None]).all() and np.isnan(from_bits(got[-1], BF16)).all()


# ---------------------------------------------------------------------------------------------------------------------
# bags

def bag_reference(ids, begins, ends, table_rows, table, mode, weights, padding, dtype):
    """(values in float64, sum of the magnitudes, argmax) of bags; table (all rows, C) in bits; table_rows (bags, 2): the
    rows of the bag's own table. A bag with a bad index is NaN."""
    C = table.shape[1]
    numbers = from_bits(table, dtype)
    out, size = np.zeros((len(begins), C)), np.zeros((len(begins), C))
    argmax = np.full((len(begins), C), -1, np.int64)
    first_bad = -1
    for g, (begin, end) in enumerate(zip(begins, ends)):
        at = np.arange(begin, max(begin, end))
        at = at[(ids[at] != padding) | (padding < 0)]
        first, last = table_rows[g]
        bad = at[(ids[at] < 0) | (ids[at] >= last - first)]
        if bad.size:
            out[g] = np.nan
            first_bad = int(bad[0]) if first_bad < 0 else min(first_bad, int(bad[0]))
            continue
        if at.size == 0:
            continue
        rows = numbers[ids[at] + first]
        if mode == MAX:
            ranks = np.where(np.isnan(rows), np.inf, rows)  # no infinities in these tables
            where = np.argmax(ranks, axis=0)
            out[g], argmax[g] = rows[where, np.arange(C)], at[where]
            continue
        terms = rows * (1.0 if weights is None else weights[at].astype(np.float64)[:, None])
        divisor = at.size if mode == MEAN else 1
        out[g], size[g] = terms.sum(0) / divisor, np.abs(terms).sum(0) / divisor
    return out, size, argmax, first_bad


class Problem:
    """Bags of given lengths over one or several tables; small integers, or values of many magnitudes."""

    def __init__(self, seed, lengths, C, rows=50, dtype=BF16, mode=SUM, weighted=False, padding=-1, tables=1, csr=True,
                 index=np.int32, offset_index=None, exact=True, bad=0, stride=None, offset=0, last_is_empty=False):
        rng = np.random.default_rng(seed)
        self.rng, self.dtype, self.mode, self.C, self.exact = rng, dtype, mode, C, exact
        self.lengths = np.asarray(lengths, np.int64)
        self.bags, self.tables, self.csr = self.lengths.size, tables, csr
        self.begins = np.concatenate([[0], np.cumsum(self.lengths)])
        self.count = int(self.begins[-1])
        sizes = rng.integers(1, rows + 1, tables) if tables > 1 else np.array([rows])
        if last_is_empty:
            sizes[-1] = 0
        self.first_rows = np.concatenate([[0], np.cumsum(sizes)])
        self.rows = int(self.first_rows[-1])
        self.table_of = np.arange(self.bags) // max(1, self.bags // tables)
        own = np.repeat(sizes[self.table_of], self.lengths) if self.bags else np.zeros(0, np.int64)
        self.ids = (rng.random(self.count) * own).astype(np.int64)
        if bad:
            where = rng.choice(self.count, bad, replace=False)
            self.ids[where] = rng.choice([-1, -5, rows, rows + 3], bad)
        self.padding = padding
        values = rng.integers(-16, 17, (self.rows, C)).astype(np.float64)
        self.table = to_bits(values, dtype) if exact else random_bits(rng, (self.rows, C), dtype)
        self.weights = None
        if weighted:
            self.weights = (rng.choice([0.5, 1, 2, -1], self.count) if exact else
                            rng.standard_normal(self.count)).astype(np.float32)
        self.stride, self.offset = C if stride is None else stride, offset
        spread = np.full((self.rows, self.stride), to_bits(np.nan, dtype))
        spread[:, :C] = self.table
        self.device_table = Array(spread.size, dtype.bits, offset=offset).put(spread)
        self.idx = Array(self.count, index, offset=offset).put(self.ids)
        self.offsets = Array(self.bags + 1, offset_index or index, offset=offset).put(self.begins) if csr else None
        self.device_weights = None if self.weights is None else Array(self.count, np.float32).put(self.weights)
        self.device_first_rows = Array(tables + 1, np.int64).put(self.first_rows) if tables > 1 else None
        ranges = np.stack([self.first_rows[self.table_of], self.first_rows[self.table_of + 1]], 1)
        self.want = bag_reference(self.ids, self.begins[:-1], self.begins[1:], ranges, self.table, mode, self.weights,
                                  padding, dtype)

    def call(self, version, out_dtype):
        """(out, argmax, status word), each checked for its guards; out and argmax in the order of the bags."""
        out = Array(self.bags * self.C, out_dtype.bits, VALUE_FILL, self.offset)
        argmax = Array(self.bags * self.C, np.int64, VALUE_FILL) if self.mode == MAX else None
        status = status_array()
        hotness = 0 if self.csr or not self.bags else int(self.lengths[0])
        options = BagOptions(self.mode, self.offsets, hotness, self.device_weights, self.padding,
                             self.device_first_rows, self.tables)
        code, word = bookends.embedding_bag(out, argmax, self.idx, self.device_table, status, self.count, self.bags,
                                            self.C, self.rows, self.stride, options, self.dtype, out_dtype, version)
        assert code == OK, bookends.last_message()
        assert out.guards_intact() and status.guards_intact() and (argmax is None or argmax.guards_intact())
        batch = self.bags // self.tables

        def by_bag(values):
            return values.reshape(batch, self.tables, self.C).transpose(1, 0, 2).reshape(self.bags, self.C)
        return by_bag(out.get()), None if argmax is None else by_bag(argmax.get()), word

    def check(self, version, out_dtype=None):
        out_dtype = out_dtype or self.dtype
        got, argmax, word = self.call(version, out_dtype)
        value, size, where, first_bad = self.want
        name = "version %d C=%d lengths=%s" % (version, self.C, self.lengths[:8])
        assert word == first_bad, name
        if self.exact or self.mode == MAX:
            with np.errstate(over="ignore"):
                want = to_bits(value.astype(np.float32), out_dtype)
            equal = (from_bits(got, out_dtype) == from_bits(want, out_dtype)) | np.isnan(from_bits(want, out_dtype)) & \
                np.isnan(from_bits(got, out_dtype))
            assert equal.all(), "%s: %s is wrong" % (name, np.argwhere(~equal)[0])
        else:
            slack = (self.lengths[:, None] + 2) * 2.0**-24 * size
            low, high = to_bits(value - slack, out_dtype), to_bits(value + slack, out_dtype)
            numbers = from_bits(got, out_dtype)
            right = (from_bits(low, out_dtype) <= numbers) & (numbers <= from_bits(high, out_dtype))
            assert (right | np.isnan(value)).all() and np.isnan(numbers[np.isnan(value)]).all(), name
        if self.mode == MAX:
            assert (argmax == where).all(), name
        if not self.bags or not self.count:
            return
        again, _, _ = self.call(version, out_dtype)
        assert (again == got).all(), name + ": other bits the second time"


@every_bag_version
@every_type
@pytest.mark.parametrize("C", [c for c in CHANNELS if c < 520] + [1600, 5000])
def test_bag_shapes(C, dtype, out_dtype, version):
    for mode in (SUM, MEAN, MAX):
        lengths = np.random.default_rng(C).integers(0, 20, 17 if C < 600 else 5)
        Problem(C, lengths, C, dtype=dtype, mode=mode, index=INDEX_TYPES[C % 2],
                offset_index=INDEX_TYPES[C // 2 % 2]).check(version, out_dtype)


@every_bag_version
@every_type
def test_bag_rounding(dtype, out_dtype, version):
    """Values of many magnitudes: sums in float, rounded once."""
    for mode in (SUM, MEAN):
        for weighted in (False, True):
            Problem(3, [1, 2, 0, 9, 700, 33, 8, 16, 1300], 40, dtype=dtype, mode=mode, weighted=weighted,
                    exact=False).check(version, out_dtype)


@every_bag_version
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
@pytest.mark.parametrize("hotness", [0, 1, 2, 7, 8, 9, 64, 513])
def test_bag_fixed_hotness(hotness, mode, version):
    for C in (4, 33, 128):
        Problem(hotness, [hotness] * 5, C, mode=mode, csr=False, weighted=mode != MAX).check(version)


@every_bag_version
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_bag_padding(mode, version):
    """An index that is left out: of sums, of the mean's count, and where the bag holds nothing else."""
    for padding in (0, 3):
        for rows in (1, 4, 50):
            Problem(7, [5, 0, 12, 1, 40, 1, 1], 24, rows=rows, mode=mode, padding=padding,
                    weighted=mode != MAX).check(version)


@every_bag_version
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
@pytest.mark.parametrize("index", INDEX_TYPES, ids=["int32", "int64"])
def test_bag_bad_indices(index, mode, version):
    for bad in (1, 3, 20):
        for C in (3, 64):
            Problem(bad, [5, 0, 12, 1, 40, 600], C, mode=mode, index=index, bad=bad).check(version)
            Problem(bad, [5, 0, 12, 1, 40, 600], C, mode=mode, index=index, bad=bad, padding=2).check(version)


@every_bag_version
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
@pytest.mark.parametrize("tables", [2, 3, 8])
def test_bag_several_tables(tables, mode, version):
    for C in (8, 20, 65):
        lengths = np.random.default_rng(tables).integers(0, 9, 5 * tables)
        Problem(tables, lengths, C, mode=mode, tables=tables).check(version)
        Problem(tables, lengths, C, mode=mode, tables=tables, bad=4).check(version)
        Problem(tables, lengths, C, mode=mode, tables=tables, last_is_empty=True).check(version)


@every_bag_version
@every_type
def test_bag_alignment_and_stride(dtype, out_dtype, version):
    for C, stride in ((8, 9), (64, 64), (64, 68), (130, 133)):
        for offset in (0, 1, 2, 4):
            Problem(C, [3, 0, 9], C, dtype=dtype, stride=stride, offset=offset).check(version, out_dtype)


@every_bag_version
@pytest.mark.parametrize("mode", [SUM, MEAN, MAX])
def test_bag_long(mode, version):
    """A bag of 100,000 indices among short and empty ones; every index the same."""
    Problem(9, [3, 100000, 0, 512, 513, 1, 2000, 5, 5, 5, 5], 24, mode=mode, dtype=FP32).check(version)
    Problem(9, [3, 40000, 8], 24, rows=1, mode=mode, dtype=FP32).check(version)


@every_bag_version
def test_bag_maximum_of_special_values(version):
    """A NaN is larger than any number, the first of equal ones counts, and infinities are numbers."""
    nan, inf = np.nan, np.inf
    table = to_bits([[1.0], [nan], [inf], [-inf], [1.0], [-0.0], [0.0]], FP32)
    bags = [[0, 4], [4, 0], [0, 1, 1, 2], [3], [3, 0], [2, 2], [5, 6], [6, 5], [1], []]
    want = [1, 1, nan, -inf, 1, inf, -0.0, 0.0, nan, 0]
    at = [0, 0, 1, 0, 1, 0, 0, 0, 0, -1]
    ids = np.array([i for bag in bags for i in bag], np.int32)
    begins = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])])
    out, argmax = Array(len(bags), np.uint32, VALUE_FILL), Array(len(bags), np.int64, VALUE_FILL)
    code, _ = bookends.embedding_bag(out, argmax, Array(ids.size, np.int32).put(ids), Array(7, np.uint32).put(table),
                                     None, ids.size, len(bags), 1, 7, 1,
                                     BagOptions(MAX, Array(begins.size, np.int32).put(begins)), FP32, FP32, version)
    assert code == OK
    assert bookends.same(out.get(), to_bits(want, FP32), FP32).all()
    assert (argmax.get() == [a if a < 0 else b + a for a, b in zip(at, begins)]).all()


@every_bag_version
def test_bag_offsets_are_limited(version):
    """Offsets outside 0..count, and descending ones, read no index that is not there."""
    table, ids = Array(8, np.uint32).put(to_bits(np.ones(8), FP32)), Array(4, np.int32).put([0, 1, 2, 3])
    offsets = Array(5, np.int64).put([-3, 2, 1, 2**40, 2**62])
    out, status = Array(4 * 2, np.uint32, VALUE_FILL), status_array()
    code, word = bookends.embedding_bag(out, None, ids, table, status, 4, 4, 2, 4, 2, BagOptions(SUM, offsets), FP32,
                                        FP32, version)
    assert (code, word) == (OK, -1) and out.guards_intact()
    assert (from_bits(out.get().reshape(4, 2)[:, 0], FP32) == [2, 0, 3, 0]).all()


@every_bag_version
def test_bag_no_work(version):
    for bags, C in ((0, 8), (3, 0)):
        code, _ = bookends.embedding_bag(None, None, None, None, None, 0, bags, C, 5, C, BagOptions(hotness=0), BF16,
                                         BF16, version)
        assert code == OK
    Problem(1, [0, 0, 0], 16).check(version)
    Problem(1, [2, 3], 16, bad=5, rows=1).check(version)


@every_bag_version
def test_bag_large_table(version):
    """A table beyond 2^32 elements and 2^31 rows."""
    rows, C = 2**31 + 9, 4
    if bookends.ON_CUDA:
        bookends.or_skip(2 * rows * C)
    table = Array(rows * C, np.uint16, None)
    ids = np.array([rows - 1, 0, rows // 2, rows - 2], np.int64)
    for k, row in enumerate(ids):
        table.put(to_bits(np.full(C, 1 << k), BF16), int(row) * C)
    out = Array(2 * C, np.uint16, VALUE_FILL)
    code, _ = bookends.embedding_bag(out, None, Array(4, np.int64).put(ids), table, None, 4, 2, C, rows, C,
                                     BagOptions(hotness=2), BF16, BF16, version)
    assert code == OK
    assert (from_bits(out.get().reshape(2, C), BF16) == [[3], [12]]).all()


# ---------------------------------------------------------------------------------------------------------------------
# refusals

def test_refusals():
    array, idx = Array(64, np.uint16), Array(8, np.int32).put(np.zeros(8))

    def lookup(out=array, ids=idx, table=array, N=2, C=4, rows=4, stride=4, dtype=BF16, out_dtype=BF16, version=0):
        code, _ = bookends.embedding_lookup(out, ids, table, None, N, C, rows, stride, dtype, out_dtype, version)
        return code, bookends.last_message()
    for changes, code, words in (
            (dict(N=-1), bookends.ERROR_SHAPE, "N is -1"), (dict(C=-1), bookends.ERROR_SHAPE, "C is -1"),
            (dict(rows=-1), bookends.ERROR_SHAPE, "rows is -1"), (dict(stride=3), bookends.ERROR_SHAPE, "stride is 3"),
            (dict(rows=2**62), bookends.ERROR_SHAPE, "rows * stride"),
            (dict(out=None), bookends.ERROR_NULL, "out is null"), (dict(ids=None), bookends.ERROR_NULL, "idx is null"),
            (dict(table=None), bookends.ERROR_NULL, "table is null"),
            (dict(dtype=7), bookends.ERROR_DTYPE, "dtype"), (dict(out_dtype=FP16), bookends.ERROR_DTYPE, "out_dtype"),
            (dict(version=6), bookends.ERROR_VERSION, "no version 6")):
        assert lookup(**changes)[0] == code and words in lookup(**changes)[1], changes

    def bag(out=array, argmax=None, ids=idx, table=array, count=4, bags=2, C=4, version=0, reserved=0, **options):
        chosen = BagOptions(**{"hotness": 2, **options})
        chosen.reserved[2] = reserved
        code, _ = bookends.embedding_bag(out, argmax, ids, table, None, count, bags, C, 4, C, chosen, BF16, BF16,
                                         version)
        return code, bookends.last_message()
    longs, floats = Array(64, np.int64), Array(8, np.float32)
    for changes, code, words in (
            (dict(count=-1), bookends.ERROR_SHAPE, "count is -1"), (dict(bags=-1), bookends.ERROR_SHAPE, "bags is -1"),
            (dict(count=5), bookends.ERROR_SHAPE, "count is 5"), (dict(hotness=3), bookends.ERROR_SHAPE, "count is 4"),
            (dict(hotness=-1), bookends.ERROR_SHAPE, "hotness is -1"),
            (dict(mode=3), bookends.ERROR_OPTIONS, "no mode 3"), (dict(tables=0), bookends.ERROR_OPTIONS, "tables is 0"),
            (dict(tables=2), bookends.ERROR_OPTIONS, "first_rows"),
            (dict(tables=3, first_rows=longs), bookends.ERROR_SHAPE, "no multiple of tables, 3"),
            (dict(reserved=1), bookends.ERROR_OPTIONS, "reserved"),
            (dict(argmax=longs), bookends.ERROR_NOT_NULL, "argmax must be null"),
            (dict(mode=MAX, weights=floats), bookends.ERROR_NOT_NULL, "weights must be null"),
            (dict(out=None), bookends.ERROR_NULL, "out is null"), (dict(ids=None), bookends.ERROR_NULL, "idx is null"),
            (dict(table=None), bookends.ERROR_NULL, "table is null"),
            (dict(version=6), bookends.ERROR_VERSION, "no version 6")):
        assert bag(**changes)[0] == code and words in bag(**changes)[1], (changes, bag(**changes))
    assert (array.get() == 0xffff).all()
