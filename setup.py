"""Builds the Python package: `make package` compiles the library, which goes into the wheel as it is.

BOOKENDS_DEVICE (cuda or cpu; by default cuda where nvcc and a GPU are found) and BOOKENDS_ARCHS ("80 90") choose what
it is built for.
"""

import os
import pathlib
import re
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = pathlib.Path(__file__).resolve().parent
COMMIT = ROOT / "COMMIT"  # only in source distributions


def version():
    header = (ROOT / "dev" / "lib" / "bookends.h").read_text()
    number = int(re.search(r"^#define BK_VERSION (\d+)$", header, re.M).group(1))
    return "%d.%d.%d" % (number // 10000, number // 100 % 100, number % 100)


class BuildWithMake(build_py):
    """Adds libbookends.so and build.json to the package."""

    def run(self):
        super().run()
        package = ROOT / "python" / "bookends" if self.editable_mode else pathlib.Path(self.build_lib) / "bookends"
        command = ["make", "-j%d" % (os.cpu_count() or 1), "package", "PACKAGE=%s" % package.resolve()]
        for variable, name in (("BOOKENDS_DEVICE", "DEVICE"), ("BOOKENDS_ARCHS", "ARCHS")):
            if os.environ.get(variable):
                command.append("%s=%s" % (name, os.environ[variable]))
        if COMMIT.exists():
            command.append("COMMIT=" + COMMIT.read_text().strip())
        subprocess.run(command, cwd=str(ROOT), check=True)


class SourceWithCommit(sdist):
    """Adds the commit, which make cannot ask git for in a source distribution."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        found = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=str(ROOT),
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True)
        (pathlib.Path(base_dir) / "COMMIT").write_text(found.stdout.strip() or "unknown")


class WithLibrary(Distribution):
    """Has compiled code, so that the wheel is of this platform."""

    def has_ext_modules(self):
        return True


def tag_of_any_python():
    """A wheel command whose tag names the platform, but any Python 3: the library does not know Python."""
    from setuptools.command.bdist_wheel import bdist_wheel

    class Wheel(bdist_wheel):
        def get_tag(self):
            return ("py3", "none", super().get_tag()[2])

    return Wheel


setup(version=version(),
      package_dir={"": "python"},
      packages=["bookends", "bookends.torch"],
      package_data={"bookends": ["py.typed"]},
      distclass=WithLibrary,
      cmdclass={"build_py": BuildWithMake, "sdist": SourceWithCommit, "bdist_wheel": tag_of_any_python()},
      options={"build": {"build_base": "build/python"}})
