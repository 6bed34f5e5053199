"""The methods of alignment, one file each."""
