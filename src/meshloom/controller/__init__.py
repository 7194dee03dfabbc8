"""A client that decides and workers that do: `launch`."""
