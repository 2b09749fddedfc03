"""Embedding and losses as functions and modules of torch: arguments are checked here, operators do the work."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor

from . import _ops

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
IDS = (torch.int32, torch.int64)


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype)[len("torch."):] for dtype in dtypes)


def check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, given {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: expected {names(dtypes)}, given {names((tensor.dtype,))}")


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name}: expected a tensor on {like.device}, as the others, given one on {tensor.device}")


def unsupported(**arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{name}: bookends.torch does not support it, given {value!r}"[:200])


# ---------------------------------------------------------------------------------------------------------------------
# the embedding

def embedding(input: Tensor, weight: Tensor, positions: Optional[Tensor] = None, *, padding_idx: Optional[int] = None,
              max_norm: Optional[float] = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
              sparse: bool = False) -> Tensor:
    """Token embedding, plus position embedding if `positions` is given: weight[input] + positions[:T].

    input: int32 or int64 ids of any shape; with positions (..., T). weight: (V, C), float32, float16 or bfloat16.
    positions: (T or more, C) of the same type. Returns (*input.shape, C). The row of an id outside 0..V-1 becomes NaN,
    and it has no part in a gradient. padding_idx: a row of weight whose gradient is 0. Gradients are the same bits each
    time. sparse: weight's gradient is a coalesced sparse tensor; its size waits for the device, so that it is not for
    torch.compile. max_norm, scale_grad_by_freq, and sparse with positions raise NotImplementedError; norm_type belongs
    to max_norm."""
    unsupported(max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)
    if sparse and positions is not None:
        raise NotImplementedError("sparse: bookends.torch does not support it with positions")
    check_dtype("input", input, IDS)
    check_dtype("weight", weight, FLOATS)
    check_device("weight", weight, input)
    if weight.dim() != 2:
        raise ValueError(f"weight: expected shape (V, C), given {tuple(weight.shape)}")
    V, C = weight.shape
    padding = -1
    if padding_idx is not None:
        if not -V <= padding_idx < V:
            raise ValueError(f"padding_idx: expected a row of weight, from {-V} to {V - 1}, given {padding_idx}")
        padding = padding_idx % V
    if positions is not None:
        check_dtype("positions", positions, (weight.dtype,))
        check_device("positions", positions, input)
        if input.dim() == 0:
            raise ValueError("input: expected shape (..., T) with positions, given ()")
        T = input.shape[-1]
        if positions.dim() != 2 or positions.shape[0] < T or positions.shape[1] != C:
            raise ValueError(f"positions: expected shape ({T} or more, {C}), given {tuple(positions.shape)}")
    if sparse:
        rows = _ops.call_embedding_bag(input.reshape(-1, 1), weight, None, None, "sum", padding, True)[0]
        return rows.view(*input.shape, C)
    return _ops.call_embedding(input, weight, positions, padding)


class Embedding(torch.nn.Embedding):
    """torch.nn.Embedding with embedding() in place of torch's function. Arguments that are not supported (max_norm,
    scale_grad_by_freq) raise NotImplementedError."""

    def __init__(self, num_embeddings: int, embedding_dim: int, padding_idx: Optional[int] = None,
                 max_norm: Optional[float] = None, norm_type: float = 2.0, scale_grad_by_freq: bool = False,
                 sparse: bool = False, **others: Any) -> None:
        unsupported(max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse=sparse, **others)

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight, padding_idx=self.padding_idx, max_norm=self.max_norm,
                         scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse)


def embedding_bag(input: Tensor, weight: Tensor, offsets: Optional[Tensor] = None, max_norm: Optional[float] = None,
                  norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
                  per_sample_weights: Optional[Tensor] = None, include_last_offset: bool = False,
                  padding_idx: Optional[int] = None) -> Tensor:
    """torch.nn.functional.embedding_bag: the sum, mean or maximum of the rows of each bag.

    input: (bags, hotness), or (count) with offsets, int32 or int64. weight: (V, C), float32, float16 or bfloat16.
    offsets: (bags) int32 or int64, where each bag begins; with include_last_offset (bags + 1), the last one where the
    last bag ends. per_sample_weights: a factor of each id, of the shape of input, for "sum" and "mean". padding_idx: an
    id that bags skip. Returns (bags, C). A bag with an id outside 0..V-1 becomes NaN, and the id has no part in a
    gradient; an empty bag is 0. sparse: as for embedding(). max_norm and scale_grad_by_freq raise
    NotImplementedError."""
    unsupported(max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)
    check_dtype("input", input, IDS)
    check_dtype("weight", weight, FLOATS)
    check_device("weight", weight, input)
    if mode not in ("sum", "mean", "max"):
        raise ValueError(f"mode: expected sum, mean or max, given {mode!r}")
    if input.dim() != (2 if offsets is None else 1):
        wanted = "(bags, hotness) without offsets" if offsets is None else "(count) with offsets"
        raise ValueError(f"input: expected shape {wanted}, given {tuple(input.shape)}")
    if weight.dim() != 2:
        raise ValueError(f"weight: expected shape (V, C), given {tuple(weight.shape)}")
    V = weight.shape[0]
    if padding_idx is not None and not -V <= padding_idx < V:
        raise ValueError(f"padding_idx: expected a row of weight, from {-V} to {V - 1}, given {padding_idx}")
    padding = -1 if padding_idx is None else padding_idx % V
    if offsets is not None:
        offsets = ends_of_bags(offsets, input, include_last_offset)
    elif include_last_offset:
        raise ValueError("include_last_offset: expected False without offsets, given True")
    factors = None
    if per_sample_weights is not None:
        check_dtype("per_sample_weights", per_sample_weights, FLOATS)
        check_device("per_sample_weights", per_sample_weights, input)
        if mode == "max":
            raise ValueError("per_sample_weights: expected None with mode max, given a tensor")
        if per_sample_weights.shape != input.shape:
            raise ValueError(f"per_sample_weights: expected shape {tuple(input.shape)}, given "
                             f"{tuple(per_sample_weights.shape)}")
        factors = per_sample_weights.float()
    return _ops.call_embedding_bag(input, weight, offsets, factors, mode, padding, sparse)[0]


def ends_of_bags(offsets: Tensor, input: Tensor, include_last_offset: bool) -> Tensor:
    """The offsets with the end of the last bag."""
    check_dtype("offsets", offsets, IDS)
    check_device("offsets", offsets, input)
    if offsets.dim() != 1 or (include_last_offset and offsets.shape[0] == 0):
        raise ValueError(f"offsets: expected shape (bags{' + 1' if include_last_offset else ''}), given "
                         f"{tuple(offsets.shape)}")
    return offsets if include_last_offset else torch.cat([offsets, offsets.new_full((1,), input.shape[0])])


class EmbeddingBag(torch.nn.EmbeddingBag):
    """torch.nn.EmbeddingBag with embedding_bag() in place of torch's function. Arguments that are not supported
    (max_norm, scale_grad_by_freq) raise NotImplementedError."""

    def __init__(self, num_embeddings: int, embedding_dim: int, max_norm: Optional[float] = None,
                 norm_type: float = 2.0, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
                 **others: Any) -> None:
        unsupported(max_norm=max_norm, scale_grad_by_freq=scale_grad_by_freq)
        super().__init__(num_embeddings, embedding_dim, mode=mode, sparse=sparse, **others)

    def forward(self, input: Tensor, offsets: Optional[Tensor] = None,
                per_sample_weights: Optional[Tensor] = None) -> Tensor:
        return embedding_bag(input, self.weight, offsets, self.max_norm, self.norm_type, self.scale_grad_by_freq,
                             self.mode, self.sparse, per_sample_weights, self.include_last_offset, self.padding_idx)


# ---------------------------------------------------------------------------------------------------------------------
# losses

REDUCTIONS = ("mean", "sum", "none")


def check_reduction(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected {', '.join(REDUCTIONS)}, given {reduction!r}")


def check_target(target: Tensor, like: Tensor, shape: tuple[int, ...], ignore_index: int) -> None:
    if isinstance(target, Tensor) and target.is_floating_point():
        raise NotImplementedError("target: bookends.torch does not support probabilities, only int32 or int64 classes")
    check_dtype("target", target, IDS)
    check_device("target", target, like)
    if tuple(target.shape) != tuple(shape):
        raise ValueError(f"target: expected shape {tuple(shape)}, given {tuple(target.shape)}")
    if not _ops.INT32_MIN < ignore_index < _ops.INT32_MAX:
        raise ValueError(f"ignore_index: expected an int from {_ops.INT32_MIN + 1} to {_ops.INT32_MAX - 1}, given "
                         f"{ignore_index}")


def reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str,
            items: Union[Tensor, int, None]) -> Tensor:
    """The losses of rows by their reduction; items: the divisor of the mean, None: the rows that are not ignored."""
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / ((target != ignore_index).sum() if items is None else items)


def cross_entropy(input: Tensor, target: Tensor, weight: Optional[Tensor] = None, size_average: Optional[bool] = None,
                  ignore_index: int = -100, reduce: Optional[bool] = None, reduction: str = "mean",
                  label_smoothing: float = 0.0, *, z_loss: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
                  return_lse: bool = False, inplace: bool = False) -> Any:
    """torch.nn.functional.cross_entropy, with float32 losses for every type of logits.

    input: (C), (N, C) or (N, C, d1, ...) logits, float32, float16 or bfloat16; other layouts than contiguous (N, C) are
    copied. target: class indices, () or (N) or (N, d1, ...), int32 or int64. A target outside 0..C-1 that is not
    ignore_index makes the loss and the row's gradient NaN. Logits x become softcap * tanh(logit_scale * x / softcap)
    (no softcap where it is 0); z_loss adds z_loss * lse^2 to each loss. return_lse: returns (loss, lse); lse has the
    shape of target and no gradient. inplace: backward writes the gradient over the logits, whose values are lost. The
    gradient is computed in backward from the logits. weight (of classes), size_average, reduce and probabilities as
    targets raise NotImplementedError."""
    unsupported(weight=weight, size_average=size_average, reduce=reduce)
    check_reduction(reduction)
    check_dtype("input", input, FLOATS)
    if input.dim() == 0:
        raise ValueError("input: expected shape (C), (N, C) or (N, C, d1, ...), given ()")
    dim = min(1, input.dim() - 1)
    check_target(target, input, (*input.shape[:dim], *input.shape[dim + 1:]), ignore_index)
    logits = input if dim == 1 and input.dim() == 2 else input.movedim(dim, -1).reshape(-1, input.shape[dim])
    losses, lse = _ops.call_cross_entropy(logits, target.reshape(-1), inplace, ignore_index, label_smoothing, softcap,
                                           z_loss, logit_scale)
    loss = reduced(losses, target, ignore_index, reduction, None)
    return (loss, lse.detach().view(target.shape)) if return_lse else loss


def parse_memory(memory: Union[str, int]) -> tuple[int, float]:
    """(bytes, 0) or (0, share) of "25%" or a number of bytes."""
    if isinstance(memory, str) and memory.endswith("%"):
        try:
            share = float(memory[:-1]) / 100
        except ValueError:
            share = 0.0
        if 0 < share < float("inf"):
            return 0, share
    elif isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory, 0.0
    raise ValueError("memory: expected a percentage of the logits such as '25%', or a number of bytes, given "
                     f"{memory!r}")


def compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """The type of the products: autocast's, or hidden's."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor, bias: Optional[Tensor] = None, *,
                         reduction: str = "mean", ignore_index: int = -100, label_smoothing: float = 0.0,
                         softcap: float = 0.0, z_loss: float = 0.0, logit_scale: float = 1.0,
                         memory: Union[str, int] = "25%", return_lse: bool = False,
                         dW_dtype: Optional[torch.dtype] = None, tune: bool = True, main_grad: bool = False,
                         num_items_in_batch: Union[Tensor, int, None] = None) -> Any:
    """Cross-entropy of hidden @ weight.T (+ bias), without holding the logits whole.

    hidden: (..., C). weight: (V, C). bias: (V). All of one type, float32, float16 or bfloat16, or weight and bias
    float32 and hidden 16-bit; under autocast of autocast's type. target: hidden.shape[:-1], int32 or int64. Returns a
    float32 loss; with return_lse (loss, lse), lse without a gradient.

    reduction "mean" divides by the number of targets that are not ignored, or by num_items_in_batch. For "mean" and
    "sum" the gradients are formed in the forward pass, and backward multiplies them by the loss's gradient, in place: a
    second backward through the same graph is an error. "none" computes everything again in backward. What needs no
    gradient costs nothing. dW_dtype: the type of the sums of weight's and bias's gradients when they are returned: the
    compute type or float32 (None: weight's type); autograd converts it to the type of weight.
    main_grad: backward adds weight's gradient, in float32, to weight.main_grad (float32, of weight's shape), and
    weight.grad stays as it is; not under torch.compile.

    memory: scratch, as a percentage of the logits or in bytes. Plans are kept for the last 32 shapes; on a GPU the
    first call of a shape tunes the matrix products unless tune is False. cross_entropy() explains the other
    arguments."""
    check_reduction(reduction)
    check_dtype("hidden", hidden, FLOATS)
    dtype = compute_dtype(hidden, weight)
    if dtype not in FLOATS:
        raise TypeError(f"hidden: expected autocast to {names(FLOATS)}, given {names((dtype,))}")
    allowed = FLOATS if torch.is_autocast_enabled(hidden.device.type) else tuple({dtype: 0, torch.float32: 0})
    check_dtype("weight", weight, allowed)
    check_device("weight", weight, hidden)
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight: expected shape (V, {hidden.shape[-1] if hidden.dim() else 'C'}) for hidden of shape "
                         f"{tuple(hidden.shape)}, given {tuple(weight.shape)}")
    if bias is not None:
        check_dtype("bias", bias, (weight.dtype,))
        check_device("bias", bias, hidden)
        if tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(f"bias: expected shape ({weight.shape[0]},), given {tuple(bias.shape)}")
    check_target(target, hidden, hidden.shape[:-1], ignore_index)
    if num_items_in_batch is not None and reduction != "mean":
        raise ValueError(f"num_items_in_batch: expected None unless reduction is mean, given reduction {reduction!r}")
    grad_dtype = weight.dtype if dW_dtype is None and weight.dtype in (dtype, torch.float32) else dW_dtype or dtype
    if grad_dtype not in (dtype, torch.float32):
        raise ValueError(f"dW_dtype: expected {names((dtype, torch.float32))}, given {names((grad_dtype,))}")
    into = None
    if main_grad:
        into = getattr(weight, "main_grad", None)
        if not isinstance(into, Tensor) or into.dtype != torch.float32 or into.shape != weight.shape:
            given = f"{into.dtype} of shape {tuple(into.shape)}" if isinstance(into, Tensor) else repr(into)
            raise ValueError(f"weight.main_grad: expected torch.float32 of shape {tuple(weight.shape)}, since "
                             f"main_grad is True, given {given}")
        grad_dtype = torch.float32
    bytes_, share = parse_memory(memory)
    options = (ignore_index, label_smoothing, softcap, z_loss, logit_scale)
    rows = hidden.to(dtype).reshape(-1, hidden.shape[-1])
    labels = target.reshape(-1)
    wants = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in (rows, weight, bias)]
    if reduction == "none" or not any(wants):
        losses, lse = _ops.call_head_rows(rows, weight, bias, labels, into, grad_dtype, bytes_, share, tune, *options)
        loss = reduced(losses, target, ignore_index, reduction, num_items_in_batch)
    else:
        divisor = num_items_in_batch
        if divisor is not None:
            divisor = torch.as_tensor(divisor, dtype=torch.float32, device=hidden.device).reshape(1)
        loss, lse, *_ = _ops.call_head_total(
            rows, weight, bias, labels, divisor, into, reduction == "mean", *wants, grad_dtype, bytes_, share, tune,
            *options)
    return (loss, lse.detach().view(target.shape)) if return_lse else loss
