"""Signals over a run: what is broken in a text, when a run goes wrong, and what the user is told of it."""
