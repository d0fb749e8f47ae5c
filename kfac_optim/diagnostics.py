"""What the optimizer says of itself: `summary()`, `metrics()` and `factors()`, as functions over its blocks."""

import math
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
        sizes = {p: math.prod(p.shape) for p in self.parameters if p.shape is not None}
        total, covered = sum(sizes.values()), sum(sizes[p] for p in sizes if p.block is not None)
        state = sum(block.state_bytes for block in self.blocks)
        blocks = f"{len(self.blocks)} block{' covers' if len(self.blocks) == 1 else 's cover'}"
        footer = f"{blocks} {covered:,} of {total:,} parameters; their state takes {describe_bytes(state)}."
        if any(block.measured is not None for block in self.blocks):
            names = {block.name for block in self.blocks if block.measured}
            measured = sum(sizes[p] for p in sizes if p.block in names)
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


def metrics(
    blocks: Sequence[KFACBlock],
    params: Sequence[nn.Parameter],
    record: StepRecord | None,
    *,
    dropped_calls: int,
    skipped_steps: int,
    rejected_steps: int,
    reduction_ratio: float | None,
    counters: Callable[[KFACBlock], Mapping[str, float | Tensor]],
) -> dict[str, float]:
    """Return plain numbers about the last step, for any logger. Synchronises; see `KFACOptimizer.metrics`."""
    numbers: dict[str, float] = {
        "blocks": float(len(blocks)),
        "blocks_without_statistics": float(sum(block.clock.folds == 0 for block in blocks)),
        "dropped_calls": float(dropped_calls),
        "skipped_steps": float(skipped_steps),
        "rejected_steps": float(rejected_steps),
        **_shares(blocks, params),
    }
    if reduction_ratio is not None:
        numbers["reduction_ratio"] = reduction_ratio
    if record is not None:
        numbers["unpreconditioned_blocks"] = float(len(record.unpreconditioned))
    if record is not None and record.measures:
        measures = _fetched(record.measures)
        if "inner" in measures:
            inner, direction, gradient = (measures.pop(n) for n in ("inner", "direction_square", "gradient_square"))
            norms = math.sqrt(direction * gradient)
            numbers |= {
                "cosine": inner / norms if norms > 0 else math.nan,
                "gradient_norm": math.sqrt(gradient),
                "direction_norm": measures.get("trust_region_scale", 1.0) * math.sqrt(direction),
            }
        numbers |= measures
    known = [block for block in blocks if block.clock.folds > 0]
    if known:
        numbers["damping"] = max(float(block.group["damping"]) * block.clock.loss_unit for block in known)
        # The clocks already stand at the next step.
        clocks = [block.clock for block in known]
        numbers["factor_age"] = float(max(clock.step - 1 - clock.folded_at for clock in clocks))
        numbers["inverse_age"] = float(max(clock.step - 1 - clock.refreshed_at for clock in clocks))
        numbers |= _merged_counters(map(counters, known))
    return numbers


def factors(blocks: Sequence[KFACBlock]) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return `{layer name: (A, G)}`, copies; see `KFACOptimizer.factors`."""
    result: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for block in blocks:
        if block.clock.folds == 0:
            continue
        a, g = (None if factor is None else factor.clone() for factor in block.state.factors())
        for side, (factor, dim) in enumerate(((a, block.spec.in_dim), (g, block.spec.out_dim))):
            if factor is not None and block.spec.blocks(side) > 1:
                clear_padding(factor, dim)
        result[block.name] = (a, g)
    return result


def _fetched(measures: Mapping[str, Scalar]) -> dict[str, float]:
    """Return measures as Python numbers; the host waits once for those that the device has."""
    on_device = {name: value.double() for name, value in measures.items() if isinstance(value, Tensor)}
    found = dict(zip(on_device, torch.stack([*on_device.values()]).tolist(), strict=True)) if on_device else {}
    return {name: found[name] if isinstance(value, Tensor) else value for name, value in measures.items()}


def _shares(blocks: Sequence[KFACBlock], params: Iterable[nn.Parameter]) -> dict[str, float]:
    """Tell which shares of all parameters are covered, measured and left out."""
    total = sum(param.numel() for param in params if not is_lazy(param))
    covered = sum(param.numel() for block in blocks for param in block.params)
    measured = sum(param.numel() for block in blocks if block.clock.folds > 0 for param in block.params)
    return {
        "covered_parameters": covered / max(1, total),
        "measured_parameters": measured / max(1, total),
        "left_out_parameters": (total - covered) / max(1, total),
    }


def _merged_counters(counters: Iterable[Mapping[str, float | Tensor]]) -> dict[str, float]:
    """Add counts up over blocks, and report the worst of condition numbers and cutoffs."""
    merged: dict[str, float] = {}
    for of_block in counters:
        for key, value in of_block.items():
            number = float(value)
            if key.startswith(("condition", "cutoff")):
                merged[key] = max(merged.get(key, 0.0), number)
            else:
                merged[key] = merged.get(key, 0.0) + number
    return merged


def _record(block: KFACBlock, owners: tuple[int, ...]) -> BlockRecord:
    spec = block.spec
    on_meta = block.params[0].is_meta  # else these are another rank's
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
        measured=block.clock.folds > 0 if block.clock.step > 0 else None,
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
