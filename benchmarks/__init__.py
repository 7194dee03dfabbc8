"""What meshloom costs beside the same work on one dense torch tensor, and beside DTensor. Start with `run.py`."""
