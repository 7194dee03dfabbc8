"""Pipelines for convolutional models."""
