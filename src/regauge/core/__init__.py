"""Parameters, groups, symmetries and their elements: torch and scipy only, no models and no files."""
