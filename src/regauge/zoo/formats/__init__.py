"""Import of public zoos, and export to files that other programs read.

An importer is a function of a path and of some options of `regauge zoo import`, passed by name: `template`, `beside`,
`architecture`, `inputs`, `activation` and `dataset`. It returns a `Source`. Other packages add importers through the
entry point `regauge.formats`.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    None,
    moved=dict.fromkeys(("EXPORTERS", "FORMATS", "Imported", "Source", "import_zoo", "importer"), "regauge.zoo"),
)
