"""`transformers.Trainer` trains with the optimizer bit for bit as a plain loop does.

What models of Hugging Face have measured is in tests/test_transformers.py, with recomputed activations.
"""
# ruff: noqa: ARG001 (what ranks run is told its rank)

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.accelerated import accelerate_on
from helpers.ranks import Ranks
from helpers.small_runs import (
    BATCH,
    OPTIONS,
    STEPS,
    Regression,
    assert_same_bits,
    batches,
    examples,
    parameters_of,
    plain_run,
)
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from kfac_optim import IterateAverage, KFACOptimizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

CLIP = 1.0  # what the trainer clips to by default

pytestmark = pytest.mark.filterwarnings("ignore", "error:kfac_optim")  # the trainer itself says much


def trainer_of(model: nn.Module, enters: dict[str, Any], folder: Path | str, **options: Any) -> Any:
    """`enters` is how the optimizer does."""
    data = options.pop("data", examples())
    arguments = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    arguments = transformers.TrainingArguments(**arguments)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, **enters)


def with_optimizer(**options: Any) -> tuple[Regression, KFACOptimizer]:
    model = Regression()
    return model, KFACOptimizer(model, **{**OPTIONS, **options})


# -- the ways in -------------------------------------------------------------------------------------------------


def given(model: nn.Module) -> dict[str, Any]:
    return {"optimizers": (KFACOptimizer(model, **OPTIONS), None)}


def made_by_a_factory(model: nn.Module) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (lambda: KFACOptimizer, {**OPTIONS})}


def made_of_the_class_and_the_model(model: nn.Module) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (KFACOptimizer, {**OPTIONS, "model": model})}


@pytest.mark.parametrize("way", [given, made_by_a_factory, made_of_the_class_and_the_model])
def test_a_run_is_that_of_a_plain_loop(way: Callable[[nn.Module], dict[str, Any]], tmp_path: Path) -> None:
    """With the trainer's clipping, and a schedule that begins at a rate of zero."""
    model = Regression()
    trainer = trainer_of(model, way(model), tmp_path, lr_scheduler_type="cosine", warmup_steps=2)
    trainer.train()
    twin, reference = with_optimizer()
    plain_run(twin, reference, clip=CLIP, scheduler=transformers.get_cosine_schedule_with_warmup(reference, 2, STEPS))
    assert_same_bits(model, twin)


def test_a_class_is_handed_groups_with_weight_decay_and_without(tmp_path: Path) -> None:
    """It has to find the model, and bound all groups together."""
    model, twin = Regression(), Regression()
    trainer = trainer_of(model, {"optimizer_cls_and_kwargs": (KFACOptimizer, {**OPTIONS})}, tmp_path, weight_decay=0.1)
    trainer.train()
    weights = [param for param in twin.parameters() if param.dim() == 2]
    others = [param for param in twin.parameters() if param.dim() != 2]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others}]
    plain_run(twin, KFACOptimizer(groups, model=twin, **OPTIONS), clip=CLIP)
    assert_same_bits(model, twin)
    assert trainer.optimizer.optimizer.metrics()["measured_parameters"] == 1.0


# -- what it does around steps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"gradient_accumulation_steps": 2}, {"accumulate": 2, "clip": CLIP}),
        ({"gradient_accumulation_steps": 3, "max_grad_norm": 0.1}, {"accumulate": 3, "clip": 0.1}),
        ({"bf16": True}, {"autocast": torch.bfloat16, "clip": CLIP}),
    ],
    ids=["accumulated", "accumulated and clipped hard", "bf16"],
)
def test_a_run_with_options_is_that_of_a_plain_loop(
    options: dict[str, Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    model, optimizer = with_optimizer()
    trainer_of(model, {"optimizers": (optimizer, None)}, tmp_path, **options).train()
    twin, reference = with_optimizer()
    plain_run(twin, reference, **plain)
    assert_same_bits(model, twin)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**40], ids=["no overflow", "overflows at first"])
def test_half_precision_clips_and_scales_as_a_plain_loop_does(scale: float, tmp_path: Path) -> None:
    """The scaler, made after the optimizer, unscales before the clipping. The trainer has fp16 on CUDA alone."""
    model, optimizer = with_optimizer()
    trainer = trainer_of(model, {"optimizers": (optimizer, None)}, tmp_path, bf16=True, max_grad_norm=0.1)
    trainer.accelerator.state._mixed_precision = "fp16"
    trainer.accelerator.scaler = GradScaler("cpu", scale, backoff_factor=2.0**-25, growth_interval=2)
    trainer.train()
    twin, reference = with_optimizer()
    scaler = GradScaler("cpu", scale, backoff_factor=2.0**-25, growth_interval=2)
    plain_run(twin, reference, clip=0.1, autocast=torch.float16, scaler=scaler)
    assert_same_bits(model, twin)
    assert optimizer.metrics()["skipped_steps"] == reference.metrics()["skipped_steps"] == (scale > 2.0**20)


@pytest.fixture
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_graphs")
def test_a_compiled_run_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    model, optimizer = with_optimizer()
    enters = {"optimizers": (optimizer, None)}
    trainer_of(model, enters, tmp_path, torch_compile=True, torch_compile_backend="aot_eager").train()
    twin, reference = with_optimizer()
    plain_run(twin, reference, clip=CLIP)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def tiny_bert() -> Any:
    torch.manual_seed(0)
    small = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 2}
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**small, **without_dropout, intermediate_size=16, max_position_embeddings=16)
    return transformers.BertForSequenceClassification(config)


TEXTS = [{"input_ids": torch.arange(i, i + 6), "labels": torch.tensor(i % 2)} for i in range(8)]


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_graphs")
def test_a_compiled_model_of_hugging_face_is_preconditioned(tmp_path: Path) -> None:
    model = tiny_bert()
    optimizer = KFACOptimizer(model, **OPTIONS)
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer_of(model, {"optimizers": (optimizer, None)}, tmp_path, data=TEXTS, max_steps=3, **compiled).train()
    assert optimizer.metrics()["measured_parameters"] == optimizer.metrics()["covered_parameters"] > 0.9
    assert optimizer.metrics()["unpreconditioned_blocks"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(reentrant: bool, tmp_path: Path) -> None:
    recomputed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    found = []
    for options in ({}, recomputed):
        model = tiny_bert()
        enters = {"optimizers": (KFACOptimizer(model, **OPTIONS), None)}
        trainer_of(model, enters, tmp_path, data=TEXTS, max_steps=2, **options).train()
        assert model.is_gradient_checkpointing == bool(options)
        found.append(parameters_of(model))
    assert_same_bits(*found)


def test_the_trainer_evaluates_the_average_and_trains_the_parameters(tmp_path: Path) -> None:
    model, optimizer = with_optimizer(average=IterateAverage())
    trainer = trainer_of(model, {"optimizers": (optimizer, None)}, tmp_path, eval_strategy="steps", eval_steps=1)
    trainer.train()
    found = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    twin, reference = with_optimizer(average=IterateAverage())
    whole = {name: torch.stack([each[name] for each in examples()]) for name in ("x", "labels")}
    expected: list[float] = []

    def evaluate() -> None:
        reference.eval()
        expected.append(float(twin(**whole)["loss"].detach()))
        reference.train()

    plain_run(twin, reference, clip=CLIP, after=evaluate)
    assert found == pytest.approx(expected, rel=1e-6)
    optimizer.train()
    assert_same_bits(model, twin)


# -- resuming ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [given, made_by_a_factory])
def test_a_run_that_is_resumed_is_the_one_that_was_not_interrupted(
    way: Callable[[nn.Module], dict[str, Any]], tmp_path: Path
) -> None:
    """It stops between two refreshes, in the middle of an epoch."""
    options = {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 3}
    whole, resumed = Regression(), Regression()
    trainer_of(whole, way(whole), tmp_path, **options).train()
    trainer_of(resumed, way(resumed), tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same_bits(resumed, whole)


# -- two processes -----------------------------------------------------------------------------------------------


def in_a_trainer(rank: int, folder: str, resume: str | None = None, saves: int = 0) -> list[Tensor]:
    class Whole(transformers.TrainerCallback):  # type: ignore[misc]
        """What a user must write for checkpoints, as rank 0 saves for all."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_save:
                kwargs["optimizer"].optimizer.consolidate_state_dict()

    options = {"save_strategy": "steps", "save_steps": saves} if saves else {}
    with warnings.catch_warnings(), accelerate_on(rank):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "kfac_optim")
        model = Regression()
        trainer = trainer_of(model, given(model), folder, **options)
        trainer.add_callback(Whole())
        trainer.train(resume_from_checkpoint=resume)
    return parameters_of(model)


def in_a_plain_loop(rank: int) -> list[Tensor]:
    model = Regression()
    optimizer = KFACOptimizer(model, **OPTIONS)
    plain_run(DistributedDataParallel(model), optimizer, batches(rank=rank, ranks=dist.get_world_size()), clip=CLIP)
    return parameters_of(model)


@pytest.mark.slow
def test_two_processes_train_as_a_plain_loop_does(two_ranks: Ranks, tmp_path: Path) -> None:
    runs = two_ranks.run(in_a_trainer, str(tmp_path), timeout=300.0)
    for found, plain in zip(runs, two_ranks.run(in_a_plain_loop), strict=True):
        assert_same_bits(found, plain)


@pytest.mark.slow
def test_two_processes_resume_the_run_where_a_callback_makes_checkpoints_whole(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    whole, resumed = (
        two_ranks.run(in_a_trainer, str(tmp_path), resume, 3, timeout=300.0)
        for resume in (None, str(tmp_path / "checkpoint-3"))
    )
    for ours, theirs in zip(resumed, whole, strict=True):
        assert_same_bits(ours, theirs)
