"""Looking at a bus from outside: its bytes, its status, and what was left behind; never writes."""
