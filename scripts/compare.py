#!/usr/bin/env python3
"""Times versions of kernels side by side and prints a table for each kernel and shape.

    scripts/compare.py                                           every version of every kernel
    scripts/compare.py encoder_forward lm_head --versions 2,3    some versions of two kernels
    scripts/compare.py encoder_forward -b 8,64 --dtype bf16,fp32 four shapes: of each option, a list of values
    scripts/compare.py classifier_fused --sweep V=8192..262144   V = 8192, 16384, ..., 262144
    scripts/compare.py lm_head --repeat-runs 3 --json old.json   three processes per version and shape, recorded
    scripts/compare.py lm_head --repeat-runs 3 --against old.json   what has become faster or slower since

Each version runs in a process of its own: the kernel's program, which must be built. Names come first. Options that
are not listed below are passed on to the programs (NAME --help lists them). A comma separates several values of an
option; each combination is a shape. -b -t -c -v -p apply to the kernels that have them; each kernel must have the other
options.

    --versions LIST       numbers of versions, separated by commas; default: all
    --sweep DIM=A..B      DIM (B, T, C, V or P) = A, doubled up to B
    --repeat-runs INT     processes per version and shape; times are their medians; default 1
    --against FILE        an earlier --json FILE. The noise of a time is the range over its processes, and at least the
                          median relative range of all times. A change counts where it exceeds the sum of both noises.
    --json FILE           replace FILE by the records of the programs, one JSON object per line (-: standard output)
    --markdown            tables in Markdown
    --build DIR           directory of the programs; default: the top of the repository

% of copy divides the fewest bytes that the job must move by the time, and that by the rate of a device-to-device copy.
% of gemms divides the time of the bare matrix products by the time.

Ctrl-C ends the measurement; what was measured is printed and written. Exit status: 0 as expected; 1 a version failed;
2 bad arguments; 3 no device, or too little memory; 4 a version became slower; 130 Ctrl-C. Of several, the first one of
130, 1, 3 and 4 counts.
"""
import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import typing

import results

WRONG, BAD_INPUT, NO_DEVICE, SLOWER, INTERRUPTED = 1, 2, 3, 4, 130
DIMS = "BTCVP"
DIM_OPTIONS = ["-" + dim.lower() for dim in DIMS]
RESERVED = ("--list", "--brief", "--help")  # options of the programs that the tables cannot show


class Refused(Exception):
    """Ends the run: the exit status and one line for stderr."""

    def __init__(self, status, line):
        super().__init__(line)
        self.status = status


def refuse(pattern, *values):
    raise Refused(BAD_INPUT, "compare.py: " + pattern % values)


# ---------------------------------------------------------------------------------------------------------------------
# arguments


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        refuse("%s (see --help)", message)


def parse(arguments):
    """The options of this script, with .names and .passed: the programs' options as (option, values) pairs."""
    count = next((i for i, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    parser = OneLineParser(allow_abbrev=False, add_help=False)
    for option in ("--versions", "--sweep", "--against", "--json", "--build"):
        parser.add_argument(option)
    parser.add_argument("--repeat-runs", type=int, default=1)
    parser.add_argument("--markdown", action="store_true")
    options, rest = parser.parse_known_args(arguments[count:])
    options.names = list(dict.fromkeys(arguments[:count]))
    options.passed = split_options(rest)
    for name in options.names:
        if name not in results.KERNELS:
            refuse("'%s' is not one of %s", name, ", ".join(results.KERNELS))
    if options.repeat_runs < 1:
        refuse("--repeat-runs: '%d' is not an integer from 1", options.repeat_runs)
    numbers = (options.versions or "1").split(",")
    if not all(re.fullmatch("[0-9]+", number) for number in numbers):
        refuse("--versions: '%s' is not a list of numbers", options.versions)
    options.versions = options.versions and [int(number) for number in numbers]
    if options.sweep:
        options.passed = [pair for pair in options.passed if pair[0] != sweep_values(options.sweep)[0]]
        options.passed.append(sweep_values(options.sweep))
    return options


def split_options(arguments):
    """(option, values) pairs: -b 8,64, -b8,64 and -b=8,64 have two values. A flag has the value None."""
    pairs = []
    for argument in arguments:
        is_value = not re.match(r"-[^\d.]", argument)
        if is_value and pairs and pairs[-1][1] == [None]:
            pairs[-1] = (pairs[-1][0], argument.split(","))
        elif is_value:
            refuse("'%s' is neither an option nor the value of one: names come first", argument)
        else:
            option, value = re.fullmatch(r"(--[^=]*|-.)=?(.*)", argument, re.S).groups()
            joined = len(argument) > len(option)
            pairs.append((option, value.split(",") if joined else [None]))
        if pairs[-1][0] in RESERVED:
            refuse("%s: an option of the programs alone", pairs[-1][0])
    return pairs


def sweep_values(text):
    match = re.fullmatch(r"([%s])=([0-9]+)\.\.([0-9]+)" % DIMS, text)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        refuse("--sweep: '%s' is not DIM=A..B with DIM one of %s and 1 <= A <= B", text, ", ".join(DIMS))
    values, value = [], int(match[2])
    while value <= int(match[3]):
        values.append(str(value))
        value *= 2
    return "-" + match[1].lower(), values


# ---------------------------------------------------------------------------------------------------------------------
# runs


class Case(typing.NamedTuple):
    """A kernel at a shape."""
    kernel: str
    arguments: typing.Tuple[str, ...]
    versions: typing.Tuple[typing.Tuple[int, str], ...]  # numbers and names


def program(options, kernel):
    path = os.path.join(options.build or results.ROOT, kernel)
    if not os.path.isfile(path) or not os.access(path, os.X_OK):
        refuse("%s is not built: make %s, or --build DIR", os.path.relpath(path), kernel)
    return path


def ask(command):
    """The output of a program's run without measurements."""
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    except OSError as error:
        refuse("cannot run %s: %s", command[0], error.strerror)
    if result.returncode:
        raise Refused(BAD_INPUT, last_line(result.stderr) or "%s: exit status %d" % (command[0], result.returncode))
    return result.stdout


def last_line(text):
    return text.strip().split("\n")[-1]


def cases_of(options, kernel):
    """A case for each combination of the options' values."""
    path = program(options, kernel)
    dims = set(re.findall(r"^  (-[a-z]) INT", ask([path, "--help"]), re.M))
    passed = [(option, values) for option, values in options.passed if option in dims or option not in DIM_OPTIONS]
    if options.sweep and sweep_values(options.sweep)[0] not in dims:
        if options.names:
            refuse("--sweep: '%s': %s has no such dimension", options.sweep, kernel)
        return []
    cases = []
    for combination in itertools.product(*[values for _, values in passed]):
        arguments = []
        for (option, _), value in zip(passed, combination):
            arguments += [option] if value is None else [option, value]
        listed = map(json.loads, ask([path, "--list", "--json", "-", *arguments]).splitlines())
        versions = [(row["version"], row["name"]) for row in listed]
        if options.versions:
            versions = [row for row in versions if row[0] in options.versions]
        cases.append(Case(kernel, tuple(arguments), tuple(versions)))
    return cases


def all_cases(options):
    kernels = options.names or results.KERNELS
    cases = [case for kernel in kernels for case in cases_of(options, kernel)]
    known = {number for case in cases for number, _ in case.versions}
    for number in options.versions or ():
        if number not in known:
            refuse("--versions: '%d' is not a version of %s", number, " or ".join(kernels))
    return cases


class Progress:
    """A bar and the remaining time, on a terminal at stderr."""

    def __init__(self, total):
        self.total, self.done, self.what, self.start, self.drawn = total, 0, "", time.monotonic(), False

    def draw(self):
        if not sys.stderr.isatty():
            return
        elapsed = time.monotonic() - self.start
        bar = "#" * (20 * self.done // self.total)
        line = "[%-20s] %d/%d  %s | %s" % (bar, self.done, self.total, self.what, duration(elapsed))
        if self.done:
            line += ", about %s left" % duration(elapsed / self.done * (self.total - self.done))
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        sys.stderr.write("\r\033[K" + line[:width - 1])
        sys.stderr.flush()
        self.drawn = True

    def erase(self):
        if self.drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
            self.drawn = False


def duration(seconds):
    return "%.0f s" % seconds if seconds < 100 else "%.0f min" % (seconds / 60) if seconds < 6000 else \
        "%.1f h" % (seconds / 3600)


def run(command, progress):
    """Runs a program: (exit status, stdout, stderr). An exception ends it."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               universal_newlines=True)
    try:
        while True:
            progress.draw()
            try:
                out, err = process.communicate(timeout=0.25)
                return process.returncode, out, err
            except subprocess.TimeoutExpired:
                pass
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


class Result:
    """A version at a shape: the record of the best block size of each process, and the reason of a failure or skip."""

    def __init__(self, number, name):
        self.number, self.name = number, name
        self.records, self.label, self.reason = [], "", ""
        self.shape = None

    def times(self):
        return [record["time_ms_median"] for record in self.records]

    def time(self):
        """The median over the processes; None without a time, or if the version failed."""
        return statistics.median_low(self.times()) if self.records and not self.label else None

    def record(self):
        return self.records[self.times().index(self.time())]

    def add(self, status, records, errors):
        """Adds the results of a process: its exit status, records and stderr."""
        for record in records:
            self.shape = self.shape or (record["device"], results.shape(record))
            if record["skipped"]:
                self.label, self.reason = "skipped", record["skipped"]
            if record["best"]:
                self.records.append(record)
        wrong = [line for line in errors.splitlines() if line.endswith(": WRONG")]
        if status == WRONG:
            self.label, self.reason = "WRONG", (wrong or [last_line(errors)])[-1]
        elif status == NO_DEVICE:
            self.label, self.reason = "no memory", last_line(errors)
        elif status != 0:
            how = "signal %s" % signal.Signals(-status).name if status < 0 else "exit status %d" % status
            self.label, self.reason = "FAILED", ("%s: %s" % (how, last_line(errors))).rstrip(": ")


class Measurement:
    """All cases and their measurements."""

    def __init__(self, options, cases):
        self.options = options
        self.results = {case: [Result(*version) for version in case.versions] for case in cases}
        self.file = None

    def run(self, finished):
        """Runs each version of each case, several times with --repeat-runs. Calls finished(case) after its last run."""
        runs = self.options.repeat_runs
        progress = Progress(runs * sum(map(len, self.results.values())))
        try:
            for number in range(1, runs + 1):
                for case, rows in self.results.items():
                    for result in rows:
                        progress.what = "%s %d" % (case.kernel, result.number)
                        self.run_one(case, result, number, progress)
                        progress.done += 1
                    if number == runs:
                        progress.erase()
                        finished(case)
        finally:
            progress.erase()

    def run_one(self, case, result, number, progress):
        command = [program(self.options, case.kernel), str(result.number), "--json", "-", *case.arguments]
        status, out, errors = run(command, progress)
        if status == BAD_INPUT or (status == NO_DEVICE and "out of memory" not in errors):
            raise Refused(status, last_line(errors))
        records = [json.loads(line) for line in out.splitlines() if line.endswith("}")]
        self.write([dict(record, run=number) for record in records])
        result.add(status, records, errors)

    def write(self, records):
        """Adds records to the --json file, which is replaced at the first of them."""
        if not self.options.json or not records:
            return
        if not self.file:
            self.file = sys.stdout if self.options.json == "-" else open(self.options.json, "w")
        for record in records:
            self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def all_results(self):
        return [result for rows in self.results.values() for result in rows]


# ---------------------------------------------------------------------------------------------------------------------
# tables


class Printer:
    """Text with colour on a terminal, without it in a pipe; or Markdown."""

    def __init__(self, out, markdown):
        self.out, self.markdown = out, markdown
        self.colour = out.isatty() and not markdown and not os.environ.get("NO_COLOR")

    def line(self, text="", style=None):
        self.out.write(self.styled(text, style) + "\n")
        self.out.flush()

    def styled(self, text, style):
        codes = {"bold": "1", "good": "32", "bad": "31", "dim": "2"}
        return "\033[%sm%s\033[0m" % (codes[style], text) if style and self.colour else text

    def heading(self, text):
        self.line("### " + text + "\n" if self.markdown else text, "bold")

    def table(self, columns, rows, left=2, styles=None):
        """columns: headings; rows: lists of as many strings. The first `left` columns are aligned to the left. Empty
        columns are left out."""
        kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
        columns, *rows = [[row[i] for i in kept] for row in [columns, *rows]]
        if self.markdown:
            self.line("| " + " | ".join(columns) + " |")
            self.line("|" + "|".join(["---"] * left + ["---:"] * (len(columns) - left)) + "|")
            for row in rows:
                self.line("| " + " | ".join(row) + " |")
            return
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        for row, style in zip([columns, *rows], ["dim", *(styles or [None] * len(rows))]):
            cells = [cell.ljust(width) if i < left else cell.rjust(width)
                     for i, (cell, width) in enumerate(zip(row, widths))]
            self.line("  ".join(cells).rstrip(), style)


def number_text(value):
    """Two decimals, or none from 100 on; two digits of a small number."""
    return "%.2g" % value if value < 0.1 else "%.*f" % (2 if value < 100 else 0, value)


def rate_of(record):
    """The rate of a record and its unit: TFLOP/s where the ceiling is a rate of products, else GB/s."""
    return (record["gbps"], "GB/s") if results.share_of_ceiling(record)[1] == "copy" else (record["tflops"], "TFLOP/s")


def row_of(result, first, before, repeated):
    """The cells of a version: number, name, setting, time, range, rate, share, gains."""
    if result.time() is None:
        return [str(result.number), result.name, result.label or ("ok" if result.shape else "not run")] + [""] * (6 if repeated else 5)
    record, now = result.record(), result.time()
    share = results.share_of_ceiling(record)[0]
    cells = [str(result.number), result.name, str(record.get("at") or record["block_size"]), "%.4f" % now]
    if repeated:
        cells.append("%.1f%%" % (100 * spread(result.times()) / now))
    cells += [number_text(rate_of(record)[0]), "%.1f%%" % share if share else ""]
    return cells + [number_text(other / now) if other else "" for other in (first, before)]


def print_case(printer, case, rows, repeated):
    """The table of a kernel at a shape, and below it the reasons why versions failed or were skipped."""
    measured = [result for result in rows if result.time() is not None]
    shapes = [result.shape for result in rows if result.shape]
    device, shape = shapes[0] if shapes else ("an unknown device", " ".join(case.arguments))
    ceiling = results.share_of_ceiling(measured[0].record())[1] if measured else "copy"
    unit = rate_of(measured[0].record())[1] if measured else "GB/s"
    printer.heading("%s  %s  on %s" % (case.kernel, shape, device))
    columns = ["version", "name", "block size", "time (ms)", *(["range"] if repeated else []), unit, "% of " + ceiling,
               "x version 1", "x before"]
    first = next((result.time() for result in rows if result.number == 1), None)
    fastest = min(measured, key=Result.time, default=None)
    cells, styles, before = [], [], None
    for result in rows:
        cells.append(row_of(result, first, before, repeated))
        styles.append("good" if result is fastest else "bad" if result.label and result.label != "skipped" else None)
        before = result.time()
    printer.table(columns, cells, styles=styles)
    notes = ["%d %s: %s: %s" % (result.number, result.name, result.label, result.reason) for result in rows
             if result.label]
    if fastest:
        notes.insert(0, "fastest: %d %s" % (fastest.number, fastest.name))
    for note in notes:
        printer.line(("\n" if printer.markdown else "") + note)
    printer.line()


def print_sweep(printer, measurement):
    """A table for each kernel: milliseconds by the values of the sweep and by version; * marks the fastest."""
    option = sweep_values(measurement.options.sweep)[0]
    kernels = list(dict.fromkeys(case.kernel for case in measurement.results))
    for kernel in kernels:
        cases = [(case, rows) for case, rows in measurement.results.items() if case.kernel == kernel]
        names = list(dict.fromkeys((row.number, row.name) for _, rows in cases for row in rows))
        cells = []
        for case, rows in cases:
            by_name = {(row.number, row.name): row for row in rows}
            times = [by_name[name].time() if name in by_name else None for name in names]
            fastest = min(filter(None, times), default=None)
            at = case.arguments.index(option)
            others = " ".join(case.arguments[:at] + case.arguments[at + 2:])
            cells.append([case.arguments[at + 1], others, *["" if time is None else "%.4f%s" % (
                time, "*" if time == fastest else " ") for time in times]])
        printer.heading("%s: time (ms) by %s; *: the fastest" % (kernel, option[1:].upper()))
        printer.table([option[1:].upper(), "options", *["%d %s" % name for name in names]], cells)
        printer.line()


# ---------------------------------------------------------------------------------------------------------------------
# comparison with an earlier measurement


def spread(times):
    return max(times) - min(times)


def group(records):
    """The times of each kernel, device, shape and version name: one per process."""
    groups = {}
    for record in records:
        if record.get("best"):
            key = (record["kernel"], record["device"], results.shape(record), record["name"])
            groups.setdefault(key, []).append(record["time_ms_median"])
    return groups


def read_old(options):
    try:
        old = group(results.read(options.against))
    except OSError as error:
        refuse("--against: cannot read '%s': %s", options.against, error.strerror)
    except (ValueError, KeyError, TypeError, AttributeError):
        refuse("--against: '%s' is not a file of the programs' records", options.against)
    if not old:
        refuse("--against: '%s' holds no times", options.against)
    if options.repeat_runs == 1 and max(map(len, old.values())) == 1:
        refuse("--against: the noise is unknown: '%s' has one process per version; record it with --repeat-runs 3",
               options.against)
    return old


def noise(times, typical):
    return max(spread(times), typical * statistics.median_low(times))


def typical_range(groups):
    """The median of the relative ranges of all times with several processes."""
    return statistics.median(spread(times) / statistics.median_low(times) for times in groups if len(times) > 1)


def compare(printer, measurement, old):
    """Prints the versions that are faster or slower now. Returns the number of slower ones."""
    new = group(record for result in measurement.all_results() if result.time() for record in result.records)
    common = [key for key in new if key in old]
    typical = typical_range([*old.values(), *new.values()])
    cells, styles, counts = [], [], {"faster": 0, "slower": 0, "same": 0}
    for key in common:
        before, now = statistics.median_low(old[key]), statistics.median_low(new[key])
        allowed = noise(old[key], typical) + noise(new[key], typical)
        verdict = "same" if abs(now - before) <= allowed else "faster" if now < before else "slower"
        counts[verdict] += 1
        cells.append([key[0], key[2], key[3], "%.4f" % before, "%.4f" % now, number_text(before / now),
                      "%.1f%%" % (100 * allowed / before), verdict])
        styles.append({"faster": "good", "slower": "bad", "same": None}[verdict])
    if not common:
        refuse("--against: '%s' has no version at these shapes on this device", measurement.options.against)
    printer.heading("against " + measurement.options.against)
    printer.table(["kernel", "shape", "version", "old (ms)", "new (ms)", "speed", "noise", "change"], cells, left=3,
                  styles=styles)
    text = "%(faster)d faster, %(slower)d slower, %(same)d the same within the noise" % counts
    if len(common) < len(new):
        text += ", %d not in the old file" % (len(new) - len(common))
    printer.line(("\n" if printer.markdown else "") + text)
    return counts["slower"]


# ---------------------------------------------------------------------------------------------------------------------


def require_writable(path):
    """Refuses a --json file that cannot be written, without changing it."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        refuse("--json: cannot write '%s'", path)


def report(printer, measurement, old, printed):
    """Everything after the last table of a complete case. Returns the exit status."""
    for case, rows in measurement.results.items():
        if case not in printed and any(result.records or result.label for result in rows):
            print_case(printer, case, rows, measurement.options.repeat_runs > 1)
    if measurement.options.sweep and any(result.time() for result in measurement.all_results()):
        print_sweep(printer, measurement)
    kinds = {record["device_kind"] for result in measurement.all_results() for record in result.records}
    if "cpu" in kinds:
        printer.line("Times on the CPU device say nothing about a GPU.")
    measured = any(result.time() for result in measurement.all_results())
    slower = compare(printer, measurement, old) if old and measured else 0
    labels = {result.label for result in measurement.all_results()}
    return WRONG if labels & {"WRONG", "FAILED"} else NO_DEVICE if "no memory" in labels else SLOWER if slower else 0


def main(arguments):
    if "--help" in arguments or "-h" in arguments:
        print(__doc__.strip())
        return 0
    options = parse(arguments)
    if options.json and options.json != "-":
        require_writable(options.json)
    old = read_old(options) if options.against else None
    measurement = Measurement(options, all_cases(options))
    printer = Printer(sys.stderr if options.json == "-" else sys.stdout, options.markdown)
    printed, ended = set(), None

    def finished(case):
        print_case(printer, case, measurement.results[case], options.repeat_runs > 1)
        printed.add(case)

    try:
        measurement.run(finished)
    except (KeyboardInterrupt, Refused) as end:
        ended = end
    status = report(printer, measurement, None if ended else old, printed)
    if isinstance(ended, Refused):
        raise ended
    if ended:
        print("compare.py: interrupted: the tables hold what was measured", file=sys.stderr)
    return INTERRUPTED if ended else status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refused:
        print(refused, file=sys.stderr)
        sys.exit(refused.status)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of standard output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(WRONG)
