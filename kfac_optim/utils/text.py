"""Tables, lists of names, sizes and values as text."""

import re
from collections.abc import Iterable, Iterator, Sequence


def describe_bytes(count: float) -> str:
    """Write a size as `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return lines of a table in columns, the first row its header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if number == 0:
            yield "  ".join("-" * width for width in widths)


def listed(names: Iterable[object], most: int = 8) -> str:
    """Return the first few names, in quotes, and how many more there are."""
    quoted = [repr(name) for name in names]
    return ", ".join(quoted[:most]) + (f" and {len(quoted) - most} more" if len(quoted) > most else "")


def shown(value: object, most: int = 200) -> str:
    """Return what `repr` says of a value, cut short: what stands in the place of a number may be a whole checkpoint."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def without_addresses(text: str) -> str:
    """Return what `repr` says without memory addresses, so that it is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)
