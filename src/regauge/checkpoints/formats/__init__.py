"""What lies in the files of checkpoints: headers, torch files, adapters, codes, and where the files lie."""
