"""Populations of networks: trained, stored, imported, aligned."""
