"""Every function over numpy arrays on the CPU device, against numpy float64."""

import threading

import numpy as np
import pytest

import bookends
from bookends import _library

ON_CPU = _library.build()["device"] == "cpu"
pytestmark = pytest.mark.skipif(not ON_CPU, reason="numpy arrays need the CPU device's library")


def close(got, want, tolerance=2e-6):
    return np.abs(got - want).max(initial=0) <= tolerance * max(1, np.abs(want).max(initial=0))


def softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


class Job:
    """Logits or hidden states and weights, with targets of which some are ignored; the reference in float64."""

    def __init__(self, N=9, C=13, V=37, seed=0, ignored=True):
        rng = np.random.default_rng(seed)
        self.X = rng.standard_normal((N, C)).astype(np.float32)
        self.W = rng.standard_normal((V, C)).astype(np.float32)
        self.bias = rng.standard_normal(V).astype(np.float32)
        self.targets = rng.integers(0, V, N).astype(np.int32)
        if ignored:
            self.targets[::4] = -100
        self.logits = (self.X.astype(np.float64) @ self.W.T + self.bias).astype(np.float32)

    def reference(self, factors, softcap=0.0, label_smoothing=0.0, z_loss=0.0):
        """(losses, dlogits, lse, probs) of self.logits."""
        x = self.logits.astype(np.float64)
        z = softcap * np.tanh(x / softcap) if softcap else x
        V = z.shape[1]
        lse = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
        p = softmax(z)
        used = self.targets != -100
        label = np.where(used, self.targets, 0)
        rows = np.arange(len(label))
        smooth = label_smoothing
        losses = (1 - smooth) * (lse - z[rows, label]) + smooth * (lse - z.mean(1)) + z_loss * lse**2
        one_hot = np.zeros_like(z)
        one_hot[rows, label] = 1
        d = (1 + 2 * z_loss * lse)[:, None] * p - (1 - smooth) * one_hot - smooth / V
        d *= (1 - (z / softcap)**2 if softcap else 1)
        return losses * used, d * (factors * used)[:, None], lse, p


def test_encoder_backward():
    rng = np.random.default_rng(3)
    inp = rng.integers(0, 7, (4, 5)).astype(np.int32)
    dout = rng.standard_normal((4, 5, 6)).astype(np.float32)
    dwte, dwpe = np.zeros((7, 6)), dout.astype(np.float64).sum(0)
    np.add.at(dwte, inp, dout)
    tokens, positions = bookends.encoder_backward(dout, inp, True, True, V=7)
    assert close(tokens, dwte) and close(positions, dwpe)
    again = bookends.encoder_backward(dout, inp, tokens, positions)
    assert again[0] is tokens and again[1] is positions and close(tokens, 2 * dwte) and close(positions, 2 * dwpe)
    bookends.encoder_backward(dout, inp, tokens, positions, overwrite=True)
    assert close(tokens, dwte) and close(positions, dwpe)
    half = bookends.encoder_backward(dout.astype(np.float16), inp, True, V=7, grad_dtype="float32")
    assert half[1] is None and half[0].dtype == np.float32 and close(half[0], dwte, 2e-3)
    workspace = np.empty(bookends.encoder_backward_workspace_bytes(4, 5, 6, 7) + 256, np.uint8)
    start = -workspace.ctypes.data % 256
    aligned = workspace[start:start + bookends.encoder_backward_workspace_bytes(4, 5, 6, 7)]
    assert (bookends.encoder_backward(dout, inp, True, V=7, workspace=aligned)[0] == tokens).all()
    with pytest.raises(ValueError, match=r"workspace: expected \d+ bytes, given 8"):
        bookends.encoder_backward(dout, inp, True, V=7, workspace=workspace[:8])
    with pytest.raises(ValueError, match="V: expected the size of the vocabulary"):
        bookends.encoder_backward(dout, inp, dwpe=True)
    with pytest.raises(bookends.UnsupportedError, match="version 1 has no stochastic rounding"):
        bookends.encoder_backward(dout.astype(np.float16), inp, True, V=7, stochastic=True, version=1)
    with pytest.raises(ValueError, match="seed: expected an int from 0 to 18446744073709551615, given -1"):
        bookends.encoder_backward(dout, inp, True, V=7, seed=-1)
    results = [bookends.encoder_backward(dout.astype(np.float16), inp, True, V=7, stochastic=True, seed=seed)[0]
               for seed in (1, 1, 2**63)]
    assert (results[0] == results[1]).all() and (results[0] != results[2]).any()


@pytest.mark.parametrize("item", [np.int32, np.int64])
def test_embedding_lookup(item):
    rng = np.random.default_rng(4)
    table = rng.standard_normal((9, 8)).astype(np.float16)
    idx = rng.integers(0, 9, (2, 3, 2)).astype(item)
    assert (bookends.embedding_lookup(idx, table) == table[idx]).all()
    wide = bookends.embedding_lookup(idx, table[:, 2:5], out_dtype=np.float32)
    assert wide.dtype == np.float32 and (wide == table[:, 2:5][idx]).all()
    with pytest.raises(ValueError, match="table: expected a contiguous"):
        bookends.embedding_lookup(idx, table.T)
    with pytest.raises(bookends.ArgumentError, match="out_dtype"):
        bookends.embedding_lookup(idx, table, out_dtype="bfloat16", out=Bits(idx.shape + (8,)))


class Bits:
    """Memory that says it is bfloat16."""

    def __init__(self, shape):
        self.array = np.empty(shape, np.uint16)
        self.__array_interface__ = {**self.array.__array_interface__, "typestr": "bfloat16"}


def test_embedding_bag():
    rng = np.random.default_rng(5)
    table = rng.standard_normal((9, 4)).astype(np.float32)
    idx = rng.integers(0, 9, (6, 3))
    assert close(bookends.embedding_bag(idx, table), table[idx].sum(1))
    assert close(bookends.embedding_bag(idx, table, mode="mean"), table[idx].mean(1))
    largest, where = bookends.embedding_bag(idx, table, mode="max", argmax=True)
    assert (largest == table[idx].max(1)).all()
    assert (where == table[idx].argmax(1) + 3 * np.arange(6)[:, None]).all()
    weights = rng.standard_normal((6, 3)).astype(np.float32)
    assert close(bookends.embedding_bag(idx, table, weights=weights), (table[idx] * weights[..., None]).sum(1))
    flat, offsets = idx.reshape(-1).astype(np.int32), np.array([0, 2, 2, 11, 18])
    want = np.array([table[flat[a:b]].sum(0) for a, b in zip(offsets, offsets[1:])])
    assert close(bookends.embedding_bag(flat, table, offsets), want)
    without = np.array([table[flat[a:b]][flat[a:b] != 3].sum(0) for a, b in zip(offsets, offsets[1:])])
    assert close(bookends.embedding_bag(flat, table, offsets.astype(np.int32), padding_idx=3), without)
    small = idx % 3
    two = bookends.embedding_bag(small, table, first_rows=np.array([0, 4, 9]))
    assert two.shape == (3, 2, 4)
    assert close(two[:, 0], table[small[:3]].sum(1)) and close(two[:, 1], table[4:][small[3:]].sum(1))
    for wrong, words in ((dict(mode="min"), "mode: expected sum, mean, max, given 'min'"),
                         (dict(padding_idx=-1), "padding_idx: expected an int from 0"),
                         (dict(weights=weights[:2]), r"weights: expected shape \(6, 3\) = \(6, 3\), given \(2, 3\)"),
                         (dict(first_rows=np.array([0, 1, 2, 3, 9])), "divides the 6 bags, given 4"),
                         (dict(argmax=True), "argmax")):
        with pytest.raises(ValueError, match=words):
            bookends.embedding_bag(idx, table, **wrong)


def test_embedding_bag_backward():
    rng = np.random.default_rng(6)
    table = rng.standard_normal((9, 4)).astype(np.float32)
    idx = rng.integers(0, 6, (5, 3))
    dout, weights = rng.standard_normal((5, 4)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)
    want = np.zeros((9, 4))
    np.add.at(want, idx, dout[:, None] * weights[..., None].astype(np.float64))
    got = bookends.embedding_bag_backward(dout, idx, dtable=True, weights=weights, dweights=True, table=table)
    assert close(got.dtable, want) and close(got.dweights, (dout[:, None] * table[idx]).sum(2))
    assert got.indices is None and got.distinct is None
    again = bookends.embedding_bag_backward(dout, idx, dtable=got.dtable, weights=weights)
    assert again.dtable is got.dtable and again.dweights is None and close(got.dtable, 2 * want)
    sparse = bookends.embedding_bag_backward(dout, idx, dtable=True, sparse=True, rows=9, weights=weights)
    n = sparse.distinct[0]
    assert (sparse.indices[:n] == np.unique(idx)).all() and close(sparse.dtable[:n], want[np.unique(idx)])
    out, argmax = bookends.embedding_bag(idx, table, mode="max", argmax=True)
    largest = bookends.embedding_bag_backward(dout, idx, dtable=True, rows=9, mode="max", argmax=argmax)
    want = np.zeros((9, 4))
    np.add.at(want, (idx.reshape(-1)[argmax], np.arange(4)), dout)
    assert close(largest.dtable, want)
    none = bookends.embedding_bag_backward(dout[:0], idx[:0], dtable=True, sparse=True, rows=9)
    assert none.distinct[0] == 0 and none.dtable.shape == (0, 4)
    assert bookends.embedding_bag_backward_workspace_bytes(15, 5, 4, 9) > 0
    for wrong, words in ((dict(dtable=True), "rows: expected the number of rows"),
                         (dict(dtable=True, rows=8, table=table), "rows: expected 9, the rows of table, given 8"),
                         (dict(rows=9, sparse=True), "dtable: expected True with sparse=True"),
                         (dict(dtable=True, rows=9, mode="max"), "argmax is null"),
                         (dict(dtable=True, rows=9, dweights=True), "table is null"),
                         (dict(dtable=True, rows=9, dout=dout[:4]), r"dout: expected shape \(5, C\) = \(5, 4\)")):
        with pytest.raises(ValueError, match=words):
            bookends.embedding_bag_backward(**{**dict(dout=dout, idx=idx), **wrong})
    with pytest.raises(bookends.UnsupportedError, match="version 1 has no sparse gradient"):
        bookends.embedding_bag_backward(dout, idx, dtable=True, sparse=True, rows=9, version=1)


def test_embedding_transpose():
    got = bookends.embedding_transpose(np.array([7, 3, 7, 9, 7]), 10)
    assert got.distinct[0] == 3 and got.indices[:3].tolist() == [3, 7, 9] and got.begin[:4].tolist() == [0, 1, 4, 5]
    assert got.positions.tolist() == [1, 0, 2, 4, 3] and got.group.tolist() == [0, 1, 1, 1, 2]
    assert bookends.embedding_transpose(np.zeros(0, np.int32), 10).distinct[0] == 0
    assert bookends.embedding_transpose_workspace_bytes(5, 10) > 0
    with pytest.raises(IndexError, match=r"idx\[1\] is 10: expected 0..9"):
        bookends.embedding_transpose(np.array([1, 10]), 10, check=True)


@pytest.mark.parametrize("item", [np.int32, np.int64])
def test_embedding_update(item):
    rng = np.random.default_rng(7)
    table, values = rng.standard_normal((9, 6)).astype(np.float32), rng.standard_normal((5, 4)).astype(np.float32)
    idx = np.array([3, 1, 3, 8, 0], item)
    want = table.copy()
    want[idx, :4] = values
    got = table.copy()
    view = got[:, :4]
    assert bookends.embedding_update(view, idx, values) is view and (got == want).all()
    added = table.astype(np.float64)
    np.add.at(added, idx, np.pad(0.5 * values, ((0, 0), (0, 2))))
    got = table.copy()
    bookends.embedding_update(got[:, :4], idx, values, mode="accumulate", scale=0.5)
    assert close(got, added)
    half = table.astype(np.float16)
    bookends.embedding_update(half[:, :4], idx[1:], values[1:], distinct=True)
    assert (half[idx[1:], :4] == values[1:].astype(np.float16)).all()
    for wrong, error, words in ((dict(mode="add"), ValueError, "mode: expected overwrite, accumulate, given 'add'"),
                                (dict(scale=float("inf")), ValueError, "scale: expected a finite float"),
                                (dict(values=values[:4]), ValueError, "values: expected shape"),
                                (dict(table=half[:, :4], values=values.astype(np.int32)), TypeError,
                                 "values: expected float16 or float32, given int32"),
                                (dict(table=half[:, :4].T), ValueError, "table: expected a contiguous"),
                                (dict(idx=idx + 8, check=True), IndexError, r"idx\[0\] is 11: expected 0..8")):
        with pytest.raises(error, match=words):
            bookends.embedding_update(**{**dict(table=table[:, :4], idx=idx, values=values), **wrong})
    assert bookends.embedding_update_workspace_bytes(5, 4, 9, mode="accumulate") > 0
    assert bookends.embedding_update_workspace_bytes(5, 4, 9, distinct=True) == 0


def test_embedding_optimizer():
    rng = np.random.default_rng(8)
    table, gradients = rng.standard_normal((9, 4)), rng.standard_normal((3, 4))
    idx = np.array([5, 0, 7])
    rate, decay, eps = 0.1, 0.01, 1e-8
    g, w = gradients.astype(np.float32).astype(np.float64), table.astype(np.float32).astype(np.float64)
    got = table.astype(np.float32)
    options = dict(learning_rate=rate, weight_decay=decay)
    assert bookends.embedding_optimizer(got, idx, gradients.astype(np.float32), **options) is got
    want = w.copy()
    want[idx] -= rate * (g + decay * w[idx])
    assert close(got, want)
    m, v, t = np.zeros((9, 4), np.float32), np.zeros((9, 4), np.float32), np.array([2])
    got = w.astype(np.float32)
    bookends.embedding_optimizer(got, idx, g.astype(np.float32), kind="adam", first=m, second=v, step=t, **options)
    M, S = 0.1 * g, 0.001 * g**2
    want = w.copy()
    want[idx] -= rate * (M / (1 - 0.9**2) / (np.sqrt(S / (1 - 0.999**2)) + eps) + decay * w[idx])
    assert close(got, want) and close(m[idx], M) and close(v[idx], S) and (m[1] == 0).all()
    s = np.zeros(9, np.float32)
    got = w.astype(np.float32)
    bookends.embedding_optimizer(got, idx, g.astype(np.float32), kind="rowwise_adagrad", second=s,
                                 count=np.array([2]), learning_rate=rate)
    want = w.copy()
    want[idx[:2]] -= rate * g[:2] / (np.sqrt((g[:2]**2).mean(1, keepdims=True)) + eps)
    assert close(got, want) and s[7] == 0
    for wrong, words in ((dict(kind="lion"), "kind: expected sgd, rowwise_adagrad, adam, rowwise_adam, given 'lion'"),
                         (dict(kind="adam"), "first is null"),
                         (dict(kind="adam", first=m, second=s), r"second: expected shape \(rows, C\)"),
                         (dict(kind="adam", first=m, second=v, step=0), "step"),
                         (dict(learning_rate=float("nan")), "learning_rate: expected a finite float")):
        with pytest.raises(ValueError, match=words):
            bookends.embedding_optimizer(got, idx, g.astype(np.float32), **wrong)


@pytest.mark.parametrize("options", [{}, dict(softcap=5.0), dict(label_smoothing=0.1, z_loss=0.01)])
def test_classifier(options):
    job = Job()
    dlosses = np.linspace(0.5, 2, len(job.targets)).astype(np.float32)
    losses, dlogits, lse, probs = job.reference(dlosses * 0.25 / 3, **options)
    divisor = np.array([3], np.float32)
    got = bookends.classifier_fused(job.logits, job.targets, dlogits=True, lse=True, probs=True, correct=True,
                                    dlosses=dlosses, dloss=0.25, divisor=divisor, **options)
    assert close(got.losses, losses) and close(got.dlogits, dlogits) and close(got.lse, lse) and close(got.probs, probs)
    assert (got.correct == (job.logits.argmax(1) == job.targets)).all()
    only = bookends.classifier_fused(job.logits, job.targets, losses=None, dlogits=True, **options)
    assert only.losses is None and only.lse is None
    own = job.logits.copy()
    placed = bookends.classifier_fused(own, job.targets, dlogits=own, dlosses=dlosses, dloss=0.25, divisor=divisor,
                                       **options)
    assert placed.dlogits is own and (own == got.dlogits).all()
    added = got.losses.copy()
    bookends.classifier_fused(job.logits, job.targets, losses=added, add_losses=True, **options)
    assert close(added, 2 * losses)


def test_classifier_with_padding_and_wrong_options():
    job = Job()
    padded = np.full((9, 40), np.nan, np.float32)
    padded[:, :37] = job.logits
    got = bookends.classifier_fused(padded, job.targets, V=37, dlogits=True)
    assert close(got.dlogits[:, :37], job.reference(np.ones(9))[1]) and (got.dlogits[:, 37:] == 0).all()
    with pytest.raises(bookends.ArgumentError, match="P is 37, less than V, 38"):
        bookends.classifier_fused(job.logits, job.targets, V=38)
    with pytest.raises(bookends.ArgumentError, match="label_smoothing 2"):
        bookends.classifier_fused(job.logits, job.targets, label_smoothing=2)
    for wrong, error, words in ((dict(softcap=float("nan")), ValueError, "softcap: expected a finite float, given nan"),
                                (dict(dloss="1x"), TypeError, "dloss: expected a number, given '1x'"),
                                (dict(ignore_index=2**31), ValueError, "ignore_index: expected an int from"),
                                (dict(divisor=np.ones(2, np.float32)), ValueError, "divisor: expected one element"),
                                (dict(dlosses=np.ones(8, np.float32)), ValueError, "dlosses: expected shape"),
                                (dict(dlogits=job.logits[:, :36].copy()), ValueError, "dlogits: expected shape")):
        with pytest.raises(error, match=words):
            bookends.classifier_fused(job.logits, job.targets, **wrong)


def test_totals():
    job = Job()
    losses = bookends.classifier_fused(job.logits, job.targets).losses
    rows, total = bookends.classifier_totals(job.targets, losses, rows=True, total=True)
    assert rows[0] == (job.targets != -100).sum() and close(total[0], losses.astype(np.float64).sum())
    assert bookends.classifier_totals(job.targets, rows=rows)[0] is rows and rows[0] == 12
    with pytest.raises(ValueError, match="losses: expected an array, since total is wanted"):
        bookends.classifier_totals(job.targets, total=True)
    with pytest.raises(ValueError, match="targets: expected targets or losses"):
        bookends.classifier_totals()


def test_scale():
    x = np.arange(12, dtype=np.float16).reshape(3, 4)
    assert bookends.scale(x, np.array(0.5, np.float32)) is x and (x.reshape(-1) == np.arange(12) / 2).all()
    with pytest.raises(ValueError, match=r"factor: expected one element, given shape \(2,\)"):
        bookends.scale(x, np.ones(2, np.float32))
    with pytest.raises(ValueError, match="x: expected a contiguous"):
        bookends.scale(x.T, np.ones(1, np.float32))


@pytest.mark.parametrize("options", [{}, dict(softcap=5.0, z_loss=0.01, label_smoothing=0.1)])
def test_lm_head(options):
    job = Job()
    N, C = job.X.shape
    V = len(job.W)
    losses, dlogits, lse, _ = job.reference(np.full(N, 0.5), **options)
    plan = bookends.LmHead(N, C, V, dtype="float32", dbias=True, bias=True, softcap=options.get("softcap", 0.0))
    got = plan.run(job.X, job.W, job.targets, job.bias, lse=True, dloss=0.5, **options)
    assert close(got.losses, losses, 1e-5) and close(got.lse, lse, 1e-5)
    assert close(got.dX, dlogits @ job.W, 1e-5) and close(got.dW, dlogits.T @ job.X, 1e-5)
    assert close(got.dbias, dlogits.sum(0), 1e-5)
    again = plan.run(job.X, job.W, job.targets, job.bias, dW=got.dW, losses=None, dloss=0.5, **options)
    assert again.dW is got.dW and again.losses is None and close(got.dW, 2 * dlogits.T @ job.X, 1e-5)
    described = plan.describe()
    assert described["bytes"] == plan.workspace_bytes and described["way"] in ("rows", "vocabulary", "epilogue")
    plan.tune(job.X, job.W, job.bias)
    blob = plan.save_tuning()
    plan.restore_tuning(blob)
    with pytest.raises(bookends.ArgumentError, match="bk_lm_head_restore_tuning"):
        plan.restore_tuning(blob[:-1])
    other = plan.run(job.X, job.W, job.targets, job.bias, dloss=0.5, **options)
    assert (other.dX == got.dX).all()


def test_lm_head_refuses_what_is_not_planned():
    job = Job()
    plan = bookends.LmHead(9, 13, 37, dtype=np.float32, dX=False)
    run = lambda **changes: plan.run(**{**dict(X=job.X, W=job.W, targets=job.targets), **changes})
    assert run().dX is None
    for wrong, error, words in (
            (dict(dX=job.X), ValueError, "dX: expected None, as the plan was made"),
            (dict(bias=job.bias), ValueError, "bias: expected None, as the plan was made"),
            (dict(X=job.X[:8]), ValueError, r"X: expected shape \(N, C\) = \(9, 13\), given \(8, 13\)"),
            (dict(W=job.W.astype(np.float16)), TypeError, "W: expected float32, given float16"),
            (dict(smoothing=1), TypeError, "smoothing: LmHead.run\\(\\) has no such option"),
            (dict(softcap=3.0), ValueError, "bk_lm_head_run: .*softcap 3"),
            (dict(targets=job.targets.astype(np.int64)), TypeError, "targets: expected int32, given int64")):
        with pytest.raises(error, match=words):
            run(**wrong)
    plan.destroy()
    plan.destroy()
    with pytest.raises(ValueError, match="plan: expected a plan that exists"):
        run()
    with pytest.raises(TypeError, match="dtype: expected float32, float16 or bfloat16, given float64"):
        bookends.LmHead(9, 13, 37, dtype="float64")
    with pytest.raises(bookends.WorkspaceError) as caught:
        bookends.LmHead(4096, 64, 4096, memory=1000)
    assert caught.value.least > 1000 and str(caught.value.least) in str(caught.value)
    assert bookends.LmHead(4096, 64, 4096, memory=caught.value.least).workspace_bytes <= caught.value.least


def test_eight_threads():
    """Threads with separate plans, and threads that share one plan, get the results of a single thread."""
    jobs = [Job(N=8, seed=seed) for seed in range(8)]
    shared = bookends.LmHead(8, 13, 37, dtype="float32")
    want = [shared.run(job.X, job.W, job.targets).dW for job in jobs]
    failures = []

    def work(number):
        try:
            for turn in range(4):
                job = jobs[(number + turn) % 8]
                plan = shared if turn % 2 else bookends.LmHead(8, 13, 37, dtype="float32")
                assert (plan.run(job.X, job.W, job.targets).dW == want[(number + turn) % 8]).all()
                with pytest.raises(bookends.ArgumentError, match=f"no version {100 + number}"):
                    bookends.classifier_fused(job.logits, job.targets, version=100 + number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
