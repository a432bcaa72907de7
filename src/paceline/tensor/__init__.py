"""Tensor parallelism: the weights of a wide layer are divided over the ranks of a group, its shards."""
