"""Alignment of checkpoints that do not fit in memory: a plan, sweeps over the files, and a resumable state."""
