"""All-reduce algorithms on send and receive, one per file."""
