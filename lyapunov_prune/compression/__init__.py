"""What a weight matrix can be replaced by: one file a method."""
