"""Kinds of adapters other than LoRA, one family of kinds per file."""
