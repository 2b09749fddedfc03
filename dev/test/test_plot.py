"""scripts/plot.py: what its pictures show, whether all of it can be read, and what it refuses."""

import itertools
import json
import re
import statistics
import struct
import subprocess
import sys
import xml.etree.ElementTree

import pytest

import bookends
from bookends import ROOT

pytestmark = pytest.mark.skipif(bool(bookends.SANITIZE) or bookends.DEVICE == "cuda", reason="the same on each device")

sys.path.append(str(ROOT / "scripts"))
import plot  # noqa: E402

try:
    import matplotlib.text
    missing = False
except ImportError:
    missing = True
needs_matplotlib = pytest.mark.skipif(missing, reason="needs matplotlib (scripts/requirements-plot.txt)")

RESULTS = ROOT / "dev" / "results" / "nvidia-h200"
FORWARD, LM_HEAD = RESULTS / "encoder_forward.jsonl", RESULTS / "lm_head.jsonl"
LADDER_SHAPE = dict(B=64, T=1024, C=768, V=50257, dtype="bf16", tokens="uniform")


def read(*paths):
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def matches(record, **values):
    return all(record[key] == value for key, value in values.items())


def forward_records(**changes):
    """The records of encoder_forward at its ladder's shape."""
    return [dict(record, **changes) for record in read(FORWARD) if matches(record, **LADDER_SHAPE)]


def drawn(records, kind):
    """name -> figure, rendered, of one kind of picture. Their text is legible (check_legible)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    figures = {}
    for picture in plot.pictures(records, [kind]):
        figure = figures[picture.name] = picture.draw(picture.data)
        FigureCanvasAgg(figure).draw()
        check_legible(figure)
        footer = figure.texts[-1].get_text()
        for record in records:
            assert record["device"] in footer
        assert re.search(r"built from [0-9a-f]{12}", footer)
    return figures


def check_legible(figure):
    width, height = figure.get_window_extent().size
    axes_of_figure = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    hidden = set()  # labels of ticks beyond the ends of an axis
    for axis in axes_of_figure:
        low, high = sorted(axis.get_view_interval())
        hidden |= {label for tick in axis.get_major_ticks() + axis.get_minor_ticks()
                   for label in (tick.label1, tick.label2) if not low <= tick.get_loc() <= high}
    for text in figure.findobj(matplotlib.text.Text):
        if not text.get_text() or not text.get_visible() or text in hidden:
            continue
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, text.get_text()
        assert text.get_fontsize() >= 7
    for axis in axes_of_figure:
        labels = [label for label in axis.get_ticklabels() if label.get_text() and label not in hidden]
        if not any(label.get_rotation() for label in labels):
            boxes = [label.get_window_extent() for label in labels]
            assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2)), labels
    for axes in figure.axes:
        titles = [other._left_title for other in figure.axes if other is not axes]
        box = axes._left_title.get_window_extent()
        assert not any(box.overlaps(title.get_window_extent()) for title in titles), axes.get_title(loc="left")


def labelled(axes):
    return [line for line in axes.lines if not line.get_label().startswith("_")]


def lines_of(axes):
    """label -> points"""
    return {line.get_label(): list(zip(*line.get_data())) for line in labelled(axes)}


def check_styles(axes):
    """Each line differs from the others in its colour, its marker and its line style."""
    lines = labelled(axes)
    assert len(lines) > 1 and {line.get_color() for line in lines} <= set(plot.COLOURS)
    for style in ("get_color", "get_marker"):
        assert len({getattr(line, style)() for line in lines}) == len(lines)
    assert len({str(line._unscaled_dash_pattern) for line in lines}) >= len(lines) - 1


# ---------------------------------------------------------------------------------------------------------------------
# content


@needs_matplotlib
def test_ladder():
    records = read(*RESULTS.glob("*.jsonl"))
    figure = drawn(records, "ladder")["ladder"]
    panels = {axes.get_title(loc="left").split("\n")[0]: axes for axes in figure.axes}
    assert {"encoder_forward", "encoder_backward", "classifier_fused", "lm_head"} <= set(panels)
    for name, shape, label, share in (
            ("encoder_forward", LADDER_SHAPE, "share of the copy rate (%)", lambda record: record["pct_of_copy"]),
            ("lm_head", dict(C=2048, memory="25%", forward=False), "share of the bare products' rate (%)",
             lambda record: 100 * record["gemms_ms"] / record["time_ms_median"])):
        axes = panels[name]
        best = [record for record in records if record["kernel"] == name and record["best"] and
                matches(record, **shape)]
        assert len(best) >= 5 and axes.get_xlabel() == label
        assert [bar.get_width() for bar in axes.patches] == pytest.approx([share(record) for record in best], rel=0.02)
        assert [text.get_text() for text in axes.get_yticklabels()] == [
            "%d %s" % (record["version"], record["name"]) for record in best]
        texts = [text.get_text() for text in axes.texts]
        for record in best:
            assert "%.3g ms" % record["time_ms_median"] in texts
        assert axes.yaxis_inverted()  # version 1 is on top


def all_families():
    """Records of each ladder, with the figures of encoder_forward."""
    for ladder in plot.results.LADDERS:
        values = {"kernel": ladder.kernel, "P": None, "C": None}
        for word in ladder.shape.split():
            key, equals, value = word.partition("=")
            if re.fullmatch(r"[BTCVP]\d+", word):
                values[word[0]] = int(word[1:])
            elif equals:
                values[key] = value
            else:
                values["dtype" if word[-1].isdigit() else "sparse" if word == "sparse" else "tokens"] = \
                    True if word == "sparse" else word
        if ladder.kernel == "embedding_lookup_backward":
            values["bag"] = "sum"
        yield from forward_records(**values)


@needs_matplotlib
def test_all_families_have_room():
    records = list(all_families())
    figure = drawn(records, "ladder")["ladder"]
    titles = [axes.get_title(loc="left").split("\n") for axes in figure.axes]
    assert [title[0] for title in titles] == [ladder.name for ladder in plot.results.LADDERS]
    assert [" ".join(title[1:]) for title in titles] == [ladder.shape for ladder in plot.results.LADDERS]
    figure = drawn(records, "roofline")["roofline"]
    points = [(line.get_color(), line.get_marker()) for line in labelled(figure.axes[0])
              if line.get_linestyle() == "None"]
    assert len(points) == len(set(points)) == len(plot.results.LADDERS)


@needs_matplotlib
def test_block_sizes():
    records = forward_records()
    (name, figure), = drawn(records, "block-size").items()
    axes, = figure.axes
    assert name == "block-size-encoder_forward"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("block size (threads)", "time (ms)")
    assert "B64 T1024 C768 V50257 bf16 uniform" in axes.get_title(loc="left")
    lines = lines_of(axes)
    assert len(lines) == 5 and [text.get_text() for text in figure.legends[0].texts] == list(lines)
    for label, points in lines.items():
        assert points == [(record["block_size"], record["time_ms_median"]) for record in records
                          if label == "%d %s" % (record["version"], record["name"])]
    check_styles(axes)


@needs_matplotlib
def test_a_sweep_shows_medians_of_processes():
    records = []
    for V, factor in itertools.product((8192, 16384, 32768, 65536), (1.0, 1.2, 1.1)):
        records += [dict(record, V=V, time_ms_median=factor * record["time_ms_median"], pct_of_copy=V / 1e3 / factor)
                    for record in forward_records() if record["best"]]
    (name, figure), = drawn(records, "sweep").items()
    axes, = figure.axes
    assert name == "sweep-encoder_forward-V"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("V (elements)", "share of the copy rate (%)")
    assert "B64 T1024 C768 bf16 uniform" in axes.get_title(loc="left")
    lines = lines_of(axes)
    assert len(lines) == 5
    for points in lines.values():
        assert points == [(V, pytest.approx(V / 1e3 / statistics.median([1.0, 1.2, 1.1])))
                          for V in (8192, 16384, 32768, 65536)]
    assert axes.get_ylim() == (0, 105)
    check_styles(axes)
    assert plot.pictures([record for record in records if record["V"] < 30000], ["sweep"]) == []  # two values


@needs_matplotlib
def test_memory():
    records = read(LM_HEAD)
    figure = drawn(records, "memory")["memory"]
    assert len(figure.axes) == 4
    assert figure.axes[-1].get_xlabel() == "scratch memory (% of the logits)"
    assert figure.axes[0].get_ylabel() == "time (multiple of the bare products)"
    axes = next(axes for axes in figure.axes if "C4096 V128256" in axes.get_title(loc="left"))
    assert "logits 1.96 GiB" in axes.get_title(loc="left")  # 8192 rows of 128256 bf16
    lines = lines_of(axes)
    assert list(lines) == ["1 textbook", "2 fused", "3 rows", "4 vocabulary", "5 epilogue", "6 planned"]
    planned = [record for record in records if matches(record, version=6, C=4096)]
    assert len(planned) == 3
    planned.sort(key=lambda record: record["scratch_pct_of_logits"])
    assert lines["6 planned"] == [(record["scratch_pct_of_logits"], pytest.approx(record["ratio_to_gemms"]))
                                  for record in planned]
    assert len(lines["2 fused"]) == 1  # its memory does not depend on the budget
    check_styles(axes)


@needs_matplotlib
def test_roofline():
    records = forward_records() + [record for record in read(LM_HEAD) if matches(record, C=2048, memory="25%")]
    figure = drawn(records, "roofline")["roofline"]
    axes, = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("arithmetic intensity (flop/byte)", "rate (TFLOP/s)")
    lines = lines_of(axes)
    roofs = [label for label in lines if re.search(r"(copy rate|bare products), \d+ (GB|TFLOP)/s", label)]
    assert len(roofs) == 2
    copy = max(record["copy_gbps"] for record in records)
    for x, y in lines[roofs[0]]:
        assert y == pytest.approx(x * copy * 1e-3)
    corner, flat = lines[roofs[0]][1], lines[roofs[1]]
    assert corner == flat[0] and flat[0][1] == flat[1][1]
    for name, version in (("encoder_forward", 5), ("lm_head", 6)):
        record, = [record for record in records if matches(record, kernel=name, best=True, version=version)]
        seconds = record["time_ms_median"] * 1e-3
        assert lines[name] == [(pytest.approx(record["flops"] / record["bytes"]),
                                pytest.approx(record["flops"] / seconds * 1e-12, rel=1e-3))]


@needs_matplotlib
def test_without_a_ceiling_there_are_bandwidths():
    records = forward_records(pct_of_copy=None, copy_gbps=None, B=3)
    axes, = drawn(records, "ladder")["ladder"].axes
    assert axes.get_xlabel() == "bandwidth (GB/s)" and "B3 T1024" in axes.get_title(loc="left")
    assert [bar.get_width() for bar in axes.patches] == [record["gbps"] for record in records if record["best"]]
    assert plot.pictures(records, ["roofline"]) == []


# ---------------------------------------------------------------------------------------------------------------------
# files


def script(*arguments, **environment):
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "plot.py"), *map(str, arguments)],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True,
                          env=environment or None)


@needs_matplotlib
def test_files(tmp_path):
    result = script(FORWARD, "-o", tmp_path / "new", "--only", "ladder,block-size")
    assert (result.returncode, result.stderr) == (0, "")
    names = ["block-size-encoder_forward.png", "block-size-encoder_forward.svg", "ladder.png", "ladder.svg"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == names
    assert sorted(line.split("/")[-1] for line in result.stdout.splitlines()) == names
    for path in (tmp_path / "new").iterdir():
        data = path.read_bytes()
        assert len(data) < 200000
        if path.suffix == ".png":
            width, height = struct.unpack(">II", data[16:24])
            assert data[:8] == b"\x89PNG\r\n\x1a\n" and width == 1080 and 250 < height < 700
        else:
            root = xml.etree.ElementTree.fromstring(data)
            assert root.tag.endswith("svg") and root.get("width") == "518.4pt"  # 7.2 inches
    before = (tmp_path / "new" / "ladder.svg").read_bytes()
    assert script(FORWARD, "-o", tmp_path / "new", "--only", "ladder", "--format", "svg").returncode == 0
    assert (tmp_path / "new" / "ladder.svg").read_bytes() == before


@pytest.mark.parametrize("name", ["ladder", "memory"])
def test_pictures_of_the_readme_are_current(name):
    """If this fails, run `make plots`."""
    picture, = plot.pictures(read(*sorted(RESULTS.glob("*.jsonl"))), [name])
    assert "records " + picture.fingerprint() in (RESULTS / (name + ".svg")).read_text()
    assert "](dev/results/nvidia-h200/%s.svg)" % name in (ROOT / "README.md").read_text()


def test_refusals(tmp_path):
    empty, other, bad = tmp_path / "empty.jsonl", tmp_path / "other.jsonl", tmp_path / "bad.jsonl"
    empty.write_text("")
    other.write_text(json.dumps(dict(read(FORWARD)[0], device="another")) + "\n")
    bad.write_text('{"kernel": "encoder_forward"}\n')
    for arguments, words in (
            ([FORWARD], ["-o"]),
            ([FORWARD, "-o", tmp_path, "--only", "pie"], ["--only", "'pie'", "ladder"]),
            ([FORWARD, "-o", tmp_path, "--format", "gif"], ["--format", "'gif'", "svg"]),
            ([tmp_path / "none.jsonl", "-o", tmp_path], ["none.jsonl"]),
            ([bad, "-o", tmp_path], ["bad.jsonl"]),
            ([ROOT / "README.md", "-o", tmp_path], ["README.md"]),
            ([empty, "-o", tmp_path], ["no times", "empty.jsonl"]),
            ([FORWARD, other, "-o", tmp_path], ["NVIDIA H200", "another"])):
        result = script(*arguments)
        assert (result.returncode, result.stdout) == (2, "") and result.stderr.count("\n") == 1, result
        assert all(word in result.stderr for word in words), result.stderr


def test_without_matplotlib(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not here')")
    result = script(FORWARD, "-o", tmp_path / "new", PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "plot.py: needs matplotlib: pip install -r scripts/requirements-plot.txt\n"
    assert not (tmp_path / "new").exists()
