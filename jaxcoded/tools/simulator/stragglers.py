"""Models of stragglers: how much longer each rank takes in each round.

With the same seed a model slows down a simulated job and a real job (``benchmarks/``) in the
same way.
"""

import abc
import dataclasses
import functools
import itertools
import operator
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxcoded import _parse, _require
from jaxcoded._files import table

# A ``+`` outside of quotes: an even number of quotes follows.
_UNQUOTED = r"""(?=(?:[^'"]|'[^']*'|"[^"]*")*$)"""


class Delays(NamedTuple):
    """Delays of the ranks in one round.

    Attributes:
        factor: float64 ``(ranks,)``, the factor that multiplies the seconds of work.
        seconds: float64 ``(ranks,)``, seconds that are added to the work; infinite for
            a dead rank.
        stopped: bool ``(ranks,)``, whether the whole process is stopped for these seconds, as after SIGSTOP, and
            relays no results. Otherwise only the rank's computation is late.
    """

    factor: np.ndarray
    seconds: np.ndarray
    stopped: np.ndarray

    def time(self, work: np.ndarray | float) -> np.ndarray:
        """Return the seconds until each rank has done this many seconds of work. A rank without work is late only if
        its process is stopped."""
        seconds = work * self.factor + self.seconds
        return np.where((np.asarray(work) > 0) | self.stopped, seconds, 0.0)


class Stragglers(abc.ABC):
    """A model of stragglers. ``a + b`` applies both models: factors multiply, seconds add up."""

    @abc.abstractmethod
    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        """Yield the delays of ``size`` ranks in each round. The iterator never ends.

        Args:
            size: number of ranks.
            seed: equal seeds give equal delays.
        """

    def __add__(self, other: "Stragglers") -> "Stragglers":
        return Both(self, other)


def _delays(
    size: int,
    factor: np.ndarray | float = 1.0,
    seconds: np.ndarray | float = 0.0,
    stopped: np.ndarray | bool = False,
) -> Delays:
    return Delays(*(np.full(size, each) for each in (factor, seconds, stopped)))


@dataclasses.dataclass(frozen=True)
class Both(Stragglers):
    """Two models at once: the result of ``first + second``."""

    first: Stragglers
    second: Stragglers

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        # Equal models in a sum must draw independently of each other.
        seeds = np.random.SeedSequence(seed).generate_state(2)
        pairs = zip(
            self.first.rounds(size, int(seeds[0])),
            self.second.rounds(size, int(seeds[1])),
        )
        for a, b in pairs:
            yield Delays(
                a.factor * b.factor, a.seconds + b.seconds, a.stopped | b.stopped
            )


@dataclasses.dataclass(frozen=True)
class NoStragglers(Stragglers):
    """Every rank takes exactly as long as its work."""

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        return itertools.repeat(_delays(size))


@dataclasses.dataclass(frozen=True)
class Exponential(Stragglers):
    """The shifted exponential model of the papers: work ``w`` takes ``w (1 + x) + y``.

    CodedReduce (Reisizadeh et al. 2021, §IV) uses ``a w + Exp(mean w/μ)``, which is
    this model with ``work = 1/(a μ)``. Ye & Abbe 2018 (§VI) add a message's time, which
    is also exponential.

    Attributes:
        work: mean of ``x``, which is exponential, as a multiple of the work.
        seconds: mean of ``y``, which is exponential.
    """

    work: float = 0.5
    seconds: float = 0.0

    def __post_init__(self) -> None:
        _require_numbers(self)

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        draw = np.random.default_rng(seed).standard_exponential
        while True:
            factor = 1 + self.work * draw(size) if self.work else 1.0
            seconds = self.seconds * draw(size) if self.seconds else 0.0
            yield _delays(size, factor, seconds)


@dataclasses.dataclass(frozen=True)
class Pareto(Stragglers):
    """Heavy tails: work ``w`` takes ``w (1 + x)``, with ``x`` Pareto distributed (Lomax):
    ``P(x > t) = (1 + t / scale) ** -shape``.

    Attributes:
        shape: the smaller the shape, the heavier the tail. For a shape up to 1 the mean is infinite;
            up to 2 the variance is infinite.
        scale: the scale of ``x``, as a multiple of the work.
    """

    shape: float = 1.5
    scale: float = 0.2

    def __post_init__(self) -> None:
        _require_numbers(self, above=True)

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        rng = np.random.default_rng(seed)
        while True:
            yield _delays(size, 1 + self.scale * rng.pareto(self.shape, size))


@dataclasses.dataclass(frozen=True)
class FixedSlow(Stragglers):
    """The same ranks are slow all the time.

    Attributes:
        ranks: their numbers; negative numbers count from the end.
        factor: the factor that multiplies their work.
        seconds: the seconds that are added to their work.
    """

    ranks: tuple[int, ...] = (-1,)
    factor: float = 10.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks(self.ranks))
        _require_numbers(self)

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        delays = _delays(size)
        chosen = _within(self.ranks, size)
        delays.factor[chosen] = self.factor
        delays.seconds[chosen] = self.seconds
        return itertools.repeat(delays)


@dataclasses.dataclass(frozen=True)
class Bursty(Stragglers):
    """Every rank is a Markov chain of two states, usual and slow, as on shared machines.

    In the long run the fraction ``begin / (begin + end)`` of the ranks is slow. A rank
    is slow for ``1 / end`` rounds on average.

    Attributes:
        begin: probability that a usual rank is slow in the next round.
        end: probability that a slow rank is usual again in the next round.
        factor: the factor that multiplies the work of a slow rank.
    """

    begin: float = 0.01
    end: float = 0.1
    factor: float = 5.0

    def __post_init__(self) -> None:
        _require_numbers(self)
        if not (0 < self.begin <= 1 and 0 < self.end <= 1):
            raise ValueError(
                f"begin and end must be probabilities above 0, got {self.begin!r} and "
                f"{self.end!r}"
            )

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        rng = np.random.default_rng(seed)
        slow = rng.random(size) < self.begin / (self.begin + self.end)
        while True:
            yield _delays(size, np.where(slow, self.factor, 1.0))
            draw = rng.random(size)
            slow = np.where(slow, draw >= self.end, draw < self.begin)


@dataclasses.dataclass(frozen=True, eq=False)
class Measured(Stragglers):
    """Measured numbers, repeated without end.

    Attributes:
        factors: float64 ``(rounds, ranks)``, factors that multiply the work; infinite for a dead rank. If there are
            more ranks than columns, columns repeat.
        seconds: whether the numbers are seconds to add, instead of factors.

    Raises:
        ValueError: the array does not have two axes, or a number is negative or NaN.

    Example:
        >>> from jaxcoded.tools.simulator.stragglers import Measured
        >>> rounds = Measured([[1.0, 3.0], [2.0, 1.0]]).rounds(2)
        >>> [next(rounds).time(0.5).tolist() for _ in range(3)]
        [[0.5, 1.5], [1.0, 0.5], [0.5, 1.5]]
    """

    factors: np.ndarray
    seconds: bool = False

    def __post_init__(self) -> None:
        _require.boolean("seconds", self.seconds)
        object.__setattr__(self, "factors", _table("factors", self.factors))

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        columns = np.arange(size) % self.factors.shape[1]
        for line in itertools.cycle(self.factors):
            row = line[columns]
            dead = np.isinf(row)
            if self.seconds:
                yield _delays(size, 1.0, row, dead)
            else:
                # add infinite seconds, since a factor would not delay a rank without work
                factor = np.where(dead, 1.0, row)
                yield _delays(size, factor, np.where(dead, np.inf, 0.0), dead)


@dataclasses.dataclass(frozen=True)
class Trace(Stragglers):
    """Measured numbers from a file, repeated without end (`Measured`).

    Attributes:
        path: a file of numbers, with a line for each round and a column for each rank: ``.npy``, or text with
            commas. If there are more ranks than columns, columns repeat.
        seconds: whether the numbers are seconds to add, instead of factors.
    """

    path: str | os.PathLike[str]
    seconds: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike):
            raise ValueError(f"path must be the path of a file, got {self.path!r}")  # noqa: TRY004
        _require.boolean("seconds", self.seconds)

    @property
    def table(self) -> np.ndarray:
        """Return the numbers in the file, float64 ``(rounds, ranks)``. Raise a ValueError that names the path if
        the file has no such table."""
        return _table(str(self.path), table(self.path))

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        return Measured(self.table, self.seconds).rounds(size, seed)


@dataclasses.dataclass(frozen=True)
class Stopped(Stragglers):
    """Processes that are stopped (SIGSTOP) while they compute in one round, and continue later.

    Attributes:
        ranks: their numbers; negative numbers count from the end.
        round: the round in which they are stopped, from 1.
        seconds: how long they are stopped.
        every: the number of rounds after which they are stopped again; 0: never.
    """

    ranks: tuple[int, ...] = (-1,)
    round: int = 10
    seconds: float = 1.0
    every: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks(self.ranks))
        _require_numbers(self)
        _require.integer("round", self.round, 1)
        _require.integer("every", self.every, 0)

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        chosen = _within(self.ranks, size)
        for number in itertools.count(1):
            delays = _delays(size)
            since = number - self.round
            if since == 0 or (self.every and since > 0 and since % self.every == 0):
                delays.seconds[chosen] = self.seconds
                delays.stopped[chosen] = True
            yield delays


@dataclasses.dataclass(frozen=True)
class Killed(Stragglers):
    """Processes that die (SIGKILL) while they compute in one round.

    Attributes:
        ranks: their numbers; negative numbers count from the end.
        round: the round in which they die, from 1.
    """

    ranks: tuple[int, ...] = (-1,)
    round: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", _ranks(self.ranks))
        _require.integer("round", self.round, 1)

    def rounds(self, size: int, seed: int = 0) -> Iterator[Delays]:
        chosen = _within(self.ranks, size)
        for number in itertools.count(1):
            delays = _delays(size)
            if number >= self.round:
                delays.seconds[chosen] = np.inf
                delays.stopped[chosen] = True
            yield delays


MODELS: dict[str, type[Stragglers]] = {
    "none": NoStragglers,
    "exponential": Exponential,
    "pareto": Pareto,
    "fixed": FixedSlow,
    "bursty": Bursty,
    "trace": Trace,
    "stopped": Stopped,
    "killed": Killed,
}


def named(text: str) -> Stragglers:
    """Return the model that a text names.

    Args:
        text: a key of `MODELS`, with keyword arguments that are Python literals, such as
            ``"pareto(shape=1.5, scale=0.2)"``. Texts of several models may be joined by
            ``+``.

    Raises:
        ValueError: there is no model with this name, or it has no such argument. The
            message contains the text.

    Example:
        >>> from jaxcoded.tools.simulator import stragglers
        >>> model = stragglers.named("fixed(ranks=(2,), factor=3)")
        >>> next(model.rounds(4)).time(0.5).tolist()
        [0.5, 0.5, 1.5, 0.5]
    """
    _parse.check_text("model", text)
    models = []
    # Do not split at the plus of a number such as 1e+3, nor at a plus in quotes.
    for part in re.split(r"\+(?=\s*[^\W\d])" + _UNQUOTED, text):
        name, arguments = _parse.parsed("model", part, MODELS)
        _parse.check_arguments("model", part, MODELS[name], arguments)
        try:
            models.append(MODELS[name](**arguments))
        except (TypeError, ValueError) as error:
            raise ValueError(f"model={part!r}: {error}") from None
    return functools.reduce(operator.add, models)


def as_model(given: Stragglers | str | None) -> Stragglers:
    """Return a model, given a model, a text (see `named`) or ``None``. Raise a TypeError for other
    values."""
    if given is None:
        return NoStragglers()
    if isinstance(given, str):
        return named(given)
    if not isinstance(given, Stragglers):
        raise TypeError(
            "stragglers must be a model of jaxcoded.tools.simulator.stragglers or a text such as "
            f"'pareto(shape=1.5)', got {given!r}"
        )
    return given


def _ranks(ranks: Any) -> tuple[int, ...]:
    try:
        numbers = np.atleast_1d(ranks)
    except ValueError:  # rows of unequal lengths
        numbers = np.array([np.nan])
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ValueError(f"ranks must be integers, got {ranks!r}")
    return tuple(map(int, numbers.ravel()))


def _table(what: str, numbers: Any) -> np.ndarray:
    """Return the numbers as float64 ``(rounds, ranks)``."""
    table = np.asarray(numbers)
    real = table.dtype.kind in "biuf" and table.size > 0
    if not real or table.ndim != 2:
        raise ValueError(
            f"{what} must be numbers >= 0, a line for each round and a column for each "
            f"rank; got {table.dtype} of shape {table.shape}"
        )
    wrong = np.argwhere(~(table >= 0))
    if len(wrong):
        line, column = wrong[0]
        raise ValueError(
            f"{what} must be numbers >= 0, got {table[line, column]} for round {line + 1} "
            f"in column {column + 1}"
        )
    return table.astype(np.float64)


def _within(ranks: tuple[int, ...], size: int) -> list[int]:
    """Return the ranks with negative numbers replaced: -1 is the last rank."""
    for rank in ranks:
        if not -size <= rank < size:
            raise ValueError(f"there is no rank {rank} among {size} ranks")
    return [rank % size for rank in ranks]


def _require_numbers(model: Any, above: bool = False) -> None:
    """Raise a ValueError unless all fields but ``ranks`` are numbers ≥ 0, or > 0 with ``above``."""
    for name, value in vars(model).items():
        if name == "ranks":
            continue
        if not (_require.is_number(value) and np.isfinite(value)):
            raise ValueError(
                f"{name} must be a finite number, got {_require.shown(value)}"
            )
        if value < 0 or (above and value == 0):
            wanted = "above" if above else "at least"
            raise ValueError(f"{name} must be {wanted} 0.0, got {value!r}")
