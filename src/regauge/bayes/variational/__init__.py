"""Mean-field variational inference, and how much of a network its posteriors use."""
