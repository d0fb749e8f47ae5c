"""Which launcher started this process, which of its processes it is, and the process group they form.

torchrun, mpirun (Open MPI; Hydra, which MPICH and Intel MPI share) and SLURM's srun each tell a process its place in
variables of their own. The innermost counts: srun may start mpirun, and either may start torchrun.
"""

import os
import re
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from kfac_optim.distributed.communication.launches import listed_ranks

# torch's own default.
_PORT = 29500

# Ports for SLURM's steps: below those that systems hand out by themselves (from 32768 on Linux), above those of
# well-known services. Steps of one job have neighbouring ones, and neighbouring jobs lie a hundred apart, so that what
# shares a machine does not meet.
_SLURM_PORTS = range(15000, 30000)


# Key under which rank 0 of a start names its part of the store, and seconds from look to look.
_START = "kfac_optim/start"
_PAUSE = 0.02


class Launcher(Enum):
    """Says which launcher started the processes."""

    NONE = "no launcher"
    TORCHRUN = "torchrun"
    """The launcher is torchrun, or whatever sets the same variables."""
    OPEN_MPI = "Open MPI's mpirun"
    HYDRA = "Hydra's mpirun (MPICH, Intel MPI)"
    SLURM = "SLURM's srun"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Says which of the processes that were started together this one is.

    Attributes:
        launcher: the launcher that started them.
        rank: its number.
        local_rank: its number among those on the same machine: the accelerator to use is the one of that number.
        world_size: how many there are.
        address: the address of the machine of rank 0.
        port: the port on that machine by which the processes find each other.
    """

    launcher: Launcher
    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class _Variables:
    """Names the environment variables of a launcher.

    Attributes:
        marks: it is at work where one of these is set.
        rank: the variable that holds the rank; the next two likewise, as in `ProcessPlace`.
        local_size: the variable that holds the number of processes on this machine; None if the launcher has none.
    """

    launcher: Launcher
    marks: tuple[str, ...]
    rank: str
    local_rank: str
    world_size: str
    local_size: str | None


# From the innermost to the outermost. PMI_RANK does not mark Hydra, as srun may set it too, though not MPI_LOCALRANKID.
# SLURM_PROCID does not mark a step of srun: the batch script has it as well, which runs once whatever the tasks.
_LAUNCHERS = (
    _Variables(Launcher.TORCHRUN, ("RANK", "WORLD_SIZE"), "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    _Variables(
        Launcher.OPEN_MPI,
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables(Launcher.HYDRA, ("MPI_LOCALRANKID",), "PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "MPI_LOCALNRANKS"),
    _Variables(Launcher.SLURM, ("SLURM_STEP_ID",), "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", None),
)


def find_place(environ: Mapping[str, str]) -> ProcessPlace:
    """Return the place that the launcher's variables give this process; rank 0 of 1 if no launcher left any.

    MASTER_ADDR and MASTER_PORT count with every launcher. Without them the address is that of the first machine of the
    step under SLURM, and this one's where all processes run here; the port is 29500, or one by the number of SLURM's
    job and step.

    Raises:
        ValueError: a variable is missing, or holds what it cannot; says which, and which launcher should have set it.
    """
    for variables in _LAUNCHERS:
        if _is_at_work(variables, environ):
            return _place(variables, environ)
    return ProcessPlace(Launcher.NONE, 0, 0, 1, "127.0.0.1", _PORT)


def initialize(backend: str | None = None, timeout: timedelta | None = None) -> ProcessPlace:
    """Form the process group that the launcher's variables describe, unless there is one.

    To be called first in the program. The accelerator is chosen by the caller, before or after:

        place = initialize()
        if torch.cuda.is_available():
            torch.cuda.set_device(place.local_rank)

    Without a launcher nothing is formed: the program runs alone, as it would without this call. There may be a process
    group already, and no launcher that has left all of its variables, as under `torch.multiprocessing.spawn`. Then the
    group says the place, and the local rank is LOCAL_RANK, or where that is missing the rank, as on one machine. A
    group that there is needs no address: where the launcher has left none, that of this machine stands for it.

    Args:
        backend: the backend, as for `torch.distributed.init_process_group`; None takes gloo for the CPU and NCCL for
            CUDA.
        timeout: the time-out of the collectives, as for `init_process_group`.

    Raises:
        ValueError: see `find_place`.
        RuntimeError: there is a process group already, of another size or with another rank than the variables say; or
            some rank did not start within the time-out, under torchrun.
    """
    if dist.is_initialized():
        return _place_in_group(os.environ)
    place = find_place(os.environ)
    if place.launcher is Launcher.TORCHRUN:
        # By way of the variables: torchrun may keep the store itself, and says so in further ones.
        found = rendezvous("env://") if timeout is None else rendezvous("env://", timeout=timeout)
        store, rank, world_size = next(found)
        store = _fresh_part(store, rank, world_size, timeout or default_pg_timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    elif place.launcher is not Launcher.NONE:
        host = f"[{place.address}]" if ":" in place.address else place.address
        dist.init_process_group(
            backend,
            init_method=f"tcp://{host}:{place.port}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )
    return place


def _fresh_part(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a part of the store that no process has used but those that are starting now; all ranks come here.

    torchrun keeps its store over restarts (torch 2.13), with addresses of processes that are gone, for which gloo would
    wait. Nothing in the environment tells all ranks which restart it is: TORCHELASTIC_RESTART_COUNT counts the failures
    that one machine has seen, and none where machines come and go. So rank 0 draws a name, each other rank answers
    under that name by one of its own, and rank 0 lists the answers: a list in which a rank finds its own is not one
    that an earlier start has left.

    Raises:
        RuntimeError: some rank did not come within the time-out.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    missing = list(range(1, world_size)) if rank == 0 else [0]
    answers: list[str] = []
    if rank == 0:
        store.set(_START, own)
    while time.monotonic() < deadline:
        if rank != 0 and store.check([_START]):
            name = store.get(_START).decode()
            store.set(f"{name}/{rank}", own)
            if store.check([f"{name}/all"]) and own in store.get(f"{name}/all").decode().split():
                return PrefixStore(name, store)
        if rank == 0:
            came = [other for other in missing if store.check([f"{own}/{other}"])]
            answers += [store.get(f"{own}/{other}").decode() for other in came]
            missing = [other for other in missing if other not in came]
            if not missing:
                store.set(f"{own}/all", " ".join(answers))
                return PrefixStore(own, store)
        time.sleep(_PAUSE)
    # Whether it was rank 0 of this start or of an earlier one that has left a name, another rank cannot tell.
    awaited = "" if rank == 0 else ", which may itself have waited for others (its error names them)"
    raise RuntimeError(
        f"kfac_optim: rank {rank} of {world_size} waited {timeout.total_seconds():g} s for {listed_ranks(missing)} to "
        f"start{awaited}. See that all processes come to initialize(), and look for the first error in their logs."
    )


def _is_at_work(variables: _Variables, environ: Mapping[str, str]) -> bool:
    return any(mark in environ for mark in variables.marks)


def _place(variables: _Variables, environ: Mapping[str, str]) -> ProcessPlace:
    launcher = variables.launcher
    needed = [variables.rank, variables.local_rank, variables.world_size]
    if launcher is Launcher.TORCHRUN:
        needed += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if name not in environ]
    if missing:
        found = ", ".join(name for name in dict.fromkeys((*variables.marks, *needed)) if name in environ)
        outer = [each for each in _LAUNCHERS[_LAUNCHERS.index(variables) + 1 :] if _is_at_work(each, environ)]
        raise ValueError(
            f"kfac_optim: {found} in the environment say that {launcher.value} started this process, but there is no "
            f"{', no '.join(missing)}. Start the program by {launcher.value}, or set all of {', '.join(needed)}; unset "
            f"{found} to {f'go by {outer[0].launcher.value}' if outer else 'run alone'}."
        )
    world_size = _integer(variables.world_size, environ, at_least=1)
    rank = _integer(variables.rank, environ, at_most=world_size - 1)
    return ProcessPlace(
        launcher,
        rank,
        _integer(variables.local_rank, environ, at_most=world_size - 1),
        world_size,
        _address(variables, environ, world_size),
        _port(launcher, environ),
    )


def _integer(name: str, environ: Mapping[str, str], *, at_least: int = 0, at_most: int | None = None) -> int:
    text = environ[name]
    number = int(text) if re.fullmatch(r"\d+", text) else -1
    if number < at_least or (at_most is not None and number > at_most):
        bounds = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"kfac_optim: {name} in the environment must be an integer {bounds}, got {text!r}.")
    return number


def _address(variables: _Variables, environ: Mapping[str, str], world_size: int) -> str:
    if address := environ.get("MASTER_ADDR"):
        return address
    if variables.launcher is Launcher.TORCHRUN:
        raise ValueError("kfac_optim: MASTER_ADDR in the environment must name the machine of rank 0, got ''.")
    if variables.launcher is Launcher.SLURM:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        if nodes:
            return _first_host(nodes)
        raise ValueError(
            f"kfac_optim: {variables.launcher.value} started {world_size} processes, and neither SLURM_STEP_NODELIST "
            "nor SLURM_JOB_NODELIST says where rank 0 runs. Set MASTER_ADDR on all of them."
        )
    if variables.local_size is not None and environ.get(variables.local_size) == str(world_size):
        return "127.0.0.1"
    raise ValueError(
        f"kfac_optim: {variables.launcher.value} started {world_size} processes, as it seems on several machines, and "
        f"does not say where rank 0 runs. Set MASTER_ADDR on all of them, by `-x MASTER_ADDR=...` with Open MPI and "
        f"`-genv MASTER_ADDR ...` with Hydra."
    )


def _first_host(nodes: str) -> str:
    """Give the first host of a list as SLURM writes it: `gpu[03-06,11],login1` starts with `gpu03`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None, "it matches the empty string too"
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _port(launcher: Launcher, environ: Mapping[str, str]) -> int:
    if "MASTER_PORT" in environ:
        return _integer("MASTER_PORT", environ, at_least=1, at_most=65535)
    if launcher is Launcher.SLURM and "SLURM_JOB_ID" in environ:
        number = 100 * _integer("SLURM_JOB_ID", environ) + _integer("SLURM_STEP_ID", environ)
        return _SLURM_PORTS[number % len(_SLURM_PORTS)]
    return _PORT


def _place_in_group(environ: Mapping[str, str]) -> ProcessPlace:
    """Return the place of this process in the process group that there is.

    Raises:
        RuntimeError: a launcher has left another.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    usual = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORT)}
    given = {name: value for name, value in environ.items() if value}
    place = find_place({})
    # A launcher that has left no address may say the place all the same, and a group that there is needs no address.
    for variables in (environ, usual | given):
        with suppress(ValueError):  # variables that do not say a place do not contradict the group
            place = find_place(variables)
            break
    if place.launcher is Launcher.NONE:
        local_rank = environ.get("LOCAL_RANK", "")
        return replace(
            place, rank=rank, local_rank=int(local_rank) if local_rank.isdecimal() else rank, world_size=world_size
        )
    if (rank, world_size) != (place.rank, place.world_size):
        raise RuntimeError(
            f"kfac_optim: there is a process group already, in which this process is rank {rank} of {world_size}, but "
            f"the environment says rank {place.rank} of {place.world_size} ({place.launcher.value}). Call initialize() "
            f"first, instead of torch.distributed.init_process_group, or not at all."
        )
    return place
