"""The layers of a network, found by the indices in the names of its tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from regauge.checkpoints.names.prefixes import LAYER


@dataclass(frozen=True)
class LayerStack:
    """A stack of layers: the prefix of the layers' names before the index, and the number of layers."""

    prefix: str
    count: int

    @classmethod
    def of(cls, names: Iterable[str], label: str, stack: str | None = None) -> "LayerStack":
        """Find the layers of a network's only stack, or of the stack whose name contains `stack`.

        Args:
            names: The tensor names of the network.
            label: The name of the network in error messages.
            stack: Components of the stack's name, joined by dots, such as "encoder".

        Raises:
            ValueError: No stack matches, or several stacks match.
        """
        stacks: dict[str, set[int]] = {}
        for name in names:
            found = LAYER.search(name)
            if found is not None:
                stacks.setdefault(name[: found.start(1)], set()).add(int(found[1]))
        chosen = [one for one in stacks if stack is None or f".{stack}." in f".{one}"]
        if len(chosen) != 1:
            listed = ", ".join(one.removesuffix(".") for one in chosen or stacks)
            if not stacks:
                what = "has no layers with numbers, and 'slices' cannot be cut; name whole 'models'"
            elif stack is None:
                what = (
                    f"has several stacks of layers ({listed}): name the one that is cut under 'modules', such as "
                    f"modules: {{{_shortest(chosen[0], chosen)}: {{slices: ...}}}}"
                )
            else:
                what = (
                    f"has {'several stacks' if chosen else 'no stack'} of layers called {stack!r}; there are {listed}"
                )
            raise ValueError(f"{label} {what}")
        return cls(chosen[0], max(stacks[chosen[0]]) + 1)

    def split(self, name: str) -> tuple[int, str] | None:
        """Return the layer index of a tensor and the remainder of the tensor's name. Return None for tensors outside of
        layers.
        """
        if not name.startswith(self.prefix):
            return None
        number, dot, rest = name.removeprefix(self.prefix).partition(".")
        return (int(number), dot + rest) if number.isdigit() else None


def _shortest(stack: str, stacks: Sequence[str]) -> str:
    """Return the first component of a stack's name that no other stack's name contains. If there is none, return the
    whole name.
    """
    others = {part for one in stacks if one != stack for part in one.split(".")}
    return next((part for part in stack.split(".") if part and part not in others), stack.removesuffix("."))
