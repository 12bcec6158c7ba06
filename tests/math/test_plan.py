import copy
import dataclasses
import functools
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from cases import more
from hypothesis import given
from hypothesis import strategies as st
from independent import bounded, paper_parents, solvable

from jaxcoded import Coded, Plan, Shared, Uncoded, make_plan
from jaxcoded.plan.tree import regular_size

# Computation loads of (n, L)-regular trees for s = 1, 2, …
REGULAR = {
    (3, 2): "4/15 1/2",
    (4, 3): "1/14 27/148 1/3",
    (9, 2): "4/99 1/12 16/117 25/126 4/15 49/144",
    (5, 3): "8/195 27/245 64/305 1/3",
    (12, 2): "1/42 1/20 1/12 25/204 1/6 49/228",
}


# Loads.


@pytest.mark.parametrize(
    ("n", "L", "s", "load"),
    [
        (n, L, s, load)
        for (n, L), row in REGULAR.items()
        for s, load in enumerate(row.split(), 1)
    ],
)
def test_loads_of_regular_trees(n, L, s, load):
    plan = make_plan(regular_size(n, L), Coded(fanout=n, stragglers=s))
    assert plan.parents == tuple(paper_parents(regular_size(n, L), n))
    assert plan.load == Fraction(load)
    assert all(
        plan.tolerance(rank) == s
        for rank in range(plan.size)
        if plan.tree.children[rank]
    )


@pytest.mark.parametrize(
    ("size", "n", "s", "load"),
    [
        (13, 3, 1, "4/15"),
        (8, 3, 1, "4/11"),
        (10, 3, 1, "1/3"),
        (16, 4, 1, "4/19"),
        (23, 4, 2, "6/19"),
    ],
)
def test_loads_of_truncated_trees(size, n, s, load):
    plan = make_plan(size, Coded(stragglers=s, parents=paper_parents(size, n)))
    assert plan.load == Fraction(load)
    for rank, children in enumerate(plan.tree.children):
        assert plan.tolerance(rank) == max(0, min(s, len(children) - 1))


@pytest.mark.parametrize(
    ("n", "L", "s", "m"), [(4, 2, 1, 2), (5, 2, 1, 2), (4, 1, 1, 3), (3, 2, 0, 2)]
)
def test_loads_and_messages_with_slices(n, L, s, m):
    plan = make_plan(regular_size(n, L), Coded(fanout=n, stragglers=s, slices=m))
    assert plan.load == 1 / sum(
        Fraction(n, s + m) ** layer for layer in range(1, L + 1)
    )
    assert plan.slices_above == tuple(m**layer for layer in plan.tree.layers)


@pytest.mark.parametrize(
    ("n", "L", "s", "m"), [(3, 2, 1, 1), (4, 2, 1, 2), (4, 3, 3, 1)]
)
def test_a_root_with_data_adds_one_to_the_capacity(n, L, s, m):
    plan = make_plan(
        regular_size(n, L), Coded(fanout=n, stragglers=s, slices=m, root_computes=True)
    )
    assert plan.load == 1 / sum(Fraction(n, s + m) ** layer for layer in range(L + 1))


@st.composite
def any_tree(draw):
    """Draw explicit parents of any shape with any root, and the tolerance that the
    largest parent can keep.
    """
    size = draw(st.integers(2, 25))
    parents = [
        -1,
        *(draw(st.integers(max(0, rank - 6), rank - 1)) for rank in range(1, size)),
    ]
    names = draw(st.permutations(range(size)))
    renamed = [-1] * size
    for rank, parent in enumerate(parents[1:], 1):
        renamed[names[rank]] = names[parent]
    most = max(parents.count(rank) for rank in range(size))
    slices = draw(st.integers(1, min(2, most)))
    stragglers = draw(st.integers(0, min(2, most - slices)))
    return {
        "size": size,
        "parents": renamed,
        "stragglers": stragglers,
        "slices": slices,
    }


@bounded
@given(any_tree(), st.booleans())
def test_capacities_of_any_tree(tree, root_computes):
    plan = make_plan(tree.pop("size"), Coded(root_computes=root_computes, **tree))
    capacity = [Fraction(0)] * plan.size
    for rank in reversed(plan.tree.order):
        own = 1 if rank != plan.root or root_computes else 0
        children = plan.tree.children[rank]
        capacity[rank] = Fraction(own)
        if children:
            coded = plan.capacities[rank] - own
            m = min(tree["slices"], len(children))
            s = min(tree["stragglers"], len(children) - m)
            assert (plan.tolerance(rank), plan.codings[rank].code.m) == (s, m)
            assert (
                sum(min(capacity[child], coded) for child in children)
                == (s + m) * coded
            )
            capacity[rank] += coded
    assert plan.load == 1 / capacity[plan.root]
    assert all(part <= capacity[rank] for rank, part in enumerate(plan.assigned))


@bounded
@given(st.integers(0, 3), st.integers(2, 120))
def test_any_number_of_ranks_from_two_more_than_the_stragglers(s, more):
    plan = make_plan(s + more, Coded(stragglers=s))
    assert plan.size == s + more
    assert plan.tolerance(plan.root) == s


def test_one_rank_computes_everything():
    plan = make_plan(1, Coded())
    assert (plan.load, plan.root, plan.tree.depth, plan.tolerance(0)) == (1, 0, 0, 0)
    assert plan.speed(0) == 1 and plan.amplification == 1


def test_two_ranks():
    plan = make_plan(2, Coded(stragglers=0))
    assert (plan.load, plan.speed(0), plan.speed(1)) == (1, 0, 1)
    assert make_plan(2, Uncoded()).load == Fraction(1, 2)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (65, {"fanout": 64}),
        (257, {"fanout": 256}),
        (50, {"fanout": 49}),
        more(256, {"fanout": 255}),
        (400, {"fanout": 1, "stragglers": 0}),
        (2000, {}),
        (2000, {"stragglers": 3}),
        (500, {"slices": 2}),
    ],
)
def test_large_plans(size, options):
    plan = make_plan(size, Coded(**options))
    assert 0 < plan.load < 1
    assert plan.amplification * np.finfo(float).eps < 1e-3
    assert max(map(len, plan.tree.children)) <= options.get("fanout", 8)


def test_amplifications_multiply_down_the_path():
    plan = make_plan(regular_size(5, 2), Coded(fanout=5))
    kappa = plan.codings[0].code.amplification
    assert kappa > 1
    assert plan.amplification == pytest.approx(kappa**2)
    assert (
        make_plan(regular_size(4, 3), Coded(fanout=4)).amplification == 1
    )  # fractional repetition


# Values.

VARIED = {
    "regular": make_plan(13, Coded(fanout=3)),
    "irregular": make_plan(17, Coded(stragglers=2)),
    "slices": make_plan(9, Coded(stragglers=1, slices=2)),
    "explicit": make_plan(
        6, Coded(parents=[3, 3, 3, -1, 0, 0], root_computes=True, seed=5)
    ),
    "one": make_plan(1, Coded()),
    "numpy": make_plan(
        np.int64(13),
        Coded(fanout=np.int32(3), stragglers=np.int64(1), seed=np.uint8(2)),
    ),
}
each_plan = pytest.mark.parametrize("plan", VARIED.values(), ids=VARIED)


@each_plan
@pytest.mark.parametrize(
    "clone",
    [
        lambda plan: Plan.from_json(plan.to_json()),
        lambda plan: pickle.loads(pickle.dumps(plan)),
        copy.copy,
        copy.deepcopy,
        lambda plan: Plan(plan.parents, plan.strategy),
    ],
    ids=["json", "pickle", "copy", "deepcopy", "fields"],
)
def test_copies_are_equal(plan, clone):
    other = clone(plan)
    assert other == plan and hash(other) == hash(plan)
    assert other.fingerprint == plan.fingerprint
    assert other.codings == plan.codings
    assert other.describe() == plan.describe()


def test_plans_differ_in_every_field():
    plans = {
        make_plan(13, Coded(fanout=3)),
        make_plan(13, Coded(fanout=4)),
        make_plan(13, Coded(fanout=3, stragglers=2)),
        make_plan(13, Coded(fanout=3, slices=2)),
        make_plan(13, Coded(fanout=3, code="cyclic_repetition")),
        make_plan(13, Coded(fanout=3, root_computes=True)),
        make_plan(13, Coded(fanout=3, seed=1)),
    }
    assert len(plans) == len({plan.fingerprint for plan in plans}) == 7
    assert (
        make_plan(13, Coded(fanout=3)) in plans
        and make_plan(13, Coded(fanout=3)) != "a plan"
    )


def test_plans_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_plan(4, Coded()).strategy.stragglers = 0


def test_json_is_plain():
    assert json.loads(
        make_plan(np.int64(3), Coded(parents=np.array([1, 1, 1]))).to_json()
    ) == {
        "format": "jaxcoded.Plan/2",
        "parents": [1, -1, 1],
        "strategy": {"strategy": "Coded", "parents": [1, -1, 1]},
    }


def test_every_process_makes_the_same_plan():
    program = (
        "from jaxcoded import Coded, make_plan\n"
        "print(make_plan(17, Coded(stragglers=2, seed=3)).fingerprint, make_plan(9, Coded(slices=2)).fingerprint)"
    )
    here = [
        make_plan(17, Coded(stragglers=2, seed=3)).fingerprint,
        make_plan(9, Coded(slices=2)).fingerprint,
    ]
    for hash_seed in ("0", "12345"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        assert out.stdout.split() == here


# Ranks that may be missing.


@bounded
@given(st.data())
def test_sets_that_the_root_tolerates_missing(data):
    """Compare with all sets of parents that may be left out in addition to the erased ranks."""
    size = data.draw(st.integers(3, 9))
    parents = [-1, *(data.draw(st.integers(0, rank - 1)) for rank in range(1, size))]
    try:
        plan = make_plan(
            size,
            Coded(
                parents=parents,
                stragglers=data.draw(st.integers(0, 2)),
                slices=data.draw(st.integers(1, 2)),
            ),
        )
    except ValueError:  # no parent has that many children
        return
    inner = {rank for rank in range(size) if plan.coded_children(rank)}

    @functools.cache
    def decodable(rank, answered):
        return solvable(plan.codings[rank].code.B, list(answered))

    def consistent(out):
        """Return whether all other ranks have a sum without the ranks that are left out."""
        return plan.root not in out and all(
            decodable(rank, tuple(c not in out for c in plan.coded_children(rank)))
            for rank in inner - out
        )

    for mask in itertools.product([False, True], repeat=size):
        erased = {rank for rank in range(size) if mask[rank]}
        more = sorted(inner - erased)
        ways = itertools.chain.from_iterable(
            itertools.combinations(more, count) for count in range(len(more) + 1)
        )
        possible = [erased.union(way) for way in ways if consistent(erased.union(way))]
        assert (plan.unrecoverable(mask) == []) == bool(possible)
        if possible:  # no more ranks than necessary are left out
            missing = set(np.flatnonzero(plan.missing(mask)))
            assert missing == set.intersection(*possible)
        else:
            assert plan.unrecoverable(mask)[0] == plan.root


# describe().


def columns(text):
    """Return the table of `describe`, one dict per layer."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    split = [re.split(r"\s{2,}", line) for line in lines[start:]]
    return [dict(zip(split[0], row)) for row in split[1:] if len(row) == len(split[0])]


def test_description_of_a_regular_tree():
    text = make_plan(21, Coded(fanout=4)).describe()
    assert "21 ranks: root 0 (without data) and 20 workers in 2 layers" in text
    assert "load r = 1/6 of the batch" in text
    root, inner, leaves = map(list, map(dict.values, columns(text)))
    frc = "fractional_repetition"
    assert root == ["0", "1", "4", frc, "1", "0.25", "1", "0", "0", "-"]
    assert inner == ["1", "4", "4", frc, "1", "0.25", "1", "1/6", "0", "1"]
    assert leaves == ["2", "16", "-", "-", "-", "-", "-", "1/6", "0", "1"]


def test_description_states_amplification_and_message_sizes():
    plan = make_plan(21, Coded(fanout=4, slices=2))
    text = plan.describe()
    kappa = plan.codings[0].code.amplification
    assert f"amplification kappa = {kappa**2:.3g}" in text
    assert [row["message"] for row in columns(text)] == ["-", "1/2", "1/4"]
    assert [row["kappa"] for row in columns(text)] == [
        f"{kappa:.3g}",
        f"{kappa:.3g}",
        "-",
    ]


def test_description_states_reduced_parents():
    text = make_plan(8, Coded(parents=paper_parents(8, 3))).describe()
    assert (
        "rank 2 has 1 child: its code has s = 0, m = 1 instead of s = 1, m = 1" in text
    )
    assert [row["tolerance"] for row in columns(text)] == ["1", "0 to 1", "-"]
    assert [row["s/n"] for row in columns(text)] == ["0.33", "0.00 to 0.33", "-"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_speeds_as_an_array(dtype):
    speeds = [4, 1, 2, 3]
    plan = make_plan(4, Coded(speeds=np.array(speeds, dtype)))
    assert plan == make_plan(4, Coded(speeds=speeds))
    assert plan.speeds == tuple(Fraction(round(1000 * Fraction(s, 3)), 1000) for s in (3, 1, 2, 3))  # fmt: skip
    assert make_plan(4, Coded(speeds=np.ones(4))) == make_plan(4, Coded())


def test_description_states_unused_capacity():
    plan = make_plan(
        7, Coded(parents=[-1, 0, 0, 1, 1, 1, 1])
    )  # rank 1 could take 3 times as much as rank 2
    root, inner, leaves = columns(plan.describe())
    assert plan.load == 1
    assert (inner["load"], leaves["load"]) == ("1/3 to 1", "1/3")
    assert (root["unused"], inner["unused"], leaves["unused"]) == ("0", "0 to 2", "2/3")


def test_description_of_a_root_with_data_and_of_one_rank():
    assert "root 3 (with data) and 5 workers" in VARIED["explicit"].describe()
    assert (
        "; any 1 of a parent's children may be missing\n"
        in make_plan(4, Coded()).describe()
    )
    uncoded = make_plan(4, Coded(stragglers=0)).describe()
    assert "; none of a parent's children may be missing\n" in uncoded
    assert (
        make_plan(1, Coded()).describe()
        == "1 rank: it computes the whole batch, uncoded"
    )


# Misuse.


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (0, {}, "size must be an integer >= 1, got 0"),
        (-3, {}, "size must be an integer >= 1, got -3"),
        (3.0, {}, "size must be an integer >= 1, got 3.0"),
        (True, {}, "size must be an integer >= 1, got True"),
        ("3", {}, "size must be an integer >= 1, got '3'"),
        (
            2,
            {},
            r"size=2 ranks are too few for Coded.* at least 3 ranks, .* take more ranks, stragglers=0",
        ),
        (
            4,
            {"stragglers": 4},
            r"size=4 ranks are too few for Coded.* at least 6 ranks, .* take more ranks, stragglers=2",
        ),
        (5, {"stragglers": 2, "slices": 3}, "take more ranks, stragglers=1"),
        (3, {"slices": 4}, "take more ranks, stragglers=0 and slices=1"),
        (13, {"stragglers": -1}, "stragglers must be an integer >= 0, got -1"),
        (13, {"stragglers": 1.5}, "stragglers must be an integer >= 0, got 1.5"),
        (13, {"stragglers": True}, "stragglers must be an integer >= 0, got True"),
        (13, {"slices": 0}, "slices must be an integer >= 1, got 0"),
        (13, {"slices": "2"}, "slices must be an integer >= 1, got '2'"),
        (13, {"seed": -1}, "seed must be an integer >= 0, got -1"),
        (13, {"seed": None}, "seed must be an integer >= 0, got None"),
        (
            13,
            {"fanout": 1},
            r"fanout=1 is too small: losing s=1 .* n >= s \+ m = 2; take a larger fan-out",
        ),
        (
            13,
            {"fanout": 3, "stragglers": 3},
            r"fanout=3 is too small: .* n >= s \+ m = 4",
        ),
        (
            13,
            {"fanout": 2, "slices": 2},
            r"fanout=2 is too small: .* with m=2 slices needs n >= s \+ m = 3",
        ),
        (13, {"fanout": 3.0}, "fanout must be an integer >= 1, got 3.0"),
        (13, {"fanout": "3"}, "fanout must be an integer >= 1, got '3'"),
        (
            13,
            {"code": "raptor"},
            "code must be 'auto' or one of uncoded, .*; got 'raptor'$",
        ),
        (
            13,
            {"code": "bernoulli(load=1"},
            r"got 'bernoulli\(load=1': a closing parenthesis is missing$",
        ),
        (13, {"code": "cyclic"}, "'cyclic': did you mean 'cyclic_repetition'\\?$"),
        (13, {"code": ["auto"]}, "code has 1 entries for 2 layers of parents"),
        (
            13,
            {"code": "uncoded"},
            "rank .* children: code='uncoded' tolerates 0 missing .*, not 1: pass stragglers=0",
        ),
        (
            13,
            {"fanout": 3, "code": "fractional_repetition"},
            r"rank 3 with its 3 children: .* to divide n = 3",
        ),
        (
            13,
            {"slices": 2, "code": "cyclic_repetition"},
            "has 1 slice, not 2: pass slices=1 or .* 'random_generator'",
        ),
        (3, {"parents": [-1, 0, 0], "fanout": 2}, "give fanout or parents, not both"),
        (3, {"parents": [-1, 0]}, "parents has 2 entries for size=3 ranks"),
        (
            3,
            {"parents": [-1, 0, 2]},
            r"exactly one root \(parent -1\), got roots \[0, 2\]",
        ),
        (4, {"parents": [-1, 0, 3, 2]}, "parents contain a cycle through rank 2"),
        (
            3,
            {"parents": [-1, 0, 1]},
            "stragglers=1 and slices=1 need a parent with at least 2 children, but no parent",
        ),
        (
            3,
            {"parents": [-1, 0, 0], "stragglers": 2},
            r"no parent has more than 2 \(size=3\): take fewer stragglers",
        ),
    ],
)
def test_misuse(size, options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(size, Coded(**options))


def test_misuse_of_root_computes():
    with pytest.raises(TypeError, match="root_computes must be True or False, got 1"):
        make_plan(13, Coded(root_computes=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a plan written by Plan.to_json"),
        ("[1]", "not a plan written by Plan.to_json"),
        (
            '{"format": "jaxcoded.Plan/2", "seed": 0}',
            "a plan must have the fields .*, got ",
        ),
        (
            make_plan(4, Coded(seed=1)).to_json().replace('"seed": 1', '"seed": 0.5'),
            "seed must be an integer >= 0, got 0.5",
        ),
        (
            make_plan(4, Coded()).to_json().replace("[-1, 0, 0, 0]", "7"),
            "parents|not a plan",
        ),
        (
            make_plan(4, Coded()).to_json().replace("[-1, 0, 0, 0]", "[-1, 0, 0, 9]"),
            "the parent of rank 3 must be an integer",
        ),
        ("nonsense", "not a plan written by"),
    ],
)
def test_text_that_is_no_plan(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def test_the_text_of_shared_work():
    """The text says "1 other" for one replica, and promises nothing without replicas."""
    none, one, two = (
        make_plan(4, Shared(replicas=replicas, blocks=3)).describe()
        for replicas in range(3)
    )
    assert "any 2 ranks but the root may be missing" in two
    assert "any rank but the root may be missing" in one
    assert one.endswith("lies on its owner and 1 other rank")
    assert (
        "no rank may be missing" in none
        and "computes blocks of other ranks" not in none
    )
    assert none.endswith(
        "holds the data of 1/4 of the batch: each block lies on its owner"
    )


def test_shared_work():
    """Every block is on its owner and ``replicas`` other ranks, as evenly as possible."""
    plan = make_plan(5, Shared(replicas=2, blocks=6))
    placed = plan.placement
    assert (plan.strategy.root_computes, plan.tree.depth, plan.load) == (
        True,
        1,
        Fraction(1, 5),
    )
    assert plan == Plan.from_json(plan.to_json())
    for block, ranks in enumerate(placed.holders):
        assert ranks[0] == block // 6
        assert len(set(ranks)) == 3
    for rank in range(5):
        held = placed.held(rank)
        assert len(held) == len(set(held)) == 18
        assert held[:6] == placed.owned(rank) == tuple(range(6 * rank, 6 * rank + 6))
        others = {placed.holders[b][i] for b in held[:6] for i in (1, 2)}
        assert others == set(range(5)) - {rank}
    for batch_size in (1, 29, 30, 31, 1000):
        indices, weights = zip(
            *(plan.strategy.assignment(plan, rank, batch_size) for rank in range(5))
        )
        counted = np.zeros(batch_size)
        for index, theirs in zip(indices, weights):
            np.add.at(counted, index, theirs)
        np.testing.assert_array_equal(counted, 1)
        assert plan.strategy.loads(plan, batch_size).sum() == batch_size


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"replicas": 9}, r"only 4 other ranks can hold .* give replicas=4 or less"),
        ({"blocks": 0}, "blocks must be an integer from 1 to [0-9]+, got 0"),
        ({"replicas": -1}, "replicas must be an integer >= 0, got -1"),
        (
            {"blocks": 1 << 18},
            "all ranks together can have at most 1048576 blocks; give blocks=",
        ),
    ],
)
def test_what_cannot_be_shared(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_plan(5, Shared(**arguments))


def test_shared_work_is_of_a_star():
    with pytest.raises(ValueError, match="needs all workers as children of rank 0"):
        Plan((-1, 0, 1), Shared())


def test_a_description_tells_what_holds():
    """The description states the tolerance of the codes, and the fastest rank's load
    without codes.
    """
    plan = make_plan(8, Coded(fanout=7, stragglers=0, slices=4, code="hamming(r=3)"))
    assert "; any 2 of a parent's children may be missing" in plan.describe()
    plan = make_plan(13, Coded(fanout=12, stragglers=0, speeds=[1] * 7 + [0.5] * 6))
    assert (
        "load r = 1/9 of the batch for the busiest rank (uncoded 1/9)"
        in plan.describe()
    )
