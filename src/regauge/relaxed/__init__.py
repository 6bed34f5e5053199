"""Relaxed elements, for methods that optimize all groups at once."""
