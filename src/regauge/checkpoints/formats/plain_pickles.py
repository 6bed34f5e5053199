"""A reader that returns pickles as plain records. The reader never imports or calls the names in a pickle.

A pickle is a program. This module interprets its instructions only to build dictionaries, lists, tuples, numbers,
strings and `Record`s. A `Record` stores the name of a class or function and the arguments of a call, but the call is
not made. A pickle may only contain names that the caller lists.
"""

import pickletools
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

MARK = object()
"""A stack entry that marks the beginning of several items."""
PLAIN = ("PROTO", "FRAME")
"""Instructions that have no effect."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
GIVEN = re.compile("BININT[12]?|LONG1|BINFLOAT|(SHORT_)?BIN(UNICODE|BYTES)")
"""Instructions that push their argument onto the stack."""
EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


MEMBER = "builtins.getattr"
"""A function by which some versions of Python name the members of an enumeration; its call is read as the member."""


@dataclass(frozen=True, eq=False)
class Name:
    """The name of a class or function, such as `torch.Size`."""

    path: str


@dataclass(eq=False)
class Record:
    """An object that a pickle describes: the name of a class or function, the arguments of the call, and the state."""

    path: str
    args: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)
    values: tuple[Any, ...] = ()


def read_pickle(content: bytes, allowed: Collection[str]) -> Any:
    """Return the object that a pickle describes, as plain values and records.

    Args:
        content: The pickle.
        allowed: Names that the pickle may contain, such as `torch.Size`.

    Raises:
        ValueError: The pickle is damaged, contains other names, or has instructions that are not needed for tensors.
    """
    machine = _Machine(frozenset(allowed))
    try:
        for code, arg, _ in pickletools.genops(content):
            if code.name == "STOP":
                (value,) = machine.stack
                return value
            machine.step(code.name, arg)
    except (IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is damaged ({type(error).__name__})") from error
    raise ValueError("it is cut off")


class _Machine:
    def __init__(self, allowed: frozenset[str]) -> None:
        self.stack: list[Any] = []
        self._numbered: dict[int, Any] = {}
        self._allowed = allowed

    def step(self, name: str, arg: Any) -> None:
        """Execute one instruction of the pickle."""
        stack = self.stack
        if name in PLAIN:
            return
        if name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif GIVEN.fullmatch(name):
            stack.append(arg)
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in TUPLES:
            stack.append(tuple(self._pop(TUPLES[name])))
        elif name == "MARK":
            stack.append(MARK)
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._marked()
            for key, value in zip(items[::2], items[1::2], strict=True):
                # Hashing a deeply nested tuple would not end.
                if not isinstance(key, str | int | Record):
                    raise TypeError
                stack[-1][key] = value
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._marked()
            if not isinstance(stack[-1], list):
                raise TypeError
            stack[-1].extend(items)
        elif name == "MEMOIZE":
            self._numbered[len(self._numbered)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._numbered[arg] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._numbered[arg])
        else:
            self._make(name, arg)

    def _make(self, name: str, arg: Any) -> None:
        stack = self.stack
        if name in ("GLOBAL", "STACK_GLOBAL"):
            module, own = arg.split(" ", 1) if name == "GLOBAL" else self._pop(2)
            path = f"{module}.{own}" if isinstance(module, str) and isinstance(own, str) else "?"
            if path not in self._allowed:
                raise ValueError(f"it refers to {path!r}, which a state dict does not need and which is not run")
            stack.append(Name(path))
        elif name in ("NEWOBJ", "REDUCE"):
            made, args = self._pop(2)
            if not isinstance(made, Name) or not isinstance(args, tuple):
                raise TypeError
            if made.path == MEMBER:
                if len(args) != 2 or not isinstance(args[0], Name) or not isinstance(args[1], str):
                    raise TypeError
                made, args = Name(f"{args[0].path}.{args[1]}"), ()
            stack.append(Record(made.path, args))
        elif name == "BUILD":
            (state,) = self._pop(1)
            if not isinstance(stack[-1], Record):
                raise TypeError
            if isinstance(state, dict):
                stack[-1].state.update(state)
            elif isinstance(state, tuple):
                stack[-1].values = state
            else:
                raise TypeError
        elif name == "BINPERSID":
            (about,) = self._pop(1)
            stack.append(Record("storage", about if isinstance(about, tuple) else ()))
        else:
            raise ValueError(f"it has the instruction {name}, which a state dict does not need")

    def _pop(self, count: int) -> list[Any]:
        items = self.stack[-count:]
        if len(items) < count or any(one is MARK for one in items):
            raise IndexError
        del self.stack[-count:]
        return items

    def _marked(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not MARK:
            place -= 1
            if place < 0:
                raise IndexError
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items
