"""Modules of Lightning, and its trainer without what writes and prints. The import of Lightning takes seconds."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from helpers.small_runs import OPTIONS, STEPS, Regression, batches
from kfac_optim import KFACOptimizer

Holds = Callable[["Automatic"], Any]  # what the optimizer is made of


class Automatic(pl.LightningModule):
    """Lightning calls `optimizer.step(closure)`, with forward, backward and clipping inside."""

    def __init__(self, holds: Holds, **options: Any) -> None:
        super().__init__()
        self.net, self.holds, self.options = Regression(), holds, {**OPTIONS, **options}

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.net(x, labels)["loss"]
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self(**batch)
        return loss

    def configure_optimizers(self) -> Any:
        return KFACOptimizer(self.holds(self), **self.options)


class Scheduled(Automatic):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Automatic):
    def __init__(self, holds: Holds, clip: float | None = None) -> None:
        super().__init__(holds)
        self.automatic_optimization, self.clip = False, clip

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self(**batch))
        if self.clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        optimizer.step()


class Adversaries(nn.Module):
    """A generator and a discriminator, whose losses are those of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))

    def loss_of_generator(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(-self.discriminator(self.generator(x))).mean()

    def loss_of_discriminator(self, x: Tensor, labels: Tensor) -> Tensor:
        true, false = self.discriminator(labels), self.discriminator(self.generator(x).detach())
        return nn.functional.softplus(-true).mean() + nn.functional.softplus(false).mean()

    def optimizers_of(self) -> list[KFACOptimizer]:
        return [KFACOptimizer(part, **OPTIONS) for part in (self.generator, self.discriminator)]


class GAN(pl.LightningModule):
    """Two optimizers, each with the parameters of the other one frozen, as in Lightning's own example."""

    def __init__(self) -> None:
        super().__init__()
        self.nets, self.automatic_optimization = Adversaries(), False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        losses = (
            lambda: self.nets.loss_of_generator(batch["x"]),
            lambda: self.nets.loss_of_discriminator(**batch),
        )
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return self.nets.optimizers_of(), []


def loader(steps: int = STEPS, rank: int = 0, ranks: int = 1) -> DataLoader[Any]:
    """Make an epoch of the first batches."""
    return DataLoader(list(islice(batches(rank=rank, ranks=ranks), steps)), batch_size=None)  # type: ignore[arg-type]


def fit(module: pl.LightningModule, data: Any = None, resume: str | None = None, **options: Any) -> pl.Trainer:
    told: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **options,
    }
    trainer = pl.Trainer(**told)
    trainer.fit(module, loader() if data is None else data, ckpt_path=resume)
    return trainer
