#!/usr/bin/env python3
"""Prints one version of a kernel family as a self-contained header.

    scripts/extract.py encoder_forward 3 > encoder_forward3.cuh
    scripts/extract.py classifier_fused 5 --no-fallback --namespace mine -o classifier.cuh

The header holds the version's kernels and launcher, and everything that they use from the kernel file, common.h and
parts/, in the order of the sources. It includes only headers of CUDA and of the C++ library. --no-fallback leaves out
the versions that the launcher falls back on: it returns cudaErrorNotSupported instead. --dtype adds NAME_VERSION_DTYPE,
a plain function for that element type. The launchers of lm_head take a plan: lm_head_create() and its companions are in
the header too, and it needs cuBLASLt.

How it works: the sources are divided into top-level declarations. A declaration is kept if the launcher needs it,
directly or through other declarations: if one of its names appears in a declaration that is kept.
"""
import argparse
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The families, with the file of each.
FAMILIES = {"encoder_forward": "encoder_forward.cu", "encoder_backward": "encoder_backward.cu",
            "embedding_lookup": "embedding_lookup.cu", "embedding_bag": "embedding_lookup.cu",
            "embedding_bag_backward": "embedding_lookup_backward.cu",
            "embedding_overwrite": "embedding_update.cu", "embedding_accumulate": "embedding_update.cu",
            "embedding_optimizer": "embedding_update.cu",
            "classifier_fused": "classifier_fused.cu", "lm_head": "lm_head.cu"}
PLANS = ("lm_head_create", "lm_head_destroy", "lm_head_tune")  # functions that the launchers of lm_head need
TYPES = ("floatX", "gradX", "outX", "valueX")  # template parameters of launchers
CPP_TYPES = {"fp32": "float", "fp16": "half", "bf16": "__nv_bfloat16"}

TOKEN = re.compile(r'''//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'|[A-Za-z_]\w*|\d[\w.']*|\n|[^\s\w]|[ \t]+''',
                   re.S)
KEYWORDS = frozenset("""alignas asm auto bool break case char class const constexpr continue decltype default do double
else enum extern false float for if inline int long namespace operator return short signed sizeof static struct switch
template this true typedef typename union unsigned using void volatile while __launch_bounds__ __global__ __device__
__host__ __shared__ __attribute__""".split())


class Declaration:
    """A top-level declaration of a source, with the comment above it."""

    def __init__(self, text):
        self.text = text.strip("\n")
        code = code_of(re.sub(r"^\s*#.*$", "", self.text, flags=re.M))
        self.names = names_of(code)
        self.uses = {t for t in code if re.match(r"[A-Za-z_]", t)} - KEYWORDS


def names_of(code):
    """The names that a declaration, given as a list of tokens, introduces at the top level."""
    names, depth, angle = set(), 0, 0
    code = without_template(code)
    if not code:  # a comment
        return names
    if code[0] == "using":
        return {code[1]}
    if code[0] == "typedef":
        return {code[-2]}
    kind = next((t for t in code if t not in ("static", "inline")), "")
    if kind in ("struct", "class", "enum", "union"):
        i = code.index(kind) + 1
        while code[i] in ("alignas", "class", "struct"):
            i += 1
            if code[i] == "(":
                i = closing(code, i) + 1
        names.add(code[i])
        if kind == "enum" and "{" in code:
            at = code.index("{")
            expects_name = True
            for token in code[at + 1:closing(code, at)]:
                if expects_name and re.match(r"[A-Za-z_]", token):
                    names.add(token)
                expects_name = token == ","
        return names
    i, angle = 0, 0
    while i < len(code):
        token = code[i]
        if token in ("__launch_bounds__", "alignas", "__attribute__", "decltype"):
            i = closing(code, i + 1) + 1
            continue
        if token == "operator":
            return names
        if token in "([{":
            if depth == 0 and angle == 0 and i > 0 and re.match(r"[A-Za-z_]", code[i - 1]):
                names.add(code[i - 1])
                if token != "[":
                    return names  # a function, or a variable with an initialiser in braces
            depth += 1
        elif token in ")]}":
            depth -= 1
        elif depth == 0 and token == "<" and i > 0 and re.match(r"[A-Za-z_]", code[i - 1]):
            angle += 1
        elif depth == 0 and token == ">" and angle > 0:
            angle -= 1
        elif depth == 0 and angle == 0 and token in ("=", ";", ",") and i > 0 and re.match(r"[A-Za-z_]", code[i - 1]):
            names.add(code[i - 1])
            if token == "=":  # to the next declarator
                while i + 1 < len(code) and not (depth == 0 and code[i] in (",", ";")):
                    i += 1
                    depth += (code[i] in "([{") - (code[i] in ")]}")
        i += 1
    return names


def closing(code, at):
    """The index of the bracket that closes code[at]."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0:
            return i
    raise ValueError("unbalanced brackets")


def read(path, seen, includes):
    """The declarations of a source and of the project's headers that it includes, in order. System headers go to
    `includes`."""
    if path in seen:
        return []
    seen.add(path)
    text = path.read_text()
    if path.suffix == ".cu":
        text = text.split("#ifndef BOOKENDS_NO_MAIN\n")[0]  # main() and the code that it uses
    declarations = []
    for match in re.finditer(r"^#include\s+([<\"])([^>\"]+)[>\"]", text, flags=re.M):
        if match.group(1) == "<":
            if match.group(2) not in includes:
                includes.append(match.group(2))
        else:
            declarations += read((path.parent / match.group(2)).resolve(), seen, includes)
    for body in re.findall(r"^namespace bookends \{\n(.*?)^\}  // namespace bookends$", text, flags=re.M | re.S):
        declarations += [Declaration(piece) for piece in split(body)]
    return declarations


def split(body):
    """The text of a namespace, divided after each top-level declaration. Headings of sections are removed. A comment
    followed by an empty line is a separate piece."""
    pieces, lines, code, depth, conditional, ended, function = [], [], [], 0, 0, False, False

    def cut():
        pieces.append("".join(lines))
        lines.clear()
        code.clear()

    for line in re.sub(r"^// -{20,}\n(// [^\n]*\n\n?)?", "\n", body, flags=re.M).splitlines(keepends=True):
        if line.isspace() and not code:
            if lines:
                cut()
            continue
        lines.append(line)
        if re.match(r"\s*#", line):
            code.append("#")
            conditional += bool(re.match(r"\s*#\s*if", line)) - bool(re.match(r"\s*#\s*endif", line))
        else:
            for token in code_of(line):
                code.append(token)
                if token in "([{":
                    if depth == 0 and token == "{":
                        function = opens_function(code)
                    depth += 1
                elif token in ")]}":
                    depth -= 1
                    ended = ended or (depth == 0 and token == "}" and function)
                elif token == ";" and depth == 0:
                    ended = True
        if ended and depth == 0 and conditional == 0:
            cut()
            ended = function = False
    if code:
        raise ValueError("a declaration without an end: " + "".join(lines[:3]))
    return pieces


def opens_function(code):
    """Whether the brace at the end of `code`, the tokens of a declaration so far, opens the body of a function."""
    head, depth = [], 0
    for token in without_template([t for t in code if t != "#"])[:-1]:
        depth += (token in "([") - (token in ")]")
        head.append(token if depth == 0 else "")
    kind = next((token for token in head if token not in ("static", "inline")), "")
    return kind not in ("struct", "class", "enum", "union") and "=" not in head


def code_of(text):
    """The tokens of a text, without white space and comments."""
    return [t for t in TOKEN.findall(text) if not t.isspace() and not t.startswith(("//", "/*"))]


def without_template(code):
    """The tokens behind `template <...>`."""
    angle = 0
    for i, token in enumerate(code if code[:1] == ["template"] else []):
        angle += (token == "<") - (token == ">")
        if i > 0 and angle == 0:
            return code[i + 1:]
    return code


def drop_fallbacks(text, family, version):
    """`return FAMILYn(...);` for other versions n becomes `return cudaErrorNotSupported;`."""
    pattern = re.compile(r"return %s(\d+)(?:<[^;()]*>)?\(" % family)
    at = 0
    while match := pattern.search(text, at):
        at = match.end()
        if int(match.group(1)) == version:
            continue
        end = text.index(";", at)
        text = text[:match.start()] + "return cudaErrorNotSupported" + text[end:]
        at = match.start() + 1
    return text


def extract(family, version, fallback):
    """The system headers, the declarations (in order) that the version's launcher needs, and its best block size."""
    includes, launcher = [], f"{family}{version}"
    declarations = read(ROOT / FAMILIES[family], set(), includes)
    if not fallback:
        declarations = [Declaration(drop_fallbacks(d.text, family, version)) for d in declarations]
    defined = {}
    for declaration in declarations:
        for name in declaration.names:
            defined.setdefault(name, []).append(declaration)
    if launcher not in defined:
        raise KeyError(launcher)
    kept = set()

    def keep(names):
        for declaration in (d for name in names for d in defined.get(name, []) if d not in kept):
            kept.add(declaration)
            keep(declaration.uses)

    table = "".join(d.text for d in defined.get(family + "_versions", []))
    block_size = re.search(r"\b%s<[^>]*>,\s*(\w+)" % launcher, table).group(1)
    keep([launcher, block_size, *(PLANS if family == "lm_head" else ())])
    # The function for the size of the workspace, if the launcher needs one; and the comment above all launchers.
    laid_out = {name for d in kept for name in d.names if name.startswith("lay_out")}
    keep([n for d in declarations if d.uses & laid_out for n in d.names if n.endswith("_workspace_bytes")])
    for declaration in defined.get(family + "_workspace_bytes", []):
        needed = [d for name in declaration.uses for d in defined.get(name, []) if d is not declaration]
        if all(d in kept for d in needed):
            kept.add(declaration)
    if family != "lm_head":  # for lm_head, LmHeadArguments has this comment
        before = declarations[:declarations.index(defined[launcher][0])]
        kept.add([d for d in before if d.text.startswith("// Every launcher")][-1])
    return includes, [d for d in declarations if d in kept], block_size


def plain_function(declarations, launcher, dtype):
    """A function without template parameters that calls the launcher for an element type."""
    code = code_of(next(d.text for d in declarations if launcher in d.names))
    at = code.index(launcher) + 1
    parameters, parameter, depth = [], [], 0
    for token in code[at + 1:closing(code, at)] + [","]:
        depth += (token in "(<[") - (token in ")>]")
        if token == "," and depth == 0:
            if not re.match(r"[A-Za-z_]", parameter[-1]) or parameter == ["void"]:
                parameter.append("unused")
            parameters.append([CPP_TYPES[dtype] if t in TYPES else t for t in parameter])
            parameter = []
        else:
            parameter.append(token)
    types = ", ".join([CPP_TYPES[dtype]] * sum(name in code[:at] for name in TYPES))
    declared = ", ".join(" ".join(p).replace("* ", "*").replace(" < ", "<").replace(" >", ">").replace(" ,", ",")
                         for p in parameters)
    passed = ", ".join(p[-1] for p in parameters)
    return (f"inline cudaError_t {launcher}_{dtype}({declared}) {{\n"
            f"    return {launcher}<{types}>({passed});\n}}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=FAMILIES)
    parser.add_argument("version", type=int)
    parser.add_argument("--dtype", choices=CPP_TYPES, help="add a plain function for this element type")
    parser.add_argument("--namespace", default="bookends", help="default: bookends")
    parser.add_argument("--no-fallback", action="store_true", help="without the versions that the launcher falls back on")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    arguments = parser.parse_args()
    if not re.fullmatch(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*", arguments.namespace):
        parser.error(f"--namespace: '{arguments.namespace}' is not the name of a namespace")
    launcher = f"{arguments.name}{arguments.version}"
    try:
        includes, declarations, block_size = extract(arguments.name, arguments.version, not arguments.no_fallback)
    except KeyError:
        parser.error(f"version: '{arguments.version}' is none of {arguments.name}'s")
    pieces = [d.text for d in declarations]
    pieces.append(f"// The fastest block size that was measured.\nconstexpr int {launcher}_block_size = {block_size};")
    if arguments.dtype:
        pieces.append(plain_function(declarations, launcher, arguments.dtype))
    text = "\n".join([f"// {launcher} of Bookends and the code that it uses. MIT License.",
                      "// Extracted by: scripts/extract.py " + " ".join(sys.argv[1:]), "#pragma once",
                      *(f"#include <{name}>" for name in includes),
                      f"\nnamespace {arguments.namespace} {{\n", "\n\n".join(pieces),
                      f"\n}}  // namespace {arguments.namespace}"]) + "\n"
    if arguments.output:
        try:
            pathlib.Path(arguments.output).write_text(text)
        except OSError as error:
            parser.error(f"-o: '{arguments.output}': {error.strerror}")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
