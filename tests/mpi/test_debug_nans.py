"""With ``jax_debug_nans`` JAX repeats a step that gives NaN, but not its rounds: the
other ranks would not repeat them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import SIZE, engine_only, redundant
from together import wait_for_all
from uncounted import coded_allreduce, coded_allreduce_start

import jaxcoded

pytestmark = [engine_only, pytest.mark.ranks(4)]
EXAMPLES, BATCH = 60, 12
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3))


@pytest.fixture(params=["code", "shared"])
def own(request, comm, transport):
    code = jaxcoded.Coded(stragglers=int(SIZE > 2))
    shared = jaxcoded.Shared(replicas=int(SIZE > 1), blocks=2)
    strategy = shared if request.param == "shared" else code
    with (
        jax.debug_nans(True),
        jaxcoded.CodedGroup(comm, strategy) as group,
    ):
        yield group


def errors(comm, group, spoils):
    """Return the numbers of an epoch's steps that fail. The gradients of all other steps are right.

    Args:
        spoils: a function of a step's number. The step adds 0 times its value to loss
            and result; an infinite value makes them NaN.
    """

    def losses(w, batch):
        x, bad = batch
        return (x @ w) ** 2 + 0 * bad

    value_and_grad = jaxcoded.coded_value_and_grad(losses, group, mean=False)

    @jax.jit
    def step(w, batch, bad):
        loss, grad = value_and_grad(w, batch)
        return loss + 0 * bad, grad

    epoch, failed = group.epoch(EXAMPLES, BATCH, seed=0), []
    before = group.rounds
    for number, part in enumerate(epoch):
        whole = X[epoch.indices(number)]
        loss, result = spoils(number)
        batch = part.of((X[part.indices], np.full(len(part.indices), loss)))
        wait_for_all(comm)
        try:
            _, grad = step(np.ones(3), batch, result)
        except FloatingPointError as error:
            failed.append(number)
            assert loss or "this rank stops before" in str(error)
        else:
            np.testing.assert_allclose(grad, 2 * (whole @ np.ones(3)) @ whole)
        assert group.rounds == before + number + 1
    return failed


@redundant
def test_nan_of_one_rank(comm, own):
    """This rank's next calls have the same batches as the calls of the other ranks."""
    odd = comm.rank == SIZE - 1
    failed = errors(comm, own, lambda step: (0, np.inf if odd and step == 1 else 0))
    assert failed == [1] * odd


def test_nan_in_the_sum(comm, own):
    """All ranks get an error, and continue."""
    assert errors(comm, own, lambda step: (np.inf if step == 2 else 0, 0)) == [2]


@pytest.mark.parametrize("how", ["effect", "token", "scan", "started"])
def test_any_call(group, how):
    def call(x):
        if how == "token":
            return coded_allreduce(x, group, token=jnp.int32(0)).value
        if how == "scan":
            summed = lambda carry, _: (coded_allreduce(carry, group), None)
            return jax.lax.scan(summed, x, length=2)[0]
        if how == "started":
            handle = coded_allreduce_start(x, group)
            return jaxcoded.coded_allreduce_done(handle)
        return coded_allreduce(x, group)

    before = group.rounds
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="stops before"):
        jax.jit(lambda x: call(x) + 0 * x / 0)(jnp.zeros(3))
    assert group.rounds == before + 1 + (how == "scan")
