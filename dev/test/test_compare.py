"""scripts/compare.py: over the programs of the CPU device, and over a program with given times and faults."""

import json
import os
import pty
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest

import bookends
from bookends import ROOT

pytestmark = pytest.mark.skipif(bool(bookends.SANITIZE) or bookends.DEVICE == "cuda", reason="the same on each device")

SMALL = ["-b", 2, "-t", 4, "-c", 8, "-v", 50]
COMMAND = [sys.executable, str(ROOT / "scripts" / "compare.py")]

# A program NAME whose plan is in NAME.plan: for each version its times, one per process, or a fault.
FAKE = '''#!%s
import json, os, sys, time
plan = json.load(open(sys.argv[0] + ".plan"))
arguments = sys.argv[1:]
if "--help" in arguments:
    print("  -b INT   B\\n  -v INT   V")
elif "--list" in arguments:
    for version in plan["versions"]:
        print(json.dumps({"version": int(version), "name": "v" + version}))
else:
    version, record = arguments[0], plan["record"]
    record.update(version=int(version), name="v" + version)
    for option, key in (("-v", "V"), ("-b", "B")):
        if option in arguments:
            record[key] = int(arguments[arguments.index(option) + 1])
    todo = plan["versions"][version]
    if isinstance(todo, list):
        counter = "%%s.%%s.runs" %% (sys.argv[0], version)
        runs = os.path.getsize(counter) if os.path.exists(counter) else 0
        open(counter, "a").write("x")
        record["time_ms_median"] = todo[runs %% len(todo)]
        print(json.dumps(dict(record, best=False, time_ms_median=1e3)))
        print(json.dumps(record))
    elif todo == "wrong":
        print(json.dumps(dict(record, best=False, ok=False, runs=0, time_ms_median=None)))
        print("check: block_size 32: element 7 is 1, not 2: WRONG", file=sys.stderr)
        sys.exit(1)
    elif todo == "abort":
        os.abort()
    elif todo == "memory":
        sys.exit(print("fake: out of memory: needs 9 TiB", file=sys.stderr) or 3)
    elif todo == "device":
        sys.exit(print("fake: no CUDA device that can be used", file=sys.stderr) or 3)
    elif todo == "hang":
        open(sys.argv[0] + ".pid", "w").write(str(os.getpid()))
        time.sleep(60)
''' % sys.executable


def compare(*arguments, build=bookends.BUILD):
    return subprocess.run([*COMMAND, *map(str, arguments), "--build", str(build)], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=120)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tables(text):
    """(heading, header, rows) of each table; cells are divided by at least two blanks."""
    found = []
    for part in re.split(r"\n\n", text):
        lines = part.splitlines()
        if len(lines) > 2 and lines[1].startswith("version"):
            rows = [re.split(r"  +", line) for line in lines[1:] if re.match(r"version|\d+  ", line)]
            found.append((lines[0], rows[0], rows[1:]))
    return found


@pytest.fixture
def fake(tmp_path):
    """Makes a program encoder_forward with that plan in tmp_path."""
    real = json.loads(bookends.run("encoder_forward", 1, *SMALL, "--block-size", 32, "--json", "-").stdout)

    def make(**versions):
        path = tmp_path / "encoder_forward"
        path.write_text(FAKE)
        path.chmod(0o755)
        versions = {number.lstrip("v"): todo for number, todo in versions.items()}
        (tmp_path / "encoder_forward.plan").write_text(json.dumps({"record": real, "versions": versions}))
        for counter in tmp_path.glob("*.runs"):
            counter.unlink()
        return tmp_path
    return make


# ---------------------------------------------------------------------------------------------------------------------
# the programs of the CPU device


def test_tables_show_the_records(tmp_path):
    path = tmp_path / "out.jsonl"
    result = compare("encoder_forward", "classifier_fused", *SMALL, "--dtype", "bf16,fp32", "--block-size", 64,
                     "--json", path)
    assert (result.returncode, result.stderr) == (0, ""), result
    assert "\033" not in result.stdout
    assert "Times on the CPU device say nothing about a GPU." in result.stdout
    found = tables(result.stdout)
    assert [heading.split("  on ")[0] for heading, *_ in found] == [
        "encoder_forward  B2 T4 C8 V50 bf16 uniform", "encoder_forward  B2 T4 C8 V50 fp32 uniform",
        "classifier_fused  B2 T4 V50 P128 bf16 uniform", "classifier_fused  B2 T4 V50 P128 fp32 uniform"]
    best = records(path)
    assert all(record["best"] and record["run"] == 1 and record["block_size"] == 64 for record in best)
    for heading, header, rows in found:
        kernel, dtype = heading.split()[0], "fp32" if "fp32" in heading else "bf16"
        mine = {record["version"]: record for record in best
                if (record["kernel"], record["dtype"]) == (kernel, dtype)}
        assert header == ["version", "name", "block size", "time (ms)", "GB/s", "x version 1", "x before"]
        assert [int(row[0]) for row in rows] == sorted(mine) == bookends.versions(kernel)
        for row in rows:
            record, first = mine[int(row[0])], mine[1]["time_ms_median"]
            assert row[1:4] == [record["name"], "64", "%.4f" % record["time_ms_median"]]
            assert float(row[4]) == pytest.approx(record["gbps"], rel=0.05)
            assert float(row[5]) == pytest.approx(first / record["time_ms_median"], rel=0.05)
            if record["version"] > 1:
                before = mine[record["version"] - 1]["time_ms_median"]
                assert float(row[6]) == pytest.approx(before / record["time_ms_median"], rel=0.05)


def test_products_and_their_ceiling(tmp_path):
    path = tmp_path / "out.jsonl"
    result = compare("lm_head", *SMALL, "--memory", "100%,25%", "--versions", "3,6", "--repeat", 3, "--json", path)
    assert (result.returncode, result.stderr) == (0, ""), result
    found, best = tables(result.stdout), records(path)
    assert len(found) == 2 and len(best) == 4 and {record["version"] for record in best} == {3, 6}
    assert found[0][1] == ["version", "name", "block size", "time (ms)", "TFLOP/s", "% of gemms", "x before"]
    for row, record in zip(found[0][2] + found[1][2], best):
        assert row[2] == record["at"] and row[5].endswith("%")
        assert float(row[5][:-1]) == pytest.approx(100 / record["ratio_to_gemms"], abs=0.06)
        assert float(row[4]) == pytest.approx(record["tflops"], rel=0.06)


def test_a_sweep_and_markdown():
    result = compare("encoder_forward", *SMALL, "--versions", "3,5", "--sweep", "V=64..300", "--repeat", 2,
                     "--markdown")
    assert (result.returncode, result.stderr) == (0, ""), result
    lines = result.stdout.splitlines()
    headings = [line for line in lines if line.startswith("### encoder_forward  B2")]
    assert [re.search(r"V(\d+)", line)[1] for line in headings] == ["64", "128", "256"]
    start = lines.index("### encoder_forward: time (ms) by V; *: the fastest")
    rows = [line.strip("| ").split(" | ") for line in lines[start + 2:start + 7]]
    assert [row[0] for row in rows] == ["V", "---|---|---:|---:", "64", "128", "256"]
    assert rows[0][2:] == ["3 x128", "5 slices"] and sum("*" in cell for row in rows[2:] for cell in row) >= 3


def test_every_kernel_checks():
    result = compare(*SMALL, "--check", "--block-size", "32", "--versions", "1")
    assert result.returncode == 2 and "--block-size" in result.stderr  # lm_head has none
    result = compare(*SMALL, "--check", "--versions", "1")
    assert (result.returncode, result.stderr) == (0, ""), result
    assert len(re.findall(r"^1 .* ok$", result.stdout, re.M)) == 7


# ---------------------------------------------------------------------------------------------------------------------
# faults


def test_a_failure_is_marked_and_the_others_run(fake):
    result = compare("encoder_forward", "-v", "10,20", build=fake(v1=[2.0], v2="wrong", v3="abort", v4=[0.5]))
    assert (result.returncode, result.stderr) == (1, ""), result
    found = tables(result.stdout)
    assert len(found) == 2
    for heading, _, rows in found:
        assert [row[:3] for row in rows] == [["1", "v1", "32"], ["2", "v2", "WRONG"], ["3", "v3", "FAILED"],
                                             ["4", "v4", "32"]]
        assert rows[3][-1] == "4.00"  # x version 1; the version before has no time
    assert result.stdout.count("2 v2: WRONG: check: block_size 32: element 7 is 1, not 2: WRONG") == 2
    assert "3 v3: FAILED: signal SIGABRT" in result.stdout and "fastest: 4 v4" in result.stdout


def test_too_little_memory_and_no_device(fake):
    result = compare("encoder_forward", build=fake(v1="memory", v2=[1.0]))
    assert (result.returncode, result.stderr) == (3, "")
    assert "1 v1: no memory: fake: out of memory: needs 9 TiB" in result.stdout and "fastest: 2" in result.stdout
    result = compare("encoder_forward", build=fake(v1="device", v2=[1.0]))
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == "fake: no CUDA device that can be used\n"


def test_ctrl_c_keeps_what_was_measured(fake, tmp_path):
    build, path = fake(v1=[2.0], v2=[1.0], v3="hang", v4=[1.0]), tmp_path / "out.jsonl"
    path.write_text("an earlier file\n")
    process = subprocess.Popen([*COMMAND, "encoder_forward", "--build", str(build), "--json", str(path)],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
                               # where the tests run in the background, SIGINT is ignored, and children inherit that
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    pid = build / "encoder_forward.pid"
    for _ in range(200):
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and errors.count("\n") == 1 and "interrupted" in errors, errors
    (_, _, rows), = tables(out)
    assert [row[2] for row in rows] == ["32", "32", "not run", "not run"] and rows[1][3] == "1.0000"
    assert [record["version"] for record in records(path) if record["best"]] == [1, 2]
    with pytest.raises(ProcessLookupError):  # the program has ended too
        os.kill(int(pid.read_text()), 0)


# ---------------------------------------------------------------------------------------------------------------------
# repeated processes, and an earlier measurement


def test_repeated_runs_are_recorded(fake, tmp_path):
    path = tmp_path / "out.jsonl"
    times = [1.0, 1.3, 1.1]
    result = compare("encoder_forward", "--repeat-runs", 3, "--json", path, build=fake(v1=times, v2=[0.5]))
    assert (result.returncode, result.stderr) == (0, "")
    best = [record for record in records(path) if record["best"]]
    assert [(record["run"], record["version"]) for record in best] == [(run, v) for run in (1, 2, 3) for v in (1, 2)]
    assert [record["time_ms_median"] for record in best[::2]] == times
    (_, header, rows), = tables(result.stdout)
    assert header[3:5] == ["time (ms)", "range"]
    assert rows[0][3:5] == ["%.4f" % statistics.median(times), "27.3%"] and rows[1][-1] == "2.20"


OLD = dict(v1=[1.0, 1.02, 1.01], v2=[1.0, 1.02, 1.01], v3=[1.0, 1.02, 1.01], v4=[1.0, 1.4, 1.2])


@pytest.mark.parametrize("new, changes, status", [
    (OLD, ["same"] * 4, 0),
    (dict(OLD, v2=[0.9, 0.92, 0.91]), ["same", "faster", "same", "same"], 0),
    (dict(OLD, v2=[0.9, 0.92, 0.91], v3=[1.1, 1.12, 1.11]), ["same", "faster", "slower", "same"], 4),
    (dict(OLD, v1=[1.03, 1.04, 1.04], v4=[1.5, 1.4, 1.6]), ["same"] * 4, 0),  # within the noise
    (dict(OLD, v3=[1.1, 1.12, 1.11], v4="wrong"), ["same", "same", "slower"], 1),
])
def test_against_an_earlier_measurement(fake, tmp_path, new, changes, status):
    path = tmp_path / "old.jsonl"
    assert compare("encoder_forward", "--repeat-runs", 3, "--json", path, build=fake(**OLD)).returncode == 0
    result = compare("encoder_forward", "--repeat-runs", 3, "--against", path, build=fake(**new))
    assert (result.returncode, result.stderr) == (status, ""), result
    lines = result.stdout[result.stdout.index("against "):].splitlines()
    rows = [re.split("  +", line) for line in lines[2:2 + len(changes)]]
    assert [row[-1] for row in rows] == changes
    assert [row[2] for row in rows] == ["v1", "v2", "v3", "v4"][:len(changes)]
    assert lines[-1] == "%d faster, %d slower, %d the same within the noise" % tuple(
        map(changes.count, ("faster", "slower", "same")))


def test_one_process_has_no_noise(fake, tmp_path):
    path, build = tmp_path / "old.jsonl", fake(v1=[1.0, 1.1])
    assert compare("encoder_forward", "--json", path, build=build).returncode == 0
    result = compare("encoder_forward", "--against", path, build=build)
    assert (result.returncode, result.stdout) == (2, "") and "--repeat-runs 3" in result.stderr
    result = compare("encoder_forward", "--against", path, "--repeat-runs", 2, build=build)
    assert result.returncode == 0 and "1 the same within the noise" in result.stdout
    result = compare("encoder_forward", "-v", 7, "--against", path, "--repeat-runs", 2, build=build)
    assert result.returncode == 2 and "no version at these shapes" in result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# the terminal, and refusals


def test_a_terminal_has_colour_and_a_bar(fake):
    build = fake(v1=[2.0], v2="wrong", v3=[1.0])
    leader, follower = pty.openpty()
    process = subprocess.Popen([*COMMAND, "encoder_forward", "--build", str(build)], stdout=follower, stderr=follower,
                               env={key: value for key, value in os.environ.items() if key != "NO_COLOR"})
    os.close(follower)
    text = b""
    try:
        while True:
            text += os.read(leader, 65536)
    except OSError:  # the end of a terminal
        pass
    os.close(leader)
    assert process.wait(timeout=20) == 1
    text = text.decode()
    assert re.search(r"\r\033\[K\[#{6} {14}\] 1/3  encoder_forward 2 \| \d+ s, about \d+ s left", text), text
    assert re.search(r"\033\[31m2 +v2 +WRONG", text) and re.search(r"\033\[32m3 +v3", text)  # red, green


@pytest.mark.parametrize("arguments, words", [
    (["encoder_sideways"], ["'encoder_sideways'", "encoder_forward"]),
    (["encoder_forward", "--unknown"], ["--unknown"]),
    (["encoder_forward", "--dtype", "fp64"], ["--dtype", "'fp64'"]),
    (["encoder_forward", "-b", "8,x"], ["-b", "'x'"]),
    (["encoder_forward", "--versions", "3,9"], ["--versions", "'9'"]),
    (["encoder_forward", "--versions", "three"], ["--versions", "'three'"]),
    (["encoder_forward", "--sweep", "V=9..8"], ["--sweep", "'V=9..8'"]),
    (["classifier_fused", "--sweep", "C=8..16"], ["--sweep", "classifier_fused"]),
    (["encoder_forward", "--repeat-runs", "0"], ["--repeat-runs"]),
    (["encoder_forward", "--repeat-runs", "x"], ["--repeat-runs"]),
    (["encoder_forward", "-b", "8", "encoder_backward"], ["'encoder_backward'", "names come first"]),
    (["encoder_forward", "--brief"], ["--brief"]),
    (["encoder_forward", "--against", "/nowhere/old.json"], ["--against", "/nowhere/old.json"]),
    (["encoder_forward", "--against", str(ROOT / "README.md")], ["--against", "README.md"]),
    (["encoder_forward", "--json", "/nowhere/new.json"], ["--json", "/nowhere/new.json"]),
    (["encoder_forward", "--tokens", "/nowhere/tokens.bin"], ["/nowhere/tokens.bin"]),
])
def test_bad_arguments(arguments, words):
    result = compare(*arguments)
    assert (result.returncode, result.stdout) == (2, ""), result
    assert result.stderr.count("\n") == 1 and all(word in result.stderr for word in words), result.stderr


def test_what_is_not_built(tmp_path):
    result = compare("encoder_forward", build=tmp_path)
    assert (result.returncode, result.stdout) == (2, "") and "make encoder_forward" in result.stderr
