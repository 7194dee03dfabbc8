"""Seeing what will run and what did run: explain, record, forbid, and pictures. Torch is not imported."""
