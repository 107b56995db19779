"""States, losses, and steps: what one batch does to a state."""
