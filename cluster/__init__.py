"""Connects. Ray: placement, the scheduler actor, worker actors and the client handle."""
