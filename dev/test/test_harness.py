"""The harness (dev/harness) finds what is wrong: planted.cu's versions, each with one fault; and its inputs."""

import json
import os
import pty
import re
import select
import subprocess
import tempfile
import time

import numpy as np
import pytest

import bookends
from bookends import DTYPES, FP32

# version: largest error in ulps
RIGHT = {1: 0.0, 2: 1.0, 18: 0.0, 20: 0.0, 22: 0.0, 27: 0.0, 34: 1.0, 36: 0.0, 38: 1.0}
PROMISE = {34: "", 38: ", the same bits each time at a block size"}  # instead of: the same bits each time
SKIPPED = 4  # a wrong version, in the tests that skip one
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
    16: r"block_size 32: out: 5120 of 5120 elements not written",
    17: r"block_size 32: launch failed: invalid (configuration )?argument",
    19: r"block_size 32: out\[1,0\] is 9\..+e-07, should be 0",
    21: r"block_size 32: rounded\[0,0\] is .+, should be .+ to within 0.00781",
    23: r"block_size 32: rounded\[1,0\] is .+, should be .+",
    24: r"block_size 32: total\[0,0\] is .+, should be .+",
    25: r"block_size 32: total\[1,0\] is 1, should be .+",
    26: r"block_size 32: total: (2|4) bytes written outside it",
    28: r"block_size 32: workspace: 1 byte written outside it",
    29: r"block_size 32: workspace: 1 byte written outside it",
    # what the workspace held: poison, or on a GPU in the first launch anything
    30: r"block_size 32: first(: 1 of 128 elements not written|\[0,0\] is .*, should be .*)",
    31: r"block_size 32: out: not the same bits as the launch before",
    32: r"block_size 1024: out: not the same bits as at block_size 32",
    33: r"block_size 512: out: not the same bits as at block_size 32",
    35: r"block_size 32: rounded\[2,0\] is .+, should be .+",
    37: r"block_size 1024: out: not the same bits as the launch before",
}


def planted(*arguments, **options):
    return bookends.run("test/planted", *arguments, **options)


def check_lines(text):
    return [line for line in text.splitlines() if line.startswith("check: ")]


def refused(result, *words):
    """Refused for what the command line says: nothing on stdout, and on stderr one line with each of the words."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("planted: ") and result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def test_every_planted_version_is_tested():
    assert bookends.versions("test/planted") == sorted([*RIGHT, *WRONG])


# ---------------------------------------------------------------------------------------------------------------------
# checking

@pytest.mark.parametrize("dtype", [d.name for d in DTYPES])
@pytest.mark.parametrize("version", RIGHT)
def test_right_versions_pass(version, dtype):
    result = planted(version, "--check", "--dtype", dtype)
    assert (result.returncode, result.stderr) == (0, "")
    allowed = "1 fp32 ulp, 0 fp32 ulp" if dtype == "fp32" else "1 %s ulp, 0 fp32 ulp, 0 %s ulp" % (dtype, dtype)
    same = PROMISE.get(version, ", the same bits each time")
    assert check_lines(result.stdout) == ["check: max error %.1f beyond the bounds of float sums (allowed %s) over "
                                          "5504 elements%s: ok" %
                                          (RIGHT[version], allowed, same)]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
def test_what_counts_as_an_error(dtype):
    """In ulps: the distance from all that lies within slack of the value, rounded to the nearest, or to either side."""
    bits, least = {"fp32": (23, -149), "fp16": (10, -24), "bf16": (7, -133)}[dtype.name]
    u, tiny, inf, nan = 2.0 ** -bits, 2.0 ** least, np.inf, np.nan  # the ulp of 1; the smallest number
    top = (2 - u) * 2.0 ** (1 - least - bits)  # the largest number, and its ulp
    step = u * 2.0 ** (1 - least - bits)
    cases = [  # result, value, slack, either neighbour: the error
        (1, 1, 0, 0, 0), (1 + u, 1, 0, 0, 1), (1 - u / 2, 1, 0, 0, 0.5), (1 + 5 * u, 1, 0, 0, 5), (-1, 1, 0, 0, 2 / u),
        (1, 1 + u / 4, 0, 0, 0), (1 + u, 1 + u / 4, 0, 0, 1), (1 + u, 1 + u * 0.75, 0, 0, 0),
        (1 + u, 1, u, 0, 0), (1 - u, 1, u, 0, 0), (1 + 2 * u, 1, u, 0, 1), (1 + u, 1, u / 4, 0, 1),
        (2, 2 - u, u / 4, 0, 1), (2, 2 - u, u, 0, 0), (3, 1, 1, 0, 0.5 / u),
        (1, 1 + u / 4, 0, 1, 0), (1 + u, 1 + u / 4, 0, 1, 0), (1 + 2 * u, 1 + u / 4, 0, 1, 1),
        (1 - u / 2, 1 + u / 4, 0, 1, 0.5), (1 + u, 1, 0, 1, 1), (1 - u / 2, 1, u / 100, 1, 0),
        (1 + u, 1, u / 100, 1, 0), (1 + 3 * u, 1 + u, u * 1.5, 1, 0), (1 + 4 * u, 1 + u, u * 1.5, 1, 1),
        (0, 0, 0, 0, 0), (tiny, 0, 0, 0, 1), (-3 * tiny, 0, 0, 0, 3), (u, 0, 0, 0, u / tiny), (0, tiny, 0, 0, 1),
        (tiny, 0, tiny, 0, 0), (tiny, tiny / 4, 0, 0, 1), (tiny, tiny / 4, 0, 1, 0), (0, tiny / 4, 0, 1, 0),
        (2 * tiny, tiny / 4, 0, 1, 1), (-tiny, tiny / 4, 0, 1, 1), (0, 0, 0, 1, 0), (tiny, 0, 0, 1, 1),
        (top, top, 0, 0, 0), (inf, top, 0, 0, inf), (top, top + step, 0, 0, inf), (inf, top + step, 0, 0, 0),
        (inf, top, step, 0, 0), (top, top, step, 0, 0), (top - 2 * step, top, step, 0, 1), (-inf, top, step, 0, inf),
        (inf, top + step / 4, 0, 1, 0), (top, top + step / 4, 0, 1, 0), (top - step, top + step / 4, 0, 1, 1),
        (inf, top, 0, 1, inf), (top, 2 * top, 0, 1, 0), (inf, 2 * top, 0, 1, 0),
        (inf, inf, 0, 0, 0), (inf, inf, inf, 0, 0), (-inf, inf, inf, 0, inf), (top, inf, inf, 0, inf),
        (inf, inf, inf, 1, 0), (top, inf, 0, 1, inf), (inf, 1, 0, 0, inf), (inf, 1, 1, 1, inf),
        (nan, nan, 0, 0, 0), (nan, nan, nan, 1, 0), (nan, 1, 1, 0, inf), (nan, inf, inf, 0, inf), (1, nan, 0, 0, inf),
        (inf, nan, 0, 0, inf), (1, 1, nan, 0, inf), (1, 1, nan, 1, inf),
    ]
    cases += [(-result, -value, slack, either, error) for result, value, slack, either, error in cases]
    lines = "".join("%s %r %r %r %d\n" % (dtype.name, float(result), float(value), float(slack), either)
                    for result, value, slack, either, _ in cases)
    result = planted(env={**os.environ, "PLANTED_ULPS": "1"}, input=lines)
    answers = [float(line) for line in result.stdout.splitlines()]
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers):
        assert answer == case[-1], (case, answer)


def test_a_fault_at_one_block_size_only():
    assert planted(8, "--check", "--block-size", 512).returncode == 0
    assert planted(8, "--check", "--block-size", 1024).returncode == 1


def test_reproducible_at_one_block_size():
    """Two launches there as well; what differs between block sizes is not asked."""
    result = planted(31, "--check", "--block-size", 256)
    assert result.returncode == 1 and "block_size 256: out: not the same bits as the launch before" in result.stdout
    for version, error in ((32, 1.0), (34, 1.0), (38, 1.0), (33, 0.0)):
        line, = check_lines(planted(version, "--check", "--block-size", 1024 if error else 512).stdout)
        assert line.startswith("check: max error %.1f " % error) and line.endswith(": ok")


def test_the_last_bytes_count():
    """Of an output that is no multiple of 8 bytes: 30, in 16-bit types."""
    for dtype in DTYPES:
        result = planted(31, "--check", "-b", 1, "-t", 3, "-c", 5, "--dtype", dtype.name)
        assert "out: not the same bits as the launch before" in result.stdout


def test_outputs_that_are_added_to():
    """Timing adds on and on; a check starts from the initial values, and from poison where there are none."""
    assert planted(1, "--repeat", 3).returncode == 0
    lines = [check_lines(planted(version, "--check", "--overwrite").stdout)[0] for version in (1, 24, 25, 26)]
    assert lines[0].endswith(": ok")
    assert lines[1] == "check: block_size 32: total: 128 of 128 elements not written: WRONG"
    assert re.fullmatch(r"check: block_size 32: total\[1,0\] is 1, should be .+: WRONG", lines[2])
    assert re.fullmatch(r"check: block_size 32: total: \d bytes written outside it: WRONG", lines[3])


def test_what_is_used_up_is_there_again(tmp_path):
    """For each cold run: in the end the total holds what was added since the last of them, however many there were."""
    def total(*arguments):
        result = planted(1, "--bench", "--block-size", 256, "--dtype", "fp32", *arguments,
                         env={**os.environ, "PLANTED_DUMP": str(tmp_path / "dump")})
        assert result.returncode == 0, result
        return np.fromfile(str(tmp_path / "dump.total"), np.float32)[:-1:2]

    kept = [total("--repeat", repeat, "--used-up") for repeat in (1, 7)]
    grown = [total("--repeat", repeat) for repeat in (1, 7)]
    assert (kept[0] == kept[1]).all() or bookends.DEVICE == "cuda"  # where the number of hot runs hangs on the times
    assert (grown[0] != grown[1]).mean() > 0.9 and (grown[1] != kept[1]).mean() > 0.9


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


def test_brief_marks_faults_and_goes_on():
    env = {**os.environ, "PLANTED_SKIP": " %d " % SKIPPED}
    result = planted("all", "--brief", "--check", env=env)
    assert result.returncode == 1
    rows = {int(line.split()[0]): line.split()[-1] for line in result.stdout.splitlines() if re.match(r"\d+ ", line)}
    assert rows == {version: "skipped" if version == SKIPPED else "ok" if version in RIGHT else "WRONG"
                    for version in sorted([*RIGHT, *WRONG])}
    assert result.stdout.splitlines()[-1].endswith(": WRONG")
    assert len([line for line in result.stdout.splitlines() if re.match("check: .*: WRONG$", line)]) == len(WRONG) - 1


def test_a_failed_launch_is_not_timed():
    result = planted(17, "--bench")
    assert (result.returncode, result.stderr) == (1, "")
    assert re.search("block_size 32: launch failed: invalid (configuration )?argument: WRONG\n", result.stdout)
    assert "<- best" not in result.stdout


def test_skipped_versions():
    """Neither checked nor timed, and no failure: here all the wrong ones."""
    skip = {**os.environ, "PLANTED_SKIP": " %s " % " ".join(map(str, WRONG))}
    result = planted("all", "--block-size", 256, "--repeat", 1, "--json", "-", env=skip)
    assert result.returncode == 0, result
    lines, reason = result.stderr.splitlines(), "it is not to \"run\""
    for version in WRONG:
        heading = [i for i, line in enumerate(lines) if line.startswith("planted %d " % version)]
        assert lines[heading[0] + 1] == "skipped: " + reason and lines[heading[0] + 2].startswith("planted ")
    table = {int(line.split()[0]): line for line in lines if re.match(r"\d+ ", line)}
    assert list(table) == sorted([*RIGHT, *WRONG])
    records = {record["version"]: record for record in map(json.loads, result.stdout.splitlines())}
    assert list(records) == list(table)
    for version, record in records.items():
        assert table[version].endswith(" skipped") == (version in WRONG)
        assert record["skipped"] == (reason if version in WRONG else None)
        assert (record["ok"], record["checked"]) == ((None, False) if version in WRONG else (True, True))
        for key in "time_ms_min time_ms_median time_ms_p90 time_ms_hot gbps max_error".split():
            assert (record[key] is None) == (version in WRONG), key
        assert set(record) == set(records[1])
    found = planted("all", "--check", "--json", "-", env={**os.environ, "PLANTED_SKIP": " 4 "}).stdout.splitlines()
    assert [json.loads(line)["ok"] for line in found[:5]] == [True, True, False, None, False]


def test_the_one_version_asked_for_is_skipped(tmp_path):
    skip = {**os.environ, "PLANTED_SKIP": " 1 "}
    path = tmp_path / "new"
    for arguments in ([1], [1, "--check"], [1, "--bench", "--json", path]):
        refused(planted(*arguments, env=skip), 'version 1: it is not to "run"')
    assert not path.exists()
    assert planted(2, "--check", env=skip).returncode == 0 and planted(0, env=skip).returncode == 0


def test_names_are_quoted_in_json():
    listed = planted("--list", "--json", "-").stdout.splitlines()[17]
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
    line, = check_lines(result.stdout)
    compared = int(re.search(r"over (\d+) elements of sampled rows, the same bits each time: ok", line).group(1))
    assert 1e8 < compared < rows * 1001 / 4
    for version in (3, 4, 5, 7, 9, 11):
        assert planted(version, *arguments).returncode == 1, version


# ---------------------------------------------------------------------------------------------------------------------
# options of a binary's own

@pytest.mark.parametrize("arguments, grad_dtype, overwrite, heading", [
    ([], "same", False, ""),
    (["--grad-dtype", "same"], "same", False, ""),
    (["--grad-dtype", "fp32"], "fp32", False, " grad_dtype=fp32"),
    (["--overwrite"], "same", True, " overwrite"),
    (["--overwrite", "--overwrite", "--grad-dtype", "fp32", "--grad-dtype", "same"], "same", True, " overwrite"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_choices(arguments, grad_dtype, overwrite, heading):
    result = planted(1, "--block-size", 256, "--repeat", 1, "--json", "-", *arguments)
    assert result.returncode == 0, result
    assert result.stderr.splitlines()[1].endswith(" bf16 tokens=uniform" + heading)
    record = json.loads(result.stdout)
    assert (record["grad_dtype"], record["overwrite"]) == (grad_dtype, overwrite)
    assert record["flops"] == 2 + (grad_dtype == "fp32")  # as planted.cu hands it on
    assert planted(24, "--check", *arguments).stdout.count("not written") == overwrite


def test_bad_choices():
    for value in ("fp64", "", "FP32", "--overwrite"):
        refused(planted(1, "--grad-dtype", value), "--grad-dtype", "'%s'" % value, "same, fp32")
    refused(planted(1, "--grad-dtype"), "--grad-dtype", "value")
    refused(planted(1, "--overwrite=1"), "'--overwrite=1'", "takes no value")
    refused(planted(1, "--grad-dtype=fp64"), "--grad-dtype", "'fp64'", "same, fp32")
    refused(planted(1, "--overwrite", "fp32"), "'fp32'")
    refused(planted(1, "--overwrite", "--grad-dtype", "fp32"), "--overwrite", "--grad-dtype fp32")


def test_choices_in_help():
    text = planted("--help").stdout
    assert re.search(r"^  --grad-dtype VALUE +changes .+: same, fp32; default same$", text, re.M)
    assert re.search(r"^  --overwrite +the .+$", text, re.M)
    assert re.search(r"^  --more-bytes NUMBER +changes .+; default 0$", text, re.M)
    assert re.search(r"^  --more-flops INT +changes .+; default 2$", text, re.M)


@pytest.mark.parametrize("arguments, more_bytes, more_flops, heading", [
    ([], 0, 2, ""),
    (["--more-bytes", "0", "--more-flops", "2"], 0, 2, ""),
    (["--more-bytes", "0.25"], 0.25, 2, " more_bytes=0.25"),
    (["--more-bytes", "-1.05e1", "--more-flops", "0"], -10.5, 0, " more_bytes=-10.5 more_flops=0"),
    (["--more-bytes", "+1e6", "--more-flops", "100"], 1e6, 100, " more_bytes=1000000 more_flops=100"),
    (["--more-bytes", ".5", "--more-bytes", "3."], 3, 2, " more_bytes=3"),
    (["--more-bytes=-3.5", "--more-flops=7"], -3.5, 7, " more_bytes=-3.5 more_flops=7"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_numbers(arguments, more_bytes, more_flops, heading):
    result = planted(1, "--block-size", 256, "--repeat", 1, "--json", "-", *arguments)
    assert result.returncode == 0, result
    assert result.stderr.splitlines()[1].endswith(" bf16 tokens=uniform" + heading)
    record = json.loads(result.stdout)
    assert (record["more_bytes"], record["more_flops"], record["flops"]) == (more_bytes, more_flops, more_flops)


def test_bad_numbers():
    for value in ("", " 1", "1 ", "x", "1x", "0x10", "nan", "inf", "-inf", "1e", "--1", "1,5", "-10.6", "1000001",
                  "1e999", "--overwrite"):
        refused(planted(1, "--more-bytes", value), "--more-bytes", "'%s'" % value, "number from -10.5 to 1e+06")
    for value in ("", "1.5", "1e1", "-1", "101", "x"):
        refused(planted(1, "--more-flops", value), "--more-flops", "'%s'" % value, "integer from 0 to 100")
    for option in ("--more-bytes", "--more-flops"):
        refused(planted(1, option), option, "value")


@pytest.mark.parametrize("arguments, note, heading", [
    ([], "none", ""), (["--note", "none"], "none", ""), (["--note", "a \"b\" 10%"], 'a "b" 10%', ' note=a "b" 10%'),
    (["--note", "x", "--note", "--overwrite"], "--overwrite", " note=--overwrite"), (["--note", ""], "", " note="),
    (["--note=a=b"], "a=b", " note=a=b"), (["--note="], "", " note="),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_texts(arguments, note, heading):
    result = planted(1, "--block-size", 256, "--repeat", 1, "--json", "-", *arguments)
    assert result.returncode == 0, result
    assert result.stderr.splitlines()[1].endswith(" bf16 tokens=uniform" + heading)
    assert json.loads(result.stdout)["note"] == note
    refused(planted(1, "--note"), "--note", "value")
    assert re.search(r"^  --note TEXT +changes nothing; default none$", planted("--help").stdout, re.M)


# ---------------------------------------------------------------------------------------------------------------------
# a sweep instead of block sizes, and a baseline

SWEEP = {**os.environ, "PLANTED_SWEEP": "1"}


def test_sweep():
    skip = {**SWEEP, "PLANTED_SKIP": " %s " % " ".join(map(str, WRONG))}
    result = planted("all", "--repeat", 3, "--json", "-", env=skip)
    assert result.returncode == 0, result
    lines = result.stderr.splitlines()
    timed = [line for line in lines if line.startswith("note ")]
    assert len(timed) == 2 * len(RIGHT)
    for i, line in enumerate(timed):
        assert re.fullmatch(r"%s \| time \d+\.\d{4} ms \| \d+\.\d [TGM]FLOP/s \| \d+\.\d{3}x the copies%s(  <- best)?" % (
            ("note one      ", "note the other")[i % 2], (r"", r" \| twice as much")[i % 2]), line), line
    head = r"^version +name +at +time \(ms\) +[TGM]FLOP/s +x the copies  twice it +x version 1$"
    assert re.search(head, result.stderr, re.M)
    table = [line for line in lines if re.match(r"\d+ ", line) and not line.endswith("skipped")]
    ends = {"one": "       0.0", "the other": "       2.0"}  # a figure that has a column, at the best setting
    assert [int(line.split()[0]) for line in table] == list(RIGHT)
    for line in table:
        figure = line[:-len("  x version 1")]
        assert figure.endswith(ends["the other" if " the other " in line else "one"]), line
    records = [json.loads(line) for line in result.stdout.splitlines()]
    records = [record for record in records if record["skipped"] is None]
    assert [record["at"] for record in records] == ["note one", "note the other"] * len(RIGHT)
    assert [record["note"] for record in records] == ["one", "the other"] * len(RIGHT)
    for record in records:
        assert record["block_size"] == 0 and record["version_again"] == record["version"]
        assert record["twice"] == 2 * (record["at"] == "note the other")
        assert record["copies_ms"] > 0
        assert record["ratio_to_copies"] == pytest.approx(record["time_ms_median"] / record["copies_ms"], rel=1e-3)
    assert sum(record["best"] for record in records) == len(RIGHT)


def test_sweeps_are_checked():
    """Each setting, twice where the same bits are promised; a fault is found as with block sizes."""
    result = planted(1, "--check", "--json", "-", env=SWEEP)
    record = json.loads(result.stdout)
    assert (result.returncode, record["at"], record["copies_ms"], record["ratio_to_copies"]) == (0, None, None, None)
    result = planted(3, "--check", env=SWEEP)
    assert result.returncode == 1 and re.search(r"^check: note one: out.*: WRONG$", result.stdout, re.M)
    result = planted(17, "--bench", env=SWEEP)
    assert result.returncode == 1 and re.search("^note one: launch failed: .*: WRONG$", result.stdout, re.M), result
    assert planted(1, env=SWEEP).returncode == planted(0, env=SWEEP).returncode == 0


def test_sweeps_replace_block_sizes():
    refused(planted(1, "--block-size", 256, env=SWEEP), "'--block-size'")
    assert "--block-size" not in planted("--help", env=SWEEP).stdout
    assert "--block-size" in planted("--help").stdout


def test_rows_that_the_reference_does_not_know():
    """They are not compared, nor counted; but they have to be written."""
    assert planted(13, "--check").returncode == 1
    unknown = {**os.environ, "PLANTED_UNKNOWN": "1"}
    known, result = planted(1, "--check"), planted(13, "--check", env=unknown)
    assert result.returncode == 0 and "of sampled rows" in result.stdout and "of sampled rows" not in known.stdout
    counts = [int(re.search(r"over (\d+) elements", output.stdout).group(1)) for output in (known, result)]
    assert counts[0] - counts[1] == 1


@pytest.mark.parametrize("flops, unit", [(0, "MFLOP/s"), (100, "[MGT]FLOP/s")])
def test_rates_have_a_unit_that_fits(flops, unit):
    """The number in the line and in the table is at least 1, and is the one of the JSON record."""
    skip = {**SWEEP, "PLANTED_SKIP": " %s " % " ".join(map(str, WRONG))}
    result = planted("all", "--bench", "--repeat", 1, "--more-flops", flops, "--json", "-", env=skip)
    assert result.returncode == 0, result
    timed = re.findall(r"^note (?:one|the other) +\|.* (\d+\.\d) (.FLOP/s) ", result.stderr, re.M)
    records = [json.loads(line) for line in result.stdout.splitlines()]
    records = [record for record in records if record["skipped"] is None]
    assert len(timed) == len(records) and re.search(r"^version .* %s " % unit, result.stderr, re.M)
    for (number, its), record in zip(timed, records):
        rate = (record["tflops"] or 0) * {"M": 1e6, "G": 1e3, "T": 1}[its[0]]
        assert float(number) == pytest.approx(rate, abs=0.06) and (rate >= 1 or its == "MFLOP/s")


# ---------------------------------------------------------------------------------------------------------------------
# progress

def slow(*arguments, milliseconds, seconds=None, terminal=True):
    """(status, stdout, stderr) of a run whose launches sleep so long; the status is None if it is ended after some
    seconds, or as soon as it has announced something."""
    main_end, its_end = pty.openpty() if terminal else os.pipe()
    command = [str(bookends.BUILD / "test/planted"), *map(str, arguments)]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out, stderr=its_end,
                                   env={**os.environ, "PLANTED_SLEEP_MS": str(milliseconds)})
        os.close(its_end)
        text, start, ended = b"", time.monotonic(), False
        while not ended:
            if seconds and (time.monotonic() - start > seconds or b"takes about" in text):
                process.kill()
                break
            if select.select([main_end], [], [], 0.1)[0]:
                try:
                    some = os.read(main_end, 65536)
                except OSError:  # a terminal at its end
                    some = b""
                text, ended = text + some, some == b""
        status = process.wait()
        os.close(main_end)
        out.seek(0)
        return None if status < 0 else status, out.read().decode(), text.decode().replace("\r\n", "\n")


def test_progress_on_a_terminal():
    """From the third second on, one line that is drawn over itself and erased; the report is as without it."""
    status, out, err = slow(1, "--check", milliseconds=700)  # seven launches
    assert status == 0 and out.splitlines() == planted(1, "--check").stdout.splitlines()
    lines = err.split("\r\x1b[K")
    assert lines[0] == "" and lines[-1] == "" and len(lines) > 5, err
    for line in lines[1:-1]:
        match = re.fullmatch(r"planted: version 1: check (\d+)%( \| \w+ \d+%)? \| (\d) s(, about \d+ s left)?", line)
        assert match and int(match.group(3)) >= 2, line
        assert (match.group(4) is None) == (match.group(1) == "0"), line
    shares = [int(re.search(r"(\d+)%", line).group(1)) for line in lines[1:-1]]
    assert shares == sorted(shares) and 0 < shares[-1] < 100 and len(set(shares)) > 2


def test_no_progress_elsewhere():
    """Neither without a terminal nor before the third second."""
    assert slow(1, "--check", milliseconds=700, terminal=False)[::2] == (0, "")
    assert slow(1, "--check", milliseconds=100)[::2] == (0, "")


@pytest.mark.parametrize("terminal", [False, True])
def test_work_of_more_than_a_minute_is_announced(terminal):
    """By one line with an estimate: 1 + 500 + 6 launches (3, in the graphs) of 0.5 s."""
    status, _, err = slow(1, "--bench", "--repeat", 500, "--block-size", 256, milliseconds=500, seconds=60,
                          terminal=terminal)
    announced = re.findall(r"^(?:.*\x1b\[K)?planted: version 1: timing takes about (\d) min$", err, re.M)
    assert status is None and len(announced) == 1 and 3 <= int(announced[0]) <= 8, err
    if not terminal:
        assert err.count("\n") == 1, err


def test_a_refusal_erases_the_progress():
    status, out, err = slow(1, "--check", "--json", "/dev/full/x", milliseconds=0)
    assert (status, out) == (2, "") and err.startswith("planted: --json: ") and err.count("\n") == 1


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


@pytest.mark.parametrize("source", ["uniform", "zipf", "one", "sorted", "padded"])
def test_ids_come_from_the_seed(source, tmp_path):
    for V in (1, 2, 100, 50257):
        arguments = [*SOME, "-v", V, "--tokens", source]
        ids = inputs(tmp_path, *arguments)[0]
        assert len(ids) == N and ids.min() >= 0 and ids.max() < V
        assert (inputs(tmp_path, *arguments)[0] == ids).all()
        assert (inputs(tmp_path, *arguments, "--seed", 42)[0] == ids).all()
        others = [inputs(tmp_path, *arguments, "--seed", seed)[0] for seed in (0, 1, 43, 2**62)]
        for other in others if source != "one" and V > 1 else []:
            assert (other != ids).mean() > (0.2 if source in ("uniform", "zipf") else 0)
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


def test_sorted(tmp_path):
    """The uniform ids of the same seed, in ascending order."""
    for V in (2, 1000, 50257):
        ids = inputs(tmp_path, *SOME, "-v", V, "--tokens", "sorted")[0]
        assert (ids == np.sort(inputs(tmp_path, *SOME, "-v", V)[0])).all()


def test_targets(tmp_path):
    """Those of a file are the ids after its first N; every third is ignored, wherever they come from."""
    plain = inputs(tmp_path, *SOME, "-v", 50257)[0]
    targets = inputs(tmp_path, *SOME, "-v", 50257, "--targets")[0]
    assert (targets[2::3] == -100).all()
    assert (np.delete(targets, slice(2, None, 3)) == np.delete(plain, slice(2, None, 3))).all()
    ids, shape = np.arange(10, 30), ["-b", 2, "-t", 7, "-c", 2]
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path = tmp_path / "ids.bin"
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    assert (inputs(tmp_path, *shape, "--tokens", path)[0] == ids[:14]).all()
    got = inputs(tmp_path, *shape, "--tokens", path, "--targets")[0]
    assert (got == np.where(np.arange(14) % 3 == 2, -100, ids[1:15])).all()
    assert len(inputs(tmp_path, "-b", 1, "-t", 19, "-c", 2, "--tokens", path, "--targets")[0]) == 19
    assert planted(1, "--check", "-b", 1, "-t", 20, "-c", 2, "--tokens", path).returncode == 0
    refused(planted(1, "-b", 1, "-t", 20, "-c", 2, "--tokens", path, "--targets"), "20 tokens", "B*T + 1 = 21")


def test_padded(tmp_path):
    """One id in nine positions of ten, anywhere; the others are zipf's of the same seed."""
    for V in (10, 50257):
        ids = inputs(tmp_path, *SOME, "-v", V, "--tokens", "padded")[0]
        others = inputs(tmp_path, *SOME, "-v", V, "--tokens", "zipf")[0]
        padding = ids == np.bincount(ids).argmax()
        assert (ids == others)[~padding].all()
        drawn = padding & (others != ids)  # not those where zipf has the padding's id by itself
        expected = 0.9 * (others != ids[padding][0]).sum()
        assert abs(drawn.sum() - expected) < 6 * (0.1 * expected) ** 0.5
        assert abs(np.corrcoef(padding[1:], padding[:-1])[0, 1]) < 6 * N ** -0.5


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
