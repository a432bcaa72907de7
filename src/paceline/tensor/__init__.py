"""Tensor parallelism: the weights of a wide layer lie in parts on the ranks of a group, its shards."""
