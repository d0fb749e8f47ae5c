"""Models of Hugging Face's transformers, unmodified, from random weights: what is covered, measured and learned."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from helpers.plain import clones
from torch import Tensor, nn

from kfac_optim import KFACOptimizer, LossTerms, Structure, Summary

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, STEPS = 128, 12, 20
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT_LIKE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def gpt2(real: bool = False) -> Any:
    small = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    small |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**({} if real else small)))


def bert(real: bool = False) -> Any:
    small = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **BERT_LIKE, **NO_DROPOUT}
    return transformers.BertForMaskedLM(transformers.BertConfig(**({} if real else small)))


def llama(real: bool = False, *, tied: bool) -> Any:
    """Grouped-query attention; at real size the 7B model, or tied the shape of Llama 3.2 1B."""
    small = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **BERT_LIKE, "num_key_value_heads": 2}
    one_b = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    one_b |= {"num_key_value_heads": 8}
    options = (one_b if tied else {}) if real else small
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, tie_word_embeddings=tied))


def vit(real: bool = False) -> Any:
    small = {"image_size": 16, "patch_size": 4, "num_labels": 10, **BERT_LIKE, **NO_DROPOUT}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**({} if real else small)))


def t5(real: bool = False) -> Any:
    small = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    small |= {"dropout_rate": 0.0}
    config = transformers.T5Config(**({} if real else small), decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


@dataclass(frozen=True)
class Case:
    """A model, one batch for it, and the terms of its loss.

    Attributes:
        make: builds the model, small or (with True) at its published size.
        batch: keyword arguments.
        targets: labels that count in the loss's mean.
        positions: positions of the logits, what `LossTerms.POSITIONS` reads.
        falls_to: share of the first loss that STEPS steps leave at most.
    """

    make: Callable[..., Any]
    batch: dict[str, Tensor]
    targets: int
    positions: int
    falls_to: float


@cache
def cases() -> dict[str, Case]:
    generator = torch.Generator().manual_seed(1)

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(min(5, high - 10), high, shape, generator=generator)

    tokens = draw(VOCABULARY, 8, LENGTH)
    masked = torch.rand(8, LENGTH, generator=generator) < 0.4
    causal = {"input_ids": tokens, "labels": tokens}
    filled = {"input_ids": tokens.masked_fill(masked, 3), "labels": tokens.masked_fill(~masked, -100)}
    images = {"pixel_values": torch.randn(16, 3, 16, 16, generator=generator), "labels": draw(10, 16)}
    return {
        # Causal models shift the labels by one: the last position has no target.
        "gpt2": Case(gpt2, causal, 8 * (LENGTH - 1), 8 * LENGTH, 0.5),
        "bert": Case(bert, filled, int(masked.sum()), 8 * LENGTH, 0.62),
        "llama": Case(lambda real=False: llama(real, tied=False), causal, 8 * (LENGTH - 1), 8 * LENGTH, 0.62),
        "llama, tied": Case(lambda real=False: llama(real, tied=True), causal, 8 * (LENGTH - 1), 8 * LENGTH, 0.62),
        "vit": Case(vit, images, 16, 16, 0.3),
        "t5": Case(t5, {"input_ids": tokens, "labels": draw(VOCABULARY, 8, 10)}, 80, 80, 0.58),
    }


every_model = pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "llama, tied", "vit", "t5"])


@dataclass
class Run:
    model: Any
    losses: list[float]
    before: Summary
    after: Summary
    metrics: dict[str, float]


def train(case: Case, steps: int = STEPS, *, omit_model: bool = False, checkpointing: bool = False) -> Run:
    """`steps` steps on the one batch; `after` and `metrics` are those of the first."""
    torch.manual_seed(0)
    model = case.make().train()
    if checkpointing:
        model.activation_checkpointing_enable()
    optimizer = KFACOptimizer(
        model.parameters() if omit_model else model,
        lr=0.03,
        momentum=0.9,
        factor_update_period=1,
        inverse_update_period=10,
    )
    run = Run(model, [], optimizer.summary(), optimizer.summary(), {})
    for step in range(steps):
        optimizer.zero_grad()
        optimizer.set_loss_terms(case.targets)
        loss = model(**case.batch).loss
        loss.backward()
        optimizer.step()
        run.losses.append(loss.item())
        if step == 0:
            run.after, run.metrics = optimizer.summary(), optimizer.metrics()
    return run


def coverage(summary: Summary) -> float:
    """Share of the numbers trained that a block preconditions."""
    sizes = [(math.prod(p.shape or ()), p.block is not None) for p in summary.parameters]
    return sum(size for size, covered in sizes if covered) / sum(size for size, _ in sizes)


def assert_names_each_once(summary: Summary, model: nn.Module) -> None:
    """By parameter, and the blocks by what they hold."""
    assert sorted(p.name for p in summary.parameters) == sorted(name for name, _ in model.named_parameters())
    assert all((p.block is None) != (p.reason is None) for p in summary.parameters)
    held = sorted(param for block in summary.blocks for param in block.params)
    assert held == sorted(p.name for p in summary.parameters if p.block is not None)


# -- learning ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every_model
def test_the_loss_falls_and_nearly_all_is_preconditioned(name: str) -> None:
    case = cases()[name]
    run = train(case)
    assert run.losses[-1] < case.falls_to * run.losses[0]
    assert max(run.losses) <= 1.5 * run.losses[0]
    assert coverage(run.after) >= 0.95
    assert_names_each_once(run.before, run.model)
    assert_names_each_once(run.after, run.model)
    assert run.metrics["unpreconditioned_blocks"] == 0
    assert run.metrics["blocks_without_statistics"] == 0
    assert run.metrics["dropped_calls"] == 0


@every_model
def test_the_model_may_be_omitted(name: str) -> None:
    given, omitted = train(cases()[name]), train(cases()[name], omit_model=True)
    assert omitted.losses == given.losses
    assert omitted.after == given.after


@every_model
def test_recomputed_activations_change_nothing(name: str) -> None:
    plain, recomputed = train(cases()[name], 5), train(cases()[name], 5, checkpointing=True)
    assert recomputed.losses == pytest.approx(plain.losses, rel=1e-6)
    assert recomputed.after == plain.after


# -- at published size ---------------------------------------------------------------------------------------------


@every_model
def test_coverage_holds_at_the_published_size(name: str) -> None:
    """On the meta device; the forward shows the matrices that no module hook can see."""
    case = cases()[name]
    with torch.device("meta"):
        model = case.make(True)
        tokens = torch.zeros(1, 8, dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
        if name == "vit":
            inputs = {"pixel_values": torch.zeros(1, 3, 224, 224)}
    optimizer = KFACOptimizer(model)
    model(**inputs)
    summary = optimizer.summary()
    assert_names_each_once(summary, model)
    assert coverage(summary) >= 0.998


# -- what the rules read off a ModelOutput -------------------------------------------------------------------------


def first_factors(case: Case, terms: int | None, *, rule: LossTerms = LossTerms.EXAMPLES, **options: Any) -> Any:
    """Factors of one step with the terms stated, or (None) read by `rule`."""
    torch.manual_seed(0)
    model = case.make().train()
    optimizer = KFACOptimizer(model, lr=0.0, loss_terms=rule)
    if terms is not None:
        optimizer.set_loss_terms(terms)
    model(**case.batch, **options)[0].backward()
    optimizer.step()
    return optimizer.factors()


@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("rule", [LossTerms.EXAMPLES, LossTerms.POSITIONS])
@every_model
def test_the_rules_read_batch_and_logits(name: str, rule: LossTerms, return_dict: bool) -> None:
    case = cases()[name]
    read = first_factors(case, None, rule=rule, return_dict=return_dict)
    stated = first_factors(case, len(case.batch["labels"]) if rule is LossTerms.EXAMPLES else case.positions)
    assert read.keys() == stated.keys()
    for layer, pair in stated.items():
        for left, right in zip(pair, read[layer], strict=True):
            assert (left is None and right is None) or torch.equal(left, right), layer


# -- what is measured ----------------------------------------------------------------------------------------------


class Calls:
    """Rows and output gradients of every product and lookup, by its weight, from hooks of our own."""

    def __init__(self, model: nn.Module) -> None:
        # of each weight, for lookups and products apart: (input rows, gradient rows) of each call
        self.of: defaultdict[nn.Parameter, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        self.has_bias: dict[nn.Parameter, bool] = {}
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) or type(module).__name__ == "Conv1D":
                module.register_forward_hook(self._note)
                self.has_bias.setdefault(module.weight, getattr(module, "bias", None) is not None)

    def _note(self, module: Any, args: Any, output: Tensor) -> None:
        rows = args[0].detach().flatten() if isinstance(module, nn.Embedding) else args[0].detach().flatten(0, -2)
        calls = self.of[module.weight][isinstance(module, nn.Embedding)]

        def note(gradient: Tensor) -> None:
            gradient = gradient.detach().flatten(0, -2)
            active = gradient.any(1)  # what the loss does not use is no row
            calls.append((rows[active], gradient[active]))

        output.register_hook(note)


def looked_up(calls: list[Any], entries: int, terms: int) -> tuple[Tensor, Tensor]:
    """`A` `[entries]` (its diagonal) and `G` `[out, out]` of an embedding."""
    counts = torch.bincount(torch.cat([rows for rows, _ in calls]), minlength=entries).double()
    return counts / counts.sum(), terms * sum(g.T @ g for _, g in calls)


def multiplied(calls: list[Any], bias: bool, terms: int) -> tuple[Tensor, Tensor]:
    """`A` `[in (+ 1), in (+ 1)]` and `G` `[out, out]` of a product."""
    rows = torch.cat([rows for rows, _ in calls])
    if bias:
        rows = torch.cat([rows, torch.ones_like(rows[:, :1])], dim=1)
    return rows.T @ rows / len(rows), terms * sum(g.T @ g for _, g in calls)


def tied(calls: tuple[list[Any], list[Any]], entries: int, terms: int) -> tuple[Tensor, Tensor]:
    """`A` `[entries]` and `G` `[out, out]` of an embedding whose weight is an output layer's, without bias there."""
    a, g = looked_up(calls[1], entries, terms)
    g_other, a_other = multiplied(calls[0], False, terms)
    a_other = a_other.diagonal()
    weight, weight_other = a.mean() * g.diagonal().mean(), a_other.mean() * g_other.diagonal().mean()
    of_a = weight * a / a.mean() + weight_other * a_other / a_other.mean()
    of_g = weight * g / g.diagonal().mean() + weight_other * g_other / g_other.diagonal().mean()
    return of_a / (weight + weight_other), of_g


@every_model
def test_factors_are_those_of_their_definition(name: str) -> None:
    case = cases()[name]
    torch.manual_seed(0)
    model = case.make().double().train()
    calls = Calls(model)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in case.batch.items()}
    optimizer = KFACOptimizer(model, lr=0.0)
    optimizer.set_loss_terms(case.targets)
    model(**batch).loss.backward()
    optimizer.step()
    factors, summary, seen = optimizer.factors(), optimizer.summary(), set()
    block_of = {p.name: p.block for p in summary.parameters}
    for param_name, weight in model.named_parameters():
        if weight not in calls.of:
            continue
        products, lookups = calls.of[weight]
        if products and lookups:
            expected = tied(calls.of[weight], len(weight), case.targets)
        elif lookups:
            expected = looked_up(lookups, len(weight), case.targets)
        else:
            expected = multiplied(products, calls.has_bias[weight], case.targets)
        seen.add(block_of[param_name])
        for side, ours, theirs in zip("AG", factors[block_of[param_name]], expected, strict=True):
            at = f"{side} of {param_name!r}"
            torch.testing.assert_close(ours[0], theirs, rtol=1e-9, atol=1e-15, msg=lambda text, at=at: f"{at}: {text}")
    # All but norms and what is added, whose A is the identity, and the convolution that makes patches.
    kept = [block for block in summary.blocks if block.structure[0] is not Structure.IDENTITY]
    others = {block.name for block in kept if block.layer != "Conv2d"}
    assert seen == others


@pytest.fixture
def _fresh_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def classifier() -> nn.Module:
    torch.manual_seed(0)
    small = {"vocab_size": 30, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    options = {"intermediate_size": 16, "max_position_embeddings": 16, "num_labels": 2}
    without = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**small, **options, **without))


def steps_of(called: nn.Module, optimizer: KFACOptimizer) -> dict[str, tuple[Any, Any]]:
    ids, labels = torch.arange(24).view(4, 6), torch.tensor([0, 1, 1, 0])
    for _ in range(2):
        optimizer.zero_grad()
        called(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    return optimizer.factors()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using .torch.compile:UserWarning")
@pytest.mark.usefixtures("_fresh_graphs")
def test_a_compiled_model_keeps_what_it_writes_into_its_config_and_may_be_left_out() -> None:
    trained, factors = [], []
    for given, is_compiled in ((True, True), (False, True), (True, False)):
        model = classifier()
        optimizer = KFACOptimizer(model if given else model.parameters(), lr=0.1, factor_update_period=1)
        called = torch.compile(model, backend="aot_eager") if is_compiled else model
        factors.append(steps_of(called, optimizer))
        assert optimizer.metrics()["unpreconditioned_blocks"] == 0
        trained.append(clones(model.parameters()))
    assert all(map(torch.equal, *trained[:2]))
    ours, _, theirs = factors
    assert ours.keys() == theirs.keys()
    for name, pair in ours.items():
        for left, right in zip(pair, theirs[name], strict=True):
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)
