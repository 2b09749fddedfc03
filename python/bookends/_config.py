"""The configuration of the package: its build, and the packages that it finds at run time."""

from __future__ import annotations

import importlib.metadata

from . import _library

__version__ = _library.build()["version"]


def installed(*names: str) -> str:
    """The version of the first of these distributions that is installed, or "not found"."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not found"


def show_config() -> dict[str, str]:
    """Prints and returns the version, the device, the architectures, the commit and the compiler of the library, its
    path, and the array libraries that are installed."""
    record = dict(_library.build())
    record["library"] = str(_library.library_path())
    try:
        _library.library()
        record["loads"] = "yes"
    except ImportError as error:
        record["loads"] = f"no: {error}"
    record.update(numpy=installed("numpy"), torch=installed("torch"), jax=installed("jax"),
                  cupy=installed("cupy", "cupy-cuda13x", "cupy-cuda12x"))
    for name, value in record.items():
        print(f"{name + ':':15} {value}")
    return record
