"""A mixture of experts on one process, and the same with its experts divided among ranks, to which tokens travel."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_to_all_single

EXPERTS, WIDTH = 8, 3


class Grouped(nn.Module):
    """Holds the weights of some experts in one parameter, `[experts, in, out]`."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weights.clone())

    def forward(self, padded: Tensor) -> Tensor:
        """Return the rows of each expert, `[experts, rows, out]`, of `[experts, rows, in]`."""
        return torch.einsum("eci,eio->eco", padded, self.weight)


class Mixture(nn.Module):
    """Layers that all ranks share around experts; the first column of an input says which expert is the example's.

    Args:
        kind: "linear", a module each; or "einsum", one parameter for all.
        group: the ranks that the experts are divided among; None is this process alone.
        outputs: width of the output.
    """

    def __init__(self, kind: str, group: dist.ProcessGroup | None = None, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.local = EXPERTS // self.ranks
        number = 0 if group is None else dist.get_rank(group)
        self.first, self.gate, self.last = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, outputs)
        weights = torch.randn(EXPERTS, WIDTH, WIDTH)[number * self.local : (number + 1) * self.local]
        self.kind = kind
        self.experts: nn.ModuleList | Grouped
        if kind == "linear":
            self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in weights])
            for expert, weight in zip(self.experts, weights, strict=True):
                expert.weight.data.copy_(weight.T)
        else:
            self.experts = Grouped(weights)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden, ids = self.first(x[:, 1:]).tanh(), x[:, 0].long()
        out: Tensor = self.last(hidden + self.gate(hidden).sigmoid() * self.routed(hidden, ids))
        return out

    def routed(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Send each row to the rank of its expert, and bring back what becomes of it."""
        if self.group is None:
            return self.of_experts(hidden, ids)
        order = ids.argsort(stable=True)
        sent = torch.bincount(ids // self.local, minlength=self.ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        theirs = torch.empty(int(received.sum()), dtype=ids.dtype)
        dist.all_to_all_single(theirs, ids[order], received.tolist(), sent.tolist(), group=self.group)
        rows = all_to_all_single(hidden[order], received.tolist(), sent.tolist(), self.group)
        out = self.of_experts(rows, theirs % self.local)
        back = all_to_all_single(out, sent.tolist(), received.tolist(), self.group)
        return back[order.argsort()]

    def of_experts(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Return what the experts that are here make of rows; an expert without rows is not called."""
        if isinstance(self.experts, nn.ModuleList):
            out = rows * 0.0  # rows lead backward through the exchange, also where there are none
            for expert in ids.unique().tolist():
                out = out.index_add(0, at := (ids == expert).nonzero().flatten(), self.experts[expert](rows[at]))
            return out
        chosen = nn.functional.one_hot(ids, self.local).to(rows.dtype)
        places = (chosen.cumsum(0) * chosen).sum(1).long() - 1
        padded = rows.new_zeros(self.local, max(len(rows), 1), WIDTH).index_put((ids, places), rows)
        out: Tensor = self.experts(padded)[ids, places]
        return out

    def of_others(self) -> list[nn.Parameter]:
        """Return the parameters that are the same on all ranks."""
        return [param for name, param in self.named_parameters() if not name.startswith("experts")]

    def of_experts_here(self) -> list[nn.Parameter]:
        return [param for name, param in self.named_parameters() if name.startswith("experts")]


def weights_of(experts: Sequence[Tensor]) -> Tensor:
    """Return the weights of experts, `[experts, in, out]`, whatever kind they are of."""
    return torch.cat([each.detach() if each.dim() == 3 else each.detach().T.unsqueeze(0) for each in experts])
