"""The HTTP gateway: environments and trainers of Atropos and slime on a bus, by changing a URL."""
