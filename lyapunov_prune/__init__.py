"""How compression errors travel through a transformer language model."""
