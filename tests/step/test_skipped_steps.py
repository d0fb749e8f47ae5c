"""Steps that are not taken, counted by the host and the device together as if by one."""

import itertools

import pytest
import torch

from kfac_optim.step.skipped_steps import SkippedSteps

# Who says whether the gradients are finite, and what; or a look between two steps.
EVENTS = [("device", True), ("device", False), ("host", True), ("host", False), ("look", True)]


@pytest.mark.parametrize("before", [0, 2])
def test_the_counts_are_those_of_a_host_that_saw_every_step(before: int) -> None:
    for events in itertools.product(EVENTS, repeat=4):
        skipped = SkippedSteps()
        skipped.restore(before, before)
        total = in_a_row = before
        for who, finite in events:
            if who == "device":
                skipped.defer(torch.tensor(finite))
            else:
                skipped.look()
                assert (skipped.total, skipped.in_a_row, skipped.deferred) == (total, in_a_row, 0), events
            if who == "host":
                (skipped.take if finite else skipped.skip)()
            if who != "look":
                total += not finite
                in_a_row = 0 if finite else in_a_row + 1
        skipped.look()
        assert (skipped.total, skipped.in_a_row) == (total, in_a_row), events
