"""The hooks on the model and on its layers, which tell the capture window of forwards."""

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import tree_leaves

from kfac_optim.capture.batches import examples_of, first_dimensions, first_tensor
from kfac_optim.capture.layer_watch import LayerWatch
from kfac_optim.capture.loss_terms import read_terms, read_terms_of_inputs
from kfac_optim.capture.model_calls import outermost_call
from kfac_optim.capture.noted_outputs import note_lookup
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.factors.layer_call import adds_bias_to_first
from kfac_optim.taylor.carried import Carried, StackedProduct
from kfac_optim.utils.autograd import in_function_transform, is_mapped
from kfac_optim.utils.hooks import Handle, Handles, PicklableHook, is_on, outside

_NO_MODE = BaseTorchFunctionMode()


def watch_root(window: CaptureWindow, model: nn.Module, args_under_way: tuple[Any, ...] | None = None) -> Handle:
    """Have every forward of the model tell the window of its loss terms.

    Args:
        window: the window, held weakly.
        model: the model.
        args_under_way: the arguments of a forward that has begun, which counts as well.
    """
    if isinstance(model, torch.jit.ScriptModule):  # which takes no hooks, and has no layer to listen to
        return Handles()
    hooks = _RootHooks(window, model)
    handle = Handles(
        model.register_forward_pre_hook(PicklableHook(hooks.enter), prepend=True, with_kwargs=True),
        model.register_forward_hook(PicklableHook(hooks.leave), with_kwargs=True, always_call=True),
    )
    if args_under_way is not None:
        hooks.enter(model, args_under_way, None)
        window.catch_up(model, args_under_way)
    return handle


def watch_called_part(
    window: CaptureWindow, model: nn.Module, trained: Collection[nn.Parameter]
) -> dict[nn.Module, Handle]:
    """Watch the part of the model whose forward is running, as the model itself, if it holds all that is trained.

    A module of Lightning is not called: its training step calls the network that it holds.

    Returns:
        The part, with the handle of its hooks; nothing if there is none.
    """
    if (call := outermost_call(set(model.modules()))) is None:
        return {}
    part, inputs = call
    if not set(trained) <= set(part.parameters()):
        return {}
    window.outside = None
    window.roots.begin_late(part, read_terms_of_inputs(window.rule, inputs))
    return {part: watch_root(window, part)}


class LayerHook:
    """Notes the calls of a layer, whose output is one tensor; the window takes those that a backward reaches.

    Args:
        window: the window, held weakly.
        module: the layer.
        watch: what is asked of the layer, held weakly.
        unbatched_ndim: dimensions of an input without a batch dimension.
        is_product: whether the forward is a product with the weight, which the listener's mode may see.
    """

    __slots__ = ("_is_product", "_name", "_unbatched_ndim", "_watch", "_window")

    def __init__(
        self, window: CaptureWindow, module: nn.Module, watch: LayerWatch, unbatched_ndim: int, *, is_product: bool
    ) -> None:
        self._window = weakref.ref(window)
        self._watch = weakref.ref(watch)
        self._name = next((name for name, param in module._parameters.items() if param is watch.weight), None)
        self._unbatched_ndim = unbatched_ndim
        self._is_product = is_product

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Tensor | None:
        window, watch = self._window(), self._watch()
        if window is None or watch is None:
            return None
        if torch.compiler.is_compiling():
            if not window.captures():
                return None
        elif window.outside is not None and not window.roots.is_under_way():
            window.outside()
        if not torch.is_grad_enabled():
            window.roots.layer_without_graph()
            return None
        in_mode = is_on(window.listener.mode)
        if not (in_mode or torch.compiler.is_compiling() or watch.wanted()):
            return None
        if not isinstance(output, Tensor) or is_parametrized(module):
            return None
        if self._name is not None and module._parameters.get(self._name) is not watch.used:
            return None  # torch.func.functional_call runs the module with something else for its weight
        if in_mode:
            if not self._is_product:
                if window.listener.layer_ran(watch.weight):
                    return None
            elif window.listener.module_ran(watch.weight):
                return None
        if isinstance(output, Carried):
            if self._is_product and output.product is not None:
                _note_stacked(window, watch, output.product, module.training)
            return None  # what else has derivatives with it is not measured, which the gradient check finds
        if in_mode and not torch.compiler.is_compiling():
            return outside(window.listener.mode, self._note, window, watch, module.training, args, kwargs, output)
        return self._note(window, watch, module.training, args, kwargs, output)

    def _note(
        self,
        window: CaptureWindow,
        watch: LayerWatch,
        training: bool,
        args: Any,
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> Tensor | None:
        layer_input = first_tensor(args, kwargs, least_ndim=0 if self._unbatched_ndim == 0 else 1)
        if layer_input is None:
            return None
        if self._unbatched_ndim == 0 and not torch.compiler.is_compiling() and in_function_transform():
            return note_lookup(window, watch, layer_input, output, training=training)
        examples = examples_of(layer_input, self._unbatched_ndim)
        return window.note_output(watch, layer_input, output, examples=examples, training=training)


def _is_differentiated(inputs: Any) -> bool:
    """Return whether a derivative with respect to the model's inputs is to be expected: one is a leaf that needs it."""
    leaves = _tensors(inputs)
    return any(leaf.requires_grad and leaf.is_leaf and not isinstance(leaf, nn.Parameter) for leaf in leaves)


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _note_stacked(window: CaptureWindow, watch: LayerWatch, product: StackedProduct, training: bool) -> None:
    """Note the one product of value and derivatives that a layer has made (`taylor.laplacian`)."""
    context = adds_bias_to_first(product.with_bias) if product.with_bias else ()
    window.note(watch, product.rows, product.output, examples=len(product.rows), training=training, context=context)


class _RootHooks:
    def __init__(self, window: CaptureWindow, model: nn.Module) -> None:
        self._window = weakref.ref(window)
        self._number = id(model)

    def enter(self, model: nn.Module, args: Any, kwargs: dict[str, Any] | None) -> None:
        window = self._window()
        if window is not None and torch.compiler.is_compiling():
            if window.captures():
                nested = is_on(window.listener.mode)
                window.graphs.tape.begin(self._number, nested)
                # A model that calls itself must not leave the mode that its outermost call has entered.
                mode = _NO_MODE if nested else window.listener.mode or _NO_MODE
                mode.__enter__()  # type: ignore[no-untyped-call]
        elif window is not None:
            window.roots.leave_interrupted(model)
            if not window.roots.is_under_way():
                window.begin_forward()
                if not window.idle.on and _is_differentiated((args, kwargs)):
                    window.listener.expect_derivatives()
                if window.recorder is not None:
                    window.recorder.begin(model, args, kwargs)
            is_handed_slices = in_function_transform() and any(map(is_mapped, _tensors((args, kwargs))))
            handed = () if window.idle.on else first_dimensions((args, kwargs))
            window.roots.enter(id(model), is_mapped=is_handed_slices, handed=handed)

    def leave(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        window = self._window()
        if window is not None and torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                self._leave_in_graph(window, (args, kwargs), output)
            return
        if window is None or (root := window.roots.leave()) is None:
            return
        if not window.roots.is_under_way():
            window.end_forward()
            if window.recorder is not None:
                window.recorder.end(root, kwargs, output)
            if window.estimate is not None:
                window.estimate(root, window.roots.take_expected(), output)
                window.await_terms(root, output)
                return
        if not in_function_transform():  # otherwise the batch is not seen here, but by the layers
            root.terms = read_terms(window.rule, (args, kwargs), output)
        window.await_terms(root, output)
        if root.recomputes and torch.is_grad_enabled():
            window.roots.await_backward(root, output)

    def _leave_in_graph(self, window: CaptureWindow, inputs: Any, output: Any) -> None:  # pragma: traced
        if window.captures():
            _NO_MODE.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # whichever it is
            terms = _terms_in_graph(window, inputs, output)
            window.graphs.tape.end(-1 if terms is None else terms)
        elif window.tally.counts_always:
            window.await_terms_in_graph(self._number, _terms_in_graph(window, inputs, output), output)


def _terms_in_graph(window: CaptureWindow, inputs: Any, output: Any) -> int | None:  # pragma: traced
    return read_terms(window.rule, inputs, output) if window.terms_of is None else window.terms_of(output)
