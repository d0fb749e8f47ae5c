"""The user's choices about layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kfac_optim.blocks.selection import Choice, ModuleNames, Pattern, check_pattern, check_patterns_match, in_order
from kfac_optim.factors.subsampling import Subsample
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.layers.base import Adapters, LayerAdapter
from kfac_optim.specs import BlockDiagonal, Kept, Structure, WeightSharing
from kfac_optim.utils.validation import check_dtype, check_integer, check_kind

_DENSE = (Structure.DENSE, Structure.DENSE)

SOME_ROWS = Subsample(rows=8192)
"""What statistics take where the user does not say: thirty rows and more for each column of a whole factor."""


@dataclass(frozen=True)
class BlockOptions:
    """Holds the user's choices about layers, as given to `KFACOptimizer`."""

    adapters: Adapters
    skip_layers: Sequence[Pattern]
    inverse: Choice[Inverse[Any] | InverseRule]
    weight_sharing: Choice[WeightSharing]
    structure: Choice[tuple[Kept, Kept]]
    subsample: Choice[Subsample]
    max_factor_dim: int
    factor_dtype: torch.dtype | None
    matrices_only: bool = False
    """Whether layers without a matrix are left out, as they would be preconditioned for nothing."""

    def check_patterns(self, model: nn.Module) -> None:
        """Raise ValueError for a pattern that matches no module of `model`."""
        names = ModuleNames(model)
        check_patterns_match("skip_layers", self.skip_layers, names)
        for choice in (self.inverse, self.weight_sharing, self.structure, self.subsample):
            check_patterns_match(choice.argument, choice.by_pattern, names)


@dataclass(frozen=True, kw_only=True)
class LayerChoices:
    """Holds what `KFACOptimizer` was given about layers: arguments of these names, which its docstring describes."""

    inverse: Inverse[Any] | InverseRule | Mapping[Pattern, Inverse[Any] | InverseRule] | None
    weight_sharing: WeightSharing | Mapping[Pattern, WeightSharing]
    structure: tuple[Kept, Kept] | Mapping[Pattern, tuple[Kept, Kept]] | None
    subsample: Subsample | Mapping[Pattern, Subsample] | None
    skip_layers: Sequence[Pattern]
    adapters: Adapters
    max_factor_dim: int
    factor_dtype: torch.dtype | None

    def resolved(self, usual: Inverse[Any] | InverseRule, *, matrices_only: bool) -> BlockOptions:
        """Return the choices, each checked; the usual inverse is for layers that no choice names."""
        skipped: object = self.skip_layers
        if isinstance(skipped, (str, type, torch.Tensor)) or not isinstance(skipped, Iterable):
            raise TypeError(
                f"kfac_optim: skip_layers must be a sequence of name globs or module classes, got {skipped!r}; "
                f"wrap a single one in a list."
            )
        check_kind("adapters", self.adapters, Mapping)
        for cls, adapter in self.adapters.items():
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise TypeError(f"kfac_optim: a key of adapters must be a subclass of nn.Module, got {cls!r}.")
            check_kind(f"the adapter of {cls.__name__}", adapter, LayerAdapter)
        check_integer("max_factor_dim", self.max_factor_dim)
        check_dtype("factor_dtype", self.factor_dtype)
        inverse = usual if self.inverse is None else self.inverse
        structure = _DENSE if self.structure is None else self.structure
        subsample = SOME_ROWS if self.subsample is None else self.subsample
        options = BlockOptions(
            adapters=self.adapters,
            skip_layers=in_order(self.skip_layers),
            inverse=Choice("inverse", inverse, (Inverse, InverseRule), usual),
            weight_sharing=Choice("weight_sharing", self.weight_sharing, (WeightSharing,), WeightSharing.EXPAND),
            structure=Choice("structure", structure, (tuple,), _DENSE),
            subsample=Choice("subsample", subsample, (Subsample,), SOME_ROWS),
            max_factor_dim=self.max_factor_dim,
            factor_dtype=self.factor_dtype,
            matrices_only=matrices_only,
        )
        for pair in (options.structure.default, *options.structure.by_pattern.values()):
            if len(pair) != 2 or not all(isinstance(side, Structure | BlockDiagonal) for side in pair):
                raise TypeError(
                    "kfac_optim: structure must be a pair of Structure or BlockDiagonal values for (A, G), got "
                    f"{pair!r}."
                )
            if pair == (Structure.IDENTITY, Structure.IDENTITY):
                raise ValueError("kfac_optim: structure with both factors the identity is plain SGD: use skip_layers.")
        for pattern in options.skip_layers:
            check_pattern("skip_layers", pattern)
        return options
