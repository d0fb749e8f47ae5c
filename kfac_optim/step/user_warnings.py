"""Warnings of what a training loop's user may not expect, shown at the line that led to them."""

from collections.abc import Collection, Sequence

from torch import nn

from kfac_optim.blocks.block import KFACBlock
from kfac_optim.blocks.model_binding import ModelBinding
from kfac_optim.capture.loss_terms import LossCount
from kfac_optim.capture.scale_probe import ScaleChange
from kfac_optim.specs import LossTerms
from kfac_optim.step.step_size import PlainSteps
from kfac_optim.utils.text import listed
from kfac_optim.utils.warning import warn

_PASS_MODEL = (
    " The model had to be found while a forward of it was running, which torch.compile may have been tracing already; "
    "if you compile it, pass it: KFACOptimizer(model, ...)."
)


class UserWarnings:
    """Warns of what is preconditioned and what is not; what every step could repeat is said once.

    Args:
        finds_model: whether the optimizer was given parameters, and has to find the model.
        plain: what becomes of gradients that are not preconditioned.

    Attributes:
        unread: parameters that a loaded checkpoint has momentum of and nothing else, until it is said of which layers.
    """

    def __init__(self, *, finds_model: bool, plain: PlainSteps) -> None:
        self._plain = plain
        self.given: set[str] = set()  # names of the warnings that are not given again
        self.unread: Collection[nn.Parameter] = ()
        self._remedy = _PASS_MODEL if finds_model else ""

    def _is_first(self, name: str) -> bool:
        first = name not in self.given
        self.given.add(name)
        return first

    def coverage(self, binding: ModelBinding) -> None:
        """Warn if nothing is preconditioned, against the user's wish."""
        if binding.model is None:
            warn(
                f"kfac_optim: nothing is preconditioned and every parameter takes the plain {self._plain.rest} step: "
                "no call of a module that holds the parameters was seen since the optimizer was built, as when a "
                "model has already run under torch.compile. Pass the model: KFACOptimizer(model, ...). What no "
                "module holds, as what torch.func.stack_module_state returns, is not preconditioned."
            )
        elif binding.does_nothing():
            warn(
                f"kfac_optim: nothing is preconditioned; every parameter takes the plain {self._plain.rest} step. "
                "optimizer.summary() lists the reasons."
            )

    def unread_layers(self, blocks: Sequence[KFACBlock]) -> None:
        """Say once of each layer whose statistics were not read from a checkpoint that it begins from zero."""
        if found := [block for block in blocks if block.params[0] in self.unread]:
            self.unread = set(self.unread).difference(block.params[0] for block in found)
            names = [block.name for block in found]
            warn(
                "kfac_optim: the checkpoint that was loaded has momentum of KFACOptimizer and "
                f"has no statistics of {listed(names, 4)}, which begin from zero. torch.distributed.checkpoint.load "
                "reads what there is a place for, and a new optimizer has none for layers that it does not know yet. "
                "Pass the model, KFACOptimizer(model, ...), or run one forward with gradients before you call "
                "get_optimizer_state_dict(model, optimizer) to load. Layers that only a function call shows, as "
                "Hugging Face's Conv1D, need the forward."
            )

    def unmeasured(self, reason: str) -> None:
        """Warn of parameters that were to be preconditioned until now."""
        warn(f"kfac_optim: {reason}; it takes the plain {self._plain.rest} step.{self._remedy}")

    def partial_checkpoint(self, lacking: str, remedy: str) -> None:
        warn(f"kfac_optim: this state_dict() lacks {lacking}: a run resumed from it differs from this run. {remedy}")

    def warm_start(self, *, keeps_momentum: bool) -> None:
        """Warn of what a checkpoint of torch's SGD has and has not.

        Args:
            keeps_momentum: whether its momentum is of use here.
        """
        taken = (
            "its momentum and the numbers of its param groups are taken over"
            if keeps_momentum
            else "the numbers of its param groups are taken over, its momentum is not, since it is a sum and this step "
            "size keeps a mean; set lr anew, as this step size takes AdamW's rates and lr is now SGD's"
        )
        warn(
            f"kfac_optim: the checkpoint is of torch.optim.SGD: {taken}; statistics and inverses, which it has none "
            "of, begin from zero at the next step."
        )

    def averages_left(self, *, shown: bool) -> None:
        """Warn of averages that a checkpoint holds and the optimizer does not.

        Args:
            shown: whether the model held them, and so the checkpoint of the model does.
        """
        if shown:
            warn(
                "kfac_optim: the checkpoint was saved after optimizer.eval(), and this optimizer averages nothing: a "
                "model loaded with it holds the averages of its parameters, and the trained ones, which are in the "
                "checkpoint of the optimizer, were left. To go on from these build the optimizer with "
                "average=IterateAverage(), load both checkpoints, and then call optimizer.train()."
            )
        else:
            warn(
                "kfac_optim: the checkpoint holds averages of the parameters, and this optimizer averages nothing: "
                "they were left. Pass average=IterateAverage() to go on with them."
            )

    def no_gradients(self) -> None:
        if self._is_first("unseen"):
            warn(
                "kfac_optim: no parameter has a gradient, and no module that holds them was called since the optimizer "
                "was built. If fully_shard was called, it has replaced these: build the optimizer afterwards."
            )

    def unseen_layers(self, names: Sequence[str]) -> None:
        if names and self._is_first("unseen"):
            warn(
                f"kfac_optim: {_take(names, 'gradients but no statistics', self._plain.layer)}. One of these is why. "
                "(1) No finite statistics came yet, or zero_grad() came between their backward and the step. (2) The "
                "layer was parametrized or pruned since, or was given another parameter; one that is tied to another "
                "layer's is measured from the next period on. (3) Its forward or backward is out of sight: torch.func "
                "inside of what is compiled, torch.cond, a loop such as scan, gradients from autograd.grad, torch's "
                "compiled autograd, or a forward of its own that multiplies by something else than its weight. (4) A "
                "graph that torch.compile made of a model without these hooks is taken for this one: call "
                "torch._dynamo.reset() before the optimizer is built. (5) The estimate names the loss, and its output "
                "is not found (under torch.compile call the criterion that the estimate names, outside of what is "
                "compiled), or the criterion reads another output of the same forward (call optimizer.observe() on "
                "what the loss reads there), or the layer is checkpointed with use_reentrant=True (pass "
                "use_reentrant=False). optimizer.summary() tells what is measured; later such steps are counted in "
                f"metrics()['unpreconditioned_blocks'].{self._remedy}"
            )

    def stale_layers(self, names: Sequence[str]) -> None:
        """Say once which layers were measured before, and are seen no more."""
        if names and self._is_first("stale"):
            warn(
                f"kfac_optim: {listed(names, 4)}: there are gradients, and statistics were due and have not come. The "
                "inverse stays that of earlier statistics and may not fit any more. The usual causes are a model that "
                "was compiled after its first step (compile it before), gradients from autograd.grad or by hand "
                "(call loss.backward()), a zero_grad() between backward and step(), and a penalty as all that is left "
                "of the layer in the loss. metrics()['factor_age'] counts the steps since. If inverses are to stay as "
                "they are, call optimizer.remove_hooks()."
            )

    def assumed_terms(self, count: LossCount, rule: LossTerms) -> None:
        if count.assumed and self._is_first("assumed"):
            read = "the largest batch that a layer was handed, summed over the backwards that came to it"
            if rule in (LossTerms.POSITIONS, LossTerms.ELEMENTS):
                read = f"the {rule.name.lower()} of the output of the last layer"
            warn(
                f"kfac_optim: the number of terms that the loss is averaged over is taken to be {count.averaged}, "
                f"{read}: layers ran outside the model's own forward (another method or a part of the model was "
                f"called), or loss_terms={rule} finds no tensor with a dimension to read it off. If it is another "
                "number, call optimizer.set_loss_terms(n) before backward(), which ends this warning as well; the "
                "numbers of several calls in one step add up."
            )

    def untold_terms(self, counted: int | None, rule: LossTerms) -> None:
        """Say once that a stage of a pipeline has read the terms off its own output, for want of the last one's."""
        if counted and rule in (LossTerms.POSITIONS, LossTerms.ELEMENTS) and self._is_first("untold"):
            warn(
                f"kfac_optim: loss_terms={rule} reads the number of terms of the loss off the output of the last stage "
                "of a pipeline, and that stage has told no number, as where none of its layers is measured. The number "
                f"is taken to be {counted}, which the output of this stage has. Call optimizer.set_loss_terms(n) on "
                "this stage before backward(), with n as the last output has it."
            )

    def mixed_terms(self, count: LossCount) -> None:
        """Say once that a criterion computes a part of the loss only."""
        if count.mixed and self._is_first("mixed"):
            warn(
                "kfac_optim: the loss calls the criterion that estimate names on some outputs of the model, and uses "
                "others without it. In G these are taken to have terms of the same kind, at a scale of their own, and "
                "are left out where the model is compiled; QuadraticModel and LevenbergMarquardt leave them out. "
                "Compute all terms by that criterion, or call optimizer.observe() on what the others read."
            )

    def repeated_terms(self, count: LossCount) -> None:
        """Say once that a term of the loss is weighed as in its first backward."""
        if count.repeated and self._is_first("repeated"):
            warn(
                "kfac_optim: backward came more than once through what one call of the criterion that estimate names "
                "has returned. Its term counts in G as the first backward weighed it. Add up the losses and call "
                "backward once, or call the criterion for each backward."
            )

    def missed_terms(self, count: LossCount) -> None:
        """Say once that something was observed that is no part of the loss."""
        if count.missed and self._is_first("missed"):
            warn(
                "kfac_optim: optimizer.observe() was given a tensor that backward did not come to, or did not go on "
                "from, and its term is left out of the curvature. Compute the loss from the very tensor that is "
                "observed: r = output - target; optimizer.observe(r); loss = r.square().mean(). Of a distribution that "
                "is its logits, or its mean and scale."
            )

    def unaccounted_layers(self, names: Sequence[str]) -> None:
        """Say which layers are left to SGD since their captured calls do not add up to their gradient."""
        if names:
            warn(
                f"kfac_optim: {_take(names, 'gradients of which only a part was captured', self._plain.rest)} from now "
                "on. What backward adds to .grad is not the sum of output gradients times inputs over the forward "
                "calls that were seen. One of these is why. (1) The loss holds a derivative of the model, or "
                "torch.func is used, and the layer is no linear layer, convolution or embedding, or the weights are an "
                "argument of what is differentiated (close over them instead), or it is done within what is compiled, "
                "or behind activation checkpointing or hooks on saved tensors. (2) A custom autograd.Function uses the "
                "weight. (3) The loss has a penalty on the weights other than their squares, absolute values or "
                "distance from orthogonality: add its gradient to .grad after backward. (4) A hook changes the "
                "gradient of the layer's output."
            )

    def edited_gradients(self, edited: bool) -> None:
        if edited and self._is_first("edited"):
            warn(
                "kfac_optim: gradients were changed in place between backward and step, as by "
                "torch.nn.utils.clip_grad_norm_. Under Sharded() .grad on each process holds the mean of "
                "some layers alone, so its norm is not that of the whole gradient and differs from process to process. "
                "Call optimizer.clip_grad_norm_(max_norm) instead. (Clipping by value is right. If all gradients were "
                "divided by one number, divide the loss by it instead: the statistics do not see the division.)"
            )

    def uneven_terms(self, terms: tuple[int, int] | None) -> None:
        """Warn where processes count different numbers of loss terms; `terms` are the least and the most of them."""
        if terms is not None and terms[0] != terms[1] and self._is_first("uneven"):
            warn(
                f"kfac_optim: the processes have counted different numbers of loss terms, from {terms[0]} to "
                f"{terms[1]}, and each takes its loss to be the mean over its own. Where it is a share of the sum, as "
                "sum * processes / total, the factor G is wrong. State on every process what one gradient is to be "
                "multiplied by, before backward: optimizer.set_loss_terms(total / processes) with such a loss, or "
                "optimizer.set_loss_terms(n) with the mean over the n terms that it has."
            )

    def unknown_scale(self, found: ScaleChange) -> None:
        """Say that gradients were multiplied by a small number, of which nothing shows what it is."""
        if found.is_doubtful and self._is_first("doubted"):
            warn(
                "kfac_optim: between backward and step() the gradients were multiplied by a number far below 1. It is "
                "taken for clipping, which leaves the statistics as they are. If a loss scale is in it, the statistics "
                "are too large by its square: call scaler.step(optimizer), or name the scaler, "
                "KFACOptimizer(..., grad_scaler=scaler)."
            )

    def short_steps(self, step_size: object, advice: str) -> None:
        """Warn of a trust region that made nearly all steps too short."""
        warn(
            f"kfac_optim: {step_size} made nearly all of the last hundred steps shorter than the learning rate does, "
            f"so that neither the rate nor a schedule of it has an effect. {advice}"
        )


def _take(names: Sequence[str], having: str, plain: str) -> str:
    """Say that layers, all of them by name, have something and go without preconditioning."""
    listed, step = ", ".join(map(repr, names)), f"the plain {plain} step"
    if len(names) == 1:
        return f"1 layer has {having} and takes {step} ({listed})"
    return f"{len(names)} layers have {having} and take {step} ({listed})"
