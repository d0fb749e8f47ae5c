"""DistributedDataParallel, whose gradients are sent to owners alone."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.distributed.communication.launcher import begin, has_reduce_scatter
from kfac_optim.distributed.communication.loans import Loan
from kfac_optim.distributed.communication.message import Message
from kfac_optim.distributed.communication.rows import OwnedRow
from kfac_optim.distributed.communication.segments import filled_up
from kfac_optim.distributed.gradients.continuation import continued, continues_at_once
from kfac_optim.distributed.gradients.deliveries import Segment
from kfac_optim.distributed.gradients.sharded_gradients import ShardedGradients
from kfac_optim.utils.autograd import in_backward


class OwnersHook:
    """Brings the mean of a gradient to its owner alone, as a communication hook (`register_comm_hook`).

    An all-to-all moves half of what the all-reduce does. Where there is no plan yet, it is that all-reduce.

    A bucket holds accumulated gradients, and what their owners have already is not sent again, see [Note: several
    backwards]. By segments a bucket takes two messages, see [Note: the second message].

    A wrapper keeps its hook for good. So an optimizer that is done with the wrapper releases the hook, which is the
    all-reduce again from then on, and the next optimizer takes it over.

    Args:
        wrapper: the wrapper whose gradients are sent.

    Attributes:
        flow: knows which rank owns each gradient; None brings the mean to all.
        observe: is called with every message, for traces.
        user: refers to what uses the hook; None once it is released.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.flow: ShardedGradients | None = None
        self.observe: Callable[[Message], None] | None = None
        self.user: weakref.ref[object] | None = None
        self._group = wrapper.process_group
        self._wrapper = weakref.ref(wrapper)
        self._shadowed: list[tuple[Tensor, Tensor]] = []
        others = [getattr(hook, "__name__", repr(hook)) for hook, _ in wrapper._comm_hooks] or ["unknown"]
        try:
            wrapper.register_comm_hook(None, self._reduce)
        except RuntimeError as error:
            remedy = (
                "Leave it out: to send less, pass DistributedConfig(strategy=Sharded(), gradient_dtype=torch.bfloat16);"
                " or use Replicated(), under which hooks of your own work."
            )
            if wrapper.mixed_precision is not None:
                remedy = "It is that of mixed_precision=: leave this out, and run the forward under torch.autocast."
            raise RuntimeError(
                "kfac_optim: Sharded() brings gradients to their owners by a communication hook of "
                f"DistributedDataParallel, which has one already ({', '.join(others)}), and takes only one. {remedy} "
                f"({error})"
            ) from error

    def __reduce__(self) -> tuple[type["_NoHook"], tuple[()]]:
        """Copy or pickle the hook as one that does nothing: a copied wrapper is none of this optimizer's."""
        return _NoHook, ()

    @staticmethod
    def of(wrapper: DistributedDataParallel) -> "OwnersHook | None":
        """Return the hook that a wrapper has already."""
        # Private, but a wrapper takes one hook only, and does not give it back.
        hooks = [getattr(hook, "__self__", None) for hook, _ in wrapper._comm_hooks]
        return next((hook for hook in hooks if isinstance(hook, OwnersHook)), None)

    @property
    def is_in_use(self) -> bool:
        """Return whether an optimizer that still exists has not released the hook."""
        if self.user is not None and self.user() is not None:
            gc.collect()  # so that all ranks agree on what is gone
        return self.user is not None and self.user() is not None

    def release(self) -> None:
        """Bring the mean to all from now on."""
        self.flow = self.user = self.observe = None

    def _shadows(self) -> bool:
        """Return whether this rank has run out of examples, and buckets hold zeros; see `joining`."""
        wrapper = self._wrapper()
        return wrapper is not None and wrapper._join_config.enable and not in_backward()

    def take_shadowed(self) -> None:
        """Make what came while this rank shadowed the others' backward its gradients."""
        for param, mean in self._shadowed:
            param.grad = _as_gradient(param, mean).clone()
        self._shadowed.clear()

    # torch refuses other annotations than its own.
    def _reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        deliveries = None if self.flow is None else self.flow.deliveries
        if deliveries is not None and bucket.index() == 0:
            deliveries.begin()
        done = self._send(bucket)
        if deliveries is not None and bucket.is_last():
            deliveries.close()
        return done

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        flow, shadows = self.flow, self._shadows()
        # A bucket of a sparse gradient has no pieces, and goes to all.
        pieces = [_Piece(*each, None) for each in zip(bucket.parameters(), bucket.gradients(), strict=False)]
        if flow is not None:
            if not shadows:  # otherwise the bucket has zeros
                pieces = [each.without_mean(flow) for each in pieces]
            flow.kept.keep(bucket.parameters())
        if flow is None or any(param not in flow.owner_of for param in bucket.parameters()):
            return self._to_all(None, bucket, pieces, shadows=shadows)  # owners are not known yet, or some not ours
        row = flow.row(bucket.index(), bucket.parameters(), bucket.buffer().dtype)
        if row.to_all:
            return self._to_all(row, bucket, pieces, shadows=shadows)
        rank = dist.get_rank(self._group)
        own = [each for each in pieces if flow.owner_of[each.param] == rank]
        if shadows:
            self._shadowed += [(each.param, each.piece) for each in own]
        return self._by_segments(row, bucket, own, flow) if row.segmented else self._directly(row, bucket, own, flow)

    def _to_all(
        self,
        row: OwnedRow | None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        pieces: Sequence["_Piece"],
        *,
        shadows: bool,
    ) -> torch.futures.Future[torch.Tensor]:
        """Bring the mean to all ranks, owners too, as DDP does; `row` is None where no plan knows of it."""
        ranks = dist.get_world_size(self._group)
        for each in pieces:
            each.add_mean(ranks)
        if shadows:
            self._shadowed += [(each.param, each.piece) for each in pieces]
        mean: Tensor = bucket.buffer().div_(ranks)
        work = dist.all_reduce(mean, group=self._group, async_op=True)
        if row is not None and self.observe is not None:
            (message,) = row.messages(dist.get_rank(self._group))
            self.observe(message)

        def take(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            return mean

        done: torch.futures.Future[Tensor] = continued(work.get_future(), mean.device, take)
        return done

    def _directly(
        self,
        row: OwnedRow,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        own: Sequence["_Piece"],
        flow: ShardedGradients,
    ) -> torch.futures.Future[torch.Tensor]:
        buffer, rank, ranks = bucket.buffer(), dist.get_rank(self._group), row.world_size
        pieces: list[list[Tensor]] = [[] for _ in range(ranks)]
        for param, piece in zip(bucket.parameters(), bucket.gradients(), strict=True):
            pieces[flow.owner_of[param]].append(piece)
        sent = torch.cat([piece.flatten() for owned in pieces for piece in owned]).to(row.payload)
        (message,) = row.messages(rank)
        received = sent.new_empty(sum(message.from_))
        loan = Loan()
        work = begin(self._group, message, loan.lend(sent), loan.lend(received), self.observe)

        def add_up(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            loan.end()
            _take(own, _mean(received, ranks))
            whole: Tensor = buffer
            return whole

        done: torch.futures.Future[torch.Tensor] = continued(work.get_future(), buffer.device, add_up)
        return done

    def _by_segments(
        self,
        row: OwnedRow,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        own: Sequence["_Piece"],
        flow: ShardedGradients,
    ) -> torch.futures.Future[torch.Tensor]:
        """Launch the first of two messages, see [Note: the second message]."""
        deliveries = flow.deliveries
        assert deliveries is not None, "what goes by segments has them"
        deliveries.next(row)
        segment = Segment(row, bucket.buffer(), lambda mean: _take(own, mean))
        deliveries.add(segment, self._scatter(row, bucket.buffer(), segment))
        return segment.done

    def _scatter(self, row: OwnedRow, buffer: Tensor, segment: Segment) -> torch.futures.Future[Any]:
        """Launch the reduce-scatter; what it gives is the mean of this rank's segment."""
        message, ranks = row.messages(dist.get_rank(self._group))[0], row.world_size
        if not has_reduce_scatter(buffer.device) or row.payload != buffer.dtype:  # which would sum in that dtype
            sent = buffer.to(row.payload)
            parts = [sent.new_empty(sum(message.from_))]
            loan = Loan()
            work = begin(self._group, message, loan.lend(sent), loan.lend(parts[0]), self.observe)

            def add_up(future: torch.futures.Future[Any]) -> Tensor:
                future.wait()
                loan.end()
                segment.mean = _mean(parts.pop(), ranks).to(row.payload)
                return _awaited(segment.mean)

            summed: torch.futures.Future[Any] = continued(work.get_future(), buffer.device, add_up)
            return summed
        return self._reduce_scatter(row, buffer, segment)  # pragma: cuda

    def _reduce_scatter(  # pragma: cuda
        self, row: OwnedRow, buffer: Tensor, segment: Segment
    ) -> torch.futures.Future[Any]:
        """Launch the reduce-scatter as one collective, which gloo has not."""
        rank, ranks, segments = dist.get_rank(self._group), row.world_size, row.segments
        message, length = row.messages(rank)[0], segments.lengths[rank]
        whole = filled_up(buffer, segments.length * ranks)
        total = whole.new_empty(segments.length)
        scattering = dist.reduce_scatter_single(total, whole, group=self._group, async_op=True)
        assert scattering is not None
        if self.observe is not None:
            self.observe(message)

        def divide(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            segment.mean = total[:length] / ranks
            return _awaited(segment.mean)

        divided: torch.futures.Future[Any] = continued(scattering.get_future(), buffer.device, divide)
        return divided


class _Piece(NamedTuple):
    """Holds the piece of a bucket that is the gradient of a parameter, and the mean that its owner has already."""

    param: Any  # a parameter, though torch calls those of a bucket tensors
    piece: Tensor
    mean: Tensor | None

    def without_mean(self, flow: ShardedGradients) -> "_Piece":
        """Leave in the piece what is to be averaged."""
        return self._replace(mean=flow.kept.take_off(self.param, _as_gradient(self.param, self.piece)))

    def add_mean(self, times: int = 1) -> None:
        """Add the mean that the owner has already."""
        if self.mean is not None:
            _as_gradient(self.param, self.piece).add_(self.mean, alpha=times)
            if continues_at_once(self.mean.device):  # it was made in the stream of the backward
                self.mean.record_stream(torch.accelerator.current_stream(self.mean.device))  # pragma: cuda


def _take(own: Sequence[_Piece], mean: Tensor) -> None:
    """Write the mean of what was sent of this rank's gradients, one after the other, into their pieces."""
    means = torch.split(mean, [each.piece.numel() for each in own])
    for each, part in zip(own, means, strict=True):
        each.piece.copy_(part.view(each.piece.shape))
        each.add_mean()


def _as_gradient(param: Tensor, piece: Tensor) -> Tensor:
    """Return a piece of a bucket as a gradient: it lies there as the parameter does in memory."""
    is_dense = param.is_contiguous() or torch.empty_like(param, device="meta").stride() == param.stride()
    if not is_dense:  # DDP lays it out plainly
        return piece
    return piece.reshape(-1).as_strided(param.shape, param.stride())


def _awaited(made: Tensor) -> Tensor:
    """Return what a future ends with, so that whoever waits for it on an accelerator waits for the kernels behind it.

    A future waits for the streams of those devices alone on which its result has tensors. This one has no memory.
    """
    return made.new_empty(0)


class _NoHook:
    """Stands for an `OwnersHook` in a copied wrapper, and is never called."""

    def _reduce(self, state: object, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        pass


def _mean(received: Tensor, ranks: int) -> Tensor:
    """Return the mean over ranks of equal parts, `[elements / ranks]`, in float32 at least."""
    wide = torch.promote_types(received.dtype, torch.float32)
    return received.view(ranks, -1).sum(0, dtype=wide).div_(ranks)
