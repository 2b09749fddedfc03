"""scripts/extract.py: the header of each version compiles in a folder of its own, and gives the library's bits."""

import ctypes
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

import bookends
from bookends import BF16, BUILD, ON_CUDA, ROOT, Array

SCRIPT = ROOT / "scripts" / "extract.py"
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
CXX = (os.environ.get("CXX") or "g++").split()
VERSIONS = {"encoder_forward": range(1, 6), "encoder_backward": range(1, 8), "embedding_lookup": range(1, 6),
            "embedding_bag": range(1, 6), "embedding_bag_backward": range(1, 5), "embedding_overwrite": range(1, 6),
            "embedding_accumulate": range(1, 5), "embedding_optimizer": range(1, 4), "classifier_fused": range(1, 6),
            "lm_head": range(1, 7)}
# The call of a version's plain function, by the names that DRIVER gives the arguments.
CALLS = {
    "encoder_forward": "out, ids, wte, wpe, status, B, T, C, V, block, stream",
    "encoder_backward": "wte, wpe, out, ids, status, workspace, B, T, C, V, {}, block, stream",
    "embedding_lookup": "out, {ids, false}, {wte, V, C}, status, (long long)B * T, C, block, stream",
    "embedding_bag": "{out, nullptr, status, {wte, V, C}, {{ids, false}, (long long)B * T, B, {}, T, nullptr, -1, {}, "
                     "nullptr, 1}, C}, block, stream",
    "embedding_bag_backward": "{wte, nullptr, nullptr, nullptr, out, nullptr, {nullptr, V, C}, {{ids, false}, "
                              "(long long)B * T, B, {}, T, nullptr, -1, {}, nullptr, 1}, C, true, status, "
                              "(char *)workspace}, block, stream",
    "embedding_overwrite": "{{wte, V, C}, {ids, false}, out, (long long)B * T, C, false, 1, false, 0, status, "
                           "(char *)workspace}, block, stream",
    "embedding_accumulate": "{{wte, V, C}, {ids, false}, out, (long long)B * T, C, false, 1, false, 0, status, "
                            "(char *)workspace}, block, stream",
    "embedding_optimizer": "{{{}, 0.1f, 0, 0, {}, {}, 1, nullptr, nullptr, nullptr}, {wte, V, C}, {ids, false}, out, "
                           "(long long)B * T, nullptr, C, false, 0, status}, block, stream",
    "classifier_fused": "out, losses, nullptr, nullptr, nullptr, out, ids, nullptr, status, B, V, C, {}, block, stream",
}
UPDATE_OPS = {"embedding_overwrite": bookends.OVERWRITE_ROWS, "embedding_accumulate": bookends.ACCUMULATE}
DRIVER = """#include "%(family)s%(version)d.cuh"
extern "C" int %(family)s%(version)d_call(__nv_bfloat16 *out, const int *ids, __nv_bfloat16 *wte, __nv_bfloat16 *wpe,
                                          float *losses, void *workspace, int B, int T, int C, int V) {
    const int block = v%(version)d::%(family)s%(version)d_block_size;
    cudaStream_t stream = 0;
    unsigned long long *status = nullptr;
    (void)wte, (void)wpe, (void)losses, (void)workspace, (void)T, (void)stream;
    return (int)v%(version)d::%(family)s%(version)d_bf16(%(call)s);
}
"""

# Makes a plan, runs it once and destroys it. In bf16, with 16-bit gradients.
HEAD_WAYS = [None, "Textbook", "Fused", "Rows", "Vocabulary", "Epilogue", "Planned"]
HEAD_DRIVER = """#include "lm_head%(version)d.cuh"
extern "C" int lm_head%(version)d_call(__nv_bfloat16 *dX, __nv_bfloat16 *dW, float *losses, const __nv_bfloat16 *X,
                                       const __nv_bfloat16 *W, const int *targets, int N, int C, int V,
                                       size_t memory) {
    using namespace v%(version)d;
    LmHeadProblem problem;
    problem.N = N, problem.C = C, problem.V = V;
    problem.type = problem.gradient_type = kBf16;
    problem.way = kLmHead%(way)s;
    problem.memory = memory;
    LmHead head;
    char *workspace = nullptr;
    int error = (int)lm_head_create(head, problem, ClassifierOptions());
    if (error == 0) error = (int)cudaMalloc((void **)&workspace, head.plan.bytes);
    const LmHeadArguments<__nv_bfloat16, __nv_bfloat16> args = {dX, dW,      nullptr, losses,  nullptr, X,
                                                                W,  nullptr, targets, nullptr, nullptr, workspace};
    if (error == 0) error = (int)lm_head%(version)d_bf16(head, args, 0);
    cudaDeviceSynchronize();
    cudaFree(workspace);
    lm_head_destroy(head);
    return error;
}
"""

unsanitized = pytest.mark.skipif(bool(bookends.SANITIZE), reason="the same whatever the sanitizer")


def extract(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True)


def write_sources(folder, family, *options, versions=None):
    """The header of each version, or of every one, and a source that calls them all. Returns its path."""
    text = ""
    for version in versions or VERSIONS[family]:
        header = folder / ("%s%d.cuh" % (family, version))
        result = extract(family, version, "--dtype", "bf16", "--namespace", "v%d" % version, "-o", header, *options)
        assert result.returncode == 0, result.stderr
        if family == "lm_head":
            text += HEAD_DRIVER % {"version": version, "way": HEAD_WAYS[version]}
        else:
            text += DRIVER % {"family": family, "version": version, "call": CALLS[family]}
    (folder / "driver.cu").write_text(text)
    return folder / "driver.cu"


def compile_for_cpu(source, *options):
    """Rewrites the sources in the folder as the CPU device wants them, and runs the compiler there."""
    folder = source.parent
    for path in [source, *folder.glob("*.cuh")]:
        path.write_text(subprocess.check_output(["sed", "-f", str(ROOT / "dev/cpu/rewrite.sed"), str(path)],
                                                universal_newlines=True))
    run_compiler([*CXX, "-std=c++17", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi",
                  "-isystem", str(ROOT / "dev/cpu"), "-x", "c++", str(source), *options], folder)


def run_compiler(command, folder):
    result = subprocess.run(command, cwd=str(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            universal_newlines=True)
    assert result.returncode == 0, result.stdout
    assert "warning" not in result.stdout, result.stdout


def load(folder, family):
    """The extracted versions as a shared library for the device."""
    source = write_sources(folder, family)
    if ON_CUDA:
        run_compiler([NVCC, "-std=c++17", "-O2", "-arch=native", "-Xcompiler=-fPIC", "-shared", str(source), "-o",
                      "driver.so", *(["-lcublasLt"] if family == "lm_head" else [])], folder)
    else:
        objects = [str(BUILD / name) for name in ("device.o", *(["cublasLt.o"] if family == "lm_head" else []))]
        compile_for_cpu(source, "-O1", "-shared", "-pthread", "-x", "none", *objects, "-ldl", "-o", "driver.so")
    return ctypes.CDLL(str(folder / "driver.so"))


@unsanitized
@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("shape", [(3, 50, 264, 1003), (5, 7, 769, 50)], ids=["aligned", "odd"])
def test_extracted_versions_give_the_bits_of_the_library(tmp_path_factory, family, shape):
    library = cached_library(tmp_path_factory, family)
    B, T, C, V = shape if family != "classifier_fused" else (shape[0], 1, 20992 + shape[2] % 8, 20992)
    rng = np.random.default_rng(B)
    rows, columns = (B * T, C) if family != "classifier_fused" else (B, C)
    out_bits = bookends.to_bits(rng.standard_normal((rows, columns)), BF16)
    distinct = family == "embedding_optimizer"
    ids = (rng.permutation(V)[:B * T] if distinct else rng.integers(0, V, B * T)).astype(np.int32)
    small = family == "classifier_fused"
    tables = [bookends.to_bits(rng.standard_normal(1 if small else n * C), BF16) for n in (V, T)]
    for version in VERSIONS[family]:
        if (version == 1 and "backward" in family or (family, version) == ("encoder_backward", 3) or
                (family == "embedding_accumulate" and version in (2, 3))):
            continue  # atomics: other bits each time; they are compiled
        results = []
        for ours in (True, False):
            out, inp = Array(rows * columns, np.uint16).put(out_bits), Array(B * T, np.int32).put(ids)
            wte, wpe = [Array(table.size, np.uint16).put(table) for table in tables]
            losses = Array(B, np.float32)
            options = bookends.BagOptions(hotness=T)
            size = 16
            if family == "encoder_backward":
                size += bookends.encoder_backward_workspace_bytes(B, T, C, V, version)
            elif family in UPDATE_OPS:
                size += bookends.embedding_update_workspace_bytes(B * T, C, V, UPDATE_OPS[family], 0, version)
            elif family == "embedding_bag_backward":
                size += bookends.embedding_bag_backward_workspace_bytes(B * T, B, C, V, options)
            workspace = Array(size, np.uint8)
            if not ours:
                code = getattr(library, "%s%d_call" % (family, version))(
                    *[ctypes.c_void_p(a.pointer) for a in (out, inp, wte, wpe, losses, workspace)], B, T, C, V)
            elif family == "encoder_forward":
                code, _ = bookends.encoder_forward(out, inp, wte, wpe, None, B, T, C, V, BF16, version)
            elif family == "encoder_backward":
                code, _ = bookends.encoder_backward(wte, wpe, out, inp, None, workspace, B, T, C, V, BF16, BF16,
                                                    version=version)
            elif family == "embedding_lookup":
                code, _ = bookends.embedding_lookup(out, inp, wte, None, B * T, C, V, C, BF16, BF16, version)
            elif family == "embedding_bag":
                code, _ = bookends.embedding_bag(out, None, inp, wte, None, B * T, B, C, V, C,
                                                 options, BF16, BF16, version)
            elif family in UPDATE_OPS:
                code, _ = bookends.embedding_update(wte, inp, out, None, workspace, B * T, C, V, C, UPDATE_OPS[family],
                                                    BF16, BF16, version=version)
            elif family == "embedding_optimizer":
                code, _ = bookends.embedding_optimizer(wte, None, None, inp, out, None, None, B * T, C, V, C,
                                                       bookends.OptimizerOptions(learning_rate=0.1), BF16, BF16,
                                                       version)
            elif family == "embedding_bag_backward":
                code, _ = bookends.embedding_bag_backward(wte, None, None, None, out, None, inp, None, None, workspace,
                                                          B * T, B, C, V, C, options, BF16, BF16, bookends.OVERWRITE,
                                                          version)
            else:
                code, _ = bookends.classifier_fused(out, losses, None, None, None, out, inp, None, None, B, V, C, None,
                                                    BF16, version)
            assert code == 0
            assert all(array.guards_intact() for array in (out, inp, wte, wpe, losses, workspace))
            results.append([array.get() for array in ((out, losses) if small else (out, wte, wpe))])
        assert all((a == b).all() for a, b in zip(*results)), version


@unsanitized
@pytest.mark.parametrize("N, C, V", [(150, 24, 304), (40, 13, 1003)], ids=["aligned", "odd"])
def test_extracted_lm_heads_give_the_bits_of_the_library(tmp_path_factory, N, C, V):
    library = cached_library(tmp_path_factory, "lm_head")
    rng = np.random.default_rng(N)
    X, W = (Array(rows * C, np.uint16).put(bookends.to_bits(rng.standard_normal(rows * C), BF16)) for rows in (N, V))
    targets = Array(N, np.int32).put(rng.integers(0, V, N).astype(np.int32))
    flags = bookends.WANT_DX | bookends.WANT_DW
    before = bookends.to_bits(rng.standard_normal(V * C), BF16)
    for version in VERSIONS["lm_head"]:
        whole = 1 << 22
        for memory in [whole] if version <= 2 else [whole, 2 * V * C * 4 + 40 * V * 2]:
            results = []
            for ours in (True, False):
                dX, dW = Array(N * C, np.uint16), Array(V * C, np.uint16).put(before)
                losses = Array(N, np.float32)
                if ours:
                    code, plan = bookends.lm_head_create(N, C, V, flags, None, memory, BF16, BF16, version)
                    assert code == 0
                    workspace = Array(bookends.library().bk_lm_head_workspace_bytes(plan), np.uint8)
                    code, _ = bookends.lm_head_run(plan, dX, dW, None, losses, None, X, W, None, targets, None, None,
                                                   workspace)
                    bookends.library().bk_lm_head_destroy(plan)
                else:
                    code = getattr(library, "lm_head%d_call" % version)(
                        *[ctypes.c_void_p(a.pointer) for a in (dX, dW, losses, X, W, targets)], N, C, V,
                        ctypes.c_size_t(memory))
                assert code == 0
                assert all(array.guards_intact() for array in (dX, dW, losses))
                results.append([array.get() for array in (dX, dW, losses)])
            assert all((a == b).all() for a, b in zip(*results)), (version, memory)
            assert (results[0][1] != before).any()


_libraries = {}


def cached_library(tmp_path_factory, family):
    if family not in _libraries:
        _libraries[family] = load(tmp_path_factory.mktemp(family), family)
    return _libraries[family]


@unsanitized
@pytest.mark.skipif(NVCC is None or ON_CUDA, reason="needs nvcc; on a GPU the test above compiles with it")
@pytest.mark.parametrize("family", VERSIONS)
def test_nvcc_compiles_the_extracted_versions(tmp_path, family):
    # The header of lm_head's version 6 has versions 3 to 5 as well.
    source = write_sources(tmp_path, family, versions=(1, 2, 6) if family == "lm_head" else None)
    run_compiler([NVCC, "-std=c++17", "-O0", "-arch=sm_90", "-Xcompiler=-Wall,-Wextra", "-c", str(source), "-o",
                  "driver.o"], tmp_path)


def test_no_fallback_leaves_the_other_versions_out(tmp_path):
    for family in ("encoder_forward", "encoder_backward", "embedding_lookup", "embedding_bag", "embedding_overwrite",
                   "embedding_accumulate", "embedding_optimizer"):
        source = write_sources(tmp_path, family, "--no-fallback")
        for version in VERSIONS[family]:
            text = (tmp_path / ("%s%d.cuh" % (family, version))).read_text()
            launchers = set(re.findall(r"^cudaError_t %s(\d+)\(" % family, text, flags=re.M))
            assert launchers == {str(version)}
        compile_for_cpu(source, "-fsyntax-only", "-Wno-unused-parameter")
        for path in tmp_path.iterdir():
            path.unlink()


def test_a_version_takes_only_what_it_needs():
    text = extract("encoder_forward", 1).stdout
    assert "encoder_forward_kernel1" in text and "encoder_forward_kernel2" not in text
    assert "encoder_forward_cpu" not in text and "Packed" not in text and '#include "' not in text
    assert "// Every launcher" in text  # the contract
    assert "cuda/ptx" not in extract("encoder_backward", 7).stdout


@pytest.mark.parametrize("arguments, message", [
    (("encoder_forward", 9), "version: '9' is none of encoder_forward's"),
    (("encoder_forward", 1, "--namespace", "a b"), "--namespace: 'a b' is not the name of a namespace"),
    (("no_such", 1), "invalid choice: 'no_such'"),
    (("encoder_forward", 1, "-o", "no/such/folder"), "no/such/folder"),
])
def test_bad_arguments_are_refused_in_a_line(arguments, message):
    result = extract(*arguments)
    assert result.returncode == 2 and message in result.stderr.splitlines()[-1] and result.stdout == ""
