"""`python -m benchmarks everything`: stages that are done are not run again, and time left adds up."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import everything, stages
from benchmarks.__main__ import main
from benchmarks.everything import fingerprint_of
from benchmarks.options import ADD
from benchmarks.provenance import RESULTS, ROOT, essence
from benchmarks.stages import STAGES, Stage

HEAT, FAULTS, AVERAGE = (
    Stage(("pinn/heat",), "pinn heat", 2),
    Stage(("faults/sharded",), "faults --kills 3", 3),
    Stage(("averaging/few",), "averaging digits", 65, leaves="averaging"),
)
_LEFT_OUT = {"accelerator", "scoreboard", "everything"}
_FILES = {"pinn": "heat", "faults": "sharded", "averaging": "averaging"}  # that the commands write


class Commands:
    """Takes the place of the processes: leaves what their commands would."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.stop: str | None = None  # this one
        self.codes: dict[str, int] = {}

    def __call__(self, words: list[str]) -> int:
        name, out = words[0], Path(words[words.index("--out") + 1])
        folder = out.parent if out.suffix else out
        assert folder.is_dir()
        if name == self.stop:
            raise KeyboardInterrupt
        self.ended.append(name)
        file = f"{_FILES[name]}.json"
        assert not out.suffix or out.name == file
        (folder / file).write_text(json.dumps({"benchmark": name, "wall_seconds": 0.0}))
        (folder / f"{_FILES[name]}-of-it.png").write_text("a picture")
        return self.codes.get(name, 0)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    taken = Commands()
    monkeypatch.setattr(everything, "start", taken)
    monkeypatch.setattr(everything, "RESULTS", tmp_path / "of others")
    monkeypatch.setattr(stages, "STAGES", (HEAT, FAULTS, AVERAGE))
    monkeypatch.setattr(everything, "commit", lambda: "abc1234")
    return taken


def run(*arguments: object) -> None:
    main(["everything", *map(str, arguments)])


def test_after_a_stop_each_stage_has_run_once(commands: Commands, tmp_path: Path) -> None:
    commands.stop = "faults"
    with pytest.raises(SystemExit) as exit_:
        run("--out", tmp_path)
    assert exit_.value.code == 130
    assert commands.ended == ["pinn"]
    commands.stop = None
    run("--out", tmp_path)
    run("--out", tmp_path)
    assert commands.ended == ["pinn", "faults", "averaging"]
    names = sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.*"))
    assert names == [
        *("averaging/few-of-it.png", "averaging/few.json"),
        *("faults/sharded-of-it.png", "faults/sharded.json"),
        *("pinn/heat-of-it.png", "pinn/heat.json"),
    ]
    assert not (tmp_path / "unfinished").exists()


def test_other_arguments_are_run_again(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("--out", tmp_path)
    monkeypatch.setattr(stages, "STAGES", (HEAT, Stage(FAULTS.results, "faults --kills 4", 3), AVERAGE))
    run("--out", tmp_path)
    assert commands.ended == ["pinn", "faults", "averaging", "faults"]


def test_a_fingerprint_is_of_the_code_behind_a_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    texts = {
        "kfac_optim/room/file.py": "1",
        "benchmarks/faults.py": "from benchmarks import helper\n",
        "benchmarks/helper.py": "from benchmarks.deep.below import name\n",
        "benchmarks/deep/below.py": "name = 1\n",
        "benchmarks/pinn.py": "1",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = fingerprint_of(FAULTS)
    for name, text in texts.items():
        (tmp_path / name).write_text(text + "# another\n")
        assert (fingerprint_of(FAULTS) == before) is (name == "benchmarks/pinn.py"), name
        (tmp_path / name).write_text(text)
    assert fingerprint_of(FAULTS) == before


def test_nothing_is_kept_of_a_stage_whose_code_changed_meanwhile(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(words: list[str]) -> int:
        monkeypatch.setattr(everything, "fingerprint_of", lambda _: "another")
        return commands(words)

    monkeypatch.setattr(everything, "start", change)
    with pytest.raises(SystemExit) as exit_:
        run("pinn", "faults", "--out", tmp_path)
    assert "pinn/heat failed: the code changed while it ran; call again" in str(exit_.value)
    assert "faults/sharded failed: the code has changed; call again" in str(exit_.value)
    assert not (tmp_path / "pinn").exists()


def test_the_others_run_where_one_fails(commands: Commands, tmp_path: Path) -> None:
    commands.codes["pinn"] = 2
    with pytest.raises(SystemExit, match=r"^pinn/heat failed: it ended with 2$"):
        run("--out", tmp_path)
    assert commands.ended == ["pinn", "faults", "averaging"]
    assert not (tmp_path / "pinn").exists()


@pytest.mark.usefixtures("commands")
def test_the_time_left_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> list[str]:
        return [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("[")]

    run("--out", tmp_path / "first")
    assert told() == [
        "pinn/heat: about 2 min, 1 h 10 min left in all",
        "faults/sharded: about 3 min, 1 h 8 min left in all",
        "averaging/few: about 1 h 5 min, 1 h 5 min left in all",
    ]
    # What the last run recorded counts more, and what was spent before a stop is over, of a command that goes on.
    (tmp_path / "of others" / "pinn").mkdir(parents=True)
    (tmp_path / "of others" / "pinn" / "heat.json").write_text('{"wall_seconds": 600.0}')
    for stage, spent in ((HEAT, "240"), (FAULTS, "60")):
        work = tmp_path / "second" / "unfinished" / fingerprint_of(stage) / stage.name.replace("/", "-")
        work.mkdir(parents=True)
        (work / "seconds").write_text(spent)
    run("pinn", "faults", "--out", tmp_path / "second")
    assert told() == [
        "pinn/heat: about 6 min, 9 min left in all",
        "faults/sharded: about 3 min, 3 min left in all",
    ]
    seconds = [json.loads((tmp_path / "second" / f"{s.name}.json").read_text())["wall_seconds"] for s in (HEAT, FAULTS)]
    assert seconds == pytest.approx([240, 0], abs=5)


@pytest.mark.usefixtures("commands")
def test_trials_of_an_earlier_result_are_expected_to_take_their_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Two optimizers, of four trials and two repeats each: it ran eight of the twelve runs, a minute each.
    two: list[dict[str, object]] = [{"name": name, "runs": [{}, {}]} for name in ("SGD", "K-FAC")]
    report = {"wall_seconds": 480.0, "trials": 4, "trials_of": [{"optimizers": ["SGD"]}], "optimizers": two}
    (tmp_path / "of others" / "pinn").mkdir(parents=True)
    (tmp_path / "of others" / "pinn" / "heat.json").write_text(json.dumps(report))
    run("pinn", "--out", tmp_path, "--dry-run")
    assert "1 of 1 stages to run: about 12 min" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["pinn", "fault"], ["--skip", "fault"], ["--data-dir", "nowhere"]])
def test_a_bad_name_is_refused_before_anything_runs(
    commands: Commands, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run("--out", tmp_path, *words)
    assert exit_.value.code == 2
    assert repr(words[-1]) in capsys.readouterr().err
    assert commands.ended == []


def test_what_would_measure_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(everything, "start", lambda words: pytest.fail(str(words)))
    with pytest.raises(SystemExit):
        run("scaling", "refresh", "--out", tmp_path)
    assert "without it refresh/refresh measures something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "skipped", "found"),
    [
        ([], ["pinn"], ["faults/sharded", "averaging/few"]),
        (["averaging/few", "pinn/"], [], ["pinn/heat", "averaging/few"]),
        (["pinn", "faults"], ["faults/sharded"], ["pinn/heat"]),
    ],
)
@pytest.mark.usefixtures("commands")
def test_stages_are_named_and_skipped(wanted: list[str], skipped: list[str], found: list[str]) -> None:
    chosen = stages.chosen([stages.matching(word) for word in wanted], [stages.matching(word) for word in skipped])
    assert [stage.name for stage in chosen] == found


def test_a_dry_run_shows_all_and_runs_nothing(
    commands: Commands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("pinn", "--out", tmp_path / "results")
    capsys.readouterr()
    run("--dry-run", "--out", tmp_path / "results")
    heat, faults, average, total = capsys.readouterr().out.splitlines()
    assert heat.split() == ["pinn/heat", "up", "to", "date", "pinn", "heat"]
    assert faults.split() == ["faults/sharded", "3", "min", "faults", "--kills", "3"]
    assert average.endswith("1 h 5 min   averaging digits")
    assert total == "2 of 3 stages to run: about 1 h 8 min"
    assert commands.ended == ["pinn"]
    run("--dry-run", "--out", tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere").exists()


def test_committed_results_have_recorded_the_commands_of_their_stages() -> None:
    of_results = {result: stage for stage in STAGES for result in stage.results}
    assert len(of_results) == sum(len(stage.results) for stage in STAGES)
    committed = {str(file.relative_to(RESULTS).with_suffix("")): file for file in RESULTS.rglob("*.json")}
    assert len(committed) > 40
    for name in committed.keys() - {"fuzz/counts"}:
        if name.partition("/")[0] in _LEFT_OUT:
            continue
        command = json.loads(committed[name].read_text())["command"]
        assert essence(command) == essence(of_results[name].command), name
        assert ("--data-dir" in command) is ("--data-dir" in of_results[name].command), name


def test_every_benchmark_has_a_stage_whose_arguments_are_right() -> None:
    assert {stage.benchmark for stage in STAGES} == ADD.keys() - _LEFT_OUT
    for stage in STAGES:
        assert everything._arguments(stage)


def test_data_are_in_the_folder_or_on_the_hub() -> None:
    stage = Stage(("any",), "quickstart --data-dir mnist --seed 1", 1)
    assert stage.words(Path("/d")) == ["quickstart", "--data-dir", "/d/mnist", "--seed", "1"]
    assert Stage(("any",), "compare digits --data-dir data", 1).words(Path("/d"))[2:] == ["--data-dir", "/d"]
    assert stage.words(None) == ["quickstart", "--seed", "1"]


@pytest.mark.slow
def test_a_real_command_leaves_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = Stage(("defaults/short",), "defaults regression --quick --steps 2", 1, leaves="defaults")
    monkeypatch.setattr(stages, "STAGES", (short,))
    run("--out", tmp_path)
    report = json.loads((tmp_path / "defaults" / "short.json").read_text())
    assert report["command"] == "python -m benchmarks defaults regression --quick --steps 2 --out defaults-short"
    assert report["fingerprint"] == fingerprint_of(short)
    assert 0 < report["wall_seconds"] < 300
    monkeypatch.setattr(everything, "start", lambda words: pytest.fail(str(words)))
    run("--out", tmp_path)


def test_a_command_and_all_that_it_has_started_end_with_the_one_that_started_it(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nsleep 300 &\necho > {tmp_path}/started\nwait\n")
    program.chmod(0o755)
    code = f"""if True:
        import sys
        from benchmarks import everything

        sys.executable, everything._PATIENCE = {str(program)!r}, 1.0
        everything.start([])
    """
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        # Sleep does not hear of an interruption, and is killed: the pipe ends where none that has inherited it is left.
        process.communicate(timeout=60)
        assert process.returncode != 0
