"""TEMP"""
from contextlib import contextmanager
@contextmanager
def meeting(t):
    yield
class Watch:
    failure=None
    def __init__(self, world): self.world=world
    def start(self): pass
    def stop(self): pass
    def enter(self,*a): pass
    def leave(self): pass
    def look(self): pass
    def explained(self, e): return e
