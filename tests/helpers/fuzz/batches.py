"""Batches, gradients and losses that are empty, huge, not finite or half there, among good ones."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

from helpers.fuzz import check_finite, check_same, judge
from helpers.fuzz.models import CRITERION, Drawn, batch, build
from helpers.plain import clones

Batch = tuple[Tensor, Tensor]
BAD = [float("nan"), float("inf"), -float("inf")]


def _with(place: int, number: float, everywhere: bool = False) -> Callable[[Batch, random.Random], Batch]:
    def change(pair: Batch, rng: random.Random) -> Batch:
        new = [tensor.clone() for tensor in pair]
        if everywhere:
            new[place].fill_(number)
        else:
            new[place].view(-1)[rng.randrange(max(new[place].numel(), 1))] = number
        return new[0], new[1]

    return change


CHANGES: dict[str, Callable[[Batch, random.Random], Batch]] = {
    "good": lambda pair, _: pair,
    "empty": lambda pair, _: (pair[0][:0], pair[1][:0]),
    "one": lambda pair, _: (pair[0][:1], pair[1][:1]),
    "many": lambda pair, _: (pair[0].repeat(30, 1), pair[1].repeat(30, 1)),
    "same": lambda pair, _: (pair[0][:1].expand(4, 3), pair[1][:1].expand(4, 2)),
    "zeros": lambda pair, _: (0 * pair[0], 0 * pair[1]),
    "strided": lambda pair, _: (pair[0].repeat(1, 2)[:, ::2], pair[1].t().contiguous().t()),
    "input needs grad": lambda pair, _: (pair[0].clone().requires_grad_(), pair[1]),
    "float64": lambda pair, _: (pair[0].double(), pair[1].double()),
    "large": lambda pair, _: (pair[0] * 1e4, pair[1]),
    "huge": lambda pair, _: (pair[0] * 1e15, pair[1]),
    "past the range": lambda pair, _: (pair[0] * 3e37, pair[1] * 3e37),
    "tiny": lambda pair, _: (pair[0] * 1e-30, pair[1] * 1e-30),
    "denormal": lambda pair, _: (pair[0] * 1e-42, pair[1] * 1e-42),
    "huge target": _with(1, 1e30, everywhere=True),
    "nan in the input": _with(0, BAD[0]),
    "infinity in the input": _with(0, BAD[1]),
    "nan in the target": _with(1, BAD[0]),
    "infinity in the target": _with(1, BAD[2]),
    "all nan": _with(0, BAD[0], everywhere=True),
}

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda loss: loss,
    "times zero": lambda loss: loss * 0,
    "times a million": lambda loss: loss * 1e6,
    "times 1e30": lambda loss: loss * 1e30,
    "negative": lambda loss: -loss,
    "times nan": lambda loss: loss * BAD[0],
    "by zero": lambda loss: loss / 0,
}


def _grads(change: Callable[[Tensor], Tensor | None]) -> Callable[[nn.Module, random.Random], None]:
    def apply(model: nn.Module, rng: random.Random) -> None:
        params = [param for param in model.parameters() if param.grad is not None]
        for param in rng.sample(params, min(len(params), rng.choice([1, 1, 9]))):
            assert param.grad is not None
            param.grad = change(param.grad)

    return apply


EDITS: dict[str, Callable[[nn.Module, random.Random], None]] = {
    "none": lambda *_: None,
    "cleared": _grads(lambda _: None),
    "zero": _grads(torch.zeros_like),
    "nan": _grads(lambda grad: torch.full_like(grad, BAD[0])),
    "infinite": _grads(lambda grad: grad + BAD[1]),
    "huge": _grads(lambda grad: torch.full_like(grad, 1e30)),
    "noise": _grads(torch.randn_like),
    "sparse": _grads(lambda grad: grad.to_sparse()),
    "strided": _grads(lambda grad: grad.repeat_interleave(2, -1)[..., ::2]),
    "clipped": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None,
}


DRAWN = (CHANGES, LOSSES, EDITS)


def case(rng: random.Random) -> str:
    """Some steps of which a few are bad; all that is held is finite after each, and good steps go on."""
    drawn = build(rng)
    story: list[str] = []
    outcomes: list[str] = []
    for _ in range(rng.randint(1, 3)):
        names = [
            rng.choice(list(kind)) if rng.random() < 0.5 else next(iter(kind)) for kind in (CHANGES, LOSSES, EDITS)
        ]
        story.append("/".join(names))
        outcomes.append(_step(drawn, rng, "; ".join(story), *names))
    outcomes.append(_step(drawn, rng, "; ".join([*story, "good"]), "good", "as it is", "none"))
    return next((outcome for outcome in outcomes if outcome != "taken"), "taken")


def _step(drawn: Drawn, rng: random.Random, story: str, change: str, loss_of: str, edit: str) -> str:
    model, optimizer, what = drawn.model, drawn.optimizer, f"{drawn.what}: {story}"
    x, target = CHANGES[change](batch(), rng)

    def closure() -> Tensor:
        loss = LOSSES[loss_of](CRITERION(model(x), target))
        if torch.is_grad_enabled():
            optimizer.zero_grad()
            loss.backward()
            EDITS[edit](model, random.Random(story))
        return loss

    buffers = [buffer.clone() for buffer in model.buffers()]
    params = clones(model.parameters())
    try:
        if drawn.by_closure or rng.random() < 0.5:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    except Exception as error:
        outcome = judge(error, what)
        check_same(f"{what}: a step that raised", params, clones(model.parameters()))
        return outcome
    finally:
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            if not bool(buffer.isfinite().all()):  # torch's own, of BatchNorm, which saw what it was given
                buffer.copy_(value)
    check_finite(what, model, optimizer)
    return "taken"
