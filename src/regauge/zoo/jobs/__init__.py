"""Scale-out: pure jobs that leave files, on processes of one machine or on a cluster."""

from regauge.zoo.jobs.driver import Job, Share, run_jobs, share_of
from regauge.zoo.jobs.executors import dask, processes

__all__ = ["Job", "Share", "dask", "processes", "run_jobs", "share_of"]
