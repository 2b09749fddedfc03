"""The command line of encoder_forward, which is every binary's: what it takes, what it refuses, what it prints."""

import json
import os
import re
import shutil
import socket
import stat
import subprocess

import numpy as np
import pytest

import bookends
from bookends import ROOT

NAME = "encoder_forward"
ON_CUDA = bookends.DEVICE == "cuda"
VERSIONS = bookends.versions(NAME)
SMALL = ["-b", 2, "-t", 8, "-c", 16, "-v", 100]
ITEM = {"fp32": 4, "fp16": 2, "bf16": 2}

ALWAYS = ("kernel version name device device_kind dtype B T C V P N tokens block_size skipped max_error "
          "allowed_error commit").split()
TIMED = "time_ms_min time_ms_median time_ms_p90 time_ms_hot bytes gbps pct_of_copy flops tflops".split()


def forward(*arguments, **options):
    return bookends.run(NAME, *arguments, **options)


def refused(*arguments, words, status=2, **options):
    """Refused: nothing on stdout; on stderr one line, the program's name in front and each of the words in it."""
    result = forward(*arguments, **options)
    assert result.returncode == status, result
    assert result.stdout == ""
    assert result.stderr.endswith("\n") and len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith(NAME + ": "), result.stderr
    for word in words:
        assert word in result.stderr, (word, result.stderr)
    return result.stderr


def records(*arguments, **options):
    """The JSON objects on stdout, each of which holds what every record must."""
    result = forward(*arguments, "--json", "-", **options)
    assert result.returncode == 0, result
    found = [json.loads(line) for line in result.stdout.splitlines()]
    for record in found:
        assert set(ALWAYS) <= set(record)
    return found


def test_is_built():
    assert VERSIONS, "%s is not there: build it, or set BOOKENDS_BUILD" % (bookends.BUILD / NAME)


# ---------------------------------------------------------------------------------------------------------------------
# what it prints

DEVICE_LINE = r"device: .+ \(sm_\d+, \d+ SMs\)(, copy \d+ GB/s)?" if ON_CUDA else \
    r"device: .+: its times say nothing about a GPU"
CHECK_LINE = r"check: max error \d+\.\d \(allowed 1 (fp32|fp16|bf16) ulp\) over (\d+) elements, " \
    r"the same bits each time: ok"
TIME_LINE = r"block_size +(\d+) \| time \d+\.\d{4} ms \| bandwidth +\d+\.\d\d GB/s" + \
    (r" \| +\d+\.\d% of copy" if ON_CUDA else "") + r"(  <- best)?"


def read_report(lines, version, check=True, bench=True, sizes=(32, 64, 128, 256, 512, 1024), elements=256, dtype="bf16",
                shape="B=2 T=8 C=16 V=100", tokens="uniform"):
    """Takes one version's part off the lines; every line of it must be as it should."""
    heading = r'%s %d "[^"]+": %s %s tokens=%s' % (NAME, version, shape, dtype, re.escape(tokens))
    assert re.fullmatch(heading, lines[0]), lines[0]
    del lines[0]
    if check:
        match = re.fullmatch(CHECK_LINE, lines[0])
        assert match and match.groups() == (dtype, str(elements)), lines[0]
        del lines[0]
    best = 0
    for size in sizes if bench else ():
        match = re.fullmatch(TIME_LINE, lines[0])
        assert match and int(match.group(1)) == size, lines[0]
        best += match.group(2) is not None
        del lines[0]
    assert best == (1 if bench else 0)


@pytest.mark.parametrize("dtype", ITEM)
@pytest.mark.parametrize("version", VERSIONS)
def test_report(version, dtype):
    result = forward(version, *SMALL, "--dtype", dtype)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert re.fullmatch(DEVICE_LINE, lines.pop(0))
    read_report(lines, version, dtype=dtype)
    assert lines == []


def test_none_given_is_the_default():
    lines = forward(*SMALL).stdout.splitlines()[1:]
    read_report(lines, VERSIONS[-1])
    assert lines == []


def test_all():
    result = forward("all", *SMALL)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert re.fullmatch(DEVICE_LINE, lines.pop(0))
    for version in VERSIONS:
        read_report(lines, version)
    assert lines.pop(0) == "" and lines.pop(0).split()[:2] == ["version", "name"]
    if not ON_CUDA:
        assert "say nothing about a GPU" in lines.pop()
    assert lines.pop().startswith("fastest: ")
    assert [int(line.split()[0]) for line in lines] == VERSIONS


def test_brief():
    """A heading, a line for each version at its best block size, the fastest one, and what was checked."""
    lines = forward("all", *SMALL, "--brief").stdout.splitlines()
    assert lines[0].startswith("encoder_forward on ") and "B=2 T=8 C=16 V=100" in lines[0]
    assert lines[1].split()[:3] == ["version", "name", "block_size"] and lines[1].endswith("x version 1")
    rows = lines[2:2 + len(VERSIONS)]
    assert [int(row.split()[0]) for row in rows] == VERSIONS and len(set(map(len, rows))) == 1
    times = [float(row[35:47]) for row in rows]
    for row, time in zip(rows, times):
        gain = times[0] / time  # of times that are rounded to 0.0001 ms
        assert abs(float(row.split()[-1]) - gain) < 1.1 * gain * (5e-5 / times[0] + 5e-5 / time) + 0.006
    fastest = VERSIONS[times.index(min(times))]
    assert lines[2 + len(VERSIONS)].startswith("fastest: %d " % fastest)
    assert lines[3 + len(VERSIONS):] == ["checked: each version against the CPU reference at every block size: ok"]
    assert max(map(len, lines)) <= 100
    lines = forward("all", *SMALL, "--brief", "--check").stdout.splitlines()
    assert [line.split()[-1] for line in lines[2:]] == ["ok"] * (len(VERSIONS) + 1)
    lines = forward("all", *SMALL, "--brief", "--bench").stdout.splitlines()
    assert len(lines) == 3 + len(VERSIONS) and "checked" not in lines[-1]
    assert len(forward(3, *SMALL, "--brief").stdout.splitlines()) == 4


def test_check_only_and_bench_only():
    for option, check, bench in (("--check", True, False), ("--bench", False, True)):
        lines = forward("all", *SMALL, option).stdout.splitlines()
        assert re.fullmatch(DEVICE_LINE, lines.pop(0))
        for version in VERSIONS:
            read_report(lines, version, check, bench)
        assert bool(lines) == bench  # the summary


def test_the_cpu_says_nothing_about_a_gpu():
    text = forward("all", *SMALL).stdout
    assert ("% of copy" in text) == ON_CUDA
    assert ("its times say nothing about a GPU" in text) == (not ON_CUDA)


def test_one_block_size():
    for size in (32, 96, 1024):
        lines = forward(1, *SMALL, "--block-size", size).stdout.splitlines()[1:]
        read_report(lines, 1, sizes=[size])
        assert lines == []
        assert [record["block_size"] for record in records(1, *SMALL, "--block-size", size)] == [size]


def test_reference_alone():
    result = forward(0, *SMALL)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.search(r'^%s 0 ".*reference.*": B=2 T=8 C=16 V=100 bf16 tokens=uniform$' % NAME, result.stdout, re.M)
    assert re.search(r"^time \d+\.\d{4} ms", result.stdout, re.M)
    assert "block_size" not in result.stdout and "check" not in result.stdout
    assert "% of copy" not in result.stdout


def test_shapes_in_the_heading():
    result = forward(1, "-b", 3, "-t", 5, "-c", 7, "-v", 11, "--tokens", "zipf", "--dtype", "fp32")
    lines = result.stdout.splitlines()[1:]
    read_report(lines, 1, shape="B=3 T=5 C=7 V=11", dtype="fp32", tokens="zipf", elements=105)


def test_list():
    result = forward("--list")
    assert (result.returncode, result.stderr) == (0, "")
    rows = [re.fullmatch(r"(\d+)  +(\S.*?)  +(\S.*)", line).groups() for line in result.stdout.splitlines()]
    listed = [json.loads(line) for line in forward("--list", "--json", "-").stdout.splitlines()]
    assert [(int(number), name, idea) for number, name, idea in rows] == \
        [(row["version"], row["name"], row["idea"]) for row in listed]
    assert {row["kernel"] for row in listed} == {NAME}
    assert [row["version"] for row in listed] == list(range(1, len(listed) + 1))
    header = (ROOT / (NAME + ".cu")).read_text().split("*/")[0]
    assert re.findall(r"^version (\d+) ", header, re.M) == [str(row["version"]) for row in listed]


def test_help():
    result = forward("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for option in ("-b INT", "-t INT", "-c INT", "-v INT", "--dtype", "--tokens", "--block-size", "--check", "--bench",
                   "--repeat", "--seed", "--json", "--list"):
        assert re.search(r"(^|[ |])%s( |$|,)" % re.escape(option), result.stdout, re.M), option
    assert "-p INT" not in result.stdout  # this kernel has no P
    defaults = [re.search(r"-%s INT .*default (\d+)" % flag, result.stdout).group(1) for flag in "btcv"]
    heading = forward(1, "--check", "--block-size", 256).stdout.splitlines()[1]
    assert "B=%s T=%s C=%s V=%s bf16 tokens=uniform" % tuple(defaults) in heading
    assert re.search("exit status.*0.*1.*2.*3", result.stdout)
    assert forward("-h").stdout == result.stdout


# ---------------------------------------------------------------------------------------------------------------------
# JSON

def test_json_keys_and_values():
    found = records("all", *SMALL, "--dtype", "fp16", "--tokens", "zipf")
    assert [(record["version"], record["block_size"]) for record in found] == \
        [(version, size) for version in VERSIONS for size in (32, 64, 128, 256, 512, 1024)]
    for record in found:
        assert set(TIMED) <= set(record)
        assert record["kernel"] == NAME and record["device_kind"] == bookends.DEVICE and record["device"]
        assert [record[key] for key in "BTCVN"] == [2, 8, 16, 100, 16] and record["P"] is None
        assert (record["dtype"], record["tokens"], record["ok"], record["skipped"]) == \
            ("fp16", "zipf", True, None)
        assert 0 < record["time_ms_min"] <= record["time_ms_median"] <= record["time_ms_p90"]
        assert record["time_ms_hot"] > 0
        assert record["gbps"] == pytest.approx(record["bytes"] / record["time_ms_median"] * 1e-6, rel=1e-3)
        assert record["flops"] == 2 * 8 * 16
        assert record["tflops"] == pytest.approx(record["flops"] / record["time_ms_median"] * 1e-9, rel=1e-3)
        assert record["max_error"] <= record["allowed_error"] == 1
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?|unknown|\S+", record["commit"])
        if ON_CUDA:
            assert record["pct_of_copy"] == pytest.approx(100 * record["gbps"] / record["copy_gbps"], rel=1e-3)
        else:
            assert record["pct_of_copy"] is None
    for version in VERSIONS:
        some = [record for record in found if record["version"] == version]
        best, = [record for record in some if record["best"]]
        assert best["time_ms_median"] == min(record["time_ms_median"] for record in some)


def test_json_of_a_check():
    record, = records(2, *SMALL, "--check")
    assert record["ok"] is True and record["max_error"] == 0 and record["time_ms_median"] is None


def test_json_of_a_bench():
    for record in records(2, *SMALL, "--bench"):
        assert record["ok"] is None and record["max_error"] is None and set(TIMED) <= set(record)


def test_json_on_stdout_is_alone_there():
    result = forward(1, *SMALL, "--json", "-")
    assert all(line.startswith("{") and json.loads(line) for line in result.stdout.splitlines())
    lines = result.stderr.splitlines()
    assert re.fullmatch(DEVICE_LINE, lines.pop(0))
    read_report(lines, 1)
    assert lines == []


def test_json_file_is_appended_to(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("{\"kept\": true}\n")
    for _ in range(2):
        result = forward(1, *SMALL, "--block-size", 64, "--json", path)
        assert result.returncode == 0 and "block_size   64 |" in result.stdout
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found[0] == {"kept": True} and [record["block_size"] for record in found[1:]] == [64, 64]


def test_json_file_that_is_new(tmp_path):
    assert forward(1, *SMALL, "--check", "--json", "new.jsonl", cwd=str(tmp_path)).returncode == 0
    assert os.listdir(str(tmp_path)) == ["new.jsonl"]
    assert len((tmp_path / "new.jsonl").read_text().splitlines()) == 1


def test_json_quotes_a_file_name(tmp_path):
    path = token_file(tmp_path / 'a "b" \\ c\t\u00e9.bin', np.arange(16))
    assert records(1, *SMALL, "--check", "--tokens", path)[0]["tokens"] == str(path)


def test_json_that_cannot_be_written(tmp_path):
    refused(*SMALL, "--json", tmp_path / "no" / "x.json", words=["--json", str(tmp_path / "no" / "x.json")])
    refused(*SMALL, "--json", tmp_path, words=["--json", str(tmp_path)])
    refused(*SMALL, "--json", "", words=["--json", "''"])
    assert os.listdir(str(tmp_path)) == []


@pytest.mark.parametrize("bad", [
    ["--dtype", "fp64"], ["--tokens", "nowhere.bin"], ["-b", "0"], ["99"], ["--nonsense"],
    ["-v", "2000000", "-c", "1000000000"],
], ids=" ".join)
def test_a_refused_run_leaves_files_alone(bad, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("as it was\n")
    before = old.stat()
    for path in (old, new):
        for arguments in (["--json", path, *bad], [*bad, "--json", path]):
            assert forward(*SMALL, *arguments, cwd=str(tmp_path)).returncode in (2, 3)
    assert os.listdir(str(tmp_path)) == ["old"] and old.read_text() == "as it was\n"
    assert old.stat().st_mtime_ns == before.st_mtime_ns


# ---------------------------------------------------------------------------------------------------------------------
# the fewest bytes

def fewest_bytes(ids, B, T, C, dtype):
    """Rows of wte that are asked for, once each; wpe, the ids and out."""
    return (len(np.unique(ids)) + T + B * T) * C * ITEM[dtype] + 4 * B * T


def bytes_of(*arguments):
    record, = records(1, "--bench", "--repeat", 1, "--block-size", 256, *arguments)
    return record["bytes"]


@pytest.mark.parametrize("dtype", ITEM)
def test_bytes(dtype, tmp_path):
    shape = ["-b", 3, "-t", 40, "-c", 24, "--dtype", dtype]
    assert bytes_of(*shape, "-v", 1000, "--tokens", "one") == fewest_bytes([5] * 120, 3, 40, 24, dtype)
    for count in (120, 500):
        ids = np.random.default_rng(count).integers(0, 50, count)
        path = token_file(tmp_path / str(count), ids)
        assert bytes_of(*shape, "-v", 1000, "--tokens", path) == fewest_bytes(ids[:120], 3, 40, 24, dtype)
    # Uniform and zipf ids where chance has no say: a table of one row, and one where every row is asked for.
    for tokens in ("uniform", "zipf"):
        assert bytes_of(*shape, "-v", 1, "--tokens", tokens) == fewest_bytes([0] * 120, 3, 40, 24, dtype)
        assert bytes_of(*shape, "-v", 3, "--tokens", tokens) == fewest_bytes([0, 1, 2], 3, 40, 24, dtype)


def splitmix(stream, seed, count):
    """The harness's generator, written again."""
    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xbf58476d1ce4e5b9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94d049bb133111eb)
        return x ^ (x >> np.uint64(31))
    golden = np.uint64(0x9e3779b97f4a7c15)
    with np.errstate(over="ignore"):
        key = mix(np.array([seed], np.uint64) * golden + np.uint64(stream))
        return (mix(key + np.arange(count, dtype=np.uint64) * golden) >> np.uint64(11)).astype(np.float64) * 2.0 ** -53


@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1])
def test_bytes_of_uniform_ids(seed):
    for V in (100, 50257):
        ids = (splitmix(1000, seed, 480) * V).astype(np.int64)
        assert bytes_of("-b", 4, "-t", 120, "-c", 8, "-v", V, "--seed", seed) == fewest_bytes(ids, 4, 120, 8, "bf16")


def test_bytes_do_not_depend_on_the_version():
    assert len({record["bytes"] for record in records("all", "--bench", *SMALL, "--repeat", 1)}) == 1


# ---------------------------------------------------------------------------------------------------------------------
# options

def test_seed_changes_the_inputs():
    some = [bytes_of("-b", 2, "-t", 64, "-c", 8, "-v", 300, "--seed", seed) for seed in (42, 0, 1, 2, 3, 4)]
    assert len(set(some)) > 2
    assert bytes_of("-b", 2, "-t", 64, "-c", 8, "-v", 300) == some[0]


def test_repeat_is_the_number_of_runs():
    for repeat in (1, 3, 17):
        assert {record["runs"] for record in records(1, *SMALL, "--bench", "--repeat", repeat)} == {repeat}


def test_the_last_of_an_option_counts():
    lines = forward(1, *SMALL, "-b", 5, "--dtype", "fp16", "--dtype", "fp32", "--check").stdout.splitlines()[1:]
    read_report(lines, 1, bench=False, dtype="fp32", shape="B=5 T=8 C=16 V=100", elements=640)


@pytest.mark.parametrize("arguments, B, dtype", [
    (["-b3", "--dtype=fp32"], 3, "fp32"), (["-b=3", "--dtype", "fp16"], 3, "fp16"), (["-b+3"], 3, "bf16"),
    (["-b=5", "-b3", "--dtype=fp16", "--dtype=bf16", "--seed=42"], 3, "bf16"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_values_joined_to_their_options(arguments, B, dtype, tmp_path):
    path = token_file(tmp_path / "a=b.bin", np.arange(24))
    lines = forward(1, *SMALL, *arguments, "--tokens=%s" % path, "--block-size=64", "--check").stdout.splitlines()[1:]
    read_report(lines, 1, bench=False, dtype=dtype, shape="B=%d T=8 C=16 V=100" % B, elements=128 * B, tokens=str(path))
    assert lines == []


@pytest.mark.parametrize("flag", ["-b", "-t", "-c", "-v"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "", "3x", "1.5", "1e3", "0x10", " 3", "3 ", "2147483648",
                                   "99999999999999999999", "-99999999999999999999", "nan"])
def test_bad_shapes(flag, value):
    refused(*SMALL, flag, value, words=[flag, "'%s'" % value, "integer", "1 to 2147483647"])


@pytest.mark.parametrize("arguments, words", [
    (["--dtype", "fp64"], ["--dtype", "'fp64'", "fp32", "fp16", "bf16"]),
    (["--dtype", "BF16"], ["--dtype", "'BF16'"]),
    (["--dtype", ""], ["--dtype", "''"]),
    (["--tokens", ""], ["--tokens", "''", "uniform", "zipf", "one"]),
    (["--tokens", "unifrom"], ["--tokens", "'unifrom'", "uniform", "zipf", "one", "sorted", "padded", "No such file"]),
    *[(["--block-size", size], ["--block-size", "'%s'" % size, "32", "1024"])
      for size in ("0", "-32", "31", "33", "1000", "1025", "1056", "2048", "x", "", "64.0")],
    *[(["--repeat", value], ["--repeat", "'%s'" % value, "1 to "]) for value in ("0", "-3", "many", "", "10" * 7)],
    *[(["--seed", value], ["--seed", "'%s'" % value, "0 to "]) for value in ("-1", "x", "", "9223372036854775808")],
    (["--check", "--bench"], ["--check", "--bench"]),
    (["--bench", "--check"], ["--check", "--bench"]),
    (["--frobnicate"], ["'--frobnicate'", "--help"]),
    (["--dtype=fp64"], ["--dtype", "'fp64'", "bf16"]),
    (["--dtype="], ["--dtype", "''"]),
    (["--check=1"], ["'--check=1'", "--check takes no value"]),
    (["--list="], ["'--list='", "--list takes no value"]),
    (["--help=x"], ["'--help=x'", "--help takes no value"]),
    (["--frobnicate=1"], ["'--frobnicate'"]),
    (["--json", "--check"], ["--json", "'--check'"]),
    (["--json="], ["--json", "''"]),
    (["--block-size=-32"], ["--block-size", "'-32'"]),
    (["--seed=-1"], ["--seed", "'-1'"]),
    (["-b-3"], ["-b", "'-3'", "1 to"]),
    (["-b3x"], ["-b", "'3x'"]),
    (["-b="], ["-b", "''"]),
    (["-b=x"], ["-b", "'x'"]),
    (["-tokens"], ["'-tokens'"]),
    (["-p50304"], ["'-p50304'"]),
    (["="], ["'='"]),
    (["-p", "50304"], ["'-p'"]),
    (["-x"], ["'-x'"]),
    (["-"], ["'-'"]),
    (["99"], ["'99'", "0", *map(str, VERSIONS), "all", "--list"]),
    (["fast"], ["'fast'"]),
    ([""], ["''"]),
    (["01"], ["'01'"]),
    (["1.0"], ["'1.0'"]),
    (["-1"], ["'-1'"]),
    (["ALL"], ["'ALL'"]),
    (["1", "2"], ["'2'"]),
    (["all", "1"], ["'1'"]),
    (["1", "all"], ["'all'"]),
    (["--list", "--dtype", "int8"], ["--dtype", "'int8'"]),
    *[([option], [option, "value"]) for option in ("-b", "-t", "-c", "-v", "--dtype", "--tokens", "--block-size",
                                                   "--repeat", "--seed", "--json")],
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_bad_options(arguments, words):
    if arguments[-1] in ("-b", "-t", "-c", "-v") or not arguments[0].startswith("--list"):
        refused(*SMALL, *arguments, words=words)
    else:
        refused(*arguments, words=words)


@pytest.mark.parametrize("program", ["encoder_forward", "encoder_backward", "classifier_fused", "lm_head",
                                     "embedding_lookup", "embedding_lookup_backward", "embedding_update"])
def test_every_option_refuses_bad_values(program, tmp_path):
    """By one line that names the option, and nothing done: the values are no number, type, file or folder."""
    listed = re.findall(r"^  (--?[\w-]+)(?: ([A-Z]+))?(?: \| (--\w+))? ", bookends.run(program, "--help").stdout, re.M)
    options = [(name, kind) for name, kind, other in listed] + [(other, "") for _, _, other in listed if other]
    assert len(options) >= 11 and {"-b", "-v", "--dtype", "--tokens", "--bench", "--json"} <= {o for o, _ in options}
    for option, kind in options:
        values = ["", "nan", "9" * 30, "/", "no\nsuch"] if kind else ["", "1"]
        arguments = [["%s=%s" % (option, value)] for value in values]
        arguments += [[option, value] for value in values] + [[option]] if kind else []
        for some in arguments:
            if option == "--json" and some[-1].endswith(("nan", "9", "such")):
                continue  # names of files
            result = bookends.run(program, *some, cwd=str(tmp_path))
            assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), (some, result)
            assert result.stderr.startswith(program + ": ") and option in result.stderr, (some, result)
    assert os.listdir(str(tmp_path)) == []


def test_one_line_whatever_the_value_holds():
    refused("--dtype", "a\nb", words=["--dtype"])
    refused("--tokens", "no\nsuch", words=["--tokens"])


# ---------------------------------------------------------------------------------------------------------------------
# token files

GPT2, LLAMA3 = (20240520, 1, "<u2"), (20240801, 7, "<u4")


def token_file(path, ids, form=GPT2, count=None, header_ints=256, tail=b""):
    magic, version, item = form
    header = np.zeros(header_ints, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(ids).astype(item).tobytes() + tail)
    return path


def refused_file(path, *words, shape=(), status=2):
    refused(*SMALL, *shape, "--tokens", path, words=["--tokens", str(path), *words], status=status)


@pytest.mark.parametrize("form", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
def test_token_files(form, tmp_path):
    for count in (16, 17, 1000):
        ids = np.arange(count) % 100
        path = token_file(tmp_path / "ids.bin", ids, form)
        lines = forward(1, *SMALL, "--check", "--tokens", path).stdout.splitlines()[1:]
        read_report(lines, 1, bench=False, tokens=str(path))
        assert bytes_of(*SMALL, "--tokens", path) == fewest_bytes(ids[:16], 2, 8, 16, "bf16")


def test_ids_are_read_whole(tmp_path):
    """Ids that differ only above the low byte, or the low 16 bits."""
    path = token_file(tmp_path / "ids.bin", np.arange(16) * 256 + 7)
    assert bytes_of(*SMALL, "-v", 65536, "--tokens", path) == fewest_bytes(range(16), 2, 8, 16, "bf16")
    path = token_file(tmp_path / "ids.bin", np.arange(16) * 65536 + 7, LLAMA3)
    assert bytes_of(*SMALL, "-v", 1 << 20, "--tokens", path) == fewest_bytes(range(16), 2, 8, 16, "bf16")


def test_the_sample_file():
    path = ROOT / "dev" / "data" / "primer.bin"
    ids = np.frombuffer(path.read_bytes()[1024:], "<u2")
    assert bytes_of("-b", 2, "-t", 100, "-c", 8, "--tokens", path) == fewest_bytes(ids[:200], 2, 100, 8, "bf16")
    refused(*SMALL, "-v", ids.max(), "--tokens", path, words=["--tokens", str(ids.max())])


@pytest.mark.parametrize("form", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
def test_ids_outside_the_vocabulary(form, tmp_path):
    path = tmp_path / "ids.bin"
    for position in (0, 5, 15):
        ids = np.arange(40)
        ids[position:] = 100
        refused_file(token_file(path, ids, form), "id 100", "position %d;" % position, "99")
    ids = np.arange(40)
    ids[16:] = 100  # only the ids that are used are read
    assert forward(1, *SMALL, "--check", "--tokens", token_file(path, ids, form)).returncode == 0
    top = 2 ** (8 * np.dtype(form[2]).itemsize) - 1
    ids[:] = 0
    ids[3] = top
    refused_file(token_file(path, ids, form), "id %d" % top, "position 3;")


@pytest.mark.parametrize("form", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
def test_large_token_files(form, tmp_path):
    """What is read follows from what is asked for: 16 ids of a sparse file of 2^31-1, in little memory and time; more
    ids than are read at once."""
    path, width = token_file(tmp_path / "ids.bin", np.arange(16), form, count=2**31 - 1), np.dtype(form[2]).itemsize
    os.truncate(str(path), 1024 + width * (2**31 - 1))

    def limited():
        resource = pytest.importorskip("resource")
        resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
        if not ON_CUDA and not bookends.SANITIZE:
            resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))

    result = forward(1, *SMALL, "--check", "--tokens", path, preexec_fn=limited)
    assert result.returncode == 0, result
    os.truncate(str(path), 1024 + width * (2**31 - 2))
    refused_file(path, "2147483647", str(width * (2**31 - 2)))
    B, T = 3, 2**20 // 3 + 5
    ids = np.random.default_rng(1).integers(0, 1000, B * T + 7)
    token_file(path, ids, form)
    assert bytes_of("-b", B, "-t", T, "-c", 2, "-v", 1000, "--tokens", path) == \
        fewest_bytes(ids[:B * T], B, T, 2, "bf16")
    ids[2**20 + 3] = 1000
    refused_file(token_file(path, ids, form), "id 1000", "position %d;" % (2**20 + 3),
                 shape=["-b", B, "-t", T, "-v", 1000])


@pytest.mark.parametrize("form", [GPT2, LLAMA3], ids=["gpt2", "llama3"])
def test_files_that_are_not_right(form, tmp_path):
    path, width = tmp_path / "ids.bin", np.dtype(form[2]).itemsize
    refused_file(token_file(path, np.zeros(15), form), "15 tokens", "16")
    refused_file(token_file(path, [], form), "0 tokens", "16")
    refused_file(token_file(path, np.zeros(32), form, count=33), "33", str(32 * width))
    refused_file(token_file(path, np.zeros(32), form, count=31), "31", str(32 * width))
    refused_file(token_file(path, np.zeros(32), form, tail=b"\0"), "32", str(32 * width + 1))
    refused_file(token_file(path, np.zeros(32), form, count=-1), "-1")
    refused_file(token_file(path, np.zeros(32), form, count=2**31 - 1), "2147483647")
    refused_file(token_file(path, [], form, header_ints=255), "1024")
    refused_file(token_file(path, [], form, header_ints=3), "1024")
    refused_file(token_file(path, np.zeros(32), (form[0] + 1, *form[1:])), "magic %d" % (form[0] + 1), "20240520",
                 "20240801")
    refused_file(token_file(path, np.zeros(32), (form[0], form[1] + 1, form[2])), "version", str(form[1] + 1))
    other = LLAMA3 if form is GPT2 else GPT2
    refused_file(token_file(path, np.zeros(32), (form[0], *other[1:])), "version %d" % other[1])


def test_files_that_are_no_files(tmp_path):
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    refused_file(empty, "1024")
    refused_file(tmp_path / "nowhere", "No such file")
    refused_file(empty / "below", "Not a directory")
    refused_file(tmp_path, "is a directory")
    refused_file(os.devnull, "is a device")
    os.mkfifo(str(tmp_path / "pipe"))  # opening one would wait for a writer
    refused_file(tmp_path / "pipe", "is a pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        refused_file(tmp_path / "socket", "is a socket")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path):
    path = token_file(tmp_path / "ids.bin", np.zeros(16))
    path.chmod(stat.S_IWUSR)
    refused_file(path, "Permission denied")


# ---------------------------------------------------------------------------------------------------------------------
# out of memory

OUT_OF_MEMORY = [
    ("bf16", dict(v=2000000, c=100000000), 2 * 2e6 * 1e8),
    ("fp32", dict(v=2**31 - 1, c=65536), 4 * 2.0**47),
    ("fp32", dict(v=2**31 - 1, c=2**31 - 1), 4 * 2.0**62),
    ("bf16", dict(b=2**31 - 1, t=1000), (4 + 2 * 16) * 2.0**31 * 1000),
    ("bf16", dict(b=2**31 - 1, t=2**31 - 1), (4 + 2 * 16) * 2.0**62),
    ("fp32", dict(b=2**31 - 1, t=2**31 - 1, c=2**31 - 1, v=2**31 - 1), 4 * 2.0**93),
]


def limit_memory():
    """So that a run that asks for terabytes is refused even where the system would promise them."""
    if not ON_CUDA and not bookends.SANITIZE:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 36, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.mark.parametrize("dtype, shape, needed", OUT_OF_MEMORY, ids=lambda value: str(value).replace(" ", ""))
def test_out_of_memory(dtype, shape, needed):
    """Exit status 3, saying how much was needed."""
    arguments = [str(part) for flag, value in shape.items() for part in ("-" + flag, value)]
    line = refused("all", *SMALL, *arguments, "--dtype", dtype, status=3, words=["memory"], preexec_fn=limit_memory)
    if needed > 2.0 ** 70:
        assert "needs more than 1024 EiB on the device" in line
        return
    amount, unit = re.search(r"needs (\d{1,4}|\d\d\.\d|\d\.\d\d) ([KMGTPE])iB on the device", line).groups()
    assert float(amount) >= 1 and re.search(r", \d[\d.]* [MGT]iB are free$", line)
    amount = float(amount) * 2.0 ** (10 * (1 + "KMGTPE".index(unit)))
    assert 0.9 * needed < amount < 1.3 * needed, line


# ---------------------------------------------------------------------------------------------------------------------
# reports that do not arrive

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--list"], ["--help"], [*SMALL, "--check"]], ids=lambda value: value[-1])
def test_a_lost_report_is_no_success(arguments):
    with open("/dev/full", "w") as full:
        command = [str(bookends.BUILD / "encoder_forward"), *map(str, arguments)]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, universal_newlines=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1, result


def test_measuring_needs_a_gpu(tmp_path):
    """scripts/measure.sh without one: one line, and nothing built or written."""
    if shutil.which("nvidia-smi"):
        pytest.skip("there is a GPU")
    result = subprocess.run(["bash", str(ROOT / "scripts/measure.sh"), str(tmp_path / "out")], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True)
    assert result.returncode == 3 and result.stdout == "" and result.stderr.count("\n") == 1, result
    assert not (tmp_path / "out").exists()
