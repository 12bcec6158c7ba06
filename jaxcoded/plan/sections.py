"""Sums in sections: from which length, and in which trees, they are faster than other
sums (``docs/engine.md``).
"""

# Sections are faster between hosts for sums of at least this many bytes, as measured in
# benchmarks/README.md.
SECTIONS_FROM = 64 << 10
# The number of pieces of such a sum for each rank of the family, if the pieces are then
# neither too short nor too long.
SECTION_PIECES = 8
# The fraction of the time for which a layer is busy, since layers wait for each other.
_IN_TURNS = 0.9


def pay_in_layers(needs: int, children: int, layers: int, most: int) -> bool:
    """Return whether the ports of a tree between hosts are busy for less time if its
    families form sections.

    Sections begin once all messages of a parent's children are complete, and the
    children get the complete result. So layers wait for each other. On the way up and
    on the way down, each layer adds the time that a port takes to send one vector.
    Without sections, pieces flow through all layers at the same time, but all children
    of a parent fetch the whole result from it.

    ``needs`` is the number of messages that suffice for the root's sum. ``layers`` is the
    number of layers of parents below the root. ``most`` is the number of vectors that a
    port sends without sections.
    """
    if not layers:
        return True
    return (needs + children) / (1 + children) + 2 * layers < _IN_TURNS * most
