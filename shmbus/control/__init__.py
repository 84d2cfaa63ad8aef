"""What a daemon and its clients share: messages, the socket, and one question to a daemon."""
