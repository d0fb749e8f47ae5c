"""What each benchmark may be asked, apart from the benchmarks themselves.

They import torch and what is compared with it, which takes seconds; a wrong word is refused before that. The names here
are those of the benchmarks' own tables, as a test sees.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arguments, stages
from benchmarks.arguments import Periods
from benchmarks.provenance import RESULTS

PROBLEMS = (
    *("digits", "mnist-a", "mnist-a-growing", "mnist-b", "curves", "mnist-mlp"),
    *("resnet20", "resnet20-plain", "cnn", "transformer", "lstm", "unet", "vit", "scales"),
)
CONTESTANTS = (
    *("SGD", "AdamW", "Muon", "L-BFGS", "Shampoo", "LAMB", "MADGRAD", "AdaBelief", "SOAP", "DistributedShampoo"),
    *("KFAC-default", "KFAC-named", "KFAC-selected"),
)
SETTINGS = ("default", "whole")
DATASETS = ("digits", "mnist")
WITHOUT_DOWNLOAD = ("regression", "regression-1000", "classifier")
DEFAULTS_PROBLEMS = (*WITHOUT_DOWNLOAD, "mnist-a", "mnist-b")
LARGE_WORKLOADS = ("autoencoder", "resnet20", "transformer")
WORKLOADS = (*LARGE_WORKLOADS, "digits", "narrow", "wide", "softmax", "resnet18")
LARGE_MODELS = ("gpt2-small", "resnet50")
LARGE_VARIANTS = (
    *("SGD, fused", "SGD, foreach", "SGD, compiled", "K-FAC", "bf16 inverses", "low rank", "TF32", "foreach"),
    *("background refresh", "selected updates", "compiled"),
)
REPRESENTATIONS = ("Cholesky", "LowRank", "Eigen", "EKFAC", "NewtonSchulz")
AUTOENCODER_DATASETS = ("mnist", "curves")
AUTOENCODER_BATCH = 2000  # images, where no other number is asked for
METHODS = (
    *("SGD", "Adam", "Empirical+Cholesky", "MonteCarlo+Cholesky", "MonteCarlo+LowRank", "MonteCarlo+NewtonSchulz"),
    *("MonteCarlo+EKFAC", "MonteCarlo+adaptive"),
)
PLANNED_MODELS = ("resnet50", "bert-large", "7b")
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
BANDWIDTHS = (3e9, 12.5e9, 50e9)  # bytes per second: about 25, 100 and 400 Gbit/s
FLOP_RATES = (1e13, 1e14)  # float32 on one accelerator, TF32 on another
STRATEGIES = ("sharded", "replicated")
BATCH_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
EXAMPLES, QUICK_EXAMPLES = 600_000, 640
PINN_PROBLEMS = ("poisson-2d", "poisson-2d-deep", "heat", "poisson-5d")
PINN_CONTESTANTS = ("Adam", "SOAP", "L-BFGS", "KFAC")
CART_POLE_CONTESTANTS = ("Adam", "KFAC")


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def name(word: str) -> str:
        if word not in names:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(names)}, got {word!r}")
        return word

    return name


def _count(
    parser: argparse.ArgumentParser,
    flag: str,
    what: str = "",
    default: int | None = None,
    metavar: str = "N",
    nargs: str | None = None,
) -> None:
    """Add an option that takes a whole number above 0, or several; its help ends with the default, if one is given."""
    said = what if default is None else _with_default(what)
    parser.add_argument(flag, type=arguments.positive_int, default=default, metavar=metavar, nargs=nargs, help=said)


def _seed(parser: argparse.ArgumentParser, what: str = "of weights and batches") -> None:
    parser.add_argument("--seed", type=arguments.seed, default=0, help=_with_default(what))


def _switch(parser: argparse.ArgumentParser, flag: str, what: str) -> None:
    parser.add_argument(flag, action="store_true", help=what)


def _threads(parser: argparse.ArgumentParser) -> None:
    """Add the threads of a benchmark that leaves their number to torch."""
    _count(parser, "--threads", "CPU threads (default: torch's)")


def _out(parser: argparse.ArgumentParser, default: str, what: str = "") -> None:
    parser.add_argument("--out", type=Path, default=Path(default), help=_with_default(what))


def _mnist_folder(parser: argparse.ArgumentParser, otherwise: str = "from the hub") -> None:
    parser.add_argument("--data-dir", type=Path, help=f"folder of MNIST's parquet files (default: {otherwise})")


def _data_folder(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the folder that has a folder for each data set."""
    parser.add_argument("--data-dir", type=Path, metavar="PATH", help=f"{what} (default: from the hub)")


def _some_of(
    parser: argparse.ArgumentParser,
    flag: str,
    names: Sequence[str],
    metavar: str,
    what: str = "some of",
    all_of_them: str = "all",
    **more: Any,
) -> None:
    """Add an option that takes some of ``names``, and all where it is left out."""
    said = f"{what} {', '.join(names)} (default: {all_of_them})"
    parser.add_argument(flag, **{"nargs": "+", "default": names, **more}, choices=names, metavar=metavar, help=said)


def _problems(
    parser: argparse.ArgumentParser, names: Sequence[str], default: Sequence[str], of_default: str = ""
) -> None:
    """Add the problems as words without a flag; ``of_default`` says more of those that are taken if there is none."""
    said = f"some of {', '.join(names)} (default: {', '.join(default)}{of_default})"
    parser.add_argument("problems", nargs="*", type=_one_of(names), default=list(default), metavar="PROBLEM", help=said)


def _with_default(what: str) -> str:
    return f"{what} (default: %(default)s)" if what else "default: %(default)s"


def _of_a_study(parser: argparse.ArgumentParser, trials: int, seeds: int, steps: str, out: str) -> None:
    """Add the arguments of every command that makes studies; `steps` says what that number is."""
    _count(parser, "--trials", "settings tried of each", trials)
    _count(parser, "--seeds", "repeats of the best trial", seeds)
    search_seed = _with_default("of the settings to try")
    parser.add_argument("--search-seed", type=arguments.seed, default=0, metavar="N", help=search_seed)
    _count(parser, "--steps", steps)
    _data_folder(parser, "folder with folders mnist and cifar10 of parquet files and tinyshakespeare of input.txt")
    _count(parser, "--threads", "CPU threads", 1)
    _out(parser, out, "folder for runs, PNG and JSON")
    _switch(parser, "--quick", "small models, few steps and trials: shows that it runs")


def _of_rounds(parser: argparse.ArgumentParser, pairs: Sequence[Periods], rounds: int, out: str) -> None:
    """Add the arguments of every command that times steps in rounds."""
    parser.add_argument(
        "--periods",
        nargs="+",
        type=arguments.periods,
        default=pairs,
        metavar="FACTOR,INVERSE",
        help=f"steps between statistics and between refreshes (default: {' '.join(map(str, pairs))})",
    )
    _count(parser, "--repeats", "rounds", rounds)
    _out(parser, out, "JSON file")
    _switch(parser, "--quick", "one round, an eighth of the batch: shows that it runs, not what it costs")


def _of_runs(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the arguments of every command that trains problems of `compare` at a few rates."""
    _count(parser, "--steps", "of a run (default: the problem's own)")
    _data_folder(parser, "folder with folders as of compare")
    _count(parser, "--threads", "CPU threads", 1)
    _out(parser, out, "folder for JSON")
    _switch(parser, "--quick", "small models, few steps, one rate each: shows that it runs")


def _of_problems(parser: argparse.ArgumentParser) -> None:
    _problems(parser, PROBLEMS, ["digits"], ", no download")


def _compare(parser: argparse.ArgumentParser) -> None:
    _of_problems(parser)
    _some_of(parser, "--optimizers", CONTESTANTS, "OPTIMIZER", default=None)
    _switch(parser, "--list", "show the problems and the search spaces, and run nothing")
    parser.add_argument(
        "--trials-of",
        type=Path,
        metavar="JSON",
        help="an earlier result of the same arguments, whose trials are not run again",
    )
    _of_a_study(parser, trials=16, seeds=3, steps="of a run (default: the problem's own)", out="compare-results")


def _scoreboard(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", type=Path, metavar="JSON", help="of compare")
    parser.add_argument("--to", metavar="OPTIMIZER", help="that sets the targets (default: SGD, and the best baseline)")
    default = Path("scoreboard.png")
    parser.add_argument("--out", type=Path, default=default, metavar="PNG", help=_with_default("of the profile"))


def _batch_size(parser: argparse.ArgumentParser) -> None:
    problem = _one_of(PROBLEMS)
    parser.add_argument(
        "--problem", type=problem, default="mnist-mlp", metavar="PROBLEM", help="of compare (default: mnist-mlp)"
    )
    _count(parser, "--batch-sizes", f"default: {' '.join(map(str, BATCH_SIZES))}", nargs="+")
    otherwise = f"default: {EXAMPLES}, with --quick {QUICK_EXAMPLES}, none with --steps"
    _count(parser, "--examples", f"that a run sees at least ({otherwise})")
    steps = "of a run at least (default: the problem's own), more where it is to see --examples"
    _of_a_study(parser, trials=8, seeds=3, steps=steps, out="batch-size-results")


def _quickstart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="default: digits, no download")
    _mnist_folder(parser)
    _count(parser, "--epochs", "default: tuned to the data set")
    parser.add_argument("--setting", choices=SETTINGS, default="default", help="of K-FAC (default: its defaults)")
    _seed(parser)
    threads = "CPU threads (default: 1, small matrices)"
    parser.add_argument("--threads", type=arguments.positive_int, default=1, metavar="N", help=threads)
    _out(parser, "quickstart-results", "folder for PNG and JSON")
    _switch(parser, "--quick", "one learning rate each, few epochs: shows that it runs")


def _defaults(parser: argparse.ArgumentParser) -> None:
    _problems(parser, DEFAULTS_PROBLEMS, WITHOUT_DOWNLOAD, ", no download")
    _seed(parser)
    _of_runs(parser, "defaults-results")


def _averaging(parser: argparse.ArgumentParser) -> None:
    _of_problems(parser)
    _count(parser, "--seeds", default=3)
    _of_runs(parser, "averaging-results")


def _range_test(parser: argparse.ArgumentParser) -> None:
    _of_problems(parser)
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=[name for name in CONTESTANTS if name.startswith("KFAC")],
        metavar="OPTIMIZER",
        help="some of the K-FACs that compare has tuned (default: KFAC-default, or else KFAC-named)",
    )
    parser.add_argument(
        "--tuned",
        type=Path,
        default=RESULTS / "compare",
        metavar="PATH",
        help="folder of what compare has left of tuned runs (default: the results that come with the benchmarks)",
    )
    _count(parser, "--seeds", default=1)
    _of_runs(parser, "range-test-results")


def _pinn(parser: argparse.ArgumentParser) -> None:
    _problems(parser, PINN_PROBLEMS, ["poisson-2d"])
    _some_of(parser, "--optimizers", PINN_CONTESTANTS, "OPTIMIZER")
    _switch(parser, "--list", "show the problems and the settings, and run nothing")
    parser.add_argument(
        "--seconds",
        type=arguments.positive_float,
        metavar="S",
        help="of the processor for a run, a third of them for a trial (default: the problem's own)",
    )
    _count(parser, "--seeds", "of weights, for repeats of the best trial", 1)
    _count(parser, "--threads", "CPU threads", 1)
    _out(parser, "pinn-results", "folder for runs, PNG and JSON")
    _switch(parser, "--quick", "few points, settings and steps: shows that it runs")


def _cart_pole(parser: argparse.ArgumentParser) -> None:
    _some_of(parser, "--optimizers", CART_POLE_CONTESTANTS, "OPTIMIZER", all_of_them="both")
    _switch(parser, "--list", "show the settings, and run nothing")
    _count(parser, "--steps", "of the environment, after which a run ends; a trial after half of them", 320_000)
    _count(parser, "--seeds", "repeats of the best setting", 5)
    _count(parser, "--threads", "CPU threads", 1)
    _out(parser, "cart-pole-results", "folder for runs, PNG and JSON")
    _switch(parser, "--quick", "two settings, one tuning seed: with few --steps, shows that it runs")


def _step_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="default: all")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="default: all")
    parser.add_argument("--device", type=arguments.device, default="cpu", help="cpu (default) or cuda")
    _threads(parser)
    _of_rounds(parser, [Periods(1, 1), Periods(1, 10), Periods(10, 100)], 3, "step-cost.json")


def _accelerator(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=LARGE_MODELS, default=LARGE_MODELS, help="default: both")
    parser.add_argument("--device", type=arguments.device, metavar="DEVICE", help="cuda (default) or cpu")
    parser.add_argument(
        "--periods",
        nargs="+",
        type=arguments.periods,
        metavar="FACTOR,INVERSE",
        help="steps between statistics and between refreshes; the first pair has all variants "
        "(default: 10,100 1,10; with --quick 2,4 1,2)",
    )
    _some_of(parser, "--variants", LARGE_VARIANTS, "NAME", "beside SGD:")
    _some_of(parser, "--representations", REPRESENTATIONS, "NAME", "whose refresh is timed by itself:", nargs="*")
    _count(parser, "--repeats", "rounds", 3)
    _out(parser, "accelerator.json", "JSON file")
    _switch(parser, "--quick", "tiny models, one round: shows that it runs")


def _preconditioning(parser: argparse.ArgumentParser) -> None:
    _mnist_folder(parser)
    _count(parser, "--steps", default=300)
    parser.add_argument("--lr", type=arguments.positive_float, default=0.1, help="learning rate (default: 0.1)")
    _seed(parser)
    _threads(parser)
    _out(parser, "preconditioning.json", "JSON file")


def _autoencoders(parser: argparse.ArgumentParser) -> None:
    datasets = AUTOENCODER_DATASETS
    parser.add_argument("--dataset", choices=datasets, default="curves", help="default: curves, no download")
    _mnist_folder(parser)
    _some_of(parser, "--methods", METHODS, "METHOD")
    _count(parser, "--steps", "default: 100 (mnist), 200 (curves)")
    _count(parser, "--batch-size", default=AUTOENCODER_BATCH)
    _seed(parser)
    _threads(parser)
    _out(parser, "autoencoders-results", "folder for PNG and JSON")


def _refresh(parser: argparse.ArgumentParser) -> None:
    _mnist_folder(parser, "random pixels")
    _count(parser, "--batch-size", default=512)
    _count(parser, "--period", "inverse", 20)
    _count(parser, "--repeats", "periods", 5)
    parser.add_argument("--lr", type=arguments.positive_float, default=0.3, help="of K-FAC (default: 0.3)")
    parser.add_argument("--sgd-lr", type=arguments.positive_float, default=3e-3, help="of SGD (default: 0.003)")
    parser.add_argument("--damping", type=arguments.positive_float, default=0.3, help="default: 0.3")
    parser.add_argument("--kl-clip", type=arguments.positive_float, default=0.1, help="default: 0.1")
    _seed(parser)
    parser.add_argument("--device", type=arguments.device, default="cpu", help="cpu (default) or cuda")
    _threads(parser)
    _out(parser, "refresh", "folder")


def _distributed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=LARGE_WORKLOADS, help="default: %(default)s")
    _count(parser, "--ranks", "processes to start where no launcher did (default: 2)", metavar="P")
    _count(parser, "--threads", "of a rank", 1)
    _of_rounds(parser, [Periods(10, 100), Periods(1, 10)], 15, "distributed.json")


def _statistics_workers(parser: argparse.ArgumentParser) -> None:
    datasets, number = AUTOENCODER_DATASETS, arguments.positive_float
    parser.add_argument("--dataset", choices=datasets, default="curves", help="default: curves, no download")
    _mnist_folder(parser)
    _count(parser, "--ranks", "processes to start", 4, metavar="P")
    _count(parser, "--workers", "statistics workers", 1, metavar="W")
    _count(parser, "--images", "of a rank in a step", 334)
    _count(parser, "--steps", default=200)
    parser.add_argument(
        "--periods",
        type=arguments.periods,
        default=Periods(10, 20),
        metavar="FACTOR,INVERSE",
        help="steps between statistics and between refreshes (default: 10,20)",
    )
    _count(parser, "--max-staleness", "steps", 10)
    _count(parser, "--repeats", "turns that are timed", 5)
    parser.add_argument("--lr", type=number, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--damping", type=number, default=0.1, help="default: 0.1")
    _seed(parser)
    _count(parser, "--threads", "of a rank", 1)
    _out(parser, "statistics-workers.json")


def _scaling(parser: argparse.ArgumentParser) -> None:
    count, number = arguments.positive_int, arguments.positive_float
    parser.add_argument("--models", nargs="+", choices=PLANNED_MODELS, default=PLANNED_MODELS, help="default: all")
    parser.add_argument("--ranks", type=count, default=RANKS, nargs="+", metavar="N", help="default: 8 to 1024")
    parser.add_argument(
        "--counted",
        type=count,
        default=(8, 64, 1024),
        nargs="*",
        metavar="N",
        help="ranks of which one is run and counted (default: 8 64 1024)",
    )
    parser.add_argument(
        "--bandwidths",
        type=number,
        default=BANDWIDTHS,
        help="bytes per second of one rank (default: 3e9 12.5e9 50e9)",
        nargs="+",
        metavar="N",
    )
    parser.add_argument(
        "--flop-rates",
        type=number,
        default=FLOP_RATES,
        help="operations per second of one rank (default: 1e13 1e14)",
        nargs="+",
        metavar="N",
    )
    parser.add_argument("--latency", type=number, default=1e-5, metavar="S", help="of a message (default: 1e-5)")
    parser.add_argument(
        "--solver-share",
        type=number,
        default=0.1,
        metavar="X",
        help="rate of factorisations over that of products (default: 0.1)",
    )
    parser.add_argument(
        "--periods", type=arguments.periods, default=Periods(10, 100), help="FACTOR,INVERSE (default: 10,100)"
    )
    _out(parser, "scaling-results", "folder")


def _faults(parser: argparse.ArgumentParser) -> None:
    count = arguments.positive_int
    _count(parser, "--kills", default=20)
    parser.add_argument("--ranks", type=count, nargs="+", default=[2, 4, 1], metavar="N", help="default: 2 4 1")
    _count(parser, "--max-restarts", "of one torchrun", 1)
    _count(parser, "--period", "steps between checkpoints", 5)
    parser.add_argument("--strategy", choices=STRATEGIES, default="sharded", help="default: sharded")
    _seed(parser, "of ranks and moments")
    _out(parser, "faults.json")


def _mutants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="MUTANT", help="some of them, by room or by room/name (default: all)"
    )
    _count(parser, "--random", "draw so many from the code (default: those of tests/mutants)")
    _seed(parser, "of --random")
    _switch(parser, "--room-alone", "run the tests of the mutant's room alone, which takes minutes")
    _switch(parser, "--covering", "run quick tests that execute the mutated line first (needs coverage)")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="TEST", help="run these alone, slow ones too: files, or tests by name"
    )
    timeout = _with_default("for one run of tests")
    parser.add_argument("--timeout", type=arguments.positive_float, default=1800.0, metavar="S", help=timeout)
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.json"), help="JSON file (default: %(default)s; --random: random.json)"
    )


def _everything(parser: argparse.ArgumentParser) -> None:
    named = "a benchmark, a result (compare/digits) or a folder of results (quickstart/seeds)"
    parser.add_argument(
        "stages", nargs="*", type=stages.matching, metavar="STAGE", help=f"make these alone: {named} (default: all)"
    )
    parser.add_argument(
        "--skip", nargs="+", type=stages.matching, default=[], metavar="STAGE", help="leave these out, named alike"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (default: benchmarks/results)")
    _data_folder(parser, "folder as of compare")
    _switch(parser, "--dry-run", "show order, times, commands and what is up to date")
    _switch(parser, "--table", "write the table of benchmarks/README.md, and run nothing")


ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "compare": _compare,
    "scoreboard": _scoreboard,
    "batch-size": _batch_size,
    "quickstart": _quickstart,
    "defaults": _defaults,
    "averaging": _averaging,
    "range-test": _range_test,
    "pinn": _pinn,
    "cart-pole": _cart_pole,
    "step-cost": _step_cost,
    "accelerator": _accelerator,
    "preconditioning": _preconditioning,
    "autoencoders": _autoencoders,
    "refresh": _refresh,
    "distributed": _distributed,
    "statistics-workers": _statistics_workers,
    "scaling": _scaling,
    "faults": _faults,
    "mutants": _mutants,
    "everything": _everything,
}
"""Adds the arguments of a benchmark, by its name."""

RESUMING = {"compare", "batch-size", "pinn", "cart-pole", "range-test", "mutants", "everything"}
"""Names those that keep each run that is done in a file of its own, and go on from there."""
