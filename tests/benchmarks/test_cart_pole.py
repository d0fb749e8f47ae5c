"""Races of actor-critics on CartPole-v1, and the script to copy; skipped without gymnasium."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

gymnasium = pytest.importorskip("gymnasium")

from benchmarks import cart_pole, options  # noqa: E402 (needs gymnasium)
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.scripts.cart_pole import DISCOUNT, SMOOTHING, batches  # noqa: E402
from benchmarks.study import Ending, Reading, Run  # noqa: E402

SCRIPT = Path(cart_pole.__file__).parent / "scripts" / "cart_pole.py"


def run(*arguments: object) -> None:
    main(["cart-pole", *map(str, arguments)])


def test_a_quick_run_leaves_a_table_a_plot_and_figures_and_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--quick", "--steps", "300", "--seeds", "2", "--out", tmp_path]
    run(*command)
    assert "— (— to —)" in capsys.readouterr().out
    report = json.loads((tmp_path / "cart-pole.json").read_text())
    assert [each["name"] for each in report["optimizers"]] == ["Adam", "KFAC"]
    for each in report["optimizers"]:
        highest = [trial["runs"][0]["highest"] for trial in each["trials"]]
        assert each["setting"] == each["trials"][highest.index(max(highest))]["setting"]
        assert [(one["seed"], one["ending"], one["solved"]) for one in each["runs"]] == [
            (1, "finished", None),
            (2, "finished", None),
        ]
        (steps,) = each["runs"][0]["readings"]["steps"]
        assert 300 <= steps < 300 + 8 * 32
    assert (tmp_path / "cart-pole.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(cart_pole, "balance", Mock())
    run(*command)
    cart_pole.balance.assert_not_called()  # type: ignore[attr-defined]


def test_it_is_solved_when_the_last_hundred_episodes_are_long_enough() -> None:
    # The mean of the last hundred is 475 for the first time when five of them have still the length 0.
    updates = [(10, [0] * 100), *((10, [500]) for _ in range(200))]
    readings: list[Reading] = []
    cart_pole.balance(iter(updates), 10_000, readings, lambda _: None)
    assert [(each.steps, each.validation) for each in readings] == [(10 + 95 * 10, 25.0)]


def test_trials_are_ranked_by_their_medians() -> None:
    def one(trial: int, steps: int, lacks: float) -> Run:
        return Run("Adam", trial, 0, {}, Ending.FINISHED, (Reading(steps, 0.0, lacks, lacks),))

    solved = [one(0, 10, 30), one(0, 20, 20), one(0, 30, 20), *(one(1, 25, 25) for _ in range(3))]
    assert cart_pole.ranked([*solved, one(2, 9, 40), one(3, 9, 26)]) == [1, 0, 3, 2]


class Fixed(nn.Module):
    """A policy that pushes the pole over, and a value."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.stack([0 * x[..., 0], -9 * x[..., 2]], -1), torch.tanh(x.sum(-1))


def test_advantages_are_discounted_sums_of_errors_within_an_episode() -> None:
    """The oracle follows the environments by itself, and sums each advantage on its own."""
    model, worlds, count, horizon = Fixed(), gymnasium.make_vec("CartPole-v1", num_envs=3), 3, 40
    torch.manual_seed(0)
    observations, actions, advantages, returns, ended = next(batches(model, count, horizon, 0))
    torch.manual_seed(0)
    seen = [torch.from_numpy(worlds.reset(seed=0)[0])]
    failed, drawn = [torch.ones(count, dtype=torch.bool)], []
    for _ in range(horizon):
        drawn.append(model(seen[-1])[0].softmax(1).multinomial(1).squeeze(1))
        after, _, fails, _, _ = worlds.step(drawn[-1].numpy())
        seen.append(torch.from_numpy(after))
        failed.append(torch.from_numpy(fails))
    values = model(torch.stack(seen))[1]
    expected, places = [], []
    for time in range(horizon):
        for world in range(count):
            if time > 0 and failed[time][world]:
                continue  # a reset
            total, factor = 0.0, 1.0
            for later in range(time, horizon):
                ends = bool(failed[later + 1][world])
                following = 0.0 if ends else DISCOUNT * float(values[later + 1, world])
                total += factor * (1 - DISCOUNT + following - float(values[later, world]))
                factor *= 0.0 if ends else DISCOUNT * SMOOTHING
            expected.append(total)
            places.append((time, world))
    assert len(ended) == sum(int(each.sum()) for each in failed[1:]) >= 3
    torch.testing.assert_close(advantages, torch.tensor(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(observations, torch.stack([seen[time][world] for time, world in places]))
    assert actions.tolist() == [int(drawn[time][world]) for time, world in places]
    torch.testing.assert_close(returns, advantages + model(observations)[1])


def returns_of_script(steps: int) -> list[float]:
    command = [sys.executable, SCRIPT, "--steps", str(steps)]
    ended = subprocess.run(command, timeout=300, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    return [float(line.rpartition(" ")[2]) for line in ended.stdout.splitlines()]


def test_the_script_to_copy_is_short_and_runs() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 120
    assert len(returns_of_script(500)) == 1


@pytest.mark.slow
def test_the_episodes_of_the_script_get_longer() -> None:
    first, *_, last = returns_of_script(15_000)
    assert 2 * first < last


def test_the_names_that_arguments_take_are_those_of_the_contestants() -> None:
    assert tuple(cart_pole.CONTESTANTS) == options.CART_POLE_CONTESTANTS


def test_without_gymnasium_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("benchmarks.cart_pole", "benchmarks.scripts.cart_pole"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(SystemExit, match=r"'gymnasium' is not installed.*\[benchmarks,reinforcement\]"):
        run("--list")
