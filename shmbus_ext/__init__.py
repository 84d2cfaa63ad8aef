"""The C core of shmbus. Its byte layout is in LAYOUT.md, its types are in _core.pyi."""
