import dataclasses
import math

from jaxcoded import _require
from jaxcoded.plan.sections import SECTIONS_FROM


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of equal ports and links. A port receives one message at a time, and
    sends one message at a time.

    Attributes:
        latency: seconds until a message has arrived.
        bandwidth: bytes per second that a port can receive.
        send_bandwidth: bytes per second that a port can send; default ``bandwidth``.
        overhead: processor seconds for one message or piece.
        combine: bytes per second that a rank can add up.
        call: seconds that every call takes in addition to the protocol.
        trips: how many messages follow each other until a piece has arrived: 3 between hosts (offer, request,
            piece), 1 if ranks read each other's memory.
        piece: bytes in each piece of a long message.
        inline: the largest size in bytes of a message that is sent with its offer.
        sections_from: sums of at least this many bytes are formed in sections (``docs/engine.md``); 0: no
            sections. Default: 64 KiB between hosts, as in the engine, and 0 with ``trips=1``, for which sections
            are not simulated.

    Raises:
        ValueError: a number is negative, or a bandwidth or a piece is 0.

    Example:
        >>> from jaxcoded.tools.simulator import Network
        >>> Network.of(gigabits=10).bandwidth
        1250000000.0
        >>> Network().sections_from, Network(trips=1).sections_from
        (65536, 0)
    """

    latency: float = 50e-6
    bandwidth: float = 1.25e9
    send_bandwidth: float | None = None
    overhead: float = 2e-6
    combine: float = 8e9
    call: float = 50e-6
    trips: int = 3
    piece: int = 256 * 1024
    inline: int = 4096
    sections_from: int | None = None

    def __post_init__(self) -> None:
        _require.integer("trips", self.trips, 1)
        _require.integer("piece", self.piece, 1)
        _require.integer("inline", self.inline, 0)
        if self.send_bandwidth is None:
            object.__setattr__(self, "send_bandwidth", self.bandwidth)
        if self.sections_from is None:
            least = SECTIONS_FROM if self.trips > 1 else 0
            object.__setattr__(self, "sections_from", least)
        _require.integer("sections_from", self.sections_from, 0)
        for name in ("latency", "overhead", "call"):
            value = getattr(self, name)
            if not (_require.is_number(value) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be seconds >= 0, got {value!r}")
        for name in ("bandwidth", "send_bandwidth", "combine"):
            value = getattr(self, name)
            if not (_require.is_number(value) and value > 0):
                raise ValueError(f"{name} must be bytes per second > 0, got {value!r}")

    @classmethod
    def of(cls, gigabits: float, latency: float = 50e-6) -> "Network":
        """Return a network of usual hosts with links of this many Gb/s."""
        return cls(latency=latency, bandwidth=gigabits * 1e9 / 8)

    @property
    def sending(self) -> float:
        """Return `send_bandwidth`, or `bandwidth` if it is not given."""
        assert self.send_bandwidth is not None
        return self.send_bandwidth
