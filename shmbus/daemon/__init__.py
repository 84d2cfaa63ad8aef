"""The daemon: one process that reads a bus and leases complete groups to many trainers.

Client and server know each other by ``shmbus.messages`` only. The client is synchronous and lives
in a Consumer; the server runs on uvloop, and is started by ``shmbus serve``.
"""
