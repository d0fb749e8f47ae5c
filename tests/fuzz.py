"""Throws mutated checkpoints, arguments, batches and orders of calls at the optimizer, and counts what comes of them.

    python tests/fuzz.py --cases 100000            # goes on where it was, after a look at what it found before
    python tests/fuzz.py --replay orders 17        # one case again, with its traceback

A case is its kind and its seed. None may change what is held where it is refused, none may be refused by an error that
does not say what and where, and none may leave a number that is not finite. The counts stand in
benchmarks/results/fuzz/counts.json, written every 100 cases. They are of the cases as they are drawn now: whoever
changes what a seed stands for deletes them, and begins anew.
"""

import argparse
import hashlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.fuzz import CHANGED, NOT_FINITE, UNCLEAR, Finding, arguments, batches, checkpoints, orders, quiet

from benchmarks.harness import made_by

KINDS: dict[str, Callable[[random.Random], str]] = {
    "checkpoints": checkpoints.case,
    "arguments": arguments.case,
    "batches": batches.case,
    "orders": orders.case,
}
OUT = Path(__file__).parents[1] / "benchmarks" / "results" / "fuzz" / "counts.json"
EVERY = 100


def attempt(kind: str, seed: int) -> str:
    """Run one case; how it ended."""
    seeded = int.from_bytes(hashlib.sha256(f"{kind} {seed}".encode()).digest()[:8], "big")
    torch.default_generator.manual_seed(seeded % 2**63)  # torch.manual_seed asks every kind of device as well
    with quiet():
        return KINDS[kind](random.Random(seeded))


def counts_of(out: Path) -> dict[str, Any]:
    if out.exists():
        return dict(json.loads(out.read_text()))
    return {
        "command": "python tests/fuzz.py --cases N",
        "seconds": 0.0,
        "processor seconds": 0.0,
        "kinds": {kind: {"seeds": 0, "outcomes": {}, CHANGED: 0, UNCLEAR: 0, NOT_FINITE: 0} for kind in KINDS},
        "findings": [],
        "mended": [],
    }


def write(out: Path, counts: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_suffix(".part")
    part.write_text(json.dumps(counts, indent=2) + "\n")
    os.replace(part, out)


def look_again(counts: dict[str, Any]) -> None:
    """Run what was found before once more; what ends well by now is mended, and kept as that."""
    for found in list(counts["findings"]):
        entry = counts["kinds"][found["kind"]]
        try:
            outcome = attempt(found["kind"], found["seed"])
        except Finding:
            continue
        counts["findings"].remove(found)
        counts["mended"].append(found)
        entry[found["what"].partition(":")[0]] -= 1
        entry["outcomes"][outcome] = entry["outcomes"].get(outcome, 0) + 1


def run(cases: int, out: Path, seconds: float) -> dict[str, Any]:
    """Take the kinds in turn until there are `cases` in all, or the seconds are over; write the counts as they come."""
    made = made_by(torch.device("cpu"))
    counts = {**counts_of(out), **{name: made[name] for name in ("machine", "date", "commit")}}
    start, worked = time.monotonic(), time.process_time()
    begun = counts["seconds"], counts["processor seconds"]
    look_again(counts)
    write(out, counts)
    each = cases // len(KINDS)
    while (left := [kind for kind in KINDS if counts["kinds"][kind]["seeds"] < each]) and (
        time.monotonic() - start < seconds
    ):
        kind = min(left, key=lambda name: counts["kinds"][name]["seeds"])
        entry = counts["kinds"][kind]
        outcomes = Counter(entry["outcomes"])
        for seed in range(entry["seeds"], min(entry["seeds"] + EVERY, each)):
            try:
                outcomes[attempt(kind, seed)] += 1
            except Finding as finding:
                entry[finding.kind] += 1
                counts["findings"].append({"kind": kind, "seed": seed, "what": str(finding)})
                print(kind, seed, finding, flush=True)
            entry["seeds"] = seed + 1
        entry["outcomes"] = dict(sorted(outcomes.items()))
        counts["seconds"] = round(begun[0] + time.monotonic() - start, 1)
        counts["processor seconds"] = round(begun[1] + time.process_time() - worked, 1)
        write(out, counts)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000, help="of all kinds together")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--replay", nargs=2, metavar=("KIND", "SEED"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.replay:
        print(attempt(options.replay[0], int(options.replay[1])))
        return
    counts = run(options.cases, options.out, options.seconds)
    print(json.dumps(counts["kinds"], indent=2))


if __name__ == "__main__":
    main()
