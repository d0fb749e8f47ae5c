"""Checks of the numbers a user passes. Each error names the argument, what it got and what it should be."""

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from kfac_optim.utils.text import shown

_LARGEST = torch.finfo(torch.float32).max
_SCHEDULE = " A number that changes is set by a scheduler: see HyperparameterScheduler."
_FACTOR_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    scheduled: bool = False,
) -> None:
    """Raise TypeError for what is not a real number, ValueError for one out of range (or NaN).

    Args:
        name: the name of the number.
        value: the number.
        above: what it must be above.
        at_least: what it must be at least.
        at_most: what it must be at most.
        scheduled: whether a scheduler can change it.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"kfac_optim: {name} must be a number, got {shown(value)}.{_SCHEDULE * (scheduled and callable(value))}"
        )
    number = float(value)
    if not (math.isfinite(number) and number > above and at_least <= number <= at_most):
        bounds = [f"above {above:g}"] if above > -math.inf else []
        bounds += [f"at least {at_least:g}"] if at_least > -math.inf else []
        bounds += [f"at most {at_most:g}"] if at_most < math.inf else []
        allowed = ", ".join(["finite", " and ".join(bounds)] if bounds else ["finite"])
        raise ValueError(f"kfac_optim: {name} must be {allowed}, got {shown(value)}.")


def check_integer(name: str, value: object, *, at_least: int = 1, scheduled: bool = False) -> None:
    """Raise TypeError for what is not an integer, ValueError for one below `at_least`; arguments as `check_number`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"kfac_optim: {name} must be an integer, got {shown(value)}.{_SCHEDULE * (scheduled and callable(value))}"
        )
    if int(value) < at_least:
        raise ValueError(f"kfac_optim: {name} must be at least {at_least}, got {shown(value)}.")


def check_kfac_numbers(group: Mapping[str, Any], where: str) -> None:
    """Check what may be edited between steps, of SGD's numbers only that they are finite; every step can afford it."""
    for name in ("lr", "momentum", "dampening", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) and name in ("lr", "weight_decay"):
            if value.numel() != 1:
                raise ValueError(f"kfac_optim: a tensor {name}{where} must have 1 element, got {value.numel()}.")
            if value.is_meta:
                raise ValueError(f"kfac_optim: a tensor {name}{where} must have a value, got one on the meta device.")
            if value.is_complex() or value.dtype is torch.bool:
                raise TypeError(f"kfac_optim: a tensor {name}{where} must be a real number, got {value.dtype}.")
            if value.device.type == "cpu":  # for any other the host would have to wait
                check_number(f"{name}{where}", float(value))
        elif type(value) not in (float, int) or not -_LARGEST <= value <= _LARGEST:
            check_number(f"{name}{where}", value)  # numbers.Real takes longer to ask
            if abs(value) > _LARGEST:
                raise ValueError(
                    f"kfac_optim: {name}{where} must be within ±{_LARGEST:.1e}, as float32 makes more infinite, got "
                    f"{value!r}."
                )
        elif type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError(f"kfac_optim: {name}{where} must be a float where it is as large as {value!r}.")
    for name in ("nesterov", "maximize", "l2_in_curvature", "foreach", "fused"):
        check_flag(f"{name}{where}", group[name], optional=name in ("foreach", "fused"))
    check_number(f"damping{where}", group["damping"], above=0, scheduled=True)
    if group["preconditioner_damping"] is not None:
        check_number(
            f"preconditioner_damping{where} (None is damping)", group["preconditioner_damping"], above=0, scheduled=True
        )
    check_number(f"factor_decay{where}", group["factor_decay"], above=0, at_most=1, scheduled=True)
    check_integer(f"factor_update_period{where}", group["factor_update_period"], scheduled=True)
    check_integer(f"inverse_update_period{where}", group["inverse_update_period"], scheduled=True)
    if group["kl_clip"] is not None:
        check_number(f"kl_clip{where} (None turns it off)", group["kl_clip"], above=0, scheduled=True)


def check_group(group: Mapping[str, Any], where: str = "") -> None:
    """Check every number of a param group, with `optim.SGD`'s rules for its own.

    Args:
        group: the group, with all defaults filled in.
        where: the text that is appended to names in messages, as in `" in param group 1"`.
    """
    for name in ("lr", "momentum", "weight_decay"):
        value = group[name]
        if isinstance(value, Tensor) and name != "momentum" and value.numel() == 1 and not value.is_meta:
            value = float(value)
        if not isinstance(value, Tensor):  # of others the next line tells
            check_number(f"{name}{where}", value, at_least=0)
    check_kfac_numbers(group, where)
    if group["l2_in_curvature"] and isinstance(group["weight_decay"], Tensor):
        raise TypeError(f"kfac_optim: weight_decay{where} must be a number with l2_in_curvature=True, got a tensor.")
    check_number(f"dampening{where}", group["dampening"])
    if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise ValueError(
            f"kfac_optim: nesterov{where} requires momentum above 0 and dampening 0, got "
            f"momentum={group['momentum']!r} and dampening={group['dampening']!r}."
        )
    if group["foreach"] and group["fused"]:
        raise ValueError(f"kfac_optim: foreach and fused{where} cannot both be True; set one of them.")


def plain_number(value: Any) -> Any:
    """Turn numpy's scalars into Python's, which `torch.load(weights_only=True)` reads; leave anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def check_flag(name: str, value: object, *, optional: bool) -> None:
    if not (isinstance(value, bool) or (optional and value is None)):
        allowed = "True, False or None" if optional else "True or False"
        raise TypeError(f"kfac_optim: {name} must be {allowed}, got {shown(value)}.")


def check_loss(loss: object) -> None:
    """Raise TypeError unless what a closure returned is one number, in a tensor or not."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex():
        return
    if isinstance(loss, bool) or not isinstance(loss, Real):
        got = f"a tensor {list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else shown(loss)
        raise TypeError(f"kfac_optim: the closure must return the loss, one number, and returned {got}.")


def check_closure(closure: object) -> None:
    """Raise unless `closure` is None or can be called."""
    if closure is not None and not callable(closure):
        raise TypeError(
            "kfac_optim: step() takes None, or a closure that evaluates the model and returns the loss, got "
            f"{shown(closure)}."
        )


def check_terms(terms: object) -> None:
    """Raise unless these are a number of terms, or a tensor that has one, whose value is not waited for."""
    if not isinstance(terms, Tensor):
        check_number("terms", terms, above=0)
    elif terms.numel() != 1:
        raise ValueError(f"kfac_optim: terms must be a number or a 1-element tensor, got {list(terms.shape)}.")
    elif terms.is_complex() or terms.is_meta or terms.dtype is torch.bool:
        what = "on the meta device" if terms.is_meta else f"of {terms.dtype}"
        raise TypeError(f"kfac_optim: terms must be a real number, got a tensor {what}.")


def as_float(name: str, value: Any) -> float:
    """Return the number that `value` is, in a tensor or not; infinity is one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"kfac_optim: {name} must be a number, got {shown(value)}.") from None


def check_dtype(name: str, value: object) -> None:
    """Raise unless `value` is None or a floating dtype with the range that squared gradients need."""
    if value is not None and not isinstance(value, torch.dtype):
        raise TypeError(f"kfac_optim: {name} must be a torch.dtype or None, got {shown(value)}.")
    if value is not None and value not in _FACTOR_DTYPES:
        raise ValueError(
            f"kfac_optim: {name} must be one of {', '.join(map(str, _FACTOR_DTYPES))} (float16 cannot hold squared "
            f"gradients), got {value}."
        )


def check_kind(name: str, value: object, kind: type, remedy: str = "") -> None:
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        words = instance_remedy(value, kind) or (remedy and f" {remedy}")
        raise TypeError(f"kfac_optim: {name} must be {article} {kind.__name__}, got {shown(value)}.{words}")


def instance_remedy(value: object, *kinds: type) -> str:
    """Return a remedy, after a space, where a class was given in place of an instance of `kinds`; otherwise nothing."""
    return f" Pass an instance: {value.__name__}(...)." if isinstance(value, type) and issubclass(value, kinds) else ""


def given_model(params: object, model: nn.Module | None) -> nn.Module | None:
    """Return the module that the optimizer was given as `params` or as `model`; None if it was given parameters alone.

    Raises:
        TypeError: the two are different modules, or of a wrong kind.
    """
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
