"""Which linear layers read a flattened feature map, as far as that can be seen without running the model."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

# torch's modules that give every element of a feature map back in its place, or every channel in its place.
_ELEMENTWISE = ("activation", "dropout")
_CHANNELWISE = (*_ELEMENTWISE, "batchnorm", "instancenorm", "normalization", "padding", "pooling", "upsampling")
_NEITHER = (nn.GLU, nn.MultiheadAttention)


def flattened_channels(lineage: Sequence[nn.Module]) -> int | None:
    """Return the channels C of the feature map that a linear layer reads as `[batch, C · positions]`; None if unknown.

    It is seen where `nn.Sequential`s, one inside the other or not, have before the layer a convolution, then whatever
    keeps its channels (activations, pooling, normalisation, dropout), and then an `nn.Flatten()` of all but the batch.

    Args:
        lineage: the layer and all modules that contain it, nearest first.
    """
    layer, *around = lineage
    if not isinstance(layer, nn.Linear):
        return None
    outermost: nn.Module = layer
    for module in around:
        if not _runs_in_order(module):
            break
        outermost = module
    order = list(_in_order(outermost))
    if sum(module is layer for module in order) > 1:
        return None
    before = reversed(order[: order.index(layer)])
    flatten = next((module for module in before if not _is_of(module, _ELEMENTWISE)), None)
    if not isinstance(flatten, nn.Flatten) or (flatten.start_dim, flatten.end_dim) != (1, -1):
        return None
    maker = next((module for module in before if not _is_of(module, _CHANNELWISE)), None)
    return maker.out_channels if isinstance(maker, _ConvNd) else None


def _runs_in_order(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _in_order(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential) and _runs_in_order(module):
        for child in module:  # unlike `children()`, one that comes twice both times
            yield from _in_order(child)
    else:
        yield module


def _is_of(module: nn.Module, files: tuple[str, ...]) -> bool:
    """Return whether the very class of `module` is of one of these files of torch's."""
    if isinstance(module, nn.Identity):
        return True
    return type(module).__module__ in {f"torch.nn.modules.{file}" for file in files} and not isinstance(
        module, _NEITHER
    )
