"""What `torch.compile` makes of functions of ours that run within a compiled model: part of its graph, or nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.callback import CallbackArgs, callback_handler
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.symbolic_convert import tls
from torch._functorch import config

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def inline_only(function: F) -> F:
    """Decorates a function that may become part of a graph, but of which no graph of its own is made.

    The hooks of a compiled module, and modes around it, are often called outside its graph, where dynamo would compile
    each of their calls for itself.
    """
    skip_code(function.__code__)
    return function


def as_one_node(function: F) -> F:
    """Wrap `function` for modes to call while they are traced: it is one node of the graph, run outside all modes.

    Dynamo makes what a mode does part of the graph, and then runs the graph in that mode all the same
    (https://github.com/pytorch/pytorch/pull/196056): a backend that calls the graph's functions one by one, such as
    "eager", would show the mode each of them a second time.
    """

    def node(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return torch.compiler.allow_in_graph(node)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keep_what_is_saved(*, may_run_again: bool) -> int:
    """Have the graph that is being traced save what its backward needs, of which operators of ours are a part.

    Otherwise a memory budget (`activation_memory_budget`) may make the backward run these operators again. If the
    backward itself may run again, it must also leave what was saved unchanged: otherwise the compiler may let it write
    there (`donated_buffer`). Both settings are read when the graph is compiled, which comes next, on this thread; they
    are put back when compilation ends, with or without an error.
    """
    wanted: dict[str, Any] = {"activation_memory_budget": 1.0, **({"donated_buffer": False} if may_run_again else {})}
    if changed := {name: value for name, value in wanted.items() if getattr(config, name) != value}:
        setting = config.patch(changed)
        setting.__enter__()

        def put_back(_: CallbackArgs) -> None:
            callback_handler.end_callbacks = [each for each in callback_handler.end_callbacks if each is not put_back]
            setting.__exit__(None, None, None)

        callback_handler.register_end_callback(put_back)
    return 0


# What runs a part of a graph with all that it does. Conditions, loops and custom functions do not.
_WITH_EFFECTS = ("tag_activation_checkpoint", "invoke_subgraph")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traces_without_effects() -> bool:
    """Return whether what is being traced may have no effects: a branch or loop of the graph, or within `torch.func`.

    No operator of ours can stand there. Dynamo says it nowhere but in its tracers, of which each part of a graph has
    one, within that of the part around it.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    translator = getattr(tls, "current_tx", None)  # there is none where torch.export traces without dynamo
    tracer = None if translator is None else translator.output.current_tracer
    while tracer is not None and tracer.parent is not None:
        if not str(tracer.source_target).endswith(_WITH_EFFECTS):
            return True
        tracer = tracer.parent
    return False


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which compiled models run as they were written; their graphs are there again after it."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@inline_only
def call_as_it_is(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call `function` as a part of the graph being traced, if there is one; otherwise with all within uncompiled."""
    if torch.compiler.is_compiling() or get_eval_frame_callback() is None:
        return function(*args, **kwargs)
    result: T = _call_uncompiled(function, *args, **kwargs)
    return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call_uncompiled(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return function(*args, **kwargs)
