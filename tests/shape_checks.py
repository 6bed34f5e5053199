"""The type checker of the tests: argument types and tensors' shapes of the library proper, checked as it runs."""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

MODULES = (
    *(f"regauge.core.{name}" for name in ("act", "element", "families", "interpolation", "probe", "rotations")),
    *(f"regauge.core.{name}" for name in ("scales", "signs", "sphere", "units")),
    "regauge.canonical",
    "regauge.relaxed",
)
"""Modules whose annotations are checked; others take elements whose sizes are not known yet, or refuse bad input."""

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def install() -> None:
    """Check annotations in modules that are imported from now on."""
    install_import_hook(list(MODULES), "shape_checks.check")
