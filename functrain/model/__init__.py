"""A model as a pair of pure functions, and flax modules as such."""
