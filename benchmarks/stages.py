"""What `python -m benchmarks everything` runs: each result in benchmarks/results, by the command that makes it.

A test holds the commands against those that the committed results have recorded. Left out are `accelerator`, which
needs a GPU, `scoreboard`, which only reads results, and the counts of tests/fuzz.py, which is no benchmark and goes on
for as long as it is asked to.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stage:
    """Describes one command, and the results that it leaves.

    Attributes:
        results: JSON files without their suffix, in the folder of results; the first names the stage.
        command: its words after ``python -m benchmarks``, but for --out. After --data-dir ``data`` stands for the
            folder of all data sets, and ``mnist`` for the folder of that name in it.
        minutes: the minutes that it takes on two cores, until a run has recorded them.
        leaves: how the names of the command's own files begin, where they do not as the result's does; other files that
            it leaves are then not kept.
        needs_data: whether it measures something else where it is given no --data-dir.
    """

    results: tuple[str, ...]
    command: str
    minutes: float
    leaves: str | None = None
    needs_data: bool = False

    @property
    def name(self) -> str:
        return self.results[0]

    @property
    def benchmark(self) -> str:
        return self.command.partition(" ")[0]

    def words(self, data_dir: Path | None) -> list[str]:
        """Give the command with folders of data; where there is none, it takes them from the hub."""
        words = self.command.split()
        if "--data-dir" in words:
            place = words.index("--data-dir")
            if data_dir is None:
                del words[place : place + 2]
            else:
                words[place + 1] = str(data_dir if words[place + 1] == "data" else data_dir / words[place + 1])
        return words


def matching(word: str) -> list[Stage]:
    """Give the stages of that name, or of that benchmark, or else those with results in that folder.

    Raises:
        argparse.ArgumentTypeError: there are none.
    """
    by_name = [stage for stage in STAGES if word in (stage.name, stage.benchmark)]
    found = by_name or [stage for stage in STAGES if stage.name.startswith(f"{word.rstrip('/')}/")]
    if not found:
        names = ", ".join(dict.fromkeys(stage.benchmark for stage in STAGES))
        raise argparse.ArgumentTypeError(
            f"expected a benchmark ({names}), a result such as {STAGES[0].name}, or a folder of results, got {word!r}"
        )
    return found


def chosen(wanted: Sequence[Sequence[Stage]], skipped: Sequence[Sequence[Stage]]) -> list[Stage]:
    """Give those that are wanted, all where none is named, less those to be skipped, in their order."""
    kept = {stage for some in wanted or [STAGES] for stage in some} - {stage for some in skipped for stage in some}
    return [stage for stage in STAGES if stage in kept]


def _compared(arguments: str, minutes: dict[str, float]) -> Iterator[Stage]:
    """Give a stage for each problem of `compare`, by its name."""
    for name, each in minutes.items():
        yield Stage((f"compare/{name}",), f"compare {name} {arguments}", each)


_KFAC = "KFAC-default KFAC-named KFAC-selected"
_BASELINES = "SGD AdamW Muon L-BFGS Shampoo LAMB MADGRAD AdaBelief SOAP DistributedShampoo"
_ONE_CORE = "--threads 1 --data-dir data"
_NAMED = f"--steps 120 --trials 12 --seeds 2 --optimizers SGD Muon KFAC-named KFAC-selected {_ONE_CORE}"
_TEXTS = f"--optimizers SGD AdamW Muon KFAC-default KFAC-selected {_ONE_CORE}"
_PICTURES = f"--trials 10 --seeds 2 --optimizers SGD Muon KFAC-selected {_ONE_CORE}"
_RANGE_TEST = "range-test digits mnist-mlp scales curves mnist-b lstm transformer"

STAGES = (
    *_compared(f"--trials 10 --seeds 3 --optimizers {_BASELINES} {_KFAC} {_ONE_CORE}", {"digits": 5}),
    *_compared(
        f"--trials 10 --seeds 3 --optimizers SGD AdamW Muon SOAP {_KFAC} {_ONE_CORE}", {"scales": 4, "mnist-mlp": 10}
    ),
    *_compared(_NAMED, {"curves": 8, "mnist-b": 30}),
    *_compared(f"--trials 12 --seeds 3 {_TEXTS}", {"lstm": 25}),
    *_compared(f"--steps 600 --trials 12 --seeds 2 {_TEXTS}", {"transformer": 60}),
    *_compared(f"--steps 468 {_PICTURES}", {"unet": 35}),
    *_compared(f"--steps 390 {_PICTURES}", {"resnet20-plain": 30}),
    *_compared(
        f"--steps 390 --trials 10 --seeds 2 --optimizers Muon KFAC-selected {_ONE_CORE}",
        {"cnn": 40, "vit": 40, "resnet20": 55},
    ),
    Stage(("batch-size/mnist-mlp",), "batch-size --trials 5 --seeds 2 --examples 300000 --data-dir data", 50),
    Stage(
        ("batch-size/digits",),
        "batch-size --problem digits --examples 70400 --trials 5 --seeds 2 --batch-sizes 16 32 64 128 256 512 1024 "
        f"{_ONE_CORE}",
        4,
    ),
    Stage(
        ("batch-size/lstm",),
        f"batch-size --problem lstm --steps 400 --trials 5 --seeds 2 --batch-sizes 8 16 32 64 128 {_ONE_CORE}",
        35,
    ),
    Stage(("pinn/poisson-2d",), "pinn poisson-2d --seeds 3 --threads 1", 12),
    Stage(("pinn/heat",), "pinn heat --seeds 1 --threads 1", 14),
    Stage(("pinn/poisson-2d-deep",), "pinn poisson-2d-deep --seeds 1 --threads 1", 20),
    Stage(("pinn/poisson-5d",), "pinn poisson-5d --seeds 1 --threads 1", 65),
    Stage(("step-cost/step-cost",), "step-cost --threads 2 --settings default --periods 1,10 10,100 --repeats 1", 15),
    Stage(("distributed/2",), "distributed --ranks 2 --repeats 7", 30),
    Stage(("distributed/4",), "distributed --ranks 4 --quick --periods 10,100", 10),
    Stage(
        ("scaling/counted",), "scaling --bandwidths 12.5e9 --flop-rates 1e14 --ranks 8 64 1024", 10, leaves="scaling"
    ),
    Stage(("faults/sharded",), "faults", 10),
    Stage(("refresh/refresh",), "refresh --threads 1 --data-dir mnist", 5, needs_data=True),
    Stage(("autoencoders/mnist",), "autoencoders --dataset mnist --data-dir mnist --threads 1", 36),
    Stage(("autoencoders/curves",), "autoencoders --dataset curves --threads 1", 22),
    Stage(("preconditioning",), "preconditioning --data-dir mnist --threads 1", 3),
    Stage(("quickstart/digits",), "quickstart", 1),
    *(Stage((f"quickstart/seeds/digits-{seed}",), f"quickstart --seed {seed}", 1, "digits") for seed in range(1, 5)),
    Stage(("quickstart/mnist",), "quickstart --dataset mnist --data-dir mnist", 1),
    *(
        Stage(
            (f"quickstart/seeds/mnist-{seed}",),
            f"quickstart --dataset mnist --data-dir mnist --seed {seed}",
            1,
            "mnist",
        )
        for seed in range(1, 5)
    ),
    Stage(("distributed/statistics-workers",), "statistics-workers --dataset mnist --data-dir mnist --steps 150", 3),
    Stage(("distributed/statistics-workers-curves",), "statistics-workers", 2),
    Stage(("mutants/mutants",), "mutants --covering --timeout 900", 25),
    Stage(("mutants/random",), "mutants --random 300 --room-alone --covering --timeout 600", 100),
    Stage(("range-test/range-test",), f"{_RANGE_TEST} --data-dir data", 10),
    Stage(("range-test/selected",), f"{_RANGE_TEST} --optimizers KFAC-selected --data-dir data", 10, "range-test"),
    Stage(("defaults/defaults",), "defaults regression regression-1000 classifier mnist-a mnist-b --data-dir data", 12),
    Stage(("averaging/classifiers",), "averaging digits mnist-mlp --data-dir data", 6, "averaging"),
    Stage(("averaging/transformer",), "averaging transformer --steps 300 --seeds 1 --data-dir data", 5, "averaging"),
    Stage(("cart-pole/cart-pole",), "cart-pole", 8),
)
"""Lists all of them in their order: the range test is held against tuned runs, which come before it."""
