"""Calls within `torch.func` of layers whose output is a sum of parts of their weight alone.

An embedding looks rows of its weight up, and a parameter may be added: how the output depends on the weight does not
change with what the model is differentiated with respect to. So derivatives of the model use the weight through this
one output, whatever their order, and the gradient of it is all there is to note (compare `weight_uses`).
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from kfac_optim.capture.batches import examples_of
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.loss_terms import RootCall
from kfac_optim.capture.weight_uses import Noted
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.utils.autograd import Function, in_function_transform, mapped, mapped_size

Read = Callable[[Tensor, Tensor | None], tuple[Tensor, int | None, tuple[int, ...]]]
"""Called with output and input of a layer as they are below all transforms, where each `torch.vmap` has put a dimension
before the others; returns input, examples and context as `CaptureWindow.note_use` takes them."""


def note_lookup(window: CaptureWindow, watch: LayerWatch, ids: Tensor, output: Tensor, *, training: bool) -> Tensor:
    """Note within transforms that rows of a weight were looked up.

    Args:
        window: takes the call.
        watch: the weight.
        ids: the ids of the rows, integers.
        output: the rows, that nothing was made of yet.
        training: whether the layer is in training mode.

    Returns:
        What stands for `output` from now on.
    """
    return note_below(window, watch, output, ids, _read_lookup, training=training)


def note_below(
    window: CaptureWindow,
    watch: LayerWatch,
    output: Tensor,
    layer_input: Tensor | None,
    read: Read,
    *,
    training: bool = True,
) -> Tensor:
    """Note a call within transforms; `read` is called with what `output` and `layer_input` are below them.

    Returns:
        What stands for `output` from now on.
    """
    root, place = window.roots.current(), 0
    if root is None or root.is_mapped:
        output, layer_input = mapped(output), layer_input if layer_input is None else mapped(layer_input)
    elif layer_input is not None and layer_input.dim() and (slices := mapped_size(layer_input)) is not None:
        rows = layer_input.size(0)
        place = int(rows in root.handed and not root.maps_examples(slices, rows))
    held = weakref.ref(window), weakref.ref(watch)
    return _NotedOutput.of(output, layer_input, partial(_note, *held, root, read, training), place)


def _read_lookup(_: Tensor, ids: Tensor | None) -> tuple[Tensor, int | None, tuple[int, ...]]:
    assert ids is not None
    return ids, examples_of(ids, 0), ()


def _note(
    window: "weakref.ref[CaptureWindow]",
    watch: "weakref.ref[LayerWatch]",
    root: RootCall | None,
    read: Read,
    training: bool,
    output: Tensor,
    layer_input: Tensor | None,
) -> Noted:
    found, layer = window(), watch()
    if found is None or layer is None:
        return None, None
    noted, examples, context = read(output, layer_input)
    return found.note_use(layer, noted, root, context, examples=examples, training=training)


class _NotedOutput(Function):
    """Gives the output of a layer again, and has its gradient noted below all transforms of `torch.func`.

    Each `torch.vmap` puts its dimension at `place`: 1 where it runs over what each example has, and examples are rows.
    """

    generate_vmap_rule = False

    @classmethod
    def of(
        cls, output: Tensor, layer_input: Tensor | None, note: Callable[[Tensor, Tensor | None], Noted], place: int
    ) -> Tensor:
        result: Tensor = cls.apply(output, layer_input, note, place)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(output: Tensor, *_: Any) -> Tensor:
        return output.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        output, layer_input, note, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.kfac_call, ctx.arrive = (None, None) if in_function_transform() else note(output, layer_input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is not None and ctx.arrive is not None:
            ctx.arrive(gradient)
        return gradient, None, None, None

    @staticmethod
    def jvp(_: Any, tangent: Tensor | None, *__: Any) -> Tensor | None:
        return None if tangent is None else tangent.clone()

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[int | None, ...], output: Tensor, layer_input: Tensor | None, note: Any, place: int
    ) -> tuple[Tensor, int]:
        of_output, of_input, *_ = in_dims
        assert of_output is not None, "what torch.vmap runs over in the input it runs over in the output"
        if layer_input is not None and of_input is not None:
            layer_input = layer_input.movedim(of_input, place)
        return _NotedOutput.of(output.movedim(of_output, place), layer_input, note, place), place
