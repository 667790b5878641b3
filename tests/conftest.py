"""Settings for every test."""

from __future__ import annotations

from hypothesis import settings

# On a machine with other load, the time an example takes says nothing about the code.
settings.register_profile("kvroute", deadline=None)
settings.load_profile("kvroute")
