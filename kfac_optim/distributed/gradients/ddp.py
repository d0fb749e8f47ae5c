"""DistributedDataParallel: is this backward the last before a step, and its gradients, sent to owners alone."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.distributed.communication.launches import Cause, Launch
from kfac_optim.distributed.gradients.flow import ShardedGradients
from kfac_optim.utils.autograd import on_gradient
from kfac_optim.utils.hooks import PicklableHook, call_if_there


class OwnersHook:
    """Brings the mean of a gradient to its owner alone, as a communication hook (`register_comm_hook`).

    An all-to-all moves half of what the all-reduce does. Where there is no plan yet, it is that all-reduce.

    [Note: several backwards] Where a step has several backwards that reduce, a bucket holds what the gradients have
    come to: the mean of the backwards before on the owner, and their local sums on the others. So the owner keeps what
    makes its mean local again, until the gradient is dropped: until it is gone, or was written to since the step, which
    can only have made it zeros. That is looked at before a forward, and again when the next gradient comes to be added
    to it. (Gradients that are views of DDP's buckets are written to together: of those only the first look can tell.)

    Args:
        wrapper: whose gradients.
        observe: is called with every all-to-all, for traces.
    """

    def __init__(self, wrapper: DistributedDataParallel, observe: Callable[[Launch], None] | None = None) -> None:
        self.flow: ShardedGradients | None = None
        self._observe = observe
        self._group = wrapper.process_group
        self._to_mean: dict[Tensor, Tensor] = {}  # of each owned gradient, the mean without the local one
        self._stepped: dict[Tensor, int] = {}  # of each of them, the version that the last step took
        self._watched: set[int] = set()
        self._views = wrapper.gradient_as_bucket_view
        look = weakref.WeakMethod(self._before_forward)
        wrapper.register_forward_pre_hook(PicklableHook(lambda *_: call_if_there(look)))
        try:
            wrapper.register_comm_hook(None, self._reduce)
        except RuntimeError as error:
            raise RuntimeError(
                "kfac_optim: Sharded() brings gradients to their owners by a communication hook of "
                "DistributedDataParallel, which has one already, and takes only one. Build the optimizer before or "
                f"without it, or use Replicated(). ({error})"
            ) from error

    def __reduce__(self) -> tuple[type["_NoHook"], tuple[()]]:
        """Copy or pickle the hook as one that does nothing: a copied wrapper is none of this optimizer's."""
        return _NoHook, ()

    def forget(self) -> None:
        """Note that gradients were dropped, or are the mean on all ranks."""
        self._to_mean.clear()
        self._stepped.clear()

    def stepped(self) -> None:
        """Note that a step was taken, or skipped, by the gradients as they are."""
        self._stepped = {param: param.grad._version for param in self._to_mean if param.grad is not None}

    def _before_forward(self) -> None:
        for param in list(self._to_mean):
            if param.grad is None or self._was_written_to(param, self._stepped.get(param)):
                self._drop(param)

    def _before_accumulation(self, param: Tensor) -> None:
        version = self._stepped.pop(param, None)
        if self._views:  # from now on their versions say nothing
            self._stepped.clear()
        if param.grad is None or (not self._views and self._was_written_to(param, version)):
            self._drop(param)

    def _was_written_to(self, param: Tensor, version: int | None) -> bool:
        return version is not None and param.grad is not None and version != param.grad._version

    def _drop(self, param: Tensor) -> None:
        self._to_mean.pop(param, None)
        self._stepped.pop(param, None)

    def _watch(self, param: Tensor) -> None:
        """Look at its gradient whenever another is about to be added to it."""
        if param.requires_grad and id(param) not in self._watched:
            self._watched.add(id(param))  # DDP's parameters stay
            look, watched = weakref.WeakMethod(self._before_accumulation), weakref.ref(param)
            on_gradient(param, lambda _: call_if_there(look, watched()))

    # torch refuses other annotations than its own.
    def _reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        buffer, ranks = bucket.buffer(), dist.get_world_size(self._group)
        flow = self.flow
        if flow is not None:
            flow.bring(bucket.parameters())
        if flow is None or any(param not in flow.owner_of for param in bucket.parameters()):
            # Who owns them is not known yet, or some are not ours: then all have the mean, owners too.
            for param in bucket.parameters():
                self._drop(param)
            work = dist.all_reduce(buffer.div_(ranks), group=self._group, async_op=True)
            mean: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
            return mean
        rank = dist.get_rank(self._group)
        pieces = _by_owner(bucket.parameters(), bucket.gradients(), flow.owner_of, ranks)
        sizes = [sum(piece.numel() for piece in owned) for owned in pieces]
        own, share = pieces[rank], sizes[rank]
        params = [param for param in bucket.parameters() if flow.owner_of[param] == rank]
        for param, piece in zip(params, own, strict=True):
            self._watch(param)
            self._stepped.pop(param, None)
            if param.grad is None:  # it got none here, so that nobody has looked
                self._drop(param)
            if param in self._to_mean:
                piece.sub_(self._to_mean[param])
        sent = torch.cat([piece.flatten() for owned in pieces for piece in owned])
        received = sent.new_empty(ranks * share)
        work = dist.all_to_all_single(received, sent, [share] * ranks, sizes, group=self._group, async_op=True)
        assert work is not None
        if self._observe is not None:
            others = (sum(sizes) - share) * sent.itemsize
            self._observe(Launch(f"gradients of DDP {bucket.index()}", Cause.COMPLETE, others))

        def add_up(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            wide = torch.promote_types(received.dtype, torch.float32)
            total = received.view(ranks, share).sum(0, dtype=wide) / ranks
            means = torch.split(total, [piece.numel() for piece in own])
            for param, piece, mean in zip(params, own, means, strict=True):
                self._to_mean[param] = mean.view(piece.shape) - piece
                piece.copy_(mean.view(piece.shape))
            whole: Tensor = buffer
            return whole

        done: torch.futures.Future[torch.Tensor] = work.get_future().then(add_up)
        return done


class _NoHook:
    """Stands for an `OwnersHook` in a copied wrapper, and is never called."""

    def _reduce(self, state: object, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        pass


class Wrappers:
    """Knows the wrappers that forwards of one model run in; a later one may replace the first.

    Args:
        to_owners: whether gradients go to owners alone.
        observe: as of `OwnersHook`.
    """

    def __init__(self, *, to_owners: bool, observe: Callable[[Launch], None] | None = None) -> None:
        self._to_owners = to_owners
        self._observe = observe
        self._hooks: weakref.WeakKeyDictionary[DistributedDataParallel, OwnersHook | None] = weakref.WeakKeyDictionary()
        self._latest: weakref.ref[DistributedDataParallel] | None = None
        self._stranger: weakref.ref[DistributedDataParallel] | None = None
        self._flow: ShardedGradients | None = None

    @property
    def latest(self) -> DistributedDataParallel | None:
        """Return the wrapper whose forward was the last."""
        return None if self._latest is None else self._latest()

    def find(self, model: nn.Module | None) -> DistributedDataParallel | None:
        """Return the wrapper among a model and its modules that is not known yet; None if there is none."""
        modules = () if model is None else model.modules()
        found = next((module for module in modules if isinstance(module, DistributedDataParallel)), None)
        return None if found in self._hooks else found

    def begin_forward(self, model: nn.Module) -> DistributedDataParallel | None:
        """Take notice of the wrapper in which a forward of `model` is beginning; it, where it is not known yet."""
        # Private, but torch asks it for the same reason, as it compiles what a wrapper holds.
        under_way = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
        if under_way is None or under_way is self.latest or _is(self._stranger, under_way):
            return None
        if under_way in self._hooks:
            self._latest = weakref.ref(under_way)
            return None
        if set(under_way.parameters()).isdisjoint(model.parameters()):
            self._stranger = weakref.ref(under_way)  # the model is called by another
            return None
        found: DistributedDataParallel = under_way
        return found

    def add(self, wrapper: DistributedDataParallel, *, may_have_a_hook: bool) -> None:
        """Listen to a wrapper that is not known yet.

        Args:
            wrapper: to listen to.
            may_have_a_hook: whether one that has another communication hook is left with that: gradients are then the
                mean on all ranks, before they go to owners.
        """
        hook = None
        if self._to_owners and not (may_have_a_hook and wrapper._comm_hooks):
            hook = OwnersHook(wrapper, self._observe)
            hook.flow = self._flow
        self._hooks[wrapper] = hook
        self._latest = weakref.ref(wrapper)

    def synchronise(self) -> bool:
        """Return whether the backward that is running reduces gradients; under `no_sync` it does not."""
        wrapper = self.latest
        return wrapper is not None and bool(wrapper.require_backward_grad_sync)

    def use(self, flow: ShardedGradients | None) -> None:
        """Bring gradients to other owners from now on; None brings them to all ranks."""
        self._flow = flow
        for hook in self._of_all():
            hook.flow = flow
            hook.forget()

    def forget(self) -> None:
        """Note that gradients were dropped, or are the mean on all ranks."""
        for hook in self._of_all():
            hook.forget()

    def stepped(self) -> None:
        """Note that a step was taken, or skipped, by the gradients as they are."""
        for hook in self._of_all():
            hook.stepped()

    def refuse_join(self) -> None:
        """Raise where ranks that run out of examples are to go on without a step.

        Raises:
            RuntimeError: so it is.
        """
        wrapper = self.latest
        config = None if wrapper is None else wrapper._join_config
        if config is not None and config.enable and not config.throw_on_early_termination:
            raise RuntimeError(
                "kfac_optim: within join() of DistributedDataParallel ranks that have run out of examples take no "
                "step, and the steps of the others would wait for them. Give all ranks the same number of batches, "
                "smaller or empty ones where examples run out; or end the epoch on all ranks with the first that has "
                "run out, by join(throw_on_early_termination=True). (torch 2.13 keeps the state of a join() that was "
                "left: `with model.join(enable=False): pass` ends it.)"
            )

    def _of_all(self) -> list[OwnersHook]:
        return [hook for hook in self._hooks.values() if hook is not None]


def _is(reference: weakref.ref[Any] | None, found: object) -> bool:
    return reference is not None and reference() is found


def _by_owner(
    params: Sequence[Tensor], grads: Sequence[Tensor], owner_of: Mapping[Any, int], ranks: int
) -> list[list[Tensor]]:
    """Sort the gradients in a bucket, views of its buffer, by their owners."""
    pieces: list[list[Tensor]] = [[] for _ in range(ranks)]
    for param, grad in zip(params, grads, strict=True):
        pieces[owner_of[param]].append(grad)
    return pieces
