"""The parameter server: wire format, shards, leases, server and client."""
