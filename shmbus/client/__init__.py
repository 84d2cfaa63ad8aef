"""Groups from a daemon: the connection, and this process's leases."""
