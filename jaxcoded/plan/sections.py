"""Sums in sections: the length from which on, and the trees in which, they are faster
(``docs/engine.md``).
"""

# Bytes of a sum from which on sections are faster between hosts, measured in
# benchmarks/README.md.
SECTIONS_FROM = 64 << 10
# Pieces of such a sum for each rank, if they are neither too short nor too long.
SECTION_PIECES = 8
# Layers that wait for each other are not all busy all of the time.
_IN_TURNS = 0.9


def pay_in_layers(needs: int, children: int, layers: int, most: int) -> bool:
    """Return whether the ports of a tree between hosts are busy for less time if its
    families form sections. Sections begin once all messages of a parent's children are
    complete, and the children get the complete result. So layers wait for each other,
    each for the time that a port takes for a vector, on the way up and on the way down.
    Without sections pieces pipeline through all layers, but all children of a parent
    fetch the whole result from it. ``needs``: messages that suffice for the root's sum;
    ``layers``: of parents below it; ``most``: vectors that a port sends without sections.
    """
    if not layers:
        return True
    return (needs + children) / (1 + children) + 2 * layers < _IN_TURNS * most
