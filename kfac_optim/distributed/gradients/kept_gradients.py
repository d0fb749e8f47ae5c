"""Gradients that were brought to their owners, and to which backwards may add."""

import weakref
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.utils.autograd import on_gradient, reaches
from kfac_optim.utils.hooks import Handle, weakly


class KeptGradients:
    """Holds the mean that the owner of a gradient has apart from what backwards add to it.

    [Note: several backwards] Once a gradient was brought to its owner, `.grad` is the mean there, and means nothing on
    other ranks. Unless it is dropped, a backward adds to that on all ranks, and only what it adds is to be averaged. So
    before the first addition the owner copies its gradient, which the user may have changed by then, and other ranks
    zero theirs. What is sent lacks the copy, and the owner adds the copy to the mean. A gradient that is zeroed after
    an addition has no such copy any more; other changes there are taken for a part of the addition.
    What a backward without reduction adds after one with reduction is averaged by nobody, unless another one reduces
    later: so the norms of such additions are noted, and ranks compare them.

    Args:
        owner_of: the rank that updates a parameter, -1 where all do.
        rank: this rank.

    Attributes:
        brought: the parameters whose gradients were brought to their owners in this step.
    """

    def __init__(self, owner_of: Mapping[nn.Parameter, int], rank: int) -> None:
        self._owner_of = owner_of
        self._rank = rank
        self._handles: dict[nn.Parameter, Handle] = {}
        self.forget()

    def __bool__(self) -> bool:
        """Return whether any gradient was brought since they were dropped."""
        return bool(self.brought or self._means)

    def forget(self) -> None:
        """Take notice that all gradients were dropped."""
        self._means: dict[nn.Parameter, Tensor | None] = {}  # None where nothing was added yet
        self.end_step()

    def end_step(self) -> None:
        """Take notice that a step has used the gradients, or that none will."""
        self.brought: set[nn.Parameter] = set()
        self._added: dict[nn.Parameter, Tensor] = {}

    def keep(self, params: Iterable[Any]) -> None:
        """Take notice that what owners have from now on is the mean."""
        for param in params:
            if param not in self._owner_of:
                continue
            self.brought.add(param)
            if self._owner_of[param] >= 0:
                self._means[param] = None
            if param.requires_grad and param not in self._handles:
                self._handles[param] = on_gradient(param, weakly(self._before_addition, weakref.ref(param)))

    def take_off(self, param: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """Leave in a gradient only what is still to be averaged.

        Args:
            param: a parameter.
            gradient: its gradient, or a copy of that, which is changed.

        Returns:
            What the owner has to add to the mean; None if there is nothing, and on other ranks.
        """
        self._added.pop(param, None)
        if param.grad is None or param not in self._means:
            return None
        mean = self._means.pop(param)
        if mean is None:  # nothing was added
            mean = gradient.clone()
        gradient.sub_(mean)
        return mean if self._owner_of[param] == self._rank else None

    def norm_of_added(self) -> float:
        """Return the norm of what was added to gradients whose mean their owners had, and which nobody has averaged.

        It is right where all ranks have added the same, as of a penalty on weights with a backward of its own.
        """
        norm = sum(map(float, self._added.values())) ** 0.5
        return norm if norm < inf else inf  # a vote has no place for NaN

    def close(self) -> None:
        """Look at gradients no longer."""
        for handle in self._handles.values():
            handle.remove()

    def _before_addition(self, reference: weakref.ref[nn.Parameter], gradient: Tensor) -> None:
        param = reference()
        if param is None or not (param in self.brought or param in self._means) or not reaches(param):
            return
        if param in self.brought:
            added = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64).square()
            self._added[param] = self._added[param] + added if param in self._added else added
        if param not in self._means:
            return
        if param.grad is None:
            del self._means[param]
        elif self._owner_of[param] != self._rank:
            del self._means[param]
            param.grad.detach().zero_()
        elif self._means[param] is None or not bool(param.grad.any()):
            self._means[param] = param.grad.detach().clone()
