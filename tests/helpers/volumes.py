"""Closed forms: words that all ranks together send in a step, with numbers for what moves and how often.

For a model with gradients of `n` words, factors of `s = Σ a² + g²` whole and `t` packed in triangles; on P ranks, with
w of them preconditioning a layer, statistics every `k_f` and refreshes every `k_i` steps. A plan sends besides, with
each factor, its mass (`PlanOptions.mass_words`): put that into `t` where words are to be equal. The words of `control`
come on top.
"""

from fractions import Fraction


def sgd(ranks: int, n: int) -> Fraction:
    """SGD under DDP: one ring all-reduce."""
    return Fraction(2 * (ranks - 1) * n)


def replicated(ranks: int, workers: int, n: int, t: int, results: int, k_i: int) -> Fraction:
    """`Replicated`; `results` are the words of all inverses, `t` where they go as triangles."""
    refresh = (ranks - 1) * t + (workers - 1) * results
    return sgd(ranks, n) + Fraction(refresh, k_i) + (ranks - workers) * n


def sharded(ranks: int, n: int, t: int, k_i: int) -> Fraction:
    """`Sharded`."""
    return sgd(ranks, n) + Fraction((ranks - 1) * t, k_i)


def fully_sharded(ranks: int, n: int, t: int, k_i: int) -> Fraction:
    """What K-FAC adds under FSDP2: row-sharded gradients to the owners and back, and the factors."""
    return Fraction(2 * n * (ranks - 1), ranks) + Fraction((ranks - 1) * t, k_i)


def local_statistics(ranks: int, n: int) -> Fraction:
    """`Replicated` with one worker and `Statistics.OWN`; `Sharded` then sends what `sgd` does."""
    return sgd(ranks, n) + (ranks - 1) * n


def kaisa(ranks: int, workers: int, n: int, s: int, k_f: int, k_i: int) -> Fraction:
    """KAISA (Pauloski et al. 2021) as published: whole factors all-reduced at every update.

    With as many workers as ranks COMM_OPT, with one MEM_OPT, HYBRID_OPT between. Its workers get the gradient with the
    inverses, except where there is only one.
    """
    words = sgd(ranks, n) + Fraction(2 * (ranks - 1) * s, k_f) + (ranks - workers) * n
    return words + Fraction((workers - 1) * (s + n), k_i)


def control(ranks: int, layers: int, buckets: int, traces: int, scalars: int, k_i: int) -> Fraction:
    """What ranks agree by: all-reduces of a few words of 8 bytes.

    Args:
        ranks: P.
        layers: that are covered.
        buckets: of factor sums.
        traces: numbers, masses included, that owners of different factors of a layer tell one another.
        scalars: of the sums that bound a step (`PlanOptions.scalars`); under `Replicated` 0.
        k_i: steps between refreshes.
    """
    marks = 128 * max(-(-(layers + buckets) // 128), 1)  # votes of small models have one size
    return 2 * (ranks - 1) * (12 + marks + scalars + Fraction(12 * layers + traces, k_i))
