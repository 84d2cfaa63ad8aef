"""The daemon: one process that reads a bus and leases complete groups to many trainers.

`server` owns the event loop, `connection` one client's socket, `service` the decisions. Client and
daemon share only ``shmbus.control``. ``shmbus serve`` starts a daemon.
"""
