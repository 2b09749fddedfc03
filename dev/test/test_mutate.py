"""dev/test/mutate.py: its lexer, its operators, its sample and its list of equivalent faults."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

import mutate
from bookends import ROOT

MUTATE = pathlib.Path(mutate.__file__)


def faults(source, operator=None):
    """What the operator (default: any) makes of the code, without white space at the ends."""
    return [source[:m.begin] + m.replacement + source[m.end:] for m in mutate.mutants_of(source)
            if operator in (None, m.operator)]


def texts(source):
    return [token.text for token in mutate.tokens_of(source)]


# ---------------------------------------------------------------------------------------------------------------------
# the lexer

def test_comments_strings_and_preprocessor_lines_are_left_alone():
    for source in ("// a < b + 1;\n", "/* f(); a += 1\n b < c */", "#if A < 1\n", "#define X(a) \\\n    a + 1\n",
                   "// one \\\n a < 2\n", 'x = "a < 1 + b";', 'x = "\\" a < 1";', "x = 'a';", "x = '\\'';",
                   'x = R"(a < "b" + 1)";', 'x = R"mark(a < )" + 1)mark";', 'x = u8"a < 1";', "   #  define A 1\n"):
        assert faults(source) == [], source


def test_code_around_them_is_not():
    source = 'if (a < b) /* < */ f("<"); // <\n'
    assert faults(source, "comparison off by one") == ['if (a <= b) /* < */ f("<"); // <\n']
    source = "#define A 1 < 2\nx = a < b;\n#endif\n"
    assert faults(source, "comparison off by one") == [source.replace("a < b", "a <= b")]


def test_tokens():
    assert texts("k<<<g, b>>>(a->x, 1'000u, 0x1p-3f, 1e+5, .5f);") == \
        ["k", "<<<", "g", ",", "b", ">>>", "(", "a", "->", "x", ",", "1'000u", ",", "0x1p-3f", ",", "1e+5", ",", ".5f",
         ")", ";"]
    assert texts("a<=b>=c==d!=e&&f||g<<h>>i++ += --j ... ::k") == \
        ["a", "<=", "b", ">=", "c", "==", "d", "!=", "e", "&&", "f", "||", "g", "<<", "h", ">>", "i", "++", "+=", "--",
         "j", "...", "::", "k"]


@pytest.mark.parametrize("path", sorted(path.name for path in [*ROOT.glob("*.cu"), *ROOT.glob("*.h")]))
def test_every_source_is_understood(path):
    """No character is left over, brackets match, and each fault differs from the source in its own lines alone."""
    source = (ROOT / path).read_text()
    tokens = mutate.tokens_of(source)
    assert not [token for token in tokens if token.kind == "other"]
    for i, token in enumerate(tokens):
        if token.kind == "operator" and token.text in ("(", "[", "{"):
            assert mutate.closing(tokens, i) is not None, source.count("\n", 0, token.start) + 1
    lines = source.split("\n")
    mutants = mutate.mutants_of(source)
    assert len(mutants) > 50
    for mutant in mutants:
        changed = (source[:mutant.begin] + mutant.replacement + source[mutant.end:]).split("\n")
        first, after = mutant.line - 1, mutant.line - 1 + len(mutant.before)
        assert mutant.before != mutant.after and len(changed) == len(lines)
        assert lines[:first] == changed[:first] and lines[after:] == changed[after:]
        assert lines[first:after] == mutant.before and changed[first:after] == mutant.after


# ---------------------------------------------------------------------------------------------------------------------
# the operators

@pytest.mark.parametrize("operator, source, want", [
    ("drop a barrier, fence or wait", "a(); __syncthreads(); b();", ["a(); ; b();"]),
    ("drop a barrier, fence or wait", "if (x) __threadfence();", ["if (x) ;"]),
    ("drop a barrier, fence or wait", "{ cluster.sync(); }", ["{ ; }"]),
    ("drop a barrier, fence or wait", "{ cuda::ptx::fence_proxy_async(a, b(c)); }", ["{ ; }"]),
    ("drop a barrier, fence or wait", "; wgmma_wait<0>();", ["; ;"]),
    ("drop a barrier, fence or wait", "while (!try_wait(b, p)) {\n}\n", [";\n\n"]),
    ("drop a call", "f(a, g(b)); h->k.l(1);", ["; h->k.l(1);", "f(a, g(b)); ;"]),
    ("drop a call", "x = f(a); return g(b); T t(1); sizeof(a); const T u(2);", []),
    ("drop a guard", "if (i >= N) return; f();", ["; f();"]),
    ("drop a guard", "if (i >= N) return {1, f(2)}; g();", ["; g();"]),
    ("drop a guard", "for (;;) { if (a) continue; if (b) break; }",
     ["for (;;) { ; if (b) break; }", "for (;;) { if (a) continue; ; }"]),
    ("drop a guard", "if (a(b) && c) x = 1;", ["if (true) x = 1;"]),
    ("drop a guard", "if constexpr (a) x = 1;", []),
    ("drop a guard", "if (a) return 1; else return 2;", []),
    ("64-bit to 32-bit", "size_t a; long long b = (long long)c; uint64_t d; int e;",
     ["unsigned a; long long b = (long long)c; uint64_t d; int e;",
      "size_t a; int b = (long long)c; uint64_t d; int e;",
      "size_t a; long long b = (int)c; uint64_t d; int e;",
      "size_t a; long long b = (long long)c; unsigned d; int e;"]),
    ("comparison off by one", "a < b;", ["a <= b;"]), ("comparison off by one", "a <= b;", ["a < b;"]),
    ("comparison off by one", "a > b;", ["a >= b;"]), ("comparison off by one", "a >= b;", ["a > b;"]),
    ("comparison off by one", "template <typename T>\nvoid f(Packed<T, 4> x);", []),
    ("other comparison", "a == b; c != d;", ["a != b; c != d;", "a == b; c == d;"]),
    ("add to set", "a += b; c |= d;", ["a = b; c |= d;", "a += b; c = d;"]),
    ("other sign", "a + b - c;", ["a - b - c;", "a + b + c;"]),
    ("other sign", "a = -b;", []),
    ("drop a factor", "a * b[c].d(e) + f;", ["a + f;"]),
    ("drop a factor", "a * (b + c) * d;", ["a * d;", "a * (b + c);"]),
    ("drop a factor", "x / (float)n % N::size;", ["x % N::size;", "x / (float)n;"]),
    ("drop a factor", "float *p = *q; const T *const r;", []),
    ("drop a term", "a + b * c - -d;", ["a * c - -d;", "a + b * c;"]),
    ("next constant", "a[0] = 31; b = 0xffff;", ["a[1] = 31; b = 0xffff;", "a[0] = 32; b = 0xffff;",
                                                 "a[0] = 31; b = 0xfffe;"]),
    ("next constant", "c = 2.5f; d = 1'000ull; e = 017;", ["c = 3.5f; d = 1'000ull; e = 017;",
                                                           "c = 2.5f; d = 1001ull; e = 017;",
                                                           "c = 2.5f; d = 1'000ull; e = 16;"]),
    ("other logic", "a && b || c;", ["a || b || c;", "a && b && c;"]),
    ("other logic", "a & b | c << d; e(&f);", ["a | b | c << d; e(&f);", "a & b & c << d; e(&f);",
                                               "a & b | c >> d; e(&f);"]),
    ("other truth", "f(true, false);", ["f(false, false);", "f(true, true);"]),
    ("other extreme", "std::min(a, b);", ["std::max(a, b);"]),
    ("drop a negation", "if (!a) {}", ["if (a) {}"]),
])
def test_operator(operator, source, want):
    assert faults(source, operator) == want


def test_every_operator_is_tested_and_finds_something_to_do():
    tested = {mark.args[1][k][0] for mark in test_operator.pytestmark for k in range(len(mark.args[1]))}
    assert tested == set(mutate.OPERATORS)
    found = {m.operator for name in ("encoder_forward.cu", "encoder_backward.cu", "classifier_fused.cu", "lm_head.cu")
             for m in mutate.mutants_of((ROOT / name).read_text())}
    assert found == set(mutate.OPERATORS)


def test_lines_choose():
    source = "a < b;\nc < d;\ne < f;\n"
    assert [m.line for m in mutate.mutants_of(source, 2, 3)] == [2, 3]


def test_samples():
    """The same from one seed, another from another; without repeats; every operator before any has many."""
    mutants = mutate.mutants_of((ROOT / "encoder_backward.cu").read_text())
    some = mutate.sample_of(mutants, 30, 1)
    assert some == mutate.sample_of(mutants, 30, 1) != mutate.sample_of(mutants, 30, 2)
    assert len(some) == len(set(map(repr, some))) == 30 and set(m.operator for m in some) == set(mutate.OPERATORS)
    assert some == sorted(some, key=lambda m: m.begin)
    assert len(mutate.sample_of(mutants, 10**6, 1)) == len(mutants)


# ---------------------------------------------------------------------------------------------------------------------
# equivalent faults, and the program

def test_equivalent_faults_are_faults_of_the_files_as_they_are():
    for name, before, after in mutate.read_equivalent(mutate.EQUIVALENT.read_text()):
        found = {(mutate.normal(m.before), mutate.normal(m.after))
                 for m in mutate.mutants_of((ROOT / name).read_text())}
        assert (before, after) in found, "%s: no such fault: %s -> %s" % (name, before, after)


def test_the_list_of_equivalent_faults():
    text = "# about\n\na.cu\n- x  <  y;\n+ x <= y;\nThe same, since\nx is never y.\n\n\nb.cu\n-f();\n+;\nNothing.\n"
    assert mutate.read_equivalent(text) == {("a.cu", "x < y;", "x <= y;"): "The same, since x is never y.",
                                            ("b.cu", "f();", ";"): "Nothing."}
    for wrong in ("a.cu\n- x\n+ y\n", "a.cu\n- x\nWhy.\n", "a.cu\n+ x\nWhy.\n"):
        with pytest.raises(ValueError):
            mutate.read_equivalent(wrong)


def program(*arguments):
    return subprocess.run([sys.executable, str(MUTATE), *map(str, arguments)], cwd=str(ROOT), stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, universal_newlines=True, timeout=300)


def test_list():
    result = program("encoder_forward.cu", "--list", "--sample", 7)
    assert (result.returncode, result.stderr) == (0, "") and result.stdout.endswith("\n7 faults\n")
    source = (ROOT / "encoder_forward.cu").read_text()
    main = source[:source.index("BOOKENDS_NO_MAIN")].count("\n")
    result = program("encoder_forward.cu", "--list")
    assert all(int(line.split(":")[1]) <= main for line in result.stdout.splitlines() if line.startswith("encoder"))


@pytest.mark.parametrize("arguments", [["--lines", "3-1"], ["--lines", "x"], ["--lines", "0-4"], ["--sample", "0"],
                                       ["--sample", "x"], ["--unknown"]], ids=" ".join)
def test_bad_arguments(arguments):
    for command in (["encoder_forward.cu", *arguments], ["no_such_file.cu"], ["/etc/hostname"], []):
        result = program(*command)
        assert result.returncode == 2 and result.stdout == "" and "error:" in result.stderr, command


TREE = {
    "Makefile": "build/cpu/%: build/cpu/value.o ;\n"
                "build/cpu/value.o: toy.cu\n\tmkdir -p build/cpu; $(CXX) -x c++ -O1 -c toy.cu -o $@\n",
    "dev/test/test_toy.py": """
import pathlib, re, subprocess, time

def test_toy():
    folder = pathlib.Path(__file__).parents[2]
    (folder / "main.cc").write_text("int value(int); int main() { return value(3); }")
    subprocess.run(["g++", "main.cc", "build/cpu/value.o", "-o", "toy"], cwd=str(folder), check=True)
    assert subprocess.run(["./toy"], cwd=str(folder)).returncode == 5
""",
    "toy.cu": """int value(int n) {
    while (n == 9) n = value(n);
    if (false) return 0;
    return n < 9 ? n + 2 : 0;
}
""",
}


def test_results(tmp_path, monkeypatch, capsys):
    """Of a project of one file. The tree itself is left as it is."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=str(tmp_path), check=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / "mutants.txt").write_text("toy.cu\n- return n < 9 ? n + 2 : 0;\n+ return n <= 9 ? n + 2 : 0;\nWhy.\n")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "EQUIVALENT", tmp_path / "mutants.txt")
    monkeypatch.chdir(tmp_path)
    code = mutate.main(["toy.cu", "--tests", "dev/test -n 0", "--timeout", "8", "--json", "out.json"])
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "out.json").read_text())
    results = {(m["line"], m["operator"], mutate.normal(m["after"])): m["result"] for m in record["mutants"]}
    assert code == 1, printed
    assert results == {
        (2, "other comparison", "while (n != 9) n = value(n);"): "killed",  # calls itself until the stack ends
        (2, "next constant", "while (n == 10) n = value(n);"): "survived",
        (3, "drop a guard", ";"): "same code",
        (3, "other truth", "if (true) return 0;"): "killed",
        (3, "next constant", "if (false) return 1;"): "same code",
        (4, "comparison off by one", "return n <= 9 ? n + 2 : 0;"): "equivalent",
        (4, "next constant", "return n < 10 ? n + 2 : 0;"): "survived",
        (4, "other sign", "return n < 9 ? n - 2 : 0;"): "killed",
        (4, "drop a term", "return n < 9 ? n : 0;"): "killed",
        (4, "next constant", "return n < 9 ? n + 3 : 0;"): "killed",
        (4, "next constant", "return n < 9 ? n + 2 : 1;"): "survived"}
    counts = record["counts"]
    assert record["score"] == pytest.approx(100 * counts["killed"] / (counts["killed"] + counts["survived"]))
    assert "survived: toy.cu:4: next constant\n" \
           "  -    return n < 9 ? n + 2 : 0;\n  +    return n < 10 ? n + 2 : 0;" in printed
    assert "%.0f%% killed" % record["score"] in printed.splitlines()[-1]
    assert {name: (tmp_path / name).read_text() for name in TREE} == TREE
    (tmp_path / "toy.cu").write_text(TREE["toy.cu"].replace("+ 2", "+ 3"))
    assert mutate.main(["toy.cu", "--tests", "dev/test -n 0"]) == 2  # the tests fail without a fault


def test_the_time_limit(tmp_path):
    """What does not end is ended, with all that it started."""
    def run(script, limit):
        return mutate.run_limited(["sh", "-c", script], tmp_path, dict(os.environ), limit)

    assert run("echo out; echo err >&2; exit 3", 60) == (3, "out\nerr\n")
    assert run("(sleep 2; touch alive) & sleep 100", 1) == (None, "")
    time.sleep(1.5)
    assert not (tmp_path / "alive").exists()


def test_what_noticed():
    assert mutate.first_failure("x\nFAILED test_a.py::test_b[1] - assert 0\n") == "test_a.py::test_b[1]"
    assert mutate.first_failure("worker 'gw0' crashed while running 'test_a.py::test_c'") == "test_a.py::test_c"
    assert mutate.first_failure("") == "no test by name"
