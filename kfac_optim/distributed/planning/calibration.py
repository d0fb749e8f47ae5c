"""The rates of a cost model, measured on the machines at hand."""

import math
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from kfac_optim.distributed.communication.process_groups import device_of, world
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.linalg.cholesky import damped_cholesky_inverse

_REPEATS = 5

# Wide enough for the rate of large products, narrow enough for seconds on one core.
_DIM = 1024

# Bytes of an all-reduce that bandwidth decides on.
_LARGE = 2**24


def measure_costs(device: torch.device | str | None = None, group: dist.ProcessGroup | None = None) -> CostModel:
    """Measure products, Cholesky inverses and all-reduces; a collective, to be called on all ranks of the group.

    The slowest rank counts, so that all ranks get the same. It takes a second or so. Networks are rarely as the model
    has them: for many nodes, give the bandwidth of one rank's link instead.

    Args:
        device: the device of the model; None is the accelerator, if there is one and the group sends its tensors,
            otherwise the CPU.
        group: the group that trains together; None is all ranks.

    Returns:
        Rates for `DistributedConfig(cost=...)`.

    Raises:
        ValueError: there is one rank, which sends nothing.
    """
    device = device_of(group or world()) if device is None else torch.device(device)
    ranks = dist.get_world_size(group)
    if ranks == 1:
        raise ValueError("kfac_optim: measure_costs needs a process group of several ranks, got one of a single rank.")
    matrix = torch.randn(_DIM, _DIM, device=device)
    spread = (matrix @ matrix.mT / _DIM)[None]
    shift = torch.ones(1, device=device)
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (8, _LARGE))
    measured = torch.tensor(
        [
            _seconds(lambda: matrix @ matrix, device),
            _seconds(lambda: damped_cholesky_inverse(spread, shift), device),
            _seconds(lambda: dist.all_reduce(small, group=group), device),
            _seconds(lambda: dist.all_reduce(large, group=group), device),
        ],
        device=device,
    )
    dist.all_reduce(measured, dist.ReduceOp.MAX, group=group)
    product, inverse, short, long = measured.tolist()
    latency = short / (2 * math.ceil(math.log2(ranks)))
    sending = max(long - short, 1e-9)
    return CostModel(
        flop_rate=2 * _DIM**3 / product,
        bandwidth=2 * (ranks - 1) / ranks * _LARGE / sending,
        latency=latency,
        solver_rate=_DIM**3 / inverse,
    )


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Give the seconds of one call, the median of some."""

    def one() -> float:
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        return time.perf_counter() - start

    one()
    return median(one() for _ in range(_REPEATS))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
