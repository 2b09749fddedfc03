"""The operators of torch.ops.bookends: the C library behind torch.library, with fake implementations and autograd.

Operators take what they need already checked by the functions in _functional.py, except for what the core checks. Ids
and targets may be int64; they are converted to int32 so that a value beyond 32 bits stays out of range.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from typing import Any, Callable, Optional

import torch
from torch import Tensor

import bookends

INT32_MIN, INT32_MAX = -2**31, 2**31 - 1


def is_traced(tensor: Tensor) -> bool:
    """Whether a compiler traces the call: nothing may be written in place, and no value is known."""
    return type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter


def is_dispatched(arguments: tuple[Any, ...]) -> bool:
    """Whether a call must go through torch's dispatcher: under a compiler, a dispatch mode or a function transform, or
    with a tensor subclass."""
    return (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or any(isinstance(argument, Tensor) and is_traced(argument) for argument in arguments))


def operator(schema: str, real: Callable[..., Any], fake: Callable[..., Any],
             context: Optional[Callable[..., None]] = None,
             gradient: Optional[Callable[..., Any]] = None) -> Callable[..., Any]:
    """Defines torch.ops.bookends.NAME by its schema, and returns a function that calls it.

    The function calls `real` directly unless is_dispatched(), through an autograd.Function if a gradient is wanted: the
    dispatcher's Python code takes several times as long. Without `gradient`, a derivative is an error."""
    name = schema.split("(")[0]
    torch.library.define("bookends::" + name, schema[schema.index("("):])
    torch.library.impl("bookends::" + name, "default", real)
    torch.library.register_fake("bookends::" + name, fake)

    def no_derivative(ctx: Any, *gradients: Any) -> None:
        raise NotImplementedError(f"bookends::{name} has no derivative: bookends.torch has first derivatives only")

    backward = gradient or no_derivative
    if "(a!)" not in schema:
        torch.library.register_autograd("bookends::" + name, backward, setup_context=context)
    dispatched = getattr(torch.ops.bookends, name).default

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = real(*arguments)
            if context is not None:
                context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    def call(*arguments: Any) -> Any:
        if is_dispatched(arguments):
            return dispatched(*arguments)
        if torch.is_grad_enabled() and any(isinstance(argument, Tensor) and argument.requires_grad
                                           for argument in arguments):
            return Eager.apply(*arguments)
        return real(*arguments)

    return call


def to_int32(ids: Tensor) -> Tensor:
    """Ids or targets as contiguous int32. Values that int32 does not have become its lowest or largest."""
    if ids.dtype == torch.int64:
        ids = ids.clamp(INT32_MIN, INT32_MAX).to(torch.int32)
    return ids.contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# the embedding

def embedding(ids: Tensor, weight: Tensor, positions: Optional[Tensor], padding_idx: int) -> Tensor:
    if positions is None:
        rows = weight if weight.stride(1) == 1 and weight.stride(0) >= weight.shape[1] else weight.contiguous()
        return bookends.embedding_lookup(ids.contiguous(), rows)
    T = ids.shape[-1]
    if ids.numel() == 0:
        return weight.new_empty((*ids.shape, weight.shape[1]))
    out = bookends.encoder_forward(to_int32(ids).view(-1, T), weight.contiguous(), positions[:T].contiguous())
    return out.view(*ids.shape, weight.shape[1])


def embedding_fake(ids: Tensor, weight: Tensor, positions: Optional[Tensor], padding_idx: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def embedding_backward(dout: Tensor, ids: Tensor, V: int, padding_idx: int, rows: int, tokens: bool,
                       positions: bool) -> tuple[Tensor, Tensor]:
    """The gradients of weight (V, C) and of positions (rows, C), rows from ids.shape[-1] on; empty if not wanted."""
    C = dout.shape[-1]
    T = ids.shape[-1] if rows > 0 else ids.numel()
    ids = to_int32(ids)
    if padding_idx >= 0 and not positions:
        ids = ids.masked_fill(ids == padding_idx, -1)
    dwte = dout.new_empty((V, C)) if tokens else None
    dwpe = dout.new_zeros((rows, C)) if positions else None
    if ids.numel() > 0:
        bookends.encoder_backward(dout.contiguous().view(-1, T, C), ids.view(-1, T), dwte,
                                  None if dwpe is None else dwpe[:T], V=V, overwrite=True)
    elif dwte is not None:
        dwte.zero_()
    if dwte is not None and padding_idx >= 0 and positions:
        dwte[padding_idx].zero_()
    empty = dout.new_empty((0,))
    return empty if dwte is None else dwte, torch.empty_like(empty) if dwpe is None else dwpe


def embedding_backward_fake(dout: Tensor, ids: Tensor, V: int, padding_idx: int, rows: int, tokens: bool,
                            positions: bool) -> tuple[Tensor, Tensor]:
    C = dout.shape[-1]
    return dout.new_empty((V, C) if tokens else (0,)), dout.new_empty((rows, C) if positions else (0,))


def embedding_context(ctx: Any, inputs: Any, output: Any) -> None:
    ids, weight, positions, ctx.padding_idx = inputs
    ctx.save_for_backward(ids)
    ctx.V, ctx.rows = weight.shape[0], 0 if positions is None else positions.shape[0]


def embedding_gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    ids, = ctx.saved_tensors
    _, tokens, positions, _ = ctx.needs_input_grad
    dwte, dwpe = call_embedding_backward(dout, ids, ctx.V, ctx.padding_idx, ctx.rows, tokens, positions)
    return None, dwte if tokens else None, dwpe if positions else None, None


call_embedding = operator(
    "embedding(Tensor ids, Tensor weight, Tensor? positions, int padding_idx) -> Tensor",
    embedding, embedding_fake, embedding_context, embedding_gradient)
call_embedding_backward = operator(
    "embedding_backward(Tensor dout, Tensor ids, SymInt V, int padding_idx, SymInt rows, bool tokens, bool positions) "
    "-> (Tensor, Tensor)", embedding_backward, embedding_backward_fake)


# ---------------------------------------------------------------------------------------------------------------------
# bags

BAGS_SCHEMA = "Tensor? offsets, Tensor? factors, str mode, int padding_idx"


def bag_options(offsets: Optional[Tensor], factors: Optional[Tensor], mode: str, padding_idx: int) -> dict[str, Any]:
    """The arguments of the core's functions."""
    return dict(offsets=None if offsets is None else offsets.contiguous(), mode=mode,
                weights=None if factors is None else factors.contiguous(),
                padding_idx=None if padding_idx < 0 else padding_idx)


def embedding_bag(ids: Tensor, weight: Tensor, offsets: Optional[Tensor], factors: Optional[Tensor], mode: str,
                  padding_idx: int, sparse: bool) -> tuple[Tensor, Tensor]:
    """The bags, and with mode "max" the positions of the maxima, else nothing."""
    rows = weight if weight.stride(1) == 1 and weight.stride(0) >= weight.shape[1] else weight.contiguous()
    made = bookends.embedding_bag(ids.contiguous(), rows, argmax=mode == "max",
                                  **bag_options(offsets, factors, mode, padding_idx))
    return made if mode == "max" else (made, ids.new_empty((0,), dtype=torch.int64))


def embedding_bag_fake(ids: Tensor, weight: Tensor, offsets: Optional[Tensor], factors: Optional[Tensor], mode: str,
                       padding_idx: int, sparse: bool) -> tuple[Tensor, Tensor]:
    bags = ids.shape[0] if offsets is None else offsets.shape[0] - 1
    out = weight.new_empty((bags, weight.shape[1]))
    return out, ids.new_empty(out.shape if mode == "max" else (0,), dtype=torch.int64)


def embedding_bag_backward(dout: Tensor, argmax: Tensor, ids: Tensor, weight: Tensor, offsets: Optional[Tensor],
                           factors: Optional[Tensor], mode: str, padding_idx: int, table: bool,
                           weights: bool) -> tuple[Tensor, Tensor]:
    """The gradients of weight and of factors; empty if not wanted."""
    made = bookends.embedding_bag_backward(
        dout.contiguous(), ids.contiguous(), dtable=torch.empty_like(weight, memory_format=torch.contiguous_format)
        if table else None, rows=weight.shape[0], dweights=weights, table=weight.contiguous() if weights else None,
        argmax=argmax if mode == "max" else None, overwrite=True, **bag_options(offsets, factors, mode, padding_idx))
    return (made.dtable if table else dout.new_empty((0,)),
            made.dweights if weights else dout.new_empty((0,), dtype=torch.float32))


def embedding_bag_backward_fake(dout: Tensor, argmax: Tensor, ids: Tensor, weight: Tensor, offsets: Optional[Tensor],
                                factors: Optional[Tensor], mode: str, padding_idx: int, table: bool,
                                weights: bool) -> tuple[Tensor, Tensor]:
    return (weight.new_empty(weight.shape if table else (0,)),
            dout.new_empty(ids.shape if weights else (0,), dtype=torch.float32))


def embedding_bag_context(ctx: Any, inputs: Any, output: Any) -> None:
    ids, weight, offsets, factors, ctx.mode, ctx.padding_idx, ctx.sparse = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], ids, weight, offsets, factors)


def embedding_bag_gradient(ctx: Any, dout: Optional[Tensor], of_argmax: Optional[Tensor]) -> tuple[Any, ...]:
    if dout is None:
        return (None,) * 7
    argmax, ids, weight, offsets, factors = ctx.saved_tensors
    table, weights = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
    if ctx.sparse and table:
        if is_traced(dout):
            raise NotImplementedError("sparse: expected False under a compiler: the gradient's size depends on the ids")
        if torch.is_grad_enabled():
            raise NotImplementedError("sparse: expected False where a second derivative is wanted (create_graph=True)")
        made = bookends.embedding_bag_backward(
            dout.contiguous(), ids.contiguous(), dtable=True, sparse=True, rows=weight.shape[0], dweights=weights,
            table=weight.contiguous() if weights else None, argmax=argmax if ctx.mode == "max" else None,
            **bag_options(offsets, factors, ctx.mode, ctx.padding_idx))
        count = int(made.distinct)
        dtable = torch.ops.aten._sparse_coo_tensor_unsafe(made.indices[:count].unsqueeze(0), made.dtable[:count],
                                                          weight.shape, is_coalesced=True)
        return None, dtable, None, made.dweights, None, None, None
    dtable, dweights = call_embedding_bag_backward(dout, argmax, ids, weight, offsets, factors, ctx.mode,
                                                   ctx.padding_idx, table, weights)
    return None, dtable if table else None, None, dweights if weights else None, None, None, None


call_embedding_bag = operator(
    f"embedding_bag(Tensor ids, Tensor weight, {BAGS_SCHEMA}, bool sparse) -> (Tensor, Tensor)",
    embedding_bag, embedding_bag_fake, embedding_bag_context, embedding_bag_gradient)
call_embedding_bag_backward = operator(
    f"embedding_bag_backward(Tensor dout, Tensor argmax, Tensor ids, Tensor weight, {BAGS_SCHEMA}, bool table, "
    "bool weights) -> (Tensor, Tensor)", embedding_bag_backward, embedding_bag_backward_fake)


# ---------------------------------------------------------------------------------------------------------------------
# cross-entropy of logits. The options are those of bk_classifier_options, in one order everywhere.

OPTIONS = ("ignore_index", "label_smoothing", "softcap", "z_loss", "logit_scale")
OPTIONS_SCHEMA = "int ignore_index, float label_smoothing, float softcap, float z_loss, float logit_scale"


def cross_entropy(logits: Tensor, target: Tensor, inplace: bool, *options: Any) -> tuple[Tensor, Tensor]:
    """Each row's loss and lse. inplace: the gradient will be written over the logits, in backward."""
    result = bookends.classifier_fused(logits.contiguous(), to_int32(target), lse=True, **dict(zip(OPTIONS, options)))
    return result.losses, result.lse


def cross_entropy_fake(logits: Tensor, target: Tensor, inplace: bool, *options: Any) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(logits.shape[:1], dtype=torch.float32)
    return losses, torch.empty_like(losses)


def cross_entropy_backward(dlosses: Tensor, logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    return bookends.classifier_fused(logits.contiguous(), to_int32(target), losses=None, dlogits=True,
                                     dlosses=dlosses.contiguous(), **dict(zip(OPTIONS, options))).dlogits


def cross_entropy_backward_fake(dlosses: Tensor, logits: Tensor, target: Tensor, *options: Any) -> Tensor:
    return logits.new_empty(logits.shape)


def cross_entropy_backward_(dlosses: Tensor, logits: Tensor, target: Tensor, *options: Any) -> None:
    bookends.classifier_fused(logits, to_int32(target), losses=None, dlogits=logits, dlosses=dlosses.contiguous(),
                              **dict(zip(OPTIONS, options)))


def cross_entropy_context(ctx: Any, inputs: Any, output: Any) -> None:
    logits, target, ctx.inplace, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target)


def cross_entropy_gradient(ctx: Any, dlosses: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Any, ...]:
    none = [None] * (2 + len(OPTIONS))
    if dlosses is None:
        return (None, *none)
    logits, target = ctx.saved_tensors
    if not ctx.inplace or is_traced(logits) or not logits.is_contiguous():
        return (call_cross_entropy_backward(dlosses, logits, target, *ctx.options), *none)
    if torch.is_grad_enabled():
        raise NotImplementedError("inplace: expected False where a second derivative is wanted (create_graph=True)")
    call_cross_entropy_backward_(dlosses, logits, target, *ctx.options)
    torch.autograd.graph.increment_version(logits)  # so that a second backward is an error
    return (logits.detach(), *none)


call_cross_entropy = operator(
    f"cross_entropy(Tensor logits, Tensor target, bool inplace, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    cross_entropy, cross_entropy_fake, cross_entropy_context, cross_entropy_gradient)
call_cross_entropy_backward = operator(
    f"cross_entropy_backward(Tensor dlosses, Tensor logits, Tensor target, {OPTIONS_SCHEMA}) -> Tensor",
    cross_entropy_backward, cross_entropy_backward_fake)
call_cross_entropy_backward_ = operator(
    f"cross_entropy_backward_(Tensor dlosses, Tensor(a!) logits, Tensor target, {OPTIONS_SCHEMA}) -> ()",
    cross_entropy_backward_, lambda *arguments: None)


# ---------------------------------------------------------------------------------------------------------------------
# the LM head

MAX_PLANS = 32
plans: collections.OrderedDict[tuple[Any, ...], bookends.LmHead] = collections.OrderedDict()
plans_lock = threading.Lock()


def plan_for(hidden: Tensor, V: int, grad_dtype: torch.dtype, wants: dict[str, bool], memory: int, share: float,
             tune: bool, options: dict[str, Any]) -> tuple[bookends.LmHead, bool]:
    """The plan of a shape, and whether it must be tuned first. The MAX_PLANS last used are kept. Each stream of a GPU
    has plans of its own, since two runs of a plan must not overlap."""
    N, C = hidden.shape
    stream = torch.cuda.current_stream(hidden.device).cuda_stream if hidden.is_cuda else 0
    tuned = tune and hidden.is_cuda
    key = (N, C, V, hidden.dtype, grad_dtype, *wants.values(), memory, share, tuned, options["softcap"] != 0,
           options["logit_scale"] < 0, hidden.device, stream)
    with plans_lock:
        plan = plans.pop(key, None)
        made = plan is None
        if plan is None:
            if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("linear_cross_entropy: a CUDA graph cannot capture the first call of a shape: call "
                                   "it once before the capture, on the stream of the capture")
            with torch.cuda.device(hidden.device) if hidden.is_cuda else contextlib.nullcontext():
                plan = bookends.LmHead(N, C, V, dtype=hidden.dtype, grad_dtype=grad_dtype, memory=memory, share=share,
                                       softcap=options["softcap"], logit_scale=options["logit_scale"], **wants)
        plans[key] = plan
        while len(plans) > MAX_PLANS:
            plans.popitem(last=False)
    return plan, made and tuned


def head_options(options: Any) -> dict[str, Any]:
    return dict(zip(OPTIONS, options))


def run_head(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, dlosses: Optional[Tensor],
             divisor: Optional[Tensor], dX: bool, dW: bool, dbias: bool, grad_dtype: torch.dtype, memory: int,
             share: float, tune: bool, options: Any) -> bookends.HeadResult:
    """Runs the plan of the shape, which is made, and on a GPU tuned, if it is new."""
    hidden = hidden.contiguous()
    weight = weight.to(hidden.dtype).contiguous()
    bias = None if bias is None else bias.to(hidden.dtype).contiguous()
    of_run = head_options(options)
    wants = dict(dX=dX, dW=dW, dbias=dbias, bias=bias is not None)
    plan, is_new = plan_for(hidden, weight.shape[0], grad_dtype, wants, memory, share, tune, of_run)
    if is_new:
        plan.tune(hidden, weight, bias)
    return plan.run(hidden, weight, to_int32(target), bias, lse=True, dlosses=dlosses, divisor=divisor, **of_run)


PLAN_SCHEMA = "ScalarType grad_dtype, int memory, float share, bool tune"


def gradients(result: bookends.HeadResult, hidden: Tensor, grad_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dW and dbias of a result; empty where there is none."""
    made = [hidden.new_empty((0,), dtype=dtype) if gradient is None else gradient
            for gradient, dtype in ((result.dX, hidden.dtype), (result.dW, grad_dtype), (result.dbias, grad_dtype))]
    return made[0], made[1], made[2]


def gradients_fake(hidden: Tensor, weight: Tensor, dX: bool, dW: bool, dbias: bool,
                   grad_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (hidden.new_empty(hidden.shape if dX else (0,)),
            hidden.new_empty(weight.shape if dW else (0,), dtype=grad_dtype),
            hidden.new_empty(weight.shape[:1] if dbias else (0,), dtype=grad_dtype))


def accumulate(main_grad: Optional[Tensor], dW: Tensor) -> Optional[Tensor]:
    """The gradient of weight that autograd is to have: dW, or nothing if dW is added to main_grad."""
    if main_grad is None:
        return dW
    main_grad.add_(dW)
    return None


def head_total(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, divisor: Optional[Tensor],
               main_grad: Optional[Tensor], mean: bool, dX: bool, dW: bool, dbias: bool, grad_dtype: torch.dtype,
               memory: int, share: float, tune: bool, *options: Any) -> tuple[Tensor, ...]:
    """The sum of the losses, or with `mean` the sum over `divisor` (None: the number of rows that are not ignored);
    each
    row's lse; and the gradients of that. backward adds dW to main_grad, if there is one."""
    target = to_int32(target)
    if mean and divisor is None:
        divisor = bookends.classifier_totals(target, rows=True, ignore_index=options[0])[0]
    result = run_head(hidden, weight, bias, target, None, divisor, dX, dW, dbias, grad_dtype, memory, share, tune,
                      options)
    total = result.losses.sum()
    if divisor is not None:
        total = total / divisor.view(())
    return (total, result.lse, *gradients(result, hidden, grad_dtype))


def head_total_fake(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, divisor: Optional[Tensor],
                    main_grad: Optional[Tensor], mean: bool, dX: bool, dW: bool, dbias: bool, grad_dtype: torch.dtype,
                    memory: int, share: float, tune: bool, *options: Any) -> tuple[Tensor, ...]:
    total = hidden.new_empty((), dtype=torch.float32)
    return (total, hidden.new_empty(hidden.shape[:1], dtype=torch.float32),
            *gradients_fake(hidden, weight, dX, dW, dbias, grad_dtype))


def scale_(x: Tensor, factor: Tensor) -> None:
    """x *= factor; the kernel returns at once where the factor is 1."""
    bookends.scale(x, factor)


def head_total_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.main_grad, ctx.wants = inputs[5], inputs[7:10]
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[:3]]
    ctx.count = len(inputs)
    ctx.save_for_backward(*[gradient for gradient, wanted in zip(output[2:], ctx.wants) if wanted])


def head_total_gradient(ctx: Any, dtotal: Optional[Tensor], *others: Any) -> tuple[Any, ...]:
    """The gradients that the forward pass formed, times that of the total. In eager mode they are multiplied in
    place."""
    result: list[Any] = [None] * ctx.count
    if dtotal is None:
        return tuple(result)
    if torch.is_grad_enabled():
        raise NotImplementedError("linear_cross_entropy: expected create_graph=False: it has first derivatives only")
    saved = iter(ctx.saved_tensors)
    for i, wanted in enumerate(ctx.wants):
        if not wanted:
            continue
        gradient = next(saved)
        if is_traced(gradient):
            if ctx.main_grad is not None:
                raise NotImplementedError("main_grad: expected False under a compiler, given True")
            result[i] = (gradient * dtotal.to(gradient.dtype)).to(ctx.dtypes[i])
            continue
        call_scale_(gradient, dtotal)
        torch.autograd.graph.increment_version(gradient)  # so that a second backward is an error
        result[i] = gradient.detach().to(ctx.dtypes[i] if i != 1 or ctx.main_grad is None else torch.float32)
    if ctx.wants[1]:
        result[1] = accumulate(ctx.main_grad, result[1])
    return tuple(result)


call_scale_ = operator("scale_(Tensor(a!) x, Tensor factor) -> ()", scale_, lambda x, factor: None)
call_head_total = operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? divisor, "
    f"Tensor? main_grad, bool mean, bool dX, bool dW, bool dbias, {PLAN_SCHEMA}, {OPTIONS_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    head_total, head_total_fake, head_total_context, head_total_gradient)


def head_rows(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, main_grad: Optional[Tensor],
              grad_dtype: torch.dtype, memory: int, share: float, tune: bool, *options: Any) -> tuple[Tensor, Tensor]:
    """Each row's loss and lse. backward adds dW to main_grad, if there is one."""
    result = run_head(hidden, weight, bias, target, None, None, False, False, False, grad_dtype, memory, share, tune,
                      options)
    return result.losses, result.lse


def head_rows_fake(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor, main_grad: Optional[Tensor],
                   grad_dtype: torch.dtype, memory: int, share: float, tune: bool,
                   *options: Any) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[:1], dtype=torch.float32)
    return losses, torch.empty_like(losses)


def head_rows_backward(dlosses: Tensor, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor,
                       dX: bool, dW: bool, dbias: bool, grad_dtype: torch.dtype, memory: int, share: float, tune: bool,
                       *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    result = run_head(hidden, weight, bias, target, dlosses.contiguous(), None, dX, dW, dbias, grad_dtype, memory,
                      share, tune, options)
    return gradients(result, hidden, grad_dtype)


def head_rows_backward_fake(dlosses: Tensor, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], target: Tensor,
                            dX: bool, dW: bool, dbias: bool, grad_dtype: torch.dtype, memory: int, share: float,
                            tune: bool, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return gradients_fake(hidden, weight, dX, dW, dbias, grad_dtype)


def head_rows_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    hidden, weight, bias, target, ctx.main_grad, *ctx.others = inputs
    ctx.save_for_backward(hidden, weight, bias, target)


def head_rows_gradient(ctx: Any, dlosses: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Any, ...]:
    result: list[Any] = [None] * (5 + len(ctx.others))
    if dlosses is None:
        return tuple(result)
    if ctx.main_grad is not None and is_traced(dlosses):
        raise NotImplementedError("main_grad: expected False under a compiler, given True")
    tensors = ctx.saved_tensors
    wants = [bool(need) for need in ctx.needs_input_grad[:3]]
    made = call_head_rows_backward(dlosses, *tensors, *wants, *ctx.others)
    for i, (gradient, wanted) in enumerate(zip(made, wants)):
        if wanted:
            result[i] = gradient if i == 1 and ctx.main_grad is not None else gradient.to(tensors[i].dtype)
    if wants[1]:
        result[1] = accumulate(ctx.main_grad, result[1])
    return tuple(result)


call_head_rows = operator(
    "linear_cross_entropy_rows(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? main_grad, "
    f"{PLAN_SCHEMA}, {OPTIONS_SCHEMA}) -> (Tensor, Tensor)",
    head_rows, head_rows_fake, head_rows_context, head_rows_gradient)
call_head_rows_backward = operator(
    "linear_cross_entropy_rows_backward(Tensor dlosses, Tensor hidden, Tensor weight, Tensor? bias, "
    f"Tensor target, bool dX, bool dW, bool dbias, {PLAN_SCHEMA}, {OPTIONS_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    head_rows_backward, head_rows_backward_fake)
