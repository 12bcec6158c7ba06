"""Simulate how long a job would take: the engine's rounds, for up to millions of ranks."""

from jaxcoded.tools.simulator.costs import Costs
from jaxcoded.tools.simulator.gradient_coding import GradientCoding
from jaxcoded.tools.simulator.ideal import ideal_seconds
from jaxcoded.tools.simulator.layout import Layout
from jaxcoded.tools.simulator.multiplexed import Multiplexed
from jaxcoded.tools.simulator.network import Network
from jaxcoded.tools.simulator.protocol import Outcome, simulate
from jaxcoded.tools.simulator.ring import Ring
from jaxcoded.tools.simulator.selective_repeat import SelectiveRepeat
from jaxcoded.tools.simulator.sequential import simulate_sequence

__all__ = [
    "Costs",
    "GradientCoding",
    "Layout",
    "Multiplexed",
    "Network",
    "Outcome",
    "Ring",
    "SelectiveRepeat",
    "ideal_seconds",
    "simulate",
    "simulate_sequence",
]
