import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self, overload

import jax
import numpy as np
from mpi4py import MPI

from jaxcoded import _jax_compat, _require
from jaxcoded._warn import warn
from jaxcoded.group import snapshots
from jaxcoded.group.batch import Batch, number_of_examples
from jaxcoded.group.blocks import Blocks
from jaxcoded.group.epoch import Epoch
from jaxcoded.group.membership import new_rank
from jaxcoded.group.membership.membership import Membership
from jaxcoded.group.membership.started import check_joined
from jaxcoded.group.opening import planned
from jaxcoded.group.record import Path, Record
from jaxcoded.group.session import Session
from jaxcoded.group.telemetry import RoundSeen, Telemetry, report
from jaxcoded.plan import Plan, Strategy
from jaxcoded.plan.costs import checked
from jaxcoded.transport import primitive, registry, tokens
from jaxcoded.transport.check import DEBUG
from jaxcoded.transport.engine import Engine
from jaxcoded.transport.options import Options
from jaxcoded.transport.result import Result


class CodedGroup:
    """The ranks of a communicator with a plan. Every collective of this library works on a group.

    Collective: all ranks of ``comm`` make the group with the same arguments, and call its collectives in one order.
    The group works on a duplicate of ``comm``, so its messages never mix with other
    messages. Two groups are never equal, and never share a compiled function.

    No round is decided without the root, which is rank 0 unless the plan has another root. `recovered` explains
    what to do if the root dies.

    `replan`, `recovered` and `extended` close this group and return its successor: use the `rank`, `size` and
    `epoch` of the successor, and compile the step with it. A ``with`` block of this group closes the successor.

    Args:
        comm: an mpi4py intra-communicator.
        strategy: how the work of a step is divided: `Shared`, `Coded` or `Uncoded`; or a
            `Plan` for as many ranks as ``comm`` has. Default: ``Shared()``, which fits any
            number of ranks.
        transport: ``"engine"``, which does not wait for stragglers; ``"mpi4jax"``, in which every rank takes part
            in every round; or ``"auto"``, which selects the engine if all ranks have
            it, and otherwise mpi4jax with a warning. Shared work needs the engine.
        options: how the group runs its rounds: deadlines, memory, telemetry and
            checks; see `Options`.
        record: with shared work, a file in which the root records which blocks each rank computed in each round,
            and in which order.
        replay: a file written with ``record`` by a group of the same plan. Each round then divides its work as the
            recorded round did, so sums have the same bits. Rounds then wait for late ranks; see
            ``docs/sharing.md``.

    Raises:
        TypeError: ``comm`` is not an intra-communicator, or ``strategy`` is not a strategy or plan.
        ValueError: the strategy does not fit the number of ranks; ``transport="engine"`` cannot be used; or a
            ``check`` is given without the engine, without any redundancy, or
            with ``on_deadline="approximate"``. Raised on every rank.
        GroupMismatch: ranks gave different arguments, or run different builds of jaxcoded.
            Raised on every rank; the message names these ranks.

    Example:
        >>> from mpi4py import MPI
        >>> import jaxcoded
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     group.rank, group.size, group.batch(4).indices.tolist()
        (0, 1, [0, 1, 2, 3])
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        strategy: Strategy | Plan | None = None,
        *,
        transport: str = "auto",
        options: Options | None = None,
        record: Path | None = None,
        replay: Path | None = None,
    ) -> None:
        check_joined()
        asked = {"strategy": strategy}
        planner = functools.partial(planned, strategy)
        files = Record(record, replay)
        self._begin(
            Session.opened(comm, transport, options, asked, planner, record=files)
        )

    @classmethod
    def auto(
        cls,
        comm: MPI.Intracomm,
        *,
        payload: float,
        work: Callable[[float], Any] | float,
        seed: int = 0,
        replicas: int | None = None,
        reading: float = 0.0,
        transport: str = "auto",
        options: Options | None = None,
    ) -> "CodedGroup":
        """Measure links and ranks, simulate steps, and return a group with the fastest
        strategy and piece size. Collective; takes some seconds (``docs/planning.md``).

        The group may be uncoded. `planned` gives the reason for the choice.

        Args:
            comm: as for the constructor.
            payload: number of bytes that a step sums.
            work: a function ``work(part)`` that computes what a rank would compute for a
                fraction ``part`` of the batch. `auto` calls ``work(1/(N−1))`` once, and
                then repeatedly for about a second. Or a number: the seconds that a
                typical rank would take to compute the whole batch alone, as in
                ``jaxcoded plan --compute``. Then `auto` times a loop of its own to
                measure how much ranks differ.
            seed: the seed of random codes.
            replicas: how many other ranks may hold each rank's part of the batch, to share
                the work (``docs/sharing.md``). Pass 0 for a program that cannot share
                work, such as a program with plain sums only. Default: all other ranks.
            reading: seconds that a rank would take to read the data of the whole batch.
                Give it if ranks read their examples again in every step.
            transport, options: as for the constructor, without ``piece_bytes``.

        Raises:
            ValueError: an argument is invalid, or rank 0 could not make a plan. Raised on
                every rank.
            RuntimeError: ``work`` failed on a rank. Raised on every rank.
            TypeError, GroupMismatch: as for the constructor.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> with jaxcoded.CodedGroup.auto(MPI.COMM_SELF, payload=4e6, work=0.5) as group:
            ...     group.planned
            'one rank: nothing to plan'
        """

        # Import the planner here, since other groups do not need it.
        from jaxcoded.tools.planner.automatic import Automatic

        check_joined()
        plans = Automatic(payload, work, seed, replicas, reading)
        first = functools.partial(plans.first, options)
        group = cls.__new__(cls)
        group._begin(
            Session.opened(comm, transport, options, plans.request, first, plans.choose)
        )
        return group

    def _begin(self, session: Session) -> None:
        self._session = session
        self._membership = Membership(session)
        self._snapshots = 0
        self._successor: CodedGroup | None = None
        self._callback: Callable[[RoundSeen], Any] | None = None
        # Give the warnings last: if warnings are errors, the other ranks still have the
        # group.
        for warning in session.warnings:
            if session.rank == 0:
                warn(warning, RuntimeWarning)

    @classmethod
    def _of(cls, session: Session) -> Self:
        group = cls.__new__(cls)
        group._begin(session)
        return group

    @property
    def plan(self) -> Plan:
        """The plan, made by the strategy."""
        return self._session.plan

    @property
    def options(self) -> Options:
        """How the group runs its rounds."""
        return self._session.options

    @property
    def planned(self) -> str:
        """A text that says what `CodedGroup.auto` chose and why; empty for other groups."""
        return self._session.planned

    @property
    def alike(self) -> bool:
        """Whether all ranks have received the same sums, including the sums of the group that `recovered` replaced.
        False if some ranks lack a sum, or if ranks have joined (`extended`). While it is false, sums raise an
        error; one `tree_bcast` that sends the root's whole state makes it true. The root of a recovered group is
        one of the ranks with the most results."""
        return self._session.alike

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._session.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.plan.size

    @property
    def comm(self) -> MPI.Intracomm:
        """The group's own duplicate of the communicator from which it was made."""
        return self._session.comm

    @property
    def approximate(self) -> bool:
        """Whether sums may be approximate, because of the code or after a deadline."""
        return self.plan.approximate or self.options.waits.approximates

    @property
    def rounds(self) -> int:
        """The number of rounds that this rank has called in this group."""
        check_open(self)
        return self._session.transport.rounds()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    def batch(self, data: Any, *, multiple: int = 1) -> Batch:
        """Return this rank's part of one fixed batch.

        Args:
            data: the examples of the batch, as for `epoch`.
            multiple: as for `epoch`.

        Raises:
            TypeError, ValueError: as `epoch`.

        Example:
            >>> import numpy as np, jaxcoded
            >>> from mpi4py import MPI
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
            ...     batch = group.batch((np.arange(3.0), np.ones(3)))
            >>> batch.data[0].tolist(), batch.weights.tolist()
            ([0.0, 1.0, 2.0], [1.0, 1.0, 1.0])
        """
        check_open(self)
        with self._session.failing("batch"):
            n = number_of_examples(data)
            return Epoch(*(self.plan, self.rank, data, n), multiple=multiple)[0]

    def epoch(
        self,
        data: Any,
        batch_size: int,
        *,
        seed: int | None = None,
        epoch: int = 0,
        drop_last: bool = False,
        multiple: int = 1,
        costs: Any = None,
    ) -> Epoch:
        """Return the minibatches of one pass over a data set, each with the examples that this rank reads.

            for batch in group.epoch((x, y), batch_size=256, seed=0, epoch=epoch):
                params, loss = step(params, batch)

        With your own loader, pass the number of examples, and load the examples at the given indices:

            for part in group.epoch(len(dataset), batch_size=256, seed=0, epoch=epoch):
                batch = part.of(load(part.indices))

        All batches have the same shapes, even a smaller last batch, so nothing is
        compiled again. Padding has weight 0. `coded_value_and_grad` divides a mean by
        ``batch.weights.examples``, the number of examples.

        The batches depend only on the number of examples, ``seed`` and ``epoch``, and not on the number of ranks or
        the plan. Without ``costs``, the order within a batch does not depend on ranks or plan either. So a
        checkpoint needs only the number of finished batches. After `replan` or `recovered` the new group's epoch
        continues at the next batch:

            epoch = group.epoch((x, y), batch_size=256, seed=0, epoch=3)
            for number in range(done, len(epoch)):
                batch = epoch[number]

        ``epoch.indices(number)`` returns the places of all examples of a batch in the data set, for use with
        `blocks`. See ``docs/data.md``.

        Arguments and data must be the same on all ranks. `coded_value_and_grad` raises
        ``GroupMismatch`` if ``batch_size`` differs, and ``InconsistentMessages`` for batches of another seed, epoch,
        number of examples, or data set. It compares three examples of the data.

        Args:
            data: pytree of NumPy arrays, JAX arrays or memory maps, whose first axis has all examples of the
                data set; or the number of examples.
            batch_size: the number of examples in a global batch.
            seed: the seed with which examples are shuffled. ``None`` keeps the order of the examples, for
                example for an evaluation.
            epoch: the number of this pass; each pass has a different order.
            drop_last: whether to leave out a smaller last batch.
            multiple: the number of examples that a rank reads is padded to a multiple of this number, such as
                the number of devices over which the rank splits a batch (``docs/devices.md``).
            costs: the cost of each example: finite numbers ≥ 0 with shape ``(examples,)``, such as seconds or
                lengths; only ratios count. The examples of a batch are then ordered so that the parts of all ranks,
                and their blocks, cost about the same. Each rank still gets as many examples as without ``costs``.
                Default: all examples cost the same.

        Returns:
            An `Epoch`: a sequence that reads each `Batch` on request. It keeps the order of the ``n`` examples in ``8
            n`` bytes. A rank's batches all have the same length ≥ 1. This length is the same on all ranks, unless the
            strategy has ``speeds``. Padding repeats one of the rank's own examples with weight 0, or the batch's first
            example on a rank without data.

        Raises:
            TypeError: a leaf of ``data`` is not an array, or ``costs`` are not numbers.
            ValueError: a leaf has no axis of examples, or leaves have different numbers of examples; ``costs``
                have a wrong shape, or are negative or not finite; another argument is not an integer as
                described; ``drop_last`` leaves no batch; or ``multiple`` is given with slices, parts or shared
                work.

        Example:
            >>> import numpy as np, jaxcoded
            >>> from mpi4py import MPI
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
            ...     epoch = group.epoch(10 * np.arange(5), batch_size=3)
            >>> for batch in epoch:
            ...     batch.data.tolist(), batch.weights.tolist(), int(batch.weights.examples)
            ([0, 10, 20], [1.0, 1.0, 1.0], 3)
            ([30, 40, 30], [1.0, 1.0, 0.0], 2)
            >>> plan = jaxcoded.make_plan(2, jaxcoded.Uncoded())
            >>> jaxcoded.group.epoch.Epoch(plan, 0, 4, 4, costs=[1, 1, 8, 8])[0].indices.tolist()
            [0, 2]
        """
        check_open(self)
        with self._session.failing("epoch"):
            return Epoch(
                *(self.plan, self.rank, data, batch_size),
                seed=seed,
                epoch=epoch,
                drop_last=drop_last,
                multiple=multiple,
                costs=costs,
            )

    def blocks(self, batch_size: int, *, costs: Any = None) -> Blocks:
        """Return the blocks of a batch that this rank computes, for programs that add up gradients over
        microbatches. The group must share its work (`Shared`).

        A rank that has finished gets blocks of a late rank. Once all blocks are computed, the loop ends on all
        ranks, and the next collective adds up the ranks' totals:

            with group.blocks(batch_size) as blocks:
                for block in blocks:
                    total = add(total, gradient(params, load(block.indices)))
            total = jaxcoded.coded_allreduce(total, group, divisor=batch_size)

        A rank that gets no block contributes zeros, with the shapes and dtypes of the other ranks' totals. If a rank
        raises an exception in the loop or leaves it early, the other ranks learn this in their next call, and compute
        the rank's blocks. If a rank dies after the loop and before its total is fetched, the round fails on all
        ranks: repeat the step. Before the loop asks for the next block, it waits for JAX's pending work, so that
        ranks are timed correctly. After `Block.done` it waits only for the arrays given to `done`.

        Args:
            batch_size: the number of examples in the global batch, the same on all ranks.
            costs: the cost of each example: finite numbers ≥ 0 with shape ``(batch_size,)``, the same on all ranks, in
                a NumPy array or an object with the buffer protocol or DLPack. Only
                ratios count. Each rank then begins with its part of the total cost
                instead of its part of the examples. This part is cut into blocks of
                about the same cost (``docs/sharing.md``). Default: all examples cost the same.

        Raises:
            TypeError: ``costs`` are not numbers.
            ValueError: ``batch_size < 1`` or ``≥ 2**63``; ``costs`` have another shape,
                or a cost is negative or not finite; or the group does not share its
                work.
            GroupMismatch: ranks gave different costs or batch sizes. The loop raises it on every rank.

        Example:
            >>> import numpy as np, jaxcoded
            >>> from mpi4py import MPI
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Shared(blocks=2)) as group:
            ...     total = np.zeros(1)
            ...     with group.blocks(5) as blocks:
            ...         for block in blocks:
            ...             total += block.indices.sum()
            ...     jaxcoded.host.allreduce(total, group)
            array([10.])

            Sequences whose cost is their length:

            >>> sequences = [np.ones(8), np.ones(2), np.ones(3), np.ones(2)]
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Shared(blocks=2)) as group:
            ...     total = np.zeros(1)
            ...     with group.blocks(4, costs=[len(each) for each in sequences]) as blocks:
            ...         for block in blocks:
            ...             total += sum(sequences[i].sum() for i in block.indices)
            ...     jaxcoded.host.allreduce(total, group)
            array([15.])
        """
        check_open(self)
        self._session.check_alike()
        with self._session.failing("blocks"):
            most = int(np.iinfo(np.int64).max)  # indices are int64
            batch_size = _require.integer("batch_size", batch_size, 1, most)
            self.plan.strategy.require_blocks("blocks")
            if self.options.check not in (False, DEBUG):
                raise ValueError(
                    f"check={self.options.check} sees only what coded_value_and_grad computes, not what a program adds "
                    "up itself: leave check out, or use coded_value_and_grad"
                )
            if costs is not None:
                costs = checked(costs, batch_size)
        return Blocks(self._session, batch_size, costs)

    @overload
    def lag(self, *, token: None = None) -> int | jax.Array: ...

    @overload
    def lag(self, *, token: jax.Array) -> Result: ...

    def lag(self, *, token: jax.Array | None = None) -> int | jax.Array | Result:
        """Return the number of decided rounds of this group that this rank has not called yet, as far as this rank
        knows.

        While this number is above 0, the next collective returns an existing result and drops this
        rank's contribution. So the rank need not compute its gradient: `coded_value_and_grad` skips it.
        The number is 0 on a rank in time, and always 0 with the mpi4jax transport.

        Outside ``jit`` this call waits for this rank's own rounds in flight. If your calls are ordered by a token,
        pass the token to wait for them, too. If you compute the gradient yourself and leave it out, pass
        ``skip=True`` to `jaxcoded.coded_allreduce`. Without ``skip``, zeros would count as a contribution if the
        round is not decided yet.

        Args:
            token: the token that orders this call; see `jaxcoded.coded_allreduce`.

        Returns:
            A Python integer; inside ``jit`` an int32 scalar, read in the order of the
            collectives. With a ``token``, inside and outside ``jit``, a `Result` with
            an int32 scalar and the token for the next call.

        Raises:
            TypeError: ``token`` is not an int32 or float32 number.
        """
        check_open(self)
        if token is not None:
            lag, token = primitive.lag(self._session.transport, tokens.checked(token))
            return Result(lag, token=token)
        if _jax_compat.tracing():
            return primitive.lag(self._session.transport, None)[0]
        primitive.effects_barrier()
        return self._session.transport.host_lag()

    def snapshot(self, state: Any, *, every: int = 16) -> bool:
        """Keep a copy of this rank's state, from which a rank that is too late can continue; see
        `resync`.

        Call it on every rank after each step, with the state that the step returned: parameters, optimizer state,
        step number, position of the sampler. It waits for this rank's own steps only. A late rank can use the copy
        as long as the history has the results of all later rounds. So ``every`` steps must have fewer rounds than
        the history keeps (64 or more).

        Args:
            state: pytree of arrays, equal on all ranks.
            every: number of calls between two copies (≥ 1).

        Returns:
            True if this call made a copy.

        Raises:
            ValueError: ``every`` is not an integer ≥ 1.
            CodedError: this rank lacks the new root's state, see `alike`; or a round that
                this rank has started is not done.
            TypeError: a leaf is not an array of numbers or random keys.
        """
        check_open(self)
        self._session.check_alike()
        every = _require.integer("every", every, 1)
        self._snapshots += 1
        if (self._snapshots - 1) % every:
            return False
        # every round that was started before this call belongs to the state
        primitive.effects_barrier()
        snapshots.keep(self._session.transport, self._session.words, state)
        return True

    def resync(self, like: Any, *, timeout: float = 60.0) -> Any:
        """Continue from the newest snapshot of the nearest rank above this rank in the
        tree.

        Call this on a rank whose calls raise `Desynchronized`. The rank then repeats
        the collectives that followed the snapshot; their results come from the history.

        Args:
            like: pytree of arrays or ``jax.ShapeDtypeStruct``, of which only the
                structure, shapes and dtypes are used.
            timeout: seconds to wait for an answer, ≥ 0.

        Returns:
            The state, a pytree of arrays.

        Raises:
            CodedError: a round that this rank has started is still in flight after
                ``timeout``.
            Desynchronized: no rank above has a snapshot or answers in time, or the
                group has called `replan` since this rank became too late.
            ValueError: the snapshot's structure, shapes or dtypes differ from those of
                ``like``.
        """
        check_open(self)
        primitive.effects_barrier()
        timeout = _require.not_negative("timeout", timeout)
        return snapshots.newest(
            self._session.transport, self._session.words, like, timeout
        )

    def telemetry(self) -> Telemetry:
        """Return this rank's record of the latest rounds: which ranks were late and by how much, which message decided
        a round, and how long each step took. This call neither waits nor communicates.

        A parent's telemetry covers its own children. The root's telemetry also covers the speeds of all
        ranks (`Telemetry.speeds`).

        Raises:
            NotImplementedError: with the mpi4jax transport, in which all ranks wait for
                the slowest rank.
        """
        check_open(self)
        transport = Engine.of(self._session.transport, "telemetry needs")
        return Telemetry.of(self.rank, self.plan, transport.telemetry())

    def statistics(self) -> dict[str, int]:
        """Return the engine's counts on this rank since the group was made, or an empty dictionary with the
        mpi4jax transport.

        Returns:
            A dictionary of counts. ``compared_rounds``: rounds in which this rank had messages to compare
            (``docs/verify.md``). ``fetched_bytes``: bytes of other ranks' messages and results. ``formed_bytes``:
            bytes of sections (``docs/engine.md``). Two entries are the memory in use
            now, in bytes: ``history_bytes`` for results that late ranks may lack, and
            ``memory_bytes`` in total.
        """
        check_open(self)
        transport = self._session.transport
        return transport.statistics() if isinstance(transport, Engine) else {}

    def on_round(self, callback: Callable[[RoundSeen], Any]) -> None:
        """After each of this rank's rounds, call a function with a
        `jaxcoded.group.telemetry.RoundSeen`, for example to log it.

        The function runs on a separate thread, in the order of the rounds, and delays no round. If more than
        65,536 rounds wait for the function, it misses the oldest. Errors that it raises are logged. A group has only
        one such function: the latest. After the group is closed, the function still gets all remaining rounds. A group returned by
        `replan`, `recovered` or `extended` continues to call the function.
        """
        check_open(self)
        _require.function("callback", callback)
        self._callback = callback
        transport = Engine.of(self._session.transport, "telemetry needs")
        report(transport.reports(), callback)

    def replan(self, speeds: Sequence[float] | np.ndarray) -> "CodedGroup":
        """Return a successor of this group whose data is assigned in proportion to these speeds.

        The call is a round like any other: all ranks call it between the same two rounds, and no rank waits for a
        late rank. Only the root's ``speeds`` count; pass, for example, ``group.telemetry().speeds``.

        Args:
            speeds: relative speed of each rank, positive; see `Coded`.

        Returns:
            A group of the same ranks, with the same tree and options, whose strategy has these
            speeds.

        Raises:
            ValueError: there is no plan for the root's speeds, or the strategy does not accept
                speeds. Raised on every rank; this group stays open.
            TypeError, ValueError: this rank's own ``speeds`` are not numbers, or are not
                one number for each rank. Raised on this rank only; it has not replanned.
            GroupMismatch: other ranks made a different call. By then the root's speeds
                may have reached only some ranks. Until all ranks have replanned, sums
                of ranks with different plans raise this error, too.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF, jaxcoded.Coded())
            >>> group = group.replan(speeds=[1.0])
            >>> group.close()
        """
        check_open(self)
        self._session.check_alike()
        with self._session.failing("replan"):
            try:
                own_speeds = np.array(speeds, np.float64)
            except (TypeError, ValueError):
                raise TypeError(
                    f"speeds must be numbers, one for each rank, got {_require.shown(speeds)}"
                ) from None
            if own_speeds.shape != (self.size,):
                raise ValueError(
                    f"speeds must have shape ({self.size},), one for each rank, got "
                    f"{own_speeds.shape}"
                )
        primitive.effects_barrier()
        agreed = self._session.transport.broadcast("replan", own_speeds)
        other = copy.copy(self)
        other._session = self._membership.session = self._session.replanned(
            self.plan.strategy.with_speeds(agreed.tolist())
        )
        self._successor = other
        return other

    def recovered(
        self,
        *,
        strategy: Strategy | None = None,
        options: Options | None = None,
        timeout: float = 60.0,
        put_out: bool = False,
    ) -> "CodedGroup":
        """Return a successor of this group without the dead ranks. It tolerates as many stragglers as before, and its
        data is divided among the living ranks; see ``docs/recovery.md``.

        All living ranks call `recovered` between the same two rounds. It waits for all living ranks, so call it only
        every few steps. If MPI reports no death, it returns this group, unchanged. Ranks keep their order, except for
        a new root. Parameters and state stay on their ranks.

        Also call it when a step fails because the root has died. Some ranks may then
        have received the sum of the last round, and other ranks an error. In this case
        the new group is not `alike`: sums raise an error until the root has sent its
        state with `tree_bcast`.

        A living rank that does not call `recovered`, because its program hangs or its
        process is stopped, keeps the other ranks waiting. With ``put_out`` its process
        is killed after ``timeout``, and the rank counts as dead. A rank that is only
        slow is killed, too. But no rank is killed while other ranks continue to call
        rounds.

        `recovered` needs Open MPI 5 and ``jaxcoded run --ft``.

        Args:
            strategy: the strategy of the new group, the same on all ranks. Default: this group's strategy, with
                the speeds of the living ranks.
            options: the options of the new group. Default: this group's options.
            timeout: seconds to wait for living ranks that do not call `recovered`.
            put_out: whether to kill (``SIGKILL``) the processes of such ranks after
                ``timeout``. Any rank in the call on the same host and in the same pid
                namespace kills them, if it has permission. If the root takes part,
                the root's value counts.

        Raises:
            ValueError: MPI is not fault-tolerant; the strategy does not fit the new number of ranks; this group's
                strategy fits only its own ranks (``Coded(parents=…)``) and no other strategy is given; or the group has a
                ``record`` or ``replay``. Raised on every rank; this group stays open.
            TypeError: ``strategy`` or ``put_out`` has a wrong type.
            CodedError: a living rank did not call `recovered`, and was not or could not be killed; another rank
                died while the new group was made; or rounds of this group were decided during the call. Raised on
                every rank in the call; this group stays open, and all ranks may call `recovered` again.
        """
        check_open(self)
        return self._followed_by(
            self._membership.recovered(strategy, options, timeout, put_out)
        )

    def extended(
        self,
        ranks: int,
        *,
        strategy: Strategy | None = None,
        options: Options | None = None,
        command: Sequence[str] | None = None,
        timeout: float = 120.0,
    ) -> "CodedGroup":
        """Start processes, and return a successor of this group with these processes as additional ranks; see
        ``docs/recovery.md``.

        Experimental: it relies on the behaviour of one MPI, Open MPI 5.

        All ranks call `extended` between the same two rounds. The group must not have dead ranks, so call
        `recovered` first. The new processes run this program, and get the group from `joining`. They do not have
        the training state. So the new group is not `alike` on any rank, and sums raise an error until a
        `tree_bcast` has sent the root's state:

            group = group.recovered()
            if group.size < size:
                group = group.extended(size - group.size)
            if not group.alike:
                number, params, state = jaxcoded.tree_bcast((number, params, state), group)

        The root stays the root. The other ranks keep their order, and new ranks come after them. Use ``group.comm``
        instead of MPI.COMM_WORLD, which does not change on old ranks, and on a new rank has only the new ranks.

        On several hosts the new ranks run on the host with the fewest ranks of the group. `extended` needs Open MPI 5
        and ``jaxcoded run --ft``. An error leaves this group open; all errors but ``TypeError`` are raised on every
        rank in the call.

        Args:
            ranks: the number of new ranks, ≥ 1.
            strategy, options: as for `recovered`, the same on all old ranks.
            command: the command that starts each new process. Default: the command that
                started the job's first ranks. The command runs in the folder in which
                the rank that starts the processes has imported jaxcoded.
            timeout: seconds to wait for ranks that do not call `extended`, and then for all processes to call
                `joining`. After that, making the group may take half of ``timeout`` or 30 s, whichever is longer.

        Returns:
            A group of all old and new ranks.

        Raises:
            ValueError: an argument is invalid; MPI or its launcher does not survive the death of a rank; the strategy
                does not fit the new number of ranks; this group's strategy fits only its own ranks
                (``Coded(parents=…)``) and no other strategy is given; or the group has a ``record`` or ``replay``.
            TypeError: ``strategy``, ``options`` or ``command`` has a wrong type.
            GroupMismatch: ranks gave different arguments.
            CodedError: some ranks of this group are dead, or did not call `extended`;
                or a new process was late, ended or died, in which case all new
                processes are killed.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
            ...     group.extended(1)
            Traceback (most recent call last):
                ...
            ValueError: extended needs the engine, and an MPI that survives the death of a rank: start the job with ...
        """
        check_open(self)
        return self._followed_by(
            self._membership.extended(ranks, strategy, options, command, timeout)
        )

    def _followed_by(self, session: Session) -> "CodedGroup":
        """Return the group of a session on which all ranks have agreed: this group if it has
        this session."""
        if session is self._session:
            return self
        other = self._successor = self._of(session)
        session.transport.enter()
        if self._callback is not None:
            other.on_round(self._callback)
        # All ranks are in this call and know all results, so the old group can close
        # without waiting.
        self._session.withdraw()
        return other

    @classmethod
    def joining(cls) -> "CodedGroup | None":
        """Return the group that a process started by `extended` joins; None in all other processes. Experimental,
        like `extended`.

        Call it instead of making a group, as early as possible, since the other ranks wait. The group is not `alike`
        yet: take part in the `tree_bcast` that the other ranks call next. The values that `tree_bcast` returns,
            such as the number of the step, tell the program where to continue (``docs/recovery.md``).

        Raises:
            CodedError: the group did not accept this process, or the process has called this before.

        Example:
            >>> import jaxcoded
            >>> jaxcoded.CodedGroup.joining() is None
            True
        """
        session = new_rank.joined()
        return None if session is None else cls._of(session)

    def close(self, timeout: float = 60.0) -> None:
        """Finish pending rounds and free the communicator. Collective. A second call
        does nothing.

        Before `close`, wait for the result of the last call that a token orders. After
        `close`, every collective on this group, compiled or not, raises `GroupClosed`.
        With the engine a rank leaves once the ranks below it have left, so that late
        ranks can still get their results.

        Args:
            timeout: seconds after which the engine leaves even if ranks below have not left. A warning then names
                these ranks.

        Raises:
            ValueError: ``timeout`` is not a number ≥ 0; the group stays open.
            GroupMismatch: other ranks called a collective instead of `close`. The mpi4jax transport raises it on all
                ranks. The engine raises it on ranks that wait for more ranks than their code tolerates.
        """
        timeout = _require.not_negative("timeout", timeout)
        if self.closed:
            return
        primitive.effects_barrier()
        if warning := self._session.close(timeout):
            warn(warning, RuntimeWarning)

    def __enter__(self) -> Self:
        check_open(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        group: CodedGroup = self
        while group._successor is not None:
            group = group._successor
        if error is None:
            group.close()
        elif not group.closed:
            # The other ranks may be in any call, so do not wait for them. Keep the
            # communicator, so that the other ranks' calls on it can fail.
            group._session.withdraw(error)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank}"
        return f"<CodedGroup {self._session.index} of {self.size} ranks, {state}>"


def check_open(group: object) -> None:
    """Raise a TypeError unless ``group`` is a group, and `GroupClosed` if it was closed."""
    if not isinstance(group, CodedGroup):
        raise TypeError(
            f"group must be a jaxcoded.CodedGroup, got {_require.kind(group)}"
        )
    registry.find(group._session.index)
