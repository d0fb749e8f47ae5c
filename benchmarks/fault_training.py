"""What `benchmarks.faults` starts and kills: a training loop that goes on from its last checkpoint, whoever is left.

Run by torchrun: `torchrun --nproc-per-node 2 --max-restarts 3 -m benchmarks.fault_training --folder runs --steps 200`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import arguments
from kfac_optim import KFACOptimizer
from kfac_optim.distributed import DistributedConfig, Replicated, Sharded, Strategy
from kfac_optim.distributed.launch import initialize

EXAMPLES = 64  # of all ranks together, and a multiple of their number
STRATEGIES: dict[str, Strategy] = {"sharded": Sharded(), "replicated": Replicated()}


class Beacon:
    """Tells in a file where this rank is."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT)

    def tell(self, phase: str, step: int) -> None:
        os.pwrite(self._file, f"{os.getpid():10d} {phase:>10s} {step:10d}\n".encode(), 0)


def read_beacon(folder: Path, rank: int) -> tuple[int, str, int] | None:
    """Return process id, phase and step of a rank; None where it has not told."""
    try:
        pid, phase, step = (folder / f"rank-{rank}").read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return int(pid), phase, int(step)


def append(path: Path, line: dict[str, float]) -> None:
    """Append in one write, so that a process that is killed leaves a whole line or none."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, (json.dumps(line) + "\n").encode())
    os.close(file)


def examples(step: int) -> tuple[Tensor, Tensor]:
    """Return the examples of one step, of all ranks: inputs `[EXAMPLES, 64]` and classes."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(EXAMPLES, 64, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :10].argmax(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.LayerNorm(128), nn.Tanh(), nn.Linear(128, 10)]
    return nn.Sequential(*layers).double()


def write_checkpoint(path: Path, model: nn.Module, optimizer: KFACOptimizer, step: int, rank: int) -> None:
    """Write a checkpoint: all ranks call this, rank 0 writes, and the file is there as a whole or not at all."""
    optimizer.consolidate_state_dict()
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)


def train(folder: Path, steps: int, period: int, strategy: Strategy) -> None:
    """Go on from the checkpoint in `folder`, if there is one, to step `steps`."""
    place = initialize("gloo")
    rank, ranks = place.rank, place.world_size
    beacon = Beacon(folder, rank)
    net = network()
    several = ranks > 1
    model = DistributedDataParallel(net) if several else net
    optimizer = KFACOptimizer(
        model,
        lr=0.05,
        momentum=0.9,
        damping=0.03,
        factor_update_period=1,
        inverse_update_period=7,
        distributed=DistributedConfig(strategy=strategy) if several else None,
    )
    checkpoint, log = folder / "checkpoint.pt", folder / "log.jsonl"
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    if rank == 0:
        append(log, {"start": start, "ranks": ranks})
    for step in range(start, steps):
        inputs, classes = (part.chunk(ranks)[rank] for part in examples(step))
        beacon.tell("forward", step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), classes)
        beacon.tell("backward", step)
        loss.backward()  # type: ignore[no-untyped-call]
        beacon.tell("step", step)
        optimizer.step()
        mean = loss.detach() / ranks
        if several:
            dist.all_reduce(mean)
        if rank == 0:
            append(log, {"step": step, "loss": float(mean)})
        if (step + 1) % period == 0:
            beacon.tell("checkpoint", step)
            write_checkpoint(checkpoint, net, optimizer, step + 1, rank)
    if several:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoint and log")
    parser.add_argument("--steps", type=arguments.positive_int, required=True)
    parser.add_argument("--period", type=arguments.positive_int, default=5, help="steps between checkpoints")
    parser.add_argument("--strategy", choices=[*STRATEGIES], default="sharded")
    args = parser.parse_args()
    train(args.folder, args.steps, args.period, STRATEGIES[args.strategy])


if __name__ == "__main__":
    main()
