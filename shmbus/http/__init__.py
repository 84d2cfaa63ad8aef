"""The one HTTP server: the gateway, the page and the metrics use it."""
