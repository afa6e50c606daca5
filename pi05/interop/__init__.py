"""Published checkpoints, read and written: openpi's JAX and PyTorch ones, LeRobot's, and our own."""
