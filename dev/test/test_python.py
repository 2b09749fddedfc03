"""The Python package: its own tests (python/tests), and what a wheel of it holds.

They run in a Python of their own, since this folder has a module named bookends too. The tests of bookends.torch run
where torch is installed.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import bookends
from bookends import BUILD, DEVICE, ROOT

pytestmark = pytest.mark.skipif(bool(bookends.SANITIZE), reason="the same whatever the sanitizer")


def run_pytest(folder, *arguments, **environment):
    """The package's tests in `folder`, whose words are the failure's."""
    names = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "BOOKENDS_"))
             and name != "CXX"}  # torch.compile takes no compiler with arguments
    command = [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *arguments]
    result = subprocess.run(command, cwd=str(folder), env={**names, **environment}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, universal_newlines=True, timeout=300)
    print(result.stdout)
    assert result.returncode == 0, result.stdout
    assert re.search(r"^[1-9]\d* passed", result.stdout, re.M), result.stdout


def in_place():
    return dict(PYTHONPATH=str(ROOT / "python"), BOOKENDS_LIBRARY=str(BUILD / "libbookends.so"))


def test_the_package(tmp_path):
    run_pytest(tmp_path, str(ROOT / "python" / "tests"), "--ignore-glob=*torch*", **in_place())


@pytest.mark.parametrize("path", sorted((ROOT / "python" / "tests").glob("test_torch*.py")), ids=lambda path: path.stem)
def test_the_package_with_torch(path, tmp_path):
    pytest.importorskip("torch", reason="needs torch (make test-python installs it)")
    run_pytest(tmp_path, str(path), **in_place())


def test_types():
    """mypy, by pyproject.toml's settings."""
    pytest.importorskip("mypy", reason="needs mypy (make test-python installs it)")
    pytest.importorskip("torch", reason="needs torch (make test-python installs it)")
    result = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", os.devnull], cwd=str(ROOT),
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, timeout=300)
    assert result.returncode == 0, result.stdout


def setuptools_is_new():
    try:
        from setuptools import version
        return tuple(int(part) for part in version.__version__.split(".")[:2]) >= (77,)
    except ImportError:
        return False


@pytest.mark.skipif(DEVICE == "cuda", reason="the same whatever the device")
@pytest.mark.skipif(not setuptools_is_new(), reason="needs setuptools 77")
def test_a_wheel_stands_alone(tmp_path):
    """It is built from a copy of the sources and of the library's objects, so nothing is compiled again. Its tests run
    outside the repository."""
    sources = tmp_path / "sources"
    shutil.copytree(str(ROOT), str(sources), symlinks=True, ignore=lambda folder, names: [
        name for name in names if name in ("build", "results", "__pycache__") or name.startswith(".")
        or name.endswith((".a", ".so", ".bin"))])
    kept = sources / "build" / "cpu"
    shutil.copytree(str(BUILD), str(kept), symlinks=True, ignore=lambda folder, names: [
        name for name in names if name in ("test", "all-archs") or (ROOT / (name + ".cu")).exists()])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "BOOKENDS_"))}
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation",
               "--no-deps", "-w", str(tmp_path), str(sources)]
    result = subprocess.run(command, env={**environment, "BOOKENDS_DEVICE": "cpu"}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, universal_newlines=True, timeout=300)
    assert result.returncode == 0, result.stdout
    wheel, = tmp_path.glob("bookends-*.whl")
    assert re.fullmatch(r"bookends-[\d.]+-py3-none-linux_\w+\.whl", wheel.name)
    names = set(zipfile.ZipFile(str(wheel)).namelist())
    modules = {str(path.relative_to(ROOT / "python")) for path in (ROOT / "python" / "bookends").rglob("*.py")}
    extra = {"bookends/libbookends.so", "bookends/build.json", "bookends/py.typed"}
    assert {name for name in names if ".dist-info/" not in name} == modules | extra
    installed = tmp_path / "installed"
    zipfile.ZipFile(str(wheel)).extractall(str(installed))
    run_pytest(tmp_path, str(ROOT / "python" / "tests" / "test_functions.py"),
               str(ROOT / "python" / "tests" / "test_library.py"), PYTHONPATH=str(installed))
