"""DistributedDataParallel, whose gradients are sent to owners alone."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from kfac_optim.distributed.communication.launcher import has_reduce_scatter
from kfac_optim.distributed.communication.launches import Cause, Launch
from kfac_optim.distributed.communication.message import Message
from kfac_optim.distributed.communication.rows import OwnedRow
from kfac_optim.distributed.communication.segments import filled_up
from kfac_optim.distributed.gradients.flow import ShardedGradients
from kfac_optim.utils.autograd import after_backward, in_backward, on_gradient
from kfac_optim.utils.hooks import PicklableHook, call_if_there


class OwnersHook:
    """Brings the mean of a gradient to its owner alone, as a communication hook (`register_comm_hook`).

    An all-to-all moves half of what the all-reduce does. Where there is no plan yet, it is that all-reduce.

    [Note: several backwards] Where a step has several backwards that reduce, a bucket holds what the gradients have
    come to: the mean of the backwards before on the owner, and their local sums on the others. So the owner keeps what
    makes its mean local again, until the gradient is dropped: until it is gone, or was written to since the step, which
    can only have made it zeros. That is looked at before a forward, and again when the next gradient comes to be added
    to it. (Gradients that are views of DDP's buckets are written to together: of those only the first look can tell.)

    [Note: the second message] By segments a bucket takes two messages, and all ranks must launch all messages in one
    order. DDP has the first ones launched in the order of its buckets, on all ranks; when backward comes to an end, the
    second ones follow in that same order. There is no other place for them: nothing may wait within backward, where
    another rank may wait for this one's share of a normalisation, and what is called when the first has ended is called
    whenever each rank happens to see that.

    Args:
        wrapper: whose gradients.
        observe: is called with every message, for traces.
        at_the_end: has a function called as soon as the running backward has ended, before the wrapper waits.
    """

    def __init__(
        self,
        wrapper: DistributedDataParallel,
        observe: Callable[[Launch], None] | None = None,
        at_the_end: Callable[[Callable[[], None]], None] = lambda function: after_backward(function, 1),
    ) -> None:
        self.flow: ShardedGradients | None = None
        self._observe = observe
        self._at_the_end = at_the_end
        self._under_way: list[_UnderWay] = []
        self._group = wrapper.process_group
        self._wrapper = weakref.ref(wrapper)
        self._to_mean: dict[Tensor, Tensor] = {}  # of each owned gradient, the mean without the local one
        self._stepped: dict[Tensor, int] = {}  # of each of them, the version that the last step took
        self._shadowed: list[tuple[Tensor, Tensor]] = []
        self._watched: set[int] = set()
        self._views = wrapper.gradient_as_bucket_view
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

    def forget(self) -> None:
        """Note that gradients were dropped, or are the mean on all ranks."""
        self._to_mean.clear()
        self._stepped.clear()

    def stepped(self) -> None:
        """Note that a step was taken, or skipped, by the gradients as they are."""
        self._stepped = {param: param.grad._version for param in self._to_mean if param.grad is not None}

    def _shadows(self) -> bool:
        """Return whether this rank has run out of examples, and buckets hold zeros; see `joining`."""
        wrapper = self._wrapper()
        return wrapper is not None and wrapper._join_config.enable and not in_backward()

    def take_shadowed(self) -> None:
        """Make what came while this rank shadowed the others' backward its gradients."""
        for param, mean in self._shadowed:
            param.grad = mean.clone()
        self._shadowed.clear()

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
        shadows = self._shadows()
        if shadows:
            for param in bucket.parameters():
                self._drop(param)
        if flow is not None:
            flow.bring(bucket.parameters())
        if flow is None or any(param not in flow.owner_of for param in bucket.parameters()):
            # Who owns them is not known yet, or some are not ours: then all have the mean, owners too.
            for param in bucket.parameters():
                self._drop(param)
            if shadows:
                self._shadowed += zip(bucket.parameters(), bucket.gradients(), strict=True)
            work = dist.all_reduce(buffer.div_(ranks), group=self._group, async_op=True)
            mean: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda future: future.value()[0])
            return mean
        row = flow.row(bucket.index(), bucket.parameters(), buffer.dtype)
        if shadows:
            self._shadowed += self._own(bucket, flow)
        else:
            self._make_local(bucket, flow)
        return self._by_segments(row, bucket, flow) if row.segmented else self._directly(row, bucket, flow)

    def _own(self, bucket: dist.GradBucket, flow: ShardedGradients) -> list[tuple[Tensor, Tensor]]:  # type: ignore[name-defined]
        """Return the parameters in a bucket that this rank owns, each with its gradient, a view of the buffer."""
        rank = dist.get_rank(self._group)
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        return [(param, piece) for param, piece in pairs if flow.owner_of[param] == rank]

    def _make_local(self, bucket: dist.GradBucket, flow: ShardedGradients) -> None:  # type: ignore[name-defined]
        """Take from the gradients that this rank owns what makes them the mean of backwards before."""
        for param, piece in self._own(bucket, flow):
            self._watch(param)
            self._stepped.pop(param, None)
            if param.grad is None:  # it got none here, so that nobody has looked
                self._drop(param)
            if param in self._to_mean:
                piece.sub_(self._to_mean[param])

    def _take(self, own: Sequence[tuple[Tensor, Tensor]], mean: Tensor) -> None:
        """Write the mean of this rank's gradients, one after the other, into their pieces of the buffer."""
        means = torch.split(mean, [piece.numel() for _, piece in own])
        for (param, piece), each in zip(own, means, strict=True):
            self._to_mean[param] = each.view(piece.shape) - piece
            piece.copy_(each.view(piece.shape))

    def _exchange(self, message: Message, sent: Tensor, received: Tensor) -> dist.Work:
        work: dist.Work | None = dist.all_to_all_single(
            received, sent, list(message.from_), list(message.to), group=self._group, async_op=True
        )
        assert work is not None
        if self._observe is not None:
            self._observe(Launch.of(message, Cause.COMPLETE))
        return work

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
        work = self._exchange(message, sent, received)

        def add_up(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            self._take(own, _mean(received, ranks))
            whole: Tensor = buffer
            return whole

        done: torch.futures.Future[torch.Tensor] = work.get_future().then(add_up)
        return done

    def _by_segments(
        self,
        row: OwnedRow,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        flow: ShardedGradients,
    ) -> torch.futures.Future[torch.Tensor]:
        """Launch the first of two messages, see [Note: the second message]."""
        buffer, rank = bucket.buffer(), dist.get_rank(self._group)
        if bucket.index() == 0:
            self._under_way.clear()  # of a backward that raised
        scatter, deliver = row.messages(rank)
        mean = self._scatter(row, scatter, buffer)
        device = buffer.device
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[] if device.index is None else [device])
        self._under_way.append(_UnderWay(row, deliver, mean, self._own(bucket, flow), buffer, done))
        if bucket.is_last() and self._shadows():
            self._deliver()
        elif bucket.is_last():
            self._at_the_end(self._deliver)
        return done

    def _scatter(self, row: OwnedRow, message: Message, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Launch the reduce-scatter; what it gives is the mean of this rank's segment."""
        ranks, segments = row.world_size, row.segments
        length = segments.lengths[message.rank]
        if not has_reduce_scatter(buffer.device) or row.payload != buffer.dtype:  # which would sum in that dtype
            sent = buffer.to(row.payload)
            received = sent.new_empty(sum(message.from_))
            work = self._exchange(message, sent, received)
            parts = [received]

            def add_up(future: torch.futures.Future[Any]) -> Tensor:
                future.wait()
                return _mean(parts.pop(), ranks).to(buffer.dtype)

            found: torch.futures.Future[Tensor] = work.get_future().then(add_up)
            return found
        whole = filled_up(buffer, segments.length * ranks)
        total = whole.new_empty(segments.length)
        scattering = dist.reduce_scatter_single(total, whole, group=self._group, async_op=True)
        assert scattering is not None
        if self._observe is not None:
            self._observe(Launch.of(message, Cause.COMPLETE))

        def divide(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()
            return total[:length] / ranks

        ended: torch.futures.Future[Tensor] = scattering.get_future().then(divide)
        return ended

    def _deliver(self) -> None:
        """Bring segments to owners."""
        waiting, self._under_way = self._under_way, []
        assert self.flow is not None, "it has laid them out"
        for batch in self.flow.batches([each.row for each in waiting]):
            together = []
            for each in waiting[batch]:
                message, segment = each.deliver, each.mean.wait()
                runs = each.row.segments.within(message.rank)
                sent = torch.cat([segment[run.start : run.stop] for run in runs]) if len(runs) > 1 else segment
                sent = sent.to(each.row.payload)
                received = sent.new_empty(sum(message.from_))
                together.append((each, self._exchange(message, sent, received), received))
            for each, work, received in together:
                work.wait()
                self._take(each.own, received)
                each.done.set_result(each.buffer)


class _UnderWay(NamedTuple):
    """Holds a bucket whose second message was not sent yet; see [Note: the second message]."""

    row: OwnedRow
    deliver: Message
    mean: torch.futures.Future[Tensor]
    own: list[tuple[Tensor, Tensor]]
    buffer: Tensor
    done: torch.futures.Future[Tensor]


class _NoHook:
    """Stands for an `OwnersHook` in a copied wrapper, and is never called."""

    def _reduce(self, state: object, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        pass


def _mean(received: Tensor, ranks: int) -> Tensor:
    """Return the mean over ranks of equal parts, `[elements / ranks]`, in float32 at least."""
    wide = torch.promote_types(received.dtype, torch.float32)
    return received.view(ranks, -1).sum(0, dtype=wide) / ranks
