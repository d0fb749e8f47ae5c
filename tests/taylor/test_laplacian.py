"""Derivatives in one pass against nested differentiation by torch, in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers.oracles import assert_same
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from kfac_optim.taylor import Derivatives, laplacian

pytestmark = pytest.mark.usefixtures("float64")


class Residual(nn.Module):
    """Sine features, a residual connection, a bare parameter, a product and a hard boundary condition."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2, bias=False)
        self.norm, self.mix = nn.GroupNorm(1, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(torch.cat([torch.sin(2 * x), x.cos()], dim=-1))
        hidden = hidden + F.gelu(self.inner(hidden) @ self.mix)
        hidden = self.norm(hidden).view(-1, 2, 3).transpose(1, 2).reshape(len(x), 6) / (2 + hidden.square())
        return self.leave(torch.tanh(hidden)) * (1 - x[:, :1] ** 2)


class Tokens(nn.Module):
    """Joins the batch with another dimension by `view`, as in a projection of GPT-2, and names arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Linear(1, 4), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x.view(-1, 1)).view(len(x), -1, 4).tanh()
        hidden = F.linear(input=hidden, weight=self.inner.weight).view(-1, 3)
        return hidden.square().sum(-1).view_as(x).sum(-1, keepdim=True)


MODELS = {
    "tokens": Tokens,
    "tanh": lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)),
    "others": lambda: nn.Sequential(nn.Linear(2, 5), nn.SiLU(), nn.Linear(5, 4), nn.Softplus(2.0), nn.GroupNorm(2, 4)),
    "kinks": lambda: nn.Sequential(nn.Linear(2, 5), nn.LeakyReLU(0.3), nn.ELU(0.7), nn.Sigmoid(), nn.Linear(5, 3)),
    "residual": Residual,
}


def by_nesting(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Derivatives:
    def of_one(one: Tensor) -> Tensor:
        return functional_call(model, parameters, (one[None],))[0]

    second = vmap(jacrev(jacrev(of_one)))(x).diagonal(dim1=-1, dim2=-2).sum(-1)
    return Derivatives(vmap(of_one)(x), vmap(jacrev(of_one))(x), second)


@pytest.mark.parametrize("name", MODELS)
@given(examples=st.integers(1, 4))
def test_derivatives_and_their_gradients_by_parameters_are_those_of_nested_differentiation(
    name: str, examples: int
) -> None:
    model, x = MODELS[name](), torch.randn(examples, 2)
    parameters = dict(model.named_parameters())
    found, expected = laplacian(model, x), by_nesting(model, parameters, x)
    assert_same(found, expected, rtol=1e-12)
    for ours, theirs in zip(found, expected, strict=True):
        weights = torch.randn_like(ours)
        gradients = [
            torch.autograd.grad((weights * each).sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
            for each in (ours, theirs)
        ]
        for parameter, left, right in zip(parameters, *gradients, strict=True):
            zeros = torch.zeros_like(parameters[parameter])  # the derivatives do not depend on some biases
            assert_same(zeros if left is None else left, zeros if right is None else right, rtol=1e-11)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a softmax": lambda x: torch.softmax(x * x, -1),
    "powers": lambda x: x**3 + 2 ** (x / 3) - 1 / (2 + x.square()),
    "powers of two that depend on x": lambda x: (1 + x.square()) ** x + torch.pow(2 + x.square(), x[:, :1]),
    "a product over elements": lambda x: (x.sin() + 2).prod(-1),
    "a matrix product of two": lambda x: torch.bmm(x[:, :, None] ** 2, x[:, None].exp()),
    "an einsum": lambda x: torch.einsum("ni,nj->nij", x.sin(), x.cos()),
    "a norm": lambda x: torch.linalg.vector_norm(x + 3, dim=-1),
    "a radial function": lambda x: torch.exp(-(x[:, None] - torch.eye(2)).square().sum(-1)),
    "a choice": lambda x: torch.where(x > 0, x.sin(), x**2),
    "a maximum with its place": lambda x: (x**2).max(1).values,
    "views": lambda x: torch.stack(x.exp().unbind(1), 1).T.mT[..., 0] * x.flatten()[::2],
    "constants of more dimensions": lambda x: (1 - torch.arange(3.0)[:, None, None] * x.sin()).sum(0) + 4,
    "a constant that adds a dimension": lambda x: (torch.arange(3.0).view(1, 3, 1) + x[:, None]) ** 2,
    "padding by a number": lambda x: F.pad(x.sin(), (1, 1), value=3.0),
    "differences": lambda x: torch.sub(3, x**2, alpha=2) - (x.exp() - 1),
    "the real part of what is real": lambda x: x.sin().real * x,
    "an elementwise function with options": lambda x: F.softplus(x * x, beta=2.0) + F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_a_forward_is_made_of(name: str) -> None:
    function, x = FUNCTIONS[name], torch.randn(5, 2)

    def of_one(one: Tensor) -> Tensor:
        return function(one[None])[0]

    second = vmap(jacrev(jacrev(of_one)))(x).diagonal(dim1=-1, dim2=-2).sum(-1)
    assert_same(laplacian(function, x), (function(x), vmap(jacrev(of_one))(x), second), rtol=1e-12)


@given(examples=st.integers(1, 3), inputs=st.integers(1, 4), operators=st.integers(1, 3))
def test_operators_are_weighted_sums_of_second_derivatives(examples: int, inputs: int, operators: int) -> None:
    model, x = nn.Sequential(nn.Linear(inputs, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(examples, inputs)
    second = vmap(jacrev(jacrev(lambda one: model(one[None])[0])))(x).diagonal(dim1=-1, dim2=-2)  # [N, out, d]
    weights = torch.randn(operators, inputs)
    assert_same(laplacian(model, x, weights=weights).laplacian, second @ weights.T, rtol=1e-12)
    assert_same(laplacian(model, x, weights=weights[0].tolist()).laplacian, second @ weights[0], rtol=1e-12)
    assert_same(laplacian(model, x, weights=torch.eye(inputs).numpy()).laplacian, second, rtol=1e-12)


def test_one_product_for_each_layer() -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        products = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if any(getattr(kind, "taken_apart", False) for kind in types):
                with self:
                    return types[0].__torch_function__(func, types, args, kwargs)
            self.products += func is F.linear
            return func(*args, **(kwargs or {}))

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 1, bias=False))
    with Counting() as mode:
        laplacian(model, torch.randn(5, 3))
    # With a bias the product is made within a function of our own, which the mode sees as one.
    assert mode.products == 1


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        x += 1
        return x


def by_index(x: Tensor) -> Tensor:
    x = x.sin()
    x[:, 0] = 1.0
    return x


def into_plain(x: Tensor) -> Tensor:
    found = torch.zeros(len(x), 3)
    found[:, 0] = x[:, 0]
    return found * x[:, :1]


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return 2 * x

    @staticmethod
    def backward(_, g):
        return 2 * g


def through_custom(x: Tensor) -> Tensor:
    return Custom.apply(x * nn.Parameter(torch.ones(2)))


REFUSED: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], str]] = {
    "in place": (InPlace, r"through (add_|__iadd__)\(\) in the forward of InPlace: it changes its input in place"),
    "in place by a flag": (lambda: nn.ReLU(inplace=True), r"relu\(\) in the forward of ReLU: it changes"),
    "in place by position": (lambda: nn.ELU(1.0, True), r"elu\(\) in the forward of ELU: it changes"),
    "in place by index": (lambda: by_index, r"__setitem__\(\): it changes its input in place"),
    "into a plain tensor": (lambda: into_plain, r"__setitem__\(\): it changes its input in place"),
    "random": (lambda: nn.Sequential(nn.Dropout(0.5)), r"dropout\(\) in .* Dropout within Sequential.*evaluation"),
    "examples mixed": (lambda: nn.BatchNorm1d(2), r"batch_norm\(\) in the forward of BatchNorm1d: it mixes the exam"),
    "wrong in torch": (
        lambda: nn.Sequential(nn.Unflatten(1, (1, 2)), nn.InstanceNorm1d(1)),
        r"instance_norm\(\).*GroupNorm",
    ),
    "complex": (lambda: lambda x: torch.fft.fft(x).abs(), r"fft_fft\(\): its result is complex"),
    "complex by a cast": (lambda: lambda x: x * x.to(torch.complex128).real, r"to\(\): its result is complex"),
    "complex by a product": (lambda: lambda x: x * (x * torch.tensor(1j)).real, r"mul\(\): its result is complex"),
    "complex by a joint": (
        lambda: lambda x: x * torch.cat([x, torch.ones(3, 2, dtype=torch.complex128)]).real[:3],
        r"cat\(\): its result is complex",
    ),
    "not differentiable twice": (lambda: lambda x: torch.cdist(x[:, None], x[:, None]), r"cdist\(\)"),
    "a function of one's own": (lambda: lambda x: through_custom(x).sin(), r"custom autograd function"),
    "one at the end": (lambda: through_custom, r"custom autograd function"),
    "out of torch": (lambda: lambda x: torch.as_tensor(x.detach().numpy()), r"does not depend on x in a way that was"),
    "nested": (lambda: lambda x: laplacian(torch.sin, x).value, r"within another"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_is_named_with_the_remedy(case: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises(NotImplementedError, match=rf"(?s)taylor\.laplacian.*{words}.*nested autograd\.grad"):
        laplacian(make(), torch.randn(3, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(3, 2))])
def test_scripted_code_is_refused(make: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> None:
    with pytest.raises(NotImplementedError, match=r"taylor\.laplacian .*it is scripted.*nested autograd\.grad"):
        laplacian(make(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))), torch.randn(3, 2))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor:UserWarning")
def test_what_a_scripted_function_loses_makes_all_derivatives_nan() -> None:
    scripted, x = torch.jit.trace(lambda x: x * x.sin(), torch.randn(3, 2)), torch.randn(3, 2)
    found = laplacian(lambda x: x.exp() + scripted(x), x)
    assert all(bool(each.isnan().all()) for each in found)


def test_a_layer_norm_is_the_group_norm_of_one_group() -> None:
    # Not compared with nested differentiation of it, whose third derivatives torch 2.13 gets wrong.
    gradients = []
    for norm in (nn.LayerNorm(6), nn.GroupNorm(1, 6)):
        torch.manual_seed(1)
        model, x = nn.Sequential(nn.Linear(2, 6), norm, nn.Tanh(), nn.Linear(6, 1)), torch.randn(4, 2)
        found = laplacian(model, x)
        gradients.append((*found, *torch.autograd.grad(found.laplacian.square().sum(), list(model.parameters())[:-1])))
    assert_same(gradients[0], gradients[1], rtol=1e-12)


def test_in_evaluation_dropout_and_batch_norm_are_carried() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Tanh()).eval()
    nn.init.normal_(model[1].running_mean)
    x = torch.randn(4, 2)
    assert_same(laplacian(model, x), by_nesting(model, dict(model.named_parameters()), x), rtol=1e-12)


@pytest.mark.parametrize(
    ("x", "weights", "error", "words"),
    [
        (torch.ones(2), None, ValueError, r"x .* must be \[N, d\].*got \[2\]; x\[None\]"),
        (torch.ones(3, 2, dtype=torch.int64), None, TypeError, "floating-point"),
        (torch.ones(3, 2), [1.0], ValueError, r"weights .* \[d\] or \[k, d\] with d = 2.*got \[1\]"),
        (torch.ones(3, 2), torch.ones(0, 2), ValueError, r"got \[0, 2\]"),
    ],
)
def test_bad_arguments_are_refused(x: Tensor, weights: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        laplacian(torch.sin, x, weights=weights)


def test_a_model_of_several_outputs_is_refused() -> None:
    with pytest.raises(TypeError, match=r"one tensor, got tuple; .*model\(x\)\[0\]"):
        laplacian(lambda x: (x, x), torch.randn(3, 2))


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    "compile_it",
    [
        lambda model: torch.compile(model, backend="eager"),
        in_place,
        lambda model: nn.Sequential(in_place(model), nn.Tanh()),
    ],
)
def test_a_compiled_model_is_refused_by_name(compile_it: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(NotImplementedError, match=r"Pass the model that was compiled.*where model\.compile\(\) has"):
        laplacian(compile_it(nn.Linear(2, 1)), torch.randn(3, 2))
