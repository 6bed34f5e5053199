"""Heads, which compute outputs from features.

Each head has a frozen dataclass of settings, whose method `build` creates a torch module.

The input of a head's module is a `Read`. To add a head, write a file with the dataclass and the module, and add the
dataclass to `HEADS`.
"""

from regauge.weightspace.heads.equivariant import Equivariant
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.heads.unit_features import UnitFeatures

Head = Invariant | Equivariant | UnitFeatures

HEADS: dict[str, type[Head]] = {"invariant": Invariant, "equivariant": Equivariant, "unit_features": UnitFeatures}
"""Head classes by their names on the command line."""
