"""`python -m benchmarks`: see `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

try:
    from benchmarks import (
        accelerator,
        autoencoders,
        batch_size,
        compare,
        defaults,
        distributed,
        faults,
        preconditioning,
        quickstart,
        refresh,
        scaling,
        scoreboard,
        step_cost,
    )
    from benchmarks.arguments import UsageError
    from benchmarks.data import DataError
except ModuleNotFoundError as error:
    # Only an absent extra is explained; anything else is a fault to be seen whole.
    if (error.name or "").partition(".")[0] not in {
        "datasets",
        "matplotlib",
        "numpy",
        "PIL",
        "pytorch_optimizer",
        "rich",
        "sklearn",
        "torch_optimizer",
    }:
        raise
    sys.exit(f'benchmarks: {error.name!r} is not installed. Run: pip install -e ".[benchmarks]"')

_BENCHMARKS = {
    "compare": compare,
    "scoreboard": scoreboard,
    "batch-size": batch_size,
    "quickstart": quickstart,
    "defaults": defaults,
    "step-cost": step_cost,
    "accelerator": accelerator,
    "preconditioning": preconditioning,
    "autoencoders": autoencoders,
    "refresh": refresh,
    "distributed": distributed,
    "scaling": scaling,
    "faults": faults,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of kfac_optim. Each answers one question and leaves its figures as JSON.",
    )
    commands = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name, module in _BENCHMARKS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, error=command.error)
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (UsageError, DataError) as error:
        args.error(str(error))  # exits with 2
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell reports it; the progress bar has already been closed


if __name__ == "__main__":
    main()
