"""The launchers, called directly: the programs launchers_*.cu check them, on either device."""

import pytest

import bookends


@pytest.mark.parametrize("family", ["encoder_forward", "encoder_backward", "embedding_lookup",
                                    "embedding_lookup_backward", "embedding_update", "classifier_fused", "lm_head"])
def test_launchers(family):
    result = bookends.run("test/launchers_" + family, timeout=900)
    assert (result.returncode, result.stdout, result.stderr) == (0, "ok\n", "")
