"""The measured links and ranks of a job, and the file that stores them. This module
needs neither MPI nor JAX."""

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
    """The link between two ranks."""

    rank: int
    partner: int
    latency: float  # seconds until a small message arrives
    bandwidth: float  # bytes per second of a large message


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The result of `measured`."""

    # the medians of the `links`, which connect ranks far apart in the job and are all measured at the same time
    network: Network
    work: float  # seconds that a usual rank takes to compute once
    # how many times as long as usual each computation took on each rank
    stragglers: Measured
    links: tuple[Link, ...]
    hosts: tuple[str, ...]  # the host of each rank

    @property
    def rounds(self) -> int:
        """Return how often the fastest rank has computed."""
        return len(self.stragglers.factors)

    @property
    def speeds(self) -> np.ndarray:
        """Return the usual speed of each rank relative to the fastest: 0 … 1."""
        usual = np.median(self.stragglers.factors, axis=0)
        return usual.min() / usual

    def to_fields(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "format": _FORMAT,
            "network": dataclasses.asdict(self.network),
            "work": self.work,
            "links": [link._asdict() for link in self.links],
            "hosts": list(self.hosts),
            # six digits are more precise than any measured time
            "factors": [
                [float(f"{factor:.6g}") for factor in row]
                for row in self.stragglers.factors.tolist()
            ],
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Return the measurement from fields that `to_fields` returned. Raise a
        ValueError for other fields."""
        try:
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}, not {_FORMAT!r}")
            factors = Measured(fields["factors"])
            hosts = tuple(fields["hosts"])
            if not all(isinstance(host, str) for host in hosts):
                raise ValueError("hosts must be texts")
            if not (np.isfinite(factors.factors) & (factors.factors > 0)).all():
                raise ValueError("factors must be finite numbers > 0")
            if len(hosts) != factors.factors.shape[1]:
                raise ValueError("its numbers of ranks and hosts differ")
            return cls(
                Network(**fields["network"]),
                _require.positive("work", fields["work"]),
                factors,
                tuple(_link(link, len(hosts)) for link in fields["links"]),
                hosts,
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the measurement to a JSON file."""
        with replacing(path) as file:
            file.write(json.dumps(self.to_fields(), ensure_ascii=False).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the measurement in a file that `save` wrote. Raise a ValueError that
        names the path for any other file."""
        text = contents(path)
        try:
            return cls.from_fields(_parse.document(text))
        except ValueError as error:
            raise ValueError(
                f"{path} was not written by jaxcoded bench --save: {error}"
            ) from None


def _link(fields: dict[str, Any], ranks: int) -> Link:
    link = Link(**fields)
    for name in ("rank", "partner"):
        _require.integer(name, getattr(link, name), 0, ranks - 1)
    for name in ("latency", "bandwidth"):
        _require.positive(name, getattr(link, name))
    return link
