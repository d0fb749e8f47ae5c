"""Finding the layers of a model, and making a block of each that can be preconditioned."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.building import Assembly, Coverage, Use, build, cover, merge, rename
from kfac_optim.blocks.options import BlockOptions
from kfac_optim.blocks.selection import ModuleNames, matches
from kfac_optim.capture.contractions import TensorProduct
from kfac_optim.capture.function_modes import Product
from kfac_optim.layers.base import LayerAdapter
from kfac_optim.layers.product import ProductAdapter
from kfac_optim.layers.recognition import adapter_of
from kfac_optim.layers.tensors import TensorAdapter, added_structure
from kfac_optim.specs import LayerSpec

# Modules that use their children's parameters without calling the children, whose hooks then never fire.
_BYPASSES_CHILDREN = (nn.MultiheadAttention,)
# Modules of torch's own that hold parameters for others to use.
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)
_NO_ADAPTER = "no adapter for "
_UNLESS_A_FUNCTION = (
    "; a matrix is preconditioned once F.linear, x @ W or an einsum of two operands multiplies rows by it"
)


def build_blocks(
    model: nn.Module,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    existing: Sequence[KFACBlock],
    excluded: Mapping[nn.Parameter, str],
    once_trained: Collection[nn.Parameter],
) -> Coverage:
    """Find the layers of `model` whose parameters are in `group_of` and make a block of each.

    Modules that share the very same parameters share a block. Where modules share a weight but not a bias, the
    block covers the weight alone. A weight that is also used by a module without an adapter is left uncovered,
    because only some of its uses could be measured. Blocks in `existing` that would be built again are kept; parameters
    in `excluded` are left uncovered for the reason given; those in `once_trained` are covered though they are frozen.
    """
    coverage = Coverage()
    names = ModuleNames(model)
    assembly = Assembly(names, group_of, options, existing)
    known = {param for block in existing for param in block.params}.union(
        once_trained
    )  # frozen since, and keeps its block
    found: defaultdict[nn.Parameter, list[Use]] = defaultdict(list)
    owners: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(owner) for owner in owners):
            continue
        adapter = adapter_of(module, options.adapters)
        if adapter is not None and adapter.owns_children:
            owners.append(f"{path}." if path else "")
        owned = _owned(names, path, module, adapter, group_of, options, coverage)
        out = [local for local, param in owned.items() if param in excluded]
        for local in out:
            param = owned.pop(local)
            coverage.uncovered[param] = excluded[param]
        if not owned:
            continue
        name = names.shown[path]
        adapter, reason = _adapter_for(names, path, module, adapter, owned, options)
        trained = {local for local, param in owned.items() if param.requires_grad or param in known}
        coverage.frozen.update(param for local, param in owned.items() if local not in trained)
        if adapter is not None and not adapter.specs(module, name, trained):
            adapter = None
            reason = f"the weight it belongs to is {'left out' if out else 'not trained by this optimizer'}"
        coverage.lazy.update(param for param in owned.values() if is_lazy(param))
        if reason.endswith(_UNLESS_A_FUNCTION):
            coverage.candidates.update(owned[local] for local in trained)
        for local, param in owned.items():
            why = "requires_grad is False" if param in coverage.frozen else reason
            if why.startswith(_NO_ADAPTER) and param.dtype.is_complex:  # which no adapter and no function changes
                why = _only_real(local, param)
            coverage.uncovered.setdefault(param, why)
        if adapter is None:
            for local in trained:
                found[owned[local]].append(Use(path, name, module, None, owned, set()))
        else:
            first = adapter.specs(module, name, trained)[0].params[0]
            found[owned[first]].append(Use(path, name, module, adapter, owned, trained))
    for uses in found.values():
        for block in merge(assembly, uses, coverage):
            cover(coverage, block)
    for block in existing:
        if isinstance(block.adapter, ProductAdapter) and coverage.candidates.issuperset(block.params):
            path, owner = _owner(names, block.params[0])
            block.uses = (replace(block.uses[0], module=owner),)
            rename(block, _product_name(names.shown[path], block.spec.params[0]), names.shown[path])
            cover(coverage, block)
    of_model = {param for _, param in names.held_by(model, recurse=True)}
    for param in group_of:
        if param not in of_model:
            coverage.uncovered[param] = "not a parameter of the model"
    return coverage


def claim(
    model: nn.Module,
    product: Product | TensorProduct,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    coverage: Coverage,
) -> KFACBlock | None:
    """Make a block of a candidate that a function multiplies by, finds matrices in, or adds to rows.

    The bias of a product joins where the module owns that too.
    """
    weight = product.weight
    if weight not in coverage.candidates or not weight.requires_grad or not weight.is_floating_point():
        return None
    names = ModuleNames(model)
    path, module = _owner(names, weight)
    local = _local_name(names, module, weight)
    if local is None:
        return None  # taken out of the model since
    name = _product_name(names.shown[path], local)
    params: tuple[str, ...] = (local,)
    adapter: ProductAdapter
    if isinstance(product, TensorProduct):
        if options.matrices_only and _is_vector(weight):
            return None
        adapter = TensorAdapter(product.shape, product.sides)
        groups, out_dim, in_dim = adapter.sizes
        spec = LayerSpec(name, params, in_dim, out_dim, groups, own_rows=True)
        if product.added is not None:  # its one input is 1
            spec = replace(spec, structure=added_structure(spec))
    else:
        if weight.numel() == 0:
            return None
        out_dim, in_dim = reversed(weight.shape) if product.transposed else weight.shape
        bias = _local_name(names, module, product.bias)
        if bias is not None and product.bias in coverage.candidates:
            params += (bias,) if tuple(module.get_parameter(bias).shape) == (out_dim,) else ()
        spec = LayerSpec(name, params, in_dim + len(params) - 1, out_dim)
        adapter = ProductAdapter(transposes=product.transposed)
    use = Use(path, names.shown[path], module, adapter, dict(names.held_by(module)), set(params))
    block = build(Assembly(names, group_of, options), [use], [spec], [False])
    if block is not None:
        cover(coverage, block)
    return block


def _is_vector(param: nn.Parameter) -> bool:
    return not is_lazy(param) and param.dim() < 2


def _owner(names: ModuleNames, weight: nn.Parameter) -> tuple[str, nn.Module]:
    """Return path and first module that has `weight` for its own; the model itself where none has."""
    modules = names.model.named_modules()
    owners = ((path, module) for path, module in modules if _local_name(names, module, weight) is not None)
    return next(owners, ("", names.model))


def _product_name(module_name: str, local: str) -> str:
    return module_name if local == "weight" else f"{module_name}.{local}".lstrip(".")


def _local_name(names: ModuleNames, module: nn.Module, param: Tensor | None) -> str | None:
    return next((local for local, own in names.held_by(module) if own is param), None)


def _owned(
    names: ModuleNames,
    path: str,
    module: nn.Module,
    adapter: LayerAdapter[Any] | None,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    coverage: Coverage,
) -> dict[str, nn.Parameter]:
    """Return the parameters of the optimizer that `module` answers for, by their names within it."""
    owns_children = adapter is not None and adapter.owns_children
    owned: dict[str, nn.Parameter] = {}
    for local, param in names.held_by(module, recurse=owns_children):
        child = local.rpartition(".")[0]
        skipped = _skipped(names, f"{path}.{child}".strip("."), options) if child else None
        if param in group_of and skipped is None:
            owned[local] = param
        elif param in group_of:
            coverage.uncovered.setdefault(param, str(skipped))
    return owned


def _skipped(names: ModuleNames, path: str, options: BlockOptions) -> str | None:
    """Return the reason, if an entry of `skip_layers` names the module at `path` or one that contains it."""
    ancestry = names.lineage(path)
    for pattern in options.skip_layers:
        if any(matches(pattern, ancestor, parent) for ancestor, parent in ancestry):
            shown = pattern if isinstance(pattern, str) else pattern.__name__
            return f"skip_layers entry {shown!r}"
    return None


def _only_real(local: str, param: nn.Parameter) -> str:
    return f"{local} is {param.dtype}: only real floating-point parameters are preconditioned"


def _adapter_for(
    names: ModuleNames,
    path: str,
    module: nn.Module,
    adapter: LayerAdapter[Any] | None,
    owned: Mapping[str, nn.Parameter],
    options: BlockOptions,
) -> tuple[LayerAdapter[Any] | None, str]:
    """Return the adapter of `module` if it can be used, otherwise None and the reason."""
    if (skipped := _skipped(names, path, options)) is not None:
        return None, skipped
    scripted = [around for around, parent in names.lineage(path) if isinstance(parent, torch.jit.ScriptModule)]
    if scripted:
        return None, f"{scripted[-1] or 'the model'!r} was compiled by torch.jit: its layers take no hooks"
    for ancestor, parent in names.lineage(path)[1:]:
        if isinstance(parent, _BYPASSES_CHILDREN):
            inside = f"{type(parent).__name__} {ancestor!r}"
            return None, f"inside {inside}, which does not call its children"
    if is_parametrized(module) and (adapter is None or not adapter.expects_parametrized):
        return None, f"{type(module).__name__} is parametrized: the trained tensor is not the one used"
    if adapter is None:
        # torch's own modules use their parameters in ways of their own.
        foreign = not type(module).__module__.startswith("torch.nn") or isinstance(module, _CONTAINERS)
        real = (param for param in owned.values() if not is_lazy(param) and param.is_floating_point())
        multiplied = foreign and any(param.dim() >= 2 for param in real)
        return None, f"{_NO_ADAPTER}{type(module).__name__}{_UNLESS_A_FUNCTION if multiplied else ''}"
    if options.matrices_only and (not adapter.has_matrix or all(map(_is_vector, owned.values()))):
        return None, "it is no matrix"
    for local, param in owned.items():
        if is_lazy(param):
            return None, f"{local} is uninitialised: preconditioned from the step after its first forward on"
        if param.numel() == 0:
            return None, f"{local} has no elements"
        if not param.is_floating_point():
            return None, _only_real(local, param)
    if (refusal := adapter.refusal(module)) is not None:
        return None, refusal
    return adapter, "not used by the layer's block"
