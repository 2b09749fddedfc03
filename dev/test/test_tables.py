"""Tests scripts/tables.py, which writes the figures of dev/results into the README and the kernel files."""

import json
import shutil
import subprocess
import sys

import pytest

import bookends
from bookends import ROOT

pytestmark = pytest.mark.skipif(bool(bookends.SANITIZE) or bookends.DEVICE == "cuda", reason="the same on each device")

RESULTS = "dev/results/nvidia-h200"


def tables(root, *arguments):
    return subprocess.run([sys.executable, str(root / "scripts" / "tables.py"), *map(str, arguments)],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)


@pytest.fixture
def tree(tmp_path):
    """A copy of what tables.py reads and writes, with its measurements stamped: no kernel has changed since."""
    for folder in ("scripts", "parts", "dev/results"):
        shutil.copytree(str(ROOT / folder), str(tmp_path / folder))
    for path in [*ROOT.glob("*.cu"), ROOT / "common.h", ROOT / "README.md"]:
        shutil.copy(str(path), str(tmp_path))
    for path in (tmp_path / RESULTS).glob("*.jsonl"):
        assert tables(tmp_path, "--stamp", path).returncode == 0
    assert tables(tmp_path).returncode == 0
    return tmp_path


def replace(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_all_figures_are_current():
    result = tables(ROOT, "--check")
    assert result.returncode == 0, result.stderr + result.stdout


@pytest.mark.parametrize("name, old, new", [
    ("README.md", " ms |", "1 ms |"),
    ("dev/results/README.md", "% |", "1% |"),
    ("encoder_forward.cu", "% of copy", "1% of copy"),
    ("lm_head.cu", "x the bare products", "1x the bare products"),
])
def test_other_figures_are_found(tree, name, old, new):
    assert tables(tree, "--check").returncode == 0
    before = (tree / name).read_text()
    replace(tree / name, old, new)
    result = tables(tree, "--check")
    assert result.returncode == 1 and result.stderr.startswith(name + ":")
    assert tables(tree).returncode == 0
    assert (tree / name).read_text() == before


def test_a_changed_kernel_is_marked(tree):
    pages = [tree / "README.md", tree / "dev/results/README.md", tree / "encoder_forward.cu"]
    assert not any("changed since" in page.read_text() for page in pages)
    replace(tree / "common.h", "#pragma once", "#pragma once\n// A comment.")
    assert tables(tree, "--check").returncode == 0  # comments do not count
    replace(tree / "common.h", "constexpr int kWarpSize = 32;", "constexpr int kWarpSize = 16;")
    assert tables(tree, "--check").returncode == 1
    assert tables(tree).returncode == 0
    assert all("changed since" in page.read_text() for page in pages)


def test_versions_without_records_are_not_measured_yet(tree):
    path = tree / RESULTS / "encoder_forward.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["version"] != 3))
    assert tables(tree).returncode == 0
    assert "not measured yet" in (tree / "encoder_forward.cu").read_text()
    assert "Not measured yet: 3 x128" in (tree / "dev/results/README.md").read_text()
    path.unlink()
    replace(tree / "dev/results/README.md", "<!-- table nvidia-h200 encoder_forward -->", "<!-- -->")
    assert tables(tree).returncode == 0
    assert "| not measured yet |" in (tree / "README.md").read_text()
