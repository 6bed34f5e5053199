"""Formats of checkpoint files: headers, torch files, adapters, quantization codes, and the location of the files."""
