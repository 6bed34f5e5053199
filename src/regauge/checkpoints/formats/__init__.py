"""Formats of checkpoint files: safetensors, torch files, adapters, and formats with quantized weights."""
