"""References that share no code with the library: enumeration, ranks of matrices, sums up a tree."""

import itertools
import math

import numpy as np
from hypothesis import settings

from jaxcoded.allocation import assignment

bounded = settings(deadline=None, max_examples=25)


def survivors(n, s):
    """Every bool ``(n,)`` with at most ``s`` children missing."""
    for missing in range(s + 1):
        for pattern in itertools.combinations(range(n), missing):
            answered = np.ones(n, bool)
            answered[list(pattern)] = False
            yield answered


def identity(B):
    """What ``A·B`` has to be: ``[u == v]`` for every partition, ``(m, k, m)``."""
    _, k, m = B.shape
    return np.repeat(np.eye(m)[:, None, :], k, axis=1)


def error(A, B):
    return np.abs(np.einsum("ui,ijv->ujv", A, B) - identity(B)).max()


def solvable(B, answered):
    """Whether the answered rows of ``B`` span the sums, by the rank of one matrix with and without them."""
    rows = B.reshape(len(B), -1)[answered]
    both = np.vstack([rows, identity(B).reshape(B.shape[2], -1)])
    rank = np.linalg.matrix_rank(rows, tol=1e-7) if len(rows) else 0
    return rank == np.linalg.matrix_rank(both, tol=1e-7)


def own_messages(plan, gradients):
    """What each rank adds for its own examples; ``gradients`` is ``(d, q)``, ``q`` a multiple of its slices."""
    d, q = gradients.shape
    messages = []
    for rank, M in enumerate(plan.slices_above):
        indices, weights = assignment(plan, rank, d)
        slices = gradients[indices].reshape(-1, M, q // M)
        messages.append(np.einsum("eu,euq->q", weights.reshape(-1, M), slices))
    return messages


def tree_sum(plan, own, missing=()):
    """The vector that the root ends with, each rank in turn following the algebra in float64.

    Args:
        own: of `own_messages`.
        missing: ranks whose message does not reach their parent; their subtrees are lost with them.
    """
    messages = list(own)
    for rank in reversed(plan.tree.order):
        children = plan.coded_children(rank)
        if children:
            answered = [child not in missing for child in children]
            A = plan.codings[rank].code.decode(answered).coefficients
            slices = [
                sum(
                    a * messages[child]
                    for a, child, ok in zip(row, children, answered)
                    if ok
                )
                for row in A
            ]
            messages[rank] = messages[rank] + np.concatenate(slices)
    return messages[plan.root]


def gradients_for(plan, batch_size, seed=0):
    q = math.lcm(*plan.slices_above) * 2
    return np.random.default_rng(seed).standard_normal((batch_size, q))


def random_missing(plan, rng):
    """As many missing children at every parent as it keeps, at random."""
    missing = set()
    for rank, coding in enumerate(plan.codings):
        if coding is not None:
            children = rng.permutation(plan.coded_children(rank))
            missing.update(children[: coding.code.stragglers].tolist())
    return missing


def paper_parents(size, n):
    """Ranks breadth first, ``parent(r) = (r−1)//n``."""
    return [-1, *((rank - 1) // n for rank in range(1, size))]
