"""Parity checks: the equations that the messages of children satisfy for any gradients."""

import numpy as np
import pytest

from jaxcoded import Coded, GradientCode, codes, make_plan

CODES = {
    f"{text}, {n}, {s}, {m}": codes.named(text, n, s, m)
    for text, n, s, m in [
        ("uncoded", 4, 0, 1),
        ("fractional_repetition", 6, 1, 1),
        ("fractional_repetition", 6, 2, 1),
        ("cyclic_repetition", 3, 1, 1),
        ("cyclic_repetition", 7, 2, 1),
        ("random_generator", 6, 1, 2),
        ("random_generator", 7, 2, 1),
        ("polynomial", 6, 2, 2),
        ("linear(generator=[[1, 0, 1], [0, 1, 1]])", 3, 1, 2),
        ("gaussian_mds", 6, 1, 2),
        ("single_parity_check", 6, 1, 5),
        ("reed_solomon", 8, 2, 2),
        ("hamming(r=3)", 7, 1, 4),
        ("partial_stragglers(late=2, slowdown=3)", 6, 0, 1),
        ("progressive", 6, 2, 1),
        ("adaptive", 6, 2, 1),
        ("ignore_stragglers", 4, 1, 1),
        ("bernoulli(load=2)", 5, 1, 1),
        ("stochastic_block(load=2, blocks=2)", 6, 2, 1),
        ("expander(degree=3)", 6, 2, 1),
        ("block_design", 7, 2, 1),
        ("grouped(load=3)", 6, 3, 2),
    ]
}
# a child without data, and messages of very different sizes
CODES["idle child"] = codes.random_generator(4, 1, loads=[0, 3, 2, 3])
CODES["sizes"] = GradientCode(
    np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]]) * [[1e5], [1], [1e-5]]
)
each_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES)


@each_code
def test_messages_satisfy_them(code):
    gradients = np.random.default_rng(0).standard_normal((code.k * code.m, 20))
    messages = code.B.reshape(len(code.B), -1) @ gradients
    H = code.parity_checks
    size = np.sqrt(H**2 @ (messages**2).sum(axis=1))
    assert (np.linalg.norm(H @ messages, axis=1) <= 1e-12 * size).all()


@each_code
def test_there_are_as_many_as_there_is_surplus(code):
    B = code.B.reshape(len(code.B), -1)
    sizes = np.abs(B).max(axis=1, keepdims=True)
    rank = np.linalg.matrix_rank(B / np.where(sizes > 0, sizes, 1), tol=1e-8)
    assert code.parity_checks.shape == (len(B) - rank, len(B))
    if len(B) > rank:
        units = 2.0 ** np.floor(np.log2(np.where(sizes > 0, sizes, 1)))
        N = code.parity_checks * units.T
        N /= np.linalg.norm(N, axis=1, keepdims=True)
        assert np.linalg.matrix_rank(N, tol=1e-8) == len(N)


@each_code
def test_two_decodings_differ_by_them(code):
    if code.approximate or code.stragglers == 0:
        return
    one = code.decode(np.arange(code.n) >= code.stragglers).coefficients
    other = code.decode(np.arange(code.n) < code.n - code.stragglers).coefficients
    units = np.abs(code.B).max(axis=(1, 2))
    H, difference = code.parity_checks * units, (one - other) * units
    left = difference - difference @ np.linalg.pinv(H) @ H
    assert np.abs(left).max() <= 1e-8 * max(1, np.abs(difference).max())


@each_code
def test_children_of_a_check_share_partitions(code):
    for check in code.parity_checks:
        children = np.unique(np.flatnonzero(check) // code.parts)
        reached = code.support[children[:1]].any(axis=0)
        for _ in children:
            touched = children[(code.support[children] & reached).any(axis=1)]
            reached |= code.support[touched].any(axis=0)
        assert len(children) == 1 or set(touched) == set(children)


def test_plans_know_which_parents_can_check():
    assert make_plan(13, Coded(fanout=3)).checked == (0, 1, 2, 3)
    assert make_plan(4, Coded(stragglers=0)).checked == ()
    # rank 1 has a single child, and tolerates no missing one
    assert make_plan(5, Coded(parents=[-1, 0, 0, 0, 1])).checked == (0,)
    # an approximation below does not matter to the ranks above
    plan = make_plan(
        13, Coded(fanout=3, code=["cyclic_repetition", "expander(degree=2)"])
    )
    assert 0 not in plan.checked
