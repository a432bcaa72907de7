"""Ways to make one sum out of every rank's tensor: one algorithm a file, over send and receive."""
