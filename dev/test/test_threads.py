"""Several host threads call the library at once, and what a call leaves as it was: the program threads.cu, on either
device."""

import pytest

import bookends
from bookends import ON_CUDA


def test_threads():
    result = bookends.run("test/threads", 1000 if ON_CUDA else 2)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")


@pytest.mark.skipif(not ON_CUDA, reason="measures the CUDA runtime")
def test_host_times_name_every_function():
    result = bookends.run("test/threads", "--host-time")
    assert (result.returncode, result.stderr) == (0, "")
    for name in ("bk_encoder_forward", "bk_encoder_backward", "bk_classifier_fused", "bk_classifier_totals",
                 "bk_lm_head_run"):
        assert name in result.stdout
