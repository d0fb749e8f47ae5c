"""Every public argument refuses a bad value with an error that names the argument, the value and the remedy."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.plain import assert_identical, batch, clones, mlp, square_loss, train
from torch import nn

import kfac_optim
from kfac_optim import (
    Background,
    Cholesky,
    Empirical,
    ExponentialDecay,
    HyperparameterScheduler,
    IterateAverage,
    KFACOptimizer,
    LevenbergMarquardt,
    LossTerms,
    QuadraticModel,
    Structure,
    Subsample,
    WeightSharing,
)
from kfac_optim.layers import LinearAdapter

NAN, INF = float("nan"), float("inf")
DENSE, IDENTITY = Structure.DENSE, Structure.IDENTITY
MODULES = r"Module names are '0', '1', '2'; a pattern is a glob over these, or a class"

# argument → (bad value, kind of error, what the message must say: argument, value, and what it should be)
BAD: dict[str, list[tuple[Any, type[Exception], str]]] = {
    "params": [
        (None, TypeError, r"params must be the model, or parameters.*got None\. Pass the model itself"),
        (3, TypeError, r"params must be the model, or parameters.*got 3\. Pass the model itself"),
    ],
    "model": [
        ("net", TypeError, r"model must be an nn\.Module, got (str|'net')"),
        (nn.Linear, TypeError, r"model must be an nn\.Module, got "),
        (nn.Linear(2, 2), TypeError, r"params is a module and model is another; pass one of them"),
    ],
    "lr": [
        ("0.1", TypeError, r"lr must be a number.*got '0\.1'"),
        (None, TypeError, r"lr must be a number.*got None"),
        (True, TypeError, r"lr must be a number.*got True"),
        (1j, TypeError, r"lr must be a number.*got 1j"),
        (-0.1, ValueError, r"lr must be finite, at least 0, got -0\.1"),
        (NAN, ValueError, r"lr must be finite, at least 0, got nan"),
        (INF, ValueError, r"lr must be finite, at least 0, got inf"),
        (torch.ones(2), ValueError, r"a tensor lr must have 1 element, got 2"),
        (torch.tensor(-0.1), ValueError, r"lr must be finite, at least 0, got -0\.1"),
        (torch.tensor(NAN), ValueError, r"lr must be finite, at least 0, got nan"),
    ],
    "momentum": [
        ("0.9", TypeError, r"momentum must be a number, got '0\.9'"),
        (None, TypeError, r"momentum must be a number, got None"),
        (-0.9, ValueError, r"momentum must be finite, at least 0, got -0\.9"),
        (NAN, ValueError, r"momentum must be finite, at least 0, got nan"),
    ],
    "dampening": [
        ("0.1", TypeError, r"dampening must be a number, got '0\.1'"),
        (NAN, ValueError, r"dampening must be finite, got nan"),
        (INF, ValueError, r"dampening must be finite, got inf"),
    ],
    "weight_decay": [
        ("0.1", TypeError, r"weight_decay must be a number, got '0\.1'"),
        (-0.1, ValueError, r"weight_decay must be finite, at least 0, got -0\.1"),
        (NAN, ValueError, r"weight_decay must be finite, at least 0, got nan"),
        (torch.ones(2), ValueError, r"a tensor weight_decay must have 1 element, got 2"),
    ],
    "nesterov": [
        (True, ValueError, r"nesterov requires momentum above 0 and dampening 0, got momentum=0(\.0)? and dampening=0"),
        ("yes", TypeError, r"nesterov must be True or False, got 'yes'"),
        (None, TypeError, r"nesterov must be True or False, got None"),
        (1, TypeError, r"nesterov must be True or False, got 1"),
    ],
    "damping": [
        ("1e-3", TypeError, r"damping must be a number, got '1e-3'"),
        (math.sqrt, TypeError, r"damping must be a number, got .* is set by a scheduler: see HyperparameterScheduler"),
        (None, TypeError, r"damping must be a number, got None"),
        (0.0, ValueError, r"damping must be finite, above 0, got 0\.0"),
        (-1e-3, ValueError, r"damping must be finite, above 0, got -0\.001"),
        (NAN, ValueError, r"damping must be finite, above 0, got nan"),
        (INF, ValueError, r"damping must be finite, above 0, got inf"),
    ],
    "factor_decay": [
        ("0.95", TypeError, r"factor_decay must be a number, got '0\.95'"),
        (0.0, ValueError, r"factor_decay must be finite, above 0 and at most 1, got 0\.0"),
        (1.01, ValueError, r"factor_decay must be finite, above 0 and at most 1, got 1\.01"),
        (-0.5, ValueError, r"factor_decay must be finite, above 0 and at most 1, got -0\.5"),
        (NAN, ValueError, r"factor_decay must be finite, above 0 and at most 1, got nan"),
    ],
    **{
        period: [
            (1.0, TypeError, rf"{period} must be an integer, got 1\.0"),
            ("1", TypeError, rf"{period} must be an integer, got '1'"),
            (True, TypeError, rf"{period} must be an integer, got True"),
            (None, TypeError, rf"{period} must be an integer, got None"),
            (NAN, TypeError, rf"{period} must be an integer, got nan"),
            (0, ValueError, rf"{period} must be at least 1, got 0"),
            (-3, ValueError, rf"{period} must be at least 1, got -3"),
        ]
        for period in ("factor_update_period", "inverse_update_period")
    },
    "kl_clip": [
        ("1e-3", TypeError, r"kl_clip \(None turns it off\) must be a number, got '1e-3'"),
        (0.0, ValueError, r"kl_clip \(None turns it off\) must be finite, above 0, got 0\.0"),
        (-1e-3, ValueError, r"kl_clip \(None turns it off\) must be finite, above 0, got -0\.001"),
        (NAN, ValueError, r"kl_clip \(None turns it off\) must be finite, above 0, got nan"),
    ],
    "inverse": [
        ("cholesky", TypeError, r"inverse must be an Inverse, an InverseRule or a mapping .*, got 'cholesky'"),
        (
            Cholesky,
            TypeError,
            r"inverse must be an Inverse, .*, got <class .*Cholesky'>\. Pass an instance: Cholesky",
        ),
        ({"0": None}, TypeError, r"inverse must be an Inverse, an InverseRule or a mapping .*, got None"),
        ({"encoder": Cholesky()}, ValueError, rf"inverse entry 'encoder' matches no module\. {MODULES}"),
        ({nn.Conv2d: Cholesky()}, ValueError, rf"inverse entry 'Conv2d' matches no module\. {MODULES}"),
        ({3: Cholesky()}, TypeError, r"an entry of inverse must be a name glob or a subclass of nn\.Module, got 3"),
    ],
    "refresh": [
        (
            "staggered",
            TypeError,
            r"refresh must be Together\(\), Staggered\(\) or Background\(.*, got 'staggered'",
        ),
        (Background, TypeError, r"got <class .*Background'>\. Pass an instance, such as refresh=Background\(Stagg"),
        (None, TypeError, r"refresh must be .*, got None"),
    ],
    "estimate": [
        ("empirical", TypeError, r"estimate must be an Estimate, got 'empirical'"),
        (
            Empirical,
            TypeError,
            r"estimate must be an Estimate, got <class .*Empirical'>\. Pass an instance: Empirical\(",
        ),
        (
            nn.MSELoss(),
            TypeError,
            r"estimate must be an Estimate, got MSELoss\(\)\. To .* pass MonteCarlo\(criter",
        ),
        (None, TypeError, r"estimate must be an Estimate, got None"),
    ],
    "loss_terms": [
        ("examples", TypeError, r"loss_terms must be a LossTerms, got 'examples'"),
        (8, TypeError, r"loss_terms must be a LossTerms, got 8"),
        (LossTerms, TypeError, r"loss_terms must be a LossTerms, got <enum 'LossTerms'>"),
    ],
    "weight_sharing": [
        ("reduce", TypeError, r"weight_sharing must be a WeightSharing or a mapping .*, got 'reduce'"),
        ({"0": "reduce"}, TypeError, r"weight_sharing must be a WeightSharing or a mapping .*, got 'reduce'"),
        ({"conv*": WeightSharing.REDUCE}, ValueError, rf"weight_sharing entry 'conv\*' matches no module\. {MODULES}"),
        ({int: WeightSharing.REDUCE}, TypeError, r"an entry of weight_sharing must be a name glob.*got <class 'int'>"),
    ],
    "structure": [
        ("dense", TypeError, r"structure must be .*, got 'dense'"),
        (DENSE, TypeError, r"structure must be .*, got <Structure\.DENSE"),
        ((DENSE,), TypeError, r"structure must be a pair of Structure or BlockDiagonal values for \(A, G\), got \(<S"),
        ((DENSE, "diagonal"), TypeError, r"structure must be a pair of Structure or .*'diagonal'"),
        ((IDENTITY, IDENTITY), ValueError, r"structure with both factors the identity.*: use skip_layers"),
        ({"0": (IDENTITY, IDENTITY)}, ValueError, r"structure with both factors the identity.*: use skip_layers"),
        ({"encoder": (DENSE, DENSE)}, ValueError, rf"structure entry 'encoder' matches no module\. {MODULES}"),
    ],
    "preconditioner_damping": [
        ("1e-3", TypeError, r"preconditioner_damping \(None is damping\) must be a number, got '1e-3'"),
        (0.0, ValueError, r"preconditioner_damping \(None is damping\) must be finite, above 0, got 0\.0"),
        (NAN, ValueError, r"preconditioner_damping \(None is damping\) must be finite, above 0, got nan"),
    ],
    "l2_in_curvature": [
        (None, TypeError, r"l2_in_curvature must be True or False, got None"),
        (0.1, TypeError, r"l2_in_curvature must be True or False, got 0\.1"),
    ],
    "step_size": [
        (None, TypeError, r"step_size must be a StepSize, got None"),
        (QuadraticModel, TypeError, r"step_size must be a StepSize, got <class .*>\. Pass an instance: QuadraticModel"),
        (
            QuadraticModel(),
            TypeError,
            r"QuadraticModel\(\) needs the curvature of the loss, and estimate=Empirical\(\)",
        ),
    ],
    "average": [
        (0.99, TypeError, r"average \(None is no average\) must be an IterateAverage, got 0\.99"),
        (IterateAverage, TypeError, r"must be an IterateAverage, got <class .*IterateAverage'>\. Pass an instance"),
    ],
    "adapt_damping": [
        (True, TypeError, r"adapt_damping must be a LevenbergMarquardt, got True"),
        (LevenbergMarquardt(), TypeError, r"LevenbergMarquardt\(.*\) needs the curvature of the loss"),
    ],
    "subsample": [
        (256, TypeError, r"subsample must be a Subsample or a mapping .*, got 256"),
        ({"0": None}, TypeError, r"subsample must be a Subsample or a mapping .*, got None"),
        ({"conv*": Subsample(256)}, ValueError, rf"subsample entry 'conv\*' matches no module\. {MODULES}"),
    ],
    "skip_layers": [
        ("0", TypeError, r"skip_layers must be a sequence of .*, got '0'; wrap a single one in a list"),
        (
            nn.Linear,
            TypeError,
            r"skip_layers must be a sequence .*got <class .*Linear'>; wrap a single one in",
        ),
        (None, TypeError, r"skip_layers must be a sequence of .*, got None"),
        ([3], TypeError, r"an entry of skip_layers must be a name glob or a subclass of nn\.Module, got 3"),
        ([int], TypeError, r"an entry of skip_layers must be a name glob.*got <class 'int'>"),
        ([nn.Linear(2, 2)], TypeError, r"an entry of skip_layers must be a name glob.*got Linear"),
        (["head"], ValueError, rf"skip_layers entry 'head' matches no module\. {MODULES}"),
        (["0", "encoder.*"], ValueError, rf"skip_layers entry 'encoder\.\*' matches no module\. {MODULES}"),
        ([nn.Conv2d], ValueError, rf"skip_layers entry 'Conv2d' matches no module\. {MODULES}"),
        ([""], ValueError, r"skip_layers entry ''"),
    ],
    "adapters": [
        (None, TypeError, r"adapters must be a Mapping, got None"),
        ([nn.Linear], TypeError, r"adapters must be a Mapping, got \[<class"),
        ({nn.Linear: None}, TypeError, r"adapter of Linear must be a LayerAdapter, got None"),
        (
            {nn.Linear: LinearAdapter},
            TypeError,
            r"adapter of Linear must be a LayerAdapter, got <class",
        ),
        ({"0": LinearAdapter()}, TypeError, r"adapters must .*(class|nn\.Module).*got '0'"),
        ({int: LinearAdapter()}, TypeError, r"adapters must .*nn\.Module.*got <class 'int'>"),
    ],
    "max_factor_dim": [
        (0, ValueError, r"max_factor_dim must be at least 1, got 0"),
        (-1, ValueError, r"max_factor_dim must be at least 1, got -1"),
        (1024.0, TypeError, r"max_factor_dim must be an integer, got 1024\.0"),
        (None, TypeError, r"max_factor_dim must be an integer, got None"),
        (NAN, TypeError, r"max_factor_dim must be an integer, got nan"),
    ],
    "factor_dtype": [
        ("float32", TypeError, r"factor_dtype must be a torch\.dtype or None, got 'float32'"),
        (float, TypeError, r"factor_dtype must be a torch\.dtype or None, got <class 'float'>"),
        (torch.int32, ValueError, r"factor_dtype must be one of torch\.float64, .* got torch\.int32"),
        (torch.float16, ValueError, r"factor_dtype .*float16 cannot hold squared gradients.*, got torch\.float16"),
        (torch.complex64, ValueError, r"factor_dtype must be one of torch\.float64, .* got torch\.complex64"),
    ],
    "nonfinite_limit": [
        (0, ValueError, r"nonfinite_limit \(None is no limit\) must be at least 1, got 0"),
        (2.5, TypeError, r"nonfinite_limit \(None is no limit\) must be an integer, got 2\.5"),
    ],
    "grad_scaler": [(1024.0, TypeError, r"grad_scaler must be a GradScaler, got 1024\.0")],
    "include_factors": [
        (None, TypeError, r"include_factors must be True or False, got None"),
        ("yes", TypeError, r"include_factors must be True or False, got 'yes'"),
    ],
    "distributed": [
        (True, TypeError, r"distributed must be None, False or a DistributedConfig\(...\), got True"),
        ("nccl", TypeError, r"distributed must be None, False or a DistributedConfig\(...\), got 'nccl'"),
        (0, TypeError, r"distributed must be None, False or a DistributedConfig\(...\), got 0"),
    ],
    "maximize": [
        ("yes", TypeError, r"maximize must be True or False, got 'yes'"),
        (None, TypeError, r"maximize must be True or False, got None"),
    ],
    "foreach": [("yes", TypeError, r"foreach must be True, False or None, got 'yes'")],
    "fused": [("yes", TypeError, r"fused must be True, False or None, got 'yes'")],
}
CASES = [
    pytest.param(argument, value, error, message, id=f"{argument}-{i}")
    for argument, cases in BAD.items()
    for i, (value, error, message) in enumerate(cases)
]


def test_every_argument_of_the_constructor_has_a_bad_value() -> None:
    arguments = set(inspect.signature(KFACOptimizer.__init__).parameters) - {"self"}
    assert arguments == set(BAD)


@pytest.mark.parametrize(("argument", "value", "error", "message"), CASES)
def test_a_bad_argument_is_refused_by_name_with_its_value_and_the_remedy(
    argument: str, value: Any, error: type[Exception], message: str
) -> None:
    model = mlp()
    arguments = {"params": model, argument: value}
    with pytest.raises(error, match=f"kfac_optim: .*{message}"):
        KFACOptimizer(**arguments)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()), "left a hook"


def group_at_construction(**numbers: Any) -> None:
    model = mlp()
    KFACOptimizer([{"params": model[0].parameters()}, {"params": model[2].parameters(), **numbers}], model=model)


def group_added(**numbers: Any) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model[0].parameters(), model=model)
    optimizer.add_param_group({"params": model[2].parameters(), **numbers})


GROUP_NUMBERS = sorted((set(BAD) & set(KFACOptimizer(mlp()).param_groups[0])) - {"params"})


@pytest.mark.parametrize("build", [group_at_construction, group_added])
@pytest.mark.parametrize(
    ("argument", "value", "error"), [case.values[:3] for case in CASES if case.values[0] in GROUP_NUMBERS]
)
def test_a_bad_number_of_a_group_is_refused_by_name_value_and_group(
    argument: str, value: Any, error: type[Exception], build: Callable[..., Any]
) -> None:
    with pytest.raises(error, match=r"kfac_optim: .* in param group 1") as refused:
        build(**{argument: value})
    assert argument in str(refused.value)
    conflict = argument == "nesterov" and value is True
    assert conflict or isinstance(value, torch.Tensor) or repr(value) in str(refused.value)


def test_foreach_and_fused_together_are_refused_in_a_group_too() -> None:
    with pytest.raises(ValueError, match=r"foreach and fused cannot both be True; set one of them"):
        KFACOptimizer(mlp(), foreach=True, fused=True)
    model = mlp()
    with pytest.raises(ValueError, match=r"foreach and fused in param group 0 cannot both be True"):
        KFACOptimizer([{"params": model.parameters(), "foreach": True}], model=model, fused=True)


@pytest.mark.parametrize("factors", [{"momentum": 0.9, "dampening": 0.1}, {"momentum": 0.0}])
def test_nesterov_is_refused_as_by_sgd(factors: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Nesterov momentum requires"):
        torch.optim.SGD(mlp().parameters(), nesterov=True, **factors)
    with pytest.raises(ValueError, match=r"nesterov requires momentum above 0 and dampening 0, got momentum="):
        KFACOptimizer(mlp(), nesterov=True, **factors)


@pytest.mark.parametrize(
    "number",
    [np.float64(0.5), np.float32(0.5), 1, np.int64(1)],
    ids=lambda number: type(number).__name__,
)
@pytest.mark.parametrize("argument", ["lr", "momentum", "weight_decay", "damping", "factor_decay", "kl_clip"])
def test_numbers_of_numpy_are_numbers(argument: str, number: Any) -> None:
    """As for SGD: sweeps and schedules hand them over."""
    model = mlp()
    optimizer = KFACOptimizer(model, **{argument: number})
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    kept = optimizer.param_groups[0][argument]
    assert kept == number
    assert type(kept) in (int, float), "torch.load(weights_only=True) refuses any other"


def test_a_rate_that_a_schedule_takes_from_numpy_is_a_number_in_checkpoints(tmp_path: Path) -> None:
    optimizer = KFACOptimizer(mlp(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(epoch / 10))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert torch.load(tmp_path / "optimizer.pt")["param_groups"][0]["lr"] == 0.1


def test_a_period_of_numpy_is_an_integer() -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, inverse_update_period=np.int64(3), factor_update_period=np.int32(2))
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()


def test_with_many_modules_the_message_stays_short() -> None:
    with pytest.raises(ValueError, match=r"'x' matches no module.*'0', '1', '2', .* and 27 more") as refused:
        KFACOptimizer(mlp(sizes=(4,) * 21), skip_layers=["x"])
    assert len(str(refused.value)) < 400


# -- the other public callables ----------------------------------------------------------------------------------

Call = Callable[[], Any]


def scheduler(**arguments: Any) -> Call:
    def build() -> HyperparameterScheduler:
        model = mlp()
        defaults = {"optimizer": KFACOptimizer(model), "key": "damping", "factor": lambda _: 1.0}
        return HyperparameterScheduler(**{**defaults, **arguments})

    return build


OTHERS: dict[str, list[tuple[Call, type[Exception], str]]] = {
    "KFACOptimizer.set_loss_terms(terms)": [
        (lambda: KFACOptimizer(mlp()).set_loss_terms(0), ValueError, r"terms must be finite, above 0, got 0"),
        (lambda: KFACOptimizer(mlp()).set_loss_terms(-8), ValueError, r"terms must be finite, above 0, got -8"),
        (lambda: KFACOptimizer(mlp()).set_loss_terms(None), TypeError, r"terms must be a number, got None"),
        (lambda: KFACOptimizer(mlp()).set_loss_terms(NAN), ValueError, r"terms must be finite, above 0, got nan"),
        (
            lambda: KFACOptimizer(mlp()).set_loss_terms(torch.ones(2)),
            ValueError,
            r"terms must be a number or a 1-element tensor, got \[2\]",
        ),
        (
            lambda: KFACOptimizer(mlp()).set_loss_terms(torch.tensor(1j)),
            TypeError,
            r"terms must be a real number, got a tensor of torch\.complex64",
        ),
        (
            lambda: KFACOptimizer(mlp()).set_loss_terms(torch.ones((), device="meta")),
            TypeError,
            r"terms must be a real number, got a tensor on the meta device",
        ),
        (
            lambda: KFACOptimizer(mlp()).set_loss_terms(torch.tensor(True)),
            TypeError,
            r"terms must be a real number, got a tensor of torch\.bool",
        ),
    ],
    "KFACOptimizer.add_param_group(param_group)": [
        (lambda: KFACOptimizer(mlp()).add_param_group([]), TypeError, r"param_group must be a dict"),
    ],
    "KFACOptimizer.step(closure)": [
        (lambda: KFACOptimizer(mlp()).step(3), TypeError, r"step\(\) takes None, or a closure .*, got 3"),
    ],
    "KFACOptimizer.load_state_dict(state_dict)": [
        (lambda: KFACOptimizer(mlp()).load_state_dict({}), ValueError, r"lacks 'param_groups'"),
    ],
    "HyperparameterScheduler(optimizer)": [
        (scheduler(optimizer=mlp()), TypeError, r"optimizer must be an? .*Optimizer, got Sequential"),
        (scheduler(optimizer=None), TypeError, r"optimizer must be an? .*Optimizer, got None"),
    ],
    "HyperparameterScheduler(key)": [
        (scheduler(key="dumping"), KeyError, r"no 'dumping' to schedule; it has \["),
        (scheduler(key=None), TypeError, r"key must be the name of a number of the param groups, got None"),
        (scheduler(key=["lr"]), TypeError, r"key must be the name of a number of the param groups, got \['lr'\]"),
        (scheduler(key="params"), TypeError, r"'params' of param group 0 is (?s:.*) no number to schedule"),
    ],
    "HyperparameterScheduler(factor)": [
        (scheduler(factor=0.5), TypeError, r"factor must be .*(callable|function).*got 0\.5"),
        (scheduler(factor=None), TypeError, r"factor must be .*(callable|function).*got None"),
        (scheduler(factor=[0.5]), TypeError, r"factor must be .*(callable|function).*got 0\.5"),
        (
            scheduler(factor=lambda _: None),
            TypeError,
            r"a factor of 'damping' must return a finite number, and returned None",
        ),
        (scheduler(factor=[]), ValueError, r"1 param groups need one factor or 1, got 0"),
    ],
    "HyperparameterScheduler(last_epoch)": [
        (scheduler(last_epoch="3"), TypeError, r"last_epoch must be an integer.*got '3'"),
        (scheduler(last_epoch=1.5), TypeError, r"last_epoch must be an integer.*got 1\.5"),
        (scheduler(last_epoch=-2), ValueError, r"last_epoch must be at least -1, got -2"),
    ],
    "ExponentialDecay(gamma)": [
        (lambda: ExponentialDecay(0.0), ValueError, r"gamma of Exp.*Decay must be .*got 0\.0"),
        (lambda: ExponentialDecay(1.5), ValueError, r"gamma of Exp.*Decay must be .*got 1\.5"),
        (lambda: ExponentialDecay(-0.5), ValueError, r"gamma of Exp.*Decay must be .*got -0\.5"),
        (lambda: ExponentialDecay(NAN), ValueError, r"gamma of Exp.*Decay must be .*got nan"),
        (lambda: ExponentialDecay("0.9"), TypeError, r"gamma of Exp.*Decay must be a number, got '0\.9'"),
    ],
    "ExponentialDecay(every)": [
        (lambda: ExponentialDecay(0.9, every=0), ValueError, r"every of Exp.*Decay must be at least 1, got 0"),
        (
            lambda: ExponentialDecay(0.9, every=1.5),
            TypeError,
            r"every of Exp.*Decay must be an integer, got 1\.5",
        ),
        (lambda: ExponentialDecay(0.9, every=NAN), TypeError, r"every of Exp.*Decay must be an integer, got nan"),
    ],
    "ExponentialDecay(minimum)": [
        (
            lambda: ExponentialDecay(0.9, minimum=-1.0),
            ValueError,
            r"minimum of Exp.*Decay must be .*at least 0.*got -1\.0",
        ),
        (lambda: ExponentialDecay(0.9, minimum=NAN), ValueError, r"minimum of Exp.*Decay must be .*got nan"),
        (
            lambda: ExponentialDecay(0.9, minimum="0"),
            TypeError,
            r"minimum of Exp.*Decay must be a number, got '0'",
        ),
    ],
}


def test_every_argument_of_the_other_public_callables_has_a_bad_value() -> None:
    """Of what a user calls; abstract classes and records are called by the library."""
    public = {
        *(f"KFACOptimizer.{method}" for method in ("set_loss_terms", "add_param_group", "step", "load_state_dict")),
        "HyperparameterScheduler",
        "ExponentialDecay",
    }
    arguments = set()
    for name in public:
        function: Any = kfac_optim
        for part in name.split("."):
            function = getattr(function, part)
        arguments |= {
            f"{name}({argument})" for argument in inspect.signature(function).parameters if argument != "self"
        }
    assert arguments == set(OTHERS)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [pytest.param(*case, id=f"{name}-{i}") for name, cases in OTHERS.items() for i, case in enumerate(cases)],
)
def test_a_bad_argument_of_another_callable_is_refused(call: Call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_norms_to_clip_to_are_numbers_in_tensors_or_not() -> None:
    optimizer = KFACOptimizer(mlp())
    for arguments, message in (
        ((None,), "max_norm must be a number, got None"),
        ((1, "two"), "norm_type must be a num"),
    ):
        with pytest.raises(TypeError, match=f"kfac_optim: {message}"):
            optimizer.clip_grad_norm_(*arguments)
    assert optimizer.clip_grad_norm_(torch.tensor(1.0), math.inf) == 0


NONSENSE = (0, -1, 2.5, "x", math.nan, None, torch.tensor(3.0))


@pytest.mark.parametrize("name", ["factor_update_period", "inverse_update_period"])
@pytest.mark.parametrize("value", NONSENSE, ids=repr)
def test_a_period_edited_to_nonsense_is_refused_by_the_step_alone(name: str, value: object) -> None:
    """Not within the model's forward, and the step goes on once it is mended."""
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    train(model, optimizer, 1)
    before = clones(model.parameters())
    optimizer.param_groups[0][name] = value
    square_loss(model(batch())).backward()
    with pytest.raises((TypeError, ValueError), match=f"kfac_optim: {name} in param group 0 must be"):
        optimizer.step()
    assert_identical(before, clones(model.parameters()))
    optimizer.param_groups[0][name] = 3
    optimizer.step()


@pytest.mark.parametrize("name", ["lr", "momentum", "dampening", "weight_decay"])
@pytest.mark.parametrize("value", ["x", None], ids=repr)
def test_a_number_of_sgd_edited_to_nonsense_is_refused_before_anything_is_changed(name: str, value: object) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=1)
    square_loss(model(batch())).backward()
    before = clones(model.parameters())
    optimizer.param_groups[0][name] = value
    with pytest.raises(TypeError, match=f"kfac_optim: {name} in param group 0 must be a number"):
        optimizer.step()
    assert_identical(before, clones(model.parameters()))
    assert not optimizer.factors()


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (10**30, "lr in param group 0 must be a float where it is"),
        (torch.tensor(1j), "lr in param group 0 must be a real number"),
    ],
)
def test_a_rate_that_no_step_can_multiply_by_is_refused(rate: Any, message: str) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1)
    train(model, optimizer, 1)
    optimizer.param_groups[0]["lr"] = rate
    square_loss(model(batch())).backward()
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step()


@pytest.mark.parametrize(("before", "after"), [(1, 7), (7, 1)])
def test_a_period_edited_between_forward_and_step_is_that_of_the_next_forward(before: int, after: int) -> None:
    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.1, factor_update_period=before)
    train(model, optimizer, 2)
    square_loss(model(batch())).backward()
    optimizer.param_groups[0]["factor_update_period"] = after
    optimizer.step()
    assert optimizer.metrics()["factor_age"] == (0 if before == 1 else 2)
