"""Gradients that are sent compressed: by hooks of the user's under `Replicated`, and by `gradient_dtype` to owners."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.collectives import counted_calls
from helpers.ranks import Ranks
from helpers.training import EXAMPLES, Mixed, build, close, examples, share, squares
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from kfac_optim import KFACOptimizer
from kfac_optim.distributed import Auto, DistributedConfig, Exchange, Message, Replicated, Sharded, Strategy

NUMBERS = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "factor_update_period": 1, "inverse_update_period": 2}
Grads = dict[str, Tensor]


def gradients(model: nn.Module) -> Grads:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def hooked(rank: int, strategy: Strategy) -> tuple[list[Tensor], list[Grads]]:
    """Under `Sharded` the wrapper is found at a forward."""
    bare = build(Mixed)
    model = DistributedDataParallel(bare)
    model.register_comm_hook(None, fp16_compress_hook)
    given = bare if isinstance(strategy, Sharded) else model
    optimizer = KFACOptimizer(given, **NUMBERS, distributed=DistributedConfig(strategy))
    delivered = []
    for step in range(5):
        x, y = share(examples(step), [6, 6], rank)
        optimizer.zero_grad()
        squares(model(x), y).mean().backward()
        delivered.append(gradients(bare))
        optimizer.step()
    return [param.detach() for param in bare.parameters()], delivered


@pytest.mark.parametrize("strategy", [Replicated(), Sharded()], ids=str)
def test_a_step_goes_by_the_gradients_that_a_hook_delivers(two_ranks: Ranks, strategy: Strategy) -> None:
    found = two_ranks.run(hooked, strategy)
    model = build(Mixed)
    optimizer = KFACOptimizer(model, **NUMBERS)
    for step, delivered in enumerate(found[0][1]):
        x, y = examples(step)
        optimizer.zero_grad()
        squares(model(x), y).mean().backward()
        exact = gradients(model)
        assert any(not torch.equal(exact[name], given) for name, given in delivered.items()), "nothing was rounded"
        for name, param in model.named_parameters():
            if param.grad is not None:
                param.grad.copy_(delivered[name])
        optimizer.step()
    for params, _ in found:
        for ours, expected in zip(params, model.parameters(), strict=True):
            close(ours, expected.detach(), "a parameter", 1e-12)


def to_owners(rank: int, exchange: Exchange, wrapped: bool) -> tuple[Grads, Grads]:
    """This rank's own gradients, and the means of those that it owns, in float32."""
    bare = build(Mixed).float()
    model: Any = DistributedDataParallel(bare, bucket_cap_mb=1e-4) if wrapped else bare
    config = DistributedConfig(Sharded(), gradient_dtype=torch.bfloat16, exchange=exchange)
    optimizer = KFACOptimizer(model, **NUMBERS, distributed=config)
    ranks = dist.get_world_size()
    for step in range(4):
        x, y = (part.float() for part in share(examples(step), [EXAMPLES // ranks] * ranks, rank))
        twin = build(Mixed).float()
        twin.load_state_dict(bare.state_dict())
        squares(twin(x), y).mean().backward()
        optimizer.zero_grad()
        squares(model(x), y).mean().backward()
        if step == 3 and not wrapped:
            optimizer.clip_grad_norm_(1e9)  # which brings them to their owners
        means = gradients(bare)
        optimizer.step()
    owners = optimizer._executor.gradients.owner_of
    return gradients(twin), {name: means[name] for name, p in bare.named_parameters() if owners[p] == rank}


@pytest.mark.parametrize("wrapped", [True, False], ids=["DDP", "no wrapper"])
@pytest.mark.parametrize("exchange", Exchange)
def test_owners_get_means_of_gradients_that_were_rounded_once(
    four_ranks: Ranks, exchange: Exchange, wrapped: bool
) -> None:
    found = four_ranks.run(to_owners, exchange, wrapped)
    own = [each for each, _ in found]
    seen = {name: mean for _, means in found for name, mean in means.items()}
    assert seen.keys() == own[0].keys()
    for name, mean in seen.items():
        rounded = torch.stack([each[name].bfloat16().double() for each in own]).mean(0)
        # By segments the mean is rounded once more on its way from a segment to the owner; no wrapper rounds its own.
        once_more = 2**-8 if exchange is Exchange.SEGMENTS or not wrapped else 1e-6
        scale = torch.stack([each[name].double().abs() for each in own]).mean(0)
        assert ((mean.double() - rounded).abs() <= once_more * scale + 1e-7).all(), name
        assert not torch.equal(mean, torch.stack([each[name] for each in own]).mean(0)), "nothing was rounded"


def sent(rank: int, exchange: Exchange, dtype: torch.dtype | None) -> tuple[float, float]:
    """Bytes of gradients in one step, as they are handed over and as the messages say."""
    trace: list[Message] = []
    model = DistributedDataParallel(build(Mixed).float())
    config = DistributedConfig(Sharded(), gradient_dtype=dtype, exchange=exchange, observe=trace.append)
    optimizer = KFACOptimizer(model, **{**NUMBERS, "factor_update_period": 50}, distributed=config)
    for step in range(3):
        optimizer.zero_grad()
        x, y = (part.float() for part in share(examples(step), [6, 6], rank))
        loss = squares(model(x), y).mean()
        trace.clear()
        with counted_calls() as calls:
            loss.backward()
        optimizer.step()
    return sum(each.sent for each in calls), sum(each.sent_bytes for each in trace if "gradients" in each.name)


@pytest.mark.parametrize("exchange", Exchange)
def test_half_the_bytes_go_and_the_messages_say_so(two_ranks: Ranks, exchange: Exchange) -> None:
    whole, half = (two_ranks.run(sent, exchange, dtype) for dtype in (None, torch.bfloat16))
    for (handed, told), (before, _) in zip(half, whole, strict=True):
        assert handed == told == before / 2 > 0


def has_one(_: int) -> str:
    model = DistributedDataParallel(build(Mixed))
    model.register_comm_hook(None, fp16_compress_hook)
    try:
        KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(Sharded()))
    except RuntimeError as error:
        return str(error)
    return ""


def test_another_hook_is_refused_by_name_where_gradients_go_to_owners(two_ranks: Ranks) -> None:
    for message in two_ranks.run(has_one):
        assert "has one already (fp16_compress_hook), and takes only one. Leave it out: to send less, pass" in message


def casts_itself(_: int) -> str:
    model = DistributedDataParallel(build(Mixed), mixed_precision=_MixedPrecision(torch.bfloat16))
    try:
        KFACOptimizer(model, **NUMBERS, distributed=DistributedConfig(Sharded()))
    except RuntimeError as error:
        return str(error)
    return ""


def test_mixed_precision_of_the_wrapper_is_refused_by_name_where_gradients_go_to_owners(two_ranks: Ranks) -> None:
    for message in two_ranks.run(casts_itself):
        assert "that of mixed_precision=: leave this out, and run the forward under torch.autocast" in message


def local(rank: int, strategy: Strategy, given: str, wraps: bool) -> str:
    """After the second step the hook would average on each rank alone."""
    bare = build(Mixed)
    model = DistributedDataParallel(bare)
    state = PostLocalSGDState(None, [dist.new_group([each]) for each in range(2)][rank], 2)
    hook = fp16_compress_wrapper(post_localSGD_hook) if wraps else post_localSGD_hook  # type: ignore[arg-type]
    try:
        if given == "before":
            model.register_comm_hook(state, hook)
        known = bare if given == "late" else model
        optimizer = KFACOptimizer(known, **NUMBERS, distributed=DistributedConfig(strategy))
        if given != "before":
            model.register_comm_hook(state, hook)
        squares(model(examples(rank)[0]), examples(rank)[1]).mean().backward()
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("strategy", "given", "wraps"),
    [
        (Replicated(), "before", False),
        (Replicated(), "after", True),
        (Replicated(), "late", False),
        (Sharded(), "late", False),
    ],
    ids=str,
)
def test_local_sgd_is_refused_by_name_wherever_its_hook_is_found(
    two_ranks: Ranks, strategy: Strategy, given: str, wraps: bool
) -> None:
    for message in two_ranks.run(local, strategy, given, wraps):
        name = "fp16_compress_wrapper_hook" if wraps else "post_localSGD_hook"
        assert f"{name} of this DistributedDataParallel averages gradients over all of its ranks at the" in message


@pytest.mark.parametrize("strategy", [Replicated(), Auto(candidates=(Sharded(),))], ids=str)
def test_a_dtype_of_gradients_is_refused_where_they_do_not_go_to_owners(strategy: Strategy | Auto) -> None:
    with pytest.raises(ValueError, match=r"gradient_dtype=torch.bfloat16 is of gradients that go to owners"):
        DistributedConfig(strategy, gradient_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="gradient_dtype of DistributedConfig"):
        DistributedConfig(Sharded(), gradient_dtype=torch.float16)
