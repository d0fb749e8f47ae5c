"""Batches, gradients and losses that are empty, huge, not finite or half there, in every kind of training loop."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.fuzz import HALFWAY, check_finite, check_same, judge
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


def _frozen(drawn: Drawn, x: Tensor) -> Tensor:
    """Run with the first layer frozen; the next step may find it trained again."""
    param = next(drawn.model.parameters())
    param.requires_grad_(not param.requires_grad)
    output: Tensor = drawn.model(x)
    return output


def _under(dtype: torch.dtype) -> Callable[[Drawn, Tensor], Tensor]:
    def forward(drawn: Drawn, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            output: Tensor = drawn.model(x)
        return output

    return forward


def _evaluated(drawn: Drawn, x: Tensor) -> Tensor:
    drawn.model.eval()
    try:
        output: Tensor = drawn.model(x)
        return output
    finally:
        drawn.model.train()


def _counted(drawn: Drawn, x: Tensor) -> Tensor:
    drawn.optimizer.set_loss_terms(len(x) + 1)
    output: Tensor = drawn.model(x)
    return output


FORWARDS: dict[str, Callable[[Drawn, Tensor], Tensor]] = {
    "called": lambda drawn, x: drawn.model(x),
    "in bfloat16": _under(torch.bfloat16),
    "in float16": _under(torch.float16),
    "checkpointed": lambda drawn, x: checkpoint(drawn.model, x, use_reentrant=False),
    "by functional_call": lambda drawn, x: torch.func.functional_call(
        drawn.model, dict(drawn.model.named_parameters()), x
    ),
    "twice": lambda drawn, x: drawn.model(x) + drawn.model(-x),
    "in part without gradients": lambda drawn, x: drawn.model(x) + drawn.model(x).detach(),
    "evaluated": _evaluated,
    "frozen": _frozen,
    "with stated terms": _counted,
}


Closure = Callable[..., Tensor]
"""Forward and backward of the loss times its argument, after the gradients were dropped unless `fresh` is False."""


def _scaled(scale: float, *, clips: bool = False) -> Callable[[Drawn, Closure], None]:
    def step(drawn: Drawn, closure: Closure) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(torch.ones(()))  # which makes its scale a tensor
        closure(scale)
        if clips:
            scaler.unscale_(drawn.optimizer)
            nn.utils.clip_grad_norm_(drawn.model.parameters(), 0.1)
        scaler.step(drawn.optimizer)
        scaler.update()

    return step


def _plain(drawn: Drawn, closure: Closure) -> None:
    closure(1)
    drawn.optimizer.step()


def _accumulated(drawn: Drawn, closure: Closure) -> None:
    closure(0.5)
    closure(0.5, fresh=False)
    drawn.optimizer.step()


STEPS: dict[str, Callable[[Drawn, Closure], None]] = {
    "plain": _plain,
    "by closure": lambda drawn, closure: drawn.optimizer.step(lambda: closure(1)),  # type: ignore[arg-type, return-value]
    "scaled": _scaled(1024.0),
    "scaled and clipped": _scaled(1024.0, clips=True),
    "scaled past the range": _scaled(1e38),
    "accumulated": _accumulated,
}

DRAWN = (CHANGES, LOSSES, EDITS, FORWARDS, STEPS)


def case(rng: random.Random) -> str:
    """Some steps of which a few are bad; all that is held is finite after each, and good steps go on."""
    drawn = build(rng)
    story: list[str] = []
    outcomes: list[str] = []
    for _ in range(rng.randint(1, 2)):
        names = [rng.choice(list(kind)) if rng.random() < 0.4 else next(iter(kind)) for kind in DRAWN]
        story.append("/".join(names))
        outcomes.append(_step(drawn, rng, "; ".join(story), *names))
    outcomes.append(_step(drawn, rng, "; ".join([*story, "good"]), *(next(iter(kind)) for kind in DRAWN)))
    return next((outcome for outcome in outcomes if outcome != "taken"), "taken")


def _step(
    drawn: Drawn, rng: random.Random, story: str, change: str, loss_of: str, edit: str, forward: str, step: str
) -> str:
    model, optimizer, what = drawn.model, drawn.optimizer, f"{drawn.what}: {story}"
    x, target = CHANGES[change](batch(), rng)

    def closure(scale: float, *, fresh: bool = True) -> Tensor:
        loss = LOSSES[loss_of](CRITERION(FORWARDS[forward](drawn, x), target))
        if torch.is_grad_enabled():
            if fresh:
                optimizer.zero_grad()
            (loss * scale).backward()
            EDITS[edit](model, random.Random(story))
        return loss

    buffers = [buffer.clone() for buffer in model.buffers()]
    params = clones(model.parameters())
    try:
        STEPS["by closure" if drawn.by_closure else step](drawn, closure)
    except Exception as error:
        outcome = judge(error, what)
        if outcome != HALFWAY:
            check_same(f"{what}: a step that raised", params, clones(model.parameters()))
        return outcome
    finally:
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            if not bool(buffer.isfinite().all()):  # torch's own, of BatchNorm, which saw what it was given
                buffer.copy_(value)
    check_finite(what, model, optimizer)
    return "taken"
