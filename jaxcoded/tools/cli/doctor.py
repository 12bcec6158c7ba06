"""Check whether jaxcoded has everything that it needs, and name remedies.

    jaxcoded doctor -n 4

The command examines the installation and the machine. Then it starts the given number of ranks, which compute sums
together. The status is 1 if a finding is bad.
"""

import ast
import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import click

from jaxcoded import _format, _require
from jaxcoded.tools.doctor import findings, machine
from jaxcoded.tools.doctor.findings import BAD, GOOD, NOTE, Finding
from jaxcoded.tools.launch import asking, launcher, misfits, places
from jaxcoded.tools.terminal import output

_PROGRAM = ["-m", "mpi4py", "-m", "jaxcoded.tools.doctor.trial"]


@click.command("doctor")
@click.option(
    *places.RANKS,
    type=int,
    default=2,
    show_default=True,
    help="Number of ranks that compute sums together.",
)
@places.options
@output.json_option
def command(ranks: int, mpirun: str | None, json: bool, **where: str | None) -> int:
    """Print the findings, and return the status."""
    ranks = _require.integer("--ranks", ranks, 1, places.MOST_RANKS)
    chosen: launcher.Launcher | str
    try:
        chosen = launcher.located(mpirun)
    except ValueError as error:
        chosen = str(error)
    results = list(machine.examined(ranks, chosen))
    if isinstance(chosen, str) or any(each.state == BAD for each in results):
        words = "were not started, because of the bad findings above"
        results.append(Finding("ranks", BAD, words, "apply their remedies first"))
    else:
        results += _tried(ranks, chosen, where)
    if json:
        output.as_json([dataclasses.asdict(each) for each in results])
    else:
        findings.show(results)
    return int(any(each.state == BAD for each in results))


def _tried(
    ranks: int, mpirun: launcher.Launcher, where: dict[str, str | None]
) -> Iterator[Finding]:
    """Yield the findings of a job of ``ranks`` ranks."""
    try:
        everything = asking.answered(mpirun, ranks, _PROGRAM, **where)
        if not (isinstance(everything, list) and all(map(_is_of_rank, everything))):
            raise asking.unreadable(ranks, everything)
    except asking.NoAnswer as failure:
        yield Finding("ranks", BAD, failure.problem, failure.remedy)
        if kinds := misfits.suspects():
            words = f"MPI and mpirun read {misfits.listed(kinds.values())}"
            yield Finding("variables", NOTE, words, "try without these variables")
        return
    yield from _of_ranks(ranks, everything)


def _is_of_rank(value: Any) -> bool:
    """Return whether this value has the form of a rank's findings; see
    `doctor.trial`."""
    return (
        isinstance(value, dict)
        and all(isinstance(value.get(key), kind) for key, kind in _KINDS.items())
        and all(isinstance(each, str) for each in value["devices"])
        and len(value["took"]) == 2
        and all(map(_require.is_positive, value["took"]))
    )


def _of_ranks(ranks: int, everything: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield the findings of all ranks. Findings that are equal on all ranks appear
    once."""

    def reports(key: str) -> Iterator[tuple[str, str]]:
        """Return each nonempty text, and the ranks that report it."""
        who = collections.defaultdict(list)
        for each in everything:
            who[str(each[key])].append(each["rank"])
        for words, numbers in who.items():
            if words:
                yield words, "" if len(numbers) == ranks else f"ranks {numbers}: "

    if len(everything) != ranks:
        yield Finding(
            "ranks",
            BAD,
            f"{ranks} were started, but MPI sees {len(everything)}",
            "use the mpirun of the MPI that mpi4py was built for: --mpirun",
        )
        return
    hosts = sorted({each["host"] for each in everything})
    yield Finding("ranks", GOOD, f"{ranks} on {', '.join(hosts)}")
    libraries = [who + words for words, who in reports("library")]
    if len(libraries) == 1:
        yield Finding("MPI", GOOD, libraries[0])
    else:
        yield Finding("MPI", BAD, "; ".join(libraries), _REMEDIES["library"])
    for words, who in reports("threads"):
        if words == machine.MULTIPLE:
            yield Finding("MPI threads", GOOD, who + words)
        else:
            yield Finding("MPI threads", NOTE, who + words, _REMEDIES["threads"])
    for name, state in (("mpi4jax", BAD), ("engine", NOTE), ("cuda_aware", BAD)):
        for words, who in reports(name):
            yield Finding(name.replace("_", "-"), state, who + words, _REMEDIES[name])
    if not any(each["engine"] for each in everything):
        yield Finding("engine", GOOD, "can be used")
    if not all(each["reads"] for each in everything):
        yield Finding(
            "reading",
            NOTE,
            "ranks of one host cannot read each other's memory: long messages are copied once more",
            "in a container allow process_vm_readv: docker run --cap-add=SYS_PTRACE",
        )
    else:
        yield Finding("reading", GOOD, "ranks of one host read each other's memory")
    for words, who in reports("devices"):
        kinds = collections.Counter(ast.literal_eval(words))
        listed = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        yield Finding("devices", GOOD, f"{who}{listed} each")
    idle = [
        each["rank"]
        for each in everything
        if each["driver"] and each["backend"] == "cpu"
    ]
    if idle:
        yield Finding(
            "GPUs",
            NOTE,
            f"ranks {idle}: there is an NVIDIA driver, but JAX sees only CPUs",
            'pip install "jax[cuda13]" or "jax[cuda12]", as the driver allows; and leave JAX_PLATFORMS and '
            "CUDA_VISIBLE_DEVICES unset",
        )
    if wrong := sum(each["wrong"] for each in everything):
        yield Finding("sums", BAD, f"{wrong} of them are wrong", _REMEDIES["wrong"])
        return
    small, large = (
        _format.seconds(max(each["took"][i] for each in everything)) for i in (0, 1)
    )
    transport = everything[0]["transport"]
    words = f"exact on all ranks, over {transport}; {small} for one number, {large} for 4 MiB"
    yield Finding("sums", GOOD, words)


_KINDS = {
    **dict.fromkeys(
        ("host", "library", "engine", "mpi4jax", "cuda_aware", "threads", "backend"),
        str,
    ),
    **dict.fromkeys(("rank", "wrong"), int),
    **dict.fromkeys(("devices", "took"), list),
    "transport": str,
    **dict.fromkeys(("reads", "driver"), bool),
}
_REMEDIES = {
    "library": "install the same MPI, mpi4py and jaxcoded on all hosts",
    "threads": "the engine needs MPI_THREAD_MULTIPLE: leave mpi4py.rc.thread_level as it is, or use an MPI that is "
    "built for it",
    "wrong": "memory, a network or the MPI corrupts numbers: run with fewer --hosts to find the faulty host, and try "
    "another MPI",
    "mpi4jax": "install it again, built for this MPI: pip install --no-cache-dir --no-binary "
    "mpi4jax --no-build-isolation mpi4jax",
    "engine": "without the engine, groups use mpi4jax, wait for all ranks, and cannot share work (docs/engine.md)",
    "cuda_aware": "MPI4JAX_USE_CUDA_MPI=0, or an MPI that is built with CUDA",
}
