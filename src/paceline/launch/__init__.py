"""Starting ranks, finding out which one this is, and watching over them."""
