"""What was measured of a job's links and ranks, and the file of it. Needs neither MPI nor JAX."""

import dataclasses
import json
import os
from typing import Any, NamedTuple, Self

import numpy as np

from jaxcoded import _parse, _require
from jaxcoded._files import contents, replacing
from jaxcoded.tools.simulator import Network
from jaxcoded.tools.simulator.stragglers import Measured

_FORMAT = "jaxcoded measurement 1"


class Link(NamedTuple):
    """Between two ranks."""

    rank: int
    partner: int
    latency: float  # seconds until a small message is there
    bandwidth: float  # bytes per second of a large one


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What `measured` has found."""

    network: Network  # between ranks that are far apart in the job, all pairs at once
    work: float  # seconds that a usual rank takes to compute once
    stragglers: Measured  # how much longer each rank took each time
    links: tuple[Link, ...]
    hosts: tuple[str, ...]  # of each rank

    @property
    def rounds(self) -> int:
        """How often the fastest rank has computed."""
        return len(self.stragglers.factors)

    @property
    def speeds(self) -> np.ndarray:
        """How fast each rank usually computes, relative to the fastest: 0 … 1."""
        usual = np.median(self.stragglers.factors, axis=0)
        return usual.min() / usual

    def to_fields(self) -> dict[str, Any]:
        """What JSON can say."""
        return {
            "format": _FORMAT,
            "network": dataclasses.asdict(self.network),
            "work": self.work,
            "links": [link._asdict() for link in self.links],
            "hosts": list(self.hosts),
            # six digits are more than times have
            "factors": [
                [float(f"{factor:.6g}") for factor in row]
                for row in self.stragglers.factors.tolist()
            ],
        }

    @classmethod
    def from_fields(cls, said: dict[str, Any]) -> Self:
        """Return what `to_fields` has made; a ValueError if they are something else."""
        try:
            if said["format"] != _FORMAT:
                raise ValueError(f"its format is {said['format']!r}, not {_FORMAT!r}")
            factors = Measured(said["factors"])
            hosts = tuple(said["hosts"])
            if not all(isinstance(host, str) for host in hosts):
                raise ValueError("hosts must be texts")
            if not (np.isfinite(factors.factors) & (factors.factors > 0)).all():
                raise ValueError("factors must be finite numbers > 0")
            if len(hosts) != factors.factors.shape[1]:
                raise ValueError("it has not as many ranks as hosts")
            return cls(
                Network(**said["network"]),
                _require.positive("work", said["work"]),
                factors,
                tuple(_link(link, len(hosts)) for link in said["links"]),
                hosts,
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of JSON."""
        with replacing(path) as file:
            file.write(json.dumps(self.to_fields(), ensure_ascii=False).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote; a ValueError with the path if it is something else."""
        text = contents(path)
        try:
            return cls.from_fields(_parse.document(text))
        except ValueError as error:
            raise ValueError(
                f"{path} was not written by jaxcoded bench --save: {error}"
            ) from None


def _link(said: dict[str, Any], ranks: int) -> Link:
    """Raises ValueError, TypeError or KeyError where it is none."""
    link = Link(**said)
    for name in ("rank", "partner"):
        _require.integer(name, getattr(link, name), 0, ranks - 1)
    for name in ("latency", "bandwidth"):
        _require.positive(name, getattr(link, name))
    return link
