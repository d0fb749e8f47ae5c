"""Runs functions on processes that form a group, and fails, instead of stalling, where they hang or die."""

import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from helpers.device import pickled_for_host, work_on_cuda

# Processes that wait for one that failed are given this long to fail on their own, for the sake of their messages.
GRACE = 10.0
STARTING = 120.0
LEAVING = 2.0


class RankError(AssertionError):
    """Some rank raised, died or hung; says what became of each."""


@dataclass
class _Worker:
    process: ForkServerProcess
    connection: Connection


class Ranks:
    """P processes that stay; after a failure the next call starts new ones.

    All are forked off one process that has imported what they need, which costs seconds, and has done nothing else.

    Args:
        world_size: P.
        cuda: whether they work on CUDA devices, and form a group over NCCL in the place of gloo.
    """

    def __init__(self, world_size: int, *, cuda: bool = False) -> None:
        self.world_size = world_size
        self._cuda = cuda
        self._workers: list[_Worker] = []

    def run(self, function: Callable[..., Any], *args: object, timeout: float = 60.0) -> list[Any]:
        """Call `function(rank, *args)` on every rank, with the default process group set up.

        Args:
            function: at the top of a module, so that it can be pickled.
            args: for all ranks.
            timeout: seconds after which all processes are killed.

        Returns:
            What each rank returned.

        Raises:
            RankError: with the traceback, the exit code or the silence of each rank.
        """
        self._start()
        for worker in self._workers:
            worker.connection.send_bytes(pickle.dumps((function, args)))
        return self._collect(function.__name__, timeout)

    def stop(self, leaving: float = LEAVING) -> None:
        """Let idle processes return, so that a measurement of what they ran is written; kill all others.

        Args:
            leaving: seconds until they are killed.
        """
        for worker in self._workers:
            worker.connection.close()
        deadline = time.monotonic() + leaving
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        if self._workers:
            self._folder.cleanup()
        self._workers = []

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def _start(self) -> None:
        if self._workers:
            return
        context = get_context("forkserver")
        context.set_forkserver_preload(["pytest", "hypothesis", "kfac_optim.distributed"])
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = Path(self._folder.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = rank, self.world_size, str(store), theirs, self._cuda
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))
        self._collect("start", STARTING)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        answers = self._answers(timeout)
        if any(failed for failed, _ in answers):
            self.stop()
            told = "\n".join(f"-- rank {rank}: {told}" for rank, (_, told) in enumerate(answers))
            raise RankError(f"{what} on {self.world_size} ranks\n{told}")
        return [value for _, value in answers]

    def _answers(self, timeout: float) -> list[tuple[bool, Any]]:
        """Of each rank whether it failed, and what it told."""
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size and (left := deadline - time.monotonic()) > 0:
            open_ = {w.connection: rank for rank, w in enumerate(self._workers) if rank not in answers}
            for connection in wait(list(open_), left):
                rank = open_[connection]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(self._workers[rank].connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank].process
                    process.join()
                    answers[rank] = True, f"died, exit code {process.exitcode}"
                if answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        silent = True, f"no answer after {timeout:g} s"
        return [answers.get(rank, silent) for rank in range(self.world_size)]


def _serve(rank: int, world_size: int, store: str, connection: Connection, cuda: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which kills its children
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        work_on_cuda(rank) if cuda else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    answer: tuple[bool, Any] = (False, None)
    while True:
        # Pickled here, so that tensors travel by value, and not as memory that a killed process shared.
        connection.send_bytes(pickled_for_host(answer))
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(request)
            answer = False, function(rank, *args)
        except BaseException:
            answer = True, traceback.format_exc()
