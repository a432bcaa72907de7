"""Emulated compute: a rank sleeps as long as a device would compute; gradients become ready at the same times."""
