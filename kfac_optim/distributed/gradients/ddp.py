"""DistributedDataParallel, whose gradients are sent to owners alone."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

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
from kfac_optim.utils.autograd import after_backward, in_backward, on_gradient, reaches, running_backward
from kfac_optim.utils.hooks import PicklableHook, call_if_there, weakly


class OwnersHook:
    """Brings the mean of a gradient to its owner alone, as a communication hook (`register_comm_hook`).

    An all-to-all moves half of what the all-reduce does. Where there is no plan yet, it is that all-reduce.

    [Note: several backwards] Where several backwards of a step reduce, a bucket holds accumulated gradients: on the
    owner the mean of the earlier backwards, on other ranks their local sums. So the owner keeps what turns its mean
    into the local sum again, until the gradient is dropped. It was dropped if it is None, or was written to since the
    step, or is zero and was written to since the last backward. The hook looks before a forward, and again before a
    backward adds anything. (Gradients that are views of DDP's buckets are all written to together.)
    What a backward without reduction adds after one with reduction is averaged by nobody, unless another one reduces
    later: so every such addition is noted (`ShardedGradients.note_added`).

    By segments a bucket takes two messages, see [Note: the second message].

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
        self._to_mean: dict[Tensor, Tensor] = {}  # of each owned gradient, the mean without the local one
        self._left: dict[Tensor, int] = {}  # of each of them, the version that the last backward or step has left
        self._is_step_over = False  # whether it was a step
        self._backward = -1  # the last one that has added to gradients, by its number
        self._shadowed: list[tuple[Tensor, Tensor]] = []
        self._watched: set[int] = set()
        self._backward_stream: torch.Stream | None = None
        look = weakref.WeakMethod(self._before_forward)
        wrapper.register_forward_pre_hook(PicklableHook(lambda *_: call_if_there(look)))
        others = [getattr(hook, "__name__", repr(hook)) for hook, _ in wrapper._comm_hooks] or ["unknown"]
        try:
            wrapper.register_comm_hook(None, self._reduce)
        except RuntimeError as error:
            raise RuntimeError(
                "kfac_optim: Sharded() brings gradients to their owners by a communication hook of "
                f"DistributedDataParallel, which has one already ({', '.join(others)}), and takes only one. Leave it "
                "out: to send less, pass DistributedConfig(strategy=Sharded(), gradient_dtype=torch.bfloat16); or use "
                f"Replicated(), under which hooks of your own work. ({error})"
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
        self.forget()

    def forget(self) -> None:
        """Note that gradients were dropped, or are the mean on all ranks."""
        self._to_mean.clear()
        self._left.clear()

    def stepped(self) -> None:
        """Note that a step was taken, or skipped, by the gradients as they are."""
        self._note_versions(is_step_over=True)

    def _note_versions(self, *, is_step_over: bool = False) -> None:
        self._left = {param: param.grad._version for param in self._to_mean if param.grad is not None}
        self._is_step_over = is_step_over

    def _shadows(self) -> bool:
        """Return whether this rank has run out of examples, and buckets hold zeros; see `joining`."""
        wrapper = self._wrapper()
        return wrapper is not None and wrapper._join_config.enable and not in_backward()

    def take_shadowed(self) -> None:
        """Make what came while this rank shadowed the others' backward its gradients."""
        for param, mean in self._shadowed:
            param.grad = _gradient_of(param, mean)
        self._shadowed.clear()

    def _before_forward(self) -> None:
        for param in list(self._to_mean):
            if self._was_dropped(param):
                self._drop(param)

    def _before_accumulation(self, param: Tensor, gradient: Tensor) -> None:
        if self.flow is not None:
            self.flow.note_added(param, gradient)
        if running_backward() != self._backward and reaches(param):
            self._begin_backward()

    def _begin_backward(self) -> None:
        """Look at gradients, once in each backward and before it adds to any."""
        if running_backward() != self._backward:
            self._backward = running_backward()
            self._before_forward()
            self._left.clear()
            after_backward(weakly(self._note_versions))

    def _was_dropped(self, param: Tensor) -> bool:
        if param.grad is None:
            return True
        is_written_to = self._left.get(param, param.grad._version) != param.grad._version
        return is_written_to and (self._is_step_over or not bool(param.grad.any()))

    def _drop(self, param: Tensor) -> None:
        self._to_mean.pop(param, None)
        self._left.pop(param, None)

    def _watch(self, param: Tensor) -> None:
        """Look at its gradient whenever another is about to be added to it."""
        if param.requires_grad and id(param) not in self._watched:
            self._watched.add(id(param))  # DDP's parameters stay
            look, watched = weakref.WeakMethod(self._before_accumulation), weakref.ref(param)
            on_gradient(param, lambda gradient: call_if_there(look, watched(), gradient))

    # torch refuses other annotations than its own.
    def _reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        device = bucket.buffer().device
        self._backward_stream = torch.accelerator.current_stream(device) if continues_at_once(device) else None
        deliveries = None if self.flow is None else self.flow.deliveries
        if deliveries is not None and bucket.index() == 0:
            deliveries.begin()
        done = self._send(bucket)
        if deliveries is not None and bucket.is_last():
            deliveries.close()
        return done

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        flow = self.flow
        shadows = self._shadows()
        if shadows:
            for param in bucket.parameters():
                self._drop(param)
        else:
            self._begin_backward()  # for gradients that are not watched yet, or that this backward adds nothing to
        if flow is not None:
            flow.bring(bucket.parameters())
            for param in bucket.parameters():
                if param in flow.owner_of:
                    self._watch(param)
        if flow is None or any(param not in flow.owner_of for param in bucket.parameters()):
            return self._to_all(None, bucket, shadows=shadows)  # their owners are not known yet, or some are not ours
        row = flow.row(bucket.index(), bucket.parameters(), bucket.buffer().dtype)
        if not shadows:
            self._make_local(bucket, flow)
        if row.to_all:
            return self._to_all(row, bucket, shadows=shadows)
        if shadows:
            self._shadowed += self._own(bucket, flow)
        return self._by_segments(row, bucket, flow) if row.segmented else self._directly(row, bucket, flow)

    def _to_all(
        self,
        row: OwnedRow | None,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        *,
        shadows: bool,
    ) -> torch.futures.Future[torch.Tensor]:
        """Bring the mean to all ranks, owners too, as DDP does; `row` is None where no plan knows of it."""
        for param in bucket.parameters():
            self._drop(param)
        if shadows:
            self._shadowed += zip(bucket.parameters(), bucket.gradients(), strict=True)
        mean: Tensor = bucket.buffer().div_(dist.get_world_size(self._group))
        work = dist.all_reduce(mean, group=self._group, async_op=True)
        if row is not None and self.observe is not None:
            (message,) = row.messages(dist.get_rank(self._group))
            self.observe(message)

        def take(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            return mean

        done: torch.futures.Future[Tensor] = continued(work.get_future(), mean.device, take)
        return done

    def _own(self, bucket: dist.GradBucket, flow: ShardedGradients) -> list[tuple[Tensor, Tensor]]:  # type: ignore[name-defined]
        """Return the parameters in a bucket that this rank owns, each with its gradient, a view of the buffer."""
        rank = dist.get_rank(self._group)
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        return [(param, piece) for param, piece in pairs if flow.owner_of[param] == rank]

    def _make_local(self, bucket: dist.GradBucket, flow: ShardedGradients) -> None:  # type: ignore[name-defined]
        """Take from the gradients that this rank owns what makes them the mean of backwards before."""
        for param, piece in self._own(bucket, flow):
            if param in self._to_mean:
                piece.sub_(self._to_mean[param])

    def _take(self, own: Sequence[tuple[Tensor, Tensor]], mean: Tensor) -> None:
        """Write the mean of this rank's gradients, one after the other, into their pieces of the buffer."""
        means = torch.split(mean, [piece.numel() for _, piece in own])
        for (param, piece), each in zip(own, means, strict=True):
            self._to_mean[param] = kept = each.view(piece.shape) - piece
            if self._backward_stream is not None:
                kept.record_stream(self._backward_stream)  # pragma: cuda
            piece.copy_(each.view(piece.shape))

    def _directly(
        self,
        row: OwnedRow,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        flow: ShardedGradients,
    ) -> torch.futures.Future[torch.Tensor]:
        buffer, rank, ranks = bucket.buffer(), dist.get_rank(self._group), row.world_size
        own = self._own(bucket, flow)
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
            self._take(own, _mean(received, ranks))
            whole: Tensor = buffer
            return whole

        done: torch.futures.Future[torch.Tensor] = continued(work.get_future(), buffer.device, add_up)
        return done

    def _by_segments(
        self,
        row: OwnedRow,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        flow: ShardedGradients,
    ) -> torch.futures.Future[torch.Tensor]:
        """Launch the first of two messages, see [Note: the second message]."""
        deliveries, own = flow.deliveries, self._own(bucket, flow)
        assert deliveries is not None, "what goes by segments has them"
        deliveries.next(row)
        segment = Segment(row, bucket.buffer(), lambda mean: self._take(own, mean))
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


def _gradient_of(param: Tensor, piece: Tensor) -> Tensor:
    """Return the gradient that a piece of a bucket holds: it lies there as the parameter does in memory."""
    if torch.empty_like(param).stride() != param.stride():  # which has gaps there, so that DDP lays it out plainly
        return piece.clone()
    return piece.reshape(-1).as_strided(param.shape, param.stride()).clone()


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
