"""Mean-field variational inference, and measures of the share of a network that a posterior uses."""
