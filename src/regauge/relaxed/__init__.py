"""Relaxed elements, which are optimized by methods that choose all groups at once."""
