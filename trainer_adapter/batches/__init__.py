"""From groups to a batch: packing, padding, flags of samples, and the check for finite values."""
