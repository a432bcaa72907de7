"""The lab: a cluster on one Linux machine. Nodes are namespaces, links have a speed that the kernel keeps."""
