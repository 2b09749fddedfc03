"""The programs' checks in adversary mode. The seed is BOOKENDS_ADVERSARY, by default 1. A program uses streams and device
memory, so that the mode delays its work and hides a predecessor's writes; the tests of the library do not."""

import os
import subprocess

import pytest

import bookends
from bookends import BUILD

SEED = os.environ.get("BOOKENDS_ADVERSARY") or "1"

pytestmark = pytest.mark.skipif(bookends.DEVICE == "cuda" or bool(bookends.SANITIZE), reason="about the CPU device")

RUNS = [
    "encoder_forward all -b 3 -t 17 -c 72 -v 50",
    "encoder_backward all -b 3 -t 700 -c 40 -v 60",
    "encoder_backward all -b 70 -t 5 -c 264 -v 5 --tokens one",
    "encoder_backward all -b 3 -t 300 -c 130 -v 3000 --overwrite",
    "embedding_lookup all -b 3 -t 17 -c 72 -v 50 --index int64",
    "embedding_lookup all -b 1 -t 9 -c 40 -v 50 --bag mean --hotness 0..1500 --weights",
    "embedding_lookup_backward all -b 1 -t 60 -c 40 -v 50 --hotness 0..20 --bag mean --weights --dweights",
    "embedding_lookup_backward all -b 1 -t 90 -c 24 -v 9 --sparse --tokens zipf",
    "embedding_update all -b 1 -t 200 -c 24 -v 50 --index int64",
    "embedding_update all -b 1 -t 90 -c 40 -v 30 --op accumulate --tokens zipf",
    "embedding_update all -b 1 -t 90 -c 72 -v 100 --op rowwise-adam --weight-decay 0.1",
    "classifier_fused all -b 3 -t 5 -v 3001 -p 3008",
    "classifier_fused all -b 1 -t 30 -v 50257 -p 50304 --block-size 256",
    "classifier_fused all -b 1 -t 9 -v 128256 -p 128256 --block-size 256 --output other",
    "lm_head all -b 2 -t 150 -c 320 -v 1000",
    "lm_head all -b 2 -t 150 -c 72 -v 2500 --memory 10% --graph",
    "lm_head all -b 2 -t 150 -c 64 -v 1001 --forward",
]


@pytest.mark.parametrize("command", RUNS)
def test_adversary(command):
    name, *arguments = command.split()
    result = subprocess.run([BUILD / name, *arguments, "--check"], capture_output=True, text=True, timeout=600,
                            env={**os.environ, "BOOKENDS_ADVERSARY": SEED})
    assert "adversary " + SEED in result.stdout, result.stdout + result.stderr
    assert result.returncode == 0, f"BOOKENDS_ADVERSARY={SEED}:\n{result.stdout}{result.stderr}"
