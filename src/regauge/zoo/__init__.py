"""Populations of networks: training, storage, import and alignment."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    __file__,
    moved={"Config": "regauge.zoo:PopulationConfig"}
    | dict.fromkeys(("Choice", "Initialization", "LogUniform", "Uniform"), "regauge.training")
    | dict.fromkeys(("SGD", "Adam", "AdamW", "Constant", "Cosine", "OneCycle", "StepDecay"), "regauge.training")
    | dict.fromkeys(("Architecture", "Store"), "regauge.storage")
    | {"Map": "regauge.zoo.populations.maps", "Universe": "regauge.zoo.populations.universe"}
    | {"FORMATS": "regauge.zoo.formats.importer_table", "plan_comparison": "regauge.zoo.jobs.compare_blocks"}
    | {"Job": "regauge.zoo.jobs.driver", "Share": "regauge.zoo.jobs.driver", "dask": "regauge.zoo.jobs.executors"},
)
