"""Peaks of memory are what was held at once, and no more."""

import torch

from benchmarks.memory import peak_growth, tensor_bytes

CPU = torch.device("cpu")
SIZE = 400_000  # bytes of the tensors below


def test_the_peak_is_what_is_held_at_once() -> None:
    given = torch.zeros(100_000)

    def step() -> None:
        first = given + 1
        second = first * 2
        del first
        third = second - 1  # where the first was
        del second, third

    assert 2 * SIZE <= peak_growth(step, CPU) < 2 * SIZE + 1000


def test_memory_that_a_step_frees_does_not_hide_what_it_takes() -> None:
    held = [torch.zeros(100_000)]

    def step() -> None:
        taken = [torch.ones(100_000) for _ in range(3)]
        held.clear()
        del taken

    assert 3 * SIZE <= peak_growth(step, CPU) < 3 * SIZE + 1000


def test_bytes_of_nested_tensors() -> None:
    state = {"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.float64), {"c": (torch.zeros(1), 5, None)}]}
    assert tensor_bytes(state) == 12 + 16 + 4
