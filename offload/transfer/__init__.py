"""Copies between an engine's pages and a lower tier: planned when submitted, run in order beside
the model. Imports torch."""
