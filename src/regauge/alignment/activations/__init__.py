"""Costs from what networks compute: statistics of activations, streamed over batches."""
