"""The parity suite: the JAX and the PyTorch model against each other, against an f64 reference and against independent code.

    pytest parity/                all levels, tiny model, CPU
    pytest parity/ -m l3          one level
    pytest parity/ -k "torch"     one backend

Files in the order of blame: a fault in a module shows in level 1, its effect in the later ones.
"""
