"""Emulated compute: a rank waits as long as a device would compute, and its gradients become ready as they would."""
