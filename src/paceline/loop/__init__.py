"""What a user's own training loop uses: data parallelism, parts of batches, sums over ranks, records."""
