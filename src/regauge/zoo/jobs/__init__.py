"""Scale-out: pure jobs that leave files, on processes of one machine or on a cluster."""

from regauge.zoo.jobs.driver import Job, JobsError, Share, run_jobs, share_of
from regauge.zoo.jobs.executors import dask, processes

__all__ = ["Job", "JobsError", "Share", "dask", "processes", "run_jobs", "share_of"]
