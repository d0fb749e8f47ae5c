"""What each benchmark may be asked, apart from the benchmarks themselves.

They import torch and what is compared with it, which takes seconds; a wrong word is refused before that. The names here
are those of the benchmarks' own tables, as a test sees.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

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


def _of_a_study(parser: argparse.ArgumentParser, trials: int, seeds: int, steps: str, out: str) -> None:
    """Add the arguments of every command that makes studies; `steps` says what that number is."""
    count = arguments.positive_int
    parser.add_argument(
        "--trials", type=count, default=trials, metavar="N", help="settings tried of each (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=count, default=seeds, metavar="N", help="repeats of the best trial (default: %(default)s)"
    )
    parser.add_argument(
        "--search-seed",
        type=arguments.seed,
        default=0,
        metavar="N",
        help="of the settings to try (default: %(default)s)",
    )
    parser.add_argument("--steps", type=count, metavar="N", help=steps)
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="PATH",
        help="folder with folders mnist and cifar10 of parquet files and tinyshakespeare of input.txt "
        "(default: from the hub)",
    )
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="folder for runs, PNG and JSON (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="small models, few steps and trials: shows that it runs")


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
    parser.add_argument(
        "--repeats", type=arguments.positive_int, default=rounds, metavar="N", help="rounds (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="JSON file (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="one round, an eighth of the batch: shows that it runs, not what it costs"
    )


def _of_runs(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the arguments of every command that trains problems of `compare` at a few rates."""
    parser.add_argument(
        "--steps", type=arguments.positive_int, metavar="N", help="of a run (default: the problem's own)"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="PATH",
        help="folder with folders as of compare (default: from the hub)",
    )
    parser.add_argument(
        "--threads", type=arguments.positive_int, default=1, metavar="N", help="CPU threads (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for JSON (default: %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="small models, few steps, one rate each: shows that it runs"
    )


def _of_problems(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "problems",
        nargs="*",
        type=_one_of(PROBLEMS),
        default=["digits"],
        metavar="PROBLEM",
        help=f"some of {', '.join(PROBLEMS)} (default: digits, no download)",
    )


def _compare(parser: argparse.ArgumentParser) -> None:
    _of_problems(parser)
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=CONTESTANTS,
        metavar="OPTIMIZER",
        help=f"some of {', '.join(CONTESTANTS)} (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="show the problems and the search spaces, and run nothing")
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
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("scoreboard.png"),
        metavar="PNG",
        help="of the profile (default: %(default)s)",
    )


def _batch_size(parser: argparse.ArgumentParser) -> None:
    problem = _one_of(PROBLEMS)
    parser.add_argument(
        "--problem", type=problem, default="mnist-mlp", metavar="PROBLEM", help="of compare (default: mnist-mlp)"
    )
    parser.add_argument(
        "--batch-sizes",
        nargs="+",
        type=arguments.positive_int,
        metavar="N",
        help=f"default: {' '.join(map(str, BATCH_SIZES))}",
    )
    parser.add_argument(
        "--examples",
        type=arguments.positive_int,
        metavar="N",
        help=f"that a run sees at least (default: {EXAMPLES}, with --quick {QUICK_EXAMPLES}, none with --steps)",
    )
    steps = "of a run at least (default: the problem's own), more where it is to see --examples"
    _of_a_study(parser, trials=8, seeds=3, steps=steps, out="batch-size-results")


def _quickstart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dataset", choices=DATASETS, default="digits", help="default: digits, no download")
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's parquet files (default: from the hub)")
    parser.add_argument("--epochs", type=arguments.positive_int, metavar="N", help="default: tuned to the data set")
    parser.add_argument("--setting", choices=SETTINGS, default="default", help="of K-FAC (default: its defaults)")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of weights and batches (default: 0)")
    parser.add_argument(
        "--threads",
        type=arguments.positive_int,
        default=1,
        metavar="N",
        help="CPU threads (default: 1, small matrices)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("quickstart-results"), help="folder for PNG and JSON (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="one learning rate each, few epochs: shows that it runs")


def _defaults(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "problems",
        nargs="*",
        type=_one_of(DEFAULTS_PROBLEMS),
        metavar="PROBLEM",
        default=list(WITHOUT_DOWNLOAD),
        help=f"some of {', '.join(DEFAULTS_PROBLEMS)} (default: {', '.join(WITHOUT_DOWNLOAD)}, no download)",
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of weights and batches (default: %(default)s)")
    _of_runs(parser, "defaults-results")


def _averaging(parser: argparse.ArgumentParser) -> None:
    _of_problems(parser)
    parser.add_argument("--seeds", type=arguments.positive_int, default=3, metavar="N", help="default: 3")
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
    parser.add_argument("--seeds", type=arguments.positive_int, default=1, metavar="N", help="default: 1")
    _of_runs(parser, "range-test-results")


def _pinn(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "problems",
        nargs="*",
        type=_one_of(PINN_PROBLEMS),
        default=["poisson-2d"],
        metavar="PROBLEM",
        help=f"some of {', '.join(PINN_PROBLEMS)} (default: poisson-2d)",
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=PINN_CONTESTANTS,
        default=PINN_CONTESTANTS,
        metavar="OPTIMIZER",
        help=f"some of {', '.join(PINN_CONTESTANTS)} (default: all)",
    )
    parser.add_argument("--list", action="store_true", help="show the problems and the settings, and run nothing")
    parser.add_argument(
        "--seconds",
        type=arguments.positive_float,
        metavar="S",
        help="of the processor for a run, a third of them for a trial (default: the problem's own)",
    )
    parser.add_argument(
        "--seeds",
        type=arguments.positive_int,
        default=1,
        metavar="N",
        help="of weights, for repeats of the best trial (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=arguments.positive_int, default=1, metavar="N", help="CPU threads (default: %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("pinn-results"), help="folder for runs, PNG and JSON (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="few points, settings and steps: shows that it runs")


def _cart_pole(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=CART_POLE_CONTESTANTS,
        default=CART_POLE_CONTESTANTS,
        metavar="OPTIMIZER",
        help=f"some of {', '.join(CART_POLE_CONTESTANTS)} (default: both)",
    )
    parser.add_argument("--list", action="store_true", help="show the settings, and run nothing")
    parser.add_argument(
        "--steps",
        type=arguments.positive_int,
        default=320_000,
        metavar="N",
        help="of the environment, after which a run ends; a trial after half of them (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=arguments.positive_int,
        default=5,
        metavar="N",
        help="repeats of the best setting (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=arguments.positive_int, default=1, metavar="N", help="CPU threads (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("cart-pole-results"),
        help="folder for runs, PNG and JSON (default: %(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="two settings, one tuning seed: with few --steps, shows that it runs"
    )


def _step_cost(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="default: all")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS, help="default: all")
    parser.add_argument("--device", type=arguments.device, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=arguments.positive_int, metavar="N", help="CPU threads (default: torch's)")
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
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=LARGE_VARIANTS,
        default=LARGE_VARIANTS,
        metavar="NAME",
        help=f"beside SGD: {', '.join(LARGE_VARIANTS)} (default: all)",
    )
    parser.add_argument(
        "--representations",
        nargs="*",
        choices=REPRESENTATIONS,
        default=REPRESENTATIONS,
        metavar="NAME",
        help=f"whose refresh is timed by itself: {', '.join(REPRESENTATIONS)} (default: all)",
    )
    parser.add_argument("--repeats", type=arguments.positive_int, default=3, metavar="N", help="rounds (default: 3)")
    parser.add_argument("--out", type=Path, default=Path("accelerator.json"), help="JSON file (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models, one round: shows that it runs")


def _preconditioning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's parquet files (default: from the hub)")
    parser.add_argument("--steps", type=arguments.positive_int, default=300, metavar="N", help="default: 300")
    parser.add_argument("--lr", type=arguments.positive_float, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--threads", type=arguments.positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--out", type=Path, default=Path("preconditioning.json"), help="JSON file (default: %(default)s)"
    )


def _autoencoders(parser: argparse.ArgumentParser) -> None:
    datasets = AUTOENCODER_DATASETS
    parser.add_argument("--dataset", choices=datasets, default="curves", help="default: curves, no download")
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's parquet files (default: from the hub)")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=METHODS,
        metavar="METHOD",
        help=f"some of {', '.join(METHODS)} (default: all)",
    )
    parser.add_argument("--steps", type=arguments.positive_int, metavar="N", help="default: 100 (mnist), 200 (curves)")
    parser.add_argument(
        "--batch-size", type=arguments.positive_int, default=AUTOENCODER_BATCH, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--threads", type=arguments.positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument(
        "--out", type=Path, default=Path("autoencoders-results"), help="folder for PNG and JSON (default: %(default)s)"
    )


def _refresh(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's parquet files (default: random pixels)")
    parser.add_argument("--batch-size", type=arguments.positive_int, default=512, metavar="N", help="default: 512")
    parser.add_argument("--period", type=arguments.positive_int, default=20, metavar="N", help="inverse (default: 20)")
    parser.add_argument("--repeats", type=arguments.positive_int, default=5, metavar="N", help="periods (default: 5)")
    parser.add_argument("--lr", type=arguments.positive_float, default=0.3, help="of K-FAC (default: 0.3)")
    parser.add_argument("--sgd-lr", type=arguments.positive_float, default=3e-3, help="of SGD (default: 0.003)")
    parser.add_argument("--damping", type=arguments.positive_float, default=0.3, help="default: 0.3")
    parser.add_argument("--kl-clip", type=arguments.positive_float, default=0.1, help="default: 0.1")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--device", type=arguments.device, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--threads", type=arguments.positive_int, metavar="N", help="CPU threads (default: torch's)")
    parser.add_argument("--out", type=Path, default=Path("refresh"), help="folder (default: %(default)s)")


def _distributed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=LARGE_WORKLOADS, help="default: %(default)s")
    parser.add_argument(
        "--ranks",
        type=arguments.positive_int,
        metavar="P",
        help="processes to start where no launcher did (default: 2)",
    )
    parser.add_argument("--threads", type=arguments.positive_int, default=1, metavar="N", help="of a rank (default: 1)")
    _of_rounds(parser, [Periods(10, 100), Periods(1, 10)], 15, "distributed.json")


def _statistics_workers(parser: argparse.ArgumentParser) -> None:
    count, number = arguments.positive_int, arguments.positive_float
    parser.add_argument(
        "--dataset", choices=AUTOENCODER_DATASETS, default="curves", help="default: curves, no download"
    )
    parser.add_argument("--data-dir", type=Path, help="folder of MNIST's parquet files (default: from the hub)")
    parser.add_argument("--ranks", type=count, default=4, metavar="P", help="processes to start (default: 4)")
    parser.add_argument("--workers", type=count, default=1, metavar="W", help="statistics workers (default: 1)")
    parser.add_argument("--images", type=count, default=334, metavar="N", help="of a rank in a step (default: 334)")
    parser.add_argument("--steps", type=count, default=200, metavar="N", help="default: 200")
    parser.add_argument(
        "--periods",
        type=arguments.periods,
        default=Periods(10, 20),
        metavar="FACTOR,INVERSE",
        help="steps between statistics and between refreshes (default: 10,20)",
    )
    parser.add_argument("--max-staleness", type=count, default=10, metavar="N", help="steps (default: 10)")
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="turns that are timed (default: 5)")
    parser.add_argument("--lr", type=number, default=0.1, help="learning rate (default: 0.1)")
    parser.add_argument("--damping", type=number, default=0.1, help="default: 0.1")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="of a rank (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("statistics-workers.json"), help="default: %(default)s")


def _scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=PLANNED_MODELS, default=PLANNED_MODELS, help="default: all")
    parser.add_argument(
        "--ranks", type=arguments.positive_int, default=RANKS, nargs="+", metavar="N", help="default: 8 to 1024"
    )
    parser.add_argument(
        "--counted",
        type=arguments.positive_int,
        default=(8, 64, 1024),
        nargs="*",
        metavar="N",
        help="ranks of which one is run and counted (default: 8 64 1024)",
    )
    parser.add_argument(
        "--bandwidths",
        type=arguments.positive_float,
        default=BANDWIDTHS,
        help="bytes per second of one rank (default: 3e9 12.5e9 50e9)",
        nargs="+",
        metavar="N",
    )
    parser.add_argument(
        "--flop-rates",
        type=arguments.positive_float,
        default=FLOP_RATES,
        help="operations per second of one rank (default: 1e13 1e14)",
        nargs="+",
        metavar="N",
    )
    parser.add_argument(
        "--latency", type=arguments.positive_float, default=1e-5, metavar="S", help="of a message (default: 1e-5)"
    )
    parser.add_argument(
        "--solver-share",
        type=arguments.positive_float,
        default=0.1,
        metavar="X",
        help="rate of factorisations over that of products (default: 0.1)",
    )
    parser.add_argument(
        "--periods", type=arguments.periods, default=arguments.Periods(10, 100), help="FACTOR,INVERSE (default: 10,100)"
    )
    parser.add_argument("--out", type=Path, default=Path("scaling-results"), help="folder (default: %(default)s)")


def _faults(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=arguments.positive_int, default=20, metavar="N", help="default: 20")
    parser.add_argument(
        "--ranks", type=arguments.positive_int, nargs="+", default=[2, 4, 1], metavar="N", help="default: 2 4 1"
    )
    parser.add_argument(
        "--max-restarts", type=arguments.positive_int, default=1, metavar="N", help="of one torchrun (default: 1)"
    )
    parser.add_argument(
        "--period", type=arguments.positive_int, default=5, metavar="N", help="steps between checkpoints (default: 5)"
    )
    parser.add_argument("--strategy", choices=STRATEGIES, default="sharded", help="default: sharded")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of ranks and moments (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("faults.json"), help="default: %(default)s")


def _mutants(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="MUTANT", help="some of them, by room or by room/name (default: all)"
    )
    parser.add_argument(
        "--random",
        type=arguments.positive_int,
        metavar="N",
        help="draw so many from the code (default: those of tests/mutants)",
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="of --random (default: %(default)s)")
    parser.add_argument(
        "--room-alone", action="store_true", help="run the tests of the mutant's room alone, which takes minutes"
    )
    parser.add_argument(
        "--covering", action="store_true", help="run quick tests that execute the mutated line first (needs coverage)"
    )
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="TEST", help="run these alone, slow ones too: files, or tests by name"
    )
    parser.add_argument(
        "--timeout",
        type=arguments.positive_float,
        default=1800.0,
        metavar="S",
        help="for one run of tests (default: %(default)s)",
    )
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
    parser.add_argument("--data-dir", type=Path, metavar="PATH", help="folder as of compare (default: from the hub)")
    parser.add_argument("--dry-run", action="store_true", help="show order, times, commands and what is up to date")
    parser.add_argument("--table", action="store_true", help="write the table of benchmarks/README.md, and run nothing")


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
"""What adds the arguments of a benchmark, by its name."""

RESUMING = {"compare", "batch-size", "pinn", "cart-pole", "range-test", "mutants", "everything"}
"""Those that keep each run that is done in a file of its own, and go on from there."""
