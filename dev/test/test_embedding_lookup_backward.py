"""bk_embedding_bag_backward and bk_embedding_transpose against references in numpy float64."""

import numpy as np
import pytest

import bookends
from bookends import (BF16, ERROR_ALIGNMENT, ERROR_DTYPE, ERROR_FLAGS, ERROR_NOT_NULL, ERROR_NULL, ERROR_OPTIONS,
                      ERROR_SHAPE, ERROR_UNSUPPORTED, ERROR_VERSION, FP16, FP32, MAX, MEAN, OK, OVERWRITE, SUM,
                      VALUE_FILL, Array, BagOptions, from_bits, random_bits, status_array, to_bits)
from test_embedding_lookup import Problem

VERSIONS = [1, 2, 3, 4]
DETERMINISTIC = VERSIONS[1:]
TYPES = [(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP16, FP32), (BF16, FP32)]

every_version = pytest.mark.parametrize("version", VERSIONS)
every_deterministic = pytest.mark.parametrize("version", DETERMINISTIC)
every_type = pytest.mark.parametrize("dtype, grad_dtype", TYPES, ids=lambda d: d.name)
every_mode = pytest.mark.parametrize("mode", [SUM, MEAN, MAX], ids=["sum", "mean", "max"])


def test_versions_are_known():
    assert bookends.versions("embedding_lookup_backward") == VERSIONS


class Backward:
    """The gradients of a Problem, whose values are small integers (exact) or of many magnitudes."""

    def __init__(self, problem, grad_dtype=None, dweights=False):
        self.p, self.grad_dtype = problem, grad_dtype or problem.dtype
        p, rng = problem, problem.rng
        shape = (p.bags, p.C)
        self.dout_bits = to_bits(rng.integers(-8, 9, shape), p.dtype) if p.exact else random_bits(rng, shape, p.dtype)
        self.before = to_bits(rng.integers(-8, 9, (p.rows, p.C)), self.grad_dtype)
        self.wants_dweights = dweights
        self.argmax = None
        bag_of = np.repeat(np.arange(p.bags), p.lengths)
        good = (p.ids >= 0) & (p.ids < (p.first_rows[1:] - p.first_rows[:-1])[p.table_of[bag_of]])
        used = p.ids != p.padding if p.padding >= 0 else np.ones(p.count, bool)
        bad = np.flatnonzero(used & ~good)
        self.first_bad = int(bad[0]) if bad.size else -1
        adds = used & good
        rows = np.where(adds, p.first_rows[p.table_of[bag_of]] + p.ids, -1)
        dout = from_bits(self.dout_bits, p.dtype)
        factor = np.ones(p.count) if p.weights is None else p.weights.astype(np.float64)
        sizes = np.bincount(bag_of[used], minlength=p.bags)
        if p.mode == MEAN:
            factor = factor / np.maximum(sizes, 1)[bag_of]
        terms = factor[:, None] * dout[bag_of]
        if p.mode == MAX:  # any position of the bag may be the maximum's
            spread = rng.random(shape)
            self.argmax = np.where(p.lengths[:, None] > 0,
                                   p.begins[:-1, None] + (spread * p.lengths[:, None]).astype(np.int64), -1)
            terms = np.where(self.argmax[bag_of] == np.arange(p.count)[:, None], terms, 0.0)
        self.distinct = np.unique(rows[adds])
        self.sums, self.sizes = np.zeros((p.rows, p.C)), np.zeros((p.rows, p.C))
        np.add.at(self.sums, rows[adds], terms[adds])
        np.add.at(self.sizes, rows[adds], np.abs(terms[adds]))
        self.counts = np.bincount(rows[adds], minlength=p.rows)
        table = from_bits(p.table, p.dtype)
        products = np.where(adds[:, None], dout[bag_of] * table[np.maximum(rows, 0)], 0.0)
        divisor = np.maximum(sizes, 1)[bag_of] if p.mode == MEAN else np.ones(p.count)
        self.dweights = products.sum(1) / divisor
        self.dweights_size = np.abs(products).sum(1) / divisor
        batch = p.bags // p.tables
        by_value_row = np.arange(p.bags).reshape(p.tables, batch).T.reshape(-1)  # the bag of each row of dout
        self.dout = Array(p.bags * p.C, p.dtype.bits, offset=p.offset).put(self.dout_bits[by_value_row])
        self.device_argmax = None
        if p.mode == MAX:
            self.device_argmax = Array(p.bags * p.C, np.int64).put(self.argmax[by_value_row])

    def call(self, version, sparse=False, overwrite=False, wants_table=True):
        """(gradient, indices, dweights, status word), each checked for its guards."""
        p = self.p
        rows = p.count if sparse else p.rows
        dtable = Array(rows * p.C, self.grad_dtype.bits, VALUE_FILL, p.offset)
        if not sparse and not overwrite:
            dtable.put(self.before)
        indices, distinct = (Array(p.count, np.int64), Array(1, np.int64)) if sparse else (None, None)
        dweights = Array(p.count, np.float32) if self.wants_dweights else None
        hotness = 0 if p.csr or not p.bags else int(p.lengths[0])
        options = BagOptions(p.mode, p.offsets, hotness, p.device_weights, p.padding, p.device_first_rows, p.tables)
        size = bookends.embedding_bag_backward_workspace_bytes(p.count, p.bags, p.C, p.rows, options)
        workspace = Array(size, np.uint8)
        status = status_array()
        code, word = bookends.embedding_bag_backward(
            dtable if wants_table else None, indices, distinct, dweights, self.dout, self.device_argmax, p.idx,
            p.device_table, status, workspace, p.count, p.bags, p.C, p.rows, p.stride, options, p.dtype,
            self.grad_dtype, OVERWRITE if overwrite else 0, version)
        assert code == OK, bookends.last_message()
        arrays = [a for a in (dtable, indices, distinct, dweights, workspace, status) if a is not None]
        assert all(array.guards_intact() for array in arrays)
        gradient = dtable.get().reshape(rows, p.C)
        if sparse:
            count = int(distinct.get()[0])
            assert (gradient[count:].view(np.uint8) == VALUE_FILL).all()  # rows beyond the count are not written
            return gradient[:count], indices.get()[:count], dweights and dweights.get(), word
        return gradient, None, dweights and dweights.get(), word

    def check(self, version, sparse=False, overwrite=False):
        p, name = self.p, "version %d C=%d sparse=%s overwrite=%s" % (version, self.p.C, sparse, overwrite)
        got, indices, dweights, word = self.call(version, sparse, overwrite)
        rows = np.arange(p.rows)
        if sparse:
            assert (indices == self.distinct).all() and indices.size == self.distinct.size, name
            rows = self.distinct
        assert word == self.first_bad, name
        old = 0.0 if sparse or overwrite else from_bits(self.before, self.grad_dtype)
        value = old + self.sums[rows] if sparse else old + self.sums
        size = np.abs(old) + self.sizes[rows]
        untouched = self.counts[rows] == 0
        if p.exact and (version > 1 or self.grad_dtype is FP32):
            want = to_bits(value, self.grad_dtype)
            assert (from_bits(got, self.grad_dtype) == from_bits(want, self.grad_dtype)).all(), name
        else:
            slack = (self.counts[rows][:, None] + 3) * 2.0**-24 * size
            if version == 1:  # each term and each sum is rounded; fp16's subnormal numbers by up to 2^-25
                rounding = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}[self.grad_dtype]
                slack += 2 * self.counts[rows][:, None] * (size * rounding + 2.0**-25 * (self.grad_dtype is FP16))
            low, high = (from_bits(to_bits(v, self.grad_dtype), self.grad_dtype)
                         for v in (value - slack, value + slack))
            numbers = from_bits(got, self.grad_dtype)
            assert ((low <= numbers) & (numbers <= high)).all(), name
        if not sparse and not overwrite:
            assert (got[untouched] == self.before[untouched]).all(), name  # bit for bit
        if dweights is not None:
            slack = (p.C + 4) * 2.0**-24 * self.dweights_size
            assert (np.abs(dweights.astype(np.float64) - self.dweights) <= slack).all(), name
        if version > 1:
            again = self.call(version, sparse, overwrite)
            assert (again[0] == got).all() and (dweights is None or (again[2] == dweights).all()), name


LENGTHS = [3, 0, 8, 1, 64, 2, 0, 33]
POWERS = [4, 0, 8, 1, 64, 2, 0, 32]  # exact means


@every_version
@every_type
@pytest.mark.parametrize("C", [1, 2, 3, 7, 8, 16, 33, 64, 130, 264, 769, 2048])
def test_shapes(C, dtype, grad_dtype, version):
    mode = (SUM, MEAN, MAX)[C % 3]
    backward = Backward(Problem(C, POWERS if mode == MEAN else LENGTHS, C, dtype=dtype, mode=mode), grad_dtype)
    backward.check(version)
    backward.check(version, overwrite=True)
    if version > 1:
        backward.check(version, sparse=True)


@every_version
@every_type
def test_rounding(dtype, grad_dtype, version):
    for mode in (SUM, MEAN):
        backward = Backward(Problem(5, [9, 40, 0, 17, 100], 24, dtype=dtype, mode=mode, weighted=True, exact=False),
                            grad_dtype, dweights=True)
        backward.check(version, overwrite=True)


@every_version
@every_mode
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_options(index, mode, version):
    """Fixed hotness, padding, several tables, weights, and the other type of offsets."""
    weighted = mode != MAX
    for problem in (
            Problem(1, [8] * 12, 40, mode=mode, csr=False, index=index, weighted=weighted),
            Problem(2, [1] * 70, 8, mode=mode, csr=False, index=index),
            Problem(3, POWERS, 33, mode=mode, index=index, padding=7, weighted=weighted, exact=mode != MEAN),
            Problem(4, POWERS + POWERS, 16, mode=mode, tables=4, index=index,
                    offset_index=np.int64 if index is np.int32 else np.int32)):
        backward = Backward(problem, FP32, dweights=weighted)
        backward.check(version)
        if version > 1:
            backward.check(version, sparse=True)


@every_version
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_bad_indices(index, version):
    for bad in (1, 20):
        for mode in (SUM, MAX):
            problem = Problem(bad, LENGTHS, 24, mode=mode, bad=bad, index=index)
            Backward(problem, FP32, dweights=mode == SUM).check(version)
    if version > 1:
        Backward(Problem(3, LENGTHS, 24, bad=9, index=index)).check(version, sparse=True)
        Backward(Problem(4, [5], 24, bad=5, index=index)).check(version, sparse=True)  # all of them


@every_deterministic
@pytest.mark.parametrize("rows", [1, 2, 7, 5000])
@pytest.mark.parametrize("count", [31, 32, 33, 64, 1000, 1025, 33000])
def test_long_groups(count, rows, version):
    """All indices equal, few distinct ones and many: tiles of 32 positions, and each level of partial sums."""
    for C in (1, 24):
        backward = Backward(Problem(rows, [count // 3, 0, count - count // 3], C, rows=rows), FP32)
        backward.check(version, sparse=True)
        backward.check(version)


@every_deterministic
def test_groups_at_the_borders_of_tiles(version):
    """Groups of chosen lengths: they end and begin at every place of a tile, and fill tiles."""
    for seed, lengths in enumerate([[32] * 40, [31, 1] * 30, [1, 31, 32, 64, 33] * 8, [16, 32] * 30, [64] * 20,
                                    [1] * 99, [2, 30, 1024, 32, 1, 1055], [96, 5, 27, 32, 32]]):
        problem = Problem(seed, [sum(lengths)], 8, rows=len(lengths))
        order = problem.rng.permutation(sum(lengths))
        problem.ids = np.repeat(np.arange(len(lengths)), lengths)[order]
        problem.idx.put(problem.ids)
        Backward(problem, FP32).check(version, sparse=True)


@every_version
@every_type
def test_alignment_and_stride(dtype, grad_dtype, version):
    for C, stride, offset in ((64, 64, 1), (24, 40, 0), (24, 27, 3), (8, 8, 4)):
        problem = Problem(C, LENGTHS, C, dtype=dtype, stride=stride, offset=offset, weighted=True)
        Backward(problem, grad_dtype, dweights=True).check(version)


@every_deterministic
def test_table_beyond_32_bits(version):
    """3e9 rows and more: only the indices and the gradient rows take memory."""
    C, rng = 8, np.random.default_rng(1)
    for rows in (2**31 + 5, 2**32 - 2, 2**32 - 1, 2**32, 2**40):
        ids = np.concatenate([rng.integers(0, rows, 90), [0, rows - 1, rows - 1, rows, -1, 2**31, 2**31, rows - 1]])
        dout_values = rng.integers(-8, 9, (ids.size, C))
        dout = Array(ids.size * C, BF16.bits).put(to_bits(dout_values, BF16))
        idx, options = Array(ids.size, np.int64).put(ids), BagOptions()
        size = bookends.embedding_bag_backward_workspace_bytes(ids.size, ids.size, C, rows, options)
        dtable, workspace = Array(ids.size * C, np.float32), Array(size, np.uint8)
        indices, distinct, status = Array(ids.size, np.int64), Array(1, np.int64), status_array()
        code, word = bookends.embedding_bag_backward(dtable, indices, distinct, None, dout, None, idx, None, status,
                                                     workspace, ids.size, ids.size, C, rows, C, options, BF16, FP32, 0,
                                                     version)
        assert code == OK and word == 93
        good = (ids >= 0) & (ids < rows)
        want, where = np.unique(ids[good], return_inverse=True)
        sums = np.zeros((want.size, C))
        np.add.at(sums, where, dout_values[good])
        assert distinct.get()[0] == want.size and (indices.get()[:want.size] == want).all()
        assert (dtable.get().reshape(-1, C)[:want.size] == sums).all()


@every_version
def test_no_work(version):
    for lengths in ([], [0, 0, 0]):
        problem = Problem(1, lengths, 8)
        backward = Backward(problem)
        backward.check(version)
        backward.check(version, overwrite=True)
        if version > 1:
            got, indices, _, _ = backward.call(version, sparse=True)
            assert got.size == 0 and indices.size == 0
    problem = Problem(1, [3, 4], 8, weighted=True)
    backward = Backward(problem, FP32, dweights=True)
    gradient, _, dweights, _ = backward.call(version, overwrite=True, wants_table=False)
    assert (gradient.view(np.uint8) == VALUE_FILL).all()
    assert np.allclose(dweights, backward.dweights, rtol=1e-5)


def test_refusals():
    C, count, bags, rows = 8, 6, 2, 5
    options = BagOptions(hotness=3)
    size = bookends.embedding_bag_backward_workspace_bytes(count, bags, C, rows, options)
    arrays = {"dtable": Array(rows * C, np.float32).put(np.ones(rows * C)), "indices": None, "distinct": None,
              "dweights": None, "dout": Array(bags * C, np.uint16).put(to_bits(np.ones(bags * C), BF16)),
              "argmax": None,
              "idx": Array(count, np.int32).put(np.arange(count) % rows), "table": None, "status": None,
              "workspace": Array(size, np.uint8)}
    numbers = {"count": count, "bags": bags, "C": C, "rows": rows, "stride": C, "options": options, "dtype": BF16,
               "grad_dtype": FP32, "flags": 0, "version": 0}

    def call(**changes):
        every = {**arrays, **numbers, **changes}
        return bookends.embedding_bag_backward(*every.values())[0]

    assert call() == OK
    weights, other = Array(count, np.float32), Array(8, np.int64)
    before = arrays["dtable"].get()
    for code, changes in (
            (ERROR_SHAPE, {"C": -1}), (ERROR_SHAPE, {"rows": -1}), (ERROR_SHAPE, {"count": -1}),
            (ERROR_SHAPE, {"bags": -1}),
            (ERROR_SHAPE, {"count": 7}), (ERROR_SHAPE, {"count": 2**31}), (ERROR_SHAPE, {"stride": 7}),
            (ERROR_DTYPE, {"dtype": 3}), (ERROR_DTYPE, {"grad_dtype": FP16}), (ERROR_FLAGS, {"flags": 2}),
            (ERROR_VERSION, {"version": 9}), (ERROR_NULL, {"dout": None}), (ERROR_NULL, {"idx": None}),
            (ERROR_NULL, {"workspace": None}), (ERROR_NULL, {"indices": other}), (ERROR_NULL, {"distinct": other}),
            (ERROR_NULL, {"dtable": None, "indices": other, "distinct": other}),
            (ERROR_NULL, {"dweights": weights}), (ERROR_NOT_NULL, {"argmax": other}),
            (ERROR_NULL, {"options": BagOptions(mode=MAX, hotness=3)}),
            (ERROR_NOT_NULL, {"options": BagOptions(mode=MAX, hotness=3), "argmax": other, "dweights": weights}),
            (ERROR_OPTIONS, {"options": BagOptions(mode=5, hotness=3)}),
            (ERROR_ALIGNMENT, {"workspace": Array(1 << 16, np.uint8, offset=16)}),
            (ERROR_UNSUPPORTED, {"version": 1, "indices": other, "distinct": other})):
        assert call(**changes) == code, changes
        assert bookends.last_message().startswith("bk_embedding_bag_backward: ")
    assert (arrays["dtable"].get() == before).all()
    assert bookends.embedding_bag_backward_workspace_bytes(2**31, 1, C, rows, BagOptions(hotness=2**31)) == 0
    assert bookends.embedding_bag_backward_workspace_bytes(-1, 1, C, rows, options) == 0


# ---------------------------------------------------------------------------------------------------------------------
# transposition

@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("count, rows", [(0, 5), (1, 1), (5, 0), (40, 1), (100, 7), (3000, 50000), (1500, 2**33)])
def test_transpose(count, rows, index):
    rng = np.random.default_rng(count)
    ids = rng.integers(0, max(1, min(rows, 2**31 if index is np.int32 else 2**62)), count).astype(index)
    if count > 1:
        ids[rng.integers(0, count, 3)] = (-1, -7, rows if index is np.int64 else -9)
    good = (ids >= 0) & (ids < rows)
    idx, status = Array(count, index).put(ids), status_array()
    indices, distinct = Array(count, np.int64), Array(1, np.int64)
    begin, positions, group = (Array(n, np.int32, VALUE_FILL) for n in (count + 1, count, count))
    workspace = Array(bookends.embedding_transpose_workspace_bytes(count, rows), np.uint8)
    code, word = bookends.embedding_transpose(indices, begin, positions, group, distinct, idx, status, workspace, count,
                                              rows)
    assert code == OK
    for array in (indices, begin, positions, group, distinct, workspace):
        assert array.guards_intact()
    bad = np.flatnonzero(~good)
    assert word == (bad[0] if bad.size else -1)
    want, where, counts = np.unique(ids[good], return_inverse=True, return_counts=True)
    n = want.size
    assert distinct.get()[0] == n and (indices.get()[:n] == want).all()
    assert (begin.get()[:n + 1] == np.concatenate([[0], np.cumsum(counts)])).all()
    order = np.argsort(where, kind="stable")
    assert (positions.get()[:good.sum()] == np.flatnonzero(good)[order]).all()
    assert sorted(positions.get()[good.sum():]) == sorted(bad)
    assert (group.get() == np.concatenate([where[order], np.full(bad.size, -1)])).all()


def test_transpose_refusals():
    idx, workspace = Array(4, np.int32), Array(1 << 12, np.uint8)
    out = [Array(5, np.int64), *[Array(5, np.int32) for _ in range(3)], Array(1, np.int64)]
    for at in range(5):
        arrays = [None if i == at else a for i, a in enumerate(out)]
        assert bookends.embedding_transpose(*arrays, idx, None, workspace, 4, 9)[0] == ERROR_NULL
    assert bookends.embedding_transpose(*out, None, None, workspace, 4, 9)[0] == ERROR_NULL
    assert bookends.embedding_transpose(*out, idx, None, None, 4, 9)[0] == ERROR_NULL
    assert bookends.embedding_transpose(*out, idx, None, Array(1 << 12, np.uint8, offset=1), 4, 9)[0] == ERROR_ALIGNMENT
    assert bookends.embedding_transpose(*out, idx, None, workspace, -1, 9)[0] == ERROR_SHAPE
    assert bookends.embedding_transpose(*out, idx, None, workspace, 4, -9)[0] == ERROR_SHAPE
    assert bookends.embedding_transpose_workspace_bytes(2**31, 9) == 0
