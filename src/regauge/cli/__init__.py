"""The command line: parse first, import torch after."""
