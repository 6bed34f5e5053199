"""What lies on disk: checkpoints, populations, architectures."""
