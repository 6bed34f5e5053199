"""Heads, which read the features of networks: each a small frozen dataclass whose `build` makes a torch module.

A built head takes a `Read`. To add a head, write a file with the dataclass and the module, and add the dataclass to
`HEADS`.
"""

from regauge.weightspace.heads.equivariant import Equivariant
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.heads.unit_features import UnitFeatures

Head = Invariant | Equivariant | UnitFeatures

HEADS: dict[str, type[Head]] = {"invariant": Invariant, "equivariant": Equivariant, "unit_features": UnitFeatures}
"""Name on the command line to class."""
