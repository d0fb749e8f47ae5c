"""`KFACOptimizer` puts the parts together, and is what torch.optim asks for: param groups, checkpoints, copies."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributions import Distribution
from torch.optim import Optimizer

from kfac_optim import diagnostics
from kfac_optim.blocks import checkpoint, checkpoint_loading
from kfac_optim.blocks.checkpoint_groups import check_is_dict
from kfac_optim.blocks.checkpoint_loading import Incoming
from kfac_optim.blocks.model_binding import ModelBinding
from kfac_optim.blocks.selection import Pattern
from kfac_optim.capture.window import CaptureWindow
from kfac_optim.diagnostics import Summary
from kfac_optim.distributed import choice
from kfac_optim.distributed.config import DistributedConfig
from kfac_optim.distributed.joinable_optimizer import JoinableOptimizer
from kfac_optim.distributed.planning.plan import Plan
from kfac_optim.distributed.refusals import check_choices
from kfac_optim.distributed.serving import choosing
from kfac_optim.distributed.stages import PipelineStages, check_stage_choices
from kfac_optim.factors.subsampling import Subsample
from kfac_optim.fisher.estimates import Empirical, Estimate, NamedLoss
from kfac_optim.fisher.gauss_newton import ForwardRecorder
from kfac_optim.fisher.objective import Objective
from kfac_optim.inverses.base import Inverse, InverseRule
from kfac_optim.layers import DEFAULT_ADAPTERS
from kfac_optim.layers.base import Adapters
from kfac_optim.specs import Kept, LossTerms, WeightSharing
from kfac_optim.step import averaging, engine, group_checks, new_state, published_state
from kfac_optim.step.adaptive_trust_region import AdaptiveTrustRegion
from kfac_optim.step.averaging import IterateAverage
from kfac_optim.step.choices import Choices
from kfac_optim.step.closures import Closures, Evaluation
from kfac_optim.step.execution import Admission, Executor, Trained
from kfac_optim.step.gate import Gate, group_of, names_of, params_of
from kfac_optim.step.inner_step import take_on_means
from kfac_optim.step.levenberg_marquardt import LevenbergMarquardt
from kfac_optim.step.loss_scale import ScalerSource
from kfac_optim.step.refresh_schedules import Phases, Refresh, Together
from kfac_optim.step.skipped_steps import SkippedSteps
from kfac_optim.step.step_memory import StepMemory
from kfac_optim.step.step_size import StepSize
from kfac_optim.step.trial import Judge
from kfac_optim.step.user_warnings import UserWarnings
from kfac_optim.utils.hooks import weakly
from kfac_optim.utils.precision import without_autocast
from kfac_optim.utils.sharded_params import any_sharded, is_sharded
from kfac_optim.utils.tensor_storage import keep_while_spawning
from kfac_optim.utils.text import listed
from kfac_optim.utils.validation import (
    as_float,
    check_closure,
    check_group,
    check_kind,
    check_number,
    check_terms,
    given_model,
    plain_number,
)

Params = nn.Module | Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class KFACOptimizer(JoinableOptimizer):
    """Takes SGD steps along gradients preconditioned by a Kronecker-factored Fisher matrix (Martens & Grosse 2015).

    It replaces `torch.optim.SGD` by a change of one line:

        optimizer = KFACOptimizer(model, lr=0.01, momentum=0.9)

    Each layer's gradient matrix `∇W` `[out, in]` becomes `Δ = (G + √λ/π I)⁻¹ ∇W (A + π√λ I)⁻¹`, where `A` and `G` are
    the second moments of the layer's inputs and of its output gradients. The trust region multiplies all `Δ` by one
    number. Then torch's own SGD takes the step, with momentum and weight decay. A parameter that belongs to no layer of
    a known kind takes the plain SGD step; `summary()` lists it with the reason. `.grad` is left as it was, so gradient
    clipping between `backward()` and `step()` acts on the raw gradient, before preconditioning.

    The first six parameters are those of `optim.SGD`. Arguments marked (group) are numbers of the param groups: they
    may differ between groups, be edited, and be scheduled.

    Args:
        params: the model; or parameters, named parameters or group dicts as for any `torch.optim` optimizer.
        lr: the learning rate (group), a number or a 1-element tensor.
        momentum: the momentum (group), applied to the preconditioned gradient.
        dampening: the dampening of the momentum (group).
        weight_decay: its product with the parameter is added to the *preconditioned* gradient, before `lr` (group).
        nesterov: whether the momentum is Nesterov's (group).
        model: the module whose layers are preconditioned, if `params` is not a module. If it is left out, it is the
            module that is called and holds the parameters, found at its first forward; until then `summary()` shows no
            block.
        damping: `λ` (group), in units of the curvature of the loss. `G`, and so `λ`, has the same scale at every batch
            size. A block uses the `λ` of its weight's group, by default multiplied by the unit of a large loss (see
            `AdaptiveTrustRegion`).
        factor_decay: the decay of the running averages per optimizer step (group), in (0, 1]; 1 is a plain mean. Over
            a period it is `factor_decay ** factor_update_period`.
        factor_update_period: the optimizer steps between two statistics (group), at least 1.
        inverse_update_period: the optimizer steps between two refreshes of the inverses (group), at least 1. The first
            refresh comes at the first step with statistics. More come while the averages are young (at the 2nd, 3rd,
            5th, 8th, … statistics), and whenever `λ` has doubled or halved since the last refresh, unless the inverse
            takes `λ` as it is at each step.
        refresh: when the inverses are refreshed: `Together()`, all blocks at the same steps; `Staggered()`, spread over
            the period; or `Background(...)`, beside the training in a thread.
        preconditioner_damping: the `λ` of the inverses (group), if it differs from `damping`, which is then used by
            `QuadraticModel` alone and adapted by `adapt_damping`. None is the same `λ`.
        l2_in_curvature: whether the optimizer adds `½ weight_decay ‖θ‖²` to the loss and its curvature (group), so that
            your loss has no such penalty: its gradient is then preconditioned as well, and `λ + weight_decay` damps the
            inverses (Martens & Grosse 2015). Parameters that no layer covers are treated alike either way, but by
            `SelectedUpdates`.
        kl_clip: `κ` of the trust region (group; the same in all), in nats: the bound on the squared length of a step in
            the Fisher metric (Ba, Grosse & Martens 2017, §5), and on the square of the fall of the loss that it
            promises, `lr Δᵀ∇`. By default it is the value from which `κ` is adapted. None turns the trust region off.
        step_size: `AdaptiveTrustRegion()`, which adapts `κ` to what steps do to the loss; `TrustRegion()`, whose `κ`
            stays `kl_clip`; `QuadraticModel()`, which finds learning rate and momentum at each step; `LineSearch()`,
            which searches the length by the closure of the step; or `SelectedUpdates()`, by layer the better of Muon's
            step and the natural gradient, in steps of AdamW's size.
        adapt_damping: `LevenbergMarquardt()` adapts `damping` to what steps do to the loss, and may take steps back.
        average: `IterateAverage()` averages the parameters over the steps; `eval()` shows the average and `train()`
            hides it. None averages nothing.
        inverse: the representation of the inverse curvature; one for all layers, or a mapping from name globs or module
            classes. None leaves it to the step size: mostly `AutoInverse()`, which keeps narrow factors whole and
            sketches those from 256 wide on. `Cholesky()`, that of `QuadraticModel`, keeps all whole.
        estimate: which output gradients make `G`: those of the training loss, or of a loss that the estimate names
            (`MonteCarlo(nn.CrossEntropyLoss())`), which then sets the number of loss terms.
        loss_terms: what the mean in the loss runs over; see `set_loss_terms`. None is what a named loss says itself,
            and EXAMPLES where none is named.
        weight_sharing: whether shared positions are expanded or reduced; one choice, or a mapping as for `inverse`.
        structure: the structure that is kept of `(A, G)`, each a `Structure` or a `BlockDiagonal`; one pair, or a
            mapping as for `inverse`; None is dense.
        subsample: how many examples, and positions of each, make a layer's statistics; one `Subsample`, or a mapping as
            for `inverse`. None is `Subsample(rows=8192)`, as many examples as have 8,192 positions between them; layers
            of one's own without `in_rows` take all, as `Subsample()` does.
        skip_layers: name globs or module classes to leave to plain SGD (under `SelectedUpdates` to AdamW), with all
            that is inside them.
        adapters: module class → adapter, `{**DEFAULT_ADAPTERS, MyLayer: MyAdapter()}` to add one's own.
        max_factor_dim: a factor wider than this is kept diagonal (or a matrix that is to be inverted, where a factor is
            a product of several).
        factor_dtype: the dtype of the factors; None is the parameter's, but at least float32.
        nonfinite_limit: how many times in a row a step may be skipped because a gradient is not finite, a layer's
            statistics be refused, or its refresh fail, before `step()` raises (for a layer, at its next refresh); None
            is no limit.
        grad_scaler: the `torch.amp.GradScaler` that scales the loss. It is needed only if steps are taken by
            `optimizer.step()`: a scaler that steps, `scaler.step(optimizer)`, is found, whatever was unscaled or
            clipped before and whichever was made first.
        include_factors: whether `state_dict()` holds factors and inverses; without them statistics start from zero
            on loading.
        distributed: how the ranks of a process group train the model together, a `DistributedConfig(...)`. None is the
            default one if there is a process group of several ranks. False has every rank precondition by its own
            batch alone, for ranks that train a model of their own each.
        maximize: whether to ascend instead of descend (group).
        foreach: the option `foreach` of `optim.SGD` (group).
        fused: the option `fused` of `optim.SGD` (group). If it is True, on an accelerator, on one process and without a
            `GradScaler`, the host waits for nothing in a step that neither takes statistics nor refreshes. The fused
            kernels then decide whether the gradients are finite; a step that they do not take counts as one for the
            periods, and `nonfinite_limit` is looked at when the host waits next. On a CPU, parameters of 16 bits with 8
            elements or more go by the loop all the same, because torch's fused kernel there leaves most of them where
            they are.

    Raises:
        TypeError: an argument is of the wrong kind.
        ValueError: a number is out of range, a pattern matches no module, or choices do not go together.
        RuntimeError: a `DistributedConfig` comes without a process group, or with a group that lacks this process.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether `GradScaler` leaves it to the step to unscale the gradients and to skip an overflow.

        It does so if a rank sees only a part of the gradients, or a stage of a pipeline those of its own layers, as
        all ranks must skip a step together. Otherwise the scaler does both, so that trainers may clip in between. A
        scaler asks for this as it begins a step; the step does not follow if the scaler finds an overflow.
        """
        self._window.offer_step()
        if self._executor.stages.several:
            return True
        if not self._executor.several:
            return False
        if self._joining is not None and self._joining.config is not None and self._joining.config.enable:
            return True  # a rank that has run out of examples takes part in a step that the others would leave out
        return not self._executor.sees_all_gradients or any(map(is_sharded, self._params()))

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
        factor_update_period: int = 10,
        inverse_update_period: int = 100,
        refresh: Refresh = Together(),  # noqa: B008 (immutable)
        preconditioner_damping: float | None = None,
        l2_in_curvature: bool = False,
        kl_clip: float | None = 1e-3,
        step_size: StepSize = AdaptiveTrustRegion(),  # noqa: B008 (immutable)
        adapt_damping: LevenbergMarquardt | None = None,
        average: IterateAverage | None = None,
        inverse: Inverse[Any] | InverseRule | Mapping[Pattern, Inverse[Any] | InverseRule] | None = None,
        estimate: Estimate = Empirical(),  # noqa: B008 (immutable)
        loss_terms: LossTerms | None = None,
        weight_sharing: WeightSharing | Mapping[Pattern, WeightSharing] = WeightSharing.EXPAND,
        structure: tuple[Kept, Kept] | Mapping[Pattern, tuple[Kept, Kept]] | None = None,
        subsample: Subsample | Mapping[Pattern, Subsample] | None = None,
        skip_layers: Sequence[Pattern] = (),
        adapters: Adapters = DEFAULT_ADAPTERS,
        max_factor_dim: int = 8192,
        factor_dtype: torch.dtype | None = None,
        nonfinite_limit: int | None = 20,
        grad_scaler: GradScaler | None = None,
        include_factors: bool = True,
        distributed: DistributedConfig | bool | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        self._incoming = Incoming()
        given = given_model(params, model)
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
            "preconditioner_damping": preconditioner_damping,
            "l2_in_curvature": l2_in_curvature,
            "factor_decay": factor_decay,
            "factor_update_period": factor_update_period,
            "inverse_update_period": inverse_update_period,
            "kl_clip": kl_clip,
        }
        defaults = {key: plain_number(value) for key, value in defaults.items()}
        check_group(defaults)
        self._group_keys = tuple(defaults)  # torch adds keys of its own to `defaults`
        choices = Choices(
            step_size=step_size,
            adapt_damping=adapt_damping,
            average=average,
            estimate=estimate,
            refresh=refresh,
            loss_terms=loss_terms,
            inverse=inverse,
            weight_sharing=weight_sharing,
            structure=structure,
            subsample=subsample,
            skip_layers=skip_layers,
            adapters=adapters,
            max_factor_dim=max_factor_dim,
            factor_dtype=factor_dtype,
            nonfinite_limit=nonfinite_limit,
            include_factors=include_factors,
        )
        self._choices, self._distributed = choices, distributed
        estimate = choices.estimate
        if grad_scaler is not None:
            check_kind("grad_scaler", grad_scaler, GradScaler)
        self._scaler = ScalerSource(grad_scaler)
        self._skipped = SkippedSteps()
        self._phases = Phases(choices.schedule)
        if given is not None:
            choices.options.check_patterns(given)
        self._window = CaptureWindow(choices.loss_rule)
        if not isinstance(params, nn.Module | Tensor):
            params = list(params)  # type: ignore[assignment]
        config = choice.chosen_config(distributed, sharded=any_sharded(params))
        self._executor: Executor = Executor()
        if config is not None:
            self._executor = choosing.executor_of(self, config, choices, self._window)
        if isinstance(distributed, DistributedConfig) and distributed.pipeline is not None:
            check_stage_choices(choices)
            self._executor.stages = PipelineStages(distributed.pipeline, distributed.timeout)
            self._window.tally.tells = self._executor.stages.is_last
        executor = self._executor
        self._record: engine.StepRecord | None = None
        self._shows_state = self._publishes = False
        self._warnings = UserWarnings(finds_model=given is None, plain=step_size.plain)
        self._memory = StepMemory(step_size, self._warnings)
        self._binding = ModelBinding(
            given,
            choices.options,
            self._window,
            lambda block: executor.statistics.emitted(block),  # another object with each plan
            self._executor.begin_forward,
            self._executor.states.late,
            several=self._executor.several,
        )
        super().__init__(params.parameters() if isinstance(params, nn.Module) else params, defaults)
        if (ranks := self._ranks) is not None:
            check_choices(ranks.config, choices, in_shards=any(map(is_sharded, self._params())))
        estimate.arm(self._window)
        if self._window.terms is not None:
            self._window.terms.remembers = step_size.needs_closure
        self._recorder: ForwardRecorder | None = None
        self._objective: Objective | None = None
        self._judge: Judge | None = None
        if isinstance(estimate, NamedLoss) and choices.judges:
            self._recorder = ForwardRecorder(
                self._window, estimate.likelihood, estimate.outputs_of, estimate.terms, weakly(self._params)
            )
            self._objective = Objective(self._recorder, estimate.likelihood)
            self._window.recorder = self._recorder
            if adapt_damping is not None:
                self._judge = Judge(
                    adapt_damping,
                    self._recorder,
                    self._objective,
                    self._executor,
                    damps_steps=step_size.needs_objective,
                )
        self._closures = Closures(step_size, self._judge, self._recorder, self._window, self._binding, executor)
        self._gate = Gate(
            choices,
            self._window,
            self._binding,
            executor,
            self._objective,
            self._skipped,
            self._scaler,
            self._warnings,
        )
        refresher = choosing.refresher_of(executor, refresh)
        self._engine = engine.Engine(choices, self._window, executor, refresher, self._objective)
        self._binding.start(group_of(self.param_groups))
        self._executor.attach(self._binding.model)
        self._window.source = self._executor.source
        self._executor.check(self._binding.coverage.blocks, self._params())
        if given is not None:
            self._warnings.coverage(self._binding)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # `weakref.finalize` would hold the model, and by that an optimizer that stands in the model, for ever.
        binding = self.__dict__.get("_binding")  # none where __init__ has raised
        # At the end of a process nothing is left to close with, not even what this module has imported.
        if binding is not None and not is_finalizing():
            binding.close()
            self._executor.close()

    # -- the step ----------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. If a gradient is not finite, skip it: only a count in `metrics()` changes.

        Args:
            closure: reevaluates the model and returns the loss.

        Returns:
            The closure's loss, or None.

        Raises:
            RuntimeError: a covered parameter has a sparse gradient; `nonfinite_limit` is reached; `adapt_damping` or
                `LineSearch` has no closure, or `adapt_damping` one that draws other examples at each call; the
                curvature of the loss cannot be computed; a refresh in the background raised; this is a copy without
                the `grad_scaler` that was named; or the model holds averages, since `eval()`.
            TypeError: an entry of a param group is of the wrong kind.
            ValueError: a number of a param group is out of its range (those of SGD, as in `optim.SGD`, may be any that
                are finite), or groups disagree on `kl_clip`.
        """
        check_closure(closure)
        if closure is None and self._is_asked_for_state():
            self._show_state()
            return None
        self._take_on_groups()
        if self._choices.average is not None and averaging.shows_averages(self.state):
            raise RuntimeError(
                "kfac_optim: step() was called while the model holds the averages of its parameters, which eval() has "
                "put there. Call optimizer.train() before the forward of a training step."
            )
        self._drop_shown_state()
        if self._publishes:
            self._publishes = False
            published_state.withdraw(self.state)
        self._window.take_step()
        evaluation = self._closures.run(closure, self.param_groups, self.state)
        trial = evaluation.trial
        devices = {device.type for device in {param.device for param in self._params()}}
        try:
            with without_autocast(devices):
                admission = self._step(evaluation)
            stays = admission is not None
            if self._judge is not None and trial is not None and stays:
                after = self._judge.evaluate_again(trial, self._binding.coverage.blocks)
                with without_autocast(devices):
                    stays = self._judge.decide(trial, after, self._record, self._binding.coverage.blocks)
            if self._choices.average is not None and admission is not None and stays:
                averaging.follow(self._choices.average, self._params(), self.state, admission.finite)
        except BaseException:
            for name in ("found_inf", "grad_scale"):  # GradScaler clears them only when step() returns
                self.__dict__.pop(name, None)
            raise
        finally:
            self._closures.end()
        return evaluation.loss  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients as in `torch.optim`, and their statistics with them.

        `model.zero_grad()` does the same, as the model's next forward finds the gradients gone; with
        `set_to_none=False` nothing shows it, so use this after a backward whose gradients are to be thrown away.
        Statistics are dropped once the next forward counts. Until then backwards through one retained graph add up in
        `G`, dropped gradients included, since a loop may keep these to combine by hand.
        """
        super().zero_grad(set_to_none)
        self._take_on_groups()  # before the forward to come, so that a layer that is new in them is measured in it
        self._binding.begin_forwards()
        self._window.mark_stale()
        self._executor.gradients_dropped()

    def serve(self, batches: Iterable[Any], loss_of: Callable[[Any], Tensor]) -> int:
        """Serve as a statistics worker until the ranks that train have called `dismiss_workers()`.

        Args:
            batches: mini-batches, of which each round takes one; after the last comes the first again.
            loss_of: returns the loss of one by the model, as the training loop has it; where the optimizer has a
                `grad_scaler`, that is `scaler.scale(loss)`. The scaler's `step` and `update` are called here.

        Returns:
            How many mini-batches were measured. See `kfac_optim.distributed.StatisticsWorkers`.

        Raises:
            RuntimeError: this rank is no worker, or has another model or checkpoint than the ranks that train.
            CollectiveError: a rank that trains is gone, or paused for longer than the time-out.
        """
        return choosing.serve(self, self._executor, self._binding, self._window, self._scaler, batches, loss_of)

    def dismiss_workers(self) -> None:
        """Have statistics workers return from `serve`, on all ranks that train; steps keep the inverses they have.

        The statistics go with the workers: for a checkpoint call `consolidate_state_dict()` before.
        """
        choosing.dismiss(self._executor)

    def eval(self) -> None:
        """Show the averages of the parameters in the model, for evaluation; without `average` it does nothing.

        Trainers that know optimizers with averages call this and `train()` by themselves (Hugging Face's does). Running
        statistics of BatchNorm stay those of training; `torch.optim.swa_utils.update_bn` takes them of the averages.
        """
        if self._choices.average is not None:
            self._window.shards.reshard()
            averaging.show_averages(self.state, self._params())

    def train(self) -> None:
        """Put the trained parameters back into the model, after `eval()`; otherwise it does nothing."""
        if self._choices.average is not None:
            self._window.shards.reshard()
            averaging.show_iterates(self.state)

    def set_loss_terms(self, terms: float | Tensor) -> None:
        """State the number of terms `M` that the loss's mean runs over, before `backward()`.

        Gradients of a mean carry a factor `1/M` each, so `G = M Σ g gᵀ`. `M` is read off the model's forward by the
        rule `loss_terms`; state it where that rule is wrong: masks and `ignore_index` (the number of targets that
        count), several forwards in one loss term, layers called outside the model's own forward (otherwise `M` is
        guessed from what these layers are handed, with a warning). The number holds until the next `step()`. With
        accumulated gradients state it for each backward: the numbers add up. If a backward is left out, what is stated
        after the next `zero_grad()` replaces the number that was stated for it.

        Where the mean is weighted, as by the class weights of `nn.CrossEntropyLoss`, state the effective number
        `(Σ w)² / Σ w²` of the terms' weights.

        Args:
            terms: above 0; a number, or a tensor of one element, whose value is then not waited for.

        Raises:
            TypeError: `terms` is no real number.
            ValueError: it is not above 0, or a tensor of several elements; or the loss is a sum, which has no `M`.
        """
        check_terms(terms)
        if self._window.tally.is_sum:
            raise ValueError(
                "kfac_optim: set_loss_terms was called, but the loss is a sum, as loss_terms=LossTerms.SUM or the loss "
                "that estimate names says, and has no number of terms; pass another, or drop the call."
            )
        self._window.set_loss_terms(terms.detach().clone().reshape(()) if isinstance(terms, Tensor) else terms)

    def observe(self, residual: Tensor | Distribution, weight: float = 1.0) -> None:
        """State what the loss reads, before `backward()`, where no criterion object computes that part of the loss.

        The loss holds `weight` times a mean over terms. Of a tensor the terms are the squares `residual²`. Of a
        distribution of `torch.distributions` (`Categorical`, `Bernoulli`, `Normal`), such as a policy, they are the
        negative log-likelihoods, whatever your loss multiplies them by (advantages): their Fisher matrix does not
        depend on that. Each element of the tensor, or of `log_prob`, is a term: where your loss sums those of an
        example, `weight` is how many it has.

        Several calls are several parts of the loss, as are calls of the criterion that `estimate` names. What the
        criterion itself reads need not be stated. Compute the loss from the very tensor that is observed, as backward
        is to come to it: `r = output - target`, then `observe(r)` and `r.square().mean()`. For a distribution, that
        tensor is its logits, or mean and scale.

        Args:
            residual: a tensor, the examples along its first dimension; or a distribution that the loss is computed of.
            weight: the weight of the term in the loss as it is backpropagated, a `GradScaler`'s scale included.

        Raises:
            TypeError: a kind of distribution that is not known, or `estimate` names no loss.
            ValueError: what is observed is no result of a forward with gradients, or the weight is not above 0.
        """
        check_number("weight of observe()", weight, above=0)
        if self._window.terms is None:
            raise TypeError(
                f"kfac_optim: observe() is for estimates that name the loss, got estimate={self._choices.estimate!r}. "
                "Pass estimate=MonteCarlo(criterion), or ExactGGN(criterion)."
            )
        self._window.terms.observe_residual(residual, float(weight))

    # -- param groups ------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as to any `torch.optim` optimizer; layers they complete are preconditioned from now on."""
        if isinstance(param_group, dict):
            number = len(self.param_groups)
            plain = {key: plain_number(value) for key, value in param_group.items()}
            check_group({**self.defaults, **plain}, f" in param group {number}")
            param_group.update(plain)  # torch keeps the user's very dict
        super().add_param_group(param_group)
        try:
            for choice in self._choices.whole or (None,):
                group_checks.check_shards(self.param_groups[-1], len(self.param_groups) - 1, choice)
            self._binding.bind(group_of(self.param_groups))
            if self._binding.model is not None:
                self._executor.check(self._binding.coverage.blocks, self._params())
        except Exception:
            del self.param_groups[-1]
            self._binding.bind(group_of(self.param_groups))
            raise

    def remove_hooks(self) -> None:
        """Take all hooks off the model. Statistics end here; steps go on with the inverses as they are.

        On several processes call it on all of them. It also frees a DistributedDataParallel for another optimizer:
        under `Sharded` the wrapper sends gradients only to this optimizer's owners until then.
        """
        self._binding.release()
        self._executor.release()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm before, `[]`.

        It does what `torch.nn.utils.clip_grad_norm_` does, over the parameters of this optimizer, and is also right
        under `Sharded`, where `.grad` holds the mean over ranks on one rank only. There it is a collective: call it on
        all ranks, after the last backward of a step. For parameters that `fully_shard` has sharded torch's own is right
        as well. In a pipeline (`DistributedConfig(pipeline=...)`) the norm is that of all stages, which all call it.

        Raises:
            TypeError: `max_norm` or `norm_type` is no number.
            RuntimeError: the norm is not finite, and `error_if_nonfinite`; or, under `Sharded`, a backward has followed
                an earlier call for the same step (`step()` refuses that too).
            NotImplementedError: it is called within `Join`, under `Sharded`.
        """
        max_norm, norm_type = as_float("max_norm", max_norm), as_float("norm_type", norm_type)
        trained = self._trained()
        self._executor.check(trained.blocks, trained.params)
        return self._executor.clip_grad_norm_(trained, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    # -- reports -----------------------------------------------------------------------------------------------

    def summary(self) -> Summary:
        """Return each parameter with its block, factors, state bytes, inverse and owner, or why it is left to SGD."""
        owners, plain = self._executor.statistics.owners, self._choices.step_size.plain
        return diagnostics.summary(self._binding.coverage, self._names(), self._params(), owners, plain)

    def plan(self) -> Plan | None:
        """Return which rank does what, and what is sent, on several processes: `print(optimizer.plan().summary())`.

        None on one process, and before the first step. Experts of `DistributedConfig(experts=...)` are not in it.
        """
        return None if self._ranks is None else self._ranks.plan

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step, for any logger.

        The result is a dict of floats. The host waits for the device only when a number is read, and gets its value at
        the time of this call, even after more steps: to log every step at no cost, keep the result and read it later.
        Copies of the result are plain dicts.

        The guide has a table of all names, with units and healthy values: `kfac_optim/README.md`, "Watching a run".
        `kfac_optim.watching` has `diagnose`, which says in words what is wrong in them, and `plot`. What is not known
        yet is absent. Counts run since the optimizer was built; those of layers go on from a checkpoint. On several
        processes conditions, cutoffs and counts of statistics and refreshes are those of the last refresh, the same on
        all; a count is that of the process that has counted most, layer by layer.
        """
        blocks = self._binding.coverage.blocks
        return diagnostics.metrics(
            blocks,
            self._params(),
            self._record,
            dropped_calls=self._window.dropped_calls,
            skipped_steps=self._skipped.so_far() + self._window.left_out,
            rejected_steps=None if self._judge is None else self._judge.rejected,
            reduction_ratio=None if self._judge is None else self._judge.ratio,
            counters=self._executor.statistics.counters,
            report=self._choices.step_size.report(self.state, blocks),
        )

    def factors(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        """Return `{layer name: (A, G)}`, copies of the undamped running averages, of layers measured here so far.

        `A` is `[groups, in, in]` (bias column last) and `G` `[groups, out, out]`; a diagonal factor is `[groups, d]`,
        an identity None. A factor kept by a `BlockDiagonal` is `[blocks, width, width]`, zero in what the last block
        lacks: `torch.block_diag(*factor)[:d, :d]` is the whole. Of a factor that is sketched, as wide ones are by
        default, only the trace and the leading eigenpairs are known: all other directions have one eigenvalue, their
        mean. `A ⊗ G` approximates the Fisher of the loss as the user wrote it.

        On several processes a layer is returned only by the process that recomputes its inverse, and by none if
        different ranks recompute `A` and `G`. Since the last refresh that process has taken in its own batches alone:
        call `consolidate_state_dict(to=None)` on all ranks before, and all batches are in.
        """
        return diagnostics.factors(self._binding.coverage.blocks, self._executor.statistics.keeps)

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Give the state as `torch.optim` does: tensors and numbers only, which `torch.load(weights_only=True)` reads.

        Refreshes under way are waited for, and held beside the inverses that they are to replace.

        On several processes this is no collective: it may be called on one rank, and returns what that rank has, with a
        warning if others know more. The result loads on any number of processes; layers whose statistics it lacks start
        from zero there, with a warning. For a complete state call `consolidate_state_dict` on all ranks before, under
        Accelerate by

            accelerator.register_save_state_pre_hook(lambda *_: optimizer.consolidate_state_dict())

        with the optimizer that `prepare` was given. Refreshes that `Background` has under way are then not held: such
        layers keep their inverses until they are next due.
        """
        fresh = self._record is None and not self.state

        def publish(_: Optimizer) -> None:
            self._take_on_groups()
            if (lacking := self._executor.states.lacks(factors=self._choices.include_factors)) is not None:
                self._warnings.partial_checkpoint(lacking, self._executor.states.remedy)
            self._publish_blocks()

        def fill_up(_: Optimizer, whole: dict[str, Any]) -> None:
            published_state.fill_up(whole["state"], self._params())
            if not self._shows_state:
                checkpoint.set_apart(whole["state"])
            for group in whole["param_groups"]:  # a schedule may have left a number of numpy there
                group.update({name: plain_number(value) for name, value in group.items()})

        # The user's own hooks come before and after: they may change the state, and what becomes of the checkpoint.
        handles = self.register_state_dict_pre_hook(publish), self.register_state_dict_post_hook(fill_up, prepend=True)
        try:
            whole = super().state_dict()
        finally:
            for handle in handles:
                handle.remove()
        if fresh:  # `torch.distributed.checkpoint` takes whatever stands there for a sign that momentum does
            self.state.clear()
        return whole

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Make the coming `state_dict()` whole: a collective, to be called on all ranks between two steps.

        On several processes each rank has the statistics and inverses of the layers that it refreshes, under `Sharded`
        also the momentum; and all ranks have measured since the last refresh. What they have measured goes to the
        owners, as at a refresh, and from there to `to`:

            optimizer.consolidate_state_dict()
            if rank == 0:
                torch.save(optimizer.state_dict(), "optimizer.pt")

        Momentum that belongs to shards, of FSDP2 or tensor parallelism, stays with them: there all ranks then call
        torch's `get_optimizer_state_dict` with `full_state_dict=True`, in the place of `state_dict()`.

        The file loads on any number of processes, by any strategy. On as many ranks, by the same strategy, training
        goes on bit for bit like the run that wrote the file (but for the first step of DDP on more than two ranks,
        which may sum gradients in another order); otherwise it does so up to rounding.

        With `torch.distributed.checkpoint` every rank writes what it owns, and reads what it will own:

            optimizer.consolidate_state_dict(to=None)
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=folder)

            optimizer.consolidate_state_dict(to=None)  # nothing, where the optimizer is new
            state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=folder)
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            optimizer.consolidate_state_dict(to=None)  # needed with EKFAC alone: it samples in bases of other ranks

        On one process there is nothing to do.

        Args:
            to: the rank whose `state_dict()` then holds everything, as on one process, until the next step; the same on
                all ranks. It is counted within the group that trains together, as `dist.get_rank(group)` counts: of
                `dist.new_group([1, 3])` the first is 0. None leaves each layer's part whole on the one rank that owns
                it.

        Raises:
            RuntimeError: some rank has another `to`, or calls something else; or each rank has loaded a part of the
                state of layers that no forward has shown yet.
            ValueError: there is no such rank.
            CollectiveError: some rank never came.
        """
        if self._executor.several and (unseen := self._binding.pending.in_parts()):
            raise RuntimeError(
                f"kfac_optim: consolidate_state_dict() came before a forward has shown {listed(unseen, 4)}, of which "
                "each process has loaded a part. Run one forward with gradients on all of them before."
            )
        self._executor.consolidate(self._trained(), to)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint as `torch.optim` does; factors keep their own dtype.

        On several processes this is no collective, but every rank calls it, with the same checkpoint or with a part of
        it each. The next step brings what some rank has to the ranks that own it now, and each rank drops the rest.
        What no rank has starts from zero on all of them, with a warning. With `EKFAC`, where a rank reads a part, call
        `consolidate_state_dict(to=None)` on all ranks afterwards, or the statistics of the next step are dropped.

        Raises:
            ValueError: the checkpoint belongs to other layers, which are named, or to another optimizer, or is damaged;
                nothing is changed.
        """
        check_is_dict(state_dict)
        self._take_on_groups()
        # Last of the pre-hooks, so that it sees what the user's own hooks made of the checkpoint.
        handle = self.register_load_state_dict_pre_hook(_take_blocks)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            incoming, self._incoming = self._incoming, Incoming()
        self._warnings.unread = incoming.unread
        if incoming.warm:
            self._warnings.warm_start(keeps_momentum=not self._choices.step_size.directs_all)
        if incoming.averages and self._choices.average is None:
            self._warnings.averages_left(shown=averaging.shows_averages(incoming.averages))
        if not self._executor.several:  # otherwise another rank may have it
            checkpoint.warn_of_missed(incoming.missed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._window.discard()
        self._shows_state = False
        incoming = self._incoming
        self._memory.put(checkpoint.remembered(incoming.states))
        if not self._choices.step_size.directs_all:
            take_on_means(self.param_groups, self.state)
        if self._choices.average is not None:
            averaging.restore(self.state, incoming.averages)
        known, waiting = self._binding.take_on(incoming.states, incoming.marks)
        missing = checkpoint.missing(self._binding.coverage.blocks, known)
        self._executor.states.loading(missing)
        self._binding.restore(known, waiting)
        incoming.missed.extend(block.name for block, each in missing.items() if each.elsewhere)
        unseen = [state for state in waiting.values() if state["spread"] and "inverse" not in state]
        incoming.missed.extend(map(checkpoint.layer_name, unseen))
        self._binding.rebind(group_of(self.param_groups))
        trained = any(block.clock.step > 0 for block in self._binding.coverage.blocks)
        if trained or self._binding.pending.states() or self._record is not None:
            self._publish_blocks()
        elif all(each == {} for each in self.state.values()):  # as new: torch.distributed.checkpoint makes a state then
            self.state.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        """Take the model along into copies and pickles, as hooks bind the two. Copy or pickle both at once."""
        choices = {**self._choices.arguments(), "distributed": self._distributed, "grad_scaler": self._scaler.named}
        blocks = checkpoint.dump_all(self._binding.coverage.blocks) | self._binding.pending.states()
        keep_while_spawning(blocks)
        state = {} if self._shows_state else checkpoint.without_blocks(self.state)
        # One whose hooks were taken off is found by no forward.
        model = self._binding.model if self._binding.given or self._binding.released else None
        groups = [_as_given(group) for group in self.param_groups]
        rejected = 0 if self._judge is None else self._judge.rejected
        self._skipped.look()
        skipped = self._skipped.total + self._window.left_out
        counts = skipped, self._skipped.in_a_row, rejected, self._window.dropped_calls
        numbers = {key: self.defaults[key] for key in self._group_keys}
        flags = self._binding.released, self._scaler.was_named, self._memory.to_list()
        # Lightning Fabric's wrapper is of a class made of this one, its last base, but holds nothing: its copy is the
        # optimizer alone.
        kind = type(self) if "_binding" in self.__dict__ else type(self).__bases__[-1]
        return _rebuild, (kind, model, groups, numbers, choices, state, blocks, counts, *flags)

    # -- internals ---------------------------------------------------------------------------------------------

    def _step(self, evaluation: Evaluation) -> Admission | None:
        """Take the step, if the gate admits it, and return the admission.

        Args:
            evaluation: what the closure of the step gave.
        """
        judged = evaluation.trial is not None
        admission = self._gate.admit(self, judged=judged, is_first=self._record is None)
        if admission is None:
            return None
        agreement, blocks = admission.agreement, self._binding.coverage.blocks
        self._phases.lay_out(blocks)
        memory = self._memory.get(blocks, self._params())
        self._record = record = self._engine.step(
            self.param_groups, self.state, blocks, admission, memory, evaluation.elsewhere
        )
        self._memory.put(record.memory)
        suspects = {block.name for block in agreement.unaccounted}
        self._warnings.unaccounted_layers(self._binding.end_check(agreement.unaccounted))
        if agreement.sampled:
            self._memory.look(record.measures, self._window.step)
        self._binding.end_step()
        self._warnings.edited_gradients(agreement.edited)
        self._warnings.uneven_terms(agreement.terms)
        self._warnings.unseen_layers([name for name in record.unpreconditioned if name not in suspects])
        if not self._binding.released:
            self._warnings.stale_layers(record.stale)
        if not self._choices.step_size.directs_all:  # whose damping is relative: their number cancels
            self._warnings.assumed_terms(record.count, self._window.rule)
        self._warnings.mixed_terms(record.count)
        self._warnings.repeated_terms(record.count)
        self._warnings.missed_terms(record.count)
        return admission

    def _is_asked_for_state(self) -> bool:
        """Return whether this step is none of the training; see `new_state`."""
        is_new = self._record is None and not self.state and not self._binding.settled
        return is_new and new_state.asks_for_state(self.param_groups, self._window)

    def _show_state(self) -> None:
        """Make the state that there will be, until the next step or a checkpoint replaces it."""
        agreement, blocks = self._gate.prepare_state(self), self._binding.coverage.blocks
        memory = self._memory.get(blocks, self._params())
        new_state.make_state(
            self.param_groups, self.state, blocks, agreement, self._choices, self._executor, self._window, memory
        )
        self._shows_state = True
        self._publish_blocks()

    def _take_on_groups(self) -> None:
        """Take on param groups that were put in the place of others, as by tools that resume a run."""
        if not self._binding.knows(self.param_groups):
            group_checks.check_names(self.param_groups)
            self._binding.bind(group_of(self.param_groups))

    def _drop_shown_state(self) -> None:
        if self._shows_state:
            self._shows_state = False
            self.state.clear()

    def _params(self) -> list[nn.Parameter]:
        return params_of(self.param_groups)

    def _names(self) -> dict[nn.Parameter, str]:
        return names_of(self._binding, self.param_groups)

    def _trained(self) -> Trained:
        return Trained(self._binding.coverage.blocks, self._params(), self._names)

    def _publish_blocks(self) -> None:
        """Put the blocks' state where torch looks for it, until the next step."""
        self._publishes = True
        has_stepped = self._shows_state or self._record is not None
        keeps_directions = has_stepped and self._choices.step_size.keeps_direction(self.param_groups)
        published_state.publish(
            self.state,
            self.param_groups,
            self._binding.coverage.blocks,
            self._binding.pending.states(),
            self._executor,
            include_factors=self._choices.include_factors,
            keeps_directions=keeps_directions,
            remembered=self._memory.get(self._binding.coverage.blocks, self._params()),
        )


def _as_given(group: dict[str, Any]) -> dict[str, Any]:
    """Return the param group as it can be handed to an optimizer: torch keeps the names of named parameters apart."""
    given = {key: value for key, value in group.items() if key != "param_names"}
    if "param_names" in group:
        given["params"] = list(zip(group["param_names"], group["params"], strict=True))
    return given


def _rebuild(
    cls: type[KFACOptimizer],
    model: nn.Module | None,
    groups: list[dict[str, Any]],
    numbers: dict[str, Any],
    choices: dict[str, Any],
    state: dict[Any, Any],
    blocks: checkpoint.States,
    counts: tuple[int, int, int, int],
    released: bool,
    had_scaler: bool,
    memory: list[float] | None,
) -> KFACOptimizer:
    """Build the optimizer that `KFACOptimizer.__reduce__` took apart."""
    optimizer = cls.__new__(cls)
    # A model that holds its optimizer is still empty while both are copied: the first forward finds it.
    if model is not None and "_modules" not in vars(model):
        model = None
    params = [{"params": group["params"]} for group in groups]
    KFACOptimizer.__init__(optimizer, params, model=model, **numbers, **choices)
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        group.update((key, value) for key, value in given.items() if key != "params")  # edited, perhaps
    optimizer.state.update(state)
    known, waiting = optimizer._binding.take_on(*checkpoint.part(blocks))
    optimizer._binding.restore(known, waiting)
    total, in_a_row, rejected, optimizer._window.dropped_calls = counts
    optimizer._skipped.restore(total, in_a_row)
    if optimizer._judge is not None:
        optimizer._judge.rejected = rejected
    if released:
        optimizer.remove_hooks()
    if memory is not None:
        like = optimizer._memory.get(optimizer._binding.coverage.blocks, optimizer._params())
        optimizer._memory.put(torch.tensor(memory, dtype=like.dtype, device=like.device))
    optimizer._scaler.hold_weakly(was_named=had_scaler)
    return optimizer


def _take_blocks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Check a checkpoint and set the blocks' part of it aside."""
    assert isinstance(optimizer, KFACOptimizer)
    rest, optimizer._incoming = checkpoint_loading.read(
        state_dict,
        optimizer.param_groups,
        optimizer._group_keys,
        optimizer._binding,
        lambda groups: group_checks.check_groups(groups, optimizer._choices.step_size),
        several=optimizer._executor.several,
    )
    return rest
