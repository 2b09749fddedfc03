"""The table of C functions against bookends.h, what the build recorded, and the errors of the library."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import bookends
from bookends import _library

HEADER = pathlib.Path(__file__).resolve().parents[2] / "dev" / "lib" / "bookends.h"
LETTERS = {"int": "i", "bk_dtype": "i", "bk_index_type": "i", "bk_update_op": "i",
           "int32_t": "u", "int64_t": "q", "uint64_t": "Q",
           "size_t": "z", "double": "d", "float": "f", "bk_stream": "p", "void": ""}
# Families of bookends.h that have no Python functions yet.
NOT_YET = ("bk_embedding_layer", "bk_decode")


def letter(declaration):
    """The table's letter of a result or parameter."""
    if "*" in declaration:
        return "p"
    return LETTERS[declaration.replace("const ", "").split()[0]]


def declared():
    """Each function of bookends.h: the letters of its declaration."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    functions = {}
    for result, name, parameters in re.findall(r"^([a-z][\w ]*?[ *]+)(bk_\w+)\(([^)]*)\);", text, re.M):
        kind = "s" if "char *" in result else "v" if result.strip() == "void" else letter(result)
        functions[name] = kind + "".join(letter(" ".join(part.split())) for part in parameters.split(","))
    return functions


def test_the_table_is_the_header():
    functions = declared()
    assert len(functions) > 15
    for name, signature in _library.FUNCTIONS.items():
        assert functions[name] == signature.replace(" ", ""), name
    missing = [name for name in functions if name not in _library.FUNCTIONS and not name.startswith(NOT_YET)]
    assert missing == []


def test_every_function_has_a_python_function():
    of_plans = {"create": "__init__", "destroy": "destroy", "workspace_bytes": "__init__", "describe": "describe",
                "tune": "tune", "tuning_bytes": "save_tuning", "save_tuning": "save_tuning",
                "restore_tuning": "restore_tuning", "run": "run"}
    for name in _library.FUNCTIONS:
        short = name[len("bk_"):]
        if short.startswith("lm_head_"):
            method = getattr(bookends.LmHead, of_plans[short[len("lm_head_"):]])
            assert callable(method)
            continue
        function = getattr(bookends, short)
        assert short in bookends.__all__ and function.__doc__, short


def test_version_and_config(capsys):
    record = bookends.show_config()
    printed = capsys.readouterr().out
    assert record["version"] == bookends.__version__ == bookends.version()
    assert re.fullmatch(r"\d+\.\d+\.\d+", bookends.__version__)
    assert record["device"] in ("cpu", "cuda") and record["loads"] == "yes"
    for name in ("device", "architectures", "commit", "compiler", "library", "numpy", "torch", "jax", "cupy"):
        assert re.search(rf"^{name}: +{re.escape(record[name])}$", printed, re.M), name


def test_import_needs_no_array_library():
    code = "import bookends, sys; print([m for m in ('numpy', 'torch', 'jax', 'cupy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, universal_newlines=True, check=True)
    assert result.stdout == "[]\n"


def test_a_missing_library_says_what_to_do(tmp_path):
    environment = {**os.environ, "BOOKENDS_LIBRARY": str(tmp_path / "libbookends.so")}
    result = subprocess.run([sys.executable, "-c", "import bookends"], env=environment, stderr=subprocess.PIPE,
                            universal_newlines=True)
    assert result.returncode != 0 and "build.json is missing: install the package" in result.stderr
    (tmp_path / "build.json").write_text('{"version": "0.0.1", "device": "cpu"}')
    result = subprocess.run([sys.executable, "-c", "import bookends; bookends.version()"], env=environment,
                            stderr=subprocess.PIPE, universal_newlines=True)
    assert result.returncode != 0 and f"cannot load {tmp_path}/libbookends.so" in result.stderr


def test_errors_are_in_the_librarys_words():
    assert bookends.error_string(1) == "a pointer is null"
    with pytest.raises(bookends.ArgumentError, match="bk_lm_head_create: N is -1") as caught:
        bookends.LmHead(-1, 4, 8)
    assert caught.value.code == 2 and isinstance(caught.value, ValueError)
    assert bookends.last_message() == "bk_lm_head_create: N is -1"
    with pytest.raises(bookends.ArgumentError, match="there is no version 99"):
        bookends.LmHead(1, 4, 8, version=99)
