"""The C library: loads libbookends.so, declares its functions and turns their errors into exceptions."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pathlib
from typing import Any

# The functions of bookends.h: the type of the result, then of each parameter. p: pointer, i: int or an enum,
# u: int32_t, q: int64_t, Q: uint64_t, z: size_t, d: double, f: float, s: string, v: void. tests/test_library.py
# compares the table with the header.
FUNCTIONS = {
    "bk_version": "i",
    "bk_error_string": "s i",
    "bk_last_message": "s",
    "bk_encoder_forward": "i ppppp iiiiiip",
    "bk_encoder_backward_workspace_bytes": "z iiiii",
    "bk_encoder_backward": "i pppppp iiiiiiiQip",
    "bk_embedding_lookup": "i pppp qiqqiiiip",
    "bk_embedding_bag": "i ppppp qqiqqpiiiip",
    "bk_embedding_bag_backward_workspace_bytes": "z qqiqp",
    "bk_embedding_bag_backward": "i pppp pppp pp qqiqqp iiiiip",
    "bk_embedding_transpose_workspace_bytes": "z qq",
    "bk_embedding_transpose": "i ppppp ppp qqip",
    "bk_embedding_update_workspace_bytes": "z qiqiii",
    "bk_embedding_update": "i ppppp qiqqifiiiQiip",
    "bk_embedding_optimizer": "i pppppp p qiqqpiiiip",
    "bk_classifier_fused": "i ppppppppp iiipiip",
    "bk_classifier_totals": "i pppp iup",
    "bk_scale": "i ppqip",
    "bk_lm_head_create": "i p iiiipzdiiip",
    "bk_lm_head_destroy": "v p",
    "bk_lm_head_workspace_bytes": "z p",
    "bk_lm_head_describe": "i ppz",
    "bk_lm_head_tune": "i pppppppp",
    "bk_lm_head_tuning_bytes": "z p",
    "bk_lm_head_save_tuning": "i ppz",
    "bk_lm_head_restore_tuning": "i ppz",
    "bk_lm_head_run": "i pppppppppppppp p",
}
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int, "u": ctypes.c_int32, "q": ctypes.c_int64, "Q": ctypes.c_uint64,
         "z": ctypes.c_size_t, "d": ctypes.c_double, "f": ctypes.c_float, "s": ctypes.c_char_p, "v": None}

OVERWRITE, STOCHASTIC, ADD_LOSSES, DISTINCT = 1, 2, 4, 8
LM_HEAD_FLAGS = {"dX": 1, "dW": 2, "dbias": 4, "bias": 8, "tf32": 16, "finite": 32}
INDEX_TYPES = {"int32": 0, "int64": 1}
UPDATES = {"overwrite": 0, "accumulate": 1}
OPTIMIZERS = {"sgd": 0, "rowwise_adagrad": 1, "adam": 2, "rowwise_adam": 3}
BAG_MODES = {"sum": 0, "mean": 1, "max": 2}
FLOATS = {"float32": 0, "float16": 1, "bfloat16": 2}


class BookendsError(Exception):
    """An error of the C library, in its words. `code` is the BK_ERROR_..., or 1000 + a cudaError_t."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class ArgumentError(BookendsError, ValueError):
    """The library refused an argument."""


class UnsupportedError(BookendsError, NotImplementedError):
    """The version cannot do what was asked."""


class WorkspaceError(BookendsError, MemoryError):
    """A budget for scratch memory is too small; `least` bytes suffice."""

    least: int = 0


class DeviceError(BookendsError, RuntimeError):
    """CUDA or cuBLASLt failed."""


class BadIdError(IndexError):
    """A token id, target or index is out of range. `position` is its position, `argument` the array's name."""

    def __init__(self, message: str, argument: str, position: int) -> None:
        super().__init__(message)
        self.argument, self.position = argument, position


class ClassifierOptions(ctypes.Structure):
    """bk_classifier_options."""
    _fields_ = [*[(name, ctypes.c_float) for name in ("dloss", "logit_scale", "softcap", "label_smoothing", "z_loss")],
                ("ignore_index", ctypes.c_int32), ("divisor", ctypes.c_void_p), ("flags", ctypes.c_int32),
                ("reserved", ctypes.c_int32 * 7)]


class BagOptions(ctypes.Structure):
    """bk_bag_options."""
    _fields_ = [("mode", ctypes.c_int32), ("offset_type", ctypes.c_int32), ("offsets", ctypes.c_void_p),
                ("hotness", ctypes.c_int64), ("weights", ctypes.c_void_p), ("padding_idx", ctypes.c_int64),
                ("first_rows", ctypes.c_void_p), ("tables", ctypes.c_int32), ("reserved", ctypes.c_int32 * 5)]


class OptimizerOptions(ctypes.Structure):
    """bk_optimizer_options."""
    _fields_ = [("kind", ctypes.c_int32), ("flags", ctypes.c_int32),
                *[(name, ctypes.c_float) for name in ("learning_rate", "eps", "weight_decay")],
                ("beta1", ctypes.c_double), ("beta2", ctypes.c_double), ("step", ctypes.c_int64),
                ("device_step", ctypes.c_void_p), ("seed", ctypes.c_uint64), ("reserved", ctypes.c_int32 * 6)]


class Description(ctypes.Structure):
    """bk_lm_head_description."""
    _fields_ = [("way", ctypes.c_char_p),
                *[(name, ctypes.c_int32) for name in ("version", "rows", "columns", "buffers")],
                ("share", ctypes.c_double),
                *[(name, ctypes.c_size_t) for name in ("bytes", "logits_bytes", "statistics_bytes", "probs_bytes",
                                                       "X_bytes", "dX_bytes", "dW_bytes", "dbias_bytes", "gemm_bytes")]]


def library_path() -> pathlib.Path:
    """The path of libbookends.so: BOOKENDS_LIBRARY if it is set, else the library in the package."""
    named = os.environ.get("BOOKENDS_LIBRARY")
    return pathlib.Path(named) if named else pathlib.Path(__file__).with_name("libbookends.so")


@functools.lru_cache(maxsize=None)
def build() -> dict[str, str]:
    """The version, device, architectures, commit and compiler of the library. The build writes them into build.json,
    beside the library."""
    path = library_path().with_name("build.json")
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ImportError(f"{path} is missing: install the package (pip install .), or set BOOKENDS_LIBRARY to a "
                          "libbookends.so with its build.json") from error


def find_cublaslt() -> None:
    """Loads the cuBLASLt of the nvidia-cublas wheel, which the loader does not find by itself."""
    import importlib.util
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or []) if found else []:
        for path in sorted(pathlib.Path(folder).glob("*/lib/libcublasLt.so.*")):
            try:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue


@functools.lru_cache(maxsize=None)
def library() -> ctypes.CDLL:
    """The loaded library, its functions declared."""
    record = build()
    path = library_path()
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        if "cublasLt" not in str(error):
            raise ImportError(f"cannot load {path}: {error}") from error
        find_cublaslt()
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as again:
            raise ImportError(f"cannot load {path}: {again}. The library was built for a GPU and needs cuBLASLt: "
                              "install the CUDA toolkit's or the wheel nvidia-cublas") from again
    for name, signature in FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, *function.argtypes = [TYPES[letter] for letter in signature.replace(" ", "")]
    number = loaded.bk_version()
    version = "%d.%d.%d" % (number // 10000, number // 100 % 100, number % 100)
    if version != record["version"]:
        raise ImportError(f"{path} is version {version}, its build.json says {record['version']}")
    return loaded


KINDS = {5: UnsupportedError, 8: WorkspaceError}


def check(code: int) -> None:
    """Raises the calling thread's last error if the code is not BK_OK."""
    if code == 0:
        return
    message = library().bk_last_message().decode()
    raise KINDS.get(code, DeviceError if code >= 1000 else ArgumentError)(message, code)


def call(name: str, *arguments: Any) -> None:
    """Calls a function that returns an error code."""
    check(getattr(library(), name)(*arguments))
