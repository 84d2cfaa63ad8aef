"""Groups from a daemon: the connection to it, and the leases that this process holds."""
