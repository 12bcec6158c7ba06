"""A group: a plan on a communicator."""

import contextlib
import copy
import dataclasses
import hashlib
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import TracebackType
from typing import Any, Self, overload

import jax
import numpy as np
from mpi4py import MPI

from jaxcoded import _jax_compat, _require
from jaxcoded.errors import CodedError, Desynchronized, GroupClosed, use_after_close
from jaxcoded.group import alone, joining, old_ranks, opening, recovery, snapshots
from jaxcoded.group.anew import Anew
from jaxcoded.group.blocks import Blocks
from jaxcoded.group.epoch import Epoch
from jaxcoded.group.extending import Extending
from jaxcoded.group.new_rank import NewRank, joined
from jaxcoded.group.record import Path, Record
from jaxcoded.group.succession import Planner, check_planner, planned, planned_anew
from jaxcoded.group.telemetry import RoundSeen, Telemetry, report
from jaxcoded.group.weights import Weights, assigned
from jaxcoded.plan import Plan, make_plan
from jaxcoded.planner import automatic
from jaxcoded.transport import build, engine, primitive
from jaxcoded.transport.agreement import check_communicator, gathered
from jaxcoded.transport.options import Options


class CodedGroup:
    """The ranks of a communicator with a plan: what every collective of this library
    works on.

    Collective: all ranks of ``comm`` make the group with the same arguments, and call
    its collectives in one order. The group works on a duplicate of ``comm``, so that
    its messages meet no others. Two groups are never equal, and never share a compiled
    function.

    Without the root, rank 0 unless the plan says otherwise, no round is decided: see `recovered`.

    Args:
        comm: an mpi4py intra-communicator.
        stragglers: ``s``, the number of children of every parent that may be missing.
            Default 1.
        fanout: the largest number of children of a parent; see `make_plan`.
        by_host: instead of ``fanout``, a tree that follows hosts; see ``hosts`` of `make_plan`.
        code: kind of gradient code, or one for each layer or parent; see `make_plan`.
        slices: ``m``, messages shrink by this in every layer; see `make_plan`. Default
            1.
        root_computes: whether the root holds data; see `make_plan`.
        transport: ``"engine"``, which goes on without stragglers; ``"mpi4jax"``, in
            which every rank takes part in every round; or ``"auto"``, the engine where all ranks
            have it, and otherwise mpi4jax with a warning.
        seed: of random codes.
        speeds: relative speed of each rank; see `make_plan`.
        options: how the group makes its rounds: deadlines, memory, telemetry, what is
            verified; see `Options`.
        record: where work is shared, a file that rank 0 writes: who has computed which
            blocks of each round, in which order.
        replay: a file written with ``record`` by a group of the same plan. Each round is
            divided as it was then, in numbers of the same bits, and waits for late
            ranks; see ``docs/sharing.md``.

    Raises:
        TypeError: ``comm`` is not an intra-communicator.
        ValueError: no such plan, ``transport="engine"`` where it cannot be used, or
            ``debug=True`` or ``verify`` without the engine, without any redundancy, or
            with ``on_deadline="approximate"``. Raised on every rank.
        GroupMismatch: ranks gave different arguments, or run different builds of jaxcoded.
            Raised on every rank; the message names them.

    Example:
        >>> from mpi4py import MPI
        >>> import jaxcoded
        >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
        ...     group.rank, group.size, group.assignment(4)[0].tolist()
        (0, 1, [0, 1, 2, 3])
    """

    # What its plan was asked for with, by name; none if it was given or chosen.
    _asked: Mapping[str, Any] | None = None
    # Of a group of ranks that do not know the same, made by `recovered` or `extended`: see `recovery.Successors`.
    _ahead: int | None = None
    # Whether the root's state is handed on, if this works. The engine knows whether it has.
    hands_on = False

    def __init__(
        self,
        comm: MPI.Intracomm,
        *,
        stragglers: int = 1,
        fanout: int | None = None,
        by_host: bool = False,
        code: str | Mapping[int, str] | Sequence[str] = "auto",
        slices: int = 1,
        root_computes: bool | None = None,
        seed: int = 0,
        speeds: Sequence[float] | None = None,
        transport: str = "auto",
        options: Options | None = None,
        record: Path | None = None,
        replay: Path | None = None,
    ) -> None:
        request: dict[str, Any] = {
            "stragglers": stragglers,
            "fanout": fanout,
            "by_host": by_host,
            "code": code,
            "slices": slices,
            "root_computes": root_computes,
            "seed": seed,
            "speeds": speeds,
        }
        self._asked = request
        self._open(
            comm,
            transport,
            options,
            request,
            lambda hosts: planned(hosts, **request),
            record=Record(record, replay),
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
        """A group with the tree, the code and the pieces, or with shared work, with which a
        step is expected to be the fastest, from a measurement of links and ranks and from the simulator, which take
        some seconds (``docs/planning.md``). Collective.

        The group may be uncoded then. `planned` says why.

        Args:
            comm: as for the constructor.
            payload: bytes that a step sums.
            work: a function ``work(part)`` that computes what a rank would compute for a
                part of the batch, a number up to 1. It is called for about a second
                after a first call, with ``1/(N−1)`` each time. Or the seconds that a
                usual rank would take for the whole batch on its own, as in ``jaxcoded
                plan --compute``: then a loop measures how much ranks differ.
            seed: of random codes.
            replicas: other ranks that may hold each rank's part of the batch, to share the
                work (``docs/sharing.md``): 0 for a program that cannot, such as one with
                plain sums only. Default all.
            reading: seconds that a rank would take to read the data of the whole batch,
                if it reads what it holds in every step.
            transport, options: as for the constructor, without ``piece_bytes``.

        Raises:
            ValueError: an argument is not as said, or rank 0 could not plan. Raised on
                every rank, as is
            RuntimeError: ``work`` failed on a rank.
            TypeError, GroupMismatch: as for the constructor.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> with jaxcoded.CodedGroup.auto(MPI.COMM_SELF, payload=4e6, work=0.5) as group:
            ...     group.planned
            'one rank: nothing to plan'
        """

        def check(hosts: Sequence[str]) -> Plan:
            pieces = options and options.piece_bytes
            automatic.check(payload, work, pieces, replicas, len(hosts))
            return make_plan(len(hosts), stragglers=0, seed=seed)  # to begin with

        group = cls.__new__(cls)
        how = "a function" if callable(work) else work

        def choose(own: MPI.Intracomm) -> automatic.Choice:
            wanted = (options or Options()).complete()
            missing = "" if transport == "mpi4jax" else engine.missing()
            reasons = gathered(own, missing)
            cannot = opening.why_not_shared(transport, reasons)
            # who compares messages sums by the root
            whole = transport == "mpi4jax" or any(reasons) or wanted.compares
            return automatic.choose(
                *(own, payload, work, seed, replicas, reading, cannot),
                0 if whole else wanted.sections_from,
            )

        group._open(
            comm,
            transport,
            options,
            {
                "plan": "auto",
                "payload": payload,
                "work": how,
                "seed": seed,
                "replicas": replicas,
                "reading": reading,
            },
            check,
            choose,
        )
        return group

    @classmethod
    def from_plan(
        cls,
        comm: MPI.Intracomm,
        plan: Plan,
        *,
        transport: str = "auto",
        options: Options | None = None,
        record: Path | None = None,
        replay: Path | None = None,
    ) -> "CodedGroup":
        """A group with a plan made before, such as one with an explicit tree.
        Collective.

        Args:
            comm: as for the constructor.
            plan: for as many ranks as ``comm`` has.
            transport, options, record, replay: as for the constructor.

        Raises:
            ValueError: the plan is for another number of ranks.
            TypeError: it is not a plan, or ``comm`` not an intra-communicator.
            GroupMismatch: ranks gave different plans. Raised on every rank.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> plan = jaxcoded.make_plan(1)
            >>> with jaxcoded.CodedGroup.from_plan(MPI.COMM_SELF, plan) as group:
            ...     group.plan == plan
            True
        """

        def fitting(hosts: Sequence[str]) -> Plan:
            if not isinstance(plan, Plan):
                raise TypeError(
                    f"plan must be a jaxcoded.Plan, got {_require.kind(plan)}"
                )
            if plan.size != len(hosts):
                raise ValueError(
                    f"the plan is for {plan.size} ranks, but the communicator has {len(hosts)}"
                )
            return plan

        group = cls.__new__(cls)
        group._open(
            *(comm, transport, options, {"plan": plan}, fitting),
            record=Record(record, replay),
        )
        return group

    def _open(
        self,
        comm: MPI.Intracomm,
        transport: str,
        options: Options | None,
        request: dict[str, Any],
        planner: Callable[[Sequence[str]], Plan],
        chooser: Callable[[MPI.Intracomm], automatic.Choice] | None = None,
        record: Record | None = None,
        *,
        takes: bool = False,
    ) -> None:
        """What the constructors have in common; ``takes``: the communicator is this group's own, and all
        are still to agree that they have opened it."""
        check_communicator(comm)
        if not takes and NewRank.waits_to_join():
            raise CodedError(
                "this process was started to join a group: call jaxcoded.CodedGroup.joining() first, and make a group "
                "where it returns None"
            )
        self._comm = comm if takes else opening.communicator_of_its_own(comm)
        given = Options() if options is None else options
        wanted = (given if isinstance(given, Options) else Options()).complete()

        def checked(hosts: Sequence[str]) -> Plan:
            if not isinstance(given, Options):
                raise TypeError(
                    f"options must be jaxcoded.Options, got {_require.kind(given)}"
                )
            wanted.check()
            plan = planner(hosts)
            self._hosts = hosts
            self._record.check(plan, wanted.on_deadline)
            return plan

        self._record = record or Record(None, None)
        request = request | self._record.request
        # what ranks must have in common
        common = (
            "piece_bytes",
            "sections_from",
            "deadline",
            "on_deadline",
            "debug",
            "verify",
            "verify_wait",
        )
        request |= {name: getattr(wanted, name) for name in common}
        self._planned = ""
        try:
            warned = [build.check(self._comm), "" if takes else alone.warning()]
            self.plan = opening.agreed_plan(self._comm, transport, request, checked)
            if chooser is not None:
                choice = chooser(self._comm)
                self.plan, self._planned = choice.plan, choice.words
                wanted = dataclasses.replace(wanted, piece_bytes=choice.piece)
                if choice.sections_from is not None:
                    wanted = dataclasses.replace(
                        wanted, sections_from=choice.sections_from
                    )
            self.index = next(_indices)
            self._record.open(self._comm, self.plan)
            self._roll = recovery.Roll(self._comm, self.plan.root)
            self.transport, self.options, more = opening.agreed_transport(
                *(self._comm, self.index, self.plan),
                *(transport, wanted, given.debug is not None),
            )
        except Exception as error:
            self._record.close()
            if recovery.has_died(error) and engine.fault_tolerant():
                # Others wait in it. It is not freed: see `recovery.Agreement`.
                self._comm.Revoke()
            elif not takes:
                self._comm.Free()
            raise
        if not takes:
            self.transport.enter()
        self._record.follow(self.transport)
        # what a group made anew is asked for with
        self._options = dataclasses.replace(self.options, debug=given.debug)
        self._rank = self._comm.rank
        self._snapshots = 0
        self._successor: CodedGroup | None = None
        # what takes its place, as far as that is made
        self._anew: Anew | None = None
        self._extending: Extending | None = None
        self._changes = threading.Lock()  # of ranks
        self._callback: Callable[[RoundSeen], Any] | None = None
        # what coded calls say of the plan, which a replan may have passed some ranks by
        self.plan_words = ""
        _groups[self.index] = self
        # where warnings are errors, the others have the group
        for said in filter(None, [*warned, *more]):
            if self._comm.rank == 0:
                warnings.warn(said, RuntimeWarning, stacklevel=3)

    @property
    def planned(self) -> str:
        """Of `CodedGroup.auto`: what was chosen and why, in words; otherwise empty."""
        return self._planned

    @property
    def alike(self) -> bool:
        """Whether this rank has had the sums that the others have had, also in the group that this one was
        made of by `recovered`. Otherwise, and where ranks have joined (`extended`), the root is one of those that
        know most, and sums are an error until a `tree_bcast` has handed on what it has, all in one: after the
        first this is true."""
        if self._ahead is None:
            return True
        assert isinstance(self.transport, engine.Engine)
        return self.transport.alike()

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.plan.size

    @property
    def comm(self) -> MPI.Intracomm:
        """The group's own duplicate of the communicator it was made with."""
        return self._comm

    @property
    def approximate(self) -> bool:
        """Whether sums may be approximate: by the code, or after the deadline."""
        return self.plan.approximate or self.options.on_deadline == "approximate"

    @property
    def rounds(self) -> int:
        """Rounds of this group that this rank has called."""
        check_open(self)
        return self.transport.rounds()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.index not in _groups

    def assignment(
        self, batch_size: int, *, multiple: int = 1
    ) -> tuple[np.ndarray, Weights]:
        """What this rank reads of a global batch, and its coding weights.

        Args:
            batch_size: number of examples in the global batch.
            multiple: pad to a length that is a multiple of this, such as the number of devices
                over which this rank splits what it reads (``docs/devices.md``).

        Returns:
            The pair ``(indices, weights)``.

            ``indices`` are int64 ``(length,)`` into the global batch, of one length ≥ 1 on
            all ranks; with ``speeds``, of a length of its own on each. Padding repeats one
            of the rank's own examples (example 0 where it has none) with weight 0.

            ``weights`` is a `Weights`, which computes like an array of JAX's default float
            dtype: ``(length,)`` loss weights, or, with slices or parts, the coefficients
            ``(chunks, length // chunks, P · M)`` for `coded_value_and_grad`; see
            `jaxcoded.plan.assignment.assignment`.

        Raises:
            ValueError: ``batch_size < 1`` or ``multiple < 1``, or a ``multiple`` with slices or
                parts.
        """
        return assigned(self.plan, self.rank, batch_size, multiple)

    def epoch(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int | None,
        epoch: int = 0,
        drop_last: bool = False,
        multiple: int = 1,
    ) -> Epoch:
        """The minibatches of one pass over a data set, with what this rank reads of each.

            for indices, weights in group.epoch(len(x), 256, seed=0, epoch=epoch):
                params, loss = step(params, (x[indices], y[indices]), weights)

        ``indices``, int64, are into the data set, and both are as `assignment` gives them.
        Shapes are the same for every batch, a smaller last one too, so nothing is compiled
        anew: what is not there has weight 0, and ``weights.examples`` says how many examples
        there are. `coded_value_and_grad` divides a mean by that.

        The order follows from ``n``, ``seed`` and ``epoch`` alone, on any number of ranks and
        with any plan. So the number of batches done is all that a checkpoint needs, and
        after `replan` or `recovered` the new group's epoch goes on where this one was:

            epoch = group.epoch(len(x), 256, seed=0, epoch=3)
            for number in range(done, len(epoch)):
                indices, weights = epoch[number]

        ``epoch.batch(number)`` is the whole batch, for `blocks`. See ``docs/data.md``.

        The arguments are the same on all ranks: `coded_value_and_grad` raises
        ``GroupMismatch`` where ``n``, ``batch_size`` or ``seed`` are not.

        Args:
            n: the number of examples in the data set.
            batch_size: of the global batch.
            seed: of the shuffling; ``None``: the examples in their order, as for an
                evaluation. Another seed is compiled anew, another epoch is not.
            epoch: the number of this pass, for another order in each.
            drop_last: leave out a smaller last batch.
            multiple: as for `assignment`.

        Returns:
            An `Epoch`: a sequence of ``(indices, weights)``, which computes each when it is
            asked for. It keeps the order, ``8 n`` bytes.

        Raises:
            ValueError: an argument is not an integer as said, or ``drop_last`` leaves no
                batch.

        Example:
            >>> import jaxcoded
            >>> from mpi4py import MPI
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
            ...     epoch = group.epoch(5, 3, seed=None)
            >>> for indices, weights in epoch:
            ...     indices.tolist(), weights.tolist(), int(weights.examples)
            ([0, 1, 2], [1.0, 1.0, 1.0], 3)
            ([3, 4, 3], [1.0, 1.0, 0.0], 2)
        """
        check_open(self)
        with self.failing("epoch"):
            return Epoch(
                *(self.plan, self.rank, n, batch_size),
                seed=seed,
                epoch=epoch,
                drop_last=drop_last,
                multiple=multiple,
            )

    def blocks(self, batch_size: int) -> Blocks:
        """The blocks of a batch that this rank computes, for programs that add up
        gradients over microbatches; in a group whose work is shared (``code="shared(…)"``).

        A rank that is done gets blocks of one that is late. Once all are computed the loop ends,
        on all ranks, and the next collective sums what they have added up:

            with group.blocks(batch_size) as blocks:
                for block in blocks:
                    total = add(total, gradient(params, load(block.indices)))
            total = jaxcoded.coded_allreduce(total, group, divisor=batch_size)

        A rank that gets no block contributes zeros like the others' sums. An exception in
        the loop, or leaving it early, is an error that the others hear of with their next
        call; they compute this rank's blocks. Where a rank dies after the loop and before
        its sum is fetched, the round is an error on all: repeat the step. It waits for what JAX
        has in flight before it asks for the next block, so that ranks are known to be as
        fast as they are; `Block.done` says for what to wait instead.

        Args:
            batch_size: the number of examples in the global batch, the same on all ranks.

        Raises:
            ValueError: ``batch_size < 1`` or ``≥ 2**63``, or the group does not share its
                work.

        Example:
            >>> import numpy as np, jaxcoded
            >>> from mpi4py import MPI
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF, code="shared(blocks=2)") as group:
            ...     total = np.zeros(1)
            ...     with group.blocks(5) as blocks:
            ...         for block in blocks:
            ...             total += block.indices.sum()
            ...     jaxcoded.host.coded_allreduce(total, group)
            array([10.])
        """
        check_open(self)
        check_alike(self)
        with self.failing("blocks"):
            most = int(np.iinfo(np.int64).max)  # indices are int64
            batch_size = _require.integer("batch_size", batch_size, 1, most)
            if self.plan.placement is None:
                raise ValueError(
                    f"this group has a code ({self.plan.code!r}), and does not share its "
                    'work: make it with code="shared(replicas=2)", or take its assignment'
                )
            if self.options.verify is not None and not self.options.debug:
                raise ValueError(
                    "verify sees only what coded_value_and_grad computes, not what a program adds "
                    "up itself: leave it out, or use coded_value_and_grad"
                )
        return Blocks(self.transport, self.plan.placement, batch_size)

    @overload
    def lag(self, *, token: None = None) -> int | jax.Array: ...

    @overload
    def lag(self, *, token: jax.Array) -> tuple[jax.Array, jax.Array]: ...

    def lag(
        self, *, token: jax.Array | None = None
    ) -> int | jax.Array | tuple[jax.Array, jax.Array]:
        """Rounds of this group that are decided, as far as this rank knows, and that it
        has not called yet.

        While it is not 0 the next collective returns a result that is there already,
        and this rank's contribution is dropped: it can leave out its gradient, as
        `coded_value_and_grad` does. On a rank in time it is 0; with the mpi4jax
        transport, always.

        Outside ``jit`` this waits for this rank's own rounds in flight; pass the token to
        include calls that a token orders. To leave out a gradient of your own, hand
        `jaxcoded.coded_allreduce` ``skip=True`` with that very call: zeros alone would
        count as a contribution if the round is not decided yet.

        Args:
            token: orders this call, see `jaxcoded.coded_allreduce`.

        Returns:
            A number; inside ``jit`` an int32 scalar, read in the order of the
            collectives; with a ``token``, inside and outside, the pair of that and the
            token for the next call.

        Raises:
            TypeError: ``token`` is not an int32 number.
        """
        check_open(self)
        if token is not None:
            lag, token = self.transport.lag(primitive.checked_token(token))
            assert token is not None
            return lag, token
        if _jax_compat.tracing():
            return self.transport.lag(None)[0]
        primitive.effects_barrier()
        return self.transport.host_lag()

    def snapshot(self, state: Any, *, every: int = 16) -> bool:
        """Keep a copy of this rank's state for ranks that have to start from one; see
        `resync`.

        Call it on every rank after each step, with what the step returned: parameters,
        optimizer state, step number, position of the sampler. It waits for this rank's
        own steps, and for nobody else. Late ranks can use the copy while the results of
        the rounds after it are kept, so ``every`` steps must have fewer rounds than the
        history (64 or more).

        Args:
            state: pytree of arrays, equal on all ranks.
            every: copy at every so many calls (≥ 1).

        Returns:
            Whether this call made a copy.

        Raises:
            ValueError: ``every`` is not an integer ≥ 1.
            CodedError: this rank has not got what the new root has, see `alike`.
            TypeError: a leaf is not an array of numbers or random keys.
        """
        check_open(self)
        check_alike(self)
        every = _require.integer("every", every, 1)
        self._snapshots += 1
        if (self._snapshots - 1) % every:
            return False
        # every round that was started before belongs to the state
        primitive.effects_barrier()
        self.transport.keep_state(
            np.concatenate([_digest(self.plan), snapshots.to_bytes(state)])
        )
        return True

    def resync(self, like: Any, *, timeout: float = 60.0) -> Any:
        """Continue from the newest snapshot of the nearest rank above.

        For a rank whose calls raise `Desynchronized`. Its next collectives are those
        that followed the snapshot: their results come from the history.

        Args:
            like: pytree of arrays or ``jax.ShapeDtypeStruct``: only structure, shapes
                and dtypes count.
            timeout: seconds to wait for an answer, ≥ 0.

        Returns:
            The state, a pytree of arrays.

        Raises:
            Desynchronized: nobody above has a snapshot, or answers in time; or there
                was a `replan` since.
            ValueError: the snapshot is of another state.
        """
        check_open(self)
        primitive.effects_barrier()
        timeout = _require.not_negative("timeout", timeout)
        round_, data = self.transport.fetch_state(timeout)
        if not round_:
            raise Desynchronized(
                f"no rank above rank {self.rank} has a snapshot from which it could go "
                f"on, or none has answered within {timeout} s: call group.snapshot on "
                "all ranks after each step, and every so often that the rounds since are "
                "still kept. Only a rank whose calls raise Desynchronized needs to "
                "resync"
            )
        plan = _digest(self.plan)
        if data[: len(plan)] != plan.tobytes():
            raise Desynchronized(
                f"the ranks of this group went on with another plan after rank "
                f"{self.rank} lost touch: call replan before a rank can be that late, "
                "or keep a longer history (history_bytes)"
            )
        state = snapshots.from_bytes(data[len(plan) :], like)
        self.transport.resume()
        return state

    def telemetry(self) -> Telemetry:
        """What this rank has seen of the latest rounds: who was in time and how late,
        who decided, what took how long. Neither waits nor communicates.

        The root sees its own children like any parent, and knows besides how fast all
        ranks are (`Telemetry.speeds`).

        Raises:
            NotImplementedError: with the mpi4jax transport, where all ranks wait for
                the slowest.
        """
        check_open(self)
        plan = self.plan
        return Telemetry.of(
            self.rank,
            plan.to_json(),
            np.array(plan.parents),
            np.array([float(plan.load_of(rank)) for rank in range(plan.size)]),
            self.transport.telemetry(),
        )

    def on_round(self, callback: Callable[[RoundSeen], Any]) -> None:
        """Call a function with a `jaxcoded.group.telemetry.RoundSeen` after each of this
        rank's rounds, for loggers.

        It runs on a thread of its own, in the order of the rounds, and holds up no
        round. If 65,536 rounds wait for it, it does not see the oldest. What it raises is logged. A group has one such function, the latest; it is
        called no more once the group is closed and it has seen all rounds. The groups that `replan` and
        `recovered` return go on with it.
        """
        check_open(self)
        self._callback = callback
        report(self.transport.reports(), callback)

    def replan(self, speeds: Sequence[float] | np.ndarray) -> "CodedGroup":
        """The group with its data laid out anew, in proportion to these speeds.

        A round like any other: all ranks call it between the same two rounds, and nobody
        waits for a late one. The root's speeds count, such as
        ``group.telemetry().speeds``. This group is closed by it: take the new one's
        `assignment`, and compile the step with the new one. A ``with`` block of this
        group closes the new one at its end.

        Args:
            speeds: relative speed of each rank, positive; see `make_plan`.

        Returns:
            A group of the same ranks. Its tree, codes and options are the same.

        Raises:
            ValueError: there is no such plan. On every rank; this group stays open.
            GroupMismatch: other ranks called something else. The root's speeds may have
                reached some ranks and not others by then; sums of ranks with different
                plans raise it, too, until all of them have replanned.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> group = jaxcoded.CodedGroup(MPI.COMM_SELF)
            >>> group = group.replan(speeds=[1.0])
            >>> group.close()
        """
        check_open(self)
        check_alike(self)
        with self.failing("replan"):
            mine = np.array(speeds, np.float64)
            if mine.shape != (self.size,):
                raise ValueError(
                    f"speeds must have shape ({self.size},), one for each rank, got "
                    f"{mine.shape}"
                )
        primitive.effects_barrier()
        agreed = self.transport.broadcast("replan", mine)
        plan = dataclasses.replace(self.plan, speeds=tuple(agreed.tolist()))
        other = copy.copy(self)
        other.plan, other.index = plan, next(_indices)
        other.plan_words = f", replanned ({plan.fingerprint[:8]})"
        other.transport = self.transport.replanned(other.index, plan)
        del _groups[self.index]
        _groups[other.index] = other
        self._successor = other
        return other

    def recovered(
        self,
        *,
        plan: Planner | None = None,
        options: Options | None = None,
        timeout: float = 60.0,
        put_out: bool = False,
    ) -> "CodedGroup":
        """The group without its dead ranks, with its tolerance restored and the data laid out
        anew among those that live; see ``docs/recovery.md``.

        Collective of the ranks that live, between the same two rounds. It waits for all of them:
        call it every so many steps. Where MPI reports no death it is this group that comes
        back, and nothing changes. Otherwise this group is closed: take the new one's `rank`, `size`
        and `assignment`, and compile the step with it. A ``with`` block of this group closes the new
        one at its end. Ranks keep their order, but for another root; parameters and state stay where they are.

        Where the root has died its last round may have ended with the sum on some ranks, and with
        an error on others. Call it there, too, when a step has failed. One of those that know most
        becomes the root, rank 0, and the group is not ``alike``: until it has handed on its state
        with `tree_bcast`, sums are an error.

        A rank whose program has ended with an error ends within seconds, and is dead for the others. One that is
        alive but does not call this, as its program hangs or its process is stopped, keeps the others here.
        With ``put_out`` it is put out after ``timeout``: its process is killed, and it counts
        among the dead. So is a rank that is only slow; but nobody is while rounds go on without this rank, as
        then not all have called this. Where steps need it, as they need the root, they
        wait for it as well, unless ``Options(on_deadline="raise")`` says otherwise; for a root whose
        program hangs while its engine answers, always.

        It needs Open MPI 5 and ``jaxcoded run --ft``.

        Args:
            plan: makes the plan for so many ranks, the same on all of them. Default: with the
                arguments that this group was made with, `make_plan`.
            options: of the new group. Default: those of this one.
            timeout: seconds for which ranks that are alive but do not call this are waited for.
            put_out: whether the processes of those are killed then (``SIGKILL``): by any rank that has
                come of the same host and pid namespace, if it may. What the root says counts, if it
                comes.

        Raises:
            ValueError: MPI is not fault-tolerant, there is no such plan for so many ranks, the group
                was made with a plan of its own and ``plan`` is not given, or it keeps or follows a
                record. On every rank; this group stays open.
            TypeError: ``plan`` or ``put_out`` is something else.
            CodedError: a rank that lives has not come, and is not or cannot be put out; or one more died
                while the group was made anew, or rounds of this one were decided. On every rank that has come; this group stays open, and who
                calls this again meets those who do, too.
        """
        check_open(self)
        timeout = _require.not_negative("timeout", timeout)
        if not isinstance(put_out, bool):
            raise TypeError(
                f"put_out must be True or False, got {_require.shown(put_out)}"
            )
        check_planner(plan)
        with self._changing("recovered") as transport:
            primitive.effects_barrier()
            transport.drained(timeout / 2)
            rounds = transport.rounds_of_all()
            if self._extending is not None:
                return self._with_those_that_join(rounds, timeout, put_out)
            if self._anew is None:
                # a round that failed here alone may have ended otherwise elsewhere
                broken = rounds < transport.rounds()
                if not self._roll.call(
                    *(timeout, put_out, transport.departed),
                    broken=broken,
                    decided=transport.decided,
                ):
                    return self
                self._anew = Anew(self)
            self._anew.make(rounds, plan, options, timeout, put_out)
            anew, self._anew = self._anew, None
            return self._give_way(anew.group(rounds))

    def extended(
        self,
        ranks: int,
        *,
        plan: Planner | None = None,
        options: Options | None = None,
        command: Sequence[str] | None = None,
        timeout: float = 120.0,
    ) -> "CodedGroup":
        """The group with so many more ranks, of processes that are started for it; see ``docs/recovery.md``.

        Collective, between the same two rounds, of a group of which nobody is dead: call `recovered` first. The
        processes run this program, and get the group from `joining`. They know nothing of the training: the new
        group is not `alike`, on any rank, and sums are an error until a `tree_bcast` has handed on what its root
        has:

            group = group.recovered()
            if group.size < size:
                group = group.extended(size - group.size)
            if not group.alike:
                number, params, state = jaxcoded.tree_bcast((number, params, state), group)

        This group is closed then: take the new one's `rank`, `size` and `assignment`, and compile the step
        with it. A ``with`` block of this group closes the new one at its end. The root stays the root. The others
        keep their order, and new ranks come after them. MPI.COMM_WORLD is what it was: that of the new ranks
        has them alone, so take ``group.comm`` instead.

        On several hosts they run on the one with the fewest ranks of the group. It needs Open MPI 5 and
        ``jaxcoded run --ft``.

        Args:
            ranks: how many join, ≥ 1.
            plan: makes the plan for so many ranks as there are then, the same on all old ones. Default: with the
                arguments that this group was made with, `make_plan`.
            options: of the new group. Default: those of this one.
            command: starts each of the processes. Default: as those that were there at the beginning were started.
                The folder is that in which the one that starts them has imported jaxcoded.
            timeout: seconds for which ranks that do not call this are waited for, and then until all of the
                processes have called `joining`. After that the group is to be made within half of them, but not
                less than 30 s.

        Returns:
            A group of all.

        Raises:
            ValueError: an argument is not as said, MPI or its launcher would not go on where a rank dies,
                there is no such plan for so many ranks, the group was made with a plan of its own and ``plan``
                is not given, or it keeps or follows a record. On every rank; this group stays open.
            TypeError: ``plan``, ``options`` or ``command`` is something else.
            GroupMismatch: ranks gave different arguments. Raised on every rank; this group stays open.
            CodedError: some of this group are dead, or have not come; or a process was not there in time, has
                ended or died on the way, and then all that were started are ended. On every rank that has come;
                this group stays open.

        Example:
            >>> from mpi4py import MPI
            >>> import jaxcoded
            >>> with jaxcoded.CodedGroup(MPI.COMM_SELF) as group:
            ...     group.extended(1)
            Traceback (most recent call last):
                ...
            ValueError: extended needs the engine, and an MPI that goes on where a rank dies: start the job with ...
        """
        check_open(self)
        ranks = _require.integer("ranks", ranks, 1, joining.MOST)
        timeout = min(_require.not_negative("timeout", timeout), joining.LONGEST)
        check_planner(plan)
        if not (options is None or isinstance(options, Options)):
            raise TypeError(
                f"options must be jaxcoded.Options, got {_require.kind(options)}"
            )
        command = old_ranks.checked(command)
        with self._changing("extended") as transport:
            if why := joining.why_not(len(set(self._hosts))):
                raise ValueError(why)
            primitive.effects_barrier()
            drained = transport.drained(timeout / 2)
            rounds = transport.rounds_of_all()
            if self._extending is None:
                if self._anew is not None or self._roll.call(
                    *(timeout, False, transport.departed),
                    broken=rounds < transport.rounds(),
                    extends=True,
                    decided=transport.decided,
                ):
                    raise CodedError(
                        "some ranks of the group are dead, or have had an error where others had a sum: call recovered "
                        "first, and then extended"
                    )
                arguments = ranks, plan, options, command, timeout
                self._extending = Extending(self, *arguments, rounds, drained)
            return self._with_those_that_join(rounds, timeout)

    def _with_those_that_join(
        self, rounds: int, timeout: float, put_out: bool = False
    ) -> "CodedGroup":
        """See `Extending`."""
        assert self._extending is not None
        self._extending.make(timeout, put_out)
        extending, self._extending = self._extending, None
        return self._give_way(extending.group(rounds))

    @classmethod
    def joining(cls) -> "CodedGroup | None":
        """In a process that `extended` has started, the group that it is taken into; in all others None.

        Call it where the program would make its group, and as early as can be, as the others wait meanwhile:

            group = jaxcoded.CodedGroup.joining()
            if group is None:
                group = jaxcoded.CodedGroup(MPI.COMM_WORLD, stragglers=1)

        The group is not `alike` yet: take part in the `tree_bcast` that the others call next. Where the program goes
        on depends on what it hands on, such as the number of the step.

        Returns:
            A group of those that were there, and of this process and those that were started with it.

        Raises:
            CodedError: the group has not taken this process in, or it has called this before.

        Example:
            >>> import jaxcoded
            >>> jaxcoded.CodedGroup.joining() is None
            True
        """
        group = joined(cls)
        if group is not None:
            group.transport.enter()
        return group

    # A group that takes the place of another.

    @contextlib.contextmanager
    def _changing(self, call: str) -> Iterator[engine.Engine]:
        """Inside, this thread alone changes the ranks of the group.

        Raises:
            ValueError: they cannot change.
            CodedError: another thread does so.
        """
        transport = self.transport
        if not (isinstance(transport, engine.Engine) and engine.fault_tolerant()):
            raise ValueError(
                f"{call} needs the engine, and an MPI that goes on where a rank dies: start the job "
                "with jaxcoded run --ft, which needs Open MPI 5"
            )
        if not self._changes.acquire(blocking=False):
            raise CodedError("another thread of this rank is in recovered or extended")
        try:
            with transport.watching():
                yield transport
        finally:
            self._changes.release()

    def _planned_anew(
        self,
        hosts: Sequence[str],
        speeds: Sequence[Fraction],
        plan: Planner | None,
        call: str,
        whose: str,
    ) -> Plan:
        """See `planned_anew`."""
        if self._record.request:
            raise ValueError(
                "a record is of all ranks of its group: a group with record or replay cannot go on "
                "with others"
            )
        return planned_anew(self._asked, hosts, speeds, plan, call, whose)

    @classmethod
    def _taking_over(
        cls,
        comm: MPI.Intracomm,
        options: Options,
        request: dict[str, Any],
        planner: Callable[[Sequence[str]], Plan],
        asked: Mapping[str, Any] | None,
        ahead: int | None,
    ) -> "CodedGroup":
        """A group on a communicator of its own that counts once all agree that they have it."""
        group = cls.__new__(cls)
        group._asked, group._ahead = asked, ahead
        group._open(comm, "engine", options, request, planner, takes=True)
        if ahead is not None:
            assert isinstance(group.transport, engine.Engine)
            group.transport.expect_state()
        return group

    def _withdraw(self, error: BaseException | None = None) -> None:
        """Leave it again: not all have it, or (``error``) this rank is not to have it."""
        _groups.pop(self.index)
        if error is None:
            self.transport.close(0.0)
        else:
            self.transport.abandon(error)

    def _give_way(self, other: "CodedGroup") -> "CodedGroup":
        """All have the other one: go on with it."""
        other.transport.enter()
        if self._callback is not None:
            other.on_round(self._callback)
        _groups.pop(self.index)
        # all are here, and know all results: nobody is waited for
        self.transport.close(0.0)
        self._successor = other
        return other

    def close(self, timeout: float = 60.0) -> None:
        """Finish pending rounds and give the communicator back. Collective; does
        nothing the second time.

        Calls ordered by a token must have ended: wait for the last one's result. A later
        call of a collective on this group, compiled or not, raises
        `GroupClosed`. With the engine a rank leaves once the ranks below it have left,
        so that late ones can still get their results.

        Args:
            timeout: seconds after which the engine leaves all the same. Ranks that have
                not come by then are named in a warning.

        Raises:
            ValueError: ``timeout`` is not a number ≥ 0; the group stays open.
            GroupMismatch: other ranks called a collective instead. With the mpi4jax
                transport raised on all; with the engine on those that wait for more
                ranks than their code can do without.
        """
        timeout = _require.not_negative("timeout", timeout)
        if self.closed:
            return
        primitive.effects_barrier()
        begun = time.monotonic()
        try:
            absent = self.transport.close(timeout)
        except GroupClosed:
            return  # another thread has closed it meanwhile
        finally:
            _groups.pop(self.index, None)
        self._record.close()
        if absent:
            waited = time.monotonic() - begun >= timeout
            why = (
                f"were not there after {timeout:g} s"
                if waited
                else "a rank below has given them up"
            )
            warnings.warn(
                f"rank {self.rank} closed the group without ranks {absent} and "
                f"those below them: they are dead, or {why}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            self._comm.Free()

    @contextlib.contextmanager
    def failing(self, call: str) -> Iterator[None]:
        """Remember an error in this rank's arguments, which keeps it from a round.

        Other ranks may be in that round already. They hear of the error when this rank
        begins its next one; if all ranks erred, all go on. What JAX runs again, to find
        where a NaN comes from, has had its round.
        """
        try:
            yield
        except Exception as error:
            if _jax_compat.runs_again():
                raise
            self.transport.note_failure(f" after {_require.kind(error)} in {call}")
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        group: CodedGroup = self
        while group._successor is not None:
            group = group._successor
        if error is None:
            group.close()
        elif _groups.pop(group.index, None) is not None:
            # the other ranks may be anywhere: wait for nobody, and leave them a
            # communicator to fail on
            group.transport.abandon(error)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"rank {self.rank}"
        return f"<CodedGroup {self.index} of {self.size} ranks, {state}>"


def _digest(plan: Plan) -> np.ndarray:
    """What tells a plan from others, as bytes."""
    return np.frombuffer(hashlib.sha256(plan.fingerprint.encode()).digest(), np.uint8)


# What compiled code holds of a group is its index. Indices are never used again.
_groups: dict[int, CodedGroup] = {}
_indices = itertools.count()


def check_open(group: object) -> None:
    """Raise unless ``group`` is a group that can be used.

    Raises:
        TypeError: it is not a group.
        GroupClosed: it was closed.
    """
    if not isinstance(group, CodedGroup):
        raise TypeError(
            f"group must be a jaxcoded.CodedGroup, got {_require.kind(group)}"
        )
    find(group.index)


def check_alike(group: CodedGroup) -> None:
    """Raise unless all ranks have had the sums of the same rounds.

    Raises:
        CodedError: some have not, and would go on with other values than the rest.
    """
    if not (group.hands_on or group.alike):
        raise CodedError(
            "ranks have joined, which have no state yet, or the root died, and some had the sum of its last round, "
            "and others an error: hand on what the root has first, as params = jaxcoded.tree_bcast(params, group)"
        )


def find(index: int) -> CodedGroup:
    """The group with this index.

    Raises:
        GroupClosed: it was closed.
    """
    try:
        return _groups[index]
    except KeyError:
        raise use_after_close(index) from None
