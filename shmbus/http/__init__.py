"""The common HTTP server of the gateway, the page and the metrics."""
