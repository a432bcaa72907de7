"""What run folders say: statistics that admit what they do not know, scaling, where the time went, and warnings."""
