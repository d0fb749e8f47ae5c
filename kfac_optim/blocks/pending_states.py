"""What checkpoints hold of parameters that have no block: states that wait for one, and marks of layers left to SGD."""

from collections.abc import Collection, Iterable, Mapping

from torch import nn

from kfac_optim.blocks import checkpoint
from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.selection import ModuleNames


class PendingStates:
    """Keeps the states of a loaded checkpoint until their layers are seen, and the marks of layers left to SGD.

    Attributes:
        waiting: the states that wait, by the first parameter of their block.
        steps_waited: optimizer steps since the checkpoint was loaded.
        marks: the marks of the layers that were left to SGD in mid-training, in the same way.
    """

    def __init__(self) -> None:
        self.waiting: checkpoint.States = {}
        self.steps_waited = 0
        self.marks: checkpoint.States = {}

    def wait(self, states: checkpoint.States) -> None:
        """Keep these states, and no others, from now on."""
        self.waiting, self.steps_waited = states, 0

    def let_step_pass(self) -> None:
        """Count a step that was taken."""
        self.steps_waited += 1

    def step(self) -> int:
        """Return the number of the present step, by the clocks of the states that wait; 0 where none does."""
        return max((state["clock"]["step"] + self.steps_waited for state in self.waiting.values()), default=0)

    def leave_out(self, reasons: Mapping[KFACBlock, str]) -> None:
        """Note that blocks are left to SGD, each for its reason."""
        self.marks |= {block.params[0]: checkpoint.mark(block.name, why) for block, why in reasons.items()}

    def reasons(self) -> dict[nn.Parameter, str]:
        """Return why layers were left to SGD, by the first parameter of each."""
        return {param: checkpoint.reason_of(mark) for param, mark in self.marks.items()}

    def would_change(
        self,
        model: nn.Module | None,
        frozen: Collection[nn.Parameter],
        states: checkpoint.States,
        marks: checkpoint.States,
    ) -> bool:
        """Return whether a model has other blocks with the states and marks of a checkpoint than it has now.

        Args:
            model: the model; None if it is not known yet.
            frozen: its parameters that are not trained and have no block.
            states: what the checkpoint holds for blocks.
            marks: those of the layers that it leaves to SGD.
        """
        other_marks = marks.keys() != self.marks.keys()
        return model is not None and (other_marks or not members(model, states).isdisjoint(frozen))

    def states(self) -> checkpoint.States:
        """Return what a checkpoint that is made now holds of parameters without a block."""
        waiting = {param: checkpoint.aged(state, self.steps_waited) for param, state in self.waiting.items()}
        return waiting | self.marks

    def in_parts(self) -> list[str]:
        """Return names of layers that forwards are to show, and of which each process may have loaded a part."""
        waiting = {} if self.steps_waited else self.waiting
        spread = [state for param, state in waiting.items() if state["spread"] and param.requires_grad]
        return sorted(map(checkpoint.layer_name, spread))

    def restore(self, block: KFACBlock, others: Iterable[KFACBlock], *, several: bool) -> None:
        """Give a new block the state that waited for it.

        Args:
            block: the block, one that a state waits for.
            others: blocks of the same model.
            several: whether there are other processes.
        """
        state = self.waiting[block.params[0]]
        checkpoint.restore(block, state, several=several)
        self._let_pass(block)
        for other in others:  # the unit is one for all
            if other.params[0] not in self.waiting:
                block.clock.use_unit(other.clock.loss_unit)
        del self.waiting[block.params[0]]

    def _let_pass(self, block: KFACBlock) -> None:
        """Let the steps pass in which the layer was out of sight; a refresh that fell due then is due now."""
        for _ in range(looked_at := min(self.steps_waited, block.group["inverse_update_period"])):
            if block.refresh_due():
                block.clock.call_for_refresh()
            block.clock.advance()
        block.clock.advance(self.steps_waited - looked_at)


def members(model: nn.Module | None, states: checkpoint.States) -> set[nn.Parameter]:
    """Return the parameters of all blocks that have these states, as far as the model has them."""
    found: set[nn.Parameter] = set()
    if model is None or not states:
        return found
    names = ModuleNames(model)
    held = [dict(names.held_by(module, recurse=True)) for module in model.modules()]
    for param, state in states.items():
        first, *others = checkpoint.member_names(state)
        of_layer = next((each for each in held if each.get(first) is param), {})
        found.update(of_layer[name] for name in (first, *others) if name in of_layer)
    return found
