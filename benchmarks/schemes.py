"""The schemes that `benchmarks/training.py` compares: codes on the engine, and common
uncoded methods.
"""

import contextlib
import dataclasses
import time
import warnings

import numpy as np

import jaxcoded
from jaxcoded.plan.costs import longest_first

PATIENCE = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Scheme:
    """A method to sum the gradients of the ranks.

    Attributes:
        label: name in tables and pictures.
        fanout: children of a parent; 0 for a star.
        fanout, code, stragglers, slices: arguments of the plan, see `jaxcoded.Coded`.
        work: the layout of the work, instead of these arguments.
        survives: whether it continues after one rank has died.
        exact: whether its sums are over all examples.
        without: its transport if it does not use the engine: ``"ring"`` or
            ``"mpi4jax"``.
        in_jit: whether a compiled program computes gradients even if it need not.
        check: see `jaxcoded.Options`.
        known: whether ranks know the cost of each example, and divide the batch
            accordingly.
        balanced: whether loads are in proportion to the last step's speeds.
    """

    label: str
    fanout: int = 0
    code: str = "auto"
    stragglers: int = 1
    slices: int = 1
    survives: bool = True
    exact: bool = True
    without: str = ""
    work: jaxcoded.Shared | jaxcoded.Uncoded | None = None
    in_jit: bool = False
    check: jaxcoded.Check | None = None
    known: bool = False
    balanced: bool = False

    def plan(self, size):
        """Return the plan for ``size`` ranks, including the root without data."""
        return jaxcoded.make_plan(
            size,
            self.work
            or jaxcoded.Coded(
                fanout=self.fanout or size - 1,
                code=self.code,
                stragglers=self.stragglers,
                slices=self.slices,
                root_computes=False,
            ),
        )


SCHEMES = {
    "naive": Scheme("naive (star)", stragglers=0, survives=False),
    "tree": Scheme("uncoded tree", fanout=3, stragglers=0, survives=False),
    "ring": Scheme("ring", stragglers=0, survives=False, without="ring"),
    "allreduce": Scheme(
        "mpi4jax.allreduce", stragglers=0, survives=False, without="mpi4jax"
    ),
    "ignore": Scheme("ignore stragglers", code="ignore_stragglers", exact=False),
    "frc": Scheme("GC, fractional repetition", code="fractional_repetition"),
    "crc": Scheme("GC, cyclic repetition", code="cyclic_repetition"),
    "partial": Scheme(
        "GC, partial stragglers",
        code="partial_stragglers(late=1, slowdown=4)",
        stragglers=0,
        survives=False,
    ),
    "ye_abbe": Scheme("Ye–Abbe, 2 slices", code="random_generator", slices=2),
    "kadhe": Scheme("Kadhe et al., 2 slices", code="gaussian_mds", slices=2),
    "coded_reduce": Scheme("CodedReduce", fanout=3),
    "coded_reduce_slices": Scheme("CodedReduce, 2 slices", fanout=6, slices=2),
}


@contextlib.contextmanager
def opened(scheme, comm, patience=PATIENCE):
    """Open the collective of a scheme. All ranks must call this.

    Args:
        scheme: a `Scheme`.
        comm: the communicator.
        patience: seconds to wait for ranks when the collective closes.
    """
    if scheme.without:
        yield Uncoded(scheme, comm)
        return
    group = jaxcoded.CodedGroup(
        comm,
        scheme.plan(comm.size),
        transport="engine",
        options=jaxcoded.Options(check=scheme.check),
    )
    if group.plan.encoded or scheme.in_jit:
        yield Compiled(group)
    elif group.plan.strategy.by_blocks:
        yield Shared(group, scheme.known)
    elif scheme.known or scheme.balanced:
        yield (Known if scheme.known else Balanced)(group)
    else:
        yield Coded(group)
    # not after an error: other ranks may not reach this point
    with warnings.catch_warnings():
        if patience < PATIENCE:  # some ranks are dead
            warnings.filterwarnings("ignore", "rank .* closed the group without ranks")
        group.close(patience)


class Uncoded:
    """An uncoded sum: all ranks wait for each other, by blocking messages."""

    group = None

    def __init__(self, scheme, comm):
        self.plan, self._comm = scheme.plan(comm.size), comm
        self._sum = self._ring if scheme.without == "ring" else None

    def prepare(self, problem):
        comm = self._comm
        self._problem = problem
        self._rows, self._weights = share(self.plan, comm.rank, problem.examples)
        if self._sum is None:
            import jax

            reduce = jax.jit(lambda x: jaxcoded.baselines.allreduce(x, comm))
            self._sum = lambda x: np.asarray(reduce(x))

    def __call__(self, theta, pace):
        """Return the sum of the gradients at ``theta``."""
        local = worked(self._problem, theta, self._rows, self._weights, pace)
        return self._sum(local)

    def _ring(self, x):
        """Sum in place by reduce-scatter and all-gather in ``N − 1`` steps each."""
        rank, size = self._comm.rank, self._comm.size
        before, after = (rank - 1) % size, (rank + 1) % size
        parts = np.array_split(x, size)
        received = np.empty_like(parts[0])
        for step in range(size - 1):
            part = parts[(rank - step - 1) % size]
            came = received[: len(part)]
            self._comm.Sendrecv(parts[(rank - step) % size], after, 0, came, before, 0)
            part += came
        for step in range(size - 1):
            part = parts[(rank - step) % size]
            self._comm.Sendrecv(
                parts[(rank - step + 1) % size], after, 0, part, before, 0
            )
        return x


class Coded:
    """Codes without slices and parts on NumPy arrays: the codes' coefficients become weights of examples."""

    def __init__(self, group):
        self.group, self.plan = group, group.plan

    def prepare(self, problem):
        """Prepare this rank's examples. All ranks must call this."""
        self._problem = problem
        self._batch = self.group.batch(problem.examples)
        self._rows, self._weights = share(self.plan, self.group.rank, problem.examples)

    def __call__(self, theta, pace):
        late = self.group.lag() > 0
        if late:
            local = np.zeros(self._problem.features, np.float32)
        else:
            local = worked(self._problem, theta, self._rows, self._weights, pace)
        return jaxcoded.host.allreduce(
            local, self.group, self._batch.weights, out=local, skip=late
        )


class Known:
    """No code: examples are assigned by cost, the most costly first, each to the rank with the least work so far."""

    def __init__(self, group):
        self.group, self.plan = group, group.plan
        self.speeds = np.array(
            [float(group.plan.load_of(r)) for r in range(group.size)]
        )

    def prepare(self, problem):
        self._problem = problem

    def divided(self):
        """Return the examples of each rank."""
        costs = self._problem.costs
        rooms = np.where(self.speeds > 0, len(costs), 0).tolist()
        return longest_first(costs, rooms)

    def __call__(self, theta, pace):
        problem, rank = self._problem, self.group.rank
        rows = self.divided()[rank]
        begun = time.perf_counter()
        vector = np.zeros(problem.features + self.group.size, np.float32)
        weights = np.ones(len(rows), np.float32)
        vector[: problem.features] = worked(problem, theta, rows, weights, pace)
        took = time.perf_counter() - begun
        # so the sum tells all ranks the speed of each rank
        vector[problem.features + rank] = (
            len(rows) / took if len(rows) else self.speeds[rank]
        )
        vector = jaxcoded.host.allreduce(vector, self.group, out=vector)
        self.speeds = self.next(vector[problem.features :].astype(float))
        return vector[: problem.features]

    def next(self, measured):
        """Return the speeds that divide the next batch."""
        return self.speeds


class Balanced(Known):
    """No code: loads are in proportion to the last step's speeds."""

    def divided(self):
        examples = self._problem.examples
        ends = np.cumsum(self.speeds / self.speeds.sum())
        ends = np.rint(ends * examples).astype(int)
        return np.split(np.arange(examples), ends[:-1])

    def next(self, measured):
        # otherwise a slow rank would never get work again
        slowest = 1e-3 * measured.max()
        return np.where(self.speeds > 0, np.maximum(measured, slowest), 0.0)


class Shared:
    """Shared work on NumPy arrays, block by block."""

    def __init__(self, group, known=False):
        self.group, self.plan, self._known = group, group.plan, known

    def prepare(self, problem):
        self._problem = problem

    def __call__(self, theta, pace):
        problem = self._problem
        local = np.zeros(problem.features, np.float32)
        costs = problem.costs if self._known else None
        with self.group.blocks(problem.examples, costs=costs) as blocks:
            for block in blocks:
                rows = block.indices
                weights = np.ones(len(rows), np.float32)
                local += worked(problem, theta, rows, weights, pace)
        return jaxcoded.host.allreduce(local, self.group, out=local)


class Compiled:
    """Codes with slices or parts, and shared work in jit:
    `jaxcoded.coded_value_and_grad` of a loss whose gradient NumPy computes chunk by
    chunk, as in the other schemes.
    """

    def __init__(self, group):
        self.group, self.plan = group, group.plan

    def prepare(self, problem):
        import jax
        import jax.numpy as jnp

        # operands of a callback must be ready when it is called
        jax.config.update("jax_cpu_enable_async_dispatch", False)

        def gradient(theta, rows, weights):
            weights = np.asarray(weights)
            held = weights != 0
            return worked(
                problem,
                np.asarray(theta),
                np.asarray(rows)[held],
                weights[held],
                self._pace,
            )

        @jax.custom_vjp
        def losses(theta, rows):
            return jnp.zeros(rows.shape, jnp.float32)  # only the gradient is used

        def backward(saved, weights):
            theta, indices = saved
            like = jax.ShapeDtypeStruct((problem.features,), jnp.float32)
            out = jax.pure_callback(gradient, like, theta, indices, weights)
            return out, np.zeros(indices.shape, jax.dtypes.float0)

        losses.defvjp(
            lambda theta, rows: (losses(theta, rows), (theta, rows)), backward
        )
        part = self.group.batch(problem.examples)
        step = jax.jit(jaxcoded.coded_value_and_grad(losses, self.group, mean=False))
        self._step = lambda theta: step(theta, part.of(part.indices))[1]

    def __call__(self, theta, pace):
        self._pace = pace
        return np.array(self._step(theta))


def share(plan, rank, examples):
    """Return the examples of a rank without padding, and their weights."""
    indices, weights = plan.strategy.assignment(plan, rank, examples)
    held = weights != 0
    return indices[held], weights[held].astype(np.float32)


def worked(problem, theta, rows, weights, pace):
    """Return the gradient after its modelled time."""
    gradient = problem.gradient(theta, rows, weights)
    pace.work(len(rows))
    return np.ascontiguousarray(gradient, np.float32)
