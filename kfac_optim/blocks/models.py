"""The model, or the models, that hold the optimizer's parameters: given by the user, or found as they are called."""

from collections.abc import Callable, Collection, Iterable
from typing import Any, cast

from torch import nn

from kfac_optim.blocks.model_finder import ModelFinder
from kfac_optim.blocks.selection import ModuleNames
from kfac_optim.capture.model_hooks import watch_called_part, watch_root
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.utils.hooks import Handle, Handles, weakly


class Models:
    """Holds the models and the hooks on their forwards.

    Args:
        model: the model; None if it is to be found at its first forward.
        window: hears of the forwards.
        build: is called to build the blocks of the models, one of which is new; where it raises, that one is not taken.
            A bound method, held weakly, as is the next.
        adopted: is called as one was taken.

    Attributes:
        model: the model; a list of models if several were found, None before one is found.
        given: whether the user named the model.
    """

    def __init__(
        self, model: nn.Module | None, window: CaptureWindow, build: Callable[[], None], adopted: Callable[[], None]
    ) -> None:
        self.model: nn.Module | None = None
        self.given = model is not None
        self._to_adopt = model
        self._window = window
        self._build, self._adopted = weakly(build), weakly(adopted)
        self._roots: dict[nn.Module, Handle] = {}
        self._finder: ModelFinder | None = None
        self._params: Collection[nn.Parameter] = ()

    @property
    def found(self) -> int:
        """Return how many models were found so far; 0 where the user has given the model."""
        return 0 if self.given else max(1, len(self._roots))

    @property
    def are_hooked(self) -> bool:
        """Return whether forwards of any model are heard of."""
        return bool(self._roots)

    @property
    def are_awaited(self) -> bool:
        """Return whether a model is looked for."""
        return self._finder is not None

    def names(self) -> dict[nn.Parameter, str]:
        """Return the fully qualified names of the parameters of the models."""
        return {} if self.model is None else ModuleNames(self.model).parameters()

    def start(self, params: Collection[nn.Parameter]) -> None:
        """Hook the model, or begin to look for what holds these parameters."""
        self._params = params
        if self._to_adopt is None:
            self._look_for(params)
        else:
            self._adopt(self._to_adopt)
            self._window.outside = weakly(self._meet_part)

    def take_on(self, params: Collection[nn.Parameter]) -> bool:
        """Take on the optimizer's new parameters, and return whether a module that holds some is still to be called."""
        self._params = params
        if self._finder is None:
            held = self.names()
            if self.given or all(param in held for param in params):
                return False
        self._look_for(params)
        return True

    def settle(self, *, waits: bool) -> None:
        """Stop looking, as a step has had gradients.

        Args:
            waits: whether to go on for what no gradient has come to and no known model holds: a module that is called
                later may hold it.
        """
        self._window.outside = None
        held = {} if self._finder is None else self.names()
        uncalled = [each for each in self._params if each.requires_grad and each.grad is None and each not in held]
        if waits and self._finder is not None and self.model is not None and uncalled:
            self._finder.look_for(uncalled, stays=True)
        else:
            self._stop_looking()

    def release(self) -> None:
        """Take all hooks off."""
        for handle in self._roots.values():
            handle.remove()
        self._roots.clear()
        self._stop_looking()

    def _look_for(self, params: Iterable[nn.Parameter]) -> None:
        if self._finder is None:
            self._finder = ModelFinder(params, self._adopt, self._window.roots.is_under_way)
        else:
            self._finder.look_for(params, stays=False)

    def _stop_looking(self) -> None:
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    def _adopt(self, model: nn.Module, args_under_way: tuple[Any, ...] | None = None) -> None:
        """Take `model` as (one of) the optimizer's; models that it contains are no longer separate ones.

        Args:
            model: the model.
            args_under_way: the arguments of its forward that is running; None if there is none.
        """
        root = _in_wrapper(model)
        if any(root in known.modules() for known in self._roots):
            return  # a part of a model that is known is no other model
        inside = set(root.modules())
        before, self._roots = self._roots, {known: hooks for known, hooks in self._roots.items() if known not in inside}
        # Its layers are hooked first: a forward that is under way then reaches their hooks.
        self._roots[root] = Handles()
        model_before, self.model = self.model, model if len(self._roots) == 1 else nn.ModuleList(self._roots)
        try:
            self._build()
        except Exception:  # choices that do not go with a layer: it is told of again at the next forward
            self._roots, self.model = before, model_before
            raise
        for known in before.keys() - self._roots.keys():
            before[known].remove()
        self._roots[root] = watch_root(self._window, root, args_under_way if root is model else None)
        self._adopted()

    def _meet_part(self) -> None:
        """Have a part of the given model count as the model does, if it is called in its place."""
        (root,) = self._roots
        self._roots |= watch_called_part(self._window, root, {each for each in self._params if each.requires_grad})


def _in_wrapper(model: nn.Module) -> nn.Module:
    """Return the module whose forwards count: DDP may be put around it again, as after parameters were unfrozen."""
    return cast(nn.Module, model.module) if isinstance(model, nn.parallel.DistributedDataParallel) else model
