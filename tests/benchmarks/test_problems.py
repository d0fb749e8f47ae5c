"""Problems: batches that grow, and what is aimed at."""

import itertools

from benchmarks.problems import PROBLEMS, Aim, GrowingBatch


def test_growing_batches_end_with_all_examples() -> None:
    sizes = list(itertools.islice(GrowingBatch(first=1000, steps=500).sizes(60_000), 510))
    assert sizes[0] == 1000
    assert sizes[100] == round(1000 * 60 ** (100 / 499))
    assert sizes[499:] == [60_000] * 11
    assert sizes == sorted(sizes)


def test_validation_is_aimed_at_where_a_problem_says_so() -> None:
    aims = {name: problem.aim for name, problem in PROBLEMS.items()}
    assert {name for name, aim in aims.items() if aim is Aim.VALIDATION} == {
        "resnet20",
        "resnet20-plain",
        "cnn",
        "transformer",
        "lstm",
    }
