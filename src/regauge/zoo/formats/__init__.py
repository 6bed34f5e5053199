"""Import of public model zoos, and export to files that other programs read.

An importer is a function that takes a path and some options of `regauge zoo import` by name. The options of importers
are `template`, `beside`, `architecture`, `inputs`, `activation` and `dataset`. The importer returns a `Source`. Other
packages add importers through the entry point `regauge.formats`.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    None,
    moved=dict.fromkeys(("EXPORTERS", "FORMATS", "Imported", "Source", "import_zoo", "importer"), "regauge.zoo"),
)
