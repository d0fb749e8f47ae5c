"""The model left out: `KFACOptimizer(model.parameters(), ...)`, as frameworks build their optimizers."""

import copy
import gc
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.plain import assert_identical, batch, clones, mlp, square_loss, train
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.overrides import TorchFunctionMode, _len_torch_function_stack

from kfac_optim import BlockDiagonal, Eigen, KFACOptimizer, LevenbergMarquardt, LossTerms, MonteCarlo, Structure
from kfac_optim.utils.hooks import is_on

pytestmark = pytest.mark.usefixtures("float64")

OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 2, "inverse_update_period": 3}


@pytest.fixture(autouse=True)
def _no_hook_left() -> Iterator[None]:
    """No test leaves a hook on all modules of the process."""
    yield
    if _global_forward_pre_hooks:
        gc.collect()
    left = list(_global_forward_pre_hooks)
    _global_forward_pre_hooks.clear()
    assert not left


def assert_same_training(ours: KFACOptimizer, theirs: KFACOptimizer) -> None:
    left, right = ours.state_dict(), theirs.state_dict()
    for group in (*left["param_groups"], *right["param_groups"]):
        group.pop("param_names", None)
    assert_identical(left, right)
    assert_identical(ours.factors(), theirs.factors())
    assert_identical(ours.metrics(), theirs.metrics())


class Branches(nn.Module):
    """Convolution, embedding, a tied output layer, a bare matrix, a parameter for SGD, dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv1d(1, 2, 3)
        self.embedding = nn.Embedding(5, 4)
        self.mix = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.ones(()))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(x[:, None]).flatten(1) @ self.mix
        hidden = hidden + self.embedding((x[:, 0] > 0).long())
        return self.drop(hidden) @ self.embedding.weight.T * self.scale


Net = Callable[[], nn.Module]
NETS: dict[str, Net] = {"mlp": mlp, "branches": Branches, "one layer": lambda: _seeded(lambda: nn.Linear(4, 3))}
GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "parameters": lambda m: m.parameters(),
    "list": lambda m: list(m.parameters()),
    "named": lambda m: m.named_parameters(),
    "groups": lambda m: [{"params": m.parameters()}],
    "named groups": lambda m: [{"params": list(m.named_parameters())}],
}


def _seeded(make: Net) -> nn.Module:
    torch.manual_seed(1)
    return make()


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    torch.manual_seed(start)
    train(model, optimizer, steps, start=start)


# -- what is found -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [LossTerms.EXAMPLES, LossTerms.ELEMENTS, LossTerms.SUM])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("net", NETS)
def test_parameters_alone_train_bitwise_as_the_model(net: str, given: str, rule: LossTerms) -> None:
    model, twin = NETS[net](), NETS[net]()
    ours = KFACOptimizer(GIVEN[given](model), loss_terms=rule, **OPTIONS)
    theirs = KFACOptimizer(twin, loss_terms=rule, **OPTIONS)
    for step in range(5):
        run(model, ours, 1, start=step)
        run(twin, theirs, 1, start=step)
        assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_same_training(ours, theirs)
    assert str(ours.summary()) == str(theirs.summary())


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(4, 3), lambda: nn.GRU(4, 3, batch_first=True), lambda: nn.MultiheadAttention(4, 2)]
)
@pytest.mark.parametrize("shape", [(5, 4), (3, 5, 4)])
def test_a_model_that_is_one_layer_with_a_forward_of_its_own_is_measured_from_its_first_call(
    make: Net, shape: tuple[int, ...]
) -> None:
    results = []
    for give in (lambda m: m, lambda m: m.parameters()):
        model = _seeded(make)
        optimizer = KFACOptimizer(give(model), lr=0.1, factor_update_period=1)
        torch.manual_seed(7)
        for _ in range(2):
            x = torch.randn(shape)
            optimizer.zero_grad()
            output, _ = model(x, x, x) if isinstance(model, nn.MultiheadAttention) else model(x)
            square_loss(output).backward()
            optimizer.step()
        results.append((clones(model.parameters()), optimizer.factors()))
    assert_identical(results[0], results[1])


def test_group_dicts_keep_their_numbers() -> None:
    def groups(model: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": model[2].parameters(), "lr": 0.02, "damping": 0.1},
            {"params": [model[0].bias], "momentum": 0.5},
            {"params": [model[0].weight], "factor_decay": 0.5},
        ]

    model, twin = mlp(), mlp()
    ours, theirs = KFACOptimizer(groups(model), **OPTIONS), KFACOptimizer(groups(twin), model=twin, **OPTIONS)
    run(model, ours, 5)
    run(twin, theirs, 5)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_same_training(ours, theirs)


def test_it_is_built_as_frameworks_build_any_optimizer() -> None:
    model = mlp()
    optimizer_cls: Any = KFACOptimizer
    optimizer_kwargs = {"lr": 0.1, "weight_decay": 0.01, "damping": 0.02}
    decay = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    optimizer = optimizer_cls(decay, **optimizer_kwargs)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(4):
        run(model, optimizer, 1, start=step)
        scheduler.step()
    assert optimizer.metrics()["blocks"] == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


class Wrapper(nn.Module):
    """A training module around the model, as Lightning's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.mark.parametrize("net", NETS)
def test_a_model_called_inside_another_module_trains_the_same_under_longer_names(net: str) -> None:
    model, twin = NETS[net](), NETS[net]()
    wrapper = Wrapper(model)
    ours, theirs = KFACOptimizer(model.parameters(), **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    run(wrapper, ours, 4)
    run(twin, theirs, 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert list(ours.factors()) == [f"model.{name}".rstrip(".") for name in theirs.factors()]
    assert_identical(list(ours.factors().values()), list(theirs.factors().values()))
    assert [record.name for record in ours.summary().parameters] == [name for name, _ in wrapper.named_parameters()]


@pytest.mark.parametrize("net", NETS)
def test_an_evaluation_may_come_first(net: str) -> None:
    model, twin = NETS[net](), NETS[net]()
    ours, theirs = KFACOptimizer(model.parameters(), **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    for net_ in (model, twin):
        net_.eval()
        with torch.no_grad():
            net_(batch())
        net_.train()
    run(model, ours, 3)
    run(twin, theirs, 3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_same_training(ours, theirs)


class Coder(nn.Module):
    """Encoder and decoder, called by the model or one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(1, sizes=(4, 5, 2)), mlp(2, sizes=(2, 5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def train_apart(model: Coder, optimizer: KFACOptimizer, steps: int, start: int = 0) -> None:
    for i in range(start, start + steps):
        optimizer.zero_grad()
        square_loss(model.decoder(model.encoder(batch(100 + i)))).backward()
        optimizer.step()


def test_two_models_called_one_after_the_other_are_one_for_the_loss_terms() -> None:
    """From the first step on, bitwise, under names of their own."""
    model, twin = Coder(), Coder()
    ours = KFACOptimizer([*model.encoder.parameters(), *model.decoder.parameters()], **OPTIONS)
    theirs = KFACOptimizer(twin, **OPTIONS)
    train_apart(model, ours, 4)
    train(twin, theirs, 4)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert list(ours.factors()) == ["0.0", "0.2", "1.0", "1.2"]
    assert_identical(list(ours.factors().values()), list(theirs.factors().values()))
    names = [record.name for record in ours.summary().parameters]
    assert len(set(names)) == len(names) == 8
    assert {record.block for record in ours.summary().parameters} == set(ours.factors())
    assert ours.metrics()["unpreconditioned_blocks"] == 0


def test_a_module_that_is_first_called_after_the_first_step_is_preconditioned() -> None:
    encoder, decoder, unused = mlp(1, sizes=(4, 5, 4)), mlp(2, sizes=(4, 5, 4)), nn.Parameter(torch.ones(3))
    optimizer = KFACOptimizer([*encoder.parameters(), *decoder.parameters(), unused], **OPTIONS)
    for i in range(4):
        optimizer.zero_grad()
        hidden = encoder(batch(i))
        square_loss(hidden if i < 2 else decoder(hidden)).backward()
        optimizer.step()
    folds = [(block.name, block.clock.folds) for block in optimizer._binding.coverage.blocks]
    assert folds == [("0.0", 2), ("0.2", 2), ("1.0", 1), ("1.2", 1)]
    assert len(_global_forward_pre_hooks) == 1, "nobody has called what holds the last parameter"


def test_modules_of_others_are_looked_through_once_where_a_module_is_still_to_be_called() -> None:
    model, teacher, looks = mlp(), mlp(5), []
    optimizer = KFACOptimizer([*model.parameters(), nn.Parameter(torch.ones(3))], **OPTIONS)
    train(model, optimizer, 1)
    parameters = teacher.parameters
    teacher.parameters = lambda: looks.append(0) or parameters()  # type: ignore[method-assign,assign]
    for i in range(3):
        teacher(batch(i))
    assert len(looks) == 1


def test_optimizers_of_parts_of_one_model_leave_no_mode_behind() -> None:
    model = mlp()
    optimizers = [KFACOptimizer(model[part].parameters(), **OPTIONS) for part in (0, 2)]
    for i in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        square_loss(model(batch(i))).backward()
        for optimizer in optimizers:
            optimizer.step()
        assert _len_torch_function_stack() == 0
    with ModeOfTheUser() as mode:
        model(batch())
        assert is_on(mode)
    assert _len_torch_function_stack() == 0


class ModeOfTheUser(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("first", ["functional_call", "compiled"])
def test_a_model_whose_first_forward_hides_it_is_found(first: str) -> None:
    """In the place of its parameters stand others; or a function that calls it is compiled."""
    torch._dynamo.reset()
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), **OPTIONS)
    if first == "compiled":
        call = torch.compile(lambda x: model(x), backend="eager")
    else:
        call = model
        torch.func.functional_call(model, {name: value.detach() for name, value in model.named_parameters()}, batch())
    for i in range(2):
        optimizer.zero_grad()
        square_loss(call(batch(i))).backward()
        optimizer.step()
    torch._dynamo.reset()
    assert optimizer.metrics()["measured_parameters"] == 1.0


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(4, 4, 1)], ids=["linear", "convolution"])
def test_two_models_may_share_a_weight(make: Net) -> None:
    """The second one's use of it is measured, too."""
    results = []
    for give in (lambda m: m, lambda m: m.parameters()):
        torch.manual_seed(0)
        encoder, decoder = nn.Sequential(make()), nn.Sequential(make())
        decoder[0].weight, decoder[0].bias = encoder[0].weight, encoder[0].bias
        whole = nn.Sequential(encoder, nn.Tanh(), decoder)
        optimizer = KFACOptimizer(give(whole), lr=0.1, factor_update_period=1)
        for i in range(2):
            optimizer.zero_grad()
            x = batch(i)[..., None] if isinstance(encoder[0], nn.Conv1d) else batch(i)
            square_loss(whole(x) if give(whole) is whole else decoder(encoder(x).tanh())).backward()
            optimizer.step()
        results.append((clones(whole.parameters()), next(iter(optimizer.factors().values()))))
    assert_identical(results[0], results[1])


@pytest.mark.parametrize("in_step", [True, False])
def test_a_submodule_called_first_gives_way_to_the_whole_model(in_step: bool) -> None:
    """Also where its call was part of the very step."""
    model, twin = Coder(), Coder()
    ours, theirs = KFACOptimizer(model.parameters(), **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    if in_step:
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            code = net.encoder(batch(50))
            if net is twin:
                optimizer.set_loss_terms(8)
            (square_loss(net(batch(51))) + square_loss(code)).backward()
            optimizer.step()
    else:
        with torch.no_grad():
            model.encoder(batch())
    train(model, ours, 3)
    train(twin, theirs, 3)
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_same_training(ours, theirs)


def test_a_bare_matrix_takes_the_name_it_has_in_the_whole_model() -> None:
    class Matrix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.mix

    model = nn.Sequential(Matrix())
    optimizer = KFACOptimizer(model.parameters(), lr=0.1)
    model(batch())
    assert [record.name for record in optimizer.summary().blocks] == ["0.mix"]
    train(Wrapper(model), optimizer, 1)
    assert optimizer.factors().keys() == {"model.0.mix"}
    (record,) = optimizer.summary().blocks
    assert (record.name, record.params) == ("model.0.mix", ("model.0.mix",))


def test_a_submodule_called_by_itself_after_the_model_is_no_model() -> None:
    model, twin = Coder(), Coder()
    ours, theirs = KFACOptimizer(model.parameters(), **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    for net, optimizer in ((model, ours), (twin, theirs)):
        net(batch())
        square_loss(net.decoder(net.encoder(batch()))).backward()
        with pytest.warns(UserWarning, match="number of terms that the loss is averaged over is taken to be 8"):
            optimizer.step()
        optimizer.zero_grad()
        train(net, optimizer, 2)
    assert_same_training(ours, theirs)


def test_other_modules_of_the_process_are_ignored() -> None:
    model, twin, teacher = mlp(), mlp(), mlp(5)
    ours, theirs = KFACOptimizer(model.parameters(), **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    for i in range(3):
        target = teacher(batch(i)).detach()
        for net, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            loss = nn.MSELoss()(net(batch(i)), target)
            teacher(batch(i))
            loss.backward()
            optimizer.step()
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_same_training(ours, theirs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.modules())


def test_a_module_that_the_model_hides_is_no_second_model() -> None:
    class Hiding(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.shown, self.hidden = nn.Linear(4, 4), [inner]

        def forward(self, x: Tensor) -> Tensor:
            return self.hidden[0](self.shown(x))

    results = []
    for given in (True, False):
        torch.manual_seed(0)
        inner = nn.Linear(4, 3)
        model = Hiding(inner)
        params = [*model.parameters(), *inner.parameters()]
        optimizer = KFACOptimizer(params, model=model if given else None, **OPTIONS)
        train(model, optimizer, 3)
        results.append((clones(params), optimizer.factors()))
    assert results[0][1].keys() == {"shown"}
    assert_identical(results[0], results[1])


def test_a_lazy_layer_joins_once_it_has_a_shape() -> None:
    results = []
    for give in (lambda m: m, lambda m: m.parameters()):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LazyLinear(3))
        optimizer = KFACOptimizer(give(model), lr=0.1, factor_update_period=1)
        torch.manual_seed(4)
        train(model, optimizer, 3)
        results.append((clones(model.parameters()), optimizer.factors()))
        assert optimizer.factors().keys() == {"0", "2"}
    assert_identical(results[0], results[1])


@pytest.mark.parametrize("when", ["before the forward", "after the forward", "after a step"])
def test_a_group_may_be_added(when: str) -> None:
    model, twin = mlp(), mlp()
    ours = KFACOptimizer(model[0].parameters(), **OPTIONS)
    theirs = KFACOptimizer(twin[0].parameters(), model=twin, **OPTIONS)
    for net, optimizer in ((model, ours), (twin, theirs)):
        if when == "after the forward":
            net(batch())
        elif when == "after a step":
            train(net, optimizer, 1, start=9)
            optimizer.zero_grad()
        optimizer.add_param_group({"params": list(net[2].parameters())})
        train(net, optimizer, 3)
    assert ours.factors().keys() == {"0", "2"}
    assert_identical(clones(model.parameters()), clones(twin.parameters()))
    assert_same_training(ours, theirs)


def test_a_model_is_found_by_parameters_that_were_added() -> None:
    model = mlp()
    optimizer = KFACOptimizer([nn.Parameter(torch.zeros(2))], lr=0.1)
    optimizer.add_param_group({"params": list(model.parameters())})
    train(model, optimizer, 1)
    assert optimizer.factors().keys() == {"0", "2"}


def test_choices_by_name_follow_the_names_of_the_model_that_is_called() -> None:
    model = mlp()
    optimizer = KFACOptimizer(
        model.parameters(),
        lr=0.1,
        inverse={"model.2": Eigen()},
        structure={"model.0": (Structure.DENSE, Structure.DIAGONAL)},
        factor_update_period=1,
    )
    with torch.no_grad():
        model(batch())  # by itself it has other names
    train(Wrapper(model), optimizer, 2)
    shown = {record.name: (record.inverse, record.structure[1]) for record in optimizer.summary().blocks}
    assert shown == {"model.0": ("Cholesky()", Structure.DIAGONAL), "model.2": (repr(Eigen()), Structure.DENSE)}


# -- the end of the search -----------------------------------------------------------------------------------------


def test_the_search_ends_with_the_first_step_that_has_gradients() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), lr=0.1, factor_update_period=1)
    assert len(_global_forward_pre_hooks) == 1
    optimizer.step()
    assert len(_global_forward_pre_hooks) == 1
    train(model, optimizer, 1)
    assert not _global_forward_pre_hooks


@pytest.mark.parametrize("called", [False, True])
def test_a_dropped_optimizer_takes_its_hook_along(called: bool) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), lr=0.1)
    gone = weakref.ref(optimizer)
    if called:
        model(batch())
    del optimizer
    gc.collect()
    assert gone() is None
    assert not _global_forward_pre_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("called", [False, True])
def test_remove_hooks_ends_the_search(called: bool) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model[0].parameters(), lr=0.1)
    if called:
        model(batch())
    optimizer.remove_hooks()
    assert not _global_forward_pre_hooks
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_failing_first_forward_is_found_all_the_same() -> None:
    model, twin = mlp(), mlp()
    ours, theirs = KFACOptimizer(model.parameters(), **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    for net, optimizer in ((model, ours), (twin, theirs)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(batch(dim=9))
        train(net, optimizer, 2)
    assert_same_training(ours, theirs)


# -- nothing found, and messages ---------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_where_no_module_is_called_the_user_is_told_and_steps_are_those_of_sgd(momentum: float) -> None:
    params, twins = ([nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.1}
    optimizer, sgd = KFACOptimizer(params, **options), torch.optim.SGD(twins, **options)
    for step in range(3):
        for (weight, bias), each in ((params, optimizer), (twins, sgd)):
            each.zero_grad()
            square_loss(torch.sin(batch(step, dim=3) @ weight + bias)).backward()
            if each is optimizer and step == 0:
                with pytest.warns(UserWarning, match="no call of a module that holds the parameters was seen") as seen:
                    optimizer.step()
                assert [str(warning.filename) for warning in seen] == [__file__]
            else:
                each.step()
        assert_identical(clones(params), clones(twins))
    assert {record.reason for record in optimizer.summary().parameters} == {
        "no call of a module that holds it was seen yet"
    }


def test_a_model_without_a_known_layer_warns_at_the_first_step_at_the_users_line() -> None:
    model = nn.Sequential(nn.PReLU(4))
    optimizer = KFACOptimizer(model.parameters(), lr=0.1, factor_update_period=1)
    square_loss(model(batch())).backward()
    with pytest.warns(UserWarning, match="nothing is preconditioned; every parameter takes the plain SGD step") as seen:
        optimizer.step()
    assert [str(warning.filename) for warning in seen] == [__file__]
    optimizer.step()


def test_every_warning_of_the_constructor_and_of_step_points_at_the_users_line() -> None:
    with pytest.warns(UserWarning, match="nothing is preconditioned") as seen:
        KFACOptimizer(nn.Sequential(nn.PReLU(4)), lr=0.1)
    assert [str(warning.filename) for warning in seen] == [__file__]
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)

    def closure() -> float:
        return 0.0

    with pytest.warns(UserWarning, match="no statistics") as seen:
        optimizer.step(closure)
    assert [str(warning.filename) for warning in seen] == [__file__]


def test_a_step_without_gradients_says_nothing_and_goes_on_looking() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), lr=0.1, factor_update_period=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        train(model, optimizer, 1)
    assert optimizer.metrics()["blocks"] == 2


@pytest.mark.parametrize("argument", ["skip_layers", "inverse", "structure"])
def test_a_pattern_that_matches_nothing_raises_at_the_first_step_before_anything_changes(argument: str) -> None:
    value: Any = {"skip_layers": ["head"], "inverse": {"head": Eigen()}, "structure": {"head": (Structure.DENSE,) * 2}}
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), lr=0.1, momentum=0.9, **{argument: value[argument]})
    before = clones(model.parameters())
    square_loss(model(batch())).backward()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{argument} entry 'head' matches no module"):
            optimizer.step()
        assert_identical(clones(model.parameters()), before)
        assert not any("momentum_buffer" in state for state in optimizer.state.values())
    optimizer.remove_hooks()


def test_skipped_layers_are_skipped() -> None:
    model, twin = mlp(), mlp()
    ours = KFACOptimizer(model.parameters(), skip_layers=["0"], **OPTIONS)
    theirs = KFACOptimizer(twin, skip_layers=["0"], **OPTIONS)
    run(model, ours, 3)
    run(twin, theirs, 3)
    assert ours.factors().keys() == {"2"}
    assert_same_training(ours, theirs)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("when", ["before the first forward", "after a forward", "after a step"])
@pytest.mark.parametrize("wrapped", ["neither", "saved", "loaded", "both"])
@pytest.mark.parametrize("saved_by", ["model", "parameters"])
@pytest.mark.parametrize("stop", [1, 3])
@pytest.mark.parametrize("net", NETS)
def test_saved_reloaded_and_continued_equals_uninterrupted_bitwise(
    net: str, stop: int, saved_by: str, wrapped: str, when: str
) -> None:
    def called(model: nn.Module, here: str) -> nn.Module:
        return Wrapper(model) if wrapped in (here, "both") else model

    def go_on(model: nn.Module, optimizer: KFACOptimizer, start: int, stop: int) -> None:
        for step in range(start, stop):
            run(model, optimizer, 1, start=step)

    whole, first, second = (NETS[net]() for _ in range(3))
    go_on(whole, uninterrupted := KFACOptimizer(whole, **OPTIONS), 0, 6)
    saving = called(first, "saved")
    go_on(saving, optimizer := KFACOptimizer(saving if saved_by == "model" else first.parameters(), **OPTIONS), 0, stop)
    saved = through_a_file({"model": first.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = KFACOptimizer(second.parameters(), **OPTIONS)
    loading = called(second, "loaded")
    if when == "after a forward":
        loading(batch())
    elif when == "after a step":
        train(loading, resumed, 1, start=30)
    second.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    kept = resumed.state_dict()["state"]
    for index, state in saved["optimizer"]["state"].items():
        if "kfac" in state:
            assert_identical(kept[index]["kfac"]["inverse"], state["kfac"]["inverse"])
    go_on(loading, resumed, stop, 6)
    assert_identical(second.state_dict(), whole.state_dict())
    assert_identical(list(resumed.factors().values()), list(uninterrupted.factors().values()))
    assert_identical(resumed.metrics(), uninterrupted.metrics())


def test_a_checkpoint_waits_unchanged_until_the_model_is_called() -> None:
    """Saved again before the first forward, it is all there; and it is of use the second time."""
    model, second, third, whole = (Branches() for _ in range(4))
    run(whole, uninterrupted := KFACOptimizer(whole, **OPTIONS), 3)
    run(whole, uninterrupted, 2, start=3)
    run(model, optimizer := KFACOptimizer(model, **OPTIONS), 3)
    saved = through_a_file(optimizer.state_dict())
    waiting = KFACOptimizer(second.parameters(), **OPTIONS)
    waiting.load_state_dict(copy.deepcopy(saved))
    assert_identical(waiting.state_dict(), saved)
    again = through_a_file(waiting.state_dict())
    third.load_state_dict(model.state_dict())
    resumed = KFACOptimizer(third.parameters(), **OPTIONS)
    resumed.load_state_dict(again)
    run(third, resumed, 2, start=3)
    assert_identical(clones(third.parameters()), clones(whole.parameters()))
    assert_same_training(resumed, uninterrupted)


@pytest.mark.parametrize("seen", ["before", "after"])
def test_two_models_that_are_first_called_in_another_order_resume(seen: str) -> None:
    def new(encoder: nn.Module, decoder: nn.Module) -> KFACOptimizer:
        return KFACOptimizer([*encoder.parameters(), *decoder.parameters()], lr=0.1, factor_update_period=1)

    def step(optimizer: KFACOptimizer) -> None:
        optimizer.zero_grad()
        models[1](models[0](batch())).square().mean().backward()
        optimizer.step()

    models = mlp(), mlp(sizes=(3, 5, 4))
    optimizer = new(*models)
    step(optimizer)
    state = optimizer.state_dict()
    resumed = new(*models)
    if seen == "after":
        resumed.load_state_dict(state)
    with torch.no_grad():
        models[1](batch(dim=3))
        models[0](batch())
    if seen == "before":
        resumed.load_state_dict(state)
    factors = {name.partition(".")[2]: pair for name, pair in optimizer.factors().items() if name.startswith("0.")}
    found = {name.partition(".")[2]: pair for name, pair in resumed.factors().items() if name.startswith("1.")}
    assert_identical(found, factors)
    step(resumed)


def test_two_models_called_one_after_the_other_resume_bitwise() -> None:
    whole, first, second = Coder(), Coder(), Coder()
    train_apart(whole, uninterrupted := KFACOptimizer(whole.parameters(), **OPTIONS), 5)
    train_apart(first, optimizer := KFACOptimizer(first.parameters(), **OPTIONS), 2)
    saved = through_a_file(optimizer.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    resumed = KFACOptimizer(second.parameters(), **OPTIONS)
    resumed.load_state_dict(saved)
    train_apart(second, resumed, 3, start=2)
    assert_identical(clones(second.parameters()), clones(whole.parameters()))
    assert_same_training(resumed, uninterrupted)


def test_a_lazy_model_takes_its_checkpoint() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LazyLinear(3))

    for give in (lambda m: m, lambda m: m.parameters()):
        model, second = make(), make()
        train(model, optimizer := KFACOptimizer(model, **OPTIONS), 3)
        resumed = KFACOptimizer(give(second), **OPTIONS)
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
        second.load_state_dict(model.state_dict())
        train(model, optimizer, 2, start=3)
        train(second, resumed, 2, start=3)
        assert resumed.factors().keys() == optimizer.factors().keys()


@pytest.mark.parametrize("when", ["before the first forward", "after a forward"])
def test_a_prefix_is_accepted_only_where_the_model_is_left_out_and_only_up_to_a_dot(when: str) -> None:
    class Other(Wrapper):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.xmodel = self._modules.pop("model")

        def forward(self, x: Tensor) -> Tensor:
            return self.xmodel(x)

    model = mlp()
    train(wrapper := Wrapper(model), optimizer := KFACOptimizer(wrapper, lr=0.1), 1)
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"it has 'model.0' where '0' should stand"):
        KFACOptimizer(mlp(), lr=0.1).load_state_dict(saved)
    second = mlp()
    resumed = KFACOptimizer(second.parameters(), lr=0.1)
    other = Other(second)
    if when == "after a forward":
        other(batch())
        with pytest.raises(ValueError, match=r"it has 'model.0' where 'xmodel.0' should stand"):
            resumed.load_state_dict(saved)
    else:
        resumed.load_state_dict(saved)
        with pytest.raises(ValueError, match=r"it has 'model.0' where 'xmodel.0' should stand"):
            other(batch())
    resumed.remove_hooks()


def test_a_refused_load_changes_nothing_of_what_waits() -> None:
    model = mlp()
    train(model, optimizer := KFACOptimizer(model, lr=0.1, factor_update_period=1), 2)
    resumed = KFACOptimizer([{"params": list(model[0].parameters())}, {"params": list(model[2].parameters())}], lr=0.1)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        resumed.load_state_dict(optimizer.state_dict())
    assert not resumed.state_dict()["state"]


class Products(nn.Module):
    """Its matrices are shown by its forwards alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Parameter(torch.randn(4, n, dtype=torch.float64)) for n in (4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first).tanh() @ self.second


@pytest.mark.parametrize("way", ["saved", "copied"])
@pytest.mark.parametrize("given", [True, False], ids=["model", "parameters"])
def test_what_depends_on_the_number_of_the_step_goes_on_where_no_layer_is_known_before_a_forward(
    given: bool, way: str
) -> None:
    """The targets that are drawn, and the steps at which λ adapts."""

    def go_on(model: nn.Module, criterion: nn.Module, optimizer: KFACOptimizer, start: int, stop: int) -> None:
        for step in range(start, stop):

            def closure(seed: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = criterion(model(batch(seed)), torch.arange(8) % 3)
                loss.backward()
                return loss

            optimizer.step(closure)

    def make() -> tuple[nn.Module, nn.Module, KFACOptimizer]:
        model, criterion = Products(), nn.CrossEntropyLoss()
        choices = {"estimate": MonteCarlo(criterion), "adapt_damping": LevenbergMarquardt(interval=4)}
        named = model if given else model.parameters()
        return model, criterion, KFACOptimizer(named, lr=0.01, factor_update_period=1, **choices)

    whole = make()
    go_on(*whole, 0, 3)
    resumed = copy.deepcopy(whole) if way == "copied" else make()
    if way == "saved":
        resumed[0].load_state_dict(whole[0].state_dict())
        resumed[2].load_state_dict(through_a_file(whole[2].state_dict()))
    for each in (whole, resumed):
        go_on(*each, 3, 6)
    assert_identical(resumed[0].state_dict(), whole[0].state_dict())
    assert resumed[2].param_groups[0]["damping"] == whole[2].param_groups[0]["damping"] != 1e-3


def test_a_state_from_before_the_first_forward_begins_the_run_anew() -> None:
    """Tools that look for a rate save the state, train, and load it back into the same optimizer."""
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), **OPTIONS)
    at_first = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained = []
    for _ in range(2):
        model.load_state_dict(at_first[0])
        optimizer.load_state_dict(at_first[1])
        train(model, optimizer, 5)
        trained.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
    assert_identical(*trained)


def test_an_error_while_the_model_is_found_is_told_again_at_the_next_forward() -> None:
    """As where a cell of a notebook is run again."""
    model = mlp()
    both = BlockDiagonal(2), BlockDiagonal(2)
    optimizer = KFACOptimizer(model.parameters(), lr=0.1, structure=both)
    for _ in range(2):
        with pytest.raises(ValueError, match="cuts both factors into blocks"):
            model(batch())
    assert optimizer.summary().blocks == ()


def test_the_first_forward_may_be_an_evaluation_in_inference_mode() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), lr=0.1)
    with torch.inference_mode():
        model(batch())
    train(model, optimizer, 2)
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_a_group_that_is_added_for_another_module_has_it_found() -> None:
    """As a backbone that was frozen at first, and is called beside the head."""
    backbone, head = nn.Linear(4, 4), mlp()
    optimizer = KFACOptimizer(head.parameters(), lr=0.1, factor_update_period=1)

    def step() -> None:
        optimizer.zero_grad()
        square_loss(head(backbone(batch()))).backward()
        optimizer.step()

    step()
    optimizer.add_param_group({"params": list(backbone.parameters())})
    step()
    step()
    assert {block.layer for block in optimizer.summary().blocks} == {"Linear"}
    assert len(optimizer.summary().blocks) == 3
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_a_forward_with_other_parameters_after_an_unfreezing_leaves_the_blocks() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    train(model, optimizer, 2)
    model[0].requires_grad_()
    with torch.enable_grad():
        others = {name: param.detach() for name, param in model.named_parameters()}
        torch.func.functional_call(model, others, (batch(),))
    train(model, optimizer, 3)
    assert len(optimizer.summary().blocks) == 2
    assert optimizer.metrics()["measured_parameters"] == 1.0


def test_a_copy_of_a_released_optimizer_of_parameters_goes_on_preconditioned() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 3)
    optimizer.remove_hooks()
    other, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, 2)
    train(other, twin, 2)
    assert_identical(other.state_dict(), model.state_dict())


def test_groups_that_were_assigned_are_those_that_are_stepped_and_loaded() -> None:
    """As Lightning's finetuning callbacks do before they restore a checkpoint."""
    model = mlp()
    first = KFACOptimizer(model[0].parameters(), lr=0.1, model=model, momentum=0.9)
    first.add_param_group({"params": list(model[2].parameters())})
    train(model, first, 3)
    other = copy.deepcopy(model)
    second = KFACOptimizer(other[0].parameters(), lr=0.1, model=other, momentum=0.9)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in first.param_groups]
    second.param_groups = [
        {**numbers, "params": list(part.parameters())}
        for numbers, part in zip(groups, (other[0], other[2]), strict=True)
    ]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(model, first, 2)
    train(other, second, 2)
    assert_identical(other.state_dict(), model.state_dict())
