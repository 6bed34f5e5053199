"""The type checker of the tests: argument types and tensor shapes of the library are checked at run time."""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

MODULES = (
    *(f"regauge.core.{name}" for name in ("act", "element", "families", "interpolation", "probe", "rotations")),
    *(f"regauge.core.{name}" for name in ("scales", "signs", "sphere", "units")),
    "regauge.canonical",
    "regauge.relaxed",
)
"""Modules whose annotations are checked. Other modules accept elements with unknown sizes, or refuse bad input
themselves."""

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def install() -> None:
    """Check annotations in all modules that are imported later."""
    install_import_hook(list(MODULES), "shape_checks.check")
