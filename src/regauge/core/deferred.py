"""Elements of a symmetry whose sizes are not known yet: they are made when they act on parameters."""

from collections.abc import Callable, Iterator

from regauge.core.element import Element, Value
from regauge.core.groups import Group

Make = Callable[[tuple[Group, ...]], Element]


class DeferredElement(Element):
    """An element of a symmetry written by hand, as a function of the groups with their sizes."""

    def __init__(self, make: Make, batch: tuple[int, ...]) -> None:
        super().__init__({}, batch)
        self.make = make

    def __getitem__(self, name: str) -> Value:
        raise self._unknown()

    def __iter__(self) -> Iterator[str]:
        raise self._unknown()

    def __len__(self) -> int:
        raise self._unknown()

    def __repr__(self) -> str:
        return f"DeferredElement(batch={self.batch})"

    @staticmethod
    def _unknown() -> ValueError:
        return ValueError(
            "this element belongs to a hand-written symmetry whose sizes are not known yet, so it has no values; act "
            "with it on parameters, or take elements from `symmetry.bind(params)`"
        )


def materialize(element: Element, groups: tuple[Group, ...]) -> Element:
    """Make an element now if it was deferred; return any other as it is."""
    return element.make(groups) if isinstance(element, DeferredElement) else element
