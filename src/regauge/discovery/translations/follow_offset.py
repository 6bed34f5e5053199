"""Follow an offset of one parameter through the operators of a traced model.

Operators that move values move its entries alike, and linear ones map it by their weights. An offset ends at an
operator that does not see it (a softmax of scores that all change alike, a LayerNorm of features that all change
alike), or at a parameter that takes it back. Whatever else it meets sees it.
"""

from regauge.core.translations import Entries, Image
from regauge.discovery.translations.effects import EFFECTS
from regauge.discovery.translations.graph import Graph
from regauge.discovery.translations.offsets import Addend, SeenError
from regauge.discovery.translations.run import Run


def follow(
    graph: Graph, start: Addend, home: str, takers: frozenset[str]
) -> tuple[tuple[Image, ...], frozenset[Entries]] | None:
    """Find what makes up for a vector that is added to a parameter; None where something sees it.

    Returned with it are the gains by which the vector must be divided along the axis that is constant: layers read
    through the parameter behind them, or offsets that are the same for all units are multiplied by them.

    Args:
        graph: The model.
        start: The vector, with places in the shape of the whole parameter.
        home: The parameter.
        takers: Parameters that may take offsets back.
    """
    for is_eager in (False, True):
        run = Run(graph, home, takers, EFFECTS, is_eager=is_eager)
        try:
            return run.follow(start), run.gains
        except (SeenError, RuntimeError, ValueError, IndexError):
            # An operator that cannot be called on offsets says nothing about them, so that it may see them.
            if not run.is_missed:
                return None
    return None
