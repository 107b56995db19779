"""What may happen around a loop."""
