"""Training: descent on a loss, with plain and stacked parameters; schedules, optimizers, initializations."""
