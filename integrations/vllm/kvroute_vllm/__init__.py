"""A plug-in for what vLLM does not do by itself for a router that knows every cache.

    hints          what a request names as worth keeping; pure
    recognition    whether this vLLM is one that the plug-in knows
    layout         vLLM's cache in the terms of `kvevents`
    retention      vLLM's cache manager and scheduler keep what is named
    publisher      vLLM's events through the publisher of `kvevents`
    plugin         what vLLM calls when it starts

Nothing here raises an exception into a running engine. A vLLM that is not recognised stays as it
is.
"""
