"""Arrays of any library as pointers: torch, numpy, cupy, and whatever has DLPack or an array interface.

`Call` is one call of the C library. It turns each argument into a `View`, checks dtype, shape, device and layout,
allocates the outputs that are not passed in, and finds the stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import operator
import sys
from typing import Any, Optional, Sequence, Union

from . import _library

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
Shape = tuple[int, ...]


class View:
    """What a call needs to know of an array. `strides` is in elements, or None if the array is contiguous. `owner`
    keeps the memory."""
    __slots__ = ("pointer", "shape", "dtype", "device", "strides", "writable", "library", "owner")

    def __init__(self, pointer: int, shape: Shape, dtype: str, device: str, strides: Optional[Shape], writable: bool,
                 library: str, owner: Any) -> None:
        self.pointer, self.shape, self.dtype, self.device = pointer, shape, dtype, device
        self.strides, self.writable, self.library, self.owner = strides, writable, library, owner


def kind_of(array: Any) -> str:
    """The library that an array belongs to: "torch", "numpy", "cupy", or "other"."""
    for name, kind in (("torch", "Tensor"), ("numpy", "ndarray"), ("cupy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(array, getattr(module, kind, ())):
            return name
    return "other"


def is_contiguous(shape: Shape, strides: Sequence[int]) -> bool:
    """Whether the strides (in elements) are row-major without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def view(name: str, array: Any, stream: Any = None) -> View:
    """The view of an array; `name` is the argument's, for messages."""
    kind = kind_of(array)
    if kind == "torch":
        return view_torch(name, array)
    if kind == "numpy":
        return view_interface(array.__array_interface__, str(array.dtype), "cpu", kind, array)
    if kind == "cupy":
        device = f"cuda:{array.device.id}"
        return view_interface(array.__cuda_array_interface__, str(array.dtype), device, kind, array)
    if hasattr(array, "__dlpack__"):
        return view_dlpack(name, array, stream)
    if hasattr(array, "__cuda_array_interface__"):
        interface = array.__cuda_array_interface__
        return view_interface(interface, TYPESTRINGS.get(interface["typestr"], interface["typestr"]), "cuda", kind,
                              array)
    if hasattr(array, "__array_interface__"):
        interface = array.__array_interface__
        return view_interface(interface, TYPESTRINGS.get(interface["typestr"], interface["typestr"]), "cpu", kind,
                              array)
    raise TypeError(f"{name}: expected an array with DLPack or an array interface, given {type(array).__name__}")


@functools.lru_cache(maxsize=None)
def without_prefix(torch_name: Any) -> str:
    """The name of a dtype of torch."""
    return str(torch_name)[len("torch."):]


device_name = functools.lru_cache(maxsize=None)(str)


def view_torch(name: str, tensor: Any) -> View:
    if tensor.layout != sys.modules["torch"].strided:
        raise TypeError(f"{name}: expected a strided tensor, given layout {tensor.layout}")
    strides = None if tensor.is_contiguous() else tensor.stride()
    return View(tensor.data_ptr(), tuple(tensor.shape), without_prefix(tensor.dtype), device_name(tensor.device),
                strides, True, "torch", tensor)


TYPESTRINGS = {"<f4": "float32", "<f2": "float16", "<i4": "int32", "<i8": "int64", "|u1": "uint8"}


def view_interface(interface: dict[str, Any], dtype: str, device: str, library: str, array: Any) -> View:
    """The view of an array interface, numpy's or CUDA's."""
    address, read_only = interface["data"]
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    size = SIZES.get(dtype, 1)
    if strides is not None:
        ragged = any(stride % size for stride in strides)
        strides = tuple(-1 if ragged else stride // size for stride in strides)
        strides = None if is_contiguous(shape, strides) else strides
    return View(address or 0, shape, dtype, device, strides, not read_only, library, array)


class DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class DLVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DLTensor)]


# The capsule keeps its tensor until it is deleted, so its name stays "dltensor": nobody takes it over.
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
capsule_is = ctypes.pythonapi.PyCapsule_IsValid
capsule_is.restype, capsule_is.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
DL_READ_ONLY = 1
DL_CPU, DL_CUDA, DL_CUDA_HOST, DL_CUDA_MANAGED = 1, 2, 3, 13
DL_CODES = {(0, 32): "int32", (0, 64): "int64", (1, 8): "uint8", (2, 32): "float32", (2, 16): "float16",
            (4, 16): "bfloat16"}


def view_dlpack(name: str, array: Any, stream: Any) -> View:
    """The view of an object with __dlpack__. Its producer makes a stream of a GPU wait for the data."""
    kind, device_id = (int(part) for part in array.__dlpack_device__())
    names = {DL_CPU: "cpu", DL_CUDA: f"cuda:{device_id}", DL_CUDA_HOST: "cpu", DL_CUDA_MANAGED: f"cuda:{device_id}"}
    if kind not in names:
        raise ValueError(f"{name}: expected an array in memory of the CPU or of a CUDA GPU, given one on DLPack's "
                         f"device type {kind}")
    device = names[kind]
    arguments = {} if kind == DL_CPU else {"stream": stream or 1}  # 1: the default stream
    try:
        capsule = array.__dlpack__(max_version=(1, 1), **arguments)
    except TypeError:  # older than DLPack 1.0
        capsule = array.__dlpack__(**arguments)
    writable = type(array).__module__.split(".")[0] not in ("jax", "jaxlib")  # whose arrays never change
    if capsule_is(capsule, b"dltensor_versioned"):
        versioned = DLVersioned.from_address(capsule_pointer(capsule, b"dltensor_versioned"))
        tensor, writable = versioned.tensor, writable and not versioned.flags & DL_READ_ONLY
    elif capsule_is(capsule, b"dltensor"):
        tensor = DLTensor.from_address(capsule_pointer(capsule, b"dltensor"))
    else:
        raise TypeError(f"{name}: __dlpack__ of {type(array).__name__} returned no DLPack capsule")
    shape = tuple(tensor.shape[:tensor.ndim])
    strides = tuple(tensor.strides[:tensor.ndim]) if tensor.strides else None
    if strides is not None and is_contiguous(shape, strides):
        strides = None
    dtype = DL_CODES.get((tensor.code, tensor.bits), f"DLPack type {tensor.code} of {tensor.bits} bits")
    if tensor.lanes != 1:
        dtype += f" x {tensor.lanes}"
    return View((tensor.data or 0) + tensor.byte_offset, shape, dtype, device, strides, bool(writable), "other",
                (array, capsule))


class Status:
    """The status word of the C library: the first position of an id, target or index that is out of range.

    Pass one to any number of calls; `position` waits for the device, then returns the first bad position, or None. The
    position is an index into the flattened array of the call that met it. The word lies on the device of the first
    call."""

    def __init__(self) -> None:
        self._word: Any = None

    def _use(self, call: Call) -> View:
        if self._word is None:
            self._word = call.filled((1,), "int64", -1)
        word = view("status", self._word)
        call.check_device("status", word)
        return word

    @property
    def position(self) -> Optional[int]:
        """The first bad position of all calls so far, or None."""
        if self._word is None:
            return None
        found = int(self._word[0])
        return None if found == -1 else found

    def reset(self) -> None:
        """Forgets the position."""
        if self._word is not None:
            self._word[0] = -1

    def raise_if_bad(self, argument: str = "ids") -> None:
        """Raises BadIdError if a position was found."""
        found = self.position
        if found is not None:
            raise _library.BadIdError(f"{argument}: the value at position {found} is out of range", argument, found)

    def __repr__(self) -> str:
        return f"Status(position={self.position})"


Dim = Union[str, int]


def integer(name: str, value: Any, least: int = -2**31, most: int = 2**31 - 1) -> int:
    """An int that C has room for."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, given {value!r}") from None
    if not least <= number <= most:
        raise ValueError(f"{name}: expected an int from {least} to {most}, given {number}")
    return number


def number(name: str, value: Any) -> float:
    """A finite float."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected a number, given {value!r}") from None
    if not abs(result) <= 3.4028234663852886e38:
        raise ValueError(f"{name}: expected a finite float, given {result}")
    return result


def dtype_name(name: str, value: Any) -> str:
    """The name of a float type: of a string, or of a dtype of torch, numpy or jax."""
    short = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    named = getattr(value, "name", None) or getattr(value, "__name__", None)
    text = str(value if isinstance(value, str) else named or value)
    text = text[len("torch."):] if text.startswith("torch.") else text
    text = short.get(text, text)
    if text not in _library.FLOATS:
        raise TypeError(f"{name}: expected float32, float16 or bfloat16, given {value}")
    return text


class Call:
    """One call of the C library: its arguments, as far as they are known."""

    def __init__(self, stream: Any, *likely: Any) -> None:
        """stream: an int, an object with `cuda_stream` or `ptr`, or None: the current stream of the arrays' library.
        likely: arrays, the first of which tells the device and the library that allocates."""
        self.device = _library.build()["device"]
        self.own_stream = stream is not None
        self.stream: Optional[int] = None
        if self.own_stream:
            for attribute in ("cuda_stream", "ptr"):
                stream = getattr(stream, attribute, stream)
            if not isinstance(stream, int):
                raise TypeError(f"stream: expected an int or a stream of torch or cupy, given {type(stream).__name__}")
            self.stream = stream
        self.sizes: dict[str, int] = {}
        self.dtypes: dict[str, str] = {}
        self.first: Optional[View] = None  # on the device of which all others must lie
        self.keep: list[Any] = []

    # ---- arguments

    def array(self, name: str, array: Any, shape: Optional[Sequence[Dim]], dtypes: Union[str, Sequence[str]],
              output: bool = False, row_stride: bool = False) -> View:
        """Checks an argument. A letter in `shape` is a size that the first array with it sets; None: any shape.
        dtypes: those allowed, or "dtype": a float type that the first array with it sets. row_stride: rows of a matrix
        may have gaps between them."""
        found = view(name, array, self.stream)
        self.check_dtype(name, found, dtypes)
        if shape is not None:
            self.check_shape(name, found, shape)
        self.check_device(name, found)
        by_rows = row_stride and found.strides is not None and found.strides[0] >= found.shape[1] and \
            (found.strides[1] == 1 or found.shape[1] == 1)
        if found.strides is not None and not by_rows:
            raise ValueError(f"{name}: expected a contiguous (row-major) array, given strides {found.strides} of shape "
                             f"{found.shape}")
        if found.pointer % SIZES[found.dtype]:
            raise ValueError(f"{name}: expected memory aligned to its elements of {SIZES[found.dtype]} bytes, given "
                             f"address {found.pointer:#x}")
        if output and not found.writable:
            raise ValueError(f"{name}: expected a writable array, given a read-only one")
        self.keep.append(found)
        return found

    def optional(self, name: str, array: Any, shape: Optional[Sequence[Dim]], dtypes: Union[str, Sequence[str]],
                 output: bool = False) -> Optional[View]:
        """An argument that may be None."""
        return None if array is None else self.array(name, array, shape, dtypes, output)

    def size(self, symbol: str) -> int:
        """A size that is an int in C."""
        return integer(symbol, self.sizes[symbol])

    def check_dtype(self, name: str, found: View, dtypes: Union[str, Sequence[str]]) -> None:
        if isinstance(dtypes, str):
            allowed: Sequence[str] = [self.dtypes.setdefault(dtypes, found.dtype)] if dtypes == "dtype" else [dtypes]
            if dtypes == "dtype" and found.dtype not in _library.FLOATS:
                allowed = list(_library.FLOATS)
        else:
            allowed = dtypes
        if found.dtype not in allowed:
            raise TypeError(f"{name}: expected {' or '.join(allowed)}, given {found.dtype}")

    def check_shape(self, name: str, found: View, shape: Sequence[Dim]) -> None:
        known = [size if isinstance(size, int) else self.sizes.get(size) for size in shape]
        matches = len(found.shape) == len(known) and all(
            want is None or want == got for want, got in zip(known, found.shape))
        if not matches:
            letters = ", ".join(map(str, shape))
            values = ", ".join("any" if size is None else str(size) for size in known)
            raise ValueError(f"{name}: expected shape ({letters}) = ({values}), given {found.shape}")
        for size, got in zip(shape, found.shape):
            if isinstance(size, str):
                self.sizes.setdefault(size, got)

    def check_device(self, name: str, found: View) -> None:
        if found.device.split(":")[0] != self.device:
            built = "the CPU device" if self.device == "cpu" else "GPUs"
            raise ValueError(f"{name}: expected an array on {self.device} (the library was built for {built}), given "
                             f"one on {found.device}")
        if self.first is None:
            self.first = found
            if self.device == "cuda" and not self.own_stream:
                self.stream = current_stream(found)
        elif found.device != self.first.device and "cuda" not in (found.device, self.first.device):
            raise ValueError(f"{name}: expected an array on {self.first.device}, as the others, given one on "
                             f"{found.device}")

    def output(self, name: str, array: Any, shape: Sequence[Dim], dtypes: Union[str, Sequence[str]],
               zeros: bool = False) -> Optional[View]:
        """An output: checked if it is an array, allocated if it is True, absent if it is None or False."""
        if array is None or array is False:
            return None
        if array is not True:
            return self.array(name, array, shape, dtypes, output=True)
        dtype = self.dtypes.get(dtypes, dtypes) if isinstance(dtypes, str) else dtypes[0]
        sizes = tuple(size if isinstance(size, int) else self.sizes[size] for size in shape)
        made = view(name, self.filled(sizes, dtype, 0 if zeros else None, name), self.stream)
        self.keep.append(made)
        return made

    # ---- memory

    def filled(self, shape: Shape, dtype: str, value: Optional[int] = None, name: str = "status") -> Any:
        """A new array of the first array's library, on its device; value None: not initialised."""
        assert self.first is not None
        if self.own_stream and self.device == "cuda":
            raise ValueError(f"{name}: expected an array, since `stream` is given: new memory belongs to the current "
                             "stream")
        if self.first.library == "torch":
            import torch
            device = self.first.owner.device
            if value is None:
                return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            return torch.full(shape, value, dtype=getattr(torch, dtype), device=device)
        if self.device == "cuda" and self.first.library != "cupy":
            raise TypeError(f"{name}: expected an array: only arrays of torch, cupy and (on the CPU device) numpy are "
                            "allocated")
        import importlib
        module: Any = importlib.import_module("numpy" if self.device == "cpu" else "cupy")
        item = dtype
        if dtype == "bfloat16":
            try:
                item = importlib.import_module("ml_dtypes").bfloat16
            except ImportError:
                raise TypeError(f"{name}: expected an array: numpy's bfloat16 needs the package ml_dtypes") from None
        with device_of(self.first):
            return module.empty(shape, item) if value is None else module.full(shape, value, item)

    def workspace(self, workspace: Any, needed: int) -> Optional[int]:
        """The address of `needed` bytes at a multiple of 256: those passed in, or new ones."""
        if needed == 0:
            return None
        if workspace is None:
            workspace = self.filled((needed + 255,), "uint8", None, "workspace")
            made = self.array("workspace", workspace, ("workspace bytes",), "uint8", output=True)
            return -(-made.pointer // 256) * 256
        given = self.array("workspace", workspace, ("workspace bytes",), "uint8", output=True)
        if given.shape[0] < needed:
            raise ValueError(f"workspace: expected {needed} bytes, given {given.shape[0]}")
        return given.pointer

    # ---- the call

    def run(self, function: str, *arguments: Any) -> None:
        """Calls it; Views become addresses."""
        assert self.first is not None
        plain = [argument.pointer if isinstance(argument, View) else argument for argument in arguments]
        if self.device == "cpu":
            _library.call(function, *plain)
        else:
            with device_of(self.first):
                _library.call(function, *plain)

    def code(self, symbol: str = "dtype") -> int:
        """The bk_dtype of a symbol, or of a View's dtype."""
        return _library.FLOATS[self.dtypes.get(symbol, symbol)]


def returned(output: Optional[View]) -> Any:
    """The array that an output is to the caller."""
    if output is None:
        return None
    return output.owner[0] if isinstance(output.owner, tuple) else output.owner


def current_stream(found: View) -> Optional[int]:
    """The current stream of the array's library."""
    if found.library == "torch":
        import torch
        return torch.cuda.current_stream(found.owner.device).cuda_stream
    if found.library == "cupy":
        import importlib
        cupy: Any = importlib.import_module("cupy")
        with cupy.cuda.Device(found.owner.device.id):
            return cupy.cuda.get_current_stream().ptr
    return None


def device_of(found: View) -> contextlib.AbstractContextManager[Any]:
    """Makes the array's GPU the current one."""
    if found.library == "torch" and found.device != "cpu":
        import torch
        return torch.cuda.device(found.owner.device)
    if found.library == "cupy":
        return found.owner.device
    return contextlib.nullcontext()
