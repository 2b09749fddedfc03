#!/usr/bin/env python3
"""Writes the measurements into README.md and dev/results/README.md, between their markers.

    scripts/tables.py            rewrites both
    scripts/tables.py --check    exit 1 if one is out of date

    <!-- summary nvidia-h200 -->                 one row a kernel: its default version at one shape
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
PAGES = [os.path.join(ROOT, "README.md"), os.path.join(RESULTS, "README.md")]

# The shape of each kernel that the summary shows.
HEADLINES = {"encoder_forward": "B64 T1024 C768 V50257 bf16 uniform",
             "encoder_backward": "B64 T1024 C768 V50257 bf16 zipf",
             "classifier_fused": "B8 T1024 V50257 P50304 bf16 uniform",
             "lm_head": "B8 T1024 C2048 V128256 bf16 uniform"}

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


def best_records(device, kernel):
    """All records of a kernel, and by shape and version those of the best block sizes."""
    with open(os.path.join(RESULTS, device, kernel + ".jsonl")) as file:
        records = [json.loads(line) for line in file]
    best = {}
    for record in records:
        if record.get("best"):
            best.setdefault(shape(record), {})[record["version"]] = record
    return records, best


def table(device, kernel):
    """One row a shape, one column a version: milliseconds and share of the copy rate at the best block size."""
    records, best = best_records(device, kernel)
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


def summary(device):
    """One row a kernel: the time of its default version, what it amounts to, and the gain over version 1."""
    lines = ["| kernel | shape | default version | time | % of copy | against version 1 |", "|---|---|---|---|---|---|"]
    for kernel, headline in HEADLINES.items():
        versions = best_records(device, kernel)[1][headline]
        last = versions[max(versions)]
        ratio = last.get("ratio_to_gemms")
        share = (f"{ratio:.2f}x the bare products, {last['scratch_pct_of_logits']:.0f}% of the logits' memory" if ratio
                 else f"{last['pct_of_copy']:.1f}%")
        gain = versions[min(versions)]["time_ms_median"] / last["time_ms_median"]
        lines.append(f"| `{kernel}` | {headline} | {last['version']} {last['name']} | {last['time_ms_median']:.4g} ms | "
                     f"{share} | {gain:.{0 if gain >= 10 else 1}f}x faster |")
    return "\n".join(lines)


def output(path):
    with open(os.path.join(RESULTS, path)) as file:
        return "```\n" + file.read().rstrip("\n") + "\n```"


def fill(text):
    def replace(match):
        kind, *arguments = match[1].split()
        body = {"table": table, "output": output, "summary": summary}[kind](*arguments)
        return f"<!-- {match[1]} -->\n{body}\n<!-- end -->"
    return re.sub(r"<!-- ((?:table|output|summary) [^>]*?) -->\n.*?<!-- end -->", replace, text, flags=re.S)


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    for page in PAGES:
        with open(page) as file:
            old = file.read()
        new = fill(old)
        if new != old and sys.argv[1:]:
            sys.exit(f"{os.path.relpath(page, ROOT)}: its tables are out of date; run scripts/tables.py")
        if new != old:
            with open(page, "w") as file:
                file.write(new)


if __name__ == "__main__":
    main()
