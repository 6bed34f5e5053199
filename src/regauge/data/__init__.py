"""Data sets as tensors, with checksums."""
