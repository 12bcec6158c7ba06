"""How long a job would take, without running it: the engine's rounds, for up to millions
of ranks."""

from jaxcoded.simulator.ideal import ideal_seconds
from jaxcoded.simulator.layout import Layout
from jaxcoded.simulator.network import Network
from jaxcoded.simulator.order_statistics import expected_runtime
from jaxcoded.simulator.protocol import Outcome, simulate
from jaxcoded.simulator.ring import Ring

__all__ = [
    "Layout",
    "Network",
    "Outcome",
    "Ring",
    "expected_runtime",
    "ideal_seconds",
    "simulate",
]
