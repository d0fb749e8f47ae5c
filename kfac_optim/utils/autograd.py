"""What is asked of autograd, much of it privately: hooks on gradients, and what the backward that is running does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import profiler
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode
from torch.utils.hooks import RemovableHandle

from kfac_optim.utils.dynamo import call_as_it_is, inline_only

Node: TypeAlias = torch.autograd.graph.Node
GradientEdge = torch.autograd.graph.GradientEdge
Function = torch.autograd.Function

_NOTHING = nullcontext()
_REPLAYS = _CachingTorchDispatchMode, _CachedTorchDispatchMode


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a context whose operations torch's profilers show under `name`; where none runs it costs next to nothing.

    The flag is what torch's own optimizers ask.
    """
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Call `hook` with the gradient of `tensor` in every backward that brings one; what it returns replaces it."""
    handle: RemovableHandle = tensor.register_hook(partial(_if_brought, hook))  # type: ignore[no-untyped-call]
    return handle


def _if_brought(hook: Callable[[Tensor], Any], gradient: Tensor | None) -> Any:
    """Call `hook`, unless an `autograd.Function` has returned None for the gradient of its input."""
    return None if gradient is None else hook(gradient)


def on_gradient_first(tensor: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Call `hook` with each gradient that backward brings to `tensor`, before the hooks that others have set on it."""
    handle = on_gradient(tensor, hook)
    hooks = tensor._backward_hooks
    assert hooks is not None
    # The engine calls them in the order in which the dict was filled.
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


def on_accumulated(leaf: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Call `hook` with `leaf` after each backward that has added to its gradient."""
    handle: RemovableHandle = leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def after_backward(function: Callable[[], None], rounds: int = 3) -> None:
    """Have `function` called after the running backward, and after what others have asked for in the same way.

    What they ask for may itself ask for more, as DistributedDataParallel does, so that `function` asks again that many
    times.
    """
    # Private, as FSDP uses it.
    torch.autograd.Variable._execution_engine.queue_callback(
        function if rounds == 1 else lambda: after_backward(function, rounds - 1)
    )


def edge(tensor: Tensor) -> GradientEdge:
    """Tell where the gradient of `tensor` passes in the graph; the tensor itself is not kept."""
    return torch.autograd.graph.get_gradient_edge(tensor)


def is_sink(node: Node) -> bool:
    """Tell whether DDP passes the outputs of the model that it wraps through the node, each to the input of its number.

    It does so where parameters may be unused, and in the first step of a static graph.
    """
    return node.name() == "_DDPSinkBackward"


def running_edge(output_nr: int) -> GradientEdge:
    """Give the edge of the gradient whose hook is running, by the number of the tensor among its node's outputs.

    Behind the node of DDP it is that of the model's own output: a pass through the node takes DDP's place for the
    backward, and gradients of a static graph would not be averaged.
    """
    node = torch._C._current_autograd_node()
    behind, number = node.next_functions[output_nr] if is_sink(node) else (None, 0)
    return GradientEdge(node, output_nr) if behind is None else GradientEdge(behind, number)


def pull_back(
    outputs: Sequence[GradientEdge], vectors: Sequence[Tensor], to: Sequence[GradientEdge]
) -> list[Tensor | None]:
    """Return gradients at the edges `to` of `Σ ⟨vector, output⟩`, None where they do not depend on it.

    The graph is kept, nothing is accumulated, and hooks on gradients between are called.
    """
    return list(torch.autograd.grad(outputs, to, vectors, retain_graph=True, allow_unused=True))


def allow_another_backward(node: Node) -> None:
    """Mark a compiled graph as one whose backward does not overwrite what it saved, if it was compiled to be so.

    `dynamo.keep_what_is_saved` has it compiled so. torch (2.13) does not record that, and refuses to retain the graph
    unless its first backward did.
    """
    metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
    if getattr(metadata, "bw_donated_idxs", ()) is None:
        metadata.bw_donated_idxs = []  # type: ignore[union-attr]


def no_view(output: Tensor) -> Tensor:
    """Return `output`, or the same memory as a tensor that is no view for autograd.

    A change in place gives a view a new place in the graph, where a hook set on it before is not called any more.
    """
    if output.requires_grad and (torch.compiler.is_compiling() or output._is_view()):
        same: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return same
    return output


class _PassedOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, hook: Callable[..., Tensor], anchor: Tensor | None, *kept: Tensor) -> Tensor:
        ctx.hook, ctx.is_anchored = hook, anchor is not None
        ctx.set_materialize_grads(False)  # zeros in the place of None would be a gradient of the layer
        ctx.save_for_backward(*kept)
        same: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return same

    @staticmethod
    @inline_only
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        zero = torch.zeros((), device="cpu") if ctx.is_anchored else None
        passed_on = None if gradient is None else call_as_it_is(ctx.hook, *ctx.saved_tensors, gradient)
        return passed_on, None, zero, *(None for _ in ctx.saved_tensors)


def with_hook(output: Tensor, hook: Callable[..., Tensor], anchor: Tensor | None, *kept: Tensor) -> Tensor:
    """Give `output` again, for the graph to go on with, and have each backward that comes to it call `hook`.

    This is `on_gradient` as a node of the graph, for places where a hook on a tensor cannot stand.

    Args:
        output: what the graph goes on with.
        hook: a function that is called with the tensors that are kept and the gradient, and gives the gradient for the
            rest of the graph.
        anchor: a leaf `[]` of the graph, whose gradient is zero: a backward with respect to it alone calls the hook.
        kept: tensors, saved in the graph.
    """
    same: Tensor = _PassedOn.apply(output, hook, anchor, *kept)  # type: ignore[no-untyped-call]
    return same


def is_cast_of(tensor: Tensor, param: Tensor | None) -> bool:
    """Return whether the tensor is a parameter, or what `to` made of it in another dtype."""
    if tensor is param or torch.compiler.is_compiling():  # graphs being traced do not tell
        return tensor is param
    node = tensor.grad_fn
    if param is None or node is None or node.name() != "ToCopyBackward0" or tensor.device != param.device:
        return False
    leaf = node.next_functions[0][0]
    return leaf is not None and getattr(leaf, "variable", None) is param


def gathered_from(tensor: Tensor) -> tuple[nn.Parameter, Tensor] | None:
    """Return the parameter of which the tensor is `param[ids]`, with these ids `[rows]`; None for any other tensor."""
    node = tensor.grad_fn
    if node is None or node.name() not in ("IndexBackward0", "IndexSelectBackward0"):
        return None
    param = getattr(node.next_functions[0][0], "variable", None)
    if node.name() == "IndexBackward0":
        ids = node._saved_indices[0] if len(node._saved_indices) == 1 else None  # type: ignore[attr-defined]
    else:
        ids = node._saved_index if node._saved_dim == 0 else None  # type: ignore[attr-defined]
    if not isinstance(param, nn.Parameter) or not isinstance(ids, Tensor):
        return None
    return (param, ids) if ids.dim() == 1 and ids.dtype in (torch.int64, torch.int32) else None


def version(tensor: Tensor) -> int:
    """Return the count of changes in place; inference tensors allow none and have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def accumulator(weight: Tensor) -> Node | None:
    """Return the node that accumulates into `weight.grad`; operators of compiled graphs, and transforms, have none."""
    if not weight.requires_grad or in_function_transform():
        return None
    # Asking takes a view of the weight. Selective checkpointing replays the operators of a forward in their order, and
    # would give this view to one of the model's own.
    replayed = any(isinstance(mode, _REPLAYS) for mode in _get_current_dispatch_mode_stack())
    with _disable_current_modes() if replayed else _NOTHING:
        return torch.autograd.graph.get_gradient_edge(weight).node


def before_node(node: Node, hook: Callable[..., Any]) -> RemovableHandle:
    """Have `hook` called before each time that a backward runs a node, as long as somebody holds the node."""
    return node.register_prehook(hook)


def reaches(weight: Tensor, node: Node | None = None) -> bool:
    """Return whether the backward that is running accumulates into `weight.grad`, by its node if that is known."""
    node = node or accumulator(weight)
    if node is None or not weight.requires_grad:
        return False
    try:
        # Private, but the only way to ask; torch's own checkpointing and FSDP rely on it.
        reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad(loss, weights): nothing is accumulated
        return False
    return reached


def is_asked(weight: Tensor) -> bool:
    """Return whether the backward that is running needs the gradient of `weight`: to accumulate it, or to return it.

    `ctx.needs_input_grad` does not know of the `inputs` of `torch.autograd.grad`, and says yes in all backwards.
    """
    try:
        asked: bool = torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(weight).node)
    except RuntimeError:  # autograd.grad(loss, weights)
        return True
    return asked


def graph_is_kept() -> bool:
    """Tell whether the running backward leaves the graph as it is (`retain_graph`), for another to go through it.

    Otherwise nodes drop what they saved. So a second backward cannot come to a weight that the same input is multiplied
    by.
    """
    kept: bool = torch._C._autograd._get_current_graph_task_keep_graph()  # private, as AOTAutograd uses it
    return kept


def running_backward() -> int:
    """Return the number of the backward that is running on this thread."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Return whether a backward is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def without_function_modes() -> AbstractContextManager[None]:
    """Return a context in which torch's functions go past function modes, and past those of tensor subclasses."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def is_of_custom_function(tensor: Tensor) -> bool:
    """Return whether `tensor` is an output of a custom autograd function, whatever class of tensor it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)


def in_function_transform() -> bool:
    """Return whether `torch.func` is at work (`grad`, `vmap`, …): its passes are not the training loop's."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def push_forward(pulled: Sequence[Tensor], through: Tensor, vectors: Sequence[Tensor]) -> Tensor:
    """Return the derivative of a tensor along a change of others, `J v`, by two backward passes.

    Args:
        pulled: `Jᵀ u`, as `pull_back_differentiably` has returned them.
        through: `u`.
        vectors: `v`, shaped like `pulled`.
    """
    (derivative,) = torch.autograd.grad(pulled, through, vectors, retain_graph=True, allow_unused=True)
    return torch.zeros_like(through) if derivative is None else derivative


def pull_back_differentiably(output: GradientEdge, vector: Tensor, to: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients at the leaves `to` of `⟨vector, output⟩` as functions of `vector`, which requires gradients.

    None stands for those that do not depend on it. Hooks on the leaves are not called, nothing is accumulated, and the
    graph is kept.
    """
    held = [(leaf, list(leaf._backward_hooks.items())) for leaf in to if leaf._backward_hooks]
    for leaf, _ in held:
        leaf._backward_hooks.clear()  # type: ignore[union-attr]
    try:
        return list(torch.autograd.grad([output], to, [vector], create_graph=True, allow_unused=True))
    finally:
        for leaf, hooks in held:
            leaf._backward_hooks.update(hooks)  # type: ignore[union-attr]


def below_transforms(tensor: Tensor) -> Tensor:
    """Return what a tensor is without the transforms of `torch.func` that differentiate with respect to it.

    One that `torch.vmap` runs over stays as it is from there on.
    """
    while not torch.compiler.is_compiling() and torch._C._functorch.is_gradtrackingtensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_mapped(tensor: Tensor) -> bool:
    """Return whether the outermost `torch.vmap` that is at work runs over a tensor."""
    return mapped_size(tensor) is not None


def mapped_size(tensor: Tensor) -> int | None:
    """Return how many slices of a tensor the outermost `torch.vmap` at work runs over; None if it does not."""
    found = _outermost_vmap()
    while found is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor) and torch._C._functorch.maybe_get_level(tensor) == found[0]:
            return found[1]
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return None


def mapped(tensor: Tensor) -> Tensor:
    """Return a tensor of numbers expanded over the outermost `torch.vmap` that is at work, if there is one."""
    found = _outermost_vmap()
    if found is None or is_mapped(tensor):
        return tensor
    level, size = found
    with temporarily_clear_interpreter_stack():
        zeros = torch.zeros(size, dtype=tensor.dtype, device=tensor.device)
    return tensor + torch._C._functorch._add_batch_dim(zeros, 0, level)


def _outermost_vmap() -> tuple[int, int] | None:
    """Return level and size of the outermost `torch.vmap` that is at work."""
    functorch = torch._C._functorch
    for interpreter in functorch.get_interpreter_stack() or ():
        if interpreter.key() == functorch.TransformType.Vmap:
            return interpreter.level(), functorch.CVmapInterpreterPtr(interpreter).batchSize()
    return None


@contextmanager
def differentiable() -> Iterator[None]:
    """Return a context in which what is computed can be differentiated in both modes, as torch's own formulas can be.

    Without it the derivatives in a function's `jvp` are constants.
    """
    with torch.enable_grad(), torch.autograd.forward_ad._set_fwd_grad_enabled(True):
        yield


def is_batched_by_grad(gradient: Tensor) -> bool:
    """Return whether `torch.autograd.grad(…, is_grads_batched=True)` runs over it, which knows no functions of ours."""
    batched: bool = torch._C._functorch.is_legacy_batchedtensor(gradient)
    return batched


def saved_tensors_are_hooked() -> bool:
    """Return whether hooks stand between the graph and what it saves, as under checkpointing without reentrance."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # private, as torch's compiler asks
