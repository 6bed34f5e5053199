"""Checkpoints whose files name, stack or split their tensors otherwise than their modules do."""
