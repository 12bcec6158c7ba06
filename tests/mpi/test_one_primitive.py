"""All calls use one primitive, whose parameter describes the round. A transport has a
capability, or names the call that needs it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import mpi4jax_only

import jaxcoded
from jaxcoded.transport import primitive
from jaxcoded.transport.round import Round


def rounds(program):
    """Return the rounds of a program and of the functions that it calls, and the names
    of the package's other primitives.
    """
    found, left = [], [program.jaxpr]
    while left:
        for equation in left.pop().eqns:
            if equation.primitive.name.startswith("coded_"):
                found.append((equation.primitive, equation.params))
            for inner in jax.tree.leaves(list(equation.params.values())):
                inner = getattr(inner, "jaxpr", inner)
                left += [inner] if hasattr(inner, "eqns") else []
    assert {kind for kind, _ in found} == {primitive.round_p}
    assert {tuple(params) for _, params in found} == {("round",)}
    return [params["round"] for _, params in found]


def test_a_program_has_rounds_alone(comm, transport):
    kinds = set()
    strategies = [jaxcoded.Coded(stragglers=0)]
    if transport == "engine":
        strategies.append(jaxcoded.Shared(replicas=0))
    for strategy in strategies:
        with jaxcoded.CodedGroup(comm, strategy, transport=transport) as group:

            def step(w, batch, group=group):
                loss = lambda w, x: (w - x) ** 2
                _, grads = jaxcoded.coded_value_and_grad(loss, group)(w, batch)
                handle = jaxcoded.coded_allreduce_start(grads, group, batch.weights)
                return jaxcoded.coded_allreduce_done(handle)

            batch = group.batch(jnp.arange(float(comm.size)))
            part = rounds(jax.make_jaxpr(step)(1.0, batch))
            assert all(type(each) is Round and hash(each) for each in part)
            kinds |= {each.kind for each in part}
    started = {"lag", "done", "take"} if transport == "engine" else set()
    assert kinds == {"round", "start"} | started


@mpi4jax_only
def test_what_a_transport_lacks(comm, transport):
    lacks = 'a group with transport="engine"'
    with jaxcoded.CodedGroup(comm, jaxcoded.Uncoded(), transport=transport) as group:
        for call, needs in (
            (lambda: jaxcoded.host.allreduce(np.ones(3), group), "rounds on numpy"),
            (lambda: group.resync(np.ones(3)), "resync needs"),
            (group.telemetry, "telemetry needs"),
            (lambda: group.on_round(print), "telemetry needs"),
        ):
            with pytest.raises(NotImplementedError, match=rf"{needs}.*{lacks}"):
                call()
        assert group.snapshot(np.ones(3)) and group.statistics() == {}
