"""Batches made on a GPU: one kernel reads the registered bus straight into device memory."""
