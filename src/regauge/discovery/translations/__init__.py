"""Translations of a traced model: changes of its values, propagated forward through its operators."""
