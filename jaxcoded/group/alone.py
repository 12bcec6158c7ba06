"""Detect tasks that one launcher has started, but that MPI treats as separate jobs."""

import os
from collections.abc import Mapping

_MPIRUN = "with the mpirun of the MPI that mpi4py uses"
# For each launcher, the variable with its number of tasks, and the command that makes
# these tasks ranks of one job. The number of tasks of a whole allocation, such as
# SLURM_NTASKS, does not help: an allocation may also run single processes and several
# jobs.
_TASKS = {
    "SLURM_STEP_NUM_TASKS": "by `srun --mpi=pmix` (`srun --mpi=list` lists the types that yours supports)",
    "FLUX_JOB_SIZE": "by `flux run -o pmi=pmix`",
    "JSM_NAMESPACE_SIZE": "by the jsrun of the MPI that mpi4py uses",
    **dict.fromkeys(
        ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"), _MPIRUN
    ),
}


def warning() -> str:
    """Return the warning for this rank, or an empty text."""
    from mpi4py import MPI

    if MPI.Comm.Get_parent() != MPI.COMM_NULL:  # other ranks have spawned this process
        return ""
    return words(MPI.COMM_WORLD.size)


def words(ranks: int, variables: Mapping[str, str] = os.environ) -> str:
    """Return the warning if a launcher has started more tasks than MPI has ``ranks``.
    Otherwise, or if no launcher is known, return an empty text.

    One launcher may run inside another launcher's step, and no variable shows which launcher started this
    process. So the warning appears only if every launcher's number of tasks is larger. A terminal gets no
    warning, since a user who starts a single process there intends it."""
    tasks = {
        name: int(value)
        for name in _TASKS
        if (value := variables.get(name, "")).isascii() and value.isdigit()
        if len(value) < 10
    }
    if not tasks or min(tasks.values()) <= ranks or os.isatty(0):
        return ""
    name, count = min(tasks.items(), key=lambda item: item[1])
    return (
        f"MPI has {ranks} rank{'s' * (ranks > 1)}, but {name}={count}: "
        f"{'each task' if ranks == 1 else 'this part of the tasks'} trains alone. Start the program {_TASKS[name]}, or "
        f"one `jaxcoded run -n {count}` in place of all tasks"
    )
