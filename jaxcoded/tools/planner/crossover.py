import dataclasses

from jaxcoded.tools.simulator import Layout, Network, simulate

# Try sums of 2**12 to 2**26 bytes. A shorter sum is sent in a control message.
_LEAST, _MOST = 12, 26


def sections_pay_from(layout: Layout, network: Network) -> int:
    """Return the smallest size in bytes, a power of two, for which sections make a sum faster if no rank is late.
    Return 0 if sections are not faster up to 64 MiB.

    On slow links sections are faster even for short sums, since the root's link is the bottleneck. But sections
    add latency."""
    smallest = 0
    for power in range(_MOST, _LEAST - 1, -1):
        in_sections, by_root = (
            simulate(
                layout,
                dataclasses.replace(network, sections_from=least),
                payload=2.0**power,
                work=0.0,
                rounds=2,
            ).seconds[-1]
            for least in (1, 0)
        )
        if in_sections >= by_root:
            break
        smallest = 1 << power
    return smallest
