"""The same work done by functrain and by what a user would otherwise pick, side by side."""
