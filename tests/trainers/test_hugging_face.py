"""`transformers.Trainer` trains with the optimizer as a plain loop does: clipped, scaled, compiled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from kfac_optim import IterateAverage, KFACOptimizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

EXAMPLES, STEPS, MOST = 8, 3, 0.1
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1}

pytestmark = pytest.mark.filterwarnings("ignore")  # of the trainer itself, which says much


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.layers(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


def examples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(EXAMPLES, width, generator=generator, dtype=torch.float64) for width in (4, 2))
    return [{"x": each, "labels": label} for each, label in zip(x, y, strict=True)]


def trainer_of(model: nn.Module, optimizer: KFACOptimizer | None, data: Any, folder: Path, **options: Any) -> Any:
    """Without an optimizer the trainer makes its own, of its own groups of parameters."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=EXAMPLES,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    made = {"optimizer_cls_and_kwargs": (KFACOptimizer, {**OPTIONS})}
    given = {"optimizers": (optimizer, None)} if optimizer is not None else made
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, **given)


def in_a_plain_loop(model: Regression, optimizer: KFACOptimizer) -> None:
    """Train on all examples at each step, clipped."""
    data = examples()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*(torch.stack([each[key] for each in data]) for key in ("x", "labels")))["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_clipped_run_is_that_of_a_plain_loop(scaled: bool, tmp_path: Path) -> None:
    """With a scaler that is made after the optimizer and unscales before clipping, as in half precision on CUDA."""
    model, twin = Regression(), Regression()
    optimizer, reference = KFACOptimizer(model, **OPTIONS), KFACOptimizer(twin, **OPTIONS)
    trainer = trainer_of(model, optimizer, examples(), tmp_path, max_grad_norm=MOST)
    if scaled:
        scaler = GradScaler("cpu", init_scale=2.0**10)
        trainer.accelerator.scaler = scaler
        trainer.accelerator.unscale_gradients = lambda: scaler.unscale_(optimizer)
    trainer.train()
    in_a_plain_loop(twin, reference)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert optimizer.metrics()["measured_parameters"] == 1.0
    assert optimizer.metrics()["skipped_steps"] == 0


def test_an_optimizer_that_the_trainer_makes_of_the_class_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """It is handed groups of parameters, with weight decay and without, and has to find the model."""
    model, twin = Regression(), Regression()
    trainer = trainer_of(model, None, examples(), tmp_path, max_grad_norm=MOST)
    trainer.train()
    in_a_plain_loop(twin, KFACOptimizer(twin, **OPTIONS))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, KFACOptimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert optimizer.metrics()["measured_parameters"] == 1.0


@pytest.fixture
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_graphs")
def test_a_compiled_model_is_preconditioned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**small, intermediate_size=16, max_position_embeddings=16, num_labels=2)
    model = transformers.BertForSequenceClassification(config)
    optimizer = KFACOptimizer(model, **OPTIONS)
    data = [{"input_ids": torch.arange(i, i + 6), "labels": torch.tensor(i % 2)} for i in range(EXAMPLES)]
    trainer_of(model, optimizer, data, tmp_path, torch_compile=True, torch_compile_backend="aot_eager").train()
    assert optimizer.metrics()["measured_parameters"] == optimizer.metrics()["covered_parameters"] > 0.9
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


def test_the_trainer_evaluates_the_average_and_trains_the_parameters(tmp_path: Path) -> None:
    averaged = {**OPTIONS, "average": IterateAverage()}
    model, twin = Regression(), Regression()
    optimizer, reference = KFACOptimizer(model, **averaged), KFACOptimizer(twin, **averaged)
    trainer = trainer_of(
        model, optimizer, examples(), tmp_path, max_grad_norm=0.0, eval_strategy="steps", eval_steps=1, logging_steps=1
    )
    trainer.train()
    found = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    batch = [torch.stack([each[key] for each in examples()]) for key in ("x", "labels")]
    expected = []
    for _ in range(STEPS):
        reference.zero_grad()
        twin(*batch)["loss"].backward()
        reference.step()
        reference.eval()
        expected.append(float(twin(*batch)["loss"].detach()))
        reference.train()
    assert found == pytest.approx(expected, rel=1e-6)
    optimizer.train()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
