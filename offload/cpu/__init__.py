"""The CPU tier: what it holds and evicts (`manager`, `policies`), and the copies to and from the
GPU."""
