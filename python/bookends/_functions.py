"""The functions of the C library over arrays of any library. bookends.h documents each of them in full."""

from __future__ import annotations

import ctypes
import math
import threading
from typing import Any, NamedTuple, Optional

from . import _library
from ._arrays import Call, Status, View, dtype_name, integer, number, returned
from ._library import BadIdError, ClassifierOptions

IDS = ("int32",)
INDICES = ("int32", "int64")


class Word:
    """The status word of one call: the caller's Status, or a new one for check=True."""

    def __init__(self, call: Call, status: Optional[Status], check: bool, view: View, argument: str) -> None:
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"status: expected a bookends.Status, given {type(status).__name__}")
        self.status, self.check = status, check
        self.own = status is None
        self.view, self.argument = view, argument
        if check and status is None:
            self.status = Status()
        self.pointer = self.status._use(call).pointer if self.status is not None else None

    def verify(self, limit: str) -> None:
        """With check=True: raises BadIdError if the call met a bad value."""
        if not self.check or self.status is None:
            return
        position = self.status.position
        if position is None:
            return
        if not self.own:  # it may be a position of an earlier call
            self.status.raise_if_bad(self.argument)
        index = []
        rest = position
        for size in reversed(self.view.shape):
            index.append(rest % size)
            rest //= size
        index.reverse()
        value = int(returned(self.view)[tuple(index)])
        place = ", ".join(map(str, index))
        raise BadIdError(f"{self.argument}[{place}] is {value}: expected {limit}", self.argument, position)


def version() -> str:
    """The version of the C library, for instance "0.2.0"."""
    library = _library.library()
    number_ = library.bk_version()
    return "%d.%d.%d" % (number_ // 10000, number_ // 100 % 100, number_ % 100)


def error_string(error: int) -> str:
    """What an error code of the C library means."""
    return _library.library().bk_error_string(integer("error", error)).decode()


def last_message() -> str:
    """The calling thread's last error in words; "" before the first one."""
    return _library.library().bk_last_message().decode()


# ---------------------------------------------------------------------------------------------------------------------
# the embedding

def encoder_forward(inp: Any, wte: Any, wpe: Any = None, *, out: Any = True, status: Optional[Status] = None,
                    check: bool = False, version: int = 0, stream: Any = None) -> Any:
    """Token + position embedding: out[b,t,:] = wte[inp[b,t],:] + wpe[t,:].

    inp: (B, T) int32, token ids in 0..V-1. wte: (V, C). wpe: (T, C) of wte's dtype, or None: no positions. out:
    (B, T, C), written; True: allocated. The row of an id outside 0..V-1 becomes NaN. status: lowered to the position of
    the first such id. check: waits for the device and raises BadIdError instead. Returns out."""
    call = Call(stream)
    ids = call.array("inp", inp, ("B", "T"), IDS)
    table = call.array("wte", wte, ("V", "C"), "dtype")
    positions = call.optional("wpe", wpe, ("T", "C"), "dtype")
    sizes = [call.size(symbol) for symbol in "BTCV"]
    written = call.output("out", True if out is None else out, ("B", "T", "C"), "dtype")
    word = Word(call, status, check, ids, "inp")
    call.run("bk_encoder_forward", written, ids, table, positions, word.pointer, *sizes, call.code(),
             integer("version", version), call.stream)
    word.verify(f"0..{call.sizes['V'] - 1}")
    return returned(written)


def encoder_backward_workspace_bytes(B: int, T: int, C: int, V: int, version: int = 0) -> int:
    """Bytes of workspace that encoder_backward needs."""
    sizes = [integer(name, value) for name, value in (("B", B), ("T", T), ("C", C), ("V", V), ("version", version))]
    return _library.library().bk_encoder_backward_workspace_bytes(*sizes)


def encoder_backward(dout: Any, inp: Any, dwte: Any = None, dwpe: Any = None, *, V: Optional[int] = None,
                     grad_dtype: Any = None, overwrite: bool = False, stochastic: bool = False, seed: int = 0,
                     status: Optional[Status] = None, check: bool = False, workspace: Any = None, version: int = 0,
                     stream: Any = None) -> tuple[Any, Any]:
    """Gradient of the token + position embedding: dwte[inp[b,t],:] += dout[b,t,:], dwpe[t,:] += sum over b of dout.

    dout: (B, T, C). inp: (B, T) int32. dwte: (V, C), dwpe: (T, C), of dout's dtype or float32: added to, or written
    with overwrite=True; None: not wanted; True: allocated, as zeros, of grad_dtype (None: dout's dtype), which needs V
    for dwte. stochastic: 16-bit results are rounded at random, by the seed. An id outside 0..V-1 adds nothing. status,
    check: as for encoder_forward. workspace: uint8 of encoder_backward_workspace_bytes(); None: allocated. Returns
    (dwte, dwpe)."""
    call = Call(stream)
    incoming = call.array("dout", dout, ("B", "T", "C"), "dtype")
    ids = call.array("inp", inp, ("B", "T"), IDS)
    dtype = call.dtypes["dtype"]
    allowed: Any = (dtype, "float32")
    if grad_dtype is not None:
        allowed = (dtype_name("grad_dtype", grad_dtype),)
    if V is not None:
        call.sizes["V"] = integer("V", V, 0)
    elif dwte is True or (dwte is None and dwpe is not None):
        raise ValueError("V: expected the size of the vocabulary, since dwte is not given as an array, given None")
    tokens = call.output("dwte", dwte, ("V", "C"), allowed, zeros=True)
    if tokens is not None:
        allowed = (tokens.dtype,)
    positions = call.output("dwpe", dwpe, ("T", "C"), allowed, zeros=True)
    call.sizes.setdefault("V", 0)
    sizes = [call.size(symbol) for symbol in "BTCV"]
    gradient = tokens or positions
    word = Word(call, status, check, ids, "inp")
    number_of_version = integer("version", version)
    flags = (_library.OVERWRITE if overwrite else 0) | (_library.STOCHASTIC if stochastic else 0)
    needed = _library.library().bk_encoder_backward_workspace_bytes(*sizes, number_of_version) if gradient else 0
    call.run("bk_encoder_backward", tokens, positions, incoming, ids, word.pointer, call.workspace(workspace, needed),
             *sizes, call.code(), _library.FLOATS[gradient.dtype if gradient else dtype], flags,
             integer("seed", seed, 0, 2**64 - 1), number_of_version, call.stream)
    word.verify(f"0..{call.sizes['V'] - 1}" if tokens else "ids in the vocabulary")
    return returned(tokens), returned(positions)


def choice(name: str, value: Any, among: dict[str, int]) -> int:
    """The number of one of several names."""
    if value not in among:
        raise ValueError(f"{name}: expected {', '.join(among)}, given {value!r}")
    return among[value]


def row_stride(table: View) -> int:
    """Elements from row to row."""
    return table.strides[0] if table.strides is not None else table.shape[1]


def embedding_lookup(idx: Any, table: Any, *, out: Any = True, out_dtype: Any = None, status: Optional[Status] = None,
                     check: bool = False, version: int = 0, stream: Any = None) -> Any:
    """Gather: out[..., :] = table[idx[...], :].

    idx: int32 or int64 of any shape, row numbers in 0..rows-1. table: (rows, C), its rows may have gaps between them.
    out: (*idx.shape, C) of the table's dtype or float32 (out_dtype), written; True: allocated. The row of an index
    outside 0..rows-1, a negative one too, becomes NaN. status, check: as for encoder_forward. Returns out."""
    call = Call(stream)
    indices = call.array("idx", idx, None, INDICES)
    source = call.array("table", table, ("rows", "C"), "dtype", row_stride=True)
    allowed = (call.dtypes["dtype"], "float32") if out_dtype is None else (dtype_name("out_dtype", out_dtype),)
    written = call.output("out", True if out is None else out, (*indices.shape, "C"), allowed)
    assert written is not None
    word = Word(call, status, check, indices, "idx")
    call.run("bk_embedding_lookup", written, indices, source, word.pointer, math.prod(indices.shape), call.size("C"),
             source.shape[0], row_stride(source), call.code(), _library.FLOATS[written.dtype],
             _library.INDEX_TYPES[indices.dtype], integer("version", version), call.stream)
    word.verify(f"0..{source.shape[0] - 1}")
    return returned(written)


class Bags:
    """The checked arguments that bk_embedding_bag and its gradient share."""

    def __init__(self, call: Call, idx: Any, offsets: Any, mode: str, weights: Any, padding_idx: Optional[int],
                 first_rows: Any) -> None:
        which = choice("mode", mode, _library.BAG_MODES)
        self.idx = call.array("idx", idx, ("count",) if offsets is not None else ("bags", "hotness"), INDICES)
        ends = call.optional("offsets", offsets, ("bags + 1",), INDICES)
        factors = call.optional("weights", weights, self.idx.shape, ("float32",))
        firsts = call.optional("first_rows", first_rows, ("tables + 1",), ("int64",))
        if ends is not None and ends.shape[0] == 0:
            raise ValueError("offsets: expected shape (bags + 1), at least 1 element, given (0,)")
        if firsts is not None and firsts.shape[0] < 2:
            raise ValueError(f"first_rows: expected shape (tables + 1), at least 2 elements, given {firsts.shape}")
        self.bags = ends.shape[0] - 1 if ends is not None else self.idx.shape[0]
        self.count = math.prod(self.idx.shape)
        tables = firsts.shape[0] - 1 if firsts is not None else 1
        if self.bags % tables:
            raise ValueError(f"first_rows: expected a number of tables that divides the {self.bags} bags, given "
                             f"{tables}")
        self.shape: tuple[Any, ...] = (self.bags, "C") if firsts is None else (self.bags // tables, tables, "C")
        self.several = firsts is not None
        self.index_type = _library.INDEX_TYPES[self.idx.dtype]
        self.options = _library.BagOptions(
            which, _library.INDEX_TYPES[ends.dtype] if ends is not None else 0,
            ends.pointer if ends is not None else None, 1 if ends is not None else self.idx.shape[1],
            factors.pointer if factors is not None else None,
            -1 if padding_idx is None else integer("padding_idx", padding_idx, 0, 2**63 - 1),
            firsts.pointer if firsts is not None else None, tables)


def embedding_bag(idx: Any, table: Any, offsets: Any = None, *, mode: str = "sum", weights: Any = None,
                  padding_idx: Optional[int] = None, first_rows: Any = None, out: Any = True, out_dtype: Any = None,
                  argmax: Any = None, status: Optional[Status] = None, check: bool = False, version: int = 0,
                  stream: Any = None) -> Any:
    """Bags: the sum, mean or maximum of several rows of the table.

    idx: (count) int32 or int64 with offsets, else (bags, hotness). table: (rows, C). offsets: (bags + 1) int32 or
    int64, ascending: bag g consists of the indices offsets[g] to offsets[g+1]-1. mode: "sum", "mean" or "max".
    weights: float32 of the shape of idx, for sums and means. padding_idx: an index that bags skip. first_rows:
    (tables + 1) int64, the first rows of several tables in `table`, to which indices are relative; a bag belongs to the
    table bag // (bags / tables). out: (bags, C), or (batch, tables, C) with first_rows, of the table's dtype or float32
    (out_dtype). argmax: int64 of the shape of out, the position in idx of each maximum; True: allocated. A bag with a
    bad index becomes NaN; an empty one is 0. status, check: as for encoder_forward. Returns out, or (out, argmax) where
    argmax is wanted."""
    call = Call(stream)
    source = call.array("table", table, ("rows", "C"), "dtype", row_stride=True)
    bags = Bags(call, idx, offsets, mode, weights, padding_idx, first_rows)
    allowed = (source.dtype, "float32") if out_dtype is None else (dtype_name("out_dtype", out_dtype),)
    written = call.output("out", True if out is None else out, bags.shape, allowed)
    positions = call.output("argmax", argmax, bags.shape, ("int64",))
    assert written is not None
    word = Word(call, status, check, bags.idx, "idx")
    call.run("bk_embedding_bag", written, positions, bags.idx, source, word.pointer, bags.count, bags.bags,
             call.size("C"), source.shape[0], row_stride(source), ctypes.addressof(bags.options), call.code(),
             _library.FLOATS[written.dtype], bags.index_type, integer("version", version), call.stream)
    word.verify("a row of its table" if bags.several else f"0..{source.shape[0] - 1}")
    return returned(written) if positions is None else (returned(written), returned(positions))


class BagGradients(NamedTuple):
    """The outputs of embedding_bag_backward; None: not wanted."""
    dtable: Any
    dweights: Any
    indices: Any
    distinct: Any


def embedding_bag_backward_workspace_bytes(count: int, bags: int, C: int, rows: int) -> int:
    """Bytes of workspace that embedding_bag_backward needs at most, for bags with offsets."""
    options = _library.BagOptions(0, 0, 1, 1, None, -1, None, 1)
    sizes = [integer(name, value, -2**63, 2**63 - 1) for name, value in (("count", count), ("bags", bags))]
    return _library.library().bk_embedding_bag_backward_workspace_bytes(
        *sizes, integer("C", C), integer("rows", rows, -2**63, 2**63 - 1), ctypes.addressof(options))


def embedding_bag_backward(dout: Any, idx: Any, offsets: Any = None, *, dtable: Any = None, rows: Optional[int] = None,
                           sparse: bool = False, dweights: Any = None, table: Any = None, argmax: Any = None,
                           mode: str = "sum", weights: Any = None, padding_idx: Optional[int] = None,
                           first_rows: Any = None, grad_dtype: Any = None, overwrite: bool = False,
                           status: Optional[Status] = None, check: bool = False, workspace: Any = None,
                           version: int = 0, stream: Any = None) -> BagGradients:
    """Gradients of embedding_bag.

    dout: (bags, C), or (batch, tables, C) with first_rows. idx, offsets, mode, weights, padding_idx, first_rows: as for
    embedding_bag; argmax: what it returned with mode "max". dtable: (rows, C) of dout's dtype or float32 (grad_dtype):
    added to, or written with overwrite=True; True: allocated as zeros, which needs rows. With sparse=True dtable is
    True, and gets a row for each distinct index: `dtable[:n]` are the gradients of the rows `indices[:n]`, where n is
    distinct[0]. dweights: (count) float32 of the shape of idx, written, which needs the table; True: allocated. status,
    check: as for encoder_forward. workspace: uint8, at a multiple of 256; None: allocated."""
    call = Call(stream)
    incoming = call.array("dout", dout, None, "dtype")
    if not incoming.shape:
        raise ValueError("dout: expected shape (bags, C), given ()")
    call.sizes["C"] = incoming.shape[-1]
    bags = Bags(call, idx, offsets, mode, weights, padding_idx, first_rows)
    call.check_shape("dout", incoming, bags.shape)
    source = None if table is None else call.array("table", table, ("rows", "C"), "dtype", row_stride=True)
    if rows is not None:
        if call.sizes.setdefault("rows", integer("rows", rows, 0, 2**63 - 1)) != rows:
            raise ValueError(f"rows: expected {call.sizes['rows']}, the rows of table, given {rows}")
    elif source is None and (dtable is None or dtable is True):
        raise ValueError("rows: expected the number of rows of the table, since no array tells it, given None")
    allowed = (incoming.dtype, "float32") if grad_dtype is None else (dtype_name("grad_dtype", grad_dtype),)
    if sparse and dtable is not True:
        raise ValueError(f"dtable: expected True with sparse=True, given {type(dtable).__name__}")
    gradient = call.output("dtable", dtable, (bags.count if sparse else "rows", "C"), allowed, zeros=not sparse)
    found = call.output("indices", sparse, (bags.count,), ("int64",))
    number_of = call.output("distinct", sparse, (1,), ("int64",), zeros=True)
    of_weights = call.output("dweights", dweights, bags.idx.shape, ("float32",))
    word = Word(call, status, check, bags.idx, "idx")
    C, of_table = call.size("C"), call.sizes["rows"]
    if sparse and bags.count == 0:
        return BagGradients(returned(gradient), returned(of_weights), returned(found), returned(number_of))
    needed = _library.library().bk_embedding_bag_backward_workspace_bytes(bags.count, bags.bags, C, of_table,
                                                                          ctypes.addressof(bags.options))
    call.run("bk_embedding_bag_backward", gradient, found, number_of, of_weights, incoming,
             call.optional("argmax", argmax, bags.shape, ("int64",)), bags.idx, source, word.pointer,
             call.workspace(workspace, needed), bags.count, bags.bags, C, of_table,
             row_stride(source) if source is not None else C, ctypes.addressof(bags.options), call.code(),
             _library.FLOATS[gradient.dtype if gradient is not None else incoming.dtype],
             _library.OVERWRITE if overwrite else 0, bags.index_type, integer("version", version), call.stream)
    word.verify("a row of its table" if bags.several else f"0..{of_table - 1}")
    return BagGradients(returned(gradient), returned(of_weights), returned(found), returned(number_of))


class Transposed(NamedTuple):
    """The outputs of embedding_transpose."""
    indices: Any
    begin: Any
    positions: Any
    group: Any
    distinct: Any


def embedding_transpose_workspace_bytes(count: int, rows: int) -> int:
    """Bytes of workspace that embedding_transpose needs."""
    return _library.library().bk_embedding_transpose_workspace_bytes(
        integer("count", count, -2**63, 2**63 - 1), integer("rows", rows, -2**63, 2**63 - 1))


def embedding_transpose(idx: Any, rows: int, *, indices: Any = True, begin: Any = True, positions: Any = True,
                        group: Any = True, distinct: Any = True, status: Optional[Status] = None, check: bool = False,
                        workspace: Any = None, stream: Any = None) -> Transposed:
    """The positions of each index. idx: (count) int32 or int64, in 0..rows-1.

    indices: (count) int64, the distinct indices, ascending. begin: (count + 1) int32: indices[g] has the positions
    positions[begin[g]] to positions[begin[g+1]-1]. positions: (count) int32. group: (count) int32, the group of each of
    them. distinct: (1) int64, the number of groups. All are written; True: allocated. workspace: uint8 of
    embedding_transpose_workspace_bytes(); None: allocated."""
    call = Call(stream)
    source = call.array("idx", idx, ("count",), INDICES)
    count, limit = source.shape[0], integer("rows", rows, 0, 2**63 - 1)
    outputs = [call.output("indices", indices, (count,), ("int64",)),
               call.output("begin", begin, (count + 1,), ("int32",)),
               call.output("positions", positions, (count,), ("int32",)),
               call.output("group", group, (count,), ("int32",)),
               call.output("distinct", distinct, (1,), ("int64",))]
    word = Word(call, status, check, source, "idx")
    needed = _library.library().bk_embedding_transpose_workspace_bytes(count, limit)
    call.run("bk_embedding_transpose", *outputs, source, word.pointer, call.workspace(workspace, needed), count, limit,
             _library.INDEX_TYPES[source.dtype], call.stream)
    word.verify(f"0..{limit - 1}")
    return Transposed(*[returned(output) for output in outputs])


def embedding_update_workspace_bytes(count: int, C: int, rows: int, *, mode: str = "overwrite", distinct: bool = False,
                                     stochastic: bool = False, version: int = 0) -> int:
    """Bytes of workspace that embedding_update needs."""
    flags = (_library.DISTINCT if distinct else 0) | (_library.STOCHASTIC if stochastic else 0)
    return _library.library().bk_embedding_update_workspace_bytes(
        integer("count", count, -2**63, 2**63 - 1), integer("C", C), integer("rows", rows, -2**63, 2**63 - 1),
        choice("mode", mode, _library.UPDATES), flags, integer("version", version))


def embedding_update(table: Any, idx: Any, values: Any, *, mode: str = "overwrite", scale: float = 1.0,
                     distinct: bool = False, stochastic: bool = False, seed: int = 0, status: Optional[Status] = None,
                     check: bool = False, workspace: Any = None, version: int = 0, stream: Any = None) -> Any:
    """Updates rows of a table in place. mode "overwrite": table[idx[i],:] = values[i,:], of equal indices the last one
    wins. mode "accumulate": table[idx[i],:] += scale * values[i,:].

    table: (rows, C), its rows may have gaps between them. idx: (count) int32 or int64. values: (count, C) of the
    table's dtype or float32, or of any with a float32 table. distinct: the caller promises that the good indices
    differ. stochastic: 16-bit sums are rounded at random, by the seed. A bad index updates nothing. status, check: as
    for encoder_forward. workspace: uint8, at a multiple of 256; None: allocated. Returns table."""
    op = choice("mode", mode, _library.UPDATES)
    call = Call(stream)
    target = call.array("table", table, ("rows", "C"), "dtype", output=True, row_stride=True)
    indices = call.array("idx", idx, ("count",), INDICES)
    allowed = tuple(_library.FLOATS) if target.dtype == "float32" else (target.dtype, "float32")
    source = call.array("values", values, ("count", "C"), allowed)
    flags = (_library.DISTINCT if distinct else 0) | (_library.STOCHASTIC if stochastic else 0)
    count, C, rows, number_of_version = indices.shape[0], call.size("C"), target.shape[0], integer("version", version)
    word = Word(call, status, check, indices, "idx")
    needed = _library.library().bk_embedding_update_workspace_bytes(count, C, rows, op, flags, number_of_version)
    call.run("bk_embedding_update", target, indices, source, word.pointer, call.workspace(workspace, needed), count, C,
             rows, row_stride(target), op, number("scale", scale), call.code(), _library.FLOATS[source.dtype], flags,
             integer("seed", seed, 0, 2**64 - 1), _library.INDEX_TYPES[indices.dtype], number_of_version, call.stream)
    word.verify(f"0..{rows - 1}")
    return table


def embedding_optimizer(table: Any, idx: Any, gradients: Any, *, kind: str = "sgd", first: Any = None,
                        second: Any = None, count: Any = None, learning_rate: float = 0.01, eps: float = 1e-8,
                        weight_decay: float = 0.0, beta1: float = 0.9, beta2: float = 0.999, step: Any = 1,
                        stochastic: bool = False, seed: int = 0, status: Optional[Status] = None, check: bool = False,
                        version: int = 0, stream: Any = None) -> Any:
    """One step of an optimizer for the rows of a sparse gradient, such as embedding_bag_backward(sparse=True) returns.

    table: (rows, C), its rows may have gaps between them; updated. idx: (n) int32 or int64, distinct row numbers.
    gradients: (n, C) of the table's dtype or float32, or of any with a float32 table. count: (1) int64 on the device,
    the number of rows that count; None: n. kind: "sgd", "rowwise_adagrad", "adam" or "rowwise_adam"; bookends.h has the
    formulas. first: (rows, C) float32, for the Adams. second: float32, (rows, C) for "adam", (rows) for the rowwise
    ones. Both are updated, and 0 before the first step. step: the number of the step, from 1 on, or (1) int64 on the
    device. stochastic: a 16-bit table is rounded at random, by the seed. A bad index updates nothing. status, check: as
    for encoder_forward. Returns table."""
    which = choice("kind", kind, _library.OPTIMIZERS)
    call = Call(stream)
    target = call.array("table", table, ("rows", "C"), "dtype", output=True, row_stride=True)
    indices = call.array("idx", idx, ("n",), INDICES)
    allowed = tuple(_library.FLOATS) if target.dtype == "float32" else (target.dtype, "float32")
    source = call.array("gradients", gradients, ("n", "C"), allowed)
    states = [call.optional("first", first, ("rows", "C"), ("float32",), output=True),
              call.optional("second", second, ("rows", "C") if kind == "adam" else ("rows",), ("float32",),
                            output=True)]
    limit = call.optional("count", count, (1,), ("int64",))
    on_device = None if isinstance(step, int) else call.array("step", step, (1,), ("int64",))
    options = _library.OptimizerOptions(
        which, _library.STOCHASTIC if stochastic else 0, number("learning_rate", learning_rate), number("eps", eps),
        number("weight_decay", weight_decay), number("beta1", beta1), number("beta2", beta2),
        integer("step", step, -2**63, 2**63 - 1) if on_device is None else 1,
        None if on_device is None else on_device.pointer, integer("seed", seed, 0, 2**64 - 1))
    word = Word(call, status, check, indices, "idx")
    call.run("bk_embedding_optimizer", target, *states, indices, source, limit, word.pointer, indices.shape[0],
             call.size("C"), target.shape[0], row_stride(target), ctypes.addressof(options), call.code(),
             _library.FLOATS[source.dtype], _library.INDEX_TYPES[indices.dtype], integer("version", version),
             call.stream)
    word.verify(f"0..{target.shape[0] - 1}")
    return table


# ---------------------------------------------------------------------------------------------------------------------
# the classifier

def classifier_options(call: Call, dloss: float, logit_scale: float, softcap: float, label_smoothing: float,
                       z_loss: float, ignore_index: int, divisor: Any, add_losses: bool) -> ClassifierOptions:
    """bk_classifier_options of keyword arguments. divisor: None, or one float32 on the device."""
    factor = call.optional("divisor", divisor, None, ("float32",))
    if factor is not None and factor.shape not in ((), (1,)):
        raise ValueError(f"divisor: expected one element, given shape {factor.shape}")
    return ClassifierOptions(number("dloss", dloss), number("logit_scale", logit_scale), number("softcap", softcap),
                             number("label_smoothing", label_smoothing), number("z_loss", z_loss),
                             integer("ignore_index", ignore_index), None if factor is None else factor.pointer,
                             _library.ADD_LOSSES if add_losses else 0)


class Classified(NamedTuple):
    """The outputs of classifier_fused; None: not asked for."""
    losses: Any
    dlogits: Any
    lse: Any
    probs: Any
    correct: Any


def classifier_fused(logits: Any, targets: Any, *, V: Optional[int] = None, losses: Any = True, dlogits: Any = None,
                     lse: Any = None, probs: Any = None, correct: Any = None, dlosses: Any = None, dloss: float = 1.0,
                     logit_scale: float = 1.0, softcap: float = 0.0, label_smoothing: float = 0.0, z_loss: float = 0.0,
                     ignore_index: int = -100, divisor: Any = None, add_losses: bool = False,
                     status: Optional[Status] = None, check: bool = False, version: int = 0,
                     stream: Any = None) -> Classified:
    """Softmax, cross-entropy and the gradient of the logits.

    logits: (N, P), of which the first V columns count (None: all). targets: (N) int32 in 0..V-1, or ignore_index.
    Outputs, each an array, True (allocated) or None (not wanted): losses (N) float32, dlogits (N, P) (may be logits
    itself), lse (N) float32, probs (N, P), correct (N) int32. The gradient of row i is multiplied by dloss * dlosses[i]
    / divisor; dlosses: (N) float32 or None; divisor: one float32 on the device or None. add_losses: losses are added
    to. status, check: as for encoder_forward, of targets."""
    call = Call(stream)
    source = call.array("logits", logits, ("N", "P"), "dtype")
    labels = call.array("targets", targets, ("N",), IDS)
    columns = call.size("P") if V is None else integer("V", V, 0)
    factors = call.optional("dlosses", dlosses, ("N",), ("float32",))
    options = classifier_options(call, dloss, logit_scale, softcap, label_smoothing, z_loss, ignore_index, divisor,
                                 add_losses)
    outputs = [call.output("dlogits", dlogits, ("N", "P"), "dtype"),
               call.output("losses", losses, ("N",), ("float32",), zeros=add_losses),
               call.output("lse", lse, ("N",), ("float32",)), call.output("probs", probs, ("N", "P"), "dtype"),
               call.output("correct", correct, ("N",), ("int32",))]
    word = Word(call, status, check, labels, "targets")
    call.run("bk_classifier_fused", *outputs, source, labels, factors, word.pointer, call.size("N"), columns,
             call.size("P"), ctypes.addressof(options), call.code(), integer("version", version), call.stream)
    word.verify(f"0..{columns - 1} or ignore_index, {ignore_index}")
    gradient, *others = outputs
    return Classified(returned(others[0]), returned(gradient), *[returned(other) for other in others[1:]])


def classifier_totals(targets: Any = None, losses: Any = None, *, rows: Any = None, total: Any = None,
                      ignore_index: int = -100, stream: Any = None) -> tuple[Any, Any]:
    """Adds the number of rows that are not ignored to rows[0], and the sum of the losses to total[0].

    targets: (N) int32, needed for rows. losses: (N) float32, needed for total. rows, total: (1) float32, added to;
    True: allocated as 0; None: not wanted. Returns (rows, total)."""
    call = Call(stream)
    labels = call.optional("targets", targets, ("N",), IDS)
    values = call.optional("losses", losses, ("N",), ("float32",))
    if labels is None and values is None:
        raise ValueError("targets: expected targets or losses, given None for both")
    for name, needs, wanted, given in (("targets", "rows", rows, labels), ("losses", "total", total, values)):
        if wanted is not None and wanted is not False and given is None:
            raise ValueError(f"{name}: expected an array, since {needs} is wanted, given None")
    counted = call.output("rows", rows, (1,), ("float32",), zeros=True)
    summed = call.output("total", total, (1,), ("float32",), zeros=True)
    call.run("bk_classifier_totals", counted, summed, labels, values, call.size("N"),
             integer("ignore_index", ignore_index), call.stream)
    return returned(counted), returned(summed)


def scale(x: Any, factor: Any, *, stream: Any = None) -> Any:
    """x *= factor, in place; nothing is done where the factor is 1. x: of any shape, float32, float16 or bfloat16.
    factor: one float32 on the device. Returns x."""
    call = Call(stream)
    scaled = call.array("x", x, None, "dtype", output=True)
    by = call.array("factor", factor, None, ("float32",))
    if by.shape not in ((), (1,)):
        raise ValueError(f"factor: expected one element, given shape {by.shape}")
    call.run("bk_scale", scaled, by, math.prod(scaled.shape), call.code(), call.stream)
    return x


# ---------------------------------------------------------------------------------------------------------------------
# the LM head

class HeadResult(NamedTuple):
    """The outputs of LmHead.run; None: not in the plan, or not asked for."""
    losses: Any
    dX: Any
    dW: Any
    dbias: Any
    lse: Any


class LmHead:
    """A plan of the LM head: from hidden states X (N, C) and weights W (V, C) to losses and gradients, without holding
    the logits whole.

    dX, dW, dbias: the gradients that runs compute. bias: the logits have a bias. memory: bytes of workspace at most;
    share: of the bytes of all logits (0 for both: a quarter). dtype: of X, W and dX. grad_dtype: of dW and dbias, dtype
    or float32. finite: ignored rows of X hold finite numbers. tf32: products of float32 round their inputs to TF32. The
    options of the loss are those of runs that bring none.

    Several threads may use one plan: its calls wait for each other. On a GPU two runs must not be under way at the same
    time on different streams. A plan belongs to the GPU that was current when it was made."""

    def __init__(self, N: int, C: int, V: int, *, dtype: Any = "bfloat16", grad_dtype: Any = "float32",
                 dX: bool = True, dW: bool = True, dbias: bool = False, bias: bool = False, memory: int = 0,
                 share: float = 0.0, logit_scale: float = 1.0, softcap: float = 0.0, label_smoothing: float = 0.0,
                 z_loss: float = 0.0, ignore_index: int = -100, dloss: float = 1.0, tf32: bool = False,
                 finite: bool = False, version: int = 0) -> None:
        self._plan: Optional[int] = None
        self._lock = threading.Lock()
        self.N, self.C, self.V = integer("N", N), integer("C", C), integer("V", V)
        self.dtype, self.grad_dtype = dtype_name("dtype", dtype), dtype_name("grad_dtype", grad_dtype)
        self.wants = {"dX": bool(dX), "dW": bool(dW), "dbias": bool(dbias), "bias": bool(bias)}
        chosen = {**self.wants, "tf32": tf32, "finite": finite}
        flags = sum(bit for name, bit in _library.LM_HEAD_FLAGS.items() if chosen[name])
        self._options = dict(dloss=dloss, logit_scale=logit_scale, softcap=softcap, label_smoothing=label_smoothing,
                             z_loss=z_loss, ignore_index=ignore_index)
        options = classifier_options(Call(None), divisor=None, add_losses=False, **self._options)  # type: ignore
        plan, least = ctypes.c_void_p(), ctypes.c_size_t()
        try:
            _library.call("bk_lm_head_create", ctypes.addressof(plan), self.N, self.C, self.V, flags,
                          ctypes.addressof(options), integer("memory", memory, 0, 2**63 - 1),
                          number("share", share), _library.FLOATS[self.dtype], _library.FLOATS[self.grad_dtype],
                          integer("version", version), ctypes.addressof(least))
        except _library.WorkspaceError as error:
            error.least = least.value
            raise
        self._plan = plan.value
        self.workspace_bytes: int = _library.library().bk_lm_head_workspace_bytes(self._plan)

    def __del__(self) -> None:
        self.destroy()

    def destroy(self) -> None:
        """Frees the plan's host memory and handles; the plan cannot be used afterwards."""
        plan, self._plan = getattr(self, "_plan", None), None
        if plan is not None:
            _library.library().bk_lm_head_destroy(plan)

    def _alive(self) -> int:
        if self._plan is None:
            raise ValueError("plan: expected a plan that exists, given a destroyed one")
        return self._plan

    def describe(self) -> dict[str, Any]:
        """How the plan does it: its way, version, rows of a block, columns of a tile, and bytes by part."""
        description = _library.Description()
        _library.call("bk_lm_head_describe", self._alive(), ctypes.addressof(description),
                      ctypes.sizeof(description))
        fields = {name: getattr(description, name) for name, *_ in description._fields_}
        return {**fields, "way": fields["way"].decode()}

    def _arguments(self, call: Call, X: Any, W: Any, bias: Any) -> list[Optional[View]]:
        """X, W and bias, checked against the plan."""
        call.dtypes["dtype"] = self.dtype
        call.sizes.update(N=self.N, C=self.C, V=self.V)
        views: list[Optional[View]] = [call.array("X", X, ("N", "C"), "dtype"), call.array("W", W, ("V", "C"), "dtype")]
        if (bias is not None) != self.wants["bias"]:
            raise ValueError(f"bias: expected {'an array' if self.wants['bias'] else 'None'}, as the plan was made, "
                             f"given {'None' if bias is None else 'an array'}")
        return [*views, call.optional("bias", bias, ("V",), "dtype")]

    def _gradient(self, call: Call, name: str, array: Any, shape: tuple[str, ...], dtype: str,
                  zeros: bool) -> Optional[View]:
        """A gradient, which there must be if and only if the plan has it; None: allocated."""
        if self.wants[name]:
            return call.output(name, True if array is None else array, shape, (dtype,), zeros)
        if array is not None:
            raise ValueError(f"{name}: expected None, as the plan was made, given an array")
        return None

    def tune(self, X: Any, W: Any, bias: Any = None, *, dX: Any = None, dW: Any = None, workspace: Any = None,
             stream: Any = None) -> None:
        """Times the algorithms that cuBLASLt proposes and keeps the fastest. Waits for the stream. dX and dW (None:
        allocated) hold anything afterwards."""
        call = Call(stream)
        inputs = self._arguments(call, X, W, bias)
        outputs = [self._gradient(call, "dX", dX, ("N", "C"), self.dtype, False),
                   self._gradient(call, "dW", dW, ("V", "C"), self.grad_dtype, False)]
        with self._lock:
            call.run("bk_lm_head_tune", self._alive(), *outputs, *inputs,
                     call.workspace(workspace, self.workspace_bytes), call.stream)

    def save_tuning(self) -> bytes:
        """Tuning results as bytes, for restore_tuning() of an equal plan."""
        blob = ctypes.create_string_buffer(_library.library().bk_lm_head_tuning_bytes(self._alive()))
        _library.call("bk_lm_head_save_tuning", self._alive(), ctypes.addressof(blob), len(blob))
        return blob.raw

    def restore_tuning(self, blob: bytes) -> None:
        """Takes over tuning results; those of another plan, device or cuBLASLt are refused with ArgumentError."""
        memory = ctypes.create_string_buffer(bytes(blob), max(len(blob), 1))
        with self._lock:
            _library.call("bk_lm_head_restore_tuning", self._alive(), ctypes.addressof(memory), len(blob))

    def run(self, X: Any, W: Any, targets: Any, bias: Any = None, *, dX: Any = None, dW: Any = None, dbias: Any = None,
            losses: Any = True, lse: Any = None, dlosses: Any = None, divisor: Any = None, add_losses: bool = False,
            status: Optional[Status] = None, check: bool = False, workspace: Any = None, stream: Any = None,
            **options: Any) -> HeadResult:
        """Runs the plan.

        X: (N, C), W: (V, C), bias: (V) of the plan's dtype. targets: (N) int32 in 0..V-1, or ignore_index. dX: (N, C),
        written. dW: (V, C), dbias: (V) of the plan's grad_dtype, added to. None: allocated (dW and dbias as zeros) if
        the plan has them. losses, lse: (N) float32; True: allocated; None: not wanted. dlosses, divisor, add_losses,
        status, check: as for classifier_fused. options: dloss, logit_scale, softcap, label_smoothing, z_loss,
        ignore_index of this run; without one, the plan's. workspace: uint8 of workspace_bytes at a multiple of 256;
        None: allocated."""
        call = Call(stream)
        unknown = sorted(set(options) - set(self._options))
        if unknown:
            raise TypeError(f"{unknown[0]}: LmHead.run() has no such option; its options are "
                            f"{', '.join(self._options)}")
        inputs = self._arguments(call, X, W, bias)
        labels = call.array("targets", targets, ("N",), IDS)
        factors = call.optional("dlosses", dlosses, ("N",), ("float32",))
        own = classifier_options(call, divisor=divisor, add_losses=add_losses, **{**self._options, **options})
        outputs = [self._gradient(call, "dX", dX, ("N", "C"), self.dtype, False),
                   self._gradient(call, "dW", dW, ("V", "C"), self.grad_dtype, True),
                   self._gradient(call, "dbias", dbias, ("V",), self.grad_dtype, True),
                   call.output("losses", losses, ("N",), ("float32",), zeros=add_losses),
                   call.output("lse", lse, ("N",), ("float32",))]
        word = Word(call, status, check, labels, "targets")
        with self._lock:
            call.run("bk_lm_head_run", self._alive(), *outputs, *inputs, labels, factors, word.pointer,
                     ctypes.addressof(own), call.workspace(workspace, self.workspace_bytes), call.stream)
        word.verify(f"0..{self.V - 1} or ignore_index, {own.ignore_index}")
        gradients = [returned(output) for output in outputs[:3]]
        return HeadResult(returned(outputs[3]), gradients[0], gradients[1], gradients[2], returned(outputs[4]))
