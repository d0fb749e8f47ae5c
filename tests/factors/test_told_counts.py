"""A rank's sample is its share of that of all ranks, once these have told each other what they counted."""

import torch
from torch import Tensor

from kfac_optim.factors.kronecker_factors import FactorPair
from kfac_optim.specs import LayerSpec, Structure


class Rows:
    """Has the second moment 1 of some rows, of a trace."""

    groups, has_input = None, True

    def __init__(self, rows: float, trace: float) -> None:
        self.count, self.trace = torch.tensor(rows), torch.tensor(trace)

    def input_moment(self, _: Structure) -> Tensor:
        return self.count * torch.eye(2, dtype=torch.float64).unsqueeze(0)

    output_moment = input_moment


def test_a_rank_whose_rows_turn_out_to_be_none_keeps_its_average() -> None:
    pair = FactorPair(LayerSpec("layer", ("weight",), 2, 2), dtype=torch.float64, device=torch.device("cpu"))
    assert pair.a is not None
    pair.accumulate(Rows(4.0, 3.0))  # type: ignore[arg-type]
    pair.tell(torch.tensor([8.0, 6.0], dtype=torch.float64))
    pair.fold(1.0, 0.9, 1.0)
    held = pair.a.packed.clone()
    pair.accumulate(Rows(0.0, 0.0))  # type: ignore[arg-type]
    pair.tell(torch.tensor([8.0, 6.0], dtype=torch.float64))
    pair.fold(1.0, 0.9, 1.0)
    torch.testing.assert_close(pair.a.packed, held, rtol=0, atol=0)
