"""Layers, models and losses that the tests run over, and one step of the optimizer watched from outside."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import oracles
from kfac_optim import KFACOptimizer, LossTerms, Structure, WeightSharing
from kfac_optim.factors.patch_correlation import can_correlate, correlated_gram
from kfac_optim.factors.patches import Patches
from kfac_optim.layers.convolution import base

STRUCTURES = [(left, right) for left in Structure for right in Structure if (left, right) != (Structure.IDENTITY,) * 2]


class Bias(Enum):
    TRAINED = "trained"
    FROZEN = "frozen"
    ABSENT = "absent"


class Layout(Enum):
    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels last"
    STRIDED = "strided"


@dataclass(frozen=True)
class LayerCase:
    """One layer and one input for it."""

    shape: tuple[int, ...]
    bias: Bias
    layout: Layout

    def input(self) -> Tensor:
        if self.layout is Layout.STRIDED:
            return torch.randn(*self.shape[:-1], 2 * self.shape[-1])[..., ::2]
        tensor = torch.randn(self.shape)
        if self.layout is Layout.CHANNELS_LAST:
            channels = self.channel_axis
            return tensor.movedim(channels, -1).contiguous().movedim(-1, channels)
        return tensor

    def module(self) -> nn.Module:
        module = self.build()
        if self.bias is Bias.FROZEN:
            module.bias.requires_grad_(False)
        return module

    @property
    def trains_bias(self) -> bool:
        return self.bias is Bias.TRAINED

    @property
    def channel_axis(self) -> int:
        raise NotImplementedError

    @property
    def examples(self) -> int:
        raise NotImplementedError

    def build(self) -> nn.Module:
        raise NotImplementedError

    def rows(self, module: nn.Module, call: "Call") -> tuple[Tensor, Tensor]:
        """Input rows without the bias column, and gradient rows, by the oracles."""
        raise NotImplementedError


@dataclass(frozen=True)
class LinearCase(LayerCase):
    outputs: int

    @property
    def channel_axis(self) -> int:
        return 0

    @property
    def examples(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    def build(self) -> nn.Module:
        return nn.Linear(self.shape[-1], self.outputs, bias=self.bias is not Bias.ABSENT)

    def rows(self, module: nn.Module, call: "Call") -> tuple[Tensor, Tensor]:
        return oracles.linear_rows(call.input), oracles.linear_rows(call.gradient)


@dataclass(frozen=True)
class ConvCase(LayerCase):
    out_channels: int
    groups: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...] | str
    padding_mode: str

    @property
    def batched(self) -> bool:
        return len(self.shape) == len(self.kernel) + 2

    @property
    def channel_axis(self) -> int:
        return 1 if self.batched else 0

    @property
    def examples(self) -> int:
        return self.shape[0] if self.batched else 1

    def build(self) -> nn.Module:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(self.kernel) - 1]
        return kind(
            self.shape[self.channel_axis],
            self.out_channels,
            self.kernel,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=self.bias is not Bias.ABSENT,
            padding_mode=self.padding_mode,
        )

    def rows(self, module: nn.Module, call: "Call") -> tuple[Tensor, Tensor]:
        return oracles.conv_rows(module, call.input), oracles.conv_gradient_rows(module, call.gradient)


def sizes(largest: int) -> st.SearchStrategy[int]:
    return st.integers(1, largest)


@st.composite
def linear_cases(draw: st.DrawFn, largest: int = 4) -> LinearCase:
    leading = draw(st.lists(sizes(4), max_size=3))
    return LinearCase(
        shape=(*leading, draw(sizes(largest))),
        bias=draw(st.sampled_from(Bias)),
        layout=draw(st.sampled_from(Layout)),
        outputs=draw(sizes(largest)),
    )


@st.composite
def conv_cases(draw: st.DrawFn, one_position: bool = False) -> ConvCase:
    """Any convolution, with a few output positions or exactly one."""
    ndim = draw(st.integers(1, 3))

    def per_axis(strategy: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(strategy) for _ in range(ndim))

    kernel, dilation = per_axis(sizes(4 - ndim if ndim > 1 else 3)), per_axis(sizes(2))
    reach = tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    padding = draw(st.sampled_from(["valid"] if one_position else ["same", "valid", "numbers"]))
    stride = (1,) * ndim if padding == "same" else per_axis(sizes(3))
    amounts = (0,) * ndim
    if padding == "same":
        amounts = tuple(r - r // 2 for r in reach)
    elif padding == "numbers" or draw(st.booleans()):
        amounts = per_axis(st.integers(0, 2))
        padding = amounts
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    # the least sizes that leave a position, and that reflection and wrapping can be read from
    if one_position:
        amounts = tuple(min(p, r // 2) for p, r in zip(amounts, reach, strict=True))
        padding = amounts if padding != "valid" else padding
        space = tuple(r + 1 - 2 * p for r, p in zip(reach, amounts, strict=True))
        if any(p >= s for p, s in zip(amounts, space, strict=True)):
            mode = "zeros"
    else:
        least = tuple(max(p + 1, r + 1 - 2 * p) for r, p in zip(reach, amounts, strict=True))
        space = tuple(low + draw(st.integers(0, 3 if ndim < 3 else 1)) for low in least)
    groups = draw(sizes(3))
    channels = groups * draw(sizes(2))
    batch = () if draw(st.integers(0, 3)) == 0 else (1 if one_position else draw(sizes(3)),)
    return ConvCase(
        shape=(*batch, channels, *space),
        bias=draw(st.sampled_from(Bias)),
        layout=draw(st.sampled_from(Layout)),
        out_channels=groups * draw(sizes(3)),
        groups=groups,
        kernel=kernel,
        stride=stride,
        dilation=dilation,
        padding=padding,
        padding_mode=mode,
    )


@st.composite
def patches_cases(draw: st.DrawFn) -> Patches:
    """Feature maps and a kernel over them, with at least one position."""
    ndim = draw(st.integers(1, 3))

    def per_axis(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(ndim))

    kernel, dilation = per_axis(1, 4 if ndim < 3 else 2), per_axis(1, 3 if ndim < 3 else 2)
    zeros = tuple(zip(per_axis(0, 3), per_axis(0, 3), strict=True))
    reach = (d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
    least = tuple(max(1, r + 1 - sum(pair)) for r, pair in zip(reach, zeros, strict=True))
    space = tuple(low + extra for low, extra in zip(least, per_axis(0, 5 if ndim < 3 else 2), strict=True))
    groups = draw(sizes(3))
    return Patches(
        features=torch.randn(draw(sizes(3)), groups * draw(sizes(2)), *space),
        zeros=zeros,
        kernel=kernel,
        stride=per_axis(1, 3),
        dilation=dilation,
        groups=groups,
    )


@contextmanager
def correlating() -> Iterator[list[Patches]]:
    """Correlations wherever there is such a form, as if it always paid; what was correlated."""
    seen: list[Patches] = []

    def correlated(patches: Patches) -> Tensor:
        seen.append(patches)
        return correlated_gram(patches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "correlation_pays", can_correlate)
        patch.setattr(base, "correlated_gram", correlated)
        yield seen


# -- one step, watched from outside ------------------------------------------------------------------------------


@dataclass
class Call:
    """What a hook of the test's own saw of a layer."""

    input: Tensor
    output: Tensor

    @property
    def gradient(self) -> Tensor:
        assert self.output.grad is not None
        return self.output.grad


@dataclass
class Measured:
    optimizer: KFACOptimizer
    factors: dict[str, tuple[Tensor | None, Tensor | None]]
    calls: dict[str, Call]


def any_loss(output: Tensor) -> Tensor:
    """A loss whose gradient differs in every element; not a mean over anything in particular."""
    return (output * torch.randn(output.shape) + output.square() / 2).sum() / 7


def measure(
    model: nn.Module, model_input: Tensor, loss_of: Callable[[Tensor], Tensor] = any_loss, **options: Any
) -> Measured:
    """One forward, backward and step that moves nothing."""
    optimizer = KFACOptimizer(model, lr=0.0, **options)
    calls: dict[str, Call] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            output.retain_grad()
            calls[name] = Call(args[0].detach().clone(), output)

        return hook

    handles = [
        module.register_forward_hook(watch(name))
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
    ]
    model.zero_grad()
    loss_of(model(model_input)).backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.remove_hooks()
    return Measured(optimizer, optimizer.factors(), calls)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


# -- whole problems with a mean loss -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A model, a batch for it, and a loss that is a mean over `loss_terms`."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    criterion: Callable[[Tensor, Tensor], Tensor]
    loss_terms: LossTerms
    weight_sharing: WeightSharing = WeightSharing.EXPAND

    def optimizer(self, model: nn.Module, **options: Any) -> KFACOptimizer:
        return KFACOptimizer(
            model,
            loss_terms=self.loss_terms,
            weight_sharing=self.weight_sharing,
            **{"factor_update_period": 1, **options},
        )


def _tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3, 3),
    )


def _images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 4, 4), torch.randint(3, (n,))


PROBLEMS = [
    Problem(
        "classifier",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)),
        lambda n: (torch.randn(n, 4), torch.randint(3, (n,))),
        F.cross_entropy,
        LossTerms.EXAMPLES,
    ),
    Problem(
        "autoencoder",
        lambda: nn.Sequential(nn.Linear(6, 2), nn.Sigmoid(), nn.Linear(2, 6)),
        lambda n: (torch.randn(n, 6), torch.rand(n, 6)),
        F.binary_cross_entropy_with_logits,
        LossTerms.ELEMENTS,
    ),
    Problem(
        "tokens",
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)),
        lambda n: (torch.randn(n, 3, 4), torch.randint(3, (n, 3))),
        _tokens,
        LossTerms.POSITIONS,
    ),
    Problem("images, expand", _conv_net, _images, F.cross_entropy, LossTerms.EXAMPLES),
    Problem("images, reduce", _conv_net, _images, F.cross_entropy, LossTerms.EXAMPLES, WeightSharing.REDUCE),
]


def problem_ids(problems: Sequence[Problem]) -> list[str]:
    return [problem.name for problem in problems]


# -- the step ----------------------------------------------------------------------------------------------------


def free_optimizer(model: nn.Module, **options: Any) -> KFACOptimizer:
    """One whose steps subtract the preconditioned gradient and nothing else."""
    return KFACOptimizer(model, lr=1.0, momentum=0.0, kl_clip=None, **{"factor_update_period": 1, **options})


def displacement(module: nn.Module, before: dict[str, Tensor]) -> Tensor:
    """What a step of learning rate 1 subtracted, as `[groups, out, in]`."""
    moved = {name: before[name] - param.detach() for name, param in module.named_parameters() if param.grad is not None}
    return oracles.gradient_matrix(module, moved)


def look_alikes() -> nn.Sequential:
    """Layers of equal shapes, several with groups, which are batched together: none may take another's result."""
    return nn.Sequential(
        nn.Conv1d(4, 4, 1, groups=2),
        nn.Tanh(),
        nn.Conv1d(4, 4, 2, groups=4),
        nn.Flatten(),
        nn.Linear(8, 3),
        nn.Tanh(),
        nn.Linear(3, 3),
        nn.Linear(3, 3, bias=False),
    )
