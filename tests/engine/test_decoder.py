"""Compare the engine's decoder with `GradientCode`, the decoder in NumPy."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from independent import bounded

pytest.importorskip("jaxcoded.transport._engine", reason="built without the engine")

from jaxcoded import Coded, GradientCode, codes, make_plan
from jaxcoded.codes import NAMES
from jaxcoded.transport import _engine, engine

CODES = {
    "uncoded": [(5, 0)],
    "fractional_repetition": [(6, 1), (12, 3)],
    "cyclic_repetition": [(5, 2), (12, 3)],
    "random_generator": [(6, 2), (8, 1, 2), (12, 3, 2)],
    "polynomial": [(6, 2), (8, 1, 2)],
    "linear(generator=[[1, 0, 1, 1], [0, 1, 1, -1]])": [(8, 2, 2)],
    "gaussian_mds": [(6, 1, 2), (12, 3)],
    "single_parity_check": [(6, 1, 2)],
    "reed_solomon": [(6, 2), (9, 1, 2)],
    "hamming(r=3)": [(14, 2, 4)],
    "partial_stragglers(late=2, slowdown=3)": [(6, 0)],
    "progressive": [(4, 1), (7, 3)],
    "adaptive": [(5, 1), (6, 2), (6, 1, 2)],
    "ignore_stragglers": [(6, 2)],
    "bernoulli(load=3)": [(9, 3), (16, 6)],
    "stochastic_block(load=3, blocks=2)": [(8, 3)],
    "expander(degree=4)": [(10, 4)],
    "block_design": [(7, 3)],
    "grouped(load=3)": [(9, 4), (9, 3, 2)],
}
# Messages of different scales, duplicate messages, and dependent equations.
CUSTOM = [
    np.array([[1, 1, 0, 0], [1e-6, 0, 1e-6, 1e-6], [0, 3e5, 3e5, 0], [0, 0, 0, 1]]),
    np.array([[1, 1, 0], [1, 1, 0], [0, 0, 2], [0, 0, 2], [1, 1, 1], [0, 0, 0]]),
    np.array([[1, 0], [0, 1], [1, 1], [1, -1], [3, 1]]),
]
# Codes with amplifications of 2e10 and 1e10.
ILL_CONDITIONED = [
    f"linear(generator={generator})"
    for generator in (
        [
            [1.6157230159186333, -0.5385743388522496, -0.7100045115227639],
            [-3.9399107626593732, 1.3133035876804653, 1.5608184303095178],
        ],
        [
            [0.8476848273262474, 1.6953696476074924, -0.364096478590634],
            [0.011513359755345808, 0.023026719073061187, 0.023497685141174077],
        ],
    )
]


@functools.cache
def known():
    assert {text.partition("(")[0] for text in CODES} == set(NAMES)
    exact = [
        codes.named(text, *numbers, seed=3)
        for text, cases in CODES.items()
        for numbers in cases
    ] + [GradientCode(B, stragglers=0) for B in CUSTOM]
    out = []
    for code in exact:
        out += [code, codes.approximate(code, code.n // 2)]
        if code.m == 1 and code.B.sum() > 0:
            out.append(codes.approximate(code, code.n // 2, "one_step"))
    return [(code, decoder_of(code)) for code in out]


decoder_of = engine._decoder_of


@functools.cache
def growth(code):
    """Return the error bound of coefficients, in units of the largest coefficient. If messages are nearly dependent,
    both decoders lose digits.
    """
    return 1e-10 + 1e-16 * code.amplification


def answers(code, rng):
    """Draw bool ``(n, parts)``: any messages, whole children, or the first messages of
    children.
    """
    share = rng.choice([0.3, 0.6, 0.8, 0.95, 1])
    kind = rng.integers(3)
    if kind == 0:
        return rng.random((code.n, code.parts)) < share
    came = rng.random((code.n, 1)) < share
    if kind == 1:
        return np.repeat(came, code.parts, axis=1)
    return came & (
        np.arange(code.parts) < rng.integers(code.parts + 1, size=(code.n, 1))
    )


def test_a_leaf_does_not_wait():
    assert _engine.Decoder().decode([], []) == []


def test_any_tolerated_set_with_and_without_copies():
    """Six children send three different messages, two copies of each: any three
    messages suffice.
    """
    generator = [[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 1]]
    code = codes.linear(6, generator, stragglers=3)
    decoder = decoder_of(code)
    for here in itertools.permutations(range(6), 3):
        may = [row in here for row in range(6)]
        found = decoder.decode(list(here), [True] * 6)
        assert len(found) > 0, here
        assert not np.any(np.array(found)[..., np.flatnonzero(~np.array(may))])


@given(st.integers(0, 2**32))
@settings(bounded, max_examples=200)
def test_the_same_coefficients_as_in_numpy(seed):
    rng = np.random.default_rng(seed)
    code, decoder = known()[seed % len(known())]
    for _ in range(3):
        mask = answers(code, rng)
        expected = code.decode(mask).coefficients
        actual = np.array(decoder.approximate(mask.ravel().tolist()))
        actual = actual.reshape(expected.shape)
        scale = max(1, np.abs(expected).max())
        assert np.abs(actual - expected).max() <= growth(code) * scale, code
        # no unused message is fetched
        assert not actual[:, ~mask.ravel()].any()
        whole = np.rint(expected)
        if np.array_equal(np.tensordot(whole, code.B, 1), target(code)) and (
            np.abs(whole - expected).max() < 1e-9
        ):
            assert np.array_equal(actual, whole), code


def target(code):
    return np.tile(np.eye(code.m), (1, code.k)).reshape(code.m, code.k, code.m)


@given(st.integers(0, 2**32))
@bounded
def test_the_first_messages_that_suffice(seed):
    """The decoder uses the first messages, in order of arrival, that suffice. For codes without parts these are at
    least n−s.
    """
    rng = np.random.default_rng(seed)
    for code, decoder in known():
        mask = answers(code, rng).ravel()
        order = rng.permutation(np.flatnonzero(mask))
        actual = decoder.decode(order.tolist(), mask.tolist())
        if not code.sufficient(mask.reshape(code.n, code.parts)):
            assert actual == [], code
            # the decoder's cache has the answer
            assert decoder.decode(order.tolist(), mask.tolist()) == []
            continue
        # bisect for the shortest sufficient beginning: more messages also suffice
        few, suffice = 0, len(order)
        while few < suffice:
            count = (few + suffice) // 2
            heard = np.isin(np.arange(len(mask)), order[:count])
            if code.sufficient(heard.reshape(code.n, code.parts)):
                suffice = count
            else:
                few = count + 1
        if code.parts == 1 and not code.approximate:
            classes = np.array(code.classes)
            most = min(
                code.n - code.stragglers, len(set(classes)), len(set(classes[order]))
            )
            while len(set(classes[order[:suffice]])) < most:
                suffice += 1
        heard = np.isin(np.arange(len(mask)), order[:suffice])
        expected = code.decode(heard.reshape(code.n, code.parts)).coefficients
        scale = max(1, np.abs(expected).max())
        actual = np.array(actual).reshape(expected.shape)
        assert np.abs(actual - expected).max() <= growth(code) * scale, code


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        codes.adaptive(4, 2, seed=2),
        codes.adaptive(4, 2, seed=1),
        codes.adaptive(3, 2),
        codes.adaptive(4, 1, 2),
        codes.adaptive(4, 1, 3),
        codes.partial_stragglers(5, 2, slowdown=3),
        codes.progressive(4, 2),
    ],
)
def test_both_decoders_agree_on_every_set_of_first_parts(code):
    """Both decoders agree on every set, also on decodable sets that would amplify too
    much.
    """
    refused = 0
    decoder = decoder_of(code)
    for counts in itertools.product(range(code.parts + 1), repeat=code.n):
        mask = np.arange(code.parts) < np.array(counts)[:, None]
        order, came = np.flatnonzero(mask).tolist(), mask.ravel().tolist()
        found = decoder_of(code).decode(order, came)
        sufficient = code.sufficient(mask)
        assert bool(found) == sufficient, counts
        refused += code.decodable(mask) and not sufficient
        expected = code.decode(mask).coefficients
        scale = max(1, np.abs(expected).max())
        actual = np.array(decoder.approximate(came)).reshape(expected.shape)
        assert np.abs(actual - expected).max() <= 1e-9 * scale, counts
    assert (refused > 0) == (code.name == "adaptive")


def test_a_set_that_would_lose_all_digits_waits_for_the_next_message():
    """These sets would amplify rounding 22,000 times and 8 times as much as the code does."""
    code = codes.adaptive(4, 2, seed=2)
    for counts in ([0, 6, 1, 5], [5, 5, 1, 1]):
        mask = np.arange(6) < np.array(counts)[:, None]
        order = np.flatnonzero(mask).tolist()
        assert code.decodable(mask)
        assert decoder_of(code).decode(order, [True] * 24) == []
        lacking = [row for row in range(24) if row not in order]
        found = decoder_of(code).decode(order + lacking, [True] * 24)
        A = np.array(found).reshape(6, 24)
        grown = (np.abs(A) @ np.abs(code.B).sum(axis=2)).max()
        assert grown <= 1.001 * code.amplification
        np.testing.assert_allclose(
            np.tensordot(A, code.B, 1), target(code), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize("text", ILL_CONDITIONED)
def test_sets_that_numpy_decodes_suffice(text):
    """If two children send nearly the same message, the two decoders round very
    differently."""
    code = codes.named(text, 3, 1, 2)
    decoder = decoder_of(code)
    for missing in range(code.n):
        here = [child for child in range(code.n) if child != missing]
        assert code.decodable(here)
        assert decoder.decode(here, [child in here for child in range(code.n)]), missing


def test_few_questions_to_the_code():
    """The decoder computes coefficients once for the arrived messages, and rarely to
    find where they began to suffice. It computes nothing twice, and nothing before
    enough messages hold each part of the sum.
    """
    code = codes.adaptive(16, 3)
    decoder = decoder_of(code)
    everyone = [True] * len(code.B)
    order = [i * code.parts + p for p in range(code.parts) for i in range(code.n)]
    for count in range(3 * code.n):
        assert decoder.decode(order[:count], everyone) == []
    assert decoder.questions == 0
    assert decoder.decode(order[: 3 * code.n], everyone)
    assert decoder.questions == 1
    for _ in range(3):
        assert decoder.decode(order, everyone)
    assert decoder.questions <= 1 + np.ceil(np.log2(len(order)))


@pytest.mark.parametrize("late", [1, 2, 3])
def test_few_questions_while_children_are_late(late):
    code = codes.adaptive(16, 3)
    decoder = decoder_of(code)
    came, before = [], 0
    for count, child in enumerate(np.random.default_rng(late).permutation(code.n)):
        if count == code.n - late:
            break
        came.append(child * code.parts)
        order = [row + p for p in range(code.parts) for row in came]
        found = decoder.decode(order, [True] * len(code.B))
        assert bool(found) == (count >= code.n - 4)
        assert decoder.questions - before <= 1 + bool(found) * 8
        before = decoder.questions


@functools.cache
def planned():
    cases = [
        (1, {"stragglers": 0}),
        (5, {}),
        (13, {"fanout": 3}),
        (13, {"fanout": 3, "code": "adaptive"}),
        (
            21,
            {
                "fanout": 4,
                "stragglers": 2,
                "code": ["cyclic_repetition", "grouped(load=3)"],
            },
        ),
        (9, {"parents": [2, 2, -1, 0, 0, 0, 1, 1, 1]}),
    ]
    plans = [make_plan(size, Coded(**rest)) for size, rest in cases]
    return [(plan, engine._erasures(plan)) for plan in plans]


@given(st.integers(0, 2**32))
@settings(bounded, max_examples=200)
def test_erasures_mean_the_same_as_to_the_plan(seed):
    rng = np.random.default_rng(seed)
    for plan, erasures in planned():
        erased = rng.random(plan.size) < rng.choice([0.1, 0.3, 0.6])
        erased[plan.root] &= rng.random() < 0.3
        words = plan.why_not(erased)
        expected = words and f"TooManyErasures: {words}"
        for _ in range(2):
            assert erasures.why_not(erased.tolist()) == expected
            assert erasures.missing(erased.tolist()) == plan.missing(erased).tolist()
