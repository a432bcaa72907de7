"""What a model is trained for: the loss of a batch, what it is divided by, and a metric."""
