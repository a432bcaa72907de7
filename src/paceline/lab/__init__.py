"""The lab: a cluster on one Linux machine. Nodes are namespaces; the kernel limits the speed of links."""
