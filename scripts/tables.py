#!/usr/bin/env python3
"""Writes what was measured into README.md, between its markers.

    scripts/tables.py            rewrites the README
    scripts/tables.py --check    exit 1 if it is out of date

    <!-- table nvidia-h200 encoder_forward -->   a table of dev/results/nvidia-h200/encoder_forward.jsonl
    <!-- output nvidia-h200/run.txt -->          that file of dev/results, as a block of text
    <!-- end -->                                 ends either
"""
import json
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "dev", "results")
README = os.path.join(ROOT, "README.md")

# Options that only some kernels have, and the values that go without saying.
DEFAULTS = {"no_positions": False, "grad_dtype": "same", "overwrite": False, "rounding": "nearest",
            "logits": "gaussian", "output": "in-place", "probs": False, "lse": False, "accuracy": False,
            "label_smoothing": 0, "z_loss": 0, "softcap": 0, "logit_scale": 1, "ignore_every": 0,
            "gradients": "both", "forward": False, "bias": False, "tf32": False, "memory": "25%", "sweep": "none",
            "way": "auto", "overlap": "on", "graph": False, "spread": 2, "columns": 0}
LM_HEAD = {"grad_dtype": "fp32"}


def shape(record):
    parts = [f"{key}{record[key]}" for key in "BTCVP" if record[key] is not None]
    parts += [record["dtype"], record["tokens"]]
    for key, default in {**DEFAULTS, **(LM_HEAD if record["kernel"] == "lm_head" else {})}.items():
        value = record.get(key, default)
        if value != default:
            parts.append(key if value is True else f"{key}={value}")
    return " ".join(parts)


def table(device, kernel):
    """One row a shape, one column a version: milliseconds and share of the copy rate at the best block size."""
    with open(os.path.join(RESULTS, device, kernel + ".jsonl")) as file:
        records = [json.loads(line) for line in file]
    best = {}
    for record in records:
        if record.get("best"):
            best.setdefault(shape(record), {})[record["version"]] = record
    versions = {record["version"]: record["name"] for record in records}
    lines = ["| shape | " + " | ".join(f"{number} {name}" for number, name in versions.items()) + " |",
             "|---" * (len(versions) + 1) + "|"]
    for name, row in best.items():
        cells = [cell(row[v]) if v in row else "" for v in versions]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if kernel == "lm_head":
        lines += ["", caption(records) + "median of cold runs, that as a multiple of the bare products (two for one "
                  "gradient, one for the losses alone), timed in turns at the best algorithm found, and the scratch "
                  "memory as a share of the logits. Products draw all the power that the chip may have, and its clock "
                  "follows: compare multiples rather than milliseconds, and those to some 5%."]
        return "\n".join(lines)
    rates = [record["copy_gbps"] for row in best.values() for record in row.values() if record["copy_gbps"]]
    lines += ["", caption(records) + "median of cold runs at the best block size"]
    if rates:
        lines[-1] += (", and the fewest bytes over that time as a share of the copy rate measured in the same process "
                      f"({min(rates):.0f} to {max(rates):.0f} GB/s)")
    lines[-1] += "."
    return "\n".join(lines)


def caption(records):
    commits = sorted({record["commit"] for record in records})
    return f"{records[0]['device']}, built from {', '.join(commits)}: "


def cell(record):
    ratio = record.get("ratio_to_gemms") or record.get("ratio_to_gemm")
    if ratio:
        return f"{record['time_ms_median']:.3f} ms, {ratio:.2f}x, {record['scratch_pct_of_logits']:.0f}%"
    share = "" if record["pct_of_copy"] is None else f", {record['pct_of_copy']:.1f}%"
    return f"{record['time_ms_median']:.4f} ms{share}"


def output(path):
    with open(os.path.join(RESULTS, path)) as file:
        return "```\n" + file.read().rstrip("\n") + "\n```"


def fill(text):
    def replace(match):
        kind, *arguments = match[1].split()
        body = {"table": table, "output": output}[kind](*arguments)
        return f"<!-- {match[1]} -->\n{body}\n<!-- end -->"
    return re.sub(r"<!-- ((?:table|output) [^>]*?) -->\n.*?<!-- end -->", replace, text, flags=re.S)


def main():
    with open(README) as file:
        old = file.read()
    new = fill(old)
    if sys.argv[1:] == ["--check"]:
        if new != old:
            sys.exit("README.md: its tables are out of date; run scripts/tables.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    elif new != old:
        with open(README, "w") as file:
            file.write(new)


if __name__ == "__main__":
    main()
