"""Networks are fitted to signals: one at the cost of its matrix products, or a population at once."""
