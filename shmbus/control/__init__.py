"""The shared part of daemon and clients: messages, the socket, and single requests."""
