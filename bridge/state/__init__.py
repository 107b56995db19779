"""A model's variables as a state, and back."""
