"""The step that plans are compared with: plain SGD under DDP, on the same machines."""

from collections.abc import Sequence

from kfac_optim.distributed.planning.buckets import Item, Payload, make_buckets
from kfac_optim.distributed.planning.costs import CostModel
from kfac_optim.distributed.planning.plan_options import PlanOptions
from kfac_optim.distributed.planning.planned_model import Covered, Uncovered
from kfac_optim.distributed.planning.prediction import Compute, Seconds, predict


def predict_sgd(
    model: Sequence[Covered | Uncovered], ranks: int, cost: CostModel, options: PlanOptions | None = None
) -> Seconds:
    """Return seconds of a step of plain SGD under DDP, by the same model; arguments as of `make_plan`."""
    options = PlanOptions() if options is None else options
    items = [Item(each.name, each.words, -1, number) for number, each in enumerate(model)][::-1]
    gradients = make_buckets(
        Payload.GRADIENTS,
        items if ranks > 1 else [],
        limit=options.bucket_words(Payload.GRADIENTS),
        itemsize=options.itemsize(Payload.GRADIENTS),
        members=range(ranks),
        cost=cost,
    )
    forward = [2.0 * each.rows * each.words if isinstance(each, Covered) else 0.0 for each in model]
    return predict(
        [Compute(flops, 2 * flops) for flops in forward],
        {**dict.fromkeys(Payload, ()), Payload.GRADIENTS: gradients},
        refresh=0.0,
        apply=0.0,
        period=1,
        cost=cost,
    )
