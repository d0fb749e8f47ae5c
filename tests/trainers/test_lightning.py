"""Lightning trains with the optimizer bit for bit as a plain loop does, where it steps and where the module does."""

import copy
import importlib.util
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from helpers.plain import assert_same_factors, batch, factors_after, mlp, square_loss
from helpers.ranks import Ranks
from helpers.small_runs import OPTIONS, STEPS, Regression, assert_same_bits, batches, parameters_of, plain_run
from torch import Tensor
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

from kfac_optim import KFACOptimizer
from kfac_optim.tuning import range_test

if TYPE_CHECKING:
    from helpers.lightning_modules import Holds

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is missing"),
    pytest.mark.filterwarnings("ignore", "error:kfac_optim"),  # the trainer itself says much
]

CLIP = 1.0
HOLDS: "dict[str, Holds]" = {
    "the module": lambda module: module,
    "its network": lambda module: module.net,
    "its parameters": lambda module: module.parameters(),
}


def in_a_plain_loop(data: Any = None, *, scheduled: bool = False, **options: Any) -> list[Tensor]:
    model = Regression()
    optimizer = KFACOptimizer(model, **OPTIONS)
    scheduler = CosineAnnealingLR(optimizer, STEPS) if scheduled else None
    plain_run(model, optimizer, data, scheduler=scheduler, **options)
    return parameters_of(model)


def test_the_optimizer_that_fabric_wraps_is_copied_and_the_range_test_asks_for_it() -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = mlp()
    model, wrapped = fabric.setup(model, KFACOptimizer(model, lr=0.1, factor_update_period=1))
    with pytest.raises(TypeError, match=r"range_test got a FabricKFACOptimizer.*optimizer\.optimizer"):
        range_test(wrapped, [batch()], lambda x: square_loss(model(x)))
    twin, optimizer = copy.deepcopy((model, wrapped))
    for net, each in ((model, wrapped), (twin, optimizer)):
        each.zero_grad()
        square_loss(net(batch())).backward()
        each.step()
    assert_same_bits(parameters_of(twin), parameters_of(model))


def half_precision() -> Any:
    """Lightning itself has `16-mixed` on an accelerator alone; the scaler overflows at first."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    return MixedPrecision("16-mixed", "cpu", scaler=scaler_that_overflows())


def scaler_that_overflows() -> GradScaler:
    return GradScaler("cpu", 2.0**40, backoff_factor=2.0**-25, growth_interval=2)


# -- Lightning steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holds", HOLDS.values(), ids=HOLDS)
def test_a_run_is_that_of_a_plain_loop(holds: "Holds") -> None:
    """With clipping and a schedule."""
    from helpers.lightning_modules import Scheduled, fit

    module = Scheduled(holds)
    trainer = fit(module, gradient_clip_val=CLIP)
    assert_same_bits(module, in_a_plain_loop(clip=CLIP, scheduled=True))
    assert trainer.optimizers[0].metrics()["measured_parameters"] == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"accumulate_grad_batches": 2}, {"accumulate": 2, "steps": 3}),
        ({"precision": "bf16-mixed", "gradient_clip_val": CLIP}, {"autocast": torch.bfloat16, "clip": CLIP}),
    ],
    ids=["accumulated", "bf16-mixed"],
)
def test_a_run_with_options_is_that_of_a_plain_loop(options: dict[str, Any], plain: dict[str, Any]) -> None:
    from helpers.lightning_modules import Automatic, fit

    module = Automatic(HOLDS["its network"])
    fit(module, **options)
    assert_same_bits(module, in_a_plain_loop(**plain))


@pytest.mark.parametrize("clip", [None, CLIP])
def test_half_precision_is_that_of_a_plain_loop(clip: float | None) -> None:
    from helpers.lightning_modules import Automatic, fit

    module = Automatic(HOLDS["its network"])
    trainer = fit(module, plugins=[half_precision()], gradient_clip_val=clip)
    plain = in_a_plain_loop(autocast=torch.float16, scaler=scaler_that_overflows(), clip=clip)
    assert_same_bits(module, plain)
    assert trainer.optimizers[0].metrics()["skipped_steps"] == 1  # type: ignore[attr-defined]


def test_clipping_in_half_precision_leaves_the_factors() -> None:
    """The plugin refuses to clip where a step unscales the gradients itself."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    model = mlp()
    optimizer = KFACOptimizer(model, lr=0.0, factor_update_period=1)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=GradScaler("cpu", init_scale=2.0**10))
    plugin.scaler.scale(square_loss(model(batch()))).backward()  # type: ignore[union-attr]
    plugin.scaler.unscale_(optimizer)  # type: ignore[union-attr]
    plugin.clip_gradients(optimizer, clip_val=1e-3)
    plugin.scaler.step(optimizer)  # type: ignore[union-attr]
    plain = factors_after(mlp(), lambda twin: square_loss(twin(batch())).backward())
    assert_same_factors(optimizer.factors(), plain, rtol=1e-10)


@pytest.mark.parametrize("holds", HOLDS.values(), ids=HOLDS)
def test_a_run_that_is_resumed_is_the_one_that_was_not_interrupted(holds: "Holds", tmp_path: Path) -> None:
    """Of two epochs of three steps, so that it stops between two refreshes."""
    from helpers.lightning_modules import Scheduled, fit, loader

    path, resumed = str(tmp_path / "last.ckpt"), Scheduled(holds)
    fit(Scheduled(holds), loader(3)).save_checkpoint(path)
    fit(resumed, loader(3), path, max_epochs=2)
    data = [each for _ in range(2) for each in loader(3)]
    assert_same_bits(resumed, in_a_plain_loop(iter(data), scheduled=True))


def test_stochastic_weight_averaging_is_that_of_a_plain_loop() -> None:
    """It averages the parameters at the beginnings of the second epoch and the third."""
    from helpers.lightning_modules import Automatic, fit
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    module = Automatic(HOLDS["its network"])
    fit(module, callbacks=[StochasticWeightAveraging(OPTIONS["lr"], swa_epoch_start=2)], max_epochs=3)
    at_starts = [in_a_plain_loop(steps=epochs * STEPS) for epochs in (1, 2)]
    assert_same_bits(module, [one + (other - one) / 2 for one, other in zip(*at_starts, strict=True)])


# -- the module steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, {"clip": CLIP}),
        ({"precision": "bf16-mixed"}, {"clip": CLIP, "autocast": torch.bfloat16}),
        ({"plugins": "16-mixed"}, {"autocast": torch.float16}),
    ],
    ids=["full precision", "bf16-mixed", "16-mixed"],
)
def test_manual_optimization_is_that_of_a_plain_loop(options: dict[str, Any], plain: dict[str, Any]) -> None:
    from helpers.lightning_modules import Manual, fit

    in_half = "plugins" in options
    module = Manual(HOLDS["its network"], plain.get("clip"))
    fit(module, **({"plugins": [half_precision()]} if in_half else options))
    assert_same_bits(module, in_a_plain_loop(**plain, scaler=scaler_that_overflows() if in_half else None))


def test_two_optimizers_of_a_gan_train_as_in_a_plain_loop() -> None:
    """The plain loop freezes nothing, so that the discriminator gets gradients that it throws away."""
    from helpers.lightning_modules import GAN, Adversaries, fit, loader

    module, twin = GAN(), Adversaries()
    fit(module)
    first, second = twin.optimizers_of()
    for each in loader():
        first.zero_grad()
        twin.loss_of_generator(each["x"]).backward()
        first.step()
        second.zero_grad()
        twin.loss_of_discriminator(**each).backward()
        second.step()
    assert_same_bits(module, twin)


# -- two processes -----------------------------------------------------------------------------------------------


def on_a_rank(rank: int, holds: str, folder: str | None, resume: bool = False) -> list[Tensor]:
    """Train in the process group that there is, with checkpoints in the folder."""
    from helpers.lightning_modules import Automatic, fit, loader
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Whole(Callback):
        """What a user must write for checkpoints, as rank 0 saves for all."""

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            for optimizer in trainer.optimizers:
                optimizer.consolidate_state_dict()

    class There(LightningEnvironment):
        def __init__(self) -> None:
            super().__init__()
            self.set_global_rank(rank)
            self.set_world_size(dist.get_world_size())

        creates_processes_externally = True

        def local_rank(self) -> int:
            return rank

    module, data = Automatic(HOLDS[holds]), loader(STEPS // 2, rank, dist.get_world_size())
    strategy = DDPStrategy(cluster_environment=There(), process_group_backend="gloo")
    options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, "callbacks": [Whole()]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "kfac_optim")
        path = None if folder is None else f"{folder}/last.ckpt"
        epochs = 1 if folder is not None and not resume else 2
        trainer = fit(module, data, path if resume else None, **options, max_epochs=epochs, gradient_clip_val=CLIP)
        if path is not None and not resume:
            trainer.save_checkpoint(path)
    return parameters_of(module)


def in_a_plain_loop_on(rank: int, saves: bool) -> list[Tensor]:
    """Whoever makes a checkpoint whole after the third step adds up statistics in another order."""
    model, ranks = Regression(), dist.get_world_size()
    optimizer, data = KFACOptimizer(model, **OPTIONS), batches(rank=rank, ranks=ranks)
    wrapped = DistributedDataParallel(model)
    plain_run(wrapped, optimizer, data, clip=CLIP, steps=STEPS // 2)
    if saves:
        optimizer.consolidate_state_dict()
    plain_run(wrapped, optimizer, data, clip=CLIP, steps=STEPS // 2)
    return parameters_of(model)


@pytest.mark.slow
@pytest.mark.parametrize("holds", HOLDS)
def test_two_processes_train_as_a_plain_loop_does(holds: str, two_ranks: Ranks) -> None:
    runs = two_ranks.run(on_a_rank, holds, None, timeout=300.0)
    for found, plain in zip(runs, two_ranks.run(in_a_plain_loop_on, False), strict=True):
        assert_same_bits(found, plain)


@pytest.mark.slow
def test_two_processes_resume_where_a_callback_makes_checkpoints_whole(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(on_a_rank, "its network", str(tmp_path), timeout=300.0)
    resumed = two_ranks.run(on_a_rank, "its network", str(tmp_path), True, timeout=300.0)
    for found, plain in zip(resumed, two_ranks.run(in_a_plain_loop_on, True), strict=True):
        assert_same_bits(found, plain)
