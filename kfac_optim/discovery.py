"""Finding the layers of a model, and making a block of each that can be preconditioned."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from kfac_optim.blocks import KFACBlock
from kfac_optim.layers.base import LayerAdapter, find_adapter
from kfac_optim.options import BlockOptions
from kfac_optim.selection import ModuleNames, matches
from kfac_optim.specs import LayerSpec, Structure

# Modules that use their children's parameters without calling the children, whose hooks then never fire.
_BYPASSES_CHILDREN = (nn.MultiheadAttention,)


@dataclass
class Coverage:
    """Blocks, and for every parameter that none of them covers the reason."""

    blocks: list[KFACBlock] = field(default_factory=list)
    uncovered: dict[nn.Parameter, str] = field(default_factory=dict)


def build_blocks(
    model: nn.Module,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    existing: Sequence[KFACBlock] = (),
) -> Coverage:
    """Find the layers of `model` whose parameters are in `group_of` and make a block of each.

    Modules that share the very same parameters share a block. Where modules share a weight but not a bias, the
    block covers the weight alone. A weight that is also used by a module without an adapter is left uncovered,
    because only some of its uses could be measured. Blocks in `existing` that would be built again are kept.
    """
    coverage = Coverage()
    names = ModuleNames(model)
    found: defaultdict[nn.Parameter, list[_Use]] = defaultdict(list)
    owners: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(owner) for owner in owners):
            continue
        adapter = find_adapter(module, options.adapters)
        if adapter is not None and adapter.owns_children:
            owners.append(f"{path}." if path else "")
        owned = _owned(names, path, module, adapter, group_of, options, coverage)
        if not owned:
            continue
        name = names.shown[path]
        adapter, reason = _adapter_for(names, path, module, adapter, owned, options)
        trained = {local for local, param in owned.items() if param.requires_grad}
        if adapter is not None and not adapter.specs(module, name, trained):
            adapter, reason = None, "the weight it belongs to is not trained by this optimizer"
        for param in owned.values():
            why = reason if param.requires_grad else "requires_grad was False when the optimizer was built"
            coverage.uncovered.setdefault(param, why)
        if adapter is None:
            for local in trained:
                found[owned[local]].append(_Use(path, name, module, None, set()))
        else:
            first = adapter.specs(module, name, trained)[0].params[0]
            found[owned[first]].append(_Use(path, name, module, adapter, trained))
    for uses in found.values():
        for block in _merge(names, uses, group_of, options, coverage, existing):
            coverage.blocks.append(block)
            for param in block.params:
                coverage.uncovered.pop(param, None)
    of_model = set(model.parameters())
    for param in group_of:
        if param not in of_model:
            coverage.uncovered[param] = "not a parameter of the model"
    return coverage


@dataclass(frozen=True)
class _Use:
    """One module that uses a weight; `adapter` is None where it cannot be measured."""

    path: str
    name: str
    module: nn.Module
    adapter: LayerAdapter[Any] | None
    trained: set[str]


def _owned(
    names: ModuleNames,
    path: str,
    module: nn.Module,
    adapter: LayerAdapter[Any] | None,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    coverage: Coverage,
) -> dict[str, nn.Parameter]:
    """The parameters of the optimizer that `module` answers for, by their names within it."""
    owns_children = adapter is not None and adapter.owns_children
    owned: dict[str, nn.Parameter] = {}
    for local, param in module.named_parameters(recurse=owns_children):
        child = local.rpartition(".")[0]
        skipped = _skipped(names, f"{path}.{child}".strip("."), options) if child else None
        if param in group_of and skipped is None:
            owned[local] = param
        elif param in group_of:
            coverage.uncovered.setdefault(param, str(skipped))
    return owned


def _skipped(names: ModuleNames, path: str, options: BlockOptions) -> str | None:
    """The reason, where an entry of `skip_layers` names the module at `path` or one that contains it."""
    ancestry = names.lineage(path)
    for pattern in options.skip_layers:
        if any(matches(pattern, ancestor, parent) for ancestor, parent in ancestry):
            shown = pattern if isinstance(pattern, str) else pattern.__name__
            return f"skip_layers entry {shown!r}"
    return None


def _adapter_for(
    names: ModuleNames,
    path: str,
    module: nn.Module,
    adapter: LayerAdapter[Any] | None,
    owned: Mapping[str, nn.Parameter],
    options: BlockOptions,
) -> tuple[LayerAdapter[Any] | None, str]:
    """The adapter of `module` where it can be used, or None and the reason."""
    if (skipped := _skipped(names, path, options)) is not None:
        return None, skipped
    for ancestor, parent in names.lineage(path)[1:]:
        if isinstance(parent, _BYPASSES_CHILDREN):
            inside = f"{type(parent).__name__} {ancestor!r}"
            return None, f"inside {inside}, which does not call its children"
    if is_parametrized(module):
        return None, f"{type(module).__name__} is parametrized: the trained tensor is not the one used"
    if adapter is None:
        return None, f"no adapter for {type(module).__name__}"
    for local, param in owned.items():
        if is_lazy(param):
            return None, f"{local} is uninitialised: run one forward before building the optimizer"
        if not param.is_floating_point():
            return None, f"{local} is {param.dtype}: only real floating-point parameters are preconditioned"
    if (refusal := adapter.refusal(module)) is not None:
        return None, refusal
    return adapter, "not used by the layer's block"


def _merge(
    names: ModuleNames,
    uses: Sequence[_Use],
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    coverage: Coverage,
    existing: Sequence[KFACBlock],
) -> list[KFACBlock]:
    """The blocks of one weight and all modules that use it; none where they do not fit together."""
    if all(use.adapter is None for use in uses):
        return []
    first = uses[0]

    def refuse(reason: str) -> list[KFACBlock]:
        for use in uses:
            for local in use.trained:
                coverage.uncovered[use.module.get_parameter(local)] = reason
        return []

    for use in uses:
        if use.adapter is None:
            shared = f"shared with {type(use.module).__name__} {use.name!r}"
            return refuse(f"{shared}, which is not preconditioned")
    trained = first.trained
    if any(_parameters(use) != _parameters(first) for use in uses):
        # Tied weights, biases apart.
        trained = {
            local
            for local in first.trained
            if all(_parameters(use).get(local) == _parameters(first)[local] for use in uses)
        }
        for use in uses:
            for local in use.trained - trained:
                coverage.uncovered[use.module.get_parameter(local)] = "bias of a weight tied to other layers"
    blocks: list[KFACBlock] = []
    assert first.adapter is not None
    described = [
        tuple(replace(spec, name="") for spec in use.adapter.specs(use.module, use.name, trained))
        for use in uses
        if use.adapter is not None
    ]
    if any(specs != described[0] for specs in described):
        return refuse("tied to a layer of another shape")
    specs = first.adapter.specs(first.module, first.name, trained)
    for index, spec in enumerate(specs):
        block = _build(names, first, uses, index, spec, group_of, options, existing)
        if block is None:
            for local in spec.params:
                coverage.uncovered[first.module.get_parameter(local)] = "structure keeps neither of its factors"
        else:
            blocks.append(block)
    return blocks


def _build(
    names: ModuleNames,
    first: _Use,
    uses: Sequence[_Use],
    index: int,
    spec: LayerSpec,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    existing: Sequence[KFACBlock],
) -> KFACBlock | None:
    """The block of `spec`, or None where the structure leaves nothing to precondition with."""
    assert first.adapter is not None
    params = tuple(first.module.get_parameter(local) for local in spec.params)
    chosen = options.structure.of(names, first.path)
    structure = [most.at_most(wish) for most, wish in zip(spec.structure, chosen, strict=True)]
    notes = []
    for side, dim in enumerate((spec.in_dim, spec.out_dim)):
        if dim > options.max_factor_dim and structure[side] is Structure.DENSE:
            structure[side] = Structure.DIAGONAL
            notes.append(f"{'AG'[side]} is diagonal: {dim} > max_factor_dim {options.max_factor_dim}")
    if structure == [Structure.IDENTITY, Structure.IDENTITY]:
        return None
    if len(uses) > 1:
        notes.append("shared by " + ", ".join(use.name for use in uses))
    spec = replace(
        spec,
        structure=(structure[0], structure[1]),
        weight_sharing=options.weight_sharing.of(names, first.path),
    )
    for block in existing:
        if block.spec == spec and [id(p) for p in block.params] == [id(p) for p in params]:
            return block
    dtype = options.factor_dtype or torch.promote_types(params[0].dtype, torch.float32)
    inverse = options.inverse.of(names, first.path)
    return KFACBlock(
        name=spec.name,
        param_names=tuple(f"{first.name}.{local}".lstrip(".") for local in spec.params),
        spec=spec,
        index=index,
        adapter=first.adapter,
        modules=[use.module for use in uses],
        params=params,
        inverse=inverse,
        state=inverse.init(spec, dtype=dtype, device=params[0].device),
        dtype=dtype,
        groups=tuple(group_of[param] for param in params),
        notes=tuple(notes),
    )


def _parameters(use: _Use) -> dict[str, int]:
    return {local: id(use.module.get_parameter(local)) for local in use.trained}
