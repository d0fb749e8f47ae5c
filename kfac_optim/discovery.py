"""Finding the layers of a model, and making a block of each that can be preconditioned."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from kfac_optim.blocks import KFACBlock, LayerUse
from kfac_optim.functions import Product
from kfac_optim.layers.base import LayerAdapter, find_adapter
from kfac_optim.layers.product import ProductAdapter
from kfac_optim.options import BlockOptions
from kfac_optim.selection import ModuleNames, matches
from kfac_optim.specs import LayerSpec, Structure

# Modules that use their children's parameters without calling the children, whose hooks then never fire.
_BYPASSES_CHILDREN = (nn.MultiheadAttention,)
# Modules of torch's own that hold parameters for others to use.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_NO_ADAPTER = "no adapter for "
_UNLESS_A_FUNCTION = "; a matrix is preconditioned once a function multiplies by it"


@dataclass
class Coverage:
    """Blocks, and for every parameter that none of them covers the reason."""

    blocks: list[KFACBlock] = field(default_factory=list)
    uncovered: dict[nn.Parameter, str] = field(default_factory=dict)
    candidates: set[nn.Parameter] = field(default_factory=set)
    """Uncovered parameters in modules of no known kind, of which a block is made once a function multiplies by them."""

    lazy: set[nn.Parameter] = field(default_factory=set)
    """Parameters that had no shape yet."""

    def owners(self, model: nn.Module) -> list[nn.Module]:
        """Modules with parameters that are, or were, candidates."""
        claimed = {block.params[0] for block in self.blocks if isinstance(block.adapter, ProductAdapter)}
        shown = claimed | self.candidates
        return [m for m in model.modules() if any(param in shown for param in m.parameters(recurse=False))]

    def has_grown(self) -> bool:
        """Whether a parameter got its shape since."""
        return any(not is_lazy(param) for param in self.lazy)


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
        coverage.lazy.update(param for param in owned.values() if is_lazy(param))
        if reason.endswith(_UNLESS_A_FUNCTION):
            coverage.candidates.update(param for param in owned.values() if param.requires_grad)
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
            _cover(coverage, block)
    for block in existing:
        if isinstance(block.adapter, ProductAdapter) and coverage.candidates.issuperset(block.params):
            path, _ = _owner(model, block.params[0])
            _rename(block, _product_name(names.shown[path], block.spec.params[0]), names.shown[path])
            _cover(coverage, block)
    of_model = set(model.parameters())
    for param in group_of:
        if param not in of_model:
            coverage.uncovered[param] = "not a parameter of the model"
    return coverage


def claim(
    model: nn.Module,
    product: Product,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    coverage: Coverage,
) -> KFACBlock | None:
    """Make a block of a candidate that a function multiplies by; its bias joins where the module owns that too."""
    weight = product.weight
    if weight not in coverage.candidates or not (weight.requires_grad and weight.is_floating_point()):
        return None
    names = ModuleNames(model)
    path, module = _owner(model, weight)
    local, bias = _local_name(module, weight), _local_name(module, product.bias)
    if local is None:
        return None  # taken out of the model since
    adapter = ProductAdapter(transposes=product.transposed)
    out_dim, in_dim = reversed(weight.shape) if product.transposed else weight.shape
    params: tuple[str, ...] = (local,)
    if (
        bias is not None
        and product.bias in coverage.candidates
        and tuple(module.get_parameter(bias).shape) == (out_dim,)
    ):
        params = (local, bias)
    spec = LayerSpec(_product_name(names.shown[path], local), params, in_dim + len(params) - 1, out_dim)
    use = _Use(path, names.shown[path], module, adapter, set(params))
    block = _build(names, [use], [spec], [False], group_of, options, ())
    if block is not None:
        _cover(coverage, block)
    return block


def _owner(model: nn.Module, weight: nn.Parameter) -> tuple[str, nn.Module]:
    """Path and first module that has `weight` for its own; the model itself where none has."""
    owners = ((path, module) for path, module in model.named_modules() if _local_name(module, weight) is not None)
    return next(owners, ("", model))


def _product_name(module_name: str, local: str) -> str:
    return module_name if local == "weight" else f"{module_name}.{local}".lstrip(".")


def _rename(block: KFACBlock, name: str, module_name: str) -> None:
    """Give the block the names it has in a model that was found to be part of another."""
    block.name = name
    block.spec = replace(block.spec, name=name)
    block.param_names = tuple(f"{module_name}.{local}".lstrip(".") for local in block.spec.params)


def _local_name(module: nn.Module, param: Tensor | None) -> str | None:
    return next((name for name, own in module.named_parameters(recurse=False) if own is param), None)


def _cover(coverage: Coverage, block: KFACBlock) -> None:
    coverage.blocks.append(block)
    for param in block.params:
        coverage.uncovered.pop(param, None)
        coverage.candidates.discard(param)


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
        # torch's own modules use their parameters in ways of their own.
        foreign = not type(module).__module__.startswith("torch.nn") or isinstance(module, _CONTAINERS)
        multiplied = foreign and any(not is_lazy(param) and param.dim() == 2 for param in owned.values())
        return None, f"{_NO_ADAPTER}{type(module).__name__}{_UNLESS_A_FUNCTION if multiplied else ''}"
    for local, param in owned.items():
        if is_lazy(param):
            return None, f"{local} is uninitialised: preconditioned from the step after its first forward on"
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
                coverage.candidates.discard(use.module.get_parameter(local))
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
    described = [_describe(use, trained) for use in uses]
    opposed = [_opposed(first, use) for use in uses]
    if any(
        not _fit(specs, [spec.transposed() for spec in described[0]] if other else described[0])
        for specs, other in zip(described, opposed, strict=True)
    ):
        return refuse("tied to a layer of another shape")
    blocks: list[KFACBlock] = []
    for of_spec in zip(*described, strict=True):
        block = _build(names, uses, of_spec, opposed, group_of, options, existing)
        if block is None:
            for local in of_spec[0].params:
                coverage.uncovered[first.module.get_parameter(local)] = "structure keeps neither of its factors"
        else:
            blocks.append(block)
    return blocks


def _describe(use: _Use, trained: set[str]) -> tuple[LayerSpec, ...]:
    assert use.adapter is not None
    return use.adapter.specs(use.module, use.name, trained)


def _opposed(first: _Use, use: _Use) -> bool:
    """Whether `use` multiplies by the transpose of what `first` multiplies by."""
    assert first.adapter is not None
    assert use.adapter is not None
    ways = first.adapter.transposes, use.adapter.transposes
    return None not in ways and ways[0] != ways[1]


def _fit(specs: Sequence[LayerSpec], others: Sequence[LayerSpec]) -> bool:
    return [_shape(spec) for spec in specs] == [_shape(spec) for spec in others]


def _shape(spec: LayerSpec) -> tuple[Any, ...]:
    return (type(spec), spec.params, spec.in_dim, spec.out_dim, spec.groups)


def _build(
    names: ModuleNames,
    uses: Sequence[_Use],
    specs: Sequence[LayerSpec],
    opposed: Sequence[bool],
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    existing: Sequence[KFACBlock],
) -> KFACBlock | None:
    """The block of one matrix, or None where the structure leaves nothing to precondition with.

    Args:
        names: of the model's modules.
        uses: of the matrix.
        specs: the matrix as each of `uses` sees it.
        opposed: whether each sees the transpose of what the first sees.
        group_of: the param group of each parameter.
        options: the user's choices.
        existing: one of these is returned where it would be built again.
    """
    first, spec = uses[0], specs[0]
    params = tuple(first.module.get_parameter(local) for local in spec.params)
    structure = list(options.structure.of(names, first.path))
    for each, other in zip(specs, opposed, strict=True):
        kept = reversed(each.structure) if other else each.structure
        structure = [most.at_most(wish) for most, wish in zip(kept, structure, strict=True)]
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
        opposed=any(opposed),
    )
    dtype = options.factor_dtype or torch.promote_types(params[0].dtype, torch.float32)
    inverse = options.inverse.of(names, first.path)
    layer_uses = tuple(
        LayerUse(use.module, use.adapter, spec.transposed() if other else spec, other)
        for use, other in zip(uses, opposed, strict=True)
        if use.adapter is not None
    )
    for block in existing:
        # What forwards have shown since is kept.
        seen = replace(spec, opposed=block.spec.opposed, shared_input=block.spec.shared_input)
        same_spec = replace(block.spec, name=spec.name) == seen
        if same_spec and block.inverse is inverse and [id(p) for p in block.params] == [id(p) for p in params]:
            _rename(block, spec.name, first.name)
            block.notes = tuple(notes)
            known = {use.module: use for use in block.uses}  # kept, and with them their hooks
            block.uses = tuple(known.get(use.module, use) for use in layer_uses)
            block.revise(replace(block.spec, opposed=block.spec.opposed or spec.opposed))
            return block
    return KFACBlock(
        name=spec.name,
        param_names=tuple(f"{first.name}.{local}".lstrip(".") for local in spec.params),
        spec=spec,
        uses=layer_uses,
        params=params,
        inverse=inverse,
        state=inverse.init(spec, dtype=dtype, device=params[0].device),
        dtype=dtype,
        groups=tuple(group_of[param] for param in params),
        notes=tuple(notes),
    )


def _parameters(use: _Use) -> dict[str, int]:
    return {local: id(use.module.get_parameter(local)) for local in use.trained}
