"""Refreshes on a thread of their own, and on accelerators in a stream of their own, whichever executor does it."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from weakref import WeakKeyDictionary

import torch

from kfac_optim.blocks.block import KFACBlock, RefreshUnderWay
from kfac_optim.blocks.shadow import adopt, make_shadow
from kfac_optim.step.execution import Executor
from kfac_optim.step.refresh_schedules import Background
from kfac_optim.step.refresher import Refresher

_Lane = tuple[torch.Stream, torch.Event]
"""A side stream of one device, and when the copies were made that it is to read."""


class BackgroundRefresher(Refresher):
    """Has `executor` refresh copies of blocks while training goes on, and takes the results over between two steps.

    [Note: who owns what] A shadow, the copy of a block, belongs to the worker from when its refresh is begun until
    that is done; then to the block, until its result is taken over; then to this object, for the next time. A block
    that gives a refresh up (restarted, moved, restored from a checkpoint) lets go of the shadow, which the worker alone
    then holds: so nothing writes to what another thread reads, and nothing has to be waited for or cancelled. As the
    worker holds shadows and `executor` alone, the optimizer may go at any time.
    """

    def __init__(self, executor: Executor, choice: Background) -> None:
        super().__init__(executor)
        self._choice = choice
        self._begin_worker()
        self._spares: WeakKeyDictionary[KFACBlock, KFACBlock] = WeakKeyDictionary()
        self._streams: dict[torch.device, torch.Stream] = {}

    def _begin_worker(self) -> None:
        self._worker = ThreadPoolExecutor(1, "kfac-refresh")  # one thread: refreshes run in the order they were begun
        self._process = os.getpid()

    def collect(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        if self._process != os.getpid():  # a fork has no threads: what was under way in the other process ends there
            self._begin_worker()
            for block in blocks:
                if block.under_way is not None and not block.under_way.done.done():
                    block.under_way = None
        collected = []
        for block in blocks:
            if block.under_way is not None and self._is_awaited(block, block.under_way):
                self._take_over(block, block.under_way, blocks)
                collected.append(block)
        if collected:
            self._executor.statistics.share(collected)
        return collected

    def refresh(self, blocks: Sequence[KFACBlock]) -> Sequence[KFACBlock]:
        # What is outdated led to a step that was taken back, and would lead to it again.
        at_once = [block for block in blocks if block.clock.outdated or not block.is_ready]
        begun = [block for block in blocks if block not in at_once and block.under_way is None]
        refreshed = super().refresh(at_once)
        if begun:
            self._executor.statistics.merge(begun)
            self._begin(begun)
        return [*refreshed, *self.collect(begun)] if self._choice.max_staleness == 0 else refreshed

    def _is_awaited(self, block: KFACBlock, under_way: RefreshUnderWay) -> bool:
        """Return whether the result is to be taken over at this step, waited for or not."""
        age = block.clock.step - under_way.shadow.clock.step
        found = under_way.done.done() and not self._choice.deterministic
        return found or age >= self._choice.max_staleness

    def _begin(self, blocks: Sequence[KFACBlock]) -> None:
        shadows = [make_shadow(block, self._spares.pop(block, None)) for block in blocks]
        self._executor.statistics.mark(shadows)  # now, as a checkpoint may merge again before the worker gets to them
        done = self._worker.submit(
            _refresh, self._executor.statistics.solve, shadows, self._lanes(shadows), torch.get_num_threads()
        )
        for block, shadow in zip(blocks, shadows, strict=True):
            block.under_way = RefreshUnderWay(shadow, done)

    def _take_over(self, block: KFACBlock, under_way: RefreshUnderWay, blocks: Sequence[KFACBlock]) -> None:
        error = under_way.done.exception()  # waits
        if error is not None:
            failed = [each for each in blocks if each.under_way is not None and each.under_way.done is under_way.done]
            for each in failed:
                each.under_way = None
            raise RuntimeError(
                f"kfac_optim: the background refresh of {', '.join(repr(each.name) for each in failed)}, begun at step "
                f"{under_way.shadow.clock.step}, raised {type(error).__name__}: {error}. They keep their inverses and "
                f"are refreshed again when they are next due."
            ) from error
        adopt(block, under_way.shadow)
        self._spares[block] = under_way.shadow

    def _lanes(self, shadows: Sequence[KFACBlock]) -> list[_Lane]:
        """Give for each accelerator with a shadow its stream, and the copies just queued in the present one."""
        lanes = []
        devices = {shadow.params[0].device for shadow in shadows}
        for device in (each for each in devices if each.type not in ("cpu", "meta")):  # pragma: cuda
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            copied = torch.Event(device)
            copied.record(torch.accelerator.current_stream(device))
            lanes.append((self._streams[device], copied))
        return lanes


def _refresh(
    solve: Callable[[Sequence[KFACBlock]], None], shadows: Sequence[KFACBlock], lanes: Sequence[_Lane], threads: int
) -> None:
    """Refresh on the worker, where grad mode and torch's threads are not those of the caller, and autocast is off."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)  # as in the step: results depend on it bitwise
    with torch.no_grad(), ExitStack() as stack:
        for stream, copied in lanes:  # pragma: cuda
            stack.enter_context(stream)
            stream.wait_event(copied)
        solve(shadows)
    # Done is done on the device too: the step that takes the results over need not wait for this stream, and memory of
    # a shadow that is let go may be used again.
    for stream, _ in lanes:  # pragma: cuda
        stream.synchronize()
