#!/usr/bin/env python3
"""Mutation testing of a kernel file: plants one fault at a time, rebuilds, runs the family's tests, lists survivors.

    dev/test/mutate.py encoder_backward.cu --sample 40
    dev/test/mutate.py classifier_fused.cu --lines 640-1040 --sample 20 --seed 7
    dev/test/mutate.py common.h --tests "dev/test/test_common.py dev/test/test_encoder_forward.py"
    dev/test/mutate.py lm_head.cu --list

Each mutant is the file with one fault of a kind that a maintainer makes by mistake: a barrier, fence, wait or other
call dropped, a guard dropped, a 64-bit type made 32-bit, a comparison off by one, `+=` made `=`, a factor or term
dropped, a constant replaced by the next, and more (see OPERATORS). Comments, strings and preprocessor lines stay.
Without --lines the file is mutated up to `#ifndef BOOKENDS_NO_MAIN`, where its program begins.

--sample N draws N mutants; it takes the operators in turn, so that rare kinds are in it. The same seed draws the same.

The build happens in a copy of the tree under build/mutate, for the CPU device; the working tree is not written to. The
tests are those whose file or name contains the family's name, run with -x; --tests replaces them. They must pass
without a fault. Each run of the tests has a time limit: --timeout, or three times what they take without a fault and a
minute; a mutant that exceeds it is killed.

Results:  killed         a test failed, crashed or exceeded its time
          survived       the tests passed; its lines are printed
          equivalent     listed in mutants.txt as a change that no test can see, with the reason; not built
          same code      the compiler makes the same machine code of it (code of the GPU alone, for one); not counted
          not compiled   not counted
The score is killed / (killed + survived). Exit status: 0 no survivor; 1 survivors; 2 a bad command line, or tests that
fail without a fault.
"""

import argparse
import collections
import fcntl
import hashlib
import json
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
EQUIVALENT = pathlib.Path(__file__).with_name("mutants.txt")

# What is built and which tests run: programs, and pytest's -k expression.
Family = collections.namedtuple("Family", "programs tests")
FAMILIES = {
    "encoder_forward": Family(["encoder_forward", "test/launchers_encoder_forward"], "encoder_forward"),
    "encoder_backward": Family(["encoder_backward", "test/launchers_encoder_backward"],
                               "encoder_backward or rounding"),
    "embedding_lookup": Family(["embedding_lookup", "test/launchers_embedding_lookup"],
                               "embedding_lookup and not backward"),
    "embedding_lookup_backward": Family(["embedding_lookup_backward", "test/launchers_embedding_lookup_backward"],
                                        "embedding_lookup_backward"),
    "embedding_update": Family(["embedding_update", "test/launchers_embedding_update"], "embedding_update"),
    "classifier_fused": Family(["classifier_fused", "test/launchers_classifier_fused"], "classifier_fused"),
    "lm_head": Family(["lm_head", "classifier_fused", "test/launchers_lm_head"], "lm_head"),
}
EVERYTHING = Family(sorted({program for family in FAMILIES.values() for program in family.programs} | {"test/common"}),
                    " or ".join([*FAMILIES, "common"]))
# Tests of the build and of this file do not look at a kernel's results.
IGNORED_TESTS = ("test_build.py", "test_mutate.py")

# ---------------------------------------------------------------------------------------------------------------------
# tokens

TOKEN = re.compile(r"""
    (?P<comment> //(?:\\\n|[^\n])* | /\*.*?\*/ )
  | (?P<directive> ^[ \t]*\#(?:\\\n|[^\n])* )
  | (?P<string> (?:u8|[uUL])?R"(?P<mark>[^()\\\s"]{0,16})\(.*?\)(?P=mark)" | (?:u8|[uUL])?"(?:\\.|[^"\\\n])*" )
  | (?P<character> (?:u8|[uUL])?'(?:\\.|[^'\\\n])+' )
  | (?P<number> \.?[0-9](?:[eEpP][+-]|'?[\w.])* )
  | (?P<name> [A-Za-z_]\w* )
  | (?P<operator> <<< | >>> | <<= | >>= | ->\* | \.\.\. | :: | -> | \+\+ | -- | << | >> | && | \|\|
                | [-+*/%&|^<>=!]= | [][{}();,.?:~!<>=+*/%&|^-] )
  | (?P<space> \s+ )
  | (?P<other> . )
""", re.VERBOSE | re.DOTALL | re.MULTILINE)

Token = collections.namedtuple("Token", "kind text start end")


def tokens_of(source):
    """The tokens of C++ code, without comments, preprocessor lines and white space."""
    found = [Token(match.lastgroup, match.group(), match.start(), match.end()) for match in TOKEN.finditer(source)]
    found = [token._replace(kind="string") if token.kind == "mark" else token for token in found]
    return [token for token in found if token.kind not in ("comment", "directive", "space")]


def closing(tokens, i):
    """Where the bracket at i is closed; None if it is not."""
    pairs, depth = {"(": ")", "[": "]", "{": "}"}, []
    for k in range(i, len(tokens)):
        text = tokens[k].text if tokens[k].kind == "operator" else ""
        if text in pairs:
            depth.append(pairs[text])
        elif text in (")", "]", "}"):
            if depth.pop() != text:
                return None
            if not depth:
                return k
    return None


# ---------------------------------------------------------------------------------------------------------------------
# operators: each takes the source and its tokens, and yields (begin, end, replacement)

KEYWORDS = frozenset("""if else for while do switch case return break continue goto sizeof alignof alignas new delete
    static_assert decltype noexcept catch throw template typename using typedef operator asm co_return""".split())
SYNCHRONISES = re.compile(r"sync|fence|wait|barrier|arrive|commit|start_next", re.IGNORECASE)


def calls(source, tokens):
    """(name, begin, end) of each statement that is nothing but a call."""
    for i, token in enumerate(tokens):
        before = tokens[i - 1].text if i else ";"
        if token.kind != "name" or token.text in KEYWORDS or before not in (";", "{", "}", ")", "else", "do"):
            continue
        k, name = i + 1, token.text
        while k + 1 < len(tokens) and tokens[k].text in ("::", ".", "->") and tokens[k + 1].kind == "name":
            name, k = name + tokens[k].text + tokens[k + 1].text, k + 2
        if k < len(tokens) and tokens[k].text == "<" and source[tokens[k].start - 1] != " ":  # template arguments
            while k < len(tokens) and tokens[k].text not in (">", ";", "{"):
                k += 1
            k += 1
        if k < len(tokens) and tokens[k].text == "(":
            end = closing(tokens, k)
            if end is not None and end + 1 < len(tokens) and tokens[end + 1].text == ";":
                yield name, token.start, tokens[end].end


def drop_synchronisation(source, tokens):
    for name, begin, end in calls(source, tokens):
        if SYNCHRONISES.search(name):
            yield begin, end, ""
    for i, token in enumerate(tokens):  # while (!it_is_there()) {}
        if token.text == "while" and i + 1 < len(tokens):
            end = closing(tokens, i + 1)
            if end is not None and [t.text for t in tokens[end + 1:end + 3]] == ["{", "}"]:
                yield token.start, tokens[end + 2].end, ";"


def drop_call(source, tokens):
    for name, begin, end in calls(source, tokens):
        if not SYNCHRONISES.search(name):
            yield begin, end, ""


def drop_guard(source, tokens):
    """`if (...) return ...;` goes; of another `if` the condition becomes true."""
    for i, token in enumerate(tokens):
        if token.text != "if" or i + 1 >= len(tokens) or tokens[i + 1].text != "(":
            continue
        end = closing(tokens, i + 1)
        if end is None or end + 1 >= len(tokens):
            continue
        if tokens[end + 1].text in ("return", "continue", "break"):
            k = end + 1
            while k < len(tokens) and tokens[k].text != ";":
                k = (closing(tokens, k) or len(tokens)) if tokens[k].text in ("(", "{", "[") else k
                k += 1
            if k < len(tokens) and (k + 1 == len(tokens) or tokens[k + 1].text != "else"):
                yield token.start, tokens[k].end, ";"
        else:
            yield tokens[i + 1].start, tokens[end].end, "(true)"


NARROWER = {"size_t": "unsigned", "uint64_t": "unsigned", "int64_t": "int"}


def narrow_index(source, tokens):
    for token, following in zip(tokens, tokens[1:]):
        if token.kind != "name":
            continue
        if token.text in NARROWER:
            yield token.start, token.end, NARROWER[token.text]
        elif (token.text, following.text) == ("long", "long"):
            yield token.start, following.end, "int"


def binary(source, token):
    """Whether an operator has white space on both sides, as the formatter puts it around those of two operands; the
    brackets of templates, and the stars of pointers, do not."""
    return source[token.start - 1].isspace() and source[token.end:token.end + 1].isspace()


def replace_binary(table):
    def apply(source, tokens):
        for token in tokens:
            if token.kind == "operator" and token.text in table and binary(source, token):
                yield token.start, token.end, table[token.text]
    return apply


def operand_end(tokens, k):
    """Where the operand that begins at token k ends: signs, casts, a name, number or bracket, members, calls."""
    while k < len(tokens) and tokens[k].text in ("-", "!", "~", "*", "&", "+"):
        k += 1
    while k < len(tokens) and tokens[k].text == "(":
        end = closing(tokens, k)
        if end is None or end + 1 >= len(tokens):
            return None
        k = end
        if not (tokens[k + 1].kind in ("name", "number") or tokens[k + 1].text == "("):
            break
        k += 1  # that was a cast
    if k >= len(tokens) or not (tokens[k].kind in ("name", "number") or tokens[k].text == ")"):
        return None
    while k + 1 < len(tokens):
        following = tokens[k + 1].text
        if following in ("(", "["):
            k = closing(tokens, k + 1)
            if k is None:
                return None
        elif following in (".", "->", "::"):
            k += 2
        else:
            break
    return tokens[k].end if k < len(tokens) else None


def drop_operand(operators):
    def apply(source, tokens):
        for i, token in enumerate(tokens):
            if token.kind == "operator" and token.text in operators and binary(source, token):
                end = operand_end(tokens, i + 1)
                if end is not None:
                    yield tokens[i - 1].end, end, ""
    return apply


INTEGER = re.compile(r"(0[xX][0-9a-fA-F']+|[0-9']+)([uUlL]*)\Z")
REAL = re.compile(r"([0-9]+\.[0-9]*)(.*)\Z")


def next_constant(source, tokens):
    """n + 1; of a hexadecimal number the last bit changes, since such numbers are masks."""
    for token in tokens:
        if token.kind != "number":
            continue
        integer, real = INTEGER.match(token.text), REAL.match(token.text)
        if integer:
            digits = integer.group(1).replace("'", "")
            if digits[:2].lower() == "0x":
                value = "0x%x" % (int(digits, 16) ^ 1)
            else:
                value = str(int(digits, 8 if digits[0] == "0" and len(digits) > 1 else 10) + 1)
            yield token.start, token.end, value + integer.group(2)
        elif real:
            yield token.start, token.end, "%s%s" % (float(real.group(1)) + 1, real.group(2))


def swap_names(table):
    def apply(source, tokens):
        for token in tokens:
            if token.kind == "name" and token.text in table:
                yield token.start, token.end, table[token.text]
    return apply


def drop_negation(source, tokens):
    for token in tokens:
        if token.text == "!":
            yield token.start, token.end, ""


OPERATORS = {
    "drop a barrier, fence or wait": drop_synchronisation,
    "drop a call": drop_call,
    "drop a guard": drop_guard,
    "64-bit to 32-bit": narrow_index,
    "comparison off by one": replace_binary({"<": "<=", "<=": "<", ">": ">=", ">=": ">"}),
    "other comparison": replace_binary({"==": "!=", "!=": "=="}),
    "add to set": replace_binary({"+=": "=", "-=": "=", "*=": "=", "/=": "=", "|=": "=", "&=": "=", "^=": "="}),
    "other sign": replace_binary({"+": "-", "-": "+", "+=": "-=", "-=": "+="}),
    "drop a factor": drop_operand(("*", "/", "%")),
    "drop a term": drop_operand(("+", "-")),
    "next constant": next_constant,
    "other logic": replace_binary({"&&": "||", "||": "&&", "&": "|", "|": "&", "<<": ">>", ">>": "<<"}),
    "other truth": swap_names({"true": "false", "false": "true"}),
    "other extreme": swap_names({"min": "max", "max": "min"}),
    "drop a negation": drop_negation,
}

# ---------------------------------------------------------------------------------------------------------------------
# mutants

Mutant = collections.namedtuple("Mutant", "operator begin end replacement line before after")


def normal(lines):
    """Lines of code as one, with single spaces."""
    return " ".join(" ".join(lines).split())


def mutants_of(source, first=1, last=None):
    """All mutants whose change begins on lines first to last, in the order of the file. before and after: the lines
    that change, as they were and as they are."""
    last = last or source.count("\n") + 1
    tokens, found = tokens_of(source), {}
    for name, operator in OPERATORS.items():
        for begin, end, replacement in operator(source, tokens):
            line = source.count("\n", 0, begin) + 1
            if not first <= line <= last or source[begin:end] == replacement:
                continue
            line_begin, line_end = source.rfind("\n", 0, begin) + 1, source.find("\n", end)
            line_end = len(source) if line_end < 0 else line_end
            before = source[line_begin:line_end]
            # A fault keeps the number of lines, so that what the compiler writes about lines stays as it is.
            replacement += "\n" * source.count("\n", begin, end)
            after = before[:begin - line_begin] + replacement + before[end - line_begin:]
            found.setdefault((begin, end, replacement),
                             Mutant(name, begin, end, replacement, line, before.split("\n"), after.split("\n")))
    return [found[key] for key in sorted(found)]


def sample_of(mutants, count, seed):
    """`count` of them, or all: the operators take turns, each with a random one of its mutants."""
    generator, by_operator = random.Random(seed), collections.defaultdict(list)
    for mutant in mutants:
        by_operator[mutant.operator].append(mutant)
    for some in by_operator.values():
        generator.shuffle(some)
    names, drawn = list(by_operator), []
    while names and len(drawn) < count:
        generator.shuffle(names)
        for name in names:
            drawn.append(by_operator[name].pop())
        names = [name for name in names if by_operator[name]]
    return sorted(drawn[:count], key=lambda mutant: (mutant.begin, mutant.end, mutant.replacement))


def read_equivalent(text):
    """{(file, lines before, lines after): reason}. Entries are divided by empty lines: the file's name, `-` and the
    line as it is, `+` and the line as the fault makes it, then the reason. # begins a comment."""
    entries = {}
    for block in re.split(r"\n\s*\n", re.sub(r"^#.*\n?", "", text, flags=re.MULTILINE)):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        if not lines:
            continue
        before, after = ([line[1:] for line in lines[1:] if line[0] == sign] for sign in "-+")
        reason = normal([line for line in lines[1:] if line[0] not in "-+"])
        if not (before and after and reason):
            raise ValueError("mutants.txt: an entry needs a file, a - line, a + line and a reason:\n%s" % block)
        entries[lines[0], normal(before), normal(after)] = reason
    return entries


# ---------------------------------------------------------------------------------------------------------------------
# building and testing in a copy

def sources():
    """The files of the tree that git has or would take."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=str(ROOT), check=True,
                            stdout=subprocess.PIPE).stdout.decode()
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


class Copy:
    """A copy of the tree, with a build of its own."""

    def __init__(self, name, family, tests):
        self.folder = ROOT / "build" / "mutate" / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.folder.with_suffix(".lock"), "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise SystemExit("mutate.py: another run has %s" % self.folder)
        names = sources()
        for path in self.folder.rglob("*"):
            inside = path.relative_to(self.folder)
            if path.is_file() and inside.parts[0] != "build" and str(inside) not in names:
                path.unlink()
        for name in names:
            self.write(name, (ROOT / name).read_bytes())
            (self.folder / name).chmod((ROOT / name).stat().st_mode)
        self.targets = ["build/cpu/" + program for program in [*family.programs, "libbookends.so"]]
        self.tests = shlex.split(tests) if tests else [
            "dev/test", "-k", family.tests, *["--ignore=dev/test/" + name for name in IGNORED_TESTS]]

    def write(self, name, content):
        """Files that do not change keep their time, so that make leaves what is made of them alone."""
        path = self.folder / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def build(self, limit=1800):
        """What the compiler says, and whether it made everything."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        code, output = run_limited(["make", "-j%d" % os.cpu_count(), "DEVICE=cpu", "SANITIZE=", "BUILD=build/cpu",
                                    "COMMIT=mutant", "CXX=" + os.environ.get("CXX", "g++"), "PYTHON=" + sys.executable,
                                    *self.targets], self.folder, environment, limit)
        return code == 0, output

    def code(self):
        """A hash of the machine code, without what debuggers read."""
        total = hashlib.sha256()
        for path in sorted((self.folder / "build" / "cpu").rglob("*.o")):
            stripped = path.with_suffix(".stripped")
            subprocess.run(["strip", "--strip-debug", "-o", str(stripped), str(path)], check=True)
            total.update(stripped.read_bytes())
            stripped.unlink()
        return total.hexdigest()

    def test(self, limit):
        """(exit code, output) of the tests; None if they exceeded the limit."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("BOOKENDS_", "SANITIZE"))}
        environment.update(BOOKENDS_BUILD="build/cpu", BOOKENDS_DEVICE="cpu", CXX=os.environ.get("CXX", "g++"))
        return run_limited([sys.executable, "-m", "pytest", "-q", "-x", "-n", "auto", "-p", "no:cacheprovider",
                            *self.tests], self.folder, environment, limit)


def run_limited(command, folder, environment, limit):
    """(exit code, output) of a command; code None if it exceeded the limit. Nothing of it runs on afterwards."""
    process = subprocess.Popen(command, cwd=str(folder), env=environment, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True,
                               errors="replace", start_new_session=True)
    code, output = None, ""
    try:
        output = process.communicate(timeout=limit)[0]
        code = process.returncode
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return code, output


def first_failure(output):
    """The test that noticed, from pytest's summary."""
    for pattern in (r"^(?:FAILED|ERROR) (\S+)", r"crashed while running '([^']+)'"):
        match = re.search(pattern, output, re.MULTILINE)
        if match:
            return match.group(1)
    return "no test by name"


# ---------------------------------------------------------------------------------------------------------------------
# the program

KILLED, SURVIVED, EXPLAINED, SAME, BROKEN = "killed", "survived", "equivalent", "same code", "not compiled"


def try_mutant(copy, name, source, mutant, code, limit):
    """(result, by what or why)."""
    copy.write(name, (source[:mutant.begin] + mutant.replacement + source[mutant.end:]).encode())
    built, output = copy.build()
    if not built:
        error = re.search(r"error: (.*)", output)
        return BROKEN, error.group(1) if error else "make failed"
    if copy.code() == code:
        return SAME, ""
    result, output = copy.test(limit)
    if result is None:
        return KILLED, "more than %.0f s" % limit
    return (SURVIVED, "") if result == 0 else (KILLED, first_failure(output))


def describe(name, mutant):
    return "%s:%d: %s\n%s" % (name, mutant.line, mutant.operator,
                              "\n".join(["  -" + line for line in mutant.before] +
                                        ["  +" + line for line in mutant.after if line.strip()]))


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", help="a source file of the project")
    parser.add_argument("--lines", metavar="A-B", help="only faults that begin on these lines")
    parser.add_argument("--sample", type=int, metavar="N", help="so many of the faults (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (default: 1)")
    parser.add_argument("--tests", metavar="ARGUMENTS", help="pytest's arguments, in place of the family's tests")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="for the tests of one fault")
    parser.add_argument("--json", metavar="FILE", help="one object with the score and every fault")
    parser.add_argument("--list", action="store_true", help="print the faults; build and run nothing")
    options = parser.parse_args(arguments)
    path = pathlib.Path(options.file)
    path = (path if path.is_absolute() else pathlib.Path.cwd() / path).resolve()
    if not path.is_file() or ROOT not in path.parents:
        parser.error("%s: not a file of %s" % (options.file, ROOT))
    lines = re.fullmatch(r"(\d+)(?:-(\d+))?", options.lines or "1")
    if not lines or (options.lines and not 1 <= int(lines.group(1)) <= int(lines.group(2) or lines.group(1))):
        parser.error("--lines: '%s' is not A-B with 1 <= A <= B" % options.lines)
    if options.sample is not None and options.sample < 1:
        parser.error("--sample: '%d' is below 1" % options.sample)
    options.name, source = str(path.relative_to(ROOT)), path.read_bytes().decode()
    main = source.find("#ifndef BOOKENDS_NO_MAIN")
    if options.lines:
        options.first, options.last = int(lines.group(1)), int(lines.group(2) or lines.group(1))
    else:
        options.first, options.last = 1, source.count("\n", 0, main) + 1 if main >= 0 else None
    return options, source


def main(arguments=None):
    options, source = parse_arguments(arguments)
    name = options.name
    mutants = mutants_of(source, options.first, options.last)
    if options.sample:
        mutants = sample_of(mutants, options.sample, options.seed)
    if options.list:
        print("\n".join([*(describe(name, mutant) for mutant in mutants), "%d faults" % len(mutants)]))
        return 0
    equivalent = read_equivalent(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}

    stem = pathlib.Path(name).stem
    copy = Copy(stem, FAMILIES.get(stem, EVERYTHING), options.tests)
    built, output = copy.build()
    if not built:
        print("mutate.py: the build fails without a fault:\n%s" % output[-4000:], file=sys.stderr)
        return 2
    code, began = copy.code(), time.monotonic()
    result, output = copy.test(None)
    taken = time.monotonic() - began
    if result != 0:
        print("mutate.py: the tests fail without a fault:\n%s" % output[-4000:], file=sys.stderr)
        return 2
    limit = options.timeout or 3 * taken + 60
    print("%s: %d faults; the tests take %.0f s without one, limit %.0f s" % (name, len(mutants), taken, limit),
          flush=True)

    records = []
    try:
        for number, mutant in enumerate(mutants, 1):
            began = time.monotonic()
            reason = equivalent.get((name, normal(mutant.before), normal(mutant.after)))
            result, by = (EXPLAINED, reason) if reason else try_mutant(copy, name, source, mutant, code, limit)
            seconds = time.monotonic() - began
            records.append(dict(file=name, line=mutant.line, operator=mutant.operator, before=mutant.before,
                                after=mutant.after, result=result, by=by, seconds=round(seconds, 1)))
            print("%3d/%d %-12s %s:%d: %s (%.0f s)%s" % (number, len(mutants), result, name, mutant.line,
                                                          mutant.operator, seconds, " by " + by if by else ""),
                  flush=True)
    finally:
        copy.write(name, source.encode())

    survivors = [mutant for mutant, record in zip(mutants, records) if record["result"] == SURVIVED]
    for mutant in survivors:
        print("survived: " + describe(name, mutant))
    counts = collections.Counter(record["result"] for record in records)
    judged = counts[KILLED] + counts[SURVIVED]
    score = 100 * counts[KILLED] / judged if judged else None
    print("%s: %s killed: %d of %d; %s" % (
        name, "nothing" if score is None else "%.0f%%" % score, counts[KILLED], judged,
        ", ".join("%d %s" % (counts[result], result) for result in (SURVIVED, EXPLAINED, SAME, BROKEN))))
    if options.json:
        summary = dict(file=name, seed=options.seed, sample=options.sample, score=score, counts=dict(counts),
                       mutants=records)
        pathlib.Path(options.json).write_text(json.dumps(summary, indent=1) + "\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
