"""Translations of a traced model: offsets of values carried forward through its operators."""
