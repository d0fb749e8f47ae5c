"""`python -m benchmarks`: see `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.options import ADD, RESUMING

# The module of a benchmark has its name, with `_` for `-`. Only the one that is asked for is imported, once its
# arguments are known to be right: torch, and what is compared with it, take seconds.
_BENCHMARKS = {
    "compare": "which optimizer gets to the same quality in the fewest steps and seconds, all tuned alike?",
    "scoreboard": "how does K-FAC stand over all problems that compare was run on?",
    "batch-size": "how many steps does it take at each batch size, with SGD and with K-FAC?",
    "quickstart": "does K-FAC beat a tuned SGD on real data?",
    "defaults": "does K-FAC train at its defaults, whatever the size of the loss?",
    "averaging": "what does the average of the iterates gain?",
    "range-test": "does the range test spare the tuning of rate and damping?",
    "pinn": "which optimizer trains physics-informed networks to the smallest error, and in how many seconds?",
    "cart-pole": "how many steps of its environment does an actor-critic need to balance a pole?",
    "step-cost": "what does a step cost, and how far is that from the arithmetic floor?",
    "accelerator": "what does a step cost on an accelerator, which variant is best, and where is the gap?",
    "preconditioning": "does it precondition at all, and is the cold start safe?",
    "autoencoders": "which estimate, inverse and damping train deep autoencoders?",
    "refresh": "how long is the longest step, with refreshes together, staggered and in the background?",
    "distributed": "what does K-FAC send, hold and cost on several processes, beside SGD under DDP?",
    "statistics-workers": "what does K-FAC cost ranks that leave statistics and refreshes to a worker?",
    "scaling": "how does K-FAC scale to 1,024 ranks, as plans predict it?",
    "faults": "does a run whose ranks are killed at random go on as if nothing had happened?",
    "mutants": "do the tests notice the mistakes that a colleague could make?",
    "everything": "what are the figures of all of these, made anew?",
}

_EXTRAS = dict.fromkeys(
    ("datasets", "matplotlib", "numpy", "PIL", "pytorch_optimizer", "rich", "sklearn", "torch_optimizer"), "benchmarks"
) | {"gymnasium": "benchmarks,reinforcement"}


def main(arguments: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Benchmarks of kfac_optim. Each answers one question and leaves its figures as JSON.",
    )
    commands = parser.add_subparsers(metavar="BENCHMARK", required=True)
    for name, question in _BENCHMARKS.items():
        # What comes after the name is read once the module is there.
        commands.add_parser(name, help=question, add_help=False).set_defaults(name=name)
    name = parser.parse_known_args(words[:1])[0].name
    command = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=ast.get_docstring(ast.parse(_file(name).read_text())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ADD[name](command)
    args = command.parse_args(words[1:])
    only_shown = getattr(args, "list", False) or getattr(args, "dry_run", False)
    if (out := getattr(args, "out", None)) is not None and not only_shown:
        # All of it before anything is trained.
        default = command.get_default("out")
        wants_file = bool(default.suffix)
        if wants_file and out.is_dir():
            command.error(f"argument --out: {out} is a folder, and a file is written: {out / default.name}, say")
        folder = out.parent if wants_file else out
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            command.error(f"argument --out: {folder} cannot be made: {error.strerror}")
    module = _imported(name)
    from benchmarks.arguments import UsageError

    try:
        module.run(args)
    except UsageError as error:
        command.error(str(error))  # exits with 2
    except KeyboardInterrupt:
        kept = "the same command goes on where it stopped" if name in RESUMING else "nothing was written"
        print(f"{command.prog}: interrupted; {kept}", file=sys.stderr)
        sys.exit(130)  # as a shell reports it; the progress bar has already been closed


def _file(name: str) -> Path:
    return Path(__file__).with_name(f"{name.replace('-', '_')}.py")


def _imported(name: str) -> ModuleType:
    try:
        return import_module(f"benchmarks.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        # Only an absent extra is explained; anything else is a fault to be seen whole.
        if (extras := _EXTRAS.get((error.name or "").partition(".")[0])) is None:
            raise
        sys.exit(f'benchmarks: {error.name!r} is not installed. Run: pip install -e ".[{extras}]"')


if __name__ == "__main__":
    main()
