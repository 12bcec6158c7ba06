"""How a round is carried from rank to rank."""

from jaxcoded.transports._transport import Transport as Transport
from jaxcoded.transports._transport import Trip as Trip
