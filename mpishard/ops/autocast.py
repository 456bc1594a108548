"""Autocast for rules that do not call torch's own function on every block: tensors and results get torch's dtype.

A rule that runs torch's function on blocks is cast by torch. One that moves cells, composes its result of other
functions, or stands in for empty blocks, is not. What torch would do depends on device and version: a tensor of one
cell tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpishard.ops.rule.autocast import autocast_enabled
from mpishard.ops.rule.reduction import HALVES
from mpishard.tensor.registry import RULES, spellings

_CAST = (*HALVES, torch.float32)
# for which torch has kernels on every device
_EVERYWHERE = (torch.float32, torch.float64)
# called with the tensors, and with all arguments
Probe = Callable[..., Tensor]


def _cells(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=x.dtype, device=x.device)


def _pad(
    tensors: Sequence[Tensor], input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Tensor:
    return F.pad(_cells(input, *(1,) * input.ndim), (0,) * len(pad), mode)


def _unpool(ndim: int) -> Probe:
    def probe(tensors: Sequence[Tensor], *_args: Any, **_named: Any) -> Tensor:
        x = _cells(tensors[0], *(1,) * (ndim + 2))
        return getattr(F, f"max_unpool{ndim}d")(x, torch.zeros_like(x, dtype=torch.int64), 1)

    return probe


_PROBES: dict[str, Probe] = {
    "corrcoef": lambda t, *_, **__: torch.corrcoef(_cells(t[0], *(2,) * t[0].ndim)),
    "cosine_embedding_loss": lambda t, *_, **__: F.cosine_embedding_loss(
        _cells(t[0], 1, 1), _cells(t[1], 1, 1), torch.ones(1, device=t[0].device)
    ),
    "cosine_similarity": lambda t, *_, **__: F.cosine_similarity(_cells(t[0], 1), _cells(t[1], 1), 0),
    "cumulative_trapezoid": lambda t, *_, **__: torch.cumulative_trapezoid(*(_cells(x, 2) for x in t)),
    "gaussian_nll_loss": lambda t, *_, **__: F.gaussian_nll_loss(*(_cells(t[i % len(t)], 1) for i in range(3))),
    "grid_sample": lambda t, *_, **__: F.grid_sample(
        _cells(t[0], 1, 1, 1, 1), _cells(t[1], 1, 1, 1, 2), align_corners=False
    ),
    "index_copy": lambda t, *_, **__: torch.index_copy(
        _cells(t[0], 1), 0, torch.zeros(1, dtype=torch.int64, device=t[0].device), _cells(t[-1], 1)
    ),
    "local_response_norm": lambda t, *_, **__: F.local_response_norm(_cells(t[0], *(1,) * t[0].ndim), 1),
    "max_unpool1d": _unpool(1),
    "max_unpool2d": _unpool(2),
    "max_unpool3d": _unpool(3),
    "nanmean": lambda t, *_, dtype=None, **__: torch.nanmean(_cells(t[0], 1), dtype=dtype),
    "pad": _pad,
    "prelu": lambda t, *_, **__: torch.prelu(_cells(t[0], 1), _cells(t[1], 1)),
    "trace": lambda t, *_, **__: torch.trace(_cells(t[0], 1, 1)),
    "trapezoid": lambda t, *_, **__: torch.trapezoid(*(_cells(x, 2) for x in t)),
    "trapz": lambda t, *_, **__: torch.trapezoid(*(_cells(x, 2) for x in t)),
    "triplet_margin_loss": lambda t, *_, **__: F.triplet_margin_loss(*(_cells(x, 1, 1) for x in t)),
    "vecdot": lambda t, *_, **__: torch.linalg.vecdot(_cells(t[0], 1), _cells(t[1], 1)),
}
for _ndim in (1, 2, 3):
    _PROBES[f"adaptive_avg_pool{_ndim}d"] = lambda t, *_, _ndim=_ndim, **__: getattr(F, f"adaptive_avg_pool{_ndim}d")(
        _cells(t[0], *(2,) * (_ndim + 1)), 2
    )
for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _suffix, _ndim in (("", 1), ("2", 2), ("n", 1)):
        _PROBES[_name + _suffix] = lambda t, *_, _name=_name + _suffix, _ndim=_ndim, **__: getattr(torch.fft, _name)(
            _cells(t[0], *(2,) * _ndim)
        )


_ONE_CELL = [(own,) for n in (1, 2, 3) for own in (1, (1,) * n, [1] * n)]

# calls whose dtypes torch does not refuse; strings are the caller's
_MOST_TAKEN = 4096
_taken: set[Any] = set()


def _require_taken(name: str, probe: Probe, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise what torch raises of operands of these dtypes. Not collective: the same on every rank."""
    given = (*args, *kwargs.values())
    if name.startswith("adaptive_avg_pool") and given[1:] in _ONE_CELL:
        return  # torch takes the mean, of complex numbers too
    tensors = [a for a in given if isinstance(a, Tensor)]
    key = (name, *(t.dtype for t in tensors), *(a for a in given if isinstance(a, (str, torch.dtype))))
    if key in _taken or any(t.layout is not torch.strided for t in tensors):
        return
    try:
        with torch.no_grad():
            probe(tensors, *args, **kwargs)
    except NotImplementedError:
        raise
    except RuntimeError as e:
        if _of_dtype(str(e)):
            raise
    except Exception:  # noqa: BLE001 (of other arguments, which the rule looks at)
        pass
    if len(_taken) >= _MOST_TAKEN:
        _taken.clear()
    _taken.add(key)


def _of_dtype(text: str) -> bool:
    """Tell whether an error is about a dtype, not about shapes that are not those of the caller."""
    return any(word in text for word in ("dtype", "type ", "bool", "Bool", "floating", "integral", "complex", "Long"))


def _in_autocast(rule: Callable[..., Any], name: str, probe: Probe) -> Callable[..., Any]:
    @wraps(rule)
    def cast(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
            if not args or getattr(args[0], "dtype", None) not in _EVERYWHERE:
                _require_taken(name, probe, args, kwargs)
            return rule(*args, **kwargs)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not any(t.dtype in _CAST for t in tensors) or not autocast_enabled(tensors[0].device.type):
            return rule(*args, **kwargs)
        with torch.no_grad():
            dtype = probe(tensors, *args, **kwargs).dtype
        dtype = dtype.to_real()
        if dtype not in _CAST:
            return rule(*args, **kwargs)
        if dtype not in HALVES:
            args = tuple(_to(a, dtype) for a in args)
            kwargs = {k: _to(a, dtype) for k, a in kwargs.items()}
        # what is narrowed is computed in the wider type
        return _to(rule(*args, **kwargs), dtype)

    return cast


def _to(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST and x.dtype != dtype else x


def install() -> None:
    """Put the casts in front of the rules that need them. Not collective."""
    for name, probe in _PROBES.items():
        for function in spellings(name):
            if function in RULES:
                RULES[function] = _in_autocast(RULES[function], name, probe)
