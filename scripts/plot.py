#!/usr/bin/env python3
"""Draws pictures of measurements: of dev/results, of the programs' --json, or of compare.py's.

    scripts/plot.py RESULTS.jsonl... -o DIR [--only KINDS] [--format png,svg]

    ladder        every version of each family: share of the ceiling and time (the shapes of the README)
    block-size    time by block size, a picture for each family
    sweep         share of the ceiling by a dimension that has three or more values, everything else being equal
    memory        lm_head: time by scratch memory, for shapes measured with two or more budgets
    roofline      rate by arithmetic intensity, below the copy rate and the rate of the bare matrix products

KINDS is a list of these, separated by commas; by default, all for which the files have records. Each picture names the
device and the commits of its records. Needs matplotlib: pip install -r scripts/requirements-plot.txt
"""
import argparse
import hashlib
import json
import os
import re
import sys
import textwrap
import typing

import results

# The colours of Okabe and Ito, which colour-blind readers can tell apart; without yellow, which is too light on paper.
# Each line has a marker and a line style too.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*", "<", "p"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1))]

WIDTH = 7.2  # inches, the text width of a printed page
SETTINGS = {"font.size": 9, "axes.titlesize": 9, "axes.spines.top": False, "axes.spines.right": False,
            "axes.grid": True, "axes.axisbelow": True, "grid.color": "#dddddd", "grid.linewidth": 0.6,
            "legend.frameon": False, "svg.hashsalt": "bookends", "lines.markersize": 5, "lines.linewidth": 1.4}


def refuse(message):
    print("plot.py: " + message, file=sys.stderr)
    sys.exit(2)


class Picture(typing.NamedTuple):
    """A picture to draw: the file's name without its ending, numbers and text, and draw(data) -> Figure."""
    name: str
    data: dict
    draw: typing.Callable

    def fingerprint(self):
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# data


def footer(records):
    devices = sorted({record["device"] for record in records})
    return ", ".join(devices) + ", built from " + ", ".join(sorted({record["commit"] for record in records}))


def middle(records, key):
    """For each value of key(record), the record with the median time, since several processes may have measured it."""
    groups = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return {value: sorted(group, key=lambda record: record["time_ms_median"])[(len(group) - 1) // 2]
            for value, group in groups.items()}


def level(record):
    """A record's share of the ceiling in percent, or its GB/s where the ceiling was not measured."""
    share = results.share_of_ceiling(record)[0]
    return record["gbps"] if share is None else share


def level_label(record):
    share, ceiling = results.share_of_ceiling(record)
    if share is None:
        return "bandwidth (GB/s)"
    return "share of the copy rate (%)" if ceiling == "copy" else "share of the bare products' rate (%)"


def version_label(record):
    return f"{record['version']} {record['name']}"


def families(records):
    """(name, records of one shape) for each family, at its ladder's shape. A kernel without measurements at the shapes
    of its ladders is one family, at the first shape of the records."""
    for kernel in results.KERNELS:
        own = [record for record in records if record["kernel"] == kernel]
        ladders = [ladder for ladder in results.LADDERS if ladder.kernel == kernel]
        shapes = {results.shape(record) for record in own}
        measured = [(ladder.name, ladder.shape) for ladder in ladders if ladder.shape in shapes]
        for name, shape in measured or ([(kernel, results.shape(own[0]))] if own else []):
            yield name, [record for record in own if results.shape(record) == shape]


def ladder_pictures(records):
    panels, used = [], []
    for name, own in families(records):
        best = middle([record for record in own if record["best"]], lambda record: record["version"])
        rows = [record for _, record in sorted(best.items())]
        used += rows
        panels.append({"title": name, "shape": results.shape(own[0]), "label": level_label(rows[-1]),
                       "versions": [version_label(record) for record in rows],
                       "levels": [level(record) for record in rows],
                       "times": [record["time_ms_median"] for record in rows]})
    if panels:
        yield Picture("ladder", {"panels": panels, "footer": footer(used)}, draw_ladders)


def block_size_pictures(records):
    for name, own in families(records):
        own = [record for record in own if record["block_size"]]
        if len({record["block_size"] for record in own}) < 2:
            continue
        points = middle(own, lambda record: (record["version"], record["block_size"]))
        lines = {}
        for _, record in sorted(points.items()):
            lines.setdefault(version_label(record), []).append((record["block_size"], record["time_ms_median"]))
        yield Picture("block-size-" + name, {"title": f"{name}, {results.shape(own[0])}", "lines": lines,
                                             "x": "block size (threads)", "y": "time (ms)", "y_log": True,
                                             "footer": footer(own)}, draw_lines)


def sweep_pictures(records):
    groups = {}
    for record in records:
        if not record["best"]:
            continue
        shape = results.shape(record)
        if record["P"] and record["P"] == -(-record["V"] // 128) * 128:  # P follows V
            shape = re.sub(r" P\d+", "", shape)
        for dim in "BTCVP":
            if re.search(rf"\b{dim}\d+", shape):
                rest = re.sub(rf"\b{dim}\d+ ?", "", shape)
                groups.setdefault((record["kernel"], dim, rest), []).append(record)
    names = {}
    for (kernel, dim, rest), own in groups.items():
        if len({record[dim] for record in own}) < 3:
            continue
        points = middle(own, lambda record: (record["version"], record[dim]))
        lines = {}
        for _, record in sorted(points.items()):
            lines.setdefault(version_label(record), []).append((record[dim], level(record)))
        name = f"sweep-{kernel}-{dim}"
        names[name] = names.get(name, 0) + 1
        number = f"-{names[name]}" if names[name] > 1 else ""
        yield Picture(name + number, {"title": f"{kernel}, {rest}", "lines": lines, "x": f"{dim} (elements)",
                                      "y": level_label(own[-1]), "y_log": False, "footer": footer(own)}, draw_lines)


def memory_pictures(records):
    """Scratch memory and time of each version of lm_head, in a panel for each shape."""
    shapes = {}
    for record in records:
        if record["kernel"] == "lm_head":
            shapes.setdefault(re.sub(r" (memory|sweep)=\S+", "", results.shape(record)), []).append(record)
    panels, used = [], []
    for shape, own in shapes.items():
        if len({record["memory"] for record in own}) < 2:
            continue
        points = middle(own, lambda record: (record["version"], record["scratch_pct_of_logits"]))
        lines = {}
        for _, record in sorted(points.items()):
            lines.setdefault(version_label(record), []).append(
                (record["scratch_pct_of_logits"], 100 / results.share_of_ceiling(record)[0]))
        last = own[-1]
        logits = last["scratch_bytes"] / last["scratch_pct_of_logits"] * 100 / 2**30
        panels.append({"title": f"{shape}, logits {logits:.3g} GiB", "lines": lines})
        used += own
    if panels:
        yield Picture("memory", {"panels": panels, "x": "scratch memory (% of the logits)", "footer": footer(used),
                                 "y": "time (multiple of the bare products)"}, draw_memory)


def roofline_pictures(records):
    copies = [record["copy_gbps"] for record in records if record["copy_gbps"]]
    if not copies:
        return
    products = [record["flops"] / record["gemms_ms"] * 1e-9 for record in records
                if record.get("gemms_ms") and record["dtype"] != "fp32"]
    points, used = {}, []
    for name, own in families(records):
        best = middle([record for record in own if record["best"] and record["flops"]],
                      lambda record: record["version"])
        if best:
            ends = [best[min(best)], best[max(best)]]
            points[name] = [[record["flops"] / record["bytes"], record["tflops"]] for record in ends]
            used += ends
    if points:
        yield Picture("roofline", {"copy": max(copies), "products": max(products, default=None), "points": points,
                                   "x": "arithmetic intensity (flop/byte)", "y": "rate (TFLOP/s)",
                                   "footer": footer(used)}, draw_roofline)


KINDS = {"ladder": ladder_pictures, "block-size": block_size_pictures, "sweep": sweep_pictures,
         "memory": memory_pictures, "roofline": roofline_pictures}


def pictures(records, kinds=KINDS):
    timed = [record for record in records if record["version"] > 0 and record["time_ms_median"]]
    return [picture for kind in kinds for picture in KINDS[kind](timed)]


# ---------------------------------------------------------------------------------------------------------------------
# drawing


def new_figure(height, rows=1, columns=1, **options):
    import matplotlib
    import matplotlib.figure
    matplotlib.rcParams.update(SETTINGS)
    figure = matplotlib.figure.Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def finish(figure, text):
    figure.text(0.995, 0.005, text, ha="right", va="bottom", fontsize=7, color="#444444")
    figure.get_layout_engine().set(rect=(0, 0.2 / figure.get_figheight(), 1, 1 - 0.2 / figure.get_figheight()))
    return figure


def style(index):
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)],
            "linestyle": LINES[index % len(LINES)]}


def set_plain_ticks(axis, subdivisions):
    """Ticks of a logarithmic axis (axis.xaxis or axis.yaxis) at these multiples of powers of ten, without exponents."""
    import matplotlib.ticker
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=subdivisions, numticks=30))
    axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def draw_ladders(data):
    """Bars, version 1 on top, in two columns of panels. The times are to the right of the bars."""
    panels = data["panels"]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    sizes = [max(len(panel["versions"]) for panel in panels[columns * i:columns * i + columns]) for i in range(rows)]
    heights = [0.9 + 0.2 * size for size in sizes]  # inches
    figure, axes = new_figure(sum(heights) + 0.2, rows, columns, gridspec_kw={"height_ratios": heights})
    for axis, panel in zip(axes.flat, panels):
        percent = "%" in panel["label"]
        full = 100 if percent else max(panel["levels"])
        axis.barh(range(len(panel["versions"])), panel["levels"], color=COLOURS[0], height=0.72)
        for place, (height, time) in enumerate(zip(panel["levels"], panel["times"])):
            inside = height > full / 4
            text = f"{height:.1f}%" if percent else f"{height:.3g}"
            axis.text(height + (-0.02 if inside else 0.02) * full, place, text, fontsize=8, va="center",
                      ha="right" if inside else "left", color="white" if inside else "black")
            axis.text(1.5 * full, place, f"{time:.3g} ms", fontsize=8, va="center", ha="right")
        axis.set_yticks(range(len(panel["versions"])), panel["versions"], fontsize=8)
        axis.invert_yaxis()
        axis.grid(False, axis="y")
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel(panel["label"], loc="left")
        if percent:
            axis.axvline(100, color="black", linewidth=1)
        axis.locator_params(axis="x", nbins=4)
        axis.set_xticks(range(0, 101, 20) if percent else [tick for tick in axis.get_xticks() if tick <= full])
        axis.set_xlim(0, 1.5 * full)
        axis.spines["bottom"].set_bounds(0, full)
        axis.set_title("\n".join([panel["title"], *textwrap.wrap(panel["shape"], 42)]), loc="left", fontsize=8)
    for axis in axes.flat[len(panels):]:
        axis.remove()
    return finish(figure, data["footer"])


def set_x_values(axis, values):
    """A logarithmic axis whose ticks are the values themselves."""
    axis.set_xscale("log", base=2)
    crowded = len(values) > 9 or any(after < 1.3 * before for before, after in zip(values, values[1:]))
    axis.set_xticks(values, [str(value) for value in values], rotation=45 if crowded else 0)
    axis.minorticks_off()


def draw_lines(data):
    figure, axes = new_figure(3.8)
    axis = axes[0, 0]
    for index, (label, points) in enumerate(data["lines"].items()):
        axis.plot(*zip(*points), label=label, **style(index))
    if data["y_log"]:
        axis.set_yscale("log")
        set_plain_ticks(axis.yaxis, (1, 2, 5))
    else:
        axis.set_ylim(0, 105 if "%" in data["y"] else None)
    set_x_values(axis, sorted({x for points in data["lines"].values() for x, _ in points}))
    axis.set_xlabel(data["x"])
    axis.set_ylabel(data["y"])
    axis.set_title(data["title"], loc="left")
    figure.legend(loc="outside right center", title="version")
    return finish(figure, data["footer"])


def draw_memory(data):
    """A panel for each shape. The last version has a broad line, behind the versions that it chooses from."""
    panels = data["panels"]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = new_figure(2.4 * rows + 0.8, rows, columns, sharex=True, sharey=True)
    labels = list(dict.fromkeys(label for panel in panels for label in panel["lines"]))
    for axis, panel in zip(axes.flat, panels):
        for label, points in panel["lines"].items():
            last = {"linewidth": 4, "markersize": 9, "linestyle": "-", "zorder": 1} if label == labels[-1] else {}
            axis.plot(*zip(*points), label=label, **{**style(labels.index(label)), **last})
        axis.set_xscale("log")
        set_plain_ticks(axis.xaxis, (1, 2, 5))
        axis.axhline(1, color="black", linewidth=1)
        axis.set_title(panel["title"], loc="left", fontsize=8)
    for axis in axes.flat[len(panels):]:
        axis.remove()
    for axis in axes[-1]:
        axis.set_xlabel(data["x"])
    for axis in axes[:, 0]:
        axis.set_ylabel(data["y"])
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return finish(figure, data["footer"])


def draw_roofline(data):
    """The roofs, and a vertical line from version 1 to the last version of each family."""
    figure, axes = new_figure(4.2)
    axis = axes[0, 0]
    xs = [x for ends in data["points"].values() for x, _ in ends]
    right = 4 * max(xs)
    left = min(xs) / 4
    copy, products = data["copy"] * 1e-3, data["products"]  # TFLOP/s per flop/byte, and TFLOP/s
    corner = min(right, products / copy) if products else right
    axis.plot([left, corner], [left * copy, corner * copy], color="black",
              label=f"copy rate, {data['copy']:.0f} GB/s")
    if products and corner < right:
        axis.plot([corner, right], [products, products], color="black", linestyle="--",
                  label=f"bare products, {products:.0f} TFLOP/s")
    for index, (name, ends) in enumerate(data["points"].items()):
        (x, low), (_, high) = ends
        colour = style(index)["color"]
        axis.plot([x, x], [low, high], color=colour, linewidth=0.8)
        axis.plot([x], [low], color=colour, marker=style(index)["marker"], markerfacecolor="white", linestyle="")
        axis.plot([x], [high], color=colour, marker=style(index)["marker"], linestyle="", label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(data["x"])
    axis.set_ylabel(data["y"])
    axis.set_title("filled: the last version; open: version 1", loc="left")
    figure.legend(loc="outside right center")
    return finish(figure, data["footer"])


# ---------------------------------------------------------------------------------------------------------------------


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        refuse(message + " (see --help)")


def listed(option, text, known):
    values = text.split(",")
    for value in values:
        if value not in known:
            refuse(f"{option}: '{value}' is not one of {', '.join(known)}")
    return values


def read_all(paths):
    records = []
    for path in paths:
        try:
            records += results.read(path)
            pictures(records)
        except OSError as error:
            refuse(f"cannot read '{path}': {error.strerror}")
        except (ValueError, KeyError, TypeError):
            refuse(f"'{path}' is not a file of the programs' records")
    devices = sorted({record["device"] for record in records})
    if len(devices) > 1:
        refuse("the records are of several devices: " + ", ".join(devices))
    return records


def main():
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__.strip())
        return
    parser = OneLineParser(add_help=False)
    parser.add_argument("files", nargs="+", metavar="RESULTS.jsonl")
    parser.add_argument("-o", required=True, dest="directory", metavar="DIR")
    parser.add_argument("--only", default=",".join(KINDS), metavar="KINDS")
    parser.add_argument("--format", default="png,svg", metavar="FORMATS")
    options = parser.parse_args()
    kinds = listed("--only", options.only, list(KINDS))
    formats = listed("--format", options.format, ["png", "svg"])
    drawn = pictures(read_all(options.files), kinds)
    if not drawn:
        refuse("no times in " + ", ".join(options.files))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        refuse("needs matplotlib: pip install -r scripts/requirements-plot.txt")
    try:
        os.makedirs(options.directory, exist_ok=True)
        for picture in drawn:
            figure = picture.draw(picture.data)
            for ending in formats:
                metadata = {"Description": "records " + picture.fingerprint()}
                if ending == "svg":
                    metadata["Date"] = None
                path = os.path.join(options.directory, picture.name + "." + ending)
                figure.savefig(path, dpi=150, metadata=metadata)
                print(path)
    except OSError as error:
        refuse(f"-o: cannot write '{options.directory}': {error.strerror}")


if __name__ == "__main__":
    main()
