"""Checkpoints whose files name, stack or split tensors differently from their modules."""
