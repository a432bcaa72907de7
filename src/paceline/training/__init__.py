"""The training loop and what it needs: sampler, input, learning rate, trace, weights."""
