"""State of models, optimizers and schedulers as JSON, with the tensors set apart: no pickle, no code in files.

What JSON has no word for (tuples, numbers as keys, infinities) becomes an object with one key that starts with
``$``. Nothing that is read can name a class or a function: only the kinds of this table come out.
"""

from __future__ import annotations

import base64
import enum
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpishard.errors import FileError, MpishardError, UnsupportedDtypeError
from mpishard.io.file.trust import shown

Keys = tuple[Any, ...]
# of dicts in dicts and the like: Python's own limit must not be met half way
DEPTH = 64
# Python writes and reads no longer integers as text
_MOST = 10**4300

DTYPES = {
    str(d).removeprefix("torch."): d
    for d in sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
    if not str(d).startswith(("torch.q", "torch.bits"))
}


def encode(value: Any, keys: Keys, tensors: dict[str, Tensor]) -> Any:
    """Return ``value`` in JSON's types; its tensors are put into ``tensors``, named after where they were.

    Not collective.

    Parameters
    ----------
    value
        Tensors, numbers, strings and their like, and dicts, lists, tuples and sets of them.
    keys
        Where it lies, for names and errors: ``("optimizer", "state", 0)``.
    tensors
        Name -> tensor, extended.

    Raises
    ------
    MpishardError
        There is something else in it.
    """
    kind = type(value)
    if kind is int and not -_MOST < value < _MOST:
        raise MpishardError(
            f"save_checkpoint: {'/'.join(map(str, keys))} is too long for JSON",
            expected="an integer of at most 4300 digits",
            got=f"one of {value.bit_length()} bits",
            fix="store it as text, e.g. hex(x), or as bytes",
        )
    if value is None or kind in (bool, int, str):
        return value
    if len(keys) > DEPTH:
        raise MpishardError(
            f"save_checkpoint: {'/'.join(map(str, keys[:4]))}/... is nested too deep",
            expected=f"at most {DEPTH} levels",
            got="more of them, or something that holds itself",
            fix="store it flat",
        )
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return {"$tensor": _named(keys, value, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"$numpy": _named(keys, _from_numpy(value, keys), tensors)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        item = value.item()
        if isinstance(item, np.generic):  # Python has no such number
            raise _foreign(value.dtype, keys)
        return encode(item, keys, tensors)
    if isinstance(value, Counter):
        return {"$counter": [[encode(k, keys, tensors), encode(n, (*keys, "n"), tensors)] for k, n in value.items()]}
    if isinstance(value, Mapping):
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: encode(v, (*keys, k), tensors) for k, v in value.items()}
        # before they are named after their text, which not every key has
        named = [encode(k, keys, tensors) for k in value]
        return {"$dict": [[k, encode(v, (*keys, p), tensors)] for k, (v, p) in zip(named, _distinct(value))]}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [encode(v, (*keys, i), tensors) for i, v in enumerate(value)]
        kinds = {tuple: "$tuple", frozenset: "$frozenset", set: "$set"}
        return items if isinstance(value, list) else {next(kinds[k] for k in kinds if isinstance(value, k)): items}
    if kind is complex:
        return {"$complex": [encode(value.real, keys, tensors), encode(value.imag, keys, tensors)]}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum) and isinstance(value, (int, str)):
        return encode(value.value, keys, tensors)
    raise MpishardError(
        f"save_checkpoint: {'/'.join(map(str, keys))} cannot be stored without pickle",
        expected="tensors, numbers, strings, bytes, None, and dicts, lists, tuples and sets of them",
        got=f"{kind.__module__}.{kind.__qualname__}",
        fix="leave it out of the state, or store the numbers that it is made of",
    )


def _from_numpy(value: np.ndarray[Any, Any], keys: Keys) -> Tensor:
    native = np.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(value.shape)
    try:
        return torch.from_numpy(native)
    except TypeError as e:
        raise _foreign(value.dtype, keys) from e


def _foreign(dtype: np.dtype[Any], keys: Keys) -> UnsupportedDtypeError:
    return UnsupportedDtypeError(
        f"save_checkpoint: {'/'.join(map(str, keys))} has a dtype that torch lacks",
        expected="numbers of numpy that torch or Python have too",
        got=dtype,
        fix="convert them, e.g. with numpy.float64",
    )


def _distinct(value: Mapping[Any, Any]) -> list[tuple[Any, str]]:
    """Return the values of a dict, each with a name of its own: 1 and "1" are two keys."""
    taken, out = {k for k in value if type(k) is str}, []
    for k, v in value.items():
        part = str(k)
        while type(k) is not str and part in taken:
            part += "~"
        taken.add(part)
        out.append((v, part))
    return out


def _named(keys: Keys, value: Tensor, tensors: dict[str, Tensor]) -> str:
    name = "/".join(map(_part, keys))
    while name in tensors:
        name += "~"
    tensors[name] = value
    return name


def _part(key: Any) -> str:
    # one key, one level of the file: a name with a slash could be another one's group
    text = str(key).replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    # half a surrogate pair is no text for HDF5
    text = re.sub("[\ud800-\udfff]", lambda half: f"%{ord(half[0]):X}", text)
    return {"": "%", ".": "%2E", "..": "%2E%2E"}.get(text, text)


def items(path: Any, value: Any) -> dict[Any, Any]:
    """Return a dict's items, of what `encode` made of it: keys as they were, values as they lie in JSON.

    Not collective.

    Raises
    ------
    FileError
        It was no dict. The checkpoint at ``path`` is named.
    """
    tag = next(iter(value), "") if isinstance(value, dict) else "$"
    if not tag.startswith("$"):
        return value  # type: ignore[no-any-return]
    if tag != "$dict":
        raise FileError(
            f"load_checkpoint: {path} is damaged",
            expected="a dict of tensors, of a model or of an optimizer",
            got=shown(value),
            fix="load another checkpoint (fallback=True)",
        )
    # a tensor may be a key, too
    return {decode(k, (), lambda name, _: name): v for k, v in value[tag]}  # type: ignore[arg-type,return-value]


def decode(value: Any, keys: Keys, tensor: Callable[[str, Keys], Tensor]) -> Any:
    """Return what `encode` was given; ``tensor(name, keys)`` returns its tensors.

    Not collective, unless ``tensor`` is; called in the same order wherever the JSON is the same.

    Raises
    ------
    FileError
        It is not what `encode` returns.
    """
    if isinstance(value, list):
        return [decode(v, (*keys, i), tensor) for i, v in enumerate(value)]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {k: decode(v, (*keys, k), tensor) for k, v in value.items()}
    try:
        (content,) = value.values()
        return _decoded(tag, content, keys, tensor)
    except MpishardError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
        raise FileError(
            f"load_checkpoint: {'/'.join(map(str, keys))} is damaged",
            expected="what save_checkpoint writes",
            got=f"{tag} ({type(e).__name__}: {e})",
            fix="load another checkpoint (fallback=True)",
        ) from e


def _decoded(tag: str, content: Any, keys: Keys, tensor: Callable[[str, Keys], Tensor]) -> Any:
    if tag == "$tensor":
        return tensor(content, keys)
    if tag == "$numpy":
        return tensor(content, keys).cpu().numpy()
    if tag == "$float":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[content]
    if tag == "$complex":
        return complex(*(decode(c, keys, tensor) for c in content))
    if tag == "$bytes":
        return base64.b64decode(content, validate=True)
    if tag == "$dtype":
        return DTYPES[content]
    if tag == "$counter":
        return Counter({decode(k, keys, tensor): decode(n, keys, tensor) for k, n in content})
    if tag == "$dict":
        pairs = [(decode(k, keys, tensor), v) for k, v in content]
        return {k: decode(v, (*keys, k), tensor) for k, v in pairs}
    kind: Any = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag]
    return kind(decode(v, (*keys, i), tensor) for i, v in enumerate(content))
