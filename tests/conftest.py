"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says nothing of the code on a machine that does other work as well.
settings.register_profile("kvroute", deadline=None)
settings.load_profile("kvroute")
