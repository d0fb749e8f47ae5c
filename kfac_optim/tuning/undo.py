"""Everything that trial steps change, put back: the model, random states and the loader."""

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

_PARTS = (  # of a loader
    *("dataset", "datasets", "data_source", "sampler", "batch_sampler", "collate_fn"),
    *("transform", "transforms", "target_transform"),  # as data sets of torchvision have them, and its Compose
)
_MISSING = object()


@contextmanager
def everything_undone(
    modules: Sequence[nn.Module], params: Iterable[Tensor], loader: Any
) -> Iterator[Callable[[], None]]:
    """Return a context that leaves modules, parameters, random states and loader to the bit as it found them.

    Args:
        modules: with their parameters, buffers, gradients and attributes, hooks among them.
        params: further ones.
        loader: a loader of batches.

    Yields:
        A function that puts back all but the loader, for the next trial.
    """
    tensors = [tensor for module in modules for tensor in _own(module)]
    tensors = list({id(tensor): tensor for tensor in (*tensors, *params)}.values())
    values = [(tensor, tensor.detach().clone(), tensor.grad if tensor.is_leaf else None) for tensor in tensors]
    attributes = [_Attributes(module) for module in modules]
    states = [*_random_states(), *(_state_of(generator) for generator in _generators(loader))]

    def undo() -> None:
        for each in attributes:
            each.put_back()
        with torch.no_grad():
            for tensor, value, gradient in values:
                tensor.copy_(value)
                if tensor.is_leaf:
                    tensor.grad = gradient
        for put_back in states:
            put_back()

    with _position_kept(loader):
        try:
            yield undo
        finally:
            undo()


def _own(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself."""
    registered = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in registered if tensor is not None]


class _Attributes:
    """Holds what the attributes of an object are bound to, and what stands in those of them that are dicts."""

    def __init__(self, owner: object) -> None:
        attributes = vars(owner)
        held = (attributes, *(value for value in attributes.values() if isinstance(value, dict)))
        self._kept = [(each, dict(each)) for each in held]

    def put_back(self) -> None:
        for now, kept in self._kept:
            if list(now) != list(kept):  # hooks have an order
                now.clear()
            for name, value in kept.items():
                if now.get(name, _MISSING) is not value:
                    now[name] = value


def _random_states() -> list[Callable[[], object]]:
    """Return what puts back the generators of torch, Python and NumPy."""
    put_back: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # pragma: cuda
        put_back.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if (numpy := sys.modules.get("numpy")) is not None:
        put_back.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return put_back


def _parts(loader: Any) -> list[Any]:
    """Return the loader with its samplers, its data sets and their transforms, those that have attributes."""
    seen: dict[int, Any] = {}
    todo = [loader]
    while todo:
        each = todo.pop()
        if id(each) in seen or not hasattr(each, "__dict__"):
            continue
        seen[id(each)] = each
        for part in (vars(each).get(name) for name in _PARTS):
            todo += part if isinstance(part, list | tuple) else [part]
    return list(seen.values())


def _generators(loader: Any) -> list[Any]:
    """Return the generators that a loader and its parts hold as attributes; see `_PARTS`."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    values = [value for part in _parts(loader) for value in vars(part).values()]
    return list({id(value): value for value in values if isinstance(value, kinds)}.values())


def _state_of(generator: Any) -> Callable[[], object]:
    """Return what puts back a generator of torch, Python or NumPy."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if hasattr(generator, "bit_generator"):
        return partial(setattr, generator.bit_generator, "state", copy.deepcopy(generator.bit_generator.state))
    return partial(generator.set_state, generator.get_state())


@contextmanager
def _position_kept(loader: Any) -> Iterator[None]:
    """Return a context after which a loader goes on where it stood."""
    # A loader that can be iterated again keeps its position in iterators of its own; what it knows of them comes back
    # with its attributes.
    state = copy.deepcopy(loader.state_dict()) if has_position(loader) and hasattr(loader, "__next__") else None
    attributes = [_Attributes(part) for part in _parts(loader)]
    if isinstance(loader, DataLoader):
        # Workers that persist have random states of their own: trials get other workers.
        vars(loader)["_iterator"] = None
    try:
        yield
    finally:
        if state is None:
            for each in attributes:
                each.put_back()
        else:
            loader.load_state_dict(state)


def has_position(loader: Any) -> bool:
    """Return whether a loader tells where it stands, and can be put there."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
