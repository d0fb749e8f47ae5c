"""What the optimizer says of itself: `summary()`, `metrics()` and `factors()`, as functions over its blocks."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.building import Coverage
from kfac_optim.factors.block_diagonal import clear_padding
from kfac_optim.specs import BlockDiagonal, BlockRecord, Kept, ParameterRecord, Sketched, Structure, WeightSharing
from kfac_optim.step.engine import StepRecord
from kfac_optim.step.scalars import Scalar
from kfac_optim.step.step_size import PLAIN_SGD, PlainSteps
from kfac_optim.utils.text import describe_bytes, table

_UNSEEN = "no call of a module that holds it was seen yet"


@dataclass(frozen=True)
class Summary:
    """Lists every parameter of the optimizer and how it is treated. `str()` is the table."""

    blocks: tuple[BlockRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    plain: PlainSteps = PLAIN_SGD

    def __str__(self) -> str:
        header = ("parameter", "shape", "block", "A", "G", "inverse", "state", "rank", "remarks")
        by_name = {block.name: block for block in self.blocks}
        rows: list[tuple[str, ...]] = [header]
        for parameter in self.parameters:
            shape = _describe_shape(parameter.shape)
            if parameter.block is None:
                rows.append((parameter.name, shape, "—", "", "", "", "", "", f"{self.plain.rest}: {parameter.reason}"))
                continue
            block = by_name.pop(parameter.block, None)
            if block is None:  # shown already, beside another of its parameters
                rows.append((parameter.name, shape, parameter.block or "(model)", "", "", "", "", "", ""))
                continue
            sides = [
                _describe_factor(groups, dim, dims, kept)
                for groups, dim, dims, kept in zip(
                    (1 if block.shared_input else block.groups, block.groups),
                    (block.in_dim, block.out_dim),
                    block.factor_dims,
                    block.structure,
                    strict=True,
                )
            ]
            sharing = [block.weight_sharing.value] if block.weight_sharing is not WeightSharing.EXPAND else []
            unmeasured = [f"no statistics so far: {self.plain.layer}"] if block.measured is False else []
            remarks = "; ".join([*sharing, *block.notes, *unmeasured])
            rows.append(
                (
                    parameter.name,
                    shape,
                    block.name or "(model)",
                    *sides,
                    block.inverse,
                    describe_bytes(block.state_bytes),
                    " ".join(map(str, dict.fromkeys(block.owners))),
                    remarks,
                )
            )
        # No dict: parameters without a name may have equal records.
        sizes = [(p.block, math.prod(p.shape)) for p in self.parameters if p.shape is not None]
        total, covered = sum(size for _, size in sizes), sum(size for block, size in sizes if block is not None)
        state = sum(block.state_bytes for block in self.blocks)
        blocks = f"{len(self.blocks)} block{' covers' if len(self.blocks) == 1 else 's cover'}"
        footer = f"{blocks} {covered:,} of {total:,} parameters; their state takes {describe_bytes(state)}."
        if any(block.measured is not None for block in self.blocks):
            names = {block.name for block in self.blocks if block.measured}
            measured = sum(size for block, size in sizes if block in names)
            footer += f" Statistics were taken of {measured:,} ({_percent(measured, total)}) so far."
        return "\n".join([*table(rows), footer])


def summary(
    coverage: Coverage,
    names: Mapping[nn.Parameter, str],
    params: Iterable[nn.Parameter],
    owners: Callable[[KFACBlock], Sequence[int]],
    plain: PlainSteps,
) -> Summary:
    """Return records of all blocks and of `params`, whose names come from `names`; `owners` of a block are ranks."""
    block_of = {param: block for block in coverage.blocks for param in block.params}
    return Summary(
        blocks=tuple(_record(block, tuple(owners(block))) for block in coverage.blocks),
        parameters=tuple(
            ParameterRecord(
                name=names.get(param, "(unnamed)"),
                shape=None if is_lazy(param) else tuple(param.shape),
                block=block_of[param].name if param in block_of else None,
                reason=None if param in block_of else coverage.uncovered.get(param, _UNSEEN),
            )
            for param in params
        ),
        plain=plain,
    )


class Metrics(dict[str, float]):
    """Holds numbers by name: a dict that waits for the device when a number is first read, and not before.

    The numbers are those of the moment when it was made, however late they are read. Its names are there at once.
    Copies of it (`dict(...)`, `copy`, pickles) are dicts without that.
    """

    _fetch: Callable[[], dict[str, float]] | None = None

    @classmethod
    def later(cls, numbers: Sequence[tuple[str, Scalar]]) -> "Metrics":
        """Return numbers by name; several of one name give the maximum (conditions, cutoffs) or the sum (others)."""
        names = [name for name, _ in numbers]
        values = _snapshot([value for _, value in numbers])
        made = cls(dict.fromkeys((_DERIVED.get(name, name) for name in names), _UNREAD))
        made._fetch = lambda: _merged(zip(names, values(), strict=True))
        return made

    def _read(self) -> None:
        if self._fetch is None:
            return
        for name, number in self._fetch().items():
            if dict.get(self, name) is _UNREAD:  # otherwise the user has changed it
                dict.__setitem__(self, name, number)
        self._fetch = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A dict as such is no global that `torch.load(weights_only=True)` knows.
        return OrderedDict, (), None, None, iter(self.items())


_UNREAD: Any = object()
_FLAT = 2.0  # an inverse whose condition number is at most so much turns the gradient hardly at all
_DERIVED = {
    "inner": "cosine",
    "direction_square": "direction_norm",
    "gradient_square": "gradient_norm",
    "bounded_square": "direction_norm",
}


def _reading(method: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: Metrics, *args: Any) -> Any:
        for each in (self, *args):  # two of them may be compared
            if isinstance(each, Metrics):
                each._read()
        return method(self, *args)

    return read


# C code reads a dict past its methods only if it has no `__iter__` of its own.
_DUNDERS = ("__getitem__", "__iter__", "__eq__", "__ne__", "__or__", "__ror__", "__repr__")
for _name in (*_DUNDERS, "get", "values", "items", "pop", "popitem", "setdefault", "copy"):
    setattr(Metrics, _name, _reading(getattr(dict, _name)))


def metrics(
    blocks: Sequence[KFACBlock],
    params: Sequence[nn.Parameter],
    record: StepRecord | None,
    *,
    dropped_calls: int,
    skipped_steps: Scalar,
    rejected_steps: int | None,
    reduction_ratio: float | None,
    counters: Callable[[KFACBlock], Mapping[str, float | Tensor]],
    report: Mapping[str, Scalar],
) -> Metrics:
    """Return plain numbers about the last step, for any logger, without a wait; see `KFACOptimizer.metrics`."""
    known = [block for block in blocks if block.clock.folds > 0]
    numbers: list[tuple[str, Scalar]] = [
        ("blocks", len(blocks)),
        ("blocks_without_statistics", len(blocks) - len(known)),
        ("dropped_calls", dropped_calls),
        ("skipped_steps", skipped_steps),
        *_shares(blocks, params).items(),
        *report.items(),
    ]
    if rejected_steps is not None:
        numbers.append(("rejected_steps", rejected_steps))
    if reduction_ratio is not None:
        numbers.append(("reduction_ratio", reduction_ratio))
    if record is not None:
        numbers += [("unpreconditioned_blocks", len(record.unpreconditioned)), *record.measures.items()]
    if known:
        # The clocks already stand at the next step.
        clocks = [block.clock for block in known]
        numbers += [
            ("damping", max(float(block.group["damping"]) * block.clock.loss_unit for block in known)),
            ("factor_age", max(clock.step - 1 - clock.folded_at for clock in clocks)),
            ("inverse_age", max(clock.step - 1 - clock.refreshed_at for clock in clocks)),
            *(counted for block in known for counted in _of_block(counters(block))),
        ]
    return Metrics.later(numbers)


def _of_block(counters: Mapping[str, float | Tensor]) -> Iterator[tuple[str, Scalar]]:
    """Give the numbers of a block, and whether damping hides its curvature."""
    yield from counters.items()
    if "condition_A" in counters:
        yield "flat_blocks", counters["condition_A"] * counters["condition_G"] <= _FLAT


def factors(
    blocks: Sequence[KFACBlock], keeps: Callable[[KFACBlock], bool]
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return `{layer name: (A, G)}`, copies, of blocks that this process keeps; see `KFACOptimizer.factors`."""
    result: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for block in blocks:
        if block.clock.folds == 0 or not keeps(block):
            continue
        a, g = (None if factor is None else factor.clone() for factor in block.state.factors())
        for side, (factor, dim) in enumerate(((a, block.spec.in_dim), (g, block.spec.out_dim))):
            if factor is not None and block.spec.blocks(side) > 1:
                clear_padding(factor, dim)
        result[block.name] = (a, g)
    return result


def _snapshot(numbers: Sequence[Scalar]) -> Callable[[], list[float]]:
    """Return what gives the numbers as they are now, and waits for the devices that hold them when it is called."""
    known: dict[int, float] = {}
    alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for i, number in enumerate(numbers):
        if isinstance(number, Tensor):
            alike.setdefault((number.device, number.dtype), {})[i] = number.detach()
        else:
            known[i] = float(number)
    copies = [(tuple(some), torch.stack([*some.values()])) for some in alike.values()]

    def read() -> list[float]:
        found = dict(known)
        for which, copy in copies:
            found.update(zip(which, map(float, copy.tolist()), strict=True))
        return [found[i] for i in range(len(found))]

    return read


def _merged(numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the numbers by the names that `metrics()` gives them."""
    merged: dict[str, float] = {}
    for name, number in numbers:
        before = merged.get(name, 0.0)
        merged[name] = max(before, number) if name.startswith(("condition", "cutoff")) else before + number
    if "inner" in merged:
        inner, direction, gradient = (merged.pop(name) for name in ("inner", "direction_square", "gradient_square"))
        bounded = merged.pop("bounded_square", direction)
        norms = math.sqrt(direction * gradient)
        merged |= {
            "cosine": inner / norms if norms > 0 else math.nan,
            "gradient_norm": math.sqrt(gradient),
            "direction_norm": math.hypot(
                merged.get("trust_region_scale", 1.0) * math.sqrt(bounded), math.sqrt(max(0.0, direction - bounded))
            ),
        }
    return merged


def _shares(blocks: Sequence[KFACBlock], params: Iterable[nn.Parameter]) -> dict[str, float]:
    """Tell which shares of the parameters that are trained are covered, measured and left out."""

    def numel(some: Iterable[nn.Parameter]) -> int:
        return sum(param.numel() for param in some if param.requires_grad and not is_lazy(param))

    total = numel(params)
    covered = sum(numel(block.params) for block in blocks)
    measured = sum(numel(block.params) for block in blocks if block.clock.folds > 0)
    return {
        "covered_parameters": covered / max(1, total),
        "measured_parameters": measured / max(1, total),
        "left_out_parameters": (total - covered) / max(1, total),
    }


def _record(block: KFACBlock, owners: tuple[int, ...]) -> BlockRecord:
    spec = block.spec
    on_meta = block.params[0].is_meta  # otherwise these are another rank's
    return BlockRecord(
        name=block.name,
        layer=type(block.uses[0].module).__name__,
        params=block.param_names,
        groups=spec.groups,
        shared_input=spec.shared_input,
        in_dim=spec.in_dim,
        out_dim=spec.out_dim,
        structure=spec.structure,
        factor_dims=block.inverse.factor_dims(spec),
        weight_sharing=spec.weight_sharing,
        inverse=repr(block.inverse),
        state_bytes=sum(t.nbytes for t in _tensors(block.state.held()) if not t.is_meta or on_meta),
        owners=owners,
        notes=block.notes,
        measured=block.clock.folds > 0 if block.clock.step > block.began else None,
    )


def _tensors(nested: Mapping[str, Any]) -> Iterator[Tensor]:
    for value in nested.values():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)


def _describe_shape(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "uninitialised"
    return "×".join(map(str, shape)) or "scalar"


def _describe_factor(groups: int, dim: int, dims: Sequence[int], kept: Kept) -> str:
    """Write `2·3×3` for two groups, or blocks of a factor that is cut, and `2×2 ⊗ 3×3` for a product of matrices."""
    if kept is Structure.IDENTITY:
        return "identity"
    if isinstance(kept, BlockDiagonal):
        groups, dims = kept.blocks(dim), (kept.width(dim),)
    if isinstance(kept, Sketched):
        size = f"{dim}×{dim} from {kept.columns} directions"
        return f"{groups}·{size}" if groups > 1 else size
    size = f"diag {dim}" if kept is Structure.DIAGONAL else " ⊗ ".join(f"{each}×{each}" for each in dims)
    return f"{groups}·{size}" if groups > 1 else size


def _percent(part: int, whole: int) -> str:
    """Write a share so that only all is 100% and only nothing is 0%."""
    share = 100 * part / max(1, whole)
    if part in (0, whole):
        return f"{share:.0f}%"
    return f"{min(max(share, 0.1), 99.9):.1f}%"
