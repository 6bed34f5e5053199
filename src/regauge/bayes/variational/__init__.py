"""Mean-field variational inference, and measures of how much of a network its posteriors use."""
