"""Problems: batches that grow, and what is aimed at."""

import itertools

import torch

from benchmarks.data import ImageData, Split
from benchmarks.examples import read_noisy, read_photographs
from benchmarks.problem import Aim, FixedBatch, GrowingBatch
from benchmarks.problems import PROBLEMS


def test_growing_batches_end_with_all_examples() -> None:
    sizes = list(itertools.islice(GrowingBatch(first=1000, steps=500).sizes(60_000), 510))
    assert sizes[0] == 1000
    assert sizes[100] == round(1000 * 60 ** (100 / 499))
    assert sizes[499:] == [60_000] * 11
    assert sizes == sorted(sizes)


def test_full_batch_runs_last_as_much_longer_as_others() -> None:
    problem = PROBLEMS["mnist-a"]
    assert (problem.steps, problem.full_batch_steps) == (600, 60)
    assert problem.lasting(200).full_batch_steps == 20
    assert problem.lasting(1).full_batch_steps == 1
    assert PROBLEMS["lstm"].lasting(200).full_batch_steps is None


def test_validation_is_aimed_at_where_a_problem_says_so() -> None:
    aims = {name: problem.aim for name, problem in PROBLEMS.items()}
    assert {name for name, aim in aims.items() if aim is Aim.VALIDATION} == {
        "resnet20",
        "resnet20-plain",
        "cnn",
        "transformer",
        "lstm",
        "unet",
        "vit",
    }


def test_photographs_are_normalised_and_channels_last_where_drawn_and_where_read() -> None:
    split = Split(torch.rand(4, 3, 8, 8) + 3, torch.arange(4))
    examples = read_photographs(ImageData(split, split, classes=4))
    drawn, _ = next(examples.draw(FixedBatch(2).sizes(4), 0))
    for images in (drawn, examples.training.inputs, examples.validation.inputs):
        assert images.is_contiguous(memory_format=torch.channels_last)
    read = examples.training.inputs
    torch.testing.assert_close(read.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(read.std(dim=(0, 2, 3)), torch.ones(3))


def test_noise_is_new_in_each_batch_and_the_same_from_one_seed() -> None:
    split = Split(torch.rand(64, 1, 8, 8), torch.arange(64))
    examples = read_noisy(ImageData(split, split, classes=4), deviation=0.5)
    batches = [list(itertools.islice(examples.draw(FixedBatch(64).sizes(64), 3), 2)) for _ in range(2)]
    for (noisy, clean), (again, clean_again) in zip(*batches, strict=True):
        assert torch.equal(noisy, again)
        assert torch.equal(clean, clean_again)
        torch.testing.assert_close((noisy - clean).std(), torch.tensor(0.5), atol=0.05, rtol=0)
    (first, clean), (second, others) = ((noisy - clean, clean.flatten(1).sum(1)) for noisy, clean in batches[0])
    assert not torch.equal(first[clean.argsort()], second[others.argsort()])


def test_outputs_differ_in_size_by_a_thousand_and_each_counts_alike() -> None:
    examples = PROBLEMS["scales"].load(None)
    targets = examples.validation.targets
    sizes = targets.std(0)
    assert 500 < sizes[-1] / sizes[0] < 2000
    zeros = torch.zeros_like(targets)
    torch.testing.assert_close(PROBLEMS["scales"].score(zeros, targets), torch.tensor(1.0))
