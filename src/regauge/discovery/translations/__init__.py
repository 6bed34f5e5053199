"""Search for translations of a traced model: vectors are added, and changes are followed through operators."""
