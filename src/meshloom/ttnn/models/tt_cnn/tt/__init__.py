"""Pipelines and executors, by the names that TTNN has them under."""
