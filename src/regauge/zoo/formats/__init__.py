"""Import and export: public zoos in, and files that other programs read out.

An importer is a function of a path, and of those options of `regauge zoo import` that it takes, by their names:
`template`, `beside`, `architecture`, `inputs`, `activation` and `dataset`. It returns a `Source`. Other packages add
importers by the entry point `regauge.formats`.
"""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    None,
    moved=dict.fromkeys(("EXPORTERS", "FORMATS", "Imported", "Source", "import_zoo", "importer"), "regauge.zoo"),
)
