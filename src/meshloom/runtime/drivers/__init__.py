"""Drivers of cards that are not in this process: each puts one kind of card behind the protocols of `runtime/card.py`.

`docs/cards.md` says how to write one.
"""
