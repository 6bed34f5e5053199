"""Figures and self-contained HTML pages, from result files only."""
