"""Sums in sections: for which lengths, and in which trees, they are faster than sums
without sections (``docs/engine.md``).
"""

# Sections are faster between hosts for sums of at least this many bytes, as measured in
# benchmarks/README.md.
SECTIONS_FROM = 64 << 10
# A sum in sections is cut into this many pieces for each rank of the family (the root and
# its children), unless the pieces are then too short or too long.
SECTION_PIECES = 8
# The fraction of the time in which a layer is busy, since layers wait for each other.
_IN_TURNS = 0.9


def pay_in_layers(needs: int, children: int, layers: int, most: int) -> bool:
    """Return whether the network ports of a tree over several hosts are busy for less
    time if its families form sections.

    A family is a parent and its children. It begins its sections once all messages of
    the children are complete, and the children relay only the complete result. So layers wait for each
    other. On the way up and on the way down, each layer adds the time that a port takes
    to send one vector. Without sections, pieces flow through all layers at the same
    time, but all children of a parent fetch the whole result from it.

    ``needs`` is the number of messages that the root needs for its sum. ``layers`` is the
    number of layers of parents below the root. ``most`` is the number of vectors that a
    port sends without sections.
    """
    if not layers:
        return True
    return (needs + children) / (1 + children) + 2 * layers < _IN_TURNS * most
