"""Options, shapes, alignments and values together: every pair of them, in each version of each family.

A feature that is right alone may be wrong beside another one. Each family has factors, such as its types, the class of
its channels or the alignment of its pointers, with the values that make a difference; allpairspy chooses cases in which
every pair of values of two factors occurs. The choice is always the same. Cases that pairs do not lead to are beside
them. Each case is checked as in the family's own tests, against numpy float64.
"""

import functools
import itertools

import allpairspy
import numpy as np
import pytest

import bookends
import test_classifier_fused as classifier
import test_encoder_backward as backward
import test_encoder_forward as forward
import test_lm_head as head
from bookends import BF16, FP16, FP32, INT_MAX, OVERWRITE, STOCHASTIC

PARTS = 3  # that the cases of a version are cut into, so that workers have about as much to do


def pairs(factors, possible=lambda case: True, more=()):
    """Cases {factor: value}, in which every pair of values occurs that is possible where all else is as by default. A
    factor's first value is its default; `more` cases name what is different from the defaults."""
    default = {name: values[0] for name, values in factors.items()}

    def allowed(row):
        return possible({**default, **dict(zip(factors, row))})

    cases = [dict(zip(factors, row)) for row in allpairspy.AllPairs(list(factors.values()), filter_func=allowed)]
    missing = pairs_that_are_missing(factors, possible, cases)
    while missing:  # which allpairspy leaves out where it meets what is not possible
        case = missing.pop()
        for other in list(missing):
            both = {**case, **other}
            if all(both[name] == value for name, value in case.items()) and possible({**default, **both}):
                case = both
                missing.remove(other)
        cases.append({**default, **case})
    return cases + [{**default, **case} for case in more]


def pairs_that_are_missing(factors, possible, cases):
    """[{factor: value, other factor: value}]"""
    default, missing = {name: values[0] for name, values in factors.items()}, []
    for first, second in itertools.combinations(factors, 2):
        there = {(repr(case[first]), repr(case[second])) for case in cases}
        missing += [{first: one, second: other} for one in factors[first] for other in factors[second]
                    if (repr(one), repr(other)) not in there and possible({**default, first: one, second: other})]
    return missing


every_part = pytest.mark.parametrize("part", range(PARTS))


def part_of(cases, part):
    return list(enumerate(cases))[part::PARTS]


# ---------------------------------------------------------------------------------------------------------------------
# encoder_forward

FORWARD = dict(
    dtype=[BF16, FP16, FP32],
    C=[64, 1, 7, 8, 33, 65, 257, 264, 520],
    B=[4, 1, 3, 5, 8],
    T=[7, 1, 2, 33],
    V=[1000, 1, 2],
    ids=["random", "one", "first is bad", "last is bad", "all are bad"],
    offsets=[(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1), (4, 1, 4, 4),
             (2, 3, 4, 2)],
    values=["ordinary", "special"])
FORWARD_CASES = pairs(FORWARD)


def some_ids(rng, kind, B, T, V):
    ids = rng.integers(0, V, B * T)
    if kind == "one":
        ids[:] = V - 1
    if kind == "first is bad":
        ids[0] = V
    if kind == "last is bad":
        ids[-1] = -1
    if kind == "all are bad":
        ids = rng.choice([-1, V, INT_MAX, bookends.INT_MIN], B * T)
    return ids.astype(np.int32).reshape(B, T)


@pytest.mark.parametrize("version", forward.VERSIONS)
@every_part
def test_encoder_forward(part, version):
    for number, case in part_of(FORWARD_CASES, part):
        rng = np.random.default_rng(number)
        ids, (C, V, dtype) = some_ids(rng, case["ids"], case["B"], case["T"], case["V"]), \
            (case["C"], case["V"], case["dtype"])
        wte = wpe = None
        if case["values"] == "special":
            values = bookends.special_values(dtype)
            wte = {row: rng.choice(values, C) for row in np.unique(ids[(ids >= 0) & (ids < V)]).tolist()}
            wpe = rng.choice(values, (case["T"], C))
        forward.Case(dtype, ids, C, V, number, case["offsets"], wte, wpe).check(version, number=number)


# ---------------------------------------------------------------------------------------------------------------------
# encoder_backward

BACKWARD = dict(
    types=backward.TYPES,
    C=[40, 1, 8, 33, 129, 264],
    shape=[(3, 40), (1, 7), (5, 1), (130, 3), (200, 1), (4, 33)],  # from B = 128 on dwpe's sums are partial ones
    ids=["random", "one", "two", "first is bad", "last is bad", "all are bad", "padding"],
    V=[50, 1, 2, 700],
    offsets=[(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1),
             (0, 0, 0, 0, 4), (0, 0, 0, 0, 8), (1, 1, 1, 1, 13), (4, 4, 4, 1, 16)],
    overwrite=[0, OVERWRITE],
    stochastic=[0, STOCHASTIC],
    wanted=[backward.BOTH, ("dwte",), ("dwpe",)],
    whole=[True, False])


def backward_cases(version):
    def possible(case):
        return not (version in backward.IN_MEMORY and case["stochastic"] and case["types"].grad is not FP32)

    # The partial sums of a long group, and of dwpe, in a workspace that begins anywhere.
    more = [dict(ids="one", shape=shape, C=C, offsets=(0, 0, 0, 0, by), whole=False, overwrite=overwrite)
            for by in (1, 2, 3, 5, 7, 9, 12, 15)
            for shape, C, overwrite in (((3, 40), 40, 0), ((130, 3), 33, OVERWRITE))]
    return pairs(BACKWARD, possible, more)


@pytest.mark.parametrize("version", backward.VERSIONS)
@every_part
def test_encoder_backward(part, version):
    for number, case in part_of(backward_cases(version), part):
        rng = np.random.default_rng(number)
        (B, T), V, kind = case["shape"], case["V"], case["ids"]
        ids = some_ids(rng, kind, B, T, V)
        if kind == "two":
            ids = (np.arange(B * T) % 2 * (V - 1)).astype(np.int32).reshape(B, T)
        if kind == "padding":
            ids = np.where(rng.random((B, T)) < 0.9, V - 1, ids)
        backward.Case(case["types"], ids, case["C"], V, number, case["offsets"], case["whole"]).check(
            version, case["overwrite"] | case["stochastic"], number, case["wanted"], number=number)


# ---------------------------------------------------------------------------------------------------------------------
# classifier_fused

# Vocabularies by what is done with their rows: short, several vectors a thread, staged by version 5 (16 bit: from 16384
# columns on, in two blocks from 49152, in four beyond; floats: half of that).
CLASSIFIER = dict(
    dtype=[BF16, FP16, FP32],
    V=[203, 1, 8, 1027, 4096, 10247, 20480, 20483, 49157, 81925],
    padding=[0, 1, 5, "to 128"],
    offsets=[(0, 0, 0), (1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (8, 8, 8), (3, 2, 1)],
    dlosses=[False, True],
    dloss=[1.0, -0.25],
    label_smoothing=[0.0, 0.1, 1.0],
    z_loss=[0.0, 0.01],
    softcap=[0.0, 15.0],
    logit_scale=[1.0, -1.5, 0.5],
    targets=["good", "ignored", "ignored in the vocabulary", "bad", "all ignored"],
    values=["ordinary", "masked", "-inf", "NaN in ignored rows", "large"],
    wanted=[classifier.OUTPUTS, ("dlogits", "losses"), ("losses", "lse"), ("dlogits", "probs"), ("losses", "correct"),
            ("dlogits",)],
    in_place=[False, True])
OPTIONS = ("dloss", "label_smoothing", "z_loss", "softcap", "logit_scale")


def classifier_possible(case):
    """A mask at the lowest number, scaled, is an infinity, and of one column it leaves none; both are in the family's
    own tests."""
    return case["values"] not in ("masked", "-inf") or (case["logit_scale"] == 1 and case["V"] > 1)


CLASSIFIER_MORE = [
    # per-row factors in version 5's ring, whose columns 8 divides and does not
    *[dict(V=V, dlosses=True, dloss=-0.25, in_place=in_place, wanted=wanted, offsets=offsets, dtype=dtype)
      for V in (20480, 20487, 49157) for in_place in (False, True) for dtype in (BF16, FP32)
      for wanted, offsets in ((("dlogits", "losses"), (0, 0, 0)), (classifier.OUTPUTS, (1, 1, 1)))],
    # an ignored target that is a column of the vocabulary, in rows whose masks are the lowest numbers: 0 times infinity
    *[dict(V=V, targets="ignored in the vocabulary", values=values, dtype=dtype, in_place=True, wanted=wanted)
      for V in (203, 1027, 20480) for values in ("masked", "-inf") for dtype in (BF16, FP32)
      for wanted in (classifier.OUTPUTS, ("dlogits", "losses"))],
    # pointers off by one element in rows that 8 does not divide
    *[dict(V=V, padding=padding, offsets=offsets, dtype=dtype, label_smoothing=0.1, in_place=in_place)
      for V in (1027, 20483) for padding in (0, 1, 5) for offsets in ((1, 1, 1), (1, 0, 0), (0, 1, 0))
      for dtype, in_place in ((BF16, True), (FP32, False))]]
CLASSIFIER_CASES = pairs(CLASSIFIER, classifier_possible, CLASSIFIER_MORE)


def classifier_case(number, case):
    rng = np.random.default_rng(number)
    V, dtype = case["V"], case["dtype"]
    N = 6 if V <= 4096 else 4
    P = -(-V // 128) * 128 if case["padding"] == "to 128" else V + case["padding"]
    x = classifier.some_logits(rng, N, V)
    targets, ignore = rng.integers(0, V, N), classifier.IGNORE
    which = {"good": [], "bad": [], "all ignored": range(N)}.get(case["targets"], [1, N - 1])
    if case["targets"] == "ignored in the vocabulary":
        ignore = int(rng.integers(V))
        targets[targets == ignore] = (ignore + 1) % V
    targets[list(which)] = ignore
    if case["targets"] == "bad":
        targets[[0, N - 1]] = V, INT_MAX
    if case["values"] in ("masked", "-inf"):
        hidden = rng.random((N, V)) < 0.3
        hidden[:, 0] = False
        hidden[np.arange(N), np.clip(targets, 0, V - 1)] = False
        if case["targets"] == "ignored in the vocabulary":
            hidden[:, ignore] = True  # the ignored rows' own target too
        lowest = -np.inf if case["values"] == "-inf" else {FP32: -3.4e38, BF16: -3.38e38, FP16: -65504}[dtype]
        x[hidden] = lowest
    if case["values"] == "large":
        x += {FP32: 1e5, BF16: 2.0**100, FP16: 3e4}[dtype]
    if case["values"] == "NaN in ignored rows":
        x[targets == ignore] = np.nan
    dlosses = rng.choice([1, 0.5, -2, 0, 1e-3], N).astype(np.float32) if case["dlosses"] else None
    return classifier.Case(dtype, x, targets, P, case["offsets"], dlosses, ignore_index=ignore,
                           **{name: case[name] for name in OPTIONS})


@pytest.mark.parametrize("version", classifier.VERSIONS)
@every_part
def test_classifier_fused(part, version):
    for number, case in part_of(CLASSIFIER_CASES, part):
        in_place = case["in_place"] and "dlogits" in case["wanted"]
        classifier_case(number, case).check(version, case["wanted"], in_place)


# Version 5's rows on either side of every limit: rows that a warp holds in registers with 4 vectors a thread (512
# floats, 1024 of 16 bits) or 8, and rows of 32 KB.
CLASSIFIER_SHORT = {**CLASSIFIER, "V": [1016, 1, 14, 509, 512, 513, 516, 1023, 1024, 1025, 1026, 1031, 1032, 2047, 2048,
                                        2055, 4096, 8190, 8191, 8193, 16382, 16384, 16387]}
CLASSIFIER_SHORT_CASES = pairs(CLASSIFIER_SHORT, classifier_possible)


@every_part
def test_classifier_fused_short_rows(part):
    for number, case in part_of(CLASSIFIER_SHORT_CASES, part):
        in_place = case["in_place"] and "dlogits" in case["wanted"]
        classifier_case(number, case).check(5, case["wanted"], in_place)


# ---------------------------------------------------------------------------------------------------------------------
# lm_head

HEAD = dict(
    types=[(BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16), (FP32, FP32)],
    N=[33, 1, 130],
    C=[24, 1, 8, 65],
    V=[131, 7, 64, 600],
    budget=["default", "least", "little"],
    bias=[True, False],
    wanted=[("dX", "dW", "dbias"), ("dX",), ("dW",), ("dbias",), ("dX", "dW"), ()],
    scalars=[("losses", "lse"), ("losses",), ("lse",)],
    offset=[0, 1, 3],
    dlosses=[False, True],
    dloss=[1.0, -0.25],
    label_smoothing=[0.0, 0.1, 1.0],
    z_loss=[0.0, 0.01],
    softcap=[0.0, 10.0],
    logit_scale=[1.0, -1.5, 0.5],
    targets=["good", "ignored", "ignored in the vocabulary", "all ignored"],
    calls=[1, 2],
    tune=[False, True])


def head_possible(case):
    """Many small products are not tuned: that takes a while."""
    return (case["bias"] or "dbias" not in case["wanted"]) and not (case["tune"] and case["budget"] == "least")


HEAD_MORE = [
    # statistics in several runs, of which the last is shorter and ends within a tile
    *[dict(V=V, N=N, types=types, label_smoothing=eps, scalars=("losses", "lse"), wanted=wanted)
      for V in (600, 1281, 1300) for N in (33, 130) for eps in (0.1, 1.0)
      for types, wanted in (((BF16, FP32), ("dX", "dW", "dbias")), ((FP16, FP16), ()))],
    # more rows than a block has threads, and some: by columns for dbias, by rows for scalars
    *[dict(N=N, C=8, V=V, types=types, budget=budget)
      for N, V in ((1030, 64), (1100, 7)) for types in ((BF16, BF16), (FP32, FP32))
      for budget in ("default", "little")]]
HEAD_CASES = pairs(HEAD, head_possible, HEAD_MORE)


@functools.lru_cache(maxsize=None)
def head_case(number):
    rng, case = np.random.default_rng(number), HEAD_CASES[number]
    (dtype, grad), N, V = case["types"], case["N"], case["V"]
    targets, ignore = rng.integers(0, V, N), head.IGNORE
    if case["targets"] == "ignored in the vocabulary":
        ignore = int(rng.integers(V))
    if case["targets"] != "good":
        targets[:: 1 if case["targets"] == "all ignored" else 3] = ignore
    return head.Case(dtype, grad, N, case["C"], V, number, case["bias"], targets, case["dlosses"],
                     offset=case["offset"], ignore_index=ignore, **{name: case[name] for name in OPTIONS})


@pytest.mark.parametrize("version", head.VERSIONS)
@every_part
def test_lm_head(part, version):
    for number, some in part_of(HEAD_CASES, part):
        case, memory = head_case(number), 0
        if version in head.BOUNDED and some["budget"] != "default":
            # version 5 does as 4 does where a scale may be negative
            least, more = case.budgets(min(version, 4) if some["logit_scale"] < 0 else version, some["wanted"])[:2]
            memory = least if some["budget"] == "least" else more
        case.check(version, memory, some["calls"], wanted=some["wanted"] + some["scalars"], tune=some["tune"])


# ---------------------------------------------------------------------------------------------------------------------
# the choice itself

@pytest.mark.parametrize("factors, possible, cases", [
    (FORWARD, lambda case: True, FORWARD_CASES),
    (BACKWARD, lambda case: True, backward_cases(0)),
    (CLASSIFIER, classifier_possible, CLASSIFIER_CASES),
    (HEAD, head_possible, HEAD_CASES),
], ids=["encoder_forward", "encoder_backward", "classifier_fused", "lm_head"])
def test_every_possible_pair_is_there(factors, possible, cases):
    assert all(possible(case) for case in cases)
    assert pairs_that_are_missing(factors, possible, cases) == []
    assert len(pairs_that_are_missing(factors, possible, cases[1:2])) > len(cases)
