"""The model as the optimizer knows it: found or given, its layers made into blocks, and hooks that listen to them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from kfac_optim.blocks import checkpoint
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.building import Coverage
from kfac_optim.blocks.checkpoint_check import check_layers
from kfac_optim.blocks.clock import period_of
from kfac_optim.blocks.discovery import build_blocks, claim
from kfac_optim.blocks.folding import WaitingRows, sum_rows
from kfac_optim.blocks.functional import FunctionalUses
from kfac_optim.blocks.models import Models
from kfac_optim.blocks.module_hooks import ModuleHooks
from kfac_optim.blocks.options import BlockOptions
from kfac_optim.blocks.pending_states import PendingStates, members
from kfac_optim.blocks.preconditioning import says_something
from kfac_optim.blocks.replaced_params import refuse_stand_ins
from kfac_optim.blocks.selection import ModuleNames
from kfac_optim.capture.contractions import TensorProduct
from kfac_optim.capture.function_modes import Product
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.utils.hooks import weakly
from kfac_optim.utils.sharded_params import refuse_flat

UNACCOUNTED = "only a part of its gradient comes by calls that are captured"
"""Why a block is left to SGD whose captured calls do not add up to its gradient."""

Groups = Mapping[nn.Parameter, dict[str, Any]]
"""The param group of each parameter."""


class ModelBinding:
    """Holds the blocks and hooks of one model, or of several that hold the optimizer's parameters.

    Args:
        model: the model; None if it is to be found at its first forward.
        options: the user's choices about layers.
        window: takes the statistics.
        emitted: is called with each block that took statistics.
        begin_forward: is called as a forward of the model begins; returns `Executor.source`.
        late: is called with a block that is built after a checkpoint was loaded, and what that holds for it; returns
            `WholeStates.late`.
        several: whether there are other processes, which may have what checkpoints lack here.

    Attributes:
        coverage: the blocks, and why parameters have none.
        pending: what checkpoints hold of parameters without a block.
        settled: whether a step had gradients that are not zero.
        released: whether the hooks were taken off.
    """

    def __init__(
        self,
        model: nn.Module | None,
        options: BlockOptions,
        window: CaptureWindow,
        emitted: Callable[[KFACBlock], None],
        begin_forward: Callable[[nn.Module], int],
        late: Callable[[KFACBlock, Mapping[str, Any]], Mapping[str, Any]],
        *,
        several: bool,
    ) -> None:
        self.coverage = Coverage()
        self.pending = PendingStates()
        self.settled = False
        self.released = False
        self._models = Models(model, window, self._build, self._adopted)
        self._options = options
        self._window = window
        self._begin_forward = begin_forward
        self._late = late
        self._several = several
        self._groups: Groups = {}
        self._distinct: list[dict[str, Any]] = []
        self._listed: list[tuple[int, ...]] = []
        self._prepared_for: list[int] = []
        self._left: list[KFACBlock] = []
        self._steps = 0  # of this object; clocks of blocks, which are in checkpoints, count all
        self._waiting = waiting = WaitingRows()

        def took(block: KFACBlock) -> None:
            emitted(block)
            waiting.note(block)

        self._hooks = ModuleHooks(window, took, self._grow_within)
        self._functional = FunctionalUses(window, self._claim, took, self._before_forward)
        window.listener = self._functional
        window.signs = weakly(self._signs)

    # -- the model ---------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """Return the model; a list of models if several were found, None before one is found."""
        return self._models.model

    @property
    def given(self) -> bool:
        """Return whether the user named the model."""
        return self._models.given

    def start(self, groups: Groups) -> None:
        """Hook the model, or begin to look for it."""
        self._list(groups)
        if not self.given:
            refuse_flat(groups, {})
        self._models.start(groups)
        self._prepare()

    def bind(self, groups: Groups) -> None:
        """Take on other param groups; layers they complete are hooked, blocks that exist are kept."""
        self._list(groups)
        if self._models.are_hooked:
            before = self.coverage.blocks
            self._build()
            # Where groups are built anew, one after the other, the next may bring a block back before the step.
            self._left += [block for block in before if block not in self.coverage.blocks]
        else:
            for block in self.coverage.blocks:  # whose hooks were taken off, and which are stepped all the same
                if all(param in groups for param in block.params):
                    block.groups = tuple(groups[param] for param in block.params)
        if not self.released and self._models.take_on(groups):
            refuse_flat(groups, {})
            self.settled = False
        self._prepare()

    def knows(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether these are the param groups that were taken on; others may have been put in their place."""
        return _ids_of(groups) == self._listed

    def _list(self, groups: Groups) -> None:
        self._groups = groups
        self._distinct = list({id(group): group for group in groups.values()}.values())
        self._listed = _ids_of(self._distinct)

    def rebind(self, groups: Groups) -> None:
        """Take on the same parameters in other group dicts."""
        self._list(groups)
        for block in self.coverage.blocks:
            block.groups = tuple(groups[param] for param in block.params)

    @property
    def found(self) -> int:
        """Return how many models were found so far; 0 where the user has given the model."""
        return self._models.found

    def names(self) -> dict[nn.Parameter, str]:
        """Return the fully qualified names of the model's parameters."""
        return self._models.names()

    def release(self) -> None:
        """Take all hooks off."""
        self.released = True
        self._window.modes.leave()
        self._models.release()
        self._hooks.remove()
        self._functional.forget()
        self._prepare()

    def close(self) -> None:
        """Let the model, and all that is known of it, be freed with the last reference that others have.

        The window and what it calls refer to each other: without this they would wait for the garbage collector.
        """
        self.release()
        self._window.discard()
        self._window.probe.end()
        self._window.call_nobody()

    # -- a step ------------------------------------------------------------------------------------------------

    def settle(self) -> bool:
        """Note that by the first step that has gradients, all that only a forward can show was shown.

        Returns:
            Whether that is this step, and something had been awaited.

        Raises:
            ValueError: a pattern of the options matches no module of a model that had to be found.
        """
        # Gradients of zero are also what `torch.distributed.checkpoint` has a new optimizer step with. Looking at them
        # synchronises, at the first steps alone.
        if self.settled or not any(says_something(param.grad) for param in self._groups):
            return False
        if self._models.are_awaited and self.model is not None:
            self._options.check_patterns(self.model)
        awaited = self._models.are_awaited or bool(self.coverage.candidates)
        self.settled = True
        self._models.settle(waits=not self._several)  # ranks may call it in different steps
        return awaited

    def does_nothing(self) -> bool:
        """Return whether nothing is preconditioned against the user's wish, nor can be later."""
        awaited = bool(self.coverage.lazy) or (bool(self.coverage.candidates) and not self.settled)
        return not (self.coverage.blocks or self._options.skip_layers or awaited)

    def sum_rows(self) -> None:
        """Take all rows that wait into the sums of this step, as it has come."""
        sum_rows(self.coverage.blocks)
        self._waiting.clear()

    def exclude_unmeasured(self) -> list[str]:
        """Leave to SGD each block whose parameter a function used in a way that is not measured.

        Returns:
            The reasons, new ones only, with those of parameters of which no block is made.
        """
        names = self.names() if (unseen := self._functional.take_unseen()) else {}
        recomputed = [
            f"no product with {names[param]!r} is seen, as it is computed without a graph, perhaps again within "
            "backward (checkpoint with use_reentrant=True; pass False, or have a module of its own compute the product)"
            for param in sorted(unseen, key=names.__getitem__)
        ]
        if not (unmeasured := self._functional.unmeasured()):
            return recomputed
        covered = {block.params[0]: block for block in self.coverage.blocks}
        reasons = {
            covered[param]: f"{covered[param].param_names[0]!r} is used by {function} in a way that is not measured"
            for param, function in unmeasured.items()
            if param in covered
        }
        self._exclude(reasons)
        return [*reasons.values(), *recomputed]

    def end_check(self, unaccounted: Collection[KFACBlock]) -> list[str]:
        """Conclude from a step in which only a part of these blocks' gradients was captured.

        Their statistics start again from nothing. A backward through an earlier step's forward may explain one such
        step, but not two: then the blocks are left to SGD.

        Returns:
            The names of the blocks that are left to SGD.
        """
        self._functional.derivatives.begin(unaccounted)
        for block in unaccounted:
            block.strikes += 1
            block.restart()
        convicted = [block for block in self.coverage.blocks if block in unaccounted and block.strikes > 1]
        self._exclude(dict.fromkeys(convicted, UNACCOUNTED))
        return [block.name for block in convicted]

    def end_step(self) -> None:
        """Note that a step was taken, and prepare for the next forward."""
        self._steps += 1
        self.pending.let_step_pass()
        self._functional.end_step()
        self._left.clear()
        period = min((period_of(block.group, "factor_update_period") for block in self.coverage.blocks), default=1)
        if not self._grow() and self._steps % period == 0:
            self._follow_modules()
        self._prepare()

    def begin_forwards(self) -> None:
        """Prepare for the forwards to come where a layer was unfrozen or a period changed: compiled ones do not ask."""
        if self._grow() or self._prepared_for != self._periods():
            self._prepare()

    def _exclude(self, reasons: Mapping[KFACBlock, str]) -> None:
        """Leave blocks to SGD from now on, each for a reason that `summary()` and checkpoints tell."""
        if reasons:
            self.pending.leave_out(reasons)
            self._build()

    # -- checkpoints -------------------------------------------------------------------------------------------

    def blocks_with(self, states: checkpoint.States, marks: checkpoint.States) -> list[KFACBlock]:
        """Return the blocks that there would be after `take_on`; nothing is changed."""
        present = self.coverage.blocks
        if self.model is None or not self.pending.would_change(self.model, self.coverage.frozen, states, marks):
            return present
        trained = members(self.model, states).union(*(block.params for block in present))
        left_out = dict.fromkeys(marks, "")
        found = build_blocks(self.model, self._groups, self._options, (), left_out, trained).blocks
        known = {tuple(map(id, block.params)): block for block in present}
        blocks = [known.get(tuple(map(id, block.params)), block) for block in found]
        covered = {param for block in blocks for param in block.params}.union(marks)
        return blocks + [block for block in present if covered.isdisjoint(block.params)]

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
        changed = self.pending.would_change(self.model, self.coverage.frozen, states, marks)
        self._left.clear()
        self.pending.marks = dict(marks)
        self.pending.wait({})
        if changed:
            self._build(members(self.model, states))
        waiting = dict(states)
        return [waiting.pop(block.params[0], None) for block in self.coverage.blocks], waiting

    def restore(self, states: Sequence[Mapping[str, Any] | None], waiting: checkpoint.States) -> None:
        """Load what a checkpoint holds for each block, and keep the rest for blocks to come."""
        self.pending.wait(waiting)
        self._functional.expected = waiting
        for block, state in zip(self.coverage.blocks, states, strict=True):
            checkpoint.restore(block, state, several=self._several)
            self._follow_as(block, state)
        self._prepare()

    def _restore_waiting(self, block: KFACBlock) -> None:
        """Give a new block what a checkpoint that was loaded before held for it."""
        if (state := self.pending.waiting.get(block.params[0])) is not None:
            check_layers([block], [state], [], of_found=self.found, several=self._several)
            self.pending.waiting[block.params[0]] = self._late(block, state)
            self.pending.restore(block, self.coverage.blocks, several=self._several)
            self._follow_as(block, state)

    def _follow_as(self, block: KFACBlock, state: Mapping[str, Any] | None) -> None:
        """Follow the products with the matrix of a block from now on, if that was so when its state was saved."""
        if state is not None and state.get("follows_uses"):
            self._functional.derivatives.begin([block])

    def _signs(self) -> set[bool]:
        """Return the values of `maximize` that the param groups of the blocks have now."""
        return {group["maximize"] for block in self.coverage.blocks for group in block.groups}

    # -- finding and building ----------------------------------------------------------------------------------

    def _adopted(self) -> None:
        """Note that there is another model, whose matrices that functions use are still to be shown."""
        self.settled = False
        self._prepare()

    def _build(self, trained: Collection[nn.Parameter] = ()) -> None:
        """Do what `_find_blocks` says, whatever mode the forward runs in that shows them: it may be an evaluation."""
        with_grad = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(with_grad):
            self._find_blocks(trained)

    def _find_blocks(self, trained: Collection[nn.Parameter]) -> None:
        """Find the blocks; keep those that exist, hook in those that are new, unless the hooks were taken off.

        Args:
            trained: parameters that belong to blocks though they are frozen now.
        """
        assert self.model is not None
        names = ModuleNames(self.model)
        refuse_stand_ins(names, self._groups)
        refuse_flat(self._groups, names.parameters())
        self._window.shards = names.shards
        self.coverage = coverage = build_blocks(
            self.model,
            self._groups,
            self._options,
            [*self.coverage.blocks, *self._left],
            self.pending.reasons(),
            members(self.model, self.pending.waiting).union(trained),
        )
        if not self.released:
            self._hooks.follow(self.model, coverage.blocks)
            self._functional.know(coverage.blocks, coverage.candidates, coverage.owners(names))
        if not self._several:
            self._window.probe.choose([block.params for block in coverage.blocks])
        self.rebind(self._groups)
        for block in coverage.blocks:
            self._begin(block)

    def _claim(self, product: Product | TensorProduct) -> KFACBlock | None:
        """Make a block of a parameter that a function was seen to multiply by."""
        assert self.model is not None
        if (block := claim(self.model, product, self._groups, self._options, self.coverage)) is not None:
            self._begin(block)
        return block

    def _begin(self, block: KFACBlock) -> None:
        """Bring the clock of a new block to the time, and give it what a checkpoint holds for it."""
        if block.clock.step == 0:  # otherwise the periods of a layer that comes late would begin at other steps
            block.began = max([self._window.step, *(other.clock.step for other in self.coverage.blocks)])
            block.clock.advance(block.began)
        self._restore_waiting(block)

    # -- a forward ---------------------------------------------------------------------------------------------

    def _before_forward(self) -> None:
        """Prepare for a forward of the model."""
        assert self.model is not None
        self._window.source = self._begin_forward(self.model)
        self._grow()

    def _prepare(self) -> None:
        """Tell compiled graphs, which cannot ask, whether the next forward is to capture."""
        self._prepared_for = self._periods()
        self._window.capturing = self._models.are_hooked and self._functional.is_wanted()
        # A model that is to be found, or a matrix that a forward is to show, has no block before its first forward.
        before = max(self._steps, self.pending.step())
        self._window.step = max((block.clock.step for block in self.coverage.blocks), default=before)

    def _periods(self) -> list[int]:
        return [period_of(group, "factor_update_period") for group in self._distinct]

    def _grow(self) -> bool:
        """Build blocks of parameters that got their shape or were unfrozen; return whether there are any."""
        grown = self.coverage.grown() if self._models.are_hooked else []
        if not grown:
            return False
        held = self.names()
        if not all(param in held for param in grown):  # others stand in their place, as in `torch.func.functional_call`
            return False
        self._build()
        return True

    def _follow_modules(self) -> None:
        """Build anew where modules have given their parameters to others, or hold others, as where weights were tied.

        The first is so where BatchNorm becomes SyncBatchNorm. A block that nothing has come in the place of stays, and
        so do those of a module of which a parameter was parametrized or pruned.
        """
        if self.model is None or self.released:
            return
        modules = set(self.model.modules())
        lost = [
            (param, use.module)
            for block in self.coverage.blocks
            for use in block.uses
            if not use.is_refused()
            for param in block.params
            if not (use.module in modules and self._is_held(param, use.module))
        ]
        present = self.names() if lost else {}
        replaced = (module for _, module in lost if module in modules)
        if any(param in present for param, _ in lost) or any(map(self._holds_some, replaced)):
            self._build()

    def _is_held(self, param: nn.Parameter, module: nn.Module) -> bool:
        if any(own is param for own in module._parameters.values()):  # which takes no time
            return True
        return any(self._window.shards.known(own) is param for own in module.parameters())

    def _holds_some(self, module: nn.Module) -> bool:
        return any(self._window.shards.known(own) in self._groups for own in module.parameters())

    def _grow_within(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Build blocks as the first forward of a lazy module begins, within which it has got its shapes."""
        known = self._window.hooked()
        if self._grow():
            self._window.catch_up(module, args, known)


def _ids_of(groups: Iterable[Mapping[str, Any]]) -> list[tuple[int, ...]]:
    """Return the identities of param groups and of their parameters, which are compared at every step."""
    return [(id(group), *map(id, group["params"])) for group in groups if group["params"]]
