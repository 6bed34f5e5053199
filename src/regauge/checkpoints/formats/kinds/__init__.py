"""Formats of the files of checkpoints: headers, torch files, adapters, codes, and the location of the files."""
