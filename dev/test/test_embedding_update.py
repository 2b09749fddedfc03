"""bk_embedding_update and bk_embedding_optimizer against numpy float64."""

import numpy as np
import pytest

import bookends
from bookends import (ACCUMULATE, ADAM, BF16, DISTINCT, DTYPES, FP16, FP32, OK, OVERWRITE_ROWS, ROWWISE_ADAGRAD,
                      ROWWISE_ADAM, SGD, STOCHASTIC, VALUE_FILL, Array, OptimizerOptions, from_bits, random_bits,
                      status_array, to_bits)

VERSIONS = {OVERWRITE_ROWS: (1, 2, 3, 4, 5), ACCUMULATE: (1, 2, 3, 4)}
OPTIMIZER_VERSIONS = (1, 2, 3)
TYPES = [(FP32, FP32), (FP16, FP16), (BF16, BF16), (FP16, FP32), (BF16, FP32), (FP32, FP16), (FP32, BF16)]
WIDTHS = (1, 3, 7, 8, 33, 64, 264, 769, 2048)
INDEX_TYPES = (np.int32, np.int64)
BAD = {np.int32: [-1, -2**31, 2**31 - 1], np.int64: [-1, -2**63, 2**63 - 1, 2**32 + 1, -2**32 + 1]}

every_type = pytest.mark.parametrize("dtype, value_dtype", TYPES, ids=["%s-%s" % (a.name, b.name) for a, b in TYPES])
every_update = pytest.mark.parametrize("op, version", [(op, v) for op in VERSIONS for v in VERSIONS[op]])
every_optimizer_version = pytest.mark.parametrize("version", OPTIMIZER_VERSIONS)
every_kind = pytest.mark.parametrize("kind", [SGD, ROWWISE_ADAGRAD, ADAM, ROWWISE_ADAM],
                                     ids=["sgd", "rowwise-adagrad", "adam", "rowwise-adam"])


def test_versions_are_known():
    assert bookends.versions("embedding_update") == list(VERSIONS[OVERWRITE_ROWS])


def integers(rng, shape, dtype):
    """The bits of small integers, whose sums are exact in each type."""
    return to_bits(rng.integers(-4, 5, shape), dtype)


class Table:
    """A device table of random bits with a stride, and its expected contents."""

    def __init__(self, rng, rows, C, dtype, stride=None, offset=0, values=random_bits):
        self.rows, self.C, self.dtype, self.stride = rows, C, dtype, C if stride is None else stride
        self.want = values(rng, (rows, self.stride), dtype)
        self.array = Array(rows * self.stride, dtype.bits, offset=offset).put(self.want)

    def get(self):
        return self.array.get().reshape(self.rows, self.stride)


def update(table, ids, values, op, value_dtype, version, index=np.int32, offset=0, flags=0, scale=1.0, seed=0):
    """One call with the checks that hold for every call. values (count, C) in bits."""
    idx = Array(ids.size, index, offset=offset).put(ids)
    device_values = Array(values.size, value_dtype.bits, offset=offset).put(values)
    size = bookends.embedding_update_workspace_bytes(ids.size, table.C, table.rows, op, flags, version)
    workspace = Array(size, np.uint8) if size else None
    status = status_array()
    code, word = bookends.embedding_update(table.array, idx, device_values, status, workspace, ids.size, table.C,
                                           table.rows, table.stride, op, table.dtype, value_dtype, scale, flags, seed,
                                           version)
    assert code == OK, bookends.last_message()
    good = (ids >= 0) & (ids < table.rows)
    assert word == (-1 if good.all() else int(np.argmin(good)))
    for array in (table.array, idx, device_values, status, *([workspace] if workspace else [])):
        assert array.guards_intact()
    assert (idx.get() == ids).all() and (device_values.get() == values.reshape(-1)).all()


def check(rng, op, version, ids, C, dtype, value_dtype, rows, index=np.int32, stride=None, offset=0, flags=0,
          scale=1.0):
    """Overwrite with random bits, or accumulate with integers, which is exact in every version."""
    overwrite = op == OVERWRITE_ROWS
    table = Table(rng, rows, C, dtype, stride, offset, random_bits if overwrite else integers)
    values = (random_bits if overwrite else integers)(rng, (ids.size, C), value_dtype)
    update(table, ids, values, op, value_dtype, version, index, offset, flags, scale)
    want, numbers = table.want.copy(), from_bits(values, value_dtype)
    for i in np.flatnonzero((ids >= 0) & (ids < rows)):
        row = want[ids[i], :C]
        if overwrite:
            row[:] = values[i] if dtype is value_dtype else to_bits(numbers[i], dtype)
        else:
            row[:] = to_bits(from_bits(row.copy(), dtype) + scale * numbers[i], dtype)
    got = table.get()
    if overwrite:
        assert bookends.same(got, want, dtype).all()
        assert dtype is not value_dtype or (got == want).all()
    else:
        touched = np.isin(np.arange(rows), ids)
        assert (got[~touched] == want[~touched]).all() and (got[:, C:] == want[:, C:]).all()
        assert (from_bits(got, dtype) == from_bits(want, dtype)).all()


# ---------------------------------------------------------------------------------------------------------------------
# overwrite and accumulate

@every_update
@every_type
def test_update_shapes(dtype, value_dtype, op, version):
    for k, C in enumerate(WIDTHS):
        rng = np.random.default_rng(C)
        for count, rows in ((1, 1), (37, 20), (5, 300)) if C < 500 else ((11, 6),):
            check(rng, op, version, rng.integers(0, rows, count), C, dtype, value_dtype, rows, INDEX_TYPES[k % 2])


@every_update
def test_update_duplicates(op, version):
    """All indices equal; two that alternate; many of a few; one of each at both ends."""
    rng = np.random.default_rng(1)
    for C in (3, 16):
        for ids in (np.full(900, 4), np.arange(700) % 2, rng.integers(0, 7, 1500),
                    np.concatenate([np.arange(300), np.arange(300)[::-1]]), np.arange(500) // 40):
            check(rng, op, version, ids, C, FP32, FP32, 300)


def mix64(x):
    mask = 2**64 - 1
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & mask
    x = (x ^ x >> 27) * 0x94d049bb133111eb & mask
    return x ^ x >> 31


@pytest.mark.parametrize("version", VERSIONS[OVERWRITE_ROWS][1:])
def test_overwrite_colliding_indices(version):
    """Indices of one slot of the hash table, at its end, so that the search wraps around; each occurs twice."""
    rng = np.random.default_rng(2)
    for count in (16, 256):
        slots = 2 * count
        home = slots - 2
        rows = 200 * count
        ids = np.array([row for row in range(rows) if mix64(row) & slots - 1 == home][:count // 2])
        assert ids.size > count // 8
        ids = np.resize(rng.permutation(np.concatenate([ids, ids])), count)
        check(rng, OVERWRITE_ROWS, version, ids, 5, BF16, BF16, rows)


@every_update
@every_type
def test_update_distinct(dtype, value_dtype, op, version):
    rng = np.random.default_rng(3)
    for C in (1, 8, 33, 264):
        for count, rows in ((50, 50), (13, 200)):
            check(rng, op, version, rng.permutation(rows)[:count], C, dtype, value_dtype, rows, flags=DISTINCT)


@every_update
@pytest.mark.parametrize("index", INDEX_TYPES, ids=["int32", "int64"])
def test_update_bad_indices(index, op, version):
    """Negative indices are bad, and so is an int64 index whose lower half would be good."""
    rng = np.random.default_rng(4)
    for flags in (0, DISTINCT):
        for C in (3, 64):
            for where in (0, 3, 12):
                ids = rng.permutation(13) if flags else rng.integers(0, 10, 13)
                ids[where:where + 5] = rng.choice(BAD[index], ids[where:where + 5].size)
                check(rng, op, version, ids, C, BF16, BF16, 13, index, flags=flags)
        check(rng, op, version, rng.choice(BAD[index], 9), 64, BF16, FP32, 10, index, flags=flags)
    check(rng, op, version, np.array([0, 3]), 8, BF16, BF16, 0, index)


@every_update
@every_type
def test_update_alignment_and_stride(dtype, value_dtype, op, version):
    rng = np.random.default_rng(5)
    for C in (8, 9, 64):
        for stride in (C, C + 1, C + 4, 2 * C):
            for offset in (0, 1, 4):
                check(rng, op, version, rng.integers(0, 20, 13), C, dtype, value_dtype, 20, stride=stride,
                      offset=offset)


@every_update
def test_update_many_positions(op, version):
    """More positions than a block has threads, in blocks of one slice and of many."""
    rng = np.random.default_rng(6)
    check(rng, op, version, rng.integers(0, 900, 3000), 1, BF16, BF16, 900)
    check(rng, op, version, rng.integers(0, 3, 4), 70001, BF16, BF16, 3)


@every_update
def test_update_large_table(op, version):
    """Beyond 2^32 elements and 2^31 rows."""
    rows, C = 2**31 + 9, 4
    if bookends.ON_CUDA:
        bookends.or_skip(2 * rows * C)
    table = Array(rows * C, np.uint16, None)
    ids = np.array([rows - 1, 0, rows // 2, rows - 1], np.int64)
    values = to_bits(np.arange(16).reshape(4, C), BF16)
    size = bookends.embedding_update_workspace_bytes(4, C, rows, op, 0, version)
    code, word = bookends.embedding_update(table, Array(4, np.int64).put(ids), Array(16, np.uint16).put(values),
                                           status_array(), Array(size, np.uint8) if size else None, 4, C, rows, C, op,
                                           BF16, BF16, version=version)
    assert (code, word) == (OK, -1)
    last = np.arange(12, 16) + (np.arange(4) if op == ACCUMULATE else 0)
    for row, want in ((rows - 1, last), (0, np.arange(4, 8)), (rows // 2, np.arange(8, 12)), (rows - 2, [0] * 4)):
        assert (from_bits(table.get(row * C, C), BF16) == want).all()


@every_update
def test_update_no_work(op, version):
    for count, C in ((0, 8), (3, 0)):
        assert bookends.embedding_update_workspace_bytes(count, C, 5, op, 0, version) == 0
        code, _ = bookends.embedding_update(None, None, None, None, None, count, C, 5, C, op, BF16, BF16,
                                            version=version)
        assert code == OK


@pytest.mark.parametrize("version", VERSIONS[OVERWRITE_ROWS])
def test_overwrite_special_values(version):
    for dtype in DTYPES:
        values = bookends.special_values(dtype)
        C = 8 * (values.size // 8 + 1)
        table = Table(np.random.default_rng(7), 3, C, dtype)
        rows = np.resize(values, (2, C)).astype(dtype.bits)
        update(table, np.array([2, 0]), rows, OVERWRITE_ROWS, dtype, version)
        assert (table.get()[[2, 0]] == rows).all() and (table.get()[1] == table.want[1]).all()


@every_type
@pytest.mark.parametrize("version", VERSIONS[ACCUMULATE])
@pytest.mark.parametrize("scale", [1.0, -0.37])
def test_accumulate_rounding(scale, version, dtype, value_dtype):
    """Values of many magnitudes. Versions 1 and 4 round once, to within float sums, and repeat their bits; so do all
    with distinct indices."""
    for flags in (0, DISTINCT):
        rng = np.random.default_rng(8)
        once = flags or version in (1, 4)
        C, rows = 40, 30
        ids = rng.permutation(rows) if flags else np.concatenate([rng.integers(0, rows, 300), np.full(200, 3)])
        values = random_bits(rng, (ids.size, C), value_dtype, (-4, 4))
        results = []
        for _ in range(2):
            table = Table(np.random.default_rng(9), rows, C, dtype)
            update(table, ids, values, ACCUMULATE, value_dtype, version, flags=flags, scale=scale)
            results.append(table.get())
        assert not once or (results[0] == results[1]).all()
        exact, size = from_bits(table.want, dtype), np.abs(from_bits(table.want, dtype))
        terms = np.float64(np.float32(scale)) * from_bits(values, value_dtype)
        np.add.at(exact, ids, terms)
        np.add.at(size, ids, np.abs(terms))
        counts = np.bincount(ids, minlength=rows)[:, None]
        each = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}[dtype]
        smallest = 2.0**-24 if dtype is FP16 else 0
        slack = size * ((counts + 4) * 2.0**-24 if once else (2 * counts + 4) * each) + smallest * counts
        low, high = (from_bits(to_bits(exact + s, dtype), dtype) for s in (-slack, slack))
        got = from_bits(results[0], dtype)
        assert ((low <= got) & (got <= high)).all()


@pytest.mark.parametrize("version", VERSIONS[ACCUMULATE])
@pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
def test_accumulate_stochastic(dtype, version):
    """Results are neighbours of the sum, right on average, the same for one seed, and exact where that is possible."""
    flags = STOCHASTIC | (DISTINCT if version in (2, 3) else 0)
    C, rows = 4096, 3
    table = Table(np.random.default_rng(1), rows, C, dtype, values=lambda rng, shape, d: to_bits(np.ones(shape), d))
    step = 2.0**-10 if dtype is FP16 else 2.0**-7
    values = to_bits(np.stack([np.full(C, 0.25 * step), np.full(C, step)]), FP32)
    results = []
    for seed in (5, 5, 6):
        table.array.put(table.want)
        update(table, np.array([1, 2]), values, ACCUMULATE, FP32, version, flags=flags, seed=seed)
        results.append(from_bits(table.get(), dtype))
    assert (results[0] == results[1]).all() and (results[0] != results[2]).any()
    assert np.isin(results[0][1], [1, 1 + step]).all() and (results[0][2] == 1 + step).all()
    assert (results[0][0] == 1).all()
    assert abs((results[0][1] - 1).mean() / step - 0.25) < 0.05


def test_atomics_refuse_stochastic_rounding():
    for version in (2, 3):
        table = Table(np.random.default_rng(1), 3, 8, BF16)
        values, idx = Array(8, np.uint32).put(to_bits(np.ones(8), FP32)), Array(1, np.int32).put([1])
        code, _ = bookends.embedding_update(table.array, idx, values, None, None, 1, 8, 3, 8, ACCUMULATE, BF16, FP32,
                                            flags=STOCHASTIC, version=version)
        assert code == bookends.ERROR_UNSUPPORTED and "version %d" % version in bookends.last_message()
        assert (table.get() == table.want).all()


# ---------------------------------------------------------------------------------------------------------------------
# optimizers

def numpy_step(kind, w, m, v, g, options):
    """One step for some rows (rows, C), in float64: new w, m and v (which is (rows) if it is row-wise)."""
    o, t = options, options.step
    if kind in (SGD, ROWWISE_ADAGRAD):
        g = g + o.weight_decay * w
    if kind == SGD:
        return w - o.learning_rate * g, m, v
    if kind == ROWWISE_ADAGRAD:
        v = v + (g**2).mean(axis=1)
        return w - o.learning_rate * g / (np.sqrt(v) + o.eps)[:, None], m, v
    m = o.beta1 * m + (1 - o.beta1) * g
    square = g**2 if kind == ADAM else (g**2).mean(axis=1)
    v = o.beta2 * v + (1 - o.beta2) * square
    root = np.sqrt(v / (1 - o.beta2**t))
    direction = m / (1 - o.beta1**t) / ((root if kind == ADAM else root[:, None]) + o.eps)
    return w - o.learning_rate * (direction + o.weight_decay * w), m, v


class Optimizer:
    """A table with its states, on the device and in float64."""

    def __init__(self, rng, kind, rows, C, dtype, stride=None, offset=0):
        self.kind, self.table = kind, Table(rng, rows, C, dtype, stride, offset,
                                            lambda rng, shape, d: to_bits(rng.standard_normal(shape), d))
        self.m = rng.standard_normal((rows, C)).astype(np.float32)
        self.v = rng.uniform(0.1, 2, (rows, C) if kind == ADAM else rows).astype(np.float32)
        self.first = Array(self.m.size, np.float32, offset=offset).put(self.m) if kind >= ADAM else None
        self.second = Array(self.v.size, np.float32, offset=offset).put(self.v) if kind != SGD else None

    def step(self, ids, gradients, grad_dtype, options, version, index=np.int64, device_count=None, offset=0):
        """One call; gradients (count, C) in bits. Returns the status word."""
        t = self.table
        idx = Array(ids.size, index, offset=offset).put(ids)
        device_gradients = Array(gradients.size, grad_dtype.bits, offset=offset).put(gradients)
        count = None if device_count is None else Array(1, np.int64).put([device_count])
        code, word = bookends.embedding_optimizer(t.array, self.first, self.second, idx, device_gradients, count,
                                                  status_array(), ids.size, t.C, t.rows, t.stride, options, t.dtype,
                                                  grad_dtype, version)
        assert code == OK, bookends.last_message()
        for array in (t.array, idx, device_gradients, self.first, self.second):
            assert array is None or array.guards_intact()
        return word

    def check(self, ids, gradients, grad_dtype, options):
        """Against one step from the initial values for the rows ids, all of them good."""
        t, C = self.table, self.table.C
        w = from_bits(t.want, t.dtype)
        new_w, new_m, new_v = numpy_step(self.kind, w[ids, :C], self.m[ids].astype(float), self.v[ids].astype(float),
                                         from_bits(gradients, grad_dtype), options)
        others = ~np.isin(np.arange(t.rows), ids)
        got = t.get()
        assert (got[others] == t.want[others]).all() and (got[:, C:] == t.want[:, C:]).all()
        slack = 2e-5 * np.abs(new_w - w[ids, :C]) + 4e-7 * np.abs(w[ids, :C])
        low, high = (from_bits(to_bits(new_w + s, t.dtype), t.dtype) for s in (-slack, slack))
        numbers = from_bits(got[ids, :C], t.dtype)
        assert ((low <= numbers) & (numbers <= high)).all()
        for array, before, new in ((self.first, self.m, new_m), (self.second, self.v, new_v)):
            if array is None:
                continue
            state = array.get().reshape(before.shape)
            assert (state[others] == before[others]).all()
            np.testing.assert_allclose(state[ids], new, rtol=3e-6, atol=1e-6)


@every_kind
@every_optimizer_version
@every_type
def test_optimizer_shapes(dtype, value_dtype, version, kind):
    for C in WIDTHS:
        rng = np.random.default_rng(C)
        for count, rows in ((1, 1), (21, 40)) if C < 500 else ((3, 5),):
            ids = np.sort(rng.permutation(rows)[:count])
            gradients = random_bits(rng, (count, C), value_dtype, (-3, 3))
            options = OptimizerOptions(kind, learning_rate=0.1, weight_decay=0.01 * (C % 2), step=1 + C)
            optimizer = Optimizer(rng, kind, rows, C, dtype)
            assert optimizer.step(ids, gradients, value_dtype, options, version, INDEX_TYPES[C % 2]) == -1
            optimizer.check(ids, gradients, value_dtype, options)


@every_kind
@every_optimizer_version
def test_optimizer_alignment_and_stride(version, kind):
    rng = np.random.default_rng(1)
    for dtype, grad_dtype in ((BF16, BF16), (FP32, FP32), (FP16, FP32)):
        for C, stride in ((8, 8), (64, 72), (64, 65), (40, 44)):
            for offset in (0, 1, 4):
                ids = rng.permutation(20)[:9]
                gradients = random_bits(rng, (9, C), grad_dtype, (-3, 3))
                options = OptimizerOptions(kind, weight_decay=0.1, step=3)
                optimizer = Optimizer(rng, kind, 20, C, dtype, stride, offset)
                assert optimizer.step(ids, gradients, grad_dtype, options, version, offset=offset) == -1
                optimizer.check(ids, gradients, grad_dtype, options)


@every_kind
@every_optimizer_version
def test_optimizer_counts_and_bad_indices(version, kind):
    """A count in device memory, also one above the capacity; bad indices among good ones."""
    rng = np.random.default_rng(2)
    for C in (5, 32, 96):
        for index in INDEX_TYPES:
            for device_count, used in ((0, 0), (7, 7), (30, 30), (1000, 30), (-5, 0)):
                ids = rng.permutation(50)[:30]
                gradients = random_bits(rng, (30, C), FP32, (-3, 3))
                optimizer = Optimizer(rng, kind, 50, C, BF16)
                ids[3] = rng.choice(BAD[index])
                ids[20] = 50
                word = optimizer.step(ids, gradients, FP32, OptimizerOptions(kind), version, index, device_count)
                assert word == (3 if used > 3 else -1)
                good = np.array([i for i in range(used) if i not in (3, 20)], int)
                optimizer.check(ids[good], gradients[good], FP32, OptimizerOptions(kind))


@every_kind
@every_optimizer_version
def test_optimizer_device_step_and_bits(version, kind):
    """The step in device memory gives the bits of the step in the options, and a second call those of the first."""
    rng = np.random.default_rng(3)
    ids, gradients = rng.permutation(30), random_bits(rng, (30, 72), FP32, (-3, 3))
    results = []
    for device_step in (None, Array(1, np.int64).put([1234]), None):
        optimizer = Optimizer(np.random.default_rng(4), kind, 30, 72, BF16)
        options = OptimizerOptions(kind, step=1 if device_step else 1234, device_step=device_step)
        assert optimizer.step(ids, gradients, FP32, options, version) == -1
        states = [array.get().view(np.uint32) for array in (optimizer.first, optimizer.second) if array]
        results.append(np.concatenate([optimizer.table.get().reshape(-1), *states]))
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()


@every_kind
@every_optimizer_version
def test_optimizer_stochastic(version, kind):
    """A step of a quarter of an ulp moves a quarter of the elements."""
    C, ulp = 4096, 2.0**-7
    table = Table(np.random.default_rng(1), 2, C, BF16, values=lambda rng, shape, d: to_bits(np.ones(shape), d))
    m, v = Array(2 * C, np.float32).put(np.zeros(2 * C)), Array(2 * C, np.float32).put(np.zeros(2 * C))
    gradients, idx = Array(C, np.float32).put(-np.ones(C)), Array(1, np.int64).put([1])
    results = []
    for seed in (1, 1, 2):
        table.array.put(table.want)
        m.put(np.zeros(2 * C)), v.put(np.zeros(2 * C))
        options = OptimizerOptions(kind, STOCHASTIC, learning_rate=ulp / 4, seed=seed)
        code, _ = bookends.embedding_optimizer(table.array, m if kind >= ADAM else None, v if kind != SGD else None,
                                               idx, gradients, None, None, 1, C, 2, C, options, BF16, FP32, version)
        assert code == OK, bookends.last_message()
        results.append(from_bits(table.get(), BF16))
    assert (results[0] == results[1]).all() and (results[0] != results[2]).any()
    assert (results[0][0] == 1).all() and np.isin(results[0][1], [1, 1 + ulp]).all()
    assert abs((results[0][1] - 1).mean() / ulp - 0.25) < 0.05


@every_optimizer_version
def test_optimizers_of_torch(version):
    """Some steps of torch's optimizers with sparse gradients."""
    torch = pytest.importorskip("torch")
    rows, C, steps = 20, 24, 4
    for kind in (SGD, ROWWISE_ADAGRAD, ADAM):
        width = 1 if kind == ROWWISE_ADAGRAD else C  # torch's Adagrad has a state per element
        rng = np.random.default_rng(kind)
        w = rng.standard_normal((rows, width)).astype(np.float32)
        parameter = torch.nn.Parameter(torch.tensor(w))
        theirs = {SGD: lambda: torch.optim.SGD([parameter], lr=0.1),
                  ROWWISE_ADAGRAD: lambda: torch.optim.Adagrad([parameter], lr=0.1),
                  ADAM: lambda: torch.optim.SparseAdam([parameter], lr=0.1)}[kind]()
        table = Array(w.size, np.float32).put(w)
        first = Array(w.size, np.float32).put(np.zeros(w.size)) if kind == ADAM else None
        second = Array(w.size, np.float32).put(np.zeros(w.size)) if kind != SGD else None
        for t in range(1, steps + 1):
            ids = np.sort(rng.permutation(rows)[:7])
            g = rng.standard_normal((7, width)).astype(np.float32)
            parameter.grad = torch.sparse_coo_tensor(torch.tensor(ids[None]), torch.tensor(g), (rows, width))
            theirs.step()
            eps = 1e-10 if kind == ROWWISE_ADAGRAD else 1e-8 / np.sqrt(1 - 0.999**t)
            options = OptimizerOptions(kind, learning_rate=0.1, eps=eps, step=t)
            code, _ = bookends.embedding_optimizer(table, first, second, Array(7, np.int64).put(ids),
                                                   Array(g.size, np.float32).put(g), None, None, 7, width, rows, width,
                                                   options, FP32, FP32, version)
            assert code == OK, bookends.last_message()
        np.testing.assert_allclose(table.get().reshape(rows, width), parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@every_kind
@every_optimizer_version
def test_optimizer_no_work(version, kind):
    for count, C in ((0, 8), (3, 0)):
        code, _ = bookends.embedding_optimizer(None, None, None, None, None, None, None, count, C, 5, C,
                                               OptimizerOptions(kind), BF16, BF16, version)
        assert code == OK


# ---------------------------------------------------------------------------------------------------------------------
# refusals

def test_update_refusals():
    array, idx, space = Array(64, np.uint16), Array(8, np.int32).put(np.zeros(8)), Array(4096, np.uint8)

    def call(table=array, ids=idx, values=array, workspace=space, count=2, C=4, rows=4, stride=4, op=OVERWRITE_ROWS,
             dtype=BF16, value_dtype=BF16, scale=1.0, flags=0, version=0):
        code, _ = bookends.embedding_update(table, ids, values, None, workspace, count, C, rows, stride, op, dtype,
                                            value_dtype, scale, flags, 0, version)
        return code, bookends.last_message()
    for changes, code, words in (
            (dict(count=-1), bookends.ERROR_SHAPE, "count is -1"), (dict(C=-1), bookends.ERROR_SHAPE, "C is -1"),
            (dict(rows=-1), bookends.ERROR_SHAPE, "rows is -1"), (dict(stride=3), bookends.ERROR_SHAPE, "stride is 3"),
            (dict(count=2**31), bookends.ERROR_SHAPE, "2^31-1"), (dict(rows=2**62), bookends.ERROR_SHAPE, "rows * "),
            (dict(table=None), bookends.ERROR_NULL, "table is null"),
            (dict(ids=None), bookends.ERROR_NULL, "idx is null"),
            (dict(values=None), bookends.ERROR_NULL, "values is null"),
            (dict(workspace=None), bookends.ERROR_NULL, "workspace is null"),
            (dict(workspace=Array(4096, np.uint8, offset=16)), bookends.ERROR_ALIGNMENT, "256"),
            (dict(op=2), bookends.ERROR_OPTIONS, "op 2"), (dict(scale=np.inf), bookends.ERROR_OPTIONS, "scale"),
            (dict(flags=1), bookends.ERROR_FLAGS, "flags 1"),
            (dict(flags=STOCHASTIC), bookends.ERROR_FLAGS, "flags 2"),
            (dict(dtype=7), bookends.ERROR_DTYPE, "dtype"),
            (dict(value_dtype=FP16), bookends.ERROR_DTYPE, "value_dtype"),
            (dict(version=6), bookends.ERROR_VERSION, "no version 6"),
            (dict(op=ACCUMULATE, version=5), bookends.ERROR_VERSION, "no version 5")):
        got = call(**changes)
        assert got[0] == code and words in got[1], (changes, got)
    assert (array.get() == 0xffff).all()


def test_optimizer_refusals():
    array, idx = Array(64, np.uint16), Array(8, np.int64).put(np.zeros(8))
    floats = Array(64, np.float32)

    def call(table=array, first=floats, second=floats, ids=idx, gradients=array, count=2, C=4, rows=4, stride=4,
             grad_dtype=BF16, version=0, reserved=0, kind=ADAM, no_options=False, **options):
        chosen = OptimizerOptions(kind, **options)
        chosen.reserved[3] = reserved
        code, _ = bookends.embedding_optimizer(table, first, second, ids, gradients, None, None, count, C, rows, stride,
                                               None if no_options else chosen, BF16, grad_dtype, version)
        return code, bookends.last_message()
    options, null, not_null = bookends.ERROR_OPTIONS, bookends.ERROR_NULL, bookends.ERROR_NOT_NULL
    for changes, code, words in (
            (dict(count=-1), bookends.ERROR_SHAPE, "count is -1"), (dict(stride=3), bookends.ERROR_SHAPE, "stride is"),
            (dict(count=2**31), bookends.ERROR_SHAPE, "2^31-1"),
            (dict(no_options=True), null, "options is null"), (dict(table=None), null, "table is null"),
            (dict(ids=None), null, "idx is null"), (dict(gradients=None), null, "gradients is null"),
            (dict(first=None), null, "first is null"), (dict(second=None), null, "second is null"),
            (dict(kind=SGD, first=None), not_null, "second must"), (dict(kind=SGD), not_null, "first must"),
            (dict(kind=ROWWISE_ADAGRAD), not_null, "first must"), (dict(kind=4), options, "kind 4"),
            (dict(flags=8), bookends.ERROR_FLAGS, "flags 8"), (dict(reserved=1), options, "reserved"),
            (dict(learning_rate=np.nan), options, "learning_rate"), (dict(eps=-1), options, "eps"),
            (dict(weight_decay=-0.1), options, "weight_decay"), (dict(beta1=1.0), options, "beta1"),
            (dict(beta2=-0.1), options, "beta2"), (dict(step=0), options, "step is 0"),
            (dict(grad_dtype=FP16), bookends.ERROR_DTYPE, "grad_dtype"),
            (dict(version=4), bookends.ERROR_VERSION, "no version 4")):
        got = call(**changes)
        assert got[0] == code and words in got[1], (changes, got)
    assert (array.get() == 0xffff).all() and np.isnan(floats.get()).all()
