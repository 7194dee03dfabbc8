"""TEMP"""
def compare(kind, group, data): pass
