"""What engines are told to keep, by the router that knows where prompts part.

Engines keep windows and states sparsely: at the end of a prompt, and where a hit was cut short.
What will be asked for next only shows in the requests of the whole fleet.

The files; each imports only what is listed above it:

    fading.py     a ratio in which the past fades
    branches.py   where prompts part, and whether sessions go on
    tails.py      where a new prompt will part from later ones
    tenant.py     both, and which kinds of boundary pay, of one tenant's prompts
    steering.py   what is told with a request, and what came of it
"""

from router.mirror import STEP
from router.steering.steering import NO_HINTS, Hints, Steering, SteeringStatistics
from router.steering.tenant import MOST_BOUNDARIES, Said

__all__ = [
    "MOST_BOUNDARIES",
    "NO_HINTS",
    "STEP",
    "Hints",
    "Said",
    "Steering",
    "SteeringStatistics",
]
