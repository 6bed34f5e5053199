"""Relaxed elements: what methods optimize that do not choose one group after the other."""
