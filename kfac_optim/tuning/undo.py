"""Everything that trial steps change, put back: the model, random states and the loader."""

import copy
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kfac_optim.utils.autograd import version
from kfac_optim.utils.tensor_storage import held_once

_PARTS = (  # of a loader
    *("dataset", "datasets", "data_source", "sampler", "batch_sampler", "collate_fn"),
    *("transform", "transforms", "target_transform"),  # as data sets of torchvision have them, and its Compose
)
_MISSING = object()
_UNCOUNTED = -1  # is the version of a tensor that is put back whether or not a change in place was counted


@contextmanager
def everything_undone(
    modules: Sequence[nn.Module], params: Iterable[Tensor], loader: Any
) -> Iterator[Callable[[], None]]:
    """Return a context that leaves modules, parameters, random states and loader to the bit as it found them.

    Args:
        modules: the modules, with their parameters, buffers, gradients and attributes, hooks among them, and what those
            hold.
        params: further parameters.
        loader: a loader of batches.

    Yields:
        A function that puts back all but the loader, for the next trial.
    """
    own = [tensor for module in modules for tensor in _own(module)]
    registered = {id(tensor): tensor for tensor in (*own, *params)}
    # Of a sparse buffer only what it is bound to comes back.
    tensors = [(tensor, _UNCOUNTED) for tensor in registered.values() if tensor.layout is torch.strided]
    tensors += [(tensor, version(tensor)) for tensor in _unregistered(modules, registered)]
    values = [
        (*each, held_once(each[0].detach()).clone(), each[0].grad if each[0].is_leaf else None) for each in tensors
    ]
    attributes = [_Attributes(module) for module in modules]
    generators = _generators([*modules, *_parts(loader)])
    states = [*_random_states(), *(_state_of(generator) for generator in generators)]

    def undo() -> None:
        for each in attributes:
            each.put_back()
        with torch.no_grad():
            for tensor, count, value, gradient in values:
                if version(tensor) != count:
                    held_once(tensor).copy_(value)
                if tensor.is_leaf:
                    tensor.grad = gradient
        torch.clear_autocast_cache()  # of parameters as they were
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


def _held(owner: object) -> list[Any]:
    """Return what the attributes of an object are bound to, and what stands in those of them that are containers."""
    values = list(vars(owner).values())
    for value in tuple(values):
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list | tuple | deque | set):
            values += value
    return values


def _unregistered(modules: Iterable[nn.Module], registered: Container[int]) -> list[Tensor]:
    """Return the tensors that modules hold, but for those of these identities, and those that cannot be written to."""
    found = {id(value): value for module in modules for value in _held(module) if isinstance(value, Tensor)}
    plain = [value for key, value in found.items() if key not in registered and not value.is_nested]
    return [value for value in plain if value.layout is torch.strided and 0 not in value.stride()]  # 0: it is expanded


class _Attributes:
    """Holds what the attributes of an object are bound to, and what stands in those of them that are containers."""

    def __init__(self, owner: object) -> None:
        attributes = vars(owner)
        values = tuple(attributes.values())
        self._kept = [(each, dict(each)) for each in (attributes, *values) if isinstance(each, dict)]
        self._listed = [(each, tuple(each)) for each in values if isinstance(each, list | deque | set)]

    def put_back(self) -> None:
        for listed, members in self._listed:
            if len(listed) != len(members) or any(map(operator.is_not, listed, members)):
                listed.clear()
                (listed.update if isinstance(listed, set) else listed.extend)(members)
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


def _generators(owners: Iterable[object]) -> list[Any]:
    """Return the generators that objects hold."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if (numpy := sys.modules.get("numpy")) is not None:
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    values = [value for owner in owners for value in _held(owner)]
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
