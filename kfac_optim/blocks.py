"""A block is what is preconditioned as one: a layer's gradient matrix, its adapter, its inverse and its clock."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from kfac_optim.capture import CaptureWindow
from kfac_optim.inverses.base import Inverse
from kfac_optim.layers.base import Adapters, LayerAdapter, LayerStatistics, find_adapter
from kfac_optim.selection import Choice, Pattern, lineage, matches
from kfac_optim.specs import LayerSpec, Structure, WeightSharing

# Modules that use their children's parameters without calling the children, whose hooks then never fire.
_BYPASSES_CHILDREN = (nn.MultiheadAttention,)

_WRAPPER_PREFIXES = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


# The averages change fastest while they are young: an inverse is out of date once they have grown by this factor.
_GROWTH_BEFORE_REFRESH = 1.5


@dataclass
class Clock:
    """When a block did what, in optimizer steps since it was built; -1 is never."""

    step: int = 0
    """The current step."""
    folds: int = 0
    """Statistics steps so far."""
    folded_at: int = -1
    refreshed_at: int = -1
    folds_at_refresh: int = 0


@dataclass(eq=False)
class KFACBlock:
    """One gradient matrix `[groups, out, in]` of one module, or of several that share its parameters.

    Attributes:
        name: fully qualified name of the (first) module; with a suffix where a module has several blocks.
        spec: shapes and choices.
        index: which of the adapter's specs this is.
        adapter: of the module's family.
        modules: every module that uses these parameters.
        params: the parameters, in the order of `spec.params`.
        inverse: representation of the inverse curvature.
        state: of `inverse`.
        groups: the optimizer's param group of each parameter; the first one's damping, decay and periods are
            the block's.
        dtype: of the factors.
        notes: choices made for the user, for `summary()`.
        clock: what was done when.
    """

    name: str
    spec: LayerSpec
    index: int
    adapter: LayerAdapter[Any]
    modules: list[nn.Module]
    params: tuple[nn.Parameter, ...]
    inverse: Inverse[Any]
    state: Any
    dtype: torch.dtype
    groups: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    clock: Clock = field(default_factory=Clock)

    @property
    def group(self) -> dict[str, Any]:
        return self.groups[0]

    @property
    def is_ready(self) -> bool:
        """Whether there is an inverse to precondition with."""
        return self.clock.refreshed_at >= 0

    def wants_statistics(self) -> bool:
        """Whether the current step is one of statistics: by period, or because nothing is known yet."""
        return not self.is_ready or self.clock.step % self.group["factor_update_period"] == 0

    def accumulate(self, stats: LayerStatistics) -> None:
        self.inverse.accumulate(self.state, stats)

    def discard(self) -> None:
        """Forget the sums of this step."""
        self.inverse.discard(self.state)

    def restart(self) -> None:
        """Forget all statistics; the step count goes on."""
        self.clock = Clock(step=self.clock.step)
        self.state = self.inverse.init(self.spec, dtype=self.dtype, device=self.params[0].device)

    def fold(self, loss_terms: float) -> None:
        """Take this step's sums into the averages; a step that gave none leaves the block as it is."""
        if not self.inverse.has_pending(self.state):
            return
        clock = self.clock
        elapsed = clock.step - clock.folded_at if clock.folds else 0
        self.inverse.fold(self.state, loss_terms, self.group["factor_decay"] ** elapsed)
        clock.folded_at = clock.step
        clock.folds += 1

    def refresh_due(self) -> bool:
        """By period; at the first step with statistics; and at folds 1, 2, 3, 5, 8, … while the averages are young."""
        clock = self.clock
        if clock.folds == 0:
            return False
        outgrown = clock.folds >= _GROWTH_BEFORE_REFRESH * clock.folds_at_refresh
        fresh = clock.folded_at == clock.step
        return not self.is_ready or (fresh and outgrown) or clock.step % self.group["inverse_update_period"] == 0

    def mark_refreshed(self) -> None:
        """Note the refresh; until a sample was accepted there is nothing behind it, and it does not count."""
        if self.is_ready or self.inverse.has_statistics(self.state):
            self.clock.refreshed_at = self.clock.step
            self.clock.folds_at_refresh = self.clock.folds

    def gradient(self) -> Tensor | None:
        """`[groups, out, in]` in at least float32, missing parts zero; None when no parameter has a gradient."""
        if all(param.grad is None for param in self.params):
            return None
        dtype = torch.promote_types(self.dtype, torch.float32)
        grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in self.params]
        return self.adapter.pack(self.spec, [grad.to(dtype) for grad in grads])

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The parts of `matrix` that belong to each parameter, in its shape, dtype and memory layout.

        The layout matters: torch's fused kernels read parameter, gradient and momentum side by side.
        """
        parts = self.adapter.unpack(self.spec, matrix)
        return [
            torch.empty_like(param).copy_(part.reshape(param.shape))
            for part, param in zip(parts, self.params, strict=True)
        ]


@dataclass(frozen=True)
class BlockOptions:
    """The user's choices about layers, as given to `KFACOptimizer`."""

    adapters: Adapters
    skip_layers: Sequence[Pattern]
    inverse: Choice[Inverse[Any]]
    weight_sharing: Choice[WeightSharing]
    structure: Choice[tuple[Structure, Structure]]
    max_factor_dim: int
    factor_dtype: torch.dtype | None


@dataclass
class Coverage:
    """Blocks, and for every parameter that none of them covers the reason."""

    blocks: list[KFACBlock] = field(default_factory=list)
    uncovered: dict[nn.Parameter, str] = field(default_factory=dict)


def qualified_name(name: str) -> str:
    """`name` without the prefixes that DDP, FSDP, torch.compile and checkpoint wrappers add."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(f".{prefix}", ".")
        while name.startswith(prefix):
            name = name.removeprefix(prefix)
    return name


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
    found: defaultdict[nn.Parameter, list[_Use]] = defaultdict(list)
    for name, module in model.named_modules():
        owned = {local: param for local, param in module.named_parameters(recurse=False) if param in group_of}
        if not owned:
            continue
        adapter, reason = _adapter_for(model, name, module, owned, options)
        trained = {local for local, param in owned.items() if param.requires_grad}
        if adapter is not None and not adapter.specs(module, name, trained):
            adapter, reason = None, "the weight it belongs to is not trained by this optimizer"
        for param in owned.values():
            why = reason if param.requires_grad else "requires_grad was False when the optimizer was built"
            coverage.uncovered.setdefault(param, why)
        if adapter is None:
            for local in trained:
                found[owned[local]].append(_Use(name, module, None, set()))
        else:
            first = adapter.specs(module, name, trained)[0].params[0]
            found[owned[first]].append(_Use(name, module, adapter, trained))
    for uses in found.values():
        for block in _merge(model, uses, group_of, options, coverage, existing):
            coverage.blocks.append(block)
            for param in block.params:
                coverage.uncovered.pop(param, None)
    of_model = set(model.parameters())
    for param in group_of:
        if param not in of_model:
            coverage.uncovered[param] = "not a parameter of the model"
    return coverage


def attach(
    block_list: Iterable[KFACBlock], window: CaptureWindow, emitted: Callable[[KFACBlock], None]
) -> list[RemovableHandle]:
    """Hook every module of `block_list` into `window`; `emitted` is told of each block that took statistics."""
    by_module: defaultdict[nn.Module, list[KFACBlock]] = defaultdict(list)
    for block in block_list:
        for module in block.modules:
            by_module[module].append(block)
    return [_attach_module(module, blocks, window, emitted) for module, blocks in by_module.items()]


def _attach_module(
    module: nn.Module,
    blocks: Sequence[KFACBlock],
    window: CaptureWindow,
    emitted: Callable[[KFACBlock], None],
) -> RemovableHandle:
    def wanted() -> bool:
        return any(block.wants_statistics() for block in blocks)

    def emit(index: int, stats: LayerStatistics) -> None:
        block = blocks[index]
        block.accumulate(stats)
        emitted(block)

    adapter = blocks[0].adapter
    return adapter.capture(module, [b.spec for b in blocks], window, wanted, emit, blocks[0].dtype)


@dataclass(frozen=True)
class _Use:
    """One module that uses a weight; `adapter` is None where it cannot be measured."""

    name: str
    module: nn.Module
    adapter: LayerAdapter[Any] | None
    trained: set[str]


def _adapter_for(
    model: nn.Module,
    name: str,
    module: nn.Module,
    owned: Mapping[str, nn.Parameter],
    options: BlockOptions,
) -> tuple[LayerAdapter[Any] | None, str]:
    """The adapter of `module`, or None and the reason."""
    ancestry = lineage(model, name)
    for pattern in options.skip_layers:
        if any(matches(pattern, ancestor, parent) for ancestor, parent in ancestry):
            shown = pattern if isinstance(pattern, str) else pattern.__name__
            return None, f"skip_layers entry {shown!r}"
    for ancestor, parent in ancestry[1:]:
        if isinstance(parent, _BYPASSES_CHILDREN):
            inside = f"{type(parent).__name__} {qualified_name(ancestor)!r}"
            return None, f"inside {inside}, which does not call its children"
    if is_parametrized(module):
        return None, f"{type(module).__name__} is parametrized: the trained tensor is not the one used"
    adapter = find_adapter(module, options.adapters)
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
    model: nn.Module,
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
            shared = f"shared with {type(use.module).__name__} {qualified_name(use.name)!r}"
            return refuse(f"{shared}, which is not preconditioned")
    trained = first.trained
    if any(_parameters(use) != _parameters(first) for use in uses):
        trained = {"weight"}  # tied weights, biases apart
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
    specs = first.adapter.specs(first.module, qualified_name(first.name), trained)
    for index, spec in enumerate(specs):
        blocks.append(_build(model, first, uses, index, spec, group_of, options, existing))
    return blocks


def _build(
    model: nn.Module,
    first: _Use,
    uses: Sequence[_Use],
    index: int,
    spec: LayerSpec,
    group_of: Mapping[nn.Parameter, dict[str, Any]],
    options: BlockOptions,
    existing: Sequence[KFACBlock],
) -> KFACBlock:
    assert first.adapter is not None
    params = tuple(first.module.get_parameter(local) for local in spec.params)
    structure = list(options.structure.of(model, first.name))
    notes = []
    for side, dim in enumerate((spec.in_dim, spec.out_dim)):
        if dim > options.max_factor_dim and structure[side] is Structure.DENSE:
            structure[side] = Structure.DIAGONAL
            notes.append(f"{'AG'[side]} is diagonal: {dim} > max_factor_dim {options.max_factor_dim}")
    if len(uses) > 1:
        notes.append("shared by " + ", ".join(qualified_name(use.name) for use in uses))
    spec = replace(
        spec,
        structure=(structure[0], structure[1]),
        weight_sharing=options.weight_sharing.of(model, first.name),
    )
    for block in existing:
        if block.spec == spec and [id(p) for p in block.params] == [id(p) for p in params]:
            return block
    dtype = options.factor_dtype or torch.promote_types(params[0].dtype, torch.float32)
    inverse = options.inverse.of(model, first.name)
    return KFACBlock(
        name=spec.name,
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
