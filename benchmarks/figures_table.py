"""Writes where each result comes from, as the table of benchmarks/README.md: one row for each file of figures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.provenance import DIRTY, RESULTS, ROOT, essence
from benchmarks.spreads import repeats_of
from benchmarks.stages import STAGES

PAGE = ROOT / "benchmarks" / "README.md"
BEGIN = "<!-- made by: python -m benchmarks everything --table -->\n"
END = "<!-- end of what was made -->\n"

_UNKNOWN = "not recorded"  # which code has made a result, where there was no git
_HEADINGS = ("result", "command", "machine", "repeats: spread", "date", "commit")


def table() -> str:
    """Make the table: results in the order of their stages, then those that have none."""
    ordered = [RESULTS / f"{result}.json" for stage in STAGES for result in stage.results]
    others = sorted(set(RESULTS.rglob("*.json")) - set(ordered))
    there = [file for file in (*ordered, *others) if file.exists() and "unfinished" not in file.parts]
    rows = [_HEADINGS, ("---",) * len(_HEADINGS), *(_row(file) for file in there)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def update_page() -> None:
    """Put the table into the page, between its two marks."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


def _row(file: Path) -> tuple[str, ...]:
    report = json.loads(file.read_text())
    name = file.relative_to(RESULTS)
    return (
        f"[{name.with_suffix('')}](results/{name})",
        f"`{_command(report)}`",
        _machine(report["machine"]),
        str(repeats_of(report) or "none"),
        report["date"][:10],
        _commits(report),
    )


def _commits(report: Mapping[str, Any]) -> str:
    """Return the commit, and those of runs which other code has made: of an earlier result, or before it went on."""
    commit = report["commit"]
    words = commit.replace(DIRTY, ", changed") if commit else _UNKNOWN
    if others := [each for each in report.get("commits_of_runs", []) if each != commit]:
        words = f"{words}, some runs {', '.join(others)}"
    commits = dict.fromkeys(origin["commit"] for origin in report.get("trials_of", []))
    return f"{words}, older trials {', '.join(commits)}" if commits else words


def _command(report: Mapping[str, Any]) -> str:
    """Return the command without what names folders; of our benchmarks without the program as well."""
    command: str = report["command"]
    return " ".join(essence(command)) if command.startswith("python -m benchmarks") else command


def _machine(machine: Mapping[str, Any]) -> str:
    threads = f"{machine['torch_threads']} thread{'s' * (machine['torch_threads'] > 1)}"
    device = "" if machine["device"] == "cpu" else f"{machine['device']}, "
    has = f" ({machine['instructions']})" if "instructions" in machine else ""  # older results do not say it
    return f"{device}{machine['processor']}{has}, {machine['cores']} cores, {threads}, torch {machine['torch']}"
