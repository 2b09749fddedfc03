"""parts/lm_head_plan.h: plain C++, and plans for devices that are not here. The checks are in lm_head_plan.cc."""

import os
import subprocess

from bookends import ROOT

CXX = (os.environ.get("CXX") or "g++").split()


def test_the_header_is_plain_cpp(tmp_path):
    (tmp_path / "user.cc").write_text('#include "%s"\n' % (ROOT / "parts" / "lm_head_plan.h"))
    result = subprocess.run([*CXX, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Werror", "user.cc"],
                            cwd=str(tmp_path), stderr=subprocess.PIPE, universal_newlines=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_plans(tmp_path):
    program = str(tmp_path / "plans")
    subprocess.check_call([*CXX, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror",
                           str(ROOT / "dev" / "test" / "lm_head_plan.cc"), "-o", program])
    result = subprocess.run([program], stdout=subprocess.PIPE, universal_newlines=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "")
