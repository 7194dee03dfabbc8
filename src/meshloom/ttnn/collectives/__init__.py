"""Literal collectives, their asynchronous spellings, experts, and the groups that they go over."""
