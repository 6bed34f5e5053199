"""Translations of a traced model: offsets of values, propagated forward through its operators."""
