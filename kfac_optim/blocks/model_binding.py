"""The model as the optimizer knows it: found or given, its layers made into blocks, hooks that listen to them."""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfac_optim.blocks import checkpoint
from kfac_optim.blocks.attachment import (
    Attachment,
    attach,
    by_module,
)
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.building import Coverage
from kfac_optim.blocks.checkpoint_check import check_layers
from kfac_optim.blocks.discovery import build_blocks, claim
from kfac_optim.blocks.functional import FunctionalUses
from kfac_optim.blocks.model_finder import ModelFinder
from kfac_optim.blocks.options import BlockOptions
from kfac_optim.blocks.selection import ModuleNames
from kfac_optim.capture.function_modes import Product
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.utils.hooks import (
    Handle,
    Handles,
    PicklableHook,
    call_if_there,
)
from kfac_optim.utils.sharded_params import (
    is_sharded,
    local,
    refuse_flat,
)

UNACCOUNTED = "only a part of its gradient comes by calls that are captured"
"""Why a block is left to SGD whose captured calls do not add up to its gradient."""

Groups = Mapping[nn.Parameter, dict[str, Any]]
"""The param group of each parameter."""


class ModelBinding:
    """Blocks and hooks of one model, or of several that hold the optimizer's parameters.

    Args:
        model: None where it is to be found at its first forward.
        options: the user's choices about layers.
        window: takes the statistics.
        emitted: told of each block that took statistics.
        begin_forward: told that a forward of the model begins; gives the number of this worker.
        several: whether there are other processes, which may have what checkpoints lack here.

    Attributes:
        model: the model; a list of models where several were found, None before.
        given: whether the user named it.
        coverage: the blocks, and why parameters have none.
        released: whether the hooks were taken off.
        waiting: what a loaded checkpoint holds for blocks that are yet to come.
    """

    def __init__(
        self,
        model: nn.Module | None,
        options: BlockOptions,
        window: CaptureWindow,
        emitted: Callable[[KFACBlock], None],
        begin_forward: Callable[[nn.Module], int],
        *,
        several: bool = False,
    ) -> None:
        self.model: nn.Module | None = None
        self.given = model is not None
        self.coverage = Coverage()
        self.waiting: checkpoint.States = {}
        self._waiting_since = 0  # how many of our steps had been taken when that was loaded
        self.released = False
        self._to_adopt = model
        self._options = options
        self._window = window
        self._emitted = emitted
        self._begin_forward = begin_forward
        self._several = several
        self._groups: Groups = {}
        self._finder: ModelFinder | None = None
        self._settled = False
        self._steps = 0  # of this object; clocks of blocks, which are in checkpoints, tell all
        self._left_out: checkpoint.States = {}  # the marks of what was left to SGD since
        self._roots: dict[nn.Module, Handle] = {}
        self._attached: dict[nn.Module, tuple[Sequence[Attachment], Handle]] = {}
        self._lazy: dict[nn.Module, Handle] = {}
        self._functional = FunctionalUses(window, self._claim, emitted)
        window.mode, window.mode_wanted = self._functional.mode, self._before_forward
        window.graph_began = self._functional.look
        window.module_ran, window.layer_ran = self._functional.module_ran, self._functional.layer_ran

    def start(self, groups: Groups) -> None:
        """Hook the model, or begin to look for it."""
        self._groups = groups
        if self._to_adopt is not None:
            self._adopt(self._to_adopt)
        else:
            refuse_flat(groups, {})
            self._finder = ModelFinder(groups, self._found, self._window.roots.is_under_way)
        self._prepare()

    def bind(self, groups: Groups) -> None:
        """Take on other param groups; layers they complete are hooked, blocks that exist are kept."""
        self._groups = groups
        if self._roots:
            self._build()
        if self._finder is not None:
            refuse_flat(groups, {})
            self._finder.params = set(groups)
        self._prepare()

    def rebind(self, groups: Groups) -> None:
        """Take on the same parameters in other group dicts."""
        self._groups = groups
        for block in self.coverage.blocks:
            block.groups = tuple(groups[param] for param in block.params)

    @property
    def settled(self) -> bool:
        """Whether a step had gradients that are not zero."""
        return self._settled

    def settle(self) -> bool:
        """Note that with the first step that has gradients all that only a forward can show was shown.

        Returns:
            Whether that was now, and something had been awaited.

        Raises:
            ValueError: a pattern of the options matches no module of a model that had to be found.
        """
        # Gradients of zero are also what `torch.distributed.checkpoint` has a new optimizer step with. Looking at them
        # synchronises, at the first steps alone.
        if self._settled or not any(_says_something(param.grad) for param in self._groups):
            return False
        if self._finder is not None and self.model is not None:
            self._options.check_patterns(self.model)
        self._settled = True
        awaited = self._finder is not None or bool(self.coverage.candidates)
        self._stop_finding()
        return awaited

    def exclude_unmeasured(self) -> list[str]:
        """Leave to SGD what a function used in a way that is out of sight; the reasons, new ones only."""
        covered = {block.params[0]: block for block in self.coverage.blocks}
        reasons = {
            covered[param]: f"{covered[param].param_names[0]!r} is used by {function} in a way that is not measured"
            for param, function in self._functional.unmeasured().items()
            if param in covered
        }
        self.exclude(reasons)
        return list(reasons.values())

    def exclude(self, reasons: Mapping[KFACBlock, str]) -> None:
        """Leave blocks to SGD from now on, each for a reason that `summary()` and checkpoints tell."""
        if reasons:
            self._left_out |= {block.params[0]: checkpoint.mark(block.name, why) for block, why in reasons.items()}
            self._build()

    def end_check(self, unaccounted: Collection[KFACBlock]) -> list[str]:
        """Draw the conclusion of a step in which only a part of these blocks' gradients was captured.

        Their statistics start anew. What a backward brings of an earlier step's forward may explain one such step, but
        not two: then the blocks are left to SGD.

        Returns:
            The names of those left to SGD.
        """
        for block in unaccounted:
            block.strikes += 1
            block.restart()
        convicted = [block for block in self.coverage.blocks if block in unaccounted and block.strikes > 1]
        self.exclude(dict.fromkeys(convicted, UNACCOUNTED))
        return [block.name for block in convicted]

    def take_on(
        self, states: checkpoint.States, marks: checkpoint.States
    ) -> tuple[list[Mapping[str, Any] | None], checkpoint.States]:
        """Build the blocks that a checkpoint has, also those of layers that were frozen since it was made.

        Args:
            states: what the checkpoint holds for blocks.
            marks: those of the layers that it leaves to SGD; no other layer is left to SGD from now on.

        Returns:
            What `restore` is given next: the state of each block, None if there is none; and the states of the rest.
        """
        changed = self._would_change(states, marks)
        self._left_out, self.waiting = dict(marks), {}
        if changed:
            self._build(self._members(states))
        waiting = dict(states)
        return [waiting.pop(block.params[0], None) for block in self.coverage.blocks], waiting

    def blocks_with(self, states: checkpoint.States, marks: checkpoint.States) -> list[KFACBlock]:
        """Give the blocks that there would be after `take_on`; nothing is changed."""
        present = self.coverage.blocks
        if self.model is None or not self._would_change(states, marks):
            return present
        trained = self._members(states).union(*(block.params for block in present))
        left_out = dict.fromkeys(marks, "")
        found = build_blocks(self.model, self._groups, self._options, (), left_out, trained).blocks
        known = {tuple(map(id, block.params)): block for block in present}
        blocks = [known.get(tuple(map(id, block.params)), block) for block in found]
        covered = {param for block in blocks for param in block.params}.union(marks)
        return blocks + [block for block in present if covered.isdisjoint(block.params)]

    def _would_change(self, states: checkpoint.States, marks: checkpoint.States) -> bool:
        if self.model is None:
            return False
        return marks.keys() != self._left_out.keys() or not self._members(states).isdisjoint(self.coverage.frozen)

    def _members(self, states: checkpoint.States) -> set[nn.Parameter]:
        """Give the parameters of blocks with these states, as far as the model has them."""
        found: set[nn.Parameter] = set()
        if self.model is None or not states:
            return found
        names = ModuleNames(self.model)
        held = [dict(names.held_by(module, recurse=True)) for module in self.model.modules()]
        for param, state in states.items():
            first, *others = checkpoint.member_names(state)
            of_layer = next((each for each in held if each.get(first) is param), {})
            found.update(of_layer[name] for name in (first, *others) if name in of_layer)
        return found

    def does_nothing(self) -> bool:
        """Whether nothing is preconditioned against the user's wish, nor can yet be."""
        awaited = bool(self.coverage.lazy) or (bool(self.coverage.candidates) and not self._settled)
        return not (self.coverage.blocks or self._options.skip_layers or awaited)

    def end_step(self) -> None:
        """A step was taken."""
        self._steps += 1
        self._functional.end_step()
        self._grow()
        self._prepare()

    def release(self) -> None:
        """Take all hooks off."""
        self.released = True
        self._window.modes.leave()
        attached = (handle for _, handle in self._attached.values())
        for handle in (*self._roots.values(), *attached, *self._lazy.values()):
            handle.remove()
        self._roots.clear()
        self._attached.clear()
        self._lazy.clear()
        self._functional.forget()
        self._stop_finding()
        self._prepare()

    def close(self) -> None:
        """Let the model, and all that is known of it, be freed with the last reference that others have.

        The window and what it calls refer to each other: without this they would wait for the garbage collector.
        """
        self.release()
        self._window.discard()
        self._window.call_nobody()

    def names(self) -> dict[nn.Parameter, str]:
        """Fully qualified names of the model's parameters."""
        return {} if self.model is None else ModuleNames(self.model).parameters()

    def restore(self, states: Sequence[Mapping[str, Any] | None], waiting: checkpoint.States) -> None:
        """Load what a checkpoint holds for each block, and keep the rest for those to come."""
        self.waiting = self._functional.expected = waiting
        self._waiting_since = self._steps
        for block, state in zip(self.coverage.blocks, states, strict=True):
            checkpoint.restore(block, state, several=self._several)
        self._prepare()

    def beside_blocks(self) -> checkpoint.States:
        """What checkpoints hold of parameters without a block: what waits for one, and the marks of those left out."""
        waited = self._steps - self._waiting_since
        return {param: checkpoint.aged(state, waited) for param, state in self.waiting.items()} | self._left_out

    def awaits(self, param: nn.Parameter) -> bool:
        """Whether there may yet be a block whose first parameter this is."""
        coverage = self.coverage
        without = (coverage.candidates, coverage.lazy, coverage.frozen, self._left_out)
        return self.model is None or any(param in each for each in without)

    def _adopt(self, model: nn.Module, args_under_way: tuple[Any, ...] | None = None) -> None:
        """Take `model` as (one of) the optimizer's, in the place of any that it contains."""
        root = _in_wrapper(model)
        inside = set(root.modules())
        for known in [known for known in self._roots if known in inside]:
            self._roots.pop(known).remove()
        self._roots[root] = Handles()  # its layers are hooked first: a forward under way is told to their hooks
        self.model = model if len(self._roots) == 1 else nn.ModuleList(self._roots)
        self._build()
        self._roots[root] = self._window.watch_root(root, args_under_way if root is model else None)

    def _found(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        # A part of a model that is known is no other model.
        if not any(_in_wrapper(model) in root.modules() for root in self._roots):
            self._adopt(model, args)

    def _before_forward(self) -> bool:
        assert self.model is not None
        self._window.worker = self._begin_forward(self.model)
        self._grow()
        return self._functional.begin()

    def _prepare(self) -> None:
        """Tell compiled graphs, which cannot ask, whether the next forward is to capture."""
        self._window.capturing = bool(self._roots) and self._functional.is_wanted()
        self._window.step = max((block.clock.step for block in self.coverage.blocks), default=self._steps)

    def _stop_finding(self) -> None:
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    def _build(self, trained: Collection[nn.Parameter] = ()) -> None:
        """Find the blocks; keep those that exist, hook in those that are new, unless the hooks were taken off.

        Args:
            trained: parameters that belong to blocks though they are frozen now.
        """
        assert self.model is not None
        names = ModuleNames(self.model)
        self._refuse_stand_ins(names)
        refuse_flat(self._groups, names.parameters())
        self._window.shards = names.shards
        left_out = {param: checkpoint.reason_of(mark) for param, mark in self._left_out.items()}
        trained = self._members(self.waiting).union(trained)
        self.coverage = build_blocks(self.model, self._groups, self._options, self.coverage.blocks, left_out, trained)
        if not self.released:
            self._hook(self.model, names)
        if not self._several:
            self._window.probe.choose(param for block in self.coverage.blocks for param in block.params)
        self.rebind(self._groups)
        for block in self.coverage.blocks:
            self._restore_waiting(block)

    def _hook(self, model: nn.Module, names: ModuleNames) -> None:
        """Listen to the layers of the blocks, and to those that may yet have one."""
        blocks = self.coverage.blocks
        wanted = by_module(blocks)
        for module, (attached, handle) in list(self._attached.items()):
            if wanted.get(module) != attached:
                handle.remove()
                del self._attached[module]
        for module, attachments in wanted.items():
            if module not in self._attached:
                handle = attach(module, attachments, self._window, self._emitted)
                self._attached[module] = (attachments, handle)
        self._watch_lazy(module for module in model.modules() if any(map(is_lazy, module.parameters(recurse=False))))
        self._functional.know(blocks, self.coverage.candidates, self.coverage.owners(names))

    def _refuse_stand_ins(self, names: ModuleNames) -> None:
        held = names.parameters()
        for param in self._groups:
            if names.shards.is_stand_in(param):
                name = held[names.shards.known(param)]
                raise RuntimeError(
                    f"kfac_optim: {name!r} is kept in shards, but what was handed over is that parameter as FSDP2 has "
                    "gathered it for a forward. Call reshard() on the modules that fully_shard wrapped before their "
                    "parameters are handed to the optimizer."
                )

    def refuse_replaced(self) -> None:
        """Raise where the model was sharded since the optimizer was built.

        Raises:
            RuntimeError: it has sharded parameters now in the place of the optimizer's.
            NotImplementedError: see `refuse_flat`.
        """
        if self.model is None:
            return
        names = ModuleNames(self.model)
        held = names.parameters()
        refuse_flat(self._groups, held)
        if not any(map(is_sharded, held)):
            return
        was_held = {
            param: name
            for block in self.coverage.blocks
            for param, name in zip(block.params, block.param_names, strict=True)
        }
        for param in (*was_held, *self.coverage.uncovered):
            if param not in held:
                raise RuntimeError(
                    f"kfac_optim: the optimizer was built before fully_shard put another parameter in the place of "
                    f"{was_held.get(param, list(param.shape))!r}, and would go on without it. Build it afterwards."
                )

    def _watch_lazy(self, modules: Iterable[nn.Module]) -> None:
        """Hook modules that learn their shapes as their first forward begins, so that it counts already."""
        lazy = set(modules)
        for module in self._lazy.keys() - lazy:
            self._lazy.pop(module).remove()
        for module in lazy - self._lazy.keys():
            grow = weakref.WeakMethod(self._grow_within)
            hook = PicklableHook(lambda *given, grow=grow: call_if_there(grow, *given))
            self._lazy[module] = module.register_forward_pre_hook(hook)

    def _grow(self) -> bool:
        grows = bool(self._roots) and self.coverage.has_grown()
        if grows:
            self._build()
        return grows

    def _grow_within(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        known = self._window.hooked()
        if self._grow():
            self._window.catch_up(module, args, known)

    def _claim(self, product: Product) -> KFACBlock | None:
        assert self.model is not None
        block = claim(self.model, product, self._groups, self._options, self.coverage)
        if block is not None:
            self._restore_waiting(block)
        return block

    def _restore_waiting(self, block: KFACBlock) -> None:
        """Give a new block what a checkpoint that was loaded before held for it."""
        state = self.waiting.get(block.params[0])
        if state is not None:
            check_layers([block], [state], [], any_prefix=not self.given, several=self._several)
            checkpoint.restore(block, state, several=self._several)
            _let_pass(block, self._steps - self._waiting_since)
            for other in self.coverage.blocks:  # the unit is one for all
                if other.params[0] not in self.waiting:
                    block.clock.use_unit(other.clock.loss_unit)
            del self.waiting[block.params[0]]


def _let_pass(block: KFACBlock, steps: int) -> None:
    """Let steps pass in which the layer was out of sight; a refresh that fell due then is due now."""
    for _ in range(seen := min(steps, block.group["inverse_update_period"])):
        if block.refresh_due():
            block.clock.call_for_refresh()
        block.clock.advance()
    block.clock.advance(steps - seen)


def _in_wrapper(model: nn.Module) -> nn.Module:
    """The module whose forwards count: users may wrap it anew, as DDP asks for after parameters were unfrozen."""
    wrapped: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return wrapped


def _says_something(gradient: Tensor | None) -> bool:
    return gradient is not None and (gradient.is_meta or bool(local(gradient).any()))
