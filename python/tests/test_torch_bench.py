"""python -m bookends.bench: its table and options, results that differ, packages that fail or are absent. And the
example."""

import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from bookends import bench  # noqa: E402

ARGUMENTS = ["-n", "8", "-c", "16", "-v", "40", "--dtype", "fp32", "--seconds", "0.01", "--no-compile"]


def test_the_table(capsys):
    bench.main(ARGUMENTS)
    text = capsys.readouterr().out
    assert "forward and backward, N=8 C=16 V=40 fp32" in text
    for job in ("embedding", "cross_entropy", "linear_cross_entropy"):
        assert re.search(rf"^{job}\n  bookends\S*.* \d+\.\d+ ms", text, re.M), job
    assert len(re.findall(r"^  torch +\d+\.\d+ ms", text, re.M)) == 3
    assert "differs" not in text and "Error" not in text


def test_what_goes_wrong_is_said(capsys, monkeypatch):
    def fails(*tensors):
        raise RuntimeError("no such GPU\nmore")

    real = bench.jobs
    monkeypatch.setattr(bench, "jobs", lambda compiled: {"cross_entropy": {
        **{name: real(compiled)["cross_entropy"][name] for name in ("bookends", "torch")},
        "twice": lambda logits, target: 2 * torch.nn.functional.cross_entropy(logits, target), "broken": fails,
        "absent": None}})
    bench.main(ARGUMENTS)
    text = capsys.readouterr().out
    assert re.search(r"^  twice .* its result differs: \d", text, re.M) and text.count("differs") == 1
    assert re.search(r"^  broken +RuntimeError: no such GPU$", text, re.M)
    assert "  not installed: absent\n" in text


def test_wrong_options(capsys):
    for wrong in (["--model", "llama-9"], ["-c", "0"], ["--dtype", "fp64"]):
        with pytest.raises(SystemExit):
            bench.main(wrong)
    assert "expected numbers from 1 on, given " in capsys.readouterr().err


def test_the_example_trains_alike_with_both(tmp_path):
    example = pathlib.Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"
    command = [sys.executable, str(example), "--steps", "4", "-b", "2", "-t", "16", "-c", "16"]
    try:
        import matplotlib  # noqa: F401
        command += ["-o", str(tmp_path / "plot.png")]
    except ImportError:
        pass
    text = subprocess.run(command, stdout=subprocess.PIPE, universal_newlines=True, check=True, timeout=200).stdout
    losses = [float(loss) for loss in re.findall(r"last loss (\d+\.\d+)", text)]
    assert len(losses) == 2 and abs(losses[0] - losses[1]) < 1e-3 and 4 < losses[0] < 6
    assert (tmp_path / "plot.png").exists() == ("-o" in command)
