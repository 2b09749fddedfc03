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
PARTS = {"classifier_fused.cu": {"parts/classifier.h", "parts/hopper.h", "parts/launch.h"},
         "encoder_backward.cu": {"parts/group_positions.h", "parts/launch.h", "parts/rows.h"},
         "embedding_lookup.cu": {"parts/embedding_table.h"},
         "embedding_lookup_backward.cu": {"parts/embedding_table.h", "parts/group_sums.h"},
         "embedding_update.cu": {"parts/embedding_table.h", "parts/group_sums.h", "parts/last_positions.h",
                                 "parts/launch.h", "parts/sparse_optimizers.h"},
         "encoder_forward.cu": set(),
         "lm_head.cu": {"parts/classifier.h", "parts/gemm.h", "parts/launch.h", "parts/lm_head_gemms.h",
                        "parts/lm_head_plan.h", "parts/lm_head_product.h"}}
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
CXX = (os.environ.get("CXX") or "g++").split()
CC = shutil.which("gcc") or shutil.which("cc")
HEADER = (ROOT / "dev" / "lib" / "bookends.h").read_text()
NUMBER = int(re.search(r"^#define BK_VERSION (\d+)$", HEADER, re.M).group(1))
VERSION = "%d.%d.%d" % (NUMBER // 10000, NUMBER // 100 % 100, NUMBER % 100)
SONAME = "libbookends.so." + VERSION.split(".")[0]

needs_build = pytest.mark.skipif(bool(bookends.SANITIZE) or bookends.DEVICE == "cuda",
                                 reason="the same whatever the sanitizer and the device")


# Stands in for the compiler: the compiler itself, or, where PRETEND is set, what only makes the output newer. (make -n
# doesn't tell what would be made anew: it takes every file that a forced rule may write for written.) With less
# optimisation, which takes less time.
COMPILER = """#!/bin/sh
[ -n "$PRETEND" ] || exec %s "$@" -O1
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
            result = make(folder, "-j2", "all", "lib")
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
    assert os.readlink(str(tree / SONAME)) == "build/cpu/libbookends.so"
    assert os.readlink(str(tree / "build" / "cpu" / SONAME)) == "libbookends.so"


@needs_build
def test_a_link_that_changes_its_build_says_so(tree):
    for name in ("encoder_forward", "libbookends.a"):
        (tree / name).unlink()
        (tree / name).symlink_to("build/cuda/" + name)
    result = make(tree, "all", "lib")
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(line for line in result.stdout.splitlines() if " is now " in line) == \
        ["./%s is now build/cpu/%s (was build/cuda/%s)" % (name, name, name)
         for name in ("encoder_forward", "libbookends.a")]
    assert os.readlink(str(tree / "encoder_forward")) == "build/cpu/encoder_forward"
    assert " is now " not in make(tree, "all", "lib").stdout


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


def objects(*kernels):
    """A kernel file's own object, and the library's."""
    return {path % name for name in kernels for path in ("%s.o", "dev/lib/%s.o")}


BINARIES = set(kernel_names())
CLASSIFIERS = {"classifier_fused", "lm_head"}
BAGS = {"embedding_lookup.cu", "embedding_lookup_backward.cu"}
OBJECTS = {name + ".o" for name in BINARIES}
LIBRARY = {"libbookends.so", *["dev/lib/%s.o" % name for name in ("bookends", "scale", *BINARIES)]}
DEVICE = {"device.o", "libbookends.so", *BINARIES}
PRODUCTS = {"cublasLt.o", "lm_head", "libbookends.so"}
HOPPER = {"libbookends.so", "classifier_fused", "lm_head", *objects("classifier_fused", "lm_head")}


MADE_FROM = {name: {name[:-3], *[other[:-3] for other in MADE_OF_OTHERS & set(KERNELS)
                                 if '"%s"' % name in (ROOT / other).read_text()]} for name in KERNELS}


@needs_build
@pytest.mark.parametrize("touched, files", [
    ("common.h", LIBRARY | OBJECTS | BINARIES),
    ("parts/group_positions.h", {"libbookends.so", "encoder_backward", *objects("encoder_backward")}),
    ("parts/classifier.h", HOPPER),
    ("parts/hopper.h", HOPPER),
    *[("parts/%s.h" % part, {"libbookends.so", "lm_head", *objects("lm_head")})
      for part in ("gemm", "lm_head_gemms", "lm_head_plan", "lm_head_product")],
    ("parts/launch.h", HOPPER | {"encoder_backward", "embedding_update",
                                 *objects("encoder_backward", "embedding_update")}),
    ("dev/harness/harness.h", OBJECTS | BINARIES),
    ("dev/harness/progress.h", OBJECTS | BINARIES),
    ("dev/harness/classifier_options.h", {name for kernel in CLASSIFIERS for name in (kernel, kernel + ".o")}),
    ("dev/lib/bookends.h", LIBRARY),
    ("dev/lib/internal.h", LIBRARY),
    ("dev/lib/bookends.cu", {"dev/lib/bookends.o", "libbookends.so"}),
    ("dev/lib/lm_head.cu", {"dev/lib/lm_head.o", "libbookends.so"}),
    ("dev/lib/exports.map", {"libbookends.so"}),
    *[(name, {"libbookends.so", *kernels, *objects(*kernels)}) for name, kernels in MADE_FROM.items()],
    ("dev/cpu/device.cc", DEVICE),
    ("dev/cpu/cublasLt.cc", PRODUCTS),
    ("dev/cpu/cublasLt.h", PRODUCTS | objects("lm_head")),
    ("dev/cpu/cuda_runtime.h", DEVICE | PRODUCTS | LIBRARY | OBJECTS),
    ("dev/cpu/cuda.h", DEVICE | objects("lm_head")),
    ("dev/cpu/cudaTypedefs.h", DEVICE | objects("lm_head")),
    ("dev/cpu/cuda/ptx", DEVICE | objects("classifier_fused", "lm_head")),
    ("dev/cpu/cooperative_groups.h", HOPPER),
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
        result = subprocess.run(["./" + name, "1", "-b", "1", "-t", "1", "-v", "300", "--check", "--json", "-"],
                                cwd=str(tree), stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
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

def header_command(name):
    """The command that the file says compiles it, by its words."""
    header = (ROOT / name).read_text().split("*/")[0]
    return re.search(r"Compile: +(nvcc .*)", header).group(1).split()


@pytest.mark.parametrize("name", KERNELS)
def test_the_header_comments_commands_are_alike(name):
    products = ["-lcublasLt"] if name == "lm_head.cu" else []
    assert header_command(name) == ["nvcc", "-O3", "-arch=native", name, "-o", name[:-3], *products]


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
@pytest.mark.skipif(bool(bookends.SANITIZE), reason="the same whatever the sanitizer")
def test_the_header_comments_command(tmp_path):
    """It compiles the file, here for sm_90 instead of the GPU at hand. (Other files take minutes.)"""
    name = "encoder_forward.cu"
    headers = [str(path.relative_to(ROOT)) for folder in ("parts", "dev/harness") for path in (ROOT / folder).iterdir()]
    for needed in ("common.h", *headers, name):
        (tmp_path / needed).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(str(ROOT / needed), str(tmp_path / needed))
    command = [NVCC if part == "nvcc" else part.replace("native", "sm_90") for part in header_command(name)]
    result = subprocess.run(command, cwd=str(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=600,
                            universal_newlines=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert os.access(str(tmp_path / name[:-3]), os.X_OK)


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
    puts(bk_last_message());
    return bk_version() == BK_VERSION ? 0 : 4;
}
"""
SAYS = "a pointer is null\nbk_encoder_forward: out is null\n"


def link_and_run(tmp_path, link, library_path=None):
    """What user.o prints, linked by these arguments."""
    subprocess.run([*CXX, "-pthread", "user.o", *link, "-o", "user"], cwd=str(tmp_path), check=True)
    environment = {**os.environ, **({"LD_LIBRARY_PATH": str(library_path)} if library_path else {})}
    result = subprocess.run([str(tmp_path / "user")], stdout=subprocess.PIPE, universal_newlines=True, env=environment)
    return result.returncode, result.stdout


def compile_user(tmp_path, text, *flags):
    (tmp_path / "user.c").write_text(text)
    strict = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
    subprocess.run([CC, *strict, *flags, "-c", "user.c"], cwd=str(tmp_path), check=True)


@needs_build
@pytest.mark.skipif(not CC, reason="needs a C compiler")
@pytest.mark.parametrize("library", ["libbookends.a", "libbookends.so"])
def test_a_c_program_links(library, built, tmp_path):
    compile_user(tmp_path, USER, "-std=c99", "-I", str(built / "dev" / "lib"))
    folder = built / "build" / "cpu"
    assert link_and_run(tmp_path, [str(folder / library), "-ldl"], folder) == (0, SAYS)


@needs_build
@pytest.mark.skipif(not CC, reason="needs a C compiler")
@pytest.mark.parametrize("function, members", [
    ("bk_version", {"bookends"}),
    ("bk_encoder_forward", {"bookends", "encoder_forward"}),
    ("bk_encoder_backward", {"bookends", "encoder_backward"}),
    ("bk_classifier_fused", {"bookends", "classifier_fused"}),
    ("bk_lm_head_run", {"bookends", "classifier_fused", "lm_head", "cublasLt"}),
])
def test_a_program_links_only_what_it_calls(function, members, built, tmp_path):
    """On a GPU, where cublasLt.o is cuBLASLt itself, only the LM head's programs need it."""
    compile_user(tmp_path, """
#include "bookends.h"
void (*volatile used)(void);
int main(void) {
    used = (void (*)(void))%s;
    return 0;
}
""" % function, "-Wno-cast-function-type", "-I", str(built / "dev" / "lib"))
    library = str(built / "build" / "cpu" / "libbookends.a")
    assert link_and_run(tmp_path, [library, "-ldl", "-Wl,-Map=map"]) == (0, "")
    pulled = set(re.findall(r"libbookends\.a\((\w+)\.o\)", (tmp_path / "map").read_text()))
    assert pulled - {"device"} == members


@needs_build
@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_each_kernel_is_in_one_object(built):
    seen = {}
    for path in sorted((built / "build" / "cpu" / "dev" / "lib").glob("*.o")):
        names = subprocess.run(["nm", "-C", "--defined-only", str(path)], stdout=subprocess.PIPE, check=True,
                               universal_newlines=True).stdout
        for name in {line.split(None, 2)[2] for line in names.splitlines() if "_kernel" in line}:
            if "sorted_groups_" in name or "<bookends::SortedGroups," in name:  # of parts/, for several files
                continue
            assert name not in seen, (name, path.name, seen[name])
            seen[name] = path.name
    assert set(seen.values()) == {name + ".o" for name in (*kernel_names(), "scale")}


@needs_build
@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
def test_the_shared_library_exports_the_headers_functions_alone(built):
    path = built / "build" / "cpu" / "libbookends.so"
    text = subprocess.run(["nm", "-D", "--defined-only", str(path)], stdout=subprocess.PIPE, universal_newlines=True,
                          check=True).stdout
    declared = re.findall(r"^\w[\w ]* \*?(bk_\w+)\(", HEADER, re.M)
    assert len(declared) > 10
    assert sorted(line.split()[-1] for line in text.splitlines()) == sorted(declared)


def pkg_config(folder, *arguments):
    """What pkg-config would say of the installed library, by its rules: variables, fields, and ${name} in both."""
    if shutil.which("pkg-config"):
        environment = {**os.environ, "PKG_CONFIG_PATH": str(folder), "PKG_CONFIG_ALLOW_SYSTEM_CFLAGS": "1"}
        return subprocess.run(["pkg-config", *arguments, "bookends"], env=environment, stdout=subprocess.PIPE,
                              check=True, universal_newlines=True).stdout.split()
    text, known = (folder / "bookends.pc").read_text(), {}
    for name, sign, value in re.findall(r"^([\w.]+)(=|: )(.*)$", text, re.M):
        known[name] = re.sub(r"\$\{(\w+)\}", lambda match: known[match.group(1)], value)
    fields = {"--cflags": ["Cflags"], "--libs": ["Libs"], "--modversion": ["Version"]}
    wanted = [field for argument in arguments for field in
              ([argument.split("=")[1]] if "=" in argument else fields.get(argument, []))]
    if "--static" in arguments:
        wanted.append("Libs.private")
    return " ".join(known[name] for name in wanted).split()


@needs_build
@pytest.mark.skipif(not CC, reason="needs a C compiler")
def test_a_c11_program_uses_the_installed_library(tree, tmp_path):
    prefix = tmp_path / "installed"
    result = make(tree, "install", "PREFIX=" + str(prefix))
    assert result.returncode == 0, result.stderr
    assert pkg_config(prefix / "lib" / "pkgconfig", "--modversion") == [VERSION]
    compile_user(tmp_path, USER, "-std=c11", *pkg_config(prefix / "lib" / "pkgconfig", "--cflags"))
    (tree / "build").rename(tree / "gone")
    shared = pkg_config(prefix / "lib" / "pkgconfig", "--libs")
    assert link_and_run(tmp_path, shared, prefix / "lib") == (0, SAYS)
    static = pkg_config(prefix / "lib" / "pkgconfig", "--variable=static")
    assert link_and_run(tmp_path, static) == (0, SAYS)
    for link in (prefix / "lib").glob("*.so*"):
        link.unlink()
    assert link_and_run(tmp_path, pkg_config(prefix / "lib" / "pkgconfig", "--static", "--libs")) == (0, SAYS)


@needs_build
def test_a_package_is_installed_below_destdir(tree, tmp_path):
    result = make(tree, "install", "PREFIX=/opt/bookends", "DESTDIR=" + str(tmp_path / "package"))
    assert result.returncode == 0, result.stderr
    root = tmp_path / "package" / "opt" / "bookends"
    real = "libbookends.so." + VERSION
    package = tmp_path / "package"
    files = {str(path.relative_to(package)) for path in package.rglob("*") if not path.is_dir()}
    assert files == {"opt/bookends/" + name for name in (
        "include/bookends.h", "lib/libbookends.a", "lib/libbookends.so", "lib/" + SONAME, "lib/" + real,
        "lib/pkgconfig/bookends.pc")}
    assert (root / "lib" / "libbookends.so").resolve() == root / "lib" / real
    text = (root / "lib" / "pkgconfig" / "bookends.pc").read_text()
    assert "prefix=/opt/bookends\n" in text and "@" not in text and str(tmp_path) not in text
    if shutil.which("readelf"):
        dynamic = subprocess.run(["readelf", "-d", str(root / "lib" / real)], stdout=subprocess.PIPE, check=True,
                                 universal_newlines=True).stdout
        assert "soname: [%s]" % SONAME in dynamic


def test_the_changelog_begins_with_this_version():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M).group(1)
    assert first == VERSION


@pytest.mark.skipif(not CC, reason="needs a C compiler")
@pytest.mark.parametrize("language", ["c -std=c99", "c -std=c11", "c++ -std=c++11", "c++ -std=c++17"])
def test_the_librarys_header_stands_alone(language, tmp_path):
    """Twice included, behind macros that people define, without CUDA and without a warning."""
    (tmp_path / "user.c").write_text(COMMON_MACROS + """
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#include "bookends.h"
#include "bookends.h"
int main(void) { return BK_OK; }
""")
    compiler = [CC] if language.startswith("c ") else CXX
    flags = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-I", str(ROOT / "dev" / "lib")]
    result = subprocess.run([*compiler, "-x", *language.split(), *flags, "user.c"], cwd=str(tmp_path),
                            stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (0, b"")


@needs_build
@pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")
@pytest.mark.parametrize("family", kernel_names())
def test_the_library_never_prints_exits_allocates_or_waits(family, built):
    path = built / "build" / "cpu" / "dev" / "lib" / (family + ".o")
    names = subprocess.run(["nm", "-u", "-C", str(path)], stdout=subprocess.PIPE, universal_newlines=True, check=True)
    undefined = {line.split()[-1].split("(")[0].split("@")[0] for line in names.stdout.splitlines() if line.strip()}
    assert "cudaGetLastError" in names.stdout
    for name in ("exit", "abort", "printf", "fprintf", "puts", "fputs", "putchar", "malloc", "cudaMalloc", "cudaFree",
                 "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMemcpy", "stdout", "stderr"):
        assert name not in undefined


# What a trainer's own headers may hold, as llm.c's and others' do.
COMMON_MACROS = """
#define WARP_SIZE 32U
#define CEIL_DIV(M, N) (((M) + (N) - 1) / (N))
#define MAX_1024_THREADS_BLOCKS 2
#define cudaCheck(error) ((void)(error))
#define cublasCheck(status) ((void)(status))
#define CUDA_CHECK(error) ((void)(error))
#define CHECK(condition) ((void)(condition))
#define TILE 32
#define TILE_SIZE 32
#define BLOCK_SIZE 256
#define GROUP 4
#define VECTORS 8
#define LANES 32
#define STAGES 4
#define SUM 1
#define MAX 2
#define MIN 3
#define ALL 4
#define NONE 0
#define EPS 1e-5f
#define PI 3.14159265f
#define LOG2E 1.44269504f
#define KB 1024
#define MB 1048576
"""

CLASH = COMMON_MACROS + """
#include <cuda_bf16.h>
#include <cuda_runtime.h>
typedef __nv_bfloat16 floatX;
template <typename T>
struct Packed128 {
    T only;
};
typedef Packed128<floatX> x128;
__device__ inline float warpReduceSum(float value) { return value; }
"""

# The tables of versions with another name than the file.
TABLES = {"embedding_lookup_backward.cu": "embedding_bag_backward", "embedding_update.cu": "embedding_overwrite"}

# Every launcher is instantiated, by way of the table that holds it.
USES_ALL = """
namespace user {
size_t tables() {
    Packed128<float> own = {1};
    return (size_t)own.only + (size_t)&bookends::%s_versions%s[0];
}
}  // namespace user
"""


@needs_build
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_file_behind_a_trainers_header(name, built, tmp_path):
    """Which has macros and types of names like ours."""
    types = "<float>" if name in ("encoder_forward.cu", "classifier_fused.cu") else "<float, float>"
    (tmp_path / "clash.h").write_text(CLASH)
    (tmp_path / "user.cc").write_text("#include \"clash.h\"\n#define BOOKENDS_NO_MAIN\n#include \"%s\"\n%s" % (
        name, USES_ALL % (TABLES.get(name, name[:-3]), types)))
    command = [*CXX, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi",
               "-I", str(built / "dev" / "cpu"), "-I", str(built / "build" / "cpu" / "src"), "user.cc"]
    result = subprocess.run(command, cwd=str(tmp_path), stderr=subprocess.PIPE, universal_newlines=True)
    assert (result.returncode, result.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------------------------
# the sources' rules

def includes(path):
    return re.findall(r'^\s*#\s*include\s*([<"][^>"]+[>"])', path.read_text(), re.M)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_files_are_plain_cuda(name):
    text = (ROOT / name).read_text()
    for word in ("BOOKENDS_CPU_DEVICE", "__CUDACC__", "__CUDA_ARCH__", "cpu::", "dev/cpu", "asm(", "asm volatile"):
        assert word not in text, word
    assert "launch_kernel(" in text
    for line in re.findall(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*", text, re.M):
        assert "BOOKENDS_NO_MAIN" in line, line
    defined = re.findall(r"^\s*#\s*define\s+(.*)", text, re.M)  # one leaves out the mains of the files it is made of
    assert defined == (["BOOKENDS_NO_MAIN"] if name in MADE_OF_OTHERS else [])


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_files_include_no_other(name):
    own = [include for include in includes(ROOT / name) if include.startswith('"')]
    kernels = [include.strip('"') for include in own if include.endswith('.cu"')]
    assert name in MADE_OF_OTHERS or not kernels
    parts = {'"%s"' % part for part in PARTS[name]}
    of_harness = {'"dev/harness/harness.h"'}
    if name[:-3] in CLASSIFIERS:
        of_harness.add('"dev/harness/classifier_options.h"')
    if name in BAGS:
        of_harness.add('"dev/harness/bags.h"')
    if name == "embedding_update.cu":
        of_harness.add('"dev/harness/updates.h"')
    assert set(own) - {'"%s"' % kernel for kernel in kernels} == {'"common.h"'} | of_harness | parts
    text = (ROOT / name).read_text()
    assert text.index("BOOKENDS_NO_MAIN") < text.index('"dev/harness/') < text.index("int main(")


def test_common_stands_alone():
    assert not [include for include in includes(ROOT / "common.h") if include.startswith('"')]
    text = (ROOT / "common.h").read_text()
    for word in ("BOOKENDS_CPU_DEVICE", "Harness", "harness", "cpu::"):
        assert word not in text, word
    assert "#include <cuda/ptx>" not in text


FAMILY_HEADERS = {"bags.h", "updates.h"}


def test_the_harness_stands_alone():
    """Its headers include common.h and each other only; those of some families, also their types."""
    headers = {path.name for path in (ROOT / "dev/harness").iterdir()}
    for name in headers:
        own = {include.strip('"') for include in includes(ROOT / "dev/harness" / name) if include.startswith('"')}
        types = {"../../parts/embedding_table.h"} if name in FAMILY_HEADERS else set()
        assert own <= headers | {"../../common.h"} | types, name
    own = {include.strip('"') for include in includes(ROOT / "dev/harness/harness.h") if include.startswith('"')}
    assert own == headers - {"harness.h", "classifier_options.h", *FAMILY_HEADERS} | {"../../common.h"}


def test_the_makefile_knows_every_kernel():
    line = re.search(r"^KERNELS := (.*)$", (ROOT / "Makefile").read_text(), re.M).group(1)
    assert sorted(line.split()) == kernel_names()
