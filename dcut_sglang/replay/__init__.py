"""Replay of any policy on recorded texts or traces, bounds on what a policy can reach, load."""
