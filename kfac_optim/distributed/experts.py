"""Which layers of a mixture of experts each rank has of its own: the choice, and what it names of a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import Tensor, nn

from kfac_optim.blocks.selection import ModuleNames, Pattern, check_pattern, in_order, matches
from kfac_optim.utils.text import listed
from kfac_optim.utils.validation import check_kind


@dataclass(frozen=True)
class Experts:
    """Names what each rank has of its own: the experts that lie on it, to which tokens of all ranks go.

    Of `P` ranks that train together rank `r` holds some of the experts, under whatever names, and the tokens of all
    ranks come to them by an all-to-all that backward goes through, such as
    `all_to_all_single` of `torch.distributed._functional_collectives`. All other layers are the same on all ranks.

    The loss is the mean of the ranks' losses, `(1/P) Σ_r loss_r`, as `DistributedDataParallel` has it. At `step()` the
    gradient of an expert must be the gradient of that mean too, as `torch.optim.SGD` would need it. Backward brings it
    as the gradient of the sum of all losses that its tokens come from: divide it by `P`, by a hook on each parameter
    of an expert that returns `gradient / P`, or after backward by `param.grad /= P`. Where several ranks hold copies of
    the same experts, sum it over these before the step. Leave the way of the tokens alone: what divides their gradients
    on the way back cannot be told from a smaller loss. `kfac_optim/distributed/README.md` has a whole script.

    Args:
        layers: name globs over modules or parameters, or module classes; all that is inside them belongs to experts.
            Each must name something on every rank. Have `DistributedDataParallel` ignore these parameters.
        copies: the ranks that hold copies of this rank's experts, each of which gets the tokens of other ranks; as many
            for all experts. None is this rank alone.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: no layer is named.
    """

    layers: Sequence[Pattern]
    # Each rank has another one, or none.
    copies: dist.ProcessGroup | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.layers, (str, type, Tensor)) or not isinstance(self.layers, Iterable):
            raise TypeError(
                f"kfac_optim: layers of Experts must be a sequence of name globs or module classes, got "
                f"{self.layers!r}; wrap a single one in a list."
            )
        object.__setattr__(self, "layers", in_order(self.layers))
        if not self.layers:
            raise ValueError(
                "kfac_optim: layers of Experts is empty. Name the layers that each rank has of its own, as "
                'Experts(["*.experts"]); or leave experts out of DistributedConfig.'
            )
        for pattern in self.layers:
            check_pattern("layers of Experts", pattern)
        if self.copies is not None:
            check_kind("copies of Experts", self.copies, dist.ProcessGroup)

    def __repr__(self) -> str:
        """Show what must be the same on all ranks."""
        return f"Experts({list(self.layers)!r}, copies={self.count})"

    @property
    def count(self) -> int:
        """Return how many ranks hold each expert."""
        return 1 if self.copies is None else dist.get_world_size(self.copies)

    def params(self, model: nn.Module) -> dict[nn.Parameter, str]:
        """Return the parameters of experts in a model, with their names.

        Raises:
            ValueError: an entry names nothing.
        """
        names = ModuleNames(model)
        modules, params = names.all(), names.parameters()
        found: set[nn.Parameter] = set()
        for pattern in self.layers:
            inside = [module for name, module in modules if matches(pattern, name, module)]
            alone = [param for param, name in params.items() if isinstance(pattern, str) and fnmatchcase(name, pattern)]
            if not inside and not alone:
                shown = pattern if isinstance(pattern, str) else pattern.__name__
                raise ValueError(
                    f"kfac_optim: entry {shown!r} of Experts matches no module and no parameter of this rank. Modules "
                    f"are {listed(list(dict.fromkeys(name for name, _ in modules if name)), 12)}; an entry is a glob "
                    "over these names and those of parameters, or a class."
                )
            found.update(alone, *([param for _, param in names.held_by(each, recurse=True)] for each in inside))
        return {param: name for param, name in params.items() if param in found}
