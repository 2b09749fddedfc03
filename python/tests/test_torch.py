"""bookends.torch against torch in float64: values, gradients, what is refused, and torch's machinery around it."""

import os
import socket
import threading

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import torch.nn.functional as F  # noqa: E402

import bookends  # noqa: E402
import bookends.torch as bt  # noqa: E402
from bookends import _library  # noqa: E402
from bookends.torch import _ops  # noqa: E402

DEVICE = _library.build()["device"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ULP = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
every_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
on_the_device = torch.device(DEVICE)
other_device = torch.device("meta")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def randn(*shape, dtype=torch.float32, grad=True, scale=1.0):
    return (torch.randn(*shape, device=on_the_device) * scale).to(dtype).requires_grad_(grad)


def randint(most, shape, dtype=torch.int64):
    return torch.randint(0, most, shape, device=on_the_device, dtype=dtype)


def close(got, want, dtype=torch.float32, ulps=8):
    """Within some ulps of the largest value; NaN where the other is NaN."""
    want = want.to(torch.float64)
    assert got.shape == want.shape
    if want.numel() == 0:
        return True
    scale = max(1e-30, want.nan_to_num().abs().max().item())
    difference = (got.to(torch.float64) - want).abs()
    return bool(((difference <= ulps * ULP[dtype] * scale) | (got.isnan() & want.isnan())).all())


def doubles(*tensors):
    return [None if tensor is None else tensor.detach().double().requires_grad_(tensor.requires_grad)
            for tensor in tensors]


def gradients(loss, tensors, factor=1.0):
    """d(factor * loss.sum()) by each tensor."""
    return torch.autograd.grad((loss * factor).sum(), tensors)


# ---------------------------------------------------------------------------------------------------------------------
# the embedding

@every_dtype
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 2, 5), (0, 5), ()])
def test_embedding(shape, ids_dtype, dtype):
    weight, positions = randn(11, 6, dtype=dtype), randn(7, 6, dtype=dtype)
    ids = randint(11, shape, ids_dtype)
    W, P = doubles(weight, positions)
    for own, reference, tensors, references in (
            (bt.embedding(ids, weight), F.embedding(ids, W), [weight], [W]),
            *([(bt.embedding(ids, weight, positions), F.embedding(ids, W) + P[:5], [weight, positions], [W, P])]
              if shape else [])):
        assert own.dtype == dtype and close(own, reference, dtype, 1)
        factor = torch.randn(own.shape, device=own.device).to(dtype)
        for got, want in zip(gradients(own, tensors, factor), gradients(reference, references, factor.double())):
            assert got.dtype == dtype and close(got, want, dtype, 2)


def test_embedding_of_other_layouts():
    """Transposed ids and weights, expanded gradients."""
    ids, weight = randint(11, (5, 3)).T, randn(6, 11).T
    own = bt.embedding(ids, weight)
    assert (own == F.embedding(ids, weight)).all()
    assert (bt.embedding(ids, weight[:, :3]) == F.embedding(ids, weight[:, :3])).all()
    assert (bt.embedding(ids, weight[:1].expand(11, -1)) == weight[0]).all()
    leaf = randn(11, 6)
    got, = torch.autograd.grad(bt.embedding(ids, leaf).sum(), leaf)
    want, = torch.autograd.grad(F.embedding(ids, leaf).sum(), leaf)
    assert (got == want).all()


def test_embedding_padding_and_bad_ids():
    weight, positions = randn(11, 6), randn(4, 6)
    ids = randint(11, (3, 4))
    ids[1] = 2
    for extra in (None, positions):
        got, = gradients(bt.embedding(ids, weight, extra, padding_idx=-9), [weight])
        want, = gradients(F.embedding(ids, weight, padding_idx=2), [weight])
        assert close(got, want) and (got[2] == 0).all()
    _, dP = gradients(bt.embedding(ids, weight, positions, padding_idx=2), [weight, positions])
    assert close(dP, torch.full((4, 6), 3.0))
    bad = ids.clone()
    bad[0, 1], bad[2, 3] = 2**40 + 1, -1
    for extra in (None, positions):
        out = bt.embedding(bad, weight, extra)
        assert (out.isnan().any(-1) == ((bad < 0) | (bad > 10))).all()
        got, = gradients(out.nan_to_num(), [weight])
        want, = gradients(F.embedding(bad[(bad >= 0) & (bad < 11)], weight), [weight])
        assert close(got, want)


def test_embedding_is_torchs_module():
    own, other = bt.Embedding(11, 6, padding_idx=3), torch.nn.Embedding(11, 6, padding_idx=3)
    assert isinstance(own, torch.nn.Embedding) and (own.weight[3] == 0).all()
    own.to(on_the_device), other.to(on_the_device)
    own.load_state_dict(other.state_dict())
    ids = randint(11, (2, 5))
    assert (own(ids) == other(ids)).all()
    own(ids).sum().backward()
    other(ids).sum().backward()
    assert (own.weight.grad == other.weight.grad).all()
    assert bt.Embedding.from_pretrained(other.weight.detach()).weight.requires_grad is False


@pytest.mark.parametrize("name, value", [("max_norm", 1.0), ("scale_grad_by_freq", True)])
def test_embedding_refuses_by_name(name, value):
    with pytest.raises(NotImplementedError, match=f"{name}: bookends.torch does not support it, given {value}"):
        bt.Embedding(11, 6, **{name: value})
    with pytest.raises(NotImplementedError, match=name):
        bt.EmbeddingBag(11, 6, **{name: value})
    with pytest.raises(NotImplementedError, match=name):
        bt.embedding(randint(11, (3,)), randn(11, 6), **{name: value})
    with pytest.raises(NotImplementedError, match=name):
        bt.embedding_bag(randint(11, (3, 2)), randn(11, 6), **{name: value})


@pytest.mark.parametrize("change, error, words", [
    (lambda a: a.update(input=[1]), TypeError, "input: expected a tensor, given list"),
    (lambda a: a.update(input=a["input"].float()), TypeError, "input: expected int32 or int64, given float32"),
    (lambda a: a.update(weight=a["weight"].double()), TypeError, "weight: expected float32 or .*, given float64"),
    (lambda a: a.update(weight=a["weight"][0]), ValueError, r"weight: expected shape \(V, C\), given \(6,\)"),
    (lambda a: a.update(weight=a["weight"].to("meta")), ValueError, "weight: expected a tensor .* given one on meta"),
    (lambda a: a.update(positions=a["weight"].half()), TypeError, "positions: expected float32, given float16"),
    (lambda a: a.update(positions=a["weight"][:3]), ValueError, r"positions: expected shape \(4 or more, 6\), given"),
    (lambda a: a.update(padding_idx=11), ValueError, "padding_idx: expected a row of weight, from -11 to 10, given 11"),
])
def test_embedding_refuses_wrong_arguments(change, error, words):
    arguments = dict(input=randint(11, (3, 4)), weight=randn(11, 6))
    change(arguments)
    with pytest.raises(error, match=words):
        bt.embedding(**arguments)


@every_dtype
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3, -8])
@pytest.mark.parametrize("offsets", [None, [0, 3, 3, 9, 14], [0, 20], [0, 4, 8, 20, 20]])
def test_embedding_bag(offsets, padding_idx, mode, dtype):
    weight, ids = randn(11, 6, dtype=dtype), randint(11, (20,) if offsets else (5, 4))
    last = bool(offsets) and offsets[-1] == 20
    if offsets:
        offsets = torch.tensor(offsets, device=on_the_device)
    W, = doubles(weight)
    for factors in [None, *([randn(*ids.shape, dtype=dtype)] if mode == "sum" else [])]:
        F64, = doubles(factors)
        arguments = dict(offsets=offsets, mode=mode, padding_idx=padding_idx, include_last_offset=last)
        own = bt.embedding_bag(ids, weight, per_sample_weights=factors, **arguments)
        other = F.embedding_bag(ids, W, per_sample_weights=F64, **arguments)
        assert own.dtype == dtype and close(own, other.detach(), dtype, 2)
        factor = torch.randn(own.shape, device=own.device).to(dtype)
        tensors, references = ([weight], [W]) if factors is None else ([weight, factors], [W, F64])
        for got, want in zip(gradients(own, tensors, factor), gradients(other, references, factor.double())):
            assert got.dtype == dtype and close(got, want, dtype, 4)
        sparse, = gradients(bt.embedding_bag(ids, weight, per_sample_weights=factors, sparse=True, **arguments),
                            [weight], factor)
        dense, = gradients(bt.embedding_bag(ids, weight, per_sample_weights=factors, **arguments), [weight], factor)
        assert sparse.is_sparse and sparse.is_coalesced() and torch.equal(sparse.to_dense(), dense)


def test_sparse_gradients_of_embeddings():
    own, other = bt.Embedding(11, 6, padding_idx=3, sparse=True), torch.nn.Embedding(11, 6, padding_idx=3, sparse=True)
    own.to(on_the_device), other.to(on_the_device)
    own.load_state_dict(other.state_dict())
    ids = randint(11, (3, 5))
    assert torch.equal(own(ids), other(ids))
    for module in (own, other):
        module(ids).square().sum().backward()
        torch.optim.SparseAdam(module.parameters()).step()
    assert own.weight.grad.is_sparse and close(own.weight.grad.to_dense(), other.weight.grad.to_dense())
    assert close(own.weight.detach(), other.weight.detach())
    none, = gradients(bt.embedding(ids[:0], own.weight, sparse=True), [own.weight])
    assert none.is_sparse and (none.to_dense() == 0).all()
    with pytest.raises(NotImplementedError, match="sparse: .* with positions"):
        bt.embedding(ids, own.weight, randn(5, 6), sparse=True)
    with pytest.raises(NotImplementedError, match="sparse: expected False where a second derivative"):
        torch.autograd.grad(own(ids).sum(), own.weight, create_graph=True)


def test_embedding_bag_is_torchs_module():
    arguments = dict(mode="sum", padding_idx=2, include_last_offset=True)
    own, other = bt.EmbeddingBag(11, 6, **arguments), torch.nn.EmbeddingBag(11, 6, **arguments)
    assert isinstance(own, torch.nn.EmbeddingBag)
    own.to(on_the_device), other.to(on_the_device)
    own.load_state_dict(other.state_dict())
    ids, offsets, factors = randint(11, (20,)), torch.tensor([0, 7, 20], device=on_the_device), randn(20, grad=False)
    results = [module(ids, offsets, factors) for module in (own, other)]
    assert close(results[0], results[1].detach())
    for result in results:
        result.square().sum().backward()
    assert close(own.weight.grad, other.weight.grad)
    bad = ids.clone()
    bad[9] = 2**35
    assert own(bad, offsets).isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize("change, error, words", [
    (dict(mode="min"), ValueError, "mode: expected sum, mean or max, given 'min'"),
    (dict(input=torch.zeros(4, dtype=torch.int64)), ValueError, r"input: expected shape \(bags, hotness\) without"),
    (dict(offsets=torch.zeros(2, dtype=torch.int64)), ValueError, r"input: expected shape \(count\) with offsets"),
    (dict(input=torch.zeros(4)), TypeError, "input: expected int32 or int64, given float32"),
    (dict(weight=torch.zeros(4, 4, dtype=torch.float64)), TypeError, "weight: expected float32 .* given float64"),
    (dict(include_last_offset=True), ValueError, "include_last_offset: expected False without offsets"),
    (dict(input=torch.zeros(4, dtype=torch.int64), offsets=torch.zeros(0, dtype=torch.int64),
          include_last_offset=True), ValueError, r"offsets: expected shape \(bags \+ 1\), given \(0,\)"),
    (dict(input=torch.zeros(4, dtype=torch.int64), offsets=torch.zeros(2)), TypeError, "offsets: expected int32 or"),
    (dict(per_sample_weights=torch.zeros(3, 3)), ValueError, r"per_sample_weights: expected shape \(3, 4\), given"),
    (dict(per_sample_weights=torch.zeros(3, 4), mode="max"), ValueError, "per_sample_weights: expected None with mode"),
    (dict(padding_idx=11), ValueError, "padding_idx: expected a row of weight, from -11 to 10, given 11"),
])
def test_embedding_bag_refuses_wrong_arguments(change, error, words):
    moved = {name: value.to(on_the_device) if isinstance(value, torch.Tensor) else value
             for name, value in change.items()}
    with pytest.raises(error, match=words):
        bt.embedding_bag(**{**dict(input=randint(11, (3, 4)), weight=randn(11, 6)), **moved})


@pytest.mark.skipif(DEVICE == "cpu" and not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_another_device_are_refused():
    elsewhere = "cuda" if DEVICE == "cpu" else "cpu"
    with pytest.raises(ValueError, match="expected an array on " + DEVICE):
        bt.embedding(torch.zeros(3, dtype=torch.int64, device=elsewhere), torch.zeros(4, 4, device=elsewhere))


# ---------------------------------------------------------------------------------------------------------------------
# losses

OPTIONS = [{}, dict(label_smoothing=0.1), dict(softcap=3.0, z_loss=0.02), dict(logit_scale=0.5, label_smoothing=0.2)]


def reference_loss(logits, target, reduction, label_smoothing=0.0, softcap=0.0, z_loss=0.0, logit_scale=1.0):
    """By torch, in the type of the logits (N, V)."""
    z = logits * logit_scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    losses = F.cross_entropy(z, target, reduction="none", label_smoothing=label_smoothing)
    used = target != -100
    losses = losses + z_loss * z.logsumexp(1)**2 * used
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.sum() / used.sum()


@every_dtype
@every_reduction
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_cross_entropy(options, reduction, dtype):
    logits, target = randn(9, 37, dtype=dtype, scale=2), randint(37, (9,))
    target[2:4] = -100
    double, = doubles(logits)
    want = reference_loss(double, target, reduction, **options)
    loss, lse = bt.cross_entropy(logits, target, reduction=reduction, return_lse=True, **options)
    assert loss.dtype == torch.float32 and close(loss, want.detach())
    assert not lse.requires_grad and lse.shape == target.shape
    factor = 0.5 if reduction != "none" else torch.rand(9, device=logits.device)
    gradient, = gradients(want, [double], factor)
    got, = gradients(loss, [logits], factor)
    assert got.dtype == dtype and close(got, gradient, dtype, 2 if dtype != torch.float32 else 8)
    memory = logits.detach().clone().requires_grad_()
    own = bt.cross_entropy(memory, target, reduction=reduction, inplace=True, **options)
    placed, = gradients(own, [memory], factor)
    assert placed.data_ptr() == memory.data_ptr() and (placed == got).all()


@every_reduction
def test_cross_entropy_with_every_row_ignored(reduction):
    logits, target = randn(4, 7), torch.full((4,), -100, device=on_the_device)
    own, other = bt.cross_entropy(logits, target, reduction=reduction), \
        F.cross_entropy(logits, target, reduction=reduction)
    assert torch.equal(own.isnan(), other.isnan()) and torch.equal(own.nan_to_num(), other.nan_to_num())
    assert (gradients(own, [logits])[0] == 0).all()


@every_reduction
def test_cross_entropy_of_other_shapes(reduction):
    for shape in ((7,), (5, 7), (2, 7, 3), (2, 7, 3, 4), (0, 7)):
        logits = randn(*shape)
        target = randint(7, shape[:max(0, min(1, len(shape) - 1))] + shape[2:])
        own, other = (f(logits, target, reduction=reduction) for f in (bt.cross_entropy, F.cross_entropy))
        assert close(own, other.detach()), shape
        assert close(gradients(own, [logits])[0], gradients(other, [logits])[0].nan_to_num()), shape
    wide = randn(7, 5)
    own, other = (f(wide.T, target[:1].new_tensor([0, 1, 2, 3, 4]), reduction=reduction)
                  for f in (bt.cross_entropy, F.cross_entropy))
    assert close(own, other.detach()) and close(gradients(own, [wide])[0], gradients(other, [wide])[0])


def test_targets_beyond_32_bits_are_bad():
    logits = randn(5, 7)
    target = torch.tensor([1, 2**32 + 1, -2**40, -100 + 2**32, -100], device=on_the_device)
    losses = bt.cross_entropy(logits, target, reduction="none")
    assert losses.isnan().tolist() == [False, True, True, True, False] and losses[4] == 0
    hidden, weight = randn(5, 4), randn(7, 4)
    losses = bt.linear_cross_entropy(hidden, weight, target, reduction="none")
    assert losses.isnan().tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("arguments, error, words", [
    (dict(weight=torch.ones(7)), NotImplementedError, "weight: bookends.torch does not support it"),
    (dict(size_average=True), NotImplementedError, "size_average"),
    (dict(reduce=True), NotImplementedError, "reduce: bookends.torch"),
    (dict(target=torch.rand(5, 7)), NotImplementedError, "target: bookends.torch does not support probabilities"),
    (dict(target=torch.zeros(4, dtype=torch.int64)), ValueError, r"target: expected shape \(5,\), given \(4,\)"),
    (dict(target=torch.zeros(5, dtype=torch.int16)), TypeError, "target: expected int32 or int64, given int16"),
    (dict(reduction="avg"), ValueError, "reduction: expected mean, sum, none, given 'avg'"),
    (dict(ignore_index=-2**31), ValueError, "ignore_index: expected an int from -2147483647"),
    (dict(input=torch.zeros(5, 7, dtype=torch.float64)), TypeError, "input: expected float32 .* given float64"),
    (dict(label_smoothing=1.5), bookends.ArgumentError, "label_smoothing 1.5"),
])
def test_cross_entropy_refuses(arguments, error, words):
    moved = {name: value.to(on_the_device) if isinstance(value, torch.Tensor) else value
             for name, value in arguments.items()}
    with pytest.raises(error, match=words):
        bt.cross_entropy(**{**dict(input=randn(5, 7), target=randint(7, (5,))), **moved})


@every_dtype
@every_reduction
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_cross_entropy(with_bias, options, reduction, dtype):
    hidden, weight = randn(3, 5, 16, dtype=dtype), randn(37, 16, dtype=dtype)
    bias = randn(37, dtype=dtype) if with_bias else None
    target = randint(37, (3, 5))
    target[1, 1:4] = -100
    H, W, b = doubles(hidden, weight, bias)
    logits = H.view(-1, 16) @ W.T + (0 if b is None else b)
    want = reference_loss(logits.to(dtype).double() if dtype != torch.float32 else logits, target.view(-1), reduction,
                          **options)
    loss, lse = bt.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, return_lse=True, **options)
    tensors = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    doubled = [tensor for tensor in (H, W, b) if tensor is not None]
    assert loss.dtype == torch.float32 and lse.shape == target.shape and not lse.requires_grad
    assert close(loss, want.detach().view(loss.shape), torch.float32, 32 if dtype == torch.float32 else 2e4)
    factor = 0.5 if reduction != "none" else torch.rand(15, device=hidden.device)
    shaped = factor if reduction != "none" else factor.view(3, 5)
    for got, other, like in zip(gradients(loss, tensors, shaped), gradients(want, doubled, factor), tensors):
        assert got.dtype == like.dtype and got.shape == like.shape and close(got, other, dtype, 16)


@every_reduction
def test_linear_cross_entropy_with_every_row_ignored(reduction):
    hidden, weight = randn(4, 6), randn(7, 6)
    target = torch.full((4,), -100, device=on_the_device)
    loss = bt.linear_cross_entropy(hidden, weight, target, reduction=reduction)
    assert loss.isnan().all() if reduction == "mean" else (loss == 0).all()
    for gradient in gradients(loss, [hidden, weight]):
        assert (gradient == 0).all()


def test_no_rows():
    hidden, weight = randn(2, 0, 6), randn(7, 6)
    loss = bt.linear_cross_entropy(hidden, weight, randint(7, (2, 0)), reduction="sum")
    dX, dW = gradients(loss, [hidden, weight])
    assert loss == 0 and dX.shape == (2, 0, 6) and (dW == 0).all()


def test_what_needs_no_gradient_is_not_computed():
    hidden, weight = randn(8, 16), randn(37, 16)
    target = randint(37, (8,))
    calls = []
    real = bookends.LmHead.run

    def run(self, *arguments, **named):
        calls.append(self.wants)
        return real(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bookends.LmHead, "run", run)
        want = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
        got, = gradients(bt.linear_cross_entropy(hidden, weight.detach(), target), [hidden])
        other, = gradients(bt.linear_cross_entropy(hidden.detach(), weight, target), [weight])
        with torch.no_grad():
            assert not bt.linear_cross_entropy(hidden, weight, target).requires_grad
        rows, = gradients(bt.linear_cross_entropy(hidden, weight.detach(), target, reduction="none"), [hidden])
    assert (got == want[0]).all() and (other == want[1]).all() and close(rows, want[0] * 8)
    found = [(wants["dX"], wants["dW"]) for wants in calls]
    assert found == [(True, True), (True, False), (False, True), (False, False), (False, False), (True, False)]


def test_types_of_weight_and_its_gradient():
    hidden, weight = randn(8, 16, dtype=torch.bfloat16), randn(37, 16)
    target = randint(37, (8,))
    dX, dW = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    assert dX.dtype == torch.bfloat16 and dW.dtype == torch.float32
    half = weight.detach().bfloat16().requires_grad_()
    for dtype in (None, torch.float32, torch.bfloat16):
        rounded, = gradients(bt.linear_cross_entropy(hidden, half, target, dW_dtype=dtype), [half])
        assert rounded.dtype == torch.bfloat16 and (rounded == dW.bfloat16()).all()
    with pytest.raises(ValueError, match="dW_dtype: expected bfloat16 or float32, given float16"):
        bt.linear_cross_entropy(hidden, half, target, dW_dtype=torch.float16)
    with pytest.raises(TypeError, match="weight: expected bfloat16 or float32, given float16"):
        bt.linear_cross_entropy(hidden, half.half(), target)
    with torch.autocast(DEVICE, torch.bfloat16):
        single = hidden.detach().float().requires_grad_()
        loss = bt.linear_cross_entropy(single, weight, target)
        cast = gradients(loss, [single, weight])
    assert cast[0].dtype == torch.float32 and (cast[0] == dX.float()).all() and (cast[1] == dW).all()


def test_num_items_in_batch():
    hidden, weight, target = randn(8, 16), randn(37, 16), randint(37, (8,))
    target[0] = -100
    want = gradients(bt.linear_cross_entropy(hidden, weight, target, reduction="sum"), [hidden, weight])
    for items in (20, torch.tensor(20, device=on_the_device), torch.tensor([20.0], device=on_the_device)):
        loss = bt.linear_cross_entropy(hidden, weight, target, num_items_in_batch=items)
        assert loss.shape == ()
        for got, other in zip(gradients(loss, [hidden, weight]), want):
            assert close(got, other / 20)
    with torch.no_grad():
        assert close(bt.linear_cross_entropy(hidden, weight, target, num_items_in_batch=20), loss.detach())
    with pytest.raises(ValueError, match="num_items_in_batch: expected None unless reduction is mean, given .* 'sum'"):
        bt.linear_cross_entropy(hidden, weight, target, reduction="sum", num_items_in_batch=20)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_main_grad(reduction):
    """In float32, added to, over two steps; weight.grad stays None."""
    hidden, weight = randn(8, 16, dtype=torch.bfloat16), randn(37, 16, dtype=torch.bfloat16)
    bias, target = randn(37, dtype=torch.bfloat16), randint(37, (8,))
    single, single_bias = weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_()
    want = gradients(bt.linear_cross_entropy(hidden, single, target, single_bias, reduction=reduction),
                     [hidden, single, single_bias], 3.0)
    with pytest.raises(ValueError, match=r"weight.main_grad: expected torch.float32 of shape \(37, 16\), .* None"):
        bt.linear_cross_entropy(hidden, weight, target, bias, main_grad=True)
    weight.main_grad = torch.ones(37, 16, device=on_the_device)
    for step in (1, 2):
        loss = bt.linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, main_grad=True)
        (loss * 3).sum().backward()
        assert weight.grad is None and close(weight.main_grad, 1 + step * want[1])
    assert close(hidden.grad, 2 * want[0], torch.bfloat16) and close(bias.grad, 2 * want[2], torch.bfloat16)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="main_grad: expected False under a compiler"):
        torch.compile(bt.linear_cross_entropy, backend="aot_eager")(hidden, weight, target, main_grad=True,
                                                                    reduction=reduction).sum().backward()


@pytest.mark.parametrize("memory", ["10%", "25%", "100%", 1 << 20])
def test_memory(memory):
    hidden, weight, target = randn(256, 16), randn(300, 16), randint(300, (256,))
    H, W = doubles(hidden, weight)
    want = gradients(F.cross_entropy(H @ W.T, target), [H, W])
    for got, other in zip(gradients(bt.linear_cross_entropy(hidden, weight, target, memory=memory), [hidden, weight]),
                          want):
        assert close(got, other)


def test_linear_cross_entropy_refuses():
    hidden, weight, target = randn(2, 4, 16), randn(37, 16), randint(37, (2, 4))
    for arguments, error, words in (
            (dict(memory="a quarter"), ValueError, "memory: expected a percentage .* given 'a quarter'"),
            (dict(memory="-5%"), ValueError, "memory: expected a percentage"),
            (dict(memory=0), ValueError, "memory: expected a percentage .* given 0"),
            (dict(memory=64, hidden=randn(4096, 16), target=randint(37, (4096,))), bookends.WorkspaceError, "64"),
            (dict(weight=randn(37, 15)), ValueError, r"weight: expected shape \(V, 16\) .* given \(37, 15\)"),
            (dict(bias=randn(36)), ValueError, r"bias: expected shape \(37,\), given \(36,\)"),
            (dict(target=target.view(-1)), ValueError, r"target: expected shape \(2, 4\), given \(8,\)"),
            (dict(hidden=hidden.double()), TypeError, "hidden: expected float32 .* given float64"),
            (dict(reduction="avg"), ValueError, "reduction")):
        with pytest.raises(error, match=words):
            bt.linear_cross_entropy(**{**dict(hidden=hidden, weight=weight, target=target), **arguments})


def test_second_derivatives_and_second_backwards_are_errors():
    hidden, weight, target = randn(8, 16), randn(37, 16), randint(37, (8,))
    with pytest.raises(NotImplementedError, match="linear_cross_entropy: expected create_graph=False"):
        torch.autograd.grad(bt.linear_cross_entropy(hidden, weight, target), hidden, create_graph=True)
    for loss, tensor in ((bt.linear_cross_entropy(hidden, weight, target, reduction="none").sum(), hidden),
                         (bt.cross_entropy(hidden, target % 16), hidden),
                         (bt.embedding(target, weight).square().sum(), weight),
                         (bt.embedding_bag(target.view(2, 4), weight).square().sum(), weight)):
        first, = torch.autograd.grad(loss, tensor, create_graph=True)
        with pytest.raises(NotImplementedError, match="has no derivative"):
            torch.autograd.grad(first.sum(), tensor)
    for loss in (bt.linear_cross_entropy(hidden, weight, target) * 2,
                 bt.cross_entropy(hidden, target % 16, inplace=True)):
        torch.autograd.grad(loss, hidden, retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, hidden)


def test_gradients_are_the_same_bits_each_time():
    hidden, weight, target = randn(64, 16), randn(37, 16), randint(37, (64,))
    first = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    again = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_plans_are_bounded():
    weight = randn(7, 4)
    for N in range(1, _ops.MAX_PLANS + 9):
        bt.linear_cross_entropy(randn(N, 4), weight, randint(7, (N,)))
    assert len(_ops.plans) == _ops.MAX_PLANS


def test_eight_threads():
    jobs = []
    for N in range(1, 9):
        hidden, weight, target = randn(N, 16), randn(37, 16), randint(37, (N,))
        jobs.append((hidden, weight, target,
                     gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])))
    failures = []

    def work(number):
        try:
            for turn in range(10):
                hidden, weight, target, want = jobs[(number * turn) % 8]
                got = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
                assert all(torch.equal(a, b) for a, b in zip(got, want))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_calls_with_changing_shapes_leak_nothing():
    def resident():
        with open("/proc/self/statm") as text:
            return int(text.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(count):
        for i in range(count):
            hidden, target = randn(1 + i % 61, 16), randint(600, (1 + i % 61,))
            bt.linear_cross_entropy(bt.embedding(target, weight), weight, target).backward()
            bt.linear_cross_entropy(hidden, weight, target, reduction="none").sum().backward()
            bt.cross_entropy(hidden, target % 16).backward()

    weight = randn(600, 16)
    calls(130)
    before = resident()
    calls(400)
    assert resident() - before < 8 << 20


# ---------------------------------------------------------------------------------------------------------------------
# torch's machinery

def operators():
    """Each operator with arguments."""
    weight, positions, ids = randn(11, 6), randn(7, 6), randint(11, (3, 4))
    logits, target = randn(12, 11), ids.view(-1)
    hidden, bias = randn(12, 6), randn(11)
    options = (-100, 0.1, 2.0, 0.01, 0.5)
    plan = (torch.float32, 0, 0.25, True)
    detached = hidden.detach(), weight.detach(), bias.detach()
    return [("scale_", (hidden.detach().clone(), torch.tensor(0.5))),
            ("embedding", (ids, weight, positions, 2)), ("embedding", (ids, weight, None, -1)),
            ("embedding_backward", (torch.ones(3, 4, 6), ids, 11, 2, 7, True, True)),
            ("embedding_bag", (ids, weight, None, torch.rand(3, 4, requires_grad=True), "mean", 2, False)),
            ("embedding_bag", (target, weight, torch.tensor([0, 4, 12]), None, "max", -1, False)),
            ("embedding_bag_backward", (torch.ones(3, 6), torch.zeros(0, dtype=torch.int64), ids, detached[1], None,
                                        torch.rand(3, 4), "mean", 2, True, True)),
            ("cross_entropy", (logits, target, False, *options)),
            ("cross_entropy_backward", (torch.ones(12), logits.detach(), target, *options)),
            ("cross_entropy_backward_", (torch.ones(12), logits.detach().clone(), target, *options)),
            ("linear_cross_entropy", (hidden, weight, bias, target, None, None, True, True, True, True, *plan,
                                      *options)),
            ("linear_cross_entropy", (hidden, weight.detach(), None, target, None, None, False, True, False, False,
                                      *plan, *options)),
            ("linear_cross_entropy_rows", (hidden, weight, bias, target, None, *plan, *options)),
            ("linear_cross_entropy_rows_backward", (torch.ones(12), *detached, target, True, True, False, *plan,
                                                    *options))]


@pytest.mark.parametrize("number", range(14))
def test_opcheck(number):
    name, arguments = operators()[number]
    arguments = [argument.detach().to(on_the_device).requires_grad_(argument.requires_grad)
                 if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    torch.library.opcheck(getattr(torch.ops.bookends, name).default, tuple(arguments))


def test_dispatch_modes_see_the_operators():
    """Which eager calls otherwise bypass."""
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), named=None):
            seen.append(str(function))
            return function(*arguments, **(named or {}))

    hidden, weight, target = randn(8, 16), randn(37, 16), randint(37, (8,))
    want = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    with Mode():
        got = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    assert {"bookends.linear_cross_entropy.default", "bookends.scale_.default"} <= set(seen)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


class Model(torch.nn.Module):
    """Embedding, one layer, and both losses, tied."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = bt.Embedding(37, 16), torch.nn.Parameter(torch.randn(8, 16))
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, ids, target):
        x = self.layer(bt.embedding(ids, self.wte.weight, self.wpe))
        x = x + self.wte(ids) + bt.embedding_bag(ids, self.wte.weight).unsqueeze(1)
        first = bt.linear_cross_entropy(x, self.wte.weight, target, softcap=5.0)
        second = bt.linear_cross_entropy(x, self.wte.weight, target, reduction="none").mean()
        return first + second + bt.cross_entropy((x @ self.wte.weight.T).transpose(1, 2), target, inplace=True)


def model_gradients(call, model, *inputs):
    model.zero_grad()
    loss = call(*inputs)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def test_compile_without_graph_breaks():
    model = Model().to(on_the_device)
    ids, target = randint(37, (2, 8)), randint(37, (2, 8))
    want = model_gradients(model, model, ids, target)
    compiled = torch.compile(model, fullgraph=True)
    got = model_gradients(compiled, model, ids, target)
    assert close(got[0], want[0]) and all(close(a, b, ulps=32) for a, b in zip(got[1], want[1]))


def test_export():
    model = Model().to(on_the_device)
    ids, target = randint(37, (2, 8)), randint(37, (2, 8))
    program = torch.export.export(model, (ids, target))
    assert close(program.module()(ids, target).detach(), model(ids, target).detach())
    called = {str(node.target) for node in program.graph.nodes if "bookends" in str(node.target)}
    assert {"bookends.embedding.default", "bookends.cross_entropy.default"} <= called


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint
    hidden, weight, target = randn(8, 16), randn(37, 16), randint(37, (8,))
    want = gradients(bt.linear_cross_entropy(hidden * 2, weight, target), [hidden, weight])
    loss = checkpoint(lambda h, w: bt.linear_cross_entropy(h * 2, w, target), hidden, weight, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(gradients(loss, [hidden, weight]), want))


def one_of_two_processes(rank, sharded, port, results):
    import torch.distributed as dist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Model()
    ids, target = torch.randint(0, 37, (2, 2, 8)), torch.randint(0, 37, (2, 2, 8))
    parts = [model_gradients(model, model, ids[i], target[i])[1] for i in range(2)]
    model.zero_grad()
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        model(ids[rank], target[rank]).backward()
        got = [parameter.grad.full_tensor() for parameter in model.parameters()]
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        wrapped(ids[rank], target[rank]).backward()
        got = [parameter.grad for parameter in model.parameters()]
    results[rank] = all(close(a, (b.double() + c.double()) / 2, ulps=32) for a, b, c in zip(got, *parts))
    dist.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu", reason="two processes of the CPU device")
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp"])
def test_two_processes(sharded):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(one_of_two_processes, (sharded, port, results), nprocs=2)
        assert dict(results) == {0: True, 1: True}


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_cuda_graph():
    hidden, weight, target = randn(64, 16, grad=False), randn(37, 16, grad=False), randint(37, (64,))
    hidden.requires_grad_(), weight.requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            want = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = gradients(bt.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
