"""The harness (dev/harness.h) finds what is wrong: planted.cu's versions, each with one fault; and its inputs."""

import json
import os
import re

import numpy as np
import pytest

import bookends
from bookends import DTYPES, FP32

RIGHT = {1: 0.0, 2: 1.0, 18: 0.0}  # version: largest error in ulps
WRONG = {
    3: r"block_size 32: out\[127,19\] is .+, should be .+",
    4: r"block_size 32: out: 1 of 5120 elements not written",
    5: r"block_size 32: out: (2|4) bytes? written outside it",
    6: r"block_size 32: out: 1 bytes? written outside it",
    7: r"block_size 32: out: (2|4) bytes? written outside it",
    8: r"block_size 1024: out\[127,19\] is .+, should be .+",
    9: r"block_size 32: out\[127,19\] is nan, should be .+",
    10: r"block_size 32: out\[127,19\] is -inf, should be .+",
    11: r"block_size 32: out\[0,0\] is 1, should be nan",
    12: r"block_size 32: out\[0,1\] is -inf, should be inf",
    13: r"block_size 32: first\[127,0\] is 2, should be .+",
    14: r"block_size 32: .*status word.* position 5.*",
    15: r"block_size 32: out: 5120 of 5120 elements not written",
    16: r"block_size 64: out: 5120 of 5120 elements not written",
    17: r"block_size 32: launch failed: invalid (configuration )?argument",
}


def planted(*arguments, **options):
    return bookends.run("test/planted", *arguments, **options)


def check_lines(text):
    return [line for line in text.splitlines() if line.startswith("check: ")]


def test_every_planted_version_is_tested():
    assert bookends.versions("test/planted") == sorted([*RIGHT, *WRONG])


# ---------------------------------------------------------------------------------------------------------------------
# checking

@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
@pytest.mark.parametrize("version", RIGHT)
def test_right_versions_pass(version, dtype):
    result = planted(version, "--check", "--dtype", dtype)
    assert (result.returncode, result.stderr) == (0, "")
    assert check_lines(result.stdout) == ["check: max error %.1f (allowed 1 %s ulp) over 5248 elements: ok" %
                                          (RIGHT[version], dtype)]


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
@pytest.mark.parametrize("version", WRONG)
def test_faults_are_found(version, dtype, tmp_path):
    path = tmp_path / "out.jsonl"
    result = planted(version, "--dtype", dtype, "--json", path)
    assert result.returncode == 1, result
    line, = check_lines(result.stdout)
    assert re.fullmatch("check: %s: WRONG" % WRONG[version], line), line
    assert "block_size   32 |" not in result.stdout  # what is wrong is not timed
    record, = map(json.loads, path.read_text().splitlines())
    assert record["version"] == version and record["ok"] is False and record["time_ms_median"] is None


def test_the_size_of_an_error():
    """A number two ulps off is 2.0, whatever the type."""
    for dtype in DTYPES:
        record = json.loads(planted(3, "--check", "--dtype", dtype.name, "--json", "-").stdout)
        assert (record["max_error"], record["allowed_error"]) == (2, 1)


def test_a_fault_at_one_block_size_only():
    assert planted(8, "--check", "--block-size", 512).returncode == 0
    assert planted(8, "--check", "--block-size", 1024).returncode == 1


def test_all_goes_on_after_a_fault():
    """One version's fault is not laid at the next one's door."""
    result = planted("all", "--check", "--json", "-")
    assert result.returncode == 1
    lines = check_lines(result.stderr)
    assert len(lines) == len(RIGHT) + len(WRONG)
    records = {record["version"]: record for record in map(json.loads, result.stdout.splitlines())}
    assert list(records) == sorted([*RIGHT, *WRONG])
    for version, line in zip(records, lines):
        assert line.endswith(": ok" if version in RIGHT else ": WRONG"), (version, line)
        assert records[version]["ok"] == (version in RIGHT), version


def test_a_failed_launch_is_not_timed():
    result = planted(17, "--bench")
    assert (result.returncode, result.stderr) == (1, "")
    assert re.search("block_size 32: launch failed: invalid (configuration )?argument: WRONG\n", result.stdout)
    assert "<- best" not in result.stdout


def test_names_are_quoted_in_json():
    listed = planted("--list", "--json", "-").stdout.splitlines()[-1]
    for line in (listed, planted(18, "--check", "--json", "-").stdout):
        record = json.loads(line)
        assert record["version"] == 18 and record["name"] == 'a "right" \\ one'


def test_shapes_of_one_row():
    for arguments in (["-b", 1, "-t", 1, "-c", 5], ["-b", 1, "-t", 1, "-c", 100003], ["-b", 3, "-t", 11111, "-c", 2]):
        assert planted(1, "--check", *arguments).returncode == 0
        for version in (3, 4, 5, 7, 9, 13):
            assert planted(version, "--check", *arguments).returncode == 1, (version, arguments)


@pytest.mark.skipif(bookends.DEVICE != "cuda", reason="takes minutes on the CPU")
def test_large_outputs_are_sampled():
    """Over 2e9 elements: a sample of the rows, the first and the last ones among them; guards and holes in full."""
    arguments = ["--check", "-b", 2048, "-t", 1024, "-c", 1001, "--block-size", 256]
    rows = 2048 * 1024
    if bookends.available_bytes() < 5 * rows * 1001:
        pytest.skip("needs 10 GB of device memory")
    result = planted(1, *arguments)
    assert result.returncode == 0
    compared = int(re.search(r"over (\d+) elements of sampled rows: ok", result.stdout).group(1))
    assert 1e8 < compared < rows * 1001 / 4
    for version in (3, 4, 5, 7, 9, 11):
        assert planted(version, *arguments).returncode == 1, version


# ---------------------------------------------------------------------------------------------------------------------
# inputs

def inputs(folder, *arguments, dtype=FP32):
    """(ids, values) of a run, as they were on the device."""
    result = planted(1, "--check", "--dtype", dtype.name, *arguments,
                     env={**os.environ, "PLANTED_DUMP": str(folder / "dump")})
    assert result.returncode == 0, result
    values = np.fromfile(str(folder / "dump.inp"), dtype.bits)
    return np.fromfile(str(folder / "dump.ids"), "<i4"), bookends.from_bits(values, dtype)


def distinct_by_json(*arguments):
    """planted.cu hands the harness's count of distinct ids on as the bytes to move."""
    result = planted(1, "--bench", "--repeat", 1, "--block-size", 256, "--json", "-", *arguments)
    return json.loads(result.stdout)["bytes"]


SOME = ["-b", 64, "-t", 512, "-c", 2]
N = 64 * 512


@pytest.mark.parametrize("source", ["uniform", "zipf", "one"])
def test_ids_come_from_the_seed(source, tmp_path):
    for V in (1, 2, 100, 50257):
        arguments = [*SOME, "-v", V, "--tokens", source]
        ids = inputs(tmp_path, *arguments)[0]
        assert len(ids) == N and ids.min() >= 0 and ids.max() < V
        assert (inputs(tmp_path, *arguments)[0] == ids).all()
        assert (inputs(tmp_path, *arguments, "--seed", 42)[0] == ids).all()
        others = [inputs(tmp_path, *arguments, "--seed", seed)[0] for seed in (0, 1, 43, 2**62)]
        for other in others if source != "one" and V > 1 else []:
            assert (other != ids).mean() > 0.2
        assert distinct_by_json(*arguments) == len(np.unique(ids))


def test_one(tmp_path):
    for V in (1, 7, 50257):
        assert len(np.unique(inputs(tmp_path, *SOME, "-v", V, "--tokens", "one")[0])) == 1


def test_uniform(tmp_path):
    """Even over the table: chi-square within 6 of its standard deviations, and as many distinct ids as chance gives."""
    for V in (2, 64, 1000):
        ids = inputs(tmp_path, *SOME, "-v", V)[0]
        counts = np.bincount(ids, minlength=V)
        assert abs(((counts - N / V) ** 2 / (N / V)).sum() - (V - 1)) < 6 * (2 * (V - 1)) ** 0.5
        assert abs(np.corrcoef(ids[1:], ids[:-1])[0, 1]) < 6 * N ** -0.5
    V = 50257
    expected = V * (1 - (1 - 1 / V) ** N)
    assert abs(len(np.unique(inputs(tmp_path, *SOME, "-v", V)[0])) - expected) < 6 * expected ** 0.5


def test_zipf(tmp_path):
    """The r-th most frequent id comes up r^-1.1 as often as the first, whichever id that is."""
    for V in (10, 1000, 50257):
        weights = np.arange(1, V + 1) ** -1.1
        weights /= weights.sum()
        ids = inputs(tmp_path, *SOME, "-v", V, "--tokens", "zipf")[0]
        counts = np.sort(np.bincount(ids, minlength=V))[::-1]
        for ranks in (slice(0, 1), slice(1, 2), slice(2, 5), slice(5, 10), slice(0, 100)):
            expected = N * weights[ranks].sum()
            assert abs(counts[ranks].sum() - expected) < 6 * expected ** 0.5 + 0.02 * expected, (V, ranks)
        expected = (1 - (1 - weights) ** N).sum()
        assert abs(len(np.unique(ids)) - expected) < 6 * expected ** 0.5, V
    hot = [np.bincount(inputs(tmp_path, *SOME, "-v", V, "--tokens", "zipf", "--seed", seed)[0]).argmax()
           for seed in range(8)]
    assert len(set(hot)) > 4 and np.ptp(hot) > V / 4  # shuffled


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_values(dtype, tmp_path):
    """Uniform in [-1, 1), and unlike those of another stream (-p, in planted.cu) or another seed."""
    arguments = ["-b", 8, "-t", 512, "-c", 16]
    values = inputs(tmp_path, *arguments, dtype=dtype)[1]
    count = len(values)
    assert count == 8 * 512 * 16 and values.min() >= -1 and values.max() <= 1
    assert values.min() < -0.99 and values.max() > 0.99
    assert abs(values.mean()) < 6 * (1 / 3 / count) ** 0.5
    assert abs((values ** 2).mean() - 1 / 3) < 0.01
    assert abs(np.histogram(values, 16, (-1, 1))[0] - count / 16).max() < 6 * (count / 16) ** 0.5 + count / 256
    for other in (["-p", 2], ["--seed", 43], ["--seed", 0]):
        unlike = inputs(tmp_path, *arguments, *other, dtype=dtype)[1]
        assert abs(np.corrcoef(values, unlike)[0, 1]) < 6 * count ** -0.5
    if dtype is FP32:
        assert len(np.unique(values)) > count / 4
