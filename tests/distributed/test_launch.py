"""Environments as launchers leave them, and processes that find each other by them."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from kfac_optim.distributed import launch
from kfac_optim.distributed.launch import Launcher, ProcessPlace, find_place

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29401",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "10.0.0.7"}
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_NTASKS": "64",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-16]",
}
SLURM_PORT = 15000 + 123402 % 15000


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, ProcessPlace(Launcher.NONE, 0, 0, 1, "127.0.0.1", 29500)),
        (TORCHRUN, ProcessPlace(Launcher.TORCHRUN, 5, 1, 8, "node0", 29401)),
        (OPEN_MPI, ProcessPlace(Launcher.OPEN_MPI, 2, 2, 4, "127.0.0.1", 29500)),
        (HYDRA, ProcessPlace(Launcher.HYDRA, 3, 1, 4, "10.0.0.7", 29500)),
        (SLURM, ProcessPlace(Launcher.SLURM, 6, 2, 8, "gpu03", SLURM_PORT)),
        # MASTER_ADDR and MASTER_PORT count with every launcher.
        (
            SLURM | {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "4000"},
            ProcessPlace(Launcher.SLURM, 6, 2, 8, "fd00::1", 4000),
        ),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "4000"}, ProcessPlace(Launcher.NONE, 0, 0, 1, "127.0.0.1", 29500)),
        # The innermost launcher counts.
        (SLURM | OPEN_MPI | TORCHRUN, ProcessPlace(Launcher.TORCHRUN, 5, 1, 8, "node0", 29401)),
        (SLURM | OPEN_MPI, ProcessPlace(Launcher.OPEN_MPI, 2, 2, 4, "127.0.0.1", 29500)),
        (SLURM | HYDRA, ProcessPlace(Launcher.HYDRA, 3, 1, 4, "10.0.0.7", 29500)),
        # srun with PMI sets its variables, but is no Hydra.
        (SLURM | {"PMI_RANK": "6", "PMI_SIZE": "8"}, ProcessPlace(Launcher.SLURM, 6, 2, 8, "gpu03", SLURM_PORT)),
        # An address that is empty is none.
        (OPEN_MPI | {"MASTER_ADDR": ""}, ProcessPlace(Launcher.OPEN_MPI, 2, 2, 4, "127.0.0.1", 29500)),
        (
            SLURM | {"MASTER_ADDR": "", "SLURM_STEP_NODELIST": ""},
            ProcessPlace(Launcher.SLURM, 6, 2, 8, "gpu01", SLURM_PORT),
        ),
        # A batch script runs once, on the first node, and is no step.
        (
            {name: value for name, value in SLURM.items() if "STEP" not in name},
            ProcessPlace(Launcher.NONE, 0, 0, 1, "127.0.0.1", 29500),
        ),
    ],
)
def test_the_place_of_a_process_is_read_from_the_variables_of_its_launcher(
    environ: Mapping[str, str], place: ProcessPlace
) -> None:
    assert find_place(environ) == place


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node9", "node7"),
        ("gpu[003-006,011],login1", "gpu003"),
        ("gpu[11,13-14]", "gpu11"),
        ("r[1-2]n[05-09],r3n1", "r1n05"),
        ("host[1-2]-ib.cluster", "host1-ib.cluster"),
        ("a-b.c,d[1-2]", "a-b.c"),
    ],
)
def test_the_first_machine_of_a_step_is_where_rank_0_runs(nodes: str, first: str) -> None:
    assert find_place(SLURM | {"SLURM_STEP_NODELIST": nodes}).address == first
    job = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}
    assert find_place(job | {"SLURM_JOB_NODELIST": nodes}).address == first


def test_jobs_and_steps_that_share_a_machine_have_ports_of_their_own() -> None:
    ports = [
        find_place(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(10**6, 10**6 + 20)
        for step in range(5)
    ]
    assert len(set(ports)) == len(ports)
    assert all(15000 <= port < 30000 for port in ports)


def test_all_that_is_missing_is_named_at_once_and_what_is_there_once() -> None:
    with pytest.raises(ValueError, match=r"kfac_optim: RANK, MASTER_PORT in the env.* there is no LOCAL_RANK, no W"):
        find_place({"RANK": "1", "MASTER_PORT": "1"})


def without(environ: Mapping[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        *((TORCHRUN, name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        *((OPEN_MPI, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "LOCAL_RANK", "SIZE")),
        *((HYDRA, name) for name in ("PMI_RANK", "PMI_SIZE")),
        *((SLURM, f"SLURM_{name}") for name in ("PROCID", "LOCALID", "STEP_NUM_TASKS")),
    ],
)
def test_a_variable_that_is_missing_is_named_with_the_launcher(environ: Mapping[str, str], name: str) -> None:
    launcher = find_place(environ).launcher
    with pytest.raises(ValueError, match="kfac_optim: ") as error:
        find_place(without(environ, name))
    assert f"say that {launcher.value} started this process, but there is no {name}. Start" in str(error.value)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK in the environment must be an integer from 0 to 7, got '8'"),
        (TORCHRUN | {"RANK": "-1"}, "RANK in the environment must be an integer from 0 to 7, got '-1'"),
        (TORCHRUN | {"LOCAL_RANK": "x"}, "LOCAL_RANK in the environment must be an integer from 0 to 7, got 'x'"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE in the environment must be an integer at least 1, got '0'"),
        (TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE in the environment must be an integer at least 1, got ''"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR in the environment must name the machine of rank 0, got ''"),
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT in the environment must be an integer from 1 to 65535"),
        (OPEN_MPI | {"MASTER_PORT": "65536"}, "MASTER_PORT in the environment must be an integer from 1 to 65535"),
        (without(HYDRA, "MASTER_ADDR"), r"Hydra's mpirun .* started 4 processes, .* Set MASTER_ADDR on all of them"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "Open MPI's mpirun started 4 processes"),
        (without(without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST"), "SLURM's srun started 8 processes"),
    ],
)
def test_what_a_variable_cannot_hold_is_refused_by_name(environ: Mapping[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=f"kfac_optim: .*{told}"):
        find_place(environ)


def test_an_address_of_ipv6_is_put_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, dict[str, object]]] = []
    monkeypatch.setattr(launch.dist, "init_process_group", lambda name, **arguments: asked.append((name, arguments)))
    for name, value in (HYDRA | {"MASTER_ADDR": "fd00::1"}).items():
        monkeypatch.setenv(name, value)
    launch.initialize("gloo", timedelta(seconds=7))
    ((backend, arguments),) = asked
    assert (backend, arguments["init_method"]) == ("gloo", "tcp://[fd00::1]:29500")
    assert arguments["timeout"] == timedelta(seconds=7)


FABRIC = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""As its own launcher leaves them: RANK is missing."""


def within(group: tuple[int, int], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a process group in which this process is the rank of so many."""
    monkeypatch.setattr(os, "environ", environ)
    for name, value in (("is_initialized", True), ("get_rank", group[0]), ("get_world_size", group[1])):
        monkeypatch.setattr(launch.dist, name, lambda value=value: value)


@pytest.mark.parametrize(
    ("environ", "local_rank"),
    [({}, 1), (FABRIC, 0), (without(SLURM, "SLURM_LOCALID"), 1)],
    ids=["none", "without RANK", "without SLURM_LOCALID"],
)
def test_a_group_that_there_is_says_the_place_where_the_variables_do_not(
    environ: dict[str, str], local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    within((1, 2), environ, monkeypatch)
    assert launch.initialize() == ProcessPlace(Launcher.NONE, 1, local_rank, 2, "127.0.0.1", 29500)


ON_TWO_MACHINES = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


def test_where_there_is_a_group_a_launcher_need_not_say_where_rank_0_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    within((2, 4), ON_TWO_MACHINES, monkeypatch)
    place = launch.initialize()
    assert (place.launcher, place.rank, place.local_rank) == (Launcher.OPEN_MPI, 2, 1)


@pytest.mark.parametrize(
    "environ",
    [ON_TWO_MACHINES, {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}],
    ids=["Open MPI", "torchrun"],
)
def test_a_group_that_variables_without_an_address_contradict_is_refused(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    within((3, 8), environ, monkeypatch)
    with pytest.raises(RuntimeError, match="this process is rank 3 of 8, but the environment says rank 2 of 4"):
        launch.initialize()


def together(store: dist.Store, ranks: Sequence[int], of: int, seconds: float = 10) -> list[dist.Store]:
    """What these ranks of a start find, each in a thread."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        going = [pool.submit(launch._fresh_part, store, rank, of, timedelta(seconds=seconds)) for rank in ranks]
        return [each.result() for each in going]


def test_all_ranks_find_a_part_of_the_store_that_no_earlier_start_has_used() -> None:
    store = dist.HashStore()
    first = together(store, [0, 1, 2], of=3)
    first[0].set("address", "of a process that is gone")
    with pytest.raises(RuntimeError, match=r"rank 2 of 3 waited 0.1 s for rank 0 to start, which may itself"):
        together(store, [2], of=3, seconds=0.1)
    with pytest.raises(RuntimeError, match=r"rank 0 of 3 waited 0.1 s for ranks 1, 2 to start"):
        together(store, [0], of=3, seconds=0.1)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(together, store, [1, 2], 3)
        time.sleep(0.1)  # they see what earlier starts have left
        (second,) = together(store, [0], of=3)
        second.set("address", "of rank 0")
        assert [each.get("address") for each in late.result()] == [b"of rank 0"] * 2


# -- processes ---------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from kfac_optim.distributed.launch import initialize

all_told, own = [], dict(os.environ)
for variables in json.loads(sys.argv[2]):
    os.environ |= variables
    place = initialize()
    again = initialize()
    total = torch.tensor(float(10 ** place.rank))
    dist.all_reduce(total)
    told = [place.launcher.name, place.rank, place.local_rank, dist.get_rank(), dist.get_world_size(), total.item()]
    prefix = {"TORCHRUN": "", "OPEN_MPI": "OMPI_COMM_WORLD_", "HYDRA": "PMI_"}[place.launcher.name]
    rank, size = f"{prefix}RANK", f"{prefix}SIZE" if prefix else "WORLD_SIZE"
    os.environ |= {rank: "7", size: "8", "MASTER_ADDR": "127.0.0.1"}
    try:
        initialize()
    except RuntimeError as error:
        told += [again == place, str(error)]
    all_told.append(told)
    dist.destroy_process_group()
    os.environ.clear()
    os.environ |= own
Path(sys.argv[1], str(place.rank)).write_text(json.dumps(all_told))
"""


def environment(**variables: str) -> dict[str, str]:
    """Of a child: this one's without what a launcher of these tests may have left."""
    own = {name: value for name, value in os.environ.items() if not re.match("SLURM_|PMI|MPI_|OMPI_|MASTER_", name)}
    package = str(Path(__file__).parents[2])
    return own | {"OMP_NUM_THREADS": "1", "PYTHONPATH": package, "GLOO_SOCKET_IFNAME": "lo"} | variables


def finish(processes: Sequence[subprocess.Popen[str]], folder: Path) -> list[Any]:
    """What each of two processes told, or what they printed."""
    try:
        printed = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.terminate()  # not kill: torchrun passes it on to its workers
    assert all(process.returncode == 0 for process in processes), "\n".join(printed)
    return [json.loads((folder / str(rank)).read_text()) for rank in range(2)]


def check(told: Sequence[list[object]], launcher: Launcher) -> None:
    for rank, (name, found, local, real, world_size, total, same, error) in enumerate(told):
        assert (name, found, local, real, world_size, total) == (launcher.name, rank, rank, rank, 2, 11)
        assert same
        assert isinstance(error, str)
        assert f"this process is rank {rank} of 2, but the environment says rank 7 of 8 ({launcher.value})" in error


def start(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


DIES = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from kfac_optim.distributed.launch import initialize

place, marker = initialize(), Path(sys.argv[1], "killed")
if place.rank == 1 and not marker.exists():
    marker.touch()
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(())
dist.all_reduce(total)
Path(sys.argv[1], str(place.rank)).write_text(str(int(total)))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_on_two_machines_form_a_group_again_after_one_was_killed(tmp_path: Path) -> None:
    """Of which torchrun counts the restart on one of them alone."""
    (tmp_path / "program.py").write_text(DIES)
    machine = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=2"]
    machine += ["--monitor-interval=0.1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    machine += ["--local-addr=127.0.0.1", str(tmp_path / "program.py"), str(tmp_path)]
    assert finish([start(machine, environment()) for _ in range(2)], tmp_path) == [2, 2]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def open_mpi(rank: int) -> dict[str, str]:
    places = {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
    return places | {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}


def hydra(rank: int) -> dict[str, str]:
    return {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": "2"}


def torchrun(rank: int) -> dict[str, str]:
    """Itself it is at work where ranks are killed."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.slow
def test_two_processes_with_the_variables_of_a_launcher_form_a_group(tmp_path: Path) -> None:
    """The same two have those of one launcher after the other, as a process takes seconds to start."""
    launchers: dict[Launcher, Callable[[int], dict[str, str]]] = {
        Launcher.TORCHRUN: torchrun, Launcher.OPEN_MPI: open_mpi, Launcher.HYDRA: hydra,
    }  # fmt: skip
    ports = [free_port() for _ in launchers]
    turns = [
        [variables(rank) | {"MASTER_PORT": port} for variables, port in zip(launchers.values(), ports, strict=True)]
        for rank in range(2)
    ]
    started = [start(["-c", PROGRAM, str(tmp_path), json.dumps(each)], environment()) for each in turns]
    for launcher, *told in zip(launchers, *finish(started, tmp_path), strict=True):
        check(told, launcher)


def test_without_a_launcher_no_group_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    place = launch.initialize()
    assert (place.launcher, place.world_size, dist.is_initialized()) == (Launcher.NONE, 1, False)
