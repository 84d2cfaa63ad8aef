"""Memory of a CUDA device that several processes share: allocated here, exported once."""
