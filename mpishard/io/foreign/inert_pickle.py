"""Pickles read as data: what one would look up, call or change is kept as names, and nothing of that is done.

A pickle is a program. Here its calls become records of what would be called with what, so no class, function or
module of this process is touched, whatever the pickle says; who reads it takes the few fields that it knows. Hashes
are never taken of what it holds, and one that repeats itself beyond its own length (a memo bomb) is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

# how much longer than the pickle what it says may be, written out
_REPEATED = 16
_SLACK = 1 << 16


class RefusedError(Exception):
    """It holds what data do not hold."""


class Name(NamedTuple):
    """What would be looked up."""

    module: str
    name: str


class Record:
    """What would be made: by a call of ``kind`` with ``args``, then changed by ``state``."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: Name, args: Any) -> None:
        self.kind, self.args, self.state = kind, args, None

    def fields(self) -> dict[str, Any]:
        """Return what its attributes would be; RefusedError where they have no names."""
        if not isinstance(self.state, Pairs) or not all(isinstance(key, str) for key, _ in self.state):
            raise RefusedError(f"a {self.kind.name} without names of its fields")
        return dict(self.state)


class Pairs(list[tuple[Any, Any]]):
    """A dict, whose keys may be anything."""


def read(raw: bytes, is_known: Callable[[Name], bool]) -> Any:
    """Return what a pickle holds, made of plain values, lists, tuples, `Pairs`, `Name` and `Record`.

    Not collective.

    Parameters
    ----------
    raw
        The pickle.
    is_known
        Whether a name may be in it.

    Raises
    ------
    RefusedError
        It asks for an unknown name, changes what it did not make, holds itself, or is a memo bomb.
    Exception
        It is damaged.
    """
    whole = _read(raw, is_known)
    _weigh(whole, _REPEATED * len(raw) + _SLACK)
    return whole


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": Pairs, "EMPTY_SET": list}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _read(raw: bytes, is_known: Callable[[Name], bool]) -> Any:
    stack: list[Any] = []
    below: list[list[Any]] = []
    memo: dict[int, Any] = {}

    def marked() -> list[Any]:
        nonlocal stack
        items, stack = stack, below.pop()
        return items

    arg: Any
    for opcode, arg, _ in pickletools.genops(raw):
        op = opcode.name
        if op in _VALUES:
            stack.append(arg)
        elif op in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(arg)] = stack[-1]
        elif op == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(arg)])
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op == "MARK":
            below.append(stack)
            stack = []
        elif op in _TUPLES:
            stack[-_TUPLES[op] :] = [tuple(stack[-_TUPLES[op] :])]
        elif op == "TUPLE":
            items = marked()
            stack.append(tuple(items))
        elif op in ("LIST", "FROZENSET"):
            items = marked()
            stack.append(items)
        elif op == "DICT":
            items = marked()
            stack.append(Pairs(zip(items[::2], items[1::2])))
        elif op == "APPEND":
            _of(stack[-2], list).append(stack.pop())
        elif op in ("APPENDS", "ADDITEMS"):
            items = marked()
            _of(stack[-1], list).extend(items)
        elif op == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _of(stack[-1], Pairs).append((key, value))
        elif op == "SETITEMS":
            items = marked()
            _of(stack[-1], Pairs).extend(zip(items[::2], items[1::2]))
        elif op in ("GLOBAL", "STACK_GLOBAL"):
            name = Name(*arg.split(" ", 1)) if op == "GLOBAL" else Name(*[stack.pop(), stack.pop()][::-1])
            if not is_known(name):
                raise RefusedError(f"it asks for {name.module}.{name.name}, which could run code")
            stack.append(name)
        elif op in ("REDUCE", "NEWOBJ"):
            args = stack.pop()
            stack.append(Record(_of(stack.pop(), Name), args))
        elif op == "BUILD":
            state = stack.pop()
            _of(stack[-1], Record).state = state
        elif op == "POP":
            stack.pop()
        elif op == "STOP":
            return stack[-1]
        elif op not in ("PROTO", "FRAME"):
            raise RefusedError(f"it has the instruction {op}, which data do not need")
    raise RefusedError("it has no end")


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise RefusedError(f"it changes or calls a {type(value).__name__}")
    return value


def _weigh(whole: Any, most: int) -> None:
    """Count what it holds as often as it is held, without walking there more than once."""
    weight: dict[int, int] = {}
    path: list[tuple[Any, list[Any]]] = []
    open_ids: set[int] = set()

    def enter(value: Any) -> None:
        if id(value) in open_ids:
            raise RefusedError("it holds itself")
        open_ids.add(id(value))
        path.append((value, [child for child in _children(value) if _children(child)]))

    enter(whole)
    while path:
        value, left = path[-1]
        if left:
            child = left.pop()
            if id(child) not in weight:
                enter(child)
            continue
        path.pop()
        open_ids.remove(id(value))
        total = 1 + sum(weight.get(id(child), 1) for child in _children(value))
        if total > most:
            raise RefusedError("it repeats itself beyond all measure (a memo bomb)")
        weight[id(value)] = total


def _children(value: Any) -> Any:
    if isinstance(value, Record):
        return (value.args, value.state)
    return value if type(value) in (list, tuple, Pairs) else ()
