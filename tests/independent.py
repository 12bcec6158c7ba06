"""References that share no code with the library: enumeration, matrix ranks, and sums
up a tree.
"""

import itertools
import math

import numpy as np
from hypothesis import settings

bounded = settings(deadline=None, max_examples=25)


def survivors(n, s):
    """Return every bool ``(n,)`` with at most ``s`` children missing."""
    for missing in range(s + 1):
        for pattern in itertools.combinations(range(n), missing):
            answered = np.ones(n, bool)
            answered[list(pattern)] = False
            yield answered


def identity(B):
    """Return the required ``A·B``: ``[u == v]`` for every partition, ``(m, k, m)``."""
    _, k, m = B.shape
    return np.repeat(np.eye(m)[:, None, :], k, axis=1)


def error(A, B):
    return np.abs(np.einsum("ui,ijv->ujv", A, B) - identity(B)).max()


def solvable(B, answered):
    """Return whether the answered rows of ``B`` span the sums, by the rank of a matrix
    with and without them.
    """
    rows = B.reshape(len(B), -1)[answered]
    both = np.vstack([rows, identity(B).reshape(B.shape[2], -1)])
    rank = np.linalg.matrix_rank(rows, tol=1e-7) if len(rows) else 0
    return rank == np.linalg.matrix_rank(both, tol=1e-7)


def own_messages(plan, gradients):
    """Return what each rank adds for its own examples, ``(P, q/M)``; ``gradients`` is
    ``(d, q)``, and ``q`` a multiple of the slices.
    """
    d, q = gradients.shape
    messages = []
    for rank, (P, M) in enumerate(zip(plan.parts_above, plan.slices_above)):
        indices, weights = plan.strategy.assignment(plan, rank, d)
        slices = gradients[indices].reshape(-1, M, q // M)
        messages.append(np.einsum("epu,euq->pq", weights.reshape(-1, P, M), slices))
    return messages


def tree_sum(plan, own, missing=(), came=None):
    """Return the root's vector, computed rank by rank in float64.

    Args:
        own: the result of `own_messages`.
        missing: ranks whose messages do not reach their parents; the sum also lacks
            their subtrees.
        came: by rank, the number of parts of its message that reach its parent;
            default: all.
    """
    messages = list(own)
    for rank in reversed(plan.tree.order):
        children = plan.coded_children(rank)
        if not children:
            continue
        code = plan.codings[rank].code
        parts = [
            0 if child in missing else (came or {}).get(child, code.parts)
            for child in children
        ]
        answered = np.arange(code.parts) < np.array(parts)[:, None]
        A = code.decode(answered).coefficients
        total = []
        for own_part in range(plan.parts_above[rank]):
            rows = [
                messages[child][own_part * code.parts + part]
                for child in children
                for part in range(code.parts)
            ]
            slices = [
                sum(a * row for a, row, ok in zip(line, rows, answered.ravel()) if ok)
                for line in A
            ]
            total.append(np.concatenate(slices))
        messages[rank] = messages[rank] + np.array(total)
    (total,) = messages[plan.root]
    return total


def gradients_for(plan, batch_size, seed=0):
    q = math.lcm(*plan.slices_above) * 2
    return np.random.default_rng(seed).standard_normal((batch_size, q))


def random_missing(plan, rng):
    """Draw as many missing children of every parent as it tolerates."""
    missing = set()
    for rank, coding in enumerate(plan.codings):
        if coding is not None:
            children = rng.permutation(plan.coded_children(rank))
            missing.update(children[: coding.code.stragglers].tolist())
    return missing


def paper_parents(size, n):
    """Return the parents of ranks in breadth-first order, ``parent(r) = (r−1)//n``."""
    return [-1, *((rank - 1) // n for rank in range(1, size))]
