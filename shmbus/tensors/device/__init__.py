"""Memory that processes share, of a CUDA device or the host: allocated here, exported once."""
