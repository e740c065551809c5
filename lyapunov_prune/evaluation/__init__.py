"""What is left of a model: perplexity and speed."""
