"""Jobs that write files, for local processes or a cluster."""

from regauge.names import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    None,
    moved=dict.fromkeys(("Job", "JobsError", "Share", "dask", "processes", "run_jobs", "share_of"), "regauge.zoo"),
)
