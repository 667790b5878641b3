"""KV cache events."""
