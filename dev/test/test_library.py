"""What the library adds to the kernels: options that change between runs, means without the host, plans that describe
themselves, budgets, tuning results that are saved and restored. The kernels' results are the other files' business."""

import ctypes

import numpy as np
import pytest

import bookends
from bookends import (ADD_LOSSES, Array, BF16, DTYPES, FP16, FP32, HAS_BIAS, INT_MIN, OK, VALUE_FILL, WANT_DBIAS,
                      WANT_DW, WANT_DX, ClassifierOptions, from_bits, last_message, status_array, to_bits)

CLASSIFIERS = bookends.versions("classifier_fused")
HEADS = bookends.versions("lm_head")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
every_classifier = pytest.mark.parametrize("version", CLASSIFIERS)
every_head = pytest.mark.parametrize("version", HEADS)


def scalar(value, item=np.float32):
    return Array(1, item).put([value])


# ---------------------------------------------------------------------------------------------------------------------
# options: the divisor, added losses, reserved fields

class Rows:
    """N rows for the classifier: some targets ignored, one outside the vocabulary if `bad`."""

    def __init__(self, dtype, N=7, V=203, bad=False, seed=0):
        rng = np.random.default_rng([seed, N, V])
        self.dtype, self.N, self.V = dtype, N, V
        self.logits = Array(N * V, dtype.bits).put(to_bits(rng.standard_normal((N, V)) * 3, dtype))
        self.ids = rng.integers(0, V, N).astype(np.int32)
        self.ids[::3] = -100
        if bad:
            self.ids[1] = V
        self.targets = Array(N, np.int32).put(self.ids)

    def call(self, version=0, before=None, **options):
        """(dlogits, losses, lse); losses hold `before`."""
        dlogits, losses = Array(self.N * self.V, self.dtype.bits, VALUE_FILL), Array(self.N, np.float32, VALUE_FILL)
        lse = Array(self.N, np.float32, VALUE_FILL)
        if before is not None:
            losses.put(before)
        code, _ = bookends.classifier_fused(dlogits, losses, lse, None, None, self.logits, self.targets, None, None,
                                            self.N, self.V, self.V, ClassifierOptions(**options), self.dtype, version)
        assert code == OK, last_message()
        assert losses.guards_intact()
        return dlogits.get(), losses.get(), lse.get()


@every_classifier
@every_dtype
def test_a_divisor_is_a_smaller_dloss(dtype, version):
    rows = Rows(dtype)
    for divisor in (1, 2, 3, 65537, 0.3):
        single = np.float32(0.5) / np.float32(divisor)
        got, want = rows.call(version, dloss=0.5, divisor=scalar(divisor)), rows.call(version, dloss=single)
        assert all((a == b).all() for a, b in zip(got, want)), divisor
    dlogits, losses, _ = rows.call(version, divisor=scalar(0))
    assert (from_bits(dlogits, dtype) == 0).all()
    assert (losses == rows.call(version)[1]).all()


def added(got, before, losses):
    """Whether got is before + losses, where these are rounded and what is added need not be."""
    good = np.abs(got - (before + losses)) <= 2.0**-23 * (np.abs(before) + np.abs(losses))
    return (good | np.isnan(losses)).all()


@every_classifier
@every_dtype
def test_losses_are_added_to(dtype, version):
    """To what they hold; all else is written."""
    rows = Rows(dtype, bad=True)
    before = np.arange(rows.N, dtype=np.float32) * 0.75 - 1
    dlogits, losses, lse = rows.call(version)
    again = rows.call(version, before, flags=ADD_LOSSES)
    assert (again[0] == dlogits).all() and (again[2] == lse).all()
    assert np.isnan(again[1]).tolist() == [i == 1 for i in range(rows.N)]
    assert added(again[1], before, losses)
    assert (again[1][rows.ids == -100] == before[rows.ids == -100]).all()


def test_options_are_checked():
    rows = Rows(BF16)
    for flags in (1, 2, 8, ADD_LOSSES | 1, -1):
        options = ClassifierOptions(flags=flags)
        code, _ = bookends.classifier_fused(*[None] * 5, rows.logits, rows.targets, None, None, rows.N, rows.V, rows.V,
                                            options, BF16)
        assert code == bookends.ERROR_FLAGS and str(flags) in last_message()
        assert bookends.lm_head_create(4, 8, 16, 0, options, 0, BF16, FP32)[0] == bookends.ERROR_FLAGS
    for i in range(7):
        options = ClassifierOptions()
        options.reserved[i] = 9
        code, _ = bookends.classifier_fused(*[None] * 5, rows.logits, rows.targets, None, None, rows.N, rows.V, rows.V,
                                            options, BF16)
        assert code == bookends.ERROR_OPTIONS and "9" in last_message()


# ---------------------------------------------------------------------------------------------------------------------
# means over the rows that are not ignored

def totals(ids, losses, ignore_index=-100, before=(0, 0)):
    rows, total = scalar(before[0]), scalar(before[1])
    code = bookends.classifier_totals(rows, total, Array(len(ids), np.int32).put(ids),
                                      Array(len(ids), np.float32).put(losses), len(ids), ignore_index)
    assert code == OK and rows.guards_intact() and total.guards_intact()
    return rows.get()[0], total.get()[0]


@pytest.mark.parametrize("N", [0, 1, 2, 31, 32, 33, 1000, 1024, 1025, 5000, 70001])
def test_totals(N):
    rng = np.random.default_rng(N)
    ids = rng.integers(-1, 5, N).astype(np.int32)
    losses = (rng.standard_normal(N) * np.exp2(rng.integers(-20, 20, N))).astype(np.float32)
    for ignore in (-1, 3, 100, INT_MIN):
        rows, total = totals(ids, losses, ignore, (7, 0.5))
        assert rows == 7 + (ids != ignore).sum()
        want = 0.5 + losses.astype(np.float64).sum()
        assert abs(total - want) <= 2.0**-24 * abs(want) + 1e-12 * np.abs(losses).sum()


def test_totals_of_anything():
    nan = totals(np.array([1, 2], np.int32), [np.nan, 1])
    assert nan[0] == 2 and np.isnan(nan[1])
    assert totals(np.full(3, -100, np.int32), [0, 0, 0]) == (0, 0)
    ids, losses = Array(3, np.int32).put([1, -100, 2]), Array(3, np.float32).put([1, 2, 3])
    rows, total = scalar(0), scalar(0)
    assert bookends.classifier_totals(rows, None, ids, None, 3) == OK and rows.get()[0] == 2
    assert bookends.classifier_totals(None, total, None, losses, 3) == OK and total.get()[0] == 6
    assert bookends.classifier_totals(None, None, None, None, 3) == OK
    assert bookends.classifier_totals(rows, total, None, None, 0) == OK
    assert bookends.classifier_totals(rows, None, None, losses, 3) == bookends.ERROR_NULL
    assert last_message() == "bk_classifier_totals: targets is null"
    assert bookends.classifier_totals(None, total, ids, None, 3) == bookends.ERROR_NULL
    assert last_message() == "bk_classifier_totals: losses is null"
    assert bookends.classifier_totals(rows, total, ids, losses, -1) == bookends.ERROR_SHAPE
    assert (rows.get()[0], total.get()[0]) == (2, 6)


@every_dtype
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4097, 4 * 256 * 4096 + 5])
@pytest.mark.parametrize("offset", [0, 1])
def test_scale(offset, count, dtype):
    values = bookends.random_bits(np.random.default_rng(count), count, dtype)
    for factor in (1.0, 0.3, -2.0, float("inf"), 0.0):
        x = Array(count, dtype.bits, offset=offset).put(values)
        assert bookends.scale(x, scalar(factor), count, dtype) == OK and x.guards_intact()
        with np.errstate(over="ignore", invalid="ignore"):
            products = np.float32(factor) * from_bits(values, dtype).astype(np.float32)
        assert bookends.same(x.get(), values if factor == 1 else to_bits(products, dtype), dtype).all()


@every_dtype
def test_scale_by_1_keeps_the_bits(dtype):
    """Of signalling NaNs too."""
    values = bookends.special_values(dtype)
    x = Array(len(values), dtype.bits).put(values)
    assert bookends.scale(x, scalar(1), len(values), dtype) == OK and (x.get() == values).all()


def test_scale_refuses():
    x, factor = scalar(1), scalar(2)
    for arguments, error, words in (((x, factor, -1, FP32), bookends.ERROR_SHAPE, "count is -1"),
                                    ((x, None, 1, FP32), bookends.ERROR_NULL, "factor is null"),
                                    ((None, factor, 1, FP32), bookends.ERROR_NULL, "x is null"),
                                    ((x, factor, 1, 3), bookends.ERROR_DTYPE, "there is no dtype 3")):
        assert bookends.scale(*arguments) == error and last_message() == "bk_scale: " + words
    assert bookends.scale(None, None, 0, FP32) == OK and x.get()[0] == 1


@every_classifier
def test_micro_batches_share_a_divisor(version):
    """Two of them, together, give the gradient of the mean over all rows that count."""
    batches = [Rows(FP32, 7, seed=1), Rows(FP32, 9, seed=2)]
    count = sum((batch.ids != -100).sum() for batch in batches)
    rows, total = scalar(0), scalar(0)
    for batch in batches:
        assert bookends.classifier_totals(rows, None, batch.targets, None, batch.N) == OK
    assert rows.get()[0] == count
    everything = []
    for batch in batches:
        dlogits, losses, _ = batch.call(version, divisor=rows)
        want = batch.call(version, dloss=np.float32(1) / np.float32(count))[0]
        assert (dlogits == want).all()
        assert bookends.classifier_totals(None, total, None, Array(batch.N, np.float32).put(losses), batch.N) == OK
        everything += losses.tolist()
    assert abs(total.get()[0] / rows.get()[0] - np.sum(everything) / count) < 1e-6 * count


# ---------------------------------------------------------------------------------------------------------------------
# plans

GRADIENTS = WANT_DX | WANT_DW | WANT_DBIAS | HAS_BIAS


class Plan:
    """A plan of the LM head with arrays for its runs."""

    def __init__(self, N=40, C=16, V=1000, dtype=BF16, grad=FP32, version=0, flags=GRADIENTS, options=None, memory=0,
                 share=0.0):
        self.shape, self.dtype, self.grad, self.flags = (N, C, V), dtype, grad, flags
        code, self.plan = bookends.lm_head_create(N, C, V, flags, options, memory, dtype, grad, version, share)
        assert code == OK, last_message()
        self.bytes = bookends.library().bk_lm_head_workspace_bytes(self.plan)
        rng = np.random.default_rng([N, C, V])
        self.X = Array(N * C, dtype.bits).put(to_bits(rng.standard_normal((N, C)), dtype))
        self.W = Array(V * C, dtype.bits).put(to_bits(rng.standard_normal((V, C)) / C**0.5, dtype))
        self.bias = Array(V, dtype.bits).put(to_bits(rng.standard_normal(V), dtype)) if flags & HAS_BIAS else None
        self.ids = rng.integers(0, V, N).astype(np.int32)
        self.ids[::5] = -100
        self.targets = Array(N, np.int32).put(self.ids)
        self.workspace = Array(self.bytes, np.uint8)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        bookends.library().bk_lm_head_destroy(self.plan)

    def outputs(self):
        N, C, V = self.shape
        sizes = (("dX", N * C, self.dtype.bits, WANT_DX), ("dW", V * C, self.grad.bits, WANT_DW),
                 ("dbias", V, self.grad.bits, WANT_DBIAS))
        arrays = {name: Array(count, item).put(np.zeros(count, item)) if self.flags & flag else None
                  for name, count, item, flag in sizes}
        return {**arrays, "losses": Array(N, np.float32, VALUE_FILL), "lse": Array(N, np.float32, VALUE_FILL)}

    def tune(self):
        outputs = self.outputs()
        assert bookends.lm_head_tune(self.plan, outputs["dX"], outputs["dW"], self.X, self.W, self.bias,
                                     self.workspace) == OK

    def run(self, options=None, before=None):
        """(error code, {name: array as it is in memory})."""
        outputs = self.outputs()
        if before is not None:
            outputs["losses"].put(before)
        code, _ = bookends.lm_head_run(self.plan, *outputs.values(), self.X, self.W, self.bias, self.targets, None,
                                       None, self.workspace, options=options)
        return code, {name: array.get() for name, array in outputs.items() if array is not None}


def equal(a, b):
    """Bit for bit, NaN too."""
    return all(a[name].tobytes() == b[name].tobytes() for name in a)


@every_head
@pytest.mark.parametrize("softcap, logit_scale", [(0, 1), (0, -0.5), (5, 2), (0, 0)])
def test_options_of_a_run(softcap, logit_scale, version):
    """As if the plan had been made for them, and the plan's own stay for the runs without."""
    planned = ClassifierOptions(softcap=softcap, logit_scale=logit_scale)
    scale = 3 * logit_scale
    with Plan(version=version, options=planned, share=0.3) as plan:
        code, own = plan.run()
        assert code == OK
        for options in (dict(dloss=0.125, label_smoothing=0.2), dict(z_loss=0.01, ignore_index=7),
                        dict(ignore_index=int(plan.ids[1]), dloss=-3), dict(logit_scale=scale, softcap=1.5 * softcap)):
            options = {"softcap": softcap, "logit_scale": logit_scale, **options}
            with Plan(version=version, options=ClassifierOptions(**options), share=0.3) as other:
                want = other.run()
            got = plan.run(ClassifierOptions(**options))
            assert got[0] == want[0] == OK and equal(got[1], want[1]), options
            assert logit_scale == 0 or not equal(got[1], own)
        for options in (dict(softcap=0 if softcap else 1), dict(logit_scale=-logit_scale or 1)):
            options = ClassifierOptions(**{"softcap": softcap, "logit_scale": logit_scale, **options})
            code, untouched = plan.run(options)
            assert code == bookends.ERROR_OPTIONS and "bk_lm_head_run: logit_scale is" in last_message()
            assert set(untouched["losses"].tobytes()) == {VALUE_FILL} and not untouched["dW"].any()
        assert plan.run(ClassifierOptions(label_smoothing=2))[0] == bookends.ERROR_OPTIONS
        assert plan.run(ClassifierOptions(flags=1))[0] == bookends.ERROR_FLAGS
        assert equal(plan.run()[1], own)


@every_head
def test_divisor_and_added_losses_of_a_run(version):
    with Plan(version=version, share=0.3) as plan:
        own = plan.run()[1]
        count = (plan.ids != -100).sum()
        rows = scalar(0)
        assert bookends.classifier_totals(rows, None, plan.targets, None, len(plan.ids)) == OK
        before = np.arange(len(plan.ids), dtype=np.float32)
        code, got = plan.run(ClassifierOptions(divisor=rows, flags=ADD_LOSSES), before)
        assert code == OK
        want = plan.run(ClassifierOptions(dloss=np.float32(1) / np.float32(count)))[1]
        assert all((got[name] == want[name]).all() for name in ("dX", "dW", "dbias", "lse"))
        assert added(got["losses"], before, own["losses"])
        code, got = plan.run(ClassifierOptions(divisor=scalar(0)))
        assert code == OK and not got["dW"].any() and not from_bits(got["dX"], BF16).any() and not got["dbias"].any()


@every_head
@pytest.mark.parametrize("dtype, grad", [(FP32, FP32), (BF16, FP32), (FP16, FP16)], ids=lambda d: d.name)
@pytest.mark.parametrize("flags", [GRADIENTS, WANT_DW, 0])
def test_a_plan_describes_itself(flags, dtype, grad, version):
    N, C, V = 256, 16, 1000
    for share in (0.0, 0.02, 0.3, 2.0):
        with Plan(N, C, V, dtype, grad, version, flags, share=share) as plan:
            d = bookends.lm_head_describe(plan.plan)
            size = 4 if dtype is FP32 else 2
            assert d.version == version and d.bytes == plan.bytes
            assert abs(d.share - d.bytes / (N * V * size)) < 1e-9
            assert 1 <= d.rows <= N and 1 <= d.columns <= V
            padded = d.logits_bytes / max(d.buffers * d.rows * size, 1)
            assert d.columns <= padded < d.columns + 8 + 256 if d.buffers else d.logits_bytes == 0
            way = d.way.decode()
            assert way in {1: ["textbook"], 2: ["rows"], 3: ["rows"], 4: ["vocabulary"], 5: ["vocabulary", "epilogue"],
                           6: ["rows", "vocabulary", "epilogue"]}[version]
            assert d.probs_bytes == (-(-N * V * 4 // 256) * 256 if version == 1 else 0)
            parts = [d.logits_bytes, d.statistics_bytes, d.probs_bytes, d.X_bytes, d.dX_bytes, d.dW_bytes,
                     d.dbias_bytes, -(-d.gemm_bytes // 256) * 256]
            assert sum(parts) == d.bytes if way != "epilogue" else max(parts) <= d.bytes <= sum(parts)
            if version <= 2:
                assert (d.rows, d.columns, d.buffers) == (N, V, 1)
            assert (d.dW_bytes > 0) == (grad is not FP32 and bool(flags & WANT_DW))


def test_a_description_for_older_programs():
    """They have a part of its fields, and pass the size that they know."""
    with Plan() as plan:
        whole = bytes(bookends.lm_head_describe(plan.plan))
        for size in (0, 8, 12, len(whole) - 8):
            some = ctypes.create_string_buffer(b"\xa5" * len(whole), len(whole))
            assert bookends.library().bk_lm_head_describe(plan.plan, some, size) == OK
            assert some.raw == whole[:size] + b"\xa5" * (len(whole) - size)
        longer = ctypes.create_string_buffer(b"\xa5" * (len(whole) + 64), len(whole) + 64)
        assert bookends.library().bk_lm_head_describe(plan.plan, longer, len(whole) + 64) == OK
        assert longer.raw == whole + b"\xa5" * 64
        assert bookends.library().bk_lm_head_describe(plan.plan, None, 8) == bookends.ERROR_NULL
        assert bookends.library().bk_lm_head_describe(None, longer, 8) == bookends.ERROR_NULL


@every_head
def test_the_least_memory_is_told(version):
    least = ctypes.c_size_t(5)
    code, plan = bookends.lm_head_create(200, 16, 1000, GRADIENTS, None, 100, BF16, BF16, version, least=least)
    assert (code, plan) == (bookends.ERROR_MEMORY, None)
    assert least.value > 100 and last_message() == \
        "bk_lm_head_create: 100 bytes of scratch are too few: %d are enough" % least.value
    with Plan(200, 16, 1000, BF16, BF16, version, memory=least.value) as plan:
        assert plan.bytes <= least.value
        assert plan.run()[0] == OK
    code, plan = bookends.lm_head_create(200, 16, 1000, GRADIENTS, None, least.value, BF16, BF16, version, least=least)
    assert code == OK and least.value == 0
    bookends.library().bk_lm_head_destroy(plan)


def test_a_share_is_a_budget():
    N, C, V = 1024, 64, 4096
    logits = N * V * 2
    for version in (3, 4, 5, 6):
        with Plan(N, C, V, version=version, share=1e-9) as plan:
            least = bookends.lm_head_describe(plan.plan)
        for share in (0.3, 0.5, 1.0):
            with Plan(N, C, V, version=version, share=share) as plan:
                d = bookends.lm_head_describe(plan.plan)
                assert d.bytes <= max(share * logits, least.bytes) and d.rows >= 128 and d.columns >= 128
        with Plan(N, C, V, version=version) as default, Plan(N, C, V, version=version, share=0.25) as quarter:
            assert bytes(bookends.lm_head_describe(default.plan)) == bytes(bookends.lm_head_describe(quarter.plan))
    for share, memory in ((-0.1, 0), (np.nan, 0), (np.inf, 0), (0.5, 1 << 20)):
        code, plan = bookends.lm_head_create(N, C, V, 0, None, memory, BF16, FP32, 0, share)
        assert (code, plan) == (bookends.ERROR_OPTIONS, None) and "share" in last_message()


# ---------------------------------------------------------------------------------------------------------------------
# tuning results

@every_head
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=lambda d: d.name)
def test_tuning_is_restored(dtype, version):
    with Plan(dtype=dtype, version=version) as tuned, Plan(dtype=dtype, version=version) as fresh:
        tuned.tune()
        blob = bookends.lm_head_save_tuning(tuned.plan)
        assert bookends.lm_head_restore_tuning(fresh.plan, blob) == OK
        assert bookends.lm_head_save_tuning(fresh.plan) == blob
        got, want = fresh.run(), tuned.run()
        assert got[0] == want[0] == OK and equal(got[1], want[1])
    with Plan(dtype=dtype, version=version, options=ClassifierOptions(z_loss=0.1, dloss=2)) as other:
        assert bookends.lm_head_restore_tuning(other.plan, blob) == OK


def test_tuning_of_another_plan_is_refused():
    with Plan() as plan:
        blob = bookends.lm_head_save_tuning(plan.plan)
        assert bookends.lm_head_restore_tuning(plan.plan, blob) == OK
        for bad in (b"", blob[:-1], blob + b"\0", blob[:8], bytes(len(blob)), b"\xff" * len(blob)):
            assert bookends.lm_head_restore_tuning(plan.plan, bad) == bookends.ERROR_TUNING
    for changes in (dict(N=41), dict(C=24), dict(V=1001), dict(dtype=FP16), dict(grad=BF16), dict(version=4),
                    dict(flags=GRADIENTS & ~WANT_DX), dict(flags=WANT_DX | WANT_DW), dict(memory=30000),
                    dict(share=2.0)):
        with Plan(**changes) as other:
            before = bookends.lm_head_save_tuning(other.plan)
            assert bookends.lm_head_restore_tuning(other.plan, blob) == bookends.ERROR_TUNING, changes
            assert last_message().startswith("bk_lm_head_restore_tuning: ")
            assert bookends.lm_head_save_tuning(other.plan) == before


def test_a_damaged_blob_changes_nothing():
    """Each byte flipped, in one bit and in all; the plan keeps its algorithms, and runs."""
    with Plan() as plan:
        want = plan.run()[1]
        blob = bookends.lm_head_save_tuning(plan.plan)
        rng = np.random.default_rng(0)
        for i in range(len(blob)):
            for flip in (0xff, 1 << int(rng.integers(8))):
                bad = bytearray(blob)
                bad[i] ^= flip
                assert bookends.lm_head_restore_tuning(plan.plan, bytes(bad)) == bookends.ERROR_TUNING, i
        for _ in range(200):
            bad = bytearray(blob)
            for i in rng.integers(len(blob), size=4):
                bad[i] ^= int(rng.integers(1, 256))
            if bytes(bad) != blob:
                assert bookends.lm_head_restore_tuning(plan.plan, bytes(bad)) == bookends.ERROR_TUNING
        assert bookends.lm_head_save_tuning(plan.plan) == blob
        assert equal(plan.run()[1], want)


def test_saving_needs_room():
    with Plan() as plan:
        size = bookends.library().bk_lm_head_tuning_bytes(plan.plan)
        blob = ctypes.create_string_buffer(b"\xa5" * (size + 8), size + 8)
        assert bookends.library().bk_lm_head_save_tuning(plan.plan, blob, size - 1) == bookends.ERROR_SHAPE
        assert str(size) in last_message() and blob.raw == b"\xa5" * (size + 8)
        assert bookends.library().bk_lm_head_save_tuning(plan.plan, None, size) == bookends.ERROR_NULL
        assert bookends.library().bk_lm_head_save_tuning(None, blob, size) == bookends.ERROR_NULL
        assert bookends.library().bk_lm_head_restore_tuning(plan.plan, None, size) == bookends.ERROR_NULL
        assert bookends.library().bk_lm_head_save_tuning(plan.plan, blob, size + 8) == OK
        assert blob.raw[size:] == b"\xa5" * 8
    assert bookends.library().bk_lm_head_tuning_bytes(None) == 0
