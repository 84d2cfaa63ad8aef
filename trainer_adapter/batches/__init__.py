"""Groups become a batch: packing, padding, flags of samples, and what is not finite."""
