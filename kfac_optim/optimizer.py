"""`KFACOptimizer`: param groups, checkpoints, hooks. No arithmetic."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kfac_optim import checkpoint, diagnostics, engine
from kfac_optim.blocks import Attachment, KFACBlock, attach, by_module
from kfac_optim.capture import CaptureWindow, Handle, Handles, ModeStack
from kfac_optim.diagnostics import Summary
from kfac_optim.discovery import Coverage, build_blocks, claim
from kfac_optim.estimates import Empirical, Estimate
from kfac_optim.execution import Executor, SingleDevice
from kfac_optim.finder import ModelFinder
from kfac_optim.functional import Claim, FunctionalUses
from kfac_optim.functions import Product
from kfac_optim.inverses.base import Inverse
from kfac_optim.inverses.cholesky import Cholesky
from kfac_optim.layers import DEFAULT_ADAPTERS
from kfac_optim.layers.base import Adapters
from kfac_optim.options import block_options
from kfac_optim.selection import ModuleNames, Pattern
from kfac_optim.specs import LossTerms, Structure, WeightSharing
from kfac_optim.validation import check_flag, check_group, check_integer, check_kind, plain_number

Params = nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class KFACOptimizer(Optimizer):
    """SGD on gradients preconditioned by a Kronecker-factored Fisher matrix (K-FAC; Martens & Grosse 2015).

    Takes the place of `torch.optim.SGD` by changing one line:

        optimizer = KFACOptimizer(model, lr=0.1, momentum=0.9)

    Each layer's gradient matrix `∇W` `[out, in]` becomes `Δ = (G + √λ/π I)⁻¹ ∇W (A + π√λ I)⁻¹`, with `A` and `G` the
    second moments of the layer's inputs and output gradients; the trust region scales all `Δ` by one number; then
    torch's own SGD takes the step, momentum and weight decay included. Parameters that no layer of a known kind
    owns take the plain SGD step; `summary()` lists them with the reason. `.grad` is left as it was, so gradient
    clipping between `backward()` and `step()` acts on the raw gradient, before preconditioning.

    The first six parameters are those of `optim.SGD`. Those marked (group) are numbers of the param groups: they
    may differ per group, be edited, and be scheduled.

    Args:
        params: the model; or parameters, named parameters or group dicts as for any `torch.optim` optimizer,
            together with `model`.
        lr: learning rate (group), a number or a 1-element tensor.
        momentum: momentum (group), applied to the preconditioned gradient.
        dampening: dampening of the momentum (group).
        weight_decay: added to the *preconditioned* gradient (group), times the parameter.
        nesterov: Nesterov momentum (group).
        model: the module whose layers are preconditioned, when `params` is not a module.
        damping: `λ` (group), in units of the loss's curvature. As `G` has the same scale at every batch size, so
            has `λ`. A block takes its weight's group's.
        factor_decay: decay of the running averages per optimizer step (group), in (0, 1]; 1 is a plain mean.
        factor_update_period: optimizer steps between statistics (group), at least 1.
        inverse_update_period: optimizer steps between refreshes of the inverses (group), at least 1. The first
            refresh comes at the first step with statistics, more of them while the averages are young (at the 2nd,
            3rd, 5th, 8th, … statistics).
        kl_clip: `κ` of the trust region (group; the same in all), in nats: bounds the squared length of a step in the
            Fisher metric, and the rise that momentum may cause (Ba, Grosse & Martens 2017, §5; `trust_region.py`).
            None turns it off.
        inverse: representation of the inverse curvature; one, or a mapping from name globs or module classes.
        estimate: which output gradients make `G`.
        loss_terms: what the mean in the loss runs over; see `set_loss_terms`.
        weight_sharing: expand or reduce over shared positions; one, or a mapping as for `inverse`.
        structure: kept structure of `(A, G)`; one pair, or a mapping as for `inverse`; None is dense.
        skip_layers: name globs or module classes to leave to plain SGD, with everything inside them.
        adapters: module class → adapter, `{**DEFAULT_ADAPTERS, MyLayer: MyAdapter()}` to add one's own.
        max_factor_dim: a factor wider than this is kept diagonal.
        factor_dtype: dtype of the factors; None is the parameter's, but at least float32.
        include_factors: whether `state_dict()` holds factors and inverses; without them statistics start anew
            on loading.
        distributed: None refuses to run in a process group of several ranks, where each would precondition by
            its own batch alone; False does it all the same.
        maximize: ascend instead of descend (group).
        foreach: as in `optim.SGD` (group).
        fused: as in `optim.SGD` (group).

    Raises:
        TypeError: an argument of the wrong kind, or no model to be found.
        ValueError: a number out of range, or a pattern that matches no module.
        RuntimeError: a process group of several ranks with `distributed=None`.
    """

    # GradScaler then hands the scale over instead of calling step() on unscaled gradients behind our back.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        model: nn.Module | None = None,
        damping: float = 1e-3,
        factor_decay: float = 0.95,
        factor_update_period: int = 1,
        inverse_update_period: int = 10,
        kl_clip: float | None = 1e-3,
        inverse: Inverse[Any] | Mapping[Pattern, Inverse[Any]] = Cholesky(),  # noqa: B008 (immutable)
        estimate: Estimate = Empirical(),  # noqa: B008 (immutable)
        loss_terms: LossTerms = LossTerms.EXAMPLES,
        weight_sharing: WeightSharing | Mapping[Pattern, WeightSharing] = WeightSharing.EXPAND,
        structure: tuple[Structure, Structure] | Mapping[Pattern, tuple[Structure, Structure]] | None = None,
        skip_layers: Sequence[Pattern] = (),
        adapters: Adapters = DEFAULT_ADAPTERS,
        max_factor_dim: int = 8192,
        factor_dtype: torch.dtype | None = None,
        include_factors: bool = True,
        distributed: bool | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self._coverage = Coverage()
        self._incoming: tuple[list[Mapping[str, Any] | None], dict[nn.Parameter, Mapping[str, Any]]] = [], {}
        self._model = _given_model(params, model)
        self._model_given = self._model is not None
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "damping": damping,
            "factor_decay": factor_decay,
            "factor_update_period": factor_update_period,
            "inverse_update_period": inverse_update_period,
            "kl_clip": kl_clip,
        }
        defaults = {key: plain_number(value) for key, value in defaults.items()}
        check_group(defaults)
        self._group_keys = tuple(defaults)  # torch adds keys of its own to `defaults`
        check_kind("estimate", estimate, Estimate)
        check_kind("loss_terms", loss_terms, LossTerms)
        check_flag("include_factors", include_factors, optional=False)
        self._include_factors = include_factors
        self._options = block_options(
            adapters=adapters,
            skip_layers=skip_layers,
            inverse=inverse,
            weight_sharing=weight_sharing,
            structure=structure,
            max_factor_dim=max_factor_dim,
            factor_dtype=factor_dtype,
        )
        if self._model is not None:
            self._options.check_patterns(self._model)
        self._executor: Executor = _choose_executor(distributed)
        self._window = CaptureWindow(loss_terms)
        self._record: engine.StepRecord | None = None
        self._warned = False
        self._settled = False
        self._functional = FunctionalUses(self._window, self._make_claim(), self._executor.reduce)
        self._finder: ModelFinder | None = None
        self._waiting: dict[nn.Parameter, Mapping[str, Any]] = {}
        self._roots: dict[nn.Module, Handle] = {}
        self._attached: dict[nn.Module, tuple[Sequence[Attachment], Handle]] = {}
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, defaults)
        estimate.arm(self._window)
        self._window.around, self._window.module_ran = self._functional.mode, self._functional.module_ran
        if self._model is not None:
            self._adopt(self._model)
            self._warn_of_nothing_to_do(stacklevel=2)
        else:
            self._finder = ModelFinder(self._group_of(), self._found, self._window.is_under_way)
            weakref.finalize(self, self._finder.remove)
        weakref.finalize(self, _remove, self._roots, self._attached, self._window.modes)

    # -- the step ----------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a layer ran outside the model's forward and `set_loss_terms` was not called; a covered
                parameter has a sparse gradient; a `GradScaler` drives the step.
            ValueError: a number of a param group is out of range, or groups disagree on `kl_clip`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.__dict__.pop("found_inf", None) is not None:
            self.__dict__.pop("grad_scale", None)  # GradScaler does not clear them when step() raises
            raise RuntimeError(
                "kfac_optim: torch.amp.GradScaler is not supported yet: the output gradients behind G carry its scale. "
                "Use torch.autocast with bfloat16, which needs no scaler, and call optimizer.step() directly."
            )
        self._settle_model()
        self._record = engine.step(self.param_groups, self.state, self._coverage.blocks, self._window, self._executor)
        self._functional.end_step()
        self._warn_of_unseen_layers(self._record.unpreconditioned)
        if self._roots and self._coverage.has_grown():
            self._build()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in `torch.optim`; the statistics of the gradients that are dropped are dropped with them.

        `model.zero_grad()` drops the gradients alone: after a backward whose gradients are to be thrown away, use this.
        """
        super().zero_grad(set_to_none)
        self._window.mark_stale()

    def set_loss_terms(self, terms: int) -> None:
        """State the number of terms `M` that the loss's mean runs over, before `backward()`.

        Gradients of a mean carry a factor `1/M` each, so `G = M Σ g gᵀ`. `M` is read off the model's forward by the
        rule `loss_terms`; state it where that rule is wrong: masks and `ignore_index` (the number of targets that
        count), several forwards in one loss term, layers called outside the model's own forward. It holds until
        the next `step()`; with accumulated gradients state it for each backward, the numbers add up.

        Args:
            terms: at least 1.
        """
        check_integer("terms", terms)
        if self._window.rule is LossTerms.SUM:
            raise ValueError(
                "kfac_optim: set_loss_terms was called, but loss_terms=LossTerms.SUM says that the loss is a sum, "
                "which has no number of terms; pass another loss_terms, or drop the call."
            )
        self._window.set_loss_terms(terms)

    # -- param groups ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as to any `torch.optim` optimizer; layers they complete are preconditioned from now on."""
        if isinstance(param_group, dict):
            number = len(self.param_groups)
            param_group = {key: plain_number(value) for key, value in param_group.items()}
            check_group({**self.defaults, **param_group}, f" in param group {number}")
        super().add_param_group(param_group)
        if self._roots:
            self._build()
        if self._finder is not None:
            self._finder.params = set(self._group_of())

    def remove_hooks(self) -> None:
        """Take all hooks off the model. Statistics end here; steps go on with the inverses as they are."""
        _remove(self._roots, self._attached, self._window.modes)
        self._roots.clear()
        self._attached.clear()
        self._stop_finding()
        self._functional.forget()

    # -- reports -----------------------------------------------------------------------------------------------

    def summary(self) -> Summary:
        """Each parameter, its block, factors, state bytes, inverse and owner, or why it is left to SGD."""
        params = [param for group in self.param_groups for param in group["params"]]
        return diagnostics.summary(self._coverage, self._names(), params)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step, for any logger. Synchronises with the device.

        `trust_region_scale` (ν); `momentum_scale` (below 1 where the momentum went uphill and was held back); `cosine`
        (between raw and preconditioned gradient), `gradient_norm` and `direction_norm` over the preconditioned
        parameters; `damping`; `factor_age` and `inverse_age` in steps; `condition_A` and `condition_G` (largest 1-norm
        condition number of a damped factor); counts of `refused_statistics` (non-finite), `retried_refreshes` and
        `failed_refreshes`, `dropped_calls` (input changed in place before backward), `blocks`,
        `blocks_without_statistics`, and `unpreconditioned_blocks` in this step.
        What is not known yet is absent.
        """
        return diagnostics.metrics(self._coverage.blocks, self._window, self._record)

    def factors(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """`{layer name: (A, G)}`, copies of the undamped running averages.

        `A` is `[groups, in, in]` (bias column last) and `G` `[groups, out, out]`; a diagonal factor is `[groups, d]`,
        an identity None. `A ⊗ G` approximates the Fisher of the loss as the user wrote it.
        """
        return diagnostics.factors(self._coverage.blocks)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in `torch.optim`; tensors and numbers only, so that `torch.load(weights_only=True)` reads it."""
        self._publish_blocks()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `torch.optim`; factors keep their own dtype.

        Raises:
            ValueError: the checkpoint belongs to other layers, which are named; nothing is changed.
        """
        # Last of the pre-hooks, so that it sees what the user's own hooks made of the checkpoint.
        handle = self.register_load_state_dict_pre_hook(_take_blocks)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._incoming = [], {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # these are the checkpoint's, which may lack a number
            for key in self._group_keys:
                group.setdefault(key, self.defaults[key])
        self._window.discard()
        incoming, self._waiting = self._incoming
        for block, block_state in zip(self._coverage.blocks, incoming, strict=True):
            checkpoint.restore(block, block_state)
        self._bind_groups()
        self._publish_blocks()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "kfac_optim: a KFACOptimizer is bound to its model by hooks and cannot be pickled or copied. Save "
            "optimizer.state_dict(), build a new optimizer on the (copied) model and load it there."
        )

    # -- internals ---------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Find the blocks of all groups; keep those that exist, hook in those that are new."""
        assert self._model is not None
        old = self._coverage.blocks
        self._coverage = build_blocks(self._model, self._group_of(), self._options, old)
        blocks = self._coverage.blocks
        for block in old:
            if block not in blocks:
                self.state[block.params[0]].pop(checkpoint.KEY, None)
        wanted = by_module(blocks)
        for module, (attached, handle) in list(self._attached.items()):
            if wanted.get(module) != attached:
                handle.remove()
                del self._attached[module]
        for module, attachments in wanted.items():
            if module not in self._attached:
                handle = attach(module, attachments, self._window, self._executor.reduce)
                self._attached[module] = (attachments, handle)
        if _is_compiled(self._model):
            self._functional.forget()
        else:
            self._functional.know(blocks, self._coverage.candidates, self._coverage.owners(self._model))
        self._bind_groups()
        for block in blocks:
            self._restore_waiting(block)
        self._publish_blocks()

    def _adopt(self, model: nn.Module, args_under_way: tuple[Any, ...] | None = None) -> None:
        """Take `model` as (one of) the optimizer's, in the place of any that it contains."""
        inside = set(model.modules())
        for root in [root for root in self._roots if root in inside]:
            self._roots.pop(root).remove()
        self._roots[model] = Handles()
        self._model = model if len(self._roots) == 1 else nn.ModuleList(self._roots)
        self._build()
        self._roots[model] = self._window.watch_root(model, args_under_way)

    def _found(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        # A part of a model that is known is no other model.
        if not any(model in root.modules() for root in self._roots):
            self._adopt(model, args)

    def _settle_model(self) -> None:
        """With the first step that has gradients, all that only a forward can show was shown."""
        if self._settled or all(param.grad is None for param in self._group_of()):
            return
        if self._finder is not None and self._model is not None:
            self._options.check_patterns(self._model)
        self._settled = True
        if self._finder is not None or self._coverage.candidates:
            self._stop_finding()
            self._warn_of_nothing_to_do(stacklevel=5, settled=True)

    def _stop_finding(self) -> None:
        if self._finder is not None:
            self._finder.remove()
            self._finder = None

    def _warn_of_nothing_to_do(self, stacklevel: int, *, settled: bool = False) -> None:
        """Warn where nothing is preconditioned, nor may be once a function multiplies by a bare parameter."""
        if self._model is None:
            warnings.warn(
                "kfac_optim: nothing is preconditioned and every parameter takes the plain SGD step: no call of a "
                "module that holds the parameters was seen since the optimizer was built, as when a model has already "
                "run under torch.compile. Pass the model: KFACOptimizer(model, ...).",
                stacklevel=stacklevel + 1,
            )
        elif not (self._coverage.blocks or self._options.skip_layers or (self._coverage.candidates and not settled)):
            warnings.warn(
                "kfac_optim: nothing is preconditioned; every parameter takes the plain SGD step. "
                "optimizer.summary() lists the reasons.",
                stacklevel=stacklevel + 1,
            )

    def _restore_waiting(self, block: KFACBlock) -> None:
        """Give a new block what a checkpoint that was loaded before held for it."""
        state = self._waiting.get(block.params[0])
        if state is not None:
            checkpoint.check([block], [state], [], any_prefix=not self._model_given)
            checkpoint.restore(block, state)
            del self._waiting[block.params[0]]

    def _make_claim(self) -> Claim:
        """Held by the model's hooks, thus by a weak reference."""
        weak = weakref.ref(self)

        def claim_of(product: Product) -> KFACBlock | None:
            optimizer = weak()
            if optimizer is None:
                return None
            assert optimizer._model is not None
            block = claim(optimizer._model, product, optimizer._group_of(), optimizer._options, optimizer._coverage)
            if block is not None:
                optimizer._restore_waiting(block)
            return block

        return claim_of

    def _warn_of_unseen_layers(self, names: Sequence[str]) -> None:
        if names and not self._warned:
            self._warned = True
            warnings.warn(
                f"kfac_optim: {len(names)} layers have gradients but no statistics and take the plain SGD step, the "
                f"first of them {names[0]!r}. Either no finite statistics came yet, or the layer was parametrized "
                "since, or its forward or backward is out of sight: torch.compile, torch.func, gradients from "
                "autograd.grad, or a forward of its own that multiplies by something else than its weight. Later such "
                "steps are counted in metrics()['unpreconditioned_blocks'].",
                stacklevel=5,
            )

    def _group_of(self) -> dict[nn.Parameter, dict[str, Any]]:
        return {param: group for group in self.param_groups for param in group["params"]}

    def _bind_groups(self) -> None:
        group_of = self._group_of()
        for block in self._coverage.blocks:
            block.groups = tuple(group_of[param] for param in block.params)

    def _publish_blocks(self) -> None:
        for block in self._coverage.blocks:
            self.state[block.params[0]][checkpoint.KEY] = checkpoint.dump(block, include_factors=self._include_factors)

        for param, state in self._waiting.items():
            self.state[param][checkpoint.KEY] = state

    def _names(self) -> dict[nn.Parameter, str]:
        names = {} if self._model is None else ModuleNames(self._model).parameters()
        for group in self.param_groups:  # named parameters keep their names there
            for param, name in zip(group["params"], group.get("param_names", ()), strict=False):
                names.setdefault(param, name)
        return names


def _take_blocks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check the blocks' part of a checkpoint and set it aside, for torch would cast it to the parameters' dtype."""
    assert isinstance(optimizer, KFACOptimizer)
    blocks = optimizer._coverage.blocks
    saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(saved_ids) != len(params):
        return state_dict  # torch's own message is next
    id_of = dict(zip(params, saved_ids, strict=True))
    param_of = dict(zip(saved_ids, params, strict=True))
    states = {i: s[checkpoint.KEY] for i, s in state_dict["state"].items() if checkpoint.KEY in s}
    incoming = [states.pop(id_of[block.params[0]], None) for block in blocks]
    # Layers that only a forward will show wait for it.
    to_come = optimizer._coverage.candidates | optimizer._coverage.lazy
    unknown = optimizer._model is None
    waiting = {param_of[i]: states.pop(i) for i in list(states) if unknown or param_of[i] in to_come}
    strays = [checkpoint.layer_name(state) for state in states.values()]
    checkpoint.check(blocks, incoming, strays, any_prefix=not optimizer._model_given)
    optimizer._incoming = incoming, waiting
    rest = {
        i: {key: value for key, value in s.items() if key != checkpoint.KEY} if isinstance(s, dict) else s
        for i, s in state_dict["state"].items()
    }
    return {**state_dict, "state": rest}


def _given_model(params: object, model: nn.Module | None) -> nn.Module | None:
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"kfac_optim: model must be an nn.Module, got {type(model).__name__}.")
    if isinstance(params, nn.Module):
        if model is not None and model is not params:
            raise TypeError("kfac_optim: params is a module and model is another; pass one of them.")
        return params
    if not isinstance(params, Iterable):
        raise TypeError(
            f"kfac_optim: params must be the model, or parameters as for any torch.optim optimizer, got {params!r}. "
            "Pass the model itself: KFACOptimizer(model, ...)."
        )
    return model


def _choose_executor(distributed: bool | None) -> Executor:
    if distributed is not None and distributed is not False:
        raise TypeError(f"kfac_optim: distributed must be None or False, got {distributed!r}.")
    if distributed is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"kfac_optim: running on {dist.get_world_size()} ranks, each of which would precondition by its own batch, "
            "so that their parameters drift apart. Sharing factors is not supported yet; train on one process, or "
            "pass distributed=False where every rank trains a model of its own."
        )
    return SingleDevice()


def _is_compiled(model: nn.Module) -> bool:
    """Whether any part of `model` is compiled: what runs there is out of sight of modes and hooks."""
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in model.modules())


def _remove(
    roots: Mapping[nn.Module, Handle],
    attached: Mapping[nn.Module, tuple[Sequence[Attachment], Handle]],
    modes: ModeStack,
) -> None:
    modes.leave()
    for handle in (*roots.values(), *(handle for _, handle in attached.values())):
        handle.remove()
