"""Cases drawn at random from a seed, and the three things that none of them may do.

A case changes nothing where it is refused, is refused by an error that says what and where, and leaves no number that
is not finite.
"""

import math
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import kfac_optim
from helpers.plain import assert_identical, copy_of
from kfac_optim import KFACOptimizer

PACKAGE = str(Path(kfac_optim.__file__).parent)
OURS = str(Path(__file__).parent)
BASE_CLASS = str(Path(torch.optim.__file__).parent / "optimizer.py")
FUNCTIONS = str(Path(torch.nn.functional.__file__))
PASSED_ON = ("function_modes.py", "weight_maps.py")  # which call torch for the model
UNROLLED, MIXED = "recurrent.py", "must have the same dtype"  # there torch meets a batch that autocast does not cast
PARTLY, HALFWAY = ("torch/optim/sgd.py", "torch/optim/lr_scheduler.py"), "raised within torch, which was halfway"
CLEAR = (TypeError, ValueError, RuntimeError, KeyError)


class Finding(Exception):  # noqa: N818 (it is no error of the program)
    """What must not happen: its kind, and an account of it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


CHANGED, UNCLEAR, NOT_FINITE = "changed state", "unclear error", "not finite"


def judge(error: Exception, what: str) -> str:
    """Return whose error it is, or raise a `Finding` where it is ours and does not say what and where.

    It is the user's where the last of our frames is one of these cases, whose code called torch; torch's where the base
    class of all optimizers refuses in words of its own.
    """
    walked = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [filename for filename, _ in walked]
    if isinstance(error, CLEAR) and str(error).strip("\"'").startswith("kfac_optim"):  # of a KeyError in quotes
        return "refused"
    if frames[-1] == BASE_CLASS and isinstance(error, CLEAR):
        return "refused by torch.optim"
    if frames[-1].endswith(PARTLY):  # as where a sparse momentum meets a dense gradient, or a second group has no rate
        return HALFWAY
    # Some of the functions that they call for the model are Python, as `F.layer_norm` is.
    passed_on = frames[:-1] if frames[-1] == FUNCTIONS else frames
    if passed_on[-1].endswith(PASSED_ON) or (frames[-1].endswith(UNROLLED) and MIXED in str(error)):
        return "the user's error"
    owner = next(frame for frame in reversed(frames) if frame.startswith((PACKAGE, OURS)))
    if owner.startswith(OURS):
        return "the user's error"
    where = f"{Path(frames[-1]).name}:{walked[-1][1]}"
    raise Finding(UNCLEAR, f"{what}: {type(error).__name__} at {where}: {str(error)[:300]}") from error


def held(model: nn.Module, optimizer: KFACOptimizer | None = None) -> list[Any]:
    """What a refusal must leave as it is, copied: parameters, buffers, gradients and the optimizer's state."""
    grads = [param.grad for param in model.parameters()]
    state = {} if optimizer is None else optimizer.state_dict()
    return copy_of(  # type: ignore[no-any-return]
        [
            list(model.parameters()),
            list(model.buffers()),
            [grad if grad is None else grad.to_dense() for grad in grads],
            state,
        ]
    )


def check_same(what: str, before: Any, after: Any) -> None:
    """Raise a `Finding` where the two differ in a bit; NaN is NaN."""
    with suppress(AssertionError):
        assert_identical(after, before)
        return
    try:
        assert_identical(tree_map(_comparable, after), tree_map(_comparable, before))
    except AssertionError as error:
        raise Finding(CHANGED, f"{what}: {str(error)[:300]}") from error


@contextmanager
def unchanged(what: str, look: Callable[[], Any]) -> Iterator[None]:
    """Hold what `look` sees to what it saw."""
    before = look()
    yield
    check_same(what, before, look())


def _comparable(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.isnan(), leaf.masked_fill(leaf.isnan(), 0)
    return repr(leaf) if isinstance(leaf, float) else leaf


def check_finite(what: str, model: nn.Module, optimizer: KFACOptimizer) -> None:
    """Raise a `Finding` where a parameter, its momentum or an average of statistics is not finite."""
    named: list[tuple[str, Any]] = [(f"parameter {name}", param) for name, param in model.named_parameters()]
    for name, pair in optimizer.factors().items():
        named += [(f"factor {side} of {name!r}", factor) for side, factor in zip("AG", pair, strict=True)]
    for state in optimizer.state.values():
        if isinstance(state, dict):
            named += [(f"state {key!r}", value) for key, value in state.items() if key != "exp_avg_sq"]
    # A square in torch's AdamW overflows as it does in ours.
    tensors = [value.detach() for _, value in named if isinstance(value, Tensor) and value.numel() > 0]
    quick = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.layout == torch.strided]
    if len(quick) == len(tensors) and all(map(math.isfinite, torch._foreach_norm(quick, math.inf))):
        return  # of each the largest element
    for at, value in named:
        if isinstance(value, Tensor) and not bool(value.to_dense().isfinite().all()):
            raise Finding(NOT_FINITE, f"{what}: {at}")


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
