"""The command line. Options are parsed before torch is imported."""
