"""The loops: run, evaluate, predict."""
