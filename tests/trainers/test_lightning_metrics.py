"""A callback logs the numbers of K-FAC optimizers where Lightning logs everything else."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACOptimizer

lightning = pytest.importorskip("lightning.pytorch")
from kfac_optim.integrations.lightning import KFACMetrics  # noqa: E402 (it imports Lightning)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer itself, which says much


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, optimizers: int) -> None:
        super().__init__()
        self.automatic_optimization = optimizers == 1
        self.models = nn.ModuleList(nn.Linear(4, 2) for _ in range(optimizers))

    def training_step(self, batch: list[Tensor]) -> Tensor | None:
        losses = [model(batch[0]).square().mean() for model in self.models]
        if self.automatic_optimization:
            return losses[0]
        for loss, optimizer in zip(losses, self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return [KFACOptimizer(model, lr=0.1, factor_update_period=1) for model in self.models]


def logged(model: Model, folder: Path) -> list[dict[str, str]]:
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(24, 4)), batch_size=4)
    logger = lightning.loggers.CSVLogger(folder)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=logger, log_every_n_steps=3, callbacks=[KFACMetrics()], **quiet
    )
    trainer.fit(model, data)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_are_logged_at_the_steps_that_lightning_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other steps read nothing, as that would wait for the device."""
    read: list[dict[str, float]] = []
    plain = KFACOptimizer.metrics
    monkeypatch.setattr(KFACOptimizer, "metrics", lambda self: read.append(plain(self)) or read[-1])
    rows = logged(Model(1), tmp_path)
    assert [row["step"] for row in rows] == ["2", "5"]
    assert len(read) == 2
    for row, numbers in zip(rows, read, strict=True):
        found = {key: float(value) for key, value in row.items() if key.startswith("kfac/")}
        assert found == pytest.approx({f"kfac/{key}": value for key, value in numbers.items()}, rel=1e-6)


def test_several_optimizers_are_told_apart(tmp_path: Path) -> None:
    row = logged(Model(2), tmp_path)[-1]
    assert {"kfac/0/damping", "kfac/1/damping"} <= row.keys()
