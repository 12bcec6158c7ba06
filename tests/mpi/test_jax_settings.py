"""Programs that enable JAX's checks: promotion of dtypes and ranks, invariants, NaN,
with and without x64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import more
from marks import SIZE, engine_only

import jaxcoded
from jaxcoded import (
    DEBUG,
    Check,
    Coded,
    Options,
    Shared,
    Uncoded,
    coded_allreduce,
    coded_reduce,
    tree_bcast,
)

pytestmark = [engine_only, pytest.mark.ranks(4)]
EXAMPLES, BATCH = 22, 8  # the last batch is smaller
X = np.random.default_rng(0).normal(size=(EXAMPLES, 3))
Y = X @ np.arange(3.0)
STRICT = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
SETTINGS = {
    "x32": {"jax_enable_x64": False},
    "strict": STRICT | {"jax_enable_x64": False},
    "strict-x64": STRICT | {"jax_enable_x64": True},
    "checks": {
        "jax_enable_x64": False,
        "jax_enable_checks": True,
        "jax_debug_nans": True,
        "jax_debug_infs": True,
    },
}
GROUPS = {
    "code": (Coded(), None),
    "debug": (Coded(), Options(check=DEBUG)),
    "verify": (Coded(), Options(check=Check("raise", wait=True))),
    "slices": (Coded(slices=2), None),
    "adaptive": (Coded(code="adaptive"), None),
    "progressive": (Coded(code="progressive"), None),
    "shared": (Shared(blocks=3), None),
    "shared-debug": (Shared(blocks=3), Options(check=DEBUG)),
}


# "strict" has the settings of "x32" and more
@pytest.fixture(params=[more("x32"), *list(SETTINGS)[1:]], autouse=True)
def settings(request, transport):
    before = {name: getattr(jax.config, name) for name in SETTINGS[request.param]}
    for name, value in SETTINGS[request.param].items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def floating():
    return np.dtype(np.float64 if jax.config.jax_enable_x64 else np.float32)


def losses(w, batch):
    x, y = batch
    return jnp.square(x @ w - y), jnp.sum(x)


# all groups run with the strictest settings, and these groups with the other settings
FEW = ("code", "verify", "shared")


@pytest.mark.skipif(SIZE < 4, reason="no redundancy")
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (name, kind)
        if name == "strict-x64" or (name != "x32" and kind in FEW)
        else more(name, kind)
        for name in SETTINGS
        for kind in GROUPS
    ],
    indirect=["settings"],
)
def test_training(comm, floating, kind):
    strategy, options = GROUPS[kind]
    with jaxcoded.CodedGroup(comm, strategy, options=options) as group:
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, group, has_aux=True))
        w = jnp.ones(3, floating)
        data = X.astype(floating), Y.astype(floating)
        epoch = group.epoch(data, BATCH, seed=0)
        for number, batch in enumerate(epoch):
            (value, _), grad = step(w, batch)
            whole = epoch.indices(number)
            off = X[whole] @ np.ones(3) - Y[whole]
            np.testing.assert_allclose(value, (off**2).mean(), rtol=1e-4)
            wanted = 2 * off @ X[whole] / len(whole)
            np.testing.assert_allclose(grad, wanted, rtol=1e-3, atol=1e-4)
            assert grad.dtype == floating


def test_other_collectives(comm, floating):
    """The other collectives work in a group whose weights are all 1."""
    with jaxcoded.CodedGroup(comm, Uncoded()) as group:
        mine = np.arange(3, dtype=floating) + comm.rank
        total = np.sum([np.arange(3) + rank for rank in range(SIZE)], axis=0)

        def every(x, token):
            out = coded_allreduce(
                {"a": x, "b": jnp.ones((), jnp.bfloat16)},
                group,
                divisor=SIZE,
                residual=True,
                token=token,
                skip=False,
                erasures=np.zeros(SIZE, bool),
            )
            begun = jaxcoded.coded_allreduce_start(
                [x, x], group, token=out.token, bucket_bytes=8
            )
            started = jaxcoded.coded_allreduce_done(begun.value, token=begun.token)
            reduced = coded_reduce(x, group, token=started.token)
            told = tree_bcast((x, 3), group, token=reduced.token)
            return out.value, out.residual, started.value, reduced.value, told.value

        means, residual, started, reduced, (received, step) = jax.jit(every)(
            mine, jnp.int32(0)
        )
        np.testing.assert_allclose(means["a"], total / SIZE, rtol=1e-6)
        assert (float(means["b"]), step) == (1, 3) and abs(float(residual)) < 1e-6
        np.testing.assert_allclose(started, [total, total], rtol=1e-6)
        if comm.rank == group.plan.root:
            np.testing.assert_allclose(reduced, total, rtol=1e-6)
        assert received.tolist() == [0, 1, 2]
        wide = jax.vmap(lambda x: coded_allreduce(x, group, wire_dtype="bfloat16"))
        np.testing.assert_allclose(wide(mine[None])[0], total, rtol=0.05)
        transform = optax.chain(
            jaxcoded.optax.sum_gradients(group, divisor=SIZE), optax.sgd(1.0)
        )
        updates, _ = transform.update(mine, transform.init(mine))
        np.testing.assert_allclose(updates, -total / SIZE, rtol=1e-6)
        np.testing.assert_allclose(
            jaxcoded.host.allreduce(mine, group, skip=False), total, rtol=1e-6
        )
        state = {"key": jax.random.key(comm.rank), "step": 5_000_000_000 + comm.rank}
        state = tree_bcast(state, group)
        assert int(state["step"]) == 5_000_000_000
        assert jax.random.key_data(state["key"]).tolist() == [0, 0]
