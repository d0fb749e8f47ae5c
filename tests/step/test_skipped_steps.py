"""Steps that are not taken, counted by the host and the device together as if by one."""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kfac_optim.step.skipped_steps import SkippedSteps, fused_kernels_look

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


def test_fused_kernels_look_for_themselves_once_every_momentum_is_there() -> None:
    with FakeTensorMode():
        weight, bias = (nn.Parameter(torch.zeros(2, device="cuda")) for _ in range(2))
        gradients = {weight: torch.zeros(2, device="cuda"), bias: torch.zeros(2, device="cuda")}
        momentum = {param: {"momentum_buffer": torch.zeros(2, device="cuda")} for param in gradients}
    for param, gradient in gradients.items():
        param.grad = gradient
    group = {"fused": True, "momentum": 0.9, "params": [weight, bias]}
    assert fused_kernels_look([group], gradients, momentum)
    assert not fused_kernels_look([group], gradients, {weight: momentum[weight]})
    assert fused_kernels_look([{**group, "momentum": 0.0}], gradients, {})
    assert not fused_kernels_look([{**group, "fused": None}], gradients, momentum)
