#!/usr/bin/env python3
"""Writes the measurements into README.md and dev/results/README.md, between their markers.

    scripts/tables.py                rewrites both, and the ladder in each kernel file's header
    scripts/tables.py --check        exit 1 if one is out of date
    scripts/tables.py --stamp FILE   adds "source", a hash of the kernel's sources without comments, to each record

If a kernel has changed since it was measured (its hash differs from the records'), its figures are marked everywhere.

    <!-- summary nvidia-h200 -->                 one row per family: its default version at one shape
    <!-- table nvidia-h200 encoder_forward -->   a table of dev/results/nvidia-h200/encoder_forward.jsonl
    <!-- peers nvidia-h200 -->                   one row per job of dev/bench/peers.py (dev/results/nvidia-h200/peers)
    <!-- output nvidia-h200/run.txt -->          that file of dev/results, as a block of text
    <!-- end -->                                 ends each of them

The ladder of a table of versions, in the kernel file's header, has one line for each version, below a line "Measured
on DEVICE, SHAPE, cold:". A version without a measurement is "not measured yet".
"""
import functools
import hashlib
import json
import os
import re
import sys

import extract
import results
from results import KERNELS, LADDERS, RESULTS, ROOT

PAGES = [os.path.join(ROOT, "README.md"), os.path.join(RESULTS, "README.md")]

# The device of the ladders and of the summary.
LADDER_DEVICE, LADDER_NAME = "nvidia-h200", "NVIDIA H200"
CHANGED = "The kernels have changed since."


def best_records(device, kernel):
    """All records of a kernel, and those of the best block sizes by shape and version. Both empty if not measured."""
    path = os.path.join(RESULTS, device, kernel + ".jsonl")
    if not os.path.exists(path):
        return [], {}
    records = results.read(path)
    return records, results.best_by_shape(records)


def table(device, kernel):
    """One row per shape, one column per version: milliseconds and share of the copy rate at the best block size."""
    records, best = best_records(device, kernel)
    versions = {record["version"]: record["name"] for record in records}
    lines = ["| shape | " + " | ".join(f"{number} {name}" for number, name in versions.items()) + " |",
             "|---" * (len(versions) + 1) + "|"]
    for name, row in best.items():
        cells = [cell(row[v]) if v in row else "" for v in versions]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    if kernel == "lm_head":
        notes = (caption(records) + "median of cold runs, the same as a multiple of the bare products (two for one "
                 "gradient, one for the losses alone; both alternate, each with the best algorithm found), and the scratch "
                 "memory as a share of the logits. Matrix products draw the chip's maximum power, and its clock falls: "
                 "compare multiples, not milliseconds. Multiples repeat within about 5%.")
    else:
        rates = [record["copy_gbps"] for row in best.values() for record in row.values() if record["copy_gbps"]]
        notes = caption(records) + "median of cold runs at the best block size"
        if rates:
            notes += (", and the fewest bytes over that time as a share of the copy rate measured in the same process "
                      f"({min(rates):.0f} to {max(rates):.0f} GB/s)")
        notes += "."
        missing = [f"{number} {name}" for ladder in LADDERS if ladder.kernel == kernel
                   for number, name in version_names(ladder).items() if number not in versions]
        if missing:
            notes += " Not measured yet: " + ", ".join(missing) + "."
    if has_changed(kernel, records):
        notes += f" {CHANGED}"
    return "\n".join([*lines, "", notes])


def peers(device):
    """One row per job: the time of this library, and the times of the peers with their multiples of it."""
    folder = os.path.join(RESULTS, device, "peers")
    records = [record for name in sorted(os.listdir(folder)) for record in results.read(os.path.join(folder, name))]
    lines = ["| job | cache | bookends | peers |", "|---|---|---|---|"]
    for job in dict.fromkeys(record["job"] for record in records):
        rows = [record for record in records if record["job"] == job]
        ours = min(row["time_ms"] for row in rows if row["peer"].startswith("bookends") and "time_ms" in row)

        def text(row):
            if "error" in row:
                return f"{row['peer']}: {row['error']}"
            share = f", {row['pct_of_copy']:.0f}%" if "pct_of_copy" in row else ""
            if row["peer"].startswith("bookends"):
                return f"{row['peer'].partition(', ')[2]} {row['time_ms']:.4f} ms{share}".strip()
            return f"{row['peer']} {row['time_ms']:.4f} ms{share} ({row['time_ms'] / ours:.2f}x)"
        columns = ["; ".join(text(row) for row in rows if row["peer"].startswith("bookends") == own)
                   for own in (True, False)]
        lines.append(f"| {job.removesuffix(' hot')} | {rows[0]['cache']} | {columns[0]} | {columns[1]} |")
    versions = {f"{name} {number}" for record in records for name, number in record["versions"].items()}
    rates = [record["copy_gbps"] for record in records]
    lines += ["", caption(records) + "medians, the fewest bytes over the time as a share of the copy rate in the same process "
              f"({min(rates):.0f} to {max(rates):.0f} GB/s), and the multiple of this library's shortest time. "
              f"Found: {', '.join(sorted(versions, key=str.lower))}."]
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
    """One row per family: the time of its default version, its share of the copy rate, and the gain over version 1."""
    lines = ["| versions | shape | default version | time | % of copy | against version 1 |", "|---|---|---|---|---|---|"]
    marked = False
    for ladder in LADDERS:
        records, best = best_records(device, ladder.kernel)
        versions = best.get(ladder.shape)
        if not versions:
            number, name = max(version_names(ladder).items())
            lines.append(f"| `{ladder.name}` | {ladder.shape} | {number} {name} | not measured yet | | |")
            continue
        last = versions[max(versions)]
        ratio = last.get("ratio_to_gemms")
        share = (f"{ratio:.2f}x the bare products, {last['scratch_pct_of_logits']:.0f}% of the logits' memory" if ratio
                 else f"{last['pct_of_copy']:.1f}%")
        gain = versions[min(versions)]["time_ms_median"] / last["time_ms_median"]
        mark = " *" if has_changed(ladder.kernel, records) else ""
        marked = marked or mark
        lines.append(f"| `{ladder.name}` | {ladder.shape} | {last['version']} {last['name']} | {last['time_ms_median']:.4g} ms{mark} | "
                     f"{share} | {gain:.{0 if gain >= 10 else 1}f}x faster |")
    if marked:
        lines += ["", "\\* The kernels have changed since they were measured."]
    return "\n".join(lines)


@functools.lru_cache(maxsize=None)
def source_hash(kernel):
    """A hash of a kernel's sources without comments, white space and main(). Its measurements depend on these only."""
    declarations = extract.read(extract.ROOT / (kernel + ".cu"), set(), [])
    code = " ".join(token for declaration in declarations for token in extract.code_of(declaration.text))
    return hashlib.sha256(code.encode()).hexdigest()[:12]


def has_changed(kernel, records):
    """Whether the kernel has changed since it was measured."""
    return any(record.get("source") != source_hash(kernel) for record in records)


def stamp(path):
    records = results.read(path)
    with open(path, "w") as file:
        for record in records:
            record["source"] = source_hash(record["kernel"])
            file.write(json.dumps(record) + "\n")


def version_names(ladder):
    """The rows {number, "name", ...} of a kernel file's table of versions."""
    with open(os.path.join(ROOT, ladder.kernel + ".cu")) as file:
        table = re.search(rf"\b{ladder.name}_versions\[\] = \{{\n(.*?)^\}};", file.read(), re.M | re.S)[1]
    return {int(number): name for number, name in re.findall(r"^    \{(\d+), \"([^\"]+)\"", table, re.M)}


def ladder_text(ladder):
    """The lines of a kernel file's ladder."""
    records, best = best_records(LADDER_DEVICE, ladder.kernel)
    best = best.get(ladder.shape, {})
    lines, before = [f"Measured on an {LADDER_NAME}, {ladder.shape}, cold:"], None
    for number, name in version_names(ladder).items():
        record = best.get(number)
        if not record:
            lines.append(f"  {number}  {name:<15} not measured yet")
            before = None
            continue
        time, ratio = record["time_ms_median"], record.get("ratio_to_gemms")
        share = (f"{ratio:5.2f}x the bare products, scratch {record['scratch_pct_of_logits']:3.0f}% of the logits"
                 if ratio else f"{record['pct_of_copy']:5.1f}% of copy")
        gain = f"   {before / time:.{0 if before / time >= 10 else 2}f}x the version before" if before else ""
        lines.append(f"  {number}  {record['name']:<15} {time:9.4f} ms  {share}{gain}")
        before = time
    if best and has_changed(ladder.kernel, records):
        lines.append(f"  {CHANGED}")
    return "\n".join(lines) + "\n"


def fill_ladders(text, kernel):
    for ladder in LADDERS:
        if ladder.kernel == kernel:
            text, found = re.subn(rf"Measured on .*, {re.escape(ladder.shape)}, cold:\n(?:  .*\n)*",
                                  lambda _: ladder_text(ladder), text, count=1)
            if not found:
                sys.exit(f"{kernel}.cu has no line 'Measured on an {LADDER_NAME}, {ladder.shape}, cold:'")
    return text


def output(path):
    with open(os.path.join(RESULTS, path)) as file:
        return "```\n" + file.read().rstrip("\n") + "\n```"


def fill(text):
    def replace(match):
        kind, *arguments = match[1].split()
        body = {"table": table, "output": output, "peers": peers, "summary": summary}[kind](*arguments)
        return f"<!-- {match[1]} -->\n{body}\n<!-- end -->"
    return re.sub(r"<!-- ((?:table|output|peers|summary) [^>]*?) -->\n.*?<!-- end -->", replace, text, flags=re.S)


def main():
    checks = sys.argv[1:] == ["--check"]
    if sys.argv[1:2] == ["--stamp"] and len(sys.argv) == 3:
        return stamp(sys.argv[2])
    if sys.argv[1:] and not checks:
        sys.exit(__doc__)
    new = {page: fill for page in PAGES}
    for kernel in KERNELS:
        new[os.path.join(ROOT, kernel + ".cu")] = lambda text, kernel=kernel: fill_ladders(text, kernel)
    for path, rewrite in new.items():
        with open(path) as file:
            old = file.read()
        text = rewrite(old)
        if text != old and checks:
            sys.exit(f"{os.path.relpath(path, ROOT)}: its figures are out of date; run scripts/tables.py")
        if text != old:
            with open(path, "w") as file:
                file.write(text)


if __name__ == "__main__":
    main()
