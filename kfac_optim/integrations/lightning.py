"""A Lightning callback that logs what K-FAC optimizers report, where Lightning logs everything else."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kfac_optim.optimizer import KFACOptimizer


class KFACMetrics(Callback):  # type: ignore[misc]
    """Logs `KFACOptimizer.metrics()` at the steps at which Lightning logs (`log_every_n_steps`).

        trainer = Trainer(callbacks=[KFACMetrics()])

    Numbers are named `kfac/damping`; of several K-FAC optimizers `kfac/0/damping`, counted among all optimizers of the
    module. Other optimizers are passed by. At steps that are not logged nothing is read, as it synchronises.

    Args:
        prefix: what the names begin with.
    """

    def __init__(self, prefix: str = "kfac") -> None:
        self.prefix = prefix

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the numbers of the last step."""
        if not trainer._logger_connector.should_update_logs:  # so Lightning's own monitors ask
            return
        found = {i: each for i, each in enumerate(trainer.optimizers) if isinstance(each, KFACOptimizer)}
        for i, optimizer in found.items():
            name = self.prefix if len(found) == 1 else f"{self.prefix}/{i}"
            pl_module.log_dict({f"{name}/{key}": float(value) for key, value in optimizer.metrics().items()})
