"""Optimizers, schedules, losses, metrics and constraints, both ways."""
