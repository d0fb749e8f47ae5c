"""The README keeps its promises: its script runs as it stands, it is short, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [
    "README.md",
    "benchmarks/README.md",
    "benchmarks/MISSED.md",
    "kfac_optim/README.md",
    "kfac_optim/distributed/README.md",
]


def test_the_complete_script_trains_as_it_stands(tmp_path: Path) -> None:
    script = re.search(r"<!-- a complete script -->\n```python\n(.*?)```", README, flags=re.DOTALL)
    assert script is not None
    (tmp_path / "script.py").write_text(script[1])
    ended = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, timeout=300, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    loss = re.match(r"training loss (\d+\.\d+)\n", ended.stdout)
    assert loss is not None
    assert float(loss[1]) < 0.01
    assert "Statistics were taken of 9,668 (100%)" in ended.stdout


def test_it_is_read_in_three_minutes() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 140


@pytest.mark.parametrize("page", PAGES)
def test_links_within_the_project_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", (ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), target
        if anchor:
            assert anchor in headings(path), f"{target}#{anchor}"


def headings(page: Path) -> set[str]:
    """The anchors that a page has."""
    return {
        re.sub(r"[^\w\- ]", "", line.lstrip("# ")).strip().lower().replace(" ", "-")
        for line in page.read_text().splitlines()
        if line.startswith("#")
    }
