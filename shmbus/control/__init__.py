"""What a daemon and its clients share: messages, the socket, and asking a daemon once."""
