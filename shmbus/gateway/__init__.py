"""The HTTP gateway: environments and trainers of Atropos on a bus, by changing a URL."""
