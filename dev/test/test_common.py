"""common.h and parts/launch.h: the program common.cu checks them, on either device."""

import bookends


def test_common():
    result = bookends.run("test/common")
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")
