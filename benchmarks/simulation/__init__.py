"""Replicas of the simulated engine behind the router's own decision code, in virtual time."""
