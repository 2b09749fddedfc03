"""Tensors of more than 2^32 elements: outputs, logits, tables, and the offsets of rows in them.

On the CPU device memory that is not touched costs nothing, so that a wide row of which a few columns are used is cheap.
What is written or read whole needs a GPU's memory. Each test that does runs at a small size too, on either device, so
that its own arithmetic is tested everywhere. (Tables beyond 2^32 elements are in the encoders' own tests.)
"""

import numpy as np
import pytest

import bookends
import test_classifier_fused as classifier
import test_encoder_backward as backward
import test_encoder_forward as forward
import test_lm_head as head
from bookends import (Array, BF16, DTYPES, FP16, FP32, INT_MAX, OK, ON_CUDA, OVERWRITE, VALUE_FILL, WANT_DW, WANT_DX,
                      ClassifierOptions, from_bits, needs_cuda, or_skip, random_bits, status_array, to_bits)


def large(*sizes):
    return pytest.param(*sizes, marks=needs_cuda)


def edges(rows, columns):
    """The first rows and the last, those around 2^31 and 2^32 elements, and the ones that an offset without its upper
    bits would mistake for these."""
    found = {0, 1, rows // 2, rows - 2, rows - 1}
    for elements in (2**31, 2**32):
        first = elements // columns
        found |= {first - 1, first, first + 1}
        found |= {row - first + by for row in (first + 1, rows - 1) for by in (-1, 0, 1)}
    return sorted(row for row in found if 0 <= row < rows)


# ---------------------------------------------------------------------------------------------------------------------
# encoder_forward

@pytest.mark.parametrize("version", forward.VERSIONS)
@pytest.mark.parametrize("dtype, B, T, C, V", [
    (BF16, 2, 9, 5, 50), (FP32, 4, 3, 64, 7),
    large(BF16, 64, 1024, 65544, 50),     # out
    large(BF16, 1, 1049000, 4104, 50),    # out and wpe
    large(FP16, 3, 204600000, 7, 50),     # the same, with rows that no vector divides
    large(BF16, 3, 1431655766, 1, 9)],    # positions
    ids=lambda value: getattr(value, "name", str(value)))
def test_encoder_forward(dtype, B, T, C, V, version):
    N, size = B * T, np.dtype(dtype.bits).itemsize
    or_skip(size * (N + T + V) * C + 4 * N)
    rng = np.random.default_rng(C)
    wte, rows = random_bits(rng, (V, C), dtype), edges(N, C)
    inp, wpe, out = Array(N, np.int32, None), Array(T * C, dtype.bits, None), Array(N * C, dtype.bits, VALUE_FILL)
    ids = dict(zip(rows, rng.integers(0, V, len(rows)).tolist()))
    ids[N - 1] = V
    for row, id in ids.items():
        inp.put([id], row)
    positions = {row % T: random_bits(rng, C, dtype) for row in rows}
    for t, values in positions.items():
        wpe.put(values, t * C)
    code, word = bookends.encoder_forward(out, inp, Array(V * C, dtype.bits).put(wte), wpe, status_array(), B, T, C, V,
                                          dtype, version)
    assert (code, word) == (OK, N - 1)
    for row in rows:
        want = np.full(C, np.nan) if ids[row] == V else \
            from_bits(wte[ids[row]], dtype) + from_bits(positions[row % T], dtype)
        assert bookends.same(out.get(row * C, C), to_bits(want, dtype), dtype).all(), row
    assert out.guards_intact()


# ---------------------------------------------------------------------------------------------------------------------
# encoder_backward

def assert_zeros_but(array, rows, C):
    """In every row but these."""
    part = max(1, (1 << 26) // C)
    for first in range(0, array.count // C, part):
        bits = array.get(first * C, min(part * C, array.count - first * C))
        other = set((np.flatnonzero(bits) // C + first).tolist())
        assert other <= set(rows), sorted(other - set(rows))[:5]


@pytest.mark.parametrize("version", backward.VERSIONS)
@pytest.mark.parametrize("types, V, C", [
    (backward.ALL_BF16, 700, 40), (backward.BF16_TO_FP32, 600, 33),
    large(backward.ALL_BF16, 262144, 8960), large(backward.BF16_TO_FP32, 262144, 8960),  # past 2^31
    large(backward.ALL_BF16, 262144, 17920), large(backward.ALL_BF16, 262145, 17919),    # past 2^32
    large(backward.ALL_BF16, INT_MAX, 3)], ids=lambda value: str(value) if isinstance(value, int) else
    backward.types_name(value))
def test_encoder_backward_overwrites(types, V, C, version):
    """A table of NaN: rows of some positions get their sums, all others become zero."""
    rows = edges(V, C)
    B, T = len(rows), 3
    size = bookends.encoder_backward_workspace_bytes(B, T, C, V, version)
    or_skip(V * C * np.dtype(types.grad.bits).itemsize + size)
    rng = np.random.default_rng(V)
    terms = rng.integers(1, 9, (B * T, C))
    ids = rng.permutation(np.repeat(rows, T)).astype(np.int32)
    dwte, workspace = Array(V * C, types.grad.bits), Array(size, np.uint8) if size else None
    code, word = bookends.encoder_backward(
        dwte, None, Array(terms.size, types.dtype.bits).put(to_bits(terms, types.dtype)),
        Array(B * T, np.int32).put(ids), status_array(), workspace, B, T, C, V, *types, OVERWRITE, version=version)
    assert (code, word) == (OK, -1)
    sums = backward.Sums(ids, terms.astype(float))
    for row, want in zip(sums.rows.tolist(), sums.total):
        assert (from_bits(dwte.get(row * C, C), types.grad) == want).all(), row
    assert_zeros_but(dwte, rows, C)
    assert dwte.guards_intact() and (workspace is None or workspace.guards_intact())


# ---------------------------------------------------------------------------------------------------------------------
# classifier_fused

@pytest.mark.parametrize("version", classifier.VERSIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_classifier_fused_wide_rows(dtype, version):
    """Rows of 2^31-1 columns, of which some are used: on the CPU device no more is touched."""
    N, P = 5, INT_MAX
    if ON_CUDA:
        or_skip(N * P * np.dtype(dtype.bits).itemsize)
    logits = Array(N * P, dtype.bits, None)
    for V in (8, 203, 20480):
        for options in ({}, dict(label_smoothing=0.1, z_loss=0.01)):
            case = classifier.some_case(dtype, N, V, **options)
            for row in range(N):
                logits.put(case.bits[row], row * P)
            arrays = [Array(N, item, VALUE_FILL) for item in (np.float32, np.float32, np.int32)]
            code, word = bookends.classifier_fused(
                None, arrays[0], arrays[1], None, arrays[2], logits, Array(N, np.int32).put(case.targets), None,
                status_array(), N, V, P, case.options, dtype, version)
            assert (code, word) == (OK, -1)
            for name, array in zip(("losses", "lse"), arrays):
                exact, slack = case.reference.exact[name], case.reference.slack[name]
                assert not classifier.off(array.get().astype(np.float64), exact, slack, FP32).any(), (name, V, options)
            assert (arrays[2].get() == case.reference.correct).all()


@pytest.mark.parametrize("version", classifier.VERSIONS)
@pytest.mark.parametrize("dtype, N, V, P, in_place", [
    (BF16, 7, 130, 136, True), (FP32, 9, 40, 41, False),
    large(BF16, 86000, 50257, 50304, True), large(FP32, 16500, 262143, 262144, True),
    large(BF16, 2**23, 511, 513, True), large(BF16, 35000, 128256, 128256, False)],
    ids=lambda value: getattr(value, "name", str(value)))
def test_classifier_fused(dtype, N, V, P, in_place, version):
    """All logits are zero but those of some rows."""
    size = np.dtype(dtype.bits).itemsize
    or_skip(N * P * size * (1 if in_place else 2))
    rng, rows = np.random.default_rng(V), edges(N, P)
    targets = np.zeros(N, np.int32)
    targets[rows] = rng.integers(0, V, len(rows))
    targets[5] = V
    rows = [row for row in rows if row != 5]
    case = classifier.Case(dtype, classifier.some_logits(rng, len(rows), V), targets[rows], P=P)
    logits = Array(N * P, dtype.bits, None)
    for k, row in enumerate(rows):
        logits.put(case.bits[k], row * P)
    losses = Array(N, np.float32, VALUE_FILL)
    dlogits = logits if in_place else Array(N * P, dtype.bits, VALUE_FILL)
    code, word = bookends.classifier_fused(dlogits, losses, None, None, None, logits, Array(N, np.int32).put(targets),
                                           None, status_array(), N, V, P, None, dtype, version)
    assert (code, word) == (OK, 5)
    got, want = losses.get().astype(np.float64), np.full(N, np.log(V))
    want[rows], want[5] = case.reference.exact["losses"], np.nan
    assert np.isnan(got[5]) and np.abs(np.delete(got - want, 5)).max() < 1e-3
    for k, row in enumerate(rows):
        bits = dlogits.get(row * P, P)
        wrong = classifier.off(from_bits(bits[:V], dtype), case.reference.exact["dlogits"][k],
                               case.reference.slack["dlogits"][k], dtype)
        assert not wrong.any() and (bits[V:] == 0).all(), row
    assert dlogits.guards_intact() and losses.guards_intact()


# ---------------------------------------------------------------------------------------------------------------------
# lm_head

@pytest.mark.parametrize("version", head.VERSIONS)
@pytest.mark.parametrize("N, V", [(40, 300), large(33000, 140000), large(262144, 16640)], ids=str)
def test_lm_head_logits(N, V, version):
    """All logits at once; some rows of X are not zero."""
    C, budget = 8, 3 * N * V if version in head.BOUNDED and N > 1000 else 0
    or_skip(N * V * (7 if version == 1 else 3) + 16 * (N + V) * C)
    rng, rows = np.random.default_rng(V), edges(N, V)
    X, W = np.zeros((N, C), np.uint16), to_bits(rng.standard_normal((V, C)), BF16)
    X[rows] = to_bits(rng.standard_normal((len(rows), C)), BF16)
    targets = np.zeros(N, np.int32)
    targets[rows] = rng.integers(0, V, len(rows))
    with head.plan_for(N, C, V, WANT_DX, None, budget, BF16, FP32, version) as plan:
        workspace = Array(bookends.library().bk_lm_head_workspace_bytes(plan), np.uint8)
        dX, losses = Array(N * C, np.uint16), Array(N, np.float32)
        code, word = bookends.lm_head_run(
            plan, dX, None, None, losses, None, Array(X.size, np.uint16).put(X), Array(W.size, np.uint16).put(W), None,
            Array(N, np.int32).put(targets), None, status_array(), workspace)
        assert (code, word) == (OK, -1)
    reference = head.Reference(BF16, from_bits(X[rows], BF16), from_bits(W, BF16), None, targets[rows],
                               ClassifierOptions(), None)
    got = losses.get().astype(np.float64)
    assert not head.outside(got[rows], reference.exact["losses"], reference.slack["losses"], FP32).any()
    assert np.abs(np.delete(got, rows) - np.log(V)).max() < 1e-3
    got = from_bits(dX.get().reshape(N, C)[rows], BF16)
    assert not head.outside(got, reference.exact["dX"], reference.slack["dX"], BF16).any()
    assert dX.guards_intact() and losses.guards_intact() and workspace.guards_intact()


@pytest.mark.parametrize("version", head.VERSIONS)
@pytest.mark.parametrize("N, C, V", [(16, 40, 300), large(16, 32776, 131100)], ids=str)
def test_lm_head_weights(N, C, V, version):
    """Some rows of W are not zero; those of dW are looked at, with some others."""
    or_skip(6 * V * C + N * V * 16)
    rng, columns = np.random.default_rng(V), edges(V, C)
    X = to_bits(rng.standard_normal((N, C)), BF16)
    some = to_bits(rng.standard_normal((len(columns), C)) * (4 / C)**0.5, BF16)
    W = Array(V * C, np.uint16, None)
    for row, column in zip(some, columns):
        W.put(row, column * C)
    targets = rng.choice(columns, N).astype(np.int32)
    with head.plan_for(N, C, V, WANT_DX | WANT_DW, None, 0, BF16, FP32, version) as plan:
        workspace = Array(bookends.library().bk_lm_head_workspace_bytes(plan), np.uint8)
        dX, dW, losses = Array(N * C, np.uint16), Array(V * C, np.uint32, None), Array(N, np.float32)
        code, word = bookends.lm_head_run(plan, dX, dW, None, losses, None, Array(X.size, np.uint16).put(X), W, None,
                                          Array(N, np.int32).put(targets), None, status_array(), workspace)
        assert (code, word) == (OK, -1)
    X, used = from_bits(X, BF16), from_bits(some, BF16)
    logits = head.rounded(X @ used.T, BF16)
    total = np.exp(logits).sum(1) + V - len(columns)  # the other logits are 0
    hot = targets[:, None] == np.array(columns)
    assert np.abs(losses.get() - (np.log(total) - (logits * hot).sum(1))).max() < 0.02  # logits may round either way
    d = np.exp(logits) / total[:, None] - hot
    near = 2.0**-5  # of the terms' size: a logit that rounds the other way moves its probability by 2^-6
    scale = np.abs(d) @ np.abs(used)
    assert (np.abs(from_bits(dX.get(), BF16).reshape(N, C) - d @ used) <= near * scale).all()
    exact, scale = d.T @ X, np.abs(d).T @ np.abs(X)
    for k, column in enumerate(columns):
        assert (np.abs(from_bits(dW.get(column * C, C), FP32) - exact[k]) <= near * scale[k]).all(), column
    other = next(column for column in range(V // 3, V) if column not in columns)
    exact, scale = (1 / total) @ X, (1 / total) @ np.abs(X)
    assert (np.abs(from_bits(dW.get(other * C, C), FP32) - exact) <= near * scale).all()
    assert dX.guards_intact() and dW.guards_intact() and workspace.guards_intact()
