"""Stochastic rounding's random bits, each of them.

A sum that lies the fraction m / 2^16 of the way between two bfloat16 numbers is rounded up if the element's 16 random
bits are less than m. Sixteen calls with one seed, each with fractions chosen by what the one before gave, tell the bits
of every element; then their statistics are those of any random numbers: how often fractions such as 2^-9 and 2^-14
round up, whether all bits are fair, and whether neighbours, tensors and seeds depend on each other in any of them. (Of
fp16 a float holds the fraction in 13 bits only, so 13 are known.)

The seeds are fixed, so a result is always the same. For others, each assertion would fail by chance with a probability
of 1e-9 at most; there are fewer than 10,000.
"""

import functools
import math

import numpy as np
import pytest

import bookends
from bookends import Array, BF16, FP16, OK, STOCHASTIC, from_bits, to_bits

COUNT = 1 << 17  # elements of each tensor
KNOWN = {BF16: 16, FP16: 13}  # bits
SEEDS = (5, 6, 2**63)
TENSORS = ("dwte", "dwpe")

every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16], ids=lambda d: d.name)


@functools.lru_cache(maxsize=None)
def random_bits_of(dtype, seed):
    """The random bits of elements 0 to COUNT-1 of dwte and of dwpe, (2, COUNT), as the last version uses them."""
    significand, known = {BF16: 8, FP16: 11}[dtype], KNOWN[dtype]
    rng = np.random.default_rng(1)
    low = rng.integers(2**(significand - 1), 2**significand - 1, COUNT)  # the distance to the next is 1
    sign = rng.choice([-1, 1], COUNT)
    before = to_bits(sign * low, dtype)
    size = bookends.encoder_backward_workspace_bytes(2, 1, COUNT, 1)
    inp, workspace = Array(2, np.int32).put([0, 0]), Array(size, np.uint8)
    bits = np.zeros((2, COUNT), np.int64)
    for bit in reversed(range(known)):
        threshold = bits | 1 << bit
        for k, name in enumerate(TENSORS):  # the two tensors need different sums
            half = known // 2
            parts = threshold[k] >> half << half, threshold[k] % (1 << half)  # each has few enough bits for the type
            dout = np.concatenate([to_bits(sign * part * 2.0**-known, dtype) for part in parts])
            assert (from_bits(dout, dtype).reshape(2, -1).sum(0) == sign * threshold[k] * 2.0**-known).all()
            gradient = Array(COUNT, dtype.bits).put(before)
            code, _ = bookends.encoder_backward(
                gradient if name == "dwte" else None, gradient if name == "dwpe" else None,
                Array(2 * COUNT, dtype.bits).put(dout), inp, None, workspace, 2, 1, COUNT, 1, dtype, dtype, STOCHASTIC,
                seed)
            assert code == OK
            up = np.abs(from_bits(gradient.get(), dtype)) - low
            assert np.isin(up, (0, 1)).all()
            bits[k] |= np.where(up == 1, 0, 1 << bit)
    return bits


# ---------------------------------------------------------------------------------------------------------------------
# statistics: by how many standard deviations of a normal distribution something is off

LIMIT = 6.2  # 6e-10 on both sides together


def of_poisson(count, mean):
    """The probability of a count so far from the mean, or further: 2 * min(P(X <= count), P(X >= count))."""
    below = sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))
    at = math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))
    return 2 * min(below, 1 - below + at)


def of_chi_squared(counts):
    """For cells of equal expectation; after Wilson and Hilferty (1931)."""
    counts = np.asarray(counts, float).reshape(-1)
    degrees = counts.size - 1
    value = ((counts - counts.mean())**2).sum() / counts.mean()
    variance = 2 / (9 * degrees)
    return ((value / degrees)**(1 / 3) - (1 - variance)) / math.sqrt(variance)


def pair_table(first, second, values):
    return np.bincount(first * values + second, minlength=values * values)


def nibbles(bits, known):
    """[(name, the values 0 to 15 of four neighbouring bits of each element)]"""
    return [("bits %d to %d" % (shift, shift + 3), bits >> shift & 15) for shift in range(0, known - 3, 3)] + \
        [("highest bits", bits >> known - 4)]


def test_the_statistics():
    """What is random passes; what is not does not."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 1 << 16, COUNT)
    assert abs(of_chi_squared(np.bincount(bits >> 8))) < LIMIT
    assert of_chi_squared(np.bincount(bits & 0xfffe, minlength=1 << 16)) > LIMIT  # a bit that is always 0
    assert of_chi_squared(pair_table(bits[:-1] & 15, bits[1:] & 15, 16)) < LIMIT
    assert of_chi_squared(pair_table(bits & 15, bits & 15, 16)) > LIMIT
    assert of_chi_squared(pair_table(bits & 15, (bits ^ rng.integers(0, 12, COUNT)) & 15, 16)) > LIMIT
    assert of_poisson(32, 32) > 0.9 and of_poisson(0, 32) < 1e-12 and of_poisson(80, 32) < 1e-9 < of_poisson(50, 32)
    total = [of_chi_squared(np.bincount(rng.integers(0, 64, 10000), minlength=64)) for _ in range(400)]
    assert abs(np.mean(total)) < 0.25 and abs(np.std(total) - 1) < 0.2


# ---------------------------------------------------------------------------------------------------------------------
# the random bits

@every_dtype
@pytest.mark.parametrize("fraction", [2.0**-k for k in range(5, 17)])
def test_small_fractions_round_as_often_as_they_should(fraction, dtype):
    """Up, and the rest down: of all elements, of each tensor, of every fourth element, and of positive and negative
    numbers alike. A random number of 8 bits would never round 2^-9 of an ulp up, or would do it twice as often."""
    threshold = fraction * 2**KNOWN[dtype]
    if threshold < 1:
        pytest.skip("a float has no such fraction")
    every = np.stack([random_bits_of(dtype, seed) for seed in SEEDS])
    for some in (every, every[:, 0], every[:, 1], *(every[..., k::4] for k in range(4)), every[0], every[1]):
        if some.size * fraction < 2:
            continue
        for count in ((some < threshold).sum(), (some >= 2**KNOWN[dtype] - threshold).sum()):
            assert of_poisson(int(count), some.size * fraction) > 1e-9, (count, some.size * fraction)


@every_dtype
@pytest.mark.parametrize("seed", SEEDS)
def test_every_bit_is_fair(seed, dtype):
    known = KNOWN[dtype]
    for name, bits in zip(TENSORS, random_bits_of(dtype, seed)):
        for bit in range(known):
            ones = (bits >> bit & 1).sum()
            assert abs(ones - COUNT / 2) < LIMIT * math.sqrt(COUNT / 4), (name, bit)
        for what, values in nibbles(bits, known):
            assert abs(of_chi_squared(np.bincount(values, minlength=16))) < LIMIT, (name, what)
        for shift in (0, known - 8):
            assert abs(of_chi_squared(np.bincount(bits >> shift & 255, minlength=256))) < LIMIT, (name, shift)


@every_dtype
@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_are_independent_in_every_bit(seed, dtype):
    known = KNOWN[dtype]
    for name, bits in zip(TENSORS, random_bits_of(dtype, seed)):
        for apart in (1, 2, 3, 4, 5, 8, 16, 256):
            for what, first in nibbles(bits[:-apart], known):
                for other, second in nibbles(bits[apart:], known):
                    assert of_chi_squared(pair_table(first, second, 16)) < LIMIT, (name, apart, what, other)


@every_dtype
@pytest.mark.parametrize("fraction", [2.0**-7, 2.0**-9])
def test_neighbours_round_up_together_as_rarely_as_they_should(fraction, dtype):
    """Of two neighbours that are each rounded up with a small probability, both are with its square."""
    every = np.stack([random_bits_of(dtype, seed) for seed in SEEDS])
    up = every < fraction * 2**KNOWN[dtype]
    for apart in (1, 2, 3, 4, 8):
        both = int((up[..., apart:] & up[..., :-apart]).sum())
        assert of_poisson(both, up[..., apart:].size * fraction**2) > 1e-9, (apart, both)


@every_dtype
def test_tensors_and_seeds_are_independent_in_every_bit(dtype):
    """Of the same element: dwte's bits and dwpe's, and those of two seeds, which may be next to each other."""
    known = KNOWN[dtype]
    tensors = {(seed, name): bits for seed in SEEDS for name, bits in zip(TENSORS, random_bits_of(dtype, seed))}
    for one, first in tensors.items():
        for other, second in tensors.items():
            if one < other:
                for what, some in nibbles(first, known):
                    for which, others in nibbles(second, known):
                        assert of_chi_squared(pair_table(some, others, 16)) < LIMIT, (one, other, what, which)
