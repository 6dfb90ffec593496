"""Measuring a running server from outside: processes, clients, waves, statistics."""
