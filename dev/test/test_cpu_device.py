"""Runs dev/test/cpu_device.cu's cases, one test each.

BOOKENDS_BUILD names the build directory (default build/cpu); SANITIZE says, as for make, what it was built with.
"""

import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / os.environ.get("BOOKENDS_BUILD", "build/cpu") / "test" / "cpu_device"
ADDRESS_SANITIZER = "address" in os.environ.get("SANITIZE", "")
THREAD_SANITIZER = "thread" in os.environ.get("SANITIZE", "")
READ_EARLY = ("bulk_deferred", "tensor_deferred")  # what a copy has not brought yet


def run(*arguments, **environment):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=300,
                          env={**os.environ, **environment})


def cases():
    if not PROGRAM.exists():
        return []
    return run("--list").stdout.split()


def test_is_built():
    assert PROGRAM.exists(), f"{PROGRAM} is not there: build it, or set BOOKENDS_BUILD"
    assert cases()


@pytest.mark.parametrize("case", [c for c in cases() if not c.startswith(("overrun", "race", "fault"))])
def test_case(case):
    if THREAD_SANITIZER and case in READ_EARLY:
        pytest.skip("a race on purpose")
    result = run(case)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("threads", ["1", "3"])
def test_pool_sizes(threads):
    for case in ("grid", "block_sum", "atomics", "atomics16", "atomics_vector", "host_threads", "cluster_sums",
                 "cluster_arrivals", "cluster_grid", "host_threads_clusters"):
        result = run(case, BOOKENDS_CPU_THREADS=threads)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(not ADDRESS_SANITIZER, reason="needs a build with SANITIZE=address")
@pytest.mark.parametrize("case", ["overrun_global", "overrun_shared", "overrun_bulk", "overrun_tensor"])
def test_overrun_is_seen(case):
    result = run(case)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr and "write_past" in result.stderr, result.stderr


@pytest.mark.skipif(not THREAD_SANITIZER, reason="needs a build with SANITIZE=thread")
@pytest.mark.parametrize("case", [c for c in cases() if c.startswith("race") or c in READ_EARLY])
def test_race_is_seen(case):
    result = run(case)
    if result.returncode == 77:
        pytest.skip(result.stdout.strip())
    assert result.returncode != 0
    assert "ThreadSanitizer: data race" in result.stderr, result.stderr


SEEDS = [str(seed) for seed in range(1, 9)]
ORDER_MATTERS = ("error_barrier", "error_warp", "error_partial_masks", "error_cluster")  # for an error's words


@pytest.mark.skipif(bool(os.environ.get("SANITIZE")), reason="the same whatever the sanitizer")
@pytest.mark.parametrize("case", [c for c in cases() if c.startswith("fault")])
def test_adversary_finds_the_fault(case):
    without = run(case, BOOKENDS_ADVERSARY="")
    if without.returncode == 77:
        pytest.skip(without.stdout.strip())
    results = [run(case, BOOKENDS_ADVERSARY=seed) for seed in SEEDS]
    for result in [without] + results:
        assert result.returncode in (0, 1) and "without the fault" not in result.stdout, result.stdout + result.stderr
    assert any(result.returncode == 1 for result in results), "no seed finds it"
    again = [run(case, BOOKENDS_ADVERSARY=seed) for seed in SEEDS]
    assert [r.stdout for r in again] == [r.stdout for r in results], "a seed does not decide the same way again"


@pytest.mark.skipif(bool(os.environ.get("SANITIZE")), reason="the same whatever the sanitizer")
@pytest.mark.parametrize("case", [c for c in cases() if not c.startswith(("overrun", "race", "fault"))
                                  and c not in READ_EARLY + ORDER_MATTERS])
def test_case_with_adversary(case):
    for seed in SEEDS[:2]:
        result = run(case, BOOKENDS_ADVERSARY=seed)
        if result.returncode == 77:
            pytest.skip(result.stdout.strip())
        assert result.returncode == 0, f"BOOKENDS_ADVERSARY={seed}: {result.stdout}{result.stderr}"


def test_unknown_case():
    result = run("no such case")
    assert result.returncode == 2
    assert "--list" in result.stderr
