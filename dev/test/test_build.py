"""The build: what it makes from nothing, what it makes anew, what users may include and link; and the sources' rules.

All of it happens in copies of the sources, so that no build here is disturbed."""

import os
import re
import shutil
import subprocess

import pytest

import bookends
from bookends import ROOT

KERNELS = sorted(path.name for path in ROOT.glob("*.cu"))
MADE_OF_OTHERS = {"lm_head.cu", "embedding_layer.cu"}
USES_HOPPER = {"classifier_fused.cu", "lm_head.cu"}
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
CXX = (os.environ.get("CXX") or "g++").split()
CC = shutil.which("gcc") or shutil.which("cc")

needs_build = pytest.mark.skipif(bool(bookends.SANITIZE) or bookends.DEVICE == "cuda",
                                 reason="the same whatever the sanitizer and the device")


# Stands in for the compiler: the compiler itself, or, where PRETEND is set, what only makes the output newer. (make -n
# doesn't tell what would be made anew: it takes every file that a forced rule may write for written.)
COMPILER = """#!/bin/sh
[ -n "$PRETEND" ] || exec %s "$@"
while [ "$1" != -o ]; do shift; done
touch "$2"
"""


def kernel_names():
    return [name[:-3] for name in KERNELS]


def make(folder, *arguments, pretend=False):
    """make for the CPU device, free of what this run of the tests was told."""
    environment = {key: value for key, value in os.environ.items()
                   if not key.startswith(("MAKE", "MFLAGS", "BOOKENDS_")) and key not in ("SANITIZE", "LD_PRELOAD")}
    environment["PRETEND"] = "1" if pretend else ""
    return subprocess.run(["make", "DEVICE=cpu", "COMMIT=test", "CXX=./compiler", *arguments], cwd=str(folder),
                          env=environment, timeout=600, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True)


def made_anew(folder, *arguments):
    """What make compiles and links, by its names below the build directory."""
    result = make(folder, "all", "lib", *arguments, pretend=True)
    assert result.returncode == 0, result.stderr
    return set(re.findall(r"-o build/cpu/(\S+)", result.stdout))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sources and what `make all lib` makes of them; one for all the workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / "built"
    with open(str(folder) + ".lock", "w") as lock:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.copytree(str(ROOT), str(folder), symlinks=True, ignore=lambda _, names: [
                name for name in names if name in ("build", "results") or name.startswith(".") or name == "__pycache__"
                or name.endswith((".a", ".so", ".bin")) or name + ".cu" in KERNELS])
            (folder / "compiler").write_text(COMPILER % " ".join(CXX))
            (folder / "compiler").chmod(0o755)
            result = make(folder, "all", "lib")
            (folder / "log").write_text("%d\n%s%s" % (result.returncode, result.stdout, result.stderr))
    log = (folder / "log").read_text()
    assert log.startswith("0\n"), log
    assert "warning" not in log
    return folder


@pytest.fixture
def tree(built, tmp_path):
    """A copy of that, times and links kept, to be changed at will."""
    return shutil.copytree(str(built), str(tmp_path / "tree"), symlinks=True) and tmp_path / "tree"


# ---------------------------------------------------------------------------------------------------------------------
# make

@needs_build
def test_what_make_leaves(tree):
    for name in kernel_names():
        assert os.readlink(str(tree / name)) == "build/cpu/" + name
        result = subprocess.run(["./" + name, "--list"], cwd=str(tree), stdout=subprocess.PIPE)
        assert result.returncode == 0 and result.stdout
    for name in ("libbookends.a", "libbookends.so"):
        assert os.readlink(str(tree / name)) == "build/cpu/" + name and (tree / name).exists()


@needs_build
def test_make_by_itself_is_make_all(tree):
    for name in kernel_names():
        (tree / name).unlink()
    assert make(tree).returncode == 0 and all((tree / name).exists() for name in kernel_names())


@needs_build
def test_a_second_make_does_nothing(tree):
    before = {path: path.stat().st_mtime_ns for path in (tree / "build").rglob("*") if path.is_file()}
    assert len(before) > 10
    result = make(tree, "all", "lib")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "" or result.stdout.startswith("make: Nothing to be done"), result.stdout
    assert {path: path.stat().st_mtime_ns for path in (tree / "build").rglob("*") if path.is_file()} == before


BINARIES = set(kernel_names())
OBJECTS = {name + ".o" for name in BINARIES}
LIBRARY = {"dev/lib/bookends.o", "libbookends.so"}
DEVICE = {"device.o", "libbookends.so", *BINARIES}
PRODUCTS = {"cublasLt.o", "lm_head", "libbookends.so"}
HOPPER = {"classifier_fused", "classifier_fused.o", "lm_head", "lm_head.o"}


MADE_FROM = {name: {name[:-3], *[other[:-3] for other in MADE_OF_OTHERS & set(KERNELS)
                                 if '"%s"' % name in (ROOT / other).read_text()]} for name in KERNELS}


@needs_build
@pytest.mark.parametrize("touched, files", [
    ("common.h", LIBRARY | OBJECTS | BINARIES),
    ("parts/hopper.h", LIBRARY | HOPPER),
    ("dev/harness.h", OBJECTS | BINARIES),
    ("dev/lib/bookends.h", LIBRARY),
    ("dev/lib/bookends.cu", LIBRARY),
    *[(name, LIBRARY | {made for one in kernels for made in (one, one + ".o")}) for name, kernels in MADE_FROM.items()],
    ("dev/cpu/device.cc", DEVICE),
    ("dev/cpu/cublasLt.cc", PRODUCTS),
    ("dev/cpu/cublasLt.h", PRODUCTS | LIBRARY | {"lm_head.o"}),
    ("dev/cpu/cuda_runtime.h", DEVICE | PRODUCTS | LIBRARY | OBJECTS),
    ("dev/cpu/cuda.h", DEVICE | LIBRARY | {"lm_head.o"}),
    ("dev/cpu/cudaTypedefs.h", DEVICE | LIBRARY | {"lm_head.o"}),
    ("dev/cpu/cuda/ptx", DEVICE | LIBRARY | {"classifier_fused.o", "lm_head.o"}),
    ("dev/cpu/cooperative_groups.h", LIBRARY | HOPPER),
    ("dev/cpu/rewrite.sed", LIBRARY | OBJECTS | BINARIES),
    ("README.md", set()),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_change_makes_anew(touched, files, tree):
    (tree / touched).touch()
    assert made_anew(tree) == files
    assert made_anew(tree) == set()


@needs_build
def test_a_change_is_really_compiled(tree):
    """Not only what -n says: after an edit, one make brings it into the binary and the library."""
    path = tree / "common.h"
    path.write_text(path.read_text() + "\n#error edited\n")
    for target in [*kernel_names(), "lib"]:
        result = make(tree, target)
        assert result.returncode != 0 and "#error edited" in result.stderr
        assert re.search(r"\bcommon\.h:\d+", result.stderr) and "src/common.h" not in result.stderr


@needs_build
def test_other_flags_make_all_anew(tree):
    assert made_anew(tree, "WARNINGS=-Wall") == {"commit.o"} | DEVICE | PRODUCTS | LIBRARY | OBJECTS


@needs_build
def test_another_commit_is_only_linked(tree):
    result = make(tree, "all", "lib", "COMMIT=other")
    assert result.returncode == 0
    assert set(re.findall(r"-o build/cpu/(\S+)", result.stdout)) == {"commit.o", *BINARIES}
    for name in kernel_names():
        result = subprocess.run(["./" + name, "1", "-b", "1", "-t", "1", "--check", "--json", "-"], cwd=str(tree),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
        assert '"commit": "other"' in result.stdout


@needs_build
def test_make_refuses_what_it_does_not_know(tree):
    for bad in ("DEVICE=tpu", "SANITIZE=memory"):
        result = make(tree, bad, "all")
        assert result.returncode == 2 and bad in result.stderr and result.stdout == ""


@needs_build
def test_make_help_and_clean(tree):
    result = make(tree, "help")
    assert result.returncode == 0
    for target in ("all", "run", "test", "lib", "profile", "sass", "clean", "help"):
        assert re.search(r"^ +make %s +\S" % target, result.stdout, re.M), target
    assert make(tree, "clean").returncode == 0
    assert not (tree / "build").exists() and not any((tree / name).is_symlink() for name in kernel_names())


@needs_build
def test_only_what_multiplies_matrices_links_cublaslt(tree):
    text = make(tree, "-n", "DEVICE=cuda", "all", "lib").stdout
    links = [line for line in text.splitlines() if re.search(r" -o build/cuda/\w+(\.so)? ", line)]
    assert {re.search(r"-o build/cuda/(\S+)", line).group(1): "-lcublasLt" in line for line in links} == \
        {name: name in PRODUCTS for name in {*BINARIES, "libbookends.so"}}


@needs_build
def test_cuda_flags(tree):
    """What would be run for a GPU, whether or not there is one."""
    text = make(tree, "-n", "DEVICE=cuda", "SMI=echo", "all", "lib").stdout
    assert "-arch=native" in text and "dev/cpu" not in text and "-lineinfo" in text
    text = make(tree, "-n", "DEVICE=cuda", "SMI=printf '9.0\\n6.1\\n10.3\\n9.0\\n'", "all").stdout
    assert set(re.findall(r",code=(\w+)", text)) == {"sm_90a", "sm_103"} and "native" not in text
    text = make(tree, "-n", "DEVICE=cuda", "ARCHS=80 90", "all").stdout
    assert "arch=compute_80,code=sm_80" in text and "arch=compute_90a,code=sm_90a" in text and "native" not in text


# ---------------------------------------------------------------------------------------------------------------------
# what users compile and link

@pytest.mark.skipif(not NVCC, reason="needs nvcc")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.skipif(bool(bookends.SANITIZE), reason="the same whatever the sanitizer")
def test_the_header_comments_command(name, tmp_path):
    """The one command that the file says compiles it, save that it is built for sm_90 rather than the GPU at hand."""
    header = (ROOT / name).read_text().split("*/")[0]
    command = re.search(r"Compile: +(nvcc .*)", header).group(1).split()
    assert name in command and "-arch=native" in command
    output = command[command.index("-o") + 1]
    for needed in ("common.h", "parts/hopper.h", "dev/harness.h", *KERNELS):
        (tmp_path / needed).parent.mkdir(exist_ok=True)
        shutil.copy(str(ROOT / needed), str(tmp_path / needed))
    command = [NVCC if part == "nvcc" else part.replace("native", "sm_90") for part in command]
    result = subprocess.run(command, cwd=str(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=600,
                            universal_newlines=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert os.access(str(tmp_path / output), os.X_OK)


USER = r"""
#include "bookends.h"
#include <stdio.h>
#include <string.h>

int main(void) {
    float out[6] = {0}, wte[4] = {1, 2, 3, 4}, wpe[6] = {10, 20, 30, 40, 50, 60};
    const float want[6] = {13, 24, 31, 42, 53, 64};
    const int32_t inp[3] = {1, 0, 1}, bad[3] = {1, 0, 2};
    int64_t status = -1;
    bk_dtype dtype = BK_FP32;
    bk_stream stream = 0;
    int error = bk_encoder_forward(out, inp, wte, wpe, &status, 1, 3, 2, 2, dtype, 0, stream);
    if (error != BK_OK || status != -1 || memcmp(out, want, sizeof(want)) != 0) return 1;
    if (bk_encoder_forward(out, bad, wte, wpe, &status, 1, 3, 2, 2, dtype, 0, stream) != BK_OK || status != 2) return 2;
    error = bk_encoder_forward(0, inp, wte, wpe, &status, 1, 3, 2, 2, dtype, 0, stream);
    if (error != BK_ERROR_NULL) return 3;
    puts(bk_error_string(error));
    return 0;
}
"""


@needs_build
@pytest.mark.skipif(not CC, reason="needs a C compiler")
@pytest.mark.parametrize("library", ["libbookends.a", "libbookends.so"])
def test_a_c_program_links(library, built, tmp_path):
    (tmp_path / "user.c").write_text(USER)
    flags = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "-I", str(built / "dev" / "lib")]
    subprocess.run([CC, *flags, "-c", "user.c"], cwd=str(tmp_path), check=True)
    folder = built / "build" / "cpu"
    link = [*CXX, "-pthread", "user.o", str(folder / library), "-ldl", "-o", "user"]
    subprocess.run(link, cwd=str(tmp_path), check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    result = subprocess.run([str(tmp_path / "user")], stdout=subprocess.PIPE, universal_newlines=True, env=environment)
    assert (result.returncode, result.stdout) == (0, "a pointer is null\n")


@pytest.mark.skipif(not CC, reason="needs a C compiler")
@pytest.mark.parametrize("language", ["c -std=c99", "c -std=c11", "c++ -std=c++11", "c++ -std=c++17"])
def test_the_librarys_header_stands_alone(language, tmp_path):
    """Twice included, without CUDA and without a warning."""
    (tmp_path / "user.c").write_text('#include "bookends.h"\n#include "bookends.h"\nint main(void) { return BK_OK; }\n')
    compiler = [CC] if language.startswith("c ") else CXX
    flags = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-I", str(ROOT / "dev" / "lib")]
    result = subprocess.run([*compiler, "-x", *language.split(), *flags, "user.c"], cwd=str(tmp_path),
                            stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (0, b"")


@needs_build
@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_the_library_never_prints_exits_allocates_or_waits(built):
    path = built / "build" / "cpu" / "dev" / "lib" / "bookends.o"
    names = subprocess.run(["nm", "-u", "-C", str(path)], stdout=subprocess.PIPE, universal_newlines=True, check=True)
    undefined = {line.split()[-1].split("(")[0].split("@")[0] for line in names.stdout.splitlines() if line.strip()}
    assert "cudaGetLastError" in names.stdout
    for name in ("exit", "abort", "printf", "fprintf", "puts", "fputs", "putchar", "malloc", "cudaMalloc", "cudaFree",
                 "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "stdout", "stderr"):
        assert name not in undefined


# ---------------------------------------------------------------------------------------------------------------------
# the sources' rules

def includes(path):
    return re.findall(r'^\s*#\s*include\s*([<"][^>"]+[>"])', path.read_text(), re.M)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_files_are_plain_cuda(name):
    text = (ROOT / name).read_text()
    for word in ("BOOKENDS_CPU_DEVICE", "__CUDACC__", "__CUDA_ARCH__", "cpu::", "dev/cpu", "asm(", "asm volatile"):
        assert word not in text, word
    assert "<<<" in text
    for line in re.findall(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*", text, re.M):
        assert "BOOKENDS_NO_MAIN" in line, line
    defined = re.findall(r"^\s*#\s*define\s+(.*)", text, re.M)  # one leaves out the mains of the files it is made of
    assert defined == (["BOOKENDS_NO_MAIN"] if name in MADE_OF_OTHERS else [])


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_files_include_no_other(name):
    own = [include for include in includes(ROOT / name) if include.startswith('"')]
    kernels = [include.strip('"') for include in own if include.endswith('.cu"')]
    assert name in MADE_OF_OTHERS or not kernels
    parts = {'"parts/hopper.h"'} if name in USES_HOPPER else set()
    assert set(own) - {'"%s"' % kernel for kernel in kernels} == {'"common.h"', '"dev/harness.h"'} | parts
    text = (ROOT / name).read_text()
    assert text.index("BOOKENDS_NO_MAIN") < text.index('"dev/harness.h"') < text.index("int main(")


def test_common_stands_alone():
    assert not [include for include in includes(ROOT / "common.h") if include.startswith('"')]
    text = (ROOT / "common.h").read_text()
    for word in ("BOOKENDS_CPU_DEVICE", "Harness", "harness", "cpu::"):
        assert word not in text, word
    assert "#include <cuda/ptx>" not in text
    of_harness = [include for include in includes(ROOT / "dev" / "harness.h") if include.startswith('"')]
    assert of_harness == ['"../common.h"']


def test_the_makefile_knows_every_kernel():
    line = re.search(r"^KERNELS := (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1)
    assert sorted(line.split()) == kernel_names()
