"""Making the block of a weight from all the modules that use it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kfac_optim.blocks.block import KFACBlock, LayerUse
from kfac_optim.blocks.options import SOME_ROWS, BlockOptions
from kfac_optim.blocks.selection import ModuleNames
from kfac_optim.factors.subsampling import Subsample
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.layers.base import LayerAdapter
from kfac_optim.layers.feature_maps import flattened_channels
from kfac_optim.layers.product import ProductAdapter
from kfac_optim.specs import BlockDiagonal, Kept, LayerSpec, Structure, WeightSharing, narrower


@dataclass
class Coverage:
    """Holds the blocks, and for every parameter that none of them covers the reason."""

    blocks: list[KFACBlock] = field(default_factory=list)
    uncovered: dict[nn.Parameter, str] = field(default_factory=dict)
    candidates: set[nn.Parameter] = field(default_factory=set)
    """Uncovered parameters in modules of no known kind, of which a block is made once a function multiplies by them."""

    lazy: set[nn.Parameter] = field(default_factory=set)
    """Parameters that had no shape yet."""

    frozen: set[nn.Parameter] = field(default_factory=set)
    """Parameters that were not trained, and had not been before."""

    def owners(self, names: ModuleNames) -> list[nn.Module]:
        """Return modules with parameters that are, or were, candidates."""
        claimed = {block.params[0] for block in self.blocks if isinstance(block.adapter, ProductAdapter)}
        shown = claimed | self.candidates
        modules = names.model.modules()
        return [module for module in modules if any(param in shown for _, param in names.held_by(module))]

    def grown(self) -> list[nn.Parameter]:
        """Return the parameters that got their shape, or were unfrozen, since the blocks were built."""
        shaped = [param for param in self.lazy if not is_lazy(param)]
        return shaped + [param for param in self.frozen if param.requires_grad]


@dataclass(frozen=True)
class Use:
    """Stands for one module that uses a weight; `adapter` is None if the module cannot be measured.

    `params` are those it answers for, by their names within it; `trained` are some of these names.
    """

    path: str
    name: str
    module: nn.Module
    adapter: LayerAdapter[Any] | None
    params: Mapping[str, nn.Parameter]
    trained: set[str]


@dataclass(frozen=True)
class Assembly:
    """Holds what every block of one model is made from.

    Attributes:
        names: the names of the model's modules.
        group_of: the param group of each parameter.
        options: the user's choices.
        existing: blocks that are kept where they would be built again.
    """

    names: ModuleNames
    group_of: Mapping[nn.Parameter, dict[str, Any]]
    options: BlockOptions
    existing: Sequence[KFACBlock] = ()


def merge(assembly: Assembly, uses: Sequence[Use], coverage: Coverage) -> list[KFACBlock]:
    """Return the blocks of one weight and all modules that use it; none if these do not fit together."""
    if all(use.adapter is None for use in uses):
        return []
    first = uses[0]

    def refuse(reason: str, shared: set[str] | None = None) -> list[KFACBlock]:
        for use in uses:
            for local in use.trained if shared is None else use.trained & shared:
                coverage.uncovered[use.params[local]] = reason
                coverage.candidates.discard(use.params[local])
        return []

    for use in uses:
        if use.adapter is None:
            shared = f"shared with {type(use.module).__name__} {use.name!r}"
            return refuse(f"{shared}, which is not preconditioned")
    trained, apart = first.trained, list[KFACBlock]()
    if any(_parameters(use) != _parameters(first) for use in uses):
        # Tied weights, biases apart.
        trained = {
            local
            for local in first.trained
            if all(_parameters(use).get(local) == _parameters(first)[local] for use in uses)
        }
        of_bias = "bias of a weight tied to other layers"
        of_other = "other layers use it as another of their parameters"
        for use in uses:
            for local in use.trained - trained:
                coverage.uncovered[use.params[local]] = of_bias if "bias" in local else of_other
            # Its other matrices, as of a recurrent layer, are its own.
            elsewhere = {id(param) for other in uses if other is not use for param in other.params.values()}
            rest = {local for local in use.trained if id(use.params[local]) not in elsewhere}
            if _describe(use, rest):
                apart += merge(assembly, [replace(use, trained=rest)], coverage)
    described = [_describe(use, trained) for use in uses]
    opposed = [_opposed(first, use) for use in uses]
    if any(
        not _fit(specs, [spec.transposed() for spec in described[0]] if other else described[0])
        for specs, other in zip(described, opposed, strict=True)
    ):
        return refuse("tied to a layer of another shape", trained) + apart
    blocks = apart
    for of_spec in zip(*described, strict=True):
        block = build(assembly, uses, of_spec, opposed)
        if block is None:
            for local in of_spec[0].params:
                coverage.uncovered[first.params[local]] = "structure keeps neither of its factors"
        else:
            blocks.append(block)
    return blocks


def _describe(use: Use, trained: set[str]) -> tuple[LayerSpec, ...]:
    assert use.adapter is not None
    return use.adapter.specs(use.module, use.name, trained)


def _opposed(first: Use, use: Use) -> bool:
    """Return whether `use` multiplies by the transpose of what `first` multiplies by."""
    assert first.adapter is not None
    assert use.adapter is not None
    ways = first.adapter.transposes, use.adapter.transposes
    return None not in ways and ways[0] != ways[1]


def _fit(specs: Sequence[LayerSpec], others: Sequence[LayerSpec]) -> bool:
    return [_shape(spec) for spec in specs] == [_shape(spec) for spec in others]


def _shape(spec: LayerSpec) -> tuple[Any, ...]:
    return (type(spec), spec.params, spec.in_dim, spec.out_dim, spec.groups)


def build(
    assembly: Assembly, uses: Sequence[Use], specs: Sequence[LayerSpec], opposed: Sequence[bool]
) -> KFACBlock | None:
    """Return the block of one matrix, or None if the structure leaves nothing to precondition with.

    Args:
        assembly: what every block of the model is made from.
        uses: the uses of the matrix.
        specs: the matrix as each of `uses` sees it.
        opposed: whether each sees the transpose of what the first sees.

    Raises:
        ValueError: choices that do not go together, or not with this layer.
    """
    names, options = assembly.names, assembly.options
    first, spec, paths = uses[0], specs[0], [use.path for use in uses]
    params = tuple(first.params[local] for local in spec.params)
    structure: list[Kept] = list(options.structure.of(names, *paths))
    for each, other in zip(specs, opposed, strict=True):
        kept = reversed(each.structure) if other else each.structure
        structure = [narrower(most, wish) for most, wish in zip(kept, structure, strict=True)]
    inverse, subsample = options.inverse.of(names, *paths), options.subsample.of(names, *paths)
    in_rows = all(use.adapter is not None and use.adapter.in_rows for use in uses)
    if subsample is SOME_ROWS and not in_rows:
        subsample = Subsample()
    if isinstance(inverse, InverseRule):
        wished = replace(spec, structure=(structure[0], structure[1]), opposed=any(opposed))
        modules = [module for _, module in names.lineage(first.path)]
        channels = flattened_channels(modules) if len(uses) == 1 else None
        inverse = inverse.choose(wished, options.max_factor_dim, channels)
    notes = []
    for side, (dim, dims) in enumerate(zip((spec.in_dim, spec.out_dim), inverse.factor_dims(spec), strict=True)):
        wish = structure[side]
        width = wish.width(dim) if isinstance(wish, BlockDiagonal) else max(dims)
        if width > options.max_factor_dim and wish not in (Structure.DIAGONAL, Structure.IDENTITY):
            structure[side] = Structure.DIAGONAL
            notes.append(f"{'AG'[side]} is diagonal: {width} > max_factor_dim {options.max_factor_dim}")
        elif isinstance(wish, BlockDiagonal) and wish.blocks(dim) == 1:
            structure[side] = Structure.DENSE
        if in_rows and is_precise(options.factor_dtype):
            structure[side] = inverse.kept(structure[side], dim)
    if structure == [Structure.IDENTITY, Structure.IDENTITY]:
        return None
    if len(uses) > 1:
        notes.append("shared by " + ", ".join(use.name for use in uses))
    spec = replace(
        spec,
        structure=(structure[0], structure[1]),
        weight_sharing=options.weight_sharing.of(names, *paths),
        opposed=any(opposed),
    )
    _check(spec, [use.adapter for use in uses if use.adapter is not None], inverse, subsample)
    layer_uses = tuple(
        LayerUse(use.module, use.adapter, spec.transposed() if other else spec, other)
        for use, other in zip(uses, opposed, strict=True)
        if use.adapter is not None
    )
    for block in assembly.existing:
        # What forwards have shown since is kept.
        seen = replace(spec, opposed=block.spec.opposed, shared_input=block.spec.shared_input)
        same_spec = replace(block.spec, name=spec.name) == seen
        if same_spec and block.inverse == inverse and [id(p) for p in block.params] == [id(p) for p in params]:
            rename(block, spec.name, first.name)
            block.notes = tuple(notes)
            block.subsample = subsample
            known = {use.module: use for use in block.uses}  # kept, and with them their hooks
            block.uses = tuple(known.get(use.module, use) for use in layer_uses)
            block.revise(replace(block.spec, opposed=block.spec.opposed or (spec.opposed and block.joint is None)))
            return block
    return KFACBlock(
        name=spec.name,
        param_names=tuple(f"{first.name}.{local}".lstrip(".") for local in spec.params),
        spec=spec,
        uses=layer_uses,
        params=params,
        inverse=inverse,
        factor_dtype=options.factor_dtype,
        groups=tuple(assembly.group_of[param] for param in params),
        subsample=subsample,
        notes=tuple(notes),
    )


def is_precise(dtype: torch.dtype | None) -> bool:
    """Return whether sketches can be kept, or sent, in a dtype: coarser ones round small eigenvalues away.

    Args:
        dtype: None is that of the parameters, but at least float32.
    """
    return dtype is None or torch.promote_types(dtype, torch.float32) == dtype


def _check(spec: LayerSpec, adapters: Sequence[LayerAdapter[Any]], inverse: Inverse[Any], subsample: Subsample) -> None:
    """Raise ValueError, with the remedy, where the choices for a layer do not go together."""
    if type(inverse).__hash__ is None:
        kind = type(inverse).__name__
        raise TypeError(
            f"kfac_optim: inverse={inverse!r} of layer {spec.name!r} cannot be hashed, by which layers with equal "
            f"inverses are found. Declare {kind} as @dataclass(frozen=True), or give it a __hash__."
        )
    foreign = next((adapter for adapter in adapters if not adapter.in_rows), None)
    blocked = [side for side in (0, 1) if spec.blocks(side) > 1]
    if blocked:
        at = f"kfac_optim: structure of layer {spec.name!r} ({spec.in_dim} inputs, {spec.out_dim} outputs)"
        kept = spec.structure[blocked[0]]
        if len(blocked) > 1:
            raise ValueError(
                f"{at} cuts both factors into blocks, {spec.structure!r}; only one can be. Make the other "
                "Structure.DENSE or Structure.DIAGONAL for the module."
            )
        if spec.groups > 1:
            raise ValueError(
                f"{at} is {kept!r} for {'AG'[blocked[0]]}, but the layer has {spec.groups} groups, each of which has "
                "factors of its own. Make it Structure.DENSE or Structure.DIAGONAL for the module."
            )
        if foreign is not None:
            raise ValueError(
                f"{at} is {kept!r} for {'AG'[blocked[0]]}, but {type(foreign).__name__} does not say that its "
                "statistics can be cut into blocks. Set in_rows = True on it if they are RowStatistics, or make the "
                "factor Structure.DENSE or Structure.DIAGONAL for the module."
            )
    if subsample.takes_all:
        return
    at = f"kfac_optim: subsample={subsample!r} does not fit layer {spec.name!r}"
    if foreign is not None:
        raise ValueError(
            f"{at}: {type(foreign).__name__} does not say that its statistics can be of some rows only. Set in_rows = "
            "True on it if they are RowStatistics, or leave the layer out: subsample takes a mapping from layer names."
        )
    if subsample.positions is not None:
        if spec.weight_sharing is WeightSharing.REDUCE:
            reason, remedy = "weight_sharing is REDUCE", "weight_sharing=WeightSharing.EXPAND"
        elif inverse.squares_examples:
            reason, remedy = f"its inverse is {inverse!r}", "EKFAC(per_example=False)"
        else:
            return
        raise ValueError(
            f"{at}: {reason}, which squares sums over all positions of an example, so that some of them would give "
            f"another mean. Use Subsample(examples=...), or {remedy}, for the module."
        )


def _parameters(use: Use) -> dict[str, int]:
    return {local: id(use.params[local]) for local in use.trained}


def cover(coverage: Coverage, block: KFACBlock) -> None:
    coverage.blocks.append(block)
    for param in block.params:
        coverage.uncovered.pop(param, None)
        coverage.candidates.discard(param)


def rename(block: KFACBlock, name: str, module_name: str) -> None:
    """Give the block the names it has in a model that was found to be part of another."""
    block.name = name
    block.spec = replace(block.spec, name=name)
    block.param_names = tuple(f"{module_name}.{local}".lstrip(".") for local in block.spec.params)
