"""Pi0.5 in PyTorch (plain nn.Modules). Mirrors jax_backend file by file and name by name."""
