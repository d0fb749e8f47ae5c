"""Parameters that FSDP2 (`torch.distributed.fsdp.fully_shard`) keeps in shards, and what stands for them in use.

The optimizer's parameter is the sharded one, a DTensor. While its FSDP module has it gathered, modules hold another
parameter in its place, the same one each time: forwards multiply by that, and backwards accumulate into it. Some
modules stay gathered after a forward (`reshard_after_forward=False`, and the root unless told otherwise), so that an
evaluation leaves stand-ins where parameters are looked for.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn


class ShardedParameter:
    """Knows one parameter that is kept in shards.

    Attributes:
        param: the sharded parameter.
    """

    __slots__ = ("_group", "_held", "param")

    def __init__(self, held: Any, group: Any) -> None:
        self._held, self._group = held, group
        self.param: nn.Parameter = held.sharded_param

    @property
    def ranks(self) -> int:
        """Return over how many ranks gradients of the parameter are added up."""
        mesh = self._group.mesh_info  # under HSDP it has both dimensions
        return int(getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1))

    @property
    def divisor(self) -> float:
        """Return what that sum is divided by: the number of ranks, unless `set_gradient_divide_factor` was called."""
        factor = self._group.gradient_divide_factor
        return float(self.ranks if factor is None else factor)

    @property
    def was_in_parts(self) -> bool:
        """Return whether tensor parallelism had cut or copied the parameter before."""
        found: bool = self._held.is_dtensor  # private; placements do not tell, as those of HSDP may be the same
        return found

    @property
    def is_offloaded(self) -> bool:
        """Return whether the shard is kept on the host, and what is gathered elsewhere."""
        return bool(self._held.offload_to_cpu) and self._held.device.type != "cpu"

    @property
    def gathered(self) -> nn.Parameter | None:
        """Return what modules hold while the parameter is gathered; None before it ever was."""
        # Private, but asking for it in public (`FSDPModule.unshard`) gathers it.
        gathered: nn.Parameter | None = getattr(self._held, "_unsharded_param", None)
        return gathered


class Shards:
    """Knows all parameters of a model that are kept in shards.

    Args:
        model: the model, in which modules may be wrapped by `fully_shard`; None has no parameters.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._groups = [] if model is None else list(_groups(model))
        found = [ShardedParameter(held, group) for group in self._groups for held in group.fsdp_params]
        self._of = {sharded.param: sharded for sharded in found}
        self._never_gathered = found
        self._stand_ins: dict[nn.Parameter, ShardedParameter] = {}

    def of(self, param: nn.Parameter) -> ShardedParameter | None:
        """Return the sharded parameter that `param` is, or stands for; None if it is not kept in shards."""
        return self._of.get(param) or self._known_stand_ins().get(param)

    def known(self, tensor: nn.Parameter) -> nn.Parameter:
        """Return the parameter as an optimizer knows it: the sharded one, if `tensor` stands for that."""
        sharded = self._known_stand_ins().get(tensor)
        return tensor if sharded is None else sharded.param

    def in_use(self, param: nn.Parameter) -> nn.Parameter:
        """Return what forwards multiply by and backwards accumulate into: `param`, or what stands for it now."""
        sharded = self._of.get(param)
        gathered = None if sharded is None else sharded.gathered
        return param if gathered is None else gathered

    def is_stand_in(self, param: Tensor) -> bool:
        """Return whether modules hold the tensor as a stand-in for a sharded parameter."""
        return param in self._known_stand_ins()

    def divide_by_ranks(self) -> bool:
        """Return whether every gradient becomes the mean over ranks, as FSDP2 has it unless told otherwise."""
        return all(group.gradient_divide_factor is None for group in self._groups)

    def reshard(self) -> None:
        """Let go of gathered parameters, which do not follow when the shards are written to."""
        for group in self._groups:
            if group.is_unsharded:
                group.reshard()

    @contextmanager
    def passing_within_backward(self) -> Iterator[None]:
        """Return a context for a backward pass within another that has more to do.

        What is gathered as it begins stays so, since the other needs it; and the pass, which accumulates no gradients,
        does not bring those of earlier backwards to other processes.
        """
        # Private, but the public setters do not tell what was set before.
        before = [(group, group.reshard_after_backward, group.reduce_grads) for group in self._groups]
        for group in self._groups:
            group.reshard_after_backward &= not group.is_unsharded
            group.reduce_grads = False
        try:
            yield
        finally:
            for group, reshards, reduces in before:
                group.reshard_after_backward, group.reduce_grads = reshards, reduces

    def _known_stand_ins(self) -> dict[nn.Parameter, ShardedParameter]:
        if self._never_gathered:
            waiting, self._never_gathered = self._never_gathered, []
            for sharded in waiting:
                if (gathered := sharded.gathered) is None:
                    self._never_gathered.append(sharded)
                else:
                    self._stand_ins[gathered] = sharded
        return self._stand_ins


def _groups(model: nn.Module) -> Iterator[Any]:
    """Return FSDP2's own records of the parameters that it gathers together."""
    for module in model.modules():
        if (state_of := getattr(module, "_get_fsdp_state", None)) is not None:
            yield from state_of()._fsdp_param_groups


def is_sharded(tensor: Tensor) -> bool:
    """Return whether processes hold parts of the tensor: it is a DTensor."""
    return _holds_parts(type(tensor))


@cache
def _holds_parts(kind: type[Tensor]) -> bool:
    # The import of DTensor takes half as long as that of torch, and a tensor answers more slowly than its type.
    return hasattr(kind, "to_local")


def is_part(param: nn.Parameter) -> bool:
    """Return whether processes hold parts of the parameter, as a DTensor or without a sign of it in its type."""
    # Private, but DistributedDataParallel with a `device_mesh` replaces DTensors by plain tensors, so marked.
    return is_sharded(param) or "_st_info" in vars(param)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a DTensor, which shares its memory; a plain tensor is returned as it is."""
    part: Tensor = tensor.to_local() if _holds_parts(type(tensor)) else tensor  # type: ignore[attr-defined]
    return part


def local_as(tensor: Tensor, param: Tensor) -> Tensor:
    """Return this process's part of a DTensor, laid out as `param` is; a collective where it lies otherwise."""
    if is_sharded(tensor) and tensor.placements != param.placements:  # type: ignore[attr-defined]
        tensor = tensor.redistribute(placements=param.placements)  # type: ignore[attr-defined]
    return local(tensor)


def like(param: Tensor, part: Tensor) -> Tensor:
    """Lay this process's part of a tensor out as `param` is; this communicates nothing.

    Args:
        param: the layout.
        part: a tensor of as many elements as `local(param)`, in any shape.
    """
    part = part.reshape(local(param).shape)
    if not is_sharded(param):
        return part
    found: Tensor = type(param).from_local(  # type: ignore[attr-defined]
        part,
        param.device_mesh,  # type: ignore[attr-defined]
        param.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return all of a DTensor, which is a collective; a plain tensor is returned as it is."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def refuse_flat(params: Iterable[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
    """Raise where FSDP1 keeps parameters as pieces of a vector, in which no process sees a matrix.

    Args:
        params: the parameters of the optimizer.
        names: the names of parameters, as far as they are known.

    Raises:
        NotImplementedError: there are such parameters.
    """
    for param in params:
        # Private, but the vector and, with `use_orig_params=True`, each parameter that is a view of it carry the mark.
        if hasattr(param, "_fsdp_flattened"):
            name = f"{names[param]!r}" if param in names else f"a parameter, {list(param.shape)},"
            raise NotImplementedError(
                f"kfac_optim: {name} is kept by FullyShardedDataParallel (FSDP1) as a piece of a vector, cut anywhere, "
                "so that no process can tell the matrix that its gradient belongs to. Shard the model by FSDP2 "
                "instead, torch.distributed.fsdp.fully_shard(module) instead of the wrapper, before the optimizer "
                "is built; or wrap it by DistributedDataParallel."
            )


def any_sharded(params: object) -> bool:
    """Return whether any parameter is sharded, as far as that can be seen without using up iterators."""
    if isinstance(params, nn.Module):
        params = list(params.parameters())
    if isinstance(params, dict):
        params = params.get("params")
    if isinstance(params, list | tuple):
        return any(map(any_sharded, params))
    return isinstance(params, Tensor) and is_sharded(params)
