"""Goldens: what the float64 NumPy reference says, kept in files, so that no change of a dependency, of a backend or of the reference goes unseen.

    python -m parity.goldens                       derives all of them anew and shows how the files differ
    python -m parity.goldens --write REASON        replaces the files; the reason and the old hashes go into the manifest

Inputs are not stored: they come from seeds, and the manifest holds their hashes. Outputs of up to 512 numbers are stored whole, larger ones as
maximum, norm and 16 projections on random signs. No backend takes part in making them, and pytest never writes them.
"""
