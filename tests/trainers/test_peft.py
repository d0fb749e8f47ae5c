"""PEFT: the adapters of LoRA are linear layers, and are preconditioned while the model around them is frozen."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kfac_optim import KFACOptimizer

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools to each other

RANK, ALPHA, STEPS = 2, 4, 8


def language_model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))


class Adapted(nn.Module):
    """Adds `B A x` to a layer that is not trained, as LoRA is defined (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.a, self.b = (nn.Linear(*weight.T.shape, bias=False) for weight in (a, b))
        self.a.weight.data.copy_(a)
        self.b.weight.data.copy_(b)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.b(self.a(x)) * (ALPHA / RANK)


def train(model: nn.Module, optimizer: KFACOptimizer) -> list[float]:
    tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_adapters_are_trained_as_linear_layers_written_by_hand() -> None:
    """The second adapter begins at zero, so that the first has no gradient at the first step."""
    model = peft.get_peft_model(
        language_model(), peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "v_proj"])
    )
    twin = language_model().requires_grad_(False)
    for layer, adapted in zip(twin.model.layers, model.base_model.model.model.layers, strict=True):
        for name in ("q_proj", "v_proj"):
            lora = getattr(adapted.self_attn, name)
            a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), a, b))
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "factor_update_period": 1}
    optimizer, reference = KFACOptimizer(model, **options), KFACOptimizer(twin, **options)
    losses = train(model, optimizer)
    assert losses == train(twin, reference)
    assert losses[-1] < losses[0]
    ours, theirs = ([p for p in each.parameters() if p.requires_grad] for each in (model, twin))
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
    assert len(optimizer.factors()) == len(ours) == 8
    assert optimizer.metrics()["measured_parameters"] == optimizer.metrics()["covered_parameters"] == 1
